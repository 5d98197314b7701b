//! RAM disks that run out of memory, and whose backing files fail or are full. A refused operation
//! must keep the old contents, and no memory may remain when all blocks are discarded.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::Injection;
use blockyard_core::{Composed, Device as _, Flags, Op, Status};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig, RamError, Selection, Which};
use blockyard_testing::clock::ManualClock;
use blockyard_testing::refusing::Refusing;

use crate::input::Input;

/// The size of a device, and the longest request, in bytes.
const SIZE: u64 = 512 << 10;
const LEN_MAX: u64 = 64 << 10;
/// The most steps of one input.
const STEPS_MAX: usize = 200;
/// The faults of a backing file.
const FAULTS: [&str; 3] = ["backing_eio", "backing_late_eio", "backing_enospc"];

/// A backing file, which is removed with its input.
struct BackingFile(PathBuf);

impl Drop for BackingFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A device under test, and its expected contents.
struct DeviceRun {
    ram: Arc<Ram>,
    disk: Refusing,
    bs: u64,
    /// Whether allocations may fail or the limit may be reached.
    is_short: bool,
    /// Whether the backing file may fail.
    is_armed: bool,
}

/// Interprets the bytes as a RAM disk, and as operations and faults.
///
/// # Panics
/// If the disk's contents are wrong, if an operation fails without an injected fault, or if memory
/// remains in the end.
pub fn refusals(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = input.byte();
    let thread = std::thread::current().id();
    let name = format!("blockyard-fuzz-backing-{}-{thread:?}", std::process::id());
    let file = (kind & 3 != 0).then(|| BackingFile(std::env::temp_dir().join(name)));
    let second = CodecConfig { algo: Algo::Zstd, level: Some(1), dictionary: None };
    let has_second = Algo::Zstd.is_built_in() && kind & 12 == 0;
    let config = RamConfig {
        size: SIZE,
        bs: input.choose(&[4096, 512, 1024]),
        unit: input.choose(&[4096, 4096, 8192, 32_768]),
        recompress: if has_second { vec![second] } else { Vec::new() },
        checksum: kind & 16 != 0,
        dedup: kind & 32 != 0,
        backing: file.as_ref().map(|file| file.0.clone()),
        mem_limit: input.choose(&[0, 128 << 10, 96 << 10, 256 << 10]),
        compact: 0,
        ..RamConfig::default()
    };
    let (bs, unit) = (u64::from(config.bs), u64::from(config.unit));
    let is_short = config.mem_limit > 0;
    let ram = Ram::open(config).expect("every choice fits the others");
    let (name, depth) = ("refusing".to_owned(), ChannelConfig::default());
    let (device, clock) = (Arc::clone(&ram), ManualClock::new());
    let disk = Composed::with_clock(name, "fuzzed", device, depth, clock);
    let disk = Refusing::new(&disk, unit, LEN_MAX).expect("there is memory for a channel");
    let mut run = DeviceRun { ram, disk, bs, is_short, is_armed: false };
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        run.step(&mut input);
    }
    run.end();
}

/// Data of a kind: one byte, few different bytes, or noise in a part of each KiB.
fn data(input: &mut Input<'_>, len: usize) -> Vec<u8> {
    let (kind, seed) = (input.below(4), input.byte());
    let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let noisy = |at: usize| kind == 3 || kind == 2 && at % 1024 < 512;
    let any = |at| match kind {
        0 => seed,
        _ if noisy(at) => byte(),
        _ => byte() % 4,
    };
    (0..len).map(any).collect()
}

