//! Batches of independent bios in flight together: the model executes them in the order in which
//! they were pushed, and the device in any order.

use std::ops::Range;

use blockyard_core::Completion;
use blockyard_core::bio::{Bio, Flags, Op};
use blockyard_core::units::{SECTOR_BYTES, Sector};
use blockyard_core::zone::ZoneInfo;
use blockyard_core::zone::gate::GateMode;

use super::fixture::{BUFFER_BYTES, Fixture, data_bytes, same_bytes};
use super::{DEPTH, Subject};
use crate::model::ExpectedResult;
use crate::seed::Seed;
use crate::workload::{Mix, Workload};

/// Batches of one run.
const ROUNDS: u64 = 80;

/// Longest data of one bio, in sectors.
const SECTORS_MAX: u64 = 64;

const _: () = assert!(DEPTH as u64 * SECTORS_MAX * SECTOR_BYTES <= BUFFER_BYTES as u64);

/// A wild workload in batches agrees with the model.
pub(super) fn as_the_model_says(subject: &Subject, seed: Seed) {
    let mut fixture = subject.fixture();
    run(&mut fixture, seed, Flags::NONE);
    fixture.same_report();
    fixture.same_contents();
}

/// A run gives equal completions, zones and contents with and without merging.
pub(super) fn merging_is_invisible(subject: &Subject, seed: Seed) {
    let mut merged = subject.fixture();
    let mut single = subject.fixture();
    let with = run(&mut merged, seed, Flags::NONE);
    let without = run(&mut single, seed, Flags::NOMERGE);
    assert_eq!(with, without, "completions with and without merging");
    assert_eq!(merged.report(), single.report(), "zones with and without merging");
    merged.same_contents();
    single.same_contents();
    let merges: u64 = Op::ALL.iter().map(|op| single.disk.stats().op(*op).merges).sum();
    assert_eq!(merges, 0, "NOMERGE bios were merged");
}

/// The expected completion of one bio of a batch.
struct Wanted {
    bio: Bio,
    outcome: ExpectedResult,
    data: Vec<u8>,
}

/// Runs batches against the model; returns all completions, ordered by user data.
fn run(fixture: &mut Fixture, seed: Seed, flags: Flags) -> Vec<Completion> {
    let mut mix = Mix::wild();
    mix.data_sectors_max = SECTORS_MAX;
    mix.odd_per_mille = 60;
    let mut workload = Workload::new(seed, 3, mix);
    let mut all = Vec::new();
    let mut user_data = 0;
    for _ in 0..ROUNDS {
        let count = 1 + workload.below(u64::from(DEPTH));
        let mut batch = BioBatch { coupled: is_coupled(fixture), ..BioBatch::default() };
        for _ in 0..count {
            let Some(bio) = batch.next(fixture, &mut workload, user_data, flags) else { continue };
            user_data += 1;
            fixture.push(bio, &mut all);
        }
        all.append(&mut fixture.finish());
        batch.compare(fixture, &all);
    }
    all.sort_by_key(|completion| completion.user_data);
    let numbers: Vec<u64> = all.iter().map(|completion| completion.user_data).collect();
    assert_eq!(numbers, (0..user_data).collect::<Vec<_>>(), "exactly one completion each");
    all
}

/// Bios that are in flight together.
#[derive(Default)]
struct BioBatch {
    wanted: Vec<Wanted>,
    claims: Vec<Claim>,
    /// A zone write plug holds back some bios. So changes of different zones may meet the limits
    /// that they share in another order than they were pushed.
    coupled: bool,
}

/// A range that a bio of the batch uses.
struct Claim {
    range: Range<u64>,
    class: Class,
}

/// Bios of one class may share a range, except exclusive ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Reads,
    /// Writes at a write pointer, in order.
    Sequential,
    Exclusive,
}

