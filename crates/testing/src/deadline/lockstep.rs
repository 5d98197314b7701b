//! The scheduler and its model in lockstep: each step is executed on both, and they must agree.

use blockyard_core::sched::deadline::{
    CLASSES, Deadline, DeadlineConfig, Direction, Item as _, Kind, Tunable, Tunables,
};
use blockyard_core::{Nanos, Op, Prio};

use super::{RequestPiece, SlowDeadline};

/// A step of a test.
#[derive(Clone, Copy, Debug)]
pub enum TestStep {
    /// A request arrives.
    Insert {
        /// The operation.
        op: Op,
        /// The priority class.
        prio: Prio,
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// Whether the request may merge.
        merges: bool,
        /// Whether the request is dispatched before all others.
        at_head: bool,
    },
    /// Requests of 8 sectors arrive together. Each set bit of `reads` or `writes` whose next lower
    /// bit is clear gives one, at 8 times its number. They bypass the scheduler to the device if
    /// allowed; otherwise they are queued.
    Pass {
        /// The operation of the requests that change data.
        op: Op,
        /// The priority class.
        prio: Prio,
        /// Places of the reads, one bit each.
        reads: u64,
        /// Places of the requests that change data, one bit each.
        writes: u64,
    },
    /// Up to this number of requests is dispatched to the device.
    Dispatch(usize),
    /// A request at the device completes, by its index modulo their number.
    Complete(usize),
    /// A request at the device is requeued, by its index modulo their number.
    Requeue(usize),
    /// This number of milliseconds passes.
    Wait(u64),
    /// A tunable changes.
    Tune(Tunable, i32),
}

/// The scheduler, the model, and the requests at the device.
#[derive(Debug)]
pub struct Lockstep {
    fast: Deadline<RequestPiece>,
    slow: SlowDeadline,
    in_flight_max: usize,
    zone_sectors: Option<u64>,
    in_flight: Vec<RequestPiece>,
    now_ms: u64,
    bios: u32,
    /// Bios that were accepted, and bios whose requests were completed.
    taken: usize,
    completed: usize,
    passed: usize,
}

impl Lockstep {
    /// Both without requests.
    pub fn new(config: DeadlineConfig) -> Lockstep {
        Lockstep {
            in_flight_max: config.in_flight_max,
            zone_sectors: config.zones.as_ref().map(|zones| zones.zone_sectors),
            fast: Deadline::new(config.clone()),
            slow: SlowDeadline::new(config),
            in_flight: Vec::new(),
            now_ms: 0,
            bios: 0,
            taken: 0,
            completed: 0,
            passed: 0,
        }
    }

    fn now(&self) -> Nanos {
        Nanos(self.now_ms * 1_000_000)
    }

    /// Executes a step on both.
    ///
    /// # Panics
    /// If they do not agree.
    pub fn step(&mut self, step: TestStep) {
        match step {
            TestStep::Insert { op, prio, sector, sectors, merges, at_head } => {
                self.bios += 1;
                let bios = vec![self.bios];
                self.insert(RequestPiece { op, prio, sector, sectors, merges, bios }, at_head);
            }
            TestStep::Pass { op, prio, reads, writes } => {
                let pieces = [(Op::Read, reads), (op, writes)].map(|(op, places)| {
                    let places = places & !(places << 1);
                    let bits = (0..64).filter(|bit| places >> bit & 1 == 1);
                    bits.map(|bit| self.piece(op, prio, bit * 8)).collect()
                });
                self.pass(prio, pieces);
            }
            TestStep::Dispatch(room) => self.dispatch(room),
            TestStep::Complete(which) => {
                if !self.in_flight.is_empty() {
                    let piece = self.in_flight.swap_remove(which % self.in_flight.len());
                    self.completed += piece.bios.len();
                    self.fast.completed(piece.kind());
                    self.slow.completed(piece.kind());
                }
            }
            TestStep::Requeue(which) => {
                if !self.in_flight.is_empty() {
                    let piece = self.in_flight.swap_remove(which % self.in_flight.len());
                    self.slow.requeue(piece.clone());
                    self.fast.requeue(piece, self.now());
                }
            }
            TestStep::Wait(ms) => self.now_ms += ms,
            TestStep::Tune(tunable, value) => {
                let mut tunables: Tunables = *self.fast.tunables();
                tunables.set(tunable, i64::from(value)).expect("steps are within the ranges");
                self.fast.set(tunables);
                self.slow.set(tunables);
            }
        }
        self.compare();
    }

