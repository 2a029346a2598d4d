//! What a kernel is doing, and what it does next. Pure: no clock, no process, no I/O; an input goes in, effects come out.
//!
//! | from | input | to | effects |
//! | --- | --- | --- | --- |
//! | Absent | execute, start, restart, rollback | Starting | launch |
//! | Absent | copy | Absent | it fails: there is nothing to copy |
//! | Starting | ready | Idle, or Running with the first of the queue | started, callers get the life |
//! | Starting | launch failed | Absent | callers and queue fail; the exit, if a process came to be |
//! | Starting | kill, close, nobody waits any more | Ending | cancel the launch |
//! | Idle | execute | Running | send the cell |
//! | Idle | copy | Running | have the life copy itself |
//! | Running | copied | Idle, or Running with the next | |
//! | Running | done | Idle, or Running with the next | the cell's result; with recovery 'checkpoint' a copy comes next |
//! | Running | interrupt, abort, time limit | Running | interrupt; grace; interrupt again; grace; then `stuck` decides |
//! | Idle, Running | restart, rollback, close | Ending | polite end, then SIGKILL after the grace |
//! | Idle, Running | kill, a broken wire, a stuck cell, a limit | Ending | signal |
//! | Idle, Running, Ending | ended | Absent, or Starting when somebody waits, or Closed | the cell and what was queued behind it fail; the exit |
//! | any | close | Closed at last | everything that waits fails |
//!
//! What holds whatever comes: a request is settled exactly once; a cell is sent at most once; a life has at most one exit, told
//! before the next launch; after `Closed` nothing is launched.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kernelhost_process::exit_reason::{Cause, ExitReason, ExitStatus};

use crate::copy::Purpose;
use crate::event::{CellStatus, FailureCode, LifeFacts, NOBODY, PublicState, Recovered, RecoveredState, RequestId};
use crate::options::{CellRequest, Recovery, Stuck};
use crate::wire::{CellId, Done};

/// Failed starts in a row that cost no pause.
const QUICK_STARTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const CHILDREN_GRACE: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub enum Input {
    Execute(RequestId, CellRequest),
    Copy(RequestId, Purpose),
    Start(RequestId),
    Restart(RequestId),
    /// To this checkpoint, which is there.
    Rollback(RequestId, u32),
    Interrupt(RequestId),
    Kill(RequestId, i32),
    Close(RequestId, Duration),
    /// The caller of this start or execute no longer wants it.
    Cancel(RequestId),
    Ready(LifeFacts),
    /// The same, of a life that has the effects of so many cells already.
    Thawed(LifeFacts, u32),
    LaunchFailed(StartFailed),
    Done(CellId, Done),
    /// The life is done with this copy, or has refused it; who asked for it is told by somebody else.
    Copied(CellId),
    /// The running cell called `exit()`.
    Exiting(i32),
    /// The life broke the wire format.
    Broken(String),
    /// It takes more than it may.
    OverLimit {
        cause: Cause,
        detail: String,
        evidence: Vec<String>,
    },
    /// The life is gone, its pipes are drained, its process group is dead.
    Ended(Arc<ExitReason>),
    Elapsed(Timer),
}

/// A launch that gave no life.
#[derive(Debug, Clone)]
pub struct StartFailed {
    pub code: FailureCode,
    pub message: String,
    /// Of the process, if there was one.
    pub exit: Option<Arc<ExitReason>>,
    pub stderr_tail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// The time limit of a cell.
    Limit(CellId),
    /// The time a cell has to heed an interrupt.
    Grace(CellId),
    /// The time a life has to end politely.
    End(u32),
    /// The time a call waits behind a cell that will not stop.
    Wait(RequestId),
}

#[derive(Debug)]
pub enum Effect {
    Launch {
        generation: u32,
        pause: Duration,
        origin: Origin,
    },
    CancelLaunch(Cause),
    Send {
        cell: CellId,
        request: RequestId,
        code: CellRequest,
    },
    Copy {
        id: CellId,
        request: RequestId,
        purpose: Purpose,
    },
    Interrupt(CellId),
    ShutDown,
    Signal(i32),
    Arm(Timer, Duration),
    /// Forget the timers of a cell.
    Disarm(CellId),
    Started(LifeFacts),
    Exited(Arc<ExitReason>),
    Settle(RequestId, Answer),
}

