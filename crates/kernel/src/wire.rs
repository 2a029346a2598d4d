//! The wire to a life: what is said on `requests` and `calls`. The seam: nothing else in this crate knows frames, so that
//! another wire (a Jupyter one, a remote one) can stand here.

use std::io;
use std::os::fd::OwnedFd;

use kernelhost_forkserver::frame::{Frame, FrameError};
use kernelhost_forkserver::protocol::{PROTOCOL, PythonError, Shell, StartFailure, parse, payload};
use kernelhost_forkserver::socket::{FrameSocket, Receives, SocketError};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::output::Output;

/// Number of a cell within its kernel, from 1 upwards.
pub type CellId = u64;

/// Frames on `calls` that a life may leave unread: more than it may show and call at once.
const MAX_UNREAD: usize = 8192;

mod kind {
    pub const CONFIGURE: u16 = 1;
    pub const EXECUTE: u16 = 2;
    pub const SHUTDOWN: u16 = 3;
    pub const COMPLETE: u16 = 4;
    pub const INSPECT: u16 = 5;
    pub const IS_COMPLETE: u16 = 6;
    pub const COPY: u16 = 7;
    pub const WIRES: u16 = 8;
    pub const THAW: u16 = 9;
    pub const READY: u16 = 16;
    pub const START_FAILED: u16 = 17;
    pub const DISPLAY: u16 = 18;
    pub const CLEAR: u16 = 19;
    pub const VALUE: u16 = 20;
    pub const DONE: u16 = 21;
    pub const EXITING: u16 = 22;
    pub const INIT_BEGINS: u16 = 23;
    pub const ANSWER: u16 = 24;
    pub const COPY_BEGINS: u16 = 25;
    pub const COPIED: u16 = 26;
    pub const COPY_REFUSED: u16 = 27;
    pub const COPY_IS: u16 = 28;
    pub const BARRIER: u16 = 32;
    pub const BARRIER_PASSED: u16 = 33;
    pub const CALL: u16 = 34;
    pub const RETURNED: u16 = 35;
    pub const GIVEN_UP: u16 = 36;
}

/// What a life says.
#[derive(Debug)]
pub enum Message {
    Ready(Ready),
    /// The `init` code runs from here on.
    InitBegins,
    StartFailed(StartFailure),
    /// 0: of no cell.
    Output(CellId, Output),
    Done(CellId, Done),
    Exiting(CellId, i32),
    /// To a query.
    Answer(CellId, Answer),
    /// Of a copy it was asked for.
    Copy(CellId, Copied),
}

/// How far a life has come with the copy it was asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Copied {
    /// It waits for the copy's wires.
    Begins,
    Done,
    Refused(String),
}

/// What a life says on `calls`.
#[derive(Debug)]
pub enum Called {
    Barrier(u64),
    Call(u64, HostCall),
    /// Nobody waits for this call's answer any more.
    GivenUp(u64),
}

/// A call of a function of the daemon's, or a request for a line of input.
#[derive(Debug, PartialEq, Eq)]
pub struct HostCall {
    /// 0: of no cell.
    pub cell: CellId,
    pub name: String,
    /// `Some`: input is asked for, and whether it is a secret.
    pub password: Option<bool>,
    /// JSON, with null in the places of bytes.
    pub args: String,
    /// JSON: for each run of bytes its place in `args` and its length.
    pub places: String,
    pub bytes: Vec<u8>,
}

/// A question about code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Query {
    Complete { code: String, cursor: u32 },
    Inspect { code: String, cursor: u32, detail: u32 },
    IsComplete { code: String },
}

/// What a life says to a query: JSON, or the exception that kept it from answering; neither when it came too late.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Found(String),
    Failed { name: String, value: String },
    Late,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    protocol: u32,
    pub python: String,
    pub python_version: String,
    pub shell: Shell,
    /// Of a copy: which callbacks of `kernelhost.on_restore` have failed, and how.
    #[serde(default)]
    pub failed: Vec<String>,
}

