/** Copies of a kernel's life: forks, checkpoints, rollbacks, and the state that comes back after a death. */

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, test } from 'node:test';
import { promisify } from 'node:util';
import { type CellResult, InvalidOptionError, type Kernel, type KernelHost, type Life, type Warning } from 'kernelhost';
import { begin, deathOf, failureOf } from '../fixtures/endings-calls.ts';
import { startNode } from '../fixtures/node-run.ts';
import {
  allProcesses,
  isAlive,
  isGone,
  next,
  plainPythonForTests,
  processStat,
  pythonForTests,
  startHost,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

/** The frozen copies of a host's kernels, by what lists of processes call them. */
function frozen(host: KernelHost): number[] {
  const templates = new Set([...host.kernels].map(({ pid }) => processStat(pid ?? 0)?.parent));
  return allProcesses()
    .filter(({ parent }) => templates.has(parent))
    .map(({ pid }) => pid)
    .filter((pid) => comm(pid) === 'kernel-frozen');
}

/** Runs a cell, and resolves once the template has taken in the copy after it: only then the one before goes. */
async function taken(host: KernelHost, kernel: Kernel): Promise<void> {
  await until('a copy', () => frozen(host).length === 1);
  const [before] = frozen(host);
  await ok(kernel, 'None');
  await until('another copy', () => frozen(host).length === 1 && frozen(host)[0] !== before);
}

function comm(pid: number): string {
  try {
    return readFileSync(`/proc/${pid}/comm`, 'utf8').trim();
  } catch {
    return '';
  }
}

const value = async (kernel: Kernel, code: string) => (await within(code, kernel.execute(code))).text;
const ok = async (kernel: Kernel, code: string): Promise<CellResult> => {
  const result = await within(code, kernel.execute(code));
  assert.equal(result.status, 'ok', result.error?.traceback.join('\n'));
  return result;
};

for (const shell of ['ipython', 'plain'] as const) {
  const options = () => ({
    shell,
    launch: 'fork' as const,
    ...(shell === 'plain' && { python: plainPythonForTests() }),
  });

  describe(`fork() (${shell})`, () => {
    test('the copy has every variable, import, open file and counter, and the two go their own ways', async (t) => {
      const host = startHost(t, options());
      const folder = temporaryFolder(t);
      const kernel = host.kernel({ cwd: folder });
      await ok(kernel, 'import os, json as j\nfile = open("f.txt", "w+"); file.write("one\\n"); file.flush()');
      const { executionCount } = await ok(kernel, 'x = {"a": [1]}; alias = x["a"]');
      const copy = await within('fork', kernel.fork());
      assert.notEqual(copy.pid, kernel.pid);
      assert.equal(copy.generation, 1);
      assert.equal((await copy.start()).launch, 'fork');
      assert.equal(
        processStat(copy.pid as number)?.parent,
        processStat(kernel.pid as number)?.parent,
        'the template reaps it',
      );
      const first = await ok(copy, 'alias.append(2); print(j.dumps(x), file.name, os.getcwd())');
      assert.equal(first.stdout, `{"a": [1, 2]} f.txt ${folder}\n`);
      assert.equal(first.executionCount, executionCount + 1);
      assert.equal(first.recovered, null);
      assert.equal(await value(kernel, 'x'), "{'a': [1]}");
      assert.equal(await value(copy, 'file.seek(0); file.read()'), "'one\\n'");
      assert.equal(comm(copy.pid as number), comm(kernel.pid as number), 'it is frozen no more');
      assert.notEqual(comm(copy.pid as number), 'kernel-frozen');
    });

    test('it has wires, a session, a group, changes to the environment, a folder and random numbers of its own', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ env: { PATH: process.env.PATH, KEPT: '1', GONE: '1', CHANGED: '1' } });
      await ok(kernel, 'import os, random, tempfile, uuid\nos.environ["SET"] = "in a cell"\nrandom.seed(1)');
      const copies = await Promise.all([
        kernel.fork({ env: { CHANGED: '2', GONE: undefined }, cwd: '/', init: 'begun = True' }),
        kernel.fork(),
      ]);
      const [one, other] = copies as [Kernel, Kernel];
      const look = '[os.environ.get(name) for name in ("KEPT", "GONE", "CHANGED", "SET")]';
      assert.equal(await value(one, look), "['1', None, '2', 'in a cell']");
      assert.equal(await value(other, look), "['1', '1', '1', 'in a cell']");
      assert.equal(await value(one, 'os.getcwd(), begun'), "('/', True)");
      assert.equal(await value(other, '"begun" in globals()'), 'False');
      for (const each of copies) {
        const stat = processStat(each.pid as number);
        assert.deepEqual([stat?.session, stat?.group], [each.pid, each.pid]);
      }
      for (const drawn of ['random.random()', 'next(tempfile._get_candidate_names())', 'uuid.uuid4()']) {
        const all = await Promise.all([kernel, ...copies].map((each) => value(each, drawn)));
        assert.equal(new Set(all).size, 3, `${drawn}: ${all}`);
      }
      const markers = await Promise.all(
        [kernel, ...copies].map((each) => value(each, 'os.environ["KERNELHOST_LIFE"]')),
      );
      assert.equal(new Set(markers).size, 3);
      for (const [at, each] of [kernel, ...copies].entries()) {
        const shown = readFileSync(`/proc/${each.pid}/environ`, 'latin1');
        assert.ok(shown.includes(`KERNELHOST_LIFE=${markers[at]?.slice(1, -1)}\0`), 'as others see it');
      }
      // Its later lives have that environment too.
      await one.restart();
      await ok(one, 'import os');
      assert.equal(await value(one, look), "['1', None, '2', None]");
    });

    test('output, displays, interrupts, exits and death are those of the copy alone', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(kernel, 'import os, sys, time, subprocess\nx = 1');
      const copy = await kernel.fork();
      const [ours, theirs] = await Promise.all([
        kernel.execute('print("original"); subprocess.run(["echo", "child"]); x'),
        copy.execute('print("copy"); print("e", file=sys.stderr); x + 1'),
      ]);
      assert.deepEqual([ours.stdout, ours.stderr, ours.text], ['original\nchild\n', '', '1']);
      assert.deepEqual([theirs.stdout, theirs.stderr, theirs.text], ['copy\n', 'e\n', '2']);
      const { call: sleeping } = await begin(copy, 'print("asleep"); time.sleep(60)', 'asleep');
      await copy.interrupt();
      assert.equal((await sleeping).status, 'interrupted');
      assert.equal(await value(copy, 'x'), '1', 'it lives on');
      const { exit } = await deathOf(copy.execute('os._exit(7)'));
      assert.deepEqual(exit.status, { kind: 'exited', code: 7 });
      assert.match(exit.message, new RegExp(`"${copy.id}".*exited with code 7`));
      assert.equal(await value(kernel, 'x'), '1');
      assert.equal(await value(copy, '"x" in globals()'), 'False', 'another life');
    });

    test('a fork of a fork, with the first and the second ended', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(kernel, 'x = [0]');
      const second = await kernel.fork();
      await ok(second, 'x.append(1)');
      const third = await second.fork();
      await kernel.close();
      await second.kill();
      await ok(third, 'x.append(2)');
      assert.equal(await value(third, 'x'), '[0, 1, 2]');
      const fourth = await third.fork();
      assert.equal(await value(fourth, 'x'), '[0, 1, 2]');
    });

    test('the event loop goes on in both, and neither touches the other', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(
        kernel,
        'import asyncio\nloop = asyncio.get_event_loop(); lock = asyncio.Lock()\nawait asyncio.sleep(0)',
      );
      const copy = await kernel.fork();
      const code = [
        'async def pipe():',
        '    reader, writer = await asyncio.open_connection(sock=ours)',
        '    data = await reader.readline(); writer.close(); return data',
        'import socket; ours, theirs = socket.socketpair(); theirs.send(b"line\\n")',
        'async with lock: got = await asyncio.wait_for(pipe(), 5)',
        'await asyncio.gather(*[asyncio.sleep(0.01) for _ in range(5)])',
        'process = await asyncio.create_subprocess_exec("echo", "x", stdout=-1); out, _ = await process.communicate()',
        'print(got, out, asyncio.get_running_loop() is loop)',
      ].join('\n');
      for (const each of [copy, kernel, copy, kernel]) {
        const { stdout, status, error } = await within('the loop', each.execute(code));
        assert.equal(status, 'ok', error?.traceback.join('\n'));
        assert.equal(stdout, "b'line\\n' b'x\\n' True\n");
      }
    });

    test('what one loop watches does not wake the other', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(kernel, 'import asyncio, socket, time\nawait asyncio.sleep(0)');
      const copy = await kernel.fork();
      await ok(
        copy,
        'ours, theirs = socket.socketpair(); theirs.send(b"x")\nasyncio.get_event_loop().add_reader(ours, lambda: None)',
      );
      const busy = 'began = time.process_time()\nawait asyncio.sleep(0.3)\ntime.process_time() - began';
      const seconds = Number(await value(kernel, busy));
      assert.ok(seconds < 0.1, `${seconds} s of CPU time while it slept`);
    });

    test('calls into the daemon come from the copy', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ onCall: { who: (_args, { kernel }) => kernel.id } });
      await ok(kernel, 'import kernelhost');
      const copy = await kernel.fork();
      assert.equal(await value(copy, 'kernelhost.tools.who()'), `'${copy.id}'`);
      assert.equal(await value(copy, 'await kernelhost.acall("who")'), `'${copy.id}'`);
      assert.equal(await value(kernel, 'kernelhost.tools.who()'), `'${kernel.id}'`);
      const other = await kernel.fork({ onCall: { other: () => 5 } });
      assert.equal(await value(other, 'kernelhost.tools.other()'), '5');
    });

    test('on_restore is called in the copy, also where one callback raises', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(
        kernel,
        'import kernelhost\ntold = []\n@kernelhost.on_restore\ndef fails(what): 1 / 0\nkernelhost.on_restore(told.append)',
      );
      const warned = next(host, 'warning');
      const copy = await kernel.fork();
      assert.equal(await value(copy, 'told'), "['fork']");
      assert.equal(await value(kernel, 'told'), '[]');
      const [{ code, message }] = (await within('the warning', warned)) as [Warning];
      assert.equal(code, 'WARN_ON_RESTORE');
      assert.match(message, /fails raised ZeroDivisionError: division by zero/);
      const checkpoint = await copy.checkpoint();
      await copy.rollback(checkpoint);
      assert.equal(await value(copy, 'told'), "['fork', 'checkpoint']");
    });
  });

  describe(`checkpoints (${shell})`, () => {
    test('rollback() brings a checkpoint back, again and again, until it is discarded', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(kernel, 'x = [0]');
      const checkpoint = await kernel.checkpoint();
      assert.deepEqual([checkpoint.generation, kernel.generation], [1, 1]);
      assert.ok(checkpoint.rssBytes > 1024 * 1024, String(checkpoint.rssBytes));
      const [pid] = frozen(host);
      assert.ok(pid !== undefined, 'named in lists of processes');
      const cpu = () => readFileSync(`/proc/${pid}/schedstat`, 'utf8').split(' ')[0];
      const before = cpu();
      for (const round of [2, 3, 4]) {
        await ok(kernel, `x.append(${round})`);
        const life = await within('rollback', kernel.rollback(checkpoint));
        assert.deepEqual([life.launch, life.generation], ['checkpoint', round]);
        const { text, recovered } = await ok(kernel, 'x');
        assert.equal(text, '[0]');
        assert.deepEqual(
          [recovered?.state, recovered?.lostCells, recovered?.exit.cause],
          ['checkpoint', round === 2 ? 1 : 2, 'restart'],
        );
        assert.match(
          recovered?.exit.message ?? '',
          /rollback\(\) was called\. The next life begins with the checkpoint/,
        );
      }
      assert.notEqual(cpu(), before, 'it has copied itself');
      const idle = cpu();
      await ok(kernel, 'sum(range(10**6))');
      assert.equal(cpu(), idle, 'and costs no CPU otherwise');
      await checkpoint.discard();
      await checkpoint.discard();
      await until('it is reaped', () => isGone(pid));
      const { code } = await failureOf(kernel.rollback(checkpoint));
      assert.equal(code, 'ERR_CHECKPOINT_GONE');
      assert.equal(await value(kernel, 'x'), '[0]', 'a rollback that cannot be loses nothing');
    });

    test('a checkpoint whose process has been killed is told, and loses nothing', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(kernel, 'x = 1');
      const checkpoint = await kernel.checkpoint();
      const [pid] = frozen(host);
      process.kill(pid as number, 'SIGKILL');
      await until('it has ended', () => !isAlive(pid as number));
      const error = await failureOf(kernel.rollback(checkpoint));
      assert.equal(error.code, 'ERR_CHECKPOINT_GONE');
      assert.match(error.message, /The kernel is as it was/);
      assert.equal(await value(kernel, 'x'), '1');
    });

    test('a checkpoint of another kernel, or none at all, is refused', async (t) => {
      const host = startHost(t, options());
      const [kernel, other] = [host.kernel(), host.kernel()];
      await Promise.all([kernel.start(), other.start()]);
      const checkpoint = await other.checkpoint();
      for (const wrong of [checkpoint, { ...checkpoint }, null, 'checkpoint-1']) {
        await assert.rejects(kernel.rollback(wrong as never), InvalidOptionError);
      }
    });

    test('close() ends the frozen copies too, and so does the death of the template', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ recovery: 'checkpoint' });
      await ok(kernel, 'x = 1');
      await kernel.checkpoint();
      await until('both are there', () => frozen(host).length === 2);
      const pids = frozen(host);
      await kernel.close();
      assert.deepEqual(pids.filter(isAlive), []);
    });
  });

  describe(`recovery 'checkpoint' (${shell})`, () => {
    const ends: Record<string, (kernel: Kernel) => Promise<unknown>> = {
      'a crash': (kernel) =>
        deathOf(kernel.execute('x = "lost"; import os, signal; os.kill(os.getpid(), signal.SIGSEGV)')),
      'a stuck cell': (kernel) =>
        deathOf(
          kernel.execute(
            'x = "lost"; import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: pass',
            { timeoutMs: 200 },
          ),
        ),
      'exit()': (kernel) => deathOf(kernel.execute('x = "lost"; exit(3)')),
      'kill()': (kernel) => kernel.kill(),
      'a kill from elsewhere': async (kernel) => {
        // Answered once the life has copied itself.
        await kernel.isComplete('1');
        const { pid } = kernel;
        const end = next(kernel, 'exit');
        process.kill(pid as number, 'SIGKILL');
        await end;
      },
    };
    for (const [what, end] of Object.entries(ends)) {
      test(`after ${what} all variables are there, and a second time too`, async (t) => {
        const host = startHost(t, options());
        const kernel = host.kernel({ recovery: 'checkpoint', interruptGraceMs: 100 });
        const lives: Life[] = [];
        kernel.on('start', (life) => lives.push(life));
        await ok(kernel, 'x = 0');
        await ok(kernel, 'y = [x]; f = lambda: y');
        await within('a failing cell', kernel.execute('y.append("of a failed cell"); 1 / 0'));
        await ok(kernel, 'x += 1');
        for (const round of [1, 2]) {
          const inCell = ['a crash', 'a stuck cell', 'exit()'].includes(what);
          await within(what, end(kernel), 20_000);
          const { text, recovered, life, executionCount } = await ok(kernel, 'x, f(), y is f()');
          assert.equal(text, "(1, [0, 'of a failed cell'], True)");
          assert.equal(recovered?.state, 'checkpoint');
          assert.equal(recovered?.lostCells, inCell ? 1 : 0, `round ${round}`);
          assert.equal(life.launch, 'checkpoint');
          assert.equal(executionCount, 4 + round);
          assert.deepEqual(recovered?.exit, kernel.lastExit);
          if (inCell) assert.match(recovered?.exit.message ?? '', /with its variables as they were after \d+ cells/);
        }
        assert.deepEqual(
          lives.map(({ launch, generation }) => [launch, generation]),
          [
            ['fork', 1],
            ['checkpoint', 2],
            ['checkpoint', 3],
          ],
        );
        await until('one copy is kept', () => frozen(host).length === 1);
      });
    }

    test('restart() is a fresh start, also for what comes after it', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ recovery: 'checkpoint' });
      await ok(kernel, 'x = 0');
      await kernel.restart();
      assert.equal(await value(kernel, '"x" in globals()'), 'False');
      await kernel.kill();
      const { text, recovered } = await ok(kernel, '"x" in globals()');
      assert.equal(text, 'False');
      assert.equal(recovered?.state, 'checkpoint');
    });

    test('a life that has nothing to be copied from starts fresh, and what is lost is counted', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ recovery: 'checkpoint' });
      await deathOf(kernel.execute('import os; os._exit(1)'));
      const { recovered, life } = await ok(kernel, '1');
      assert.deepEqual([recovered?.state, recovered?.lostCells, life.launch], ['fresh', 1, 'fork']);
    });

    test('where the frozen copy is gone the next life is fresh, and a warning says why', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ recovery: 'checkpoint' });
      await ok(kernel, 'x = 0');
      await taken(host, kernel);
      for (const pid of frozen(host)) process.kill(pid, 'SIGKILL');
      const warned = next(kernel, 'warning');
      await deathOf(kernel.execute('import os; os._exit(1)'));
      const { recovered, text } = await ok(kernel, '"x" in globals()');
      assert.deepEqual([text, recovered?.state, recovered?.lostCells], ['False', 'fresh', 3]);
      const [warning] = (await within('the warning', warned)) as [Warning];
      assert.equal(warning.code, 'WARN_CHECKPOINT_LOST');
      assert.match(warning.message, /was ended by SIGKILL/);
    });

    test('cells that follow each other at once all come back', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ recovery: 'checkpoint' });
      const calls = Array.from({ length: 30 }, (_, at) => kernel.execute(`x${at} = ${at}`));
      const { call } = await begin(kernel, 'print("here"); import time; time.sleep(60)', 'here');
      await Promise.all(calls);
      await kernel.kill();
      await deathOf(call);
      const { text, recovered } = await ok(
        kernel,
        'sum(x for name, x in list(globals().items()) if name[1:].isdigit())',
      );
      assert.deepEqual([text, recovered?.lostCells], [String((29 * 30) / 2), 1]);
    });
  });

  describe(`what is not copied, and why (${shell})`, () => {
    const unsound: Record<string, { code: string; why: RegExp; undo: string }> = {
      'a Python thread': {
        code: 'import threading\nstop = threading.Event()\nthread = threading.Thread(target=stop.wait, name="worker of mine"); thread.start()',
        why: /threads that a copy would lose: the Python thread 'worker of mine'/,
        undo: 'stop.set(); thread.join()',
      },
      'a used thread pool': {
        code: 'from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2, thread_name_prefix="pool"); pool.submit(print).result()',
        why: /the Python thread 'pool_0'/,
        undo: 'pool.shutdown()',
      },
      'a native thread': {
        code: [
          'import ctypes, _thread, time',
          'lock = _thread.allocate_lock(); lock.acquire()',
          '_thread.start_new_thread(lock.acquire, ())',
          'import os',
          'while len(os.listdir("/proc/self/task")) < 2: time.sleep(0.001)',
        ].join('\n'),
        why: /threads that a copy would lose: the native thread/,
        undo: 'lock.release()\nwhile len(os.listdir("/proc/self/task")) > 1: time.sleep(0.001)',
      },
      'a running child': {
        code: 'import subprocess\nchild = subprocess.Popen(["sleep", "600"])',
        why: /running child processes: sleep 600 \(pid \d+\)/,
        undo: 'child.kill(); child.wait()',
      },
      'a task in flight': {
        code: 'import asyncio\nasync def forever(): await asyncio.sleep(600)\ntask = asyncio.ensure_future(forever())\nawait asyncio.sleep(0)',
        why: /in flight: the tasks forever/,
        undo: 'task.cancel()\nawait asyncio.sleep(0.01)',
      },
      'an open device': {
        code: 'device = open("/dev/kmsg", "rb", buffering=0)',
        why: /device open.*\/dev\/kmsg/,
        undo: 'device.close()',
      },
    };
    for (const [what, { code, why, undo }] of Object.entries(unsound)) {
      test(`${what}: no copy, the reason, and copies again once it is over`, async (t) => {
        const host = startHost(t, options());
        const kernel = host.kernel({ recovery: 'checkpoint' });
        const warnings: { code: string; message: string }[] = [];
        kernel.on('warning', (warning) => warnings.push(warning));
        await ok(kernel, 'x = 1');
        await ok(kernel, code);
        for (const call of [() => kernel.fork(), () => kernel.checkpoint()]) {
          const error = await failureOf(call());
          assert.equal(error.code, 'ERR_COPY_REFUSED');
          assert.match(error.message, why);
        }
        await ok(kernel, 'x += 1');
        assert.deepEqual(
          warnings.map(({ code }) => code),
          ['WARN_CHECKPOINT_SKIPPED'],
          'said once',
        );
        assert.match(warnings[0]?.message ?? '', why);
        assert.equal(host.kernels.length, 1, 'nothing is left of a fork that was refused');
        // The state before it is what comes back.
        await kernel.kill();
        const { text, recovered } = await ok(kernel, 'x');
        assert.deepEqual([text, recovered?.state, recovered?.lostCells], ['1', 'checkpoint', 2]);
        await ok(kernel, code);
        await ok(kernel, undo);
        const copy = await kernel.fork();
        assert.equal(await value(copy, 'x'), '1');
      });
    }

    test('a kernel that was started cold, and one that has no life', async (t) => {
      const host = startHost(t, { ...options(), launch: 'spawn' });
      const kernel = host.kernel();
      const absent = await failureOf(kernel.checkpoint());
      assert.equal(absent.code, 'ERR_KERNEL_ABSENT');
      assert.equal((await failureOf(kernel.fork())).code, 'ERR_COPY_REFUSED');
      await ok(kernel, 'x = 1');
      const error = await failureOf(kernel.fork());
      assert.equal(error.code, 'ERR_COPY_REFUSED');
      assert.match(error.message, /started cold/);
      assert.equal(await value(kernel, 'x'), '1');
    });

    test('one whose template has ended; its copies live on', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel({ recovery: 'checkpoint' });
      await ok(kernel, 'x = 1');
      await taken(host, kernel);
      const copy = await kernel.fork();
      const ended = next(host, 'template');
      process.kill(processStat(kernel.pid as number)?.parent as number, 'SIGKILL');
      await within('its end', ended);
      assert.deepEqual([await value(copy, 'x'), await value(kernel, 'x')], ['1', '1']);
      const error = await failureOf(kernel.fork());
      assert.match(error.message, /template.*has ended/);
      assert.equal(await value(kernel, 'x'), '1');
      // The frozen copy that there is serves once.
      await kernel.kill();
      const { text, recovered, life } = await ok(kernel, 'x');
      assert.deepEqual([text, recovered?.state, life.launch], ['1', 'checkpoint', 'checkpoint']);
    });

    test('no place for wires: RLIMIT_NOFILE', async (t) => {
      const host = startHost(t, options());
      const kernel = host.kernel();
      await ok(kernel, 'import os, resource\nfirst = max(map(int, os.listdir("/proc/self/fd")))');
      let refused = 0;
      // First there is no place for the wires, then none for what the copy says that it is there by.
      for (let free = 1; free < 12; free += 1) {
        await ok(kernel, `resource.setrlimit(resource.RLIMIT_NOFILE, (first + ${free}, 4096))`);
        const outcome = await kernel.fork().then(
          () => null,
          (error) => error,
        );
        if (outcome === null) continue;
        refused += 1;
        assert.equal(outcome.code, 'ERR_COPY_REFUSED');
        assert.match(outcome.message, /RLIMIT_NOFILE|Too many open files/);
        assert.equal(await value(kernel, '1 + 1'), '2');
      }
      assert.ok(refused > 3 && refused < 11, String(refused));
    });
  });
}

