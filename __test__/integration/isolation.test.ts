/** Kernels beside each other, beside another host, and beside what their own cells start; and nothing that adds up. */

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { childrenOf, ok } from '../fixtures/forkserver-look.ts';
import {
  descriptorCount,
  hasModule,
  isAlive,
  isGone,
  processStat,
  startHost,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);
const launches = ['fork', 'spawn'] as const;

function cpuTicks(pid: number): number {
  const text = readFileSync(`/proc/${pid}/stat`, 'utf8');
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  return Number(fields[11]) + Number(fields[12]);
}

for (const shell of shells) {
  for (const launch of launches) {
    test(`C67: what os.fork() in a cell leaves behind never answers, uses no CPU, and dies with the kernel (${shell}, ${launch})`, async (t) => {
      const file = join(temporaryFolder(t), 'pid');
      const kernel = startHost(t, { shell, launch }).kernel();
      // The child runs off the end of its cell.
      const off = await ok(
        kernel,
        'import os\npid = os.fork()\nprint("parent" if pid else "child", flush=True)\nbool(pid)',
      );
      assert.equal(off.text, 'True');
      await ok(kernel, 'if pid: status = os.waitpid(pid, 0)[1]');
      assert.equal((await ok(kernel, 'os.waitstatus_to_exitcode(status)')).text, '0');
      // One whose cell fails, one that calls exit(), one that leaves a cell through SystemExit.
      for (const [end, code] of [
        ['1 / 0', 1],
        ['exit(3)', 3],
        ['raise SystemExit(4)', 4],
        ['os._exit(5)', 5],
      ] as const) {
        const result = await ok(
          kernel,
          `pid = os.fork()\nif not pid: ${end}\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])`,
        );
        if (end === 'raise SystemExit(4)') assert.match(result.text ?? '', /^[14]$/, end);
        else assert.equal(result.text, String(code), end);
      }
      // One that lives on in a loop of its own, after its cell.
      await ok(
        kernel,
        [
          'import threading, time',
          'pid = os.fork()',
          'if not pid:',
          `    open(${JSON.stringify(file)}, "w").write(str(os.getpid()))`,
          '    while True: time.sleep(0.05)',
        ].join('\n'),
      );
      await until('the child runs', () => {
        try {
          return readFileSync(file, 'utf8') !== '';
        } catch {
          return false;
        }
      });
      const child = Number(readFileSync(file, 'utf8'));
      const before = cpuTicks(child);
      for (let i = 0; i < 20; i++) assert.equal((await ok(kernel, `${i}`)).text, String(i));
      await sleep(300);
      assert.ok(cpuTicks(child) - before < 10, 'it spins');
      assert.ok(isAlive(child));
      await kernel.kill();
      await until('the child is gone', () => !isAlive(child));
      assert.equal((await kernel.execute('1 + 1')).text, '2');
    });
  }

  test(`C67: a multiprocessing pool by fork and by spawn works in a cell (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    for (const method of ['fork', 'spawn', 'forkserver']) {
      const code = [
        'import multiprocessing, os',
        `with multiprocessing.get_context(${JSON.stringify(method)}).Pool(2) as pool:`,
        '    found = pool.map(abs, [-1, -2, -3])',
        'found',
      ].join('\n');
      const result = await within(method, kernel.execute(code, { timeoutMs: 14_000 }));
      assert.deepEqual([result.error, result.text], [null, '[1, 2, 3]'], method);
    }
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
  });
}

test('each kernel has variables, a cwd, an environment and a umask of its own', async (t) => {
  const folder = temporaryFolder(t);
  const host = startHost(t, { launch: 'fork' });
  const [a, b] = [host.kernel(), host.kernel()];
  const before = await ok(b, 'import os, sys; os.getcwd(), os.environ.get("SHARED"), len(sys.path)');
  await ok(
    a,
    `import os, sys; x = 1; os.chdir(${JSON.stringify(folder)}); os.environ["SHARED"] = "a"; sys.path.append("/nowhere"); os.umask(0o077)`,
  );
  await ok(a, 'import json; json.dumps = None');
  assert.equal((await b.execute('x')).error?.name, 'NameError');
  assert.equal((await ok(b, 'os.getcwd(), os.environ.get("SHARED"), len(sys.path)')).text, before.text);
  assert.equal((await ok(b, 'import json; json.dumps([1])')).text, "'[1]'");
  const later = host.kernel();
  assert.equal((await ok(later, 'import json, os; json.dumps(os.environ.get("SHARED"))')).text, "'null'");
});

test('two hosts in one process have nothing to do with each other', async (t) => {
  const [one, other] = [startHost(t, { launch: 'fork' }), startHost(t, { launch: 'fork', shell: 'plain' })];
  const [first, second] = await Promise.all([one.warm(), other.warm()]);
  assert.notEqual(first.pid, second.pid);
  const [a, b] = [one.kernel(), other.kernel()];
  const exits: string[] = [];
  one.on('exit', (kernel) => exits.push(`one ${kernel.id}`));
  other.on('exit', (kernel) => exits.push(`other ${kernel.id}`));
  assert.equal(a.id, b.id, 'ids are of a host');
  await Promise.all([ok(a, 'x = 1'), ok(b, 'x = 2')]);
  assert.deepEqual([(await ok(a, 'x')).text, (await ok(b, 'x')).text], ['1', '2']);
  const pending = b.execute('import time; time.sleep(0.5); x');
  await one.close();
  assert.equal((await pending).text, '2');
  assert.ok(isAlive(second.pid) && !isAlive(first.pid));
  await assert.rejects(a.execute('1'), { code: 'ERR_KERNEL_CLOSED' });
  await b.kill();
  await until('the exits', () => exits.length === 2);
  assert.deepEqual(exits, [`one ${a.id}`, `other ${b.id}`]);
  assert.equal((await b.execute('1')).text, '1');
});

test('a kernel that floods, one that spins and one that dies do not hold up another', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const [flood, spin, die, quick] = [host.kernel(), host.kernel(), host.kernel(), host.kernel()];
  await ok(quick, '1');
  const flooding = flood.execute('while True: print("x" * 10_000)');
  const spinning = spin.execute('while True: pass');
  const dying = (async () => {
    for (let round = 0; round < 10; round++) await die.execute('import os; os._exit(1)').catch(() => {});
  })();
  const times: number[] = [];
  for (let i = 0; i < 100; i++) {
    const began = performance.now();
    assert.equal((await ok(quick, `${i}`)).text, String(i));
    times.push(performance.now() - began);
  }
  times.sort((a, b) => a - b);
  assert.ok((times[50] ?? 0) < 100, `median ${times[50]} ms`);
  await dying;
  await Promise.all([flood.interrupt(), spin.interrupt()]);
  assert.deepEqual([(await flooding).status, (await spinning).status], ['interrupted', 'interrupted']);
});

function openFolders(): string[] {
  return readdirSync(tmpdir()).filter((name) => !name.startsWith('kernelhost-test-'));
}

for (const launch of launches) {
  test(`C70: start, execute and stop, over and over, a third killed mid-cell, leave nothing behind (${launch})`, async (t) => {
    const host = startHost(t, { launch, shell: 'plain' });
    const template = launch === 'fork' ? await host.warm() : null;
    const cycles = launch === 'fork' ? 150 : 30;
    const cycle = async (number: number) => {
      const kernel = host.kernel();
      assert.equal((await kernel.execute(`${number}`)).text, String(number));
      if (number % 3 === 0) {
        const call = kernel.execute('import time; time.sleep(600)');
        const { pid } = kernel;
        await kernel.kill();
        await assert.rejects(call, { code: 'ERR_KERNEL_DIED' });
        await until('it is reaped', () => isGone(pid ?? 0));
      }
      await kernel.close();
    };
    const measure = () => ({
      descriptors: descriptorCount(process.pid),
      threads: processStat(process.pid)?.threads ?? 0,
      'descriptors of the template': template ? descriptorCount(template.pid) : 0,
      'threads of the template': template ? (processStat(template.pid)?.threads ?? 0) : 0,
      children: childrenOf(process.pid).length + (template ? childrenOf(template.pid).length : 0),
      kernels: host.kernels.length,
    });
    for (let number = 0; number < 6; number++) await cycle(number);
    const files = openFolders().length;
    const before = measure();
    const memory = template && residentKb(template.pid);
    for (let number = 0; number < cycles; number += 5) {
      await Promise.all([0, 1, 2, 3, 4].map((offset) => cycle(number + offset)));
    }
    const more = () => {
      const after = Object.entries(measure());
      return after.filter(([name, count]) => count > before[name as keyof typeof before]);
    };
    await until('nothing is more than before', () => more().length === 0, 5_000).catch(() => {
      assert.deepEqual(more(), [], `before: ${JSON.stringify(before)}`);
    });
    // Other programs use the same folder; ours would have left one for each cycle.
    assert.ok(openFolders().length - files < cycles / 2);
    if (template && memory) assert.ok(residentKb(template.pid) - memory < 2_000, 'the template grows');
  });
}

function residentKb(pid: number): number {
  return Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1]);
}
