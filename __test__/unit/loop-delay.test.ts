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

test('a block in the instant after a look is told by the next look, once', (t) => {
  const delay = new LoopDelay();
  t.after(() => delay.stop());
  delay.take();
  block();
  assert.ok(delay.take() >= BLOCK_MS - 10);
  assert.ok(delay.take() < BLOCK_MS - 10);
});

test('a block between two looks is told by the second, though the timer has fired since', async (t) => {
  const delay = new LoopDelay();
  t.after(() => delay.stop());
  delay.take();
  block();
  // Timers fire in the order in which they are due, and the delay's own was due during the block.
  await sleep(1);
  assert.ok(delay.take() >= BLOCK_MS - 10);
});
