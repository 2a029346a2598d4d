/**
 * The socket through which a running host can be looked at: lines of JSON, a snapshot each, for as long as a client stays.
 *
 * It is a guest in the daemon. It does not hold the event loop open, prints nothing, measures only while somebody looks, keeps
 * at most one snapshot for a client that does not read, and whatever a client does ends that client and nothing else. Where it
 * cannot be opened, that is a warning, and the host works as without it.
 *
 * A client may send lines of JSON: `{"once":true}` for one snapshot and the end, `{"intervalMs":n}` for another pace.
 */

import { createServer, type Server, type Socket } from 'node:net';
import { defaultFolder, Place, removeStale, sweep } from './place.ts';
import { Sampler, type Watchable } from './snapshot.ts';

export interface MonitorParts {
  /** Null for a place in the default folder. */
  path: string | null;
  environment: NodeJS.ProcessEnv;
  kernels(): readonly Watchable[];
  warn(message: string): void;
}

const INTERVAL_MS = 1_000;
const LEAST_INTERVAL_MS = 500;
const MOST_INTERVAL_MS = 3_600_000;
/** Who looks and goes at once, to see whether anybody is there, is not worth a look at all kernels. */
const FIRST_AFTER_MS = 20;
const MAX_CLIENTS = 8;
/** Far more than anybody has to say. */
const MAX_REQUEST_CHARACTERS = 65_536;
/** A client that has not read its snapshot for this long will not read it any more. */
const UNREAD_MS = 30_000;
/** What may be kept longer than to the next look for a client that does not read. */
const MAX_UNSENT_BYTES = 1024 * 1024;
/** How long a client may take to read the end and to hang up. */
const LINGER_MS = 2_000;

/** Sockets that are to be removed when the process ends. */
const open = new Set<MonitorServer>();
let watchesExit = false;

export class MonitorServer {
  readonly #parts: MonitorParts;
  readonly #sampler: Sampler;
  readonly #clients = new Set<Client>();
  #server: Server | null = null;
  #place: Place | null = null;
  #settled = false;
  #closed = false;

  /** Opens it, in the time that takes. */
  constructor(parts: MonitorParts) {
    this.#parts = parts;
    this.#sampler = new Sampler(parts.kernels);
    removeAtExit(this);
    void this.#open();
  }

