//! Attaches a second copy to a pool that has one copy, or has lost the other one.

use std::path::Path;

use blockyard_volume_format::label::{FILE, Label};
use blockyard_volume_format::superblock::Superblock;

use super::assemble::{NamedCopy, Terms, has_left, has_pool, label_empty, newest, read_label};
use super::resync::ResyncProgress;
use super::{Mirror, VerifyPool, only};
use crate::error::{CopiesError, StoreError};
use crate::{Layout, SegmentStore, no_pool};

/// Names that an empty directory may have: itself, the lock made just now, and what a file system
/// brings along.
const EMPTY: [&str; 5] = [".", "..", "lock", "lost+found", "copy.new"];

/// Makes an empty directory the second copy of a pool, and assembles both; see
/// [`Mirror::assemble_with_progress`].
///
/// # Errors
/// If `directory` has no pool or two copies, `empty` is not empty, or one cannot be written.
pub fn attach<D: SegmentStore, V: VerifyPool>(
    directory: D,
    path: &Path,
    empty: D,
    other: &Path,
    verifier: &V,
    progress: &mut ResyncProgress<'_>,
) -> Result<Mirror<D>, V::Error> {
    let refused = |error| V::Error::from(StoreError::from(error));
    let (title, other_title) = (path.display().to_string(), other.display().to_string());
    let known = label_of(&directory, path)?;
    // An interrupted resync of this copy may continue.
    let is_resumed = match (&known, read_label(&empty)?) {
        (_, None) => false,
        (Some(label), Some((it, _))) if it.set == label.set && !it.is_good() => true,
        (_, Some(_)) => {
            let what = format!("a copy (`{FILE}`)");
            return Err(refused(CopiesError::NotEmpty { path: other_title, what }));
        }
    };
    fits(&directory, &title, &empty, &other_title)?;
    if !is_resumed {
        check_empty(&empty, &other_title)?;
    }
    empty.prepare()?;
    let (number, generation) =
        known.as_ref().map_or((0, 1), |label| (label.number, label.generation.saturating_add(1)));
    // Generations order the labels of two copies. With a new identity, a copy that belonged to the
    // pool before is not recognised any more.
    let set = match known.filter(|_| is_resumed) {
        Some(label) => label.set,
        None => {
            let doing = StoreError::io(format!("cannot write `{title}/{FILE}`"));
            directory.fresh_id().map_err(doing)?
        }
    };
    let good = only(number);
    let other_path = other.to_owned();
    let (joining, cursor) = (None, None);
    let label = Label { set, number, generation, good, other: other_path, joining, cursor };
    // Write the pool's label first: with the other order, a power cut in between would leave a copy
    // of unknown state.
    label_empty(&directory, &label, path)?;
    let second = Label { number: 1 - number, other: path.to_owned(), ..label };
    label_empty(&empty, &second, other)?;
    let given = [
        NamedCopy { directory: Some(directory), path: path.to_owned() },
        NamedCopy { directory: Some(empty), path: other.to_owned() },
    ];
    let mirror =
        Mirror::assemble_with_progress(given, Terms::Use { degraded: false }, verifier, progress)?;
    // An opening continues with one copy if a resync fails. Here the resync was requested, so its
    // failure is an error.
    match mirror.copy_status().into_iter().find(|copy| !copy.state.is_good()) {
        None => Ok(mirror),
        Some(copy) => {
            let why = copy.why.unwrap_or_default();
            Err(refused(CopiesError::NotEqual { path: copy.path, why }))
        }
    }
}

