/**
 * Reads what users pass: checks every option, fills in the defaults, and gives the addon's shape.
 *
 * Errors name the option by its path, the value, and what is allowed. An option nobody knows is an error too, with the
 * nearest name: a misspelt limit that is silently ignored is worse than one that is refused.
 */

import { resolve } from 'node:path';
import type { AutoSaveTarget } from './auto-save.ts';
import { kernelEnvironment } from './environment.ts';
import { InvalidOptionError } from './errors.ts';
import type { Handlers, HostCallHandler, InputHandler } from './host-calls.ts';
import { resolveInterpreter } from './interpreter.ts';
import { isTooLong } from './monitor/place.ts';
import {
  type EnvironmentVariable,
  type NativeCellRequest,
  type NativeHostOptions,
  type NativeKernelOptions,
  type NativeThawing,
  runtimeDirectory,
} from './native.ts';
import type { Output } from './result.ts';
import type { SaveLimits, SaveOptions, SaveTo } from './snapshots.ts';

export interface KernelHostOptions {
  /** Interpreter. Default: KERNELHOST_PYTHON, the active virtual environment, `python3` on PATH. */
  python?: string | undefined;
  /** 'auto' forks where it can and spawns cold where it cannot, saying why. KERNELHOST_LAUNCH overrides. Default 'auto'. */
  launch?: 'auto' | 'fork' | 'spawn' | undefined;
  /** 'auto': IPython where it can be imported, else the plain REPL. */
  shell?: 'auto' | 'ipython' | 'plain' | undefined;
  /** Modules the template imports once for all kernels. */
  preload?: readonly string[] | undefined;
  /**
   * Opens a socket for `kernelhost top`, for this user only: at this path, or with `true` in a folder where it is found.
   * Default: KERNELHOST_MONITOR (a path, or `1`), else none.
   */
  monitor?: boolean | string | undefined;
  /** Defaults for every kernel. */
  defaults?: KernelOptions | undefined;
}

export interface KernelOptions {
  /** Where the kernel starts. Default: the daemon's working directory. */
  cwd?: string | undefined;
  /** The exact environment, or changes to the daemon's with `inheritEnv`. Default: inherit all. */
  env?: Readonly<Record<string, string | undefined>> | undefined;
  inheritEnv?: 'all' | readonly string[] | undefined;
  /** Run silently at the start of every life, before any cell. A failure is a start failure. */
  init?: string | undefined;
  /**
   * A snapshot that every life loads, after `init` and before any cell. That there is none is no trouble; one that cannot be
   * loaded is a `warning` (WARN_RESTORE). Loading is code execution: name only a file that nobody else could write.
   */
  restoreFrom?: string | undefined;
  /** Where the kernel saves its variables by itself: after cells, while it is idle, and when it is closed. Not in `defaults`. */
  saveTo?: string | SaveTo | undefined;
  /** Default 30 000. */
  startTimeoutMs?: number | undefined;
  /** Interrupt, wait this long, interrupt again, wait this long, then `stuck` decides. Default 2 000. */
  interruptGraceMs?: number | undefined;
  /**
   * A cell that will not stop: 'end' ends the life; 'wait' settles the call, keeps the life and its state, and lets the
   * next call wait for the cell (ERR_KERNEL_BUSY when its own time is up). Default 'end'.
   */
  stuck?: 'end' | 'wait' | undefined;
  /** Per stream of one cell; head and tail are kept. Default 1 MiB. */
  maxOutputBytes?: number | undefined;
  /**
   * What is remembered of the latest cells for `toNotebook()`: code and outputs, a character counted as a byte. Beyond it
   * the oldest outputs go first, then the oldest cells. 0: nothing. Default 1 MiB.
   */
  notebookBytes?: number | undefined;
  /** How ready the Linux kernel is to take this process first when memory runs out, -1000 to 1000. Default 500. */
  oomScoreAdj?: number | undefined;
  /** What one life may take. Given to a kernel, they replace those of `defaults` as a whole. Default: no limits. */
  limits?: Limits | undefined;
  /**
   * 'restart': the next call gets a new life. 'checkpoint': a new life with the variables as they were after the last cell
   * that ended well. 'none': stay absent until start() is called. Default 'restart'.
   */
  recovery?: 'restart' | 'checkpoint' | 'none' | undefined;
  /**
   * With recovery 'checkpoint': how much memory of its own the copy taken after a cell may come to have while the next one
   * runs. Beyond it no more are taken of this life, and a `warning` says so. Default 1 GiB.
   */
  checkpointBytes?: number | undefined;
  /**
   * Functions that cells call: `kernelhost.call("name", args)`, `await kernelhost.acall(…)`, `kernelhost.tools.name(…)`.
   * Given to a kernel, they replace those of `defaults` as a whole. Default: none.
   */
  onCall?: Readonly<Record<string, HostCallHandler>> | undefined;
  /** Answers `input()` and `getpass()`. Default: they fail at once with an EOFError. */
  onInput?: InputHandler | undefined;
}

