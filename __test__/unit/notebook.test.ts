/** How outputs become those of a notebook; whether the whole is valid is asked of nbformat in the integration tests. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { CellHistory } from '../../ts/cell-history.ts';
import type { NativeOutput } from '../../ts/native.ts';
import { type NotebookOutput, type NotebookResult, toNotebook, toNotebookCell } from '../../ts/notebook.ts';
import type { Output } from '../../ts/result.ts';
import { cell, failure, life, MockNative, settled } from '../helpers/mock-native.ts';

function result(outputs: Output[], change: Partial<NotebookResult> = {}): NotebookResult {
  const missing = { stdoutBytes: 0, stderrBytes: 0 };
  return { outputs, executionCount: 3, status: 'ok', missing, life: life(), ...change };
}

const out = (text: string): Output => ({ kind: 'text', stream: 'stdout', text });
const err = (text: string): Output => ({ kind: 'text', stream: 'stderr', text });
const clear = (wait: boolean): Output => ({ kind: 'clear', wait });
function shown(text: string, displayId: string | null = null, update = false): Output {
  return { kind: 'display', display: { data: { 'text/plain': text }, metadata: {}, displayId, update } };
}

/** One word per output. */
function words(outputs: readonly NotebookOutput[]): string[] {
  return outputs.map((output) => {
    if (output.output_type === 'stream') return `${output.name} ${[output.text].flat().join('')}`;
    if (output.output_type === 'error') return `error ${output.ename}`;
    return `${output.output_type} ${[output.data['text/plain']].flat().join('')}`;
  });
}

const cases: [string, Output[], string[]][] = [
  [
    'neighbouring texts of a stream are one output',
    [out('a'), out('b'), err('c'), out('d')],
    ['stdout ab', 'stderr c', 'stdout d'],
  ],
  ['a display parts the text around it', [out('a'), shown('x'), out('b')], ['stdout a', 'display_data x', 'stdout b']],
  [
    'an update changes what was shown',
    [shown('1', 'i'), out('a'), shown('2', 'i', true)],
    ['display_data 2', 'stdout a'],
  ],
  ['an update of nothing is left out', [shown('2', 'i', true), out('a')], ['stdout a']],
  [
    'text around an update is still one output',
    [shown('1', 'i'), out('a'), shown('2', 'i', true), out('b')],
    ['display_data 2', 'stdout ab'],
  ],
  ['a new display updates those of its id', [shown('1', 'i'), shown('2', 'i')], ['display_data 2', 'display_data 2']],
  ['clear_output takes away what was there', [out('a'), shown('x'), clear(false), out('b')], ['stdout b']],
  ['text after clear_output begins anew', [out('a'), clear(false), out('b'), out('c')], ['stdout bc']],
  ['clear_output(wait=True) waits for the next output', [out('a'), clear(true), out('b'), out('c')], ['stdout bc']],
  ['clear_output(wait=True) at the end clears nothing', [out('a'), clear(true)], ['stdout a']],
  ['what is cleared is updated no more', [shown('1', 'i'), clear(false), shown('2', 'i', true)], []],
  [
    'an update is no output that clear_output(wait=True) waits for',
    [shown('1', 'i'), clear(true), shown('2', 'i', true)],
    ['display_data 2'],
  ],
  [
    'clear_output() takes the place of one that waits',
    [out('a'), clear(true), clear(false), out('b'), out('c')],
    ['stdout bc'],
  ],
];

for (const [name, outputs, expected] of cases) {
  test(name, () => assert.deepEqual(words(toNotebookCell('x', result(outputs)).outputs), expected));
}

test('a cell has the shape of the format', () => {
  const outputs: Output[] = [
    out('a\nb\r\nc'),
    { kind: 'value', data: { 'text/plain': '1', 'image/png': 'aGk=' }, metadata: { a: 1 } },
    { kind: 'error', name: 'E', value: 'v', traceback: ['t'] },
  ];
  assert.deepEqual(toNotebookCell('x = 1\nx\n', result(outputs, { status: 'error' }), { id: 'mine' }), {
    cell_type: 'code',
    id: 'mine',
    metadata: { kernelhost: { status: 'error', generation: 1 } },
    source: ['x = 1\n', 'x\n'],
    execution_count: 3,
    outputs: [
      { output_type: 'stream', name: 'stdout', text: ['a\n', 'b\r\n', 'c'] },
      {
        output_type: 'execute_result',
        execution_count: 3,
        data: { 'text/plain': ['1'], 'image/png': 'aGk=' },
        metadata: { a: 1 },
      },
      { output_type: 'error', ename: 'E', evalue: 'v', traceback: ['t'] },
    ],
  });
});

test('a cell without a number, and one whose output was cut', () => {
  const missing = { stdoutBytes: 5, stderrBytes: 0 };
  const { execution_count, metadata, source } = toNotebookCell('', result([], { executionCount: 0, missing }));
  assert.equal(execution_count, null);
  assert.deepEqual(metadata.kernelhost, { status: 'ok', generation: 1, missing });
  assert.deepEqual(source, []);
});

