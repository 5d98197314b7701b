//! The operations on a device with their times, and the states in which a device may be found when
//! it is opened again. One thread executes them, one after the other.

use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Bio, Flags, Op, Sector, Status};
use blockyard_null::NullConfig;
use blockyard_testing::zone_store::Moment;

use crate::fixture::Fixture;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 512;

/// Blocks of a zone, and how many of them can be written.
pub(crate) const ZONE_BLOCKS: u64 = 16;
pub(crate) const CAPACITY: u64 = 12;

/// Zones of the device; the first ones are conventional.
pub(crate) const ZONES: u64 = 7;
pub(crate) const CONVENTIONAL: u64 = 2;

/// A device of those zones.
pub(crate) fn config() -> NullConfig {
    NullConfig {
        size: ZONES * ZONE_BLOCKS * BLOCK as u64,
        zoned: true,
        zone_size: ZONE_BLOCKS * BLOCK as u64,
        zone_capacity: CAPACITY * BLOCK as u64,
        zone_nr_conv: CONVENTIONAL as u32,
        ..NullConfig::default()
    }
}

/// A step of the workload. `fua` makes it durable when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Write {
        zone: u64,
        blocks: u64,
        serial: u8,
        fua: bool,
    },
    Append {
        zone: u64,
        blocks: u64,
        serial: u8,
        fua: bool,
    },
    Zeroes {
        zone: u64,
        blocks: u64,
    },
    Finish {
        zone: u64,
    },
    Reset {
        zone: u64,
    },
    ResetAll,
    Open {
        zone: u64,
    },
    Close {
        zone: u64,
    },
    /// A write to a conventional zone.
    Overwrite {
        zone: u64,
        from: u64,
        blocks: u64,
        serial: u8,
        fua: bool,
    },
    Flush,
}

impl Step {
    fn is_of(&self, zone: u64) -> bool {
        match *self {
            Step::Write { zone: own, .. }
            | Step::Append { zone: own, .. }
            | Step::Zeroes { zone: own, .. }
            | Step::Finish { zone: own }
            | Step::Reset { zone: own }
            | Step::Open { zone: own }
            | Step::Close { zone: own }
            | Step::Overwrite { zone: own, .. } => own == zone,
            Step::ResetAll => zone >= CONVENTIONAL,
            Step::Flush => false,
        }
    }

    fn is_fua(&self) -> bool {
        match *self {
            Step::Write { fua, .. } | Step::Append { fua, .. } | Step::Overwrite { fua, .. } => fua,
            _ => false,
        }
    }
}

/// A sequential zone, but for whether it is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ZoneState {
    /// The byte that fills each written block.
    blocks: Vec<u8>,
    /// Whether it was finished before it was written to its capacity.
    finished: bool,
}

impl ZoneState {
    fn is_full(&self) -> bool {
        self.finished || self.blocks.len() as u64 == CAPACITY
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Write { blocks, serial, .. } | Step::Append { blocks, serial, .. } => {
                self.blocks.extend(std::iter::repeat_n(serial, blocks as usize));
            }
            Step::Zeroes { blocks, .. } => {
                self.blocks.extend(std::iter::repeat_n(0, blocks as usize));
            }
            Step::Finish { .. } if !self.is_full() => self.finished = true,
            Step::Reset { .. } | Step::ResetAll => *self = ZoneState::default(),
            _ => {}
        }
    }

    /// Whether a zone that was found is in this state after power on.
    fn is(&self, info: &ZoneInfo, bytes: &[u8]) -> bool {
        let len = self.blocks.len() as u64;
        let (cond, wp) = match len {
            _ if self.finished => (ZoneCond::Full, ZONE_BLOCKS),
            CAPACITY => (ZoneCond::Full, CAPACITY),
            0 => (ZoneCond::Empty, 0),
            len => (ZoneCond::Closed, len),
        };
        let block = |number: u64| match self.blocks.get(number as usize) {
            Some(byte) => *byte,
            None if self.finished => 0,
            None => 0xff,
        };
        let is_filled =
            |(number, chunk): (u64, &[u8])| chunk.iter().all(|byte| *byte == block(number));
        info.cond == cond
            && info.wp == info.start + wp
            && (0..).zip(bytes.chunks(BLOCK)).all(is_filled)
    }
}

