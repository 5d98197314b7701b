//! Removes the remains of killed tests: folders, with their mounts and loop devices. A file system
//! on a loop device whose file has lost its server blocks every program that reads all mounts, as
//! mkfs.btrfs does.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{env, iter};

use crate::attach::unmount_lazily;
use crate::run::run;

/// The prefix of the folders' names. No name of the program's own has it.
pub(crate) const PREFIX: &str = "blockyard-test-";

/// Locks a folder for as long as the result lives. `None` if another process holds the lock, or the
/// folder is gone.
pub(crate) fn hold(path: &Path) -> Option<File> {
    let held = File::open(path).ok()?;
    held.try_lock().ok()?;
    // The former holder may have removed the folder.
    let (held_is, is) = (held.metadata().ok()?, fs::metadata(path).ok()?);
    ((held_is.dev(), held_is.ino()) == (is.dev(), is.ino())).then_some(held)
}

/// Removes the folders that no process has locked: a test holds its lock until it ends in any way.
/// A server that survived its test loses its folder too.
pub(crate) fn take_away() {
    let Ok(all) = env::temp_dir().canonicalize() else { return };
    for folder in fs::read_dir(all).into_iter().flatten().flatten() {
        if folder.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX))
            && let Some(_held) = hold(&folder.path())
        {
            take(&folder.path());
        }
    }
}

/// Removes one locked folder.
fn take(path: &Path) {
    // Listed first: after a lazy unmount the file of a loop device has another path.
    let loops: Vec<_> = loops().filter(|(_, file)| Path::new(file).starts_with(path)).collect();
    // Mounts are removed last to first, because later ones lie on earlier ones.
    mounts(path).iter().rev().for_each(|at| unmount_lazily(at));
    for (device, _) in loops {
        let _ = run(&["losetup", "--detach", &device]);
    }
    if mounts(path).is_empty() {
        // A file that cannot be removed belongs to another user.
        let _ = fs::remove_dir_all(path);
    }
}

/// The mount points in a folder.
fn mounts(path: &Path) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let all = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    all.filter(|at| Path::new(at).starts_with(path)).map(str::to_owned).collect()
}

/// The loop devices in use, with their files.
fn loops() -> impl Iterator<Item = (String, String)> {
    let blocks = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    blocks.filter_map(|block| {
        let file = fs::read_to_string(block.path().join("loop/backing_file")).ok()?;
        let file = file.trim_end().to_owned();
        (!file.is_empty()).then_some((format!("/dev/{}", block.file_name().to_str()?), file))
    })
}

/// Needs root, for mounts.
#[test]
fn the_remains_of_a_killed_test_are_removed() {
    use crate::attach::{FileSystem, Loop};
    let all = env::temp_dir().canonicalize().unwrap();
    let path = all.join(format!("{PREFIX}left-{}", std::process::id()));
    let at = |name: &str| path.join(name).to_str().unwrap().to_owned();
    fs::create_dir(&path).unwrap();
    let held = hold(&path).unwrap();
    let (below, above) = (at("below"), at("above"));
    fs::create_dir(&below).unwrap();
    run(&["mount", "-t", "tmpfs", "-o", "size=32M", "left", &below]).ok();
    let image = at("below/image");
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let device = Loop::attach(&image);
    run(&["mkfs.ext4", "-q", &device.0]).ok();
    let files = FileSystem::mount("ext4", &device.0, &above);
    // After a lazy unmount only the rest of the path is shown.
    let is_used = || loops().any(|(name, file)| name == device.0 && image.ends_with(&file));
    // A locked folder is not removed.
    take_away();
    assert!(is_used() && path.join("above/lost+found").exists());
    drop(held);
    // Another process may be removing it at the same time.
    let mut tries = iter::repeat_with(take_away).take(1000);
    assert!(tries.any(|()| !path.exists() && !is_used()), "it is still there");
    assert_eq!(mounts(&path), [""; 0]);
    // Another test may have the loop device by now.
    std::mem::forget((files, device));
}
