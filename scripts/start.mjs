// `npm start`: sets up what is missing and runs the demonstration.

import { at, main, node, run } from './project.mjs';
import { buildSteps, setUp } from './set-up.mjs';

main(async () => {
  await setUp(buildSteps);
  return run(node, [at('examples', 'demo.ts')]);
});
