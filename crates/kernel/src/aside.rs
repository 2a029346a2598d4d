//! Work that blocks, off the thread that supervises every kernel.
//!
//! tokio's own way to do that panics where no thread can be started, and a host has to work on when the system's limit of
//! processes is reached.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::{Semaphore, oneshot};

/// Threads at once. What they do is mostly waiting for the Linux kernel, which does not get faster with more.
static THREADS: Semaphore = Semaphore::const_new(4);

/// Runs the work on a thread of its own, or right here where there can be none. `None`: it panicked.
pub async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let permit = THREADS.acquire().await;
    let work = Arc::new(Mutex::new(Some(work)));
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (sender, outcome) = oneshot::channel();
    let theirs = work.clone();
    let started = thread::Builder::new()
        .name("kernelhost-look".to_owned())
        .spawn(move || {
            if let Some(work) = take(&theirs) {
                sender.send(work()).ok();
            }
        });
    let outcome = match started {
        Ok(_) => outcome.await.ok(),
        Err(error) => {
            tracing::warn!(%error, "no thread could be started; every kernel waits for this look");
            take(&work).map(|work| work())
        }
    };
    drop(permit);
    outcome
}
