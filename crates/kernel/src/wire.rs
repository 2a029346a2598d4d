//! The wire to a life: what is said on `requests` and `calls`. The seam: nothing else in this crate knows frames, so that
//! another wire (a Jupyter one, a remote one) can stand here.

use std::io;
use std::os::fd::OwnedFd;

use kernelhost_forkserver::frame::{Frame, FrameError};
use kernelhost_forkserver::protocol::{PROTOCOL, PythonError, Shell, StartFailure, parse, payload};
use kernelhost_forkserver::socket::{FrameSocket, Receives, SocketError};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::output::Output;

/// Number of a cell within its kernel, from 1 upwards.
pub type CellId = u64;

mod kind {
    pub const CONFIGURE: u16 = 1;
    pub const EXECUTE: u16 = 2;
    pub const SHUTDOWN: u16 = 3;
    pub const READY: u16 = 16;
    pub const START_FAILED: u16 = 17;
    pub const DISPLAY: u16 = 18;
    pub const CLEAR: u16 = 19;
    pub const VALUE: u16 = 20;
    pub const DONE: u16 = 21;
    pub const EXITING: u16 = 22;
    pub const INIT_BEGINS: u16 = 23;
    pub const BARRIER: u16 = 32;
    pub const BARRIER_PASSED: u16 = 33;
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
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    protocol: u32,
    pub python: String,
    pub python_version: String,
    pub shell: Shell,
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

    pub fn shut_down(&mut self) {
        self.requests.send(kind::SHUTDOWN, 0, &[], Vec::new()).ok();
    }

    /// False: the answers before this one have not been read. Whoever asks waits for its answer, so nobody honest does that.
    pub fn pass_barrier(&mut self, barrier: u64) -> bool {
        if self.calls.has_unsent() {
            return false;
        }
        self.calls.send(kind::BARRIER_PASSED, barrier, &[], Vec::new()).ok();
        true
    }

    /// A message that has already arrived.
    pub fn message_now(&mut self) -> Received<Message> {
        received(self.requests.receive_now(), read_message)
    }

    /// The next message or the next barrier. Messages first: a barrier comes after the frame it belongs to.
    pub async fn next(&mut self) -> Heard {
        tokio::select! {
            biased;
            message = self.requests.receive() => Heard::Message(received(message, read_message)),
            barrier = self.calls.receive() => Heard::Barrier(received(barrier, read_barrier)),
        }
    }
}

pub enum Heard {
    Message(Received<Message>),
    Barrier(Received<u64>),
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

fn read_barrier(frame: &Frame) -> Result<u64, FrameError> {
    if frame.kind == kind::BARRIER {
        Ok(frame.id)
    } else {
        Err(FrameError::UnknownKind(frame.kind))
    }
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
            let why = "a MIME bundle is not an object".to_owned();
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
        kind::EXITING => Message::Exiting(frame.id, read::<ExitingPayload>(frame)?.code),
        other => return Err(FrameError::UnknownKind(other)),
    })
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
