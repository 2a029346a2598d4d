/** `npm run bench`: sets up, runs every measure in interleaved rounds, prints the report, cleans up. */
import { spawnSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { judge } from './aims.ts';
import { type CommandLine, parseCommandLine, usage } from './command-line.ts';
import { type Contender, ContenderDaemon, contenders, type DaemonOptions } from './contenders/contender.ts';
import { describeMachine } from './machine.ts';
import { measures } from './measures/all.ts';
import type { Measure } from './measures/measure.ts';
import { importers, importMs, packageFacts } from './package-facts.ts';
import { endStrays, runMarker } from './process-table.ts';
import { type Run, report } from './report.ts';
import { Results } from './results.ts';

/** A quick run is part of CI: past this it takes one round of what is left. */
const quickBudgetMs = 150_000;
const importRounds = 7;
/** Results hold no paths of the machine they were made on. */
const root = join(import.meta.dirname, '..');

class Benchmark {
  readonly #commandLine: CommandLine;
  readonly #options: DaemonOptions;
  readonly #contenders: readonly Contender[];
  readonly #measures: readonly Measure[];
  readonly #results = new Results();
  readonly #daemons = new Map<string, ContenderDaemon>();
  readonly #began = performance.now();

  constructor(commandLine: CommandLine, options: DaemonOptions) {
    const { only } = commandLine;
    const chosen = <T extends { name: string }>(all: readonly T[]): readonly T[] => {
      const some = all.filter(({ name }) => only.includes(name));
      return some.length === 0 ? all : some;
    };
    this.#commandLine = commandLine;
    this.#options = options;
    this.#contenders = chosen(contenders);
    this.#measures = chosen(measures);
  }

  async run(): Promise<Run> {
    const { quick } = this.#commandLine;
    const machine = describeMachine(this.#options.python);
    try {
      for (const contender of this.#contenders) await this.#open(contender, 'open');
      for (const measure of this.#measures) await this.#take(measure);
    } finally {
      await Promise.all([...this.#daemons.values()].map((daemon) => daemon.end()));
    }
    if (this.#commandLine.only.length === 0) this.#takeImports();
    const facts = packageFacts();
    return {
      quick,
      machine,
      facts,
      measures: this.#measures,
      contenders: this.#contenders,
      results: this.#results,
      verdicts: judge(this.#results, facts),
      seconds: (performance.now() - this.#began) / 1000,
    };
  }

  /** Round robin, each round beginning with another contender, so that the machine's noise hits all alike. */
  async #take(measure: Measure): Promise<void> {
    const { quick } = this.#commandLine;
    const broken = new Set<string>();
    const rounds = measure.rounds(quick);
    for (let round = 0; round < rounds; round += 1) {
      if (quick && round > 0 && performance.now() - this.#began > quickBudgetMs) return;
      progress(`${measure.name}: round ${round + 1} of ${rounds}`);
      const first = round % this.#contenders.length;
      for (const contender of [...this.#contenders.slice(first), ...this.#contenders.slice(0, first)]) {
        const daemon = this.#daemons.get(contender.name);
        if (daemon === undefined || broken.has(contender.name) || !measure.applies(contender)) continue;
        try {
          const samples = await measure.take(daemon, quick);
          for (const [series, values] of Object.entries(samples)) this.#results.add(series, contender.name, values);
        } catch (error) {
          broken.add(contender.name);
          this.#broke(contender.name, measure.name, error);
          // What the daemon holds is unknown after a failure: the other measures get a new one.
          await daemon.end();
          await this.#open(contender, `${measure.name}, opening again`);
        }
      }
    }
  }

  async #open(contender: Contender, occasion: string): Promise<void> {
    progress(`opening ${contender.name}`);
    this.#daemons.delete(contender.name);
    try {
      this.#daemons.set(contender.name, await ContenderDaemon.open(contender, this.#options));
    } catch (error) {
      this.#broke(contender.name, occasion, error);
    }
  }

  #takeImports(): void {
    const broken = new Set<string>();
    for (let round = 0; round < importRounds; round += 1) {
      progress(`import: round ${round + 1} of ${importRounds}`);
      for (const contender of importers) {
        if (broken.has(contender)) continue;
        try {
          this.#results.add('import', contender, [importMs(contender)]);
        } catch (error) {
          broken.add(contender);
          this.#broke(contender, 'import', error);
        }
      }
    }
  }

  #broke(contender: string, measure: string, error: unknown): void {
    const message = error instanceof Error ? error.message : String(error);
    this.#results.broke({ contender, measure, message: message.replaceAll(root, '.') });
    progress(`${contender} broke at ${measure}`);
  }
}

function progress(text: string): void {
  process.stderr.write(process.stderr.isTTY ? `\r\x1b[K${text}` : `bench: ${text}\n`);
}

function setUp(): string {
  const { status, error } = spawnSync(join(import.meta.dirname, 'set-up'), { stdio: ['ignore', 2, 2] });
  if (status !== 0) throw new Error(`benchmark/set-up failed: ${error?.message ?? `exit code ${status}`}`);
  return join(import.meta.dirname, '.venv', 'bin', 'python');
}

function write(run: Run, text: string, json: string): void {
  const folder = join(import.meta.dirname, 'results');
  const base = `${run.machine.date.slice(0, 10)}-${run.machine.commit ?? 'uncommitted'}`;
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, `${base}.json`), `${json}\n`);
  writeFileSync(join(folder, `${base}.md`), text);
  progress(`wrote benchmark/results/${base}.json and .md`);
}

function unknownNames({ only }: CommandLine): string[] {
  const known = [...measures, ...contenders].map(({ name }) => name);
  return only.filter((name) => !known.includes(name));
}

async function main(): Promise<number> {
  const commandLine = parseCommandLine(process.argv.slice(2));
  if (commandLine === 'help') {
    process.stdout.write(usage);
    return 0;
  }
  const unknown = unknownNames(commandLine);
  if (unknown.length > 0) {
    const names = (list: readonly { name: string }[]): string => list.map(({ name }) => name).join(', ');
    process.stderr.write(
      `no '${unknown.join("', '")}'\nmeasures: ${names(measures)}\ncontenders: ${names(contenders)}\n`,
    );
    return 2;
  }
  const python = setUp();
  const marker = randomUUID();
  const folder = mkdtempSync(join(tmpdir(), 'khb-'));
  const cleanUp = (): void => {
    const strays = endStrays(marker);
    if (strays > 0) progress(`${strays} processes outlived their daemon and were killed`);
    rmSync(folder, { recursive: true, force: true });
  };
  const interrupted = (): void => {
    cleanUp();
    process.exit(130);
  };
  process.once('SIGINT', interrupted).once('SIGTERM', interrupted);
  try {
    const env = { ...process.env, [runMarker]: marker };
    const run = await new Benchmark(commandLine, { python, folder, env }).run();
    const text = report(run);
    const { quick, seconds, machine, facts, results, verdicts } = run;
    const numbers = { quick, seconds, machine, facts, verdicts, results, breakages: results.breakages };
    const json = JSON.stringify(numbers, null, 2);
    if (!run.quick && commandLine.only.length === 0) write(run, text, json);
    if (process.stderr.isTTY) progress('');
    process.stdout.write(commandLine.json ? `${json}\n` : text);
    return run.results.breakages.length > 0 ? 1 : 0;
  } finally {
    cleanUp();
  }
}

process.exitCode = await main();
