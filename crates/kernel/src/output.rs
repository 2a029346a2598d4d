//! What a cell puts out: decoded as it comes, kept within its caps with head and tail, and paid for with credit when somebody
//! listens.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Bytes of output that may be on their way to listeners before the kernel's pipes are left alone, so that a slow
/// listener slows the kernel down and does not fill the daemon's memory. More would only make what it gets older.
const CREDIT_BYTES: usize = 256 * 1024;
/// One read of a pipe: the default size of a pipe's buffer.
pub const READ_BYTES: usize = 64 * 1024;
/// One read while a listener is behind. It pays for each output, so smaller ones slow the kernel down sooner, which leaves the
/// processor to others.
const BEHIND_READ_BYTES: usize = 16 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// MIME bundles are JSON text here: whoever shows them parses them, and nobody else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Text {
        stream: Stream,
        text: String,
    },
    Display {
        data: String,
        metadata: String,
        display_id: Option<String>,
        update: bool,
    },
    Clear {
        wait: bool,
    },
    Value {
        data: String,
        metadata: String,
    },
    Error {
        name: String,
        value: String,
        traceback: Vec<String>,
    },
}

impl Output {
    /// What it weighs against the credit. A small one is not free: a flood of them would keep JavaScript busy with taking
    /// them, and each costs it some hundred bytes.
    pub fn bytes(&self) -> usize {
        512 + match self {
            Self::Text { text, .. } => text.len(),
            Self::Display { data, metadata, .. } | Self::Value { data, metadata } => data.len() + metadata.len(),
            Self::Clear { .. } => 0,
            Self::Error { value, traceback, .. } => value.len() + traceback.iter().map(String::len).sum::<usize>(),
        }
    }
}

/// Makes text of bytes that arrive in pieces: a character split over two pieces is put together, what is no UTF-8 becomes U+FFFD.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    cut: Vec<u8>,
}

impl Utf8Decoder {
    pub fn decode(&mut self, piece: &[u8]) -> String {
        let joined;
        let bytes = if self.cut.is_empty() {
            piece
        } else {
            joined = [&self.cut, piece].concat();
            self.cut.clear();
            &joined
        };
        let whole = match std::str::from_utf8(bytes) {
            Ok(text) => return text.to_owned(),
            Err(_) => bytes.len() - incomplete_tail(bytes),
        };
        let text = String::from_utf8_lossy(&bytes[..whole]).into_owned();
        self.cut = bytes[whole..].to_vec();
        text
    }

    /// What was waiting for the rest of a character that did not come.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.cut)).into_owned()
    }
}

/// How many bytes at the end are the beginning of a character that is not yet whole.
fn incomplete_tail(bytes: &[u8]) -> usize {
    for length in 1..=bytes.len().min(3) {
        let lead = bytes[bytes.len() - length];
        let wanted = match lead {
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            0x80..=0xBF => continue,
            _ => return 0,
        };
        return if wanted > length { length } else { 0 };
    }
    0
}

/// One stream of a cell within its cap: the first half and the last half of what may be kept.
#[derive(Debug)]
struct Kept {
    head: String,
    tail: VecDeque<u8>,
    half: usize,
    total: usize,
}

impl Kept {
    fn new(cap: usize) -> Self {
        Self {
            head: String::new(),
            tail: VecDeque::new(),
            half: cap / 2,
            total: 0,
        }
    }

