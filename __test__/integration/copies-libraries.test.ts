/** What goes on working in a copy, in the original beside it, and in a life that came back after a death. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import type { Kernel } from 'kernelhost';
import { run, value } from '../fixtures/copies.ts';
import { failureOf } from '../fixtures/endings-calls.ts';
import {
  hasModule,
  lacksLibraries,
  librariesPythonForTests,
  startHost,
  type TestContext,
  temporaryFolder,
  within,
} from '../helpers/index.ts';

const quoted = JSON.stringify;
const skip = lacksLibraries;

interface Subject {
  before: string;
  /** Asserts for itself what it is to find. */
  after: string;
}

/** Runs `after` in a fork, in the original, after a death of the original, and in a fork of that. */
async function goesOn(t: TestContext, { before, after }: Subject, python?: string): Promise<void> {
  const host = startHost(t, { shell: 'plain', launch: 'fork', ...(python && { python }) });
  const kernel = host.kernel({ recovery: 'checkpoint' });
  await run(kernel, before);
  const copy = await within('the fork', kernel.fork());
  await run(copy, after);
  await run(kernel, after);
  await kernel.kill();
  // The fork first: what `after` leaves behind may be in the way of one.
  assert.equal((await within('the next life', kernel.start())).launch, 'checkpoint');
  const another = await within('the fork of a life that came back', kernel.fork());
  await run(kernel, after);
  await run(another, after);
}

const subjects: Record<string, Subject> = {
  'multiprocessing (fork) with a lock and shared memory made before the copy': {
    before: `
import multiprocessing as mp
from multiprocessing.shared_memory import SharedMemory
context = mp.get_context("fork")
lock, memory = context.Lock(), SharedMemory(create=True, size=8)
def add(number):
    with lock: memory.buf[0] += 1
    return number * 2`,
    after: `
found = memory.buf[0]
with context.Pool(2) as pool: assert pool.map(add, range(10)) == list(range(0, 20, 2))
pool.join()
assert memory.buf[0] == found + 10, (memory.buf[0], found)
worker = context.Process(target=add, args=(1,)); worker.start(); worker.join()
assert worker.exitcode == 0 and mp.active_children() == []`,
  },
  'multiprocessing (spawn)': {
    before: 'import multiprocessing as mp\ncontext = mp.get_context("spawn")',
    after: `
with context.Pool(2) as pool: assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
pool.join()`,
  },
  'pools of concurrent.futures': {
    before: `
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import multiprocessing as mp
with ThreadPoolExecutor(2) as used: assert list(used.map(abs, [-1])) == [1]`,
    after: `
with ThreadPoolExecutor(2) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]
with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]`,
  },
  threading: {
    before: `
import queue, threading
lock, event, line = threading.RLock(), threading.Event(), queue.Queue()
def work():
    with lock: line.put(threading.current_thread().name)
thread = threading.Thread(target=work, name="before"); thread.start(); thread.join(); assert line.get() == "before"`,
    after: `
assert threading.current_thread() is threading.main_thread()
assert threading.main_thread().native_id == __import__("os").getpid()
threads = [threading.Thread(target=work, name=f"t{at}") for at in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert sorted(line.get_nowait() for _ in threads) == ["t0", "t1", "t2", "t3"]
timer = threading.Timer(0.001, event.set); timer.start(); assert event.wait(20); timer.join(); event.clear()`,
  },
  subprocess: {
    before: 'import os, subprocess\nsubprocess.run(["true"], check=True)',
    after: `
assert subprocess.run("echo out; echo err >&2; exit 3", shell=True, capture_output=True).returncode == 3
process = subprocess.Popen(["cat"], stdin=-1, stdout=-1)
assert process.communicate(b"through")[0] == b"through" and process.returncode == 0
assert os.popen("echo popen").read() == "popen\\n" and os.system("exit 5") == 5 << 8`,
  },
  asyncio: {
    before: `
import asyncio
queue, lock, event = asyncio.Queue(), asyncio.Lock(), asyncio.Event()
async def put(number):
    async with lock:
        await asyncio.sleep(0)
        await queue.put(number)
await put(0); assert await queue.get() == 0
process = await asyncio.create_subprocess_exec("true"); assert await process.wait() == 0`,
    after: `
async with asyncio.timeout(20):
    async with asyncio.TaskGroup() as group:
        for number in range(5): group.create_task(put(number))
    assert sorted([queue.get_nowait() for _ in range(5)]) == [0, 1, 2, 3, 4]
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await process.communicate(b"through"))[0] == b"through"
    assert await asyncio.to_thread(abs, -1) == 1
    asyncio.get_running_loop().call_later(0.001, event.set); await event.wait(); event.clear()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""; writer.close(); server.close()`,
  },
  'ssl with a context made before the copy': {
    // Without certificates: what is to be shown is the library, not whom it trusts.
    before: `
import ssl
def context(kind):
    made = ssl.SSLContext(kind)
    made.check_hostname = False; made.verify_mode = ssl.CERT_NONE
    made.maximum_version = ssl.TLSVersion.TLSv1_2; made.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
    return made
contexts = context(ssl.PROTOCOL_TLS_CLIENT), context(ssl.PROTOCOL_TLS_SERVER)
def talk():
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = contexts[0].wrap_bio(down, up), contexts[1].wrap_bio(up, down, server_side=True)
    for _ in range(10):
        for end in (client, server):
            try: end.do_handshake()
            except ssl.SSLWantReadError: pass
    client.write(b"hello")
    return server.read(100)
assert talk() == b"hello"`,
    after: 'assert talk() == b"hello"',
  },
};

