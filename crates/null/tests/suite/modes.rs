//! Faults, completion modes and limits of the device, on a clock that moves only when a thread
//! waits.

use crate::common::Fixture;
use blockyard_core::clock::Clock;
use blockyard_core::zone::ZoneCond;
use blockyard_core::*;
use blockyard_null::{IrqMode, NullConfig};

fn memory() -> NullConfig {
    NullConfig { size: 4 << 20, memory_backed: true, ..NullConfig::default() }
}

#[test]
fn bad_blocks_fail_only_overlapping_requests() {
    let mut fixture = Fixture::new(NullConfig { badblocks: "+20-21".to_owned(), ..memory() });
    assert_eq!(fixture.write(0, 20, 1), Status::Ok);
    assert_eq!(fixture.write(16, 8, 2), Status::IoErr);
    assert!(fixture.holds(16, 4, 1), "nothing was written");
    assert_eq!(fixture.read(21, 1), Err(Status::IoErr));
    assert_eq!(fixture.write(22, 8, 3), Status::Ok);
    // Four adjacent writes merge into one request; only the one with the bad block may fail.
    let bios: Vec<Bio> =
        (0..4).map(|part| Bio::write(Sector(8 + part * 8), 8, fixture.buf(part * 4096))).collect();
    let statuses: Vec<Status> = fixture.all(&bios).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::IoErr, Status::Ok, Status::Ok]);
    fixture.inject("badblocks_partial_io", "1").unwrap();
    assert_eq!(fixture.write(16, 8, 2), Status::IoErr);
    assert!(fixture.holds(16, 4, 2), "what lies before was written");
    fixture.inject("badblocks_once", "1").unwrap();
    assert_eq!(fixture.write(16, 8, 4), Status::IoErr);
    assert_eq!(fixture.write(16, 8, 4), Status::Ok);
    assert!(fixture.inject("badblocks", "20-21").is_err());
}

#[test]
fn partial_writes_move_the_write_pointer_and_leave_the_zone_open() {
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, zone_max_open: 1, ..memory() };
    let mut fixture = Fixture::new(NullConfig { badblocks_partial_io: true, ..zoned });
    fixture.inject("badblocks", "+20-21").unwrap();
    assert_eq!(fixture.write(0, 16, 1), Status::Ok);
    assert_eq!(fixture.append(0, 16, 2).status, Status::IoErr);
    assert_eq!((fixture.zone(0).wp, fixture.cond(0)), (Sector(20), ZoneCond::ImplicitOpen));
    assert!(fixture.holds(16, 4, 2));
    fixture.inject("badblocks", "-0-100").unwrap();
    let done = fixture.append(0, 16, 3);
    assert_eq!((done.status, done.sector), (Status::Ok, Sector(20)));
    // A zone that a failed write opened keeps its open resource until it is closed to make room.
    fixture.inject("badblocks", "+2048-2048").unwrap();
    assert_eq!(fixture.write(2048, 8, 1), Status::IoErr);
    assert_eq!((fixture.cond(0), fixture.cond(2048)), (ZoneCond::Closed, ZoneCond::ImplicitOpen));
    assert_eq!(fixture.write(4096, 8, 1), Status::Ok);
    assert_eq!(fixture.cond(2048), ZoneCond::Empty);
}

#[test]
fn merged_writes_past_capacity_fail_only_beyond_it() {
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, zone_capacity: 16 << 10, ..memory() };
    let mut fixture = Fixture::new(zoned);
    let bios: Vec<Bio> =
        (0..5).map(|part| Bio::write(Sector(part * 8), 8, fixture.buf(0))).collect();
    let statuses: Vec<Status> = fixture.all(&bios).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::Ok, Status::Ok, Status::Ok, Status::IoErr]);
    assert_eq!((fixture.cond(0), fixture.zone(0).wp), (ZoneCond::Full, Sector(32)));
}

#[test]
fn timed_out_request_has_no_effect() {
    let attr = "1,100,1,1".parse().unwrap();
    let mut fixture = Fixture::new(NullConfig { timeout: Some(attr), ..memory() });
    assert_eq!(fixture.write(0, 8, 1), Status::Ok, "space lets one pass");
    assert_eq!(fixture.clock.now(), Nanos(0));
    assert_eq!(fixture.write(0, 8, 2), Status::Timeout);
    assert_eq!(fixture.clock.now(), Nanos(5_000_000_000));
    assert!(fixture.holds(0, 8, 1));
    fixture.inject("timeout", "2,100,0,-1").unwrap();
    let statuses: Vec<Status> = (0..4).map(|_| fixture.op(Op::Read, 0, 8)).collect();
    assert_eq!(statuses, [Status::Ok, Status::Timeout, Status::Ok, Status::Timeout]);
    fixture.inject("timeout", "").unwrap();
    assert_eq!(fixture.op(Op::Read, 0, 8), Status::Ok);
    assert!(fixture.inject("timeout", "1,2,3").is_err());
}

