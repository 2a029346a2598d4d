/**
 * The handle of one kernel. It outlives the processes behind it: a life that ends is replaced by the next call.
 *
 * Holds no state of its own but the last exit; what the kernel is doing is asked of the addon, which decides it.
 */

import { EventEmitter } from 'node:events';
import { AutoSave, type AutoSaveTarget } from './auto-save.ts';
import { CellHistory } from './cell-history.ts';
import { type Checkpoint, Checkpoints } from './checkpoints.ts';
import { Credit } from './credit.ts';
import {
  type ExecuteTrace,
  publishExit,
  type StartTrace,
  startsAreWatched,
  type Trace,
  traceExecute,
  traceStart,
} from './diagnostics.ts';
import type { Dispatcher, KernelEvent, OutputSink } from './dispatcher.ts';
import { InvalidOptionError, KernelClosedError, KernelHostError, KernelStartError } from './errors.ts';
import { type ExitReason, toExitReason } from './exit-reason.ts';
import { expectReply, type ReplyOf } from './failure.ts';
import { type Handlers, HostCalls } from './host-calls.ts';
import { Calls } from './monitor/calls.ts';
import type { Glance } from './monitor/snapshot.ts';
import type { NativeKernel, NativeQuery, NativeReply } from './native.ts';
import { type Notebook, toNotebook } from './notebook.ts';
import {
  type Cell,
  type CloseOptions,
  type ExecuteOptions,
  type KernelOptions,
  readCell,
  readClose,
  readDetail,
  readPlace,
  readSave,
  readSnapshotPath,
  readStart,
  type StartOptions,
} from './options.ts';
import { OutputQueue } from './output-queue.ts';
import {
  type Completeness,
  type Completion,
  completeQuery,
  type Inspection,
  inspectQuery,
  toCompleteness,
  toCompletion,
  toInspection,
} from './queries.ts';
import { type CellResult, type Life, type Output, type Recovered, toCellResult, toLife, toOutput } from './result.ts';
import { signalNumber } from './signals.ts';
import {
  loadCell,
  reportIn,
  type SaveLimits,
  type SaveOptions,
  type SnapshotReport,
  saveCell,
  toSnapshotReport,
} from './snapshots.ts';
import { type CellStream, OutputStream } from './stream.ts';

export type KernelState = 'absent' | 'starting' | 'idle' | 'running' | 'ending' | 'closed';

export interface Warning {
  code: string;
  message: string;
}

export interface Usage {
  rssBytes: number;
  pssBytes: number;
  cpuMs: number;
  threads: number;
  processes: number;
}

export interface KernelEvents {
  start: [Life];
  /** Once per life, after the calls it failed and before the next `start`. */
  exit: [ExitReason];
  /** What is printed or shown while no cell runs. */
  output: [Output];
  state: [KernelState];
  warning: [Warning];
}

/** A cell that was sent to the addon. */
interface Run {
  request: number;
  reply: Promise<NativeReply>;
  trace: Trace<CellResult, ExecuteTrace> | null;
}

/** @internal What a host gives to its kernels. */
export interface KernelParts {
  id: string;
  native: NativeKernel;
  handlers: Handlers;
  dispatcher: Dispatcher;
  /** Whether anybody may ask for `glance()`. */
  watched: boolean;
  /** What it may remember of its cells. */
  notebookBytes: number;
  /** Makes a kernel whose first life is a copy of this one's. */
  fork(options: KernelOptions): Kernel;
  /** The snapshot that its lives load, and where they are saved. */
  restoreFrom: string | null;
  saveTo: AutoSaveTarget | null;
  warn(warning: Warning): void;
  /** Takes what the kernel does with its events. */
  listen(handle: (event: KernelEvent) => void): void;
  /** Called once, when the kernel is closed. */
  closed(): void;
}

/** What Python asks while a kernel saves itself. No user's function can have the name. */
const MAY_GO_ON = '\0may-go-on';

