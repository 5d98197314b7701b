//! Compares the state machine with docs/zones.md, cell by cell.

use super::super::document;
use super::*;

const START: Sector = Sector(1024);
const SECTORS: u64 = 512;
const CAPACITY: u64 = 384;

/// A sequential zone in `cond` with the write pointer at its start or in its middle.
fn zone_in(cond: ZoneCond, wp_at_start: bool) -> Option<Zone> {
    let mut zone = Zone::sequential(START, SECTORS, CAPACITY);
    match (cond, wp_at_start) {
        (ZoneCond::NotWp, _) => return Some(Zone::conventional(START, SECTORS)),
        (ZoneCond::Empty, true) | (ZoneCond::Full, false) => {}
        (ZoneCond::Empty, false) | (ZoneCond::Full | ZoneCond::Closed, true) => return None,
        _ => {}
    }
    if !wp_at_start {
        zone.enter(ZoneCond::ImplicitOpen);
        zone.advance(100);
    }
    zone.enter(cond);
    Some(zone)
}

/// Applies a permitted write.
fn written(zone: &mut Zone, to: Result<ZoneCond, Status>, sectors: u64) -> Status {
    match to {
        Ok(to) => {
            zone.enter(to);
            zone.advance(sectors);
            Status::Ok
        }
        Err(status) => status,
    }
}

fn managed(zone: &mut Zone, op: ZoneOp) -> Status {
    match zone.step(op) {
        Ok(step) => {
            zone.enter(step.to);
            Status::Ok
        }
        Err(status) => status,
    }
}

/// Executes a row of the table; `None` for a row that does not concern the machine.
fn carry_out(row: &str, zone: &mut Zone) -> Option<Status> {
    let wp = if zone.cond == ZoneCond::NotWp { START + 100 } else { zone.wp };
    let left = if wp <= zone.writable_end { zone.writable_end - wp } else { 0 };
    let mut write = |at: Sector, sectors: u64| {
        let to = zone.step_write(at, sectors);
        written(zone, to, sectors)
    };
    Some(match row {
        "read below the write pointer" | "read above the write pointer" => {
            zone.readable_end().map_or_else(|status| status, |_| Status::Ok)
        }
        "write" | "write-zeroes" => write(wp.min(START + 100), 8),
        "write up to capacity" => write(wp, left),
        "write past capacity" => write(wp, left + 8),
        "write below the write pointer" => write(Sector(wp.0.saturating_sub(8)), 8),
        "write above the write pointer" => write(Sector(wp.0.saturating_add(8)), 8),
        "append" | "append up to capacity" | "append past capacity" => {
            let sectors = match row {
                "append" => 8,
                "append up to capacity" => left,
                _ => left + 8,
            };
            let to = zone.step_append(sectors);
            written(zone, to, sectors)
        }
        "open" => managed(zone, ZoneOp::Open),
        "close, something written" | "close, nothing written" => managed(zone, ZoneOp::Close),
        "finish" => managed(zone, ZoneOp::Finish),
        "reset" => managed(zone, ZoneOp::Reset),
        "reset all" => managed(zone, ZoneOp::ResetAll),
        "discard" => return None,
        other => panic!("docs/zones.md has a row that this test does not know: {other}"),
    })
}

/// A cell is `IOERR`, or the condition afterwards, or `-` for an impossible case.
#[test]
fn document_matches_state_machine() {
    let table = document::table("What each operation does in each condition");
    let mut checked = 0;
    for ((row, column), cell) in &table {
        let cond = ZoneCond::ALL.into_iter().find(|cond| cond.name() == column).unwrap();
        let at_start = row.ends_with("nothing written") || cond == ZoneCond::Empty;
        let zone = zone_in(cond, at_start);
        let impossible = row == "close, something written" && cond == ZoneCond::Empty;
        let (Some(mut zone), false) = (zone, impossible) else {
            assert_eq!(cell, "-", "{row} in {column}");
            continue;
        };
        let before = zone;
        let Some(status) = carry_out(row, &mut zone) else { continue };
        checked += 1;
        if status.is_ok() {
            assert_eq!(cell, zone.cond.name(), "{row} in {column}");
        } else {
            assert_eq!(cell, status.name(), "{row} in {column}");
            assert_eq!(zone, before, "{row} in {column} failed and changed the zone");
        }
    }
    assert!(checked > 8 * 14, "only {checked} cells were found");
}

#[test]
fn every_pair_of_operation_and_condition_has_a_rule() {
    for op in ZoneOp::ALL {
        for cond in ZoneCond::ALL {
            for at_start in [false, true] {
                let Some(zone) = zone_in(cond, at_start) else { continue };
                match zone.step(op) {
                    Ok(step) => {
                        let mut after = zone;
                        after.enter(step.to);
                        assert!(after.wp >= after.start, "{op:?} in {cond}");
                    }
                    Err(status) => assert_eq!(status, Status::IoErr, "{op:?} in {cond}"),
                }
            }
        }
    }
}

#[test]
fn write_pointer_matches_null_blk_report() {
    let mut zone = Zone::sequential(START, SECTORS, CAPACITY);
    assert_eq!(written(&mut zone, Ok(ZoneCond::ImplicitOpen), CAPACITY), Status::Ok);
    assert_eq!((zone.cond, zone.wp), (ZoneCond::Full, START + CAPACITY));
    assert_eq!(managed(&mut zone, ZoneOp::Reset), Status::Ok);
    assert_eq!((zone.cond, zone.wp), (ZoneCond::Empty, START));
    assert_eq!(managed(&mut zone, ZoneOp::Finish), Status::Ok);
    assert_eq!((zone.cond, zone.wp), (ZoneCond::Full, START + SECTORS));
    zone.enter(ZoneCond::ReadOnly);
    assert_eq!((zone.info().wp, zone.readable_end()), (Sector::NONE, Ok(START + SECTORS)));
    zone.enter(ZoneCond::Offline);
    assert_eq!((zone.info().wp, zone.readable_end()), (Sector::NONE, Err(Status::IoErr)));
    let conventional = Zone::conventional(START, SECTORS).info();
    assert_eq!((conventional.wp, conventional.capacity_sectors), (START + SECTORS, SECTORS));
}

#[test]
fn huge_lengths_do_not_overflow() {
    let zone = Zone::sequential(START, SECTORS, CAPACITY);
    assert_eq!(zone.step_write(START, u64::MAX), Err(Status::IoErr));
    assert_eq!(zone.step_append(u64::MAX), Err(Status::IoErr));
    let conventional = Zone::conventional(START, SECTORS);
    assert_eq!(conventional.step_write(START + 8, u64::MAX), Err(Status::IoErr));
    assert_eq!(conventional.step_write(Sector(0), 8), Err(Status::IoErr));
    assert_eq!(conventional.step_write(Sector::NONE, 8), Err(Status::IoErr));
}
