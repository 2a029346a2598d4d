//! The templates of a host: one per profile, started when first needed, replaced when dead, stale or worn.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kernelhost_process::exit_reason::ExitReason;
use kernelhost_process::marker;
use kernelhost_process::out_of_memory::Witness;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::client::{Remote, Template, TemplateError, TemplateFacts};
use crate::process::TemplateProcess;
use crate::profile::Profile;

/// Templates alive at once; a kernel that would need one more is spawned cold. Each costs about as much memory as one cold
/// kernel.
const MAX_TEMPLATES: usize = 4;
/// A template that has not been asked for this long makes room for another, once there are as many as there may be.
const IDLE_BEFORE_REPLACED: Duration = Duration::from_mins(1);
/// A template that has forked this often is replaced, so that what slowly grows in it does not grow for ever.
const MAX_FORKS: u64 = 10_000;
/// How long a template may take to get ready, when those who wait for it have more patience: preloads can be large.
const START_LIMIT: Duration = Duration::from_mins(5);
/// After a failed start the next one waits this long, doubled with each failure in a row.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// What happens to templates, for the host to tell.
#[derive(Debug, Clone)]
pub enum TemplateEvent {
    Ready(TemplateFacts),
    Ended(TemplateFacts, Arc<ExitReason>),
}

type Listener = Arc<dyn Fn(TemplateEvent) + Send + Sync>;
type Outcome = Result<Arc<Warm>, TemplateError>;

/// A template and how often it has forked.
#[derive(Debug)]
pub struct Warm {
    pub template: Template,
    forks: AtomicU64,
    asked: Mutex<Instant>,
    /// One of its forks has become ready.
    sound: AtomicBool,
    /// Failed starts in a row before this one.
    failures_before: u32,
}

enum Slot {
    /// Whoever waits subscribes. When all of them have been called off, the start is given up, so that the next one begins
    /// anew and does not join one that is stuck.
    Starting(Arc<watch::Sender<Option<Outcome>>>),
    Ready(Arc<Warm>),
    Failed {
        error: TemplateError,
        failures: u32,
        retry_at: Instant,
    },
}

impl Slot {
    fn failed(error: TemplateError, failures_before: u32, pause: Duration) -> Self {
        Self::Failed {
            error,
            failures: failures_before + 1,
            retry_at: Instant::now() + pause,
        }
    }

    fn is_in_use(&self) -> bool {
        match self {
            Self::Starting(_) => true,
            Self::Ready(warm) => !warm.template.has_ended(),
            Self::Failed { .. } => false,
        }
    }
}

pub struct Templates {
    boot: String,
    /// Of every template: a variable by which it and what it starts is found.
    marker: (String, String),
    witness: Arc<dyn Witness>,
    listener: Listener,
    slots: Mutex<HashMap<Profile, Slot>>,
    /// All that have been started and may still be alive, also those that are replaced and only wait for their last kernel.
    started: Mutex<Vec<Remote>>,
    /// How many are being started, and whether the host has closed.
    starting: watch::Sender<usize>,
    closed: watch::Sender<bool>,
}

