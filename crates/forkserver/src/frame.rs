//! Frames, as `docs/protocol.md` describes them: a fixed header and a payload. Bytes in, frames out; no input can make it
//! panic, and none can make it hold more than one frame's limit.

use std::io;
use std::os::fd::AsFd;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;
/// The largest payload; a header that announces more breaks the format.
pub const MAX_PAYLOAD_BYTES: usize = 64 * 1024 * 1024;
/// Room for one read: a pipe's or socket's worth, so that a small frame costs one system call.
pub(crate) const READ_BYTES: usize = 64 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: u16,
    /// Of the cell, fork or barrier it belongs to; 0 where there is none.
    pub id: u64,
    pub payload: Vec<u8>,
}

/// A peer that does not keep to the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame announced {0} bytes, more than the limit of {MAX_PAYLOAD_BYTES}")]
    TooLong(u32),
    #[error("a frame's reserved field was {0}, not 0")]
    Reserved(u16),
    #[error("a frame of kind {kind} held what it may not: {why}")]
    Payload { kind: u16, why: String },
    #[error("a frame of the unknown kind {0} came")]
    UnknownKind(u16),
    #[error("a frame of kind {kind} came when {why}")]
    OutOfTurn { kind: u16, why: &'static str },
}

/// The header and payload as one run of bytes.
pub fn encode(kind: u16, id: u64, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// Collects bytes and gives whole frames.
#[derive(Debug, Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameReader {
    /// Adds what one read of a non-blocking descriptor gives. `Ok(0)`: end of file.
    pub fn fill(&mut self, source: impl AsFd) -> io::Result<usize> {
        self.make_room();
        Ok(rustix::io::read(
            source,
            rustix::buffer::spare_capacity(&mut self.bytes),
        )?)
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.make_room();
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some((header, rest)) = self.bytes[self.start..].split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let [l0, l1, l2, l3, k0, k1, r0, r1, id @ ..] = *header;
        let (length, reserved) = (u32::from_le_bytes([l0, l1, l2, l3]), u16::from_le_bytes([r0, r1]));
        if reserved != 0 {
            return Err(FrameError::Reserved(reserved));
        }
        let size = usize::try_from(length).ok().filter(|size| *size <= MAX_PAYLOAD_BYTES);
        let Some(size) = size else {
            return Err(FrameError::TooLong(length));
        };
        let Some(payload) = rest.get(..size) else {
            return Ok(None);
        };
        let frame = Frame {
            kind: u16::from_le_bytes([k0, k1]),
            id: u64::from_le_bytes(id),
            payload: payload.to_vec(),
        };
        self.start += HEADER_BYTES + size;
        Ok(Some(frame))
    }

    /// Forgets what has been given out, and frees what one large frame had taken.
    fn make_room(&mut self) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        if self.bytes.is_empty() && self.bytes.capacity() > 4 * READ_BYTES {
            self.bytes = Vec::new();
        }
        self.bytes.reserve(READ_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            frames in prop::collection::vec((any::<u16>(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..200)), 0..20),
            cut in 1_usize..64,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(kind, id, payload)| encode(*kind, *id, payload)).collect();
            let mut reader = FrameReader::default();
            let mut seen = Vec::new();
            for part in bytes.chunks(cut) {
                reader.push(part);
                while let Some(frame) = reader.next_frame().unwrap() {
                    seen.push((frame.kind, frame.id, frame.payload));
                }
            }
            prop_assert_eq!(seen, frames);
        }

        #[test]
        fn no_bytes_make_it_panic_or_grow(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            let mut reader = FrameReader::default();
            for part in bytes.chunks(7) {
                reader.push(part);
                loop {
                    match reader.next_frame() {
                        Ok(Some(_)) => {}
                        Ok(None) => break,
                        Err(_) => return Ok(()),
                    }
                }
            }
            prop_assert!(reader.bytes.len() <= bytes.len() + READ_BYTES);
        }
    }

    #[test]
    fn a_length_above_the_limit_and_a_reserved_field_are_refused() {
        let mut reader = FrameReader::default();
        reader.push(&encode(1, 0, &[])[..4]);
        reader.push(&[1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(reader.next_frame(), Err(FrameError::Reserved(9)));
        let mut reader = FrameReader::default();
        reader.push(&[0, 0, 0, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(reader.next_frame(), Err(FrameError::TooLong(0x0500_0000)));
    }
}
