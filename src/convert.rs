//! Core types to what crosses, and back. Every conversion is total.

use std::time::Duration;

use kernelhost_kernel::event::{self, Event};
use kernelhost_kernel::{options, output};
use kernelhost_process::exit_reason::{self, Cause};
use kernelhost_process::process_tree;
use kernelhost_process::{signal, usage};

use crate::dto;

/// A number of milliseconds from JavaScript. What is no duration counts as none: TypeScript has checked it.
pub fn from_ms(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default()
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[expect(
    clippy::cast_precision_loss,
    reason = "JavaScript has no other number; sizes stay far below 2^53"
)]
fn number(value: u64) -> f64 {
    value as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates, which is what is wanted"
)]
pub fn size(value: f64) -> usize {
    value as usize
}

pub fn environment(variables: Vec<dto::EnvironmentVariable>) -> Vec<(String, String)> {
    variables
        .into_iter()
        .map(|variable| (variable.name, variable.value))
        .collect()
}

impl From<dto::HostOptions> for options::HostOptions {
    fn from(from: dto::HostOptions) -> Self {
        Self {
            python: from.python,
            launch: match from.launch {
                dto::LaunchMode::Auto => options::LaunchMode::Auto,
                dto::LaunchMode::Fork => options::LaunchMode::Fork,
                dto::LaunchMode::Spawn => options::LaunchMode::Spawn,
            },
            shell: match from.shell {
                dto::ShellChoice::Auto => options::Shell::Auto,
                dto::ShellChoice::Ipython => options::Shell::Ipython,
                dto::ShellChoice::Plain => options::Shell::Plain,
            },
            preload: from.preload,
            runtime_directory: from.runtime_directory,
        }
    }
}

impl From<dto::KernelOptions> for options::KernelOptions {
    fn from(from: dto::KernelOptions) -> Self {
        Self {
            id: from.id,
            cwd: from.cwd,
            environment: environment(from.environment),
            init: from.init,
            restore_from: from.restore_from,
            start_timeout: from_ms(from.start_timeout_ms),
            interrupt_grace: from_ms(from.interrupt_grace_ms),
            stuck: match from.stuck {
                dto::Stuck::End => options::Stuck::End,
                dto::Stuck::Wait => options::Stuck::Wait,
            },
            max_output_bytes: size(from.max_output_bytes),
            oom_score_adj: from.oom_score_adj,
            limits: options::Limits {
                memory_bytes: from.limits.memory_bytes.map(|limit| size(limit) as u64),
                cpu_seconds: from.limits.cpu_seconds.map(|limit| size(limit) as u64),
                open_files: from.limits.open_files.map(|limit| size(limit) as u64),
                processes: from.limits.processes,
            },
            recovery: match from.recovery {
                dto::Recovery::Restart => options::Recovery::Restart,
                dto::Recovery::Checkpoint => options::Recovery::Checkpoint,
                dto::Recovery::None => options::Recovery::None,
            },
            checkpoint_bytes: size(from.checkpoint_bytes) as u64,
            functions: from.functions,
            answers_input: from.answers_input,
        }
    }
}

impl From<dto::Thawing> for kernelhost_kernel::host::Thawing {
    fn from(from: dto::Thawing) -> Self {
        let changes = from.environment.into_iter().map(|change| (change.name, change.value));
        Self {
            what: "fork",
            environment: changes.collect(),
            cwd: from.cwd,
            init: from.init,
        }
    }
}

impl From<dto::CellRequest> for options::CellRequest {
    fn from(from: dto::CellRequest) -> Self {
        Self {
            code: from.code,
            silent: from.silent,
            timeout: from.timeout_ms.map(from_ms),
            max_output_bytes: from.max_output_bytes.map(size),
            stream: from.stream,
        }
    }
}

impl From<dto::Query> for event::Query {
    fn from(from: dto::Query) -> Self {
        match from {
            dto::Query::Complete { code, cursor } => Self::Complete { code, cursor },
            dto::Query::Inspect { code, cursor, detail } => Self::Inspect { code, cursor, detail },
            dto::Query::IsComplete { code } => Self::IsComplete { code },
        }
    }
}

impl From<event::PublicState> for dto::KernelState {
    fn from(from: event::PublicState) -> Self {
        match from {
            event::PublicState::Absent => Self::Absent,
            event::PublicState::Starting => Self::Starting,
            event::PublicState::Idle => Self::Idle,
            event::PublicState::Running => Self::Running,
            event::PublicState::Ending => Self::Ending,
            event::PublicState::Closed => Self::Closed,
        }
    }
}

impl From<event::LifeFacts> for dto::Life {
    fn from(from: event::LifeFacts) -> Self {
        Self {
            pid: from.pid,
            generation: from.generation,
            launch: match from.launch {
                event::Launch::Fork => dto::LifeLaunch::Fork,
                event::Launch::Spawn => dto::LifeLaunch::Spawn,
                event::Launch::Checkpoint => dto::LifeLaunch::Checkpoint,
            },
            launch_reason: from.launch_reason,
            start_ms: ms(from.start),
            python: from.python,
            python_version: from.python_version,
            shell: match from.shell {
                options::Shell::Ipython => dto::LifeShell::Ipython,
                options::Shell::Auto | options::Shell::Plain => dto::LifeShell::Plain,
            },
        }
    }
}

