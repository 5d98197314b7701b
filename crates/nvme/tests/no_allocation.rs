//! After its Connect, an I/O queue allocates nothing for reads and writes, counted by the allocator
//! itself, over a real socket: with null devices no thread allocates, with a RAM disk none of the
//! target. A volume allocates for each write.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use std::io::{Read, Write};
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Device, Disk};
use blockyard_null::{Null, NullConfig};
use blockyard_ram::{Ram, RamConfig};
use blockyard_testing::allocations::Counting;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Volume, VolumeConfig};
use initiator::{
    HOST, Initiator, command, crc32c, h2c_header, pattern, plain, pointed, target, zoned,
};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const APPEND: u8 = 0x7d;
/// The name of the thread of the host.
const THIS_THREAD: &str = "host";
/// The bytes of a block, on every device.
const BLOCK_BYTES: usize = 4096;
/// The blocks of a long read or write.
const LONG_BLOCKS: u64 = (LONG_BYTES / BLOCK_BYTES) as u64;
const DEPTH: u16 = 32;
const ROUNDS: u64 = 80;
const WRITES: u64 = ROUNDS * DEPTH as u64 / 2;
/// The most allocations of a write to a volume: its data, the list of its blocks and the counter of
/// their owners (`Payload`), which the log and the map share until they are durable, and what the
/// map needs for a block. They were 4.6 on average.
const VOLUME_WRITE_MAX: u64 = 6;
const SHORT_BYTES: usize = 4096;
const LONG_BYTES: usize = 16384;

/// What a host sends, printed before anything is counted.
struct Printed {
    /// The capsules of a round: reads of both lengths, writes in capsules and by R2T.
    capsules: Vec<u8>,
    /// The data of a write by R2T, whose tag and command id are still to be filled in.
    data: Vec<u8>,
    /// The blocks of a long read or write.
    long: Vec<u8>,
}

/// `append_zone` is the first block of the zone to which a device appends that is not written in
/// place.
fn print(io: &Initiator, append_zone: Option<u64>) -> Printed {
    let (long, mut capsules) = (pattern(LONG_BYTES, 7), Vec::new());
    let written = append_zone.map_or(WRITE, |_| APPEND);
    for cid in 0..DEPTH {
        let (opcode, kind, len) = match cid % 4 {
            0 => (READ, 0x5a, LONG_BYTES),
            1 => (READ, 0x5a, SHORT_BYTES),
            2 => (written, 0x5a, LONG_BYTES),
            _ => (written, 0x01, SHORT_BYTES),
        };
        // Each command has blocks of its own, those of the reads being written in advance.
        let slba = match append_zone {
            Some(zone) if opcode == APPEND => zone,
            _ => u64::from(cid) * LONG_BLOCKS,
        };
        let mut sqe = pointed(command(opcode, slba, (len / BLOCK_BYTES) as u32), kind, len);
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        let in_capsule = if kind == 0x01 { &long[..len] } else { &[] };
        capsules.extend_from_slice(&io.print(4, &sqe, in_capsule));
    }
    let data = io.print(6, &h2c_header(0, 0, 0, LONG_BYTES as u32), &long);
    Printed { capsules, data, long }
}

/// Executes the commands of a round, without an allocation.
fn execute(io: &mut Initiator, printed: &mut Printed, buffer: &mut [u8]) {
    let digest_bytes = if io.header_digest { 4 } else { 0 };
    io.stream.write_all(&printed.capsules).unwrap();
    let mut left = DEPTH;
    while left > 0 {
        io.stream.read_exact(&mut buffer[..8]).unwrap();
        let len = u32::from_le_bytes(buffer[4..8].try_into().unwrap()) as usize;
        io.stream.read_exact(&mut buffer[8..len]).unwrap();
        match buffer[0] {
            5 => {
                assert_eq!(buffer[22..24], [0, 0], "the status");
                left -= 1;
            }
            7 => {
                let at = 24 + digest_bytes;
                let len = u32::from_le_bytes(buffer[16..20].try_into().unwrap()) as usize;
                assert!(buffer[at..at + len] == printed.long[..len], "other data");
                // SUCCESS: without a completion.
                left -= u16::from(buffer[1] >> 3 & 1);
            }
            9 => {
                // The command id and the tag.
                printed.data[8..12].copy_from_slice(&buffer[8..12]);
                if io.header_digest {
                    let digest = crc32c(&printed.data[..24]);
                    printed.data[24..28].copy_from_slice(&digest.to_le_bytes());
                }
                io.stream.write_all(&printed.data).unwrap();
            }
            kind => panic!("a PDU of type {kind}"),
        }
    }
}

