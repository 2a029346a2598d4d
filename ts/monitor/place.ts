/**
 * Where monitor sockets are: the default folder, a socket that only its owner can use, and those that dead daemons have left.
 *
 * A socket is made in a private folder of its own, made 0600 there and then linked to its place. So there is no moment when it
 * is anybody else's to connect to, whatever the umask (which is the whole process's and not ours to change), and what stands
 * in its place already is never replaced.
 */

import {
  chmodSync,
  linkSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmdirSync,
  type Stats,
  unlinkSync,
} from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, isAbsolute, join } from 'node:path';

/** Linux gives the address of a socket 108 bytes, the last of them a NUL. */
const MAX_ADDRESS_BYTES = 107;

const PRIVATE_PREFIX = '.kh-';
const ADDRESS_NAME = 's';
/** Making a socket takes a few milliseconds; a private folder of this age is of a daemon that died meanwhile. */
const PRIVATE_FOLDER_MS = 60_000;
/** Hosts of one process, at most, that have a socket in the default folder. */
const MAX_SOCKETS = 10_000;

const SOCKET_NAME = /^(\d+)-\d+\.sock$/;

/** What can go wrong with a place: it is told, in these words, and nothing else happens. */
export class PlaceError extends Error {}

/** Where sockets are put that have no path of their own. */
export function defaultFolder(environment: NodeJS.ProcessEnv): string {
  return join(baseFolders(environment)[0] ?? '/tmp', folderName());
}

/** Where they are looked for: the daemon may have been started with another environment than we. */
export function searchedFolders(environment: NodeJS.ProcessEnv): string[] {
  return [...new Set([...baseFolders(environment), '/tmp'].map((folder) => join(folder, folderName())))];
}

function baseFolders({ XDG_RUNTIME_DIR }: NodeJS.ProcessEnv): string[] {
  const runtime = XDG_RUNTIME_DIR !== undefined && isAbsolute(XDG_RUNTIME_DIR) ? [XDG_RUNTIME_DIR] : [];
  return [...runtime, tmpdir()];
}

function folderName(): string {
  return `kernelhost-${ownUser()}`;
}

function ownUser(): number {
  return process.geteuid?.() ?? -1;
}

/** Whether a path can be the address of a socket, also while it is being made. */
export function isTooLong(path: string): boolean {
  const whileMade = join(dirname(path), `${PRIVATE_PREFIX}XXXXXX`, ADDRESS_NAME);
  return Math.max(Buffer.byteLength(path), Buffer.byteLength(whileMade)) > MAX_ADDRESS_BYTES;
}

/** The folder is there and nobody else's. */
function makeFolder(folder: string): void {
  try {
    mkdirSync(folder, { mode: 0o700 });
  } catch (error) {
    if (codeOf(error) !== 'EEXIST') throw error;
  }
  const problem = folderProblem(folder);
  if (problem !== null) throw new PlaceError(problem);
}

/** Why a folder is not to be trusted; null where it is, or where there is none. */
export function folderProblem(folder: string): string | null {
  const stats = look(folder);
  if (stats === null) return null;
  if (!stats.isDirectory()) return `${folder} is not a folder`;
  if (stats.uid !== ownUser()) return `${folder} belongs to user ${stats.uid}`;
  // A folder that others may write to is one where they may put sockets of their own.
  if ((stats.mode & 0o077) !== 0)
    return `${folder} is open to others (mode ${(stats.mode & 0o7777).toString(8)}, not 700)`;
  return null;
}

/** A socket's place, while it is made and while it is there. */
export class Place {
  /** Where to listen. */
  readonly address: string;
  readonly #folder: string;
  /** The place that was asked for, or the folder to find one in. */
  readonly #wanted: { path: string } | { folder: string };
  #path: string | null = null;
  #stats: Stats | null = null;

  /** `path`: null for a place in the default folder. Throws a PlaceError, or what the file system says. */
  static prepare(path: string | null, environment: NodeJS.ProcessEnv): Place {
    if (path !== null) return new Place({ path });
    const folder = defaultFolder(environment);
    if (isTooLong(join(folder, `${process.pid}-${MAX_SOCKETS}.sock`))) {
      throw new PlaceError(`${folder} is too long a path for a socket; give one of your own`);
    }
    // The last host of another daemon may remove the empty folder just when we have made it.
    for (let attempt = 1; ; attempt++) {
      makeFolder(folder);
      try {
        return new Place({ folder });
      } catch (error) {
        if (codeOf(error) !== 'ENOENT' || attempt === 3) throw error;
      }
    }
  }

