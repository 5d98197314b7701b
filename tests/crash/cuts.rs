//! The power is cut at any write or sync, also of a recovery, on a disk that keeps nothing else
//! but what was synced. Pools that are a small disk make checkpoints, clean and use segments again
//! all the time; those in a directory grow.

use std::fs::File;
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use blockyard_volume::{Options, Running};
use fastrand::Rng;

use crate::client::Client;
use crate::disk::Fault;
use crate::fio::Fio;
use crate::history::{History, PAGE};
use crate::mounted::Mounted;
use crate::rounds::{Seed, seeds};
use crate::workload::{End, Workload};
use crate::yard::Yard;

/// Disks of `make test`; each is cut a few times.
const FEW: u64 = 4;
const CUTS: u64 = 5;

/// Cuts of a disk on which fio writes, each behind so many writes and syncs at most.
const FIO_CUTS: u64 = 5;
const FIO_OPERATIONS: u64 = 300;

const VOLUME_BYTES: u64 = 8 << 20;

/// A segment has room for four of the longest writes.
const SEGMENT_BYTES: u32 = 1280 << 10;

/// The longest write, in pages: a longer one would be cut into several, which go in one by one.
const LONGEST: u64 = SEGMENT_BYTES as u64 / 4 / PAGE as u64;

/// A disk is cut before it was asked for so many writes and syncs: most small ones have begun anew
/// at their first segment by then.
const OPERATIONS: u64 = 1000;

/// A pool that is a disk, with twenty of them.
const POOL_BYTES: u64 = (1 << 20) + 20 * SEGMENT_BYTES as u64;

/// What servers have done before they were killed.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    answers: u64,
    log_bytes: u64,
    checkpoints: u64,
    page_bytes: u64,
    moved_bytes: u64,
}

impl AddAssign for Done {
    fn add_assign(&mut self, other: Done) {
        self.answers += other.answers;
        self.log_bytes += other.log_bytes;
        self.checkpoints += other.checkpoints;
        self.page_bytes += other.page_bytes;
        self.moved_bytes += other.moved_bytes;
    }
}

/// Where a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Directory,
    SmallDisk,
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    yard.end();
}

/// What a server says that its pool has done.
fn asked(yard: &Yard, mounted: &Mounted, answers: u64) -> Done {
    let shown = yard.command(&["volume", "show", &mounted.file("pool"), "--json"]).ok().out;
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let count = |name: &str| shown[name].as_u64().unwrap_or_else(|| panic!("{name}: {shown}"));
    let [log_bytes, checkpoints, page_bytes, moved_bytes] =
        ["log_bytes", "checkpoints", "page_bytes", "moved_bytes"].map(count);
    Done { answers, log_bytes, checkpoints, page_bytes, moved_bytes }
}

/// One opening of the volume, to its end; says what was done. `more` are parameters.
fn live(
    mounted: &Mounted,
    history: &mut History,
    seed: &Seed,
    random: &mut Rng,
    more: &str,
) -> Done {
    let device = format!("volume:///v0?path={}&size={VOLUME_BYTES}{more}", mounted.file("pool"));
    // Some while it comes up, most while it works, some not at all.
    let kind = random.u32(..10);
    if kind < 3 {
        mounted.disk().fail(Some(Fault::Cut(random.u64(..130))));
    }
    let yard = match Yard::try_serve(&[&device]) {
        Ok(yard) => yard,
        Err((status, text)) => {
            assert!(mounted.disk().is_off(), "{seed}: ended with {status}: {text}");
            return Done::default();
        }
    };
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    match client.contents() {
        // What is there although the power was not cut need not outlive the next cut.
        Ok(contents) => history.check(&contents, false),
        // A flush has nothing to do here, and says nothing of what was there before.
        Err(error) => {
            assert!(mounted.disk().is_off(), "{seed}: {error}");
            kill(yard);
            return Done::default();
        }
    }
    if kind >= 3 {
        mounted.disk().fail(Some(Fault::Cut(random.u64(..OPERATIONS))));
    }
    let mut workload = Workload::new(client, history, random.u64(..)).longest(LONGEST);
    let answers = if kind == 9 { random.u64(1..500) } else { u64::MAX };
    match workload.run(answers) {
        End::Done => {}
        end => {
            assert!(mounted.disk().is_off(), "{seed}: {end:?}");
            workload.drain();
        }
    }
    let done = asked(&yard, mounted, workload.answers);
    kill(yard);
    done
}

/// A file that takes the place of a disk, and has a pool.
fn make_small_disk(mounted: &Mounted) {
    let path = mounted.file("pool");
    File::create(&path).unwrap().set_len(POOL_BYTES).unwrap();
    let options = Options { segment_bytes: SEGMENT_BYTES, ..Options::default() };
    drop(Running::open(Path::new(&path), options).unwrap());
}

/// A disk with a volume on it that is cut a few times; says what was done in all.
fn disk(seed: &Seed, kind: Kind, more: &str) -> Done {
    cut_often(seed, &Mounted::new(seed.0), kind, more)
}

