//! After open, the path from push to reap makes no allocation through the global allocator, from
//! the first write on. Memory for data comes from the system, and the pool's tables have reserved
//! addresses.

use std::sync::Arc;

use blockyard_core::channel::{Channel, ChannelConfig};
use blockyard_core::{Bio, BufRef, Composed, Disk, Op, Region, Sector};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig};
use blockyard_testing::allocations::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BATCH: usize = 32;
/// Bytes of buffer per bio.
const ROOM: u64 = 64 << 10;

/// Sends batches of all kinds through a channel twice: into an empty pool, and over existing data.
fn allocations(config: RamConfig) -> u64 {
    let blocks = config.size / u64::from(config.bs);
    let sectors = u64::from(config.bs) / 512;
    let ram = Ram::open(config).expect("the configuration fits");
    let depth = ChannelConfig::default();
    let disk = Composed::new("r".to_owned(), "ram", ram, depth);
    let mut channel = disk.open().expect("a fresh device opens");
    let region = Region::alloc(BATCH * ROOM as usize);
    let id = channel.register(Arc::clone(&region));
    let mut noise = fastrand::Rng::with_seed(5);
    let mut data = vec![0; ROOM as usize];
    let mut bios = Vec::with_capacity(BATCH);
    let mut out = Vec::with_capacity(BATCH);
    let before = Counting::made();
    for turn in 0..128u64 {
        let round = turn % 64;
        // The share of noise grows: same-filled, compressible, huge.
        noise.fill(&mut data[..(ROOM * round / 64) as usize]);
        for slot in 0..BATCH as u64 {
            region.write(slot * ROOM, &data);
        }
        for kind in 0..5 {
            bios.clear();
            for index in 0..BATCH as u64 {
                let buf = BufRef { region: id, offset: index * ROOM };
                let at = Sector((index * 7919 + round * 31) % (blocks - 64) * sectors);
                bios.push(match kind {
                    0 => Bio::write(at, sectors, buf),
                    1 => Bio::write(at, sectors * 8, buf),
                    2 => Bio::read(at, sectors * 16, buf),
                    3 if index % 8 == 0 => Bio::new(Op::Discard, at, sectors * 3),
                    3 if index % 8 == 1 => Bio::new(Op::WriteZeroes, at, sectors * 3),
                    3 => Bio::read(at, sectors, buf),
                    _ => Bio::flush(),
                });
            }
            send(&mut *channel, &bios, &mut out);
        }
    }
    Counting::made() - before
}

fn send(channel: &mut dyn Channel, bios: &[Bio], out: &mut Vec<blockyard_core::Completion>) {
    assert_eq!(channel.push(bios), BATCH);
    channel.submit();
    out.clear();
    while out.len() < BATCH {
        channel.reap(out);
        channel.wait(None);
    }
    assert!(out.iter().all(|completion| completion.status.is_ok()), "{out:?}");
}

#[test]
fn nothing_is_allocated_after_open() {
    let plain = || RamConfig { size: 32 << 20, ..RamConfig::default() };
    assert_eq!(allocations(plain()), 0, "lz4");
    let parts = RamConfig { bs: 512, unit: 16_384, ..plain() };
    assert_eq!(allocations(parts), 0, "sub-block writes");
    assert_eq!(allocations(RamConfig { dedup: true, ..plain() }), 0, "equal blocks");
    if cfg!(feature = "c-codecs") {
        let codec = CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None };
        assert_eq!(allocations(RamConfig { codec, ..plain() }), 0, "zstd");
    }
}
