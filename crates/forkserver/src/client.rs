//! One running template: the task that talks to it, and the handles to it and to what it forks.
//!
//! The task owns the control socket, the pidfd and every pending request. A handle posts messages to it. The template is
//! ended when no handle and no forked life is left, or when it is told to shut down.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kernelhost_process::exit_reason::{Cause, ExitReason, ExitStatus, Telling};
use kernelhost_process::lifeline::{self, Lifeline};
use kernelhost_process::pidfd::Pidfd;
use kernelhost_process::reap;
use kernelhost_process::spawn::{Program, SpawnError, spawn};
use kernelhost_process::stderr_tail::{StderrTail, crash_traceback};
use kernelhost_process::terminate::kill_group;
use kernelhost_process::usage::ResourceUsage;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::frame::{Frame, FrameError};
use crate::profile::Profile;
use crate::protocol::{
    Ended, ForkFailed, Forked, PROTOCOL, Prepare, Released, Shell, StartFailure, TemplateReady, kind, parse, payload,
};
use crate::socket::{FrameSocket, Receives, SocketError};

/// How long a template may take to end after its control socket was closed, before it is killed: it has only to kill its
/// kernels and leave.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

/// What a template said of itself when it was ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateFacts {
    pub pid: i32,
    pub python: String,
    pub python_version: String,
    pub preloaded: Vec<String>,
    pub ready: Duration,
}

/// Why there is no template.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TemplateError {
    #[error("{0}")]
    Spawn(Arc<SpawnError>),
    #[error("the template's wires could not be made: {0}")]
    Wires(Arc<io::Error>),
    #[error("{}", .0.message)]
    Ended(Box<ExitReason>),
    #[error("the template was not ready within {limit_ms} ms{}", said(.stderr_tail))]
    TimedOut { limit_ms: u128, stderr_tail: String },
    #[error("{0}")]
    Failed(StartFailure),
    #[error("a fork would be unsound: {0}")]
    CannotFork(String),
    #[error("the template broke the wire format: {0}")]
    Frame(#[from] FrameError),
    #[error("{0} templates are in use already, for other start-up environments")]
    TooMany(usize),
    #[error("nobody waited for it any more")]
    Cancelled,
    #[error("the host is closed")]
    Closed,
}

fn said(tail: &str) -> String {
    if tail.is_empty() {
        String::new()
    } else {
        format!("; it printed \"{}\"", tail.trim())
    }
}

/// Why a fork did not come about.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ForkError {
    #[error("the template did not answer within {0} ms")]
    TimedOut(u128),
    #[error("the template ended meanwhile")]
    TemplateGone,
    #[error("fork failed with {}: {}", .0.code, .0.message)]
    Refused(ForkFailed),
    #[error("the forked process could not be opened: {0}")]
    Pidfd(Arc<io::Error>),
}

/// What the template knows of a life's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifeEnd {
    NotReported,
    Reported(ExitStatus),
    /// The template ended first; nobody will report.
    TemplateGone,
}

/// A handle to a running template.
#[derive(Debug)]
pub struct Template {
    pub facts: TemplateFacts,
    commands: mpsc::UnboundedSender<Command>,
    exit: watch::Receiver<Option<Arc<ExitReason>>>,
    sources: Vec<(String, Option<SystemTime>)>,
}

/// A template's end, seen from afar: does not keep it alive.
#[derive(Debug, Clone)]
pub struct Remote {
    commands: mpsc::WeakUnboundedSender<Command>,
    exit: watch::Receiver<Option<Arc<ExitReason>>>,
}

/// A life that a template forked. Dropping it without [`ForkedLife::release`] makes the template end the process.
#[derive(Debug)]
pub struct ForkedLife {
    fork: u64,
    end: watch::Receiver<LifeEnd>,
    commands: mpsc::UnboundedSender<Command>,
    released: bool,
}

