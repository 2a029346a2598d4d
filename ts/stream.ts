/** The outputs of a cell as an async iterable. */

import { KernelHostError } from './errors.ts';
import type { NativeOutput } from './native.ts';
import { type CellResult, type Output, toOutput } from './result.ts';
import { turns } from './turns.ts';
import { WaitingOutputs } from './waiting-outputs.ts';

export interface CellStream extends AsyncIterable<Output> {
  /** Settles when the cell is over, however the loop was left. */
  readonly result: Promise<CellResult>;
}

/**
 * Credit for an output is given back when the consumer asks for the next one: a consumer that is slow slows the cell.
 * Leaving the loop early interrupts the cell. A stream whose `result` is awaited without a loop drops its outputs,
 * because nobody would ever ask for the next one and the cell would wait for ever.
 */
export class OutputStream implements CellStream {
  readonly #result: Promise<CellResult>;
  readonly #credit: (bytes: number) => void;
  readonly #cancel: () => void;
  readonly #waiting: WaitingOutputs;
  #owed = 0;
  #mode: 'untouched' | 'reading' | 'left' | 'dropping' = 'untouched';
  #over = false;
  #wakes: (() => void)[] = [];

  constructor(
    run: (push: (output: NativeOutput, bytes: number) => void) => { result: Promise<CellResult>; cancel: () => void },
    credit: (bytes: number) => void,
  ) {
    this.#credit = credit;
    this.#waiting = new WaitingOutputs(credit);
    const { result, cancel } = run(this.#push);
    this.#cancel = cancel;
    this.#result = result;
    const over = () => {
      this.#over = true;
      this.#wakeReader();
    };
    // Handled here for good: the loop throws a rejection, or `result` does for those who ask for it.
    result.then(over, over);
  }

  get result(): Promise<CellResult> {
    // A loop that begins in the same turn, or has begun, keeps the outputs.
    if (this.#mode === 'untouched') setImmediate(() => this.#drop());
    return this.#result;
  }

  [Symbol.asyncIterator](): AsyncIterator<Output, undefined> {
    if (this.#mode !== 'untouched') {
      throw new KernelHostError(
        'ERR_STREAM_CONSUMED',
        this.#mode === 'dropping'
          ? 'The outputs of this stream were dropped, because its result was awaited without reading them. Read the stream first.'
          : 'This stream has been read already. A cell is run once; keep its outputs, or use its result.',
      );
    }
    this.#mode = 'reading';
    return {
      next: () => this.#read(),
      return: async () => {
        this.#leave();
        return { done: true, value: undefined };
      },
    };
  }

  readonly #push = (output: NativeOutput, bytes: number): void => {
    if (this.#mode === 'left' || this.#mode === 'dropping') {
      this.#credit(bytes);
      return;
    }
    this.#waiting.push(output, bytes);
    this.#wakeReader();
  };

  async #read(): Promise<IteratorResult<Output, undefined>> {
    this.#giveBack();
    // A loop that awaits nothing else would go on in microtasks for as long as outputs wait.
    if (turns.isOver()) await turns.next();
    while (this.#mode === 'reading') {
      const next = this.#waiting.shift();
      if (next !== undefined) {
        this.#owed = next.bytes;
        return { done: false, value: toOutput(next.output) };
      }
      if (this.#over) {
        this.#mode = 'left';
        await this.#result;
        break;
      }
      await new Promise<void>((resolve) => {
        this.#wakes.push(resolve);
      });
    }
    return { done: true, value: undefined };
  }

  #leave(): void {
    if (this.#mode !== 'reading') return;
    this.#mode = 'left';
    this.#giveBack();
    this.#waiting.drop();
    if (!this.#over) this.#cancel();
    this.#wakeReader();
  }

  #drop(): void {
    if (this.#mode !== 'untouched') return;
    this.#mode = 'dropping';
    this.#waiting.drop();
  }

  #giveBack(): void {
    this.#credit(this.#owed);
    this.#owed = 0;
  }

  #wakeReader(): void {
    const wakes = this.#wakes;
    this.#wakes = [];
    for (const wake of wakes) wake();
  }
}
