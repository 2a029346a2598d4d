//! What the fuzz targets share: how one input becomes a stream of frames in pieces, and the watch over what is allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kernelhost_forkserver::frame::encode;

/// Counts what is allocated at a time: a decoder that believed a length it was told would be seen here at once.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all is done by the system's allocator; only numbers are kept here.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Room that a decoder may take whatever comes: its read buffer, twice while it grows, and what tokio keeps for a socket.
const ALWAYS: usize = 512 * 1024;
/// What a byte of input may cost: it is kept in the reader, as a payload and as what was parsed of it, each in a vector that
/// may have doubled, and a short frame costs a structure.
const PER_BYTE: usize = 32;

/// Runs a decoder, and fails if it takes more memory than input of this size can be worth.
pub fn within_bounds(input_bytes: usize, decode: impl FnOnce()) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    decode();
    let grown = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    let allowed = ALWAYS + PER_BYTE * input_bytes;
    assert!(
        grown <= allowed,
        "{grown} bytes were taken for {input_bytes} bytes of input"
    );
    let kept = NOW.load(Ordering::Relaxed).saturating_sub(before);
    assert!(kept <= ALWAYS, "{kept} bytes are still held");
}

/// A stream and the pieces it comes in.
pub struct Stream {
    pub bytes: Vec<u8>,
    cuts: Vec<u8>,
}

impl Stream {
    /// The first byte says whether the rest is the stream itself or what frames with true lengths are made of, the second how
    /// many bytes say where it is cut.
    pub fn of(input: &[u8]) -> Option<Self> {
        let (&[mode, cuts, ..], rest) = (input.first_chunk::<2>()?, &input[2..]);
        let (cuts, rest) = rest.split_at_checked(usize::from(cuts % 8))?;
        let bytes = if mode.is_multiple_of(2) {
            rest.to_vec()
        } else {
            frames(rest)
        };
        Some(Self {
            bytes,
            cuts: cuts.to_vec(),
        })
    }

    /// The pieces, none of them empty.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.bytes[..];
        let mut sizes = self.cuts.iter().cycle();
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let size = sizes.next().map_or(rest.len(), |size| usize::from(*size) + 1);
            let (piece, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            Some(piece)
        })
    }
}

/// Kind, id and length of one byte each, and that much of a payload; the last takes what is left.
fn frames(mut rest: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let [kind, id, length, after @ ..] = rest {
        let length = if *length == 0xFF {
            after.len()
        } else {
            usize::from(*length).min(after.len())
        };
        let (payload, after) = after.split_at(length);
        bytes.extend_from_slice(&encode(u16::from(*kind), u64::from(*id), payload));
        rest = after;
    }
    bytes
}
