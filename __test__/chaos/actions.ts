/** Owns how each planned action is done to whoever is in its place by then. Knows no expectation. */

import { setTimeout as sleep } from 'node:timers/promises';
import type { Interference } from './model.ts';
import { type Action, hostOf } from './plan.ts';
import { everyProcess, type Identity, lifeMarker, look, signal } from './process-table.ts';
import { type HostPlace, isLife, type Subject, type World } from './world.ts';

/** More calls than this wait behind no kernel: what is queued must be over within the deadline of a call. */
const LONGEST_QUEUE = 8;

export class Actor {
  readonly #world: World;
  /** Who is stopped, and how to let them go on. */
  readonly #stopped = new Set<() => void>();

  constructor(world: World) {
    this.#world = world;
  }

  perform(action: Action): void {
    this.#world.count(`do: ${action.do}`);
    if ('host' in action) this.#performOnHost(action);
    else this.#performOnKernel(action);
  }

  /** Lets everybody go on who was stopped. */
  continueAll(): void {
    for (const goOn of [...this.#stopped]) goOn();
  }

  closeEverything(): void {
    for (const place of this.#world.hosts) this.#closeHost(place, 500);
  }

  #performOnHost(action: Extract<Action, { host: number }>): void {
    const world = this.#world;
    const { number, do: what, host } = action;
    const place = world.hosts[host];
    if (place === undefined) throw new Error(`no host in place ${host}`);
    const told = (details: object) => {
      world.history.note(null, null, { action: number, what, host: place.name, ...details });
      // It concerns all of its kernels, so their last actions tell it.
      for (const { recent } of place.subjects)
        recent.add({ action: null, what }, JSON.stringify({ number, what, ...details }));
    };
    switch (action.do) {
      case 'signal the template':
        told({ signal: action.signal, sent: this.#signal(place.template, action.signal, isTemplate) });
        return;
      case 'stop the template':
        told({ forMs: action.forMs, sent: this.#stop(place.template, action.forMs, isTemplate) });
        return;
      case 'close a host': {
        told({ graceMs: action.graceMs });
        const slots = world.subjects.map((_, slot) => slot).filter((slot) => hostOf(slot, world.hosts.length) === host);
        this.#closeHost(place, action.graceMs);
        const next = world.openHost(host, action.next);
        slots.forEach((slot, index) => {
          const shape = action.nextKernels[index];
          if (shape !== undefined) world.openKernel(slot, next, shape);
        });
      }
    }
  }

  #performOnKernel(action: Extract<Action, { slot: number }>): void {
    const world = this.#world;
    const subject = world.subjects[action.slot];
    if (subject === undefined) throw new Error(`no kernel in slot ${action.slot}`);
    const { kernel } = subject;
    const { number, do: what } = action;
    const told = (details: object) =>
      world.history.note(subject.name, subject.recent, { action: number, what, state: kernel.state, ...details });
    switch (action.do) {
      case 'cell': {
        const skipped = subject.model.pending >= LONGEST_QUEUE;
        told({ ...action.cell, skipped });
        if (!skipped) this.#execute(subject, action);
        return;
      }
      case 'start': {
        told({ abortAfterMs: action.abortAfterMs });
        const abort = action.abortAfterMs === null ? null : new AbortController();
        if (abort !== null) {
          const over = subject.model.interfere('abort of a start');
          setTimeout(() => {
            abort.abort();
            // Without a caller the launch ends a moment later.
            setTimeout(over, 2_000);
          }, action.abortAfterMs ?? 0);
        }
        const call = kernel.start(abort === null ? {} : { signal: abort.signal });
        this.#call(
          subject,
          number,
          what,
          call,
          null,
          (error) => abort?.signal.aborted === true && error === abort.signal.reason,
        );
        return;
      }
      case 'interrupt':
        told({});
        this.#call(subject, number, what, kernel.interrupt(), 'interrupt');
        return;
      case 'restart':
        told({});
        this.#call(subject, number, what, kernel.restart(), 'restart');
        return;
      case 'kill':
        told({ signal: action.signal });
        this.#call(subject, number, what, kernel.kill(action.signal), 'kill');
        return;
      case 'usage':
        told({});
        this.#call(subject, number, what, kernel.usage(), null);
        return;
      case 'close':
        told({ graceMs: action.graceMs });
        this.#close(subject, number, kernel.close({ graceMs: action.graceMs }));
        world.openKernel(action.slot, subject.place, action.next);
        return;
      case 'signal a life': {
        const pid = subject.life?.pid;
        const generation = kernel.generation;
        // Noted first: the exit may be told before this function comes back to its own caller.
        if (pid !== undefined) subject.model.signalled(pid, action.signal);
        const sent = this.#signal(subject.life, action.signal, (pid) => isLife(look(pid), generation));
        told({ pid, signal: action.signal, sent });
        return;
      }
      case 'stop a life': {
        const generation = kernel.generation;
        const sent = this.#stop(subject.life, action.forMs, (pid) => isLife(look(pid), generation));
        told({ pid: subject.life?.pid, forMs: action.forMs, sent });
        return;
      }
      case 'signal a child': {
        const child = this.#childOf(subject, action.which);
        const over = subject.model.interfere('signal to a child');
        const sent = this.#signal(child, action.signal, (pid) => child !== null && lifeMarker(pid) === child.marker);
        over();
        told({ pid: child?.pid, signal: action.signal, sent });
      }
    }
  }

  #execute(subject: Subject, { number, cell }: Extract<Action, { do: 'cell' }>): void {
    const world = this.#world;
    const { model } = subject;
    const asked = model.ask(cell);
    const abort = cell.abortAfterMs === null ? null : new AbortController();
    let over = () => {};
    const timer = setTimeout(() => {
      if (abort === null || asked.outcome !== null) return;
      over = model.interfere('abort');
      abort.abort();
      asked.abortReason = abort.signal.reason;
    }, cell.abortAfterMs ?? 0);
    const { timeoutMs, maxOutputBytes } = cell;
    const call = subject.kernel.execute(cell.code, {
      ...(abort === null ? {} : { signal: abort.signal }),
      ...(timeoutMs === null ? {} : { timeoutMs }),
      ...(maxOutputBytes === null ? {} : { maxOutputBytes }),
    });
    const late = (message: string) => world.fail(`${subject.name}: ${message}`, subject);
    void world.ledger.track(`cell "${cell.kind}" (action ${number})`, call, late, (outcome) => {
      clearTimeout(timer);
      over();
      if (outcome.status === 'fulfilled') {
        const { status, life, durationMs, recovered } = outcome.value;
        model.resolved(asked, outcome.value);
        world.count(`cell: ${status}`);
        if (recovered !== null) world.count('recovered');
        this.#settled(subject, number, {
          status,
          generation: life.generation,
          durationMs,
          recovered: recovered !== null,
        });
      } else {
        model.rejected(asked, outcome.reason);
        world.count(`cell: ${nameOf(outcome.reason)}`);
        this.#settled(subject, number, { error: nameOf(outcome.reason) });
      }
    });
  }

  /** `interference`: what it is to the lives and cells of the kernel, for as long as it is pending. */
  #call(
    subject: Subject,
    number: number,
    what: string,
    call: Promise<unknown>,
    interference: Interference | null,
    isExpected: (error: unknown) => boolean = () => false,
  ): void {
    const world = this.#world;
    const over = interference === null ? undefined : subject.model.interfere(interference);
    const late = (message: string) => world.fail(`${subject.name}: ${message}`, subject);
    void world.ledger.track(`${what} (action ${number})`, call, late, (outcome) => {
      over?.(outcome.status === 'rejected' ? 'refused' : undefined);
      if (outcome.status === 'rejected' && !isExpected(outcome.reason)) {
        subject.model.refused(`${what}()`, outcome.reason);
        world.count(`${what}: ${nameOf(outcome.reason)}`);
      }
      this.#settled(subject, number, outcome.status === 'fulfilled' ? {} : { error: nameOf(outcome.reason) });
    });
  }

