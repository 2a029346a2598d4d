//! The napi boundary, and only it: what JavaScript says is converted, one core call is made, what the core says is converted
//! back. Nothing is decided here.
//!
//! No method fails for reasons that a caller could expect: answers, also failures, come through the host's one event callback,
//! in exact order. No method blocks.

#![expect(clippy::needless_pass_by_value, reason = "what comes from JavaScript is owned")]

mod convert;
mod dto;
mod host;
mod kernel;
pub mod leftovers;
mod runtime;
