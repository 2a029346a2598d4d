/**
 * Every way a life can end, from inside and from outside, and what is told of it: the status of the operating system, the cause,
 * the error of the call, the exit event, and a sentence. The sentences are in the snapshot file.
 */

import assert from 'node:assert/strict';
import { chmodSync, writeFileSync } from 'node:fs';
import { constants } from 'node:os';
import { join } from 'node:path';
import { describe, type TestContext, test } from 'node:test';
import { type ExitReason, type Kernel, KernelStartError } from 'kernelhost';
import { begin, deathOf, failureOf, normalised } from '../fixtures/endings-calls.ts';
import { referenceStatus } from '../fixtures/endings-reference.ts';
import {
  isAlive,
  next,
  pythonForTests,
  startHost,
  startKernel,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

const BUSY = 'import time\nprint("busy")\ntime.sleep(60)';

function snapshot(t: TestContext, message: string, folders?: Record<string, string>): void {
  t.assert.snapshot(normalised(message, folders), { serializers: [String] });
}

/** Runs a cell that ends its life: what the call and the event say must be the same. */
async function endOf(kernel: Kernel, code: string): Promise<ExitReason> {
  const exited = next(kernel, 'exit');
  const error = await deathOf(kernel.execute(code));
  assert.deepEqual(await exited, [error.exit]);
  assert.deepEqual(kernel.lastExit, error.exit);
  assert.equal(error.message, error.exit.message);
  assert.equal(error.exit.cell?.code, code);
  return error.exit;
}

async function answers(kernel: Kernel, replaced: ExitReason): Promise<void> {
  const after = await within('the next cell', kernel.execute('6 * 7'));
  assert.equal(after.text, '42');
  assert.deepEqual(after.recovered?.exit, replaced);
}

describe('the reason story: ends from inside', () => {
  for (const code of [0, 1, 23, 137, 255]) {
    test(`C04: os._exit(${code}) is told as an exit with code ${code}, and the next call gets a new life`, async (t) => {
      const { kernel } = await startKernel(t);
      const exit = await endOf(kernel, `import os; os._exit(${code})`);
      assert.deepEqual(exit.status, { kind: 'exited', code });
      assert.equal(exit.cause, 'exit-call');
      assert.equal(exit.crashTraceback, null);
      snapshot(t, exit.message);
      await answers(kernel, exit);
    });
  }

  for (const [call, code] of [
    ['exit()', 0],
    ['exit(4)', 4],
    ['quit()', 0],
  ] as const) {
    test(`${call} in a cell ends the life with code ${code}, and says that a cell asked for it`, async (t) => {
      const { kernel } = await startKernel(t);
      const exit = await endOf(kernel, call);
      assert.deepEqual(exit.status, { kind: 'exited', code });
      assert.equal(exit.cause, 'exit-call');
      assert.ok(exit.evidence.some((line) => line.includes('exit()')));
      snapshot(t, exit.message);
      await answers(kernel, exit);
    });
  }

  test('C05: sys.exit() is an error result that carries value and text, and the kernel lives', async (t) => {
    const { kernel } = await startKernel(t);
    const { life } = await kernel.execute('import sys');
    for (const [code, value] of [
      ['sys.exit(3)', '3'],
      ['sys.exit("why")', 'why'],
      ['raise SystemExit', ''],
      ['def leave(): sys.exit(5)\nleave()', '5'],
    ] as const) {
      const result = await kernel.execute(code);
      assert.equal(result.status, 'error', code);
      assert.equal(result.error?.name, 'SystemExit', code);
      assert.equal(result.error?.value, value, code);
      assert.equal(result.life.pid, life.pid);
    }
    const after = await kernel.execute('1 + 1');
    assert.equal(after.text, '2');
    assert.equal(after.life.pid, life.pid);
    assert.equal(kernel.lastExit, null);
  });

  for (const limit of ['0', 'resource.RLIM_INFINITY']) {
    test(`C07: a segmentation fault is told with signal, core flag and the cell's frame (core limit ${limit})`, async (t) => {
      const folder = temporaryFolder(t);
      const { kernel } = await startKernel(t, { defaults: { cwd: folder } });
      const prepare = `import resource; resource.setrlimit(resource.RLIMIT_CORE, (${limit}, resource.RLIM_INFINITY))`;
      const limited = await kernel.execute(prepare);
      if (limited.status !== 'ok') return t.skip('the core limit cannot be raised here');
      const exit = await endOf(kernel, 'import ctypes\n\nctypes.memset(1, 0, 1)');
      const reference = referenceStatus(pythonForTests(), `${prepare}; import ctypes; ctypes.memset(1, 0, 1)`, folder);
      assert.deepEqual(exit.status, { kind: 'signaled', signal: 'SIGSEGV', ...reference });
      assert.equal(exit.cause, 'crash');
      assert.match(exit.crashTraceback ?? '', /^Fatal Python error: Segmentation fault$/m);
      assert.match(exit.crashTraceback ?? '', /File "[^"]+", line 3 in <module>/);
      assert.ok(exit.stderrTail.includes(exit.crashTraceback ?? '-'));
      snapshot(t, exit.message);
      await answers(kernel, exit);
    });
  }

  test('os.abort() is told as SIGABRT, a crash, with the frame of the cell', async (t) => {
    const { kernel } = await startKernel(t, { defaults: { cwd: temporaryFolder(t) } });
    const exit = await endOf(kernel, 'import os\nos.abort()');
    assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGABRT');
    assert.equal(exit.cause, 'crash');
    assert.match(exit.crashTraceback ?? '', /File "[^"]+", line 2 in <module>/);
    snapshot(t, exit.message);
    await answers(kernel, exit);
  });
});

describe('the reason story: signals from outside', () => {
  for (const signal of ['SIGTERM', 'SIGKILL', 'SIGHUP', 'SIGQUIT'] as const) {
    test(`${signal} to a busy kernel fails its cell, with the signal as the status`, async (t) => {
      const { kernel } = await startKernel(t, { defaults: { cwd: temporaryFolder(t) } });
      const { call } = await begin(kernel, BUSY, 'busy');
      const exited = next(kernel, 'exit');
      process.kill(Number(kernel.pid), signal);
      const { exit, partial } = await deathOf(call);
      assert.equal(exit.status.kind === 'signaled' && exit.status.signal, signal);
      assert.equal(exit.cause, 'external-signal');
      assert.equal(exit.cell?.code, BUSY);
      assert.equal(partial?.stdout, 'busy\n');
      assert.deepEqual(await exited, [exit]);
      snapshot(t, exit.message);
      await answers(kernel, exit);
    });

    test(`${signal} to an idle kernel is told by the exit event, and by the next result`, async (t) => {
      const { kernel } = await startKernel(t, { defaults: { cwd: temporaryFolder(t) } });
      const exited = next(kernel, 'exit');
      process.kill(Number(kernel.pid), signal);
      const [exit] = (await exited) as [ExitReason];
      assert.equal(exit.status.kind === 'signaled' && exit.status.signal, signal);
      assert.equal(exit.cause, 'external-signal');
      assert.equal(exit.cell, null);
      assert.equal(kernel.state, 'absent');
      assert.equal(kernel.pid, null);
      assert.deepEqual(kernel.lastExit, exit);
      snapshot(t, exit.message);
      await answers(kernel, exit);
    });
  }

  test('SIGINT to a busy kernel is a KeyboardInterrupt of its cell, to an idle one nothing', async (t) => {
    const { kernel } = await startKernel(t);
    const pid = Number(kernel.pid);
    for (let round = 0; round < 5; round++) {
      process.kill(pid, 'SIGINT');
      const idle = await kernel.execute('1 + 1');
      assert.equal(idle.text, '2');
      assert.equal(idle.life.pid, pid);
    }
    const { call } = await begin(kernel, BUSY, 'busy');
    process.kill(pid, 'SIGINT');
    const result = await within('the cell stops', call);
    assert.equal(result.error?.name, 'KeyboardInterrupt');
    const after = await kernel.execute('time.__name__');
    assert.equal(after.text, "'time'");
    assert.equal(after.life.pid, pid);
    assert.equal(kernel.lastExit, null);
  });

  for (const signal of [
    'SIGILL',
    'SIGTRAP',
    'SIGABRT',
    'SIGBUS',
    'SIGFPE',
    'SIGKILL',
    'SIGSEGV',
    'SIGTERM',
    'SIGXCPU',
    'SIGSYS',
    'SIGHUP',
    'SIGUSR1',
  ] as const) {
    test(`C10: ${signal} is told by name, number, core flag and a sentence`, async (t) => {
      const folder = temporaryFolder(t);
      const { kernel } = await startKernel(t, { defaults: { cwd: folder } });
      const exited = next(kernel, 'exit');
      process.kill(Number(kernel.pid), signal);
      const [exit] = (await exited) as [ExitReason];
      const { number, coreDumped } = referenceStatus(
        pythonForTests(),
        `import os; os.kill(os.getpid(), ${constants.signals[signal]})`,
        folder,
      );
      assert.equal(number, constants.signals[signal]);
      assert.deepEqual(exit.status, { kind: 'signaled', signal, number, coreDumped });
      assert.doesNotMatch(exit.message, /undefined|null|NaN|\?/);
      snapshot(t, `${exit.cause}: ${exit.message}`);
    });
  }

  test('C10: SIGPIPE and SIGXFSZ, which Python ignores, are no end', async (t) => {
    const { kernel } = await startKernel(t);
    const pid = Number(kernel.pid);
    for (const signal of ['SIGPIPE', 'SIGXFSZ'] as const) {
      process.kill(pid, signal);
      const result = await kernel.execute(`'${signal}'`);
      assert.equal(result.text, `'${signal}'`);
      assert.equal(result.life.pid, pid);
    }
    assert.equal(kernel.lastExit, null);
  });
});

describe('the reason story: ends that were asked for', () => {
  for (const signal of ['SIGKILL', 'SIGTERM'] as const) {
    test(`kill('${signal}') resolves with the exit, and fails the running cell with the cause "kill"`, async (t) => {
      const { kernel } = await startKernel(t);
      const { call } = await begin(kernel, BUSY, 'busy');
      const [exit, error] = await Promise.all([within('kill', kernel.kill(signal)), deathOf(call)]);
      assert.deepEqual(error.exit, exit);
      assert.equal(exit.cause, 'kill');
      assert.equal(exit.status.kind === 'signaled' && exit.status.signal, signal);
      snapshot(t, exit.message);
      await answers(kernel, exit);
    });
  }

  test('restart() of a busy kernel fails its cell with the cause "restart"', async (t) => {
    const { kernel } = await startKernel(t);
    const { call } = await begin(kernel, BUSY, 'busy');
    const [life, { exit }] = await Promise.all([within('restart', kernel.restart()), deathOf(call)]);
    assert.equal(exit.cause, 'restart');
    assert.equal(life.generation, 2);
    snapshot(t, exit.message);
    await answers(kernel, exit);
  });

  test('close() of a busy kernel fails its cell with the cause "close", and the cells behind it as closed', async (t) => {
    const { kernel } = await startKernel(t);
    const { call } = await begin(kernel, BUSY, 'busy');
    const queued = failureOf(kernel.execute('1'));
    const exited = next(kernel, 'exit');
    const [, { exit }] = await Promise.all([within('close', kernel.close({ graceMs: 200 })), deathOf(call)]);
    assert.equal(exit.cause, 'close');
    assert.equal((await queued).code, 'ERR_KERNEL_CLOSED');
    assert.deepEqual(await exited, [exit]);
    snapshot(t, exit.message);
    const error = await failureOf(kernel.execute('1'));
    assert.equal(error.code, 'ERR_KERNEL_CLOSED');
    snapshot(t, error.message);
  });

  test('a cell that goes on after its time limit and two interrupts ends its life, with the cause "timeout"', async (t) => {
    const { kernel } = await startKernel(t, { defaults: { interruptGraceMs: 100 } });
    const code = 'import time\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: print("no")';
    const { exit, partial } = await deathOf(kernel.execute(code, { timeoutMs: 300 }));
    assert.equal(exit.cause, 'timeout');
    assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGKILL');
    assert.equal(partial?.status, 'timed-out');
    assert.equal(partial?.stdout, 'no\nno\n');
    snapshot(t, exit.message);
    await answers(kernel, exit);
  });
});

interface Interpreter {
  what: string;
  python: (folder: string) => string;
  /** Of the process that came to be; null when none could. */
  status: Partial<Record<string, unknown>> | null;
  stderrTail: RegExp;
  startTimeoutMs?: number;
}

function script(folder: string, name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, `#!/bin/sh\n${text}\n`);
  chmodSync(path, 0o755);
  return path;
}

