/** The monitor of a host, through its socket: who can use it, what it tells, and that the daemon is none the worse for it. */

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { connect, type Socket } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { describe, type TestContext, test } from 'node:test';
import type { KernelSnapshot, Snapshot } from '../../ts/monitor/snapshot.ts';
import { runNode, startNode } from '../fixtures/node-run.ts';
import { next, pythonForTests, startHost, temporaryFolder, until, within } from '../helpers/index.ts';

const python = JSON.stringify(pythonForTests());
const user = process.geteuid?.() ?? 0;
const isRoot = user === 0;
const folderName = `kernelhost-${user}`;

/** Where a daemon that is given this environment puts its sockets. */
function place(t: TestContext): { temporary: string; folder: string; env: NodeJS.ProcessEnv } {
  const temporary = temporaryFolder(t);
  const env: NodeJS.ProcessEnv = { ...process.env, TMPDIR: temporary };
  delete env.XDG_RUNTIME_DIR;
  delete env.KERNELHOST_MONITOR;
  return { temporary, folder: join(temporary, folderName), env };
}

/** A daemon that goes on until it is killed, and tells its warnings. */
const daemon = (options: object = { monitor: true }) => `
  import { KernelHost } from 'kernelhost';
  process.umask(0);
  const host = new KernelHost({ python: ${python}, shell: 'plain', launch: 'spawn', ...${JSON.stringify(options)} });
  host.on('warning', (warning) => console.log(JSON.stringify({ warning })));
  setInterval(() => {}, 1_000);
  const { text } = await host.kernel().execute('6 * 7');
  console.log(JSON.stringify({ text }));
`;

interface Told {
  text?: string;
  warning?: { code: string; message: string };
}

/** The daemon's warning, once it has also run a cell. */
async function warningOf(line: () => Promise<Told>): Promise<string> {
  const told = [await line(), await line()];
  assert.equal(told.find(({ text }) => text !== undefined)?.text, '42', 'the host does not work');
  const warning = told.find(({ warning }) => warning !== undefined)?.warning;
  assert.equal(warning?.code, 'WARN_MONITOR');
  return warning?.message ?? '';
}

const mode = (path: string) => (statSync(path).mode & 0o7777).toString(8);
const sockets = (folder: string) => readdirSync(folder).filter((name) => name.endsWith('.sock'));

async function oneSocket(folder: string): Promise<string> {
  await until('the socket is there', () => existsSync(folder) && sockets(folder).length > 0);
  return join(folder, sockets(folder)[0] ?? '');
}

/** A client; `next` gives null at the end. */
async function look(t: TestContext, path: string): Promise<{ socket: Socket; next(): Promise<Snapshot | null> }> {
  const socket = connect(path);
  t.after(() => void socket.destroy());
  await within('a connection', once(socket, 'connect'));
  socket.on('error', () => {});
  const lines = createInterface({ input: socket })[Symbol.asyncIterator]();
  return {
    socket,
    async next() {
      const { value, done } = await within('a snapshot', lines.next());
      return done === true ? null : JSON.parse(value);
    },
  };
}

/** The first snapshot in which the kernel is as it should be. */
async function kernelWhere(
  { next }: { next(): Promise<Snapshot | null> },
  holds: (kernel: KernelSnapshot) => boolean,
): Promise<KernelSnapshot> {
  let last: KernelSnapshot | undefined;
  for (let count = 0; count < 15; count++) {
    last = (await next())?.kernels[0];
    if (last !== undefined && holds(last)) return last;
  }
  throw new Error(`not in fifteen snapshots; the last: ${JSON.stringify(last)}`);
}

