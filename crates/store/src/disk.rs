//! A disk as the storage of a pool: a block device, or an existing file used like one. This process
//! has it exclusively. It has the superblock at its beginning, the label of a copy if there are
//! two, and then as many segments as fit.
//!
//! Other data on the disk are not touched, unless the user who makes the pool consents.

pub(super) mod contents;
mod discard;

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blockyard_core::owner_only;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::label::{self, Label};
use blockyard_volume_format::superblock::{self, FILE, SLOT_BYTES, SLOTS, Superblock};
use rustix::fs::{FallocateFlags, OFlags};

use crate::buffer::{ALIGN, Buffer, Memory};
use crate::error::StoreError;
use crate::file::{self, OnDemand, Syncs};
use crate::lock::Lock;
use crate::lock_owner::LockOwner;
use crate::{Layout, PoolFile, Purpose, StoreFile};

/// Offset of the first segment, in bytes.
pub(crate) const SEGMENTS_AT: u64 = 1 << 20;

/// Offset of the lock owner's entry, which has [`LOCK_OWNER_BYTES`] bytes.
const LOCK_OWNER_AT: u64 = SLOTS * SLOT_BYTES as u64;

/// Length of the lock owner's entry, in bytes.
const LOCK_OWNER_BYTES: usize = 4096;

/// Offset of the label, on one of two copies.
const LABEL_AT: u64 = LOCK_OWNER_AT + LOCK_OWNER_BYTES as u64;

/// Length of the part that is read to recognise a pool, in bytes.
const HEAD_BYTES: usize = LABEL_AT as usize + label::BYTES;

/// Fewest segments of a new pool.
const SEGMENTS_MIN: u64 = 16;

/// A new pool has at least this many segments, if they need not be shorter than
/// [`SEGMENT_BYTES_MIN`] for that. A few segments are kept in reserve, which must be a small part.
pub const SEGMENTS_WANTED: u64 = 64;

/// Shortest segment that a new pool has for want of space, in bytes.
pub const SEGMENT_BYTES_MIN: u32 = 4 << 20;

/// Returns the length of the segments of a new pool: `segment_bytes`, halved as often as is needed
/// for `wanted` segments in `space` bytes, but not below `least`.
pub fn shorter(mut segment_bytes: u32, space: u64, wanted: u64, least: u32) -> u32 {
    while segment_bytes > least
        && space / u64::from(segment_bytes) < wanted
        && segment_bytes.is_multiple_of(8192)
    {
        segment_bytes /= 2;
    }
    segment_bytes
}

/// How long a device may stay busy after its lock was released.
const LEAVE_MAX: Duration = Duration::from_millis(500);

/// How often opening is tried meanwhile.
const LOCK_LOOK: Duration = Duration::from_millis(10);

/// A disk that this process has exclusively.
#[derive(Debug)]
pub(crate) struct Disk {
    path: PathBuf,
    file: Arc<File>,
    /// The file once more for the parts, which do not keep it open.
    parts: Arc<OnDemand>,
    /// Excludes other processes until it is dropped, or until this process dies and its last write
    /// has reached the disk.
    lock: Arc<Lock>,
    is_device: bool,
    is_direct: bool,
    /// Shared error state of the parts' syncs, if they use the page cache.
    syncs: Arc<Syncs>,
    /// Logical sector size of the disk, in bytes.
    sector_bytes: u32,
    /// Alignment of the offsets and lengths that the system reads and writes, in bytes.
    io_align: u32,
    purpose: Purpose,
    /// Set when the layout of the pool, or of the pool to be made, is known.
    segment_bytes: OnceLock<u32>,
    /// Set when there is a pool.
    is_pool: OnceLock<()>,
    /// Set when the disk is one of two copies.
    is_copy: OnceLock<()>,
    /// Set when the disk has no other data.
    is_ready: OnceLock<()>,
    /// Set when the disk has refused to discard.
    keeps: OnceLock<()>,
    /// Set when the lock owner's entry is written.
    is_held: OnceLock<()>,
}

