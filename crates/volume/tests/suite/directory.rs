//! A pool is made only in a directory that contains nothing else; other files are left unchanged.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use blockyard_core::{Flags, Sector};
use blockyard_store::{PoolPaths, is_pool};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Options, Running, Volume, VolumeConfig};
use blockyard_volume_admin::check::check;

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn options() -> Options {
    Options { segment_bytes: 4 << 20, ..Options::default() }
}

/// The files of a directory, with their contents.
fn held(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(path).unwrap().map(Result::unwrap);
    let held = |it: fs::DirEntry| (it.file_name().into_string().unwrap(), fs::read(it.path()));
    entries.map(held).map(|(name, bytes)| (name, bytes.unwrap_or_default())).collect()
}

fn refused(opened: Result<std::sync::Arc<Running>, blockyard_volume::VolumeError>) -> String {
    opened.unwrap_err().to_string()
}

/// Regression: a superblock that was truncated after its first slot was refused, although that slot
/// is sufficient.
#[test]
fn a_superblock_that_is_cut_after_its_first_slot_is_read() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "superblock-cut");
    let path = place.path().join("pool");
    let options = Options { segment_bytes: 1 << 20, ..Options::default() };
    for round in 0..3 {
        drop(Running::open(&path, options).unwrap());
        let file = std::fs::File::options().write(true).open(path.join("superblock")).unwrap();
        file.set_len(4096 + round * 1000).unwrap();
        check(&path, &mut |_| {}).unwrap();
    }
    let file = std::fs::File::options().write(true).open(path.join("superblock")).unwrap();
    file.set_len(4095).unwrap();
    let error = check(&path, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("ends after 4095 bytes"), "{error}");
}

/// Regression: a disk that answers EIO was reported as containing no pool.
#[test]
fn a_place_that_cannot_be_read_is_not_said_to_hold_no_pool() {
    // A read of this file at offset 0, where nothing is mapped, fails with EIO.
    let error = check(Path::new("/proc/self/mem"), &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("Input/output error"), "{error}");
}

/// Regression: a pool was made among other files, and a file `lock` among them was truncated.
#[test]
fn a_directory_with_other_things_becomes_no_pool() {
    let place = place("other-things");
    let cases: [&[(&str, &str)]; 9] = [
        &[("notes", "mine\n")],
        &[("lock", "hi\n")],
        &[("lock", ""), ("a", "1"), ("b", "2")],
        &[("lock", "pid 1\n"), ("lock.new", "x"), ("segment-00000000", "")],
        &[("copy.new", ""), ("segment-x", "mine\n")],
        // Regression: a creation overwrote these, and its removal after a refusal removed them.
        &[("lock", ""), ("copy.new", "mine\n")],
        &[("superblock.new", "mine\n")],
        &[("segment-00000007.new", "mine\n")],
        &[("segment-00000009", "mine\n")],
    ];
    let names = ["notes", "lock", "a", "lock.new", "segment-x"].into_iter();
    let names = names.chain(["copy.new", "superblock.new"]);
    let names = names.chain(["segment-00000007.new", "segment-00000009"]);
    for (case, name) in cases.into_iter().zip(names) {
        let path = place.fresh();
        fs::create_dir(&path).unwrap();
        for (name, text) in case {
            fs::write(path.join(name), text).unwrap();
        }
        let before = held(&path);
        for consent in [false, true] {
            let error = refused(Running::open(&path, Options { consent, ..options() }));
            let wanted = format!(
                "invalid path `{}`: expected an empty directory to make a pool in, for example \
                 one below it (one that is not there is made); it holds `{name}`",
                path.display()
            );
            assert_eq!(error, wanted);
            assert_eq!(held(&path), before);
        }
    }
    // A foreign `superblock` is refused as invalid, and no other file is made.
    let path = place.fresh();
    fs::create_dir(&path).unwrap();
    fs::write(path.join("superblock"), "foreign ".repeat(1000)).unwrap();
    let before = held(&path);
    let error = refused(Running::open(&path, options()));
    assert!(
        error.contains("invalid `superblock`: expected its magic number at offset 0"),
        "{error}"
    );
    assert_eq!(held(&path), before);
}

#[test]
fn an_empty_directory_or_an_interrupted_create_becomes_a_pool() {
    let place = place("begun");
    let path = place.fresh();
    fs::create_dir_all(path.join("lost+found")).unwrap();
    drop(Running::open(&path, options()).unwrap());
    let path = place.fresh();
    fs::create_dir(&path).unwrap();
    for (name, begun) in [
        ("segment-00000000.new", &[0; 100][..]),
        ("superblock.new", b"BLKYVOL\n and zeros"),
        ("copy.new", b""),
    ] {
        fs::write(path.join(name), begun).unwrap();
    }
    // A power cut may leave zeros in `lock`.
    fs::write(path.join("lock"), [0; 6]).unwrap();
    drop(Running::open(&path, options()).unwrap());
    assert!(is_pool(&path).unwrap());
}

