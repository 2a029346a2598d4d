import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Dispatcher, type HostOnlyEvent, type KernelEvent } from '../../ts/dispatcher.ts';
import type { NativeHostEvent } from '../../ts/native.ts';
import { cell, cellOutput, exitReason, failure, life, settled } from '../helpers/mock-native.ts';

/** Collects what a dispatcher hands on. */
function collector(): { log: string[]; dispatcher: Dispatcher } {
  const log: string[] = [];
  const dispatcher = new Dispatcher({
    kernelEvent: (event: KernelEvent) => log.push(event.kind),
    hostEvent: (event: HostOnlyEvent) => log.push(event.kind),
  });
  return { log, dispatcher };
}

/** Everything that is due has run. */
const turn = () => new Promise((resolve) => setImmediate(resolve));

test('a reply settles its own request and no other', async () => {
  const { dispatcher } = collector();
  const first = dispatcher.ask(() => {});
  const second = dispatcher.ask(() => {});
  dispatcher.receive([settled(second.request, { kind: 'done' })]);
  assert.deepEqual(await second.reply, { kind: 'done' });
  dispatcher.receive([settled(first.request, { kind: 'life', life: life() })]);
  assert.equal((await first.reply).kind, 'life');
});

test('a second reply to the same request, and one to a request that never was, are dropped', async () => {
  const { dispatcher } = collector();
  const { request, reply } = dispatcher.ask(() => {});
  dispatcher.receive([
    settled(request, { kind: 'done' }),
    settled(request, { kind: 'life', life: life() }),
    settled(999, { kind: 'done' }),
  ]);
  assert.equal((await reply).kind, 'done');
});

test('the awaiter of a reply goes on before an exit event of the same batch, however many awaits lie between', async () => {
  const { log, dispatcher } = collector();
  const { request, reply } = dispatcher.ask(() => {});
  const caller = (async () => {
    await reply;
    for (let hops = 0; hops < 20; hops++) await null;
    log.push('caller');
  })();
  dispatcher.receive([
    settled(request, { kind: 'failed', failure: failure('ERR_KERNEL_DIED', { exit: exitReason() }) }),
    { kind: 'exited', kernel: 1, exit: exitReason() },
    { kind: 'started', kernel: 1, life: life(2) },
  ]);
  await caller;
  await turn();
  assert.deepEqual(log, ['caller', 'exited', 'started']);
});

test('a batch that comes while another waits for its awaiters is delivered after it', async () => {
  const { log, dispatcher } = collector();
  const { request } = dispatcher.ask(() => {});
  dispatcher.receive([settled(request, { kind: 'done' }), { kind: 'exited', kernel: 1, exit: exitReason() }]);
  dispatcher.receive([{ kind: 'started', kernel: 1, life: life(2) }]);
  await turn();
  assert.deepEqual(log, ['exited', 'started']);
});

test('an addon that throws fails the request and not the process', async () => {
  const { dispatcher } = collector();
  const { reply } = dispatcher.ask(() => {
    throw new Error('torn down');
  });
  const settledReply = await reply;
  assert.equal(settledReply.kind === 'failed' && settledReply.failure.code, 'ERR_INTERNAL');
});

test('closing the host settles what is still pending, and what is asked afterwards, with ERR_KERNEL_CLOSED', async () => {
  const { dispatcher } = collector();
  const pending = dispatcher.ask(() => {});
  dispatcher.end();
  const later = dispatcher.ask(() => assert.fail('the addon is not asked any more'));
  for (const { reply } of [pending, later]) {
    const end = await reply;
    assert.equal(end.kind === 'failed' && end.failure.code, 'ERR_KERNEL_CLOSED');
  }
});

test('in any mixture of events and batches nothing is lost, doubled or reordered', async () => {
  for (let seed = 1; seed <= 200; seed++) {
    const random = generator(seed);
    const expected: string[] = [];
    const seen: string[] = [];
    const dispatcher = new Dispatcher({
      kernelEvent: (event) => {
        seen.push(`event ${event.kernel}`);
        // A listener that throws must not cost anybody else anything.
        if (random() < 0.1) throw new ListenerError();
      },
      hostEvent: () => seen.push('host'),
    });
    const open: number[] = [];
    const replies: Promise<void>[] = [];
    const ask = () => {
      const { request, reply } = dispatcher.ask(
        () => {},
        (_output, bytes) => seen.push(`output ${request} ${bytes}`),
      );
      open.push(request);
      replies.push(
        reply.then(async () => {
          await null;
          seen.push(`reply ${request}`);
        }),
      );
    };
    ask();
    await withListenerErrors(async () => {
      for (let batches = 0; batches < 8; batches++) {
        const batch: NativeHostEvent[] = [];
        for (let events = Math.floor(random() * 12); events > 0; events--) {
          const roll = random();
          const index = Math.floor(random() * open.length);
          const request = open[index];
          if (roll < 0.3 || request === undefined) {
            const number = expected.length;
            batch.push({ kind: 'exited', kernel: number, exit: exitReason() });
            expected.push(`event ${number}`);
          } else if (roll < 0.6) {
            const bytes = expected.length + 1;
            batch.push(cellOutput(request, 'x', bytes));
            expected.push(`output ${request} ${bytes}`);
          } else if (roll < 0.8) {
            open.splice(index, 1);
            batch.push(settled(request, { kind: 'cell', cell: cell() }));
            expected.push(`reply ${request}`);
          } else {
            ask();
          }
        }
        dispatcher.receive(batch);
        if (random() < 0.5) await turn();
      }
      dispatcher.receive(open.map((request) => settled(request, { kind: 'done' })));
      expected.push(...open.map((request) => `reply ${request}`));
      await Promise.all(replies);
      await turn();
    });
    assert.deepEqual(seen, expected, `seed ${seed}`);
  }
});

class ListenerError extends Error {}

/** Listener errors come up as uncaught exceptions, which the test runner would take for failures of the test. */
async function withListenerErrors(task: () => Promise<void>): Promise<void> {
  const others = process.listeners('uncaughtException');
  process.removeAllListeners('uncaughtException');
  const onError = (error: unknown) => {
    if (!(error instanceof ListenerError)) throw error;
  };
  process.on('uncaughtException', onError);
  try {
    await task();
  } finally {
    process.off('uncaughtException', onError);
    for (const listener of others) process.on('uncaughtException', listener);
  }
}

function generator(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
