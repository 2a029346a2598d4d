/** Many at once: deaths, failing starts, starts beyond what the machine allows. */

import assert from 'node:assert/strict';
import { chmodSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { makeCgroup } from '../fixtures/cgroups.ts';
import { writeModules } from '../fixtures/forkserver-look.ts';
import { runNodeForJson, startNode } from '../fixtures/node-run.ts';
import { asNobodyElse, daemonScript, left, overlap, takePeakMemory, watchChildren } from '../fixtures/storm-daemon.ts';
import { isAlive, pythonForTests, type TestContext, temporaryFolder, until } from '../helpers/index.ts';

const python = JSON.stringify;

describe('deaths', () => {
  /** The template and the warden are no kernels. */
  const OTHERS = 2;

  test('C13: 300 kernels are killed at once from outside and called at once: each is replaced once and answers', async (t) => {
    const cgroup = makeCgroup(t, 'memory', {});
    if (typeof cgroup === 'string') t.diagnostic(`memory is not measured, because ${cgroup}`);
    const [first, again] = ['first', 'again'].map((name) => join(temporaryFolder(t), name)) as [string, string];
    const source = daemonScript(
      pythonForTests(),
      `
      const host = makeHost();
      const { pid: template } = await host.warm();
      const began = performance.now();
      const kernels = many(host, 300);
      const right = await answer(kernels);
      const old = kernels.map(({ pid }) => pid);
      leave(${python(first)}, { template, old, right, ms: performance.now() - began });
      await once(process, 'SIGUSR2');
      const again = performance.now();
      const cpu = process.cpuUsage();
      const results = await Promise.all(kernels.map((kernel, index) => kernel.execute(index + ' * 7')));
      const { user, system } = process.cpuUsage(cpu);
      leave(${python(again)}, {
        ms: performance.now() - again,
        cpuMs: (user + system) / 1000,
        right: results.every(({ text }, index) => text === String(index * 7)),
        recovered: results.every(({ recovered }, index) => recovered?.exit.pid === old[index]),
        launches: results.filter(({ life }) => life.launch === 'fork').length,
        generations: [...new Set(results.map(({ life }) => life.generation))],
        starts: [...new Set(told.starts.values())], exits: [...new Set(told.exits.values())],
        templates: told.templates, warnings: told.warnings, pids: kernels.map(({ pid }) => pid),
      });
      await once(process, 'SIGUSR2');
      await host.close({ graceMs: 500 });
      `,
    );
    const { child } = startNode(t, source, typeof cgroup === 'string' ? {} : { through: cgroup.enter });
    const before = await left<{ template: number; old: number[]; right: boolean; ms: number }>(first, 25_000);
    assert.ok(before.right);
    const peakBefore = typeof cgroup === 'string' ? null : takePeakMemory(cgroup);
    const watch = watchChildren(() => [before.template, Number(child.pid)]);
    for (const pid of before.old) process.kill(pid, 'SIGKILL');
    // A cell that meets its kernel still alive may die with it; whether the daemon has heard of the ends is left open.
    await until('all are dead', () => !before.old.some(isAlive));
    child.kill('SIGUSR2');
    const after = await left<Record<string, unknown> & { ms: number; cpuMs: number; pids: number[] }>(again, 25_000);
    const { peak, looks } = await watch.stop();
    const peakAfter = typeof cgroup === 'string' ? null : takePeakMemory(cgroup);
    t.diagnostic(
      `first ${before.ms.toFixed()} ms, again ${after.ms.toFixed()} ms with ${after.cpuMs.toFixed()} ms of the daemon's CPU; ` +
        `at most ${peak} processes in ${looks} looks; memory ${peakBefore} then ${peakAfter}`,
    );
    assert.deepEqual(
      { ...after, ms: 0, cpuMs: 0, pids: [] },
      {
        ...{ ms: 0, cpuMs: 0, pids: [], right: true, recovered: true, launches: 300 },
        ...{ generations: [2], starts: [2], exits: [1], templates: 1, warnings: [] },
      },
    );
    assert.equal(new Set([...before.old, ...after.pids]).size, 600);
    assert.ok(!before.old.some(isAlive));
    // A life starts when the one before it has ended, so no more than 300 live at any moment. One look takes some
    // milliseconds, in which it can see a process and then its replacement: hence the tenth more.
    assert.ok(peak <= 330 + OTHERS, `${peak} processes at once`);
    assert.ok(looks >= 3, `looked ${looks} times`);
    // Nothing is kept of the dead, and what is about to be is no more than before: a quarter for the moment's waste.
    if (peakBefore !== null && peakAfter !== null) {
      assert.ok(peakAfter < peakBefore * 1.25, `${peakAfter} bytes at the most, ${peakBefore} before`);
    }
    // What the first 300 have cost, once more, and the ends of the others.
    assert.ok(after.ms < before.ms * 3 + 1_000, `${after.ms} ms, after ${before.ms} ms for the first`);
    child.kill('SIGUSR2');
    await until('the daemon ends', () => child.exitCode !== null);
    assert.equal(child.exitCode, 0);
    assert.ok(!after.pids.some(isAlive));
  });

  test('C13: half of 300 are called while they die: every call ends once, no cell runs twice, each is replaced once', async (t) => {
    const file = join(temporaryFolder(t), 'runs');
    writeFileSync(file, '');
    const { value } = await runNodeForJson<Record<string, unknown>>(
      t,
      daemonScript(
        pythonForTests(),
        `
        const host = makeHost();
        const kernels = many(host, 300);
        await startAll(kernels);
        const old = kernels.map(({ pid }) => pid);
        const cell = (call, index) => 'with open(' + JSON.stringify(${python(file)}) + ', "a") as file: file.write("' + call + ' ' + index + '\\\\n")\\n' + index + ' * 7';
        const run = (call, index) => kernels[index].execute(cell(call, index));
        const exits = kernels.map((kernel) => once(kernel, 'exit'));
        const outcomes = kernels.map(async (kernel, index) => {
          process.kill(old[index], 'SIGKILL');
          if (index % 2 === 1) await exits[index];
          try {
            return [(await run('first', index)).text, 'answered'];
          } catch (error) {
            if (error.code !== 'ERR_KERNEL_DIED' || error.exit.pid !== old[index]) throw error;
            return [(await run('second', index)).text, 'died'];
          }
        });
        const ended = await Promise.all(outcomes);
        const right = ended.every(([text], index) => text === String(index * 7));
        const died = ended.filter(([, how]) => how === 'died').length;
        const diedLate = ended.filter(([, how], index) => how === 'died' && index % 2 === 1).length;
        const lines = fs.readFileSync(${python(file)}, 'utf8').split('\\n').filter(Boolean);
        const starts = [...new Set(told.starts.values())], exited = [...new Set(told.exits.values())];
        await host.close();
        say({ right, diedLate, died, starts, exited, twice: lines.length - new Set(lines).size, ran: lines.length });
        `,
      ),
      { deadlineMs: 40_000 },
    );
    t.diagnostic(`${value.died} of 150 calls met their kernel still there`);
    assert.deepEqual(
      { ...value, died: 0, ran: 0 },
      { right: true, diedLate: 0, died: 0, starts: [2], exited: [1], twice: 0, ran: 0 },
    );
    assert.ok(Number(value.ran) >= 300);
  });

  test('C98: 60 cold kernels are killed and called at once: no more start together than the gate lets', async (t) => {
    const { folder, log, end } = bootLog(t);
    const { value } = await runNodeForJson<{ right: boolean; gate: number; starts: number[] }>(
      t,
      daemonScript(
        pythonForTests(),
        `
        const env = { PYTHONPATH: ${python(folder)} };
        const host = makeHost({ launch: 'spawn', defaults: { env, inheritEnv: 'all', init: ${python(end)} } });
        const kernels = many(host, 60);
        await startAll(kernels);
        const ended = Promise.all(kernels.map((kernel) => once(kernel, 'exit')));
        for (const { pid } of kernels) process.kill(pid, 'SIGKILL');
        await ended;
        const right = await answer(kernels);
        const starts = [...new Set(told.starts.values())];
        await host.close();
        say({ right, starts, gate: availableParallelism() * 2 });
        `,
      ),
      { deadlineMs: 45_000 },
    );
    const { peak, begun } = overlap(log());
    t.diagnostic(`at most ${peak} interpreters were starting at once; the gate lets ${value.gate}`);
    assert.deepEqual([value.right, value.starts, begun], [true, [2], 120]);
    assert.ok(peak <= value.gate, `${peak} at once, ${value.gate} allowed`);
    assert.ok(peak >= 2, 'they do start side by side');
  });
});

/** Every cold life notes when its interpreter begins and, with `end` as its `init`, when it is about to be ready. */
function bootLog(t: TestContext): { folder: string; end: string; log(): string } {
  const folder = temporaryFolder(t);
  const file = join(folder, 'log');
  writeFileSync(file, '');
  const note = (what: string) => `open(${JSON.stringify(file)}, "a").write(f"{os.getpid()} ${what}\\n")`;
  // The template and the warden are interpreters too.
  writeModules(folder, { sitecustomize: `import os, sys\nif sys.orig_argv[-1] == "kernel": ${note('begin')}` });
  return { folder, end: `import os; ${note('end')}`, log: () => readFileSync(file, 'utf8') };
}

describe('a start that always fails, called again and again for two seconds', () => {
  /** Three attempts cost nothing to wait for; then come pauses of 100, 200, 400, 800 ms and one that two seconds cut off. */
  const ATTEMPTS = 8;
  /** The template's own attempts: at once, after a second, after two more. */
  const TEMPLATES = 3;

  const loop = (options: string, kernel: string) => `
    const host = makeHost(${options});
    const kernel = host.kernel(${kernel});
    await kernel.start().catch(() => {});
    const cpu = process.cpuUsage();
    const end = performance.now() + 2_000;
    let calls = 0, answered = 0;
    const codes = new Set();
    // Ten callers that never tire.
    await Promise.all(Array.from({ length: 10 }, async () => {
      while (performance.now() < end) {
        calls += 1;
        await kernel.execute('1').then(() => { answered += 1; }, ({ code }) => codes.add(code));
      }
    }));
    const { user, system } = process.cpuUsage(cpu);
    await host.close();
    say({ calls, answered, codes: [...codes], cpuMs: (user + system) / 1000 });
  `;

  for (const launch of ['spawn', 'auto'] as const) {
    test(`C15: because the interpreter exits at once (${launch})`, async (t) => {
      const folder = temporaryFolder(t);
      const [program, runs] = [join(folder, 'python'), join(folder, 'runs')];
      writeFileSync(program, `#!/bin/sh\nfor role; do :; done\necho "$role" >>${runs}\nexit 3\n`);
      chmodSync(program, 0o755);
      const { value } = await runNodeForJson<{ calls: number; answered: number; codes: string[]; cpuMs: number }>(
        t,
        daemonScript(program, loop(`{ launch: '${launch}' }`, '')),
      );
      const roles = readFileSync(runs, 'utf8').split('\n');
      const [kernels = 0, templates = 0, wardens = 0] = ['kernel', 'template', 'warden'].map(
        (name) => roles.filter((role) => role === name).length,
      );
      t.diagnostic(
        `${kernels} kernels, ${templates} templates, ${wardens} wardens; ${value.cpuMs} ms of CPU, ${value.calls} calls`,
      );
      assert.deepEqual([value.answered, value.codes], [0, ['ERR_KERNEL_START']]);
      assert.ok(kernels >= 4 && kernels <= ATTEMPTS, `${kernels} kernels`);
      assert.ok(templates <= (launch === 'auto' ? TEMPLATES : 0), `${templates} templates`);
      // A life without a warden is not so well looked after, so each start may try for one, but no more often.
      assert.ok(wardens <= kernels + 1, `${wardens} wardens`);
      assert.ok(value.cpuMs < 150, `${value.cpuMs} ms of the daemon's CPU`);
    });
  }

  test('C15: because its init raises', async (t) => {
    const runs = join(temporaryFolder(t), 'runs');
    const init = `with open(${JSON.stringify(runs)}, "a") as file: file.write("run\\n")\n1 / 0`;
    const { value } = await runNodeForJson<{ calls: number; answered: number; codes: string[]; cpuMs: number }>(
      t,
      daemonScript(pythonForTests(), loop('', `{ init: ${python(init)} }`)),
    );
    const processes = readFileSync(runs, 'utf8').split('\n').length - 1;
    t.diagnostic(`${processes} processes, ${value.cpuMs} ms of CPU, ${value.calls} calls`);
    assert.deepEqual([value.answered, value.codes], [0, ['ERR_KERNEL_START']]);
    assert.ok(processes >= 4 && processes <= ATTEMPTS, `${processes} processes`);
    assert.ok(value.cpuMs < 150, `${value.cpuMs} ms of the daemon's CPU`);
  });
});

describe('500 kernels where there is no room for them', () => {
  interface Crowd {
    up: number;
    failures: string[];
    alive: boolean;
    half: boolean;
    again: { up: number; failures: string[] };
    child: number;
    full: boolean;
    left: string[];
  }

  /** Starts all; looks after the others and after Node; closes half, starts as many again; `room` makes room for all. */
  const crowd = (options: string, meanwhile: string, room: string, count: number) => `
    const host = makeHost(${options});
    await host.warm().catch(() => {});
    const kernels = many(host, 500);
    const { up, down, failures } = await startAll(kernels);
    const alive = await answer(up);
    const extra = {};
    ${meanwhile}
    const closed = up.slice(0, up.length >> 1);
    await Promise.all(closed.map((kernel) => kernel.close()));
    const half = await answer(up.slice(closed.length));
    // Not quite as many: a cold one may need a descriptor or a thread more while it starts.
    const again = await startAll(down.slice(0, closed.length - 5));
    const { spawn } = await import('node:child_process');
    await Promise.all(again.up.slice(0, 3).map((kernel) => kernel.close()));
    const [child] = await once(spawn('true'), 'exit');
    ${room}
    const full = await answer(many(host, ${count}));
    await host.close();
    const left = childrenLeft();
    say({ up: up.length, failures, alive, half, again: { up: again.up.length, failures: again.failures }, child, full, left, ...extra });
  `;

  function assertServed(value: Crowd, names: readonly RegExp[]): void {
    assert.equal(value.up + value.failures.length, 500);
    for (const failure of value.failures) {
      assert.match(failure, /^ERR_KERNEL_START /);
      for (const name of names) assert.match(failure, name);
    }
    assert.deepEqual(
      [value.alive, value.half, value.again.failures, value.child, value.full],
      [true, true, [], 0, true],
      'the rest works, and it all does when there is room again',
    );
    assert.deepEqual(value.left, [], 'no child is left, nor a zombie');
  }

  test('C95: ulimit -n: every failure names EMFILE and RLIMIT_NOFILE, files can still be read, half closed is half served', async (t) => {
    const files = `
      extra.read = [];
      for (let round = 0; round < 20; round++) {
        extra.read.push(await readFile('package.json', 'utf8').then((text) => text.includes('kernelhost'), String));
        extra.read.push(fs.readdirSync('.').includes('package.json'));
      }
      extra.read = [...new Set(extra.read)];
    `;
    const { value } = await runNodeForJson<Crowd & { read: unknown[] }>(
      t,
      daemonScript(
        pythonForTests(),
        crowd('', files, 'await Promise.all(host.kernels.map((kernel) => kernel.close()));', 40),
      ),
      { through: ['prlimit', '--nofile=1024:1024'], deadlineMs: 45_000 },
    );
    t.diagnostic(`${value.up} of 500 came up`);
    assert.ok(value.up >= 90 && value.up < 200, String(value.up));
    assertServed(value, [/EMFILE/, /RLIMIT_NOFILE/]);
    assert.deepEqual(value.read, [true]);
  });

  test('C95: whatever the limit of files is, Node can open some when the kernels have taken theirs', async (t) => {
    // A kernel takes less than ten, so that among these limits are some at which each step of a start is the one that fails.
    const runs = Array.from({ length: 20 }, (_, run) => [144 + (run >> 1), run % 2 ? 'auto' : 'spawn'] as const);
    for (const [limit, launch] of runs) {
      const { value } = await runNodeForJson<Pick<Crowd, 'up' | 'failures' | 'alive' | 'left'> & { read: unknown[] }>(
        t,
        daemonScript(
          pythonForTests(),
          `
          const host = makeHost({ launch: '${launch}' });
          const kernels = many(host, 25);
          const { up, failures } = await startAll(kernels);
          const read = [];
          for (let round = 0; round < 5; round++) {
            read.push(await readFile('package.json', 'utf8').then((text) => text.includes('kernelhost'), String));
          }
          const alive = await answer(up);
          await host.close();
          say({ up: up.length, failures, alive, left: childrenLeft(), read: [...new Set(read)] });
          `,
        ),
        { through: ['prlimit', `--nofile=${limit}:${limit}`] },
      );
      assert.ok(value.up > 0 && value.up < 25, `${value.up} with ${limit}`);
      assert.deepEqual([value.read, value.alive, value.left], [[true], true, []], `with ${limit} (${launch})`);
      for (const failure of value.failures)
        assert.match(failure, /EMFILE.*RLIMIT_NOFILE/, `with ${limit} (${launch}): ${failure}`);
    }
  });

  const threads = `
    const held = await up[0].execute('import threading, time\\nthreads = []\\ntry:\\n    for _ in range(300):\\n        thread = threading.Thread(target=time.sleep, args=(1,))\\n        thread.start(); threads.append(thread)\\nfinally:\\n    for thread in threads: thread.join()');
    extra.held = [held.status, held.error?.name ?? null, held.error?.value ?? null];
    extra.after = (await up[0].execute('6 * 7')).text;
  `;

  for (const launch of ['auto', 'spawn'] as const) {
    test(`C94: a cgroup's pids.max: every failure names EAGAIN and the limit, also for a thread, then full service (${launch})`, async (t) => {
      const cgroup = makeCgroup(t, 'pids', {});
      if (typeof cgroup === 'string') {
        t.skip(cgroup);
        return;
      }
      const limit = python(join(cgroup.folder, 'pids.max'));
      const current = python(join(cgroup.folder, 'pids.current'));
      // The host and its template are there before the limit is.
      const setUp = `(() => { const options = { launch: '${launch}' }; return options; })()`;
      const body = crowd(setUp, threads, `fs.writeFileSync(${limit}, 'max');`, 60).replace(
        'const kernels = many(host, 500);',
        `await (await import('node:fs/promises')).readFile('package.json');
        await host.kernel().execute('1');
        fs.writeFileSync(${limit}, String(Number(fs.readFileSync(${current}, 'utf8')) + 40));
        const kernels = many(host, 500);`,
      );
      const { value } = await runNodeForJson<Crowd & { held: unknown[]; after: string }>(
        t,
        daemonScript(pythonForTests(), body),
        { through: cgroup.enter, deadlineMs: 60_000 },
      );
      t.diagnostic(`${value.up} of 500 came up; ${value.failures[0]}`);
      assert.ok(value.up >= 30 && value.up <= 40, String(value.up));
      assertServed(value, [/EAGAIN/, /pids\.max/]);
      assert.deepEqual(value.held, ['error', 'RuntimeError', "can't start new thread"]);
      assert.equal(value.after, '42');
    });
  }

  test('C94: ulimit -u: every failure names EAGAIN and RLIMIT_NPROC, also for a thread, then service again', async (t) => {
    const through = asNobodyElse(90);
    if (typeof through === 'string') {
      t.skip(through);
      return;
    }
    const { value } = await runNodeForJson<Crowd & { held: unknown[]; after: string }>(
      t,
      daemonScript(
        pythonForTests(),
        crowd(
          `{ defaults: { cwd: '/', env: { HOME: '/' }, inheritEnv: 'all' } }`,
          threads,
          'await Promise.all(host.kernels.map((kernel) => kernel.close()));',
          40,
        ),
      ),
      { through, deadlineMs: 60_000 },
    );
    t.diagnostic(`${value.up} of 500 came up; ${value.failures[0]}`);
    assert.ok(value.up >= 50 && value.up < 90, String(value.up));
    assertServed(value, [/EAGAIN/, /RLIMIT_NPROC/]);
    assert.deepEqual(value.held, ['error', 'RuntimeError', "can't start new thread"]);
    assert.equal(value.after, '42');
  });
});

describe('200 starts on two processors', () => {
  const onTwo = ['taskset', '--cpu-list', '0,1'];

  test('C98: forked, all come up, soon and right; a hundred more are called off by a close', async (t) => {
    const { value } = await runNodeForJson<Record<string, unknown> & { ms: number; late: string[] }>(
      t,
      daemonScript(
        pythonForTests(),
        `
        const host = makeHost();
        const kernels = many(host, 200);
        const began = performance.now();
        const { up } = await startAll(kernels);
        const ms = performance.now() - began;
        const right = await answer(kernels);
        const calls = many(host, 100).map((kernel) => kernel.execute('1'));
        const closed = host.close();
        const late = (await Promise.allSettled(calls)).map(({ reason }) => reason?.code ?? 'answered');
        await closed;
        say({ ms, up: up.length, right, late: [...new Set(late)], state: host.kernels.length });
        `,
      ),
      { through: onTwo, deadlineMs: 45_000 },
    );
    t.diagnostic(`200 in ${value.ms.toFixed()} ms`);
    assert.deepEqual([value.up, value.right, value.state], [200, true, 0]);
    assert.deepEqual(value.late, ['ERR_KERNEL_CLOSED']);
    assert.ok(value.ms < 15_000, `${value.ms} ms`);
  });

  test('C98: cold, they come up in the order they were asked for; one is called off in the queue; a close in the middle rejects the rest', async (t) => {
    const { folder, log, end } = bootLog(t);
    const { value } = await runNodeForJson<{
      gate: number;
      order: number[];
      aborted: string;
      abortMs: number;
      startsAfterClose: number;
      codes: string[];
      closeMs: number;
    }>(
      t,
      daemonScript(
        pythonForTests(),
        `
        const env = { PYTHONPATH: ${python(folder)} };
        const host = makeHost({ launch: 'spawn', defaults: { env, inheritEnv: 'all', init: ${python(end)} } });
        const kernels = many(host, 200);
        const ids = kernels.map(({ id }) => id);
        const controller = new AbortController();
        const starts = kernels.map((kernel, index) => kernel.start(index === 20 ? { signal: controller.signal } : {}));
        const settled = Promise.allSettled(starts);
        const came = (count) => new Promise((resolve) => {
          const look = () => { if (told.order.length >= count) { host.off('start', look); resolve(); } };
          host.on('start', look);
        });
        await came(5);
        const before = performance.now();
        controller.abort();
        const aborted = await starts[20].then(() => 'started', ({ name }) => name);
        const abortMs = performance.now() - before;
        await came(60);
        const closing = performance.now();
        const startsAtClose = told.order.length;
        const closed = host.close({ graceMs: 500 });
        await closed;
        const closeMs = performance.now() - closing;
        const outcomes = await settled;
        const order = told.order.map((id) => ids.indexOf(id));
        const codes = outcomes.filter(({ status }, index) => status === 'rejected' && index !== 20).map(({ reason }) => reason.code ?? reason.name);
        say({ gate: availableParallelism() * 2, order, aborted, abortMs, startsAfterClose: told.order.length - startsAtClose, codes, closeMs });
        `,
      ),
      { through: onTwo, deadlineMs: 45_000 },
    );
    const { peak, begun } = overlap(log());
    t.diagnostic(`${value.order.length} up, ${begun} begun, ${peak} at once, closed in ${value.closeMs.toFixed()} ms`);
    assert.equal(value.aborted, 'AbortError');
    assert.ok(value.abortMs < 500, `the abort took ${value.abortMs} ms`);
    assert.ok(!value.order.includes(20), 'and it never starts');
    // The gate lets in first who came first; who is inside may overtake the others there.
    const sorted = value.order.toSorted((a, b) => a - b);
    const overtaken = Math.max(...value.order.map((number, index) => Math.abs(sorted.indexOf(number) - index)));
    assert.ok(overtaken <= value.gate * 2, `one came ${overtaken} places from where it was asked for`);
    assert.equal(value.startsAfterClose, 0, 'none starts once it is closed');
    assert.equal(value.codes.length, 199 - value.order.length);
    assert.deepEqual([...new Set(value.codes)], ['ERR_KERNEL_CLOSED']);
    assert.ok(begun <= value.order.length + value.gate, `${begun} interpreters for ${value.order.length} kernels`);
    assert.ok(peak <= value.gate, `${peak} at once, ${value.gate} allowed`);
    assert.ok(value.closeMs < 2_500, `the close took ${value.closeMs} ms`);
  });
});
