//! A trace in blktrace's format: events with any fields in either version and byte order, and any
//! bytes. A trace is refused with an error that names an offset, or its operations are valid, and
//! print to events that are read as the same operations. A replay of it on a null device completes
//! each operation, with an error if the device lacks the range.

use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_null::{Null, NullConfig};
use blockyard_trace::format::{MAGIC, category, code};
use blockyard_trace::{
    Operations, ReplayError, ReplayOptions, ReplayStop, Select, Speed, TraceError, TraceOperation,
    TraceReader, TraceRecord, TraceTally, replay,
};

use crate::input::Input;

/// The most events of one input.
const EVENTS_MAX: usize = 64;

/// Texts of messages.
const TEXTS: &[&str] = &[
    "zone_reset Q 524288",
    "zone_finish D 0",
    "zone_open C 8 error 5",
    "zone_close Q 99999999999999999999",
    "blockyard: lost 7 events of queue 1",
    "blockyard: lost x events",
    "",
    "\u{e9}",
];

/// Interprets the bytes as a trace.
///
/// # Panics
/// If an error does not name its offset, or an operation is invalid or does not print to itself.
pub fn blktrace_file(bytes: &[u8]) {
    read(bytes);
    let mut input = Input::new(bytes);
    let mut trace = Vec::new();
    let (big, version_2) = (input.below(2) == 1, input.below(2) == 1);
    // Seldom, because each replay takes memory for 96 MiB of data. An input without a byte left
    // chooses 0, so 0 is not the value that replays, and the choice is made before the events.
    let is_replayed = input.below(64) == 1;
    for _ in 0..EVENTS_MAX {
        if input.is_empty() {
            break;
        }
        let record = record(&mut input);
        print(&record, big, version_2, &mut trace);
    }
    let whole = trace.len();
    assert!(read(&trace).is_some(), "a printed trace is read");
    if is_replayed {
        replayed(&trace);
    }
    // A part of a trace ends within an event, or at the end of one.
    trace.truncate(input.below(whole as u64 + 1) as usize);
    read(&trace);
}

fn record(input: &mut Input<'_>) -> TraceRecord {
    let codes = [code::QUEUE, code::ISSUE, code::COMPLETE, code::NOTE_MESSAGE, code::SPLIT];
    let code = input.choose(&codes) | if input.below(8) == 0 { code::CGROUP } else { 0 };
    let is_note = code & !code::CGROUP == code::NOTE_MESSAGE;
    let categories = match is_note {
        true => category::NOTIFY,
        false => input.word() & 0x7f_ffff & !category::NOTIFY,
    };
    let pdu = match input.below(4) {
        _ if is_note => input.choose(TEXTS).as_bytes().to_vec(),
        0 => b"zone_append".to_vec(),
        1 => b"write_zeroes".to_vec(),
        _ => vec![7; input.below(12) as usize],
    };
    TraceRecord {
        sequence: input.word() as u32,
        time_ns: input.word(),
        sector: input.word() >> input.below(60),
        bytes: (input.word() as u32) & !(input.choose(&[0, 511, 4095])),
        code,
        categories,
        cpu: input.below(4) as u32,
        pdu,
        ..TraceRecord::default()
    }
}

/// Prints an event in any version and byte order; version 7 loses the upper categories.
fn print(record: &TraceRecord, big: bool, version_2: bool, out: &mut Vec<u8>) {
    let mut fields: Vec<(u64, usize)> = vec![
        (u64::from(MAGIC) | if version_2 { 8 } else { 7 }, 4),
        (record.sequence.into(), 4),
        (record.time_ns, 8),
        (record.sector, 8),
        (record.bytes.into(), 4),
    ];
    let action = record.categories << 16 | u64::from(record.code);
    match version_2 {
        true => fields.extend([(record.pid.into(), 4), (action, 8)]),
        false => fields.extend([(action & 0xffff_ffff, 4), (record.pid.into(), 4)]),
    }
    fields.extend([(record.device.into(), 4), (record.cpu.into(), 4)]);
    fields.extend([(record.error.into(), 2), (record.pdu.len() as u64, 2)]);
    for (value, len) in fields {
        let bytes = value.to_le_bytes();
        match big {
            true => out.extend(bytes[..len].iter().rev()),
            false => out.extend(&bytes[..len]),
        }
    }
    out.extend(if version_2 { &[0; 12][..] } else { &[] });
    out.extend(&record.pdu);
}

/// Replays a trace on a null device as fast as possible.
fn replayed(bytes: &[u8]) {
    let config = NullConfig { size: 64 << 20, ..NullConfig::default() };
    let device = Null::open(config).expect("the configuration is valid");
    let disk = Composed::new("d".to_owned(), "null", device, ChannelConfig::default());
    let wanted = Operations::new(bytes, Select::Queue).take_while(Result::is_ok).count() as u64;
    let all = Operations::new(bytes, Select::Queue);
    let options = ReplayOptions { speed: Speed::Max, queue_depth: 4, write: true };
    match replay(&disk, all, &options, &ReplayStop::new()) {
        Ok(view) => {
            assert_eq!((view.total().operations, view.is_stopped), (wanted, false));
            assert_eq!(view.errors.values().sum::<u64>(), view.total().errors);
        }
        Err(ReplayError::Format(error)) => assert_names_offset(&error),
        Err(error) => panic!("{error}"),
    }
}

/// Reads a trace; returns its number of events unless it is refused.
fn read(bytes: &[u8]) -> Option<usize> {
    let (mut reader, mut record) = (TraceReader::new(bytes), TraceRecord::default());
    let (mut events, mut tally) = (0, TraceTally::default());
    let whole = loop {
        match reader.read(&mut record) {
            Ok(true) => {
                events += 1;
                tally.add(&record);
            }
            Ok(false) => break Some(events),
            Err(error) => {
                assert_names_offset(&error);
                break None;
            }
        }
    };
    for select in [Select::Queue, Select::Issue] {
        for operation in Operations::new(bytes, select) {
            match operation {
                Ok(operation) => valid(&operation),
                Err(error) => {
                    assert_names_offset(&error);
                    break;
                }
            }
        }
    }
    whole
}

fn valid(operation: &TraceOperation) {
    let TraceOperation { op, sector, sectors, .. } = *operation;
    assert_eq!(op.has_range(), sectors > 0, "{operation:?}");
    assert!(sector.0 + sectors < 1 << 55, "{operation:?}");
    let mut printed = Vec::new();
    operation.record().print(&mut printed);
    let mut again = Operations::new(&printed[..], Select::Queue);
    let again = again.next().expect("it is one").expect("it is valid");
    let flags = if op.is_zone_mgmt() { again.flags } else { operation.flags };
    assert_eq!(again, TraceOperation { flags, ..*operation });
}

fn assert_names_offset(error: &TraceError) {
    let text = error.to_string();
    assert!(text.contains("offset "), "{text}");
    assert!(!text.contains(|letter: char| letter.is_control()), "{text:?}");
}
