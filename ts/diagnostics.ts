/**
 * What kernelhost tells `node:diagnostics_channel`, so that a tracer can listen without knowing our classes.
 *
 * Owns: the names of the channels, and what is published on them. An operation is published as Node's own `tracePromise`
 * would; ours cannot be one promise, because a cell that is streamed is read by whoever likes, and a start has no caller
 * of its own. Nobody subscribed: nothing is made, one property is read.
 */

import { type Channel, channel, type TracingChannel, tracingChannel } from 'node:diagnostics_channel';
import type { ExitReason } from './exit-reason.ts';
import type { Kernel } from './kernel.ts';
import type { CellResult, Life } from './result.ts';

/** On `tracing:kernelhost:execute:*`: one object per cell, the same in all of its messages. */
export interface ExecuteTrace {
  kernel: Kernel;
  code: string;
  silent: boolean;
  timeoutMs: number | null;
  /** Once the cell is over, also when Python raised: see its `status`. */
  result?: CellResult;
  /** What the call rejects with. */
  error?: unknown;
}

/** On `tracing:kernelhost:start:*`: one object per life that is launched, whoever asked for it. */
export interface StartTrace {
  kernel: Kernel;
  result?: Life;
  error?: unknown;
}

/** On `kernelhost:exit`, once per life. */
export interface ExitMessage {
  kernel: Kernel;
  exit: ExitReason;
}

const executing: TracingChannel<unknown, ExecuteTrace> = tracingChannel('kernelhost:execute');
const starting: TracingChannel<unknown, StartTrace> = tracingChannel('kernelhost:start');
const exiting: Channel = channel('kernelhost:exit');

interface Context<Result> {
  result?: Result;
  error?: unknown;
}

/** An operation that somebody watches. It ends once, with `done` or `failed`. */
export class Trace<Result, Told extends Context<Result> = Context<Result>> {
  readonly #channel: TracingChannel<unknown, Told>;
  readonly #context: Told;

  constructor(channel: TracingChannel<unknown, Told>, context: Told) {
    this.#channel = channel;
    this.#context = context;
  }

  /** The synchronous part, within whatever stores are bound to the channel. */
  begin<Value>(body: () => Value): Value {
    const { start, end } = this.#channel;
    return start.runStores(this.#context, () => {
      try {
        return body();
      } finally {
        end.publish(this.#context);
      }
    });
  }

  done(result: Result): void {
    this.#context.result = result;
    this.#publishEnd();
  }

  failed(error: unknown): void {
    this.#context.error = error;
    this.#channel.error.publish(this.#context);
    this.#publishEnd();
  }

  #publishEnd(): void {
    this.#channel.asyncStart.publish(this.#context);
    this.#channel.asyncEnd.publish(this.#context);
  }
}

/** Null when nobody watches cells. */
export function traceExecute(
  kernel: Kernel,
  { code, silent, timeoutMs }: { code: string; silent: boolean; timeoutMs: number | null },
): Trace<CellResult, ExecuteTrace> | null {
  if (!executing.hasSubscribers) return null;
  return new Trace<CellResult, ExecuteTrace>(executing, { kernel, code, silent, timeoutMs });
}

/** Whether anybody watches lives begin. */
export function startsAreWatched(): boolean {
  return starting.hasSubscribers;
}

export function traceStart(kernel: Kernel): Trace<Life, StartTrace> {
  return new Trace<Life, StartTrace>(starting, { kernel });
}

export function publishExit(kernel: Kernel, exit: ExitReason): void {
  if (exiting.hasSubscribers) exiting.publish({ kernel, exit } satisfies ExitMessage);
}
