#!/usr/bin/env node
/** The `kernelhost` command: picks the subcommand and turns its outcome into an exit code. */

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { type ParseArgsConfig, parseArgs } from 'node:util';
import { InvalidOptionError, KernelHostError } from '../errors.ts';
import { nearest } from '../options.ts';
import { doctor } from './doctor.ts';
import { showLeftovers } from './leftovers.ts';
import { run } from './run.ts';
import { ignoreClosedPipe } from './terminal.ts';
import { top } from './top.ts';

const usage = `Usage: kernelhost <command> [options]

Commands:
  run FILE|-    Run a Python file (or standard input) in a kernel. Lines that begin
                with "# %%" start a new cell. If the kernel dies, its reason is
                printed and the next cell runs on a new life.
  doctor        Check whether kernels can run here, and how fast.
  doctor --leftovers [--kill]
                List (and end) what daemons that are gone have left behind.
  top [SOCKET|PID]
                Show the kernels of running hosts that have a monitor (see
                KERNELHOST_MONITOR): of all that are found, or of one. q quits.

Options of run and doctor:
  --python PATH     The interpreter. Default: KERNELHOST_PYTHON, the active virtual
                    environment, python3 on PATH.
Options of run:
  --launch HOW      auto, fork or spawn
  --shell WHICH     auto, ipython or plain
Options of doctor:
  --json            Print JSON instead of a table.
Options of top:
  --json            Print JSON, a snapshot per line.
  --once            Print one snapshot and end.

  --help, -h        Print this text.
  --version         Print the version.

Exit codes: 0 all went well; 1 a cell failed, a kernel died, or none can run;
2 the command line is wrong; 130 ended by Ctrl-C.
`;

/** The command line is wrong. */
class UsageError extends Error {}

async function main(args: string[]): Promise<number> {
  const [command, ...rest] = args;
  switch (command) {
    case undefined:
      throw new UsageError('a command is missing');
    case '--help':
    case '-h':
    case 'help':
      process.stdout.write(usage);
      return 0;
    case '--version':
      process.stdout.write(`${packageVersion()}\n`);
      return 0;
    case 'run': {
      const { values, positionals } = parse(rest, {
        python: { type: 'string' },
        launch: { type: 'string' },
        shell: { type: 'string' },
      });
      if (values.help === true) return main(['--help']);
      const [file, ...others] = positionals;
      if (file === undefined) throw new UsageError('run: give the file to run, or - for standard input');
      if (others.length > 0) throw new UsageError(`run: one file at a time; there is also ${others.join(', ')}`);
      return run(file, { python: values.python, launch: values.launch, shell: values.shell } as Parameters<
        typeof run
      >[1]);
    }
    case 'doctor': {
      const { values, positionals } = parse(rest, {
        python: { type: 'string' },
        json: { type: 'boolean' },
        leftovers: { type: 'boolean' },
        kill: { type: 'boolean' },
      });
      if (values.help === true) return main(['--help']);
      if (positionals.length > 0)
        throw new UsageError(`doctor: takes no arguments; there is ${positionals.join(', ')}`);
      if (values.leftovers === true) return showLeftovers({ kill: values.kill === true, json: values.json === true });
      if (values.kill === true) throw new UsageError('doctor: --kill goes with --leftovers');
      return doctor({ python: values.python as string | undefined, json: values.json === true });
    }
    case 'top': {
      const { values, positionals } = parse(rest, { json: { type: 'boolean' }, once: { type: 'boolean' } });
      if (values.help === true) return main(['--help']);
      const [target, ...others] = positionals;
      if (others.length > 0) throw new UsageError(`top: one host at a time; there is also ${others.join(', ')}`);
      return top({ target, json: values.json === true, once: values.once === true });
    }
    default: {
      const close = nearest(command, ['run', 'doctor', 'top', '--help', '--version']);
      throw new UsageError(`there is no command "${command}"${close === null ? '' : `; did you mean "${close}"?`}`);
    }
  }
}

function parse(
  args: string[],
  options: NonNullable<ParseArgsConfig['options']>,
): { values: Record<string, unknown>; positionals: string[] } {
  try {
    return parseArgs({ args, options: { ...options, help: { type: 'boolean', short: 'h' } }, allowPositionals: true });
  } catch (error) {
    throw new UsageError(error instanceof Error ? (error.message.split('. ')[0] ?? error.message) : String(error));
  }
}

function packageVersion(): string {
  const manifest = readFileSync(join(import.meta.dirname, '..', '..', 'package.json'), 'utf8');
  return (JSON.parse(manifest) as { version: string }).version;
}

ignoreClosedPipe();
try {
  process.exitCode = await main(process.argv.slice(2));
} catch (error) {
  if (error instanceof UsageError || error instanceof InvalidOptionError) {
    process.stderr.write(`kernelhost: ${error.message}\nTry "kernelhost --help".\n`);
    process.exitCode = 2;
  } else if (error instanceof KernelHostError) {
    process.stderr.write(`kernelhost: ${error.message}\n`);
    process.exitCode = 1;
  } else {
    throw error;
  }
}
