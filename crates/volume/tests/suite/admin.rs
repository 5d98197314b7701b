//! Snapshots, clones, roll-back, resizing, `destroy` and `check`, on real files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use blockyard_core::{Flags, Sector};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::encryption::{Secret, VolumeKey};
use blockyard_volume::{
    Compression, Options, Running, SyncMode, Volume, VolumeConfig, VolumeError,
};
use blockyard_volume_admin::check::check;
use blockyard_volume_admin::scrub::{ScrubPosition, ScrubStep, continue_scrub, scrub};
use blockyard_volume_format::properties::Properties;

fn open(path: &Path, name: &str, size: u64) -> Arc<Volume> {
    Volume::open(VolumeConfig {
        path: path.to_owned(),
        name: name.to_owned(),
        size,
        volblocksize: 0,
        compress: Compression::None,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    })
    .unwrap()
}

fn write(volume: &Arc<Volume>, at: u64, byte: u8) {
    handle(volume).write(Sector(at / 512), &[byte; 65_536], Flags::NONE).unwrap();
}

fn byte(volume: &Arc<Volume>, at: u64) -> u8 {
    let mut found = [0; 65_536];
    handle(volume).read(Sector(at / 512), &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == found[0]));
    found[0]
}

fn seen(volume: &Arc<Volume>) -> (u8, u8, u8) {
    (byte(volume, 0), byte(volume, 1 << 20), byte(volume, 2 << 20))
}

fn pool(name: &str) -> (TempDir, PathBuf) {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name);
    let path = place.path().join("pool");
    (place, path)
}

#[test]
fn snapshots_and_clones_keep_what_was() {
    let (_place, path) = pool("snapshots");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    let volume = open(&path, "v0", 0);
    write(&volume, 0, 1);
    write(&volume, 1 << 20, 1);
    // The snapshot is made while the volume is in use.
    running.snapshot("v0@one").unwrap();
    write(&volume, 0, 2);
    running.clone_of("v0@one", "twin").unwrap();
    let twin = open(&path, "twin", 0);
    write(&twin, 1 << 20, 3);
    assert_eq!((seen(&volume), seen(&twin)), ((2, 1, 0), (1, 3, 0)));
    let text = |result: Result<(), blockyard_volume::VolumeError>| result.unwrap_err().to_string();
    assert_eq!(text(running.rollback("v0@one")), "`v0` is in use; close it first");
    assert_eq!(text(running.destroy("twin")), "`twin` is in use; close it first");
    assert_eq!(text(running.snapshot("v0@one")), "`v0@one` exists already");
    assert_eq!(text(running.snapshot("v9@one")), "there is no volume `v9` in this pool");
    assert!(text(running.snapshot("v0")).starts_with("invalid name `v0`"));
    assert!(text(running.create("a@b", 1 << 20, 0)).starts_with("invalid name `a@b`"));
    assert!(text(running.create("c", 1 << 20, 5)).starts_with("invalid volblocksize `5`"));
    drop((volume, twin));
    let needed = "`v0` is needed by its snapshot `v0@one`; destroy that first, or use -r \
                  (`\"recursive\": true`)";
    assert_eq!(text(running.destroy("v0")), needed);
    running.rollback("v0@one").unwrap();
    running.resize("v0", 32 << 20, false).unwrap();
    let wanted = "invalid name `v0@one`: expected a snapshot of 32M, the present size of `v0`; the \
                  snapshot has 16M: resize `v0` to 16M first";
    assert_eq!(text(running.rollback("v0@one")), wanted);
    let wanted = "cannot shrink `v0` from 32M to 16M: this discards its data beyond 16M; use \
                  --force (`\"force\": true`) to do so";
    assert_eq!(text(running.resize("v0", 16 << 20, false)), wanted);
    assert!(text(running.resize("v0@one", 16 << 20, true)).contains("this name is of a snapshot"));
    drop(running);
    // All changes persist across a reopen.
    let running = Running::open(&path, Options::default()).unwrap();
    let volume = open(&path, "v0", 32 << 20);
    assert_eq!(seen(&volume), (1, 1, 0));
    drop(volume);
    assert_eq!(seen(&open(&path, "twin", 0)), (1, 3, 0));
    running.destroy("v0@one").unwrap();
    running.destroy("v0").unwrap();
    let names: Vec<_> = running.pool().list().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["twin"]);
    assert_eq!(seen(&open(&path, "twin", 0)), (1, 3, 0), "a clone stands alone");
}

