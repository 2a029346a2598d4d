/**
 * What a monitor's client is told: one look at a host and its kernels.
 *
 * One sampler per host, asked by all its clients: a look is taken once for all of them, and only while somebody asks. What the
 * Linux kernel has to add up for each process (its memory) costs the most, so only as many processes are measured in one look
 * as its budget of time allows, those first that were not measured for longest, and those that run a cell before those that do
 * not. With hundreds of kernels the figures get older, not dearer; `usageAgeMs` says how old they are.
 */

import { setTimeout as sleep } from 'node:timers/promises';
import type { ExitCause, ExitReason, ExitStatus } from '../exit-reason.ts';
import type { KernelState, Usage } from '../kernel.ts';
import type { RunningCell } from './calls.ts';
import { LoopDelay } from './loop-delay.ts';

/** Of the format. Fields may be added to a version; what is there keeps its meaning. */
export const SNAPSHOT_VERSION = 1;

export interface Snapshot {
  version: number;
  host: HostSnapshot;
  kernels: KernelSnapshot[];
}

export interface HostSnapshot {
  pid: number;
  /** Since the host was made. */
  uptimeMs: number;
  /** Of the whole daemon. */
  rssBytes: number;
  /** By how much the daemon's event loop was late, at most, since the snapshot before. */
  eventLoopDelayMs: number;
}

export interface KernelSnapshot {
  id: string;
  state: KernelState;
  generation: number;
  pid: number | null;
  /** Of the life; null where there is none. */
  ageMs: number | null;
  cell: RunningCell | null;
  /** These six are null until they have been measured, and where there is no life. */
  cpuMs: number | null;
  rssBytes: number | null;
  pssBytes: number | null;
  processes: number | null;
  threads: number | null;
  usageAgeMs: number | null;
  /** Between the last two measurements of this life; 100 is one processor. */
  cpuPercent: number | null;
  lastExit: ExitSnapshot | null;
}

export interface ExitSnapshot {
  cause: ExitCause;
  /** `exited 1`, `SIGKILL`, `unknown`. */
  status: string;
  message: string;
  generation: number;
  /** ISO 8601. */
  at: string;
}

/** What a kernel knows of itself without asking anybody. */
export interface Glance {
  id: string;
  state: KernelState;
  generation: number;
  pid: number | null;
  ageMs: number | null;
  cell: RunningCell | null;
  lastExit: { exit: ExitReason; at: Date } | null;
}

/** A kernel, as the monitor sees it. */
export interface Watchable {
  glance(): Glance;
  /** Null where it cannot be measured. */
  measure(): Promise<Usage | null>;
}

interface Figures {
  generation: number;
  usage: Usage;
  at: number;
  cpuPercent: number | null;
}

/** A client that asks this soon after another gets what the other got. */
const SHARED_FOR_MS = 200;
/** The time that one look may take: it is one of at most two in a second. */
const BUDGET_MS = 150;
/** Supervision has four threads for such looks and needs them, too. */
const AT_ONCE = 2;
/** A kernel that runs a cell is measured this much more often than an idle one, where not all can be. */
const RUNNING_WEIGHT = 8;
/** Before anything that has been measured. */
const NEVER = -1e12;

export class Sampler {
  readonly #kernels: () => readonly Watchable[];
  readonly #began = performance.now();
  readonly #figures = new WeakMap<Watchable, Figures>();
  readonly #measured = new WeakMap<Watchable, number>();
  readonly #inFlight = new Set<Watchable>();
  #loop: LoopDelay | null = null;
  #taking: Promise<string> | null = null;
  #taken: { at: number; line: string } | null = null;

  constructor(kernels: () => readonly Watchable[]) {
    this.#kernels = kernels;
  }

