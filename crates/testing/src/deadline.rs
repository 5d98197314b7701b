//! A slow and simple model of the scheduler `deadline`: one list of requests, searched completely
//! for each decision. The real scheduler must make the decisions of this model.
//!
//! ```text
//! decision: at the head? ▸ aged, if two classes are queued? ▸ rt, be, idle until one is queued
//! in a class: the batch goes on? ▸ else a direction ▸ expired or nothing ahead? the oldest : ahead
//! ```

mod lockstep;

use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{
    CLASSES, Counters, DeadlineConfig, Direction, Item, Kind, Tunable, Tunables,
};
use blockyard_core::{Nanos, Op, Prio, Sector, ZoneGeometry};

pub use lockstep::{Lockstep, TestStep};

/// A request of one or several bios, each identified by a number: it records the bios from which it
/// was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPiece {
    /// The operation.
    pub op: Op,
    /// The priority class.
    pub prio: Prio,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// Whether the request may merge.
    pub merges: bool,
    /// The numbers of its bios, in the order of their sectors.
    pub bios: Vec<u32>,
}

impl Item for RequestPiece {
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

    fn joins(&self, next: &RequestPiece, rules: MergeRules) -> bool {
        assert_eq!(self.sector + self.sectors, next.sector, "asked for what does not touch");
        assert_eq!(self.kind(), next.kind(), "asked across classes or directions");
        let range = Sector(self.sector)..Sector(next.sector + next.sectors);
        let segments = self.bios.len() + next.bios.len();
        self.op == next.op
            && self.merges
            && next.merges
            && rules.fits(self.op, range, segments as u16)
    }

    fn merge_back(&mut self, next: RequestPiece) {
        self.sectors += next.sectors;
        self.bios.extend(next.bios);
    }
}

/// A request that waits.
#[derive(Clone, Debug)]
struct WaitingRequest {
    piece: RequestPiece,
    deadline: u64,
    /// When the request got its sector, as a count: requests of equal sectors are in this order.
    placed: u64,
    /// When the request was inserted, as a count.
    inserted: u64,
}

impl WaitingRequest {
    fn end(&self) -> u64 {
        self.piece.sector + self.piece.sectors
    }
}

/// The model: all requests that wait, and the state of the scheduler.
#[derive(Clone, Debug)]
pub struct SlowDeadline {
    config: DeadlineConfig,
    /// Waiting requests in the order of their FIFOs, all classes and directions together.
    fifo: Vec<WaitingRequest>,
    /// Requests at the head; the last one is dispatched first.
    at_head: Vec<RequestPiece>,
    latest: [[u64; 2]; 3],
    counters: [[Counters; 2]; 3],
    last_direction: Direction,
    batching: u32,
    starved: u32,
    count: u64,
}

impl SlowDeadline {
    /// A model without requests.
    pub fn new(config: DeadlineConfig) -> SlowDeadline {
        SlowDeadline {
            config,
            fifo: Vec::new(),
            at_head: Vec::new(),
            latest: [[0; 2]; 3],
            counters: [[Counters::default(); 2]; 3],
            last_direction: Direction::Write,
            batching: 0,
            starved: 0,
            count: 0,
        }
    }

    /// Changes the tunables.
    pub fn set(&mut self, tunables: Tunables) {
        self.config.tunables = tunables;
    }

    /// Counters of the requests of a class and direction.
    pub fn counters(&self, prio: Prio, direction: Direction) -> &Counters {
        &self.counters[prio as usize][direction as usize]
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.fifo.len() + self.at_head.len()
    }

    fn count(&mut self, kind: Kind) -> &mut Counters {
        &mut self.counters[kind.prio as usize][kind.direction as usize]
    }

    fn tunable(&self, tunable: Tunable) -> u32 {
        self.config.tunables.get(tunable) as u32
    }

    fn expire(&self, direction: Direction) -> u64 {
        let tunables = [Tunable::ReadExpire, Tunable::WriteExpire];
        u64::from(self.tunable(tunables[direction as usize])) * 1_000_000
    }

    /// The sequential zone in which a request must keep the order of writes.
    fn zone(&self, piece: &RequestPiece) -> Option<u64> {
        let ZoneGeometry { zone_sectors, conventional_count, .. } = self.config.zones.as_ref()?;
        let zone = piece.sector / zone_sectors;
        (piece.keeps_zone_order() && zone >= u64::from(*conventional_count)).then_some(zone)
    }

    fn has_room(&self) -> bool {
        self.waiting() < self.config.capacity
    }

