//! What a guest gets: features, data in buffers of any shape, flushes, discards, zones.
#![allow(clippy::unwrap_used)] // A test may.

mod guest;

use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::{Faulty, TraceKind, TraceSource};
use blockyard_core::{Composed, DeviceError, Disk, Op, Sector, Status};
use blockyard_file::{FileConfig, FileDevice};
use blockyard_null::{Null, NullConfig};
use blockyard_ram::{Ram, RamConfig};
use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};
use blockyard_vhost::config_space::feature;
use blockyard_vhost::request::kind;
use guest::{
    Buffer, DATA, Guest, REGION_BYTES, disk, into, out, plain, print_header, print_range, serve,
    zoned,
};

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn word(config: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(config[at..at + 4].try_into().unwrap())
}

#[test]
fn a_plain_disk_has_the_features_and_the_configuration_of_one() {
    let served = serve(disk("a-disk", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    let wanted = feature::FLUSH
        | feature::DISCARD
        | feature::WRITE_ZEROES
        | feature::MQ
        | feature::EVENT_IDX
        | feature::INDIRECT_DESC
        | feature::VERSION_1;
    assert_eq!(guest.features & wanted, wanted);
    assert_eq!(guest.features & (feature::RO | feature::ZONED), 0);
    let config = guest.config();
    assert_eq!(config[..8], (16u64 << 20 >> 9).to_le_bytes());
    assert_eq!((word(&config, 12), word(&config, 20)), (126, 512));
    assert_eq!(config[34..36], 64u16.to_le_bytes());
    let (status, id) = guest.request(kind::GET_ID, 0, &[], 20);
    assert_eq!(
        (status, &id[..6], id[6..].iter().all(|byte| *byte == 0)),
        (0, &b"a-disk"[..], true)
    );
    assert_eq!(guest.request(99, 0, &[], 0).0, 2, "an unknown type");
    assert_eq!(guest.request(kind::ZONE_REPORT, 0, &[], 4096).0, 2);
}

#[test]
fn data_come_back_whatever_the_event_index() {
    for without in [0, feature::EVENT_IDX, feature::EVENT_IDX | feature::INDIRECT_DESC] {
        let served = serve(disk("d", plain()));
        let mut guest = Guest::connect(&served, 1, without);
        for round in 0..300u64 {
            let sector = round * 97 % 30_000;
            let data = bytes(round, 512 * (1 + round as usize % 40));
            assert_eq!(guest.request(kind::OUT, sector, &data, 0).0, 0);
            let (status, back) = guest.request(kind::IN, sector, &[], data.len());
            assert!(status == 0 && back == data, "round {round}");
        }
        let info = served.server.info();
        assert!(info.is_connected && info.queues == 1 && info.memory_bytes == 2 * REGION_BYTES);
        assert_eq!((info.requests, info.errors), (600, 0));
        assert_eq!(info.read_bytes, info.written_bytes);
    }
}

/// Cuts `[at, at + len)` into buffers of these lengths, the last of which takes the rest.
fn cut(at: u64, len: u32, lens: &[u32], is_written: bool) -> Vec<Buffer> {
    let (mut from, mut left, mut buffers) = (at, len, Vec::new());
    for here in lens.iter().copied().chain([u32::MAX]) {
        let here = here.min(left);
        if here > 0 {
            buffers.push(Buffer { at: from, len: here, is_written });
            (from, left) = (from + u64::from(here), left - here);
        }
    }
    buffers
}

/// VIRTIO 1.3, 2.7.4: where a buffer ends says nothing. The header, the data and the status lie in
/// buffers of any length, and across the border of two regions of memory.
#[test]
fn buffers_may_end_anywhere() {
    const LEN: u32 = 16384;
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    let shapes: [&[u32]; 8] = [
        &[],
        &[16],
        &[1, 15],
        &[16, 512],
        &[16, 511, 2],
        &[20, 4096, 1000],
        &[16, 4096, 4096, 1],
        &[3, 9, 5, 7000],
    ];
    // Header and data are one run of bytes, and so are data and status.
    let places = [DATA, REGION_BYTES - 16, REGION_BYTES - 5000, REGION_BYTES - 16 - 1024];
    for (round, (shape, place)) in
        shapes.iter().flat_map(|shape| places.map(|place| (*shape, place))).enumerate()
    {
        let sector = round as u64 * 32;
        let data = bytes(round as u64, LEN as usize);
        // No table, one in one region, and those that cross into the next region, within a
        // descriptor and between two.
        let mut tables = vec![None, Some(DATA - 8192)];
        if place == DATA {
            tables.extend([Some(REGION_BYTES - 16), Some(REGION_BYTES - 8)]);
        }
        for table in tables {
            let status = DATA - 4096;
            guest.put(place, &print_header(kind::OUT, sector));
            guest.put(place + 16, &data);
            guest.put(status, &[0xff]);
            let mut buffers = cut(place, 16 + LEN, shape, false);
            buffers.push(into(status, 1));
            match table {
                Some(table) => guest.offer_indirect(0, table, &buffers),
                None => guest.offer(0, &buffers),
            };
            guest.kick(0);
            assert_eq!(guest.answer(0).1, 1);
            assert_eq!(guest.get(status, 1), [0], "write, {shape:?} at {place:#x}");

            let (header, status) = (DATA - 4096, place + u64::from(LEN));
            guest.put(header, &print_header(kind::IN, sector));
            guest.put(place, &vec![0xaa; LEN as usize + 1]);
            let mut buffers = vec![out(header, 16)];
            buffers.extend(cut(place, LEN + 1, shape, true));
            match table {
                Some(table) => guest.offer_indirect(0, table, &buffers),
                None => guest.offer(0, &buffers),
            };
            guest.kick(0);
            assert_eq!(guest.answer(0).1, LEN + 1);
            assert_eq!(guest.get(status, 1), [0], "read, {shape:?} at {place:#x}");
            assert!(guest.get(place, LEN as usize) == data, "{shape:?} at {place:#x}");
        }
    }
}

/// More requests than one may have the bounce buffer at once.
#[test]
fn requests_with_odd_buffers_wait_for_each_other() {
    let served =
        serve(disk("d", NullConfig { irqmode: blockyard_null::IrqMode::Timer, ..plain() }));
    let mut guest = Guest::connect(&served, 1, 0);
    let data = bytes(1, 4096 * 16);
    for index in 0..16u64 {
        let (header, from) = (DATA + index * 32768, DATA + index * 32768 + 4096);
        guest.put(header, &print_header(kind::OUT, index * 8));
        guest.put(from, &data[index as usize * 4096..][..4096]);
        let odd = if index % 3 == 0 { 512 } else { 511 };
        let buffers = [
            out(header, 16),
            out(from, odd),
            out(from + u64::from(odd), 4096 - odd),
            into(header + 16, 1),
        ];
        guest.put(header + 16, &[0xff]);
        guest.offer(0, &buffers);
    }
    guest.kick(0);
    (0..16).for_each(|_| _ = guest.answer(0));
    (0..16u64).for_each(|index| assert_eq!(guest.get(DATA + index * 32768 + 16, 1), [0]));
    let (status, back) = guest.request(kind::IN, 0, &[], data.len());
    assert!(status == 0 && back == data);
}

#[test]
fn invalid_ranges_are_errors_and_change_nothing() {
    let served = serve(disk("d", NullConfig { bs: 4096, ..plain() }));
    let mut guest = Guest::connect(&served, 1, 0);
    let sectors = 16u64 << 20 >> 9;
    let before = bytes(7, 8192);
    assert_eq!(guest.request(kind::OUT, 0, &before, 0).0, 0);
    let page = vec![1; 4096];
    for (sector, data) in [
        (sectors, &page[..]),
        (sectors - 1, &page),
        (u64::MAX, &page),
        (u64::MAX - 7, &page),
        (1, &page),
        (0, &page[..512]),
        (0, &page[..4095]),
        (0, &[]),
    ] {
        assert_eq!(guest.request(kind::OUT, sector, data, 0).0, 1, "{sector} {}", data.len());
        assert_eq!(guest.request(kind::IN, sector, &[], data.len()).0, 1, "{sector}");
    }
    let range = |sector, sectors, flags| print_range(sector, sectors, flags);
    for (kind, range, wanted) in [
        (kind::DISCARD, range(0, 0, 0), 1),
        (kind::DISCARD, range(1, 8, 0), 1),
        (kind::DISCARD, range(sectors - 8, 16, 0), 1),
        (kind::DISCARD, range(u64::MAX, 8, 0), 1),
        (kind::DISCARD, range(0, 8, 1), 2),
        (kind::WRITE_ZEROES, range(0, 8, 2), 2),
        (kind::WRITE_ZEROES, range(0, 7, 0), 1),
    ] {
        assert_eq!(guest.request(kind, 0, &range, 0).0, wanted, "{kind} {range:?}");
        // A valid segment before an invalid one changes nothing either.
        let both = [print_range(8, 8, 0), range].concat();
        assert_eq!(guest.request(kind, 0, &both, 0).0, wanted);
    }
    assert_eq!(guest.request(kind::DISCARD, 0, &[0; 15], 0).0, 1);
    assert_eq!(guest.request(kind::DISCARD, 0, &[0; 16 * 33], 0).0, 1);
    let (status, back) = guest.request(kind::IN, 0, &[], 8192);
    assert!(status == 0 && back == before);
}

#[test]
fn discards_and_zeroes_clear_their_segments() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    for (kind, flags) in [(kind::DISCARD, 0), (kind::WRITE_ZEROES, 0), (kind::WRITE_ZEROES, 1)] {
        let mut data = bytes(flags.into(), 64 << 10);
        assert_eq!(guest.request(kind::OUT, 0, &data, 0).0, 0);
        let ranges = [print_range(8, 16, flags), print_range(100, 1, flags)].concat();
        assert_eq!(guest.request(kind, 0, &ranges, 0).0, 0);
        data[8 * 512..24 * 512].fill(0);
        data[100 * 512..101 * 512].fill(0);
        let (status, back) = guest.request(kind::IN, 0, &[], data.len());
        assert!(status == 0 && back == data, "{kind} {flags}");
    }
}

/// A guest that cannot flush has its writes after a power cut; another one after a flush.
#[test]
fn writes_are_durable_when_the_guest_relies_on_it() {
    const NEW: [u8; 512] = [1; 512];
    for (without, flushes, is_kept) in
        [(0, false, false), (0, true, true), (feature::FLUSH, false, true)]
    {
        let disk = disk("d", NullConfig { cache_size: 1 << 20, ..plain() });
        let served = serve(Arc::clone(&disk));
        let mut guest = Guest::connect(&served, 1, without);
        assert_eq!(guest.request(kind::OUT, 0, &NEW, 0).0, 0);
        if flushes {
            assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 0);
        }
        let (name, value) = ("power_cut".to_owned(), String::new());
        disk.inject(&Injection::Device { name, value }).unwrap();
        let (status, back) = guest.request(kind::IN, 0, &[], 512);
        assert_eq!((status, back == NEW), (0, is_kept), "{without:#x} {flushes}");
        if without == feature::FLUSH {
            let zeroes = print_range(0, 1, 0);
            assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &zeroes, 0).0, 0);
            let (name, value) = ("power_cut".to_owned(), String::new());
            disk.inject(&Injection::Device { name, value }).unwrap();
            assert_eq!(guest.request(kind::IN, 0, &[], 512), (0, vec![0; 512]));
        }
    }
}

