//! The task that owns one kernel: it feeds the state machine with what happens, and does what the machine says.

mod copies;
mod questions;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use kernelhost_process::exit_reason::{Cause, ExitReason, ExitStatus, InterruptedCell, Telling};
use kernelhost_process::process_tree::{self, Size};
use kernelhost_process::stderr_tail::crash_traceback;
use kernelhost_process::usage;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use self::copies::{InCopy, count};
use crate::aside::aside;
use crate::calls::Calls;
use crate::caught::caught;
use crate::checkpoints::{Checkpoints, News};
use crate::event::{
    CallNumber, CellResult, CellStatus, Event, Failure, FailureCode, KernelNumber, LifeFacts, NOBODY, PublicState,
    Recovered, Reply, RequestId, Sink,
};
use crate::launch::{Launched, Launcher, Request, launch, thawed};
use crate::life::{Finished, Life, LifeEvent};
use crate::limits::{self, Judgement};
use crate::options::{CellRequest, KernelOptions, Recovery};
use crate::output::{Collected, Collector, CreditAccount, Output, Stream};
use crate::queries::Queries;
use crate::state::{Answer, Effect, Input, Machine, Origin, Policy, Timer, Verdict, Why};
use crate::tasks;
use crate::wire::{self, CellId, Done, HostCall, Message, Query};

/// What the owner of a kernel may read at any time.
#[derive(Debug)]
pub struct Shared {
    state: AtomicU8,
    pid: AtomicI32,
    generation: AtomicU32,
    pub watch_output: AtomicBool,
    pub watch_state: AtomicBool,
    pub credit: Arc<CreditAccount>,
}

impl Shared {
    pub fn new() -> Self {
        Self {
            state: AtomicU8::new(PublicState::Absent as u8),
            pid: AtomicI32::new(0),
            generation: AtomicU32::new(0),
            watch_output: AtomicBool::new(false),
            watch_state: AtomicBool::new(false),
            credit: Arc::default(),
        }
    }

    pub fn state(&self) -> PublicState {
        const STATES: [PublicState; 6] = [
            PublicState::Absent,
            PublicState::Starting,
            PublicState::Idle,
            PublicState::Running,
            PublicState::Ending,
            PublicState::Closed,
        ];
        STATES
            .into_iter()
            .find(|state| *state as u8 == self.state.load(Ordering::Acquire))
            .unwrap_or(PublicState::Closed)
    }

    pub fn pid(&self) -> Option<i32> {
        Some(self.pid.load(Ordering::Acquire)).filter(|pid| *pid > 0)
    }

    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }
}

pub enum Command {
    Input(Input),
    Usage(RequestId),
    Query(RequestId, Query),
    Rollback(RequestId, u32),
    Discard(RequestId, u32),
    /// The answer to a call into the daemon.
    Returned(CallNumber, Vec<u8>),
    /// The host closes: the sender is dropped when this kernel is closed.
    CloseForHost(Duration, oneshot::Sender<()>),
}

/// How long the end of a life may take whose task has panicked, before it is left to its lifeline.
const END_AFTER_PANIC: Duration = Duration::from_secs(10);

pub struct Session {
    number: KernelNumber,
    options: Arc<KernelOptions>,
    launcher: Arc<Launcher>,
    sink: Sink,
    shared: Arc<Shared>,
    commands: mpsc::UnboundedReceiver<Command>,
    machine: Machine,
    life: Option<(Box<Life>, LifeFacts)>,
    launching: Option<Launching>,
    timers: Vec<(Instant, Timer)>,
    cell: Option<RunningCell>,
    queries: Queries,
    calls: Calls,
    limits: Option<LimitWatch>,
    checkpoints: Checkpoints,
    news: mpsc::UnboundedReceiver<News>,
    copying: Option<InCopy>,
    /// Where the first life comes from, if another kernel makes it.
    first: Option<oneshot::Receiver<Launched>>,
    /// What doing the last effects has brought, to be applied after them.
    deferred: Vec<Input>,
    events: Vec<Event>,
    closing_host: Vec<oneshot::Sender<()>>,
}

struct Launching {
    outcome: oneshot::Receiver<Launched>,
    cancel: watch::Sender<Option<Cause>>,
}

/// The limits of the life that is there, and the look that is due or under way.
struct LimitWatch {
    watch: limits::Watch,
    next: Instant,
    look: Option<JoinHandle<Option<Size>>>,
}

