/** Everything a cell can hang in, stopped by interrupt, abort and time limit. */

import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import type { CellResult, ExecuteOptions, ExitReason, Kernel, KernelHost } from 'kernelhost';
import { begin, companions, type Shell, shells, waitsForChild } from '../fixtures/cells.ts';
import { ok } from '../fixtures/forkserver-look.ts';
import { startHost, type TestContext, temporaryFolder, until, within } from '../helpers/index.ts';

interface Hang {
  /** Runs before, so that what hangs is not an import. */
  prepare?: string;
  /** Prints `ready`, and then never ends. */
  code: string;
  shells?: readonly Shell[];
  /** A child prints `ready` and then ignores SIGINT; before the cell waits for it, an interrupt cannot reach it by the cell. */
  deafChild?: true;
  /** Processes of the cell that go on, because they are the user's: a pool that can be used again. */
  leaves?: RegExp;
  /** Children tell on stderr, in their own time, that they were interrupted. */
  chatty?: true;
}

const ready = 'print("ready", flush=True)\n';
const ipython = ['ipython'] as const;
// A shell that has no terminal lets its background jobs ignore SIGINT.
const pipeline = 'yes > /dev/null & yes | tr y n > /dev/null';
const blocking = 'async def block(n):\n    time.sleep(600)\n    print("stray")\n';

