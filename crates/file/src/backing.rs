//! The file of a device: opens, creates, locks and examines it, and latches it after a failed
//! flush.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use blockyard_core::owner_only;
use blockyard_core::provisional::Provisional;
use blockyard_core::{
    Extent, Region, SECTOR_BYTES, SECTOR_SHIFT, Sector, Started, Status, ZoneGeometry,
};
use blockyard_sync::rcu_cell::RcuCell;
use rustix::fs::{Access, AtFlags, FallocateFlags, StatxFlags};

use crate::config::{Direct, FileConfig};
use crate::error::FileDeviceError;
use crate::lock;
use crate::zoned;

/// The unit of the probe whether the file system deallocates, in bytes, and the physical block size
/// of a file whose file system reports an unusable one.
const PAGE_BYTES: u64 = 4096;

/// Largest block size that is used, in bytes.
const BLOCK_BYTES_MAX: u64 = 64 << 10;

/// Pages that the kernel puts into one bio.
const BIO_PAGES_MAX: u64 = 256;

/// Zeros that a write-zeroes writes if the file system has no call for it, in bytes.
const FILL_BYTES: usize = 256 << 10;

/// An open file, and what its system calls need to know about it.
#[derive(Debug)]
pub(crate) struct Backing {
    locked: LockedFile,
    pub(crate) len: u64,
    pub(crate) logical_block_bytes: u32,
    pub(crate) physical_block_bytes: u32,
    /// I/O bypasses the page cache.
    pub(crate) is_direct: bool,
    /// The address of data is a multiple of this; 1 without direct I/O.
    pub(crate) memory_align: usize,
    pub(crate) read_only: bool,
    /// The file or device can deallocate a range, which then reads as zeros.
    pub(crate) can_discard: bool,
    /// A write can make its own data durable: on a block device with direct I/O. The sync of such a
    /// write reports a failed write-back as `fdatasync` does, and the kernel reports it once. A
    /// regular file can have write-backs, so there a flush must be the only one to sync. In a zone
    /// a write can fail because of its place, which loses no earlier write.
    pub(crate) has_fua: bool,
    /// The zones of a zoned block device.
    pub(crate) zones: Option<ZoneGeometry>,
    /// The longest request that a zoned block device takes whole, in sectors. The kernel splits a
    /// longer one, and before Linux 6.10 may reorder the pieces of a write.
    pub(crate) whole_sectors_max: u64,
}

impl Backing {
    /// Opens the file, or creates it if there is none and `size` is given.
    pub(crate) fn open(config: &FileConfig) -> Result<Backing, FileDeviceError> {
        config.check()?;
        let path = config.path.as_path();
        let locked = match path.metadata() {
            Ok(found) => {
                LockedFile::lock(config, open_existing(config, &found)?, Provisional::kept())?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && config.size > 0 => {
                create(config)?
            }
            Err(error) => return Err(absent(path, error)),
        };
        examine(config, locked)
    }

    /// Another open file description of the file, for one queue. Each description reports a failed
    /// write-back once, so each queue has its own.
    ///
    /// # Errors
    /// If the system refuses it.
    pub(crate) fn reopen(&self) -> io::Result<File> {
        reopen(&self.locked.file, self.read_only, self.is_direct)
    }

    /// The description that has the lock.
    pub(crate) fn locked(&self) -> &File {
        &self.locked.file
    }

    /// Whether a file that this opening created stays.
    pub(crate) fn provisional(&self) -> &Provisional {
        &self.locked.provisional
    }

    /// The path, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.locked.path
    }

    /// What tells the file from one that was made again at the same path: the number of its file
    /// system, its own, and when it was made, if the file system has that. A block device has its
    /// number.
    pub(crate) fn identity(&self) -> String {
        self.locked.file.metadata().map(|found| identity(&found)).unwrap_or_default()
    }