/// The cell whose caller waits.
struct RunningCell {
    id: CellId,
    request: RequestId,
    code: String,
    stream: bool,
    began: Instant,
    collector: Collector,
}

impl Session {
    pub fn new(
        number: KernelNumber,
        options: KernelOptions,
        launcher: Arc<Launcher>,
        sink: Sink,
        shared: Arc<Shared>,
        commands: mpsc::UnboundedReceiver<Command>,
        first: Option<oneshot::Receiver<Launched>>,
    ) -> Self {
        let (checkpoints, news) = Checkpoints::new();
        let policy = Policy {
            stuck: options.stuck,
            recovery: options.recovery,
            interrupt_grace: options.interrupt_grace,
        };
        Self {
            number,
            options: Arc::new(options),
            launcher,
            sink,
            shared,
            commands,
            machine: Machine::new(policy),
            life: None,
            launching: None,
            timers: Vec::new(),
            cell: None,
            queries: Queries::default(),
            calls: Calls::default(),
            limits: None,
            checkpoints,
            news,
            copying: None,
            first,
            deferred: Vec::new(),
            events: Vec::new(),
            closing_host: Vec::new(),
        }
    }

    /// Runs until every handle is gone, and then ends what is left. So it does after a panic too, which it returns.
    pub async fn run(mut self) -> Result<(), String> {
        let served = caught(Box::pin(self.serve())).await;
        if served.is_ok() {
            self.end().await;
            return served;
        }
        // Whatever state the panic has left: a second one leaves the process to its lifeline, which is dropped with it.
        let ended = caught(Box::pin(timeout(END_AFTER_PANIC, self.end()))).await;
        if !matches!(ended, Ok(Ok(()))) {
            tracing::warn!(
                kernel = self.options.id,
                "the life of a kernel whose task has panicked was dropped"
            );
        }
        self.shared.pid.store(0, Ordering::Release);
        self.shared.state.store(PublicState::Closed as u8, Ordering::Release);
        served
    }