#[test]
fn a_check_finds_a_changed_bit_and_names_its_block() {
    let (_place, path) = pool("check");
    let nothing = check(&path, &mut |_| {}).unwrap_err().to_string();
    assert!(nothing.contains("expected the directory or the disk of a pool"), "{nothing}");
    let volume = open(&path, "v0", 16 << 20);
    for at in 0..16 {
        write(&volume, at << 20, at as u8 + 1);
    }
    let used = check(&path, &mut |_| {}).unwrap_err().to_string();
    assert!(used.contains("is in use by process"), "{used}");
    drop(volume);
    let mut told = 0;
    let report = check(&path, &mut |bytes| told = bytes).unwrap();
    assert_eq!((report.volumes, report.blocks, report.damaged), (1, 64, 0));
    // Includes the map pages.
    assert!(report.stored_bytes == 1 << 20 && told > 1 << 20, "{told}");
    // Change a bit in the block that is filled with the byte 5.
    let file = path.join("segment-00000000");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(4096).position(|part| part == [5; 4096]).unwrap();
    bytes[at + 100] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let report = check(&path, &mut |_| {}).unwrap();
    assert_eq!(report.damaged, 1);
    let damage = &report.damage[0];
    assert_eq!((damage.volume.as_str(), damage.block), ("v0", (4 << 20) / 16_384));
    assert!(damage.what.starts_with("`block` is damaged: its checksum is 0x"), "{damage:?}");
    let volume = open(&path, "v0", 0);
    let mut found = [0; 4096];
    assert!(handle(&volume).read(Sector((4 << 20) / 512), &mut found).is_err(), "never data");
    assert_eq!(byte(&volume, 5 << 20), 6);
}

/// Regression: a volume counted as in use if its last request was still pending when it was closed,
/// or if another thread looked it up.
#[test]
fn a_volume_that_was_just_closed_can_be_changed() {
    let (_place, path) = pool("closed");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    let done = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (running, path, done) = (&running, &path, done);
        scope.spawn(move || {
            // Looks the volume up continuously.
            while done.1.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                _ = running.pool().find("v0");
            }
        });
        for round in 0..100 {
            let volume = open(path, "v0", 0);
            let mut io = handle(&volume);
            drop(volume);
            io.write(Sector(0), &[1; 65_536], Flags::NONE).unwrap();
            drop(io);
            running.resize("v0", (16 + round % 2) << 20, true).unwrap();
        }
        done.0.send(()).unwrap();
    });
}

/// Regression: a roll-back compared lengths before a concurrent `resize` made the volume shorter.
/// The volume then had data after its end, which appeared when it was made longer again.
#[test]
fn a_rollback_concurrent_with_a_resize_leaves_no_data_after_the_end() {
    const LONG: u64 = 32 << 20;
    let (_place, path) = pool("roll-back-resize");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", LONG, 0).unwrap();
    write(&open(&path, "v0", 0), 24 << 20, 7);
    running.snapshot("v0@full").unwrap();
    let (go, goes) = channel::<()>();
    let (done, is_done) = channel::<()>();
    let (stop, stops) = channel::<()>();
    std::thread::scope(|scope| {
        let running = &running;
        scope.spawn(move || {
            for () in goes {
                while stops.try_recv().is_err() {
                    _ = running.rollback("v0@full");
                }
                done.send(()).unwrap();
            }
        });
        for round in 0..200 {
            while running.rollback("v0@full").is_err() {}
            go.send(()).unwrap();
            // A roll-back is in progress most of the time.
            while running.resize("v0", LONG / 2, true).is_err() {}
            stop.send(()).unwrap();
            is_done.recv().unwrap();
            running.resize("v0", LONG, false).unwrap();
            assert_eq!(byte(&open(&path, "v0", 0), 24 << 20), 0, "round {round}");
        }
        drop(go);
    });
}

fn text<T: std::fmt::Debug>(result: Result<T, blockyard_volume::VolumeError>) -> String {
    result.unwrap_err().to_string()
}

fn names(running: &Running) -> Vec<String> {
    let mut names: Vec<_> = running.pool().list().into_iter().map(|it| it.name).collect();
    names.sort();
    names
}