/** After these the life goes on. */
const stoppable: Record<string, Hang> = {
  'a loop': { code: `${ready}while True: pass` },
  'a loop in a function': { code: `def f():\n    while True: pass\n${ready}f()` },
  'a loop of caught errors': {
    code: `${ready}while True:\n    try: raise ValueError\n    except Exception: pass`,
  },
  'a long computation in Python': { code: `${ready}sum(i * i for i in range(10**12))` },
  'time.sleep': { prepare: 'import time', code: `${ready}time.sleep(600)` },
  'a read of a pipe': { prepare: 'import os; r, w = os.pipe()', code: `${ready}os.read(r, 1)` },
  'a socket': { prepare: 'import socket; a, b = socket.socketpair()', code: `${ready}a.recv(1)` },
  'a lock': {
    prepare: 'import threading; lock = threading.Lock(); _ = lock.acquire()',
    code: `${ready}lock.acquire()`,
  },
  'a queue': { prepare: 'import queue; q = queue.Queue()', code: `${ready}q.get()` },
  'a catastrophic regex': { prepare: 'import re', code: `${ready}re.match(r"(a+)+$", "a" * 40 + "b")` },
  'C code that lets go of the GIL': { prepare: 'import ctypes', code: `${ready}ctypes.CDLL(None).sleep(600)` },
  'C code that holds the GIL until a signal comes': {
    prepare: 'import ctypes',
    code: `${ready}ctypes.PyDLL(None).pause()`,
  },
  'the join of a thread': {
    prepare: 'import threading, time; stop = threading.Event()',
    code: `t = threading.Thread(target=stop.wait, daemon=True); t.start()\n${ready}t.join()`,
  },
  'threads that are busy': {
    prepare: 'import threading\ndef busy():\n    while not stop: pass',
    code: [
      'stop = False',
      'threads = [threading.Thread(target=busy, daemon=True) for _ in range(3)]',
      'for t in threads: t.start()',
      'try:',
      '    print("ready", flush=True)',
      '    for t in threads: t.join()',
      'finally: stop = True',
    ].join('\n'),
  },
  'a top-level await': { prepare: 'import asyncio', code: `${ready}await asyncio.sleep(600)` },
  'a loop of awaits': { prepare: 'import asyncio', code: `${ready}while True: await asyncio.sleep(0)` },
  'a loop in a coroutine': {
    prepare: 'async def busy():\n    while True: pass',
    code: `${ready}await busy()`,
  },
  'a gather of waiting tasks': {
    prepare: 'import asyncio',
    code: `${ready}await asyncio.gather(*(asyncio.sleep(600) for _ in range(10)))`,
  },
  'a gather of blocking tasks': {
    prepare: `import asyncio, time\n${blocking}`,
    code: `${ready}await asyncio.gather(*[block(n) for n in range(10)])`,
  },
  'blocking tasks that are awaited one by one': {
    prepare: `import asyncio, time\n${blocking}`,
    code: `tasks = [asyncio.create_task(block(n)) for n in range(10)]\n${ready}for task in tasks: await task`,
  },
  'a task group': {
    prepare: 'import asyncio, sys',
    code: [
      'async def group():',
      '    if sys.version_info < (3, 11): return await asyncio.gather(asyncio.sleep(600), asyncio.sleep(600))',
      '    async with asyncio.TaskGroup() as g:',
      '        for _ in range(3): g.create_task(asyncio.sleep(600))',
      `${ready}await group()`,
    ].join('\n'),
  },
  'an event loop of its own': { prepare: 'import asyncio', code: `${ready}asyncio.run(asyncio.sleep(600))` },
  'the event loop of the life, run by hand': {
    prepare: 'import asyncio',
    code: `${ready}asyncio.get_event_loop().run_until_complete(asyncio.sleep(600))`,
  },
  'a subprocess of asyncio': {
    prepare: 'import asyncio',
    code: `${ready}p = await asyncio.create_subprocess_exec("sleep", "600")\nawait p.wait()`,
  },
  'subprocess.run': { prepare: 'import subprocess', code: `${ready}subprocess.run(["sleep", "600"])` },
  'subprocess.run of a pipeline with a background job': {
    prepare: 'import subprocess',
    code: `${ready}subprocess.run("${pipeline}", shell=True)`,
  },
  'subprocess.run of what ignores SIGINT': {
    prepare: 'import subprocess',
    code: `subprocess.run(["sh", "-c", "trap '' INT; echo ready; sleep 600"])`,
    deafChild: true,
  },
  'p.wait()': { prepare: 'import subprocess', code: `${ready}p = subprocess.Popen(["sleep", "600"])\np.wait()` },
  'p.wait() on a pipeline': {
    prepare: 'import subprocess',
    code: `${ready}p = subprocess.Popen("${pipeline}", shell=True)\np.wait()`,
  },
  'os.system': { prepare: 'import os', code: `${ready}os.system("${pipeline}")\nprint("after")` },
  'os.system in a loop': { prepare: 'import os', code: `${ready}while True: os.system("sleep 0.05")` },
  'os.popen': { prepare: 'import os, subprocess', code: `${ready}os.popen("sleep 600").read()` },
  'a thread pool that waits for the last ones': {
    prepare: 'from concurrent.futures import ThreadPoolExecutor\nimport time',
    code: `${ready}with ThreadPoolExecutor(2) as pool: list(pool.map(time.sleep, [0.3] * 1000))`,
  },
  'a process pool': {
    prepare: 'from concurrent.futures import ProcessPoolExecutor\nimport time',
    code: `${ready}with ProcessPoolExecutor(2) as pool: list(pool.map(time.sleep, [600] * 2))`,
    leaves: /multiprocessing/,
    chatty: true,
  },
  'a pool of multiprocessing': {
    prepare: 'import multiprocessing, time',
    code: `${ready}with multiprocessing.Pool(2) as pool: pool.map(time.sleep, [600] * 4)`,
    leaves: /multiprocessing/,
    chatty: true,
  },
  'a slow repr': {
    prepare:
      'import time\nclass Slow:\n    def __repr__(self):\n        print("ready", flush=True)\n        time.sleep(600)',
    code: 'Slow()',
  },
  '%%bash with a pipeline and a background job': {
    shells: ipython,
    code: `%%bash\necho ready\n${pipeline}`,
  },
  '%%bash that ignores SIGINT': {
    shells: ipython,
    code: `%%bash\ntrap '' INT\necho ready\n${pipeline}`,
    deafChild: true,
  },
  '%%bash --out': { shells: ipython, code: `%%bash --out x\necho ready >&2\n${pipeline}` },
  '%%sh': { shells: ipython, code: '%%sh\necho ready\nsleep 600' },
  '%%script': { shells: ipython, code: '%%script sh\necho ready\nsleep 600' },
  '!cmd with a background job': { shells: ipython, code: `${ready}!${pipeline}\nprint("after")` },
  '!cmd in a loop': { shells: ipython, code: `${ready}while True:\n    !sleep 0.05` },
  'x = !cmd': { shells: ipython, code: `${ready}x = !sleep 600\nprint("after")` },
  'x = !cmd in a loop': { shells: ipython, code: `${ready}while True:\n    x = !sleep 0.05` },
  '%system': { shells: ipython, code: `${ready}%system sleep 600\nprint("after")` },
  '%timeit': { shells: ipython, prepare: 'import time', code: `${ready}%timeit time.sleep(0.2)` },
  'a loop of %time': {
    shells: ipython,
    prepare: 'import time',
    code: `${ready}while True:\n    %time time.sleep(600)`,
  },
  '%%capture': {
    shells: ipython,
    prepare: 'import os, time',
    code: '%%capture\nos.write(1, b"ready\\n")\ntime.sleep(600)',
  },
  'code that the cell runs through the shell': {
    shells: ipython,
    code: `${ready}get_ipython().run_cell("import time; time.sleep(600)")\nprint("after")`,
  },
};