fn composed<D: Device>(name: &str, device: D) -> Arc<dyn Disk> {
    Arc::new(Composed::new(name.to_owned(), "test", device, ChannelConfig { depth: 64 }))
}

/// Sends rounds of commands by a queue for the device. Returns the number of allocations meanwhile,
/// and the threads that made them.
fn allocations(disk: Arc<dyn Disk>, digests: u8, flags: u8) -> (u64, Vec<(String, u64)>) {
    let mut buffer = vec![0; 2 * LONG_BYTES];
    let zones = disk.geometry().zones.as_ref();
    let append_zone = zones.map(|zones| zones.zone_sectors * 512 / BLOCK_BYTES as u64);
    let target = target();
    let nqn = format!("nqn.2026-11.io.blockyard:{}", disk.name());
    target.subsystems.add(nqn.rsplit_once(':').unwrap().1, disk).unwrap();
    let (_admin, controller) = target.admin(&nqn, digests);
    let mut io = target.io(&nqn, controller, digests, flags);
    for cid in 0..u64::from(DEPTH) {
        let sqe = command(WRITE, cid * LONG_BLOCKS, LONG_BLOCKS as u32);
        assert_eq!(io.write(sqe, &pattern(LONG_BYTES, 7)).status, 0);
    }
    let mut printed = print(&io, append_zone);
    execute(&mut io, &mut printed, &mut buffer);
    let threads = Counting::made_by_thread();
    let before = Counting::made_by_all();
    for _ in 0..ROUNDS {
        execute(&mut io, &mut printed, &mut buffer);
    }
    let made = Counting::made_by_all() - before;
    let by_thread = Counting::made_by_thread().into_iter().filter_map(|(id, (name, count))| {
        let before = threads.get(&id).map_or(0, |(_, count)| *count);
        // This thread allocates to read the names.
        (count > before && name != THIS_THREAD).then(|| (name, count - before))
    });
    let by_thread = by_thread.collect();
    let links = target.server.connections();
    let queue = links.iter().find(|link| link.queue == Some(1)).unwrap();
    assert!(queue.commands > ROUNDS * u64::from(DEPTH), "{queue:?}");
    assert_eq!((queue.host.as_deref(), queue.errors), (Some(HOST), 0));
    (made, by_thread)
}

#[test]
fn reads_and_writes_after_the_connect_allocate_nothing() {
    std::thread::Builder::new().name(THIS_THREAD.to_owned()).spawn(check).unwrap().join().unwrap();
}

fn check() {
    let null = || {
        let config = NullConfig { bs: BLOCK_BYTES as u32, ..plain() };
        composed("null", Null::open(config).unwrap())
    };
    // Without digests and with them, and with and without flow control.
    for (digests, flags) in [(0, 0), (3, 0), (0, 4)] {
        let made = allocations(null(), digests, flags);
        assert_eq!(made, (0, Vec::new()), "digests {digests}, flags {flags}");
    }
    // The appends of all rounds fit into a zone.
    let (size, zone_size) = (256 << 20, 64 << 20);
    let config = NullConfig { size, zone_size, zone_capacity: zone_size, ..zoned() };
    let made = allocations(composed("zones", Null::open(config).unwrap()), 0, 0);
    assert_eq!(made, (0, Vec::new()), "zoned");
    let ram = Ram::open(RamConfig { size, ..RamConfig::default() }).unwrap();
    // Its compactor allocates, in a thread of its own.
    assert_eq!(by_target(&allocations(composed("ram", ram), 0, 0).1), 0, "RAM disk");
    let place = TempDir::new(&std::env::temp_dir(), "nvme-no-allocation");
    let config = VolumeConfig {
        size,
        volblocksize: BLOCK_BYTES as u32,
        ..VolumeConfig::new(place.path().join("pool"), "v")
    };
    let (_, threads) = allocations(composed("v", Volume::open(config).unwrap()), 0, 0);
    let made = by_target(&threads);
    // The lower bound shows that the allocations of the target's threads are counted.
    let bounds = WRITES..=VOLUME_WRITE_MAX * WRITES;
    assert!(bounds.contains(&made), "{made} allocations for {WRITES} writes");
}

/// The allocations of the target's threads, which call the devices.
fn by_target(threads: &[(String, u64)]) -> u64 {
    let of_target = threads.iter().filter(|(name, _)| name.starts_with("nvme-"));
    of_target.map(|(_, made)| made).sum()
}
