/** Variables saved to a file and loaded from it. */

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { type Kernel, KernelHostError, SnapshotError, type SnapshotReport } from 'kernelhost';
import { json, ok } from '../fixtures/forkserver-look.ts';
import { runNode, runNodeForJson } from '../fixtures/node-run.ts';
import { cloudpickle, picklings } from '../fixtures/snapshots.ts';
import { hasModule, librariesPythonForTests, pythonForTests, startHost, temporaryFolder } from '../helpers/index.ts';

const why = (report: SnapshotReport, name: string) => report.skipped.find((each) => each.name === name)?.why ?? '';
const reasonOf = async (call: Promise<unknown>) => {
  const error = await call.then(
    () => assert.fail('it did not fail'),
    (error: unknown) => error,
  );
  assert.ok(error instanceof SnapshotError && error instanceof KernelHostError, String(error));
  assert.equal(error.code, 'ERR_SNAPSHOT');
  return [error.reason, error.message] as const;
};

for (const { title, pickler, host: options, skip } of picklings) {
  test(`C109: what cannot be pickled is told with its place and the reason, and costs nothing else (${title})`, {
    skip,
  }, async (t) => {
    const path = join(temporaryFolder(t), 'state');
    const kernel = startHost(t, options).kernel();
    await ok(
      kernel,
      `import threading, types, socket
before = [1]
d = {'ok': 1, 'bad': threading.Lock()}
class Lazy(types.ModuleType): pass
lazy = Lazy('lazy')
made = types.ModuleType('made'); made.made = made
opened = open('/dev/null')
connection = socket.socket()
generator = (i for i in before)
class Holder: pass
holder = Holder(); holder.inner = [before, {'deep': generator}]
everything = globals()
after = [before]`,
    );
    const report = await kernel.save(path);
    assert.equal(report.pickler, pickler);
    // dill makes a new lock for one.
    if (pickler !== 'dill') assert.match(why(report, 'd'), /^d\['bad'\]: TypeError: cannot pickle '_thread\.lock'/);
    assert.match(why(report, 'lazy'), /no module can be imported as 'lazy'/);
    assert.match(why(report, 'opened'), /an open file is not saved/);
    assert.match(why(report, 'connection'), /cannot pickle 'socket'/);
    assert.match(why(report, 'generator'), /cannot pickle 'generator'/);
    assert.match(why(report, 'holder'), /^holder\.inner\[1\]\['deep'\]: TypeError: cannot pickle 'generator'/);
    assert.match(why(report, 'everything'), /the namespace itself/);
    const names = await json<string[]>(
      kernel,
      `import json; print(json.dumps([n for n in globals() if n[:1] != '_' and n not in ('In', 'Out', 'get_ipython', 'exit', 'quit', 'open', 'json')]))`,
    );
    const told = [...report.saved, ...report.skipped.map(({ name }) => name)];
    assert.deepEqual(
      names.filter((name) => !told.includes(name)),
      [],
    );
    assert.equal(new Set(told).size, told.length);

    await kernel.restart();
    const loaded = await kernel.load(path);
    assert.deepEqual([loaded.saved, loaded.skipped, loaded.pickler], [report.saved, [], pickler]);
    assert.equal((await ok(kernel, 'after[0] is before')).text, 'True');
  });

  test(`C110: functions that come back use the live namespace, however they are reached (${title})`, {
    skip,
  }, async (t) => {
    const path = join(temporaryFolder(t), 'state');
    const kernel = startHost(t, options).kernel();
    await ok(
      kernel,
      `import functools
x = 1
def f(): return x
g = f
lam = lambda: x
part = functools.partial(f)
def default(h=f): return h()
def counter():
    n = 0
    def increment():
        nonlocal n
        n += 1
        return n, x
    def look(): return n, x
    return increment, look
increment, look = counter()
increment()
def deco(function):
    @functools.wraps(function)
    def wrapped(*args): return function(*args), x
    return wrapped
@deco
def decorated(): return x
class Base:
    def method(self): return x
    @staticmethod
    def static(): return x
    @classmethod
    def of_class(cls): return cls.__name__, x
    @property
    def prop(self): return x
class Derived(Base):
    def method(self): return super().method(), __class__ is Derived
thing = Derived()
bound = thing.method
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def outer():
    def factorial(n): return 1 if n < 2 else n * factorial(n - 1) * x // x
    return factorial
factorial = outer()
@functools.lru_cache(maxsize=7)
def cached(n): return n if n < 2 else cached(n - 1) + cached(n - 2) + 0 * x
def annotated(a: int, b='q', *, c=3) -> float:
    "text"
    return x
_private = lambda: x
async def coroutine(): return x
holder = [f, {'f': f}]`,
    );
    const report = await kernel.save(path);
    assert.deepEqual(report.skipped, []);
    await kernel.restart();
    assert.deepEqual((await kernel.load(path)).skipped, []);
    const cell = `x = 5
def try_(code):
    try: return eval(code)
    except Exception as error: return repr(error)
looks = {
  'f()': 5, 'g is f': True, 'lam()': 5, 'part()': 5, 'default()': 5, 'increment()': [2, 5], 'look()': [2, 5],
  'decorated()': [5, 5], 'decorated.__name__': 'decorated', 'thing.method()': [5, True], 'bound()': [5, True],
  'bound.__self__ is thing': True, 'Base.static()': 5, 'Derived.of_class()': ['Derived', 5], 'thing.prop': 5,
  'type(thing) is Derived': True, 'even(10)': True, 'factorial(5)': 120, 'cached(20)': 6765,
  'cached.cache_info().maxsize': 7, 'annotated(1)': 5, 'annotated.__annotations__["a"] is int': True,
  'annotated.__defaults__ + (annotated.__kwdefaults__["c"], annotated.__doc__)': ['q', 3, 'text'],
  '_private()': 5, 'holder[0] is holder[1]["f"] is f': True, 'f.__globals__ is globals()': True,
  'Base.method.__globals__ is globals()': True, 'f.__module__': '__main__',
}
import json
wrong = {code: repr(try_(code)) for code, value in looks.items() if json.loads(json.dumps(try_(code), default=repr)) != value}
print(json.dumps(wrong))`;
    assert.deepEqual(await json(kernel, cell), {});
    assert.equal((await ok(kernel, 'await coroutine()')).text, '5');
    // A traceback through a function that came back shows its own line, and not one of this life's cells.
    const failing = await kernel.execute('del x\nf()');
    assert.match(failing.error?.traceback.join('\n') ?? '', /def f\(\): return x/);
  });
}

