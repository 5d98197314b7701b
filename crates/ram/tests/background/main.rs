//! Background work: recompression, idle tracking, writeback, save and load. Blocks keep their
//! contents during and after each of them.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

#[cfg(feature = "c-codecs")]
mod selection;
mod snapshot;
mod writeback;

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::Injection;
use blockyard_core::{Bio, Composed, Device, Disk, Flags, Op, Sector, Status};
use blockyard_ram::snapshot::{BlockRecord, Header, Stored, Writer};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig, RamError, Selection, Which};

const SIZE: u64 = 4 << 20;
const BLOCK: usize = 4096;

/// A temporary directory of one test, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path =
            std::env::temp_dir().join(format!("blockyard-ram-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.file("mount").exists() {
            let _ = std::process::Command::new("umount").arg(self.file("mount")).status();
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A configuration without background compaction: on a slow machine it could win against a
/// recompression or a mark, whose counters would then differ.
fn plain() -> RamConfig {
    RamConfig { size: SIZE, compact: 0, ..RamConfig::default() }
}

fn zstd() -> CodecConfig {
    CodecConfig { algo: Algo::Zstd, level: Some(3), dictionary: None }
}

fn disk(ram: &Arc<Ram>) -> impl Disk + use<> {
    let (name, depth) = ("r".to_owned(), ChannelConfig::default());
    Composed::new(name, "ram", Arc::clone(ram), depth)
}

fn io(ram: &Arc<Ram>) -> Io {
    Io::new(disk(ram).open().unwrap(), 1 << 20)
}

/// Contents for a whole device: text, noise, runs, repeated words, and blocks that are not written.
fn contents() -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(3);
    let mut data = vec![0; SIZE as usize];
    for (number, block) in data.chunks_mut(BLOCK).enumerate() {
        match number % 8 {
            0 => rng.fill(block),
            1 => block.fill(number as u8),
            2 => {
                let word = rng.u64(..).to_le_bytes();
                block.iter_mut().zip(word.iter().cycle()).for_each(|(byte, word)| *byte = *word);
            }
            3 => {}
            4 => rng.fill(&mut block[..BLOCK / 3]),
            _ => block.iter_mut().for_each(|byte| *byte = b"etaoin shrdlu\n"[rng.usize(0..14)]),
        }
    }
    data
}

fn fill(io: &mut Io, data: &[u8]) {
    for (number, block) in data.chunks(BLOCK).enumerate() {
        if number % 8 != 3 {
            io.write(Sector((number * BLOCK / 512) as u64), block, Flags::NONE).unwrap();
        }
    }
}

#[track_caller]
fn compare(io: &mut Io, data: &[u8]) {
    let mut found = vec![0; BLOCK];
    for (number, block) in data.chunks(BLOCK).enumerate() {
        io.read(Sector((number * BLOCK / 512) as u64), &mut found).unwrap();
        assert!(found == block, "block {number}");
    }
}

fn selection(which: Which) -> Selection {
    Selection { which, ..Selection::default() }
}

#[cfg(feature = "c-codecs")]
#[test]
fn recompression_makes_smaller_and_changes_nothing() {
    let ram = Ram::open(RamConfig { recompress: vec![zstd()], ..plain() }).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let before = ram.stats().mm;
    let some = Selection { blocks_max: 5, ..Selection::default() };
    let first = ram.recompress(&some).unwrap();
    assert_eq!(first.replaced, 5);
    let done = ram.recompress(&selection(Which::All)).unwrap();
    let after = ram.stats().mm;
    assert!(done.replaced > 300, "{done:?}");
    assert_eq!(first.incompressible + done.incompressible, 128, "{first:?} {done:?}");
    assert!(after.compr_data_size < before.compr_data_size * 9 / 10, "{before:?} {after:?}");
    assert_eq!(after.orig_data_size, before.orig_data_size);
    assert_eq!(after.huge_pages, 128);
    compare(&mut io, &data);
    // A second recompression skips what the first replaced and tries again what gained nothing and
    // is not huge. A client's write uses the first codec.
    let again = ram.recompress(&selection(Which::All)).unwrap();
    assert_eq!((again.tried, again.replaced, again.incompressible), (128, 0, 0));
    assert_eq!(ram.recompress(&selection(Which::Huge)).unwrap().tried, 0);
    fill(&mut io, &data);
    let huge = ram.recompress(&selection(Which::Huge)).unwrap();
    assert_eq!(huge.incompressible, 128, "{huge:?}");
    let large = Selection { threshold: 5000, ..Selection::default() };
    assert_eq!(ram.recompress(&large).unwrap().tried, 0);
    compare(&mut io, &data);
    let states = ram.states(0, 8).states;
    let flags: Vec<_> = states.iter().map(|state| (state.block, &state.flags[..])).collect();
    assert_eq!(flags[..3], [(0, &b"..h..n"[..]), (1, b"s....."), (2, b"s.....")]);
}

#[test]
fn a_device_without_a_second_algorithm_or_a_file_says_so() {
    let ram = Ram::open(plain()).unwrap();
    let error = ram.recompress(&Selection::default()).unwrap_err();
    assert_eq!(error.field(), "recomp_algo");
    let error = ram.write_back(&Selection::default(), u64::MAX).unwrap_err();
    assert_eq!(error.field(), "backing");
}

#[test]
fn blocks_grow_old_until_they_are_used() {
    let ram = Ram::open(plain()).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    assert_eq!(ram.ages()[0], 896);
    for turn in 1..=9u8 {
        ram.idle();
        assert_eq!(ram.ages()[usize::from(turn.min(7))], 896);
    }
    let mut block = vec![0; BLOCK];
    io.read(Sector(0), &mut block).unwrap();
    io.write(Sector(8), &block, Flags::NONE).unwrap();
    assert_eq!((ram.ages()[0], ram.ages()[7]), (2, 894));
    assert_eq!(ram.states(0, 3).states[2].age, 7);
}

/// A listing goes through a large, sparse table page by page.
#[test]
fn a_sparse_device_is_listed_in_pages() {
    let ram = Ram::open(RamConfig { size: 1 << 30, ..RamConfig::default() }).unwrap();
    let mut io = io(&ram);
    let last = (1 << 30) / BLOCK as u64 - 1;
    io.write(Sector(last * 8), &[7; BLOCK], Flags::NONE).unwrap();
    let (mut from, mut pages, mut found) = (Some(0), 0, Vec::new());
    while let Some(first) = from {
        let page = ram.states(first, 1);
        assert!(page.next.is_none_or(|next| next > first), "{page:?}");
        (from, pages) = (page.next, pages + 1);
        found.extend(page.states.iter().map(|state| state.block));
    }
    assert_eq!(found, [last]);
    assert_eq!(pages, 4, "each looks at 65536 words");
}

/// A full device is the one that most needs recompression: the only memory for the smaller objects
/// is the reserve.
#[cfg(feature = "c-codecs")]
#[test]
fn recompression_at_the_limit_makes_room() {
    let (limit, size) = (8 << 20, 64 << 20);
    let recompress = vec![zstd()];
    let config = RamConfig { size, mem_limit: limit, compact: 0, recompress, ..plain() };
    let ram = Ram::open(config).unwrap();
    let (mut io, mut rng) = (io(&ram), fastrand::Rng::with_seed(11));
    let mut text = || -> Vec<u8> {
        let bytes = std::iter::repeat_with(|| b"etaoin shrdlu\n"[rng.usize(0..14)]);
        bytes.take(BLOCK).collect()
    };
    let mut written: Vec<Vec<u8>> = Vec::new();
    let sector = |block: usize| Sector((block * BLOCK) as u64 / 512);
    loop {
        let block = text();
        match io.write(sector(written.len()), &block, Flags::NONE) {
            Ok(()) => written.push(block),
            Err(status) => break assert_eq!(status, Status::NoSpc),
        }
    }
    let full = ram.stats().mm;
    let done = ram.recompress(&selection(Which::All)).unwrap();
    assert_eq!(
        (done.tried, done.replaced),
        (written.len() as u64, written.len() as u64),
        "{done:?}"
    );
    assert_eq!(done.no_memory, 0);
    let after = ram.stats().mm;
    assert_eq!(full.compr_data_size - after.compr_data_size, done.saved_bytes);
    assert!(after.mem_used_max <= limit, "{after:?}");
    // The memory that recompression freed is available for further writes.
    let before = written.len();
    while written.len() < before + before / 10 {
        let block = text();
        io.write(sector(written.len()), &block, Flags::NONE).unwrap();
        written.push(block);
    }
    let mut found = vec![0; BLOCK];
    for (number, block) in written.iter().enumerate() {
        io.read(sector(number), &mut found).unwrap();
        assert!(found == *block, "block {number}");
    }
}

/// Recompression with a limit on blocks takes the largest, which can save most.
#[cfg(feature = "c-codecs")]
#[test]
fn the_largest_come_first() {
    let scratch = Scratch::new("largest");
    let backing = Some(scratch.file("backing"));
    let recompress = vec![zstd()];
    let ram = Ram::open(RamConfig { backing, recompress, ..plain() }).unwrap();
    let (mut io, mut rng) = (io(&ram), fastrand::Rng::with_seed(9));
    let mut text = vec![0; SIZE as usize];
    // Every eighth block is not written.
    for (_, block) in text.chunks_mut(BLOCK).enumerate().filter(|(number, _)| number % 8 != 3) {
        // The rest of a block is zeros, so that compressed sizes vary widely.
        let len = rng.usize(200..BLOCK);
        block[..len].iter_mut().for_each(|byte| *byte = b"etaoin shrdlu\n"[rng.usize(0..14)]);
    }
    fill(&mut io, &text);
    let sizes = |ram: &Ram| -> Vec<u32> {
        ram.states(0, 2000).states.iter().map(|state| state.stored_bytes).collect()
    };
    let before = sizes(&ram);
    assert!(before.len() > 500);
    // Sizes within a bucket of 64 bytes are equal.
    let check = |before: &[u32], chosen: &dyn Fn(usize) -> bool| {
        let sizes = |of: bool| (0..before.len()).filter(move |at| chosen(*at) == of);
        let least = sizes(true).map(|block| before[block]).min().unwrap();
        let most = sizes(false).map(|block| before[block]).max().unwrap();
        assert_eq!(sizes(true).count(), 100);
        assert!(least / 64 >= most / 64, "{least} was chosen and {most} was not");
    };
    let few = Selection { blocks_max: 100, ..selection(Which::All) };
    assert_eq!(ram.recompress(&few).unwrap().replaced, 100);
    let after = sizes(&ram);
    check(&before, &|block| after[block] != before[block]);
    assert_eq!(ram.write_back(&few, u64::MAX).unwrap().blocks, 100);
    let states = ram.states(0, 2000).states;
    check(&after, &|block| states[block].flags[1] == b'w');
    compare(&mut io, &text);
}

/// Without a priority, the faster of two algorithms is tried first, and the slower one gets the
/// rest; a priority selects one. A block never goes back to an algorithm of lower priority.
#[cfg(feature = "c-codecs")]
#[test]
fn several_algorithms_have_their_turns() {
    let by = |algo, level| CodecConfig { algo, level: Some(level), dictionary: None };
    let recompress = vec![by(Algo::Lz4hc, 9), by(Algo::Zstd, 9)];
    let ram = Ram::open(RamConfig { recompress, checksum: true, ..plain() }).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let by = |priority| Selection { priority, ..Selection::default() };
    let size = || ram.stats().mm.compr_data_size;
    let first = size();
    let done = ram.recompress(&by(Some(1))).unwrap();
    assert!(done.replaced > 300 && done.incompressible == 0, "{done:?}");
    compare(&mut io, &data);
    let second = size();
    let done = ram.recompress(&by(None)).unwrap();
    assert!(done.replaced > 200 && done.incompressible == 128, "{done:?}");
    let third = size();
    assert!(third < second && second < first, "{first} {second} {third}");
    // Blocks that neither algorithm makes smaller are tried again, but no block of zstd's.
    let again = ram.recompress(&by(Some(1))).unwrap();
    assert_eq!((again.tried, again.replaced), (128, 0), "{again:?}");
    compare(&mut io, &data);
    for priority in [0, 3] {
        let error = ram.recompress(&by(Some(priority))).unwrap_err();
        assert_eq!(error.field(), "priority");
        assert!(error.to_string().contains("expected 1 to 2"), "{error}");
    }
    let four = vec![CodecConfig::default(); 4];
    let error = Ram::open(RamConfig { recompress: four, ..plain() }).unwrap_err();
    assert_eq!(error.field(), "recomp_algo");
}

#[test]
fn limits_change_while_the_device_is_used() {
    let ram = Ram::open(plain()).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let before = ram.stats().mm;
    assert_eq!(before.mem_limit, 0);
    ram.set_mem_limit(256 << 10).unwrap();
    assert_eq!(ram.stats().mm.mem_limit, 256 << 10);
    // Data beyond the limit stay. Once the present pages are full, no write that needs memory
    // succeeds; one that needs none does.
    let noise: Vec<u8> = data[..BLOCK].iter().map(|byte| byte ^ 0x55).collect();
    let empty = (3..SIZE / BLOCK as u64).step_by(8).map(|block| Sector(block * 8));
    let full = empty.clone().find(|at| io.write(*at, &noise, Flags::NONE).is_err());
    let full = full.unwrap();
    assert_eq!(io.write(full, &noise, Flags::NONE), Err(Status::NoSpc));
    assert_eq!(ram.stats().mm.mem_used_total, before.mem_used_total);
    io.write(full, &[9; BLOCK], Flags::NONE).unwrap();
    empty.for_each(|at| io.run(Bio::new(Op::Discard, at, 8)).map(drop).unwrap());
    compare(&mut io, &data);
    ram.set_mem_limit(0).unwrap();
    io.write(full, &noise, Flags::NONE).unwrap();
    io.run(Bio::new(Op::Discard, full, 8)).unwrap();
    compare(&mut io, &data);
    for bytes in [1, 4096, (1 << 46) + 1] {
        assert_eq!(ram.set_mem_limit(bytes).unwrap_err().field(), "mem_limit");
    }
    let most = ram.stats().mm.mem_used_max;
    io.run(Bio::new(Op::Discard, Sector(0), SIZE / 512)).unwrap();
    ram.compact().unwrap();
    assert_eq!(ram.stats().mm.mem_used_max, most);
    ram.reset_mem_used_max();
    let now = ram.stats().mm;
    assert_eq!(now.mem_used_max, now.mem_used_total);
}

#[test]
fn background_workers_concurrent_with_channels_lose_nothing() {
    let scratch = Scratch::new("concurrent");
    let recompress = if cfg!(feature = "c-codecs") { vec![zstd()] } else { Vec::new() };
    let backing = Some(scratch.file("backing"));
    let config = RamConfig { recompress, backing, checksum: true, bs: 512, ..plain() };
    let ram = Ram::open(config).unwrap();
    std::thread::scope(|scope| {
        for number in 0..3u64 {
            let ram = &ram;
            scope.spawn(move || {
                let mut io = io(ram);
                let mut rng = fastrand::Rng::with_seed(number);
                // This thread owns every third block.
                let mut wanted = vec![vec![0; BLOCK]; 300];
                let mut found = vec![0; BLOCK];
                for _ in 0..4000 {
                    let mine = rng.usize(0..300);
                    let at = (mine as u64 * 3 + number) * 8;
                    if rng.u32(0..3) == 0 {
                        io.read(Sector(at), &mut found).unwrap();
                        assert!(found == wanted[mine], "thread {number}, block {mine}");
                        continue;
                    }
                    let (from, to) = match rng.u32(0..2) {
                        0 => (0, 8),
                        _ => (rng.usize(0..4), rng.usize(5..8)),
                    };
                    let part = &mut wanted[mine][from * 512..to * 512];
                    match rng.u32(0..4) {
                        0 => rng.fill(part),
                        1 => part.fill(rng.u8(..)),
                        _ => part.iter_mut().for_each(|byte| *byte = rng.u8(0..8)),
                    }
                    io.write(Sector(at + from as u64), part, Flags::NONE).unwrap();
                }
                for (mine, wanted) in wanted.iter().enumerate() {
                    io.read(Sector((mine as u64 * 3 + number) * 8), &mut found).unwrap();
                    assert!(found == *wanted, "thread {number}, block {mine} in the end");
                }
            });
        }
        scope.spawn(|| {
            for turn in 0..60 {
                ram.idle();
                let _ = ram.recompress(&selection(Which::Idle));
                ram.write_back(&selection(Which::Idle), 400 << 10).unwrap();
                ram.compact().unwrap();
                if turn % 10 == 0 {
                    ram.save(&scratch.file("snapshot"), blockyard_ram::Replace::Own).unwrap();
                }
            }
        });
    });
    let stats = ram.stats();
    assert_eq!((stats.io.failed_reads, stats.io.failed_writes), (0, 0), "{stats:?}");
    drop(Ram::open(RamConfig { load: Some(scratch.file("snapshot")), ..plain() }).unwrap());
}

#[test]
fn a_changed_bit_is_an_error_and_not_data() {
    let ram = Ram::open(RamConfig { checksum: true, ..plain() }).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let flip = |block: usize| {
        let value = (block * 8).to_string();
        ram.inject(&Injection::Device { name: "flip".to_owned(), value })
    };
    let mut found = vec![0; BLOCK];
    for block in [0, 2, 4, 5] {
        flip(block).unwrap();
        let sector = Sector(block as u64 * 8);
        assert_eq!(io.read(sector, &mut found), Err(Status::Protection), "block {block}");
        let error = ram
            .save(&std::env::temp_dir().join("blockyard-never"), blockyard_ram::Replace::Own)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("block {block} is damaged, and what it was is lost (PROTECTION)")
        );
        // A write of a part cannot repair the block; a write of the whole block can.
        io.write(sector, &data[block * BLOCK..][..BLOCK], Flags::NONE).unwrap();
    }
    // Blocks that take no memory have no bit to flip.
    assert!(flip(1).is_err() && flip(3).is_err() && flip(4096).is_err());
    compare(&mut io, &data);
    assert_eq!(ram.stats().io.failed_reads, 4);
}

