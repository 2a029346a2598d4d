/** The table of `kernelhost top`: text out of a snapshot. What it says comes from another process, so nothing of it is trusted. */

import type { ExitSnapshot, KernelSnapshot, Snapshot } from '../monitor/snapshot.ts';

export interface Line {
  text: string;
  style: 'bold' | 'dim' | null;
}

interface Column {
  title: string;
  align: 'left' | 'right';
  /** Columns with a lower number go first where the terminal is narrow; 0 stays. */
  rank: number;
  cell(kernel: KernelSnapshot, now: number): string;
}

const NONE = '–';

const columns: readonly Column[] = [
  { title: 'KERNEL', align: 'left', rank: 0, cell: ({ id }) => shorten(plain(id), 20) },
  { title: 'STATE', align: 'left', rank: 0, cell: ({ state }) => plain(state) },
  { title: 'LIFE', align: 'right', rank: 5, cell: ({ generation }) => String(generation) },
  { title: 'PID', align: 'right', rank: 6, cell: ({ pid }) => (pid === null ? NONE : String(pid)) },
  { title: 'AGE', align: 'right', rank: 4, cell: ({ ageMs }) => orNone(ageMs, duration) },
  { title: 'CPU%', align: 'right', rank: 9, cell: ({ cpuPercent }) => orNone(cpuPercent, (value) => value.toFixed(1)) },
  { title: 'CPU', align: 'right', rank: 3, cell: ({ cpuMs }) => orNone(cpuMs, duration) },
  { title: 'PSS', align: 'right', rank: 7, cell: ({ pssBytes }) => orNone(pssBytes, size) },
  { title: 'RSS', align: 'right', rank: 2, cell: ({ rssBytes }) => orNone(rssBytes, size) },
  { title: 'PROCS', align: 'right', rank: 4, cell: ({ processes }) => orNone(processes, String) },
  { title: 'THR', align: 'right', rank: 1, cell: ({ threads }) => orNone(threads, String) },
  {
    title: 'LAST EXIT',
    align: 'left',
    rank: 8,
    cell: ({ lastExit }, now) => orNone(lastExit, (exit) => exitText(exit, now)),
  },
  { title: 'CELL', align: 'left', rank: 10, cell: ({ cell }) => orNone(cell, cellText) },
];

/** What the last column, the cell, is worth having other columns for. */
const LEAST_CELL_WIDTH = 16;

/** `width`: columns of the terminal, or null for as long as it gets. The header, the titles, then a line per kernel, by CPU. */
export function table(snapshot: Snapshot, width: number | null, now: number = Date.now()): Line[] {
  const kernels = snapshot.kernels.toSorted(byCpu);
  const rows = kernels.map((kernel) => columns.map((column) => column.cell(kernel, now)));
  const widths = columns.map(({ title }, index) =>
    Math.max(title.length, ...rows.map((row) => displayWidth(row[index] ?? ''))),
  );
  const shown = fitting(widths, width);
  const format = (cells: readonly string[]) => {
    const parts = shown.map((index) => pad(cells[index] ?? '', widths[index] ?? 0, columns[index]?.align ?? 'left'));
    const text = parts.join('  ').trimEnd();
    return width === null ? text : shorten(text, width);
  };
  const lines: Line[] = [{ text: fit(header(snapshot), width), style: 'bold' }];
  if (kernels.length === 0) return [...lines, { text: fit('No kernels.', width), style: 'dim' }];
  lines.push({ text: format(columns.map(({ title }) => title)), style: 'dim' });
  return [...lines, ...rows.map((row) => ({ text: format(row), style: null }))];
}

function byCpu(one: KernelSnapshot, other: KernelSnapshot): number {
  return (other.cpuPercent ?? -1) - (one.cpuPercent ?? -1) || (other.cpuMs ?? -1) - (one.cpuMs ?? -1);
}

function header({ host, kernels }: Snapshot): string {
  const states = new Map<string, number>();
  for (const { state } of kernels) states.set(plain(state), (states.get(plain(state)) ?? 0) + 1);
  const counts = Array.from(states, ([state, count]) => `${count} ${state}`).join(', ');
  const what = `${kernels.length} ${kernels.length === 1 ? 'kernel' : 'kernels'}${counts === '' ? '' : `: ${counts}`}`;
  return `Host ${host.pid}, up ${duration(host.uptimeMs)}, ${size(host.rssBytes)}, event loop late by ${host.eventLoopDelayMs} ms; ${what}`;
}