export class Kernel extends EventEmitter<KernelEvents> {
  readonly id: string;
  readonly #native: NativeKernel;
  readonly #dispatcher: Dispatcher;
  readonly #closed: () => void;
  readonly #makeFork: (options: KernelOptions) => Kernel;
  readonly #checkpoints: Checkpoints;
  readonly #credit: Credit;
  readonly #hostCalls: HostCalls;
  readonly #calls: Calls | null;
  readonly #history: CellHistory | null;
  readonly #autoSave: AutoSave | null;
  readonly #restoreFrom: string | null;
  readonly #warn: KernelParts['warn'];
  #restored: SnapshotReport | null = null;
  /** Came with the result of a silent cell of our own, and belongs to the next one of the user's. */
  #recovered: Recovered | null = null;
  #lastExit: ExitReason | null = null;
  #lastExitAt = new Date(0);
  /** The newest life that `started` has told of. */
  #life: Life | null = null;
  #lifeBegan = 0;
  #closing: Promise<void> | null = null;
  /** The launch under way, while somebody watches lives begin. */
  #launch: Trace<Life, StartTrace> | null = null;
  #startsWatched = false;

  /** @internal */
  constructor(parts: KernelParts) {
    super();
    this.id = parts.id;
    this.#native = parts.native;
    this.#dispatcher = parts.dispatcher;
    this.#closed = parts.closed;
    this.#makeFork = parts.fork;
    this.#checkpoints = new Checkpoints(async (id) => {
      const { reply } = this.#dispatcher.ask((request) => this.#native.discard(request, id));
      this.#expect(await reply, 'done');
    });
    this.#calls = parts.watched ? new Calls() : null;
    this.#history = parts.notebookBytes > 0 ? new CellHistory(parts.notebookBytes) : null;
    this.#credit = new Credit((bytes) => {
      if (!this.#dispatcher.ended) this.#native.credit(bytes);
    });
    this.#warn = parts.warn;
    this.#restoreFrom = parts.restoreFrom;
    this.#autoSave = parts.saveTo === null ? null : this.#makeAutoSave(parts.saveTo);
    this.#hostCalls = new HostCalls(this, this.#withOurs(parts.handlers), (call, header, bytes) => {
      if (!this.#dispatcher.ended) this.#native.returned(call, header, bytes);
    });
    parts.listen((event) => this.#handle(event));
    this.#watchListeners();
  }

  get state(): KernelState {
    return this.#dispatcher.ended ? 'closed' : (this.#native.state() as KernelState);
  }

  get pid(): number | null {
    return this.#dispatcher.ended ? null : this.#native.pid();
  }

  get generation(): number {
    return this.#native.generation();
  }

  get lastExit(): ExitReason | null {
    return this.#lastExit;
  }

  /** What the life has loaded from `restoreFrom`; null where it has loaded nothing. */
  get restored(): SnapshotReport | null {
    return this.#restored;
  }

  /** The newest save that the kernel has made by itself (`saveTo`). */
  get lastSave(): SnapshotReport | null {
    return this.#autoSave?.lastReport ?? null;
  }

  /** Resolves with the life that answers next: the one there is, or a new one. */
  async start(options: StartOptions = {}): Promise<Life> {
    const { signal } = readStart(options);
    signal?.throwIfAborted();
    this.#watchStarts();
    const { request, reply } = this.#dispatcher.ask((request) => this.#native.start(request));
    const settled = await this.#cancelledBy(signal, request, reply);
    return toLife(this.#expect(settled, 'life', signal).life);
  }

  /** Runs a cell. Resolves also when Python raised, was interrupted or ran out of time: see `status`. */
  async execute(code: string, options: ExecuteOptions = {}): Promise<CellResult> {
    const cell = readCell(code, options);
    cell.signal?.throwIfAborted();
    const { onOutput } = cell;
    if (onOutput === undefined) {
      const run = this.#run(cell, null);
      const settled = await run.reply;
      return this.#cellResult(run, settled, this.#life, cell.signal);
    }
    const queue = new OutputQueue(onOutput, this.#credit.add);
    // A call is pending until its listener is done, also after the cell is over.
    const release = this.#dispatcher.hold();
    try {
      const run = this.#run(cell, queue.push);
      const settled = await run.reply;
      // By the time the listener is done, another life may have started.
      const life = this.#life;
      await queue.drained();
      return this.#cellResult(run, settled, life, cell.signal);
    } finally {
      release();
    }
  }

  /** The same, with outputs as they come: `for await (const output of kernel.stream(code))`, then `.result`. */
  stream(code: string, options: ExecuteOptions = {}): CellStream {
    const cell = readCell(code, options);
    if (cell.onOutput !== undefined) {
      throw new InvalidOptionError(
        'onOutput',
        'onOutput: a stream gives its outputs to its loop; use execute() to have them called back',
      );
    }
    // The cell's error is made far from here; these frames lead back to the line that began the stream.
    const begun: { stack?: string } = {};
    Error.captureStackTrace(begun, this.stream);
    return new OutputStream((push) => {
      if (cell.signal?.aborted === true) return { result: Promise.reject(cell.signal.reason), cancel: () => {} };
      try {
        this.#hostCalls.mayRun();
      } catch (error) {
        return { result: Promise.reject(error), cancel: () => {} };
      }
      const run = this.#run(cell, push);
      return { result: this.#streamResult(run, cell.signal, begun), cancel: () => this.#native.cancel(run.request) };
    }, this.#credit.add);
  }

  /** Interrupts the running cell, with escalation. Resolves when it is over; at once when none runs. */
  async interrupt(): Promise<void> {
    const { reply } = this.#dispatcher.ask((request) => this.#native.interrupt(request));
    this.#expect(await reply, 'done');
  }

  /** Ends the life, if there is one, and starts the next. */
  async restart(): Promise<Life> {
    this.#watchStarts();
    const { reply } = this.#dispatcher.ask((request) => this.#native.restart(request));
    return toLife(this.#expect(await reply, 'life').life);
  }

  /**
   * A second kernel with all that this one has in memory, once the cells before this call are over. It has this kernel's
   * options, changed by `options`; `env` changes the environment, `init` is run in the copy only where it is given here.
   */
  async fork(options: KernelOptions = {}): Promise<Kernel> {
    const kernel = this.#makeFork(options);
    try {
      await kernel.start();
    } catch (error) {
      await kernel.close();
      throw error;
    }
    return kernel;
  }

  /** Keeps a frozen copy of the life, once the cells before this call are over. It goes with the kernel. */
  async checkpoint(): Promise<Checkpoint> {
    const { reply } = this.#dispatcher.ask((request) => this.#native.checkpoint(request));
    return this.#checkpoints.made(this.#expect(await reply, 'checkpoint').checkpoint);
  }

  /** Ends the life, and starts the next with what it had at that checkpoint. The checkpoint stays. */
  async rollback(to: Checkpoint): Promise<Life> {
    const id = this.#checkpoints.idOf(to);
    this.#watchStarts();
    const { reply } = this.#dispatcher.ask((request) => this.#native.rollback(request, id));
    return toLife(this.#expect(await reply, 'life').life);
  }

  /** Sends a signal to the life and resolves with its exit. On a kernel whose life is over: with that exit. */
  async kill(signal: NodeJS.Signals = 'SIGKILL'): Promise<ExitReason> {
    const number = signalNumber(signal);
    const { reply } = this.#dispatcher.ask((request) => this.#native.kill(request, number));
    return toExitReason(this.#expect(await reply, 'exit').exit);
  }

  /** Ends the life, politely and then not, and its process tree. Nothing is started afterwards. Idempotent. */
  async close(options: CloseOptions = {}): Promise<void> {
    const { graceMs } = readClose(options);
    this.#closing ??= this.#close(graceMs);
    await this.#closing;
  }

  /** What could stand at the cursor. While a cell runs, only where that awaits something; else ERR_KERNEL_BUSY, soon. */
  async complete(code: string, cursor: number): Promise<Completion> {
    readPlace(code, cursor);
    return toCompletion(await this.#query(completeQuery(code, cursor)), code);
  }

  /** What is known about the name at the cursor. `detail` 1: with its source. */
  async inspect(code: string, cursor: number, detail: 0 | 1 = 0): Promise<Inspection> {
    readPlace(code, cursor);
    readDetail(detail);
    return toInspection(await this.#query(inspectQuery(code, cursor, detail)));
  }

  /** Whether the code can be run as it is, or wants more lines. */
  async isComplete(code: string): Promise<Completeness> {
    readPlace(code, 0);
    return toCompleteness(await this.#query({ kind: 'is-complete', code }));
  }

  /** Writes the variables to a file, by value. What cannot be saved is told in `skipped`. Waits for its turn, as a cell. */
  async save(path: string, options: SaveOptions = {}): Promise<SnapshotReport> {
    const read = readSave(path, options);
    return this.#snapshot(saveCell(read.path, read.limits));
  }

  /** Sets the variables of a file that `save()` wrote. Runs code that the file names: load only what you trust. */
  async load(path: string): Promise<SnapshotReport> {
    return this.#snapshot(loadCell(readSnapshotPath(path)));
  }

  async usage(): Promise<Usage> {
    const { reply } = this.#dispatcher.ask((request) => this.#native.usage(request));
    return this.#expect(await reply, 'usage').usage;
  }

  /** A Jupyter notebook of the cells that have run, as far as `notebookBytes` reached. Silent cells are not in it. */
  toNotebook(): Notebook {
    return this.#history?.toNotebook(this.#life) ?? toNotebook([], { life: this.#life });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** @internal What a monitor shows of it. */
  glance(): Glance {
    const { id, state, generation, pid } = this;
    return {
      id,
      state,
      generation,
      pid,
      ageMs: pid === null || this.#life?.generation !== generation ? null : performance.now() - this.#lifeBegan,
      cell: state === 'running' ? (this.#calls?.running() ?? null) : null,
      lastExit: this.#lastExit === null ? null : { exit: this.#lastExit, at: this.#lastExitAt },
    };
  }

  /** @internal The last save by itself, before the end; null where there is none. */
  finishSaving(): Promise<void> | null {
    if (this.#autoSave === null || this.#dispatcher.ended) return null;
    return this.#autoSave.finish().finally(this.#dispatcher.hold());
  }

  /** @internal `usage()` for a monitor, which holds nothing open; null where there is no life. */
  async measure(): Promise<Usage | null> {
    if (this.#dispatcher.ended) return null;
    const { reply } = this.#dispatcher.ask((request) => this.#native.usage(request), null, false);
    const settled = await reply;
    return settled.kind === 'usage' ? settled.usage : null;
  }

  override removeAllListeners(event?: string | symbol): this {
    if (event === undefined) super.removeAllListeners();
    else super.removeAllListeners(event);
    // Without a name it also removes the two listeners that this class itself depends on.
    if (this.listenerCount('removeListener') === 0) this.#watchListeners();
    return this;
  }

  async #query(query: NativeQuery): Promise<string> {
    const { reply } = this.#dispatcher.ask((request) => this.#native.query(request, query));
    return this.#expect(await reply, 'answer').json;
  }

  async #snapshot(code: string): Promise<SnapshotReport> {
    const run = this.#run(readCell(code, { silent: true }), null);
    return this.#snapshotReport(run, await run.reply);
  }

  #snapshotReport(run: Pick<Run, 'trace'>, reply: NativeReply): SnapshotReport {
    const result = this.#cellResult(run, reply, this.#life, undefined);
    this.#recovered = result.recovered;
    return toSnapshotReport(result);
  }

  #makeAutoSave(target: AutoSaveTarget): AutoSave {
    return new AutoSave({
      target,
      isIdle: () => this.state === 'idle',
      save: (limits) => this.#saveByItself(target.path, limits),
      warn: (message) => this.#warn({ code: 'WARN_AUTOSAVE', message: `Kernel "${this.id}": ${message}` }),
    });
  }

  /** Neither holds the event loop open nor counts as a cell. */
  async #saveByItself(path: string, limits: SaveLimits): Promise<SnapshotReport> {
    const { request: cell } = readCell(saveCell(path, limits, { pid: this.pid, ask: MAY_GO_ON }), { silent: true });
    const { reply } = this.#dispatcher.ask(
      (request) => this.#native.execute(request, { ...cell, stream: false }),
      null,
      false,
    );
    return this.#snapshotReport({ trace: null }, await reply);
  }

  #withOurs(handlers: Handlers): Handlers {
    const autoSave = this.#autoSave;
    if (autoSave === null) return handlers;
    return { ...handlers, onCall: new Map([...handlers.onCall, [MAY_GO_ON, autoSave.mayGoOn]]) };
  }

  /** What a life tells of `restoreFrom`, before its first cell. */
  #noteRestored(report: NonNullable<ReturnType<typeof reportIn>>): void {
    const isFailed = report instanceof Error;
    const isLost = isFailed && report.reason !== 'missing';
    const isHeld = isLost && this.#autoSave?.path === this.#restoreFrom;
    this.#autoSave?.hold(isHeld);
    this.#restored = isFailed ? null : report;
    if (isLost) {
      const kept = isHeld ? ' The file is kept as it is: this life is not saved there.' : '';
      const message = `Kernel "${this.id}" began without its snapshot: ${report.message}.${kept}`;
      this.#warn({ code: 'WARN_RESTORE', message });
    } else if (!isFailed && report.skipped.length > 0) {
      const lost = report.skipped.slice(0, 20).map(({ name, why }) => `${name} (${why})`);
      const message = `Kernel "${this.id}" began without some of its snapshot: ${lost.join('; ')}`;
      this.#warn({ code: 'WARN_RESTORE', message });
    }
  }

  #run(cell: Cell, sink: OutputSink | null): Run {
    this.#hostCalls.mayRun();
    if (this.#autoSave?.isClosing === true) throw new KernelClosedError(`Kernel "${this.id}" has been closed.`);
    this.#watchStarts();
    const trace = traceExecute(this, cell.request);
    const ask = () =>
      this.#dispatcher.ask(
        (request) => this.#native.execute(request, { ...cell.request, stream: sink !== null }),
        sink,
      );
    const { request, reply } = trace === null ? ask() : trace.begin(ask);
    if (this.#autoSave !== null) {
      const autoSave = this.#autoSave;
      autoSave.cellBegan();
      void reply.then(() => autoSave.cellEnded());
    }
    const over = this.#hostCalls.began(request);
    if (over !== null) void reply.then(over);
    if (this.#history !== null && !cell.request.silent) {
      const history = this.#history;
      void reply.then((settled) => history.note(cell.request.code, settled, this.#life));
    }
    if (this.#calls !== null) {
      const calls = this.#calls;
      calls.made(request, cell.request.code);
      void reply.then(() => calls.over(request));
    }
    return { request, reply: this.#cancelledBy(cell.signal, request, reply), trace };
  }

  /**
   * Turns an abort into the addon's `cancel`, for as long as the request is pending. The addon knows whether the cell has
   * begun, so it decides what an abort comes to: never run, interrupted, or over before the abort came.
   */
  #cancelledBy(signal: AbortSignal | undefined, request: number, reply: Promise<NativeReply>): Promise<NativeReply> {
    if (signal === undefined) return reply;
    const onAbort = () => {
      if (!this.#dispatcher.ended) this.#native.cancel(request);
    };
    signal.addEventListener('abort', onAbort, { once: true });
    return reply.finally(() => signal.removeEventListener('abort', onAbort));
  }

  async #streamResult(run: Run, signal: AbortSignal | undefined, begun: { stack?: string }): Promise<CellResult> {
    const settled = await run.reply;
    try {
      return this.#cellResult(run, settled, this.#life, signal);
    } catch (error) {
      if (error instanceof Error && error !== signal?.reason) {
        const frames = begun.stack?.split('\n').slice(1).join('\n') ?? '';
        error.stack = `${error.stack ?? error.message}\n${frames}`;
      }
      throw error;
    }
  }

  async #close(graceMs: number): Promise<void> {
    if (this.#dispatcher.ended) return;
    const saving = this.finishSaving();
    // Without one, nothing that is asked of the kernel after the close may come before it.
    if (saving !== null) await saving;
    const { reply } = this.#dispatcher.ask((request) => this.#native.close(request, graceMs));
    const settled = await reply;
    this.#closed();
    // The host was closed meanwhile, and this kernel with it: that is what was asked for.
    if (settled.kind === 'failed' && settled.failure.code === 'ERR_KERNEL_CLOSED') return;
    this.#expect(settled, 'done');
  }

  #cellResult(
    { trace }: Pick<Run, 'trace'>,
    reply: NativeReply,
    life: Life | null,
    signal: AbortSignal | undefined,
  ): CellResult {
    try {
      const { cell } = this.#expect(reply, 'cell', signal, life);
      if (life === null) throw new KernelHostError('ERR_INTERNAL', 'bug in kernelhost: a result came before its life');
      const result = toCellResult(cell, life);
      result.recovered ??= this.#recovered;
      this.#recovered = null;
      trace?.done(result);
      return result;
    } catch (error) {
      trace?.failed(error);
      throw error;
    }
  }

  /** The reply of the kind that was asked for, or the error. An abort gives the reason the caller aborted with. */
  #expect<Kind extends NativeReply['kind']>(
    reply: NativeReply,
    kind: Kind,
    signal?: AbortSignal,
    life: Life | null = null,
  ): ReplyOf<Kind> {
    if (reply.kind === 'exit') this.#noteExit(toExitReason(reply.exit));
    if (reply.kind === 'failed') {
      const { code, exit } = reply.failure;
      // A caller that is told of an exit finds it in `lastExit` too, although the event comes after.
      if (exit !== null) this.#noteExit(toExitReason(exit));
      if (code === 'ERR_ABORTED') {
        throw signal?.aborted === true
          ? signal.reason
          : new DOMException('The stream was left before its cell began.', 'AbortError');
      }
    }
    try {
      return expectReply(reply, kind, life);
    } catch (error) {
      if (error instanceof KernelStartError) this.#launchFailed(error);
      throw error;
    }
  }

  #noteExit(exit: ExitReason): void {
    if (this.#lastExit !== null && exit.generation <= this.#lastExit.generation) return;
    this.#lastExit = exit;
    this.#lastExitAt = new Date();
  }

  #handle(event: KernelEvent): void {
    switch (event.kind) {
      case 'started':
        this.#life = toLife(event.life);
        this.#lifeBegan = performance.now();
        this.#calls?.lifeStarted();
        this.#restored = null;
        this.#launch?.done(this.#life);
        this.#launch = null;
        this.emit('start', this.#life);
        break;
      case 'exited': {
        const exit = toExitReason(event.exit);
        this.#noteExit(exit);
        this.#lastExit = exit;
        this.#autoSave?.lifeEnded();
        publishExit(this, exit);
        this.emit('exit', exit);
        break;
      }
      case 'state':
        this.#traceLaunch(event.state as KernelState);
        this.emit('state', event.state as KernelState);
        break;
      case 'output': {
        const output = toOutput(event.output);
        const report = output.kind === 'display' && this.#restoreFrom !== null ? reportIn(output.display) : null;
        if (report === null) this.emit('output', output);
        else this.#noteRestored(report);
        break;
      }
      case 'call':
        this.#hostCalls.made(event);
        break;
      case 'call-aborted':
        this.#hostCalls.aborted(event.call);
    }
  }

  /** Called before anything that may start a life: whoever watches lives begin has to be told of the state. */
  #watchStarts(): void {
    const watched = startsAreWatched();
    if (watched === this.#startsWatched) return;
    this.#startsWatched = watched;
    this.#launch = null;
    this.#watch({});
  }

  /** How a launch ends is told by what comes before the next state; a start that was given up has only that. */
  #traceLaunch(state: KernelState): void {
    if (this.#launch !== null) {
      this.#launchFailed(new KernelStartError(`The start of kernel "${this.id}" was given up.`, null, ''));
    }
    if (state !== 'starting' || !this.#startsWatched) return;
    this.#launch = traceStart(this);
    this.#launch.begin(() => {});
  }

  #launchFailed(error: KernelStartError): void {
    this.#launch?.failed(error);
    this.#launch = null;
  }

  #watch(wanted: Partial<Record<'output' | 'state', boolean>>): void {
    if (this.#dispatcher.ended) return;
    this.#native.watch(
      // The report on `restoreFrom` comes between cells.
      wanted.output ?? (this.#restoreFrom !== null || this.listenerCount('output') > 0),
      wanted.state ?? (this.#startsWatched || this.listenerCount('state') > 0),
    );
  }

  /** Tells the addon which of the frequent events anybody listens to, so that the others never cross. */
  #watchListeners(): void {
    // Node's own two events are not in our map of events.
    const untyped = this as unknown as EventEmitter;
    untyped.on('newListener', (name) => {
      // Comes before the listener is there to be counted.
      if (name === 'output' || name === 'state') this.#watch({ [name]: true });
    });
    untyped.on('removeListener', (name) => {
      if (name === 'output' || name === 'state') this.#watch({});
    });
    this.#watch({});
  }
}
