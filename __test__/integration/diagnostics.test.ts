/** What is published on the diagnostics channels, and that nothing is while nobody subscribes. */

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { channel, tracingChannel } from 'node:diagnostics_channel';
import { join } from 'node:path';
import { test } from 'node:test';
import { promisify } from 'node:util';
import {
  type CellResult,
  type ExecuteTrace,
  type ExitMessage,
  KernelDiedError,
  KernelStartError,
  type Life,
  type StartTrace,
} from 'kernelhost';
import { pythonForTests, startHost, startKernel, type TestContext, temporaryFolder } from '../helpers/index.ts';
import { cell, MockNative, settled } from '../helpers/mock-native.ts';

const phases = ['start', 'end', 'asyncStart', 'asyncEnd', 'error'] as const;

interface Heard<Message> {
  phase: (typeof phases)[number];
  message: Message;
}

/** Everything that a tracing channel publishes until the test is over, in order. */
function listen<Message extends object>(t: TestContext, name: string, log: Heard<Message>[] = []): Heard<Message>[] {
  const tracing = tracingChannel<unknown, Message>(name);
  const hear = (phase: Heard<Message>['phase']) => (message: Message) => void log.push({ phase, message });
  const subscribers = {
    start: hear('start'),
    end: hear('end'),
    asyncStart: hear('asyncStart'),
    asyncEnd: hear('asyncEnd'),
    error: hear('error'),
  };
  tracing.subscribe(subscribers);
  t.after(() => void tracing.unsubscribe(subscribers));
  return log;
}

const phasesOf = (log: Heard<object>[]): string[] => log.map(({ phase }) => phase);
const well = ['start', 'end', 'asyncStart', 'asyncEnd'];
const badly = ['start', 'end', 'error', 'asyncStart', 'asyncEnd'];

test('a cell: one object goes through start, end, asyncStart and asyncEnd', async (t) => {
  const { kernel } = await startKernel(t);
  const log = listen<ExecuteTrace>(t, 'kernelhost:execute');
  const call = kernel.execute('6 * 7', { timeoutMs: 5000 });
  assert.deepEqual(phasesOf(log), ['start', 'end'], 'published before execute() returns');
  const begun = log[0]?.message;
  assert.deepEqual([begun?.code, begun?.silent, begun?.timeoutMs, begun?.result], ['6 * 7', false, 5000, undefined]);
  assert.equal(begun?.kernel, kernel);
  const result = await call;
  assert.deepEqual(phasesOf(log), well);
  assert.ok(log.every(({ message }) => message === begun));
  assert.equal(begun?.result, result);
  assert.ok(!('error' in (begun ?? {})));
});

test('a cell that raised has a result; a call that rejects has an error', async (t) => {
  const { kernel } = await startKernel(t);
  const log = listen<ExecuteTrace>(t, 'kernelhost:execute');
  await kernel.execute('1 / 0');
  assert.deepEqual(phasesOf(log), well);
  assert.equal(log[0]?.message.result?.status, 'error');
  log.length = 0;
  let error: unknown;
  await kernel.execute('import os; os._exit(3)').catch((reason: unknown) => {
    error = reason;
  });
  assert.ok(error instanceof KernelDiedError);
  assert.deepEqual(phasesOf(log), badly);
  assert.equal(log[0]?.message.error, error);
  assert.equal(log[0]?.message.result, undefined);
});

test('streams and calls with a listener are told as well, and what has wrong options is not', async (t) => {
  const { kernel } = await startKernel(t);
  const log = listen<ExecuteTrace>(t, 'kernelhost:execute');
  const heard: string[] = [];
  await kernel.execute('print("a")', { onOutput: (output) => void heard.push(output.kind), silent: true });
  assert.deepEqual(heard, ['text']);
  assert.equal(log[0]?.message.silent, true);
  const stream = kernel.stream('print("b")\n2');
  for await (const _ of stream);
  const result: CellResult = await stream.result;
  assert.deepEqual(phasesOf(log), [...well, ...well]);
  assert.equal(log.at(-1)?.message.result, result);
  await assert.rejects(kernel.execute('x', { timeoutMs: -1 }));
  assert.equal(log.length, 8);
});

test('AsyncLocalStorage bound to start has its store while the call is made, and nowhere else', async (t) => {
  const { kernel } = await startKernel(t);
  const { AsyncLocalStorage } = await import('node:async_hooks');
  const storage = new AsyncLocalStorage<string>();
  const tracing = tracingChannel<string, ExecuteTrace>('kernelhost:execute');
  tracing.start.bindStore(storage, ({ code }) => `span of ${code}`);
  t.after(() => void tracing.start.unbindStore(storage));
  const seen: unknown[] = [];
  const end = () => void seen.push(storage.getStore());
  tracing.end.subscribe(end);
  t.after(() => void tracing.end.unsubscribe(end));
  await kernel.execute('1');
  assert.deepEqual([...seen, storage.getStore()], ['span of 1', undefined]);
});