/// What a life begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Fresh,
    /// The newest copy that was taken after a cell; fresh where there is none.
    Newest,
    Checkpoint(u32),
}

#[derive(Debug)]
pub enum Answer {
    Done,
    /// The life that is there.
    Life,
    Exit(Arc<ExitReason>),
    /// The running cell's result, made of its output so far.
    Cell {
        status: CellStatus,
        done: Done,
        recovered: Option<Recovered>,
    },
    Failed {
        code: FailureCode,
        exit: Option<Arc<ExitReason>>,
        why: Why,
    },
}

/// What a failure's message says.
#[derive(Debug, Clone)]
pub enum Why {
    /// The life died under the running cell: its output so far goes with it.
    DiedRunning,
    DiedQueued,
    StartFailed(StartFailed),
    StartCancelled,
    Closed,
    Absent,
    NeverStarted,
    NothingToCopy,
    Busy,
    Aborted,
}

#[derive(Debug)]
enum State {
    Absent,
    Starting { callers: Vec<RequestId> },
    Idle,
    Running(Running),
    Ending(Ending),
    Closed,
}

#[derive(Debug)]
struct Running {
    cell: CellId,
    request: RequestId,
    /// Why it was asked to stop; the first reason stays.
    stop: Option<Stop>,
    /// How often it was asked by the escalation.
    asked: u8,
    /// Calls of `interrupt` that wait for it to be over.
    interrupters: Vec<RequestId>,
    /// The caller has its answer, the cell goes on.
    settled: bool,
    /// It is no cell: the life copies itself.
    is_copy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Interrupt,
    Abort,
    Timeout,
}

#[derive(Debug)]
struct Ending {
    cause: Cause,
    detail: Option<String>,
    evidence: Vec<String>,
    running: Option<Running>,
    /// Cells that were queued behind it when the end began.
    victims: Vec<RequestId>,
    killers: Vec<RequestId>,
    closers: Vec<RequestId>,
    /// Calls that want the next life.
    callers: Vec<RequestId>,
}

#[derive(Debug)]
struct Queued {
    request: RequestId,
    work: Work,
}

/// What a life does one after the other.
#[derive(Debug)]
enum Work {
    Cell(CellRequest),
    Copy(Purpose),
}

