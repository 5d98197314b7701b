//! Kills a process with `kill -9` while it writes, repeatedly, and checks the contents of its
//! volume.
//!
//! The test starts itself as the victim. The victim's threads write pages, four of which share a
//! block, and print what was acknowledged as durable. All of that must be there afterwards, and
//! every page must be intact.
#![allow(clippy::unwrap_used)] // Test code.

mod loop_device;

use std::collections::HashMap;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use blockyard_core::{Flags, Sector};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, SecretFile, SyncMode, Volume, VolumeConfig};

use loop_device::LoopDevice;

/// The environment variable with the victim's directory.
const DIRECTORY: &str = "BLOCKYARD_VOLUME_KILL_DIRECTORY";
/// The environment variable with the number of the victim's first write.
const FROM: &str = "BLOCKYARD_VOLUME_KILL_FROM";

/// Number of kills in `make test`; `BLOCKYARD_KILLS` overrides it.
const KILLS: u64 = 25;

/// The name of a pool whose volume is encrypted.
const ENCRYPTED: &str = "encrypted";

const PAGE: usize = 4096;
const PAGES: u64 = 1024;
const THREADS: u64 = 4;

fn open(directory: &Path) -> Arc<Volume> {
    // The second copy, if there is one, is next to the first.
    let second = directory.with_extension("second");
    let is_encrypted = directory.ends_with(ENCRYPTED);
    let config = VolumeConfig {
        path: directory.to_owned(),
        path2: (is_encrypted || directory.ends_with("mirror")).then_some(second),
        secret: is_encrypted.then(|| SecretFile::Key(key_file(directory))),
        name: "v0".to_owned(),
        size: PAGES * PAGE as u64,
        volblocksize: 16 << 10,
        compress: Compression::Lz4,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    };
    // Small segments and frequent checkpoints, so that kills interrupt both.
    let options =
        Options { segment_bytes: 1 << 20, checkpoint_bytes: 512 << 10, ..Options::default() };
    Volume::open_with(config, options).unwrap()
}

/// The key file of an encrypted volume, next to its pool.
fn key_file(directory: &Path) -> PathBuf {
    let path = directory.with_extension("key");
    if !path.exists() {
        std::fs::write(&path, [7; 32]).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    }
    path
}

/// The bytes of a page, which state its place and the write.
fn page(number: u64, write: u64) -> Vec<u8> {
    [number, write].map(u64::to_le_bytes).concat().repeat(PAGE / 16)
}

/// The victim: writes until it is killed.
#[test]
fn victim() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let from: u64 = std::env::var(FROM).unwrap().parse().unwrap();
    let volume = open(Path::new(&directory));
    let say = |text: String| std::io::stdout().write_all(text.as_bytes()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (volume, say) = (&volume, &say);
            scope.spawn(move || {
                let mut io = handle(volume);
                let mut random = fastrand::Rng::with_seed(from + thread);
                let mut unflushed = Vec::new();
                for write in from.. {
                    let number = random.u64(..PAGES / THREADS) * THREADS + thread;
                    let durable = random.u8(..4) > 0;
                    let flags = if durable { Flags::FUA } else { Flags::NONE };
                    io.write(Sector(number * 8), &page(number, write), flags).unwrap();
                    if durable {
                        say(format!("{number} {write}\n"));
                    } else {
                        unflushed.push((number, write));
                    }
                    if unflushed.len() > 5 {
                        io.run(blockyard_core::Bio::flush()).unwrap();
                        for (number, write) in unflushed.drain(..) {
                            say(format!("{number} {write}\n"));
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn nothing_that_was_durable_is_missing_after_a_kill() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "kill");
    kills(&place.path().join("pool"), 11);
}

#[test]
fn nothing_that_was_durable_is_missing_on_a_disk() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "kill-disk");
    let device = LoopDevice::new(&place.path().join("image"), 256 << 20, 512);
    kills(device.path(), 12);
}

/// After a kill the two copies may be of different moments.
#[test]
fn nothing_that_was_durable_is_missing_in_two_copies_of_an_encrypted_volume() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "kill-encrypted");
    kills(&place.path().join(ENCRYPTED), 13);
}

#[test]
fn nothing_that_was_durable_is_missing_on_two_disks() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "kill-disks");
    for (name, bytes) in [("mirror", 128 << 20), ("mirror.second", 160 << 20)] {
        std::fs::File::create(place.path().join(name)).unwrap().set_len(bytes).unwrap();
    }
    kills(&place.path().join("mirror"), 14);
}

fn kills(directory: &Path, seed: u64) {
    let kills: u64 = std::env::var("BLOCKYARD_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(seed);
    let mut said: HashMap<u64, u64> = HashMap::new();
    for round in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--nocapture", "--test-threads=1"])
            .env(DIRECTORY, directory)
            .env(FROM, (1 + round * 1_000_000).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = random.u32(1..3000);
        // Everything that was printed before the kill counts, including what is still in the pipe.
        while let Some(Ok(line)) = lines.next() {
            let mut words = line.split(' ').map(str::parse);
            if let (Some(Ok(number)), Some(Ok(write))) = (words.next(), words.next()) {
                let latest = said.entry(number).or_default();
                *latest = write.max(*latest);
                left = left.saturating_sub(1);
                if left == 0 {
                    child.kill().unwrap();
                }
            }
        }
        child.wait().unwrap();
        let volume = open(directory);
        let mut io = handle(&volume);
        let mut found = vec![0; PAGE];
        for number in 0..PAGES {
            io.read(Sector(number * 8), &mut found).unwrap();
            let write = u64::from_le_bytes(found[8..16].try_into().unwrap());
            assert!(write == 0 || found == page(number, write), "round {round}: page {number}");
            let least = said.get(&number).copied().unwrap_or(0);
            assert!(write >= least, "round {round}: page {number} has {write}, not {least}");
        }
    }
    assert!(said.len() > 100, "the victims have written something");
}
