use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[a-z/]{0,12}"]
}

fn bundle() -> impl Strategy<Value = Value> {
    prop::collection::btree_map(text(), text(), 0..4).prop_map(|entries| json!(entries))
}

fn error() -> impl Strategy<Value = Value> {
    (text(), text(), prop::collection::vec(text(), 0..4))
        .prop_map(|(name, value, traceback)| json!({"name": name, "value": value, "traceback": traceback}))
}

/// Everything a life may say, each with a field that is not known here.
fn saying() -> impl Strategy<Value = (u16, Value)> {
    let value =
        prop::option::of((bundle(), bundle()).prop_map(|(data, metadata)| json!({"data": data, "metadata": metadata})));
    prop_oneof![
        (text(), prop_oneof![Just("plain"), Just("ipython")]).prop_map(|(python, shell)| {
            (
                kind::READY,
                json!({"protocol": PROTOCOL, "pid": 1, "python": python, "pythonVersion": python, "shell": shell}),
            )
        }),
        (text(), error()).prop_map(|(stage, error)| (kind::START_FAILED, json!({"stage": stage, "error": error}))),
        (bundle(), bundle(), prop::option::of(text()), any::<bool>()).prop_map(|(data, metadata, id, update)| {
            (
                kind::DISPLAY,
                json!({"data": data, "metadata": metadata, "displayId": id, "update": update}),
            )
        }),
        any::<bool>().prop_map(|wait| (kind::CLEAR, json!({"wait": wait}))),
        (bundle(), bundle()).prop_map(|(data, metadata)| (kind::VALUE, json!({"data": data, "metadata": metadata}))),
        (any::<bool>(), any::<u32>(), value, prop::option::of(error())).prop_map(|(ok, count, value, error)| {
            let status = if ok { "ok" } else { "error" };
            (
                kind::DONE,
                json!({"status": status, "executionCount": count, "interrupted": ok, "value": value, "error": error}),
            )
        }),
        any::<i32>().prop_map(|code| (kind::EXITING, json!({"code": code}))),
        (prop::option::of(bundle()), prop::option::of(error()))
            .prop_map(|(answer, error)| (kind::ANSWER, json!({"answer": answer, "error": error}))),
    ]
    .prop_map(|(kind, mut object)| {
        object["unknown"] = json!([1, {"a": null}]);
        (kind, object)
    })
}

fn frame_of(kind: u16, id: u64, thing: &Value) -> Frame {
    Frame {
        kind,
        id,
        payload: serde_json::to_vec(thing).unwrap(),
    }
}

fn output_fields(output: &Output) -> Value {
    let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    match output {
        Output::Display {
            data,
            metadata,
            display_id,
            update,
        } => json!({"data": parsed(data), "metadata": parsed(metadata), "displayId": display_id, "update": update}),
        Output::Clear { wait } => json!({"wait": wait}),
        Output::Value { data, metadata } => json!({"data": parsed(data), "metadata": parsed(metadata)}),
        Output::Error { name, value, traceback } => json!({"name": name, "value": value, "traceback": traceback}),
        Output::Text { .. } => unreachable!("no frame carries text"),
    }
}

/// What was understood, in the words of the protocol.
fn fields(message: &Message) -> Value {
    match message {
        Message::Ready(ready) => json!({"python": ready.python, "pythonVersion": ready.python_version}),
        Message::StartFailed(StartFailure { stage, error }) => {
            let PythonError { name, value, traceback } = error;
            json!({"stage": stage, "error": {"name": name, "value": value, "traceback": traceback}})
        }
        Message::Output(_, output) => output_fields(output),
        Message::Done(_, done) => json!({
            "status": if done.ok { "ok" } else { "error" },
            "executionCount": done.execution_count,
            "interrupted": done.interrupted,
            "value": done.value.as_ref().map(output_fields),
            "error": done.error.as_ref().map(output_fields),
        }),
        Message::Exiting(_, code) => json!({"code": code}),
        Message::Answer(_, Answer::Found(answer)) => json!({"answer": serde_json::from_str::<Value>(answer).unwrap()}),
        Message::Answer(_, Answer::Late) => json!({"answer": null, "error": null}),
        Message::Copy(_, Copied::Refused(why)) => json!({"why": why}),
        Message::Copy(_, Copied::Begins | Copied::Done)
        | Message::Answer(_, Answer::Failed { .. })
        | Message::InitBegins => json!({}),
    }
}

