/** Calls of cells into the daemon: `kernelhost.call`, `acall`, `tools`. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setImmediate as turn } from 'node:timers/promises';
import type { CellStream, HostCallContext, HostCallHandler, Kernel, KernelOptions } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, type TestContext, within } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);
const launches = ['fork', 'spawn'] as const;

function kernelOf(t: TestContext, onCall: Record<string, HostCallHandler>, options: KernelOptions = {}): Kernel {
  return startHost(t, { shell: 'plain' }).kernel({ onCall, ...options });
}

/** A handler that tells when it is called and when its signal is aborted, and never returns. */
function waitingHandler(): { handler: HostCallHandler; called: Promise<HostCallContext>; aborted: Promise<unknown> } {
  const called = Promise.withResolvers<HostCallContext>();
  const aborted = Promise.withResolvers<unknown>();
  const handler: HostCallHandler = (_, context) => {
    called.resolve(context);
    context.signal.addEventListener('abort', () => aborted.resolve(context.signal.reason));
    return new Promise(() => {});
  };
  return { handler, called: called.promise, aborted: aborted.promise };
}

for (const shell of shells) {
  for (const launch of launches) {
    test(`a cell calls functions of the daemon's in three ways (${shell}, ${launch})`, async (t) => {
      const seen: unknown[] = [];
      const host = startHost(t, { shell, launch });
      const kernel = host.kernel({
        onCall: {
          search: (args, { generation, kernel: caller, signal }) => {
            seen.push([args, generation, caller === kernel, signal.aborted]);
            return { hits: [1, 2.5, null, 'é😀', true] };
          },
          later: async (args) => {
            await turn();
            return args;
          },
        },
      });
      const value = "{'hits': [1, 2.5, None, 'é😀', True]}";
      assert.equal((await ok(kernel, 'import kernelhost; kernelhost.call("search", {"query": "x"})')).text, value);
      assert.equal((await ok(kernel, 'kernelhost.tools.search(query="y", n=[1, (2, 3)])')).text, value);
      assert.equal((await ok(kernel, 'await kernelhost.acall("search")')).text, value);
      assert.equal((await ok(kernel, 'await kernelhost.tools.later.acall(a=1)')).text, "{'a': 1}");
      assert.equal((await ok(kernel, 'kernelhost.call("later", ["\\0", "\\ud800"])')).text, "['\\x00', '\uFFFD']");
      assert.deepEqual(
        seen.map((each) => JSON.stringify(each)),
        ['[{"query":"x"},1,true,false]', '[{"query":"y","n":[1,[2,3]]},1,true,false]', '[null,1,true,false]'],
      );
      assert.equal(
        (await ok(kernel, 'dir(kernelhost.tools), "call" in dir(kernelhost)')).text,
        "(['later', 'search'], True)",
      );
    });
  }

  test(`what a function throws, Python raises; an unknown name lists the known ones (${shell})`, async (t) => {
    const host = startHost(t, { shell });
    const kernel = host.kernel({
      onCall: {
        fails: () => {
          throw new RangeError('out of "range" é');
        },
        rejects: () => Promise.reject('only text'),
        odd: () => 5n,
      },
    });
    const { error } = await kernel.execute('import kernelhost\nkernelhost.tools.fails()');
    assert.deepEqual([error?.name, error?.value], ['HostCallError', 'out of "range" é']);
    assert.doesNotMatch(error?.traceback.join('\n') ?? '', /calls\.py|api\.py/);
    const caught = 'try: kernelhost.call("fails")\nexcept kernelhost.HostCallError as error: print(error.name)';
    assert.equal((await ok(kernel, caught)).stdout, 'RangeError\n');
    assert.equal((await kernel.execute('await kernelhost.acall("rejects")')).error?.value, 'only text');
    assert.match((await kernel.execute('kernelhost.call("odd")')).error?.value ?? '', /BigInt/);
    assert.equal(
      (await kernel.execute('kernelhost.call("odder")')).error?.value,
      'the daemon has no function "odder" for this kernel; it has fails, rejects, odd',
    );
    const attribute = (await kernel.execute('kernelhost.tools.odder')).error;
    assert.equal(attribute?.name, 'AttributeError');
    assert.match(attribute?.value ?? '', /fails, rejects, odd/);
    assert.match(
      (await host.kernel().execute('import kernelhost; kernelhost.call("x")')).error?.value ?? '',
      /has none/,
    );
    for (const args of ['object()', '{"a": {1, 2}}', 'float("nan")', '{(1, 2): 3}']) {
      const { error, status } = await kernel.execute(`kernelhost.call("fails", ${args})`);
      assert.equal(status, 'error', args);
      assert.match(error?.name ?? '', /TypeError|ValueError/, args);
    }
    const cycle =
      'x = []; x.append(x)\ntry: kernelhost.call("fails", x)\nexcept ValueError as error: print("deep" in str(error))';
    assert.equal((await ok(kernel, cycle)).stdout, 'True\n');
    assert.equal(kernel.generation, 1);
  });
}

