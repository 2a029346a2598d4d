import { isNotFloor, type Measure } from './measure.ts';

const bytes = 100_000_000;

export const bulk: Measure<'bulk'> = {
  name: 'bulk',
  about: '100 MB printed in one call, all of it received by the caller (kernelhost: limit on output raised).',
  series: { bulk: { title: '100 MB in one call, all', unit: 'ms', spread: 'quartiles' } },
  applies: isNotFloor,
  rounds: (quick) => (quick ? 1 : 5),
  async take(daemon) {
    const { ms, received } = await daemon.ask({ do: 'bulk', bytes, capped: false });
    if (received !== bytes) throw new Error(`${received} of ${bytes} bytes arrived`);
    return { bulk: [ms] };
  },
};

export const bulkCapped: Measure<'bulk-capped' | 'bulk-kept'> = {
  name: 'bulk-capped',
  about: '100 MB printed in one call with kernelhost’s default limit: it reads all and keeps head and tail.',
  series: {
    'bulk-capped': { title: '100 MB, default limit', unit: 'ms', spread: 'quartiles' },
    'bulk-kept': { title: '… kept', unit: 'bytes', spread: 'quartiles' },
  },
  applies: ({ kind }) => kind === 'kernelhost',
  rounds: (quick) => (quick ? 1 : 5),
  async take(daemon) {
    const { ms, received } = await daemon.ask({ do: 'bulk', bytes, capped: true });
    return { 'bulk-capped': [ms], 'bulk-kept': [received] };
  },
};
