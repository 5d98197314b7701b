//! A disk of a pool in use is replaced while fio writes, or comes back after it was away, and the
//! server is killed in the resync.

use std::ops::Range;

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::fio::Fio;
use crate::place::Place;
use crate::rounds::{Seed, seeds};
use crate::yard::{Yard, blockyard};

/// The rounds in `make test`. `make crash` runs 20.
const FEW: u64 = 1;

/// The rate of the resync before the kill, in bytes per second: slow enough for kills in it. The
/// pool has about 134 MB.
const RATE: &str = "8M";

/// A segment of a pool in a directory. After the first one the resync records its cursor, and a
/// later opening continues there.
const SEGMENT_BYTES: u64 = 16 << 20;

/// The bytes that a resync has made equal when the server is killed for the first time.
const KILLED_AT: Range<u64> = 20 << 20..40 << 20;

fn pool(yard: &Yard) -> Value {
    let mut pools = yard.command(&["pool", "status", "--json"]).ok().json();
    pools[0].take()
}

/// The bytes that the resync has made equal; panics if there is none.
fn resynced(yard: &Yard) -> u64 {
    let pool = pool(yard);
    let done = pool["resync"]["done_bytes"].as_u64();
    done.unwrap_or_else(|| panic!("the resync has ended: {pool}"))
}

/// Waits until the resync has made this many bytes equal.
fn wait_for_resync(yard: &Yard, bytes: u64) {
    while resynced(yard) < bytes {}
}

/// What `volume check` says of the copies of a closed pool.
fn checked(path: &str) -> Vec<(String, String)> {
    copies(&blockyard(&["volume", "check", path, "--json"]).json())
}

fn kill(yard: Yard) {
    let process = Pid::from_raw(yard.pid() as i32).unwrap();
    kill_process(process, Signal::KILL).unwrap();
    drop(yard);
}

fn copies(pool: &Value) -> Vec<(String, String)> {
    let copies = pool["copies"].as_array().unwrap().iter();
    let text = |copy: &Value, field: &str| copy[field].as_str().unwrap().to_owned();
    copies.map(|copy| (text(copy, "path"), text(copy, "state"))).collect()
}

/// The configuration names the replaced copy until the end: the server opens the pool all the same.
#[test]
fn a_disk_is_replaced_under_fio_and_kills() {
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let mut random = Rng::with_seed(seed.0);
        let place = Place::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| place.file(name));
        let volume = format!("volume:///v0?path={a}&path2={b}&size=64M&sync=always");
        // Two programs write after each other: they have different data.
        let [fio, later_fio] = [seed.0, seed.0 + (1 << 20)].map(|seed| Fio::new(&Seed(seed)));
        let yard = Yard::serve(&[&volume]);
        let mut writing = fio.write(&yard, "v0", &[]);
        while !writing.has_written(&yard, "v0") {}
        std::fs::create_dir(&c).unwrap();
        // One of the two is replaced: also the one that is read, and by which the pool is named.
        let (old, left) = if random.bool() { (&a, &b) } else { (&b, &a) };
        yard.command(&["pool", "replace", &a, old, &c, "--rate", RATE]).ok();
        wait_for_resync(&yard, random.u64(KILLED_AT));
        kill(yard);
        writing.end();
        // Again in the resync, which goes on where it was.
        let limited = format!("{volume}&resync_rate={RATE}");
        let yard = Yard::serve(&[&limited]);
        let done = resynced(&yard);
        assert!(done >= SEGMENT_BYTES, "{seed}: the resync began again: {done} bytes are equal");
        assert!(fio.verify(&yard, "v0").1 > 0, "{seed}: something was durable");
        let mut writing = later_fio.write(&yard, "v0", &[]);
        while !writing.has_written(&yard, "v0") {}
        // Panics if the resync has ended.
        resynced(&yard);
        kill(yard);
        writing.end();
        let yard = Yard::serve(&[&volume]);
        yard.command(&["pool", "resync", left]).ok();
        let good = |path: &str| (path.to_owned(), "good".to_owned());
        let found = copies(&pool(&yard));
        assert_eq!(found, [good(left), good(&c)], "{seed}");
        let verified = later_fio.verify(&yard, "v0").1;
        assert!(verified > 0, "{seed}: something was durable");
        drop(yard);
        blockyard(&["volume", "check", left]).ok();
        // The configuration with the old path, which says where the pool is now.
        let yard = Yard::serve(&[&volume]);
        let complained = yard.complained();
        assert!(complained.contains("is not, or no longer, a copy of this pool"), "{complained}");
        drop(yard);
        // The new copy alone has everything.
        std::fs::remove_dir_all(left).unwrap();
        let alone = format!("volume:///v0?path={c}&degraded=yes");
        let yard = Yard::serve(&[&alone]);
        assert_eq!(later_fio.verify(&yard, "v0").1, verified, "{seed}");
    }
}

