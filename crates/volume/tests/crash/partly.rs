//! A write that is answered with ENOSPC has no effect, neither in memory nor on disk, whatever is
//! written concurrently to parts of the same blocks.

use std::collections::BTreeMap;

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_volume::handle::{NO_REPLY, Outcome, VolumeHandle};

use crate::fixture::{Fixture, Shape, Store, format};
use crate::turns::Turns;

/// Contents are compared in units of this length in bytes, each with a number.
const UNIT: u64 = 512;

/// Number of units that the writes of one run share: at least four blocks.
fn units(shape: &Shape) -> u64 {
    (4 * u64::from(shape.block_bytes) / UNIT).max(96)
}

/// A write or discard that was started.
#[derive(Clone, Copy, Debug)]
struct Begun {
    first: u64,
    count: u64,
    number: u64,
}

/// The units of a volume after exactly these writes, in order.
fn after<'a>(units: u64, writes: impl Iterator<Item = &'a Begun>) -> Vec<u64> {
    let mut units = vec![0; units as usize];
    for write in writes {
        units[write.first as usize..(write.first + write.count) as usize].fill(write.number);
    }
    units
}

fn read(handle: &mut VolumeHandle<Store>, units: u64) -> Vec<u64> {
    let mut bytes = Vec::new();
    let status = handle.read(0, (units * UNIT) as usize, |part| bytes.extend_from_slice(part));
    assert_eq!(status, Status::Ok);
    let unit = |unit: &[u8]| {
        let number = u64::from_le_bytes(unit[..8].try_into().unwrap());
        assert!(unit.chunks(8).all(|word| word == number.to_le_bytes()), "a torn unit");
        number
    };
    bytes.chunks(UNIT as usize).map(unit).collect()
}

/// A pool with so little space that most long writes are refused, and some writes of part of a
/// block succeed.
fn shape(random: &mut fastrand::Rng, block_bytes: u32) -> Shape {
    let mut shape = Shape::tiny();
    shape.block_bytes = block_bytes;
    let options = &mut shape.options;
    options.segment_bytes = (block_bytes * 4).max(16 << 10);
    options.segments_max = 16 + random.usize(..8);
    options.memory_bytes = 4 << 20;
    options.checkpoint_bytes = u64::from(options.segment_bytes) * 2;
    // Blocks other than the compared units fill the pool.
    let bytes = options.segments_max as u64 * u64::from(options.segment_bytes);
    shape.blocks = bytes / u64::from(block_bytes) + 64;
    shape.depth = random.usize(1..4);
    shape
}

struct Run {
    fixture: Fixture,
    /// The writes that were not refused, in order.
    writes: BTreeMap<u64, Begun>,
    next: u64,
    units: u64,
    refused: u64,
    done: u64,
}

impl Run {
    /// Starts a write of some units, or a discard of whole blocks.
    fn begin(&mut self, random: &mut fastrand::Rng, shape: &Shape) {
        let number = self.next;
        self.next += 1;
        let each = u64::from(shape.block_bytes) / UNIT;
        let first = random.u64(..self.units);
        let most = if random.bool() { 1 } else { 6 * each };
        let count = random.u64(1..=most.min(self.units - first));
        let early = random.bool() && self.fixture.handle.may_answer_early();
        let token = if early { NO_REPLY } else { number as u32 };
        let fill = |_: usize, into: &mut [u8]| {
            into.chunks_mut(8).for_each(|word| word.copy_from_slice(&number.to_le_bytes()));
        };
        let (outcome, begun) = if random.u8(..12) == 0 {
            let (first, count) = (first / each, count.div_ceil(each));
            let (at, size) = (first * each * UNIT, u64::from(shape.block_bytes));
            let begun = Begun { first: first * each, count: count * each, number: 0 };
            let is_inside = begun.first + begun.count <= self.units;
            if !is_inside {
                return;
            }
            (self.fixture.handle.zero(at, count * size, token, false), begun)
        } else {
            let len = (count * UNIT) as usize;
            let durable = !early && random.bool();
            let outcome = self.fixture.handle.write(first * UNIT, len, &fill, token, durable);
            (outcome, Begun { first, count, number })
        };
        match outcome {
            Outcome::Taken => _ = self.writes.insert(number, begun),
            Outcome::Full => {}
            Outcome::Ended(status) => panic!("{status}"),
        }
    }

