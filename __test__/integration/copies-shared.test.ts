/** What a copy shares with its original: each row of the table in docs/copies.md, shown. */

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { test } from 'node:test';
import { forked, frozenUnder, run, templateOf, value } from '../fixtures/copies.ts';
import { startHost, temporaryFolder, until, within } from '../helpers/index.ts';

const quoted = JSON.stringify;

test('an open file has one place for both, where the next of them reads or writes', async (t) => {
  const path = join(temporaryFolder(t), 'file');
  const { original, copy } = await forked(t, `file = open(${quoted(path)}, "w+b", buffering=0); file.write(b"0123")`);
  await run(copy, 'file.write(b"copy")');
  await run(original, 'file.write(b"original")');
  assert.equal(readFileSync(path, 'latin1'), '0123copyoriginal');
  assert.equal(await value(copy, 'file.tell()'), '16');
  await run(original, 'file.seek(1)');
  assert.deepEqual([await value(copy, 'file.read(2)'), await value(original, 'file.read(2)')], ["b'12'", "b'3c'"]);
  await run(copy, 'file.close()');
  assert.equal(await value(original, 'file.seek(0); file.read(4)'), "b'0123'", 'closed in one');
  const own = `file.close(); file = open(${quoted(path)}, "r+b", buffering=0); file.tell()`;
  assert.equal(await value(original, own), '0', 'opened anew it has a place of its own');
});

test('what a file still has in its buffer is written by both; flushed before the copy it is written once', async (t) => {
  const folder = temporaryFolder(t);
  const { original, copy } = await forked(
    t,
    `import os; os.chdir(${quoted(folder)})
kept, flushed = open("kept", "w"), open("flushed", "w")
for file in (kept, flushed): file.write("line\\n")
flushed.flush()`,
  );
  for (const each of [original, copy]) await run(each, 'kept.close(); flushed.close()');
  assert.equal(readFileSync(join(folder, 'kept'), 'utf8'), 'line\nline\n');
  assert.equal(readFileSync(join(folder, 'flushed'), 'utf8'), 'line\n');
});

test('what both append to a file arrives whole, also where they write at once', async (t) => {
  const path = join(temporaryFolder(t), 'log');
  const { original, copy } = await forked(t, `log = open(${quoted(path)}, "ab", buffering=0)`);
  const write = (who: string) => `for at in range(500): log.write(b"${who} %d\\n" % at)`;
  await Promise.all([run(original, write('original')), run(copy, write('copy'))]);
  const lines = readFileSync(path, 'latin1').trim().split('\n');
  for (const who of ['original', 'copy']) {
    assert.deepEqual(
      lines.filter((line) => line.startsWith(who)),
      Array.from({ length: 500 }, (_, at) => `${who} ${at}`),
    );
  }
  assert.equal(lines.length, 1000);
});

/** A server on loopback that keeps what one client says. */
async function listen(t: { after(task: () => void): void }) {
  const server = createServer();
  t.after(() => void server.close());
  const connected = once(server, 'connection') as Promise<[Socket]>;
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const client = { heard: '', ended: false, socket: null as Socket | null };
  connected.then(([socket]) => {
    client.socket = socket;
    t.after(() => void socket.destroy());
    socket.setEncoding('latin1').on('data', (text: string) => {
      client.heard += text;
    });
    socket.on('end', () => {
      client.ended = true;
    });
    socket.on('error', () => {});
  });
  const { port } = server.address() as { port: number };
  const connect = `import socket; connection = socket.create_connection(("127.0.0.1", ${port}))`;
  return { client, connect };
}

test('a TCP connection is one connection that both hold; closing it in one does not close it', async (t) => {
  const { client, connect } = await listen(t);
  const { original, copy } = await forked(t, connect);
  await run(original, 'connection.sendall(b"original ")');
  await run(copy, 'connection.sendall(b"copy ")');
  await until('both are heard', () => client.heard === 'original copy ');
  client.socket?.write('answer');
  assert.equal(await value(copy, 'connection.recv(100)'), "b'answer'");
  const again =
    'connection.setblocking(False)\ntry: got = connection.recv(100)\nexcept BlockingIOError: got = None\ngot';
  assert.equal(await value(original, again), null, 'whoever reads first has it');
  await run(copy, 'connection.close()');
  await run(original, 'connection.sendall(b"still there")');
  await until('it is heard', () => client.heard === 'original copy still there');
  assert.equal(client.ended, false);
  await run(original, 'connection.close()');
  await until('its end is heard', () => client.ended);
});

