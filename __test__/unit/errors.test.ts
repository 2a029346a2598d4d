import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { inspect } from 'node:util';
import * as errors from '../../ts/errors.ts';
import { toError } from '../../ts/failure.ts';
import { loadError } from '../../ts/native.ts';
import { cell, exitReason, failure, life } from '../helpers/mock-native.ts';

test('each failure code becomes its class', () => {
  const exit = exitReason();
  const died = toError(failure('ERR_KERNEL_DIED', { exit, partial: cell({ stdout: 'half' }) }), life());
  assert.ok(died instanceof errors.KernelDiedError);
  assert.deepEqual(died.exit, exit);
  assert.equal(died.partial?.stdout, 'half');
  const start = toError(failure('ERR_KERNEL_START', { stderrTail: 'boom' }));
  assert.ok(start instanceof errors.KernelStartError);
  assert.equal(start.stderrTail, 'boom');
  assert.equal(start.exit, null);
  assert.ok(toError(failure('ERR_KERNEL_BUSY')) instanceof errors.KernelBusyError);
  assert.ok(toError(failure('ERR_KERNEL_CLOSED')) instanceof errors.KernelClosedError);
  assert.ok(toError(failure('ERR_KERNEL_ABSENT')) instanceof errors.KernelAbsentError);
  const bug = toError(failure('ERR_INTERNAL'));
  assert.equal(bug.constructor, errors.KernelHostError);
  assert.equal(bug.code, 'ERR_INTERNAL');
});

test('the name is on the prototype and does not show as a property', () => {
  const error = new errors.KernelClosedError('closed');
  assert.equal(error.name, 'KernelClosedError');
  assert.deepEqual(Object.keys(error), ['code']);
  assert.match(String(error), /^KernelClosedError: closed$/);
  assert.match(inspect(error), /^KernelClosedError: closed\n/);
});

test('instanceof follows the class tree', () => {
  const error = new errors.KernelBusyError('busy');
  assert.ok(error instanceof errors.KernelHostError);
  assert.ok(error instanceof Error);
  assert.ok(!(error instanceof errors.KernelClosedError));
  assert.ok(!(new Error('x') instanceof errors.KernelHostError));
  for (const value of [null, undefined, 'x', {}, () => {}]) {
    assert.ok(!((value as unknown) instanceof errors.KernelHostError));
  }
});

test('an error of another copy of the package is an instance too', async () => {
  const copy = (await import(`../../ts/errors.ts?copy=${Date.now()}`)) as typeof errors;
  assert.notEqual(copy.KernelDiedError, errors.KernelDiedError);
  const error: unknown = new copy.KernelDiedError('died', exitReason() as never, null);
  assert.ok(error instanceof errors.KernelDiedError);
  assert.ok(error instanceof errors.KernelHostError);
  assert.ok(!(error instanceof errors.KernelStartError));
});

test('a derived class counts only its own instances', () => {
  class Special extends errors.KernelClosedError {}
  assert.ok(new Special('x') instanceof Special);
  assert.ok(new Special('x') instanceof errors.KernelClosedError);
  assert.ok(!(new errors.KernelClosedError('x') instanceof Special));
});

test('an addon that is missing is one error with platform, attempts and fix', () => {
  const cause = new Error('Cannot find native binding. npm has a bug', {
    cause: new Error("Cannot find module 'kernelhost-linux-x64-gnu'\nRequire stack: …", {
      cause: new Error("Cannot find module './kernelhost.linux-x64-gnu.node'"),
    }),
  });
  const error = loadError(cause, { arch: 'x64', glibc: '2.36' });
  assert.equal(error.code, 'ERR_ADDON_NOT_LOADED');
  assert.match(error.message, /linux x64, glibc 2\.36/);
  assert.match(error.message, /Tried native\/kernelhost\.linux-x64-gnu\.node and the package kernelhost-linux-x64-gnu/);
  assert.match(error.message, /Cannot find module '\.\/kernelhost\.linux-x64-gnu\.node'/);
  assert.match(error.message, /npm install --include=optional kernelhost/);
  assert.doesNotMatch(error.message, /\n|npm has a bug/);
  assert.equal(error.cause, cause);
});

for (const [title, platform] of [
  ['musl', { arch: 'x64', glibc: null }],
  ['an architecture nobody builds for', { arch: 'riscv64', glibc: '2.36' }],
] as const) {
  test(`${title} is an unsupported platform`, () => {
    const error = loadError(new Error('x'), platform);
    assert.ok(error instanceof errors.UnsupportedPlatformError);
    assert.equal(error.code, 'ERR_UNSUPPORTED_PLATFORM');
  });
}

test('docs/errors.md lists every code that the sources know', () => {
  const page = readFileSync(join(import.meta.dirname, '../../docs/errors.md'), 'utf8');
  const sources = ['errors', 'failure', 'dispatcher', 'native', 'stream', 'kernel', 'kernel-host'].map((name) =>
    readFileSync(join(import.meta.dirname, `../../ts/${name}.ts`), 'utf8'),
  );
  const codes = new Set(sources.join('\n').match(/\bERR_[A-Z_]+\b/g));
  // Inside only: an abort rejects with the caller's own reason.
  codes.delete('ERR_ABORTED');
  for (const code of codes) assert.ok(page.includes(`\`${code}\``), `${code} is not in docs/errors.md`);
});
