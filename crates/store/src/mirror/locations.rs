//! The real paths of a pool's copies.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blockyard_core::owner_only;
use blockyard_volume_format::label::{BYTES, FILE, Label};

use super::assemble::{Given, Terms, read_label};
use super::attach;
use super::resync::ResyncProgress;
use super::{Mirror, VerifyPool};
use crate::disk::{self, Disk};
use crate::error::{CopiesError, StoreError};
use crate::{PoolBacking, PoolStore, Purpose, StoreKind, is_pool};

/// Where a pool is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The path of the directory or disk.
    pub path: PathBuf,
    /// The path of the second copy. If none is given, the one in the label of the first.
    pub path2: Option<PathBuf>,
    /// If one copy is missing, and may be the newer one, use the other one anyway.
    pub degraded: bool,
}

/// The places that this process has locked.
pub enum Taken {
    /// A pool of one copy.
    One(PoolStore),
    /// The copies of a pool of two, as far as they are there.
    Two([Given<PoolStore>; 2]),
}

impl Taken {
    /// Opens the storage of the pool. This may take long, because a stale copy is resynced.
    ///
    /// # Errors
    /// As [`Mirror::assemble`].
    pub fn put_together<V: VerifyPool>(
        self,
        degraded: bool,
        verifier: &V,
    ) -> Result<PoolBacking, V::Error> {
        self.on(Terms::Use { degraded }, verifier)
    }

    fn on<V: VerifyPool>(self, terms: Terms, verifier: &V) -> Result<PoolBacking, V::Error> {
        Ok(match self {
            Taken::One(one) => PoolBacking::One(one),
            Taken::Two(given) => PoolBacking::Two(Mirror::assemble(given, terms, verifier)?),
        })
    }
}

impl Places {
    /// One path; the label there may name the second copy.
    pub fn of(path: impl Into<PathBuf>) -> Places {
        Places { path: path.into(), path2: None, degraded: false }
    }

    /// The path of the second copy, as given or as named by the label.
    pub fn second(&self) -> Result<Option<PathBuf>, StoreError> {
        match &self.path2 {
            Some(second) => Ok(Some(second.clone())),
            None => known(&self.path),
        }
    }

