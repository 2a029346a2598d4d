/** Order statistics of samples. Pure. */

export interface Summary {
  count: number;
  min: number;
  p25: number;
  median: number;
  p75: number;
  p99: number;
  max: number;
}

export function summarize(samples: readonly number[]): Summary {
  if (samples.length === 0) throw new Error('no samples to summarize');
  const sorted = samples.toSorted((a, b) => a - b);
  return {
    count: sorted.length,
    min: quantile(sorted, 0),
    p25: quantile(sorted, 0.25),
    median: quantile(sorted, 0.5),
    p75: quantile(sorted, 0.75),
    p99: quantile(sorted, 0.99),
    max: quantile(sorted, 1),
  };
}

/** Linear interpolation between the two nearest ranks of a sorted, non-empty list. */
function quantile(sorted: readonly number[], q: number): number {
  const rank = (sorted.length - 1) * q;
  const below = sorted[Math.floor(rank)] ?? Number.NaN;
  const above = sorted[Math.ceil(rank)] ?? Number.NaN;
  return below + (above - below) * (rank - Math.floor(rank));
}
