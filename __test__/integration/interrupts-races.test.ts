/** Interrupts, aborts, time limits, ends and deaths that come at the same time: the first cause wins, and no other cell is hit. */

import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import type { CellResult, ExitReason, Kernel } from 'kernelhost';
import { shells } from '../fixtures/cells.ts';
import { ok } from '../fixtures/forkserver-look.ts';
import { startHost, temporaryFolder, until, within } from '../helpers/index.ts';

/** In steps that no timer has. */
async function moment(afterMs: number): Promise<void> {
  const at = performance.now() + afterMs;
  while (performance.now() < at) await new Promise(setImmediate);
}

interface Outcome {
  result: CellResult | null;
  error: { code?: string; name: string; exit?: ExitReason; partial?: CellResult | null } | null;
}

async function outcomeOf(result: Promise<CellResult>): Promise<Outcome> {
  return within('the cell', result).then(
    (result) => ({ result, error: null }),
    (error: NonNullable<Outcome['error']>) => ({ result: null, error }),
  );
}

/** What became of a cell, in one word. */
function told({ result, error }: Outcome): string {
  if (result !== null) return result.status;
  return error?.code === 'ERR_KERNEL_DIED' ? `died of ${error.exit?.cause}` : (error?.code ?? error?.name ?? '?');
}

interface Cause {
  /** Sets it off at this moment. */
  act(kernel: Kernel, controller: AbortController): void;
  /** What the cell may be told when this was the first. */
  tells: readonly string[];
}

const causes: Record<string, Cause> = {
  abort: { act: (_, controller) => controller.abort(), tells: ['interrupted'] },
  interrupt: { act: (kernel) => void kernel.interrupt().catch(() => {}), tells: ['interrupted'] },
  kill: { act: (kernel) => void kernel.kill().catch(() => {}), tells: ['died of kill'] },
  death: { act: (kernel) => process.kill(kernel.pid ?? 0, 'SIGKILL'), tells: ['died of external-signal'] },
  restart: { act: (kernel) => void kernel.restart().catch(() => {}), tells: ['died of restart'] },
};

const CELL_MS = 20;
const LIMIT_MS = 20;

for (const shell of shells) {
  test(`abort, interrupt, time limit, end, kill and death race over 1 ms offsets: each cell ends once, of one of them (${shell})`, async (t) => {
    const host = startHost(t, { shell });
    const kernel = host.kernel();
    const exits: ExitReason[] = [];
    kernel.on('exit', (exit) => exits.push(exit));
    await ok(kernel, 'import time');
    const seen = new Set<string>();
    for (const [name, cause] of Object.entries(causes)) {
      for (let offset = LIMIT_MS - 8; offset <= LIMIT_MS + 8; offset++) {
        for (const ends of [true, false]) {
          const what = `${name} at ${offset} ms, ${ends ? 'the cell ends by itself' : 'only its limit ends it'}`;
          const before = exits.length;
          const controller = new AbortController();
          const seconds = ends ? CELL_MS / 1000 : 600;
          const running = outcomeOf(
            kernel.execute(`import time; print("begun", flush=True); time.sleep(${seconds}); "whole"`, {
              timeoutMs: ends ? 600_000 : LIMIT_MS,
              signal: controller.signal,
            }),
          );
          await moment(offset);
          if (kernel.pid !== null) cause.act(kernel, controller);
          const outcome = await running;
          const one = told(outcome);
          seen.add(one);
          // Either what would have ended it anyway was first, or this was.
          assert.ok([ends ? 'ok' : 'timed-out', ...cause.tells].includes(one), `${what}: ${one}`);
          if (outcome.result?.status === 'ok') assert.equal(outcome.result.text, "'whole'", what);
          const following = await outcomeOf(kernel.execute('6 * 7'));
          if (name === 'death' && told(following) === 'died of external-signal') {
            // Death from outside that comes as the cell is over is seen only when the next one has been sent.
            assert.ok(!one.startsWith('died'), what);
            assert.equal((await ok(kernel, '6 * 7')).text, '42', what);
          } else {
            assert.deepEqual([told(following), following.result?.text], ['ok', '42'], what);
          }
          if (one.startsWith('died')) {
            assert.equal(exits.length, before + 1, what);
            assert.deepEqual(outcome.error?.exit, exits.at(-1), `${what}: it is told the exit that was`);
          }
          assert.ok(exits.length <= before + 1, `${what}: one exit per life`);
        }
      }
    }
    for (const each of ['ok', 'timed-out', 'interrupted', 'died of kill', 'died of external-signal']) {
      assert.ok(seen.has(each), `"${each}" was among them: ${[...seen]}`);
    }
  });

  test(`1 000 interrupts, each at another moment, hit the cell they are meant for or nothing (${shell})`, async (t) => {
    const kernel = startHost(t, { shell }).kernel();
    await ok(kernel, 'import asyncio, time\nif "display" not in globals(): display = __builtins__.display');
    const cells = [
      'sum(range(2000))',
      'display(1); time.sleep(0.0005); display(2)',
      'await asyncio.sleep(0.0005)',
      'await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.0005))',
      'print("a" * 100); time.sleep(0.0005)',
      'time.sleep(0.001)',
      'try: time.sleep(0.0005)\nexcept KeyboardInterrupt: display("caught")',
    ];
    const seen = { interrupted: 0, ok: 0 };
    for (let round = 0; round < 1000; round++) {
      const cell = kernel.execute(cells[round % cells.length] ?? '');
      // Behind it waits one that is never asked to stop. It displays and awaits, because that is where it could be hit.
      const following = kernel.execute(
        `${['display("next")', 'await asyncio.sleep(0)', ''][round % 3]}\n"whole ${round}"`,
      );
      await moment((round % 25) / 8);
      const running = await Promise.race([cell.then(() => false), moment(0).then(() => true)]);
      // What is running now is what it is meant for: the first, or by now already the second.
      const interrupt = running ? kernel.interrupt() : Promise.resolve();
      const [first, second] = await within(`round ${round}`, Promise.all([cell, following]));
      await interrupt;
      if (first.status === 'interrupted') seen.interrupted += 1;
      else seen.ok += 1;
      if (first.status === 'interrupted' || !running) {
        assert.deepEqual([second.status, second.text], ['ok', `'whole ${round}'`], `round ${round}`);
      } else {
        // The first was over when the interrupt was taken: it was meant for the second, and that one knows.
        assert.match(second.status, /^(ok|interrupted)$/, `round ${round}`);
      }
      const displays = second.displays.filter(({ data }) => data['text/plain'] === "'next'");
      if (second.status === 'ok' && round % 3 === 0) assert.equal(displays.length, 1);
      assert.equal(second.displays.length, displays.length, `round ${round}: no display of the other cell`);
      assert.equal(second.stdout, '', `round ${round}: no text of the other cell`);
    }
    assert.ok(seen.interrupted > 50 && seen.ok > 50, JSON.stringify(seen));
    assert.equal((await ok(kernel, '6 * 7')).text, '42');
    assert.equal(kernel.generation, 1);
  });

  test(`C48: an abort while the life starts means that the cell never runs (${shell})`, async (t) => {
    const folder = temporaryFolder(t);
    for (const delay of [0, 1, 5, 20, 100, 300]) {
      const host = startHost(t, { shell });
      const kernel = host.kernel();
      const file = join(folder, `${shell}-${delay}`);
      const controller = new AbortController();
      const cell = outcomeOf(
        kernel.execute(`open(${JSON.stringify(file)}, "w").close()`, { signal: controller.signal }),
      );
      await moment(delay);
      controller.abort();
      const outcome = await cell;
      // What comes after it has waited for everything that could still have run it.
      assert.equal((await within('the next cell', kernel.execute('1 + 1'))).text, '2');
      if (outcome.error !== null) {
        assert.equal(outcome.error.name, 'AbortError', `${delay} ms`);
        assert.ok(!existsSync(file), `${delay} ms`);
      } else if (outcome.result?.status === 'ok') {
        assert.ok(existsSync(file), `${delay} ms: it had ended before the abort came`);
      } else {
        assert.equal(outcome.result?.status, 'interrupted', `${delay} ms`);
      }
      if (delay === 0) assert.equal(outcome.error?.name, 'AbortError');
      await host.close();
    }
  });
}

