//! docs/zones.md compared with the device: both tables, cell by cell, through a channel.

#[path = "../../../core/src/zone/document.rs"]
mod document;

use crate::common::Fixture;
use blockyard_core::zone::ZoneCond;
use blockyard_core::{Op, Status};
use blockyard_null::NullConfig;

/// Zone size in sectors; `CAPACITY` is the writable part.
const ZONE: u64 = 512;
const CAPACITY: u64 = 384;
/// Sectors written in a zone that is "partly written".
const PART: u64 = 96;

fn config(memory_backed: bool) -> NullConfig {
    NullConfig {
        size: 8 * ZONE * 512,
        zoned: true,
        zone_size: ZONE * 512,
        zone_capacity: CAPACITY * 512,
        zone_nr_conv: 1,
        memory_backed,
        ..NullConfig::default()
    }
}

/// Brings the zone at `start` into a condition, with or without data in it.
fn bring(fixture: &mut Fixture, start: u64, cond: ZoneCond, written: bool) {
    let bad = format!("{}-{}", start, start);
    match cond {
        ZoneCond::NotWp | ZoneCond::Empty => {}
        ZoneCond::ImplicitOpen if !written => {
            // A write that fails on bad blocks leaves the zone open.
            fixture.inject("badblocks", &format!("+{bad}")).unwrap();
            assert_eq!(fixture.write(start, 8, 1), Status::IoErr);
            fixture.inject("badblocks", &format!("-{bad}")).unwrap();
        }
        ZoneCond::ExplicitOpen => assert_eq!(fixture.op(Op::ZoneOpen, start, 0), Status::Ok),
        _ => {}
    }
    if written && !matches!(cond, ZoneCond::NotWp | ZoneCond::Empty) {
        assert_eq!(fixture.write(start, PART, 1), Status::Ok);
    }
    match cond {
        ZoneCond::Closed => assert_eq!(fixture.op(Op::ZoneClose, start, 0), Status::Ok),
        ZoneCond::Full => assert_eq!(fixture.op(Op::ZoneFinish, start, 0), Status::Ok),
        ZoneCond::ReadOnly => fixture.inject("zone_readonly", &start.to_string()).unwrap(),
        ZoneCond::Offline => fixture.inject("zone_offline", &start.to_string()).unwrap(),
        _ => {}
    }
    assert_eq!(fixture.cond(start), cond);
}

/// Executes a row of the first table on the zone at `start`.
fn execute(fixture: &mut Fixture, row: &str, start: u64) -> Status {
    let info = fixture.zone(start);
    let end = start + info.capacity_sectors;
    let wp =
        if info.wp.0 <= end && info.cond != ZoneCond::NotWp { info.wp.0 } else { start + PART };
    match row {
        "read below the write pointer" => fixture.op(Op::Read, start, 8),
        "read above the write pointer" => fixture.op(Op::Read, end - 8, 8),
        "write" => fixture.op(Op::Write, wp, 8),
        "write up to capacity" => fixture.op(Op::Write, wp, end - wp),
        // A conventional zone ends at the next zone: the part of the write in that zone is refused.
        "write past capacity" => fixture.op(Op::Write, wp, end - wp + 8),
        "write below the write pointer" if wp == start => fixture.op(Op::Write, end - 16, 8),
        "write below the write pointer" => fixture.op(Op::Write, wp - 8, 8),
        "write above the write pointer" => fixture.op(Op::Write, wp + 8, 8),
        "write-zeroes" => fixture.op(Op::WriteZeroes, wp, 8),
        "append" => fixture.op(Op::ZoneAppend, start, 8),
        "append up to capacity" => fixture.op(Op::ZoneAppend, start, end - wp),
        "append past capacity" => fixture.op(Op::ZoneAppend, start, end - wp + 8),
        "discard" => fixture.op(Op::Discard, start, 8),
        "open" => fixture.op(Op::ZoneOpen, start, 0),
        "close, something written" | "close, nothing written" => {
            fixture.op(Op::ZoneClose, start, 0)
        }
        "finish" => fixture.op(Op::ZoneFinish, start, 0),
        "reset" => fixture.op(Op::ZoneReset, start, 0),
        "reset all" => fixture.op(Op::ZoneResetAll, 0, 0),
        other => panic!("docs/zones.md has a row that this test does not know: {other}"),
    }
}

