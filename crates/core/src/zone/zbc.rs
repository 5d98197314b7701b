//! The machine's ZBC personality: where a host-managed SMR disk answers otherwise than null_blk,
//! and why it refuses (ZBC-2 4.5.3 and 5.2 to 5.8; sense codes are the disk's business).
//!
//! Conditions and transitions are those of [`super::machine`]; only what is listed here differs:
//!
//! | operation | null_blk | ZBC |
//! | --- | --- | --- |
//! | close of an empty zone, open or close of a full one | fails | nothing to do |
//! | open all, close all, finish all | none | only zones that are closed; open; open or closed |
//! | finish all at the open limit | none | needs no open zone on the way |

use blockyard_sync::zone_resources;

use super::info::ZoneCond;
use super::machine::{Step, Zone, ZoneOp, holding_of};
use crate::units::Sector;

/// Why a ZBC disk refuses something of one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// A conventional zone has no write pointer to manage.
    Conventional,
    /// It is full.
    Full,
    /// It can only be read.
    ReadOnly,
    /// It cannot be used.
    Offline,
    /// The write does not start at the write pointer.
    Unaligned,
    /// It goes beyond the end of the zone.
    Boundary,
    /// As many zones are explicitly open as may be open.
    OpenLimit,
}

impl From<zone_resources::Refusal> for Refusal {
    fn from(refusal: zone_resources::Refusal) -> Refusal {
        match refusal {
            zone_resources::Refusal::OpenLimit => Refusal::OpenLimit,
            // ZBC counts no active zones, so this limit is never set; were it, it would be short of
            // the same resources.
            zone_resources::Refusal::ActiveLimit => Refusal::OpenLimit,
        }
    }
}

/// Why nothing can be done with a zone in its condition.
fn condition(zone: &Zone) -> Refusal {
    match zone.cond() {
        ZoneCond::NotWp => Refusal::Conventional,
        ZoneCond::ReadOnly => Refusal::ReadOnly,
        ZoneCond::Offline => Refusal::Offline,
        _ => Refusal::Full,
    }
}

fn stay(zone: &Zone) -> Step {
    Step { through: holding_of(zone.cond()), to: zone.cond() }
}

/// Whether and how one zone may be opened, closed, finished or reset.
///
/// # Errors
/// Conventional, read-only and offline zones refuse.
pub fn step(zone: &Zone, op: ZoneOp) -> Result<Step, Refusal> {
    match (op, zone.cond()) {
        // ZBC-2 5.2 and 5.5: nothing to do, and no error.
        (ZoneOp::Close, ZoneCond::Empty | ZoneCond::Full) | (ZoneOp::Open, ZoneCond::Full) => {
            Ok(stay(zone))
        }
        _ => zone.step(op).map_err(|_| condition(zone)),
    }
}

/// The same for a zone as one of all: it refuses nothing by its condition, and is left alone if it
/// is none of those that the operation is for. A limit may still forbid an open.
pub fn step_all(zone: &Zone, op: ZoneOp) -> Step {
    use ZoneCond::{Closed, ExplicitOpen, Full, ImplicitOpen};
    let meant = match op {
        // ZBC-2 5.5.2: only closed zones are opened.
        ZoneOp::Open => matches!(zone.cond(), Closed),
        ZoneOp::Close => matches!(zone.cond(), ImplicitOpen | ExplicitOpen),
        ZoneOp::Finish => matches!(zone.cond(), ImplicitOpen | ExplicitOpen | Closed),
        ZoneOp::Reset | ZoneOp::ResetAll => {
            matches!(zone.cond(), ImplicitOpen | ExplicitOpen | Closed | Full)
        }
        ZoneOp::Read | ZoneOp::Write | ZoneOp::Append => false,
    };
    match (meant, op) {
        (false, _) => stay(zone),
        // ZBC-2 5.4.2: finishing all opens none on the way.
        (true, ZoneOp::Finish) => Step { through: holding_of(Full), to: Full },
        (true, _) => zone.step(op).expect("conditions that are meant permit it"),
    }
}

