//! What a directory or disk must be to become a copy of a pool.

use blockyard_volume_format::label::{FILE, Label};

use super::Mirror;
use super::assemble::{has_left, has_pool, read_label};
use crate::SegmentStore;
use crate::error::{CopiesError, StoreError};

/// Names that an empty directory may have: itself, the lock made just now, and what a file system
/// brings along.
const EMPTY: [&str; 5] = [".", "..", "lock", "lost+found", "copy.new"];

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