/// Regression: a pair was refused for used segments without a superblock after a label was written
/// to both copies and a segment to the new one.
#[test]
fn used_segments_without_a_superblock_are_refused_and_nothing_is_written() {
    let place = place("segments");
    for used in [&[0][..], &[1], &[2], &[]] {
        let (path, new) = (place.fresh(), place.fresh());
        fs::create_dir(&path).unwrap();
        fs::write(path.join("lock"), "").unwrap();
        // A creation makes three segments before the superblock.
        for number in 0..if used.is_empty() { 4 } else { 3 } {
            let text = if used.contains(&number) { "data" } else { "" };
            let mut bytes = text.as_bytes().to_vec();
            bytes.resize(4 << 20, 0);
            fs::write(path.join(format!("segment-{number:08x}")), bytes).unwrap();
        }
        let before = held(&path);
        let second = (!used.is_empty()).then(|| new.join("b"));
        for path2 in [None, second] {
            let paths = PoolPaths { path2, ..PoolPaths::of(&path) };
            let error = refused(Running::open_places(&paths, options()));
            assert!(error.contains("has segments of a pool, but no superblock"), "{error}");
            assert_eq!(held(&path), before);
            assert!(!new.exists());
        }
    }
}

/// Regression: `superblock.new` was a symbolic link, and a creation overwrote the file to which it
/// led.
#[test]
fn a_creation_follows_no_symbolic_link() {
    let place = place("link");
    let (path, other) = (place.fresh(), place.fresh());
    fs::create_dir(&path).unwrap();
    for kept in ["", "kept"] {
        fs::write(&other, kept).unwrap();
        std::os::unix::fs::symlink(&other, path.join("superblock.new")).unwrap();
        let error = refused(Running::open(&path, options()));
        assert!(error.contains("it holds `superblock.new`"), "{error}");
        assert_eq!(fs::read_to_string(&other).unwrap(), kept);
        fs::remove_file(path.join("superblock.new")).unwrap();
    }
}

/// Earlier versions made pools among other files, and files may have been added to a pool later.
#[test]
fn an_existing_pool_opens_among_other_files() {
    let place = place("among");
    let path = place.fresh();
    drop(Running::open(&path, options()).unwrap());
    for lock in [Some("hi\n"), Some("pid 1\n"), None] {
        fs::write(path.join("notes"), "mine\n").unwrap();
        match lock {
            Some(text) => fs::write(path.join("lock"), text).unwrap(),
            None => fs::remove_file(path.join("lock")).unwrap(),
        }
        let running = Running::open(&path, options()).unwrap();
        let said = fs::read_to_string(path.join("lock")).unwrap();
        let ours = format!("pid {}\nstarted ", std::process::id());
        if lock == Some("hi\n") {
            assert_eq!(said, "hi\n");
        } else {
            assert!(said.starts_with(&ours), "{said}");
        }
        drop(running);
        let left = fs::read_to_string(path.join("lock")).unwrap();
        assert_eq!(left, if lock == Some("hi\n") { "hi\n" } else { "" });
        assert_eq!(fs::read_to_string(path.join("notes")).unwrap(), "mine\n");
    }
}

/// Regression: a refused opening left empty directories.
#[test]
fn an_opening_that_refuses_its_second_path_removes_the_directories_that_it_made() {
    let place = place("same");
    let path = place.fresh();
    let both = PoolPaths { path2: Some(path.clone()), ..PoolPaths::of(&path) };
    let error = refused(Running::open_places(&both, options()));
    assert!(error.contains("another path than `path`"), "{error}");
    assert!(!path.exists());
    // A directory that was there stays.
    fs::create_dir(&path).unwrap();
    let error = refused(Running::open_places(&both, options()));
    assert!(error.contains("another path than `path`"), "{error}");
    assert!(path.exists());
}

