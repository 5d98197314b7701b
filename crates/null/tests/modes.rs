//! Faults, completion modes and limits of the device, on a clock that moves only when a thread
//! waits.
#![allow(clippy::disallowed_types, clippy::unwrap_used)]

mod common;

use blockyard_core::clock::Clock;
use blockyard_core::zone::ZoneCond;
use blockyard_core::*;
use blockyard_null::{IrqMode, NullConfig};
use common::Rig;

fn memory() -> NullConfig {
    NullConfig { size: 4 << 20, memory_backed: true, ..NullConfig::default() }
}

#[test]
fn bad_blocks_fail_what_touches_them_and_nothing_else() {
    let mut rig = Rig::new(NullConfig { badblocks: "+20-21".to_owned(), ..memory() });
    assert_eq!(rig.write(0, 20, 1), Status::Ok);
    assert_eq!(rig.write(16, 8, 2), Status::IoErr);
    assert!(rig.holds(16, 4, 1), "nothing was written");
    assert_eq!(rig.read(21, 1), Err(Status::IoErr));
    assert_eq!(rig.write(22, 8, 3), Status::Ok);
    // Four adjacent writes merge into one request; only the one with the bad block may fail.
    let bios: Vec<Bio> =
        (0..4).map(|part| Bio::write(Sector(8 + part * 8), 8, rig.buf(part * 4096))).collect();
    let statuses: Vec<Status> = rig.all(&bios).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::IoErr, Status::Ok, Status::Ok]);
    rig.inject("badblocks_partial_io", "1").unwrap();
    assert_eq!(rig.write(16, 8, 2), Status::IoErr);
    assert!(rig.holds(16, 4, 2), "what lies before was written");
    rig.inject("badblocks_once", "1").unwrap();
    assert_eq!(rig.write(16, 8, 4), Status::IoErr);
    assert_eq!(rig.write(16, 8, 4), Status::Ok);
    assert!(rig.inject("badblocks", "20-21").is_err());
}

#[test]
fn partial_writes_move_the_write_pointer_and_leave_the_zone_open() {
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, zone_max_open: 1, ..memory() };
    let mut rig = Rig::new(NullConfig { badblocks_partial_io: true, ..zoned });
    rig.inject("badblocks", "+20-21").unwrap();
    assert_eq!(rig.write(0, 16, 1), Status::Ok);
    assert_eq!(rig.append(0, 16, 2).status, Status::IoErr);
    assert_eq!((rig.zone(0).wp, rig.cond(0)), (Sector(20), ZoneCond::ImplicitOpen));
    assert!(rig.holds(16, 4, 2));
    rig.inject("badblocks", "-0-100").unwrap();
    let done = rig.append(0, 16, 3);
    assert_eq!((done.status, done.sector), (Status::Ok, Sector(20)));
    // A zone that a failed write opened keeps its open resource until it is closed to make room.
    rig.inject("badblocks", "+2048-2048").unwrap();
    assert_eq!(rig.write(2048, 8, 1), Status::IoErr);
    assert_eq!((rig.cond(0), rig.cond(2048)), (ZoneCond::Closed, ZoneCond::ImplicitOpen));
    assert_eq!(rig.write(4096, 8, 1), Status::Ok);
    assert_eq!(rig.cond(2048), ZoneCond::Empty);
}

#[test]
fn merged_writes_past_capacity_fail_only_where_they_must() {
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, zone_capacity: 16 << 10, ..memory() };
    let mut rig = Rig::new(zoned);
    let bios: Vec<Bio> = (0..5).map(|part| Bio::write(Sector(part * 8), 8, rig.buf(0))).collect();
    let statuses: Vec<Status> = rig.all(&bios).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::Ok, Status::Ok, Status::Ok, Status::IoErr]);
    assert_eq!((rig.cond(0), rig.zone(0).wp), (ZoneCond::Full, Sector(32)));
}