impl Disk {
    /// Whether a path names a disk.
    pub(crate) fn is_one(path: &Path) -> bool {
        path.metadata().is_ok_and(|it| it.is_file() || it.file_type().is_block_device())
    }

    /// Opens and locks a disk.
    pub(crate) fn take(path: &Path, purpose: Purpose) -> Result<Disk, StoreError> {
        let doing = |what: &str| StoreError::io(format!("cannot {what} `{}`", path.display()));
        let kind = path.metadata().map_err(|error| doing("examine")(error))?.file_type();
        let is_device = kind.is_block_device();
        let lock = acquire(path, is_device, purpose)?;
        // Another process may have the same disk by another name, such as a second loop device on
        // the same file or a second path to the same unit, which has a lock of its own.
        let entry = lock_owner(&lock);
        if purpose != Purpose::ReadOnly && entry.is_other_running() {
            return Err(StoreError::InUse { path: path.to_owned(), lock_owner: entry });
        }
        let (file, is_direct) = again(&lock, purpose).map_err(|error| doing("open")(error))?;
        let sector_bytes = if is_device {
            rustix::fs::ioctl_blksszget(&file).map_err(|error| doing("examine")(error.into()))?
        } else {
            512
        };
        if sector_bytes > ALIGN as u32 || !sector_bytes.is_power_of_two() {
            let value = format!("{}, whose sectors have {sector_bytes} bytes", path.display());
            let wanted = format!("a disk with sectors of {ALIGN} bytes at most");
            return Err(StoreError::Invalid { field: "path", value, wanted });
        }
        let io_align = match is_direct {
            true if is_device => sector_bytes,
            true => file::direct_align(&file),
            false => file::ANY_ALIGN,
        };
        let file = Arc::new(file);
        let disk = Disk {
            path: path.to_owned(),
            parts: OnDemand::disk(&file),
            file,
            lock: Arc::new(lock),
            is_device,
            is_direct,
            syncs: Arc::default(),
            sector_bytes,
            io_align,
            purpose,
            segment_bytes: OnceLock::new(),
            is_pool: OnceLock::new(),
            is_copy: OnceLock::new(),
            is_ready: OnceLock::new(),
            keeps: OnceLock::new(),
            is_held: OnceLock::new(),
        };
        disk.recognise().map_err(|error| doing("read")(error))?;
        Ok(disk)
    }

    /// Looks for a pool, or a copy of one.
    fn recognise(&self) -> io::Result<()> {
        let Some(head) = Head::read(&self.part(0, HEAD_BYTES as u64))? else { return Ok(()) };
        if self.purpose == Purpose::Overwrite && !head.is_known() {
            // The power was cut while the pool was made, or neither slot is readable any more.
            if head.is_pool() || head.is_copy() {
                let shown = self.path.display();
                tracing::warn!("{shown}: neither superblock nor label of a pool can be read");
            }
            return Ok(());
        }
        if head.is_pool() {
            _ = self.is_pool.set(());
        }
        if head.is_copy() {
            _ = self.is_copy.set(());
        }
        if self.purpose != Purpose::ReadOnly && (head.is_pool() || head.is_copy()) {
            self.narrow();
        }
        Ok(())
    }

    /// Removes the access rights of other users from a file that is used as a disk: it contains the
    /// volumes. The system manages the modes of block devices.
    fn narrow(&self) {
        if self.is_device {
            return;
        }
        let shown = self.path.display();
        match owner_only::narrow(&self.file) {
            Ok(false) => {}
            Ok(true) => tracing::warn!("{shown}: other users had access: set its mode to 0600"),
            Err(error) => tracing::warn!("{shown}: other users may have access: {error}"),
        }
    }

    fn part(&self, base: u64, len: u64) -> PoolFile {
        let syncs = (!self.is_direct).then_some(&self.syncs);
        PoolFile::part((&self.parts, self.file.as_raw_fd() as u32), base, len, syncs)
            .aligned(self.io_align)
    }

