/** The measure of how late the event loop is. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { LoopDelay } from '../../ts/monitor/loop-delay.ts';

const BLOCK_MS = 60;

function block(): void {
  const end = performance.now() + BLOCK_MS;
  while (performance.now() < end);
}

test('a block in the instant after a look is told by the next look, once', async (t) => {
  const delay = new LoopDelay();
  t.after(() => delay.stop());
  await sleep(30);
  delay.take();
  block();
  assert.ok(delay.take() >= BLOCK_MS - 10);
  assert.ok(delay.take() <= 0.1);
});

test('a block between two looks is told by the second, whatever came after it', async (t) => {
  const delay = new LoopDelay();
  t.after(() => delay.stop());
  delay.take();
  await sleep(30);
  block();
  await sleep(30);
  assert.ok(delay.take() >= BLOCK_MS - 10);
});
