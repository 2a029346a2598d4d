import assert from 'node:assert/strict';
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { test } from 'node:test';
import { kernelEnvironment } from '../../ts/environment.ts';
import { resolveInterpreter } from '../../ts/interpreter.ts';

const daemon = { PATH: '/bin', HOME: '/home/me', TOKEN: 'secret', GONE: undefined };

function environment(env?: Record<string, string | undefined>, inheritEnv?: 'all' | string[]): Record<string, string> {
  const list = kernelEnvironment({ env, inheritEnv }, daemon);
  return Object.fromEntries(list.map(({ name, value }) => [name, value]));
}

const all = { PATH: '/bin', HOME: '/home/me', TOKEN: 'secret' };

for (const [title, env, inherit, expected] of [
  ['neither given: all of the daemon', undefined, undefined, all],
  ['env alone is exact', { A: '1' }, undefined, { A: '1' }],
  ['an empty env is empty', {}, undefined, {}],
  ["'all' alone", undefined, 'all', all],
  [
    "env with 'all' changes and deletes",
    { A: '1', TOKEN: undefined, PATH: '/x' },
    'all',
    { PATH: '/x', HOME: '/home/me', A: '1' },
  ],
  ['names alone', undefined, ['PATH', 'NOT_SET', 'GONE'], { PATH: '/bin' }],
  ['names with env', { A: '1', PATH: undefined }, ['PATH', 'HOME'], { HOME: '/home/me', A: '1' }],
  ['no names', { A: '1' }, [], { A: '1' }],
] as [string, Record<string, string | undefined> | undefined, 'all' | string[] | undefined, Record<string, string>][]) {
  test(`environment: ${title}`, () => assert.deepEqual(environment(env, inherit), expected));
}

test('each variable is listed once', () => {
  const names = kernelEnvironment({ env: { PATH: '/x' }, inheritEnv: 'all' }, daemon).map(({ name }) => name);
  assert.equal(new Set(names).size, names.length);
});

test('the interpreter is the first that is set: option, KERNELHOST_PYTHON, VIRTUAL_ENV, PATH', (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'kernelhost-unit-'));
  t.after(() => rmSync(folder, { recursive: true }));
  const python = join(folder, 'python3');
  writeFileSync(python, '#!/bin/sh\n');
  chmodSync(python, 0o755);
  mkdirSync(join(folder, 'first', 'python3'), { recursive: true });
  const PATH = `${join(folder, 'first')}::${folder}`;
  const variables = { PATH, VIRTUAL_ENV: '/venv', KERNELHOST_PYTHON: '/env/python' };
  assert.equal(resolveInterpreter('/given/python', variables), '/given/python');
  assert.equal(resolveInterpreter(undefined, variables), '/env/python');
  assert.equal(resolveInterpreter(undefined, { ...variables, KERNELHOST_PYTHON: '' }), '/venv/bin/python');
  assert.equal(resolveInterpreter(undefined, { PATH }), python);
  assert.equal(resolveInterpreter('python3', { PATH }), python);
});

test('an interpreter that is not there is kept as it was given', () => {
  assert.equal(resolveInterpreter('/no/such/python', {}), '/no/such/python');
  assert.equal(resolveInterpreter('python9', { PATH: '/nowhere' }), 'python9');
  assert.equal(resolveInterpreter(undefined, {}), 'python3');
  assert.equal(resolveInterpreter('./venv/bin/python', {}), resolve('venv/bin/python'));
});