  private constructor(wanted: { path: string } | { folder: string }) {
    this.#wanted = wanted;
    this.#folder = mkdtempSync(join('path' in wanted ? dirname(wanted.path) : wanted.folder, PRIVATE_PREFIX));
    this.address = join(this.#folder, ADDRESS_NAME);
  }

  /** Once the socket listens: makes it its owner's alone and puts it where it was wanted. Returns that path. */
  settle(): string {
    chmodSync(this.address, 0o600);
    const path = this.#link();
    this.#path = path;
    this.#stats = look(path);
    this.#discard();
    return path;
  }

  /** Removes everything that was made. Never throws. */
  remove(): void {
    this.#discard();
    const path = this.#path;
    this.#path = null;
    // Somebody may have put something else there.
    if (path !== null && isSame(look(path), this.#stats)) quietly(() => unlinkSync(path));
    const wanted = this.#wanted;
    // Fails while others have sockets there.
    if ('folder' in wanted) quietly(() => rmdirSync(wanted.folder));
  }

  #link(): string {
    if ('path' in this.#wanted) {
      const { path } = this.#wanted;
      try {
        linkSync(this.address, path);
        return path;
      } catch (error) {
        if (codeOf(error) !== 'EEXIST') throw error;
        throw new PlaceError(`${path} is there already; it is in use, or not a socket of ours`);
      }
    }
    for (let number = 1; number <= MAX_SOCKETS; number++) {
      const path = join(this.#wanted.folder, `${process.pid}-${number}.sock`);
      try {
        linkSync(this.address, path);
        return path;
      } catch (error) {
        if (codeOf(error) !== 'EEXIST') throw error;
      }
    }
    throw new PlaceError(`${this.#wanted.folder} has ${MAX_SOCKETS} sockets of this process`);
  }

  #discard(): void {
    quietly(() => unlinkSync(this.address));
    quietly(() => rmdirSync(this.#folder));
  }
}

/** The sockets of a folder that is to be trusted, of one process or of all, in the order of their names. */
export function socketsIn(folder: string, pid?: number): string[] {
  if (folderProblem(folder) !== null) return [];
  return names(folder)
    .filter((name) => {
      const found = SOCKET_NAME.exec(name);
      return found !== null && (pid === undefined || Number(found[1]) === pid);
    })
    .sort(new Intl.Collator('en', { numeric: true }).compare)
    .map((name) => join(folder, name));
}

/** Removes what dead daemons have left in the folder. Those that answer are left alone. Never throws. */
export async function sweep(folder: string): Promise<void> {
  for (const path of socketsIn(folder)) await removeStale(path);
  if (folderProblem(folder) !== null) return;
  for (const name of names(folder).filter((name) => name.startsWith(PRIVATE_PREFIX))) {
    const path = join(folder, name);
    const stats = look(path);
    if (stats === null || Date.now() - stats.mtimeMs < PRIVATE_FOLDER_MS) continue;
    await removeStale(join(path, ADDRESS_NAME));
    quietly(() => rmdirSync(path));
  }
}

/** Removes a socket of ours that nobody listens on. Anything else is left alone. Never throws. */
export async function removeStale(path: string): Promise<void> {
  const stats = look(path);
  if (stats === null || !stats.isSocket() || stats.uid !== ownUser()) return;
  if (!(await isRefused(path))) return;
  // It may have been replaced by that of a living daemon meanwhile.
  if (isSame(look(path), stats)) quietly(() => unlinkSync(path));
}

/** Whether nobody listens. Does not hold the event loop open. */
function isRefused(path: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(path);
    socket.unref();
    socket.once('connect', () => {
      socket.destroy();
      resolve(false);
    });
    socket.once('error', (error) => resolve(codeOf(error) === 'ECONNREFUSED'));
  });
}

function names(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

function look(path: string): Stats | null {
  try {
    return lstatSync(path);
  } catch {
    return null;
  }
}

/** Numbers of files are given out again; the time of their birth tells them apart. */
function isSame(one: Stats | null, other: Stats | null): boolean {
  return (
    one !== null &&
    other !== null &&
    one.ino === other.ino &&
    one.dev === other.dev &&
    one.birthtimeMs === other.birthtimeMs
  );
}

function codeOf(error: unknown): string | undefined {
  return (error as NodeJS.ErrnoException).code;
}

function quietly(task: () => void): void {
  try {
    task();
  } catch {
    // It is not there, or not ours to remove.
  }
}
