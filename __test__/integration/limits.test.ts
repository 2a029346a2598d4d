/** What a kernel may take: memory, CPU time, files, processes. What goes beyond is told as what it is, and hits nobody else. */

import assert from 'node:assert/strict';
import { describe, type TestContext, test } from 'node:test';
import {
  type ExitReason,
  InvalidOptionError,
  type Kernel,
  type KernelHostOptions,
  type KernelOptions,
} from 'kernelhost';
import { makeCgroup } from '../fixtures/cgroups.ts';
import { deathOf } from '../fixtures/endings-calls.ts';
import { startNode } from '../fixtures/node-run.ts';
import {
  type HostForTest,
  isAlive,
  next,
  processStat,
  pythonForTests,
  startHost,
  until,
  within,
} from '../helpers/index.ts';

type Limits = NonNullable<KernelOptions['limits']>;

const MIB = 1024 * 1024;
const launches = ['fork', 'spawn'] as const;

interface Limited {
  host: HostForTest;
  kernel: Kernel;
  pid: number;
  sibling: Kernel;
}

/** A kernel with these limits, and one without. */
async function startLimited(t: TestContext, limits: Limits, options: KernelHostOptions = {}): Promise<Limited> {
  const host = startHost(t, { shell: 'plain', ...options });
  const [kernel, sibling] = [host.kernel({ limits }), host.kernel()];
  const [{ pid }] = await Promise.all([kernel.start(), sibling.start()]);
  return { host, kernel, pid, sibling };
}

/** It is the same life as ever, and works. */
async function lives({ kernel, pid, sibling }: Limited): Promise<void> {
  const { text, life } = await within('a cell of the kernel', kernel.execute('6 * 7'));
  assert.deepEqual([text, life.pid], ['42', pid]);
  assert.equal(kernel.lastExit, null);
  await isUnharmed(sibling);
}

async function isUnharmed(sibling: Kernel): Promise<void> {
  assert.equal((await within('a cell of the sibling', sibling.execute('1 + 1'))).life.generation, 1);
  assert.equal(sibling.lastExit, null);
}

/** The life was ended for this, the error, the event and the next result say the same, and there is a next life. */
async function endedFor(
  cause: ExitReason['cause'],
  { kernel, sibling }: Limited,
  code: string,
  deadlineMs?: number,
): Promise<ExitReason> {
  const exited = next(kernel, 'exit');
  const { exit } = await deathOf(kernel.execute(code), deadlineMs);
  assert.equal(exit.cause, cause, exit.message);
  assert.ok(exit.evidence.length > 0);
  assert.deepEqual(await exited, [exit]);
  assert.deepEqual(exit.leftovers.remaining, []);
  const after = await within('the next cell', kernel.execute('6 * 7'));
  assert.deepEqual([after.text, after.recovered?.exit], ['42', exit]);
  await isUnharmed(sibling);
  return exit;
}

