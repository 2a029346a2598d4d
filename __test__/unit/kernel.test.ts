import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { join } from 'node:path';
import { test } from 'node:test';
import { KernelDiedError } from '../../ts/errors.ts';
import { cell, cellOutput, exitReason, failure, life, MockNative, settled, text } from '../helpers/mock-native.ts';

function hosted() {
  const native = new MockNative();
  const host = native.host();
  const kernel = host.kernel();
  const mock = native.kernels[0];
  assert.ok(mock);
  return { native, host, kernel, mock };
}

const turn = () => new Promise((resolve) => setImmediate(resolve));
const died = () => failure('ERR_KERNEL_DIED', { exit: exitReason(), partial: cell({ stdout: 'half' }) });

test('making a host or a kernel asks the addon for nothing', () => {
  const { native, kernel } = hosted();
  assert.deepEqual(native.calls, []);
  assert.equal(kernel.state, 'absent');
  assert.equal(kernel.lastExit, null);
});

test('execute resolves with the result', async () => {
  const { native, kernel } = hosted();
  const running = kernel.execute('1+1', { timeoutMs: 5, silent: true });
  const { request, cell: asked } = native.last('execute');
  assert.deepEqual(asked, { code: '1+1', silent: true, timeoutMs: 5, maxOutputBytes: null, stream: false });
  const value = { kind: 'value', dataJson: '{"text/plain":"2"}', metadataJson: '{}' } as const;
  await native.send(settled(request, { kind: 'cell', cell: cell({ outputs: [value] }) }));
  assert.equal((await running).text, '2');
});

test("a failure is thrown with the caller's own line in its stack", async () => {
  const { native, kernel } = hosted();
  async function callerOfExecute() {
    await kernel.execute('x');
  }
  const refused = assert.rejects(callerOfExecute(), (error: Error) => {
    assert.match(error.stack ?? '', /callerOfExecute.*kernel\.test\.ts/);
    return error instanceof KernelDiedError && error.partial?.stdout === 'half';
  });
  await native.send(settled(native.last('execute').request, { kind: 'failed', failure: died() }));
  await refused;
});

test('a caller sees its rejection before the exit event, and lastExit in both', async () => {
  const { native, host, kernel } = hosted();
  const log: string[] = [];
  kernel.on('exit', (exit) => log.push(`exit ${kernel.lastExit === exit}`));
  host.on('exit', (which, exit) => log.push(`host exit ${which === kernel && kernel.lastExit === exit}`));
  kernel.on('start', ({ generation }) => log.push(`start ${generation}`));
  const call = kernel.execute('x').catch(() => log.push(`rejected ${kernel.lastExit?.generation}`));
  await native.send(
    settled(native.last('execute').request, { kind: 'failed', failure: died() }),
    { kind: 'exited', kernel: 1, exit: exitReason() },
    { kind: 'started', kernel: 1, life: life(2) },
  );
  await call;
  assert.deepEqual(log, ['start 1', 'rejected 1', 'exit true', 'host exit true', 'start 2']);
});

test('start event, then start resolves', async () => {
  const { native, host, kernel } = hosted();
  const log: string[] = [];
  host.on('start', (which, { pid }) => log.push(`event ${which.id} ${pid}`));
  const start = kernel.start().then(({ pid }) => log.push(`start ${pid}`));
  await native.send(
    { kind: 'started', kernel: 1, life: life() },
    settled(native.last('start').request, { kind: 'life', life: life() }),
  );
  await start;
  assert.deepEqual(log, ['event kernel-1 1001', 'start 1001']);
});

// --- onOutput ---

test('outputs reach onOutput one after the other, and execute waits for the last', async () => {
  const { native, kernel, mock } = hosted();
  const log: string[] = [];
  const gates: (() => void)[] = [];
  const call = kernel
    .execute('x', {
      onOutput: async (output) => {
        log.push(`begin ${output.kind === 'text' ? output.text : ''}`);
        await new Promise<void>((resolve) => gates.push(resolve));
        log.push('end');
      },
    })
    .then(() => log.push('resolved'));
  const { request } = native.last('execute');
  await native.send(
    cellOutput(request, 'a', 3),
    cellOutput(request, 'b', 4),
    settled(request, { kind: 'cell', cell: cell() }),
  );
  assert.deepEqual(log, ['begin a']);
  assert.equal(mock.credited, 0);
  gates.shift()?.();
  await turn();
  assert.deepEqual(log, ['begin a', 'end', 'begin b']);
  assert.equal(mock.credited, 3);
  gates.shift()?.();
  await call;
  assert.deepEqual(log, ['begin a', 'end', 'begin b', 'end', 'resolved']);
  assert.equal(mock.credited, 7);
});

