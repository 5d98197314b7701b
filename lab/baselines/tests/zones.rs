//! The baselines pass the device contract, and agree with the product on the same bios.

use std::sync::Arc;

use blockyard_baselines::locked_zones::LockedZones;
use blockyard_baselines::one_lock::OneLock;
use blockyard_core::bio::Bio;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::Injection;
use blockyard_core::zone::{AtomicZoneSet, ZoneCond, ZoneSet};
use blockyard_core::{Composed, Disk};
use blockyard_null::{Null, NullConfig};
use blockyard_testing::contract::{self, Fixture, Subject};
use blockyard_testing::seed::Seed;
use blockyard_testing::workload::{Mix, Workload};

/// 12 zones of 256 KiB, two of them conventional, and a last one of half that length.
fn zones() -> NullConfig {
    NullConfig {
        size: (3 << 20) - (128 << 10),
        bs: 512,
        max_sectors: 128,
        zoned: true,
        zone_size: 256 << 10,
        zone_nr_conv: 2,
        zone_append_max_sectors: 64,
        ..NullConfig::default()
    }
}

/// Limits low enough to be reached.
fn limits() -> NullConfig {
    NullConfig { zone_max_open: 3, zone_max_active: 5, ..zones() }
}

fn with_data(config: NullConfig) -> NullConfig {
    NullConfig { memory_backed: true, ..config }
}

fn keeps_the_contract<Z: ZoneSet>(name: &str, config: NullConfig) {
    let keeps_data = config.memory_backed;
    contract::run(&Subject::plain(name, keeps_data, move || {
        Null::<Z>::open_with(config.clone()).expect("the configuration fits")
    }));
}

#[test]
fn one_lock_keeps_the_contract_without_data() {
    keeps_the_contract::<OneLock>("one lock", zones());
}

#[test]
fn one_lock_keeps_the_contract_with_data_and_limits() {
    keeps_the_contract::<OneLock>("one lock, data, limits", with_data(limits()));
}

#[test]
fn locked_zones_keep_the_contract_without_data() {
    keeps_the_contract::<LockedZones>("locked zones", zones());
}

#[test]
fn locked_zones_keep_the_contract_with_data_and_limits() {
    keeps_the_contract::<LockedZones>("locked zones, data, limits", with_data(limits()));
}

fn disk<Z: ZoneSet>(config: &NullConfig) -> Arc<dyn Disk> {
    let null = Null::<Z>::open_with(config.clone()).expect("the configuration fits");
    let name = "pair".to_owned();
    let channels = ChannelConfig::default();
    Arc::new(Composed::new(name, "null", null, channels))
}

/// Random bios go to the product, to the baseline, and to the model that generates them.
struct Pair {
    product: Fixture,
    baseline: Fixture,
    workload: Workload,
}

impl Pair {
    fn new<B: ZoneSet>(config: &NullConfig, seed: Seed, stream: u64) -> Pair {
        let mix = Mix { hot_zones: 4, ..Mix::wild() };
        Pair {
            product: Fixture::new(disk::<AtomicZoneSet>(config), config.memory_backed),
            baseline: Fixture::new(disk::<B>(config), config.memory_backed),
            workload: Workload::new(seed, stream, mix),
        }
    }

    /// Executes one bio with the same data on both; status, sector and read data must be equal.
    fn step(&mut self, count: u64) {
        let bio = self.workload.next(&self.product.model).with_user_data(count);
        let mut data = vec![0; self.product.region.len_bytes().min(bytes(&bio))];
        self.workload.fill(&mut data);
        let mut ends = [(); 2].map(|()| (data.clone(), None));
        for (fixture, (data, end)) in
            [&mut self.product, &mut self.baseline].into_iter().zip(&mut ends)
        {
            fixture.region.write(0, data);
            let buf = fixture.buf(0);
            *end = Some(fixture.run(bio.with_buf(buf)));
            fixture.region.read(0, data);
        }
        let [product, baseline] = ends;
        assert_eq!(product.1, baseline.1, "end of {bio:?}");
        assert!(product.0 == baseline.0, "data after {bio:?}");
        self.product.model.apply(&bio, &mut data);
    }

    /// Injects a fault into both.
    fn inject(&mut self, name: &str, value: &str) {
        let injection = Injection::Device { name: name.to_owned(), value: value.to_owned() };
        let done = [&self.product, &self.baseline].map(|fixture| fixture.disk.inject(&injection));
        assert_eq!(done[0], done[1]);
    }

    /// Makes a zone read-only or offline, or good again, on all three.
    fn break_zone(&mut self) {
        let zones = self.product.report();
        let zone = zones[self.workload.below(zones.len() as u64) as usize];
        let (name, cond) = match self.workload.below(2) {
            0 => ("zone_offline", ZoneCond::Offline),
            _ => ("zone_readonly", ZoneCond::ReadOnly),
        };
        // The primitive below toggles: a zone that already is in this condition is repaired.
        let minus = if zone.cond == cond { "-" } else { "" };
        self.inject(name, &format!("{minus}{}", zone.start.0));
        let geometry = self.product.disk.geometry().zones.clone().expect("it has zones");
        self.product.model.toggle(geometry.zone_of(zone.start), cond);
    }

    /// Adds a bad block, which is good again after its first error.
    fn spoil(&mut self) {
        let sector = self.workload.below(self.product.disk.geometry().sectors);
        self.inject("badblocks", &format!("+{sector}-{sector}"));
    }
}

fn bytes(bio: &Bio) -> usize {
    let bytes = bio.sectors.saturating_mul(512);
    if bio.op.has_data() { usize::try_from(bytes).unwrap_or(usize::MAX) } else { 0 }
}

fn agree<B: ZoneSet>(name: &str, config: &NullConfig, stream: u64, bad_blocks: bool) {
    let seed = Seed::from_env();
    let _watch = seed.watch(name);
    let mut pair = Pair::new::<B>(config, seed, stream);
    if bad_blocks {
        pair.inject("badblocks_once", "1");
        pair.inject("badblocks_partial_io", "1");
    }
    for count in 0..4000 {
        pair.step(count);
        if bad_blocks && count % 4 == 0 {
            pair.spoil();
        }
        if count % 64 == 0 {
            pair.break_zone();
        }
        if count % 16 == 0 {
            assert_eq!(pair.product.report(), pair.baseline.report());
        }
    }
    assert_eq!(pair.product.report(), pair.baseline.report());
}

/// The configurations on which the product must agree with every baseline.
fn agree_on_all<B: ZoneSet>(stream: u64) {
    let small = NullConfig { zone_capacity: 192 << 10, size: 3 << 20, ..limits() };
    let full = NullConfig { zone_full: true, ..limits() };
    let cases = [
        ("zones", zones()),
        ("limits", limits()),
        ("zones with data", with_data(zones())),
        ("limits with data", with_data(limits())),
        ("a small capacity", with_data(small)),
        ("full at first", with_data(full)),
    ];
    for (number, (name, config)) in (stream..).zip(&cases) {
        agree::<B>(name, config, number, false);
    }
}

#[test]
fn product_and_one_lock_agree() {
    agree_on_all::<OneLock>(1);
}

#[test]
fn product_and_locked_zones_agree() {
    agree_on_all::<LockedZones>(11);
}

#[test]
fn product_and_locked_zones_agree_on_bad_blocks() {
    agree::<LockedZones>("bad blocks", &limits(), 17, true);
    agree::<LockedZones>("bad blocks with data", &with_data(limits()), 18, true);
}
