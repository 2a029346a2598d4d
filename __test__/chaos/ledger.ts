/** Owns the promises of a run: what is pending, since when, and what took too long. */

/**
 * The longest that a call may be pending. A start under a stopped template waits five seconds before it falls back, each cell
 * before it in the queue is over in two, and on a busy machine half a dozen cold starts of IPython share the cores.
 */
const DEADLINE_MS = 45_000;

export interface Pending {
  what: string;
  since: number;
  late(message: string): void;
  told: boolean;
}

export class Ledger {
  readonly #pending = new Set<Pending>();
  settled = 0;
  longestMs = 0;

  get pending(): number {
    return this.#pending.size;
  }

  /** Runs `then` with the outcome, exactly once. The promise that comes back is fulfilled once that has been done. */
  async track<Value>(
    what: string,
    promise: Promise<Value>,
    late: (message: string) => void,
    then: (outcome: PromiseSettledResult<Value>) => void,
  ): Promise<void> {
    const entry: Pending = { what, since: performance.now(), late, told: false };
    this.#pending.add(entry);
    const [outcome] = await Promise.allSettled([promise]);
    this.#pending.delete(entry);
    this.settled += 1;
    this.longestMs = Math.max(this.longestMs, performance.now() - entry.since);
    then(outcome);
  }

  /** Tells of each call that has not been settled in its time, once. */
  check(): void {
    for (const entry of this.#pending) {
      if (entry.told || performance.now() - entry.since < DEADLINE_MS) continue;
      entry.told = true;
      entry.late(`${entry.what} was not settled within ${DEADLINE_MS / 1e3} s`);
    }
  }

  /** Whether any call is still in its time. */
  get waiting(): boolean {
    return [...this.#pending].some(({ told }) => !told);
  }
}
