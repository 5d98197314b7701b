//! A volume in two directories: either is sufficient, damage in one is repaired from the other, and
//! a stale copy is never used as current.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::{Flags, Sector};
use blockyard_store::{
    Commit, CopiesError, PoolPaths, PoolStore, StoreError, StoreKind, StoreLocation,
};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig, VolumeError};
use blockyard_volume_admin::check::check;
use blockyard_volume_admin::scrub::scrub;

const SIZE: usize = 16 << 20;

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn options() -> Options {
    Options { segment_bytes: 4 << 20, checkpoint_bytes: 8 << 20, ..Options::default() }
}

fn config(first: &Path, second: &Path) -> VolumeConfig {
    VolumeConfig {
        path2: Some(second.to_owned()),
        size: SIZE as u64,
        volblocksize: 4096,
        compress: Compression::None,
        ..VolumeConfig::new(first, "v0")
    }
}

fn open(first: &Path, second: &Path) -> Arc<Volume> {
    Volume::open_with(config(first, second), options()).unwrap()
}

/// Waits for a resync, and checks that both copies are good.
fn all_good(volume: &Arc<Volume>) {
    volume.running().wait_for_resync();
    let copies = volume.running().status().unwrap().copies;
    assert!(copies.len() == 2 && copies.iter().all(|it| it.state.is_good()), "{copies:?}");
}

fn refused(config: VolumeConfig) -> CopiesError {
    match Volume::open_with(config, options()) {
        Err(VolumeError::Store(StoreError::Copies(error))) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was opened"),
    }
}

/// Writes at random places, and to the model.
fn write(volume: &Arc<Volume>, model: &mut [u8], random: &mut fastrand::Rng) {
    let mut io = handle(volume);
    for _ in 0..100 {
        let len = 4096 * random.usize(1..=32);
        let at = random.usize(..=(model.len() - len) / 4096) * 4096;
        let data: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(len).collect();
        let flags = if random.u8(..4) == 0 { Flags::FUA } else { Flags::NONE };
        io.write(Sector(at as u64 / 512), &data, flags).unwrap();
        model[at..at + len].copy_from_slice(&data);
    }
    io.run(blockyard_core::Bio::flush()).unwrap();
}

fn read(volume: &Arc<Volume>, model: &[u8]) {
    let mut io = handle(volume);
    let mut found = vec![0; 1 << 20];
    for (at, wanted) in (0..).zip(model.chunks(1 << 20)) {
        io.read(Sector(at * 2048), &mut found).unwrap();
        assert!(found == wanted, "MiB {at}");
    }
}

/// Changes a byte of each 4 KiB of all segments, except where all bytes are zero.
fn quarantine(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("segment-") {
            let mut bytes = fs::read(&path).unwrap();
            for unit in bytes.chunks_mut(4096).filter(|unit| unit.iter().any(|byte| *byte != 0)) {
                unit[100] ^= 0x55;
            }
            fs::write(&path, bytes).unwrap();
        }
    }
}

fn segments(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let shared = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("segment-") || name == "superblock"
    };
    let read = |path: PathBuf| (path.file_name().unwrap().into(), fs::read(&path).unwrap());
    let mut all: Vec<_> = entries.filter(shared).map(read).collect();
    all.sort();
    all
}

#[test]
fn either_copy_heals_the_other_one() {
    let place = place("mirror-heals");
    let (first, second) = (place.path().join("a"), place.path().join("b"));
    let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(5));
    let volume = open(&first, &second);
    write(&volume, &mut model, &mut random);
    drop(volume);
    assert!(segments(&first) == segments(&second));
    let mut repaired = 0;
    for quarantined in [&first, &second] {
        quarantine(quarantined);
        let found = check(&first, &mut |_| {}).unwrap();
        assert!(found.damaged > 100, "{}", found.damaged);
        let named = format!("{}: ", quarantined.display());
        assert!(found.damage.iter().all(|it| it.what.starts_with(&named)), "{:?}", found.damage[0]);
        let volume = open(&first, &second);
        // The pool keeps the number of all repairs.
        assert!(volume.running().status().unwrap().repaired >= repaired);
        read(&volume, &model);
        let report = scrub(volume.running(), 0, &mut |_, _| true).unwrap();
        assert_eq!(report.damaged, 0);
        // Reads use the first copy; only a scrub reads the second.
        let status = volume.running().status().unwrap().copies;
        assert_eq!(status.iter().map(|it| it.state.is_good()).collect::<Vec<_>>(), [true, true]);
        let mended = status.iter().find(|it| it.path == quarantined.display().to_string()).unwrap();
        assert!(
            mended.repaired > 100 && (quarantined == &first || report.repaired > 100),
            "{mended:?}"
        );
        let all = volume.running().status().unwrap().repaired;
        assert!(all > repaired + 100, "{all} after {repaired}");
        repaired = all;
        drop(volume);
        assert_eq!(check(&first, &mut |_| {}).unwrap().damaged, 0);
    }
    // Missing files are made again from the other copy.
    fs::remove_file(second.join("segment-00000001")).unwrap();
    fs::remove_file(first.join("superblock")).unwrap();
    let volume = open(&first, &second);
    read(&volume, &model);
    write(&volume, &mut model, &mut random);
    drop(volume);
    assert_eq!(check(&second, &mut |_| {}).unwrap().damaged, 0);
}

