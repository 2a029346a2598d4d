// What every script needs: the project's places, and how to run a program. Plain JavaScript for Node 20 and later,
// without packages: it is what installs them.

import { spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { delimiter, dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

export const root = dirname(dirname(fileURLToPath(import.meta.url)));

/** The Node 22 that comes with the packages; development machines may have an older one. */
export const node = join(root, 'node_modules', '.bin', 'node');

export const at = (...parts) => join(root, ...parts);

/** Progress goes to stderr: stdout belongs to what the script is for. */
export function say(text) {
  process.stderr.write(`${text}\n`);
}

/** An expected failure: its text is all that is shown. */
export class Stop extends Error {}

/** The programs of the packages come first, so that `node` is Node 22 in everything that is started from here. */
export function environment(extra = {}) {
  const path = [at('node_modules', '.bin'), process.env.PATH ?? ''].join(delimiter);
  return { ...process.env, PATH: path, ...extra };
}

/** Runs a program with its output shown and resolves with its exit code (128 + n for signal n). */
export function run(command, args, { env = {}, quiet = false } = {}) {
  return new Promise((resolve) => {
    // Progress of a build is no result: what it prints to stdout is shown on stderr.
    const stdio = quiet ? ['ignore', 2, 2] : ['inherit', 'inherit', 'inherit'];
    const child = spawn(command, args, { cwd: root, env: environment(env), stdio });
    child.on('error', (error) => {
      say(`${command}: ${error.code === 'ENOENT' ? 'not found' : error.message}`);
      resolve(127);
    });
    child.on('exit', (code, signal) => resolve(code ?? 128 + (signal === 'SIGINT' ? 2 : 15)));
  });
}

/** Runs a step of set-up; stops everything when it fails. */
export async function must(what, command, args, options = {}) {
  const code = await run(command, args, { quiet: true, ...options });
  if (code !== 0) throw new Stop(`${what} failed (exit code ${code}): ${command} ${args.join(' ')}`);
}

/** What a program prints, trimmed; null when it cannot be run or fails. */
export function output(command, args) {
  const result = spawnSync(command, args, { cwd: root, env: environment(), encoding: 'utf8' });
  return result.status === 0 ? result.stdout.trim() : null;
}

/** A hash over files and folders; a missing one counts as missing. */
export function fingerprint(paths) {
  const hash = createHash('sha256');
  for (const path of paths) {
    for (const file of filesUnder(at(path))) {
      hash.update(`${relative(root, file)}\0`);
      hash.update(readFileSync(file));
      hash.update('\0');
    }
  }
  return hash.digest('hex');
}

function filesUnder(path) {
  if (!existsSync(path)) return [];
  if (statSync(path).isFile()) return [path];
  return readdirSync(path, { withFileTypes: true })
    .filter((entry) => !['target', 'node_modules', '__pycache__'].includes(entry.name))
    .sort((a, b) => (a.name < b.name ? -1 : 1))
    .flatMap((entry) => filesUnder(join(path, entry.name)));
}

/** Whether the step was done for this very input. */
export function isDone(step, input) {
  const stamp = at('.setup', step);
  return existsSync(stamp) && readFileSync(stamp, 'utf8') === input;
}

export function markDone(step, input) {
  mkdirSync(at('.setup'), { recursive: true });
  writeFileSync(at('.setup', step), input);
}

/** Runs a script's main function and ends with its exit code. */
export function main(task) {
  task().then(
    (code) => {
      process.exitCode = code ?? 0;
    },
    (error) => {
      say(error instanceof Stop ? error.message : error.stack);
      process.exitCode = 1;
    },
  );
}
