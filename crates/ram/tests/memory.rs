//! The memory statistics match the system's: the process grows by what a device uses and shrinks by
//! what it frees. A single test, so that no other test allocates meanwhile.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.
#![cfg(target_os = "linux")]

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Bio, Composed, Disk, Flags, Op, Sector};
use blockyard_ram::{Ram, RamConfig};

const SIZE: u64 = 64 << 20;
const CHUNK: usize = 64 << 10;
/// Tolerance in bytes for buffers, stacks, and memory that the allocator keeps.
const SLACK: i64 = 4 << 20;

/// Resident memory of this process in bytes.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: i64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn freed_memory_returns_to_the_system() {
    let mut rng = fastrand::Rng::with_seed(5);
    let mut noise = vec![0; CHUNK];
    // Without huge pages and with them.
    for compact in [0, 3] {
        let ram = Ram::open(RamConfig { size: SIZE, compact, ..RamConfig::default() }).unwrap();
        let channels = ChannelConfig::default();
        let disk = Composed::new("r".to_owned(), "ram", ram.clone(), channels);
        let mut io = Io::new(disk.open().unwrap(), CHUNK);
        io.write(Sector(0), &[1; CHUNK], Flags::NONE).unwrap();
        let before = resident();
        let used = || {
            let stats = ram.stats();
            // The table's pages are allocated as they are written.
            (stats.mm.mem_used_total + stats.table_bytes) as i64
        };
        let seen = |what: &str, wanted: i64| {
            let grown = resident() - before;
            assert!((grown - wanted).abs() < SLACK, "{what}, compact={compact}: {grown} {wanted}");
        };
        for at in (0..SIZE).step_by(CHUNK) {
            rng.fill(&mut noise);
            io.write(Sector(at / 512), &noise, Flags::NONE).unwrap();
        }
        ram.compact_in_background();
        assert!(used() > SIZE as i64);
        seen("filled", used());
        // Three quarters of the segments, so that no object has to move.
        io.run(Bio::new(Op::Discard, Sector(0), SIZE / 512 / 4 * 3)).unwrap();
        ram.compact().unwrap();
        assert!(used() < SIZE as i64 / 3);
        seen("after a discard", used());
        io.run(Bio::new(Op::Discard, Sector(0), SIZE / 512)).unwrap();
        ram.compact().unwrap();
        seen("empty", used());
    }
}