#[test]
fn a_copy_that_comes_back_is_made_equal() {
    let place = place("mirror-behind");
    let path = |name: &str| place.path().join(name);
    let (first, second, away) = (path("a"), path("b"), path("away"));
    let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(6));
    let volume = open(&first, &second);
    write(&volume, &mut model, &mut random);
    drop(volume);
    fs::rename(&second, &away).unwrap();
    // The copy is missing, then its directory exists but is empty, as if not mounted.
    for _ in 0..2 {
        let error = refused(config(&first, &second));
        assert!(matches!(&error, CopiesError::Missing { .. }), "{error}");
        assert!(error.to_string().contains(&second.display().to_string()), "{error}");
        if second.exists() {
            break;
        }
        fs::create_dir(&second).unwrap();
    }
    fs::remove_dir_all(&second).unwrap();
    let degraded = VolumeConfig { degraded: true, ..config(&first, &second) };
    let volume = Volume::open_with(degraded, options()).unwrap();
    assert!(!second.exists());
    read(&volume, &model);
    write(&volume, &mut model, &mut random);
    let status = volume.running().status().unwrap().copies;
    assert_eq!(status.iter().filter(|it| it.state.is_good()).count(), 1, "{status:?}");
    drop(volume);
    // The label of the first copy says by now that it is good alone.
    read(&open(&first, &second), &model);
    fs::rename(&away, &second).unwrap();
    assert_eq!(
        check(&first, &mut |_| {}).unwrap().copies.iter().filter(|it| it.state.is_good()).count(),
        1
    );
    let volume = open(&second, &first);
    read(&volume, &model);
    write(&volume, &mut model, &mut random);
    all_good(&volume);
    drop(volume);
    assert!(segments(&first) == segments(&second));
    fs::remove_dir_all(&first).unwrap();
    let alone = PoolPaths { degraded: true, ..PoolPaths::of(&second) };
    let running = Running::open_places(&alone, options()).unwrap();
    read(&Volume::open_in(running, VolumeConfig::new("pool", "v0")).unwrap(), &model);
}

/// The bug: a resync wrote the label of a copy whose file another directory had too.
#[test]
fn a_copy_with_a_hard_linked_label_is_refused() {
    let place = place("mirror-links");
    let path = |name: &str| place.path().join(name);
    let (first, second, linked) = (path("a"), path("b"), path("linked"));
    drop(open(&first, &second));
    fs::hard_link(second.join("copy"), &linked).unwrap();
    let label = fs::read(&linked).unwrap();
    let error = Volume::open_with(config(&first, &second), options()).unwrap_err().to_string();
    assert!(error.contains("`copy` has 2 names (hard links)"), "{error}");
    assert!(fs::read(&linked).unwrap() == label);
    fs::remove_file(&linked).unwrap();
    all_good(&open(&first, &second));
}

/// Copies the files of a directory; again from the start if one gets another name meanwhile, as a
/// new segment of an open pool does.
fn copy(from: &Path, to: &Path) {
    let copied = || {
        _ = fs::remove_dir_all(to);
        fs::create_dir(to).unwrap();
        fs::read_dir(from).unwrap().all(|entry| {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).is_ok()
        })
    };
    while !copied() {}
}

/// Replaces a directory by another one.
fn replace(directory: &Path, by: &Path) {
    fs::remove_dir_all(directory).unwrap();
    fs::rename(by, directory).unwrap();
}

