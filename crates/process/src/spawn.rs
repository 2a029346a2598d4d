//! Spawning a program with an exact environment, exactly the descriptors it is given, and a session of its own.
//!
//! `posix_spawn` and not `fork`: the host is a large process with many threads, and a fork would copy its page tables and
//! stop it meanwhile.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use rustix::io::fcntl_dupfd_cloexec;

use crate::pidfd::Pidfd;

/// `POSIX_SPAWN_SETSID`, glibc 2.26; the libc crate types it differently from one platform to the next.
const SETSID: i16 = 0x80;

/// A program to run.
pub struct Program<'a> {
    pub path: &'a str,
    pub arguments: &'a [&'a str],
    pub environment: &'a [(String, String)],
    /// Descriptors of the child: the first becomes 0, the next 1, and so on. It has no other: what somebody in this process has
    /// open without close-on-exec is closed by the spawn where glibc can (2.34), and by the Python side where it cannot.
    pub descriptors: &'a [BorrowedFd<'a>],
}

/// Why a program could not be run.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("{what} holds a NUL byte")]
    NulByte { what: &'static str },
    #[error("{path} cannot be run: {}", reason(path, error))]
    Refused { path: String, error: io::Error },
    #[error("the descriptors of {path} could not be prepared: {}", reason(path, error))]
    Descriptors { path: String, error: io::Error },
}

impl SpawnError {
    /// Whether another interpreter would help.
    pub fn is_about_the_program(&self) -> bool {
        match self {
            Self::Refused { error, .. } => exhausted(error).is_none(),
            Self::NulByte { .. } => true,
            Self::Descriptors { .. } => false,
        }
    }
}

fn reason(path: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOENT) if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) => {
            "it is a link to a file that does not exist (ENOENT)".to_owned()
        }
        // Also said of a script whose interpreter is missing.
        Some(libc::ENOENT) if std::path::Path::new(path).exists() => {
            "the program that its first line names does not exist (ENOENT)".to_owned()
        }
        Some(libc::ENOENT) => "there is no such file (ENOENT)".to_owned(),
        Some(libc::EACCES) if std::path::Path::new(path).is_dir() => "it is a directory (EACCES)".to_owned(),
        Some(libc::EACCES) => "it may not be executed (EACCES)".to_owned(),
        Some(libc::ENOEXEC) => "it is neither a program nor a script with a #! line (ENOEXEC)".to_owned(),
        _ => exhausted(error).map_or_else(|| error.to_string(), str::to_owned),
    }
}

/// What the system, or this process, has run out of, when that is what the error says.
pub fn exhausted(error: &io::Error) -> Option<&'static str> {
    Some(match error.raw_os_error()? {
        libc::EAGAIN => "the limit of processes is reached (EAGAIN: RLIMIT_NPROC, or the cgroup's pids.max)",
        libc::EMFILE => "this process has reached its limit of open files (EMFILE: RLIMIT_NOFILE)",
        libc::ENFILE => "the system has reached its limit of open files (ENFILE)",
        libc::ENOMEM => "there is not enough memory (ENOMEM)",
        _ => return None,
    })
}

/// Runs a program as the leader of a new session and process group, with default signal dispositions and nothing blocked.
pub fn spawn(program: &Program<'_>) -> Result<Pidfd, SpawnError> {
    let path = nul_terminated(program.path, "the interpreter's path")?;
    let mut arguments = vec![path.clone()];
    for argument in program.arguments {
        arguments.push(nul_terminated(argument, "an argument")?);
    }
    let mut environment = Vec::with_capacity(program.environment.len());
    for (name, value) in program.environment {
        environment.push(nul_terminated(&format!("{name}={value}"), "the environment")?);
    }
    let descriptors = out_of_the_way(program.descriptors).map_err(|error| SpawnError::Descriptors {
        path: program.path.to_owned(),
        error,
    })?;
    let refused = |error| SpawnError::Refused {
        path: program.path.to_owned(),
        error,
    };
    // Kept free for the pidfd: a child that could not be held would have to be ended again.
    let place = descriptors
        .first()
        .map(OwnedFd::try_clone)
        .transpose()
        .map_err(refused)?;
    let pid = posix_spawn(&path, &arguments, &environment, &descriptors).map_err(refused)?;
    drop(place);
    // Nobody but us reaps this child, so its pid is still its own.
    Pidfd::open(pid).map_err(|error| {
        end_at_once(pid);
        refused(error)
    })
}

