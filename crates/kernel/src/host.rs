//! A host: its templates, its kernels, and the handles to them. Everything here returns at once; answers and events come
//! through the sink.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kernelhost_forkserver::client::TemplateError;
use kernelhost_forkserver::profile::Profile;
use kernelhost_forkserver::template::{TemplateEvent, Templates};
use kernelhost_process::marker::HostMark;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use crate::event::{Event, Failure, FailureCode, KernelNumber, PublicState, Reply, RequestId, Sink};
use crate::launch::{Launcher, boot};
use crate::oom_watch::OomWatch;
use crate::options::{CellRequest, HostOptions, KernelOptions, LaunchMode};
use crate::session::{Command, Session, Shared};
use crate::state::Input;
use crate::warden::Warden;

/// How long `warm` waits for a template.
const WARM_LIMIT: Duration = Duration::from_secs(30);

pub struct Host {
    runtime: Handle,
    launcher: Arc<Launcher>,
    sink: Sink,
    /// Those that are not closed. One that is goes when its handle does.
    kernels: Mutex<Vec<(mpsc::UnboundedSender<Command>, Arc<Shared>)>>,
}

/// A handle to a kernel. The kernel lives as long as its host, not as long as this.
pub struct Kernel {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
}

impl Host {
    /// The runtime is the one thread on which every kernel is supervised.
    pub fn new(runtime: Handle, options: HostOptions, sink: Sink) -> Self {
        let told = sink.clone();
        let mark = HostMark::new();
        let oom = OomWatch::new(sink.clone());
        let templates = Templates::new(boot(&options), mark.of_servant(), oom.clone(), move |event| {
            let (facts, exit) = match event {
                TemplateEvent::Ready(facts) => (facts, None),
                TemplateEvent::Ended(facts, exit) => (facts, Some(exit)),
            };
            told(vec![Event::Template { facts, exit }]);
        });
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let warden = Warden::new(options.python.clone(), boot(&options), mark.clone());
        let launcher = Arc::new(Launcher {
            options,
            templates,
            warden: Arc::new(warden),
            mark,
            oom,
            forks: Arc::new(Semaphore::new(cores * 16)),
            cold_starts: Arc::new(Semaphore::new(cores * 2)),
        });
        Self {
            runtime,
            launcher,
            sink,
            kernels: Mutex::default(),
        }
    }

    pub fn kernel(&self, number: KernelNumber, options: KernelOptions) -> Kernel {
        let (commands, inbox) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::new());
        let session = Session::new(
            number,
            options,
            self.launcher.clone(),
            self.sink.clone(),
            shared.clone(),
            inbox,
        );
        self.runtime.spawn(session.run());
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.retain(|(_, shared)| shared.state() != PublicState::Closed);
        kernels.push((commands.clone(), shared.clone()));
        Kernel { commands, shared }
    }

    /// Starts the template that kernels with this environment will be forked from.
    pub fn warm(&self, request: RequestId, environment: Vec<(String, String)>) {
        let (launcher, sink) = (self.launcher.clone(), self.sink.clone());
        self.runtime.spawn(async move {
            let failed = |code, message| {
                let stderr_tail = String::new();
                Reply::Failed(Box::new(Failure {
                    code,
                    message,
                    exit: None,
                    partial: None,
                    stderr_tail,
                }))
            };
            let options = &launcher.options;
            let reply = if options.launch == LaunchMode::Spawn {
                failed(
                    FailureCode::KernelStart,
                    "There is no template to warm: launch is 'spawn'.".to_owned(),
                )
            } else {
                launcher.warden.ensure(&environment);
                let profile = Profile::new(&options.python, options.shell, &options.preload, &environment);
                match launcher.templates.acquire(&profile, &environment, WARM_LIMIT).await {
                    Ok(warm) => Reply::Template(warm.template.facts.clone()),
                    Err(TemplateError::Closed) => failed(FailureCode::KernelClosed, "The host is closed.".to_owned()),
                    Err(error) => failed(
                        FailureCode::KernelStart,
                        format!("The template could not be started: {error}"),
                    ),
                }
            };
            sink(vec![Event::Settled { request, reply }]);
        });
    }

    /// Closes every kernel, then the templates.
    pub fn close(&self, request: RequestId, grace: Duration) {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (launcher, sink) = (self.launcher.clone(), self.sink.clone());
        // Posted from here, so that no later call of the same caller overtakes it.
        let mut closing = Vec::new();
        for (kernel, _) in kernels {
            let (closed, wait) = oneshot::channel();
            if kernel.send(Command::CloseForHost(grace, closed)).is_ok() {
                closing.push(wait);
            }
        }
        // Nobody who waits for a place gets one any more.
        launcher.forks.close();
        launcher.cold_starts.close();
        self.runtime.spawn(async move {
            for closed in closing {
                // Dropped, not sent: either way the kernel is closed.
                timeout(grace + Duration::from_secs(5), closed).await.ok();
            }
            launcher.templates.close().await;
            launcher.warden.close().await;
            launcher.oom.close();
            sink(vec![Event::Settled {
                request,
                reply: Reply::Done,
            }]);
        });
    }
}

impl Kernel {
    pub fn state(&self) -> PublicState {
        self.shared.state()
    }

    pub fn pid(&self) -> Option<i32> {
        self.shared.pid()
    }

    pub fn generation(&self) -> u32 {
        self.shared.generation()
    }

    pub fn start(&self, request: RequestId) {
        self.post(Command::Input(Input::Start(request)));
    }

    pub fn execute(&self, request: RequestId, cell: CellRequest) {
        self.post(Command::Input(Input::Execute(request, cell)));
    }

    /// The caller of this start or execute no longer wants it.
    pub fn cancel(&self, request: RequestId) {
        self.post(Command::Input(Input::Cancel(request)));
    }

    pub fn interrupt(&self, request: RequestId) {
        self.post(Command::Input(Input::Interrupt(request)));
    }

    pub fn restart(&self, request: RequestId) {
        self.post(Command::Input(Input::Restart(request)));
    }

    pub fn kill(&self, request: RequestId, signal: i32) {
        self.post(Command::Input(Input::Kill(request, signal)));
    }

    pub fn close(&self, request: RequestId, grace: Duration) {
        self.post(Command::Input(Input::Close(request, grace)));
    }

    pub fn usage(&self, request: RequestId) {
        self.post(Command::Usage(request));
    }

    /// A listener is done with this much of a streamed cell's output.
    pub fn credit(&self, bytes: usize) {
        self.shared.credit.give_back(bytes);
    }

    /// Which events are wanted at all: output while no cell runs, and changes of state.
    pub fn watch(&self, output: bool, state: bool) {
        self.shared.watch_output.store(output, Ordering::Release);
        self.shared.watch_state.store(state, Ordering::Release);
    }

    /// The task ends only when the host is gone, and with it whoever could wait for an answer.
    fn post(&self, command: Command) {
        self.commands.send(command).ok();
    }
}
