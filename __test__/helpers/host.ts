/** A host for one test: closed at its end, and then nothing it started may be left. */

import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Kernel, KernelHost, type KernelHostOptions } from 'kernelhost';
import { until } from './deadline.ts';
import { allProcesses, commandLine, isGone, processStat } from './processes.ts';
import { pythonForTests } from './pythons.ts';

/** The part of node:test's context that is used here. */
export interface TestContext {
  after(task: () => void | Promise<void>): void;
}

export interface HostForTest extends KernelHost {
  /** Every process that a `start` or `template` event has named. */
  readonly seen: ReadonlySet<number>;
}

const seenBy = new WeakMap<KernelHost, Set<number>>();

/** Starts a host with the tests' Python and registers its close and the check for left-over processes. */
export function startHost(t: TestContext, options: KernelHostOptions = {}): HostForTest {
  const host = new KernelHost({ python: pythonForTests(), ...options });
  const seen = new Set<number>();
  seenBy.set(host, seen);
  host.on('start', (_kernel, life) => seen.add(life.pid));
  host.on('template', ({ pid }) => seen.add(pid));
  t.after(async () => {
    await host.close({ graceMs: 500 });
    await assertNoOrphans(host);
  });
  return Object.assign(host, { seen });
}

/** A host with one kernel that is already up. */
export async function startKernel(
  t: TestContext,
  options: KernelHostOptions = {},
): Promise<{ host: HostForTest; kernel: Kernel }> {
  const host = startHost(t, options);
  const kernel = host.kernel();
  await kernel.start();
  return { host, kernel };
}

/** Processes are reaped moments after they end; longer than this and they are left over. */
const GONE_WITHIN_MS = 5_000;

/** Fails when a process that the host has started, or one in such a process's session, is still there. */
export async function assertNoOrphans(host: KernelHost): Promise<void> {
  const pids = [...(seenBy.get(host) ?? [])];
  const left = () => {
    const sessions = new Set(pids);
    return allProcesses()
      .filter(({ pid, session, state }) => state !== 'Z' && (sessions.has(pid) || sessions.has(session)))
      .map(({ pid }) => pid)
      .concat(pids.filter((pid) => !isGone(pid) && processStat(pid)?.parent === process.pid));
  };
  try {
    await until('no process left', () => left().length === 0, GONE_WITHIN_MS);
  } catch {
    const names = [...new Set(left())].map(
      (pid) => `${pid} ${processStat(pid)?.state ?? ''} ${commandLine(pid).join(' ')}`,
    );
    throw new Error(`processes left over by this host:\n${names.join('\n')}`);
  }
}

/** A private folder that is removed at the end of the test. */
export function temporaryFolder(t: TestContext): string {
  const folder = mkdtempSync(join(tmpdir(), 'kernelhost-test-'));
  t.after(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}
