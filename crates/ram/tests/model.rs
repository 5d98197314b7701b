//! A RAM disk compared with an array of bytes, while memory runs out, by a limit and at random, and
//! while its backing file fails and is full.
//!
//! A request that fails with NOSPC or IOERR may have changed whole blocks of its range and nothing
//! else. A request that succeeds has its full effect. After any failure the counters match the
//! blocks, and nothing is left when all blocks are discarded.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_core::BufRef;
use blockyard_core::bio::{Bio, Flags, Op};
use blockyard_core::channel::ChannelConfig;
use blockyard_core::device::Device;
use blockyard_core::inject::Injection;
use blockyard_core::{Composed, Disk, Region, Sector, Status};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig, RamError, Selection, Which};
use blockyard_testing::refusing::Refusing;
use blockyard_testing::seed::Seed;

/// Size of the device in bytes.
const SIZE: u64 = 2 << 20;
/// Longest request in bytes.
const LEN_MAX: u64 = 256 << 10;

/// The injected faults of a backing file.
const FAULTS: [&str; 3] = ["backing_eio", "backing_late_eio", "backing_enospc"];

/// The faults to inject.
#[derive(Clone, Copy, Default)]
struct Trouble {
    /// One in this many allocations fails; 0: none.
    one_in: u32,
    /// Whether the backing file fails at times.
    file_fails: bool,
}

/// How often requests failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Refused {
    no_space: u64,
    io: u64,
    writebacks: u64,
}

/// A device and a model of its contents.
struct Fixture {
    ram: Arc<Ram>,
    checker: Refusing,
    bs: u64,
    unit: u64,
    /// Whether the backing file may fail now.
    armed: bool,
    refused: Refused,
}

fn disk(ram: &Arc<Ram>) -> impl Disk + use<> {
    let (name, depth) = ("r".to_owned(), ChannelConfig::default());
    Composed::new(name, "ram", Arc::clone(ram), depth)
}

fn inject(ram: &Ram, name: &str, value: u64) {
    let fault = Injection::Device { name: name.to_owned(), value: value.to_string() };
    ram.inject(&fault).unwrap();
}

impl Fixture {
    fn new(config: RamConfig) -> Fixture {
        let (unit, bs) = (u64::from(config.unit), u64::from(config.bs));
        let ram = Ram::open(config).unwrap();
        let checker = Refusing::new(&disk(&ram), unit, LEN_MAX).unwrap();
        Fixture { ram, checker, bs, unit, armed: false, refused: Refused::default() }
    }

    /// Makes the next one or more operations on the backing file fail.
    fn arm(&mut self, rng: &mut fastrand::Rng) {
        inject(&self.ram, FAULTS[rng.usize(0..FAULTS.len())], rng.u64(1..10));
        self.armed = true;
    }