describe('goes on working', () => {
  for (const [what, subject] of Object.entries(subjects)) {
    test(what, (t) => goesOn(t, subject));
  }

  test('numpy, pandas and matplotlib', { skip }, (t) =>
    goesOn(
      t,
      {
        before: `
import io, numpy as np, pandas as pd, matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt
frame = pd.DataFrame({"k": list("aabb"), "v": [1.0, 2.0, 3.0, 4.0]})
figure, axes = plt.subplots(); axes.plot([1, 2, 3])`,
        after: `
assert frame.groupby("k").v.sum().tolist() == [3.0, 7.0]
assert np.allclose(np.linalg.inv(np.diag([2.0, 4.0])), np.diag([0.5, 0.25]))
axes.plot([3, 2, 1]); picture = io.BytesIO(); figure.savefig(picture); assert picture.getvalue()[1:4] == b"PNG"
plt.figure(); plt.plot([1]); plt.close()
assert pd.read_csv(io.StringIO(frame.to_csv(index=False))).equals(frame)`,
      },
      librariesPythonForTests() ?? 'none',
    ),
  );
});

/** A kernel, two forks of it, and two lives that came back from one checkpoint: what each of them draws. */
async function draws(kernel: Kernel, code: string): Promise<(string | null)[]> {
  const checkpoint = await kernel.checkpoint();
  const forks = await Promise.all([kernel.fork(), kernel.fork()]);
  const drawn = await Promise.all([kernel, ...forks].map((each) => value(each, code)));
  for (const _ of [1, 2]) {
    await within('rollback', kernel.rollback(checkpoint));
    drawn.push(await value(kernel, code));
  }
  await kernel.kill();
  await Promise.all(forks.map((fork) => fork.close()));
  return drawn;
}

describe('random numbers', () => {
  const own: Record<string, string> = {
    random: 'random.random()',
    secrets: 'secrets.token_hex()',
    'ssl.RAND_bytes': 'ssl.RAND_bytes(16)',
    'os.urandom': 'os.urandom(16)',
    uuid: 'uuid.uuid4()',
    'names of tempfile': 'next(tempfile._get_candidate_names())',
    'the key of multiprocessing': 'bytes(multiprocessing.current_process().authkey)',
  };
  const before =
    'import multiprocessing, os, random, secrets, ssl, tempfile, uuid\nrandom.seed(1); given = random.Random(1)';
  for (const [what, code] of Object.entries(own)) {
    test(`${what}: no two copies draw the same`, async (t) => {
      const kernel = startHost(t, { shell: 'plain', launch: 'fork' }).kernel();
      // Drawn from before the copies are made, so that there is a state to copy.
      await run(kernel, `${before}\n${code}`);
      const drawn = await draws(kernel, code);
      assert.equal(new Set(drawn).size, 5, String(drawn));
    });
  }

  test('a generator that a variable holds is copied as it is', async (t) => {
    const kernel = startHost(t, { shell: 'plain', launch: 'fork' }).kernel();
    await run(kernel, `${before}\ngiven.random()`);
    assert.equal(new Set(await draws(kernel, 'given.random()')).size, 1);
  });

  const numpy = hasModule('numpy') ? false : 'this Python has no numpy';
  test('numpy: the global state is anew in every copy, a Generator is copied as it is', { skip: numpy }, async (t) => {
    const kernel = startHost(t, { shell: 'plain', launch: 'fork' }).kernel();
    await run(kernel, 'import numpy as np\nnp.random.seed(1); rng = np.random.default_rng(1); np.random.random()');
    const drawn = (await draws(kernel, 'float(np.random.random()), rng.random()')).map((text) => text?.split(', '));
    assert.equal(new Set(drawn.map((pair) => pair?.[0])).size, 5);
    assert.equal(new Set(drawn.map((pair) => pair?.[1])).size, 1);
  });
});

test('logging: every line is written once, by whoever logs it', async (t) => {
  const path = join(temporaryFolder(t), 'log');
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const kernel = host.kernel({ recovery: 'checkpoint' });
  await run(
    kernel,
    `import logging, sys
log = logging.getLogger("test"); log.setLevel("INFO"); log.propagate = False
log.addHandler(logging.FileHandler(${quoted(path)})); log.addHandler(logging.StreamHandler(sys.stdout))
log.info("before")`,
  );
  const copy = await within('the fork', kernel.fork());
  assert.equal((await run(copy, 'log.info("copy")')).stdout, 'copy\n');
  assert.equal((await run(kernel, 'log.info("original")')).stdout, 'original\n');
  await kernel.kill();
  assert.equal((await run(kernel, 'log.info("back")')).stdout, 'back\n');
  // Buffers and locks of what logs are where they belong: nothing more is written by an end.
  await Promise.all([kernel.close(), copy.close()]);
  assert.equal(readFileSync(path, 'utf8'), 'before\ncopy\noriginal\nback\n');
});