/** Kinds of values, and whether cloudpickle, dill and pickle save them: + saved and equal, - skipped with a reason. */
const KINDS: readonly (readonly [code: string, check: string, table: string])[] = [
  ['None', 'v is None', '+++'],
  ['2 ** 100', 'v == 2 ** 100', '+++'],
  ["'ä\\ud800'", "v == 'ä\\ud800'", '+++'],
  ["b'x' * 100_000", "v == b'x' * 100_000", '+++'],
  ['bytearray(b"ab")', 'v == bytearray(b"ab")', '+++'],
  ['[1, (2,), {3}, {4: frozenset({5})}]', 'v == [1, (2,), {3}, {4: frozenset({5})}]', '+++'],
  ['a = []; a.append(a); v = a', 'v[0] is v', '+++'],
  ['import datetime; v = datetime.datetime(2020, 1, 2)', 'v.year == 2020', '+++'],
  ['import decimal; v = decimal.Decimal("1.1")', 'str(v) == "1.1"', '+++'],
  ['import collections; v = collections.OrderedDict(a=1)', 'v["a"] == 1', '+++'],
  ['import re; v = re.compile("a+")', 'v.match("aa")', '+++'],
  ['import pathlib; v = pathlib.Path("/x")', 'str(v) == "/x"', '+++'],
  ['import os.path as v', 'v.sep == "/"', '+++'],
  ['v = len', 'v is len', '+++'],
  ['v = lambda n: n + 1', 'v(1) == 2', '+++'],
  ['class C: n = 1\nv = C()', 'v.n == 1', '+++'],
  [
    'import dataclasses\n@dataclasses.dataclass\nclass D:\n    n: int = 1\nv = D(2)',
    'v.n == 2 and "n=2" in repr(v) and v == D(2) and dataclasses.asdict(dataclasses.replace(v, n=3)) == {"n": 3}',
    '+++',
  ],
  ['import enum\nclass E(enum.Enum):\n    A = 1\nv = E.A', 'v.value == 1 and v is E.A', '+--'],
  ['import abc\nclass A(abc.ABC):\n    def m(self): return 1\nv = A()', 'v.m() == 1', '++-'],
  ['import collections\nN = collections.namedtuple("N", "a")\nv = N(1)', 'v.a == 1', '++-'],
  ['class S:\n    __slots__ = ("a",)\nv = S(); v.a = 1', 'v.a == 1', '++-'],
  ['v = ValueError("a", 1)', 'v.args == ("a", 1)', '+++'],
  ['v = iter([1, 2])', 'next(v) == 1', '+++'],
  ['v = range(3)', 'list(v) == [0, 1, 2]', '+++'],
  ['v = memoryview(b"a")', 'bytes(v) == b"a"', '+--'],
  ['import threading; v = threading.Lock()', 'v.acquire(False)', '-+-'],
  ['import threading; v = threading.current_thread()', '', '---'],
  ['import socket; v = socket.socket()', '', '---'],
  ['v = open("/dev/null")', '', '---'],
  ['v = (i for i in ())', '', '---'],
  ['import sys; v = sys._getframe()', '', '---'],
  ['import asyncio; v = asyncio.new_event_loop()', '', '---'],
  ['class R:\n    def __reduce__(self): raise RuntimeError("mine")\nv = R()', '', '---'],
  ['class X:\n    def __reduce__(self): raise SystemExit(3)\nv = X()', '', '---'],
  ['v = []\nfor _ in range(100_000): v = [v]', '', '---'],
];