impl DeviceRun {
    fn inject(&self, name: &str, value: u64) {
        let fault = Injection::Device { name: name.to_owned(), value: value.to_string() };
        self.ram.inject(&fault).expect("the device has the fault, and it takes numbers");
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let len_max = if input.below(8) == 0 { LEN_MAX } else { 16 << 10 };
        match input.byte() {
            0..16 => {
                let one_in = input.choose(&[0, 1, 2, 5, 20]);
                self.inject("nospc", one_in);
                self.is_short |= one_in > 0;
            }
            16..32 if self.ram.config().backing.is_some() => {
                self.inject(input.choose(&FAULTS), 1 + input.below(8));
                self.is_armed = true;
            }
            16..72 => self.work(input),
            72..136 => {
                let (at, len) = self.range(input, len_max);
                self.read(at, len as u64);
            }
            136..148 => self.clear(input, Op::Discard, Flags::NONE),
            148..156 => self.clear(input, Op::WriteZeroes, Flags::NONE),
            156..164 => self.clear(input, Op::WriteZeroes, Flags::NOUNMAP),
            _ => {
                let (at, len) = self.range(input, len_max);
                let data = data(input, len);
                self.change(Op::Write, Flags::NONE, at, &data);
            }
        }
        let limit = self.ram.config().mem_limit;
        let used = self.ram.stats().mm.mem_used_total;
        assert!(limit == 0 || used <= limit, "{used} bytes of {limit}");
    }

    fn range(&self, input: &mut Input<'_>, len_max: u64) -> (u64, usize) {
        let len = self.bs * (1 + input.below(len_max / self.bs));
        let blocks = (SIZE - len) / self.bs + 1;
        let at = (input.below(256) << 8 | input.below(256)) % blocks;
        (at * self.bs, len as usize)
    }

    fn clear(&mut self, input: &mut Input<'_>, op: Op, flags: Flags) {
        let (at, len) = self.range(input, LEN_MAX);
        self.change(op, flags, at, &vec![0; len]);
    }

    /// Removes the faults of the backing file.
    fn disarm(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            FAULTS.iter().for_each(|fault| self.inject(fault, 0));
        }
    }

    fn read(&mut self, at: u64, len: u64) {
        let mut ended = self.disk.read(at, len);
        if ended == Err(Status::IoErr) && self.is_armed {
            self.disarm();
            ended = self.disk.read(at, len);
        }
        assert_eq!(ended, Ok(()), "a read of {len} bytes at {at}");
    }

    fn change(&mut self, op: Op, flags: Flags, at: u64, data: &[u8]) {
        match self.disk.change(op, flags, at, data) {
            Status::Ok => return,
            Status::NoSpc if self.is_short => {}
            Status::IoErr if self.is_armed => {}
            other => panic!("{op} of {} bytes at {at}: {other}", data.len()),
        }
        self.disarm();
        self.disk.adopt(op, at, data);
    }

    fn work(&mut self, input: &mut Input<'_>) {
        let (which, _) = input.choose(&Which::ALL);
        let (age, blocks_max) = (1 + input.below(3) as u8, input.below(64));
        let selection = Selection { which, age, blocks_max, ..Selection::default() };
        match input.below(5) {
            0 => self.ram.idle(),
            1 => drop(self.ram.compact().expect("there are hands enough")),
            2 if !self.ram.config().recompress.is_empty() => {
                self.ram.recompress(&selection).expect("there is a second algorithm");
            }
            _ if self.ram.config().backing.is_some() => {
                match self.ram.write_back(&selection, 1 << 20) {
                    Ok(_) => {}
                    Err(RamError::WriteBack { .. }) if self.is_armed => {}
                    Err(other) => panic!("{other}"),
                }
            }
            _ => {}
        }
    }

    /// Checks that all contents are right, and that all memory is returned.
    fn end(mut self) {
        self.disarm();
        self.inject("nospc", 0);
        self.disk.compare();
        self.disk.discard_all();
        self.disk.compare();
        self.ram.compact().expect("there are hands enough");
        let stats = self.ram.stats();
        assert_eq!(stats.mm.orig_data_size, 0, "{stats:?}");
        assert_eq!((stats.mm.compr_data_size, stats.bd.bd_count), (0, 0), "{stats:?}");
        assert_eq!(stats.mm.mem_used_total, stats.dedup.meta_data_size, "{stats:?}");
        assert!(self.ram.size_classes().is_empty(), "{stats:?}");
    }
}
