//! The template: a warm Python process that forks kernels, and everything that is said to it.
//!
//! This crate owns the frame format of every wire, the template processes of a host, and the two-phase reaping of what they
//! fork. It must not know cells, kernels or JavaScript: what it hands out is a process and the means to learn of its end.

pub mod client;
pub mod frame;
pub mod process;
pub mod profile;
pub mod protocol;
pub mod socket;
pub mod template;
