/**
 * Owns what was done and seen, in order: the last actions of each kernel for the failure's text, all of it for a file that is
 * written on failure only.
 */

import { mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

/** Of a kernel, in a failure. */
const ACTIONS_TOLD = 30;
const BLOCK_BYTES = 1 << 20;

export interface Note {
  /** The number of the planned action; null for what came by itself. */
  action: number | null;
  what: string;
  [detail: string]: unknown;
}

/** The last actions of one kernel, and what came of them. */
export class Recent {
  readonly #notes: { isAction: boolean; line: string }[] = [];

  add(note: Note, line: string): void {
    this.#notes.push({ isAction: note.action !== null, line });
    if (note.action === null) return;
    let surplus = this.#notes.filter(({ isAction }) => isAction).length - ACTIONS_TOLD;
    while (surplus > 0) if (this.#notes.shift()?.isAction === true) surplus -= 1;
  }

  toString(): string {
    return this.#notes.map(({ line }) => `    ${line}`).join('\n');
  }
}

export class History {
  readonly #began = performance.now();
  readonly #blocks: Buffer[] = [];
  #used = BLOCK_BYTES;

  /** Of this process's memory, what the history takes: a run of an hour has a lot to tell. */
  get bytes(): number {
    return this.#blocks.length * BLOCK_BYTES;
  }

  get elapsedMs(): number {
    return performance.now() - this.#began;
  }

  note(kernel: string | null, recent: Recent | null, note: Note): void {
    const line = JSON.stringify({ ms: Math.round(this.elapsedMs), kernel, ...note });
    recent?.add(note, line);
    this.#write(`${line}\n`);
  }

  /** Writes all of it and gives the file's name. */
  save(): string {
    const file = join(mkdtempSync(join(tmpdir(), 'kernelhost-chaos-history-')), 'history.jsonl');
    const whole = Buffer.concat(this.#blocks);
    const unused = this.#blocks.length === 0 ? 0 : BLOCK_BYTES - this.#used;
    writeFileSync(
      file,
      whole
        .subarray(0, whole.length - unused)
        .toString()
        .replaceAll('\0', ''),
    );
    return file;
  }

  /** Outside V8's heap, so that it can be told from what leaks there. */
  #write(line: string): void {
    const bytes = Buffer.from(line).subarray(0, BLOCK_BYTES);
    if (this.#used + bytes.length > BLOCK_BYTES) {
      this.#blocks.push(Buffer.alloc(BLOCK_BYTES));
      this.#used = 0;
    }
    bytes.copy(this.#blocks.at(-1) ?? Buffer.alloc(0), this.#used);
    this.#used += bytes.length;
  }
}
