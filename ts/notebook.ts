/**
 * Cells and their outputs as a Jupyter notebook (nbformat 4.5), put together as a notebook front end would: neighbouring
 * texts of a stream become one output, `clear_output` and updates of displays are carried out.
 *
 * Owns: the shape of the format, as it stands in a file. Pure: knows neither kernels nor files.
 */

import { randomUUID } from 'node:crypto';
import type { CellResult, Life, MimeBundle, Output } from './result.ts';

/** A text of several lines; in a file each line is a string of its own, with its line break. */
export type NotebookText = string | string[];

export type NotebookOutput =
  | { output_type: 'stream'; name: 'stdout' | 'stderr'; text: NotebookText }
  | { output_type: 'display_data'; data: MimeBundle; metadata: MimeBundle }
  | { output_type: 'execute_result'; execution_count: number | null; data: MimeBundle; metadata: MimeBundle }
  | { output_type: 'error'; ename: string; evalue: string; traceback: string[] };

export interface NotebookCodeCell {
  cell_type: 'code';
  id: string;
  metadata: MimeBundle;
  source: NotebookText;
  execution_count: number | null;
  outputs: NotebookOutput[];
}

export interface NotebookMarkdownCell {
  cell_type: 'markdown';
  id: string;
  metadata: MimeBundle;
  source: NotebookText;
}

export type NotebookCell = NotebookCodeCell | NotebookMarkdownCell;

/** Ready for `JSON.stringify`. */
export interface Notebook {
  nbformat: 4;
  nbformat_minor: 5;
  metadata: MimeBundle;
  cells: NotebookCell[];
}

/** What a notebook needs of a cell's result. */
export type NotebookResult = Pick<CellResult, 'outputs' | 'executionCount' | 'status' | 'missing' | 'life'>;

export interface NotebookEntry {
  code: string;
  result: NotebookResult;
  /** Of letters, digits, `-` and `_`, at most 64; unique in its notebook. Default: random. */
  id?: string | undefined;
}

export interface NotebookOptions {
  /** The life that the notebook's metadata describes. Default: that of the last cell. */
  life?: Life | null | undefined;
}

/** One cell. An update of a display that the cell has not shown itself is left out. */
export function toNotebookCell(
  code: string,
  result: NotebookResult,
  options: { id?: string | undefined } = {},
): NotebookCodeCell {
  return new NotebookWriter().cell({ code, result, id: options.id });
}

/** A notebook of cells in the order in which they ran. An update also reaches what an earlier cell has shown. */
export function toNotebook(entries: Iterable<NotebookEntry>, options: NotebookOptions = {}): Notebook {
  const writer = new NotebookWriter();
  const cells: NotebookCell[] = [];
  let life = options.life ?? null;
  for (const entry of entries) {
    cells.push(writer.cell(entry));
    if (options.life === undefined) life = entry.result.life;
  }
  return { nbformat: 4, nbformat_minor: 5, metadata: notebookMetadata(life), cells };
}

/** A cell of text, for what a notebook has to say about itself. */
export function toMarkdownCell(text: string, id: string): NotebookMarkdownCell {
  return { cell_type: 'markdown', id, metadata: {}, source: lines(text) };
}

function notebookMetadata(life: Life | null): MimeBundle {
  const ipython = life?.shell !== 'plain';
  return {
    // The name under which Jupyter's own Python kernel is installed: what opens the file finds something to run it with.
    kernelspec: { name: 'python3', display_name: 'Python 3', language: 'python' },
    language_info: {
      name: 'python',
      ...(life === null ? {} : { version: life.pythonVersion }),
      mimetype: 'text/x-python',
      file_extension: '.py',
      codemirror_mode: ipython ? { name: 'ipython', version: 3 } : { name: 'python', version: 3 },
      pygments_lexer: ipython ? 'ipython3' : 'python3',
      nbconvert_exporter: 'python',
    },
  };
}

type ShownOutput = Extract<NotebookOutput, { data: MimeBundle }>;

/** Puts outputs where a front end would have put them. Remembers what was shown under which display id. */
class NotebookWriter {
  readonly #shown = new Map<string, Set<ShownOutput>>();