/** These hear nothing, or do not heed it, until `release` exists: no interrupt ends them. */
const deaf: Record<string, Hang> = {
  'code that catches KeyboardInterrupt': {
    prepare: 'import os, time',
    code: [
      'said = False',
      'while True:',
      '    try:',
      '        if not said:',
      '            said = True',
      '            print("ready", flush=True)',
      '        while not os.path.exists(release): time.sleep(0.01)',
      '        break',
      '    except KeyboardInterrupt: pass',
    ].join('\n'),
  },
  'an await that swallows its cancellation': {
    prepare: 'import asyncio, os',
    code: [
      'said = False',
      'while True:',
      '    try:',
      '        if not said:',
      '            said = True',
      '            print("ready", flush=True)',
      '        while not os.path.exists(release): await asyncio.sleep(0.01)',
      '        break',
      '    except BaseException: pass',
    ].join('\n'),
  },
  'C code that holds the GIL': {
    prepare: [
      'import ctypes, os, signal',
      'os.mkfifo(release)',
      'fd, byte, libc = os.open(release, os.O_RDWR), ctypes.create_string_buffer(1), ctypes.PyDLL(None)',
    ].join('\n'),
    // With the signal blocked nothing cuts the C call short.
    code: [
      'before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})',
      `${ready}libc.read(fd, byte, 1)`,
      'signal.pthread_sigmask(signal.SIG_SETMASK, before)',
    ].join('\n'),
  },
};

/** A cell that has come to its point, and is stopped: when that began, and how long the cell had taken to get there. */
interface Stopped {
  result: Promise<CellResult>;
  at: number;
  readyMs: number;
}

/** `limitMs`: for the one that sets a time limit. */
type Stop = (kernel: Kernel, hang: Hang, limitMs: number) => Promise<Stopped>;

/** On a machine that is not busy every cell has come to its point by then. */
const TIME_LIMIT_MS = 700;

async function comeToItsPoint(kernel: Kernel, hang: Hang, options: ExecuteOptions = {}): Promise<Stopped> {
  const began = performance.now();
  const { result } = await begin(kernel, hang.code, options);
  if (hang.deafChild) await waitsForChild(kernel);
  const at = performance.now();
  return { result, at, readyMs: at - began };
}

