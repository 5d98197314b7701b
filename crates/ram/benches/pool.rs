//! Cost and overhead of store and pool. Measures the CPU time of reads and writes per block of 4
//! KiB, next to that of the bare compressor. Measures the ratio of system memory to compressed
//! bytes after a first fill, after random overwrites, and after compaction. The data are programs,
//! text, and blocks of half noise.
//!
//! `cargo bench -p blockyard-ram --bench pool`
#![allow(unsafe_code, clippy::unwrap_used)]

use std::cell::RefCell;
use std::fs;
use std::hint::black_box;
use std::path::Path;

use blockyard_ram::codec::{Decoder, packed_bytes_max};
use blockyard_ram::{Access, Algo, Codec, CodecConfig, New, Pool, PoolConfig, Store};
use blockyard_sync::block_table::{BlockTable, Word};

const BLOCK: usize = 4096;
/// Bytes of each kind of data.
const PART_BYTES: usize = 8 << 20;
const ROUNDS: usize = 7;

/// CPU time of this thread, in nanoseconds.
fn cpu_ns() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that lives until the call returns.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(done, 0);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Chunks of 16 KiB at random places of the files in a directory.
fn files(root: &str, wanted: &[&str], random: &mut fastrand::Rng) -> Vec<u8> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(root).to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(folder) else { continue };
        for entry in entries.flatten() {
            let (path, Ok(kind)) = (entry.path(), entry.file_type()) else { continue };
            let name = path.to_string_lossy().into_owned();
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() && wanted.iter().any(|end| name.ends_with(end)) {
                found.push(path);
            }
        }
    }
    found.sort();
    let mut data = Vec::with_capacity(PART_BYTES);
    let mut tries = 0;
    while data.len() < PART_BYTES && !found.is_empty() && tries < 100_000 {
        tries += 1;
        let Ok(file) = fs::read(&found[random.usize(..found.len())]) else { continue };
        let chunk = 16 << 10;
        if file.len() >= chunk {
            let at = random.usize(..=file.len() - chunk);
            data.extend_from_slice(&file[at..at + chunk]);
        }
    }
    data.truncate(PART_BYTES);
    data
}

/// Blocks that are half noise and half one byte.
fn halves(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut data = vec![0x5a; PART_BYTES];
    data.chunks_mut(BLOCK).for_each(|block| random.fill(&mut block[..BLOCK / 2]));
    data
}

/// Compresses and stores blocks with one codec.
struct Bench {
    codec: Codec,
    encoder: blockyard_ram::codec::Encoder,
    decoder: Decoder,
    packed: Vec<u8>,
    plain: Vec<u8>,
}

impl Bench {
    fn new() -> Bench {
        let codec = CodecConfig { algo: Algo::Lz4, level: None, dictionary: None };
        let codec = Codec::new(&codec, "algo").unwrap();
        Bench {
            encoder: codec.encoder(BLOCK).unwrap(),
            decoder: Decoder::new(BLOCK, false).unwrap(),
            codec,
            packed: vec![0; packed_bytes_max(BLOCK)],
            plain: vec![0; BLOCK],
        }
    }

    fn compress(&mut self, plain: &[u8]) -> Option<usize> {
        let len_max = BLOCK - BLOCK / 16;
        self.codec.compress(&mut self.encoder, plain, &mut self.packed, len_max)
    }

    fn write(&mut self, access: &mut Access, block: u64, plain: &[u8]) {
        let new = match self.compress(plain) {
            Some(len) => New::Bytes(&self.packed[..len], Word::NOTHING),
            None => New::Bytes(plain, Word::NOTHING.with_huge(true)),
        };
        access.replace(block, new).unwrap();
    }

    fn unpack(&mut self, packed: &[u8], huge: bool) {
        if huge {
            self.plain.copy_from_slice(packed);
            return;
        }
        let (decoder, into) = (&mut self.decoder, self.plain.as_mut_ptr());
        // SAFETY: `plain` is a block long and belongs to this fixture.
        unsafe { self.codec.decompress(decoder, packed, into, BLOCK) }.unwrap();
    }

    fn read(&mut self, access: &mut Access, block: u64) {
        access.read(block, |word, packed| self.unpack(packed, word.is_huge()));
        black_box(&self.plain);
    }
}

/// Runs the works in interleaved rounds and returns each one's minimum CPU time per block.
fn compare(blocks: usize, works: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut least = vec![f64::MAX; works.len()];
    for _ in 0..ROUNDS {
        for (work, least) in works.iter_mut().zip(&mut least) {
            let before = cpu_ns();
            work();
            *least = least.min((cpu_ns() - before) / blocks as f64);
        }
    }
    least
}

