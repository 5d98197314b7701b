//! The volume device: opens a volume of a pool by its name, and makes it if it does not exist.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use blockyard_core::provisional::Provisional;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Bytes, Device, DeviceError, Extent, Geometry, Limits, SECTOR_BYTES, Sector};
use blockyard_store::remote::RemoteParameters;
use blockyard_store::{
    PoolBacking, SegmentStore, StoreError, StoreKind, StoreLocation as _, no_pool,
};
use blockyard_sync::rcu_cell::RcuCell;
use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::superblock::Superblock;
use blockyard_volume_format::{NODE_BLOCKS, VERSION};

use crate::admin::check_new;
use crate::checkpoint::mark_of;
use crate::config::{SecretFile, SyncMode, VolumeConfig};
use crate::error::VolumeError;
use crate::handle::VolumeHandle;
use crate::keyring::LentKey;
use crate::map::{Lookup, Map, NotResident};
use crate::options::Options;
use crate::queue::{RECORDS, VolumeQueue};
use crate::record::OpenVolume;
use crate::running::Running;
use crate::settings::{LiveSettings, OpenDevice};

/// Longest read or write, in bytes. A write of this length is atomic.
const LEN_MAX: u64 = 1 << 20;

/// Most requests in flight on one queue.
pub(crate) const DEPTH: u16 = 64;

/// Most blocks that one extent query examines.
const RUN_MAX: u32 = 1 << 14;

/// A durable volume.
pub struct Volume<D: SegmentStore = PoolBacking> {
    shared: Arc<Shared<D>>,
}

/// State shared by the device and its queues.
pub(crate) struct Shared<D: SegmentStore> {
    pub(crate) config: VolumeConfig,
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    pub(crate) settings: Arc<RcuCell<LiveSettings>>,
    pub(crate) live: Arc<OpenVolume>,
    /// Keeps the key of an encrypted volume in memory.
    _key: Option<LentKey>,
    /// Declared after `live`, and so dropped after it: a thread that finds the volume closed may
    /// change it.
    taken: Taken<D>,
    pub(crate) running: Arc<Running<D>>,
}

/// Marks a volume as an open device until it is dropped.
struct Taken<D: SegmentStore> {
    running: Arc<Running<D>>,
    id: u32,
    /// Whether what this opening did is undone when it is dropped.
    provisional: Provisional,
    undo: Undo,
}

/// What an opening did to the pool.
enum Undo {
    /// It made the volume.
    Made,
    /// It changed the reservation, which was this before, in bytes.
    Reserved(u64),
}

impl<D: SegmentStore> Drop for Taken<D> {
    fn drop(&mut self) {
        if !self.provisional.is_kept() {
            match self.undo {
                Undo::Made => self.running.discard(self.id),
                Undo::Reserved(before) => self.running.reserve_again(self.id, before),
            }
        }
        self.running.put(self.id);
    }
}

impl Volume {
    /// Opens a volume, and makes it if the name does not exist.
    ///
    /// # Errors
    /// If a parameter is invalid, or the pool cannot be opened.
    pub fn open(config: VolumeConfig) -> Result<Arc<Volume>, VolumeError> {
        Volume::open_with(config, Options::default())
    }

    /// Opens a volume as [`Volume::open`] does, with given options for the pool.
    ///
    /// # Errors
    /// As [`Volume::open`].
    pub fn open_with(config: VolumeConfig, options: Options) -> Result<Arc<Volume>, VolumeError> {
        let volume = Volume::open_provisional(config, options)?;
        volume.provisional().keep();
        Ok(volume)
    }

