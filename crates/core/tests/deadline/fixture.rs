//! A fixture that drives the scheduler by text and returns text.
//!
//! A request is written `[rt:|idle:]OP SECTOR [+SECTORS]` without spaces. The operation is `r`,
//! `w`, `d` (discard) or `f` (flush), and the default length is 8 sectors: `r64`, `rt:w8+16`. A
//! trailing `!` forbids merging.

use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{
    CLASSES, Deadline, DeadlineConfig, Direction, Item, Kind, Tunable, Tunables,
};
use blockyard_core::{Limits, Nanos, Op, Prio, Sector, ZoneGeometry};

/// Default length of a request, in sectors.
const SECTORS: u64 = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    op: Op,
    prio: Prio,
    sector: u64,
    sectors: u64,
    segments: u16,
    alone: bool,
}

impl Item for Piece {
    fn kind(&self) -> Kind {
        Kind::of(self.op, self.prio)
    }

    fn sector(&self) -> Sector {
        Sector(self.sector)
    }

    fn sectors(&self) -> u64 {
        self.sectors
    }

    fn keeps_zone_order(&self) -> bool {
        self.op == Op::Write
    }

    fn joins(&self, next: &Piece, rules: MergeRules) -> bool {
        assert_eq!(self.sector + self.sectors, next.sector, "asked for what does not touch");
        assert_eq!(self.prio, next.prio, "asked across classes");
        let range = Sector(self.sector)..Sector(next.sector + next.sectors);
        self.op == next.op
            && !(self.alone || next.alone)
            && rules.fits(self.op, range, self.segments + next.segments)
    }

    fn merge_back(&mut self, next: Piece) {
        self.sectors += next.sectors;
        self.segments += next.segments;
    }
}

/// Parses a request.
pub(crate) fn read_one(word: &str) -> Piece {
    let (prio, rest) = match word.split_once(':') {
        Some(("rt", rest)) => (Prio::RealTime, rest),
        Some(("idle", rest)) => (Prio::Idle, rest),
        Some(_) => panic!("no class in `{word}`"),
        None => (Prio::BestEffort, word),
    };
    let (op, rest) = match rest.split_at(1) {
        ("r", rest) => (Op::Read, rest),
        ("w", rest) => (Op::Write, rest),
        ("d", rest) => (Op::Discard, rest),
        ("f", rest) => (Op::Flush, rest),
        _ => panic!("no operation in `{word}`"),
    };
    let (rest, alone) = rest.strip_suffix('!').map_or((rest, false), |rest| (rest, true));
    let (sector, sectors) = rest.split_once('+').unwrap_or((rest, "8"));
    let (sector, sectors) = (sector.parse().unwrap(), sectors.parse().unwrap());
    Piece { op, prio, sector, sectors, segments: 1, alone }
}

fn write_one(piece: &Piece) -> String {
    let prio = if piece.prio == Prio::BestEffort { "" } else { piece.prio.name() };
    let colon = if prio.is_empty() { "" } else { ":" };
    let op = &piece.op.name()[..1];
    let alone = if piece.alone { "!" } else { "" };
    match piece.sectors {
        SECTORS => format!("{prio}{colon}{op}{}{alone}", piece.sector),
        sectors => format!("{prio}{colon}{op}{}+{sectors}{alone}", piece.sector),
    }
}

/// Formats several requests, separated by spaces.
pub(crate) fn words<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> String {
    pieces.into_iter().map(write_one).collect::<Vec<_>>().join(" ")
}

/// A scheduler and a manual clock.
pub(crate) struct Fixture {
    pub(crate) order: Deadline<Piece>,
    /// The time, in milliseconds.
    now: u64,
}

pub(crate) const CAPACITY: usize = 64;
pub(crate) const IN_FLIGHT_MAX: usize = 16;

impl Fixture {
    /// A fixture with Linux's defaults, except for these tunables.
    pub(crate) fn new(tuned: &[(Tunable, i64)]) -> Fixture {
        Fixture::of(tuned, &Limits::unlimited(16), None)
    }

    /// A fixture for a device of this shape.
    pub(crate) fn of(
        tuned: &[(Tunable, i64)],
        limits: &Limits,
        zones: Option<ZoneGeometry>,
    ) -> Fixture {
        let mut tunables = Tunables::new(CAPACITY as u32);
        for (tunable, value) in tuned {
            tunables.set(*tunable, *value).unwrap();
        }
        let order = Deadline::new(DeadlineConfig {
            capacity: CAPACITY,
            in_flight_max: IN_FLIGHT_MAX,
            rules: MergeRules::new(limits),
            zones,
            tunables,
        });
        Fixture { order, now: 1_000_000 }
    }

    fn nanos(&self) -> Nanos {
        Nanos(self.now * 1_000_000)
    }

    pub(crate) fn tune(&mut self, tunable: Tunable, value: i64) {
        let mut tunables = *self.order.tunables();
        tunables.set(tunable, value).unwrap();
        self.order.set(tunables);
    }

    /// Advances the clock by `ms` milliseconds.
    pub(crate) fn wait(&mut self, ms: u64) -> &mut Fixture {
        self.now += ms;
        self
    }

    /// Inserts requests; fails the test if one is refused.
    pub(crate) fn insert(&mut self, text: &str) -> &mut Fixture {
        assert_eq!(self.try_insert(text), "", "refused");
        self
    }

    /// Inserts requests; returns the refused ones.
    pub(crate) fn try_insert(&mut self, text: &str) -> String {
        self.try_insert_after("", text)
    }

    /// Inserts requests while those in `waits`, which were refused before, still wait and come
    /// first.
    pub(crate) fn try_insert_after(&mut self, waits: &str, text: &str) -> String {
        let mut refused: Vec<_> = waits.split_whitespace().map(read_one).collect();
        let now = self.nanos();
        self.order.insert_batch(text.split_whitespace().map(read_one), now, &mut refused);
        words(&refused)
    }

    /// Inserts requests at the head, one after the other.
    pub(crate) fn insert_at_head(&mut self, text: &str) -> &mut Fixture {
        for word in text.split_whitespace() {
            self.order.insert_at_head(read_one(word), self.nanos()).expect("there is room");
        }
        self
    }

    pub(crate) fn requeue(&mut self, text: &str) -> &mut Fixture {
        for word in text.split_whitespace() {
            self.order.requeue(read_one(word), self.nanos());
        }
        self
    }

    /// Dispatches `count` requests, or fewer if the scheduler returns none.
    pub(crate) fn take(&mut self, count: usize) -> String {
        let mut taken = Vec::new();
        let now = self.nanos();
        let returned = self.order.next_batch(count, now, |piece| taken.push(piece));
        assert_eq!(returned, taken.len());
        words(&taken)
    }

    /// Dispatches all requests that the scheduler returns, and completes each before the next.
    pub(crate) fn run(&mut self) -> String {
        let mut taken = Vec::new();
        while let Some(piece) = self.order.next(self.nanos()) {
            self.order.completed(piece.kind());
            taken.push(piece);
        }
        words(&taken)
    }

    pub(crate) fn complete(&mut self, text: &str) -> &mut Fixture {
        for word in text.split_whitespace() {
            self.order.completed(read_one(word).kind());
        }
        self
    }

    /// The waiting requests in sector order, class by class, reads first.
    pub(crate) fn sorted(&self) -> String {
        let rows = CLASSES.into_iter().flat_map(|prio| Direction::ALL.map(|way| (prio, way)));
        let parts = rows.map(|(prio, way)| words(self.order.sorted(prio, way)));
        parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }
}