export interface Limits {
  /**
   * What each process may ask for beyond which it gets a MemoryError (RLIMIT_DATA), and what the kernel and all it has
   * started may have resident together, beyond which the life is ended (cause 'memory-limit'). At 90 % comes a `warning`.
   */
  memoryBytes?: number | undefined;
  /** CPU time of each process, in seconds (RLIMIT_CPU). A kernel that has used it up is ended (cause 'cpu-limit'). */
  cpuSeconds?: number | undefined;
  /** Open files of each process (RLIMIT_NOFILE): beyond it, calls fail with EMFILE. */
  openFiles?: number | undefined;
  /** Processes of the kernel's tree, itself included. A kernel with more is ended (cause 'process-limit'). */
  processes?: number | undefined;
}

export interface ExecuteOptions {
  /** Abort interrupts the cell, with escalation. */
  signal?: AbortSignal | undefined;
  timeoutMs?: number | undefined;
  /** Gets the outputs one after the other; a promise it returns is waited for before the next. */
  onOutput?: ((output: Output) => void | Promise<void>) | undefined;
  maxOutputBytes?: number | undefined;
  /** Not counted, not in history. */
  silent?: boolean | undefined;
}

export interface StartOptions {
  signal?: AbortSignal | undefined;
}

export interface CloseOptions {
  /** How long a kernel may take to end politely. Default 2 000. */
  graceMs?: number | undefined;
}

const DEFAULT_START_TIMEOUT_MS = 30_000;
const DEFAULT_INTERRUPT_GRACE_MS = 2_000;
const DEFAULT_MAX_OUTPUT_BYTES = 1024 * 1024;
/** Some hundred cells with a few figures. A daemon may have a hundred kernels for weeks. */
const DEFAULT_CHECKPOINT_BYTES = 1024 * 1024 * 1024;
const DEFAULT_NOTEBOOK_BYTES = 1024 * 1024;
const DEFAULT_OOM_SCORE_ADJ = 500;
const DEFAULT_CLOSE_GRACE_MS = 2_000;
const DEFAULT_SAVE_INTERVAL_MS = 10_000;

/** The longest time Node's own timers take; about 24 days. */
const MAX_TIME_MS = 2 ** 31 - 1;
const MAX_OUTPUT_BYTES = 2 ** 32 - 1;

/** With less than this a kernel cannot work at all. */
const LEAST_MEMORY_BYTES = 32 * 1024 * 1024;
const LEAST_OPEN_FILES = 32;
/** More than any Linux has. */
const MAX_CPU_SECONDS = 2 ** 31 - 1;
const MAX_OPEN_FILES = 2 ** 30;
const MAX_PROCESSES = 2 ** 22;

const launches = ['auto', 'fork', 'spawn'] as const;
const shells = ['auto', 'ipython', 'plain'] as const;

/** A host's options in the addon's shape, and the defaults for its kernels. */
export function readHostOptions(
  options: KernelHostOptions,
  environment: NodeJS.ProcessEnv,
): { host: NativeHostOptions; defaults: KernelOptions; monitor: MonitorChoice | null } {
  const read = new Reader('', options, ['python', 'launch', 'shell', 'preload', 'monitor', 'defaults']);
  const defaults = options.defaults ?? {};
  // Read for its errors: they belong here and not to the first kernel.
  readKernelOptions('defaults', defaults, {}, environment);
  const override = environment.KERNELHOST_LAUNCH;
  const launch =
    override === undefined || override === ''
      ? read.choice('launch', launches, 'auto')
      : choice('KERNELHOST_LAUNCH (environment variable)', override, launches);
  return {
    host: {
      python: resolveInterpreter(read.text('python', { empty: false, path: true }), environment),
      launch,
      shell: read.choice('shell', shells, 'auto'),
      preload: read.list('preload', isModuleName, "a Python module name such as 'numpy' or 'os.path'") ?? [],
      runtimeDirectory,
    },
    defaults,
    monitor: readMonitor(read.value('monitor'), environment),
  };
}

