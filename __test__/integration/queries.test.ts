/** Questions about code: `complete`, `inspect`, `isComplete`. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { Kernel, KernelOptions } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, type TestContext, until, within } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);

function kernelOf(t: TestContext, shell: (typeof shells)[number], options: KernelOptions = {}): Kernel {
  return startHost(t, { shell }).kernel(options);
}

/** Starts a cell and comes back when it runs. */
async function begin(kernel: Kernel, code: string): Promise<Promise<unknown>[]> {
  const ready = Promise.withResolvers<void>();
  const cell = kernel.execute(`print("ready", flush=True)\n${code}`, { onOutput: () => ready.resolve() });
  cell.catch(() => {});
  await within('the cell begins', ready.promise);
  return [cell];
}

for (const shell of shells) {
  test(`complete() knows names and attributes, and says what a match replaces (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(
      kernel,
      'import os\nlong_name_of_mine = "text"\nclass Thing:\n    first = 1\n    def second(self): pass\nthing = Thing()',
    );
    for (const [code, has, start] of [
      ['long_na', 'long_name_of_mine', 0],
      ['x = thing.fi', 'first', 10],
      ['thing.', 'second', 6],
      ['"😀", thing.sec', 'second', 12],
      ['os.path.jo', 'join', 8],
      ['for i in ran', 'range', 9],
    ] as const) {
      const { matches, start: from, end } = await kernel.complete(code, code.length);
      // Some completers give the dotted name and replace all of it.
      const whole = matches.map((match) => code.slice(0, from) + match + code.slice(end));
      assert.ok(whole.includes(code.slice(0, start) + has), `${code}: ${JSON.stringify(matches)} at ${from}`);
      assert.equal(end, code.length);
    }
    const middle = await kernel.complete('long_na + 1', 7);
    assert.deepEqual([middle.start, middle.end], [0, 7]);
    assert.deepEqual((await kernel.complete('nothing_like_this', 17)).matches, []);
    assert.equal((await ok(kernel, '1')).executionCount, 2);
  });

  test(`inspect() tells a signature and a docstring, and the source when asked (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'def double(number, by=2):\n    """Doubles it."""\n    return number * by');
    const { found, data } = await kernel.inspect('double(5)', 3);
    const text = String(data['text/plain']);
    assert.ok(found);
    assert.match(text, /double\(number, by=2\)/);
    assert.match(text, /Doubles it\./);
    assert.doesNotMatch(text, /return number/);
    assert.match(String((await kernel.inspect('double', 6, 1)).data['text/plain']), /return number \* by/);
    assert.match(String((await kernel.inspect('double(', 7)).data['text/plain']), /Doubles it/);
    assert.deepEqual(await kernel.inspect('no_such_name', 3), { found: false, data: {} });
    assert.deepEqual(await kernel.inspect('', 0), { found: false, data: {} });
  });

  test(`isComplete() tells whole code from code that wants more lines, and from code that is wrong (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await kernel.start();
    for (const [code, expected] of [
      ['1 + 1', 'complete'],
      ['x = [1,', 'incomplete'],
      ['def f():', 'incomplete'],
      ['def f():\n    return 1', 'incomplete'],
      ['def f():\n    return 1\n\n', 'complete'],
      ['"""text', 'incomplete'],
      ['await f()', 'complete'],
      ['1 +* 2', 'invalid'],
      ['x = )', 'invalid'],
      ['', 'complete'],
    ] as const) {
      assert.equal(await kernel.isComplete(code), expected, JSON.stringify(code));
    }
  });

  test(`a question is answered while a cell awaits something (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import asyncio\nsome_name = 1\nevent = asyncio.Event()');
    const [cell] = await begin(kernel, 'await event.wait()\n"over"');
    assert.equal(await within('the answer', kernel.isComplete('1 +')), 'invalid');
    assert.ok((await kernel.complete('some_na', 7)).matches.length > 0);
    assert.ok((await kernel.inspect('some_name', 3)).found);
    const many = await Promise.all(Array.from({ length: 20 }, () => kernel.isComplete('(')));
    assert.deepEqual(new Set(many), new Set(['incomplete']));
    await kernel.interrupt();
    assert.equal(((await cell) as { status: string }).status, 'interrupted');
    assert.equal((await ok(kernel, '2')).text, '2');
  });

  test(`C121: while a cell runs that awaits nothing, questions fail soon; afterwards they are answered at once (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const looks = 'class Looked:\n    def __dir__(self):\n        looked.append(1)\n        return []';
    await ok(kernel, `import time\nsome_name, looked = 1, []\n${looks}\nthing = Looked()`);
    const [cell] = await begin(kernel, 'time.sleep(600)');
    const refused = { code: 'ERR_KERNEL_BUSY', message: /a cell is running/ };
    const asked = Array.from({ length: 50 }, (_, n) =>
      kernel.complete(n === 0 ? 'thing.' : 'some_na', n === 0 ? 6 : 7),
    );
    for (const each of asked) await assert.rejects(within('the refusal', each), refused);
    // Behind one that was given up nobody is kept waiting.
    await assert.rejects(within('the refusal at once', kernel.complete('some_na', 7), 1_000), refused);
    await kernel.interrupt();
    await cell;
    const { matches } = await within('the answer', kernel.complete('some_na', 7));
    assert.ok(matches.length > 0);
    assert.equal(await kernel.isComplete('1'), 'complete');
    assert.equal((await ok(kernel, 'looked')).text, '[]', 'what was given up is not looked up any more');
  });

  test(`C49: an interrupt ends a slow completion with an error, and the life goes on (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const { pid } = await kernel.start();
    const code = `
import time, sys
class Slow:
    def __dir__(self):
        print("looking", file=sys.stderr, flush=True)
        time.sleep(600)
        return []
slow = Slow()
`;
    await ok(kernel, code);
    const looking = Promise.withResolvers<void>();
    kernel.on('output', (output) => {
      if (output.kind === 'text' && output.text.includes('looking')) looking.resolve();
    });
    const completion = kernel.complete('slow.', 5);
    completion.catch(() => {});
    await within('it looks', looking.promise);
    await kernel.interrupt();
    // Sooner than it would be interrupted by itself.
    await assert.rejects(within('the completion', completion, 3_000), {
      code: 'ERR_QUERY_FAILED',
      message: /KeyboardInterrupt/,
    });
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
    assert.equal(kernel.pid, pid);
  });

  test(`a question that takes too long is interrupted by itself, and holds no cell up for longer (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import time\nclass Slow:\n    def __dir__(self):\n        time.sleep(600)\nslow = Slow()');
    const completion = kernel.complete('slow.', 5);
    completion.catch(() => {});
    const { text } = await within('the cell behind it', kernel.execute('1 + 1'), 15_000);
    assert.equal(text, '2');
    await assert.rejects(completion, { code: /ERR_QUERY_FAILED|ERR_KERNEL_BUSY/ });
  });
}

test('a question needs a life, and starts none', async (t) => {
  const host = startHost(t, { shell: 'plain' });
  const kernel = host.kernel();
  await assert.rejects(within('the answer', kernel.complete('x', 1)), {
    code: 'ERR_KERNEL_ABSENT',
    message: /complete\(\).*start\(\)/,
  });
  assert.equal(kernel.state, 'absent');
  const start = kernel.start();
  assert.equal(await within('the start', kernel.isComplete('1')), 'complete');
  await start;
  await kernel.close();
  await assert.rejects(kernel.inspect('x', 1), { code: 'ERR_KERNEL_CLOSED' });
});

test('a question that waits when its life ends is told so', async (t) => {
  const kernel = kernelOf(t, 'plain');
  await ok(kernel, 'import os\nclass Deadly:\n    def __dir__(self):\n        os._exit(3)\nthing = Deadly()');
  await assert.rejects(within('the answer', kernel.complete('thing.', 6)), {
    code: 'ERR_KERNEL_DIED',
    message: /complete\(\) was not answered.*code 3/,
  });
  await until('it is absent', () => kernel.state === 'absent');
  assert.equal((await ok(kernel, '1')).text, '1');
});

test('arguments are checked', async (t) => {
  const kernel = kernelOf(t, 'plain');
  await kernel.start();
  for (const [code, cursor] of [
    [5, 0],
    ['x', 2],
    ['x', -1],
    ['x', 0.5],
    ['x', '0'],
  ] as unknown as [string, number][]) {
    await assert.rejects(kernel.complete(code, cursor), { code: 'ERR_INVALID_OPTION' });
    await assert.rejects(kernel.inspect(code, cursor), { code: 'ERR_INVALID_OPTION' });
  }
  await assert.rejects(kernel.inspect('x', 0, 2 as 1), { code: 'ERR_INVALID_OPTION', message: /detail/ });
});
