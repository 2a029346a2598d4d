/** `kernelhost doctor`: whether kernels can run here, what is missing, what to do about it, and how fast they start. */

import { spawnSync } from 'node:child_process';
import { release } from 'node:os';
import { resolveInterpreter } from '../interpreter.ts';
import { KernelHost } from '../kernel-host.ts';
import { glibcVersion, loadBinding } from '../native.ts';
import { paint, write } from './terminal.ts';

/** 'limited': kernels run, and something is less than it could be. */
type State = 'good' | 'limited' | 'missing';

export interface Check {
  name: string;
  state: State;
  found: string;
  /** What to do, when there is something to do. */
  advice: string | null;
}

export interface Timing {
  launch: 'fork' | 'spawn';
  /** Making the template ready; null where there is none. */
  warmMs: number | null;
  startMs: number;
  /** `1+1`, from the call to the result. */
  cellMs: number;
}

export interface Report {
  /** Whether a kernel can run. */
  ok: boolean;
  checks: Check[];
  timings: Timing[];
}

export async function doctor({ python, json }: { python: string | undefined; json: boolean }): Promise<number> {
  const report = await examine(python);
  await write(process.stdout, json ? `${JSON.stringify(report, null, 2)}\n` : table(report));
  return report.ok ? 0 : 1;
}

async function examine(python: string | undefined): Promise<Report> {
  const checks: Check[] = [checkNode(), ...checkLinux(), checkAddon()];
  const { KERNELHOST_LAUNCH } = process.env;
  if (KERNELHOST_LAUNCH !== undefined && KERNELHOST_LAUNCH !== '') {
    checks.push({
      name: 'KERNELHOST_LAUNCH',
      state: 'limited',
      found: KERNELHOST_LAUNCH,
      advice: 'Overrides how kernels are launched; unset it unless you mean to. Both ways are tried below.',
    });
    delete process.env.KERNELHOST_LAUNCH;
  }
  const interpreter = resolveInterpreter(python, process.env);
  checks.push(...checkPython(interpreter));
  const timings: Timing[] = [];
  // Without these there is nothing to try, and the reason is in the table already.
  if (checks.every(({ state }) => state !== 'missing')) {
    for (const launch of ['fork', 'spawn'] as const) {
      const tried = await tryKernel(interpreter, launch);
      checks.push(tried.check);
      if (tried.timing !== null) timings.push(tried.timing);
    }
    // Where only one way works, `launch: 'auto'` takes it.
    if (timings.length > 0) {
      for (const check of checks) if (check.state === 'missing') check.state = 'limited';
    }
  }
  return { ok: timings.length > 0, checks, timings };
}

function checkNode(): Check {
  const major = Number(process.versions.node.split('.')[0]);
  return {
    name: 'Node.js',
    state: major >= 22 ? 'good' : 'missing',
    found: process.versions.node,
    advice: major >= 22 ? null : 'Install Node.js 22 or later.',
  };
}

function checkLinux(): Check[] {
  if (process.platform !== 'linux') {
    return [{ name: 'Linux', state: 'missing', found: process.platform, advice: 'kernelhost runs on Linux only.' }];
  }
  const version = release();
  const glibc = glibcVersion();
  const feature = (name: string, since: string, without: State, advice: string): Check => {
    const there = atLeast(version, since);
    return {
      name,
      state: there ? 'good' : without,
      found: there ? 'available' : `needs Linux ${since}`,
      advice: there ? null : advice,
    };
  };
  return [
    { name: 'Linux', state: 'good', found: version, advice: null },
    {
      name: 'C library',
      state: glibc === null ? 'missing' : 'good',
      found: glibc === null ? 'not glibc' : `glibc ${glibc}`,
      advice: glibc === null ? 'Use an image with glibc, such as Debian, Ubuntu or Fedora.' : null,
    },
    feature('pidfd', '5.3', 'missing', 'Kernels are watched through pidfds: use a newer Linux.'),
    feature(
      'pidfd signals to groups',
      '6.9',
      'limited',
      'Process groups are signalled by their number instead; nothing to do.',
    ),
    feature(
      'pidfd exit status',
      '6.15',
      'limited',
      'When a template dies, the exit status of its kernels is reported as unknown; a newer Linux tells it.',
    ),
  ];
}

function checkAddon(): Check {
  try {
    loadBinding();
    return { name: 'Addon', state: 'good', found: `linux ${process.arch}`, advice: null };
  } catch (error) {
    return { name: 'Addon', state: 'missing', found: 'not loaded', advice: (error as Error).message };
  }
}

