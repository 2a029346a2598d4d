/**
 * The daemon of one round of host deaths: a Node process of its own that comes to a moment, says so, and waits to be killed.
 * Owns the moments. Its arguments: the moment, how lives are launched, and the interpreter.
 */

import { writeSync } from 'node:fs';
import { KernelHost } from 'kernelhost';

/** What is printed, one line of JSON each. Written at once: the next line of the script may be the last. */
export interface Prepared {
  /** Null where none has been started yet. */
  template: number | null;
  lives: number[];
}

/** What a daemon does when it is killed: `prepare` is over before the moment, `act` has just begun. */
interface Moment {
  /** How many kernels are up, each with one cell run. */
  kernels: number;
  /** Run on each of them to its end. */
  prepare?: string;
  act(host: KernelHost): unknown;
}

const quietly = (promise: Promise<unknown>) => void promise.catch(() => {});

const onEach = (code: string) => (host: KernelHost) => {
  for (const kernel of host.kernels) quietly(kernel.execute(code));
};

const FAMILY = `import subprocess
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sh", "-c", "trap : TERM INT HUP; sleep 600 & wait; wait"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"])`;

export const moments: Record<string, Moment> = {
  'the first start': { kernels: 0, act: (host) => quietly(host.kernel().start()) },
  'eight first starts': {
    kernels: 0,
    act: (host) => {
      for (let count = 0; count < 8; count += 1) quietly(host.kernel().start());
    },
  },
  'another start': { kernels: 1, act: (host) => quietly(host.kernel().start()) },
  'eight other starts': {
    kernels: 1,
    act: (host) => {
      for (let count = 0; count < 8; count += 1) quietly(host.kernel().start());
    },
  },
  'a restart': { kernels: 3, act: (host) => host.kernels.forEach((kernel) => void quietly(kernel.restart())) },
  'a restart with a family': {
    kernels: 1,
    prepare: FAMILY,
    act: (host) => host.kernels.forEach((kernel) => void quietly(kernel.restart())),
  },
  'closes of kernels': { kernels: 3, act: (host) => host.kernels.forEach((kernel) => void quietly(kernel.close())) },
  'a close of the host': { kernels: 3, prepare: FAMILY, act: (host) => quietly(host.close()) },
  'idle kernels': { kernels: 4, act: () => {} },
  'busy kernels': { kernels: 3, act: onEach('while True: pass') },
  'C code that holds the GIL': { kernels: 2, act: onEach('import ctypes; ctypes.PyDLL(None).sleep(600)') },
  'a family': { kernels: 2, prepare: FAMILY, act: () => {} },
  'a family in the making': { kernels: 2, act: onEach(FAMILY) },
};

async function main(name: string, launch: 'auto' | 'spawn', python: string): Promise<void> {
  const moment = moments[name];
  if (moment === undefined) throw new Error(`no moment "${name}"`);
  const host = new KernelHost({ python, shell: 'plain', launch });
  let template: number | null = null;
  host.on('template', ({ pid }) => {
    template = pid;
  });
  const kernels = Array.from({ length: moment.kernels }, () => host.kernel());
  await Promise.all(kernels.map((kernel) => kernel.execute(moment.prepare ?? 'None')));
  const prepared: Prepared = { template, lives: kernels.map(({ pid }) => pid ?? 0) };
  // An idle host does not hold the event loop open.
  setInterval(() => {}, 60_000);
  writeSync(1, `${JSON.stringify(prepared)}\n`);
  moment.act(host);
}

if (import.meta.main) {
  const [name = '', launch = '', python = ''] = process.argv.slice(2);
  await main(name, launch === 'spawn' ? 'spawn' : 'auto', python);
}
