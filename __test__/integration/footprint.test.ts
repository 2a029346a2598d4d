/** What kernels cost the daemon while they do nothing, and how large the addon is. */

import assert from 'node:assert/strict';
import { readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { packageFolder, runNodeForJson } from '../fixtures/node-run.ts';
import { pythonForTests } from '../helpers/index.ts';

const ADDON_BYTES = 1_500_000;
/** The host's ends of the six wires, three descriptors more, and the pidfd. */
const DESCRIPTORS = 6 + 3 + 1;

test('300 idle kernels cost the daemon no CPU, and ten descriptors each at the most', async (t) => {
  const { value } = await runNodeForJson<{
    idle: number;
    cpuMs: number;
    kernelCpuMs: number;
    descriptors: number;
    threads: number;
    answers: boolean;
  }>(
    t,
    `
    import { readdirSync, readFileSync } from 'node:fs';
    import { KernelHost } from 'kernelhost';
    const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, launch: 'fork' });
    const { pid: template } = await host.warm();
    await host.kernel().start();
    const open = () => readdirSync('/proc/self/fd').length;
    const threads = () => readdirSync('/proc/self/task').length;
    const ticks = (pid) => { const text = readFileSync('/proc/' + pid + '/stat', 'utf8'); const f = text.slice(text.lastIndexOf(')') + 2).split(' '); return (Number(f[11]) + Number(f[12])) * 10; };
    const [before, threadsBefore] = [open(), threads()];
    const kernels = Array.from({ length: 300 }, () => host.kernel());
    const lives = await Promise.all(kernels.map((kernel) => kernel.start()));
    const descriptors = (open() - before) / 300;
    const pids = [template, ...lives.map(({ pid }) => pid)];
    const all = () => pids.reduce((sum, pid) => sum + ticks(pid), 0);
    await new Promise((resolve) => setTimeout(resolve, 500));
    const [cpu, kernelCpu] = [process.cpuUsage(), all()];
    await new Promise((resolve) => setTimeout(resolve, 3_000));
    const { user, system } = process.cpuUsage(cpu);
    const kernelCpuMs = all() - kernelCpu;
    const idle = kernels.filter(({ state }) => state === 'idle').length;
    const results = await Promise.all(kernels.map((kernel, index) => kernel.execute(String(index))));
    await host.close();
    console.log(JSON.stringify({
      idle, descriptors, kernelCpuMs, cpuMs: (user + system) / 1000, threads: threads() - threadsBefore,
      answers: results.every(({ text }, index) => text === String(index)),
    }));
    `,
    { deadlineMs: 60_000 },
  );
  assert.deepEqual([value.idle, value.answers], [300, true]);
  assert.ok(value.cpuMs < 50, `${value.cpuMs} ms of CPU in 3 s`);
  assert.ok(value.kernelCpuMs <= 50, `the kernels used ${value.kernelCpuMs} ms of CPU in 3 s`);
  assert.ok(value.descriptors <= DESCRIPTORS, `${value.descriptors} descriptors for each kernel`);
  assert.ok(value.threads <= 0, `${value.threads} threads more`);
});

test('the addon is no larger than 1.5 MB', (t) => {
  const folder = join(packageFolder, 'native');
  const addons = readdirSync(folder).filter((name) => name.endsWith('.node'));
  if (addons.length === 0) {
    t.skip('the addon has not been built in the project folder');
    return;
  }
  for (const name of addons) {
    const { size } = statSync(join(folder, name));
    assert.ok(size <= ADDON_BYTES, `${name} has ${size} bytes`);
  }
});