    /// The extent at a sector of the file: a hole, or data.
    pub(crate) fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let data = |sectors| Extent { sectors, allocated: true, zero: false };
        if self.locked.is_device {
            return data(sectors);
        }
        let block = u64::from(self.logical_block_bytes);
        let (at, end) = (from.bytes(), from.bytes() + (sectors << SECTOR_SHIFT));
        let seek = |from| rustix::fs::seek(&self.locked.file, from);
        let next_data = match seek(rustix::fs::SeekFrom::Data(at)) {
            Ok(next) => next.min(end),
            // lseek(2): there are no data after the offset.
            Err(rustix::io::Errno::NXIO) => end,
            Err(_) => return data(sectors),
        };
        // A block that is only partly a hole is data.
        let hole = (next_data - at) / block * block;
        if hole > 0 {
            return Extent { sectors: hole >> SECTOR_SHIFT, allocated: false, zero: true };
        }
        let next_hole = seek(rustix::fs::SeekFrom::Hole(next_data)).unwrap_or(end).clamp(at, end);
        // The range may be shorter than one block.
        data((next_hole - at).next_multiple_of(block).max(block).min(end - at) >> SECTOR_SHIFT)
    }
}

/// What all queues of a device share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) backing: Backing,
    /// Set when a flush has failed: completed writes may be lost.
    pub(crate) is_latched: Arc<RcuCell<bool>>,
    pub(crate) zeros: Arc<Region>,
}

impl Shared {
    pub(crate) fn new(backing: Backing) -> Shared {
        let is_latched = Arc::new(RcuCell::new(false));
        Shared { backing, is_latched, zeros: Region::alloc(FILL_BYTES) }
    }

    /// Executes a request that manages zones; `None` for other requests. The calling thread waits
    /// for the device.
    pub(crate) fn manage_zones(&self, started: &Started) -> Option<Status> {
        let Backing { zones, len, .. } = &self.backing;
        let zone_sectors = zones.as_ref()?.zone_sectors;
        zoned::manage(self.backing.locked(), (len >> SECTOR_SHIFT, zone_sectors), started)
    }

    /// Latches the device after a failed flush or write with FUA, which `failed` names: from now on
    /// changes and flushes fail.
    #[cold]
    pub(crate) fn latch(&self, failed: &str, errno: i32) {
        if *self.is_latched.get() {
            return;
        }
        self.is_latched.update(|_| true);
        let (path, error) = (self.backing.path(), io::Error::from_raw_os_error(errno));
        tracing::error!(
            "{}: a {failed} failed: {error}; until the device is opened again, writes and flushes \
             fail with EIO, because completed writes may be lost",
            path.display()
        );
    }
}

/// The open file that has the lock. I/O goes through descriptions of its own, from
/// [`Backing::reopen`].
#[derive(Debug)]
struct LockedFile {
    path: PathBuf,
    file: File,
    is_device: bool,
    /// Whether a file that this opening created stays.
    provisional: Provisional,
}

impl LockedFile {
    /// Locks an open file, and checks that the path still names it.
    fn lock(
        config: &FileConfig,
        file: File,
        provisional: Provisional,
    ) -> Result<LockedFile, FileDeviceError> {
        let path = config.path.as_path();
        let ours = file.metadata().map_err(refused("examine", path, ""))?;
        let is_device = ours.file_type().is_block_device();
        lock::lock(&file, is_device, config.read_only).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                FileDeviceError::InUse { path: path.to_owned(), owner: lock::owner(&file) }
            }
            _ => refused("lock", path, "")(error),
        })?;
        let locked = LockedFile { path: path.to_owned(), file, is_device, provisional };
        // The previous owner of the lock may have removed the file before it released the lock.
        if !path.metadata().is_ok_and(|found| is_same(&ours, &found)) {
            let error = io::Error::other("the file was replaced or removed during the opening");
            return Err(refused("open", path, "; try again")(error));
        }
        Ok(locked)
    }
}

/// The identity of a file, as [`Backing::identity`].
fn identity(found: &Metadata) -> String {
    if found.file_type().is_block_device() {
        return format!("device {}", found.rdev());
    }
    let made = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let (file_system, file) = (found.dev(), found.ino());
    format!("file {file_system} {file} {}", made.unwrap_or_default().as_nanos())
}

/// The present length in bytes of the file at a path, and its identity. Takes no lock.
pub(crate) fn probe(path: &Path) -> Result<(u64, String), FileDeviceError> {
    let failed = refused("examine", path, "");
    let found = path.metadata().map_err(&failed)?;
    let len = match found.file_type().is_block_device() {
        true => File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))),
        false => Ok(found.len()),
    };
    Ok((len.map_err(&failed)?, identity(&found)))
}

