/** What cells print and show: complete, in order, within the cap, and never faster than the listener. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Kernel, KernelOptions, Output } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, type TestContext, until, within } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);

function kernelOf(t: TestContext, shell: (typeof shells)[number], options: KernelOptions = {}): Kernel {
  return startHost(t, { shell }).kernel(options);
}

/** The text of one stream among outputs. */
function textOf(outputs: readonly Output[], stream: 'stdout' | 'stderr' = 'stdout'): string {
  return outputs.map((output) => (output.kind === 'text' && output.stream === stream ? output.text : '')).join('');
}

/** Whether every string in the value, keys too, is text that can be encoded. */
function isText(value: unknown): boolean {
  if (typeof value === 'string') return value.isWellFormed();
  if (typeof value !== 'object' || value === null) return true;
  return Object.entries(value).every(([key, each]) => key.isWellFormed() && isText(each));
}

/** The outputs as one word each, with neighbouring text put together. */
function order(outputs: readonly Output[]): string[] {
  const words: string[] = [];
  let open = '';
  for (const output of outputs) {
    if (output.kind !== 'text') {
      open = '';
      words.push(output.kind === 'display' ? `display ${String(output.display.data['text/plain'])}` : output.kind);
    } else if (output.stream === open) {
      words.push(`${words.pop()}${output.text}`);
    } else {
      open = output.stream;
      words.push(`${open} ${output.text}`);
    }
  }
  return words;
}