#[test]
fn a_read_only_disk_says_so_and_refuses_changes() {
    let null = blockyard_null::Null::open(plain()).unwrap();
    let config = blockyard_core::channel::ChannelConfig { depth: 64 };
    let disk = blockyard_core::Composed::new("d".to_owned(), "null", null, config).read_only();
    let served = serve(std::sync::Arc::new(disk));
    let mut guest = Guest::connect(&served, 1, 0);
    assert_ne!(guest.features & feature::RO, 0);
    assert_eq!(guest.features & (feature::DISCARD | feature::WRITE_ZEROES), 0);
    assert_eq!(guest.request(kind::OUT, 0, &[1; 512], 0).0, 1);
    assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &print_range(0, 8, 0), 0).0, 1);
    let (status, back) = guest.request(kind::IN, 0, &[], 512);
    assert_eq!((status, back), (0, vec![0; 512]));
}

/// The zones of a report: capacity, start, write pointer, type, condition.
fn zones(report: &[u8]) -> Vec<(u64, u64, u64, u8, u8)> {
    let count = u64::from_le_bytes(report[..8].try_into().unwrap()) as usize;
    let zone = |zone: &[u8]| {
        let word = |at: usize| u64::from_le_bytes(zone[at..at + 8].try_into().unwrap());
        (word(0), word(8), word(16), zone[24], zone[25])
    };
    report[64..].chunks(64).take(count).map(zone).collect()
}

