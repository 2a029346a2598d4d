/** On what, and with what, a run was made. No names and no paths of the machine. */
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { cpus, loadavg, release, totalmem } from 'node:os';
import { join } from 'node:path';

export interface Machine {
  date: string;
  /** Short id, null outside a repository or before the first commit. */
  commit: string | null;
  uncommittedChanges: boolean;
  cores: number;
  processor: string;
  memoryGiB: number;
  linux: string;
  /** Over the minute before the run. */
  loadAverage: number;
  versions: Record<string, string>;
}

export function describeMachine(python: string): Machine {
  return {
    date: new Date().toISOString(),
    commit: git('rev-parse', '--short', '--verify', '--quiet', 'HEAD'),
    uncommittedChanges: (git('status', '--porcelain') ?? '') !== '',
    cores: cpus().length,
    processor: cpus()[0]?.model ?? 'unknown',
    memoryGiB: Math.round(totalmem() / 2 ** 30),
    linux: release(),
    loadAverage: loadavg()[0] ?? 0,
    versions: {
      node: process.versions.node,
      kernelhost: packageVersion('../package.json'),
      zeromq: packageVersion('node_modules/zeromq/package.json'),
      ...pythonVersions(python),
    },
  };
}

function pythonVersions(python: string): Record<string, string> {
  const program = [
    'import json, platform',
    'from importlib.metadata import version',
    'names = ["ipykernel", "jupyter_client", "ipython", "pyzmq"]',
    'print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in names}}))',
  ];
  return JSON.parse(execFileSync(python, ['-c', program.join('\n')], { encoding: 'utf8' }));
}

function packageVersion(path: string): string {
  try {
    return JSON.parse(readFileSync(join(import.meta.dirname, path), 'utf8')).version ?? 'unknown';
  } catch {
    return 'missing';
  }
}

function git(...args: string[]): string | null {
  try {
    const cwd = import.meta.dirname;
    return execFileSync('git', args, { cwd, encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim();
  } catch {
    return null;
  }
}
