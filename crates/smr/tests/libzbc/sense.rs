//! Section 01, sense data: an invalid command fails with the right codes and changes nothing.

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::ZoneAction;
use blockyard_smr::sense::Sense;

use ZoneAction::{Close, Finish, Open, Reset};
use ZoneCond::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen};

use crate::rig::{Answer, Case, FIRST, OPEN_MAX, Rig, refused};

const SECOND: u32 = FIRST + 1;

/// The zone ID is not the start of a zone.
fn not_a_start(rig: &Rig, action: ZoneAction) {
    let answer = rig.zones(action, rig.start(FIRST) + 1, false);
    assert_eq!(answer, refused(Sense::INVALID_FIELD_IN_CDB));
}

/// The zone is conventional.
fn conventional(rig: &Rig, action: ZoneAction) {
    assert_eq!(rig.act(action, 0), refused(Sense::INVALID_FIELD_IN_CDB));
    rig.is(0, ZoneCond::NotWp);
}

/// The zone ID is the end of the medium, or far beyond.
fn at_the_end(rig: &Rig, action: ZoneAction) {
    for zone_id in [rig.blocks(), rig.blocks() + 1, u64::MAX] {
        assert_eq!(rig.zones(action, zone_id, false), refused(Sense::LBA_OUT_OF_RANGE));
    }
}

/// With ALL, any zone ID is ignored and the action applies to all zones.
fn all_ignores(rig: &Rig, action: ZoneAction, zone_id: u64) {
    rig.begin_closed(FIRST);
    assert_eq!(rig.zones(action, zone_id, true), Ok(()));
    let after = match action {
        Open => ExplicitOpen,
        Close => Closed,
        Finish => Full,
        Reset => Empty,
    };
    rig.is(FIRST, after);
    rig.is(0, ZoneCond::NotWp);
}

/// Fills a zone.
fn fill(rig: &Rig, zone: u32) {
    assert_eq!(rig.write(rig.start(zone), rig.len()), Ok(()));
}

/// A read that only a disk with URSWRZ permits.
fn restricted_read(rig: &Rig, lba: u64, count: u64, sense: Sense) {
    let wanted = if rig.unrestricted() { Ok(()) } else { refused(sense) };
    assert_eq!(rig.read(lba, count), wanted);
}

/// A write that must be refused and change nothing.
fn refused_write(rig: &Rig, lba: u64, count: u64, sense: Sense) {
    let before = rig.report(0, 0, false);
    assert_eq!(rig.write(lba, count), refused(sense));
    assert_eq!(rig.report(0, 0, false), before);
}

/// A write across the end of a zone that starts `before_end` blocks before it.
fn write_over_end(rig: &Rig, before_end: u64) {
    let end = rig.start(FIRST) + rig.len();
    refused_write(
        rig,
        end - before_end,
        before_end + rig.physical(),
        Sense::WRITE_BOUNDARY_VIOLATION,
    );
}

/// Writes a zone except its last physical block.
fn fill_but_one(rig: &Rig, zone: u32) {
    assert_eq!(rig.write(rig.start(zone), rig.len() - rig.physical()), Ok(()));
}

/// The result of a command for a closed or empty zone while `open` zones are explicitly open.
fn with_open(rig: &Rig, open: u32, command: impl Fn() -> Answer) {
    rig.open_many(SECOND, open);
    let before = rig.report(0, 0, false);
    let wanted = match open {
        OPEN_MAX => refused(Sense::INSUFFICIENT_ZONE_RESOURCES),
        _ => Ok(()),
    };
    assert_eq!(command(), wanted);
    if wanted.is_err() {
        assert_eq!(rig.report(0, 0, false), before, "a refusal changes nothing");
    }
}

/// Implicitly opens the maximum number of zones, from the second sequential one on.
fn fill_implicitly(rig: &Rig) {
    for zone in SECOND..SECOND + OPEN_MAX {
        rig.begin(zone);
    }
}

/// Checks that only the oldest implicitly open zone was closed to make room.
fn oldest_has_closed(rig: &Rig) {
    rig.is(SECOND, Closed);
    for zone in SECOND + 1..SECOND + OPEN_MAX {
        rig.is(zone, ImplicitOpen);
    }
}

/// Closes `count` zones with data, from the first sequential one on.
fn close_many(rig: &Rig, count: u32) {
    for zone in FIRST..FIRST + count {
        rig.begin_closed(zone);
    }
}

/// OPEN ALL with `closed` closed zones.
fn open_all(rig: &Rig, closed: u32) {
    close_many(rig, closed);
    let (wanted, cond) = match closed > OPEN_MAX {
        true => (refused(Sense::INSUFFICIENT_ZONE_RESOURCES), Closed),
        false => (Ok(()), ExplicitOpen),
    };
    assert_eq!(rig.zones(Open, 0, true), wanted);
    for zone in FIRST..FIRST + closed {
        rig.is(zone, cond);
    }
}