    async fn serve(&mut self) {
        loop {
            self.step_queries();
            self.flush();
            let timers = self.timers.iter().map(|(at, _)| *at);
            let next_timer = timers.chain(self.queries.next()).min();
            let room = self.shared.credit.room();
            let credit = self.shared.credit.clone();
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(command).await,
                    None => break,
                },
                event = life_event(&mut self.life, room) => self.hear(event).await,
                launched = outcome(&mut self.launching) => self.launched(launched),
                size = look(&mut self.limits) => self.looked(size),
                Some(news) = self.news.recv() => self.learn(news),
                () = sleep_until(next_timer.unwrap_or_else(Instant::now)), if next_timer.is_some() => self.ring(),
                () = credit.available(), if room == 0 => {}
            }
        }
    }

    async fn end(&mut self) {
        self.checkpoints.end_all().await;
        if let Some(launching) = self.launching.take() {
            launching.cancel.send_replace(Some(Cause::Close));
            if let Ok(Launched { result: Ok(ready), .. }) = launching.outcome.await {
                self.life = Some(ready);
            }
        }
        if let Some((mut life, _)) = self.life.take() {
            life.signal(libc::SIGKILL);
            life.wait_for_end(Duration::from_secs(5)).await;
            let finished = life.finish(Duration::ZERO).await;
            self.launcher.oom.ended(finished.pid);
        }
    }

    async fn obey(&mut self, command: Command) {
        // A life that has died and was not seen yet: its end comes first, so that this call gets a new life.
        if self.life.as_ref().is_some_and(|(life, _)| life.has_ended()) {
            self.hear_all_until_ended().await;
        }
        match command {
            Command::Input(input) => {
                self.interrupt_query(&input);
                match &input {
                    Input::Close(..) => self.checkpoints.end_all().await,
                    Input::Kill(..) => self.let_copy_finish().await,
                    _ => {}
                }
                self.apply(input);
            }
            Command::Rollback(request, to) => {
                if self.machine.public_state() == PublicState::Closed || self.checkpoints.get(to).is_some() {
                    self.apply(Input::Rollback(request, to));
                } else {
                    let message = format!(
                        "Checkpoint {to} of kernel \"{}\" is gone: it was discarded, or its process has ended. The kernel is as it was.",
                        self.options.id
                    );
                    self.fail(request, FailureCode::CheckpointGone, message);
                }
            }
            Command::Discard(request, id) => {
                if let Some(frozen) = self.checkpoints.discard(id) {
                    frozen.end().await;
                }
                let reply = Reply::Done;
                self.events.push(Event::Settled { request, reply });
            }
            Command::Query(request, query) => {
                let now = Instant::now();
                self.queries.ask(request, query, self.life_for_queries(), now);
            }
            Command::Returned(call, payload) => {
                if let (Some(id), Some((life, _))) = (self.calls.returned(call), &mut self.life) {
                    life.returned(id, &payload);
                }
            }
            Command::Usage(request) => self.usage(request),
            Command::CloseForHost(grace, closed) => {
                self.closing_host.push(closed);
                self.checkpoints.end_all().await;
                self.apply(Input::Close(NOBODY, grace));
            }
        }
    }

    async fn hear_all_until_ended(&mut self) {
        while let Some((life, _)) = &mut self.life {
            let event = life.event(usize::MAX).await;
            self.hear(event).await;
        }
    }

    async fn hear(&mut self, event: LifeEvent) {
        match event {
            LifeEvent::Text(stream, text) => self.text(stream, text),
            LifeEvent::Message(message) => self.message(message),
            LifeEvent::Call(id, call) => self.call(id, call),
            LifeEvent::CallGivenUp(id) => {
                if let Some(call) = self.calls.given_up(id) {
                    self.abort_calls([call]);
                }
            }
            LifeEvent::Broken(why) => self.apply(Input::Broken(why)),
            LifeEvent::Ended => self.ended().await,
        }
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Output(cell, output) => {
                let of_cell = self.cell.as_ref().is_some_and(|running| running.id == cell);
                if of_cell {
                    self.cell_output(output);
                } else {
                    self.background_output(output);
                }
            }
            Message::Done(cell, mut done) => {
                if self.cell.as_ref().is_some_and(|running| running.id == cell) {
                    for output in [done.value.take(), done.error.take()].into_iter().flatten() {
                        self.cell_output(output);
                    }
                }
                self.apply(Input::Done(cell, done));
            }
            Message::Exiting(cell, code) => {
                if self.cell.as_ref().is_some_and(|running| running.id == cell) {
                    self.apply(Input::Exiting(code));
                } else {
                    self.apply(Input::Broken(format!(
                        "cell {cell}, which was not running, called exit()"
                    )));
                }
            }
            Message::Answer(id, answer) => self.answered(id, answer),
            Message::Copy(id, said) => self.copy_goes_on(id, said),
            Message::Ready(_) | Message::InitBegins | Message::StartFailed(_) => {
                self.apply(Input::Broken("it said twice how it started".to_owned()));
            }
        }
    }

    fn warn(&mut self, code: &'static str, message: String) {
        let kernel = Some(self.number);
        self.events.push(Event::Warning { kernel, code, message });
    }

    fn call(&mut self, id: u64, made: HostCall) {
        let Some((life, facts)) = &mut self.life else { return };
        match self.calls.made(id, &made) {
            Ok(call) => {
                let cell = self.cell.as_ref().filter(|cell| cell.id == made.cell);
                self.events.push(Event::Call {
                    kernel: self.number,
                    call,
                    request: cell.map(|cell| cell.request),
                    generation: facts.generation,
                    made,
                });
            }
            Err(why) => life.returned(id, &wire::refusal(&why)),
        }
    }

    fn abort_calls(&mut self, calls: impl IntoIterator<Item = CallNumber>) {
        let kernel = self.number;
        let aborted = calls.into_iter().map(|call| Event::CallAborted { kernel, call });
        self.events.extend(aborted);
    }

    fn fail(&mut self, request: RequestId, code: FailureCode, message: String) {
        let reply = Reply::failed(code, message);
        self.events.push(Event::Settled { request, reply });
    }

    fn text(&mut self, stream: Stream, text: String) {
        match &mut self.cell {
            Some(cell) => {
                cell.collector.text(stream, &text);
                if cell.stream {
                    let request = cell.request;
                    self.stream(request, Output::Text { stream, text });
                }
            }
            None => self.background_output(Output::Text { stream, text }),
        }
    }

    fn cell_output(&mut self, output: Output) {
        let Some(cell) = &mut self.cell else { return };
        if cell.stream {
            cell.collector.other(output.clone());
            let request = cell.request;
            self.stream(request, output);
        } else {
            cell.collector.other(output);
        }
    }

    fn stream(&mut self, request: RequestId, output: Output) {
        let bytes = output.bytes();
        self.shared.credit.owe(bytes);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.events.push(Event::CellOutput { request, output, bytes });
    }

    fn background_output(&mut self, output: Output) {
        if self.shared.watch_output.load(Ordering::Acquire) {
            let credit = self.shared.credit.take(output.bytes());
            self.events.push(Event::Output {
                kernel: self.number,
                output,
                credit,
            });
        }
    }

    /// The next look at the limits is due (`None`), or one has seen this.
    fn looked(&mut self, size: Option<Size>) {
        let (Some(limits), Some((life, _))) = (&mut self.limits, &self.life) else {
            return;
        };
        let Some(size) = size else {
            let (root, exact_from, most) = (
                life.root_with_adopter(),
                limits.watch.exact_from(),
                limits.watch.most_processes(),
            );
            limits.look = Some(tokio::spawn(aside(move || {
                process_tree::measure(&root, exact_from, most)
            })));
            return;
        };
        limits.next = Instant::now() + limits::Watch::pause(self.cell.is_some());
        match limits.watch.judge(&size) {
            Judgement::Nothing => {}
            Judgement::Warning(what) => {
                let message = format!("Kernel \"{}\" has {what}", self.options.id);
                self.events.push(Event::Warning {
                    kernel: Some(self.number),
                    code: "WARN_MEMORY_LIMIT",
                    message,
                });
            }
            Judgement::End {
                cause,
                detail,
                evidence,
            } => self.apply(Input::OverLimit {
                cause,
                detail,
                evidence,
            }),
        }
    }

    /// What the operating system did, where the status alone would leave it open.
    async fn explain(&self, verdict: Verdict, finished: &Finished) -> Verdict {
        if !matches!(verdict.cause, Cause::ExternalSignal | Cause::Crash) {
            return verdict;
        }
        let usage = finished.usage.as_ref();
        if let Some((detail, evidence)) = limits::cpu_time_is_up(&self.options.limits, &finished.status, usage) {
            return Verdict {
                cause: Cause::CpuLimit,
                detail: Some(detail),
                evidence: vec![evidence],
            };
        }
        if !matches!(
            finished.status,
            ExitStatus::Signaled {
                number: libc::SIGKILL,
                ..
            }
        ) {
            return verdict;
        }
        let finding = self.launcher.oom.finding(finished.pid).await;
        if finding.out_of_memory {
            return Verdict {
                cause: Cause::OutOfMemory,
                detail: None,
                evidence: finding.evidence,
            };
        }
        let evidence = verdict.evidence.into_iter().chain(finding.evidence).collect();
        Verdict { evidence, ..verdict }
    }

    async fn ended(&mut self) {
        let Some((life, facts)) = self.life.take() else { return };
        self.limits = None;
        // Looked at before the last steps, which take their time.
        let cell = self.cell.as_ref().map(|cell| InterruptedCell {
            code: cell.code.clone(),
            running: cell.began.elapsed(),
        });
        let mut finished = life.finish(self.machine.grace_for_its_children()).await;
        for (stream, text) in std::mem::take(&mut finished.texts) {
            self.text(stream, text);
        }
        let verdict = self.machine.verdict(&finished.status);
        let verdict = self.explain(verdict, &finished).await;
        self.launcher.oom.ended(finished.pid);
        let exit = ExitReason {
            status: finished.status,
            cause: verdict.cause,
            evidence: verdict.evidence,
            pid: finished.pid,
            generation: facts.generation,
            uptime: finished.uptime,
            usage: finished.usage,
            crash_traceback: crash_traceback(&finished.stderr_tail),
            stderr_tail: finished.stderr_tail,
            cell,
            leftovers: finished.leftovers,
            message: String::new(),
        };
        let next = match (verdict.cause, self.options.recovery, self.checkpoints.cells()) {
            (Cause::Close, ..) => "No other life follows.".to_owned(),
            (_, Recovery::None, _) => "Its variables are lost; start() brings a new life.".to_owned(),
            _ if self.machine.rolls_back() => "The next life begins with the checkpoint.".to_owned(),
            (cause, Recovery::Checkpoint, Some(cells)) if cause != Cause::Restart => format!(
                "The next call gets a new life, with its variables as they were after {}.",
                count(cells)
            ),
            (_, Recovery::Restart | Recovery::Checkpoint, _) => {
                "Its variables are lost; the next call gets a new life.".to_owned()
            }
        };
        let subject = format!("kernel \"{}\"", self.options.id);
        let exit = exit.told(&Telling {
            subject: &subject,
            detail: verdict.detail.as_deref(),
            next: &next,
        });
        self.shared.pid.store(0, Ordering::Release);
        self.apply_ended(Arc::new(exit));
    }

    fn apply_ended(&mut self, exit: Arc<ExitReason>) {
        let generation = exit.generation;
        let timed_out = self.machine.has_timed_out();
        let partial = self.cell.take().map(|cell| {
            let status = if timed_out {
                CellStatus::TimedOut
            } else {
                CellStatus::Interrupted
            };
            let request = cell.request;
            (request, result(&cell, status, &Done::default(), generation, None))
        });
        self.copying = None;
        // What JavaScript had not taken yet of this life's output does not hold the next one up.
        self.shared.credit.forgive();
        let calls = self.calls.ended();
        self.abort_calls(calls);
        for (request, name) in self.queries.ended() {
            let message = format!(
                "{name} was not answered, because the life that was asked has ended. {}",
                exit.message
            );
            let failure = Failure {
                code: FailureCode::KernelDied,
                message,
                stderr_tail: exit.stderr_tail.clone(),
                exit: Some(exit.clone()),
                partial: None,
            };
            let reply = Reply::Failed(Box::new(failure));
            self.events.push(Event::Settled { request, reply });
        }
        let effects = self.machine.on(Input::Ended(exit));
        self.perform(effects, partial);
    }

    fn launched(&mut self, launched: Launched) {
        self.launching = None;
        // Where the cold start fails too, its own failure says all there is to say.
        if let (Some(why), Ok(_)) = (launched.fell_back, &launched.result) {
            let message = format!(
                "Kernel \"{}\" was spawned cold, which takes longer than a fork from the template: {why}",
                self.options.id
            );
            let code = "WARN_LAUNCH_FALLBACK";
            self.events.push(Event::Warning {
                kernel: Some(self.number),
                code,
                message,
            });
        }
        if !launched.failed_callbacks.is_empty() {
            let message = format!(
                "Kernel \"{}\" has its variables, but not all callbacks of kernelhost.on_restore have succeeded: {}.",
                self.options.id,
                launched.failed_callbacks.join("; ")
            );
            self.warn("WARN_ON_RESTORE", message);
        }
        if let (Some(why), Ok(_)) = (launched.lost_copy, &launched.result) {
            let message = format!(
                "Kernel \"{}\" has started without its variables, although there was a checkpoint: {why}",
                self.options.id
            );
            self.warn("WARN_CHECKPOINT_LOST", message);
        }
        match launched.result {
            Ok((life, facts)) => {
                self.shared.pid.store(facts.pid, Ordering::Release);
                self.checkpoints.life_began();
                self.limits = limits::Watch::new(&self.options.limits).map(|watch| LimitWatch {
                    watch,
                    next: Instant::now(),
                    look: None,
                });
                self.life = Some((life, facts.clone()));
                self.apply(match launched.cells {
                    Some(cells) => Input::Thawed(facts, cells),
                    None => Input::Ready(facts),
                });
            }
            Err(failed) => self.apply(Input::LaunchFailed(failed)),
        }
    }

    fn ring(&mut self) {
        let now = Instant::now();
        let (mut due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.timers)
            .into_iter()
            .partition(|(at, _)| *at <= now);
        self.timers = later;
        due.sort_by_key(|(at, _)| *at);
        for (_, timer) in due {
            self.apply(Input::Elapsed(timer));
        }
    }

    fn apply(&mut self, input: Input) {
        let effects = self.machine.on(input);
        self.perform(effects, None);
    }

    fn perform(&mut self, effects: Vec<Effect>, mut partial: Option<(RequestId, CellResult)>) {
        for effect in effects {
            match effect {
                Effect::Launch {
                    generation,
                    pause,
                    origin,
                } => self.launch(generation, pause, origin),
                Effect::CancelLaunch(cause) => {
                    if let Some(launching) = &self.launching {
                        launching.cancel.send_replace(Some(cause));
                    }
                }
                Effect::Send { cell, request, code } => self.send(cell, request, code),
                Effect::Copy { id, request, purpose } => self.copy(id, request, purpose),
                Effect::Interrupt(cell) => {
                    if let Some((life, _)) = &self.life {
                        life.interrupt(cell);
                    }
                    let calls = self.calls.of_cell(cell);
                    self.abort_calls(calls);
                }
                Effect::ShutDown => {
                    if let Some((life, _)) = &mut self.life {
                        life.shut_down();
                    }
                }
                Effect::Signal(number) => {
                    if let Some((life, _)) = &self.life {
                        life.signal(number);
                    }
                }
                Effect::Arm(timer, after) => {
                    self.timers.retain(|(_, armed)| *armed != timer);
                    self.timers.push((Instant::now() + after, timer));
                }
                Effect::Disarm(cell) => {
                    let of_cell = [Timer::Limit(cell), Timer::Grace(cell)];
                    self.timers.retain(|(_, timer)| !of_cell.contains(timer));
                }
                Effect::Started(life) => self.events.push(Event::Started {
                    kernel: self.number,
                    life,
                }),
                Effect::Exited(exit) => self.events.push(Event::Exited {
                    kernel: self.number,
                    exit,
                }),
                Effect::Settle(request, answer) => self.settle(request, answer, &mut partial),
            }
        }
        self.tell_state();
        for input in std::mem::take(&mut self.deferred) {
            self.apply(input);
        }
    }

    fn launch(&mut self, generation: u32, pause: Duration, origin: Origin) {
        self.shared.generation.store(generation, Ordering::Release);
        let (cancel, cancelled) = watch::channel(None);
        if let Some(outcome) = self.first.take() {
            self.launching = Some(Launching { outcome, cancel });
            return;
        }
        let (sender, outcome) = oneshot::channel();
        let request = Request {
            launcher: self.launcher.clone(),
            number: self.number,
            kernel: self.options.clone(),
            generation,
            pause,
            cancelled,
        };
        let (copies, must) = match origin {
            Origin::Newest => (self.checkpoints.newest(), false),
            Origin::Checkpoint(id) => (self.checkpoints.get(id).into_iter().collect(), true),
            Origin::Fresh => (Vec::new(), false),
        };
        if origin != Origin::Newest {
            self.checkpoints.forget_automatic();
        }
        tasks::spawn(async move {
            let launched = if copies.is_empty() && !must {
                launch(request).await
            } else {
                thawed(request, copies, must).await
            };
            sender.send(launched).ok();
        });
        self.launching = Some(Launching { outcome, cancel });
    }

    fn send(&mut self, id: CellId, request: RequestId, cell: CellRequest) {
        let Some((life, _)) = &mut self.life else { return };
        let cap = cell.max_output_bytes.unwrap_or(self.options.max_output_bytes);
        life.execute(id, &cell.code, cell.silent);
        let (began, collector) = (Instant::now(), Collector::new(cap));
        self.cell = Some(RunningCell {
            id,
            request,
            code: cell.code,
            stream: cell.stream,
            began,
            collector,
        });
    }

    fn settle(&mut self, request: RequestId, answer: Answer, partial: &mut Option<(RequestId, CellResult)>) {
        let reply = match answer {
            Answer::Done => Reply::Done,
            Answer::Exit(exit) => Reply::Exit(exit),
            Answer::Life => match &self.life {
                Some((_, facts)) => Reply::Life(facts.clone()),
                None => bug("a life was promised and is not there"),
            },
            Answer::Cell {
                status,
                done,
                recovered,
            } => {
                let finished = match (self.cell.take(), &self.life) {
                    (Some(cell), Some((_, facts))) => Some(result(&cell, status, &done, facts.generation, recovered)),
                    _ => None,
                };
                finished.map_or_else(|| bug("a result without its cell"), |cell| Reply::Cell(Box::new(cell)))
            }
            Answer::Failed { code, exit, why } => {
                let of_this = partial.take_if(|(of, _)| *of == request);
                let message = self.failure_message(&why, exit.as_deref());
                let stderr_tail = match &why {
                    Why::StartFailed(failed) => failed.stderr_tail.clone(),
                    _ => exit.as_ref().map(|exit| exit.stderr_tail.clone()).unwrap_or_default(),
                };
                let partial = of_this.map(|(_, partial)| partial);
                Reply::Failed(Box::new(Failure {
                    code,
                    message,
                    exit,
                    partial,
                    stderr_tail,
                }))
            }
        };
        if request != NOBODY {
            self.events.push(Event::Settled { request, reply });
        }
    }

    fn failure_message(&self, why: &Why, exit: Option<&ExitReason>) -> String {
        let id = &self.options.id;
        let told = exit.map_or("", |exit| exit.message.as_str());
        match why {
            Why::DiedRunning => told.to_owned(),
            Why::DiedQueued => {
                format!("A cell that waited for kernel \"{id}\" has not run, because its life ended. {told}")
            }
            Why::StartFailed(failed) => failed.message.clone(),
            Why::StartCancelled => format!("Kernel \"{id}\" was not started: the start was given up. {told}")
                .trim_end()
                .to_owned(),
            Why::Closed => format!("Kernel \"{id}\" is closed. Make a new one with host.kernel()."),
            Why::Absent => format!(
                "Kernel \"{id}\" has no life, and with recovery 'none' only start() brings a new one. The last one: {told}"
            ),
            Why::NeverStarted => format!("Kernel \"{id}\" has never had a life. The next call starts one."),
            Why::NothingToCopy => format!("Kernel \"{id}\" has no life that could be copied. start() brings one."),
            Why::Busy => format!(
                "Kernel \"{id}\" is busy with an earlier cell that would not stop (stuck: 'wait'); this cell has waited for its \
                 whole time limit and has not run. Call interrupt() or restart()."
            ),
            Why::Aborted => format!("The call to kernel \"{id}\" was aborted before it ran."),
        }
    }

    fn usage(&self, request: RequestId) {
        let (sink, id) = (self.sink.clone(), self.options.id.clone());
        let absent = move || {
            let message = format!("Kernel \"{id}\" has no life, so it uses nothing.");
            Reply::failed(FailureCode::KernelAbsent, message)
        };
        // Its own thread: the sizes of a large process take the Linux kernel a while to add up.
        let root = self.life.as_ref().map(|(life, _)| life.root_with_adopter());
        tasks::spawn(async move {
            let found = aside(move || root.and_then(|root| usage::live(&root).ok())).await;
            let reply = found.flatten().map_or_else(absent, Reply::Usage);
            sink(vec![Event::Settled { request, reply }]);
        });
    }

    fn tell_state(&mut self) {
        let state = self.machine.public_state();
        if self.shared.state.swap(state as u8, Ordering::AcqRel) != state as u8
            && self.shared.watch_state.load(Ordering::Acquire)
        {
            self.events.push(Event::State {
                kernel: self.number,
                state,
            });
        }
        if state == PublicState::Closed {
            self.closing_host.clear();
        }
    }

    fn flush(&mut self) {
        if !self.events.is_empty() {
            (self.sink)(std::mem::take(&mut self.events));
        }
    }
}

