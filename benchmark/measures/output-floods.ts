import type { Measure } from './measure.ts';

const isKernelhost: Measure['applies'] = ({ kind }) => kind === 'kernelhost';

export const delivery: Measure<'delivery'> = {
  name: 'delivery',
  about: 'One line every 5 ms: from just before the write to the call of onOutput.',
  series: { delivery: { title: 'write → onOutput', unit: 'ms', spread: 'p99' } },
  applies: isKernelhost,
  rounds: (quick) => (quick ? 1 : 5),
  async take(daemon) {
    return { delivery: (await daemon.ask({ do: 'delivery', count: 100 })).ms };
  },
};

export const picture: Measure<'picture'> = {
  name: 'picture',
  about: 'A cell that displays a PNG of 1 MB, from the call to the result.',
  series: { picture: { title: 'display of 1 MB', unit: 'ms', spread: 'p99' } },
  applies: isKernelhost,
  rounds: (quick) => (quick ? 1 : 5),
  async take(daemon) {
    return { picture: (await daemon.ask({ do: 'picture', count: 20 })).ms };
  },
};

export const pressure: Measure<'pressure' | 'pressure-delay' | 'pressure-memory' | 'pressure-stop'> = {
  name: 'pressure',
  about:
    'Four kernels print without end for 30 s (quick: 5 s) to listeners that take 1 ms per output: `1+1` on a fifth kernel, ' +
    'p99 of the event loop’s delay, what the daemon grew by, and interrupting all four until their results are there.',
  series: {
    pressure: { title: '1+1 beside four floods', unit: 'ms', spread: 'p99' },
    'pressure-delay': { title: '… event loop delay, p99', unit: 'ms', spread: 'quartiles' },
    'pressure-memory': { title: '… daemon grew by', unit: 'bytes', spread: 'quartiles' },
    'pressure-stop': { title: '… all interrupted', unit: 'ms', spread: 'quartiles' },
  },
  applies: isKernelhost,
  rounds: () => 1,
  async take(daemon, quick) {
    const { ms, delayMs, bytes, stopMs } = await daemon.ask({ do: 'pressure', ms: quick ? 5_000 : 30_000 });
    return { pressure: ms, 'pressure-delay': [delayMs], 'pressure-memory': [bytes], 'pressure-stop': [stopMs] };
  },
};