    /// The places with canonical paths. Makes the directories if there is no pool yet. If there is
    /// one, a missing directory is not made: its disk may not be mounted.
    pub fn settled(&self) -> Result<Places, StoreError> {
        let degraded = self.degraded;
        let Some(second) = self.second()? else {
            return Ok(Places { path: crate::place(&self.path)?, path2: None, degraded });
        };
        // If the system does not tell what is there, nothing is made.
        let is_used = |path: &PathBuf| {
            is_pool(path).unwrap_or(true)
                || !matches!(crate::found(&path.join(FILE)), Ok(None))
                || Disk::is_one(path)
        };
        let is_fresh = ![&self.path, &second].into_iter().any(is_used);
        let settled = |path: &PathBuf| match path.canonicalize() {
            Err(_) if is_fresh => crate::place(path),
            found => Ok(found.unwrap_or_else(|_| path.clone())),
        };
        let paths = [&self.path, &second].into_iter();
        let new: Vec<_> = paths.flat_map(|path| owner_only::missing_directories(path)).collect();
        let both = settled(&self.path).and_then(|path| Ok((path, settled(&second)?)));
        let checked = both.and_then(|(path, second)| {
            check_both(&path, &second)?;
            Ok(Places { path, path2: Some(second), degraded })
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
        self.all().iter().flat_map(|path| owner_only::missing_directories(path)).collect()
    }

    /// Whether one of the places has a pool, or a copy of one, or that cannot be determined.
    pub fn has_pool(&self) -> bool {
        let has = |path: &Path| is_pool(path).unwrap_or(true) || !matches!(known(path), Ok(None));
        has(&self.path) || self.path2.as_deref().is_some_and(has)
    }

    /// All paths.
    pub fn all(&self) -> Vec<PathBuf> {
        std::iter::once(&self.path).chain(&self.path2).cloned().collect()
    }

    /// Locks the places for this process.
    ///
    /// # Errors
    /// If another process has one of them.
    pub fn take(&self, purpose: Purpose, kind: StoreKind) -> Result<Taken, StoreError> {
        self.take_for(purpose, |directory| directory.with(kind))
    }

    /// Locks the places for reading only, so that nothing changes.
    ///
    /// # Errors
    /// If another process has one of them, or they do not belong together.
    pub fn look<V: VerifyPool>(&self, verifier: &V) -> Result<PoolBacking, V::Error> {
        let places = Places { path2: self.second()?, ..self.clone() };
        places.take_for(Purpose::Look, Ok)?.on(Terms::Look, verifier)
    }

    fn take_for(
        &self,
        purpose: Purpose,
        with: impl Fn(PoolStore) -> Result<PoolStore, StoreError>,
    ) -> Result<Taken, StoreError> {
        let take = |path: &Path| PoolStore::take_for(path, purpose);
        let mut failed = None;
        let mut given = |path: &PathBuf| {
            let taken = match is_place(path) {
                Ok(is_place) => is_place.then(|| take(path)).transpose(),
                Err(error) => Err(error),
            };
            let directory = match taken {
                // A failed disk may still have a name.
                Err(error @ StoreError::Io { .. }) => {
                    tracing::error!("{error}: as if it were not there");
                    failed.get_or_insert(error);
                    None
                }
                taken => taken?.map(&with).transpose()?,
            };
            let path = directory.as_ref().map_or(path.as_path(), PoolStore::path).to_owned();
            Ok::<_, StoreError>(Given { directory, path })
        };
        Ok(match &self.path2 {
            None => {
                let one = with(take(&self.path)?)?;
                // Another process may have attached a second copy before this one took the lock.
                if read_label(&one)?.is_some() {
                    let path = self.path.display().to_string();
                    return Err(CopiesError::Changed { path }.into());
                }
                Taken::One(one)
            }
            Some(second) => {
                let both = [given(&self.path)?, given(second)?];
                match failed {
                    Some(error) if both.iter().all(|it| it.directory.is_none()) => {
                        return Err(error);
                    }
                    _ => Taken::Two(both),
                }
            }
        })
    }
}

/// Refuses paths that cannot be the two copies of one pool.
fn check_both(path: &Path, second: &Path) -> Result<(), StoreError> {
    for (field, path) in [("path", path), ("path2", second)] {
        if path.exists() && !is_place(path)? {
            let wanted = "a directory, a block device or a file".to_owned();
            let value = path.display().to_string();
            return Err(StoreError::Invalid { field, value, wanted });
        }
    }
    same_kind(path, second)?;
    if path == second {
        let (value, wanted) = (second.display().to_string(), "another place than `path`");
        return Err(StoreError::Invalid { field: "path2", value, wanted: wanted.to_owned() });
    }
    Ok(())
}

/// The other copy of a pool, as the label at `path` names it. The place is not locked, so the label
/// is checked again later. A place with an unreadable label is not a pool of one copy.
fn known(path: &Path) -> Result<Option<PathBuf>, StoreError> {
    if Disk::is_one(path) {
        let label = disk::label_of(path);
        let label = label.map_err(StoreError::io(format!("cannot read `{}`", path.display())))?;
        return Ok(label.map(|bytes| Label::newest(&bytes)).transpose()?.map(|it| it.0.other));
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
    Ok(Some(Label::newest(&bytes)?.0.other))
}

/// Whether a path names an existing place that a pool may be in.
///
/// # Errors
/// If the system does not tell what is there.
fn is_place(path: &Path) -> Result<bool, StoreError> {
    let doing = || format!("cannot look at `{}`", path.display());
    let found = crate::found(path).map_err(StoreError::io(doing()))?;
    Ok(found.is_some_and(|it| it.is_dir() || it.is_file() || it.file_type().is_block_device()))
}

/// Refuses a directory and a disk as copies of one pool: a directory grows, and a disk does not.
fn same_kind(path: &Path, second: &Path) -> Result<(), StoreError> {
    // A place that cannot be examined is reported when it is locked.
    let is_there = |path| is_place(path).unwrap_or(false);
    if Disk::is_one(path) == Disk::is_one(second) || !is_there(path) || !is_there(second) {
        return Ok(());
    }
    let wanted =
        if Disk::is_one(path) { "a disk, as `path` is" } else { "a directory, as `path` is" };
    let (value, wanted) = (second.display().to_string(), wanted.to_owned());
    Err(StoreError::Invalid { field: "path2", value, wanted })
}

/// Makes an empty directory, or an empty disk, the second copy of a pool that is not open, and
/// resyncs it. With `consent`, other data on the disk are overwritten. `progress` is called with
/// the bytes compared and the total.
///
/// # Errors
/// If another process has one of them open, or as [`attach::attach`].
pub fn attach<V: VerifyPool>(
    path: &Path,
    other: &Path,
    consent: bool,
    verifier: &V,
    progress: &mut ResyncProgress<'_>,
) -> Result<(), V::Error> {
    if !is_place(path)? {
        return Err(StoreError::NoPool { path: path.to_owned() }.into());
    }
    if !is_place(other)? {
        let (value, wanted) =
            (other.display().to_string(), "an empty directory or disk".to_owned());
        return Err(StoreError::Invalid { field: "path2", value, wanted }.into());
    }
    same_kind(path, other)?;
    let purpose = if consent { Purpose::Overwrite } else { Purpose::Use };
    let first = PoolStore::take(path)?;
    let second = PoolStore::take_for(other, purpose)?;
    let (path, other) = (first.path().to_owned(), second.path().to_owned());
    attach::attach(first, &path, second, &other, verifier, progress).map(drop)
}
