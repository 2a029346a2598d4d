/**
 * Cells that lay hands on what is not theirs: the descriptors of their life, the format of the wires, the host's answers. That
 * life may end; its call is settled, its neighbours notice nothing, and the next call has a life that works. And what a
 * kernel can read of the process that it works for, which is nothing.
 */

import assert from 'node:assert/strict';
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { type CellResult, type Kernel, KernelDiedError } from 'kernelhost';
import { deathOf, python } from '../fixtures/endings-calls.ts';
import { json, ok } from '../fixtures/forkserver-look.ts';
import { runNodeForJson } from '../fixtures/node-run.ts';
import {
  descriptorCount,
  type HostForTest,
  isAlive,
  pythonForTests,
  startHost,
  type TestContext,
  temporaryFolder,
  until,
  within,
} from '../helpers/index.ts';

const launches = ['fork', 'spawn'] as const;

/** What a cell needs to speak the protocol in its life's place. */
const TOOLS = `
import json, os, socket, struct, time
def frame(kind, number, thing=None, length=None, reserved=0):
    payload = b"" if thing is None else json.dumps(thing).encode()
    return struct.pack("<IHHQ", len(payload) if length is None else length, kind, reserved, number) + payload
def done(cell):
    return frame(21, cell, {"status": "ok", "executionCount": 1, "interrupted": False, "value": None, "error": None})
def wire(fd):
    return socket.socket(fileno=os.dup(fd))
`;
const WAIT = 'time.sleep(60)';

interface Misdeed {
  name: string;
  code: string;
  /** How the call must end; `any`: with a result or the death of its life. */
  ends: 'protocol-error' | 'result' | 'died' | 'any';
  says?: RegExp;
}

const frames: Misdeed[] = [
  { name: 'random bytes', code: `os.write(3, bytes(range(256)) * 20); ${WAIT}`, ends: 'protocol-error' },
  {
    name: 'a length above the limit',
    code: `os.write(3, frame(18, 1, length=0xFFFFFFFF)); ${WAIT}`,
    ends: 'protocol-error',
    says: /announced 4294967295 bytes/,
  },
  {
    name: 'a length above the limit, and a flood behind it',
    code: `os.write(3, frame(18, 1, length=0x4000001))\nwhile True: os.write(3, bytes(4096))`,
    ends: 'protocol-error',
  },
  {
    name: 'a reserved field',
    code: `os.write(3, frame(19, 1, {"wait": True}, reserved=9)); ${WAIT}`,
    ends: 'protocol-error',
    says: /reserved field was 9/,
  },
  {
    name: 'an unknown kind',
    code: `os.write(3, frame(99, 1)); ${WAIT}`,
    ends: 'protocol-error',
    says: /unknown kind 99/,
  },
  {
    name: 'a kind of the host',
    code: `os.write(3, frame(2, 1, {"code": "1", "silent": False})); ${WAIT}`,
    ends: 'protocol-error',
    says: /unknown kind 2/,
  },
  {
    name: 'a payload that is no JSON',
    code: `os.write(3, frame(21, 1, length=3) + b"{]}"); ${WAIT}`,
    ends: 'protocol-error',
    says: /kind 21 held what it may not/,
  },
  {
    name: 'a payload of the wrong shape',
    code: `os.write(3, frame(18, 1, [1])); ${WAIT}`,
    ends: 'protocol-error',
    says: /kind 18/,
  },
  {
    name: 'data that is no object',
    code: `os.write(3, frame(20, 1, {"data": None, "metadata": 5})); ${WAIT}`,
    ends: 'protocol-error',
    says: /kind 20/,
  },
  {
    name: 'ready, once more',
    code: `os.write(3, frame(16, 0, {"protocol": 1, "pid": 1, "python": "x", "pythonVersion": "3", "shell": "plain"})); ${WAIT}`,
    ends: 'protocol-error',
    says: /said twice/,
  },
  {
    name: 'a failed start after a good one',
    code: `os.write(3, frame(17, 0, {"stage": "init", "error": {"name": "", "value": "", "traceback": []}})); ${WAIT}`,
    ends: 'protocol-error',
  },
  {
    name: 'the answer of a cell that does not run',
    code: `os.write(3, done(999)); ${WAIT}`,
    ends: 'protocol-error',
    says: /999/,
  },
  { name: 'a second answer', code: `os.write(3, done(2) + done(2)); ${WAIT}`, ends: 'any' },
  {
    name: 'a request on calls',
    code: `os.write(4, done(1)); ${WAIT}`,
    ends: 'protocol-error',
    says: /unknown kind 21/,
  },
  { name: 'random bytes on calls', code: `os.write(4, bytes(range(1, 256))); ${WAIT}`, ends: 'protocol-error' },
  { name: 'barriers of odd numbers', code: 'for n in (0, 7, 2**64 - 1): os.write(4, frame(32, n))', ends: 'result' },
  {
    name: 'displays of cells that do not run',
    code: 'for n in (0, 999, 2**64 - 1): os.write(3, frame(19, n, {"wait": True}))',
    ends: 'result',
  },
  {
    name: 'JSON of great depth',
    code: `deep = b'{"data":{"a":' + b"[" * 300_000 + b"]" * 300_000 + b'},"metadata":{}}'\nrest = memoryview(frame(20, 2, length=len(deep)) + deep)\nwhile rest: rest = rest[os.write(3, rest):]`,
    ends: 'result',
  },
  {
    name: 'descriptors',
    code: 'for n in range(50): socket.send_fds(wire(3), [frame(19, 2, {"wait": True})], [0, 1, 2])',
    ends: 'result',
  },
  { name: 'a byte out of band', code: 'wire(3).send(b"x", socket.MSG_OOB)', ends: 'any' },
];

