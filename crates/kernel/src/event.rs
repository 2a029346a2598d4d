//! What leaves this crate: one ordered stream per host, of things that happened and of answers to requests.
//!
//! Answers travel in the same stream as events, so that "the exit comes after the failed cell and before the next start" holds
//! for whoever listens, and not only in here.

use std::sync::Arc;
use std::time::Duration;

pub use kernelhost_forkserver::client::TemplateFacts;
use kernelhost_process::exit_reason::ExitReason;
use kernelhost_process::usage::LiveUsage;

use crate::options::Shell;
use crate::output::{Credit, Output};

pub use crate::wire::{HostCall, Query};

/// Chosen by the caller, never used twice in a host.
pub type RequestId = u32;
/// The request of whoever waits for no answer.
pub const NOBODY: RequestId = 0;
/// Number of a call into the daemon within its kernel.
pub type CallNumber = u32;
/// Number of a kernel in its host.
pub type KernelNumber = u32;

/// Takes the events of a host. Must not block: it runs on the thread that supervises every kernel.
pub type Sink = Arc<dyn Fn(Vec<Event>) + Send + Sync>;

#[derive(Debug)]
pub enum Event {
    Started {
        kernel: KernelNumber,
        life: LifeFacts,
    },
    Exited {
        kernel: KernelNumber,
        exit: Arc<ExitReason>,
    },
    State {
        kernel: KernelNumber,
        state: PublicState,
    },
    /// Output while no cell runs. The credit comes back when the event is dropped.
    Output {
        kernel: KernelNumber,
        output: Output,
        credit: Credit,
    },
    /// Output of a cell that is streamed. Its bytes come back by `Kernel::credit`.
    CellOutput {
        request: RequestId,
        output: Output,
        bytes: u32,
    },
    /// A cell, or something that a cell has left running, calls a function of the daemon's. Answered by `Kernel::returned`.
    Call {
        kernel: KernelNumber,
        /// Never used twice in a kernel.
        call: CallNumber,
        /// Of the running cell it comes from, if it comes from that.
        request: Option<RequestId>,
        generation: u32,
        made: HostCall,
    },
    /// The cell of a call was interrupted, or nobody waits for its answer any more.
    CallAborted {
        kernel: KernelNumber,
        call: CallNumber,
    },
    Warning {
        kernel: Option<KernelNumber>,
        code: &'static str,
        message: String,
    },
    Template {
        facts: TemplateFacts,
        exit: Option<Arc<ExitReason>>,
    },
    Settled {
        request: RequestId,
        reply: Reply,
    },
}

#[derive(Debug)]
pub enum Reply {
    Done,
    Life(LifeFacts),
    Cell(Box<CellResult>),
    Exit(Arc<ExitReason>),
    Usage(LiveUsage),
    Checkpoint(CheckpointFacts),
    /// To a query, as JSON.
    Answer(String),
    Template(TemplateFacts),
    Failed(Box<Failure>),
}

/// What is expected to go wrong, by the code that the public API gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCode {
    KernelDied,
    KernelStart,
    KernelBusy,
    KernelClosed,
    /// There is no life, and this call does not start one.
    KernelAbsent,
    /// No copy was made, because it would not be sound, or for want of a process.
    CopyRefused,
    /// The checkpoint is not there any more.
    CheckpointGone,
    /// Python could not answer a query.
    QueryFailed,
    /// The caller gave up before anything ran.
    Aborted,
    /// A bug in kernelhost.
    Internal,
}

#[derive(Debug)]
pub struct Failure {
    pub code: FailureCode,
    pub message: String,
    pub exit: Option<Arc<ExitReason>>,
    pub partial: Option<CellResult>,
    pub stderr_tail: String,
}

impl Reply {
    /// A failure that no end of a process is behind.
    pub fn failed(code: FailureCode, message: String) -> Self {
        Self::Failed(Box::new(Failure {
            code,
            message,
            exit: None,
            partial: None,
            stderr_tail: String::new(),
        }))
    }
}

/// The states of a kernel as its owner sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PublicState {
    Absent,
    Starting,
    Idle,
    Running,
    Ending,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    Fork,
    Spawn,
    /// From a frozen copy of an earlier life.
    Checkpoint,
}

/// One life, as it was when it became ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LifeFacts {
    pub pid: i32,
    pub generation: u32,
    pub launch: Launch,
    /// Why it was spawned cold where a fork was to be tried first.
    pub launch_reason: Option<String>,
    pub start: Duration,
    pub python: String,
    pub python_version: String,
    pub shell: Shell,
}

/// A frozen copy, as it was when it had been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointFacts {
    /// Unique in its kernel.
    pub id: u32,
    /// Of the life it is a copy of.
    pub generation: u32,
    /// What it has resident, all but nothing of it its own.
    pub rss_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellStatus {
    Ok,
    Error,
    Interrupted,
    TimedOut,
}

#[derive(Debug)]
pub struct CellResult {
    pub status: CellStatus,
    pub stdout: String,
    pub stderr: String,
    pub missing_stdout_bytes: u64,
    pub missing_stderr_bytes: u64,
    /// Displays and values that were too many or too large to be kept.
    pub missing_displays: u64,
    /// All of it in order, the value and the error last.
    pub outputs: Vec<Output>,
    pub execution_count: u32,
    pub duration: Duration,
    pub generation: u32,
    pub recovered: Option<Recovered>,
}

/// What the first result on a new life says of the one before.
#[derive(Debug, Clone)]
pub struct Recovered {
    pub exit: Arc<ExitReason>,
    pub state: RecoveredState,
    /// Cells whose effects are lost.
    pub lost_cells: u32,
}

/// What a life that replaced another began with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveredState {
    Fresh,
    Checkpoint,
}
