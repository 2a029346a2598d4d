//! Starting a life: from a template where that is wanted and works, cold where it does not; and the end of one that does not
//! become ready.

use std::sync::Arc;
use std::time::Duration;

use kernelhost_forkserver::client::{ForkError, TemplateError};
use kernelhost_forkserver::profile::Profile;
use kernelhost_forkserver::protocol::{Configuration, PROTOCOL, payload};
use kernelhost_forkserver::template::{Templates, Warm};
use kernelhost_process::exit_reason::{Cause, ExitReason, ExitStatus, Telling, duration};
use kernelhost_process::marker::{self, HostMark};
use kernelhost_process::spawn::{SpawnError, exhausted};
use kernelhost_process::stderr_tail::crash_traceback;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, timeout_at};

use crate::copy::{self, Frozen, Thawing, facts_of, thaw};
use crate::event::{FailureCode, KernelNumber, Launch, LifeFacts};
use crate::life::{Life, LifeEvent, Wires};
use crate::oom_watch::OomWatch;
use crate::options::{HostOptions, KernelOptions, LaunchMode};
use crate::state::StartFailed;
use crate::warden::Warden;
use crate::wire::{self, Message, Ready};

/// A healthy template forks in a few milliseconds, and the fork is ready a few later; one that is not by now is stopped or
/// hanging.
const FORK_LIMIT: Duration = Duration::from_secs(5);
/// How long a process that has said why it cannot start may take to leave by itself, so that its own status is told.
const LEAVES_BY_ITSELF: Duration = Duration::from_millis(500);

/// How long a process may take to be gone after SIGKILL.
const ENDS: Duration = Duration::from_secs(5);

/// What all launches of a host share.
pub struct Launcher {
    pub options: HostOptions,
    pub templates: Arc<Templates>,
    pub warden: Arc<Warden>,
    pub mark: HostMark,
    pub oom: Arc<OomWatch>,
    /// Forks that are not ready yet, at once: a crowd that comes back after a common death is let in at the rate at which it
    /// can be served.
    pub forks: Arc<Semaphore>,
    /// Cold starts at once. More would only slow each other down: an interpreter that starts keeps a core busy.
    pub cold_starts: Arc<Semaphore>,
}

pub struct Request {
    pub launcher: Arc<Launcher>,
    pub number: KernelNumber,
    pub kernel: Arc<KernelOptions>,
    pub generation: u32,
    pub pause: Duration,
    /// Becomes the cause when the launch is to be given up.
    pub cancelled: watch::Receiver<Option<Cause>>,
}

pub struct Launched {
    /// Said when a cold start was not what was asked for first.
    pub fell_back: Option<String>,
    pub result: Result<(Box<Life>, LifeFacts), StartFailed>,
    /// Of a life that was thawed: how many cells it has the effects of.
    pub cells: Option<u32>,
    /// Of a copy: which callbacks of `kernelhost.on_restore` have failed, and how.
    pub failed_callbacks: Vec<String>,
    /// Why it was not thawed, although there should have been a copy to thaw.
    pub lost_copy: Option<String>,
}

impl Launched {
    /// The life of a copy could not begin.
    pub fn without_copy(code: FailureCode, message: String) -> Self {
        Self {
            fell_back: None,
            result: Err(StartFailed {
                code,
                message,
                exit: None,
                stderr_tail: String::new(),
            }),
            cells: None,
            failed_callbacks: Vec::new(),
            lost_copy: None,
        }
    }
}

/// Why there is no ready life.
enum Problem {
    /// No process came to be, or it is gone already.
    Message(String),
    /// The process ended before it was ready.
    Ended,
    /// It said why it cannot start.
    Says(String),
    NotReady {
        limit: Duration,
    },
    Broken(String),
    Cancelled(Cause),
}

