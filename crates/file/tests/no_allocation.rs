//! After a channel is open, requests of all kinds allocate nothing: counted by the allocator.
#![allow(clippy::unwrap_used)] // Test code.

use std::path::Path;
use std::sync::Arc;

use blockyard_core::{Bio, BufRef, Completion, Flags, Op, Region, Sector};
use blockyard_file::{Direct, FileConfig, FileDevice, IoEngine};
use blockyard_testing::allocations::Counting;
use blockyard_testing::capability::Capability;
use blockyard_testing::channel::channel;
use blockyard_testing::temp_dir::TempDir;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: u64 = 8 << 20;
const BATCH: u64 = 32;
const ROUNDS: u64 = 8;

/// The bio of one kind at one position of a batch.
fn bio(kind: u64, index: u64, round: u64, buf: BufRef) -> Bio {
    let sector = Sector((index * 61 + round * 7) % 2000 * 8);
    match kind {
        0 => Bio::write(sector, 8, buf),
        1 => Bio::read(sector, 8, buf),
        2 => Bio::write(sector, 8, buf).with_flags(Flags::FUA),
        3 => Bio::flush(),
        4 => Bio::new(Op::Discard, sector, 8),
        5 => Bio::new(Op::WriteZeroes, sector, 8).with_flags(Flags::FUA),
        6 => Bio::new(Op::WriteZeroes, sector, 8).with_flags(Flags::NOUNMAP),
        // At an address that direct I/O does not accept.
        _ => Bio::read(sector, 8, BufRef { offset: buf.offset + 1, ..buf }),
    }
}

fn allocations(config: &FileConfig) -> u64 {
    let device = Arc::new(FileDevice::open(config).unwrap());
    let mut channel = channel(&device);
    let region = channel.register(Region::alloc(((BATCH + 1) * 4096) as usize));
    let mut bios = Vec::with_capacity(BATCH as usize);
    let mut out: Vec<Completion> = Vec::with_capacity(BATCH as usize);
    let mut before = 0;
    for round in 0..ROUNDS {
        if round == 1 {
            before = Counting::made();
        }
        for kind in 0..8 {
            bios.clear();
            bios.extend(
                (0..BATCH)
                    .map(|index| bio(kind, index, round, BufRef { region, offset: index * 4096 })),
            );
            assert_eq!(channel.push(&bios), BATCH as usize);
            channel.submit();
            out.clear();
            while out.len() < BATCH as usize {
                channel.reap(&mut out);
                channel.wait(None);
            }
            let is_good = out.iter().all(|completion| completion.status.is_ok());
            assert!(is_good, "kind {kind}, round {round}");
        }
    }
    Counting::made() - before
}

#[test]
fn requests_allocate_nothing() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "no-allocation");
    for direct in [Direct::Auto, Direct::Off] {
        for io in [IoEngine::Uring, IoEngine::Blocking] {
            let config = FileConfig { size: SIZE, direct, io, ..FileConfig::new(place.fresh()) };
            match FileDevice::open(&config) {
                Err(error) if io == IoEngine::Uring => {
                    Capability::Uring.is_missing(error);
                    continue;
                }
                opened => drop(opened.unwrap()),
            }
            assert_eq!(allocations(&config), 0, "{direct:?} {io:?}");
        }
    }
}
