/** What a run has found: samples by series and contender, and what broke. */
import { type Summary, summarize } from './statistics.ts';

export interface Breakage {
  contender: string;
  measure: string;
  message: string;
}

export class Results {
  readonly breakages: Breakage[] = [];
  readonly #samples = new Map<string, Map<string, number[]>>();

  add(series: string, contender: string, samples: readonly number[]): void {
    const byContender = this.#samples.get(series) ?? new Map<string, number[]>();
    this.#samples.set(series, byContender);
    byContender.set(contender, [...(byContender.get(contender) ?? []), ...samples]);
  }

  broke(breakage: Breakage): void {
    this.breakages.push(breakage);
  }

  summary(series: string, contender: string): Summary | null {
    const samples = this.#samples.get(series)?.get(contender);
    return samples === undefined || samples.length === 0 ? null : summarize(samples);
  }

  median(series: string, contender: string): number | null {
    return this.summary(series, contender)?.median ?? null;
  }

  /** Summaries by series and contender, for the file. */
  toJSON(): Record<string, Record<string, Summary>> {
    return Object.fromEntries(
      [...this.#samples].map(([series, byContender]) => [
        series,
        Object.fromEntries([...byContender].map(([contender, samples]) => [contender, summarize(samples)])),
      ]),
    );
  }
}
