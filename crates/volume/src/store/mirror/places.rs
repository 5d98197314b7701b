//! The real paths of a pool's copies.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::Mirror;
use super::assemble::{CopiesError, Given, Terms, read_label};
use super::attach;
use super::equal::Tell;
use crate::error::VolumeError;
use crate::format::label::{BYTES, FILE, Label};
use crate::options::Options;
use crate::store::disk::{self, Disk};
use crate::store::{self, Backing, Purpose, RealDirectory, is_pool};

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
pub(crate) enum Taken {
    One(RealDirectory),
    Two([Given<RealDirectory>; 2]),
}

impl Taken {
    /// Opens the storage of the pool. This may take long, because a stale copy is resynced.
    pub(crate) fn put_together(self, degraded: bool) -> Result<Backing, VolumeError> {
        self.on(Terms::Use { degraded })
    }

    fn on(self, terms: Terms) -> Result<Backing, VolumeError> {
        Ok(match self {
            Taken::One(one) => Backing::One(one),
            Taken::Two(given) => Backing::Two(Mirror::assemble(given, terms)?),
        })
    }
}

impl Places {
    /// One path; the label there may name the second copy.
    pub fn of(path: impl Into<PathBuf>) -> Places {
        Places { path: path.into(), path2: None, degraded: false }
    }

    /// The path of the second copy, as given or as named by the label.
    pub(crate) fn second(&self) -> Result<Option<PathBuf>, VolumeError> {
        match &self.path2 {
            Some(second) => Ok(Some(second.clone())),
            None => known(&self.path),
        }
    }

    /// The places with canonical paths. Makes the directories if there is no pool yet. If there is
    /// one, a missing directory is not made: its disk may not be mounted.
    pub(crate) fn settled(&self) -> Result<Places, VolumeError> {
        let degraded = self.degraded;
        let Some(second) = self.second()? else {
            return Ok(Places { path: store::place(&self.path)?, path2: None, degraded });
        };
        // If the system does not tell what is there, nothing is made.
        let is_used = |path: &PathBuf| {
            is_pool(path).unwrap_or(true)
                || !matches!(store::found(&path.join(FILE)), Ok(None))
                || Disk::is_one(path)
        };
        let is_fresh = ![&self.path, &second].into_iter().any(is_used);
        let settled = |path: &PathBuf| match path.canonicalize() {
            Err(_) if is_fresh => store::place(path),
            found => Ok(found.unwrap_or_else(|_| path.clone())),
        };
        let (path, second) = (settled(&self.path)?, settled(&second)?);
        for (field, path) in [("path", &path), ("path2", &second)] {
            if path.exists() && !is_place(path)? {
                let wanted = "a directory, a block device or a file".to_owned();
                let value = path.display().to_string();
                return Err(VolumeError::Invalid { field, value, wanted });
            }
        }
        same_kind(&path, &second)?;
        if path == second {
            let (value, wanted) = (second.display().to_string(), "another place than `path`");
            return Err(VolumeError::Invalid { field: "path2", value, wanted: wanted.to_owned() });
        }
        Ok(Places { path, path2: Some(second), degraded })
    }

    /// Whether one of the places has a pool, or a copy of one, or that cannot be determined.
    pub(crate) fn has_pool(&self) -> bool {
        let has = |path: &Path| is_pool(path).unwrap_or(true) || !matches!(known(path), Ok(None));
        has(&self.path) || self.path2.as_deref().is_some_and(has)
    }

    /// All paths.
    pub(crate) fn all(&self) -> Vec<PathBuf> {
        std::iter::once(&self.path).chain(&self.path2).cloned().collect()
    }

    /// Locks the places for this process.
    ///
    /// # Errors
    /// If another process has one of them.
    pub(crate) fn take(&self, options: &Options) -> Result<Taken, VolumeError> {
        let purpose = if options.consent { Purpose::Overwrite } else { Purpose::Use };
        self.take_for(purpose, |directory| directory.with(options.store))
    }

    /// Locks the places for reading only, so that nothing changes.
    ///
    /// # Errors
    /// If another process has one of them, or they do not belong together.
    pub(crate) fn look(&self) -> Result<Backing, VolumeError> {
        let places = Places { path2: self.second()?, ..self.clone() };
        places.take_for(Purpose::Look, Ok)?.on(Terms::Look)
    }

