/** Saving and loading variables: the silent cells that do it, and their report. */

import { InvalidOptionError, KernelHostError } from './errors.ts';
import type { CellResult } from './result.ts';

export interface SaveOptions {
  /** A variable that is larger is skipped. */
  maxVariableBytes?: number | undefined;
  /** A variable that would make all of them larger than this is skipped. */
  maxBytes?: number | undefined;
  /** What is not saved by then is skipped. */
  timeoutMs?: number | undefined;
}

export interface SnapshotReport {
  path: string;
  bytes: number;
  /** The names that were saved, or loaded. */
  saved: string[];
  skipped: { name: string; why: string }[];
  pickler: 'cloudpickle' | 'dill' | 'pickle';
}

/** @internal Room for the report, however little the kernel's cells may print. */
export const SNAPSHOT_CELL: { silent: boolean; maxOutputBytes: number } = {
  silent: true,
  maxOutputBytes: 16 * 1024 * 1024,
};

const MARK = 'kernelhost-snapshot:';

export function saveCell(path: string, options: SaveOptions): string {
  readPath(path);
  const numbers: Record<string, number | null> = { maxVariableBytes: null, maxBytes: null, timeoutMs: null };
  for (const [name, value] of Object.entries(options)) {
    if (!(name in numbers)) throw new InvalidOptionError(name, `${name}: save() has no such option`);
    if (value === undefined) continue;
    if (!Number.isSafeInteger(value) || value < 0) {
      throw new InvalidOptionError(name, `${name}: must be a whole number of at least 0, not ${String(value)}`);
    }
    numbers[name] = value;
  }
  return cell('save', [path, numbers.maxVariableBytes, numbers.maxBytes, numbers.timeoutMs]);
}

export function loadCell(path: string): string {
  readPath(path);
  return cell('load', [path]);
}

/** @internal */
export function toSnapshotReport(result: CellResult): SnapshotReport {
  if (result.status === 'ok') {
    const line = result.stdout.split('\n').findLast((each) => each.startsWith(MARK));
    if (line !== undefined) return JSON.parse(line.slice(MARK.length)) as SnapshotReport;
  }
  const { status, error } = result;
  throw new KernelHostError('ERR_SNAPSHOT', error === null ? `the snapshot was not made: ${status}` : error.value);
}

function readPath(path: string): void {
  if (typeof path !== 'string' || path === '' || path.includes('\0')) {
    throw new InvalidOptionError('path', 'path: must be the path of a file');
  }
}

/** JSON twice: a string of JSON is also a literal of Python's. No name is left in the namespace. */
function cell(what: 'save' | 'load', values: unknown[]): string {
  const text = JSON.stringify(JSON.stringify(values));
  return `__import__("kernelhost.snapshots").snapshots.answer("${what}", ${text})`;
}
