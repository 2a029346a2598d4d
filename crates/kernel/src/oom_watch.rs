//! Which deaths the OOM killer is to blame for, and what it rests on.
//!
//! Where the kernel log can be read, it says which process was taken, and nothing else counts. Where it cannot, the counters
//! of their memory cgroups are looked at every second: each rise is one victim, and a life or template that is killed from
//! outside just then has been it. A victim that no such death explains was something that a kernel had started: a warning.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kernelhost_process::out_of_memory::{Finding, KernelLog, Kill, MemoryCgroup, Witness, kills_on_this_machine};
use kernelhost_process::process_tree::{Root, claims};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use crate::event::{Event, KernelNumber, Sink};
use crate::tasks;

/// How long the log may take to say what the machine's counter has said already.
const LOG_LAG: Duration = Duration::from_millis(100);
/// How often the counters are looked at. What rose longer ago than this explains no death.
const LOOK: Duration = Duration::from_secs(1);
/// Kills of the log that are remembered.
const REMEMBERED: usize = 64;

pub struct OomWatch {
    sink: Sink,
    inner: Mutex<Inner>,
    /// Counts what the log has told, for those who wait for a line.
    told: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    source: Option<Source>,
    /// What reads the source.
    reader: Option<JoinHandle<()>>,
    watched: HashMap<i32, Watched>,
    log: VecDeque<Kill>,
    /// What the machine counts when the log has told of every kill.
    machine_kills: Option<u64>,
    counters: HashMap<MemoryCgroup, Counter>,
}

enum Source {
    Log,
    /// The log cannot serve, for this reason.
    Counters(String),
}

struct Watched {
    cgroup: Option<MemoryCgroup>,
    /// `None`: a template.
    life: Option<WatchedLife>,
}

struct WatchedLife {
    kernel: KernelNumber,
    name: String,
    root: Root,
}

#[derive(Default)]
struct Counter {
    last: u64,
    /// Rises that no death has explained yet.
    victims: Vec<Instant>,
}

impl OomWatch {
    pub fn new(sink: Sink) -> Arc<Self> {
        Arc::new(Self {
            sink,
            inner: Mutex::default(),
            told: watch::Sender::new(0),
        })
    }

    /// A process begins to be a life. Must be called within the runtime.
    pub fn life_began(self: &Arc<Self>, kernel: KernelNumber, name: &str, root: Root) {
        let name = name.to_owned();
        self.watch(root.pid, Some(WatchedLife { kernel, name, root }));
    }

    fn watch(self: &Arc<Self>, pid: i32, life: Option<WatchedLife>) {
        let mut inner = self.inner();
        if inner.source.is_none() {
            let of = Arc::downgrade(self);
            // Before the log is opened: a kill in between is then one that the log has not told, and not the reverse.
            inner.machine_kills = kills_on_this_machine();
            let (source, reader) = match KernelLog::open() {
                Ok(log) => (Source::Log, tasks::spawn(read_log(of, log))),
                Err(why) => (Source::Counters(why), tasks::spawn(look_at_counters(of))),
            };
            (inner.source, inner.reader) = (Some(source), Some(reader));
        }
        let cgroup = match inner.source {
            Some(Source::Counters(_)) => MemoryCgroup::of(pid),
            _ => None,
        };
        if let Some(cgroup) = &cgroup
            && !inner.counters.contains_key(cgroup)
        {
            let last = cgroup.kills().unwrap_or(0);
            inner.counters.insert(
                cgroup.clone(),
                Counter {
                    last,
                    victims: Vec::new(),
                },
            );
        }
        // What is remembered of this pid was about another process.
        inner.log.retain(|kill| kill.pid != pid);
        inner.watched.insert(pid, Watched { cgroup, life });
    }

    /// The last life and the last template have ended.
    pub fn close(&self) {
        let mut inner = self.inner();
        inner.source = None;
        if let Some(reader) = inner.reader.take() {
            reader.abort();
        }
    }

    /// A life or template has ended, and its pid is about to be given up.
    pub fn ended(&self, pid: i32) {
        let mut inner = self.inner();
        inner.watched.remove(&pid);
        let Inner { watched, counters, .. } = &mut *inner;
        counters.retain(|cgroup, _| watched.values().any(|each| each.cgroup.as_ref() == Some(cgroup)));
    }

    /// Whether the OOM killer took a process that SIGKILL has ended and that nobody here has killed. To be asked before `ended`.
    pub async fn finding(&self, pid: i32) -> Finding {
        let (cgroup, why_no_log) = {
            let inner = self.inner();
            let cgroup = inner.watched.get(&pid).and_then(|watched| watched.cgroup.clone());
            let why = match &inner.source {
                Some(Source::Counters(why)) => Some(why.clone()),
                _ => None,
            };
            (cgroup, why)
        };
        match why_no_log {
            None => self.finding_by_log(pid).await,
            Some(why) => self.finding_by_counter(cgroup.as_ref(), why),
        }
    }

    async fn finding_by_log(&self, pid: i32) -> Finding {
        let counted = kills_on_this_machine();
        let deadline = Instant::now() + LOG_LAG;
        let mut told = self.told.subscribe();
        loop {
            let (line, all_told) = {
                let inner = self.inner();
                let kill = inner.log.iter().find(|kill| kill.pid == pid);
                let all_told = counted.is_some() && counted <= inner.machine_kills;
                (kill.map(|kill| kill.line.clone()), all_told)
            };
            if let Some(line) = line {
                let evidence = vec![format!("the kernel log says: {line}")];
                return Finding {
                    out_of_memory: true,
                    evidence,
                };
            }
            if all_told || timeout_at(deadline, told.changed()).await.is_err() {
                // What the log has not told by now, it will not tell.
                let mut inner = self.inner();
                inner.machine_kills = inner.machine_kills.max(counted);
                let evidence = vec![format!("the kernel log names no OOM kill of pid {pid}")];
                return Finding {
                    out_of_memory: false,
                    evidence,
                };
            }
        }
    }