const descriptors: Misdeed[] = [
  ...[0, 1, 2, 5, 6].map((fd): Misdeed => ({ name: `close(${fd})`, code: `os.close(${fd})`, ends: 'result' })),
  { name: 'close(3)', code: 'os.close(3)', ends: 'died' },
  { name: 'close(4)', code: 'os.close(4)', ends: 'any' },
  { name: 'close of all', code: 'os.closerange(0, 7)', ends: 'died' },
  ...[0, 1, 2, 5, 6].flatMap((fd): Misdeed[] =>
    ['null', 'zero'].map((device) => ({
      name: `/dev/${device} over ${fd}`,
      code: `os.dup2(os.open("/dev/${device}", os.O_RDWR), ${fd}); print(1); display(2)`,
      ends: 'result',
    })),
  ),
  { name: '/dev/null over 3', code: 'os.dup2(os.open("/dev/null", os.O_RDWR), 3)', ends: 'died' },
  { name: '/dev/zero over 3', code: 'os.dup2(os.open("/dev/zero", os.O_RDWR), 3)', ends: 'died' },
  { name: '/dev/null over 4', code: 'os.dup2(os.open("/dev/null", os.O_RDWR), 4); display(1)', ends: 'any' },
  { name: 'calls over requests', code: 'os.dup2(4, 3)', ends: 'any' },
  { name: 'requests over calls', code: 'os.dup2(3, 4); display(1)', ends: 'any' },
  { name: 'requests over stdout', code: 'os.dup2(3, 1); print("x" * 200)', ends: 'protocol-error' },
  ...[0, 1, 2, 4, 5, 6].map(
    (fd): Misdeed => ({
      name: `non-blocking ${fd}`,
      code: `os.set_blocking(${fd}, False); print(1); display(2)`,
      ends: 'result',
    }),
  ),
  { name: 'non-blocking 3', code: 'os.set_blocking(3, False); display(2)', ends: 'any' },
  ...[0, 1, 2].flatMap((how): Misdeed[] =>
    [3, 4].map((fd) => ({
      name: `shutdown(${how}) of ${fd}`,
      code: `wire(${fd}).shutdown(${how}); display(1)`,
      ends: 'any',
    })),
  ),
  {
    name: 'garbage for interrupts',
    code: 'os.write(os.open("/proc/self/fd/5", os.O_WRONLY), os.urandom(999))',
    ends: 'result',
  },
  { name: 'the writing end of the lifeline', code: 'os.open("/proc/self/fd/6", os.O_WRONLY)', ends: 'any' },
  {
    name: 'nobody to be signalled by the lifeline',
    code: 'import fcntl; fcntl.fcntl(6, fcntl.F_SETFL, 0)',
    ends: 'result',
  },
];