test('the first reason to stop a cell names what became of it, also where the life is closed before it has stopped', async (t) => {
  // The cell takes its time to stop, so that close() comes in between.
  const code = [
    'import time',
    'try:',
    '    print("ready", flush=True)',
    '    time.sleep(600)',
    'except KeyboardInterrupt:',
    '    print("stopping", flush=True)',
    '    end = time.monotonic() + 0.3',
    '    while time.monotonic() < end:',
    '        try: time.sleep(0.01)',
    '        except KeyboardInterrupt: pass',
    '    raise',
  ].join('\n');
  for (const [way, expected] of [
    ['abort', 'interrupted'],
    ['time limit', 'timed-out'],
  ] as const) {
    const kernel = startHost(t, { shell: 'plain' }).kernel();
    const controller = new AbortController();
    let printed = '';
    const result = kernel.execute(code, {
      signal: controller.signal,
      ...(way === 'time limit' && { timeoutMs: 300 }),
      onOutput: (output) => {
        if (output.kind === 'text') printed += output.text;
      },
    });
    await until('"ready"', () => printed.includes('ready'));
    if (way === 'abort') controller.abort();
    await until('"stopping"', () => printed.includes('stopping'));
    const closed = kernel.close({ graceMs: 5_000 });
    assert.equal(told(await outcomeOf(result)), expected, way);
    await closed;
    assert.equal(kernel.lastExit?.cause, 'close');
  }
});

test('a life that is killed while its cell is stopped for its time limit: the exit is the kill, the partial result timed out', async (t) => {
  const kernel = startHost(t, { shell: 'plain' }).kernel({ interruptGraceMs: 30_000 });
  const code =
    'import time\nwhile True:\n    try:\n        print("ready", flush=True)\n        time.sleep(600)\n    except KeyboardInterrupt: pass';
  let printed = '';
  const result = kernel.execute(code, {
    timeoutMs: 200,
    onOutput: (output) => {
      if (output.kind === 'text') printed += output.text;
    },
  });
  result.catch(() => {});
  await until('it was asked to stop', () => printed === 'ready\nready\n');
  const exit = await kernel.kill();
  const { error } = await outcomeOf(result);
  assert.deepEqual([exit.cause, error?.exit?.cause, error?.partial?.status], ['kill', 'kill', 'timed-out']);
});
