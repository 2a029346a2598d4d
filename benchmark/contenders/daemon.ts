/**
 * The daemon of a Node contender: answers the requests of `protocol.ts` with the driver named on the command line.
 * Owns the kernels it starts, and ends them when its input ends.
 */
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import type { CellOutcome, DrivenKernel, Driver, DriverOptions, OwnMeasures } from './driver.ts';
import { type Answers, holdAtOnce, type Request, warmUpCells } from './protocol.ts';

type Drivers = Record<string, () => Promise<(options: DriverOptions) => Promise<Driver>>>;

const drivers: Drivers = {
  'zeromq-ipykernel': async () => (await import('./zeromq-ipykernel.ts')).openZeromqIpykernel,
  'json-lines': async () => (await import('./json-lines.ts')).openJsonLines,
  kernelhost: async () => (await import('./kernelhost.ts')).openIpythonShell,
  'kernelhost-plain': async () => (await import('./kernelhost.ts')).openPlainShell,
};

class Daemon {
  readonly #driver: Driver;
  readonly #main: DrivenKernel;
  #held: DrivenKernel[] = [];

  private constructor(driver: Driver, main: DrivenKernel) {
    this.#driver = driver;
    this.#main = main;
  }

  static async open(name: string, options: DriverOptions): Promise<Daemon> {
    const load = drivers[name];
    if (load === undefined) throw new Error(`no driver '${name}': one of ${Object.keys(drivers).join(', ')}`);
    const driver = await (await load())(options);
    const daemon = new Daemon(driver, await driver.startKernel());
    for (let cell = 0; cell < warmUpCells; cell += 1) await runOne(daemon.#main);
    return daemon;
  }

  async start(): Promise<Answers['start']> {
    const began = performance.now();
    const kernel = await this.#driver.startKernel();
    const ms = performance.now() - began;
    await kernel.end();
    return { ms };
  }

  async cells(count: number): Promise<Answers['cells']> {
    const ms: number[] = [];
    for (let cell = 0; cell < count; cell += 1) {
      const began = performance.now();
      const outcome = await this.#main.run('1+1');
      ms.push(performance.now() - began);
      assertTwo(outcome);
    }
    return { ms };
  }

  async many(count: number): Promise<Answers['many']> {
    const kernels: DrivenKernel[] = [];
    const began = performance.now();
    const outcomes = await Promise.allSettled(
      Array.from({ length: count }, async () => {
        const kernel = await this.#driver.startKernel();
        kernels.push(kernel);
        await runOne(kernel);
      }),
    );
    const ms = performance.now() - began;
    await Promise.all(kernels.map((kernel) => kernel.end()));
    return { ms, succeeded: outcomes.filter((outcome) => outcome.status === 'fulfilled').length };
  }

  async hold(count: number): Promise<Answers['hold']> {
    const startUpTo = async (): Promise<void> => {
      for (; left > 0; ) {
        left -= 1;
        const kernel = await this.#driver.startKernel();
        this.#held.push(kernel);
        await runOne(kernel);
      }
    };
    let left = count;
    await Promise.all(Array.from({ length: holdAtOnce }, startUpTo));
    return { pids: this.#held.map((kernel) => kernel.pid) };
  }

  async release(): Promise<Answers['release']> {
    await Promise.all(this.#held.splice(0).map((kernel) => kernel.end()));
    return {};
  }

  async death(): Promise<Answers['death']> {
    const kernel = await this.#driver.startKernel();
    const told = kernel.run('import time; time.sleep(600)').then(
      () => {
        throw new Error('a killed cell ended well');
      },
      () => performance.now(),
    );
    // Long enough for the cell to be asleep, wherever the contender's own clocks stand.
    await sleep(150 + Math.random() * 100);
    const killed = performance.now();
    process.kill(kernel.pid, 'SIGKILL');
    const ms = (await told) - killed;
    await kernel.end();
    return { ms };
  }

  async lines(count: number): Promise<Answers['lines']> {
    const began = performance.now();
    const { stdout } = await this.#main.run(`for i in range(${count}): print(i)`);
    return { ms: performance.now() - began, lines: stdout.split('\n').length - 1 };
  }

  async bulk(bytes: number, capped: boolean): Promise<Answers['bulk']> {
    const began = performance.now();
    const { stdout } = await this.#main.run(`print(('x' * 99 + '\\n') * ${bytes / 100}, end='')`, { capped });
    return { ms: performance.now() - began, received: stdout.length };
  }

  get own(): OwnMeasures {
    if (this.#driver.own === undefined) throw new Error('only kernelhost is measured by this');
    return this.#driver.own;
  }

  async close(): Promise<Answers['close']> {
    await this.release();
    await this.#main.end();
    await this.#driver.close();
    return {};
  }
}

async function runOne(kernel: DrivenKernel): Promise<void> {
  assertTwo(await kernel.run('1+1'));
}

function assertTwo(outcome: CellOutcome): void {
  if (!outcome.ok || outcome.value !== '2') throw new Error(`1+1 gave ${JSON.stringify(outcome)}`);
}

async function answer(request: Request): Promise<Answers[Request['do']]> {
  if (request.do === 'open') {
    daemon = await Daemon.open(process.argv[2] ?? '', request);
    return {};
  }
  if (daemon === null) throw new Error(`'${request.do}' before 'open'`);
  switch (request.do) {
    case 'start':
      return daemon.start();
    case 'cells':
      return daemon.cells(request.count);
    case 'many':
      return daemon.many(request.count);
    case 'hold':
      return daemon.hold(request.count);
    case 'release':
      return daemon.release();
    case 'death':
      return daemon.death();
    case 'lines':
      return daemon.lines(request.count);
    case 'bulk':
      return daemon.bulk(request.bytes, request.capped);
    case 'host-calls':
      return daemon.own.hostCalls(request.count);
    case 'delivery':
      return daemon.own.delivery(request.count);
    case 'picture':
      return daemon.own.picture(request.count);
    case 'pressure':
      return daemon.own.pressure(request.ms);
    case 'copies':
      return daemon.own.copies(request.count, request.megabytes);
    case 'close':
      return daemon.close();
  }
}

let daemon: Daemon | null = null;
for await (const line of createInterface({ input: process.stdin })) {
  const reply = await answer(JSON.parse(line)).catch((error: Error) => ({ error: error.message }));
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}
// End of input: `close` was answered, or the benchmark is gone and the kernels end with their daemon.
process.exit(0);