#[test]
fn a_volume_is_renamed_with_its_snapshots() {
    let (_place, path) = pool("rename");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    running.reserve("v0", 1 << 20).unwrap();
    let volume = open(&path, "v0", 0);
    write(&volume, 0, 1);
    running.snapshot("v0@one").unwrap();
    assert_eq!(text(running.rename("v0", "w")), "`v0` is in use; close it first");
    drop(volume);
    assert_eq!(text(running.rename("v9", "w")), "there is no volume `v9` in this pool");
    assert_eq!(text(running.rename("v0", "v0")), "`v0` exists already");
    assert!(text(running.rename("v0", "a@b")).starts_with("invalid name `a@b`"));
    let other = "invalid new `w@one`: expected `v0@` and the new name";
    assert_eq!(text(running.rename("v0@one", "w@one")), other);
    let long = "s".repeat(190);
    running.snapshot(&format!("v0@{long}")).unwrap();
    assert!(text(running.rename("v0", "much-longer")).contains("have 200 characters"));
    running.destroy(&format!("v0@{long}")).unwrap();
    running.rename("v0", "w").unwrap();
    running.rename("w@one", "w@two").unwrap();
    assert_eq!(names(&running), ["w", "w@two"]);
    for gone in ["v0", "v0@one", "w@one"] {
        assert!(running.pool().find(gone).is_err(), "{gone}");
    }
    assert_eq!(running.pool().find("w").unwrap().reserved_bytes(), 1 << 20);
    write(&open(&path, "w", 0), 0, 2);
    drop(running);
    let running = Running::open(&path, Options::default()).unwrap();
    assert_eq!(names(&running), ["w", "w@two"]);
    assert_eq!(byte(&open(&path, "w", 0), 0), 2);
    running.rollback("w@two").unwrap();
    assert_eq!(byte(&open(&path, "w", 0), 0), 1);
}

#[test]
fn a_held_snapshot_is_not_destroyed() {
    let (_place, path) = pool("hold");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    running.snapshot("v0@one").unwrap();
    running.hold_snapshot("v0@one", "backup").unwrap();
    running.hold_snapshot("v0@one", "audit").unwrap();
    let twice = "invalid tag `backup`: expected one that `v0@one` does not have";
    assert_eq!(text(running.hold_snapshot("v0@one", "backup")), twice);
    assert!(text(running.hold_snapshot("v0@one", "a b")).starts_with("invalid tag `a b`"));
    assert!(text(running.hold_snapshot("v0", "backup")).starts_with("invalid name `v0`"));
    drop(running);
    let running = Running::open(&path, Options::default()).unwrap();
    let held = "`v0@one` is held by `backup`; release that first";
    assert_eq!(text(running.destroy("v0@one")), held);
    let doomed = running.doomed("v0", true);
    assert_eq!(text(doomed), held);
    assert_eq!(
        text(running.release("v0@one", "x")),
        "invalid tag `x`: expected the tag of a hold of `v0@one`"
    );
    running.release("v0@one", "backup").unwrap();
    assert!(text(running.destroy("v0@one")).contains("held by `audit`"));
    running.release("v0@one", "audit").unwrap();
    running.destroy("v0@one").unwrap();
}

#[test]
fn ranges_of_snapshots_are_destroyed() {
    let (_place, path) = pool("ranges");
    let running = Running::open(&path, Options::default()).unwrap();
    let make = || {
        running.create("v0", 16 << 20, 0).unwrap();
        for name in ["d", "c", "b", "a"] {
            running.snapshot(&format!("v0@{name}")).unwrap();
        }
    };
    let doomed = |name: &str, recursive| -> Vec<String> {
        running.doomed(name, recursive).unwrap().into_iter().map(|it| it.name).collect()
    };
    make();
    // In order of creation, not of names.
    assert_eq!(doomed("v0@c%b", false), ["v0@c", "v0@b"]);
    assert_eq!(doomed("v0@%c", false), ["v0@d", "v0@c"]);
    assert_eq!(doomed("v0@b%", false), ["v0@b", "v0@a"]);
    assert_eq!(doomed("v0@%", false).len(), 4);
    assert_eq!(doomed("v0", true), ["v0@d", "v0@c", "v0@b", "v0@a", "v0"]);
    let empty = "invalid name `v0@b%c`: expected a range that has a snapshot: the older one first";
    assert_eq!(text(running.doomed("v0@b%c", false)), empty);
    assert!(text(running.doomed("v0@b%x", false)).contains("no snapshot `v0@x`"));
    assert!(text(running.doomed("v9@%", false)).contains("no volume `v9`"));
    let range = running.doomed("v0@c%b", false).unwrap();
    running.destroy_all(&range).unwrap();
    assert_eq!(names(&running), ["v0", "v0@a", "v0@d"]);
    running.create("v1", 16 << 20, 0).unwrap();
    running.snapshot("v1@a").unwrap();
    assert_eq!(doomed("@a", true), ["v0@a", "v1@a"]);
    // A volume that is a device keeps its snapshots too.
    let volume = open(&path, "v0", 0);
    let all = running.doomed("v0", true).unwrap();
    assert_eq!(text(running.destroy_all(&all)), "`v0` is in use; close it first");
    assert_eq!(names(&running).len(), 5);
    drop(volume);
    running.destroy_all(&all).unwrap();
    assert_eq!(names(&running), ["v1", "v1@a"]);
    // More than go into one group of the log.
    make();
    (0..20).for_each(|number| running.snapshot(&format!("v0@{number}")).unwrap());
    running.destroy_all(&running.doomed("v0", true).unwrap()).unwrap();
    assert_eq!(names(&running), ["v1", "v1@a"]);
}