    fn push(&mut self, text: &str) {
        self.total += text.len();
        let mut rest = text;
        if self.tail.is_empty() && self.head.len() < self.half {
            let fits = text.floor_char_boundary((self.half - self.head.len()).min(text.len()));
            self.head.push_str(&text[..fits]);
            rest = &text[fits..];
        }
        let rest = &rest.as_bytes()[rest.len().saturating_sub(self.half)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(self.half);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// The tail as text: a character cut in half at its beginning is left out.
    fn tail(&self) -> String {
        let bytes: Vec<u8> = self.tail.iter().copied().collect();
        let start = bytes.iter().take_while(|byte| (**byte & 0xC0) == 0x80).count();
        String::from_utf8_lossy(&bytes[start..]).into_owned()
    }
}

/// The order of what came: runs of one stream's text by their length, everything else as it is.
#[derive(Debug)]
enum Run {
    Text(Stream, usize),
    Other(Output),
}

/// What a collector keeps besides text before it looks for what can go.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    count: usize,
    bytes: usize,
}

/// One display may be as large as a frame, and all of a cell may be as large as that together.
const BOUNDS: Bounds = Bounds {
    count: 4096,
    bytes: 64 * 1024 * 1024,
};

/// Everything one cell puts out.
#[derive(Debug)]
pub struct Collector {
    kept: [Kept; 2],
    runs: Vec<Run>,
    /// Past this many runs those whose text is all cut out are merged; doubled when that does not help.
    tidy_at: usize,
    bounds: Bounds,
    /// How much of the runs is no text, and what it weighs.
    others: Bounds,
    missing_displays: u64,
}

/// What a collector has kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Collected {
    pub stdout: String,
    pub stderr: String,
    pub missing_stdout_bytes: u64,
    pub missing_stderr_bytes: u64,
    pub missing_displays: u64,
    pub outputs: Vec<Output>,
}

impl Collector {
    /// `cap`: bytes kept of each stream.
    pub fn new(cap: usize) -> Self {
        Self {
            kept: [Kept::new(cap), Kept::new(cap)],
            runs: Vec::new(),
            tidy_at: 1024,
            bounds: BOUNDS,
            others: Bounds { count: 0, bytes: 0 },
            missing_displays: 0,
        }
    }

    pub fn text(&mut self, stream: Stream, text: &str) {
        if text.is_empty() {
            return;
        }
        self.kept[stream as usize].push(text);
        match self.runs.last_mut() {
            Some(Run::Text(last, length)) if *last == stream => *length += text.len(),
            _ => self.runs.push(Run::Text(stream, text.len())),
        }
        if self.runs.len() > self.tidy_at {
            self.tidy();
            self.tidy_at = (self.runs.len() * 2).max(1024);
        }
    }

    pub fn other(&mut self, output: Output) {
        self.others.count += 1;
        self.others.bytes += output.bytes();
        self.runs.push(Run::Other(output));
        if self.exceeds(self.bounds) {
            self.drop_superseded();
            let half = Bounds {
                count: self.bounds.count / 2,
                bytes: self.bounds.bytes / 2,
            };
            // Down to half, so that the next look is a long way off.
            if self.exceeds(half) {
                self.cut_middle();
            }
        }
    }

    fn exceeds(&self, bounds: Bounds) -> bool {
        self.others.count > bounds.count || self.others.bytes > bounds.bytes
    }

    /// What has been kept so far.
    pub fn collected(&self) -> Collected {
        let tails = [self.kept[0].tail(), self.kept[1].tail()];
        let mut outputs: Vec<Output> = Vec::new();
        let mut at = [0; 2];
        for run in &self.runs {
            match run {
                Run::Other(output) => outputs.push(output.clone()),
                Run::Text(stream, length) => {
                    let (kept, tail) = (&self.kept[*stream as usize], &tails[*stream as usize]);
                    let (from, to) = (at[*stream as usize], at[*stream as usize] + length);
                    at[*stream as usize] = to;
                    let mut text = part(&kept.head, 0, from, to).to_owned();
                    text += part(tail, kept.total - tail.len(), from, to);
                    match outputs.last_mut() {
                        _ if text.is_empty() => {}
                        Some(Output::Text {
                            stream: last,
                            text: so_far,
                        }) if last == stream => *so_far += &text,
                        _ => outputs.push(Output::Text { stream: *stream, text }),
                    }
                }
            }
        }
        let missing = |index: usize| (self.kept[index].total - self.kept[index].head.len() - tails[index].len()) as u64;
        let (missing_stdout_bytes, missing_stderr_bytes) = (missing(0), missing(1));
        let [stdout, stderr] = [0, 1].map(|index| format!("{}{}", self.kept[index].head, tails[index]));
        Collected {
            stdout,
            stderr,
            missing_stdout_bytes,
            missing_stderr_bytes,
            missing_displays: self.missing_displays,
            outputs,
        }
    }