    /// Takes the answers, and compares the volume with all writes that were not refused.
    fn look(&mut self) {
        while let Some(reply) = self.fixture.handle.take() {
            match reply.status {
                Status::Ok => self.done += 1,
                Status::NoSpc => {
                    self.refused += 1;
                    self.writes.remove(&u64::from(reply.token));
                }
                other => panic!("{other}"),
            }
        }
        assert_eq!(
            read(&mut self.fixture.handle, self.units),
            after(self.units, self.writes.values())
        );
    }
}

/// Fills the part of the volume that is not compared.
fn fill(fixture: &mut Fixture, shape: &Shape) {
    let size = shape.block_bytes as usize;
    for block in units(shape) * UNIT / size as u64..shape.blocks {
        let ones = |_: usize, into: &mut [u8]| into.fill(1);
        let begun = fixture.handle.write(block * size as u64, size, &ones, 1, false);
        assert!(begun == Outcome::Taken);
        fixture.run();
        if fixture.handle.take().unwrap().status == Status::NoSpc {
            return;
        }
    }
}

fn run(stream: u64, block_bytes: u32) -> (u64, u64) {
    let _watch = Seed::from_env().watch(&format!("stream {stream}, blocks of {block_bytes}"));
    let mut random = Seed::from_env().rng(stream);
    let shape = shape(&mut random, block_bytes);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let threads = random.bool().then(|| Turns::new(random.fork()));
    let mut fixture = match &threads {
        Some(turns) => Fixture::concurrent(&directory, &shape, turns).unwrap(),
        None => Fixture::open(&directory, &shape),
    };
    fill(&mut fixture, &shape);
    let (units, writes) = (units(&shape), BTreeMap::new());
    let mut run = Run { fixture, writes, next: 2, units, refused: 0, done: 0 };
    for _ in 0..40 {
        for _ in 0..random.usize(1..12) {
            run.begin(&mut random, &shape);
        }
        for _ in 0..random.usize(..4) {
            run.fixture.turn();
            run.look();
        }
    }
    while run.fixture.turn() {
        run.look();
    }
    assert!(run.fixture.handle.flush(1) == Outcome::Taken);
    run.fixture.run();
    run.look();
    let wanted = after(units, run.writes.values());
    run.fixture.pool.set_running(false);
    let (refused, done) = (run.refused, run.done);
    drop(run);
    threads.iter().for_each(Turns::kill);
    directory.changes().iter().for_each(|change| medium.apply(change));
    for found in [medium.kill(), medium.cut(|_, _| 0)] {
        let mut fixture = Fixture::open(&found, &shape);
        assert_eq!(read(&mut fixture.handle, units), wanted, "opened again");
    }
    (refused, done)
}

/// Regression: a small write to a block copied the rest from a larger write that was pending. The
/// larger write was then refused, and the small one made its data durable. 184 of 367 writes
/// answered with ENOSPC left 9 blocks each.
#[test]
fn a_write_without_space_leaves_nothing_in_the_blocks_of_its_neighbours() {
    let sizes = [512, 1024, 2048, 4096, 8192, 16 << 10, 32 << 10, 64 << 10];
    for (number, block_bytes) in (0..).zip(sizes) {
        let runs = (46_000..46_006).map(|stream| run(stream + 100 * number, block_bytes));
        let (refused, done) = runs.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
        assert!(refused > 10 && done > 10, "{block_bytes}: {refused} refused, {done} done");
    }
}
