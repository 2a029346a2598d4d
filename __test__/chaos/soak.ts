/**
 * `npm run test:soak [-- --forks N]`: forks through one host, each of them started, given one cell and closed. Memory and
 * descriptors of host and template and the time of a start must be at the end what they were in the beginning. Owns the counting.
 */

import { readdirSync, readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { KernelHost } from 'kernelhost';
import { pythonForTests } from '../helpers/index.ts';
import { megabytes, memory } from './invariants.ts';

const FORKS = 10_000;
/** Compared are the first and the last of these. */
const PARTS = 10;
/** Before anything is measured: pools and caches get their size, and V8 compiles what is hot. */
const WARM_UP = 300;

/**
 * The host's heap and resident memory move by some megabytes from one collection to the next. A leak of one kilobyte per fork,
 * which is less than any handle takes, would be ten megabytes.
 */
const HOST_SLACK_BYTES = 6 << 20;
/** Python allocates in arenas of a megabyte; 100 bytes per fork would be one. */
const TEMPLATE_SLACK_BYTES = 1 << 20;
/** Of medians over a tenth of the run: one busy second of the machine does not move them, a table that is searched does. */
const SLOWER = 1.3;

const say = (text: string): void => void process.stdout.write(`${text}\n`);

interface Part {
  startMs: number;
  cellMs: number;
  hostBytes: number;
  hostHeapBytes: number;
  hostDescriptors: number;
  templateBytes: number;
  templateDescriptors: number;
}

type Column = keyof Part;

const titles: Record<Column, string> = {
  startMs: 'start',
  cellMs: 'cell',
  hostBytes: 'host memory',
  hostHeapBytes: 'host heap',
  hostDescriptors: 'host fds',
  templateBytes: 'template memory',
  templateDescriptors: 'template fds',
};

async function main(): Promise<number> {
  const { values } = parseArgs({ options: { forks: { type: 'string' } } });
  const forks = Number(values.forks ?? FORKS);
  const host = new KernelHost({ python: pythonForTests(), shell: 'plain', launch: 'fork' });
  let templates = 0;
  let template = 0;
  host.on('template', ({ pid, state }) => {
    if (state !== 'ready') return;
    template = pid;
    templates += 1;
  });
  await measure(host, WARM_UP);
  say(`${forks} forks through one host, one cell each:`);
  say(`  ${'forks'.padStart(6)} ${Object.values(titles).join('  ')}`);
  const parts: Part[] = [];
  // The warm-up is a part of it: a template is replaced once it has forked 10 000 times.
  const perPart = Math.max(1, Math.floor((forks - WARM_UP) / PARTS));
  for (let part = 1; part <= PARTS; part += 1) {
    const times = await measure(host, perPart);
    const { residentBytes, heapBytes } = await memory(0);
    parts.push({
      ...times,
      hostBytes: residentBytes,
      hostHeapBytes: heapBytes,
      hostDescriptors: readdirSync('/proc/self/fd').length,
      templateBytes: residentBytesOf(template),
      templateDescriptors: readdirSync(`/proc/${template}/fd`).length,
    });
    say(line(WARM_UP + perPart * part, parts.at(-1) as Part));
  }
  await host.close();
  const [first, last] = [parts[0], parts.at(-1)];
  if (first === undefined || last === undefined) throw new Error('nothing was measured');
  const failures = compare(first, last);
  if (templates !== 1) failures.push(`${templates} templates were started; one was to do all of it`);
  for (const failure of failures) say(`FAILED: ${failure}`);
  if (failures.length === 0) say('Flat.');
  return failures.length === 0 ? 0 : 1;
}

/** Medians. */
async function measure(host: KernelHost, forks: number): Promise<{ startMs: number; cellMs: number }> {
  const starts: number[] = [];
  const cells: number[] = [];
  for (let fork = 0; fork < forks; fork += 1) {
    const kernel = host.kernel();
    const began = performance.now();
    await kernel.start();
    const started = performance.now();
    const { text } = await kernel.execute(`${fork} + 1`);
    const done = performance.now();
    if (text !== `${fork + 1}`) throw new Error(`fork ${fork} gave ${text}`);
    await kernel.close();
    starts.push(started - began);
    cells.push(done - started);
  }
  return { startMs: median(starts), cellMs: median(cells) };
}

function compare(first: Part, last: Part): string[] {
  const failures: string[] = [];
  const check = (column: Column, isFlat: boolean) => {
    if (!isFlat) failures.push(`${titles[column]}: ${told(column, first)} at first, ${told(column, last)} at last`);
  };
  check('hostBytes', last.hostBytes <= first.hostBytes + HOST_SLACK_BYTES);
  check('hostHeapBytes', last.hostHeapBytes <= first.hostHeapBytes + HOST_SLACK_BYTES);
  check('templateBytes', last.templateBytes <= first.templateBytes + TEMPLATE_SLACK_BYTES);
  check('hostDescriptors', last.hostDescriptors === first.hostDescriptors);
  check('templateDescriptors', last.templateDescriptors === first.templateDescriptors);
  check('startMs', last.startMs <= first.startMs * SLOWER);
  return failures;
}

function line(forks: number, part: Part): string {
  const cells = (Object.keys(titles) as Column[]).map((column) => told(column, part).padStart(titles[column].length));
  return `  ${String(forks).padStart(6)} ${cells.join('  ')}`;
}

function told(column: Column, part: Part): string {
  const value = part[column];
  if (column.endsWith('Ms')) return value.toFixed(2);
  return column.endsWith('Bytes') ? megabytes(value) : String(value);
}

function residentBytesOf(pid: number): number {
  const resident = /^Rss:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8'))?.[1];
  return Number(resident) * 1024;
}

function median(values: number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? Number.NaN;
}

process.exitCode = await main();
