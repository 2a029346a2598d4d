//! `NativeKernel`.

use kernelhost_kernel::host::Kernel;
use napi::bindgen_prelude::Buffer;
use napi_derive::napi;

use crate::convert::{from_ms, size};
use crate::dto::{CellRequest, KernelState, Query};

/// A handle to one kernel of a host.
#[napi]
pub struct NativeKernel {
    kernel: Kernel,
}

impl NativeKernel {
    pub fn new(kernel: Kernel) -> Self {
        Self { kernel }
    }

    pub fn inner(&self) -> &Kernel {
        &self.kernel
    }
}

#[napi]
impl NativeKernel {
    #[napi(catch_unwind)]
    pub fn state(&self) -> KernelState {
        self.kernel.state().into()
    }

    #[napi(catch_unwind, ts_return_type = "number | null")]
    pub fn pid(&self) -> Option<i32> {
        self.kernel.pid()
    }

    #[napi(catch_unwind)]
    pub fn generation(&self) -> u32 {
        self.kernel.generation()
    }

    /// Settles with `life`.
    #[napi(catch_unwind)]
    pub fn start(&self, request: u32) {
        self.kernel.start(request);
    }

    /// Settles with `cell`.
    #[napi(catch_unwind)]
    pub fn execute(&self, request: u32, cell: CellRequest) {
        self.kernel.execute(request, cell.into());
    }

    /// The caller of this start or execute no longer wants it: dropped if it has not begun, interrupted if it has.
    #[napi(catch_unwind)]
    pub fn cancel(&self, request: u32) {
        self.kernel.cancel(request);
    }

    /// Settles with `checkpoint`.
    #[napi(catch_unwind)]
    pub fn checkpoint(&self, request: u32) {
        self.kernel.checkpoint(request);
    }

    /// Settles with `life`.
    #[napi(catch_unwind)]
    pub fn rollback(&self, request: u32, checkpoint: u32) {
        self.kernel.rollback(request, checkpoint);
    }

    /// Settles with `done`.
    #[napi(catch_unwind)]
    pub fn discard(&self, request: u32, checkpoint: u32) {
        self.kernel.discard(request, checkpoint);
    }

    /// Settles with `done` once the running cell is over.
    #[napi(catch_unwind)]
    pub fn interrupt(&self, request: u32) {
        self.kernel.interrupt(request);
    }

    /// Settles with `life`.
    #[napi(catch_unwind)]
    pub fn restart(&self, request: u32) {
        self.kernel.restart(request);
    }

    /// Settles with `exit`.
    #[napi(catch_unwind)]
    pub fn kill(&self, request: u32, signal: i32) {
        self.kernel.kill(request, signal);
    }

    /// Settles with `done`.
    #[napi(catch_unwind)]
    pub fn close(&self, request: u32, grace_ms: f64) {
        self.kernel.close(request, from_ms(grace_ms));
    }

    /// Settles with `answer`.
    #[napi(catch_unwind)]
    pub fn query(&self, request: u32, query: Query) {
        self.kernel.query(request, query.into());
    }

    /// The answer to a `call`: a header in JSON, and the bytes it announces. At most 64 MiB in all.
    #[napi(catch_unwind)]
    pub fn returned(&self, call: u32, header: String, parts: Vec<Buffer>) {
        let length = u32::try_from(header.len()).unwrap_or(u32::MAX).to_le_bytes();
        let parts = parts.iter().map(AsRef::as_ref);
        let payload: Vec<&[u8]> = [length.as_slice(), header.as_bytes()]
            .into_iter()
            .chain(parts)
            .collect();
        self.kernel.returned(call, payload.concat());
    }

    /// Settles with `usage`.
    #[napi(catch_unwind)]
    pub fn usage(&self, request: u32) {
        self.kernel.usage(request);
    }

    /// A listener is done with this much of what `cell-output` events have brought.
    #[napi(catch_unwind)]
    pub fn credit(&self, bytes: f64) {
        self.kernel.credit(size(bytes));
    }

    /// Whether `output` and `state` events are wanted.
    #[napi(catch_unwind)]
    pub fn watch(&self, output: bool, state: bool) {
        self.kernel.watch(output, state);
    }
}
