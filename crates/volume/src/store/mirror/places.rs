//! Where the copies of a pool are, for real.

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
    /// Its directory, or its disk.
    pub path: PathBuf,
    /// The same of its second copy. Where none is named, the one that the first one knows.
    pub path2: Option<PathBuf>,
    /// Where one of them is not there, and may be the newer one, the other one will do.
    pub degraded: bool,
}

/// What was taken of them, for this process alone.
pub(crate) enum Taken {
    One(RealDirectory),
    Two([Given<RealDirectory>; 2]),
}

impl Taken {
    /// The pool's place. It may take long: one of two copies may be left behind.
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
    /// One directory, and the other one that it knows.
    pub fn of(path: impl Into<PathBuf>) -> Places {
        Places { path: path.into(), path2: None, degraded: false }
    }

    /// The directory of the second copy, as it was given or is known.
    pub(crate) fn second(&self) -> Result<Option<PathBuf>, VolumeError> {
        match &self.path2 {
            Some(second) => Ok(Some(second.clone())),
            None => known(&self.path),
        }
    }

    /// The same by the names that the system has for them after all links. Directories are made
    /// where there is no pool yet; where there is one, what is missing is not made: the disk that
    /// it should be on may not be mounted.
    pub(crate) fn settled(&self) -> Result<Places, VolumeError> {
        let degraded = self.degraded;
        let Some(second) = self.second()? else {
            return Ok(Places { path: store::place(&self.path)?, path2: None, degraded });
        };
        // Where the system does not say what is there, nothing is made.
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

    /// Whether there is a pool, or a copy of one, in one of them, or that cannot be found out.
    pub(crate) fn has_pool(&self) -> bool {
        let has = |path: &Path| is_pool(path).unwrap_or(true) || !matches!(known(path), Ok(None));
        has(&self.path) || self.path2.as_deref().is_some_and(has)
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<PathBuf> {
        std::iter::once(&self.path).chain(&self.path2).cloned().collect()
    }

    /// Takes them for this process alone.
    ///
    /// # Errors
    /// If another process has one.
    pub(crate) fn take(&self, options: &Options) -> Result<Taken, VolumeError> {
        let purpose = if options.consent { Purpose::Overwrite } else { Purpose::Use };
        self.take_for(purpose, |directory| directory.with(options.store))
    }

    /// Takes them to be looked at, so that nothing changes.
    ///
    /// # Errors
    /// If another process has one, or they do not go together.
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
                // A disk that has died may still have a name.
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
                // Before it was locked somebody may have given it a second copy.
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

/// The other copy of a pool that one of them knows. Nobody holds it, so it is looked at again.
/// One of which nobody can say whether it has everything is no pool of one copy.
fn known(path: &Path) -> Result<Option<PathBuf>, VolumeError> {
    if Disk::is_one(path) {
        let label = disk::label_of(path);
        let label = label.map_err(VolumeError::io(format!("cannot read `{}`", path.display())))?;
        return Ok(label.map(|bytes| Label::newest(&bytes)).transpose()?.map(|it| it.0.other));
    }
    let name = path.join(FILE);
    // It does not wait where that is a FIFO.
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

/// Whether a path names what a pool may be on, and that is there.
///
/// # Errors
/// If the system does not say what is there.
fn is_place(path: &Path) -> Result<bool, VolumeError> {
    let doing = || format!("cannot look at `{}`", path.display());
    let found = store::found(path).map_err(VolumeError::io(doing()))?;
    Ok(found.is_some_and(|it| it.is_dir() || it.is_file() || it.file_type().is_block_device()))
}

/// Refuses a directory and a disk together: the one grows, and the other one does not.
fn same_kind(path: &Path, second: &Path) -> Result<(), VolumeError> {
    // One that cannot be looked at is said to be so when it is taken.
    let is_there = |path| is_place(path).unwrap_or(false);
    if Disk::is_one(path) == Disk::is_one(second) || !is_there(path) || !is_there(second) {
        return Ok(());
    }
    let wanted =
        if Disk::is_one(path) { "a disk, as `path` is" } else { "a directory, as `path` is" };
    let (value, wanted) = (second.display().to_string(), wanted.to_owned());
    Err(VolumeError::Invalid { field: "path2", value, wanted })
}

/// Makes an empty directory, or an empty disk, the second copy of a pool that nobody has open, and
/// makes it equal. With consent a disk that has something else is overwritten. `tell` is told how
/// many bytes were compared, and of how many.
///
/// # Errors
/// If somebody has one of them open, or as [`attach::attach`].
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
