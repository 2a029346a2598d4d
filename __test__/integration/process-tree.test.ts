/** Every end of a life takes with it all that the life has started, and nothing else; and says what had to be ended. */

import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, describe, type TestContext, test } from 'node:test';
import { type ExitReason, type Kernel, KernelHost } from 'kernelhost';
import { makeCgroup } from '../fixtures/cgroups.ts';
import { deathOf } from '../fixtures/endings-calls.ts';
import {
  allKinds,
  carriers,
  Family,
  familyCode,
  fewKinds,
  type Grown,
  grow,
  growBy,
  growCode,
  type Reach,
} from '../fixtures/family.ts';
import { startNode } from '../fixtures/node-run.ts';
import {
  allProcesses,
  type HostForTest,
  isAlive,
  isGone,
  next,
  processStat,
  pythonForTests,
  startHost,
  until,
  within,
} from '../helpers/index.ts';

interface End {
  reach: Reach;
  closes: boolean;
  run(kernel: Kernel, host: HostForTest): Promise<unknown>;
}

const byItself = (code: string): End['run'] => {
  return (kernel) => deathOf(kernel.execute(code));
};

const ends: Record<string, End> = {
  'exit()': { reach: 'life', closes: false, run: byItself('exit()') },
  'os._exit()': { reach: 'life', closes: false, run: byItself('import os; os._exit(3)') },
  'a crash': { reach: 'life', closes: false, run: byItself('import ctypes; ctypes.memset(1, 0, 1)') },
  'SIGKILL from outside': {
    reach: 'life',
    closes: false,
    run: async (kernel) => process.kill(Number(kernel.pid), 'SIGKILL'),
  },
  'kernel.kill()': { reach: 'group', closes: false, run: (kernel) => kernel.kill() },
  'kernel.restart()': { reach: 'group, politely', closes: false, run: (kernel) => kernel.restart() },
  'kernel.close()': { reach: 'group, politely', closes: true, run: (kernel) => kernel.close({ graceMs: 500 }) },
  'host.close()': { reach: 'group, politely', closes: true, run: (_, host) => host.close({ graceMs: 500 }) },
};

const launches = ['fork', 'spawn'] as const;
type Launch = (typeof launches)[number];

/** Another host of this process, with a kernel and what that has started. It is there during all tests of the file. */
class Bystander {
  readonly host = new KernelHost({ python: pythonForTests(), shell: 'plain' });
  readonly #kernel = this.host.kernel();
  readonly #tasks: (() => void | Promise<void>)[] = [];
  #family: Family | null = null;
  #pid: number | null = null;

  async start(): Promise<void> {
    this.#family = await grow({ after: (task) => void this.#tasks.push(task) }, this.#kernel, fewKinds);
    this.#pid = this.#kernel.pid;
  }