    /// Removes the faults of the backing file.
    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            FAULTS.iter().for_each(|fault| inject(&self.ram, fault, 0));
        }
    }

    fn read(&mut self, at: u64, len: u64) {
        match self.checker.read(at, len) {
            Err(Status::IoErr) if self.armed => {
                self.refused.io += 1;
                self.disarm();
                assert_eq!(self.checker.read(at, len), Ok(()));
            }
            ended => assert_eq!(ended, Ok(()), "a read of {len} at {at}"),
        }
    }

    /// Executes a change; `data` is the expected result.
    fn change(&mut self, op: Op, flags: Flags, at: u64, data: &[u8]) {
        match self.checker.change(op, flags, at, data) {
            Status::Ok => return,
            Status::NoSpc => self.refused.no_space += 1,
            Status::IoErr if self.armed => self.refused.io += 1,
            other => panic!("{op} of {} at {at}: {other}", data.len()),
        }
        self.disarm();
        self.checker.adopt(op, at, data);
    }

    /// Runs a random background operation, if the device was configured for it.
    fn work(&mut self, rng: &mut fastrand::Rng) {
        let which = Which::ALL[rng.usize(0..Which::ALL.len())].0;
        let selection = Selection { which, blocks_max: rng.u64(0..100), ..Selection::default() };
        match rng.u32(0..4) {
            0 => drop(self.ram.compact().unwrap()),
            1 => self.ram.idle(),
            2 if !self.ram.config().recompress.is_empty() => {
                self.ram.recompress(&selection).unwrap();
            }
            3 if self.ram.config().backing.is_some() => {
                match self.ram.write_back(&selection, 1 << 20) {
                    Ok(_) => {}
                    Err(RamError::WriteBack { .. }) if self.armed => {
                        self.refused.writebacks += 1;
                        self.disarm();
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            _ => {}
        }
    }

    /// Checks that the counters match the blocks.
    fn count(&self) {
        let states = self.ram.states(0, SIZE as usize).states;
        let pages = self.unit / 4096;
        let flagged = |flag| states.iter().filter(move |state| state.flags.contains(&flag));
        let in_memory = states.iter().filter(|state| !state.flags.contains(&b'w'));
        let bytes: u64 = in_memory.map(|state| u64::from(state.stored_bytes)).sum();
        let same = flagged(b's').count() as u64;
        let huge = flagged(b'h').filter(|state| !state.flags.contains(&b'w')).count() as u64;
        let stats = self.ram.stats();
        let (mm, dup) = (stats.mm, stats.dedup.dup_data_size);
        assert_eq!(mm.orig_data_size, states.len() as u64 * self.unit, "{stats:?}");
        assert_eq!(mm.compr_data_size + dup, bytes, "{stats:?}");
        assert_eq!((mm.same_pages, mm.huge_pages), (same, huge), "{stats:?}");
        assert_eq!(stats.bd.bd_count, flagged(b'w').count() as u64 * pages, "{stats:?}");
    }

    /// Discards everything and checks that nothing is left.
    fn end(mut self) -> Refused {
        self.disarm();
        self.checker.compare();
        // Background compaction could hold pages for a moment.
        self.ram.set_compact(0).unwrap();
        self.count();
        let refused = self.refused;
        let stats = self.ram.stats();
        assert!(stats.io.failed_writes >= u64::from(refused.no_space > 0), "{stats:?}");
        inject(&self.ram, "nospc", 0);
        self.checker.discard_all();
        self.checker.compare();
        self.count();
        self.ram.compact().unwrap();
        let stats = self.ram.stats();
        assert_eq!(stats.mm.orig_data_size, 0, "{stats:?}");
        assert_eq!(stats.mm.mem_used_total, stats.dedup.meta_data_size, "{stats:?}");
        assert_eq!(self.ram.size_classes(), [], "{stats:?}");
        refused
    }
}

/// Random data: runs, repeated words, text, or noise.
fn data(rng: &mut fastrand::Rng, len: u64) -> Vec<u8> {
    let mut data = vec![0; len as usize];
    match rng.u32(0..7) {
        0 => data.fill(rng.u8(..)),
        // Few different contents, so that blocks are equal.
        6 => {
            let mut few = fastrand::Rng::with_seed(rng.u64(0..6));
            few.fill(&mut data);
            data[len as usize / 2..].fill(0x20);
        }
        1 => {
            let word = rng.u64(..).to_le_bytes();
            data.iter_mut().zip(word.iter().cycle()).for_each(|(byte, word)| *byte = *word);
        }
        2 => rng.fill(&mut data),
        3 => data.iter_mut().for_each(|byte| *byte = rng.u8(0..4)),
        _ => {
            // Half of each KiB is noise.
            for chunk in data.chunks_mut(1024) {
                let half = chunk.len() / 2;
                rng.fill(&mut chunk[..half]);
            }
        }
    }
    data
}

fn drive(name: &str, config: RamConfig, trouble: Trouble) -> Refused {
    let seed = Seed::from_env();
    let _watch = seed.watch(name);
    let mut rng = seed.rng(11);
    let limit = config.mem_limit;
    // If the file fails, write blocks back often, so that reads reach it.
    let rests = if trouble.file_fails { 8 } else { 40 };
    let mut fixture = Fixture::new(config);
    inject(&fixture.ram, "nospc", trouble.one_in.into());
    for _ in 0..2500 {
        let longest = if rng.u32(0..8) == 0 { LEN_MAX } else { 4 * fixture.unit };
        let len = fixture.bs * rng.u64(1..=longest.min(LEN_MAX) / fixture.bs);
        let at = fixture.bs * rng.u64(0..=(SIZE - len) / fixture.bs);
        if trouble.file_fails && rng.u32(0..30) == 0 {
            fixture.arm(&mut rng);
        }
        if rng.u32(0..rests) == 0 {
            fixture.work(&mut rng);
        }
        match rng.u32(0..10) {
            0 => fixture.change(Op::Discard, Flags::NONE, at, &vec![0; len as usize]),
            1 => fixture.change(Op::WriteZeroes, Flags::NONE, at, &vec![0; len as usize]),
            2 => fixture.change(Op::WriteZeroes, Flags::NOUNMAP, at, &vec![0; len as usize]),
            3..6 => fixture.read(at, len),
            _ => {
                let data = data(&mut rng, len);
                fixture.change(Op::Write, Flags::NONE, at, &data);
            }
        }
        let used = fixture.ram.stats().mm;
        assert!(limit == 0 || used.mem_used_total <= limit, "{used:?}");
    }
    fixture.end()
}

/// Without injected faults, nothing fails.
fn endless(name: &str, config: RamConfig) {
    assert_eq!(drive(name, config, Trouble::default()), Refused::default(), "{name}");
}

/// One in `one_in` allocations fails, and there may be a limit: some requests fail.
fn short(name: &str, config: RamConfig, one_in: u32) {
    let refused = drive(name, config, Trouble { one_in, file_fails: false });
    assert!(refused.no_space > 0 && refused.io == 0, "{name}: {refused:?}");
}

/// A configuration with deduplication.
fn shared() -> RamConfig {
    RamConfig { dedup: true, ..plain() }
}

fn plain() -> RamConfig {
    RamConfig { size: SIZE, ..RamConfig::default() }
}

#[test]
fn memory_without_end() {
    endless("plain", plain());
    endless("512", RamConfig { bs: 512, ..plain() });
    endless("64k", RamConfig { unit: 65_536, bs: 512, ..plain() });
}

/// A word cannot express the length of an uncompressed 64 KiB block with its checksum.
#[test]
fn checksums_of_the_largest_blocks() {
    let largest = || RamConfig { unit: 65_536, checksum: true, bs: 512, ..plain() };
    endless("64k, checksum", largest());
    short("64k, checksum, limit", RamConfig { mem_limit: 1 << 20, ..largest() }, 0);
    endless("64k, checksum, dedup", RamConfig { dedup: true, ..largest() });
}

/// A temporary file of one test, removed on drop.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> File {
        let name = format!("blockyard-ram-{name}-{}", std::process::id());
        File(std::env::temp_dir().join(name))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A configuration with writeback, and with recompression if there is a second algorithm.
fn worked_on(file: &File, unit: u32) -> RamConfig {
    let codec = CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None };
    RamConfig {
        recompress: if cfg!(feature = "c-codecs") { vec![codec] } else { Vec::new() },
        backing: Some(file.0.clone()),
        checksum: true,
        unit,
        bs: 512,
        ..plain()
    }
}

/// Recompression and writeback among reads and writes, with little memory and with failures.
#[test]
fn recompression_and_writeback_match_the_model() {
    let file = File::new("model");
    endless("worked on", worked_on(&file, 4096));
    endless("worked on, 64k", worked_on(&file, 65_536));
    let little = RamConfig { mem_limit: 400 << 10, ..worked_on(&file, 4096) };
    short("worked on, limit", little, 9);
    let shared = RamConfig { dedup: true, mem_limit: 500 << 10, ..worked_on(&file, 8192) };
    short("worked on, dedup", shared, 9);
}

/// The backing file fails during reads, writes and syncs, and is full; in addition, memory runs
/// out.
#[test]
fn a_backing_file_that_fails_and_is_full() {
    let file = File::new("model-file");
    let trouble = |one_in| Trouble { one_in, file_fails: true };
    let refused = drive("file", worked_on(&file, 4096), trouble(0));
    assert!(refused.io > 0 && refused.writebacks > 0 && refused.no_space == 0, "{refused:?}");
    let all = RamConfig { dedup: true, mem_limit: 600 << 10, ..worked_on(&file, 8192) };
    let refused = drive("file, dedup, limit, chance", all, trouble(9));
    assert!(refused.io > 0 && refused.writebacks > 0 && refused.no_space > 0, "{refused:?}");
}

/// A merged request that fails is retried bio by bio, and each bio that fails then is counted once.
#[test]
fn failed_merged_request_is_counted_once() {
    let ram = Ram::open(RamConfig { mem_limit: 64 << 10, compact: 0, ..plain() }).unwrap();
    let mut channel = disk(&ram).open().unwrap();
    let region = Region::alloc(LEN_MAX as usize);
    let id = channel.register(Arc::clone(&region));
    let mut rng = fastrand::Rng::with_seed(1);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(LEN_MAX as usize).collect();
    region.write(0, &noise);
    let bio = |number: u64, buf: u64| {
        Bio::new(Op::Write, Sector::containing(number * 4096), 8)
            .with_buf(BufRef { region: id, offset: buf * 4096 })
    };
    let mut run = |bios: &[Bio]| {
        assert_eq!(channel.push(bios), bios.len());
        channel.submit();
        let mut done = Vec::new();
        while done.len() < bios.len() {
            channel.reap(&mut done);
            channel.submit();
        }
        done
    };
    let full = (0..).find(|number| !run(&[bio(*number, 0)])[0].status.is_ok()).unwrap();
    assert_eq!(ram.stats().io.failed_writes, 1);
    let bios: Vec<Bio> = (0..8).map(|number| bio(full + number, number)).collect();
    assert!(run(&bios).iter().all(|done| done.status == Status::NoSpc));
    assert_eq!((ram.stats().io.failed_writes, ram.stats().writes_refused), (9, 9));
}

#[test]
fn equal_blocks_stored_once() {
    endless("dedup", shared());
    endless("dedup, 512", RamConfig { bs: 512, ..shared() });
    short("dedup, limit", RamConfig { mem_limit: 300 << 10, ..shared() }, 0);
    let config = RamConfig { bs: 512, unit: 8192, checksum: true, mem_limit: 1 << 20, ..shared() };
    short("dedup, chance and limit", config, 5);
}

#[test]
fn a_limit_that_is_met() {
    short("limit", RamConfig { mem_limit: 512 << 10, ..plain() }, 0);
    let config = RamConfig { mem_limit: 600 << 10, bs: 512, unit: 16_384, ..plain() };
    short("limit, 16k", config, 0);
}

#[test]
fn allocations_that_fail_by_chance() {
    short("chance", plain(), 7);
    let config = RamConfig { bs: 512, unit: 8192, mem_limit: 1 << 20, ..plain() };
    short("chance and limit", config, 5);
    if cfg!(feature = "c-codecs") {
        let codec = CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None };
        short("chance, zstd", RamConfig { codec, ..plain() }, 3);
    }
}