impl Templates {
    /// `boot` is the path of `boot.py`; `marker` is the value of the marker that templates carry; `witness` is asked about a
    /// template that somebody has killed.
    pub fn new(
        boot: String,
        marker: String,
        witness: Arc<dyn Witness>,
        listener: impl Fn(TemplateEvent) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            boot,
            marker: (marker::VARIABLE.to_owned(), marker),
            witness,
            listener: Arc::new(listener),
            slots: Mutex::default(),
            started: Mutex::default(),
            starting: watch::Sender::new(0),
            closed: watch::Sender::new(false),
        })
    }

    /// The template of this profile, started if there is none. `environment` is the whole environment of the kernel that asks.
    pub async fn acquire(
        self: &Arc<Self>,
        profile: &Profile,
        environment: &[(String, String)],
        limit: Duration,
    ) -> Outcome {
        let deadline = Instant::now() + limit;
        loop {
            let mut starting = match self.look(profile, environment) {
                Ok(starting) => starting,
                Err(known) => {
                    if let Ok(warm) = &known {
                        warm.note_use();
                    }
                    return known;
                }
            };
            let outcome = match timeout_at(deadline, starting.wait_for(Option::is_some)).await {
                Ok(Ok(outcome)) => outcome.clone(),
                Ok(Err(_)) => Some(Err(TemplateError::Cancelled)),
                Err(_) => None,
            };
            match outcome {
                // Given up for those who came before us.
                Some(Err(TemplateError::Cancelled)) => {}
                Some(outcome) => return outcome,
                None => {
                    // This caller's patience is not the template's limit: large preloads may still serve the next caller.
                    tokio::spawn(async move { starting.wait_for(Option::is_some).await.is_ok() });
                    return Err(TemplateError::TimedOut {
                        limit_ms: limit.as_millis(),
                        stderr_tail: String::new(),
                    });
                }
            }
        }
    }

    /// A template that did not answer, or whose fork hung, is not asked again; its kernels keep it until they end. One that has
    /// served before, or is gone, is replaced at once. One that never has was a failed start: the second in a row is waited for.
    pub fn discard(&self, profile: &Profile, unsound: &Arc<Warm>, why: &str) {
        let mut slots = lock(&self.slots);
        if !matches!(slots.get(profile), Some(Slot::Ready(warm)) if Arc::ptr_eq(warm, unsound)) {
            return;
        }
        if unsound.sound.load(Ordering::Relaxed) || unsound.template.has_ended() {
            slots.remove(profile);
        } else {
            let error = TemplateError::Unsound(why.to_owned());
            // Once may be chance: it was stopped, say.
            let pause = unsound
                .failures_before
                .checked_sub(1)
                .map_or(Duration::ZERO, pause_after);
            slots.insert(profile.clone(), Slot::failed(error, unsound.failures_before, pause));
        }
    }

    /// Ends all templates, and returns when they are gone. None is started afterwards.
    pub async fn close(&self) {
        self.closed.send_replace(true);
        self.starting.subscribe().wait_for(|count| *count == 0).await.ok();
        lock(&self.slots).clear();
        let started = std::mem::take(&mut *lock(&self.started));
        for remote in &started {
            remote.shut_down();
        }
        for remote in started {
            remote.ended().await;
        }
    }

    /// Either what is known already, or something to wait for.
    fn look(
        self: &Arc<Self>,
        profile: &Profile,
        environment: &[(String, String)],
    ) -> Result<watch::Receiver<Option<Outcome>>, Outcome> {
        let mut slots = lock(&self.slots);
        if *self.closed.borrow() {
            return Err(Err(TemplateError::Closed));
        }
        let mut failures = 0;
        match slots.get(profile) {
            Some(Slot::Ready(warm)) if warm.usable() => return Err(Ok(warm.clone())),
            // One that nobody waits for is being given up.
            Some(Slot::Starting(outcome)) if outcome.receiver_count() > 0 || outcome.borrow().is_some() => {
                return Ok(outcome.subscribe());
            }
            Some(Slot::Failed { error, retry_at, .. }) if Instant::now() < *retry_at => return Err(Err(error.clone())),
            Some(Slot::Failed { failures: so_far, .. }) => failures = *so_far,
            Some(Slot::Ready(_) | Slot::Starting(_)) => {}
            None => {
                let in_use = slots.values().filter(|slot| slot.is_in_use()).count();
                if in_use >= MAX_TEMPLATES && !make_room(&mut slots) {
                    return Err(Err(TemplateError::TooMany(in_use)));
                }
            }
        }
        let (outcome, receiver) = watch::channel(None);
        let outcome = Arc::new(outcome);
        slots.insert(profile.clone(), Slot::Starting(outcome.clone()));
        drop(slots);
        let (this, profile) = (self.clone(), profile.clone());
        let mut environment = profile.template_environment(environment);
        environment.push(self.marker.clone());
        self.starting.send_modify(|count| *count += 1);
        // Its own task: a caller that stops waiting does not stop the others' template.
        tokio::spawn(async move {
            let started = this.start(&profile, &environment, &outcome, failures).await;
            outcome.send_replace(Some(started));
            this.starting.send_modify(|count| *count -= 1);
        });
        Ok(receiver)
    }

    async fn start(
        self: &Arc<Self>,
        profile: &Profile,
        environment: &[(String, String)],
        waiting: &Arc<watch::Sender<Option<Outcome>>>,
        failures: u32,
    ) -> Outcome {
        let listener = self.listener.clone();
        let on_end = move |facts, reason| listener(TemplateEvent::Ended(facts, reason));
        let mut closed = self.closed.subscribe();
        let cancelled = async {
            tokio::select! {
                () = waiting.closed() => {}
                _ = closed.wait_for(|closed| *closed) => {}
            }
        };
        let deadline = Instant::now() + START_LIMIT;
        let process = TemplateProcess::spawn(profile, environment, &self.boot, self.witness.clone());
        let outcome = match process {
            Ok(process) => Template::start(process, profile, deadline, cancelled, on_end).await,
            Err(error) => Err(error),
        };
        let mut slots = lock(&self.slots);
        let is_ours = matches!(slots.get(profile), Some(Slot::Starting(ours)) if Arc::ptr_eq(ours, waiting));
        let template = match outcome {
            Ok(template) => template,
            Err(error) => {
                if is_ours && matches!(error, TemplateError::Cancelled) {
                    slots.remove(profile);
                } else if is_ours {
                    slots.insert(
                        profile.clone(),
                        Slot::failed(error.clone(), failures, pause_after(failures)),
                    );
                }
                return Err(error);
            }
        };
        (self.listener)(TemplateEvent::Ready(template.facts.clone()));
        let mut started = lock(&self.started);
        started.retain(|remote| !remote.has_ended());
        started.push(template.remote());
        let warm = Arc::new(Warm {
            template,
            forks: AtomicU64::new(1),
            asked: Mutex::new(Instant::now()),
            sound: AtomicBool::new(false),
            failures_before: failures,
        });
        if is_ours {
            slots.insert(profile.clone(), Slot::Ready(warm.clone()));
        }
        Ok(warm)
    }
}