test('100 forks of one kernel at once, each with its own state', async (t) => {
  const host = startHost(t, { launch: 'fork' });
  const kernel = host.kernel();
  await ok(kernel, 'import os\nx = list(range(1000))');
  const forks = await within('100 forks', Promise.all(Array.from({ length: 100 }, () => kernel.fork())), 60_000);
  assert.equal(new Set(forks.map(({ pid }) => pid)).size, 100);
  const results = await Promise.all(forks.map((fork, at) => fork.execute(`x.append(${at}); len(x), x[-1]`)));
  assert.deepEqual(
    results.map(({ text }) => text),
    forks.map((_, at) => `(1001, ${at})`),
  );
  await Promise.all(forks.map((fork) => fork.close()));
  assert.equal(await value(kernel, 'len(x), len([1 for pid in os.listdir("/proc") if 0])'), '(1000, 0)');
});

test('a copy shares its memory with the original until one of them writes', async (t) => {
  const MIB = 1024 * 1024;
  const host = startHost(t, { launch: 'fork' });
  const kernel = host.kernel();
  await ok(kernel, 'data = bytearray(b"x") * (200 << 20)');
  const copy = await kernel.fork();
  const before = await copy.usage();
  assert.ok(before.rssBytes > 200 * MIB && before.pssBytes < 140 * MIB, JSON.stringify(before));
  await ok(copy, 'for at in range(0, len(data), 4096): data[at] = 1');
  assert.ok((await copy.usage()).pssBytes > 200 * MIB);
  assert.equal(await value(kernel, 'data[0], data[4096]'), '(120, 120)');
});

