//! The real paths of a pool's copies.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blockyard_core::{Bytes, owner_only};
use blockyard_volume_format::label::{BYTES, FILE, Label};
use blockyard_volume_format::superblock::Superblock;

use super::assemble::{NamedCopy, Terms, successor};
use super::attach;
use super::{Mirror, VerifyPool};
use crate::disk::{self, Disk};
use crate::error::StoreError;
use crate::remote::{RemoteParameters, is_remote};
use crate::{
    PoolBacking, PoolStore, Purpose, SegmentFiles as _, SegmentStore as _, StoreKind,
    StoreLocation as _, is_pool, no_pool, superblock_at,
};

/// The paths of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPaths {
    /// The path of the directory or disk.
    pub path: PathBuf,
    /// The path of the second copy. If none is given, the one in the label of the first.
    pub path2: Option<PathBuf>,
    /// If one copy is missing, and may be the newer one, use the other one anyway.
    pub degraded: bool,
    /// The parameters of a remote pool.
    pub remote: RemoteParameters,
}

/// The copies of a pool that this process has locked.
pub enum LockedPaths {
    /// A pool of one copy.
    One(NamedCopy<PoolStore>),
    /// The copies of a pool of two; a copy may be missing.
    Two([NamedCopy<PoolStore>; 2]),
}

impl LockedPaths {
    /// Opens the storage of the pool. A copy that is stale, or was joining when the pool was
    /// closed, gets every write from now on, and is to be resynced.
    ///
    /// # Errors
    /// As [`Mirror::assemble`] and [`Mirror::resume_stale`].
    pub fn assemble<V: VerifyPool>(
        self,
        degraded: bool,
        verifier: &V,
    ) -> Result<PoolBacking, V::Error> {
        self.open(Terms::Use { degraded }, verifier)
    }

    fn open<V: VerifyPool>(self, terms: Terms, verifier: &V) -> Result<PoolBacking, V::Error> {
        let mirror = match self {
            LockedPaths::One(one) => Mirror::assemble_single(one, terms)?,
            LockedPaths::Two(given) => Mirror::assemble(given, terms, verifier)?,
        };
        let kind = if mirror.is_uring() { StoreKind::Auto } else { StoreKind::Threads };
        mirror.resume_joining(|path| {
            // A directory is not made: its disk may not be mounted.
            if !has_location(path)? {
                return Err(no_pool(path));
            }
            PoolStore::take(path)?.with(kind)
        })?;
        mirror.resume_stale(verifier)?;
        Ok(mirror)
    }
}

impl PoolPaths {
    /// One path; the label there may name the second copy.
    pub fn of(path: impl Into<PathBuf>) -> PoolPaths {
        PoolPaths {
            path: path.into(),
            path2: None,
            degraded: false,
            remote: RemoteParameters::default(),
        }
    }

    /// The path of the second copy, as given or as named by the label.
    pub fn second(&self) -> Result<Option<PathBuf>, StoreError> {
        match &self.path2 {
            Some(second) => Ok(Some(second.clone())),
            // A copy that was detached is refused when it is opened.
            None => Ok(known(&self.path)?.and_then(|label| {
                let has_other = !label.is_detached() && !label.other.as_os_str().is_empty();
                has_other.then_some(label.other)
            })),
        }
    }

    /// The paths of the copies that the pool has now, if one of these paths is that of a copy which
    /// was detached or replaced: a configuration may still name it. Logs a warning that names both.
    ///
    /// # Errors
    /// If a label cannot be read.
    pub fn current(&self) -> Result<PoolPaths, StoreError> {
        let mut now = self.clone();
        for _ in 0..HOPS_MAX {
            let Some(path) = successor_of(&now.path).filter(|path| has_copy(path)) else { break };
            warn_replaced("path", &now.path, &path);
            now.path = path;
        }
        if now.path != self.path && now.path2.as_ref() == Some(&now.path) {
            now.path2 = None;
        }
        let Some(second) = &now.path2 else { return Ok(now) };
        if is_replaced(second, &now.path) {
            let other = now.first_label().map(|label| label.other);
            warn_replaced("path2", second, other.as_deref().unwrap_or(&now.path));
            now.path2 = other.filter(|it| !it.as_os_str().is_empty());
        } else if is_replaced(&now.path, second) {
            let label = known(second).ok().flatten();
            let other = label.map(|label| label.other).filter(|it| !it.as_os_str().is_empty());
            let path = other.unwrap_or_else(|| second.clone());
            warn_replaced("path", &now.path, &path);
            now.path2 = now.path2.take().filter(|second| *second != path);
            now.path = path;
        }
        Ok(now)
    }

