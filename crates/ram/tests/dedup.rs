//! Deduplication: equal blocks share one object, and different blocks do not, whatever writes,
//! discards, recompresses, moves or saves them.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::Injection;
use blockyard_core::{Bio, Composed, Device, Disk, Flags, Op, Sector, Status};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig, Selection};

const SIZE: u64 = 8 << 20;
const BLOCK: usize = 4096;
const BLOCKS: usize = SIZE as usize / BLOCK;

fn plain() -> RamConfig {
    // Compaction runs only on request, so that counters are reproducible.
    RamConfig { size: SIZE, dedup: true, compact: 0, ..RamConfig::default() }
}

fn open(config: RamConfig) -> Arc<Ram> {
    Ram::open(config).unwrap()
}

fn io(ram: &Arc<Ram>) -> Io {
    let (name, depth) = ("r".to_owned(), ChannelConfig::default());
    let disk = Composed::new(name, "ram", Arc::clone(ram), depth);
    Io::new(disk.open().unwrap(), 1 << 20)
}

/// The contents with this number: some are noise, others compress to various sizes.
fn contents(number: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(number);
    let mut data = vec![0x20; BLOCK];
    let noise = if number.is_multiple_of(5) { BLOCK } else { rng.usize(100..3000) };
    rng.fill(&mut data[..noise]);
    data
}

fn write(io: &mut Io, block: usize, data: &[u8]) -> Result<(), Status> {
    io.write(Sector(block as u64 * 8), data, Flags::NONE)
}

#[track_caller]
fn compare(io: &mut Io, wanted: impl Fn(usize) -> Vec<u8>, blocks: impl Iterator<Item = usize>) {
    let mut found = vec![0; BLOCK];
    for block in blocks {
        io.read(Sector(block as u64 * 8), &mut found).unwrap();
        assert!(found == wanted(block), "block {block}");
    }
}

fn discard(io: &mut Io, first: usize, count: usize) {
    io.run(Bio::new(Op::Discard, Sector(first as u64 * 8), count as u64 * 8)).unwrap();
}

/// Discards everything; then nothing is stored, shared or leaked.
#[track_caller]
fn empty(ram: &Ram, io: &mut Io) {
    discard(io, 0, BLOCKS);
    ram.compact().unwrap();
    let stats = ram.stats();
    let mm = stats.mm;
    let left = [mm.orig_data_size, mm.compr_data_size, mm.same_pages, mm.huge_pages];
    assert_eq!((left, stats.dedup.dup_data_size), ([0; 4], 0), "{stats:?}");
    assert_eq!(mm.mem_used_total, stats.dedup.meta_data_size, "{stats:?}");
    assert!(ram.size_classes().is_empty());
}

#[test]
fn equal_blocks_are_stored_once() {
    let (once, shared) = (open(RamConfig { dedup: false, ..plain() }), open(plain()));
    let (mut one, mut io) = (io(&once), io(&shared));
    // 400 different contents, three times each, and two blocks that differ in one byte.
    for block in 0..400 {
        write(&mut one, block, &contents(block as u64)).unwrap();
    }
    for block in 0..1200 {
        write(&mut io, block, &contents(block as u64 % 400)).unwrap();
    }
    let (alone, three) = (once.stats(), shared.stats());
    assert_eq!(three.mm.compr_data_size, alone.mm.compr_data_size);
    assert_eq!(three.dedup.dup_data_size, 2 * alone.mm.compr_data_size);
    assert_eq!(three.mm.orig_data_size, 3 * alone.mm.orig_data_size);
    assert_eq!((three.mm.huge_pages, alone.mm.huge_pages), (240, 80));
    assert_eq!(three.dedup.meta_data_size, 8 * BLOCKS as u64);
    assert_eq!((alone.dedup.dup_data_size, alone.dedup.meta_data_size), (0, 0));
    let most = alone.mm.mem_used_total + three.dedup.meta_data_size;
    assert!(three.mm.mem_used_total <= most + most / 50, "{three:?} {alone:?}");
    compare(&mut io, |block| contents(block as u64 % 400), 0..1200);
    let mut other = contents(0);
    other[4095] ^= 1;
    write(&mut io, 1300, &other).unwrap();
    assert_eq!(shared.stats().mm.compr_data_size, alone.mm.compr_data_size + 4096);
    // Writing them again changes nothing; nor does a block that takes no memory.
    (0..1200).for_each(|block| write(&mut io, block, &contents(block as u64 % 400)).unwrap());
    assert_eq!(shared.stats().dedup, three.dedup);
    write(&mut io, 1301, &[7; BLOCK]).unwrap();
    write(&mut io, 1302, &[7; BLOCK]).unwrap();
    assert_eq!(shared.stats().mm.same_pages, 2);
    // Two of three copies are overwritten or discarded: the third keeps the object.
    (0..400).for_each(|block| write(&mut io, block, &contents(block as u64 + 5000)).unwrap());
    discard(&mut io, 400, 400);
    shared.compact().unwrap();
    compare(&mut io, |block| contents(block as u64 % 400), 800..1200);
    compare(&mut io, |block| contents(block as u64 + 5000), 0..400);
    compare(&mut io, |_| vec![0; BLOCK], 400..800);
    assert_eq!(shared.stats().dedup.dup_data_size, 0);
    empty(&shared, &mut io);
}