test('a flood of outputs in one batch reaches its listener whole, and costs few credit calls', async () => {
  const { native, kernel, mock } = hosted();
  let text = '';
  const call = kernel.execute('x', {
    onOutput: (output) => {
      if (output.kind === 'text') text += output.text;
    },
  });
  const { request } = native.last('execute');
  await native.send(
    ...Array.from({ length: 1000 }, (_, i) => cellOutput(request, `${i} `, 2)),
    settled(request, { kind: 'cell', cell: cell() }),
  );
  await call;
  assert.equal(text, Array.from({ length: 1000 }, (_, i) => `${i} `).join(''));
  assert.equal(mock.credited, 2000);
  assert.ok(mock.creditCalls < 50, String(mock.creditCalls));
});

for (const [title, body, expected] of [
  ['throws an Error', '() => { throw new Error("mine") }', 'uncaughtException mine'],
  ['throws a string', '() => { throw "mine" }', 'uncaughtException mine'],
  ['throws undefined', '() => { throw undefined }', 'uncaughtException undefined'],
  ['rejects', 'async () => { throw new Error("mine") }', 'unhandledRejection mine'],
  [
    'returns a thenable whose getter throws',
    '() => ({ get then() { throw new Error("mine") } })',
    'uncaughtException mine',
  ],
] as const) {
  test(`onOutput that ${title}: ordinary rules for the error, nothing happens to the cell`, () => {
    assert.deepEqual(listenerScript(`kernel.execute('x', { onOutput: ${body} })`), [
      expected,
      expected,
      'cell ok',
      'exit event',
    ]);
  });
}

test('an event listener that throws does not stop the listeners of the host, nor later events', () => {
  assert.deepEqual(listenerScript(`(kernel.on('exit', () => { throw new Error('mine') }), kernel.execute('x'))`), [
    'uncaughtException mine',
    'cell ok',
    'exit event',
  ]);
});

/** Runs a listener against a mock in a process of its own, because what it throws ends up at the process. */
function listenerScript(call: string): string[] {
  const here = import.meta.dirname;
  const script = `
    import { MockNative, cell, cellOutput, exitReason, settled } from ${JSON.stringify(join(here, '../helpers/mock-native.ts'))};
    const text = (error) => String(error?.message ?? error);
    process.on('uncaughtException', (error, origin) => console.log(origin, text(error)));
    process.on('unhandledRejection', (error) => console.log('unhandledRejection', text(error)));
    const native = new MockNative();
    const host = native.host();
    const kernel = host.kernel();
    host.on('exit', () => console.log('exit event'));
    const running = ${call}.then(({ status }) => console.log('cell', status));
    const { request } = native.last('execute');
    await native.send(cellOutput(request, 'a'), cellOutput(request, 'b'), settled(request, { kind: 'cell', cell: cell() }),
      { kind: 'exited', kernel: 1, exit: exitReason() });
    await running;
  `;
  const { stdout, stderr, status } = spawnSync(process.execPath, ['--input-type=module', '-e', script], {
    encoding: 'utf8',
    timeout: 20_000,
  });
  assert.equal(status, 0, stderr);
  const lines = stdout.trim().split('\n');
  // The order in which Node reports an error and runs a promise is Node's own.
  return lines.sort((a, b) => rank(a) - rank(b));
}

function rank(line: string): number {
  return ['unhandledRejection', 'uncaughtException'].some((kind) => line.startsWith(kind)) && !line.includes('exit')
    ? 0
    : 1;
}

// --- abort, in every order ---

test('aborted before the call: nothing is asked for, and the reason is thrown', async () => {
  const { native, kernel } = hosted();
  const reason = new Error('mine');
  await assert.rejects(kernel.execute('x', { signal: AbortSignal.abort(reason) }), reason);
  await assert.rejects(kernel.start({ signal: AbortSignal.abort(reason) }), reason);
  assert.deepEqual(native.calls, []);
});

test('aborted before the cell began: cancelled, and the reason is thrown', async () => {
  const { native, kernel } = hosted();
  const controller = new AbortController();
  const call = kernel.execute('x', { signal: controller.signal });
  const { request } = native.last('execute');
  const reason = { any: 'thing' };
  controller.abort(reason);
  assert.equal(native.last('cancel').request, request);
  const refused = assert.rejects(call, (error) => error === reason);
  await native.send(settled(request, { kind: 'failed', failure: failure('ERR_ABORTED') }));
  await refused;
});

