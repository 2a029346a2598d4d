import assert from 'node:assert/strict';
import { test } from 'node:test';
import { InvalidOptionError } from '../../ts/errors.ts';
import { nearest, readCell, readClose, readHostOptions, readKernelOptions, readStart } from '../../ts/options.ts';
import { signalNumber } from '../../ts/signals.ts';

function kernelOptions(options: unknown, defaults = {}) {
  return readKernelOptions('', options as object, defaults, { PATH: '/bin' }).native;
}

function refused(task: () => unknown): { option: string; message: string } {
  try {
    task();
  } catch (error) {
    assert.ok(error instanceof InvalidOptionError, String(error));
    assert.equal(error.code, 'ERR_INVALID_OPTION');
    assert.ok(error.message.startsWith(error.option), error.message);
    return { option: error.option, message: error.message };
  }
  assert.fail('it was accepted');
}

test('left-out options get their defaults', () => {
  assert.deepEqual(kernelOptions({}), {
    cwd: process.cwd(),
    environment: [{ name: 'PATH', value: '/bin' }],
    init: null,
    restoreFrom: null,
    startTimeoutMs: 30_000,
    interruptGraceMs: 2_000,
    stuck: 'end',
    maxOutputBytes: 1_048_576,
    oomScoreAdj: 500,
    limits: { memoryBytes: null, cpuSeconds: null, openFiles: null, processes: null },
    recovery: 'restart',
    checkpointBytes: 2 ** 30,
    functions: [],
    answersInput: false,
  });
});

test('the addon is told the names of functions, and whether there is anybody to answer input()', () => {
  const defaults = { onCall: { search: () => 1 }, onInput: () => '' };
  const read = readKernelOptions('', { onCall: { fetch: () => 2, constructor: () => 3 } }, defaults, {});
  assert.deepEqual([read.native.functions, read.native.answersInput], [['fetch', 'constructor'], true]);
  assert.equal(read.handlers.onInput, defaults.onInput);
  assert.equal(read.handlers.onCall.get('toString'), undefined);
  for (const [onCall, option] of [
    [{ search: 1 }, 'onCall["search"]'],
    [{ '': () => 1 }, 'onCall[""]'],
    [[() => 1], 'onCall'],
    ['search', 'onCall'],
  ] as const) {
    assert.equal(refused(() => kernelOptions({ onCall })).option, option);
  }
  assert.equal(refused(() => kernelOptions({ onInput: 'yes' })).option, 'onInput');
});

test('a notebook remembers 1 MiB if nothing else is said', () => {
  assert.equal(readKernelOptions('', {}, {}, {}).notebookBytes, 1_048_576);
  assert.equal(readKernelOptions('', { notebookBytes: 0 }, {}, {}).notebookBytes, 0);
});

test('limits are read as a whole, and bad ones are refused by their path', () => {
  const defaults = { limits: { memoryBytes: 64 * 2 ** 20, processes: 9 } };
  assert.equal(kernelOptions({}, defaults).limits.processes, 9);
  assert.deepEqual(kernelOptions({ limits: { openFiles: 64 } }, defaults).limits, {
    memoryBytes: null,
    cpuSeconds: null,
    openFiles: 64,
    processes: null,
  });
  const bad = [{ memoryBytes: 1 }, { cpuSeconds: 0 }, { openFiles: 3.5 }, { processes: '9' }, { memory: 1 }];
  for (const limits of bad) {
    const { option } = refused(() => kernelOptions({ limits } as object));
    assert.equal(option, `limits.${Object.keys(limits)[0]}`);
  }
  assert.equal(refused(() => kernelOptions({ limits: 5 } as object)).option, 'limits');
});

test("a kernel's option goes over the host's default, and undefined leaves the default", () => {
  const read = kernelOptions(
    { startTimeoutMs: 5, stuck: undefined },
    { startTimeoutMs: 9, stuck: 'wait', init: 'x = 1' },
  );
  assert.equal(read.startTimeoutMs, 5);
  assert.equal(read.stuck, 'wait');
  assert.equal(read.init, 'x = 1');
});

test('a misspelt option is refused with the nearest name', () => {
  const { option, message } = refused(() => kernelOptions({ maxOutputByte: 1 }));
  assert.equal(option, 'maxOutputByte');
  assert.match(message, /Did you mean maxOutputBytes\?/);
  assert.match(refused(() => readHostOptions({ Python: 'x' } as object, {})).message, /Did you mean python\?/);
  assert.match(refused(() => readCell('1', { timeoutMS: 1 } as object)).message, /Did you mean timeoutMs\?/);
});

test('an option that resembles none is refused with the list of those there are', () => {
  const { message } = refused(() => kernelOptions({ colour: 'red' }));
  assert.doesNotMatch(message, /Did you mean/);
  assert.match(message, /given "red".*Options here: cwd, env,/);
});