impl Queued {
    fn timeout(&self) -> Option<Duration> {
        match &self.work {
            Work::Cell(cell) => cell.timeout,
            Work::Copy(_) => None,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Policy {
    pub stuck: Stuck,
    pub recovery: Recovery,
    pub interrupt_grace: Duration,
}

#[derive(Debug)]
pub struct Machine {
    policy: Policy,
    state: State,
    generation: u32,
    /// One has been ready.
    had_life: bool,
    failed_starts: u32,
    queue: VecDeque<Queued>,
    last_cell: CellId,
    /// Whose effects the life has, also those of the life it is a copy of.
    cells_of_life: u32,
    /// What the next launch is to begin with, where that has been said.
    origin: Option<Origin>,
    announced_exit: Option<i32>,
    last_exit: Option<Arc<ExitReason>>,
    lost: Option<Recovered>,
    effects: Vec<Effect>,
}

/// Why a life ended, as far as this side knows.
pub struct Verdict {
    pub cause: Cause,
    pub detail: Option<String>,
    pub evidence: Vec<String>,
}

impl Machine {
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            state: State::Absent,
            generation: 0,
            had_life: false,
            failed_starts: 0,
            queue: VecDeque::new(),
            last_cell: 0,
            cells_of_life: 0,
            origin: None,
            announced_exit: None,
            last_exit: None,
            lost: None,
            effects: Vec::new(),
        }
    }

    pub fn public_state(&self) -> PublicState {
        match self.state {
            State::Absent => PublicState::Absent,
            State::Starting { .. } => PublicState::Starting,
            State::Idle | State::Running(Running { is_copy: true, .. }) => PublicState::Idle,
            State::Running(_) => PublicState::Running,
            State::Ending(_) => PublicState::Ending,
            State::Closed => PublicState::Closed,
        }
    }

    /// The cause of an end with this status: the one recorded first, or what the status tells.
    pub fn verdict(&self, status: &ExitStatus) -> Verdict {
        if let State::Ending(ending) = &self.state {
            return Verdict {
                cause: ending.cause,
                detail: ending.detail.clone(),
                evidence: ending.evidence.clone(),
            };
        }
        if let Some(code) = self.announced_exit {
            return Verdict {
                cause: Cause::ExitCall,
                detail: Some(format!("a cell called exit() with code {code}")),
                evidence: vec![format!("the kernel said that a cell called exit() with code {code}")],
            };
        }
        let cause = Cause::of_its_own(status);
        let evidence = match cause {
            Cause::ExitCall => "the wait status is an exit, and no call of exit() in a cell was announced",
            Cause::Crash | Cause::ExternalSignal => "the wait status is this signal, and this host sent none",
            _ => "there is no wait status",
        };
        Verdict {
            cause,
            detail: None,
            evidence: vec![evidence.to_owned()],
        }
    }

    /// Whether its time limit is what first asked the running cell to stop.
    pub fn has_timed_out(&self) -> bool {
        let running = match &self.state {
            State::Running(running) => Some(running),
            State::Ending(ending) => ending.running.as_ref(),
            _ => None,
        };
        running.is_some_and(|running| running.stop == Some(Stop::Timeout))
    }

    /// How long what a life has started may take to heed SIGTERM, once the life itself has ended: it is only where an end was
    /// asked for politely that somebody expects it to be one.
    pub fn grace_for_its_children(&self) -> Duration {
        match &self.state {
            State::Ending(Ending {
                cause: Cause::Close | Cause::Restart,
                ..
            }) => CHILDREN_GRACE,
            _ => Duration::ZERO,
        }
    }

    /// Whether the life is copying itself, and listens to nothing else.
    pub fn is_copying(&self) -> bool {
        matches!(&self.state, State::Running(Running { is_copy: true, .. }))
    }

    /// Whether the next life is to begin with a checkpoint that was asked for.
    pub fn rolls_back(&self) -> bool {
        matches!(self.origin, Some(Origin::Checkpoint(_)))
    }

    /// How many cells the life has the effects of.
    pub fn cells(&self) -> u32 {
        self.cells_of_life
    }

    /// A number that no cell has had or will have.
    pub fn take_number(&mut self) -> CellId {
        self.last_cell += 1;
        self.last_cell
    }

    /// One input, and what is to be done about it, in this order.
    pub fn on(&mut self, input: Input) -> Vec<Effect> {
        match input {
            Input::Execute(request, cell) => self.execute(Queued {
                request,
                work: Work::Cell(cell),
            }),
            Input::Copy(request, purpose) => self.execute(Queued {
                request,
                work: Work::Copy(purpose),
            }),
            Input::Start(request) => self.start(request),
            Input::Restart(request) => self.restart(request),
            Input::Rollback(request, to) => self.rollback(request, to),
            Input::Interrupt(request) => self.interrupt(request),
            Input::Kill(request, signal) => self.kill(request, signal),
            Input::Close(request, grace) => self.close(request, grace),
            Input::Cancel(request) => self.cancel(request),
            Input::Ready(life) => self.ready(life, None),
            Input::Thawed(life, cells) => self.ready(life, Some(cells)),
            Input::LaunchFailed(failure) => self.launch_failed(&failure),
            Input::Done(cell, done) => self.done(cell, done),
            Input::Copied(id) => self.copied(id),
            Input::Exiting(code) => self.announced_exit = Some(code),
            Input::Broken(why) => self.broken(why),
            Input::OverLimit {
                cause,
                detail,
                evidence,
            } => self.over_limit(cause, detail, evidence),
            Input::Ended(exit) => self.ended(exit),
            Input::Elapsed(timer) => self.elapsed(timer),
        }
        std::mem::take(&mut self.effects)
    }

    fn execute(&mut self, queued: Queued) {
        let request = queued.request;
        match &self.state {
            State::Closed => self.fail(request, FailureCode::KernelClosed, Why::Closed),
            State::Ending(ending) if !ending.closers.is_empty() => {
                self.fail(request, FailureCode::KernelClosed, Why::Closed);
            }
            State::Absent if matches!(queued.work, Work::Copy(_)) => {
                self.fail(request, FailureCode::KernelAbsent, Why::NothingToCopy);
            }
            State::Absent if self.must_be_started() => self.fail(request, FailureCode::KernelAbsent, Why::Absent),
            State::Absent => {
                self.queue.push_back(queued);
                self.launch(Vec::new());
            }
            State::Idle => self.send(queued),
            State::Running(running) => {
                if let (true, Some(limit)) = (running.settled, queued.timeout()) {
                    self.effects.push(Effect::Arm(Timer::Wait(request), limit));
                }
                self.queue.push_back(queued);
            }
            State::Starting { .. } | State::Ending(_) => self.queue.push_back(queued),
        }
    }

    fn start(&mut self, request: RequestId) {
        match &mut self.state {
            State::Absent => self.launch(vec![request]),
            State::Starting { callers } => callers.push(request),
            State::Idle | State::Running(_) => self.effects.push(Effect::Settle(request, Answer::Life)),
            State::Ending(ending) if ending.closers.is_empty() => ending.callers.push(request),
            State::Ending(_) | State::Closed => self.fail(request, FailureCode::KernelClosed, Why::Closed),
        }
    }

    fn restart(&mut self, request: RequestId) {
        if !matches!(self.state, State::Closed) {
            self.origin = Some(Origin::Fresh);
        }
        if matches!(self.state, State::Idle | State::Running(_)) {
            self.end(Cause::Restart, None, Polite::For(self.policy.interrupt_grace));
        }
        self.start(request);
    }

    fn rollback(&mut self, request: RequestId, to: u32) {
        const WHY: &str = "rollback() was called";
        let closes = matches!(&self.state, State::Ending(ending) if !ending.closers.is_empty());
        if closes || matches!(self.state, State::Closed) {
            self.fail(request, FailureCode::KernelClosed, Why::Closed);
            return;
        }
        self.origin = Some(Origin::Checkpoint(to));
        match &self.state {
            State::Idle | State::Running(_) => {
                let polite = Polite::For(self.policy.interrupt_grace);
                self.end(Cause::Restart, Some(WHY.to_owned()), polite);
            }
            State::Starting { .. } => self.cancel_launch(Cause::Restart, WHY),
            State::Absent | State::Ending(_) | State::Closed => {}
        }
        self.start(request);
    }

    fn interrupt(&mut self, request: RequestId) {
        match &mut self.state {
            State::Running(running) if !running.settled => {
                running.interrupters.push(request);
                self.ask_to_stop(Stop::Interrupt);
            }
            State::Running(running) => {
                // It has not heeded two interrupts. It is asked again, but nobody waits for it.
                self.effects.push(Effect::Interrupt(running.cell));
                self.effects.push(Effect::Settle(request, Answer::Done));
            }
            State::Closed => self.fail(request, FailureCode::KernelClosed, Why::Closed),
            _ => self.effects.push(Effect::Settle(request, Answer::Done)),
        }
    }

    fn kill(&mut self, request: RequestId, signal: i32) {
        match &mut self.state {
            State::Absent | State::Closed => match &self.last_exit {
                Some(exit) => self.effects.push(Effect::Settle(request, Answer::Exit(exit.clone()))),
                None => self.fail(request, FailureCode::KernelAbsent, Why::NeverStarted),
            },
            State::Starting { .. } => {
                self.cancel_launch(Cause::Kill, "kill() was called");
                self.killer(request);
            }
            State::Idle | State::Running(_) => {
                let name = kernelhost_process::signal::name(signal);
                self.end(
                    Cause::Kill,
                    Some(format!("kill('{name}') was called")),
                    Polite::No(signal),
                );
                self.killer(request);
                self.arm_end(self.policy.interrupt_grace);
            }
            State::Ending(_) => {
                self.effects.push(Effect::Signal(signal));
                self.killer(request);
            }
        }
    }

    fn close(&mut self, request: RequestId, grace: Duration) {
        let closed = Answer::Done;
        match &mut self.state {
            State::Closed => self.effects.push(Effect::Settle(request, closed)),
            State::Absent => {
                self.state = State::Closed;
                self.effects.push(Effect::Settle(request, closed));
            }
            State::Starting { .. } => self.cancel_launch(Cause::Close, "close() was called"),
            State::Idle | State::Running(_) => self.end(Cause::Close, None, Polite::For(grace)),
            State::Ending(_) => self.arm_end(grace),
        }
        if let State::Ending(ending) = &mut self.state {
            ending.closers.push(request);
            let turned_away: Vec<RequestId> = ending
                .victims
                .drain(..)
                .chain(ending.callers.drain(..))
                .chain(self.queue.drain(..).map(|queued| queued.request))
                .collect();
            for request in turned_away {
                self.fail(request, FailureCode::KernelClosed, Why::Closed);
            }
        }
    }

    fn cancel(&mut self, request: RequestId) {
        if let Some(place) = self.queue.iter().position(|queued| queued.request == request) {
            self.queue.remove(place);
            self.fail(request, FailureCode::Aborted, Why::Aborted);
        } else {
            let waiting = match &mut self.state {
                State::Running(running) if running.request == request && !running.settled => {
                    self.ask_to_stop(Stop::Abort);
                    return;
                }
                State::Starting { callers } => callers,
                State::Ending(ending) => {
                    if let Some(place) = ending.victims.iter().position(|victim| *victim == request) {
                        ending.victims.remove(place);
                        self.fail(request, FailureCode::Aborted, Why::Aborted);
                        return;
                    }
                    &mut ending.callers
                }
                _ => return,
            };
            let Some(place) = waiting.iter().position(|caller| *caller == request) else {
                return;
            };
            waiting.remove(place);
            self.fail(request, FailureCode::Aborted, Why::Aborted);
        }
        if matches!(&self.state, State::Starting { callers } if callers.is_empty()) && self.queue.is_empty() {
            self.cancel_launch(Cause::Kill, "nobody waited for it any more");
        }
    }

    fn ready(&mut self, life: LifeFacts, cells: Option<u32>) {
        self.failed_starts = 0;
        self.had_life = true;
        self.cells_of_life = cells.unwrap_or(0);
        if let (Some(cells), Some(lost)) = (cells, &mut self.lost) {
            lost.state = RecoveredState::Checkpoint;
            lost.lost_cells = lost.lost_cells.saturating_sub(cells);
        }
        self.announced_exit = None;
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Starting { callers } => {
                self.effects.push(Effect::Started(life));
                self.settle_all(callers, || Answer::Life);
                self.next();
            }
            State::Ending(ending) => {
                // The launch was cancelled when it had just succeeded.
                self.state = State::Ending(ending);
                self.effects.push(Effect::Signal(libc::SIGKILL));
            }
            other => self.state = other,
        }
    }

