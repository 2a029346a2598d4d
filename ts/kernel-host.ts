/** The owner of templates and kernels: one per daemon, or as many as are wanted. */

import { EventEmitter } from 'node:events';
import { Dispatcher, type HostOnlyEvent, type KernelEvent } from './dispatcher.ts';
import { kernelEnvironment } from './environment.ts';
import { KernelClosedError } from './errors.ts';
import { type ExitReason, toExitReason } from './exit-reason.ts';
import { expectReply } from './failure.ts';
import { Kernel, type Warning } from './kernel.ts';
import { MonitorServer } from './monitor/server.ts';
import {
  loadBinding,
  type NativeBinding,
  type NativeHost,
  type NativeKernel,
  type NativeKernelOptions,
  type NativeTemplateInfo,
} from './native.ts';
import {
  type CloseOptions,
  type KernelHostOptions,
  type KernelOptions,
  readClose,
  readForkOptions,
  readHostOptions,
  readKernelOptions,
} from './options.ts';
import { type Life, toLife } from './result.ts';
import { attempt } from './rethrow.ts';

/** A Python process that has imported what kernels need, and forks them. */
export interface TemplateInfo {
  pid: number;
  state: 'ready' | 'ended';
  python: string;
  pythonVersion: string;
  preloaded: string[];
  readyMs: number;
  exit: ExitReason | null;
}

export interface KernelHostEvents {
  start: [Kernel, Life];
  exit: [Kernel, ExitReason];
  template: [TemplateInfo];
  warning: [Warning];
}

interface Member {
  kernel: Kernel;
  handle: (event: KernelEvent) => void;
}

export class KernelHost extends EventEmitter<KernelHostEvents> {
  readonly #dispatcher: Dispatcher;
  readonly #native: NativeHost;
  readonly #defaults: KernelOptions;
  readonly #members = new Map<number, Member>();
  readonly #monitor: MonitorServer | null;
  #lastKernel = 0;
  #closing: Promise<void> | null = null;

  constructor(options?: KernelHostOptions);
  /** @internal */
  constructor(options: KernelHostOptions, binding: NativeBinding);
  constructor(options: KernelHostOptions = {}, binding?: NativeBinding) {
    super();
    const { host, defaults, monitor } = readHostOptions(options, process.env);
    this.#defaults = defaults;
    this.#dispatcher = new Dispatcher({
      kernelEvent: (event) => this.#kernelEvent(event),
      hostEvent: (event) => this.#hostEvent(event),
    });
    const { NativeHost } = binding ?? loadBinding();
    this.#native = new NativeHost(host, this.#dispatcher.receive);
    this.#monitor =
      monitor === null
        ? null
        : new MonitorServer({
            path: monitor.path,
            environment: process.env,
            kernels: () => this.kernels,
            warn: (message) => attempt(() => this.emit('warning', { code: 'WARN_MONITOR', message })),
          });
  }

  /** A kernel handle. Nothing starts until `start()` or the first `execute()`. */
  kernel(options: KernelOptions = {}): Kernel {
    this.#mustBeOpen();
    const read = readKernelOptions('', options, this.#defaults, process.env);
    return this.#make({ ...this.#defaults, ...given(options) }, read, (number, native) =>
      this.#native.kernel(number, native),
    );
  }

  /** `options`: all of them, so that a fork of it can change some. */
  #make(
    options: KernelOptions,
    { native, handlers, notebookBytes, restoreFrom, saveTo }: ReturnType<typeof readKernelOptions>,
    begin: (number: number, native: NativeKernelOptions) => NativeKernel,
  ): Kernel {
    const number = ++this.#lastKernel;
    const id = `kernel-${number}`;
    const ours = begin(number, { id, ...native });
    let handle: Member['handle'] = () => {};
    const kernel = new Kernel({
      id,
      native: ours,
      handlers,
      dispatcher: this.#dispatcher,
      watched: this.#monitor !== null,
      notebookBytes,
      fork: (changes) => {
        this.#mustBeOpen();
        const read = readForkOptions(changes, { options, environment: native.environment });
        return this.#make({ ...options, ...given(changes) }, read, (number, native) =>
          this.#native.fork(ours, number, native, read.thawing),
        );
      },
      restoreFrom,
      saveTo,
      warn: (warning) => this.#warn(kernel, warning),
      listen: (given) => {
        handle = given;
      },
      closed: () => this.#members.delete(number),
    });
    this.#members.set(number, { kernel, handle });
    return kernel;
  }

  /** Those that are not closed. */
  get kernels(): readonly Kernel[] {
    return Array.from(this.#members.values(), ({ kernel }) => kernel);
  }

  /** Warms the template, so that the first kernel starts as fast as the next ones. */
  async warm(): Promise<TemplateInfo> {
    this.#mustBeOpen();
    const { env, inheritEnv } = this.#defaults;
    const environment = kernelEnvironment({ env, inheritEnv }, process.env);
    const { reply } = this.#dispatcher.ask((request) => this.#native.warm(request, environment));
    return toTemplateInfo(expectReply(await reply, 'template').template);
  }

  /** Ends every kernel (politely, then not), its process tree, and the templates. Idempotent; resolves within `graceMs` + 1 s. */
  async close(options: CloseOptions = {}): Promise<void> {
    const { graceMs } = readClose(options);
    this.#closing ??= this.#close(graceMs);
    await this.#closing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #mustBeOpen(): void {
    if (this.#closing !== null) {
      throw new KernelClosedError('The kernel host has been closed; make a new KernelHost to go on.');
    }
  }

  async #close(graceMs: number): Promise<void> {
    const saving = this.kernels.map((kernel) => kernel.finishSaving()).filter((each) => each !== null);
    if (saving.length > 0) await Promise.all(saving);
    const { reply } = this.#dispatcher.ask((request) => this.#native.close(request, graceMs));
    const settled = await reply;
    this.#monitor?.close();
    this.#dispatcher.end();
    this.#members.clear();
    expectReply(settled, 'done');
  }

  /** Each listener is called whatever the one before threw. */
  #kernelEvent(event: KernelEvent): void {
    const member = this.#members.get(event.kernel);
    if (member === undefined) return;
    attempt(() => member.handle(event));
    if (event.kind === 'started') attempt(() => this.emit('start', member.kernel, toLife(event.life)));
    else if (event.kind === 'exited') attempt(() => this.emit('exit', member.kernel, toExitReason(event.exit)));
  }

  #hostEvent(event: HostOnlyEvent): void {
    if (event.kind === 'template') {
      this.emit('template', toTemplateInfo(event.template));
      return;
    }
    const { kernel, code, message } = event;
    const member = kernel === null ? undefined : this.#members.get(kernel);
    this.#warn(member?.kernel, { code, message });
  }

  #warn(kernel: Kernel | undefined, warning: Warning): void {
    if (kernel !== undefined) attempt(() => kernel.emit('warning', warning));
    attempt(() => this.emit('warning', warning));
  }
}

/** Without what is undefined, which stands for the default. */
function given(options: KernelOptions): KernelOptions {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
}

function toTemplateInfo(template: NativeTemplateInfo): TemplateInfo {
  return { ...template, exit: template.exit === null ? null : toExitReason(template.exit) };
}