/// Checks a directory or disk that is to become a copy of a pool in use, and sets the layout of the
/// pool there. `count_max` is the number of segments to which the pool may grow. Returns whether it
/// has a copy that has left its pool, and is to be erased: that needs `consent`.
///
/// # Errors
/// If it is not empty, or shorter than the pool.
pub(super) fn check_new<D: SegmentStore>(
    mirror: &Mirror<D>,
    new: &D,
    count_max: usize,
    consent: bool,
) -> Result<bool, StoreError> {
    let title = new.title();
    let label = read_label(new)?.map(|(label, _)| label);
    match &label {
        None => check_empty(new, &title)?,
        Some(label) => check_left(mirror, label, &title, consent)?,
    }
    let layout = mirror.0.layout()?;
    new.set_layout(layout, false)?;
    let (wanted, found) = (count_max, new.segments_max());
    if found >= wanted {
        return Ok(label.is_some());
    }
    let bytes = layout.segment_bytes;
    let value = format!("{title}, with space for {found} segments of {bytes} bytes");
    let wanted = format!("space for {wanted}, as the pool has: a disk that is as long");
    Err(StoreError::Invalid { field: "new", value, wanted })
}

/// Refuses a copy, unless it has left its pool and may be erased.
fn check_left<D: SegmentStore>(
    mirror: &Mirror<D>,
    label: &Label,
    title: &str,
    consent: bool,
) -> Result<(), StoreError> {
    // The process may have been killed before the label of a copy that was replaced said so.
    let is_replaced = || {
        let members = mirror.0.members();
        members.good().any(|it| {
            let stays = read_label(it.directory()).ok().flatten();
            stays.is_some_and(|(stays, _)| has_left(label, &stays))
        })
    };
    // While a copy joins, its label has a cursor.
    let has_left = label.is_detached() && label.cursor.is_none() || is_replaced();
    let what = match has_left {
        true if consent => return Ok(()),
        true => format!(
            "a copy that was detached from the pool at `{}`; --force (`\"force\": true`) erases it",
            label.other.display()
        ),
        false => format!("a copy (`{FILE}`)"),
    };
    Err(CopiesError::NotEmpty { path: title.to_owned(), what }.into())
}

/// The label of a pool that may get a second copy; `None` if it never had one.
fn label_of<D: SegmentStore>(directory: &D, path: &Path) -> Result<Option<Label>, StoreError> {
    if !has_pool(directory)? {
        return Err(no_pool(path));
    }
    let Some((label, _)) = read_label(directory)? else { return Ok(None) };
    let (path, other) = (path.display().to_string(), label.other.display().to_string());
    if !label.is_good() {
        return Err(CopiesError::Stale { path, missing: other }.into());
    }
    if label.is_other_good() {
        return Err(CopiesError::Paired { path, other }.into());
    }
    if let Some(joining) = &label.joining {
        let joining = joining.path.display();
        let why = format!("`{joining}` replaces a copy; open the pool, which continues with that");
        return Err(CopiesError::NotAttached { path, why }.into());
    }
    Ok(Some(label))
}

/// Refuses a directory that is not empty. `prepare` finds other data on a disk.
fn check_empty<D: SegmentStore>(empty: &D, title: &str) -> Result<(), StoreError> {
    let not_empty = |what: String| {
        let path = title.to_owned();
        Err(CopiesError::NotEmpty { path, what }.into())
    };
    if has_pool(empty)? {
        return not_empty("a pool".to_owned());
    }
    let names = empty.names().map_err(StoreError::io(format!("cannot list `{title}`")))?;
    match names.iter().find(|name| !EMPTY.contains(&name.as_str())) {
        Some(name) => not_empty(format!("`{name}`")),
        None => Ok(()),
    }
}

/// Refuses a disk that has space for fewer segments than the pool has.
fn fits<D: SegmentStore>(
    directory: &D,
    title: &str,
    empty: &D,
    other_title: &str,
) -> Result<(), StoreError> {
    let Superblock { align, segment_bytes, .. } = newest(directory, title)?;
    let layout = Layout { align, segment_bytes };
    directory.set_layout(layout, false)?;
    empty.set_layout(layout, false)?;
    let (wanted, found) = (directory.segments_max(), empty.segments_max());
    if found >= wanted {
        return Ok(());
    }
    let value = format!("{other_title}, with space for {found} segments of {segment_bytes} bytes");
    let wanted = format!("space for {wanted}, as `{title}` has: a disk that is as long");
    Err(StoreError::Invalid { field: "EMPTY", value, wanted })
}