/** The columns that there is room for, in order. */
function fitting(widths: readonly number[], width: number | null): number[] {
  let shown = columns.map((_, index) => index);
  if (width === null) return shown;
  const last = columns.length - 1;
  const needed = () =>
    shown.reduce(
      (sum, index) =>
        sum + 2 + (index === last ? Math.min(widths[index] ?? 0, LEAST_CELL_WIDTH) : (widths[index] ?? 0)),
      -2,
    );
  const expendable = columns
    .map(({ rank }, index) => ({ rank, index }))
    .filter(({ rank }) => rank > 0)
    .sort((one, other) => one.rank - other.rank);
  for (const { index } of expendable) {
    if (needed() <= width) break;
    shown = shown.filter((each) => each !== index);
  }
  return shown;
}

function exitText({ cause, status, at }: ExitSnapshot, now: number): string {
  const ago = now - Date.parse(at);
  const when = Number.isFinite(ago) ? `, ${duration(Math.max(0, ago))} ago` : '';
  return plain(`${cause} (${status})${when}`);
}

function cellText({ code, runningMs }: NonNullable<KernelSnapshot['cell']>): string {
  return `${duration(runningMs)}  ${plain(code)}`;
}

function orNone<Value>(value: Value | null, text: (value: Value) => string): string {
  return value === null || value === undefined ? NONE : text(value);
}

/** `0.4s`, `12s`, `3m05s`, `2h07m`, `4d03h`. */
export function duration(ms: number): string {
  const seconds = Math.floor(ms / 1000);
  const two = (value: number) => String(value).padStart(2, '0');
  if (ms < 10_000) return `${(Math.floor(ms / 100) / 10).toFixed(1)}s`;
  if (seconds < 60) return `${seconds}s`;
  if (seconds < 3_600) return `${Math.floor(seconds / 60)}m${two(seconds % 60)}s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3_600)}h${two(Math.floor(seconds / 60) % 60)}m`;
  return `${Math.floor(seconds / 86_400)}d${two(Math.floor(seconds / 3_600) % 24)}h`;
}

/** `640K`, `12M`, `3.4G`. */
export function size(bytes: number): string {
  const kib = bytes / 1024;
  if (kib < 1024) return `${Math.round(kib)}K`;
  const mib = kib / 1024;
  return mib < 1024 ? `${Math.round(mib)}M` : `${(mib / 1024).toFixed(1)}G`;
}

/** Without anything that a terminal would take for a command, or that would turn the text around. */
export function plain(text: string): string {
  return String(text)
    .replaceAll(/\s+/g, ' ')
    .replaceAll(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, '');
}

function pad(text: string, width: number, align: 'left' | 'right'): string {
  const missing = ' '.repeat(Math.max(0, width - displayWidth(text)));
  return align === 'left' ? text + missing : missing + text;
}

function fit(text: string, width: number | null): string {
  return width === null ? text : shorten(text, width);
}

export function shorten(text: string, width: number): string {
  if (displayWidth(text) <= width) return text;
  let shown = '';
  let taken = 0;
  for (const character of text) {
    taken += characterWidth(character);
    if (taken > width - 1) break;
    shown += character;
  }
  return width < 1 ? '' : `${shown}…`;
}

export function displayWidth(text: string): number {
  let width = 0;
  for (const character of text) width += characterWidth(character);
  return width;
}

/** East Asian scripts and emoji take two columns, what is put on top of a letter none. */
function characterWidth(character: string): number {
  if (/^[\x20-\x7e]/.test(character)) return 1;
  if (/^\p{M}/u.test(character)) return 0;
  return /^[\p{Script=Han}\p{Script=Hangul}\p{Script=Hiragana}\p{Script=Katakana}\p{Emoji_Presentation}\u3000-\u303f\uff01-\uff60\uffe0-\uffe6]/u.test(
    character,
  )
    ? 2
    : 1;
}
