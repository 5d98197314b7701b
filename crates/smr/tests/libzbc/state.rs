//! Section 02, the state machine: WRITE, and OPEN, CLOSE, FINISH and RESET of a zone in each
//! condition, of one zone and with ALL.

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::ZoneAction;
use blockyard_smr::sense::Sense;

use ZoneAction::{Close, Finish, Open, Reset};
use ZoneCond::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen};

use crate::fixture::{Case, FIRST, Fixture, refused};

/// An initial condition and how to reach it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Begin {
    Empty,
    ImplicitlyOpen,
    EmptyThenOpened,
    ImplicitlyThenExplicitlyOpen,
    Closed,
    Full,
}

/// The four actions on a zone in a condition, with their numbers in the suite.
pub(crate) struct Actions {
    pub(crate) first_number: u32,
    pub(crate) begin: Begin,
    pub(crate) all: bool,
    /// Conditions after OPEN, CLOSE, FINISH and RESET.
    pub(crate) after: [ZoneCond; 4],
}

const fn actions(first_number: u32, begin: Begin, all: bool, after: [ZoneCond; 4]) -> Actions {
    Actions { first_number, begin, all, after }
}

pub(crate) const ACTIONS: &[Actions] = &[
    actions(1, Begin::Empty, false, [ExplicitOpen, Empty, Full, Empty]),
    actions(5, Begin::ImplicitlyOpen, false, [ExplicitOpen, Closed, Full, Empty]),
    actions(9, Begin::EmptyThenOpened, false, [ExplicitOpen, Empty, Full, Empty]),
    actions(13, Begin::ImplicitlyThenExplicitlyOpen, false, [ExplicitOpen, Closed, Full, Empty]),
    actions(17, Begin::Closed, false, [ExplicitOpen, Closed, Full, Empty]),
    actions(21, Begin::Full, false, [Full, Full, Full, Empty]),
    actions(25, Begin::Empty, true, [Empty, Empty, Empty, Empty]),
    actions(29, Begin::ImplicitlyOpen, true, [ImplicitOpen, Closed, Full, Empty]),
    actions(33, Begin::EmptyThenOpened, true, [ExplicitOpen, Empty, Full, Empty]),
    actions(37, Begin::ImplicitlyThenExplicitlyOpen, true, [ExplicitOpen, Closed, Full, Empty]),
    actions(41, Begin::Closed, true, [ExplicitOpen, Closed, Full, Empty]),
    actions(45, Begin::Full, true, [Full, Full, Full, Empty]),
];

impl Actions {
    pub(crate) fn run(&self, fixture: impl Fn() -> Fixture) {
        for (action, after) in [Open, Close, Finish, Reset].into_iter().zip(self.after) {
            let fixture = fixture();
            let number = self.first_number + action_index(action);
            let written = self.begin.bring(&fixture);
            match self.all {
                false => assert_eq!(fixture.act(action, FIRST), Ok(()), "02.{number:03}"),
                // With ALL the zone ID is ignored.
                true => assert_eq!(fixture.zones(action, 7, true), Ok(()), "02.{number:03}"),
            }
            let wp = match after {
                Empty => Some(0),
                Full => None,
                _ => Some(written),
            };
            let what = format!("02.{number:03}: {action:?} after {:?}", self.begin);
            assert_eq!(fixture.state(FIRST), (after, wp), "{what}");
            // No other zone has changed.
            for zone in FIRST + 1..FIRST + 4 {
                assert_eq!(fixture.state(zone), (Empty, Some(0)), "{what}");
            }
        }
    }

    /// The numbers of the cases.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = String> {
        (self.first_number..self.first_number + 4).map(|number| format!("{number:03}"))
    }
}

fn action_index(action: ZoneAction) -> u32 {
    match action {
        Open => 0,
        Close => 1,
        Finish => 2,
        Reset => 3,
    }
}

impl Begin {
    /// Brings the first sequential zone into the condition; returns the number of written blocks.
    fn bring(self, fixture: &Fixture) -> u64 {
        match self {
            Begin::Empty => return 0,
            Begin::EmptyThenOpened => {
                assert_eq!(fixture.open(FIRST), Ok(()));
                return 0;
            }
            Begin::ImplicitlyOpen => fixture.begin(FIRST),
            Begin::ImplicitlyThenExplicitlyOpen => {
                fixture.begin(FIRST);
                assert_eq!(fixture.open(FIRST), Ok(()));
            }
            Begin::Closed => fixture.begin_closed(FIRST),
            Begin::Full => assert_eq!(fixture.write(fixture.start(FIRST), fixture.len()), Ok(())),
        }
        fixture.physical()
    }
}

/// Writes the rest of the first sequential zone, of which a physical block is written.
fn write_rest(fixture: &Fixture) {
    let written = fixture.physical();
    assert_eq!(fixture.write(fixture.start(FIRST) + written, fixture.len() - written), Ok(()));
}

fn write_more(fixture: &Fixture, cond: ZoneCond) {
    assert_eq!(
        fixture.write(fixture.start(FIRST) + fixture.physical(), fixture.physical()),
        Ok(())
    );
    assert_eq!(fixture.state(FIRST), (cond, Some(2 * fixture.physical())));
}

pub(crate) const WRITES: &[Case] = &[
    Case {
        number: "070",
        about: "WRITE, EMPTY to implicitly open",
        run: |fixture| {
            fixture.begin(FIRST);
            fixture.is(FIRST, ImplicitOpen);
        },
    },
    Case {
        number: "071",
        about: "WRITE below the write pointer changes nothing",
        run: |fixture| {
            fixture.begin(FIRST);
            let answer = fixture.write(fixture.start(FIRST), fixture.physical());
            assert_eq!(answer, refused(Sense::UNALIGNED_WRITE));
            fixture.is(FIRST, ImplicitOpen);
        },
    },
    Case {
        number: "072",
        about: "WRITE, stays implicitly open",
        run: |fixture| {
            fixture.begin(FIRST);
            write_more(fixture, ImplicitOpen);
        },
    },
    Case {
        number: "073",
        about: "WRITE, implicitly open to FULL",
        run: |fixture| {
            fixture.begin(FIRST);
            write_rest(fixture);
            fixture.is(FIRST, Full);
        },
    },
    Case {
        number: "074",
        about: "WRITE, CLOSED to implicitly open",
        run: |fixture| {
            fixture.begin_closed(FIRST);
            write_more(fixture, ImplicitOpen);
        },
    },
    Case {
        number: "075",
        about: "WRITE, CLOSED to FULL",
        run: |fixture| {
            fixture.begin_closed(FIRST);
            write_rest(fixture);
            fixture.is(FIRST, Full);
        },
    },
    Case {
        number: "076",
        about: "WRITE, stays explicitly open",
        run: |fixture| {
            fixture.begin(FIRST);
            assert_eq!(fixture.open(FIRST), Ok(()));
            write_more(fixture, ExplicitOpen);
        },
    },
    Case {
        number: "077",
        about: "WRITE, explicitly open to FULL",
        run: |fixture| {
            fixture.begin(FIRST);
            assert_eq!(fixture.open(FIRST), Ok(()));
            write_rest(fixture);
            fixture.is(FIRST, Full);
        },
    },
    Case {
        number: "078",
        about: "WRITE, FULL stays so",
        run: |fixture| {
            assert_eq!(fixture.finish(FIRST), Ok(()));
            let answer = fixture.write(fixture.start(FIRST), fixture.physical());
            assert_eq!(answer, refused(Sense::INVALID_FIELD_IN_CDB));
            fixture.is(FIRST, Full);
        },
    },
];