    /// Opens a volume. A volume or a pool that this makes is removed when the volume is closed, and
    /// a reservation that this changes is restored, unless the caller keeps
    /// [`Volume::provisional`].
    ///
    /// # Errors
    /// As [`Volume::open`].
    pub fn open_provisional(
        config: VolumeConfig,
        options: Options,
    ) -> Result<Arc<Volume>, VolumeError> {
        config.check()?;
        let map_cache_bytes = match config.map_cache {
            0 => options.map_cache_bytes,
            bytes => bytes,
        };
        let commit = config.commit.unwrap_or(options.commit);
        let store = config.store.unwrap_or(options.store);
        let options = Options { map_cache_bytes, commit, store, ..options };
        let places = config.places()?;
        // Check all parameters before a pool is made.
        if !places.has_pool() {
            if config.size == 0 {
                // Of segments without a superblock the volume may exist.
                return Err(match no_pool(&config.path) {
                    error @ StoreError::Format(_) => error.into(),
                    _ => VolumeError::NoSize { name: config.name },
                });
            }
            check_new(&config.name, config.size, config.volblocksize, config.reservation)?;
        }
        let running = Running::open_places(&places, options)?;
        agrees(&running, &config)?;
        let opened = Volume::open_provisional_in(Arc::clone(&running), config);
        if opened.is_err() {
            // The volume of a new pool may not fit in it.
            running.erase_if_empty();
        }
        opened
    }
}

impl Volume {
    /// The pool's part of [`Volume::identity`], of the pool in which a volume is to be opened. This
    /// reads it without the lock of the pool, which another process may have open, and changes
    /// nothing.
    ///
    /// # Errors
    /// If there is no pool, this process may not write to it, or opening it converts it to another
    /// format version, so that the program that has it open cannot open it again.
    pub fn existing_pool(config: &VolumeConfig) -> Result<u64, VolumeError> {
        let slots = config.places()?.superblock()?;
        let version = Superblock::newest_version(&slots)?;
        if version != VERSION {
            let wanted = format!(
                "a pool of format version {VERSION}: this one has {version}, and opening it \
                 converts it"
            );
            let value = config.path.display().to_string();
            return Err(VolumeError::Invalid { field: "path", value, wanted });
        }
        Ok(mark_of(&Superblock::newest(&slots)?))
    }
}

impl<D: SegmentStore> Volume<D> {
    /// Opens a volume of a pool that is already open. The path in `config` is ignored.
    ///
    /// # Errors
    /// As [`Volume::open`].
    pub fn open_in(
        running: Arc<Running<D>>,
        config: VolumeConfig,
    ) -> Result<Arc<Volume<D>>, VolumeError> {
        let volume = Volume::open_provisional_in(running, config)?;
        volume.provisional().keep();
        Ok(volume)
    }

    fn open_provisional_in(
        running: Arc<Running<D>>,
        config: VolumeConfig,
    ) -> Result<Arc<Volume<D>>, VolumeError> {
        config.check()?;
        let (live, provisional) = loop {
            let (live, made) = find_or_make(&running, &config)?;
            if !running.take(live.meta.id) {
                let why = "a device of this process already".to_owned();
                return Err(VolumeError::Busy { name: config.name.clone(), why });
            }
            // Another thread may have removed or changed the volume before it was taken.
            match running.pool().find(&config.name) {
                Ok(now) if Arc::ptr_eq(&now, &live) => break (live, made),
                _ => running.put(live.meta.id),
            }
        };
        let VolumeMeta { id, block_bytes, blocks, .. } = live.meta;
        let properties = running.pool().volumes().properties_of(id);
        let mut taken = Taken { running: Arc::clone(&running), id, provisional, undo: Undo::Made };
        let before = live.reserved_bytes();
        if config.reservation != 0 && config.reservation != before {
            running.reserve(&config.name, config.reservation)?;
            taken.undo = Undo::Reserved(before);
            taken.provisional = Provisional::removed_at_close();
        }
        let config = config.with(&properties);
        config.check()?;
        let key = find_key(&running, &live.meta, &config)?;
        let sectors = blocks * u64::from(block_bytes) / SECTOR_BYTES;
        let geometry = Geometry {
            sectors,
            logical_block_bytes: block_bytes.min(4096),
            physical_block_bytes: block_bytes,
            zones: None,
        };
        let span_sectors = NODE_BLOCKS * u64::from(block_bytes) / SECTOR_BYTES;
        let segment_bytes = u64::from(running.pool().segments().bytes());
        // What a write stores is a quarter of a segment at most, unless a block is longer.
        let blocks_max = (segment_bytes / 4 / live.meta.stored_block_max()).max(1);
        let longest = blocks_max * u64::from(block_bytes);
        let limits = Limits {
            sectors_max: LEN_MAX.min(longest) / SECTOR_BYTES,
            chunk_sectors: span_sectors,
            discard_sectors_max: span_sectors,
            write_zeroes_sectors_max: span_sectors,
            write_cache: config.sync != SyncMode::Always,
            fua: true,
            read_only: config.read_only,
            ..Limits::unlimited(DEPTH)
        };
        let settings = Arc::new(RcuCell::new(LiveSettings::new(&config)));
        running.add_device(id, OpenDevice::new(config.clone(), Arc::clone(&settings)));
        let shared = Shared { config, geometry, limits, settings, live, _key: key, taken, running };
        Ok(Arc::new(Volume { shared: Arc::new(shared) }))
    }

