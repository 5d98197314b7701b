//! Devices that wrap a device: delays, faults and traces.

use std::sync::Arc;

use blockyard_core::clock::Clock;
use blockyard_core::inject::{Injection, Latency, Rule};
use blockyard_core::middleware::{
    Delayed, Faulty, InjectedFaults, LostEvents, Recording, TraceEvent, TraceKind, TraceSource,
};
use blockyard_core::*;

use crate::common::*;

#[test]
fn delayed_completions_come_when_due() {
    let clock = Still::default();
    let disk = composed_of(Delayed::new(Recorder::new(), 1_000_000), 64, clock.clone());
    let mut fixture = Fixture::new(&disk);
    assert_eq!(fixture.channel.push(&[Bio::read(Sector(0), 8, fixture.buf(0))]), 1);
    fixture.channel.submit();
    let mut done = Vec::new();
    assert_eq!(fixture.channel.reap(&mut done), 0);
    assert_eq!(fixture.channel.due(), Due::At(Nanos(1_000_000)));
    clock.sleep_until(Nanos(999_999));
    assert_eq!(fixture.channel.reap(&mut done), 0);
    fixture.channel.wait(None);
    assert_eq!(fixture.channel.reap(&mut done), 1);
    assert_eq!(clock.now(), Nanos(1_000_000));
    assert_eq!(fixture.channel.due(), Due::Never);
}

fn rule(op: Option<Op>, start: u64, sectors: u64) -> Rule {
    Rule { op, start: Sector(start), sectors, ..Rule::new(Status::Medium) }
}

#[test]
fn injected_fault_fails_only_matching_bios() {
    let recorder = Recorder::new();
    let log = Arc::clone(&recorder.log);
    let disk = composed(Faulty::new(recorder, 1));
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    let once = Rule { times: Some(1), ..rule(Some(Op::Write), 8, 8) };
    disk.inject(&Injection::AddRule(once)).unwrap();
    let bios: Vec<Bio> = (0..3).map(|n| Bio::write(Sector(n * 8), 8, buf)).collect();
    assert_eq!(fixture.statuses(&bios), [Status::Ok, Status::Medium, Status::Ok]);
    assert_eq!(disk.device().strikes(), [1]);
    let starts: Vec<u64> = log_of(&log).iter().map(|entry| entry.1).collect();
    assert_eq!(starts, [0, 16], "the failed one never came to the device");
    assert_eq!(fixture.statuses(&bios), [Status::Ok; 3], "once means once");
    // The newest rule wins, and a rule for reads does not affect writes.
    disk.inject(&Injection::AddRule(rule(None, 0, SECTORS))).unwrap();
    let newest = Rule { status: Status::NoSpc, ..rule(Some(Op::Read), 0, 1) };
    disk.inject(&Injection::AddRule(newest)).unwrap();
    let mixed = [Bio::read(Sector(0), 8, buf), Bio::write(Sector(0), 8, buf)];
    assert_eq!(fixture.statuses(&mixed), [Status::NoSpc, Status::Medium]);
    disk.inject(&Injection::RemoveRules).unwrap();
    assert_eq!(fixture.statuses(&mixed), [Status::Ok; 2]);
    let unknown = Injection::Device { name: "fire".into(), value: "1".into() };
    assert!(disk.inject(&unknown).unwrap_err().to_string().contains("`fire`"));
}

fn latency(op: Op, ns: u64) -> Rule {
    Rule { op: Some(op), latency: Some(Latency::Fixed { ns }), ..Rule::new(Status::Ok) }
}