    /// The current length in bytes: the disk may have grown.
    fn len(&self) -> io::Result<u64> {
        let len = (&*self.file).seek(SeekFrom::End(0))?;
        // Direct I/O cannot read an unaligned end of a file.
        Ok(if self.is_device { len } else { len / ALIGN as u64 * ALIGN as u64 })
    }

    /// The lock of the disk.
    pub(crate) fn lock(&self) -> &Arc<Lock> {
        &self.lock
    }

    /// Alignment of the offsets and lengths that the system reads and writes, in bytes.
    pub(crate) fn io_align(&self) -> u32 {
        self.io_align
    }

    /// Whether I/O bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Sets the layout of the pool. For a new pool, returns the possible layout and prepares the
    /// disk.
    pub(crate) fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        let (shown, sector_bytes) = (self.path.display(), self.sector_bytes);
        let division = if is_new { self.division(wanted)? } else { wanted };
        if division.align < sector_bytes {
            let value = format!("{shown}, whose sectors have {sector_bytes} bytes");
            let wanted = format!(
                "a disk with sectors of {} bytes or shorter, for which its pool was made",
                division.align
            );
            return Err(StoreError::Invalid { field: "path", value, wanted });
        }
        if is_new {
            self.make_ready()?;
            return Ok(division);
        }
        _ = self.segment_bytes.set(division.segment_bytes);
        let is_ours = [&self.is_pool, &self.is_copy, &self.is_ready];
        // The entry is informative only, so an error is logged and ignored.
        if is_ours.into_iter().any(|it| it.get().is_some())
            && let Err(error) = self.write_lock_owner(&LockOwner::this(None))
        {
            tracing::warn!("{shown}: {error}");
        }
        Ok(division)
    }

    /// Prepares the disk for a new pool, or a copy of one.
    ///
    /// # Errors
    /// If the disk is too short, or has other data.
    pub(crate) fn prepare(&self) -> Result<(), StoreError> {
        if self.is_pool.get().is_some() || self.is_copy.get().is_some() {
            return Ok(());
        }
        self.division(Layout { align: self.sector_bytes, segment_bytes: SEGMENT_BYTES_MIN })?;
        self.make_ready()
    }

    /// Refuses a disk with other data, unless it may be overwritten, and allocates the space.
    fn make_ready(&self) -> Result<(), StoreError> {
        if self.is_ready.get().is_some() {
            return Ok(());
        }
        let shown = self.path.display();
        let foreign =
            self.foreign_data().map_err(StoreError::io(format!("cannot read `{shown}`")))?;
        let may_overwrite = self.purpose == Purpose::Overwrite && self.is_copy.get().is_none();
        if let Some(foreign) = foreign.as_ref().filter(|_| !may_overwrite) {
            let wanted = format!(
                "an empty disk; it has {foreign}. To overwrite that permanently: `blockyard volume \
                 create {shown} NAME --size SIZE --force`, or `attach --force`"
            );
            let value = shown.to_string();
            return Err(StoreError::Invalid { field: "path", value, wanted });
        }
        let cleared = self.clear(foreign.as_deref());
        cleared.map_err(StoreError::io(format!("cannot write to `{shown}`")))?;
        self.narrow();
        _ = self.is_ready.set(());
        Ok(())
    }

    /// The layout of a new pool on this disk.
    fn division(&self, wanted: Layout) -> Result<Layout, StoreError> {
        let shown = self.path.display();
        let len = self.len().map_err(StoreError::io(format!("cannot examine `{shown}`")))?;
        let space = len.saturating_sub(SEGMENTS_AT);
        let segment_bytes =
            shorter(wanted.segment_bytes, space, SEGMENTS_WANTED, SEGMENT_BYTES_MIN);
        if space / u64::from(segment_bytes) < SEGMENTS_MIN {
            let value = shown.to_string();
            let least = SEGMENTS_AT + SEGMENTS_MIN * u64::from(segment_bytes);
            let wanted = format!("a disk of at least {least} bytes; it has {len}");
            return Err(StoreError::Invalid { field: "path", value, wanted });
        }
        Ok(Layout { align: wanted.align.max(self.sector_bytes), segment_bytes })
    }

    /// Describes other data on the disk, if there are any.
    fn foreign_data(&self) -> io::Result<Option<String>> {
        let len = self.len()?;
        let mut ours = vec![(LOCK_OWNER_AT..LABEL_AT, &b"pid "[..])];
        if self.is_copy.get().is_some() {
            ours.push((LABEL_AT..HEAD_BYTES as u64, &[]));
        }
        contents::find(&self.part(0, len), len, &ours)
    }

    /// Clears a disk before a pool is made on it.
    fn clear(&self, foreign: Option<&str>) -> io::Result<()> {
        let len = self.len()?;
        if let Some(foreign) = foreign {
            tracing::warn!("{}: overwriting {foreign}, as requested", self.path.display());
            contents::wipe(&self.part(0, len), len)?;
        }
        if self.is_device && self.purpose == Purpose::Overwrite {
            // Discard the segments, so that the disk knows that all of it is unused. The area
            // before them may already have a label.
            self.discard(&self.part(SEGMENTS_AT, len.saturating_sub(SEGMENTS_AT)));
        } else {
            // Allocate all space now: a file with holes could run out of space when it is too late
            // to refuse.
            let empty = FallocateFlags::empty();
            match rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, empty, 0, len)) {
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.file.sync_data()
    }

    /// Overwrites a pool with zeros, as far as a search for data on the disk reads. The superblock
    /// is first: a label that was lost alone would leave a pool of one copy.
    pub(crate) fn erase(&self) -> io::Result<()> {
        let len = self.len()?;
        let mut zeros = Memory::new(LOCK_OWNER_AT).take_beyond(LOCK_OWNER_AT as usize);
        zeros.fill(0);
        let superblock = self.part(0, LOCK_OWNER_AT);
        superblock.write_at(0, &[&zeros])?;
        superblock.sync()?;
        contents::wipe(&self.part(0, len), len)
    }

    /// Writes the lock owner's entry: the process, and its control socket.
    pub(crate) fn write_lock_owner(&self, lock_owner: &LockOwner) -> io::Result<()> {
        if self.purpose == Purpose::ReadOnly {
            return Ok(());
        }
        _ = self.is_held.set(());
        let text = lock_owner.print();
        let mut bytes = Memory::new(LOCK_OWNER_BYTES as u64).take_beyond(LOCK_OWNER_BYTES);
        bytes.fill(0);
        let len = text.len().min(LOCK_OWNER_BYTES);
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.part(LOCK_OWNER_AT, LOCK_OWNER_BYTES as u64).write_at(0, &[&bytes])
    }

    /// Opens the superblock, the label, or a segment that fits.
    pub(crate) fn open(&self, name: &str) -> io::Result<Option<PoolFile>> {
        if name == FILE {
            return Ok(self.is_pool.get().map(|()| self.part(0, LOCK_OWNER_AT)));
        }
        if name == label::FILE {
            return Ok(self.is_copy.get().map(|()| self.label()));
        }
        let number = name.strip_prefix("segment-").and_then(|it| u64::from_str_radix(it, 16).ok());
        let Some(number) = number else { return Ok(None) };
        let Some(bytes) = self.segment_bytes.get() else {
            return Err(io::Error::other("the layout of the pool on the disk is not set"));
        };
        let bytes = u64::from(*bytes);
        let base = SEGMENTS_AT + number * bytes;
        Ok((base + bytes <= self.len()?).then(|| self.part(base, bytes)))
    }

    fn label(&self) -> PoolFile {
        self.part(LABEL_AT, label::BYTES as u64)
    }

    /// How many segments fit.
    pub(crate) fn segments_max(&self) -> usize {
        let bytes = self.segment_bytes.get().copied().unwrap_or(u32::MAX);
        let space = self.len().unwrap_or(0).saturating_sub(SEGMENTS_AT);
        (space / u64::from(bytes)) as usize
    }

    /// The part that will have this name once [`Disk::rename`] declares it complete.
    pub(crate) fn create(&self, name: &str) -> io::Result<PoolFile> {
        match name.strip_suffix(".new").unwrap_or(name) {
            FILE => Ok(self.part(0, LOCK_OWNER_AT)),
            label::FILE => Ok(self.label()),
            name => self.open(name)?.ok_or_else(|| io::ErrorKind::StorageFull.into()),
        }
    }

    /// Declares the part of this name complete.
    pub(crate) fn rename(&self, to: &str) {
        match to {
            FILE => _ = self.is_pool.set(()),
            label::FILE => _ = self.is_copy.set(()),
            _ => {}
        }
    }

    /// Whether a discard has an effect.
    pub(crate) fn discards(&self) -> bool {
        self.is_device && self.keeps.get().is_none()
    }

    /// Discards the contents of a part.
    pub(crate) fn discard(&self, part: &PoolFile) {
        if !self.discards() {
            return;
        }
        let Ok(len) = part.len() else { return };
        if let Err(error) = discard::discard(&self.file, part.source_offset(0), len)
            && self.keeps.set(()).is_ok()
        {
            tracing::info!("{}: it does not discard: {error}", self.path.display());
        }
    }
}

