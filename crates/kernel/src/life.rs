//! One life: its process, the host's ends of its wires, and the last steps of its end.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use kernelhost_forkserver::client::{ForkedLife, Foster, LifeEnd};
use kernelhost_forkserver::frame::FrameError;
use kernelhost_forkserver::process::output_pipe;
use kernelhost_process::lifeline::{self, Lifeline};
use kernelhost_process::pidfd::Pidfd;
use kernelhost_process::process_tree::{self, Leftovers, Manner, Root};
use kernelhost_process::reap::{self, ExitStatus};
use kernelhost_process::spawn::{Program, SpawnError, spawn};
use kernelhost_process::stderr_tail::StderrTail;
use kernelhost_process::terminate::{confirm_group_gone, kill_group};
use kernelhost_process::usage::{ResourceUsage, own_peak};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::aside::aside;
use crate::output::{READ_BYTES, Stream, Utf8Decoder};
use crate::wire::{Called, CellId, Heard, HostCall, Message, Query, Received, Wire};

/// How long a life may go on after it has closed its end of `requests`. A process that exits closes it a moment before its
/// end can be seen; one that closes it and lives can never be spoken to again.
const UNREACHABLE: Duration = Duration::from_secs(1);
/// How long the pipes are read after the end, when something that left the process group still holds them open. What was
/// written before the end is in them already.
const DRAIN: Duration = Duration::from_millis(50);
/// How long the reaper may take for its answers. A healthy template needs less than a millisecond.
const REAPER: Duration = Duration::from_millis(500);
/// How long a template may take to report an end before the zombie itself is asked. One that is stopped never reports.
const REPORT: Duration = Duration::from_millis(100);
/// How long what a life has started may take to be gone.
const TREE: Duration = Duration::from_secs(2);
/// How long the rest of the process group may take to vanish after SIGKILL.
const GROUP: Duration = Duration::from_millis(500);
/// Displays in flight. Whoever shows something waits until it is taken, so that there is one for each thread.
const MAX_UNAWAITED: usize = 4096;

/// Where a read has brought no more than this, and the next could follow at once, it is put off: whoever prints line by line
/// would otherwise cost a wake-up here and an event in JavaScript for each of them.
const SMALL_READ_BYTES: usize = 8 * 1024;
/// By how much: short enough to be called at once, long enough for hundreds of lines.
const GATHER: Duration = Duration::from_millis(1);
/// Whoever prints more than this in that time is not held up: a pipe holds only so much, and the writer would wait with it.
const TORRENT_BYTES: usize = 32 * 1024;

/// The host's ends of a life's wires, and the life's.
pub struct Wires {
    pub wire: Wire,
    pub outputs: [pipe::Receiver; 2],
    pub interrupts: OwnedFd,
    pub lifeline: Lifeline,
    pub theirs: TheirWires,
}

/// In the order in which a `fork` frame carries them.
pub struct TheirWires {
    stdout: OwnedFd,
    stderr: OwnedFd,
    requests: OwnedFd,
    calls: OwnedFd,
    interrupts: OwnedFd,
    lifeline: OwnedFd,
}

impl TheirWires {
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        vec![
            self.stdout,
            self.stderr,
            self.requests,
            self.calls,
            self.interrupts,
            self.lifeline,
        ]
    }
}

impl Wires {
    pub fn new() -> io::Result<Self> {
        let (wire, requests, calls) = Wire::new()?;
        let (our_stdout, stdout) = output_pipe()?;
        let (our_stderr, stderr) = output_pipe()?;
        let (interrupts, our_interrupts) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&our_interrupts, true)?;
        let (keeper, lifeline) = lifeline::lifeline()?;
        Ok(Self {
            wire,
            outputs: [our_stdout, our_stderr],
            interrupts: our_interrupts,
            lifeline: keeper,
            theirs: TheirWires {
                stdout,
                stderr,
                requests,
                calls,
                interrupts,
                lifeline,
            },
        })
    }
}

/// Who reaps the process.
enum Reaper {
    /// It is a child of this process, which had this peak of memory when it spawned it.
    Here {
        peak: u64,
    },
    Template(ForkedLife),
}

