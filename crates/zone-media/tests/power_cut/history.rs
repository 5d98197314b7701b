//! The operations on a disk with their times, and which states a reopened disk may have.
#![allow(clippy::unwrap_used)] // Test code.

use std::io;

use blockyard_core::zone::ZoneCond;
use blockyard_testing::zone_store::Moment;
use blockyard_zone_media::{Media, MediaGeometry, ZoneRecord};

/// Length of a block in bytes.
pub(crate) const BLOCK: u64 = 512;

/// Blocks of a zone.
pub(crate) const ZONE_BLOCKS: u64 = 12;

/// Which operations must have survived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durable {
    /// The flushed ones.
    Flushed,
    /// The flushed ones, and no later ones.
    FlushedOnly,
    /// The completed ones.
    Completed,
}

/// A step of the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Writes blocks at the write pointer.
    Write { zone: u32, from: u64, blocks: u64, serial: u8 },
    /// Finishes the zone without writing data.
    Finish { zone: u32 },
    /// Resets the zone.
    Reset { zone: u32 },
    /// Writes blocks of a conventional zone.
    Overwrite { zone: u32, from: u64, blocks: u64, serial: u8 },
    /// Zeroes blocks of a conventional zone.
    Zero { zone: u32, from: u64, blocks: u64 },
    /// Flushes everything.
    Flush,
    /// Flushes one zone.
    FlushZone { zone: u32 },
}

impl Step {
    /// Whether the step may succeed although nothing can be made durable any more.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Step::FlushZone { zone } if *zone == u32::MAX)
    }

    fn zone(&self) -> Option<u32> {
        match *self {
            Step::Write { zone, .. }
            | Step::Finish { zone }
            | Step::Reset { zone }
            | Step::Overwrite { zone, .. }
            | Step::Zero { zone, .. } => Some(zone),
            Step::Flush | Step::FlushZone { .. } => None,
        }
    }

    /// Whether the step makes earlier steps of a zone durable.
    fn flushes(&self, zone: u32) -> bool {
        match *self {
            Step::Flush => true,
            Step::FlushZone { zone: flushed } => flushed == zone,
            _ => false,
        }
    }
}

/// When a step started and ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(crate) begun: Moment,
    /// [`Moment::NEVER`] if the step failed.
    pub(crate) ended: Moment,
}

/// The expected state of a sequential zone.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Zone {
    blocks: Vec<u8>,
    full: bool,
    erasures: u64,
}

/// The history of operations on a disk.
#[derive(Debug)]
pub(crate) struct History {
    geometry: MediaGeometry,
    now: Vec<Zone>,
    steps: Vec<(Step, Done)>,
}

fn filled(serial: u8, blocks: u64) -> Vec<u8> {
    vec![serial; (blocks * BLOCK) as usize]
}

impl History {
    pub(crate) fn new(geometry: &MediaGeometry) -> History {
        let zone = Zone { blocks: Vec::new(), full: false, erasures: 0 };
        let now = vec![zone; geometry.zone_count() as usize];
        History { geometry: *geometry, now, steps: Vec::new() }
    }

    fn zone_blocks(&self, zone: u32) -> u64 {
        self.geometry.len_of(zone) / BLOCK
    }

    /// A random valid step for one of several threads, each with a sequential zone of its own.
    pub(crate) fn draw_of(&self, random: &mut fastrand::Rng, serial: u8, own: u32) -> Step {
        loop {
            let step = match (random.u8(..4), self.draw(random, serial)) {
                (0, _) => Step::FlushZone { zone: own },
                (_, step) => step,
            };
            if step.zone().is_none_or(|zone| zone == own) {
                return step;
            }
        }
    }

    /// A random valid step.
    pub(crate) fn draw(&self, random: &mut fastrand::Rng, serial: u8) -> Step {
        let conventional = self.geometry.conventional_zones;
        if random.u8(..5) == 0 {
            let zone = random.u32(..conventional);
            let from = random.u64(..ZONE_BLOCKS);
            let blocks = random.u64(1..=ZONE_BLOCKS - from);
            return match random.u8(..4) {
                0 => Step::Zero { zone, from, blocks },
                _ => Step::Overwrite { zone, from, blocks, serial },
            };
        }
        let zone = random.u32(conventional..self.geometry.zone_count());
        let state = &self.now[zone as usize];
        let from = state.blocks.len() as u64;
        match random.u8(..16) {
            0 => Step::Flush,
            1 => Step::FlushZone { zone: random.u32(..self.geometry.zone_count()) },
            2 | 3 => Step::Reset { zone },
            4 if !state.full => Step::Finish { zone },
            _ if state.full => Step::Reset { zone },
            _ => {
                let blocks = random.u64(1..=(self.zone_blocks(zone) - from).min(5));
                Step::Write { zone, from, blocks, serial }
            }
        }
    }