test('shutdown() ends a TCP connection for both', async (t) => {
  const { client, connect } = await listen(t);
  const { original, copy } = await forked(t, connect);
  await run(copy, 'connection.shutdown(socket.SHUT_WR)');
  await until('its end is heard', () => client.ended);
  const { error } = await within('sending', original.execute('connection.send(b"x")'));
  assert.equal(error?.name, 'BrokenPipeError');
});

test('a frozen copy holds open what it has: what is closed in a cell is closed with the copy after that cell', async (t) => {
  const { client, connect } = await listen(t);
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const kernel = host.kernel({ recovery: 'checkpoint' });
  await run(kernel, connect);
  await until('a copy', () => frozenUnder(templateOf(kernel)).length === 1);
  const checkpoint = await kernel.checkpoint();
  await run(kernel, 'connection.close()');
  // Two more, so that the automatic copy that knows the connection has been replaced.
  await run(kernel, '1');
  await run(kernel, '2');
  await until('one automatic copy', () => frozenUnder(templateOf(kernel)).length === 2);
  assert.equal(client.ended, false, 'the checkpoint holds it');
  await checkpoint.discard();
  await until('its end is heard', () => client.ended);
});

test('a socket pair: what one writes the other can read, and each message is read once', async (t) => {
  const { original, copy } = await forked(
    t,
    'import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)',
  );
  await run(copy, 'a.send(b"from the copy")');
  assert.equal(await value(original, 'b.recv(100)'), "b'from the copy'");
  await run(original, 'a.send(b"1"); a.send(b"2")');
  const got = [await value(original, 'b.recv(100)'), await value(copy, 'b.recv(100)')];
  assert.deepEqual(got, ["b'1'", "b'2'"]);
});

test('a pipe ends when both have closed the end that is written to', async (t) => {
  const { original, copy } = await forked(t, 'import os\nr, w = os.pipe(); os.set_blocking(r, False)');
  await run(copy, 'os.write(w, b"from the copy")');
  assert.equal(await value(original, 'os.read(r, 100)'), "b'from the copy'");
  await run(original, 'os.close(w)');
  const { error } = await within('reading', original.execute('os.read(r, 100)'));
  assert.equal(error?.name, 'BlockingIOError', 'no end of file: the copy could write yet');
  await run(copy, 'os.close(w)');
  assert.equal(await value(original, 'os.read(r, 100)'), "b''");
});

test('epoll is one for both: what one registers is registered for the other', async (t) => {
  const { original, copy } = await forked(
    t,
    'import os, select\nepoll = select.epoll(); r, w = os.pipe(); os.write(w, b"x")',
  );
  await run(copy, 'epoll.register(r, select.EPOLLIN)');
  assert.equal(await value(original, '[event for _, event in epoll.poll(0)] == [select.EPOLLIN]'), 'True');
});

for (const mode of ['delete', 'wal']) {
  test(`SQLite (${mode}): a connection that on_restore opens anew works in the copy, in the original and after a death`, async (t) => {
    const path = join(temporaryFolder(t), 'database');
    const connect = `
import sqlite3, kernelhost
def connect():
    global db
    db = sqlite3.connect(${quoted(path)}, timeout=20, isolation_level=None)
connect()
db.execute("PRAGMA journal_mode=${mode}"); db.execute("CREATE TABLE t (who TEXT)")
inherited = []
@kernelhost.on_restore
def reconnect(what):
    inherited.append(db)  # not even closed: that is the original's
    connect()
`;
    const { original, copy } = await forked(t, connect, { recovery: 'checkpoint' });
    const insert = (who: string) => `for _ in range(50): db.execute("INSERT INTO t VALUES ('${who}')")`;
    await Promise.all([run(original, insert('original')), run(copy, insert('copy'))]);
    const count = 'db.execute("SELECT who, count(*) FROM t GROUP BY who ORDER BY who").fetchall()';
    const check = 'db.execute("PRAGMA integrity_check").fetchall()';
    for (const each of [original, copy]) {
      assert.equal(await value(each, count), "[('copy', 50), ('original', 50)]");
      assert.equal(await value(each, check), "[('ok',)]");
      assert.equal(await value(each, 'len(inherited)'), each === copy ? '1' : '0');
    }
    await original.kill();
    const { recovered } = await run(original, insert('original'));
    assert.equal(recovered?.state, 'checkpoint');
    await run(copy, insert('copy'));
    assert.equal(await value(original, count), "[('copy', 100), ('original', 100)]");
    assert.equal(await value(original, check), "[('ok',)]");
  });
}