    /// Whether a new request of this kind is accepted.
    pub fn admits(&self, kind: Kind) -> bool {
        let writes = CLASSES.map(|prio| self.counters(prio, Direction::Write).queued());
        let depth = u64::from(self.tunable(Tunable::AsyncDepth));
        let is_bound = kind.direction == Direction::Write && depth < self.config.capacity as u64;
        self.has_room() && !(is_bound && writes.iter().sum::<u64>() >= depth)
    }

    /// Inserts a request, and merges it if possible.
    ///
    /// # Errors
    /// The request itself if there is no room for it and nothing to merge it with.
    pub fn insert(&mut self, piece: RequestPiece, now: Nanos) -> Result<(), RequestPiece> {
        let (kind, rules) = (piece.kind(), self.config.rules);
        let merged = match self.zone(&piece) {
            Some(zone) => self.merge_in_zone(zone, &piece, rules),
            None => self.merge(&piece, rules),
        };
        if merged {
            self.count(kind).inserted += 1;
            self.count(kind).merged += 1;
            return Ok(());
        }
        if !self.admits(kind) {
            return Err(piece);
        }
        self.count(kind).inserted += 1;
        self.count += 1;
        let deadline = now.0 + self.expire(kind.direction);
        let (placed, inserted) = (self.count, self.count);
        self.fifo.push(WaitingRequest { piece, deadline, placed, inserted });
        Ok(())
    }

    fn merge_in_zone(&mut self, zone: u64, piece: &RequestPiece, rules: MergeRules) -> bool {
        let of_zone =
            (0..self.fifo.len()).filter(|at| self.zone(&self.fifo[*at].piece) == Some(zone));
        let Some(last) = of_zone.max_by_key(|at| self.fifo[*at].inserted) else { return false };
        let last = &mut self.fifo[last];
        let merges = last.end() == piece.sector
            && last.piece.kind() == piece.kind()
            && last.piece.joins(piece, rules);
        if merges {
            last.piece.merge_back(piece.clone());
        }
        merges
    }

    /// Merges with the request before it, and then with the one after both; or only with the one
    /// after it.
    fn merge(&mut self, piece: &RequestPiece, rules: MergeRules) -> bool {
        let kind = piece.kind();
        let row = self.sorted(kind.prio, kind.direction);
        let before = row.iter().copied().rfind(|at| self.fifo[*at].piece.sector <= piece.sector);
        let after = row.iter().copied().find(|at| self.fifo[*at].piece.sector > piece.sector);
        let free = |model: &SlowDeadline, at: usize| model.zone(&model.fifo[at].piece).is_none();
        if let Some(before) = before
            && self.fifo[before].end() == piece.sector
            && free(self, before)
            && self.fifo[before].piece.joins(piece, rules)
        {
            self.fifo[before].piece.merge_back(piece.clone());
            if let Some(after) = after
                && self.fifo[before].end() == self.fifo[after].piece.sector
                && free(self, after)
                && self.fifo[before].piece.joins(&self.fifo[after].piece, rules)
            {
                self.join(before, after);
            }
            return true;
        }
        if self.tunable(Tunable::FrontMerges) == 1
            && let Some(after) = after
            && piece.sector + piece.sectors == self.fifo[after].piece.sector
            && free(self, after)
            && piece.joins(&self.fifo[after].piece, rules)
        {
            self.count += 1;
            self.fifo[after].placed = self.count;
            self.fifo[after].piece.merge_front(piece.clone());
            return true;
        }
        false
    }

    /// Merges two waiting requests into one, with the earlier deadline and its place in the FIFO.
    fn join(&mut self, before: usize, after: usize) {
        let next = self.fifo[after].clone();
        self.count(next.piece.kind()).merged += 1;
        let mut joined = self.fifo[before].clone();
        joined.piece.merge_back(next.piece);
        if next.deadline < joined.deadline {
            joined.deadline = next.deadline;
            self.fifo[after] = joined;
            self.fifo.remove(before);
        } else {
            self.fifo[before] = joined;
            self.fifo.remove(after);
        }
    }

    /// Inserts a request before all others.
    ///
    /// # Errors
    /// The request itself if there is no room for it.
    pub fn insert_at_head(&mut self, piece: RequestPiece) -> Result<(), RequestPiece> {
        if !self.has_room() {
            return Err(piece);
        }
        self.count(piece.kind()).inserted += 1;
        self.at_head.push(piece);
        Ok(())
    }

    /// Takes back a request that the device did not start.
    pub fn requeue(&mut self, piece: RequestPiece) {
        self.count(piece.kind()).requeued += 1;
        self.at_head.push(piece);
    }

    /// Counts a request as completed.
    pub fn completed(&mut self, kind: Kind) {
        self.count(kind).completed += 1;
    }

