/** A kernel that saves itself, and lives that begin with a snapshot. */

import assert from 'node:assert/strict';
import { mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { type Kernel, type KernelOptions, SnapshotError, type Warning } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { runNodeForJson } from '../fixtures/node-run.ts';
import { cloudpickle } from '../fixtures/snapshots.ts';
import { pythonForTests, startHost, type TestContext, temporaryFolder, until, within } from '../helpers/index.ts';

function withPath(t: TestContext) {
  const folder = temporaryFolder(t);
  const host = startHost(t);
  const warnings: Warning[] = [];
  host.on('warning', (warning) => void warnings.push(warning));
  return { folder, path: join(folder, 'state'), host, warnings };
}

const savedWith = (kernel: Kernel, name: string) =>
  until(`${name} is saved`, () => kernel.lastSave?.saved.includes(name) === true);

test('restoreFrom: every life begins with the snapshot, after init and before its first cell', async (t) => {
  const { path, host, warnings } = withPath(t);
  const first = host.kernel();
  await ok(first, 'x = 1\ndef f(): return x, base\norder = ["saved"]');
  await first.save(path);
  const init = `import kernelhost
order = ['init']; base = 7; seen = []
kernelhost.on_restore(lambda what: seen.append((what, list(order))))`;
  const kernel = host.kernel({ init, restoreFrom: path });
  // Several at once: none of them may come before it.
  const results = await Promise.all([1, 2, 3].map(() => kernel.execute('f(), order, seen')));
  for (const { text } of results) assert.equal(text, "((1, 7), ['saved'], [('load', ['saved'])])");
  assert.equal(results[0]?.executionCount, 1);
  assert.deepEqual(kernel.restored?.saved, ['x', 'f', 'order']);
  await ok(kernel, 'x = 2');
  await kernel.kill();
  const again = await kernel.execute('f()');
  assert.deepEqual([again.text, again.recovered?.state], ['(1, 7)', 'fresh']);
  await kernel.restart();
  assert.equal((await ok(kernel, 'f()')).text, '(1, 7)');
  assert.deepEqual(warnings, []);
});

test('restoreFrom: where there is no file yet, nothing is said', async (t) => {
  const { path, host, warnings } = withPath(t);
  const kernel = host.kernel({ restoreFrom: path });
  assert.equal((await ok(kernel, '1 + 1')).text, '2');
  assert.deepEqual([kernel.restored, warnings], [null, []]);
});

test('restoreFrom: a file that cannot be loaded is a warning, keeps no kernel from starting, and is not replaced', async (t) => {
  const { folder, path, host, warnings } = withPath(t);
  writeFileSync(path, 'KHSNAP\0\x02 and so on, but not to the end');
  const before = readFileSync(path);
  const kernel = host.kernel({ restoreFrom: path, saveTo: { path, intervalMs: 0 } });
  const order: string[] = [];
  kernel.on('warning', () => void order.push('warning'));
  await kernel.execute('x = 1').then(() => order.push('cell'));
  assert.deepEqual(order, ['warning', 'cell']);
  assert.equal(warnings[0]?.code, 'WARN_RESTORE');
  assert.match(warnings[0]?.message ?? '', /cut short.*kept as it is/);
  await kernel.close();
  assert.deepEqual(readFileSync(path), before);
  assert.deepEqual(readdirSync(folder), ['state']);
});

test('restoreFrom: variables that could not be loaded are told in a warning', async (t) => {
  const { folder, path, host, warnings } = withPath(t);
  mkdirSync(join(folder, 'modules'));
  writeFileSync(join(folder, 'modules', 'passing.py'), 'class Thing: pass');
  const first = host.kernel();
  await ok(
    first,
    `import sys; sys.path.append(${JSON.stringify(join(folder, 'modules'))})\nimport passing\nthing = passing.Thing(); x = 1`,
  );
  await first.save(path);
  const kernel = host.kernel({ restoreFrom: path });
  assert.equal((await ok(kernel, 'x')).text, '1');
  assert.match(warnings.map(({ message }) => message).join(), /without some of its snapshot: .*thing \(/);
});

test('restoreFrom: an init that fails is what the start fails with', async (t) => {
  const { path, host } = withPath(t);
  await assert.rejects(host.kernel({ init: '1/0', restoreFrom: path }).execute('1'), {
    code: 'ERR_KERNEL_START',
    message: /ZeroDivisionError/,
  });
});

test('saveTo: after cells, once for a row of them, behind the last and not too often', async (t) => {
  const { path, host, warnings } = withPath(t);
  const kernel = host.kernel({ saveTo: { path, intervalMs: 1500 } });
  await kernel.start();
  assert.equal(kernel.lastSave, null);
  for (let i = 0; i < 5; i++) await ok(kernel, `x${i} = ${i}`);
  await savedWith(kernel, 'x4');
  const first = performance.now();
  const counted = await kernel.execute('late = 1');
  assert.equal(counted.executionCount, 6);
  await savedWith(kernel, 'late');
  assert.ok(performance.now() - first > 1300, 'the interval is kept');
  const inode = statSync(path).ino;
  assert.equal((await kernel.execute('2')).executionCount, 7);
  await kernel.close();
  assert.notEqual(statSync(path).ino, inode, 'the last save is made on close');
  const next = host.kernel({ restoreFrom: path });
  assert.equal((await ok(next, 'x0, x4, late')).text, '(0, 4, 1)');
  assert.deepEqual(warnings, []);
});

test('saveTo: a cell that comes while the kernel saves itself does not wait for that, and its children feel nothing', async (t) => {
  const { folder, path, host, warnings } = withPath(t);
  let pickling = () => {};
  const begun = new Promise<void>((resolve) => {
    pickling = resolve;
  });
  const kernel = host.kernel({ saveTo: { path, intervalMs: 0 }, onCall: { pickling: () => pickling() } });
  // Sixty seconds of pickling, in small steps.
  await ok(
    kernel,
    `import subprocess, time, kernelhost
child = subprocess.Popen(['sleep', '60'])
class Step:
    def __reduce__(self):
        time.sleep(0.02)
        return (bytes, (b'x' * 70_000,))
class Begin:
    def __reduce__(self):
        kernelhost.call('pickling')
        return (int, ())
slow = [Begin(), *(Step() for _ in range(3000))]`,
  );
  await within('the begin of a save', begun);
  const began = performance.now();
  assert.equal((await ok(kernel, 'child.poll() is None')).text, 'True');
  assert.ok(performance.now() - began < 1000, `it waited ${performance.now() - began} ms`);
  await ok(kernel, 'child.kill(); _ = child.wait(); del slow, child');
  await savedWith(kernel, 'time');
  assert.deepEqual(readdirSync(folder), ['state']);
  assert.deepEqual(warnings, []);
});

test('saveTo: a failure is a warning, the kernel goes on, and the next save may succeed', async (t) => {
  const { folder, host, warnings } = withPath(t);
  const path = join(folder, 'later', 'state');
  const kernel = host.kernel({ saveTo: { path, intervalMs: 0 } });
  await ok(kernel, 'x = 1');
  await until('a warning', () => warnings.length > 0);
  assert.equal(warnings[0]?.code, 'WARN_AUTOSAVE');
  assert.match(warnings[0]?.message ?? '', /No such file or directory/);
  mkdirSync(join(folder, 'later'));
  await ok(kernel, 'y = 1');
  await savedWith(kernel, 'y');
  assert.equal(warnings.length, 1);
});

test('saveTo: a time that is up is a failure, and the earlier file stays', async (t) => {
  const { path, host, warnings } = withPath(t);
  const kernel = host.kernel({ saveTo: { path, intervalMs: 0, timeoutMs: 100 } });
  await ok(kernel, 'x = 1');
  await savedWith(kernel, 'x');
  const before = readFileSync(path);
  await ok(
    kernel,
    'import time\nclass Slow:\n    def __reduce__(self):\n        time.sleep(0.3)\n        return (int, ())\ns = Slow()',
  );
  await until('a warning', () => warnings.length > 0);
  assert.match(warnings[0]?.message ?? '', /the time for saving was up/);
  assert.deepEqual(readFileSync(path), before);
});

test('saveTo: what a life had is not overwritten by the next one before a cell has run there', async (t) => {
  const { path, host } = withPath(t);
  const kernel = host.kernel({ saveTo: { path, intervalMs: 0 } });
  await ok(kernel, 'x = 1');
  await savedWith(kernel, 'x');
  await ok(kernel, 'y = 1');
  await kernel.kill();
  const before = readFileSync(path);
  await kernel.start();
  await kernel.close();
  assert.deepEqual(readFileSync(path), before);
  const next = host.kernel({ restoreFrom: path });
  assert.equal((await ok(next, 'x')).text, '1');
});

test('saveTo: closing the host saves each kernel; a cell that still runs then is told as the reason why not', async (t) => {
  const { folder, host, warnings } = withPath(t);
  const paths = ['a', 'b', 'c'].map((name) => join(folder, name));
  const kernels = paths.map((path) => host.kernel({ saveTo: path }));
  await Promise.all(kernels.map((kernel, number) => ok(kernel, `who = ${number}`)));
  const busy = kernels[2]?.execute('import time; print("on", flush=True); time.sleep(60)', {
    onOutput: () => begun(),
  });
  let begun = () => {};
  await new Promise<void>((resolve) => {
    begun = resolve;
  });
  const closed = host.close({ graceMs: 200 });
  await assert.rejects(kernels[0]?.execute('1') ?? Promise.resolve(), { code: 'ERR_KERNEL_CLOSED' });
  await Promise.all([closed, assert.rejects(busy ?? Promise.resolve())]);
  assert.deepEqual(readdirSync(folder), ['a', 'b']);
  assert.match(warnings.map(({ code, message }) => `${code} ${message}`).join(), /^WARN_AUTOSAVE .*cell is running/);
});

test('saveTo: an idle kernel that saves itself does not keep Node alive', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const { value, run } = await runNodeForJson<string>(
    t,
    `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())} });
    const kernel = host.kernel({ saveTo: { path: ${JSON.stringify(path)}, intervalMs: 60_000 } });
    await kernel.execute('1');
    while (kernel.lastSave === null) await new Promise((resolve) => setTimeout(resolve, 10));
    console.log(JSON.stringify((await kernel.execute('1')).text));`,
  );
  assert.equal(value, '1');
  assert.ok(run.durationMs < 20_000, String(run.durationMs));
});

test('options: restoreFrom and saveTo are checked, and a file is of one kernel', (t) => {
  const { host } = withPath(t);
  const wrong = (options: object, option: string) =>
    assert.throws(() => host.kernel(options as KernelOptions), { code: 'ERR_INVALID_OPTION', option });
  wrong({ restoreFrom: '' }, 'restoreFrom');
  wrong({ restoreFrom: 'a\0b' }, 'restoreFrom');
  wrong({ saveTo: '' }, 'saveTo.path');
  wrong({ saveTo: 3 }, 'saveTo');
  wrong({ saveTo: {} }, 'saveTo.path');
  wrong({ saveTo: { path: 'x', intervalMs: -1 } }, 'saveTo.intervalMs');
  wrong({ saveTo: { path: 'x', interval: 1 } }, 'saveTo.interval');
  assert.throws(() => startHost(t, { defaults: { saveTo: 'x' } }), { option: 'defaults.saveTo' });
});

test('C23: eight kernels with snapshots of 60 MB that are killed at once all come back with them', {
  skip: cloudpickle.skip,
}, async (t) => {
  const folder = temporaryFolder(t);
  const host = startHost(t, cloudpickle.host);
  const kernels = await Promise.all(
    Array.from({ length: 8 }, async (_, number) => {
      const path = join(folder, String(number));
      const kernel = host.kernel({ restoreFrom: path, startTimeoutMs: 60_000 });
      await ok(kernel, `import os\nbig = os.urandom(60_000_000)\nwho = ${number}\ndef f(): return who, len(big)`);
      await kernel.save(path);
      return kernel;
    }),
  );
  await Promise.all(kernels.map((kernel) => kernel.kill()));
  const results = await Promise.all(kernels.map((kernel) => kernel.execute('f()')));
  assert.deepEqual(
    results.map(({ text }) => text),
    kernels.map((_, number) => `(${number}, 60000000)`),
  );
  for (const { recovered } of results) assert.equal(recovered?.exit.cause, 'kill');
  // A second storm, while cells run and wait.
  const waiting = Promise.allSettled(kernels.map((kernel) => kernel.execute('f()[1]')));
  await Promise.all(kernels.map((kernel) => kernel.restart()));
  for (const each of await waiting) {
    if (each.status === 'fulfilled') assert.ok(each.value.text === '60000000' || each.value.status === 'interrupted');
    else assert.ok(!(each.reason instanceof SnapshotError), String(each.reason));
  }
  assert.equal((await Promise.all(kernels.map((kernel) => ok(kernel, 'who')))).length, 8);
});