/// Whether both describe one file.
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Removes a file that the opening created and that was not kept, and then releases the lock.
impl Drop for LockedFile {
    fn drop(&mut self) {
        if !self.provisional.is_kept()
            && let (Ok(ours), Ok(found)) = (self.file.metadata(), self.path.symlink_metadata())
            && is_same(&ours, &found)
        {
            _ = std::fs::remove_file(&self.path);
        }
        lock::unlock(&self.file, self.is_device);
    }
}

fn refused<'a>(
    verb: &'static str,
    path: &'a Path,
    advice: &'static str,
) -> impl Fn(io::Error) -> FileDeviceError + use<'a> {
    move |source| FileDeviceError::Io { verb, path: path.to_owned(), source, advice }
}

/// The identity of an existing file that this process may open.
pub(crate) fn existing(config: &FileConfig) -> Result<String, FileDeviceError> {
    let failed = refused("open", config.path.as_path(), "");
    let found = config.path.metadata().map_err(&failed)?;
    let write = if config.read_only { Access::empty() } else { Access::WRITE_OK };
    let access = rustix::fs::access(&config.path, Access::READ_OK | write);
    access.map_err(|error| failed(error.into()))?;
    Ok(identity(&found))
}

/// The error for a file that cannot be found or examined.
fn absent(path: &Path, error: io::Error) -> FileDeviceError {
    let advice = match error.kind() {
        io::ErrorKind::NotFound => "; size=SIZE creates the file",
        _ => "",
    };
    refused("open", path, advice)(error)
}

/// Opens an existing file, which is not changed.
fn open_existing(config: &FileConfig, found: &Metadata) -> Result<File, FileDeviceError> {
    let (path, kind) = (config.path.as_path(), found.file_type());
    if !kind.is_file() && !kind.is_block_device() {
        let what = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_char_device() => "a character device",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "a file of another type",
        };
        let wanted = format!("a regular file or a block device; it is {what}");
        return Err(FileDeviceError::invalid("path", path.display(), wanted));
    }
    let mut options = OpenOptions::new();
    options.read(true).write(!config.read_only);
    if kind.is_block_device() && !config.read_only {
        options.custom_flags(libc::O_EXCL);
    }
    options.open(path).map_err(|error| {
        let is_read_only =
            matches!(error.raw_os_error(), Some(libc::EACCES | libc::EROFS | libc::EPERM));
        let advice = match () {
            () if error.raw_os_error() == Some(libc::EBUSY) => {
                "; it is mounted, or another program has it exclusively"
            }
            () if error.raw_os_error() == Some(libc::EACCES) && kind.is_block_device() => {
                "; the user needs the group of the device node, which is `disk` for most"
            }
            () if is_read_only && !config.read_only => "; read_only=1 opens it for reading",
            () => "",
        };
        refused("open", path, advice)(error)
    })
}

