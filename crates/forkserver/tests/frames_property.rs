//! Whatever a peer sends, and in whatever pieces: frames come out as they went in, what is no frame is refused, nothing hangs.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kernelhost_forkserver::client::TemplateError;
use kernelhost_forkserver::frame::{Frame, FrameError, FrameReader, encode};
use kernelhost_forkserver::profile::Profile;
use kernelhost_forkserver::protocol::{
    Ended, ForkFailed, Forked, Released, Shell, StartFailure, TemplateReady, kind, parse,
};
use kernelhost_forkserver::socket::{FrameSocket, Receives, SocketError};
use kernelhost_forkserver::template::Templates;
use kernelhost_process::marker::HostMark;
use kernelhost_process::out_of_memory::{Finding, Witness};
use kernelhost_process::reap::ExitStatus;
use proptest::prelude::*;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(20);

fn any_frame() -> impl Strategy<Value = Frame> {
    let payload = prop_oneof![
        8 => prop::collection::vec(any::<u8>(), 0..200),
        1 => prop::collection::vec(any::<u8>(), 60_000..140_000),
    ];
    (any::<u16>(), any::<u64>(), payload).prop_map(|(kind, id, payload)| Frame { kind, id, payload })
}

fn stream_of(frames: &[Frame]) -> Vec<u8> {
    frames
        .iter()
        .flat_map(|Frame { kind, id, payload }| encode(*kind, *id, payload))
        .collect()
}

/// The same bytes, cut at these places (each a share of the whole).
fn pieces<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    places.sort_unstable();
    places.push(bytes.len());
    let mut from = 0;
    places
        .into_iter()
        .map(|to| {
            let piece = &bytes[from..to];
            from = to;
            piece
        })
        .collect()
}

/// One change to a stream that was whole.
#[derive(Debug, Clone)]
enum Change {
    Set(prop::sample::Index, u8),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
}

fn any_change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        (any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 1..20))
            .prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (any::<prop::sample::Index>(), 1_usize..20).prop_map(|(at, count)| Change::Remove(at, count)),
    ]
}

/// The first byte that may be different.
fn change(bytes: &mut Vec<u8>, change: &Change) -> usize {
    let (Change::Set(at, _) | Change::Insert(at, _) | Change::Remove(at, _)) = change;
    let at = at.index(bytes.len());
    match change {
        Change::Set(_, byte) => bytes[at] = *byte,
        Change::Insert(_, more) => drop(bytes.splice(at..at, more.iter().copied())),
        Change::Remove(_, count) => drop(bytes.drain(at..(at + count).min(bytes.len()))),
    }
    at
}