test('JSON types are values, all others text, whatever a library has sent', () => {
  const data = {
    'application/json': [1],
    'application/x.y+json': null,
    'text/html': '<p>\n</p>',
    'text/odd': { a: 1 },
    'text/none': null,
  };
  const [output] = toNotebookCell('x', result([{ kind: 'value', data, metadata: {} }])).outputs;
  assert.ok(output?.output_type === 'execute_result');
  assert.deepEqual(output.data, {
    'application/json': [1],
    'application/x.y+json': null,
    'text/html': ['<p>\n', '</p>'],
    'text/odd': ['{"a":1}'],
  });
});

test('an update reaches the display of an earlier cell, and its result stays as it was', () => {
  const first = result([shown('1', 'i')]);
  const { cells } = toNotebook([
    { code: 'a', result: first },
    { code: 'b', result: result([shown('2', 'i', true), out('b')]) },
  ]);
  assert.deepEqual(
    cells.map((each) => (each.cell_type === 'code' ? words(each.outputs) : [])),
    [['display_data 2'], ['stdout b']],
  );
  assert.deepEqual(first.outputs, [shown('1', 'i')]);
});

test('a notebook says what made it, and its ids are unique', () => {
  const one = { code: '1', result: result([]) };
  const notebook = toNotebook([one, one]);
  assert.equal(new Set(notebook.cells.map(({ id }) => id)).size, 2);
  assert.deepEqual(notebook.metadata.kernelspec, { name: 'python3', display_name: 'Python 3', language: 'python' });
  assert.equal((notebook.metadata.language_info as { version: string }).version, '3.13.0');
  assert.deepEqual(toNotebook([]).cells, []);
});

test('a kernel remembers its cells, but not those that are silent or have not begun', async () => {
  const native = new MockNative();
  const kernel = native.host().kernel();
  const run = async (code: string, reply: Parameters<typeof settled>[1], silent = false) => {
    const call = kernel.execute(code, { silent }).catch(() => {});
    await native.send(settled(native.last('execute').request, reply));
    await call;
  };
  await run('first', { kind: 'cell', cell: cell({ outputs: [{ kind: 'text', stream: 'stdout', text: 'x' }] }) });
  await run('silent', { kind: 'cell', cell: cell() }, true);
  await run('never', { kind: 'failed', failure: failure('ERR_KERNEL_BUSY') });
  await run('fatal', { kind: 'failed', failure: failure('ERR_KERNEL_DIED', { partial: cell() }) });
  assert.deepEqual(
    kernel
      .toNotebook()
      .cells.map((each) => [each.id, each.source, each.cell_type === 'code' ? words(each.outputs) : null]),
    [
      ['cell-1', ['first'], ['stdout x']],
      ['cell-2', ['fatal'], ['error KernelDiedError']],
    ],
  );
});

test('notebookBytes: 0 remembers nothing', async () => {
  const native = new MockNative();
  const kernel = native.host().kernel({ notebookBytes: 0 });
  const call = kernel.execute('x');
  await native.send(settled(native.last('execute').request, { kind: 'cell', cell: cell() }));
  await call;
  assert.deepEqual(kernel.toNotebook().cells, []);
});

test('a history keeps within its bound: outputs go first, then cells, and both are told', () => {
  const history = new CellHistory(10_000);
  const outputs: NativeOutput[] = [{ kind: 'text', stream: 'stdout', text: 'o'.repeat(1000) }];
  const note = (code: string, each = outputs) =>
    history.note(code, { kind: 'cell', cell: cell({ outputs: each }) }, life());
  for (let number = 1; number <= 20; number++) note(`cell ${number}`);
  const cells = () => history.toNotebook(life()).cells;
  assert.equal(cells().length, 20);
  const kept = cells().map((each) => each.cell_type === 'code' && words(each.outputs)[0]?.startsWith('stdout ooo'));
  assert.deepEqual(
    kept,
    Array.from({ length: 20 }, (_, index) => index >= 15),
  );
  assert.match(JSON.stringify(cells()[0]), /The outputs of this cell are not kept/);

  for (let number = 21; number <= 1000; number++) note(`cell ${number}`, []);
  const [first, ...others] = cells();
  assert.equal(first?.cell_type, 'markdown');
  assert.ok(others.length >= 40 && others.length < 50, `${others.length} cells`);
  assert.match([first.source].flat().join(''), new RegExp(`The first ${1000 - others.length} cells are not kept`));
  assert.deepEqual(history.toNotebook(life()).metadata.kernelhost, { cellsNotKept: 1000 - others.length });
  assert.deepEqual(others.at(-1)?.source, ['cell 1000']);
});

test('a cell that is above the bound by itself is not kept, and the next one is', () => {
  const history = new CellHistory(1000);
  const note = (code: string) => history.note(code, { kind: 'cell', cell: cell() }, life());
  note('x'.repeat(5000));
  note('y');
  assert.deepEqual(
    history.toNotebook(null).cells.map(({ source }) => [source].flat().join('').slice(0, 26)),
    ['*The first cell is not kep', 'y'],
  );
});
