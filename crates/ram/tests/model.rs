//! A RAM disk beside a plain array of bytes, while memory runs out: by a limit, and by chance.
//!
//! What fails with NOSPC may have changed whole blocks of its range and nothing else; everything
//! that succeeds is as if memory were endless.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::sync::Arc;

use blockyard_core::BufRef;
use blockyard_core::bio::{Bio, Flags, Op};
use blockyard_core::channel::ChannelConfig;
use blockyard_core::device::Device;
use blockyard_core::inject::Injection;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Channel, Composed, Disk, Region, RegionId, Sector, Status};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig, Selection, Which};
use blockyard_sim::seed::Seed;

/// Bytes of the device.
const SIZE: u64 = 2 << 20;
/// Longest request.
const LEN_MAX: u64 = 256 << 10;

/// A device, its channel, and what it ought to hold.
struct Rig {
    ram: Arc<Ram>,
    channel: Box<dyn Channel>,
    region: Arc<Region>,
    id: RegionId,
    wanted: Vec<u8>,
    unit: u64,
    bs: u64,
    refused: u64,
}

impl Rig {
    fn new(config: RamConfig) -> Rig {
        let (unit, bs) = (u64::from(config.unit), u64::from(config.bs));
        let ram = Ram::open(config).unwrap();
        let depth = ChannelConfig::default();
        let (name, device) = ("r".to_owned(), Arc::clone(&ram));
        let disk = Composed::new(name, "ram", device, depth, NoneScheduler::new);
        let mut channel = disk.open().unwrap();
        let region = Region::alloc(LEN_MAX as usize);
        let id = channel.register(Arc::clone(&region));
        Rig { ram, channel, region, id, wanted: vec![0; SIZE as usize], unit, bs, refused: 0 }
    }

    fn run(&mut self, bio: Bio) -> Status {
        let buf = BufRef { region: self.id, offset: 0 };
        assert_eq!(self.channel.push(&[bio.with_buf(buf)]), 1);
        self.channel.submit();
        let mut done = Vec::new();
        while done.is_empty() {
            self.channel.reap(&mut done);
        }
        done[0].status
    }

    fn read(&mut self, at: u64, len: u64) -> Vec<u8> {
        let bio = Bio::new(Op::Read, Sector::containing(at), len / 512);
        assert_eq!(self.run(bio), Status::Ok, "a read of {len} at {at}");
        let mut data = vec![0; len as usize];
        self.region.read(0, &mut data);
        data
    }

    /// A change, on the device and in the array; `data` is what is to be there afterwards.
    fn change(&mut self, op: Op, flags: Flags, at: u64, data: &[u8]) {
        self.region.write(0, data);
        let len = data.len() as u64;
        let status = self.run(Bio::new(op, Sector::containing(at), len / 512).with_flags(flags));
        let range = at as usize..(at + len) as usize;
        match status {
            Status::Ok => self.wanted[range].copy_from_slice(data),
            Status::NoSpc => {
                self.refused += 1;
                self.adopt(at, data);
            }
            other => panic!("{op} of {len} at {at}: {other}"),
        }
    }

    /// After a failure each block's part of the range is old or new, and is what it is from now on.
    fn adopt(&mut self, at: u64, data: &[u8]) {
        let found = self.read(at, data.len() as u64);
        let mut from = at;
        while from < at + data.len() as u64 {
            let to = ((from / self.unit + 1) * self.unit).min(at + data.len() as u64);
            let here = (from - at) as usize..(to - at) as usize;
            let there = from as usize..to as usize;
            let (new, old) = (&data[here.clone()], &self.wanted[there.clone()]);
            assert!(found[here.clone()] == *new || found[here.clone()] == *old, "block at {from}");
            self.wanted[there].copy_from_slice(&found[here]);
            from = to;
        }
    }