#[test]
fn neither_copy_is_made_among_other_files() {
    let place = place("copies");
    let (first, second) = (place.fresh(), place.fresh());
    fs::create_dir(&second).unwrap();
    fs::write(second.join("lock"), "hi\n").unwrap();
    let before = held(&second);
    let both = PoolPaths { path2: Some(second.clone()), ..PoolPaths::of(&first) };
    let error = refused(Running::open_places(&both, options()));
    assert!(error.contains(&second.display().to_string()), "{error}");
    assert!(error.contains("it holds `lock`") && !is_pool(&first).unwrap(), "{error}");
    assert_eq!(held(&second), before);
    drop(Running::open(&first, options()).unwrap());
    let attach = |consent| {
        let running = Running::open(&first, options()).unwrap();
        running.attach(&second, None, consent).inspect(|()| running.wait_for_resync())
    };
    let error = attach(true).unwrap_err().to_string();
    assert!(error.contains("it holds `lock`"), "{error}");
    assert_eq!(held(&second), before);
    // The failed `attach` changed nothing: the pool still has one copy.
    drop(Running::open(&first, options()).unwrap());
    fs::remove_file(second.join("lock")).unwrap();
    attach(false).unwrap();
    fs::write(second.join("notes"), "mine\n").unwrap();
    drop(Running::open_places(&both, options()).unwrap());
}

/// The permission bits of a file or directory.
fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// Regression: files of pools had mode 0644 in directories of mode 0755. Any local user could read
/// every volume, and could block the pool by locking `lock`.
#[test]
fn a_pool_that_other_users_could_read_is_its_owners_alone_after_an_opening() {
    let place = place("modes");
    let path = place.fresh();
    drop(Running::open(&path, options()).unwrap());
    let files = || fs::read_dir(&path).unwrap().map(|it| it.unwrap().path());
    assert_eq!(mode(&path), 0o700);
    for file in files() {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    }
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    drop(Running::open(&path, options()).unwrap());
    assert_eq!(mode(&path), 0o700);
    for file in files() {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}

/// Regression: a pool in a file used as a disk had the permissions that the umask of the file's
/// creator left.
#[test]
fn a_file_that_becomes_a_disk_is_its_owners_alone() {
    let place = place("disk-modes");
    let path = place.fresh();
    fs::File::create(&path).unwrap().set_len(128 << 20).unwrap();
    for given in [0o644, 0o666] {
        fs::set_permissions(&path, Permissions::from_mode(given)).unwrap();
        drop(Running::open(&path, options()).unwrap());
        assert_eq!(mode(&path), 0o600);
    }
}

/// Regression: a user without permission for a pool was told that the directory contains no pool,
/// and made another one. A place is empty only if the system says so. A symbolic link to itself
/// fails for root too.
#[test]
fn a_place_that_cannot_be_looked_at_is_not_one_without_a_pool() {
    let place = place("folder-no-look");
    let link = place.path().join("link");
    std::os::unix::fs::symlink("link", &link).unwrap();
    assert!(!is_pool(&place.path().join("none")).unwrap());
    for path in [link.clone(), link.join("pool")] {
        let error = is_pool(&path).unwrap_err().to_string();
        let wanted = format!("cannot examine `{}`: ", path.display());
        assert!(error.starts_with(&wanted) && error.contains("(os error 40)"), "{error}");
        let error = check(&path, &mut |_| {}).unwrap_err().to_string();
        assert!(error.starts_with(&wanted), "{error}");
    }
}

/// Bytes that the file system has allocated for the files of a directory.
fn allocated(path: &Path) -> u64 {
    let files = fs::read_dir(path).unwrap();
    files.map(|it| it.unwrap().metadata().unwrap().blocks() * 512).sum()
}

/// Regression: a new pool with an empty volume wrote 13 segments of 32 MiB, 417 MiB, most of them
/// for writes that might come.
#[test]
fn a_new_pool_allocates_little_until_its_first_write() {
    const MIB: u64 = 1 << 20;
    let place = place("new-pool");
    let path = place.fresh();
    let config = VolumeConfig { size: 64 * MIB, ..VolumeConfig::new(&path, "v0") };
    let open = || Volume::open(config.clone()).unwrap();
    let space = rustix::fs::statvfs(place.path()).unwrap();
    let space = space.f_bavail * space.f_frsize;
    let segment_bytes = {
        let volume = open();
        volume.running().status().unwrap().segment_bytes
    };
    // Closing the pool waits for the thread that makes segments.
    let new = allocated(&path);
    if space < 1 << 40 {
        assert!(segment_bytes <= 16 * MIB && new <= 130 * MIB, "{new} bytes");
    }
    assert!(new <= 8 * segment_bytes + MIB, "{new} bytes, in segments of {segment_bytes}");
    // Opening the pool again allocates nothing. The first write makes space for those after it.
    drop(open());
    assert_eq!(allocated(&path), new);
    let volume = open();
    handle(&volume).write(Sector(0), &[7; 4096], Flags::FUA).unwrap();
    drop(volume);
    let ready = allocated(&path) - new;
    assert!(ready >= 80 * MIB, "{ready} bytes are ready for writes");
}
