import { isNotFloor, type Measure } from './measure.ts';

export const many: Measure<'many' | 'succeeded'> = {
  name: 'many',
  about: '100 kernels (quick: 20) at once, each runs one cell: until the last value, and how many succeeded.',
  series: {
    many: { title: 'many at once', unit: 'ms', spread: 'quartiles' },
    succeeded: { title: '… succeeded', unit: 'count', spread: 'quartiles' },
  },
  applies: isNotFloor,
  rounds: (quick) => (quick ? 1 : 3),
  async take(daemon, quick) {
    const { ms, succeeded } = await daemon.ask({ do: 'many', count: quick ? 20 : 100 });
    return { many: [ms], succeeded: [succeeded] };
  },
};