  #close(subject: Subject, number: number | null, call: Promise<void>): void {
    const world = this.#world;
    // Never over: what comes later is refused for it.
    subject.model.interfere('close');
    const late = (message: string) => world.fail(`${subject.name}: ${message}`, subject);
    void world.ledger.track('close', call, late, (outcome) => {
      if (outcome.status === 'rejected') world.fail(`${subject.name}: close() failed: ${outcome.reason}`, subject);
      this.#settled(subject, number, { closed: true });
      void this.#auditSoon(subject);
    });
  }

  /** What was settled together with the close is told in this turn of the event loop or the next. */
  async #auditSoon(subject: Subject): Promise<void> {
    if (subject.closed) return;
    subject.closed = true;
    await sleep(100);
    if (subject.model.pending > 0) {
      this.#world.fail(`${subject.name}: ${subject.model.pending} calls are pending after the close`, subject);
    }
    this.#world.audit(subject);
  }

  #closeHost(place: HostPlace, graceMs: number): void {
    const world = this.#world;
    const subjects = [...place.subjects];
    for (const { model } of subjects) model.interfere('close');
    const late = (message: string) => world.fail(`${place.name}: ${message}`);
    void world.ledger.track('close of a host', place.host.close({ graceMs }), late, (outcome) => {
      world.history.note(null, null, { action: null, what: 'host closed', host: place.name });
      if (outcome.status === 'rejected') world.fail(`${place.name}: close() failed: ${outcome.reason}`);
      for (const subject of subjects) void this.#auditSoon(subject);
    });
  }

  #settled(subject: Subject, number: number | null, details: object): void {
    this.#world.history.note(subject.name, subject.recent, { action: null, what: 'settled', of: number, ...details });
  }

  // Signals

  #signal(target: Identity | null, name: NodeJS.Signals, holds: (pid: number) => boolean): boolean {
    const sent = target !== null && signal(target, name, ({ pid }) => holds(pid));
    if (sent) this.#world.count(`sent ${name}`);
    return sent;
  }

  #stop(target: Identity | null, forMs: number, holds: (pid: number) => boolean): boolean {
    if (target === null || !this.#signal(target, 'SIGSTOP', holds)) return false;
    const goOn = () => {
      clearTimeout(timer);
      this.#stopped.delete(goOn);
      this.#signal(target, 'SIGCONT', () => true);
    };
    const timer = setTimeout(goOn, forMs);
    this.#stopped.add(goOn);
    return true;
  }

  /** One of the processes that the life has started, found by the life's marker. */
  #childOf({ life, kernel }: Subject, which: number): (Identity & { marker: string }) | null {
    if (life === null || !isLife(look(life.pid), kernel.generation)) return null;
    const marker = lifeMarker(life.pid);
    const children = everyProcess().filter(({ pid }) => pid !== life.pid && lifeMarker(pid) === marker);
    const child = children[which % children.length];
    return child === undefined ? null : { pid: child.pid, start: child.start, marker };
  }
}

/** A template leads its session, serves no kernel, and is our child. */
function isTemplate(pid: number): boolean {
  const found = look(pid);
  return found?.session === pid && found.parent === process.pid && /-ffffffff-00000000$/.test(lifeMarker(pid));
}

function nameOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return 'code' in error && typeof error.code === 'string' ? error.code : error.name;
}
