//! Templates that misbehave: real processes (shell scripts that pose as an interpreter), and the real Python side where one is
//! to be had.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kernelhost_forkserver::client::{ForkError, LifeEnd, TemplateError};
use kernelhost_forkserver::profile::Profile;
use kernelhost_forkserver::protocol::{Configuration, PROTOCOL, Shell, payload};
use kernelhost_forkserver::template::{TemplateEvent, Templates};
use kernelhost_process::exit_reason::{Cause, ExitStatus};
use kernelhost_process::marker::HostMark;
use kernelhost_process::out_of_memory::{Finding, Witness};
use kernelhost_process::pidfd::Pidfd;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

const LIMIT: Duration = Duration::from_secs(20);

struct Stand {
    templates: Arc<Templates>,
    events: mpsc::UnboundedReceiver<TemplateEvent>,
    environment: Vec<(String, String)>,
}

/// Says of everybody what it was told to say.
struct Says(bool);

impl Witness for Says {
    fn began(self: Arc<Self>, _pid: i32) {}

    fn finding(&self, pid: i32) -> Pin<Box<dyn Future<Output = Finding> + Send + '_>> {
        let evidence = vec![format!("asked about {pid}")];
        let out_of_memory = self.0;
        Box::pin(async move {
            Finding {
                out_of_memory,
                evidence,
            }
        })
    }

    fn ended(&self, _pid: i32) {}
}

fn stand() -> Stand {
    stand_with(Says(false))
}

fn stand_with(witness: Says) -> Stand {
    let (sender, events) = mpsc::unbounded_channel();
    let boot = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/boot.py");
    let templates = Templates::new(
        boot.to_str().unwrap().to_owned(),
        HostMark::new().of_servant(),
        Arc::new(witness),
        move |event| {
            sender.send(event).ok();
        },
    );
    let path = ("PATH".to_owned(), std::env::var("PATH").unwrap());
    Stand {
        templates,
        events,
        environment: vec![path],
    }
}

impl Stand {
    fn profile(&self, interpreter: &str) -> Profile {
        Profile::new(interpreter, Shell::Plain, &[], &self.environment)
    }

    async fn refusal(&self, interpreter: &str, limit: Duration) -> TemplateError {
        self.templates
            .acquire(&self.profile(interpreter), &self.environment, limit)
            .await
            .unwrap_err()
    }
}

fn script(name: &str, text: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("kernelhost-{}-{name}", std::process::id()));
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// An interpreter that can run the Python side, if this machine has one.
fn python() -> Option<String> {
    let output = std::process::Command::new("python3")
        .args([
            "-c",
            "import sys; print(sys.executable if sys.version_info >= (3, 10) else '')",
        ])
        .output()
        .ok()?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|path| !path.is_empty())
}

fn configuration(environment: &[(String, String)]) -> Vec<u8> {
    payload(&Configuration {
        functions: &[],
        input: false,
        protocol: PROTOCOL,
        generation: 1,
        cwd: None,
        env: environment,
        shell: Shell::Plain,
        init: None,
        restore_from: None,
        limits: kernelhost_forkserver::protocol::Rlimits::default(),
        oom_score_adj: None,
    })
}

/// Six descriptors for a life that nobody will speak to. The other ends are returned, to be kept open.
fn wires() -> (Vec<std::os::fd::OwnedFd>, Vec<std::os::fd::OwnedFd>) {
    (0..6)
        .map(|wire| {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            if wire < 2 { (write, read) } else { (read, write) }
        })
        .unzip()
}

