/** Cells that put out more than anybody can take: bounded, told, interruptible, and nobody else's trouble. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { CellResult, Display, Kernel, Output } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { hasModule, startHost, type TestContext, until, within } from '../helpers/index.ts';

const shells = hasModule('IPython') ? (['ipython', 'plain'] as const) : (['plain'] as const);
/** Far more than any of it takes: what hangs is caught, what is slow on a busy machine is not. */
const FLOOD_MS = 120_000;

function kernelOf(t: TestContext, shell: (typeof shells)[number]): Kernel {
  return startHost(t, { shell }).kernel();
}

function show(shell: (typeof shells)[number]): string {
  return shell === 'ipython' ? 'from IPython.display import clear_output, display\n' : '';
}

/** Takes the event loop for a millisecond. */
function slowly(): void {
  const end = performance.now() + 1;
  while (performance.now() < end);
}

/** What somebody sees who shows the outputs one after the other, as a notebook does. */
class Picture {
  items: (string | Display)[] = [];
  #clearWaits = false;

  readonly add = (output: Output): void => {
    if (output.kind === 'clear') {
      if (!output.wait) this.items = [];
      this.#clearWaits = output.wait;
      return;
    }
    if (output.kind === 'display' && output.display.update) {
      const { display } = output;
      this.items = this.items.map((item) =>
        typeof item !== 'string' && item.displayId === display.displayId ? display : item,
      );
      return;
    }
    if (this.#clearWaits) this.items = [];
    this.#clearWaits = false;
    if (output.kind === 'text') this.items.push(output.text);
    if (output.kind === 'display') this.items.push(output.display);
  };

  get texts(): string[] {
    return this.items.map((item) => (typeof item === 'string' ? item : String(item.data['text/plain'])));
  }

  static of({ outputs }: CellResult): Picture {
    const picture = new Picture();
    outputs.forEach(picture.add);
    return picture;
  }
}

for (const shell of shells) {
  test(`C52: of 200 000 flushed writes a slow listener gets every byte, and the result says what it left out (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = 'import sys\nfor i in range(200_000): print(f"{i:099}", flush=True)\nprint("END")';
    let line = 0;
    let rest = '';
    const result = await within(
      'the flood',
      kernel.execute(code, {
        onOutput: (output) => {
          slowly();
          assert.equal(output.kind, 'text');
          if (output.kind !== 'text') return;
          const lines = (rest + output.text).split('\n');
          rest = lines.pop() ?? '';
          for (const each of lines) {
            assert.equal(each, line === 200_000 ? 'END' : String(line).padStart(99, '0'));
            line += 1;
          }
        },
      }),
      FLOOD_MS,
    );
    assert.deepEqual([result.status, line, rest], ['ok', 200_001, '']);
    assert.ok(result.stdout.endsWith('\nEND\n'));
    assert.equal(Buffer.byteLength(result.stdout) + result.missing.stdoutBytes, 20_000_004);
  });

  test(`C53: four kernels that print without end hold up neither the event loop nor a fifth kernel, and stop when asked (${shell})`, async (t) => {
    const host = startHost(t, { shell });
    const fifth = host.kernel();
    await ok(fifth, '1 + 1');
    let inThisTurn = 0;
    let mostInATurn = 0;
    let over = false;
    const turn = () => {
      mostInATurn = Math.max(mostInATurn, inThisTurn);
      inThisTurn = 0;
      if (!over) setImmediate(turn);
    };
    setImmediate(turn);
    const bytes = [0, 0, 0, 0];
    const kernels = bytes.map(() => host.kernel());
    const calls = kernels.map((kernel, index) =>
      kernel.execute("while True: print('x' * 200)", {
        onOutput: (output) => {
          inThisTurn += 1;
          slowly();
          if (output.kind === 'text') bytes[index] = (bytes[index] ?? 0) + output.text.length;
        },
      }),
    );
    await until(
      'all have printed more than may be under way',
      () => bytes.every((count) => count > 2_000_000),
      FLOOD_MS,
    );
    const before = process.memoryUsage().rss;
    for (let round = 0; round < 20; round++) assert.equal((await ok(fifth, '1 + 1')).text, '2');
    await until('they have printed more', () => bytes.every((count) => count > 6_000_000), FLOOD_MS);
    const grown = process.memoryUsage().rss - before;
    await within('the interrupts', Promise.all(kernels.map((kernel) => kernel.interrupt())));
    const results = await within('the results', Promise.all(calls));
    over = true;
    assert.deepEqual(
      results.map(({ status }) => status),
      Array(4).fill('interrupted'),
    );
    assert.ok(mostInATurn <= 8, `${mostInATurn} calls of listeners in one turn of the event loop`);
    assert.ok(grown < 64e6, `${grown} bytes more`);
    assert.equal((await ok(kernels[0] as Kernel, '1 + 1')).text, '2');
  });

  test(`C54: a child that fills both streams, or one while the other is silent, is not held up (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const child = [
      'import os',
      'for i in range(50_000):',
      '    os.write(1, b"o" * 999 + b"\\n")',
      '    os.write(2, b"e" * 999 + b"\\n")',
    ].join('\n');
    const both = `import subprocess, sys\nsubprocess.run([sys.executable, "-c", ${JSON.stringify(child)}]).returncode`;
    const result = await within('both streams', ok(kernel, both), FLOOD_MS);
    assert.equal(result.text, '0');
    assert.equal(result.stdout.length + result.missing.stdoutBytes, 50_000_000);
    assert.equal(result.stderr.length + result.missing.stderrBytes, 50_000_000);
    assert.ok(!/[^o\n]/.test(result.stdout) && !/[^e\n]/.test(result.stderr));
    const one = `subprocess.run([sys.executable, "-c", "import os\\nfor i in range(5000): os.write(2, b'e' * 10_000)"]).returncode`;
    const silent = await within('one stream', ok(kernel, one), FLOOD_MS);
    assert.deepEqual([silent.text, silent.stdout], ['0', '']);
    assert.equal(silent.stderr.length + silent.missing.stderrBytes, 50_000_000);
  });

  test(`C62: of 20 000 updates of one display a slow listener and the result get the last state (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = `${show(shell)}handle = display("begin", display_id="bar")\nfor i in range(20_000): handle.update(i)\nprint("after")`;
    const seen = new Picture();
    let calls = 0;
    const onOutput = (output: Output) => {
      calls += 1;
      slowly();
      seen.add(output);
    };
    const result = await within('the flood', kernel.execute(code, { onOutput }), FLOOD_MS);
    assert.deepEqual(seen.texts, ['19999', 'after\n']);
    assert.ok(calls < 20_000, 'states that are no news are passed over');
    const silent = await within('the flood without a listener', ok(kernel, code), FLOOD_MS);
    for (const each of [result, silent]) {
      assert.deepEqual([Picture.of(each).texts, each.missingDisplays], [['19999', 'after\n'], 0]);
      assert.ok(each.displays.length < 10_000, String(each.displays.length));
    }
  });

  test(`displays without end are held by a listener that does not take them (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    let release = () => {};
    const gate = new Promise<void>((resolve) => {
      release = resolve;
    });
    let calls = 0;
    const call = kernel.execute(`${show(shell)}shown = 0\nwhile True:\n    display("x" * 100_000)\n    shown += 1`, {
      onOutput: () => {
        calls += 1;
        return gate;
      },
    });
    await until('the first', () => calls === 1);
    let before = -1;
    await until('the cell is held', async () => {
      const { cpuMs } = await kernel.usage();
      const rests = cpuMs === before;
      before = cpuMs;
      await new Promise((resolve) => setTimeout(resolve, 100));
      return rests;
    });
    const interrupt = kernel.interrupt();
    await within('the interrupt', interrupt);
    release();
    assert.equal((await within('the cell', call)).status, 'interrupted');
    assert.ok(Number((await ok(kernel, 'shown')).text) < 10, 'no more than the credit allows');
  });

  test(`a display of 200 MB and a repr of 600 MB are cut, say so, and cost no life (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const { pid } = await kernel.start();
    const shown = await within(
      'the display',
      ok(
        kernel,
        `${show(shell)}display({"text/plain": "a picture", "image/png": "A" * 200_000_000}, raw=True)\ndisplay({"image/png": b"A" * 200_000_000}, raw=True)`,
      ),
      FLOOD_MS,
    );
    const [named, bare] = shown.displays;
    assert.match(String(named?.data['text/plain']), /^a picture\n\[left out, .*: image\/png of 200000000\]$/);
    assert.match(String(bare?.data['text/plain']), /^\[left out, .*: image\/png of 200000000\]$/);
    assert.deepEqual(named?.metadata, { kernelhost: { missing: { 'image/png': 200_000_000 } } });
    assert.equal(named?.data['image/png'], undefined);
    const long = await within(
      'the repr',
      ok(kernel, 'class Long:\n    def __repr__(self): return "<" + "r" * 600_000_000 + ">"\nLong()'),
      FLOOD_MS,
    );
    assert.match(long.text ?? '', /^<r+… \[599000002 characters cut\] …r+>$/);
    assert.equal(long.text?.length, 1_000_000 + '… [599000002 characters cut] …'.length);
    const failed = await within(
      'the error',
      kernel.execute('raise ValueError("<" + "e" * 200_000_000 + ">")'),
      FLOOD_MS,
    );
    assert.match(failed.error?.value ?? '', /^<e+… \[\d+ characters cut\] …e+>$/);
    assert.equal((await ok(kernel, '1 + 1')).text, '2');
    assert.equal(kernel.pid, pid);
  });

  test(`displays that are large together are kept from both ends, and the rest is counted (${shell})`, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = `${show(shell)}for i in range(40): display({"text/plain": f"{i} " + "x" * 4_000_000}, raw=True)\n"value"`;
    const result = await within('the displays', ok(kernel, code), FLOOD_MS);
    const shown = result.displays.map(({ data }) => Number.parseInt(String(data['text/plain']), 10));
    assert.ok(shown.length < 20 && result.missingDisplays > 0);
    assert.equal(shown.length + result.missingDisplays, 40);
    assert.deepEqual([shown[0], shown.at(-1), result.text], [0, 39, "'value'"]);
  });
}

test('C62: of 20 000 times clear_output and print a slow listener and the result get the last state', async (t) => {
  if (!hasModule('IPython')) {
    t.skip('IPython is not installed in the Python of the tests');
    return;
  }
  const kernel = kernelOf(t, 'ipython');
  for (const wait of ['True', 'False']) {
    const code = `${show('ipython')}for i in range(20_000):\n    clear_output(wait=${wait})\n    print(i)`;
    const seen = new Picture();
    const onOutput = (output: Output) => {
      slowly();
      seen.add(output);
    };
    const result = await within('the flood', kernel.execute(code, { onOutput }), FLOOD_MS);
    assert.equal(seen.texts.join(''), '19999\n', wait);
    const silent = await within('the flood without a listener', ok(kernel, code), FLOOD_MS);
    const written = Array.from({ length: 20_000 }, (_, i) => `${i}\n`).join('');
    for (const each of [result, silent]) {
      assert.equal(Picture.of(each).texts.join(''), '19999\n', wait);
      assert.equal(each.stdout, written, 'the text is all there');
      assert.ok(each.outputs.length < 20_000, String(each.outputs.length));
    }
  }
});