    /// Drops what can no longer be seen: updates that a later one of their display replaces, and what was shown before the
    /// last clear. Whoever shows the outputs that are left ends up with the same picture. Text is kept: it has a cap of its own.
    fn drop_superseded(&mut self) {
        let cleared = self.last_clear();
        // Updates of these have gone with them. Other updates are of displays that an earlier cell has shown.
        let gone: HashSet<&str> = self.runs[..cleared].iter().filter_map(shown_id).collect();
        let mut newer: HashSet<&str> = HashSet::new();
        let mut keep = vec![true; self.runs.len()];
        for (place, run) in self.runs.iter().enumerate().rev() {
            keep[place] = match run {
                Run::Text(..) | Run::Other(Output::Error { .. }) => true,
                Run::Other(Output::Display {
                    display_id: Some(id),
                    update: true,
                    ..
                }) => !(place < cleared && gone.contains(id.as_str())) && newer.insert(id),
                // A clear that waits for what comes next says nothing once another follows it.
                Run::Other(Output::Clear { wait: true }) => {
                    place >= cleared && !matches!(self.runs.get(place + 1), Some(Run::Other(Output::Clear { .. })))
                }
                Run::Other(_) => place >= cleared,
            };
        }
        self.keep(&keep);
    }

    /// Where the last clear is that has taken effect; 0 if there is none.
    fn last_clear(&self) -> usize {
        let mut cleared = 0;
        let mut waiting = None;
        for (place, run) in self.runs.iter().enumerate() {
            match run {
                Run::Other(Output::Clear { wait: false }) => (cleared, waiting) = (place, None),
                Run::Other(Output::Clear { wait: true }) => waiting = Some(place),
                // An update changes what is there, and is not the new output that a clear waits for.
                Run::Other(Output::Display { update: true, .. }) => {}
                _ => cleared = waiting.take().unwrap_or(cleared),
            }
        }
        cleared
    }

    /// Keeps the first and the last of what is no text, and counts the rest.
    fn cut_middle(&mut self) {
        let quarter = Bounds {
            count: self.bounds.count / 4,
            bytes: self.bounds.bytes / 4,
        };
        let mut keep = vec![false; self.runs.len()];
        let places = || self.runs.iter().enumerate();
        for (from_end, places) in [
            (false, Box::new(places()) as Box<dyn Iterator<Item = (usize, &Run)>>),
            (true, Box::new(places().rev())),
        ] {
            let mut so_far = Bounds { count: 0, bytes: 0 };
            for (place, run) in places {
                let Run::Other(output) = run else { continue };
                so_far.count += 1;
                so_far.bytes += output.bytes();
                let is_newest = from_end && so_far.count == 1;
                if !is_newest && (so_far.count > quarter.count || so_far.bytes > quarter.bytes) {
                    break;
                }
                keep[place] = true;
            }
        }
        for (place, run) in self.runs.iter().enumerate() {
            match run {
                Run::Other(Output::Display { .. } | Output::Value { .. }) => {
                    self.missing_displays += u64::from(!keep[place]);
                }
                _ => keep[place] = true,
            }
        }
        self.keep(&keep);
    }

    /// Drops the other runs, and joins the texts that touch then.
    fn keep(&mut self, keep: &[bool]) {
        let mut kept: Vec<Run> = Vec::new();
        for (run, keep) in self.runs.drain(..).zip(keep) {
            match (run, kept.last_mut()) {
                (Run::Text(stream, length), Some(Run::Text(last, so_far))) if *last == stream => *so_far += length,
                (Run::Other(output), _) if !keep => {
                    self.others.count -= 1;
                    self.others.bytes -= output.bytes();
                }
                (run, _) => kept.push(run),
            }
        }
        self.runs = kept;
    }

