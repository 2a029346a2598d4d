/** Signal names as Node spells them, to the numbers the addon takes. */

import { constants } from 'node:os';
import { InvalidOptionError } from './errors.ts';
import { describe, nearest } from './options.ts';

export function signalNumber(signal: unknown): number {
  const number = typeof signal === 'string' ? constants.signals[signal as NodeJS.Signals] : undefined;
  if (number !== undefined) return number;
  const close = typeof signal === 'string' ? nearest(signal.toUpperCase(), Object.keys(constants.signals)) : null;
  throw new InvalidOptionError(
    'signal',
    `signal: ${describe(signal)} is not a signal; give a name such as 'SIGKILL', 'SIGTERM' or 'SIGINT'` +
      `${close === null ? '' : ` (did you mean '${close}'?)`}`,
  );
}