for (const { title, pickler, host: options, skip } of picklings) {
  test(`C114: ${KINDS.length} kinds of values, one by one: saved and equal, or skipped with a reason (${title})`, {
    skip,
  }, async (t) => {
    const folder = temporaryFolder(t);
    const host = startHost(t, options);
    const wrong: string[] = [];
    for (const [number, [code, check, table]] of KINDS.entries()) {
      const path = join(folder, String(number));
      const kernel = host.kernel();
      await ok(kernel, code.includes('v =') || code.endsWith('as v') ? code : `v = ${code}`);
      const report = await kernel.save(path);
      const isSaved = report.saved.includes('v');
      const isMeant = table[['cloudpickle', 'dill', 'pickle'].indexOf(pickler)] === '+';
      if (isSaved !== isMeant) wrong.push(`${code}: ${isSaved ? 'saved' : why(report, 'v')}`);
      else if (!isSaved && why(report, 'v').length < 10) wrong.push(`${code}: no reason`);
      if (isSaved && isMeant) {
        await kernel.restart();
        const loaded = await kernel.load(path);
        const looked = loaded.saved.includes('v') ? (await kernel.execute(`bool(${check})`)).text : why(loaded, 'v');
        if (looked !== 'True') wrong.push(`${code}: loaded, and then ${looked}`);
      }
      await kernel.close();
    }
    assert.deepEqual(wrong, []);
  });
}

test('C111: where the disk is full the earlier file stays whole, nothing is left beside it, and the error says so', async (t) => {
  try {
    execFileSync('unshare', ['--mount', 'true'], { stdio: 'pipe' });
  } catch {
    t.skip('needs a mount namespace of its own, which takes root and unshare');
    return;
  }
  const disk = temporaryFolder(t);
  const { value } = await runNodeForJson<{ reason: string; message: string; files: string[]; old: string }>(
    t,
    `
    import { readdirSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())} });
    const kernel = host.kernel();
    const path = ${JSON.stringify(join(disk, 'state'))};
    await kernel.execute('old = 1');
    await kernel.save(path);
    await kernel.execute('import os\\nold = 2\\nbig = os.urandom(8_000_000)');
    const { reason, message } = await kernel.save(path).then(() => ({}), (error) => error);
    const files = readdirSync(${JSON.stringify(disk)});
    await kernel.restart();
    await kernel.load(path);
    const { text: old } = await kernel.execute('old');
    await host.close();
    console.log(JSON.stringify({ reason, message, files, old }));
    `,
    { through: ['unshare', '--mount', 'sh', '-c', 'mount -t tmpfs -o size=4m none "$0" && exec "$@"', disk] },
  );
  assert.equal(value.reason, 'disk-full');
  assert.match(value.message, /No space left on device/);
  assert.deepEqual([value.files, value.old], [['state'], '1']);
});

