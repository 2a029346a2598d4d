/**
 * What a Node daemon does today: ipykernel as a child process, npm `zeromq` as client. Over `ipc` sockets (no races for
 * ports), without a history database, with only the two sockets that running cells needs.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { Dealer, Subscriber } from 'zeromq';
import type { CellOutcome, DrivenKernel, Driver, DriverOptions } from './driver.ts';
import { type JupyterMessage, JupyterMessages } from './jupyter-messages.ts';

/** How often zeromq tries to reach a kernel that does not listen yet. Its default, 100 ms, would be half of a start. */
const reconnectMs = 5;

export async function openZeromqIpykernel({ python, folder }: DriverOptions): Promise<Driver> {
  const ipython = join(folder, 'ipython');
  await mkdir(ipython, { recursive: true });
  const env = { ...process.env, IPYTHONDIR: ipython, JPY_PARENT_PID: String(process.pid) };
  let started = 0;
  return {
    async startKernel() {
      started += 1;
      const connection = {
        transport: 'ipc',
        ip: join(folder, `z${started}`),
        shell_port: 1,
        iopub_port: 2,
        stdin_port: 3,
        control_port: 4,
        hb_port: 5,
        key: randomUUID(),
        signature_scheme: 'hmac-sha256',
      };
      const file = join(folder, `z${started}.json`);
      await writeFile(file, JSON.stringify(connection), { mode: 0o600 });
      const arguments_ = ['-m', 'ipykernel_launcher', '-f', file, '--HistoryManager.hist_file=:memory:'];
      const child = spawn(python, arguments_, { cwd: folder, env, stdio: 'ignore' });
      const kernel = new ZeromqKernel(child, connection.ip, connection.key);
      await kernel.ready();
      return kernel;
    },
    async close() {},
  };
}

/** A request whose reply, or whose `idle`, is still to come. */
interface Pending {
  outcome: CellOutcome;
  printed: string[];
  replied: boolean;
  idle: boolean;
  resolve(outcome: CellOutcome): void;
  reject(error: Error): void;
}

class ZeromqKernel implements DrivenKernel {
  readonly pid: number;
  readonly #child: ChildProcess;
  readonly #exited: Promise<unknown>;
  readonly #messages: JupyterMessages;
  readonly #shell = new Dealer({ linger: 0, reconnectInterval: reconnectMs });
  readonly #iopub = new Subscriber({ linger: 0, reconnectInterval: reconnectMs, receiveHighWaterMark: 0 });
  readonly #pending = new Map<string, Pending>();
  #subscribed: () => void = () => {};

  constructor(child: ChildProcess, address: string, key: string) {
    this.#child = child;
    this.pid = child.pid ?? -1;
    this.#exited = once(child, 'exit');
    this.#messages = new JupyterMessages(key);
    child.on('exit', (code, signal) => this.#fail(new Error(`the kernel ended: ${signal ?? code}`)));
    child.on('error', (error) => this.#fail(error));
    this.#shell.connect(`ipc://${address}-1`);
    this.#iopub.connect(`ipc://${address}-2`);
    this.#iopub.subscribe();
    this.#listen(this.#shell, (message) => this.#onReply(message));
    this.#listen(this.#iopub, (message) => this.#onPublished(message));
  }

  /** Ready is: the kernel answers, and its publications arrive. Ones sent before we were subscribed never come. */
  async ready(): Promise<void> {
    const subscribed = new Promise<void>((resolve) => {
      this.#subscribed = resolve;
    });
    const answered = this.#request('kernel_info_request', {}, { idle: true });
    await Promise.all([answered, subscribed]);
  }

  run(code: string): Promise<CellOutcome> {
    const content = { code, silent: false, store_history: true, user_expressions: {}, allow_stdin: false };
    return this.#request('execute_request', { ...content, stop_on_error: true }, { idle: false });
  }

  async end(): Promise<void> {
    this.#child.kill('SIGKILL');
    await this.#exited;
    this.#shell.close();
    this.#iopub.close();
  }

  #request(type: string, content: Record<string, unknown>, { idle }: { idle: boolean }): Promise<CellOutcome> {
    const { id, frames } = this.#messages.encode(type, content);
    return new Promise((resolve, reject) => {
      const outcome = { ok: false, value: null, stdout: '' };
      this.#pending.set(id, { outcome, printed: [], replied: false, idle, resolve, reject });
      this.#shell.send(frames).catch(reject);
    });
  }

  async #listen(socket: Dealer | Subscriber, receive: (message: JupyterMessage) => void): Promise<void> {
    try {
      for await (const frames of socket) receive(this.#messages.decode(frames));
    } catch (error) {
      this.#fail(error as Error);
    }
  }

  #onReply({ parent_header, content }: JupyterMessage): void {
    const pending = this.#pending.get(parent_header.msg_id ?? '');
    if (pending === undefined) return;
    pending.outcome.ok = content.status === 'ok';
    pending.replied = true;
    this.#settle(parent_header.msg_id ?? '', pending);
  }

  #onPublished({ header, parent_header, content }: JupyterMessage): void {
    this.#subscribed();
    const pending = this.#pending.get(parent_header.msg_id ?? '');
    if (pending === undefined) return;
    switch (header.msg_type) {
      case 'stream':
        if (content.name === 'stdout') pending.printed.push(content.text as string);
        break;
      case 'execute_result':
        pending.outcome.value = (content.data as Record<string, string>)['text/plain'] ?? null;
        break;
      case 'status':
        if (content.execution_state !== 'idle') break;
        pending.idle = true;
        this.#settle(parent_header.msg_id ?? '', pending);
        break;
    }
  }

  #settle(id: string, pending: Pending): void {
    if (!pending.replied || !pending.idle) return;
    this.#pending.delete(id);
    pending.resolve({ ...pending.outcome, stdout: pending.printed.join('') });
  }

  #fail(error: Error): void {
    for (const pending of this.#pending.values()) pending.reject(error);
    this.#pending.clear();
  }
}