/** Where a host's monitor listens. `path`: null for a place in the default folder. */
export interface MonitorChoice {
  path: string | null;
}

function readMonitor(option: unknown, { KERNELHOST_MONITOR }: NodeJS.ProcessEnv): MonitorChoice | null {
  if (option === undefined) {
    if (KERNELHOST_MONITOR === undefined || ['', '0'].includes(KERNELHOST_MONITOR)) return null;
    if (KERNELHOST_MONITOR === '1') return { path: null };
    return { path: socketPath('KERNELHOST_MONITOR (environment variable)', KERNELHOST_MONITOR) };
  }
  if (typeof option === 'boolean') return option ? { path: null } : null;
  if (typeof option !== 'string') throw invalid('monitor', option, 'true, false or the path of a socket');
  return { path: socketPath('monitor', option) };
}

function socketPath(option: string, given: string): string {
  if (given === '' || given.includes('\0'))
    throw invalid(option, given, 'a path that is not empty and has no NUL characters');
  const path = resolve(given);
  if (isTooLong(path)) throw invalid(option, given, 'a shorter path: the address of a socket has at most 107 bytes');
  return path;
}

/** A kernel's options over the host's defaults, option by option, in the addon's shape. */
export function readKernelOptions(
  path: string,
  options: KernelOptions,
  defaults: KernelOptions,
  daemon: NodeJS.ProcessEnv,
): {
  native: Omit<NativeKernelOptions, 'id'>;
  handlers: Handlers;
  notebookBytes: number;
  restoreFrom: string | null;
  saveTo: AutoSaveTarget | null;
} {
  const read = new Reader(
    path,
    options,
    [
      'cwd',
      'env',
      'inheritEnv',
      'init',
      'restoreFrom',
      'saveTo',
      'startTimeoutMs',
      'interruptGraceMs',
      'stuck',
      'maxOutputBytes',
      'notebookBytes',
      'oomScoreAdj',
      'limits',
      'recovery',
      'checkpointBytes',
      'onCall',
      'onInput',
    ],
    defaults,
  );
  const cwd = read.text('cwd', { empty: false, path: true });
  const init = read.text('init');
  const given = read.text('restoreFrom', { empty: false, path: true });
  const restoreFrom = given === undefined ? null : resolve(given);
  const saveTo = read.value('saveTo') === undefined ? null : readSaveTo(read.path('saveTo'), read.value('saveTo'));
  if (saveTo !== null && path === 'defaults') {
    throw new InvalidOptionError(
      'defaults.saveTo',
      'defaults.saveTo: give it to each kernel, because a file is of one',
    );
  }
  const handlers = {
    onCall: read.functions('onCall'),
    onInput: read.callback('onInput') as InputHandler | undefined,
  };
  const native = {
    cwd: cwd === undefined ? workingDirectory() : resolve(cwd),
    environment: kernelEnvironment({ env: read.variables('env'), inheritEnv: read.inheritEnv() }, daemon),
    init: init ?? null,
    restoreFrom,
    startTimeoutMs: read.time('startTimeoutMs', { least: 1 }) ?? DEFAULT_START_TIMEOUT_MS,
    interruptGraceMs: read.time('interruptGraceMs') ?? DEFAULT_INTERRUPT_GRACE_MS,
    stuck: read.choice('stuck', ['end', 'wait'] as const, 'end'),
    maxOutputBytes: read.integer('maxOutputBytes', 0, MAX_OUTPUT_BYTES) ?? DEFAULT_MAX_OUTPUT_BYTES,
    oomScoreAdj: read.integer('oomScoreAdj', -1000, 1000) ?? DEFAULT_OOM_SCORE_ADJ,
    limits: readLimits(read.path('limits'), read.value('limits') ?? {}),
    recovery: read.choice('recovery', ['restart', 'checkpoint', 'none'] as const, 'restart'),
    checkpointBytes: read.integer('checkpointBytes', 0, Number.MAX_SAFE_INTEGER) ?? DEFAULT_CHECKPOINT_BYTES,
    functions: [...handlers.onCall.keys()],
    answersInput: handlers.onInput !== undefined,
  };
  const notebookBytes = read.integer('notebookBytes', 0, Number.MAX_SAFE_INTEGER) ?? DEFAULT_NOTEBOOK_BYTES;
  return { native, handlers, notebookBytes, restoreFrom, saveTo };
}

