//! After a ring is served, reads, writes, discards, write-zeroes, flushes, requests for the serial
//! number and refused ones allocate nothing, on a file, also where each write is made durable; and
//! reads, writes, appends and zone management on a zoned disk. Data in one buffer and in several,
//! in blocks and in parts of blocks, in a table of descriptors and without one. Counted by the
//! allocator.
#![allow(clippy::unwrap_used)] // A test may.

mod guest;

use std::path::Path;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Disk};
use blockyard_file::{FileConfig, FileDevice};
use blockyard_testing::allocations::Counting;
use blockyard_testing::temp_dir::TempDir;
use blockyard_vhost::config_space::feature;
use blockyard_vhost::request::kind;
use guest::{Buffer, DATA, Guest, disk, into, out, print_header, print_range, serve, zoned};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: u64 = 8;

/// The allocations of the thread of the first ring of a device.
fn made(device: &str) -> u64 {
    let threads = Counting::made_by_thread();
    let ring = format!("vhost-{device}-0");
    let of_ring: Vec<u64> =
        threads.into_values().filter(|(name, _)| *name == ring).map(|it| it.1).collect();
    assert_eq!(of_ring.len(), 1, "the thread of the ring");
    of_ring[0]
}

/// Executes rounds of requests, and asserts that only the first one has allocated.
fn allocate_nothing(device: &str, mut requests: impl FnMut()) {
    requests();
    let before = made(device);
    (1..ROUNDS).for_each(|_| requests());
    assert_eq!(made(device) - before, 0, "{device}");
}

/// Executes a request for a sector, with data buffers of these lengths and a tail of this length
/// that the device writes, and returns its status. The descriptors are in a table if it is
/// `indirect`.
fn request(
    guest: &mut Guest,
    (kind, sector): (u32, u64),
    lens: &[u32],
    tail: u32,
    indirect: bool,
) -> u8 {
    let status = DATA + 16 + u64::from(tail) - 1;
    guest.put(DATA, &print_header(kind, sector));
    guest.put(status, &[0xff]);
    let mut chain: Vec<Buffer> = vec![out(DATA, 16)];
    let mut at = DATA + 4096;
    for len in lens {
        let is_read = matches!(kind, kind::IN | kind::ZONE_REPORT);
        chain.push(if is_read { into(at, *len) } else { out(at, *len) });
        at += u64::from(*len);
    }
    chain.push(into(DATA + 16, tail));
    match indirect {
        true => guest.offer_indirect(0, DATA + 1024, &chain),
        false => guest.offer(0, &chain),
    };
    guest.kick(0);
    guest.answer(0);
    guest.get(status, 1)[0]
}

/// The first sequential zone.
const ZONE: u64 = 2 * 2048;

/// Data buffers: one, several, and several that are no whole blocks.
const BUFFERS: [&[u32]; 3] = [&[4096], &[4096, 8192], &[100, 3996]];

#[test]
fn requests_to_a_file_allocate_nothing() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "vhost-no-allocation");
    // Without FLUSH, each write is durable when it is answered.
    for (device, without) in [("f", 0), ("w", feature::FLUSH)] {
        let config = FileConfig { size: 8 << 20, ..FileConfig::new(place.fresh()) };
        let file = FileDevice::open(&config).unwrap();
        let disk = Composed::new(device.to_owned(), "file", file, ChannelConfig { depth: 64 });
        let served = serve(Arc::new(disk) as Arc<dyn Disk>);
        let mut guest = Guest::connect(&served, 1, without);
        allocate_nothing(device, || {
            for indirect in [false, true] {
                for kind in [kind::OUT, kind::IN] {
                    for lens in BUFFERS {
                        let status = request(&mut guest, (kind, 0), lens, 1, indirect);
                        assert_eq!(status, 0, "{kind}, {lens:?}");
                    }
                }
                for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
                    let ranges = [print_range(0, 8, 0), print_range(64, 8, 0)].concat();
                    guest.put(DATA + 4096, &ranges);
                    assert_eq!(request(&mut guest, (kind, 0), &[32], 1, indirect), 0, "{kind}");
                }
            }
            if without == 0 {
                assert_eq!(request(&mut guest, (kind::FLUSH, 0), &[], 1, false), 0);
            }
            assert_eq!(guest.request(kind::GET_ID, 0, &[], 20).0, 0);
            assert_eq!(request(&mut guest, (99, 0), &[], 1, false), 2, "an unknown type");
        });
    }
}

#[test]
fn requests_to_a_zoned_disk_allocate_nothing() {
    let served = serve(disk("z", zoned()));
    let mut guest = Guest::connect(&served, 1, 0);
    allocate_nothing("z", || {
        for indirect in [false, true] {
            let mut run = |kind, sector, lens: &[u32], tail| {
                let status = request(&mut guest, (kind, sector), lens, tail, indirect);
                assert_eq!(status, 0, "{kind}, {lens:?}");
            };
            run(kind::ZONE_RESET, ZONE, &[], 1);
            run(kind::ZONE_OPEN, ZONE, &[], 1);
            let mut at = ZONE;
            for lens in BUFFERS {
                run(kind::OUT, at, lens, 1);
                run(kind::IN, at, lens, 1);
                at += u64::from(lens.iter().sum::<u32>()) / 512;
                // The sector comes before the status.
                run(kind::ZONE_APPEND, ZONE, lens, 9);
                at += u64::from(lens.iter().sum::<u32>()) / 512;
            }
            run(kind::ZONE_CLOSE, ZONE, &[], 1);
            run(kind::ZONE_FINISH, ZONE, &[], 1);
            run(kind::ZONE_REPORT, 0, &[4096], 1);
            run(kind::ZONE_RESET_ALL, 0, &[], 1);
        }
    });
}