/// Completions are delayed by rules that come and go while requests are in flight, and no request
/// waits before the device.
#[test]
fn latency_delays_completions_and_not_requests() {
    for late in [false, true] {
        let clock = Still::default();
        let mut recorder = Recorder::new();
        recorder.late = late;
        let log = Arc::clone(&recorder.log);
        let disk = composed_of(Faulty::new(recorder, 1), 64, clock.clone());
        let injector = disk.fault_injector().unwrap();
        let mut fixture = Fixture::new(&disk);
        let buf = fixture.buf(0);
        let id = injector.add(latency(Op::Read, 1_000)).unwrap();
        let bios = [Bio::read(Sector(0), 8, buf), Bio::write(Sector(64), 8, buf)];
        assert_eq!(fixture.channel.push(&bios), 2);
        fixture.channel.submit();
        assert_eq!(log_of(&log).len(), 2, "both reach the device at once");
        let mut done = Vec::new();
        fixture.channel.reap(&mut done);
        assert_eq!(done.len(), 1, "the write is not delayed");
        assert_eq!(fixture.channel.due(), Due::At(Nanos(1_000)));
        // The newest rule wins; the request in flight keeps its delay.
        injector.add(latency(Op::Read, 50)).unwrap();
        assert_eq!(fixture.channel.push(&bios[..1]), 1);
        fixture.channel.submit();
        fixture.channel.reap(&mut done);
        assert_eq!(fixture.channel.due(), Due::At(Nanos(50)));
        fixture.channel.wait(None);
        assert_eq!((fixture.channel.reap(&mut done), clock.now()), (1, Nanos(50)));
        assert_eq!(injector.remove(id).map(|it| (it.matched, it.applied)), Some((1, 1)));
        assert_eq!(injector.remove(id), None);
        assert_eq!(injector.remove_all(), 1);
        let mut other = Fixture::new(&disk);
        assert_eq!(other.statuses(&bios[..1]), [Status::Ok]);
        assert_eq!(clock.now(), Nanos(50), "no rule delays this one");
        fixture.channel.wait(None);
        assert_eq!((fixture.channel.reap(&mut done), clock.now()), (1, Nanos(1_000)));
        assert_eq!(fixture.channel.due(), Due::Never);
        assert_eq!(injector.injected(), InjectedFaults { failed: 0, delayed: 2 });
        // A rule with both delays the failure, and a channel that is dropped waits for nothing.
        injector.add(Rule { status: Status::Timeout, ..latency(Op::Read, 1_000_000) }).unwrap();
        assert_eq!(fixture.statuses(&bios[..1]), [Status::Timeout]);
        assert_eq!(clock.now(), Nanos(1_001_000));
        injector.add(latency(Op::Write, 1_000_000)).unwrap();
        assert_eq!(fixture.channel.push(&bios[1..]), 1);
        fixture.channel.submit();
        drop(fixture);
        assert_eq!(clock.now(), Nanos(1_001_000));
    }
}

const SOURCE: TraceSource = TraceSource { thread_id: || 7, now: || Nanos(0) };

/// Drains all rings of a recording.
fn drain(recording: &Recording, events: &mut Vec<TraceEvent>, lost: &mut Vec<LostEvents>) {
    let mut position = Some(0);
    while let Some(at) = position {
        position = recording.recorder().drain(at, events, lost);
    }
}

/// The events that were recorded, as letters, operation, sector and length.
fn recorded(recording: &Recording) -> Vec<(TraceKind, Op, u64, u64)> {
    let (mut events, mut lost) = (Vec::new(), Vec::new());
    drain(recording, &mut events, &mut lost);
    assert_eq!(lost, []);
    let of = |event: &TraceEvent| (event.kind, event.op, event.sector.0, event.sectors);
    events.iter().map(of).collect()
}

#[test]
fn recorder_sees_bios_and_requests() {
    use TraceKind::{Complete, GetRequest, Issue, Merge, Queue};
    let disk = composed(Faulty::new(Recorder::cached(false), 1));
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    let flush = Bio::write(Sector(8), 8, buf).with_flags(Flags::FUA);
    fixture.run(&[flush]);
    let point = disk.trace_point().expect("the fault injector has one");
    let recording = point.record(SOURCE).unwrap();
    assert!(point.record(SOURCE).is_none(), "a device has one recorder");
    fixture.run(&[Bio::read(Sector(0), 8, buf), Bio::read(Sector(8), 8, buf)]);
    let merged = [
        (Queue, Op::Read, 0, 8),
        (GetRequest, Op::Read, 0, 8),
        (Queue, Op::Read, 8, 8),
        (Merge, Op::Read, 8, 8),
        (Issue, Op::Read, 0, 16),
        (Complete, Op::Read, 0, 16),
    ];
    assert_eq!(recorded(&recording), merged);
    // FUA on a device without it is a write and then a flush; the bio was queued once.
    fixture.run(&[flush]);
    let sequence = [
        (Queue, Op::Write, 8, 8),
        (GetRequest, Op::Write, 8, 8),
        (Issue, Op::Write, 8, 8),
        (Complete, Op::Write, 8, 8),
        (Issue, Op::Flush, 0, 0),
        (Complete, Op::Flush, 0, 0),
    ];
    assert_eq!(recorded(&recording), sequence);
    // A request that a rule fails never reaches the device.
    disk.inject(&Injection::AddRule(rule(Some(Op::Read), 0, 8))).unwrap();
    fixture.statuses(&[Bio::read(Sector(0), 8, buf)]);
    let failed =
        [(Queue, Op::Read, 0, 8), (GetRequest, Op::Read, 0, 8), (Complete, Op::Read, 0, 8)];
    assert_eq!(recorded(&recording), failed);
    disk.inject(&Injection::RemoveRules).unwrap();
    drop(recording);
    fixture.run(&[flush]);
    let recording = point.record(SOURCE).expect("the other one has ended");
    assert_eq!(recorded(&recording), []);
}