    /// The parameters of the volume as it was opened.
    pub fn config(&self) -> &VolumeConfig {
        &self.shared.config
    }

    /// Whether the volume stays if this opening made it.
    pub fn provisional(&self) -> &Provisional {
        &self.shared.taken.provisional
    }

    /// Identity of the volume: a part of that of the pool, which is drawn when the pool is made,
    /// and the number of the volume, which the pool never uses again.
    pub fn identity(&self) -> (u64, u32) {
        let Shared { running, live, .. } = &*self.shared;
        (running.mark(), live.meta.id)
    }

    /// The open pool that contains the volume.
    pub fn running(&self) -> &Arc<Running<D>> {
        &self.shared.running
    }
}

/// Refuses a pool that is already open with other parameters than those of this volume.
fn agrees(running: &Running, config: &VolumeConfig) -> Result<(), VolumeError> {
    let path = running.path();
    let path = path.display();
    let differs = |field, value: String, is: &dyn fmt::Display| {
        let wanted = format!(
            "`{is}`, as `{path}` is open already for another volume: all volumes of a pool share it"
        );
        Err(VolumeError::Invalid { field, value, wanted })
    };
    let directory = running.pool().segments().directory();
    let copies = directory.copy_status();
    let is_at = |path: &Path| {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        running.is_at(&path) || copies.iter().any(|copy| Path::new(&copy.path) == path)
    };
    let named = [("path", Some(&config.path)), ("path2", config.path2.as_ref())];
    for (field, path) in named {
        if let Some(path) = path.filter(|path| !is_at(path)) {
            return differs(field, path.display().to_string(), &directory.title());
        }
    }
    if config.copies == 2 && copies.len() < 2 {
        return differs("copies", "2".to_owned(), &1);
    }
    let commit = running.pool().options().commit;
    if let Some(wanted) = config.commit
        && wanted != commit
    {
        return differs("commit", wanted.to_string(), &commit);
    }
    if let Some(status) = directory.upload_status() {
        let RemoteParameters { acknowledge, max_lag_bytes, max_lag_ms, lease_ms, .. } =
            config.remote;
        if let Some(wanted) = acknowledge.filter(|it| *it != status.acknowledge) {
            return differs("ack", wanted.to_string(), &status.acknowledge);
        }
        for (field, wanted, is) in [
            ("max_lag", max_lag_bytes, status.max_lag_bytes),
            ("max_lag_time", max_lag_ms, status.max_lag_ms),
            ("lease", lease_ms.unwrap_or(0), status.lease_ms),
        ] {
            if wanted != 0 && wanted != is {
                return differs(field, wanted.to_string(), &is);
            }
        }
    }
    let is_uring = running.pool().segments().directory().is_uring();
    match config.store {
        Some(StoreKind::Uring) if !is_uring => {
            differs("store", StoreKind::Uring.to_string(), &StoreKind::Threads)
        }
        Some(StoreKind::Threads) if is_uring => {
            differs("store", StoreKind::Threads.to_string(), &StoreKind::Uring)
        }
        _ => Ok(()),
    }
}