    /// Adds the steps of another thread on its own zones.
    pub(crate) fn merge(&mut self, other: History) {
        self.steps.extend(other.steps);
    }

    /// Executes a step on the medium as the disk does.
    pub(crate) fn carry_out(&self, media: &impl Media, step: &Step) -> io::Result<()> {
        let at = |zone: u32, from: u64| self.geometry.start_of(zone) + from * BLOCK;
        let state = step.zone().map(|zone| {
            let mut state = self.now[zone as usize].clone();
            apply(&mut state, step, self.zone_blocks(zone));
            record(&state)
        });
        match (*step, state) {
            (Step::Write { zone, from, blocks, serial }, Some(state)) => {
                media.write(at(zone, from), &filled(serial, blocks))?;
                media.zone_changed(zone, state)
            }
            (Step::Finish { zone }, Some(state)) => media.zone_changed(zone, state),
            (Step::Reset { zone }, Some(state)) => media.reset(zone, state),
            (Step::Overwrite { zone, from, blocks, serial }, _) => {
                media.write(at(zone, from), &filled(serial, blocks))
            }
            (Step::Zero { zone, from, blocks }, _) => media.zero(at(zone, from), blocks * BLOCK),
            (Step::Flush, _) => media.flush(),
            (Step::FlushZone { zone }, _) => media.flush_range(at(zone, 0), BLOCK),
            (step, None) => unreachable!("{step:?} has a zone"),
        }
    }

    /// Records a step that was executed or started.
    pub(crate) fn note(&mut self, step: Step, done: Done) {
        if let Some(zone) = step.zone() {
            let blocks = self.zone_blocks(zone);
            apply(&mut self.now[zone as usize], &step, blocks);
        }
        self.steps.push((step, done));
    }

    /// Checks that a disk that stopped after `moment` operations may be in this state.
    pub(crate) fn check(&self, media: &impl Media, moment: usize, durable: Durable) {
        let records = media.zones();
        for zone in 0..self.geometry.zone_count() {
            if self.geometry.is_conventional(zone) {
                self.check_conventional(media, zone, moment, durable);
            } else {
                self.check_sequential(media, zone, records[zone as usize], moment, durable);
            }
        }
    }

    /// The steps of a zone that were started, and how many of them must have survived.
    fn of_zone(&self, zone: u32, moment: usize, durable: Durable) -> (Vec<Step>, usize) {
        let begun = self.steps.iter().filter(|(_, done)| done.begun.changes < moment);
        let of_zone: Vec<_> = begun.clone().filter(|(step, _)| step.zone() == Some(zone)).collect();
        // The steps of a zone are sequential.
        let before =
            |end: Moment| of_zone.iter().filter(|(_, done)| done.ended.tick < end.tick).count();
        let flushes =
            begun.filter(|(step, done)| step.flushes(zone) && done.ended.changes <= moment);
        let flushed = flushes.map(|(_, done)| before(done.begun)).max().unwrap_or(0);
        let safe = match durable {
            Durable::Completed => {
                of_zone.iter().filter(|(_, done)| done.ended.changes <= moment).count()
            }
            _ => flushed,
        };
        (of_zone.into_iter().map(|(step, _)| *step).collect(), safe)
    }

