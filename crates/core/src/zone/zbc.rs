//! The state machine of a host-managed SMR disk: its differences from null_blk, and its reasons for
//! a refusal (ZBC-2 4.5.3 and 5.2 to 5.8). The disk chooses the sense codes.
//!
//! Conditions and transitions are those of [`super::machine`] except for these:
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

/// Why a ZBC disk refuses an operation on a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// A conventional zone has no write pointer to manage.
    Conventional,
    /// The zone is full.
    Full,
    /// The zone is read-only.
    ReadOnly,
    /// The zone is offline.
    Offline,
    /// The write does not start at the write pointer.
    Unaligned,
    /// The range ends beyond the zone.
    Boundary,
    /// The maximum number of zones is explicitly open.
    OpenLimit,
}

impl From<zone_resources::ResourceError> for Refusal {
    fn from(refusal: zone_resources::ResourceError) -> Refusal {
        match refusal {
            zone_resources::ResourceError::OpenLimit => Refusal::OpenLimit,
            // ZBC has no limit of active zones, so this refusal does not occur. If it did, the disk
            // would lack the same resources.
            zone_resources::ResourceError::ActiveLimit => Refusal::OpenLimit,
        }
    }
}

/// Why a zone in its condition refuses an operation.
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

/// Whether one zone may be opened, closed, finished or reset, and the effect.
///
/// # Errors
/// Conventional, read-only and offline zones refuse.
pub fn step(zone: &Zone, op: ZoneOp) -> Result<Step, Refusal> {
    match (op, zone.cond()) {
        // ZBC-2 5.2 and 5.5: the command does nothing and succeeds.
        (ZoneOp::Close, ZoneCond::Empty | ZoneCond::Full) | (ZoneOp::Open, ZoneCond::Full) => {
            Ok(stay(zone))
        }
        _ => zone.step(op).map_err(|_| condition(zone)),
    }
}

/// The effect of an operation on all zones on one of them. A zone to which the operation does not
/// apply stays as it is, without an error. A limit may still refuse an open.
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
        // ZBC-2 5.4.2: finishing all zones opens none on the way.
        (true, ZoneOp::Finish) => Step { through: holding_of(Full), to: Full },
        (true, _) => zone.step(op).expect("conditions that are meant permit it"),
    }
}

/// Whether `sectors` may be written at `at`, which must lie in the zone, and the condition that the
/// zone enters before the data is transferred.
///
/// # Errors
/// The checks come in this order: the end of the zone, the condition, the write pointer.
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

    /// A zone of 16 sectors in each condition, with 4 sectors written where possible.
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
        // In the order of `ZoneCond::ALL`, without the last two.
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
    fn write_refusal_checks_end_then_condition_then_pointer() {
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
