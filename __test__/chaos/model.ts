/**
 * Owns what must be true of one kernel: the result of each cell, the reason of each rejection and exit, their order, and what
 * a life remembers. It hears what the test does and what the kernel tells, and complains; it does nothing itself.
 */

import {
  type CellResult,
  type ExitReason,
  KernelAbsentError,
  KernelBusyError,
  KernelClosedError,
  KernelDiedError,
  KernelStartError,
  type Life,
} from 'kernelhost';
import { awakeNow } from './awake-clock.ts';
import type { Cell } from './cells.ts';
import type { KernelShape } from './plan.ts';

/** What the test has done to a kernel that may end a life, a start or a call. */
export type Interference =
  | 'kill'
  | 'restart'
  | 'close'
  | 'interrupt'
  | 'abort'
  | 'abort of a start'
  | 'signal to a child';

/**
 * A call that ended a life may be settled before the exit event has been seen by its listener, and the other way round; both
 * come in one batch, but a busy event loop may take its time with it.
 */
const SAME_MOMENT_MS = 500;
/** A restart whose caller is turned away by a close is still why the life ends: after its grace, and the two seconds of its tree. */
const LONGEST_END_MS = 5_000;

interface Window {
  kind: Interference;
  /** Milliseconds of `awakeNow()`. Infinity: not over yet. */
  until: number;
}

/** A call of `execute`. Kept until the kernel is audited, so it holds no outputs. */
export interface Asked {
  cell: Cell;
  /** What has been done to the kernel while the call was pending. */
  disturbed: Set<Interference>;
  abortReason: unknown;
  outcome: Outcome | null;
}

type Outcome =
  | {
      kind: 'result';
      generation: number;
      status: CellResult['status'];
      recovered: number | null;
      remembered: string[];
    }
  | { kind: 'died'; generation: number; cause: ExitReason['cause'] }
  | { kind: 'refused' };

interface LifeRecord {
  generation: number;
  pid: number;
  started: boolean;
  exit: ExitReason['cause'] | null;
}

/** What runs a program of its own: its result changes when that program is signalled. */
const withChildren = [
  'subprocess',
  'fork and wait',
  'wait for a child',
  'leave a child',
  'leave a session',
  'leave a daemon',
];

export class Model {
  readonly #shape: KernelShape;
  readonly #complain: (message: string) => void;
  readonly #asked: Asked[] = [];
  readonly #windows: Window[] = [];
  readonly #lives = new Map<number, LifeRecord>();
  readonly #signalled = new Map<number, Set<string>>();

  constructor(shape: KernelShape, complain: (message: string) => void) {
    this.#shape = shape;
    this.#complain = complain;
  }

  // What the test does

  ask(cell: Cell): Asked {
    const asked: Asked = { cell, disturbed: new Set(), abortReason: null, outcome: null };
    this.#asked.push(asked);
    return asked;
  }

