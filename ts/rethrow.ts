/** What a listener throws is its owner's to see, by Node's ordinary rules, and must not stop whoever called it. */
export function rethrowLater(error: unknown): void {
  process.nextTick(() => {
    throw error;
  });
}

/** Calls a listener; goes on whatever it throws. */
export function attempt(listener: () => void): void {
  try {
    listener();
  } catch (error) {
    rethrowLater(error);
  }
}