#[test]
fn timeouts_take_their_time_and_have_no_effect() {
    let attr = "1,100,1,1".parse().unwrap();
    let mut rig = Rig::new(NullConfig { timeout: Some(attr), ..memory() });
    assert_eq!(rig.write(0, 8, 1), Status::Ok, "space lets one pass");
    assert_eq!(rig.clock.now(), Nanos(0));
    assert_eq!(rig.write(0, 8, 2), Status::Timeout);
    assert_eq!(rig.clock.now(), Nanos(5_000_000_000));
    assert!(rig.holds(0, 8, 1));
    rig.inject("timeout", "2,100,0,-1").unwrap();
    let statuses: Vec<Status> = (0..4).map(|_| rig.op(Op::Read, 0, 8)).collect();
    assert_eq!(statuses, [Status::Ok, Status::Timeout, Status::Ok, Status::Timeout]);
    rig.inject("timeout", "").unwrap();
    assert_eq!(rig.op(Op::Read, 0, 8), Status::Ok);
    assert!(rig.inject("timeout", "1,2,3").is_err());
}

#[test]
fn requeues_keep_the_order() {
    let attr = "1,50,0,200".parse().unwrap();
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, requeue: Some(attr), ..memory() };
    let mut rig = Rig::new(zoned);
    for part in 0..32 {
        let bios: Vec<Bio> = (0..8)
            .map(|index| {
                let sector = Sector(part * 64 + index * 8);
                Bio::write(sector, 8, rig.buf(0)).with_flags(Flags::NOMERGE)
            })
            .collect();
        assert!(rig.all(&bios).iter().all(|done| done.status.is_ok()), "part {part}");
    }
    assert_eq!((rig.cond(0), rig.zone(0).wp), (ZoneCond::Full, Sector(2048)));
}

#[test]
fn completion_modes() {
    let mut rig = Rig::new(NullConfig { irqmode: IrqMode::Softirq, ..memory() });
    assert_eq!(rig.write(0, 8, 1), Status::Ok);
    assert_eq!(rig.clock.now(), Nanos(0));

    let timer = NullConfig { irqmode: IrqMode::Timer, completion_nsec: 700, ..memory() };
    let mut rig = Rig::new(NullConfig { hw_queue_depth: 4, ..timer.clone() });
    assert_eq!(rig.channel.due(), Due::Never);
    let buf = rig.buf(0);
    let bios: Vec<Bio> = (0..16).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    assert!(rig.all(&bios).iter().all(|done| done.status.is_ok()));
    assert_eq!(rig.clock.now(), Nanos(4 * 700), "four at a time");
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
    let mut rig = Rig::new(config);
    let mut other = rig.another();
    let buf = rig.buf(0);
    let bios: Vec<Bio> = (0..8).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    for rig in [&mut other, &mut rig] {
        assert_eq!(rig.channel.push(&bios), 8);
        rig.channel.submit();
        let mut out = Vec::new();
        assert_eq!(rig.channel.reap(&mut out), 0);
        assert_eq!(rig.channel.due(), Due::At(Nanos(700)));
    }
    // Only the second channel continues: it gets no more than its share while the first holds its
    // own.
    let mut out = Vec::new();
    while out.len() < 8 {
        rig.channel.wait(None);
        rig.channel.reap(&mut out);
    }
    assert_eq!(rig.clock.now(), Nanos(8 * 700), "one at a time");
    drop(rig);
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
fn a_long_request_does_not_keep_a_channel_from_asking_for_tags() {
    let config = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 3_600_000_000_000,
        submit_queues: Some(1),
        hw_queue_depth: 4,
        ..memory()
    };
    let mut rig = Rig::new(config);
    let buf = rig.buf(0);
    let bios: Vec<Bio> = (0..4).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    assert_eq!(rig.channel.push(&bios[..3]), 3);
    rig.channel.submit();
    let mut out = Vec::new();
    assert_eq!(rig.channel.reap(&mut out), 0);
    let mut other = rig.another();
    assert_eq!(other.channel.push(&bios), 4);
    other.channel.submit();
    assert_eq!(other.channel.reap(&mut out), 0);
    assert_eq!(other.channel.due(), Due::At(Nanos(50_000)), "one is started, three wait");
}

