/** Copies of a kernel with data in memory, which other contenders have nothing to compare with. */
import type { Kernel, KernelHost } from '../../index.js';
import type { Answers } from './protocol.ts';

/** As numpy has its arrays: in large pages, where Linux gives them. */
const data = (megabytes: number) =>
  [
    'import mmap',
    `data = mmap.mmap(-1, ${megabytes} << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)`,
    'data.madvise(mmap.MADV_HUGEPAGE)',
    'for at in range(0, len(data), 4096): data[at] = 1',
  ].join('\n');

export async function copies(host: KernelHost, count: number, megabytes: number): Promise<Answers['copies']> {
  const kernel = host.kernel();
  await kernel.execute(data(megabytes));
  const forkMs: number[] = [];
  for (let number = 0; number < count; number += 1) {
    const began = performance.now();
    const copy = await kernel.fork();
    forkMs.push(performance.now() - began);
    await copy.close({ graceMs: 0 });
  }
  await kernel.close({ graceMs: 0 });
  const [without, within] = [host.kernel(), host.kernel({ recovery: 'checkpoint' })];
  const plainMs = await cells(without, megabytes, count);
  const checkpointMs = await cells(within, megabytes, count);
  await Promise.all([without, within].map((each) => each.close({ graceMs: 0 })));
  return { forkMs, costMs: checkpointMs - plainMs };
}

/** Of cells that follow each other at once, the mean: one whose copy is not finished makes the next one wait. */
async function cells(kernel: Kernel, megabytes: number, count: number): Promise<number> {
  await kernel.execute(data(megabytes));
  const began = performance.now();
  for (let number = 0; number < count; number += 1) await kernel.execute('1+1');
  return (performance.now() - began) / count;
}