/// A device that cannot report the zones from this sector on.
struct ReportsUntil(u64);

impl DiskWatch for ReportsUntil {
    fn report_zones(&self, from: Sector) -> Result<(), DeviceError> {
        match from.0 < self.0 {
            true => Ok(()),
            false => Err(DeviceError::Os { what: "zones", errno: 5 }),
        }
    }
}

/// The bug: the guest got an empty report, which means that the disk has no more zones.
#[test]
fn zone_report_that_the_device_refuses_fails() {
    const ZONES: u64 = 100;
    const ZONE: u64 = 2048;
    let config = NullConfig { size: ZONES << 20, ..zoned() };
    let fails_from = Arc::new(ReportsUntil(64 * ZONE));
    let served = serve(WatchedDisk::over(disk("z", config), fails_from));
    let mut guest = Guest::connect(&served, 1, 0);
    let (status, report) = guest.request(kind::ZONE_REPORT, 0, &[], 64 * 100);
    assert_eq!((status, zones(&report).len()), (0, 64), "the zones before the failure");
    assert_eq!(guest.request(kind::ZONE_REPORT, 64 * ZONE, &[], 128).0, 1);
    assert_eq!(guest.request(kind::ZONE_REPORT, 64 * ZONE, &[], 64).0, 0, "the header alone");
    assert_eq!(served.server.info().errors, 1);
}