    fn launch_failed(&mut self, failure: &StartFailed) {
        if let Some(exit) = &failure.exit {
            self.last_exit = Some(exit.clone());
        }
        match std::mem::replace(&mut self.state, State::Absent) {
            State::Starting { callers } => {
                self.failed_starts += 1;
                let queued = self.queue.drain(..).map(|queued| queued.request);
                for request in callers.into_iter().chain(queued).collect::<Vec<_>>() {
                    self.fail_with(
                        request,
                        failure.code,
                        failure.exit.clone(),
                        Why::StartFailed(failure.clone()),
                    );
                }
                self.effects.extend(failure.exit.clone().map(Effect::Exited));
            }
            State::Ending(ending) => {
                for request in &ending.victims {
                    self.fail_with(
                        *request,
                        FailureCode::KernelStart,
                        failure.exit.clone(),
                        Why::StartCancelled,
                    );
                }
                self.effects.extend(failure.exit.clone().map(Effect::Exited));
                self.after_end(ending);
            }
            other => self.state = other,
        }
    }

    fn done(&mut self, cell: CellId, done: Done) {
        match &mut self.state {
            State::Running(running) if running.cell == cell && !running.is_copy => {
                let State::Running(running) = std::mem::replace(&mut self.state, State::Idle) else {
                    return;
                };
                self.effects.push(Effect::Disarm(cell));
                let is_good = done.ok;
                if !running.settled {
                    let status = status(running.stop, &done);
                    let recovered = self.lost.take();
                    self.effects.push(Effect::Settle(
                        running.request,
                        Answer::Cell {
                            status,
                            done,
                            recovered,
                        },
                    ));
                }
                self.settle_all(running.interrupters, || Answer::Done);
                if is_good && self.policy.recovery == Recovery::Checkpoint {
                    self.send(Queued {
                        request: NOBODY,
                        work: Work::Copy(Purpose::Automatic),
                    });
                } else {
                    self.next();
                }
            }
            // A cell that completes while its life is being ended has completed, and one that was asked to stop before that
            // has stopped of it. One that the ending has interrupted has done neither.
            State::Ending(Ending {
                running: Some(running), ..
            }) if running.cell == cell => {
                if (done.ok || running.stop.is_some()) && !running.settled {
                    running.settled = true;
                    let (request, status) = (running.request, status(running.stop, &done));
                    let recovered = self.lost.take();
                    self.effects.push(Effect::Settle(
                        request,
                        Answer::Cell {
                            status,
                            done,
                            recovered,
                        },
                    ));
                }
            }
            State::Ending(_) => {}
            _ => self.broken(format!("it answered cell {cell}, which was not running")),
        }
    }

