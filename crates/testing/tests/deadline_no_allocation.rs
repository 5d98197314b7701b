//! After it is created, the order of the scheduler `deadline` allocates no memory, however many
//! requests it has: measured by a counting allocator.
#![allow(clippy::unwrap_used)] // A test may panic.

use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{Deadline, DeadlineConfig, Item, Kind, Tunables};
use blockyard_core::{Limits, Nanos, Op, Prio, Sector, ZoneGeometry};
use blockyard_testing::allocations::Counting;
use blockyard_testing::seed::Seed;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A request that owns no memory.
#[derive(Clone, Copy)]
struct Plain {
    op: Op,
    prio: Prio,
    sector: u64,
    sectors: u64,
}

impl Item for Plain {
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

    fn joins(&self, next: &Plain, rules: MergeRules) -> bool {
        let range = Sector(self.sector)..Sector(next.sector + next.sectors);
        self.op == next.op && rules.fits(self.op, range, 2)
    }

    fn merge_back(&mut self, next: Plain) {
        self.sectors += next.sectors;
    }
}

const CAPACITY: usize = 3000;
const IN_FLIGHT_MAX: usize = 64;
const ZONE_SECTORS: u64 = 1 << 15;

fn config(zoned: bool) -> DeadlineConfig {
    let zones = ZoneGeometry {
        zone_sectors: ZONE_SECTORS,
        zone_capacity_sectors: ZONE_SECTORS,
        zone_count: 16,
        conventional_count: 2,
        open_max: 0,
        active_max: 0,
    };
    DeadlineConfig {
        capacity: CAPACITY,
        in_flight_max: IN_FLIGHT_MAX,
        rules: MergeRules::new(&Limits { sectors_max: 64, ..Limits::unlimited(64) }),
        zones: zoned.then_some(zones),
        tunables: Tunables::new((CAPACITY + IN_FLIGHT_MAX) as u32),
    }
}

/// Fills and empties the order repeatedly; returns how many requests went through it.
fn churn(order: &mut Deadline<Plain>, rng: &mut fastrand::Rng) -> usize {
    let (mut refused, mut taken) = (Vec::with_capacity(1), 0);
    let mut at_device: Vec<Plain> = Vec::with_capacity(IN_FLIGHT_MAX);
    let before = Counting::made();
    for round in 0..6000 {
        // Insertions dominate, then removals.
        let (inserts, takes) = if round / 500 % 2 == 0 { (24, 8) } else { (4, 40) };
        for _ in 0..inserts {
            let op = [Op::Read, Op::Write, Op::Discard][rng.usize(..3)];
            let prio = [Prio::BestEffort, Prio::RealTime, Prio::Idle][rng.usize(..3)];
            let sector = rng.u64(..ZONE_SECTORS * 2) * 8;
            let plain = Plain { op, prio, sector, sectors: 8 };
            if order.room() > 0 {
                order.insert_batch([plain], Nanos(round * 1_000_000), &mut refused);
                refused.clear();
            }
        }
        order.next_batch(takes, Nanos(round * 1_000_000), |plain| at_device.push(plain));
        taken += at_device.len();
        if round % 16 == 0
            && let Some(plain) = at_device.pop()
        {
            order.requeue(plain, Nanos(round * 1_000_000));
        }
        for plain in at_device.drain(..) {
            order.completed(plain.kind());
        }
    }
    assert_eq!(Counting::made() - before, 0);
    taken
}

#[test]
fn filling_and_emptying_the_order_allocates_nothing() {
    let seed = Seed::from_env();
    let _watch = seed.watch("filling_and_emptying_the_order_allocates_nothing");
    for zoned in [false, true] {
        let mut order = Deadline::new(config(zoned));
        let taken = churn(&mut order, &mut seed.rng(u64::from(zoned)));
        assert!(taken > 10_000, "{taken} requests");
    }
}