/// A channel that has its share of tags waits for its own completions and for a larger share.
/// Regression: it asked every 50 microseconds for tags that it could not get.
#[test]
fn a_channel_at_its_share_waits_for_its_own_requests() {
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
        let mut rig = Rig::new(config);
        let other = rig.another();
        let buf = rig.buf(0);
        let bios: Vec<Bio> = (0..4).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
        assert_eq!(rig.channel.push(&bios), 4);
        rig.channel.submit();
        let mut out = Vec::new();
        assert_eq!(rig.channel.reap(&mut out), 0);
        assert_eq!(rig.channel.due(), Due::At(Nanos(due)), "two are started, two wait");
        drop(other);
        while out.len() < 4 {
            rig.channel.wait(None);
            rig.channel.reap(&mut out);
        }
        assert_eq!(rig.clock.now(), Nanos(end));
    }
}

#[test]
fn channels_end_whatever_is_requeued_or_late() {
    let requeue = Some("1,100,0,-1".parse().unwrap());
    let late = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 3_600_000_000_000,
        submit_queues: Some(1),
        ..memory()
    };
    for config in [NullConfig { requeue, ..memory() }, late.clone(), NullConfig { requeue, ..late }]
    {
        let mut rig = Rig::new(config);
        let buf = rig.buf(0);
        let bios: Vec<Bio> = (0..8).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
        assert_eq!(rig.channel.push(&bios), 8);
        rig.channel.submit();
        let mut out = Vec::new();
        assert_eq!(rig.channel.reap(&mut out), 0);
        if requeue.is_some() {
            assert_ne!(rig.channel.due(), Due::Never);
        }
        let clock = rig.clock.clone();
        drop(rig);
        assert_eq!(clock.now(), Nanos(0), "nobody waits for it");
    }
}

#[test]
fn a_requeued_request_waits_a_moment() {
    let mut rig = Rig::new(NullConfig { requeue: Some("1,100,0,3".parse().unwrap()), ..memory() });
    assert_eq!(rig.write(0, 8, 1), Status::Ok);
    assert_eq!(rig.clock.now(), Nanos(3_000_000), "three times a millisecond");
}

/// A request that waits for bandwidth is checked for faults only once, when it passes.
#[test]
fn throttled_requests_are_struck_once() {
    let config = NullConfig { mbps: 1, timeout: Some("2,100,0,-1".parse().unwrap()), ..memory() };
    let mut rig = Rig::new(NullConfig { request_timeout_ms: 1, ..config });
    let statuses: Vec<Status> = (0..8).map(|_| rig.op(Op::Write, 0, 512)).collect();
    use Status::{Ok, Timeout};
    assert_eq!(statuses, [Ok, Timeout, Ok, Timeout, Ok, Timeout, Ok, Timeout]);
}

#[test]
fn a_shared_queue_without_delay_does_not_wait() {
    let shared = NullConfig { submit_queues: Some(1), hw_queue_depth: 2, ..memory() };
    let mut rig = Rig::new(shared);
    let buf = rig.buf(0);
    let bios: Vec<Bio> = (0..64).map(|part| Bio::read(Sector(part * 16), 8, buf)).collect();
    assert!(rig.all(&bios).iter().all(|done| done.status.is_ok()));
    assert_eq!(rig.clock.now(), Nanos(0));
}

#[test]
fn bandwidth_is_limited_over_all_channels() {
    let mut rig = Rig::new(NullConfig { mbps: 1, max_sectors: 64, ..memory() });
    let mut other = rig.another();
    for round in 0..16 {
        let rig = if round % 2 == 0 { &mut rig } else { &mut other };
        assert_eq!(rig.op(Op::Write, 0, 512), Status::Ok);
    }
    // 4 MiB at 1 MiB/s. The first tick's quota is available at once, and the last request overdraws
    // it.
    let seconds = rig.clock.now().0 as f64 / 1e9;
    assert!((3.9..=4.0).contains(&seconds), "{seconds}");
}
