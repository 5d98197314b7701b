//! The upper part of what a checkpoint writes: roots of maps, which name nodes, and the catalogue,
//! which names roots, below a tree of pages of its own. However long, all of it is pages.
//!
//! These pages are known by what they contain: one that is on disk already is not written again, so
//! that a checkpoint costs what has changed, however many volumes and snapshots there are, and
//! snapshots share what is the same in their maps.

use std::collections::HashMap;

use crate::checkpoint::Marks;
use crate::error::{FormatError, VolumeError};
use crate::format::entry::{ENTRY_BYTES, Entry};
use crate::format::{FAN, PAGE_BYTES};
use crate::segments::Segments;
use crate::store::Directory;

/// What such a page contains.
pub(crate) type Contents = Box<[u8]>;

/// A page of zeros.
pub(crate) fn empty() -> Contents {
    vec![0; PAGE_BYTES].into_boxed_slice()
}

/// A page with these entries.
pub(crate) fn of_entries(entries: &[Entry]) -> Contents {
    let mut page = empty();
    for (entry, into) in entries.iter().zip(page.chunks_exact_mut(ENTRY_BYTES)) {
        entry.print(into);
    }
    page
}

/// The pages of the last checkpoint, by what they contain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roots(HashMap<Contents, Entry>);

impl Roots {
    /// Where a page is that contains this.
    pub(crate) fn find(&self, page: &[u8]) -> Option<Entry> {
        self.0.get(page).copied()
    }

    /// A page is there.
    pub(crate) fn put(&mut self, page: Contents, home: Entry) {
        self.0.insert(page, home);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Where they are.
    pub(crate) fn homes(&self) -> impl Iterator<Item = &Entry> {
        self.0.values()
    }

    /// All of them are needed.
    pub(crate) fn mark(&self, marks: &mut Marks) {
        self.0.values().for_each(|home| marks.entry(home));
    }

    /// Those that lie where `is_left` says are to be written again; answers how many.
    pub(crate) fn leave(&mut self, is_left: impl Fn(Entry) -> bool) -> usize {
        let before = self.0.len();
        self.0.retain(|_, home| !is_left(*home));
        before - self.0.len()
    }

    /// Reads a page, and knows it from now on.
    pub(crate) fn read<D: Directory>(
        &mut self,
        segments: &Segments<D>,
        home: Entry,
    ) -> Result<Contents, VolumeError> {
        if home.is_hole() || home.stored_bytes() as usize != PAGE_BYTES {
            let (what, field, value) = ("catalogue", "page", home.address());
            let want = "an entry that names 4096 bytes";
            return Err(FormatError::Field { what, field, value, want }.into());
        }
        let page: Contents = segments.read_page(home)?.to_vec().into_boxed_slice();
        self.put(page.clone(), home);
        Ok(page)
    }

    /// Reads so many bytes below the page at the top of their tree.
    pub(crate) fn read_tree<D: Directory>(
        &mut self,
        segments: &Segments<D>,
        top: Entry,
        len: usize,
    ) -> Result<Vec<u8>, VolumeError> {
        let count = len.div_ceil(PAGE_BYTES);
        let mut level = vec![top];
        for height in (0..heights(count)).rev() {
            let mut left = count.div_ceil(FAN.pow(height));
            let mut below = Vec::new();
            for home in level {
                let page = self.read(segments, home)?;
                for bytes in page.chunks_exact(ENTRY_BYTES).take(left) {
                    let (what, field, value) = ("catalogue", "entry", home.address());
                    let want = "a place on disk";
                    let entry = Entry::parse(bytes);
                    below.push(entry.ok_or(FormatError::Field { what, field, value, want })?);
                }
                left = left.saturating_sub(FAN);
            }
            level = below;
        }
        let mut bytes = Vec::new();
        for home in level {
            bytes.extend_from_slice(&self.read(segments, home)?);
        }
        bytes.truncate(len);
        Ok(bytes)
    }
}

/// How many levels of pages are above so many.
fn heights(count: usize) -> u32 {
    let (mut height, mut count) = (0, count);
    while count > 1 {
        count = count.div_ceil(FAN);
        height += 1;
    }
    height
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_as_high_as_it_has_to_be() {
        let all = [(1, 0), (2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3)];
        all.iter().for_each(|(count, height)| assert_eq!(heights(*count), *height, "{count}"));
    }
}
