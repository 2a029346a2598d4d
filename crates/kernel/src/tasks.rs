//! Tasks of the one thread, behind one type: each type of future would bring its own copy of the runtime's code into the addon.

use std::pin::Pin;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

pub fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(Box::pin(task) as Task)
}

pub fn spawn_on(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    runtime.spawn(Box::pin(task) as Task)
}
