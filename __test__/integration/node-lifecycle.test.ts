/** How a host lives with Node: the event loop, workers, listeners that throw, and children of Node's own. */

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { Worker } from 'node:worker_threads';
import { KernelHost } from 'kernelhost';
import { type NodeOptions, packageFolder, runNode, runNodeForJson } from '../fixtures/node-run.ts';
import { allProcesses, isAlive, pythonForTests, startHost, type TestContext, until } from '../helpers/index.ts';

const python = JSON.stringify(pythonForTests());

function environment(pid: number): string[] {
  try {
    return readFileSync(`/proc/${pid}/environ`, 'utf8').split('\0');
  } catch {
    return [];
  }
}

/** Runs a script that must end by itself and well. */
async function ends(t: TestContext, script: string, options: NodeOptions = {}): Promise<string> {
  const run = await runNode(t, script, options);
  assert.deepEqual([run.code, run.signal, run.stderr], [0, null, ''], script);
  return run.stdout;
}

test('C102: Node ends by itself within a second of its work, whatever was done with the host', async (t) => {
  const scripts: Record<string, string> = {
    'an import': `import 'kernelhost'; console.log(Date.now());`,
    'a host that was never started': `
      import { KernelHost } from 'kernelhost';
      const host = new KernelHost({ python: ${python} }); host.kernel(); console.log(Date.now());`,
    'a cell and a close': `
      import { KernelHost } from 'kernelhost';
      const host = new KernelHost({ python: ${python}, shell: 'plain' });
      await host.kernel().execute('1'); await host.close(); console.log(Date.now());`,
    'a close called twice, and listeners left': `
      import { KernelHost } from 'kernelhost';
      const host = new KernelHost({ python: ${python}, shell: 'plain' });
      for (const name of ['start', 'exit', 'template', 'warning']) host.on(name, () => {});
      const kernel = host.kernel();
      for (const name of ['start', 'exit', 'output', 'state', 'warning']) kernel.on(name, () => {});
      await kernel.execute('1');
      await Promise.all([host.close(), host.close()]); await host.close(); await kernel.close(); console.log(Date.now());`,
    'a kernel that failed to start': `
      import { KernelHost } from 'kernelhost';
      const host = new KernelHost({ python: '/nowhere/python' });
      await host.kernel().start().catch(() => {}); await host.close(); console.log(Date.now());`,
    'await using': `
      import { KernelHost } from 'kernelhost';
      {
        const host = new KernelHost({ python: ${python}, shell: 'plain' });
        await host.kernel().execute('1');
        await host[Symbol.asyncDispose]();
      }
      console.log(Date.now());`,
  };
  for (const [what, script] of Object.entries(scripts)) {
    const done = Number(await ends(t, script));
    assert.ok(Date.now() - done < 1_000, `${what}: ${Date.now() - done} ms`);
  }
});

test('C102: an idle host lets Node end, and its kernels end with it', async (t) => {
  const out = await ends(
    t,
    `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    host.on('exit', () => console.log('never'));
    const { pid: template } = await host.warm();
    const forked = await host.kernel().start();
    const kernel = host.kernel();
    await kernel.execute('import asyncio\\nasync def f():\\n    while True: await asyncio.sleep(0.01)\\ntask = asyncio.create_task(f())');
    console.log(JSON.stringify({ pids: [template, forked.pid, kernel.pid], at: Date.now() }));
    `,
  );
  const { pids, at } = JSON.parse(out) as { pids: number[]; at: number };
  assert.ok(Date.now() - at < 1_000);
  await until('its processes are gone', () => pids.every((pid) => !isAlive(pid)), 2_000);
});

test('C102: a pending call holds Node until it is over', async (t) => {
  const script = (call: string) => `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    const kernel = host.kernel();
    ${call}
  `;
  const cell = `'import time; time.sleep(0.5); print("over")'`;
  for (const call of [
    `kernel.execute(${cell}).then(({ stdout }) => console.log(stdout.trim()));`,
    `(async () => { for await (const output of kernel.stream(${cell})) console.log(output.text.trim()); })();`,
    `kernel.execute(${cell}, { onOutput: async (output) => { await new Promise((resolve) => setTimeout(resolve, 50).unref()); console.log(output.text.trim()); } });`,
    `kernel.start().then(() => console.log('over'));`,
    `host.warm().then(() => console.log('over'));`,
    `kernel.start().then(() => kernel.restart()).then(() => host.close()).then(() => console.log('over'));`,
  ]) {
    assert.equal(await ends(t, script(call)), 'over\n', call);
  }
});