    fn check_sequential(
        &self,
        media: &impl Media,
        zone: u32,
        record: ZoneRecord,
        moment: usize,
        durable: Durable,
    ) {
        let mut bytes = vec![0; (record.written_sectors * 512) as usize];
        media.read(self.geometry.start_of(zone), &mut bytes).unwrap();
        let (steps, safe) = self.of_zone(zone, moment, durable);
        let mut state = Zone { blocks: Vec::new(), full: false, erasures: 0 };
        let mut allowed = Vec::new();
        for count in 0..=steps.len() {
            if count > 0 {
                apply(&mut state, &steps[count - 1], self.zone_blocks(zone));
            }
            if count >= safe && looks_like(&state, &record, &bytes, self.zone_blocks(zone)) {
                allowed.push(count);
            }
        }
        let begun = self.flush_begun(zone, moment);
        let only = durable != Durable::FlushedOnly
            || allowed.iter().any(|count| *count == safe || begun.contains(count))
            // A write to a zone that was reset first makes all resets durable.
            || allowed.iter().any(|count| matches!(steps[count - 1], Step::Reset { .. }));
        assert!(
            !allowed.is_empty() && only,
            "zone {zone} at {moment}: {record:?}, {bytes:?} is no prefix of {steps:?} that has the \
             first {safe} ({durable:?})"
        );
    }

    /// The numbers of a zone's steps that are covered by flushes which started and did not
    /// complete: either outcome is valid.
    fn flush_begun(&self, zone: u32, moment: usize) -> Vec<usize> {
        let mut count = 0;
        let mut begun = Vec::new();
        for (step, done) in self.steps.iter().filter(|(_, done)| done.begun.changes < moment) {
            count += usize::from(step.zone() == Some(zone));
            if step.flushes(zone) && done.ended.changes > moment {
                begun.push(count);
            }
        }
        begun
    }

    fn check_conventional(&self, media: &impl Media, zone: u32, moment: usize, durable: Durable) {
        let (steps, safe) = self.of_zone(zone, moment, durable);
        for block in 0..ZONE_BLOCKS {
            let mut bytes = [0; BLOCK as usize];
            media.read(self.geometry.start_of(zone) + block * BLOCK, &mut bytes).unwrap();
            let mut allowed = vec![0];
            for (at, step) in steps.iter().enumerate() {
                let value = match *step {
                    Step::Overwrite { from, blocks, serial, .. }
                        if (from..from + blocks).contains(&block) =>
                    {
                        serial
                    }
                    Step::Zero { from, blocks, .. } if (from..from + blocks).contains(&block) => 0,
                    _ => continue,
                };
                if at < safe {
                    allowed.clear();
                }
                allowed.push(value);
            }
            let whole = bytes.iter().all(|byte| *byte == bytes[0]);
            assert!(
                whole && allowed.contains(&bytes[0]),
                "block {block} of zone {zone} at {moment}: {bytes:?} is none of {allowed:?}, of \
                 {steps:?} with the first {safe} ({durable:?})"
            );
        }
    }
}

/// Applies a step to the expected state of a zone.
fn apply(zone: &mut Zone, step: &Step, zone_blocks: u64) {
    match *step {
        Step::Write { blocks, serial, .. } => {
            zone.blocks.extend(std::iter::repeat_n(serial, blocks as usize));
            zone.full = zone.blocks.len() as u64 == zone_blocks;
        }
        Step::Finish { .. } => {
            zone.blocks.resize(zone_blocks as usize, 0);
            zone.full = true;
        }
        Step::Reset { .. } => {
            *zone = Zone { blocks: Vec::new(), full: false, erasures: zone.erasures + 1 };
        }
        _ => {}
    }
}

/// The record that the disk keeps for a zone.
fn record(zone: &Zone) -> ZoneRecord {
    let cond = match zone.blocks.len() {
        _ if zone.full => ZoneCond::Full,
        0 => ZoneCond::Empty,
        _ => ZoneCond::ImplicitOpen,
    };
    let written_sectors = zone.blocks.len() as u64 * BLOCK / 512;
    ZoneRecord { cond, written_sectors, erasures: zone.erasures }
}

/// Whether the state found on disk matches this expected zone.
fn looks_like(zone: &Zone, found: &ZoneRecord, bytes: &[u8], zone_blocks: u64) -> bool {
    let cond = match zone.blocks.len() as u64 {
        _ if zone.full => ZoneCond::Full,
        0 => ZoneCond::Empty,
        len if len < zone_blocks => ZoneCond::Closed,
        _ => ZoneCond::Full,
    };
    let blocks = bytes.chunks(BLOCK as usize);
    found.cond == cond
        && bytes.len() as u64 == zone.blocks.len() as u64 * BLOCK
        && blocks.zip(&zone.blocks).all(|(chunk, serial)| chunk.iter().all(|byte| byte == serial))
}
