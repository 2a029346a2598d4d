/** Which Python to use. */

import { accessSync, constants, statSync } from 'node:fs';
import { delimiter, isAbsolute, join, resolve } from 'node:path';

/**
 * The option, KERNELHOST_PYTHON, the active virtual environment, `python3` on PATH: the first that is set. A path that
 * is set and does not work is not passed over: the start fails and names it. Symbolic links are kept, because a virtual
 * environment is known by the link's own place.
 */
export function resolveInterpreter(option: string | undefined, environment: NodeJS.ProcessEnv): string {
  const chosen = option ?? nonEmpty(environment.KERNELHOST_PYTHON);
  if (chosen !== undefined) return locate(chosen, environment.PATH);
  const virtual = nonEmpty(environment.VIRTUAL_ENV);
  if (virtual !== undefined) return resolve(virtual, 'bin', 'python');
  return locate('python3', environment.PATH);
}

function locate(python: string, searchPath: string | undefined): string {
  if (isAbsolute(python)) return python;
  if (python.includes('/')) return resolve(python);
  for (const folder of (searchPath ?? '').split(delimiter)) {
    // An empty entry would mean the working directory, which is no place to take an interpreter from unasked.
    if (folder === '') continue;
    const candidate = resolve(join(folder, python));
    if (isExecutableFile(candidate)) return candidate;
  }
  return python;
}

function isExecutableFile(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return statSync(path).isFile();
  } catch {
    return false;
  }
}

function nonEmpty(value: string | undefined): string | undefined {
  return value === '' ? undefined : value;
}