#[expect(
    clippy::disallowed_methods,
    reason = "an own child that nobody else knows of and nobody has reaped"
)]
fn end_at_once(child: i32) {
    // SAFETY: plain integers, and a null pointer for the status, which is allowed.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, ptr::null_mut(), 0);
    }
}

fn nul_terminated(text: &str, what: &'static str) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|_| SpawnError::NulByte { what })
}

/// Copies of the descriptors with numbers that none of the targets has, so that no `dup2` overwrites a source.
fn out_of_the_way(descriptors: &[BorrowedFd<'_>]) -> io::Result<Vec<OwnedFd>> {
    let least = RawFd::try_from(descriptors.len()).unwrap_or(RawFd::MAX);
    descriptors
        .iter()
        .map(|fd| Ok(fcntl_dupfd_cloexec(fd.as_fd(), least)?))
        .collect()
}

fn posix_spawn(path: &CString, arguments: &[CString], environment: &[CString], fds: &[OwnedFd]) -> io::Result<i32> {
    let pointers = |strings: &[CString]| -> Vec<*mut libc::c_char> {
        strings
            .iter()
            .map(|string| string.as_ptr().cast_mut())
            .chain([ptr::null_mut()])
            .collect()
    };
    let (argv, envp) = (pointers(arguments), pointers(environment));
    let mut pid = 0;
    let close_from = add_close_from();
    // SAFETY: `actions` and `attributes` are initialised before use and destroyed after; the pointer arrays end with null and
    // outlive the call, as do the strings they point to; the descriptors are open.
    unsafe {
        let mut actions = std::mem::zeroed::<libc::posix_spawn_file_actions_t>();
        let mut attributes = std::mem::zeroed::<libc::posix_spawnattr_t>();
        check(libc::posix_spawn_file_actions_init(&raw mut actions))?;
        if let Err(error) = check(libc::posix_spawnattr_init(&raw mut attributes)) {
            libc::posix_spawn_file_actions_destroy(&raw mut actions);
            return Err(error);
        }
        let result = (|| {
            for (target, fd) in fds.iter().enumerate() {
                let target = i32::try_from(target).unwrap_or(i32::MAX);
                check(libc::posix_spawn_file_actions_adddup2(
                    &raw mut actions,
                    fd.as_raw_fd(),
                    target,
                ))?;
            }
            if let Some(add_close_from) = close_from {
                let first = i32::try_from(fds.len()).unwrap_or(i32::MAX);
                check(add_close_from(&raw mut actions, first))?;
            }
            let mut signals = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut signals);
            check(libc::posix_spawnattr_setsigmask(
                &raw mut attributes,
                &raw const signals,
            ))?;
            libc::sigfillset(&raw mut signals);
            check(libc::posix_spawnattr_setsigdefault(
                &raw mut attributes,
                &raw const signals,
            ))?;
            let masks = i16::try_from(libc::POSIX_SPAWN_SETSIGMASK | libc::POSIX_SPAWN_SETSIGDEF).unwrap_or(0);
            check(libc::posix_spawnattr_setflags(&raw mut attributes, masks | SETSID))?;
            check(libc::posix_spawn(
                &raw mut pid,
                path.as_ptr(),
                &raw const actions,
                &raw const attributes,
                argv.as_ptr(),
                envp.as_ptr(),
            ))
        })();
        libc::posix_spawn_file_actions_destroy(&raw mut actions);
        libc::posix_spawnattr_destroy(&raw mut attributes);
        result?;
    }
    Ok(pid)
}

type AddCloseFrom = unsafe extern "C" fn(*mut libc::posix_spawn_file_actions_t, libc::c_int) -> libc::c_int;

/// Looked up at run time, so that the addon also loads where glibc is older.
fn add_close_from() -> Option<AddCloseFrom> {
    // SAFETY: a lookup by a NUL-terminated name; the pointer is null or the function, whose type `AddCloseFrom` states.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"posix_spawn_file_actions_addclosefrom_np".as_ptr());
        (!found.is_null()).then(|| std::mem::transmute::<*mut libc::c_void, AddCloseFrom>(found))
    }
}

/// The `posix_spawn` family returns the error instead of setting errno.
fn check(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(result))
    }
}
