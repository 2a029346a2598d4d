//! The frozen copies of one kernel: which there are, which of them the next life is thawed from, and when they go.
//!
//! It must not know what the kernel is doing; the session tells it when copies come and are needed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kernelhost_process::marker::HostMark;
use kernelhost_process::usage;
use tokio::sync::mpsc;

use crate::aside::aside;
use crate::copy::{Frozen, Orphan};
use crate::event::{CheckpointFacts, RequestId};
use crate::tasks;

/// What becomes of copies, told to the session when it is so far.
pub enum News {
    /// Somebody has asked for this one.
    Kept(RequestId, Arc<Frozen>, Result<CheckpointFacts, String>),
    /// One that was taken after a cell.
    Taken(Arc<Frozen>, Result<(), String>),
    /// What the one before had come to have for itself, in bytes.
    Unshared(u64),
}

pub struct Checkpoints {
    news: mpsc::UnboundedSender<News>,
    last: u32,
    /// Taken after cells, newest first. More than one only while the newest is not there yet.
    automatic: Vec<Arc<Frozen>>,
    kept: HashMap<u32, Arc<Frozen>>,
    /// They have cost too much memory; no more are taken of this life.
    pub stopped: bool,
    /// Why none was taken the last time, so that it is said once.
    pub last_refusal: Option<String>,
}

impl Checkpoints {
    pub fn new() -> (Self, mpsc::UnboundedReceiver<News>) {
        let (news, receiver) = mpsc::unbounded_channel();
        let checkpoints = Self {
            news,
            last: 0,
            automatic: Vec::new(),
            kept: HashMap::new(),
            stopped: false,
            last_refusal: None,
        };
        (checkpoints, receiver)
    }

    /// The marker of the next copy.
    pub fn next_marker(&mut self, mark: &HostMark, kernel: u32) -> String {
        self.last += 1;
        mark.of_copy(kernel, self.last)
    }

    /// Takes over what the life has made of itself, with the marker that was given out last. `request`: who has asked for it.
    pub fn take(&mut self, orphan: Orphan, generation: u32, cells: u32, request: Option<RequestId>) {
        let (frozen, place) = Frozen::expected(self.last, cells);
        let news = self.news.clone();
        if request.is_none() {
            self.automatic.insert(0, frozen.clone());
        }
        tasks::spawn(async move {
            let adopted = frozen.adopt(orphan, place).await;
            let told = match request {
                None => News::Taken(frozen, adopted),
                Some(request) => {
                    let facts = CheckpointFacts {
                        id: frozen.id,
                        generation,
                        rss_bytes: frozen.resident(),
                    };
                    News::Kept(request, frozen, adopted.map(|()| facts))
                }
            };
            news.send(told).ok();
        });
    }

    pub fn keep(&mut self, frozen: Arc<Frozen>) {
        self.kept.insert(frozen.id, frozen);
    }

    /// The newest is there: those before it are not needed any more.
    /// `budget`: how much of its own memory one may have come to, in bytes.
    pub fn is_there(&mut self, newest: &Arc<Frozen>, budget: u64) {
        let Some(place) = self.automatic.iter().position(|frozen| Arc::ptr_eq(frozen, newest)) else {
            return;
        };
        for old in self.automatic.split_off(place + 1) {
            let news = self.news.clone();
            tasks::spawn(async move {
                if old.may_have_unshared(budget)
                    && let Some(pid) = old.pid()
                    && let Some(Some(bytes)) = aside(move || usage::unshared(pid)).await
                {
                    news.send(News::Unshared(bytes)).ok();
                }
                old.end().await;
            });
        }
    }

    /// This one did not come to be; the one before stays.
    pub fn failed(&mut self, frozen: &Arc<Frozen>) {
        self.automatic.retain(|other| !Arc::ptr_eq(other, frozen));
    }

    /// What the next life can be thawed from, best first.
    pub fn newest(&self) -> Vec<Arc<Frozen>> {
        self.automatic.clone()
    }

    /// How many cells' effects would come back.
    pub fn cells(&self) -> Option<u32> {
        self.automatic.first().map(|frozen| frozen.cells)
    }

    /// One that somebody has asked for and that is still there.
    pub fn get(&self, id: u32) -> Option<Arc<Frozen>> {
        self.kept.get(&id).filter(|frozen| frozen.is_there()).cloned()
    }

    pub fn discard(&mut self, id: u32) -> Option<Arc<Frozen>> {
        self.kept.remove(&id)
    }

    /// What was said of the life before does not hold for this one.
    pub fn life_began(&mut self) {
        self.stopped = false;
        self.last_refusal = None;
    }

    /// A life begins that has nothing to do with what was taken after cells.
    pub fn forget_automatic(&mut self) {
        for old in std::mem::take(&mut self.automatic) {
            tasks::spawn(async move { old.end().await });
        }
    }

    /// No life will follow.
    pub async fn end_all(&mut self) {
        const LIMIT: Duration = Duration::from_secs(5);
        let all = std::mem::take(&mut self.automatic).into_iter();
        let ending: Vec<_> = all
            .chain(std::mem::take(&mut self.kept).into_values())
            .map(|frozen| tasks::spawn(async move { frozen.end().await }))
            .collect();
        for end in ending {
            tokio::time::timeout(LIMIT, end).await.ok();
        }
    }
}
