//! One child process, whatever program it runs: how it is spawned, signalled, reaped, and how its end is told.
//!
//! This crate owns every system call that touches a process. It must not know Python, frames, cells, templates or
//! JavaScript. It never waits for a pid it did not start, never installs a signal handler, and never sends a signal to a
//! pid that may have been reused.

pub mod exit_reason;
pub mod lifeline;
pub mod marker;
pub mod out_of_memory;
pub mod pidfd;
pub mod process_tree;
mod procfs;
pub mod reap;
pub mod signal;
pub mod spawn;
pub mod stderr_tail;
pub mod terminate;
mod urgency;
pub mod usage;
