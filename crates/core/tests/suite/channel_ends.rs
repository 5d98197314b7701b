//! The resources and counters of a channel, tags, regions and statistics, and its drop.

use std::sync::Arc;

use blockyard_core::channel::{ChannelConfig, Stats};
use blockyard_core::clock::Clock;
use blockyard_core::middleware::Delayed;
use blockyard_core::*;

use crate::common::*;

#[test]
fn full_channel_accepts_fewer_bios_and_region_in_use_stays() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let disk = composed_of(recorder, 8, Still::default());
    let mut fixture = Fixture::new(&disk);
    let bios: Vec<Bio> = (0..12).map(|n| Bio::read(Sector(n * 16), 8, fixture.buf(0))).collect();
    assert_eq!(fixture.channel.push(&bios), 8);
    fixture.channel.submit();
    assert_eq!(fixture.channel.push(&bios), 0);
    assert!(!fixture.channel.unregister(fixture.id));
    let mut done = Vec::new();
    assert_eq!(fixture.channel.reap(&mut done), 8);
    assert_eq!(fixture.channel.due(), Due::Never);
    assert!(fixture.channel.unregister(fixture.id));
    assert!(!fixture.channel.unregister(fixture.id));
    assert_eq!(fixture.channel.push(&bios), 8);
    fixture.channel.submit();
    assert_eq!(fixture.channel.reap(&mut done), 8);
    assert!(done[8..].iter().all(|end| end.status == Status::Inval));
}

#[test]
fn statistics_outlive_their_channel() {
    let disk = composed(Recorder::new());
    let count = |stats: &Stats| (stats.op(Op::Read).ops, stats.op(Op::Read).sectors);
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    fixture.run(&[Bio::read(Sector(0), 8, buf), Bio::read(Sector(64), 16, buf)]);
    assert_eq!(count(&disk.stats()), (2, 24));
    assert_eq!(disk.stats().channels, 1);
    drop(fixture);
    assert_eq!(count(&disk.stats()), (2, 24));
    assert_eq!(disk.stats().channels, 0);
    assert_eq!(disk.stats().read_latency.iter().sum::<u64>(), 2);
}

#[test]
fn dropped_channel_completes_started_requests() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let bios: Vec<Bio> = (0..20).map(|n| Bio::read(Sector(n * 16), 8, fixture.buf(0))).collect();
    assert_eq!(fixture.channel.push(&bios), 20);
    fixture.channel.submit();
    drop(fixture);
    assert_eq!(log_of(&log).len(), 16, "as many as there are tags");
}

/// Regression: a request that was put back forever, or that a device had lost, once kept its
/// channel from closing. The drop waited for all submitted requests, however long they took.
#[test]
fn channel_drop_ends_with_any_device() {
    struct Endless(usize);
    impl DeviceQueue for Endless {
        fn start(&mut self, _now: Nanos, batch: &mut Batch, _done: &mut CompletionBatch) {
            // Keeps one request without ever completing it, and puts all others back.
            if self.0 == 0
                && let Some(started) = batch.next()
            {
                std::mem::forget(started);
                self.0 = 1;
            }
        }
        fn poll(&mut self, _now: Nanos, _done: &mut CompletionBatch) {}
        fn room(&self) -> usize {
            4
        }
        fn due(&self) -> Due {
            Due::Never
        }
    }
    let recorder = Recorder::new();
    let mut stack = channel::Stack::new(
        ChannelConfig::default(),
        &recorder.geometry,
        &recorder.limits,
        Endless(0),
        Still::default(),
        channel::ChannelStats::new(),
    );
    let id = stack.register(Region::alloc(4096));
    let buf = BufRef { region: id, offset: 0 };
    let bios = [0, 16, 32].map(|at| Bio::read(Sector(at), 8, buf));
    assert_eq!(stack.push(&bios), 3);
    stack.submit();
    drop(stack);

    let clock = Still::default();
    let disk = composed_of(Delayed::new(Recorder::new(), u64::MAX / 2), 64, clock.clone());
    let mut fixture = Fixture::new(&disk);
    assert_eq!(fixture.channel.push(&[Bio::read(Sector(0), 8, fixture.buf(0))]), 1);
    fixture.channel.submit();
    drop(fixture);
    // The later parts of a flush sequence are not started either.
    let disk = composed_of(Delayed::new(Recorder::cached(false), 1 << 60), 64, clock.clone());
    let mut fixture = Fixture::new(&disk);
    let write = Bio::write(Sector(0), 8, fixture.buf(0)).with_flags(Flags::PREFLUSH | Flags::FUA);
    assert_eq!(fixture.channel.push(&[write]), 1);
    fixture.channel.submit();
    drop(fixture);
    assert_eq!(clock.now(), Nanos(0), "the thread slept until the completion was due");
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "request dropped without a completion")]
fn dropped_started_request_panics() {
    struct Forgetful;
    impl DeviceQueue for Forgetful {
        fn start(&mut self, _now: Nanos, batch: &mut Batch, _done: &mut CompletionBatch) {
            drop(batch.next());
        }
        fn poll(&mut self, _now: Nanos, _done: &mut CompletionBatch) {}
        fn room(&self) -> usize {
            1
        }
        fn due(&self) -> Due {
            Due::Never
        }
    }
    let recorder = Recorder::new();
    let mut stack = channel::Stack::new(
        ChannelConfig::default(),
        &recorder.geometry,
        &recorder.limits,
        Forgetful,
        Still::default(),
        channel::ChannelStats::new(),
    );
    let id = stack.register(Region::alloc(4096));
    stack.push(&[Bio::read(Sector(0), 8, BufRef { region: id, offset: 0 })]);
    stack.submit();
}