  cell({ code, result, id = randomUUID() }: NotebookEntry): NotebookCodeCell {
    const { executionCount, status, missing, life } = result;
    // Cells that are not counted have no number.
    const count = executionCount > 0 ? executionCount : null;
    const isCut = missing.stdoutBytes > 0 || missing.stderrBytes > 0;
    return {
      cell_type: 'code',
      id,
      metadata: { kernelhost: { status, generation: life.generation, ...(isCut ? { missing } : {}) } },
      source: lines(code),
      execution_count: count,
      outputs: this.#outputs(result.outputs, count),
    };
  }

  #outputs(given: readonly Output[], count: number | null): NotebookOutput[] {
    const outputs: NotebookOutput[] = [];
    /** The pieces of each run of text, put together at the end: a flood has many. */
    const texts = new Map<NotebookOutput, string[]>();
    let clearsBeforeNext = false;
    const clear = () => {
      for (const output of outputs) this.#forget(output);
      outputs.length = 0;
    };
    const add = (output: NotebookOutput) => {
      if (clearsBeforeNext) clear();
      clearsBeforeNext = false;
      outputs.push(output);
    };
    for (const output of given) {
      switch (output.kind) {
        case 'text': {
          const last = clearsBeforeNext ? undefined : outputs.at(-1);
          if (last?.output_type === 'stream' && last.name === output.stream) {
            texts.get(last)?.push(output.text);
            break;
          }
          const stream: NotebookOutput = { output_type: 'stream', name: output.stream, text: [] };
          texts.set(stream, [output.text]);
          add(stream);
          break;
        }
        case 'display': {
          const { displayId, update } = output.display;
          const data = toData(output.display.data);
          const { metadata } = output.display;
          // Also a new display under a known id updates what is there, as IPython's display handles promise.
          if (displayId !== null) this.#update(displayId, data, metadata);
          if (update) break;
          const shown: ShownOutput = { output_type: 'display_data', data, metadata };
          add(shown);
          if (displayId !== null) this.#remember(displayId, shown);
          break;
        }
        case 'value':
          add({
            output_type: 'execute_result',
            execution_count: count,
            data: toData(output.data),
            metadata: output.metadata,
          });
          break;
        case 'error':
          add({ output_type: 'error', ename: output.name, evalue: output.value, traceback: output.traceback });
          break;
        case 'clear':
          if (output.wait) {
            clearsBeforeNext = true;
          } else {
            clearsBeforeNext = false;
            clear();
          }
      }
    }
    for (const output of outputs) {
      if (output.output_type === 'stream') output.text = lines(texts.get(output)?.join('') ?? '');
    }
    return outputs;
  }

  #remember(displayId: string, output: ShownOutput): void {
    const known = this.#shown.get(displayId);
    if (known === undefined) this.#shown.set(displayId, new Set([output]));
    else known.add(output);
  }

  #update(displayId: string, data: MimeBundle, metadata: MimeBundle): void {
    for (const output of this.#shown.get(displayId) ?? []) {
      output.data = data;
      output.metadata = metadata;
    }
  }

  /** What is cleared can be updated no more. */
  #forget(output: NotebookOutput): void {
    for (const known of this.#shown.values()) known.delete(output as ShownOutput);
  }
}

const jsonType = /^application\/(.*\+)?json$/;

/** A MIME bundle as the format wants it: values only for JSON types, text for all others. */
function toData(bundle: MimeBundle): MimeBundle {
  const data: MimeBundle = {};
  for (const [mime, content] of Object.entries(bundle)) {
    if (jsonType.test(mime)) data[mime] = content;
    else if (typeof content === 'string')
      data[mime] = mime.startsWith('text/') ? lines(content) : inOneOrLines(content);
    // A library may have sent anything under any type, and one such output would make the whole notebook invalid.
    else if (content !== null && content !== undefined) data[mime] = lines(JSON.stringify(content));
  }
  return data;
}

/** Base64 stays one string, as Jupyter writes it. */
function inOneOrLines(text: string): NotebookText {
  return text.trimEnd().includes('\n') ? lines(text) : text;
}

function lines(text: string): string[] {
  return text === '' ? [] : text.split(/(?<=\n)/);
}