#[test]
fn requeues_keep_the_order() {
    let attr = "1,50,0,200".parse().unwrap();
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, requeue: Some(attr), ..memory() };
    let mut fixture = Fixture::new(zoned);
    for part in 0..32 {
        let bios: Vec<Bio> = (0..8)
            .map(|index| {
                let sector = Sector(part * 64 + index * 8);
                Bio::write(sector, 8, fixture.buf(0)).with_flags(Flags::NOMERGE)
            })
            .collect();
        assert!(fixture.all(&bios).iter().all(|done| done.status.is_ok()), "part {part}");
    }
    assert_eq!((fixture.cond(0), fixture.zone(0).wp), (ZoneCond::Full, Sector(2048)));
}

#[test]
fn completion_modes() {
    let mut fixture = Fixture::new(NullConfig { irqmode: IrqMode::Softirq, ..memory() });
    assert_eq!(fixture.write(0, 8, 1), Status::Ok);
    assert_eq!(fixture.clock.now(), Nanos(0));

    let timer = NullConfig { irqmode: IrqMode::Timer, completion_nsec: 700, ..memory() };
    let mut fixture = Fixture::new(NullConfig { hw_queue_depth: 4, ..timer.clone() });
    assert_eq!(fixture.channel.due(), Due::Never);
    let buf = fixture.buf(0);
    let bios: Vec<Bio> = (0..16).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    assert!(fixture.all(&bios).iter().all(|done| done.status.is_ok()));
    assert_eq!(fixture.clock.now(), Nanos(4 * 700), "four at a time");
}

/// A shared hardware queue with as many channels as tags: each channel gets one, whatever the first
/// one requests.
#[test]
fn channels_of_a_hardware_queue_share_its_tags() {
    let config = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 700,
        submit_queues: Some(1),
        hw_queue_depth: 2,
        ..memory()
    };
    let mut fixture = Fixture::new(config);
    let mut other = fixture.another();
    let buf = fixture.buf(0);
    let bios: Vec<Bio> = (0..8).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    for fixture in [&mut other, &mut fixture] {
        assert_eq!(fixture.channel.push(&bios), 8);
        fixture.channel.submit();
        let mut out = Vec::new();
        assert_eq!(fixture.channel.reap(&mut out), 0);
        assert_eq!(fixture.channel.due(), Due::At(Nanos(700)));
    }
    // Only the second channel continues: it gets no more than its share while the first holds its
    // own.
    let mut out = Vec::new();
    while out.len() < 8 {
        fixture.channel.wait(None);
        fixture.channel.reap(&mut out);
    }
    assert_eq!(fixture.clock.now(), Nanos(8 * 700), "one at a time");
    drop(fixture);
    let before = other.clock.now();
    let mut out = Vec::new();
    while out.len() < 8 {
        other.channel.wait(None);
        other.channel.reap(&mut out);
    }
    // One request completed long ago, and both tags now belong to this channel: seven requests, two
    // at a time.
    assert_eq!(other.clock.now().since(before), 4 * 700);
}

/// A channel whose own request takes an hour still asks for tags that other channels return.
#[test]
fn long_request_does_not_block_tag_requests() {
    let config = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 3_600_000_000_000,
        submit_queues: Some(1),
        hw_queue_depth: 4,
        ..memory()
    };
    let mut fixture = Fixture::new(config);
    let buf = fixture.buf(0);
    let bios: Vec<Bio> = (0..4).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    assert_eq!(fixture.channel.push(&bios[..3]), 3);
    fixture.channel.submit();
    let mut out = Vec::new();
    assert_eq!(fixture.channel.reap(&mut out), 0);
    let mut other = fixture.another();
    assert_eq!(other.channel.push(&bios), 4);
    other.channel.submit();
    assert_eq!(other.channel.reap(&mut out), 0);
    assert_eq!(other.channel.due(), Due::At(Nanos(50_000)), "one is started, three wait");
}

