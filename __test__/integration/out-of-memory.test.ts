/**
 * Who was taken by the Linux OOM killer, and who was not. A daemon in a memory cgroup of its own, with the kernel log to read,
 * and without it: then the counters of the cgroup tell, and where they cannot be seen either, the reason says so.
 */

import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, type TestContext, test } from 'node:test';
import type { ExitReason } from 'kernelhost';
import { type Cgroup, memoryCgroup } from '../fixtures/cgroups.ts';
import { runNode, startNode } from '../fixtures/node-run.ts';
import { isAlive, pythonForTests, temporaryFolder, until } from '../helpers/index.ts';

const MIB = 1024 * 1024;
const LIMIT = 400 * MIB;

const ALLOCATE = 'held = []\nwhile True: held.append(b"x" * (8 << 20))';
/** A child that the OOM killer takes before anybody else. */
const CHILD = [
  'import subprocess, sys',
  "code = \"import time\\nopen('/proc/self/oom_score_adj', 'w').write('1000')\\nheld = []\\nwhile True: held.append(b'x' * (8 << 20))\"",
  'print(subprocess.run([sys.executable, "-S", "-c", code]).returncode)',
].join('\n');

interface Told {
  exits: Record<string, ExitReason>;
  warnings: { code: string; message: string }[];
  facts: Record<string, unknown>;
}

/**
 * A daemon that has `host`, `tell(facts)`, and how to end a call whose life dies; it prints what became of all kernels.
 * `preload` is a Python module that its template imports.
 */
const script = (launch: string, body: string, preload: { folder: string; module: string } | null = null) => `
  import { setTimeout as sleep } from 'node:timers/promises';
  import { KernelHost } from 'kernelhost';
  const host = new KernelHost({
    python: ${JSON.stringify(pythonForTests())}, shell: 'plain', launch: '${launch}',
    ${preload === null ? '' : `preload: ['${preload.module}'], defaults: { env: { PYTHONPATH: ${JSON.stringify(preload.folder)} }, inheritEnv: 'all' },`}
  });
  const hold = setInterval(() => {}, 1_000);
  const exits = {}, warnings = [], facts = {};
  const heard = new Map();
  host.on('exit', (kernel, exit) => { exits[kernel.id] ??= exit; heard.get(kernel)?.(exit); });
  host.on('warning', (warning) => warnings.push(warning));
  const died = (kernel) => new Promise((resolve) => heard.set(kernel, resolve));
  const dies = (kernel, code) => kernel.execute(code).then(() => { throw new Error('it lives'); }, (error) => error.exit);
  const kernels = async (count) => {
    const all = Array.from({ length: count }, () => host.kernel());
    await Promise.all(all.map((kernel) => kernel.start()));
    return all;
  };
  ${body}
  await host.close();
  clearInterval(hold);
  console.log(JSON.stringify({ exits, warnings, facts }));
`;

/** One is taken by the OOM killer, one is killed by hand in the very moment that is told, one goes on. */
const TAKEN_AND_KILLED = `
  const [taken, killed, other] = await kernels(3);
  facts.other = other.pid;
  const told = died(taken);
  const taking = dies(taken, ${JSON.stringify(ALLOCATE)});
  await told;
  const end = died(killed);
  process.kill(killed.pid, 'SIGKILL');
  await end;
  facts.taken = (await taking).message;
  facts.ids = { taken: taken.id, killed: killed.id };
  facts.after = [await taken.execute('1 + 1'), await other.execute('2 + 2')].map(({ text, life }) => [text, life.generation]);
  // Killed by hand much later.
  const late = died(other);
  facts.ids.late = other.id;
  process.kill(other.pid, 'SIGKILL');
  await late;
`;

/** Taken while it starts, before any cell. */
const TAKEN_STARTING = `
  const error = await host.kernel({ init: ${JSON.stringify(ALLOCATE)} }).start().catch((error) => error);
  facts.code = error.code;
  facts.exit = error.exit;
`;