    /// Indexes of the requests of a class and direction, in sorted order.
    fn sorted(&self, prio: Prio, direction: Direction) -> Vec<usize> {
        let mut row: Vec<usize> = (0..self.fifo.len())
            .filter(|at| self.fifo[*at].piece.kind() == Kind { prio, direction })
            .collect();
        row.sort_by_key(|at| (self.fifo[*at].piece.sector, self.fifo[*at].placed));
        row
    }

    fn queued(&self, prio: Prio) -> u64 {
        Direction::ALL.iter().map(|direction| self.counters(prio, *direction).queued()).sum()
    }

    /// Takes the request that is to be dispatched next.
    pub fn next(&mut self, now: Nanos) -> Option<RequestPiece> {
        if let Some(piece) = self.at_head.pop() {
            let kind = piece.kind();
            if piece.sectors > 0 {
                self.latest[kind.prio as usize][kind.direction as usize] = piece.sector;
            }
            self.count(kind).dispatched += 1;
            return Some(piece);
        }
        if self.fifo.is_empty() {
            return None;
        }
        if CLASSES.iter().filter(|prio| self.queued(**prio) > 0).count() >= 2 {
            let aging = i128::from(self.tunable(Tunable::PrioAgingExpire)) * 1_000_000;
            for prio in [Prio::BestEffort, Prio::Idle] {
                if let Some(at) = self.choose(prio, now, Some(i128::from(now.0) - aging)) {
                    return Some(self.dispatch(at, now));
                }
            }
        }
        for prio in CLASSES {
            if let Some(at) = self.choose(prio, now, None) {
                return Some(self.dispatch(at, now));
            }
            if self.queued(prio) > 0 {
                return None;
            }
        }
        None
    }

    /// The next request in sorted order, from the latest position on.
    fn ahead(&self, prio: Prio, direction: Direction) -> Option<usize> {
        let latest = self.latest[prio as usize][direction as usize];
        let row = self.sorted(prio, direction);
        row.into_iter().find(|at| self.fifo[*at].piece.sector >= latest)
    }

    fn oldest(&self, prio: Prio, direction: Direction) -> Option<usize> {
        self.fifo.iter().position(|waits| waits.piece.kind() == Kind { prio, direction })
    }

    fn choose(&mut self, prio: Prio, now: Nanos, oldest: Option<i128>) -> Option<usize> {
        let ahead = self.ahead(prio, self.last_direction);
        let chosen = match ahead.filter(|_| self.batching < self.tunable(Tunable::FifoBatch)) {
            Some(ahead) => ahead,
            None => {
                let reads = self.oldest(prio, Direction::Read);
                let writes = self.oldest(prio, Direction::Write);
                let direction = match (reads, writes) {
                    (None, None) => return None,
                    (Some(_), None) => Direction::Read,
                    (Some(_), Some(_)) if self.starved < self.tunable(Tunable::WritesStarved) => {
                        self.starved += 1;
                        Direction::Read
                    }
                    (_, Some(_)) => {
                        self.starved = 0;
                        Direction::Write
                    }
                };
                let head = self.oldest(prio, direction)?;
                self.last_direction = direction;
                self.batching = 0;
                let is_expired = now.0 >= self.fifo[head].deadline;
                let ahead = self.ahead(prio, direction);
                if is_expired { head } else { ahead.unwrap_or(head) }
            }
        };
        let chosen = self.first_of_zone(chosen);
        let started = i128::from(self.fifo[chosen].deadline)
            - i128::from(self.expire(self.fifo[chosen].piece.kind().direction));
        if oldest.is_some_and(|oldest| started > oldest) {
            return None;
        }
        self.batching += 1;
        Some(chosen)
    }

    /// Of the writes to the same sequential zone, the one that was inserted first.
    fn first_of_zone(&self, chosen: usize) -> usize {
        let Some(zone) = self.zone(&self.fifo[chosen].piece) else { return chosen };
        let of_zone =
            (0..self.fifo.len()).filter(|at| self.zone(&self.fifo[*at].piece) == Some(zone));
        of_zone.min_by_key(|at| self.fifo[*at].inserted).unwrap_or(chosen)
    }

    fn dispatch(&mut self, at: usize, now: Nanos) -> RequestPiece {
        let WaitingRequest { piece, deadline, .. } = self.fifo.remove(at);
        let kind = piece.kind();
        self.latest[kind.prio as usize][kind.direction as usize] = piece.sector;
        self.count(kind).dispatched += 1;
        self.count(kind).expired += u64::from(now.0 >= deadline);
        piece
    }
}