fn closed_then(rig: &Rig, open: u32, action: ZoneAction) {
    rig.begin_closed(FIRST);
    with_open(rig, open, || rig.act(action, FIRST));
}

fn write_closed(rig: &Rig, open: u32) {
    rig.begin_closed(FIRST);
    with_open(rig, open, || rig.write(rig.start(FIRST) + rig.physical(), rig.physical()));
}

fn write_empty(rig: &Rig, open: u32) {
    with_open(rig, open, || rig.write(rig.start(FIRST), rig.physical()));
}

const AT: u32 = OPEN_MAX;
const BELOW: u32 = OPEN_MAX - 1;

const fn case(number: &'static str, about: &'static str, run: fn(&Rig)) -> Case {
    Case { number, about, run }
}

pub(crate) const CASES: &[Case] = &[
    case("010", "REPORT ZONES, block out of range", |rig| {
        for lba in [rig.blocks(), rig.blocks() + 1, u64::MAX] {
            let answer = rig.report(lba, 0, false).map(drop);
            assert_eq!(answer, refused(Sense::LBA_OUT_OF_RANGE));
        }
    }),
    case("011", "REPORT ZONES, an option that there is not", |rig| {
        let known: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 0x10, 0x11, 0x3e, 0x3f];
        for option in 0..0x40 {
            let wanted = match known.contains(&option) {
                true => Ok(()),
                false => refused(Sense::INVALID_FIELD_IN_CDB),
            };
            assert_eq!(rig.report(0, option, false).map(drop), wanted, "{option:#x}");
        }
    }),
    case("020", "OPEN ZONE, zone ID inside a zone", |rig| not_a_start(rig, Open)),
    case("021", "OPEN ZONE of an EMPTY zone at the open limit", |rig| {
        with_open(rig, AT, || rig.open(FIRST));
    }),
    case("022", "OPEN ALL with one CLOSED zone more than may be open", |rig| {
        open_all(rig, OPEN_MAX + 1);
    }),
    case("023", "OPEN ZONE of a conventional zone", |rig| conventional(rig, Open)),
    case("024", "OPEN ZONE at the end of the medium", |rig| at_the_end(rig, Open)),
    case("025", "OPEN ALL ignores a zone ID beyond the end", |rig| {
        all_ignores(rig, Open, rig.blocks() + 1);
    }),
    case("026", "OPEN ALL ignores the ID of a conventional zone", |rig| all_ignores(rig, Open, 0)),
    case("030", "CLOSE ZONE, zone ID inside a zone", |rig| not_a_start(rig, Close)),
    case("031", "CLOSE ZONE of a conventional zone", |rig| conventional(rig, Close)),
    case("032", "CLOSE ZONE at the end of the medium", |rig| at_the_end(rig, Close)),
    case("033", "CLOSE ALL ignores a zone ID beyond the end", |rig| {
        all_ignores(rig, Close, rig.blocks() + 1);
    }),
    case("034", "CLOSE ALL ignores the ID of a conventional zone", |rig| {
        all_ignores(rig, Close, 0)
    }),
    case("040", "FINISH ZONE, zone ID inside a zone", |rig| not_a_start(rig, Finish)),
    case("041", "FINISH ZONE of a conventional zone", |rig| conventional(rig, Finish)),
    case("042", "FINISH ZONE at the end of the medium", |rig| at_the_end(rig, Finish)),
    case("043", "FINISH ALL ignores a zone ID beyond the end", |rig| {
        all_ignores(rig, Finish, rig.blocks() + 1);
    }),
    case("044", "FINISH ALL ignores the ID of a conventional zone", |rig| {
        all_ignores(rig, Finish, 0);
    }),
    case("050", "RESET WRITE POINTER, zone ID inside a zone", |rig| not_a_start(rig, Reset)),
    case("051", "RESET WRITE POINTER of a conventional zone", |rig| conventional(rig, Reset)),
    case("052", "RESET WRITE POINTER at the end of the medium", |rig| at_the_end(rig, Reset)),
    case("053", "RESET ALL ignores a zone ID beyond the end", |rig| {
        all_ignores(rig, Reset, rig.blocks() + 1);
    }),
    case("054", "RESET ALL ignores the ID of a conventional zone", |rig| {
        all_ignores(rig, Reset, 0)
    }),
    case("060", "READ across the write pointer", |rig| {
        rig.begin(FIRST);
        let start = rig.start(FIRST);
        assert_eq!(rig.read(start, rig.physical()), Ok(()));
        restricted_read(rig, start, rig.physical() + 1, Sense::READ_INVALID_DATA);
    }),
    case("061", "READ from a FULL zone to below the write pointer of an open one", |rig| {
        fill(rig, FIRST);
        rig.begin(SECOND);
        restricted_read(rig, rig.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("063", "READ from a FULL zone to a FULL one", |rig| {
        fill(rig, FIRST);
        fill(rig, SECOND);
        restricted_read(rig, rig.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("064", "READ above the write pointer", |rig| {
        rig.begin(FIRST);
        let start = rig.start(FIRST);
        restricted_read(rig, start + rig.physical(), 1, Sense::READ_INVALID_DATA);
        restricted_read(rig, rig.start(SECOND), 1, Sense::READ_INVALID_DATA);
    }),
    case("065", "READ over conventional zones: allowed, but not to a sequential one", |rig| {
        assert_eq!(rig.read(rig.start(1) - 1, 2), Ok(()));
        let answer = rig.read(rig.start(FIRST) - 1, 2);
        assert_eq!(answer, refused(Sense::READ_BOUNDARY_VIOLATION));
    }),
    case("070", "WRITE above the write pointer", |rig| {
        rig.begin(FIRST);
        let at = rig.start(FIRST) + 2 * rig.physical();
        refused_write(rig, at, rig.physical(), Sense::UNALIGNED_WRITE);
    }),
    case("071", "WRITE from the write pointer of an open zone to an EMPTY one", |rig| {
        fill_but_one(rig, FIRST);
        write_over_end(rig, rig.physical());
    }),
    case("072", "WRITE over conventional zones: allowed, but not to a sequential one", |rig| {
        assert_eq!(rig.write(rig.start(1) - 1, 2), Ok(()));
        refused_write(rig, rig.start(FIRST) - 1, 2, Sense::WRITE_BOUNDARY_VIOLATION);
    }),
    case("073", "WRITE to a FULL zone", |rig| {
        fill(rig, FIRST);
        refused_write(rig, rig.start(FIRST), rig.physical(), Sense::INVALID_FIELD_IN_CDB);
    }),
    case("074", "WRITE to a FULL zone that was finished", |rig| {
        rig.begin(FIRST);
        assert_eq!(rig.finish(FIRST), Ok(()));
        let at = rig.start(FIRST) + rig.physical();
        refused_write(rig, at, rig.physical(), Sense::INVALID_FIELD_IN_CDB);
    }),
    case("075", "WRITE that ends inside of a physical block", |rig| {
        for count in 1..rig.physical() {
            refused_write(rig, rig.start(FIRST), count, Sense::UNALIGNED_WRITE);
        }
    }),
    case("076", "WRITE below the write pointer", |rig| {
        rig.begin(FIRST);
        refused_write(rig, rig.start(FIRST), rig.physical(), Sense::UNALIGNED_WRITE);
    }),
    case("077", "WRITE across the write pointer", |rig| {
        rig.begin(FIRST);
        refused_write(rig, rig.start(FIRST), 2 * rig.physical(), Sense::UNALIGNED_WRITE);
    }),
    case("080", "READ from a FULL zone to above the write pointer of an open one", |rig| {
        fill(rig, FIRST);
        rig.begin(SECOND);
        let count = rig.physical() + 2;
        restricted_read(rig, rig.start(SECOND) - 1, count, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("081", "READ from a FULL zone to an EMPTY one", |rig| {
        fill(rig, FIRST);
        restricted_read(rig, rig.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("082", "READ from below the write pointer of an open zone to a FULL one", |rig| {
        fill_but_one(rig, FIRST);
        fill(rig, SECOND);
        let at = rig.start(SECOND) - rig.physical() - 1;
        restricted_read(rig, at, rig.physical() + 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("083", "READ from above the write pointer of an open zone to a FULL one", |rig| {
        rig.begin(FIRST);
        fill(rig, SECOND);
        restricted_read(rig, rig.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("090", "WRITE from a FULL zone to above the write pointer of an open one", |rig| {
        fill(rig, FIRST);
        rig.begin(SECOND);
        let count = rig.physical() * 3;
        let at = rig.start(SECOND) - rig.physical();
        refused_write(rig, at, count, Sense::WRITE_BOUNDARY_VIOLATION);
    }),
    case("091", "WRITE from a FULL zone to below the write pointer of an open one", |rig| {
        fill(rig, FIRST);
        rig.begin(SECOND);
        write_over_end(rig, rig.physical());
    }),
    case("092", "WRITE from below the write pointer of an open zone to a FULL one", |rig| {
        fill_but_one(rig, FIRST);
        fill(rig, SECOND);
        write_over_end(rig, 2 * rig.physical());
    }),
    case("093", "WRITE from above the write pointer of an open zone to a FULL one", |rig| {
        rig.begin(FIRST);
        fill(rig, SECOND);
        write_over_end(rig, rig.physical());
    }),
    case("094", "WRITE from the write pointer of an open zone to a FULL one", |rig| {
        fill_but_one(rig, FIRST);
        fill(rig, SECOND);
        write_over_end(rig, rig.physical());
    }),
    case("095", "WRITE from a FULL zone to an EMPTY one", |rig| {
        fill(rig, FIRST);
        write_over_end(rig, rig.physical());
    }),
    case("096", "WRITE from an EMPTY zone to an EMPTY one", |rig| {
        write_over_end(rig, rig.physical());
        write_over_end(rig, rig.len());
    }),
    case("120", "OPEN ZONE of a CLOSED zone at the open limit", |rig| closed_then(rig, AT, Open)),
    case("121", "OPEN ZONE of an EMPTY zone after an open one got FULL", |rig| {
        rig.open_many(SECOND, OPEN_MAX);
        fill(rig, SECOND);
        assert_eq!(rig.open(FIRST), Ok(()));
    }),
    case("122", "OPEN ZONE of an EMPTY zone, one below the open limit", |rig| {
        with_open(rig, BELOW, || rig.open(FIRST));
    }),
    case("123", "OPEN ALL with as many CLOSED zones as may be open", |rig| open_all(rig, OPEN_MAX)),
    case("124", "OPEN ZONE of a CLOSED zone, one below the open limit", |rig| {
        closed_then(rig, BELOW, Open);
    }),
    case("127", "OPEN ALL leaves EMPTY zones alone, whatever the zone ID", |rig| {
        assert_eq!(rig.zones(Open, rig.blocks() + 1, true), Ok(()));
        rig.is(FIRST, Empty);
    }),
    case("128", "WRITE opens more zones implicitly than may be open, one after the other", |rig| {
        for zone in FIRST..FIRST + 2 * OPEN_MAX {
            rig.begin(zone);
        }
        for zone in FIRST..FIRST + 2 * OPEN_MAX {
            rig.is(zone, if zone < FIRST + OPEN_MAX { Closed } else { ImplicitOpen });
        }
    }),
    case("129", "OPEN ZONE closes an implicitly open zone to make room", |rig| {
        fill_implicitly(rig);
        assert_eq!(rig.open(FIRST), Ok(()));
        oldest_has_closed(rig);
    }),
    case("140", "FINISH ZONE of a CLOSED zone at the open limit", |rig| {
        closed_then(rig, AT, Finish)
    }),
    case("141", "FINISH ZONE of an EMPTY zone at the open limit", |rig| {
        with_open(rig, AT, || rig.finish(FIRST));
    }),
    case("142", "FINISH ZONE closes an implicitly open zone to make room", |rig| {
        fill_implicitly(rig);
        assert_eq!(rig.finish(FIRST), Ok(()));
        rig.is(FIRST, Full);
        oldest_has_closed(rig);
    }),
    case("144", "FINISH ZONE of an EMPTY zone, one below the open limit", |rig| {
        with_open(rig, BELOW, || rig.finish(FIRST));
    }),
    case("145", "FINISH ZONE of a CLOSED zone, one below the open limit", |rig| {
        closed_then(rig, BELOW, Finish);
    }),
    case("148", "FINISH ALL at the open limit, with a CLOSED zone", |rig| {
        rig.begin_closed(FIRST);
        rig.open_many(SECOND, OPEN_MAX);
        assert_eq!(rig.zones(Finish, 0, true), Ok(()));
        for zone in FIRST..=SECOND + BELOW {
            rig.is(zone, Full);
        }
    }),
    case("149", "FINISH ALL with one CLOSED zone more than may be open", |rig| {
        close_many(rig, OPEN_MAX + 1);
        assert_eq!(rig.zones(Finish, 0, true), Ok(()));
        for zone in FIRST..=FIRST + OPEN_MAX {
            rig.is(zone, Full);
        }
    }),
    case("170", "WRITE to a CLOSED zone at the open limit", |rig| write_closed(rig, AT)),
    case("171", "WRITE to an EMPTY zone at the open limit", |rig| write_empty(rig, AT)),
    case("172", "WRITE to a CLOSED zone, one below the open limit", |rig| write_closed(rig, BELOW)),
    case("173", "WRITE to an EMPTY zone, one below the open limit", |rig| write_empty(rig, BELOW)),
    case("176", "WRITE closes an implicitly open zone to make room", |rig| {
        fill_implicitly(rig);
        rig.begin(FIRST);
        rig.is(FIRST, ImplicitOpen);
        oldest_has_closed(rig);
    }),
    case("179", "WRITE to a conventional zone at the open limit", |rig| {
        rig.open_many(SECOND, OPEN_MAX);
        assert_eq!(rig.write(rig.start(0), rig.physical()), Ok(()));
    }),
];