/// Creates a sparse file that only its owner may use. Locks it first: without the lock, a failed
/// opening could remove a file that another process has opened.
fn create(config: &FileConfig) -> Result<LockedFile, FileDeviceError> {
    let path = config.path.as_path();
    if config.read_only {
        let wanted = "an existing file: with read_only=1 none is created";
        return Err(FileDeviceError::invalid("path", path.display(), wanted));
    }
    let mut options = owner_only::make_options();
    let file = options.create_new(true).open(path).map_err(refused("create", path, ""))?;
    let locked = LockedFile::lock(config, file, Provisional::removed_at_close())?;
    let file = &locked.file;
    let made = file.set_len(config.size).and_then(|()| file.sync_all()).and_then(|()| {
        // The directory entry must survive a power cut as the file's first flush does.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    });
    made.map_err(refused("create", path, ""))?;
    Ok(locked)
}

/// Examines a locked file.
fn examine(config: &FileConfig, locked: LockedFile) -> Result<Backing, FileDeviceError> {
    let path = config.path.as_path();
    let failed = refused("examine", path, "");
    let (mut file, is_device) = (&locked.file, locked.is_device);
    let found = file.metadata().map_err(&failed)?;
    let len = file.seek(SeekFrom::End(0)).map_err(&failed)?;
    check_len(config, len)?;
    let (sector_bytes, physical) = if is_device {
        let sector = rustix::fs::ioctl_blksszget(file).map_err(|error| failed(error.into()))?;
        let physical = rustix::fs::ioctl_blkpbszget(file).map_err(|error| failed(error.into()))?;
        let granularity = queue_limit(found.rdev(), "zone_write_granularity").unwrap_or(0);
        (u64::from(sector).max(granularity), u64::from(physical))
    } else {
        (SECTOR_BYTES, found.blksize())
    };
    let direct = direct_io(config, file, sector_bytes, len)?;
    let logical = sector_bytes.max(direct.map_or(0, |it| it.offset_align));
    if !logical.is_power_of_two() || logical > BLOCK_BYTES_MAX || !len.is_multiple_of(logical) {
        let wanted = format!("a file whose length is a multiple of {logical} bytes; it has {len}");
        return Err(FileDeviceError::invalid("path", path.display(), wanted));
    }
    let zones = zones(config, &locked, (len, found.rdev()), direct.is_some())?;
    let is_usable = physical.is_power_of_two() && physical <= BLOCK_BYTES_MAX;
    let physical = logical.max(if is_usable { physical } else { PAGE_BYTES });
    Ok(Backing {
        len,
        logical_block_bytes: logical as u32,
        physical_block_bytes: physical as u32,
        is_direct: direct.is_some(),
        memory_align: direct.map_or(1, |it| it.memory_align),
        read_only: config.read_only,
        can_discard: !config.read_only
            && zones.is_none()
            && can_discard(file, is_device, found.rdev(), len),
        has_fua: direct.is_some() && is_device && zones.is_none(),
        zones,
        whole_sectors_max: whole_sectors_max(found.rdev()),
        locked,
    })
}

/// The zones of a zoned block device.
fn zones(
    config: &FileConfig,
    locked: &LockedFile,
    (len, device): (u64, u64),
    is_direct: bool,
) -> Result<Option<ZoneGeometry>, FileDeviceError> {
    let (path, file) = (config.path.as_path(), &locked.file);
    let zone_sectors = if locked.is_device { zoned::zone_sectors(file) } else { 0 };
    if zone_sectors == 0 {
        return Ok(None);
    }
    if !is_direct {
        // The page cache writes pages in any order.
        let wanted = "on: a zoned block device needs direct I/O";
        return Err(FileDeviceError::invalid("direct", config.direct, wanted));
    }
    let limit = |name| {
        let value = queue_limit(device, name).unwrap_or(0);
        u32::try_from(value).unwrap_or(0)
    };
    let limits = (limit("max_open_zones"), limit("max_active_zones"));
    let examined = zoned::examine(file, (len >> SECTOR_SHIFT, zone_sectors), limits);
    examined.map(Some).map_err(refused("examine the zones of", path, ""))
}

/// The longest request of a block device that the kernel does not split, in sectors: with a segment
/// for each page of its data, the first and last of which may be parts, and 256 pages at most.
fn whole_sectors_max(device: u64) -> u64 {
    let limit = |name, unit: u64| {
        queue_limit(device, name).map_or(u64::MAX, |count| count.saturating_mul(unit))
    };
    let segments = limit("max_segments", 1).min(BIO_PAGES_MAX).saturating_sub(1).max(1);
    limit("max_sectors_kb", 1024).min(segments * PAGE_BYTES).max(PAGE_BYTES) >> SECTOR_SHIFT
}

/// A limit of the queue of a block device; `None` if the kernel does not report it.
fn queue_limit(device: u64, name: &str) -> Option<u64> {
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    // A partition has the queue of its disk.
    let text = ["queue", "../queue"].iter().find_map(|queue| {
        std::fs::read_to_string(format!("/sys/dev/block/{number}/{queue}/{name}")).ok()
    });
    text?.trim().parse().ok()
}

/// Checks the length of the file.
fn check_len(config: &FileConfig, len: u64) -> Result<(), FileDeviceError> {
    let shown = config.path.display();
    if config.size != 0 && config.size != len {
        let wanted = format!("{len}, the length in bytes of `{shown}`, which is never resized");
        return Err(FileDeviceError::invalid("size", config.size, wanted));
    }
    if len == 0 || !len.is_multiple_of(SECTOR_BYTES) {
        let wanted = format!(
            "a file whose length is a multiple of {SECTOR_BYTES} bytes, and not 0; it has {len}: \
             `truncate -s %{SECTOR_BYTES} FILE` extends it"
        );
        return Err(FileDeviceError::invalid("path", shown, wanted));
    }
    Ok(())
}

/// The alignment that direct I/O needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DirectAlign {
    offset_align: u64,
    memory_align: usize,
}

/// The alignment of direct I/O, if the device is to use it.
fn direct_io(
    config: &FileConfig,
    file: &File,
    sector_bytes: u64,
    len: u64,
) -> Result<Option<DirectAlign>, FileDeviceError> {
    if config.direct == Direct::Off {
        return Ok(None);
    }
    let reported = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let reported = reported.ok().filter(|it| it.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    let align = reported.map(|it| DirectAlign {
        offset_align: it.stx_dio_offset_align.into(),
        memory_align: it.stx_dio_mem_align as usize,
    });
    // statx(2): an alignment of 0 means that the file has no direct I/O.
    let opened = match align {
        Some(align) if align.offset_align == 0 || align.memory_align == 0 => {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        }
        _ => reopen(file, config.read_only, true),
    };
    if config.direct == Direct::On {
        opened.map_err(refused(
            "open",
            &config.path,
            "; its file system has no direct I/O: direct=off uses the page cache",
        ))?;
        // The largest alignment that file systems with direct I/O need.
        let unknown = DirectAlign { offset_align: PAGE_BYTES, memory_align: PAGE_BYTES as usize };
        return Ok(Some(align.unwrap_or(unknown)));
    }
    let fits =
        |it: &DirectAlign| it.offset_align <= sector_bytes && len.is_multiple_of(sector_bytes);
    Ok(align.filter(|align| opened.is_ok() && fits(align)))
}

/// Opens the file of a description again, whatever its path is now.
fn reopen(file: &File, read_only: bool, is_direct: bool) -> io::Result<File> {
    let flags = if is_direct { libc::O_DIRECT } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(flags);
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether a range can be deallocated.
fn can_discard(file: &File, is_device: bool, device: u64, len: u64) -> bool {
    if is_device {
        // The call for a discard zeroes the range, so the device needs both commands.
        return ["discard_max_bytes", "write_zeroes_max_bytes"]
            .iter()
            .all(|limit| queue_limit(device, limit).is_some_and(|bytes| bytes > 0));
    }
    // Deallocating a range after the end of the file changes nothing.
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let at = len.next_multiple_of(PAGE_BYTES);
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, flags, at, PAGE_BYTES)).is_ok()
}

#[cfg(test)]
mod tests {
    use blockyard_testing::temp_dir::TempDir;

    use super::*;

    fn place(name: &str) -> TempDir {
        TempDir::new(&std::env::temp_dir(), &format!("blockyard-backing-{name}"))
    }

    #[test]
    fn extent_of_less_than_a_block_ends_with_the_range() {
        let place = place("extent");
        let path = place.fresh();
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let mut backing = Backing::open(&FileConfig::new(&path)).unwrap();
        backing.logical_block_bytes = 4096;
        for (from, sectors) in [(0, 1), (8, 7), (9, 8), (2047, 1)] {
            let extent = backing.extent(Sector(from), sectors);
            assert_eq!(extent, Extent { sectors, allocated: true, zero: false }, "{from}");
        }
    }

    #[test]
    fn file_that_is_not_at_its_path_any_more_is_refused() {
        let place = place("replaced");
        let config = FileConfig::new(place.fresh());
        for is_replaced in [false, true] {
            let file = owner_only::make_options().open(&config.path).unwrap();
            std::fs::remove_file(&config.path).unwrap();
            if is_replaced {
                std::fs::write(&config.path, "new").unwrap();
            }
            let opened = LockedFile::lock(&config, file, Provisional::removed_at_close());
            let text = opened.unwrap_err().to_string();
            assert!(text.contains("replaced or removed"), "{text}");
            // The file of another process stays.
            assert_eq!(config.path.exists(), is_replaced);
        }
    }

    #[test]
    fn file_is_removed_only_by_the_owner_of_its_lock() {
        let place = place("owner");
        let config = FileConfig::new(place.fresh());
        let open = || owner_only::make_options().open(&config.path).unwrap();
        let owner = LockedFile::lock(&config, open(), Provisional::removed_at_close()).unwrap();
        let other = LockedFile::lock(&config, open(), Provisional::removed_at_close());
        assert!(matches!(other, Err(FileDeviceError::InUse { .. })));
        assert!(config.path.exists());
        drop(owner);
        assert!(!config.path.exists());
    }
}
