import type { Measure } from './measure.ts';

/** A cold start takes half a second, a fork some milliseconds: the quick ones are repeated. */
const startsOfForked = 5;

export const start: Measure<'start'> = {
  name: 'start',
  about:
    'From asking for a kernel to its being ready for a cell. (a) is ready when wait_for_ready says so, which listens ' +
    'for 0.2 s of silence at its end. Floor: bare fork until the first byte on a pipe.',
  series: { start: { title: 'start → ready', unit: 'ms', spread: 'quartiles' } },
  applies: () => true,
  rounds: (quick) => (quick ? 4 : 20),
  async take(daemon) {
    const count = daemon.contender.kind === 'alternative' ? 1 : startsOfForked;
    const samples: number[] = [];
    for (let index = 0; index < count; index += 1) samples.push((await daemon.ask({ do: 'start' })).ms);
    return { start: samples };
  },
};
