//! A host: its templates, its kernels, and the handles to them. Everything here returns at once; answers and events come
//! through the sink.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kernelhost_forkserver::client::TemplateError;
use kernelhost_forkserver::profile::Profile;
use kernelhost_forkserver::template::{TemplateEvent, Templates};
use kernelhost_process::marker::HostMark;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use crate::caught::caught;
use crate::copy::{ForkOrder, Purpose};
use crate::event::{CallNumber, Event, FailureCode, KernelNumber, NOBODY, PublicState, Reply, RequestId, Sink};
use crate::launch::{Launched, Launcher, boot};
use crate::oom_watch::OomWatch;
use crate::options::{CellRequest, HostOptions, KernelOptions, LaunchMode};
use crate::session::{Command, Session, Shared};
use crate::state::Input;
use crate::tasks;
use crate::warden::Warden;
use crate::wire::Query;

/// How long `warm` waits for a template.
const WARM_LIMIT: Duration = Duration::from_secs(30);

pub use crate::copy::Thawing;

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
    requests: Arc<Requests>,
}

/// The requests of one kernel that wait for an answer. Kept apart from the kernel's task, so that they are answered also where
/// the task has panicked.
struct Requests {
    sink: Sink,
    waiting: Mutex<HashSet<RequestId>>,
    /// What every request is told, once the task has panicked.
    broken: OnceLock<String>,
}

impl Requests {
    fn new(sink: Sink) -> Arc<Self> {
        Arc::new(Self {
            sink,
            waiting: Mutex::default(),
            broken: OnceLock::new(),
        })
    }

    /// Passes events on, and sees which requests they answer.
    fn tell(&self, events: Vec<Event>) {
        let settled = events.iter().filter_map(|event| match event {
            Event::Settled { request, .. } => Some(*request),
            _ => None,
        });
        let settled: Vec<RequestId> = settled.collect();
        (self.sink)(events);
        // Not before: what was not passed on is still to be answered.
        if !settled.is_empty() {
            let mut waiting = self.waiting();
            for request in settled {
                waiting.remove(&request);
            }
        }
    }

    /// The task is gone, and takes no commands any more.
    fn break_off(&self, why: String) {
        self.broken.set(why).ok();
        let waiting = std::mem::take(&mut *self.waiting());
        self.fail(waiting.into_iter().collect());
    }

    fn fail(&self, mut requests: Vec<RequestId>) {
        let Some(why) = self.broken.get() else { return };
        requests.sort_unstable();
        let failed = requests.into_iter().map(|request| {
            let reply = Reply::failed(FailureCode::Internal, why.clone());
            Event::Settled { request, reply }
        });
        (self.sink)(failed.collect());
    }

