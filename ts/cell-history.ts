/**
 * What a kernel remembers of its cells, so that a notebook can be made of them: the latest, within a bound.
 *
 * A kernel may live for weeks, so what is old goes: first the outputs of the oldest cells, because the code is what makes
 * a notebook that can be run again, and then whole cells. Both are counted. Outputs are kept as the addon has sent them: JSON
 * text takes less room than the objects it stands for.
 */

import type { NativeCell, NativeReply } from './native.ts';
import { type Notebook, type NotebookEntry, toMarkdownCell, toNotebook } from './notebook.ts';
import { type Life, type Output, toOutput } from './result.ts';

/** What an entry and an output take beside their texts, about. */
const ENTRY_BYTES = 200;
const OUTPUT_BYTES = 100;

interface Entry {
  /** Of this kernel's cells, from 1. */
  number: number;
  code: string;
  /** Null when they were dropped. */
  outputs: NativeCell['outputs'] | null;
  /** How the life ended under this cell. */
  death: string | null;
  outputBytes: number;
  result: Pick<NativeCell, 'executionCount' | 'status' | 'missingStdoutBytes' | 'missingStderrBytes'>;
  life: Life;
}

export class CellHistory {
  readonly #limit: number;
  #entries: Entry[] = [];
  /** The first entry that may still have outputs. */
  #firstWhole = 0;
  #bytes = 0;
  #count = 0;

  constructor(limitBytes: number) {
    this.#limit = limitBytes;
  }

  /** Takes what came of a cell; a cell that has not begun is none. `life`: the one it ran on. */
  note(code: string, reply: NativeReply, life: Life | null): void {
    const cell = reply.kind === 'cell' ? reply.cell : reply.kind === 'failed' ? reply.failure.partial : null;
    if (cell === null || life === null) return;
    const { outputs, executionCount, status, missingStdoutBytes, missingStderrBytes } = cell;
    const outputBytes = outputs.reduce((sum, output) => sum + sizeOf(output), 0);
    this.#count += 1;
    this.#entries.push({
      number: this.#count,
      code,
      outputs,
      death: reply.kind === 'failed' ? reply.failure.message : null,
      outputBytes,
      result: { executionCount, status, missingStdoutBytes, missingStderrBytes },
      life,
    });
    this.#bytes += ENTRY_BYTES + code.length + outputBytes;
    this.#shrink();
  }

  /** `life`: the kernel's newest. */
  toNotebook(life: Life | null): Notebook {
    const notebook = toNotebook(this.#entries.map(toEntry), { life });
    const cut = this.#count - this.#entries.length;
    if (cut > 0) {
      const cells = cut === 1 ? 'The first cell is' : `The first ${cut} cells are`;
      notebook.cells.unshift(toMarkdownCell(`*${cells} not kept (kernelhost: \`notebookBytes\`).*`, 'cells-not-kept'));
      notebook.metadata.kernelhost = { cellsNotKept: cut };
    }
    return notebook;
  }

  #shrink(): void {
    let entry = this.#entries[this.#firstWhole];
    while (this.#bytes > this.#limit && entry !== undefined) {
      this.#bytes -= entry.outputBytes;
      if (entry.outputBytes > 0) entry.outputs = null;
      entry.outputBytes = 0;
      this.#firstWhole += 1;
      entry = this.#entries[this.#firstWhole];
    }
    if (this.#bytes <= this.#limit) return;
    // Some at a time: taking one away from the front moves all the others.
    const enough = this.#limit - this.#limit / 8;
    let dropped = 0;
    for (const { code } of this.#entries) {
      if (this.#bytes <= enough) break;
      this.#bytes -= ENTRY_BYTES + code.length;
      dropped += 1;
    }
    this.#entries.splice(0, dropped);
    this.#firstWhole -= dropped;
  }
}

function sizeOf(output: NativeCell['outputs'][number]): number {
  switch (output.kind) {
    case 'text':
      return OUTPUT_BYTES + output.text.length;
    case 'display':
    case 'value':
      return OUTPUT_BYTES + output.dataJson.length + output.metadataJson.length;
    case 'error':
      return output.traceback.reduce((sum, line) => sum + line.length, OUTPUT_BYTES + output.value.length);
    default:
      return OUTPUT_BYTES;
  }
}

function toEntry({ number, code, outputs, death, result, life }: Entry): NotebookEntry {
  const { executionCount, status, missingStdoutBytes, missingStderrBytes } = result;
  const shown: Output[] =
    outputs === null
      ? [
          {
            kind: 'text',
            stream: 'stderr',
            text: 'The outputs of this cell are not kept (kernelhost: notebookBytes).\n',
          },
        ]
      : outputs.map(toOutput);
  if (death !== null) shown.push({ kind: 'error', name: 'KernelDiedError', value: death, traceback: [death] });
  const missing = { stdoutBytes: missingStdoutBytes, stderrBytes: missingStderrBytes };
  return { code, id: `cell-${number}`, result: { outputs: shown, executionCount, status, missing, life } };
}