  assertUnharmed(): void {
    this.#family?.assertUnharmed();
    assert.equal(this.#kernel.pid, this.#pid);
    assert.equal(this.#kernel.lastExit, null);
  }

  async end(): Promise<void> {
    await this.host.close();
    const left = this.#family?.alive() ?? [];
    for (const task of this.#tasks) await task();
    assert.deepEqual(left, []);
  }
}

const bystander = new Bystander();
before(() => bystander.start());
after(() => bystander.end());

for (const launch of launches) {
  describe(`what a life has started ends with it (${launch})`, () => {
    for (const [name, { reach, closes, run }] of Object.entries(ends)) {
      test(`C65: ${name} ends every kind of process, tells which had to be ended, and touches nobody else's`, async (t) => {
        const host = startHost(t, { shell: 'plain', launch });
        const [kernel, sibling] = [host.kernel(), host.kernel()];
        const [family, others] = await Promise.all([grow(t, kernel), grow(t, sibling, fewKinds)]);
        const exited = next(kernel, 'exit');
        const [[exit]] = await Promise.all([exited as Promise<[ExitReason]>, run(kernel, host)]);
        await family.gone();
        family.assertTold(exit, reach);
        if (name === 'host.close()') {
          await others.gone();
        } else {
          others.assertUnharmed();
          assert.equal((await within('a cell of the sibling', sibling.execute('1 + 1'))).text, '2');
          assert.equal(sibling.lastExit, null);
        }
        bystander.assertUnharmed();
        if (!closes) assert.equal((await within('the next cell', kernel.execute('1 + 1'))).text, '2');
      });
    }

    test('C65: SIGKILL of the host ends every kind of process, and touches no other host', async (t) => {
      const { line, child } = startNode(t, hostScript(launch));
      const family = new Family(t, await line<Grown>());
      child.kill('SIGKILL');
      await family.gone();
      bystander.assertUnharmed();
    });

    test('a life that has started nothing leaves nothing to tell, however it ends', async (t) => {
      for (const [name, { run }] of Object.entries(ends)) {
        const host = startHost(t, { shell: 'plain', launch });
        const kernel = host.kernel();
        await kernel.execute('import subprocess; subprocess.run(["true"])');
        const exited = next(kernel, 'exit');
        await run(kernel, host);
        const [exit] = (await exited) as [ExitReason];
        assert.deepEqual(exit.leftovers, { ended: [], remaining: [] }, name);
      }
    });

    for (const method of ['fork', 'spawn', 'forkserver']) {
      test(`C66: a pool of eight workers that hold memory (${method}) ends with a kernel that is killed`, async (t) => {
        const host = startHost(t, { shell: 'plain', launch });
        const kernel = host.kernel();
        const family = await growBy(t, kernel, familyCode(`family.big_pool(${JSON.stringify(method)})`));
        assert.ok(family.members.length >= 8);
        assert.equal(family.shared.length > 0, true);
        const exited = next(kernel, 'exit');
        process.kill(Number(kernel.pid), 'SIGKILL');
        const [exit] = (await exited) as [ExitReason];
        await family.gone();
        assert.deepEqual(exit.leftovers.remaining, []);
      });
    }

    test('C69: twenty restarts over children that live on: none of them is waited for, none is left', async (t) => {
      const host = startHost(t, { shell: 'plain', launch });
      const kernel = host.kernel();
      // A fork without a program of its own: it has all that the kernel has open.
      const code = [
        'import os, signal, time',
        'ours, theirs = os.pipe()',
        'child = os.fork()',
        'if child == 0:',
        '    os.setsid()',
        '    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)',
        '    os.write(theirs, b"x")',
        '    time.sleep(600)',
        'os.read(ours, 1)',
        'print(child)',
      ].join('\n');
      for (let round = 0; round < 20; round++) {
        const { stdout, life } = await kernel.execute(code);
        const child = Number(stdout);
        assert.equal(life.generation, round + 1);
        assert.ok(isAlive(child));
        const exited = next(kernel, 'exit');
        const { generation } = await within('a restart', kernel.restart(), 2_000);
        assert.equal(generation, round + 2);
        const [{ leftovers }] = (await exited) as [ExitReason];
        assert.ok(!isAlive(child), 'gone before the next life begins');
        assert.deepEqual(
          leftovers.ended.map(({ pid }) => pid),
          [child],
        );
      }
    });
  });
}

function hostScript(launch: Launch): string {
  return `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', launch: '${launch}' });
    const { stdout, error } = await host.kernel().execute(${JSON.stringify(growCode(allKinds))});
    if (error) throw new Error(error.traceback.join('\\n'));
    console.log(stdout.trim());
    setInterval(() => {}, 1_000);
  `;
}

test('an emptied environment in a session of its own is found below the template, when it can be nobody else’s', async (t) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const kernel = host.kernel();
  const family = await grow(t, kernel, ['emptied_alone']);
  const [exit] = await Promise.all([next(kernel, 'exit'), kernel.kill()]);
  await family.gone();
  assert.deepEqual(
    (exit as [ExitReason])[0].leftovers.ended,
    family.members.map(({ pid, command }) => ({ pid, command })),
  );
});

test('with IPython too, what a cell began with ! and %%bash ends with the life', async (t) => {
  const host = startHost(t);
  const kernel = host.kernel();
  const { stdout } = await kernel.execute(
    '!sleep 600 >/dev/null 2>&1 & echo $!\n!setsid sleep 600 >/dev/null 2>&1 & echo $!',
  );
  const more = await kernel.execute('%%bash\nsetsid sleep 600 >/dev/null 2>&1 &\necho $!');
  const pids = `${stdout} ${more.stdout}`.split(/\s+/).filter(Boolean).map(Number);
  assert.equal(pids.length, 3);
  assert.ok(pids.every(isAlive), `${pids}`);
  const exited = next(kernel, 'exit');
  process.kill(Number(kernel.pid), 'SIGKILL');
  const exit = await exited;
  await until('they are gone', () => pids.every((pid) => !isAlive(pid)), 2_000);
  const told = (exit as [ExitReason])[0].leftovers.ended.map(({ pid }) => pid);
  assert.deepEqual(
    told.sort((a, b) => a - b),
    pids.sort((a, b) => a - b),
  );
});

test('what is started while the tree is being ended is ended too', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const kernel = host.kernel();
  // Each process is followed by the next one before it can be found; the pid on the last line changes all the time.
  const code = [
    'import os, subprocess, time',
    'def run_away():',
    '    until = time.monotonic() + 20',
    '    while time.monotonic() < until:',
    '        if os.fork(): os._exit(0)',
    '        os.setsid()',
    'for _ in range(3):',
    '    if os.fork() == 0:',
    '        os.setsid()',
    '        run_away()',
    '        os._exit(0)',
    'print("begun")',
  ].join('\n');
  await kernel.execute(code);
  const marker = (await kernel.execute('print(os.environ["KERNELHOST_LIFE"])')).stdout.trim();
  const began = performance.now();
  const [told] = (await Promise.all([next(kernel, 'exit'), kernel.kill()])) as [[ExitReason], unknown];
  const [exit] = told;
  assert.ok(performance.now() - began < 3_000);
  assert.deepEqual(exit.leftovers.remaining, []);
  await nobodyCarries(marker);
});

/** Looked at several times: what forks all the time can hide from a single look. */
async function nobodyCarries(marker: string): Promise<void> {
  for (let round = 0; round < 20; round++) {
    assert.deepEqual(
      carriers(
        allProcesses().map(({ pid }) => pid),
        marker,
      ),
      [],
    );
  }
}

test('what cannot be ended is told with its reason, in bounded time, and the kernel goes on', async (t) => {
  const frozen = makeCgroup(t, 'freezer', {});
  if (typeof frozen === 'string' || frozen.version === 2) {
    return t.skip(typeof frozen === 'string' ? frozen : 'a version 2 freezer does not hold SIGKILL back');
  }
  const host = startHost(t, { shell: 'plain' });
  const kernel = host.kernel();
  const family = await grow(t, kernel, ['setsid']);
  const [member] = family.members;
  assert.ok(member !== undefined);
  const freeze = (state: string) => writeFileSync(join(frozen.folder, 'freezer.state'), state);
  writeFileSync(join(frozen.folder, 'cgroup.procs'), String(member.pid));
  try {
    freeze('FROZEN');
    const exited = next(kernel, 'exit');
    const killed = performance.now();
    process.kill(Number(kernel.pid), 'SIGKILL');
    const [exit] = (await exited) as [ExitReason];
    assert.ok(performance.now() - killed < 3_000, `${performance.now() - killed} ms`);
    assert.deepEqual(exit.leftovers.ended, []);
    const [remaining, ...more] = exit.leftovers.remaining;
    assert.deepEqual(more, []);
    assert.deepEqual({ pid: remaining?.pid, command: remaining?.command }, { pid: member.pid, command: 'sleep 600' });
    assert.ok((remaining?.why.length ?? 0) > 10, remaining?.why);
    assert.match(exit.message, new RegExp(`${member.pid}.*sleep 600`));
    assert.ok(isAlive(member.pid), String(processStat(member.pid)?.state));
    assert.equal((await within('the next cell', kernel.execute('1 + 1'))).text, '2');
  } finally {
    freeze('THAWED');
  }
  await family.gone();
});

test('two kernels that end at once each end and tell their own processes', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const kernels = Array.from({ length: 6 }, () => host.kernel());
  const families = await Promise.all(kernels.map((kernel) => grow(t, kernel, ['setsid', 'daemon_with_program'])));
  const exits = kernels.map((kernel) => next(kernel, 'exit') as Promise<[ExitReason]>);
  for (const { pid } of kernels) process.kill(Number(pid), 'SIGKILL');
  for (const [index, [exit]] of (await Promise.all(exits)).entries()) {
    const family = families[index];
    await family?.gone();
    const told = exit.leftovers.ended.map(({ pid }) => pid).sort((a, b) => a - b);
    assert.deepEqual(
      told,
      family?.members.map(({ pid }) => pid).sort((a, b) => a - b),
    );
  }
});

test('what has asked to stay is reaped by nobody’s neglect: it ends when it is told to, after the host is gone', async (t: TestContext) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const family = await grow(t, host.kernel(), ['detached']);
  await host.close();
  family.assertUnharmed();
  family.clear();
  await until('no zombies', () => family.members.every(({ pid }) => isGone(pid)));
});