/// The bug: a copy that was restored from a backup counted as good if the backup was taken while
/// the pool was open. After a clean close, the copies had one superblock in common; after a kill
/// all superblocks were equal, and only the log of the restored copy was shorter. When the other
/// copy was lost then, so were the newest data.
#[test]
fn a_copy_from_a_backup_of_an_open_pool_is_resynced() {
    for (restored, is_killed) in [(0, false), (1, false), (0, true), (1, true)] {
        let what = format!("copy {restored}, killed {is_killed}");
        let place = place(&format!("mirror-backup-{restored}-{is_killed}"));
        let path = |name: &str| place.path().join(name);
        let copies = [path("a"), path("b")];
        let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(11));
        let volume = open(&copies[0], &copies[1]);
        write(&volume, &mut model, &mut random);
        drop(volume);
        let volume = open(&copies[0], &copies[1]);
        copy(&copies[restored], &path("backup"));
        let mut io = handle(&volume);
        for block in 0..8 {
            let data = [block as u8 + 1; 4096];
            io.write(Sector(block * 8), &data, Flags::FUA).unwrap();
            model[block as usize * 4096..][..4096].copy_from_slice(&data);
        }
        drop(io);
        if is_killed {
            for (at, name) in ["killed-a", "killed-b"].into_iter().enumerate() {
                copy(&copies[at], &path(name));
            }
        }
        drop(volume);
        if is_killed {
            replace(&copies[0], &path("killed-a"));
            replace(&copies[1], &path("killed-b"));
        }
        replace(&copies[restored], &path("backup"));
        let seen = check(&copies[0], &mut |_| {}).unwrap().copies;
        assert_eq!(
            seen.iter().map(|it| it.state.is_good()).collect::<Vec<_>>(),
            [0, 1].map(|at| at != restored),
            "{what}"
        );
        let volume = open(&copies[0], &copies[1]);
        read(&volume, &model);
        all_good(&volume);
        drop(volume);
        assert!(segments(&copies[0]) == segments(&copies[1]), "{what}");
        fs::remove_dir_all(&copies[1 - restored]).unwrap();
        let alone = VolumeConfig { degraded: true, ..config(&copies[0], &copies[1]) };
        read(&Volume::open_with(alone, options()).unwrap(), &model);
    }
}

/// The bug: of two pools that were one pool once, a copy of each was opened together, and one copy
/// was overwritten by the other one.
#[test]
fn copies_of_two_pools_that_were_one_are_refused() {
    let place = place("mirror-cloned");
    let path = |name: &str| place.path().join(name);
    let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(12));
    let volume = open(&path("a"), &path("b"));
    write(&volume, &mut model, &mut random);
    drop(volume);
    copy(&path("a"), &path("clone-a"));
    copy(&path("b"), &path("clone-b"));
    for (first, second) in [("clone-a", "clone-b"), ("a", "b")] {
        let volume = open(&path(first), &path(second));
        write(&volume, &mut model.clone(), &mut random);
        drop(volume);
    }
    let before = ["a", "clone-b"].map(|name| segments(&path(name)));
    for (first, second) in [("a", "clone-b"), ("clone-b", "a")] {
        let error = refused(config(&path(first), &path(second)));
        assert!(matches!(&error, CopiesError::Split { .. }), "{error}");
    }
    assert!(before == ["a", "clone-b"].map(|name| segments(&path(name))));
}

/// Changes a byte of each unit that is equal in both directories.
fn spoil_what_both_have(directory: &Path, other: &Path) {
    for (name, bytes) in segments(directory) {
        let path = directory.join(&name);
        let mut quarantined = bytes.clone();
        let Ok(same) = fs::read(other.join(&name)) else { continue };
        let units = quarantined.chunks_mut(4096).zip(same.chunks(4096));
        for (unit, _) in units.filter(|(unit, same)| unit == same && unit.iter().any(|it| *it > 0))
        {
            unit[200] ^= 0x55;
        }
        if name.to_str().unwrap().starts_with("segment-") {
            fs::write(path, quarantined).unwrap();
        }
    }
}