test('aborted while it runs: resolves as interrupted, or rejects when the life had to end', async () => {
  for (const outcome of ['interrupted', 'died'] as const) {
    const { native, kernel } = hosted();
    const controller = new AbortController();
    const call = kernel.execute('x', { signal: controller.signal });
    const { request } = native.last('execute');
    controller.abort();
    if (outcome === 'interrupted') {
      await native.send(settled(request, { kind: 'cell', cell: cell({ status: 'interrupted' }) }));
      assert.equal((await call).status, 'interrupted');
    } else {
      const refused = assert.rejects(call, KernelDiedError);
      await native.send(settled(request, { kind: 'failed', failure: died() }));
      await refused;
    }
  }
});

test('aborted after the cell is over: nothing happens, and no listener is left on the signal', async () => {
  const { native, kernel } = hosted();
  const controller = new AbortController();
  let added = 0;
  const { signal } = controller;
  const add = signal.addEventListener.bind(signal);
  const remove = signal.removeEventListener.bind(signal);
  signal.addEventListener = (...args: Parameters<typeof add>) => {
    added += 1;
    add(...args);
  };
  signal.removeEventListener = (...args: Parameters<typeof remove>) => {
    added -= 1;
    remove(...args);
  };
  const call = kernel.execute('x', { signal });
  await native.send(settled(native.last('execute').request, { kind: 'cell', cell: cell() }));
  assert.equal((await call).status, 'ok');
  assert.equal(added, 0);
  controller.abort();
  assert.equal(native.has('cancel'), false);
});

test('an aborted start is cancelled and throws the reason', async () => {
  const { native, kernel } = hosted();
  const controller = new AbortController();
  const call = kernel.start({ signal: controller.signal });
  controller.abort();
  const { request } = native.last('cancel');
  assert.equal(request, native.last('start').request);
  const refused = assert.rejects(call, { name: 'AbortError' });
  await native.send(settled(request, { kind: 'failed', failure: failure('ERR_ABORTED') }));
  await refused;
});

// --- verbs ---

test('kill names the signal and resolves with the exit', async () => {
  const { native, kernel } = hosted();
  const call = kernel.kill('SIGTERM');
  assert.equal(native.last('kill').signal, 15);
  await native.send(settled(native.last('kill').request, { kind: 'exit', exit: exitReason() }));
  assert.deepEqual(await call, exitReason());
  assert.deepEqual(kernel.lastExit, exitReason());
  await assert.rejects(kernel.kill('SIGNONE' as never), { code: 'ERR_INVALID_OPTION', option: 'signal' });
});

test('interrupt, restart and usage answer with what the addon says', async () => {
  const { native, kernel } = hosted();
  const usage = { rssBytes: 1, pssBytes: 2, cpuMs: 3, threads: 4, processes: 5 };
  const calls = [kernel.interrupt(), kernel.restart(), kernel.usage()];
  await native.send(
    settled(native.last('interrupt').request, { kind: 'done' }),
    settled(native.last('restart').request, { kind: 'life', life: life(2) }),
    settled(native.last('usage').request, { kind: 'usage', usage }),
  );
  assert.deepEqual(await Promise.all(calls), [undefined, life(2), usage]);
});

test('a reply of another kind than was asked for is a bug and says so', async () => {
  const { native, kernel } = hosted();
  const refused = assert.rejects(kernel.restart(), { code: 'ERR_INTERNAL', message: /bug in kernelhost/ });
  await native.send(settled(native.last('restart').request, { kind: 'done' }));
  await refused;
});

// --- listeners and the addon ---

test('the addon is told which frequent events are wanted, also after every listener was removed', () => {
  const { kernel, mock } = hosted();
  assert.deepEqual(mock.watched, { output: false, state: false });
  const listener = () => {};
  kernel.on('output', listener);
  assert.deepEqual(mock.watched, { output: true, state: false });
  kernel.once('state', listener);
  assert.deepEqual(mock.watched, { output: true, state: true });
  kernel.off('output', listener);
  assert.deepEqual(mock.watched, { output: false, state: true });
  kernel.removeAllListeners();
  assert.deepEqual(mock.watched, { output: false, state: false });
  kernel.on('output', listener);
  assert.deepEqual(mock.watched, { output: true, state: false });
});