/// How a cell ended.
#[derive(Debug, Default)]
pub struct Done {
    pub ok: bool,
    pub execution_count: u32,
    /// An interrupt meant for this cell reached it.
    pub interrupted: bool,
    pub value: Option<Output>,
    pub error: Option<Output>,
}

/// What is read at the end of file, or instead of a frame.
pub enum Received<T> {
    Message(T),
    EndOfFile,
    Broken(FrameError),
}

pub struct Wire {
    requests: FrameSocket,
    calls: FrameSocket,
}

impl Wire {
    /// The host's ends, and the life's ends: `requests`, `calls`.
    pub fn new() -> io::Result<(Self, OwnedFd, OwnedFd)> {
        let (requests, their_requests) = FrameSocket::pair(Receives::FramesOnly)?;
        let (calls, their_calls) = FrameSocket::pair(Receives::FramesOnly)?;
        Ok((Self { requests, calls }, their_requests, their_calls))
    }

    // A life that is gone is told by its end, not by a failed send.

    pub fn configure(&mut self, configuration: &[u8]) {
        self.requests.send(kind::CONFIGURE, 0, configuration, Vec::new()).ok();
    }

    pub fn execute(&mut self, cell: CellId, code: &str, silent: bool) {
        #[derive(Serialize)]
        struct Execute<'a> {
            code: &'a str,
            silent: bool,
        }
        self.requests
            .send(kind::EXECUTE, cell, &payload(&Execute { code, silent }), Vec::new())
            .ok();
    }

    /// `until`: when nobody waits for the answer any more, on the system's monotonic clock.
    pub fn query(&mut self, id: CellId, query: &Query, until: f64) {
        #[derive(Serialize)]
        struct Payload<'a> {
            code: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            cursor: Option<u32>,
            #[serde(skip_serializing_if = "Option::is_none")]
            detail: Option<u32>,
            until: f64,
        }
        let (kind, code, cursor, detail) = match query {
            Query::Complete { code, cursor } => (kind::COMPLETE, code, Some(*cursor), None),
            Query::Inspect { code, cursor, detail } => (kind::INSPECT, code, Some(*cursor), Some(*detail)),
            Query::IsComplete { code } => (kind::IS_COMPLETE, code, None, None),
        };
        let payload = payload(&Payload {
            code,
            cursor,
            detail,
            until,
        });
        self.requests.send(kind, id, &payload, Vec::new()).ok();
    }

    /// False: it does not read what it is sent here, and there is more of that than anybody can wait for.
    pub fn returned(&mut self, call: u64, payload: &[u8]) -> bool {
        self.calls.send(kind::RETURNED, call, payload, Vec::new()).ok();
        self.calls.unsent() <= MAX_UNREAD
    }

    pub fn copy(&mut self, id: CellId, marker: &str) {
        let payload = payload(&serde_json::json!({"marker": marker}));
        self.requests.send(kind::COPY, id, &payload, Vec::new()).ok();
    }

    /// The life's ends of a copy's wires, or why there are none.
    pub fn wires(&mut self, id: CellId, wires: Result<Vec<OwnedFd>, String>) {
        let (descriptors, why) = match wires {
            Ok(descriptors) => (descriptors, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let payload = payload(&serde_json::json!({"why": why}));
        self.requests.send(kind::WIRES, id, &payload, descriptors).ok();
    }

    pub fn thaw(&mut self, payload: &[u8]) {
        self.requests.send(kind::THAW, 0, payload, Vec::new()).ok();
    }

    /// The first that a copy says: its pid. `None`: it says nothing any more, or something else.
    pub async fn pid_of_copy(&mut self) -> Option<i32> {
        #[derive(Deserialize)]
        struct CopyIs {
            pid: i32,
        }
        let frame = self.requests.receive().await.ok()??;
        if frame.kind != kind::COPY_IS {
            return None;
        }
        let pid = parse::<CopyIs>(&frame).ok()?.pid;
        (pid > 1 && u32::try_from(pid) != Ok(std::process::id())).then_some(pid)
    }

    pub fn shut_down(&mut self) {
        self.requests.send(kind::SHUTDOWN, 0, &[], Vec::new()).ok();
    }

    /// False: the answers before this one have not been read. Whoever asks waits for its answer, so nobody honest lets them
    /// grow to that many.
    pub fn pass_barrier(&mut self, barrier: u64) -> bool {
        self.calls.send(kind::BARRIER_PASSED, barrier, &[], Vec::new()).ok();
        self.calls.unsent() <= MAX_UNREAD
    }

    /// A message that has already arrived.
    pub fn message_now(&mut self) -> Received<Message> {
        received(self.requests.receive_now(), read_message)
    }

    /// The next on `requests` or on `calls`. Messages first: a barrier comes after the frame it belongs to.
    pub async fn next(&mut self) -> Heard {
        tokio::select! {
            biased;
            message = self.requests.receive() => Heard::Message(received(message, read_message)),
            called = self.calls.receive() => Heard::Called(received(called, read_called)),
        }
    }
}

pub enum Heard {
    Message(Received<Message>),
    Called(Received<Called>),
}

/// The answer to a call that the daemon does not take.
pub fn refusal(message: &str) -> Vec<u8> {
    let header = payload(&serde_json::json!({"error": {"name": "Error", "message": message}}));
    let length = u32::try_from(header.len()).unwrap_or(u32::MAX).to_le_bytes();
    [&length[..], &header].concat()
}

fn received<T>(result: Result<Option<Frame>, SocketError>, read: fn(&Frame) -> Result<T, FrameError>) -> Received<T> {
    match result {
        Ok(Some(frame)) => match read(&frame) {
            Ok(message) => Received::Message(message),
            Err(error) => Received::Broken(error),
        },
        Ok(None) | Err(SocketError::Io(_)) => Received::EndOfFile,
        Err(SocketError::Frame(error)) => Received::Broken(error),
    }
}

fn read_called(frame: &Frame) -> Result<Called, FrameError> {
    match frame.kind {
        kind::BARRIER => Ok(Called::Barrier(frame.id)),
        kind::CALL => read_call(frame).map(|call| Called::Call(frame.id, call)),
        kind::GIVEN_UP => Ok(Called::GivenUp(frame.id)),
        other => Err(FrameError::UnknownKind(other)),
    }
}

/// The one kind of payload that is not JSON alone: its length, a header in JSON, then the bytes that are part of the arguments.
fn read_call(frame: &Frame) -> Result<HostCall, FrameError> {
    #[derive(Deserialize)]
    struct Header<'a> {
        cell: CellId,
        name: String,
        password: Option<bool>,
        #[serde(borrow)]
        args: &'a RawValue,
        #[serde(borrow)]
        places: &'a RawValue,
    }
    let refused = |why: String| FrameError::Payload { kind: frame.kind, why };
    let payload = frame.payload.as_slice();
    let header = payload
        .split_first_chunk::<4>()
        .and_then(|(length, rest)| rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?));
    let Some((header, bytes)) = header else {
        return Err(refused("its header is cut short".to_owned()));
    };
    let header: Header<'_> = serde_json::from_slice(header).map_err(|error| refused(error.to_string()))?;
    let places: Vec<(Vec<IgnoredAny>, usize)> =
        serde_json::from_str(header.places.get()).map_err(|error| refused(error.to_string()))?;
    let announced = places
        .iter()
        .try_fold(0_usize, |sum, (_, length)| sum.checked_add(*length));
    if announced != Some(bytes.len()) {
        return Err(refused(format!(
            "{} bytes came with it, and others were announced",
            bytes.len()
        )));
    }
    Ok(HostCall {
        cell: header.cell,
        name: header.name,
        password: header.password,
        args: header.args.get().to_owned(),
        places: header.places.get().to_owned(),
        bytes: bytes.to_vec(),
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DisplayPayload<'a> {
    #[serde(borrow)]
    data: &'a RawValue,
    #[serde(borrow)]
    metadata: &'a RawValue,
    display_id: Option<String>,
    update: bool,
}
#[derive(Deserialize)]
struct ClearPayload {
    wait: bool,
}
#[derive(Deserialize)]
struct ValuePayload<'a> {
    #[serde(borrow)]
    data: &'a RawValue,
    #[serde(borrow)]
    metadata: &'a RawValue,
}
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DonePayload<'a> {
    status: DoneStatus,
    execution_count: u32,
    interrupted: bool,
    #[serde(borrow)]
    value: Option<ValuePayload<'a>>,
    error: Option<PythonError>,
}

