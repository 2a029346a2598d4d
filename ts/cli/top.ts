/** `kernelhost top`: the kernels of running hosts, as their monitors tell. */

import { connect, type Socket } from 'node:net';
import { createInterface } from 'node:readline';
import { folderProblem, searchedFolders, socketsIn, sweep } from '../monitor/place.ts';
import { SNAPSHOT_VERSION, type Snapshot } from '../monitor/snapshot.ts';
import { outputClosed, paint, write } from './terminal.ts';
import { type Line, table } from './top-table.ts';

export interface TopOptions {
  /** A socket's path, a daemon's pid, or undefined for every host that can be found. */
  target: string | undefined;
  json: boolean;
  once: boolean;
}

const EXIT_INTERRUPTED = 130;
const EXIT_TERMINATED = 143;

/** With `--once` a second look is waited for: the share of a processor is told between two. */
const LOOKS_FOR_ONCE = 2;
const SECOND_LOOK_AFTER_MS = 500;
/** A daemon whose event loop is blocked answers late; one that is stopped does not. */
const FIRST_ANSWER_MS = 10_000;

export async function top({ target, json, once }: TopOptions): Promise<number> {
  const found = await find(target);
  if (typeof found === 'string') return complain(found);
  const quit = new AbortController();
  const view: View = json ? jsonLines : process.stdout.isTTY === true && !once ? new Screen(quit) : new PlainTables();
  const unlisten = listenForTheEnd(quit);
  try {
    const problems = await Promise.all(found.map((socket) => follow(socket, view, once, quit.signal)));
    view.end?.();
    if (quit.signal.aborted) return quit.signal.reason as number;
    const told = problems.filter((problem) => problem !== null);
    for (const problem of told) complain(problem);
    return told.length === 0 ? 0 : 1;
  } finally {
    view.end?.();
    unlisten();
    for (const socket of found) socket.destroy();
  }
}

function complain(problem: string): 1 {
  process.stderr.write(`kernelhost: ${problem}\n`);
  return 1;
}

/** Connections to what is to be shown, or what to tell the user instead. */
async function find(target: string | undefined): Promise<Socket[] | string> {
  if (target !== undefined && !/^\d+$/.test(target)) {
    try {
      return [await connected(target)];
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      if (code === 'ECONNREFUSED') return `nobody listens on ${target}; its daemon has ended`;
      return `cannot connect to ${target}: ${message}`;
    }
  }
  const pid = target === undefined ? undefined : Number(target);
  const folders = searchedFolders(process.env);
  const sockets: Socket[] = [];
  const problems: string[] = [];
  for (const folder of folders) {
    const untrusted = folderProblem(folder);
    if (untrusted !== null) problems.push(untrusted);
    for (const path of socketsIn(folder, pid)) {
      try {
        sockets.push(await connected(path));
      } catch (error) {
        // Of a dead daemon, and removed below.
        const { code, message } = error as NodeJS.ErrnoException;
        if (code !== 'ECONNREFUSED' && code !== 'ENOENT') problems.push(message);
      }
    }
    await sweep(folder);
  }
  if (sockets.length > 0) return sockets;
  const what = pid === undefined ? 'no host with a monitor was found' : `no monitor of process ${pid} was found`;
  const why = problems.length === 0 ? '' : ` (${problems.join('; ')})`;
  return (
    `${what} in ${folders.join(' or ')}${why}\n` +
    'A host has one when it is made with the option "monitor", or with KERNELHOST_MONITOR=1 in its environment.'
  );
}

function connected(path: string): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const socket = connect(path);
    socket.once('error', reject);
    socket.once('connect', () => {
      socket.off('error', reject);
      // A host that goes away is seen by the end of its lines.
      socket.on('error', () => {});
      resolve(socket);
    });
  });
}

/** Shows what a host tells until it is gone, or the user has seen enough. Returns what went wrong, or null. */
async function follow(socket: Socket, view: View, once: boolean, quit: AbortSignal): Promise<string | null> {
  let late = false;
  const timer = setTimeout(() => {
    late = true;
    socket.destroy();
  }, FIRST_ANSWER_MS);
  const leave = () => void socket.destroy();
  quit.addEventListener('abort', leave, { once: true });
  if (once) socket.write(`${JSON.stringify({ intervalMs: SECOND_LOOK_AFTER_MS })}\n`);
  let newest: Snapshot | null = null;
  let looks = 0;
  const lines = createInterface({ input: socket });
  // It ends with the input's end, and a connection that is broken off has none.
  socket.once('close', () => lines.close());
  try {
    for await (const line of lines) {
      clearTimeout(timer);
      const heard = parse(line);
      if (typeof heard === 'string') return heard;
      newest = heard;
      looks += 1;
      if (!once) await view.show(newest, socket);
      else if (looks === LOOKS_FOR_ONCE) break;
    }
  } finally {
    clearTimeout(timer);
    quit.removeEventListener('abort', leave);
    socket.destroy();
  }
  if (quit.aborted) return null;
  if (late) return `no answer within ${FIRST_ANSWER_MS / 1000} s; the daemon is busy, or stopped`;
  if (newest === null) return 'the host went away, or has too many that look at it';
  if (once) await view.show(newest, socket);
  else await view.gone?.(socket);
  return null;
}

