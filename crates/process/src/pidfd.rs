//! A process, held by a pidfd: the one handle that can never come to mean another process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::reap::ExitStatus;

/// `PIDFD_SIGNAL_PROCESS_GROUP`, Linux 6.9.
const SIGNAL_PROCESS_GROUP: libc::c_uint = 1 << 2;
/// `PIDFD_GET_INFO`, Linux 6.13: `_IOWR(0xFF, 11, struct pidfd_info)` with the first published size, 64 bytes.
const GET_INFO: libc::c_ulong = 0xC040_FF0B;
/// `PIDFD_INFO_EXIT`, Linux 6.15.
const INFO_EXIT: u64 = 1 << 3;

/// A process, and the pid that it has as long as it is not reaped.
#[derive(Debug)]
pub struct Pidfd {
    fd: OwnedFd,
    pid: i32,
}

/// `struct pidfd_info` of `linux/pidfd.h`, first version.
#[repr(C)]
#[derive(Default)]
struct Info {
    mask: u64,
    cgroup_id: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    ids: [u32; 8],
    exit_code: i32,
}

impl Pidfd {
    /// Opens a process that cannot be reaped meanwhile: an own child, or a child of a template that still holds it.
    pub fn open(pid: i32) -> io::Result<Self> {
        let target = Pid::from_raw(pid).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        Ok(Self {
            fd: pidfd_open(target, PidfdFlags::empty())?,
            pid,
        })
    }

    /// Takes a pidfd that came over a socket together with its pid.
    pub fn received(fd: OwnedFd, pid: i32) -> Self {
        Self { fd, pid }
    }

    /// Registers it with the running tokio runtime: it becomes readable when the process has ended.
    pub fn watched(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the raw descriptor comes from an `OwnedFd` that this value owns and never replaces, so it stays open and the
        // same for as long as the registration.
        Ok(unsafe { AsyncFd::register_with_interest(self, Interest::READABLE) }?)
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether the process has ended (reaped or not). Never blocks.
    pub fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd, and a time-out of zero.
        unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
    }

    /// Signals the process itself. `Ok(false)`: it had ended already.
    pub fn signal(&self, number: i32) -> io::Result<bool> {
        self.send(number, 0)
    }

    /// Signals every process of the group that this process leads or led. `Ok(false)`: the group is empty.
    ///
    /// `held` says that whoever reaps the process has not reaped it and will not without our word, so that its pid still
    /// names its group. Before Linux 6.9 that is the only way to reach the rest of a group whose leader has ended.
    pub fn signal_group(&self, number: i32, held: bool) -> io::Result<bool> {
        match self.send(number, SIGNAL_PROCESS_GROUP) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
                if held || !self.has_ended() {
                    self.signal_group_by_number(number)
                } else {
                    Ok(false)
                }
            }
            done => done,
        }
    }

    fn send(&self, number: i32, flags: libc::c_uint) -> io::Result<bool> {
        // SAFETY: no siginfo is passed (a null pointer is the documented way), all else are integers.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.fd.as_raw_fd(),
                number,
                std::ptr::null::<u8>(),
                flags,
            )
        };
        outcome(result)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the caller has shown that the pid is not free for reuse"
    )]
    fn signal_group_by_number(&self, number: i32) -> io::Result<bool> {
        // SAFETY: plain integers.
        outcome(i64::from(unsafe { libc::kill(-self.pid, number) }))
    }

    /// Whether the pid still names this process: it is running, or a zombie that nobody has reaped.
    pub fn owns_pid(&self) -> bool {
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd())).unwrap_or_default();
        let pid = about.lines().find_map(|line| line.strip_prefix("Pid:"));
        pid.is_some_and(|pid| pid.trim().parse() == Ok(self.pid))
    }

    /// How the process ended, from the kernel's own record of a process that was reaped by somebody else.
    /// `None` before Linux 6.15, and while it is not reaped.
    pub fn recorded_status(&self) -> Option<ExitStatus> {
        let mut info = Info {
            mask: INFO_EXIT,
            ..Info::default()
        };
        // SAFETY: `Info` has the layout and the size that the request number carries; the kernel writes within it.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), GET_INFO, &raw mut info) };
        (result == 0 && info.mask & INFO_EXIT != 0).then(|| ExitStatus::from_wait(info.exit_code))
    }
}

fn outcome(result: i64) -> io::Result<bool> {
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) {
        Ok(false)
    } else {
        Err(error)
    }
}

impl AsFd for Pidfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Pidfd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