  /** Removes the socket and sends every client away. Idempotent. */
  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    open.delete(this);
    this.#place?.remove();
    this.#server?.close();
    for (const client of [...this.#clients]) client.end();
  }

  async #open(): Promise<void> {
    const { path, environment } = this.#parts;
    // A socket that is there already may be that of this daemon's predecessor.
    if (path !== null) await removeStale(path);
    if (this.#closed) return;
    try {
      const place = Place.prepare(path, environment);
      this.#place = place;
      // Who sends a request and no more (`nc -N`) is still to be answered.
      const server = createServer({ allowHalfOpen: true }, (socket) => this.#welcome(socket));
      this.#server = server;
      server.unref();
      server.once('listening', () => this.#settle(place));
      server.on('error', (error) => {
        // Later ones are of a client that could not be let in, such as for want of descriptors.
        if (!this.#settled) this.#fail(error);
      });
      // A worker of node:cluster would hand it to its primary.
      server.listen({ path: place.address, exclusive: true });
    } catch (error) {
      // Not before whoever makes the host can listen to its warnings.
      setImmediate(() => this.#fail(error as Error));
      return;
    }
    if (path === null) await sweep(defaultFolder(environment));
  }

  #settle(place: Place): void {
    if (this.#closed) {
      place.remove();
      return;
    }
    try {
      place.settle();
      this.#settled = true;
    } catch (error) {
      this.#fail(error as Error);
    }
  }

  #fail(error: Error): void {
    if (this.#closed) return;
    this.close();
    this.#parts.warn(
      `The monitor's socket could not be opened, so "kernelhost top" cannot see this host: ${error.message}`,
    );
  }

  #welcome(socket: Socket): void {
    if (this.#closed || this.#clients.size >= MAX_CLIENTS) {
      socket.on('error', () => {});
      socket.destroy();
      return;
    }
    const client = new Client(socket, this.#sampler, () => {
      this.#clients.delete(client);
      if (this.#clients.size === 0) this.#sampler.rest();
    });
    this.#clients.add(client);
  }
}

/** One that looks. */
class Client {
  readonly #socket: Socket;
  readonly #sampler: Sampler;
  #intervalMs = INTERVAL_MS;
  #once = false;
  #sent = 0;
  #heard = 0;
  #request = '';
  #timer: NodeJS.Timeout;
  #readAt = performance.now();

  constructor(socket: Socket, sampler: Sampler, gone: () => void) {
    this.#socket = socket;
    this.#sampler = sampler;
    socket.unref();
    socket.setEncoding('utf8');
    socket.on('data', (text: string) => this.#hear(text));
    socket.once('end', () => this.#heardAll());
    socket.on('drain', () => {
      this.#readAt = performance.now();
    });
    // What went wrong is the client's affair.
    socket.on('error', () => {});
    socket.once('close', () => {
      clearTimeout(this.#timer);
      gone();
    });
    this.#timer = this.#after(FIRST_AFTER_MS);
  }

  /** Nothing more comes. */
  end(): void {
    clearTimeout(this.#timer);
    // Whoever does not read what is under way would otherwise be there for good.
    if (this.#socket.writableLength > 0) this.#socket.destroy();
    else this.#socket.destroySoon();
  }

  #after(ms: number): NodeJS.Timeout {
    // Nothing that fails here may reach the daemon.
    return setTimeout(() => void this.#look().catch(() => this.#socket.destroy()), ms).unref();
  }

  async #look(): Promise<void> {
    const began = performance.now();
    const unsent = this.#socket.writableLength;
    if (unsent > 0) {
      if (unsent > MAX_UNSENT_BYTES || began - this.#readAt > UNREAD_MS) this.#socket.destroy();
      else this.#timer = this.#after(this.#intervalMs);
      return;
    }
    const line = await this.#sampler.take();
    if (this.#socket.destroyed || this.#socket.writableEnded) return;
    this.#readAt = performance.now();
    this.#socket.write(line);
    this.#sent += 1;
    if (this.#once) this.#finish();
    else this.#timer = this.#after(Math.max(0, this.#intervalMs - (performance.now() - began)));
  }

  #hear(text: string): void {
    this.#heard += text.length;
    if (this.#heard > MAX_REQUEST_CHARACTERS) {
      this.#finish('that is too much');
      return;
    }
    this.#request += text;
    const lines = this.#request.split('\n');
    this.#request = lines.pop() ?? '';
    for (const line of lines) {
      const problem = this.#heed(line);
      if (problem !== null) {
        this.#finish(problem);
        return;
      }
    }
  }

  /** A client that asks for nothing and hangs up has gone. */
  #heardAll(): void {
    if (this.#request.trim() !== '') this.#hear('\n');
    if (!this.#once) this.#finish();
  }

  /** What is wrong with a request, or null. */
  #heed(line: string): string | null {
    let request: unknown;
    try {
      request = JSON.parse(line);
    } catch {
      return 'send lines of JSON';
    }
    if (typeof request !== 'object' || request === null) return 'send objects';
    const { once, intervalMs } = request as { once?: unknown; intervalMs?: unknown };
    if (intervalMs !== undefined) {
      if (typeof intervalMs !== 'number' || !(intervalMs >= LEAST_INTERVAL_MS && intervalMs <= MOST_INTERVAL_MS)) {
        return `intervalMs: give a number from ${LEAST_INTERVAL_MS} to ${MOST_INTERVAL_MS}`;
      }
      this.#intervalMs = intervalMs;
    }
    if (once === true) {
      this.#once = true;
      if (this.#sent > 0) this.#finish();
    }
    return null;
  }

  /** The client is told what was wrong with its request, and sent away. */
  #finish(problem?: string): void {
    if (this.#socket.writableEnded) return;
    clearTimeout(this.#timer);
    this.#socket.removeAllListeners('data').resume();
    if (problem !== undefined) this.#socket.write(`${JSON.stringify({ error: problem })}\n`);
    this.#socket.end();
    // One that never reads, or never hangs up, is not waited for.
    this.#timer = setTimeout(() => this.#socket.destroy(), LINGER_MS).unref();
  }
}

/** One listener for all of them: Node takes many listeners for a leak, and says so on stderr. */
function removeAtExit(server: MonitorServer): void {
  open.add(server);
  if (watchesExit) return;
  watchesExit = true;
  process.on('exit', () => {
    for (const each of [...open]) each.close();
  });
}
