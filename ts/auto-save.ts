/**
 * Saves a kernel by itself: after cells that ended, while it is idle, not too often, and once more when it is closed.
 *
 * Owns when that is, and whether a save that is under way may go on. Must not know: how a save is made.
 */

import { KernelHostError, SnapshotError } from './errors.ts';
import type { SaveLimits, SnapshotReport } from './snapshots.ts';

/** @internal */
export interface AutoSaveTarget {
  path: string;
  intervalMs: number;
  limits: SaveLimits;
}

/** @internal */
export interface AutoSaveParts {
  target: AutoSaveTarget;
  isIdle(): boolean;
  save(limits: SaveLimits): Promise<SnapshotReport>;
  warn(message: string): void;
}

/** After a cell's end, so that a row of short cells is saved once, behind the last one. */
const QUIET_MS = 500;
/** What a close may take longer for it. */
const LAST_SAVE_MS = 10_000;

export class AutoSave {
  readonly path: string;
  readonly #parts: AutoSaveParts;
  /** Cells that were asked for and are not over. */
  #cells = 0;
  #isChanged = false;
  #isClosing = false;
  /** Why nothing may be written to the path. */
  #isHeld = false;
  #saving: Promise<void> | null = null;
  #finishing: Promise<void> | null = null;
  #timer: NodeJS.Timeout | null = null;
  #lastEnd = Number.NEGATIVE_INFINITY;
  #lastReport: SnapshotReport | null = null;

  constructor(parts: AutoSaveParts) {
    this.#parts = parts;
    this.path = parts.target.path;
  }

  get lastReport(): SnapshotReport | null {
    return this.#lastReport;
  }

  get isClosing(): boolean {
    return this.#isClosing;
  }

  /** Asked by the kernel again and again while it saves: a cell that is waiting comes first. */
  readonly mayGoOn = (): boolean => this.#isClosing || this.#cells === 0;

  cellBegan(): void {
    this.#cells += 1;
    this.#disarm();
  }

  cellEnded(): void {
    this.#cells -= 1;
    this.#isChanged = true;
    this.#arm();
  }

  /** What it had is lost, and what the next one has is not to be saved before a cell has run. */
  lifeEnded(): void {
    this.#isChanged = false;
    this.#disarm();
  }

  /** A life could not load what is at the path, and would replace it by less. */
  hold(isHeld: boolean): void {
    this.#isHeld = isHeld;
  }

  /** The last save. Rejects never, and is made once. */
  finish(): Promise<void> {
    this.#finishing ??= this.#finish();
    return this.#finishing;
  }

  async #finish(): Promise<void> {
    this.#isClosing = true;
    this.#disarm();
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(() => {
        this.#parts.warn(`${this.path}: the last save was not done within ${LAST_SAVE_MS} ms`);
        resolve();
      }, LAST_SAVE_MS);
    });
    await Promise.race([this.#saveLast(), late]);
    clearTimeout(timer);
  }

  async #saveLast(): Promise<void> {
    await this.#saving;
    if (this.#cells > 0) {
      this.#parts.warn(`${this.path}: not saved for the last time, because a cell is running or waiting`);
    } else if (this.#isChanged) {
      await this.#save();
    }
  }

  #arm(): void {
    if (this.#cells > 0 || !this.#isChanged || this.#isClosing || this.#saving !== null) return;
    this.#disarm();
    const wait = this.#lastEnd + this.#parts.target.intervalMs - performance.now();
    this.#timer = setTimeout(() => void this.#save(), Math.max(QUIET_MS, wait));
    this.#timer.unref();
  }

  #disarm(): void {
    if (this.#timer !== null) clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #save(): Promise<void> {
    // A kernel without a life has nothing to save, and must not get one for that.
    if (this.#isHeld || !this.#parts.isIdle()) return;
    this.#isChanged = false;
    const { limits } = this.#parts.target;
    this.#saving = this.#parts
      .save(limits)
      .then(
        (report) => {
          this.#lastReport = report;
        },
        (error: unknown) => this.#failed(error),
      )
      .then(() => {
        this.#saving = null;
        this.#lastEnd = performance.now();
        this.#arm();
      });
    await this.#saving;
  }

  #failed(error: unknown): void {
    const isSnapshot = error instanceof SnapshotError;
    // Given up for a cell, whose end brings the next try; or stopped by who interrupts the kernel.
    if (isSnapshot && (error.reason === 'stopped' || error.reason === 'interrupted')) {
      this.#isChanged = this.#parts.isIdle();
      return;
    }
    // The end of the life is told as that.
    if (!isSnapshot && error instanceof KernelHostError && error.code !== 'ERR_INTERNAL') return;
    this.#parts.warn(`The kernel could not save itself: ${error instanceof Error ? error.message : String(error)}`);
  }
}