    /// Merges text runs that touch once the runs between them, whose text is cut out, are taken away.
    fn tidy(&mut self) {
        let lost: [(usize, usize); 2] = [0, 1].map(|index| {
            (
                self.kept[index].head.len(),
                self.kept[index].total - self.kept[index].tail.len(),
            )
        });
        let mut at = [0; 2];
        let mut tidied: Vec<Run> = Vec::new();
        // Per stream: where in `tidied` the last wholly lost run of it is.
        let mut lost_run: [Option<usize>; 2] = [None; 2];
        for run in self.runs.drain(..) {
            if let Run::Text(stream, length) = run {
                let index = stream as usize;
                let (from, to) = (at[index], at[index] + length);
                at[index] = to;
                if from >= lost[index].0 && to <= lost[index].1 {
                    if let Some(Run::Text(_, so_far)) = lost_run[index].and_then(|place| tidied.get_mut(place)) {
                        *so_far += length;
                        continue;
                    }
                    lost_run[index] = Some(tidied.len());
                }
            }
            tidied.push(run);
        }
        self.runs = tidied;
    }
}

/// The id under which a run shows something that can be updated.
fn shown_id(run: &Run) -> Option<&str> {
    match run {
        Run::Other(Output::Display {
            display_id: Some(id),
            update: false,
            ..
        }) => Some(id),
        _ => None,
    }
}

/// The part of `text`, which begins at `start` of its stream, that lies within `from..to`.
fn part(text: &str, start: usize, from: usize, to: usize) -> &str {
    let begin = text.ceil_char_boundary(from.saturating_sub(start).min(text.len()));
    let end = text.floor_char_boundary(to.saturating_sub(start).min(text.len()));
    text.get(begin..end).unwrap_or("")
}

/// Output on its way to listeners of one kernel.
#[derive(Debug, Default)]
pub struct CreditAccount {
    owed: AtomicUsize,
    returned: Notify,
}

/// Some bytes of output on their way; dropping it says that they have arrived.
#[derive(Debug)]
pub struct Credit {
    account: Arc<CreditAccount>,
    bytes: usize,
}

impl CreditAccount {
    pub fn take(self: &Arc<Self>, bytes: usize) -> Credit {
        self.owe(bytes);
        Credit {
            account: self.clone(),
            bytes,
        }
    }

    pub fn owe(&self, bytes: usize) {
        self.owed.fetch_add(bytes, Ordering::AcqRel);
    }

    pub fn give_back(&self, bytes: usize) {
        // Never below zero, whatever a caller says it has taken.
        let update = |owed: usize| Some(owed.saturating_sub(bytes));
        self.owed.fetch_update(Ordering::AcqRel, Ordering::Acquire, update).ok();
        self.returned.notify_one();
    }

    pub fn forgive(&self) {
        self.owed.store(0, Ordering::Release);
        self.returned.notify_one();
    }

    /// How much may be read at once; 0: nothing, until there is credit again.
    pub fn room(&self) -> usize {
        match self.owed.load(Ordering::Acquire) {
            0 => READ_BYTES,
            owed if owed < CREDIT_BYTES => BEHIND_READ_BYTES,
            _ => 0,
        }
    }

