//! Section 01, sense data: an invalid command fails with the right codes and changes nothing.

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::ZoneAction;
use blockyard_smr::sense::Sense;

use ZoneAction::{Close, Finish, Open, Reset};
use ZoneCond::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen};

use crate::fixture::{Answer, Case, FIRST, Fixture, OPEN_MAX, refused};

const SECOND: u32 = FIRST + 1;

/// The zone ID is not the start of a zone.
fn not_a_start(fixture: &Fixture, action: ZoneAction) {
    let answer = fixture.zones(action, fixture.start(FIRST) + 1, false);
    assert_eq!(answer, refused(Sense::INVALID_FIELD_IN_CDB));
}

/// The zone is conventional.
fn conventional(fixture: &Fixture, action: ZoneAction) {
    assert_eq!(fixture.act(action, 0), refused(Sense::INVALID_FIELD_IN_CDB));
    fixture.is(0, ZoneCond::NotWp);
}

/// The zone ID is the end of the medium, or far beyond.
fn at_the_end(fixture: &Fixture, action: ZoneAction) {
    for zone_id in [fixture.blocks(), fixture.blocks() + 1, u64::MAX] {
        assert_eq!(fixture.zones(action, zone_id, false), refused(Sense::LBA_OUT_OF_RANGE));
    }
}

/// With ALL, any zone ID is ignored and the action applies to all zones.
fn all_ignores(fixture: &Fixture, action: ZoneAction, zone_id: u64) {
    fixture.begin_closed(FIRST);
    assert_eq!(fixture.zones(action, zone_id, true), Ok(()));
    let after = match action {
        Open => ExplicitOpen,
        Close => Closed,
        Finish => Full,
        Reset => Empty,
    };
    fixture.is(FIRST, after);
    fixture.is(0, ZoneCond::NotWp);
}

/// Fills a zone.
fn fill(fixture: &Fixture, zone: u32) {
    assert_eq!(fixture.write(fixture.start(zone), fixture.len()), Ok(()));
}

/// A read that only a disk with URSWRZ permits.
fn restricted_read(fixture: &Fixture, lba: u64, count: u64, sense: Sense) {
    let wanted = if fixture.unrestricted() { Ok(()) } else { refused(sense) };
    assert_eq!(fixture.read(lba, count), wanted);
}

/// A write that must be refused and change nothing.
fn refused_write(fixture: &Fixture, lba: u64, count: u64, sense: Sense) {
    let before = fixture.report(0, 0, false);
    assert_eq!(fixture.write(lba, count), refused(sense));
    assert_eq!(fixture.report(0, 0, false), before);
}

/// A write across the end of a zone that starts `before_end` blocks before it.
fn write_over_end(fixture: &Fixture, before_end: u64) {
    let end = fixture.start(FIRST) + fixture.len();
    refused_write(
        fixture,
        end - before_end,
        before_end + fixture.physical(),
        Sense::WRITE_BOUNDARY_VIOLATION,
    );
}

/// Writes a zone except its last physical block.
fn fill_but_one(fixture: &Fixture, zone: u32) {
    assert_eq!(fixture.write(fixture.start(zone), fixture.len() - fixture.physical()), Ok(()));
}

/// The result of a command for a closed or empty zone while `open` zones are explicitly open.
fn with_open(fixture: &Fixture, open: u32, command: impl Fn() -> Answer) {
    fixture.open_many(SECOND, open);
    let before = fixture.report(0, 0, false);
    let wanted = match open {
        OPEN_MAX => refused(Sense::INSUFFICIENT_ZONE_RESOURCES),
        _ => Ok(()),
    };
    assert_eq!(command(), wanted);
    if wanted.is_err() {
        assert_eq!(fixture.report(0, 0, false), before, "a refusal changes nothing");
    }
}

/// Implicitly opens the maximum number of zones, from the second sequential one on.
fn fill_implicitly(fixture: &Fixture) {
    for zone in SECOND..SECOND + OPEN_MAX {
        fixture.begin(zone);
    }
}

