//! Devices that wrap a device: delays, faults and traces.

use std::sync::{Arc, Mutex};

use blockyard_core::clock::Clock;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::{Delayed, Faulty, Trace, Traced};
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
    Rule { op, start: Sector(start), sectors, status: Status::Medium, chance: 1, times: None }
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

/// A writer whose bytes the test can read.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_trace_has_a_line_for_each_request_issued_and_completed() {
    let sink = Shared::default();
    let trace = Trace::new(Box::new(sink.clone()));
    let disk = composed(Traced::new(Recorder::cached(false), trace));
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    fixture.run(&[Bio::write(Sector(8), 8, buf).with_flags(Flags::FUA)]);
    fixture.run(&[Bio::read(Sector(0), 16, buf)]);
    drop(fixture);
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    let events: Vec<(String, String)> = text
        .lines()
        .map(|line| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            (columns[5].to_owned(), columns[6..].join(" "))
        })
        .collect();
    let expected = [
        ("D", "W 8 + 8 [tag 0]"),
        ("C", "W [tag 0] OK"),
        ("D", "F 0 + 0 [tag 0]"),
        ("C", "F [tag 0] OK"),
        ("D", "R 0 + 16 [tag 0]"),
        ("C", "R [tag 0] OK"),
    ];
    assert_eq!(events, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}
