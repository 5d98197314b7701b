//! The location of measured volumes: a directory on the machine's disk with pools that are made
//! before the measurements, and the raw file that they are compared with.
//!
//! Pools have all their segments before a measurement, as a pool in use does; making a segment
//! fills it with zeros. A raw file is also written once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blockyard_baselines::serial_log::SerialVolume;
use blockyard_baselines::task_workers::TaskWorkers;
use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Bio, Composed, Device, Disk, Flags, SECTOR_BYTES, Sector};
use blockyard_store::{self, PoolBacking, PoolStore, SegmentFiles, SegmentStore, StoreError};
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig, VolumeError};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::slow::Slow;
use crate::stop::Stop;

/// The name of a pool's volume.
pub const VOLUME: &str = "v0";
/// Workers of a task queue.
const WORKERS: u16 = 32;
/// The length of a write that fills a volume, in bytes. A log batch does not continue in the next
/// segment: with longer batches the shortest segments would be filled to three quarters only.
const FILL_BYTES: usize = 128 << 10;
/// How long to wait for a directory's lock, and the interval of the attempts.
const TAKE_MAX: Duration = Duration::from_secs(2);
const TAKE_LOOK: Duration = Duration::from_millis(2);
/// The values of `statfs` for file systems in memory.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// How writes become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// The product: one committer, which writes all waiting records at once.
    Group,
    /// The coarse lock: the submitting threads, one after the other.
    Serial,
    /// The published change: 32 workers, each for itself, on a raw file that is written in place.
    TaskWorkers,
    /// 32 workers as the product has them (`commit=taskq:32`): each writes one request to the
    /// product's log.
    LogWorkers,
}

impl Commit {
    /// The name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Commit::Group => "group",
            Commit::Serial => "serial",
            Commit::TaskWorkers => "taskq-32",
            Commit::LogWorkers => "log-taskq-32",
        }
    }

    /// The mode of this name.
    ///
    /// # Errors
    /// The names of all modes, if this is none.
    pub fn from_name(name: &str) -> Result<Commit, String> {
        let all = [Commit::Group, Commit::Serial, Commit::TaskWorkers, Commit::LogWorkers];
        let found = all.into_iter().find(|commit| commit.name() == name);
        found.ok_or_else(|| format!("`{name}`: there are group, serial, taskq-32, log-taskq-32"))
    }
}

/// A pool as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// The name of the pool's directory.
    pub name: &'static str,
    /// Length of a block of its volume, in bytes.
    pub block_bytes: u32,
    /// Length of its volume, in bytes.
    pub volume_bytes: u64,
    /// The total length of the pool's segments, in bytes.
    pub pool_bytes: u64,
}

/// The directory for pools and files, which must be on a disk.
///
/// # Errors
/// If it is in memory, where the measured effects do not exist.
pub fn place(settings: &Settings) -> Result<&Path, LabError> {
    let path = &settings.scratch;
    let found = rustix::fs::statfs(path);
    let found = found.map_err(|error| LabError::io(path.display().to_string())(error.into()))?;
    if IN_MEMORY.contains(&found.f_type) {
        let how = "let TMPDIR name a directory on a disk";
        return Err(LabError::missing(format!("a disk below {}", path.display()), how));
    }
    Ok(path)
}

fn failed<E: Into<VolumeError>>(path: &Path) -> impl Fn(E) -> LabError + use<E> {
    let path = path.display().to_string();
    move |error| LabError::failed(path.clone(), error.into())
}

impl PoolShape {
    /// Prepares the pool's directory, with an empty volume and all other space free.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn fresh(&self, settings: &Settings) -> Result<PathBuf, LabError> {
        self.fresh_in(place(settings)?)
    }

    /// Prepares the pool in `folder`, which may be in memory, as [`PoolShape::fresh`] does.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn fresh_in(&self, folder: &Path) -> Result<PathBuf, LabError> {
        let path = folder.join(self.name);
        let refused = failed(&path);
        let pool = running(&path, Options::default())?;
        // Snapshots first, because a volume with snapshots cannot be removed.
        let mut names: Vec<String> = pool.pool().list().into_iter().map(|it| it.name).collect();
        names.sort_by_key(|name| !name.contains('@'));
        for name in names {
            pool.destroy(&name).map_err(&refused)?;
        }
        pool.create(VOLUME, self.volume_bytes, self.block_bytes).map_err(&refused)?;
        let segments = pool.pool().segments();
        let wanted = (self.pool_bytes / u64::from(segments.bytes())) as usize;
        for _ in segments.counts().all..wanted {
            segments.grow();
        }
        if segments.counts().all < wanted {
            return Err(LabError::failed(path.display().to_string(), "no room for the pool"));
        }
        drop(pool);
        // Freed space can be reused only after the next opening of the pool.
        drop(running(&path, Options::default())?);
        Ok(path)
    }
}