test('the budget: a copy that has come to more of its own is the last, and a warning says so', async (t) => {
  const host = startHost(t, { launch: 'fork' });
  const kernel = host.kernel({ recovery: 'checkpoint', checkpointBytes: 50 * 1024 * 1024 });
  const codes: string[] = [];
  kernel.on('warning', ({ code }) => codes.push(code));
  await ok(kernel, 'data = bytearray(b"x") * (100 << 20)');
  await until('a copy', () => frozen(host).length === 1);
  const warned = next(kernel, 'warning');
  await ok(kernel, 'for at in range(0, len(data), 4096): data[at] = 1');
  const [warning] = (await within('the warning', warned)) as [Warning];
  assert.equal(warning.code, 'WARN_CHECKPOINT_BUDGET');
  assert.match(warning.message, /10\d MiB.*50 MiB/);
  await ok(kernel, 'x = 1');
  await until('no copy', () => frozen(host).length === 0);
  await kernel.kill();
  const { recovered } = await ok(kernel, 'y = 1');
  assert.deepEqual([recovered?.state, recovered?.lostCells], ['fresh', 3]);
  await until('another life is copied again', () => frozen(host).length === 1);
  assert.deepEqual(codes, ['WARN_CHECKPOINT_BUDGET']);
});

test('what was registered with register_at_fork is called once for a copy', async (t) => {
  const host = startHost(t, { launch: 'fork' });
  const kernel = host.kernel();
  const log = join(temporaryFolder(t), 'log');
  await ok(
    kernel,
    `import os
note = lambda what: lambda: os.write(file.fileno(), (what + "\\n").encode())
file = open(${JSON.stringify(log)}, "ab")
os.register_at_fork(before=note("before"), after_in_parent=note("parent"), after_in_child=note("child"))`,
  );
  await kernel.fork();
  assert.deepEqual(readFileSync(log, 'utf8').trim().split('\n').sort(), ['before', 'child', 'parent']);
});