#[tokio::test(flavor = "current_thread")]
async fn an_interpreter_that_leaves_is_told_with_its_code_and_its_words() {
    let path = script("leaves", "echo out of order >&2; exit 7");
    let error = stand().refusal(path.to_str().unwrap(), LIMIT).await;
    let TemplateError::Ended(exit) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (exit.status.clone(), exit.cause),
        (ExitStatus::Exited { code: 7 }, Cause::StartFailed)
    );
    assert!(
        error.to_string().contains("exited with code 7") && error.to_string().contains("out of order"),
        "{error}"
    );
    fs::remove_file(path).unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn an_interpreter_that_never_answers_is_ended_at_the_deadline() {
    let path = script("sleeps", "exec sleep 600");
    let began = Instant::now();
    let error = stand()
        .refusal(path.to_str().unwrap(), Duration::from_millis(200))
        .await;
    assert!(matches!(error, TemplateError::TimedOut { .. }), "{error:?}");
    assert!(began.elapsed() < LIMIT);
    fs::remove_file(path).unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn a_failure_is_remembered_for_a_while_and_one_start_serves_all_who_wait() {
    let count = std::env::temp_dir().join(format!("kernelhost-{}-count", std::process::id()));
    let path = script("counts", &format!("echo x >> {}; exit 1", count.display()));
    let stand = stand();
    let interpreter = path.to_str().unwrap();
    let (first, second) = tokio::join!(stand.refusal(interpreter, LIMIT), stand.refusal(interpreter, LIMIT));
    let third = stand.refusal(interpreter, LIMIT).await;
    assert_eq!(first.to_string(), second.to_string());
    assert_eq!(first.to_string(), third.to_string());
    assert_eq!(fs::read_to_string(&count).unwrap(), "x\n");
    fs::remove_file(path).unwrap();
    fs::remove_file(count).unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn garbage_on_the_control_socket_is_a_broken_format_and_ends_the_process() {
    let path = script(
        "garbage",
        "printf 'no frame at all, but long enough for a header' >&3; exec sleep 600",
    );
    let error = stand().refusal(path.to_str().unwrap(), LIMIT).await;
    assert!(matches!(error, TemplateError::Frame(_)), "{error:?}");
    fs::remove_file(path).unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn a_fork_is_reported_reaped_in_two_phases_and_the_template_ends_with_its_host() {
    let Some(python) = python() else { return };
    let mut stand = stand();
    let profile = stand.profile(&python);
    let warm = stand
        .templates
        .acquire(&profile, &stand.environment, LIMIT)
        .await
        .unwrap();
    assert!(matches!(stand.events.recv().await, Some(TemplateEvent::Ready(_))));

    let (theirs, _ours) = wires();
    let deadline = Instant::now() + LIMIT;
    let (pidfd, mut life) = warm
        .template
        .fork(configuration(&stand.environment), theirs, deadline)
        .await
        .unwrap();
    assert!(life.holds_pid() && pidfd.owns_pid());
    pidfd.signal(libc::SIGKILL).unwrap();
    let killed = ExitStatus::Signaled {
        number: libc::SIGKILL,
        core_dumped: false,
    };
    assert_eq!(life.end(deadline).await, LifeEnd::Reported(killed));
    assert!(pidfd.owns_pid(), "the zombie keeps the pid until it is released");
    assert!(life.release(deadline).await.unwrap().max_rss_bytes > Some(0));
    assert!(!pidfd.owns_pid());

    // A life that is dropped is ended by the template.
    let (theirs, _ours) = wires();
    let (pidfd, life) = warm
        .template
        .fork(configuration(&stand.environment), theirs, deadline)
        .await
        .unwrap();
    let pidfd = pidfd.watched().unwrap();
    drop(life);
    timeout(LIMIT, pidfd.readable()).await.unwrap().unwrap().retain_ready();

    drop(warm);
    timeout(LIMIT, stand.templates.close()).await.unwrap();
    let Some(TemplateEvent::Ended(_, exit)) = stand.events.recv().await else {
        panic!("no end was told")
    };
    assert_eq!(exit.cause, Cause::Close);
}

#[tokio::test(flavor = "current_thread")]
async fn a_stopped_template_is_given_up_and_what_it_forks_too_late_is_ended() {
    let Some(python) = python() else { return };
    let mut stand = stand();
    let profile = stand.profile(&python);
    let warm = stand
        .templates
        .acquire(&profile, &stand.environment, LIMIT)
        .await
        .unwrap();
    assert!(matches!(stand.events.recv().await, Some(TemplateEvent::Ready(_))));
    let template = kernelhost_process::pidfd::Pidfd::open(warm.template.facts.pid).unwrap();
    template.signal(libc::SIGSTOP).unwrap();

    let (theirs, ours) = wires();
    let soon = Instant::now() + Duration::from_millis(100);
    let refused = warm
        .template
        .fork(configuration(&stand.environment), theirs, soon)
        .await;
    assert!(matches!(refused, Err(ForkError::TimedOut(_))), "{refused:?}");
    template.signal(libc::SIGCONT).unwrap();

    // The lifeline's read end is closed everywhere once nobody was forked with it, or who was is gone.
    let lifeline = &ours[5];
    let gone = timeout(LIMIT, async {
        while !matches!(
            rustix::io::write(lifeline, b"?"),
            Err(error) if error == rustix::io::Errno::PIPE
        ) {
            tokio::task::yield_now().await;
        }
    });
    gone.await.unwrap();

    // The template itself is as good as before.
    let (theirs, _ours) = wires();
    let deadline = Instant::now() + LIMIT;
    let (_, life) = warm
        .template
        .fork(configuration(&stand.environment), theirs, deadline)
        .await
        .unwrap();
    drop(life);
    stand.templates.close().await;
}

#[tokio::test(flavor = "current_thread")]
async fn a_killed_template_says_what_the_witness_knows() {
    let Some(python) = python() else { return };
    for (out_of_memory, cause) in [(true, Cause::OutOfMemory), (false, Cause::ExternalSignal)] {
        let mut stand = stand_with(Says(out_of_memory));
        let profile = stand.profile(&python);
        let acquired = stand.templates.acquire(&profile, &stand.environment, LIMIT).await;
        let pid = acquired.unwrap().template.facts.pid;
        assert!(matches!(stand.events.recv().await, Some(TemplateEvent::Ready(_))));
        Pidfd::open(pid).unwrap().signal(libc::SIGKILL).unwrap();
        let told = timeout(LIMIT, stand.events.recv()).await.unwrap();
        let Some(TemplateEvent::Ended(_, exit)) = told else {
            panic!("no end was told")
        };
        assert_eq!(exit.cause, cause);
        assert_eq!(exit.evidence, [format!("asked about {pid}")]);
        assert!(exit.usage.is_some());
        timeout(LIMIT, stand.templates.close()).await.unwrap();
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_template_that_is_taken_while_it_starts_says_so() {
    let stand = stand_with(Says(true));
    let interpreter = script("taken", "kill -9 $$");
    let error = stand.refusal(interpreter.to_str().unwrap(), LIMIT).await;
    fs::remove_file(interpreter).unwrap();
    let TemplateError::Ended(exit) = error else {
        panic!("{error}")
    };
    assert_eq!(exit.cause, Cause::StartFailed);
    assert_eq!(exit.evidence, [format!("asked about {}", exit.pid)]);
    assert!(
        exit.message
            .contains("the Linux OOM killer took it before it was ready"),
        "{}",
        exit.message
    );
}
