/**
 * A stand-in for the addon with the same interface: it notes what it is asked and answers when the test says so. Imports
 * `ts/` and not the built package, so that unit tests need no build.
 */

import { KernelHost } from '../../ts/kernel-host.ts';
import type {
  EnvironmentVariable,
  NativeBinding,
  NativeCell,
  NativeCellRequest,
  NativeExitReason,
  NativeFailure,
  NativeHost,
  NativeHostEvent,
  NativeHostOptions,
  NativeKernel,
  NativeKernelOptions,
  NativeLife,
  NativeOutput,
  NativeQuery,
  NativeReply,
} from '../../ts/native.ts';
import type { KernelHostOptions } from '../../ts/options.ts';

export interface Call {
  verb: string;
  kernel: number | null;
  request: number;
  cell?: NativeCellRequest;
  signal?: number;
  graceMs?: number;
  environment?: EnvironmentVariable[];
  checkpoint?: number;
}

export class MockKernel implements NativeKernel {
  readonly number: number;
  readonly options: NativeKernelOptions;
  readonly #calls: Call[];
  credited = 0;
  creditCalls = 0;
  watched: { output: boolean; state: boolean } = { output: false, state: false };
  current: 'absent' | 'starting' | 'idle' | 'running' | 'ending' | 'closed' = 'absent';

  constructor(number: number, options: NativeKernelOptions, calls: Call[]) {
    this.number = number;
    this.options = options;
    this.#calls = calls;
  }

  #note(verb: string, request: number, more: Partial<Call> = {}): void {
    this.#calls.push({ verb, kernel: this.number, request, ...more });
  }

  state(): typeof this.current {
    return this.current;
  }
  pid(): number | null {
    return null;
  }
  generation(): number {
    return 0;
  }
  start(request: number): void {
    this.#note('start', request);
  }
  execute(request: number, cell: NativeCellRequest): void {
    this.#note('execute', request, { cell });
  }
  cancel(request: number): void {
    this.#note('cancel', request);
  }
  interrupt(request: number): void {
    this.#note('interrupt', request);
  }
  restart(request: number): void {
    this.#note('restart', request);
  }
  checkpoint(request: number): void {
    this.#note('checkpoint', request);
  }
  rollback(request: number, checkpoint: number): void {
    this.#note('rollback', request, { checkpoint });
  }
  discard(request: number, checkpoint: number): void {
    this.#note('discard', request, { checkpoint });
  }
  kill(request: number, signal: number): void {
    this.#note('kill', request, { signal });
  }
  close(request: number, graceMs: number): void {
    this.#note('close', request, { graceMs });
  }
  query(request: number, query: NativeQuery): void {
    this.#note(query.kind, request);
  }
  returned(call: number, header: string): void {
    this.#note(`returned ${header}`, call);
  }
  usage(request: number): void {
    this.#note('usage', request);
  }
  credit(bytes: number): void {
    this.credited += bytes;
    this.creditCalls += 1;
  }
  watch(output: boolean, state: boolean): void {
    this.watched = { output, state };
  }
}

function isResult(event: NativeHostEvent): boolean {
  if (event.kind !== 'settled') return false;
  return event.reply.kind === 'cell' || (event.reply.kind === 'failed' && event.reply.failure.partial !== null);
}

export class MockNative {
  readonly calls: Call[] = [];
  readonly kernels: MockKernel[] = [];
  options: NativeHostOptions | null = null;
  /** Delivers a batch of events, as the addon does: from a callback of the event loop, with nothing of JS on the stack. */
  send: (...events: NativeHostEvent[]) => Promise<void> = () => Promise.reject(new Error('no host yet'));

  readonly binding: NativeBinding;

  constructor() {
    const mock = this;
    this.binding = {
      NativeHost: class implements NativeHost {
        constructor(options: NativeHostOptions, onEvents: (events: NativeHostEvent[]) => void) {
          mock.options = options;
          let told = false;
          mock.send = (...given) =>
            new Promise((resolve, reject) => {
              // The addon gives no result of a life that it has not told of.
              const events: NativeHostEvent[] =
                told || !given.some(isResult) ? given : [{ kind: 'started', kernel: 1, life: life() }, ...given];
              told ||= events.some((event) => event.kind === 'started');
              setImmediate(() => {
                try {
                  onEvents(events);
                } catch (error) {
                  reject(error);
                  return;
                }
                setImmediate(resolve);
              });
            });
        }
        kernel(number: number, options: NativeKernelOptions): NativeKernel {
          const kernel = new MockKernel(number, options, mock.calls);
          mock.kernels.push(kernel);
          return kernel;
        }
        fork(_of: NativeKernel, number: number, options: NativeKernelOptions): NativeKernel {
          return this.kernel(number, options);
        }
        warm(request: number, environment: EnvironmentVariable[]): void {
          mock.calls.push({ verb: 'warm', kernel: null, request, environment });
        }
        close(request: number, graceMs: number): void {
          mock.calls.push({ verb: 'close-host', kernel: null, request, graceMs });
        }
      },
    };
  }

  host(options: KernelHostOptions = {}): KernelHost {
    return new KernelHost({ python: '/usr/bin/python3', ...options }, this.binding);
  }

  /** The last call of this verb; the request that a test answers. */
  last(verb: string): Call {
    const call = this.calls.findLast((each) => each.verb === verb);
    if (call === undefined) throw new Error(`${verb} was not asked for; calls: ${this.calls.map((each) => each.verb)}`);
    return call;
  }

  has(verb: string): boolean {
    return this.calls.some((call) => call.verb === verb);
  }
}

export function life(generation = 1): NativeLife {
  return {
    pid: 1000 + generation,
    generation,
    launch: 'fork',
    launchReason: null,
    startMs: 2,
    python: '/usr/bin/python3',
    pythonVersion: '3.13.0',
    shell: 'ipython',
  };
}

export function cell(change: Partial<NativeCell> = {}): NativeCell {
  return {
    status: 'ok',
    stdout: '',
    stderr: '',
    missingStdoutBytes: 0,
    missingStderrBytes: 0,
    missingDisplays: 0,
    outputs: [],
    executionCount: 1,
    durationMs: 1,
    generation: 1,
    recovered: null,
    ...change,
  };
}

export function exitReason(change: Partial<NativeExitReason> = {}): NativeExitReason {
  return {
    status: { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false },
    cause: 'external-signal',
    evidence: [],
    pid: 1001,
    generation: 1,
    uptimeMs: 10,
    usage: null,
    stderrTail: '',
    crashTraceback: null,
    cell: null,
    leftovers: { ended: [], remaining: [] },
    message: 'Kernel "kernel-1" was killed by SIGKILL.',
    ...change,
  };
}

export function failure(code: string, change: Partial<NativeFailure> = {}): NativeFailure {
  return { code, message: `message of ${code}`, exit: null, partial: null, stderrTail: '', ...change };
}

export function settled(request: number, reply: NativeReply): NativeHostEvent {
  return { kind: 'settled', request, reply };
}

export function text(content: string): NativeOutput {
  return { kind: 'text', stream: 'stdout', text: content };
}

export function cellOutput(request: number, content: string, bytes: number = content.length): NativeHostEvent {
  return { kind: 'cell-output', request, output: text(content), bytes };
}
