/** The daemon is killed: what it had started ends with it, whatever the cells are doing. */

import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type TestContext, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { startNode } from '../fixtures/node-run.ts';
import { allProcesses, isAlive, processStat, pythonForTests, temporaryFolder, until } from '../helpers/index.ts';

/** What a cell does when its host dies. `begun` is called when it has come so far. */
const cells: Record<string, string> = {
  'a C function that holds the GIL': 'import ctypes; begun(); ctypes.PyDLL(None).sleep(600)',
  'a busy loop': 'begun()\nwhile True: pass',
  'a busy loop in C that holds the GIL': 'import re; begun(); re.match(r"(a+)+$", "a" * 60 + "b")',
  'a wait for a subprocess': 'import subprocess; begun(); subprocess.run(["sleep", "600"])',
  'a cell that ignores all signals it may':
    'import signal\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nbegun()\nwhile True: signal.pause()',
  'a print that nobody reads': 'begun()\nwhile True: print("x" * 1000)',
};

const started = (file: string) =>
  `import os\ndef begun(): open(${JSON.stringify(file)}, "w").write(str(os.getpid()))\n`;

interface Daemon {
  daemon: number;
  template: number | null;
  lives: number[];
}

/** Starts a daemon with one kernel for each cell, all of them running, and one idle. */
async function startDaemon(
  t: TestContext,
  launch: 'fork' | 'spawn',
  through: readonly string[] = [],
): Promise<{ facts: Daemon; everyone: number[] }> {
  const folder = temporaryFolder(t);
  const codes = Object.values(cells).map((code, index) => started(join(folder, `${index}`)) + code);
  const source = `
    import { existsSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', launch: '${launch}' });
    const template = ${launch === 'fork'} ? (await host.warm()).pid : null;
    const idle = host.kernel();
    await idle.execute('import subprocess; child = subprocess.Popen(["sleep", "600"])');
    const kernels = ${JSON.stringify(codes)}.map((code) => {
      const kernel = host.kernel();
      kernel.execute(code, code.includes('print') ? { onOutput: () => new Promise(() => {}) } : {}).catch(() => {});
      return kernel;
    });
    const begun = () => kernels.every((_, index) => existsSync(${JSON.stringify(`${folder}/`)} + index));
    while (!begun()) await new Promise((resolve) => setTimeout(resolve, 5));
    console.log(JSON.stringify({ daemon: process.pid, template, lives: [idle, ...kernels].map(({ pid }) => pid) }));
  `;
  const { line } = startNode(t, source, { through });
  const facts = await line<Daemon>();
  const leaders = new Set([...facts.lives, facts.template]);
  const family = () => allProcesses().filter(({ session }) => leaders.has(session));
  await until('the subprocesses run', () => family().filter(({ pid }) => !leaders.has(pid)).length >= 2);
  const everyone = family().map(({ pid }) => pid);
  assert.ok(everyone.length >= facts.lives.length + 2 + (facts.template === null ? 0 : 1));
  assert.ok(everyone.every(isAlive));
  return { facts, everyone };
}

async function allGone(everyone: number[]): Promise<void> {
  const left = () => everyone.filter(isAlive);
  await until('all of the daemon is gone', () => left().length === 0, 2_000).catch(() => {
    assert.deepEqual(
      left().map((pid) => processStat(pid)),
      [],
    );
  });
}

for (const launch of ['fork', 'spawn'] as const) {
  test(`C74: SIGKILL of the daemon ends its kernels and their children in two seconds, also with the GIL held (${launch})`, async (t) => {
    const { facts, everyone } = await startDaemon(t, launch);
    process.kill(facts.daemon, 'SIGKILL');
    await allGone(everyone);
  });

  test(`C77: the same under a process that takes the orphans to itself (${launch})`, async (t) => {
    const script = fileURLToPath(new URL('../fixtures/node-under-subreaper.py', import.meta.url));
    const { facts, everyone } = await startDaemon(t, launch, [pythonForTests(), script]);
    const subreaper = processStat(facts.daemon)?.parent;
    assert.notEqual(subreaper, 1);
    assert.notEqual(subreaper, process.pid);
    process.kill(facts.daemon, 'SIGKILL');
    await allGone(everyone);
  });
}

test('C74: when daemon and template are killed in one go, or the template first, nothing is left either', async (t) => {
  for (const order of ['daemon first', 'template first'] as const) {
    const { facts, everyone } = await startDaemon(t, 'fork');
    const pids = [facts.daemon, facts.template ?? 0];
    for (const pid of order === 'daemon first' ? pids : pids.reverse()) process.kill(pid, 'SIGKILL');
    await allGone(everyone);
  }
});

test('C74: a stopped template and stopped kernels do not outlive the daemon', async (t) => {
  const { facts, everyone } = await startDaemon(t, 'fork');
  for (const pid of facts.lives) process.kill(pid, 'SIGSTOP');
  process.kill(facts.daemon, 'SIGKILL');
  await allGone(everyone);
});

test('C74: a daemon that ends by process.exit(), an uncaught error or a signal leaves nothing', async (t) => {
  for (const end of [
    'process.exit(3)',
    'queueMicrotask(() => { throw new Error("over"); })',
    'process.kill(process.pid, "SIGTERM")',
  ]) {
    const source = `
      import { KernelHost } from 'kernelhost';
      import { once } from 'node:events';
      process.setUncaughtExceptionCaptureCallback(() => process.exit(4));
      const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain' });
      const { pid: template } = await host.warm();
      const kernel = host.kernel();
      kernel.execute('print("begun", flush=True)\\nwhile True: pass', { onOutput: () => {
        console.log(JSON.stringify([template, kernel.pid]));
        setTimeout(() => { ${end}; }, 50);
      } }).catch(() => {});
    `;
    const pids = await startNode(t, source).line<number[]>();
    await allGone(pids);
  }
});

test('C74: a daemon killed while its kernels and template are starting leaves nothing', async (t) => {
  const folder = temporaryFolder(t);
  const pids = join(folder, 'pids');
  writeFileSync(pids, '');
  // Every interpreter tells its pid as the first thing it does.
  writeFileSync(
    join(folder, 'sitecustomize.py'),
    `import os, time\nwith open(${JSON.stringify(pids)}, "a") as file: file.write(f"{os.getpid()}\\n")\ntime.sleep(600)`,
  );
  const source = `
    import { readFileSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const env = { PYTHONPATH: ${JSON.stringify(folder)} };
    for (const launch of ['fork', 'spawn']) {
      const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', launch, defaults: { env, inheritEnv: 'all' } });
      host.kernel().start().catch(() => {});
    }
    let found = [];
    while (found.length < 2) {
      await new Promise((resolve) => setTimeout(resolve, 5));
      found = readFileSync(${JSON.stringify(pids)}, 'utf8').split('\\n').filter(Boolean).map(Number);
    }
    console.log(JSON.stringify({ daemon: process.pid, found }));
  `;
  const { daemon, found } = await startNode(t, source).line<{ daemon: number; found: number[] }>();
  assert.ok(found.every(isAlive));
  process.kill(daemon, 'SIGKILL');
  await allGone(found);
});