test('C119: bytes go both ways as they are, 20 MB of them too', async (t) => {
  const kernel = kernelOf(t, {
    swap: (args) => {
      const { first, rest } = args as { first: Uint8Array; rest: Uint8Array[] };
      return { first: rest[0], rest: [rest[1], first] };
    },
    double: (args) => {
      const { name, data } = args as { name: string; data: Uint8Array };
      assert.ok(data instanceof Uint8Array);
      return { name, data: [data, data.subarray(0, 3)], none: new Uint8Array(0) };
    },
    large: () => Buffer.alloc(20_000_000, 7),
  });
  const code = `
import kernelhost
data = bytes(range(256)) * 78125
answer = kernelhost.call("double", {"name": "n", "data": memoryview(data)})
small = kernelhost.call("double", {"name": "", "data": bytearray(b"abc")})
len(data), answer["data"][0] == data, answer["data"][1], answer["none"], type(small["data"][0]).__name__
`;
  assert.equal((await ok(kernel, code)).text, "(20000000, True, b'\\x00\\x01\\x02', b'', 'bytes')");
  const swapped = 'kernelhost.call("swap", {"first": b"1", "rest": [b"22", memoryview(b"333")[::-1]]})';
  assert.equal((await ok(kernel, swapped)).text, "{'first': b'22', 'rest': [b'333', b'1']}");
  assert.equal((await ok(kernel, 'kernelhost.call("large") == b"\\x07" * 20_000_000')).text, 'True');
  const { error } = await kernel.execute('kernelhost.call("double", {"name": "", "data": bytes(70_000_000)})');
  assert.equal(error?.name, 'ValueError');
  assert.match(error?.value ?? '', /limit is 67108864/);
  assert.equal((await ok(kernel, '1')).text, '1');
});

test('ten tasks call at once and overlap', async (t) => {
  let inside = 0;
  const all = Promise.withResolvers<void>();
  const kernel = kernelOf(t, {
    meet: async (args) => {
      inside += 1;
      if (inside === 10) all.resolve();
      // Only together do they get on.
      await all.promise;
      return args;
    },
  });
  const code = 'import asyncio, kernelhost\nawait asyncio.gather(*(kernelhost.acall("meet", n) for n in range(10)))';
  assert.equal((await within('ten tasks', ok(kernel, code))).text, '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]');
});

test('C119: a hundred threads call at once, while the main thread calls, shows and prints', async (t) => {
  let inside = 0;
  const all = Promise.withResolvers<void>();
  const kernel = kernelOf(t, {
    meet: async (args) => {
      inside += 1;
      if (inside === 100) all.resolve();
      await all.promise;
      return args;
    },
    quick: (args) => args,
  });
  const code = `
import kernelhost, threading
results = {}
def work(n):
    results[n] = kernelhost.call("meet", n)
    display(n)
    results[n] += kernelhost.call("quick", 1000)
threads = [threading.Thread(target=work, args=(n,)) for n in range(100)]
for n, thread in enumerate(threads):
    thread.start()
    kernelhost.call("quick")
    display("main")
for thread in threads: thread.join()
results == {n: n + 1000 for n in range(100)}
`;
  const result = await within('a hundred threads', ok(kernel, code), 20_000);
  assert.deepEqual([result.text, result.displays.length], ['True', 200]);
});

test('threads, executors, tasks of other loops, and tasks between cells call too', async (t) => {
  const answered = Promise.withResolvers<unknown>();
  const kernel = kernelOf(t, {
    echo: (args) => args,
    done: (args, { generation }) => {
      answered.resolve([args, generation]);
      return null;
    },
  });
  const code = `
import asyncio, kernelhost, threading, concurrent.futures
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda n: kernelhost.call("echo", n), range(20)))
def other_loop():
    async def both():
        return await asyncio.gather(kernelhost.acall("echo", "a"), kernelhost.acall("echo", "b"))
    found.append(asyncio.run(both()))
thread = threading.Thread(target=other_loop)
thread.start(); thread.join()
found.append(await asyncio.to_thread(kernelhost.call, "echo", "c"))
found[20:], found[:20] == list(range(20))
`;
  assert.equal((await ok(kernel, code)).text, "([['a', 'b'], 'c'], True)");
  await ok(
    kernel,
    'async def late():\n    await asyncio.sleep(0.01)\n    await kernelhost.acall("done", "from a task")\ntask = asyncio.create_task(late())',
  );
  assert.deepEqual(await within('the task', answered.promise), ['from a task', 1]);
  assert.equal((await ok(kernel, 'await task; task.done()')).text, 'True');
});

