//! A panic as a value: what a task has to do afterwards is done by the task itself.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;

/// The future's output, or what its panic said. Boxed, because a future that holds another by value is twice as large. Whoever
/// goes on with what the future has borrowed must expect it half changed.
pub async fn caught<T>(mut future: Pin<Box<impl Future<Output = T>>>) -> Result<T, String> {
    poll_fn(
        |context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(text(&*panic))),
        },
    )
    .await
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic that says nothing").to_owned()
}
