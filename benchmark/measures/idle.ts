import { setTimeout as sleep } from 'node:timers/promises';
import type { Contender } from '../contenders/contender.ts';
import { cpuMs, descendants, descriptorCount } from '../process-table.ts';
import { isIpykernel, isNotFloor, type Measure } from './measure.ts';

const windowMs = 10_000;
/** After the last start, until what starting left to do is done. */
const settleMs = 1_000;

export const idle: Measure<'idle-daemon' | 'idle-kernel' | 'descriptors'> = {
  name: 'idle',
  about:
    'CPU time in 10 s (quick: 5 s, given for 10) with 300 idle kernels (quick: 50; ipykernel: 50, quick: 10) of the ' +
    'daemon, and of all other processes per kernel; and open descriptors in the daemon per kernel.',
  series: {
    'idle-daemon': { title: 'idle: daemon CPU in 10 s', unit: 'ms', spread: 'quartiles' },
    'idle-kernel': { title: '… CPU per kernel in 10 s', unit: 'ms', spread: 'quartiles' },
    descriptors: { title: 'descriptors per kernel', unit: 'count', spread: 'quartiles' },
  },
  applies: isNotFloor,
  rounds: () => 1,
  async take(daemon, quick) {
    const count = kernelCount(daemon.contender, quick);
    const descriptorsBefore = descriptorCount(daemon.pid);
    await daemon.ask({ do: 'hold', count });
    const descriptors = (descriptorCount(daemon.pid) - descriptorsBefore) / count;
    await sleep(settleMs);
    const kernelPids = descendants(daemon.pid);
    const cpuMsOfKernels = (): number => kernelPids.reduce((sum, pid) => sum + cpuMs(pid), 0);
    const [daemonBefore, kernelsBefore] = [cpuMs(daemon.pid), cpuMsOfKernels()];
    await sleep(quick ? windowMs / 2 : windowMs);
    const scale = quick ? 2 : 1;
    const daemonMs = (cpuMs(daemon.pid) - daemonBefore) * scale;
    const kernelMs = ((cpuMsOfKernels() - kernelsBefore) * scale) / count;
    await daemon.ask({ do: 'release' });
    return { 'idle-daemon': [daemonMs], 'idle-kernel': [kernelMs], descriptors: [descriptors] };
  },
};

function kernelCount(contender: Contender, quick: boolean): number {
  if (isIpykernel(contender)) return quick ? 10 : 50;
  return quick ? 50 : 300;
}
