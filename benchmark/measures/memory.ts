import type { ContenderDaemon } from '../contenders/contender.ts';
import { descendants, pssBytes } from '../process-table.ts';
import { isNotFloor, type Measure } from './measure.ts';

const extraKernels = 10;

export const memory: Measure<'memory' | 'marginal'> = {
  name: 'memory',
  about:
    `PSS of each of ${extraKernels} extra kernels after one cell; and by how much all processes under the daemon ` +
    'grew per kernel, which counts what a kernel adds to its template too.',
  series: {
    memory: { title: 'memory per kernel (PSS)', unit: 'bytes', spread: 'quartiles' },
    marginal: { title: '… growth of all processes', unit: 'bytes', spread: 'quartiles' },
  },
  applies: isNotFloor,
  rounds: (quick) => (quick ? 1 : 3),
  async take(daemon) {
    const before = treePssBytes(daemon);
    const { pids } = await daemon.ask({ do: 'hold', count: extraKernels });
    const samples = pids.map(pssBytes).filter((bytes) => bytes !== null);
    const growth = treePssBytes(daemon) - before;
    await daemon.ask({ do: 'release' });
    if (samples.length < extraKernels) throw new Error(`only ${samples.length} of ${extraKernels} kernels were alive`);
    return { memory: samples, marginal: [growth / extraKernels] };
  },
};

function treePssBytes(daemon: ContenderDaemon): number {
  return descendants(daemon.pid).reduce((sum, pid) => sum + (pssBytes(pid) ?? 0), 0);
}
