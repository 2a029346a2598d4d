/**
 * Owns the rounds of host deaths: a Node daemon is killed at a random moment, sometimes its template or its kernels with it or
 * stopped before, and what must be gone by when is looked for.
 */

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { pythonForTests, within } from '../helpers/index.ts';
import { moments, type Prepared } from './daemon.ts';
import { files, subtract } from './invariants.ts';
import { Prng } from './prng.ts';
import {
  alive,
  carriersOfHosts,
  commandLine,
  describe,
  everyProcess,
  type Identity,
  identify,
  lifeMarker,
  look,
  type Process,
  RunMark,
  signal,
} from './process-table.ts';

const LONGEST_DELAY_MS = 60;
/** Some of the first starts come so far that the template is up and forks. */
const FIRST_START_MS = 400;
const KERNELS_GONE_MS = 100;
const ALL_GONE_MS = 2_000;
/**
 * Nobody waits for the end of a killed process: the machine has to give each of up to nine interpreters a core, to free its
 * memory and to say so, and this process has to get one to look. The other core is taken by whatever else the machine does.
 */
const SCHEDULING_SLACK_MS = 100;
const LOOK_EVERY_MS = 2;

/** Who goes in the same instant, or is in no state to hear of it. */
const companies = [
  'alone',
  'with the template',
  'after the template',
  'with stopped kernels',
  'with a stopped template',
] as const;

interface Round {
  moment: string;
  launch: 'auto' | 'spawn';
  company: (typeof companies)[number];
  delayMs: number;
}

/** Who there was at the kill, and how long after it the last of them were seen. */
interface Seen {
  kernels: number;
  processes: number;
  kernelsMs: number;
  everythingMs: number;
}

/** Returns the failures. `say` gets a line per ten rounds, and the summary. */
export async function hostDeaths(seed: number, rounds: number, say: (text: string) => void): Promise<string[]> {
  const random = new Prng(seed ^ 0x5eed);
  const failures: string[] = [];
  const before = files();
  const daemons: Daemon[] = [];
  let told = 0;
  const tell = () => {
    for (const failure of failures.slice(told)) say(`FAILURE: ${failure}`);
    told = failures.length;
  };
  const all: Seen[] = [];
  for (let number = 1; number <= rounds; number += 1) {
    const round = chosen(random);
    const name = `host death ${number} of seed ${seed} (${JSON.stringify(round)})`;
    try {
      all.push(await die(round, daemons, (message) => failures.push(`${name}: ${message}`)));
    } catch (error) {
      failures.push(`${name}: ${String(error)}`);
    }
    tell();
    if (number % 10 === 0) say(`${String(number).padStart(6)} deaths of a host, ${failures.length} failures`);
  }
  // A process that happened to be between two programs has shown no environment in its round.
  const late = carriersOfHosts(daemons.map(({ identity }) => identity));
  if (late.length > 0) failures.push(`after all rounds ${late.length} processes are left:\n${describe(late)}`);
  for (const each of late) signal(each, 'SIGKILL');
  const made = subtract(files(), before);
  if (made.length > 0)
    failures.push(`after all rounds files are left (if nothing else ran meanwhile): ${made.join(', ')}`);
  tell();
  const last = (of: 'kernelsMs' | 'everythingMs') => Math.max(0, ...all.map((seen) => seen[of])).toFixed(0);
  const sum = (of: 'kernels' | 'processes') => all.reduce((total, seen) => total + seen[of], 0);
  say(
    `  ${all.length} deaths of a host with ${sum('processes')} processes, ${sum('kernels')} of them kernels; the last kernel was ` +
      `gone after ${last('kernelsMs')} ms, everything after ${last('everythingMs')} ms`,
  );
  return failures;
}

function chosen(random: Prng): Round {
  const names = Object.keys(moments) as [string, ...string[]];
  const moment = random.pick(names);
  const late = moments[moment]?.kernels === 0 && random.chance(0.5);
  return {
    moment,
    launch: random.chance(0.75) ? 'auto' : 'spawn',
    company: random.pick(companies),
    delayMs: random.between(0, late ? FIRST_START_MS : LONGEST_DELAY_MS),
  };
}

