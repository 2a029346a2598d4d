use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::event::Launch;
use crate::options::Shell;

const GRACE: Duration = Duration::from_secs(2);

fn machine(stuck: Stuck, recovery: Recovery) -> Machine {
    Machine::new(Policy {
        stuck,
        recovery,
        interrupt_grace: GRACE,
    })
}

fn cell(timeout: Option<u64>) -> CellRequest {
    CellRequest {
        code: "1".into(),
        silent: false,
        timeout: timeout.map(Duration::from_millis),
        max_output_bytes: None,
        stream: false,
    }
}

fn life() -> LifeFacts {
    LifeFacts {
        pid: 1,
        generation: 1,
        launch: Launch::Fork,
        launch_reason: None,
        start: Duration::ZERO,
        python: String::new(),
        python_version: String::new(),
        shell: Shell::Plain,
    }
}

fn exit() -> Arc<ExitReason> {
    Arc::new(ExitReason {
        status: ExitStatus::Signaled {
            number: 9,
            core_dumped: false,
        },
        cause: Cause::ExternalSignal,
        evidence: Vec::new(),
        pid: 1,
        generation: 1,
        uptime: Duration::ZERO,
        usage: None,
        stderr_tail: String::new(),
        crash_traceback: None,
        cell: None,
        leftovers: kernelhost_process::process_tree::Leftovers::default(),
        message: String::new(),
    })
}

fn ok() -> Done {
    Done {
        ok: true,
        ..Done::default()
    }
}

fn failed_start(exit: Option<Arc<ExitReason>>) -> StartFailed {
    StartFailed {
        code: FailureCode::KernelStart,
        message: String::new(),
        exit,
        stderr_tail: String::new(),
    }
}

/// Effects in a short form that reads well in a table.
fn short(effects: &[Effect]) -> String {
    let answer = |answer: &Answer| match answer {
        Answer::Done => "done".to_owned(),
        Answer::Life => "life".to_owned(),
        Answer::Exit(_) => "exit".to_owned(),
        Answer::Cell { status, recovered, .. } => {
            let recovered = recovered
                .as_ref()
                .map(|recovered| format!(" {:?} lost {}", recovered.state, recovered.lost_cells).replace(" Fresh", ""));
            format!("{status:?}{}", recovered.unwrap_or_default())
        }
        Answer::Failed { code, .. } => format!("{code:?}"),
    };
    let texts = effects.iter().map(|effect| match effect {
        Effect::Launch {
            generation,
            pause,
            origin,
        } => {
            let origin = match origin {
                Origin::Fresh => String::new(),
                other => format!(" from {other:?}"),
            };
            let pause = if pause.is_zero() {
                String::new()
            } else {
                format!(" after {} ms", pause.as_millis())
            };
            format!("launch {generation}{pause}{origin}")
        }
        Effect::Copy { id, request, .. } => format!("copy {id} for {request}"),
        Effect::CancelLaunch(cause) => format!("cancel {cause:?}"),
        Effect::Send { cell, request, .. } => format!("send {cell} for {request}"),
        Effect::Interrupt(cell) => format!("interrupt {cell}"),
        Effect::ShutDown => "shutdown".to_owned(),
        Effect::Signal(number) => format!("signal {number}"),
        Effect::Arm(timer, after) => format!("arm {timer:?} {}", after.as_millis()),
        Effect::Disarm(_) => String::new(),
        Effect::Started(_) => "started".to_owned(),
        Effect::Exited(_) => "exited".to_owned(),
        Effect::Settle(request, of) => format!("{request}: {}", answer(of)),
    });
    texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
}

fn run(machine: &mut Machine, steps: Vec<(Input, &str)>) {
    for (number, (input, expected)) in steps.into_iter().enumerate() {
        let said = format!("{input:?}");
        assert_eq!(short(&machine.on(input)), expected, "step {number}: {said}");
    }
}