#[test]
fn recorder_sees_split_bios_whole_and_in_parts() {
    use TraceKind::{Complete, GetRequest, Issue, Queue, Split};
    for flags in [Flags::NONE, Flags::PREFLUSH] {
        let disk = composed(Faulty::new(Recorder::cached(true), 1));
        let mut fixture = Fixture::new(&disk);
        let recording = disk.trace_point().unwrap().record(SOURCE).unwrap();
        let max = disk.limits().sectors_max;
        fixture.run(&[Bio::write(Sector(0), max + 8, fixture.buf(0)).with_flags(flags)]);
        let events = recorded(&recording);
        let of = |kind| -> Vec<(Op, u64, u64)> {
            let of_kind = events.iter().filter(|event| event.0 == kind);
            of_kind.map(|event| (event.1, event.2, event.3)).collect()
        };
        assert_eq!(of(Queue), [(Op::Write, 0, max + 8)], "{flags:?}");
        assert_eq!(of(Split), [(Op::Write, 0, max)], "{flags:?}");
        let pieces = [(Op::Write, 0, max), (Op::Write, max, 8)];
        let has_flush = flags == Flags::PREFLUSH;
        let flush = if has_flush { &[(Op::Flush, 0, 0)][..] } else { &[] };
        assert_eq!(of(Issue), [flush, &pieces].concat(), "{flags:?}");
        assert_eq!(of(Complete), [flush, &pieces].concat(), "{flags:?}");
        let whole = if has_flush { &[(Op::Write, 0, max + 8)][..] } else { &[] };
        assert_eq!(of(GetRequest), [whole, &pieces].concat(), "{flags:?}");
    }
}

/// The rings of a recorder that no writer drains are full at last; the I/O continues.
/// The bug: a trace whose writer waited for its reader stayed attached after its stop, and the
/// device could not be traced again. An idle queue kept the rings of all others.
#[test]
fn a_stopped_trace_makes_way_for_the_next_one() {
    let disk = composed(Faulty::new(Recorder::new(), 1));
    let (mut active, mut idle) = (Fixture::new(&disk), Fixture::new(&disk));
    let point = disk.trace_point().unwrap();
    let first = point.record(SOURCE).unwrap();
    let buf = idle.buf(0);
    idle.run(&[Bio::read(Sector(0), 8, buf)]);
    let buf = active.buf(0);
    active.run(&[Bio::read(Sector(0), 8, buf)]);
    assert!(point.record(SOURCE).is_none());
    assert!(point.stop() && !point.stop());
    assert!(first.recorder().is_stopped());
    let second = point.record(SOURCE).unwrap();
    active.run(&[Bio::read(Sector(64), 8, buf)]);
    // The writer of the first trace ends after the second has begun.
    assert_eq!(recorded(&first).len(), 8);
    let recorder = Arc::clone(first.recorder());
    drop(first);
    assert_eq!(recorder.drain(0, &mut Vec::new(), &mut Vec::new()), None, "its rings are freed");
    assert!(point.recorder().is_some());
    active.run(&[Bio::read(Sector(64), 8, buf)]);
    assert_eq!(recorded(&second).len(), 8);
}

#[test]
fn events_that_do_not_fit_are_lost_and_counted() {
    let disk = composed(Faulty::new(Recorder::new(), 1));
    let mut fixture = Fixture::new(&disk);
    let recording = disk.trace_point().unwrap().record(SOURCE).unwrap();
    let buf = fixture.buf(0);
    let reads = 3_000;
    for _ in 0..reads {
        fixture.run(&[Bio::read(Sector(0), 8, buf)]);
    }
    let (mut events, mut lost) = (Vec::new(), Vec::new());
    drain(&recording, &mut events, &mut lost);
    let counted: u64 = lost.iter().map(|lost| lost.count).sum();
    assert_eq!(events.len() as u64 + counted, 4 * reads);
    assert!(counted > 0 && events.len() >= 8192, "{counted} lost");
    let (mut events, mut lost) = (Vec::new(), Vec::new());
    fixture.run(&[Bio::read(Sector(0), 8, buf)]);
    drain(&recording, &mut events, &mut lost);
    assert_eq!((events.len(), lost.len()), (4, 0));
}