/// Whether `sectors` may be written at `at`, which lies in the zone, and the condition that the
/// zone is in then, before the data arrive.
///
/// # Errors
/// The end of the zone is looked at first, then the condition, then the write pointer.
#[inline]
pub fn step_write(zone: &Zone, at: Sector, sectors: u64) -> Result<ZoneCond, Refusal> {
    let end = zone.end();
    if at > end || sectors > end - at {
        return Err(Refusal::Boundary);
    }
    match zone.cond() {
        ZoneCond::Full | ZoneCond::ReadOnly | ZoneCond::Offline => Err(condition(zone)),
        _ => zone.step_write(at, sectors).map_err(|_| Refusal::Unaligned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: [ZoneOp; 4] = [ZoneOp::Open, ZoneOp::Close, ZoneOp::Finish, ZoneOp::Reset];

    /// A zone of 16 sectors in each condition, 4 written where that can be.
    fn zone(cond: ZoneCond) -> Zone {
        let zone = Zone::sequential(Sector(32), 16, 16);
        match cond {
            ZoneCond::NotWp => Zone::conventional(Sector(32), 16),
            ZoneCond::Empty | ZoneCond::Offline => zone.restore(cond, 0),
            ZoneCond::Full | ZoneCond::ReadOnly => zone.restore(cond, 16),
            _ => zone.restore(cond, 4),
        }
    }

    #[test]
    fn every_operation_in_every_condition() {
        use Refusal::{Conventional, Offline, ReadOnly};
        use ZoneCond::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen};
        // In the order of ZoneCond::ALL, without the last two.
        let refused = [Err(ReadOnly), Err(Offline)];
        let rows: [[Result<ZoneCond, Refusal>; 6]; 4] = [
            [
                Err(Conventional),
                Ok(ExplicitOpen),
                Ok(ExplicitOpen),
                Ok(ExplicitOpen),
                Ok(ExplicitOpen),
                Ok(Full),
            ],
            [Err(Conventional), Ok(Empty), Ok(Closed), Ok(Closed), Ok(Closed), Ok(Full)],
            [Err(Conventional), Ok(Full), Ok(Full), Ok(Full), Ok(Full), Ok(Full)],
            [Err(Conventional), Ok(Empty), Ok(Empty), Ok(Empty), Ok(Empty), Ok(Empty)],
        ];
        for (op, row) in OPS.into_iter().zip(rows) {
            for (cond, want) in ZoneCond::ALL.into_iter().zip(row.into_iter().chain(refused)) {
                let found = step(&zone(cond), op).map(|step| step.to);
                assert_eq!(found, want, "{op:?} of {cond}");
            }
        }
        let all = [
            [Empty, ImplicitOpen, ExplicitOpen, ExplicitOpen, Full],
            [Empty, Closed, Closed, Closed, Full],
            [Empty, Full, Full, Full, Full],
            [Empty, Empty, Empty, Empty, Empty],
        ];
        for (op, row) in OPS.into_iter().zip(all) {
            for (cond, want) in ZoneCond::ALL[1..6].iter().zip(row) {
                assert_eq!(step_all(&zone(*cond), op).to, want, "{op:?} of all, {cond}");
            }
            for cond in [ZoneCond::NotWp, ZoneCond::ReadOnly, ZoneCond::Offline] {
                assert_eq!(step_all(&zone(cond), op).to, cond, "{op:?} of all, {cond}");
            }
        }
    }

    #[test]
    fn a_write_is_refused_for_its_end_then_the_condition_then_the_place() {
        let write = |cond, at, sectors| step_write(&zone(cond), Sector(at), sectors);
        assert_eq!(write(ZoneCond::Closed, 36, 4), Ok(ZoneCond::ImplicitOpen));
        assert_eq!(write(ZoneCond::ExplicitOpen, 36, 12), Ok(ZoneCond::ExplicitOpen));
        assert_eq!(write(ZoneCond::Closed, 37, 4), Err(Refusal::Unaligned));
        assert_eq!(write(ZoneCond::Closed, 32, 4), Err(Refusal::Unaligned));
        assert_eq!(write(ZoneCond::Closed, 36, 13), Err(Refusal::Boundary));
        assert_eq!(write(ZoneCond::Full, 36, u64::MAX), Err(Refusal::Boundary));
        assert_eq!(write(ZoneCond::Full, 32, 1), Err(Refusal::Full));
        assert_eq!(write(ZoneCond::ReadOnly, 36, 1), Err(Refusal::ReadOnly));
        assert_eq!(write(ZoneCond::Offline, 36, 1), Err(Refusal::Offline));
        assert_eq!(write(ZoneCond::NotWp, 40, 8), Ok(ZoneCond::NotWp));
    }
}
