//! One running template: the task that talks to it, and the handles to it and to what it forks.
//!
//! The task owns the process and every pending request. A handle posts messages to it. The template is ended when no handle
//! and no forked life is left, or when it is told to shut down.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use kernelhost_process::exit_reason::{Cause, ExitReason, ExitStatus};
use kernelhost_process::pidfd::Pidfd;
use kernelhost_process::process_tree::{Adopter, Identity};
use kernelhost_process::usage::ResourceUsage;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::frame::{Frame, FrameError};
use crate::process::{ProcessEvent, Refusal, TemplateProcess};
use crate::profile::Profile;
use crate::protocol::{Adopt, Ended, ForkFailed, Forked, PROTOCOL, Prepare, Released, kind, parse, payload};
use crate::socket::SocketError;

pub use crate::process::TemplateError;

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
    brood: Arc<Brood>,
    released: bool,
}

/// The template of a life, as the one to which copies of that life come as orphans.
#[derive(Debug, Clone)]
pub struct Foster {
    commands: mpsc::UnboundedSender<Command>,
}

impl Foster {
    /// Has the template treat an orphan as a life that it has forked itself. The pid is the one that the copy has told: who it
    /// is in the end is for the caller to make sure of.
    pub async fn adopt(&self, pid: i32, deadline: Instant) -> Result<(Pidfd, ForkedLife), ForkError> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Adopt { pid, deadline, reply })
            .map_err(|_| ForkError::TemplateGone)?;
        answer.await.map_err(|_| ForkError::TemplateGone)?
    }
}

/// What a template has forked and not reaped, by fork number: what else it has as children, it has adopted.
#[derive(Debug)]
struct Brood {
    template: Option<Identity>,
    pids: Mutex<HashMap<u64, i32>>,
}

impl Brood {
    fn pids(&self) -> MutexGuard<'_, HashMap<u64, i32>> {
        // A map cannot be left half changed.
        self.pids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum Command {
    Fork {
        configuration: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
        reply: ForkReply,
    },
    Adopt {
        pid: i32,
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
    /// Waits until a template is ready, or until `cancelled` resolves. `on_end` is called with its end before anybody can see
    /// it ended.
    pub(crate) async fn start(
        mut process: TemplateProcess,
        profile: &Profile,
        deadline: Instant,
        cancelled: impl Future<Output = ()>,
        on_end: impl FnOnce(TemplateFacts, Arc<ExitReason>) + Send + 'static,
    ) -> Result<Self, TemplateError> {
        let began = Instant::now();
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
                let reason = process.account(Some(Cause::StartFailed), began).await;
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
        let brood = Arc::new(Brood {
            template: Identity::of(facts.pid),
            pids: Mutex::default(),
        });
        let task = Task {
            process,
            brood,
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

    pub fn has_reported(&self) -> bool {
        matches!(*self.end.borrow(), LifeEnd::Reported(_))
    }

    /// Whether the template still holds the pid, so that it cannot be reused.
    pub fn holds_pid(&self) -> bool {
        *self.end.borrow() != LifeEnd::TemplateGone && !self.commands.is_closed()
    }

    /// The template, as the one to which the orphans of this life come. `None` once it is gone.
    pub fn adopter(&self) -> Option<Adopter> {
        let process = self.brood.template.filter(|_| self.holds_pid())?;
        let pids = self.brood.pids();
        Some(Adopter {
            process,
            own_children: pids.values().copied().collect(),
            last_life: pids.keys().all(|fork| *fork == self.fork),
        })
    }

    /// Who takes in the copies of this life. `None` once it is gone.
    pub fn foster(&self) -> Option<Foster> {
        let commands = self.commands.clone();
        self.holds_pid().then_some(Foster { commands })
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

struct Task {
    process: TemplateProcess,
    brood: Arc<Brood>,
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
        if cause == Some(Cause::Close) {
            process.close(SHUTDOWN_GRACE).await;
        }
        process.account(cause, began).await
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
            Command::Adopt { pid, deadline, reply } => {
                self.forks += 1;
                self.pending.insert(self.forks, (Instant::now(), deadline, reply));
                let payload = payload(&Adopt { pid });
                self.process
                    .control
                    .send(kind::ADOPT, self.forks, &payload, Vec::new())
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
                // As the number of a group these would mean every process there is, or this one.
                if pid <= 1 || u32::try_from(pid) == Ok(std::process::id()) {
                    let why = format!("pid {pid} cannot be a fork");
                    return Err(FrameError::Payload { kind: frame.kind, why });
                }
                let received = self.process.control.take_descriptor();
                self.brood.pids().insert(frame.id, pid);
                // A fork that nobody waits for has been abandoned already, and the template ends it.
                if let (Some((_, _, reply)), Some(commands)) = (self.pending.remove(&frame.id), self.commands.upgrade())
                {
                    let (end_sender, end) = watch::channel(LifeEnd::NotReported);
                    self.lives.insert(frame.id, end_sender);
                    let life = ForkedLife {
                        fork: frame.id,
                        end,
                        commands,
                        brood: self.brood.clone(),
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
                self.brood.pids().remove(&frame.id);
                if let Some(reply) = self.releasing.remove(&frame.id) {
                    reply.send(usage.into()).ok();
                }
            }
            other => return Err(FrameError::UnknownKind(other)),
        }
        Ok(())
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
