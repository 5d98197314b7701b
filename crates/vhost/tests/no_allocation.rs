//! After a ring is served, requests of all kinds allocate nothing: counted by the allocator.
#![allow(clippy::unwrap_used)] // A test may.

mod guest;

use std::path::Path;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Disk};
use blockyard_file::{FileConfig, FileDevice};
use blockyard_testing::allocations::Counting;
use blockyard_testing::temp_dir::TempDir;
use blockyard_vhost::request::kind;
use guest::{DATA, Guest, into, out, print_header, print_range, serve};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: u64 = 8;

/// The allocations of the thread of the ring.
fn made() -> u64 {
    let threads = Counting::made_by_thread();
    let of_ring: Vec<u64> =
        threads.into_values().filter(|(name, _)| name == "vhost-d-0").map(|it| it.1).collect();
    assert_eq!(of_ring.len(), 1, "the thread of the ring");
    of_ring[0]
}

/// Executes a request of these data buffers, and returns its status.
fn request(guest: &mut Guest, kind: u32, lens: &[u32]) -> u8 {
    guest.put(DATA, &print_header(kind, 0));
    guest.put(DATA + 16, &[0xff]);
    let mut chain = vec![out(DATA, 16)];
    let mut at = DATA + 4096;
    for len in lens {
        chain.push(if kind == kind::IN { into(at, *len) } else { out(at, *len) });
        at += u64::from(*len);
    }
    chain.push(into(DATA + 16, 1));
    guest.offer(0, &chain);
    guest.kick(0);
    guest.answer(0);
    guest.get(DATA + 16, 1)[0]
}

#[test]
fn requests_allocate_nothing() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "vhost-no-allocation");
    let config = FileConfig { size: 8 << 20, ..FileConfig::new(place.fresh()) };
    let file = FileDevice::open(&config).unwrap();
    let disk = Composed::new("d".to_owned(), "file", file, ChannelConfig { depth: 64 });
    let served = serve(Arc::new(disk) as Arc<dyn Disk>);
    let mut guest = Guest::connect(&served, 1, 0);
    let mut before = 0;
    for round in 0..ROUNDS {
        if round == 1 {
            before = made();
        }
        for kind in [kind::OUT, kind::IN] {
            // One buffer, several, and several that are no whole blocks.
            for lens in [&[4096][..], &[4096, 8192], &[100, 3996]] {
                assert_eq!(request(&mut guest, kind, lens), 0, "{kind}, {lens:?}");
            }
        }
        for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
            guest.put(DATA + 4096, &[print_range(0, 8, 0), print_range(64, 8, 0)].concat());
            assert_eq!(request(&mut guest, kind, &[32]), 0, "{kind}");
        }
        assert_eq!(request(&mut guest, kind::FLUSH, &[]), 0);
        assert_eq!(guest.request(kind::GET_ID, 0, &[], 20).0, 0);
        assert_eq!(request(&mut guest, 99, &[]), 2, "an unknown type");
    }
    assert_eq!(made() - before, 0);
}
