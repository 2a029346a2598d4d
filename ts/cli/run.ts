/** `kernelhost run`: a file's cells, one after the other, with their output as it comes. */

import { readFile } from 'node:fs/promises';
import { text } from 'node:stream/consumers';
import { KernelDiedError } from '../errors.ts';
import type { Kernel } from '../kernel.ts';
import { KernelHost } from '../kernel-host.ts';
import type { KernelHostOptions } from '../options.ts';
import type { MimeBundle, Output } from '../result.ts';
import { splitCells } from './cells.ts';
import { outputClosed, paint, withoutColour, write } from './terminal.ts';

type RunOptions = Pick<KernelHostOptions, 'python' | 'launch' | 'shell'>;

const EXIT_INTERRUPTED = 130;
const EXIT_TERMINATED = 143;

/** Runs every cell, also after one that failed; 1 when any did. */
export async function run(file: string, options: RunOptions): Promise<number> {
  const source = await read(file);
  if (source === null) return 1;
  const host = new KernelHost(options);
  host.on('warning', ({ message }) => void write(process.stderr, `${paint('yellow', message, process.stderr)}\n`));
  const kernel = host.kernel();
  const ended = new AbortController();
  const unlisten = listenForSignals(kernel, ended);
  let exitCode = 0;
  // Nobody reads any more, so nothing is worth running on for.
  outputClosed.addEventListener('abort', () => ended.abort(exitCode), { once: true });
  try {
    for (const cell of splitCells(source)) {
      if (!(await runCell(kernel, cell, ended.signal))) exitCode = 1;
    }
  } catch (error) {
    if (!ended.signal.aborted) throw error;
    exitCode = ended.signal.reason as number;
  } finally {
    await host.close(ended.signal.aborted ? { graceMs: 0 } : {});
    unlisten();
  }
  return exitCode;
}

async function read(file: string): Promise<string | null> {
  try {
    return file === '-' ? await text(process.stdin) : await readFile(file, 'utf8');
  } catch (error) {
    process.stderr.write(`kernelhost: cannot read ${file}: ${(error as Error).message}\n`);
    return null;
  }
}

/** True when the cell ended well. Throws when no kernel can be had, or the run was ended. */
async function runCell(kernel: Kernel, code: string, signal: AbortSignal): Promise<boolean> {
  try {
    const cell = kernel.execute(code, { onOutput: print, signal });
    const { status } = await untilAborted(cell, signal);
    if (status === 'timed-out') await write(process.stderr, 'The cell ran out of time.\n');
    return status === 'ok';
  } catch (error) {
    if (!(error instanceof KernelDiedError) || signal.aborted) throw error;
    await write(process.stderr, `${paint('red', error.exit.message, process.stderr)}\n`);
    return false;
  }
}

/** The second Ctrl-C does not wait for the cell: closing the host ends it. */
async function untilAborted<Value>(value: Promise<Value>, signal: AbortSignal): Promise<Value> {
  signal.throwIfAborted();
  let onAbort = () => {};
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(signal.reason);
    signal.addEventListener('abort', onAbort, { once: true });
  });
  try {
    return await Promise.race([value, aborted]);
  } finally {
    signal.removeEventListener('abort', onAbort);
    value.catch(() => {});
  }
}

async function print(output: Output): Promise<void> {
  switch (output.kind) {
    case 'text':
      return write(output.stream === 'stdout' ? process.stdout : process.stderr, output.text);
    case 'value':
      return write(process.stdout, plainText(output.data));
    case 'display':
      return write(process.stdout, plainText(output.display.data));
    case 'error': {
      const lines = output.traceback.length > 0 ? output.traceback : [`${output.name}: ${output.value}`];
      const traceback = lines.join('\n').trimEnd();
      return write(process.stderr, `${withoutColour(traceback, process.stderr)}\n`);
    }
    case 'clear':
      return;
  }
}

function plainText(data: MimeBundle): string {
  const plain = data['text/plain'];
  return typeof plain === 'string' ? `${plain}\n` : '';
}

/** The first Ctrl-C interrupts the cell, the second ends the run. This process is ours, so its signals are too. */
function listenForSignals(kernel: Kernel, ended: AbortController): () => void {
  let interrupted = false;
  const onInterrupt = () => {
    if (interrupted) {
      ended.abort(EXIT_INTERRUPTED);
      return;
    }
    interrupted = true;
    // Rejects when the kernel dies of it; then the cell says so.
    kernel.interrupt().catch(() => {});
  };
  const onTerminate = () => ended.abort(EXIT_TERMINATED);
  process.on('SIGINT', onInterrupt);
  process.on('SIGTERM', onTerminate);
  return () => {
    process.off('SIGINT', onInterrupt);
    process.off('SIGTERM', onTerminate);
  };
}