function parse(line: string): Snapshot | string {
  try {
    const heard = JSON.parse(line) as Snapshot & { error?: string };
    if (heard.version === SNAPSHOT_VERSION) return heard;
    return (
      heard.error ?? `the host speaks version ${heard.version} of the format, and this command ${SNAPSHOT_VERSION}`
    );
  } catch {
    return 'what listens there is no monitor of kernelhost';
  }
}

/** This process is ours, so its signals are too. */
function listenForTheEnd(quit: AbortController): () => void {
  const onInterrupt = () => quit.abort(EXIT_INTERRUPTED);
  const onTerminate = () => quit.abort(EXIT_TERMINATED);
  const onClosed = () => quit.abort(0);
  process.on('SIGINT', onInterrupt);
  process.on('SIGTERM', onTerminate);
  outputClosed.addEventListener('abort', onClosed, { once: true });
  return () => {
    process.off('SIGINT', onInterrupt);
    process.off('SIGTERM', onTerminate);
    outputClosed.removeEventListener('abort', onClosed);
  };
}

/** How snapshots are shown. */
interface View {
  /** `of`: what tells one host from another. */
  show(snapshot: Snapshot, of: object): Promise<void>;
  gone?(of: object): Promise<void>;
  /** Idempotent. */
  end?(): void;
}

const jsonLines: View = {
  show: (snapshot) => write(process.stdout, `${JSON.stringify(snapshot)}\n`),
};

class PlainTables implements View {
  #between = '';

  show(snapshot: Snapshot): Promise<void> {
    const text = `${this.#between}${table(snapshot, null).map(painted).join('\n')}\n`;
    this.#between = '\n';
    return write(process.stdout, text);
  }
}

function painted({ text, style }: Line): string {
  return style === null ? text : paint(style, text, process.stdout);
}

const ESCAPE = '\u001b[';
/** The other screen, no cursor, no wrapping. */
const ENTER = `${ESCAPE}?1049h${ESCAPE}?25l${ESCAPE}?7l`;
const LEAVE = `${ESCAPE}?7h${ESCAPE}?25h${ESCAPE}?1049l`;
const HOME = `${ESCAPE}H`;
const CLEAR_LINE = `${ESCAPE}K`;
const CLEAR_BELOW = `${ESCAPE}J`;

/** The table in place, until q or Ctrl-C. */
class Screen implements View {
  readonly #snapshots = new Map<object, Snapshot>();
  readonly #quit: AbortController;
  #ended = false;

  constructor(quit: AbortController) {
    this.#quit = quit;
    // Also when this command itself fails.
    process.on('exit', this.end);
    process.stdout.on('resize', this.#draw);
    if (process.stdin.isTTY) {
      process.stdin.setRawMode(true);
      process.stdin.on('data', this.#key).resume();
    }
    process.stdout.write(ENTER);
    this.#draw();
  }

  async show(snapshot: Snapshot, of: object): Promise<void> {
    this.#snapshots.set(of, snapshot);
    this.#draw();
  }

  async gone(of: object): Promise<void> {
    this.#snapshots.delete(of);
    this.#draw();
  }

  readonly end = (): void => {
    if (this.#ended) return;
    this.#ended = true;
    process.off('exit', this.end);
    process.stdout.off('resize', this.#draw);
    if (process.stdin.isTTY) {
      process.stdin.off('data', this.#key).pause();
      process.stdin.setRawMode(false);
    }
    process.stdout.write(LEAVE);
  };

  readonly #key = (keys: Buffer): void => {
    for (const key of keys.toString()) {
      if (key === 'q' || key === 'Q') this.#quit.abort(0);
      // Raw mode turns the signal into a character.
      else if (key === '\u0003') this.#quit.abort(EXIT_INTERRUPTED);
    }
  };

  readonly #draw = (): void => {
    if (this.#ended) return;
    const { columns, rows } = process.stdout;
    const height = Math.max(1, (rows || 24) - 1);
    const tables = Array.from(this.#snapshots.values(), (snapshot) => table(snapshot, columns || 80));
    const lines = tables.flatMap((each, index) => (index === 0 ? each : [{ text: '', style: null }, ...each]));
    const shown = lines.slice(0, height);
    const hidden = lines.length - shown.length;
    const last = hidden > 0 ? `${hidden} more lines; q quits` : 'q quits';
    const drawn = [...shown.map(painted), paint('dim', last, process.stdout)];
    process.stdout.write(`${HOME}${drawn.map((line) => `${line}${CLEAR_LINE}`).join('\r\n')}${CLEAR_BELOW}`);
  };
}