#[test]
fn with_recovery_checkpoint_a_copy_is_taken_after_each_cell_that_ended_well_and_thawed_after_a_death() {
    let mut machine = machine(Stuck::End, Recovery::Checkpoint);
    let failed = || Input::Done(3, Done::default());
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(None)), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1"),
            (Input::Execute(2, cell(None)), ""),
            (Input::Done(1, ok()), "1: Ok; copy 2 for 0"),
            (Input::Interrupt(3), "interrupt 2; arm Grace(2) 2000"),
            (Input::Copied(2), "3: done; send 3 for 2"),
            (failed(), "2: Error"),
            (Input::Execute(4, cell(None)), "send 4 for 4"),
            (Input::Ended(exit()), "4: KernelDied; exited"),
            (Input::Execute(5, cell(None)), "launch 2 from Newest"),
            (Input::Thawed(life(), 1), "started; send 5 for 5"),
            (Input::Done(5, ok()), "5: Ok Checkpoint lost 2; copy 6 for 0"),
            // It dies while it copies itself: nobody waits for that copy.
            (Input::Ended(exit()), "0: KernelDied; exited"),
            (Input::Start(6), "launch 3 from Newest"),
            (Input::Thawed(life(), 1), "started; 6: life"),
            (Input::Ended(exit()), "exited"),
            // A life that has nothing to do with the one before.
            (Input::Restart(7), "launch 4"),
            (Input::Ready(life()), "started; 7: life"),
        ],
    );
}

#[test]
fn a_rollback_ends_the_life_and_thaws_the_checkpoint() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Copy(1, Purpose::Checkpoint), "1: KernelAbsent"),
            (Input::Execute(2, cell(None)), "launch 1"),
            (Input::Copy(3, Purpose::Checkpoint), ""),
            (Input::Ready(life()), "started; send 1 for 2"),
            (Input::Done(1, ok()), "2: Ok; copy 2 for 3"),
            (Input::Copied(2), ""),
            (Input::Execute(4, cell(None)), "send 3 for 4"),
            (Input::Rollback(5, 7), "interrupt 3; shutdown; arm End(1) 2000"),
            (
                Input::Ended(exit()),
                "4: KernelDied; exited; launch 2 from Checkpoint(7)",
            ),
            (Input::Thawed(life(), 1), "started; 5: life"),
            (Input::Execute(6, cell(None)), "send 4 for 6"),
            (Input::Done(4, ok()), "6: Ok Checkpoint lost 1"),
            // While a life starts, that start is given up.
            (Input::Ended(exit()), "exited"),
            (Input::Start(8), "launch 3"),
            (Input::Rollback(9, 7), "cancel Restart"),
            (
                Input::LaunchFailed(failed_start(None)),
                "8: KernelStart; launch 4 from Checkpoint(7)",
            ),
            (Input::Close(10, GRACE), "cancel Close; 9: KernelClosed"),
            (Input::LaunchFailed(failed_start(None)), "10: done"),
            (Input::Rollback(11, 7), "11: KernelClosed"),
        ],
    );
}

#[test]
fn a_cell_starts_a_life_and_the_next_one_uses_it() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(None)), "launch 1"),
            (Input::Execute(2, cell(None)), ""),
            (Input::Start(3), ""),
            (Input::Ready(life()), "started; 3: life; send 1 for 1"),
            (Input::Done(1, ok()), "1: Ok; send 2 for 2"),
            (Input::Done(2, ok()), "2: Ok"),
            (Input::Start(4), "4: life"),
            (Input::Interrupt(5), "5: done"),
            (Input::Close(6, GRACE), "shutdown; arm End(1) 2000"),
            (Input::Execute(7, cell(None)), "7: KernelClosed"),
            (Input::Ended(exit()), "exited; 6: done"),
            (Input::Start(8), "8: KernelClosed"),
            (Input::Close(9, GRACE), "9: done"),
        ],
    );
}

