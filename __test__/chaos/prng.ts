/** Owns chance: everything random in the chaos suite comes from here, and is the same again for the same seed. */

/** Splits one seed into streams of numbers. Good enough to choose with, and for nothing else. */
export class Prng {
  #state: number;

  constructor(seed: number) {
    this.#state = seed >>> 0;
  }

  /** A whole number of 32 bits. */
  next(): number {
    this.#state = (this.#state + 0x9e3779b9) >>> 0;
    let mixed = this.#state;
    mixed = Math.imul(mixed ^ (mixed >>> 16), 0x21f0aaad);
    mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
    return (mixed ^ (mixed >>> 15)) >>> 0;
  }

  /** From `low` to `high`, both included. */
  between(low: number, high: number): number {
    return low + Math.floor((this.next() / 2 ** 32) * (high - low + 1));
  }

  chance(probability: number): boolean {
    return this.next() / 2 ** 32 < probability;
  }

  pick<Value>(values: readonly [Value, ...Value[]]): Value {
    return values[this.between(0, values.length - 1)] ?? values[0];
  }

  /** A key, each as often as its weight says. */
  weighted<Key extends string>(weights: Readonly<Record<Key, number>>): Key {
    const entries = Object.entries(weights) as [Key, number][];
    let rest = (this.next() / 2 ** 32) * entries.reduce((sum, [, weight]) => sum + weight, 0);
    for (const [key, weight] of entries) {
      rest -= weight;
      if (rest < 0) return key;
    }
    const last = entries.at(-1);
    if (last === undefined) throw new Error('nothing to choose from');
    return last[0];
  }

  /** A word that no other call gives, as far as chance goes. */
  word(): string {
    return this.next().toString(36) + this.next().toString(36);
  }
}
