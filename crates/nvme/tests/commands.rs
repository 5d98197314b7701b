//! What a host gets: bring-up, identification, data by each way, zones with their statuses.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use blockyard_core::inject::Injection;
use blockyard_null::NullConfig;
use initiator::{
    DISCOVERY, Initiator, PLAIN, Target, ZONED, admin_command, command, disk, pattern, plain,
    pointed, target, with, zoned,
};

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const COMPARE: u8 = 0x05;
const VERIFY: u8 = 0x0c;
const WRITE_ZEROES: u8 = 0x08;
const DISCARD: u8 = 0x09;
const ZONE_SEND: u8 = 0x79;
const ZONE_RECEIVE: u8 = 0x7a;
const APPEND: u8 = 0x7d;

/// A controller and its first I/O queue.
fn queues(target: &Target, nqn: &str, digests: u8) -> (Initiator, Initiator) {
    let (admin, controller) = target.admin(nqn, digests);
    let io = target.io(nqn, controller, digests, 0);
    (admin, io)
}

/// The commands of Linux 6.12, in its order.
#[test]
fn a_host_brings_up_a_controller_as_linux_does() {
    let target = target();
    let mut admin = target.idle(0);
    let connected = admin.connect(PLAIN, 0, 0xffff, 31, 0);
    assert_eq!((connected.status, connected.sq_head), (0, 1));
    let cap = admin.property_get(0x00, true).result;
    assert_eq!((cap & 0xffff, cap >> 37 & 1, cap >> 43 & 1), (127, 1, 1));
    assert_eq!(admin.property_set(0x14, 0x46_0060).status, 0);
    assert_eq!(admin.property_get(0x1c, false).result, 0, "not ready");
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    assert_eq!(admin.property_get(0x1c, false).result, 1);
    assert_eq!(admin.property_get(0x08, false).result, 0x0002_0000);
    let controller = admin.identify(1, 0, 0).data;
    assert_eq!(controller[78..80], (connected.result as u16).to_le_bytes());
    let log = |id: u32, dwords: u32| admin_command(2, id | (dwords - 1) << 16, 0);
    assert_eq!(admin.read(log(5, 1024), 4096).status, 0);
    assert_eq!(admin.read(with(log(2, 128), 1, 0xffff_ffff), 512).data[3], 100);
    assert_eq!(admin.read(log(0x0c, 128), 512).status, 0x4109, "no ANA");
    let queues = admin.execute(admin_command(9, 7, 0x0001_0001), &[]);
    assert_eq!((queues.status, queues.result), (0, 0x0001_0001));
    let many = admin.execute(admin_command(9, 7, 0xfffe_fffe), &[]);
    assert_eq!(many.result, 0x001f_001f);
    let mut io = target.io(PLAIN, connected.result as u16, 0, 0);
    assert_eq!(admin.execute(admin_command(9, 0x0b, 0x100), &[]).status, 0);
    admin.capsule(admin_command(0x0c, 0, 0), &[]);
    assert_eq!(admin.identify(6, 0, 0).status, 0);
    assert_eq!(admin.identify(2, 0, 0).data[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(admin.identify(3, 1, 0).data[40..45], [4, 1, 0, 0, 0]);
    assert_eq!(admin.identify(0, 1, 0).data[..8], (16u64 << 20 >> 9).to_le_bytes());
    assert_eq!(admin.execute(admin_command(0x18, 0, 0), &[]).status, 0, "keep alive");
    assert_eq!(io.read(command(READ, 0, 8), 4096).data, vec![0; 4096]);
    // `nvme disconnect`: the I/O queues first, then a shutdown, which is complete when they ended.
    drop(io);
    assert_eq!(admin.property_set(0x14, 0x46_4061).status, 0);
    let mut status = 1 << 2 | 1;
    while status == 1 << 2 | 1 {
        status = admin.property_get(0x1c, false).result;
    }
    assert_eq!(status, 2 << 2 | 1);
}

#[test]
fn data_go_in_capsules_by_r2t_and_back() {
    let target = target();
    for digests in 0..4 {
        let (_admin, mut io) = queues(&target, PLAIN, digests);
        let small = pattern(8192, digests);
        assert_eq!(io.execute(command(WRITE, 3, 16), &small).status, 0);
        let large = pattern(1 << 20, digests + 1);
        assert_eq!(io.write(command(WRITE, 100, 2048), &large).status, 0);
        let one = pattern(512, 9);
        assert_eq!(io.write(command(WRITE, 99, 1), &one).status, 0);
        assert_eq!(io.read(command(READ, 3, 16), 8192).data, small);
        let mut both = one.clone();
        both.extend_from_slice(&large[..(1 << 20) - 512]);
        assert_eq!(io.read(command(READ, 99, 2048), 1 << 20).data, both);
        assert_eq!(io.execute(command(FLUSH, 0, 0), &[]).status, 0);
        assert_eq!(io.execute(with(command(FLUSH, 0, 0), 1, 0xffff_ffff), &[]).status, 0);
        let fua = with(command(WRITE, 0, 1), 12, 1 << 30);
        assert_eq!(io.execute(fua, &one).status, 0);
    }
}

/// Data of a Connect are in its capsule with every known host, but a host may send them later.
#[test]
fn the_data_of_a_connect_may_come_by_r2t() {
    let target = target();
    let mut admin = target.idle(3);
    let (sqe, data) = initiator::connect_parts(PLAIN, 0, 0xffff, 31, 0);
    assert_eq!(admin.write(sqe, &data).status, 0);
    assert_eq!(admin.property_get(0x08, false).status, 0);
}

#[test]
fn many_commands_are_in_flight_at_once() {
    let target = target();
    let (_admin, mut io) = queues(&target, PLAIN, 0);
    for block in 0..100u32 {
        let data = pattern(512, block as u8);
        assert_eq!(io.execute(command(WRITE, block.into(), 1), &data).status, 0);
    }
    // Reads of 128 KiB at a depth of 128 need more memory than a connection has: they wait.
    let cids: Vec<_> = (0..128)
        .map(|at| {
            let (start, blocks) = if at < 100 { (at, 1) } else { (0, 256) };
            io.capsule(pointed(command(READ, start, blocks), 0x5a, 512 * blocks as usize), &[])
        })
        .collect();
    let mut seen = std::collections::BTreeMap::new();
    for _ in &cids {
        let done = io.done();
        assert_eq!(done.status, 0);
        seen.insert(done.cid, done.data);
    }
    for (at, cid) in cids.iter().enumerate().take(100) {
        assert_eq!(seen[cid], pattern(512, at as u8), "block {at}");
    }
    assert!(cids[100..].iter().all(|cid| seen[cid].len() == 128 << 10));
}

/// SUCCESS replaces the completion, and only a host without flow control understands it.
#[test]
fn a_host_without_flow_control_gets_no_completion_of_a_read() {
    let target = target();
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut io = target.io(PLAIN, controller, 0, 4);
    io.capsule(pointed(command(READ, 0, 1), 0x5a, 512), &[]);
    let pdu = io.receive().unwrap();
    assert_eq!((pdu.kind, pdu.flags), (7, 4 | 8));
    // The next PDU answers the next command.
    let done = io.execute(command(FLUSH, 0, 0), &[]);
    assert_eq!((done.status, done.sq_head), (0, 0xffff));
    assert_eq!(io.read(command(READ, 1 << 40, 1), 512).status, 0x4080, "errors do complete");
}

/// By each way that data take, up to the longest, which take all memory of a connection.
#[test]
fn compare_finds_what_differs_and_verify_reads() {
    let target = target();
    for digests in [0, 3] {
        let (_admin, mut io) = queues(&target, PLAIN, digests);
        let data = pattern(1 << 20, digests);
        assert_eq!(io.write(command(WRITE, 0, 2048), &data).status, 0);
        assert_eq!(io.execute(command(COMPARE, 0, 16), &data[..8192]).status, 0);
        assert_eq!(io.write(command(COMPARE, 0, 1), &data[..512]).status, 0);
        assert_eq!(io.write(command(COMPARE, 0, 2048), &data).status, 0);
        for at in [0, 4095, 4096, (1 << 20) - 1] {
            let mut other = data.clone();
            other[at] ^= 1;
            assert_eq!(io.write(command(COMPARE, 0, 2048), &other).status, 0x4285, "{at}");
        }
        assert_eq!(io.execute(command(COMPARE, 1, 1), &data[..512]).status, 0x4285);
        assert_eq!(io.execute(command(COMPARE, 1 << 40, 1), &data[..512]).status, 0x4080);
        assert_eq!(io.execute(command(COMPARE, 0, 2), &data[..512]).status, 0x400f);
        assert_eq!(io.execute(command(VERIFY, 0, 2048), &[]).status, 0);
        assert_eq!(io.execute(command(VERIFY, 0, 2049), &[]).status, 0x4002, "longer than VSL");
        assert_eq!(io.execute(command(VERIFY, (16 << 11) - 1, 2), &[]).status, 0x4080);
        assert_eq!(io.read(command(READ, 0, 2048), 1 << 20).data, data, "nothing has changed");
        // A fused compare is half of an operation that is not supported.
        let mut fused = pointed(command(COMPARE, 0, 1), 0x01, 512);
        fused[1] |= 1;
        let cid = io.capsule(fused, &data[..512]);
        let done = io.done();
        assert_eq!((done.cid, done.status), (cid, 0x4002));
    }
}

#[test]
fn many_compares_share_the_memory_of_a_connection() {
    let target = target();
    let (_admin, mut io) = queues(&target, PLAIN, 0);
    let zeros = vec![0; 8192];
    // Each needs pages for what the device reads.
    let cids: Vec<_> = (0..128)
        .map(|_| match io.next_cid % 2 {
            0 => io.capsule(pointed(command(COMPARE, 0, 16), 0x01, 8192), &zeros),
            _ => io.capsule(command(VERIFY, 0, 512), &[]),
        })
        .collect();
    for _ in cids {
        assert_eq!(io.done().status, 0);
    }
}

#[test]
fn zeroes_and_discards_read_back_as_zeros() {
    let target = target();
    let (_admin, mut io) = queues(&target, PLAIN, 0);
    let data = pattern(8192, 1);
    for start in [0, 16, 32] {
        assert_eq!(io.execute(command(WRITE, start, 16), &data).status, 0);
    }
    assert_eq!(io.execute(command(WRITE_ZEROES, 0, 16), &[]).status, 0);
    let mut ranges = vec![0; 48];
    for (at, (first, blocks)) in [(16u64, 8u32), (0, 0), (40, 8)].into_iter().enumerate() {
        ranges[16 * at + 4..16 * at + 8].copy_from_slice(&blocks.to_le_bytes());
        ranges[16 * at + 8..16 * at + 16].copy_from_slice(&first.to_le_bytes());
    }
    let discard = with(with(command(DISCARD, 0, 0), 10, 2), 11, 4);
    assert_eq!(io.execute(discard, &ranges).status, 0);
    let read = io.read(command(READ, 0, 48), 24576).data;
    assert_eq!(read[..12288], [0; 12288]);
    assert_eq!(read[12288..20480], [&data[4096..], &data[..4096]].concat());
    assert_eq!(read[20480..], [0; 4096]);
    // Linux sends 4096 bytes for any number of ranges.
    assert_eq!(io.execute(command(WRITE, 0, 16), &data).status, 0);
    let mut list = vec![0xff; 4096];
    list[..32].copy_from_slice(&[[0; 16], [0; 16]].concat());
    list[20..24].copy_from_slice(&16u32.to_le_bytes());
    let discard = with(with(command(DISCARD, 0, 0), 10, 1), 11, 4);
    assert_eq!(io.execute(discard, &list).status, 0);
    assert_eq!(io.read(command(READ, 0, 16), 8192).data, [0; 8192]);
    assert_eq!(io.execute(discard, &list[..16]).status, 0x400f);
    // A hint that is no discard does nothing.
    let hint = with(command(DISCARD, 0, 0), 10, 2);
    assert_eq!(io.execute(hint, &ranges).status, 0);
    let beyond = [&[0; 4][..], &1u32.to_le_bytes(), &(1u64 << 40).to_le_bytes()].concat();
    let discard = with(with(command(DISCARD, 0, 0), 10, 0), 11, 4);
    assert_eq!(io.execute(discard, &beyond).status, 0x4080);
}

#[test]
fn a_zoned_namespace_is_seen_by_hosts_that_enable_all_command_sets() {
    let target = target();
    let (mut admin, _) = target.admin(ZONED, 0);
    assert_eq!(admin.identify(3, 1, 0).data[40..45], [4, 1, 0, 0, 2]);
    let zoned = admin.identify(5, 1, 2).data;
    assert_eq!(zoned[4..12], [2, 0, 0, 0, 1, 0, 0, 0], "3 active and 2 open zones");
    assert_eq!(zoned[2816..2824], 1024u64.to_le_bytes());
    assert!(admin.identify(6, 0, 2).data[0] > 0);
    let namespace = admin.identify(0, 1, 0).data;
    assert_eq!(namespace[..8], 8192u64.to_le_bytes());
    assert_eq!(namespace[8..16], 4096u64.to_le_bytes());
    let mut plain_only = target.idle(0);
    assert_eq!(plain_only.connect(ZONED, 0, 0xffff, 31, 0).status, 0);
    assert_eq!(plain_only.property_set(0x14, 0x46_0001).status, 0);
    assert_eq!(plain_only.identify(2, 0, 0).data[..4], [0; 4]);
    assert_eq!(plain_only.identify(0, 1, 0).data, [0; 4096]);
}

/// The descriptors of a report: condition, start and write pointer of each zone.
fn report(
    io: &mut Initiator,
    first: u64,
    filter: u32,
    partial: bool,
) -> (u64, Vec<(u8, u64, u64)>) {
    let sqe = with(command(ZONE_RECEIVE, first, 0), 12, (64 + 64 * 8) / 4 - 1);
    let sqe = with(sqe, 13, filter << 8 | u32::from(partial) << 16);
    let done = io.read(sqe, 64 + 64 * 8);
    assert_eq!(done.status, 0);
    let word = |at: usize| u64::from_le_bytes(done.data[at..at + 8].try_into().unwrap());
    let zones = (1..9).map(|zone| 64 * zone).filter(|at| done.data[*at] != 0);
    let zones = zones.map(|at| {
        assert_eq!((done.data[at], word(at + 8)), (2, 512), "type, and capacity in blocks");
        (done.data[at + 1] >> 4, word(at + 16), word(at + 24))
    });
    (word(0), zones.collect())
}

fn manage(zone: u64, action: u32) -> [u8; 64] {
    with(command(ZONE_SEND, zone * 1024, 0), 13, action)
}

const SELECT_ALL: u32 = 1 << 8;

#[test]
fn appends_land_at_the_write_pointer_and_reports_show_it() {
    let target = target();
    let (_admin, mut io) = queues(&target, ZONED, 3);
    let data = pattern(4096, 1);
    let first = io.execute(command(APPEND, 1024, 1), &data);
    assert_eq!((first.status, first.result), (0, 1024));
    let second = io.write(command(APPEND, 1024, 1), &data);
    assert_eq!((second.status, second.result), (0, 1025));
    assert_eq!(io.execute(command(WRITE, 1026, 1), &data).status, 0);
    assert_eq!(io.execute(manage(2, 3), &[]).status, 0, "open");
    let (count, zones) = report(&mut io, 0, 0, false);
    assert_eq!((count, zones.len()), (8, 8));
    assert_eq!(zones[..4], [(1, 0, 0), (2, 1024, 1027), (3, 2048, 2048), (1, 3072, 3072)]);
    assert_eq!(report(&mut io, 1500, 0, true).1[0], (2, 1024, 1027), "the zone of the block");
    assert_eq!(report(&mut io, 0, 3, true), (1, vec![(3, 2048, 2048)]));
    assert_eq!(report(&mut io, 0, 1, false).0, 6);
    assert_eq!(report(&mut io, 0, 2, true), (1, vec![(2, 1024, 1027)]), "2 is implicitly open");
    assert_eq!(io.execute(manage(1, 1), &[]).status, 0, "close");
    assert_eq!(report(&mut io, 0, 4, false), (1, vec![(4, 1024, 1027)]), "4 is closed");
    assert_eq!(io.execute(manage(1, 2), &[]).status, 0, "finish");
    assert_eq!(report(&mut io, 0, 5, true), (1, vec![(0xe, 1024, u64::MAX)]), "5 is full");
    assert_eq!(report(&mut io, 0, 6, true), (0, vec![]), "6 is read-only");
    assert_eq!(io.read(command(READ, 1024, 3), 12288).data, [&data[..]; 3].concat());
}

/// A report with room for less than all zones, or for no zone at all.
#[test]
fn a_short_report_is_filled_and_counts_as_asked() {
    let target = target();
    let (_admin, mut io) = queues(&target, ZONED, 0);
    let short = |dwords: u32, partial: u32| {
        with(with(command(ZONE_RECEIVE, 0, 0), 12, dwords - 1), 13, partial << 16)
    };
    let done = io.read(short(32, 1), 128);
    assert_eq!((done.data[0], done.data[64]), (1, 2));
    assert_eq!(io.read(short(32, 0), 128).data[0], 8, "all zones count");
    assert_eq!(io.read(short(1, 0), 4).data, [8, 0, 0, 0]);
    assert_eq!(io.read(short(47, 1), 188).data[0], 1, "half a descriptor is none");
    assert_eq!(io.read(with(short(32, 1), 13, 1), 128).status, 0x4002, "extended");
    assert_eq!(io.read(with(short(32, 1), 13, 8 << 8), 128).status, 0x4002, "no such filter");
}

#[test]
fn refused_zone_commands_have_the_status_of_zns() {
    let target = target();
    let (_admin, mut io) = queues(&target, ZONED, 0);
    let data = pattern(4096, 1);
    let mut status = |sqe: [u8; 64], data: &[u8]| io.execute(sqe, data).status;
    assert_eq!(status(command(WRITE, 5, 1), &data), 0x41bc, "not at the write pointer");
    assert_eq!(status(command(WRITE, 511, 2), &[0; 8192]), 0x41b8, "over the capacity");
    assert_eq!(status(command(APPEND, 1025, 1), &data), 0x4002, "not the start of a zone");
    assert_eq!(status(command(APPEND, 8192, 1), &data), 0x4080);
    assert_eq!(status(manage(0, 1), &[]), 0x41bf, "close of an empty zone");
    assert_eq!(status(manage(0, 4), &[]), 0, "reset of an empty zone");
    assert_eq!(status(manage(0, 2), &[]), 0, "finish");
    assert_eq!(status(command(WRITE, 0, 1), &data), 0x41b9, "full");
    assert_eq!(status(command(APPEND, 0, 1), &data), 0x41b9, "full");
    assert_eq!(status(manage(0, 3), &[]), 0x41bf, "open of a full zone");
    assert_eq!(status(manage(0, 5), &[]), 0x41bf, "offline");
    assert_eq!(status(manage(0, 0x10), &[]), 0x4002, "no descriptor extensions");
    assert_eq!(status(with(manage(0, 3), 10, 1), &[]), 0x4002, "not the start of a zone");
    assert_eq!(status(manage(8, 3), &[]), 0x4080);
    for zone in [1, 2] {
        assert_eq!(status(manage(zone, 3), &[]), 0);
    }
    assert_eq!(status(manage(3, 3), &[]), 0x41be, "two zones are open");
    assert_eq!(status(command(WRITE, 1024, 1), &data), 0);
    assert_eq!(status(command(WRITE, 2048, 1), &data), 0);
    assert_eq!(status(manage(1, 1), &[]), 0, "close");
    assert_eq!(status(manage(3, 3), &[]), 0);
    assert_eq!(status(command(APPEND, 4096, 1), &data), 0x41bd, "three zones are active");
    assert_eq!(status(manage(0, SELECT_ALL | 1), &[]), 0, "close all");
    assert_eq!(status(command(WRITE, 1025, 1), &data), 0);
    assert_eq!(status(manage(0, SELECT_ALL | 2), &[]), 0, "finish all");
    assert_eq!(status(command(WRITE, 1026, 1), &data), 0x41b9);
    assert_eq!(status(manage(0, SELECT_ALL | 4), &[]), 0, "reset all");
    let (empty, _) = report(&mut io, 0, 1, false);
    assert_eq!(empty, 8);
}

/// A target with a zoned device whose zone 1 has a fault, and the device's NQN.
fn target_with_broken_zone(fault: &str) -> (Target, &'static str) {
    let (target, disk) = (target(), disk("broken", zoned()));
    let (name, value) = (fault.to_owned(), (1024 * 8).to_string());
    disk.inject(&Injection::Device { name, value }).unwrap();
    target.subsystems.add("broken", disk).unwrap();
    (target, "nqn.2026-11.io.blockyard:broken")
}

/// Select All of the action Offline was refused always, also where there is nothing to do.
#[test]
fn offline_of_all_zones_succeeds_without_a_read_only_zone() {
    let (target, broken) = target_with_broken_zone("zone_readonly");
    let (_admin, mut io) = queues(&target, ZONED, 0);
    assert_eq!(io.execute(manage(0, SELECT_ALL | 5), &[]).status, 0);
    drop((_admin, io));
    let (_admin, mut io) = queues(&target, broken, 0);
    assert_eq!(io.execute(manage(0, SELECT_ALL | 5), &[]).status, 0x41bf, "zone 1 is read-only");
    assert_eq!(io.execute(manage(1, 5), &[]).status, 0x41bf);
    drop((_admin, io));
    let (target, broken) = target_with_broken_zone("zone_offline");
    let (_admin, mut io) = queues(&target, broken, 0);
    assert_eq!(io.execute(manage(1, 5), &[]).status, 0, "zone 1 is offline already");
    assert_eq!(io.execute(manage(0, SELECT_ALL | 5), &[]).status, 0);
}

#[test]
fn open_of_all_zones_opens_those_that_are_closed() {
    let target = target();
    let (_admin, mut io) = queues(&target, ZONED, 0);
    for zone in [1, 5] {
        assert_eq!(io.execute(command(WRITE, zone * 1024, 1), &pattern(4096, 1)).status, 0);
        assert_eq!(io.execute(manage(zone, 1), &[]).status, 0, "close");
    }
    assert_eq!(io.execute(manage(0, SELECT_ALL | 3), &[]).status, 0);
    let opened = vec![(3, 1024, 1025), (3, 5 * 1024, 5 * 1024 + 1)];
    assert_eq!(report(&mut io, 0, 3, false), (2, opened), "and no other zone");
}

/// What a zone that is lost answers, and which report tells of it.
#[test]
fn writes_to_read_only_and_offline_zones_have_the_status_of_zns() {
    for (fault, status, filter, condition) in
        [("zone_readonly", 0x41ba, 6, 0xd), ("zone_offline", 0x41bb, 7, 0xf)]
    {
        let (target, broken) = target_with_broken_zone(fault);
        let (_admin, mut io) = queues(&target, broken, 0);
        for opcode in [WRITE, APPEND] {
            let done = io.execute(command(opcode, 1024, 1), &pattern(4096, 1));
            assert_eq!(done.status, status, "{fault} {opcode:#x}");
        }
        assert_eq!(io.execute(command(WRITE_ZEROES, 1024, 1), &[]).status, status, "{fault}");
        assert_eq!(io.execute(manage(1, 3), &[]).status, 0x41bf, "{fault}: open");
        let lost = (condition, 1024, u64::MAX);
        assert_eq!(report(&mut io, 0, filter, true), (1, vec![lost]), "{fault}");
    }
}

/// A read that begins in the zone before an offline one had the status of an internal error.
#[test]
fn a_read_that_reaches_an_offline_zone_has_the_status_of_zns() {
    let (target, broken) = target_with_broken_zone("zone_offline");
    let (_admin, mut io) = queues(&target, broken, 0);
    for (first, blocks) in [(1020, 8), (1024, 1), (1023, 2)] {
        for opcode in [READ, VERIFY] {
            let len = if opcode == READ { blocks * 4096 } else { 0 };
            let done = io.read(command(opcode, first, blocks as u32), len);
            assert_eq!(done.status, 0x41bb, "{opcode:#x} of {blocks} from {first}");
        }
    }
    assert_eq!(io.read(command(READ, 1016, 8), 32768).status, 0, "the zone before");
    assert_eq!(io.read(command(READ, 2048, 8), 32768).status, 0, "the zone after");
}

/// The default of the write cache was 0, as if a reset disabled it, and that of the queues was one
/// queue; saved values were refused.
#[test]
fn get_features_selects_current_default_saved_and_capabilities() {
    let target = target();
    let cached = NullConfig { cache_size: 1 << 20, ..plain() };
    target.subsystems.add("cached", disk("cached", cached)).unwrap();
    let (mut admin, _) = target.admin("nqn.2026-11.io.blockyard:cached", 0);
    let controller = admin.identify(1, 0, 0).data;
    assert_eq!(controller[520] & 1 << 4, 1 << 4, "ONCS: Select");
    assert_eq!(controller[525] & 1, 1, "VWC: a cache");
    assert_eq!(admin.execute(admin_command(9, 7, 0x0003_0001), &[]).result, 0x0003_0001);
    assert_eq!(admin.execute(admin_command(9, 0x0b, 0x100), &[]).status, 0);
    assert_eq!(admin.execute(admin_command(9, 0x0f, 5000), &[]).status, 0);
    let mut values = |id: u32| {
        [0, 1, 2, 3].map(|select| {
            let answer = admin.execute(admin_command(0x0a, id | select << 8, 0), &[]);
            assert_eq!(answer.status, 0, "{id:#x}, {select}");
            answer.result
        })
    };
    assert_eq!(values(0x06), [1, 1, 1, 0], "the cache cannot be switched off");
    assert_eq!(values(0x07), [0x0003_0001, 0x001f_001f, 0x001f_001f, 4]);
    assert_eq!(values(0x0b), [0x100, 0, 0, 4]);
    assert_eq!(values(0x0f), [5000, 0, 0, 4]);
    for id in [1, 2, 4, 5, 0x19] {
        assert_eq!(values(id), [0; 4]);
    }
    for select in 4..8 {
        assert_eq!(admin.execute(admin_command(0x0a, 6 | select << 8, 0), &[]).status, 0x4002);
    }
    let saves = admin_command(9, 0x0b | 1 << 31, 0x100);
    assert_eq!(admin.execute(saves, &[]).status, 0x410d, "no feature is saveable");
    let (mut admin, _) = target.admin(PLAIN, 0);
    assert_eq!(admin.identify(1, 0, 0).data[525] & 1, 0, "VWC: no cache");
    for select in 0..4 {
        let answer = admin.execute(admin_command(0x0a, 6 | select << 8, 0), &[]);
        assert_eq!(answer.status, 0x4002, "no cache");
    }
    for value in [0, 1] {
        assert_eq!(admin.execute(admin_command(9, 6, value), &[]).status, 0x4002, "no cache");
    }
}

#[test]
fn health_counts_what_hosts_have_read_and_written() {
    let target = target();
    let (mut admin, mut io) = queues(&target, PLAIN, 0);
    // Units of 1,000 sectors read and written, commands that have read and that have written.
    let counts = |admin: &mut Initiator| {
        let page = admin.read(with(admin_command(2, 2 | 127 << 16, 0), 1, 0xffff_ffff), 512).data;
        [32, 48, 64, 80].map(|at| u128::from_le_bytes(page[at..at + 16].try_into().unwrap()))
    };
    assert_eq!(counts(&mut admin), [0; 4]);
    let data = pattern(8192, 1);
    assert_eq!(io.execute(command(WRITE, 0, 16), &data).status, 0);
    assert_eq!(counts(&mut admin), [0, 1, 0, 1]);
    assert_eq!(io.read(command(READ, 0, 16), 8192).data, data);
    assert_eq!(io.execute(command(COMPARE, 0, 16), &data).status, 0);
    assert_eq!(io.execute(command(VERIFY, 0, 968), &[]).status, 0);
    assert_eq!(counts(&mut admin), [1, 1, 2, 1]);
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
    assert_eq!(io.read(command(READ, 1 << 40, 1), 512).status, 0x4080);
    assert_eq!(io.execute(command(WRITE_ZEROES, 0, 16), &[]).status, 0);
    assert_eq!(io.write(command(WRITE, 0, 2048), &pattern(1 << 20, 2)).status, 0);
    assert_eq!(counts(&mut admin), [2, 3, 3, 2]);
    // A report of zones reads no data; an append writes some.
    let (mut admin, mut io) = queues(&target, ZONED, 0);
    assert_eq!(report(&mut io, 0, 0, false).0, 8);
    assert_eq!(io.execute(command(APPEND, 0, 1), &pattern(4096, 1)).status, 0);
    assert_eq!(counts(&mut admin), [0, 1, 0, 1]);
}

#[test]
fn commands_that_do_not_exist_are_refused_and_skipped() {
    let target = target();
    let (mut admin, mut io) = queues(&target, PLAIN, 0);
    // The data in the capsule of a refused command are skipped: the next command is found.
    for sqe in [command(0x55, 0, 1), command(APPEND, 0, 1), command(0x04, 0, 1)] {
        assert_eq!(io.execute(sqe, &pattern(4096, 1)).status, 0x4001);
    }
    assert_eq!(io.execute(with(command(WRITE, 0, 1), 1, 2), &[0; 512]).status, 0x400b);
    assert_eq!(io.execute(command(WRITE, 0, 2), &[0; 512]).status, 0x400f, "other lengths");
    assert_eq!(io.execute(command(FLUSH, 0, 0), &[]).status, 0);
    assert_eq!(io.read(command(READ, 0, 2049), 1 << 20).status, 0x4002, "longer than MDTS");
    for opcode in [0x00, 0x01, 0x0d, 0x10, 0x80] {
        assert_eq!(admin.execute(admin_command(opcode, 0, 0), &[]).status, 0x4001);
    }
    assert_eq!(admin.identify(0x13, 1, 0).status, 0x4002);
    assert_eq!(admin.identify(7, 0, 5).status, 0x4002, "no such command set");
    assert_eq!(admin.execute(admin_command(9, 7, 0), &[]).status, 0x400c, "after a queue");
    assert_eq!(admin.execute(admin_command(8, 0, 0), &[]).result, 1, "not aborted");
    assert_eq!(admin.execute(admin_command(9, 1 << 31 | 7, 0), &[]).status, 0x410d);
    assert_eq!(admin.execute(admin_command(10, 7, 0), &[]).result, 0x001f_001f);
    let controller = admin.identify(1, 0, 0).data;
    let unit_ms = 100 * u64::from(u16::from_le_bytes([controller[320], controller[321]]));
    assert_eq!(admin.execute(admin_command(9, 0x0f, 12345), &[]).status, 0);
    let kept = admin.execute(admin_command(10, 0x0f, 0), &[]).result;
    assert_eq!(kept, 12345_u64.next_multiple_of(unit_ms), "the granularity that KAS tells");
    for _ in 0..4 {
        admin.capsule(admin_command(0x0c, 0, 0), &[]);
    }
    assert_eq!(admin.execute(admin_command(0x0c, 0, 0), &[]).status, 0x4105);
}

#[test]
fn discovery_lists_the_subsystems_at_the_address_of_the_host() {
    let target = target();
    let (mut discovery, _) = target.admin(DISCOVERY, 0);
    let controller = discovery.identify(1, 0, 0).data;
    assert_eq!(controller[111], 2);
    assert_eq!(controller[260..262], [0, 4], "no firmware log, no log of effects");
    assert_eq!(discovery.identify(2, 0, 0).status, 0x4002);
    let log = |offset: u64, bytes: u32| {
        let sqe = admin_command(2, 0x70 | (bytes / 4 - 1) << 16, 0);
        with(with(sqe, 12, offset as u32), 13, (offset >> 32) as u32)
    };
    let head = discovery.read(log(0, 20), 20).data;
    assert_eq!(head[8..16], 3u64.to_le_bytes());
    let entries = discovery.read(log(1024, 3072), 3072).data;
    let text = |at: usize| {
        let end = entries[at..].iter().position(|byte| *byte == 0 || *byte == b' ').unwrap();
        String::from_utf8(entries[at..at + end].to_vec()).unwrap()
    };
    assert_eq!([text(256), text(1024 + 256), text(2048 + 256)], [DISCOVERY, PLAIN, ZONED]);
    assert_eq!(text(1024 + 32), target.address().port().to_string());
    assert_eq!(text(1024 + 512), "127.0.0.1");
    assert_eq!(discovery.read(log(1 << 40, 4096), 4096).status, 0x4002, "after the end");
    let done = discovery.read(admin_command(2, 2 | 127 << 16, 0), 512);
    assert_eq!(done.status, 0x4109, "no health of a discovery controller");
    // A device that is removed is not discovered.
    target.subsystems.remove("plain", std::time::Duration::ZERO).unwrap();
    let after = discovery.read(log(0, 20), 20).data;
    assert_ne!(after[..8], head[..8]);
    assert_eq!(after[8..16], 2u64.to_le_bytes());
}
