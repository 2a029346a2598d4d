/** The run as text: Markdown tables that read well on a terminal. Pure. */
import type { Verdict } from './aims.ts';
import type { Contender } from './contenders/contender.ts';
import type { Machine } from './machine.ts';
import type { Measure, Series } from './measures/measure.ts';
import type { PackageFacts } from './package-facts.ts';
import type { Results } from './results.ts';
import type { Summary } from './statistics.ts';

export interface Run {
  quick: boolean;
  seconds: number;
  machine: Machine;
  facts: PackageFacts;
  measures: readonly Measure[];
  contenders: readonly Contender[];
  results: Results;
  verdicts: Verdict[];
}

export function report(run: Run): string {
  const sections = [
    `# kernelhost against the alternatives\n\n${machineNotes(run)}`,
    `## Aims\n\n${aimsTable(run.verdicts)}`,
    `## Medians\n\n${mediansTable(run)}`,
    `## Ratios\n\nEach median divided by that of kernelhost, IPython.\n\n${ratiosTable(run)}`,
    `## Distance to the floor\n\n${floorTable(run.results)}`,
    `## How each is measured\n\n${run.measures.map(({ name, about }) => `- **${name}**: ${about}`).join('\n')}`,
  ];
  if (run.results.breakages.length > 0) sections.push(`## Broken\n\n${breakages(run.results)}`);
  return `${sections.join('\n\n')}\n`;
}

function machineNotes({ machine, quick, seconds }: Run): string {
  const versions = Object.entries(machine.versions).map(([name, version]) => `${name} ${version}`);
  const commit = `${machine.commit ?? 'no commit'}${machine.uncommittedChanges ? ' with uncommitted changes' : ''}`;
  return [
    `- ${machine.date}, ${commit}${quick ? ', quick: few rounds, rough numbers' : ''}, ${Math.round(seconds)} s`,
    `- ${machine.cores} cores (${machine.processor}), ${machine.memoryGiB} GiB, Linux ${machine.linux}, load before the run ${machine.loadAverage.toFixed(2)}`,
    `- ${versions.join(', ')}`,
    '- All contenders run in turn within each round, in one Python environment with compiled bytecode.',
  ].join('\n');
}

function aimsTable(verdicts: readonly Verdict[]): string {
  const rows = verdicts.map(({ aim, value, unit, met }) => [
    aim,
    value === null ? '–' : `${significant(value)}${unit === '×' ? '×' : ` ${unit}`}`,
    met === null ? 'not measured' : met ? 'met' : '**missed**',
  ]);
  return table([['aim', 'this run', ''], ...rows]);
}

function mediansTable({ measures, contenders, results }: Run): string {
  const rows = seriesOf(measures, results, contenders).map(([name, series]) => [
    series.title,
    ...contenders.map((contender) => cell(series, results.summary(name, contender.name))),
  ]);
  const legend = 'Median, then in brackets the middle half of the samples, or p99 where it says so.';
  return `${legend}\n\n${table([['', ...contenders.map(({ title }) => title)], ...rows])}`;
}

function ratiosTable({ measures, contenders, results }: Run): string {
  const others = contenders.filter(({ name, kind }) => name !== 'kernelhost' && kind !== 'floor');
  const compared = seriesOf(measures, results, others).filter(([name]) => results.median(name, 'kernelhost') !== null);
  const rows = compared.map(([name, series]) => [
    series.title,
    ...others.map((other) => {
      const [own, theirs] = [results.median(name, 'kernelhost'), results.median(name, other.name)];
      return own === null || theirs === null || own === 0 ? '–' : `${significant(theirs / own)}×`;
    }),
  ]);
  return table([['', ...others.map(({ title }) => title)], ...rows]);
}

function floorTable(results: Results): string {
  const pairs = [
    ['start, IPython: fork + first byte', 'start', 'kernelhost', 'floor'],
    ['1+1, IPython: run_cell in process', 'cell', 'kernelhost', 'floor'],
    ['start, plain: fork + first byte', 'start', 'kernelhost-plain', 'floor-plain'],
    ['1+1, plain: compile and eval in process', 'cell', 'kernelhost-plain', 'floor-plain'],
  ] as const;
  const rows = pairs.map(([title, series, contender, floor]) => {
    const [own, least] = [results.median(series, contender), results.median(series, floor)];
    const [ownText, leastText] = [own, least].map((value) => (value === null ? '–' : withUnit(value, 'ms')));
    const distance = own === null || least === null ? '–' : withUnit(own - least, 'ms');
    return [title, leastText ?? '–', ownText ?? '–', distance];
  });
  return table([['', 'floor', 'kernelhost', 'above the floor'], ...rows]);
}

function breakages(results: Results): string {
  return results.breakages
    .map(({ contender, measure, message }) => `- ${contender}, ${measure}: ${message.trim().replaceAll('\n', '\n  ')}`)
    .join('\n');
}

/** The series that at least one of the contenders has samples of, and the import, which no daemon takes. */
function seriesOf(
  measures: readonly Measure[],
  results: Results,
  contenders: readonly Contender[],
): [string, Series][] {
  const importSeries: Series = { title: 'import → usable', unit: 'ms', spread: 'quartiles' };
  return [
    ...measures.flatMap(({ series }) => Object.entries(series)),
    ['import', importSeries] as [string, Series],
  ].filter(([name]) => contenders.some((contender) => results.summary(name, contender.name) !== null));
}

function cell({ unit, spread }: Series, summary: Summary | null): string {
  if (summary === null) return '–';
  const median = withUnit(summary.median, unit);
  if (summary.count === 1) return median;
  if (spread === 'p99') return `${median} (p99 ${withUnit(summary.p99, unit)})`;
  const [low, high] = [withUnit(summary.p25, unit), withUnit(summary.p75, unit)];
  return low === high ? median : `${median} (${low} – ${high})`;
}

function withUnit(value: number, unit: Series['unit']): string {
  switch (unit) {
    case 'ms':
      return Math.abs(value) < 1 ? `${significant(value * 1000)} µs` : `${significant(value)} ms`;
    case 'bytes':
      return `${significant(value / 1e6)} MB`;
    case 'lines/s':
      return `${significant(value / 1000)} k/s`;
    case 'count':
      return significant(value);
  }
}

/** Three significant digits, without an exponent. */
function significant(value: number): string {
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

function table(rows: readonly string[][]): string {
  const [head = [], ...body] = rows;
  const widths = head.map((_, column) => Math.max(3, ...rows.map((row) => row[column]?.length ?? 0)));
  const line = (row: readonly string[]): string =>
    `| ${widths.map((width, column) => (row[column] ?? '').padEnd(width)).join(' | ')} |`;
  return [line(head), line(widths.map((width) => '-'.repeat(width))), ...body.map(line)].join('\n');
}