for (const launch of launches) {
  describe(`memoryBytes (${launch})`, () => {
    test('a cell that asks for more gets a MemoryError, and its kernel lives', async (t) => {
      const limited = await startLimited(t, { memoryBytes: 200 * MIB }, { launch });
      const result = await limited.kernel.execute('bytearray(300 << 20)');
      assert.deepEqual([result.status, result.error?.name], ['error', 'MemoryError']);
      await lives(limited);
    });

    test('the same in small steps, held for a while: it is no reason to end the life', async (t) => {
      const limited = await startLimited(t, { memoryBytes: 200 * MIB }, { launch });
      const code = [
        'import time',
        'held = []',
        'try:',
        '    while True: held.append(b"x" * (1 << 20))',
        'except MemoryError:',
        '    pass',
        'time.sleep(1.5)',
        'print(len(held))',
        'del held',
      ].join('\n');
      const { stdout } = await limited.kernel.execute(code);
      assert.ok(Number(stdout) > 150 && Number(stdout) <= 200, stdout);
      await lives(limited);
    });

    test('children that together take more end the life, with the numbers', async (t) => {
      const limit = 300 * MIB;
      const limited = await startLimited(t, { memoryBytes: limit }, { launch });
      const child = 'held = b\\"x\\" * (80 << 20); import time; time.sleep(600)';
      const code = [
        'import subprocess, sys',
        `children = [subprocess.Popen([sys.executable, "-S", "-c", "${child}"], start_new_session=bool(n % 2)) for n in range(5)]`,
        'print([child.pid for child in children], flush=True)',
        'for child in children: child.wait()',
      ].join('\n');
      const exited = next(limited.kernel, 'exit');
      const exit = await endedFor('memory-limit', limited, code, 10_000);
      await exited;
      assert.match(exit.message, /300 MiB.*limits\.memoryBytes/);
      const bytes = Number(exit.evidence.join('\n').match(/\b(\d{9,})\b/)?.[1]);
      assert.ok(bytes > limit && bytes < 2 * limit, exit.evidence.join('\n'));
    });

    test('a warning comes at 90 % of it, once, to the kernel and to the host', async (t) => {
      const limited = await startLimited(t, { memoryBytes: 200 * MIB }, { launch });
      const { host, kernel } = limited;
      const heard: string[] = [];
      kernel.on('warning', ({ code, message }) => heard.push(`kernel ${code} ${message}`));
      host.on('warning', ({ code }) => heard.push(`host ${code}`));
      const grow = (share: number) =>
        [
          'import resource',
          'held = globals().get("held", [])',
          'def resident(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()',
          `while resident() < ${Math.round(200 * MIB * share)}: held.append(b"x" * (1 << 20))`,
        ].join('\n');
      await kernel.execute(`${grow(0.7)}\nimport time; time.sleep(1)`);
      assert.equal(heard.length, 0);
      await kernel.execute(`${grow(0.93)}\nimport time; time.sleep(1)`);
      await until('a warning', () => heard.length === 2, 3_000);
      await kernel.execute('time.sleep(2.5)');
      assert.deepEqual(heard.map((each) => each.split(' ').slice(0, 2).join(' ')).sort(), [
        'host WARN_MEMORY_LIMIT',
        'kernel WARN_MEMORY_LIMIT',
      ]);
      assert.match(heard.join('\n'), /MiB.*200 MiB/);
      await lives(limited);
    });
  });

  test(`cpuSeconds: a life that has used them up is ended for that, and time in which it waits is no CPU time (${launch})`, async (t) => {
    const limited = await startLimited(t, { cpuSeconds: 1 }, { launch });
    await limited.kernel.execute('import time; time.sleep(1.3)');
    await lives(limited);
    const exit = await endedFor('cpu-limit', limited, 'while True: pass', 10_000);
    assert.match(exit.message, /\b1 s\b.*limits\.cpuSeconds/);
    assert.ok((exit.usage?.userMs ?? 0) + (exit.usage?.systemMs ?? 0) > 800);
  });

  test(`openFiles: what opens more gets EMFILE, and the kernel lives and restarts (${launch})`, async (t) => {
    const limited = await startLimited(t, { openFiles: 64 }, { launch });
    const code = [
      'import errno, subprocess',
      'files = []',
      'try:',
      '    while True: files.append(open("/dev/null"))',
      'except OSError as error:',
      '    print(errno.errorcode[error.errno], len(files))',
    ].join('\n');
    const { stdout } = await limited.kernel.execute(code);
    const [name, count] = stdout.trim().split(' ');
    assert.equal(name, 'EMFILE');
    assert.ok(Number(count) > 30 && Number(count) < 64, count);
    await limited.kernel.execute('print("with all of them open", 1)');
    await limited.kernel.execute('for file in files: file.close()');
    await lives(limited);
    await limited.kernel.restart();
    assert.equal((await limited.kernel.execute('1 + 1')).text, '2');
  });

  test(`processes: a cell that has started more is ended for that, and they with it (${launch})`, async (t) => {
    const limited = await startLimited(t, { processes: 5 }, { launch });
    const start = (count: number) =>
      [
        'import json, subprocess',
        `children = [subprocess.Popen(["sleep", "600"], start_new_session=bool(n % 2)) for n in range(${count})]`,
        'print(json.dumps([child.pid for child in children]), flush=True)',
      ].join('\n');
    // Itself and four more.
    const few = await limited.kernel.execute(`${start(4)}\nimport time; time.sleep(1)`);
    await limited.kernel.execute('for child in children: child.kill(); child.wait()');
    assert.equal((JSON.parse(few.stdout) as number[]).length, 4);
    await lives(limited);
    const exited = next(limited.kernel, 'exit');
    const { exit, partial } = await deathOf(limited.kernel.execute(`${start(9)}\nfor child in children: child.wait()`));
    assert.equal(exit.cause, 'process-limit', exit.message);
    assert.match(exit.message, /\b([6-9]|10) processes\b.*\b5\b.*limits\.processes/);
    await exited;
    const pids = JSON.parse(partial?.stdout ?? '[]') as number[];
    assert.equal(pids.length, 9);
    await until('they are gone', () => !pids.some(isAlive), 2_000);
    assert.equal((await limited.kernel.execute('1 + 1')).text, '2');
    await isUnharmed(limited.sibling);
  });
}

