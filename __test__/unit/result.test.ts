import assert from 'node:assert/strict';
import { test } from 'node:test';
import { toCellResult } from '../../ts/result.ts';
import { cell, exitReason, life } from '../helpers/mock-native.ts';

test('an empty cell has no value, no error and no outputs', () => {
  assert.deepEqual(toCellResult(cell(), life()), {
    status: 'ok',
    text: null,
    data: null,
    stdout: '',
    stderr: '',
    missing: { stdoutBytes: 0, stderrBytes: 0 },
    missingDisplays: 0,
    displays: [],
    outputs: [],
    error: null,
    executionCount: 1,
    durationMs: 1,
    life: life(),
    recovered: null,
  });
});

test('outputs keep their order and bundles are parsed', () => {
  const result = toCellResult(
    cell({
      stdout: 'a',
      outputs: [
        { kind: 'text', stream: 'stdout', text: 'a' },
        { kind: 'display', dataJson: '{"text/plain":"d"}', metadataJson: '{"k":1}', displayId: 'id', update: false },
        { kind: 'clear', wait: true },
        {
          kind: 'display',
          dataJson: '{"application/json":{"x":[1]}}',
          metadataJson: '{}',
          displayId: 'id',
          update: true,
        },
        { kind: 'value', dataJson: '{"text/plain":"2","text/html":"<b>2</b>"}', metadataJson: '{}' },
      ],
    }),
    life(),
  );
  assert.deepEqual(
    result.outputs.map(({ kind }) => kind),
    ['text', 'display', 'clear', 'display', 'value'],
  );
  assert.deepEqual(result.displays, [
    { data: { 'text/plain': 'd' }, metadata: { k: 1 }, displayId: 'id', update: false },
    { data: { 'application/json': { x: [1] } }, metadata: {}, displayId: 'id', update: true },
  ]);
  assert.equal(result.text, '2');
  assert.deepEqual(result.data, { 'text/plain': '2', 'text/html': '<b>2</b>' });
});

test('a value without text/plain has data and no text', () => {
  const result = toCellResult(
    cell({ outputs: [{ kind: 'value', dataJson: '{"image/png":"eA=="}', metadataJson: '{}' }] }),
    life(),
  );
  assert.equal(result.text, null);
  assert.deepEqual(result.data, { 'image/png': 'eA==' });
});

test('an error is found among the outputs', () => {
  const error = { name: 'ValueError', value: 'no', traceback: ['line'] };
  const result = toCellResult(cell({ status: 'error', outputs: [{ kind: 'error', ...error }] }), life());
  assert.deepEqual(result.error, error);
});

test('what a new life replaced is told', () => {
  const exit = exitReason();
  const result = toCellResult(cell({ recovered: { exit, state: 'fresh', lostCells: 3 } }), life());
  assert.deepEqual(result.recovered, { exit, state: 'fresh', lostCells: 3 });
});
