//! A model of a host-managed disk, as simple as possible: a vector of bytes, a vector of zones, and
//! the rules of ZBC in the order in which they are checked. It shares no code with the disk.

/// Bytes in a logical block of the disks under test.
pub(crate) const BLOCK: usize = 512;
/// Logical blocks in a physical block.
pub(crate) const PHYSICAL: u64 = 8;

pub(crate) const LBA_OUT_OF_RANGE: Code = (0x5, 0x21, 0x00);
pub(crate) const UNALIGNED_WRITE: Code = (0x5, 0x21, 0x04);
pub(crate) const WRITE_BOUNDARY: Code = (0x5, 0x21, 0x05);
pub(crate) const READ_INVALID: Code = (0x5, 0x21, 0x06);
pub(crate) const READ_BOUNDARY: Code = (0x5, 0x21, 0x07);
pub(crate) const INVALID_FIELD: Code = (0x5, 0x24, 0x00);
pub(crate) const NO_RESOURCES: Code = (0x7, 0x55, 0x0e);

/// Sense key, additional sense code, qualifier.
pub(crate) type Code = (u8, u8, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cond {
    NotWp,
    Empty,
    Implicit,
    Explicit,
    Closed,
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Close,
    Finish,
    Open,
    Reset,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub(crate) cond: Cond,
    /// Written blocks.
    pub(crate) written: u64,
    /// When the zone was opened implicitly.
    opened: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Plain {
    pub(crate) zones: Vec<Zone>,
    pub(crate) data: Vec<u8>,
    pub(crate) zone_blocks: u64,
    open_max: usize,
    unrestricted: bool,
    opens: u64,
}

impl Plain {
    pub(crate) fn new(
        blocks: u64,
        zone_blocks: u64,
        conventional: usize,
        open_max: usize,
        unrestricted: bool,
    ) -> Plain {
        let count = blocks.div_ceil(zone_blocks) as usize;
        let zones = (0..count).map(|zone| {
            let cond = if zone < conventional { Cond::NotWp } else { Cond::Empty };
            Zone { cond, written: 0, opened: 0 }
        });
        let data = vec![0; blocks as usize * BLOCK];
        Plain { zones: zones.collect(), data, zone_blocks, open_max, unrestricted, opens: 0 }
    }

    /// Removes the limit on open zones, for a thread that does not see which zones others have
    /// open.
    pub(crate) fn without_limit(&mut self) {
        self.open_max = 0;
    }

    pub(crate) fn blocks(&self) -> u64 {
        (self.data.len() / BLOCK) as u64
    }

    fn zone_of(&self, lba: u64) -> usize {
        (lba / self.zone_blocks) as usize
    }

    pub(crate) fn start(&self, zone: usize) -> u64 {
        zone as u64 * self.zone_blocks
    }

    pub(crate) fn len(&self, zone: usize) -> u64 {
        self.zone_blocks.min(self.blocks() - self.start(zone))
    }

    fn bytes(&self, lba: u64, count: u64) -> std::ops::Range<usize> {
        lba as usize * BLOCK..(lba + count) as usize * BLOCK
    }

    fn in_range(&self, lba: u64, count: u64) -> Result<(), Code> {
        let fits = lba <= self.blocks() && count <= self.blocks() - lba;
        if fits { Ok(()) } else { Err(LBA_OUT_OF_RANGE) }
    }

    pub(crate) fn read(&self, lba: u64, count: u64) -> Result<Vec<u8>, Code> {
        self.in_range(lba, count)?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let (first, last) = (self.zone_of(lba), self.zone_of(lba + count - 1));
        let conventional = |zone: usize| self.zones[zone].cond == Cond::NotWp;
        if conventional(first) != conventional(last) {
            return Err(READ_BOUNDARY);
        }
        if !self.unrestricted && !conventional(first) {
            if first != last {
                return Err(READ_BOUNDARY);
            }
            let readable = match self.zones[first].cond {
                Cond::Full => self.len(first),
                _ => self.zones[first].written,
            };
            if lba + count > self.start(first) + readable {
                return Err(READ_INVALID);
            }
        }
        Ok(self.data[self.bytes(lba, count)].to_vec())
    }

    pub(crate) fn write(&mut self, lba: u64, bytes: &[u8]) -> Result<(), Code> {
        let count = (bytes.len() / BLOCK) as u64;
        self.in_range(lba, count)?;
        if count == 0 {
            return Ok(());
        }
        let (first, last) = (self.zone_of(lba), self.zone_of(lba + count - 1));
        if self.zones[first].cond == Cond::NotWp {
            if self.zones[last].cond != Cond::NotWp {
                return Err(WRITE_BOUNDARY);
            }
        } else {
            if first != last {
                return Err(WRITE_BOUNDARY);
            }
            let zone = &self.zones[first];
            if zone.cond == Cond::Full {
                return Err(INVALID_FIELD);
            }
            let aligned = (lba + count).is_multiple_of(PHYSICAL);
            if lba != self.start(first) + zone.written || !aligned {
                return Err(UNALIGNED_WRITE);
            }
            if matches!(zone.cond, Cond::Empty | Cond::Closed) {
                self.make_room()?;
                self.opens += 1;
                self.zones[first].opened = self.opens;
                self.zones[first].cond = Cond::Implicit;
            }
            self.zones[first].written += count;
            if self.zones[first].written == self.len(first) {
                self.zones[first].cond = Cond::Full;
            }
        }
        let range = self.bytes(lba, count);
        self.data[range].copy_from_slice(bytes);
        Ok(())
    }

    fn count(&self, cond: Cond) -> usize {
        self.zones.iter().filter(|zone| zone.cond == cond).count()
    }

    /// Makes room for one more open zone.
    fn make_room(&mut self) -> Result<(), Code> {
        if self.open_max == 0 {
            return Ok(());
        }
        if self.count(Cond::Explicit) >= self.open_max {
            return Err(NO_RESOURCES);
        }
        if self.count(Cond::Explicit) + self.count(Cond::Implicit) >= self.open_max {
            let implicit = self.zones.iter_mut().filter(|zone| zone.cond == Cond::Implicit);
            let oldest = implicit.min_by_key(|zone| zone.opened).expect("one is not explicit");
            oldest.cond = if oldest.written == 0 { Cond::Empty } else { Cond::Closed };
        }
        Ok(())
    }

    pub(crate) fn act(&mut self, action: Action, zone_id: u64) -> Result<(), Code> {
        self.in_range(zone_id, 1)?;
        let zone = self.zone_of(zone_id);
        if zone_id != self.start(zone) || self.zones[zone].cond == Cond::NotWp {
            return Err(INVALID_FIELD);
        }
        let cond = self.zones[zone].cond;
        match (action, cond) {
            (Action::Open, Cond::Empty | Cond::Closed) => {
                self.make_room()?;
                self.zones[zone].cond = Cond::Explicit;
            }
            (Action::Open, Cond::Implicit) => self.zones[zone].cond = Cond::Explicit,
            (Action::Close, Cond::Implicit | Cond::Explicit) => self.close(zone),
            (Action::Finish, Cond::Empty | Cond::Closed) => {
                self.make_room()?;
                self.zones[zone].cond = Cond::Full;
            }
            (Action::Finish, Cond::Implicit | Cond::Explicit) => {
                self.zones[zone].cond = Cond::Full;
            }
            (Action::Reset, _) => self.reset(zone),
            _ => {}
        }
        Ok(())
    }

    fn close(&mut self, zone: usize) {
        let zone = &mut self.zones[zone];
        zone.cond = if zone.written == 0 { Cond::Empty } else { Cond::Closed };
    }

    fn reset(&mut self, zone: usize) {
        self.zones[zone] = Zone { cond: Cond::Empty, written: 0, opened: 0 };
        let range = self.bytes(self.start(zone), self.len(zone));
        self.data[range].fill(0);
    }

    pub(crate) fn act_all(&mut self, action: Action) -> Result<(), Code> {
        let closed: Vec<usize> =
            (0..self.zones.len()).filter(|&zone| self.zones[zone].cond == Cond::Closed).collect();
        if action == Action::Open {
            let wanted = self.count(Cond::Explicit) + closed.len();
            if self.open_max != 0 && wanted > self.open_max {
                return Err(NO_RESOURCES);
            }
            for zone in closed {
                self.make_room().expect("there is room for all of them");
                self.zones[zone].cond = Cond::Explicit;
            }
            return Ok(());
        }
        for zone in 0..self.zones.len() {
            match (action, self.zones[zone].cond) {
                (_, Cond::NotWp | Cond::Empty) => {}
                (Action::Close, Cond::Implicit | Cond::Explicit) => self.close(zone),
                (Action::Finish, _) => self.zones[zone].cond = Cond::Full,
                (Action::Reset, _) => self.reset(zone),
                _ => {}
            }
        }
        Ok(())
    }
}