pub async fn launch(mut request: Request) -> Launched {
    let mut attempt = Attempt {
        life: None,
        fell_back: None,
        init_has_begun: false,
        permit: None,
    };
    let mut cancelled = request.cancelled.clone();
    let began = Instant::now() + request.pause;
    let outcome = tokio::select! {
        biased;
        cause = cancelled.wait_for(Option::is_some) => {
            let cause = cause.ok().and_then(|cause| *cause).unwrap_or(Cause::Close);
            Err(Problem::Cancelled(cause))
        }
        outcome = attempt.run(&mut request) => outcome,
    };
    let Attempt {
        life,
        fell_back,
        // Given up when the process is ready or gone: one that is being ended counts.
        permit: _permit,
        ..
    } = attempt;
    let result = match (outcome, life) {
        (Ok((ready, launch)), Some(mut life)) => {
            life.became_ready();
            let facts = LifeFacts {
                pid: life.pid(),
                generation: request.generation,
                launch,
                launch_reason: fell_back.clone(),
                start: began.elapsed(),
                python: ready.python,
                python_version: ready.python_version,
                shell: ready.shell,
            };
            Ok((life, facts))
        }
        (Err(problem), Some(life)) => Err(end(&request, life, problem).await),
        (Err(problem), None) => Err(never_was(&request, problem)),
        (Ok(_), None) => Err(never_was(
            &request,
            Problem::Message("there is no process (a bug in kernelhost)".into()),
        )),
    };
    Launched {
        fell_back,
        result,
        cells: None,
        failed_callbacks: Vec::new(),
        lost_copy: None,
    }
}

/// What has come to be so far, outside the future that may be given up.
struct Attempt {
    life: Option<Box<Life>>,
    fell_back: Option<String>,
    /// Code of the user's runs, or has run.
    init_has_begun: bool,
    permit: Option<OwnedSemaphorePermit>,
}

/// Why there is no life from the template.
enum NoFork {
    SpawnInstead(String),
    Final(Problem),
}

