//! What crosses to JavaScript: plain data, every field present, `null` for none, durations in milliseconds, bundles as JSON text.
//!
//! The names and their order are those of the core types; the generated `native.d.cts` is made from this file.

use napi::bindgen_prelude::Buffer;
use napi_derive::napi;

#[napi(string_enum = "kebab-case")]
pub enum LaunchMode {
    Auto,
    Fork,
    Spawn,
}

#[napi(string_enum = "kebab-case")]
pub enum ShellChoice {
    Auto,
    Ipython,
    Plain,
}

#[napi(string_enum = "kebab-case")]
pub enum Stuck {
    End,
    Wait,
}

#[napi(string_enum = "kebab-case")]
pub enum Recovery {
    Restart,
    Checkpoint,
    None,
}

#[napi(object, object_to_js = false)]
pub struct EnvironmentVariable {
    pub name: String,
    pub value: String,
}

#[napi(object, object_to_js = false)]
pub struct HostOptions {
    /// The interpreter's path.
    pub python: String,
    pub launch: LaunchMode,
    pub shell: ShellChoice,
    pub preload: Vec<String>,
    /// The folder that holds `boot.py`.
    pub runtime_directory: String,
}

#[napi(object, object_to_js = false, use_nullable = true)]
pub struct KernelOptions {
    /// The name that messages use.
    pub id: String,
    pub cwd: Option<String>,
    /// The exact environment.
    pub environment: Vec<EnvironmentVariable>,
    pub init: Option<String>,
    /// The path of a snapshot that every life loads before its first cell.
    pub restore_from: Option<String>,
    pub start_timeout_ms: f64,
    pub interrupt_grace_ms: f64,
    pub stuck: Stuck,
    pub max_output_bytes: f64,
    pub oom_score_adj: Option<i32>,
    pub limits: Limits,
    pub recovery: Recovery,
    /// What the copies taken after cells may come to have for themselves.
    pub checkpoint_bytes: f64,
    /// Names of the functions that its cells can call.
    pub functions: Vec<String>,
    /// Whether anybody answers `input()`.
    pub answers_input: bool,
}

/// Whole numbers; null: no limit.
#[napi(object, object_to_js = false, use_nullable = true)]
pub struct Limits {
    pub memory_bytes: Option<f64>,
    pub cpu_seconds: Option<f64>,
    pub open_files: Option<f64>,
    pub processes: Option<u32>,
}

#[napi(object, object_to_js = false, use_nullable = true)]
pub struct CellRequest {
    pub code: String,
    pub silent: bool,
    pub timeout_ms: Option<f64>,
    pub max_output_bytes: Option<f64>,
    /// Whether `cell-output` events are wanted.
    pub stream: bool,
}

/// A question about code; positions count code points.
#[napi(discriminant = "kind", discriminant_case = "kebab-case", object_to_js = false)]
pub enum Query {
    Complete { code: String, cursor: u32 },
    Inspect { code: String, cursor: u32, detail: u32 },
    IsComplete { code: String },
}

#[napi(string_enum = "kebab-case")]
pub enum KernelState {
    Absent,
    Starting,
    Idle,
    Running,
    Ending,
    Closed,
}

#[napi(string_enum = "kebab-case")]
pub enum LifeLaunch {
    Fork,
    Spawn,
    Checkpoint,
}

#[napi(string_enum = "kebab-case")]
pub enum LifeShell {
    Ipython,
    Plain,
}

#[napi(object, object_from_js = false, use_nullable = true)]
pub struct Life {
    pub pid: i32,
    pub generation: u32,
    pub launch: LifeLaunch,
    pub launch_reason: Option<String>,
    pub start_ms: f64,
    pub python: String,
    pub python_version: String,
    pub shell: LifeShell,
}

#[napi(discriminant = "kind", discriminant_case = "kebab-case", object_from_js = false)]
pub enum ExitStatus {
    Exited {
        code: i32,
    },
    Signaled {
        signal: String,
        number: i32,
        core_dumped: bool,
    },
    Unknown {
        why: String,
    },
}

#[napi(string_enum = "kebab-case")]
pub enum ExitCause {
    ExitCall,
    Crash,
    OutOfMemory,
    ExternalSignal,
    Close,
    Restart,
    Kill,
    Timeout,
    MemoryLimit,
    CpuLimit,
    ProcessLimit,
    StartFailed,
    ProtocolError,
    Unknown,
}

#[napi(object, object_from_js = false, use_nullable = true)]
pub struct ExitUsage {
    /// Bytes; null where Linux does not know it: of a cold life that never needed more than the daemon had at its spawn.
    pub max_rss_bytes: Option<f64>,
    pub user_ms: f64,
    pub system_ms: f64,
}

#[napi(object, object_from_js = false)]
pub struct ExitCell {
    pub code: String,
    pub running_ms: f64,
}

#[napi(object, object_from_js = false, use_nullable = true)]
pub struct ExitReason {
    pub status: ExitStatus,
    pub cause: ExitCause,
    pub evidence: Vec<String>,
    pub pid: i32,
    pub generation: u32,
    pub uptime_ms: f64,
    pub usage: Option<ExitUsage>,
    pub stderr_tail: String,
    pub crash_traceback: Option<String>,
    pub cell: Option<ExitCell>,
    pub leftovers: Leftovers,
    pub message: String,
}

#[napi(object, object_from_js = false)]
pub struct Leftovers {
    pub ended: Vec<Leftover>,
    pub remaining: Vec<RemainingLeftover>,
}

#[napi(object, object_from_js = false)]
pub struct Leftover {
    pub pid: i32,
    pub command: String,
}

