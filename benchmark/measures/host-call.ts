import type { Measure } from './measure.ts';

export const hostCall: Measure<'host-call'> = {
  name: 'host-call',
  about: '`kernelhost.call` of a function that returns its argument, as the cell sees it.',
  series: { 'host-call': { title: 'call into the daemon', unit: 'ms', spread: 'p99' } },
  applies: ({ kind }) => kind === 'kernelhost',
  rounds: (quick) => (quick ? 1 : 5),
  async take(daemon) {
    return { 'host-call': (await daemon.ask({ do: 'host-calls', count: 1000 })).ms };
  },
};
