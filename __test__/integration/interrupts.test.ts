/** Interrupts, aborts and time limits: they stop the cell they are meant for, and nothing else. */

import assert from 'node:assert/strict';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import type { CellResult, Kernel, KernelOptions } from 'kernelhost';
import { begin, type Shell, shells } from '../fixtures/cells.ts';
import { ok } from '../fixtures/forkserver-look.ts';
import {
  isAlive,
  next,
  processStat,
  startHost,
  type TestContext,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

function kernelOf(t: TestContext, shell: Shell, options: KernelOptions = {}): Kernel {
  return startHost(t, { shell }).kernel(options);
}

/** Waits until the kernel waits: what the cell does after its "ready" has begun. */
async function asleep(kernel: Kernel): Promise<void> {
  await until('the kernel sleeps', () => processStat(kernel.pid ?? 0)?.state === 'S');
}

for (const shell of shells) {
  test(`an interrupt cancels a top-level await, and its clean-up runs (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = [
      'import asyncio',
      'seen = []',
      'async def work():',
      '    try:',
      '        print("ready", flush=True)',
      '        await asyncio.sleep(600)',
      '    except BaseException as error:',
      '        seen.append(type(error).__name__)',
      '        raise',
      '    finally:',
      '        seen.append("finally")',
      'await work()',
    ].join('\n');
    const { result } = await begin(kernel, code);
    await asleep(kernel);
    await kernel.interrupt();
    assert.deepEqual([(await result).status, (await result).error?.name], ['interrupted', 'KeyboardInterrupt']);
    assert.equal((await ok(kernel, 'seen')).text, "['CancelledError', 'finally']");
    assert.equal((await ok(kernel, 'await asyncio.sleep(0, 7)')).text, '7');
  });

  test(`an interrupt in a loop of awaits or in a callback of the event loop stops the cell (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import asyncio, time');
    for (const code of [
      'print("ready", flush=True)\nwhile True: await asyncio.sleep(0)',
      'print("ready", flush=True)\nwhile True: await asyncio.sleep(0.001)',
      'async def busy():\n    print("ready", flush=True)\n    while True: pass\nawait busy()',
      'print("ready", flush=True)\nawait asyncio.gather(*(asyncio.sleep(600) for _ in range(10)))',
    ]) {
      const { result } = await begin(kernel, code);
      await within(code, kernel.interrupt(), 3_000);
      assert.equal((await result).status, 'interrupted', code);
      assert.equal((await ok(kernel, 'await asyncio.sleep(0, 7)')).text, '7');
    }
  });

  test(`an interrupt of a running subprocess also ends the subprocess (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const file = join(temporaryFolder(t), 'pid');
    const code = [
      'import subprocess',
      `subprocess.run(["sh", "-c", "echo $$ > ${file}; echo ready; exec sleep 600"])`,
    ].join('\n');
    const { result } = await begin(kernel, code);
    const child = Number(readFileSync(file, 'utf8'));
    assert.ok(isAlive(child));
    await kernel.interrupt();
    assert.deepEqual([(await result).status, (await result).error?.name], ['interrupted', 'KeyboardInterrupt']);
    // Python may leave the zombie for its next subprocess to reap.
    await until('the subprocess has ended', () => !isAlive(child));
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
  });

  test(`an interrupt between cells does nothing, by the host or from outside (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'x = 1');
    for (let round = 0; round < 20; round++) {
      await kernel.interrupt();
      process.kill(kernel.pid ?? 0, 'SIGINT');
      const result = await ok(kernel, 'x += 1; x');
      assert.equal(result.text, String(round + 2));
    }
    assert.equal(kernel.generation, 1);
  });

  test(`200 rapid interrupts of one cell never reach the next one (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import time');
    for (let round = 0; round < 5; round++) {
      const { result } = await begin(kernel, 'print("ready", flush=True)\ntime.sleep(600)');
      const interrupts = Array.from({ length: 200 }, () => kernel.interrupt());
      const following = Array.from({ length: 5 }, (_, index) => kernel.execute(`sum(range(20000)); ${index}`));
      assert.equal((await result).status, 'interrupted');
      await Promise.all(interrupts);
      assert.deepEqual(
        (await Promise.all(following)).map(({ status, text }) => `${status} ${text}`),
        [0, 1, 2, 3, 4].map((index) => `ok ${index}`),
      );
    }
    assert.equal(kernel.generation, 1);
  });

  test(`an interrupt that comes as its cell ends hits that cell or nothing, at any time (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import time');
    let interrupted = 0;
    for (let round = 0; round < 120; round++) {
      const cell = kernel.execute(`time.sleep(0.002)\n${round}`);
      const following = kernel.execute(`sum(range(3000)); ${round}`);
      await new Promise((resolve) => setTimeout(resolve, round % 5));
      await kernel.interrupt();
      const [first, second] = await Promise.all([cell, following]);
      if (first.status === 'interrupted') {
        interrupted += 1;
        // The interrupt was for the cell that ran when it was asked for.
        assert.deepEqual([second.status, second.text], ['ok', String(round)], `round ${round}`);
      } else {
        assert.deepEqual([first.status, first.text], ['ok', String(round)], `round ${round}`);
      }
      assert.equal((await ok(kernel, `${round}`)).text, String(round));
    }
    assert.ok(interrupted > 0, 'some came in time');
    assert.equal(kernel.generation, 1);
  });

  test(`an abort that comes as its cell ends never reaches the cell behind it (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import time');
    let interrupted = 0;
    for (let round = 0; round < 150; round++) {
      const controller = new AbortController();
      const cell = kernel.execute(`time.sleep(0.001)\n${round}`, { signal: controller.signal });
      const following = kernel.execute(`sum(range(3000)); ${round}`);
      // From well before its end to well after it, in steps that no timer has.
      const at = performance.now() + (round % 30) / 10;
      while (performance.now() < at) await new Promise(setImmediate);
      controller.abort();
      const [first, second] = await Promise.allSettled([cell, following]);
      if (first.status === 'rejected' || first.value.status === 'interrupted') interrupted += 1;
      assert.ok(second.status === 'fulfilled');
      assert.deepEqual([second.value.status, second.value.text], ['ok', String(round)], `round ${round}`);
    }
    assert.ok(interrupted > 0 && interrupted < 150, `${interrupted} of 150 came in time`);
    assert.equal(kernel.generation, 1);
  });

  test(`a time limit gives "timed-out" with the output so far, and the life goes on (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'kept = 1');
    const began = performance.now();
    const result = await kernel.execute('import time\nprint("before")\ntime.sleep(600)', { timeoutMs: 300 });
    assert.ok(performance.now() - began < 1_300);
    assert.deepEqual([result.status, result.stdout], ['timed-out', 'before\n']);
    assert.ok(result.durationMs >= 290);
    assert.equal((await ok(kernel, 'kept')).text, '1');
    const awaited = await kernel.execute('import asyncio\nprint("before")\nawait asyncio.sleep(600)', {
      timeoutMs: 300,
    });
    assert.deepEqual([awaited.status, awaited.stdout], ['timed-out', 'before\n']);
    assert.equal((await ok(kernel, 'kept')).text, '1');
  });

  test(`stuck "wait": the call settles, the next one waits for the cell or is told ERR_KERNEL_BUSY (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell, { stuck: 'wait', interruptGraceMs: 100 });
    await ok(kernel, 'kept = 42');
    const deaf = [
      'import time',
      'print("begun", flush=True)',
      'end = time.monotonic() + 2.5',
      'while time.monotonic() < end:',
      '    try:',
      '        while time.monotonic() < end: time.sleep(0.01)',
      '    except KeyboardInterrupt: pass',
      'late = "done"',
    ].join('\n');
    const result = await kernel.execute(deaf, { timeoutMs: 200 });
    assert.deepEqual([result.status, result.stdout], ['timed-out', 'begun\n']);
    await assert.rejects(kernel.execute('kept', { timeoutMs: 200 }), { code: 'ERR_KERNEL_BUSY' });
    const patient = await ok(kernel, 'kept, late');
    assert.equal(patient.text, "(42, 'done')");
    assert.equal(kernel.generation, 1);
  });

  test(`stuck "end": a cell that will not stop ends the life, and says that it was the time limit (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell, { interruptGraceMs: 150 });
    await ok(kernel, 'kept = 42');
    const deaf = [
      'said = False',
      'while True:',
      '    try:',
      '        if not said:',
      '            said = True',
      '            print("ready", flush=True)',
      '        while True: pass',
      '    except KeyboardInterrupt: print("no", flush=True)',
    ].join('\n');
    await assert.rejects(kernel.execute(deaf, { timeoutMs: 300 }), (error: unknown) => {
      const { code, exit, partial } = error as {
        code: string;
        exit: { cause: string; cell: { code: string } };
        partial: CellResult;
      };
      assert.deepEqual([code, exit.cause, exit.cell.code], ['ERR_KERNEL_DIED', 'timeout', deaf]);
      assert.equal(partial.stdout, 'ready\nno\nno\n', 'it was asked twice');
      return true;
    });
    const result = await kernel.execute('1 + 1');
    assert.deepEqual([result.text, result.recovered?.exit.cause, result.life.generation], ['2', 'timeout', 2]);

    const { result: second } = await begin(kernel, deaf);
    const exit = next(kernel, 'exit');
    // Waits for what comes of it, whatever that is.
    const interrupt = kernel.interrupt().then(
      () => 'done',
      (error: { code: string }) => error.code,
    );
    await assert.rejects(second, { code: 'ERR_KERNEL_DIED' });
    const [reason] = (await exit) as [{ cause: string }];
    assert.equal(reason.cause, 'kill');
    assert.match(await interrupt, /done|ERR_KERNEL_DIED/);
    assert.equal((await kernel.execute('1 + 1')).text, '2');
  });

  test(`a cell that hears nothing because C code holds the GIL has its life ended in time (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell, { interruptGraceMs: 150 });
    await ok(kernel, 'kept = 42');
    // Signals are blocked in the thread, so that nothing cuts the C call short and no Python handler ever runs.
    const deaf = [
      'import ctypes, signal',
      'signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})',
      'print("ready", flush=True)',
      'ctypes.PyDLL(None).sleep(600)',
    ].join('\n');
    const { result } = await begin(kernel, deaf, { timeoutMs: 400 });
    await assert.rejects(within('the end', result, 3_000), { code: 'ERR_KERNEL_DIED' });
    assert.equal(kernel.lastExit?.cause, 'timeout');
    assert.equal((await kernel.execute('1 + 1')).text, '2');
  });

  test(`an abort before the cell has begun means that it never runs (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const marker = join(temporaryFolder(t), 'ran');
    const touch = `open(${JSON.stringify(marker)}, "w").close()`;
    const reason = new Error('not any more');
    // Before the call.
    await assert.rejects(kernel.execute(touch, { signal: AbortSignal.abort(reason) }), (error) => error === reason);
    assert.equal(kernel.state, 'absent', 'nothing was started for it');
    // While its life starts.
    const starting = new AbortController();
    const early = kernel.execute(touch, { signal: starting.signal });
    starting.abort(reason);
    await assert.rejects(early, (error) => error === reason);
    // While another cell runs.
    const { result } = await begin(kernel, 'import time; print("ready", flush=True); time.sleep(0.3)');
    const waiting = new AbortController();
    const queued = kernel.execute(touch, { signal: waiting.signal });
    const after = kernel.execute('1 + 1');
    waiting.abort(reason);
    await assert.rejects(queued, (error) => error === reason);
    assert.equal((await result).status, 'ok', 'the cell that runs is not the one that was aborted');
    assert.equal((await after).text, '2');
    assert.ok(!existsSync(marker));
  });

  test(`an abort of the running cell gives "interrupted" with the output so far (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const controller = new AbortController();
    const { result } = await begin(kernel, 'import time\nprint("ready", flush=True)\ntime.sleep(600)', {
      signal: controller.signal,
    });
    controller.abort();
    const { status, stdout, error } = await result;
    assert.deepEqual([status, stdout, error?.name], ['interrupted', 'ready\n', 'KeyboardInterrupt']);
    // Too late: over is over.
    controller.abort();
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
    assert.equal(kernel.generation, 1);
  });
}

test('a cell that catches its interrupt and goes on ends as any other', async (t) => {
  const kernel = startHost(t).kernel();
  const code =
    'import time\ntry:\n    print("ready", flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print("caught")\n"result"';
  const { result } = await begin(kernel, code);
  await kernel.interrupt();
  const { status, stdout, text, error } = await result;
  assert.deepEqual([status, stdout, text, error], ['ok', 'ready\ncaught\n', "'result'", null]);
});

test('an interrupt of a kernel that is absent, starting or closed ends quietly or with its typed error', async (t) => {
  const host = startHost(t);
  const kernel = host.kernel();
  await kernel.interrupt();
  assert.equal(kernel.state, 'absent');
  const start = kernel.start();
  await within('the interrupt of a start', kernel.interrupt(), 10_000);
  await start;
  assert.equal((await kernel.execute('1 + 1')).text, '2');
  await kernel.close();
  await kernel.interrupt().then(
    () => {},
    (error: { code: string }) => assert.equal(error.code, 'ERR_KERNEL_CLOSED'),
  );
});

test('an interrupt goes to one kernel and to no other', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const kernels = Array.from({ length: 4 }, () => host.kernel());
  const cells = await Promise.all(
    kernels.map((kernel) => begin(kernel, 'import time\nprint("ready", flush=True)\ntime.sleep(0.8)\n1')),
  );
  await kernels[0]?.interrupt();
  assert.deepEqual(
    (await Promise.all(cells.map(({ result }) => result))).map(({ status }) => status),
    ['interrupted', 'ok', 'ok', 'ok'],
  );
});