#[test]
fn a_zoned_disk_has_zones() {
    const ZONE: u64 = 2048;
    let served = serve(disk("z", zoned()));
    let mut guest = Guest::connect(&served, 1, 0);
    assert_ne!(guest.features & feature::ZONED, 0);
    assert_eq!(guest.features & feature::DISCARD, 0);
    let config = guest.config();
    let fields = [72, 76, 80, 84, 88].map(|at| word(&config, at));
    assert_eq!((fields, config[92]), ([2048, 3, 5, 1536, 4096], 1));
    let (status, report) = guest.request(kind::ZONE_REPORT, 0, &[], 64 * 20);
    assert_eq!(status, 0);
    let all = zones(&report);
    assert_eq!(all.len(), 8);
    assert_eq!(all[1], (2048, ZONE, 2 * ZONE, 1, 0), "conventional");
    assert_eq!(all[2], (1536, 2 * ZONE, 2 * ZONE, 2, 1));
    // As many as there is room for.
    let (_, report) = guest.request(kind::ZONE_REPORT, 3 * ZONE + 5, &[], 64 * 3 + 10);
    assert_eq!(zones(&report).iter().map(|zone| zone.1).collect::<Vec<_>>(), [3 * ZONE, 4 * ZONE]);
    // The bug: the answer named more bytes than the buffer has.
    assert_eq!(guest.request(kind::ZONE_REPORT, 0, &[], 63).0, 3, "no room for the header");
    assert_eq!(guest.request(kind::ZONE_REPORT, 0, &[], 64), (0, vec![0; 64]));
    let page = bytes(3, 4096);
    let mut status = |kind, sector, data: &[u8]| guest.request(kind, sector, data, 0).0;
    assert_eq!(status(kind::OUT, 2 * ZONE, &page), 0);
    assert_eq!(status(kind::OUT, 2 * ZONE, &page), 4, "not at the write pointer");
    assert_eq!(status(kind::OUT, 2 * ZONE + 1, &page), 4, "no multiple of the granularity");
    assert_eq!(status(kind::OUT, 3 * ZONE - 8, &[1; 8192]), 3, "two zones");
    assert_eq!(status(kind::OUT, ZONE - 8, &[1; 8192]), 0, "two conventional zones");
    assert_eq!(status(kind::ZONE_OPEN, 2 * ZONE + 8, &[]), 3, "no start of a zone");
    assert_eq!(status(kind::ZONE_OPEN, 0, &[]), 3, "a conventional zone");
    assert_eq!(status(kind::ZONE_OPEN, u64::MAX, &[]), 3);
    for zone in [3, 4, 5] {
        assert_eq!(status(kind::ZONE_OPEN, zone * ZONE, &[]), 0);
    }
    assert_eq!(status(kind::ZONE_OPEN, 6 * ZONE, &[]), 5, "open zones");
    assert_eq!(status(kind::ZONE_FINISH, 3 * ZONE, &[]), 0);
    assert_eq!(status(kind::OUT, 4 * ZONE, &page), 0);
    assert_eq!(status(kind::ZONE_CLOSE, 4 * ZONE, &[]), 0);
    assert_eq!(status(kind::OUT, 6 * ZONE, &page), 0);
    assert_eq!(status(kind::OUT, 7 * ZONE, &page), 0);
    assert_eq!(status(kind::ZONE_RESET, 3 * ZONE, &[]), 0);
    assert_eq!(status(kind::OUT, 3 * ZONE, &page), 6, "active zones");
    assert_eq!(status(kind::ZONE_RESET, 6 * ZONE, &[]), 0);
    let (_, report) = guest.request(kind::ZONE_REPORT, 2 * ZONE, &[], 64 * 7);
    let found: Vec<_> = zones(&report).iter().map(|zone| (zone.2 % ZONE, zone.4)).collect();
    let (empty, closed) = ((0, 1), (8, 4));
    assert_eq!((found[0], found[1], found[2], found[4]), (closed, empty, closed, empty));
    assert_eq!(guest.request(kind::ZONE_RESET_ALL, 0, &[], 0).0, 0);
    let (_, report) = guest.request(kind::ZONE_REPORT, 2 * ZONE, &[], 64 * 7);
    assert!(zones(&report).iter().all(|zone| zone.4 == 1));
}