#[derive(Debug)]
enum Command {
    Fork {
        configuration: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
        reply: ForkReply,
    },
    Release {
        fork: u64,
        reply: oneshot::Sender<ResourceUsage>,
    },
    Abandon {
        fork: u64,
    },
    Shutdown,
}

type ForkReply = oneshot::Sender<Result<(Pidfd, ForkedLife), ForkError>>;

impl Template {
    /// Starts a template and waits until it is ready, or until `cancelled` resolves. `on_end` is called with its end before anybody can see it ended.
    pub async fn start(
        profile: &Profile,
        environment: &[(String, String)],
        boot: &str,
        deadline: Instant,
        cancelled: impl Future<Output = ()>,
        on_end: impl FnOnce(TemplateFacts, Arc<ExitReason>) + Send + 'static,
    ) -> Result<Self, TemplateError> {
        let began = Instant::now();
        let mut process = TemplateProcess::spawn(profile, environment, boot)?;
        let prepare = Prepare {
            protocol: PROTOCOL,
            shell: profile.shell,
            preload: &profile.preload,
        };
        // A template that is already gone is told by its end, below.
        process
            .control
            .send(kind::PREPARE, 0, &payload(&prepare), Vec::new())
            .ok();
        let answer = tokio::select! {
            answer = timeout_at(deadline, process.handshake()) => Some(answer),
            () = cancelled => None,
        };
        let Some(answer) = answer else {
            process.kill();
            process.kill_and_reap().await;
            return Err(TemplateError::Cancelled);
        };
        let ready = match answer {
            Ok(Ok(ready)) => ready,
            Ok(Err(Refusal::Says(error))) => {
                process.kill_and_reap().await;
                return Err(error);
            }
            Ok(Err(Refusal::Ended)) => {
                let status = process.kill_and_reap().await;
                let reason = process.exit_reason(status, Some(Cause::StartFailed), began);
                return Err(TemplateError::Ended(Box::new(reason)));
            }
            Err(_) => {
                process.kill();
                process.kill_and_reap().await;
                let limit_ms = (deadline - began).as_millis();
                return Err(TemplateError::TimedOut {
                    limit_ms,
                    stderr_tail: process.tail.text(),
                });
            }
        };
        if let Some(why) = ready.cannot_fork {
            process.kill_and_reap().await;
            return Err(TemplateError::CannotFork(why));
        }
        let facts = TemplateFacts {
            pid: process.pidfd.get_ref().pid(),
            python: ready.python,
            python_version: ready.python_version,
            preloaded: ready.preloaded,
            ready: began.elapsed(),
        };
        let sources = ready
            .sources
            .into_iter()
            .map(|path| (modified(&path), path))
            .map(|(at, path)| (path, at))
            .collect();
        let (commands, inbox) = mpsc::unbounded_channel();
        let (exit_sender, exit) = watch::channel(None);
        let task = Task {
            process,
            inbox,
            commands: commands.downgrade(),
            pending: HashMap::new(),
            lives: HashMap::new(),
            releasing: HashMap::new(),
            forks: 0,
            began,
        };
        let ended = facts.clone();
        tokio::spawn(async move {
            let reason = Arc::new(task.run().await);
            on_end(ended, reason.clone());
            exit_sender.send_replace(Some(reason));
        });
        Ok(Self {
            facts,
            commands,
            exit,
            sources,
        })
    }

    /// Forks a life with these wires: stdout, stderr, requests, calls, interrupts, lifeline.
    pub async fn fork(
        &self,
        configuration: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(Pidfd, ForkedLife), ForkError> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Fork {
                configuration,
                descriptors,
                deadline,
                reply,
            })
            .map_err(|_| ForkError::TemplateGone)?;
        answer.await.map_err(|_| ForkError::TemplateGone)?
    }

    pub fn has_ended(&self) -> bool {
        self.exit.borrow().is_some() || self.commands.is_closed()
    }

    /// What is left to do with a template that is no longer asked to fork.
    pub fn remote(&self) -> Remote {
        Remote {
            commands: self.commands.downgrade(),
            exit: self.exit.clone(),
        }
    }

    /// Whether what it was started from has changed since.
    pub fn is_stale(&self) -> bool {
        self.sources.iter().any(|(path, at)| modified(path) != *at)
    }
}