// The time limit comes last: how long the cell takes to come to its point is known by then.
const ways: Record<string, Stop> = {
  interrupt: async (kernel, hang) => {
    const stopped = await comeToItsPoint(kernel, hang);
    // Of a life that ends of it, the call may be told that instead.
    kernel.interrupt().catch(() => {});
    return stopped;
  },
  abort: async (kernel, hang) => {
    const controller = new AbortController();
    const stopped = await comeToItsPoint(kernel, hang, { signal: controller.signal });
    controller.abort();
    return stopped;
  },
  'time limit': async (kernel, { code }, limitMs) => {
    const result = kernel.execute(code, { timeoutMs: limitMs });
    return { result, at: performance.now() + limitMs, readyMs: 0 };
  },
};

/** A limit that the cell surely comes to its point in, after the other ways have told how busy the machine is. */
function limitAfter(readyMs: number): number {
  return Math.ceil(Math.max(TIME_LIMIT_MS, 5 * readyMs));
}

/** The time in which a cell has to be over, whatever it hangs in: it is asked twice, and each time it has the grace. */
const BOUND_MS = 6_000;

/** A few at a time: most of them wait. */
async function each(hangs: Record<string, Hang>, shell: Shell, run: (what: string, hang: Hang) => Promise<void>) {
  const rows = Object.entries(hangs).filter(([, hang]) => hang.shells?.includes(shell) ?? true);
  const workers = Array.from({ length: 3 }, async () => {
    for (let row = rows.shift(); row !== undefined; row = rows.shift()) {
      const [what, hang] = row;
      try {
        await run(what, hang);
      } catch (error) {
        throw new Error(`${what} (${shell})`, { cause: error });
      }
    }
  });
  await Promise.all(workers);
}

function gathersBackground(kernel: Kernel): () => string {
  let text = '';
  kernel.on('output', (output) => {
    if (output.kind === 'text') text += output.text;
  });
  return () => text;
}

async function stopAndGoOn(host: KernelHost, shell: Shell, what: string, hang: Hang): Promise<void> {
  const kernel = host.kernel({ interruptGraceMs: 2_000 });
  const background = gathersBackground(kernel);
  await ok(kernel, `kept = 42\n${hang.prepare ?? ''}`);
  let slowest = 0;
  for (const [way, stop] of Object.entries(ways)) {
    const limitMs = limitAfter(slowest);
    const { result, at, readyMs } = await stop(kernel, hang, limitMs);
    slowest = Math.max(slowest, readyMs);
    const { status, stdout, stderr, error } = await within(`${what}: ${way}`, result, limitMs + BOUND_MS);
    assert.ok(performance.now() - at < BOUND_MS, way);
    const expected = way === 'time limit' ? 'timed-out' : 'interrupted';
    assert.deepEqual([status, error?.name], [expected, 'KeyboardInterrupt'], way);
    assert.match(stdout + stderr, /ready/, `${way}: what it had printed is kept`);
    assert.doesNotMatch(stdout, /after|stray/, way);
    const following = await within(`${what}: the cell after ${way}`, kernel.execute('kept'));
    assert.deepEqual([following.status, following.text, following.life.generation], ['ok', '42', 1], way);
    assert.equal(following.recovered, null);
    if (!hang.chatty) assert.equal(following.stdout + following.stderr, '', way);
    const strays = () => companions(kernel).filter((line) => !hang.leaves?.test(line));
    await until(`${what}: nothing of the cell runs on after ${way}`, () => strays().length === 0);
  }
  await ok(
    kernel,
    shell === 'ipython' || hang.prepare?.includes('asyncio') ? 'import asyncio\nawait asyncio.sleep(0.05)' : '1',
  );
  if (!hang.chatty) assert.equal(background(), '');
  await kernel.close({ graceMs: 500 });
}

