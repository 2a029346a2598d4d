// `npm run bench -- [flags]`: sets up what is missing and runs the benchmark; flags pass through.

import { at, main, node, run } from './project.mjs';
import { buildSteps, setUp } from './set-up.mjs';

main(async () => {
  await setUp(buildSteps);
  return run(node, [at('benchmark', 'run.ts'), ...process.argv.slice(2)]);
});
