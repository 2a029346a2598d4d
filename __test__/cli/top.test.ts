/** `kernelhost top` against real daemons, on pipes and on a terminal. */

import assert from 'node:assert/strict';
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, existsSync, readdirSync } from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { describe, type TestContext, test } from 'node:test';
import type { Snapshot } from '../../ts/monitor/snapshot.ts';
import { startNode } from '../fixtures/node-run.ts';
import { isAlive, pythonForTests, temporaryFolder, until, within } from '../helpers/index.ts';

const main = join(import.meta.dirname, '../../dist/cli/main.js');
const ESCAPE = '\u001b';

interface Place {
  env: NodeJS.ProcessEnv;
  /** Where the sockets are. */
  folder: string;
}

function place(t: TestContext): Place {
  const temporary = temporaryFolder(t);
  const env: NodeJS.ProcessEnv = { ...process.env, NO_COLOR: '1', XDG_RUNTIME_DIR: temporary };
  delete env.KERNELHOST_MONITOR;
  return { env, folder: join(temporary, `kernelhost-${process.geteuid?.()}`) };
}

/** A daemon with a busy kernel, one that was killed, and one that has not started. */
async function startDaemon(t: TestContext, { env }: Place): Promise<{ child: ChildProcess; pids: number[] }> {
  const { child, line } = startNode(
    t,
    `import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain', launch: 'spawn', monitor: true });
    const [busy, killed] = [host.kernel(), host.kernel(), host.kernel()];
    await Promise.all([busy.start(), killed.start()]);
    busy.execute('while True: pass  # \\u001b[2J busy').catch(() => {});
    await killed.kill();
    process.on('SIGTERM', () => host.close().then(() => process.exit()));
    setInterval(() => {}, 1_000);
    console.log(JSON.stringify([busy.pid]));`,
    { env },
  );
  const pids = await line<number[]>();
  t.after(() => until('its kernels have ended', () => !pids.some(isAlive)));
  return { child, pids };
}

interface Started {
  child: ChildProcess;
  ended: Promise<{ code: number | null; stdout: string; stderr: string }>;
}

function startTop(t: TestContext, { env }: Pick<Place, 'env'>, args: string[] = []): Started {
  const child = spawn(process.execPath, [main, 'top', ...args], { env, stdio: ['ignore', 'pipe', 'pipe'] });
  t.after(() => void child.kill('SIGKILL'));
  const closed = once(child, 'close');
  const outputs = Promise.all([text(child.stdout), text(child.stderr)]);
  const ended = within(
    'the end of top',
    Promise.all([closed, outputs]).then(([[code], [stdout, stderr]]) => ({ code, stdout, stderr })),
    30_000,
  );
  return { child, ended };
}

const top = (t: TestContext, where: Pick<Place, 'env'>, args: string[]) => startTop(t, where, args).ended;

const snapshots = (stdout: string) =>
  stdout
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as Snapshot);