#[test]
fn a_death_fails_the_cell_and_the_queue_and_the_next_call_gets_a_new_life() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(None)), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1"),
            (Input::Execute(2, cell(None)), ""),
            (Input::Ended(exit()), "1: KernelDied; 2: KernelDied; exited"),
            (Input::Interrupt(3), "3: done"),
            (Input::Kill(4, 9), "4: exit"),
            (Input::Execute(5, cell(None)), "launch 2"),
            (Input::Ready(life()), "started; send 2 for 5"),
            (Input::Done(2, ok()), "5: Ok lost 1"),
            (Input::Execute(6, cell(None)), "send 3 for 6"),
            (Input::Done(3, ok()), "6: Ok"),
        ],
    );
}

#[test]
fn a_cell_that_arrives_while_a_restart_ends_the_life_runs_on_the_next() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(None)), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1"),
            (Input::Execute(2, cell(None)), ""),
            (Input::Restart(3), "interrupt 1; shutdown; arm End(1) 2000"),
            (Input::Execute(4, cell(None)), ""),
            (Input::Elapsed(Timer::End(1)), "signal 9"),
            (Input::Ended(exit()), "1: KernelDied; 2: KernelDied; exited; launch 2"),
            (Input::Ready(life()), "started; 3: life; send 2 for 4"),
        ],
    );
}

#[test]
fn a_stuck_cell_is_interrupted_twice_and_then_its_life_is_ended() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(Some(500))), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1; arm Limit(1) 500"),
            (Input::Elapsed(Timer::Limit(1)), "interrupt 1; arm Grace(1) 2000"),
            (Input::Interrupt(2), "interrupt 1"),
            (Input::Elapsed(Timer::Grace(1)), "interrupt 1; arm Grace(1) 2000"),
            (Input::Elapsed(Timer::Grace(1)), "signal 9"),
        ],
    );
    assert_eq!(
        machine.verdict(&ExitStatus::Exited { code: 0 }).cause,
        Cause::Timeout,
        "the first cause stays"
    );
    run(&mut machine, vec![(Input::Kill(3, 15), "signal 15")]);
    assert_eq!(machine.verdict(&ExitStatus::Exited { code: 0 }).cause, Cause::Timeout);
    run(
        &mut machine,
        vec![(Input::Ended(exit()), "1: KernelDied; exited; 2: done; 3: exit")],
    );
}

fn interrupted() -> Done {
    Done {
        interrupted: true,
        ..Done::default()
    }
}

#[test]
fn a_cell_that_was_asked_to_stop_before_its_life_was_ended_tells_the_first_reason() {
    // The first reason to stop, and what the cell is told to have come to when it stops after close() was called.
    for (reason, expected) in [
        (Input::Elapsed(Timer::Limit(1)), "1: TimedOut"),
        (Input::Cancel(1), "1: Interrupted"),
        (Input::Interrupt(2), "1: Interrupted"),
    ] {
        let mut machine = machine(Stuck::End, Recovery::Restart);
        machine.on(Input::Execute(1, cell(Some(500))));
        machine.on(Input::Ready(life()));
        machine.on(reason);
        run(
            &mut machine,
            vec![
                (Input::Close(3, GRACE), "interrupt 1; shutdown; arm End(1) 2000"),
                (Input::Done(1, interrupted()), expected),
            ],
        );
    }
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(Some(500))), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1; arm Limit(1) 500"),
            (Input::Close(2, GRACE), "interrupt 1; shutdown; arm End(1) 2000"),
            (Input::Elapsed(Timer::Limit(1)), ""),
            (Input::Done(1, interrupted()), ""),
            (Input::Ended(exit()), "1: KernelDied; exited; 2: done"),
        ],
    );
}

