// Makes what is missing, and nothing twice: npm packages, the addon, dist/, test environments. Every step leaves a stamp
// in .setup/ with a hash of what it was made from; the step is skipped while the hash is the same.
//
//   node scripts/set-up.mjs [--only packages,addon,dist,environments]
//
// Test environments are not part of `npm start`: it runs on whatever python3 there is.

import { existsSync, readFileSync, rmSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { at, fingerprint, isDone, main, markDone, must, node, output, Stop, say } from './project.mjs';
import { prepareEnvironments, testPythons } from './python-environments.mjs';

const steps = {
  async packages() {
    const input = fingerprint(['package-lock.json']);
    if (!isDone('packages', input) || !existsSync(at('node_modules'))) {
      say('• npm packages: installing');
      // What is older than Node 22 here only installs; everything else runs on the Node that it installs.
      await must('Installing the npm packages', 'npm', ['ci', '--no-audit', '--no-fund', '--loglevel=error']);
      markDone('packages', input);
    }
    if (output(node, ['--version'])?.startsWith('v22.') !== true) {
      throw new Stop(
        'node_modules/.bin/node is not Node 22: remove node_modules and run "npm ci" (its install script must be allowed).',
      );
    }
  },

  async addon() {
    const sources = ['Cargo.toml', 'Cargo.lock', 'build.rs', 'src', 'crates', '.cargo'];
    const { napi, version } = JSON.parse(readFileSync(at('package.json'), 'utf8'));
    const input = fingerprint(sources) + JSON.stringify({ napi, version });
    const file = at('native', `kernelhost.linux-${process.arch}-gnu.node`);
    if (isDone('addon', input) && existsSync(file)) return;
    if (output('cargo', ['--version']) === null) {
      throw new Stop('Rust is needed to build the addon, and there is no cargo on PATH. See https://rustup.rs.');
    }
    say('• addon: building with cargo (about two minutes the first time on two cores)');
    await must('Building the addon', 'npm', ['run', '--silent', 'build:native']);
    // Cargo may have completed Cargo.lock, so the sources are hashed again.
    markDone('addon', fingerprint(sources) + JSON.stringify({ napi, version }));
  },

  async dist() {
    const input = fingerprint(['ts', 'tsconfig.json', 'tsconfig.build.json', 'native/native.d.cts']);
    if (isDone('dist', input) && existsSync(at('dist', 'index.js'))) return;
    say('• dist/: compiling TypeScript');
    // What a module that is gone was compiled to would be packed with the rest.
    rmSync(at('dist'), { recursive: true, force: true });
    await must('Compiling', 'npm', ['run', '--silent', 'build:ts']);
    markDone('dist', input);
  },

  async environments() {
    await prepareEnvironments(testPythons());
  },
};

export const allSteps = Object.keys(steps);
export const buildSteps = ['packages', 'addon', 'dist'];

export async function setUp(wanted) {
  for (const step of wanted) await steps[step]();
}

if (process.argv[1] === at('scripts', 'set-up.mjs')) {
  main(async () => {
    const { values } = parseArgs({ options: { only: { type: 'string' } } });
    const wanted = values.only?.split(',') ?? allSteps;
    const unknown = wanted.find((step) => !allSteps.includes(step));
    if (unknown !== undefined) throw new Stop(`--only: there is no step "${unknown}"; steps: ${allSteps.join(', ')}`);
    await setUp(wanted);
  });
}
