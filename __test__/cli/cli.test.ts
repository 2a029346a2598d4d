import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { test } from 'node:test';
import { pythonForTests, temporaryFolder, until, within } from '../helpers/index.ts';

const ESCAPE = String.fromCharCode(27);
const main = join(import.meta.dirname, '../../dist/cli/main.js');

interface Started {
  child: ReturnType<typeof spawn>;
  stdout: Promise<string>;
  stderr: Promise<string>;
  ended: Promise<number | null>;
}

function start(args: string[], { stdin = '', env = {} }: { stdin?: string; env?: NodeJS.ProcessEnv } = {}): Started {
  const child = spawn(process.execPath, [main, ...args], {
    env: { ...process.env, KERNELHOST_PYTHON: pythonForTests(), NO_COLOR: '1', ...env },
    stdio: 'pipe',
  });
  child.stdin.on('error', () => {});
  child.stdin.end(stdin);
  const ended = new Promise<number | null>((resolve) => child.once('close', (code) => resolve(code)));
  return { child, stdout: text(child.stdout), stderr: text(child.stderr), ended };
}

async function finish({
  stdout,
  stderr,
  ended,
}: Started): Promise<{ code: number | null; stdout: string; stderr: string }> {
  const code = await within('the command ends', ended, 60_000);
  return { code, stdout: await stdout, stderr: await stderr };
}

const command = (args: string[], options = {}) => finish(start(args, options));

test('--help and --version answer on stdout', async () => {
  const help = await command(['--help']);
  assert.equal(help.code, 0);
  assert.match(help.stdout, /^Usage: kernelhost <command>/);
  const version = await command(['--version']);
  assert.match(version.stdout, /^\d+\.\d+\.\d+\n$/);
});

for (const [args, message] of [
  [[], /a command is missing/],
  [['docter'], /did you mean "doctor"\?/],
  [['run'], /give the file to run/],
  [['run', 'a.py', 'b.py'], /one file at a time/],
  [['run', '--lunch', 'fork', '-'], /Unknown option '--lunch'/],
  [['run', '--launch', 'forc', '-'], /launch: "forc" is not allowed; give one of 'auto', 'fork', 'spawn'/],
  [['doctor', 'x'], /takes no arguments/],
] as [string[], RegExp][]) {
  test(`"kernelhost ${args.join(' ')}" is a usage error`, async () => {
    const { code, stdout, stderr } = await command(args);
    assert.equal(code, 2);
    assert.equal(stdout, '');
    assert.match(stderr, message);
  });
}

test('run prints output, values and tracebacks, goes on after a death, and ends with 1', async () => {
  const source = [
    'import sys',
    'x = 20',
    'print("out"); print("err", file=sys.stderr)',
    'x + 1',
    '# %% dies',
    'import os, signal',
    'print("last words", flush=True)',
    'os.kill(os.getpid(), signal.SIGKILL)',
    '# %% on a new life',
    '"x" in globals()',
    '# %% raises',
    '1 / 0',
  ].join('\n');
  const { code, stdout, stderr } = await command(['run', '-'], { stdin: source });
  assert.equal(code, 1);
  assert.equal(stdout, 'out\n21\nlast words\nFalse\n');
  assert.match(stderr, /^err\n/);
  assert.match(stderr, /SIGKILL/);
  assert.match(stderr, /ZeroDivisionError: division by zero/);
  assert.ok(!stderr.includes(ESCAPE));
});

test('run ends with 0 when every cell went well', async (t) => {
  const file = join(temporaryFolder(t), 'fine.py');
  writeFileSync(file, 'print("fine")\n');
  assert.deepEqual(await command(['run', file]), { code: 0, stdout: 'fine\n', stderr: '' });
});

test('a file that is not there is named', async () => {
  const { code, stderr } = await command(['run', '/no/such/file.py']);
  assert.equal(code, 1);
  assert.match(stderr, /cannot read \/no\/such\/file\.py/);
});

test('an interpreter that is not there is named', async () => {
  const { code, stderr } = await command(['run', '--python', '/no/such/python', '-'], { stdin: '1' });
  assert.equal(code, 1);
  assert.match(stderr, /\/no\/such\/python/);
});

test('output comes while the cell runs', async () => {
  const started = start(['run', '-'], { stdin: 'import time\nprint("first", flush=True)\ntime.sleep(600)' });
  let seen = '';
  started.child.stdout?.on('data', (chunk) => {
    seen += chunk;
  });
  await until('the first line comes', () => seen.includes('first'));
  started.child.kill('SIGTERM');
  assert.equal((await finish(started)).code, 143);
});

test('the first Ctrl-C interrupts the cell and the next cell runs; the second ends the run', async () => {
  const cell = 'import time\nprint("cell", flush=True)\ntime.sleep(600)\n';
  const started = start(['run', '-'], { stdin: `${cell}# %%\n${cell}` });
  let seen = '';
  started.child.stdout?.on('data', (chunk) => {
    seen += chunk;
  });
  await until('the first cell runs', () => seen === 'cell\n');
  started.child.kill('SIGINT');
  await until('the second cell runs', () => seen === 'cell\ncell\n');
  started.child.kill('SIGINT');
  const { code, stderr } = await finish(started);
  assert.equal(code, 130);
  assert.match(stderr, /KeyboardInterrupt/);
});

test('a reader that goes away ends the run without a stack trace', async () => {
  const started = start(['run', '-'], { stdin: 'for i in range(1_000_000): print("line", i)' });
  started.child.stdout?.once('data', () => started.child.stdout?.destroy());
  const stderr = started.stderr;
  started.stdout.catch(() => {});
  await within('the command ends', started.ended, 60_000);
  assert.doesNotMatch(await stderr, /EPIPE|at .*\.js/);
});

test('colours come on request and NO_COLOR wins', async () => {
  const asked = await command(['doctor'], { env: { NO_COLOR: '', FORCE_COLOR: '1' } });
  assert.ok(asked.stdout.includes(`${ESCAPE}[32mgood`));
  const refused = await command(['doctor'], { env: { NO_COLOR: '1', FORCE_COLOR: '1' } });
  assert.ok(!refused.stdout.includes(ESCAPE));
});

test('doctor says that a kernel can run, and how fast', async () => {
  const { code, stdout } = await command(['doctor', '--json']);
  assert.equal(code, 0);
  const report = JSON.parse(stdout);
  assert.equal(report.ok, true);
  assert.deepEqual(
    report.timings.map(({ launch }: { launch: string }) => launch),
    ['fork', 'spawn'],
  );
  for (const { startMs, cellMs } of report.timings) assert.ok(startMs > 0 && cellMs > 0);
  assert.ok(report.checks.every(({ state }: { state: string }) => ['good', 'limited', 'missing'].includes(state)));
});

test('doctor ends with 1 and says what to do when Python cannot be run', async () => {
  const { code, stdout } = await command(['doctor', '--python', '/bin/false']);
  assert.equal(code, 1);
  assert.match(stdout, /missing +Python +\/bin\/false\n +→ It cannot be run.*Install Python 3\.10 or later/);
  assert.match(stdout, /Kernels cannot run here\.\n$/);
});