describe('who can use it', () => {
  test('C124: the folder is 0700 and the socket 0600 whatever the umask', async (t) => {
    const { folder, env, temporary } = place(t);
    startNode(t, daemon(), { env });
    const given = join(temporary, 'given.sock');
    startNode(t, daemon({ monitor: given }), { env });
    assert.equal(mode(await oneSocket(folder)), '600');
    assert.equal(mode(folder), '700');
    await until('the other socket is there', () => existsSync(given));
    assert.equal(mode(given), '600');
    await until('nothing else is left', () => readdirSync(temporary).length === 2);
  });

  test('C124: another user cannot connect', { skip: !isRoot && 'needs root' }, async (t) => {
    const { env, temporary } = place(t);
    const path = join(temporary, 'given.sock');
    chmodSync(temporary, 0o755);
    startNode(t, daemon({ monitor: path }), { env });
    await until('the socket is there', () => existsSync(path));
    const connectAs = `
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try: socket.socket(socket.AF_UNIX).connect(sys.argv[1]); print("connected")
except OSError as error: print(type(error).__name__)
`;
    const attempt = () =>
      execFileSync(pythonForTests(), ['-c', connectAs, path], { encoding: 'utf8', timeout: 15_000 }).trim();
    assert.equal(attempt(), 'PermissionError');
    chmodSync(path, 0o666);
    assert.equal(attempt(), 'connected', 'it is not the mode of the socket that kept the user out');
  });

  const hostile: [string, (folder: string, temporary: string) => void, RegExp, boolean?][] = [
    [
      'a link',
      (folder, temporary) => {
        mkdirSync(join(temporary, 'elsewhere'), { mode: 0o700 });
        symlinkSync(join(temporary, 'elsewhere'), folder);
      },
      /is not a folder/,
    ],
    ['a link to nowhere', (folder, temporary) => symlinkSync(join(temporary, 'nowhere'), folder), /is not a folder/],
    ['a file', (folder) => writeFileSync(folder, ''), /is not a folder/],
    [
      'open to others',
      (folder) => {
        mkdirSync(folder);
        chmodSync(folder, 0o777);
      },
      /is open to others \(mode 777, not 700\)/,
    ],
    [
      "another user's",
      (folder) => {
        mkdirSync(folder, { mode: 0o700 });
        chownSync(folder, 65534, 65534);
      },
      /belongs to user 65534/,
      true,
    ],
  ];
  for (const [what, make, message, needsRoot] of hostile) {
    test(`C124: where its folder is there and ${what}, nothing is put there and the host warns`, {
      skip: needsRoot === true && !isRoot && 'needs root',
    }, async (t) => {
      const { folder, env, temporary } = place(t);
      make(folder, temporary);
      const before = readdirSync(temporary, { recursive: true });
      const { line } = startNode(t, daemon(), { env });
      assert.match(await warningOf(line), message);
      assert.deepEqual(readdirSync(temporary, { recursive: true }), before);
    });
  }

  for (const [what, path, message] of [
    ['in a folder that is not there', 'none/x.sock', /ENOENT/],
    ['a file that is there', 'file', /is there already/],
  ] as const) {
    test(`a path that is ${what} is a warning`, async (t) => {
      const { env, temporary } = place(t);
      const file = join(temporary, 'file');
      writeFileSync(file, 'kept');
      const { line } = startNode(t, daemon({ monitor: join(temporary, path) }), { env });
      assert.match(await warningOf(line), message);
      assert.deepEqual(readdirSync(temporary), ['file']);
      assert.equal(readFileSync(file, 'utf8'), 'kept');
    });
  }

  test('a path that is in use stays with who has it; one of a dead daemon is taken over', async (t) => {
    const { env, temporary } = place(t);
    const path = join(temporary, 'x.sock');
    const first = startNode(t, daemon({ monitor: path }), { env });
    await until('the socket is there', () => existsSync(path));
    const second = startNode(t, daemon({ monitor: path }), { env });
    assert.match(await warningOf(second.line), /is there already/);
    const watching = await look(t, path);
    assert.equal((await watching.next())?.host.pid, first.child.pid);
    first.child.kill('SIGKILL');
    await within('the end of the first', once(first.child, 'exit'));
    assert.ok(existsSync(path), 'there is nothing to take over');
    const third = startNode(t, daemon({ monitor: path }), { env });
    assert.deepEqual(await third.line(), { text: '42' });
    assert.equal((await (await look(t, path)).next())?.host.pid, third.child.pid);
  });
});