fn find_or_make<D: SegmentStore>(
    running: &Running<D>,
    config: &VolumeConfig,
) -> Result<(Arc<OpenVolume>, Provisional), VolumeError> {
    let pool = running.pool();
    let (live, provisional) = match pool.find(&config.name) {
        Ok(live) => (live, Provisional::kept()),
        Err(_) => {
            let VolumeConfig { name, size, volblocksize, reservation, .. } = config;
            if *size == 0 {
                return Err(VolumeError::NoSize { name: name.clone() });
            }
            let secret = config.secret.as_ref().map(SecretFile::read).transpose()?;
            let secret = secret.as_ref();
            running.create_reserved(name, *size, *volblocksize, *reservation, secret)?;
            (pool.find(&config.name)?, Provisional::removed_at_close())
        }
    };
    let VolumeMeta { block_bytes, blocks, .. } = live.meta;
    let size = blocks * u64::from(block_bytes);
    let differs = |field, value: u64, has: u64| {
        let wanted = format!("{}, which `{}` has", Bytes(has), config.name);
        Err(VolumeError::Invalid { field, value: Bytes(value).to_string(), wanted })
    };
    if config.size != 0 && config.size != size {
        return differs("size", config.size, size);
    }
    if config.volblocksize != 0 && config.volblocksize != block_bytes {
        return differs("volblocksize", config.volblocksize.into(), block_bytes.into());
    }
    Ok((live, provisional))
}

/// Brings the key of an encrypted volume into memory, or finds it there.
fn find_key<D: SegmentStore>(
    running: &Running<D>,
    meta: &VolumeMeta,
    config: &VolumeConfig,
) -> Result<Option<LentKey>, VolumeError> {
    let keys = running.pool().keys();
    match &config.secret {
        Some(file) => Ok(Some(keys.lend(running.pool().decrypt_key(meta, &file.read()?)?))),
        None => keys.lend_unlocked(meta),
    }
}

impl<D: SegmentStore> Device for Volume<D> {
    type Queue = VolumeQueue<D>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<VolumeQueue<D>, DeviceError> {
        let Shared { live, running, settings, .. } = &*self.shared;
        let (live, compress) = (Arc::clone(live), settings.get().compress);
        let handle = VolumeHandle::open(running.pool(), live, compress, RECORDS);
        // The key is in memory, because the device has a part in it.
        let handle = handle.map_err(|error| {
            tracing::error!("{error}");
            DeviceError::Os {
                what: "memory for keys",
                errno: rustix::io::Errno::NOMEM.raw_os_error(),
            }
        })?;
        Ok(VolumeQueue::new(Arc::clone(&self.shared), handle))
    }

    fn report_zones(
        &self,
        from: Sector,
        _: usize,
        _: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let sectors = self.shared.geometry.sectors;
        if from.0 < sectors {
            Ok(())
        } else {
            Err(DeviceError::OutOfRange { sector: from, sectors })
        }
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let Shared { geometry, live, .. } = &*self.shared;
        let sectors = sectors.min(geometry.sectors.saturating_sub(from.0)).max(1);
        if from.0 >= geometry.sectors {
            return Extent { sectors, allocated: false, zero: false };
        }
        let unit = u64::from(live.meta.block_bytes) / SECTOR_BYTES;
        let (first, after) = (from.0 / unit, (from.0 + sectors).div_ceil(unit));
        let (span, block) = Map::place(first);
        let most = (after - first).min(NODE_BLOCKS - u64::from(block)) as u32;
        while let Some(NotResident(leaf)) = live.map.with(span, |span| span.away(block, block + 1))
        {
            if self.shared.running.pool().segments().load(&leaf).is_err() {
                break;
            }
        }
        let (run, is_hole) = live.map.with(span, |span| {
            let is_hole = |block| matches!(span.find(block), Lookup::Zero | Lookup::Cleared { .. });
            let first = is_hole(block);
            let same = (block..block + most.min(RUN_MAX)).take_while(|at| is_hole(*at) == first);
            (same.count() as u64, first)
        });
        let end = ((first + run) * unit).min(from.0 + sectors);
        Extent { sectors: end - from.0, allocated: !is_hole, zero: is_hole }
    }
}

impl<D: SegmentStore> fmt::Debug for Volume<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("config", &self.shared.config).finish_non_exhaustive()
    }
}
