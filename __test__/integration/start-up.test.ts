/** What may stand in the way of a start, and what a start says when it fails: cases of area 8. */

import assert from 'node:assert/strict';
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, existsSync, mkdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { KernelStartError } from 'kernelhost';
import { ok, writeModules } from '../fixtures/forkserver-look.ts';
import { runNodeForJson } from '../fixtures/node-run.ts';
import {
  hasModule,
  pythonForTests,
  startHost,
  type TestContext,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

const launches = ['fork', 'spawn'] as const;

/** An executable file with this text. */
function program(t: TestContext, text: string): string {
  const path = join(temporaryFolder(t), 'python');
  writeFileSync(path, text);
  chmodSync(path, 0o755);
  return path;
}

/** The environment in which the interpreter runs this code at its start. */
function atStart(t: TestContext, code: string) {
  const folder = temporaryFolder(t);
  writeModules(folder, { sitecustomize: code });
  return { env: { PYTHONPATH: folder }, inheritEnv: 'all' } as const;
}

async function startError(promise: Promise<unknown>): Promise<KernelStartError> {
  let caught: unknown;
  await assert.rejects(promise, (error: unknown) => {
    caught = error;
    return true;
  });
  assert.ok(caught instanceof KernelStartError, `${caught}`);
  return caught;
}

test('C85: files named like modules of the library, in the cwd or in PYTHONPATH, keep no kernel from starting', async (t) => {
  const names = ['random', 'email', 'signal', 'types', 'zmq', 'ipykernel', 'code', 'asyncio', 'json', 'socket', 'ast'];
  const folder = temporaryFolder(t);
  writeModules(folder, Object.fromEntries(names.map((name) => [name, 'mine = True\n'])));
  const empty = temporaryFolder(t);
  for (const launch of launches) {
    const host = startHost(t, { launch });
    const inCwd = host.kernel({ cwd: folder });
    const result = await ok(inCwd, 'import random; random.__file__');
    assert.equal(result.stderr, '');
    // The cwd comes first, as in an interactive Python, for what the kernel itself has not needed yet.
    const fresh = await ok(inCwd, 'import zmq; zmq.mine');
    assert.equal(fresh.text, 'True');
    await ok(inCwd, 'import asyncio; await asyncio.sleep(0)');
    await ok(inCwd, 'import subprocess; subprocess.run(["true"], check=True)');
    const onPath = host.kernel({ cwd: empty, env: { PYTHONPATH: folder }, inheritEnv: 'all' });
    assert.equal((await ok(onPath, 'import ipykernel; ipykernel.mine')).text, 'True');
  }
});

test('C86: an interpreter that cannot be one is a typed error within two seconds that names path and cause', async (t) => {
  const folder = temporaryFolder(t);
  const plain = join(folder, 'not-executable');
  writeFileSync(plain, '#!/bin/sh\n');
  const noShebang = program(t, 'this is text\n');
  const broken = join(folder, 'broken-link');
  symlinkSync(join(folder, 'nowhere'), broken);
  const cases: [python: string, cause: RegExp][] = [
    [join(folder, 'missing'), /No such file|not found|does not exist/i],
    [folder, /directory|permission|denied/i],
    [plain, /permission|executable/i],
    [broken, /No such file|not found|broken|does not exist/i],
    [noShebang, /#! line/],
    [program(t, '#!/bin/sh\nexec false\n'), /exited with code 1/],
    [program(t, '#!/bin/sh\necho "no such environment" >&2\nexit 7\n'), /code 7.*no such environment/s],
    [program(t, '#!/bin/sh\nexec sleep 999\n'), /not ready within 1\.?\d* s|startTimeoutMs/],
  ];
  for (const [python, cause] of cases) {
    for (const launch of ['auto', ...launches] as const) {
      const began = performance.now();
      const host = startHost(t, { python, launch, defaults: { startTimeoutMs: 1_200 } });
      const error = await startError(host.kernel().start());
      const took = performance.now() - began;
      assert.ok(took < 2_000, `${python} with ${launch} took ${took} ms`);
      assert.equal(error.code, 'ERR_KERNEL_START');
      assert.match(error.message, cause, launch);
      assert.ok(error.message.includes(python), `the path is not in: ${error.message}`);
    }
  }
});

test('C86: a wrapper script that runs a Python is an interpreter', async (t) => {
  const python = program(t, `#!/bin/sh\nexec "${pythonForTests()}" "$@"\n`);
  for (const launch of launches) {
    const host = startHost(t, { python, launch });
    assert.equal((await ok(host.kernel(), '1 + 1')).text, '2');
  }
});

test('C86: a Python that is too old says which version is needed', async (t) => {
  const defaults = atStart(t, 'import sys; sys.version_info = (3, 9, 18, "final", 0)');
  for (const launch of ['auto', ...launches] as const) {
    const host = startHost(t, { launch, defaults });
    const error = await startError(host.kernel().start());
    assert.match(error.message, /3\.10/);
    assert.match(error.message, /3\.9\.18/);
  }
});

test('C87: an interpreter that says why it leaves is quoted, with its exit code', async (t) => {
  const defaults = atStart(t, 'import os; os.write(2, b"the licence has run out\\n"); os._exit(7)');
  const spawned = await startError(startHost(t, { launch: 'spawn', defaults }).kernel().start());
  assert.deepEqual(spawned.exit?.status, { kind: 'exited', code: 7 });
  assert.equal(spawned.exit?.cause, 'start-failed');
  assert.match(spawned.stderrTail, /the licence has run out/);
  for (const launch of ['auto', 'fork', 'spawn'] as const) {
    const error = await startError(startHost(t, { launch, defaults }).kernel().start());
    assert.match(error.message, /code 7/);
    assert.match(error.message, /the licence has run out/);
  }
});

test('C87: a start-up module that cannot import something, or prints a megabyte, does not keep a kernel from starting', async (t) => {
  for (const code of ['import a_module_that_is_missing', 'print("x" * 1_000_000)']) {
    const defaults = atStart(t, code);
    for (const launch of launches) {
      const kernel = startHost(t, { launch, defaults }).kernel();
      const result = await ok(kernel, 'print(1)');
      assert.deepEqual([result.stdout, result.stderr], ['1\n', '']);
      assert.ok((await kernel.kill()).stderrTail.length < 100_000);
    }
  }
});

test('C87: an interpreter that prints a megabyte and then leaves has its last words in the error', async (t) => {
  const defaults = atStart(
    t,
    'import os, sys; sys.stderr.write("x" * 1_000_000 + "\\nlast words\\n"); sys.stderr.flush(); os._exit(3)',
  );
  const error = await startError(startHost(t, { launch: 'spawn', defaults }).kernel().start());
  assert.match(error.message, /last words/);
  assert.ok(error.message.length < 4_000);
  assert.ok(error.stderrTail.length < 100_000);
});

test('C88: an interpreter that is gone ends the wait at once, however long the limit is', async (t) => {
  const defaults = { ...atStart(t, 'import os; os._exit(4)'), startTimeoutMs: 60_000 };
  for (const launch of ['auto', ...launches] as const) {
    const began = performance.now();
    await startError(startHost(t, { launch, defaults }).kernel().start());
    assert.ok(performance.now() - began < 1_000);
  }
});

test('C88: the limit of a start is an option, and a slow start within it is no failure', async (t) => {
  const slow = atStart(t, 'import time; time.sleep(2)');
  for (const launch of launches) {
    const host = startHost(t, { launch });
    const began = performance.now();
    const error = await startError(host.kernel({ ...slow, startTimeoutMs: 500 }).start());
    assert.ok(performance.now() - began < 1_500);
    assert.match(error.message, /500 ms/);
    const life = await host.kernel({ ...slow, startTimeoutMs: 20_000 }).start();
    if (launch === 'spawn') assert.ok(life.startMs >= 2_000);
  }
});

test('C88: three failed starts in a row make the next one wait, and it then works if the cause has gone', async (t) => {
  const folder = temporaryFolder(t);
  const flag = join(folder, 'broken');
  writeFileSync(flag, '');
  writeModules(folder, { sitecustomize: `import os\nif os.path.exists(${JSON.stringify(flag)}): os._exit(4)` });
  const host = startHost(t, {
    launch: 'spawn',
    shell: 'plain',
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  const kernel = host.kernel();
  for (let round = 0; round < 3; round++) assert.match((await startError(kernel.execute('1'))).message, /code 4/);
  rmSync(flag);
  assert.equal((await kernel.execute('1 + 1')).text, '2');
});

test('C89: a start that waits for a stopped template is aborted at once, and the next start works', async (t) => {
  const folder = temporaryFolder(t);
  const flag = join(folder, 'pid');
  writeModules(folder, {
    stops: [
      'import os, signal',
      `path = ${JSON.stringify(flag)}`,
      'if not os.path.exists(path):',
      '    with open(path + ".new", "w") as file: file.write(str(os.getpid()))',
      '    os.rename(path + ".new", path)',
      '    os.kill(os.getpid(), signal.SIGSTOP)',
    ].join('\n'),
  });
  const host = startHost(t, {
    launch: 'fork',
    shell: 'plain',
    preload: ['stops'],
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  const kernel = host.kernel();
  const controller = new AbortController();
  const start = kernel.start({ signal: controller.signal });
  await until('the template has stopped itself', () => existsSync(flag));
  const began = performance.now();
  const reason = new Error('the user has changed their mind');
  controller.abort(reason);
  await assert.rejects(within('the aborted start', start, 1_000), (error: unknown) => error === reason);
  assert.ok(performance.now() - began < 500);
  const template = Number(readFileSync(flag, 'utf8'));
  // A start that nobody waits for may have been given up, and its process ended.
  try {
    process.kill(template, 'SIGCONT');
  } catch (error) {
    assert.equal((error as NodeJS.ErrnoException).code, 'ESRCH');
  }
  const life = await kernel.start();
  assert.equal(life.launch, 'fork');
  assert.equal((await kernel.execute('1 + 1')).text, '2');
});

test('C89: an aborted cell that waits for its kernel to start never runs', async (t) => {
  const marker = join(temporaryFolder(t), 'ran');
  const kernel = startHost(t, {
    launch: 'spawn',
    shell: 'plain',
    defaults: atStart(t, 'import time; time.sleep(0.5)'),
  }).kernel();
  const controller = new AbortController();
  const call = kernel.execute(`open(${JSON.stringify(marker)}, 'w')`, { signal: controller.signal });
  const other = kernel.execute('1 + 1');
  controller.abort();
  await assert.rejects(call, { name: 'AbortError' });
  assert.equal((await other).text, '2');
  assert.ok(!existsSync(marker));
});

test('C90: a kernel whose cwd has been deleted goes on running cells, and os.chdir repairs it', async (t) => {
  for (const launch of launches) {
    const folder = join(temporaryFolder(t), 'cwd');
    mkdirSync(folder);
    const kernel = startHost(t, { launch, defaults: { cwd: folder } }).kernel();
    await ok(kernel, 'x = 20');
    rmSync(folder, { recursive: true });
    assert.equal((await ok(kernel, 'x + 1')).text, '21');
    assert.equal((await kernel.execute('import os; os.getcwd()')).error?.name, 'FileNotFoundError');
    assert.equal((await ok(kernel, 'import os; os.chdir("/"); os.getcwd()')).text, "'/'");
    assert.equal((await ok(kernel, 'import colorsys; x')).text, '20');
  }
});

test('C90: a cwd that cannot be entered is a start failure that names it', async (t) => {
  const folder = temporaryFolder(t);
  const file = join(folder, 'file');
  writeFileSync(file, '');
  for (const launch of launches) {
    const host = startHost(t, { launch });
    for (const cwd of [join(folder, 'missing'), file]) {
      const error = await startError(host.kernel({ cwd }).start());
      assert.ok(error.message.includes(cwd), error.message);
      assert.match(error.message, cwd === file ? /not a directory/i : /no such file/i);
    }
  }
});

test('C90: the cwd that the template was started in may be deleted', async (t) => {
  const { value } = await runNodeForJson<unknown>(
    t,
    `
    import { mkdtempSync, rmdirSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const folder = mkdtempSync('/tmp/kernelhost-test-');
    process.chdir(folder);
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, launch: 'fork' });
    const before = await host.kernel().execute('1 + 1');
    rmdirSync(folder);
    const after = await host.kernel({ cwd: '/' }).execute('import os; os.getcwd()');
    const without = await host.kernel().execute('2 + 2').then(({ text }) => text, ({ code, message }) => code + ' ' + message.includes(folder));
    await host.close();
    console.log(JSON.stringify([before.text, after.text, without]));
    `,
  );
  // The daemon's own folder is gone, and a kernel that asks for no other is told so.
  assert.deepEqual(value, ['2', "'/'", 'ERR_KERNEL_START true']);
});

test('C92: 200 kernels at once on one HOME start without noise, delay or a history file', async (t) => {
  const home = temporaryFolder(t);
  const host = startHost(t, { defaults: { env: { HOME: home }, inheritEnv: 'all' } });
  const began = performance.now();
  const kernels = Array.from({ length: 200 }, () => host.kernel());
  const results = await Promise.all(kernels.map((kernel, index) => ok(kernel, `${index}`)));
  const took = performance.now() - began;
  assert.ok(results.every(({ stderr, stdout }) => stderr === '' && stdout === ''));
  assert.deepEqual(
    results.map(({ text }) => text),
    kernels.map((_, index) => String(index)),
  );
  assert.ok(took < 15_000, `${took} ms`);
  assert.ok(!existsSync(join(home, '.ipython', 'profile_default', 'history.sqlite')));
});

test('C92: a HOME whose history is locked, that cannot be written, is missing or not set, is no hindrance', async (t) => {
  if (!hasModule('IPython')) {
    t.skip('IPython is not installed in the Python of the tests');
    return;
  }
  const home = temporaryFolder(t);
  const profile = join(home, '.ipython', 'profile_default');
  mkdirSync(profile, { recursive: true });
  const locker = lockHistory(t, join(profile, 'history.sqlite'));
  await locker.locked;
  // Nobody can make files there, also not root.
  for (const place of [home, '/proc', join(home, 'missing'), '/dev/full', undefined]) {
    for (const launch of launches) {
      const host = startHost(t, {
        launch,
        defaults: { env: { HOME: place }, inheritEnv: 'all', startTimeoutMs: 10_000 },
      });
      const kernel = host.kernel();
      const result = await ok(kernel, 'print("hello")');
      assert.deepEqual([result.stdout, result.stderr], ['hello\n', ''], `${place} ${launch}`);
      assert.ok(result.life.startMs < 5_000);
      assert.equal((await kernel.kill()).stderrTail, '', `${place} ${launch}`);
    }
  }
});

function lockHistory(t: TestContext, path: string): { child: ChildProcess; locked: Promise<unknown> } {
  const child = spawn(
    pythonForTests(),
    [
      '-c',
      'import sqlite3, sys\nc = sqlite3.connect(sys.argv[1]); c.execute("create table t (x)"); c.commit()\nc.execute("begin exclusive"); print("locked", flush=True); sys.stdin.read()',
      path,
    ],
    { stdio: ['pipe', 'pipe', 'inherit'] },
  );
  t.after(() => void child.kill('SIGKILL'));
  assert.ok(child.stdout);
  return { child, locked: within('the lock', once(child.stdout, 'data')) };
}

test('C92: a full disk under HOME is no hindrance', async (t) => {
  try {
    execFileSync('unshare', ['--mount', 'true'], { stdio: 'pipe' });
  } catch {
    t.skip('needs a mount namespace of its own, which takes root and unshare');
    return;
  }
  const home = temporaryFolder(t);
  const fill = `mount -t tmpfs -o size=16k none "$0" && { cat /dev/zero > "$0/filler" 2>/dev/null; exec "$@"; }`;
  const { value } = await runNodeForJson<unknown>(
    t,
    `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, defaults: { env: { HOME: ${JSON.stringify(home)} }, inheritEnv: 'all' } });
    const kernel = host.kernel();
    const { stdout, stderr } = await kernel.execute('print("hello")');
    const { stderrTail } = await kernel.kill();
    await host.close();
    console.log(JSON.stringify([stdout, stderr, stderrTail]));
    `,
    { through: ['unshare', '--mount', 'sh', '-c', fill, home] },
  );
  assert.deepEqual(value, ['hello\n', '', '']);
});

/** A user id that nobody has: what is counted for it is only ours. */
const STRANGER = 54_321;
const asStranger = [
  'setpriv',
  ...[`--reuid=${STRANGER}`, `--regid=${STRANGER}`, '--clear-groups'],
  // Enough to get at an interpreter in somebody's home; no ability that lifts limits.
  ...[
    '--inh-caps=-all,+dac_read_search',
    '--ambient-caps=-all,+dac_read_search',
    '--bounding-set=-all,+dac_read_search',
  ],
];

test('C94: at the limit of processes a start says EAGAIN and the limit, the others live, and it works again later', async (t) => {
  if (process.getuid?.() !== 0) {
    t.skip('needs root, to run as a user of its own with a limit of its own');
    return;
  }
  const { value } = await runNodeForJson<{
    started: number;
    failures: string[];
    thread: string;
    alive: boolean;
    again: number;
    child: number;
  }>(
    t,
    `
    import { KernelHost } from 'kernelhost';
    import { spawn } from 'node:child_process';
    import { once } from 'node:events';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', defaults: { cwd: '/', env: { HOME: '/' }, inheritEnv: 'all' } });
    const kernels = Array.from({ length: 100 }, () => host.kernel());
    await host.warm();
    const starts = await Promise.allSettled(kernels.map((kernel) => kernel.start()));
    const up = kernels.filter((_, index) => starts[index].status === 'fulfilled');
    const failures = starts.filter(({ status }) => status === 'rejected').map(({ reason }) => reason.code + ' ' + reason.message);
    const thread = await up[0].execute('import threading; threading.Thread(target=print).start()');
    const alive = (await Promise.all(up.map((kernel, index) => kernel.execute(String(index))))).every(({ text }, index) => text === String(index));
    await Promise.all(up.slice(0, 20).map((kernel) => kernel.close()));
    const late = kernels.filter((kernel) => kernel.state === 'absent').slice(0, 10);
    const again = (await Promise.all(late.map((kernel) => kernel.execute('1')))).length;
    const child = spawn('true');
    const [code] = await once(child, 'exit');
    await host.close();
    console.log(JSON.stringify({ started: up.length, failures, thread: thread.error?.value ?? 'no error', alive, again, child: code }));
    `,
    { through: [...asStranger, 'prlimit', '--nproc=70'], deadlineMs: 60_000 },
  );
  assert.ok(value.started >= 30 && value.started < 70, String(value.started));
  assert.equal(value.failures.length, 100 - value.started);
  for (const failure of value.failures) {
    assert.match(failure, /^ERR_KERNEL_START /);
    assert.match(failure, /EAGAIN/);
    assert.match(failure, /limit/);
    assert.match(failure, /process/);
  }
  assert.match(value.thread, /can't start new thread/);
  assert.deepEqual([value.alive, value.again, value.child], [true, 10, 0]);
});

test('C95: at the limit of open files a start says EMFILE, the daemon and the other kernels go on', async (t) => {
  const { value } = await runNodeForJson<{
    started: number;
    failures: string[];
    half: boolean;
    again: number;
    read: boolean;
  }>(
    t,
    `
    import { readFile } from 'node:fs/promises';
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain' });
    const kernels = Array.from({ length: 100 }, () => host.kernel());
    const starts = await Promise.allSettled(kernels.map((kernel) => kernel.start()));
    const up = kernels.filter((_, index) => starts[index].status === 'fulfilled');
    const failures = starts.filter(({ status }) => status === 'rejected').map(({ reason }) => reason.code + ' ' + reason.message);
    const [stopped, rest] = [up.slice(0, up.length >> 1), up.slice(up.length >> 1)];
    await Promise.all(stopped.map((kernel) => kernel.close()));
    const half = (await Promise.all(rest.map((kernel, index) => kernel.execute(String(index))))).every(({ text }, index) => text === String(index));
    const read = (await readFile('package.json', 'utf8')).includes('kernelhost');
    const late = kernels.find((kernel) => kernel.state === 'absent');
    const again = (await late.execute('41 + 1')).text;
    await host.close();
    console.log(JSON.stringify({ started: up.length, failures, half, again, read }));
    `,
    { through: ['prlimit', '--nofile=128:128'], deadlineMs: 60_000 },
  );
  assert.ok(value.started >= 5, String(value.started));
  assert.equal(value.failures.length, 100 - value.started);
  for (const failure of value.failures) {
    assert.match(failure, /^ERR_KERNEL_START /);
    assert.match(failure, /EMFILE/);
    assert.match(failure, /open files/);
  }
  assert.deepEqual([value.half, value.read, value.again], [true, true, '42']);
});

test('init runs before the first cell of every life, and a failing one is a start failure with its error', async (t) => {
  for (const launch of launches) {
    const host = startHost(t, { launch });
    const kernel = host.kernel({ init: 'import math\nanswer = 42' });
    const first = await ok(kernel, 'answer, math.floor(2.5)');
    assert.deepEqual([first.text, first.executionCount], ['(42, 2)', 1]);
    await kernel.kill();
    assert.equal((await ok(kernel, 'answer')).text, '42');
    const error = await startError(host.kernel({ init: 'answer = 1 / 0' }).start());
    assert.match(error.message, /init.*ZeroDivisionError/s);
    assert.equal(error.exit?.cause, 'start-failed');
    const slow = await startError(host.kernel({ init: 'import time; time.sleep(60)', startTimeoutMs: 700 }).start());
    assert.match(slow.message, /700 ms/);
  }
});
