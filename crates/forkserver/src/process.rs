//! The process of a template and its wires: started, spoken to, ended, its end told.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kernelhost_process::exit_reason::{Cause, ExitReason, ExitStatus, Telling};
use kernelhost_process::lifeline::{self, Lifeline};
use kernelhost_process::out_of_memory::Witness;
use kernelhost_process::pidfd::Pidfd;
use kernelhost_process::process_tree::Leftovers;
use kernelhost_process::reap;
use kernelhost_process::spawn::{Program, SpawnError, exhausted, spawn};
use kernelhost_process::stderr_tail::{StderrTail, crash_traceback};
use kernelhost_process::terminate::kill_group;
use kernelhost_process::usage::{ResourceUsage, own_peak};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::time::{Instant, timeout_at};

use crate::frame::{Frame, FrameError};
use crate::profile::Profile;
use crate::protocol::{PROTOCOL, StartFailure, TemplateReady, kind, parse};
use crate::socket::{FrameSocket, Receives, SocketError};

/// Why there is no template.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TemplateError {
    #[error("{0}")]
    Spawn(Arc<SpawnError>),
    #[error("the template's wires could not be made: {}", exhausted(.0).map_or_else(|| .0.to_string(), str::to_owned))]
    Wires(Arc<io::Error>),
    #[error("{}", .0.message)]
    Ended(Box<ExitReason>),
    #[error("the template was not ready within {limit_ms} ms{}", said(.stderr_tail))]
    TimedOut { limit_ms: u128, stderr_tail: String },
    #[error("{0}")]
    Failed(StartFailure),
    #[error("a fork would be unsound: {0}")]
    CannotFork(String),
    #[error("{0} (it is tried again later)")]
    Unsound(String),
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

/// The process and its wires.
pub(crate) struct TemplateProcess {
    subject: String,
    pub(crate) pidfd: AsyncFd<Pidfd>,
    pub(crate) control: FrameSocket,
    outputs: [Option<pipe::Receiver>; 2],
    pub(crate) tail: StderrTail,
    witness: Arc<dyn Witness>,
    /// Of this process, when it spawned the template.
    inherited_peak: u64,
    _lifeline: Lifeline,
}

pub(crate) enum Refusal {
    Says(TemplateError),
    Ended,
}

pub(crate) enum ProcessEvent {
    Frame(Result<Option<Frame>, SocketError>),
    Ended,
}

impl TemplateProcess {
    pub(crate) fn spawn(
        profile: &Profile,
        environment: &[(String, String)],
        boot: &str,
        witness: Arc<dyn Witness>,
    ) -> Result<Self, TemplateError> {
        let wires = |error: io::Error| TemplateError::Wires(Arc::new(error));
        let null = File::open("/dev/null").map_err(wires)?;
        let (control, their_control) = FrameSocket::pair(Receives::Descriptors).map_err(wires)?;
        let (stdout, their_stdout) = output_pipe().map_err(wires)?;
        let (stderr, their_stderr) = output_pipe().map_err(wires)?;
        let (lifeline, their_lifeline) = lifeline::lifeline().map_err(wires)?;
        let inherited_peak = own_peak();
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
        let pidfd = pidfd.watched().map_err(wires)?;
        witness.clone().began(pidfd.get_ref().pid());
        Ok(Self {
            subject: format!("template of {}", profile.interpreter),
            pidfd,
            control,
            outputs: [Some(stdout), Some(stderr)],
            tail: StderrTail::default(),
            witness,
            inherited_peak,
            _lifeline: lifeline,
        })
    }

    /// The next frame or the end, whichever comes first; reads what the process prints meanwhile.
    pub(crate) async fn event(&mut self) -> ProcessEvent {
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

    pub(crate) async fn handshake(&mut self) -> Result<TemplateReady, Refusal> {
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

    pub(crate) fn kill(&self) {
        kill_group(self.pidfd.get_ref(), true).ok();
    }

    pub(crate) async fn kill_and_reap(&mut self) {
        self.gone().await;
        self.reap();
    }

    /// Returns when the process is gone. One that is about to end by itself is given a moment, so that its own status is told
    /// and not our kill.
    async fn gone(&self) {
        const ENDS_BY_ITSELF: Duration = Duration::from_millis(200);
        self.gone_within(ENDS_BY_ITSELF).await;
    }

    async fn gone_within(&self, grace: Duration) {
        if timeout_at(Instant::now() + grace, self.pidfd.readable()).await.is_err() {
            self.kill();
            self.pidfd.readable().await.ok();
        }
    }

    fn status(&self) -> ExitStatus {
        match reap::peek(self.pidfd.get_ref()) {
            Ok(Some(status)) => status,
            Ok(None) => ExitStatus::Unknown {
                why: "it had not ended when it was looked at".to_owned(),
            },
            Err(error) => ExitStatus::Unknown {
                why: format!("waiting for it failed: {error}"),
            },
        }
    }

    fn reap(&mut self) -> Option<ResourceUsage> {
        self.kill();
        for output in self.outputs.iter().flatten() {
            // What was printed before the end is in the pipe; a descendant that holds it open must not hold us up.
            let mut bytes = [0; 8192];
            while let Ok(count @ 1..) = rustix::io::read(output, &mut bytes) {
                self.tail.push(&bytes[..count]);
            }
        }
        self.witness.ended(self.pidfd.get_ref().pid());
        reap::reap(self.pidfd.get_ref(), self.inherited_peak).ok().flatten()
    }

    /// Makes sure that the process is gone, reaps it, and says how and why it ended: for `cause`, or, where that is `None`,
    /// nobody here has asked for it.
    pub(crate) async fn account(&mut self, cause: Option<Cause>, began: Instant) -> ExitReason {
        self.gone().await;
        let (status, uptime, pid) = (self.status(), began.elapsed(), self.pidfd.get_ref().pid());
        let killed = matches!(
            status,
            ExitStatus::Signaled {
                number: libc::SIGKILL,
                ..
            }
        );
        let finding = if killed && matches!(cause, None | Some(Cause::StartFailed)) {
            Some(self.witness.finding(pid).await)
        } else {
            None
        };
        let usage = self.reap();
        let stderr_tail = self.tail.text();
        let (out_of_memory, evidence) =
            finding.map_or((false, Vec::new()), |found| (found.out_of_memory, found.evidence));
        let next = match cause {
            Some(Cause::StartFailed) if !stderr_tail.is_empty() => format!("It printed \"{}\".", stderr_tail.trim()),
            Some(_) => String::new(),
            None => "Its kernels go on; the next start warms a new template.".to_owned(),
        };
        let reason = ExitReason {
            cause: match cause {
                Some(cause) => cause,
                None if out_of_memory => Cause::OutOfMemory,
                None => Cause::of_its_own(&status),
            },
            status,
            evidence,
            pid,
            generation: 0,
            uptime,
            usage,
            crash_traceback: crash_traceback(&stderr_tail),
            stderr_tail,
            cell: None,
            leftovers: Leftovers::default(),
            message: String::new(),
        };
        let starting = "out of memory: the Linux OOM killer took it before it was ready";
        reason.told(&Telling {
            subject: &self.subject,
            detail: (out_of_memory && cause.is_some()).then_some(starting),
            next: &next,
        })
    }

    /// Closes the control socket, which tells the template to end, and waits.
    pub(crate) async fn close(&mut self, grace: Duration) {
        match FrameSocket::pair(Receives::FramesOnly) {
            Ok((silent, _)) => self.control = silent,
            Err(_) => self.kill(),
        }
        self.gone_within(grace).await;
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