test('output that was printed before a call is there when it is made', async (t) => {
  const seen: string[] = [];
  const kernel = kernelOf(t, {
    look: () => {
      seen.push('call');
    },
  });
  await kernel.execute('import kernelhost\nfor n in range(20):\n    print(n)\n    kernelhost.call("look")', {
    onOutput: (output) => {
      if (output.kind === 'text') seen.push(...output.text.trim().split('\n'));
    },
  });
  assert.deepEqual(seen, Array.from({ length: 20 }, (_, n) => [String(n), 'call']).flat());
});

for (const how of ['interrupt', 'abort', 'time limit'] as const) {
  for (const call of ['kernelhost.call("wait")', 'await kernelhost.acall("wait")']) {
    test(`an ${how} ends ${call} and aborts the handler's signal, and the life goes on`, async (t) => {
      const { handler, called, aborted } = waitingHandler();
      const kernel = kernelOf(t, { wait: handler, echo: (args) => args });
      const abort = new AbortController();
      const cell = kernel.execute(`import kernelhost\nprint("before")\n${call}\nprint("after")`, {
        signal: abort.signal,
        ...(how === 'time limit' ? { timeoutMs: 200 } : {}),
      });
      const context = await within('the call', called);
      assert.equal(context.signal.aborted, how === 'time limit' ? context.signal.aborted : false);
      if (how === 'interrupt') await within('the interrupt', kernel.interrupt());
      if (how === 'abort') abort.abort();
      const { status, stdout } = await within('the cell', cell);
      assert.deepEqual([status, stdout], [how === 'time limit' ? 'timed-out' : 'interrupted', 'before\n']);
      assert.equal(((await within('the abort', aborted)) as Error).name, 'AbortError');
      assert.equal((await ok(kernel, 'kernelhost.call("echo", 7)')).text, '7');
      assert.equal(kernel.generation, 1);
    });
  }
}

test('a task that is cancelled aborts its handler alone', async (t) => {
  const { handler, called, aborted } = waitingHandler();
  const goOn = Promise.withResolvers<string>();
  let isOtherAborted: boolean | undefined;
  const kernel = kernelOf(t, {
    wait: handler,
    other: async (_, { signal }) => {
      const answer = await goOn.promise;
      isOtherAborted = signal.aborted;
      return answer;
    },
    echo: (args) => args,
    release: async () => {
      await aborted;
      goOn.resolve('went on');
    },
  });
  const code = `
import asyncio, kernelhost
task = asyncio.create_task(kernelhost.acall("wait"))
other = asyncio.create_task(kernelhost.acall("other"))
print(await kernelhost.acall("echo", 1))
task.cancel()
try: await task
except asyncio.CancelledError: print("cancelled")
await kernelhost.acall("release")
await other
`;
  const result = await within('the cell', ok(kernel, code));
  assert.deepEqual([result.stdout, result.text], ['1\ncancelled\n', "'went on'"]);
  await within('the call', called);
  assert.equal(isOtherAborted, false);
});

test('an interrupt aborts the calls of its cell that threads go on waiting for', async (t) => {
  const { handler, called, aborted } = waitingHandler();
  const kernel = kernelOf(t, { wait: handler });
  const code = [
    'import kernelhost, threading, time',
    'threading.Thread(target=kernelhost.call, args=("wait",), daemon=True).start()',
    'time.sleep(600)',
  ];
  const cell = kernel.execute(code.join('\n'));
  await within('the call', called);
  await within('the interrupt', kernel.interrupt());
  assert.equal((await cell).status, 'interrupted');
  await within('the abort', aborted);
});

