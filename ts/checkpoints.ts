/** Checkpoints as their owner holds them: who they belong to, and how they go. */

import { InvalidOptionError } from './errors.ts';
import type { NativeCheckpoint } from './native.ts';

/** A frozen copy of a life: a process of its own that costs no CPU, and memory only for what has been written since. */
export interface Checkpoint {
  readonly id: string;
  /** Of the life it is a copy of. */
  readonly generation: number;
  /** What it had resident when it was made, nearly all of it shared with that life. */
  readonly rssBytes: number;
  /** Ends the copy. Idempotent. */
  discard(): Promise<void>;
}

/** @internal Those of one kernel. */
export class Checkpoints {
  readonly #ids = new WeakMap<object, number>();
  readonly #discard: (id: number) => Promise<void>;

  constructor(discard: (id: number) => Promise<void>) {
    this.#discard = discard;
  }

  made({ id, generation, rssBytes }: NativeCheckpoint): Checkpoint {
    const discard = this.#discard;
    const checkpoint = { id: `checkpoint-${id}`, generation, rssBytes, discard: () => discard(id) };
    this.#ids.set(checkpoint, id);
    return checkpoint;
  }

  idOf(checkpoint: Checkpoint): number {
    const id = typeof checkpoint === 'object' && checkpoint !== null ? this.#ids.get(checkpoint) : undefined;
    if (id === undefined) {
      throw new InvalidOptionError('to', 'to: must be a checkpoint that this very kernel has made');
    }
    return id;
  }
}
