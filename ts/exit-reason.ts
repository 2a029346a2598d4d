/** Why a life ended: what the operating system said (`status`) and why (`cause`), kept apart. */

import type { NativeExitReason } from './native.ts';

export type ExitStatus =
  | { kind: 'exited'; code: number }
  | { kind: 'signaled'; signal: NodeJS.Signals; number: number; coreDumped: boolean }
  | { kind: 'unknown'; why: string };

export type ExitCause =
  | 'exit-call'
  | 'crash'
  | 'out-of-memory'
  | 'external-signal'
  | 'close'
  | 'restart'
  | 'kill'
  | 'timeout'
  | 'memory-limit'
  | 'cpu-limit'
  | 'process-limit'
  | 'start-failed'
  | 'protocol-error'
  | 'host-lost'
  /** Neither the host's doing nor told by the operating system. */
  | 'unknown';

export interface LeftoverProcess {
  pid: number;
  /** The command line. */
  command: string;
}

export interface Leftovers {
  /** What had to be ended. */
  ended: LeftoverProcess[];
  /** What could not be ended within two seconds, and why. */
  remaining: (LeftoverProcess & { why: string })[];
}

export interface ExitReason {
  status: ExitStatus;
  cause: ExitCause;
  /** What the cause rests on, when it is not our own doing. */
  evidence: string[];
  pid: number;
  generation: number;
  uptimeMs: number;
  /**
   * What the process and the children it waited for have used. `maxRssBytes` is the largest resident size of one of them; null
   * for a cold life that never needed more than the daemon had when it spawned it (Linux does not tell them apart).
   */
  usage: { maxRssBytes: number | null; userMs: number; systemMs: number } | null;
  stderrTail: string;
  /** The dump that Python's faulthandler wrote, cut out of stderr. */
  crashTraceback: string | null;
  /** The cell that was running. */
  cell: { code: string; runningMs: number } | null;
  /** What the life had started and was still there once it had ended. */
  leftovers: Leftovers;
  /** One sentence a person can act on. */
  message: string;
}

/** The addon's object is the public one. Its type says of a signal's name only that it is a string. */
export function toExitReason(exit: NativeExitReason): ExitReason {
  return exit as NativeExitReason & { status: ExitStatus };
}
