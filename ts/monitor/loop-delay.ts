/**
 * How late the daemon's event loop is: a timer that measures by how much it was late itself.
 *
 * Node's `monitorEventLoopDelay` would do, but for its `reset()`, which forgets when it last looked: a block that begins in
 * the instant after a snapshot is then never told.
 */

const EVERY_MS = 10;

export class LoopDelay {
  readonly #timer: NodeJS.Timeout;
  #last = performance.now();
  #most = 0;

  constructor() {
    this.#timer = setInterval(() => this.#look(), EVERY_MS).unref();
  }

  /** By how much the loop was late at most since the last call, in milliseconds. */
  take(): number {
    this.#look();
    const most = this.#most;
    this.#most = 0;
    return most;
  }

  stop(): void {
    clearInterval(this.#timer);
  }

  #look(): void {
    const now = performance.now();
    this.#most = Math.max(this.#most, now - this.#last - EVERY_MS);
    this.#last = now;
  }
}
