//! Memory overhead of the pool over the compressed bytes: at most 3 %, after filling, and after
//! random overwrites and compaction. Counted, not timed. The data are those of the bench `pool`:
//! programs, text, blocks of half noise, and all three mixed; and noise, which is stored
//! uncompressed.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::fs;
use std::path::Path;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Disk, Flags, Sector};
use blockyard_ram::{Ram, RamConfig};

const BLOCK: usize = 4096;
/// Bytes of each kind of data.
const PART_BYTES: usize = 8 << 20;
/// Maximum overhead in percent of the compressed bytes.
const LOST_MAX: f64 = 3.0;

const NOISE: &str = "noise";

/// Chunks of 16 KiB at random places of the files in some directories.
fn files(roots: &[&str], wanted: &[&str], rng: &mut fastrand::Rng) -> Vec<u8> {
    const CHUNK: usize = 16 << 10;
    let mut found = Vec::new();
    let mut folders: Vec<_> = roots.iter().map(|root| Path::new(root).to_owned()).collect();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(folder) else { continue };
        for entry in entries.flatten() {
            let (Ok(kind), Ok(meta)) = (entry.file_type(), entry.metadata()) else { continue };
            let name = entry.file_name().to_string_lossy().into_owned();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file()
                && meta.len() >= CHUNK as u64
                && wanted.iter().any(|end| name.ends_with(end))
            {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    assert!(found.len() > 10, "{roots:?} hold {} such files", found.len());
    let mut data = Vec::with_capacity(PART_BYTES);
    while data.len() < PART_BYTES {
        let file = fs::read(&found[rng.usize(..found.len())]).unwrap();
        let at = rng.usize(..=file.len() - CHUNK);
        data.extend_from_slice(&file[at..at + CHUNK]);
    }
    data
}

fn programs(rng: &mut fastrand::Rng) -> Vec<u8> {
    files(&["/usr/bin"], &[""], rng)
}

fn text(rng: &mut fastrand::Rng) -> Vec<u8> {
    let ends = ["copyright", ".txt", ".py", ".pm", ".pl", ".h", ".md"];
    files(&["/usr/share", "/usr/include", "/usr/lib/python3"], &ends, rng)
}

/// Blocks that are half noise and half one byte.
fn halves(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut data = vec![0x5a; PART_BYTES];
    data.chunks_mut(BLOCK).for_each(|block| rng.fill(&mut block[..BLOCK / 2]));
    data
}

fn noise(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut data = vec![0; PART_BYTES];
    rng.fill(&mut data);
    data
}

/// Fills a device, overwrites it four times at random, compacts it, and checks the overhead twice.
fn check(name: &str, data: &[u8], rng: &mut fastrand::Rng) {
    // Without background compaction: measures what filling alone leaves.
    let config = RamConfig { size: data.len() as u64, compact: 0, ..RamConfig::default() };
    let ram = Ram::open(config).unwrap();
    let disk_of = ram.clone();
    let channels = ChannelConfig::default();
    let disk = Composed::new("r".to_owned(), "ram", disk_of, channels);
    let mut io = Io::new(disk.open().unwrap(), 64 << 10);
    let lost = || {
        let mm = ram.stats().mm;
        match name {
            NOISE => assert_eq!(mm.compr_data_size, mm.orig_data_size, "{name}: {mm:?}"),
            _ => assert!(mm.compr_data_size < mm.orig_data_size, "{name}: {mm:?}"),
        }
        (mm.mem_used_total as f64 / mm.compr_data_size as f64 - 1.0) * 100.0
    };
    for (number, chunk) in data.chunks(64 << 10).enumerate() {
        io.write(Sector(number as u64 * 128), chunk, Flags::NONE).unwrap();
    }
    let filled = lost();
    assert!(filled <= LOST_MAX, "{name}, filled: {filled:.2} %");
    let blocks = data.len() / BLOCK;
    for _ in 0..4 * blocks {
        let (at, from) = (rng.usize(..blocks), rng.usize(..blocks));
        let block = &data[from * BLOCK..(from + 1) * BLOCK];
        io.write(Sector(at as u64 * 8), block, Flags::NONE).unwrap();
    }
    let overwritten = lost();
    ram.compact().unwrap();
    let compacted = lost();
    println!("{name}: {filled:.2} % filled, {overwritten:.2} % overwritten, {compacted:.2} % then");
    assert!(compacted <= LOST_MAX, "{name}, compacted: {overwritten:.2} % became {compacted:.2} %");
}

#[test]
fn hardly_more_than_the_compressed_bytes() {
    let mut rng = fastrand::Rng::with_seed(6);
    let parts = [
        ("programs", programs(&mut rng)),
        ("text", text(&mut rng)),
        ("half noise", halves(&mut rng)),
    ];
    let mix: Vec<u8> = parts.iter().flat_map(|(_, part)| part).copied().collect();
    for (name, part) in &parts {
        check(name, part, &mut rng);
    }
    check("all three", &mix, &mut rng);
    check(NOISE, &noise(&mut rng), &mut rng);
}
