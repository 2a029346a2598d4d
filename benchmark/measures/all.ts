/** The measures, in the order in which they are taken and shown. */
import { bulk, bulkCapped } from './bulk.ts';
import { cell } from './cell.ts';
import { copies } from './copies.ts';
import { death } from './death.ts';
import { hostCall } from './host-call.ts';
import { idle } from './idle.ts';
import { lines } from './lines.ts';
import { many } from './many.ts';
import type { Measure } from './measure.ts';
import { memory } from './memory.ts';
import { delivery, picture, pressure } from './output-floods.ts';
import { start } from './start.ts';

export const measures: readonly Measure[] = [
  start,
  cell,
  lines,
  bulk,
  bulkCapped,
  hostCall,
  delivery,
  picture,
  pressure,
  copies,
  death,
  memory,
  many,
  idle,
];
