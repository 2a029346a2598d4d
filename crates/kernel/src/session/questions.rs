//! What a kernel's task does about questions on code: which is sent when, and who is told what was answered.

use tokio::time::Instant;

use super::Session;
use crate::event::{Event, FailureCode, PublicState, Reply};
use crate::queries::{self, Step};
use crate::state::{Input, Why};
use crate::wire::{self, CellId};

impl Session {
    pub(super) fn life_for_queries(&self) -> queries::Life {
        if self.machine.is_copying() {
            return queries::Life::Awaited;
        }
        match self.machine.public_state() {
            PublicState::Starting => queries::Life::Awaited,
            PublicState::Idle => queries::Life::Idle,
            PublicState::Running => queries::Life::Busy,
            PublicState::Absent | PublicState::Ending | PublicState::Closed => queries::Life::Absent,
        }
    }

    pub(super) fn step_queries(&mut self) {
        let now = Instant::now();
        let state = self.life_for_queries();
        while let Some(step) = self.queries.step(state, now) {
            match step {
                Step::Send { query, limit } => {
                    let Some((life, _)) = &mut self.life else { return };
                    let id = self.machine.take_number();
                    life.query(id, &query, limit);
                    self.queries.sent(id, limit, state, now);
                }
                Step::Interrupt(id) => {
                    if let Some((life, _)) = &self.life {
                        life.interrupt(id);
                    }
                }
                Step::TooLong(request, name, state) => {
                    let why = if state == queries::Life::Busy {
                        "a cell is running, and it does not await anything meanwhile"
                    } else {
                        "it goes on after an interrupt; restart() ends it"
                    };
                    let message = format!(
                        "{name} on kernel \"{}\" was not answered in time: {why}.",
                        self.options.id
                    );
                    self.fail(request, FailureCode::KernelBusy, message);
                }
                Step::Absent(request, name) => {
                    let id = &self.options.id;
                    let (code, message) = if self.machine.public_state() == PublicState::Closed {
                        (FailureCode::KernelClosed, self.failure_message(&Why::Closed, None))
                    } else {
                        let message = format!("Kernel \"{id}\" has no life that {name} could ask. start() brings one.");
                        (FailureCode::KernelAbsent, message)
                    };
                    self.fail(request, code, message);
                }
            }
        }
    }

    /// An interrupt of a kernel that runs no cell is for the query that it answers.
    pub(super) fn interrupt_query(&mut self, input: &Input) {
        if matches!(input, Input::Interrupt(_))
            && self.machine.public_state() == PublicState::Idle
            && let (Some(id), Some((life, _))) = (self.queries.interrupted(Instant::now()), &self.life)
        {
            life.interrupt(id);
        }
    }

    pub(super) fn answered(&mut self, id: CellId, answer: wire::Answer) {
        match self.queries.answered(id) {
            Ok(Some((request, name))) => match answer {
                wire::Answer::Found(answer) => {
                    let reply = Reply::Answer(answer);
                    self.events.push(Event::Settled { request, reply });
                }
                wire::Answer::Failed { name: error, value } => {
                    let colon = if value.is_empty() { "" } else { ": " };
                    let message = format!(
                        "{name} on kernel \"{}\" failed with {error}{colon}{value}",
                        self.options.id
                    );
                    self.fail(request, FailureCode::QueryFailed, message);
                }
                wire::Answer::Late => {
                    let message = format!("{name} on kernel \"{}\" was not answered in time.", self.options.id);
                    self.fail(request, FailureCode::KernelBusy, message);
                }
            },
            Ok(None) => {}
            Err(queries::NotAsked) => {
                self.apply(Input::Broken(format!("it answered query {id}, which it was not asked")));
            }
        }
    }
}
