/**
 * The host goes away, killed or in any ordinary way: what it had started goes with it, whatever that is doing and whatever is
 * killed or stopped at the same time. Every kernel here has children that have left its group and its session.
 */

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { mkdirSync, readdirSync, readlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, type TestContext, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';
import { carriers, escapedKinds, Family, type Grown, grow, growCode } from '../fixtures/family.ts';
import { startNode } from '../fixtures/node-run.ts';
import {
  allProcesses,
  commandLine,
  isAlive,
  processStat,
  pythonForTests,
  startHost,
  temporaryFolder,
  until,
} from '../helpers/index.ts';

const launches = ['fork', 'spawn'] as const;
type Launch = (typeof launches)[number];

const python = JSON.stringify(pythonForTests());
const isRoot = process.getuid?.() === 0;

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

/** The kernels die in the moment the host's memory is taken down; the rest is for a machine with other things to do. */
const KERNELS_MS = 100;
const SLACK_MS = 150;
const REST_MS = 2_000;

interface Facts {
  daemon: number;
  template: number | null;
  lives: number[];
  grown: Grown[];
}

let marks = 0;

/** A daemon that is about to die, and how what it has started is recognised. */
class Daemon {
  readonly folder: string;
  /** Template and lives are given it, and all that these start. */
  readonly mark = `PYTHON_KERNELHOST_TEST=${process.pid}.${++marks}.`;
  readonly line: () => Promise<Facts>;
  facts: Facts = { daemon: 0, template: null, lives: [], grown: [] };
  families: Family[] = [];
  readonly #t: TestContext;

  constructor(t: TestContext, source: (folder: string) => string, through: readonly string[] = []) {
    this.#t = t;
    this.folder = temporaryFolder(t);
    const temporary = join(this.folder, 'tmp');
    mkdirSync(temporary);
    const [name = '', value = ''] = this.mark.split('=');
    const env = { ...process.env, [name]: value, TMPDIR: temporary };
    // What Node says of its own end is not for the reader of the tests, and neither is a core of it.
    const quiet = ['sh', '-c', 'ulimit -c 0; exec "$@" 2>/dev/null', 'sh'];
    const { line } = startNode(t, source(this.folder), { through: [...quiet, ...through], env });
    this.line = line;
  }

  async start(): Promise<this> {
    this.facts = await this.line();
    this.families = this.facts.grown.map((grown) => new Family(this.#t, grown));
    writeFileSync(join(this.folder, 'go'), '');
    return this;
  }

  kill(): void {
    process.kill(this.facts.daemon, 'SIGKILL');
  }

  /** What the daemon had started and is there, the warden too: its marker names the host by pid. */
  left(): number[] {
    const pids = allProcesses()
      .filter(({ pid, state }) => pid !== process.pid && state !== 'Z')
      .map(({ pid }) => pid);
    const host = `-${this.facts.daemon.toString(16).padStart(8, '0')}-`;
    const marked = carriers(pids, 'KERNELHOST_LIFE=').filter((pid) => carriers([pid], host).length > 0);
    return [...new Set([...carriers(pids, this.mark), ...(this.facts.daemon > 1 ? marked : [])])];
  }

  /** From the moment that the daemon is dead. */
  async gone(): Promise<void> {
    await until('the daemon has ended', () => !isAlive(this.facts.daemon));
    const began = performance.now();
    await until('no kernel', () => !this.facts.lives.some(isAlive), REST_MS);
    const took = performance.now() - began;
    assert.ok(took < KERNELS_MS + SLACK_MS, `the last kernel was there for ${took.toFixed()} ms`);
    const rest = () => Math.max(0, began + REST_MS - performance.now());
    for (const family of this.families) await family.gone(rest());
    await until('nothing of the daemon', () => this.left().length === 0, rest()).catch(() => {
      assert.deepEqual(
        this.left().map((pid) => ({ command: commandLine(pid).join(' '), stat: processStat(pid) })),
        [],
        'still there',
      );
    });
    // A process of multiprocessing that is killed leaves the folder of its own sockets; no part of ours makes any file.
    const files = readdirSync(join(this.folder, 'tmp')).filter((name) => !name.startsWith('pymp-'));
    assert.deepEqual(files, [], 'temporary files');
  }
}

/** Hands over what the daemon has, when it has come so far. */
const report = (lives: string, grown: string) =>
  `console.log(JSON.stringify({ daemon: process.pid, template, lives: ${lives}.map(({ pid }) => pid), grown: ${grown} }));`;

const prelude = (launch: Launch) => `
  import { existsSync } from 'node:fs';
  import { KernelHost } from 'kernelhost';
  const host = new KernelHost({ python: ${python}, shell: 'plain', launch: '${launch}' });
  const template = ${launch === 'fork'} ? (await host.warm()).pid : null;
  async function grow(kernel, code = ${JSON.stringify(growCode(escapedKinds))}) {
    const { stdout, error } = await kernel.execute(code);
    if (error) throw new Error(error.traceback.join(' '));
    return JSON.parse(stdout);
  }
  setInterval(() => {}, 1_000);
`;

/** The daemon waits until the test has looked at what it has started. */
const looked = (folder: string) =>
  `while (!existsSync(${JSON.stringify(join(folder, 'go'))})) await new Promise((resolve) => setTimeout(resolve, 2));`;

/** A daemon with one kernel for each cell, all of them running, and one idle. */
function busyDaemon(t: TestContext, launch: Launch, through: readonly string[] = []): Promise<Daemon> {
  const source = (folder: string) => {
    const codes = Object.values(cells).map((code, index) => started(join(folder, `${index}`)) + code);
    return `
      ${prelude(launch)}
      const idle = host.kernel();
      const kernels = ${JSON.stringify(codes)}.map(() => host.kernel());
      const grown = await Promise.all([idle, ...kernels].map((kernel) => grow(kernel)));
      for (const [index, code] of ${JSON.stringify(codes)}.entries()) {
        kernels[index].execute(code, code.includes('print') ? { onOutput: () => new Promise(() => {}) } : {}).catch(() => {});
      }
      const begun = () => kernels.every((_, index) => existsSync(${JSON.stringify(`${folder}/`)} + index));
      while (!begun()) await new Promise((resolve) => setTimeout(resolve, 5));
      ${report('[idle, ...kernels]', 'grown')}
    `;
  };
  return new Daemon(t, source, through).start();
}

/** A daemon with one kernel, which does this once it has told of itself. */
function smallDaemon(t: TestContext, launch: Launch, then: string, code = growCode(escapedKinds)): Promise<Daemon> {
  const source = (folder: string) => `
    ${prelude(launch)}
    const kernel = host.kernel();
    const grown = [await grow(kernel, ${JSON.stringify(code)})];
    ${report('[kernel]', 'grown')}
    ${looked(folder)}
    ${then}
  `;
  return new Daemon(t, source).start();
}

for (const launch of launches) {
  describe(`the host is killed (${launch})`, () => {
    test('C73 C74: whatever the cells are doing, the kernels are gone in a moment and all else in two seconds', async (t) => {
      const daemon = await busyDaemon(t, launch);
      assert.equal(daemon.facts.lives.length, Object.keys(cells).length + 1);
      assert.ok(daemon.facts.lives.every(isAlive));
      daemon.kill();
      await daemon.gone();
    });

    test('C77: the same under a process that takes the orphans to itself', async (t) => {
      const script = fileURLToPath(new URL('../fixtures/node-under-subreaper.py', import.meta.url));
      const daemon = await busyDaemon(t, launch, [pythonForTests(), script]);
      const subreaper = processStat(daemon.facts.daemon)?.parent;
      assert.notEqual(subreaper, 1);
      assert.notEqual(subreaper, process.pid);
      daemon.kill();
      await daemon.gone();
    });

    test('C73: stopped kernels do not outlive it', async (t) => {
      const daemon = await busyDaemon(t, launch);
      for (const pid of daemon.facts.lives) process.kill(pid, 'SIGSTOP');
      daemon.kill();
      await daemon.gone();
    });

    test('C73: fifty kernels with children of their own', async (t) => {
      const source = () => `
        ${prelude(launch)}
        const kernels = Array.from({ length: 50 }, () => host.kernel());
        const grown = await Promise.all(kernels.map((kernel) => grow(kernel, ${JSON.stringify(growCode(['plain', 'setsid']))})));
        ${report('kernels', 'grown')}
      `;
      const daemon = await new Daemon(t, source).start();
      assert.equal(daemon.facts.lives.length, 50);
      daemon.kill();
      await daemon.gone();
    });

    test('C73: 0 to 60 ms after a start', async (t) => {
      for (let delay = 0; delay <= 60; delay += 10) {
        // The first kernel has what would be missed; the second one is on its way.
        const daemon = await smallDaemon(
          t,
          launch,
          `host.kernel().start().catch(() => {}); setTimeout(() => process.kill(process.pid, 'SIGKILL'), ${delay});`,
          growCode(['setsid']),
        );
        await daemon.gone();
      }
    });

    for (const [what, call] of Object.entries({
      'a restart': 'kernel.restart()',
      'a close of the kernel': 'kernel.close()',
      'a close of the host': 'host.close()',
      'a kill()': 'kernel.kill()',
    })) {
      test(`C73: in the middle of ${what}`, async (t) => {
        for (const delay of [0, 2, 5, 10, 30]) {
          const then = `${call}.catch(() => {}); setTimeout(() => process.kill(process.pid, 'SIGKILL'), ${delay});`;
          const daemon = await smallDaemon(t, launch, then);
          await daemon.gone();
        }
      });
    }

    test('C66: pools of all start methods go, and leave nothing in /dev/shm', async (t) => {
      const kinds = growCode(['pool_fork', 'pool_spawn', 'pool_forkserver']);
      const daemon = await smallDaemon(t, launch, '', kinds);
      assert.ok((daemon.families[0]?.shared.length ?? 0) > 0);
      daemon.kill();
      await daemon.gone();
    });

    test('what has asked to stay outlives it', async (t) => {
      const daemon = await smallDaemon(t, launch, '', growCode(['detached']));
      daemon.kill();
      await until('the kernel is gone', () => !daemon.facts.lives.some(isAlive), REST_MS);
      await until('template and warden are gone', () => daemon.left().length === 3, REST_MS);
      daemon.families[0]?.assertUnharmed();
    });
  });
}

test('C74: when daemon and template are killed in one go, or the template first, nothing is left either', async (t) => {
  for (const order of ['daemon first', 'template first'] as const) {
    const daemon = await busyDaemon(t, 'fork');
    const pids = [daemon.facts.daemon, daemon.facts.template ?? 0];
    for (const pid of order === 'daemon first' ? pids : pids.reverse()) process.kill(pid, 'SIGKILL');
    await daemon.gone();
  }
});

test('C74: a template that is stopped, and its kernels with it, do not outlive the daemon', async (t) => {
  for (const withKernels of [false, true]) {
    const daemon = await busyDaemon(t, 'fork');
    process.kill(daemon.facts.template ?? 0, 'SIGSTOP');
    if (withKernels) for (const pid of daemon.facts.lives) process.kill(pid, 'SIGSTOP');
    daemon.kill();
    await daemon.gone();
  }
});

test('C74: a template that was killed long before, with the lives that it had left', async (t) => {
  const daemon = await smallDaemon(t, 'fork', '');
  process.kill(daemon.facts.template ?? 0, 'SIGKILL');
  await until('the template is gone', () => !isAlive(daemon.facts.template ?? 0));
  assert.ok(daemon.facts.lives.every(isAlive));
  daemon.kill();
  await daemon.gone();
});

test('C74: a daemon killed while its kernels and template are starting leaves nothing', async (t) => {
  // Every interpreter tells its pid as the first thing it does.
  const source = (folder: string) => {
    const pids = join(folder, 'pids');
    writeFileSync(pids, '');
    writeFileSync(
      join(folder, 'sitecustomize.py'),
      `import os, time\nwith open(${JSON.stringify(pids)}, "a") as file: file.write(f"{os.getpid()}\\n")\ntime.sleep(600)`,
    );
    return `
      import { readFileSync } from 'node:fs';
      import { KernelHost } from 'kernelhost';
      const env = { PYTHONPATH: ${JSON.stringify(folder)} };
      for (const launch of ['fork', 'spawn']) {
        const host = new KernelHost({ python: ${python}, shell: 'plain', launch, defaults: { env, inheritEnv: 'all' } });
        host.kernel().start().catch(() => {});
      }
      let found = [];
      while (found.length < 2) {
        await new Promise((resolve) => setTimeout(resolve, 5));
        found = readFileSync(${JSON.stringify(pids)}, 'utf8').split('\\n').filter(Boolean).map(Number);
      }
      console.log(JSON.stringify({ daemon: process.pid, template: null, lives: found, grown: [] }));
    `;
  };
  const daemon = await new Daemon(t, source).start();
  assert.ok(daemon.facts.lives.every(isAlive));
  daemon.kill();
  await daemon.gone();
});

/** What is done once the daemon has told of itself. */
const waysOut: Record<string, string> = {
  'process.exit()': 'process.exit(3);',
  'process.exit() in a beforeExit handler': 'process.on("beforeExit", () => process.exit(0)); clearAll();',
  'an uncaught error': 'setTimeout(() => { throw new Error("over"); }, 10);',
  'an unhandled rejection': 'Promise.reject(new Error("over"));',
  SIGTERM: 'process.kill(process.pid, "SIGTERM");',
  SIGHUP: 'process.kill(process.pid, "SIGHUP");',
  SIGINT: 'process.kill(process.pid, "SIGINT");',
  'SIGINT twice, the first one handled':
    'process.once("SIGINT", () => process.kill(process.pid, "SIGINT")); process.kill(process.pid, "SIGINT");',
  'SIGTERM with a handler that exits':
    'process.on("SIGTERM", () => process.exit(0)); process.kill(process.pid, "SIGTERM");',
  'abort()': 'process.abort();',
  SIGSEGV: 'process.kill(process.pid, "SIGSEGV");',
  'a natural end without close()': 'clearAll();',
};

describe('the host ends in an ordinary way', () => {
  for (const [what, then] of Object.entries(waysOut)) {
    test(`C83: ${what} takes along the kernels and what they have started`, async (t) => {
      for (const launch of launches) {
        const source = (folder: string) => `
          ${prelude(launch).replace('setInterval', 'const hold = setInterval')}
          const clearAll = () => clearInterval(hold);
          const kernel = host.kernel();
          const grown = [await grow(kernel, ${JSON.stringify(growCode(['plain', ...escapedKinds]))})];
          ${report('[kernel]', 'grown')}
          ${looked(folder)}
          ${then}
        `;
        const daemon = await new Daemon(t, source).start();
        await daemon.gone();
      }
    });
  }

  test('C83: it ends while a cell runs, which is then cut off', async (t) => {
    for (const launch of launches) {
      const then = `
        kernel.execute('while True: pass').catch(() => {});
        setTimeout(() => process.exit(0), 100);
      `;
      const daemon = await smallDaemon(t, launch, then);
      await daemon.gone();
    }
  });
});

describe('a worker thread ends', () => {
  const workerEnds: Record<string, string> = {
    'worker.terminate()': 'setInterval(() => {}, 1_000);',
    'process.exit()': 'setImmediate(() => process.exit(0));',
    'an uncaught error': 'setImmediate(() => { throw new Error("over"); });',
    'a natural end': '',
  };
  for (const [what, then] of Object.entries(workerEnds)) {
    test(`C103: ${what} takes its kernels along, and what these have started; the main thread keeps its own`, async (t) => {
      for (const launch of launches) {
        const host = startHost(t, { shell: 'plain' });
        const kernel = host.kernel();
        const own = await grow(t, kernel, escapedKinds);
        const source = `
          const { parentPort, workerData } = require('node:worker_threads');
          import(workerData.entry).then(async ({ KernelHost }) => {
            const host = new KernelHost({ python: workerData.python, shell: 'plain', launch: workerData.launch });
            const kernel = host.kernel();
            const { stdout, error } = await kernel.execute(workerData.code);
            if (error) throw new Error(error.traceback.join(' '));
            parentPort.postMessage({ grown: JSON.parse(stdout), pid: kernel.pid });
            // Until the main thread has looked at them.
            parentPort.once('message', () => { ${then} });
          });
        `;
        const entry = new URL('../../index.js', import.meta.url).href;
        const code = growCode(['plain', ...escapedKinds]);
        const worker = new Worker(source, {
          eval: true,
          execArgv: [],
          workerData: { entry, python: pythonForTests(), launch, code },
        });
        const ended = new Promise((resolve) => worker.once('exit', resolve));
        const failed: Error[] = [];
        worker.on('error', (error) => failed.push(error));
        const [{ grown, pid }] = (await once(worker, 'message')) as [{ grown: Grown; pid: number }];
        const family = new Family(t, grown);
        worker.postMessage('end');
        if (what === 'worker.terminate()') await worker.terminate();
        await ended;
        assert.deepEqual(
          failed.map(({ message }) => message),
          what === 'an uncaught error' ? ['over'] : [],
        );
        await family.gone();
        assert.ok(!isAlive(pid));
        own.assertUnharmed();
        assert.equal((await kernel.execute('1 + 1')).life.generation, 1);
      }
    });
  }
});

const IN_NAMESPACE = ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child'];

describe('Node is process 1 of a PID namespace', () => {
  const skip = isRoot ? false : 'a PID namespace can only be made by root';
  for (const launch of launches) {
    for (const way of ['SIGKILL', 'process.exit()']) {
      test(`C78: kernels start, idle and answer there; ${way} ends all (${launch})`, { skip }, async (t) => {
        const source = () => `
          ${prelude(launch)}
          const kernel = host.kernel();
          let exits = 0;
          host.on('exit', () => { exits += 1; });
          const grown = [await grow(kernel)];
          await new Promise((resolve) => setTimeout(resolve, 2_000));
          const { text, life } = await kernel.execute('6 * 7');
          const ended = host.kernel();
          await grow(ended);
          await ended.kill();
          const leftovers = ended.lastExit.leftovers;
          console.log(JSON.stringify({ daemon: process.pid, template, lives: [kernel.pid], grown: [], text, generation: life.generation, exits, leftovers }));
          process.stdin.resume();
          ${way === 'SIGKILL' ? '' : 'setTimeout(() => process.exit(0), 300);'}
        `;
        const daemon = new Daemon(t, source, IN_NAMESPACE);
        const told = (await daemon.line()) as Facts & {
          text: string;
          generation: number;
          exits: number;
          leftovers: { ended: unknown[]; remaining: unknown[] };
        };
        assert.equal(told.daemon, 1);
        assert.deepEqual([told.text, told.generation, told.exits], ['42', 1, 1]);
        assert.deepEqual([told.leftovers.ended.length, told.leftovers.remaining], [escapedKinds.length, []]);
        const marked = daemon.left();
        const namespaces = new Set(marked.map(namespaceOf));
        namespaces.delete(namespaceOf(process.pid));
        assert.equal(namespaces.size, 1, 'one namespace');
        const [namespace] = namespaces;
        const inside = () => allProcesses().filter(({ pid, state }) => state !== 'Z' && namespaceOf(pid) === namespace);
        const init = inside().find(({ parent }) => namespaceOf(parent) !== namespace);
        assert.ok(init !== undefined);
        assert.ok(inside().length >= 2 + escapedKinds.length, `${inside().length}`);
        if (way === 'SIGKILL') process.kill(init.pid, 'SIGKILL');
        else await until('the daemon has ended', () => !isAlive(init.pid));
        await until('the namespace is empty', () => inside().length === 0, REST_MS);
        await until('nobody is left', () => daemon.left().length === 0, REST_MS);
      });
    }
  }
});

function namespaceOf(pid: number): string | null {
  try {
    return readlinkSync(`/proc/${pid}/ns/pid`);
  } catch {
    return null;
  }
}
