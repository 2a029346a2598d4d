//! The lifeline: a pipe through which a child dies when the host is gone, by whatever means.
//!
//! Nothing is ever written. The read end is set to raise SIGKILL in the child's whole process group when its last
//! writer closes, and the Linux kernel does that even while the child sits in C code that holds the GIL. Owner and signal
//! belong to the open file description, so every child needs a pipe of its own.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};

/// The host's end. The child lives no longer than this value.
#[derive(Debug)]
pub struct Lifeline(#[expect(dead_code, reason = "held only for the moment it closes")] OwnedFd);

/// Makes a lifeline: what the host keeps, and the read end for the child.
pub fn lifeline() -> io::Result<(Lifeline, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    Ok((Lifeline(write), read))
}

/// Arms the read end for a process group that already exists, from outside it: so there is no moment in which a child that
/// has not yet reached its own code survives the host.
pub fn arm(read: BorrowedFd<'_>, process_group: i32) -> io::Result<()> {
    const F_SETSIG: i32 = 10;
    let fd = read.as_raw_fd();
    // SAFETY: three fcntl calls with integer arguments on a descriptor borrowed for the whole call.
    unsafe {
        check(libc::fcntl(fd, libc::F_SETOWN, -process_group))?;
        check(libc::fcntl(fd, F_SETSIG, libc::SIGKILL))?;
        let flags = libc::fcntl(fd, libc::F_GETFL);
        check(flags)?;
        check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC))
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