/// A disk is away while the pool is used, and comes back: the server opens the pool at once on the
/// copy that has everything, and resyncs the other one. It is killed twice in that resync, and the
/// copy that is half resynced is never believed.
#[test]
fn a_disk_comes_back_under_fio_and_kills() {
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let mut random = Rng::with_seed(seed.0);
        let place = Place::new();
        let [a, b, away] = ["a", "b", "away"].map(|name| place.file(name));
        let volume = format!("volume:///v0?path={a}&path2={b}&size=64M&sync=always");
        // Also the one that is read first, and by which the pool is named.
        let (old, left) = if random.bool() { (&a, &b) } else { (&b, &a) };
        drop(Yard::serve(&[&volume]));
        std::fs::rename(old, &away).unwrap();
        let fio = Fio::new(&seed);
        let yard = Yard::serve(&[&format!("{volume}&degraded=yes")]);
        let mut writing = fio.write(&yard, "v0", &[]);
        while !writing.has_written(&yard, "v0") {}
        kill(yard);
        writing.end();
        std::fs::rename(&away, old).unwrap();
        let state = |state: &str| (old.clone(), state.to_owned());
        assert!(checked(left).contains(&state("stale")), "{seed}: {:?}", checked(left));
        let limited = format!("{volume}&resync_rate={RATE}");
        let yard = Yard::serve(&[&limited]);
        let pool_now = pool(&yard);
        assert!(pool_now["resync"].is_object(), "{seed}: the pool is open: {pool_now}");
        let (_, verified) = fio.verify(&yard, "v0");
        assert!(verified > 0, "{seed}: something was durable");
        wait_for_resync(&yard, random.u64(KILLED_AT));
        kill(yard);
        // The good copy is lost: half a copy is refused.
        let lost = place.file("lost");
        std::fs::rename(left, &lost).unwrap();
        let degraded = format!("volume:///v0?path={old}&degraded=yes");
        let socket = format!("unix:{}", place.file("nbd"));
        let refused = blockyard(&["serve", &degraded, "--nbd", &socket]).fails();
        refused.says(&[old, "is stale: it lacks the newest writes"]);
        std::fs::rename(&lost, left).unwrap();
        assert!(checked(left).contains(&state("stale")), "{seed}: {:?}", checked(left));
        // Again in the resync, which goes on where it was.
        let yard = Yard::serve(&[&limited]);
        let done = resynced(&yard);
        assert!(done >= SEGMENT_BYTES, "{seed}: the resync began again: {done} bytes are equal");
        wait_for_resync(&yard, done + random.u64(1..16 << 20));
        kill(yard);
        let yard = Yard::serve(&[&volume]);
        yard.command(&["pool", "resync", left]).ok();
        assert!(copies(&pool(&yard)).contains(&state("good")), "{seed}");
        assert_eq!(fio.verify(&yard, "v0").1, verified, "{seed}");
        drop(yard);
        blockyard(&["volume", "check", left]).ok();
        // The copy that came back alone has everything.
        std::fs::remove_dir_all(left).unwrap();
        let yard = Yard::serve(&[&degraded]);
        assert_eq!(fio.verify(&yard, "v0").1, verified, "{seed}");
    }
}
