//! Background compaction reclaims the space that random overwrites leave between objects, without a
//! request, and does not change data.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Disk, Flags, Sector};
use blockyard_ram::{Ram, RamConfig};

const SIZE: u64 = 24 << 20;
const BLOCK: usize = 4096;

/// A block; compressed sizes vary widely.
fn block(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut data = vec![0x20; BLOCK];
    let noise = rng.usize(100..3500);
    rng.fill(&mut data[..noise]);
    data
}

fn io(ram: &Arc<Ram>) -> Io {
    let (name, depth) = ("r".to_owned(), ChannelConfig::default());
    let disk = Composed::new(name, "ram", Arc::clone(ram), depth);
    Io::new(disk.open().unwrap(), 1 << 20)
}

/// Overhead in percent of the stored bytes.
fn overhead(ram: &Ram) -> f64 {
    let mm = ram.stats().mm;
    (mm.mem_used_total as f64 / mm.compr_data_size as f64 - 1.0) * 100.0
}

/// A device that was filled and overwritten at random, and its expected contents.
fn overwritten(ram: &Arc<Ram>) -> (Io, Vec<Vec<u8>>) {
    let mut io = io(ram);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut wanted: Vec<_> = (0..SIZE as usize / BLOCK).map(|_| block(&mut rng)).collect();
    for (number, data) in wanted.iter().enumerate() {
        io.write(Sector(number as u64 * 8), data, Flags::NONE).unwrap();
    }
    for _ in 0..4 * wanted.len() {
        let number = rng.usize(0..wanted.len());
        wanted[number] = block(&mut rng);
        io.write(Sector(number as u64 * 8), &wanted[number], Flags::NONE).unwrap();
    }
    (io, wanted)
}

#[track_caller]
fn compare(io: &mut Io, wanted: &[Vec<u8>]) {
    let mut found = vec![0; BLOCK];
    for (number, data) in wanted.iter().enumerate() {
        io.read(Sector(number as u64 * 8), &mut found).unwrap();
        assert!(found == *data, "block {number}");
    }
}

#[test]
fn space_lost_by_overwriting_is_compacted() {
    let config = || RamConfig { size: SIZE, ..RamConfig::default() };
    let never = Ram::open(RamConfig { compact: 0, ..config() }).unwrap();
    let (mut untouched, wanted) = overwritten(&never);
    never.compact_in_background();
    let left = overhead(&never);
    assert!(left > 6.0, "{left} % are too little to win anything");
    assert_eq!(never.compact_percent(), 0);
    // Enabled at run time, compaction runs.
    never.set_compact(3).unwrap();
    never.compact_in_background();
    let won = overhead(&never);
    assert!(won <= 3.0, "{left} % became {won} %");
    assert!(never.stats().mm.pages_compacted > 0);
    compare(&mut untouched, &wanted);

    let always = Ram::open(config()).unwrap();
    assert_eq!(always.compact_percent(), 3);
    // A round among the writes may gain little and then wait until more is stored. Disable rounds
    // until the writes are over.
    always.set_compact(100).unwrap();
    let (mut io, wanted) = overwritten(&always);
    always.set_compact(3).unwrap();
    always.compact_in_background();
    let won = overhead(&always);
    assert!(won <= 3.0, "{won} %");
    compare(&mut io, &wanted);
    // If there is nothing to gain, a round does nothing.
    let compacted = always.stats().mm.pages_compacted;
    always.compact_in_background();
    assert_eq!(always.stats().mm.pages_compacted, compacted);
    always.set_compact(50).unwrap();
    assert_eq!(always.compact_percent(), 50);
    assert_eq!(always.set_compact(101).unwrap_err().field(), "compact");
    always.set_compact(0).unwrap();
    always.compact_in_background();
    assert_eq!(always.compact_percent(), 0);
}

/// Rounds run continuously while four threads write: no data are lost.
#[test]
fn compaction_rounds_concurrent_with_writers() {
    let ram = Ram::open(RamConfig { size: SIZE, ..RamConfig::default() }).unwrap();
    std::thread::scope(|scope| {
        let writers = [0, 1, 2, 3u64].map(|number| {
            let ram = &ram;
            scope.spawn(move || {
                let mut io = io(ram);
                let mut rng = fastrand::Rng::with_seed(number);
                // This thread owns every fourth block.
                let mut wanted = vec![vec![0; BLOCK]; 500];
                for _ in 0..3000 {
                    let mine = rng.usize(0..wanted.len());
                    wanted[mine] = block(&mut rng);
                    let at = Sector((mine as u64 * 4 + number) * 8);
                    io.write(at, &wanted[mine], Flags::NONE).unwrap();
                }
                let mut found = vec![0; BLOCK];
                for (mine, data) in wanted.iter().enumerate() {
                    io.read(Sector((mine as u64 * 4 + number) * 8), &mut found).unwrap();
                    assert!(found == *data, "thread {number}, block {mine}");
                }
            })
        });
        // However late the writers begin, and however long they take.
        while !writers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            ram.compact_in_background();
        }
    });
    // Rounds that lost to writers are not repeated before enough is stored again.
    let (mut io, wanted) = overwritten(&ram);
    ram.compact_in_background();
    assert!(ram.stats().mm.pages_compacted > 0);
    compare(&mut io, &wanted);
}