#[derive(Deserialize)]
struct AnswerPayload<'a> {
    #[serde(borrow)]
    answer: Option<&'a RawValue>,
    error: Option<PythonError>,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum DoneStatus {
    Ok,
    Error,
}

fn read_message(frame: &Frame) -> Result<Message, FrameError> {
    #[derive(Deserialize)]
    struct ExitingPayload {
        code: i32,
    }
    #[derive(Deserialize)]
    struct RefusedPayload {
        why: String,
    }
    fn read<'a, T: Deserialize<'a>>(frame: &'a Frame) -> Result<T, FrameError> {
        serde_json::from_slice(&frame.payload).map_err(|error| FrameError::Payload {
            kind: frame.kind,
            why: error.to_string(),
        })
    }

    // Not looked into, but whoever gets it may rely on an object.
    let bundle = |value: &RawValue| {
        let text = value.get();
        if text.starts_with('{') {
            Ok(text.to_owned())
        } else {
            let why = "what must be an object is none".to_owned();
            Err(FrameError::Payload { kind: frame.kind, why })
        }
    };
    let value = |value: &ValuePayload<'_>| -> Result<Output, FrameError> {
        Ok(Output::Value {
            data: bundle(value.data)?,
            metadata: bundle(value.metadata)?,
        })
    };
    Ok(match frame.kind {
        kind::READY => {
            let ready: Ready = parse(frame)?;
            if ready.protocol != PROTOCOL {
                let why = format!("version {} of the protocol, not {PROTOCOL}", ready.protocol);
                return Err(FrameError::Payload { kind: frame.kind, why });
            }
            Message::Ready(ready)
        }
        kind::INIT_BEGINS => Message::InitBegins,
        kind::START_FAILED => Message::StartFailed(parse(frame)?),
        kind::DISPLAY => {
            let display: DisplayPayload<'_> = read(frame)?;
            let output = Output::Display {
                data: bundle(display.data)?,
                metadata: bundle(display.metadata)?,
                display_id: display.display_id,
                update: display.update,
            };
            Message::Output(frame.id, output)
        }
        kind::CLEAR => Message::Output(
            frame.id,
            Output::Clear {
                wait: read::<ClearPayload>(frame)?.wait,
            },
        ),
        kind::VALUE => Message::Output(frame.id, value(&read(frame)?)?),
        kind::DONE => {
            let done: DonePayload<'_> = read(frame)?;
            let error = |PythonError { name, value, traceback }| Output::Error { name, value, traceback };
            let done = Done {
                ok: done.status == DoneStatus::Ok,
                execution_count: done.execution_count,
                interrupted: done.interrupted,
                value: done.value.as_ref().map(value).transpose()?,
                error: done.error.map(error),
            };
            Message::Done(frame.id, done)
        }
        kind::ANSWER => {
            let said: AnswerPayload<'_> = read(frame)?;
            let answer = match (said.answer.map(bundle).transpose()?, said.error) {
                (_, Some(PythonError { name, value, .. })) => Answer::Failed { name, value },
                (Some(found), None) => Answer::Found(found),
                (None, None) => Answer::Late,
            };
            Message::Answer(frame.id, answer)
        }
        kind::COPY_BEGINS => Message::Copy(frame.id, Copied::Begins),
        kind::COPIED => Message::Copy(frame.id, Copied::Done),
        kind::COPY_REFUSED => Message::Copy(frame.id, Copied::Refused(read::<RefusedPayload>(frame)?.why)),
        kind::EXITING => Message::Exiting(frame.id, read::<ExitingPayload>(frame)?.code),
        other => return Err(FrameError::UnknownKind(other)),
    })
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