    fn insert(&mut self, piece: RequestPiece, at_head: bool) {
        let now = self.now();
        let (fast, slow) = if at_head {
            (self.fast.insert_at_head(piece.clone(), now), self.slow.insert_at_head(piece))
        } else {
            (self.fast.insert(piece.clone(), now), self.slow.insert(piece, now))
        };
        assert_eq!(fast, slow, "room");
        self.taken += usize::from(fast.is_ok());
    }

    fn piece(&mut self, op: Op, prio: Prio, sector: u64) -> RequestPiece {
        self.bios += 1;
        RequestPiece { op, prio, sector, sectors: 8, merges: true, bios: vec![self.bios] }
    }

    fn pass(&mut self, prio: Prio, pieces: [Vec<RequestPiece>; 2]) {
        let now = self.now();
        let [reads, writes] = &pieces;
        let (count, room) = (reads.len() + writes.len(), self.in_flight_max - self.in_flight.len());
        let may_write = writes.len() <= self.fast.throttled_room();
        let has_room = count > 0 && count <= room;
        // Several writes to one zone need the zone's order, so they do not bypass the scheduler.
        let zone = |piece: &RequestPiece| self.zone_sectors.map(|sectors| piece.sector / sectors);
        let is_free = writes.is_sorted_by(|a, b| zone(a).is_none() || zone(a) != zone(b));
        let lends = has_room && may_write && is_free;
        let sweep = lends.then(|| self.fast.lend(prio, [true; 2], count as u32, now)).flatten();
        // The caller of a sweep compares the number of its requests with the free capacity.
        let sweep = sweep.filter(|sweep| count <= sweep.most() as usize);
        let mut order = Vec::new();
        let passes = sweep.is_some_and(|mut sweep| {
            let take = |piece: &RequestPiece| order.push(piece.clone());
            let passes = sweep.pass([reads, writes], |piece| piece.sector, now, take);
            self.fast.settle(&sweep, true);
            passes
        });
        let all = pieces.concat();
        if !passes {
            return all.into_iter().for_each(|piece| self.insert(piece, false));
        }
        assert_eq!(order.len(), count, "each is dispatched once");
        self.passed += 1;
        self.taken += count;
        for piece in all {
            assert_eq!(self.slow.insert(piece, now), Ok(()), "room");
        }
        for piece in order {
            assert_eq!(self.slow.next(now).as_ref(), Some(&piece), "whose turn it is");
            self.in_flight.push(piece);
        }
    }

    /// How often requests bypassed the scheduler.
    pub fn passed(&self) -> usize {
        self.passed
    }

    /// Dispatches one request at a time or all at once: the result must be equal.
    fn dispatch(&mut self, room: usize) {
        let now = self.now();
        let room = room.min(self.in_flight_max - self.in_flight.len());
        let mut fast = Vec::new();
        if room == 1 {
            fast.extend(self.fast.next(now));
        } else {
            let count = self.fast.next_batch(room, now, |piece| fast.push(piece));
            assert_eq!(count, fast.len(), "what it says and what it gave");
        }
        for piece in &fast {
            assert_eq!(Some(piece), self.slow.next(now).as_ref(), "whose turn it is");
        }
        if fast.len() < room {
            assert_eq!(self.slow.next(now), None, "whose turn it is");
        }
        self.in_flight.append(&mut fast);
    }

    fn compare(&self) {
        let (fast, slow) = (&self.fast, &self.slow);
        assert_eq!(fast.waiting(), slow.waiting());
        let stats = fast.stats();
        for (prio, direction, counters) in stats.iter() {
            assert_eq!(counters, slow.counters(prio, direction), "{prio:?} {direction:?}");
            let kind = Kind { prio, direction };
            assert_eq!(fast.admits(kind), slow.admits(kind), "{kind:?}");
        }
        let in_flight: u64 = stats.iter().map(|(_, _, counters)| counters.in_flight()).sum();
        assert_eq!(in_flight, self.in_flight.len() as u64);
    }

    /// Dispatches and completes all requests.
    ///
    /// # Panics
    /// If the two do not agree, or a bio gets lost.
    pub fn finish(mut self) {
        while !self.fast.is_empty() || !self.in_flight.is_empty() {
            let before = self.in_flight.len();
            self.step(TestStep::Dispatch(usize::MAX));
            assert!(before + self.in_flight.len() > 0, "nothing is at the device, yet one waits");
            self.step(TestStep::Complete(0));
        }
        assert_eq!(self.completed, self.taken, "bios that went in and came out");
        for prio in CLASSES {
            assert_eq!(self.fast.queued(prio), 0, "{prio:?}");
            for direction in Direction::ALL {
                assert_eq!(self.fast.sorted(prio, direction).count(), 0);
            }
        }
    }
}