for (const end of ['crash', 'kill', 'restart', 'close'] as const) {
  test(`a handler's signal is aborted when the life ends by ${end}, and its late answer reaches no later life`, async (t) => {
    const answer = Promise.withResolvers<string>();
    const called = Promise.withResolvers<HostCallContext>();
    const kernel = kernelOf(t, {
      slow: async (_, context) => {
        called.resolve(context);
        if (context.generation === 1) return answer.promise;
        // Late enough to find somebody who waits under the same number.
        answer.resolve('of 1');
        await turn();
        return `of ${context.generation}`;
      },
    });
    const cell = kernel.execute('import kernelhost, os, threading\nkernelhost.call("slow")');
    cell.catch(() => {});
    const { signal } = await within('the call', called.promise);
    const aborted = new Promise<void>((resolve) => signal.addEventListener('abort', () => resolve()));
    if (end === 'crash') process.kill(kernel.pid ?? 0, 'SIGSEGV');
    if (end === 'kill') await kernel.kill();
    if (end === 'restart') await kernel.restart();
    if (end === 'close') await kernel.close();
    await within('the abort', aborted);
    await assert.rejects(cell, { code: 'ERR_KERNEL_DIED' });
    if (end === 'close') return;
    const next = kernel.execute('import kernelhost\n[kernelhost.call("slow") for _ in range(3)]');
    assert.equal((await within('the next life', next)).text, "['of 2', 'of 2', 'of 2']");
  });
}

test('a handler may interrupt its own kernel, and run cells on another', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const other = host.kernel();
  const kernel: Kernel = host.kernel({
    onCall: {
      ask: async () => (await other.execute('6 * 7')).text,
      stop: () => kernel.interrupt(),
    },
  });
  assert.equal((await ok(kernel, 'import kernelhost; kernelhost.call("ask")')).text, "'42'");
  const { status, stdout } = await within('the cell', kernel.execute('print(1)\nkernelhost.call("stop")\nprint(2)'));
  assert.deepEqual([status, stdout], ['interrupted', '1\n']);
  assert.equal((await ok(kernel, '1')).text, '1');
});

test('a handler that runs a cell on the kernel that waits for it is told of the deadlock', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const queued: Promise<unknown>[] = [];
  const other: Kernel = host.kernel({ onCall: { back: async () => (await kernel.execute('1')).text } });
  const kernel: Kernel = host.kernel({
    onCall: {
      direct: async () => (await kernel.execute('1')).text,
      streamed: async () => {
        let stream: CellStream;
        try {
          stream = kernel.stream('1');
        } catch {
          throw new Error('stream() threw, and did not leave it to the result');
        }
        return (await stream.result).text;
      },
      around: async () => {
        const { error } = await other.execute('import kernelhost; kernelhost.call("back")');
        throw new Error(error?.value);
      },
      // Does not wait for it, so nothing is in the way once it has returned.
      after: () => {
        setImmediate(() => queued.push(kernel.execute('"later"')));
      },
    },
  });
  for (const name of ['direct', 'streamed', 'around']) {
    const { error } = await within(name, kernel.execute(`import kernelhost; kernelhost.call("${name}")`));
    assert.equal(error?.name, 'HostCallError');
    assert.match(error?.value ?? '', /cannot run a cell for the handler "(direct|streamed|around)"/, name);
  }
  assert.equal((await ok(kernel, 'kernelhost.call("after"); 5')).text, '5');
  await turn();
  assert.equal(((await queued[0]) as { text: string }).text, "'later'");
});

test('a process that a cell has forked cannot call, and says so', async (t) => {
  const kernel = kernelOf(t, { echo: (args) => args });
  const code = `
import kernelhost, os
pid = os.fork()
if pid == 0:
    try: kernelhost.call("echo", 1)
    except kernelhost.HostCallError as error: print("child:", error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
kernelhost.call("echo", 2)
`;
  const { stdout, text } = await within('the cell', ok(kernel, code));
  assert.match(stdout, /^child: a process that was forked/);
  assert.equal(text, '2');
});

test('more calls than anybody waits for are refused, and the daemon keeps its memory', async (t) => {
  const { handler, called } = waitingHandler();
  const kernel = kernelOf(t, { wait: handler, echo: (args) => args });
  const code = `
import asyncio, kernelhost
tasks = [asyncio.create_task(kernelhost.acall("wait")) for _ in range(1200)]
done, pending = await asyncio.wait(tasks, timeout=None, return_when=asyncio.FIRST_COMPLETED)
while len(done) < 200:
    more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    done |= more
for task in pending: task.cancel()
await asyncio.gather(*tasks, return_exceptions=True)
str(done.pop().exception())[:40], kernelhost.call("echo", 3)
`;
  const { text } = await within('the cell', ok(kernel, code), 20_000);
  assert.equal(text, "('1000 calls into the daemon have no answe', 3)");
  await called;
});

test('code in init cannot call into the daemon, and says so', async (t) => {
  const kernel = kernelOf(t, { echo: (args) => args }, { init: 'import kernelhost\nkernelhost.call("echo")' });
  await assert.rejects(within('the start', kernel.start()), { code: 'ERR_KERNEL_START', message: /still starting/ });
});
