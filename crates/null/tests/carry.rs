//! Reads and writes that skip the path through the channel (`carry`): they have the same effect as
//! pushed ones, and `carry` refuses everything that needs the full path.
#![allow(clippy::disallowed_types, clippy::unwrap_used)]

mod common;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::*;
use blockyard_null::{IrqMode, Null, NullConfig};
use common::Rig;

fn memory() -> NullConfig {
    NullConfig { size: 4 << 20, memory_backed: true, ..NullConfig::default() }
}

/// A rig whose queue has read the armed faults: the first I/O takes the full path.
fn rig(config: NullConfig) -> Rig {
    let mut rig = Rig::new(config);
    assert_eq!(carry(&mut rig, Op::Read, 0, 8), None);
    assert_eq!(rig.all(&[Bio::read(Sector(0), 8, rig.buf(0))])[0].status, Status::Ok);
    rig
}

fn carry(rig: &mut Rig, op: Op, sector: u64, sectors: u64) -> Option<Status> {
    let buf = rig.buf(0);
    rig.channel.carry(op, Sector(sector), sectors, buf)
}

#[test]
fn data_are_the_same_whichever_way_they_go() {
    let mut rig = rig(memory());
    rig.region.write(0, &[7; 4096]);
    assert_eq!(carry(&mut rig, Op::Write, 16, 8), Some(Status::Ok));
    assert!(rig.holds(16, 8, 7));
    assert_eq!(rig.write(16, 8, 9), Status::Ok);
    rig.region.write(0, &[0; 4096]);
    assert_eq!(carry(&mut rig, Op::Read, 16, 8), Some(Status::Ok));
    let mut back = [0; 4096];
    rig.region.read(0, &mut back);
    assert_eq!(back, [9; 4096]);
}

#[test]
fn zones_answer_as_they_do_to_pushed_writes() {
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, ..memory() };
    let mut rig = rig(zoned);
    assert_eq!(carry(&mut rig, Op::Write, 0, 8), Some(Status::Ok));
    // The write pointer is at 8.
    assert_eq!(carry(&mut rig, Op::Write, 0, 8), Some(Status::IoErr));
    assert_eq!(rig.write(8, 8, 1), Status::Ok);
    assert_eq!(carry(&mut rig, Op::Write, 16, 8), Some(Status::Ok));
    // A write across a zone boundary must be split, so it is refused here.
    assert_eq!(carry(&mut rig, Op::Write, 2040, 16), None);
}

#[test]
fn what_needs_more_than_the_device_is_left_undone() {
    let mut one = rig(NullConfig { max_sectors: 128, ..memory() });
    for (op, sector, sectors) in [
        (Op::Discard, 0, 8),
        (Op::Flush, 0, 0),
        (Op::Read, 0, 0),
        (Op::Read, 8192, 8),
        (Op::Read, 8184, 16),
        (Op::Read, u64::MAX, 8),
        (Op::Read, 8, u64::MAX),
        (Op::Read, 0, 136),
    ] {
        assert_eq!(carry(&mut one, op, sector, sectors), None, "{op} {sector} {sectors}");
    }
    // A region that the channel does not know.
    let unknown = BufRef { region: RegionId(9), offset: 0 };
    assert_eq!(one.channel.carry(Op::Read, Sector(0), 8, unknown), None);
    let outside = BufRef { region: one.id, offset: common::REGION_BYTES as u64 - 512 };
    assert_eq!(one.channel.carry(Op::Read, Sector(0), 8, outside), None);
    // Another request is in flight.
    let bio = Bio::read(Sector(0), 8, one.buf(0));
    assert_eq!(one.channel.push(&[bio]), 1);
    assert_eq!(carry(&mut one, Op::Read, 0, 8), None);
    one.channel.submit();
    assert_eq!(one.channel.reap(&mut Vec::new()), 1);
    assert_eq!(carry(&mut one, Op::Read, 0, 8), Some(Status::Ok));
}

#[test]
fn faults_and_delays_are_not_passed_by() {
    let device = Faulty::new(Null::open(memory()).unwrap(), 1);
    let channels = ChannelConfig::default();
    let disk = Composed::new("f".to_owned(), "null", device, channels, NoneScheduler::new);
    let mut channel = disk.open().unwrap();
    let region = channel.register(Region::alloc(4096));
    let buf = BufRef { region, offset: 0 };
    let ends = |channel: &mut Box<dyn Channel>| {
        assert_eq!(channel.push(&[Bio::read(Sector(0), 8, buf)]), 1);
        channel.submit();
        let mut out = Vec::new();
        assert_eq!(channel.reap(&mut out), 1);
        out[0].status
    };
    assert_eq!(ends(&mut channel), Status::Ok);
    assert_eq!(channel.carry(Op::Read, Sector(0), 8, buf), Some(Status::Ok));
    let (op, status) = (Some(Op::Read), Status::Medium);
    let rule = Rule { op, status, start: Sector(0), sectors: 8, chance: 1, times: None };
    disk.inject(&Injection::AddRule(rule)).unwrap();
    for _ in 0..2 {
        assert_eq!(channel.carry(Op::Read, Sector(0), 8, buf), None);
        assert_eq!(ends(&mut channel), Status::Medium);
    }
    let mut two = rig(memory());
    two.inject("badblocks", "+8-15").unwrap();
    assert_eq!(carry(&mut two, Op::Read, 8, 8), None);
    let timer = NullConfig { irqmode: IrqMode::Timer, completion_nsec: 10, ..memory() };
    assert_eq!(carry(&mut rig(timer), Op::Read, 0, 8), None);
}

#[test]
fn carried_bios_are_counted() {
    let mut rig = rig(memory());
    let before = *rig.disk.stats().op(Op::Write);
    assert_eq!(carry(&mut rig, Op::Write, 0, 8), Some(Status::Ok));
    let after = *rig.disk.stats().op(Op::Write);
    assert_eq!((after.ops - before.ops, after.sectors - before.sectors), (1, 8));
}

/// I/O over FUSE on a device that completes at once had no latency in the statistics: the channel
/// that a disk opens dropped the latency that the FUSE server measured.
#[test]
fn the_latency_of_an_inline_read_is_in_the_statistics_of_the_disk() {
    let channels = ChannelConfig::default();
    let null = Null::open(memory()).unwrap();
    let disk = Composed::new("n".to_owned(), "null", null, channels, NoneScheduler::new);
    let mut channel = disk.open().unwrap();
    let region = channel.register(Region::alloc(4096));
    let buf = BufRef { region, offset: 0 };
    // The first attempt reads the armed faults and executes nothing.
    let status = (0..3).find_map(|_| channel.carry(Op::Read, Sector(0), 8, buf));
    assert_eq!(status, Some(Status::Ok));
    assert_eq!(disk.stats().read_latency.iter().sum::<u64>(), 0, "no latency was measured");
    channel.note_latency(Op::Read, 1000);
    assert_eq!(disk.stats().read_latency.iter().sum::<u64>(), 1);
}