/// Regression: the snapshots of a volume were destroyed before the volume, which stayed
/// without them.
#[test]
fn a_volume_is_destroyed_together_with_its_newest_snapshots() {
    let (_place, path) = pool("together");
    let running = Running::open(&path, Options::default()).unwrap();
    let make = |count: usize| {
        running.create("v0", 16 << 20, 0).unwrap();
        (0..count).for_each(|number| running.snapshot(&format!("v0@{number:02}")).unwrap());
        let doomed = running.doomed("v0", true).unwrap();
        running.snapshot("v0@late").unwrap();
        doomed
    };
    let destroy_the_rest = || running.destroy_all(&running.doomed("v0", true).unwrap()).unwrap();
    let made_meanwhile = "`v0@late` is a snapshot that was made meanwhile; run the command again";
    let doomed = make(7);
    assert_eq!(text(running.destroy_all(&doomed)), made_meanwhile);
    assert_eq!(names(&running).len(), 9, "nothing was destroyed");
    destroy_the_rest();
    // The oldest snapshots go first if there are too many for one change.
    let doomed = make(10);
    assert_eq!(text(running.destroy_all(&doomed)), made_meanwhile);
    assert_eq!(names(&running)[..2], ["v0", "v0@03"]);
    assert_eq!(names(&running).len(), 9);
    let refusal = VolumeError::NoSpace;
    let doomed = running.doomed("v0", true).unwrap();
    assert!(matches!(running.destroy_all_if(&doomed, || Err(refusal)), Err(VolumeError::NoSpace)));
    assert_eq!(names(&running).len(), 9);
    destroy_the_rest();
    assert!(names(&running).is_empty());
    drop(running);
    assert!(names(&Running::open(&path, Options::default()).unwrap()).is_empty());
}

/// Changes an attribute of a volume, and then again and again from the check before its destruction
/// on, until that is refused. Returns the numbers that `change` was answered for last, and that
/// `look` found in the check.
fn last_and_checked(
    running: &Running,
    change: impl Fn(u64) -> Result<(), VolumeError> + Send,
    look: impl Fn() -> u64,
) -> (u64, u64) {
    let (checks, checked) = channel();
    change(1).unwrap();
    let doomed = running.doomed("v0", true).unwrap();
    std::thread::scope(|scope| {
        let changes = scope.spawn(move || {
            checked.recv().unwrap();
            let refused = (2..).find_map(|number| Some((number, change(number).err()?)));
            let (number, error) = refused.unwrap();
            assert!(matches!(error, VolumeError::NoSuchVolume { .. }), "{error}");
            number - 1
        });
        let mut found = 0;
        let check = || {
            found = look();
            checks.send(()).unwrap();
            // The other thread would change the attribute now.
            (0..1000).for_each(|_| std::thread::yield_now());
            Ok(())
        };
        running.destroy_all_if(&doomed, check).unwrap();
        (changes.join().unwrap(), found)
    })
}

