// `npm test [-- paths]`: sets up what is missing and runs every suite. All suites run; the summary says how each ended.
//
// | suite                              | main Python | every other one of KERNELHOST_TEST_PYTHONS |
// |------------------------------------|-------------|--------------------------------------------|
// | Rust (nextest, or cargo test)      | once        | –                                          |
// | __test__/{unit,cli}                | yes         | –                                          |
// | __test__/integration               | all         | core*.test.ts                              |
// | python/tests (unittest)            | yes         | yes                                        |
// | the same without IPython           | yes         | –                                          |
//
// The main Python is 3.14 where it is among them, else the newest.
//
// The whole suite on every version would take hours on two cores; what differs between versions is the runtime, and the
// core files and the Python suite are about it. __test__/package has its own command, because it packs and installs.
//
// With paths, only these test files run, on the main Python. KERNELHOST_TEST_PYTHON, KERNELHOST_TEST_PYTHON_PLAIN
// and KERNELHOST_TEST_PYTHON_LIBRARIES tell the tests which interpreters to use, KERNELHOST_TEST_DILL where dill is.

import { existsSync, readdirSync } from 'node:fs';
import { join, relative } from 'node:path';
import { at, main, node, output, root, run, say } from './project.mjs';
import { environmentsOf, mainPython, testPythons } from './python-environments.mjs';
import { allSteps, setUp } from './set-up.mjs';

const outcomes = [];

main(async () => {
  await setUp(allSteps);
  const pythons = testPythons().sort((a, b) => b.newness - a.newness);
  const primary = mainPython(pythons);
  const others = pythons.filter((python) => python !== primary);
  const paths = process.argv.slice(2);
  if (paths.length > 0) {
    await nodeSuite('chosen files', paths, primary);
    return summary();
  }

  if (output('cargo', ['nextest', '--version']) !== null) {
    await suite('Rust', 'cargo', ['nextest', 'run', '--workspace', '--no-tests=pass'], pythonEnvironment(primary));
  } else {
    await suite('Rust', 'cargo', ['test', '--workspace', '--quiet'], pythonEnvironment(primary));
  }
  await nodeSuite(
    'unit, cli',
    ['unit', 'cli'].flatMap((folder) => testFiles(folder)),
    primary,
  );
  await nodeSuite(`integration, Python ${primary.version}`, testFiles('integration'), primary);
  await pythonSuite(primary);
  await pythonSuite(primary, 'plain');
  for (const python of others) {
    await nodeSuite(`core, Python ${python.version}`, testFiles('integration', /(^|\/)core[^/]*\.test\.ts$/), python);
    await pythonSuite(python);
  }
  return summary();
});

function pythonEnvironment(python) {
  const { ipython, plain, libraries, dill } = environmentsOf(python);
  return {
    KERNELHOST_TEST_PYTHON: ipython,
    KERNELHOST_TEST_PYTHON_PLAIN: plain,
    KERNELHOST_TEST_DILL: dill,
    ...(existsSync(libraries) ? { KERNELHOST_TEST_PYTHON_LIBRARIES: libraries } : {}),
  };
}

async function nodeSuite(name, files, python) {
  if (files.length === 0) return;
  await suite(name, node, ['--test', '--test-reporter=spec', ...files], pythonEnvironment(python));
}

/** `shell`: 'ipython' or 'plain', the environment that the suite runs in and whose kernels it tests. */
async function pythonSuite(python, shell = 'ipython') {
  const interpreter = environmentsOf(python)[shell];
  const numpy = output(interpreter, ['-c', 'import numpy']) !== null;
  await suite(`Python ${python.version}, ${shell}`, interpreter, ['-m', 'unittest', 'discover', '-s', 'python/tests'], {
    KERNELHOST_TEST_PYTHON: interpreter,
    ...(numpy ? { KERNELHOST_TEST_NUMPY: '1' } : {}),
  });
}

async function suite(name, command, args, env) {
  say(`\n— ${name} —`);
  const started = performance.now();
  const code = await run(command, args, { env });
  outcomes.push({ name, code, seconds: (performance.now() - started) / 1000 });
}

function summary() {
  say('');
  for (const { name, code, seconds } of outcomes) {
    say(`${code === 0 ? 'passed' : 'FAILED'}  ${name} (${seconds.toFixed(1)} s)`);
  }
  return outcomes.every(({ code }) => code === 0) ? 0 : 1;
}

function testFiles(folder, pattern = /\.test\.ts$/) {
  const top = at('__test__', folder);
  if (!existsSync(top)) return [];
  return readdirSync(top, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(root, join(entry.parentPath ?? entry.path, entry.name)))
    .filter((file) => pattern.test(file))
    .sort();
}