/// The same on this one.
fn cut_often(seed: &Seed, mounted: &Mounted, kind: Kind, more: &str) -> Done {
    let mut random = Rng::with_seed(seed.0);
    if kind == Kind::SmallDisk {
        make_small_disk(mounted);
    }
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    let mut done = Done::default();
    for _ in 0..CUTS {
        done += live(mounted, &mut history, seed, &mut random, more);
        if mounted.disk().is_off() {
            mounted.disk().switch_on();
        }
    }
    mounted.disk().fail(None);
    let device = format!("volume:///v0?path={}&size={VOLUME_BYTES}{more}", mounted.file("pool"));
    let yard = Yard::serve(&[&device]);
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    history.check(&client.contents().unwrap(), false);
    // It goes on.
    let mut workload = Workload::new(client, &mut history, seed.0).longest(LONGEST);
    assert!(matches!(workload.run(200), End::Done), "{seed}");
    kill(yard);
    done
}

#[test]
fn nothing_durable_is_lost_when_the_power_is_cut() {
    let mut directories = Done::default();
    let mut disks = None;
    let seeds: Vec<u64> = seeds(FEW).collect();
    let is_all = seeds.len() as u64 >= FEW;
    for seed in seeds {
        let seed = Seed(seed);
        let block = ["4k", "16k", "64k"][seed.0 as usize % 3];
        let compress = ["lz4", "none"][seed.0 as usize / 3 % 2];
        let more = format!("&volblocksize={block}&compress={compress}");
        match seed.0 % 2 {
            0 => directories += disk(&seed, Kind::Directory, &more),
            _ => *disks.get_or_insert(Done::default()) += disk(&seed, Kind::SmallDisk, &more),
        }
    }
    println!("power cuts: directories {directories:?}, small disks {disks:?}");
    // One disk alone may have been cut before it came to all of this.
    if let Some(done) = disks.filter(|_| is_all) {
        let Done { answers, log_bytes, checkpoints, page_bytes, moved_bytes } = done;
        assert!(answers > 0, "the client was answered something");
        assert!(checkpoints > 0 && page_bytes > 0, "checkpoints are cut too");
        assert!(moved_bytes > 0, "so is cleaning");
        assert!(log_bytes > POOL_BYTES, "so is what takes the place of something else");
    }
}

/// What fio was told is durable fio finds again: on a disk that is cut while it writes, and while
/// what it wrote is recovered.
#[test]
fn fio_verifies_what_was_answered_when_the_power_is_cut() {
    let mut verified = 0;
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let (mut random, mounted) = (Rng::with_seed(seed.0), Mounted::new(seed.0));
        let volume = format!("volume:///v0?path={}&size=64M&sync=always", mounted.file("pool"));
        for _ in 0..FIO_CUTS {
            let (fio, yard) = (Fio::new(&seed), Yard::serve(&[&volume]));
            // So that it has not ended before the cut.
            let mut writing = fio.write(&yard, "v0", &["--rate_iops=1000"]);
            while !writing.has_written(&yard, "v0") {}
            mounted.disk().fail(Some(Fault::Cut(random.u64(..FIO_OPERATIONS))));
            writing.end();
            assert!(mounted.disk().is_off(), "{seed}: fio has ended before");
            kill(yard);
            mounted.disk().switch_on();
            // Some of the openings are cut as well.
            mounted.disk().fail(Some(Fault::Cut(random.u64(..40))));
            match Yard::try_serve(&[&volume]) {
                Ok(yard) => kill(yard),
                Err((status, text)) => {
                    assert!(mounted.disk().is_off(), "{seed}: ended with {status}: {text}");
                }
            }
            if mounted.disk().is_off() {
                mounted.disk().switch_on();
            }
            mounted.disk().fail(None);
            let yard = Yard::serve(&[&volume]);
            verified += fio.verify(&yard, "v0").1;
            kill(yard);
        }
    }
    assert!(verified > 0, "something was durable");
}

/// Who made the file has synced neither its directory nor its length; a pool depends on both.
#[test]
fn a_file_that_is_a_pool_is_there_after_a_power_cut() {
    for seed in 1..=8 {
        let mounted = Mounted::new(seed);
        make_small_disk(&mounted);
        mounted.disk().cut();
        mounted.disk().switch_on();
        let found = std::fs::metadata(mounted.file("pool")).map(|it| it.len());
        assert_eq!(found.ok(), Some(POOL_BYTES), "disk {seed}");
    }
}

/// A file system that ignores that a write is to be durable, and does what a sync asks for.
#[test]
fn nothing_durable_is_lost_where_only_syncs_count() {
    for seed in 1..=4 {
        let seed = Seed(seed);
        let mounted = Mounted::new(seed.0);
        mounted.disk().deafen();
        cut_often(&seed, &mounted, Kind::Directory, "");
    }
}

/// A volume that answers flush and FUA at once does lose what it said is durable: these tests would
/// see it.
#[test]
fn a_volume_without_syncs_is_found_out() {
    let mut seeds = 1..=5;
    let found_out = seeds.any(|seed| {
        let run = || disk(&Seed(seed), Kind::Directory, "&sync=disabled");
        catch_unwind(AssertUnwindSafe(run)).is_err()
    });
    assert!(found_out, "none of five disks has lost anything");
}