function readSaveTo(path: string, saveTo: unknown): AutoSaveTarget {
  const options = typeof saveTo === 'string' ? { path: saveTo } : (saveTo as object);
  const read = new Reader(path, options, ['path', 'intervalMs', ...SAVE_LIMITS]);
  const file = read.text('path', { empty: false, path: true });
  if (file === undefined) throw invalid(read.path('path'), file, 'the path of a file');
  return {
    path: resolve(file),
    intervalMs: read.time('intervalMs') ?? DEFAULT_SAVE_INTERVAL_MS,
    limits: readSaveLimits(read),
  };
}

const SAVE_LIMITS = ['maxVariableBytes', 'maxBytes', 'timeoutMs'] as const;

function readSaveLimits(read: Reader): SaveLimits {
  return {
    maxVariableBytes: read.integer('maxVariableBytes', 0, Number.MAX_SAFE_INTEGER) ?? null,
    maxBytes: read.integer('maxBytes', 0, Number.MAX_SAFE_INTEGER) ?? null,
    timeoutMs: read.time('timeoutMs') ?? null,
  };
}

export function readSave(path: string, options: SaveOptions): { path: string; limits: SaveLimits } {
  return { path: readSnapshotPath(path), limits: readSaveLimits(new Reader('', options, SAVE_LIMITS)) };
}

export function readSnapshotPath(path: string): string {
  if (typeof path !== 'string' || path === '' || path.includes('\0')) {
    throw invalid('path', path, 'the path of a file: not empty, without NUL characters');
  }
  return resolve(path);
}

/** What a copy of a kernel's life is to be, over what that kernel is. `environment`: of that kernel's own lives. */
export function readForkOptions(
  options: KernelOptions,
  original: { options: KernelOptions; environment: readonly EnvironmentVariable[] },
): ReturnType<typeof readKernelOptions> & { thawing: NativeThawing } {
  if (typeof options === 'object' && options?.inheritEnv !== undefined) {
    throw new InvalidOptionError(
      'inheritEnv',
      'inheritEnv: a fork has the environment of the kernel it is a copy of; `env` changes it',
    );
  }
  const environment = Object.fromEntries(original.environment.map(({ name, value }) => [name, value]));
  // A file is of one kernel.
  const base = { ...original.options, env: undefined, inheritEnv: 'all', saveTo: undefined } as const;
  const read = readKernelOptions('', options, base, environment);
  const changes = Object.entries(options.env ?? {});
  return {
    ...read,
    thawing: {
      environment: changes.map(([name, value]) => ({ name, value: value ?? null })),
      cwd: options.cwd === undefined ? null : read.native.cwd,
      init: options.init ?? null,
    },
  };
}

/** Code and a place in it, as `complete` and `inspect` take them. */
export function readPlace(code: string, cursor: number): void {
  if (typeof code !== 'string') throw invalid('code', code, 'a string of Python code');
  if (!Number.isInteger(cursor) || cursor < 0 || cursor > code.length) {
    throw invalid('cursor', cursor, `a whole number from 0 to the length of the code, ${code.length}`);
  }
}

export function readDetail(detail: unknown): asserts detail is 0 | 1 {
  if (detail !== 0 && detail !== 1) throw invalid('detail', detail, '0 or 1');
}

function readLimits(path: string, limits: unknown): NativeKernelOptions['limits'] {
  const read = new Reader(path, limits as object, ['memoryBytes', 'cpuSeconds', 'openFiles', 'processes']);
  return {
    memoryBytes: read.integer('memoryBytes', LEAST_MEMORY_BYTES, Number.MAX_SAFE_INTEGER) ?? null,
    cpuSeconds: read.integer('cpuSeconds', 1, MAX_CPU_SECONDS) ?? null,
    openFiles: read.integer('openFiles', LEAST_OPEN_FILES, MAX_OPEN_FILES) ?? null,
    processes: read.integer('processes', 1, MAX_PROCESSES) ?? null,
  };
}

/** What one `execute` or `stream` comes to. */
export interface Cell {
  request: Omit<NativeCellRequest, 'stream'>;
  signal: AbortSignal | undefined;
  onOutput: ((output: Output) => void | Promise<void>) | undefined;
}

