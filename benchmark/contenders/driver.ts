/** What a Node contender implements; `daemon.ts` measures it. */

import type { Answers } from './protocol.ts';

export interface Driver {
  startKernel(): Promise<DrivenKernel>;
  close(): Promise<void>;
  /** Where the contender is kernelhost: what only it is measured by. */
  own?: OwnMeasures;
}

export interface OwnMeasures {
  hostCalls(count: number): Promise<Answers['host-calls']>;
  delivery(count: number): Promise<Answers['delivery']>;
  picture(count: number): Promise<Answers['picture']>;
  copies(count: number, megabytes: number): Promise<Answers['copies']>;
  pressure(ms: number): Promise<Answers['pressure']>;
}

export interface DriverOptions {
  python: string;
  /** A private folder for sockets and settings. */
  folder: string;
}

export interface DrivenKernel {
  readonly pid: number;
  /** Resolves when the cell is done and all its output is here; rejects when the kernel died. */
  run(code: string, options?: { capped?: boolean }): Promise<CellOutcome>;
  /** Ends the process and resolves when it is gone. */
  end(): Promise<void>;
}

export interface CellOutcome {
  ok: boolean;
  /** The value's `text/plain`. */
  value: string | null;
  stdout: string;
}
