/**
 * What the benchmark asks of a contender's daemon: one JSON line in, one JSON line out, one at a time.
 *
 * Every contender runs its own daemon process (Node or Python), which drives its kernels, takes the times itself and
 * reports them. So no contender pays for another's heap, and memory, CPU time and descriptors are read from outside.
 */

export type Request =
  /** Get ready to start kernels, start the main kernel, run some cells to warm up. */
  | { do: 'open'; python: string; folder: string }
  /** Start one more kernel, and end it when the time is taken. */
  | { do: 'start' }
  /** Run `1+1` in the main kernel, `count` times, one after another. */
  | { do: 'cells'; count: number }
  /** Start `count` kernels at once, run one cell in each, end them. */
  | { do: 'many'; count: number }
  /** Start `count` kernels, run one cell in each, keep them until `release`. */
  | { do: 'hold'; count: number }
  | { do: 'release' }
  /** Kill a kernel in the middle of a cell. */
  | { do: 'death' }
  /** Print `count` lines in one cell of the main kernel. */
  | { do: 'lines'; count: number }
  /** Print `bytes` bytes in one call; `capped` leaves the contender's own limit on output in place. */
  | { do: 'bulk'; bytes: number; capped: boolean }
  /** Call a function of the daemon's from a cell, `count` times. kernelhost only. */
  | { do: 'host-calls'; count: number }
  /** Print `count` lines, 5 ms apart, to a listener. kernelhost only. */
  | { do: 'delivery'; count: number }
  /** Display 1 MB, `count` times. kernelhost only. */
  | { do: 'picture'; count: number }
  /** Let four kernels print for `ms` while a fifth is asked. kernelhost only. */
  | { do: 'pressure'; ms: number }
  /** Copy a kernel that has so many megabytes of data, `count` times. kernelhost only. */
  | { do: 'copies'; count: number; megabytes: number }
  | { do: 'close' };

/** The fields that `do` asks for; times in ms. */
export interface Answers {
  open: Record<string, never>;
  start: { ms: number };
  cells: { ms: number[] };
  many: { ms: number; succeeded: number };
  hold: { pids: number[] };
  release: Record<string, never>;
  death: { ms: number };
  lines: { ms: number; lines: number };
  bulk: { ms: number; received: number };
  'host-calls': { ms: number[] };
  delivery: { ms: number[] };
  picture: { ms: number[] };
  pressure: { ms: number[]; delayMs: number; bytes: number; stopMs: number };
  copies: { forkMs: number[]; costMs: number };
  close: Record<string, never>;
}

export type Failure = { error: string };

export const warmUpCells = 20;
/** How many kernels `hold` starts at a time: enough to use the cores, few enough not to starve a start. */
export const holdAtOnce = 4;
