//! Cost of the device compared with the bare codec, as CPU time per block of 4 KiB. The device has
//! 256 MiB. Blocks are written and read in sequential records of 16 KiB, and one by one at random.
//! The data are program files.
//!
//! Each row is split into parts. A figure is the sum over the parts of the minimum over the rounds,
//! so that other work on the machine has little effect.
//!
//! `cargo bench -p blockyard-ram --bench path [ROW]`. `HALF=1` uses blocks that compress by half,
//! `DEDUP=1` devices with deduplication, `COMPACT=0` devices without background compaction.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::fs;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Bio, BufRef, Channel, Composed, Disk, Op, Region, RegionId, Sector};
use blockyard_ram::codec::{Decoder, Encoder, packed_bytes_max};
use blockyard_ram::{Codec, CodecConfig, Ram, RamConfig};

const BLOCK: usize = 4096;
const DATA_BYTES: usize = 16 << 20;
const DEVICE_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 7;
/// Operations in a part.
const PART: usize = 256;

/// CPU time of this thread or of the process, in nanoseconds.
fn cpu_ns(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that lives until the call returns.
    let done = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(done, 0);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Data from program files.
fn programs() -> Vec<u8> {
    let mut paths: Vec<_> =
        fs::read_dir("/usr/bin").unwrap().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut data = Vec::with_capacity(DATA_BYTES);
    for path in paths {
        let Ok(file) = fs::read(path) else { continue };
        // Limit the share of a single large program.
        data.extend_from_slice(&file[..file.len().min(512 << 10) / BLOCK * BLOCK]);
        if data.len() >= DATA_BYTES {
            break;
        }
    }
    data.truncate(DATA_BYTES);
    data
}

/// Blocks that compress by half, as fio makes them: half noise, half one byte.
fn halves() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(8);
    let mut data = vec![0; DATA_BYTES];
    data.chunks_mut(BLOCK).for_each(|block| random.fill(&mut block[..BLOCK / 2]));
    data
}

/// A device with its channel and the test data.
struct Device {
    channel: Box<dyn Channel>,
    bytes: Arc<Region>,
    source: RegionId,
    buffer: RegionId,
    out: Vec<blockyard_core::Completion>,
}

impl Device {
    fn new(size: u64, data: &[u8]) -> Device {
        let compact = std::env::var("COMPACT").map_or(3, |percent| percent.parse().unwrap());
        let dedup = std::env::var_os("DEDUP").is_some();
        let ram = Ram::open(RamConfig { size, compact: 3, dedup, ..RamConfig::default() }).unwrap();
        let depth = ChannelConfig::default();
        let disk = Composed::new("r".to_owned(), "ram", Arc::clone(&ram), depth);
        let mut channel = disk.open().unwrap();
        let bytes = Region::alloc(data.len());
        bytes.write(0, data);
        let source = channel.register(Arc::clone(&bytes));
        let buffer = channel.register(Region::alloc(4 * BLOCK));
        let mut device = Device { channel, bytes, source, buffer, out: Vec::new() };
        for at in (0..size).step_by(4 * BLOCK) {
            device.push(Op::Write, at, 4 * BLOCK, at % data.len() as u64);
        }
        (0..4).for_each(|_| ram.compact_in_background());
        ram.set_compact(compact).unwrap();
        device
    }

    fn push(&mut self, op: Op, at: u64, len: usize, source: u64) {
        let write = BufRef { region: self.source, offset: source };
        let read = BufRef { region: self.buffer, offset: 0 };
        let buf = if op == Op::Write { write } else { read };
        let bio = Bio::new(op, Sector(at / 512), len as u64 / 512).with_buf(buf);
        assert_eq!(self.channel.push(&[bio]), 1);
        self.channel.submit();
        self.out.clear();
        while self.channel.reap(&mut self.out) == 0 {}
        assert!(self.out[0].status.is_ok());
    }

    fn carry(&mut self, op: Op, at: u64, source: u64) {
        let write = BufRef { region: self.source, offset: source };
        let read = BufRef { region: self.buffer, offset: 0 };
        let buf = if op == Op::Write { write } else { read };
        let done = self.channel.execute_inline(op, Sector(at / 512), BLOCK as u64 / 512, buf);
        assert!(done.is_some_and(|status| status.is_ok()));
    }
}

/// The bare codec on the same data.
struct Bare {
    codec: Codec,
    encoder: Encoder,
    decoder: Decoder,
    packed: Vec<u8>,
    ends: Vec<usize>,
    into: Vec<u8>,
}

const WORTH_MAX: usize = BLOCK - BLOCK / 16;

impl Bare {
    fn new(data: &[u8]) -> Bare {
        let codec = Codec::new(&CodecConfig::default(), "algo").unwrap();
        let mut encoder = codec.encoder(BLOCK).unwrap();
        let mut into = vec![0; packed_bytes_max(BLOCK)];
        let (mut packed, mut ends) = (Vec::new(), Vec::new());
        for block in data.chunks_exact(BLOCK) {
            let len = codec.compress(&mut encoder, block, &mut into, usize::MAX).unwrap();
            packed.extend_from_slice(&into[..len]);
            ends.push(packed.len());
        }
        let decoder = Decoder::new(BLOCK, false).unwrap();
        Bare { codec, encoder, decoder, packed, ends, into }
    }

