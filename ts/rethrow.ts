/**
 * What a listener throws is its owner's to see, by Node's ordinary rules, and must not stop whoever called it.
 *
 * A microtask and not a tick: a tick that throws makes Node leave the other ticks for later, and events would overtake
 * the callers that wait for replies before them.
 */
export function rethrowLater(error: unknown): void {
  queueMicrotask(() => {
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