/// A write of a part of a shared block does not change the other blocks.
#[test]
fn a_write_of_a_part_leaves_the_others_alone() {
    let ram = open(RamConfig { bs: 512, checksum: true, ..plain() });
    let mut io = io(&ram);
    (0..4).for_each(|block| write(&mut io, block, &contents(1)).unwrap());
    io.write(Sector(8 + 3), &[9; 512], Flags::NONE).unwrap();
    let mut changed = contents(1);
    changed[3 * 512..4 * 512].fill(9);
    let wanted = |block| if block == 1 { changed.clone() } else { contents(1) };
    compare(&mut io, wanted, 0..4);
    // An injected bit flip affects one block only; the others do not share it.
    let fault = Injection::Device { name: "flip".to_owned(), value: "16".to_owned() };
    ram.inject(&fault).unwrap();
    let mut found = vec![0; BLOCK];
    assert_eq!(io.read(Sector(16), &mut found), Err(Status::Protection));
    compare(&mut io, wanted, [0, 1, 3].into_iter());
    // No block is found equal to a damaged one.
    write(&mut io, 2, &contents(1)).unwrap();
    write(&mut io, 4, &contents(1)).unwrap();
    compare(&mut io, wanted, 0..4);
    compare(&mut io, |_| contents(1), 4..5);
    empty(&ram, &mut io);
}

#[test]
fn compaction_moves_a_shared_object_for_all_its_blocks() {
    let ram = open(plain());
    let mut io = io(&ram);
    for block in 0..BLOCKS {
        write(&mut io, block, &contents(block as u64 % 700)).unwrap();
    }
    // Most contents are discarded; the rest is spread over all segments.
    let stays = |block: usize| (block % 700).is_multiple_of(7);
    (0..BLOCKS).filter(|block| !stays(*block)).for_each(|block| discard(&mut io, block, 1));
    let before = ram.stats();
    assert!(before.dedup.dup_data_size > 0);
    let done = ram.compact().unwrap();
    assert!(done.pages_freed > 0, "{done:?}");
    let after = ram.stats();
    assert_eq!(after.dedup, before.dedup);
    assert_eq!(after.mm.compr_data_size, before.mm.compr_data_size);
    assert!(after.mm.mem_used_total < before.mm.mem_used_total, "{before:?} {after:?}");
    compare(&mut io, |block| contents(block as u64 % 700), (0..BLOCKS).filter(|b| stays(*b)));
    empty(&ram, &mut io);
}

#[cfg(feature = "c-codecs")]
#[test]
fn recompression_keeps_shared_objects_shared() {
    let zstd = CodecConfig { algo: Algo::Zstd, level: Some(3), dictionary: None };
    let ram = open(RamConfig { recompress: vec![zstd], ..plain() });
    let mut io = io(&ram);
    let text = |number: u64| -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(number);
        (0..BLOCK).map(|_| b"etaoin shrdlu\n"[rng.usize(0..14)]).collect()
    };
    (0..900).for_each(|block| write(&mut io, block, &text(block as u64 % 300)).unwrap());
    let before = ram.stats();
    let done = ram.recompress(&Selection::default()).unwrap();
    let after = ram.stats();
    assert_eq!((done.replaced, done.tried), (900, 300), "{done:?}");
    assert_eq!(before.mm.compr_data_size - after.mm.compr_data_size, done.saved_bytes);
    assert!(done.saved_bytes > 0);
    assert_eq!(after.dedup.dup_data_size, 2 * after.mm.compr_data_size);
    compare(&mut io, |block| text(block as u64 % 300), 0..900);
    // A new write equals the recompressed contents and shares them.
    write(&mut io, 1000, &text(5)).unwrap();
    assert_eq!(ram.stats().mm.compr_data_size, after.mm.compr_data_size);
    empty(&ram, &mut io);
}

