/** Measures of kernelhost's own output path, which other contenders have nothing to compare with. Owns the kernels it starts. */
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Kernel, KernelHost } from '../../index.js';
import type { Answers } from './protocol.ts';

const printers = 4;

/** From just before the write to the listener. Both clocks are the machine's monotonic one. */
export async function delivery(kernel: Kernel, count: number): Promise<Answers['delivery']> {
  const ms: number[] = [];
  const code = `import time\nfor i in range(${count}):\n    time.sleep(0.005)\n    print(time.clock_gettime_ns(time.CLOCK_MONOTONIC))`;
  await kernel.execute(code, {
    onOutput: (output) => {
      const now = process.hrtime.bigint();
      if (output.kind !== 'text') return;
      // On a busy machine several lines may come as one.
      for (const written of output.text.trim().split('\n')) ms.push(Number(now - BigInt(written)) / 1e6);
    },
  });
  return { ms };
}

export async function picture(kernel: Kernel, count: number): Promise<Answers['picture']> {
  await kernel.execute('import os; picture = os.urandom(1_000_000)');
  const ms: number[] = [];
  for (let round = 0; round < count; round += 1) {
    const began = performance.now();
    const { displays } = await kernel.execute('display({"image/png": picture}, raw=True)');
    ms.push(performance.now() - began);
    if (String(displays[0]?.data['image/png']).length < 1_333_333) throw new Error('the picture did not arrive');
  }
  return { ms };
}

/** Four kernels print without end to listeners that take 1 ms of the event loop each; a fifth is asked meanwhile. */
export async function pressure(host: KernelHost, ms: number): Promise<Answers['pressure']> {
  const fifth = host.kernel();
  const kernels = Array.from({ length: printers }, () => host.kernel());
  await Promise.all([fifth, ...kernels].map((kernel) => kernel.execute('1+1')));
  const rssBefore = process.memoryUsage.rss();
  const delay = monitorEventLoopDelay({ resolution: 1 });
  delay.enable();
  const cells = kernels.map((kernel) =>
    kernel.execute("while True: print('x' * 200)", {
      onOutput: () => {
        const end = performance.now() + 1;
        while (performance.now() < end);
      },
    }),
  );
  const latencies: number[] = [];
  let rss = rssBefore;
  for (const end = performance.now() + ms; performance.now() < end; await sleep(20)) {
    const began = performance.now();
    await fifth.execute('1+1');
    latencies.push(performance.now() - began);
    rss = Math.max(rss, process.memoryUsage.rss());
  }
  delay.disable();
  const began = performance.now();
  await Promise.all(kernels.map((kernel) => kernel.interrupt()));
  await Promise.all(cells);
  const stopMs = performance.now() - began;
  await Promise.all([fifth, ...kernels].map((kernel) => kernel.close({ graceMs: 0 })));
  return { ms: latencies, delayMs: delay.percentile(99) / 1e6, bytes: rss - rssBefore, stopMs };
}