test('every launch is told, whoever caused it, and a call to a kernel that is up is none', async (t) => {
  const log = listen<StartTrace>(t, 'kernelhost:start');
  const kernel = startHost(t).kernel();
  const first = await kernel.start();
  assert.deepEqual(phasesOf(log), well, 'start()');
  assert.deepEqual(log[0]?.message.result, first);
  assert.equal(log[0]?.message.kernel, kernel);
  await kernel.start();
  await kernel.execute('1');
  assert.equal(log.length, 4);

  await kernel.kill();
  const { life } = await kernel.execute('1');
  assert.deepEqual(phasesOf(log), [...well, ...well], 'the next call after a death');
  assert.deepEqual(log.at(-1)?.message.result, life);

  const restarted: Life = await kernel.restart();
  assert.deepEqual(phasesOf(log), [...well, ...well, ...well], 'restart()');
  assert.deepEqual(log.at(-1)?.message.result, restarted);
  assert.equal(new Set(log.map(({ message }) => message)).size, 3);
});

test('the addon is asked for the states of a kernel only while somebody watches its launches', async (t) => {
  const native = new MockNative();
  const kernel = native.host().kernel();
  const asked = async () => {
    const call = kernel.execute('1');
    await native.send(settled(native.last('execute').request, { kind: 'cell', cell: cell() }));
    await call;
    return native.kernels[0]?.watched.state;
  };
  assert.equal(await asked(), false);
  const subscriber = () => {};
  const { asyncEnd } = tracingChannel<unknown, StartTrace>('kernelhost:start');
  asyncEnd.subscribe(subscriber);
  t.after(() => void asyncEnd.unsubscribe(subscriber));
  assert.equal(await asked(), true);
  kernel.on('state', subscriber).off('state', subscriber);
  assert.equal(native.kernels[0]?.watched.state, true);
  asyncEnd.unsubscribe(subscriber);
  assert.equal(await asked(), false);
});

test('a life that does not come up is an error, also when its start is given up', async (t) => {
  const log = listen<StartTrace>(t, 'kernelhost:start');
  const host = startHost(t);
  const failing = host.kernel({ init: '1 / 0' });
  let error: unknown;
  await failing.start().catch((reason: unknown) => {
    error = reason;
  });
  assert.ok(error instanceof KernelStartError);
  assert.deepEqual(phasesOf(log), badly);
  assert.equal(log[0]?.message.error, error);

  log.length = 0;
  const slow = host.kernel({ init: 'import time; time.sleep(60)' });
  const start = slow.start().catch((reason: unknown) => reason);
  slow.once('state', () => void slow.close());
  await start;
  await slow.close();
  assert.deepEqual(phasesOf(log), badly);
  assert.match(String(log[0]?.message.error), /kernel-2.* given up/);
});

test('an exit is published once per life, after the call it failed and before the event', async (t) => {
  const { kernel } = await startKernel(t);
  const order: string[] = [];
  const messages: ExitMessage[] = [];
  const hear = (message: unknown) => {
    messages.push(message as ExitMessage);
    order.push('published');
  };
  channel('kernelhost:exit').subscribe(hear);
  t.after(() => void channel('kernelhost:exit').unsubscribe(hear));
  kernel.on('exit', () => order.push('event'));
  await kernel.execute('import os; os._exit(3)').catch(() => order.push('rejected'));
  await kernel.start();
  assert.deepEqual(order, ['rejected', 'published', 'event']);
  assert.equal(messages[0]?.kernel, kernel);
  assert.equal(messages[0]?.exit, kernel.lastExit);
});

test('examples/trace-cells.ts prints the spans of its cells', async (t) => {
  const example = join(import.meta.dirname, '../../examples/trace-cells.ts');
  const env = { ...process.env, KERNELHOST_PYTHON: pythonForTests(), NODE_OPTIONS: '' };
  const { stdout } = await promisify(execFile)(process.execPath, [example], {
    env,
    cwd: temporaryFolder(t),
    timeout: 60_000,
  });
  const spans = stdout
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Record<string, unknown> & { attributes: Record<string, unknown> });
  assert.deepEqual(
    spans.map(({ name }) => name),
    ['kernelhost.start', ...Array(3).fill('kernelhost.execute'), 'request', 'kernelhost.exit'],
  );
  const [start, first, raised, fatal, request, exit] = spans;
  assert.equal(start?.parentSpanId, first?.spanId);
  for (const span of [first, raised, fatal]) assert.equal(span?.parentSpanId, request?.spanId);
  for (const span of [start, first, raised, fatal]) assert.equal(span?.traceId, request?.traceId);
  assert.equal(first?.attributes['cell.status'], 'ok');
  assert.deepEqual(raised?.status, { code: 'ERROR', message: 'ZeroDivisionError: division by zero' });
  assert.match(JSON.stringify(fatal?.status), /"ERROR".*kernel-1/);
  assert.match(String(exit?.attributes['exit.message']), /7/);
});
