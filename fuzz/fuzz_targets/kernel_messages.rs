//! What a life says on `requests` and `calls`, through real sockets and in any pieces.
//!
//! The wire belongs to a private module of its crate, so its file is compiled here once more.
#![no_main]
#![allow(dead_code)]

#[path = "../../crates/kernel/src/output.rs"]
mod output;
#[path = "../../crates/kernel/src/wire.rs"]
mod wire;

use std::os::fd::OwnedFd;

use kernelhost_fuzz::{Stream, within_bounds};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};
use wire::{Called, Heard, Message, Received, Wire};

/// A piece is written at once, so it has to fit into the socket.
const LONGEST_INPUT: usize = 32 * 1024;

/// Each costs a few system calls.
const MOST_PIECES: usize = 12;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
}

/// Whether the end has been reached, or the first broken frame.
fn take(message: Received<Message>) -> bool {
    match message {
        Received::Message(Message::Output(_, output)) => {
            // What goes on to JavaScript as JSON is JSON.
            if let output::Output::Display { data, metadata, .. } | output::Output::Value { data, metadata } = output {
                for text in [data, metadata] {
                    serde_json::from_str::<serde::de::IgnoredAny>(&text).expect("JSON");
                }
            }
            false
        }
        Received::Message(Message::Answer(_, wire::Answer::Found(text))) => {
            serde_json::from_str::<serde::de::IgnoredAny>(&text).expect("JSON");
            false
        }
        Received::Message(_) => false,
        Received::EndOfFile => true,
        Received::Broken(error) => {
            assert!(!error.to_string().is_empty());
            true
        }
    }
}

async fn hear(stream: &Stream, on_calls: bool, at_once: bool) {
    let Ok((mut wire, requests, calls)) = Wire::new() else {
        return;
    };
    let (theirs, _other): (OwnedFd, OwnedFd) = if on_calls { (calls, requests) } else { (requests, calls) };
    for piece in stream.pieces() {
        if rustix::io::write(&theirs, piece) != Ok(piece.len()) {
            return;
        }
        // As at the end of a life: what has arrived is taken without waiting.
        while !at_once && !on_calls {
            let message = wire.message_now();
            if matches!(message, Received::EndOfFile) {
                break;
            }
            if take(message) {
                return;
            }
        }
    }
    drop(theirs);
    loop {
        let ended = match wire.next().await {
            Heard::Message(message) => take(message),
            Heard::Called(Received::Message(called)) => {
                match called {
                    Called::Barrier(barrier) => drop(wire.pass_barrier(barrier)),
                    Called::Call(id, call) => {
                        for text in [call.args, call.places] {
                            serde_json::from_str::<serde::de::IgnoredAny>(&text).expect("JSON");
                        }
                        wire.returned(id, &wire::refusal("no"));
                    }
                    Called::GivenUp(_) => {}
                }
                false
            }
            Heard::Called(_) => true,
        };
        if ended {
            return;
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else {
        return;
    };
    let Some(stream) = Stream::of(input) else { return };
    if stream.bytes.len() > LONGEST_INPUT || stream.pieces().count() > MOST_PIECES {
        return;
    }
    RUNTIME.with(|runtime| {
        within_bounds(stream.bytes.len(), || {
            runtime.block_on(hear(&stream, how & 1 != 0, how & 2 != 0));
        });
    });
});