/** A kernel beside the one that misbehaves: it runs cells all the while, and counts how long the slowest took. */
class Neighbour {
  readonly kernel: Kernel;
  #stop = false;
  #cells = 0;
  #slowestMs = 0;
  #running: Promise<void> = Promise.resolve();

  constructor(host: HostForTest) {
    this.kernel = host.kernel();
  }

  async begin(): Promise<void> {
    await ok(this.kernel, 'x = 0');
    this.#running = this.#run();
  }

  async #run(): Promise<void> {
    while (!this.#stop) {
      const began = performance.now();
      assert.equal((await ok(this.kernel, 'x += 1; x')).text, String(++this.#cells));
      this.#slowestMs = Math.max(this.#slowestMs, performance.now() - began);
      await sleep(5);
    }
  }

  /** It has run at least one cell from its beginning to its end since this was called. */
  async goesOn(): Promise<void> {
    const wanted = this.#cells + 2;
    await within(
      'a neighbour goes on',
      until('its cells', () => this.#cells >= wanted, 5_000),
    );
  }

  async end(): Promise<number> {
    this.#stop = true;
    await within('the neighbour ends its cell', this.#running);
    return this.#slowestMs;
  }
}

async function misbehave(kernel: Kernel, { name, code, ends, says }: Misdeed): Promise<void> {
  const call = kernel.execute(TOOLS + code, { timeoutMs: 8_000 });
  if (ends === 'result') {
    const result = await within(name, call);
    assert.equal(result.status, 'ok', `${name}: ${result.error?.traceback.join('\n')}`);
    return;
  }
  if (ends === 'any') {
    const outcome = await within(
      name,
      call.then(
        (result: CellResult) => result.status,
        (error: unknown) => error,
      ),
    );
    if (typeof outcome === 'string') assert.match(outcome, /^(ok|error)$/, name);
    else assert.ok(outcome instanceof KernelDiedError, `${name}: ${String(outcome)}`);
    return;
  }
  const { exit, message } = await deathOf(call);
  assert.ok(message.includes(`Kernel "${kernel.id}"`), message);
  if (ends === 'protocol-error') assert.equal(exit.cause, 'protocol-error', `${name}: ${message}`);
  if (says !== undefined) assert.match(message, says, name);
}

/** The kernel can be used again: at most one call is lost to a life that was broken and had not noticed. */
async function recovers(kernel: Kernel, name: string): Promise<void> {
  for (let attempt = 0; attempt < 2; attempt++) {
    const outcome = await within(
      `the call after ${name}`,
      kernel.execute('40 + 2', { timeoutMs: 8_000 }).then(
        (result) => result,
        (error: unknown) => error,
      ),
    );
    if (!(outcome instanceof KernelDiedError)) {
      if (outcome instanceof Error) throw outcome;
      assert.equal((outcome as CellResult).text, '42', name);
      return;
    }
  }
  assert.fail(`${name}: no life that works has followed`);
}

async function survives(t: TestContext, launch: 'fork' | 'spawn', misdeed: Misdeed): Promise<void> {
  const host = startHost(t, { launch, shell: 'plain' });
  const neighbour = new Neighbour(host);
  await neighbour.begin();
  const kernel = host.kernel();
  await ok(kernel, '1');
  const before = descriptorCount(process.pid);
  await misbehave(kernel, misdeed);
  await neighbour.goesOn();
  await recovers(kernel, misdeed.name);
  await neighbour.end();
  await until('no descriptor is left over', () => descriptorCount(process.pid) <= before, 5_000);
}

for (const [what, misdeeds] of [
  ['wrong frames', frames],
  ['wrong descriptors', descriptors],
] as const) {
  describe(what, () => {
    for (const launch of launches) {
      for (const misdeed of misdeeds) {
        test(`${misdeed.name} (${launch})`, { timeout: 30_000 }, async (t) => survives(t, launch, misdeed));
      }
    }
  });
}

describe('floods and half frames', () => {
  for (const launch of launches) {
    test(`a frame that never becomes whole: the time limit ends it (${launch})`, { timeout: 60_000 }, async (t) => {
      const host = startHost(t, { launch, shell: 'plain' });
      const neighbour = new Neighbour(host);
      await neighbour.begin();
      const kernel = host.kernel({ interruptGraceMs: 200 });
      await ok(kernel, '1');
      const { exit } = await deathOf(
        kernel.execute(`${TOOLS}os.write(3, frame(18, 2, length=64 << 20))`, { timeoutMs: 500 }),
      );
      assert.equal(exit.cause, 'timeout');
      await neighbour.goesOn();
      await recovers(kernel, 'half a frame');
      await neighbour.end();
    });

    for (const [name, fd, kind, payload] of [
      ['barriers whose answers nobody reads', 4, 32, 'None'],
      ['displays that wait for nobody', 3, 18, '{"data": {}, "metadata": {}, "displayId": None, "update": False}'],
      ['clears of no cell', 3, 19, '{"wait": True}'],
    ] as const) {
      test(`a flood of ${name} holds nobody up and is not kept (${launch})`, { timeout: 60_000 }, async (t) => {
        const host = startHost(t, { launch, shell: 'plain' });
        const neighbour = new Neighbour(host);
        await neighbour.begin();
        const kernel = host.kernel();
        await ok(kernel, '1');
        const before = process.memoryUsage().rss;
        const cell = kind === 19 ? 0 : 2;
        const call = kernel.execute(
          `${TOOLS}flood = frame(${kind}, ${cell}, ${payload}) * 1000\nend = time.monotonic() + 2\nwhile time.monotonic() < end: os.write(${fd}, flood)`,
          { timeoutMs: 8_000 },
        );
        call.catch(() => {});
        for (let look = 0; look < 5; look++) await neighbour.goesOn();
        const outcome = await within(
          'the flood ends',
          call.then(
            ({ status }) => status,
            (error: unknown) => error,
          ),
        );
        // The wire of calls does not block, so a write may also fail.
        const isOver = outcome === 'ok' || (kind === 32 && outcome === 'error');
        assert.ok(isOver || outcome instanceof KernelDiedError, String(outcome));
        await recovers(kernel, name);
        const slowestMs = await neighbour.end();
        assert.ok(slowestMs < 1_000, `a neighbour's cell took ${slowestMs} ms`);
        if (kind !== 18) {
          const grown = (process.memoryUsage().rss - before) / 2 ** 20;
          assert.ok(grown < 64, `the daemon has grown by ${grown} MiB`);
        }
      });
    }
  }
});

describe('forks of a cell', () => {
  for (const launch of launches) {
    test(`C67: parent and child both answer: one reply, the child is heard by nobody and dies with the kernel (${launch})`, async (t) => {
      const host = startHost(t, { launch, shell: 'plain' });
      const neighbour = new Neighbour(host);
      await neighbour.begin();
      const kernel = host.kernel();
      await ok(kernel, '1');
      // The child tries to speak on the numbers it had, and goes on in the background.
      const code = `${TOOLS}
child = os.fork()
if not child:
    for fd in (3, 4):
        try: os.write(fd, done(2) if fd == 3 else frame(32, 1))
        except OSError: pass
    time.sleep(600)
child`;
      const child = Number((await ok(kernel, code)).text);
      assert.ok(child > 1 && isAlive(child));
      for (let round = 0; round < 20; round++) assert.equal((await ok(kernel, `${round}`)).text, String(round));
      const before = cpuTicks(child);
      await sleep(300);
      assert.ok(cpuTicks(child) - before < 10, 'the child spins');
      // One by the C library, past what Python does at a fork: it keeps the descriptors, and may cost its parent the life.
      const raw = kernel.execute(
        `import ctypes\nraw = ctypes.CDLL(None).fork()\nif not raw: os._exit(0) if os.write(3, done(23)) < 0 else time.sleep(600)\nraw`,
        { timeoutMs: 8_000 },
      );
      const outcome = await within(
        'the call of the raw fork',
        raw.then(
          ({ status }) => status,
          (error: unknown) => error,
        ),
      );
      assert.ok(outcome === 'ok' || outcome instanceof KernelDiedError, String(outcome));
      await neighbour.goesOn();
      await kernel.kill();
      await until('the child is gone', () => !isAlive(child));
      await recovers(kernel, 'a fork');
      await neighbour.end();
    });
  }
});

function cpuTicks(pid: number): number {
  const text = readFileSync(`/proc/${pid}/stat`, 'utf8');
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  return Number(fields[11]) + Number(fields[12]);
}

/** A daemon with secrets: in its environment, and in files and sockets that it left open across exec. */
function daemon(folder: string, launch: 'fork' | 'spawn'): string {
  return `
import { execFileSync } from 'node:child_process';
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { KernelHost } from 'kernelhost';
const read = 'import os, json\\nfds = {}\\nfor n in os.listdir("/proc/self/fd"):\\n    try: fds[n] = os.readlink(f"/proc/self/fd/{n}")\\n    except OSError: pass\\n'
  + 'raw = open("/proc/self/environ", "rb").read().decode().split("\\\\0")\\n'
  + 'print(json.dumps({"fds": fds, "environ": [v for v in raw if v], "os": dict(os.environ)}))';
const host = new KernelHost({ python: ${python(pythonForTests())}, launch: ${python(launch)}, shell: 'plain' });
const env = (name) => ({ PATH: process.env.PATH, HOME: ${python(folder)}, GIVEN: name });
const first = host.kernel({ env: env('first') });
const second = host.kernel({ env: env('second') });
let template = null;
host.on('template', ({ pid }) => { template = pid; });
const look = async (kernel) => JSON.parse((await kernel.execute(read)).stdout);
const found = { first: await look(first), second: await look(second), template: null };
if (template !== null) {
  const folder = '/proc/' + template + '/fd';
  found.template = {
    fds: Object.fromEntries(readdirSync(folder).map((name) => [name, readlinkSync(folder + '/' + name)])),
    environ: readFileSync('/proc/' + template + '/environ', 'utf8').split('\\0').filter(Boolean),
  };
}
await host.close();
console.log(JSON.stringify(found));
`;
}

interface Look {
  fds: Record<string, string>;
  environ: string[];
  os?: Record<string, string>;
}

describe('what a kernel can read of the daemon', () => {
  for (const launch of launches) {
    test(`no variable, no descriptor (${launch})`, { timeout: 60_000 }, async (t) => {
      const folder = temporaryFolder(t);
      // Opened by a Python that hands the daemon files and sockets which survive exec.
      const opener = `
import os, socket, sys
secret = os.open(${python(`${folder}/secret-file`)}, os.O_RDWR | os.O_CREAT)
pair = socket.socketpair()
for fd in (secret, *(each.fileno() for each in pair)): os.dup2(fd, fd + 40)
os.execvp(sys.argv[1], sys.argv[1:])`;
      const { value } = await runNodeForJson<{ first: Look; second: Look; template: Look | null }>(
        t,
        daemon(folder, launch),
        {
          through: [pythonForTests(), '-c', opener],
          env: {
            ...process.env,
            SECRET_OF_DAEMON: 'secret-value',
            PYTHONSECRET: 'secret-value',
            LC_SECRET: 'secret-value',
          },
        },
      );
      assert.equal(value.template !== null, launch === 'fork');
      const marker = /^KERNELHOST_LIFE$/;
      for (const name of ['first', 'second'] as const) {
        const look = value[name];
        const given = { PATH: process.env.PATH, HOME: folder, GIVEN: name };
        const variables = Object.fromEntries(Object.entries(look.os ?? {}).filter(([key]) => !marker.test(key)));
        // LC_CTYPE: what the interpreter itself sets where no locale was given (PEP 538).
        delete variables.LC_CTYPE;
        assert.deepEqual(variables, given, `os.environ of ${name}`);
        checkDescriptors(look.fds, name, 6);
        assert.ok(!JSON.stringify(look).includes('secret'), `${name} sees a secret: ${JSON.stringify(look)}`);
        const names = look.environ.map((variable) => variable.slice(0, variable.indexOf('=')));
        const foreign = names.filter((key) => !(key in given) && !marker.test(key) && key !== 'LC_CTYPE');
        assert.deepEqual(foreign, [], `/proc/self/environ of ${name} shows variables that were not given`);
        const other = name === 'first' ? 'second' : 'first';
        assert.ok(!look.environ.includes(`GIVEN=${other}`), `${name} sees what was given to its sibling`);
      }
      if (value.template !== null) {
        assert.ok(!JSON.stringify(value.template).includes('secret'), JSON.stringify(value.template));
        assert.ok(!value.template.environ.some((variable) => variable.startsWith('GIVEN=')));
      }
      // The wires of two kernels are different ones.
      const wires = (look: Look) => [1, 2, 3, 4, 5, 6].map((fd) => look.fds[fd]);
      assert.deepEqual(
        wires(value.first).filter((wire) => wires(value.second).includes(wire)),
        [],
      );
    });

    test(`two kernels with different start-up variables see nothing of each other's (${launch})`, async (t) => {
      const host = startHost(t, { launch, shell: 'plain' });
      const base = { PATH: process.env.PATH ?? '', HOME: temporaryFolder(t) };
      const one = host.kernel({ env: { ...base, OMP_NUM_THREADS: '1', TOKEN: 'of-one' } });
      const two = host.kernel({ env: { ...base, TOKEN: 'of-two' } });
      const read = 'print(__import__("json").dumps(open("/proc/self/environ", "rb").read().decode().split("\\0")))';
      const [ofOne, ofTwo] = [await json<string[]>(one, read), await json<string[]>(two, read)];
      assert.ok(!ofTwo.some((variable) => /of-one|OMP_/.test(variable)), ofTwo.join(' '));
      assert.ok(!ofOne.some((variable) => variable.includes('of-two')), ofOne.join(' '));
      // Gone from the life, gone from what others can read of it.
      await ok(one, 'import os; os.environ["LATER"] = "x"');
      assert.ok(!(await json<string[]>(two, read)).some((variable) => variable.includes('LATER')));
    });

    test(`a kernel sees nothing of the kernel that its template was started for (${launch})`, async (t) => {
      const host = startHost(t, { launch, shell: 'plain' });
      const base = { PATH: process.env.PATH ?? '', HOME: temporaryFolder(t) };
      const names = ['USER', 'LOGNAME', 'TMPDIR', 'TZ'];
      const one = host.kernel({ env: { ...base, ...Object.fromEntries(names.map((name) => [name, 'of-one'])) } });
      await ok(one, '1');
      const two = host.kernel({ env: base });
      const read = 'print(__import__("json").dumps(open("/proc/self/environ", "rb").read().decode().split("\\0")))';
      const shown = await json<string[]>(two, read);
      assert.deepEqual(
        shown.filter((variable) => variable.endsWith('=of-one')),
        [],
      );
    });

    test(`nothing of the daemon or of a sibling is open in a kernel, also late and after deaths (${launch})`, async (t) => {
      const host = startHost(t, { launch, shell: 'plain' });
      const kernels = Array.from({ length: 4 }, () => host.kernel());
      await Promise.all(kernels.map((kernel) => ok(kernel, '1')));
      for (const kernel of kernels.slice(0, 2)) await kernel.kill();
      await Promise.all(kernels.map((kernel) => ok(kernel, '1')));
      const inodes = kernels.map(({ pid }) => {
        const folder = `/proc/${pid}/fd`;
        const links = Object.fromEntries(readdirSync(folder).map((fd) => [fd, readlinkSync(`${folder}/${fd}`)]));
        checkDescriptors(links, String(pid), 6);
        return new Set(Object.values(links).filter((link) => /^(pipe|socket):/.test(link)));
      });
      const [first, ...others] = inodes;
      for (const other of others)
        assert.deepEqual(
          [...(first ?? [])].filter((link) => other.has(link)),
          [],
        );
    });
  }
});

/** 0 is /dev/null, the next are the wires; beyond them only mapped libraries, the look at the folder itself, and epoll or such of a loop. */
function checkDescriptors(links: Record<string, string>, of: string, last: number): void {
  assert.equal(links['0'], '/dev/null', of);
  for (const [fd, link] of Object.entries(links)) {
    if (fd === '0') continue;
    const expected = Number(fd) <= last ? /^(pipe|socket):\[\d+\]$/ : /\.so|^\/proc\/\d+\/fd$/;
    assert.match(link, expected, `descriptor ${fd} of ${of}`);
  }
}
