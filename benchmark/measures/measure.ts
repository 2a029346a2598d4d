/** What a measure is. */
import type { Contender, ContenderDaemon } from '../contenders/contender.ts';

export interface Series {
  title: string;
  unit: 'ms' | 'bytes' | 'count' | 'lines/s';
  /** Shown beside the median: how far the middle half spreads, or the slowest hundredth. */
  spread: 'quartiles' | 'p99';
}

export interface Measure<Name extends string = string> {
  name: string;
  /** What is counted, and how, in a sentence. */
  about: string;
  series: Record<Name, Series>;
  applies(contender: Contender): boolean;
  rounds(quick: boolean): number;
  /** One round's samples of one contender. */
  take(daemon: ContenderDaemon, quick: boolean): Promise<Record<Name, number[]>>;
}

export function isNotFloor({ kind }: Contender): boolean {
  return kind !== 'floor';
}

/** For contenders whose kernels are ipykernel processes: a kernel costs a second of CPU time and 50 MB. */
export function isIpykernel({ name }: Contender): boolean {
  return name === 'jupyter-client' || name === 'zeromq-ipykernel';
}
