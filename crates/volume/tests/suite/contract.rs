//! Runs the contract suite of all devices on volumes of several shapes, each test in its own
//! directory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use blockyard_store::{Commit, StoreKind};
use blockyard_testing::contract;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, SecretFile, SyncMode, Volume, VolumeConfig};

/// 8 MiB of 4 KiB blocks.
fn plain() -> VolumeConfig {
    VolumeConfig {
        path: "".into(),
        name: "v0".to_owned(),
        size: 8 << 20,
        volblocksize: 4096,
        compress: Compression::None,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    }
}

/// The pools of a test. The directory of each is removed once the pool is closed: the directories
/// of several tests together would fill a small disk.
struct Pools {
    place: TempDir,
    open: Mutex<Vec<(Weak<Running>, PathBuf)>>,
}

impl Pools {
    /// The pools of one test; other tests run concurrently in this process.
    fn new(name: &str) -> Arc<Pools> {
        let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name);
        Arc::new(Pools { place, open: Mutex::default() })
    }

    /// Makes a volume in a new pool.
    fn volume(&self, config: &VolumeConfig, options: Options) -> Arc<Volume> {
        let mut open = self.open.lock().unwrap();
        open.retain(|(pool, path)| {
            let is_open = pool.strong_count() > 0;
            if !is_open {
                // What cannot be removed now is removed with the test's directory.
                _ = std::fs::remove_dir_all(path);
            }
            is_open
        });
        let path = self.place.fresh();
        let path2 = (config.copies == 2).then(|| path.join("second"));
        let path1 = path.join("first");
        let options = Options { segment_bytes: 4 << 20, ..options };
        let config = VolumeConfig { path: path1, path2, ..config.clone() };
        let volume = Volume::open_with(config, options).unwrap();
        open.push((Arc::downgrade(volume.running()), path));
        volume
    }
}

fn alone(name: &str, config: VolumeConfig, options: Options) {
    let pools = Pools::new(&name.replace(' ', ""));
    let make = move || pools.volume(&config, options);
    contract::run(&contract::Subject::plain(name, true, make));
}

#[test]
fn blocks_of_4_kib_under_everything() {
    let (pools, config) = (Pools::new("wrapped"), plain());
    contract::run_wrapped("volume", true, move || pools.volume(&config, Options::default()));
}

/// Several clients write parts of blocks.
#[test]
fn blocks_of_16_kib_compressed() {
    let (volblocksize, compress) = (16 << 10, Compression::Lz4);
    let config = VolumeConfig { volblocksize, compress, ..plain() };
    alone("volume, 16k, lz4", config, Options::default());
}

/// Each block with a tag, in blocks of 16 KiB and compressed.
#[test]
fn blocks_of_16_kib_encrypted() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "contract-key");
    let key = place.path().join("key");
    std::fs::write(&key, [7; 32]).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let (volblocksize, compress) = (16 << 10, Compression::Lz4);
    let secret = Some(SecretFile::Key(key));
    let config = VolumeConfig { volblocksize, compress, secret, ..plain() };
    alone("volume, 16k, encrypted", config, Options::default());
}

/// The copies are two directories.
#[test]
fn two_copies() {
    alone("volume, two copies", VolumeConfig { copies: 2, ..plain() }, Options::default());
}

/// Without io_uring, as where the kernel refuses it.
#[test]
fn by_calls_that_block() {
    let config = VolumeConfig { sync: SyncMode::Always, ..plain() };
    let options = Options { store: StoreKind::Threads, ..Options::default() };
    alone("volume, threads", config, options);
}

/// Workers write and sync one record each (`commit=taskq`).
#[test]
fn by_a_queue_of_tasks() {
    let config = VolumeConfig { sync: SyncMode::Always, ..plain() };
    let options = Options { commit: Commit::TaskQueue(8), ..Options::default() };
    alone("volume, taskq", config, options);
}

#[test]
fn every_write_durable() {
    let config = VolumeConfig { sync: SyncMode::Always, ..plain() };
    alone("volume, always", config, Options::default());
}

#[test]
fn nothing_durable() {
    let config = VolumeConfig { sync: SyncMode::Disabled, ..plain() };
    alone("volume, disabled", config, Options::default());
}
