//! Copies join and leave a pool on real files that is in use.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::{Flags, Sector};
use blockyard_store::{PoolPaths, is_pool};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig};
use blockyard_volume_admin::check::check;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn directory(place: &TempDir, name: &str) -> PathBuf {
    let path = place.path().join(name);
    fs::create_dir(&path).unwrap();
    path.canonicalize().unwrap()
}

fn disk(place: &TempDir, name: &str, bytes: u64) -> PathBuf {
    let path = place.path().join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path.canonicalize().unwrap()
}

fn options() -> Options {
    Options { segment_bytes: 4 << 20, ..Options::default() }
}

fn config(path: &Path) -> VolumeConfig {
    let (size, compress) = (SIZE, Compression::None);
    VolumeConfig { size, volblocksize: 4096, compress, ..VolumeConfig::new(path, "v0") }
}

fn open(path: &Path) -> Arc<Volume> {
    Volume::open_with(config(path), options()).unwrap()
}

/// Writes `byte` to the first 4 MiB, durably.
fn fill(volume: &Arc<Volume>, byte: u8) {
    let mut io = handle(volume);
    for at in 0..4 {
        let data = vec![byte; MIB as usize];
        io.write(Sector(at * 2048), &data, Flags::FUA).unwrap();
    }
}

fn verify(volume: &Arc<Volume>, byte: u8) {
    let mut io = handle(volume);
    for at in 0..4 {
        let mut found = vec![0; MIB as usize];
        io.read(Sector(at * 2048), &mut found).unwrap();
        assert!(found.iter().all(|it| *it == byte), "at {at} MiB");
    }
}

fn refused(running: &Running, new: &Path, replaces: Option<&Path>) -> String {
    running.attach(new, replaces, false).unwrap_err().to_string()
}

#[test]
fn copies_in_directories_join_and_leave_while_a_client_writes() {
    let place = place("replace-directory");
    let [a, b, c] = ["a", "b", "c"].map(|name| directory(&place, name));
    let volume = open(&a);
    let running = Arc::clone(volume.running());
    fill(&volume, 1);
    // What is not ours is never overwritten.
    fs::write(b.join("notes"), "mine").unwrap();
    let error = refused(&running, &b, None);
    assert!(error.contains("it holds `notes`"), "{error}");
    fs::remove_file(b.join("notes")).unwrap();
    let other = directory(&place, "other");
    drop(Running::open(&other, options()).unwrap());
    let error = refused(&running, &other, None);
    assert!(error.contains("it holds a pool"), "{error}");
    let [first, second] = ["first", "second"].map(|name| directory(&place, name));
    let paths = PoolPaths { path2: Some(second.clone()), ..PoolPaths::of(&first) };
    drop(Running::open_places(&paths, options()).unwrap());
    // A pool counts on these: consent does not suffice.
    for (path, what) in [(&other, "it holds a pool"), (&second, "it holds a copy (`copy`)")] {
        let error = running.attach(path, None, true).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert!(is_pool(path).unwrap());
    }
    let error = refused(&running, &place.path().join("none"), None);
    assert!(error.starts_with("invalid new") && error.contains("mkdir"), "{error}");
    let error = refused(&running, &a, None);
    assert!(error.contains("a path that is no copy of this pool yet"), "{error}");
    let error = running.detach(&a).unwrap_err().to_string();
    assert!(error.contains("last good copy"), "{error}");

    running.attach(&b, None, false).unwrap();
    fill(&volume, 2);
    running.wait_for_resync();
    assert!(running.status().unwrap().copies.iter().all(|copy| copy.state.is_good()));
    let error = refused(&running, &c, None);
    assert!(error.contains("has two good copies"), "{error}");
    // The first one leaves, by which the pool is named.
    running.attach(&c, Some(&a), false).unwrap();
    fill(&volume, 3);
    running.wait_for_resync();
    assert_eq!(running.path(), b);
    verify(&volume, 3);
    fill(&volume, 4);
    // The configuration still names it.
    drop(open_named(&a));
    drop((volume, running));
    let volume = open(&a);
    assert_ne!(volume.running().path(), a);
    verify(&volume, 4);
    detach_while_idle(&volume, &b, 4);
    drop(volume);
    assert_eq!(check(&c, &mut |_| {}).unwrap().damaged, 0);
    let volume = open(&c);
    assert_eq!(volume.running().status().unwrap().copies, []);
    verify(&volume, 4);
    drop(volume);
    // Without the pool that it names, a copy that was detached is refused.
    fs::remove_dir_all(&c).unwrap();
    let error = Running::open(&b, options()).unwrap_err().to_string();
    assert!(error.contains("was detached from the pool at"), "{error}");
    assert!(is_pool(&b).unwrap(), "nothing was made or removed there");
}