const interpreters: Interpreter[] = [
  { what: 'does not exist', python: (folder) => join(folder, 'python'), status: null, stderrTail: /^$/ },
  { what: 'is a directory', python: (folder) => folder, status: null, stderrTail: /^$/ },
  {
    what: 'is `false`',
    python: (folder) => script(folder, 'false', 'exec false'),
    status: { kind: 'exited', code: 1 },
    stderrTail: /^$/,
  },
  {
    what: 'prints text and exits 7',
    python: (folder) => script(folder, 'talker', 'echo "this is no Python"; echo "go away" >&2; exit 7'),
    status: { kind: 'exited', code: 7 },
    stderrTail: /this is no Python\ngo away\n|go away\nthis is no Python\n/,
  },
  {
    what: 'sleeps for ever',
    python: (folder) => script(folder, 'sleeper', 'exec sleep 600'),
    status: { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false },
    stderrTail: /^$/,
    startTimeoutMs: 800,
  },
];

describe('the reason story: interpreters that are none', () => {
  for (const { what, python, status, stderrTail, startTimeoutMs } of interpreters) {
    for (const launch of ['auto', 'fork', 'spawn'] as const) {
      test(`an interpreter that ${what}: error, event and message say so (launch '${launch}')`, async (t) => {
        const folder = temporaryFolder(t);
        const host = startHost(t, {
          launch,
          python: python(folder),
          defaults: { startTimeoutMs: startTimeoutMs ?? 5_000 },
        });
        const kernel = host.kernel();
        const exits: ExitReason[] = [];
        const warnings: string[] = [];
        kernel.on('exit', (exit) => exits.push(exit));
        host.on('warning', ({ message }) => warnings.push(message));
        const began = performance.now();
        const error = await failureOf(kernel.execute('1 + 1'));
        if (startTimeoutMs !== undefined) assert.ok(performance.now() - began < startTimeoutMs + 1_000);

        assert.ok(error instanceof KernelStartError);
        assert.equal(error.code, 'ERR_KERNEL_START');
        assert.equal(kernel.state, 'absent');
        assert.equal(kernel.pid, null);
        snapshot(t, error.message, { folder });
        assert.deepEqual(warnings, [], 'the error says it all');
        if (launch === 'fork') {
          assert.deepEqual(exits, [], 'no life came to be: what ended was a template');
          return;
        }
        assert.match(error.stderrTail, stderrTail);
        if (status === null) {
          assert.equal(error.exit, null);
          assert.deepEqual(exits, []);
        } else {
          assert.deepEqual(error.exit?.status, status);
          assert.equal(error.exit?.cause, 'start-failed');
          await until('the exit event', () => exits.length > 0);
          assert.deepEqual(exits, [error.exit]);
          assert.ok(error.exit && !isAlive(error.exit.pid));
        }
      });
    }
  }
});