/** One round; how long after the kill the last ones were seen. */
async function die(round: Round, all: Daemon[], fail: (message: string) => void): Promise<Seen> {
  const mark = new RunMark('KERNELHOST_CHAOS_ROUND');
  const script = fileURLToPath(new URL('daemon.ts', import.meta.url));
  const child = spawn(process.execPath, [script, round.moment, round.launch, pythonForTests()], {
    env: { ...process.env, [mark.variable]: mark.value },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const ended = once(child, 'exit');
  const identity = identify(child.pid ?? 0);
  if (identity === null) throw new Error('the daemon did not start');
  const daemon = new Daemon(identity, mark);
  all.push(daemon);
  try {
    const [line] = await within(
      'a daemon comes to its moment',
      once(createInterface({ input: child.stdout }), 'line'),
      30_000,
    );
    const prepared = JSON.parse(line as string) as Prepared;
    if (round.delayMs > 0) await sleep(round.delayMs);
    return await kill(round, daemon, prepared, fail);
  } finally {
    child.kill('SIGKILL');
    await ended;
    for (const each of daemon.carriers()) signal(each, 'SIGKILL');
  }
}

async function kill(round: Round, daemon: Daemon, prepared: Prepared, fail: (message: string) => void): Promise<Seen> {
  const template = templateOf(daemon);
  const stopped = [
    ...(round.company === 'with stopped kernels' ? prepared.lives.map(identify) : []),
    ...(round.company === 'with a stopped template' ? [template] : []),
  ];
  for (const each of stopped) if (each !== null) signal(each, 'SIGSTOP');
  // What has given up its environment is known by its session only, and only while the leader of that is there.
  const family = daemon.members();
  const kernels = family.filter(({ pid }) => isKernel(pid)).length;
  if (round.company === 'after the template' && template !== null) signal(template, 'SIGKILL');
  if (!signal(daemon.identity, 'SIGKILL')) throw new Error('the daemon was gone before it was killed');
  if (round.company === 'with the template' && template !== null) signal(template, 'SIGKILL');
  const ages = await watch(performance.now(), daemon, family, fail);
  return { kernels, processes: family.length, ...ages };
}

async function watch(
  killedAt: number,
  daemon: Daemon,
  family: readonly Identity[],
  fail: (message: string) => void,
): Promise<Pick<Seen, 'kernelsMs' | 'everythingMs'>> {
  const seen = { kernelsMs: 0, everythingMs: 0 };
  let kernelsTold = false;
  while (true) {
    // Before the look: what is seen now was there at least until then.
    const age = performance.now() - killedAt;
    const known = new Map(daemon.carriers().map((found) => [found.pid, found]));
    for (const found of family.map(alive)) if (found !== null) known.set(found.pid, found);
    const left = [...known.values()];
    const kernels = left.filter(({ pid }) => isKernel(pid));
    if (kernels.length > 0) seen.kernelsMs = age;
    if (left.length === 0) return seen;
    seen.everythingMs = age;
    if (kernels.length > 0 && age > KERNELS_GONE_MS + SCHEDULING_SLACK_MS && !kernelsTold) {
      kernelsTold = true;
      fail(`${age.toFixed(0)} ms after the kill these kernels are alive:\n${describe(kernels)}`);
    }
    if (age > ALL_GONE_MS + SCHEDULING_SLACK_MS) {
      fail(`${age.toFixed(0)} ms after the kill these are alive:\n${describe(left)}`);
      return seen;
    }
    await sleep(LOOK_EVERY_MS);
  }
}

/** Who belongs to the daemon of one round. */
class Daemon {
  readonly identity: Identity;
  readonly #mark: RunMark;

  constructor(identity: Identity, mark: RunMark) {
    this.identity = identity;
    this.#mark = mark;
  }

  /** By the mark of the round, and by kernelhost's own. */
  carriers(): Process[] {
    const found = [...this.#mark.carriers(), ...carriersOfHosts([this.identity])];
    return [...new Map(found.map((each) => [each.pid, each])).values()].filter(({ pid }) => pid !== this.identity.pid);
  }

  /** All that it has started so far: those that are marked, and those of their sessions. */
  members(): Identity[] {
    const carriers = this.carriers();
    const pids = new Set(carriers.map(({ pid }) => pid));
    const sessions = new Set(carriers.map(({ session }) => session));
    const own = look(this.identity.pid)?.session;
    return everyProcess().filter(({ pid, session }) => pids.has(pid) || (session !== own && sessions.has(session)));
  }
}

/** Also one that is not ready yet, and of which its host has told nobody. */
function templateOf(daemon: Daemon): Identity | null {
  return (
    everyProcess().find(
      ({ pid, parent }) => parent === daemon.identity.pid && commandLine(pid).endsWith('boot.py template'),
    ) ?? null
  );
}

/** It leads its session, runs our runtime, and its marker names a kernel: that of a template or a warden names none. */
function isKernel(pid: number): boolean {
  const marker = lifeMarker(pid);
  const servant = marker === '' || marker.endsWith('-ffffffff-00000000');
  return !servant && look(pid)?.session === pid && commandLine(pid).includes('boot.py');
}
