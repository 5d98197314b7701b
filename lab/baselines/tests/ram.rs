//! The RAM disk's baselines pass the device contract, and agree with the product: on the same bios,
//! and where threads use the same blocks.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::sync::Arc;

use blockyard_baselines::locked_ram::LockedRam;
use blockyard_baselines::ram_table::{
    BitEntries, CasEntries, RwEntries, SpinEntries, Table, TableLock,
};
use blockyard_core::bio::Flags;
use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Device, Disk, Sector};
use blockyard_ram::{Ram, RamConfig};
use blockyard_testing::contract::{self, Fixture, Subject};
use blockyard_testing::seed::Seed;
use blockyard_testing::workload::{Mix, Workload};
use blockyard_yard::uri;

fn plain() -> RamConfig {
    RamConfig { size: 8 << 20, ..RamConfig::default() }
}

/// A RAM disk for sub-block writes of every length.
fn parts() -> RamConfig {
    RamConfig { size: 2 << 20, bs: 512, unit: 16_384, ..RamConfig::default() }
}

fn open<T: Table>(config: &RamConfig) -> LockedRam<T> {
    LockedRam::open(config).expect("the configuration fits")
}

fn keeps_the_contract<T: Table>(name: &str) {
    contract::run(&Subject::plain(name, true, || open::<T>(&plain())));
    let name = format!("{name}, 16k of 512");
    contract::run(&Subject::plain(&name, true, || open::<T>(&parts())));
}

#[test]
fn one_lock_over_the_table_keeps_the_contract() {
    keeps_the_contract::<TableLock>("table lock");
}

#[test]
fn a_lock_per_entry_keeps_the_contract() {
    keeps_the_contract::<SpinEntries>("spin");
}

#[test]
fn a_bit_per_entry_keeps_the_contract() {
    keeps_the_contract::<BitEntries>("bit spin");
}

fn disk(device: impl Device) -> Arc<dyn Disk> {
    let channels = ChannelConfig::default();
    Arc::new(Composed::new("pair".to_owned(), "ram", device, channels))
}

/// Executes the same bios with the same data on both; status and read data must be equal.
fn agree<T: Table>(stream: u64) {
    let seed = Seed::from_env();
    let _watch = seed.watch("product and baseline");
    for config in [plain(), parts()] {
        let product = Ram::open(config.clone()).expect("the configuration fits");
        let mut product = Fixture::new(disk(product), true);
        let mut baseline = Fixture::new(disk(open::<T>(&config)), true);
        let mut workload = Workload::new(seed, stream, Mix::wild());
        for count in 0..1500 {
            let bio = workload.next(&product.model).with_user_data(count);
            let bytes = usize::try_from(bio.sectors.saturating_mul(512)).unwrap_or(usize::MAX);
            let bytes = if bio.op.has_data() { bytes } else { 0 };
            let mut data = vec![0; product.region.len_bytes().min(bytes)];
            match workload.below(4) {
                0 => workload.fill(&mut data),
                1 => data.fill(count as u8),
                // Text that compresses, with another phase each time.
                _ => data.iter_mut().zip(count..).for_each(|(byte, at)| *byte = (at / 7) as u8),
            }
            let ends = [&mut product, &mut baseline].map(|fixture| {
                fixture.region.write(0, &data);
                let buf = fixture.buf(0);
                let end = fixture.run(bio.with_buf(buf));
                let mut found = vec![0; data.len()];
                fixture.region.read(0, &mut found);
                (end, found)
            });
            assert_eq!(ends[0].0, ends[1].0, "end of {bio:?}");
            assert!(ends[0].1 == ends[1].1, "data after {bio:?}");
            product.model.apply(&bio, &mut data);
        }
    }
}

#[test]
fn product_and_table_lock_agree() {
    agree::<TableLock>(1);
}

#[test]
fn product_and_entries_with_locks_agree() {
    agree::<CasEntries>(2);
    agree::<SpinEntries>(3);
    agree::<RwEntries>(4);
    agree::<BitEntries>(5);
}

const THREADS: u64 = 4;
const TURNS: u64 = 400;
/// The number of blocks that all threads write.
const HOT: u64 = 3;

/// A block that compresses, with the number of its write in each word.
fn tagged(tag: u64) -> Vec<u8> {
    (0..512_u64).flat_map(|word| ((tag << 16) | (word / 4)).to_le_bytes()).collect()
}

/// Every read returns the data of one write, whatever other threads write.
fn no_block_is_torn(disk: &Arc<dyn Disk>) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut io = Io::new(disk.open().expect("there is room"), 4096);
                let mut found = vec![0; 4096];
                for turn in 0..TURNS {
                    let at = Sector(turn % HOT * 8);
                    io.write(at, &tagged(turn * THREADS + thread + 1), Flags::NONE).unwrap();
                    io.read(at, &mut found).unwrap();
                    let tag = u64::from_le_bytes(*found.first_chunk().unwrap()) >> 16;
                    assert!(found == tagged(tag), "block {} is a mixture", turn % HOT);
                }
            });
        }
    });
}

/// Threads that write to different sectors of one block lose none of each other's writes.
fn no_part_is_lost(disk: &Arc<dyn Disk>) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut io = Io::new(disk.open().expect("there is room"), 512);
                let mut found = [0; 512];
                for turn in 0..TURNS {
                    let wanted = tagged(turn + 1)[..512].to_vec();
                    io.write(Sector(thread), &wanted, Flags::NONE).unwrap();
                    io.read(Sector(thread), &mut found).unwrap();
                    assert!(found[..] == wanted[..], "sector {thread} at turn {turn}");
                }
            });
        }
    });
}

#[test]
fn threads_that_meet_at_a_block_see_whole_writes() {
    let spec = uri::parse("ram:///t?size=1M&bs=512").unwrap();
    let product = blockyard_yard::stack::open(&spec).unwrap().disk;
    let baselines = blockyard_baselines::names_of("ram");
    assert_eq!(baselines.len(), 5);
    let baselines =
        baselines.into_iter().map(|name| blockyard_baselines::open(name, &spec).unwrap());
    for disk in std::iter::once(product).chain(baselines) {
        no_block_is_torn(&disk);
        no_part_is_lost(&disk);
    }
}

/// A baseline starts with the contents of the product's snapshot.
#[test]
fn a_snapshot_is_loaded() {
    let path = std::env::temp_dir().join(format!("by-lab-{}.snapshot", std::process::id()));
    let ram = Ram::open(RamConfig { size: 1 << 20, ..RamConfig::default() }).unwrap();
    let mut io = Io::new(disk(Arc::clone(&ram)).open().unwrap(), 4096);
    for block in [0, 7, 255] {
        io.write(Sector(block * 8), &tagged(block + 1), Flags::NONE).unwrap();
    }
    ram.save(&path, blockyard_ram::Replace::Own).unwrap();
    let spec = uri::parse(&format!("ram:///t?size=1M&load={}", path.display())).unwrap();
    for name in blockyard_baselines::names_of("ram") {
        let disk = blockyard_baselines::open(name, &spec).unwrap();
        let mut io = Io::new(disk.open().unwrap(), 4096);
        let mut found = vec![1; 4096];
        for block in [0, 1, 7, 255] {
            io.read(Sector(block * 8), &mut found).unwrap();
            let wanted = if block == 1 { vec![0; 4096] } else { tagged(block + 1) };
            assert!(found == wanted, "{name}: block {block}");
        }
    }
    std::fs::remove_file(&path).unwrap();
}
