//! Queries that wait: which is asked next, and who is told that it takes too long. Pure, like the state machine: it is given the
//! time, and says what to do.
//!
//! One is with the life at a time. While a cell runs the life answers only when that cell awaits something, so there is little
//! patience; a query that was given up then is answered with "late" when its turn comes, and only then is the next one sent.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::event::RequestId;
use crate::wire::{CellId, Query};

/// How long a query may take: on an idle life, and while a cell runs. The first completion loads what it needs, which can take
/// a second.
const PATIENCE: Duration = Duration::from_secs(5);
const BUSY_PATIENCE: Duration = Duration::from_secs(2);
/// How long it may go on after it was interrupted.
const GRACE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub struct Queries {
    waiting: VecDeque<Waiting>,
    sent: Option<Sent>,
}

#[derive(Debug)]
struct Waiting {
    request: RequestId,
    query: Query,
    /// `None`: the life is not there yet, and its start has a limit of its own.
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Sent {
    id: CellId,
    /// `None`: it was given up.
    request: Option<(RequestId, &'static str)>,
    /// A cell was running when it was sent.
    in_cell: bool,
    interrupted: bool,
    deadline: Instant,
}

/// What the life is doing, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// One is being started.
    Awaited,
    Idle,
    Busy,
    /// There is none, and none is on its way.
    Absent,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Send {
        query: Query,
        /// For how long an answer is wanted.
        limit: Duration,
    },
    Interrupt(CellId),
    /// It has taken too long, and why that may be.
    TooLong(RequestId, &'static str, Life),
    Absent(RequestId, &'static str),
}

impl Query {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Complete { .. } => "complete()",
            Self::Inspect { .. } => "inspect()",
            Self::IsComplete { .. } => "isComplete()",
        }
    }
}

impl Queries {
    pub fn ask(&mut self, request: RequestId, query: Query, life: Life, now: Instant) {
        let deadline = match life {
            Life::Awaited | Life::Absent => None,
            Life::Idle => Some(now + PATIENCE),
            Life::Busy => Some(now + BUSY_PATIENCE),
        };
        self.waiting.push_back(Waiting {
            request,
            query,
            deadline,
        });
    }

    /// The next thing to do, until there is none. A `Send` is followed by `sent`.
    pub fn step(&mut self, life: Life, now: Instant) -> Option<Step> {
        if let Some(sent) = &mut self.sent
            && sent.deadline <= now
        {
            if !sent.in_cell && !sent.interrupted {
                sent.interrupted = true;
                sent.deadline = now + GRACE;
                return Some(Step::Interrupt(sent.id));
            }
            if let Some((request, name)) = sent.request.take() {
                return Some(Step::TooLong(request, name, life));
            }
        }
        let first = self.waiting.front_mut()?;
        let name = first.query.name();
        match life {
            Life::Awaited => return None,
            Life::Absent => {
                let request = first.request;
                self.waiting.pop_front();
                return Some(Step::Absent(request, name));
            }
            Life::Idle | Life::Busy => {}
        }
        let deadline = *first.deadline.get_or_insert(now + PATIENCE);
        // Behind one that was given up, nobody is answered before the cell is over.
        let in_vain = life == Life::Busy && self.sent.as_ref().is_some_and(|sent| sent.request.is_none());
        if deadline <= now || in_vain {
            let request = first.request;
            self.waiting.pop_front();
            return Some(Step::TooLong(request, name, life));
        }
        if self.sent.is_some() {
            return None;
        }
        let Waiting { query, .. } = self.waiting.front()?;
        let limit = deadline - now;
        Some(Step::Send {
            query: query.clone(),
            limit,
        })
    }

    /// The first of those that wait has been sent with this id.
    pub fn sent(&mut self, id: CellId, limit: Duration, life: Life, now: Instant) {
        if let Some(Waiting { request, query, .. }) = self.waiting.pop_front() {
            self.sent = Some(Sent {
                id,
                request: Some((request, query.name())),
                in_cell: life == Life::Busy,
                interrupted: false,
                deadline: now + limit,
            });
        }
    }

    /// The life has answered: who waits for that, if it was asked at all.
    pub fn answered(&mut self, id: CellId) -> Result<Option<(RequestId, &'static str)>, NotAsked> {
        match self.sent.take_if(|sent| sent.id == id) {
            Some(sent) => Ok(sent.request),
            None => Err(NotAsked),
        }
    }

