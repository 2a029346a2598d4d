/** What Linux says about processes. Reads /proc and ends strays; knows nothing of contenders. */
import { readdirSync, readFileSync } from 'node:fs';

/** The variable that every process of one run inherits, so that strays are found wherever they were re-parented. */
export const runMarker = 'KERNELHOST_BENCH_RUN';

/** Children, their children, and so on; not `root` itself. */
export function descendants(root: number): number[] {
  const children = new Map<number, number[]>();
  for (const pid of pids()) {
    const stat = read(`/proc/${pid}/stat`);
    if (stat === null) continue;
    // The name in parentheses may hold anything; the state and the parent come after the last one.
    const parent = Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]);
    children.set(parent, [...(children.get(parent) ?? []), pid]);
  }
  const found: number[] = [];
  const queue = [root];
  for (let next = queue.pop(); next !== undefined; next = queue.pop()) {
    const own = children.get(next) ?? [];
    found.push(...own);
    queue.push(...own);
  }
  return found;
}

/** Proportional set size; null when the process is gone. */
export function pssBytes(pid: number): number | null {
  const kilobytes = read(`/proc/${pid}/smaps_rollup`)?.match(/^Pss:\s+(\d+) kB$/m)?.[1];
  return kilobytes === undefined ? null : Number(kilobytes) * 1024;
}

/** Time on a CPU over all threads, in ms. The scheduler counts it in nanoseconds, unlike the ticks in `stat`. */
export function cpuMs(pid: number): number {
  let nanoseconds = 0;
  for (const thread of list(`/proc/${pid}/task`)) {
    nanoseconds += Number(read(`/proc/${pid}/task/${thread}/schedstat`)?.split(' ')[0] ?? 0);
  }
  return nanoseconds / 1e6;
}

export function descriptorCount(pid: number): number {
  return list(`/proc/${pid}/fd`).length;
}

/** Ends what a run left behind, by pid, and says how many that were. */
export function endStrays(run: string): number {
  const marked = (pid: number): boolean =>
    pid !== process.pid && (read(`/proc/${pid}/environ`)?.split('\0').includes(`${runMarker}=${run}`) ?? false);
  const ended = new Set<number>();
  // Again until none is new, for one may have started another between the look and the signal.
  for (let strays = pids().filter(marked); strays.some((pid) => !ended.has(pid)); strays = pids().filter(marked)) {
    endAll(strays);
    for (const pid of strays) ended.add(pid);
  }
  return ended.size;
}

export function endAll(strays: readonly number[]): void {
  for (const pid of strays) {
    try {
      process.kill(pid, 'SIGKILL');
    } catch {
      // It ended by itself in between.
    }
  }
}

function pids(): number[] {
  return list('/proc').map(Number).filter(Number.isInteger);
}

function list(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

function read(path: string): string | null {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return null;
  }
}