/// Checks that only the oldest implicitly open zone was closed to make room.
fn oldest_has_closed(fixture: &Fixture) {
    fixture.is(SECOND, Closed);
    for zone in SECOND + 1..SECOND + OPEN_MAX {
        fixture.is(zone, ImplicitOpen);
    }
}

/// Closes `count` zones with data, from the first sequential one on.
fn close_many(fixture: &Fixture, count: u32) {
    for zone in FIRST..FIRST + count {
        fixture.begin_closed(zone);
    }
}

/// OPEN ALL with `closed` closed zones.
fn open_all(fixture: &Fixture, closed: u32) {
    close_many(fixture, closed);
    let (wanted, cond) = match closed > OPEN_MAX {
        true => (refused(Sense::INSUFFICIENT_ZONE_RESOURCES), Closed),
        false => (Ok(()), ExplicitOpen),
    };
    assert_eq!(fixture.zones(Open, 0, true), wanted);
    for zone in FIRST..FIRST + closed {
        fixture.is(zone, cond);
    }
}

fn closed_then(fixture: &Fixture, open: u32, action: ZoneAction) {
    fixture.begin_closed(FIRST);
    with_open(fixture, open, || fixture.act(action, FIRST));
}

fn write_closed(fixture: &Fixture, open: u32) {
    fixture.begin_closed(FIRST);
    with_open(fixture, open, || {
        fixture.write(fixture.start(FIRST) + fixture.physical(), fixture.physical())
    });
}

fn write_empty(fixture: &Fixture, open: u32) {
    with_open(fixture, open, || fixture.write(fixture.start(FIRST), fixture.physical()));
}

const AT: u32 = OPEN_MAX;
const BELOW: u32 = OPEN_MAX - 1;

const fn case(number: &'static str, about: &'static str, run: fn(&Fixture)) -> Case {
    Case { number, about, run }
}