test('C24: a handler that a cell of the old life waits for is aborted by a rollback, and its late answer reaches nobody', async (t) => {
  const host = startHost(t, { launch: 'fork' });
  const called = Promise.withResolvers<AbortSignal>();
  const answer = Promise.withResolvers<string>();
  const kernel = host.kernel({
    onCall: {
      slow: (_args, { signal }) => {
        called.resolve(signal);
        return answer.promise;
      },
    },
  });
  await ok(kernel, 'import kernelhost\nx = 1');
  const checkpoint = await kernel.checkpoint();
  const cell = deathOf(kernel.execute('kernelhost.tools.slow()'));
  const signal = await within('the call', called.promise);
  await within('rollback', kernel.rollback(checkpoint));
  await cell;
  assert.equal(signal.aborted, true);
  answer.resolve('late');
  assert.equal(await value(kernel, 'x'), '1');
});

for (const template of ['lives', 'is killed with it']) {
  test(`a daemon that is killed takes its frozen copies and forks along (the template ${template})`, async (t) => {
    const source = `
      import { readFileSync } from 'node:fs';
      import { KernelHost } from 'kernelhost';
      const host = new KernelHost({ python: ${JSON.stringify(pythonForTests())}, launch: 'fork' });
      const hold = setInterval(() => {}, 1_000);
      const kernel = host.kernel({ recovery: 'checkpoint' });
      await kernel.execute('x = 1');
      await kernel.checkpoint();
      const fork = await kernel.fork();
      const { pid: template } = await host.warm();
      const children = readFileSync('/proc/' + template + '/task/' + template + '/children', 'utf8').trim().split(' ').map(Number);
      console.log(JSON.stringify({ daemon: process.pid, template, children }));
      // One is under way when the end comes.
      for (;;) await Promise.all([kernel.checkpoint(), fork.checkpoint()]);
    `;
    const { line } = startNode(t, source);
    const { daemon, template: pid, children } = await line<{ daemon: number; template: number; children: number[] }>();
    assert.ok(children.length >= 4, `original, fork, and two frozen copies: ${children}`);
    const names = new Set(children.map(comm));
    assert.ok(names.has('kernel-frozen') && names.size > 1, [...names].join(', '));
    const ours = () => allProcesses().filter(({ pid: each }) => environment(each).includes(`KERNELHOST_LIFE=${mark}`));
    const mark = /KERNELHOST_LIFE=(.*)-[0-9a-f]{8}-[0-9a-f]{8}/.exec(environment(children[0] as number))?.[1] ?? 'none';
    assert.ok(ours().length >= 5, 'the template too');
    process.kill(daemon, 'SIGKILL');
    if (template !== 'lives') process.kill(pid, 'SIGKILL');
    await until('nothing is left', () => ours().filter(({ state }) => state !== 'Z').length === 0, 5_000);
  });
}