const probe = `
import importlib.util, json, sys
try:
    import IPython
    ipython = IPython.__version__
except Exception:
    ipython = None
print(json.dumps({"version": sys.version_info[:3], "ipython": ipython}))
`;

/** Long enough for a cold disk; a working interpreter answers in well under a second. */
const PROBE_TIMEOUT_MS = 30_000;

function checkPython(interpreter: string): Check[] {
  const { status, stdout, stderr, error } = spawnSync(interpreter, ['-c', probe], {
    encoding: 'utf8',
    timeout: PROBE_TIMEOUT_MS,
  });
  const line = stdout?.trim().split('\n').at(-1) ?? '';
  if (error !== undefined || status !== 0 || !line.startsWith('{')) {
    const reason = error?.message ?? stderr.trim().split('\n').at(-1) ?? '';
    return [
      {
        name: 'Python',
        state: 'missing',
        found: interpreter,
        advice: `It cannot be run${reason === '' ? '' : ` (${reason})`}. Install Python 3.10 or later, or name one with --python or KERNELHOST_PYTHON.`,
      },
    ];
  }
  const { version, ipython } = JSON.parse(line) as { version: number[]; ipython: string | null };
  const [major = 0, minor = 0] = version;
  const usable = major === 3 && minor >= 10;
  return [
    {
      name: 'Python',
      state: usable ? 'good' : 'missing',
      found: `${version.join('.')} (${interpreter})`,
      advice: usable ? null : 'Python 3.10 or later is needed; name one with --python or KERNELHOST_PYTHON.',
    },
    {
      name: 'IPython',
      state: ipython === null ? 'limited' : 'good',
      found: ipython ?? 'not installed',
      advice:
        ipython === null
          ? `Kernels use the plain shell. For magics and rich display: ${interpreter} -m pip install ipython`
          : null,
    },
  ];
}

async function tryKernel(python: string, launch: 'fork' | 'spawn'): Promise<{ check: Check; timing: Timing | null }> {
  const name = launch === 'fork' ? 'Forked kernel' : 'Spawned kernel';
  const host = new KernelHost({ python, launch });
  try {
    let warmMs: number | null = null;
    if (launch === 'fork') {
      const begun = performance.now();
      await host.warm();
      warmMs = performance.now() - begun;
    }
    const kernel = host.kernel();
    const started = performance.now();
    await kernel.start();
    const ready = performance.now();
    const first = await kernel.execute('1+1');
    if (first.text !== '2') throw new Error(`1+1 gave ${first.text ?? first.status}`);
    // The first cell pays for what is imported on first use.
    const again = performance.now();
    await kernel.execute('1+1');
    const timing: Timing = {
      launch,
      warmMs: warmMs === null ? null : round(warmMs),
      startMs: round(ready - started),
      cellMs: round(performance.now() - again),
    };
    const warm = timing.warmMs === null ? '' : `, template ready in ${timing.warmMs} ms`;
    const found = `starts in ${timing.startMs} ms, 1+1 in ${timing.cellMs} ms${warm}`;
    return { check: { name, state: 'good', found, advice: null }, timing };
  } catch (error) {
    return { check: { name, state: 'missing', found: 'does not run', advice: (error as Error).message }, timing: null };
  } finally {
    await host.close();
  }
}

function round(ms: number): number {
  return Math.round(ms * 100) / 100;
}

function atLeast(version: string, wanted: string): boolean {
  const [major = 0, minor = 0] = version.split(/[.-]/).map(Number);
  const [wantedMajor = 0, wantedMinor = 0] = wanted.split('.').map(Number);
  return major > wantedMajor || (major === wantedMajor && minor >= wantedMinor);
}

const colours = { good: 'green', limited: 'yellow', missing: 'red' } as const;

function table({ ok, checks }: Report): string {
  const width = Math.max(...checks.map(({ name }) => name.length));
  const lines = checks.flatMap(({ name, state, found, advice }) => {
    const mark = paint(colours[state], state.padEnd(7), process.stdout);
    const line = `${mark}  ${name.padEnd(width)}  ${found}`;
    return advice === null
      ? [line]
      : [line, `${' '.repeat(9)}${' '.repeat(width)}  → ${advice.replaceAll('\n', '\n     ')}`];
  });
  const verdict = ok
    ? paint('green', 'Kernels can run here.', process.stdout)
    : paint('red', 'Kernels cannot run here.', process.stdout);
  return `${lines.join('\n')}\n\n${verdict}\n`;
}