fn check_conditions(memory_backed: bool) {
    let table = document::table("What each operation does in each condition");
    for ((row, column), cell) in table.iter().filter(|(_, cell)| *cell != "-") {
        let cond = ZoneCond::ALL.into_iter().find(|cond| cond.name() == column).unwrap();
        let start = if cond == ZoneCond::NotWp { 0 } else { 3 * ZONE };
        if cond == ZoneCond::NotWp && row == "write past capacity" {
            // A conventional zone has no unwritable part; what follows is another zone.
            continue;
        }
        let mut fixture = Fixture::new(config(memory_backed));
        bring(&mut fixture, start, cond, row != "close, nothing written");
        let before = fixture.zone(start);
        let status = execute(&mut fixture, row, start);
        let found = if status.is_ok() { fixture.cond(start).name() } else { status.name() };
        assert_eq!(found, cell, "{row} in {column}, memory_backed {memory_backed}");
        if !status.is_ok() {
            assert_eq!(
                fixture.zone(start),
                before,
                "{row} in {column} failed and changed the zone"
            );
        }
    }
}

#[test]
fn conditions_without_memory() {
    check_conditions(false);
}

#[test]
fn conditions_with_memory() {
    check_conditions(true);
}

/// Brings zone 1 and its neighbours into the state of a table row. Returns the zones that are then
/// implicitly open, oldest first; `None` if the case is impossible.
fn bring_case(fixture: &mut Fixture, case: &str, cond: ZoneCond) -> Option<Vec<u64>> {
    use ZoneCond::{Closed, ExplicitOpen, ImplicitOpen};
    let (zone, others) = (ZONE, [2 * ZONE, 3 * ZONE, 4 * ZONE]);
    let open = matches!(cond, ImplicitOpen | ExplicitOpen);
    let states: &[ZoneCond] = match case {
        "2 implicitly open" => &[ImplicitOpen, ImplicitOpen],
        "2 explicitly open" => &[ExplicitOpen, ExplicitOpen],
        "3 closed" => &[Closed, Closed, Closed],
        "2 implicitly open and 1 closed" => &[Closed, ImplicitOpen, ImplicitOpen],
        other => panic!("docs/zones.md has a case that this test does not know: {other}"),
    };
    let impossible = match case {
        "2 implicitly open" => false,
        "2 explicitly open" => open,
        _ => open || cond == Closed,
    };
    if impossible {
        return None;
    }
    bring(fixture, zone, cond, true);
    // If zone 1 is open, it counts as one of the two open zones.
    let states = &states[usize::from(open)..];
    for (&start, &state) in others.iter().zip(states) {
        bring(fixture, start, state, true);
    }
    Some(others.into_iter().filter(|&start| fixture.cond(start) == ImplicitOpen).collect())
}

#[test]
fn limits() {
    let table = document::table("What changes at a limit");
    for ((row, column), cell) in &table {
        let (op, case) = row.split_once(", ").unwrap();
        let cond = ZoneCond::ALL.into_iter().find(|cond| cond.name() == column).unwrap();
        let limited = NullConfig { zone_max_open: 2, zone_max_active: 3, ..config(true) };
        let mut fixture = Fixture::new(limited);
        let Some(open) = bring_case(&mut fixture, case, cond) else {
            assert_eq!(cell, "-", "{row}, {column}");
            continue;
        };
        let status = execute(&mut fixture, op, ZONE);
        let closed: Vec<u64> =
            open.iter().copied().filter(|&start| fixture.cond(start) == ZoneCond::Closed).collect();
        let found = match (status, &closed[..]) {
            (Status::Ok, []) => "OK",
            (Status::Ok, [only]) if *only == open[0] => "OK, one closed",
            (status, []) => status.name(),
            other => panic!("{row}, {column}: {other:?}"),
        };
        assert_eq!(found, cell, "{row}, {column}");
    }
}
