//! The last bytes a process wrote to stderr, kept for the day it dies.

use std::collections::VecDeque;

/// How much is kept: enough for a crash dump with a deep stack and some lines before it.
pub const TAIL_BYTES: usize = 16 * 1024;

/// A bounded record of the end of a stream.
#[derive(Debug, Default)]
pub struct StderrTail {
    bytes: VecDeque<u8>,
}

impl StderrTail {
    pub fn push(&mut self, chunk: &[u8]) {
        let chunk = &chunk[chunk.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.bytes.len() + chunk.len()).saturating_sub(TAIL_BYTES);
        self.bytes.drain(..excess);
        self.bytes.extend(chunk);
    }

    /// The tail as text. A character cut in half at its beginning is left out, other invalid bytes are replaced.
    pub fn text(&self) -> String {
        let bytes: Vec<u8> = self.bytes.iter().copied().collect();
        let start = bytes.iter().take(3).take_while(|byte| (**byte & 0xC0) == 0x80).count();
        String::from_utf8_lossy(&bytes[start..]).into_owned()
    }
}

/// Python's own report of a crash, as faulthandler wrote it: from its first line to the end of the last stack.
pub fn crash_traceback(tail: &str) -> Option<String> {
    const OPENING: &str = "Fatal Python error: ";
    let start = tail
        .match_indices(OPENING)
        .map(|(at, _)| at)
        .filter(|at| *at == 0 || tail.as_bytes()[at - 1] == b'\n')
        .last()?;
    let mut end = start;
    for line in tail[start..].split_inclusive('\n') {
        let text = line.trim_end();
        let belongs = text.is_empty()
            || line.starts_with(OPENING)
            || line.starts_with("  ")
            || line.starts_with("Thread 0x")
            || line.starts_with("Current thread")
            || line.starts_with("Stack (most recent call first)")
            || line.starts_with("Python runtime state")
            || line.starts_with("Extension modules:")
            || line.starts_with('<');
        if !belongs {
            break;
        }
        end += line.len();
    }
    Some(tail[start..end].trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_bounded_and_keeps_the_end() {
        let mut tail = StderrTail::default();
        for number in 0..10_000 {
            tail.push(format!("line {number}\n").as_bytes());
        }
        assert_eq!(tail.bytes.len(), TAIL_BYTES);
        assert!(tail.text().ends_with("line 9999\n"));
        tail.push(&vec![b'x'; TAIL_BYTES * 3]);
        assert_eq!(tail.text(), "x".repeat(TAIL_BYTES));
    }

    #[test]
    fn a_character_cut_at_the_beginning_is_left_out() {
        let mut tail = StderrTail::default();
        tail.push("é".repeat(TAIL_BYTES / 2 + 1).as_bytes());
        tail.push(b"!");
        assert!(tail.text().starts_with('é'));
    }

    #[test]
    fn a_crash_dump_is_found_in_what_surrounds_it() {
        let dump = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File \"<cell 3>\", line 1 in <module>\n";
        let found = crash_traceback(&format!("warning: before\n{dump}malloc(): after\n"));
        assert_eq!(found.as_deref(), Some(dump.trim_end()));
        assert_eq!(crash_traceback("said: Fatal Python error: not at a line's start"), None);
    }
}
