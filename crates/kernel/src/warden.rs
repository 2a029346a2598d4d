//! The warden: one small process per host that outlives it, and ends what the host has left.
//!
//! Lives die by their lifelines and templates end what they have forked. What has left a kernel's process group when daemon
//! and template are killed in one go is nobody's but the warden's. It holds one end of a pipe and nothing else, and does its
//! work when the other end closes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kernelhost_process::marker::{self, HostMark};
use kernelhost_process::pidfd::Pidfd;
use kernelhost_process::reap::reap;
use kernelhost_process::spawn::{Program, spawn};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::tasks;

/// How long a warden may take to end once it is told to: it looks at every process once.
const LEAVES: Duration = Duration::from_secs(1);
/// One that ends early is replaced; one that always does is not replaced all the time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// One that has lived this long was no failure.
const SOUND: Duration = Duration::from_secs(10);

/// What a warden is started with.
#[derive(Debug, Clone)]
struct Recipe {
    interpreter: String,
    boot: String,
    environment: Vec<(String, String)>,
}

#[derive(Debug)]
pub struct Warden {
    interpreter: String,
    boot: String,
    mark: HostMark,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    NotNeededYet,
    /// The task that keeps it alive ends when the sender does, and closes its receiver when all is done.
    Kept(watch::Sender<()>),
    Closed,
}

impl Warden {
    pub fn new(interpreter: String, boot: String, mark: HostMark) -> Self {
        Self {
            interpreter,
            boot,
            mark,
            state: Mutex::new(State::NotNeededYet),
        }
    }

    /// Starts it with the host's first process. `environment` is a kernel's: the interpreter needs what it says of libraries.
    pub fn ensure(&self, environment: &[(String, String)]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*state, State::NotNeededYet) {
            return;
        }
        let needed = environment
            .iter()
            .filter(|(name, _)| name.starts_with("LD_") || name == "PATH" || name == "PYTHONHOME");
        let recipe = Recipe {
            interpreter: self.interpreter.clone(),
            boot: self.boot.clone(),
            environment: needed
                .cloned()
                .chain([(marker::VARIABLE.to_owned(), self.mark.of_servant())])
                .collect(),
        };
        let (keeper, kept) = watch::channel(());
        *state = State::Kept(keeper);
        tasks::spawn(keep(recipe, kept));
    }

    /// Tells it that the host is done, and returns when it is gone.
    pub async fn close(self: &Arc<Self>) {
        let before = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *state, State::Closed)
        };
        if let State::Kept(keeper) = before {
            keeper.send_replace(());
            timeout(LEAVES + Duration::from_millis(200), keeper.closed()).await.ok();
        }
    }
}

/// Keeps a warden alive until it is told to let go, or nobody is left to tell it.
async fn keep(recipe: Recipe, mut told: watch::Receiver<()>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let began = Instant::now();
        match start(&recipe) {
            Ok((process, pipe)) => {
                let over = tokio::select! {
                    _ = process.readable() => false,
                    _ = told.changed() => true,
                };
                drop(pipe);
                if timeout(LEAVES, process.readable()).await.is_err() {
                    process.get_ref().signal(libc::SIGKILL).ok();
                    process.readable().await.ok();
                }
                reap(process.get_ref(), 0).ok();
                if over {
                    return;
                }
                tracing::warn!("the warden ended before its host did; another one is started");
            }
            Err(error) => tracing::warn!(%error, "the warden could not be started"),
        }
        if began.elapsed() >= SOUND {
            pause = FIRST_PAUSE;
        }
        tokio::select! {
            () = sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
            _ = told.changed() => return,
        }
    }
}

fn start(recipe: &Recipe) -> io::Result<(AsyncFd<Pidfd>, OwnedFd)> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
    let pidfd = spawn(&Program {
        path: &recipe.interpreter,
        // Isolated and without site: nothing of a user's may run in it, or keep it from running.
        arguments: &["-I", "-S", &recipe.boot, "warden"],
        environment: &recipe.environment,
        descriptors: &[null.as_fd(), null.as_fd(), null.as_fd(), theirs.as_fd()],
    })
    .map_err(io::Error::other)?;
    Ok((pidfd.watched()?, ours))
}
