/**
 * The error classes. `code` is API and every code stands in docs/errors.md.
 *
 * The classes recognise each other across copies: an error thrown by a second copy of this package (another version,
 * another realm) is still `instanceof` the class of the same name here. A brand on the prototype carries that.
 */

import type { ExitReason } from './exit-reason.ts';
import type { CellResult } from './result.ts';

export type ErrorCode = `ERR_${string}`;

const brands = new WeakMap<object, symbol>();

/** Base of all: has a `code` that says which kind of failure it is. */
export class KernelHostError extends Error {
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.code = code;
  }

  static override [Symbol.hasInstance](value: unknown): boolean {
    // biome-ignore lint/complexity/noThisInStatic: which class is asked is the point, and a derived one inherits this.
    const brand = brands.get(this);
    // A class somebody derived from ours has no brand of its own: only its real instances count.
    // biome-ignore lint/complexity/noThisInStatic: as above.
    if (brand === undefined) return Function.prototype[Symbol.hasInstance].call(this, value);
    return typeof value === 'object' && value !== null && (value as Record<symbol, unknown>)[brand] === true;
  }
}

/** The life behind the kernel ended while the call was waiting. The next call gets a new one. */
export class KernelDiedError extends KernelHostError {
  readonly exit: ExitReason;
  /** What the cell had printed and shown until then; null when it had not begun. */
  readonly partial: CellResult | null;

  constructor(message: string, exit: ExitReason, partial: CellResult | null, options?: ErrorOptions) {
    super('ERR_KERNEL_DIED', message, options);
    this.exit = exit;
    this.partial = partial;
  }
}

/** No life came up. */
export class KernelStartError extends KernelHostError {
  readonly exit: ExitReason | null;
  readonly stderrTail: string;

  constructor(message: string, exit: ExitReason | null, stderrTail: string, options?: ErrorOptions) {
    super('ERR_KERNEL_START', message, options);
    this.exit = exit;
    this.stderrTail = stderrTail;
  }
}

/** An earlier cell that would not stop (`stuck: 'wait'`) is still running. */
export class KernelBusyError extends KernelHostError {
  constructor(message: string, options?: ErrorOptions) {
    super('ERR_KERNEL_BUSY', message, options);
  }
}

/** The kernel or its host has been closed. */
export class KernelClosedError extends KernelHostError {
  constructor(message: string, options?: ErrorOptions) {
    super('ERR_KERNEL_CLOSED', message, options);
  }
}

/** The call needs a life, and there is none and none may be started for it. */
export class KernelAbsentError extends KernelHostError {
  constructor(message: string, options?: ErrorOptions) {
    super('ERR_KERNEL_ABSENT', message, options);
  }
}

/** An option or argument is not usable. Names the option, the value, and what is allowed. */
export class InvalidOptionError extends KernelHostError {
  /** Where the option stands, as in `defaults.env.PATH`. */
  readonly option: string;

  constructor(option: string, message: string, options?: ErrorOptions) {
    super('ERR_INVALID_OPTION', message, options);
    this.option = option;
  }
}

export type SnapshotFailure =
  | 'missing'
  | 'not-a-file'
  | 'unreadable'
  | 'empty'
  | 'not-a-snapshot'
  | 'version'
  | 'cut-short'
  | 'damaged'
  | 'not-writable'
  | 'disk-full'
  | 'timed-out'
  | 'interrupted'
  | 'stopped'
  | 'failed';

/** A snapshot was not written, or not loaded. */
export class SnapshotError extends KernelHostError {
  readonly reason: SnapshotFailure;

  constructor(reason: SnapshotFailure, message: string, options?: ErrorOptions) {
    super('ERR_SNAPSHOT', message, options);
    this.reason = reason;
  }
}

/** This platform has no addon. */
export class UnsupportedPlatformError extends KernelHostError {
  constructor(message: string, options?: ErrorOptions) {
    super('ERR_UNSUPPORTED_PLATFORM', message, options);
  }
}

const classes = {
  KernelHostError,
  KernelDiedError,
  KernelStartError,
  KernelBusyError,
  KernelClosedError,
  KernelAbsentError,
  InvalidOptionError,
  SnapshotError,
  UnsupportedPlatformError,
};

for (const [name, errorClass] of Object.entries(classes)) {
  const brand = Symbol.for(`kernelhost.${name}`);
  brands.set(errorClass, brand);
  // On the prototype and not enumerable: an error prints as its message, its code and its data, nothing else.
  Object.defineProperty(errorClass.prototype, brand, { value: true });
  Object.defineProperty(errorClass.prototype, 'name', { value: name, writable: true, configurable: true });
}