    fn waiting(&self) -> MutexGuard<'_, HashSet<RequestId>> {
        // A set cannot be left half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        self.new_kernel(number, options, None)
    }

    /// A kernel whose first life is a copy of the one that another kernel has when its turn comes. Its options are for later
    /// lives too; `thawing` has what is different from the original in the copy. It is started like any other.
    pub fn fork(&self, of: &Kernel, number: KernelNumber, options: KernelOptions, thawing: Thawing) -> Kernel {
        let (outcome, first) = oneshot::channel();
        let order = ForkOrder {
            number,
            kernel: Arc::new(options.clone()),
            marker: self.launcher.mark.of_life(number, 1),
            thawing,
            outcome,
        };
        let kernel = self.new_kernel(number, options, Some(first));
        // Where that kernel's task is gone the order is dropped, which tells the new one.
        of.commands
            .send(Command::Input(Input::Copy(NOBODY, Purpose::Fork(Box::new(order)))))
            .ok();
        kernel
    }

    fn new_kernel(
        &self,
        number: KernelNumber,
        options: KernelOptions,
        first: Option<oneshot::Receiver<Launched>>,
    ) -> Kernel {
        let (commands, inbox) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::new());
        let requests = Requests::new(self.sink.clone());
        let (sees, breaks) = (requests.clone(), requests.clone());
        let id = options.id.clone();
        let session = Session::new(
            number,
            options,
            self.launcher.clone(),
            Arc::new(move |events| sees.tell(events)),
            shared.clone(),
            inbox,
            first,
        );
        tasks::spawn_on(&self.runtime, async move {
            if let Err(panic) = caught(Box::pin(session.run())).await.flatten() {
                breaks.break_off(format!(
                    "A bug in kernelhost: what supervises kernel \"{id}\" has panicked ({panic}). Its life was ended, and it is \
                     closed. Make a new one with host.kernel()."
                ));
            }
        });
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.retain(|(_, shared)| shared.state() != PublicState::Closed);
        kernels.push((commands.clone(), shared.clone()));
        Kernel {
            commands,
            shared,
            requests,
        }
    }

    /// Starts the template that kernels with this environment will be forked from.
    pub fn warm(&self, request: RequestId, environment: Vec<(String, String)>) {
        let (launcher, sink) = (self.launcher.clone(), self.sink.clone());
        tasks::spawn_on(&self.runtime, async move {
            let options = &launcher.options;
            let reply = if options.launch == LaunchMode::Spawn {
                Reply::failed(
                    FailureCode::KernelStart,
                    "There is no template to warm: launch is 'spawn'.".to_owned(),
                )
            } else {
                launcher.warden.ensure(&environment);
                let profile = Profile::new(&options.python, options.shell, &options.preload, &environment);
                match launcher.templates.acquire(&profile, &environment, WARM_LIMIT).await {
                    Ok(warm) => Reply::Template(warm.template.facts.clone()),
                    Err(TemplateError::Closed) => {
                        Reply::failed(FailureCode::KernelClosed, "The host is closed.".to_owned())
                    }
                    Err(error) => Reply::failed(
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
        tasks::spawn_on(&self.runtime, async move {
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
        self.call(request, Command::Input(Input::Start(request)));
    }

    pub fn execute(&self, request: RequestId, cell: CellRequest) {
        self.call(request, Command::Input(Input::Execute(request, cell)));
    }

    /// The caller of this start or execute no longer wants it.
    pub fn cancel(&self, request: RequestId) {
        // Whose call is answered already needs no answer to this.
        self.commands.send(Command::Input(Input::Cancel(request))).ok();
    }

    /// Keeps a frozen copy of the life.
    pub fn checkpoint(&self, request: RequestId) {
        self.call(request, Command::Input(Input::Copy(request, Purpose::Checkpoint)));
    }

    pub fn rollback(&self, request: RequestId, to: u32) {
        self.call(request, Command::Rollback(request, to));
    }

    pub fn discard(&self, request: RequestId, checkpoint: u32) {
        self.call(request, Command::Discard(request, checkpoint));
    }

    pub fn interrupt(&self, request: RequestId) {
        self.call(request, Command::Input(Input::Interrupt(request)));
    }

    pub fn restart(&self, request: RequestId) {
        self.call(request, Command::Input(Input::Restart(request)));
    }

    pub fn kill(&self, request: RequestId, signal: i32) {
        self.call(request, Command::Input(Input::Kill(request, signal)));
    }

    pub fn close(&self, request: RequestId, grace: Duration) {
        self.call(request, Command::Input(Input::Close(request, grace)));
    }

    pub fn query(&self, request: RequestId, query: Query) {
        self.call(request, Command::Query(request, query));
    }

    /// The answer to a call, as the payload of its frame. Dropped when nobody waits for it.
    pub fn returned(&self, call: CallNumber, payload: Vec<u8>) {
        // Nobody waits for what comes of it.
        self.commands.send(Command::Returned(call, payload)).ok();
    }

    pub fn usage(&self, request: RequestId) {
        self.call(request, Command::Usage(request));
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

    fn call(&self, request: RequestId, command: Command) {
        self.requests.waiting().insert(request);
        // Where the host is gone, so is whoever could wait for an answer.
        if self.commands.send(command).is_err() && self.requests.broken.get().is_some() {
            let waits = self.requests.waiting().remove(&request);
            if waits {
                self.requests.fail(vec![request]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::AtomicBool;

    use kernelhost_process::pidfd::Pidfd;

    use super::*;
    use crate::options::{Limits, Recovery, Shell, Stuck};

    const LIMIT: Duration = Duration::from_secs(30);

    struct Stand {
        host: Host,
        events: mpsc::UnboundedReceiver<Event>,
        /// Whether the next output of a streamed cell makes the sink panic, in the middle of the kernel's task.
        armed: Arc<AtomicBool>,
    }

    fn stand(python: String, launch: LaunchMode) -> Stand {
        let (sender, events) = mpsc::unbounded_channel();
        let armed = Arc::new(AtomicBool::new(false));
        let panics = armed.clone();
        let sink: Sink = Arc::new(move |batch: Vec<Event>| {
            let is_output = |event: &Event| matches!(event, Event::CellOutput { .. });
            let panics = batch.iter().any(is_output) && panics.swap(false, Ordering::SeqCst);
            assert!(!panics, "forced by a test");
            for event in batch {
                sender.send(event).ok();
            }
        });
        let runtime_directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
        let options = HostOptions {
            python,
            launch,
            shell: Shell::Plain,
            preload: Vec::new(),
            runtime_directory: runtime_directory.to_str().unwrap().to_owned(),
        };
        Stand {
            host: Host::new(Handle::current(), options, sink),
            events,
            armed,
        }
    }

    impl Stand {
        fn kernel(&self, number: KernelNumber) -> Kernel {
            let options = KernelOptions {
                id: format!("k{number}"),
                cwd: None,
                environment: vec![("PATH".to_owned(), std::env::var("PATH").unwrap())],
                init: None,
                restore_from: None,
                start_timeout: LIMIT,
                interrupt_grace: Duration::from_secs(1),
                stuck: Stuck::End,
                max_output_bytes: 1 << 20,
                oom_score_adj: None,
                limits: Limits::default(),
                recovery: Recovery::Restart,
                checkpoint_bytes: u64::MAX,
                functions: Vec::new(),
                answers_input: false,
            };
            self.host.kernel(number, options)
        }

        async fn answer(&mut self, wanted: RequestId) -> Reply {
            let found = async {
                loop {
                    match self.events.recv().await {
                        Some(Event::Settled { request, reply }) if request == wanted => return reply,
                        Some(_) => {}
                        None => panic!("the host is gone"),
                    }
                }
            };
            timeout(LIMIT, found).await.unwrap()
        }

        async fn assert_internal(&mut self, request: RequestId) {
            let Reply::Failed(failure) = self.answer(request).await else {
                panic!("request {request} was answered")
            };
            assert_eq!(failure.code, FailureCode::Internal);
            assert!(failure.message.contains("forced by a test"), "{}", failure.message);
            assert!(failure.message.contains("\"k1\""), "{}", failure.message);
        }
    }

    fn cell(code: &str) -> CellRequest {
        CellRequest {
            code: code.to_owned(),
            silent: false,
            timeout: None,
            max_output_bytes: None,
            stream: true,
        }
    }

    async fn a_panic_ends_one_kernel(launch: LaunchMode) {
        let Some(python) = python() else { return };
        let mut stand = stand(python, launch);
        let (broken, other) = (stand.kernel(1), stand.kernel(2));
        broken.start(1);
        let reply = stand.answer(1).await;
        assert!(matches!(reply, Reply::Life(_)), "{reply:?}");
        other.execute(2, cell("x = 2"));
        stand.answer(2).await;
        let (pid, others) = (broken.pid().unwrap(), other.pid());
        let process = Pidfd::open(pid).unwrap();

        stand.armed.store(true, Ordering::SeqCst);
        broken.execute(3, cell("import time; print('boom', flush=True); time.sleep(600)"));
        broken.execute(4, cell("1"));
        broken.interrupt(5);
        for request in [3, 4, 5] {
            stand.assert_internal(request).await;
        }
        assert!(
            !process.owns_pid(),
            "the life is ended and reaped before its calls are answered"
        );
        assert_eq!((broken.pid(), broken.state()), (None, PublicState::Closed));

        broken.execute(6, cell("1"));
        broken.restart(7);
        broken.usage(8);
        broken.close(9, Duration::ZERO);
        for request in [6, 7, 8, 9] {
            stand.assert_internal(request).await;
        }

        other.execute(10, cell("x"));
        assert!(matches!(stand.answer(10).await, Reply::Cell(_)));
        assert_eq!(other.pid(), others);
        stand.host.close(11, Duration::from_secs(1));
        assert!(matches!(stand.answer(11).await, Reply::Done));
    }

    /// An interpreter that can run the Python side, if this machine has one.
    fn python() -> Option<String> {
        let code = "import sys; print(sys.executable if sys.version_info >= (3, 10) else '')";
        let output = std::process::Command::new("python3").args(["-c", code]).output();
        let path = String::from_utf8(output.ok()?.stdout).ok()?.trim().to_owned();
        (!path.is_empty()).then_some(path)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_panic_in_a_kernels_task_answers_its_calls_and_ends_its_cold_life() {
        a_panic_ends_one_kernel(LaunchMode::Spawn).await;
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_panic_in_a_kernels_task_answers_its_calls_and_ends_its_forked_life() {
        a_panic_ends_one_kernel(LaunchMode::Fork).await;
    }
}