/// The contents of a device when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    sequential: Vec<ZoneState>,
    /// The byte that fills each block of the conventional zones.
    conventional: Vec<u8>,
}

impl Contents {
    /// A new device.
    pub(crate) fn new() -> Contents {
        let sequential = vec![ZoneState::default(); (ZONES - CONVENTIONAL) as usize];
        Contents { sequential, conventional: vec![0; (CONVENTIONAL * ZONE_BLOCKS) as usize] }
    }
}

/// Which steps must have survived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durable {
    /// Those that a flush or FUA covered: a power cut.
    Flushed,
    /// Those that completed: a kill of the process.
    Completed,
}

/// A step, and when it started and ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    step: Step,
    begun: Moment,
    ended: Moment,
}

/// What was done with a device since it was opened.
#[derive(Debug)]
pub(crate) struct History {
    before: Contents,
    now: Contents,
    steps: Vec<Done>,
}

impl History {
    pub(crate) fn new(before: Contents) -> History {
        History { now: before.clone(), before, steps: Vec::new() }
    }

    /// A random step that the zones' conditions permit.
    pub(crate) fn draw(&self, random: &mut fastrand::Rng) -> Step {
        let (serial, fua) = (random.u8(1..0xff), random.u8(..6) == 0);
        if random.u8(..6) == 0 {
            let from = random.u64(..ZONE_BLOCKS);
            let blocks = random.u64(1..=ZONE_BLOCKS - from);
            let zone = random.u64(..CONVENTIONAL);
            return Step::Overwrite { zone, from, blocks, serial, fua };
        }
        let number = random.usize(..self.now.sequential.len());
        let (zone, state) = (number as u64 + CONVENTIONAL, &self.now.sequential[number]);
        match random.u8(..24) {
            0..=2 => return Step::Flush,
            3 => return Step::ResetAll,
            4 => return Step::Reset { zone },
            5 => return Step::Finish { zone },
            _ if state.is_full() => return Step::Reset { zone },
            6 => return Step::Open { zone },
            7 if !state.blocks.is_empty() => return Step::Close { zone },
            _ => {}
        }
        let blocks = random.u64(1..=(CAPACITY - state.blocks.len() as u64).min(5));
        match random.u8(..8) {
            0..=3 => Step::Append { zone, blocks, serial, fua },
            4 => Step::Zeroes { zone, blocks },
            _ => Step::Write { zone, blocks, serial, fua },
        }
    }

    /// Executes a step. The inner status is that of a limit that has refused it; then nothing
    /// happened.
    pub(crate) fn carry_out(&self, device: &mut Fixture, step: &Step) -> Result<(), Status> {
        let start = |zone: u64| Sector(zone * ZONE_BLOCKS);
        let wp = |zone: u64| self.now.sequential[(zone - CONVENTIONAL) as usize].blocks.len();
        let data = |serial: u8, blocks: u64| vec![serial; blocks as usize * BLOCK];
        let flags = |fua: bool| if fua { Flags::FUA } else { Flags::NONE };
        let mut run =
            |op, zone, sectors| device.io.run(Bio::new(op, start(zone), sectors)).map(drop);
        match *step {
            Step::Finish { zone } => run(Op::ZoneFinish, zone, 0),
            Step::Reset { zone } => run(Op::ZoneReset, zone, 0),
            Step::Open { zone } => run(Op::ZoneOpen, zone, 0),
            Step::Close { zone } => run(Op::ZoneClose, zone, 0),
            Step::ResetAll => run(Op::ZoneResetAll, 0, 0),
            Step::Flush => device.io.run(Bio::flush()).map(drop),
            Step::Write { zone, blocks, serial, fua } => {
                let at = start(zone) + wp(zone) as u64;
                device.io.write(at, &data(serial, blocks), flags(fua))
            }
            Step::Zeroes { zone, blocks } => {
                let at = start(zone) + wp(zone) as u64;
                device.io.run(Bio::new(Op::WriteZeroes, at, blocks)).map(drop)
            }
            Step::Append { zone, blocks, serial, fua } => {
                device.io.region().write(0, &data(serial, blocks));
                let bio = Bio::append(start(zone), blocks, device.io.buffer());
                let landed = device.io.run(bio.with_flags(flags(fua)))?;
                assert_eq!(landed, start(zone) + wp(zone) as u64, "{step:?}");
                Ok(())
            }
            Step::Overwrite { zone, from, blocks, serial, fua } => {
                device.io.write(start(zone) + from, &data(serial, blocks), flags(fua))
            }
        }
    }

