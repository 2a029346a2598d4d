/** kernelhost itself, every kernel forked from a warm template. */
import { type Kernel, KernelHost } from '../../index.js';
import { copies } from './copies.ts';
import type { CellOutcome, DrivenKernel, Driver, DriverOptions } from './driver.ts';
import { hostCalls } from './host-calls.ts';
import { delivery, picture, pressure } from './output-floods.ts';

/** More than any measure prints, so that the whole output arrives. */
const unlimited = 256 * 1024 * 1024;

export function openIpythonShell(options: DriverOptions): Promise<Driver> {
  return openHost(options, 'ipython');
}

export function openPlainShell(options: DriverOptions): Promise<Driver> {
  return openHost(options, 'plain');
}

async function openHost({ python, folder }: DriverOptions, shell: 'ipython' | 'plain'): Promise<Driver> {
  const host = new KernelHost({ python, shell, launch: 'fork', defaults: { cwd: folder } });
  await host.warm();
  return {
    async startKernel() {
      const kernel = host.kernel();
      const life = await kernel.start();
      return new ForkedKernel(kernel, life.pid);
    },
    close: () => host.close(),
    own: {
      hostCalls: (count) => hostCalls(host, count),
      delivery: (count) => withKernel(host, (kernel) => delivery(kernel, count)),
      picture: (count) => withKernel(host, (kernel) => picture(kernel, count)),
      pressure: (ms) => pressure(host, ms),
      copies: (count, megabytes) => copies(host, count, megabytes),
    },
  };
}

async function withKernel<Result>(host: KernelHost, measure: (kernel: Kernel) => Promise<Result>): Promise<Result> {
  const kernel = host.kernel();
  const result = await measure(kernel);
  await kernel.close({ graceMs: 0 });
  return result;
}

class ForkedKernel implements DrivenKernel {
  readonly pid: number;
  readonly #kernel: Kernel;

  constructor(kernel: Kernel, pid: number) {
    this.#kernel = kernel;
    this.pid = pid;
  }

  async run(code: string, { capped = false }: { capped?: boolean } = {}): Promise<CellOutcome> {
    const { status, text, stdout } = await this.#kernel.execute(code, capped ? {} : { maxOutputBytes: unlimited });
    return { ok: status === 'ok', value: text, stdout };
  }

  end(): Promise<void> {
    return this.#kernel.close({ graceMs: 0 });
  }
}