    /// Whom an interrupt of an idle kernel is for.
    pub fn interrupted(&mut self, now: Instant) -> Option<CellId> {
        let sent = self.sent.as_mut().filter(|sent| !sent.in_cell)?;
        sent.interrupted = true;
        sent.deadline = now + GRACE;
        Some(sent.id)
    }

    /// The life is gone, and with it the answers.
    pub fn ended(&mut self) -> Vec<(RequestId, &'static str)> {
        let sent = self.sent.take().and_then(|sent| sent.request);
        let waiting = self
            .waiting
            .drain(..)
            .map(|waiting| (waiting.request, waiting.query.name()));
        sent.into_iter().chain(waiting).collect()
    }

    /// When to step again if nothing happens before.
    pub fn next(&self) -> Option<Instant> {
        let sent = self
            .sent
            .as_ref()
            .filter(|sent| sent.request.is_some())
            .map(|sent| sent.deadline);
        self.waiting
            .iter()
            .filter_map(|waiting| waiting.deadline)
            .chain(sent)
            .min()
    }
}

/// An answer to what was not asked.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAsked;

#[cfg(test)]
mod tests {
    use super::*;

    fn query() -> Query {
        Query::IsComplete { code: String::new() }
    }

    fn send(queries: &mut Queries, id: CellId, life: Life, now: Instant) {
        match queries.step(life, now) {
            Some(Step::Send { limit, .. }) => queries.sent(id, limit, life, now),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_is_with_the_life_at_a_time() {
        let (mut queries, now) = (Queries::default(), Instant::now());
        queries.ask(1, query(), Life::Idle, now);
        queries.ask(2, query(), Life::Idle, now);
        send(&mut queries, 10, Life::Idle, now);
        assert_eq!(queries.step(Life::Idle, now), None);
        assert_eq!(queries.answered(9), Err(NotAsked));
        assert_eq!(queries.answered(10), Ok(Some((1, "isComplete()"))));
        send(&mut queries, 11, Life::Idle, now);
        assert_eq!(queries.answered(11), Ok(Some((2, "isComplete()"))));
        assert_eq!((queries.step(Life::Idle, now), queries.next()), (None, None));
    }

    #[test]
    fn on_an_idle_life_it_is_interrupted_before_it_is_given_up() {
        let (mut queries, now) = (Queries::default(), Instant::now());
        queries.ask(1, query(), Life::Idle, now);
        send(&mut queries, 10, Life::Idle, now);
        assert_eq!(queries.next(), Some(now + PATIENCE));
        let late = now + PATIENCE;
        assert_eq!(queries.step(Life::Idle, late), Some(Step::Interrupt(10)));
        assert_eq!(queries.step(Life::Idle, late), None);
        let later = late + GRACE;
        assert_eq!(
            queries.step(Life::Idle, later),
            Some(Step::TooLong(1, "isComplete()", Life::Idle))
        );
        assert_eq!(queries.next(), None);
        assert_eq!(queries.answered(10), Ok(None));
    }

    #[test]
    fn behind_one_that_a_busy_life_has_not_answered_nobody_waits() {
        let (mut queries, now) = (Queries::default(), Instant::now());
        queries.ask(1, query(), Life::Busy, now);
        send(&mut queries, 10, Life::Busy, now);
        let late = now + BUSY_PATIENCE;
        assert_eq!(
            queries.step(Life::Busy, late),
            Some(Step::TooLong(1, "isComplete()", Life::Busy))
        );
        queries.ask(2, query(), Life::Busy, late);
        assert_eq!(
            queries.step(Life::Busy, late),
            Some(Step::TooLong(2, "isComplete()", Life::Busy))
        );
        // The cell is over: the next one waits for the late answer and then has its turn.
        queries.ask(3, query(), Life::Idle, late);
        assert_eq!(queries.step(Life::Idle, late), None);
        assert_eq!(queries.answered(10), Ok(None));
        send(&mut queries, 11, Life::Idle, late);
    }

    #[test]
    fn without_a_life_it_fails_and_while_one_starts_it_waits() {
        let (mut queries, now) = (Queries::default(), Instant::now());
        queries.ask(1, query(), Life::Awaited, now);
        assert_eq!((queries.step(Life::Awaited, now), queries.next()), (None, None));
        assert_eq!(queries.step(Life::Absent, now), Some(Step::Absent(1, "isComplete()")));
        queries.ask(2, query(), Life::Idle, now);
        send(&mut queries, 10, Life::Idle, now);
        queries.ask(3, query(), Life::Idle, now);
        assert_eq!(queries.ended(), [(2, "isComplete()"), (3, "isComplete()")]);
        assert_eq!(queries.answered(10), Err(NotAsked));
    }
}
