//! The zone records that a medium receives from several threads: in whatever order they arrive, the
//! latest record of each zone is the zone's state.
#![allow(clippy::disallowed_types)] // A medium under test.

use std::io;
use std::sync::Mutex;
use std::thread;

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::{Blocks, Command, Form, ZoneAction};
use blockyard_smr::transport::{Data, ScsiTransport};
use blockyard_smr::{Disk, DiskConfig};
use blockyard_testing::seed::Seed;
use blockyard_zone_media::{Media, MemoryMedium, ZoneRecord};

use super::plain::{BLOCK, PHYSICAL};

/// A medium in memory that keeps the latest record of each zone, as every medium must.
struct Ledger {
    memory: MemoryMedium,
    records: Mutex<Vec<ZoneRecord>>,
}

impl Ledger {
    fn keep(&self, zone: u32, state: ZoneRecord) {
        // Lets a thread with an earlier record run first.
        thread::yield_now();
        let mut records = self.records.lock().unwrap();
        let kept = &mut records[zone as usize];
        if state.follows(kept) {
            *kept = state;
        }
    }
}

impl Media for Ledger {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.memory.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.memory.write(offset, from)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.memory.zero(offset, len)
    }

    fn zone_changed(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        self.keep(zone, state);
        Ok(())
    }

    fn reset(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        self.keep(zone, state);
        self.memory.reset(zone, state)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zones(&self) -> Vec<ZoneRecord> {
        Vec::new()
    }
}

#[test]
fn the_latest_record_of_each_zone_is_its_state() {
    const ZONES: u32 = 3;
    let seed = Seed::from_env();
    let _watch = seed.watch("the_latest_record_of_each_zone_is_its_state");
    let config = DiskConfig {
        size: u64::from(ZONES) << 16,
        zone_size: 1 << 16,
        zone_nr_conv: 0,
        zone_max_open: 2,
        ..DiskConfig::default()
    };
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    let records = Mutex::new(vec![ZoneRecord::EMPTY; ZONES as usize]);
    let disk = Disk::open(config, Ledger { memory, records }).unwrap();
    for round in 0..40 {
        thread::scope(|scope| {
            for number in 0..4 {
                let disk = &disk;
                scope.spawn(move || {
                    let mut rng = seed.rng(round * 4 + number);
                    for _ in 0..100 {
                        let zone = disk.zone(rng.u32(..ZONES));
                        let lba = zone.wp.0;
                        let blocks = Blocks { lba, count: PHYSICAL as u32 };
                        let action = match rng.u8(..12) {
                            0 => ZoneAction::Open,
                            1 => ZoneAction::Close,
                            2 => ZoneAction::Finish,
                            3 | 4 => ZoneAction::Reset,
                            _ => {
                                let bytes = [number as u8; BLOCK * PHYSICAL as usize];
                                let form = Form::Sixteen;
                                let command = Command::Write { form, blocks, fua: false };
                                disk.execute(&command.print(), Data::Out(&bytes)).unwrap();
                                continue;
                            }
                        };
                        let zone_id = zone.start.0;
                        let command = Command::Zones { action, zone_id, all: false };
                        disk.execute(&command.print(), Data::None).unwrap();
                    }
                });
            }
        });
        let records = disk.media().records.lock().unwrap();
        for (slot, record) in records.iter().enumerate() {
            let zone = disk.zone(slot as u32);
            let written = zone.wp.0 - zone.start.0;
            assert_eq!(record.written_sectors, written, "zone {slot}: {record:?}, {zone:?}");
            let full = zone.cond == ZoneCond::Full;
            assert_eq!(record.cond == ZoneCond::Full, full, "zone {slot}: {record:?}, {zone:?}");
        }
    }
}
