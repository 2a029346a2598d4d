/**
 * Time as far as this process has been awake. A machine that stands still for seconds gives nobody the time to do anything, and
 * what is due in that time is not late.
 */

const TICK_MS = 50;
/** A tick that comes later than this has been held up by the machine, or by a very busy event loop. */
const LONGEST_TICK_MS = 500;

let awakeMs = 0;
let lastTick = performance.now();

setInterval(() => {
  awakeMs = awakeNow();
  lastTick = performance.now();
}, TICK_MS).unref();

/** Milliseconds. */
export function awakeNow(): number {
  return awakeMs + Math.min(performance.now() - lastTick, LONGEST_TICK_MS);
}
