/** How long listeners may keep the event loop in one turn: short, because replies and timers wait for the turn to end. */
const TURN_MS = 1;

/**
 * Shares the event loop between listeners of outputs and everybody else. Listeners are called in the turn in which an output
 * arrives; once they have had their time in it, the rest waits for the next turns, one queue in each.
 */
export class Turns {
  #end: number | null = null;
  #waiting: (() => void)[] = [];

  /** Whether the time in this turn is used up. Asked before or after each call of a listener. */
  isOver(): boolean {
    const now = performance.now();
    if (this.#end === null) this.#begin(now);
    return now >= (this.#end ?? now);
  }

  /** Resolves in a later turn, after those who asked before. */
  next(): Promise<void> {
    return new Promise((resolve) => {
      this.#waiting.push(resolve);
      if (this.#end === null) this.#begin(performance.now());
    });
  }

  #begin(now: number): void {
    this.#end = now + TURN_MS;
    setImmediate(this.#over);
  }

  readonly #over = (): void => {
    this.#end = null;
    const next = this.#waiting.shift();
    if (next === undefined) return;
    this.#begin(performance.now());
    next();
  };
}

/** One for all kernels of a thread: it is the thread's event loop that they share. */
export const turns: Turns = new Turns();