pub struct Life {
    pidfd: AsyncFd<Pidfd>,
    reaper: Reaper,
    marker: String,
    wire: Wire,
    outputs: [Option<pipe::Receiver>; 2],
    decoders: [Utf8Decoder; 2],
    tail: StderrTail,
    interrupts: OwnedFd,
    lifeline: Lifeline,
    began: Instant,
    /// Until it is ready, all that it prints goes to the tail: it can only be the reason why it will not start.
    starting: bool,
    /// A barrier that is passed once what came before it has been handed out.
    barrier: Option<u64>,
    unreachable_at: Option<Instant>,
    /// It broke the wire format, and nothing it says is read any more.
    broken: bool,
    /// What it has shown without asking for the barrier that goes with it.
    unawaited: usize,
    pending: VecDeque<LifeEvent>,
    buffer: Vec<u8>,
    /// Until when the pipes are left alone, so that what is printed bit by bit is read in one go.
    gather_until: Option<Instant>,
    last_read: Instant,
    /// When the present span of time of `GATHER` began, what was read in it, and what in the one before.
    span: (Instant, usize, usize),
}

pub enum LifeEvent {
    Message(Message),
    Call(u64, HostCall),
    /// Nobody waits for this call's answer any more.
    CallGivenUp(u64),
    Text(Stream, String),
    Broken(String),
    /// The process has ended; `finish` tells how.
    Ended,
}

/// A life that is gone.
pub struct Finished {
    pub status: ExitStatus,
    pub usage: Option<ResourceUsage>,
    pub pid: i32,
    pub uptime: Duration,
    pub stderr_tail: String,
    pub leftovers: Leftovers,
    pub texts: Vec<(Stream, String)>,
}

impl Life {
    /// Spawns a cold life. It is told its configuration at once.
    pub fn spawn(
        interpreter: &str,
        boot: &str,
        marker: String,
        environment: &[(String, String)],
        configuration: &[u8],
        wires: Wires,
    ) -> Result<Self, SpawnError> {
        let prepared = |error| SpawnError::Descriptors {
            path: interpreter.to_owned(),
            error,
        };
        let null = File::open("/dev/null").map_err(prepared)?;
        let theirs = &wires.theirs;
        let peak = own_peak();
        let pidfd = spawn(&Program {
            path: interpreter,
            arguments: &[boot, "kernel"],
            environment,
            descriptors: &[
                null.as_fd(),
                theirs.stdout.as_fd(),
                theirs.stderr.as_fd(),
                theirs.requests.as_fd(),
                theirs.calls.as_fd(),
                theirs.interrupts.as_fd(),
                theirs.lifeline.as_fd(),
            ],
        })?;
        // A child that has ended already cannot be armed, and need not be.
        lifeline::arm(theirs.lifeline.as_fd(), pidfd.pid()).ok();
        let Wires {
            wire,
            outputs,
            interrupts,
            lifeline,
            theirs,
        } = wires;
        drop(theirs);
        let mut life = Self::new(
            pidfd,
            Reaper::Here { peak },
            marker,
            wire,
            outputs,
            interrupts,
            lifeline,
        )
        .map_err(prepared)?;
        life.wire.configure(configuration);
        Ok(life)
    }

    /// Takes over what a template has forked.
    pub fn forked(
        pidfd: Pidfd,
        forked: ForkedLife,
        marker: String,
        wire: Wire,
        outputs: [pipe::Receiver; 2],
        interrupts: OwnedFd,
        lifeline: Lifeline,
    ) -> io::Result<Self> {
        Self::new(
            pidfd,
            Reaper::Template(forked),
            marker,
            wire,
            outputs,
            interrupts,
            lifeline,
        )
    }

    fn new(
        pidfd: Pidfd,
        reaper: Reaper,
        marker: String,
        wire: Wire,
        [stdout, stderr]: [pipe::Receiver; 2],
        interrupts: OwnedFd,
        lifeline: Lifeline,
    ) -> io::Result<Self> {
        Ok(Self {
            pidfd: pidfd.watched()?,
            reaper,
            marker,
            wire,
            outputs: [Some(stdout), Some(stderr)],
            decoders: [Utf8Decoder::default(), Utf8Decoder::default()],
            tail: StderrTail::default(),
            interrupts,
            lifeline,
            began: Instant::now(),
            starting: true,
            barrier: None,
            unreachable_at: None,
            broken: false,
            unawaited: 0,
            pending: VecDeque::new(),
            buffer: Vec::new(),
            gather_until: None,
            last_read: Instant::now(),
            span: (Instant::now(), 0, 0),
        })
    }

    pub fn pid(&self) -> i32 {
        self.pidfd.get_ref().pid()
    }

    pub fn has_ended(&self) -> bool {
        self.pidfd.get_ref().has_ended()
    }

    pub fn became_ready(&mut self) {
        self.starting = false;
    }

    pub fn execute(&mut self, cell: CellId, code: &str, silent: bool) {
        self.wire.execute(cell, code, silent);
    }

