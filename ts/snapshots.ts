/** Saving and loading variables: the silent cells that do it, their report, and what a snapshot may fail with. */

import { SnapshotError, type SnapshotFailure } from './errors.ts';
import type { CellResult, Display } from './result.ts';

export interface SaveOptions {
  /** A variable that is larger in the file is skipped. */
  maxVariableBytes?: number | undefined;
  /** A variable that would make all of them larger than this is skipped. */
  maxBytes?: number | undefined;
  /** What is not saved by then is skipped. */
  timeoutMs?: number | undefined;
}

/** Where and how a kernel saves itself. Here, a time that is up is a failure, and the earlier file stays. */
export interface SaveTo extends SaveOptions {
  path: string;
  /** From the end of one save to the next, at least. Default 10 000. */
  intervalMs?: number | undefined;
}

export interface SnapshotReport {
  path: string;
  bytes: number;
  /** The names that were saved, or loaded. */
  saved: string[];
  skipped: { name: string; why: string }[];
  /** What it was pickled with. */
  pickler: 'cloudpickle' | 'dill' | 'pickle';
}

/** @internal The numbers of a save; null: no limit. */
export interface SaveLimits {
  maxVariableBytes: number | null;
  maxBytes: number | null;
  timeoutMs: number | null;
}

/** @internal What a save by itself has besides. */
export interface SaveByItself {
  /** The life that is meant: another one must not take its file. */
  pid: number | null;
  /** The function of the daemon's that says whether to go on. */
  ask: string;
}

/** What Python could not do, as its report says it. */
interface Failed {
  failed: { reason: SnapshotFailure; message: string };
}

const MIME = 'application/vnd.kernelhost.snapshot+json';

/** @internal */
export function saveCell(path: string, limits: SaveLimits, byItself?: SaveByItself): string {
  return cell('save', { path, ...limits, pid: byItself?.pid ?? null, ask: byItself?.ask ?? null });
}

/** @internal */
export function loadCell(path: string): string {
  return cell('load', { path });
}

/** @internal The report that a display is, or the error that it tells of; null where it is another display. */
export function reportIn(display: Display): SnapshotReport | SnapshotError | null {
  const report = display.data[MIME] as SnapshotReport | Failed | undefined;
  if (report === undefined) return null;
  return 'failed' in report ? new SnapshotError(report.failed.reason, report.failed.message) : report;
}

/** @internal */
export function toSnapshotReport(result: CellResult): SnapshotReport {
  // Variables may show things while they are pickled; the report is what comes last.
  const display = result.status === 'ok' ? result.displays.at(-1) : undefined;
  const report = display === undefined ? null : reportIn(display);
  if (report instanceof Error) throw report;
  if (report !== null) return report;
  const { status, error } = result;
  if (status === 'error') {
    throw new SnapshotError('failed', `the snapshot failed: ${error === null ? '' : `${error.name}: ${error.value}`}`);
  }
  throw new SnapshotError('interrupted', 'the snapshot was interrupted');
}

/** JSON twice: a string of JSON is also a literal of Python's. No name is left in the namespace. */
function cell(what: 'save' | 'load', values: object): string {
  return `__import__("kernelhost.snapshots").snapshots.answer("${what}", ${JSON.stringify(JSON.stringify(values))})`;
}
