/** Values with bytes in them, as they go to a kernel and come from one. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { pack, unpack } from '../../ts/packing.ts';

/** Packs, and reads what was packed as the other side would. */
function through(value: unknown): unknown {
  const { header, parts } = pack('value', value);
  const { value: json, places } = JSON.parse(header) as { value: unknown; places: unknown };
  return unpack(JSON.stringify(json), JSON.stringify(places), Buffer.concat(parts));
}

test('what is JSON comes through as JSON', () => {
  for (const value of [null, 1, 'é\0😀', [], [1, [2]], { a: { b: [true] } }, { toJSON: () => 'x' }]) {
    assert.deepEqual(through(value), JSON.parse(JSON.stringify(value)));
  }
  assert.equal(through(undefined), null);
  assert.deepEqual(through(new Date(0)), '1970-01-01T00:00:00.000Z');
});

test('bytes come through as bytes, wherever they stand', () => {
  const bytes = Buffer.from([1, 2, 3, 255]);
  assert.deepEqual(through(bytes), bytes);
  assert.deepEqual(through(new Uint8Array(0)), Buffer.alloc(0));
  const view = new Uint16Array([1, 2]).subarray(1);
  const got = through({ a: [0, bytes, { b: view }], c: bytes.buffer.slice(0, 0), d: 'text' });
  assert.deepEqual(got, { a: [0, bytes, { b: Buffer.from([2, 0]) }], c: Buffer.alloc(0), d: 'text' });
});

test('what cannot be sent is refused: cycles, a bigint, more than a frame holds', () => {
  const cycle: Record<string, unknown> = {};
  cycle.cycle = cycle;
  assert.throws(() => pack('value', cycle), TypeError);
  assert.throws(() => pack('value', 5n), TypeError);
  assert.throws(() => pack('value', Buffer.alloc(64 * 2 ** 20)), RangeError);
});

test('places that a cell has made up lead nowhere', () => {
  for (const path of [
    ['a'],
    ['__proto__', 'polluted'],
    ['constructor', 'prototype'],
    [0, 0],
    [null],
    [['x']],
    ['x', 'length'],
  ]) {
    const places = JSON.stringify([[path, 1]]);
    assert.throws(() => unpack('{"x":[],"y":{}}', places, Buffer.from([1])), TypeError, places);
  }
  assert.equal(({} as Record<string, unknown>).polluted, undefined);
  assert.deepEqual(
    unpack('{"__proto__":null}', '[[["__proto__"],1]]', Buffer.from([1])),
    JSON.parse('{"__proto__":{"0":1}}') &&
      Object.defineProperty({}, '__proto__', {
        value: Buffer.from([1]),
        enumerable: true,
        configurable: true,
        writable: true,
      }),
  );
});