test('cpuSeconds: what ignores SIGXCPU is ended for the same reason a little later', async (t) => {
  const limited = await startLimited(t, { cpuSeconds: 1 });
  const code = 'import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass';
  const exit = await endedFor('cpu-limit', limited, code, 15_000);
  assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGKILL');
});

test('cpuSeconds and memoryBytes: a life killed by hand is told as that, whatever its limits', async (t) => {
  const { kernel } = await startLimited(t, { cpuSeconds: 10, memoryBytes: 500 * MIB, processes: 50 });
  const exited = next(kernel, 'exit');
  process.kill(Number(kernel.pid), 'SIGKILL');
  const [exit] = (await exited) as [ExitReason];
  assert.equal(exit.cause, 'external-signal');
});

test('children have the limits of their kernel', async (t) => {
  const { kernel } = await startLimited(t, { memoryBytes: 200 * MIB, openFiles: 100, cpuSeconds: 30 });
  const code =
    'import subprocess; print(subprocess.run(["sh", "-c", "ulimit -n; ulimit -d; ulimit -t"], capture_output=True, text=True).stdout)';
  const { stdout } = await kernel.execute(code);
  assert.deepEqual(stdout.trim().split('\n'), ['100', String(200 * 1024), '30']);
});

describe('a fork bomb', () => {
  /** Each ends by itself before long, in case nobody else ends it. */
  const bomb = (seconds: number, body: string) =>
    [
      'import os, time',
      `end = time.monotonic() + ${seconds}`,
      'while time.monotonic() < end:',
      body,
      'os._exit(1)',
    ].join('\n');
  const OPTED_OUT = [
    'import os, subprocess',
    'environment = {**os.environ, "KERNELHOST_DETACHED": "1"}',
    'print(subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True).pid)',
  ].join('\n');
  /** With the seconds in which it is ended on a busy machine. Those that lead sessions have to be found one by one. */
  const bombs: Record<string, [within: number, code: string]> = {
    'that stays in the group': [3, bomb(6, '    try: os.fork()\n    except OSError: pass')],
    'whose members each lead a session': [
      8,
      bomb(16, '    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass'),
    ],
  };
  for (const [how, [seconds, code]] of Object.entries(bombs)) {
    test(`${how} is ended within ${seconds} seconds, and nothing is left of it`, async (t) => {
      // Whatever happens, it does not get further than this.
      const cgroup = makeCgroup(t, 'pids', { 'pids.max': '150' });
      if (typeof cgroup === 'string') return t.skip(cgroup);
      const source = `
        import { KernelHost } from 'kernelhost';
        const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', defaults: { limits: { processes: 50 } } });
        const hold = setInterval(() => {}, 1_000);
        const [kernel, sibling] = [host.kernel(), host.kernel({ limits: {} })];
        await Promise.all([kernel.start(), sibling.start()]);
        const { stdout } = await kernel.execute(${JSON.stringify(OPTED_OUT)});
        const at = performance.now();
        const error = await kernel.execute(${JSON.stringify(code)}).catch((error) => error);
        const ms = performance.now() - at;
        const after = [await kernel.execute('1 + 1'), await sibling.execute('2 + 2')].map(({ text, life }) => [text, life.generation]);
        console.log(JSON.stringify({ exit: error.exit ?? String(error), ms, after, optedOut: Number(stdout) }));
      `;
      const { line } = startNode(t, source, { through: cgroup.enter });
      const told = await line<{ exit: ExitReason; ms: number; after: unknown; optedOut: number }>();
      assert.equal(told.exit.cause, 'process-limit', told.exit.message ?? String(told.exit));
      assert.ok(told.ms < seconds * 1_000, `${told.ms} ms`);
      assert.deepEqual(told.exit.leftovers.remaining, []);
      assert.deepEqual(told.after, [
        ['2', 2],
        ['4', 1],
      ]);
      assert.equal(processStat(told.optedOut)?.state, 'S', 'what has opted out goes on');
      process.kill(told.optedOut, 'SIGKILL');
      // Node, the template, the warden, and two kernels.
      await until('nothing is left of it', () => cgroup.processes().filter(isAlive).length === 5, 2_000);
    });
  }
});

