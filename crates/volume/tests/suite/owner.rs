//! Only one process has a pool open, whatever is deleted, renamed or restored meanwhile.
//!
//! The test starts itself as the owner. The owner opens the pool, and for each line on its standard
//! input writes a block durably and prints the result, or prints whether the pool is latched.

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use blockyard_core::{Flags, Sector};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Options, Running, Volume, VolumeConfig};

use crate::loop_device::LoopDevice;

/// The environment variable with the owner's directory.
const DIRECTORY: &str = "BLOCKYARD_VOLUME_OWNER_DIRECTORY";

const BLOCK: usize = 4096;

/// Offset of the owner's entry on a disk: after the two slots of the superblock.
const HOLDER_AT: u64 = 2 * 4096;

/// Most writes until one must fail: many more than there are between two checkpoints.
const WRITES_MAX: usize = 100_000;

/// Most questions for the state of a process until it must have noticed something.
const STATES_MAX: usize = 1_000_000;

fn options() -> Options {
    Options { segment_bytes: 1 << 20, checkpoint_bytes: 512 << 10, ..Options::default() }
}

fn open(path: &Path) -> Result<Arc<Volume>, blockyard_volume::VolumeError> {
    let config = VolumeConfig { size: 16 << 20, ..VolumeConfig::new(path, "v") };
    Volume::open_with(VolumeConfig { volblocksize: 4096, ..config }, options())
}

fn refused(path: &Path) -> String {
    Running::open(path, options()).unwrap_err().to_string()
}

/// The process that has the pool open.
#[test]
fn owner() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let volume = open(Path::new(&directory)).unwrap();
    let mut io = handle(&volume);
    println!("owner: open");
    for (number, line) in std::io::stdin().lines().enumerate() {
        let line = line.unwrap();
        if line == "state" {
            let is_latched = volume.running().status().unwrap().latched;
            println!("owner: {}", if is_latched { "latched" } else { "running" });
            continue;
        }
        let until_it_fails = line == "until it fails";
        let mut written = Ok(());
        for write in number..number + if until_it_fails { WRITES_MAX } else { 1 } {
            let bytes = vec![write as u8 | 1; BLOCK];
            written = io.write(Sector(write as u64 % 4096 * 8), &bytes, Flags::FUA);
            if written.is_err() {
                break;
            }
        }
        println!("owner: {}", if written.is_ok() { "written" } else { "failed" });
    }
}

/// A child process that has a pool open.
struct Owner {
    child: Child,
    input: Option<ChildStdin>,
    said: Lines<BufReader<ChildStdout>>,
}

impl Owner {
    fn start(directory: &Path) -> Owner {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["owner::owner", "--exact", "--nocapture"]).env(DIRECTORY, directory);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut owner = Owner { input: child.stdin.take(), child, said };
        assert_eq!(owner.next(), "open");
        owner
    }

    fn next(&mut self) -> String {
        let is_it = |line: String| line.split_once("owner: ").map(|(_, text)| text.to_owned());
        self.said.by_ref().find_map(|line| is_it(line.unwrap())).expect("it says how that went")
    }

    fn tell(&mut self, line: &str) -> String {
        writeln!(self.input.as_ref().unwrap(), "{line}").unwrap();
        self.next()
    }

    fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Regression: the file `lock` of a pool in use was deleted. A second yard then opened the pool,
/// and the two overwrote each other's log.
#[test]
fn no_second_process_gets_in_whatever_is_deleted_or_renamed() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "owner");
    let (pool, moved, third) = (place.fresh(), place.fresh(), place.fresh());
    let mut owner = Owner::start(&pool);
    let in_use = |path: &Path| {
        let error = refused(path);
        assert!(error.contains("in use by"), "{error}");
    };
    in_use(&pool);
    std::fs::remove_file(pool.join("lock")).unwrap();
    in_use(&pool);
    assert!(!pool.join("lock").exists(), "one that was refused makes nothing");
    std::fs::write(pool.join("lock"), "").unwrap();
    in_use(&pool);
    assert_eq!(owner.tell("write"), "written");
    // Another directory with a hard link to the superblock, as after the pool's files were moved
    // one by one.
    std::fs::create_dir(&third).unwrap();
    std::fs::hard_link(pool.join("superblock"), third.join("superblock")).unwrap();
    in_use(&third);
    // The directory is renamed, and a copy put in its place: these are two pools, each with its own
    // owner.
    std::fs::rename(&pool, &moved).unwrap();
    in_use(&moved);
    copy(&moved, &pool);
    assert_eq!(owner.tell("write"), "written");
    let other = open(&pool).unwrap();
    handle(&other).write(Sector(8000), &[7; BLOCK], Flags::FUA).unwrap();
    drop(other);
    for _ in 0..300 {
        assert_eq!(owner.tell("write"), "written");
    }
    owner.end();
    let mut bytes = vec![0; BLOCK];
    let volume = open(&moved).unwrap();
    handle(&volume).read(Sector(300 * 8), &mut bytes).unwrap();
    assert_eq!(bytes, [(300 | 1) as u8; BLOCK]);
    handle(&volume).read(Sector(8000), &mut bytes).unwrap();
    assert_eq!(bytes, [0; BLOCK]);
}

