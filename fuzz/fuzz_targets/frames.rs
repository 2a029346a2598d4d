//! Frames out of a stream: the same ones however it is cut, and the same refusal at the same place.
#![no_main]

use kernelhost_forkserver::frame::{Frame, FrameError, FrameReader, HEADER_BYTES, MAX_PAYLOAD_BYTES, encode};
use kernelhost_fuzz::{Stream, within_bounds};
use libfuzzer_sys::fuzz_target;

/// What the page on the format says, written once more and for a whole stream.
fn expected(mut bytes: &[u8]) -> (Vec<Frame>, Option<FrameError>) {
    let mut frames = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let number = |from: usize, size: usize| {
            header[from..from + size]
                .iter()
                .rev()
                .fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let (length, reserved) = (number(0, 4), number(6, 2));
        if reserved != 0 {
            return (frames, Some(FrameError::Reserved(reserved as u16)));
        }
        if length > MAX_PAYLOAD_BYTES as u64 {
            return (frames, Some(FrameError::TooLong(length as u32)));
        }
        if (rest.len() as u64) < length {
            break;
        }
        let (payload, after) = rest.split_at(length as usize);
        frames.push(Frame {
            kind: number(4, 2) as u16,
            id: number(8, 8),
            payload: payload.to_vec(),
        });
        bytes = after;
    }
    (frames, None)
}

fuzz_target!(|input: &[u8]| {
    let Some(stream) = Stream::of(input) else { return };
    let (frames, error) = expected(&stream.bytes);
    for frame in &frames {
        let mut reader = FrameReader::default();
        reader.push(&encode(frame.kind, frame.id, &frame.payload));
        assert_eq!(reader.next_frame().as_ref(), Ok(&Some(frame.clone())));
    }
    within_bounds(stream.bytes.len(), || {
        let mut reader = FrameReader::default();
        let (mut seen, mut refused) = (0, None);
        'stream: for piece in stream.pieces() {
            reader.push(piece);
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => {
                        assert_eq!(Some(&frame), frames.get(seen));
                        seen += 1;
                    }
                    Ok(None) => break,
                    Err(error) => {
                        refused = Some(error);
                        break 'stream;
                    }
                }
            }
        }
        assert_eq!(seen, frames.len());
        assert_eq!(refused, error);
    });
});
