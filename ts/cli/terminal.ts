/** What the commands need to know of the terminal. */

import { once } from 'node:events';
import { stripVTControlCharacters } from 'node:util';

/** Whether to print in colour: a terminal that was not asked otherwise. NO_COLOR wins over FORCE_COLOR. */
export function wantsColour(stream: NodeJS.WriteStream, environment: NodeJS.ProcessEnv = process.env): boolean {
  const { NO_COLOR, FORCE_COLOR, TERM } = environment;
  if (NO_COLOR !== undefined && NO_COLOR !== '') return false;
  if (FORCE_COLOR !== undefined && FORCE_COLOR !== '') return FORCE_COLOR !== '0';
  return stream.isTTY === true && TERM !== 'dumb';
}

const codes = { green: 32, yellow: 33, red: 31, dim: 2, bold: 1 };

export function paint(colour: keyof typeof codes, text: string, stream: NodeJS.WriteStream): string {
  return wantsColour(stream) ? `\u001b[${codes[colour]}m${text}\u001b[0m` : text;
}

/** Text that may hold colours of its own, such as IPython's tracebacks. */
export function withoutColour(text: string, stream: NodeJS.WriteStream): string {
  return wantsColour(stream) ? text : stripVTControlCharacters(text);
}

const closed = new AbortController();

/** Aborted when the reader of stdout or stderr has gone away. */
export const outputClosed: AbortSignal = closed.signal;

/** Writes and waits until the reader is ready for more, so that a slow pipe slows the cell. */
export async function write(stream: NodeJS.WriteStream, text: string): Promise<void> {
  if (outputClosed.aborted || text === '') return;
  if (!stream.write(text)) {
    // A pipe that closes meanwhile never drains.
    await Promise.race([once(stream, 'drain'), once(stream, 'close')]).catch(() => {});
  }
}

/** A reader that goes away (`| head`) ends our output, not with a stack trace. */
export function ignoreClosedPipe(): void {
  for (const stream of [process.stdout, process.stderr]) {
    stream.on('error', (error: NodeJS.ErrnoException) => {
      if (error.code !== 'EPIPE') throw error;
      closed.abort();
    });
  }
}
