/** What has gone wrong for others when cells were interrupted: one test per case. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { begin, companions, shells } from '../fixtures/cells.ts';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, temporaryFolder, until, within } from '../helpers/index.ts';

for (const shell of shells) {
  test(`C38: a shell's pipeline and its background job end with their interrupted cell (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    await ok(kernel, 'import os, subprocess; kept = 42');
    const line = 'yes > /dev/null & echo ready; yes | tr y n > /dev/null';
    for (const code of [
      `os.system("${line}")`,
      `subprocess.run("${line}", shell=True)`,
      `p = subprocess.Popen("${line}", shell=True)\np.wait()`,
      ...(shell === 'ipython' ? [`%%bash\n${line}`, `!${line}`] : []),
    ]) {
      const { result } = await begin(kernel, code);
      await within(code, kernel.interrupt());
      assert.equal((await result).status, 'interrupted', code);
      const { text, life } = await within('the next cell', kernel.execute('kept'));
      assert.deepEqual([text, life.generation], ['42', 1], code);
      await until(`nothing is left of ${code}`, () => companions(kernel).length === 0);
    }
  });

  test(`C40: what a cell awaits, and the tasks it has made, end with its interrupt (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    const late = 'async def late():\n    await asyncio.sleep(0.8)\n    print("stray")\n';
    const block = 'async def block(n):\n    time.sleep(1)\n    print("stray", n)\n    await asyncio.sleep(30)\n';
    await ok(kernel, `import asyncio, time\n${block}${late}`);
    const stray: string[] = [];
    kernel.on('output', (output) => {
      if (output.kind === 'text') stray.push(output.text);
    });
    for (const code of [
      'print("ready", flush=True)\nawait asyncio.sleep(30)',
      'print("ready", flush=True)\nawait asyncio.gather(*(block(n) for n in range(10)))',
      // Nobody awaits this one, so nothing but its cell's end cancels it.
      'task = asyncio.create_task(late())\nprint("ready", flush=True)\nawait asyncio.sleep(30)',
    ]) {
      const { result } = await begin(kernel, code);
      await within(code, kernel.interrupt());
      assert.equal((await result).status, 'interrupted', code);
      // Time enough for a task that goes on to print.
      const later = await ok(kernel, 'await asyncio.sleep(1.2)\nlen([t for t in asyncio.all_tasks() if not t.done()])');
      assert.deepEqual([later.text, later.stdout], ['1', ''], code);
    }
    assert.deepEqual(stray, []);
  });

  test(`C41: an interrupt stops the running cell, and the fifteen behind it run (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    const { result } = await begin(kernel, 'import time\nprint("ready", flush=True)\ntime.sleep(60)');
    const queued = Array.from({ length: 15 }, (_, index) => kernel.execute(String(index)));
    await within('the interrupt', kernel.interrupt());
    assert.equal((await result).status, 'interrupted');
    assert.deepEqual(
      (await Promise.all(queued)).map(({ status, text }) => `${status} ${text}`),
      queued.map((_, index) => `ok ${index}`),
    );
    assert.equal(kernel.state, 'idle');
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
  });

  test(`C43: a command that waits for an editor is ended by its time limit, with nothing left (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel({ cwd: temporaryFolder(t) });
    const git = 'GIT_EDITOR="echo ready; sleep 999 #" git -c user.name=a -c user.email=a@b';
    await ok(
      kernel,
      `import subprocess\nfor command in ("git init -q", '${git} commit -q --allow-empty -m one'): subprocess.run(command, shell=True, check=True)`,
    );
    for (const code of [
      `subprocess.run('${git} commit --amend --allow-empty', shell=True)`,
      ...(shell === 'ipython'
        ? [`!${git} commit --amend --allow-empty`, `%%bash\n${git} commit --amend --allow-empty`]
        : []),
    ]) {
      const result = await within(code, kernel.execute(code, { timeoutMs: 1_500 }));
      assert.equal(result.status, 'timed-out', code);
      assert.match(result.stdout, /ready/, code);
      assert.equal((await within(code, kernel.execute('1 + 1'))).text, '2');
      await until('nothing is left', () => companions(kernel).length === 0);
    }
    assert.equal(kernel.generation, 1);
  });

  test(`C45: a cell that catches its interrupts gets each of them, and then a kill (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel({ interruptGraceMs: 60_000 });
    const code = [
      'import time',
      'caught = 0',
      'while True:',
      '    try:',
      '        print("ready", caught, flush=True)',
      '        time.sleep(600)',
      '    except KeyboardInterrupt: caught += 1',
    ].join('\n');
    let printed = '';
    const result = kernel.execute(code, {
      onOutput: (output) => {
        if (output.kind === 'text') printed += output.text;
      },
    });
    result.catch(() => {});
    const interrupts: Promise<void>[] = [];
    for (let count = 0; count < 3; count++) {
      await until(`${count} were caught`, () => printed.includes(`ready ${count}`));
      interrupts.push(kernel.interrupt().catch(() => {}));
    }
    await until('three were caught', () => printed.includes('ready 3'));
    await kernel.kill();
    await assert.rejects(result, { code: 'ERR_KERNEL_DIED' });
    await within('the interrupts', Promise.all(interrupts));
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
  });

  test(`C46: a cell after an aborted one that goes on printing has only its own output (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel({ interruptGraceMs: 100, stuck: 'wait' });
    let background = '';
    kernel.on('output', (output) => {
      if (output.kind === 'text') background += output.text;
    });
    const controller = new AbortController();
    const code = [
      'import time',
      'end = time.monotonic() + 1',
      'said = False',
      'while time.monotonic() < end:',
      '    try:',
      '        if not said:',
      '            said = True',
      '            print("ready", flush=True)',
      '        while time.monotonic() < end:',
      '            print("A", flush=True)',
      '            time.sleep(0.01)',
      '    except KeyboardInterrupt: pass',
    ].join('\n');
    const { result } = await begin(kernel, code, { signal: controller.signal });
    controller.abort();
    const second = kernel.execute('print("B"); 7');
    assert.equal((await result).status, 'interrupted');
    const { status, stdout, text } = await within('B', second);
    assert.deepEqual([status, stdout, text], ['ok', 'B\n', '7']);
    await until('the rest of A has come as output of no cell', () => background.includes('A\n'));
    assert.doesNotMatch(background, /B/);
  });

  test(`an interrupt while a fork runs its hooks comes once they are done, and none of them is cut short (${shell})`, async (t) => {
    // Python swallows what a hook raises. A second interrupt after the grace would make up for one that is lost.
    const kernel = startHost(t, { shell }).kernel({ interruptGraceMs: 60_000 });
    const hooks = [
      'import logging, os, time',
      'slow, done = None, []',
      'def hook(which):',
      '    if which != slow: return',
      '    print("ready", flush=True)',
      '    time.sleep(0.3)',
      '    done.append(which)',
      'os.register_at_fork(before=lambda: hook("before"), after_in_parent=lambda: hook("after"))',
    ];
    await ok(kernel, hooks.join('\n'));
    for (const which of ['before', 'after']) {
      const code = [
        `slow = "${which}"`,
        'try:',
        '    pid = os.fork()',
        '    if pid == 0: os._exit(0)',
        '    time.sleep(600)',
        'finally: slow = None',
      ];
      const { result } = await begin(kernel, code.join('\n'));
      await within(which, kernel.interrupt());
      const { status, error, stderr } = await result;
      assert.deepEqual([status, error?.name, stderr], ['interrupted', 'KeyboardInterrupt', ''], which);
    }
    assert.equal((await ok(kernel, 'done')).text, "['before', 'after']");
    assert.equal(kernel.generation, 1);
  });

  test(`C51: a process pool that felt the interrupt never holds its kernel up (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    await ok(kernel, 'from concurrent.futures import ProcessPoolExecutor\nimport time\npool = ProcessPoolExecutor(4)');
    await ok(kernel, 'list(pool.map(abs, range(4)))');
    for (let round = 0; round < 2; round++) {
      const { result } = await begin(
        kernel,
        'futures = [pool.submit(time.sleep, 600) for _ in range(4)]\nprint("ready", flush=True)\nfutures[0].result()',
      );
      await within('the interrupt', kernel.interrupt());
      assert.equal((await result).status, 'interrupted');
      // Whether the pool has survived is Python's affair; that one can go on is ours.
      const again = await within(
        'the next use',
        kernel.execute(
          'try: print(pool.submit(abs, -1).result(5))\nexcept BaseException: pool = ProcessPoolExecutor(4); print(pool.submit(abs, -1).result())',
          { timeoutMs: 10_000 },
        ),
      );
      assert.equal(again.life.generation, 1);
      if (again.status !== 'ok') await ok(kernel, 'pool = ProcessPoolExecutor(4)');
    }
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
  });

  test(`C131: a pool whose workers cannot load a function of the cell can be interrupted, and is ended with it (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel({ maxOutputBytes: 20_000 });
    await ok(kernel, 'import multiprocessing\ndef square(x): return x * x');
    const { result } = await begin(
      kernel,
      'context = multiprocessing.get_context("spawn")\nprint("ready", flush=True)\nwith context.Pool(2) as pool: pool.map(square, [1, 2])',
      { timeoutMs: 2_000 },
    );
    const { status, stderr } = await within('the cell', result);
    assert.equal(status, 'timed-out');
    assert.ok(Buffer.byteLength(stderr) < 25_000);
    await until('no worker is left', () => companions(kernel).every((line) => !line.includes('spawn_main')));
    const forked = 'with multiprocessing.get_context("fork").Pool(2) as pool: out = pool.map(square, [1, 2])\nout';
    assert.equal((await ok(kernel, forked)).text, '[1, 4]');
    assert.equal(kernel.generation, 1);
  });

  test(`C134: a task of one cell is awaited in the next, and signals come to the main thread (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    await ok(
      kernel,
      'import asyncio, os, signal, threading\ntask = asyncio.create_task(asyncio.sleep(0.05, "made before"))',
    );
    assert.equal((await ok(kernel, 'await task')).text, "'made before'");
    assert.equal((await ok(kernel, 'threading.current_thread() is threading.main_thread()')).text, 'True');
    const seen = [
      'seen = []',
      'before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread() is threading.main_thread()))',
      't = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)); t.start(); t.join()',
      'seen',
    ].join('\n');
    assert.equal((await ok(kernel, seen)).text, '[True]');
  });

  test(`C135: whatever a cell does to the event loop, the next one runs and can be interrupted (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    await ok(kernel, 'import asyncio, warnings\nwarnings.simplefilter("ignore")\nasync def f(): return 3');
    for (const code of [
      'asyncio.run(f())',
      'await f()\nasyncio.run(f())',
      'asyncio.get_event_loop().stop()',
      'asyncio.get_running_loop().stop()\nawait asyncio.sleep(0.01)',
      'asyncio.get_event_loop().close()',
      'await f()\nasyncio.get_running_loop().close()',
      'asyncio.set_event_loop(asyncio.new_event_loop())',
      'asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())',
      ...(hasModule('nest_asyncio') ? ['import nest_asyncio\nnest_asyncio.apply()\nasyncio.run(f())'] : []),
    ]) {
      const { status } = await within(code, kernel.execute(code));
      assert.match(status, /^(ok|error)$/, code);
      assert.equal((await ok(kernel, '1 + 1')).text, '2', code);
      const { result } = await begin(kernel, 'print("ready", flush=True)\nawait asyncio.sleep(600)');
      await within(code, kernel.interrupt());
      assert.deepEqual([(await result).status, (await result).error?.name], ['interrupted', 'KeyboardInterrupt'], code);
    }
    assert.equal(kernel.generation, 1);
  });
}

test('C39: an interrupt of a command in a loop ends the loop, twenty times at random moments', {
  skip: !hasModule('IPython'),
}, async (t) => {
  const kernel = startHost(t, { shell: 'ipython' }).kernel();
  await ok(kernel, '1');
  for (let round = 0; round < 20; round++) {
    const { result } = await begin(kernel, 'print("ready", flush=True)\nwhile True:\n    !sleep 0.2');
    await new Promise((resolve) => setTimeout(resolve, Math.random() * 300));
    await within(`round ${round}`, kernel.interrupt(), 2_000);
    assert.equal((await result).status, 'interrupted');
  }
  assert.equal(kernel.generation, 1);
});