    fn take_for(
        &self,
        purpose: Purpose,
        with: impl Fn(RealDirectory) -> Result<RealDirectory, VolumeError>,
    ) -> Result<Taken, VolumeError> {
        let take = |path: &Path| RealDirectory::take_for(path, purpose);
        let mut failed = None;
        let mut given = |path: &PathBuf| {
            let taken = match is_place(path) {
                Ok(is_place) => is_place.then(|| take(path)).transpose(),
                Err(error) => Err(error),
            };
            let directory = match taken {
                // A failed disk may still have a name.
                Err(error @ VolumeError::Io { .. }) => {
                    tracing::error!("{error}: as if it were not there");
                    failed.get_or_insert(error);
                    None
                }
                taken => taken?.map(&with).transpose()?,
            };
            let path = directory.as_ref().map_or(path.as_path(), RealDirectory::path).to_owned();
            Ok::<_, VolumeError>(Given { directory, path })
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

/// The other copy of a pool, as the label at `path` names it. The place is not locked, so the label
/// is checked again later. A place with an unreadable label is not a pool of one copy.
fn known(path: &Path) -> Result<Option<PathBuf>, VolumeError> {
    if Disk::is_one(path) {
        let label = disk::label_of(path);
        let label = label.map_err(VolumeError::io(format!("cannot read `{}`", path.display())))?;
        return Ok(label.map(|bytes| Label::newest(&bytes)).transpose()?.map(|it| it.0.other));
    }
    let name = path.join(FILE);
    // Do not block if the label is a FIFO.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let bytes = match OpenOptions::new().read(true).custom_flags(flags).open(&name) {
        Ok(file) => {
            let mut bytes = Vec::with_capacity(BYTES);
            let read = file.take(BYTES as u64).read_to_end(&mut bytes);
            read.map_err(VolumeError::io(format!("cannot read `{}`", name.display())))?;
            bytes
        }
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(None);
        }
        Err(error) => {
            return Err(VolumeError::io(format!("cannot open `{}`", name.display()))(error));
        }
    };
    Ok(Some(Label::newest(&bytes)?.0.other))
}

/// Whether a path names an existing place that a pool may be in.
///
/// # Errors
/// If the system does not tell what is there.
fn is_place(path: &Path) -> Result<bool, VolumeError> {
    let doing = || format!("cannot look at `{}`", path.display());
    let found = store::found(path).map_err(VolumeError::io(doing()))?;
    Ok(found.is_some_and(|it| it.is_dir() || it.is_file() || it.file_type().is_block_device()))
}

/// Refuses a directory and a disk as copies of one pool: a directory grows, and a disk does not.
fn same_kind(path: &Path, second: &Path) -> Result<(), VolumeError> {
    // A place that cannot be examined is reported when it is locked.
    let is_there = |path| is_place(path).unwrap_or(false);
    if Disk::is_one(path) == Disk::is_one(second) || !is_there(path) || !is_there(second) {
        return Ok(());
    }
    let wanted =
        if Disk::is_one(path) { "a disk, as `path` is" } else { "a directory, as `path` is" };
    let (value, wanted) = (second.display().to_string(), wanted.to_owned());
    Err(VolumeError::Invalid { field: "path2", value, wanted })
}

/// Makes an empty directory, or an empty disk, the second copy of a pool that is not open, and
/// resyncs it. With `consent`, other data on the disk are overwritten. `tell` is called with the
/// bytes compared and the total.
///
/// # Errors
/// If another process has one of them open, or as [`attach::attach`].
pub fn attach(
    path: &Path,
    other: &Path,
    consent: bool,
    tell: &mut Tell<'_>,
) -> Result<(), VolumeError> {
    if !is_place(path)? {
        return Err(VolumeError::NoPool { path: path.to_owned() });
    }
    if !is_place(other)? {
        let (value, wanted) =
            (other.display().to_string(), "an empty directory or disk".to_owned());
        return Err(VolumeError::Invalid { field: "path2", value, wanted });
    }
    same_kind(path, other)?;
    let purpose = if consent { Purpose::Overwrite } else { Purpose::Use };
    let first = RealDirectory::take(path)?;
    let second = RealDirectory::take_for(other, purpose)?;
    let (path, other) = (first.path().to_owned(), second.path().to_owned());
    attach::attach(first, &path, second, &other, tell).map(drop)
}
