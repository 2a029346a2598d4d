import assert from 'node:assert/strict';
import { test } from 'node:test';
import { KernelDiedError } from '../../ts/errors.ts';
import type { Output } from '../../ts/result.ts';
import { cell, cellOutput, exitReason, failure, MockNative, settled } from '../helpers/mock-native.ts';

function streaming(code = 'x') {
  const native = new MockNative();
  const kernel = native.host().kernel();
  const stream = kernel.stream(code);
  const { request } = native.last('execute');
  const mock = native.kernels[0];
  assert.ok(mock);
  return { native, kernel, stream, request, mock };
}

const turn = () => new Promise((resolve) => setImmediate(resolve));

test('outputs come in order, then the loop ends and the result is there', async () => {
  const { native, stream, request } = streaming();
  assert.equal(native.last('execute').cell?.stream, true);
  const texts: string[] = [];
  const loop = (async () => {
    for await (const output of stream) if (output.kind === 'text') texts.push(output.text);
  })();
  await native.send(cellOutput(request, 'a'), cellOutput(request, 'b'));
  await native.send(cellOutput(request, 'c'), settled(request, { kind: 'cell', cell: cell({ stdout: 'abc' }) }));
  await loop;
  assert.deepEqual(texts, ['a', 'b', 'c']);
  assert.equal((await stream.result).stdout, 'abc');
});

test('credit is given back when the consumer asks for the next output', async () => {
  const { native, stream, request, mock } = streaming();
  const iterator = stream[Symbol.asyncIterator]();
  await native.send(cellOutput(request, 'a', 10), cellOutput(request, 'b', 20));
  await iterator.next();
  await turn();
  assert.equal(mock.credited, 0);
  await iterator.next();
  await turn();
  assert.equal(mock.credited, 10);
  const end = iterator.next();
  await turn();
  assert.equal(mock.credited, 30);
  await native.send(settled(request, { kind: 'cell', cell: cell() }));
  assert.equal((await end).done, true);
});

test('leaving the loop early interrupts the cell, gives all credit back, and the result still settles', async () => {
  const { native, stream, request, mock } = streaming();
  await native.send(cellOutput(request, 'a', 1), cellOutput(request, 'b', 2));
  for await (const _ of stream) break;
  assert.equal(native.last('cancel').request, request);
  await native.send(
    cellOutput(request, 'c', 4),
    settled(request, { kind: 'cell', cell: cell({ status: 'interrupted' }) }),
  );
  assert.equal(mock.credited, 7);
  assert.equal((await stream.result).status, 'interrupted');
});

test('leaving the loop after the cell is over interrupts nothing', async () => {
  const { native, stream, request } = streaming();
  await native.send(cellOutput(request, 'a'), settled(request, { kind: 'cell', cell: cell() }));
  for await (const _ of stream) break;
  assert.equal(native.has('cancel'), false);
});

test('a death is thrown in the loop after the outputs before it, and by result; nobody has to look at both', async () => {
  const { native, stream, request } = streaming();
  const seen: Output[] = [];
  const loop = (async () => {
    for await (const output of stream) seen.push(output);
  })();
  const refused = assert.rejects(loop, KernelDiedError);
  const died = failure('ERR_KERNEL_DIED', { exit: exitReason(), partial: cell() });
  await native.send(cellOutput(request, 'a'), settled(request, { kind: 'failed', failure: died }));
  await refused;
  assert.equal(seen.length, 1);
  await turn();
  await assert.rejects(stream.result, KernelDiedError);
});

test("a stream's error leads back to the line that began the stream", async () => {
  const native = new MockNative();
  const kernel = native.host().kernel();
  function beginsTheStream() {
    return kernel.stream('x');
  }
  const stream = beginsTheStream();
  const reply = { kind: 'failed', failure: failure('ERR_KERNEL_DIED', { exit: exitReason() }) } as const;
  await native.send(settled(native.last('execute').request, reply));
  await assert.rejects(stream.result, (error: Error) => {
    assert.match(error.stack ?? '', /beginsTheStream.*stream\.test\.ts/);
    return true;
  });
});

test('a stream is read once', async () => {
  const { native, stream, request } = streaming();
  stream[Symbol.asyncIterator]();
  assert.throws(() => stream[Symbol.asyncIterator](), { code: 'ERR_STREAM_CONSUMED' });
  await native.send(settled(request, { kind: 'cell', cell: cell() }));
});

test('a stream whose result alone is awaited does not hold up its cell', async () => {
  const { native, stream, request, mock } = streaming();
  await native.send(cellOutput(request, 'a', 5));
  const result = stream.result;
  await turn();
  await native.send(cellOutput(request, 'b', 6));
  assert.equal(mock.credited, 11);
  assert.throws(() => stream[Symbol.asyncIterator](), { code: 'ERR_STREAM_CONSUMED', message: /dropped/ });
  await native.send(settled(request, { kind: 'cell', cell: cell({ stdout: 'ab' }) }));
  assert.equal((await result).stdout, 'ab');
});

test('taking the result first and reading in the same turn keeps every output', async () => {
  const { native, stream, request } = streaming();
  const { result } = stream;
  const iterator = stream[Symbol.asyncIterator]();
  await turn();
  await native.send(cellOutput(request, 'a'), settled(request, { kind: 'cell', cell: cell() }));
  assert.equal((await iterator.next()).done, false);
  assert.equal((await iterator.next()).done, true);
  await result;
});

test('asking for several outputs at once gets each of them', async () => {
  const { native, stream, request } = streaming();
  const iterator = stream[Symbol.asyncIterator]();
  const asked = Promise.all([iterator.next(), iterator.next(), iterator.next()]);
  await native.send(
    cellOutput(request, 'a'),
    cellOutput(request, 'b'),
    settled(request, { kind: 'cell', cell: cell() }),
  );
  assert.deepEqual(
    (await asked).map(({ done, value }) => (done === true ? 'end' : value.kind === 'text' && value.text)),
    ['a', 'b', 'end'],
  );
});

test('a signal aborted before the stream begins starts nothing and rejects with its reason', async () => {
  const native = new MockNative();
  const reason = new Error('no more');
  const stream = native
    .host()
    .kernel()
    .stream('x', { signal: AbortSignal.abort(reason) });
  assert.equal(native.has('execute'), false);
  await assert.rejects(stream.result, reason);
});

test('onOutput belongs to execute', () => {
  const kernel = new MockNative().host().kernel();
  assert.throws(() => kernel.stream('x', { onOutput: () => {} }), { code: 'ERR_INVALID_OPTION', option: 'onOutput' });
});
