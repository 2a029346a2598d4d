/**
 * Owns the hosts and kernels of a run: who is in which place, the events they tell, and the account of what was seen. Knows
 * nothing of the plan but the shapes it asks for.
 */

import { type Kernel, KernelHost, type TemplateInfo } from 'kernelhost';
import { pythonForTests } from '../helpers/index.ts';
import { History, Recent } from './history.ts';
import { Ledger } from './ledger.ts';
import { Model } from './model.ts';
import type { HostShape, KernelShape } from './plan.ts';
import { type Identity, identify, lifeMarker, look, type Process } from './process-table.ts';

/** A run with a fault in it soon has hundreds. */
const FAILURES_TOLD = 10;

/** One kernel, from the moment it is made until it is closed and audited. */
export interface Subject {
  name: string;
  place: HostPlace;
  kernel: Kernel;
  model: Model;
  recent: Recent;
  life: Identity | null;
  closed: boolean;
}

export interface HostPlace {
  name: string;
  host: KernelHost;
  template: Identity | null;
  subjects: Subject[];
}

export class World {
  readonly history: History = new History();
  readonly ledger: Ledger = new Ledger();
  readonly counts: Map<string, number> = new Map();
  readonly failures: string[] = [];
  readonly hosts: HostPlace[] = [];
  /** By slot. */
  readonly subjects: Subject[] = [];
  /** Pids of lives and templates that were told of. */
  readonly leaders: Set<number> = new Set();
  readonly #folder: string;
  #hostsMade = 0;

  /** `folder`: where kernels work. */
  constructor(folder: string) {
    this.#folder = folder;
  }

  count(what: string): void {
    this.counts.set(what, (this.counts.get(what) ?? 0) + 1);
  }

  fail(message: string, subject: Subject | null = null): void {
    this.failures.push(message);
    this.history.note(subject?.name ?? null, subject?.recent ?? null, { action: null, what: 'FAILURE', message });
    if (this.failures.length > FAILURES_TOLD) return;
    const recent = subject === null ? '' : `\n  the last actions on ${subject.name}:\n${subject.recent}`;
    process.stderr.write(`\nFAILURE: ${message}${recent}\n`);
  }

  get tooManyFailures(): boolean {
    return this.failures.length >= FAILURES_TOLD;
  }

  openHost(place: number, { shell, launch }: HostShape): HostPlace {
    const name = `host-${++this.#hostsMade}`;
    const host = new KernelHost({ python: pythonForTests(), shell, launch });
    const made: HostPlace = { name, host, template: null, subjects: [] };
    host.on('template', (template) => this.#templateTold(made, template));
    host.on('warning', ({ code, message }) => {
      this.count(`warning ${code}`);
      this.history.note(null, null, { action: null, what: 'warning', host: name, code, message });
    });
    this.hosts[place] = made;
    this.count(`host opened: ${shell}, ${launch}`);
    return made;
  }

  openKernel(slot: number, place: HostPlace, shape: KernelShape): Subject {
    const kernel = place.host.kernel({ ...shape, cwd: this.#folder, startTimeoutMs: 30_000, interruptGraceMs: 200 });
    const name = `${place.name}/${kernel.id}`;
    const recent = new Recent();
    const model = new Model(shape, (message) => this.fail(`${name}: ${message}`, subject));
    const subject: Subject = { name, place, kernel, model, recent, life: null, closed: false };
    kernel.on('start', (life) => {
      model.started(life);
      this.leaders.add(life.pid);
      this.count(`start: ${life.launch}, ${life.shell}`);
      // It may be over by now, and its pid somebody else's.
      const found = identify(life.pid);
      subject.life = found !== null && isLife(look(life.pid), life.generation) ? found : null;
      const { generation, pid, launch, launchReason } = life;
      this.history.note(name, recent, { action: null, what: 'start', generation, pid, launch, launchReason });
    });
    kernel.on('exit', (exit) => {
      subject.life = null;
      model.exited(exit);
      this.count(`exit: ${exit.cause}`);
      for (const _ of exit.leftovers.ended) this.count('left over and ended');
      // Where the machine stalls this may be; that it is gone when the run is over is checked then.
      for (const _ of exit.leftovers.remaining) this.count('left over and not ended in time');
      const { generation, pid, cause, status } = exit;
      this.history.note(name, recent, { action: null, what: 'exit', generation, pid, cause, status });
    });
    this.subjects[slot] = subject;
    place.subjects.push(subject);
    return subject;
  }

  /** Once the kernel is closed and its calls are over; then it is forgotten. */
  audit(subject: Subject): void {
    subject.model.audit();
    subject.kernel.removeAllListeners();
    subject.place.subjects.splice(subject.place.subjects.indexOf(subject), 1);
  }

  #templateTold(place: HostPlace, { pid, state }: TemplateInfo): void {
    this.count(`template ${state}`);
    this.history.note(null, null, { action: null, what: `template ${state}`, host: place.name, pid });
    if (state === 'ready') {
      this.leaders.add(pid);
      const found = look(pid);
      place.template = found?.session === pid && found.parent === process.pid ? identify(pid) : null;
    } else if (place.template?.pid === pid) {
      place.template = null;
    }
  }
}

/** Whether the process is this life of a kernel, or still is: it leads its session and carries the marker of the life. */
export function isLife(found: Process | null, generation: number): boolean {
  if (found === null || found.session !== found.pid) return false;
  return lifeMarker(found.pid).endsWith(`-${generation.toString(16).padStart(8, '0')}`);
}
