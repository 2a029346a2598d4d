//! How a life ended, in two halves that are kept apart: what the operating system said, and why it came to that.
//!
//! The message for people is written here and nowhere else.

use std::time::Duration;

use crate::process_tree::{Leftovers, Remaining};
pub use crate::reap::ExitStatus;
use crate::signal;
use crate::usage::ResourceUsage;

/// Why a life ended. The first cause recorded stays: a kill that follows a time-out is still a time-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The process left by itself: `exit()` in a cell, `os._exit()`, or an exit in native code.
    ExitCall,
    /// A fault of its own: SIGSEGV, SIGABRT and the like.
    Crash,
    /// The Linux OOM killer took it.
    OutOfMemory,
    /// A fatal signal that this host did not send.
    ExternalSignal,
    Close,
    Restart,
    Kill,
    /// A cell that went on after its time limit and the interrupts that followed.
    Timeout,
    /// It and what it had started took more memory than its limit.
    MemoryLimit,
    /// It used up its CPU time.
    CpuLimit,
    /// It and what it had started were more processes than its limit.
    ProcessLimit,
    /// It never became ready.
    StartFailed,
    /// It broke the wire format.
    ProtocolError,
    /// Neither this host's doing nor told by the operating system.
    Unknown,
}

impl Cause {
    /// The cause of an end that nobody here asked for.
    pub fn of_its_own(status: &ExitStatus) -> Self {
        match status {
            ExitStatus::Exited { .. } => Self::ExitCall,
            ExitStatus::Signaled { number, .. } if signal::is_crash(*number) => Self::Crash,
            ExitStatus::Signaled { .. } => Self::ExternalSignal,
            ExitStatus::Unknown { .. } => Self::Unknown,
        }
    }
}

/// The cell that was running when the life ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterruptedCell {
    pub code: String,
    pub running: Duration,
}

/// The whole account of one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitReason {
    pub status: ExitStatus,
    pub cause: Cause,
    /// What the cause rests on, when it is not our own doing.
    pub evidence: Vec<String>,
    pub pid: i32,
    pub generation: u32,
    pub uptime: Duration,
    pub usage: Option<ResourceUsage>,
    pub stderr_tail: String,
    pub crash_traceback: Option<String>,
    pub cell: Option<InterruptedCell>,
    /// What it had started and was still there.
    pub leftovers: Leftovers,
    pub message: String,
}

/// What the message is made from, beyond the reason itself.
pub struct Telling<'a> {
    /// What ended, with its name: `kernel "analysis"`, `template of /usr/bin/python3`.
    pub subject: &'a str,
    /// What was asked for or went wrong, where the cause alone does not say it: `kill(SIGTERM)`, `the init code raised …`.
    pub detail: Option<&'a str>,
    /// What happens next, as a whole sentence.
    pub next: &'a str,
}

impl ExitReason {
    /// Writes `message`: what ended, how, when, why, and what to do.
    #[must_use]
    pub fn told(mut self, telling: &Telling<'_>) -> Self {
        let mut subject = telling.subject.to_owned();
        if let Some(first) = subject.get_mut(0..1) {
            first.make_ascii_uppercase();
        }
        let when = if self.cell.is_some() {
            ", while a cell was running"
        } else {
            ""
        };
        // A template is no life of a kernel.
        let life = if self.generation > 0 {
            format!(", life {}", self.generation)
        } else {
            String::new()
        };
        let message = format!(
            "{subject} (pid {}{life}) {}{} after {}{when}: {}.{}{} {}",
            self.pid,
            if self.cause == Cause::StartFailed {
                "did not start; it "
            } else {
                ""
            },
            how(&self.status),
            duration(self.uptime),
            self.why(telling.detail),
            if self.crash_traceback.is_some() {
                " The Python stack is in crashTraceback."
            } else {
                ""
            },
            self.remaining(),
            telling.next,
        );
        message.trim_end().clone_into(&mut self.message);
        self
    }

    fn remaining(&self) -> String {
        let names: Vec<String> = self
            .leftovers
            .remaining
            .iter()
            .map(|Remaining { process, why }| format!("{} \"{}\" ({why})", process.pid, process.command))
            .collect();
        if names.is_empty() {
            String::new()
        } else {
            format!(
                " What it had started could not all be ended; still there: {}.",
                names.join(", ")
            )
        }
    }

    fn why(&self, detail: Option<&str>) -> String {
        if let Some(detail) = detail {
            return detail.to_owned();
        }
        match (self.cause, &self.status) {
            (Cause::ExitCall, _) => {
                "the process itself asked to exit, through os._exit(), or through exit() in native code".to_owned()
            }
            (Cause::Crash, _) => "a fault in native code, or a signal that looks like one".to_owned(),
            (Cause::OutOfMemory, _) => {
                let peak = self.usage.and_then(|usage| usage.max_rss_bytes);
                let peak = peak.map_or_else(String::new, |peak| format!("; it had up to {} in memory", bytes(peak)));
                format!("out of memory: the Linux OOM killer took it{peak}")
            }
            (Cause::MemoryLimit, _) => "it went beyond its memory limit".to_owned(),
            (Cause::CpuLimit, _) => "it used up its CPU time".to_owned(),
            (Cause::ProcessLimit, _) => "it went beyond its limit of processes".to_owned(),
            (Cause::ExternalSignal, ExitStatus::Signaled { number: libc::SIGKILL, .. }) => {
                "this host did not send that signal; another process did, or the operating system (when memory runs out)"
                    .to_owned()
            }
            (Cause::ExternalSignal, _) => "this host did not send that signal".to_owned(),
            (Cause::Close, _) => "it was closed".to_owned(),
            (Cause::Restart, _) => "it was restarted".to_owned(),
            (Cause::Kill, _) => "it was killed as asked".to_owned(),
            (Cause::Timeout, _) => "a cell went on after its time limit and two interrupts".to_owned(),
            (Cause::StartFailed, _) => "it ended before it was ready".to_owned(),
            (Cause::ProtocolError, _) => "it broke the wire format".to_owned(),
            (Cause::Unknown, ExitStatus::Unknown { why }) => why.clone(),
            (Cause::Unknown, _) => "nobody knows why".to_owned(),
        }
    }
}