/// The sector of an append comes before the status: VIRTIO 1.3, 5.2.6. Linux has a hole between
/// them: without it, its btrfs took every append for one to sector 0.
#[test]
fn an_append_returns_the_sector_of_its_data() {
    const ZONE: u64 = 2048;
    let served = serve(disk("z", zoned()));
    let mut guest = Guest::connect(&served, 1, 0);
    let (header, from, tail) = (DATA, DATA + 4096, DATA + (64 << 10));
    let mut sector = 3 * ZONE;
    for (round, lens) in [&[8192][..], &[4096, 4096], &[100, 8092], &[1]].iter().enumerate() {
        let data = bytes(round as u64, 8192);
        guest.put(header, &print_header(kind::ZONE_APPEND, 3 * ZONE));
        guest.put(from, &data);
        guest.put(tail, &[0xff; 9]);
        let mut buffers = vec![out(header, 16)];
        buffers.extend(cut(from, 8192, lens, false));
        // The tail lies in two buffers.
        buffers.extend([into(tail, 5), into(tail + 5, 4)]);
        guest.offer(0, &buffers);
        guest.kick(0);
        assert_eq!(guest.answer(0).1, 9);
        let found = guest.get(tail, 9);
        assert_eq!((&found[..8], found[8]), (&sector.to_le_bytes()[..], 0), "{lens:?}");
        let (status, back) = guest.request(kind::IN, sector, &[], 8192);
        assert!(status == 0 && back == data, "{lens:?}");
        sector += 16;
        guest.put(header, &print_header(kind::ZONE_APPEND, 3 * ZONE));
        guest.put(tail, &[0xff; 16]);
        guest.offer(0, &[out(header, 16), out(from, 4096), into(tail, 16)]);
        guest.kick(0);
        guest.answer(0);
        let found = guest.get(tail, 16);
        assert_eq!((&found[..8], found[15]), (&sector.to_le_bytes()[..], 0));
        sector += 8;
    }
    for (at, len, wanted) in [(0, 4096, 3), (3 * ZONE + 8, 4096, 3), (3 * ZONE, 512, 4)] {
        guest.put(header, &print_header(kind::ZONE_APPEND, at));
        guest.offer(0, &[out(header, 16), out(from, len), into(tail, 9)]);
        guest.kick(0);
        guest.answer(0);
        assert_eq!(guest.get(tail + 8, 1), [wanted], "{at} {len}");
    }
}

