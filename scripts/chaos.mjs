// `npm run test:chaos -- [--seconds N] [--seed S] [--kernels K] [--rounds R]`, and `npm run test:soak -- [--forks N]`: sets up
// what is missing and runs the suite on the main Python; flags pass through. The seed is printed, and gives the same plan again.

import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { at, main, node, run } from './project.mjs';
import { environmentsOf, testPythons } from './python-environments.mjs';
import { allSteps, setUp } from './set-up.mjs';

main(async () => {
  await setUp(allSteps);
  const pythons = testPythons().sort((a, b) => b.newness - a.newness);
  const primary = pythons.find(({ version }) => version === '3.14') ?? pythons[0];
  const { ipython, plain } = environmentsOf(primary);
  const [first, ...rest] = process.argv.slice(2);
  const isSoak = first === 'soak';
  const flags = isSoak || first === undefined ? rest : [first, ...rest];
  const program = at('__test__', 'chaos', isSoak ? 'soak.ts' : 'run.ts');
  // Its own folder for temporary files: whatever is left in it has been left by this run.
  const folder = mkdtempSync(join(tmpdir(), 'kernelhost-test-chaos-'));
  const code = await run(node, ['--expose-gc', program, ...flags], {
    env: { KERNELHOST_TEST_PYTHON: ipython, KERNELHOST_TEST_PYTHON_PLAIN: plain, TMPDIR: folder },
  });
  // After a failure the history is in it.
  if (code === 0) rmSync(folder, { recursive: true, force: true });
  return code;
});