describe('the option', () => {
  test('values that make no sense are refused by name', (t) => {
    const host = startHost(t);
    const wrong: [unknown, RegExp][] = [
      [5, /limits/],
      ['200 MB', /limits/],
      [{ memoryBytes: 0 }, /limits\.memoryBytes/],
      [{ memoryBytes: -1 }, /limits\.memoryBytes/],
      [{ memoryBytes: 1.5 }, /limits\.memoryBytes/],
      [{ memoryBytes: 1024 }, /limits\.memoryBytes/],
      [{ memoryBytes: '1000000000' }, /limits\.memoryBytes/],
      [{ memoryBytes: Number.NaN }, /limits\.memoryBytes/],
      [{ memoryBytes: Number.POSITIVE_INFINITY }, /limits\.memoryBytes/],
      [{ cpuSeconds: 0 }, /limits\.cpuSeconds/],
      [{ cpuSeconds: 0.5 }, /limits\.cpuSeconds/],
      [{ cpuSeconds: null }, /limits\.cpuSeconds/],
      [{ openFiles: 0 }, /limits\.openFiles/],
      [{ openFiles: 3 }, /limits\.openFiles/],
      [{ processes: 0 }, /limits\.processes/],
      [{ processes: -5 }, /limits\.processes/],
      [{ processes: true }, /limits\.processes/],
      [{ memory: 1_000_000_000 }, /memory/],
    ];
    for (const [limits, names] of wrong) {
      for (const give of [
        () => host.kernel({ limits } as never),
        () => startHost(t, { defaults: { limits } } as never),
      ]) {
        assert.throws(
          give,
          (error: unknown) =>
            error instanceof InvalidOptionError && error.code === 'ERR_INVALID_OPTION' && names.test(error.message),
          JSON.stringify(limits),
        );
      }
    }
  });

  test('defaults hold for every kernel; what a kernel is given takes their place as a whole', async (t) => {
    const host = startHost(t, { shell: 'plain', defaults: { limits: { openFiles: 77, cpuSeconds: 33 } } });
    const limits =
      'import resource; print([resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)])';
    const of = async (kernel: Kernel) => JSON.parse((await kernel.execute(limits)).stdout) as number[];
    assert.deepEqual(await of(host.kernel()), [77, 33]);
    const [files, cpu] = await of(host.kernel({ limits: { openFiles: 88 } }));
    assert.deepEqual([files, cpu], [88, -1]);
    assert.equal((await of(host.kernel({ limits: {} })))[1], -1);
    // A later life has them too.
    const kernel = host.kernel();
    await kernel.execute('1');
    await kernel.restart();
    assert.deepEqual(await of(kernel), [77, 33]);
  });
});
