//! What is said on the `control` socket, and the configuration of a life, as `docs/protocol.md` lists them.

use kernelhost_process::reap::ExitStatus;
use kernelhost_process::usage::ResourceUsage;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::frame::{Frame, FrameError};

/// The version both ends must speak.
pub const PROTOCOL: u32 = 1;

/// Kinds of frames between the host and a template.
pub mod kind {
    pub const PREPARE: u16 = 64;
    pub const FORK: u16 = 65;
    pub const RELEASE: u16 = 66;
    pub const ABANDON: u16 = 67;
    pub const ADOPT: u16 = 68;
    pub const TEMPLATE_READY: u16 = 80;
    pub const TEMPLATE_FAILED: u16 = 81;
    pub const FORKED: u16 = 82;
    pub const FORK_FAILED: u16 = 83;
    pub const ENDED: u16 = 84;
    pub const RELEASED: u16 = 85;
}

/// Which shell a life runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shell {
    /// `IPython` where it can be imported. Never said by the Python side.
    Auto,
    Ipython,
    Plain,
}

/// All a life needs to know to begin: the payload of `configure` and of `fork`.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Configuration<'a> {
    pub protocol: u32,
    pub generation: u32,
    pub cwd: Option<&'a str>,
    #[serde(serialize_with = "as_object")]
    pub env: &'a [(String, String)],
    pub shell: Shell,
    pub init: Option<&'a str>,
    /// The path of a snapshot that is loaded after `init`.
    pub restore_from: Option<&'a str>,
    pub oom_score_adj: Option<i32>,
    /// Names that cells can call.
    pub functions: &'a [String],
    /// Whether anybody answers `input()`.
    pub input: bool,
    pub limits: Rlimits,
}

/// What makes a frozen copy a life of its own: the payload of `thaw`.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Thaw<'a> {
    /// What the callbacks of `kernelhost.on_restore` are told: `fork` or `checkpoint`.
    pub what: &'a str,
    /// Changes to the environment of the original; `None` takes a variable away.
    #[serde(serialize_with = "changes_as_object")]
    pub env: &'a [(String, Option<String>)],
    /// `None`: that of the original.
    pub cwd: Option<&'a str>,
    pub init: Option<&'a str>,
    pub oom_score_adj: Option<i32>,
    pub functions: &'a [String],
    pub input: bool,
    pub limits: Rlimits,
}

fn changes_as_object<S: serde::Serializer>(
    pairs: &&[(String, Option<String>)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

/// What the life itself asks Linux to keep. `None`: as it is.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rlimits {
    pub memory_bytes: Option<u64>,
    pub cpu_seconds: Option<u64>,
    pub open_files: Option<u64>,
}

fn as_object<S: serde::Serializer>(pairs: &&[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

#[derive(Debug, Serialize)]
pub struct Prepare<'a> {
    pub protocol: u32,
    pub shell: Shell,
    pub preload: &'a [String],
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateReady {
    pub protocol: u32,
    pub python: String,
    pub python_version: String,
    pub preloaded: Vec<String>,
    pub cannot_fork: Option<String>,
    /// Files and folders whose change makes the template stale.
    #[serde(default)]
    pub sources: Vec<String>,
}

/// A Python exception.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PythonError {
    pub name: String,
    pub value: String,
    pub traceback: Vec<String>,
}

/// Why a template or a life could not begin: `stage` says how far it came.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct StartFailure {
    pub stage: String,
    pub error: PythonError,
}

impl std::fmt::Display for StartFailure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            stage,
            error: PythonError { name, value, .. },
        } = self;
        match stage.as_str() {
            "init" => write!(formatter, "the init code raised {name}: {value}"),
            "cwd" => write!(formatter, "the working directory cannot be entered: {value}"),
            "shell" => write!(formatter, "the shell could not be built: {name}: {value}"),
            "preload" => write!(formatter, "a module to preload could not be imported: {name}: {value}"),
            "python" => write!(formatter, "{value}"),
            _ => write!(formatter, "{stage}: {name}: {value}"),
        }
    }
}

/// The pid of an orphan that the template is to treat as its own fork.
#[derive(Debug, Serialize)]
pub struct Adopt {
    pub pid: i32,
}

#[derive(Debug, Deserialize)]
pub struct Forked {
    pub pid: i32,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ForkFailed {
    pub errno: i32,
    pub code: String,
    pub message: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ended {
    pub exited: Option<i32>,
    pub signaled: Option<i32>,
    #[serde(default)]
    pub core_dumped: bool,
}

impl Ended {
    pub fn status(&self) -> Option<ExitStatus> {
        match (self.exited, self.signaled) {
            (Some(code), None) => Some(ExitStatus::Exited { code }),
            (None, Some(number)) => Some(ExitStatus::Signaled {
                number,
                core_dumped: self.core_dumped,
            }),
            _ => None,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Released {
    pub max_rss_bytes: u64,
    pub user_ms: f64,
    pub system_ms: f64,
}

impl From<Released> for ResourceUsage {
    fn from(
        Released {
            max_rss_bytes,
            user_ms,
            system_ms,
        }: Released,
    ) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "`as` saturates, which is what is wanted"
        )]
        let whole = |ms: f64| ms.round() as u64;
        Self {
            max_rss_bytes: Some(max_rss_bytes),
            user_ms: whole(user_ms),
            system_ms: whole(system_ms),
        }
    }
}

/// Reads a payload; one that is not what the table says breaks the format.
pub fn parse<T: DeserializeOwned>(frame: &Frame) -> Result<T, FrameError> {
    serde_json::from_slice(&frame.payload).map_err(|error| FrameError::Payload {
        kind: frame.kind,
        why: error.to_string(),
    })
}

/// The JSON text of a payload.
pub fn payload<T: Serialize>(value: &T) -> Vec<u8> {
    // Strings, numbers and maps with string keys always serialise.
    serde_json::to_vec(value).unwrap_or_default()
}