pub(crate) const CASES: &[Case] = &[
    case("010", "REPORT ZONES, block out of range", |fixture| {
        for lba in [fixture.blocks(), fixture.blocks() + 1, u64::MAX] {
            let answer = fixture.report(lba, 0, false).map(drop);
            assert_eq!(answer, refused(Sense::LBA_OUT_OF_RANGE));
        }
    }),
    case("011", "REPORT ZONES, an option that there is not", |fixture| {
        let known: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 0x10, 0x11, 0x3e, 0x3f];
        for option in 0..0x40 {
            let wanted = match known.contains(&option) {
                true => Ok(()),
                false => refused(Sense::INVALID_FIELD_IN_CDB),
            };
            assert_eq!(fixture.report(0, option, false).map(drop), wanted, "{option:#x}");
        }
    }),
    case("020", "OPEN ZONE, zone ID inside a zone", |fixture| not_a_start(fixture, Open)),
    case("021", "OPEN ZONE of an EMPTY zone at the open limit", |fixture| {
        with_open(fixture, AT, || fixture.open(FIRST));
    }),
    case("022", "OPEN ALL with one CLOSED zone more than may be open", |fixture| {
        open_all(fixture, OPEN_MAX + 1);
    }),
    case("023", "OPEN ZONE of a conventional zone", |fixture| conventional(fixture, Open)),
    case("024", "OPEN ZONE at the end of the medium", |fixture| at_the_end(fixture, Open)),
    case("025", "OPEN ALL ignores a zone ID beyond the end", |fixture| {
        all_ignores(fixture, Open, fixture.blocks() + 1);
    }),
    case("026", "OPEN ALL ignores the ID of a conventional zone", |fixture| {
        all_ignores(fixture, Open, 0)
    }),
    case("030", "CLOSE ZONE, zone ID inside a zone", |fixture| not_a_start(fixture, Close)),
    case("031", "CLOSE ZONE of a conventional zone", |fixture| conventional(fixture, Close)),
    case("032", "CLOSE ZONE at the end of the medium", |fixture| at_the_end(fixture, Close)),
    case("033", "CLOSE ALL ignores a zone ID beyond the end", |fixture| {
        all_ignores(fixture, Close, fixture.blocks() + 1);
    }),
    case("034", "CLOSE ALL ignores the ID of a conventional zone", |fixture| {
        all_ignores(fixture, Close, 0)
    }),
    case("040", "FINISH ZONE, zone ID inside a zone", |fixture| not_a_start(fixture, Finish)),
    case("041", "FINISH ZONE of a conventional zone", |fixture| conventional(fixture, Finish)),
    case("042", "FINISH ZONE at the end of the medium", |fixture| at_the_end(fixture, Finish)),
    case("043", "FINISH ALL ignores a zone ID beyond the end", |fixture| {
        all_ignores(fixture, Finish, fixture.blocks() + 1);
    }),
    case("044", "FINISH ALL ignores the ID of a conventional zone", |fixture| {
        all_ignores(fixture, Finish, 0);
    }),
    case("050", "RESET WRITE POINTER, zone ID inside a zone", |fixture| {
        not_a_start(fixture, Reset)
    }),
    case("051", "RESET WRITE POINTER of a conventional zone", |fixture| {
        conventional(fixture, Reset)
    }),
    case("052", "RESET WRITE POINTER at the end of the medium", |fixture| {
        at_the_end(fixture, Reset)
    }),
    case("053", "RESET ALL ignores a zone ID beyond the end", |fixture| {
        all_ignores(fixture, Reset, fixture.blocks() + 1);
    }),
    case("054", "RESET ALL ignores the ID of a conventional zone", |fixture| {
        all_ignores(fixture, Reset, 0)
    }),
    case("060", "READ across the write pointer", |fixture| {
        fixture.begin(FIRST);
        let start = fixture.start(FIRST);
        assert_eq!(fixture.read(start, fixture.physical()), Ok(()));
        restricted_read(fixture, start, fixture.physical() + 1, Sense::READ_INVALID_DATA);
    }),
    case("061", "READ from a FULL zone to below the write pointer of an open one", |fixture| {
        fill(fixture, FIRST);
        fixture.begin(SECOND);
        restricted_read(fixture, fixture.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("063", "READ from a FULL zone to a FULL one", |fixture| {
        fill(fixture, FIRST);
        fill(fixture, SECOND);
        restricted_read(fixture, fixture.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("064", "READ above the write pointer", |fixture| {
        fixture.begin(FIRST);
        let start = fixture.start(FIRST);
        restricted_read(fixture, start + fixture.physical(), 1, Sense::READ_INVALID_DATA);
        restricted_read(fixture, fixture.start(SECOND), 1, Sense::READ_INVALID_DATA);
    }),
    case("065", "READ over conventional zones: allowed, but not to a sequential one", |fixture| {
        assert_eq!(fixture.read(fixture.start(1) - 1, 2), Ok(()));
        let answer = fixture.read(fixture.start(FIRST) - 1, 2);
        assert_eq!(answer, refused(Sense::READ_BOUNDARY_VIOLATION));
    }),
    case("070", "WRITE above the write pointer", |fixture| {
        fixture.begin(FIRST);
        let at = fixture.start(FIRST) + 2 * fixture.physical();
        refused_write(fixture, at, fixture.physical(), Sense::UNALIGNED_WRITE);
    }),
    case("071", "WRITE from the write pointer of an open zone to an EMPTY one", |fixture| {
        fill_but_one(fixture, FIRST);
        write_over_end(fixture, fixture.physical());
    }),
    case("072", "WRITE over conventional zones: allowed, but not to a sequential one", |fixture| {
        assert_eq!(fixture.write(fixture.start(1) - 1, 2), Ok(()));
        refused_write(fixture, fixture.start(FIRST) - 1, 2, Sense::WRITE_BOUNDARY_VIOLATION);
    }),
    case("073", "WRITE to a FULL zone", |fixture| {
        fill(fixture, FIRST);
        refused_write(
            fixture,
            fixture.start(FIRST),
            fixture.physical(),
            Sense::INVALID_FIELD_IN_CDB,
        );
    }),
    case("074", "WRITE to a FULL zone that was finished", |fixture| {
        fixture.begin(FIRST);
        assert_eq!(fixture.finish(FIRST), Ok(()));
        let at = fixture.start(FIRST) + fixture.physical();
        refused_write(fixture, at, fixture.physical(), Sense::INVALID_FIELD_IN_CDB);
    }),
    case("075", "WRITE that ends inside of a physical block", |fixture| {
        for count in 1..fixture.physical() {
            refused_write(fixture, fixture.start(FIRST), count, Sense::UNALIGNED_WRITE);
        }
    }),
    case("076", "WRITE below the write pointer", |fixture| {
        fixture.begin(FIRST);
        refused_write(fixture, fixture.start(FIRST), fixture.physical(), Sense::UNALIGNED_WRITE);
    }),
    case("077", "WRITE across the write pointer", |fixture| {
        fixture.begin(FIRST);
        refused_write(
            fixture,
            fixture.start(FIRST),
            2 * fixture.physical(),
            Sense::UNALIGNED_WRITE,
        );
    }),
    case("080", "READ from a FULL zone to above the write pointer of an open one", |fixture| {
        fill(fixture, FIRST);
        fixture.begin(SECOND);
        let count = fixture.physical() + 2;
        restricted_read(fixture, fixture.start(SECOND) - 1, count, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("081", "READ from a FULL zone to an EMPTY one", |fixture| {
        fill(fixture, FIRST);
        restricted_read(fixture, fixture.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("082", "READ from below the write pointer of an open zone to a FULL one", |fixture| {
        fill_but_one(fixture, FIRST);
        fill(fixture, SECOND);
        let at = fixture.start(SECOND) - fixture.physical() - 1;
        restricted_read(fixture, at, fixture.physical() + 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("083", "READ from above the write pointer of an open zone to a FULL one", |fixture| {
        fixture.begin(FIRST);
        fill(fixture, SECOND);
        restricted_read(fixture, fixture.start(SECOND) - 1, 2, Sense::READ_BOUNDARY_VIOLATION);
    }),
    case("090", "WRITE from a FULL zone to above the write pointer of an open one", |fixture| {
        fill(fixture, FIRST);
        fixture.begin(SECOND);
        let count = fixture.physical() * 3;
        let at = fixture.start(SECOND) - fixture.physical();
        refused_write(fixture, at, count, Sense::WRITE_BOUNDARY_VIOLATION);
    }),
    case("091", "WRITE from a FULL zone to below the write pointer of an open one", |fixture| {
        fill(fixture, FIRST);
        fixture.begin(SECOND);
        write_over_end(fixture, fixture.physical());
    }),
    case("092", "WRITE from below the write pointer of an open zone to a FULL one", |fixture| {
        fill_but_one(fixture, FIRST);
        fill(fixture, SECOND);
        write_over_end(fixture, 2 * fixture.physical());
    }),
    case("093", "WRITE from above the write pointer of an open zone to a FULL one", |fixture| {
        fixture.begin(FIRST);
        fill(fixture, SECOND);
        write_over_end(fixture, fixture.physical());
    }),
    case("094", "WRITE from the write pointer of an open zone to a FULL one", |fixture| {
        fill_but_one(fixture, FIRST);
        fill(fixture, SECOND);
        write_over_end(fixture, fixture.physical());
    }),
    case("095", "WRITE from a FULL zone to an EMPTY one", |fixture| {
        fill(fixture, FIRST);
        write_over_end(fixture, fixture.physical());
    }),
    case("096", "WRITE from an EMPTY zone to an EMPTY one", |fixture| {
        write_over_end(fixture, fixture.physical());
        write_over_end(fixture, fixture.len());
    }),
    case("120", "OPEN ZONE of a CLOSED zone at the open limit", |fixture| {
        closed_then(fixture, AT, Open)
    }),
    case("121", "OPEN ZONE of an EMPTY zone after an open one got FULL", |fixture| {
        fixture.open_many(SECOND, OPEN_MAX);
        fill(fixture, SECOND);
        assert_eq!(fixture.open(FIRST), Ok(()));
    }),
    case("122", "OPEN ZONE of an EMPTY zone, one below the open limit", |fixture| {
        with_open(fixture, BELOW, || fixture.open(FIRST));
    }),
    case("123", "OPEN ALL with as many CLOSED zones as may be open", |fixture| {
        open_all(fixture, OPEN_MAX)
    }),
    case("124", "OPEN ZONE of a CLOSED zone, one below the open limit", |fixture| {
        closed_then(fixture, BELOW, Open);
    }),
    case("127", "OPEN ALL leaves EMPTY zones alone, whatever the zone ID", |fixture| {
        assert_eq!(fixture.zones(Open, fixture.blocks() + 1, true), Ok(()));
        fixture.is(FIRST, Empty);
    }),
    case(
        "128",
        "WRITE opens more zones implicitly than may be open, one after the other",
        |fixture| {
            for zone in FIRST..FIRST + 2 * OPEN_MAX {
                fixture.begin(zone);
            }
            for zone in FIRST..FIRST + 2 * OPEN_MAX {
                fixture.is(zone, if zone < FIRST + OPEN_MAX { Closed } else { ImplicitOpen });
            }
        },
    ),
    case("129", "OPEN ZONE closes an implicitly open zone to make room", |fixture| {
        fill_implicitly(fixture);
        assert_eq!(fixture.open(FIRST), Ok(()));
        oldest_has_closed(fixture);
    }),
    case("140", "FINISH ZONE of a CLOSED zone at the open limit", |fixture| {
        closed_then(fixture, AT, Finish)
    }),
    case("141", "FINISH ZONE of an EMPTY zone at the open limit", |fixture| {
        with_open(fixture, AT, || fixture.finish(FIRST));
    }),
    case("142", "FINISH ZONE closes an implicitly open zone to make room", |fixture| {
        fill_implicitly(fixture);
        assert_eq!(fixture.finish(FIRST), Ok(()));
        fixture.is(FIRST, Full);
        oldest_has_closed(fixture);
    }),
    case("144", "FINISH ZONE of an EMPTY zone, one below the open limit", |fixture| {
        with_open(fixture, BELOW, || fixture.finish(FIRST));
    }),
    case("145", "FINISH ZONE of a CLOSED zone, one below the open limit", |fixture| {
        closed_then(fixture, BELOW, Finish);
    }),
    case("148", "FINISH ALL at the open limit, with a CLOSED zone", |fixture| {
        fixture.begin_closed(FIRST);
        fixture.open_many(SECOND, OPEN_MAX);
        assert_eq!(fixture.zones(Finish, 0, true), Ok(()));
        for zone in FIRST..=SECOND + BELOW {
            fixture.is(zone, Full);
        }
    }),
    case("149", "FINISH ALL with one CLOSED zone more than may be open", |fixture| {
        close_many(fixture, OPEN_MAX + 1);
        assert_eq!(fixture.zones(Finish, 0, true), Ok(()));
        for zone in FIRST..=FIRST + OPEN_MAX {
            fixture.is(zone, Full);
        }
    }),
    case("170", "WRITE to a CLOSED zone at the open limit", |fixture| write_closed(fixture, AT)),
    case("171", "WRITE to an EMPTY zone at the open limit", |fixture| write_empty(fixture, AT)),
    case("172", "WRITE to a CLOSED zone, one below the open limit", |fixture| {
        write_closed(fixture, BELOW)
    }),
    case("173", "WRITE to an EMPTY zone, one below the open limit", |fixture| {
        write_empty(fixture, BELOW)
    }),
    case("176", "WRITE closes an implicitly open zone to make room", |fixture| {
        fill_implicitly(fixture);
        fixture.begin(FIRST);
        fixture.is(FIRST, ImplicitOpen);
        oldest_has_closed(fixture);
    }),
    case("179", "WRITE to a conventional zone at the open limit", |fixture| {
        fixture.open_many(SECOND, OPEN_MAX);
        assert_eq!(fixture.write(fixture.start(0), fixture.physical()), Ok(()));
    }),
];
