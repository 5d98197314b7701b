//! Power cuts with concurrent threads, as in production: checkpoints, cleaning and growth run
//! concurrently with writes. The threads run one at a time, in an order drawn from the seed, so a
//! run can be reproduced; see [`crate::turns`]. The power is cut at any operation of these threads
//! or of the committer.

use std::collections::HashMap;

use blockyard_core::Status;
use blockyard_testing::directory::{Change, Medium, SimulatedDirectory};
use blockyard_testing::seed::Seed;
use blockyard_volume::Compression;
use blockyard_volume::handle::{NO_REPLY, Outcome};
use blockyard_volume::record::Body;

use crate::fixture::{Fixture, History, Shape, Step, format};
use crate::turns::Turns;
use crate::{look, step};

/// Number of seeds in `make test`; `BLOCKYARD_CONCURRENT_SEEDS` overrides it.
const SEEDS: u64 = 100;

/// Approximate number of cuts per run.
const MOMENTS: usize = 60;

/// Most snapshots per run: they are never destroyed and would fill the pool.
const SNAPSHOTS: usize = 2;

fn seeds() -> u64 {
    match std::env::var("BLOCKYARD_CONCURRENT_SEEDS") {
        Ok(text) => text.parse().expect("BLOCKYARD_CONCURRENT_SEEDS is a number"),
        Err(_) => SEEDS,
    }
}

fn shape(random: &mut fastrand::Rng) -> Shape {
    let mut shape = Shape::tiny();
    shape.block_bytes = [512, 1024, 2048][random.usize(..3)];
    shape.blocks = random.u64(10..60);
    if random.u8(..4) == 0 {
        shape.compression = Compression::Lz4;
    }
    if random.u8(..5) == 0 {
        (shape.spread, shape.blocks) = (true, random.u64(5..=16));
    }
    let options = &mut shape.options;
    options.checkpoint_bytes = random.u64(4 << 10..40 << 10);
    options.sync_bytes = random.u64(1 << 10..20 << 10);
    options.segments_max = random.usize(18..40);
    (shape.depth, options.pipeline_bytes) = (random.usize(1..4), random.u32(..4096));
    shape
}

/// The result of a run.
struct Run {
    history: History,
    changes: Vec<Change>,
    medium: Medium,
    checkpoints: u64,
    moved_bytes: u64,
    cleaned: u64,
}

/// Kills the simulated process when dropped, whatever its threads are doing.
struct Kill(Turns);

