/**
 * Which cell of a kernel runs, and since when, told from the calls that are pending. Only a watched kernel has one.
 *
 * The addon runs calls in the order they were made, so the oldest that is pending is the one that runs. Where a cell that will
 * not stop was given up (`stuck: 'wait'`) and another call waits behind it, the one that waits is taken for it.
 */

/** What is shown of a cell. */
export interface RunningCell {
  /** The first line that is not blank, at most 80 characters of it. */
  code: string;
  runningMs: number;
}

interface Call {
  code: string;
  /** When it was made, or when its turn came. */
  since: number;
}

const MAX_CHARACTERS = 80;

export class Calls {
  readonly #pending = new Map<number, Call>();
  /** When the newest turn came: the life was ready, or the call before was over. */
  #turn = 0;
  /** The call that was over last. Its cell may be running still. */
  #last: Call | null = null;

  made(request: number, code: string): void {
    this.#pending.set(request, { code: firstLine(code), since: performance.now() });
  }

  over(request: number): void {
    const [oldest] = this.#pending.keys();
    const call = this.#pending.get(request);
    this.#pending.delete(request);
    if (call === undefined || oldest !== request) return;
    this.#last = this.#inTurn(call);
    this.#turn = performance.now();
  }

  lifeStarted(): void {
    this.#turn = performance.now();
    this.#last = null;
  }

  /** To be asked while the kernel runs a cell. */
  running(): RunningCell | null {
    const [oldest] = this.#pending.values();
    const call = oldest === undefined ? this.#last : this.#inTurn(oldest);
    return call === null ? null : { code: call.code, runningMs: Math.round(performance.now() - call.since) };
  }

  #inTurn({ code, since }: Call): Call {
    return { code, since: Math.max(since, this.#turn) };
  }
}

export function firstLine(code: string): string {
  const line =
    /^[^\S\n]*(\S[^\n]*)/m
      .exec(code)?.[1]
      ?.slice(0, 2 * (MAX_CHARACTERS + 1))
      .trimEnd() ?? '';
  const characters = [...line];
  const shown =
    characters.length > MAX_CHARACTERS ? `${characters.slice(0, MAX_CHARACTERS - 1).join('')}…` : characters.join('');
  // A slice holds on to the whole text it was cut from; a program may be megabytes long.
  return Buffer.from(shown).toString();
}