impl From<&exit_reason::ExitReason> for dto::ExitReason {
    fn from(from: &exit_reason::ExitReason) -> Self {
        let status = match &from.status {
            exit_reason::ExitStatus::Exited { code } => dto::ExitStatus::Exited { code: *code },
            exit_reason::ExitStatus::Signaled { number, core_dumped } => dto::ExitStatus::Signaled {
                signal: signal::name(*number),
                number: *number,
                core_dumped: *core_dumped,
            },
            exit_reason::ExitStatus::Unknown { why } => dto::ExitStatus::Unknown { why: why.clone() },
        };
        Self {
            status,
            cause: from.cause.into(),
            evidence: from.evidence.clone(),
            pid: from.pid,
            generation: from.generation,
            uptime_ms: ms(from.uptime),
            usage: from.usage.map(|usage| dto::ExitUsage {
                max_rss_bytes: usage.max_rss_bytes.map(number),
                user_ms: number(usage.user_ms),
                system_ms: number(usage.system_ms),
            }),
            stderr_tail: from.stderr_tail.clone(),
            crash_traceback: from.crash_traceback.clone(),
            cell: from.cell.as_ref().map(|cell| dto::ExitCell {
                code: cell.code.clone(),
                running_ms: ms(cell.running),
            }),
            leftovers: (&from.leftovers).into(),
            message: from.message.clone(),
        }
    }
}

impl From<&process_tree::Leftovers> for dto::Leftovers {
    fn from(from: &process_tree::Leftovers) -> Self {
        let ended = from.ended.iter().map(|process| dto::Leftover {
            pid: process.pid,
            command: process.command.clone(),
        });
        let remaining = from.remaining.iter().map(|remaining| dto::RemainingLeftover {
            pid: remaining.process.pid,
            command: remaining.process.command.clone(),
            why: remaining.why.clone(),
        });
        Self {
            ended: ended.collect(),
            remaining: remaining.collect(),
        }
    }
}

impl From<process_tree::Stray> for dto::Stray {
    fn from(from: process_tree::Stray) -> Self {
        Self {
            pid: from.process.pid,
            command: from.process.command,
            host_pid: from.host_pid,
            kernel: from.kernel,
            rss_bytes: number(from.rss_bytes),
            refused: from.refused,
        }
    }
}

impl From<Cause> for dto::ExitCause {
    fn from(from: Cause) -> Self {
        match from {
            Cause::ExitCall => Self::ExitCall,
            Cause::Crash => Self::Crash,
            Cause::OutOfMemory => Self::OutOfMemory,
            Cause::MemoryLimit => Self::MemoryLimit,
            Cause::CpuLimit => Self::CpuLimit,
            Cause::ProcessLimit => Self::ProcessLimit,
            Cause::ExternalSignal => Self::ExternalSignal,
            Cause::Close => Self::Close,
            Cause::Restart => Self::Restart,
            Cause::Kill => Self::Kill,
            Cause::Timeout => Self::Timeout,
            Cause::StartFailed => Self::StartFailed,
            Cause::ProtocolError => Self::ProtocolError,
            Cause::Unknown => Self::Unknown,
        }
    }
}

impl From<output::Output> for dto::Output {
    fn from(from: output::Output) -> Self {
        match from {
            output::Output::Text { stream, text } => {
                let stream = match stream {
                    output::Stream::Stdout => dto::OutputStream::Stdout,
                    output::Stream::Stderr => dto::OutputStream::Stderr,
                };
                Self::Text { stream, text }
            }
            output::Output::Display {
                data,
                metadata,
                display_id,
                update,
            } => Self::Display {
                data_json: data,
                metadata_json: metadata,
                display_id,
                update,
            },
            output::Output::Clear { wait } => Self::Clear { wait },
            output::Output::Value { data, metadata } => Self::Value {
                data_json: data,
                metadata_json: metadata,
            },
            output::Output::Error { name, value, traceback } => Self::Error { name, value, traceback },
        }
    }
}

impl From<event::CellResult> for dto::Cell {
    fn from(from: event::CellResult) -> Self {
        Self {
            status: match from.status {
                event::CellStatus::Ok => dto::CellStatus::Ok,
                event::CellStatus::Error => dto::CellStatus::Error,
                event::CellStatus::Interrupted => dto::CellStatus::Interrupted,
                event::CellStatus::TimedOut => dto::CellStatus::TimedOut,
            },
            stdout: from.stdout,
            stderr: from.stderr,
            missing_stdout_bytes: number(from.missing_stdout_bytes),
            missing_stderr_bytes: number(from.missing_stderr_bytes),
            missing_displays: number(from.missing_displays),
            outputs: from.outputs.into_iter().map(dto::Output::from).collect(),
            execution_count: from.execution_count,
            duration_ms: ms(from.duration),
            generation: from.generation,
            recovered: from.recovered.map(|recovered| dto::Recovered {
                exit: (&*recovered.exit).into(),
                state: match recovered.state {
                    event::RecoveredState::Fresh => dto::RecoveredState::Fresh,
                    event::RecoveredState::Checkpoint => dto::RecoveredState::Checkpoint,
                },
                lost_cells: recovered.lost_cells,
            }),
        }
    }
}