for (const shell of shells) {
  test(`text, displays and the value come in the order in which the cell made them (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const shows = shell === 'ipython' ? 'from IPython.display import display' : '';
    const code = [
      shows,
      'import os, subprocess, sys',
      'for i in range(30):',
      '    print("p", i)',
      shell === 'ipython' ? '    display(i)' : '',
      '    os.write(1, b"w")',
      '    _ = subprocess.run(["echo", "child"])',
      shell === 'ipython' ? '    display(-i)' : '',
      '"value"',
    ].join('\n');
    const seen: Output[] = [];
    const result = await kernel.execute(code, { onOutput: (output) => void seen.push(output) });
    const expected: string[] = [];
    for (let i = 0; i < 30; i++) {
      if (shell === 'ipython')
        expected.push(`stdout p ${i}\n`, `display ${i}`, 'stdout wchild\n', `display ${i === 0 ? 0 : -i}`);
      else expected.push(`stdout p ${i}\nwchild\n`);
    }
    if (shell === 'plain') expected.splice(0, 30, expected.join('').replaceAll('\nstdout ', '\n'));
    expected.push('value');
    assert.deepEqual(order(result.outputs), expected);
    assert.deepEqual(order(seen), expected, 'a listener sees the same');
    assert.equal(result.text, "'value'");
  });

  test(`output of a failing cell comes before its error (${shell})`, async (t) => {
    const result = await kernelOf(t, shell).execute('import sys\nprint("out")\nprint("err", file=sys.stderr)\n1 / 0');
    assert.deepEqual(
      [result.status, result.error?.name, result.stdout, result.stderr],
      ['error', 'ZeroDivisionError', 'out\n', 'err\n'],
    );
    assert.equal(result.outputs.at(-1)?.kind, 'error');
    assert.match(result.error?.traceback.join('\n') ?? '', /1 \/ 0/);
  });

  test(`head and tail of each stream are kept within the cap, and what is missing is counted (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell, { maxOutputBytes: 10_000 });
    const code = 'import sys\nfor i in range(20_000): print("line", i)\nsys.stderr.write("e" * 50_000 + "end")';
    let whole = 0;
    const result = await kernel.execute(code, {
      onOutput: (output) => {
        if (output.kind === 'text' && output.stream === 'stdout') whole += output.text.length;
      },
    });
    const written = Array.from({ length: 20_000 }, (_, i) => `line ${i}\n`).join('').length;
    assert.equal(whole, written, 'a listener gets all of it');
    assert.ok(result.stdout.startsWith('line 0\nline 1\n'));
    assert.ok(result.stdout.endsWith('line 19998\nline 19999\n'));
    assert.ok(result.stderr.startsWith('eee') && result.stderr.endsWith('eend'));
    // The streams may say where they were cut; what they kept is within the cap.
    assert.ok(result.stdout.length <= 10_200 && result.stdout.length >= 9_000, String(result.stdout.length));
    assert.ok(Math.abs(result.missing.stdoutBytes - (written - 10_000)) <= 8, String(result.missing.stdoutBytes));
    assert.ok(Math.abs(result.missing.stderrBytes - (50_003 - 10_000)) <= 8, String(result.missing.stderrBytes));
    const own = await kernel.execute('print("x" * 1000)', { maxOutputBytes: 100 });
    assert.ok(Math.abs(own.missing.stdoutBytes - 901) <= 8);
    const small = await ok(kernel, 'print("x" * 1000)');
    assert.deepEqual([small.stdout.length, small.missing], [1001, { stdoutBytes: 0, stderrBytes: 0 }]);
    const none = await kernel.execute('print("x" * 1000)', { maxOutputBytes: 0 });
    assert.equal(none.missing.stdoutBytes, 1001);
  });

  test(`tasks that a cell created go on between cells, and what they print is the kernel's output event (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const outputs: Output[] = [];
    kernel.on('output', (output) => outputs.push(output));
    const code = [
      'import asyncio',
      'ticks = 0',
      'async def tick():',
      '    global ticks',
      '    while ticks < 1000:',
      '        await asyncio.sleep(0.01)',
      '        ticks += 1',
      '        print("tick", ticks)',
      'task = asyncio.create_task(tick())',
      'await asyncio.sleep(0)',
    ].join('\n');
    const begun = await ok(kernel, code);
    assert.equal(begun.stdout, '');
    await until('ticks between cells', () => /tick 10\n/.test(textOf(outputs)));
    const seen = await ok(kernel, 'ticks');
    assert.ok(Number(seen.text) >= 10);
    const cell = await ok(kernel, 'await asyncio.sleep(0.1); "over"');
    assert.match(cell.stdout, /tick \d+\n/, 'while a cell runs it is the output of that cell');
    const before = textOf(outputs);
    await ok(kernel, 'task.cancel(); ticks');
    assert.equal(new Set(before.split('\n')).size, before.split('\n').length, 'nothing is told twice');
  });

  test(`what a thread or a child prints after its cell is the kernel's output event (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const outputs: Output[] = [];
    kernel.on('output', (output) => outputs.push(output));
    const code = [
      'import subprocess, sys, threading, time',
      'child = subprocess.Popen(["sh", "-c", "sleep 0.3; echo of the child; echo and its errors >&2"])',
      'def work():',
      '    time.sleep(0.3); print("of the thread", flush=True)',
      'threading.Thread(target=work).start()',
      'print("of the cell")',
    ].join('\n');
    const result = await ok(kernel, code);
    assert.equal(result.stdout, 'of the cell\n');
    await until('the late output', () => /of the child/.test(textOf(outputs)) && /of the thread/.test(textOf(outputs)));
    await until('the late errors', () => textOf(outputs, 'stderr') === 'and its errors\n');
    await ok(kernel, 'child.wait()');
  });

  test(`onOutput is waited for, and a slow one slows the cell down (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = 'import time\nbegan = time.monotonic()\nprint("x" * 12_000_000)\nround(time.monotonic() - began, 2)';
    let inside = 0;
    let overlaps = 0;
    let bytes = 0;
    let calls = 0;
    const result = await kernel.execute(code, {
      onOutput: async (output) => {
        overlaps += inside++;
        calls += 1;
        if (output.kind === 'text') bytes += output.text.length;
        // Until all of the credit is used the cell is not held.
        if (calls <= 40) await sleep(20);
        inside -= 1;
      },
    });
    assert.deepEqual([bytes, overlaps], [12_000_001, 0]);
    assert.ok(Number(result.text) >= 0.4, `the cell was not slowed: ${result.text} s`);
  });

  test(`stream() gives outputs as they come, then the result, and holds the cell while nobody reads (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const arrivals: string[] = [];
    const stream = kernel.stream(
      'import time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(0.2)\n"end"',
    );
    const began = performance.now();
    let first = 0;
    for await (const output of stream) {
      if (first === 0) first = performance.now() - began;
      arrivals.push(output.kind === 'text' ? output.text : output.kind);
    }
    const total = performance.now() - began;
    assert.deepEqual(arrivals.join(''), '0\n1\n2\nvalue');
    assert.ok(total - first > 400, 'the first came while the cell ran');
    assert.equal((await stream.result).text, "'end'");

    const held = kernel.stream('written = 0\nfor i in range(200):\n    print("x" * 100_000)\n    written += 1');
    const reader = held[Symbol.asyncIterator]();
    await reader.next();
    await until('the cell is held', async () => {
      const { cpuMs } = await kernel.usage();
      await sleep(100);
      return (await kernel.usage()).cpuMs - cpuMs < 5;
    });
    let over = false;
    held.result.then(
      () => {
        over = true;
      },
      () => {},
    );
    await sleep(50);
    assert.equal(over, false, 'the cell waits for its reader');
    let bytes = 0;
    for (let next = await reader.next(); next.done !== true; next = await reader.next()) {
      if (next.value.kind === 'text') bytes += next.value.text.length;
    }
    assert.ok(bytes > 18_000_000);
    assert.equal((await held.result).status, 'ok');
  });

  test(`leaving the loop of a stream early interrupts its cell (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const stream = kernel.stream('while True: print("more")');
    for await (const _ of stream) break;
    assert.equal((await within('the result', stream.result)).status, 'interrupted');
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
  });

  test(`a stream whose result alone is awaited does not hold its cell (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const result = await within('the result', kernel.stream('print("x" * 20_000_000)').result);
    assert.deepEqual([result.status, result.missing.stdoutBytes > 18_000_000], ['ok', true]);
  });

  test(`C57: what asks for the descriptor of sys.stdout or writes below it is captured (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const child = await ok(
      kernel,
      'import subprocess, sys\nsubprocess.run(["sh", "-c", "echo hi; echo ho >&2"], stdout=sys.stdout, stderr=sys.stderr).returncode',
    );
    assert.deepEqual([child.stdout, child.stderr, child.text], ['hi\n', 'ho\n', '0']);
    const mixed = await ok(
      kernel,
      'import os\nprint("a", end=""); sys.stdout.buffer.write(b"b"); print("c", end=""); os.write(1, b"d"); sys.stdout.writelines(["e"]); sys.__stdout__.write("f"); None',
    );
    assert.equal(mixed.stdout, 'abcdef');
    const logged = await ok(
      kernel,
      'import logging\nlogging.warning("careful")\nhandler = logging.StreamHandler(sys.stdout); logging.getLogger("x").addHandler(handler); logging.getLogger("x").propagate = False; logging.getLogger("x").error("bad")',
    );
    assert.deepEqual([logged.stdout, logged.stderr], ['bad\n', 'WARNING:root:careful\n']);
    const inC = await ok(
      kernel,
      'import ctypes\nlibc = ctypes.CDLL(None)\nlibc.puts(b"from C"); libc.fflush(None); None',
    );
    assert.equal(inC.stdout, 'from C\n');
    const dumped = await ok(
      kernel,
      'import faulthandler\nfaulthandler.enable()\nfaulthandler.dump_traceback()\nsys.stdout.fileno(), sys.stderr.fileno(), faulthandler.is_enabled()',
    );
    assert.equal(dumped.text, '(1, 2, True)');
    assert.match(dumped.stderr, /most recent call first/);
    const redirected = await ok(
      kernel,
      'import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as text: print("inside")\nprint("outside", text.getvalue())',
    );
    assert.equal(redirected.stdout, 'outside inside\n\n');
  });

  test(`C58: a lone surrogate, wherever it comes from, is a result or an ordinary error, and the kernel lives (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const codes = [
      'print("a\\udc80b")',
      'print("a\\ud8ffb")',
      'raise ValueError("a\\ud8ffb")',
      '"a\\udc80b"',
      'import os, sys\nos.fsdecode(b"\\xff.txt")',
      'print(os.fsdecode(b"\\xff.txt"))',
      'sys.stderr.write("\\udc80")',
      'class Odd:\n    def __repr__(self): return "\\ud8ff"\nOdd()',
      'type("N\\udc80", (Exception,), {})',
      'raise type("N\\udc80", (Exception,), {})("x")',
      'x = "\\udc80" +',
    ];
    if (shell === 'ipython') {
      codes.push(
        'from IPython.display import display\ndisplay({"text/plain": "a\\udc80b", "application/json": {"k\\udc80": ["\\ud8ff"]}}, raw=True)',
      );
    }
    for (const code of codes) {
      const result = await within(code, kernel.execute(code));
      assert.ok(isText(result), `${code}: ${JSON.stringify(result)}`);
      if (result.status === 'error' && !code.startsWith('raise')) {
        assert.match(result.error?.name ?? '', /UnicodeEncodeError|SyntaxError/, code);
      }
    }
    const { pid } = kernel;
    // A lone surrogate in what JS gives is no text either; it must not end the life.
    await kernel.execute('"\ud800"').catch(() => {});
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
    assert.equal(kernel.pid, pid);
  });

  test(`C63: text is UTF-8 whatever the locale is (${shell})`, async (t) => {
    const places = [
      { LANG: 'C', LC_ALL: undefined, LC_CTYPE: undefined },
      { LC_ALL: 'POSIX', LANG: undefined, LC_CTYPE: undefined },
      { LANG: undefined, LC_ALL: undefined, LC_CTYPE: undefined },
      { LC_ALL: 'en_US.ISO-8859-1', LANG: undefined, LC_CTYPE: undefined },
      { PYTHONIOENCODING: 'latin-1', LC_ALL: 'C', LANG: undefined, LC_CTYPE: undefined },
    ];
    for (const [index, variables] of places.entries()) {
      for (const launch of ['fork', 'spawn'] as const) {
        const kernel = startHost(t, { shell, launch, defaults: { env: variables, inheritEnv: 'all' } }).kernel();
        const where = `${index} ${launch}`;
        const result = await ok(
          kernel,
          'import sys\nhéllo = "🐍é"\nprint(héllo); print(héllo, file=sys.stderr); héllo',
        );
        assert.deepEqual([result.stdout, result.stderr, result.text], ['🐍é\n', '🐍é\n', "'🐍é'"], where);
        const failed = await kernel.execute('raise ValueError("🐍")');
        assert.equal(failed.error?.value, '🐍', where);
      }
    }
  });

  test(`C63: bytes that are no UTF-8, characters in two pieces, NUL and carriage returns arrive as text (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const invalid = await ok(kernel, 'import os, subprocess, time\n_ = subprocess.run(["printf", "a\\\\377b\\\\303"])');
    assert.equal(invalid.stdout, 'a\ufffdb\ufffd');
    const split = await ok(kernel, 'os.write(1, b"\\xf0\\x9f"); time.sleep(0.1); os.write(1, b"\\x90\\x8d!"); None');
    assert.equal(split.stdout, '🐍!');
    const unfinished = await ok(kernel, 'os.write(1, b"x\\xf0\\x9f"); None');
    assert.equal(unfinished.stdout, 'x\ufffd');
    assert.equal((await ok(kernel, 'print("clean")')).stdout, 'clean\n', 'the rest does not reach the next cell');
    const odd = await ok(kernel, 'print("a\\0b"); print("10%\\r20%\\r\\x1b[31mred\\x1b[0m")');
    assert.equal(odd.stdout, 'a\0b\n10%\r20%\r\x1b[31mred\x1b[0m\n');
    let text = '';
    const many = await kernel.execute('print("🐍" * 300_000)', {
      maxOutputBytes: 1000,
      onOutput: (output) => {
        if (output.kind === 'text') text += output.text;
      },
    });
    assert.equal(text, `${'🐍'.repeat(300_000)}\n`);
    assert.ok(!many.stdout.includes('\ufffd'), 'no character is cut at the cap');
  });

  test(`a cell without output, one with an empty line and one with 3 MB in one call are right (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell, { maxOutputBytes: 8_000_000 });
    const none = await ok(kernel, 'pass');
    assert.deepEqual([none.stdout, none.stderr, none.outputs, none.text, none.data], ['', '', [], null, null]);
    assert.equal((await ok(kernel, 'print()')).stdout, '\n');
    assert.equal((await ok(kernel, 'print("y" * 3_000_000)')).stdout.length, 3_000_001);
    assert.equal((await ok(kernel, '"z" * 3_000_000')).text?.length, 3_000_002);
  });
}

