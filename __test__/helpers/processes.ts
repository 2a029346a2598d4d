/** What is true of processes, read from /proc. */

import { readdirSync, readFileSync } from 'node:fs';

export interface ProcessStat {
  pid: number;
  state: string;
  parent: number;
  group: number;
  session: number;
  threads: number;
}

/** Null when there is no such process. */
export function processStat(pid: number): ProcessStat | null {
  let text: string;
  try {
    text = readFileSync(`/proc/${pid}/stat`, 'utf8');
  } catch {
    return null;
  }
  // The command name stands in parentheses and may hold anything, spaces and parentheses too.
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  return {
    pid,
    state: fields[0] ?? '?',
    parent: Number(fields[1]),
    group: Number(fields[2]),
    session: Number(fields[3]),
    threads: Number(fields[17]),
  };
}

/** Running, stopped or waiting; a zombie is not alive. */
export function isAlive(pid: number): boolean {
  const stat = processStat(pid);
  return stat !== null && stat.state !== 'Z' && stat.state !== 'X';
}

/** There is no entry at all: ended and reaped. */
export function isGone(pid: number): boolean {
  return processStat(pid) === null;
}

export function allProcesses(): ProcessStat[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map((name) => processStat(Number(name)))
    .filter((stat) => stat !== null);
}

export function commandLine(pid: number): string[] {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0').slice(0, -1);
  } catch {
    return [];
  }
}

/** The number of open descriptors of a process. */
export function descriptorCount(pid: number): number {
  return readdirSync(`/proc/${pid}/fd`).length;
}