impl From<event::Failure> for dto::Failure {
    fn from(from: event::Failure) -> Self {
        let code = match from.code {
            event::FailureCode::KernelDied => "ERR_KERNEL_DIED",
            event::FailureCode::KernelStart => "ERR_KERNEL_START",
            event::FailureCode::KernelBusy => "ERR_KERNEL_BUSY",
            event::FailureCode::KernelClosed => "ERR_KERNEL_CLOSED",
            event::FailureCode::KernelAbsent => "ERR_KERNEL_ABSENT",
            event::FailureCode::CopyRefused => "ERR_COPY_REFUSED",
            event::FailureCode::CheckpointGone => "ERR_CHECKPOINT_GONE",
            event::FailureCode::QueryFailed => "ERR_QUERY_FAILED",
            event::FailureCode::Aborted => "ERR_ABORTED",
            event::FailureCode::Internal => "ERR_INTERNAL",
        };
        Self {
            code: code.to_owned(),
            message: from.message,
            exit: from.exit.map(|exit| (&*exit).into()),
            partial: from.partial.map(dto::Cell::from),
            stderr_tail: from.stderr_tail,
        }
    }
}

impl From<event::Reply> for dto::Reply {
    fn from(from: event::Reply) -> Self {
        match from {
            event::Reply::Done => Self::Done,
            event::Reply::Life(life) => Self::Life { life: life.into() },
            event::Reply::Cell(cell) => Self::Cell { cell: (*cell).into() },
            event::Reply::Exit(exit) => Self::Exit { exit: (&*exit).into() },
            event::Reply::Usage(usage) => Self::Usage { usage: usage.into() },
            event::Reply::Checkpoint(facts) => Self::Checkpoint {
                checkpoint: dto::Checkpoint {
                    id: facts.id,
                    generation: facts.generation,
                    rss_bytes: number(facts.rss_bytes),
                },
            },
            event::Reply::Answer(json) => Self::Answer { json },
            event::Reply::Template(facts) => Self::Template {
                template: template(facts, None),
            },
            event::Reply::Failed(failure) => Self::Failed {
                failure: (*failure).into(),
            },
        }
    }
}

impl From<usage::LiveUsage> for dto::Usage {
    fn from(from: usage::LiveUsage) -> Self {
        Self {
            rss_bytes: number(from.rss_bytes),
            pss_bytes: number(from.pss_bytes),
            cpu_ms: number(from.cpu_ms),
            threads: from.threads,
            processes: from.processes,
        }
    }
}

fn template(facts: event::TemplateFacts, exit: Option<&exit_reason::ExitReason>) -> dto::TemplateInfo {
    dto::TemplateInfo {
        pid: facts.pid,
        state: if exit.is_some() {
            dto::TemplateState::Ended
        } else {
            dto::TemplateState::Ready
        },
        python: facts.python,
        python_version: facts.python_version,
        preloaded: facts.preloaded,
        ready_ms: ms(facts.ready),
        exit: exit.map(dto::ExitReason::from),
    }
}

impl From<Event> for dto::HostEvent {
    fn from(from: Event) -> Self {
        match from {
            Event::Started { kernel, life } => Self::Started {
                kernel,
                life: life.into(),
            },
            Event::Exited { kernel, exit } => Self::Exited {
                kernel,
                exit: (&*exit).into(),
            },
            Event::State { kernel, state } => Self::State {
                kernel,
                state: state.into(),
            },
            // The credit ends here: on the JavaScript thread, where the output has arrived.
            Event::Output {
                kernel,
                output,
                credit: _,
            } => Self::Output {
                kernel,
                output: output.into(),
            },
            Event::CellOutput { request, output, bytes } => Self::CellOutput {
                request,
                output: output.into(),
                bytes,
            },
            Event::Call {
                kernel,
                call,
                request,
                generation,
                made,
            } => Self::Call {
                kernel,
                call,
                request,
                generation,
                name: made.name,
                password: made.password,
                args_json: made.args,
                places_json: made.places,
                bytes: made.bytes.into(),
            },
            Event::CallAborted { kernel, call } => Self::CallAborted { kernel, call },
            Event::Warning { kernel, code, message } => Self::Warning {
                kernel,
                code: code.to_owned(),
                message,
            },
            Event::Template { facts, exit } => Self::Template {
                template: template(facts, exit.as_deref()),
            },
            Event::Settled { request, reply } => Self::Settled {
                request,
                reply: reply.into(),
            },
        }
    }
}
