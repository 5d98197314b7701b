//! A small disk, and short methods for the cases; all access is through commands.

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::{Blocks, Command, Form, ZoneAction};
use blockyard_smr::sense::{Sense, SenseKey};
use blockyard_smr::transport::{Data, ScsiTransport};
use blockyard_smr::{Disk, DiskConfig};
use blockyard_zone_media::MemoryMedium;

/// Sense key, additional sense code, and its qualifier.
pub(crate) type Code = (SenseKey, u8, u8);

/// The result of a command.
pub(crate) type Answer = Result<(), Code>;

/// A test case: number, description, and body.
pub(crate) struct Case {
    pub(crate) number: &'static str,
    pub(crate) about: &'static str,
    pub(crate) run: fn(&Fixture),
}

/// A refusal with the codes of these sense data.
pub(crate) fn refused(sense: Sense) -> Answer {
    Err(sense.code())
}

/// A zone as REPORT ZONES returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reported {
    pub(crate) kind: u8,
    pub(crate) cond: u8,
    pub(crate) blocks: u64,
    pub(crate) start: u64,
    pub(crate) wp: u64,
}

/// A disk with three conventional and nine sequential zones, the last of which is shorter. At most
/// three zones may be open.
pub(crate) struct Fixture {
    pub(crate) disk: Disk<MemoryMedium>,
}

pub(crate) const OPEN_MAX: u32 = 3;
/// The first sequential zone.
pub(crate) const FIRST: u32 = 3;

impl Fixture {
    pub(crate) fn new(change: impl FnOnce(&mut DiskConfig)) -> Fixture {
        let mut config = DiskConfig {
            size: 11 * (64 << 10) + (16 << 10),
            zone_size: 64 << 10,
            zone_nr_conv: FIRST,
            zone_max_open: OPEN_MAX,
            ..DiskConfig::default()
        };
        change(&mut config);
        let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
        Fixture { disk: Disk::open(config, memory).unwrap() }
    }

    pub(crate) fn unrestricted(&self) -> bool {
        self.disk.config().unrestricted_reads
    }

    /// Logical blocks in a physical block.
    pub(crate) fn physical(&self) -> u64 {
        u64::from(self.disk.config().physical_block / self.disk.config().logical_block)
    }

    fn block(&self) -> u64 {
        self.disk.config().logical_block.into()
    }

    /// Blocks of the disk.
    pub(crate) fn blocks(&self) -> u64 {
        self.disk.config().size / self.block()
    }

    /// Blocks of a zone other than the short last one.
    pub(crate) fn len(&self) -> u64 {
        self.disk.config().sequential_bytes() / self.block()
    }

    /// First block of a zone.
    pub(crate) fn start(&self, zone: u32) -> u64 {
        u64::from(zone) * self.disk.config().zone_size / self.block()
    }

    /// Sends a command and returns the number of transferred bytes, or the codes of the refusal.
    pub(crate) fn send(&self, command: Command, data: Data<'_>) -> Result<usize, Code> {
        let outcome = self.disk.execute(&command.print(), data).unwrap();
        match outcome.sense {
            None => Ok(outcome.transferred),
            Some(sense) => Err(sense.code()),
        }
    }

    pub(crate) fn read(&self, lba: u64, count: u64) -> Answer {
        let mut room = vec![0xaa; (count * self.block()) as usize];
        let blocks = Blocks { lba, count: count as u32 };
        let command = Command::Read { form: Form::Sixteen, blocks, fua: false };
        let transferred = self.send(command, Data::In(&mut room))?;
        assert_eq!(transferred, room.len());
        Ok(())
    }

    pub(crate) fn write(&self, lba: u64, count: u64) -> Answer {
        let bytes = vec![0x5a; (count * self.block()) as usize];
        let blocks = Blocks { lba, count: count as u32 };
        let command = Command::Write { form: Form::Sixteen, blocks, fua: false };
        let transferred = self.send(command, Data::Out(&bytes))?;
        assert_eq!(transferred, bytes.len());
        Ok(())
    }

    pub(crate) fn zones(&self, action: ZoneAction, zone_id: u64, all: bool) -> Answer {
        self.send(Command::Zones { action, zone_id, all }, Data::None).map(drop)
    }

    /// An action on one zone.
    pub(crate) fn act(&self, action: ZoneAction, zone: u32) -> Answer {
        self.zones(action, self.start(zone), false)
    }

    pub(crate) fn open(&self, zone: u32) -> Answer {
        self.act(ZoneAction::Open, zone)
    }

    pub(crate) fn close(&self, zone: u32) -> Answer {
        self.act(ZoneAction::Close, zone)
    }

    pub(crate) fn finish(&self, zone: u32) -> Answer {
        self.act(ZoneAction::Finish, zone)
    }

    pub(crate) fn reset(&self, zone: u32) -> Answer {
        self.act(ZoneAction::Reset, zone)
    }

    /// Writes a physical block to an empty zone.
    pub(crate) fn begin(&self, zone: u32) {
        assert_eq!(self.write(self.start(zone), self.physical()), Ok(()));
    }

    /// Writes a physical block to an empty zone and closes it.
    pub(crate) fn begin_closed(&self, zone: u32) {
        self.begin(zone);
        assert_eq!(self.close(zone), Ok(()));
    }

    /// Opens `count` empty zones from `first` on.
    pub(crate) fn open_many(&self, first: u32, count: u32) {
        for zone in first..first + count {
            assert_eq!(self.open(zone), Ok(()));
        }
    }

    /// The zones that a reporting option selects, from a block on.
    pub(crate) fn report(
        &self,
        lba: u64,
        option: u8,
        partial: bool,
    ) -> Result<Vec<Reported>, Code> {
        let mut room = vec![0; 64 << 10];
        let allocation = room.len() as u32;
        let command = Command::ReportZones { lba, allocation, partial, option };
        let len = self.send(command, Data::In(&mut room))?;
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        assert_eq!(number(&room[..4]) as usize, len - 64, "all of them have room");
        assert_eq!(number(&room[8..16]), self.blocks() - 1);
        let zones = room[64..len].chunks(64).map(|bytes| Reported {
            kind: bytes[0],
            cond: bytes[1] >> 4,
            blocks: number(&bytes[8..16]),
            start: number(&bytes[16..24]),
            wp: number(&bytes[24..32]),
        });
        Ok(zones.collect())
    }

    /// The report of one zone.
    pub(crate) fn zone(&self, zone: u32) -> Reported {
        self.report(self.start(zone), 0, false).unwrap()[0]
    }

    /// A zone's condition, and its number of written blocks if the report has it.
    pub(crate) fn state(&self, zone: u32) -> (ZoneCond, Option<u64>) {
        let zone = self.zone(zone);
        let cond = ZoneCond::ALL.into_iter().find(|cond| *cond as u8 == zone.cond).unwrap();
        (cond, (zone.wp != u64::MAX).then(|| zone.wp - zone.start))
    }

    /// Checks a zone's condition, and that one physical block is written if the condition implies
    /// data.
    pub(crate) fn is(&self, zone: u32, cond: ZoneCond) {
        let written = match cond {
            ZoneCond::NotWp | ZoneCond::Full => None,
            ZoneCond::Empty => Some(0),
            _ => Some(self.physical()),
        };
        assert_eq!(self.state(zone), (cond, written));
    }
}