    /// Resolves when there is credit again.
    pub async fn available(&self) {
        while self.room() == 0 {
            self.returned.notified().await;
        }
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.account.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn text_survives_any_cutting(text in "\\PC{0,200}", cut in 1_usize..5) {
            let mut decoder = Utf8Decoder::default();
            let decoded: String = text.as_bytes().chunks(cut).map(|piece| decoder.decode(piece)).collect();
            prop_assert_eq!(decoded + &decoder.finish(), text);
        }

        #[test]
        fn any_bytes_become_what_they_are_when_decoded_in_one_piece(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 1_usize..5) {
            let mut decoder = Utf8Decoder::default();
            let decoded: String = bytes.chunks(cut).map(|piece| decoder.decode(piece)).collect();
            prop_assert_eq!(decoded + &decoder.finish(), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn what_is_kept_is_the_head_and_the_tail_and_the_rest_is_counted(
            pieces in prop::collection::vec((any::<bool>(), "[a-zé☃𝄞\n]{0,40}"), 0..200),
            cap in 0_usize..300,
        ) {
            let mut collector = Collector::new(cap);
            collector.tidy_at = 4;
            let mut whole = [String::new(), String::new()];
            for (stderr, text) in &pieces {
                collector.text(if *stderr { Stream::Stderr } else { Stream::Stdout }, text);
                whole[usize::from(*stderr)] += text;
            }
            let kept = collector.collected();
            let parts = [(&kept.stdout, kept.missing_stdout_bytes, Stream::Stdout), (&kept.stderr, kept.missing_stderr_bytes, Stream::Stderr)];
            for (index, (text, missing, stream)) in parts.into_iter().enumerate() {
                prop_assert_eq!(text.len() as u64 + missing, whole[index].len() as u64);
                prop_assert!(text.len() <= cap);
                if whole[index].len() <= cap / 2 {
                    prop_assert_eq!(text, &whole[index]);
                }
                let ordered: String = kept.outputs.iter().filter_map(|output| match output {
                    Output::Text { stream: of, text } if *of == stream => Some(text.as_str()),
                    _ => None,
                }).collect();
                prop_assert_eq!(&ordered, text);
                let agree = |left: usize| whole[index].starts_with(&text[..left]) && whole[index].ends_with(&text[left..]);
                prop_assert!((0..=text.len()).any(|left| text.is_char_boundary(left) && agree(left)));
            }
        }
    }

    /// What somebody sees who shows outputs one after the other, as a notebook does: the items, and whether a clear waits.
    fn picture(outputs: &[Output]) -> (Vec<(Option<String>, String)>, bool) {
        let mut shown: Vec<(Option<String>, String)> = Vec::new();
        let mut clear_waits = false;
        for output in outputs {
            let item = match output {
                Output::Clear { wait: false } => {
                    shown.clear();
                    clear_waits = false;
                    continue;
                }
                Output::Clear { wait: true } => {
                    clear_waits = true;
                    continue;
                }
                Output::Display {
                    data,
                    display_id,
                    update: true,
                    ..
                } => {
                    shown
                        .iter_mut()
                        .filter(|(id, _)| id == display_id)
                        .for_each(|item| item.1.clone_from(data));
                    continue;
                }
                Output::Display { data, display_id, .. } => (display_id.clone(), data.clone()),
                Output::Text { text, .. } => (Some("text".to_owned()), text.clone()),
                Output::Value { data, .. } => (None, data.clone()),
                Output::Error { name, .. } => (None, name.clone()),
            };
            if std::mem::take(&mut clear_waits) {
                shown.clear();
            }
            match (shown.last_mut(), &item.0) {
                (Some((Some(last), text)), Some(id)) if id == "text" && last == id => *text += &item.1,
                _ => shown.push(item),
            }
        }
        (shown, clear_waits)
    }

    fn display(id: Option<u8>, data: &str, update: bool) -> Output {
        Output::Display {
            data: data.to_owned(),
            metadata: "{}".to_owned(),
            display_id: id.map(|id| format!("id {id}")),
            update,
        }
    }

    fn any_output() -> impl Strategy<Value = Output> {
        prop_oneof![
            3 => "[a-z]{1,3}".prop_map(|text| Output::Text { stream: Stream::Stdout, text }),
            2 => (prop::option::of(0_u8..3), "[a-z]{1,3}").prop_map(|(id, data)| display(id, &data, false)),
            4 => (0_u8..3, "[a-z]{1,3}").prop_map(|(id, data)| display(Some(id), &data, true)),
            2 => any::<bool>().prop_map(|wait| Output::Clear { wait }),
        ]
    }

    fn collect(outputs: &[Output], bounds: Bounds) -> Collector {
        let mut collector = Collector::new(1 << 20);
        collector.bounds = bounds;
        for output in outputs {
            match output {
                Output::Text { stream, text } => collector.text(*stream, text),
                other => collector.other(other.clone()),
            }
            assert!(
                collector.others.count <= bounds.count
                    && collector.others.bytes <= bounds.bytes.max(other_bytes(&collector.runs))
            );
        }
        collector
    }

    fn other_bytes(runs: &[Run]) -> usize {
        runs.iter()
            .map(|run| {
                if let Run::Other(output) = run {
                    output.bytes()
                } else {
                    0
                }
            })
            .max()
            .unwrap_or(0)
    }

    proptest! {
        #[test]
        fn a_flood_of_displays_and_clears_ends_in_the_same_picture(outputs in prop::collection::vec(any_output(), 0..120), count in 4_usize..24) {
            let collected = collect(&outputs, Bounds { count, bytes: usize::MAX }).collected();
            let text: String = outputs.iter().filter_map(|output| match output {
                Output::Text { text, .. } => Some(text.as_str()),
                _ => None,
            }).collect();
            prop_assert_eq!(collected.stdout, text);
            if collected.missing_displays == 0 {
                prop_assert_eq!(picture(&collected.outputs), picture(&outputs));
            }
        }

        #[test]
        fn displays_that_replace_nothing_are_kept_from_both_ends_and_counted(sizes in prop::collection::vec(0_usize..3000, 0..60)) {
            let outputs: Vec<Output> = sizes.iter().enumerate().map(|(at, size)| display(None, &format!("{at} {}", "x".repeat(*size)), false)).collect();
            let collected = collect(&outputs, Bounds { count: 16, bytes: 40_000 }).collected();
            prop_assert_eq!(collected.outputs.len() as u64 + collected.missing_displays, outputs.len() as u64);
            prop_assert_eq!(collected.outputs.first(), outputs.first());
            prop_assert_eq!(collected.outputs.last(), outputs.last());
            let mut rest = outputs.iter();
            prop_assert!(collected.outputs.iter().all(|kept| rest.any(|output| output == kept)), "in order");
        }
    }

    #[test]
    fn a_flood_of_updates_keeps_the_display_and_its_newest_state() {
        let mut collector = Collector::new(100);
        collector.other(display(Some(1), "first", false));
        for at in 0..100_000 {
            collector.other(display(Some(1), &format!("{at}"), true));
        }
        assert!(collector.runs.len() <= BOUNDS.count, "{}", collector.runs.len());
        let collected = collector.collected();
        assert_eq!(collected.missing_displays, 0);
        assert_eq!(collected.outputs.first(), Some(&display(Some(1), "first", false)));
        assert_eq!(collected.outputs.last(), Some(&display(Some(1), "99999", true)));
    }

    #[test]
    fn displays_keep_their_place_between_texts() {
        let clear = Output::Clear { wait: false };
        let mut collector = Collector::new(100);
        collector.text(Stream::Stdout, "a");
        collector.text(Stream::Stdout, "b");
        collector.other(clear.clone());
        collector.text(Stream::Stdout, "c");
        let text = |text: &str| Output::Text {
            stream: Stream::Stdout,
            text: text.into(),
        };
        assert_eq!(collector.collected().outputs, [text("ab"), clear, text("c")]);
    }

    #[test]
    fn many_small_alternating_writes_do_not_grow_without_end() {
        let mut collector = Collector::new(64);
        for _ in 0..100_000 {
            collector.text(Stream::Stdout, "o");
            collector.text(Stream::Stderr, "e");
        }
        assert!(collector.runs.len() < 4096, "{}", collector.runs.len());
        assert_eq!(collector.collected().missing_stdout_bytes, 100_000 - 64);
    }
}