test('mmap: what is mapped shared is shared, what is mapped private is not', async (t) => {
  const path = join(temporaryFolder(t), 'file');
  const { original, copy } = await forked(
    t,
    `import mmap
file = open(${quoted(path)}, "w+b"); file.write(b"." * 4096); file.flush()
shared, private = mmap.mmap(file.fileno(), 4096), mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE)
nameless = mmap.mmap(-1, 4096)`,
  );
  await run(copy, 'shared[:4] = private[4:8] = nameless[:4] = b"copy"');
  assert.equal(await value(original, 'shared[:8], private[4:8], nameless[:4]'), "(b'copy....', b'....', b'copy')");
  assert.equal(readFileSync(path, 'latin1').slice(0, 8), 'copy....');
});

test('a lock of flock() is held by both, and released by whoever says so; one of fcntl() is not inherited', async (t) => {
  const folder = temporaryFolder(t);
  const { original, copy } = await forked(
    t,
    `import fcntl, os; os.chdir(${quoted(folder)})
def free(lock, file):
    try: lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: return False
    return True
flocked, locked = open("flocked", "w"), open("locked", "w")
print(free(fcntl.flock, flocked), free(fcntl.lockf, locked))`,
  );
  const flock = 'free(fcntl.flock, flocked), free(fcntl.flock, open("flocked"))';
  for (const each of [original, copy]) assert.equal(await value(each, flock), '(True, False)', 'held by both');
  await run(copy, 'flocked.close()');
  assert.equal(await value(original, 'free(fcntl.flock, open("flocked"))'), 'False', 'closed in one it is held');
  const again = await within('another fork', original.fork());
  await run(again, 'fcntl.flock(flocked, fcntl.LOCK_UN)');
  assert.equal(await value(original, 'free(fcntl.flock, open("flocked"))'), 'True', 'unlocked in one it is free');

  assert.equal(await value(copy, 'free(fcntl.lockf, locked)'), 'False');
  await run(original, 'locked.close()');
  assert.equal(await value(copy, 'free(fcntl.lockf, locked)'), 'True');
});

test('temporary folders are deleted by whichever ends first by itself, files by whichever closes first; a kill deletes nothing', async (t) => {
  const folder = temporaryFolder(t);
  const { original, copy } = await forked(
    t,
    `import os, tempfile; tempfile.tempdir = ${quoted(folder)}
d = tempfile.TemporaryDirectory(prefix="folder-"); f = tempfile.NamedTemporaryFile(prefix="file-")`,
  );
  const made = readdirSync(folder);
  assert.equal(made.length, 2);
  const checkpoint = await copy.checkpoint();
  await checkpoint.discard();
  await copy.kill();
  assert.deepEqual(readdirSync(folder), made, 'after kill() and discard()');
  const other = await within('another fork', original.fork());
  await run(other, 'f.close()');
  assert.equal(await value(original, 'os.path.exists(f.name), os.path.exists(d.name)'), '(False, True)');
  assert.equal(await value(original, 'f.write(b"x")'), '1', 'the file without a name is there yet');
  await within('its end', assert.rejects(other.execute('exit()'), { code: 'ERR_KERNEL_DIED' }));
  assert.deepEqual(readdirSync(folder), [], 'after exit(), although the original is there');
});

test('a copy that lets go of temporary files in time deletes none of the original', async (t) => {
  const folder = temporaryFolder(t);
  const { original, copy } = await forked(
    t,
    `import tempfile, kernelhost
tempfile.tempdir = ${quoted(folder)}
d = tempfile.TemporaryDirectory()
@kernelhost.on_restore
def let_go(what):
    d._finalizer.detach()`,
  );
  const made = readdirSync(folder);
  await within('its end', assert.rejects(copy.execute('exit()'), { code: 'ERR_KERNEL_DIED' }));
  assert.deepEqual(readdirSync(folder), made);
  await run(original, 'd.cleanup()');
  assert.deepEqual(readdirSync(folder), []);
});