/// A channel that has its share of tags waits for its own completions and for a larger share.
/// Regression: it asked every 50 microseconds for tags that it could not get.
#[test]
fn channel_at_its_tag_share_waits_for_its_own_requests() {
    let hour = 3_600_000_000_000;
    for (completion_nsec, due, end) in
        [(1_000_000, 1_000_000, 2_000_000), (hour, 10_000_000, hour + 10_000_000)]
    {
        let config = NullConfig {
            irqmode: IrqMode::Timer,
            completion_nsec,
            submit_queues: Some(1),
            hw_queue_depth: 4,
            ..memory()
        };
        let mut fixture = Fixture::new(config);
        let other = fixture.another();
        let buf = fixture.buf(0);
        let bios: Vec<Bio> = (0..4).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
        assert_eq!(fixture.channel.push(&bios), 4);
        fixture.channel.submit();
        let mut out = Vec::new();
        assert_eq!(fixture.channel.reap(&mut out), 0);
        assert_eq!(fixture.channel.due(), Due::At(Nanos(due)), "two are started, two wait");
        drop(other);
        while out.len() < 4 {
            fixture.channel.wait(None);
            fixture.channel.reap(&mut out);
        }
        assert_eq!(fixture.clock.now(), Nanos(end));
    }
}

#[test]
fn channel_drop_ends_with_requeued_and_late_requests() {
    let requeue = Some("1,100,0,-1".parse().unwrap());
    let late = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 3_600_000_000_000,
        submit_queues: Some(1),
        ..memory()
    };
    for config in [NullConfig { requeue, ..memory() }, late.clone(), NullConfig { requeue, ..late }]
    {
        let mut fixture = Fixture::new(config);
        let buf = fixture.buf(0);
        let bios: Vec<Bio> = (0..8).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
        assert_eq!(fixture.channel.push(&bios), 8);
        fixture.channel.submit();
        let mut out = Vec::new();
        assert_eq!(fixture.channel.reap(&mut out), 0);
        if requeue.is_some() {
            assert_ne!(fixture.channel.due(), Due::Never);
        }
        let clock = fixture.clock.clone();
        drop(fixture);
        assert_eq!(clock.now(), Nanos(0), "the close does not wait for it");
    }
}

#[test]
fn requeued_request_waits_for_requeue_delay() {
    let mut fixture =
        Fixture::new(NullConfig { requeue: Some("1,100,0,3".parse().unwrap()), ..memory() });
    assert_eq!(fixture.write(0, 8, 1), Status::Ok);
    assert_eq!(fixture.clock.now(), Nanos(3_000_000), "three times a millisecond");
}

/// A request that waits for bandwidth is checked for faults only once, when it passes.
#[test]
fn throttled_requests_hit_a_fault_once() {
    let config = NullConfig { mbps: 1, timeout: Some("2,100,0,-1".parse().unwrap()), ..memory() };
    let mut fixture = Fixture::new(NullConfig { request_timeout_ms: 1, ..config });
    let statuses: Vec<Status> = (0..8).map(|_| fixture.op(Op::Write, 0, 512)).collect();
    use Status::{Ok, Timeout};
    assert_eq!(statuses, [Ok, Timeout, Ok, Timeout, Ok, Timeout, Ok, Timeout]);
}

#[test]
fn a_shared_queue_without_delay_does_not_wait() {
    let shared = NullConfig { submit_queues: Some(1), hw_queue_depth: 2, ..memory() };
    let mut fixture = Fixture::new(shared);
    let buf = fixture.buf(0);
    let bios: Vec<Bio> = (0..64).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    assert!(fixture.all(&bios).iter().all(|done| done.status.is_ok()));
    assert_eq!(fixture.clock.now(), Nanos(0));
}

#[test]
fn bandwidth_is_limited_over_all_channels() {
    let mut fixture = Fixture::new(NullConfig { mbps: 1, max_sectors: 64, ..memory() });
    let mut other = fixture.another();
    for round in 0..16 {
        let fixture = if round % 2 == 0 { &mut fixture } else { &mut other };
        assert_eq!(fixture.op(Op::Write, 0, 512), Status::Ok);
    }
    // 4 MiB at 1 MiB/s. The first tick's quota is available at once, and the last request overdraws
    // it.
    let seconds = fixture.clock.now().0 as f64 / 1e9;
    assert!((3.9..=4.0).contains(&seconds), "{seconds}");
}
