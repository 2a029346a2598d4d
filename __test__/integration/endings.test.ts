/** What a death leaves to its caller and to the others: the call ends, the last words arrive, nobody else is hurt. */

import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import type { ExitReason, Kernel } from 'kernelhost';
import { begin, deathOf } from '../fixtures/endings-calls.ts';
import { isAlive, isGone, next, processStat, startHost, startKernel, until, within } from '../helpers/index.ts';

const SLEEP = 'import time\nprint("asleep")\ntime.sleep(600)';
/** As much as is kept of stderr in an exit reason. */
const TAIL_BYTES = 16 * 1024;

/** Two kernels of one host; the second one stands for everybody else. */
async function twoKernels(t: Parameters<typeof startHost>[0]) {
  const host = startHost(t);
  const template = await host.warm();
  const [kernel, sibling] = [host.kernel(), host.kernel()];
  const [{ pid }, other] = await Promise.all([kernel.start(), sibling.start()]);
  await sibling.execute('state = "kept"');
  return { template, kernel, pid, sibling, siblingPid: other.pid };
}

async function isUnharmed(sibling: Kernel, pid: number): Promise<void> {
  const result = await within('a cell of the sibling', sibling.execute('state'));
  assert.equal(result.text, "'kept'");
  assert.equal(result.life.pid, pid);
  assert.equal(sibling.lastExit, null);
}

