//! Bios against the model: both the device and a stream of bios are derived from the input.
//!
//! Many bios are in flight at once and may overlap. A device that executes requests when they are
//! started does so in the order of their pushes. So the model is asked at the push, and the
//! completion is compared when it arrives. A flush may be reordered with a write, so such bios get
//! a batch of their own. Below a zone write plug (gate) reads overtake waiting writes, and changes
//! of zones that share limits are reordered with them, so those are separated too.

use std::sync::Arc;

use blockyard_core::Completion;
use blockyard_core::bio::{Bio, Flags, Op, Prio};
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::device::Device;
use blockyard_core::disk::Disk;
use blockyard_core::region::Region;
use blockyard_core::units::{SECTOR_BYTES, Sector};
use blockyard_core::zone::gate::{GateMode, ZoneWritePlugs};
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{BufRef, RegionId};
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_ram::{Ram, RamConfig};
use blockyard_smr::disk::Disk as SmrDisk;
use blockyard_smr::{DiskConfig, Sd};
use blockyard_testing::clock::ManualClock;
use blockyard_testing::contract::TestChannel;
use blockyard_testing::model::{ExpectedResult, Model, ZoneRules};
use blockyard_zone_media::MemoryMedium;

use crate::input::Input;

/// The number of bios in flight. The channel is smaller, so that it is full now and then.
const BATCH: usize = 24;

/// The longest data of one bio, in sectors.
const SECTORS_MAX: u64 = 48;

/// The number of unsuccessful waits after which the channel is considered stuck.
const IDLE_WAITS_MAX: u32 = 10_000;

/// The most steps of one input.
const STEPS_MAX: u32 = 400;

/// Interprets the bytes as a device and a stream of bios.
///
/// # Panics
/// If the device and the model disagree.
pub fn bios_model(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let config = config(&mut input);
    let keeps_data = config.memory_backed;
    let Ok(null) = Null::open(config) else { return };
    let depth = ChannelConfig { depth: input.choose(&[4, 5, 16, 64]) };
    drive(&mut input, &composed(null, depth), keeps_data);
}

/// Interprets the bytes as a zoned device below a zone write plug, with or without native appends,
/// and a stream of bios.
///
/// # Panics
/// If the device and the model disagree.
pub fn bios_gate(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let append = input.choose(&[64, 0]);
    let config = NullConfig { zoned: true, ..config(&mut input) };
    let config = NullConfig { zone_append_max_sectors: append, ..config };
    let keeps_data = config.memory_backed;
    let Ok(null) = Null::open(config) else { return };
    let depth = ChannelConfig { depth: input.choose(&[4, 5, 16, 64]) };
    let gates = ZoneWritePlugs::new(Arc::clone(&null)).expect("there is memory for a few zones");
    let gates = gates.expect("the device is zoned");
    drive(&mut input, &composed(null, depth).with_gates(gates), keeps_data);
}

/// Interprets the bytes as a shingled disk driven by SCSI commands, with or without a zone write
/// plug above it, and a stream of bios.
///
/// # Panics
/// If the device and the model disagree.
pub fn bios_smr(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let gated = input.below(2) == 1;
    let logical_block = input.choose(&[512, 4096]);
    let config = DiskConfig {
        size: (512 << 10) - input.choose(&[0, 0, 8192, 32_768]),
        zone_size: 65_536,
        zone_capacity: input.choose(&[0, 32_768, 49_152]),
        zone_nr_conv: input.choose(&[1, 0, 3]),
        zone_max_open: input.choose(&[0, 1, 2, 3]),
        logical_block,
        physical_block: input.choose(&[logical_block, 4096]),
        write_cache: input.below(2) == 1,
        ..DiskConfig::default()
    };
    let memory =
        MemoryMedium::new(config.size, config.zone_size).expect("there is memory for little");
    let disk = SmrDisk::open(config, memory).expect("every choice fits the others");
    let sd = Arc::new(Sd::open(disk).expect("the emulated disk can be driven"));
    let depth = ChannelConfig { depth: input.choose(&[4, 5, 16, 64]) };
    if gated {
        let gates = ZoneWritePlugs::new(Arc::clone(&sd)).expect("there is memory for a few zones");
        let gates = gates.expect("the device is zoned");
        drive_by(ZoneRules::Zbc, &mut input, &composed(sd, depth).with_gates(gates), true);
    } else {
        drive_by(ZoneRules::Zbc, &mut input, &composed(sd, depth), true);
    }
}

/// Interprets the bytes as a compressed RAM disk and a stream of bios.
///
/// # Panics
/// If the device and the model disagree.
pub fn bios_ram(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let config = RamConfig {
        size: 512 << 10,
        bs: input.choose(&[512, 4096, 1024]),
        unit: input.choose(&[4096, 4096, 8192, 32_768]),
        checksum: input.below(2) == 1,
        dedup: input.below(2) == 1,
        compact: 0,
        ..RamConfig::default()
    };
    let ram = Ram::open(config).expect("every choice fits the others");
    let depth = ChannelConfig { depth: input.choose(&[4, 5, 16, 64]) };
    drive(&mut input, &composed(ram, depth), true);
}