    fn finding_by_counter(&self, cgroup: Option<&MemoryCgroup>, why_no_log: String) -> Finding {
        let Some(cgroup) = cgroup else {
            let none = "its memory cgroup cannot be seen from here, so no OOM counter was looked at".to_owned();
            return Finding {
                out_of_memory: false,
                evidence: vec![why_no_log, none],
            };
        };
        let file = cgroup.counter.display();
        let mut inner = self.inner();
        let counter = inner.counters.entry(cgroup.clone()).or_default();
        let (out_of_memory, found) = match counter.look(cgroup) {
            Err(error) => (
                false,
                format!("the OOM counter of its cgroup ({file}) cannot be read: {error}"),
            ),
            Ok(()) if counter.victims.is_empty() => (
                false,
                format!("the OOM counter of its cgroup {} ({file}) has not risen", cgroup.name),
            ),
            Ok(()) => {
                counter.victims.remove(0);
                (
                    true,
                    format!(
                        "the OOM counter of its cgroup {} ({file}) rose when it was killed",
                        cgroup.name
                    ),
                )
            }
        };
        Finding {
            out_of_memory,
            evidence: vec![found, why_no_log],
        }
    }

    fn heard(&self, kills: Vec<Kill>) {
        for kill in kills {
            let victim = {
                let mut inner = self.inner();
                if inner.log.len() == REMEMBERED {
                    inner.log.pop_front();
                }
                inner.log.push_back(kill.clone());
                inner.machine_kills = inner.machine_kills.map(|count| count + 1);
                if inner.watched.contains_key(&kill.pid) {
                    None
                } else {
                    let mut lives = inner.watched.values().filter_map(|watched| watched.life.as_ref());
                    let owner = lives.find(|life| claims(&life.root, kill.pid));
                    owner.map(|life| (life.kernel, life.name.clone()))
                }
            };
            self.told.send_modify(|count| *count += 1);
            if let Some((kernel, name)) = victim {
                let message = format!(
                    "The Linux OOM killer took process {} ({}), which kernel \"{name}\" had started; the kernel itself goes \
                     on. The kernel log says: {}",
                    kill.pid, kill.name, kill.line
                );
                self.warn(Some(kernel), message);
            }
        }
    }

    fn look(&self) {
        let mut unexplained = Vec::new();
        {
            let mut inner = self.inner();
            let Inner { watched, counters, .. } = &mut *inner;
            for (cgroup, counter) in counters {
                counter.look(cgroup).ok();
                let before = counter.victims.len();
                counter.victims.retain(|at| at.elapsed() < LOOK);
                let of_cgroup = watched.values().filter(|each| each.cgroup.as_ref() == Some(cgroup));
                let lives = of_cgroup.filter_map(|watched| watched.life.as_ref());
                let kernels: Vec<_> = lives.map(|life| (life.kernel, life.name.clone())).collect();
                // Where there is only a template, it was nothing of a kernel's.
                if kernels.is_empty() {
                    continue;
                }
                unexplained.extend((counter.victims.len()..before).map(|_| (cgroup.clone(), kernels.clone())));
            }
        }
        for (cgroup, kernels) in unexplained {
            let names: Vec<String> = kernels.iter().map(|(_, name)| format!("\"{name}\"")).collect();
            let message = format!(
                "The Linux OOM killer took a process of cgroup {}, and no kernel died of it: something that kernel {} had \
                 started, or another process of that cgroup. The counter {} rose.",
                cgroup.name,
                names.join(" or "),
                cgroup.counter.display()
            );
            let only = if let [(kernel, _)] = kernels[..] {
                Some(kernel)
            } else {
                None
            };
            self.warn(only, message);
        }
    }

    fn warn(&self, kernel: Option<KernelNumber>, message: String) {
        (self.sink)(vec![Event::Warning {
            kernel,
            code: "WARN_CHILD_OUT_OF_MEMORY",
            message,
        }]);
    }

    fn log_has_failed(&self, why: String) {
        self.inner().source = Some(Source::Counters(why));
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change is complete before anything that could panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Witness for OomWatch {
    fn began(self: Arc<Self>, pid: i32) {
        self.watch(pid, None);
    }

    fn finding(&self, pid: i32) -> Pin<Box<dyn Future<Output = Finding> + Send + '_>> {
        Box::pin(self.finding(pid))
    }

    fn ended(&self, pid: i32) {
        self.ended(pid);
    }
}

impl Counter {
    fn look(&mut self, cgroup: &MemoryCgroup) -> std::io::Result<()> {
        let now = cgroup.kills()?;
        let at = Instant::now();
        self.victims.extend((self.last..now).take(REMEMBERED).map(|_| at));
        self.last = now;
        Ok(())
    }
}

impl Drop for OomWatch {
    fn drop(&mut self) {
        self.close();
    }
}

async fn read_log(of: Weak<OomWatch>, log: KernelLog) {
    loop {
        let kills = log.kills().await;
        let Some(watch) = of.upgrade() else { return };
        match kills {
            Ok(kills) => watch.heard(kills),
            Err(error) => return watch.log_has_failed(format!("the kernel log (/dev/kmsg) cannot be read: {error}")),
        }
    }
}

async fn look_at_counters(of: Weak<OomWatch>) {
    loop {
        sleep(LOOK).await;
        let Some(watch) = of.upgrade() else { return };
        watch.look();
    }
}