  /** One snapshot, as a line of JSON. */
  async take(): Promise<string> {
    if (this.#taken !== null && performance.now() - this.#taken.at < SHARED_FOR_MS) return this.#taken.line;
    this.#taking ??= this.#take().finally(() => {
      this.#taking = null;
    });
    return this.#taking;
  }

  /** Nobody asks any more. */
  rest(): void {
    this.#loop?.stop();
    this.#loop = null;
    this.#taken = null;
  }

  async #take(): Promise<string> {
    this.#loop ??= new LoopDelay();
    await this.#measure();
    const line = `${JSON.stringify(this.#snapshot())}\n`;
    this.#taken = { at: performance.now(), line };
    return line;
  }

  async #measure(): Promise<void> {
    const now = performance.now();
    const due = this.#kernels()
      .map((kernel) => ({ kernel, glance: kernel.glance() }))
      .filter(({ kernel, glance }) => glance.pid !== null && !this.#inFlight.has(kernel))
      .map(({ kernel, glance }) => ({
        kernel,
        waiting: (now - (this.#measured.get(kernel) ?? NEVER)) * (glance.state === 'running' ? RUNNING_WEIGHT : 1),
      }))
      .sort((one, other) => other.waiting - one.waiting)
      .map(({ kernel }) => kernel);
    const end = now + BUDGET_MS;
    const takeTurns = async () => {
      while (performance.now() < end && this.#inFlight.size < AT_ONCE) {
        const kernel = due.shift();
        if (kernel === undefined) return;
        await this.#measureOne(kernel);
      }
    };
    const turns = Promise.all(Array.from({ length: AT_ONCE }, takeTurns));
    // A process that Linux cannot measure at the moment holds up nobody: it is asked for nothing else meanwhile.
    const over = new AbortController();
    await Promise.race([turns, sleep(BUDGET_MS, undefined, { ref: false, signal: over.signal }).catch(() => {})]);
    over.abort();
  }

  async #measureOne(kernel: Watchable): Promise<void> {
    this.#inFlight.add(kernel);
    const { generation } = kernel.glance();
    const usage = await kernel.measure();
    this.#inFlight.delete(kernel);
    const at = performance.now();
    this.#measured.set(kernel, at);
    // A life that ended meanwhile: the figures may be of either.
    if (usage === null || kernel.glance().generation !== generation) return;
    const before = this.#figures.get(kernel);
    const cpuPercent =
      before?.generation === generation ? ((usage.cpuMs - before.usage.cpuMs) / (at - before.at)) * 100 : null;
    this.#figures.set(kernel, {
      generation,
      usage,
      at,
      cpuPercent: cpuPercent === null ? null : Math.max(0, Math.round(cpuPercent * 10) / 10),
    });
  }

  #snapshot(): Snapshot {
    return {
      version: SNAPSHOT_VERSION,
      host: {
        pid: process.pid,
        uptimeMs: Math.round(performance.now() - this.#began),
        rssBytes: process.memoryUsage.rss(),
        eventLoopDelayMs: Math.round((this.#loop?.take() ?? 0) * 10) / 10,
      },
      kernels: this.#kernels().map((kernel) => this.#kernelSnapshot(kernel)),
    };
  }

  #kernelSnapshot(kernel: Watchable): KernelSnapshot {
    const { id, state, generation, pid, ageMs, cell, lastExit } = kernel.glance();
    const found = this.#figures.get(kernel);
    const figures = pid !== null && found?.generation === generation ? found : null;
    const usage = figures?.usage;
    return {
      id,
      state,
      generation,
      pid,
      ageMs: ageMs === null ? null : Math.round(ageMs),
      cell,
      cpuMs: usage?.cpuMs ?? null,
      cpuPercent: figures?.cpuPercent ?? null,
      rssBytes: usage?.rssBytes ?? null,
      pssBytes: usage?.pssBytes ?? null,
      processes: usage?.processes ?? null,
      threads: usage?.threads ?? null,
      usageAgeMs: figures === null ? null : Math.round(performance.now() - figures.at),
      lastExit: lastExit === null ? null : exitSnapshot(lastExit),
    };
  }
}

function exitSnapshot({ exit, at }: NonNullable<Glance['lastExit']>): ExitSnapshot {
  const { cause, status, message, generation } = exit;
  return { cause, status: statusText(status), message, generation, at: at.toISOString() };
}

function statusText(status: ExitStatus): string {
  switch (status.kind) {
    case 'exited':
      return `exited ${status.code}`;
    case 'signaled':
      return status.signal;
    case 'unknown':
      return 'unknown';
  }
}
