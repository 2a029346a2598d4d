//! Real children: spawned, signalled, reaped in two phases.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::time::Duration;

use kernelhost_process::exit_reason::ExitStatus;
use kernelhost_process::lifeline::{arm, lifeline};
use kernelhost_process::pidfd::Pidfd;
use kernelhost_process::reap::{peek, read_zombie, reap};
use kernelhost_process::spawn::{Program, SpawnError, spawn};
use kernelhost_process::terminate::{confirm_group_gone, kill_group};
use rustix::pipe::{PipeFlags, pipe_with};

fn sh(script: &str, descriptors: &[std::os::fd::BorrowedFd<'_>]) -> Pidfd {
    let environment = [
        ("PATH".to_owned(), "/usr/bin:/bin".to_owned()),
        ("GIVEN".to_owned(), "yes".to_owned()),
    ];
    spawn(&Program {
        path: "/bin/sh",
        arguments: &["-c", script],
        environment: &environment,
        descriptors,
    })
    .unwrap()
}

fn ended(child: &Pidfd) -> ExitStatus {
    let mut poll = [rustix::event::PollFd::new(child, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(
        rustix::event::poll(&mut poll, Some(&limit)).unwrap(),
        1,
        "the child did not end in time"
    );
    peek(child).unwrap().unwrap()
}

#[test]
fn a_child_has_its_environment_its_descriptors_and_its_session_and_nothing_else() {
    let null = File::open("/dev/null").unwrap();
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let child = sh(
        "env | sort; ls /proc/$$/fd | tr '\\n' ' '; ps -o pgid=,sid= -p $$",
        &[null.as_fd(), write.as_fd(), null.as_fd()],
    );
    drop(write);
    let mut output = String::new();
    File::from(read).read_to_string(&mut output).unwrap();
    assert_eq!(ended(&child), ExitStatus::Exited { code: 0 });
    let pid = child.pid();
    assert!(output.contains("GIVEN=yes") && !output.contains("HOME="), "{output}");
    assert!(output.contains("\n0 1 2 "), "{output}");
    let ids: Vec<&str> = output
        .lines()
        .last()
        .unwrap()
        .split_whitespace()
        .rev()
        .take(2)
        .collect();
    assert_eq!(ids, [pid.to_string(), pid.to_string()], "{output}");
    reap(&child, 0).unwrap().unwrap();
}

#[test]
fn an_end_is_seen_while_the_zombie_keeps_the_pid() {
    let null = File::open("/dev/null").unwrap();
    let child = sh("exit 137", &[null.as_fd(), null.as_fd(), null.as_fd()]);
    assert_eq!(ended(&child), ExitStatus::Exited { code: 137 });
    assert_eq!(peek(&child).unwrap(), Some(ExitStatus::Exited { code: 137 }));
    assert_eq!(read_zombie(&child), Some(ExitStatus::Exited { code: 137 }));
    assert!(reap(&child, 0).unwrap().unwrap().max_rss_bytes > Some(0));
    assert_eq!(read_zombie(&child), None);
    assert!(
        !child.signal(libc::SIGKILL).unwrap(),
        "a reaped child can no longer be signalled"
    );
}

#[test]
fn the_memory_of_the_host_is_not_taken_for_the_childs() {
    let null = File::open("/dev/null").unwrap();
    let ballast = vec![1_u8; 64 * 1024 * 1024];
    let peak = kernelhost_process::usage::own_peak();
    assert!(peak > ballast.len() as u64);
    let child = sh("exit 0", &[null.as_fd(), null.as_fd(), null.as_fd()]);
    ended(&child);
    assert_eq!(reap(&child, peak).unwrap().unwrap().max_rss_bytes, None);
    drop(ballast);
}

#[tokio::test(flavor = "current_thread")]
async fn the_group_is_killed_with_its_leader_or_without_it() {
    let null = File::open("/dev/null").unwrap();
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let child = sh(
        "sleep 600 & sleep 600 & exit 3",
        &[null.as_fd(), write.as_fd(), null.as_fd()],
    );
    drop(write);
    assert_eq!(ended(&child), ExitStatus::Exited { code: 3 });
    assert!(kill_group(&child, true).unwrap());
    reap(&child, 0).unwrap().unwrap();
    assert!(confirm_group_gone(&child, Duration::from_secs(5)).await);
    // The sleepers held the pipe: its end of file is their end.
    assert_eq!(File::from(read).read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_child_and_its_children_die_with_the_lifeline() {
    let null = File::open("/dev/null").unwrap();
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (keeper, end) = lifeline().unwrap();
    let child = sh(
        "trap '' TERM INT HUP; sleep 600 & wait; sleep 600",
        &[null.as_fd(), write.as_fd(), null.as_fd(), end.as_fd()],
    );
    drop(write);
    arm(end.as_fd(), child.pid()).unwrap();
    drop(end);
    assert_eq!(peek(&child).unwrap(), None);
    drop(keeper);
    assert_eq!(
        ended(&child),
        ExitStatus::Signaled {
            number: libc::SIGKILL,
            core_dumped: false
        }
    );
    assert_eq!(File::from(read).read(&mut [0]).unwrap(), 0);
    reap(&child, 0).unwrap().unwrap();
}

#[test]
fn a_program_that_cannot_run_says_which_and_why() {
    let null = File::open("/dev/null").unwrap();
    let descriptors = [null.as_fd(), null.as_fd(), null.as_fd()];
    for (path, errno) in [
        ("/no/such/python", libc::ENOENT),
        ("/", libc::EACCES),
        ("/etc/passwd", libc::EACCES),
    ] {
        match spawn(&Program {
            path,
            arguments: &[],
            environment: &[],
            descriptors: &descriptors,
        }) {
            Err(SpawnError::Refused { path: named, error }) => {
                assert_eq!((named.as_str(), error.raw_os_error()), (path, Some(errno)));
            }
            other => panic!("{path}: {other:?}"),
        }
    }
}
