/** `kernelhost doctor --leftovers`: needs a daemon, its template and its warden killed in one go, so that something is left. */

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { test } from 'node:test';
import { startNode } from '../fixtures/node-run.ts';
import { allProcesses, isAlive, pythonForTests, until } from '../helpers/index.ts';

const main = join(import.meta.dirname, '../../dist/cli/main.js');

function doctor(...args: string[]): Promise<{ code: number; stdout: string }> {
  return new Promise((resolve) => {
    execFile(process.execPath, [main, 'doctor', '--leftovers', ...args], { timeout: 30_000 }, (error, stdout) => {
      resolve({ code: typeof error?.code === 'number' ? error.code : error === null ? 0 : -1, stdout });
    });
  });
}

interface Found {
  leftovers: { pid: number; hostPid: number; kernel: number | null; command: string }[];
  remaining: unknown[] | null;
}

test('what a daemon has left is listed, ended when asked for, and what lives or opted out is not', async (t) => {
  const source = `
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, shell: 'plain' });
    const { stdout } = await host.kernel().execute(\`
import os, subprocess
start = lambda **more: subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, env={**os.environ, **more}).pid
print(start(), start(KERNELHOST_DETACHED="1"))
\`);
    const [left, detached] = stdout.split(' ').map(Number);
    console.log(JSON.stringify({ daemon: process.pid, left, detached }));
    setInterval(() => {}, 1_000);
  `;
  const { daemon, left, detached } = await startNode(t, source).line<Record<'daemon' | 'left' | 'detached', number>>();
  t.after(() => {
    if (isAlive(detached)) process.kill(detached, 'SIGKILL');
  });
  const listed = async () => (JSON.parse((await doctor('--json')).stdout) as Found).leftovers;
  assert.ok(!(await listed()).some(({ hostPid }) => hostPid === daemon), 'the daemon lives');

  const servants = allProcesses().filter(({ parent }) => parent === daemon);
  assert.ok(servants.length >= 2, 'a template and a warden');
  for (const { pid } of servants) process.kill(pid, 'SIGKILL');
  process.kill(daemon, 'SIGKILL');
  await until('the daemon is gone', () => !isAlive(daemon));

  const found = (await listed()).filter(({ hostPid }) => hostPid === daemon);
  assert.deepEqual(
    found.map(({ pid, kernel, command }) => [pid, kernel, command]),
    [[left, 1, 'sleep 600']],
  );
  const shown = await doctor();
  assert.equal(shown.code, 1);
  assert.match(shown.stdout, new RegExp(`${left} .*daemon ${daemon} \\(gone\\), of its kernel 1: sleep 600`));

  const { code, stdout } = await doctor('--kill', '--json');
  assert.equal(code, 0);
  assert.deepEqual((JSON.parse(stdout) as Found).remaining, []);
  await until('it is gone', () => !isAlive(left));
  assert.ok(isAlive(detached), 'what opted out goes on');
  assert.ok(!(await listed()).some(({ hostPid }) => hostPid === daemon));
});
