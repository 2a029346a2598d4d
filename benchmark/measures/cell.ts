import type { Measure } from './measure.ts';

export const cell: Measure<'cell'> = {
  name: 'cell',
  about: '`1+1`, from the call to the value in the caller. Floor: IPython’s own run_cell; compile and eval (plain).',
  series: { cell: { title: '1+1 round trip', unit: 'ms', spread: 'p99' } },
  applies: () => true,
  rounds: (quick) => (quick ? 4 : 20),
  async take(daemon, quick) {
    return { cell: (await daemon.ask({ do: 'cells', count: quick ? 100 : 200 })).ms };
  },
};
