/** Questions about code: what is asked of the addon, and its answers. JavaScript counts UTF-16 units, Python code points. */

import type { NativeQuery } from './native.ts';
import type { MimeBundle } from './result.ts';

export interface Completion {
  matches: string[];
  /** What of the code a match replaces. */
  start: number;
  end: number;
  metadata: MimeBundle;
}

export interface Inspection {
  found: boolean;
  data: MimeBundle;
}

export type Completeness = 'complete' | 'incomplete' | 'invalid' | 'unknown';

export function completeQuery(code: string, cursor: number): NativeQuery {
  return { kind: 'complete', code, cursor: codePoints(code, cursor) };
}

export function inspectQuery(code: string, cursor: number, detail: 0 | 1): NativeQuery {
  return { kind: 'inspect', code, cursor: codePoints(code, cursor), detail };
}

export function toCompletion(json: string, code: string): Completion {
  const { matches, start, end, metadata } = JSON.parse(json) as Completion;
  return { matches, start: codeUnits(code, start), end: codeUnits(code, end), metadata };
}

export function toInspection(json: string): Inspection {
  const { found, data } = JSON.parse(json) as Inspection;
  return { found, data };
}

export function toCompleteness(json: string): Completeness {
  const { status } = JSON.parse(json) as { status: string };
  return status === 'complete' || status === 'incomplete' || status === 'invalid' ? status : 'unknown';
}

/** How many code points there are before this place. */
function codePoints(code: string, place: number): number {
  let count = 0;
  for (let at = 0; at < place; count++) at += (code.codePointAt(at) ?? 0) > 0xffff ? 2 : 1;
  return count;
}

/** The place behind so many code points. */
function codeUnits(code: string, count: number): number {
  let at = 0;
  for (let seen = 0; seen < count && at < code.length; seen++) at += (code.codePointAt(at) ?? 0) > 0xffff ? 2 : 1;
  return at;
}