fn composed<D: Device>(device: Arc<D>, depth: ChannelConfig) -> Composed<Arc<D>, ManualClock> {
    let (name, clock) = ("fuzzed".to_owned(), ManualClock::new());
    Composed::with_clock(name, "fuzzed", device, depth, clock)
}

fn drive(input: &mut Input<'_>, disk: &dyn Disk, keeps_data: bool) {
    drive_by(ZoneRules::NullBlk, input, disk, keeps_data);
}

fn drive_by(rules: ZoneRules, input: &mut Input<'_>, disk: &dyn Disk, keeps_data: bool) {
    let mut run = ChannelRun::new(disk, keeps_data, rules);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        run.step(input);
    }
    run.finish();
    run.same_report();
    run.same_contents();
}

/// A small device of any kind.
fn config(input: &mut Input<'_>) -> NullConfig {
    let bits = input.byte();
    let zoned = bits & 1 != 0;
    NullConfig {
        size: 512 * 1024 - input.choose(&[0, 0, 8192, 32_768]),
        bs: input.choose(&[512, 4096, 1024]),
        max_sectors: input.choose(&[0, 8, 16, 24]),
        hw_queue_depth: input.choose(&[64, 1, 2, 7]),
        irqmode: input.choose(&[IrqMode::None, IrqMode::None, IrqMode::Softirq, IrqMode::Timer]),
        memory_backed: bits & 2 != 0,
        discard: bits & 4 != 0,
        cache_size: if bits & 8 != 0 { 16_384 } else { 0 },
        fua: bits & 16 != 0,
        zoned,
        zone_size: 65_536,
        zone_capacity: input.choose(&[0, 32_768, 49_152]),
        zone_nr_conv: input.choose(&[0, 1, 3]),
        zone_max_open: input.choose(&[0, 1, 2, 3]),
        zone_max_active: input.choose(&[0, 1, 3, 4]),
        zone_append_max_sectors: input.choose(&[64, 8, 0, 16]),
        zone_full: bits & 96 == 96,
        submit_queues: (bits & 128 != 0).then_some(1),
        ..NullConfig::default()
    }
}

/// A channel under test, and its bios in flight.
struct ChannelRun<'a> {
    disk: &'a dyn Disk,
    channel: TestChannel,
    region: Arc<Region>,
    region_id: RegionId,
    model: Model,
    owed: Vec<Owed>,
    done: Vec<Completion>,
    serial: u64,
}

/// A bio in flight, and its expected completion.
struct Owed {
    bio: Bio,
    outcome: ExpectedResult,
    data: Vec<u8>,
}