test('what register_at_fork was given is called for every copy, also for one of a frozen copy', async (t) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const kernel = host.kernel();
  await run(kernel, 'import os\ncalls = []\nos.register_at_fork(after_in_child=lambda: calls.append(os.getpid()))');
  const checkpoint = await kernel.checkpoint();
  for (const _ of [1, 2]) {
    await within('rollback', kernel.rollback(checkpoint));
    assert.equal(await value(kernel, 'len(calls)'), '2', 'frozen, and thawed');
  }
  assert.equal(await value(await kernel.fork(), 'len(calls)'), '3');
});

test('the processes in between are nobody that a cell could wait for', async (t) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const kernel = host.kernel({ recovery: 'checkpoint' });
  await run(kernel, 'import os');
  for (let round = 0; round < 20; round += 1) {
    const code = 'try: print(os.waitpid(-1, 0))\nexcept ChildProcessError: print("none")';
    assert.equal((await run(kernel, code)).stdout, 'none\n');
  }
});

const threads = 'len(os.listdir("/proc/self/task"))';

test('OpenBLAS ends its threads before a copy, and starts them again on both sides', { skip }, async (t) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork', python: librariesPythonForTests() ?? 'none' });
  const kernel = host.kernel({ env: { OPENBLAS_NUM_THREADS: '2' }, recovery: 'checkpoint' });
  const warnings: string[] = [];
  kernel.on('warning', ({ message }) => warnings.push(message));
  await run(
    kernel,
    'import os, numpy as np\na = np.arange(1e6).reshape(1000, 1000) % 7\nwanted = (a @ a).sum(); a.dot(a).sum()',
  );
  assert.equal(await value(kernel, `a @ a; ${threads}`), '2');
  const copy = await within('the fork', kernel.fork());
  const again = `assert (a @ a).sum() == wanted; ${threads}`;
  assert.deepEqual(await Promise.all([value(kernel, again), value(copy, again)]), ['2', '2']);
  const checkpoint = await copy.checkpoint();
  await within('rollback', copy.rollback(checkpoint));
  assert.equal(await value(copy, again), '2');
  await kernel.kill();
  const { recovered, text } = await run(kernel, again);
  assert.deepEqual([text, recovered?.state, recovered?.lostCells], ['2', 'checkpoint', 0]);
  assert.deepEqual(warnings, []);
});

const gomp = `
import ctypes, os
try: library = ctypes.CDLL("libgomp.so.1")
except OSError: print("absent")
# A region whose body is a function of C that does nothing to speak of.
def region(threads):
    library.GOMP_parallel(ctypes.cast(ctypes.CDLL(None).time, ctypes.c_void_p), None, threads, 0)
`;

test('libgomp keeps its threads after the first region: no copy; with one thread there is one', async (t) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork' });
  const [many, one] = [host.kernel(), host.kernel()];
  if ((await run(many, gomp)).stdout === 'absent\n') {
    t.skip('there is no libgomp.so.1');
    return;
  }
  assert.equal(await value(many, `region(2); ${threads}`), '2');
  const error = await failureOf(many.fork());
  assert.equal(error.code, 'ERR_COPY_REFUSED');
  assert.match(error.message, /threads that a copy would lose: the native thread '[^']+'/);
  assert.equal(await value(many, `region(2); ${threads}`), '2', 'nothing has become of it');
  await run(one, gomp);
  assert.equal(await value(one, `region(1); ${threads}`), '1');
  const copy = await within('the fork', one.fork());
  for (const each of [one, copy]) assert.equal(await value(each, `region(2); ${threads}`), '2');
});

test('the monitor of tqdm is in the way and named; without it there are copies', { skip }, async (t) => {
  const host = startHost(t, { shell: 'plain', launch: 'fork', python: librariesPythonForTests() ?? 'none' });
  const [watched, unwatched] = [host.kernel(), host.kernel()];
  const count = 'for _ in tqdm(range(3)): pass';
  await run(watched, `from tqdm import tqdm\n${count}`);
  const error = await failureOf(watched.fork());
  assert.equal(error.code, 'ERR_COPY_REFUSED');
  const name = (await value(watched, 'tqdm.monitor.name'))?.slice(1, -1);
  assert.ok(error.message.includes(`the Python thread '${name}'`), error.message);
  await run(watched, 'tqdm.monitor.exit(); tqdm.monitor_interval = 0');
  await run(unwatched, `from tqdm import tqdm\ntqdm.monitor_interval = 0\n${count}`);
  for (const each of [watched, unwatched]) await run(await within('the fork', each.fork()), count);
});
