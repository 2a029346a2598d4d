//! The limits of a kernel that Linux does not keep by itself: what its whole process tree takes is looked at now and then.
//! Pure: what was seen goes in, what is to be done comes out.

use std::time::Duration;

use kernelhost_process::exit_reason::{Cause, ExitStatus, bytes};
use kernelhost_process::process_tree::Size;
use kernelhost_process::usage::ResourceUsage;

use crate::options::Limits;

/// Between two looks while a cell runs.
const LOOK_RUNNING: Duration = Duration::from_millis(200);
/// The same while none does: what is there already may still grow.
const LOOK_IDLE: Duration = Duration::from_secs(1);
/// The share of the memory limit at which a warning is due, and the one below which the next may come, in per cent.
const WARN_AT: u64 = 90;
const WARN_AGAIN_BELOW: u64 = 80;
/// What part of the limit a process that is alone may have beyond it.
const ROOM: u64 = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    Nothing,
    Warning(String),
    End {
        cause: Cause,
        detail: String,
        evidence: Vec<String>,
    },
}

/// Keeps the limits of one life.
#[derive(Debug)]
pub struct Watch {
    limits: Limits,
    warned: bool,
}

impl Watch {
    /// `None`: none of the limits needs a look.
    pub fn new(limits: &Limits) -> Option<Self> {
        (limits.memory_bytes.is_some() || limits.processes.is_some()).then(|| Self {
            limits: limits.clone(),
            warned: false,
        })
    }

    pub fn pause(running: bool) -> Duration {
        if running { LOOK_RUNNING } else { LOOK_IDLE }
    }

    /// More processes than this are stopped where they are found.
    pub fn most_processes(&self) -> u32 {
        self.limits.processes.unwrap_or(u32::MAX)
    }

    /// From here on the exact size of the tree is worth its price.
    pub fn exact_from(&self) -> u64 {
        self.limits
            .memory_bytes
            .map_or(u64::MAX, |limit| limit / 100 * WARN_AGAIN_BELOW)
    }

    pub fn judge(&mut self, seen: &Size) -> Judgement {
        if let Some(limit) = self.limits.processes
            && seen.processes > limit
        {
            return Judgement::End {
                cause: Cause::ProcessLimit,
                detail: format!(
                    "it had {} processes, itself included, and its limit is {limit} (limits.processes)",
                    seen.processes
                ),
                evidence: vec![format!("{} processes of its tree were counted", seen.processes)],
            };
        }
        let Some(limit) = self.limits.memory_bytes else {
            return Judgement::Nothing;
        };
        // Of a process alone Linux keeps the limit, stack and shared memory aside: it gets its MemoryError, and a little room.
        let room = if seen.processes == 1 { limit / ROOM } else { 0 };
        if seen.memory_bytes > limit + room {
            return Judgement::End {
                cause: Cause::MemoryLimit,
                detail: format!(
                    "it and what it had started took {} of memory, and its limit is {} (limits.memoryBytes)",
                    bytes(seen.memory_bytes),
                    bytes(limit)
                ),
                evidence: vec![format!(
                    "the {} processes of its tree had {} bytes resident",
                    seen.processes, seen.memory_bytes
                )],
            };
        }
        let used = seen.memory_bytes.max(seen.data_bytes);
        if used >= limit / 100 * WARN_AT && !self.warned {
            self.warned = true;
            return Judgement::Warning(format!(
                "{} of its memory limit of {} (limits.memoryBytes). What it asks for beyond that fails with a MemoryError; if \
                 the processes it has started take more, it is ended.",
                bytes(used),
                bytes(limit)
            ));
        }
        if used < limit / 100 * WARN_AGAIN_BELOW {
            self.warned = false;
        }
        Judgement::Nothing
    }
}