#[cfg(feature = "c-codecs")]
#[test]
fn a_dictionary_of_the_devices_own_contents_makes_them_smaller() {
    let scratch = Scratch::new("train");
    let file = scratch.file("dictionary");
    let zstd = |dictionary| CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary };
    // Words that recur in other blocks, and rarely within one.
    let mut rng = fastrand::Rng::with_seed(9);
    let words: Vec<[u8; 12]> = (0..1500).map(|_| std::array::from_fn(|_| rng.u8(..))).collect();
    let text = std::iter::repeat_with(|| words[rng.usize(0..words.len())]).flatten();
    let data: Vec<u8> = text.take(SIZE as usize).collect();
    let compressed = |dictionary| {
        let ram = Ram::open(RamConfig { codec: zstd(dictionary), ..plain() }).unwrap();
        let mut io = io(&ram);
        fill(&mut io, &data);
        ram.idle();
        let trained = ram.train(&file, blockyard_ram::Replace::Own).unwrap();
        assert_eq!(ram.ages()[1], 896, "no block was read");
        assert!(trained.samples == 896 && trained.bytes > 1000, "{trained:?}");
        ram.stats().mm.compr_data_size
    };
    let without = compressed(None);
    let with = compressed(Some(std::fs::read(&file).unwrap().into()));
    assert!(with < without * 9 / 10, "{with} {without}");
    let little = Ram::open(plain()).unwrap();
    assert_eq!(little.train(&file, blockyard_ram::Replace::Own).unwrap_err().field(), "dict");
}
