//! `leftovers`: what hosts that are gone have left behind, for `kernelhost doctor`.

use kernelhost_process::process_tree::strays;
use napi_derive::napi;

use crate::dto::Stray;

/// Looks at every process of this PID namespace; blocks for some milliseconds. With `end` what is found is killed.
#[napi(catch_unwind)]
pub fn leftovers(end: bool) -> Vec<Stray> {
    strays(end).into_iter().map(Stray::from).collect()
}