/// The volume of a pool as a disk, or for workers a raw file, with this commit mode and a delay for
/// every write.
///
/// # Errors
/// If the pool or the file cannot be opened.
pub fn open(
    path: &Path,
    commit: Commit,
    delay: Duration,
    options: Options,
) -> Result<Arc<dyn Disk>, LabError> {
    if commit == Commit::TaskWorkers {
        return workers(path, delay).map_err(LabError::io(path.display().to_string()));
    }
    let directory = take(path).map_err(failed(path))?;
    let options = match commit {
        Commit::LogWorkers => {
            Options { commit: blockyard_store::Commit::TaskQueue(WORKERS), ..options }
        }
        _ => options,
    };
    let directory = match commit {
        Commit::Group | Commit::LogWorkers => {
            directory.with(options.store).map_err(failed(path))?
        }
        // Modes in which the submitting thread writes by calls that block.
        _ => directory,
    };
    match delay {
        Duration::ZERO => open_on(directory, commit, options),
        _ => open_on(Slow::new(directory, delay), commit, options),
    }
    .map_err(failed(path))
}

fn open_on<D: SegmentStore>(
    directory: D,
    commit: Commit,
    options: Options,
) -> Result<Arc<dyn Disk>, VolumeError> {
    Ok(match commit {
        Commit::Group | Commit::LogWorkers => {
            disk(Volume::open_in(Running::start(directory, options)?, config())?)
        }
        _ => disk(Arc::new(SerialVolume::open(directory, options, VOLUME)?)),
    })
}

/// A raw file that workers write.
fn workers(path: &Path, delay: Duration) -> io::Result<Arc<dyn Disk>> {
    let (folder, name) = (path.parent(), path.file_name().and_then(|name| name.to_str()));
    let (Some(folder), Some(name)) = (folder, name) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = take(folder).map_err(io::Error::other)?;
    let missing = || io::Error::from(io::ErrorKind::NotFound);
    Ok(match delay {
        Duration::ZERO => {
            let file = directory.open(name)?.ok_or_else(missing)?;
            disk(Arc::new(TaskWorkers::open(file)?))
        }
        _ => {
            let file = Slow::new(directory, delay).open(name)?.ok_or_else(missing)?;
            disk(Arc::new(TaskWorkers::open(file)?))
        }
    })
}

/// A disk over a volume.
pub fn disk<V: Device>(volume: Arc<V>) -> Arc<dyn Disk>
where
    Arc<V>: Device,
{
    let (name, channels) = (VOLUME.to_owned(), ChannelConfig::default());
    Arc::new(Composed::new(name, "volume", volume, channels))
}

/// Locks the pool's directory for this process. A child that another thread is starting holds the
/// lock too until its exec, so this retries for a short time.
fn take(path: &Path) -> Result<PoolStore, StoreError> {
    let began = Instant::now();
    loop {
        match PoolStore::take(path) {
            Err(StoreError::InUse { .. }) if began.elapsed() < TAKE_MAX => thread::sleep(TAKE_LOOK),
            taken => return taken,
        }
    }
}

/// Opens a pool, for callers that need more than I/O.
///
/// # Errors
/// If it cannot be opened.
pub fn running(path: &Path, options: Options) -> Result<Arc<Running>, LabError> {
    let directory = take(path).and_then(|directory| directory.with(options.store));
    let directory = directory.map_err(failed(path))?;
    let directory = PoolBacking::single(directory, path);
    Running::start(directory, options).map_err(failed(path))
}

/// Opens the volume of an open pool.
///
/// # Errors
/// If there is none, or it is open already.
pub fn volume(pool: &Arc<Running>) -> Result<Arc<dyn Disk>, LabError> {
    let volume = Volume::open_in(Arc::clone(pool), config());
    Ok(disk(volume.map_err(|error| LabError::failed(VOLUME, error))?))
}

/// The product's volume without compression, because the other variants do not compress either.
pub fn config() -> VolumeConfig {
    VolumeConfig { compress: Compression::None, ..VolumeConfig::new("pool", VOLUME) }
}

/// Fills a disk with noise, from its start to its end, and makes it durable.
///
/// # Errors
/// If a write fails, or the run is to stop.
pub fn fill(disk: &dyn Disk, stop: &Stop) -> Result<(), LabError> {
    let failed = |status| LabError::failed("filling a volume", status);
    let channel = disk.open().map_err(|error| LabError::failed("filling a volume", error))?;
    let mut io = Io::new(channel, FILL_BYTES);
    let mut rng = fastrand::Rng::with_seed(7);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(FILL_BYTES).collect();
    let bytes = disk.geometry().sectors * SECTOR_BYTES;
    for at in (0..bytes).step_by(FILL_BYTES) {
        if stop.is_set() {
            return Err(LabError::Interrupted);
        }
        let len = FILL_BYTES.min((bytes - at) as usize);
        io.write(Sector(at / SECTOR_BYTES), &noise[..len], Flags::NONE).map_err(failed)?;
    }
    io.run(Bio::flush()).map(drop).map_err(failed)
}

