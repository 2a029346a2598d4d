//! Copies of a life: how one is asked for, taken over, kept frozen, and thawed.
//!
//! A copy is made by the life itself (`copies.py`), comes to the template as an orphan, and is from then on supervised like any
//! life. It knows nothing of kernels: whose it becomes is decided by whoever has asked for it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kernelhost_forkserver::client::Foster;
use kernelhost_forkserver::protocol::{Thaw, payload};
use kernelhost_process::exit_reason::how;
use kernelhost_process::lifeline::Lifeline;
use kernelhost_process::{marker, usage};
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::event::{FailureCode, KernelNumber, Launch, LifeFacts};
use crate::launch::Launched;
use crate::life::{Life, LifeEvent, Wires};
use crate::oom_watch::OomWatch;
use crate::options::KernelOptions;
use crate::wire::{CellId, Copied, Message, Ready, Wire};

/// How long a copy may take to come to be, once its original has said that it is there.
const ADOPTION: Duration = Duration::from_secs(5);
/// How long a frozen copy may take to make a copy of itself: all the memory of its page tables is written anew.
const COPYING: Duration = Duration::from_secs(30);
/// How long a process may take to be gone after SIGKILL.
const ENDS: Duration = Duration::from_secs(5);

/// What a copy is made for.
#[derive(Debug)]
pub enum Purpose {
    /// It is kept frozen until the next one is.
    Automatic,
    /// It is kept frozen until it is discarded.
    Checkpoint,
    /// It becomes the first life of another kernel.
    Fork(Box<ForkOrder>),
}

/// A kernel that begins with a copy of another kernel's life.
pub struct ForkOrder {
    pub number: KernelNumber,
    pub kernel: Arc<KernelOptions>,
    /// Of its first life.
    pub marker: String,
    pub thawing: Thawing,
    /// Dropped where there will be no copy.
    pub outcome: oneshot::Sender<Launched>,
}

impl std::fmt::Debug for ForkOrder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ForkOrder({})", self.kernel.id)
    }
}

impl ForkOrder {
    /// Says why there is no copy. `of`: the kernel that was to be copied.
    pub fn refuse(self, of: &str, why: &str) {
        let message = format!("Kernel \"{of}\" was not copied: {why}.");
        let launched = Launched::without_copy(FailureCode::CopyRefused, message);
        self.outcome.send(launched).ok();
    }

    /// Makes the first life of the new kernel of a copy.
    pub async fn carry_out(self, orphan: Orphan, of: String, oom: Arc<OomWatch>) {
        let began = Instant::now();
        let deadline = began + self.kernel.start_timeout;
        let made = async {
            let mut life = Box::new(orphan.adopt().await?);
            oom.life_began(self.number, &self.kernel.id, life.root());
            match thaw(&mut life, &self.thawing, &self.kernel, deadline).await {
                Ok(ready) => Ok((life, ready)),
                Err(why) => {
                    oom.ended(life.pid());
                    end(life).await;
                    Err(why)
                }
            }
        };
        match made.await {
            Err(why) => self.refuse(&of, &why),
            Ok((life, mut ready)) => {
                let failed_callbacks = std::mem::take(&mut ready.failed);
                let facts = facts_of(&life, ready, 1, Launch::Fork, began.elapsed());
                let launched = Launched {
                    fell_back: None,
                    result: Ok((life, facts)),
                    cells: None,
                    failed_callbacks,
                    lost_copy: None,
                };
                if let Err(Launched {
                    result: Ok((life, _)), ..
                }) = self.outcome.send(launched)
                {
                    oom.ended(life.pid());
                    end(life).await;
                }
            }
        }
    }
}

pub fn facts_of(life: &Life, ready: Ready, generation: u32, launch: Launch, start: Duration) -> LifeFacts {
    LifeFacts {
        pid: life.pid(),
        generation,
        launch,
        launch_reason: None,
        start,
        python: ready.python,
        python_version: ready.python_version,
        shell: ready.shell,
    }
}

/// A copy that a life is making of itself.
pub struct Copying {
    id: CellId,
    marker: String,
    foster: Foster,
    ours: Option<HostEnds>,
}

/// The host's ends of the wires of a copy that nobody has taken over yet.
struct HostEnds {
    wire: Wire,
    outputs: [pipe::Receiver; 2],
    interrupts: OwnedFd,
    lifeline: Lifeline,
}

/// A copy whose original is done with it.
pub struct Orphan {
    marker: String,
    foster: Foster,
    ends: HostEnds,
}