test('C111: a kernel that is killed while it writes leaves the earlier file whole, and the next save clears what it left', async (t) => {
  const folder = temporaryFolder(t);
  const path = join(folder, 'state');
  const kernel = startHost(t).kernel();
  await ok(kernel, 'old = 1');
  await kernel.save(path);
  await ok(
    kernel,
    `import os, signal
big = os.urandom(8_000_000)
class Dying:
    def __reduce__(self): os.kill(os.getpid(), signal.SIGKILL)
dying = Dying()`,
  );
  await assert.rejects(kernel.save(path), { code: 'ERR_KERNEL_DIED' });
  const left = readdirSync(folder).filter((name) => name !== 'state');
  assert.equal(left.length, 1);
  assert.ok(statSync(join(folder, left[0] ?? '')).size > 1_000_000, 'it was killed in the middle');
  assert.deepEqual((await kernel.load(path)).saved, ['old']);
  assert.equal((await ok(kernel, 'old')).text, '1');
  await kernel.save(path);
  assert.deepEqual(readdirSync(folder), ['state']);
});

test('C116: each file that cannot be loaded has its own reason, and sets nothing', async (t) => {
  const folder = temporaryFolder(t);
  const at = (name: string) => join(folder, name);
  const kernel = startHost(t).kernel();
  await ok(kernel, 'value = list(range(1000))');
  await kernel.save(at('good'));
  const good = readFileSync(at('good'));
  const put = (name: string, data: string | Buffer) => {
    writeFileSync(at(name), data);
    return name;
  };
  const flipped = (index: number) => {
    const copy = Buffer.from(good);
    copy[index] = (copy[index] ?? 0) ^ 1;
    return copy;
  };
  mkdirSync(at('directory'));
  symlinkSync('loop', at('loop'));
  execFileSync('mkfifo', [at('fifo')]);
  const version = Buffer.from(good);
  version[7] = 99;
  await kernel.restart();
  const expected: [string, string, RegExp][] = [
    ['nothing', 'missing', /no such file/],
    ['directory', 'not-a-file', /is a directory/],
    ['fifo', 'not-a-file', /no regular file/],
    ['loop', 'unreadable', /symbolic links/],
    [put('empty', ''), 'empty', /is empty/],
    [put('garbage', 'x'.repeat(10_000)), 'not-a-snapshot', /no snapshot/],
    [put('short garbage', 'x'), 'not-a-snapshot', /no snapshot/],
    [put('other version', version), 'version', /another version of kernelhost/],
    [put('head', good.subarray(0, 4)), 'cut-short', /cut short/],
    [put('half', good.subarray(0, good.length / 2)), 'cut-short', /cut short/],
    [put('all but one', good.subarray(0, -1)), 'cut-short', /cut short/],
    [put('longer', Buffer.concat([good, Buffer.from('x')])), 'cut-short', /cut short/],
    [put('flipped', flipped(60)), 'damaged', /damaged/],
    [put('flipped manifest', flipped(good.length - 60)), 'damaged', /damaged/],
    [put('flipped sum', flipped(good.length - 20)), 'damaged', /damaged/],
  ];
  for (const [name, reason, text] of expected) {
    const [said, message] = await reasonOf(kernel.load(at(name)));
    assert.equal(said, reason, `${name}: ${message}`);
    assert.match(message, text);
    assert.ok(message.includes(at(name)) || name === 'loop', message);
  }
  assert.match((await kernel.execute('value')).error?.name ?? '', /NameError/);
  // Root may read everything.
  if (process.getuid?.() !== 0) {
    chmodSync(at('good'), 0);
    assert.equal((await reasonOf(kernel.load(at('good'))))[0], 'unreadable');
  }
  for (const bad of ['', 'a\0b', 7 as unknown as string]) {
    await assert.rejects(kernel.load(bad), { code: 'ERR_INVALID_OPTION', option: 'path' });
    await assert.rejects(kernel.save(bad), { code: 'ERR_INVALID_OPTION', option: 'path' });
  }
});