/// After the superblock was restored to an older state, an opening would not find what the process
/// writes, so the process must stop.
#[test]
fn a_process_whose_superblock_was_replaced_or_restored_stops() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "restored");
    for replaces in [false, true] {
        let pool = place.fresh();
        drop(open(&pool).unwrap());
        let superblock = pool.join("superblock");
        let before = std::fs::read(&superblock).unwrap();
        let mut owner = Owner::start(&pool);
        assert_eq!(owner.tell("write"), "written");
        if replaces {
            // `cp --remove-destination` does the same.
            std::fs::write(pool.join("other"), &before).unwrap();
            std::fs::rename(pool.join("other"), &superblock).unwrap();
        } else {
            std::fs::write(&superblock, &before).unwrap();
        }
        assert_eq!(owner.tell("until it fails"), "failed", "replaces: {replaces}");
        // The directory is still locked by the owner.
        let error = refused(&pool);
        assert!(error.contains("in use by"), "{error}");
        owner.end();
    }
}

/// Regression: two loop devices on one file, as two paths to one disk, have a lock each. Two yards
/// opened the pool, and destroyed it: 1,024 of 1,536 blocks were damaged.
#[test]
fn a_disk_with_two_names_is_open_once() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "two-names");
    let image = place.fresh();
    let first = LoopDevice::new(&image, 128 << 20, 512);
    let second = LoopDevice::on(&image, 512);
    drop(open(first.path()).unwrap());
    let mut owner = Owner::start(first.path());
    assert_eq!(owner.tell("write"), "written");
    let error = refused(second.path());
    assert!(error.contains("in use by process"), "{error}");
    assert_eq!(owner.tell("write"), "written");
    owner.end();
    // The entry of a process that has ended does not keep the next one out.
    let owner = Owner::start(second.path());
    let Owner { mut child, .. } = owner;
    child.kill().unwrap();
    child.wait().unwrap();
    drop(open(first.path()).unwrap());
}

/// The superblock is rewritten by a process that no lock keeps out, such as one on another host.
/// The first process notices that within about a second of its next write, without a checkpoint.
#[test]
fn a_process_stops_if_another_host_opens_its_disk() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "other-host");
    let image = place.fresh();
    let first = LoopDevice::new(&image, 128 << 20, 512);
    let second = LoopDevice::on(&image, 512);
    drop(open(first.path()).unwrap());
    let mut owner = Owner::start(first.path());
    assert_eq!(owner.tell("write"), "written");
    // On another host no process has the ID in the owner's entry.
    let device = std::fs::File::options().write(true).open(second.path()).unwrap();
    device.write_all_at(&[0; 4096], HOLDER_AT).unwrap();
    device.sync_all().unwrap();
    let other = open(second.path()).unwrap();
    handle(&other).write(Sector(8000), &[7; BLOCK], Flags::FUA).unwrap();
    // One write makes no checkpoint due.
    assert_eq!(owner.tell("write"), "written");
    let states = std::iter::repeat_with(|| owner.tell("state")).take(STATES_MAX);
    assert!(
        states.into_iter().any(|state| state == "latched"),
        "the pool was not latched after another host had opened it"
    );
    drop(other);
    owner.end();
}

/// Regression: a copy of a pool by hard links, as `rsync --link-dest` makes, shares the segments.
/// Writing one of them changes the other.
#[test]
fn a_pool_with_hard_linked_segments_is_refused() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "links");
    let (pool, linked) = (place.fresh(), place.fresh());
    drop(open(&pool).unwrap());
    std::fs::create_dir(&linked).unwrap();
    for entry in std::fs::read_dir(&pool).unwrap() {
        let name = entry.unwrap().file_name();
        if name.to_str().unwrap().starts_with("segment-") {
            std::fs::hard_link(pool.join(&name), linked.join(&name)).unwrap();
        } else {
            std::fs::copy(pool.join(&name), linked.join(&name)).unwrap();
        }
    }
    for path in [&linked, &pool] {
        let error = refused(path);
        assert!(error.contains("has 2 names (hard links)"), "{error}");
    }
    std::fs::remove_dir_all(&linked).unwrap();
    drop(open(&pool).unwrap());
}