test('C103: workers that load, start, execute and are terminated at any time leave Node and no process behind', async (t) => {
  const script = `
    import { setTimeout as sleep } from 'node:timers/promises';
    import { Worker } from 'node:worker_threads';
    const source = \`
      const { workerData } = require('node:worker_threads');
      import(workerData.entry).then(async ({ KernelHost }) => {
        const host = new KernelHost({ python: workerData.python, shell: 'plain' });
        for (;;) { const kernel = host.kernel(); await kernel.execute('1 + 1'); kernel.execute('while True: print(1)').catch(() => {}); }
      });
    \`;
    const entry = ${JSON.stringify(new URL('../../index.js', import.meta.url).href)};
    for (let round = 0; round < 10; round++) {
      await Promise.all(Array.from({ length: 5 }, async (_, index) => {
        const worker = new Worker(source, { eval: true, execArgv: [], workerData: { entry, python: ${python} } });
        worker.on('error', (error) => { console.log('worker', error); process.exitCode = 1; });
        await sleep(((round * 5 + index) * 37) % 260);
        await worker.terminate();
      }));
    }
    MAIN
    console.log('done');
  `;
  const inMain = `
    const { KernelHost } = await import('kernelhost');
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    if ((await host.kernel().execute('6 * 7')).text !== '42') throw new Error('not 42');
    await host.close();
  `;
  // A variable that the template is given too, and with it all that it forks.
  const mark = `PYTHON_KERNELHOST_TEST=${process.pid}`;
  const left = () => allProcesses().filter(({ pid }) => pid !== process.pid && environment(pid).includes(mark));
  const env = { ...process.env, PYTHON_KERNELHOST_TEST: String(process.pid) };
  for (const main of ['', inMain]) {
    const run = await runNode(t, script.replace('MAIN', main), { env, deadlineMs: 60_000 });
    assert.deepEqual([run.code, run.signal, run.stdout], [0, null, 'done\n'], run.stderr);
  }
  await until('no process is left', () => left().length === 0, 2_000);
});

test('C103: the kernels of a worker end when it ends, while those of the main thread go on', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const kernel = host.kernel();
  await kernel.execute('x = 5');
  const source = `
    const { parentPort, workerData } = require('node:worker_threads');
    import(workerData.entry).then(async ({ KernelHost }) => {
      const host = new KernelHost({ python: workerData.python, shell: 'plain' });
      const lives = await Promise.all([1, 2, 3].map(() => host.kernel().start()));
      const { pid } = await host.warm();
      const { text } = await host.kernel().execute('1 + 1');
      host.kernels[0].execute('while True: pass').catch(() => {});
      parentPort.postMessage({ pids: [pid, ...lives.map(({ pid }) => pid)], text });
    });
  `;
  const entry = new URL('../../index.js', import.meta.url).href;
  const worker = new Worker(source, { eval: true, workerData: { entry, python: pythonForTests() } });
  const [{ pids, text }] = (await once(worker, 'message')) as [{ pids: number[]; text: string }];
  assert.equal(text, '2');
  assert.ok(pids.every(isAlive));
  await worker.terminate();
  await until('the kernels of the worker are gone', () => pids.every((pid) => !isAlive(pid)));
  assert.equal((await kernel.execute('x')).text, '5');
});

test('C75: kernels outlive the threads that come and go around their start', async (t) => {
  // A death signal that follows a thread would end them when the thread that made them retires.
  const { value } = await runNodeForJson<{ alive: number; answers: boolean; threads: number[] }>(
    t,
    `
    import { readdirSync } from 'node:fs';
    import { stat } from 'node:fs/promises';
    import { Worker } from 'node:worker_threads';
    import { once } from 'node:events';
import { readFileSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    const threads = () => readdirSync('/proc/self/task').length;
    const cold = new KernelHost({ python: ${python}, shell: 'plain', launch: 'spawn' });
    const worker = new Worker('setInterval(() => {}, 1000)', { eval: true });
    await once(worker, 'online');
    const kernels = [...Array.from({ length: 200 }, () => host.kernel()), ...Array.from({ length: 6 }, () => cold.kernel())];
    await Promise.all([...kernels.map((kernel) => kernel.start()), ...Array.from({ length: 100 }, () => stat('.'))]);
    const most = threads();
    await worker.terminate();
    // Whatever extra threads the starts have made have gone when the number has not changed for a while.
    let last = threads();
    for (let same = 0; same < 20; same++) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      if (threads() !== last) { last = threads(); same = 0; }
    }
    const alive = kernels.filter(({ state }) => state === 'idle').length;
    const results = await Promise.all(kernels.map((kernel, index) => kernel.execute(String(index))));
    const answers = results.every(({ text, life }, index) => text === String(index) && life.generation === 1);
    await Promise.all([host.close(), cold.close()]);
    console.log(JSON.stringify({ alive, answers, threads: [most, last] }));
    `,
    { deadlineMs: 60_000 },
  );
  assert.deepEqual([value.alive, value.answers], [206, true]);
  assert.ok((value.threads[1] ?? 0) < (value.threads[0] ?? 0), `no thread has gone: ${value.threads}`);
});

