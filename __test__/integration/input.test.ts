/** `input()` and `getpass()` in cells. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { Kernel, KernelOptions } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, type TestContext, within } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);

function kernelOf(t: TestContext, shell: (typeof shells)[number], options: KernelOptions = {}): Kernel {
  return startHost(t, { shell }).kernel(options);
}

for (const shell of shells) {
  test(`C117: input() and getpass() ask the handler, with the prompt and whether it is a secret (${shell})`, async (t) => {
    const asked: unknown[] = [];
    const kernel = kernelOf(t, shell, {
      onInput: async (prompt, { password, signal }) => {
        asked.push([prompt, password, signal.aborted]);
        return `<${prompt}>`;
      },
    });
    const code =
      'from getpass import getpass\nimport getpass as module\n(input(), input("Name: "), getpass(), module.getpass("Key?"), input(None))';
    assert.equal((await ok(kernel, code)).text, "('<>', '<Name: >', '<Password: >', '<Key?>', '<None>')");
    assert.deepEqual(asked, [
      ['', false, false],
      ['Name: ', false, false],
      ['Password: ', true, false],
      ['Key?', true, false],
      ['None', false, false],
    ]);
  });

  test(`C117: without a handler both fail at once and say so; sys.stdin is empty (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    for (const [code, who] of [
      ['input("x")', 'input()'],
      ['import getpass; getpass.getpass()', 'getpass()'],
    ]) {
      const { error, status } = await within('the cell', kernel.execute(code ?? ''));
      assert.deepEqual([status, error?.name], ['error', 'EOFError']);
      assert.equal(
        error?.value,
        `${who} was called, but this kernel has no onInput handler, and its standard input is empty`,
      );
    }
    assert.equal((await ok(kernel, 'import sys; sys.stdin.read()')).text, "''");
  });

  test(`C117: an interrupt, an abort and a time limit end the wait for a line, and abort the handler's signal (${shell})`, async (t) => {
    for (const how of ['interrupt', 'abort', 'timed-out'] as const) {
      const asked = Promise.withResolvers<AbortSignal>();
      const kernel = kernelOf(t, shell, {
        onInput: (_, { signal }) => {
          asked.resolve(signal);
          // Never answers.
          return new Promise(() => {});
        },
      });
      await kernel.start();
      const abort = new AbortController();
      const cell = kernel.execute('print("before")\ninput("?")', {
        signal: abort.signal,
        ...(how === 'timed-out' ? { timeoutMs: 150 } : {}),
      });
      const signal = await within('the question', asked.promise);
      if (how === 'interrupt') await kernel.interrupt();
      if (how === 'abort') abort.abort();
      const { status, stdout } = await within('the cell', cell);
      assert.deepEqual([status, stdout], [how === 'timed-out' ? how : 'interrupted', 'before\n']);
      assert.ok(signal.aborted);
      assert.equal((await ok(kernel, '1 + 1')).text, '2');
      assert.equal(kernel.generation, 1);
    }
  });

  test(`C117: a kernel that is killed while it waits for a line aborts the handler's signal (${shell})`, async (t) => {
    const asked = Promise.withResolvers<AbortSignal>();
    const kernel = kernelOf(t, shell, {
      onInput: (_, { signal }) => {
        asked.resolve(signal);
        return new Promise(() => {});
      },
    });
    const cell = kernel.execute('input()');
    cell.catch(() => {});
    const signal = await within('the question', asked.promise);
    await kernel.kill();
    await assert.rejects(cell, { code: 'ERR_KERNEL_DIED' });
    assert.ok(signal.aborted);
  });

  test(`what a handler throws, and what is no string, Python raises (${shell})`, async (t) => {
    const answers = [() => Promise.reject(new Error('nobody is here')), () => 5 as unknown as string];
    const kernel = kernelOf(t, shell, { onInput: () => (answers.shift() ?? (() => 'x'))() });
    assert.equal((await kernel.execute('input()')).error?.value, 'nobody is here');
    assert.match((await kernel.execute('input()')).error?.value ?? '', /number where a string is due/);
    assert.equal((await ok(kernel, 'input()')).text, "'x'");
  });
}

test('C118: children of a cell have an empty standard input, with a handler too', async (t) => {
  const kernel = kernelOf(t, 'plain', { onInput: () => 'for the kernel' });
  const code = `
import subprocess, sys, os
print(subprocess.run(["cat"], capture_output=True, timeout=10).stdout)
print(subprocess.run("read x; echo got $?", shell=True, capture_output=True, timeout=10).stdout)
print(subprocess.run([sys.executable, "-c", "input()"], capture_output=True, timeout=10).stderr[-40:])
pid = os.fork()
if pid == 0:
    try: input()
    except EOFError: os._exit(9)
    os._exit(1)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), input()
`;
  const { stdout, text } = await ok(kernel, code);
  assert.match(stdout, /^b''\nb'got 1\\n'\nb'.*EOFError: EOF when reading a line\\n'\n$/);
  assert.equal(text, "(9, 'for the kernel')");
});
