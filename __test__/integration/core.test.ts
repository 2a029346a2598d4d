// What every supported Python must do, in each of the four ways a kernel can be had. Runs on all versions.

import assert from 'node:assert/strict';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import type { ExitReason, Kernel, KernelDiedError } from 'kernelhost';
import {
  isAlive,
  next,
  plainPythonForTests,
  pythonForTests,
  startHost,
  temporaryFolder,
  until,
} from '../helpers/index.ts';

const ways = (['fork', 'spawn'] as const).flatMap((launch) =>
  (['ipython', 'plain'] as const).map((shell) => ({ launch, shell })),
);

/** One test per way of having a kernel. */
function eachWay(title: string, body: (kernel: Kernel, folder: string) => Promise<void>): void {
  for (const { launch, shell } of ways) {
    test(`${title} (${launch}, ${shell})`, async (t) => {
      const python = shell === 'plain' ? plainPythonForTests() : pythonForTests();
      const folder = temporaryFolder(t);
      const host = startHost(t, { python, launch, shell, defaults: { cwd: folder } });
      const kernel = host.kernel();
      const life = await kernel.start();
      assert.deepEqual([life.launch, life.shell, life.generation], [launch, shell, 1]);
      await body(kernel, folder);
    });
  }
}

async function value(kernel: Kernel, code: string): Promise<string | null> {
  const result = await kernel.execute(code);
  assert.equal(result.status, 'ok', result.error?.traceback.join('\n'));
  return result.text;
}

eachWay('a cell has a value, output in order, and variables that stay', async (kernel) => {
  const first = await kernel.execute('import sys\nx = 20\nprint("out")\nprint("err", file=sys.stderr)\nx + 1');
  assert.deepEqual([first.status, first.text, first.stdout, first.stderr], ['ok', '21', 'out\n', 'err\n']);
  assert.equal(first.executionCount, 1);
  const second = await kernel.execute('x * 2');
  assert.deepEqual([second.text, second.executionCount, second.recovered], ['40', 2, null]);
});

eachWay('a cell that raises is an error with the lines of the cell, and the kernel lives', async (kernel) => {
  const failed = await kernel.execute('def f():\n    return 1 / 0\nf()');
  assert.equal(failed.status, 'error');
  assert.equal(failed.error?.name, 'ZeroDivisionError');
  assert.match(failed.error?.traceback.join('\n') ?? '', /return 1 \/ 0/);
  assert.doesNotMatch(failed.error?.traceback.join('\n') ?? '', /kernelhost/);
  const syntax = await kernel.execute('1 +');
  assert.deepEqual([syntax.status, syntax.error?.name], ['error', 'SyntaxError']);
  const left = await kernel.execute('import sys\nsys.exit(3)');
  assert.deepEqual([left.status, left.error?.name, left.error?.value], ['error', 'SystemExit', '3']);
  assert.equal(await value(kernel, '1 + 1'), '2');
  assert.equal(kernel.generation, 1);
});

eachWay('top-level await works, tasks go on between cells, and asyncio.run() still works', async (kernel) => {
  assert.equal(await value(kernel, 'import asyncio\nawait asyncio.sleep(0.01, "slept")'), "'slept'");
  await value(kernel, 'done = []\nasync def work():\n    await asyncio.sleep(0.05)\n    done.append(1)');
  await value(kernel, 'task = asyncio.create_task(work())');
  await until('the task ran while no cell did', async () => (await value(kernel, 'len(done)')) === '1');
  assert.equal(await value(kernel, 'async def two():\n    return 2\nasyncio.run(two())'), '2');
  assert.equal(await value(kernel, 'await asyncio.gather(two(), two())'), '[2, 2]');
});

for (const [what, code] of Object.entries({
  'a loop': 'started()\nwhile True: pass',
  'a sleep': 'import time\nstarted()\ntime.sleep(600)',
  'an await': 'import asyncio\nstarted()\nawait asyncio.sleep(600)',
  'a child': 'import subprocess\nstarted()\nsubprocess.run(["sleep", "600"])',
})) {
  eachWay(`${what} is interrupted at once, with its output, and the variables stay`, async (kernel) => {
    await value(kernel, 'def started():\n    print("started", flush=True)\nx = 7');
    const running = kernel.execute(code, { onOutput: () => void kernel.interrupt() });
    const result = await running;
    assert.deepEqual(
      [result.status, result.error?.name, result.stdout],
      ['interrupted', 'KeyboardInterrupt', 'started\n'],
    );
    assert.equal(await value(kernel, 'x'), '7');
    assert.equal(kernel.generation, 1);
  });
}

eachWay('a time limit gives what there is so far', async (kernel) => {
  const result = await kernel.execute('print("before")\nwhile True: pass', { timeoutMs: 200 });
  assert.deepEqual([result.status, result.stdout], ['timed-out', 'before\n']);
  assert.equal(await value(kernel, '1'), '1');
});