#[test]
fn the_first_reason_to_stop_a_cell_stays() {
    for first in 0..3 {
        let mut machine = machine(Stuck::End, Recovery::Restart);
        machine.on(Input::Execute(1, cell(Some(500))));
        machine.on(Input::Ready(life()));
        let mut reasons = vec![
            (Input::Elapsed(Timer::Limit(1)), "1: TimedOut"),
            (Input::Cancel(1), "1: Interrupted"),
            (Input::Interrupt(2), "1: Interrupted"),
        ];
        reasons.rotate_left(first);
        let expected = reasons[0].1;
        for (reason, _) in reasons {
            machine.on(reason);
        }
        assert_eq!(machine.has_timed_out(), first == 0);
        let told = short(&machine.on(Input::Done(1, interrupted())));
        assert!(told.starts_with(expected), "{told} after {first}");
    }
}

#[test]
fn a_stuck_cell_that_may_wait_is_settled_and_holds_the_next_one_up() {
    let mut machine = machine(Stuck::Wait, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(Some(500))), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1; arm Limit(1) 500"),
            (Input::Execute(2, cell(Some(300))), ""),
            (Input::Elapsed(Timer::Limit(1)), "interrupt 1; arm Grace(1) 2000"),
            (Input::Elapsed(Timer::Grace(1)), "interrupt 1; arm Grace(1) 2000"),
            (Input::Elapsed(Timer::Grace(1)), "1: TimedOut; arm Wait(2) 300"),
            (Input::Execute(3, cell(Some(400))), "arm Wait(3) 400"),
            (Input::Elapsed(Timer::Wait(2)), "2: KernelBusy"),
            (Input::Done(1, Done::default()), "send 2 for 3; arm Limit(2) 400"),
            (Input::Elapsed(Timer::Wait(3)), ""),
            (Input::Done(2, ok()), "3: Ok"),
        ],
    );
}

#[test]
fn what_is_aborted_before_it_runs_never_runs() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(None)), "launch 1"),
            (Input::Cancel(1), "1: Aborted; cancel Kill"),
            (Input::LaunchFailed(failed_start(Some(exit()))), "exited"),
            (Input::Execute(2, cell(None)), "launch 2"),
            (Input::Ready(life()), "started; send 1 for 2"),
            (Input::Execute(3, cell(None)), ""),
            (Input::Cancel(3), "3: Aborted"),
            (Input::Cancel(2), "interrupt 1; arm Grace(1) 2000"),
            (Input::Done(1, interrupted()), "2: Interrupted"),
        ],
    );
}

#[test]
fn failed_starts_are_not_repeated_by_themselves_and_pause_after_three() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    let expected = [
        "launch 1",
        "launch 2",
        "launch 3",
        "launch 4 after 100 ms",
        "launch 5 after 200 ms",
    ];
    for (number, expected) in (1..).zip(expected) {
        run(
            &mut machine,
            vec![
                (Input::Execute(number * 10, cell(None)), expected),
                (
                    Input::LaunchFailed(failed_start((number % 2 == 0).then(exit))),
                    &format!(
                        "{}: KernelStart{}",
                        number * 10,
                        if number % 2 == 0 { "; exited" } else { "" }
                    ),
                ),
            ],
        );
    }
}

#[test]
fn without_recovery_only_start_brings_a_new_life() {
    let mut machine = machine(Stuck::End, Recovery::None);
    run(
        &mut machine,
        vec![
            (Input::Execute(1, cell(None)), "launch 1"),
            (Input::Ready(life()), "started; send 1 for 1"),
            (Input::Ended(exit()), "1: KernelDied; exited"),
            (Input::Execute(2, cell(None)), "2: KernelAbsent"),
            (Input::Start(3), "launch 2"),
            (Input::Ready(life()), "started; 3: life"),
        ],
    );
}

#[test]
fn an_answer_for_a_cell_that_does_not_run_ends_the_life() {
    let mut machine = machine(Stuck::End, Recovery::Restart);
    run(
        &mut machine,
        vec![
            (Input::Start(1), "launch 1"),
            (Input::Ready(life()), "started; 1: life"),
            (Input::Done(7, ok()), "signal 9"),
        ],
    );
    assert_eq!(
        machine.verdict(&ExitStatus::Exited { code: 0 }).cause,
        Cause::ProtocolError
    );
}

