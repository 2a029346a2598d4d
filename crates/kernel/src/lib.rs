//! Decides everything about kernels: when a life starts and ends, what runs on it, what the caller is told.
//!
//! One task owns each kernel's mutable state; the rest of the world holds a cheap handle and sends messages. All that happens
//! leaves through one ordered stream of events. This crate must not know JavaScript, nor how Node is told.

pub mod event;
pub mod host;
pub mod options;
pub mod output;

mod aside;
mod calls;
mod caught;
mod checkpoints;
mod copy;
mod launch;
mod life;
mod limits;
mod oom_watch;
mod queries;
mod session;
mod state;
mod tasks;
mod warden;
mod wire;