#[test]
fn rings_are_served_concurrently_each_by_its_thread() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 4, 0);
    for round in 0..200u64 {
        for ring in 0..4 {
            let header = DATA + (ring as u64) * (256 << 10);
            let from = header + 4096;
            let data = bytes(round * 4 + ring as u64, 4096);
            guest.put(header, &print_header(kind::OUT, ring as u64 * 4096 + round * 8));
            guest.put(from, &data);
            guest.put(header + 16, &[0xff]);
            guest.offer(ring, &[out(header, 16), out(from, 4096), into(header + 16, 1)]);
            guest.kick(ring);
        }
        for ring in 0..4 {
            guest.answer(ring);
            assert_eq!(guest.get(DATA + (ring as u64) * (256 << 10) + 16, 1), [0]);
        }
    }
    assert_eq!(served.server.info().queues, 4);
    for ring in 0..4u64 {
        for round in [0, 99, 199] {
            let (status, back) = guest.request(kind::IN, ring * 4096 + round * 8, &[], 4096);
            assert!(status == 0 && back == bytes(round * 4 + ring, 4096));
        }
    }
}

/// A file on a disk answers when no kick comes: its io_uring wakes the thread.
#[test]
fn a_thread_that_sleeps_is_woken_by_its_device() {
    let path = std::env::temp_dir().join(format!("blockyard-vhost-{}-file", std::process::id()));
    let config = FileConfig { size: 16 << 20, ..FileConfig::new(&path) };
    let file = FileDevice::open(&config).unwrap();
    // The open file stays.
    std::fs::remove_file(&path).unwrap();
    let disk = Composed::new("f".to_owned(), "file", file, ChannelConfig { depth: 64 });
    let served = serve(Arc::new(disk));
    let mut guest = Guest::connect(&served, 1, 0);
    for round in 0..100u64 {
        let data = bytes(round, 4096);
        assert_eq!(guest.request(kind::OUT, 8 * round, &data, 0).0, 0);
        assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 0);
        let (status, back) = guest.request(kind::IN, 8 * round, &[], 4096);
        assert!(status == 0 && back == data, "round {round}");
    }
    let blocks = 0..32;
    assert_eq!(request_blocks(&mut guest, kind::IN, blocks), [0; 32]);
}

/// Makes one request of 4 KiB for each of these blocks available at once, and waits for them.
/// Returns the statuses.
fn request_blocks(guest: &mut Guest, kind: u32, blocks: std::ops::Range<u64>) -> Vec<u8> {
    let (memory, count) = (guest.memory.clone(), blocks.end - blocks.start);
    let at = |index: u64| DATA + 8192 * index;
    let offer = |(index, block): (u64, u64)| {
        guest.put(at(index), &print_header(kind, 8 * block));
        guest.put(at(index) + 16, &[0xff]);
        let is_written = kind == kind::IN;
        let data = Buffer { at: at(index) + 4096, len: 4096, is_written };
        guest.rings[0].chain(&memory, &[out(at(index), 16), data, into(at(index) + 16, 1)])
    };
    let heads: Vec<u16> = (0..).zip(blocks).map(offer).collect();
    guest.rings[0].make_all_available(&memory, &heads);
    guest.kick(0);
    heads.iter().for_each(|_| _ = guest.answer(0));
    (0..count).map(|index| guest.get(at(index) + 16, 1)[0]).collect()
}

