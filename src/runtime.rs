//! The one thread on which everything is supervised, shared by all hosts of the process, also those in worker threads.
//!
//! It is started with the first host and never stopped: a thread that may have kernels to end must not depend on the
//! environment that happened to start it.

use std::future::pending;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use napi::{Error, Result};
use tokio::runtime::{Builder, Handle};

static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);

/// The runtime, started if there is none.
pub fn handle() -> Result<Handle> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = runtime.as_ref() {
        return Ok(handle.clone());
    }
    let failed = |what: &str| Error::from_reason(format!("kernelhost could not start its thread: {what}"));
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new()
        .name("kernelhost".to_owned())
        .spawn(move || {
            let built = Builder::new_current_thread().enable_io().enable_time().build();
            match built {
                Ok(runtime) => {
                    sender.send(Ok(runtime.handle().clone())).ok();
                    runtime.block_on(pending::<()>());
                }
                Err(error) => {
                    sender.send(Err(error)).ok();
                }
            }
        })
        .map_err(|error| failed(&error.to_string()))?;
    match receiver.recv() {
        Ok(Ok(handle)) => Ok(runtime.insert(handle).clone()),
        Ok(Err(error)) => Err(failed(&error.to_string())),
        Err(_) => Err(failed("it ended at once")),
    }
}
