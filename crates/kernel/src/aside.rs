//! Work that blocks, off the thread that supervises every kernel.
//!
//! tokio's own way to do that panics where no thread can be started, and a host has to work on when the system's limit of
//! processes is reached.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::{Semaphore, oneshot};

/// Threads at once. What they do is mostly waiting for the Linux kernel, which does not get faster with more.
static THREADS: Semaphore = Semaphore::const_new(4);

/// Work of any kind behind one type, so that there is one copy of the code that starts threads.
type Work = Box<dyn FnOnce() + Send>;

/// Runs the work on a thread of its own, or right here where there can be none. `None`: it panicked.
pub async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let permit = THREADS.acquire().await;
    let (sender, outcome) = oneshot::channel();
    run(Box::new(move || {
        sender.send(work()).ok();
    }));
    let outcome = outcome.await.ok();
    drop(permit);
    outcome
}

fn run(work: Work) {
    let work = Arc::new(Mutex::new(Some(work)));
    let take = |work: &Mutex<Option<Work>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let theirs = work.clone();
    let started = thread::Builder::new()
        .name("kernelhost-look".to_owned())
        .spawn(move || {
            if let Some(work) = take(&theirs) {
                work();
            }
        });
    if let Err(error) = started {
        tracing::warn!(%error, "no thread could be started; every kernel waits for this look");
        if let Some(work) = take(&work) {
            work();
        }
    }
}