/// Requests that are executed inline are not merged; counts, latencies and injected faults are as
/// those of the others.
#[test]
fn requests_of_a_device_that_completes_at_once_are_executed_inline() {
    let device = Faulty::new(Null::open(plain()).unwrap(), 1);
    let disk = Composed::new("f".to_owned(), "null", device, ChannelConfig::default());
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let served = serve(Arc::clone(&disk));
    let mut guest = Guest::connect(&served, 1, 0);
    // The first request after a change of the rules is pushed.
    assert_eq!(guest.request(kind::IN, 0, &[], 4096).0, 0);
    for round in 1..=10 {
        assert_eq!(request_blocks(&mut guest, kind::IN, 0..32), [0; 32]);
        let stats = disk.stats();
        let reads = stats.op(Op::Read);
        assert_eq!((reads.ops, reads.sectors, reads.merges), (1 + 32 * round, 8 + 256 * round, 0));
        // A sample counts for the requests since the one before.
        let timed: u64 = stats.read_latency.iter().sum();
        assert!((reads.ops - 31..=reads.ops).contains(&timed), "{timed} of {}", reads.ops);
    }
    let rule =
        Rule { op: Some(Op::Read), start: Sector(64), sectors: 8, ..Rule::new(Status::Medium) };
    disk.inject(&Injection::AddRule(rule)).unwrap();
    let mut wanted = [0; 32];
    wanted[8] = 1;
    assert_eq!(request_blocks(&mut guest, kind::IN, 0..32), wanted);
    disk.inject(&Injection::RemoveRules).unwrap();
    assert_eq!(request_blocks(&mut guest, kind::IN, 0..32), [0; 32]);
    assert_eq!(served.server.info().errors, 1);
    assert_eq!(disk.stats().op(Op::Read).errors, 1);
}

/// A device that is recorded declines to execute inline, so that a trace has every request. After
/// the recording, requests are executed inline again.
#[test]
fn a_trace_records_requests_that_are_executed_inline_without_it() {
    let device = Faulty::new(Null::open(plain()).unwrap(), 1);
    let disk = Composed::new("t".to_owned(), "null", device, ChannelConfig::default());
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let served = serve(Arc::clone(&disk));
    let mut guest = Guest::connect(&served, 1, 0);
    // The first request after a change is pushed.
    assert_eq!(guest.request(kind::IN, 0, &[], 4096).0, 0);
    assert_eq!(request_blocks(&mut guest, kind::IN, 0..32), [0; 32]);
    let merges = || disk.stats().op(Op::Read).merges + disk.stats().op(Op::Write).merges;
    assert_eq!(merges(), 0, "executed inline");
    let source = TraceSource { thread_id: || 7, now: || Monotonic.now() };
    let recording = disk.trace_point().unwrap().record(source).unwrap();
    assert_eq!(request_blocks(&mut guest, kind::OUT, 64..96), [0; 32]);
    assert_eq!(request_blocks(&mut guest, kind::IN, 128..160), [0; 32]);
    assert_eq!(merges(), 62, "pushed together, and merged");
    recording.detach();
    assert_eq!(guest.request(kind::IN, 0, &[], 4096).0, 0);
    assert_eq!(request_blocks(&mut guest, kind::IN, 192..224), [0; 32]);
    assert_eq!(merges(), 62, "executed inline again");
    let (mut events, mut lost, mut next) = (Vec::new(), Vec::new(), Some(0));
    while let Some(position) = next {
        next = recording.recorder().drain(position, &mut events, &mut lost);
    }
    assert!(lost.is_empty(), "{lost:?}");
    let of = |kind| {
        let events = events.iter().filter(move |event| event.kind == kind);
        events.map(|event| (event.op, event.sector.0, event.sectors)).collect::<Vec<_>>()
    };
    let each = |op, first: u64| (first..first + 32).map(move |block| (op, 8 * block, 8));
    let queued: Vec<_> = each(Op::Write, 64).chain(each(Op::Read, 128)).collect();
    assert_eq!(of(TraceKind::Queue), queued);
    assert_eq!(of(TraceKind::Complete), [(Op::Write, 512, 256), (Op::Read, 1024, 256)]);
}

/// A write of 4 KiB makes a RAM disk with units of 64 KiB compress a unit again: 40 writes were 40
/// compressions, and a batch was not longer than 32.
#[test]
fn parts_of_physical_blocks_are_merged() {
    let config = RamConfig { size: 16 << 20, unit: 64 << 10, ..RamConfig::default() };
    let device = Ram::open(config).unwrap();
    let disk = Composed::new("r".to_owned(), "ram", device, ChannelConfig::default());
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let served = serve(Arc::clone(&disk));
    let mut guest = Guest::connect(&served, 1, 0);
    assert_eq!(request_blocks(&mut guest, kind::OUT, 0..40), [0; 40]);
    let stats = disk.stats();
    assert_eq!((stats.op(Op::Write).ops, stats.op(Op::Write).merges), (40, 39));
}