export function readCell(code: string, options: ExecuteOptions): Cell {
  if (typeof code !== 'string') throw invalid('code', code, 'a string of Python code');
  const read = new Reader('', options, ['signal', 'timeoutMs', 'onOutput', 'maxOutputBytes', 'silent']);
  return {
    request: {
      code,
      silent: read.boolean('silent') ?? false,
      timeoutMs: read.time('timeoutMs', { least: 1 }) ?? null,
      maxOutputBytes: read.integer('maxOutputBytes', 0, MAX_OUTPUT_BYTES) ?? null,
    },
    signal: read.signal(),
    onOutput: read.callback('onOutput') as Cell['onOutput'],
  };
}

export function readStart(options: StartOptions): { signal: AbortSignal | undefined } {
  return { signal: new Reader('', options, ['signal']).signal() };
}

export function readClose(options: CloseOptions): { graceMs: number } {
  return { graceMs: new Reader('', options, ['graceMs']).time('graceMs') ?? DEFAULT_CLOSE_GRACE_MS };
}

/** Reads the options of one object; falls back to `defaults`, whose values have been read before. */
class Reader {
  readonly #path: string;
  readonly #values: Record<string, unknown>;

  constructor(path: string, options: object, known: readonly string[], defaults: object = {}) {
    this.#path = path;
    if (typeof options !== 'object' || options === null || Array.isArray(options)) {
      throw invalid(path === '' ? 'options' : path, options, 'an object');
    }
    this.#values = { ...defaults };
    for (const [name, value] of Object.entries(options)) {
      // Leaving an option out and giving `undefined` are the same, as everywhere in Node.
      if (value === undefined) continue;
      if (!known.includes(name)) throw this.#unknown(name, value, known);
      this.#values[name] = value;
    }
  }

  path(name: string): string {
    return this.#path === '' ? name : `${this.#path}.${name}`;
  }

  value(name: string): unknown {
    return this.#values[name];
  }

  text(name: string, { empty = true, path = false } = {}): string | undefined {
    const value = this.#values[name];
    if (value === undefined) return undefined;
    if (typeof value !== 'string') throw invalid(this.path(name), value, 'a string');
    if (!empty && value === '') throw invalid(this.path(name), value, 'a string that is not empty');
    if (path && value.includes('\0')) throw invalid(this.path(name), value, 'a path without NUL characters');
    return value;
  }

  boolean(name: string): boolean | undefined {
    const value = this.#values[name];
    if (value !== undefined && typeof value !== 'boolean') throw invalid(this.path(name), value, 'true or false');
    return value;
  }

  choice<const Values extends readonly string[]>(
    name: string,
    values: Values,
    fallback: Values[number],
  ): Values[number] {
    const value = this.#values[name];
    return value === undefined ? fallback : choice(this.path(name), value, values);
  }

  /** Fractions are rounded up: what is left of a deadline is seldom a whole number. */
  time(name: string, { least = 0 } = {}): number | undefined {
    const value = this.#values[name];
    if (value === undefined) return undefined;
    const rounded = typeof value === 'number' ? Math.ceil(value) : Number.NaN;
    if (!(rounded >= least && rounded <= MAX_TIME_MS)) {
      throw invalid(this.path(name), value, `a number of milliseconds from ${least} to ${MAX_TIME_MS}`);
    }
    return rounded;
  }

  integer(name: string, least: number, most: number): number | undefined {
    const value = this.#values[name];
    if (value === undefined) return undefined;
    if (typeof value !== 'number' || !Number.isInteger(value) || value < least || value > most) {
      throw invalid(this.path(name), value, `a whole number from ${least} to ${most}`);
    }
    return value;
  }

  list(name: string, accepts: (item: string) => boolean, allowed: string): string[] | undefined {
    const value = this.#values[name];
    if (value === undefined) return undefined;
    if (!Array.isArray(value)) throw invalid(this.path(name), value, `an array, each item ${allowed}`);
    return value.map((item: unknown, index) => {
      if (typeof item === 'string' && accepts(item)) return item;
      throw invalid(`${this.path(name)}[${index}]`, item, allowed);
    });
  }

  variables(name: string): Record<string, string | undefined> | undefined {
    const value = this.#values[name];
    if (value === undefined) return undefined;
    if (typeof value !== 'object' || value === null || Array.isArray(value)) {
      throw invalid(this.path(name), value, 'an object of environment variables');
    }
    for (const [variable, content] of Object.entries(value)) {
      const path = `${this.path(name)}[${JSON.stringify(variable)}]`;
      if (!isVariableName(variable)) {
        throw new InvalidOptionError(
          path,
          `${path}: a variable's name is not empty and has no "=" and no NUL character`,
        );
      }
      if (content !== undefined && (typeof content !== 'string' || content.includes('\0'))) {
        throw invalid(path, content, 'a string without NUL characters, or undefined to leave the variable out');
      }
    }
    return value as Record<string, string | undefined>;
  }

