/**
 * Hands the outputs of one cell to a listener, one after the other, each after the listener is done with the one before.
 * Gives credit back for what is done, so that a slow listener slows the cell and never fills the daemon's memory, and gives
 * the event loop back now and then, so that a slow one does not hold up everybody else.
 */

import type { NativeOutput } from './native.ts';
import { type Output, toOutput } from './result.ts';
import { rethrowLater } from './rethrow.ts';
import { turns } from './turns.ts';
import { WaitingOutputs } from './waiting-outputs.ts';

export class OutputQueue {
  readonly #listener: (output: Output) => unknown;
  readonly #credit: (bytes: number) => void;
  readonly #waiting: WaitingOutputs;
  #busy = false;
  #drained: (() => void) | null = null;

  constructor(listener: (output: Output) => unknown, credit: (bytes: number) => void) {
    this.#listener = listener;
    this.#credit = credit;
    this.#waiting = new WaitingOutputs(credit);
  }

  readonly push = (output: NativeOutput, bytes: number): void => {
    this.#waiting.push(output, bytes);
    if (!this.#busy) void this.#run();
  };

  /** Resolves when the listener is done with every output pushed so far. */
  drained(): Promise<void> {
    if (!this.#busy) return Promise.resolve();
    return new Promise((resolve) => {
      this.#drained = resolve;
    });
  }

  /** Stays synchronous while the listener does and the turn is not over: an output reaches it in the tick it arrived in. */
  async #run(): Promise<void> {
    this.#busy = true;
    if (turns.isOver()) await turns.next();
    for (let next = this.#waiting.shift(); next !== undefined; next = this.#waiting.shift()) {
      try {
        const done = this.#listener(toOutput(next.output));
        if (isThenable(done)) await settled(done);
      } catch (error) {
        rethrowLater(error);
      }
      this.#credit(next.bytes);
      if (turns.isOver() && !this.#waiting.isEmpty) await turns.next();
    }
    this.#busy = false;
    this.#drained?.();
    this.#drained = null;
  }
}

function isThenable(value: unknown): value is PromiseLike<unknown> {
  return typeof value === 'object' && value !== null && 'then' in value && typeof value.then === 'function';
}

/** Waits for either end. A rejection becomes an ordinary unhandled rejection, as if nobody had looked. */
async function settled(done: PromiseLike<unknown>): Promise<void> {
  try {
    await done;
  } catch (error) {
    void Promise.reject(error);
  }
}
