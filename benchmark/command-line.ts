/** The benchmark's flags. Knows nothing of contenders or measures beyond their names. */
import { parseArgs } from 'node:util';

export interface CommandLine {
  quick: boolean;
  json: boolean;
  /** Names of measures or contenders; empty means all. */
  only: string[];
}

export const usage = `Usage: node benchmark/run.ts [--quick] [--json] [--only NAME]...

  --quick      fewer rounds, about two minutes, writes no files
  --json       print the results as JSON instead of tables
  --only NAME  a measure or a contender; may be given more than once
`;

export function parseCommandLine(argv: string[]): CommandLine | 'help' {
  const { values } = parseArgs({
    args: argv,
    options: {
      quick: { type: 'boolean', default: false },
      json: { type: 'boolean', default: false },
      only: { type: 'string', multiple: true, default: [] },
      help: { type: 'boolean', short: 'h', default: false },
    },
  });
  return values.help ? 'help' : { quick: values.quick, json: values.json, only: values.only };
}