/// Clears the lock owner's entry, and closes the disk for readers that keep parts of it.
impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_held.get().is_some() {
            // An entry that remains is ignored once the lock is released.
            _ = self.write_lock_owner(&LockOwner::default());
        }
        self.parts.leave();
    }
}

/// Opens and locks a disk; a device is opened exclusively (`O_EXCL`).
fn acquire(path: &Path, is_device: bool, purpose: Purpose) -> Result<Lock, StoreError> {
    let begin = Instant::now();
    let exclusive = if is_device { OFlags::EXCL } else { OFlags::empty() };
    loop {
        let locked = match open(path, purpose, exclusive) {
            Ok(file) => lock(file, path),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(busy(path)),
            Err(error) => Err(StoreError::io(format!("cannot open `{}`", path.display()))(error)),
        };
        match locked {
            // A device may stay busy for a moment after its lock was released.
            Err(StoreError::Invalid { .. }) if begin.elapsed() < LEAVE_MAX => {}
            locked => return locked,
        }
        std::thread::sleep(LOCK_LOOK);
    }
}

/// Opens the locked disk again for I/O, with direct I/O if possible.
fn again(lock: &File, purpose: Purpose) -> io::Result<(File, bool)> {
    let path = format!("/proc/self/fd/{}", lock.as_raw_fd());
    let path = Path::new(&path);
    match open(path, purpose, OFlags::DIRECT) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Ok((open(path, purpose, OFlags::empty())?, false))
        }
        Err(error) => Err(error),
    }
}

