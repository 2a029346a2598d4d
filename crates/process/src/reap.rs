//! Taking a child's end in two phases: first its status is read and the zombie kept, then, when nobody will signal the pid
//! any more, it is reaped. Between the two the pid cannot be reused.

use std::io;
use std::os::fd::AsRawFd;

use crate::pidfd::Pidfd;
use crate::procfs::Stat;
use crate::usage::ResourceUsage;

/// What the operating system says of an end, or why nobody could say it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitStatus {
    Exited { code: i32 },
    Signaled { number: i32, core_dumped: bool },
    Unknown { why: String },
}

impl ExitStatus {
    /// Decodes a status as `waitpid` reports it.
    pub fn from_wait(status: i32) -> Self {
        if libc::WIFSIGNALED(status) {
            Self::Signaled {
                number: libc::WTERMSIG(status),
                core_dumped: libc::WCOREDUMP(status),
            }
        } else {
            Self::Exited {
                code: libc::WEXITSTATUS(status),
            }
        }
    }
}

/// Reads the status of an own child that has ended and keeps the zombie. `Ok(None)`: it is still running.
pub fn peek(child: &Pidfd) -> io::Result<Option<ExitStatus>> {
    wait(child, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT).map(|end| end.map(|(status, _)| status))
}

/// Reaps an own child that has ended; its pid is free from here on. `Ok(None)`: it is still running.
///
/// Linux counts the memory of the process that spawned a child into the child's largest resident size, because the child
/// shared it until its `exec`. `inherited_peak`, the host's own peak at the spawn, tells whether the figure is the child's.
pub fn reap(child: &Pidfd, inherited_peak: u64) -> io::Result<Option<ResourceUsage>> {
    let end = wait(child, libc::WEXITED | libc::WNOHANG)?;
    Ok(end.map(|(_, usage)| ResourceUsage {
        max_rss_bytes: usage.max_rss_bytes.filter(|peak| *peak > inherited_peak),
        ..usage
    }))
}

/// Reads the status of somebody else's child that has ended and that nobody has reaped, from procfs. `None` once it is reaped,
/// and when procfs hides it.
pub fn read_zombie(process: &Pidfd) -> Option<ExitStatus> {
    let status = Stat::read(process.pid())
        .filter(Stat::is_zombie)
        .map(|stat| stat.exit_status);
    // Still the owner of its pid afterwards: so what was read was about it.
    status.filter(|_| process.owns_pid())
}

fn wait(child: &Pidfd, options: i32) -> io::Result<Option<(ExitStatus, ResourceUsage)>> {
    // SAFETY: both are plain C structures for which all-zero is a valid value.
    let (mut info, mut usage): (libc::siginfo_t, libc::rusage) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    loop {
        // SAFETY: the raw call, because glibc's wrapper has no rusage; all pointers are valid for the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_waitid,
                libc::P_PIDFD,
                child.as_raw_fd(),
                &raw mut info,
                options,
                &raw mut usage,
            )
        };
        if result == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: `waitid` filled the SIGCHLD fields in, or left them zero when there was nothing to report.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    let status = match info.si_code {
        libc::CLD_EXITED => ExitStatus::Exited { code: status },
        code => ExitStatus::Signaled {
            number: status,
            core_dumped: code == libc::CLD_DUMPED,
        },
    };
    Ok(Some((status, ResourceUsage::from(&usage))))
}