impl Attempt {
    async fn run(&mut self, request: &mut Request) -> Result<(Ready, Launch), Problem> {
        if !request.pause.is_zero() {
            sleep(request.pause).await;
        }
        let limit = request.kernel.start_timeout;
        let mut deadline = Instant::now() + limit;
        let launcher = request.launcher.clone();
        launcher.warden.ensure(&request.kernel.environment);
        if launcher.options.launch != LaunchMode::Spawn {
            match self.forked(request, deadline, limit).await {
                Ok(ready) => return Ok((ready, Launch::Fork)),
                Err(NoFork::Final(problem)) => return Err(problem),
                Err(NoFork::SpawnInstead(why)) => self.fell_back = Some(why),
            }
            self.permit = None;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let permit = launcher.cold_starts.clone().acquire_owned().await;
        self.permit = Some(permit.map_err(|_| Problem::Cancelled(Cause::Close))?);
        // Waiting for others is not this interpreter's fault.
        deadline = Instant::now() + left;
        self.hold(request, spawn(request).map_err(Problem::Message)?);
        Ok((self.ready(deadline, limit).await?, Launch::Spawn))
    }

    /// A life from the template that is ready, or what to do now.
    async fn forked(&mut self, request: &Request, deadline: Instant, limit: Duration) -> Result<Ready, NoFork> {
        if request.launcher.options.launch == LaunchMode::Fork {
            let warm = self.fork(request, limit, "startTimeoutMs").await;
            let warm = warm.map_err(|why| NoFork::Final(Problem::Message(why)))?;
            let ready = self.ready(deadline, limit).await.map_err(NoFork::Final)?;
            warm.proved_sound();
            return Ok(ready);
        }
        // Half of the time is kept for the cold start that may follow.
        let warm = self.fork(request, limit / 2, "half of startTimeoutMs").await;
        let warm = warm.map_err(NoFork::SpawnInstead)?;
        let soon = deadline.min(Instant::now() + FORK_LIMIT.min(limit / 4));
        let early = self.ready(soon, limit).await;
        let problem = match early {
            Ok(ready) => {
                warm.proved_sound();
                return Ok(ready);
            }
            Err(problem) => problem,
        };
        if self.init_has_begun {
            // Its own code runs, and takes the time it may take.
            return match problem {
                Problem::NotReady { .. } => self.ready(deadline, limit).await.map_err(NoFork::Final),
                other => Err(NoFork::Final(other)),
            };
        }
        let why = match problem {
            Problem::NotReady { .. } => "a fork of the template hung before it was ready".to_owned(),
            Problem::Ended => "a fork of the template ended before it was ready".to_owned(),
            other => return Err(NoFork::Final(other)),
        };
        let (host, kernel) = (&request.launcher.options, &request.kernel);
        let profile = Profile::new(&host.python, host.shell, &host.preload, &kernel.environment);
        request.launcher.templates.discard(&profile, &warm, &why);
        if let Some(mut life) = self.life.take() {
            life.signal(libc::SIGKILL);
            life.wait_for_end(ENDS).await;
            let finished = life.finish(Duration::ZERO).await;
            request.launcher.oom.ended(finished.pid);
            let printed =
                printed(&finished.stderr_tail).map_or_else(String::new, |text| format!("; it printed \"{text}\""));
            return Err(NoFork::SpawnInstead(format!("{why}{printed}")));
        }
        Err(NoFork::SpawnInstead(why))
    }

    /// `named`: what the limit is called where the user sees it.
    async fn fork(&mut self, request: &Request, limit: Duration, named: &str) -> Result<Arc<Warm>, String> {
        let deadline = Instant::now() + limit;
        let (host, kernel) = (&request.launcher.options, &request.kernel);
        let templates = &request.launcher.templates;
        let profile = Profile::new(&host.python, host.shell, &host.preload, &kernel.environment);
        let warm = templates
            .acquire(&profile, &kernel.environment, limit)
            .await
            .map_err(|error| match error {
                TemplateError::Spawn(error) => unrunnable(&error),
                TemplateError::TimedOut { .. } => {
                    format!(
                        "the template of {} was not ready within {} ({named})",
                        host.python,
                        duration(limit)
                    )
                }
                error => format!("the template could not be used: {error}"),
            })?;
        let permit = request.launcher.forks.clone().acquire_owned().await;
        self.permit = Some(permit.map_err(|_| "the host is closed".to_owned())?);
        let Wires {
            wire,
            outputs,
            interrupts,
            lifeline,
            theirs,
        } = Wires::new().map_err(|error| wires_failed(&error))?;
        // What is left of the time is worth more to the cold start than to a template that does not answer.
        let limit = deadline.min(Instant::now() + FORK_LIMIT.min(limit / 2));
        let (marker, environment) = environment(request);
        let forked = warm
            .template
            .fork(configuration(request, &environment), theirs.into_descriptors(), limit)
            .await;
        let (pidfd, forked) = forked.map_err(|error| {
            let why = format!("the template could not fork: {error}");
            // One that has run out of descriptors will not get them back; one that the system refuses a process may.
            let is_exhausted = matches!(&error, ForkError::Refused(failed) if failed.errno == libc::EMFILE);
            if is_exhausted || matches!(error, ForkError::TimedOut(_)) {
                templates.discard(&profile, &warm, &why);
            }
            why
        })?;
        let life = Life::forked(pidfd, forked, marker, wire, outputs, interrupts, lifeline);
        self.hold(request, life.map_err(|error| wires_failed(&error))?);
        Ok(warm)
    }

    fn hold(&mut self, request: &Request, life: Life) {
        let oom = &request.launcher.oom;
        oom.life_began(request.number, &request.kernel.id, life.root());
        self.life = Some(Box::new(life));
    }

    async fn ready(&mut self, deadline: Instant, limit: Duration) -> Result<Ready, Problem> {
        let Some(life) = &mut self.life else {
            return Err(Problem::Ended);
        };
        loop {
            match timeout_at(deadline, life.event(usize::MAX)).await {
                Err(_) => return Err(Problem::NotReady { limit }),
                Ok(LifeEvent::Message(Message::Ready(ready))) => return Ok(ready),
                Ok(LifeEvent::Message(Message::InitBegins)) => self.init_has_begun = true,
                Ok(LifeEvent::Message(Message::StartFailed(failure))) => {
                    return Err(Problem::Says(failure.to_string()));
                }
                Ok(LifeEvent::Message(_)) => return Err(Problem::Broken("it answered before it was asked".to_owned())),
                Ok(LifeEvent::Broken(why)) => return Err(Problem::Broken(why)),
                Ok(LifeEvent::Ended) => return Err(Problem::Ended),
                Ok(LifeEvent::Call(id, _)) => {
                    let why = "the kernel is still starting: code in init cannot call into the daemon";
                    life.returned(id, &wire::refusal(why));
                }
                Ok(LifeEvent::Text(..) | LifeEvent::CallGivenUp(_)) => {}
            }
        }
    }
}

fn spawn(request: &Request) -> Result<Life, String> {
    let host = &request.launcher.options;
    let wires = Wires::new().map_err(|error| wires_failed(&error))?;
    let (marker, environment) = environment(request);
    let configuration = configuration(request, &environment);
    Life::spawn(&host.python, &boot(host), marker, &environment, &configuration, wires)
        .map_err(|error| unrunnable(&error))
}

/// What to do about an interpreter that cannot be run.
fn unrunnable(error: &SpawnError) -> String {
    if error.is_about_the_program() {
        format!("{error}; the option `python` (or KERNELHOST_PYTHON) names the interpreter")
    } else {
        error.to_string()
    }
}

/// The script that both kinds of Python processes start with.
pub fn boot(host: &HostOptions) -> String {
    format!("{}/boot.py", host.runtime_directory)
}

/// The life's marker, and its environment with it: what the kernel was given, and nothing else.
fn environment(request: &Request) -> (String, Vec<(String, String)>) {
    let marker = request.launcher.mark.of_life(request.number, request.generation);
    // What a daemon that itself runs in a kernel has inherited says nothing of its own kernels.
    let given = request.kernel.environment.iter();
    let environment = given
        .filter(|(name, _)| name != marker::VARIABLE && name != marker::OPT_OUT)
        .cloned()
        .chain([(marker::VARIABLE.to_owned(), marker.clone())])
        .collect();
    (marker, environment)
}

fn configuration(request: &Request, environment: &[(String, String)]) -> Vec<u8> {
    let kernel = &request.kernel;
    payload(&Configuration {
        protocol: PROTOCOL,
        generation: request.generation,
        cwd: kernel.cwd.as_deref(),
        env: environment,
        shell: request.launcher.options.shell,
        init: kernel.init.as_deref(),
        restore_from: kernel.restore_from.as_deref(),
        oom_score_adj: kernel.oom_score_adj,
        functions: &kernel.functions,
        input: kernel.answers_input,
        limits: kernel.limits.rlimits(),
    })
}

fn wires_failed(error: &std::io::Error) -> String {
    let why = exhausted(error).map_or_else(|| error.to_string(), str::to_owned);
    format!("its wires could not be made: {why}")
}

/// Ends a process that did not become ready, and tells of it.
async fn end(request: &Request, mut life: Box<Life>, problem: Problem) -> StartFailed {
    let leaves = matches!(problem, Problem::Says(_) | Problem::Ended);
    if !leaves || !life.wait_for_end(LEAVES_BY_ITSELF).await {
        life.signal(libc::SIGKILL);
        life.wait_for_end(ENDS).await;
    }
    let finished = life.finish(Duration::ZERO).await;
    let Launcher { options, oom, .. } = &*request.launcher;
    let python = &options.python;
    let killed = matches!(finished.status, ExitStatus::Signaled { number, .. } if number == libc::SIGKILL);
    let finding = match problem {
        Problem::Ended if killed => Some(oom.finding(finished.pid).await),
        _ => None,
    };
    oom.ended(finished.pid);
    let (out_of_memory, evidence) = finding.map_or((false, Vec::new()), |found| (found.out_of_memory, found.evidence));
    let (cause, detail) = match problem {
        Problem::Cancelled(cause) => (cause, Some(format!("it was still starting when {}", gave_up(cause)))),
        Problem::Message(text) | Problem::Says(text) | Problem::Broken(text) => (Cause::StartFailed, Some(text)),
        Problem::NotReady { limit } => (
            Cause::StartFailed,
            Some(format!(
                "{python} was not ready within {} (startTimeoutMs)",
                duration(limit)
            )),
        ),
        Problem::Ended if out_of_memory => (
            Cause::StartFailed,
            Some(format!(
                "out of memory: the Linux OOM killer took {python} before it was ready"
            )),
        ),
        Problem::Ended => (Cause::StartFailed, Some(format!("{python} ended before it was ready"))),
    };
    let exit = ExitReason {
        status: finished.status,
        cause,
        evidence,
        pid: finished.pid,
        generation: request.generation,
        uptime: finished.uptime,
        usage: finished.usage,
        crash_traceback: crash_traceback(&finished.stderr_tail),
        stderr_tail: finished.stderr_tail,
        cell: None,
        leftovers: finished.leftovers,
        message: String::new(),
    };
    let subject = format!("kernel \"{}\"", request.kernel.id);
    let next = match printed(&exit.stderr_tail) {
        Some(text) if cause == Cause::StartFailed => format!("The next call tries again. It printed \"{text}\"."),
        _ => "The next call tries again.".to_owned(),
    };
    let exit = exit.told(&Telling {
        subject: &subject,
        detail: detail.as_deref(),
        next: &next,
    });
    StartFailed {
        code: FailureCode::KernelStart,
        message: exit.message.clone(),
        stderr_tail: exit.stderr_tail.clone(),
        exit: Some(Arc::new(exit)),
    }
}

fn never_was(request: &Request, problem: Problem) -> StartFailed {
    let why = match problem {
        Problem::Cancelled(cause) => format!("{} before there was a process", gave_up(cause)),
        Problem::Message(text) | Problem::Says(text) | Problem::Broken(text) => text,
        Problem::Ended => "there was no process".to_owned(),
        Problem::NotReady { limit } => format!("there was no process within {}", duration(limit)),
    };
    // What comes from below may be a sentence already.
    let why = why.trim_end_matches('.');
    let message = format!(
        "Kernel \"{}\" could not be started: {why}. The next call tries again.",
        request.kernel.id
    );
    StartFailed {
        code: FailureCode::KernelStart,
        message,
        exit: None,
        stderr_tail: String::new(),
    }
}

fn gave_up(cause: Cause) -> &'static str {
    match cause {
        Cause::Close => "close() was called",
        Cause::Kill => "the start was given up",
        _ => "it was given up",
    }
}

