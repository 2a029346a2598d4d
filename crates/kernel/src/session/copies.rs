//! What a kernel's task does about copies of its life: has them made, hands them on, and says why there are none.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::Session;
use crate::checkpoints::News;
use crate::copy::{Copying, Orphan, Purpose};
use crate::event::{Event, FailureCode, PublicState, Reply, RequestId};
use crate::state::Input;
use crate::tasks;
use crate::wire::{CellId, Copied};

/// How long a kill waits for the copy that is being made.
const LAST_COPY: Duration = Duration::from_millis(500);

/// The copy that the life is making of itself.
pub(super) struct InCopy {
    id: CellId,
    request: RequestId,
    purpose: Purpose,
    copying: Copying,
}

impl Session {
    /// What the life says of the copy that it was asked for.
    pub(super) fn copy_goes_on(&mut self, id: CellId, said: Copied) {
        let Some(((life, _), under_way)) = self.life.as_mut().zip(self.copying.as_mut()) else {
            self.apply(Input::Broken(
                "it copied itself, and nobody had asked for that".to_owned(),
            ));
            return;
        };
        if under_way.id != id {
            self.apply(Input::Broken(format!("it made copy {id}, which nobody had asked for")));
        } else if let Some(outcome) = under_way.copying.hear(life, said) {
            self.copied(outcome);
            self.apply(Input::Copied(id));
        }
    }

    /// A copy of what the last cell has done is not given up for a kill that comes a moment later.
    pub(super) async fn let_copy_finish(&mut self) {
        let deadline = Instant::now() + LAST_COPY;
        while self.machine.is_copying()
            && let Some((life, _)) = &mut self.life
            && let Ok(event) = timeout_at(deadline, life.event(usize::MAX)).await
        {
            self.hear(event).await;
        }
    }

    /// Has the life copy itself.
    pub(super) fn copy(&mut self, id: CellId, request: RequestId, purpose: Purpose) {
        let Some((life, _)) = &mut self.life else { return };
        if matches!(purpose, Purpose::Automatic) && self.checkpoints.stopped {
            self.deferred.push(Input::Copied(id));
            return;
        }
        let marker = match &purpose {
            Purpose::Fork(order) => order.marker.clone(),
            Purpose::Automatic | Purpose::Checkpoint => self.checkpoints.next_marker(&self.launcher.mark, self.number),
        };
        match Copying::begin(life, id, marker) {
            Ok(copying) => {
                self.copying = Some(InCopy {
                    id,
                    request,
                    purpose,
                    copying,
                });
            }
            Err(why) => {
                self.refused(purpose, request, &why);
                self.deferred.push(Input::Copied(id));
            }
        }
    }

    /// The life is done with the copy that it was making, one way or the other.
    pub(super) fn copied(&mut self, outcome: Result<Orphan, String>) {
        let (Some(under_way), Some((_, facts))) = (self.copying.take(), &self.life) else {
            return;
        };
        // Of a life that is being ended nothing is kept, and whoever has asked is told by its end.
        if self.machine.public_state() != PublicState::Idle {
            return;
        }
        let InCopy { request, purpose, .. } = under_way;
        match (outcome, purpose) {
            (Err(why), purpose) => self.refused(purpose, request, &why),
            (Ok(orphan), Purpose::Fork(order)) => {
                let (of, oom) = (self.options.id.clone(), self.launcher.oom.clone());
                tasks::spawn(order.carry_out(orphan, of, oom));
            }
            (Ok(orphan), Purpose::Checkpoint) => {
                let cells = self.machine.cells();
                self.checkpoints.take(orphan, facts.generation, cells, Some(request));
            }
            (Ok(orphan), Purpose::Automatic) => {
                self.checkpoints.last_refusal = None;
                let cells = self.machine.cells();
                self.checkpoints.take(orphan, facts.generation, cells, None);
            }
        }
    }

    pub(super) fn refused(&mut self, purpose: Purpose, request: RequestId, why: &str) {
        match purpose {
            Purpose::Fork(order) => order.refuse(&self.options.id, why),
            Purpose::Checkpoint => {
                let message = format!("Kernel \"{}\" was not copied: {why}.", self.options.id);
                self.fail(request, FailureCode::CopyRefused, message);
            }
            Purpose::Automatic => self.not_taken(why),
        }
    }

    /// After this cell no copy was taken. Said once for each reason.
    pub(super) fn not_taken(&mut self, why: &str) {
        if self.checkpoints.last_refusal.as_deref() == Some(why) {
            return;
        }
        self.checkpoints.last_refusal = Some(why.to_owned());
        let message = format!(
            "No checkpoint of kernel \"{}\" was taken after its last cell: {why}. If its life ends now, {}.",
            self.options.id,
            match self.checkpoints.cells() {
                Some(cells) => format!("its variables come back as they were after {}", count(cells)),
                None => "its variables are lost".to_owned(),
            }
        );
        self.warn("WARN_CHECKPOINT_SKIPPED", message);
    }

    pub(super) fn learn(&mut self, news: News) {
        match news {
            News::Kept(request, frozen, Ok(facts)) => {
                self.checkpoints.keep(frozen);
                let reply = Reply::Checkpoint(facts);
                self.events.push(Event::Settled { request, reply });
            }
            News::Kept(request, _, Err(why)) => self.refused(Purpose::Checkpoint, request, &why),
            News::Taken(frozen, Ok(())) => self.checkpoints.is_there(&frozen, self.options.checkpoint_bytes),
            News::Taken(frozen, Err(why)) => {
                self.checkpoints.failed(&frozen);
                self.not_taken(&why);
            }
            News::Unshared(bytes) => {
                let limit = self.options.checkpoint_bytes;
                if bytes <= limit || self.checkpoints.stopped {
                    return;
                }
                self.checkpoints.forget_automatic();
                self.checkpoints.stopped = true;
                let message = format!(
                    "No more checkpoints of kernel \"{}\" are taken after its cells, until it gets another life: the last one had come \
                     to {} MiB of its own, and checkpointBytes allows {} MiB. Its variables are lost if its life ends.",
                    self.options.id,
                    bytes >> 20,
                    limit >> 20
                );
                self.warn("WARN_CHECKPOINT_BUDGET", message);
            }
        }
    }
}

pub(super) fn count(cells: u32) -> String {
    format!("{cells} {}", if cells == 1 { "cell" } else { "cells" })
}
