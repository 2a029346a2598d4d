//! What a process tree prints: any bytes in any pieces become the text they are, and what is kept keeps to its cap.
#![no_main]
#![allow(dead_code)]

#[path = "../../crates/kernel/src/output.rs"]
mod output;

use kernelhost_fuzz::{Stream as Pieces, within_bounds};
use libfuzzer_sys::fuzz_target;
use output::{Collector, Stream, Utf8Decoder};

fuzz_target!(|input: &[u8]| {
    let Some((cap, input)) = input.split_first() else {
        return;
    };
    let Some(printed) = Pieces::of(input) else { return };
    let cap = usize::from(*cap);
    within_bounds(printed.bytes.len(), || {
        let (mut decoder, mut collector, mut text) = (Utf8Decoder::default(), Collector::new(cap), String::new());
        let mut put = |piece: String| {
            collector.text(Stream::Stdout, &piece);
            text += &piece;
        };
        for piece in printed.pieces() {
            put(decoder.decode(piece));
        }
        put(decoder.finish());
        assert_eq!(text, String::from_utf8_lossy(&printed.bytes));
        let kept = collector.collected();
        assert!(kept.stdout.len() <= cap);
        assert_eq!(kept.stdout.len() as u64 + kept.missing_stdout_bytes, text.len() as u64);
    });
});