    fn first_label(&self) -> Option<Label> {
        known(&self.path).ok().flatten()
    }

    /// The canonical paths. Makes the directories if there is no pool yet. If there is one, a
    /// missing directory is not made: its disk may not be mounted.
    pub fn canonical(&self) -> Result<PoolPaths, StoreError> {
        let (degraded, remote) = (self.degraded, self.remote.clone());
        self.check_remote()?;
        let Some(second) = self.second()? else {
            let path = crate::prepare_path(&self.path)?;
            return Ok(PoolPaths { path, path2: None, degraded, remote });
        };
        // If a path cannot be examined, nothing is made.
        let is_used = |path: &PathBuf| {
            is_pool(path).unwrap_or(true)
                || !matches!(crate::metadata_of(&path.join(FILE)), Ok(None))
                || Disk::is_one(path)
        };
        let is_fresh = ![&self.path, &second].into_iter().any(is_used);
        let canonical = |path: &PathBuf| match path.canonicalize() {
            Err(_) if is_fresh => crate::prepare_path(path),
            // A missing copy is named as the label of the other one names it.
            Err(_) => Ok(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            Ok(canonical) => Ok(canonical),
        };
        let paths = [&self.path, &second].into_iter();
        let new: Vec<_> = paths.flat_map(|path| owner_only::missing_directories(path)).collect();
        let both = canonical(&self.path).and_then(|path| Ok((path, canonical(&second)?)));
        let checked = both.and_then(|(path, second)| {
            check_both(&path, &second)?;
            Ok(PoolPaths { path, path2: Some(second), degraded, remote })
        });
        if checked.is_err() {
            // Only an empty directory is removed.
            new.iter().for_each(|path| _ = std::fs::remove_dir(path));
        }
        checked
    }

    /// The directories that do not exist yet, with their missing parents; a directory before its
    /// parent.
    pub fn missing_directories(&self) -> Vec<PathBuf> {
        let local = self.all().into_iter().filter(|path| !is_remote(path));
        local.flat_map(|path| owner_only::missing_directories(&path)).collect()
    }

    /// Whether there is a pool at one of the paths, or a copy of one, or that cannot be determined.
    pub fn has_pool(&self) -> bool {
        let has = |path: &Path| is_pool(path).unwrap_or(true) || !matches!(known(path), Ok(None));
        has(&self.path) || self.path2.as_deref().is_some_and(has)
    }

    /// The superblock's slots of the pool, the best ones of its copies, read without its lock.
    ///
    /// # Errors
    /// If there is no pool, or no copy can be read and written by this process.
    pub fn superblock(&self) -> Result<Vec<u8>, StoreError> {
        let (mut copies, mut failed) = (Vec::new(), None);
        let now = self.current()?;
        for path in std::iter::once(&now.path).chain(&now.second()?) {
            match superblock_at(path) {
                Ok(slots) => copies.extend(slots),
                Err(error) => _ = failed.get_or_insert(error),
            }
        }
        match (copies.is_empty(), failed) {
            (false, _) => Ok(Superblock::best(copies.iter().map(Vec::as_slice))),
            (true, Some(error)) => Err(error),
            (true, None) => Err(no_pool(&self.path)),
        }
    }

    /// All paths.
    pub fn all(&self) -> Vec<PathBuf> {
        std::iter::once(&self.path).chain(&self.path2).cloned().collect()
    }

    /// Refuses a second copy where one of the two is remote.
    fn check_remote(&self) -> Result<(), StoreError> {
        match &self.path2 {
            Some(second) if is_remote(&self.path) || is_remote(second) => {
                let wanted = "none: a pool in an object store has one copy".to_owned();
                let value = second.display().to_string();
                Err(StoreError::Invalid { field: "path2", value, wanted })
            }
            _ => Ok(()),
        }
    }

    /// Locks the copies for this process.
    ///
    /// # Errors
    /// If another process has locked one of them.
    pub fn lock(&self, purpose: Purpose, kind: StoreKind) -> Result<LockedPaths, StoreError> {
        self.lock_with(purpose, |directory| directory.with(kind))
    }

    /// Locks and opens the pool for reading only, so that nothing changes.
    ///
    /// # Errors
    /// If another process has locked a copy, or the copies do not belong together.
    pub fn open_read_only<V: VerifyPool>(&self, verifier: &V) -> Result<PoolBacking, V::Error> {
        let now = self.current()?;
        let paths = PoolPaths { path2: now.second()?, ..now };
        paths.lock_with(Purpose::ReadOnly, Ok)?.open(Terms::ReadOnly, verifier)
    }

    fn lock_with(
        &self,
        purpose: Purpose,
        with: impl Fn(PoolStore) -> Result<PoolStore, StoreError>,
    ) -> Result<LockedPaths, StoreError> {
        let take = |path: &Path| PoolStore::take_with(path, purpose, &self.remote);
        let mut failed = None;
        let mut copy = |path: &PathBuf| {
            let locked = match has_location(path) {
                Ok(has_location) => has_location.then(|| take(path)).transpose(),
                Err(error) => Err(error),
            };
            let directory = match locked {
                // A failed disk may still have a name.
                Err(error @ StoreError::Io { .. }) => {
                    tracing::error!("{error}: treating this copy as missing");
                    failed.get_or_insert(error);
                    None
                }
                locked => locked?.map(&with).transpose()?,
            };
            let path = directory.as_ref().map_or(path.as_path(), PoolStore::path).to_owned();
            Ok::<_, StoreError>(NamedCopy { directory, path })
        };
        Ok(match &self.path2 {
            None => {
                let one = with(take(&self.path)?)?;
                let path = one.path().to_owned();
                LockedPaths::One(NamedCopy { directory: Some(one), path })
            }
            Some(second) => {
                let both = [copy(&self.path)?, copy(second)?];
                match failed {
                    Some(error) if both.iter().all(|it| it.directory.is_none()) => {
                        return Err(error);
                    }
                    _ => LockedPaths::Two(both),
                }
            }
        })
    }
}

/// Most copies that were detached one after the other, each of which names the next one.
const HOPS_MAX: usize = 8;

/// Whether there is a pool, or a copy that belongs to one.
pub fn has_copy(path: &Path) -> bool {
    is_pool(path).unwrap_or(false)
        && known(path).is_ok_and(|label| label.is_none_or(|label| !label.is_detached()))
}

/// Whether the copy that was at `old` does not belong to the pool at `path` any more: it was
/// detached, or nothing is there and the pool has its other copy elsewhere.
fn is_replaced(old: &Path, path: &Path) -> bool {
    if !has_copy(path) {
        return false;
    }
    match known(old) {
        Ok(Some(label)) => label.is_detached() || successor_of(old).is_some(),
        // An empty directory may be where a disk is not mounted.
        Ok(None) if !matches!(crate::metadata_of(old), Ok(None)) => false,
        Ok(None) => {
            let Some(label) = known(path).ok().flatten() else { return false };
            let set = |path: &Path| known(path).ok().flatten().map(|other| other.set);
            let real = old.canonicalize().unwrap_or_else(|_| old.to_owned());
            label.other != real && label.other != old && set(&label.other) == Some(label.set)
        }
        Err(_) => false,
    }
}

/// The path of a copy that belongs to the pool, if the copy at `path` does not.
fn successor_of(path: &Path) -> Option<PathBuf> {
    let known = |path: &Path| known(path).ok().flatten();
    successor(&known(path)?, known)
}

fn warn_replaced(field: &str, old: &Path, now: &Path) {
    tracing::warn!(
        "{field} `{}` is not, or no longer, a copy of this pool; opening `{}`. Change the \
         configuration",
        old.display(),
        now.display()
    );
}

/// Refuses paths that cannot be the two copies of one pool.
fn check_both(path: &Path, second: &Path) -> Result<(), StoreError> {
    for (field, path) in [("path", path), ("path2", second)] {
        if path.exists() && !has_location(path)? {
            let wanted = "a directory, a block device or a file".to_owned();
            let value = path.display().to_string();
            return Err(StoreError::Invalid { field, value, wanted });
        }
    }
    same_kind(path, second, "path2")?;
    if path == second {
        let (value, wanted) = (second.display().to_string(), "another path than `path`");
        return Err(StoreError::Invalid { field: "path2", value, wanted: wanted.to_owned() });
    }
    Ok(())
}

/// The label of the copy at `path`. It is not locked, so the label is checked again later. A path
/// with an unreadable label is not a pool of one copy.
fn known(path: &Path) -> Result<Option<Label>, StoreError> {
    // A remote pool has one copy, without a label.
    if is_remote(path) {
        return Ok(None);
    }
    if Disk::is_one(path) {
        let label = disk::label_of(path);
        let label = label.map_err(StoreError::io(format!("cannot read `{}`", path.display())))?;
        return Ok(label.map(|bytes| Label::newest(&bytes)).transpose()?.map(|it| it.0));
    }
    let name = path.join(FILE);
    // Do not block if the label is a FIFO.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let bytes = match OpenOptions::new().read(true).custom_flags(flags).open(&name) {
        Ok(file) => {
            let mut bytes = Vec::with_capacity(BYTES);
            let read = file.take(BYTES as u64).read_to_end(&mut bytes);
            read.map_err(StoreError::io(format!("cannot read `{}`", name.display())))?;
            bytes
        }
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(None);
        }
        Err(error) => {
            return Err(StoreError::io(format!("cannot open `{}`", name.display()))(error));
        }
    };
    Ok(Some(Label::newest(&bytes)?.0))
}