/// A raw file of this length that is written everywhere, made once in a run.
///
/// # Errors
/// If it cannot be made.
pub fn raw_file(settings: &Settings, bytes: u64) -> Result<PathBuf, LabError> {
    let folder = place(settings)?.join("raw");
    let name = format!("file-{bytes}");
    let path = folder.join(&name);
    if !path.exists() {
        let directory = take(&folder).map_err(failed(&folder))?;
        let made = directory.create("new", bytes).and_then(|_| directory.rename("new", &name));
        made.map_err(LabError::io(path.display().to_string()))?;
    }
    Ok(path)
}

/// The number of bytes that the kernel has written to disks for this process, if it reports that.
pub fn written_bytes() -> Option<u64> {
    moved_bytes("write_bytes: ")
}

/// The number of bytes that the kernel has read from disks for this process, if it reports that.
pub fn read_bytes() -> Option<u64> {
    moved_bytes("read_bytes: ")
}

fn moved_bytes(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const SHAPE: PoolShape = PoolShape {
        name: "pool",
        block_bytes: 4096,
        volume_bytes: 16 << 20,
        pool_bytes: 128 << 20,
    };

    fn settings(scratch: &Scratch) -> Settings {
        let scratch = scratch.path().to_owned();
        Settings {
            quick: true,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch,
            processors: 2,
            peers: Default::default(),
        }
    }

    #[test]
    fn all_ways_write_the_same_pool() {
        let scratch = Scratch::new().unwrap();
        let path = SHAPE.fresh(&settings(&scratch)).unwrap();
        let mut written: u8 = 0;
        for commit in [Commit::Serial, Commit::Group, Commit::LogWorkers, Commit::Serial] {
            for delay in [Duration::ZERO, Duration::from_micros(100)] {
                let disk = open(&path, commit, delay, Options::default()).unwrap();
                let mut io = Io::new(disk.open().unwrap(), 8192);
                let mut found = [0; 8192];
                io.read(Sector(80), &mut found).unwrap();
                assert_eq!(found, [written; 8192], "{commit:?}");
                written += 1;
                let before = written_bytes();
                io.write(Sector(80), &[written; 8192], Flags::FUA).unwrap();
                assert!(written_bytes() > before || before.is_none());
                io.write(Sector(800), &[3; 4096], Flags::NONE).unwrap();
                io.run(Bio::flush()).unwrap();
                io.read(Sector(800), &mut found[..4096]).unwrap();
                assert_eq!(found[..4096], [3; 4096]);
            }
        }
        SHAPE.fresh(&settings(&scratch)).unwrap();
        let disk = open(&path, Commit::Group, Duration::ZERO, Options::default()).unwrap();
        let mut found = [1; 4096];
        Io::new(disk.open().unwrap(), 4096).read(Sector(80), &mut found).unwrap();
        assert_eq!(found, [0; 4096]);
    }

    #[test]
    fn workers_write_a_raw_file_and_many_at_once() {
        let scratch = Scratch::new().unwrap();
        let path = raw_file(&settings(&scratch), 4 << 20).unwrap();
        for delay in [Duration::ZERO, Duration::from_micros(100)] {
            let (commit, options) = (Commit::TaskWorkers, Options::default());
            let disk = open(&path, commit, delay, options).unwrap();
            let mut io = Io::new(disk.open().unwrap(), 12 << 10);
            io.write(Sector(80), &[9; 12 << 10], Flags::FUA).unwrap();
            io.write(Sector(88), &[7; 4096], Flags::NONE).unwrap();
            io.run(Bio::flush()).unwrap();
            let mut found = [0; 12 << 10];
            io.read(Sector(80), &mut found).unwrap();
            assert_eq!(found[..4096], [9; 4096]);
            assert_eq!(found[4096..8192], [7; 4096]);
            assert_eq!(found[8192..], [9; 4096]);
        }
        let shared = fs::read(&path).unwrap();
        assert_eq!(shared[40 << 10], 9);
    }

    #[test]
    fn a_raw_file_is_made_once() {
        let scratch = Scratch::new().unwrap();
        let path = raw_file(&settings(&scratch), 4 << 20).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);
        assert_eq!(raw_file(&settings(&scratch), 4 << 20).unwrap(), path);
        assert!(Commit::from_name("group").is_ok() && Commit::from_name("x").is_err());
    }
}
