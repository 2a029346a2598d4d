import assert from 'node:assert/strict';
import { once } from 'node:events';
import { existsSync, mkdirSync, readdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { describe, test } from 'node:test';
import { displayWidth, duration, plain, shorten, size, table } from '../../ts/cli/top-table.ts';
import { Calls, firstLine } from '../../ts/monitor/calls.ts';
import { folderProblem, isTooLong, Place, removeStale } from '../../ts/monitor/place.ts';
import { MonitorServer } from '../../ts/monitor/server.ts';
import { type Glance, type KernelSnapshot, Sampler, type Snapshot, type Watchable } from '../../ts/monitor/snapshot.ts';
import { readHostOptions } from '../../ts/options.ts';
import { type TestContext, temporaryFolder, until, within } from '../helpers/index.ts';

const usage = { rssBytes: 4096, pssBytes: 2048, cpuMs: 10, threads: 1, processes: 2 };

function watchable(change: Partial<Glance> = {}, measure: Watchable['measure'] = async () => usage): Watchable {
  const glance: Glance = {
    id: 'kernel-1',
    state: 'idle',
    generation: 1,
    pid: 4711,
    ageMs: 1,
    cell: null,
    lastExit: null,
    ...change,
  };
  return { glance: () => glance, measure };
}

async function take(sampler: Sampler): Promise<Snapshot> {
  return JSON.parse(await sampler.take()) as Snapshot;
}

describe('the running cell', () => {
  test('is the oldest call that is pending', () => {
    const calls = new Calls();
    assert.equal(calls.running(), null);
    calls.made(1, 'one');
    calls.made(2, 'two');
    calls.lifeStarted();
    assert.equal(calls.running()?.code, 'one');
    calls.over(2);
    assert.equal(calls.running()?.code, 'one');
    calls.made(3, 'three');
    calls.over(1);
    assert.equal(calls.running()?.code, 'three');
  });

  test('is timed from its turn, not from the call', async () => {
    const calls = new Calls();
    calls.made(1, 'one');
    calls.made(2, 'two');
    const began = performance.now();
    await until('some time', () => performance.now() - began > 60);
    calls.over(1);
    assert.ok((calls.running()?.runningMs ?? 60) < 50);
  });

  test('is the last one where it was given up and goes on', () => {
    const calls = new Calls();
    calls.made(1, 'stuck');
    calls.over(1);
    assert.equal(calls.running()?.code, 'stuck');
    calls.lifeStarted();
    assert.equal(calls.running(), null);
  });

  for (const [code, line] of [
    ['', ''],
    [' \n\t\n  x = 1  \ny', 'x = 1'],
    ['a\r\nb', 'a'],
    ['é'.repeat(80), 'é'.repeat(80)],
    ['😀'.repeat(81), `${'😀'.repeat(79)}…`],
    ['x'.repeat(5_000_000), `${'x'.repeat(79)}…`],
  ] as const) {
    test(`is shown by one line of at most 80 characters: ${JSON.stringify(code.slice(0, 20))}`, () => {
      assert.equal(firstLine(code), line);
    });
  }
});

describe('a look at the kernels', () => {
  test('is shared by those who ask at the same time', async () => {
    let measured = 0;
    const sampler = new Sampler(() => [watchable({}, async () => ({ ...usage, cpuMs: ++measured }))]);
    const lines = await Promise.all([sampler.take(), sampler.take(), sampler.take()]);
    assert.equal(new Set(lines).size, 1);
    assert.equal(await sampler.take(), lines[0]);
    assert.equal(measured, 1);
  });

  test('tells the share of a processor between two measurements, and of one life only', async () => {
    let cpuMs = 0;
    const glance: Partial<Glance> = {};
    const kernel = watchable({}, async () => ({ ...usage, cpuMs }));
    const changing: Watchable = { glance: () => ({ ...kernel.glance(), ...glance }), measure: kernel.measure };
    const sampler = new Sampler(() => [changing]);
    const next = async () => {
      const [found] = (await take(sampler)).kernels;
      sampler.rest();
      return found as KernelSnapshot;
    };
    assert.equal((await next()).cpuPercent, null);
    cpuMs += 1_000_000;
    assert.ok(((await next()).cpuPercent ?? 0) > 1_000);
    glance.generation = 2;
    assert.equal((await next()).cpuPercent, null);
    glance.pid = null;
    const absent = await next();
    assert.equal(absent.rssBytes, null);
    assert.equal(absent.usageAgeMs, null);
  });

  test('measures two at a time, those first that have waited longest, and no more than there is time for', async () => {
    let atOnce = 0;
    let most = 0;
    const counts = new Map<string, number>();
    const kernels = Array.from({ length: 60 }, (_, index) => {
      const id = `kernel-${index}`;
      return watchable({ id }, async () => {
        most = Math.max(most, ++atOnce);
        counts.set(id, (counts.get(id) ?? 0) + 1);
        await new Promise((resolve) => setTimeout(resolve, 20));
        atOnce -= 1;
        return usage;
      });
    });
    const sampler = new Sampler(() => kernels);
    const began = performance.now();
    assert.equal((await take(sampler)).kernels.length, 60);
    assert.ok(performance.now() - began < 1_000, 'all sixty were waited for');
    assert.ok(counts.size < 60);
    await until('every one has its turn', async () => {
      sampler.rest();
      await sampler.take();
      return counts.size === 60;
    });
    assert.ok(Math.max(...counts.values()) <= 2, 'some were measured again before others');
    assert.equal(most, 2);
  });

  test('measures those that run a cell before those that do not, and neither never', async () => {
    const counts = new Map<string, number>();
    const kernels = Array.from({ length: 60 }, (_, index) => {
      const id = `kernel-${index}`;
      return watchable({ id, state: index >= 58 ? 'running' : 'idle' }, async () => {
        counts.set(id, (counts.get(id) ?? 0) + 1);
        await new Promise((resolve) => setTimeout(resolve, 20));
        return usage;
      });
    });
    const sampler = new Sampler(() => kernels);
    await sampler.take();
    assert.ok(counts.has('kernel-58') && counts.has('kernel-59') && counts.size < 60);
    // The first round goes to those that never had a turn. After it, whoever runs a cell comes round eight times as often.
    const turns = (id: string) => counts.get(id) ?? 0;
    await until('every one has its turn, and those that run a cell some more', async () => {
      sampler.rest();
      await sampler.take();
      return counts.size === 60 && turns('kernel-59') >= 3;
    });
    assert.ok(turns('kernel-59') > turns('kernel-57'), `${turns('kernel-59')} and ${turns('kernel-57')}`);
  });

  test('does without those that cannot be measured, and asks them no second time meanwhile', async () => {
    let asked = 0;
    const wedged = watchable({ id: 'wedged' }, () => {
      asked += 1;
      return new Promise(() => {});
    });
    const kernels = [wedged, watchable({ id: 'fine' })];
    const sampler = new Sampler(() => kernels);
    for (let round = 0; round < 3; round++) {
      const { kernels } = await within('a look', take(sampler), 2_000);
      assert.deepEqual(
        kernels.map(({ rssBytes }) => rssBytes),
        [null, 4096],
      );
      sampler.rest();
    }
    assert.equal(asked, 1);
  });
});

/** A server on a socket of its own, with clients that are gone at the end. */
function serve(t: TestContext, kernels: () => readonly Watchable[]) {
  const path = join(temporaryFolder(t), 'socket');
  const warnings: string[] = [];
  const server = new MonitorServer({ path, environment: {}, kernels, warn: (message) => warnings.push(message) });
  t.after(() => server.close());
  const client = async (): Promise<Client> => {
    await until('the socket is there', () => existsSync(path));
    const socket = connect(path);
    t.after(() => void socket.destroy());
    socket.on('error', () => {});
    await within('a connection', once(socket, 'connect'));
    return new Client(socket);
  };
  return { server, path, warnings, client };
}

class Client {
  readonly socket: Socket;
  readonly closed: Promise<unknown>;
  #lines: AsyncIterator<string> | null = null;

  constructor(socket: Socket) {
    this.socket = socket;
    this.closed = new Promise((resolve) => socket.once('close', resolve));
  }

  /** The next line; null at the end. */
  async next(): Promise<(Snapshot & { error?: string } & { version: number }) | null> {
    this.#lines ??= createInterface({ input: this.socket })[Symbol.asyncIterator]();
    const { value, done } = await within('a line', this.#lines.next());
    return done === true ? null : JSON.parse(value);
  }
}

describe('the socket', () => {
  test('sends a snapshot a second, and one and the end to those who ask for it', async (t) => {
    const { client } = serve(t, () => [watchable()]);
    const steady = await client();
    assert.equal((await steady.next())?.version, 1);
    assert.equal((await steady.next())?.kernels.length, 1);
    for (const request of ['{"once":true}\n', '{"once":true}']) {
      const single = await client();
      // What stands behind the last line end counts as well once the client has hung up.
      single.socket.end(request);
      assert.equal((await single.next())?.version, 1);
      assert.equal(await single.next(), null);
    }
    assert.equal((await steady.next())?.version, 1);
  });

  test('a client that asks for one snapshot after it has got one gets the end', async (t) => {
    const { client } = serve(t, () => []);
    const single = await client();
    await single.next();
    single.socket.write('{"once":true}\n');
    assert.equal(await single.next(), null);
  });

  for (const [what, request, answer] of [
    ['no JSON', 'GET / HTTP/1.1\r\n\r\n', 'send lines of JSON'],
    ['no object', '7\n', 'send objects'],
    ['a pace that is too fast', '{"intervalMs":1}\n', 'intervalMs: give a number from 500 to 3600000'],
    ['a pace that is no number', '{"intervalMs":"1"}\n', 'intervalMs: give a number from 500 to 3600000'],
    ['no end of a line', 'x'.repeat(100_000), 'that is too much'],
    ['no end of requests', '{}\n'.repeat(30_000), 'that is too much'],
    ['binary', Buffer.from([0, 255, 254, 10]), 'send lines of JSON'],
  ] as const) {
    test(`a client that sends ${what} is told so and sent away; the others stay`, async (t) => {
      const { client } = serve(t, () => []);
      const good = await client();
      await good.next();
      const bad = await client();
      bad.socket.write(request);
      let line = await bad.next();
      while (line !== null && line.error === undefined) line = await bad.next();
      assert.equal(line?.error, answer);
      assert.equal(await bad.next(), null);
      assert.equal((await good.next())?.version, 1);
    });
  }

  test('a client that never reads has one snapshot kept for it', async (t) => {
    let asked = 0;
    // More than a socket takes by itself, less than a client is left for.
    const large = 'x'.repeat(1024 * 1024 - 10_000);
    const { client } = serve(t, () => {
      asked += 1;
      return [watchable({ id: large })];
    });
    const deaf = await client();
    deaf.socket.pause();
    deaf.socket.write('{"intervalMs":500}\n');
    await until('the first snapshot is under way', () => asked > 0);
    const before = asked;
    const began = performance.now();
    await until('three intervals', () => performance.now() - began > 1_600);
    assert.equal(asked <= before + 2, true, `it was asked for ${asked - before} times more`);
    const good = await client();
    assert.equal((await good.next())?.kernels.length, 1);
    deaf.socket.resume();
    assert.equal((await deaf.next())?.kernels.length, 1);
    assert.equal((await deaf.next())?.kernels.length, 1);
  });

  test('a client that leaves more than 1 MiB unread is left; one that reads is not, however much there is', async (t) => {
    const large = 'x'.repeat(8 * 1024 * 1024);
    const { client } = serve(t, () => [watchable({ id: large })]);
    const deaf = await client();
    deaf.socket.pause();
    const good = await client();
    for (let count = 0; count < 4; count++) assert.equal((await good.next())?.kernels[0]?.id.length, large.length);
    // What the socket had taken is still there to read, and then the end.
    deaf.socket.resume();
    let heard = 0;
    deaf.socket.on('data', (chunk: Buffer) => {
      heard += chunk.length;
    });
    await within('the end', deaf.closed);
    assert.ok(heard < large.length, `${heard} bytes came`);
  });

  test('measures nothing while nobody looks, nor for who only looks whether it is there', async (t) => {
    let asked = 0;
    const { client, path } = serve(t, () => {
      asked += 1;
      return [];
    });
    const probe = await client();
    probe.socket.destroy();
    await removeStale(path);
    assert.ok(existsSync(path));
    assert.equal(asked, 0);
    const short = await client();
    await short.next();
    short.socket.destroy();
    await short.closed;
    const looked = asked;
    const began = performance.now();
    await until('two intervals', () => performance.now() - began > 2_100);
    assert.equal(asked, looked);
  });

  test('takes eight clients; the ninth is sent away, and let in when one has gone', async (t) => {
    const { client } = serve(t, () => []);
    const clients: Client[] = [];
    for (let count = 0; count < 8; count++) clients.push(await client());
    for (const each of clients) assert.equal((await each.next())?.version, 1);
    const more = await client();
    assert.equal(await more.next(), null);
    clients[0]?.socket.destroy();
    await until('there is room', async () => (await (await client()).next())?.version === 1);
  });

  test('close sends everybody away and removes the socket; again it does nothing', async (t) => {
    const { server, client, path, warnings } = serve(t, () => []);
    const one = await client();
    await one.next();
    server.close();
    server.close();
    await within(
      'the client is sent away',
      one.closed.then(() => {}),
      5_000,
    ).catch(async () => assert.equal(await one.next(), null));
    assert.equal(existsSync(path), false);
    assert.deepEqual(warnings, []);
  });

  test('closed before it was open, it leaves nothing', async (t) => {
    const folder = temporaryFolder(t);
    const server = new MonitorServer({
      path: join(folder, 'socket'),
      environment: {},
      kernels: () => [],
      warn: assert.fail,
    });
    server.close();
    const other = new MonitorServer({
      path: null,
      environment: { XDG_RUNTIME_DIR: folder },
      kernels: () => [],
      warn: assert.fail,
    });
    other.close();
    await new Promise((resolve) => setImmediate(resolve));
    await until('nothing is left', () => readdirSync(folder).length === 0);
  });
});

describe('the place of a socket', () => {
  test('C124: a folder that is a link, a file, or open to others is not trusted', (t) => {
    const folder = temporaryFolder(t);
    const [link, file, open, own] = ['link', 'file', 'open', 'own'].map((name) => join(folder, name)) as [
      string,
      string,
      string,
      string,
    ];
    mkdirSync(own, { mode: 0o700 });
    mkdirSync(open, { mode: 0o755 });
    symlinkSync(own, link);
    writeFileSync(file, '');
    assert.match(folderProblem(link) ?? '', /is not a folder/);
    assert.match(folderProblem(file) ?? '', /is not a folder/);
    assert.match(folderProblem(open) ?? '', /is open to others \(mode 755, not 700\)/);
    assert.equal(folderProblem(own), null);
    assert.equal(folderProblem(join(folder, 'none')), null);
  });

  test('is found beside those of other hosts and of processes with the same number', async (t) => {
    const environment = { XDG_RUNTIME_DIR: temporaryFolder(t) };
    const places = [1, 2, 3].map(() => Place.prepare(null, environment));
    const servers = places.map(() => createServer());
    const paths: string[] = [];
    for (const [index, place] of places.entries()) {
      const server = servers[index];
      server?.listen(place.address);
      if (server !== undefined) await once(server, 'listening');
      paths.push(place.settle());
    }
    assert.deepEqual(
      paths.map((path) => path.split('/').at(-1)),
      [1, 2, 3].map((number) => `${process.pid}-${number}.sock`),
    );
    for (const place of places) place.remove();
    for (const server of servers) server.close();
    assert.deepEqual(readdirSync(environment.XDG_RUNTIME_DIR), []);
  });

  test('what has been put in its place meanwhile is not removed', async (t) => {
    const path = join(temporaryFolder(t), 'socket');
    const place = Place.prepare(path, {});
    const server = createServer().listen(place.address);
    await once(server, 'listening');
    place.settle();
    const { rename } = await import('node:fs/promises');
    writeFileSync(`${path}.new`, 'theirs');
    await rename(`${path}.new`, path);
    place.remove();
    server.close();
    assert.ok(existsSync(path));
  });

  test('only a socket that nobody listens on is stale', async (t) => {
    const folder = temporaryFolder(t);
    const file = join(folder, 'file');
    writeFileSync(file, '');
    await removeStale(file);
    await removeStale(join(folder, 'none'));
    assert.ok(existsSync(file));
  });

  test('is limited in length by what the address of a socket holds', () => {
    assert.equal(isTooLong(`/${'x'.repeat(106)}`), false);
    assert.equal(isTooLong(`/${'x'.repeat(107)}`), true);
    assert.equal(isTooLong(`/${'x'.repeat(96)}/s`), true);
  });
});

describe('the option', () => {
  const choice = (monitor: unknown, environment = {}) =>
    readHostOptions({ python: '/usr/bin/python3', monitor } as Parameters<typeof readHostOptions>[0], environment)
      .monitor;

  test('comes before the environment; without both there is no monitor', () => {
    assert.equal(choice(undefined), null);
    assert.deepEqual(choice(true), { path: null });
    assert.deepEqual(choice('/run/x.sock'), { path: '/run/x.sock' });
    assert.deepEqual(choice('x.sock'), { path: join(process.cwd(), 'x.sock') });
    assert.deepEqual(choice(undefined, { KERNELHOST_MONITOR: '1' }), { path: null });
    assert.deepEqual(choice(undefined, { KERNELHOST_MONITOR: '/run/y.sock' }), { path: '/run/y.sock' });
    for (const off of ['', '0']) assert.equal(choice(undefined, { KERNELHOST_MONITOR: off }), null);
    assert.equal(choice(false, { KERNELHOST_MONITOR: '1' }), null);
    assert.deepEqual(choice('/run/x.sock', { KERNELHOST_MONITOR: '1' }), { path: '/run/x.sock' });
  });

  for (const [value, message] of [
    [7, /^monitor: 7 is not allowed; give true, false or the path of a socket$/],
    ['', /^monitor: "" is not allowed; give a path that is not empty/],
    ['a\0b', /^monitor: .* NUL/],
    [`/${'x'.repeat(200)}`, /^monitor: .* at most 107 bytes$/],
  ] as const) {
    test(`is refused when it is ${JSON.stringify(value).slice(0, 20)}`, () => {
      assert.throws(() => choice(value), { code: 'ERR_INVALID_OPTION', message });
    });
  }

  test('of the environment is refused by its name', () => {
    assert.throws(() => choice(undefined, { KERNELHOST_MONITOR: `/${'x'.repeat(200)}` }), {
      code: 'ERR_INVALID_OPTION',
      message: /^KERNELHOST_MONITOR \(environment variable\): /,
    });
  });
});

function kernelSnapshot(change: Partial<KernelSnapshot> = {}): KernelSnapshot {
  return {
    id: 'kernel-1',
    state: 'idle',
    generation: 1,
    pid: 4711,
    ageMs: 65_000,
    cell: null,
    cpuMs: 1_500,
    cpuPercent: 0,
    rssBytes: 30 * 1024 * 1024,
    pssBytes: 11 * 1024 * 1024,
    processes: 1,
    threads: 1,
    usageAgeMs: 0,
    lastExit: null,
    ...change,
  };
}

const now = Date.parse('2026-12-01T00:00:00Z');
const snapshot = (kernels: KernelSnapshot[]): Snapshot => ({
  version: 1,
  host: { pid: 42, uptimeMs: 3_700_000, rssBytes: 100 * 1024 * 1024, eventLoopDelayMs: 0.4 },
  kernels,
});
const texts = (kernels: KernelSnapshot[], width: number | null) =>
  table(snapshot(kernels), width, now).map(({ text }) => text);

describe('the table', () => {
  const busy = kernelSnapshot({
    id: 'kernel-2',
    state: 'running',
    generation: 3,
    cpuPercent: 99.5,
    cell: { code: 'while True: pass', runningMs: 12_345 },
    lastExit: {
      cause: 'crash',
      status: 'SIGSEGV',
      message: '',
      generation: 2,
      at: new Date(now - 90_000).toISOString(),
    },
  });
  const absent = kernelSnapshot({
    id: 'kernel-3',
    state: 'absent',
    pid: null,
    ageMs: null,
    cpuMs: null,
    cpuPercent: null,
    rssBytes: null,
    pssBytes: null,
    processes: null,
    threads: null,
    usageAgeMs: null,
  });

  test('has a line per kernel, by CPU', () => {
    assert.deepEqual(texts([absent, kernelSnapshot(), busy], null), [
      'Host 42, up 1h01m, 100M, event loop late by 0.4 ms; 3 kernels: 1 absent, 1 idle, 1 running',
      'KERNEL    STATE    LIFE   PID    AGE  CPU%   CPU  PSS  RSS  PROCS  THR  LAST EXIT                   CELL',
      'kernel-2  running     3  4711  1m05s  99.5  1.5s  11M  30M      1    1  crash (SIGSEGV), 1m30s ago  12s  while True: pass',
      'kernel-1  idle        1  4711  1m05s   0.0  1.5s  11M  30M      1    1  –                           –',
      'kernel-3  absent      1     –      –     –     –    –    –      –    –  –                           –',
    ]);
  });

  test('fits every width, and keeps name, state, cell and CPU share longest', () => {
    for (let width = 1; width <= 140; width++) {
      for (const line of texts([busy, absent], width)) assert.ok(displayWidth(line) <= width, `${width}: ${line}`);
    }
    assert.deepEqual(texts([busy], 46).slice(1), [
      'KERNEL    STATE    CPU%  CELL',
      'kernel-2  running  99.5  12s  while True: pass',
    ]);
  });

  test('says when there is no kernel', () => {
    assert.equal(texts([], 80)[1], 'No kernels.');
  });

  test('passes no command of a cell on to the terminal', () => {
    const code = '\u001b]0;title\u0007\u001b[2J\u202eabc\u2028\u009b31m\n';
    const id = 'a\u001b[31m';
    for (const line of texts([kernelSnapshot({ id, cell: { code, runningMs: 0 } })], null)) {
      assert.doesNotMatch(line, /[\p{Cc}\p{Cf}\p{Zl}]/u);
    }
  });

  test('counts what is wide as two columns and what is combined as none', () => {
    assert.equal(displayWidth('日本'), 4);
    assert.equal(displayWidth('😀'), 2);
    assert.equal(displayWidth('e\u0301'), 1);
    assert.equal(shorten('日本語', 5), '日本…');
    assert.equal(shorten('日本語', 4), '日…');
    assert.equal(shorten('abc', 0), '');
    assert.equal(plain('a\tb\r\nc\u0000'), 'a b c');
  });

  test('writes times and sizes short', () => {
    assert.deepEqual(
      [0, 9_999, 10_000, 59_999, 60_000, 3_599_999, 3_600_000, 86_400_000, 400 * 86_400_000].map(duration),
      ['0.0s', '9.9s', '10s', '59s', '1m00s', '59m59s', '1h00m', '1d00h', '400d00h'],
    );
    assert.deepEqual([0, 1023 * 1024, 1024 * 1024, 1.5 * 1024 ** 3].map(size), ['0K', '1023K', '1M', '1.5G']);
  });
});