/// Regression: a resync copied rotten blocks of the good copy over the other copy, which still had
/// them intact.
#[test]
fn damaged_blocks_are_repaired_before_the_other_copy_is_resynced() {
    let place = place("mirror-rot");
    let path = |name: &str| place.path().join(name);
    let (first, second, away) = (path("a"), path("b"), path("away"));
    let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(9));
    let volume = open(&first, &second);
    write(&volume, &mut model, &mut random);
    drop(volume);
    fs::rename(&second, &away).unwrap();
    let degraded = VolumeConfig { degraded: true, ..config(&first, &second) };
    let volume = Volume::open_with(degraded, options()).unwrap();
    let data = vec![7; 64 << 10];
    handle(&volume).write(Sector(0), &data, Flags::FUA).unwrap();
    model[..data.len()].copy_from_slice(&data);
    drop(volume);
    spoil_what_both_have(&first, &away);
    assert!(check(&first, &mut |_| {}).map_or(true, |found| found.damaged > 10));
    fs::rename(&away, &second).unwrap();
    let volume = open(&first, &second);
    // Nothing is read before: a reader repairs what it reads.
    all_good(&volume);
    let status = volume.running().status().unwrap().copies;
    assert!(status[0].repaired > 100, "{status:?}");
    read(&volume, &model);
    drop(volume);
    assert_eq!(check(&first, &mut |_| {}).unwrap().damaged, 0);
    assert_eq!(check(&second, &mut |_| {}).unwrap().damaged, 0);

    // A copy that cannot be opened is not copied to the other.
    fs::rename(&second, &away).unwrap();
    let degraded = VolumeConfig { degraded: true, ..config(&first, &second) };
    let volume = Volume::open_with(degraded, options()).unwrap();
    write(&volume, &mut model, &mut random);
    drop(volume);
    fs::rename(&away, &second).unwrap();
    quarantine(&first);
    let before = segments(&second);
    let error = Volume::open_with(config(&first, &second), options()).map(drop).unwrap_err();
    assert!(segments(&second) == before, "{error}");
}

/// Regression: while one copy was in use, the other one, whose label could not be read, was not
/// locked.
#[test]
fn a_copy_that_is_of_no_use_is_locked_with_the_other_one() {
    let place = place("mirror-aside");
    let (first, second) = (place.path().join("a"), place.path().join("b"));
    drop(open(&first, &second));
    fs::write(second.join("copy"), [1; 8192]).unwrap();
    let error = refused(config(&first, &second));
    assert!(matches!(error, CopiesError::Missing { .. }), "{error}");
    let degraded = VolumeConfig { degraded: true, ..config(&first, &second) };
    let volume = Volume::open_with(degraded, options()).unwrap();
    let error = PoolStore::take(&second).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(volume);
    drop(PoolStore::take(&second).unwrap());
}

/// A copy's directory is removed, or its label is damaged, while the pool is in use.
#[test]
fn a_copy_that_goes_while_it_is_used_is_given_up() {
    let place = place("mirror-goes");
    let (first, second) = (place.path().join("a"), place.path().join("b"));
    let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(8));
    let volume = open(&first, &second);
    write(&volume, &mut model, &mut random);
    // The pool may make a segment while its files are being removed.
    while let Err(error) = fs::remove_dir_all(&first) {
        match error.kind() {
            ErrorKind::NotFound => break,
            ErrorKind::DirectoryNotEmpty => (),
            _ => panic!("{error}"),
        }
    }
    // The committer checks this now and then, too.
    volume.running().pool().segments().directory().check_location().unwrap();
    let status = volume.running().status().unwrap().copies;
    let gone = status.iter().find(|it| it.path == first.display().to_string()).unwrap();
    assert!(!gone.state.is_good() && gone.why.is_some(), "{status:?}");
    write(&volume, &mut model, &mut random);
    read(&volume, &model);
    assert!(!volume.running().status().unwrap().latched);
    drop(volume);
    // The label of the remaining copy says that it is good alone.
    let volume = open(&first, &second);
    read(&volume, &model);
    drop(volume);
    let label = second.join("copy");
    let mut bytes = fs::read(&label).unwrap();
    bytes.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
    fs::write(&label, bytes).unwrap();
    let error = Running::open(&second, options()).unwrap_err().to_string();
    assert!(error.contains("`label of a copy`"), "{error}");
}

/// Attaches a copy to a pool that is not open, and waits for its resync.
fn attach(pool: &Path, new: &Path) -> Result<(), VolumeError> {
    let running = Running::open(pool, options())?;
    running.attach(new, None, false)?;
    running.wait_for_resync();
    Ok(())
}