/// Some blocks that share an object are selected and others are not. Regression: recompression made
/// a second object for the selected ones, which took more memory, and reported it as a saving.
#[cfg(feature = "c-codecs")]
#[test]
fn partly_selected_shared_object_is_not_recompressed() {
    let zstd = CodecConfig { algo: Algo::Zstd, level: Some(3), dictionary: None };
    let ram = open(RamConfig { recompress: vec![zstd], ..plain() });
    let mut io = io(&ram);
    let text = |number: u64| -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(number);
        (0..BLOCK).map(|_| b"etaoin shrdlu\n"[rng.usize(0..14)]).collect()
    };
    // Three blocks share one object, two share another, and one has its own.
    let of = |block: usize| text([1, 1, 1, 2, 2, 3][block]);
    (0..6).for_each(|block| write(&mut io, block, &of(block)).unwrap());
    let size = || ram.stats().mm.compr_data_size;
    ram.idle();
    let mut found = vec![0; BLOCK];
    io.read(Sector(8), &mut found).unwrap();
    let first = size();
    let idle = Selection { which: blockyard_ram::Which::Idle, ..Selection::default() };
    let done = ram.recompress(&idle).unwrap();
    assert_eq!((done.replaced, done.skipped_shared), (3, 2), "block 1 was read: {done:?}");
    let second = size();
    assert_eq!(first - second, done.saved_bytes);
    // A selection of two of three sharers replaces nothing.
    let few = Selection { blocks_max: 2, ..Selection::default() };
    let done = ram.recompress(&few).unwrap();
    assert_eq!((done.replaced, done.saved_bytes, size()), (0, 0, second), "{done:?}");
    assert_eq!(done.skipped_shared, 3, "{done:?}");
    let few = Selection { blocks_max: 3, ..Selection::default() };
    let done = ram.recompress(&few).unwrap();
    assert_eq!((done.replaced, second - size()), (3, done.saved_bytes), "{done:?}");
    assert_eq!(ram.stats().dedup.dup_data_size, 2 * stored_bytes(&ram, 0) + stored_bytes(&ram, 3));
    // Regression: blocks that were already as small as possible were counted as skipped.
    let one = Selection { blocks_max: 1, ..Selection::default() };
    let done = ram.recompress(&one).unwrap();
    assert_eq!((done.tried, done.skipped_shared), (0, 0), "{done:?}");
    compare(&mut io, of, 0..6);
    empty(&ram, &mut io);
}

/// Stored bytes of a block.
#[cfg(feature = "c-codecs")]
fn stored_bytes(ram: &Ram, block: usize) -> u64 {
    u64::from(ram.states(block as u64, 1).states[0].stored_bytes)
}