/// Whether a path names a directory or disk, in which a pool may be.
///
/// # Errors
/// If the path cannot be examined.
fn has_location(path: &Path) -> Result<bool, StoreError> {
    let doing = || format!("cannot examine `{}`", path.display());
    let metadata = crate::metadata_of(path).map_err(StoreError::io(doing()))?;
    Ok(metadata.is_some_and(|it| it.is_dir() || it.is_file() || it.file_type().is_block_device()))
}

/// Refuses a directory and a disk as copies of one pool: a directory grows, and a disk does not.
/// `field` is what the user calls `second`.
fn same_kind(path: &Path, second: &Path, field: &'static str) -> Result<(), StoreError> {
    // A path that cannot be examined is reported when it is locked.
    let is_there = |path| has_location(path).unwrap_or(false);
    if Disk::is_one(path) == Disk::is_one(second) || !is_there(path) || !is_there(second) {
        return Ok(());
    }
    let wanted = if Disk::is_one(path) { "a disk" } else { "a directory" };
    let wanted = format!("{wanted}, as `{}` is", path.display());
    Err(StoreError::Invalid { field, value: second.display().to_string(), wanted })
}

/// Locks an empty directory or an empty disk, which is to become a copy of a pool that is in use,
/// and examines it. With `consent`, other data on a disk are overwritten, and a copy that has left
/// its pool is erased. `used_bytes` is the length of the segments that the pool has, and
/// `count_max` their number to which it may grow.
///
/// # Errors
/// If it is in use, not empty, too small, or of another kind than the copies of the pool.
pub fn take_new(
    mirror: &Mirror<PoolStore>,
    new: &Path,
    consent: bool,
    kind: StoreKind,
    used_bytes: u64,
    count_max: usize,
) -> Result<NamedCopy<PoolStore>, StoreError> {
    let invalid = |wanted: String| {
        let value = new.display().to_string();
        Err(StoreError::Invalid { field: "new", value, wanted })
    };
    if !has_location(new)? {
        let value = new.display();
        return invalid(format!(
            "an empty directory that exists (`mkdir {value}` makes it), or an empty disk"
        ));
    }
    let real = new.canonicalize().unwrap_or_else(|_| new.to_owned());
    let status = mirror.copy_status();
    let is_copy = mirror.sides().iter().any(|side| side.path == real)
        || status.iter().any(|copy| Path::new(&copy.path) == real);
    if is_copy {
        return invalid("a path that is no copy of this pool yet".to_owned());
    }
    same_kind(&mirror.path(), &real, "new")?;
    let purpose = if consent { Purpose::Overwrite } else { Purpose::Use };
    let take = || PoolStore::take_for(&real, purpose)?.with(kind);
    let mut store = take()?;
    if attach::check_new(mirror, &store, count_max, consent)? {
        let shown = real.display();
        tracing::warn!("{shown}: erasing the copy that has left its pool, as requested");
        store.erase().map_err(StoreError::io(format!("cannot erase `{shown}`")))?;
        // What was recognised there is gone.
        drop(store);
        store = take()?;
        attach::check_new(mirror, &store, count_max, false)?;
    }
    let growth = store.growth_bytes();
    if growth < used_bytes {
        let found = Bytes(growth);
        return invalid(format!(
            "a directory whose file system has space for the pool, {}; it has {found}",
            Bytes(used_bytes)
        ));
    }
    store.prepare()?;
    Ok(NamedCopy { directory: Some(store), path: real })
}