impl Drop for Kill {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// Runs a random workload on a pool.
fn run(random: &mut fastrand::Rng, shape: &Shape) -> Run {
    let directory = SimulatedDirectory::default();
    format(&directory, shape);
    let medium = directory.medium();
    let turns = Turns::new(random.fork());
    let _kill = Kill(turns.clone());
    let mut fixture = Fixture::concurrent(&directory, shape, &turns).unwrap();
    let count = random.usize(60..300);
    let mut snapshots = 0;
    while fixture.history.len() < count {
        let mut next = step(random, shape);
        if next == Step::Snapshot {
            snapshots += 1;
            if snapshots > SNAPSHOTS {
                next = Step::Flush;
            }
        }
        // A snapshot has exactly the writes before it in the log, so all requests are completed
        // around it.
        let is_snapshot = next == Step::Snapshot;
        if is_snapshot {
            end(fixture.go_on());
        }
        end(fixture.begin(next));
        if is_snapshot {
            end(fixture.go_on());
        }
        match random.u8(..16) {
            0 => end(fixture.go_on()),
            1 => fixture.committer.sync_all(),
            2..7 => turns.step(),
            turns => {
                for _ in 7..turns.min(12) {
                    fixture.turn();
                }
            }
        }
        end(fixture.collect());
    }
    end(fixture.go_on());
    if random.bool() {
        let mut answer = fixture.pool.submit(Body::Stop);
        fixture.run();
        assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
    }
    let done = fixture.pool.activity();
    let (checkpoints, moved_bytes, cleaned) = (done.checkpoints, done.moved_bytes, done.cleaned);
    fixture.pool.set_running(false);
    let (history, changes) = (fixture.history.by_answers(), directory.changes());
    Run { history, changes, medium, checkpoints, moved_bytes, cleaned }
}

fn end(status: Status) {
    let is_well = [Status::Ok, Status::NoSpc, Status::Resource].contains(&status);
    assert!(is_well, "{status}");
}

fn cut_concurrently(stream: u64) -> Run {
    let _watch = Seed::from_env().watch(&format!("stream {stream}"));
    let mut random = Seed::from_env().rng(stream);
    let shape = shape(&mut random);
    let run = run(&mut random, &shape);
    let mut medium = run.medium.clone();
    let every = run.changes.len() / MOMENTS + 1;
    for (moment, change) in (1..).zip(&run.changes) {
        medium.apply(change);
        if random.usize(..every) == 0 {
            look(&run.history, moment, &medium.cut(|_, _| 0), &shape);
            look(&run.history, moment, &medium.cut(|_, count| random.usize(..count)), &shape);
        }
    }
    look(&run.history, run.changes.len(), &medium.kill(), &shape);
    run
}

#[test]
fn a_power_cut_during_checkpoints_and_cleaning_leaves_a_prefix_with_all_durable_writes() {
    let count = seeds();
    let runs = |streams: std::ops::Range<u64>| {
        streams.map(cut_concurrently).fold((0, 0, 0), |sum, run| {
            (sum.0 + run.checkpoints, sum.1 + run.moved_bytes, sum.2 + run.cleaned)
        })
    };
    let middle = 40_000 + count / 2;
    let done = std::thread::scope(|scope| {
        let other = scope.spawn(move || runs(40_000..middle));
        [runs(middle..40_000 + count), other.join().unwrap()]
    });
    let [a, b] = done;
    let (checkpoints, moved, cleaned) = (a.0 + b.0, a.1 + b.1, a.2 + b.2);
    let done = format!("{checkpoints} checkpoints, {moved} bytes moved, {cleaned} cleaned");
    // A smaller number of seeds need not reach these totals.
    let is_enough = checkpoints > 10 * count && moved > 10_000 * count && cleaned > count;
    assert!(is_enough || count < SEEDS, "{done}");
}

/// Two runs with one seed do the same operations in the same order.
#[test]
fn a_run_with_threads_is_the_same_again() {
    for stream in 41_000..41_010 {
        let runs = [(); 2].map(|()| {
            let mut random = Seed::from_env().rng(stream);
            let shape = shape(&mut random);
            run(&mut random, &shape)
        });
        let [one, other] = &runs;
        let same = one.changes.iter().zip(&other.changes).take_while(|(a, b)| a == b).count();
        let count = one.changes.len().max(other.changes.len());
        assert_eq!(same, count, "stream {stream}: the same up to there");
    }
}

/// A write or discard, and the disk operation after which it must be durable.
struct Issued {
    first: u64,
    count: u64,
    value: u64,
    durable: Option<usize>,
    /// A failed flush reported that it may be lost.
    is_lost: bool,
}

impl Issued {
    fn new(first: u64, count: u64, value: u64) -> Issued {
        Issued { first, count, value, durable: None, is_lost: false }
    }
}

/// The requests to a volume some of whose writes are answered before they are in the log. These
/// have no total order, but an order for each block.
#[derive(Default)]
struct Asked {
    issued: Vec<Issued>,
    /// Indices of the requests that were answered.
    answered: Vec<usize>,
    /// By token: a durable request, or a flush with the number of requests answered before it.
    waiting: HashMap<u32, Waits>,
    /// Number of writes answered before they were in the log.
    early: usize,
}

enum Waits {
    One { index: usize, durable: bool },
    Flush { answered: usize },
}

impl Asked {
    /// Starts a random request.
    fn submit(
        &mut self,
        fixture: &mut Fixture,
        random: &mut fastrand::Rng,
        shape: &Shape,
        token: u32,
    ) {
        let first = random.u64(..shape.blocks);
        let count = random.u64(1..=(shape.blocks - first).min(4));
        let size = u64::from(shape.block_bytes);
        let (at, len, index) = (first * size, count * size, self.issued.len());
        let durable = random.u8(..4) == 0;
        let (outcome, value) = match random.u8(..10) {
            0 => {
                let answered = self.answered.len();
                self.waiting.insert(token, Waits::Flush { answered });
                (fixture.handle.flush(token), None)
            }
            1..4 => (fixture.handle.zero(at, len, token, durable), Some(0)),
            _ => {
                let block = fixture.bytes(token.into());
                let fill = |_: usize, into: &mut [u8]| {
                    into.chunks_mut(block.len()).for_each(|part| part.copy_from_slice(&block));
                };
                let is_early = !durable && fixture.handle.may_answer_early();
                let to = if is_early { NO_REPLY } else { token };
                let outcome = fixture.handle.write(at, len as usize, &fill, to, durable);
                if is_early && outcome == Outcome::Taken {
                    self.early += 1;
                    self.answered.push(index);
                    self.issued.push(Issued::new(first, count, token.into()));
                }
                (outcome, (!is_early).then_some(u64::from(token)))
            }
        };
        match (outcome, value) {
            (Outcome::Taken, Some(value)) => {
                self.issued.push(Issued::new(first, count, value));
                self.waiting.insert(token, Waits::One { index, durable });
            }
            (Outcome::Taken, None) => {}
            (Outcome::Full, _) => _ = self.waiting.remove(&token),
            (Outcome::Ended(status), _) => panic!("{status}"),
        }
    }

