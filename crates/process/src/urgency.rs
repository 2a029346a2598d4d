//! A turn on the CPU before everybody else's, for work that others must not be able to hold up.
//!
//! Owns the scheduling of the calling thread for a while; knows nothing of what it is for.

use std::marker::PhantomData;

/// As long as this lives, the calling thread runs before all ordinary ones, where it may (`CAP_SYS_NICE`, or `RLIMIT_RTPRIO`);
/// elsewhere nothing changes. Only for work that is bounded.
///
/// A nice value would not do: each session can have a share of the CPU of its own (`sched_autogroup_enabled`), and only within
/// that one does a nice value count.
pub struct Urgent {
    before: Option<(libc::c_int, libc::sched_param)>,
    /// It is about the thread that made it.
    not_send: PhantomData<*const ()>,
}

impl Urgent {
    pub fn begin() -> Self {
        let ordinary = ordinary_scheduling();
        let urgent = libc::sched_param { sched_priority: 1 };
        Self {
            before: ordinary.filter(|_| schedule(libc::SCHED_RR, urgent)),
            not_send: PhantomData,
        }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if let Some((policy, param)) = self.before {
            schedule(policy, param);
        }
    }
}

/// How the calling thread is scheduled; `None` where its owner has already given it more than others have.
fn ordinary_scheduling() -> Option<(libc::c_int, libc::sched_param)> {
    // SAFETY: it takes no pointer, and 0 is the calling thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    matches!(policy, libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE)
        .then_some((policy, libc::sched_param { sched_priority: 0 }))
}

fn schedule(policy: libc::c_int, param: libc::sched_param) -> bool {
    // SAFETY: `param` is valid for the call, which keeps no pointer to it; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const param) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> libc::c_int {
        // SAFETY: as above.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn a_thread_is_as_it_was_once_the_work_is_done() {
        let before = policy();
        let urgent = Urgent::begin();
        let may = urgent.before.is_some();
        assert_eq!(policy(), if may { libc::SCHED_RR } else { before });
        drop(urgent);
        assert_eq!(policy(), before);
    }
}