  inheritEnv(): 'all' | string[] | undefined {
    const value = this.#values.inheritEnv;
    if (value === 'all') return value;
    if (value !== undefined && !Array.isArray(value)) {
      throw invalid(this.path('inheritEnv'), value, "'all' or an array of variable names");
    }
    return this.list('inheritEnv', isVariableName, 'a variable name');
  }

  signal(): AbortSignal | undefined {
    const value = this.#values.signal;
    if (value === undefined) return undefined;
    // By shape, not by class: a signal may come from another realm or from a polyfill.
    const like = value as Partial<AbortSignal> | null;
    if (typeof like !== 'object' || typeof like?.aborted !== 'boolean' || typeof like.addEventListener !== 'function') {
      throw invalid(this.path('signal'), value, 'an AbortSignal');
    }
    return value as AbortSignal;
  }

  callback(name: string): ((...args: never[]) => unknown) | undefined {
    const value = this.#values[name];
    if (value !== undefined && typeof value !== 'function') throw invalid(this.path(name), value, 'a function');
    return value as ((...args: never[]) => unknown) | undefined;
  }

  functions(name: string): Map<string, HostCallHandler> {
    const value = this.#values[name] ?? {};
    if (typeof value !== 'object' || value === null || Array.isArray(value)) {
      throw invalid(this.path(name), value, 'an object of functions');
    }
    for (const [key, each] of Object.entries(value)) {
      const path = `${this.path(name)}[${JSON.stringify(key)}]`;
      if (key === '') throw invalid(path, each, 'a name that is not empty');
      if (typeof each !== 'function') throw invalid(path, each, 'a function');
    }
    return new Map(Object.entries(value as Record<string, HostCallHandler>));
  }

  #unknown(name: string, value: unknown, known: readonly string[]): InvalidOptionError {
    const path = this.path(name);
    const close = nearest(name, known);
    const hint = close === null ? '' : ` Did you mean ${this.path(close)}?`;
    return new InvalidOptionError(
      path,
      `${path}: there is no such option (given ${describe(value)}).${hint} Options here: ${known.join(', ')}.`,
    );
  }
}

function choice<const Values extends readonly string[]>(path: string, value: unknown, values: Values): Values[number] {
  if (typeof value === 'string' && values.includes(value)) return value;
  throw invalid(path, value, `one of ${values.map((name) => `'${name}'`).join(', ')}`);
}

function invalid(option: string, value: unknown, allowed: string): InvalidOptionError {
  return new InvalidOptionError(option, `${option}: ${describe(value)} is not allowed; give ${allowed}`);
}

/** A value in an error message: short, and never a whole environment or program. */
export function describe(value: unknown): string {
  if (typeof value === 'string') return JSON.stringify(value.length > 60 ? `${value.slice(0, 57)}...` : value);
  if (typeof value === 'bigint') return `${value}n`;
  if (typeof value === 'function') return 'a function';
  if (Array.isArray(value)) return 'an array';
  if (typeof value === 'object' && value !== null) return 'an object';
  return String(value);
}

/** The name that a misspelt one was probably meant to be, or null. */
export function nearest(name: string, known: readonly string[]): string | null {
  let best: string | null = null;
  // A third of the letters may be wrong; more, and a suggestion is a guess.
  let least = Math.floor(name.length / 3) + 1;
  for (const candidate of known) {
    const distance = editDistance(name.toLowerCase(), candidate.toLowerCase());
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const replaced = (row[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(replaced, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[b.length] ?? 0;
}

function isVariableName(name: string): boolean {
  return name !== '' && !name.includes('=') && !name.includes('\0');
}

function isModuleName(name: string): boolean {
  return /^[\p{ID_Start}_][\p{ID_Continue}]*(\.[\p{ID_Start}_][\p{ID_Continue}]*)*$/u.test(name);
}

/** The daemon's own, said outright: a template may have been started from another. Null when it has been deleted. */
function workingDirectory(): string | null {
  try {
    return process.cwd();
  } catch {
    return null;
  }
}