function environment(pid: number): string {
  try {
    return readFileSync(`/proc/${pid}/environ`, 'latin1');
  } catch {
    return '';
  }
}

test('frozen copies are not touched by what happens to the live one, and do not count with it', async (t) => {
  const host = startHost(t, { launch: 'fork' });
  const kernel = host.kernel({ limits: { processes: 3 } });
  await ok(kernel, 'import subprocess, time\nx = 1');
  const checkpoints = await Promise.all(Array.from({ length: 4 }, () => kernel.checkpoint()));
  assert.equal((await kernel.usage()).processes, 1);
  const { call } = await begin(kernel, 'print("asleep"); time.sleep(60)', 'asleep');
  await kernel.interrupt();
  assert.equal((await call).status, 'interrupted');
  await ok(kernel, 'child = subprocess.Popen(["sleep", "600"], start_new_session=True)');
  const { leftovers } = await kernel.kill();
  assert.deepEqual(
    leftovers.ended.map(({ command }) => command),
    ['sleep 600'],
  );
  for (const checkpoint of checkpoints) {
    await kernel.rollback(checkpoint);
    assert.equal(await value(kernel, 'x'), '1');
  }
});

test('examples/branches.ts tries ten ways and keeps the best', async (t) => {
  const example = join(import.meta.dirname, '../../examples/branches.ts');
  const env = { ...process.env, KERNELHOST_PYTHON: pythonForTests(), NODE_OPTIONS: '' };
  const options = { env, cwd: temporaryFolder(t), timeout: 60_000 };
  const { stdout, stderr } = await promisify(execFile)(process.execPath, [example], options);
  assert.equal(stderr, '');
  const lines = stdout.trim().split('\n');
  const costs = lines.slice(0, 10).map((line) => Number(/^width [\d.]+: cost (\d+\.\d+)$/.exec(line)?.[1]));
  assert.equal(costs.length, 10);
  assert.deepEqual(
    costs,
    costs.toSorted((one, other) => one - other),
  );
  const kept = /^width ([\d.]+):/.exec(lines[0] ?? '')?.[1];
  assert.match(lines[10] ?? '', new RegExp(`^kept width ${kept}: \\(500, \\d+\\) .* 2 kernels are left$`));
});