impl Remote {
    /// Ends the template and with it every life it has forked.
    pub fn shut_down(&self) {
        if let Some(commands) = self.commands.upgrade() {
            commands.send(Command::Shutdown).ok();
        }
    }

    pub fn has_ended(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Resolves when the template has ended.
    pub async fn ended(mut self) {
        self.exit.wait_for(Option::is_some).await.ok();
    }
}

fn modified(path: &str) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

impl ForkedLife {
    /// What the template reports of the end; waits for the report until the deadline.
    pub async fn end(&mut self, deadline: Instant) -> LifeEnd {
        let reported = self.end.wait_for(|end| *end != LifeEnd::NotReported);
        match timeout_at(deadline, reported).await {
            Ok(Ok(end)) => end.clone(),
            Ok(Err(_)) => LifeEnd::TemplateGone,
            Err(_) => LifeEnd::NotReported,
        }
    }

    /// Whether the template still holds the pid, so that it cannot be reused.
    pub fn holds_pid(&self) -> bool {
        *self.end.borrow() != LifeEnd::TemplateGone && !self.commands.is_closed()
    }

    /// Says that nobody will use the pid any more. `None`: the template did not answer in time, or is gone.
    pub async fn release(mut self, deadline: Instant) -> Option<ResourceUsage> {
        self.released = true;
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Release { fork: self.fork, reply }).ok()?;
        timeout_at(deadline, answer).await.ok()?.ok()
    }
}

impl Drop for ForkedLife {
    fn drop(&mut self) {
        if !self.released {
            self.commands.send(Command::Abandon { fork: self.fork }).ok();
        }
    }
}

/// The process and its wires.
struct TemplateProcess {
    subject: String,
    pidfd: AsyncFd<Pidfd>,
    control: FrameSocket,
    outputs: [Option<pipe::Receiver>; 2],
    tail: StderrTail,
    _lifeline: Lifeline,
}

enum Refusal {
    Says(TemplateError),
    Ended,
}

enum ProcessEvent {
    Frame(Result<Option<Frame>, SocketError>),
    Ended,
}

impl TemplateProcess {
    fn spawn(profile: &Profile, environment: &[(String, String)], boot: &str) -> Result<Self, TemplateError> {
        let wires = |error: io::Error| TemplateError::Wires(Arc::new(error));
        let null = File::open("/dev/null").map_err(wires)?;
        let (control, their_control) = FrameSocket::pair(Receives::Descriptors).map_err(wires)?;
        let (stdout, their_stdout) = output_pipe().map_err(wires)?;
        let (stderr, their_stderr) = output_pipe().map_err(wires)?;
        let (lifeline, their_lifeline) = lifeline::lifeline().map_err(wires)?;
        let pidfd = spawn(&Program {
            path: &profile.interpreter,
            arguments: &[boot, "template"],
            environment,
            descriptors: &[
                null.as_fd(),
                their_stdout.as_fd(),
                their_stderr.as_fd(),
                their_control.as_fd(),
                their_lifeline.as_fd(),
            ],
        })
        .map_err(|error| TemplateError::Spawn(Arc::new(error)))?;
        // A child that has ended already cannot be armed, and need not be.
        lifeline::arm(their_lifeline.as_fd(), pidfd.pid()).ok();
        Ok(Self {
            subject: format!("template of {}", profile.interpreter),
            pidfd: pidfd.watched().map_err(wires)?,
            control,
            outputs: [Some(stdout), Some(stderr)],
            tail: StderrTail::default(),
            _lifeline: lifeline,
        })
    }

