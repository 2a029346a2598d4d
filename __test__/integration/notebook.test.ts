/** Notebooks of real cells, judged by nbformat itself. */

import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { test } from 'node:test';
import { type CellResult, type Notebook, type NotebookOutput, toNotebook, toNotebookCell } from 'kernelhost';
import { ok } from '../fixtures/forkserver-look.ts';
import { lacksLibraries, librariesPythonForTests, startHost, startKernel } from '../helpers/index.ts';

const skip = lacksLibraries;
const python = librariesPythonForTests() ?? 'none';

/** Reads as Jupyter does, and writes what it has read: joined texts, so that it can be compared. */
const JUDGE = `
import json, sys, nbformat
text = sys.stdin.read()
nbformat.validate(json.loads(text), relax_add_props=False)
read = nbformat.reads(text, as_version=4)
nbformat.validate(read)
json.dump(read, sys.stdout)
`;

/** What nbformat reads. Fails when it is not valid, or is only valid once it was mended: that is a warning. */
function judged(notebook: Notebook): Notebook {
  const input = JSON.stringify(notebook);
  const { status, stdout, stderr } = spawnSync(python, ['-W', 'error', '-c', JUDGE], { input, encoding: 'utf8' });
  assert.equal(status, 0, stderr);
  return JSON.parse(stdout) as Notebook;
}

/** The notebook with every text in one piece, as nbformat holds it. */
function joined(notebook: Notebook): Notebook {
  return JSON.parse(JSON.stringify(notebook), (key, value: unknown) => {
    if (!Array.isArray(value) || key === 'traceback' || key === 'cells' || key === 'outputs') return value;
    return value.every((each) => typeof each === 'string') ? value.join('') : value;
  }) as Notebook;
}

function outputsOf(notebook: Notebook): NotebookOutput[][] {
  return notebook.cells.map((cell) => (cell.cell_type === 'code' ? cell.outputs : []));
}

const cells = [
  'import sys\nprint("größe", "\\u2028", "a\\rb\\x0bc")\nsys.stdout.write("no line break")\n7',
  'print("e", file=sys.stderr)',
  'import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()',
  'import pandas as pd\npd.DataFrame({"a": [1, 2]})',
  'class Odd:\n    def _repr_mimebundle_(self, **_): return {"application/json": [1, {"a": None}], "x/y": {"no": "text"}, "text/plain": "odd"}, {"m": 1}\nOdd()',
  'from tqdm import tqdm\nfor _ in tqdm(range(3), mininterval=0): pass',
  '1 / 0',
  'def broken(:',
  '',
];

test('a notebook of what libraries show is valid, and nbformat reads what was written', { skip }, async (t) => {
  for (const shell of ['ipython', 'plain'] as const) {
    const { kernel } = await startKernel(t, { python, shell });
    const entries: { code: string; result: CellResult }[] = [];
    for (const code of cells) entries.push({ code, result: await kernel.execute(code) });
    const notebook = kernel.toNotebook();
    assert.deepEqual(joined(judged(notebook)), joined(notebook));
    assert.equal(notebook.cells.length, cells.length);
    assert.deepEqual(
      joined(notebook).cells.map(({ source }) => String(source)),
      cells,
    );
    assert.deepEqual(
      outputsOf(notebook).map((outputs) => outputs.map(({ output_type }) => output_type)),
      [
        ['stream', 'execute_result'],
        ['stream'],
        ['display_data'],
        ['execute_result'],
        ['execute_result'],
        ['stream'],
        ['error'],
        ['error'],
        [],
      ],
    );
    const [result] = entries;
    assert.deepEqual(notebook.metadata.language_info, {
      name: 'python',
      version: result?.result.life.pythonVersion,
      mimetype: 'text/x-python',
      file_extension: '.py',
      codemirror_mode: { name: shell === 'ipython' ? 'ipython' : 'python', version: 3 },
      pygments_lexer: shell === 'ipython' ? 'ipython3' : 'python3',
      nbconvert_exporter: 'python',
    });
    const made = toNotebook(entries.map((entry, index) => ({ ...entry, id: `cell-${index + 1}` })));
    assert.deepEqual(made, notebook, 'the same can be made of the results');
    assert.deepEqual(joined(judged(toNotebook(entries))).cells.length, cells.length, 'with ids of its own');
  }
});

test('displays that were cleared and updated end up as a front end would have them', { skip }, async (t) => {
  const { kernel } = await startKernel(t, { python, shell: 'ipython' });
  const code = [
    'from IPython.display import clear_output, display',
    'display("gone", display_id="gone")',
    'clear_output()',
    'bar = display("0 %", display_id=True)',
    'print("a"); bar.update("50 %"); print("b")',
    'display("never shown", display_id="gone", update=True)',
    'clear_output(wait=True)',
  ].join('\n');
  const [cell, later, all] = [await ok(kernel, code), await ok(kernel, 'bar.update("100 %")'), kernel.toNotebook()];
  judged(all);
  const shown = (percent: string): NotebookOutput[] => [
    { output_type: 'display_data', data: { 'text/plain': [percent] }, metadata: {} },
    { output_type: 'stream', name: 'stdout', text: ['a\n', 'b\n'] },
  ];
  assert.deepEqual(toNotebookCell(code, cell).outputs, shown("'50 %'"));
  assert.deepEqual(toNotebookCell('', later).outputs, []);
  assert.deepEqual(outputsOf(all), [shown("'100 %'"), []], 'in a notebook also by a later cell');
});

test('a notebook goes over all lives, says what ended one, and what was cut', { skip }, async (t) => {
  const kernel = startHost(t, { python }).kernel({ notebookBytes: 20_000, maxOutputBytes: 1000 });
  assert.deepEqual(judged(kernel.toNotebook()).cells, [], 'valid before anything has run');
  await ok(kernel, 'print("x" * 5000)');
  await kernel.execute('print("last words", flush=True); import os; os._exit(3)').catch(() => {});
  await kernel.execute('2', { silent: true });
  await ok(kernel, '3');
  const notebook = kernel.toNotebook();
  judged(notebook);
  const [cut, fatal, next] = notebook.cells;
  assert.equal(notebook.cells.length, 3);
  assert.deepEqual(cut?.metadata.kernelhost, {
    status: 'ok',
    generation: 1,
    missing: { stdoutBytes: 4001, stderrBytes: 0 },
  });
  assert.ok(fatal?.cell_type === 'code');
  const [words, death] = fatal.outputs;
  assert.deepEqual(words, { output_type: 'stream', name: 'stdout', text: ['last words\n'] });
  assert.ok(death?.output_type === 'error' && death.ename === 'KernelDiedError');
  assert.equal(death.evalue, kernel.lastExit?.message);
  assert.deepEqual(next?.metadata.kernelhost, { status: 'ok', generation: 2 });

  for (let round = 0; round < 60; round++) await ok(kernel, `print("${'y'.repeat(600)}")`);
  const bounded = kernel.toNotebook();
  judged(bounded);
  assert.ok(JSON.stringify(bounded).length < 60_000, 'and it is bounded');
  assert.equal(bounded.cells[0]?.cell_type, 'markdown');
});
