import { isNotFloor, type Measure } from './measure.ts';

const count = 200_000;

export const lines: Measure<'lines' | 'rate'> = {
  name: 'lines',
  about: `${count} lines printed one by one in one cell, all received by the caller (kernelhost: limit on output raised).`,
  series: {
    lines: { title: '200 000 lines', unit: 'ms', spread: 'quartiles' },
    rate: { title: '… per second', unit: 'lines/s', spread: 'quartiles' },
  },
  applies: isNotFloor,
  rounds: (quick) => (quick ? 2 : 7),
  async take(daemon) {
    const answer = await daemon.ask({ do: 'lines', count });
    if (answer.lines !== count) throw new Error(`${answer.lines} of ${count} lines arrived`);
    return { lines: [answer.ms], rate: [(count / answer.ms) * 1000] };
  },
};
