/** What happens to a template from outside or from within: kernels go on, starts say what they did instead, a healthy one follows. */

import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync, utimesSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import type { Kernel, KernelHost, Life, TemplateInfo } from 'kernelhost';
import { memoryCgroup } from '../fixtures/cgroups.ts';
import { begin, failureOf } from '../fixtures/endings-calls.ts';
import { childrenOf, json, ok, realInterpreter, writeModules } from '../fixtures/forkserver-look.ts';
import { runNodeForJson } from '../fixtures/node-run.ts';
import { hookModule, hooks } from '../fixtures/storm-hooks.ts';
import {
  allProcesses,
  descriptorCount,
  isAlive,
  isGone,
  next,
  processStat,
  pythonForTests,
  startHost,
  type TestContext,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

/** What the host says beside the answers of its calls. */
function listen(host: KernelHost): { warnings: string[]; templates: TemplateInfo[] } {
  const heard: { warnings: string[]; templates: TemplateInfo[] } = { warnings: [], templates: [] };
  host.on('warning', ({ code, message }) => heard.warnings.push(`${code} ${message}`));
  host.on('template', (info) => heard.templates.push(info));
  return heard;
}

/** A cold start that was not what was asked for says why, in the life and as a warning. */
function assertFellBack(life: Life, warnings: readonly string[], why: RegExp): void {
  assert.equal(life.launch, 'spawn');
  assert.match(life.launchReason ?? '', why);
  assert.ok(
    warnings.some((text) => text.startsWith('WARN_LAUNCH_FALLBACK ') && text.includes(life.launchReason ?? '?')),
    `no warning says "${life.launchReason}": ${warnings.join('\n')}`,
  );
}

/** The next start, or one soon after, is served by a healthy template again. */
async function forksAgain(host: KernelHost): Promise<void> {
  await until(
    'a start is forked again',
    async () => {
      const kernel = host.kernel();
      const { launch } = await kernel.start();
      assert.equal((await kernel.execute('6 * 7')).text, '42');
      await kernel.close();
      return launch === 'fork';
    },
    10_000,
  );
}

/** Five kernels that hold their number in `x`, the first two of them in a cell that goes on for a while. */
async function fiveKernels(host: KernelHost, seconds: number): Promise<{ kernels: Kernel[]; check(): Promise<void> }> {
  const kernels = Array.from({ length: 5 }, () => host.kernel());
  await Promise.all(kernels.map((kernel, index) => ok(kernel, `x = ${index}`)));
  const pids = kernels.map(({ pid }) => pid);
  const busy = await Promise.all(
    kernels
      .slice(0, 2)
      .map((kernel) => begin(kernel, `import time\nprint("begun")\ntime.sleep(${seconds})\nx`, 'begun')),
  );
  return {
    kernels,
    async check() {
      const ended = await Promise.all(busy.map(({ call }) => within('a busy cell', call)));
      assert.deepEqual(
        ended.map(({ text }) => text),
        ['0', '1'],
      );
      for (const [index, kernel] of kernels.entries()) assert.equal((await kernel.execute('x')).text, String(index));
      assert.deepEqual(
        kernels.map(({ pid }) => pid),
        pids,
        'every kernel is still the process it was',
      );
    },
  };
}

describe('the template is killed', () => {
  test('C35: in the same tick as ten starts: each ends in one life, and nothing of the lost forks is left', async (t) => {
    const host = startHost(t, { shell: 'plain' });
    const { warnings } = listen(host);
    const { check } = await fiveKernels(host, 2);
    for (let round = 0; round < 10; round++) {
      const template = await host.warm();
      const kernels = Array.from({ length: 10 }, () => host.kernel());
      let answered = 0;
      const starts = kernels.map(async (kernel) => {
        const life = await kernel.start();
        answered += 1;
        return life;
      });
      // At another moment of the ten forks in each round: from none has been asked for to most have been answered.
      await until('so many have been answered', () => answered >= round % 4);
      process.kill(template.pid, 'SIGKILL');
      const lives = await within('ten starts', Promise.all(starts));
      assert.deepEqual(
        lives.map(({ generation }) => generation),
        Array(10).fill(1),
      );
      for (const life of lives.filter(({ launch }) => launch === 'spawn')) {
        assertFellBack(life, warnings, /template/);
      }
      const results = await Promise.all(kernels.map((kernel, index) => ok(kernel, `${index} + 1`)));
      assert.deepEqual(
        results.map(({ text }) => Number(text)),
        kernels.map((_, index) => index + 1),
      );
      const pids = new Set(lives.map(({ pid }) => pid));
      assert.equal(pids.size, 10);
      // Whoever was forked by this template and answers to nobody would by now be a child of ours or of init.
      await Promise.all(kernels.map((kernel) => kernel.close()));
    }
    await check();
    await forksAgain(host);
  });

  test('C35: a moment after it has forked, while the child is still in its group: the start has its life in time', async (t) => {
    const { name, env, flag, forked, forks } = hookModule(t, 'after_in_child', 'time.sleep(0.3)');
    writeFileSync(flag, '');
    const host = startHost(t, {
      shell: 'plain',
      preload: [name],
      defaults: { env, inheritEnv: 'all', startTimeoutMs: 6_000 },
    });
    const { warnings } = listen(host);
    for (let round = 1; round <= 3; round++) {
      const template = await host.warm();
      const kernel = host.kernel();
      const start = kernel.start();
      await until('it has forked', () => forks() === round && forked().length === round);
      process.kill(template.pid, 'SIGKILL');
      const life = await within('the start', start, 6_000);
      if (life.launch === 'spawn') assertFellBack(life, warnings, /template/);
      assert.equal((await kernel.execute('6 * 7')).text, '42');
      await until('nobody else is left', () => forked().every((pid) => pid === life.pid || !isAlive(pid)));
      await kernel.close();
    }
  });

  test('C35: by the OOM killer, which prefers it: kernels go on, its end is told, the next start forks', async (t) => {
    const host = startHost(t, { shell: 'plain' });
    const { templates } = listen(host);
    const { check } = await fiveKernels(host, 2);
    const template = await host.warm();
    const cgroup = memoryCgroup(t, 64 << 20);
    writeFileSync(`/proc/${template.pid}/oom_score_adj`, '1000');
    const told = next(host, 'template');
    if (typeof cgroup === 'string') {
      t.diagnostic(`killed by hand instead, because ${cgroup}`);
      process.kill(template.pid, 'SIGKILL');
    } else {
      writeFileSync(join(cgroup.folder, 'cgroup.procs'), String(template.pid));
      // Somebody else in the template's cgroup uses up the memory, and is the last to be chosen.
      const [program = '', ...rest] = cgroup.enter;
      const fill = 'open("/proc/self/oom_score_adj", "w").write("-500"); kept = [b"x" * (1 << 20) for _ in range(128)]';
      const hog = spawn(program, [...rest, realInterpreter(), '-c', fill], { stdio: 'ignore' });
      t.after(() => void hog.kill('SIGKILL'));
      await within('the end of the one that uses up the memory', once(hog, 'exit'));
    }
    await told;
    const ended = templates.find(({ state }) => state === 'ended');
    assert.equal(ended?.pid, template.pid);
    assert.deepEqual(ended?.exit?.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
    const evidence = ended?.exit?.evidence.join('\n') ?? '';
    if (evidence.includes('Killed process')) assert.equal(ended?.exit?.cause, 'out-of-memory');
    assert.notEqual(evidence, '');
    await check();
    const life = await host.kernel().start();
    assert.equal(life.launch, 'fork', life.launchReason ?? '');
    const { pid } = await host.warm();
    assert.notEqual(pid, template.pid);
    assert.notEqual(readFileSync(`/proc/${life.pid}/oom_score_adj`, 'utf8').trim(), '1000');
  });
});

describe('the template is stopped', () => {
  test('C35: for longer than a fork may take: kernels go on, starts become cold in time and say why, then it is as before', async (t) => {
    const host = startHost(t, { shell: 'plain' });
    const { warnings } = listen(host);
    const { kernels, check } = await fiveKernels(host, 6);
    const template = await host.warm();
    const children = childrenOf(template.pid).length;
    process.kill(template.pid, 'SIGSTOP');
    const began = performance.now();
    const late = Array.from({ length: 4 }, () => host.kernel());
    const starts = Promise.all(late.map((kernel) => kernel.start()));
    // Meanwhile the idle ones are as quick as ever.
    const quick = performance.now();
    assert.equal((await (kernels[4] as Kernel).execute('x')).text, '4');
    assert.ok(performance.now() - quick < 500);
    const lives = await within('the starts', starts, 10_000);
    assert.ok(performance.now() - began < 8_000, 'the fork has 5 s of the 30 s that a start has');
    for (const life of lives) assertFellBack(life, warnings, /template did not answer within \d+ ms/);
    assert.deepEqual(
      (await Promise.all(late.map((kernel) => kernel.execute('6 * 7')))).map(({ text }) => text),
      Array(4).fill('42'),
    );
    // Not the stopped one, and nobody waits for it once more.
    const again = performance.now();
    const life = await host.kernel().start();
    assert.equal(life.launch, 'fork');
    assert.notEqual(processStat(life.pid)?.parent, template.pid);
    assert.ok(performance.now() - again < 3_000);
    process.kill(template.pid, 'SIGCONT');
    await check();
    assert.equal(childrenOf(template.pid).length, children, 'it has forked nobody for those who had given up');
    assert.deepEqual(
      late.map(({ pid }) => pid),
      lives.map(({ pid }) => pid),
    );
    await Promise.all(kernels.map((kernel) => kernel.close()));
    await until('a template that is replaced leaves with its last kernel', () => isGone(template.pid));
  });

  for (const [hook, moment] of [
    ['before', 'just before'],
    ['after_in_parent', 'just after'],
  ] as const) {
    test(`C25: ${moment} it forks: the late child is ended, and the request has one life`, async (t) => {
      const { name, env, flag, forked, forks } = hookModule(t, hook, 'os.kill(os.getpid(), signal.SIGSTOP)');
      const host = startHost(t, {
        shell: 'plain',
        preload: [name],
        defaults: { env, inheritEnv: 'all', startTimeoutMs: 3_000 },
      });
      const { warnings } = listen(host);
      const other = host.kernel();
      await ok(other, 'x = 1');
      const template = await host.warm();
      assert.equal(forked().length, 1);
      writeFileSync(flag, '');
      const kernel = host.kernel();
      const life = await kernel.start();
      assertFellBack(life, warnings, /template did not answer/);
      rmSync(flag);
      assert.equal(processStat(template.pid)?.state, 'T');
      if (hook === 'after_in_parent') {
        await until('the child that nobody has heard of leaves', () => !forked().slice(1).some(isAlive));
      }
      process.kill(template.pid, 'SIGCONT');
      await until('the late fork has happened', () => forks() === 2);
      const children = () => allProcesses().filter(({ parent }) => parent === template.pid);
      await until('its child has been ended and reaped', () => children().length === 1);
      assert.deepEqual(
        children().map(({ pid }) => pid),
        [other.pid],
      );
      assert.ok(forked().slice(1).every(isGone));
      assert.deepEqual([kernel.pid, kernel.generation], [life.pid, 1]);
      assert.equal((await kernel.execute('6 * 7')).text, '42');
      assert.equal((await other.execute('x')).text, '1');
      await forksAgain(host);
    });
  }
});

describe('a preload whose at-fork hook hangs', () => {
  for (const hook of hooks) {
    test(`${hook}: starts are cold in time and say why, they do not all wait, and nobody is left`, async (t) => {
      const { name, env, flag, forked } = hookModule(t, hook, 'time.sleep(600)');
      writeFileSync(flag, '');
      const limit = 4_000;
      const host = startHost(t, {
        shell: 'plain',
        preload: [name],
        defaults: { env, inheritEnv: 'all', startTimeoutMs: limit },
      });
      const { warnings } = listen(host);
      const took: number[] = [];
      for (let attempt = 0; attempt < 6; attempt++) {
        const kernel = host.kernel();
        const began = performance.now();
        const life = await kernel.start();
        took.push(performance.now() - began);
        assert.ok((took.at(-1) ?? 0) < limit, `a start took ${took.at(-1)} ms`);
        assertFellBack(life, warnings, /template|fork/);
        assert.equal((await kernel.execute('6 * 7')).text, '42');
      }
      // A template that never answers is tried ever more rarely; else each of the six would wait for it.
      assert.ok(took.filter((ms) => ms > 1_000).length <= 3, `the starts took ${took.map(Math.round).join(', ')} ms`);
      await until('none of those that were forked is left', () => !forked().some(isAlive));
      await host.close({ graceMs: 500 });
      assert.ok(!forked().some(isAlive), 'nor afterwards');
    });

    test(`${hook}: with launch "fork" the start fails in time, and works once the hook does`, async (t) => {
      const { name, env, flag, forked } = hookModule(t, hook, 'time.sleep(600)');
      const host = startHost(t, {
        launch: 'fork',
        shell: 'plain',
        preload: [name],
        defaults: { env, inheritEnv: 'all', startTimeoutMs: 1_500 },
      });
      const kernel = host.kernel();
      await ok(kernel, 'x = 1');
      writeFileSync(flag, '');
      const late = host.kernel();
      const began = performance.now();
      const error = await failureOf(late.start());
      const took = performance.now() - began;
      assert.equal(error.code, 'ERR_KERNEL_START');
      assert.match(error.message, hook === 'after_in_child' ? /not ready within 1\.5 s/ : /template did not answer/);
      assert.ok(took < 2_500, `it took ${took} ms`);
      await until('none of those that were forked in vain is left', () => !forked().slice(1).some(isAlive));
      rmSync(flag);
      // A template that has failed may be given a pause.
      await until(
        'the start works',
        () =>
          late.start().then(
            () => true,
            () => false,
          ),
        8_000,
      );
      assert.equal((await late.execute('6 * 7')).text, '42');
      assert.equal((await kernel.execute('x')).text, '1');
    });
  }
});

describe('what the template stands on is taken away', () => {
  test('C90: its folder was gone before it started, and is gone when the next one does', async (t) => {
    const { value } = await runNodeForJson<unknown>(
      t,
      `
      import { mkdtempSync, rmdirSync } from 'node:fs';
      import { once } from 'node:events';
      import { KernelHost } from 'kernelhost';
      const hold = setInterval(() => {}, 1000);
      const folder = mkdtempSync('/tmp/kernelhost-test-');
      process.chdir(folder);
      rmdirSync(folder);
      const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', defaults: { cwd: '/' } });
      const start = async () => { const { text, life } = await host.kernel().execute('import os; os.getcwd()'); return [text, life.launch, life.launchReason]; };
      const first = await start();
      const { pid } = await host.warm();
      const ended = once(host, 'template');
      process.kill(pid, 'SIGKILL');
      await ended;
      const second = await start();
      await host.close();
      clearInterval(hold);
      console.log(JSON.stringify([first, second]));
      `,
    );
    assert.deepEqual(value, [
      ["'/'", 'fork', null],
      ["'/'", 'fork', null],
    ]);
  });

  /** A small environment of its own, and where its packages are. */
  function makeVenv(t: TestContext): { folder: string; python: string; packages: string } {
    const folder = join(temporaryFolder(t), 'venv');
    execFileSync(realInterpreter(), ['-m', 'venv', '--without-pip', folder]);
    const python = join(folder, 'bin', 'python');
    const packages = execFileSync(python, ['-c', 'import sysconfig; print(sysconfig.get_path("purelib"))'], {
      encoding: 'utf8',
    }).trim();
    return { folder, python, packages };
  }

  test('its site-packages are touched, replaced, deleted and back again: each next start is a fork with what is there now', async (t) => {
    const { python, packages } = makeVenv(t);
    writeModules(packages, { here: 'value = "first"' });
    const host = startHost(t, { python, shell: 'plain' });
    const { warnings } = listen(host);
    const old = host.kernel();
    await ok(old, 'import here');
    const look =
      'import importlib.util, json; print(json.dumps(importlib.util.find_spec("here") and __import__("here").value))';
    let template = await host.warm();
    const changes: [name: string, change: () => void, found: string | null][] = [
      ['touched', () => utimesSync(packages, new Date(), new Date(Date.now() + 5_000)), 'first'],
      [
        'replaced',
        () => {
          renameSync(packages, `${packages}.old`);
          mkdirSync(packages);
          writeModules(packages, { here: 'value = "second"' });
        },
        'second',
      ],
      ['deleted', () => rmSync(packages, { recursive: true }), null],
      ['back again', () => renameSync(`${packages}.old`, packages), 'first'],
    ];
    for (const [name, change, found] of changes) {
      change();
      const [one, other] = [host.kernel(), host.kernel()];
      assert.equal(await json(one, look), found, name);
      assert.equal(await json(other, look), found, name);
      const now = await host.warm();
      assert.notEqual(now.pid, template.pid, `${name}: what has changed is noticed`);
      for (const { pid } of [one, other]) {
        assert.equal(processStat(pid ?? 0)?.parent, now.pid, `${name}: and one template is enough`);
      }
      template = now;
      assert.equal((await old.execute('here.value')).text, "'first'");
    }
    assert.deepEqual(warnings, []);
  });

  test('its whole environment is deleted: its kernels go on, a start says so at once, and it works when it is back', async (t) => {
    const { folder, python } = makeVenv(t);
    const host = startHost(t, { python, shell: 'plain' });
    const { check } = await fiveKernels(host, 1);
    renameSync(folder, `${folder}.away`);
    const kernel = host.kernel();
    for (let attempt = 0; attempt < 2; attempt++) {
      const began = performance.now();
      const error = await failureOf(kernel.start());
      assert.ok(performance.now() - began < 2_000);
      assert.equal(error.code, 'ERR_KERNEL_START');
      assert.ok(error.message.includes(python), error.message);
      assert.match(error.message, /there is no such file/);
    }
    await check();
    renameSync(`${folder}.away`, folder);
    assert.equal((await kernel.execute('6 * 7')).text, '42');
    await forksAgain(host);
  });
});

describe('the template has no descriptors left', () => {
  test('because its limit was lowered from outside: kernels go on, starts say why, a healthy one follows', async (t) => {
    // A fork brings six descriptors and takes a seventh. Some of these limits fail when those arrive, some after.
    for (const room of [0, 3, 5, 6, 7, 8]) {
      const host = startHost(t, { shell: 'plain' });
      const { warnings } = listen(host);
      const old = host.kernel();
      await ok(old, `x = ${room}`);
      const template = await host.warm();
      const limit = descriptorCount(template.pid) + room;
      execFileSync('prlimit', ['--pid', String(template.pid), `--nofile=${limit}:${limit}`]);
      const kernels = Array.from({ length: 3 }, () => host.kernel());
      const began = performance.now();
      const lives = await within('the starts', Promise.all(kernels.map((kernel) => kernel.start())));
      assert.ok(performance.now() - began < 4_000, `with room for ${room}: ${performance.now() - began} ms`);
      for (const life of lives.filter(({ launch }) => launch === 'spawn')) {
        assertFellBack(life, warnings, /template.*(descriptor|EMFILE|open files)/s);
      }
      if (room === 0) assert.ok(lives.some(({ launch }) => launch === 'spawn'));
      const results = await Promise.all(kernels.map((kernel, index) => kernel.execute(`${index}`)));
      assert.deepEqual(
        results.map(({ text }) => text),
        ['0', '1', '2'],
      );
      await forksAgain(host);
      // What the last kernel of the template can open is its own affair, and no small number.
      const files = 'import tempfile; files = [tempfile.TemporaryFile() for _ in range(50)]; len(files)';
      const fresh = host.kernel();
      assert.equal((await fresh.execute(files)).text, '50', `with room for ${room}`);
      assert.equal((await old.execute('x')).text, String(room));
      await host.close({ graceMs: 500 });
    }
  });

  test('because a preload has opened all: it says so, and kernels are spawned cold', async (t) => {
    const folder = temporaryFolder(t);
    for (const left of [0, 5, 20]) {
      const name = `opens_all_but_${left}`;
      writeModules(folder, {
        [name]: [
          'import os',
          'kept = []',
          'try:',
          '    while True: kept.append(os.open("/dev/null", os.O_RDONLY))',
          'except OSError: pass',
          `for _ in range(${left}): os.close(kept.pop())`,
        ].join('\n'),
      });
      const { value } = await runNodeForJson<{
        lives: Life[];
        warnings: string[];
        texts: string[];
        ms: number;
        open: number;
      }>(
        t,
        `
        import { KernelHost } from 'kernelhost';
        const env = { PYTHONPATH: ${JSON.stringify(folder)} };
        const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', preload: ['${name}'], defaults: { env, inheritEnv: 'all' } });
        const warnings = [];
        host.on('warning', ({ code, message }) => warnings.push(code + ' ' + message));
        const kernels = [host.kernel(), host.kernel(), host.kernel()];
        const began = performance.now();
        const lives = [];
        for (const kernel of kernels) lives.push(await kernel.start());
        const ms = performance.now() - began;
        const texts = (await Promise.all(kernels.map((kernel) => kernel.execute('6 * 7')))).map(({ text }) => text);
        const open = Number((await kernels[2].execute('import os; len(os.listdir("/proc/self/fd"))')).text);
        await host.close();
        console.log(JSON.stringify({ lives, warnings, texts, ms, open }));
        `,
        { through: ['prlimit', '--nofile=256:256'] },
      );
      assert.deepEqual(value.texts, ['42', '42', '42']);
      assert.ok(value.ms < 5_000, `${value.ms} ms`);
      assert.ok(value.open < 15, `a kernel has ${value.open} descriptors`);
      if (left === 20) {
        assert.deepEqual(
          value.lives.map(({ launch, launchReason }) => launchReason ?? launch),
          ['fork', 'fork', 'fork'],
        );
      } else {
        for (const life of value.lives) {
          assertFellBack(life, value.warnings, /template.*(EMFILE|open files|descriptor)/s);
        }
      }
    }
  });
});

test('a template that ends while it warms takes no kernel with it, and is not started over and over', async (t) => {
  const folder = temporaryFolder(t);
  const runs = join(folder, 'runs');
  writeModules(folder, {
    dies: `import os, signal\nopen(${JSON.stringify(runs)}, "a").write("x")\nos.kill(os.getpid(), signal.SIGKILL)`,
  });
  const host = startHost(t, {
    shell: 'plain',
    preload: ['dies'],
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  const { warnings } = listen(host);
  for (let attempt = 0; attempt < 8; attempt++) {
    const kernel = host.kernel();
    const life = await kernel.start();
    assertFellBack(life, warnings, /template.*SIGKILL/);
    assert.equal((await kernel.execute('6 * 7')).text, '42');
  }
  assert.ok(existsSync(runs));
  assert.ok(
    readFileSync(runs, 'utf8').length <= 4,
    `the template was started ${readFileSync(runs, 'utf8').length} times`,
  );
});