async fn life_event(life: &mut Option<(Box<Life>, LifeFacts)>, room: usize) -> LifeEvent {
    match life {
        Some((life, _)) => life.event(room).await,
        None => std::future::pending().await,
    }
}

async fn look(limits: &mut Option<LimitWatch>) -> Option<Size> {
    match limits {
        Some(LimitWatch { look: Some(look), .. }) => {
            let size = look.await.ok().flatten().unwrap_or_default();
            if let Some(limits) = limits {
                limits.look = None;
            }
            Some(size)
        }
        Some(limits) => {
            sleep_until(limits.next).await;
            None
        }
        None => std::future::pending().await,
    }
}

async fn outcome(launching: &mut Option<Launching>) -> Launched {
    match launching {
        Some(launching) => match (&mut launching.outcome).await {
            Ok(launched) => launched,
            // A launch always tells how it went, so this was to be a copy.
            Err(_) => Launched::without_copy(
                FailureCode::CopyRefused,
                "The kernel was not copied: it has no life, or its life ended or it was closed before its turn came."
                    .to_owned(),
            ),
        },
        None => std::future::pending().await,
    }
}

fn result(
    cell: &RunningCell,
    status: CellStatus,
    done: &Done,
    generation: u32,
    recovered: Option<Recovered>,
) -> CellResult {
    let Collected {
        stdout,
        stderr,
        missing_stdout_bytes,
        missing_stderr_bytes,
        missing_displays,
        outputs,
    } = cell.collector.collected();
    CellResult {
        status,
        stdout,
        stderr,
        missing_stdout_bytes,
        missing_stderr_bytes,
        missing_displays,
        outputs,
        execution_count: done.execution_count,
        duration: cell.began.elapsed(),
        generation,
        recovered,
    }
}

fn bug(what: &str) -> Reply {
    Reply::failed(FailureCode::Internal, format!("A bug in kernelhost: {what}."))
}
