//! The last steps of every end: the rest of the process group is killed, and its absence confirmed.
//!
//! The polite steps before (a shutdown frame, an interrupt, the grace time) belong to whoever knows what the process does.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::pidfd::Pidfd;
use crate::procfs;

/// Kills the whole process group. `held`: see [`Pidfd::signal_group`].
pub fn kill_group(leader: &Pidfd, held: bool) -> io::Result<bool> {
    leader.signal_group(libc::SIGKILL, held)
}

/// Waits until nothing that runs is left of the process group of a leader that has been reaped. False: something is left at
/// the deadline (in an uninterruptible system call, say).
///
/// What SIGKILL has reached is dead within a few scheduler ticks, so the steps are short and the first look comes before any
/// wait. A dead member counts until its adopter reaps it, which an init may never do; so where the group still seems to be
/// there after a moment, procfs is asked for members that are not zombies. That takes a look at every process of the machine,
/// which is why it is not the first thing tried. Signal 0 asks only whether the group exists: nothing is ever hit by it.
pub async fn confirm_group_gone(leader: &Pidfd, limit: Duration) -> bool {
    const STEP: Duration = Duration::from_millis(1);
    const STEPS_BETWEEN_LOOKS: u32 = 4;
    let deadline = Instant::now() + limit;
    for step in 1.. {
        // Where the kernel cannot ask through the pidfd, and the leader is reaped, nobody can be asked: not found.
        if !leader.signal_group(0, false).unwrap_or(false) {
            return true;
        }
        if step % STEPS_BETWEEN_LOOKS == 0 && !procfs::group_has_living_member(leader.pid()) {
            return true;
        }
        if Instant::now() >= deadline {
            break;
        }
        sleep(STEP).await;
    }
    false
}
