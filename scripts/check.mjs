// `npm run check`: everything that can be judged without running the product. All checks run; the summary names those
// that failed.

import { existsSync } from 'node:fs';
import { at, main, run, say } from './project.mjs';
import { prepareRuff } from './python-environments.mjs';
import { buildSteps, setUp } from './set-up.mjs';

main(async () => {
  await setUp(buildSteps);
  const ruff = await prepareRuff();
  const checks = [
    ['Rust format', 'cargo', ['fmt', '--all', '--check']],
    ['Rust lints', 'cargo', ['clippy', '--workspace', '--all-targets', '--quiet', '--', '-D', 'warnings']],
    [
      'JavaScript format and lints',
      'biome',
      ['ci', '--error-on-warnings', ...(process.stdout.isTTY ? [] : ['--colors=off']), '.'],
    ],
    ['types', 'tsc', ['-p', 'tsconfig.json']],
    // The build above has just written them: a difference means that what is committed is of another source.
    ['generated files', 'git', ['diff', '--exit-code', '--stat', '--', 'native']],
  ];
  if (existsSync(at('python'))) {
    checks.push(['Python lints', ruff, ['check', 'python']], ['Python format', ruff, ['format', '--check', 'python']]);
  }
  const failed = [];
  for (const [name, command, args] of checks) {
    say(`• ${name}`);
    if ((await run(command, args)) !== 0) failed.push(name);
  }
  say(failed.length === 0 ? `\nAll ${checks.length} checks passed.` : `\nFailed: ${failed.join(', ')}.`);
  return failed.length === 0 ? 0 : 1;
});