/// The end of what was printed, as much as fits into a message.
fn printed(tail: &str) -> Option<String> {
    const SHOWN: usize = 600;
    let text = tail.trim();
    let start = text.ceil_char_boundary(text.len().saturating_sub(SHOWN));
    (!text.is_empty()).then(|| {
        if start > 0 {
            format!("… {}", &text[start..])
        } else {
            text.to_owned()
        }
    })
}

/// A life with the state of the first of these copies that can be thawed. Where none can: a fresh one, or with `must` none.
pub async fn thawed(mut request: Request, copies: Vec<Arc<Frozen>>, must: bool) -> Launched {
    const GONE: &str = "the checkpoint is gone";
    if !request.pause.is_zero() {
        sleep(request.pause).await;
        request.pause = Duration::ZERO;
    }
    let began = Instant::now();
    let launcher = request.launcher.clone();
    let mut why = GONE.to_owned();
    {
        let _permit = launcher.forks.acquire().await;
        for frozen in copies {
            if request.cancelled.borrow().is_some() {
                break;
            }
            match thaw_one(&request, &frozen, began).await {
                Ok((life, facts, failed_callbacks)) => {
                    return Launched {
                        fell_back: None,
                        result: Ok((life, facts)),
                        cells: Some(frozen.cells),
                        failed_callbacks,
                        lost_copy: None,
                    };
                }
                Err(text) => why = text,
            }
        }
    }
    if must {
        let message = format!("Kernel \"{}\" could not be rolled back: {why}.", request.kernel.id);
        return Launched::without_copy(FailureCode::CheckpointGone, message);
    }
    Launched {
        lost_copy: Some(why),
        ..launch(request).await
    }
}

