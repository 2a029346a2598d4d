/**
 * Calls of a kernel's cells into the daemon: finds the handler, runs it, sends back what it returns or throws.
 *
 * Owns the handlers' signals, and the chain of who waits for whom. Knows nothing of frames, nor of what a kernel is doing.
 */

import { AsyncLocalStorage } from 'node:async_hooks';
import { KernelHostError } from './errors.ts';
import type { Kernel } from './kernel.ts';
import type { NativeHostEvent, NativeKernel } from './native.ts';
import { pack, unpack } from './packing.ts';

export interface HostCallContext {
  kernel: Kernel;
  /** Of the life that calls. */
  generation: number;
  /** Aborted when the calling cell is interrupted, when nobody waits for the answer any more, and when the life ends. */
  signal: AbortSignal;
}

/** A function that cells call. Takes and returns JSON's types and bytes (as Uint8Array); what it throws, Python raises. */
export type HostCallHandler = (args: unknown, context: HostCallContext) => unknown;

export type InputHandler = (
  prompt: string,
  options: { password: boolean; signal: AbortSignal },
) => string | Promise<string>;

/** What a kernel's options say about calls. */
export interface Handlers {
  onCall: ReadonlyMap<string, HostCallHandler>;
  onInput: InputHandler | undefined;
}

export type CallEvent = Extract<NativeHostEvent, { kind: 'call' }>;

/** A handler that has not returned: the cell it was called by waits for it. */
interface Waiting {
  kernel: Kernel;
  /** The `execute` of that cell; null when no running cell has called. */
  request: number | null;
  name: string;
  isPending: boolean;
  /** The handler inside which that cell was run, if it was run by one. */
  outer: Waiting | undefined;
}

const waiting = new AsyncLocalStorage<Waiting>();

export class HostCalls {
  readonly #kernel: Kernel;
  readonly #handlers: Handlers;
  readonly #returned: NativeKernel['returned'];
  readonly #aborts = new Map<number, AbortController>();
  /** The requests of cells that were run by handlers, and by which. */
  readonly #runBy = new Map<number, Waiting>();

  constructor(kernel: Kernel, handlers: Handlers, returned: NativeKernel['returned']) {
    this.#kernel = kernel;
    this.#handlers = handlers;
    this.#returned = returned;
  }

  /** Throws if the caller is a handler that a cell of this kernel waits for: a cell behind that one would never begin. */
  mayRun(): void {
    for (let each = waiting.getStore(); each !== undefined; each = each.outer) {
      if (each.isPending && each.kernel === this.#kernel && each.request !== null) {
        throw new KernelHostError(
          'ERR_DEADLOCK',
          `Kernel "${this.#kernel.id}" cannot run a cell for the handler ${each.name}: the cell that has called that ` +
            'handler runs until it returns, and the new one would wait behind it for ever. Run it on another kernel, or after the handler has returned.',
        );
      }
    }
  }

  /** A cell of this kernel has been asked for; what is returned is to be called once it is over. */
  began(request: number): (() => void) | null {
    const outer = waiting.getStore();
    if (outer === undefined) return null;
    this.#runBy.set(request, outer);
    return () => this.#runBy.delete(request);
  }

  made({ call, request, generation, name, password, argsJson, placesJson, bytes }: CallEvent): void {
    const abort = new AbortController();
    this.#aborts.set(call, abort);
    const { signal } = abort;
    const outer = request === null ? undefined : this.#runBy.get(request);
    const told = password === null ? `"${name}"` : 'onInput';
    const entry: Waiting = { kernel: this.#kernel, request, name: told, isPending: true, outer };
    const run = async (): Promise<unknown> => {
      const args = unpack(argsJson, placesJson, bytes);
      if (password !== null) return this.#input(String(args), password, signal);
      return this.#handler(name)(args, { kernel: this.#kernel, generation, signal });
    };
    waiting
      .run(entry, run)
      .then(
        (value) => pack('value', value),
        (error: unknown) => refusal(error),
      )
      // What cannot be sent is the cell's to know, too.
      .catch((error: unknown) => refusal(error))
      .then(({ header, parts }) => {
        entry.isPending = false;
        this.#aborts.delete(call);
        this.#returned(call, header, parts);
      });
  }

  aborted(call: number): void {
    this.#aborts
      .get(call)
      ?.abort(new DOMException('The cell that made this call does not wait for it any more.', 'AbortError'));
  }

  #handler(name: string): HostCallHandler {
    const handler = this.#handlers.onCall.get(name);
    if (handler !== undefined) return handler;
    // What begins with a NUL is the host's own.
    const known = [...this.#handlers.onCall.keys()].filter((each) => !each.startsWith('\0')).join(', ');
    const has = known === '' ? 'it has none' : `it has ${known}`;
    throw new ReferenceError(`the daemon has no function "${name}" for this kernel; ${has}`);
  }

  async #input(prompt: string, password: boolean, signal: AbortSignal): Promise<string> {
    const { onInput } = this.#handlers;
    if (onInput === undefined) throw new ReferenceError('this kernel has no onInput handler');
    const line: unknown = await onInput(prompt, { password, signal });
    if (typeof line !== 'string') throw new TypeError(`onInput returned ${typeof line} where a string is due`);
    return line;
  }
}

function refusal(error: unknown): { header: string; parts: Buffer[] } {
  const { name, message } = error instanceof Error ? error : { name: 'Error', message: String(error) };
  const told = { name: String(name), message: String(message).slice(0, 1_000_000) };
  return { header: JSON.stringify({ error: told }), parts: [] };
}
