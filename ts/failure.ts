/**
 * Failures arrive from the addon as data. They become errors here, in the async method the caller awaits, so that the
 * stack reaches the caller's own line.
 */

import {
  type ErrorCode,
  KernelAbsentError,
  KernelBusyError,
  KernelClosedError,
  KernelDiedError,
  KernelHostError,
  KernelStartError,
} from './errors.ts';
import { toExitReason } from './exit-reason.ts';
import type { NativeFailure, NativeReply } from './native.ts';
import { type Life, toCellResult } from './result.ts';

/** `life`: the one that a partial result ran on. */
export function toError(failure: NativeFailure, life: Life | null = null): KernelHostError {
  const exit = failure.exit === null ? null : toExitReason(failure.exit);
  switch (failure.code) {
    case 'ERR_KERNEL_DIED':
      if (exit === null) break;
      return new KernelDiedError(
        failure.message,
        exit,
        failure.partial === null || life === null ? null : toCellResult(failure.partial, life),
      );
    case 'ERR_KERNEL_START':
      return new KernelStartError(failure.message, exit, failure.stderrTail);
    case 'ERR_KERNEL_BUSY':
      return new KernelBusyError(failure.message);
    case 'ERR_KERNEL_CLOSED':
      return new KernelClosedError(failure.message);
    case 'ERR_KERNEL_ABSENT':
      return new KernelAbsentError(failure.message);
  }
  return new KernelHostError(failure.code as ErrorCode, failure.message);
}

export type ReplyOf<Kind extends NativeReply['kind']> = Extract<NativeReply, { kind: Kind }>;

/** The reply, if it is of the kind that was asked for; otherwise the failure as an error. */
export function expectReply<Kind extends NativeReply['kind']>(
  reply: NativeReply,
  kind: Kind,
  life: Life | null = null,
): ReplyOf<Kind> {
  if (reply.kind === kind) return reply as ReplyOf<Kind>;
  if (reply.kind === 'failed') throw toError(reply.failure, life);
  throw new KernelHostError('ERR_INTERNAL', `bug in kernelhost: a reply "${reply.kind}" came where "${kind}" was due`);
}