fn read_all(pieces: &[&[u8]]) -> (Vec<Frame>, Option<FrameError>) {
    let (mut reader, mut seen) = (FrameReader::default(), Vec::new());
    for piece in pieces {
        reader.push(piece);
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => seen.push(frame),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(reader.next_frame(), Err(error.clone()), "what is broken stays broken");
                    return (seen, Some(error));
                }
            }
        }
    }
    (seen, None)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn frames_come_through_a_socket_in_any_pieces(
        frames in prop::collection::vec(any_frame(), 0..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        receives in prop_oneof![Just(Receives::FramesOnly), Just(Receives::Descriptors)],
    ) {
        let bytes = stream_of(&frames);
        let seen = runtime().block_on(async {
            let (mut ours, theirs) = FrameSocket::pair(receives).unwrap();
            let written = pieces(&bytes, &cuts).into_iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
            let writer = std::thread::spawn(move || {
                for piece in written {
                    let mut rest = &piece[..];
                    while !rest.is_empty() {
                        let count = rustix::io::write(&theirs, rest).unwrap();
                        rest = &rest[count..];
                    }
                }
            });
            let mut seen = Vec::new();
            while let Some(frame) = timeout(LIMIT, ours.receive()).await.unwrap().unwrap() {
                seen.push(frame);
            }
            writer.join().unwrap();
            seen
        });
        prop_assert_eq!(seen, frames);
    }

    #[test]
    fn a_change_does_not_reach_the_frames_before_it(
        frames in prop::collection::vec(any_frame(), 1..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        wanted in any_change(),
    ) {
        let mut bytes = stream_of(&frames);
        let from = change(&mut bytes, &wanted);
        let (seen, _) = read_all(&pieces(&bytes, &cuts));
        let mut end = 0;
        let whole = frames.iter().take_while(|frame| { end += 16 + frame.payload.len(); end <= from }).count();
        prop_assert!(seen.len() >= whole);
        prop_assert_eq!(&seen[..whole], &frames[..whole]);
        // However it is cut, the same comes of it.
        prop_assert_eq!(read_all(&[&bytes]), read_all(&pieces(&bytes, &cuts)));
    }

    #[test]
    fn bytes_that_are_no_frames_end_a_socket_with_a_reason(
        bytes in prop::collection::vec(any::<u8>(), 0..2_000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let expected = read_all(&pieces(&bytes, &cuts));
        let seen = runtime().block_on(async {
            let (mut ours, theirs) = FrameSocket::pair(Receives::FramesOnly).unwrap();
            for piece in pieces(&bytes, &cuts) {
                rustix::io::write(&theirs, piece).unwrap();
            }
            drop(theirs);
            let mut seen = Vec::new();
            loop {
                match timeout(LIMIT, ours.receive()).await.unwrap() {
                    Ok(Some(frame)) => seen.push(frame),
                    Ok(None) => return (seen, None),
                    Err(SocketError::Frame(error)) => return (seen, Some(error)),
                    Err(SocketError::Io(error)) => panic!("{error}"),
                }
            }
        });
        prop_assert_eq!(seen, expected);
    }
}

/// Text as Python may send it; the protocol keeps lone surrogates out.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[a-z/.]{0,12}"]
}

fn frame_of(kind: u16, thing: &serde_json::Value) -> Frame {
    Frame {
        kind,
        id: 1,
        payload: serde_json::to_vec(thing).unwrap(),
    }
}

/// Reads a payload as its kind says. What matters is that it comes back.
fn read(frame: &Frame) -> Result<(), FrameError> {
    match frame.kind {
        kind::TEMPLATE_READY => parse::<TemplateReady>(frame).map(drop),
        kind::TEMPLATE_FAILED => parse::<StartFailure>(frame).map(|failure| drop(failure.to_string())),
        kind::FORKED => parse::<Forked>(frame).map(drop),
        kind::FORK_FAILED => parse::<ForkFailed>(frame).map(drop),
        kind::ENDED => parse::<Ended>(frame).map(|ended| drop(ended.status())),
        _ => parse::<Released>(frame).map(drop),
    }
}

fn any_saying() -> impl Strategy<Value = Frame> {
    use serde_json::json;
    prop_oneof![
        (text(), prop::option::of(text()), prop::collection::vec(text(), 0..4)).prop_map(|(python, why, names)| {
            frame_of(
                kind::TEMPLATE_READY,
                &json!({"protocol": 1, "pid": 1, "python": python, "pythonVersion": "3", "shell": "plain",
                    "preloaded": names, "sources": names, "cannotFork": why, "more": {"unknown": [1]}}),
            )
        }),
        (text(), text(), prop::collection::vec(text(), 0..4)).prop_map(|(stage, value, traceback)| {
            frame_of(
                kind::TEMPLATE_FAILED,
                &json!({"stage": stage, "error": {"name": value, "value": value, "traceback": traceback}}),
            )
        }),
        any::<i32>().prop_map(|pid| frame_of(kind::FORKED, &json!({"pid": pid}))),
        (any::<i32>(), text()).prop_map(|(errno, text)| frame_of(
            kind::FORK_FAILED,
            &json!({"errno": errno, "code": text, "message": text})
        )),
        any::<i32>().prop_map(|code| frame_of(kind::ENDED, &json!({"pid": 1, "exited": code}))),
        (any::<i32>(), any::<bool>())
            .prop_map(|(signal, dumped)| frame_of(kind::ENDED, &json!({"signaled": signal, "coreDumped": dumped}))),
        (any::<u64>(), 0.0..1e300_f64).prop_map(|(bytes, ms)| {
            frame_of(
                kind::RELEASED,
                &json!({"maxRssBytes": bytes, "userMs": ms, "systemMs": ms}),
            )
        }),
    ]
}

proptest! {
    #[test]
    fn all_that_a_template_may_say_is_understood(frame in any_saying()) {
        prop_assert_eq!(read(&frame), Ok(()));
    }

    #[test]
    fn what_it_may_not_say_is_refused_with_a_reason(frame in any_saying(), changes in prop::collection::vec(any_change(), 1..4)) {
        let mut frame = frame;
        for each in &changes {
            if !frame.payload.is_empty() {
                change(&mut frame.payload, each);
            }
        }
        if let Err(error) = read(&frame) {
            let begins = format!("a frame of kind {} held what it may not: ", frame.kind);
            prop_assert!(error.to_string().starts_with(&begins));
        }
    }

    #[test]
    fn an_end_is_an_exit_or_a_signal_and_not_both(exited in prop::option::of(any::<i32>()), signaled in prop::option::of(any::<i32>())) {
        let frame = frame_of(kind::ENDED, &serde_json::json!({"exited": exited, "signaled": signaled}));
        let status = parse::<Ended>(&frame).unwrap().status();
        let expected = match (exited, signaled) {
            (Some(code), None) => Some(ExitStatus::Exited { code }),
            (None, Some(number)) => Some(ExitStatus::Signaled { number, core_dumped: false }),
            _ => None,
        };
        prop_assert_eq!(status, expected);
    }
}

/// A shell script that poses as an interpreter and says these bytes to the host; removed when dropped.
struct Impostor {
    script: PathBuf,
    words: PathBuf,
}

impl Impostor {
    fn new(name: &str, words: &[u8], then: &str) -> Self {
        let file = |kind: &str| std::env::temp_dir().join(format!("kernelhost-{}-{name}-{kind}", std::process::id()));
        let (script, path) = (file("script"), file("words"));
        fs::write(&path, words).unwrap();
        fs::write(
            &script,
            format!("#!/bin/sh\ncat '{}' >&3\n{then}\n", path.to_str().unwrap()),
        )
        .unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        Self { script, words: path }
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        fs::remove_file(&self.script).ok();
        fs::remove_file(&self.words).ok();
    }
}

/// Knows of nobody.
struct Nobody;

impl Witness for Nobody {
    fn began(self: Arc<Self>, _pid: i32) {}

    fn finding(&self, _pid: i32) -> Pin<Box<dyn Future<Output = Finding> + Send + '_>> {
        Box::pin(std::future::ready(Finding {
            out_of_memory: false,
            evidence: Vec::new(),
        }))
    }

    fn ended(&self, _pid: i32) {}
}