describe('what it prints', () => {
  test('--json --once: exactly one snapshot, of what the kernels do', async (t) => {
    const where = place(t);
    const { child, pids } = await startDaemon(t, where);
    for (const target of [[], [String(child.pid)], [join(where.folder, `${child.pid}-1.sock`)]]) {
      const { code, stdout, stderr } = await top(t, where, ['--json', '--once', ...target]);
      assert.deepEqual([code, stderr], [0, '']);
      const [snapshot, ...others] = snapshots(stdout);
      assert.equal(others.length, 0);
      assert.equal(snapshot?.host.pid, child.pid);
      const [busy, killed, absent] = snapshot?.kernels ?? [];
      assert.deepEqual([busy?.state, busy?.pid, busy?.generation], ['running', pids[0], 1]);
      assert.equal(busy?.cell?.code, 'while True: pass  # \u001b[2J busy');
      assert.ok((busy?.cpuPercent ?? 0) > 10, `${busy?.cpuPercent} %`);
      assert.deepEqual(
        [killed?.state, killed?.lastExit?.cause, killed?.lastExit?.status],
        ['absent', 'kill', 'SIGKILL'],
      );
      assert.deepEqual([absent?.state, absent?.generation, absent?.lastExit], ['absent', 0, null]);
    }
  });

  test('--once: the same as a table, the busiest first, without what a cell would do to the terminal', async (t) => {
    const where = place(t);
    const { child } = await startDaemon(t, where);
    const { code, stdout } = await top(t, where, ['--once']);
    assert.equal(code, 0);
    const lines = stdout.trimEnd().split('\n');
    assert.match(lines[0] ?? '', new RegExp(`^Host ${child.pid}, up .*; 3 kernels: 1 running, 2 absent$`));
    assert.match(lines[1] ?? '', /^KERNEL +STATE +LIFE +PID +AGE +CPU% +CPU +PSS +RSS +PROCS +THR +LAST EXIT +CELL$/);
    assert.match(lines[2] ?? '', /^kernel-1 +running +1 .* while True: pass # \[2J busy$/);
    assert.match(lines[3] ?? '', /^kernel-2 +absent +1 .* kill \(SIGKILL\), .* ago +–$/);
    assert.equal(lines.length, 5);
    assert.ok(!stdout.includes(ESCAPE));
  });

  test('without --once it goes on, and ends well when the host does', async (t) => {
    const where = place(t);
    const { child } = await startDaemon(t, where);
    const { ended, child: command } = startTop(t, where, ['--json']);
    let seen = 0;
    command.stdout?.on('data', (chunk: Buffer) => {
      seen += chunk.toString().split('\n').length - 1;
    });
    await until('two snapshots', () => seen >= 2);
    child.kill('SIGTERM');
    const { code, stdout, stderr } = await ended;
    assert.deepEqual([code, stderr], [0, '']);
    assert.ok(snapshots(stdout).length >= 2);
    assert.equal(existsSync(where.folder), false);
  });

  test('without an argument: every host that can be found', async (t) => {
    const where = place(t);
    const daemons = await Promise.all([startDaemon(t, where), startDaemon(t, where)]);
    const { code, stdout } = await top(t, where, ['--json', '--once']);
    assert.equal(code, 0);
    assert.deepEqual(
      new Set(snapshots(stdout).map(({ host }) => host.pid)),
      new Set(daemons.map(({ child }) => child.pid)),
    );
    const tables = await top(t, where, ['--once']);
    assert.equal(tables.stdout.match(/^Host /gm)?.length, 2);
  });

  for (const [signal, expected] of [
    ['SIGINT', 130],
    ['SIGTERM', 143],
  ] as const) {
    test(`${signal} ends it with ${expected}`, async (t) => {
      const where = place(t);
      await startDaemon(t, where);
      const { child, ended } = startTop(t, where);
      await within('a table', once(child.stdout as NodeJS.ReadableStream, 'data'));
      child.kill(signal);
      assert.equal((await ended).code, expected);
    });
  }

  test('a reader that goes away ends it without a word', async (t) => {
    const where = place(t);
    await startDaemon(t, where);
    const child = spawn(process.execPath, [main, 'top', '--json'], {
      env: where.env,
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    t.after(() => void child.kill('SIGKILL'));
    const stderr = text(child.stderr);
    child.stdout.once('data', () => child.stdout.destroy());
    const [code] = await within('its end', once(child, 'exit'));
    assert.deepEqual([code, await stderr], [0, '']);
  });
});

describe('when there is nothing to show', () => {
  test('no host is said, with where it looked and how to have one', async (t) => {
    const where = place(t);
    const { code, stdout, stderr } = await top(t, where, []);
    assert.deepEqual([code, stdout], [1, '']);
    assert.ok(stderr.startsWith('kernelhost: no host with a monitor was found in '));
    assert.ok(stderr.includes(where.folder) && stderr.includes('KERNELHOST_MONITOR=1'));
    assert.match((await top(t, where, ['1'])).stderr, /^kernelhost: no monitor of process 1 was found in /);
  });

  test('C124: a folder that others may write to is not looked into, and that is said', async (t) => {
    const where = place(t);
    const { child } = await startDaemon(t, where);
    chmodSync(where.folder, 0o777);
    const { code, stdout, stderr } = await top(t, where, ['--once']);
    assert.deepEqual([code, stdout], [1, '']);
    assert.ok(stderr.includes(`(${where.folder} is open to others (mode 777, not 700))`), stderr);
    // What the user names is the user's decision.
    assert.equal((await top(t, where, ['--once', join(where.folder, `${child.pid}-1.sock`)])).code, 0);
  });

  test('C81: the socket of a killed daemon is removed, and that of a living one shown', async (t) => {
    const where = place(t);
    const dead = await startDaemon(t, where);
    const living = await startDaemon(t, where);
    const path = join(where.folder, `${dead.child.pid}-1.sock`);
    dead.child.kill('SIGKILL');
    await within('its end', once(dead.child, 'exit'));
    const named = await top(t, where, [path]);
    assert.deepEqual([named.code, named.stderr], [1, `kernelhost: nobody listens on ${path}; its daemon has ended\n`]);
    const { code, stdout } = await top(t, where, ['--json', '--once']);
    assert.deepEqual([code, snapshots(stdout).map(({ host }) => host.pid)], [0, [living.child.pid]]);
    assert.deepEqual(readdirSync(where.folder), [`${living.child.pid}-1.sock`]);
  });

  test('a path with no socket, and one where something else listens', async (t) => {
    const { env } = place(t);
    const none = await top(t, { env }, ['/no/such.sock']);
    assert.equal(none.code, 1);
    assert.match(none.stderr, /^kernelhost: cannot connect to \/no\/such\.sock: .*ENOENT/);
    const path = join(temporaryFolder(t), 'x.sock');
    const server = createServer((socket) => socket.end('HTTP/1.1 400 Bad Request\r\n\r\n')).listen(path);
    t.after(() => void server.close());
    const other = await top(t, { env }, [path]);
    assert.deepEqual([other.code, other.stderr], [1, 'kernelhost: what listens there is no monitor of kernelhost\n']);
  });

  test('a daemon that is stopped is said to be', async (t) => {
    const where = place(t);
    const { child } = await startDaemon(t, where);
    child.kill('SIGSTOP');
    t.after(() => void child.kill('SIGCONT'));
    const { code, stderr } = await top(t, where, ['--once']);
    assert.deepEqual([code, stderr], [1, 'kernelhost: no answer within 10 s; the daemon is busy, or stopped\n']);
  });

  for (const [args, message] of [
    [['a', 'b'], /top: one host at a time; there is also b/],
    [['--jsn'], /Unknown option '--jsn'/],
  ] as const) {
    test(`"kernelhost top ${args.join(' ')}" is a usage error`, async (t) => {
      const { code, stderr } = await top(t, place(t), [...args]);
      assert.equal(code, 2);
      assert.match(stderr, message);
    });
  }
});

/**
 * Runs a command on a terminal of 60 columns and 12 rows. What is typed comes on stdin. Says at the end how it ended and
 * whether the terminal's modes are what they were.
 */
const onTerminal = `
import fcntl, os, pty, select, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    os.write(1, b"BEGIN")
    os.execv(sys.argv[1], sys.argv[1:])
seen = b""
while b"BEGIN" not in seen:
    seen += os.read(terminal, 5)
before = termios.tcgetattr(terminal)
os.write(1, b"ready\\n")
while True:
    for readable in select.select([0, terminal], [], [])[0]:
        if readable == 0:
            typed = os.read(0, 100)
            if typed: os.write(terminal, typed)
            else: os.kill(pid, 9)
        else:
            after = termios.tcgetattr(terminal)
            try: shown = os.read(terminal, 10000)
            except OSError: shown = b""
            if shown: os.write(1, shown)
            else:
                status = os.waitpid(pid, 0)[1]
                code = os.waitstatus_to_exitcode(status)
                os.write(1, f"\\nended {code} {'same' if after == before else 'changed'}\\n".encode())
                sys.exit()
`;

function startOnTerminal(t: TestContext, { env }: Place) {
  const child = spawn(pythonForTests(), ['-c', onTerminal, process.execPath, main, 'top'], {
    env: { ...env, TERM: 'xterm' },
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  t.after(() => void child.stdin.destroy());
  const screen = { text: '' };
  child.stdout.setEncoding('utf8').on('data', (shown: string) => {
    screen.text += shown;
  });
  const ended = async () => {
    await within('the end of top', once(child, 'close'));
    return /\nended (.*)\n$/.exec(screen.text)?.[1];
  };
  return { child, screen, ended };
}

describe('on a terminal', () => {
  for (const [key, name, expected] of [
    ['q', 'q', '0 same'],
    ['\u0003', 'Ctrl-C', '130 same'],
  ] as const) {
    test(`the table is redrawn in place; ${name} ends it and gives the terminal back`, async (t) => {
      const where = place(t);
      await startDaemon(t, where);
      const { child, screen, ended } = startOnTerminal(t, where);
      await until('two tables', () => screen.text.split('Host ').length > 2);
      child.stdin.write(key);
      assert.equal(await ended(), expected);
      assert.ok(screen.text.includes(`${ESCAPE}[?1049h`) && screen.text.includes(`${ESCAPE}[?25l`));
      // Nothing of the table comes after the terminal was given back.
      const back = screen.text.lastIndexOf(`${ESCAPE}[?25h`);
      assert.ok(back > screen.text.lastIndexOf('kernel-1'));
      assert.ok(screen.text.includes(`${ESCAPE}[?1049l`));
      const drawn = screen.text.slice(0, back).split(`${ESCAPE}[H`).at(-1) ?? '';
      // biome-ignore lint/suspicious/noControlCharactersInRegex: the terminal's.
      const lines = drawn.replaceAll(/\u001b\[[?\d;]*[A-Za-z]/g, '').split(/\r+\n/);
      assert.match(lines[1] ?? '', /^KERNEL +STATE .*CPU% .*CELL$/);
      assert.match(lines[2] ?? '', /^kernel-1 +running .*while/);
      for (const line of lines) assert.ok(line.length <= 60, line);
      assert.ok(!drawn.includes(`${ESCAPE}[2J`));
    });
  }

  test('the end of the host ends it and gives the terminal back', async (t) => {
    const where = place(t);
    const daemon = await startDaemon(t, where);
    const { screen, ended } = startOnTerminal(t, where);
    await until('a table', () => screen.text.includes('Host '));
    daemon.child.kill('SIGKILL');
    assert.equal(await ended(), '0 same');
    assert.ok(screen.text.includes(`${ESCAPE}[?1049l`));
  });
});