/// What the world may do to a machine, chosen by numbers that are taken modulo what is possible.
#[derive(Debug, Clone)]
enum Step {
    Execute {
        limited: bool,
    },
    Start,
    Restart,
    Interrupt,
    Kill(i32),
    Close,
    Cancel(usize),
    /// The launch succeeds, or fails with or without a process.
    Launched(u8),
    Done {
        ok: bool,
        interrupted: bool,
    },
    Copy,
    Rollback,
    Exiting,
    Broken,
    Die,
    Ring(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => any::<bool>().prop_map(|limited| Step::Execute { limited }),
        2 => Just(Step::Start),
        1 => Just(Step::Restart),
        2 => Just(Step::Interrupt),
        1 => (1..16).prop_map(Step::Kill),
        1 => Just(Step::Close),
        3 => any::<usize>().prop_map(Step::Cancel),
        6 => any::<u8>().prop_map(Step::Launched),
        6 => any::<(bool, bool)>().prop_map(|(ok, interrupted)| Step::Done { ok, interrupted }),
        2 => Just(Step::Copy),
        1 => Just(Step::Rollback),
        1 => Just(Step::Exiting),
        1 => Just(Step::Broken),
        2 => Just(Step::Die),
        4 => any::<usize>().prop_map(Step::Ring),
    ]
}

/// The world around a machine, which keeps watch over what may never happen.
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts about the world, not a state of ours"
)]
struct World {
    machine: Machine,
    requests: u32,
    open: HashSet<RequestId>,
    cells: HashMap<RequestId, u32>,
    launching: bool,
    alive: bool,
    running: Option<CellId>,
    copying: Option<(CellId, RequestId)>,
    timers: Vec<Timer>,
    exits: u32,
    lives: u32,
    closed: bool,
    closing: bool,
}

impl World {
    fn new(stuck: Stuck, recovery: Recovery) -> Self {
        Self {
            machine: machine(stuck, recovery),
            requests: 0,
            open: HashSet::new(),
            cells: HashMap::new(),
            launching: false,
            alive: false,
            running: None,
            copying: None,
            timers: Vec::new(),
            exits: 0,
            lives: 0,
            closed: false,
            closing: false,
        }
    }

    fn request(&mut self) -> RequestId {
        self.requests += 1;
        self.open.insert(self.requests);
        self.requests
    }

    fn take(&mut self, step: &Step) {
        let input = match step {
            Step::Execute { limited } => {
                let request = self.request();
                self.cells.insert(request, 0);
                Input::Execute(request, cell(limited.then_some(10)))
            }
            Step::Start => Input::Start(self.request()),
            Step::Restart => Input::Restart(self.request()),
            Step::Interrupt => Input::Interrupt(self.request()),
            Step::Kill(signal) => Input::Kill(self.request(), *signal),
            Step::Close => {
                self.closing = true;
                Input::Close(self.request(), GRACE)
            }
            Step::Cancel(which) => {
                let mut open: Vec<RequestId> = self.open.iter().copied().collect();
                open.sort_unstable();
                match open.get(which % open.len().max(1)) {
                    Some(request) => Input::Cancel(*request),
                    None => return,
                }
            }
            Step::Launched(how) if self.launching => {
                self.launching = false;
                match how % 3 {
                    0 => {
                        self.lives += 1;
                        Input::LaunchFailed(failed_start(Some(exit())))
                    }
                    1 => Input::LaunchFailed(failed_start(None)),
                    _ => {
                        self.lives += 1;
                        self.alive = true;
                        if how & 4 == 0 {
                            Input::Ready(life())
                        } else {
                            Input::Thawed(life(), u32::from(*how))
                        }
                    }
                }
            }
            Step::Copy => Input::Copy(self.request(), Purpose::Checkpoint),
            Step::Rollback => Input::Rollback(self.request(), 1),
            Step::Done { .. } if self.alive && self.copying.is_some() => {
                let Some((id, request)) = self.copying.take() else {
                    return;
                };
                // Whoever asked for it is told by the session, unless its life is being ended.
                if self.machine.public_state() == PublicState::Idle {
                    self.open.remove(&request);
                }
                Input::Copied(id)
            }
            Step::Done { ok, interrupted } if self.alive => match self.running.take() {
                Some(cell) => Input::Done(
                    cell,
                    Done {
                        ok: *ok,
                        interrupted: *interrupted,
                        ..Done::default()
                    },
                ),
                None => return,
            },
            Step::Exiting if self.alive => Input::Exiting(0),
            Step::Broken if self.alive => Input::Broken(String::new()),
            Step::Die if self.alive => {
                self.alive = false;
                self.running = None;
                self.copying = None;
                Input::Ended(exit())
            }
            Step::Ring(which) if !self.timers.is_empty() => {
                let timer = self.timers.remove(which % self.timers.len());
                Input::Elapsed(timer)
            }
            _ => return,
        };
        let effects = self.machine.on(input);
        for effect in effects {
            self.see(&effect);
        }
    }

