/** What the template does for its kernels and to them: cases of area 3, and a forked life held against a spawned one. */

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { join } from 'node:path';
import { test } from 'node:test';
import { type KernelHost, KernelHostError, type TemplateInfo } from 'kernelhost';
import { attributes } from '../fixtures/forkserver-attributes.ts';
import { childrenOf, json, ok, realInterpreter, threadCount, writeModules } from '../fixtures/forkserver-look.ts';
import { runNode } from '../fixtures/node-run.ts';
import {
  hasModule,
  isAlive,
  isGone,
  next,
  processStat,
  pythonForTests,
  startHost,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

function warningsOf(host: KernelHost): { code: string; message: string }[] {
  const warnings: { code: string; message: string }[] = [];
  host.on('warning', (warning) => warnings.push(warning));
  return warnings;
}

/** Whether this Linux tells how somebody else's child has ended (PIDFD_GET_INFO with exit information). */
function tellsStatusOfAnyProcess(): boolean {
  const [major = 0, minor = 0] = execFileSync('uname', ['-r'], { encoding: 'utf8' }).split('.').map(Number);
  return major > 6 || (major === 6 && minor >= 15);
}

test('a forked life cannot be told from a spawned one, attribute by attribute', async (t) => {
  const folder = temporaryFolder(t);
  const options = {
    python: realInterpreter(),
    defaults: { cwd: folder, env: { KERNELHOST_TEST: 'one', TZ: 'Asia/Tokyo' }, inheritEnv: 'all' },
  } as const;
  for (const shell of hasModule('IPython') ? (['plain', 'ipython'] as const) : (['plain'] as const)) {
    const spawned = startHost(t, { ...options, shell, launch: 'spawn' });
    const forked = startHost(t, { ...options, shell, launch: 'fork' });
    const one = await json<Record<string, unknown>>(spawned.kernel(), attributes);
    const other = await json<Record<string, unknown>>(forked.kernel(), attributes);
    assert.ok(Object.keys(one).length > 25);
    for (const name of Object.keys(one)) assert.deepEqual(other[name], one[name], `${shell}: ${name}`);
    assert.deepEqual(
      [one['leads its session'], one['leads its group'], one.folder],
      [true, true, folder],
      'what both agree on is right',
    );
    assert.deepEqual((one.threads as unknown[])[0], 1);
    const descriptors = one.descriptors as Record<string, [string, number, boolean, boolean, boolean]>;
    assert.deepEqual(Object.keys(descriptors).sort(), ['0', '1', '2', '3', '4', '5', '6']);
    assert.deepEqual(
      Object.values(descriptors).map(([kind]) => kind),
      ['/dev/null', 'pipe', 'pipe', 'socket', 'socket', 'pipe', 'pipe'],
    );
    assert.deepEqual(
      Object.values(descriptors).map(([, , , , inheritable]) => inheritable),
      [true, true, true, false, false, false, false],
      'children get the standard streams only',
    );
    assert.equal(descriptors['6']?.[3], true, 'the lifeline is armed');
  }
});

test('what a preloaded module does to its process does not reach the kernels', async (t) => {
  const folder = temporaryFolder(t);
  writeModules(folder, {
    rude: [
      'import locale, os, resource, signal, sys, time',
      'os.umask(0o077)',
      'os.chdir("/")',
      'soft, hard = resource.getrlimit(resource.RLIMIT_CORE)',
      'resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, resource.getrlimit(resource.RLIMIT_STACK)[1]))',
      'signal.signal(signal.SIGTERM, lambda *_: None)',
      'signal.signal(signal.SIGUSR1, signal.SIG_IGN)',
      'signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})',
      'os.environ["LEFT_BY_PRELOAD"] = "1"',
      'opened = open("/dev/zero")',
      'os.set_inheritable(opened.fileno(), True)',
      'sys.argv = ["rude"]',
    ].join('\n'),
  });
  const defaults = { cwd: folder, env: { PYTHONPATH: folder }, inheritEnv: 'all' } as const;
  const python = realInterpreter();
  const spawned = startHost(t, { python, defaults, launch: 'spawn', shell: 'plain' });
  const forked = startHost(t, { python, defaults, launch: 'fork', shell: 'plain', preload: ['rude'] });
  const one = await json<Record<string, unknown>>(spawned.kernel(), attributes);
  const other = await json<Record<string, unknown>>(forked.kernel(), attributes);
  for (const name of Object.keys(one)) assert.deepEqual(other[name], one[name], name);
});

test('C25: a start that a stopped template cannot serve falls back to one cold life, and no late child is left', async (t) => {
  const host = startHost(t, { launch: 'auto', shell: 'plain', defaults: { startTimeoutMs: 5_000 } });
  const warnings = warningsOf(host);
  const template = await host.warm();
  const before = childrenOf(process.pid).length;
  process.kill(template.pid, 'SIGSTOP');
  const kernel = host.kernel();
  const life = await kernel.start();
  assert.equal(life.launch, 'spawn');
  assert.match(life.launchReason ?? '', /template/);
  assert.equal(warnings.length, 1);
  assert.match(warnings[0]?.message ?? '', /template/);
  process.kill(template.pid, 'SIGCONT');
  // Either it is never forked, or it is ended; a template that is given up for good may also leave itself.
  await until('the template serves nobody', () => childrenOf(template.pid).length === 0);
  assert.equal((await kernel.execute('6 * 7')).text, '42');
  assert.equal(kernel.pid, life.pid);
  assert.ok(childrenOf(process.pid).length <= before + 1, 'one life more, and nothing else');
  assert.equal(childrenOf(template.pid).length, 0);
});

test('C25: with launch "fork" the start fails in time, names the template, and the next start gets a new one', async (t) => {
  const host = startHost(t, { launch: 'fork', shell: 'plain', defaults: { startTimeoutMs: 1_000 } });
  const template = await host.warm();
  process.kill(template.pid, 'SIGSTOP');
  const kernel = host.kernel();
  const began = performance.now();
  await assert.rejects(kernel.start(), { code: 'ERR_KERNEL_START', message: /template/ });
  assert.ok(performance.now() - began < 3_000);
  const life = await kernel.start();
  assert.notEqual(processStat(life.pid)?.parent, template.pid);
  process.kill(template.pid, 'SIGCONT');
  await until('the old template serves nobody', () => childrenOf(template.pid).length === 0);
  assert.ok(isAlive(life.pid));
});

test('C27: a pid that has been given to a stranger is never signalled', async (t) => {
  const script = `
    import { KernelHost } from 'kernelhost';
    import { spawn } from 'node:child_process';
    import { once } from 'node:events';
    import { readFileSync, writeFileSync } from 'node:fs';
    const report = [];
    const hold = setInterval(() => {}, 1000);
    for (const launch of ['fork', 'spawn']) {
      const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, launch, shell: 'plain', defaults: { recovery: 'none' } });
      const kernel = host.kernel();
      const { pid } = await kernel.start();
      const exited = once(kernel, 'exit');
      process.kill(pid, 'SIGKILL');
      await exited;
      let stranger;
      for (let round = 0; round < 500; round++) {
        writeFileSync('/proc/sys/kernel/ns_last_pid', String(pid - 1));
        stranger = spawn('sleep', ['60'], { detached: true, stdio: 'ignore' });
        if (stranger.pid === pid) break;
        stranger.kill('SIGKILL');
        await once(stranger, 'exit');
      }
      const ended = once(stranger, 'exit').then(() => true);
      for (const signal of ['SIGTERM', 'SIGKILL', 'SIGINT']) await kernel.kill(signal).catch(() => {});
      await kernel.interrupt().catch(() => {});
      await kernel.close({ graceMs: 100 });
      await host.close({ graceMs: 100 });
      const alive = await Promise.race([ended.then(() => false), new Promise((resolve) => setTimeout(resolve, 200, true))]);
      report.push({ launch, sameNumber: stranger.pid === pid, alive });
      stranger.kill('SIGKILL');
      await ended;
    }
    clearInterval(hold);
    console.log(JSON.stringify(report));
  `;
  const through = ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child'];
  try {
    execFileSync('unshare', [...through.slice(1), 'sh', '-c', 'echo 300 > /proc/sys/kernel/ns_last_pid'], {
      stdio: 'pipe',
    });
  } catch (error) {
    t.skip(`needs a PID namespace of its own, which takes root and unshare: ${String(error).split('\n')[0]}`);
    return;
  }
  const run = await runNode(t, script, { through });
  assert.equal(run.code, 0, run.stderr);
  assert.deepEqual(JSON.parse(run.stdout), [
    { launch: 'fork', sameNumber: true, alive: true },
    { launch: 'spawn', sameNumber: true, alive: true },
  ]);
});

test('C28: what a preloaded module printed and did not flush is not printed by any kernel', async (t) => {
  const folder = temporaryFolder(t);
  writeModules(folder, {
    noisy: [
      'import ctypes, sys',
      'print("of the template", end="")',
      'sys.stderr.write("of the template")',
      'ctypes.CDLL(None).printf(b"of the template")',
    ].join('\n'),
  });
  const host = startHost(t, {
    launch: 'fork',
    preload: ['noisy'],
    defaults: {
      // With it the C library would hold nothing back.
      env: { PYTHONPATH: folder, PYTHONUNBUFFERED: undefined },
      inheritEnv: 'all',
    },
  });
  for (let round = 0; round < 3; round++) {
    const kernel = host.kernel();
    const background: string[] = [];
    kernel.on('output', (output) => background.push(JSON.stringify(output)));
    const result = await ok(kernel, 'import ctypes, noisy; print("mine"); _ = ctypes.CDLL(None).fflush(None)');
    assert.deepEqual([result.stdout, result.stderr], ['mine\n', '']);
    // At its exit the C library writes what it still holds.
    const exit = await kernel.kill('SIGTERM');
    assert.doesNotMatch(exit.stderrTail, /template/);
    const other = host.kernel();
    other.on('output', (output) => background.push(JSON.stringify(output)));
    await ok(other, '1');
    await other.close();
    assert.deepEqual(background, []);
  }
});

test('C30: every kernel draws its own random numbers and names', async (t) => {
  const folder = temporaryFolder(t);
  const numpy = hasModule('numpy');
  writeModules(folder, {
    drawn: [
      'import random, secrets, tempfile, uuid',
      'random.random(); uuid.uuid4(); uuid.uuid1(); secrets.token_hex(); next(tempfile._get_candidate_names())',
      numpy ? 'import numpy; numpy.random.random(); generator = numpy.random.default_rng(); generator.random()' : '',
    ].join('\n'),
  });
  const host = startHost(t, {
    launch: 'fork',
    preload: ['drawn'],
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  const code = [
    'import json, os, random, secrets, tempfile, uuid',
    'found = {"random": random.random(), "uuid4": str(uuid.uuid4()), "uuid1": str(uuid.uuid1()), "clock": uuid.uuid1().clock_seq, "secrets": secrets.token_hex(),',
    '  "tempfile": os.path.basename(tempfile.mktemp()), "SystemRandom": random.SystemRandom().random()}',
    'import multiprocessing; found["authkey"] = bytes(multiprocessing.current_process().authkey).hex()',
    numpy ? 'import numpy; found["numpy"] = numpy.random.random()' : '',
    numpy ? 'found["new default_rng"] = numpy.random.default_rng().random()' : '',
    'print(json.dumps(found))',
  ].join('\n');
  const draws = await Promise.all(Array.from({ length: 5 }, () => json<Record<string, unknown>>(host.kernel(), code)));
  // Of 14 bits, so two may be alike; those that come from the template are all alike.
  assert.ok(new Set(draws.map(({ clock }) => clock)).size > 1, 'the clock sequence of uuid1');
  for (const name of Object.keys(draws[0] ?? {}).filter((name) => name !== 'clock')) {
    assert.equal(new Set(draws.map((draw) => draw[name])).size, 5, `${name}: ${draws.map((draw) => draw[name])}`);
  }
});

test('C30: a numpy generator that a preloaded module made gives every kernel its own numbers', async (t) => {
  if (!hasModule('numpy')) {
    t.skip('numpy is not installed in the Python of the tests');
    return;
  }
  const folder = temporaryFolder(t);
  writeModules(folder, { drawn: 'import numpy\ngenerator = numpy.random.default_rng()\ngenerator.random()' });
  const host = startHost(t, {
    launch: 'fork',
    preload: ['drawn'],
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  const draws = await Promise.all(
    Array.from({ length: 3 }, () => json<number>(host.kernel(), 'import drawn; print(drawn.generator.random())')),
  );
  assert.equal(new Set(draws).size, 3, draws.join(' '));
});

test('C31: a preload that leaves a thread is named, kernels are spawned cold instead, and they do not hang', async (t) => {
  const folder = temporaryFolder(t);
  writeModules(folder, {
    threaded: [
      'import queue, threading',
      'requests, answers = queue.Queue(), queue.Queue()',
      'def work():',
      '    while True: answers.put(requests.get() * 2)',
      'threading.Thread(target=work, daemon=True, name="left-over").start()',
      'def double(value):',
      '    requests.put(value)',
      '    return answers.get()',
    ].join('\n'),
  });
  const host = startHost(t, { preload: ['threaded'], defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' } });
  const warnings = warningsOf(host);
  const kernel = host.kernel();
  const life = await kernel.start();
  assert.equal(life.launch, 'spawn');
  assert.match(life.launchReason ?? '', /left-over/);
  assert.equal(warnings.length, 1);
  assert.match(warnings[0]?.message ?? '', /left-over/);
  const result = await kernel.execute('import threaded; threaded.double(21)', { timeoutMs: 10_000 });
  assert.equal(result.text, '42');
});

test('C31: numpy that has multiplied in the template multiplies in the kernels, with all processors', async (t) => {
  if (!hasModule('numpy')) {
    t.skip('numpy is not installed in the Python of the tests');
    return;
  }
  const folder = temporaryFolder(t);
  writeModules(folder, { multiplied: 'import numpy\nmatrix = numpy.ones((1000, 1000))\nproduct = matrix @ matrix' });
  const host = startHost(t, {
    preload: ['multiplied'],
    defaults: {
      env: { PYTHONPATH: folder, OMP_NUM_THREADS: undefined, OPENBLAS_NUM_THREADS: undefined },
      inheritEnv: 'all',
    },
  });
  for (let round = 0; round < 3; round++) {
    const kernel = host.kernel();
    const result = await kernel.execute(
      `import multiplied, os; (multiplied.matrix @ multiplied.matrix)[0, 0], ${threadCount} == len(os.sched_getaffinity(0))`,
      { timeoutMs: 10_000 },
    );
    assert.equal(result.error, null);
    assert.equal(result.life.launch, 'fork', result.life.launchReason ?? '');
    assert.match(result.text ?? '', /1000\.0\)?, True/);
  }
});

test('C32: the template has one thread, and nobody is warned about forking, with warnings made errors too', async (t) => {
  const host = startHost(t, { launch: 'fork', defaults: { env: { PYTHONWARNINGS: 'error' }, inheritEnv: 'all' } });
  const template = await host.warm();
  assert.equal(processStat(template.pid)?.threads, 1);
  for (let round = 0; round < 3; round++) {
    const kernel = host.kernel();
    const result = await ok(kernel, 'import os, subprocess; subprocess.run(["true"]).returncode');
    assert.deepEqual([result.text, result.stderr], ['0', '']);
    const exit = await kernel.kill();
    assert.equal(exit.stderrTail, '');
  }
  assert.equal(processStat(template.pid)?.threads, 1);
});

test('C34: a kernel has exactly the environment it was given, its children and its C library too', async (t) => {
  const host = startHost(t, {
    python: realInterpreter(),
    launch: 'fork',
    defaults: { env: { X: 'daemon', ONLY: 'here' }, inheritEnv: 'all' },
  });
  const code = [
    'import ctypes, json, os, subprocess',
    'libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p',
    'in_c = libc.getenv(b"X")',
    'child = subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout.splitlines()',
    'print(json.dumps([os.environ.get("X"), in_c and in_c.decode(), [each for each in child if each.startswith("X=")]]))',
  ].join('\n');
  const env = { PATH: process.env.PATH };
  const a = host.kernel({ env: { X: '1' }, inheritEnv: 'all' });
  const b = host.kernel({ env: {}, inheritEnv: 'all' });
  const c = host.kernel({ env: { X: undefined }, inheritEnv: 'all' });
  const exact = host.kernel({ env: { X: 'é=ü', PATH: env.PATH }, inheritEnv: [] });
  const none = process.env.X ?? null;
  assert.equal(none, null, 'X is no variable of the machine');
  assert.deepEqual(await json(a, code), ['1', '1', ['X=1']]);
  assert.deepEqual(await json(b, code), [null, null, []]);
  assert.deepEqual(await json(c, code), [null, null, []]);
  assert.deepEqual(await json(exact, code), ['é=ü', 'é=ü', ['X=é=ü']]);
  const names = await json<string[]>(exact, 'import json, os; print(json.dumps(sorted(os.environ)))');
  assert.deepEqual(names, ['KERNELHOST_LIFE', 'PATH', 'X'], 'the marker of the life is all that comes on top');
});

test('C34: variables that are read before user code work for the one kernel that has them and for no other', async (t) => {
  const folder = temporaryFolder(t);
  const given = {
    PYTHONHASHSEED: '7',
    PYTHONPATH: folder,
    PYTHONWARNINGS: 'ignore::UserWarning',
    TZ: 'Asia/Tokyo',
    LC_ALL: 'C',
    MPLBACKEND: 'svg',
    OMP_NUM_THREADS: '3',
    LD_LIBRARY_PATH: folder,
  };
  const code = [
    'import json, locale, os, sys, time',
    `names = ${JSON.stringify(Object.keys(given))}`,
    'print(json.dumps({"hash": hash("text"), "path": sys.path, "warnoptions": sys.warnoptions, "tz": time.tzname,',
    '  "locale": locale.setlocale(locale.LC_CTYPE), "variables": {name: os.environ.get(name) for name in names}}))',
  ].join('\n');
  // What a plain Python makes of the same variable, started for itself, is right.
  const clean: NodeJS.ProcessEnv = { ...process.env };
  for (const name of Object.keys(given)) delete clean[name];
  const plain = (variables: Record<string, string>) =>
    JSON.parse(
      execFileSync(pythonForTests(), ['-'], {
        input: code,
        env: { ...clean, PYTHONHASHSEED: '0', ...variables },
        encoding: 'utf8',
      }),
    ) as Record<string, unknown>;
  const host = startHost(t, { shell: 'plain' });
  const absent = Object.fromEntries(Object.keys(given).map((name) => [name, undefined]));
  for (const [name, value] of Object.entries(given)) {
    const with_ = host.kernel({ env: { ...absent, PYTHONHASHSEED: '0', [name]: value }, inheritEnv: 'all' });
    const without = host.kernel({ env: { ...absent, PYTHONHASHSEED: '0' }, inheritEnv: 'all' });
    const [a, b] = await Promise.all([
      json<Record<string, unknown>>(with_, code),
      json<Record<string, unknown>>(without, code),
    ]);
    assert.deepEqual(a, plain({ [name]: value }), `with ${name}`);
    assert.deepEqual(b, plain({}), `beside one with ${name}`);
    await Promise.all([with_.close(), without.close()]);
  }
});

test('C35: when the template is killed its kernels go on, and the next start makes a new template', async (t) => {
  const host = startHost(t, { launch: 'fork', shell: 'plain' });
  const ended: TemplateInfo[] = [];
  const template = await host.warm();
  host.on('template', (info) => ended.push(info));
  const kernels = Array.from({ length: 5 }, () => host.kernel());
  await Promise.all(kernels.map((kernel, index) => ok(kernel, `x = ${index}`)));
  const pids = kernels.map(({ pid }) => pid);
  const busy = kernels.slice(0, 2).map((kernel) => kernel.execute('import time; time.sleep(0.6); x'));
  const told = next(host, 'template');
  process.kill(template.pid, 'SIGKILL');
  await told;
  assert.equal(ended[0]?.pid, template.pid);
  assert.equal(ended[0]?.state, 'ended');
  assert.deepEqual(ended[0]?.exit?.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
  assert.deepEqual(
    (await Promise.all(busy)).map(({ text }) => text),
    ['0', '1'],
  );
  for (const [index, kernel] of kernels.entries()) assert.equal((await kernel.execute('x')).text, String(index));
  assert.deepEqual(
    kernels.map(({ pid }) => pid),
    pids,
  );

  const life = await host.kernel().start();
  assert.equal(life.launch, 'fork');
  assert.notEqual(processStat(life.pid)?.parent, template.pid);

  // A life that has outlived its template still has an end that is noticed at once and told truly.
  const [victim] = kernels;
  assert.ok(victim?.pid);
  const call = victim.execute('import time; time.sleep(600)');
  const began = performance.now();
  process.kill(victim.pid, 'SIGKILL');
  await assert.rejects(within('the pending call', call, 1_000), (error: unknown) => {
    assert.ok(error instanceof KernelHostError);
    assert.equal(error.code, 'ERR_KERNEL_DIED');
    return true;
  });
  assert.ok(performance.now() - began < 1_000);
  const status = victim.lastExit?.status;
  if (tellsStatusOfAnyProcess()) {
    assert.deepEqual(status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
  } else {
    assert.equal(status?.kind, 'unknown');
  }
  const again = await victim.execute('1 + 1');
  assert.equal(again.text, '2');
  assert.equal(again.recovered?.exit.generation, 1);
});

test('C35: a template that is stopped for a while harms no kernel, and a death meanwhile is told within a second', async (t) => {
  const host = startHost(t, { launch: 'fork', shell: 'plain' });
  const template = await host.warm();
  const kernels = Array.from({ length: 3 }, () => host.kernel());
  await Promise.all(kernels.map((kernel, index) => ok(kernel, `x = ${index}`)));
  process.kill(template.pid, 'SIGSTOP');
  const [first, second, third] = kernels;
  assert.ok(first?.pid && second && third);
  const begun = Promise.withResolvers<void>();
  const call = first.execute('print("ready", flush=True)\nimport time; time.sleep(600)', {
    onOutput: () => begun.resolve(),
  });
  // A call whose cell has not begun when its life ends is the next life's.
  await within('the cell begins', begun.promise);
  const { pid } = first;
  process.kill(pid, 'SIGKILL');
  await assert.rejects(within('the pending call', call, 1_500), { code: 'ERR_KERNEL_DIED' });
  assert.deepEqual(first.lastExit?.status, { kind: 'signaled', signal: 'SIGKILL', number: 9, coreDumped: false });
  assert.equal((await second.execute('x')).text, '1');
  await third.interrupt();
  assert.equal((await third.execute('x')).text, '2');
  process.kill(template.pid, 'SIGCONT');
  await until('the dead life has been reaped', () => isGone(pid));
  assert.equal((await second.execute('x')).text, '1');
  assert.equal((await first.execute('1')).text, '1');
});

test('ctypes callbacks that a preloaded module has begun with go on working in its kernels', async (t) => {
  const folder = temporaryFolder(t);
  writeModules(folder, {
    callbacks: [
      'import ctypes',
      'Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)',
      'first = Callback(lambda value: value)',
    ].join('\n'),
  });
  const host = startHost(t, {
    launch: 'fork',
    shell: 'plain',
    preload: ['callbacks'],
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  // More than libffi has prepared: it makes the next ones from a file of its own, which must still be open.
  const code = [
    'import callbacks, tempfile',
    'files = [tempfile.TemporaryFile() for _ in range(4)]',
    'made = [callbacks.Callback(lambda value, more=more: value + more) for more in range(2000)]',
    'callbacks.first(1), sum(each(1) for each in made)',
  ].join('\n');
  assert.equal((await ok(host.kernel(), code)).text, '(1, 2001000)');
});

test('a template whose preload fails says which module and why, and kernels are spawned cold', async (t) => {
  const folder = temporaryFolder(t);
  writeModules(folder, { broken: 'raise ValueError("not today")' });
  const host = startHost(t, {
    shell: 'plain',
    preload: ['broken'],
    defaults: { env: { PYTHONPATH: folder }, inheritEnv: 'all' },
  });
  await assert.rejects(host.warm(), { code: 'ERR_KERNEL_START', message: /broken.*not today/s });
  const life = await host.kernel().start();
  assert.equal(life.launch, 'spawn');
  assert.match(life.launchReason ?? '', /broken.*not today/s);
});

test('a template that has gone stale is replaced, and the kernels it has forked are untouched', async (t) => {
  const folder = temporaryFolder(t);
  execFileSync(pythonForTests(), ['-m', 'venv', '--without-pip', '--system-site-packages', folder]);
  const host = startHost(t, { python: join(folder, 'bin', 'python'), launch: 'fork', shell: 'plain' });
  const template = await host.warm();
  const old = host.kernel();
  await ok(old, 'x = 1');
  assert.equal(processStat(old.pid ?? 0)?.parent, template.pid);
  const sitePackages = await json<string>(
    old,
    'import json, sysconfig; print(json.dumps(sysconfig.get_path("purelib")))',
  );
  writeModules(sitePackages, { installed_later: 'value = 5' });
  const young = host.kernel();
  assert.equal((await ok(young, 'import installed_later; installed_later.value')).text, '5');
  assert.notEqual(processStat(young.pid ?? 0)?.parent, template.pid);
  assert.equal((await old.execute('x')).text, '1');
});
