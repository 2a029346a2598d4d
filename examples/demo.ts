/**
 * The main job, shown: kernels start in milliseconds, cells run, two lives are lost in different ways, the reason is told,
 * and the next cell runs on a new life. `npm start` sets up what is missing and runs this.
 */

import { once } from 'node:events';
import { type CellResult, type ExitReason, type Kernel, KernelDiedError, KernelHost, type Life } from 'kernelhost';

const host = new KernelHost();
try {
  const template = await host.warm();
  console.log(`Python ${template.pythonVersion} (${template.python})`);
  console.log(`template ready in ${ms(template.readyMs)}; from here on kernels are forked from it\n`);

  const kernel = host.kernel();
  showStart(await kernel.start());
  await showCell(kernel, 'data = list(range(1_000_000))');
  await showCell(kernel, 'sum(data)');
  await showCell(kernel, 'import asyncio; await asyncio.sleep(0.05); "awaited"');
  await showCell(kernel, '1 / 0');

  console.log('\n— SIGKILL from outside, while a cell waits for a subprocess —');
  const waiting = 'import subprocess; subprocess.run(["sh", "-c", "echo waiting; exec sleep 300"])';
  const running = kernel.execute(waiting, {
    // The subprocess itself has printed, so it runs.
    onOutput: () => {
      if (kernel.pid !== null) process.kill(kernel.pid, 'SIGKILL');
    },
  });
  await showDeath(kernel, running);

  console.log('\n— SIGSEGV inside a cell —');
  const crash = 'import ctypes; ctypes.string_at(0)';
  await showDeath(kernel, kernel.execute(crash));

  console.log('\n— many at once —');
  const count = 20;
  const begun = performance.now();
  const kernels = Array.from({ length: count }, () => host.kernel());
  const answers = await Promise.all(kernels.map((each, index) => each.execute(`${index} ** 2`)));
  const right = answers.every(({ text }, index) => text === String(index ** 2));
  console.log(
    `${count} kernels started and answered ${right ? 'rightly' : 'WRONGLY'} in ${ms(performance.now() - begun)}`,
  );
  if (!right) process.exitCode = 1;
} finally {
  await host.close();
}

function showStart(life: Life): void {
  const reason = life.launchReason === null ? '' : ` (${life.launchReason})`;
  const how = life.launch === 'fork' ? 'forked' : `spawned${reason}`;
  console.log(`life ${life.generation}: process ${life.pid}, ${how} in ${ms(life.startMs)}, ${life.shell} shell`);
}

async function showCell(kernel: Kernel, code: string): Promise<CellResult> {
  const begun = performance.now();
  const result = await kernel.execute(code);
  const took = ms(performance.now() - begun);
  const shown = result.error === null ? (result.text ?? result.status) : `${result.error.name}: ${result.error.value}`;
  console.log(`  ${took.padStart(9)}  ${code}  →  ${shown}`);
  return result;
}

/** The cell fails, the reason is told, and the next cell has a life that says what it replaced. */
async function showDeath(kernel: Kernel, cell: Promise<CellResult>): Promise<void> {
  const exited = once(kernel, 'exit') as Promise<[ExitReason]>;
  const error = await cell.then(
    () => null,
    (reason: unknown) => reason,
  );
  if (!(error instanceof KernelDiedError)) throw new Error('the kernel should have died', { cause: error });
  const [exit] = await exited;
  console.log(`cause: ${exit.cause}; ${exit.message}`);
  const { life, recovered } = await showCell(kernel, '"the next call is answered"');
  showStart(life);
  if (recovered === null) throw new Error('the result should say which life it replaced');
}

function ms(value: number): string {
  return `${value.toFixed(value < 10 ? 2 : 0)} ms`;
}
