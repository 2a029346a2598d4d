/** Variables saved to a file and loaded from it. */

import assert from 'node:assert/strict';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);

for (const shell of shells) {
  test(`C114: what can be saved is loaded by the next life, the rest is listed (${shell})`, async (t) => {
    const folder = mkdtempSync(join(tmpdir(), 'snapshots-'));
    t.after(() => rmSync(folder, { recursive: true }));
    const path = join(folder, 'state "1"');
    const kernel = startHost(t, { shell }).kernel();
    await ok(kernel, 'import os, threading\na = [1]; b = {"a": a}\nlock = threading.Lock()\ng = (i for i in a)');
    const report = await kernel.save(path);
    for (const name of ['os', 'threading', 'a', 'b']) assert.ok(report.saved.includes(name), name);
    assert.deepEqual(report.skipped.map(({ name }) => name).sort(), ['g', 'lock']);
    assert.equal(statSync(path).mode & 0o777, 0o600);
    assert.equal(statSync(path).size, report.bytes);
    await kernel.restart();
    assert.deepEqual((await kernel.load(path)).saved, report.saved);
    assert.equal((await ok(kernel, 'b["a"] is a and os.sep')).text, "'/'");
    const bytes = readFileSync(path);
    writeFileSync(path, bytes.subarray(0, -1));
    await assert.rejects(kernel.load(path), { code: 'ERR_SNAPSHOT', message: /checksum/ });
    await assert.rejects(kernel.save(join(folder, 'none', 'x')), { code: 'ERR_SNAPSHOT' });
    await assert.rejects(kernel.load(''), { code: 'ERR_INVALID_OPTION' });
  });

  test(`C111: a save that fails on a full disk, or is killed, leaves the old file whole (${shell})`, async (t) => {
    const folder = mkdtempSync(join(tmpdir(), 'snapshots-'));
    t.after(() => rmSync(folder, { recursive: true }));
    const path = join(folder, 'state');
    const kernel = startHost(t, { shell }).kernel();
    await ok(kernel, 'import resource, os, signal\nold = 1');
    await kernel.save(path);
    await ok(kernel, 'big = b"x" * 5_000_000; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))');
    await assert.rejects(kernel.save(path), { code: 'ERR_SNAPSHOT', message: /File too large/ });
    assert.deepEqual(readdirSync(folder), ['state']);
    // The second time it is pickled, which is the one that writes.
    const dying =
      'n = 0\nclass Dying:\n    def __reduce__(self):\n        global n\n        n += 1\n        if n == 2: os.kill(os.getpid(), signal.SIGKILL)\n        return (int, ())';
    await ok(kernel, `del big\n${dying}\nd = Dying()`);
    await assert.rejects(kernel.save(path), { code: 'ERR_KERNEL_DIED' });
    await ok(kernel, 'import kernelhost\nseen = []\nkernelhost.on_restore(seen.append)');
    assert.ok((await kernel.load(path)).saved.includes('old'));
    assert.equal((await ok(kernel, '(old, seen)')).text, "(1, ['load'])");
  });
}
