/**
 * Spans of starts and cells, as OpenTelemetry has them and without depending on it: put your tracer's `startSpan()` and
 * `span.end()` where this prints. A start is the child of the cell that waits for it.
 * `node examples/trace-cells.ts` prints a line of JSON for each span when it ends.
 */

import { AsyncLocalStorage } from 'node:async_hooks';
import { randomBytes } from 'node:crypto';
import { channel, tracingChannel } from 'node:diagnostics_channel';
import { type ExecuteTrace, type ExitMessage, type Kernel, KernelHost, type StartTrace } from 'kernelhost';

class Span {
  readonly name: string;
  readonly parent: Span | null;
  readonly traceId: string;
  readonly spanId: string = randomBytes(8).toString('hex');
  readonly attributes: Record<string, unknown> = {};
  readonly #begun = performance.timeOrigin + performance.now();

  constructor(name: string, parent: Span | null) {
    this.name = name;
    this.parent = parent;
    this.traceId = parent?.traceId ?? randomBytes(16).toString('hex');
  }

  end(error: unknown = null): void {
    const { name, traceId, spanId, attributes } = this;
    const ended = performance.timeOrigin + performance.now();
    const status = error === null ? { code: 'UNSET' } : { code: 'ERROR', message: String(error) };
    const parentSpanId = this.parent?.spanId ?? null;
    const times = {
      startTime: new Date(this.#begun).toISOString(),
      durationMs: Number((ended - this.#begun).toFixed(3)),
    };
    console.log(JSON.stringify({ name, traceId, spanId, parentSpanId, ...times, status, attributes }));
  }
}

/** The span that the code of the daemon is in, such as that of a request. */
const current = new AsyncLocalStorage<Span>();
const spans = new WeakMap<object, Span>();
/** Calls that are not over, per kernel, in the order in which they were made. */
const pending = new WeakMap<Kernel, Span[]>();
const pendingOf = (kernel: Kernel): Span[] => pending.get(kernel) ?? [];

const executing = tracingChannel<unknown, ExecuteTrace>('kernelhost:execute');
executing.start.subscribe((message) => {
  const call = message as ExecuteTrace;
  const span = new Span('kernelhost.execute', current.getStore() ?? null);
  Object.assign(span.attributes, { 'kernel.id': call.kernel.id, 'code.length': call.code.length });
  spans.set(call, span);
  pending.set(call.kernel, [...pendingOf(call.kernel), span]);
});
executing.asyncEnd.subscribe((message) => {
  const { kernel, result, error } = message as ExecuteTrace;
  const span = spans.get(message as ExecuteTrace);
  if (span === undefined) return;
  pending.set(
    kernel,
    pendingOf(kernel).filter((each) => each !== span),
  );
  if (result !== undefined) {
    const { status, executionCount, life } = result;
    Object.assign(span.attributes, { 'cell.status': status, 'cell.number': executionCount, 'process.pid': life.pid });
  }
  // A cell that raised is an error to whoever reads traces, although the call has a result.
  span.end(error ?? (result?.error ? `${result.error.name}: ${result.error.value}` : null));
});

const starting = tracingChannel<unknown, StartTrace>('kernelhost:start');
starting.start.subscribe((message) => {
  const start = message as StartTrace;
  const span = new Span('kernelhost.start', pendingOf(start.kernel)[0] ?? null);
  span.attributes['kernel.id'] = start.kernel.id;
  spans.set(start, span);
});
starting.asyncEnd.subscribe((message) => {
  const { result, error } = message as StartTrace;
  const span = spans.get(message as StartTrace);
  if (result !== undefined) {
    const { pid, launch, generation } = result;
    Object.assign(span?.attributes ?? {}, { 'process.pid': pid, launch, generation });
  }
  span?.end(error ?? null);
});

channel('kernelhost:exit').subscribe((message) => {
  const { kernel, exit } = message as ExitMessage;
  const span = new Span('kernelhost.exit', null);
  Object.assign(span.attributes, { 'kernel.id': kernel.id, cause: exit.cause, 'exit.message': exit.message });
  span.end();
});

const host = new KernelHost();
try {
  const kernel = host.kernel();
  const request = new Span('request', null);
  await current.run(request, async () => {
    await kernel.execute('sum(range(10))');
    await kernel.execute('1 / 0');
    await kernel.execute('import os; os._exit(7)').catch(() => {});
  });
  request.end();
} finally {
  await host.close();
}