fn open(path: &Path, purpose: Purpose, flags: OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(purpose != Purpose::ReadOnly).custom_flags(flags.bits() as i32);
    options.open(path)
}

/// The error for a device that is busy: names the process that has it, or where it is mounted.
fn busy(path: &Path) -> StoreError {
    let file = File::open(path);
    if let Ok(file) = &file
        && matches!(file.try_lock(), Err(TryLockError::WouldBlock))
    {
        return StoreError::InUse { path: path.to_owned(), lock_owner: lock_owner(file) };
    }
    let mount_point =
        file.and_then(|file| file.metadata()).ok().and_then(|it| mounted_at(it.rdev()));
    let wanted = match mount_point {
        Some(path) => format!("a device that is not in use; it is mounted at `{path}`"),
        None => {
            "a device that is not in use; it, or a part of it, is mounted, is swap, or belongs \
                 to another device"
                .to_owned()
        }
    };
    StoreError::Invalid { field: "path", value: path.display().to_string(), wanted }
}

/// The mount point of a device.
fn mounted_at(device: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut mounts = mounts.lines().map(|line| line.split(' '));
    // proc(5): number, parent, major:minor, root, mount point.
    mounts.find_map(|mut words| {
        (words.nth(2) == Some(&number)).then(|| words.nth(1).map(str::to_owned)).flatten()
    })
}