eachWay('a kill is told, its child is gone, and the cell is not run again', async (kernel, folder) => {
  const log = join(folder, 'log');
  const died = kernel.execute(
    `import subprocess\nopen(${JSON.stringify(log)}, "a").write("ran\\n")\nchild = subprocess.Popen(["sleep", "600"])\nprint(child.pid, flush=True)\nchild.wait()`,
    { onOutput: () => void process.kill(kernel.pid as number, 'SIGKILL') },
  );
  const exited = next(kernel, 'exit');
  const error = await died.then(
    () => assert.fail('the cell completed'),
    (error: KernelDiedError) => error,
  );
  assert.equal(error.code, 'ERR_KERNEL_DIED');
  assert.deepEqual(error.exit.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
  assert.equal(error.exit.cause, 'external-signal');
  assert.deepEqual((await exited)[0], error.exit);
  const child = Number(error.partial?.stdout);
  assert.ok(child > 1);
  assert.equal(isAlive(child), false);
  const after = await kernel.execute('1 + 1');
  assert.deepEqual([after.text, after.life.generation, after.recovered?.lostCells], ['2', 2, 1]);
  assert.deepEqual(after.recovered?.exit, error.exit);
  assert.equal(readFileSync(log, 'utf8'), 'ran\n');
});

eachWay('a crash carries the Python stack of the cell', async (kernel) => {
  const error = await kernel.execute('import ctypes\nctypes.memset(1, 0, 1)').then(
    () => assert.fail('the cell completed'),
    (error: KernelDiedError) => error,
  );
  assert.equal(error.exit.status.kind === 'signaled' && error.exit.status.signal, 'SIGSEGV');
  assert.equal(error.exit.cause, 'crash');
  assert.match(error.exit.crashTraceback ?? '', /^Fatal Python error: Segmentation fault[\s\S]*line 2 in <module>/);
});

eachWay('exit() ends the life with its code, after atexit', async (kernel) => {
  await value(kernel, 'import atexit, os\natexit.register(lambda: os.write(2, b"last words"))');
  await assert.rejects(kernel.execute('exit(5)\nprint("not reached")'), (error: KernelDiedError) => {
    assert.deepEqual(error.exit.status, { kind: 'exited', code: 5 });
    assert.equal(error.exit.cause, 'exit-call');
    assert.match(error.exit.stderrTail, /last words/);
    assert.equal(error.partial?.stdout, '');
    return true;
  });
  assert.equal(await value(kernel, '1'), '1');
});

eachWay('a cell sees what a Python started in its folder sees', async (kernel, folder) => {
  writeFileSync(join(folder, 'beside.py'), 'def double(x):\n    return 2 * x\n');
  const seen = await value(
    kernel,
    'import os, sys\n[os.getcwd(), sys.argv, sys.path[0], __name__, hasattr(sys.modules["__main__"], "__file__"), os.getpid() == os.getsid(0) == os.getpgrp()]',
  );
  assert.equal(seen, `['${folder}', [''], '', '__main__', False, True]`);
  await value(kernel, 'import multiprocessing, beside\ncontext = multiprocessing.get_context("spawn")');
  assert.equal(await value(kernel, 'with context.Pool(1) as pool: r = pool.map(beside.double, [1, 2])\nr'), '[2, 4]');
});

eachWay('what os.fork() leaves behind in a cell does not answer', async (kernel) => {
  const result = await kernel.execute('import os\npid = os.fork()\npid > 0');
  assert.deepEqual([result.status, result.text], ['ok', 'True']);
  assert.equal(await value(kernel, 'os.waitpid(pid, 0)[1]'), '0');
  assert.equal(await value(kernel, '3'), '3');
});

eachWay('between cells SIGINT does nothing, and SIGTERM ends the kernel', async (kernel) => {
  await value(kernel, '1');
  process.kill(kernel.pid as number, 'SIGINT');
  assert.equal(await value(kernel, '2'), '2');
  const exited = next(kernel, 'exit');
  process.kill(kernel.pid as number, 'SIGTERM');
  const exit = (await exited)[0] as ExitReason;
  assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGTERM');
  assert.deepEqual([exit.cause, exit.cell], ['external-signal', null]);
});

eachWay(
  'a copy has what its original has, where there is a template; a snapshot has it everywhere',
  async (kernel, folder) => {
    await kernel.execute('import asyncio\nx = [1]\nawait asyncio.sleep(0)');
    const path = join(folder, 'state');
    assert.ok((await kernel.save(path)).saved.includes('x'));
    if ((await kernel.start()).launch === 'fork') {
      const checkpoint = await kernel.checkpoint();
      const copy = await kernel.fork();
      assert.equal(await value(copy, 'x.append(2)\nawait asyncio.sleep(0.001)\nx'), '[1, 2]');
      await kernel.execute('x = "overwritten"');
      await kernel.rollback(checkpoint);
      assert.equal(await value(kernel, 'await asyncio.sleep(0.001)\nx'), '[1]');
    } else {
      await assert.rejects(kernel.fork(), { code: 'ERR_COPY_REFUSED' });
    }
    await kernel.restart();
    await kernel.load(path);
    assert.equal(await value(kernel, 'x'), '[1]');
  },
);