/// How long a start waits after one that failed, and so many failures in a row before that.
fn pause_after(failures_before: u32) -> Duration {
    FIRST_PAUSE
        .saturating_mul(1 << failures_before.min(6))
        .min(LONGEST_PAUSE)
}

/// Lets go of the template that has been idle longest, if that is long enough. It goes on until its last kernel has ended.
fn make_room(slots: &mut HashMap<Profile, Slot>) -> bool {
    let idle = slots.iter().filter_map(|(profile, slot)| match slot {
        Slot::Ready(warm) => Some((*lock(&warm.asked), profile)),
        _ => None,
    });
    let longest = idle
        .min_by_key(|(asked, _)| *asked)
        .map(|(asked, profile)| (asked, profile.clone()));
    match longest {
        Some((asked, profile)) if asked.elapsed() >= IDLE_BEFORE_REPLACED => slots.remove(&profile).is_some(),
        _ => false,
    }
}

impl Warm {
    /// A fork of it is ready.
    pub fn proved_sound(&self) {
        self.sound.store(true, Ordering::Relaxed);
    }

    fn note_use(&self) {
        self.forks.fetch_add(1, Ordering::Relaxed);
        *lock(&self.asked) = Instant::now();
    }

    fn usable(&self) -> bool {
        !self.template.has_ended() && self.forks.load(Ordering::Relaxed) < MAX_FORKS && !self.template.is_stale()
    }
}

/// No code that holds these locks can leave the map half changed, so a poisoned one is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
