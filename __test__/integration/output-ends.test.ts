/** Output at the edges of a cell and of a life: what was written is there, once, whatever came next. */

import assert from 'node:assert/strict';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { type Kernel, KernelDiedError, type Output } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, type TestContext, temporaryFolder, until, within } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);

function kernelOf(t: TestContext, shell: (typeof shells)[number]): Kernel {
  return startHost(t, { shell }).kernel();
}

function textOf(outputs: readonly Output[]): string {
  return outputs.map((output) => (output.kind === 'text' ? output.text : '')).join('');
}

async function death(what: string, call: Promise<unknown>): Promise<KernelDiedError> {
  try {
    await within(what, call);
  } catch (error) {
    assert.ok(error instanceof KernelDiedError, `${what}: ${String(error)}`);
    return error;
  }
  throw new Error(`${what}: the kernel lives`);
}

for (const shell of shells) {
  test(`what a cell has written before its life ends is all there, to its last byte (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const ends = {
      'SIGKILL to itself': 'os.kill(os.getpid(), 9)',
      abort: 'os.abort()',
      'a null pointer': 'import ctypes; ctypes.string_at(0)',
      'os._exit': 'os._exit(3)',
      'exit()': 'exit(3)',
      'a child that kills it': 'import subprocess; subprocess.run(["sh", "-c", "echo child; kill -9 $PPID"])',
    };
    // More than a pipe holds.
    const written = Array.from({ length: 20_000 }, (_, i) => `line ${i}\n`).join('');
    for (const [how, code] of Object.entries(ends)) {
      for (const listens of [false, true]) {
        const seen: Output[] = [];
        const cell = `import os\nfor i in range(20_000): print("line", i)\nos.write(1, b"end")\n${code}`;
        const options = listens ? { onOutput: (output: Output) => void seen.push(output) } : {};
        const { partial } = await death(how, kernel.execute(cell, options));
        const expected = `${written}end${how.startsWith('a child') ? 'child\n' : ''}`;
        assert.equal(partial?.stdout, expected, how);
        if (listens)
          assert.equal(textOf(seen.filter((each) => each.kind === 'text' && each.stream === 'stdout')), expected, how);
      }
    }
  });

  test(`C61: output so far is in the result of a cell that ran out of time, and with a killed kernel's error (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = 'import time\nfor i in range(3): print("line", i)\ntime.sleep(600)';
    const late = await within('the time limit', kernel.execute(code, { timeoutMs: 1500 }));
    assert.deepEqual([late.status, late.stdout], ['timed-out', 'line 0\nline 1\nline 2\n']);
    const seen: Output[] = [];
    const call = kernel.execute(code, { onOutput: (output) => void seen.push(output) });
    const died = death('the kill', call);
    await until('three lines', () => textOf(seen) === 'line 0\nline 1\nline 2\n');
    await kernel.kill();
    assert.equal((await died).partial?.stdout, 'line 0\nline 1\nline 2\n');
  });

  test(`C59: what a thread and a task go on printing is neither lost nor told twice, whichever cell runs (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const all: Output[] = [];
    const take = (output: Output) => void all.push(output);
    kernel.on('output', take);
    const code = [
      'import asyncio, threading, time',
      'def work():',
      '    for i in range(200):',
      '        print(f"thread {i}", flush=True)',
      '        time.sleep(0.005)',
      'thread = threading.Thread(target=work)',
      'thread.start()',
      'async def tick():',
      '    for i in range(100):',
      '        print(f"task {i}", flush=True)',
      '        await asyncio.sleep(0.01)',
      'task = asyncio.create_task(tick())',
    ].join('\n');
    await kernel.execute(code, { onOutput: take });
    while (!/thread 150\n/.test(textOf(all))) {
      await kernel.execute('await asyncio.sleep(0.02)', { onOutput: take });
      const before = all.length;
      await until('something between cells', () => all.length > before);
    }
    await kernel.execute('thread.join(); await task', { onOutput: take });
    const lines = textOf(all).split('\n');
    for (const [name, count] of [
      ['thread', 200],
      ['task', 100],
    ] as const) {
      assert.deepEqual(
        lines.filter((line) => line.startsWith(name)),
        Array.from({ length: count }, (_, i) => `${name} ${i}`),
      );
    }
  });

  test(`outputs are delivered while the cell runs: it waits for an answer to each (${shell})`, async (t) => {
    const folder = temporaryFolder(t);
    const kernel = kernelOf(t, shell);
    const code = [
      'import os, time',
      'for i in range(20):',
      '    print(i, flush=True)',
      `    while not os.path.exists(${JSON.stringify(folder)} + f"/{name} {i}"): time.sleep(0.001)`,
    ].join('\n');
    const answer = (name: string, output: Output) => {
      if (output.kind === 'text') writeFileSync(join(folder, `${name} ${output.text.trim()}`), '');
    };
    const listened = kernel.execute(`name = "listener"\n${code}`, { onOutput: (output) => answer('listener', output) });
    assert.equal((await within('the listener', listened)).status, 'ok');
    const stream = kernel.stream(`name = "stream"\n${code}`);
    const loop = (async () => {
      for await (const output of stream) answer('stream', output);
    })();
    await within('the stream', loop);
    assert.equal((await stream.result).status, 'ok');
  });
}

test('C136: the first output of each of 100 lives arrives', async (t) => {
  const kernel = startHost(t).kernel();
  for (let life = 1; life <= 100; life++) {
    const seen: Output[] = [];
    const result = await kernel.execute(`print("first of", ${life})`, { onOutput: (output) => void seen.push(output) });
    assert.deepEqual([result.stdout, textOf(seen)], [`first of ${life}\n`, `first of ${life}\n`]);
    assert.equal(kernel.generation, life);
    await kernel.kill();
  }
});

test('C140: what each of 300 forks prints first arrives, from its init code on', async (t) => {
  const host = startHost(t);
  const one = async (index: number) => {
    const kernel = host.kernel({ init: 'import threading' });
    const outputs: Output[] = [];
    kernel.on('output', (output) => outputs.push(output));
    const { stdout } = await kernel.execute('print("first")');
    assert.equal(stdout, 'first\n', String(index));
    await kernel.close();
    assert.deepEqual(outputs, [], String(index));
  };
  for (let round = 0; round < 30; round++) {
    await Promise.all(Array.from({ length: 10 }, (_, index) => one(round * 10 + index)));
  }
});

test('C56: configuration of the user’s does not change where output goes', async (t) => {
  const home = temporaryFolder(t);
  for (const profile of [
    '.ipython/profile_default',
    '.ipython/profile_default/startup',
    '.config/ipython',
    '.jupyter',
  ]) {
    mkdirSync(join(home, profile), { recursive: true });
  }
  // What is printed while a life starts is not seen as output, so a file tells whether anything of it was run.
  const mark = join(home, 'was-read');
  const tell = `print("read")\nopen(${JSON.stringify(mark)}, "w").close()\n`;
  const config = `c = get_config()\nc.IPKernelApp.quiet = False\nc.IPKernelApp.capture_fd_output = True\n${tell}`;
  for (const file of [
    '.ipython/profile_default/ipython_config.py',
    '.ipython/profile_default/ipython_kernel_config.py',
    '.jupyter/jupyter_config.py',
  ]) {
    writeFileSync(join(home, file), config);
  }
  writeFileSync(join(home, '.ipython/profile_default/startup/00-print.py'), tell);
  for (const launch of ['fork', 'spawn'] as const) {
    const env = { HOME: home, IPYTHONDIR: undefined, JUPYTER_CONFIG_DIR: undefined };
    const kernel = startHost(t, { launch }).kernel({ env, inheritEnv: 'all' });
    const result = await ok(kernel, 'import os\nos.write(1, b"once\\n"); print("twice")');
    assert.deepEqual([result.stdout, result.stderr], ['once\ntwice\n', '']);
    assert.ok(!existsSync(mark), launch);
  }
});