/// Regression: the owner of a volume that was moved got an answer to a change that its copy lacked.
#[test]
fn a_volume_is_destroyed_with_the_attributes_that_were_compared() {
    let (_place, path) = pool("attributes");
    let running = Running::open(&path, Options::default()).unwrap();
    let secret = |number: u64| Secret::Key(format!("{number:032}").into_bytes().into());
    for round in 0..12 {
        running.create_reserved("v0", 16 << 20, 0, 0, Some(&secret(0))).unwrap();
        running.unlock("v0", &secret(0)).unwrap();
        let meta = || running.pool().find("v0").unwrap().listed();
        let set = |iops| {
            let iops = Properties { iops: Some(iops), ..Properties::default() };
            running.set("v0", iops, None)
        };
        let iops = || {
            let id = meta().id;
            running.pool().volumes().properties_of(id).iops.unwrap()
        };
        let opens = |number: &u64| {
            let slot = running.pool().key_slot(&meta()).unwrap();
            VolumeKey::unwrap(&slot, &secret(*number)).unwrap().is_some()
        };
        let (last, checked) = match round % 3 {
            0 => last_and_checked(&running, set, iops),
            1 => {
                let reserve = |number| running.reserve("v0", number);
                last_and_checked(&running, reserve, || meta().reserved_bytes)
            }
            _ => {
                let change_key = |number| running.change_key("v0", None, &secret(number));
                last_and_checked(&running, change_key, || (1..).find(opens).unwrap())
            }
        };
        assert_eq!(last, checked, "an answered change was not compared, in round {round}");
    }
}

/// Regression: a destruction waited for the comparison of another volume, which reads the pool.
#[test]
fn a_volume_is_destroyed_while_another_one_is_compared() {
    let (_place, path) = pool("compared");
    let running = Running::open(&path, Options::default()).unwrap();
    for name in ["v0", "v1"] {
        running.create(name, 16 << 20, 0).unwrap();
    }
    let doomed = running.doomed("v0", false).unwrap();
    std::thread::scope(|scope| {
        let (ends, ended) = channel();
        let running = &running;
        let check = || {
            scope.spawn(move || ends.send(running.destroy("v1")).unwrap());
            let found = ended.recv_timeout(Duration::from_secs(60));
            found.expect("the destruction waits for the comparison").unwrap();
            Ok(())
        };
        running.destroy_all_if(&doomed, check).unwrap();
    });
    for name in ["v0", "v1"] {
        assert!(running.pool().find(name).is_err(), "{name}");
    }
}

/// A thread writes the same number to two volumes, first to one and then to the other. A snapshot
/// of both at one moment has equal numbers, or the first one is ahead by one.
#[test]
fn snapshots_of_all_volumes_are_of_one_moment() {
    let (_place, path) = pool("one-moment");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("a", 16 << 20, 0).unwrap();
    running.create("b", 16 << 20, 0).unwrap();
    let volumes = [open(&path, "a", 0), open(&path, "b", 0)];
    let (stop, stopped) = channel::<()>();
    let writer = std::thread::spawn(move || {
        let mut ios = volumes.each_ref().map(handle);
        let mut number = 0_u64;
        while stopped.try_recv().is_err() {
            number += 1;
            let bytes = number.to_le_bytes().repeat(512);
            ios.iter_mut().for_each(|io| io.write(Sector(0), &bytes, Flags::NONE).unwrap());
        }
        number
    });
    let mut seen = 0;
    for round in 0..20 {
        running.snapshot_all(&format!("s{round}")).unwrap();
        let number = ["a", "b"].map(|volume| {
            let clone = format!("{volume}-{round}");
            running.clone_of(&format!("{volume}@s{round}"), &clone).unwrap();
            let mut bytes = [0; 4096];
            handle(&open(&path, &clone, 0)).read(Sector(0), &mut bytes).unwrap();
            u64::from_le_bytes(bytes[..8].try_into().unwrap())
        });
        assert!(number[0] == number[1] || number[0] == number[1] + 1, "{number:?}");
        assert!(number[0] >= seen, "{number:?} after {seen}");
        seen = number[0];
        // The next round has clones too.
        running.destroy(&format!("a-{round}")).unwrap();
        running.destroy(&format!("b-{round}")).unwrap();
    }
    stop.send(()).unwrap();
    assert!(writer.join().unwrap() >= seen);
    let error = text(running.snapshot_all("s3"));
    assert_eq!(error, "`a@s3` exists already");
    assert_eq!(names(&running).len(), 2 + 40);
    let guids: std::collections::BTreeSet<u64> =
        running.pool().list().iter().filter(|it| it.is_snapshot).map(|it| it.guid).collect();
    assert_eq!(guids.len(), 40);
}