describe('what it tells', () => {
  test('a cell that runs, what the kernel uses, and how its life ended', async (t) => {
    const path = join(temporaryFolder(t), 'x.sock');
    const host = startHost(t, { monitor: path });
    const kernel = host.kernel();
    await until('the socket is there', () => existsSync(path));
    const watching = await look(t, path);
    const absent = await kernelWhere(watching, () => true);
    assert.deepEqual(
      [absent.state, absent.generation, absent.pid, absent.ageMs, absent.cell, absent.lastExit, absent.rssBytes],
      ['absent', 0, null, null, null, null, null],
    );
    const { pid } = await kernel.start();
    const idle = await kernelWhere(watching, ({ state, rssBytes }) => state === 'idle' && rssBytes !== null);
    assert.deepEqual([idle.id, idle.generation, idle.pid, idle.cell], [kernel.id, 1, pid, null]);
    assert.ok((idle.pssBytes ?? 0) > 0 && (idle.rssBytes ?? 0) >= (idle.pssBytes ?? 0));
    assert.ok((idle.ageMs ?? 0) > 0 && (idle.ageMs ?? 0) < 60_000);
    assert.deepEqual([idle.processes, idle.threads], [1, 1]);

    const code = '\n# busy\nimport subprocess; child = subprocess.Popen(["sleep", "600"])\nwhile True: pass';
    const cell = kernel.execute(code).catch((error: unknown) => error);
    const queued = kernel.execute('"queued"').catch((error: unknown) => error);
    const running = await kernelWhere(
      watching,
      ({ state, cpuPercent, processes }) => state === 'running' && (cpuPercent ?? 0) > 10 && processes === 2,
    );
    assert.equal(running.cell?.code, '# busy');
    assert.ok((running.cell?.runningMs ?? 0) > 0 && (running.cell?.runningMs ?? 0) <= (running.ageMs ?? 0));
    assert.ok((running.cpuMs ?? 0) > 0);

    const before = Date.now();
    const exited = next(kernel, 'exit');
    process.kill(pid, 'SIGKILL');
    await exited;
    await Promise.all([cell, queued]);
    const dead = await kernelWhere(watching, ({ lastExit }) => lastExit !== null);
    assert.equal(dead.lastExit?.cause, 'external-signal');
    assert.equal(dead.lastExit?.status, 'SIGKILL');
    assert.equal(dead.lastExit?.generation, 1);
    assert.equal(dead.lastExit?.message, kernel.lastExit?.message);
    const at = Date.parse(dead.lastExit?.at ?? '');
    assert.ok(at >= before && at <= Date.now());
    assert.equal((await kernel.execute('1 + 1')).text, '2');
    const again = await kernelWhere(watching, ({ generation, rssBytes }) => generation === 2 && rssBytes !== null);
    assert.deepEqual([again.state, again.cell, again.lastExit?.generation], ['idle', null, 1]);
    await kernel.close();
    assert.deepEqual((await watching.next())?.kernels, []);
  });

  test('the daemon itself: its pid, its age, its memory, and how late its event loop was', async (t) => {
    const path = join(temporaryFolder(t), 'x.sock');
    const { line, child } = startNode(
      t,
      `
      ${daemon({ monitor: path })}
      process.on('SIGUSR2', () => { const end = Date.now() + 700; while (Date.now() < end); });
    `,
    );
    await line();
    const watching = await look(t, path);
    const host = (await watching.next())?.host;
    assert.equal(host?.pid, child.pid);
    assert.ok((host?.rssBytes ?? 0) > 10_000_000 && (host?.uptimeMs ?? 0) > 0);
    child.kill('SIGUSR2');
    let most = 0;
    for (let count = 0; count < 3; count++) most = Math.max(most, (await watching.next())?.host.eventLoopDelayMs ?? 0);
    assert.ok(most > 400 && most < 5_000, `${most} ms`);
  });
});

