//! After open, the path from push to reap does not allocate: counted by the allocator itself.
#![allow(clippy::disallowed_types, clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::gate::ZoneWritePlugs;
use blockyard_core::*;
use blockyard_null::{IrqMode, NullConfig, NullOnMedia};
use blockyard_testing::allocations::Counting;
use blockyard_zone_media::MemoryMedium;
use common::Fixture;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ZONE: u64 = 2048;
const BATCH: usize = 32;

/// Sends batches of all kinds through a channel; does not count the first of each kind.
///
/// The last two kinds succeed on every device, so that an allocation on a success path is found.
fn allocations(config: NullConfig, gated: bool) -> u64 {
    let (zoned, all_good) = (config.zoned, config.badblocks.is_empty());
    let fixture = if gated { gated_rig(config) } else { Fixture::new(config) };
    allocations_on(fixture, zoned, all_good)
}

fn allocations_on(mut fixture: Fixture, zoned: bool, all_good: bool) -> u64 {
    let mut bios = Vec::with_capacity(BATCH);
    let mut out = Vec::with_capacity(BATCH);
    let mut before = 0;
    for round in 0..64u64 {
        if round == 1 {
            before = Counting::made();
        }
        for kind in 0..9 {
            bios.clear();
            for index in 0..BATCH as u64 {
                let buf = BufRef { region: fixture.id, offset: index * 4096 };
                let zone = Sector((index + round) % 32 * ZONE);
                bios.push(match kind {
                    0 => Bio::read(Sector((index * 7919 + round * 31) % 8000 * 8), 8, buf),
                    1 if zoned => Bio::append(zone, 8, buf),
                    2 if zoned && index < 8 => Bio::new(Op::ZoneReset, zone, 0),
                    3 if zoned && index < 8 => Bio::new(Op::ZoneOpen, zone, 0),
                    1..=3 => Bio::write(Sector((index * 104_729 + round) % 8000 * 8), 8, buf),
                    4 => Bio::flush(),
                    6 if index == 0 && zoned => Bio::new(Op::ZoneResetAll, Sector(0), 0),
                    6 if index == 0 => Bio::flush(),
                    // Sequential from the start of a zone: adjacent writes, which merge.
                    6 if index <= 16 => Bio::write(Sector((index - 1) * 8), 8, buf),
                    // Sequential in the next zone, with NOMERGE.
                    6 => Bio::write(Sector(ZONE + (index - 17) * 8), 8, buf)
                        .with_flags(Flags::NOMERGE),
                    // Reads and writes mixed, far apart.
                    8 if index % 2 == 0 => {
                        Bio::read(Sector((index * 997 + round) % 8000 * 8), 8, buf)
                    }
                    8 if zoned => Bio::append(zone, 8, buf),
                    8 => Bio::write(Sector((index * 1009 + round) % 8000 * 8), 8, buf),
                    7 => Bio::read(Sector(index % 2 * ZONE + index / 2 * 8), 8, buf),
                    // Crosses boundaries, so that it is split, and merges with its neighbours.
                    _ => Bio::read(Sector((2000 + index * 64) % 60_000), 64, buf),
                });
            }
            assert_eq!(fixture.channel.push(&bios), BATCH);
            fixture.channel.submit();
            out.clear();
            while out.len() < BATCH {
                fixture.channel.reap(&mut out);
                fixture.channel.wait(None);
            }
            let good = out.iter().all(|completion| completion.status.is_ok());
            assert!(good || !(6..8).contains(&kind) || !all_good, "kind {kind}, round {round}");
        }
    }
    Counting::made() - before
}

/// A fixture whose channel goes through a zone write plug.
fn gated_rig(config: NullConfig) -> Fixture {
    let mut fixture = Fixture::new(config);
    let (name, depth) = ("gated".to_owned(), ChannelConfig::default());
    let device = Arc::clone(fixture.disk.device());
    let gates = ZoneWritePlugs::new(Arc::clone(&device)).unwrap().unwrap();
    let clock = fixture.clock.clone();
    let disk = Composed::with_clock(name, "null", device, depth, clock);
    fixture.channel = disk.with_gates(gates).open().unwrap();
    fixture.id = fixture.channel.register(Arc::clone(&fixture.region));
    fixture
}

