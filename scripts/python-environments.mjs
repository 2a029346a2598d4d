// Private Python environments under .venv/, made with uv:
//
//   .venv/3.13-ipython   IPython and, where there is a wheel, numpy
//   .venv/3.13-plain     nothing installed
//   .venv/3.14-libraries of the main Python only: IPython, what shows things in it, and cloudpickle, in versions that are known
//   .venv/dill           dill alone, a folder for PYTHONPATH: where there is cloudpickle too, dill is not used
//   .venv/tools          ruff
//   .venv/uv             uv itself, when PATH has none

import { existsSync, rmSync } from 'node:fs';
import { basename } from 'node:path';
import { at, isDone, markDone, must, output, run, Stop, say } from './project.mjs';

const RUFF = 'ruff>=0.17,<0.18';
const LIBRARIES = [
  'ipython==9.18.1',
  'numpy==2.5.5',
  'matplotlib==3.11.2',
  'pandas==3.1.1',
  'tqdm==4.70.1',
  'rich==15.0.0',
  'nbformat==5.11.1',
  'ipywidgets==8.1.9',
  'cloudpickle==3.1.3',
];
const DILL = 'dill==0.4.1';
/** Raised when what is installed changes, so that environments made before are made again. */
const RECIPE = '1';

/** The interpreters to test with: KERNELHOST_TEST_PYTHONS (commas between), or the one python3. */
export function testPythons() {
  const listed = (process.env.KERNELHOST_TEST_PYTHONS ?? '').split(',').filter((python) => python !== '');
  return (listed.length > 0 ? listed : ['python3']).map(describePython);
}

/** The one that the whole suite runs on: 3.14, because the story the project began with is about it; else the newest. */
export function mainPython(pythons) {
  const newestFirst = [...pythons].sort((a, b) => b.newness - a.newness);
  return newestFirst.find(({ version }) => version === '3.14') ?? newestFirst[0];
}

/** @returns {{ executable: string, version: string, newness: number }} */
function describePython(python) {
  const text = output(python, ['-c', 'import sys; print(sys.executable, *sys.version_info[:2])']);
  const match = text?.match(/^(.+) (\d+) (\d+)$/);
  if (!match) throw new Stop(`${python} is not a Python that can be run; tests need Python 3.10 or later.`);
  const [, executable, major, minor] = match;
  const newness = Number(major) * 1000 + Number(minor);
  if (newness < 3010) throw new Stop(`${python} is Python ${major}.${minor}; tests need Python 3.10 or later.`);
  return { executable, version: `${major}.${minor}`, newness };
}

/** Where the environments of an interpreter are. */
export function environmentsOf({ version }) {
  return {
    ipython: at('.venv', `${version}-ipython`, 'bin', 'python'),
    plain: at('.venv', `${version}-plain`, 'bin', 'python'),
    libraries: at('.venv', `${version}-libraries`, 'bin', 'python'),
    dill: at('.venv', 'dill'),
  };
}

export async function prepareEnvironments(pythons) {
  for (const python of pythons) {
    const { ipython, plain } = environmentsOf(python);
    const input = `${RECIPE} ${python.executable}`;
    const step = `python-${python.version}`;
    if (isDone(step, input) && existsSync(ipython) && existsSync(plain)) continue;
    say(`• Python ${python.version}: making test environments with and without IPython`);
    const uv = await findUv();
    await makeEnvironment(uv, python.executable, `${python.version}-plain`);
    await makeEnvironment(uv, python.executable, `${python.version}-ipython`);
    await must('Installing IPython', uv, [
      'pip',
      'install',
      '--quiet',
      '--compile-bytecode',
      '--python',
      ipython,
      'ipython',
    ]);
    const numpy = [
      'pip',
      'install',
      '--quiet',
      '--compile-bytecode',
      '--only-binary',
      ':all:',
      '--python',
      ipython,
      'numpy',
    ];
    if ((await run(uv, numpy, { quiet: true })) !== 0)
      say(`  no numpy for Python ${python.version}: tests that need it are skipped`);
    markDone(step, input);
  }
  await prepareLibraries(mainPython(pythons));
  await prepareDill(mainPython(pythons));
}

/** It is Python only, so that one folder serves every version. */
async function prepareDill(python) {
  const { plain, dill } = environmentsOf(python);
  if (isDone('dill', DILL) && existsSync(dill)) return;
  say('• dill: installing');
  rmSync(dill, { recursive: true, force: true });
  await must('Installing dill', await findUv(), [
    'pip',
    'install',
    '--quiet',
    '--python',
    plain,
    '--target',
    dill,
    DILL,
  ]);
  markDone('dill', DILL);
}

/** Where a library has no wheel for this Python, the tests that need it are skipped; but not where all is to be tested. */
async function prepareLibraries(python) {
  const { libraries } = environmentsOf(python);
  const input = `${LIBRARIES.join(' ')} ${python.executable}`;
  const step = `python-${python.version}-libraries`;
  if (isDone(step, input) && (existsSync(libraries) || !process.env.CI)) return;
  say(`• Python ${python.version}: making a test environment with libraries that show things`);
  const uv = await findUv();
  const name = `${python.version}-libraries`;
  await makeEnvironment(uv, python.executable, name);
  const install = ['pip', 'install', '--quiet', '--compile-bytecode', '--only-binary', ':all:'];
  const args = [...install, '--python', libraries, ...LIBRARIES];
  if (process.env.CI) {
    await must('Installing the libraries', uv, args);
  } else if ((await run(uv, args, { quiet: true })) !== 0) {
    say(`  not all of them can be had for Python ${python.version}: tests that need them are skipped`);
    rmSync(at('.venv', name), { recursive: true, force: true });
  }
  markDone(step, input);
}

/** The path of ruff, installed when it is missing. */
export async function prepareRuff() {
  const ruff = at('.venv', 'tools', 'bin', 'ruff');
  if (!isDone('ruff', RUFF) || !existsSync(ruff)) {
    say('• ruff: installing');
    const uv = await findUv();
    await makeEnvironment(uv, 'python3', 'tools');
    await must('Installing ruff', uv, [
      'pip',
      'install',
      '--quiet',
      '--python',
      at('.venv', 'tools', 'bin', 'python'),
      RUFF,
    ]);
    markDone('ruff', RUFF);
  }
  return ruff;
}

async function makeEnvironment(uv, python, name) {
  const folder = at('.venv', name);
  rmSync(folder, { recursive: true, force: true });
  await must(`Making .venv/${basename(folder)}`, uv, ['venv', '--quiet', '--no-project', '--python', python, folder]);
}

async function findUv() {
  if (output('uv', ['--version']) !== null) return 'uv';
  const uv = at('.venv', 'uv', 'bin', 'uv');
  if (!existsSync(uv)) {
    say('• uv: installing (there is none on PATH)');
    await must('Making .venv/uv', 'python3', ['-m', 'venv', at('.venv', 'uv')]);
    await must('Installing uv', at('.venv', 'uv', 'bin', 'pip'), ['install', '--quiet', 'uv']);
  }
  return uv;
}