/// Locks a disk against other processes of this program, and against others that use `flock`.
fn lock(file: File, path: &Path) -> Result<Lock, StoreError> {
    Lock::take(file).map_err(|error| match error {
        TryLockError::WouldBlock => {
            let lock_owner = File::open(path).map(|file| lock_owner(&file)).unwrap_or_default();
            StoreError::InUse { path: path.to_owned(), lock_owner }
        }
        TryLockError::Error(error) => {
            StoreError::io(format!("cannot lock `{}`", path.display()))(error)
        }
    })
}

/// The lock owner's entry on a disk.
fn lock_owner(file: &File) -> LockOwner {
    let mut bytes = [0; LOCK_OWNER_BYTES];
    match file.read_exact_at(&mut bytes, LOCK_OWNER_AT) {
        Ok(()) => LockOwner::parse(&String::from_utf8_lossy(&bytes)),
        Err(_) => LockOwner::default(),
    }
}

/// The head of a disk: superblock slots, lock owner's entry and label.
struct Head(Buffer);

impl Head {
    /// Reads the head; `None` if a file is shorter.
    fn read(file: &PoolFile) -> io::Result<Option<Head>> {
        let mut bytes = Memory::new(HEAD_BYTES as u64).take_beyond(HEAD_BYTES);
        match file.read_at(0, &mut bytes) {
            Ok(()) => Ok(Some(Head(bytes))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn slots(&self) -> &[u8] {
        &self.0[..LOCK_OWNER_AT as usize]
    }

    fn label(&self) -> &[u8] {
        &self.0[LABEL_AT as usize..]
    }

    /// Whether one of the slots has the mark of a superblock, whatever its other contents.
    fn is_pool(&self) -> bool {
        self.slots().chunks(SLOT_BYTES).any(superblock::is_marked)
    }

    /// Whether there is a valid label, or the marks of one. The slots are written one after the
    /// other, so a single slot that cannot be read was never completed.
    fn is_copy(&self) -> bool {
        match Label::newest(self.label()) {
            Ok(_) | Err(FormatError::Version { .. }) => true,
            Err(_) => self.label().chunks(label::SLOT_BYTES).all(label::is_marked),
        }
    }

    /// Whether the superblock or the label can be read, by this program or a newer one.
    fn is_known(&self) -> bool {
        let of_newer = |error| matches!(error, FormatError::Version { .. });
        Superblock::all(self.slots()).map_or_else(of_newer, |_| true)
            || Label::newest(self.label()).map_or_else(of_newer, |_| true)
    }
}

/// Whether a disk holds a pool.
///
/// # Errors
/// If the disk cannot be read.
pub(crate) fn is_pool(path: &Path) -> io::Result<bool> {
    Ok(head(path)?.is_some_and(|head| head.is_pool()))
}

/// The bytes of the label, if the disk is one of two copies.
///
/// # Errors
/// If the disk cannot be read.
pub(crate) fn label_of(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let Some(head) = head(path)? else { return Ok(None) };
    Ok((head.is_copy() && head.is_known()).then(|| head.label().to_vec()))
}

/// The superblock's slots, if the disk holds a pool.
///
/// # Errors
/// If the disk cannot be read.
pub(crate) fn superblock_of(path: &Path) -> io::Result<Option<Vec<u8>>> {
    Ok(head(path)?.filter(Head::is_pool).map(|head| head.slots().to_vec()))
}

fn head(path: &Path) -> io::Result<Option<Head>> {
    if !Disk::is_one(path) {
        return Ok(None);
    }
    Head::read(&PoolFile::of(File::open(path)?))
}
