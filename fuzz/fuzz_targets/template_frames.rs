//! What a template says, read as the host reads it.
#![no_main]

use kernelhost_forkserver::frame::{Frame, FrameReader};
use kernelhost_forkserver::protocol::{Ended, ForkFailed, Forked, Released, StartFailure, TemplateReady, kind, parse};
use kernelhost_fuzz::{Stream, within_bounds};
use kernelhost_process::usage::ResourceUsage;
use libfuzzer_sys::fuzz_target;

fn read(frame: &Frame) {
    let refused = match frame.kind {
        kind::TEMPLATE_READY => parse::<TemplateReady>(frame).map(drop),
        kind::TEMPLATE_FAILED => parse::<StartFailure>(frame).map(|failure| drop(failure.to_string())),
        kind::FORKED => parse::<Forked>(frame).map(drop),
        kind::FORK_FAILED => parse::<ForkFailed>(frame).map(drop),
        kind::ENDED => parse::<Ended>(frame).map(|ended| drop(ended.status())),
        kind::RELEASED => parse::<Released>(frame).map(|released| {
            let _usage = ResourceUsage::from(released);
        }),
        _ => Ok(()),
    };
    if let Err(error) = refused {
        assert!(!error.to_string().is_empty());
    }
}

fuzz_target!(|input: &[u8]| {
    let Some(stream) = Stream::of(input) else { return };
    within_bounds(stream.bytes.len(), || {
        let mut reader = FrameReader::default();
        for piece in stream.pieces() {
            reader.push(piece);
            while let Ok(Some(frame)) = reader.next_frame() {
                read(&frame);
            }
        }
    });
});