proptest! {
    #[test]
    fn all_that_a_life_may_say_is_understood((kind, said) in saying(), id in any::<u64>()) {
        let message = read_message(&frame_of(kind, id, &said));
        let understood = fields(&message.unwrap());
        for (name, value) in understood.as_object().unwrap() {
            prop_assert_eq!(value, &said[name], "{}", name);
        }
    }

    #[test]
    fn a_field_that_is_missing_or_of_another_type_breaks_the_format(
        (kind, said) in saying(),
        which in any::<prop::sample::Index>(),
        other in prop_oneof![Just(None), Just(Some(json!([[]]))), Just(Some(json!(-1.5)))],
    ) {
        let mut said = said;
        let names: Vec<String> = said.as_object().unwrap().keys().cloned().collect();
        let name = &names[which.index(names.len())];
        let may_be_absent = ["unknown", "pid", "displayId", "value", "error", "answer"].contains(&name.as_str());
        // A bundle is handed on as it is.
        let is_bundle = ["data", "metadata"].contains(&name.as_str());
        prop_assume!(!(may_be_absent && (other.is_none() || name == "unknown" || name == "pid")));
        prop_assume!(!(is_bundle && other.is_some()));
        match other {
            None => drop(said.as_object_mut().unwrap().remove(name)),
            Some(other) => said[name] = other,
        }
        let refused = read_message(&frame_of(kind, 1, &said)).unwrap_err();
        prop_assert!(matches!(refused, FrameError::Payload { kind: of, .. } if of == kind), "{}", refused);
    }

    #[test]
    fn any_payload_is_understood_or_refused(
        kind in prop_oneof![32_u16..37, 16_u16..29, any::<u16>()],
        payload in prop_oneof![prop::collection::vec(any::<u8>(), 0..300), any::<String>().prop_map(String::into_bytes)],
    ) {
        let frame = Frame { kind, id: 1, payload };
        if let Err(error) = read_message(&frame) {
            prop_assert!(!error.to_string().is_empty());
        }
        let is_called = [kind::BARRIER, kind::GIVEN_UP].contains(&kind);
        prop_assert_eq!(read_called(&frame).is_ok(), is_called || kind == kind::CALL && read_call(&frame).is_ok());
    }

    #[test]
    fn a_mutated_payload_is_understood_or_refused(
        (kind, said) in saying(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut frame = frame_of(kind, 1, &said);
        for (at, byte) in changes {
            let at = at.index(frame.payload.len());
            frame.payload[at] = byte;
        }
        match read_message(&frame) {
            // What goes on to JavaScript as JSON is JSON.
            Ok(message) => drop(fields(&message)),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

fn call_frame(header: &Value, bytes: &[u8]) -> Frame {
    let header = serde_json::to_vec(header).unwrap();
    let length = u32::try_from(header.len()).unwrap().to_le_bytes();
    Frame {
        kind: kind::CALL,
        id: 3,
        payload: [&length[..], &header, bytes].concat(),
    }
}

proptest! {
    #[test]
    fn calls_are_understood_with_their_bytes(
        cell in any::<u64>(),
        name in text(),
        args in bundle(),
        password in prop::option::of(any::<bool>()),
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..4),
        surplus in 0_usize..2,
    ) {
        let places: Vec<Value> = parts.iter().map(|part| json!([["a", 0], part.len()])).collect();
        let header = json!({"cell": cell, "name": name, "password": password, "args": args, "places": places, "x": 1});
        let mut bytes = parts.concat();
        bytes.resize(bytes.len() + surplus, 0);
        let call = read_call(&call_frame(&header, &bytes));
        prop_assert_eq!(call.is_ok(), surplus == 0);
        if let Ok(call) = call {
            prop_assert_eq!((call.cell, &call.name, call.password), (cell, &name, password));
            prop_assert_eq!(serde_json::from_str::<Value>(&call.args).unwrap(), args);
            prop_assert_eq!(call.bytes, bytes);
        }
    }

    #[test]
    fn a_mutated_call_is_understood_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        length in any::<prop::sample::Index>(),
    ) {
        let header = json!({"cell": 1, "name": "f", "password": null, "args": [null], "places": [[[0], 3]]});
        let mut frame = call_frame(&header, b"abc");
        for (at, byte) in changes {
            let at = at.index(frame.payload.len());
            frame.payload[at] = byte;
        }
        frame.payload.truncate(length.index(frame.payload.len() + 1));
        if let Err(error) = read_call(&frame) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any depth: the stack of the one thread that serves all kernels is not a kernel's to spend.
    #[test]
    fn depth_costs_no_stack(depth in 0_usize..100_000, closed in any::<bool>(), kind in 16_u16..23) {
        let nest = |open: &str, close: &str| open.repeat(depth) + &close.repeat(if closed { depth } else { 0 });
        for text in [nest("[", "]"), nest("{\"a\":", "}"), format!("{{\"data\":{},\"metadata\":{{}}}}", nest("[", "]"))] {
            drop(read_message(&Frame { kind, id: 1, payload: text.into_bytes() }));
        }
    }

    #[test]
    fn messages_come_through_the_wire_in_any_pieces(
        said in prop::collection::vec(saying(), 0..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        barriers in prop::collection::vec(any::<u64>(), 0..4),
    ) {
        let frames: Vec<Frame> = (1..).zip(&said).map(|(id, (kind, object))| frame_of(*kind, id, object)).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (heard, passed) = runtime.block_on(async {
            let (mut wire, requests, calls) = Wire::new().unwrap();
            let bytes: Vec<u8> = frames
                .iter()
                .flat_map(|frame| kernelhost_forkserver::frame::encode(frame.kind, frame.id, &frame.payload))
                .collect();
            let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            places.push(bytes.len());
            places.sort_unstable();
            let asked = barriers.clone();
            let writer = std::thread::spawn(move || {
                let mut from = 0;
                for to in places {
                    let mut rest = &bytes[from..to];
                    while !rest.is_empty() {
                        let count = rustix::io::write(&requests, rest).unwrap();
                        rest = &rest[count..];
                    }
                    from = to;
                }
                for barrier in asked {
                    let frame = kernelhost_forkserver::frame::encode(kind::BARRIER, barrier, &[]);
                    rustix::io::write(&calls, &frame).unwrap();
                }
                calls
            });
            let (mut heard, mut passed) = (Vec::new(), Vec::new());
            while heard.len() < frames.len() || passed.len() < barriers.len() {
                match wire.next().await {
                    Heard::Message(Received::Message(message)) => heard.push(fields(&message)),
                    Heard::Called(Received::Message(Called::Barrier(barrier))) => passed.push(barrier),
                    // The writer drops `requests` when it is done.
                    Heard::Message(_) | Heard::Called(_) => break,
                }
            }
            drop(writer.join().unwrap());
            (heard, passed)
        });
        prop_assert_eq!(heard.len(), said.len());
        for (heard, (_, said)) in heard.iter().zip(&said) {
            for (name, value) in heard.as_object().unwrap() {
                prop_assert_eq!(value, &said[name]);
            }
        }
        if said.is_empty() {
            return Ok(());
        }
        prop_assert!(barriers.starts_with(&passed));
    }
}