test('background output, states and warnings come as events', async () => {
  const { native, host, kernel } = hosted();
  const log: unknown[] = [];
  kernel.on('output', (output) => log.push(output));
  kernel.on('state', (state) => log.push(state));
  kernel.on('warning', (warning) => log.push(warning));
  host.on('warning', ({ code }) => log.push(`host ${code}`));
  await native.send(
    { kind: 'output', kernel: 1, output: text('late') },
    { kind: 'state', kernel: 1, state: 'idle' },
    { kind: 'warning', kernel: 1, code: 'w', message: 'm' },
    { kind: 'warning', kernel: null, code: 'h', message: 'm' },
  );
  assert.deepEqual(log, [text('late'), 'idle', { code: 'w', message: 'm' }, 'host w', 'host h']);
});

// --- closing ---

test('closing a kernel twice asks once, and the host lists it no more', async () => {
  const { native, host, kernel } = hosted();
  assert.deepEqual(host.kernels, [kernel]);
  const calls = Promise.all([kernel.close({ graceMs: 7 }), kernel.close(), kernel[Symbol.asyncDispose]()]);
  assert.equal(native.last('close').graceMs, 7);
  await native.send(settled(native.last('close').request, { kind: 'done' }));
  await calls;
  assert.equal(native.calls.filter(({ verb }) => verb === 'close').length, 1);
  assert.deepEqual(host.kernels, []);
});

test('after the host is closed everything answers ERR_KERNEL_CLOSED at once, and close resolves', async () => {
  const { native, host, kernel } = hosted();
  const pending = kernel.execute('x');
  const closed = Promise.all([host.close(), host.close()]);
  assert.throws(() => host.kernel(), { code: 'ERR_KERNEL_CLOSED' });
  const refused = assert.rejects(pending, { code: 'ERR_KERNEL_CLOSED' });
  await native.send(settled(native.last('close-host').request, { kind: 'done' }));
  await closed;
  await refused;
  assert.equal(native.calls.filter(({ verb }) => verb === 'close-host').length, 1);
  assert.equal(kernel.state, 'closed');
  for (const call of [
    kernel.execute('1'),
    kernel.start(),
    kernel.restart(),
    kernel.kill(),
    kernel.usage(),
    host.warm(),
  ]) {
    await assert.rejects(call, { code: 'ERR_KERNEL_CLOSED' });
  }
  await kernel.close();
  await host.close();
  await host[Symbol.asyncDispose]();
});

test('kernels are numbered within their host, and each has its own environment and options', () => {
  const native = new MockNative();
  const host = native.host({ defaults: { inheritEnv: [], startTimeoutMs: 9 } });
  const [one, two] = [host.kernel(), host.kernel({ env: { A: '1' } })];
  assert.deepEqual([one.id, two.id], ['kernel-1', 'kernel-2']);
  assert.deepEqual(
    native.kernels.map(({ options }) => options.environment),
    [[], [{ name: 'A', value: '1' }]],
  );
  assert.equal(native.kernels[1]?.options.startTimeoutMs, 9);
});

test('warm gives the template, with the environment of the defaults', async () => {
  const native = new MockNative();
  const host = native.host({ defaults: { env: { A: '1' } } });
  const warm = host.warm();
  const { request, environment } = native.last('warm');
  assert.deepEqual(environment, [{ name: 'A', value: '1' }]);
  const template = {
    pid: 5,
    state: 'ready',
    python: 'p',
    pythonVersion: '3.13.0',
    preloaded: [],
    readyMs: 1,
    exit: null,
  } as const;
  await native.send(settled(request, { kind: 'template', template: { ...template, preloaded: [] } }));
  assert.deepEqual(await warm, template);
});

// --- the event loop ---

for (const [title, code, alive] of [
  ['an idle host does not keep Node alive', 'void host.kernel();', false],
  ['a pending call does', 'void host.kernel().execute("1");', true],
  ['a host with listeners does not', 'host.on("exit", () => {}); host.kernel().on("output", () => {});', false],
] as const) {
  test(title, () => {
    const script = `
      import { MockNative } from ${JSON.stringify(join(import.meta.dirname, '../helpers/mock-native.ts'))};
      const host = new MockNative().host();
      ${code}
      setTimeout(() => { console.log('alive'); process.exit(); }, 300).unref();
    `;
    const { stdout, status, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', script], {
      encoding: 'utf8',
      timeout: 20_000,
    });
    assert.equal(status, 0, stderr);
    assert.equal(stdout.includes('alive'), alive);
  });
}
