//! Reads and writes that skip the path through the channel (`execute_inline`): they have the same
//! effect as pushed ones, and `execute_inline` refuses everything that needs the full path.

use crate::common::Fixture;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::*;
use blockyard_null::{IrqMode, Null, NullConfig};

fn memory() -> NullConfig {
    NullConfig { size: 4 << 20, memory_backed: true, ..NullConfig::default() }
}

/// A fixture whose queue has read the armed faults: the first I/O takes the full path.
fn fixture(config: NullConfig) -> Fixture {
    let mut fixture = Fixture::new(config);
    assert_eq!(execute_inline(&mut fixture, Op::Read, 0, 8), None);
    assert_eq!(fixture.all(&[Bio::read(Sector(0), 8, fixture.buf(0))])[0].status, Status::Ok);
    fixture
}

fn execute_inline(fixture: &mut Fixture, op: Op, sector: u64, sectors: u64) -> Option<Status> {
    let buf = fixture.buf(0);
    fixture.channel.execute_inline(op, Sector(sector), sectors, buf)
}

#[test]
fn inline_and_pushed_bios_transfer_equal_data() {
    let mut fixture = fixture(memory());
    fixture.region.write(0, &[7; 4096]);
    assert_eq!(execute_inline(&mut fixture, Op::Write, 16, 8), Some(Status::Ok));
    assert!(fixture.holds(16, 8, 7));
    assert_eq!(fixture.write(16, 8, 9), Status::Ok);
    fixture.region.write(0, &[0; 4096]);
    assert_eq!(execute_inline(&mut fixture, Op::Read, 16, 8), Some(Status::Ok));
    let mut back = [0; 4096];
    fixture.region.read(0, &mut back);
    assert_eq!(back, [9; 4096]);
}

#[test]
fn inline_zone_writes_return_same_status_as_pushed() {
    let zoned = NullConfig { zoned: true, zone_size: 1 << 20, ..memory() };
    let mut fixture = fixture(zoned);
    assert_eq!(execute_inline(&mut fixture, Op::Write, 0, 8), Some(Status::Ok));
    // The write pointer is at 8.
    assert_eq!(execute_inline(&mut fixture, Op::Write, 0, 8), Some(Status::IoErr));
    assert_eq!(fixture.write(8, 8, 1), Status::Ok);
    assert_eq!(execute_inline(&mut fixture, Op::Write, 16, 8), Some(Status::Ok));
    // A write across a zone boundary must be split, so it is refused here.
    assert_eq!(execute_inline(&mut fixture, Op::Write, 2040, 16), None);
}

#[test]
fn execute_inline_refuses_bios_that_need_the_full_path() {
    let mut one = fixture(NullConfig { max_sectors: 128, ..memory() });
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
        assert_eq!(execute_inline(&mut one, op, sector, sectors), None, "{op} {sector} {sectors}");
    }
    // A region that the channel does not know.
    let unknown = BufRef { region: RegionId(9), offset: 0 };
    assert_eq!(one.channel.execute_inline(Op::Read, Sector(0), 8, unknown), None);
    let outside = BufRef { region: one.id, offset: crate::common::REGION_BYTES as u64 - 512 };
    assert_eq!(one.channel.execute_inline(Op::Read, Sector(0), 8, outside), None);
    // Another request is in flight.
    let bio = Bio::read(Sector(0), 8, one.buf(0));
    assert_eq!(one.channel.push(&[bio]), 1);
    assert_eq!(execute_inline(&mut one, Op::Read, 0, 8), None);
    one.channel.submit();
    assert_eq!(one.channel.reap(&mut Vec::new()), 1);
    assert_eq!(execute_inline(&mut one, Op::Read, 0, 8), Some(Status::Ok));
}

#[test]
fn execute_inline_refuses_with_faults_or_delay() {
    let device = Faulty::new(Null::open(memory()).unwrap(), 1);
    let channels = ChannelConfig::default();
    let disk = Composed::new("f".to_owned(), "null", device, channels);
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
    assert_eq!(channel.execute_inline(Op::Read, Sector(0), 8, buf), Some(Status::Ok));
    let rule = Rule { op: Some(Op::Read), sectors: 8, ..Rule::new(Status::Medium) };
    disk.inject(&Injection::AddRule(rule)).unwrap();
    for _ in 0..2 {
        assert_eq!(channel.execute_inline(Op::Read, Sector(0), 8, buf), None);
        assert_eq!(ends(&mut channel), Status::Medium);
    }
    let mut two = fixture(memory());
    two.inject("badblocks", "+8-15").unwrap();
    assert_eq!(execute_inline(&mut two, Op::Read, 8, 8), None);
    let timer = NullConfig { irqmode: IrqMode::Timer, completion_nsec: 10, ..memory() };
    assert_eq!(execute_inline(&mut fixture(timer), Op::Read, 0, 8), None);
}

#[test]
fn inline_bios_are_counted() {
    let mut fixture = fixture(memory());
    let before = *fixture.disk.stats().op(Op::Write);
    assert_eq!(execute_inline(&mut fixture, Op::Write, 0, 8), Some(Status::Ok));
    let after = *fixture.disk.stats().op(Op::Write);
    assert_eq!((after.ops - before.ops, after.sectors - before.sectors), (1, 8));
}

/// I/O over FUSE on a device that completes at once had no latency in the statistics: the channel
/// that a disk opens dropped the latency that the FUSE server measured.
#[test]
fn the_latency_of_an_inline_read_is_in_the_statistics_of_the_disk() {
    let channels = ChannelConfig::default();
    let null = Null::open(memory()).unwrap();
    let disk = Composed::new("n".to_owned(), "null", null, channels);
    let mut channel = disk.open().unwrap();
    let region = channel.register(Region::alloc(4096));
    let buf = BufRef { region, offset: 0 };
    // The first attempt reads the armed faults and executes nothing.
    let status = (0..3).find_map(|_| channel.execute_inline(Op::Read, Sector(0), 8, buf));
    assert_eq!(status, Some(Status::Ok));
    assert_eq!(disk.stats().read_latency.iter().sum::<u64>(), 0, "no latency was measured");
    channel.note_latency(Op::Read, 1000, 1);
    assert_eq!(disk.stats().read_latency.iter().sum::<u64>(), 1);
    // A sample that stands for 16 reads.
    channel.note_latency(Op::Read, 1000, 16);
    assert_eq!(disk.stats().read_latency.iter().max(), Some(&17));
}