    /// The next frame or the end, whichever comes first; reads what the process prints meanwhile.
    async fn event(&mut self) -> ProcessEvent {
        let [stdout, stderr] = &mut self.outputs;
        loop {
            tokio::select! {
                biased;
                frame = self.control.receive() => return ProcessEvent::Frame(frame),
                _ = self.pidfd.readable() => return ProcessEvent::Ended,
                text = read_some(stdout) => self.tail.push(&text),
                text = read_some(stderr) => self.tail.push(&text),
            }
        }
    }

    async fn handshake(&mut self) -> Result<TemplateReady, Refusal> {
        match self.event().await {
            ProcessEvent::Frame(Ok(Some(frame))) => match frame.kind {
                kind::TEMPLATE_READY => {
                    let ready: TemplateReady = parse(&frame).map_err(|error| Refusal::Says(error.into()))?;
                    if ready.protocol != PROTOCOL {
                        let why = format!("it speaks version {} of the protocol, not {PROTOCOL}", ready.protocol);
                        return Err(Refusal::Says(FrameError::Payload { kind: frame.kind, why }.into()));
                    }
                    Ok(ready)
                }
                kind::TEMPLATE_FAILED => Err(Refusal::Says(
                    parse::<StartFailure>(&frame).map_or_else(TemplateError::from, TemplateError::Failed),
                )),
                other => Err(Refusal::Says(FrameError::UnknownKind(other).into())),
            },
            ProcessEvent::Frame(Ok(None) | Err(SocketError::Io(_))) | ProcessEvent::Ended => Err(Refusal::Ended),
            ProcessEvent::Frame(Err(SocketError::Frame(error))) => Err(Refusal::Says(error.into())),
        }
    }

    fn kill(&self) {
        kill_group(self.pidfd.get_ref(), true).ok();
    }

    /// Makes sure that the process is gone, and reaps it. One that is about to end by itself is given a moment, so that its own
    /// status is told and not our kill.
    async fn kill_and_reap(&mut self) -> ExitStatus {
        const ENDS_BY_ITSELF: Duration = Duration::from_millis(200);
        if timeout_at(Instant::now() + ENDS_BY_ITSELF, self.pidfd.readable())
            .await
            .is_err()
        {
            self.kill();
            self.pidfd.readable().await.ok();
        }
        self.reap()
    }

    fn reap(&mut self) -> ExitStatus {
        let status = match reap::peek(self.pidfd.get_ref()) {
            Ok(Some(status)) => status,
            Ok(None) => ExitStatus::Unknown {
                why: "it had not ended when it was looked at".to_owned(),
            },
            Err(error) => ExitStatus::Unknown {
                why: format!("waiting for it failed: {error}"),
            },
        };
        self.kill();
        for output in self.outputs.iter().flatten() {
            // What was printed before the end is in the pipe; a descendant that holds it open must not hold us up.
            let mut bytes = [0; 8192];
            while let Ok(count @ 1..) = rustix::io::read(output, &mut bytes) {
                self.tail.push(&bytes[..count]);
            }
        }
        reap::reap(self.pidfd.get_ref(), 0).ok();
        status
    }

    fn exit_reason(&self, status: ExitStatus, cause: Option<Cause>, began: Instant) -> ExitReason {
        let stderr_tail = self.tail.text();
        let next = match cause {
            Some(Cause::StartFailed) if !stderr_tail.is_empty() => format!("It printed \"{}\".", stderr_tail.trim()),
            Some(_) => String::new(),
            None => "Its kernels go on; the next start warms a new template.".to_owned(),
        };
        let reason = ExitReason {
            cause: cause.unwrap_or_else(|| Cause::of_its_own(&status)),
            status,
            evidence: Vec::new(),
            pid: self.pidfd.get_ref().pid(),
            generation: 0,
            uptime: began.elapsed(),
            usage: None,
            crash_traceback: crash_traceback(&stderr_tail),
            stderr_tail,
            cell: None,
            message: String::new(),
        };
        reason.told(&Telling {
            subject: &self.subject,
            detail: None,
            next: &next,
        })
    }
}

