/** `kernelhost doctor --leftovers`: what daemons that are gone have left behind, and with `--kill` its end. */

import { leftovers, type NativeStray } from '../native.ts';
import { paint, write } from './terminal.ts';

export interface LeftoversReport {
  leftovers: NativeStray[];
  /** What was asked to end and is still there. Null: nothing was asked to. */
  remaining: NativeStray[] | null;
}

/** Exit code 1: there is something that was not ended. */
export async function showLeftovers({ kill, json }: { kill: boolean; json: boolean }): Promise<number> {
  const found = leftovers(kill);
  const remaining = kill && found.length > 0 ? await stillThere() : null;
  const report: LeftoversReport = { leftovers: found, remaining };
  await write(process.stdout, json ? `${JSON.stringify(report, null, 2)}\n` : text(report));
  return (remaining ?? found).length === 0 ? 0 : 1;
}

/** What is killed is gone within milliseconds; what starts others all the time needs more than one try. */
const TRIES = 20;
const PAUSE_MS = 50;

async function stillThere(): Promise<NativeStray[]> {
  let left = leftovers(true);
  for (let tried = 1; tried < TRIES && left.length > 0; tried++) {
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    left = leftovers(true);
  }
  return left;
}

function text({ leftovers: found, remaining }: LeftoversReport): string {
  if (found.length === 0) {
    return `${paint('green', 'No daemon that is gone has left anything behind.', process.stdout)}\n`;
  }
  const lines = found.map(({ pid, command, hostPid, kernel, rssBytes }) => {
    const of = kernel === null ? 'served the daemon' : `of its kernel ${kernel}`;
    return `${String(pid).padStart(8)}  ${mebibytes(rssBytes).padStart(10)}  daemon ${hostPid} (gone), ${of}: ${command}`;
  });
  const many = found.length === 1 ? '1 process' : `${found.length} processes`;
  const verdict =
    remaining === null
      ? paint('yellow', `${many} left behind. End them with: kernelhost doctor --leftovers --kill`, process.stdout)
      : remaining.length === 0
        ? paint('green', `${many} ended.`, process.stdout)
        : [
            paint('red', `${remaining.length} of ${many} could not be ended:`, process.stdout),
            ...remaining.map(({ pid, refused }) => `${String(pid).padStart(8)}  ${refused ?? 'it is still there'}`),
          ].join('\n');
  return `${lines.join('\n')}\n\n${verdict}\n`;
}

function mebibytes(bytes: number): string {
  return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}