describe('a death', () => {
  test('C01: a SIGKILL under a running cell ends the call within a second, and no other kernel notices', async (t) => {
    const { kernel, pid, sibling, siblingPid } = await twoKernels(t);
    const code = `import sys\nprint("last words", file=sys.stderr)\n${SLEEP}`;
    const { call } = await begin(kernel, code, 'asleep');
    const meanwhile = sibling.execute('import time; time.sleep(0.3); state');
    const killed = performance.now();
    process.kill(pid, 'SIGKILL');
    const { exit } = await deathOf(call);
    const toldMs = performance.now() - killed;
    assert.ok(toldMs < 1_000, `told after ${toldMs} ms`);
    assert.equal(exit.pid, pid);
    assert.deepEqual(exit.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
    assert.equal(exit.stderrTail, 'last words\n');
    assert.ok((exit.usage?.maxRssBytes ?? 0) > 1024 * 1024);
    assert.equal((await meanwhile).text, "'kept'");
    await isUnharmed(sibling, siblingPid);
  });

  test('C08: what was written before the death is delivered, whole, in order, and before the exit event', async (t) => {
    const { kernel } = await startKernel(t);
    const happened: string[] = [];
    let streamed = '';
    kernel.on('exit', () => happened.push('exit'));
    const cell = [
      'import os, signal, sys, time',
      'print("no flush", end="")',
      'os.write(2, b"".join(b"%09d\\n" % number for number in range(5_000)))',
      'os.system("printf \'of a child\'")',
      'sys.stdout.write(" and the end")',
      'time.sleep(0.3)',
      'os.kill(os.getpid(), signal.SIGKILL)',
    ].join('\n');
    const call = kernel.execute(cell, {
      onOutput(output) {
        if (output.kind === 'text' && output.stream === 'stdout') streamed += output.text;
        happened.push('output');
      },
    });
    const { exit, partial } = await deathOf(call);
    happened.push('rejected');
    await until('the exit event', () => happened.includes('exit'));

    const written = Array.from({ length: 5_000 }, (_, number) => `${String(number).padStart(9, '0')}\n`).join('');
    assert.equal(partial?.stdout, 'no flushof a child and the end');
    assert.equal(streamed, partial?.stdout);
    assert.equal(partial?.stderr, written);
    assert.deepEqual(partial?.missing, { stdoutBytes: 0, stderrBytes: 0 });
    assert.equal(exit.stderrTail, written.slice(-TAIL_BYTES));
    assert.deepEqual(happened.slice(-2), ['rejected', 'exit']);
    assert.ok(happened.slice(0, -2).every((what) => what === 'output'));
  });

  test('C08: last words in the very moment of the death arrive too', async (t) => {
    const { kernel } = await startKernel(t);
    for (let round = 0; round < 20; round++) {
      const cell = `import os; os.write(1, b"x" * 60_000); os.write(2, b"bye ${round}"); os.kill(os.getpid(), 9)`;
      const { exit, partial } = await deathOf(kernel.execute(cell));
      assert.equal(partial?.stdout.length, 60_000);
      assert.equal(partial?.stderr, `bye ${round}`);
      assert.equal(exit.stderrTail, `bye ${round}`);
    }
  });

  test('C09: a cell that kills the process group of its child kills its own kernel, and nobody else', async (t) => {
    const { template, kernel, pid, sibling, siblingPid } = await twoKernels(t);
    const cell = [
      'import os, signal, subprocess, time',
      'child = subprocess.Popen(["sleep", "99"])',
      'print(child.pid, flush=True)',
      'os.killpg(os.getpgid(child.pid), signal.SIGTERM)',
      'time.sleep(60)',
    ].join('\n');
    const { exit, partial } = await deathOf(kernel.execute(cell));
    assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGTERM');
    assert.equal(exit.cause, 'external-signal');
    assert.equal(exit.pid, pid);
    const child = Number(partial?.stdout);
    await until('the child is gone', () => !isAlive(child));
    await isUnharmed(sibling, siblingPid);
    assert.ok(isAlive(template.pid));
  });

  test('C09: os.killpg(0, SIGKILL) reaches the kernel and its children, and nobody else', async (t) => {
    const { template, kernel, pid, sibling, siblingPid } = await twoKernels(t);
    const cell = [
      'import os, signal, subprocess',
      'child = subprocess.Popen(["sleep", "99"])',
      'print(child.pid)',
      'os.killpg(0, signal.SIGKILL)',
    ].join('\n');
    const { exit, partial } = await deathOf(kernel.execute(cell));
    assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGKILL');
    assert.equal(exit.cause, 'external-signal');
    assert.ok(isGone(pid));
    const child = Number(partial?.stdout);
    await until('the child is gone', () => !isAlive(child));
    await isUnharmed(sibling, siblingPid);
    assert.ok(isAlive(template.pid));
    const after = await kernel.execute('1 + 1');
    assert.equal(after.life.launch, 'fork');
    assert.deepEqual(after.recovered?.exit, exit);
  });

  test('C09: every life leads a session and a process group of its own, and so does the template', async (t) => {
    const { template, pid, siblingPid } = await twoKernels(t);
    for (const leader of [template.pid, pid, siblingPid]) {
      const stat = processStat(leader);
      assert.equal(stat?.group, leader);
      assert.equal(stat?.session, leader);
    }
  });

  test('a child that the dead kernel leaves in its process group is gone when the call is rejected', async (t) => {
    const { kernel } = await startKernel(t);
    const { call } = await begin(
      kernel,
      'import subprocess; child = subprocess.Popen(["sleep", "99"]); print(child.pid, "child"); child.wait()',
      'child',
    );
    const exited = next(kernel, 'exit');
    process.kill(Number(kernel.pid), 'SIGKILL');
    const { exit, partial } = await deathOf(call);
    const child = Number.parseInt(partial?.stdout ?? '', 10);
    assert.ok(child > 0 && !isAlive(child));
    const [told] = (await exited) as [ExitReason];
    assert.deepEqual(told, exit);
  });
});

test('a time limit that is up while the life leaves by exit() changes nothing about how it ended', async (t) => {
  const kernel = startHost(t, { shell: 'plain', launch: 'spawn' }).kernel();
  // It is deleted when the interpreter has already given its signals back.
  const code = 'import time\nclass Slow:\n    def __del__(self, sleep=time.sleep): sleep(0.4)\nslow = Slow()\nexit(4)';
  await kernel.start();
  await assert.rejects(kernel.execute(code, { timeoutMs: 150 }), { code: 'ERR_KERNEL_DIED' });
  assert.deepEqual(kernel.lastExit?.status, { kind: 'exited', code: 4 });
  assert.equal(kernel.lastExit?.cause, 'exit-call');
});