    fn copied(&mut self, id: CellId) {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Running(running) if running.cell == id && running.is_copy => {
                self.effects.push(Effect::Disarm(id));
                self.settle_all(running.interrupters, || Answer::Done);
                self.next();
            }
            other => self.state = other,
        }
    }

    fn broken(&mut self, why: String) {
        if matches!(self.state, State::Idle | State::Running(_)) {
            self.end(Cause::ProtocolError, Some(why), Polite::No(libc::SIGKILL));
        }
    }

    fn over_limit(&mut self, cause: Cause, detail: String, evidence: Vec<String>) {
        if matches!(self.state, State::Idle | State::Running(_)) {
            self.end(cause, Some(detail), Polite::No(libc::SIGKILL));
            if let State::Ending(ending) = &mut self.state {
                ending.evidence = evidence;
            }
        }
    }

    fn ended(&mut self, exit: Arc<ExitReason>) {
        let ending = match std::mem::replace(&mut self.state, State::Absent) {
            State::Idle => self.unforeseen(None),
            State::Running(running) => self.unforeseen(Some(running)),
            State::Ending(ending) => ending,
            other => {
                self.state = other;
                return;
            }
        };
        self.last_exit = Some(exit.clone());
        let interrupters = ending
            .running
            .as_ref()
            .map(|running| running.interrupters.clone())
            .unwrap_or_default();
        if let Some(running) = &ending.running {
            self.effects.push(Effect::Disarm(running.cell));
            if !running.settled {
                self.fail_with(
                    running.request,
                    FailureCode::KernelDied,
                    Some(exit.clone()),
                    Why::DiedRunning,
                );
            }
        }
        for request in &ending.victims {
            self.fail_with(*request, FailureCode::KernelDied, Some(exit.clone()), Why::DiedQueued);
        }
        let so_far = self.lost.as_ref().map_or(0, |lost| lost.lost_cells);
        self.lost = Some(Recovered {
            exit: exit.clone(),
            state: RecoveredState::Fresh,
            lost_cells: so_far + self.cells_of_life,
        });
        self.cells_of_life = 0;
        self.effects.push(Effect::Exited(exit));
        self.settle_all(interrupters, || Answer::Done);
        self.after_end(ending);
    }

    /// The end of a life that nobody here asked for.
    fn unforeseen(&mut self, running: Option<Running>) -> Ending {
        let victims = self.queue.drain(..).map(|queued| queued.request).collect();
        Ending {
            running,
            victims,
            ..Ending::new(Cause::Unknown, None)
        }
    }

    fn elapsed(&mut self, timer: Timer) {
        match (timer, &mut self.state) {
            (Timer::Limit(cell), State::Running(running)) if running.cell == cell && !running.settled => {
                self.ask_to_stop(Stop::Timeout);
            }
            (Timer::Grace(cell), State::Running(running)) if running.cell == cell && !running.settled => {
                if running.asked < 2 {
                    running.asked += 1;
                    self.effects.push(Effect::Interrupt(cell));
                    self.effects
                        .push(Effect::Arm(Timer::Grace(cell), self.policy.interrupt_grace));
                } else {
                    self.stuck();
                }
            }
            (Timer::End(generation), State::Ending(_)) if generation == self.generation => {
                self.effects.push(Effect::Signal(libc::SIGKILL));
            }
            (Timer::Wait(request), State::Running(running)) if running.settled => {
                if let Some(place) = self.queue.iter().position(|queued| queued.request == request) {
                    self.queue.remove(place);
                    self.fail(request, FailureCode::KernelBusy, Why::Busy);
                }
            }
            _ => {}
        }
    }

    fn ask_to_stop(&mut self, stop: Stop) {
        let State::Running(running) = &mut self.state else {
            return;
        };
        running.stop.get_or_insert(stop);
        self.effects.push(Effect::Interrupt(running.cell));
        if running.asked == 0 {
            running.asked = 1;
            self.effects
                .push(Effect::Arm(Timer::Grace(running.cell), self.policy.interrupt_grace));
        }
    }

    /// The running cell has not heeded two interrupts.
    fn stuck(&mut self) {
        let State::Running(running) = &mut self.state else {
            return;
        };
        let stop = running.stop;
        // A life that cannot even copy itself is of no use to the next call.
        let stuck = if running.is_copy { Stuck::End } else { self.policy.stuck };
        match stuck {
            Stuck::End => {
                let (cause, asked) = match stop {
                    Some(Stop::Timeout) => (Cause::Timeout, "its time limit"),
                    Some(Stop::Abort) => (Cause::Kill, "its abort"),
                    _ => (Cause::Kill, "interrupt()"),
                };
                let detail = format!("a cell went on after {asked} and two interrupts (stuck: 'end')");
                self.end(cause, Some(detail), Polite::No(libc::SIGKILL));
            }
            Stuck::Wait => {
                running.settled = true;
                let interrupters = std::mem::take(&mut running.interrupters);
                let (request, recovered) = (running.request, self.lost.take());
                let status = if stop == Some(Stop::Timeout) {
                    CellStatus::TimedOut
                } else {
                    CellStatus::Interrupted
                };
                let answer = Answer::Cell {
                    status,
                    done: Done::default(),
                    recovered,
                };
                self.effects.push(Effect::Settle(request, answer));
                self.settle_all(interrupters, || Answer::Done);
                for queued in &self.queue {
                    if let Some(limit) = queued.timeout() {
                        self.effects.push(Effect::Arm(Timer::Wait(queued.request), limit));
                    }
                }
            }
        }
    }

    fn launch(&mut self, callers: Vec<RequestId>) {
        self.generation += 1;
        let pause = match self.failed_starts.checked_sub(QUICK_STARTS) {
            Some(more) => FIRST_PAUSE.saturating_mul(1 << more.min(16)).min(LONGEST_PAUSE),
            None => Duration::ZERO,
        };
        self.state = State::Starting { callers };
        let usual = if self.policy.recovery == Recovery::Checkpoint && self.had_life {
            Origin::Newest
        } else {
            Origin::Fresh
        };
        self.effects.push(Effect::Launch {
            generation: self.generation,
            pause,
            origin: self.origin.take().unwrap_or(usual),
        });
    }

    fn cancel_launch(&mut self, cause: Cause, detail: &str) {
        let State::Starting { callers } = std::mem::replace(&mut self.state, State::Absent) else {
            return;
        };
        let victims = callers
            .into_iter()
            .chain(self.queue.drain(..).map(|queued| queued.request))
            .collect();
        self.state = State::Ending(Ending {
            victims,
            ..Ending::new(cause, Some(detail.to_owned()))
        });
        self.effects.push(Effect::CancelLaunch(cause));
    }

    /// Begins the end of a life that is there.
    fn end(&mut self, cause: Cause, detail: Option<String>, polite: Polite) {
        let running = match std::mem::replace(&mut self.state, State::Absent) {
            State::Running(running) => Some(running),
            State::Idle => None,
            other => {
                self.state = other;
                return;
            }
        };
        match polite {
            Polite::For(grace) => {
                self.effects
                    .extend(running.as_ref().map(|running| Effect::Interrupt(running.cell)));
                self.effects.push(Effect::ShutDown);
                self.arm_end(grace);
            }
            Polite::No(signal) => self.effects.push(Effect::Signal(signal)),
        }
        let victims = self.queue.drain(..).map(|queued| queued.request).collect();
        self.state = State::Ending(Ending {
            running,
            victims,
            ..Ending::new(cause, detail)
        });
    }

    fn arm_end(&mut self, grace: Duration) {
        self.effects.push(Effect::Arm(Timer::End(self.generation), grace));
    }

    fn killer(&mut self, request: RequestId) {
        if let State::Ending(ending) = &mut self.state {
            ending.killers.push(request);
        }
    }

    /// The life is gone and told: what comes after it.
    fn after_end(&mut self, ending: Ending) {
        for request in ending.killers {
            match &self.last_exit {
                Some(exit) => self.effects.push(Effect::Settle(request, Answer::Exit(exit.clone()))),
                None => self.fail(request, FailureCode::KernelAbsent, Why::NeverStarted),
            }
        }
        if !ending.closers.is_empty() {
            self.state = State::Closed;
            self.settle_all(ending.closers, || Answer::Done);
            return;
        }
        if ending.callers.is_empty() && self.must_be_started() {
            for queued in std::mem::take(&mut self.queue) {
                self.fail(queued.request, FailureCode::KernelAbsent, Why::Absent);
            }
        }
        if !ending.callers.is_empty() || !self.queue.is_empty() {
            self.launch(ending.callers);
        }
    }

    fn must_be_started(&self) -> bool {
        self.policy.recovery == Recovery::None && self.had_life
    }

    fn next(&mut self) {
        if let Some(queued) = self.queue.pop_front() {
            self.send(queued);
        }
    }

    fn send(&mut self, queued: Queued) {
        self.last_cell += 1;
        let (cell, request) = (self.last_cell, queued.request);
        let limit = queued.timeout();
        self.state = State::Running(Running {
            cell,
            request,
            stop: None,
            asked: 0,
            interrupters: Vec::new(),
            settled: false,
            is_copy: matches!(queued.work, Work::Copy(_)),
        });
        self.effects.push(match queued.work {
            Work::Cell(code) => {
                self.cells_of_life += 1;
                Effect::Send { cell, request, code }
            }
            Work::Copy(purpose) => Effect::Copy {
                id: cell,
                request,
                purpose,
            },
        });
        self.effects
            .extend(limit.map(|limit| Effect::Arm(Timer::Limit(cell), limit)));
    }

    fn settle_all(&mut self, requests: Vec<RequestId>, answer: impl Fn() -> Answer) {
        self.effects
            .extend(requests.into_iter().map(|request| Effect::Settle(request, answer())));
    }

    fn fail(&mut self, request: RequestId, code: FailureCode, why: Why) {
        let exit = if matches!(why, Why::Absent) {
            self.last_exit.clone()
        } else {
            None
        };
        self.fail_with(request, code, exit, why);
    }

    fn fail_with(&mut self, request: RequestId, code: FailureCode, exit: Option<Arc<ExitReason>>, why: Why) {
        self.effects
            .push(Effect::Settle(request, Answer::Failed { code, exit, why }));
    }
}

/// How a life is asked to end.
#[derive(Debug, Clone, Copy)]
enum Polite {
    /// By a shutdown frame, with this much time before SIGKILL.
    For(Duration),
    /// By a signal.
    No(i32),
}

impl Ending {
    fn new(cause: Cause, detail: Option<String>) -> Self {
        Self {
            cause,
            detail,
            evidence: Vec::new(),
            running: None,
            victims: Vec::new(),
            killers: Vec::new(),
            closers: Vec::new(),
            callers: Vec::new(),
        }
    }
}

/// A cell's status: once its time is up it has timed out, whatever it still did; one that was asked to stop has been
/// interrupted only if it failed of that.
fn status(stop: Option<Stop>, done: &Done) -> CellStatus {
    match stop {
        Some(Stop::Timeout) => CellStatus::TimedOut,
        _ if done.ok => CellStatus::Ok,
        Some(_) if done.interrupted => CellStatus::Interrupted,
        _ => CellStatus::Error,
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
