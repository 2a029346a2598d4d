/**
 * One per host: every event of the addon comes in here, in exact order, and goes to whom it concerns.
 *
 * Owns the pending requests and the hold on Node's event loop. Knows nothing of options, results or emitters.
 *
 * - A request ends exactly once. What comes for a request that has ended is dropped.
 * - A listener that throws harms nobody: its error becomes an ordinary uncaught exception, the remaining events of the
 *   batch are delivered.
 * - Whoever awaits a reply goes on before later events are delivered, also when both came in one batch. So a caller
 *   sees its call rejected before it sees the `exit` event, and lives can be told apart by what happened first.
 */

import type { NativeFailure, NativeHostEvent, NativeOutput, NativeReply } from './native.ts';
import { attempt } from './rethrow.ts';

/** Takes the outputs of one cell. */
export type OutputSink = (output: NativeOutput, bytes: number) => void;

type EventOf<Kind extends NativeHostEvent['kind']> = Extract<NativeHostEvent, { kind: Kind }>;
export type KernelEvent = EventOf<'started' | 'exited' | 'state' | 'output' | 'call' | 'call-aborted'>;
export type HostOnlyEvent = EventOf<'template' | 'warning'>;

/** What the host and its kernels do with events that answer no request. */
export interface EventTarget {
  kernelEvent(event: KernelEvent): void;
  hostEvent(event: HostOnlyEvent): void;
}

interface Pending {
  resolve(reply: NativeReply): void;
  release(): void;
  sink: OutputSink | null;
}

/** Of a host that is closed. */
const NOBODY: EventTarget = { kernelEvent() {}, hostEvent() {} };

/** The longest interval a timer takes. It does nothing; being there is its job. */
const HOLD_INTERVAL_MS = 2 ** 31 - 1;

export class Dispatcher {
  #target: EventTarget;
  readonly #pending = new Map<number, Pending>();
  #lastRequest = 0;
  #queue: NativeHostEvent[] = [];
  #next = 0;
  /** A reply was delivered and its awaiters have not run yet: the queue waits for them. */
  #yielding = false;
  #holds = 0;
  #hold: NodeJS.Timeout | null = null;
  #ended = false;

  constructor(target: EventTarget) {
    this.#target = target;
  }

  /** True once the host is closed: the addon is not asked for anything any more. */
  get ended(): boolean {
    return this.#ended;
  }

  /**
   * Sends a request through `post` and resolves with its reply. Failures are replies too. `held`: whether the event loop is
   * held open meanwhile.
   */
  ask(
    post: (request: number) => void,
    sink: OutputSink | null = null,
    held = true,
  ): { request: number; reply: Promise<NativeReply> } {
    const request = ++this.#lastRequest;
    const reply = new Promise<NativeReply>((resolve) => {
      this.#pending.set(request, { resolve, release: held ? this.hold() : () => {}, sink });
    });
    if (this.#ended) {
      this.#settle(request, hostClosed());
      return { request, reply };
    }
    try {
      post(request);
    } catch (error) {
      // The addon throws for nothing that is expected, so this is a bug or an environment that is being torn down.
      this.#settle(request, failed('ERR_INTERNAL', `bug in kernelhost: the addon threw: ${String(error)}`));
    }
    return { request, reply };
  }

  /** Keeps Node's event loop open until the returned function is called. */
  hold(): () => void {
    if (this.#ended) return () => {};
    this.#hold ??= setInterval(() => {}, HOLD_INTERVAL_MS);
    if (this.#holds++ === 0) this.#hold.ref();
    let held = true;
    return () => {
      if (!held) return;
      held = false;
      if (--this.#holds === 0) this.#hold?.unref();
    };
  }

  /** The addon's callback. Never throws. */
  readonly receive = (events: NativeHostEvent[]): void => {
    for (const event of events) this.#queue.push(event);
    if (!this.#yielding) this.#deliver();
  };

  /** Settles what is still pending once the host is closed: the net under "every request ends". */
  end(): void {
    this.#ended = true;
    // The addon holds on to `receive` until its side of the host is collected; that must not keep the host itself alive.
    this.#target = NOBODY;
    for (const request of [...this.#pending.keys()]) this.#settle(request, hostClosed());
    if (this.#hold !== null) clearInterval(this.#hold);
    this.#hold = null;
  }

  #deliver(): void {
    while (this.#next < this.#queue.length) {
      const event = this.#queue[this.#next] as NativeHostEvent;
      this.#next += 1;
      if (event.kind === 'settled') {
        // Replies that follow each other need no pause between them: their awaiters run in the same order.
        this.#settle(event.request, event.reply);
        if (this.#queue[this.#next]?.kind === 'settled') continue;
        this.#yield();
        return;
      }
      attempt(() => this.#hand(event));
    }
    this.#queue = [];
    this.#next = 0;
  }

  /**
   * Goes on after everything that the delivered replies set off. A tick that a microtask asks for runs when no microtask
   * is left, however long the chain of awaits was; asked for from here directly it would run before them.
   */
  #yield(): void {
    this.#yielding = true;
    queueMicrotask(() => {
      process.nextTick(() => {
        this.#yielding = false;
        this.#deliver();
      });
    });
  }

  #hand(event: Exclude<NativeHostEvent, { kind: 'settled' }>): void {
    switch (event.kind) {
      case 'cell-output':
        this.#pending.get(event.request)?.sink?.(event.output, event.bytes);
        break;
      case 'template':
      case 'warning':
        this.#target.hostEvent(event);
        break;
      default:
        this.#target.kernelEvent(event);
    }
  }

  #settle(request: number, reply: NativeReply): void {
    const pending = this.#pending.get(request);
    if (pending === undefined) return;
    this.#pending.delete(request);
    pending.release();
    pending.resolve(reply);
  }
}

function hostClosed(): NativeReply {
  return failed('ERR_KERNEL_CLOSED', 'The kernel host has been closed; make a new KernelHost to go on.');
}

function failed(code: string, message: string): NativeReply {
  const failure: NativeFailure = { code, message, exit: null, partial: null, stderrTail: '' };
  return { kind: 'failed', failure };
}