/// How many files of a directory, or the directory itself, are open here or registered in a ring.
fn open_in(path: &Path) -> usize {
    let path = path.to_str().unwrap();
    let is_in = |line: &str| line.ends_with(path) || line.contains(&format!("{path}/"));
    let link = |fd: &fs::DirEntry| fs::read_link(fd.path()).ok()?.to_str().map(is_in);
    let fds = fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap);
    let count = |fd: fs::DirEntry| {
        let info = Path::new("/proc/self/fdinfo").join(fd.file_name());
        let info = fs::read_to_string(info).unwrap_or_default();
        usize::from(link(&fd) == Some(true)) + info.lines().filter(|line| is_in(line)).count()
    };
    fds.map(count).sum()
}

/// How often a test looks whether a copy is closed. The committer looks ten times a second, and a
/// look of the test takes about 100 us.
const LOOKS_MAX: usize = 300_000;

/// Regression: an idle queue and the idle committer kept a copy open that was detached, so that its
/// file system could not be unmounted, or its disk could not be used. The volume has been filled
/// with `byte`.
fn detach_while_idle(volume: &Arc<Volume>, copy: &Path, byte: u8) {
    let mut io = handle(volume);
    let mut read = || {
        let mut found = vec![0; MIB as usize];
        io.read(Sector(2048), &mut found).unwrap();
        assert!(found.iter().all(|it| *it == byte));
    };
    (0..3).for_each(|_| read());
    assert_ne!(open_in(copy), 0);
    volume.running().detach(copy).unwrap();
    let is_closed = (0..LOOKS_MAX).any(|_| {
        std::thread::yield_now();
        open_in(copy) == 0
    });
    assert!(is_closed, "{} is still open", copy.display());
    read();
}

/// Another device of the pool, whose configuration has the old path.
fn open_named(path: &Path) -> Arc<Running> {
    Running::open_places(&PoolPaths::of(path), options()).unwrap()
}

#[test]
fn a_pool_grows_when_its_disk_is_replaced_by_a_larger_one() {
    let place = place("replace-disk");
    let small = disk(&place, "small", 96 * MIB);
    let large = disk(&place, "large", 192 * MIB);
    let volume = open(&small);
    let running = Arc::clone(volume.running());
    fill(&volume, 1);
    // Regression: a disk whose copy was detached was refused.
    let again = disk(&place, "again", 96 * MIB);
    running.attach(&again, None, false).unwrap();
    running.wait_for_resync();
    running.detach(&again).unwrap();
    fill(&volume, 2);
    let error = refused(&running, &again, None);
    assert!(error.contains("was detached from the pool") && error.contains("--force"), "{error}");
    running.attach(&again, None, true).unwrap();
    running.wait_for_resync();
    let copies = running.status().unwrap().copies;
    assert!(copies.len() == 2 && copies.iter().all(|copy| copy.state.is_good()), "{copies:?}");
    detach_while_idle(&volume, &again, 2);
    fill(&volume, 1);
    let error = refused(&running, &disk(&place, "short", 90 * MIB), Some(&small));
    assert!(error.contains("a disk that is as long"), "{error}");
    let error = refused(&running, &directory(&place, "directory"), Some(&small));
    assert!(error.contains("expected a disk"), "{error}");
    let before = running.status().unwrap().available_bytes;
    running.attach(&large, Some(&small), false).unwrap();
    running.wait_for_resync();
    fill(&volume, 2);
    let after = running.status().unwrap().available_bytes;
    assert!(after > before + 64 * MIB, "{before} {after}");
    assert_eq!(running.path(), large);
    // Nothing of a disk that is too short is erased.
    let error = running.attach(&small, None, true).unwrap_err().to_string();
    assert!(error.contains("a disk that is as long"), "{error}");
    assert!(is_pool(&small).unwrap());
    drop((volume, running));
    let volume = open(&large);
    verify(&volume, 2);
    assert_eq!(volume.running().status().unwrap().copies, []);
    drop(volume);
    assert_eq!(check(&large, &mut |_| {}).unwrap().damaged, 0);
}