fn overhead(when: &str, access: &mut Access) {
    access.reclaim();
    let usage = access.store().pool().usage();
    println!(
        "    {when:<22} {:>9} B stored, {:>9} B used: {:+.2} % (free {}, grain {})",
        usage.stored_bytes,
        usage.used_bytes,
        (usage.used_bytes as f64 / usage.stored_bytes as f64 - 1.0) * 100.0,
        usage.free_bytes,
        usage.grain_bytes,
    );
}

fn block_of(data: &[u8], block: usize) -> &[u8] {
    &data[block * BLOCK..(block + 1) * BLOCK]
}

/// The baseline: the data as the compressor alone packs them, back to back.
struct Floor {
    packed: Vec<u8>,
    /// The end of each block, and whether it is uncompressed.
    ends: Vec<(usize, bool)>,
}

impl Floor {
    fn new(bench: &mut Bench, data: &[u8]) -> Floor {
        let blocks = data.len() / BLOCK;
        let mut floor = Floor { packed: Vec::with_capacity(data.len()), ends: Vec::new() };
        for block in 0..blocks {
            let plain = block_of(data, block);
            let done = bench.compress(plain);
            floor.packed.extend_from_slice(done.map_or(plain, |len| &bench.packed[..len]));
            floor.ends.push((floor.packed.len(), done.is_none()));
        }
        floor
    }

    fn read(&self, bench: &mut Bench, block: usize) {
        let start = if block == 0 { 0 } else { self.ends[block - 1].0 };
        let (end, huge) = self.ends[block];
        bench.unpack(&self.packed[start..end], huge);
        black_box(&bench.plain);
    }
}

/// CPU time of reads and writes, next to the compressor alone in a loop over the same data.
fn speed(bench: &mut Bench, access: &mut Access, data: &[u8], random: &mut fastrand::Rng) {
    let blocks = data.len() / BLOCK;
    let floor = Floor::new(bench, data);
    let mut order: Vec<usize> = (0..blocks).collect();
    random.shuffle(&mut order);
    let both = RefCell::new((bench, access));
    let least = compare(
        blocks,
        &mut [
            &mut || {
                let (bench, _) = &mut *both.borrow_mut();
                for block in 0..blocks {
                    black_box(bench.compress(block_of(data, block)));
                }
            },
            &mut || {
                let (bench, access) = &mut *both.borrow_mut();
                (0..blocks)
                    .for_each(|block| bench.write(access, block as u64, block_of(data, block)));
            },
            &mut || {
                let (bench, _) = &mut *both.borrow_mut();
                (0..blocks).for_each(|block| floor.read(bench, block));
            },
            &mut || {
                let (bench, access) = &mut *both.borrow_mut();
                (0..blocks).for_each(|block| bench.read(access, block as u64));
            },
            &mut || {
                let (bench, _) = &mut *both.borrow_mut();
                order.iter().for_each(|&block| floor.read(bench, block));
            },
            &mut || {
                let (bench, access) = &mut *both.borrow_mut();
                order.iter().for_each(|&block| bench.read(access, block as u64));
            },
        ],
    );
    for (what, at) in [("write", 0), ("read", 2), ("random read", 4)] {
        let (bare, ours) = (least[at], least[at + 1]);
        println!("    {what:<12} bare {bare:>5.0} ns, ours {ours:>5.0} ns: {:.3}", ours / bare);
    }
}

fn measure(name: &str, data: &[u8], random: &mut fastrand::Rng) {
    let blocks = data.len() / BLOCK;
    let mut bench = Bench::new();
    let pool = Pool::new(&PoolConfig::new(data.len() as u64, BLOCK)).unwrap();
    let store = Store::new(BlockTable::new(blocks as u64).unwrap(), pool);
    let mut access = store.access().unwrap();
    println!("{name}: {blocks} blocks");
    let before = cpu_ns();
    (0..blocks).for_each(|block| bench.write(&mut access, block as u64, block_of(data, block)));
    println!("    first write            {:.0} ns", (cpu_ns() - before) / blocks as f64);
    overhead("filled", &mut access);
    speed(&mut bench, &mut access, data, random);
    for _ in 0..4 * blocks {
        let (at, from) = (random.usize(..blocks), random.usize(..blocks));
        bench.write(&mut access, at as u64, block_of(data, from));
    }
    overhead("overwritten at random", &mut access);
    let before = cpu_ns();
    let done = access.compact(|| false);
    println!("    {done:?} in {:.1} ms", (cpu_ns() - before) / 1e6);
    overhead("compacted", &mut access);
}

fn main() {
    let mut random = fastrand::Rng::with_seed(6);
    let programs = files("/usr/bin", &[""], &mut random);
    let text = files("/usr/share", &["copyright", ".txt", ".py", ".pm", ".h", ".md"], &mut random);
    let halves = halves(&mut random);
    let mut mix = Vec::new();
    for part in [&programs, &text, &halves] {
        mix.extend_from_slice(part);
    }
    for (name, data) in [("programs", programs), ("text", text), ("halves", halves), ("mix", mix)] {
        measure(name, &data, &mut random);
    }
}