    /// Something that is done beside the channels, if the device was made for it.
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
                self.ram.write_back(&selection, 1 << 20).unwrap();
            }
            _ => {}
        }
    }

    fn compare(&mut self) {
        for at in (0..SIZE).step_by(LEN_MAX as usize) {
            let found = self.read(at, LEN_MAX);
            let wanted = &self.wanted[at as usize..(at + LEN_MAX) as usize];
            let differs = found.iter().zip(wanted).position(|(a, b)| a != b);
            assert_eq!(differs, None, "in the {LEN_MAX} bytes at {at}");
        }
    }
}

/// Data of a kind: runs, repeated words, something like text, noise.
fn data(rng: &mut fastrand::Rng, len: u64) -> Vec<u8> {
    let mut data = vec![0; len as usize];
    match rng.u32(0..7) {
        0 => data.fill(rng.u8(..)),
        // Few contents, so that blocks are equal.
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

fn drive(name: &str, config: RamConfig, one_in: u32) -> u64 {
    let seed = Seed::from_env();
    let _watch = seed.watch(name);
    let mut rng = seed.rng(11);
    let limit = config.mem_limit;
    let mut rig = Rig::new(config);
    let fault = Injection::Device { name: "nospc".to_owned(), value: one_in.to_string() };
    rig.ram.inject(&fault).unwrap();
    for _ in 0..2500 {
        let longest = if rng.u32(0..8) == 0 { LEN_MAX } else { 4 * rig.unit };
        let len = rig.bs * rng.u64(1..=longest.min(LEN_MAX) / rig.bs);
        let at = rig.bs * rng.u64(0..=(SIZE - len) / rig.bs);
        if rng.u32(0..40) == 0 {
            rig.work(&mut rng);
        }
        match rng.u32(0..10) {
            0 => rig.change(Op::Discard, Flags::NONE, at, &vec![0; len as usize]),
            1 => rig.change(Op::WriteZeroes, Flags::NONE, at, &vec![0; len as usize]),
            2 => rig.change(Op::WriteZeroes, Flags::NOUNMAP, at, &vec![0; len as usize]),
            3..6 => {
                let found = rig.read(at, len);
                let wanted = &rig.wanted[at as usize..(at + len) as usize];
                assert!(found == wanted, "{len} bytes at {at}");
            }
            _ => {
                let data = data(&mut rng, len);
                rig.change(Op::Write, Flags::NONE, at, &data);
            }
        }
        let used = rig.ram.stats().mm;
        assert!(limit == 0 || used.mem_used_total <= limit, "{used:?}");
    }
    rig.compare();
    let stats = rig.ram.stats();
    assert!(stats.io.failed_writes >= u64::from(rig.refused > 0), "{stats:?}");
    // Everything is given back.
    let never = Injection::Device { name: "nospc".to_owned(), value: "0".to_owned() };
    rig.ram.inject(&never).unwrap();
    for at in (0..SIZE).step_by(LEN_MAX as usize) {
        rig.change(Op::Discard, Flags::NONE, at, &vec![0; LEN_MAX as usize]);
    }
    rig.compare();
    let mm = rig.ram.stats().mm;
    let left = [mm.orig_data_size, mm.compr_data_size, mm.same_pages, mm.huge_pages];
    assert_eq!(left, [0; 4], "{mm:?}");
    rig.refused
}

/// The same while equal blocks are stored once.
fn shared() -> RamConfig {
    RamConfig { dedup: true, ..plain() }
}

fn plain() -> RamConfig {
    RamConfig { size: SIZE, ..RamConfig::default() }
}

#[test]
fn memory_without_end() {
    assert_eq!(drive("plain", plain(), 0), 0);
    assert_eq!(drive("512", RamConfig { bs: 512, ..plain() }, 0), 0);
    assert_eq!(drive("64k", RamConfig { unit: 65_536, bs: 512, ..plain() }, 0), 0);
}

/// A word cannot say how long a raw block of that size is with its checksum.
#[test]
fn checksums_of_the_largest_blocks() {
    let largest = || RamConfig { unit: 65_536, checksum: true, bs: 512, ..plain() };
    assert_eq!(drive("64k, checksum", largest(), 0), 0);
    assert!(drive("64k, checksum, limit", RamConfig { mem_limit: 1 << 20, ..largest() }, 0) > 0);
    assert_eq!(drive("64k, checksum, dedup", RamConfig { dedup: true, ..largest() }, 0), 0);
}

/// Recompression and writeback among reads and writes, with little memory and with failures.
#[cfg(feature = "c-codecs")]
#[test]
fn what_is_worked_on_meanwhile() {
    let recompress = vec![CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None }];
    let name = format!("blockyard-ram-model-{}", std::process::id());
    let backing = std::env::temp_dir().join(name);
    let worked = |unit| RamConfig {
        recompress: recompress.clone(),
        backing: Some(backing.clone()),
        checksum: true,
        unit,
        bs: 512,
        ..plain()
    };
    assert_eq!(drive("worked on", worked(4096), 0), 0);
    assert_eq!(drive("worked on, 64k", worked(65_536), 0), 0);
    assert!(drive("worked on, limit", RamConfig { mem_limit: 400 << 10, ..worked(4096) }, 9) > 0);
    let shared = RamConfig { dedup: true, mem_limit: 500 << 10, ..worked(8192) };
    assert!(drive("worked on, dedup", shared, 9) > 0);
    std::fs::remove_file(&backing).unwrap();
}

/// Requests that were merged are offered again one by one when they fail as a whole, and each that
/// fails then is counted, once.
#[test]
fn what_was_merged_and_fails_is_counted_once() {
    let mut rig = Rig::new(RamConfig { mem_limit: 64 << 10, compact: 0, ..plain() });
    let mut rng = fastrand::Rng::with_seed(1);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(LEN_MAX as usize).collect();
    rig.region.write(0, &noise);
    let mut at = 0;
    while rig.run(Bio::new(Op::Write, Sector::containing(at), 8)).is_ok() {
        at += 4096;
    }
    assert_eq!(rig.ram.stats().io.failed_writes, 1);
    let buf = BufRef { region: rig.id, offset: 0 };
    let bio = |number: u64| {
        Bio::new(Op::Write, Sector::containing(at + number * 4096), 8)
            .with_buf(BufRef { offset: number * 4096, ..buf })
    };
    let bios: Vec<Bio> = (0..8).map(bio).collect();
    assert_eq!(rig.channel.push(&bios), 8);
    rig.channel.submit();
    let mut done = Vec::new();
    while done.len() < 8 {
        rig.channel.reap(&mut done);
        rig.channel.submit();
    }
    assert!(done.iter().all(|done| done.status == Status::NoSpc));
    assert_eq!(rig.ram.stats().io.failed_writes, 9);
}

#[test]
fn equal_blocks_stored_once() {
    assert_eq!(drive("dedup", shared(), 0), 0);
    assert_eq!(drive("dedup, 512", RamConfig { bs: 512, ..shared() }, 0), 0);
    assert!(drive("dedup, limit", RamConfig { mem_limit: 300 << 10, ..shared() }, 0) > 0);
    let config = RamConfig { bs: 512, unit: 8192, checksum: true, mem_limit: 1 << 20, ..shared() };
    assert!(drive("dedup, chance and limit", config, 5) > 0);
}

#[test]
fn a_limit_that_is_met() {
    assert!(drive("limit", RamConfig { mem_limit: 512 << 10, ..plain() }, 0) > 0);
    let config = RamConfig { mem_limit: 600 << 10, bs: 512, unit: 16_384, ..plain() };
    assert!(drive("limit, 16k", config, 0) > 0);
}

#[test]
fn allocations_that_fail_by_chance() {
    assert!(drive("chance", plain(), 7) > 0);
    let config = RamConfig { bs: 512, unit: 8192, mem_limit: 1 << 20, ..plain() };
    assert!(drive("chance and limit", config, 5) > 0);
    if cfg!(feature = "c-codecs") {
        let codec = CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None };
        assert!(drive("chance, zstd", RamConfig { codec, ..plain() }, 3) > 0);
    }
}