test('C105: what a listener throws is an ordinary uncaught exception, and the daemon, the kernels and all other events go on', async (t) => {
  const { value } = await runNodeForJson<{
    uncaught: number;
    rejected: number;
    heard: Record<string, number>;
    text: string;
    cells: string[];
  }>(
    t,
    `
    import { KernelHost } from 'kernelhost';
    let uncaught = 0, rejected = 0;
    process.on('uncaughtException', () => { uncaught += 1; });
    process.on('unhandledRejection', () => { rejected += 1; });
    const trap = { get message() { throw new Error('a getter'); }, get stack() { throw new Error('a getter'); } };
    const throwers = [
      () => { throw new Error('an error'); },
      () => { throw 'a string'; },
      () => { throw undefined; },
      () => { throw null; },
      () => { throw trap; },
    ];
    const heard = {};
    const cells = [];
    // Waiting for an event alone does not hold Node.
    const hold = setInterval(() => {}, 1_000);
    for (const thrower of throwers) {
      const host = new KernelHost({ python: ${python}, shell: 'plain', preload: ['a_module_that_is_missing'] });
      const kernel = host.kernel();
      for (const [emitter, names] of [[host, ['start', 'exit', 'warning']], [kernel, ['start', 'exit', 'output', 'state', 'warning']]]) {
        for (const name of names) {
          emitter.prependListener(name, () => { const key = (emitter === host ? 'host ' : 'kernel ') + name; heard[key] = (heard[key] ?? 0) + 1; });
          emitter.on(name, thrower);
        }
      }
      const { stdout, status } = await kernel.execute('import threading, time; print(1); threading.Timer(0.1, print, ("late",)).start()', { onOutput: thrower });
      cells.push(stdout.trim() + status);
      await new Promise((resolve) => { kernel.prependListener('output', resolve); });
      await kernel.kill();
      const again = await kernel.execute('2', { onOutput: async () => { thrower(); } });
      cells.push(again.text);
      await host.close();
      const template = new KernelHost({ python: ${python}, shell: 'plain' });
      template.on('template', thrower);
      await template.warm();
      await template.close();
    }
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    const { text } = await host.kernel().execute('1 + 1');
    await host.close();
    clearInterval(hold);
    console.log(JSON.stringify({ uncaught, rejected, heard, text, cells }));
    `,
    { deadlineMs: 60_000 },
  );
  assert.equal(value.text, '2');
  assert.deepEqual(value.cells, Array.from({ length: 5 }, () => ['1ok', '2']).flat());
  for (const name of [
    'host start',
    'host exit',
    'kernel start',
    'kernel exit',
    'kernel output',
    'kernel state',
    'host warning',
    'kernel warning',
  ]) {
    assert.ok((value.heard[name] ?? 0) >= 5, `${name}: ${value.heard[name]}`);
  }
  assert.ok(value.uncaught >= 40, String(value.uncaught));
  assert.ok(value.rejected >= 5, String(value.rejected));
});

test('C105: a throwing listener without a handler ends Node as any other error does, with its stack', async (t) => {
  const run = await runNode(
    t,
    `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    host.on('start', function myListener() { throw new Error('from my listener'); });
    await host.kernel().execute('import time; time.sleep(60)');
    `,
  );
  assert.deepEqual([run.code, run.signal], [1, null]);
  assert.match(run.stderr, /from my listener/);
  assert.match(run.stderr, /myListener/);
});

test('C106: four kernels that flood while JS is blocked lose nothing, and memory stays bounded', async (t) => {
  const { value } = await runNodeForJson<{ counts: number[]; grownMb: number; stream: number }>(
    t,
    `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    const kernels = Array.from({ length: 4 }, () => host.kernel());
    await Promise.all(kernels.map((kernel) => kernel.start()));
    const before = process.memoryUsage().rss;
    const counts = [0, 0, 0, 0];
    const calls = kernels.map((kernel, index) => kernel.execute('for i in range(400): print("x" * 99_999)', {
      onOutput: (output) => { counts[index] += output.text.length; },
    }));
    const stream = kernels[0].stream('for i in range(200_000): print(i)');
    await new Promise((resolve) => setTimeout(resolve, 20));
    const end = performance.now() + 2_500;
    while (performance.now() < end);
    const grownMb = (process.memoryUsage().rss - before) / 1e6;
    await Promise.all(calls);
    let lines = 0;
    for await (const output of stream) lines += output.text.split('\\n').length - 1;
    await host.close();
    console.log(JSON.stringify({ counts, grownMb, stream: lines }));
    `,
    { deadlineMs: 60_000 },
  );
  assert.deepEqual(
    value.counts,
    Array.from({ length: 4 }, () => 40_000_000),
  );
  assert.equal(value.stream, 200_000);
  assert.ok(value.grownMb < 60, `${value.grownMb} MB while JS was blocked`);
});