/// A pipe for what a child prints: our end does not block.
pub fn output_pipe() -> io::Result<(pipe::Receiver, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((pipe::Receiver::from_owned_fd(read)?, write))
}

/// Reads once. Forgets the pipe at its end of file. Never ready without a pipe.
async fn read_some(output: &mut Option<pipe::Receiver>) -> Vec<u8> {
    let Some(pipe) = output else {
        return std::future::pending().await;
    };
    let mut bytes = vec![0; 8192];
    let result = match pipe.readable().await {
        Ok(()) => pipe.try_read(&mut bytes),
        Err(error) => Err(error),
    };
    match result {
        Ok(count @ 1..) => {
            bytes.truncate(count);
            bytes
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Vec::new(),
        Ok(_) | Err(_) => {
            *output = None;
            Vec::new()
        }
    }
}

struct Task {
    process: TemplateProcess,
    inbox: mpsc::UnboundedReceiver<Command>,
    /// For the lives it hands out; weak, so that the task itself does not keep the template alive.
    commands: mpsc::WeakUnboundedSender<Command>,
    pending: HashMap<u64, (Instant, Instant, ForkReply)>,
    lives: HashMap<u64, watch::Sender<LifeEnd>>,
    releasing: HashMap<u64, oneshot::Sender<ResourceUsage>>,
    forks: u64,
    began: Instant,
}

impl Task {
    async fn run(mut self) -> ExitReason {
        let cause = loop {
            let overdue = self.pending.values().map(|(_, deadline, _)| *deadline).min();
            tokio::select! {
                biased;
                command = self.inbox.recv() => match command {
                    Some(Command::Shutdown) | None => break Some(Cause::Close),
                    Some(command) => self.obey(command),
                },
                event = self.process.event() => match event {
                    ProcessEvent::Frame(Ok(Some(frame))) => {
                        if let Err(error) = self.hear(&frame) {
                            tracing::warn!(%error, "a template broke the wire format");
                            break Some(Cause::ProtocolError);
                        }
                    }
                    ProcessEvent::Frame(Ok(None) | Err(SocketError::Io(_))) | ProcessEvent::Ended => break None,
                    ProcessEvent::Frame(Err(SocketError::Frame(_))) => break Some(Cause::ProtocolError),
                },
                () = sleep_until(overdue.unwrap_or_else(Instant::now)), if overdue.is_some() => self.give_up_overdue(),
            }
        };
        // Whoever waits is told now, before the template itself has quite ended.
        let Self {
            mut process,
            inbox,
            pending,
            lives,
            releasing,
            began,
            ..
        } = self;
        drop(inbox);
        for (_, (_, _, reply)) in pending {
            reply.send(Err(ForkError::TemplateGone)).ok();
        }
        for end in lives.values() {
            end.send_if_modified(|end| {
                let unreported = *end == LifeEnd::NotReported;
                if unreported {
                    *end = LifeEnd::TemplateGone;
                }
                unreported
            });
        }
        drop(releasing);
        let status = if cause == Some(Cause::Close) {
            process.close(SHUTDOWN_GRACE).await
        } else {
            process.kill_and_reap().await
        };
        process.exit_reason(status, cause, began)
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Fork {
                configuration,
                descriptors,
                deadline,
                reply,
            } => {
                self.forks += 1;
                self.pending.insert(self.forks, (Instant::now(), deadline, reply));
                // A template that is gone is told by the end of file.
                self.process
                    .control
                    .send(kind::FORK, self.forks, &configuration, descriptors)
                    .ok();
            }
            Command::Release { fork, reply } => {
                self.releasing.insert(fork, reply);
                self.lives.remove(&fork);
                self.process.control.send(kind::RELEASE, fork, &[], Vec::new()).ok();
            }
            Command::Abandon { fork } => {
                self.lives.remove(&fork);
                self.process.control.send(kind::ABANDON, fork, &[], Vec::new()).ok();
            }
            Command::Shutdown => {}
        }
    }

    fn give_up_overdue(&mut self) {
        let now = Instant::now();
        let overdue: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, entry)| entry.1 <= now)
            .map(|(fork, _)| *fork)
            .collect();
        for fork in overdue {
            if let Some((asked, deadline, reply)) = self.pending.remove(&fork) {
                self.process.control.send(kind::ABANDON, fork, &[], Vec::new()).ok();
                reply
                    .send(Err(ForkError::TimedOut((deadline - asked).as_millis())))
                    .ok();
            }
        }
    }

    fn hear(&mut self, frame: &Frame) -> Result<(), FrameError> {
        match frame.kind {
            kind::FORKED => {
                let pid = parse::<Forked>(frame)?.pid;
                let received = self.process.control.take_descriptor();
                // A fork that nobody waits for has been abandoned already, and the template ends it.
                if let (Some((_, _, reply)), Some(commands)) = (self.pending.remove(&frame.id), self.commands.upgrade())
                {
                    let (end_sender, end) = watch::channel(LifeEnd::NotReported);
                    self.lives.insert(frame.id, end_sender);
                    let life = ForkedLife {
                        fork: frame.id,
                        end,
                        commands,
                        released: false,
                    };
                    let answer = match open_forked(received, pid) {
                        Ok(pidfd) => Ok((pidfd, life)),
                        Err(error) => Err(ForkError::Pidfd(Arc::new(error))),
                    };
                    // A caller that has gone drops the life here, which abandons it.
                    reply.send(answer).ok();
                }
            }
            kind::FORK_FAILED => {
                let failed = parse::<ForkFailed>(frame)?;
                if let Some((_, _, reply)) = self.pending.remove(&frame.id) {
                    reply.send(Err(ForkError::Refused(failed))).ok();
                }
            }
            kind::ENDED => {
                let why = || "neither exited nor signaled".to_owned();
                let status = parse::<Ended>(frame)?.status().ok_or_else(|| FrameError::Payload {
                    kind: frame.kind,
                    why: why(),
                })?;
                if let Some(end) = self.lives.get(&frame.id) {
                    end.send_replace(LifeEnd::Reported(status));
                }
            }
            kind::RELEASED => {
                let usage = parse::<Released>(frame)?;
                if let Some(reply) = self.releasing.remove(&frame.id) {
                    reply.send(usage.into()).ok();
                }
            }
            other => return Err(FrameError::UnknownKind(other)),
        }
        Ok(())
    }
}

impl TemplateProcess {
    /// Closes the control socket, which tells the template to end, and waits.
    async fn close(&mut self, grace: Duration) -> ExitStatus {
        if let Ok((silent, _)) = FrameSocket::pair(Receives::FramesOnly) {
            self.control = silent;
        } else {
            self.kill();
        }
        if timeout_at(Instant::now() + grace, self.pidfd.readable()).await.is_err() {
            self.kill();
            self.pidfd.readable().await.ok();
        }
        self.reap()
    }
}

/// The pidfd that came with the reply, if it is that process's; else a new one, which is safe because the template keeps the
/// pid until it is told otherwise.
fn open_forked(received: Option<OwnedFd>, pid: i32) -> io::Result<Pidfd> {
    match received.map(|fd| Pidfd::received(fd, pid)).filter(Pidfd::owns_pid) {
        Some(pidfd) => Ok(pidfd),
        None => Pidfd::open(pid),
    }
}

/// The shell names as the API spells them.
impl std::fmt::Display for Shell {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Auto => "auto",
            Self::Ipython => "ipython",
            Self::Plain => "plain",
        })
    }
}
