/** What kernelhost aims at, as ratios within one run. Missing an aim is reported and fails nothing. */
import type { PackageFacts } from './package-facts.ts';
import type { Results } from './results.ts';

export interface Verdict {
  aim: string;
  /** The number beside the aim, or null when this run did not take it. */
  value: number | null;
  unit: '×' | 'ms' | 'MB' | 'descriptors';
  met: boolean | null;
}

/** Requests, calls, stdout, stderr, interrupts, lifeline; 3 more are allowed, and a pidfd. */
const descriptorsAllowed = 6 + 3 + 1;

export function judge(results: Results, facts: PackageFacts): Verdict[] {
  const ratio = (series: string, above: string, below: string): number | null => {
    const [a, b] = [results.median(series, above), results.median(series, below)];
    return a === null || b === null ? null : a / b;
  };
  const megabytes = (bytes: number | null): number | null => (bytes === null ? null : bytes / 1e6);
  return [
    atLeast('start: at least 100× faster than (a)', 100, '×', ratio('start', 'jupyter-client', 'kernelhost')),
    atLeast('1+1: at least 10× faster than (a)', 10, '×', ratio('cell', 'jupyter-client', 'kernelhost')),
    atLeast('1+1: at least 10× faster than (b)', 10, '×', ratio('cell', 'zeromq-ipykernel', 'kernelhost')),
    atMost('1+1, plain: at most 1.5× of (c)', 1.5, '×', ratio('cell', 'kernelhost-plain', 'json-lines')),
    atMost(
      'memory that one more kernel takes: at most 1/6 of (a)',
      1 / 6,
      '×',
      ratio('marginal', 'kernelhost', 'jupyter-client'),
    ),
    atMost('PSS of a kernel itself: at most 1/6 of (a)', 1 / 6, '×', ratio('memory', 'kernelhost', 'jupyter-client')),
    atLeast('lines per second: at least 2× of (a)', 2, '×', ratio('rate', 'kernelhost', 'jupyter-client')),
    atMost(
      '100 MB without a listener: at least 300 MB/s',
      100 / 0.3,
      'ms',
      results.median('bulk-capped', 'kernelhost'),
    ),
    atMost('call into the daemon: at most 0.2 ms', 0.2, 'ms', results.median('host-call', 'kernelhost')),
    atMost('write → onOutput: at most 5 ms', 5, 'ms', results.median('delivery', 'kernelhost')),
    atMost('1+1 beside four floods: at most 5 ms', 5, 'ms', results.median('pressure', 'kernelhost')),
    atMost('… event loop delay: at most 20 ms', 20, 'ms', results.median('pressure-delay', 'kernelhost')),
    atMost('… daemon: at most +64 MB', 64, 'MB', megabytes(results.median('pressure-memory', 'kernelhost'))),
    atMost('… all interrupted: at most 2 s', 2000, 'ms', results.median('pressure-stop', 'kernelhost')),
    atMost('fork() at 100 MB: at most 3 ms', 3, 'ms', results.median('fork-100', 'kernelhost')),
    atMost('fork() at 2 GB: at most 10 ms', 10, 'ms', results.median('fork-2000', 'kernelhost')),
    atMost('checkpoint after a cell at 100 MB: at most 2 ms', 2, 'ms', results.median('checkpoint-cost', 'kernelhost')),
    atMost('SIGKILL → known: at most 10 ms', 10, 'ms', results.median('death', 'kernelhost')),
    atMost('idle kernels: no CPU time of the daemon (10 s)', 10, 'ms', results.median('idle-daemon', 'kernelhost')),
    atMost(
      `descriptors per kernel: at most ${descriptorsAllowed}`,
      descriptorsAllowed,
      'descriptors',
      results.median('descriptors', 'kernelhost'),
    ),
    atMost('addon: at most 1.5 MB', 1.5, 'MB', megabytes(facts.addonBytes)),
    atMost('package with addon: at most 2 MB packed', 2, 'MB', megabytes(facts.packedBytes)),
    atMost('import → usable: at most 30 ms', 30, 'ms', results.median('import', 'kernelhost')),
  ];
}

function atLeast(aim: string, bound: number, unit: Verdict['unit'], value: number | null): Verdict {
  return { aim, value, unit, met: value === null ? null : value >= bound };
}

function atMost(aim: string, bound: number, unit: Verdict['unit'], value: number | null): Verdict {
  return { aim, value, unit, met: value === null ? null : value <= bound };
}