test("C107: Node's own children and the kernels each keep their own exit codes", async (t) => {
  const { value } = await runNodeForJson<{ wrong: string[]; kernels: string[]; children: number }>(
    t,
    `
    import { spawn } from 'node:child_process';
    import { once } from 'node:events';
import { readFileSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const hosts = ['fork', 'spawn'].map((launch) => new KernelHost({ python: ${python}, shell: 'plain', launch }));
    const wrong = [], kernels = [];
    let children = 0;
    const own = async () => {
      for (let i = 0; i < 50; i++) {
        const killed = i % 10 === 9;
        const child = killed ? spawn('sleep', ['60'], { stdio: 'ignore' }) : spawn('sh', ['-c', 'exit ' + (i % 10)], { stdio: 'ignore' });
        const exit = once(child, 'exit');
        if (killed) child.kill(i % 20 === 9 ? 'SIGTERM' : 'SIGKILL');
        const [code, signal] = await exit;
        const expected = killed ? (i % 20 === 9 ? 'SIGTERM' : 'SIGKILL') : i % 10;
        if ((signal ?? code) !== expected) wrong.push('child ' + i + ': ' + (signal ?? code));
        children += 1;
      }
    };
    const lives = async (host, count) => {
      for (let i = 0; i < count; i++) {
        const kernel = host.kernel();
        const error = await kernel.execute('import os; os._exit(' + i % 10 + ')').catch((error) => error);
        kernels.push(i % 10 + ' ' + error.exit?.status.code);
        await kernel.close();
      }
    };
    await Promise.all([
      ...Array.from({ length: 10 }, own),
      ...Array.from({ length: 4 }, () => lives(hosts[0], 20)),
      ...Array.from({ length: 2 }, () => lives(hosts[1], 10)),
    ]);
    await Promise.all(hosts.map((host) => host.close()));
    console.log(JSON.stringify({ wrong, kernels, children }));
    `,
    { deadlineMs: 60_000 },
  );
  assert.deepEqual(value.wrong, []);
  assert.deepEqual([value.children, value.kernels.length], [500, 100]);
  for (const pair of value.kernels) assert.equal(pair.split(' ')[0], pair.split(' ')[1]);
});

test('a host works in a worker that ends by itself, and when required from CommonJS', async (t) => {
  const out = await ends(
    t,
    `
    import { createRequire } from 'node:module';
    import { once } from 'node:events';
import { readFileSync } from 'node:fs';
    import { Worker } from 'node:worker_threads';
    const require = createRequire(${JSON.stringify(`${packageFolder}package.json`)});
    const { KernelHost } = require('kernelhost');
    const host = new KernelHost({ python: ${python}, shell: 'plain' });
    const worker = new Worker(\`
      import(\${JSON.stringify(${JSON.stringify(new URL('../../index.js', import.meta.url).href)})}).then(async ({ KernelHost }) => {
        const host = new KernelHost({ python: ${python.replaceAll('"', "'")}, shell: 'plain' });
        console.log((await host.kernel().execute('2 + 2')).text);
        await host.close();
      });\`, { eval: true, execArgv: [] });
    const [code] = await once(worker, 'exit');
    console.log(code, (await host.kernel().execute('1 + 1')).text);
    await host.close();
    `,
  );
  assert.equal(out, '4\n0 2\n');
});

test('a host that is closed and let go of is collected, and so are its kernels', async () => {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const gone: WeakRef<object>[] = [];
  const use = async () => {
    const host = new KernelHost({ python: pythonForTests(), shell: 'plain' });
    const [kernel, idle] = [host.kernel(), host.kernel()];
    await kernel.execute('print("something")');
    gone.push(new WeakRef(host), new WeakRef(kernel), new WeakRef(idle));
    await host.close();
  };
  for (let round = 0; round < 3; round += 1) await use();
  await until('all of them are collected', () => {
    collect();
    return gone.every((each) => each.deref() === undefined);
  });
});
