/** Adds up the credit of one turn, so that a flood of small outputs costs one call into the addon and not one each. */
export class Credit {
  readonly #give: (bytes: number) => void;
  #owed = 0;

  constructor(give: (bytes: number) => void) {
    this.#give = give;
  }

  readonly add = (bytes: number): void => {
    if (bytes === 0) return;
    if (this.#owed === 0) queueMicrotask(this.#flush);
    this.#owed += bytes;
  };

  readonly #flush = (): void => {
    const bytes = this.#owed;
    this.#owed = 0;
    this.#give(bytes);
  };
}