impl Copying {
    /// Asks an idle life for a copy that carries this marker.
    pub fn begin(life: &mut Life, id: CellId, marker: String) -> Result<Self, String> {
        let foster = life.foster()?;
        life.copy(id, &marker);
        Ok(Self {
            id,
            marker,
            foster,
            ours: None,
        })
    }

    pub fn is(&self, id: CellId) -> bool {
        self.id == id
    }

    /// What the life says meanwhile; `None`: it goes on.
    pub fn hear(&mut self, life: &mut Life, said: Copied) -> Option<Result<Orphan, String>> {
        match said {
            Copied::Begins => {
                match Wires::new() {
                    Ok(Wires {
                        wire,
                        outputs,
                        interrupts,
                        lifeline,
                        theirs,
                    }) => {
                        self.ours = Some(HostEnds {
                            wire,
                            outputs,
                            interrupts,
                            lifeline,
                        });
                        life.give_wires(self.id, Ok(theirs));
                    }
                    Err(error) => life.give_wires(self.id, Err(error)),
                }
                None
            }
            Copied::Done => Some(
                self.ours
                    .take()
                    .map(|ends| Orphan {
                        marker: self.marker.clone(),
                        foster: self.foster.clone(),
                        ends,
                    })
                    .ok_or_else(|| "it copied itself without having been given wires".to_owned()),
            ),
            Copied::Refused(why) => Some(Err(why)),
        }
    }
}

impl Orphan {
    /// Makes a life of it that its template reaps.
    pub async fn adopt(self) -> Result<Life, String> {
        let Self {
            marker,
            foster,
            ends:
                HostEnds {
                    mut wire,
                    outputs,
                    interrupts,
                    lifeline,
                },
        } = self;
        let deadline = Instant::now() + ADOPTION;
        let pid = match timeout_at(deadline, wire.pid_of_copy()).await {
            Ok(Some(pid)) => pid,
            Ok(None) => return Err(format!("the copy ended before it was there{}", said(&outputs[1]))),
            Err(_) => return Err("the copy did not say in time that it is there".to_owned()),
        };
        let (pidfd, forked) = foster
            .adopt(pid, deadline)
            .await
            .map_err(|error| format!("the template could not take the copy in: {error}"))?;
        // It has told its pid itself; nobody else's process is taken over on its word.
        if pidfd.pid() != pid || !marker::is_on(pid, &marker) {
            return Err(format!("process {pid} is not the copy that was asked for"));
        }
        Life::forked(pidfd, forked, marker, wire, outputs, interrupts, lifeline)
            .map_err(|error| format!("the copy could not be watched: {error}"))
    }
}

/// The end of what a copy has printed, for a message.
fn said(stderr: &pipe::Receiver) -> String {
    let mut bytes = [0; 2048];
    let count = rustix::io::read(stderr, &mut bytes).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..count]);
    match text.trim() {
        "" => String::new(),
        text => format!("; it printed \"{text}\""),
    }
}

/// What a copy is to be once it is thawed.
#[derive(Debug, Clone)]
pub struct Thawing {
    pub what: &'static str,
    /// Changes to the environment of the original.
    pub environment: Vec<(String, Option<String>)>,
    pub cwd: Option<String>,
    pub init: Option<String>,
}

/// Makes a frozen copy run. Returns what it said of itself, or why it did not.
pub async fn thaw(
    life: &mut Life,
    thawing: &Thawing,
    kernel: &KernelOptions,
    deadline: Instant,
) -> Result<Ready, String> {
    life.thaw(&payload(&Thaw {
        what: thawing.what,
        env: &thawing.environment,
        cwd: thawing.cwd.as_deref(),
        init: thawing.init.as_deref(),
        oom_score_adj: kernel.oom_score_adj,
        functions: &kernel.functions,
        input: kernel.answers_input,
        limits: kernel.limits.rlimits(),
    }));
    loop {
        match timeout_at(deadline, life.event(usize::MAX)).await {
            Err(_) => return Err("it was not ready in time (startTimeoutMs)".to_owned()),
            Ok(LifeEvent::Message(Message::Ready(ready))) => {
                life.became_ready();
                return Ok(ready);
            }
            Ok(LifeEvent::Message(Message::StartFailed(failure))) => return Err(failure.to_string()),
            Ok(LifeEvent::Ended) => return Err("it ended before it was ready".to_owned()),
            Ok(LifeEvent::Broken(why)) => return Err(why),
            Ok(LifeEvent::Call(id, _)) => {
                let why = "the kernel is still starting: code that runs now cannot call into the daemon";
                life.returned(id, &crate::wire::refusal(why));
            }
            Ok(LifeEvent::Message(_) | LifeEvent::Text(..) | LifeEvent::CallGivenUp(_)) => {}
        }
    }
}

