/**
 * A forked kernel runs a long `subprocess.run` in a host that has lived long: it completes; it is killed and that is told and
 * repaired; its template is killed and it does not notice. The same for kernels that were spawned cold.
 */

import assert from 'node:assert/strict';
import { existsSync, readFileSync } from 'node:fs';
import { release } from 'node:os';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import type { CellResult, Kernel, KernelHost, TemplateInfo } from 'kernelhost';
import { begin, deathOf, python } from '../fixtures/endings-calls.ts';
import {
  type HostForTest,
  isAlive,
  isGone,
  next,
  pythonVersion,
  startHost,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

const stepsScript = fileURLToPath(new URL('../fixtures/story-steps.sh', import.meta.url));

const STEPS = 12;
const STEP_SECONDS = 2.5;
/** Begins 10 s after the first. */
const STEP_OF_THE_KILL = 5;
const STORY_MS = 60_000;

/** A caller knows of a death within this time, counted from the kill. */
const TOLD_WITHIN_MS = 100;

const LIVES = 300;
/** Cold lives cost half a second of CPU each: as many as make a host "old" without an hour of start-up. */
const COLD_LIVES = 12;
const AT_ONCE = 6;

const version = pythonVersion();
const tooOld =
  Number(version.split('.')[1]) < 14 ? `the story is told on Python 3.14 or later, this is ${version}` : false;

interface Story {
  kernel: Kernel;
  code: string;
  /** Pids of the target and of its steps, as far as they have begun. */
  pids(): number[];
  /** How often the cell has run. */
  runs(): number;
}

function story(kernel: Kernel, folder: string): Story {
  const [journal, runs] = [join(folder, `${kernel.id}.steps`), join(folder, `${kernel.id}.runs`)];
  const lines = (file: string) => (existsSync(file) ? readFileSync(file, 'utf8').split('\n').slice(0, -1) : []);
  const command = ['sh', stepsScript, journal, String(STEPS), String(STEP_SECONDS)];
  return {
    kernel,
    code: [
      'import subprocess, sys',
      `with open(${python(runs)}, "a") as file: print("run", file=file)`,
      'kept = "of the first cell"',
      'print("before the steps")',
      'print("a word of warning", file=sys.stderr)',
      `done = subprocess.run(${JSON.stringify(command)}, capture_output=True, text=True, timeout=300)`,
      'print(done.stdout, end="")',
      'done.returncode',
    ].join('\n'),
    pids: () => lines(journal).map((line) => Number(line.split(' ')[1])),
    runs: () => lines(runs).length,
  };
}

async function toStepOfTheKill({ pids }: Story): Promise<void> {
  await until(`step ${STEP_OF_THE_KILL} begins`, () => pids().length > STEP_OF_THE_KILL, STORY_MS);
}

async function completes({ kernel, pids, runs }: Story, call: Promise<CellResult>, pid: number): Promise<void> {
  const result = await within('the long cell completes', call, STORY_MS);
  assert.equal(result.status, 'ok', result.error?.value);
  assert.equal(result.text, '0');
  const steps = Array.from({ length: STEPS }, (_, step) => `step ${step + 1} is done\n`).join('');
  assert.equal(result.stdout, `before the steps\n${steps}`);
  assert.equal(result.stderr, 'a word of warning\n');
  assert.ok(result.durationMs > STEPS * STEP_SECONDS * 1000);
  assert.equal(result.life.pid, pid);
  assert.equal(pids().length, STEPS + 1);

  const after = await within('the next cell', kernel.execute('kept, len(done.stderr.splitlines())'));
  assert.equal(after.text, `('of the first cell', ${STEPS})`);
  assert.equal(after.life.pid, pid);
  assert.equal(after.recovered, null);
  assert.equal(kernel.lastExit, null);
  assert.equal(runs(), 1);
}

/** Kills the life under its running cell, and sees everything told and everything repaired. */
async function diesAndRecovers(told: Story, call: Promise<CellResult>): Promise<void> {
  const { kernel, code, pids, runs } = told;
  const pid = kernel.pid;
  assert.ok(pid !== null);
  const steps = pids();
  assert.ok(steps.some(isAlive), 'the target runs');
  const exited = next(kernel, 'exit');

  const killed = performance.now();
  process.kill(pid, 'SIGKILL');
  const error = await deathOf(call);
  const toldMs = performance.now() - killed;
  assert.ok(toldMs < TOLD_WITHIN_MS, `the call was rejected ${toldMs} ms after the kill`);

  const { exit, partial } = error;
  assert.deepEqual(exit.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
  assert.equal(exit.cause, 'external-signal');
  assert.equal(exit.pid, pid);
  assert.equal(exit.generation, 1);
  assert.ok(exit.uptimeMs > 10_000 && exit.uptimeMs < STORY_MS, `uptime ${exit.uptimeMs}`);
  assert.equal(exit.cell?.code, code);
  assert.ok((exit.cell?.runningMs ?? 0) > 10_000 && (exit.cell?.runningMs ?? 0) <= exit.uptimeMs);
  assert.equal(exit.stderrTail, 'a word of warning\n');
  assert.equal(partial?.stdout, 'before the steps\n');
  assert.equal(partial?.stderr, 'a word of warning\n');
  assert.equal(partial?.life.pid, pid);
  assert.deepEqual(await exited, [exit]);
  await until('target and step are gone', () => isGone(pid) && !steps.some(isAlive), 1_000);

  const after = await within('the next cell', kernel.execute('"kept" in globals(), 1 + 1'));
  assert.equal(after.status, 'ok');
  assert.equal(after.text, '(False, 2)');
  assert.deepEqual(after.recovered, { exit, state: 'fresh', lostCells: 1 });
  assert.equal(after.life.generation, 2);
  const second = await within('the cell after it', kernel.execute('2 + 2'));
  assert.equal(second.text, '4');
  assert.equal(second.recovered, null);
  assert.deepEqual(pids(), steps, 'the target has not gone on');
  assert.equal(runs(), 1, 'the failed cell has not run again');
}

/** One life, from start to end: every third is killed under its cell, every third by its own hand, the others are closed. */
async function oneLife(host: KernelHost, number: number): Promise<void> {
  const kernel = host.kernel();
  const value = await kernel.execute(`value = ${number}; value * 2`);
  assert.equal(value.text, String(number * 2));
  if (number % 3 === 0) {
    const { call } = await begin(kernel, 'import time; print("asleep"); time.sleep(60)', 'asleep');
    process.kill(value.life.pid, 'SIGKILL');
    assert.equal((await deathOf(call)).exit.cause, 'external-signal');
  } else if (number % 3 === 1) {
    const { exit } = await deathOf(kernel.execute('import os; os._exit(3)'));
    assert.deepEqual(exit.status, { kind: 'exited', code: 3 });
  }
  await kernel.close();
}

/** Whether Linux tells the exit status of another process's child (PIDFD_GET_INFO, Linux 6.15). */
function exitOfStrangersIsKnown(): boolean {
  const [major = 0, minor = 0] = release().split('.').map(Number);
  return major > 6 || (major === 6 && minor >= 15);
}

async function lives(host: KernelHost, count: number, atOnce: number): Promise<void> {
  let number = 0;
  const worker = async () => {
    while (number < count) await oneLife(host, number++);
  };
  await Promise.all(Array.from({ length: atOnce }, worker));
}

/** A host that has had its 300 lives, and another template half-way. */
async function oldHost(t: Parameters<typeof startHost>[0]): Promise<{ host: HostForTest; template: TemplateInfo }> {
  const host = startHost(t, { launch: 'fork', shell: 'ipython' });
  const first = await host.warm();
  await lives(host, LIVES / 2, AT_ONCE);
  const ended = next(host, 'template');
  process.kill(first.pid, 'SIGKILL');
  assert.deepEqual(
    (await ended).map((info) => (info as TemplateInfo).state),
    ['ended'],
  );
  const template = await host.warm();
  assert.notEqual(template.pid, first.pid);
  await lives(host, LIVES / 2, AT_ONCE);
  return { host, template };
}

/** Kernels that start, run and die until the story is over. Their cells take their time, so that they do not fill the machine. */
function others(host: KernelHost): { end(): Promise<number> } {
  let over = false;
  let lived = 0;
  const going = (async () => {
    while (!over) {
      const kernel = host.kernel();
      await kernel.execute('import time; time.sleep(0.2)');
      await oneLife(host, lived++);
      await kernel.close();
    }
  })();
  // Its failure is reported by `end`.
  going.catch(() => {});
  return {
    async end() {
      over = true;
      await within('the others end', going);
      return lived;
    },
  };
}

/** A kernel that tells its story to the end and one that is killed at 10 s, side by side. */
async function twoStories(host: KernelHost, folder: string): Promise<void> {
  const [completing, dying] = [story(host.kernel(), folder), story(host.kernel(), folder)];
  const { pid } = await completing.kernel.start();
  const completion = completing.kernel.execute(completing.code);
  const death = dying.kernel.execute(dying.code);
  // What happens to the one must not hide in the failure of the other.
  const both = await Promise.allSettled([
    completes(completing, completion, pid),
    toStepOfTheKill(dying).then(() => diesAndRecovers(dying, death)),
  ]);
  for (const outcome of both) if (outcome.status === 'rejected') throw outcome.reason;
}

describe('the fork story', { concurrency: 3 }, () => {
  test('a forked kernel completes its long subprocess.run, while another is killed, told of and replaced', {
    skip: tooOld,
  }, async (t) => {
    const { host } = await oldHost(t);
    const noise = others(host);
    await twoStories(host, temporaryFolder(t));
    assert.ok((await noise.end()) > 20);
  });

  test('the template is killed during the long subprocess.run, and nothing happens to the kernel', {
    skip: tooOld,
  }, async (t) => {
    const { host, template } = await oldHost(t);
    const noise = others(host);
    const told = story(host.kernel(), temporaryFolder(t));
    const bereaved = host.kernel();
    const states: string[] = [];
    const { pid } = await told.kernel.start();
    const { call } = await begin(bereaved, 'import time; print("asleep"); time.sleep(60)', 'asleep');
    told.kernel.on('state', (state) => states.push(state));
    const completion = told.kernel.execute(told.code);

    await toStepOfTheKill(told);
    const ended = next(host, 'template');
    process.kill(template.pid, 'SIGKILL');
    const [info] = (await ended) as [TemplateInfo];
    assert.equal(info.state, 'ended');
    assert.equal(info.pid, template.pid);
    assert.deepEqual(info.exit?.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
    assert.equal(info.exit?.cause, 'external-signal');
    assert.equal((await host.kernel().start()).launch, 'fork', 'there is another template');

    assert.ok(bereaved.pid !== null);
    process.kill(bereaved.pid, 'SIGKILL');
    const { exit } = await deathOf(call);
    if (exitOfStrangersIsKnown()) {
      assert.deepEqual(exit.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
      assert.equal(exit.cause, 'external-signal');
    } else {
      assert.equal(exit.status.kind, 'unknown');
    }

    await completes(told, completion, pid);
    // The state is told after the result.
    await until('the kernel is idle again', () => states.length >= 4);
    assert.deepEqual(states, ['running', 'idle', 'running', 'idle']);
    await noise.end();
  });

  test('a kernel spawned cold completes it, while another is killed, told of and replaced', {
    skip: tooOld,
  }, async (t) => {
    const host = startHost(t, { launch: 'spawn', shell: 'ipython' });
    await lives(host, COLD_LIVES, 2);
    await twoStories(host, temporaryFolder(t));
  });
});