async fn refusal(impostor: &Impostor, limit: Duration) -> Result<(), TemplateError> {
    let boot = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/boot.py");
    let templates = Templates::new(
        boot.to_str().unwrap().to_owned(),
        HostMark::new().of_servant(),
        Arc::new(Nobody),
        |_| {},
    );
    let environment = [("PATH".to_owned(), std::env::var("PATH").unwrap())];
    let profile = Profile::new(impostor.script.to_str().unwrap(), Shell::Plain, &[], &environment);
    let acquired = timeout(LIMIT, templates.acquire(&profile, &environment, limit))
        .await
        .unwrap();
    acquired.map(drop)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 24, ..ProptestConfig::default() })]

    /// One that goes on is ended for what it said, or when its time is up; one that leaves is told by its end.
    #[test]
    fn a_template_that_talks_nonsense_is_refused(
        frames in prop::collection::vec(any_saying(), 0..3),
        wanted in prop::collection::vec(any_change(), 1..3),
        stays in any::<bool>(),
    ) {
        let mut bytes = stream_of(&frames);
        for each in &wanted {
            if !bytes.is_empty() {
                change(&mut bytes, each);
            }
        }
        let (understood, _) = read_all(&[&bytes]);
        let first_is_ready = understood.first().is_some_and(|frame| frame.kind == kind::TEMPLATE_READY);
        let impostor = Impostor::new("nonsense", &bytes, if stays { "exec sleep 60" } else { "" });
        let refused = runtime().block_on(refusal(&impostor, Duration::from_millis(400)));
        if let Err(error) = refused {
            prop_assert!(!error.to_string().is_empty());
        } else {
            prop_assert!(first_is_ready, "it was taken for a template");
        }
    }
}

#[test]
fn a_length_above_the_limit_ends_a_template_at_once() {
    let mut bytes = encode(kind::TEMPLATE_READY, 0, &[]);
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    let impostor = Impostor::new("long", &bytes, "exec sleep 60");
    let error = runtime().block_on(refusal(&impostor, LIMIT)).unwrap_err();
    assert!(
        matches!(error, TemplateError::Frame(FrameError::TooLong(u32::MAX))),
        "{error:?}"
    );
}

/// A read stops short behind descriptors, and at a byte that was sent out of band: what follows is there all the same.
#[tokio::test(flavor = "current_thread")]
async fn descriptors_that_nobody_asked_for_hold_up_no_frame_and_stay_nowhere() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let (mut ours, theirs) = FrameSocket::pair(Receives::FramesOnly).unwrap();
    let null = fs::File::open("/dev/null").unwrap();
    let before = open();
    // All of it is there before the first read, one byte at a time.
    for byte in encode(kind::FORKED, 7, b"{}")
        .iter()
        .chain(&encode(kind::FORKED, 8, b"{}"))
    {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [null.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&theirs, &[IoSlice::new(&[*byte])], &mut control, SendFlags::empty()).unwrap();
    }
    for id in [7, 8] {
        let frame = timeout(Duration::from_secs(5), ours.receive())
            .await
            .expect("a frame that has arrived is not seen");
        assert_eq!(frame.unwrap().unwrap().id, id);
    }
    assert_eq!(open(), before);
}