/// Whether a life has used up its CPU time: Linux ends it with SIGXCPU, or with SIGKILL if it did not heed that.
pub fn cpu_time_is_up(limits: &Limits, status: &ExitStatus, usage: Option<&ResourceUsage>) -> Option<(String, String)> {
    let limit = limits.cpu_seconds?;
    let ExitStatus::Signaled { number, .. } = status else {
        return None;
    };
    let used = usage.map(|usage| usage.user_ms + usage.system_ms);
    // The limit counts whole ticks; the usage counts what the process had of them, which is less where a busy hypervisor takes a
    // part of each. Either signal may come from somebody else, but hardly anybody sends SIGXCPU.
    let limit_ms = limit * 1000;
    let is_limit = match *number {
        libc::SIGXCPU => used.is_none_or(|used| used * 2 >= limit_ms),
        libc::SIGKILL => used.is_some_and(|used| used + 100 >= limit_ms),
        _ => false,
    };
    let told = used.map_or_else(String::new, |used| format!(" after {used} ms of CPU time"));
    is_limit.then(|| {
        (
            format!("it has used up its CPU time of {limit} s (limits.cpuSeconds)"),
            format!("the wait status is signal {number}{told}, and this host sent none"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(memory_bytes: Option<u64>, processes: Option<u32>) -> Watch {
        let limits = Limits {
            memory_bytes,
            processes,
            ..Limits::default()
        };
        Watch { limits, warned: false }
    }

    fn seen(processes: u32, memory_bytes: u64, data_bytes: u64) -> Size {
        Size {
            processes,
            memory_bytes,
            data_bytes,
        }
    }

    #[test]
    fn a_warning_comes_once_until_the_memory_has_been_given_back() {
        let mut watch = watch(Some(1000), None);
        let mut kinds = String::new();
        for used in [100, 899, 900, 950, 1000, 850, 920, 700, 900] {
            kinds.push(match watch.judge(&seen(1, used, 0)) {
                Judgement::Nothing => '.',
                Judgement::Warning(_) => 'w',
                Judgement::End { .. } => 'e',
            });
        }
        assert_eq!(kinds, "..w.....w");
        assert!(matches!(
            self::watch(Some(1000), None).judge(&seen(1, 0, 900)),
            Judgement::Warning(_)
        ));
    }

    #[test]
    fn what_is_over_its_limit_is_ended_for_that() {
        let cause = |judgement| match judgement {
            Judgement::End { cause, .. } => Some(cause),
            _ => None,
        };
        assert_eq!(
            cause(watch(Some(1000), None).judge(&seen(2, 1001, 0))),
            Some(Cause::MemoryLimit)
        );
        assert_eq!(
            cause(watch(Some(1000), None).judge(&seen(2, 1000, 5000))),
            None,
            "MemoryError is told by Python"
        );
        assert_eq!(cause(watch(Some(1000), None).judge(&seen(1, 1100, 0))), None);
        assert_eq!(
            cause(watch(Some(1000), None).judge(&seen(1, 1200, 0))),
            Some(Cause::MemoryLimit)
        );
        assert_eq!(cause(watch(None, Some(3)).judge(&seen(3, 0, 0))), None);
        assert_eq!(
            cause(watch(None, Some(3)).judge(&seen(4, 0, 0))),
            Some(Cause::ProcessLimit)
        );
        assert!(
            Watch::new(&Limits {
                open_files: Some(64),
                ..Limits::default()
            })
            .is_none()
        );
    }

    #[test]
    fn cpu_time_is_told_from_other_kills() {
        let limits = Limits {
            cpu_seconds: Some(2),
            ..Limits::default()
        };
        let killed = |number| ExitStatus::Signaled {
            number,
            core_dumped: false,
        };
        let usage = |user_ms| ResourceUsage {
            user_ms,
            ..ResourceUsage::default()
        };
        assert!(cpu_time_is_up(&limits, &killed(libc::SIGXCPU), None).is_some());
        assert!(cpu_time_is_up(&limits, &killed(libc::SIGXCPU), Some(&usage(10))).is_none());
        // A third of its ticks was taken by others.
        assert!(cpu_time_is_up(&limits, &killed(libc::SIGXCPU), Some(&usage(1400))).is_some());
        assert!(cpu_time_is_up(&limits, &killed(libc::SIGKILL), Some(&usage(2000))).is_some());
        assert!(cpu_time_is_up(&limits, &killed(libc::SIGKILL), Some(&usage(500))).is_none());
        assert!(cpu_time_is_up(&limits, &ExitStatus::Exited { code: 1 }, Some(&usage(9000))).is_none());
        assert!(cpu_time_is_up(&Limits::default(), &killed(libc::SIGXCPU), None).is_none());
    }
}