test('atexit is for every one that ends by itself', async (t) => {
  const path = join(temporaryFolder(t), 'log');
  const { original, copy } = await forked(
    t,
    `import atexit, os\natexit.register(lambda: open(${quoted(path)}, "a").write(f"{os.getpid()}\\n"))`,
  );
  const pids = [original.pid, copy.pid];
  await within('its end', assert.rejects(original.execute('exit()'), { code: 'ERR_KERNEL_DIED' }));
  await within('its end', copy.close());
  assert.deepEqual(readFileSync(path, 'utf8').trim().split('\n').map(Number), pids);
});

test('signal handlers and blocked signals are kept; alarms and interval timers stay with the original', async (t) => {
  const { original, copy } = await forked(
    t,
    `import os, signal
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append("USR1")); signal.signal(signal.SIGALRM, lambda *_: got.append("ALRM"))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
signal.setitimer(signal.ITIMER_REAL, 3600); signal.setitimer(signal.ITIMER_VIRTUAL, 3600)`,
  );
  const timers = '[signal.getitimer(which)[0] > 0 for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)]';
  assert.equal(await value(original, timers), '[True, True]');
  assert.equal(await value(copy, timers), '[False, False]');
  for (const each of [copy, original]) {
    assert.equal(await value(each, 'os.kill(os.getpid(), signal.SIGUSR1); got'), "['USR1']");
    assert.equal(await value(each, 'signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ())'), 'True');
  }
  await run(copy, 'signal.setitimer(signal.ITIMER_REAL, 0.001)\nwhile len(got) < 2: signal.pause()');
  assert.equal(await value(original, 'got'), "['USR1']", 'that of the copy alone');
});

const segments = '[each for each in os.listdir("/dev/shm") if each == memory.name]';

test('shared memory is shared; its name goes with the original, and what is mapped stays', async (t) => {
  const { original, copy } = await forked(
    t,
    'import os\nfrom multiprocessing.shared_memory import SharedMemory\nmemory = SharedMemory(create=True, size=16)',
  );
  await run(copy, 'memory.buf[:4] = b"copy"');
  assert.equal(await value(original, 'bytes(memory.buf[:4])'), "b'copy'");
  const name = JSON.parse((await value(original, 'memory.name'))?.replaceAll("'", '"') ?? '');
  assert.ok(existsSync(`/dev/shm/${name}`));
  await original.kill();
  await until('the tracker of the original has removed it', () => !existsSync(`/dev/shm/${name}`));
  assert.equal(await value(copy, segments), '[]');
  assert.equal(await value(copy, 'memory.buf[4:8] = b"alone"[:4]; bytes(memory.buf[:8])'), "b'copyalon'");
});

test('shared memory that a copy unlinks has no name for either any more, and both go on with what is mapped', async (t) => {
  const { original, copy } = await forked(
    t,
    'import os\nfrom multiprocessing.shared_memory import SharedMemory\nmemory = SharedMemory(create=True, size=16)',
  );
  await run(copy, `memory.unlink(); assert ${segments} == []; other = SharedMemory(create=True, size=16)`);
  await run(original, `assert ${segments} == []; memory.buf[:1] = b"x"`);
  assert.equal(await value(copy, 'bytes(memory.buf[:1])'), "b'x'");
  await run(copy, 'other.close(); other.unlink()');
});

test('a lock of multiprocessing is one lock for both', async (t) => {
  const { original, copy } = await forked(
    t,
    'import multiprocessing\nlock = multiprocessing.Lock(); count = multiprocessing.Value("i", 0)',
  );
  assert.equal(await value(copy, 'lock.acquire()'), 'True');
  assert.equal(await value(original, 'lock.acquire(block=False)'), 'False');
  await run(copy, 'lock.release()');
  assert.equal(await value(original, 'lock.acquire(block=False)'), 'True');
  const add = 'for _ in range(500):\n    with count.get_lock(): count.value += 1';
  await Promise.all([run(original, add), run(copy, add)]);
  assert.equal(await value(copy, 'count.value'), '1000');
});