#[test]
fn a_resync_is_limited_paused_and_continued_by_an_opening() {
    let place = place("replace-rate");
    let [a, b, c] = ["a", "b", "c"].map(|name| directory(&place, name));
    let volume = open(&a);
    let running = Arc::clone(volume.running());
    fill(&volume, 1);
    // The second piece waits for days.
    running.set_resync_rate(1);
    running.attach(&b, None, false).unwrap();
    running.pause_resync(true);
    let progress = running.resync_progress().unwrap();
    assert!(progress.is_paused && progress.limit_bytes == 1 && progress.path == b);
    assert_eq!(progress.left_s(), None, "nothing is estimated while it is paused");
    // Regression: another copy that joined then was never resynced.
    running.detach(&b).unwrap();
    running.attach(&c, None, false).unwrap();
    assert!(!running.resync_progress().unwrap().is_paused);
    running.set_resync_rate(0);
    running.wait_for_resync();
    let copies = running.status().unwrap().copies;
    assert!(copies.len() == 2 && copies.iter().all(|copy| copy.state.is_good()), "{copies:?}");
    running.detach(&a).unwrap();

    // Regression: a directory whose copy was detached was refused.
    let error = refused(&running, &b, Some(&c));
    assert!(error.contains("was detached from the pool") && error.contains("--force"), "{error}");
    running.set_resync_rate(1);
    running.attach(&b, Some(&c), true).unwrap();
    fill(&volume, 2);
    drop((volume, running));
    // A configuration may name the new copy already.
    let volume = open(&b);
    assert_eq!(volume.running().path(), c);
    volume.running().wait_for_resync();
    assert_eq!(volume.running().path(), b);
    // Regression: the process did not find the pool by the path of the new copy.
    assert_eq!(open_named(&b).path(), b);
    drop(volume);
    fs::remove_dir_all(&c).unwrap();
    let running = Running::open(&b, options()).unwrap();
    verify(&Volume::open_in(running, VolumeConfig::new(&b, "v0")).unwrap(), 2);
}

/// Regression: blocks that were damaged in the copy that stayed were copied, and the copy that was
/// replaced had the only intact ones. So were the blocks of a hidden snapshot.
#[test]
fn blocks_are_repaired_before_the_copy_leaves_that_has_them() {
    for is_hidden in [false, true] {
        let place = place(&format!("replace-rot-{is_hidden}"));
        let [a, b, c] = ["a", "b", "c"].map(|name| directory(&place, name));
        let config = VolumeConfig { path2: Some(b.clone()), ..config(&a) };
        let volume = Volume::open_with(config, options()).unwrap();
        let running = Arc::clone(volume.running());
        fill(&volume, 9);
        let mut now = 9;
        if is_hidden {
            // Only a snapshot that exists while it is sent has the blocks.
            running.snapshot_unseen("v0").unwrap();
            now = 8;
            fill(&volume, now);
        }
        let mut rotten = 0;
        for entry in fs::read_dir(&a).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            // A segment may be in the making.
            if !name.starts_with("segment-") || name.ends_with(".new") {
                continue;
            }
            let file = File::options().read(true).write(true).open(entry.path()).unwrap();
            let mut bytes = vec![0; 4 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            let is_old = |at: &usize| bytes[*at..at + 4096] == [9; 4096];
            for at in (0..bytes.len()).step_by(64 << 10).filter(is_old) {
                file.write_all_at(&[0; 512], at as u64).unwrap();
                rotten += 1;
            }
            file.sync_all().unwrap();
        }
        assert!(rotten > 10, "{rotten}");
        running.attach(&c, Some(&b), false).unwrap();
        running.wait_for_resync();
        assert!(running.status().unwrap().copies.iter().all(|copy| copy.state.is_good()));
        verify(&volume, now);
        running.detach(&a).unwrap();
        verify(&volume, now);
        drop((volume, running));
        assert_eq!(check(&c, &mut |_| {}).unwrap().damaged, 0, "hidden: {is_hidden}");
    }
}