test('a bit that is flipped anywhere in a snapshot is found', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const kernel = startHost(t).kernel();
  await ok(kernel, 'x = 1\ndef f(): return x');
  await kernel.save(path);
  await kernel.restart();
  const good = readFileSync(path);
  // As one cell: a call for each bit would take long.
  const tried = await json<string[]>(
    kernel,
    `import json
from kernelhost import snapshots
good = open(${JSON.stringify(path)}, 'rb').read()
passed = []
for at in range(len(good)):
    bad = bytearray(good); bad[at] ^= 1 << (at % 8)
    open(${JSON.stringify(path)}, 'wb').write(bad)
    try: snapshots.load(${JSON.stringify(path)}, {})
    except snapshots.SnapshotError: continue
    passed.append(at)
print(json.dumps(passed))`,
  );
  assert.deepEqual(tried, []);
  assert.ok(good.length > 300);
});

test('a save replaces no file that is none of ours, no folder, and follows links', async (t) => {
  const folder = temporaryFolder(t);
  const at = (name: string) => join(folder, name);
  const kernel = startHost(t).kernel();
  await ok(kernel, 'x = 1');
  writeFileSync(at('letter'), 'Dear reader');
  mkdirSync(at('folder'));
  assert.equal((await reasonOf(kernel.save(at('letter'))))[0], 'not-a-snapshot');
  assert.equal(readFileSync(at('letter'), 'utf8'), 'Dear reader');
  assert.equal((await reasonOf(kernel.save(at('folder'))))[0], 'not-a-file');
  assert.equal((await reasonOf(kernel.save('/dev/null')))[0], 'not-a-file');
  assert.equal((await reasonOf(kernel.save(at('none/x'))))[0], 'not-writable');
  writeFileSync(at('empty'), '');
  symlinkSync('empty', at('link'));
  await kernel.save(at('link'));
  assert.ok(statSync(at('empty')).size > 0);
  assert.equal(statSync(at('empty')).mode & 0o777, 0o600);
  assert.deepEqual(readdirSync(folder).sort(), ['empty', 'folder', 'letter', 'link']);
});

test('a variable that cannot be loaded costs only itself and what shares something with it', {
  skip: cloudpickle.skip,
}, async (t) => {
  const folder = temporaryFolder(t);
  const path = join(folder, 'state');
  const kernel = startHost(t, cloudpickle.host).kernel({ cwd: folder });
  writeFileSync(join(folder, 'passing.py'), 'class Thing: pass\n');
  const code = `import passing
x = 1
shared = [1]
def f(): return x
first = [shared, passing.Thing(), [7]]
inner = first[2]
second = {'shared': shared}
def g(): return x
third = [passing.Thing(), inner]
last = [shared, f, g]`;
  await ok(kernel, code);
  assert.deepEqual((await kernel.save(path)).skipped, []);
  truncateSync(join(folder, 'passing.py'));
  await kernel.restart();
  const report = await kernel.load(path);
  assert.deepEqual(
    report.skipped.map(({ name }) => name),
    ['first', 'inner', 'third'],
  );
  assert.match(why(report, 'first'), /Thing/);
  assert.match(why(report, 'inner'), /shares something with what could not be loaded: first/);
  const looks = 'x = 5\n(f(), g(), last[1] is f, last[0] is second["shared"] is shared)';
  assert.equal((await ok(kernel, looks)).text, '(5, 5, True, True)');
});

test('limits skip what is beyond them, and shared things are counted once', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const kernel = startHost(t).kernel();
  await ok(kernel, 'small = 1\nbig = b"x" * 50_000\nsame = [big]\nother = b"y" * 50_000\nend = 2');
  const report = await kernel.save(path, { maxVariableBytes: 60_000, maxBytes: 70_000 });
  assert.deepEqual(report.saved, ['small', 'big', 'same', 'end']);
  assert.match(why(report, 'other'), /limit of 70000 bytes/);
  assert.match(why(await kernel.save(path, { maxVariableBytes: 1000 }), 'big'), /limit of 1000 bytes for a variable/);
  assert.deepEqual((await kernel.save(path, { maxBytes: 0 })).saved, []);
  await assert.rejects(kernel.save(path, { maxBytes: -1 }), { code: 'ERR_INVALID_OPTION', option: 'maxBytes' });
  await assert.rejects(kernel.save(path, { maxByte: 1 } as object), { code: 'ERR_INVALID_OPTION' });
});

