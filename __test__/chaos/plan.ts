/**
 * Owns what is done, to whom and when: a pure function of the seed, the time and the number of kernels. Knows no process and no
 * kernel; an action names places (`slot`, `host`), and whoever is there when its time has come is meant.
 */

import { type Cell, cell } from './cells.ts';
import { Prng } from './prng.ts';

export interface HostShape {
  shell: 'ipython' | 'plain';
  launch: 'auto' | 'spawn';
}

export interface KernelShape {
  stuck: 'end' | 'wait';
  recovery: 'restart' | 'none';
}

export type Deed =
  | { do: 'start'; slot: number; abortAfterMs: number | null }
  | { do: 'cell'; slot: number; cell: Cell }
  | { do: 'interrupt'; slot: number }
  | { do: 'restart'; slot: number }
  | { do: 'kill'; slot: number; signal: NodeJS.Signals }
  | { do: 'usage'; slot: number }
  /** The kernel is closed, and another one is in its place at once. */
  | { do: 'close'; slot: number; graceMs: number; next: KernelShape }
  | { do: 'signal a life'; slot: number; signal: NodeJS.Signals }
  /** `which`: picks one of those there are. */
  | { do: 'signal a child'; slot: number; signal: NodeJS.Signals; which: number }
  | { do: 'stop a life'; slot: number; forMs: number }
  | { do: 'signal the template'; host: number; signal: NodeJS.Signals }
  | { do: 'stop the template'; host: number; forMs: number }
  /** The host is closed with all its kernels, and another one with other kernels is in its place at once. */
  | { do: 'close a host'; host: number; graceMs: number; next: HostShape; nextKernels: KernelShape[] };

export type Action = Deed & { number: number; atMs: number };

export interface Plan {
  hosts: HostShape[];
  /** By slot; the host of a slot is `hostOf`. */
  kernels: KernelShape[];
  actions: Generator<Action>;
}

/** What two cores can do while calls still come to their turn: at twice the rate most actions wait for a start. */
const ACTIONS_PER_SECOND = 30;

const weights: Record<Deed['do'] | 'storm' | 'burst', number> = {
  cell: 150,
  start: 10,
  interrupt: 10,
  restart: 4,
  kill: 4,
  usage: 3,
  close: 5,
  'signal a life': 8,
  'signal a child': 8,
  'stop a life': 4,
  'signal the template': 1.5,
  'stop the template': 1,
  'close a host': 0.7,
  storm: 0.5,
  burst: 6,
};

/** Longer than a fork may take, so that starts fall back meanwhile. */
const LONG_STOP_MS = 6_500;

export function hostOf(slot: number, hosts: number): number {
  return slot % hosts;
}

export function plan(seed: number, seconds: number, kernels: number): Plan {
  const random = new Prng(seed);
  const hosts: HostShape[] = [
    { shell: 'ipython', launch: 'auto' },
    { shell: 'plain', launch: 'auto' },
    { shell: 'plain', launch: 'spawn' },
  ];
  return {
    hosts,
    kernels: Array.from({ length: kernels }, () => kernelShape(random)),
    actions: actions(random, seconds * 1e3, kernels, hosts.length),
  };
}

function* actions(random: Prng, durationMs: number, kernels: number, hosts: number): Generator<Action> {
  let [number, atMs] = [0, 0];
  while (true) {
    // Pauses of all lengths: some actions meet a busy machine, some a quiet one.
    atMs += random.between(0, 2 * (1e3 / ACTIONS_PER_SECOND));
    if (atMs >= durationMs) return;
    for (const deed of deeds(random, kernels, hosts)) yield { ...deed, number: ++number, atMs };
  }
}

/** One or several that come in the same moment. */
function deeds(random: Prng, kernels: number, hosts: number): Deed[] {
  const slot = random.between(0, kernels - 1);
  const host = random.between(0, hosts - 1);
  const inHost = Array.from({ length: kernels }, (_, slot) => slot).filter((slot) => hostOf(slot, hosts) === host);
  const what = random.weighted(weights);
  switch (what) {
    case 'start':
      return [{ do: what, slot, abortAfterMs: random.chance(0.2) ? random.between(0, 30) : null }];
    case 'cell':
      return [{ do: what, slot, cell: cell(random) }];
    case 'interrupt':
    case 'restart':
    case 'usage':
      return [{ do: what, slot }];
    case 'kill':
      return [{ do: what, slot, signal: random.pick<NodeJS.Signals>(['SIGKILL', 'SIGTERM', 'SIGINT']) }];
    case 'close':
      return [{ do: what, slot, graceMs: random.between(0, 500), next: kernelShape(random) }];
    case 'signal a life':
      return [{ do: what, slot, signal: random.pick<NodeJS.Signals>(['SIGKILL', 'SIGSEGV', 'SIGTERM']) }];
    case 'signal a child': {
      const signal = random.pick<NodeJS.Signals>(['SIGKILL', 'SIGSEGV', 'SIGTERM']);
      return [{ do: what, slot, signal, which: random.next() }];
    }
    case 'stop a life':
      return [{ do: what, slot, forMs: random.between(1, 700) }];
    case 'signal the template':
      return [{ do: what, host, signal: random.pick<NodeJS.Signals>(['SIGKILL', 'SIGSEGV', 'SIGTERM']) }];
    case 'stop the template':
      return [{ do: what, host, forMs: random.chance(0.2) ? LONG_STOP_MS : random.between(1, 1_000) }];
    case 'close a host': {
      const next = hostShape(random);
      const nextKernels = inHost.map(() => kernelShape(random));
      return [{ do: what, host, graceMs: random.between(0, 500), next, nextKernels }];
    }
    case 'storm':
      // All kernels of a host are killed at once, and called at once.
      return inHost.flatMap((slot): Deed[] => [
        { do: 'signal a life', slot, signal: 'SIGKILL' },
        { do: 'cell', slot, cell: cell(random, 'arithmetic') },
      ]);
    case 'burst':
      // A queue behind one kernel, and something that comes in its midst.
      return Array.from(
        { length: random.between(2, 4) },
        (): Deed => ({ do: 'cell', slot, cell: cell(random) }),
      ).concat(
        random.chance(0.5) ? [{ do: 'interrupt', slot }] : [{ do: 'cell', slot, cell: cell(random, 'remember') }],
      );
  }
}

function hostShape(random: Prng): HostShape {
  // A cold start of IPython takes half a second of a core: three such kernels at once would stop everything else.
  const launch = random.chance(0.25) ? 'spawn' : 'auto';
  return { launch, shell: launch === 'auto' && random.chance(0.5) ? 'ipython' : 'plain' };
}

function kernelShape(random: Prng): KernelShape {
  return { stuck: random.chance(0.2) ? 'wait' : 'end', recovery: random.chance(0.15) ? 'none' : 'restart' };
}