for (const [name, values] of Object.entries({
  startTimeoutMs: [0, -1, Number.NaN, Number.POSITIVE_INFINITY, 2 ** 31, '5', null, 5n],
  interruptGraceMs: [-1, Number.NaN, '5', {}],
  maxOutputBytes: [-1, 1.5, Number.NaN, 2 ** 32, '5', null],
  oomScoreAdj: [-1001, 1001, 0.5, Number.NaN],
  stuck: ['End', true, null, ''],
  recovery: ['always', null],
  init: [1, null, {}],
  cwd: ['', 'a\0b', 1, null, new URL('file:///')],
  inheritEnv: ['none', 'PATH', [1], [''], ['A=B'], null, {}],
  env: [null, 'A=1', [], { A: 1 }, { A: null }, { A: 'x\0' }, { '': 'x' }, { 'A=B': 'x' }, { 'A\0': 'x' }],
})) {
  for (const value of values) {
    test(`${name}: ${format(value)} is refused by name`, () => {
      assert.ok(refused(() => kernelOptions({ [name]: value })).option.startsWith(name));
    });
  }
}

test('the error names where in the defaults the option stands', () => {
  const { option } = refused(() => readHostOptions({ defaults: { env: { PATH: 1 } } } as object, {}));
  assert.equal(option, 'defaults.env["PATH"]');
});

for (const options of [null, 1, 'x', [], true]) {
  test(`options: ${format(options)} is refused`, () => {
    assert.equal(refused(() => kernelOptions(options)).option, 'options');
  });
}

test('a long value is cut in the message', () => {
  assert.ok(refused(() => kernelOptions({ stuck: 'x'.repeat(10_000) })).message.length < 200);
});

test('a relative cwd is taken from the working directory', () => {
  assert.equal(kernelOptions({ cwd: 'some/where' }).cwd, `${process.cwd()}/some/where`);
});

test('times may be fractions and are rounded up', () => {
  assert.equal(readCell('1', { timeoutMs: 0.2 }).request.timeoutMs, 1);
  assert.equal(readClose({ graceMs: 0 }).graceMs, 0);
  assert.equal(readClose({}).graceMs, 2_000);
});

test('cells: code is any string, and every option is checked', () => {
  assert.deepEqual(readCell('a\0b', {}).request, {
    code: 'a\0b',
    silent: false,
    timeoutMs: null,
    maxOutputBytes: null,
  });
  assert.equal(refused(() => readCell(1 as never, {})).option, 'code');
  for (const [name, value] of [
    ['timeoutMs', 0],
    ['timeoutMs', Number.NaN],
    ['silent', 1],
    ['onOutput', 'print'],
    ['signal', {}],
    ['signal', null],
    ['maxOutputBytes', -1],
  ] as const) {
    assert.equal(refused(() => readCell('1', { [name]: value } as object)).option, name);
  }
});

test('a signal is known by its shape', () => {
  const { signal } = new AbortController();
  assert.equal(readStart({ signal }).signal, signal);
});

test('preload takes module names only', () => {
  const names = ['numpy', 'os.path', '_private', 'größe'];
  assert.deepEqual(readHostOptions({ preload: names }, {}).host.preload, names);
  for (const name of ['', 'a b', 'a;b', '1a', 'a.', 'a/b', 3]) {
    assert.equal(refused(() => readHostOptions({ preload: ['os', name] } as object, {})).option, 'preload[1]');
  }
});

test('KERNELHOST_LAUNCH overrides the launch option and is checked like it', () => {
  assert.equal(readHostOptions({ launch: 'fork' }, { KERNELHOST_LAUNCH: 'spawn' }).host.launch, 'spawn');
  assert.equal(readHostOptions({ launch: 'fork' }, { KERNELHOST_LAUNCH: '' }).host.launch, 'fork');
  assert.match(refused(() => readHostOptions({}, { KERNELHOST_LAUNCH: 'forc' })).option, /KERNELHOST_LAUNCH/);
});

test('signals are named as Node names them', () => {
  assert.equal(signalNumber('SIGKILL'), 9);
  assert.match(refused(() => signalNumber('SIGKIL')).message, /did you mean 'SIGKILL'/);
  for (const value of [9, 'KILL', '', null, 'SIGNONE', 'constructor']) refused(() => signalNumber(value));
});

test('the nearest name is a suggestion only when it is near', () => {
  assert.equal(nearest('shel', ['shell', 'launch']), 'shell');
  assert.equal(nearest('xyz', ['shell', 'launch']), null);
});

function format(value: unknown): string {
  return typeof value === 'bigint'
    ? `${value}n`
    : JSON.stringify(value, (_, inner) => (typeof inner === 'number' ? String(inner) : inner));
}
