import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { NativeOutput } from '../../ts/native.ts';
import { WaitingOutputs } from '../../ts/waiting-outputs.ts';

const text = (text: string): NativeOutput => ({ kind: 'text', stream: 'stdout', text });
const clear = (wait: boolean): NativeOutput => ({ kind: 'clear', wait });
const display = (displayId: string | null, data: string, update: boolean): NativeOutput => ({
  kind: 'display',
  dataJson: data,
  metadataJson: '{}',
  displayId,
  update,
});

/** What a listener gets that takes nothing until all of it is there, as one word each; every output costs 1. */
function taken(outputs: readonly NativeOutput[]): string[] {
  let credited = 0;
  const waiting = new WaitingOutputs((bytes) => {
    credited += bytes;
  });
  for (const output of outputs) waiting.push(output, 1);
  const words: string[] = [];
  for (let next = waiting.shift(); next !== undefined; next = waiting.shift()) {
    credited += next.bytes;
    const { output } = next;
    if (output.kind === 'text') words.push(output.text);
    else if (output.kind === 'clear') words.push(output.wait ? 'clear later' : 'clear');
    else if (output.kind === 'display') words.push(`${output.update ? 'update' : 'display'} ${output.dataJson}`);
  }
  assert.equal(credited, outputs.length, 'all credit comes back, once');
  return words;
}

const times = (count: number, make: (index: number) => NativeOutput[]): NativeOutput[] =>
  Array.from({ length: count }, (_, index) => make(index)).flat();

test('a listener that is not far behind gets every output as it was made', () => {
  const outputs = [text('a'), text('b'), display('x', '1', false), display('x', '2', true), clear(false), text('c')];
  assert.deepEqual(taken(outputs), ['a', 'b', 'display 1', 'update 2', 'clear', 'c']);
});

test('of updates the newest is left, in its place, and text that touches is joined', () => {
  const outputs = [display('x', 'begin', false), ...times(8, (i) => [text(String(i)), display('x', String(i), true)])];
  // Looked at each time that more than eight wait.
  assert.deepEqual(taken(outputs), ['display begin', '0123456', 'update 6', '7', 'update 7']);
});

test('what a clear has taken away goes, with its updates; updates of an earlier cell’s display stay', () => {
  const outputs = [
    display('mine', '1', false),
    display('mine', '2', true),
    display('earlier', '3', true),
    text('gone'),
    clear(true),
    text('gone too'),
    clear(true),
    display('other', '4', true),
    text('stays'),
  ];
  assert.deepEqual(taken(outputs), ['update 3', 'clear later', 'update 4', 'stays']);
});

test('a clear that still waits takes nothing away, and one more of them says nothing new', () => {
  const outputs = [...times(7, (i) => [display(null, String(i), false)]), clear(true), clear(true)];
  assert.deepEqual(taken(outputs), [...Array.from({ length: 7 }, (_, i) => `display ${i}`), 'clear later']);
});