/** `hears`: the log names the victim, so its kernel is told; a counter may have several kernels behind it. */
const childTaken = (hears: 'kernel' | 'host') => `
  const [kernel, other] = await kernels(2);
  const { pid } = kernel;
  const warned = new Promise((resolve) => ${hears}.once('warning', resolve));
  const { stdout } = await kernel.execute(${JSON.stringify(CHILD)});
  facts.warning = await Promise.race([warned, sleep(5_000, 'no warning')]);
  facts.code = stdout.trim();
  facts.samePid = kernel.pid === pid && kernel.lastExit === null && other.lastExit === null;
  facts.text = (await kernel.execute('1 + 1')).text;
  // Its victim explains nothing that happens later.
  await sleep(2_500);
  const end = died(kernel);
  process.kill(pid, 'SIGKILL');
  facts.killed = (await end).cause;
`;

/**
 * What a template has and its forks have not: it is free again once the template is taken, so that nobody else is taken
 * before it is quite gone.
 */
const OWN_MEMORY = [
  'import mmap',
  'own = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)',
  'own.madvise(mmap.MADV_DONTFORK)',
  'for at in range(0, len(own), mmap.PAGESIZE): own[at] = 1',
].join('\n');

/**
 * The template is what the OOM killer prefers; a kernel uses up the memory until it is taken. The one after it is killed by
 * hand.
 */
const TEMPLATE_TAKEN = `
  const { writeFileSync } = await import('node:fs');
  const { once } = await import('node:events');
  const [kernel] = await kernels(1);
  const taken = await host.warm();
  facts.pids = { taken: taken.pid };
  writeFileSync('/proc/' + taken.pid + '/oom_score_adj', '1000');
  const told = once(host, 'template');
  const fill = [
    'import time',
    'open("/proc/self/oom_score_adj", "w").write("0")',
    'held = []',
    'def alive():',
    '    try: return open("/proc/' + taken.pid + '/stat").read().rpartition(")")[2].split()[0] not in "ZX"',
    '    except OSError: return False',
    'while alive():',
    '    held.append(b"x" * (64 << 10))',
    '    time.sleep(0.001)',
    'del held',
  ].join('\\n');
  const cell = await kernel.execute(fill);
  facts.taken = (await told)[0].exit;
  facts.cell = [cell.status, cell.life.generation];
  facts.text = (await kernel.execute('1 + 1')).text;
  const killed = await host.warm();
  facts.pids.killed = killed.pid;
  const toldAgain = once(host, 'template');
  process.kill(killed.pid, 'SIGKILL');
  facts.killed = (await toldAgain)[0].exit;
`;

/** Runs a daemon in a memory cgroup; null when there can be none, and the test is skipped. */
async function inCgroup(
  t: TestContext,
  launch: string,
  body: string,
  through: readonly string[] = [],
  preload: { folder: string; module: string } | null = null,
): Promise<Told | null> {
  const cgroup = memoryCgroup(t, LIMIT);
  if (typeof cgroup === 'string') {
    t.skip(cgroup);
    return null;
  }
  const run = await runNode(t, script(launch, body, preload), {
    through: [...cgroup.enter, ...through],
    deadlineMs: 60_000,
  });
  assert.equal(run.code, 0, `${run.signal}\n${run.stdout}\n${run.stderr}`);
  await until('the cgroup is empty', () => !cgroup.processes().some(isAlive), 5_000);
  return JSON.parse(run.stdout) as Told;
}

async function takeTemplate(t: TestContext, through: readonly string[] = []): Promise<Told | null> {
  const folder = temporaryFolder(t);
  writeFileSync(join(folder, 'own_memory.py'), OWN_MEMORY);
  return inCgroup(t, 'auto', TEMPLATE_TAKEN, through, { folder, module: 'own_memory' });
}

function exitOf({ exits, facts }: Told, who: 'taken' | 'killed' | 'late'): ExitReason {
  const exit = exits[(facts.ids as Record<string, string>)[who] ?? ''];
  assert.ok(exit !== undefined, who);
  return exit;
}