    fn see(&mut self, effect: &Effect) {
        match effect {
            Effect::Launch { .. } => {
                assert!(!self.launching && !self.alive, "one life at a time");
                assert!(!self.closed && !self.closing, "nothing starts after close");
                assert_eq!(
                    self.exits, self.lives,
                    "the exit of each life is told before the next launch"
                );
                self.launching = true;
            }
            Effect::Send { cell, request, .. } => {
                assert!(self.alive, "a cell is sent to a life that is there");
                assert!(self.running.is_none() && self.copying.is_none(), "one cell at a time");
                assert!(self.open.contains(request), "a cell that has been settled is not sent");
                let times = self.cells.get_mut(request).unwrap();
                *times += 1;
                assert_eq!(*times, 1, "no cell runs twice");
                self.running = Some(*cell);
            }
            Effect::Copy { id, request, .. } => {
                assert!(self.alive, "only what lives copies itself");
                assert!(
                    self.running.is_none() && self.copying.is_none(),
                    "only what is idle copies itself"
                );
                self.copying = Some((*id, *request));
            }
            Effect::Exited(_) => {
                self.exits += 1;
                assert!(self.exits <= self.lives, "one exit per life");
            }
            Effect::Settle(NOBODY, _) | Effect::Disarm(_) | Effect::Started(_) => {}
            Effect::Settle(request, _) => assert!(self.open.remove(request), "request {request} is settled once"),
            Effect::Arm(timer, _) => self.timers.push(*timer),
            Effect::CancelLaunch(_) => assert!(self.launching),
            Effect::Interrupt(_) | Effect::ShutDown => assert!(self.alive),
            // A launch that is being given up has no life to signal yet; whoever performs the effect sees that.
            Effect::Signal(_) => assert!(self.alive || self.launching),
        }
        self.closed |= self.machine.public_state() == PublicState::Closed;
    }

    /// Lets everything come to its end: nothing may be left waiting.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if self.launching {
                self.take(&Step::Launched(2));
            } else if self.running.is_some() || self.copying.is_some() {
                self.take(&Step::Done {
                    ok: true,
                    interrupted: false,
                });
            } else if self.machine.public_state() == PublicState::Ending {
                self.take(&Step::Die);
            } else {
                break;
            }
        }
        assert_eq!(self.open, HashSet::new(), "every request is settled");
        assert!(!self.closing || self.closed, "close closes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_every_request_is_settled_once_and_nothing_runs_twice(
        steps in prop::collection::vec(step(), 0..80),
        wait in any::<bool>(),
        recovery in prop_oneof![Just(Recovery::Restart), Just(Recovery::Checkpoint), Just(Recovery::None)],
    ) {
        let stuck = if wait { Stuck::Wait } else { Stuck::End };
        let mut world = World::new(stuck, recovery);
        for step in &steps {
            world.take(step);
        }
        world.settle();
    }
}