impl<'a> ChannelRun<'a> {
    fn new(disk: &'a dyn Disk, keeps_data: bool, rules: ZoneRules) -> ChannelRun<'a> {
        let mut channel = TestChannel::open(disk);
        let region = Region::alloc(BATCH * (SECTORS_MAX * SECTOR_BYTES) as usize);
        let region_id = channel.register(Arc::clone(&region));
        let mut model = Model::new(disk.geometry(), disk.limits(), keeps_data).with_rules(rules);
        let mut zones = Vec::new();
        disk.report_zones(Sector(0), usize::MAX, &mut zones).expect("sector 0 exists");
        if zones.iter().any(|zone| zone.cond == ZoneCond::Full) {
            model.fill_zones();
        }
        let (owed, done) = (Vec::new(), Vec::new());
        ChannelRun { disk, channel, region, region_id, model, owed, done, serial: 0 }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(16) {
            0 => self.channel.submit(),
            1 => {
                self.channel.reap(&mut self.done);
            }
            2 => self.finish(),
            3 => self.same_report_if_idle(),
            _ => {
                let bio = self.bio(input);
                self.push(bio);
            }
        }
    }

    /// A bio near the ends of the zones and of the device.
    fn bio(&mut self, input: &mut Input<'_>) -> Bio {
        let op = input.choose(&Op::ALL);
        let geometry = self.model.geometry();
        let (block, device) = (geometry.block_sectors(), geometry.sectors);
        let zones = self.model.report();
        let zone = match zones.len() as u64 {
            0 => None,
            count => Some(zones[input.below(count) as usize]),
        };
        let anchor = match &zone {
            Some(zone) => anchor(zone, input),
            None => input.below(256) * block,
        };
        let at = match input.byte() {
            0..160 => anchor,
            160..192 => anchor.saturating_add(input.below(16) * block),
            192..224 => anchor.saturating_sub(input.below(16) * block),
            224..240 => input.below(256) * block,
            240..248 => device.saturating_sub(input.below(4) * block),
            _ => input.word(),
        };
        let sectors = match input.byte() {
            0..200 => (1 + input.below(SECTORS_MAX / block)) * block,
            200..230 => block,
            230..240 => zone.map_or(block, |zone| zone.capacity_sectors.min(SECTORS_MAX)),
            240..250 => input.below(SECTORS_MAX),
            _ => input.word(),
        };
        let flags = match input.byte() {
            0..32 => Flags::FUA,
            32..64 => Flags::PREFLUSH,
            64..96 => Flags::NOMERGE,
            96..112 => Flags::FUA | Flags::PREFLUSH,
            112..128 => Flags::NOUNMAP,
            _ => Flags::NONE,
        };
        let prio = input.choose(&[Prio::BestEffort, Prio::BestEffort, Prio::RealTime, Prio::Idle]);
        let sectors = if op.has_range() { sectors } else { 0 };
        // The buffer bounds the data. A longer bio would be refused for its buffer, which the model
        // does not know.
        let fits = !op.has_data() || sectors <= SECTORS_MAX || at.checked_add(sectors).is_none();
        let sectors = if fits { sectors } else { SECTORS_MAX };
        Bio::new(op, Sector(at), sectors).with_flags(flags).with_prio(prio)
    }

    fn push(&mut self, bio: Bio) {
        let sequence =
            self.disk.limits().write_cache && bio.flags.intersects(Flags::FUA | Flags::PREFLUSH);
        if sequence || self.owed.len() == BATCH || self.is_apart(&bio) {
            self.finish();
        }
        let slot = self.owed.len() as u64 * SECTORS_MAX * SECTOR_BYTES;
        let buf = BufRef { region: self.region_id, offset: slot };
        let bio = bio.with_user_data(self.serial).with_buf(buf);
        self.serial += 1;
        let has_data = bio.op.has_data() && bio.sectors <= SECTORS_MAX;
        let mut data = vec![0; if has_data { (bio.sectors * SECTOR_BYTES) as usize } else { 0 }];
        for (index, chunk) in data.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&(self.serial << 16 | index as u64).to_le_bytes());
        }
        self.region.write(slot, &data);
        let mut idle = 0;
        while self.channel.push(&[bio]) == 0 {
            self.channel.submit();
            if self.channel.reap(&mut self.done) == 0 {
                self.channel.wait(None);
                idle += 1;
                assert!(idle < IDLE_WAITS_MAX, "waiting makes no room");
            }
        }
        let outcome = self.model.apply(&bio, &mut data);
        self.owed.push(Owed { bio, outcome, data });
        if sequence {
            self.finish();
        }
    }

    /// Whether a zone write plug could reorder the bio with another one of the batch.
    fn is_apart(&self, bio: &Bio) -> bool {
        let (Some(last), Some(zones)) = (self.owed.last(), &self.model.geometry().zones) else {
            return false;
        };
        let gated = self.disk.gate().is_some_and(|gate| gate.mode == GateMode::ZoneWritePlug);
        let coupled = zones.open_max + zones.active_max > 0;
        gated && (coupled || (bio.op == Op::Read) != (last.bio.op == Op::Read))
    }

    /// Waits for all bios in flight, and compares their completions.
    fn finish(&mut self) {
        self.channel.submit();
        let mut idle = 0;
        while self.channel.in_flight() > 0 {
            if self.channel.reap(&mut self.done) == 0 {
                self.channel.wait(None);
                idle += 1;
                assert!(idle < IDLE_WAITS_MAX, "waiting finds nothing");
            }
        }
        assert_eq!(self.done.len(), self.owed.len(), "one completion each");
        for Owed { bio, outcome, data } in self.owed.drain(..) {
            let found = self.done.iter().find(|done| done.user_data == bio.user_data);
            let found = found.unwrap_or_else(|| panic!("no completion for {bio:?}"));
            assert_eq!(found.status, outcome.status, "status of {bio:?}");
            assert_eq!(found.sector, outcome.sector, "sector of {bio:?}");
            if bio.op == Op::Read && found.status.is_ok() && self.model.keeps_data() {
                let mut bytes = vec![0; data.len()];
                self.region.read(bio.buf.offset, &mut bytes);
                assert!(bytes == data, "data of {bio:?}");
            }
        }
        self.done.clear();
    }

    fn same_report_if_idle(&self) {
        if self.owed.is_empty() {
            self.same_report();
        }
    }

    fn same_report(&self) {
        let mut found = Vec::new();
        self.disk.report_zones(Sector(0), usize::MAX, &mut found).expect("sector 0 exists");
        assert_eq!(found, self.model.report());
    }

    fn same_contents(&mut self) {
        let block = self.model.geometry().block_sectors();
        let step = SECTORS_MAX / block * block;
        let sectors = self.model.geometry().sectors;
        let mut at = 0;
        while at < sectors {
            self.push(Bio::new(Op::Read, Sector(at), step.min(sectors - at)));
            at += step;
        }
        self.finish();
    }
}

/// An offset of the zone at which behaviour changes.
fn anchor(zone: &ZoneInfo, input: &mut Input<'_>) -> u64 {
    let wp = if zone.wp == Sector::NONE { zone.start.0 } else { zone.wp.0 };
    input.choose(&[
        wp,
        wp,
        zone.start.0,
        zone.start.0 + zone.capacity_sectors,
        zone.start.0 + zone.sectors,
    ])
}