/// Ends a life that nobody needs.
pub async fn end(mut life: Box<Life>) {
    life.signal(libc::SIGKILL);
    life.wait_for_end(ENDS).await;
    life.finish(Duration::ZERO).await;
}

/// A copy that waits: the state of a kernel as it was at some moment.
pub struct Frozen {
    pub id: u32,
    /// Cells whose effects it has.
    pub cells: u32,
    /// 0 where there is no process (yet).
    pid: AtomicU32,
    /// Locked while it is adopted or copied. `None`: it is gone.
    life: Arc<Mutex<Option<Box<Life>>>>,
}

impl Frozen {
    /// One that will be there once the orphan is adopted, and the place to put it into.
    pub fn expected(id: u32, cells: u32) -> (Arc<Self>, OwnedMutexGuard<Option<Box<Life>>>) {
        let life = Arc::new(Mutex::new(None));
        let frozen = Arc::new(Self {
            id,
            cells,
            pid: AtomicU32::new(0),
            life: life.clone(),
        });
        // Nobody else has it yet.
        let place = life.try_lock_owned();
        (frozen, place.unwrap_or_else(|_| unreachable!("a new lock is free")))
    }

    pub async fn adopt(&self, orphan: Orphan, mut place: OwnedMutexGuard<Option<Box<Life>>>) -> Result<(), String> {
        let life = orphan.adopt().await?;
        self.pid
            .store(u32::try_from(life.pid()).unwrap_or(0), Ordering::Release);
        *place = Some(Box::new(life));
        Ok(())
    }

    pub fn pid(&self) -> Option<i32> {
        i32::try_from(self.pid.load(Ordering::Acquire))
            .ok()
            .filter(|pid| *pid > 0)
    }

    /// Whether it is there, as far as that can be told without waiting for whoever uses it.
    pub fn is_there(&self) -> bool {
        match self.life.try_lock() {
            Ok(life) => life.as_ref().is_some_and(|life| !life.has_ended()),
            Err(_) => true,
        }
    }

    /// Whether it could have come to so much memory of its own: what it shares counts too, because that can be told at once.
    pub fn may_have_unshared(&self, bytes: u64) -> bool {
        self.pid()
            .and_then(usage::anonymous)
            .is_some_and(|resident| resident > bytes)
    }

    /// What it has resident, in bytes.
    pub fn resident(&self) -> u64 {
        self.pid().and_then(usage::rss).unwrap_or(0)
    }

    /// The copy itself, where no more can be made of it because its template is gone: better once than never.
    pub async fn take_if_last(&self) -> Option<Box<Life>> {
        let life = self.life.lock().await.take_if(|life| life.foster().is_err());
        if life.is_some() {
            self.pid.store(0, Ordering::Release);
        }
        life
    }

    /// A copy of it, still frozen. It stays as it is.
    pub async fn copy(&self, marker: String) -> Result<Box<Life>, String> {
        const ONLY: CellId = 1;
        let deadline = Instant::now() + COPYING;
        let mut place = self.life.lock().await;
        let Some(life) = place.as_mut() else {
            return Err("the checkpoint is gone".to_owned());
        };
        let mut copying = Copying::begin(life, ONLY, marker)?;
        let outcome = loop {
            match timeout_at(deadline, life.event(usize::MAX)).await {
                Err(_) => break Err("it did not copy itself in time".to_owned()),
                Ok(LifeEvent::Message(Message::Copy(id, said))) if copying.is(id) => {
                    if let Some(outcome) = copying.hear(life, said) {
                        break outcome;
                    }
                }
                Ok(LifeEvent::Ended) => {
                    if let Some(life) = place.take() {
                        self.pid.store(0, Ordering::Release);
                        let finished = life.finish(Duration::ZERO).await;
                        break Err(format!("its process {}", how(&finished.status)));
                    }
                    break Err("its process has ended".to_owned());
                }
                Ok(LifeEvent::Broken(why)) => break Err(why),
                Ok(_) => {}
            }
        };
        drop(place);
        Ok(Box::new(outcome?.adopt().await?))
    }

    pub async fn end(&self) {
        let life = self.life.lock().await.take();
        self.pid.store(0, Ordering::Release);
        if let Some(mut life) = life {
            life.signal(libc::SIGKILL);
            life.wait_for_end(ENDS).await;
            // It has run nothing, so it has started nothing; its template reaps what is dropped.
            drop(life);
        }
    }
}