test('what is not saved within the time is skipped, and the rest is in the file', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const kernel = startHost(t).kernel();
  await ok(
    kernel,
    `import time
early = 1
class Slow:
    def __reduce__(self):
        time.sleep(0.3)
        return (int, ())
slow = [Slow()]
late = 2`,
  );
  const report = await kernel.save(path, { timeoutMs: 150 });
  assert.ok(report.saved.includes('early'));
  assert.match(why(report, 'slow'), /the time for saving was up/);
  assert.match(why(report, 'late'), /the time for saving was up/);
  await kernel.restart();
  await kernel.load(path);
  assert.equal((await ok(kernel, 'early')).text, '1');
});

test('an interrupt ends a save, and the earlier file stays', async (t) => {
  const folder = temporaryFolder(t);
  const path = join(folder, 'state');
  const kernel = startHost(t).kernel({ onCall: { pickling: () => void kernel.interrupt() } });
  await ok(kernel, 'x = 1');
  await kernel.save(path);
  const before = readFileSync(path);
  await ok(
    kernel,
    `import kernelhost, time
class Slow:
    def __reduce__(self):
        kernelhost.call('pickling')
        time.sleep(20)
slow = Slow()`,
  );
  assert.equal((await reasonOf(kernel.save(path)))[0], 'interrupted');
  assert.deepEqual(readFileSync(path), before);
  assert.deepEqual(readdirSync(folder), ['state']);
});

for (const { title, host: options, skip } of picklings) {
  test(`what variables print and show while they are pickled is not in the way, and nothing counts the save (${title})`, {
    skip,
  }, async (t) => {
    const path = join(temporaryFolder(t), 'state');
    const kernel = startHost(t, options).kernel();
    await ok(
      kernel,
      `import sys
class Noisy:
    def __reduce__(self):
        print('kernelhost-snapshot:{"saved": []}'); print('no end of line', end='', flush=True); print('err', file=sys.stderr)
        try:
            from IPython.display import display
            display({'application/vnd.kernelhost.snapshot+json': {'saved': ['forged']}}, raw=True)
        except ImportError: pass
        return (int, (7,))
n = Noisy()
before = {*globals(), 'before'}`,
    );
    const counted = await kernel.execute('6 * 7');
    const printed: string[] = [];
    kernel.on('output', (output) => void printed.push(JSON.stringify(output)));
    const report = await kernel.save(path);
    assert.ok(report.saved.includes('n') && !report.saved.includes('forged'));
    const next = await kernel.execute(
      'print(_, [name for name in globals() if name not in before and name[:1] != "_"])',
    );
    assert.equal(next.executionCount, counted.executionCount + 1);
    assert.equal(next.stdout, '42 []\n');
    assert.deepEqual([printed, next.displays], [[], []]);
    assert.equal(kernel.toNotebook().cells.length, 3);
    await kernel.restart();
    await kernel.load(path);
    assert.equal((await ok(kernel, 'n')).text, '7');
  });
}

test('recovered is told by the next cell, although a load was the first thing that the new life did', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const kernel = startHost(t).kernel();
  await ok(kernel, 'x = 1');
  await kernel.save(path);
  await kernel.kill();
  await kernel.load(path);
  const first = await kernel.execute('x');
  assert.deepEqual([first.text, first.recovered?.state, first.recovered?.exit.generation], ['1', 'fresh', 1]);
  assert.equal((await kernel.execute('x')).recovered, null);
});

test('on_restore: callbacks are called after a load, in order; one that raises is told and harms nobody', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const kernel = startHost(t).kernel({ onCall: { connect: (args) => args } });
  await ok(kernel, 'x = 1');
  await kernel.save(path);
  await ok(
    kernel,
    `import kernelhost
seen = []
@kernelhost.on_restore
def broken(what): raise RuntimeError(f'not after a {what}')
kernelhost.on_restore(lambda what: seen.append((what, kernelhost.call('connect', x))))
x = 2`,
  );
  const report = await kernel.load(path);
  assert.deepEqual(report.skipped, [{ name: 'on_restore: broken', why: 'RuntimeError: not after a load' }]);
  assert.equal((await ok(kernel, 'seen')).text, "[('load', 1)]");
  assert.equal((await kernel.execute('kernelhost.on_restore(3)')).error?.name, 'TypeError');
});

