import type { Measure } from './measure.ts';

export const copies: Measure<'fork-100' | 'checkpoint-cost' | 'fork-2000'> = {
  name: 'copies',
  about:
    '`kernel.fork()` of a kernel with 100 MB (2 GB) of data, until it is ready; and by how much `1+1` takes longer at 100 MB with recovery `checkpoint`, cells following each other at once.',
  series: {
    'fork-100': { title: 'fork(), 100 MB', unit: 'ms', spread: 'p99' },
    'fork-2000': { title: 'fork(), 2 GB', unit: 'ms', spread: 'p99' },
    'checkpoint-cost': { title: 'checkpoint after a cell, 100 MB', unit: 'ms', spread: 'quartiles' },
  },
  applies: ({ kind }) => kind === 'kernelhost',
  rounds: (quick) => (quick ? 1 : 3),
  async take(daemon, quick) {
    const count = quick ? 20 : 100;
    const small = await daemon.ask({ do: 'copies', count, megabytes: 100 });
    const large = await daemon.ask({ do: 'copies', count: 10, megabytes: 2000 });
    return { 'fork-100': small.forkMs, 'fork-2000': large.forkMs, 'checkpoint-cost': [small.costMs] };
  },
};
