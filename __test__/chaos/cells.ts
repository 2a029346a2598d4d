/** Owns what cells the chaos suite runs, and what each of them must give when nothing disturbs it. Knows no kernel. */

import type { Prng } from './prng.ts';

/** What a cell that is left alone must come to. */
export type Expectation =
  | { end: 'value'; text: string }
  | { end: 'printed'; stdout: string; stderr: string }
  /** More than is kept: head, tail and what is missing must add up to this. */
  | { end: 'much'; bytes: number }
  /** Adds its token to a list that lives as long as the life does, and prints the list. */
  | { end: 'remembered'; token: string }
  | { end: 'raised'; name: string; value: string | null }
  | { end: 'exits'; code: number }
  | { end: 'dies'; signal: NodeJS.Signals }
  /** Goes on until it is asked to stop. */
  | { end: 'never' }
  /** Goes on, whatever it is asked, for longer than it is asked. */
  | { end: 'stubborn' };

export interface Cell {
  kind: string;
  code: string;
  expectation: Expectation;
  /** A cell that would not end by itself always has a limit, so that every call is over in bounded time. */
  timeoutMs: number | null;
  abortAfterMs: number | null;
  maxOutputBytes: number | null;
}

/** No cell runs longer when it is left alone; a stubborn one, this long after it should have stopped. */
export const LONGEST_CELL_MS = 1_500;

type Draft = Pick<Cell, 'code' | 'expectation'> & Partial<Cell>;

/** Frequent: what daemons do all day. Rare: what ends lives or takes seconds. */
const weights = {
  arithmetic: 12,
  print: 8,
  remember: 24,
  raise: 6,
  'divide by zero': 3,
  'syntax error': 2,
  recurse: 2,
  'much output': 4,
  'bytes that are no text': 2,
  'top-level await': 5,
  threads: 4,
  subprocess: 4,
  'fork and wait': 3,
  'leave a child': 4,
  'leave a session': 4,
  'leave a daemon': 3,
  sleep: 8,
  'sleep in await': 4,
  'busy loop': 4,
  'wait for a child': 3,
  stubborn: 1,
  'exit()': 2,
  'os._exit()': 2,
  'exit of a thread': 1,
  segfault: 2,
  abort: 1,
  'kill itself': 1,
} as const;

type Kind = keyof typeof weights;

/** A child that would outlive any run. */
const SLEEPER = '["sleep", "600"]';
/** A fault on purpose needs no core file. */
const NO_CORE = 'import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n';

