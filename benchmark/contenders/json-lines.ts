/** The leanest thing a daemon could write itself: a Python that reads JSON lines from a pipe (`bare_repl.py`). */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import type { CellOutcome, DrivenKernel, Driver, DriverOptions } from './driver.ts';

const program = join(import.meta.dirname, 'bare_repl.py');

export async function openJsonLines({ python, folder }: DriverOptions): Promise<Driver> {
  return {
    async startKernel() {
      const child = spawn(python, [program], { cwd: folder, stdio: ['pipe', 'pipe', 'ignore'] });
      const kernel = new BareKernel(child);
      await kernel.ready;
      return kernel;
    },
    async close() {},
  };
}

interface Answer {
  value: string | null;
  stdout: string;
  error: string | null;
}

interface Waiter {
  resolve(answer: Answer): void;
  reject(error: Error): void;
}

class BareKernel implements DrivenKernel {
  readonly pid: number;
  readonly ready: Promise<Answer>;
  readonly #child: ChildProcess;
  readonly #exited: Promise<unknown>;
  /** One per line that is still to come, in order. */
  readonly #waiters: Waiter[] = [];
  #pieces: Buffer[] = [];

  constructor(child: ChildProcess) {
    this.#child = child;
    this.pid = child.pid ?? -1;
    this.#exited = once(child, 'exit');
    this.ready = this.#nextAnswer();
    child.stdout?.on('data', (chunk: Buffer) => this.#read(chunk));
    child.on('exit', (code, signal) => this.#fail(new Error(`the interpreter ended: ${signal ?? code}`)));
    child.on('error', (error) => this.#fail(error));
    child.stdin?.on('error', (error) => this.#fail(error));
  }

  async run(code: string): Promise<CellOutcome> {
    const answer = this.#nextAnswer();
    this.#child.stdin?.write(`${JSON.stringify({ code })}\n`);
    const { value, stdout, error } = await answer;
    return { ok: error === null, value, stdout };
  }

  async end(): Promise<void> {
    this.#child.kill('SIGKILL');
    await this.#exited;
  }

  #nextAnswer(): Promise<Answer> {
    return new Promise((resolve, reject) => this.#waiters.push({ resolve, reject }));
  }

  #read(chunk: Buffer): void {
    let from = 0;
    for (let end = chunk.indexOf(10); end !== -1; end = chunk.indexOf(10, from)) {
      this.#pieces.push(chunk.subarray(from, end));
      const [only] = this.#pieces;
      const line = this.#pieces.length === 1 && only !== undefined ? only : Buffer.concat(this.#pieces);
      this.#pieces = [];
      from = end + 1;
      this.#waiters.shift()?.resolve(JSON.parse(line.toString()));
    }
    if (from < chunk.length) this.#pieces.push(chunk.subarray(from));
  }

  #fail(error: Error): void {
    for (const waiter of this.#waiters.splice(0)) waiter.reject(error);
  }
}
