//! A disk with the timing of a drive, on a manual clock: requests take as long as on the drive, and
//! the contract holds.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::Clock;
use blockyard_core::{Bio, Composed, Disk as _, Flags, Sector};
use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::sd::Sd;
use blockyard_smr::timed::Timed;
use blockyard_smr::timing::DriveTimes;
use blockyard_testing::clock::ManualClock;
use blockyard_testing::contract;
use blockyard_testing::model::ZoneRules;
use blockyard_zone_media::MemoryMedium;

fn open(config: &DiskConfig) -> Sd<Timed<Disk<MemoryMedium>>> {
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    let disk = Disk::open(config.clone(), memory).unwrap();
    Sd::open(Timed::new(disk, config, DriveTimes::HC620)).unwrap()
}

#[test]
fn the_contract_holds_in_slow_motion() {
    let config = DiskConfig {
        size: 8 << 20,
        zone_size: 512 << 10,
        zone_nr_conv: 2,
        zone_max_open: 3,
        physical_block: 512,
        ..DiskConfig::default()
    };
    let name = "smr, timed";
    contract::run_wrapped_by(ZoneRules::Zbc, name, true, {
        let config = config.clone();
        move || open(&config)
    });
    contract::run_gated_by(ZoneRules::Zbc, name, true, move || open(&config));
}

struct Fixture {
    io: Io,
    clock: ManualClock,
}

fn fixture(write_cache: bool) -> Fixture {
    let config = DiskConfig { zone_nr_conv: 524, write_cache, ..DiskConfig::default() };
    let clock = ManualClock::new();
    let (name, depth) = ("timed".to_owned(), ChannelConfig { depth: 64 });
    let sd = open(&config);
    let disk = Composed::with_clock(name, "smr", sd, depth, clock.clone());
    Fixture { io: Io::new(disk.open().unwrap(), 1 << 20), clock }
}

impl Fixture {
    /// The duration of an operation in milliseconds.
    fn takes_ms(&mut self, run: impl FnOnce(&mut Io)) -> u64 {
        let before = self.clock.now();
        run(&mut self.io);
        self.clock.now().since(before) / 1_000_000
    }
}

#[test]
fn reads_in_order_run_at_the_rate_of_the_medium_and_others_seek() {
    let mut fixture = fixture(true);
    let mut data = vec![0; 1 << 20];
    let in_order = fixture.takes_ms(|io| {
        for mib in 0..233 {
            io.read(Sector(mib << 11), &mut data).unwrap();
        }
    });
    // 233 MiB at 233 MB/s.
    assert!((1000..1100).contains(&in_order), "{in_order} ms");
    let mut rng = fastrand::Rng::with_seed(1);
    let scattered = fixture.takes_ms(|io| {
        for _ in 0..200 {
            io.read(Sector(rng.u64(..14 << 31) & !7), &mut data[..4096]).unwrap();
        }
    });
    // A seek of 7.4 ms and half a revolution of 8.3 ms each.
    assert!((2000..2800).contains(&scattered), "{scattered} ms for 200");
}

#[test]
fn write_cache_moves_the_time_of_writes_to_the_flush() {
    let data = vec![7; 1 << 20];
    let zone = |number: u64| Sector((524 + number) << 19);
    let write = |io: &mut Io| {
        for number in 0..50 {
            io.write(zone(number * 200), &data, Flags::NONE).unwrap();
        }
    };
    let mut cached = fixture(true);
    let hidden = cached.takes_ms(write);
    let shown = cached.takes_ms(|io| io.run(Bio::flush()).map(drop).unwrap());
    let through = fixture(false).takes_ms(write);
    assert!(hidden < 200, "{hidden} ms");
    assert!(shown > 300 && through > 500, "flush {shown} ms, uncached {through} ms");
}