    fn compress(&mut self, block: &[u8]) {
        let len = self.codec.compress(&mut self.encoder, block, &mut self.into, WORTH_MAX);
        std::hint::black_box(len);
    }

    fn decompress(&mut self, block: usize) {
        let from = block.checked_sub(1).map_or(0, |before| self.ends[before]);
        let packed = &self.packed[from..self.ends[block]];
        let into = &mut self.into[..BLOCK];
        self.codec.decompress_here(&mut self.decoder, packed, into).unwrap();
    }
}

/// Name of the row, blocks per operation, and the function that runs operation N.
type Row<'r> = (&'r str, usize, &'r mut dyn FnMut(usize));

/// Runs the rows in interleaved rounds and prints the minima of their parts.
fn compare(rows: &mut [Row<'_>], operations: usize) {
    let (mut own, mut all) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
    let only = std::env::args().skip(1).find(|word| !word.starts_with("--"));
    let parts = operations / PART;
    let mut least = vec![vec![f64::MAX; parts]; rows.len()];
    for _ in 0..ROUNDS {
        for (row, ((name, _, work), least)) in rows.iter_mut().zip(&mut least).enumerate() {
            let clocks = [libc::CLOCK_THREAD_CPUTIME_ID, libc::CLOCK_PROCESS_CPUTIME_ID];
            let before = clocks.map(cpu_ns);
            if only.as_deref().is_some_and(|only| only != *name) {
                continue;
            }
            for (part, least) in least.iter_mut().enumerate() {
                let before = cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID);
                (part * PART..(part + 1) * PART).for_each(&mut *work);
                *least = least.min(cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID) - before);
            }
            own[row] += cpu_ns(clocks[0]) - before[0];
            all[row] += cpu_ns(clocks[1]) - before[1];
        }
    }
    for (row, ((name, blocks, _), least)) in rows.iter().zip(&least).enumerate() {
        let per_block = least.iter().sum::<f64>() / (parts * PART * blocks) as f64;
        if per_block < 1e9 {
            let times = (ROUNDS * parts * PART * blocks) as f64;
            let (own, all) = (own[row] / times, all[row] / times);
            println!("{name:<16} {per_block:7.0} ns a block; all {own:7.0}, all threads {all:7.0}");
        }
    }
}

fn main() {
    let data = if std::env::var_os("HALF").is_some() { halves() } else { programs() };
    let blocks = data.len() / BLOCK;
    let mut random = fastrand::Rng::with_seed(6);
    let mut one = Bare::new(&data);
    let mut two = Bare::new(&data);
    let mut small = Device::new(data.len() as u64, &data);
    let mut other = Device::new(data.len() as u64, &data);
    let record = |number: usize| (number * 4 * BLOCK % DATA_BYTES) as u64;
    let four = |number: usize| (0..4).map(move |at| (number * 4 + at) % blocks);
    compare(
        &mut [
            ("bare-write", 4, &mut |number| {
                four(number).for_each(|block| one.compress(&data[block * BLOCK..][..BLOCK]));
            }),
            ("path-write", 4, &mut |number| {
                small.push(Op::Write, record(number), 4 * BLOCK, record(number));
            }),
            ("bare-read", 4, &mut |number| four(number).for_each(|block| two.decompress(block))),
            ("path-read", 4, &mut |number| other.push(Op::Read, record(number), 4 * BLOCK, 0)),
        ],
        blocks / 4,
    );
    let mut count = 0_u64;
    let mut fresh = |number: usize| {
        let at = record(number / 4) + (number % 4 * BLOCK) as u64;
        // Contents that no other block has.
        count += 1;
        small.bytes.write(at, &count.to_le_bytes());
        small.carry(Op::Write, at, at);
    };
    compare(&mut [("fresh-write", 1, &mut fresh)], blocks);
    drop((small, other));
    let anywhere: Vec<(u64, u64)> = (0..65_536)
        .map(|_| {
            let (at, source) = (random.u64(..DEVICE_BYTES / 4096), random.usize(..blocks));
            (at * 4096, (source * BLOCK) as u64)
        })
        .collect();
    let mut reads = Device::new(DEVICE_BYTES, &data);
    let mut writes = Device::new(DEVICE_BYTES, &data);
    let mut mixed = Device::new(DEVICE_BYTES, &data);
    compare(
        &mut [
            ("bare-any-write", 1, &mut |number| {
                let at = anywhere[number].1 as usize;
                one.compress(&data[at..at + BLOCK]);
            }),
            ("read", 1, &mut |number| reads.carry(Op::Read, anywhere[number].0, 0)),
            ("write", 1, &mut |number| {
                writes.carry(Op::Write, anywhere[number].0, anywhere[number].1);
            }),
            ("mixed", 1, &mut |number| {
                let op = if number * 7 % 11 % 2 == 0 { Op::Read } else { Op::Write };
                mixed.carry(op, anywhere[number].0, anywhere[number].1);
            }),
        ],
        anywhere.len(),
    );
}
