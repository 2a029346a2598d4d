import assert from 'node:assert/strict';
import { test } from 'node:test';
import { splitCells } from '../../ts/cli/cells.ts';

for (const [title, source, cells] of [
  ['a file without markers is one cell', 'a = 1\nb = 2\n', ['a = 1\nb = 2\n']],
  ['each marker begins a cell and stays in it', 'a\n# %% two\nb\n# %%\nc', ['a\n', '# %% two\nb\n', '# %%\nc']],
  [
    'cells with nothing but comments and blank lines are left out',
    '# head\n\n# %% one\na\n# %%\n\n# end\n',
    ['# %% one\na\n'],
  ],
  ['an empty file has none', '', []],
  ['the short marker counts', 'a\n#%%\nb', ['a\n', '#%%\nb']],
  ['an indented marker is a comment', 'if x:\n    # %%\n    y\n', ['if x:\n    # %%\n    y\n']],
  ['Windows line ends', 'a\r\n# %%\r\nb\r\n', ['a\r\n', '# %%\r\nb\r\n']],
] as [string, string, string[]][]) {
  test(title, () => assert.deepEqual(splitCells(source), cells));
}