test('a snapshot of one daemon is loaded by another', async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const script = (body: string) => `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())} });
    const kernel = host.kernel();
    ${body}
    await host.close();`;
  const saved = await runNode(
    t,
    script(`
      await kernel.execute('x = 1\\ndef f(): return x\\nclass C:\\n    def m(self): return f()\\nc = C()');
      console.log(JSON.stringify((await kernel.save(${JSON.stringify(path)})).skipped));`),
  );
  assert.equal(saved.stdout, '[]\n', saved.stderr);
  const loaded = await runNode(
    t,
    script(`
      const { skipped } = await kernel.load(${JSON.stringify(path)});
      console.log(JSON.stringify([skipped, (await kernel.execute('x = 5; c.m()')).text]));`),
  );
  assert.equal(loaded.stdout, '[[],"5"]\n', loaded.stderr);
});

test('two kernels that save to one path at once leave one whole snapshot and nothing beside it', async (t) => {
  const folder = temporaryFolder(t);
  const path = join(folder, 'state');
  const host = startHost(t);
  const kernels = [host.kernel(), host.kernel(), host.kernel()];
  await Promise.all(
    kernels.map((kernel, number) => ok(kernel, `import os\nwho = ${number}\nbig = os.urandom(2_000_000)`)),
  );
  for (let round = 0; round < 5; round++) await Promise.all(kernels.map((kernel) => kernel.save(path)));
  assert.deepEqual(readdirSync(folder), ['state']);
  const [first] = kernels as [Kernel];
  await first.restart();
  assert.ok((await first.load(path)).saved.includes('who'));
});

const numbers = librariesPythonForTests();
test('arrays and frames come back with what they share, also without cloudpickle', {
  skip: numbers === null || !hasModule('pandas', numbers) ? 'needs a Python with pandas' : false,
}, async (t) => {
  const path = join(temporaryFolder(t), 'state');
  const kernel = startHost(t, { python: numbers ?? '' }).kernel();
  await ok(
    kernel,
    `import numpy as np, pandas as pd
array = np.arange(1_000_000, dtype='f8').reshape(1000, 1000)
same = {'array': array}
view = array[::2, ::3]
frame = pd.DataFrame({'a': [1, 2, None], 'b': list('xyz')}, index=pd.date_range('2020-01-01', periods=3))
series = frame['a']
scalar = np.float32(1.5)
objects = np.array([{'a': 1}, None], dtype=object)
random = np.random.default_rng(7); expected = np.random.default_rng(7).integers(1000)`,
  );
  assert.deepEqual((await kernel.save(path)).skipped, []);
  await kernel.restart();
  assert.deepEqual((await kernel.load(path)).skipped, []);
  const looks = `[same['array'] is array, float(array.sum()), bool((view == array[::2, ::3]).all()), frame.shape, frame.index[2].day,
    float(series.sum()), float(scalar), objects[0]['a'], bool(random.integers(1000) == expected), array.flags.writeable]`;
  assert.equal(
    (await ok(kernel, looks)).text?.replace(/\s+/g, ' '),
    '[True, 499999500000.0, True, (3, 2), 3, 3.0, 1.5, 1, True, True]',
  );
});

for (const { title, host: options, skip } of picklings.filter(({ title }) => !title.endsWith('plain'))) {
  test(`saving and loading 300 MB takes little memory besides them (${title})`, { skip }, async (t) => {
    const path = join(temporaryFolder(t), 'state');
    const kernel = startHost(t, options).kernel();
    const peak = "int(__import__('re').search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024";
    await ok(kernel, 'small = 1');
    // What has to be loaded for it once is not the point.
    await kernel.save(path);
    await ok(kernel, "big = b'x' * 300_000_000");
    const before = Number((await ok(kernel, peak)).text);
    assert.ok(before > 286);
    await kernel.save(path);
    const after = Number((await ok(kernel, peak)).text);
    assert.ok(after - before < 20, `saving: from ${before} to ${after} MiB`);
    await kernel.restart();
    const fresh = Number((await ok(kernel, peak)).text);
    await kernel.load(path);
    const loaded = Number((await ok(kernel, peak)).text);
    assert.ok(loaded - fresh < 286 + 40, `loading: from ${fresh} to ${loaded} MiB`);
    assert.equal((await ok(kernel, 'len(big)')).text, '300000000');
    assert.ok(existsSync(path));
  });
}
