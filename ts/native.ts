/**
 * The only importer of `native/`: the generated loader and its generated types. Whatever differs between what the
 * addon calls a thing and what the rest of `ts/` calls it is adapted here.
 *
 * The addon is loaded when the first host is made, not when the package is imported: `kernelhost doctor` must be able
 * to say what is wrong with it, and `import 'kernelhost'` must stay free of side effects.
 */

import { createRequire } from 'node:module';
import { join } from 'node:path';
import type * as generated from '../native/native.cjs';
import { KernelHostError, UnsupportedPlatformError } from './errors.ts';

export type NativeCell = generated.Cell;
export type NativeCellRequest = generated.CellRequest;
export type NativeCheckpoint = generated.Checkpoint;
export type NativeExitReason = generated.ExitReason;
export type NativeFailure = generated.Failure;
export type NativeHostEvent = generated.HostEvent;
export type NativeHostOptions = generated.HostOptions;
export type NativeKernelOptions = generated.KernelOptions;
export type NativeLife = generated.Life;
export type NativeOutput = generated.Output;
export type NativeStray = generated.Stray;
export type NativeQuery = generated.Query;
export type NativeReply = generated.Reply;
export type NativeThawing = generated.Thawing;
export type NativeTemplateInfo = generated.TemplateInfo;
export type EnvironmentVariable = generated.EnvironmentVariable;

/** The addon's objects as interfaces, so that a test can put its own in their place. */
export type NativeHost = Pick<generated.NativeHost, keyof generated.NativeHost>;
export type NativeKernel = Pick<generated.NativeKernel, keyof generated.NativeKernel>;

/** What the addon exports, as far as it is used. */
export interface NativeBinding {
  NativeHost: new (options: NativeHostOptions, onEvents: (events: NativeHostEvent[]) => void) => NativeHost;
}

/** The package's `python/` folder. `ts/` and `dist/` stand beside it, so the path is the same from source and built. */
export const runtimeDirectory: string = join(import.meta.dirname, '..', 'python');

let loaded: NativeBinding | undefined;

/** Loads the addon, once. Throws one error that names the platform, what was tried, and the fix. */
export function loadBinding(): NativeBinding {
  loaded ??= load();
  return loaded;
}

/** What hosts that are gone have left behind; with `end` it is killed. Takes some milliseconds. */
export function leftovers(end: boolean): NativeStray[] {
  return (loadBinding() as NativeBinding & Pick<typeof generated, 'leftovers'>).leftovers(end);
}

function load(): NativeBinding {
  if (process.platform !== 'linux') {
    throw new UnsupportedPlatformError(
      `kernelhost runs on Linux only; this is ${process.platform} ${process.arch}. ` +
        'Run the daemon on Linux (a container or a virtual machine will do).',
    );
  }
  try {
    return createRequire(import.meta.url)('../native/native.cjs') as NativeBinding;
  } catch (error) {
    throw loadError(error, { arch: process.arch, glibc: glibcVersion() });
  }
}

const builtArchitectures = ['x64', 'arm64'];

/** @internal Separate from `load`, so that tests can reach every platform from one. */
export function loadError(
  cause: unknown,
  { arch, glibc }: { arch: string; glibc: string | null },
): UnsupportedPlatformError | KernelHostError {
  const libc = glibc === null ? 'not glibc (musl?)' : `glibc ${glibc}`;
  const platform = `linux ${arch}, ${libc}`;
  if (glibc === null || !builtArchitectures.includes(arch)) {
    return new UnsupportedPlatformError(
      `kernelhost has no addon for this platform (${platform}). It is built for linux x64 and linux arm64 with glibc: ` +
        'use a glibc image such as Debian, Ubuntu or Fedora.',
      { cause },
    );
  }
  const file = `kernelhost.linux-${arch}-gnu.node`;
  const attempts = reasons(cause);
  return new KernelHostError(
    'ERR_ADDON_NOT_LOADED',
    `kernelhost could not load its addon on ${platform}. Tried native/${file} and the package kernelhost-linux-${arch}-gnu` +
      `${attempts.length > 0 ? `: ${attempts.join('; ')}` : ''}. ` +
      `Install again with optional dependencies (npm install --include=optional kernelhost), or run "npm run build" in a clone.`,
    { cause },
  );
}

/** The loader nests one failed attempt into the next as `cause`; each is worth one line, the same one only once. */
function reasons(error: unknown): string[] {
  const lines = new Set<string>();
  let current = error;
  for (let depth = 0; current instanceof Error && depth < 8; depth++) {
    const line = current.message.split('\n')[0]?.trim() ?? '';
    // The loader's own summary blames npm whatever happened; the attempts below it say what did.
    if (line !== '' && !line.startsWith('Cannot find native binding')) lines.add(line);
    current = current.cause;
  }
  return [...lines];
}

/** The C library this Node runs on, or null when that is not glibc. */
export function glibcVersion(): string | null {
  // Without this the report looks up every network interface, which can take seconds.
  (process.report as { excludeNetwork?: boolean }).excludeNetwork = true;
  const report = process.report.getReport() as { header?: { glibcVersionRuntime?: string } };
  return report.header?.glibcVersionRuntime ?? null;
}