    /// Records a step that has completed, or that was begun and is reported as `ended` never.
    pub(crate) fn note(&mut self, step: Step, begun: Moment, ended: Moment) {
        for (zone, state) in (CONVENTIONAL..).zip(&mut self.now.sequential) {
            if step.is_of(zone) {
                state.apply(&step);
            }
        }
        self.steps.push(Done { step, begun, ended });
    }

    /// Checks that a device that stopped after `moment` changes of its directory may be found like
    /// this; returns its contents.
    pub(crate) fn check(&self, device: &mut Fixture, moment: usize, durable: Durable) -> Contents {
        let begun = self.steps.iter().filter(|done| done.begun.changes < moment).count();
        let steps = &self.steps[..begun];
        let ended = |done: &Done| done.ended.changes <= moment;
        // The number of steps that the last completed flush covers.
        let flush = steps.iter().rposition(|done| done.step == Step::Flush && ended(done));
        let completed = steps.iter().filter(|done| ended(done)).count();
        let safe = match durable {
            Durable::Flushed => flush.unwrap_or(0),
            Durable::Completed => completed,
        };
        let infos = device.zones();
        let sequential = (CONVENTIONAL..ZONES).map(|zone| {
            // A write with FUA covers the earlier ones to its zone.
            let own = |done: &Done| done.step.is_of(zone) && done.step.is_fua() && ended(done);
            let safe = safe.max(steps.iter().rposition(own).map_or(0, |at| at + 1));
            let info = &infos[zone as usize];
            let bytes = device.read(info.start, ZONE_BLOCKS);
            let mut state = self.before.sequential[(zone - CONVENTIONAL) as usize].clone();
            let mut found = (safe == 0 && state.is(info, &bytes)).then(|| state.clone());
            for (at, done) in steps.iter().enumerate().filter(|(_, done)| done.step.is_of(zone)) {
                if at >= safe && found.is_none() && state.is(info, &bytes) {
                    found = Some(state.clone());
                }
                state.apply(&done.step);
            }
            if state.is(info, &bytes) {
                found = Some(state);
            }
            found.unwrap_or_else(|| {
                let own: Vec<_> = steps.iter().filter(|done| done.step.is_of(zone)).collect();
                panic!(
                    "zone {zone} at {moment}: {info:?} {:?} is no state from {safe} on of {own:?}",
                    bytes.iter().step_by(BLOCK).collect::<Vec<_>>()
                )
            })
        });
        let sequential = sequential.collect();
        let blocks = 0..CONVENTIONAL * ZONE_BLOCKS;
        let conventional = blocks.map(|block| {
            self.check_block(device, steps, block, |at| {
                at < safe || (steps[at].step.is_fua() && ended(&steps[at]))
            })
        });
        Contents { conventional: conventional.collect(), sequential }
    }

    /// Checks a block of the conventional zones; returns the byte that fills it.
    fn check_block(
        &self,
        device: &mut Fixture,
        steps: &[Done],
        block: u64,
        is_safe: impl Fn(usize) -> bool,
    ) -> u8 {
        let bytes = device.read(Sector(block), 1);
        let mut allowed = vec![self.before.conventional[block as usize]];
        for (at, done) in steps.iter().enumerate() {
            let Step::Overwrite { zone, from, blocks, serial, .. } = done.step else { continue };
            let first = zone * ZONE_BLOCKS + from;
            if !(first..first + blocks).contains(&block) {
                continue;
            }
            if is_safe(at) {
                allowed.clear();
            }
            allowed.push(serial);
        }
        let is_whole = bytes.iter().all(|byte| *byte == bytes[0]);
        assert!(is_whole && allowed.contains(&bytes[0]), "block {block}: none of {allowed:?}");
        bytes[0]
    }
}