    pub fn query(&mut self, id: CellId, query: &Query, limit: Duration) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let until = Duration::try_from(now).unwrap_or_default() + limit;
        self.wire.query(id, query, until.as_secs_f64());
    }

    /// The answer to a call. One that nobody reads breaks the life.
    pub fn returned(&mut self, call: u64, payload: &[u8]) {
        if !self.wire.returned(call, payload) {
            self.stopped_reading();
        }
    }

    /// Who takes in its copies, or why there can be none.
    pub fn foster(&self) -> Result<Foster, String> {
        match &self.reaper {
            Reaper::Here { .. } => Err(
                "it was started cold, and only what a template has forked can be copied (launch: 'fork')".to_owned(),
            ),
            Reaper::Template(life) => life
                .foster()
                .ok_or_else(|| "its template, which would take the copy in, has ended".to_owned()),
        }
    }

    pub fn copy(&mut self, id: CellId, marker: &str) {
        self.wire.copy(id, marker);
    }

    pub fn give_wires(&mut self, id: CellId, wires: io::Result<TheirWires>) {
        let wires = wires.map(TheirWires::into_descriptors);
        self.wire.wires(id, wires.map_err(|error| error.to_string()));
    }

    pub fn thaw(&mut self, payload: &[u8]) {
        self.wire.thaw(payload);
    }

    pub fn shut_down(&mut self) {
        self.wire.shut_down();
    }

    /// Interrupts a cell: its id first, so that the handler knows whom the signal is for.
    pub fn interrupt(&self, cell: CellId) {
        // A full pipe holds thousands of ids that nobody has read: one more would say nothing new.
        rustix::io::write(&self.interrupts, &cell.to_le_bytes()).ok();
        self.signal(libc::SIGINT);
    }

    /// Signals the process group.
    pub fn signal(&self, number: i32) {
        let process = self.pidfd.get_ref();
        if let Err(error) = process.signal_group(number, self.holds_pid()) {
            tracing::warn!(pid = self.pid(), number, %error, "a signal could not be sent");
        }
        if number == libc::SIGKILL {
            // A fork that hangs in its first steps leads no group yet.
            process.signal(number).ok();
        }
    }

    fn holds_pid(&self) -> bool {
        match &self.reaper {
            Reaper::Here { .. } => true,
            Reaper::Template(life) => life.holds_pid(),
        }
    }

    /// What happens next. Text that was written before a message comes before it. Loses nothing when its future is dropped.
    /// `room`: how much one read may bring. With 0 the pipes are left alone and no barrier is passed, so that whoever prints or
    /// shows feels it.
    pub async fn event(&mut self, room: usize) -> LifeEvent {
        loop {
            // One that never stops talking gets no more than its turn.
            tokio::task::coop::consume_budget().await;
            if let Some(event) = self.pending.pop_front() {
                return event;
            }
            if room > 0 && self.barrier.is_some() {
                if self.take_message_now() {
                    continue;
                }
                if let Some(barrier) = self.barrier.take()
                    && !self.wire.pass_barrier(barrier)
                {
                    self.stopped_reading();
                    continue;
                }
            }
            let [stdout, stderr] = &self.outputs;
            let unreachable = self.unreachable_at;
            let is_heard = unreachable.is_none() && !self.broken;
            let gather_until = self.gather_until;
            let read_pipes = room > 0 && gather_until.is_none();
            tokio::select! {
                biased;
                heard = self.wire.next(), if is_heard => match heard {
                    Heard::Message(Received::Message(message)) => self.take_message(message),
                    Heard::Called(Received::Message(Called::Barrier(barrier))) => {
                        self.unawaited = self.unawaited.saturating_sub(1);
                        self.barrier = Some(barrier);
                    }
                    Heard::Called(Received::Message(Called::Call(id, call))) => {
                        self.take_waiting_text();
                        self.pending.push_back(LifeEvent::Call(id, call));
                    }
                    Heard::Called(Received::Message(Called::GivenUp(id))) => {
                        self.pending.push_back(LifeEvent::CallGivenUp(id));
                    }
                    Heard::Message(Received::Broken(error)) | Heard::Called(Received::Broken(error)) => {
                        self.broken = true;
                        return broken(&error);
                    }
                    Heard::Message(Received::EndOfFile) | Heard::Called(Received::EndOfFile) => {
                        self.unreachable_at = Some(Instant::now() + UNREACHABLE);
                    }
                },
                ended = self.pidfd.readable() => {
                    // Not cleared: an ended process stays ended.
                    drop(ended);
                    while self.take_message_now() {}
                    self.pending.push_back(LifeEvent::Ended);
                }
                () = readable(stdout.as_ref()), if read_pipes => self.read_pipe(Stream::Stdout, room),
                () = readable(stderr.as_ref()), if read_pipes => self.read_pipe(Stream::Stderr, room),
                () = sleep_until(gather_until.unwrap_or_else(Instant::now)), if gather_until.is_some() => self.gather_until = None,
                () = sleep_until(unreachable.unwrap_or_else(Instant::now)), if unreachable.is_some() => {
                    self.unreachable_at = Some(Instant::now() + UNREACHABLE);
                    return LifeEvent::Broken("it closed its wires and went on".to_owned());
                }
            }
        }
    }

    fn stopped_reading(&mut self) {
        if !self.broken {
            self.broken = true;
            let why = "it asked for answers and did not read them".to_owned();
            self.pending.push_back(LifeEvent::Broken(why));
        }
    }

    /// Hands a message out after the text that was in the pipes when it came.
    fn take_message(&mut self, message: Message) {
        if matches!(message, Message::Output(..)) {
            self.unawaited += 1;
            if self.unawaited > MAX_UNAWAITED {
                self.broken = true;
                let why = "it shows one thing after the other and does not wait for any of them to be taken".to_owned();
                self.pending.push_back(LifeEvent::Broken(why));
                return;
            }
        }
        self.take_waiting_text();
        if matches!(message, Message::Done(..) | Message::Exiting(..)) {
            self.finish_text();
        }
        self.pending.push_back(LifeEvent::Message(message));
    }

    fn take_message_now(&mut self) -> bool {
        if self.broken {
            return false;
        }
        match self.wire.message_now() {
            Received::Message(message) => self.take_message(message),
            Received::Broken(error) => {
                self.broken = true;
                self.pending.push_back(broken(&error));
            }
            Received::EndOfFile => return false,
        }
        true
    }

    /// Reads what the pipes hold at this moment, and not what a background writer adds meanwhile.
    fn take_waiting_text(&mut self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let waiting = match &self.outputs[stream as usize] {
                Some(pipe) => rustix::io::ioctl_fionread(pipe).unwrap_or(0),
                None => 0,
            };
            let mut left = usize::try_from(waiting).unwrap_or(0);
            while left > 0 {
                let before = left.min(READ_BYTES);
                self.take_text(stream, before);
                left -= before;
            }
        }
    }

    /// Bytes of a character that the cell did not finish are shown with the cell.
    fn finish_text(&mut self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let text = self.decoders[stream as usize].finish();
            if !text.is_empty() && !self.starting {
                self.pending.push_back(LifeEvent::Text(stream, text));
            }
        }
    }

    /// One read, and then perhaps a pause before the next.
    fn read_pipe(&mut self, stream: Stream, room: usize) {
        let now = Instant::now();
        let count = self.take_text(stream, room.min(READ_BYTES));
        let (began, read, before) = &mut self.span;
        if now >= *began + GATHER {
            let is_next = now < *began + 2 * GATHER;
            (*began, *before) = (now, if is_next { *read } else { 0 });
            *read = 0;
        }
        *read += count;
        let is_torrent = (*read).max(*before) > TORRENT_BYTES;
        if count <= SMALL_READ_BYTES && now < self.last_read + GATHER && !is_torrent {
            self.gather_until = Some(now + GATHER);
        }
        self.last_read = now;
    }

    /// One read of at most `limit` bytes, and how many there were. Forgets the pipe at its end of file.
    fn take_text(&mut self, stream: Stream, limit: usize) -> usize {
        let Some(pipe) = &self.outputs[stream as usize] else {
            return 0;
        };
        self.buffer.resize(limit, 0);
        let count = match pipe.try_read(&mut self.buffer) {
            Ok(0) => {
                self.outputs[stream as usize] = None;
                return 0;
            }
            Ok(count) => count,
            // tokio may not have noticed yet what is there already.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                rustix::io::read(pipe, &mut self.buffer).unwrap_or(0)
            }
            Err(_) => {
                self.outputs[stream as usize] = None;
                return 0;
            }
        };
        let bytes = &self.buffer[..count];
        if stream == Stream::Stderr || self.starting {
            self.tail.push(bytes);
        }
        if !self.starting {
            let text = self.decoders[stream as usize].decode(bytes);
            if !text.is_empty() {
                self.pending.push_back(LifeEvent::Text(stream, text));
            }
        }
        count
    }

    /// Waits for the end, at most this long, while the pipes are read. Messages that come are dropped.
    pub async fn wait_for_end(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            match timeout_at(deadline, self.event(usize::MAX)).await {
                Ok(LifeEvent::Ended) => return true,
                Ok(_) => {}
                Err(_) => return self.has_ended(),
            }
        }
    }

    /// Whose process tree this is, as far as that can be told without anybody else.
    pub fn root(&self) -> Root {
        Root {
            pid: self.pid(),
            holds_pid: self.holds_pid(),
            marker: self.marker.clone(),
            adopter: None,
        }
    }

    /// The same with whoever adopts its orphans, as things are now.
    pub fn root_with_adopter(&self) -> Root {
        let adopter = match &self.reaper {
            Reaper::Here { .. } => None,
            Reaper::Template(life) => life.adopter(),
        };
        Root { adopter, ..self.root() }
    }

    /// Ends what the life has started and left. `grace`: see [`Manner`].
    async fn end_tree(&self, grace: Duration) -> Leftovers {
        let root = self.root_with_adopter();
        if !process_tree::may_have_members(&root) {
            return Leftovers::default();
        }
        let manner = Manner { grace, limit: TREE };
        aside(move || process_tree::end(&root, manner))
            .await
            .unwrap_or_default()
    }

    /// The last steps, once the process has ended: its status, the rest of its tree, its last words, its pid given up.
    pub async fn finish(mut self, grace: Duration) -> Finished {
        let pid = self.pid();
        let uptime = self.began.elapsed();
        let status = self.status().await;
        let leftovers = self.end_tree(grace).await;
        kill_group(self.pidfd.get_ref(), self.holds_pid()).ok();
        self.drain().await;
        let usage = match self.reaper {
            Reaper::Here { peak } => reap::reap(self.pidfd.get_ref(), peak).ok().flatten(),
            Reaper::Template(life) => {
                // One that has not even reported the end is not waited for long.
                let limit = if life.has_reported() { REAPER } else { REPORT };
                life.release(Instant::now() + limit).await
            }
        };
        if !confirm_group_gone(self.pidfd.get_ref(), GROUP).await {
            tracing::warn!(pid, "something of the process group is still there");
        }
        drop(self.lifeline);
        let texts = self.pending.into_iter().filter_map(|event| match event {
            LifeEvent::Text(stream, text) => Some((stream, text)),
            _ => None,
        });
        Finished {
            status,
            usage,
            pid,
            uptime,
            stderr_tail: self.tail.text(),
            leftovers,
            texts: texts.collect(),
        }
    }

    async fn status(&mut self) -> ExitStatus {
        let pidfd = self.pidfd.get_ref();
        let Reaper::Template(life) = &mut self.reaper else {
            return match reap::peek(pidfd) {
                Ok(Some(status)) => status,
                Ok(None) => ExitStatus::Unknown {
                    why: "it had not ended when it was looked at".to_owned(),
                },
                Err(error) => ExitStatus::Unknown {
                    why: format!("waiting for it failed: {error}"),
                },
            };
        };
        let end = life.end(Instant::now() + REPORT).await;
        if let LifeEnd::Reported(status) = end {
            return status;
        }
        // The template hangs and keeps the zombie, or it is gone and the zombie waits for its adopter, or was reaped by it.
        let deadline = Instant::now() + REAPER;
        loop {
            if let Some(status) = reap::read_zombie(pidfd).or_else(|| pidfd.recorded_status()) {
                return status;
            }
            if Instant::now() >= deadline {
                let template = if end == LifeEnd::TemplateGone {
                    "has ended before it"
                } else {
                    "does not answer"
                };
                let why = if pidfd.owns_pid() {
                    "procfs hides its status"
                } else {
                    "somebody else has reaped it, and this Linux does not tell what that one was told (6.15 and later do)"
                };
                return ExitStatus::Unknown {
                    why: format!("its template {template}, and {why}"),
                };
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        while self.outputs.iter().any(Option::is_some) {
            self.take_waiting_text();
            let [stdout, stderr] = &self.outputs;
            let ready = async {
                tokio::select! {
                    () = readable(stdout.as_ref()) => Stream::Stdout,
                    () = readable(stderr.as_ref()) => Stream::Stderr,
                }
            };
            match timeout_at(deadline, ready).await {
                Ok(stream) => {
                    self.take_text(stream, READ_BYTES);
                }
                Err(_) => break,
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        self.finish_text();
    }
}

async fn readable(pipe: Option<&pipe::Receiver>) {
    match pipe {
        // An error shows again in the read that follows.
        Some(pipe) => pipe.readable().await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

fn broken(error: &FrameError) -> LifeEvent {
    LifeEvent::Broken(format!("it broke the wire format: {error}"))
}
