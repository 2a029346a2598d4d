/**
 * Outputs that a listener has not taken yet. Once it is some outputs behind, what it no longer needs goes, so that a slow
 * one gets the newest state and not all of history:
 *
 * - text of one stream that touches is joined,
 * - an update of a display goes when a newer one of the same display waits,
 * - what was shown before a clear goes when the clear has taken effect.
 *
 * Nothing is dropped for want of room: how much can wait is bounded by credit.
 */

import type { NativeOutput } from './native.ts';

export interface WaitingOutput {
  output: NativeOutput;
  /** What it costs of the credit. */
  bytes: number;
}

/** A listener that is no further behind than this gets every output as it was made. */
const BEHIND = 8;
/** Longer texts would hold the credit of many reads until they are taken. */
const JOINED_CHARACTERS = 16 * 1024;

export class WaitingOutputs {
  readonly #credit: (bytes: number) => void;
  #outputs: WaitingOutput[] = [];
  #coalesceAt = BEHIND;

  constructor(credit: (bytes: number) => void) {
    this.#credit = credit;
  }

  get isEmpty(): boolean {
    return this.#outputs.length === 0;
  }

  push(output: NativeOutput, bytes: number): void {
    this.#outputs.push({ output, bytes });
    if (this.#outputs.length <= this.#coalesceAt) return;
    this.#coalesce();
    // Where little could go, the next look would find as little.
    this.#coalesceAt = Math.max(BEHIND, this.#outputs.length * 2);
  }

  /** Takes the first. */
  shift(): WaitingOutput | undefined {
    if (this.#outputs.length <= 1) this.#coalesceAt = BEHIND;
    return this.#outputs.shift();
  }

  /** Drops all of it. */
  drop(): void {
    for (const { bytes } of this.#outputs) this.#credit(bytes);
    this.#outputs = [];
  }

  #coalesce(): void {
    const outputs = this.#outputs;
    const cleared = lastClear(outputs);
    // Updates of these have gone with them. Other updates are of displays that an earlier cell has shown.
    const gone = new Set(outputs.slice(0, cleared).map(({ output }) => shownId(output)));
    const newer = new Set<string>();
    const kept: WaitingOutput[] = [];
    for (const [place, waiting] of [...outputs.entries()].reverse()) {
      const { output } = waiting;
      const updated = updatedId(output);
      let keep = place >= cleared || output.kind === 'error';
      if (updated !== null) {
        keep = !newer.has(updated) && (place >= cleared || !gone.has(updated));
        if (keep) newer.add(updated);
      } else if (output.kind === 'clear' && output.wait && outputs[place + 1]?.output.kind === 'clear') {
        // One that waits for what comes next says nothing once another follows it.
        keep = false;
      }
      if (keep) kept.push(waiting);
      else this.#credit(waiting.bytes);
    }
    this.#outputs = joined(kept.reverse());
  }
}

/** Where the last clear is that has taken effect; 0 if there is none. */
function lastClear(outputs: readonly WaitingOutput[]): number {
  let cleared = 0;
  let waiting: number | null = null;
  for (const [place, { output }] of outputs.entries()) {
    if (output.kind === 'clear') {
      waiting = output.wait ? place : null;
      if (!output.wait) cleared = place;
    } else if (updatedId(output) === null && waiting !== null) {
      // An update changes what is there, and is not the new output that a clear waits for.
      cleared = waiting;
      waiting = null;
    }
  }
  return cleared;
}

function joined(outputs: readonly WaitingOutput[]): WaitingOutput[] {
  const result: WaitingOutput[] = [];
  for (const next of outputs) {
    const last = result.at(-1);
    if (
      last?.output.kind === 'text' &&
      next.output.kind === 'text' &&
      last.output.stream === next.output.stream &&
      last.output.text.length + next.output.text.length <= JOINED_CHARACTERS
    ) {
      const { stream, text } = last.output;
      const output: NativeOutput = { kind: 'text', stream, text: text + next.output.text };
      result[result.length - 1] = { output, bytes: last.bytes + next.bytes };
    } else {
      result.push(next);
    }
  }
  return result;
}

/** The id of the display that an output updates. */
function updatedId(output: NativeOutput): string | null {
  return output.kind === 'display' && output.update ? output.displayId : null;
}

/** The id under which an output shows something that can be updated. */
function shownId(output: NativeOutput): string | null {
  return output.kind === 'display' && !output.update ? output.displayId : null;
}
