//! `NativeHost`.

use std::sync::Arc;

use kernelhost_kernel::event::Event;
use kernelhost_kernel::host::Host;
use napi::Result;
use napi::bindgen_prelude::Function;
use napi::threadsafe_function::ThreadsafeFunctionCallMode;
use napi_derive::napi;

use crate::convert::{environment, from_ms};
use crate::dto::{EnvironmentVariable, HostEvent, HostOptions, KernelOptions, Thawing};
use crate::kernel::NativeKernel;
use crate::runtime;

/// Templates and kernels. Ends them all when it is collected or its environment ends.
#[napi]
pub struct NativeHost {
    host: Host,
}

#[napi]
impl NativeHost {
    /// `onEvents` gets events in batches, in order. It does not keep the process alive.
    #[napi(constructor, catch_unwind)]
    pub fn new(options: HostOptions, on_events: Function<'_, Vec<HostEvent>, ()>) -> Result<Self> {
        // Unbounded: what could flood it is output, and that is bounded by credit. An exit or an answer is never refused.
        let events = on_events
            .build_threadsafe_function::<Vec<Event>>()
            .weak::<true>()
            .build_callback(|context| Ok(context.value.into_iter().map(HostEvent::from).collect::<Vec<_>>()))?;
        let sink = Arc::new(move |batch| {
            // Refused only when the environment is ending, and then nobody listens any more.
            events.call(batch, ThreadsafeFunctionCallMode::NonBlocking);
        });
        Ok(Self {
            host: Host::new(runtime::handle()?, options.into(), sink),
        })
    }

    /// A kernel with a number that is unique in this host.
    #[napi(catch_unwind)]
    pub fn kernel(&self, kernel: u32, options: KernelOptions) -> NativeKernel {
        NativeKernel::new(self.host.kernel(kernel, options.into()))
    }

    /// A kernel whose first life is a copy of another kernel's. That begins with `start`.
    #[napi(catch_unwind)]
    pub fn fork(&self, of: &NativeKernel, kernel: u32, options: KernelOptions, thawing: Thawing) -> NativeKernel {
        NativeKernel::new(self.host.fork(of.inner(), kernel, options.into(), thawing.into()))
    }

    /// Settles with `template`.
    #[napi(catch_unwind)]
    pub fn warm(&self, request: u32, variables: Vec<EnvironmentVariable>) {
        self.host.warm(request, environment(variables));
    }

    /// Settles with `done`.
    #[napi(catch_unwind)]
    pub fn close(&self, request: u32, grace_ms: f64) {
        self.host.close(request, from_ms(grace_ms));
    }
}
