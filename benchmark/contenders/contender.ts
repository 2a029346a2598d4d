/** The contenders, and a contender's daemon as the benchmark sees it. Owns the daemon process. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface, type Interface } from 'node:readline';
import { descendants, endAll } from '../process-table.ts';
import type { Answers, Failure, Request } from './protocol.ts';

/** 100 cold starts on two busy cores take minutes; a daemon that is silent for longer is broken. */
const answerTimeoutMs = 300_000;
/** What a daemon may take to end by itself, kernels included, before it is killed. */
const endTimeoutMs = 10_000;

export interface Contender {
  name: string;
  title: string;
  kind: 'kernelhost' | 'alternative' | 'floor';
  program: 'node' | 'python';
  arguments: string[];
}

export const contenders: readonly Contender[] = [
  alternative('jupyter-client', '(a) jupyter_client + ipykernel', 'python', ['jupyter_client_driver.py']),
  alternative('zeromq-ipykernel', '(b) Node zeromq + ipykernel', 'node', ['daemon.ts', 'zeromq-ipykernel']),
  alternative('json-lines', '(c) bare python, JSON lines', 'node', ['daemon.ts', 'json-lines']),
  { ...alternative('kernelhost', 'kernelhost, IPython', 'node', ['daemon.ts', 'kernelhost']), kind: 'kernelhost' },
  {
    ...alternative('kernelhost-plain', 'kernelhost, plain', 'node', ['daemon.ts', 'kernelhost-plain']),
    kind: 'kernelhost',
  },
  { ...alternative('floor', 'floor, IPython', 'python', ['floor.py', 'ipython']), kind: 'floor' },
  { ...alternative('floor-plain', 'floor, plain', 'python', ['floor.py', 'plain']), kind: 'floor' },
];

function alternative(name: string, title: string, program: Contender['program'], args: string[]): Contender {
  return { name, title, kind: 'alternative', program, arguments: args };
}

export interface DaemonOptions {
  python: string;
  /** Short, for sockets have their place in it. */
  folder: string;
  env: Record<string, string | undefined>;
}

export class ContenderDaemon {
  readonly contender: Contender;
  readonly #child: ChildProcess;
  readonly #answers: AsyncIterator<string>;
  readonly #lines: Interface;
  #stderrTail = '';

  private constructor(contender: Contender, { python, folder, env }: DaemonOptions) {
    this.contender = contender;
    const [program, ...rest] = contender.arguments;
    const path = join(import.meta.dirname, program ?? '');
    const interpreter = contender.program === 'node' ? process.execPath : python;
    const child = spawn(interpreter, [path, ...rest], { cwd: folder, env });
    child.stderr.on('data', (chunk: Buffer) => {
      this.#stderrTail = (this.#stderrTail + chunk.toString()).slice(-2000);
    });
    child.on('error', (error) => {
      this.#stderrTail += error.message;
    });
    // A daemon that ended is seen at its output.
    child.stdin.on('error', () => {});
    this.#child = child;
    this.#lines = createInterface({ input: child.stdout });
    this.#answers = this.#lines[Symbol.asyncIterator]();
  }

  static async open(contender: Contender, options: DaemonOptions): Promise<ContenderDaemon> {
    const folder = join(options.folder, contender.name);
    mkdirSync(folder, { recursive: true });
    const daemon = new ContenderDaemon(contender, { ...options, folder });
    try {
      await daemon.ask({ do: 'open', python: options.python, folder });
    } catch (error) {
      await daemon.end();
      throw error;
    }
    return daemon;
  }

  get pid(): number {
    return this.#child.pid ?? -1;
  }

  async ask<Kind extends Request['do']>(request: Request & { do: Kind }): Promise<Answers[Kind]> {
    this.#child.stdin?.write(`${JSON.stringify(request)}\n`);
    const line = await within(answerTimeoutMs, this.#answers.next());
    if (line === 'late') throw new Error(`no answer to '${request.do}' within ${answerTimeoutMs / 1000} s`);
    if (line.done === true) throw new Error(`the daemon ended at '${request.do}'\n${this.#stderrTail}`.trim());
    const answer: Answers[Kind] | Failure = JSON.parse(line.value);
    if ('error' in answer) throw new Error(answer.error);
    return answer;
  }

  /** Closes the kernels and the daemon; kills them when that takes too long. */
  async end(): Promise<void> {
    const running = this.#child.exitCode === null && this.#child.signalCode === null && this.#child.pid !== undefined;
    const exited = running ? once(this.#child, 'exit') : Promise.resolve();
    this.#child.stdin?.end(`${JSON.stringify({ do: 'close' })}\n`);
    if ((await within<unknown>(endTimeoutMs, exited)) === 'late') endAll([...descendants(this.pid), this.pid]);
    await exited;
    this.#lines.close();
  }
}

async function within<T>(ms: number, promise: Promise<T>): Promise<T | 'late'> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<'late'>((resolve) => {
    timer = setTimeout(() => resolve('late'), ms);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}
