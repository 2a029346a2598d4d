/** What the package weighs, and how long its import takes in a fresh Node. */
import { execFileSync, spawnSync } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { gzipSync } from 'node:zlib';

const root = join(import.meta.dirname, '..');

export interface PackageFacts {
  addonBytes: number | null;
  /** The packed package with the addon, in whichever of the two packages that is. */
  packedBytes: number | null;
}

export function packageFacts(): PackageFacts {
  const addon = readAddon();
  return { addonBytes: addon?.length ?? null, packedBytes: addon === null ? null : packedBytes(addon) };
}

function readAddon(): Buffer | null {
  try {
    const folder = join(root, 'native');
    const name = readdirSync(folder).find((file) => file.endsWith('.node'));
    return name === undefined ? null : readFileSync(join(folder, name));
  } catch {
    return null;
  }
}

interface Packed {
  size: number;
  files: { path: string }[];
}

function packedBytes(addon: Buffer): number | null {
  try {
    const listing = execFileSync('npm', ['pack', '--dry-run', '--json', '--ignore-scripts'], {
      cwd: root,
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    // A list, or an object by name, as the version of npm has it.
    const [packed] = Object.values(JSON.parse(listing) as Record<string, Packed>);
    if (packed === undefined) return null;
    const holdsAddon = packed.files.some(({ path }) => path.endsWith('.node'));
    return packed.size + (holdsAddon ? 0 : gzipSync(addon).length);
  } catch {
    return null;
  }
}

const imports = {
  kernelhost: `const { KernelHost } = await import('${pathToFileURL(join(root, 'index.js'))}'); new KernelHost();`,
  'zeromq-ipykernel': `const { Dealer } = await import('zeromq'); new Dealer();`,
};

/** Milliseconds from the start of the import to a constructed object, by contender. */
export function importMs(contender: keyof typeof imports): number {
  const program = `
    const began = performance.now();
    try {
      ${imports[contender]}
      console.log(performance.now() - began);
    } catch (error) {
      console.error(error.message);
    }
    process.exit();`;
  const { stdout, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', program], {
    cwd: import.meta.dirname,
    encoding: 'utf8',
  });
  if (stdout === '') throw new Error(stderr);
  return Number(stdout);
}

export const importers: readonly (keyof typeof imports)[] = ['kernelhost', 'zeromq-ipykernel'];