  /** From now until the function it gives is called, this is being done. */
  interfere(kind: Interference): (how?: 'refused') => void {
    const window: Window = { kind, until: Number.POSITIVE_INFINITY };
    this.#windows.push(window);
    for (const asked of this.#asked) if (asked.outcome === null) asked.disturbed.add(kind);
    return (how) => {
      window.until = awakeNow() + (how === 'refused' ? LONGEST_END_MS : SAME_MOMENT_MS);
    };
  }

  signalled(pid: number, signal: NodeJS.Signals): void {
    const signals = this.#signalled.get(pid) ?? new Set();
    this.#signalled.set(pid, signals.add(signal));
  }

  get pending(): number {
    return this.#asked.filter(({ outcome }) => outcome === null).length;
  }

  // What the kernel tells

  started(life: Life): void {
    const known = this.#lives.get(life.generation);
    if (known !== undefined) this.#complain(`life ${life.generation} started twice, or after its exit`);
    for (const { generation, started, exit } of this.#lives.values()) {
      if (started && exit === null) this.#complain(`life ${life.generation} started before the exit of ${generation}`);
      if (generation > life.generation) this.#complain(`life ${life.generation} started after ${generation}`);
    }
    this.#lives.set(life.generation, { generation: life.generation, pid: life.pid, started: true, exit: null });
  }

  exited(exit: ExitReason): void {
    const life = this.#lives.get(exit.generation);
    if (life?.exit != null) this.#complain(`life ${exit.generation} has a second exit: ${exit.message}`);
    if (life !== undefined && life.pid !== exit.pid) this.#complain(`the exit of ${exit.generation} has another pid`);
    this.#lives.set(exit.generation, {
      generation: exit.generation,
      pid: exit.pid,
      started: life?.started ?? false,
      exit: exit.cause,
    });
    const doubt = this.#doubt(exit);
    if (doubt !== null)
      this.#complain(`${doubt}: ${JSON.stringify({ ...exit, stderrTail: exit.stderrTail.slice(-500) })}`);
  }

  resolved(asked: Asked, result: CellResult): void {
    const doubt = this.#doubtOfResult(asked, result);
    const { cell } = asked;
    if (doubt !== null) {
      this.#complain(
        `cell "${cell.kind}" ${doubt}: ${JSON.stringify({ ...summary(result), disturbed: [...asked.disturbed], cell })}`,
      );
    }
    const life = this.#lives.get(result.life.generation);
    if (life?.pid !== result.life.pid)
      this.#complain(`a result names a life that was not told: ${result.life.generation}`);
    asked.outcome = {
      kind: 'result',
      generation: result.life.generation,
      status: result.status,
      recovered: result.recovered?.exit.generation ?? null,
      remembered: result.stdout.split(/\s+/).filter((word) => word !== ''),
    };
  }

  rejected(asked: Asked, error: unknown): void {
    const doubt = this.#doubtOfRejection(error, asked);
    if (doubt !== null) {
      this.#complain(
        `cell "${asked.cell.kind}" was rejected, ${doubt}: ${String(error)}; ${JSON.stringify(asked.cell)}`,
      );
    }
    asked.outcome =
      error instanceof KernelDiedError
        ? { kind: 'died', generation: error.exit.generation, cause: error.exit.cause }
        : { kind: 'refused' };
  }

  /** A call other than a cell was rejected. */
  refused(what: string, error: unknown): void {
    const doubt = this.#doubtOfRejection(error, null);
    if (doubt !== null) this.#complain(`${what} was rejected, ${doubt}: ${String(error)}`);
  }

  /** When the kernel is closed and nothing is pending: what can only be said of the whole. */
  audit(): void {
    for (const { generation, started, exit } of this.#lives.values()) {
      if (started && exit === null) this.#complain(`life ${generation} never had an exit event`);
    }
    for (const { cell, outcome } of this.#asked) {
      if (outcome?.kind !== 'died') continue;
      const told = this.#lives.get(outcome.generation)?.exit;
      if (told !== outcome.cause) {
        this.#complain(
          `cell "${cell.kind}" failed of the exit of ${outcome.generation} (${outcome.cause}), told: ${told}`,
        );
      }
    }
    const results = this.#asked.filter(({ outcome }) => outcome?.kind === 'result');
    const generations = new Set(results.map(({ outcome }) => (outcome as { generation: number }).generation));
    for (const generation of generations) this.#auditLife(generation, results);
  }

  #auditLife(generation: number, results: readonly Asked[]): void {
    const earlier = [...this.#lives.values()].filter((life) => life.generation < generation && life.exit !== null);
    const replaced = earlier.some(({ started }) => started);
    // A launch that was cancelled in the moment it succeeded has an exit, and was never told as started.
    const lastStarted = Math.max(0, ...earlier.filter(({ started }) => started).map((life) => life.generation));
    let isFirst = true;
    /** Tokens in order; false: the cell was disturbed, and may have come so far or not. */
    const tokens = new Map<string, boolean>();
    for (const { cell, outcome } of results) {
      if (outcome?.kind !== 'result' || outcome.generation !== generation) continue;
      const { recovered } = outcome;
      if (!isFirst && recovered !== null) this.#complain(`life ${generation} was said to be a recovery twice`);
      if (isFirst && replaced && recovered === null)
        this.#complain(`life ${generation} replaced one and did not say so`);
      if (recovered !== null && !(recovered >= lastStarted && earlier.some((life) => life.generation === recovered))) {
        this.#complain(`life ${generation} says that it replaced ${recovered}; the one before was ${lastStarted}`);
      }
      isFirst = false;
      if (cell.expectation.end !== 'remembered') continue;
      const certain = outcome.status === 'ok';
      if (certain) this.#auditMemory(generation, [...tokens], cell.expectation.token, outcome.remembered);
      tokens.set(cell.expectation.token, certain);
    }
  }

  #auditMemory(generation: number, before: [string, boolean][], token: string, remembered: string[]): void {
    const due = [
      ...before.filter(([token, certain]) => certain || remembered.includes(token)).map(([token]) => token),
      token,
    ];
    if (due.join() !== remembered.join()) {
      this.#complain(`life ${generation} remembers [${remembered.join(' ')}], due was [${due.join(' ')}]`);
    }
  }

  // Judgements: null, or what is wrong

  #isOn(...kinds: Interference[]): boolean {
    return this.#windows.some(({ kind, until }) => kinds.includes(kind) && until >= awakeNow());
  }

  #doubt(exit: ExitReason): string | null {
    const { status, cause } = exit;
    if (status.kind === 'unknown') return 'nobody knows how a life ended';
    // The same code may have run before, on this life or on others.
    const running = this.#asked.findLast(
      ({ cell, outcome }) =>
        cell.code === exit.cell?.code &&
        (outcome === null ||
          (outcome.kind === 'died' && outcome.generation === exit.generation) ||
          outcome.kind === 'result'),
    );
    const sent = this.#signalled.get(exit.pid) ?? new Set();
    const expectation = running?.cell.expectation;
    switch (cause) {
      case 'exit-call': {
        const asExpected = status.kind === 'exited' ? status.code : null;
        // A signal that meets a process on its way out ends it as a signal does.
        const raced = status.kind === 'signaled' && (sent.has(status.signal) || this.#isOn('interrupt', 'abort'));
        if (expectation?.end === 'exits' && (expectation.code === asExpected || raced)) return null;
        return 'no cell asked for this exit';
      }
      case 'crash':
      case 'external-signal': {
        if (status.kind !== 'signaled') return 'the cause is a signal, the status is none';
        if (sent.has(status.signal)) return null;
        return expectation?.end === 'dies' && expectation.signal === status.signal ? null : 'nobody sent this signal';
      }
      case 'close':
      case 'restart':
        return this.#isOn(cause) ? null : `the test did not ask for a ${cause}`;
      case 'kill':
        if (this.#isOn('kill', 'abort of a start')) return null;
        if (running !== undefined && (this.#isOn('interrupt', 'abort') || running.disturbed.has('abort'))) return null;
        return this.#isOn('abort') ? null : 'the test did not ask for a kill';
      case 'timeout':
        return running?.cell.timeoutMs != null ? null : 'no cell had a time limit';
      default:
        return `the cause cannot be ${cause}`;
    }
  }

  #doubtOfRejection(error: unknown, asked: Asked | null): string | null {
    if (asked !== null && asked.abortReason !== null && error === asked.abortReason) return null;
    if (error instanceof KernelDiedError) return null;
    if (error instanceof KernelClosedError) return this.#isOn('close') ? null : 'and nobody closed the kernel';
    if (error instanceof KernelStartError) {
      return this.#isOn('kill', 'close', 'abort of a start', 'abort') ? null : 'and nobody cancelled the start';
    }
    if (error instanceof KernelAbsentError) {
      const over = [...this.#lives.values()].some(({ exit }) => exit !== null);
      return asked === null || (this.#shape.recovery === 'none' && over) ? null : 'and the kernel may be started';
    }
    if (error instanceof KernelBusyError) {
      const stuck = this.#asked.some(({ outcome }) => outcome?.kind === 'result' && outcome.status !== 'ok');
      return this.#shape.stuck === 'wait' && stuck && asked?.cell.timeoutMs != null
        ? null
        : 'and no cell was in its way';
    }
    return 'for a reason that no call may have';
  }

  #doubtOfResult({ cell, disturbed }: Asked, result: CellResult): string | null {
    const { status, error, stdout, stderr, missing } = result;
    const askedToStop = disturbed.has('interrupt') || disturbed.has('abort');
    if (status === 'timed-out') return cell.timeoutMs === null ? 'timed out without a limit' : null;
    if (status === 'interrupted') return askedToStop ? null : 'was interrupted by nobody';
    if (withChildren.includes(cell.kind) && (askedToStop || disturbed.has('signal to a child'))) return null;
    const { expectation } = cell;
    const isOk = status === 'ok';
    switch (expectation.end) {
      case 'value':
        return isOk && result.text === expectation.text ? null : 'gave another value';
      case 'printed':
        return isOk && stdout === expectation.stdout && stderr === expectation.stderr ? null : 'printed something else';
      case 'much': {
        const kept = cell.maxOutputBytes ?? 0;
        const bytes = Buffer.byteLength(stdout) + missing.stdoutBytes;
        return isOk && bytes === expectation.bytes && Buffer.byteLength(stdout) <= kept
          ? null
          : 'lost count of its output';
      }
      case 'remembered':
        return isOk && stdout.endsWith(`${expectation.token}\n`) ? null : 'did not remember';
      case 'raised':
        if (status !== 'error' || error?.name !== expectation.name) return 'raised something else';
        return expectation.value === null || error.value === expectation.value ? null : 'raised with another value';
      case 'stubborn':
        return isOk ? null : 'ended in some other way';
      case 'exits':
      case 'dies':
      case 'never':
        return 'came to an end that it does not have';
    }
  }
}

function summary(result: CellResult): Record<string, unknown> {
  const { status, text, stdout, stderr, missing, error, durationMs, life } = result;
  const short = (output: string) => (output.length > 200 ? `${output.slice(0, 200)}… (${output.length})` : output);
  return { status, text, stdout: short(stdout), stderr: short(stderr), missing, error, durationMs, life };
}
