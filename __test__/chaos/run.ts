/**
 * `npm run test:chaos [-- --seconds N --seed S --kernels K --rounds R]`: chaos over many kernels, then rounds of host deaths,
 * and after each what must hold. Owns the command line, the clock, the log and the verdict.
 */

import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { KernelHost } from 'kernelhost';
import { pythonForTests } from '../helpers/index.ts';
import { Actor } from './actions.ts';
import { hostDeaths } from './host-death.ts';
import { type Memory, megabytes, memory, memoryGrew, Surroundings } from './invariants.ts';
import { hostOf, plan } from './plan.ts';
import { RunMark } from './process-table.ts';
import { World } from './world.ts';

const LOG_EVERY_MS = 10_000;
/** Of the time of a run: by then every path has been taken, and every pool has its size. */
const WARM_UP_SHARE = 0.3;

const say = (text: string): void => void process.stdout.write(`${text}\n`);

function number(name: string, text: string | undefined, otherwise: number): number {
  const value = text === undefined ? otherwise : Number(text);
  if (Number.isSafeInteger(value) && value >= 0) return value;
  process.stderr.write(`--${name} must be a whole number, not "${text}"\n`);
  process.exit(2);
}

/** Loads the addon and takes every path of start and end once, so that what stays open for good is open. */
async function warmUp(): Promise<void> {
  for (const launch of ['auto', 'spawn'] as const) {
    const host = new KernelHost({ python: pythonForTests(), shell: 'plain', launch });
    await host.kernel().execute('1 + 1');
    await host.close();
  }
}

/** Does the plan to its end, or until there are too many failures. */
async function chaos(seed: number, seconds: number, kernels: number, mark: RunMark): Promise<World> {
  const folder = mkdtempSync(join(tmpdir(), 'kernelhost-chaos-'));
  await warmUp();
  const surroundings = new Surroundings();
  const world = new World(folder);
  const actor = new Actor(world);
  const { hosts, kernels: shapes, actions } = plan(seed, seconds, kernels);
  hosts.forEach((shape, place) => {
    world.openHost(place, shape);
  });
  shapes.forEach((shape, slot) => {
    const place = world.hosts[hostOf(slot, hosts.length)];
    if (place !== undefined) world.openKernel(slot, place, shape);
  });

  const { history, ledger } = world;
  let before: Memory | null = null;
  let nextLogMs = LOG_EVERY_MS;
  const tick = () => {
    ledger.check();
    if (history.elapsedMs < nextLogMs) return;
    nextLogMs += LOG_EVERY_MS;
    say(logLine(world));
  };
  for (const action of actions) {
    while (history.elapsedMs < action.atMs) {
      await sleep(Math.min(100, action.atMs - history.elapsedMs));
      tick();
    }
    tick();
    if (before === null && action.atMs > seconds * 1e3 * WARM_UP_SHARE) before = await memory(history.bytes);
    if (world.tooManyFailures) break;
    actor.perform(action);
  }

  actor.continueAll();
  actor.closeEverything();
  while (ledger.waiting) {
    await sleep(20);
    tick();
  }
  // The audits come a moment after the closes.
  await sleep(300);
  rmSync(folder, { recursive: true, force: true });
  const after = await memory(history.bytes);
  for (const stray of await surroundings.strays(mark, world.leaders)) world.fail(stray);
  if (before !== null) for (const growth of memoryGrew(before, after)) world.fail(growth);
  say(logLine(world));
  say(table(world, before, after));
  return world;
}

function logLine({ history, ledger, counts, failures }: World): string {
  const sum = (prefix: string) =>
    [...counts].reduce((total, [what, count]) => (what.startsWith(prefix) ? total + count : total), 0);
  const seconds = `${(history.elapsedMs / 1e3).toFixed(0)} s`.padStart(6);
  return (
    `${seconds}: ${sum('do: ')} actions, ${sum('start: ')} starts, ${sum('exit: ')} exits, ${sum('cell: ')} cells, ` +
    `${sum('sent ')} signals, ${ledger.pending} calls pending, ${megabytes(process.memoryUsage.rss())}, ${failures.length} failures`
  );
}

function table({ counts, ledger, history }: World, before: Memory | null, after: Memory): string {
  const rows = [...counts].sort(([a], [b]) => (a < b ? -1 : 1));
  const width = Math.max(...rows.map(([what]) => what.length));
  const lines = rows.map(([what, count]) => `  ${what.padEnd(width)} ${String(count).padStart(8)}`);
  const from = before === null ? '' : `${megabytes(before.residentBytes)} (heap ${megabytes(before.heapBytes)}) → `;
  return [
    ...lines,
    `  calls settled: ${ledger.settled}, the slowest after ${(ledger.longestMs / 1e3).toFixed(1)} s`,
    `  memory: ${from}${megabytes(after.residentBytes)} (heap ${megabytes(after.heapBytes)}), history ${megabytes(history.bytes)}`,
  ].join('\n');
}

async function main(): Promise<number> {
  const { values } = parseArgs({
    options: {
      seconds: { type: 'string' },
      seed: { type: 'string' },
      kernels: { type: 'string' },
      rounds: { type: 'string' },
    },
  });
  const seed = number('seed', values.seed, Date.now() % 1_000_000_000);
  const seconds = number('seconds', values.seconds, 100);
  const kernels = number('kernels', values.kernels, 24);
  const rounds = number('rounds', values.rounds, process.env.CI === undefined ? 300 : 30);
  const again = `npm run test:chaos -- --seed ${seed} --seconds ${seconds} --kernels ${kernels} --rounds ${rounds}`;
  say(
    `Chaos with seed ${seed}: ${seconds} s over ${kernels} kernels, then ${rounds} deaths of a host.\nThe same again: ${again}`,
  );
  const mark = new RunMark();
  process.env[mark.variable] = mark.value;

  const failures: string[] = [];
  if (seconds > 0) {
    const world = await chaos(seed, seconds, kernels, mark);
    failures.push(...world.failures);
    if (world.failures.length > 0) say(`The whole history: ${world.history.save()}`);
  }
  if (rounds > 0) failures.push(...(await hostDeaths(seed, rounds, say)));
  if (failures.length === 0) {
    say(`All held, with seed ${seed}.`);
    return 0;
  }
  say(`FAILED with seed ${seed}: ${failures.length} failures. The same again: ${again}`);
  return 1;
}

process.exitCode = await main();
