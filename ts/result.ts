/** A cell's result, and the conversion from what the addon sends. */

import { type ExitReason, toExitReason } from './exit-reason.ts';
import type { NativeCell, NativeLife, NativeOutput } from './native.ts';

/** Media type to content, as in a notebook: text is a string, JSON types are values, images are base64. */
export type MimeBundle = Record<string, unknown>;

export interface Display {
  data: MimeBundle;
  metadata: MimeBundle;
  displayId: string | null;
  update: boolean;
}

export type Output =
  | { kind: 'text'; stream: 'stdout' | 'stderr'; text: string }
  | { kind: 'display'; display: Display }
  | { kind: 'clear'; wait: boolean }
  | { kind: 'value'; data: MimeBundle; metadata: MimeBundle }
  | { kind: 'error'; name: string; value: string; traceback: string[] };

/** One process behind a kernel. */
export interface Life {
  pid: number;
  generation: number;
  /** 'checkpoint': from a frozen copy of an earlier life. */
  launch: 'fork' | 'spawn' | 'checkpoint';
  /** Why it was spawned cold although it could have been forked. */
  launchReason: string | null;
  startMs: number;
  python: string;
  pythonVersion: string;
  shell: 'ipython' | 'plain';
}

export interface Recovered {
  exit: ExitReason;
  /** What the new life began with: nothing, or the variables of a copy of the one before. */
  state: 'fresh' | 'checkpoint';
  /** Cells whose effects are lost, the one that was running among them. */
  lostCells: number;
}

export interface CellResult {
  status: 'ok' | 'error' | 'interrupted' | 'timed-out';
  /** The value's text/plain. */
  text: string | null;
  /** The value. */
  data: MimeBundle | null;
  stdout: string;
  stderr: string;
  /** Cut out by maxOutputBytes. */
  missing: { stdoutBytes: number; stderrBytes: number };
  /** How many displays and values are not in `outputs`, because they were too many or too large together. */
  missingDisplays: number;
  displays: Display[];
  /** All of the above, in order. */
  outputs: Output[];
  error: { name: string; value: string; traceback: string[] } | null;
  executionCount: number;
  durationMs: number;
  life: Life;
  /** Only on the first result of a life that replaced another. */
  recovered: Recovered | null;
}

export function toLife(life: NativeLife): Life {
  return life;
}

export function toOutput(output: NativeOutput): Output {
  switch (output.kind) {
    case 'display':
      return {
        kind: 'display',
        display: {
          data: toBundle(output.dataJson),
          metadata: toBundle(output.metadataJson),
          displayId: output.displayId,
          update: output.update,
        },
      };
    case 'value':
      return { kind: 'value', data: toBundle(output.dataJson), metadata: toBundle(output.metadataJson) };
    default:
      return output;
  }
}

/** Bundles cross the boundary as JSON text: one parse in V8 costs less than building the objects one call at a time. */
function toBundle(json: string): MimeBundle {
  return JSON.parse(json) as MimeBundle;
}

/** `life`: the one it ran on, as its `started` event told. */
export function toCellResult(cell: NativeCell, life: Life): CellResult {
  const outputs = cell.outputs.map(toOutput);
  const displays: Display[] = [];
  let data: MimeBundle | null = null;
  let error: CellResult['error'] = null;
  for (const output of outputs) {
    if (output.kind === 'display') displays.push(output.display);
    else if (output.kind === 'value') data = output.data;
    else if (output.kind === 'error') error = { name: output.name, value: output.value, traceback: output.traceback };
  }
  const text = data?.['text/plain'];
  return {
    status: cell.status,
    text: typeof text === 'string' ? text : null,
    data,
    stdout: cell.stdout,
    stderr: cell.stderr,
    missing: { stdoutBytes: cell.missingStdoutBytes, stderrBytes: cell.missingStderrBytes },
    missingDisplays: cell.missingDisplays,
    displays,
    outputs,
    error,
    executionCount: cell.executionCount,
    durationMs: cell.durationMs,
    life,
    recovered:
      cell.recovered === null
        ? null
        : {
            exit: toExitReason(cell.recovered.exit),
            state: cell.recovered.state,
            lostCells: cell.recovered.lostCells,
          },
  };
}
