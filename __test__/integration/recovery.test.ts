/** After an end: the next call has a new life, once, and what was lost is said; after a close nothing starts. */

import assert from 'node:assert/strict';
import { readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { type ExitReason, type Kernel, KernelStartError, type Life, type Output } from 'kernelhost';
import { begin, deathOf, failureOf, python } from '../fixtures/endings-calls.ts';
import {
  isAlive,
  next,
  processStat,
  startHost,
  startKernel,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

const SLEEP = 'import time\nprint("asleep")\ntime.sleep(60)';

/** Every life that the kernel is said to have had. */
function livesOf(kernel: Kernel): Life[] {
  const lives: Life[] = [];
  kernel.on('start', (life) => lives.push(life));
  return lives;
}

/** Returns when the process has ended, without a turn of the event loop: nothing of JavaScript has heard of it. */
function killUnheard(kernel: Kernel): number {
  const pid = Number(kernel.pid);
  process.kill(pid, 'SIGKILL');
  const deadline = performance.now() + 5_000;
  while (isAlive(pid)) assert.ok(performance.now() < deadline, 'SIGKILL works');
  return pid;
}

describe('recovery after an end', () => {
  test('C13: one death does not make later calls fail, and the failed cell is not run again', async (t) => {
    const file = join(temporaryFolder(t), 'runs');
    const { kernel } = await startKernel(t);
    const lives = livesOf(kernel);
    await kernel.execute('state = "lost"');
    const cell = `with open(${python(file)}, "a") as file: print("run", file=file)\nimport os\nos._exit(1)`;
    const { exit } = await deathOf(kernel.execute(cell));

    const first = await within('the next call', kernel.execute('1 + 1'));
    assert.equal(first.text, '2');
    assert.deepEqual(first.recovered, { exit, state: 'fresh', lostCells: 2 });
    assert.notEqual(first.life.pid, exit.pid);
    assert.equal(first.life.generation, exit.generation + 1);
    assert.deepEqual(lives, [first.life]);
    assert.equal(first.executionCount, 1);

    const second = await within('the call after it', kernel.execute('"state" in globals()'));
    assert.equal(second.text, 'False');
    assert.equal(second.recovered, null);
    assert.equal(second.life.pid, first.life.pid);
    assert.equal(readFileSync(file, 'utf8'), 'run\n');
  });

  test('C13: twenty deaths in a row are each recovered from', async (t) => {
    const { kernel } = await startKernel(t);
    for (let round = 1; round <= 20; round++) {
      const { exit } = await deathOf(kernel.execute(`import os; os._exit(${round})`));
      assert.deepEqual(exit.status, { kind: 'exited', code: round });
      assert.equal(exit.generation, round);
      const result = await within('the next call', kernel.execute(`${round} * 2`));
      assert.equal(result.text, String(round * 2));
      assert.equal(result.recovered?.exit.generation, round);
    }
  });

  for (const heard of [true, false]) {
    test(`C14: twenty callers of a dead kernel get one replacement and are served in order (${heard ? 'after' : 'before'} the exit event)`, async (t) => {
      const { kernel } = await startKernel(t);
      const lives = livesOf(kernel);
      const exited = next(kernel, 'exit');
      const dead = killUnheard(kernel);
      if (heard) await exited;
      const order: number[] = [];
      const numbers = Array.from({ length: 20 }, (_, number) => number);
      const results = await within(
        'all callers are served',
        Promise.all(
          numbers.map(async (number) => {
            const result = await kernel.execute(
              `served = ${number} if ${number} == 0 else served + 1; ${number}, served`,
            );
            order.push(number);
            return result;
          }),
        ),
      );
      assert.deepEqual(
        results.map(({ text }) => text),
        numbers.map((number) => `(${number}, ${number})`),
      );
      assert.deepEqual(order, numbers);
      assert.equal(new Set(results.map(({ life }) => life.pid)).size, 1);
      assert.equal(lives.length, 1);
      assert.notEqual(lives[0]?.pid, dead);
      assert.deepEqual(
        results.map(({ recovered }) => recovered?.exit.pid ?? null),
        numbers.map((number) => (number === 0 ? dead : null)),
      );
    });
  }

  test('C15: a kernel that dies at every start is tried once per call, ever more slowly, and starts once the cause is gone', async (t) => {
    const flag = join(temporaryFolder(t), 'broken');
    writeFileSync(flag, '');
    const host = startHost(t, { launch: 'fork' });
    const kernel = host.kernel({ init: `import os\nif os.path.exists(${python(flag)}): os._exit(4)` });
    const exits: ExitReason[] = [];
    kernel.on('exit', (exit) => exits.push(exit));
    const lives = livesOf(kernel);

    const together = await Promise.all(Array.from({ length: 10 }, () => failureOf(kernel.execute('1 + 1'))));
    assert.deepEqual(
      together.map(({ code }) => code),
      Array(10).fill('ERR_KERNEL_START'),
    );
    await until('the exit event', () => exits.length > 0);
    assert.equal(exits.length, 1, 'ten callers, one attempt');

    const took: number[] = [];
    for (let attempt = 2; attempt <= 6; attempt++) {
      const began = performance.now();
      const error = await failureOf(kernel.execute('1 + 1'));
      took.push(performance.now() - began);
      assert.ok(error instanceof KernelStartError);
      assert.deepEqual(error.exit?.status, { kind: 'exited', code: 4 });
      assert.equal(error.exit?.cause, 'start-failed');
      assert.equal(error.exit?.generation, attempt);
      assert.match(error.message, /did not start; it exited with code 4/);
      await until('the exit event', () => exits.length === attempt);
    }
    // Three in a row cost nothing, then 100 ms, 200 ms, 400 ms.
    const [second, , fourth, fifth, sixth] = took as [number, number, number, number, number];
    assert.ok(second < 100, `the second attempt is not held back: ${second} ms`);
    assert.ok(fourth >= 100 && fifth >= 200 && sixth >= 400, `the pause grows: ${took.map(Math.round)}`);
    assert.deepEqual(lives, []);

    rmSync(flag);
    const result = await within('the start that works', kernel.execute('1 + 1'));
    assert.equal(result.text, '2');
    assert.equal(lives.length, 1);
    assert.equal(exits.length, 6, 'nothing was tried between the calls');
  });

  test('C19: no call is lost over 200 restarts', async (t) => {
    const { kernel } = await startKernel(t);
    const lives = livesOf(kernel);
    const causes: string[] = [];
    kernel.on('exit', ({ cause }) => causes.push(cause));
    for (let round = 1; round <= 200; round++) {
      const [life, result] = await within(
        `round ${round}`,
        Promise.all([kernel.restart(), kernel.execute(`${round} + 1`)]),
        5_000,
      );
      assert.equal(result.text, String(round + 1));
      assert.equal(life.generation, round + 1);
      assert.equal(result.life.pid, life.pid);
      assert.equal(result.recovered?.exit.generation, round);
      assert.equal(kernel.state, 'idle');
    }
    assert.deepEqual(causes, Array(200).fill('restart'));
    assert.equal(lives.length, 200);
  });

  test('C19: a cell asked for just before a restart ends exactly once: with its result, or by the restart', async (t) => {
    const { kernel } = await startKernel(t);
    for (let round = 1; round <= 30; round++) {
      const [cell, life] = await within(
        `round ${round}`,
        Promise.allSettled([kernel.execute(`${round}`), kernel.restart()]),
        5_000,
      );
      assert.equal(life.status, 'fulfilled');
      if (cell.status === 'fulfilled') assert.equal(cell.value.text, String(round));
      else assert.equal(cell.reason.exit?.cause, 'restart');
    }
  });

  test('C21: the same kernel object, its listeners and its streams go on after a death; what was pending is rejected', async (t) => {
    const { kernel } = await startKernel(t);
    const heard: string[] = [];
    kernel.on('output', (output) => heard.push(output.kind === 'text' ? output.text : output.kind));
    const stream = kernel.stream('import time\nprint("one")\ntime.sleep(60)');
    const iterator = stream[Symbol.asyncIterator]() as AsyncIterator<Output, undefined>;
    const first = await within('the first output', iterator.next());
    assert.deepEqual(first.value, { kind: 'text', stream: 'stdout', text: 'one\n' });
    const queued = deathOf(kernel.execute('1'));
    const waiting = deathOf(iterator.next());

    process.kill(Number(kernel.pid), 'SIGKILL');
    const error = await waiting;
    assert.equal(error.partial?.stdout, 'one\n');
    assert.deepEqual(await iterator.next(), { done: true, value: undefined });
    assert.deepEqual((await deathOf(stream.result)).exit, error.exit);
    const behind = await queued;
    assert.deepEqual(behind.exit, error.exit);
    assert.equal(behind.partial, null);
    assert.match(behind.message, /has not run/);

    const outputs: Output[] = [];
    const again = kernel.stream('print("two")');
    for await (const output of again) outputs.push(output);
    assert.deepEqual(outputs, [{ kind: 'text', stream: 'stdout', text: 'two\n' }]);
    assert.deepEqual((await again.result).recovered?.exit, error.exit);
    await kernel.execute('import os, threading; threading.Timer(0.05, lambda: os.write(1, b"later\\n")).start()');
    await until('the old listener hears the new life', () => heard.join('') === 'later\n');
    assert.deepEqual(await iterator.next(), { done: true, value: undefined });
  });
});

describe('calls on a kernel that is dead', () => {
  const calls = {
    kill: (kernel: Kernel) => kernel.kill(),
    restart: (kernel: Kernel) => kernel.restart(),
    interrupt: (kernel: Kernel) => kernel.interrupt(),
    close: (kernel: Kernel) => kernel.close(),
  };

  for (const name of Object.keys(calls) as (keyof typeof calls)[]) {
    test(`C17: ${name}() in the tick of a SIGKILL, and again, resolves quietly`, async (t) => {
      const { kernel } = await startKernel(t);
      const pid = Number(kernel.pid);
      const exits: ExitReason[] = [];
      kernel.on('exit', (exit) => exits.push(exit));
      process.kill(pid, 'SIGKILL');
      const first = await within(`${name}()`, calls[name](kernel) as Promise<unknown>);
      await until('the exit event', () => exits.length > 0);
      assert.equal(exits[0]?.pid, pid);
      assert.equal(exits[0]?.status.kind === 'signaled' && exits[0].status.signal, 'SIGKILL');
      const second = await within(`${name}() again`, calls[name](kernel) as Promise<unknown>);
      if (name === 'kill') {
        assert.deepEqual(first, exits[0]);
        assert.deepEqual(second, exits[0]);
      }
      if (name === 'restart') {
        assert.equal((first as Life).generation, 2);
        assert.equal((second as Life).generation, 3);
      }
      assert.equal(exits.length, name === 'restart' ? 2 : 1);
    });
  }

  test('C17: all four in one tick with the SIGKILL, twice each: every call ends, and nothing is left running', async (t) => {
    for (let round = 0; round < 20; round++) {
      const { kernel } = await startKernelOf(t);
      const pid = Number(kernel.pid);
      process.kill(pid, 'SIGKILL');
      const outcomes = await within(
        'all eight calls',
        Promise.allSettled(
          [...Object.values(calls), ...Object.values(calls)].map((call) => call(kernel) as Promise<unknown>),
        ),
      );
      const codes = outcomes.map((outcome) => (outcome.status === 'fulfilled' ? 'ok' : outcome.reason.code));
      // A restart loses to the close that follows it; so does what comes after the close.
      for (const [index, code] of codes.entries()) {
        const name = Object.keys(calls)[index % 4];
        const allowed = name === 'close' || (name === 'kill' && index < 4) ? ['ok'] : ['ok', 'ERR_KERNEL_CLOSED'];
        assert.ok(allowed.includes(code), `${name}() number ${index}: ${code}`);
      }
      assert.equal(kernel.state, 'closed');
      assert.equal(processStat(pid), null);
    }
  });

  test('C17: on a kernel that has never started, kill() says so in one typed error, and the others are quiet', async (t) => {
    const host = startHost(t);
    const kernel = host.kernel();
    assert.equal((await failureOf(kernel.kill())).code, 'ERR_KERNEL_ABSENT');
    await kernel.interrupt();
    assert.equal(kernel.state, 'absent');
    await kernel.close();
    await kernel.close();
    assert.equal(host.seen.size, 0);
  });

  let shared: ReturnType<typeof startHost> | null = null;
  async function startKernelOf(t: Parameters<typeof startHost>[0]): Promise<{ kernel: Kernel }> {
    if (shared === null) {
      shared = startHost(t);
      t.after(() => {
        shared = null;
      });
    }
    const kernel = shared.kernel();
    await kernel.start();
    return { kernel };
  }
});

describe('after a close', () => {
  test('C16: a hundred kernels are closed and killed in the same tick, and none starts again', async (t) => {
    const host = startHost(t);
    for (let round = 0; round < 100; round++) {
      const kernel = host.kernel();
      await kernel.start();
      const lives = livesOf(kernel);
      const busy = round % 2 === 0 ? (await begin(kernel, SLEEP, 'asleep')).call : Promise.resolve(null);
      const queued = kernel.execute('1');
      const closed = kernel.close({ graceMs: 100 });
      process.kill(Number(kernel.pid), 'SIGKILL');
      const late = kernel.execute('2');
      const outcomes = await within('every call ends', Promise.allSettled([busy, queued, late, closed]));
      assert.equal(outcomes[3]?.status, 'fulfilled');
      const [, , lateOutcome] = outcomes;
      assert.equal(lateOutcome?.status === 'rejected' && lateOutcome.reason.code, 'ERR_KERNEL_CLOSED');
      assert.equal(kernel.state, 'closed');
      assert.deepEqual(lives, []);
    }
    assert.deepEqual(host.kernels, []);
  });

  test('C16: hosts are closed and all their kernels killed in the same tick, and none starts again', async (t) => {
    for (let round = 0; round < 15; round++) {
      const host = startHost(t, { shell: 'plain' });
      const kernels = Array.from({ length: 4 }, () => host.kernel());
      await Promise.all(kernels.map((kernel) => kernel.start()));
      const running = await begin(kernels[0] as Kernel, SLEEP, 'asleep');
      let started = 0;
      host.on('start', () => {
        started += 1;
      });
      const closed = host.close({ graceMs: 200 });
      for (const { pid } of kernels) if (pid !== null) process.kill(pid, 'SIGKILL');
      const late = kernels.map((kernel) => kernel.execute('1'));
      const codes = await within(
        'every call ends',
        Promise.all(late.map(async (call) => (await failureOf(call)).code)),
      );
      assert.deepEqual(codes, Array(4).fill('ERR_KERNEL_CLOSED'));
      await failureOf(running.call);
      await within('close', closed);
      assert.equal(started, 0);
      assert.ok(![...host.seen].some(isAlive), 'nothing is left');
      assert.throws(() => host.kernel(), { code: 'ERR_KERNEL_CLOSED' });
    }
  });

  test('C16: calls that follow the close of a host, in the same tick or later, are turned away', async (t) => {
    for (let round = 0; round < 10; round++) {
      const host = startHost(t, { shell: 'plain' });
      const [idle, absent] = [host.kernel(), host.kernel()];
      await idle.start();
      const seen = host.seen.size;
      const closed = host.close();
      const calls = [idle.execute('1'), absent.execute('1'), absent.start(), idle.restart(), host.warm()];
      const codes = await Promise.all(calls.map(async (call) => (await failureOf(call)).code));
      assert.deepEqual(codes, Array(5).fill('ERR_KERNEL_CLOSED'));
      await within('close', closed);
      assert.equal((await failureOf(absent.execute('1'))).code, 'ERR_KERNEL_CLOSED');
      assert.equal((await failureOf(host.warm())).code, 'ERR_KERNEL_CLOSED');
      assert.equal(host.seen.size, seen);
    }
  });
});