#[test]
fn a_promoted_clone_gets_the_older_snapshots() {
    let (_place, path) = pool("promote");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    let volume = open(&path, "v0", 0);
    for (byte, name) in [(1, "one"), (2, "two"), (3, "three")] {
        write(&volume, 0, byte);
        running.snapshot(&format!("v0@{name}")).unwrap();
    }
    running.clone_of("v0@two", "try").unwrap();
    running.snapshot("try@mine").unwrap();
    let clone = open(&path, "try", 0);
    let none = "invalid name `v0`: expected a clone whose origin exists";
    assert_eq!(text(running.promote("v0")), none);
    running.snapshot("try@one").unwrap();
    assert_eq!(text(running.promote("try")), "`try@one` exists already");
    running.destroy("try@one").unwrap();
    // Both volumes are in use.
    assert_eq!(running.promote("try").unwrap(), ["try@one", "try@two"]);
    assert!(running.pool().find("v0@one").is_err() && running.pool().find("v0@three").is_ok());
    let origin = |name: &str| {
        let id = running.pool().find(name).unwrap().origin();
        running.pool().list().into_iter().find(|it| it.id == id).map(|it| it.name)
    };
    assert_eq!((origin("v0"), origin("try")), (Some("try@two".to_owned()), None));
    assert_eq!(origin("try@one").as_deref(), Some("try"));
    write(&clone, 1 << 20, 9);
    assert_eq!((byte(&volume, 0), byte(&clone, 0)), (3, 2));
    drop((volume, clone));
    drop(running);
    let running = Running::open(&path, Options::default()).unwrap();
    let all = ["try", "try@mine", "try@one", "try@two", "v0", "v0@three"];
    assert_eq!(names(&running), all);
    running.rollback("try@one").unwrap();
    assert_eq!(byte(&open(&path, "try", 0), 0), 1);
    // And back again.
    assert_eq!(running.promote("v0").unwrap(), ["v0@one", "v0@two"]);
    assert_eq!(names(&running), ["try", "try@mine", "v0", "v0@one", "v0@three", "v0@two"]);
}

#[test]
fn a_pool_keeps_its_last_scrub() {
    let (_place, path) = pool("scrub-kept");
    let running = Running::open(&path, Options::default()).unwrap();
    assert_eq!(running.status().unwrap().scrub, None);
    running.create("v0", 16 << 20, 0).unwrap();
    write(&open(&path, "v0", 0), 0, 1);
    let report = scrub(&running, 0, &mut |_, _| true).unwrap();
    let kept = running.status().unwrap().scrub.unwrap();
    assert!(kept.ended > 1_700_000_000);
    assert_eq!((kept.verified_bytes, kept.damaged), (report.stored_bytes, 0));
    assert!(kept.verified_bytes >= 65_536);
    // A scrub that is stopped is not recorded.
    assert!(scrub(&running, 0, &mut |_, _| false).is_err());
    drop(running);
    let read_only = blockyard_volume_admin::check::open_read_only(&path).unwrap();
    assert_eq!(read_only.status().unwrap().scrub, Some(kept));
    drop(read_only);
    let running = Running::open(&path, Options::default()).unwrap();
    assert_eq!(running.status().unwrap().scrub, Some(kept));
}

/// Stops a scrub after each leaf, and continues it with another one: together they read each block
/// once, and what they found adds up.
#[test]
fn a_scrub_continues_where_another_one_stopped() {
    let (_place, path) = pool("scrub-continued");
    let running = Running::open(&path, Options::default()).unwrap();
    for name in ["v0", "v1"] {
        running.create(name, 64 << 20, 4096).unwrap();
        let volume = open(&path, name, 0);
        // Several leaves of the map, and holes between them.
        (0..8).for_each(|at| write(&volume, at << 23, at as u8 + 1));
    }
    let whole = scrub(&running, 0, &mut |_, _| true).unwrap();
    let (mut position, mut rounds) = (ScrubPosition::default(), 0);
    let report = loop {
        let (from, mut last) = (position.clone(), None);
        let is_end = |step: &ScrubStep<'_>| step.volume == u32::MAX;
        let scrubbed = continue_scrub(&running, 0, from, &mut |step| {
            last = Some(step.position());
            is_end(step)
        });
        position = last.expect("each scrub makes a step");
        rounds += 1;
        match scrubbed {
            Ok(report) => break report,
            Err(error) => {
                assert!(matches!(error, blockyard_volume::VolumeError::Stopped), "{error}")
            }
        }
    };
    assert_eq!((report.blocks, report.stored_bytes), (whole.blocks, whole.stored_bytes));
    assert!(rounds > 6, "{rounds} rounds");
    assert_eq!(running.status().unwrap().scrub.unwrap().verified_bytes, whole.stored_bytes);
}
