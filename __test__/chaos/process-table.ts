/** Owns what the chaos suite knows of processes, and is the only place from where it signals one. Knows no kernel. */

import { randomUUID } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';

/** A pid alone names nobody: it is given away again. With the time of its start it does. */
export interface Identity {
  pid: number;
  /** In clock ticks since the machine started. */
  start: string;
}

export interface Process extends Identity {
  state: string;
  parent: number;
  group: number;
  session: number;
}

/** In the environment of this process, and of the programs that cells start. */
export class RunMark {
  readonly variable: string;
  readonly value: string = randomUUID();

  constructor(variable: string = 'KERNELHOST_CHAOS') {
    this.variable = variable;
  }

  /** The living processes that carry it, without this one. A zombie has no environment. */
  carriers(): Process[] {
    const text = `${this.variable}=${this.value}`;
    return everyProcess().filter(({ pid }) => pid !== process.pid && environment(pid).includes(text));
  }
}

/** Null when there is no such process. */
export function look(pid: number): Process | null {
  let text: string;
  try {
    text = readFileSync(`/proc/${pid}/stat`, 'latin1');
  } catch {
    return null;
  }
  // The name stands in parentheses and may hold anything.
  const [state = '?', parent, group, session, ...rest] = text.slice(text.lastIndexOf(')') + 2).split(' ');
  return {
    pid,
    state,
    parent: Number(parent),
    group: Number(group),
    session: Number(session),
    start: rest[15] ?? '',
  };
}

export function identify(pid: number): Identity | null {
  const found = look(pid);
  return found === null ? null : { pid, start: found.start };
}

/** The process, while it is neither gone, nor a zombie, nor another one of the same number. */
export function alive({ pid, start }: Identity): Process | null {
  const found = look(pid);
  return found === null || found.start !== start || found.state === 'Z' || found.state === 'X' ? null : found;
}

export function everyProcess(): Process[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map((name) => look(Number(name)))
    .filter((found) => found !== null);
}

/** The text of the start environment; empty where it may not be read, and for zombies. */
export function environment(pid: number): string {
  return read(`/proc/${pid}/environ`);
}

export function commandLine(pid: number): string {
  return read(`/proc/${pid}/cmdline`).split('\0').join(' ').trim();
}

export function describe(processes: readonly Process[]): string {
  return processes
    .map(
      ({ pid, state, parent, session }) =>
        `${pid} (${state}, parent ${parent}, session ${session}) ${commandLine(pid)} [${lifeMarker(pid)}]`,
    )
    .join('\n');
}

/** What kernelhost itself has marked the process with. */
export function lifeMarker(pid: number): string {
  return /(?:^|\0)KERNELHOST_LIFE=([^\0]*)/.exec(environment(pid))?.[1] ?? '';
}

/**
 * The living processes that belong to hosts of the processes given, by kernelhost's own marker: it names the pid and the start
 * of the process that the host is in. Templates and lives show nothing else: their environment is set after they were started.
 */
export function carriersOfHosts(owners: readonly Identity[]): Process[] {
  const texts = owners.map(({ pid, start }) => `-${hex(pid, 8)}-${hex(start, 16)}-`);
  return everyProcess().filter(({ pid }) => {
    const marker = lifeMarker(pid);
    return marker !== '' && texts.some((text) => marker.includes(text));
  });
}

/**
 * Sends a signal to the very process that is meant, if it is still there and (where given) holds what must be true of it.
 *
 * Between the look and the signal are microseconds. For the signal to go astray the process would have to end, be reaped, and
 * every other pid of the machine be given away in that time.
 */
export function signal(
  target: Identity,
  name: NodeJS.Signals,
  holds: (found: Process) => boolean = () => true,
): boolean {
  const found = alive(target);
  if (found === null || found.pid <= 1 || found.pid === process.pid || !holds(found)) return false;
  try {
    process.kill(target.pid, name);
    return true;
  } catch {
    return false;
  }
}

function hex(number: number | string, width: number): string {
  return BigInt(number).toString(16).padStart(width, '0');
}

function read(file: string): string {
  try {
    return readFileSync(file, 'latin1');
  } catch {
    return '';
  }
}