/// A process whose marker names a host that is gone.
#[napi(object, object_from_js = false, use_nullable = true)]
pub struct Stray {
    pub pid: i32,
    pub command: String,
    pub host_pid: i32,
    /// Null: it served the host itself.
    pub kernel: Option<u32>,
    pub rss_bytes: f64,
    /// Why it could not be ended, when that was asked for.
    pub refused: Option<String>,
}

#[napi(object, object_from_js = false)]
pub struct RemainingLeftover {
    pub pid: i32,
    pub command: String,
    pub why: String,
}

#[napi(string_enum = "kebab-case")]
pub enum OutputStream {
    Stdout,
    Stderr,
}

#[napi(
    discriminant = "kind",
    discriminant_case = "kebab-case",
    object_from_js = false,
    use_nullable = true
)]
pub enum Output {
    Text {
        stream: OutputStream,
        text: String,
    },
    Display {
        data_json: String,
        metadata_json: String,
        display_id: Option<String>,
        update: bool,
    },
    Clear {
        wait: bool,
    },
    Value {
        data_json: String,
        metadata_json: String,
    },
    Error {
        name: String,
        value: String,
        traceback: Vec<String>,
    },
}

#[napi(string_enum = "kebab-case")]
pub enum CellStatus {
    Ok,
    Error,
    Interrupted,
    TimedOut,
}

#[napi(object, object_from_js = false, use_nullable = true)]
pub struct Cell {
    pub status: CellStatus,
    pub stdout: String,
    pub stderr: String,
    pub missing_stdout_bytes: f64,
    pub missing_stderr_bytes: f64,
    pub missing_displays: f64,
    pub outputs: Vec<Output>,
    pub execution_count: u32,
    pub duration_ms: f64,
    /// Of the life it ran on, which `started` has told: building it anew for each cell would take as long as the rest.
    pub generation: u32,
    pub recovered: Option<Recovered>,
}

/// A frozen copy of a life.
#[napi(object, object_from_js = false)]
pub struct Checkpoint {
    /// Unique in its kernel.
    pub id: u32,
    pub generation: u32,
    pub rss_bytes: f64,
}

/// What is different in a copy that becomes a kernel's first life.
#[napi(object, object_to_js = false, use_nullable = true)]
pub struct Thawing {
    /// Changes to the environment of the original; null takes a variable away.
    pub environment: Vec<EnvironmentChange>,
    /// null: where the original is.
    pub cwd: Option<String>,
    pub init: Option<String>,
}

#[napi(object, object_to_js = false, use_nullable = true)]
pub struct EnvironmentChange {
    pub name: String,
    pub value: Option<String>,
}

#[napi(string_enum = "kebab-case")]
pub enum RecoveredState {
    Fresh,
    Checkpoint,
}

#[napi(object, object_from_js = false)]
pub struct Recovered {
    pub exit: ExitReason,
    pub state: RecoveredState,
    pub lost_cells: u32,
}

#[napi(string_enum = "kebab-case")]
pub enum TemplateState {
    Ready,
    Ended,
}

#[napi(object, object_from_js = false, use_nullable = true)]
pub struct TemplateInfo {
    pub pid: i32,
    pub state: TemplateState,
    pub python: String,
    pub python_version: String,
    pub preloaded: Vec<String>,
    pub ready_ms: f64,
    pub exit: Option<ExitReason>,
}

#[napi(object, object_from_js = false)]
pub struct Usage {
    pub rss_bytes: f64,
    pub pss_bytes: f64,
    pub cpu_ms: f64,
    pub threads: u32,
    pub processes: u32,
}

#[napi(object, object_from_js = false, use_nullable = true)]
pub struct Failure {
    /// `ERR_…`, as docs/errors.md lists them.
    pub code: String,
    pub message: String,
    pub exit: Option<ExitReason>,
    pub partial: Option<Cell>,
    pub stderr_tail: String,
}

#[napi(discriminant = "kind", discriminant_case = "kebab-case", object_from_js = false)]
#[expect(clippy::large_enum_variant, reason = "made once and converted at once")]
pub enum Reply {
    Done,
    Life {
        life: Life,
    },
    Cell {
        cell: Cell,
    },
    Exit {
        exit: ExitReason,
    },
    Usage {
        usage: Usage,
    },
    /// To a query, as JSON text.
    Checkpoint {
        checkpoint: Checkpoint,
    },
    Answer {
        json: String,
    },
    Template {
        template: TemplateInfo,
    },
    Failed {
        failure: Failure,
    },
}

#[napi(
    discriminant = "kind",
    discriminant_case = "kebab-case",
    object_from_js = false,
    use_nullable = true
)]
#[expect(clippy::large_enum_variant, reason = "made once and converted at once")]
pub enum HostEvent {
    Started {
        kernel: u32,
        life: Life,
    },
    Exited {
        kernel: u32,
        exit: ExitReason,
    },
    State {
        kernel: u32,
        state: KernelState,
    },
    /// While no cell runs.
    Output {
        kernel: u32,
        output: Output,
    },
    /// `bytes` comes back by `credit`.
    CellOutput {
        request: u32,
        output: Output,
        bytes: u32,
    },
    /// Answered by `returned`.
    Call {
        kernel: u32,
        call: u32,
        /// The `execute` whose cell it comes from, if that is running.
        request: Option<u32>,
        generation: u32,
        name: String,
        /// Not null: input is asked for, and whether it is a secret.
        password: Option<bool>,
        args_json: String,
        places_json: String,
        bytes: Buffer,
    },
    CallAborted {
        kernel: u32,
        call: u32,
    },
    Warning {
        kernel: Option<u32>,
        code: String,
        message: String,
    },
    Template {
        template: TemplateInfo,
    },
    Settled {
        request: u32,
        reply: Reply,
    },
}
