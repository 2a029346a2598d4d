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
  | 'start-failed'
  | 'protocol-error'
  | 'host-lost';

export interface ExitReason {
  status: ExitStatus;
  cause: ExitCause;
  /** What the cause rests on, when it is not our own doing. */
  evidence: string[];
  pid: number;
  generation: number;
  uptimeMs: number;
  usage: { maxRssBytes: number; userMs: number; systemMs: number } | null;
  stderrTail: string;
  /** The dump that Python's faulthandler wrote, cut out of stderr. */
  crashTraceback: string | null;
  /** The cell that was running. */
  cell: { code: string; runningMs: number } | null;
  /** One sentence a person can act on. */
  message: string;
}

/** The addon's shape is the public one; a signal's name arrives as a plain string. */
export function toExitReason(exit: NativeExitReason): ExitReason {
  return exit as ExitReason;
}