#[test]
fn writeback_save_and_load_keep_contents() {
    let dir = std::env::temp_dir().join(format!("blockyard-dedup-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = |name: &str| -> PathBuf { dir.join(name) };
    let wanted = |block: usize| contents(block as u64 % 200);
    let ram = open(RamConfig { backing: Some(file("backing")), ..plain() });
    let mut first = io(&ram);
    (0..600).for_each(|block| write(&mut first, block, &wanted(block)).unwrap());
    ram.save(&file("snapshot"), blockyard_ram::Replace::Own).unwrap();
    let some = Selection { blocks_max: 250, ..Selection::default() };
    assert_eq!(ram.write_back(&some, u64::MAX).unwrap().blocks, 250);
    compare(&mut first, wanted, 0..600);
    ram.write_back(&Selection::default(), u64::MAX).unwrap();
    assert_eq!(ram.stats().mm.compr_data_size, 0);
    compare(&mut first, wanted, 0..600);
    empty(&ram, &mut first);
    for dedup in [true, false] {
        let load = Some(file("snapshot"));
        let loaded = open(RamConfig { load, dedup, ..plain() });
        let mut io = io(&loaded);
        compare(&mut io, wanted, 0..600);
        let stats = loaded.stats();
        let times = if dedup { 2 } else { 0 };
        assert_eq!(stats.dedup.dup_data_size, times * stats.mm.compr_data_size, "{stats:?}");
        empty(&loaded, &mut io);
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A full pool accepts blocks that it already stores, and the limit includes the memory of the
/// hints.
#[test]
fn full_device_accepts_blocks_that_it_holds_already() {
    let limit = 1 << 20;
    let ram = open(RamConfig { mem_limit: limit, ..plain() });
    let mut io = io(&ram);
    let mut stored = 0;
    while write(&mut io, stored, &contents(stored as u64 * 5)).is_ok() {
        stored += 1;
    }
    let stats = ram.stats();
    assert!(stats.dedup.meta_data_size > 0 && stats.mm.mem_limit == limit, "{stats:?}");
    assert!(stats.mm.mem_used_total <= limit, "{stats:?}");
    assert!(stored > 200, "{stored}");
    for block in 0..stored {
        write(&mut io, stored + block, &contents(block as u64 * 5)).unwrap();
    }
    compare(&mut io, |block| contents((block % stored) as u64 * 5), 0..2 * stored);
    assert_eq!(ram.stats().mm.mem_used_total, stats.mm.mem_used_total);
    assert_eq!(ram.set_mem_limit(33 << 10).unwrap_err().field(), "mem_limit");
    empty(&ram, &mut io);
}

/// Few contents and many threads, with everything that moves, replaces or counts objects running
/// concurrently.
#[test]
fn everybody_at_once() {
    let recompress = if cfg!(feature = "c-codecs") {
        vec![CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None }]
    } else {
        Vec::new()
    };
    let dir = std::env::temp_dir().join(format!("blockyard-dedup-all-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let backing = Some(dir.join("backing"));
    let ram = open(RamConfig { recompress, backing, bs: 512, compact: 3, ..plain() });
    std::thread::scope(|scope| {
        for number in 0..6u64 {
            let ram = &ram;
            scope.spawn(move || {
                let mut io = io(ram);
                let mut rng = fastrand::Rng::with_seed(number);
                let at = |mine: usize| mine * 6 + number as usize;
                let mut wanted = vec![vec![0; BLOCK]; 40];
                let mut found = vec![0; BLOCK];
                for step in 0..2500 {
                    let mine = rng.usize(0..wanted.len());
                    let sector = Sector(at(mine) as u64 * 8);
                    match rng.u32(0..20) {
                        0..10 => {
                            wanted[mine] = contents(rng.u64(1..12));
                            write(&mut io, at(mine), &wanted[mine]).unwrap();
                        }
                        10 => {
                            wanted[mine].fill(0);
                            discard(&mut io, at(mine), 1);
                        }
                        11 => {
                            wanted[mine][512..1024].fill(7);
                            io.write(Sector(sector.0 + 1), &[7; 512], Flags::NONE).unwrap();
                        }
                        _ => {
                            io.read(sector, &mut found).unwrap();
                            assert!(found == wanted[mine], "{number}: {mine} at step {step}");
                        }
                    }
                }
                for (mine, wanted) in wanted.iter().enumerate() {
                    io.read(Sector(at(mine) as u64 * 8), &mut found).unwrap();
                    assert!(found == *wanted, "thread {number}, block {mine} in the end");
                }
            });
        }
        scope.spawn(|| {
            for turn in 0..40 {
                ram.idle();
                ram.compact().unwrap();
                let _ = ram.recompress(&Selection::default());
                if turn % 8 == 0 {
                    ram.write_back(&Selection::default(), 100 << 10).unwrap();
                    ram.save(&dir.join("snapshot"), blockyard_ram::Replace::Own).unwrap();
                }
                ram.compact_in_background();
            }
        });
    });
    std::fs::remove_dir_all(&dir).unwrap();
    ram.set_compact(0).unwrap();
    empty(&ram, &mut io(&ram));
}