const drafts: Record<Kind, (random: Prng) => Draft> = {
  arithmetic(random) {
    const [a, b, c] = [random.between(0, 1e6), random.between(0, 1e6), random.between(0, 1e6)];
    return { code: `${a} * ${b} ** 3 - ${c}`, expectation: value(`${BigInt(a) * BigInt(b) ** 3n - BigInt(c)}`) };
  },

  print(random) {
    const [word, count] = [random.word(), random.between(0, 20_000)];
    return {
      code: `import sys\nprint("x" * ${count} + "${word}"); print("${word}", file=sys.stderr)`,
      expectation: printed(`${'x'.repeat(count)}${word}\n`, `${word}\n`),
    };
  },

  remember(random) {
    const token = random.word();
    return {
      code: `kept = globals().setdefault("kept", [])\nkept.append("${token}"); print(*kept)`,
      expectation: { end: 'remembered', token },
    };
  },

  raise(random) {
    const word = random.word();
    return { code: `raise LookupError("${word}")`, expectation: { end: 'raised', name: 'LookupError', value: word } };
  },

  'divide by zero': () => ({ code: '1 / 0', expectation: { end: 'raised', name: 'ZeroDivisionError', value: null } }),

  'syntax error': () => ({ code: 'def (:', expectation: { end: 'raised', name: 'SyntaxError', value: null } }),

  recurse: () => ({
    code: 'def deeper(): return deeper() + 1\ndeeper()',
    expectation: { end: 'raised', name: 'RecursionError', value: null },
  }),

  'much output'(random) {
    const [lines, width] = [random.between(500, 3_000), random.between(100, 1_000)];
    return {
      code: `for _ in range(${lines}): print("y" * ${width})`,
      expectation: { end: 'much', bytes: lines * (width + 1) },
      maxOutputBytes: random.pick([1_024, 65_536, 1_048_576]),
    };
  },

  'bytes that are no text': () => ({
    code: 'import os; _ = os.write(1, b"a\\xffb\\xc3")',
    expectation: printed('a\ufffdb\ufffd', ''),
  }),

  'top-level await'(random) {
    const word = random.word();
    return {
      code: `import asyncio\nawait asyncio.sleep(${random.between(0, 20) / 1e3})\n"${word}"`,
      expectation: value(`'${word}'`),
    };
  },

  threads(random) {
    const count = random.between(1, 4);
    return {
      code: `import threading\nsums = []\nthreads = [threading.Thread(target=lambda: sums.append(sum(range(1000)))) for _ in range(${count})]\nfor thread in threads: thread.start()\nfor thread in threads: thread.join()\nsum(sums)`,
      expectation: value(`${count * 499_500}`),
    };
  },

  subprocess(random) {
    const word = random.word();
    return {
      code: `import subprocess\n_ = subprocess.run(["echo", "${word}"], check=True)`,
      expectation: printed(`${word}\n`, ''),
    };
  },

  'fork and wait'(random) {
    const code = random.between(0, 100);
    return {
      code: `import os\nchild = os.fork()\nif child == 0: os._exit(${code})\nos.waitstatus_to_exitcode(os.waitpid(child, 0)[1])`,
      expectation: value(`${code}`),
    };
  },

  'leave a child': () => ({ code: left(''), expectation: value('True') }),

  'leave a session': () => ({ code: left(', start_new_session=True'), expectation: value('True') }),

  'leave a daemon': () => ({
    code: 'import subprocess\nsubprocess.run(["sh", "-c", "setsid sh -c \'trap : TERM INT HUP; sleep 600 & wait; wait\' >/dev/null 2>&1 &"]).returncode',
    expectation: value('0'),
  }),

  sleep(random) {
    const word = random.word();
    return {
      code: `import time; time.sleep(${random.between(1, 800) / 1e3}); "${word}"`,
      expectation: value(`'${word}'`),
    };
  },

  'sleep in await'(random) {
    const word = random.word();
    return {
      code: `import asyncio\nawait asyncio.sleep(${random.between(1, 800) / 1e3})\nprint("${word}")`,
      expectation: printed(`${word}\n`, ''),
    };
  },

  'busy loop': () => ({ code: 'while True: pass', expectation: { end: 'never' } }),

  'wait for a child': () => ({
    code: `import subprocess; subprocess.run(${SLEEPER})`,
    expectation: { end: 'never' },
  }),

  stubborn: () => ({
    // It ends by itself where the kernel lets it go on (`stuck: 'wait'`), so that the calls behind it come to their turn.
    code: `import time\nend = time.monotonic() + ${LONGEST_CELL_MS / 1e3}\nwhile time.monotonic() < end:\n    try: time.sleep(0.01)\n    except KeyboardInterrupt: pass`,
    expectation: { end: 'stubborn' },
    timeoutMs: 50,
  }),

  'exit()'(random) {
    const code = random.between(0, 255);
    return { code: `exit(${code})`, expectation: { end: 'exits', code } };
  },

  'os._exit()'(random) {
    const code = random.between(0, 255);
    return { code: `import os; os._exit(${code})`, expectation: { end: 'exits', code } };
  },

  'exit of a thread'(random) {
    const code = random.between(0, 255);
    return {
      code: `import os, threading, time\nthreading.Thread(target=lambda: os._exit(${code})).start()\ntime.sleep(600)`,
      expectation: { end: 'exits', code },
    };
  },

  segfault: () => ({
    code: `${NO_CORE}import ctypes; ctypes.memset(1, 0, 1)`,
    expectation: { end: 'dies', signal: 'SIGSEGV' },
  }),

  abort: () => ({ code: `${NO_CORE}import os; os.abort()`, expectation: { end: 'dies', signal: 'SIGABRT' } }),

  'kill itself'(random) {
    const signal = random.pick<NodeJS.Signals>(['SIGKILL', 'SIGTERM']);
    return {
      code: `import os, signal, time; os.kill(os.getpid(), signal.${signal}); time.sleep(600)`,
      expectation: { end: 'dies', signal },
    };
  },
};

/** Some kind of cell, some of them with a limit or an abort that may come before, in or after it. */
export function cell(random: Prng, kind: string = random.weighted(weights)): Cell {
  const draft = drafts[kind as Kind](random);
  const endless = draft.expectation.end === 'never';
  const limited = endless || random.chance(0.05);
  // Where it exits or dies, this limit is only there for the case that it does not.
  const timeoutMs = limited ? random.between(20, endless ? LONGEST_CELL_MS / 2 : LONGEST_CELL_MS) : null;
  const abortAfterMs = random.chance(0.06) ? random.between(0, 400) : null;
  return { kind, timeoutMs, abortAfterMs, maxOutputBytes: null, ...draft };
}

function left(options: string): string {
  return `import subprocess\nleft = globals().setdefault("left", [])\nleft.append(subprocess.Popen(${SLEEPER}${options}))\nleft[-1].poll() is None`;
}

function value(text: string): Expectation {
  return { end: 'value', text };
}

function printed(stdout: string, stderr: string): Expectation {
  return { end: 'printed', stdout, stderr };
}
