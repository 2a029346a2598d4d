/** Waiting on events, with a deadline: tests never sleep and hope. */

import { type EventEmitter, once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';

const DEADLINE_MS = 15_000;

/** The value of the promise, or an error that says what did not happen in time. */
export async function within<Value>(
  what: string,
  promise: Promise<Value>,
  deadlineMs: number = DEADLINE_MS,
): Promise<Value> {
  const late = new AbortController();
  try {
    return await Promise.race([
      promise,
      sleep(deadlineMs, null, { signal: late.signal }).then(() => {
        throw new Error(`not within ${deadlineMs} ms: ${what}`);
      }),
    ]);
  } finally {
    late.abort();
  }
}

/** The arguments of the emitter's next event of this name. Call it before what causes the event. */
export function next(emitter: unknown, event: string, deadlineMs: number = DEADLINE_MS): Promise<unknown[]> {
  return within(`event "${event}"`, once(emitter as EventEmitter, event), deadlineMs);
}

/** How often a condition outside this process (such as /proc) is looked at; nothing announces it. */
const LOOK_EVERY_MS = 5;

/** Resolves when the condition holds. */
export async function until(
  what: string,
  condition: () => boolean | Promise<boolean>,
  deadlineMs: number = DEADLINE_MS,
): Promise<void> {
  const end = performance.now() + deadlineMs;
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`not within ${deadlineMs} ms: ${what}`);
    await sleep(LOOK_EVERY_MS);
  }
}