test('displays carry their MIME bundle, id and updates, and clear_output is told', async (t) => {
  if (!hasModule('IPython')) {
    t.skip('IPython is not installed in the Python of the tests');
    return;
  }
  const kernel = startHost(t, { shell: 'ipython' }).kernel();
  const code = [
    'from IPython.display import HTML, JSON, clear_output, display',
    'handle = display(HTML("<b>1</b>"), display_id="mine")',
    'handle.update(HTML("<b>2</b>"))',
    'display({"application/json": {"a": [1, None]}, "text/plain": "json", "image/png": b"\\x89PNG"}, raw=True, metadata={"isolated": True})',
    'clear_output(wait=True)',
  ].join('\n');
  const { displays, outputs } = await ok(kernel, code);
  assert.deepEqual(
    displays.map(({ displayId, update, data }) => [displayId, update, data['text/html']]),
    [
      ['mine', false, '<b>1</b>'],
      ['mine', true, '<b>2</b>'],
      [null, false, undefined],
    ],
  );
  assert.deepEqual(displays[2]?.data['application/json'], { a: [1, null] });
  assert.equal(displays[2]?.data['image/png'], Buffer.from('\x89PNG', 'latin1').toString('base64'));
  assert.deepEqual(displays[2]?.metadata, { isolated: true });
  assert.deepEqual(outputs.at(-1), { kind: 'clear', wait: true });
});

test('a silent cell is not counted', async (t) => {
  const kernel = startHost(t).kernel();
  assert.equal((await ok(kernel, '1')).executionCount, 1);
  const silent = await kernel.execute('print("x"); y = 5', { silent: true });
  assert.deepEqual([silent.status, silent.stdout], ['ok', 'x\n']);
  const after = await ok(kernel, 'y');
  assert.deepEqual([after.executionCount, after.text], [2, '5']);
});