type Thawed = (Box<Life>, LifeFacts, Vec<String>);

async fn thaw_one(request: &Request, frozen: &Frozen, began: Instant) -> Result<Thawed, String> {
    let (launcher, kernel) = (&request.launcher, &request.kernel);
    let marker = launcher.mark.of_life(request.number, request.generation);
    // Not given up half-way: the frozen copy could not be asked again.
    let mut life = match frozen.take_if_last().await {
        Some(last) => last,
        None => frozen.copy(marker).await?,
    };
    launcher.oom.life_began(request.number, &kernel.id, life.root());
    let thawing = Thawing {
        what: "checkpoint",
        environment: Vec::new(),
        cwd: None,
        init: None,
    };
    let mut cancelled = request.cancelled.clone();
    let outcome = tokio::select! {
        biased;
        _ = cancelled.wait_for(Option::is_some) => Err("it was given up".to_owned()),
        outcome = thaw(&mut life, &thawing, kernel, Instant::now() + kernel.start_timeout) => outcome,
    };
    match outcome {
        Ok(mut ready) => {
            let failed = std::mem::take(&mut ready.failed);
            let facts = facts_of(&life, ready, request.generation, Launch::Checkpoint, began.elapsed());
            Ok((life, facts, failed))
        }
        Err(why) => {
            launcher.oom.ended(life.pid());
            copy::end(life).await;
            Err(why)
        }
    }
}
