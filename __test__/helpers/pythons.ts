/** The interpreters that `npm test` has prepared. */

import { execFileSync } from 'node:child_process';

/** An interpreter with IPython. Without `npm test` around, whatever python3 there is. */
export function pythonForTests(): string {
  return process.env.KERNELHOST_TEST_PYTHON ?? 'python3';
}

/** An interpreter with nothing installed. */
export function plainPythonForTests(): string {
  return process.env.KERNELHOST_TEST_PYTHON_PLAIN ?? pythonForTests();
}

/** An interpreter with IPython, matplotlib, pandas, tqdm, rich, nbformat, ipywidgets and cloudpickle; null where there is none. */
export function librariesPythonForTests(): string | null {
  return process.env.KERNELHOST_TEST_PYTHON_LIBRARIES ?? null;
}

/** A folder for PYTHONPATH that has dill; null where there is none. */
export function dillForTests(): string | null {
  return process.env.KERNELHOST_TEST_DILL ?? null;
}

/** Why a test that needs these libraries is skipped, or false. */
export const lacksLibraries: string | false =
  librariesPythonForTests() === null
    ? 'KERNELHOST_TEST_PYTHON_LIBRARIES names no Python with the libraries that this test needs'
    : false;

const versions = new Map<string, string>();

/** `3.13`, of the interpreter given. */
export function pythonVersion(python: string = pythonForTests()): string {
  let version = versions.get(python);
  if (version === undefined) {
    version = execFileSync(python, ['-c', 'import sys; print("%d.%d" % sys.version_info[:2])'], {
      encoding: 'utf8',
    }).trim();
    versions.set(python, version);
  }
  return version;
}

/** Whether the module can be imported; some have no wheel for the newest Python. */
export function hasModule(name: string, python: string = pythonForTests()): boolean {
  try {
    execFileSync(python, ['-c', `import ${name}`], { stdio: 'ignore' });
    return true;
  } catch {
    return false;
  }
}
