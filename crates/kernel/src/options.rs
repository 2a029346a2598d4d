//! What a host and its kernels are told when they are made. All values are valid already: whoever sits in front of this crate
//! checks them and fills the defaults in.

use std::time::Duration;

use kernelhost_forkserver::protocol::Rlimits;
pub use kernelhost_forkserver::protocol::Shell;

/// How lives are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchMode {
    /// From a template where that works, cold where it does not.
    Auto,
    Fork,
    Spawn,
}

/// What happens to a cell that went on after two interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stuck {
    /// Its life is ended.
    End,
    /// The call is settled; the life and the cell go on, and the next call waits for the cell.
    Wait,
}

/// What the call after a death does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    Restart,
    /// It gets a life with the variables of the newest copy that was taken after a cell.
    Checkpoint,
    /// It fails; only `start` brings a new life.
    None,
}

#[derive(Debug, Clone)]
pub struct HostOptions {
    pub python: String,
    pub launch: LaunchMode,
    pub shell: Shell,
    pub preload: Vec<String>,
    /// The folder that holds `boot.py` and the `kernelhost` package.
    pub runtime_directory: String,
}

/// What one life may take. `None`: no limit of ours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of each process what it asks for, of the whole tree what it has resident.
    pub memory_bytes: Option<u64>,
    /// Of each process.
    pub cpu_seconds: Option<u64>,
    /// Of each process.
    pub open_files: Option<u64>,
    /// Of the tree, the life itself included.
    pub processes: Option<u32>,
}

impl Limits {
    /// Those that Linux keeps for each process.
    pub fn rlimits(&self) -> Rlimits {
        Rlimits {
            memory_bytes: self.memory_bytes,
            cpu_seconds: self.cpu_seconds,
            open_files: self.open_files,
        }
    }
}

#[derive(Debug, Clone)]
pub struct KernelOptions {
    /// The name that messages use.
    pub id: String,
    pub cwd: Option<String>,
    /// The exact environment.
    pub environment: Vec<(String, String)>,
    pub init: Option<String>,
    /// The path of a snapshot that every life loads before its first cell.
    pub restore_from: Option<String>,
    pub start_timeout: Duration,
    pub interrupt_grace: Duration,
    pub stuck: Stuck,
    /// Per stream of one cell.
    pub max_output_bytes: usize,
    pub oom_score_adj: Option<i32>,
    pub limits: Limits,
    pub recovery: Recovery,
    /// How much memory the copies taken after cells may come to have for themselves, before none is taken any more.
    pub checkpoint_bytes: u64,
    /// Names of the functions that its cells can call.
    pub functions: Vec<String>,
    /// Whether anybody answers `input()`.
    pub answers_input: bool,
}

#[derive(Debug, Clone)]
pub struct CellRequest {
    pub code: String,
    pub silent: bool,
    pub timeout: Option<Duration>,
    pub max_output_bytes: Option<usize>,
    /// Whether outputs are wanted as they come, beside the result.
    pub stream: bool,
}