describe('the daemon', () => {
  for (const [what, options, variables] of [
    ['not asked for', {}, {}],
    ['switched off in the code', { monitor: false }, { KERNELHOST_MONITOR: '1' }],
  ] as const) {
    test(`has no socket where one is ${what}`, async (t) => {
      const { env, temporary } = place(t);
      const { line } = startNode(t, daemon(options), { env: { ...env, ...variables } });
      assert.deepEqual(await line(), { text: '42' });
      assert.deepEqual(readdirSync(temporary), []);
    });
  }

  for (const value of ['1', 'path']) {
    test(`has one where KERNELHOST_MONITOR is ${value === '1' ? value : 'a path'}`, async (t) => {
      const { env, temporary, folder } = place(t);
      const path = join(temporary, 'x.sock');
      startNode(t, daemon({}), { env: { ...env, KERNELHOST_MONITOR: value === '1' ? value : path } });
      if (value !== '1') await until('the socket is there', () => existsSync(path));
      const watching = await look(t, value === '1' ? await oneSocket(folder) : path);
      assert.equal((await watching.next())?.kernels.length, 1);
    });
  }

  const ends: [string, string, string][] = [
    ['by itself', '', ''],
    ['by itself after close()', 'await host.close();', ''],
    ['with process.exit()', 'process.exit(0);', ''],
    ['with process.exit() at once', '', 'process.exit(0);'],
    [
      'with an error that nobody catches',
      'process.on("uncaughtException", () => process.exit(0)); throw new Error("x");',
      '',
    ],
  ];
  for (const [what, last, first] of ends) {
    test(`ends ${what}, says nothing, and leaves no socket`, async (t) => {
      const { env, temporary } = place(t);
      const { code, stdout, stderr } = await runNode(
        t,
        `import { connect } from 'node:net';
        import { readdirSync, existsSync } from 'node:fs';
        import { once } from 'node:events';
        import { KernelHost } from 'kernelhost';
        const hosts = Array.from({ length: 12 }, () => new KernelHost({ python: ${python}, shell: 'plain', launch: 'spawn', monitor: true }));
        const [host] = hosts;
        ${first}
        await host.kernel().start();
        const folder = ${JSON.stringify(join(temporary, folderName))};
        const names = readdirSync(folder).filter((name) => name.endsWith('.sock'));
        if (names.length !== 12) throw new Error(names.join());
        for (const name of names) {
          const client = connect(folder + '/' + name);
          client.on('error', () => {});
          client.unref();
          await once(client, 'connect');
          const timer = setTimeout(() => {}, 10_000);
          await once(client, 'data');
          clearTimeout(timer);
        }
        ${last}`,
        { env },
      );
      assert.deepEqual([code, stdout, stderr], [0, '', '']);
      assert.deepEqual(readdirSync(temporary), []);
    });
  }

  test('a host in a worker has one, too, which goes with the worker', async (t) => {
    const { env, temporary } = place(t);
    const source = `
      import { readdirSync } from 'node:fs';
      import { parentPort } from 'node:worker_threads';
      import { KernelHost } from 'kernelhost';
        const host = new KernelHost({ python: ${python}, shell: 'plain', launch: 'spawn', monitor: true });
        await host.kernel().start();
        parentPort.postMessage(readdirSync(${JSON.stringify(join(temporary, folderName))}).length);`;
    const { code, stdout, stderr } = await runNode(
      t,
      `import { Worker } from 'node:worker_threads';
      import { once } from 'node:events';
      const worker = new Worker(${JSON.stringify(source)}, { eval: true });
      const [count] = await once(worker, 'message');
      await once(worker, 'exit');
      console.log(count);`,
      { env },
    );
    assert.deepEqual([code, stdout, stderr], [0, '1\n', '']);
    assert.deepEqual(readdirSync(temporary), []);
  });

  test('C81: what killed daemons have left is removed by the next, and that of the living is left alone', async (t) => {
    const { env, folder } = place(t);
    const first = startNode(t, daemon(), { env });
    const living = await oneSocket(folder);
    const killed = Array.from({ length: 4 }, () => startNode(t, daemon(), { env }));
    for (const { line } of killed) await line();
    await until('five sockets', () => sockets(folder).length === 5);
    for (const { child } of killed) {
      child.kill('SIGKILL');
      await within('its end', once(child, 'exit'));
    }
    assert.equal(sockets(folder).length, 5);
    const last = startNode(t, daemon(), { env });
    await last.line();
    await until('two sockets', () => sockets(folder).length === 2);
    assert.deepEqual(new Set(readdirSync(folder)), new Set([first, last].map(({ child }) => `${child.pid}-1.sock`)));
    assert.equal((await (await look(t, living)).next())?.host.pid, first.child.pid);
  });

  test('stays as it is under clients that come and go, talk nonsense and do not listen', async (t) => {
    const { env, folder } = place(t);
    const { child, line } = startNode(
      t,
      `${daemon()}
      process.on('SIGUSR2', async () => {
        const began = performance.now();
        const { text } = await host.kernels[0].execute('6 * 7');
        console.log(JSON.stringify({ text, took: performance.now() - began }));
      });`,
      { env },
    );
    await line();
    const path = await oneSocket(folder);
    const descriptors = () => readdirSync(`/proc/${child.pid}/fd`).length;
    const before = descriptors();
    const bad: Socket[] = [];
    for (let count = 0; count < 200; count++) {
      const socket = connect(path);
      bad.push(socket);
      socket.on('error', () => {});
      socket.pause();
      if (count % 3 === 0) socket.write(`${'\u0000{[garbage'.repeat(5_000)}\n`);
      else if (count % 3 === 1) socket.destroy();
      else socket.write('{"intervalMs":500}\n');
    }
    child.kill('SIGUSR2');
    const { text, took } = (await line()) as { text: string; took: number };
    assert.equal(text, '42');
    assert.ok(took < 5_000, `a cell took ${took} ms`);
    for (const socket of bad) socket.destroy();
    await until('their descriptors are closed', () => descriptors() <= before);
    assert.equal((await (await look(t, path)).next())?.host.pid, child.pid);
  });

  test('its kernels have no descriptor of the socket', async (t) => {
    const path = join(temporaryFolder(t), 'x.sock');
    const host = startHost(t, { monitor: path });
    await until('the socket is there', () => existsSync(path));
    const watching = await look(t, path);
    await watching.next();
    for (const launch of ['fork', 'spawn'] as const) {
      const other = launch === 'fork' ? host : startHost(t, { launch, monitor: `${path}.spawn` });
      const code = [
        'import os',
        'names = []',
        'for number in os.listdir("/proc/self/fd"):',
        '    try: names.append(os.readlink(f"/proc/self/fd/{number}"))',
        '    except OSError: pass',
        'names',
      ].join('\n');
      const inodes = readFileSync('/proc/net/unix', 'utf8')
        .split('\n')
        .filter((row) => row.includes(path) || row.includes('.kh-'))
        .map((row) => row.trim().split(/\s+/)[6]);
      assert.ok(inodes.length > 0);
      const { text } = await other.kernel().execute(code);
      for (const inode of inodes) assert.ok(!text?.includes(`[${inode}]`), `${launch}: ${text}`);
    }
  });
});