    fn answer(&mut self, token: u32, status: Status, moment: usize) {
        let waits = self.waiting.remove(&token).expect("it was asked for");
        end(status);
        match waits {
            Waits::One { index, durable } if status.is_ok() => {
                self.answered.push(index);
                if durable {
                    self.issued[index].durable = Some(moment);
                }
            }
            Waits::One { .. } => {}
            Waits::Flush { answered } => {
                for index in &self.answered[..answered] {
                    let it = &mut self.issued[*index];
                    match status.is_ok() {
                        true if !it.is_lost => _ = it.durable.get_or_insert(moment),
                        true => {}
                        false => it.is_lost = true,
                    }
                }
            }
        }
    }

    /// Checks that each block has the contents that were last durable, or newer ones.
    fn check(&self, moment: usize, found: &[u64]) {
        for (block, value) in (0..).zip(found) {
            let has = |it: &&Issued| (it.first..it.first + it.count).contains(&block);
            let all: Vec<&Issued> = self.issued.iter().filter(has).collect();
            let last = all.iter().rposition(|it| it.durable.is_some_and(|at| at <= moment));
            let allowed = all[last.unwrap_or(0)..].iter().map(|it| it.value);
            let is_old = last.is_none() && *value == 0;
            assert!(
                is_old || allowed.clone().any(|it| it == *value),
                "after {moment} changes block {block} has {value}, expected one of {:?}",
                allowed.collect::<Vec<_>>()
            );
        }
    }
}

/// Power cuts of full pools: writes wait or are refused, some are answered early, and discards free
/// space.
fn fill_concurrently(stream: u64) -> (usize, usize) {
    let _watch = Seed::from_env().watch(&format!("stream {stream}"));
    let mut random = Seed::from_env().rng(stream);
    let mut shape = shape(&mut random);
    (shape.spread, shape.blocks) = (false, random.u64(30..120));
    shape.options.segments_max = random.usize(14..26);
    shape.options.memory_bytes = 16 << 10;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let turns = Turns::new(random.fork());
    let _kill = Kill(turns.clone());
    let mut fixture = Fixture::concurrent(&directory, &shape, &turns).unwrap();
    let (mut asked, mut refused) = (Asked::default(), 0);
    for token in 1..random.u32(200..500) {
        asked.submit(&mut fixture, &mut random, &shape, token);
        let turns_now = match random.u8(..8) {
            0 => usize::MAX,
            1..4 => {
                turns.step();
                0
            }
            some => some.into(),
        };
        for _ in 0..turns_now {
            let goes_on = fixture.turn();
            while let Some(reply) = fixture.handle.take() {
                refused += usize::from(!reply.status.is_ok());
                asked.answer(reply.token, reply.status, directory.change_count());
            }
            if !goes_on {
                break;
            }
        }
    }
    fixture.run();
    while let Some(reply) = fixture.handle.take() {
        asked.answer(reply.token, reply.status, directory.change_count());
    }
    assert!(asked.waiting.is_empty(), "everything is answered");
    fixture.pool.set_running(false);
    let changes = directory.changes();
    drop(fixture);
    let every = changes.len() / MOMENTS + 1;
    for (moment, change) in (1..).zip(&changes) {
        medium.apply(change);
        if random.usize(..every) == 0 {
            for found in [medium.cut(|_, _| 0), medium.cut(|_, count| random.usize(..count))] {
                let mut fixture = Fixture::open(&found, &shape);
                asked.check(moment, &fixture.contents().0);
                fixture.check_counts();
            }
        }
    }
    (asked.early, refused)
}

#[test]
fn a_power_cut_below_a_full_pool_loses_nothing_durable() {
    let count = seeds();
    let done = (43_000..43_000 + count).map(fill_concurrently);
    let (early, refused) = done.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
    // A smaller number of seeds need not reach these totals.
    let is_enough = count < SEEDS || (early > 100 && refused > 100);
    assert!(is_enough, "{early} answered early, {refused} refused");
}