async function endsItsLife(host: KernelHost, release: string, hang: Hang): Promise<void> {
  const kernel = host.kernel({ interruptGraceMs: 150 });
  let slowest = 0;
  for (const [way, stop] of Object.entries(ways)) {
    await ok(kernel, `release = ${JSON.stringify(`${release}-${way}`)}\n${hang.prepare ?? ''}`);
    const { generation } = kernel;
    const limitMs = limitAfter(slowest);
    const { result, at, readyMs } = await stop(kernel, hang, limitMs);
    slowest = Math.max(slowest, readyMs);
    const cause = way === 'time limit' ? 'timeout' : 'kill';
    await assert.rejects(within(way, result, limitMs + BOUND_MS), (error: unknown) => {
      const { code, exit, partial } = error as { code: string; exit: ExitReason; partial: CellResult };
      assert.deepEqual([code, exit.cause, exit.cell?.code], ['ERR_KERNEL_DIED', cause, hang.code], way);
      assert.equal(partial.status, way === 'time limit' ? 'timed-out' : 'interrupted');
      assert.equal(partial.stdout, 'ready\n', 'what it had printed is kept');
      return true;
    });
    assert.ok(performance.now() - at < BOUND_MS, way);
    const following = await within(`the cell after ${way}`, kernel.execute('1 + 1'));
    assert.deepEqual([following.text, following.life.generation], ['2', generation + 1], way);
    assert.deepEqual([following.recovered?.exit.cause, following.recovered?.state], [cause, 'fresh'], way);
  }
  await kernel.close({ graceMs: 500 });
}

async function keepsItsLife(host: KernelHost, folder: string, hang: Hang): Promise<void> {
  const kernel = host.kernel({ interruptGraceMs: 100, stuck: 'wait' });
  const background = gathersBackground(kernel);
  let slowest = 0;
  for (const [way, stop] of Object.entries(ways)) {
    const release = `${folder}-${way}`;
    await ok(kernel, `kept = 42\nrelease = ${JSON.stringify(release)}\n${hang.prepare ?? ''}`);
    const limitMs = limitAfter(slowest);
    const { result, at, readyMs } = await stop(kernel, hang, limitMs);
    slowest = Math.max(slowest, readyMs);
    const { status, stdout } = await within(way, result, limitMs + BOUND_MS);
    assert.deepEqual([status, stdout], [way === 'time limit' ? 'timed-out' : 'interrupted', 'ready\n'], way);
    assert.ok(performance.now() - at < BOUND_MS, way);
    assert.equal(kernel.state, 'running', 'the cell goes on');
    const options: ExecuteOptions = { timeoutMs: 100 };
    await assert.rejects(within(way, kernel.execute('kept', options)), { code: 'ERR_KERNEL_BUSY' });
    const patient = kernel.execute('kept', { timeoutMs: 30_000 });
    writeFileSync(release, 'x');
    const { text, stdout: printed, life, recovered } = await within(`the cell after ${way}`, patient);
    assert.deepEqual([text, printed, life.generation, recovered], ['42', '', 1, null], way);
  }
  assert.equal(background(), '');
  await kernel.close({ graceMs: 500 });
}

function releaseIn(t: TestContext): (what: string) => string {
  const folder = temporaryFolder(t);
  return (what) => join(folder, what.replaceAll(/\W/g, '-'));
}

for (const shell of shells) {
  test(`what hears an interrupt is stopped by interrupt, abort and time limit, and its life goes on (${shell})`, async (t) => {
    const host = startHost(t, { shell });
    await each(stoppable, shell, (what, hang) => stopAndGoOn(host, shell, what, hang));
  });

  test(`stuck "end": what hears no interrupt is ended with its life, and the next cell has a new one (${shell})`, async (t) => {
    const host = startHost(t, { shell });
    const release = releaseIn(t);
    await each(deaf, shell, (what, hang) => endsItsLife(host, release(what), hang));
  });

  test(`stuck "wait": what hears no interrupt keeps its life, and the next cell waits in its own time (${shell})`, async (t) => {
    const host = startHost(t, { shell });
    const release = releaseIn(t);
    await each(deaf, shell, (what, hang) => keepsItsLife(host, release(what), hang));
  });
}