#[test]
fn a_second_copy_is_attached_and_then_found() {
    let place = place("mirror-attach");
    let path = |name: &str| place.path().join(name);
    let (first, second) = (path("a"), path("b"));
    let one = VolumeConfig { path2: None, ..config(&first, &second) };
    let (mut model, mut random) = (vec![0; SIZE], fastrand::Rng::with_seed(7));
    let volume = Volume::open_with(one.clone(), options()).unwrap();
    write(&volume, &mut model, &mut random);
    drop(volume);
    let error = refused(config(&first, &second));
    assert!(error.to_string().contains("blockyard volume attach"), "{error}");
    fs::create_dir_all(&second).unwrap();
    fs::write(second.join("unrelated-file"), "").unwrap();
    let error = attach(&first, &second).unwrap_err().to_string();
    assert!(error.contains("unrelated-file"), "{error}");
    fs::remove_file(second.join("unrelated-file")).unwrap();
    attach(&first, &second).unwrap();
    fs::create_dir(path("c")).unwrap();
    let error = attach(&first, &path("c")).unwrap_err().to_string();
    assert!(error.contains("has two good copies"), "{error}");
    // Either path is sufficient.
    let volume = Volume::open_with(one, options()).unwrap();
    read(&volume, &model);
    write(&volume, &mut model, &mut random);
    assert_eq!(volume.running().status().unwrap().copies.len(), 2);
    drop(volume);
    assert!(segments(&first) == segments(&second));
    // The first copy is lost, and another one replaces it.
    fs::rename(&first, path("old")).unwrap();
    let alone = PoolPaths { degraded: true, ..PoolPaths::of(&second) };
    drop(Running::open_places(&alone, options()).unwrap());
    attach(&second, &path("c")).unwrap();
    let volume = open(&path("c"), &second);
    read(&volume, &model);
    drop(volume);
    assert!(segments(&path("c")) == segments(&second));
    // The copy that was replaced is foreign, however often it was opened alone.
    fs::rename(path("old"), &first).unwrap();
    for _ in 0..4 {
        let alone =
            PoolPaths { degraded: true, path2: Some(path("none")), ..PoolPaths::of(&first) };
        drop(Running::open_places(&alone, options()).unwrap());
    }
    let error = refused(config(&first, &second));
    assert!(matches!(error, CopiesError::Foreign { .. }), "{error}");
    let other = open(&path("d"), &path("e"));
    drop(other);
    let error = refused(config(&path("d"), &second));
    assert!(matches!(error, CopiesError::Foreign { .. }), "{error}");
    let error = refused(config(&path("d"), &path("c")));
    assert!(matches!(error, CopiesError::Foreign { .. }), "{error}");
}

#[test]
fn conflicting_parameters_are_refused_by_field() {
    let place = place("mirror-fields");
    let (first, second) = (place.path().join("a"), place.path().join("b"));
    let field = |config: VolumeConfig| match Volume::open_with(config, options()) {
        Err(error) => error.field().to_owned(),
        Ok(_) => panic!("it was opened"),
    };
    let good = config(&first, &second);
    assert_eq!(field(VolumeConfig { path2: Some(first.clone()), ..good.clone() }), "path2");
    assert_eq!(field(VolumeConfig { copies: 1, ..good.clone() }), "path2");
    assert_eq!(field(VolumeConfig { copies: 3, ..good.clone() }), "copies");
    assert_eq!(field(VolumeConfig { copies: 2, path2: None, ..good.clone() }), "copies");
    drop(Volume::open_with(VolumeConfig { copies: 2, ..good.clone() }, options()).unwrap());
    assert_eq!(field(VolumeConfig { copies: 1, path2: None, ..good.clone() }), "copies");
    // The lock of either copy excludes others.
    let volume = Volume::open_with(good.clone(), options()).unwrap();
    // Nothing is at another `path2`: the pool knows its copies. The volume is a device already.
    let third = place.path().join("c");
    assert_eq!(field(VolumeConfig { path2: Some(third.clone()), ..good.clone() }), "path");
    assert!(!third.exists());
    // A pool there is not passed over.
    drop(Running::open(&third, options()).unwrap());
    assert_eq!(field(VolumeConfig { path2: Some(third), ..good }), "path2");
    let named = Running::open(&second, options()).unwrap();
    assert!(Arc::ptr_eq(volume.running(), &named));
}

/// Several concurrent writers, with each way of committing.
#[test]
fn many_writers_by_each_way() {
    let place = place("mirror-ways");
    for (commit, store) in [
        (Commit::Group, StoreKind::Auto),
        (Commit::Group, StoreKind::Threads),
        (Commit::TaskQueue(8), StoreKind::Threads),
    ] {
        let (first, second) = (place.fresh(), place.fresh());
        let options = Options { commit, store, ..options() };
        let volume = Volume::open_with(config(&first, &second), options).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let volume = &volume;
                scope.spawn(move || {
                    let mut io = handle(volume);
                    for round in 0..50_u64 {
                        let len = if round % 10 == 0 { 512 << 10 } else { 4096 };
                        let data = vec![(thread * 31 + round) as u8; len];
                        io.write(Sector(thread * 4096), &data, Flags::FUA).unwrap();
                    }
                });
            }
        });
        drop(volume);
        assert!(segments(&first) == segments(&second), "{commit:?} {store:?}");
        assert_eq!(check(&first, &mut |_| {}).unwrap().damaged, 0);
    }
}
