/**
 * Owns what must be so when a run is over: nothing of it is left on the machine, and this process is what it was. Knows no
 * kernel.
 */

import { readdirSync, readlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { carriersOfHosts, describe, everyProcess, identify, type Process, type RunMark } from './process-table.ts';

/** A process that was killed is gone when its memory is freed and its parent has waited for it. */
const GONE_WITHIN_MS = 3_000;

/**
 * What V8 and the allocator keep of a busy time once it is over: V8 gives back the young generation when it likes, and glibc
 * keeps an arena per thread. Runs of 20 to 90 seconds were seen to end 15 to 27 MB above their warm-up. It finds what leaks over
 * an hour; small leaks are for the soak, where nothing else moves.
 */
const RESIDENT_SLACK_BYTES = 48 << 20;
/** After a collection the heap holds what is referenced; compiled code and inline caches still grow a little. */
const HEAP_SLACK_BYTES = 6 << 20;

/** The folders of other test files, which may run beside this; nothing here makes one. */
const OTHER_TESTS = 'kernelhost-test-';

export interface Memory {
  residentBytes: number;
  heapBytes: number;
}

/** Without what the run itself has to remember. Resident: outside V8's heap. */
export async function memory(rememberedBytes: number): Promise<Memory> {
  const { gc } = globalThis;
  if (gc === undefined) throw new Error('run with --expose-gc');
  // Finalisers run in the turn after a collection, and what they let go is collected by the next.
  for (let round = 0; round < 3; round += 1) {
    gc();
    await sleep(20);
  }
  const { rss, heapTotal, heapUsed } = process.memoryUsage();
  // V8 keeps what it once had for its young objects; of its heap only what is in use says anything.
  return { residentBytes: rss - heapTotal - rememberedBytes, heapBytes: heapUsed };
}

export function memoryGrew(before: Memory, after: Memory): string[] {
  const grown: string[] = [];
  const compare = (what: string, from: number, to: number, slack: number) => {
    if (to > from + slack) grown.push(`${what} of the test process grew from ${megabytes(from)} to ${megabytes(to)}`);
  };
  compare('the resident memory', before.residentBytes, after.residentBytes, RESIDENT_SLACK_BYTES);
  compare('the heap', before.heapBytes, after.heapBytes, HEAP_SLACK_BYTES);
  return grown;
}

/** What a run must leave as it was. Taken when the addon is loaded and has run a host once. */
export class Surroundings {
  readonly #descriptors = descriptors();
  readonly #files = files();

  /** What is there now and was not before; what goes away in a moment does not count. */
  async strays(mark: RunMark, leaders: ReadonlySet<number>): Promise<string[]> {
    const end = performance.now() + GONE_WITHIN_MS;
    while (true) {
      const found = this.#look(mark, leaders);
      if (found.length === 0 || performance.now() > end) return found;
      await sleep(20);
    }
  }

  #look(mark: RunMark, leaders: ReadonlySet<number>): string[] {
    const found: string[] = [];
    const left = leftProcesses(mark, leaders);
    if (left.length > 0) found.push(`${left.length} processes are left:\n${describe(left)}`);
    const open = subtract(descriptors(), this.#descriptors);
    if (open.length > 0) found.push(`descriptors are left open in this process: ${open.join(', ')}`);
    const made = subtract(files(), this.#files);
    if (made.length > 0) found.push(`files are left (by this run, if nothing else ran meanwhile): ${made.join(', ')}`);
    return found;
  }
}

/** By our mark, by kernelhost's marker, by session, and by parent; zombies of ours too. */
function leftProcesses(mark: RunMark, leaders: ReadonlySet<number>): Process[] {
  const self = identify(process.pid);
  const found = new Map<number, Process>();
  const add = (processes: Process[]) => {
    for (const each of processes) found.set(each.pid, each);
  };
  add(mark.carriers());
  if (self !== null) add(carriersOfHosts([self]).filter(({ pid }) => pid !== process.pid));
  // The pid of a leader may be somebody else's by now, but then it does not lead a session that carries our mark.
  add(everyProcess().filter(({ parent }) => parent === process.pid));
  add(everyProcess().filter(({ session, state }) => leaders.has(session) && state !== 'Z' && !isStranger(session)));
  return [...found.values()];
}

/** The number of one of our leaders has gone to a process that began a session of its own. */
function isStranger(session: number): boolean {
  return everyProcess().some(({ pid, parent }) => pid === session && parent !== process.pid && parent !== 1);
}

function descriptors(): string[] {
  return readdirSync('/proc/self/fd')
    .map((name) => {
      try {
        // Sockets and pipes are told apart by numbers that say nothing.
        return readlinkSync(`/proc/self/fd/${name}`).replace(/:\[\d+\]$/, '');
      } catch {
        // The one of the listing itself.
        return '';
      }
    })
    .filter((target) => target !== '')
    .sort();
}

/** What is in the folder for temporary files, which is this run's own, and what is ours in those that all of the machine shares. */
export function files(): string[] {
  const ours = (name: string) => name.startsWith('kernelhost') && !name.startsWith(OTHER_TESTS);
  const folders = { [tmpdir()]: () => true, '/dev/shm': () => true, ...(tmpdir() === '/tmp' ? {} : { '/tmp': ours }) };
  return Object.entries(folders).flatMap(([folder, counts]) => {
    try {
      return readdirSync(folder)
        .filter(counts)
        .map((name) => `${folder}/${name}`);
    } catch {
      return [];
    }
  });
}

/** As bags: what is twice in one and once in the other is left once. */
export function subtract(from: readonly string[], what: readonly string[]): string[] {
  const rest = new Map<string, number>();
  for (const each of what) rest.set(each, (rest.get(each) ?? 0) + 1);
  return from.filter((each) => {
    const count = rest.get(each) ?? 0;
    rest.set(each, count - 1);
    return count <= 0;
  });
}

export function megabytes(bytes: number): string {
  return `${(bytes / (1 << 20)).toFixed(1)} MB`;
}