/// A fixture whose channel shares a scheduler with an idle one.
fn scheduled_rig(config: NullConfig) -> Fixture {
    let mut fixture = Fixture::new(config);
    let (name, depth) = ("scheduled".to_owned(), ChannelConfig::default());
    let device = Scheduled::new(Arc::clone(fixture.disk.device()), true).unwrap();
    let clock = fixture.clock.clone();
    let disk = Composed::with_clock(name, "null", device, depth, clock);
    fixture.channel = disk.open().unwrap();
    fixture.id = fixture.channel.register(Arc::clone(&fixture.region));
    fixture
}

/// A fixture with a scheduler and the zone write plug that a zoned device needs.
fn gated_and_scheduled_rig(config: NullConfig) -> Fixture {
    let mut fixture = Fixture::new(config);
    let (name, depth) = ("both".to_owned(), ChannelConfig::default());
    let device = Arc::new(Scheduled::new(Arc::clone(fixture.disk.device()), true).unwrap());
    let gates = ZoneWritePlugs::new(Arc::clone(&device)).unwrap().unwrap();
    let clock = fixture.clock.clone();
    let disk = Composed::with_clock(name, "null", device, depth, clock);
    fixture.channel = disk.with_gates(gates).open().unwrap();
    fixture.id = fixture.channel.register(Arc::clone(&fixture.region));
    fixture
}

/// A fixture whose channel goes to a device on a medium, without the medium's own files.
fn on_medium_rig() -> Fixture {
    let config = NullConfig {
        size: 32 << 20,
        max_sectors: 128,
        zoned: true,
        zone_size: 1 << 20,
        zone_max_open: 4,
        zone_max_active: 8,
        ..NullConfig::default()
    };
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    let null = Arc::new(NullOnMedia::open_on(&config, memory).unwrap());
    let disk = Composed::new("medium".to_owned(), "null", null, ChannelConfig::default());
    let mut fixture = Fixture::new(config);
    fixture.channel = disk.open().unwrap();
    fixture.id = fixture.channel.register(Arc::clone(&fixture.region));
    fixture
}

#[test]
fn nothing_is_allocated_after_open() {
    let plain = || NullConfig { size: 32 << 20, max_sectors: 128, ..NullConfig::default() };
    let zoned = || NullConfig { zoned: true, zone_size: 1 << 20, ..plain() };
    let timer = |config| NullConfig { irqmode: IrqMode::Timer, ..config };
    let limited = || NullConfig { zone_max_open: 4, zone_max_active: 8, ..zoned() };
    let configs = [
        ("plain", plain()),
        ("zoned", zoned()),
        ("limits", limited()),
        ("memory", NullConfig { memory_backed: true, discard: true, ..plain() }),
        ("zoned memory, limits", NullConfig { memory_backed: true, ..limited() }),
        ("cache", NullConfig { memory_backed: true, cache_size: 64 << 10, ..plain() }),
        ("timer", NullConfig { irqmode: IrqMode::Timer, ..zoned() }),
        ("shared queue", NullConfig { submit_queues: Some(1), ..plain() }),
        ("bandwidth", NullConfig { mbps: 1000, ..plain() }),
        ("bad blocks", NullConfig { badblocks: "+100-101".to_owned(), ..plain() }),
    ];
    for (name, config) in configs {
        assert_eq!(allocations(config, false), 0, "{name}");
    }
    let scheduled = [
        ("scheduled", plain()),
        ("scheduled memory", NullConfig { memory_backed: true, discard: true, ..plain() }),
        ("scheduled timer", NullConfig { irqmode: IrqMode::Timer, ..plain() }),
        ("scheduled cache", NullConfig { memory_backed: true, cache_size: 64 << 10, ..plain() }),
        ("scheduled bad blocks", NullConfig { badblocks: "+100-101".to_owned(), ..plain() }),
    ];
    for (name, config) in scheduled {
        let all_good = config.badblocks.is_empty();
        assert_eq!(allocations_on(scheduled_rig(config), false, all_good), 0, "{name}");
    }
    for (name, config) in [("zoned", zoned()), ("timer, too", timer(zoned()))] {
        assert_eq!(allocations_on(gated_and_scheduled_rig(config), true, true), 0, "both, {name}");
    }
    let appendless = |config| NullConfig { zone_append_max_sectors: 0, ..config };
    let gated = [
        ("gated", zoned()),
        ("gated, limits", NullConfig { memory_backed: true, ..limited() }),
        ("gated, no append", appendless(limited())),
        ("gated, no append, timer", appendless(NullConfig { irqmode: IrqMode::Timer, ..zoned() })),
    ];
    for (name, config) in gated {
        assert_eq!(allocations(config, true), 0, "{name}");
    }
    assert_eq!(allocations_on(on_medium_rig(), true, true), 0, "on a medium");
}
