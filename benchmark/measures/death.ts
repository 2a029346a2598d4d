import { isNotFloor, type Measure } from './measure.ts';

export const death: Measure<'death'> = {
  name: 'death',
  about:
    'From SIGKILL in the middle of a cell to the caller’s knowing. (a) asks is_alive at the interval of jupyter_client’s ' +
    'restarter (3 s; its clients that poll themselves often take 1 s), (b) and (c) get the child’s exit event.',
  series: { death: { title: 'SIGKILL → known', unit: 'ms', spread: 'quartiles' } },
  applies: isNotFloor,
  rounds: (quick) => (quick ? 3 : 10),
  async take(daemon) {
    return { death: [(await daemon.ask({ do: 'death' })).ms] };
  },
};
