//! As in production: checkpoints are written, segments cleaned and made beside the writes. Their
//! threads go on one at a time, as a seed says, so that it brings the same again; see
//! [`crate::turns`]. The power is cut at any of their operations, and of the committer's.

use blockyard_core::Status;
use blockyard_sim::directory::{Change, Directory, Medium};
use blockyard_sim::seed::Seed;
use blockyard_volume::Compression;
use blockyard_volume::record::Body;

use crate::rig::{History, Rig, Shape, Step, format};
use crate::turns::Turns;
use crate::{look, step};

/// Seeds of `make test`; `BLOCKYARD_BESIDE_SEEDS` asks for more.
const SEEDS: u64 = 100;

/// Moments of a run that are looked at, about.
const MOMENTS: usize = 60;

/// Snapshots of a run: what they keep for ever would fill the pool.
const SNAPSHOTS: usize = 2;

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

/// What a run has come to.
struct Run {
    history: History,
    changes: Vec<Change>,
    medium: Medium,
    checkpoints: u64,
    moved_bytes: u64,
    cleaned: u64,
}

/// The process is killed when this is gone, whatever it was doing.
struct Kill(Turns);

impl Drop for Kill {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// Lets a client have its way with a pool.
fn run(random: &mut fastrand::Rng, shape: &Shape) -> Run {
    let directory = Directory::default();
    format(&directory, shape);
    let medium = directory.medium();
    let turns = Turns::new(random.fork());
    let _kill = Kill(turns.clone());
    let mut rig = Rig::beside(&directory, shape, &turns).unwrap();
    let count = random.usize(60..300);
    let mut snapshots = 0;
    while rig.history.len() < count {
        let mut next = step(random, shape);
        if next == Step::Snapshot {
            snapshots += 1;
            if snapshots > SNAPSHOTS {
                next = Step::Flush;
            }
        }
        // A snapshot is exact in the order of the log; and what a write leaves that finds no space
        // may be in blocks that were read meanwhile.
        let is_alone = matches!(next, Step::Snapshot | Step::Part { .. });
        if is_alone {
            end(rig.go_on());
        }
        let is_snapshot = next == Step::Snapshot;
        end(rig.begin(next));
        if is_snapshot {
            end(rig.go_on());
        }
        match random.u8(..16) {
            0 => end(rig.go_on()),
            1 => rig.committer.settle(),
            2..7 => turns.step(),
            turns => {
                for _ in 7..turns.min(12) {
                    rig.turn();
                }
            }
        }
        end(rig.collect());
    }
    end(rig.go_on());
    if random.bool() {
        let mut answer = rig.pool.ask_for(Body::Stop);
        rig.run();
        assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
    }
    let done = rig.pool.activity();
    let (checkpoints, moved_bytes, cleaned) = (done.checkpoints, done.moved_bytes, done.cleaned);
    rig.pool.set_running(false);
    let (history, changes) = (rig.history.by_answers(), directory.changes());
    Run { history, changes, medium, checkpoints, moved_bytes, cleaned }
}

fn end(status: Status) {
    let is_well = [Status::Ok, Status::NoSpc, Status::Resource].contains(&status);
    assert!(is_well, "{status}");
}

fn cut_beside(stream: u64) -> Run {
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
fn a_power_cut_beside_checkpoints_and_cleaning_leaves_a_prefix_with_everything_durable() {
    let count = match std::env::var("BLOCKYARD_BESIDE_SEEDS") {
        Ok(text) => text.parse().expect("BLOCKYARD_BESIDE_SEEDS is a number"),
        Err(_) => SEEDS,
    };
    let runs = |streams: std::ops::Range<u64>| {
        streams.map(cut_beside).fold((0, 0, 0), |sum, run| {
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
    assert!(checkpoints > 10 * count && moved > 10_000 * count && cleaned > count, "{done}");
}

/// A seed brings the same operations again, in the same order.
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