impl BioBatch {
    /// The next bio, if it conflicts with none in the batch, with its data in its own part of the
    /// buffer, applied to the model. `None` if the workload's next bio conflicts with one.
    fn next(
        &mut self,
        fixture: &mut Fixture,
        workload: &mut Workload,
        user_data: u64,
        flags: Flags,
    ) -> Option<Bio> {
        let mut bio = workload.next(&fixture.model).with_user_data(user_data);
        self.chain(&mut bio, workload);
        // A sequence of flush and write starts its write after bios that were pushed later.
        if fixture.model.geometry().zones.is_some() && fixture.disk.limits().write_cache {
            bio.flags = Flags::NONE;
        }
        bio.flags = bio.flags | flags;
        let claim = claim(fixture, &bio);
        if !self.is_free(&claim) {
            return None;
        }
        let offset = self.wanted.len() as u64 * SECTORS_MAX * SECTOR_BYTES;
        bio.buf = fixture.buf(offset);
        let mut data = vec![0; data_bytes(&bio)];
        workload.fill(&mut data);
        fixture.region.write(offset, &data);
        let outcome = fixture.model.apply(&bio, &mut data);
        self.claims.push(claim);
        self.wanted.push(Wanted { bio, outcome, data });
        Some(bio)
    }

    /// Half of all reads and writes continue where the previous one ends, or end where it starts,
    /// so that merging has candidates.
    fn chain(&self, bio: &mut Bio, workload: &mut Workload) {
        let Some(Wanted { bio: last, .. }) = self.wanted.last() else { return };
        let both = matches!(bio.op, Op::Read | Op::Write | Op::Discard) && last.op == bio.op;
        let fits = (1..=SECTORS_MAX).contains(&bio.sectors);
        if !both || !fits || last.sectors == 0 || workload.below(2) == 0 {
            return;
        }
        if workload.below(4) > 0 {
            bio.sector = Sector(last.sector.0.saturating_add(last.sectors));
        } else {
            bio.sector = Sector(last.sector.0.saturating_sub(bio.sectors));
        }
        (bio.flags, bio.prio) = (last.flags, last.prio);
    }

    fn is_free(&self, claim: &Claim) -> bool {
        self.claims.iter().all(|other| {
            let changes = claim.class != Class::Reads && other.class != Class::Reads;
            if self.coupled && changes && other.range != claim.range {
                return false;
            }
            let apart =
                claim.range.end <= other.range.start || other.range.end <= claim.range.start;
            apart || (claim.class == other.class && claim.class != Class::Exclusive)
        })
    }

    fn compare(&self, fixture: &Fixture, done: &[Completion]) {
        for Wanted { bio, outcome, data } in &self.wanted {
            let found = done.iter().rev().find(|found| found.user_data == bio.user_data);
            let found = found.unwrap_or_else(|| panic!("no completion for {bio:?}"));
            assert_eq!(found.status, outcome.status, "status of {bio:?}");
            assert_eq!(found.sector, outcome.sector, "sector of {bio:?}");
            if bio.op == Op::Read && outcome.status.is_ok() && fixture.model.keeps_data() {
                let mut bytes = vec![0; data.len()];
                fixture.region.read(bio.buf.offset, &mut bytes);
                same_bytes(&bytes, data, bio.sector);
            }
        }
    }
}

/// Whether there is a zone write plug, and limits that zones share.
fn is_coupled(fixture: &Fixture) -> bool {
    let gated = fixture.disk.gate().is_some_and(|gate| gate.mode == GateMode::ZoneWritePlug);
    let zones = fixture.disk.geometry().zones.as_ref();
    gated && zones.is_some_and(|zones| zones.open_max + zones.active_max > 0)
}

/// The range that a bio uses. On a zoned device this is whole zones; if limits couple zones, or all
/// zones are meant, it is everything.
fn claim(fixture: &Fixture, bio: &Bio) -> Claim {
    let everything = 0..u64::MAX;
    if bio.op == Op::Flush {
        return Claim { range: 0..0, class: Class::Reads };
    }
    let (start, end) = (bio.sector.0, bio.sector.0.saturating_add(bio.sectors.max(1)));
    let report = fixture.model.report();
    let at = |sector: u64| report.iter().find(|zone: &&ZoneInfo| sector < end_of(zone));
    let range = match (at(start), at(end - 1)) {
        _ if bio.op == Op::ZoneResetAll => everything,
        (Some(first), Some(last)) => first.start.0..end_of(last),
        (Some(first), None) => first.start.0..u64::MAX,
        (None, _) => start..end,
    };
    let class = match bio.op {
        Op::Read => Class::Reads,
        Op::Write | Op::ZoneAppend if !report.is_empty() => {
            let conventional = at(start).is_none_or(|zone| zone.cond.name() == "not-wp");
            if conventional { Class::Exclusive } else { Class::Sequential }
        }
        _ => Class::Exclusive,
    };
    Claim { range, class }
}

fn end_of(zone: &ZoneInfo) -> u64 {
    zone.start.0 + zone.sectors
}