/** What holds wherever the evidence comes from. */
function assertToldApart(told: Told): { taken: ExitReason; byHand: ExitReason[] } {
  const taken = exitOf(told, 'taken');
  assert.equal(taken.cause, 'out-of-memory', `${taken.message} ${taken.evidence}`);
  assert.deepEqual(taken.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
  assert.match(taken.message, /out of memory/);
  assert.match(taken.message, /OOM killer/);
  assert.match(taken.message, /while a cell was running/);
  assert.equal(taken.message, told.facts.taken);
  const peak = taken.usage?.maxRssBytes ?? 0;
  assert.ok(peak > LIMIT / 4 && peak < LIMIT + 64 * MIB, `${peak / MIB} MiB`);
  assert.match(taken.message, new RegExp(`${Math.floor(peak / MIB)} MiB`));
  const byHand = [exitOf(told, 'killed'), exitOf(told, 'late')];
  for (const exit of byHand) {
    assert.equal(exit.cause, 'external-signal', `${exit.message} ${exit.evidence}`);
    assert.equal(exit.status.kind === 'signaled' && exit.status.signal, 'SIGKILL');
    assert.doesNotMatch(exit.message, /the Linux OOM killer took/);
    assert.ok(exit.evidence.length > 0);
  }
  assert.deepEqual(told.facts.after, [
    ['2', 2],
    ['4', 1],
  ]);
  assert.deepEqual(told.warnings, []);
  return { taken, byHand };
}

function assertChildTold({ facts, exits, warnings }: Told): void {
  assert.equal(facts.code, '-9');
  assert.equal(facts.samePid, true);
  assert.equal(facts.text, '2');
  assert.equal(facts.killed, 'external-signal', JSON.stringify(Object.values(exits).map(({ evidence }) => evidence)));
  assert.equal((facts.warning as { code?: string }).code, 'WARN_CHILD_OUT_OF_MEMORY', JSON.stringify(facts.warning));
  assert.match((facts.warning as { message: string }).message, /OOM killer/);
  assert.deepEqual(
    warnings.map(({ code }) => code),
    ['WARN_CHILD_OUT_OF_MEMORY'],
    'once, also to who listens to the host',
  );
}

/** Of a template: as it is for kernels. Returns what each end rests on. */
function assertTemplateTold({ facts, exits, warnings }: Told): { taken: ExitReason; killed: ExitReason } {
  const { taken, killed } = facts as Record<'taken' | 'killed', ExitReason>;
  assert.equal(taken.cause, 'out-of-memory', `${taken.message} ${taken.evidence}`);
  assert.match(taken.message, /^Template of .*out of memory: the Linux OOM killer took it/);
  assert.match(taken.message, /Its kernels go on/);
  assert.equal(killed.cause, 'external-signal', `${killed.message} ${killed.evidence}`);
  assert.ok(killed.evidence.length > 0);
  const { pids } = facts as { pids: Record<'taken' | 'killed', number> };
  assert.deepEqual([taken.pid, killed.pid], [pids.taken, pids.killed]);
  assert.deepEqual(facts.cell, ['ok', 1], 'its kernel goes on');
  assert.equal(facts.text, '2');
  assert.ok(Object.values(exits).every(({ cause }) => cause === 'close'));
  assert.deepEqual(warnings, [], 'a template is nothing that a kernel had started');
  return { taken, killed };
}

/** Whether a process begun like this can read the kernel log. */
async function readsLog(t: TestContext, through: readonly string[]): Promise<boolean> {
  const source =
    "import { closeSync, openSync } from 'node:fs'; try { closeSync(openSync('/dev/kmsg', 'r')); console.log('yes'); } catch { console.log('no'); }";
  const { stdout } = await runNode(t, source, { through });
  return stdout.trim() === 'yes';
}

describe('with the kernel log', () => {
  for (const launch of ['fork', 'spawn']) {
    test(`C02: a kernel that the OOM killer takes says so, one killed by hand in the same moment does not (${launch})`, async (t) => {
      if (!(await readsLog(t, []))) return t.skip('the kernel log cannot be read here');
      const told = await inCgroup(t, launch, TAKEN_AND_KILLED);
      if (told === null) return;
      const { taken, byHand } = assertToldApart(told);
      assert.match(taken.evidence.join('\n'), new RegExp(`kernel log.*Killed process ${taken.pid}\\b`));
      for (const { pid, evidence } of byHand)
        assert.match(evidence.join('\n'), new RegExp(`kernel log.*no .*${pid}`), 'what was looked at');
    });

    test(`C02: a kernel that the OOM killer takes while it starts says so (${launch})`, async (t) => {
      if (!(await readsLog(t, []))) return t.skip('the kernel log cannot be read here');
      const told = await inCgroup(t, launch, TAKEN_STARTING);
      if (told === null) return;
      assert.equal(told.facts.code, 'ERR_KERNEL_START');
      const exit = told.facts.exit as ExitReason;
      assert.equal(exit.cause, 'start-failed');
      assert.match(exit.message, /out of memory: the Linux OOM killer took .* before it was ready/);
      assert.match(exit.evidence.join('\n'), new RegExp(`kernel log.*Killed process ${exit.pid}\\b`));
      assert.deepEqual(told.warnings, []);
    });

    test(`C02: a child that the OOM killer takes is no death of its kernel, but a warning (${launch})`, async (t) => {
      if (!(await readsLog(t, []))) return t.skip('the kernel log cannot be read here');
      const told = await inCgroup(t, launch, childTaken('kernel'));
      if (told === null) return;
      assertChildTold(told);
    });
  }
});

test('C02: a template that the OOM killer takes says so, one killed by hand does not', async (t) => {
  if (!(await readsLog(t, []))) return t.skip('the kernel log cannot be read here');
  const told = await takeTemplate(t);
  if (told === null) return;
  const { taken, killed } = assertTemplateTold(told);
  assert.match(taken.evidence.join('\n'), new RegExp(`kernel log.*Killed process ${taken.pid}\\b`));
  assert.match(killed.evidence.join('\n'), new RegExp(`kernel log.*no .*${killed.pid}`));
});

test('C02: a template that the OOM killer takes while it warms up says so, and the start is cold', async (t) => {
  if (!(await readsLog(t, []))) return t.skip('the kernel log cannot be read here');
  const folder = temporaryFolder(t);
  writeFileSync(join(folder, 'takes_all.py'), ALLOCATE);
  const body = `
    const hungry = new KernelHost({
      python: ${JSON.stringify(pythonForTests())}, shell: 'plain', preload: ['takes_all'],
      defaults: { env: { PYTHONPATH: ${JSON.stringify(folder)} }, inheritEnv: 'all' },
    });
    const life = await hungry.kernel().start();
    facts.launch = life.launch;
    facts.reason = life.launchReason;
    await hungry.close();
  `;
  const told = await inCgroup(t, 'auto', body);
  if (told === null) return;
  assert.equal(told.facts.launch, 'spawn');
  assert.match(told.facts.reason as string, /out of memory: the Linux OOM killer took it before it was ready/);
});

test('C02: the variables of a kernel that the OOM killer takes come back from the copy of its last cell', async (t) => {
  if (!(await readsLog(t, []))) return t.skip('the kernel log cannot be read here');
  const body = `
    const kernel = host.kernel({ recovery: 'checkpoint' });
    await kernel.execute('x = 1');
    await kernel.execute('x += 1');
    // Answered once the life has copied itself.
    await kernel.isComplete('1');
    facts.exit = await dies(kernel, 'x = "lost"\\n' + ${JSON.stringify(ALLOCATE)});
    const { text, recovered } = await kernel.execute('x');
    Object.assign(facts, { text, state: recovered.state, lostCells: recovered.lostCells });
  `;
  const told = await inCgroup(t, 'fork', body);
  if (told === null) return;
  const { exit, ...rest } = told.facts as { exit: ExitReason };
  assert.equal(exit.cause, 'out-of-memory');
  assert.deepEqual(rest, { text: '2', state: 'checkpoint', lostCells: 1 });
});

/** Each takes the kernel log from the daemon in its own way. */
const withoutLog: Record<string, { through: readonly string[]; why: RegExp; readable: boolean }> = {
  'without the right to read it': {
    through: ['setpriv', '--bounding-set', '-syslog,-sys_admin'],
    why: /kernel log.*cannot be read/,
    readable: false,
  },
  // The log names other pids than are known here.
  'in a PID namespace': {
    through: ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child'],
    why: /kernel log.*PID namespace/,
    readable: true,
  },
};

for (const [how, { through, why, readable }] of Object.entries(withoutLog)) {
  describe(`without the kernel log: ${how}`, () => {
    test('C02: the counters of the cgroup alone tell who was taken and who was killed by hand', async (t) => {
      if (!readable && (await readsLog(t, through))) return t.skip('everybody may read the kernel log here');
      const told = await inCgroup(t, 'fork', TAKEN_AND_KILLED, through);
      if (told === null) return;
      const { taken, byHand } = assertToldApart(told);
      assert.match(taken.evidence.join('\n'), /memory\.(oom_control|events)/);
      assert.match(taken.evidence.join('\n'), /khtest-memory/);
      for (const { evidence } of [taken, ...byHand]) assert.match(evidence.join('\n'), why);
      for (const { evidence } of byHand) assert.match(evidence.join('\n'), /memory\.(oom_control|events).*not risen/);
    });

    test('C02: they tell it of a template too', async (t) => {
      if (!readable && (await readsLog(t, through))) return t.skip('everybody may read the kernel log here');
      const told = await takeTemplate(t, through);
      if (told === null) return;
      const { taken, killed } = assertTemplateTold(told);
      assert.match(taken.evidence.join('\n'), /khtest-memory.*memory\.(oom_control|events).*rose/);
      assert.match(killed.evidence.join('\n'), /memory\.(oom_control|events).*not risen/);
      for (const { evidence } of [taken, killed]) assert.match(evidence.join('\n'), why);
    });

    test('C02: a child that was taken is a warning, and explains no later death', async (t) => {
      if (!readable && (await readsLog(t, through))) return t.skip('everybody may read the kernel log here');
      const told = await inCgroup(t, 'fork', childTaken('host'), through);
      if (told === null) return;
      assertChildTold(told);
      assert.match(told.warnings[0]?.message ?? '', /khtest-memory.*"kernel-[12]" or "kernel-[12]"/);
    });
  });
}

test('C02: with neither log nor counters nothing is claimed, and the reason says what could not be read', async (t) => {
  if (process.getuid?.() !== 0) return t.skip('only root can hide the cgroups from a process');
  const through = [
    ...['unshare', '--pid', '--fork', '--mount', '--mount-proc', '--kill-child'],
    ...['sh', '-c', 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', 'sh'],
  ];
  const body = `
    const [kernel] = await kernels(1);
    facts.exit = await dies(kernel, ${JSON.stringify(ALLOCATE)});
    facts.text = (await kernel.execute('1 + 1')).text;
  `;
  const told = await inCgroup(t, 'fork', body, through);
  if (told === null) return;
  const exit = told.facts.exit as ExitReason;
  assert.equal(exit.cause, 'external-signal');
  assert.match(exit.evidence.join('\n'), /kernel log/);
  assert.match(exit.evidence.join('\n'), /cgroup.*cannot be seen|counter/);
  assert.match(exit.message, /when memory runs out/);
  assert.equal(told.facts.text, '2');
});

test('C02: where the whole machine is not short, a SIGKILL is told within a second all the same', async (t) => {
  const body = `
    const [kernel] = await kernels(1);
    const end = died(kernel);
    const at = performance.now();
    process.kill(kernel.pid, 'SIGKILL');
    facts.exit = await end;
    facts.ms = performance.now() - at;
  `;
  const { line } = startNode(t, script('fork', body));
  const { facts } = await line<Told>();
  assert.equal((facts.exit as ExitReason).cause, 'external-signal');
  assert.ok((facts.exit as ExitReason).evidence.length > 0);
  assert.ok((facts.ms as number) < 1_000, `${facts.ms} ms`);
});

test('C66: a kernel that is taken leaves none of its workers behind', async (t) => {
  const cgroup: Cgroup | string = memoryCgroup(t, LIMIT);
  if (typeof cgroup === 'string') return t.skip(cgroup);
  const code = [
    'import multiprocessing, subprocess',
    'context = multiprocessing.get_context("fork")',
    'pool = context.Pool(4)',
    'children = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]',
    'print([worker.pid for worker in pool._pool] + [child.pid for child in children])',
  ].join('\n');
  const body = `
    const [kernel] = await kernels(1);
    facts.pids = JSON.parse((await kernel.execute(${JSON.stringify(code)})).stdout);
    facts.exit = await dies(kernel, 'open("/proc/self/oom_score_adj", "w").write("1000")\\n' + ${JSON.stringify(ALLOCATE)});
    console.log(JSON.stringify({ exits, warnings, facts }));
    await sleep(2_000);
  `;
  const { line } = startNode(t, script('fork', body), { through: cgroup.enter });
  const { facts } = await line<Told>();
  assert.equal((facts.exit as ExitReason).cause, 'out-of-memory');
  const pids = facts.pids as number[];
  assert.equal(pids.length, 7);
  await until('the workers are gone', () => !pids.some(isAlive), 2_000);
  assert.deepEqual((facts.exit as ExitReason).leftovers.remaining, []);
});