/// How a process ended, as what follows its name.
pub fn how(status: &ExitStatus) -> String {
    match status {
        ExitStatus::Exited { code } => format!("exited with code {code}"),
        ExitStatus::Signaled { number, core_dumped } => {
            let name = signal::name(*number);
            let notes: Vec<&str> = signal::meaning(*number)
                .into_iter()
                .chain(core_dumped.then_some("core dumped"))
                .collect();
            if notes.is_empty() {
                format!("was ended by {name}")
            } else {
                format!("was ended by {name} ({})", notes.join(", "))
            }
        }
        ExitStatus::Unknown { .. } => "ended, nobody could say how,".to_owned(),
    }
}

/// A duration as people say it: `12 ms`, `3.4 s`, `5 min 2 s`, `3 h 7 min`.
pub fn duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..60_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        60_000..3_600_000 => format!("{} min {} s", ms / 60_000, ms / 1000 % 60),
        _ => format!("{} h {} min", ms / 3_600_000, ms / 60_000 % 60),
    }
}

/// A size as people say it: `512 bytes`, `95 MiB`, `1.5 GiB`.
pub fn bytes(bytes: u64) -> String {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    match bytes {
        0..KIB => format!("{bytes} bytes"),
        KIB..MIB => format!("{} KiB", bytes / KIB),
        MIB..GIB => format!("{} MiB", bytes / MIB),
        _ => format!("{}.{} GiB", bytes / GIB, bytes % GIB * 10 / GIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(status: ExitStatus, cause: Cause) -> ExitReason {
        ExitReason {
            status,
            cause,
            evidence: Vec::new(),
            pid: 4711,
            generation: 2,
            uptime: Duration::from_millis(3456),
            usage: None,
            stderr_tail: String::new(),
            crash_traceback: None,
            cell: None,
            leftovers: Leftovers::default(),
            message: String::new(),
        }
    }

    fn message(reason: ExitReason, detail: Option<&str>) -> String {
        reason
            .told(&Telling {
                subject: "kernel \"k\"",
                detail,
                next: "The next call starts a new life.",
            })
            .message
    }

    #[test]
    fn the_message_says_what_how_when_why_and_what_next() {
        let killed = ExitStatus::Signaled {
            number: libc::SIGKILL,
            core_dumped: false,
        };
        let mut busy = reason(killed.clone(), Cause::ExternalSignal);
        busy.cell = Some(InterruptedCell {
            code: "1".into(),
            running: Duration::from_secs(1),
        });
        assert_eq!(
            message(busy, None),
            "Kernel \"k\" (pid 4711, life 2) was ended by SIGKILL after 3.4 s, while a cell was running: this host did not send \
             that signal; another process did, or the operating system (when memory runs out). The next call starts a new life."
        );
        let mut crash = reason(
            ExitStatus::Signaled {
                number: libc::SIGSEGV,
                core_dumped: true,
            },
            Cause::Crash,
        );
        crash.crash_traceback = Some(String::new());
        assert_eq!(
            message(crash, None),
            "Kernel \"k\" (pid 4711, life 2) was ended by SIGSEGV (segmentation fault, core dumped) after 3.4 s: a fault in \
             native code, or a signal that looks like one. The Python stack is in crashTraceback. The next call starts a new life."
        );
        assert_eq!(
            message(reason(killed, Cause::Kill), Some("kill('SIGKILL') was called")),
            "Kernel \"k\" (pid 4711, life 2) was ended by SIGKILL after 3.4 s: kill('SIGKILL') was called. The next call starts \
             a new life."
        );
        assert_eq!(
            message(
                reason(
                    ExitStatus::Unknown {
                        why: "its template is gone".into()
                    },
                    Cause::Unknown
                ),
                None
            ),
            "Kernel \"k\" (pid 4711, life 2) ended, nobody could say how, after 3.4 s: its template is gone. The next call \
             starts a new life."
        );
    }

    #[test]
    fn an_exit_code_above_128_is_not_taken_for_a_signal() {
        assert_eq!(ExitStatus::from_wait(0x8900), ExitStatus::Exited { code: 137 });
        assert_eq!(
            ExitStatus::from_wait(9),
            ExitStatus::Signaled {
                number: 9,
                core_dumped: false
            }
        );
        assert_eq!(
            ExitStatus::from_wait(0x8B),
            ExitStatus::Signaled {
                number: 11,
                core_dumped: true
            }
        );
        assert_eq!(Cause::of_its_own(&ExitStatus::Exited { code: 137 }), Cause::ExitCall);
    }

    #[test]
    fn sizes_read_well() {
        let texts = [
            (512, "512 bytes"),
            (2048, "2 KiB"),
            (99_614_720, "95 MiB"),
            (1_610_612_736, "1.5 GiB"),
        ];
        for (size, text) in texts {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn durations_read_well() {
        let texts = [
            (12, "12 ms"),
            (3_456, "3.4 s"),
            (302_000, "5 min 2 s"),
            (11_220_000, "3 h 7 min"),
        ];
        for (ms, text) in texts {
            assert_eq!(duration(Duration::from_millis(ms)), text);
        }
    }
}
