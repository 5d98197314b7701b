//! The upper part of a checkpoint: roots of maps, which name nodes, and the catalogue, which names
//! roots. The catalogue lies below a tree of pages of its own. All of it consists of pages.
//!
//! These pages are identified by their contents, and a page that is on disk already is not written
//! again. So a checkpoint costs only what has changed, however many volumes and snapshots there
//! are, and snapshots share equal pages.

use std::collections::HashMap;

use blockyard_store::SegmentStore;
use blockyard_store::buffer::Buffer;
use blockyard_volume_format::entry::{ENTRY_BYTES, Entry};
use blockyard_volume_format::{FAN, FormatError, PAGE_BYTES};

use crate::error::VolumeError;
use crate::frozen::Marks;
use crate::segments::Segments;

/// The contents of such a page.
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

/// The contents of a page without the zeros at its end: most roots are of short volumes and have
/// few entries, and a pool can have very many of them.
fn used(page: &[u8]) -> &[u8] {
    debug_assert_eq!(page.len(), PAGE_BYTES);
    let last = page.chunks_exact(ENTRY_BYTES).rposition(|entry| entry.iter().any(|byte| *byte > 0));
    &page[..last.map_or(0, |last| (last + 1) * ENTRY_BYTES)]
}

/// The upper pages of the last checkpoint: contents, without the zeros at their end, and place.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roots(HashMap<Contents, Entry>);

impl Roots {
    /// The place of the page with these contents.
    pub(crate) fn find(&self, page: &[u8]) -> Option<Entry> {
        self.0.get(used(page)).copied()
    }

    /// Adds a page that is on disk.
    pub(crate) fn put(&mut self, page: &[u8], location: Entry) {
        self.0.insert(used(page).into(), location);
    }

    /// Number of pages.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The places of all pages.
    pub(crate) fn locations(&self) -> impl Iterator<Item = &Entry> {
        self.0.values()
    }

    /// Marks all pages as needed.
    pub(crate) fn mark(&self, marks: &mut Marks) {
        self.0.values().for_each(|location| marks.entry(location));
    }

    /// Removes the pages that lie where `is_left` says, so that they are written again. Returns how
    /// many.
    pub(crate) fn leave(&mut self, is_left: impl Fn(Entry) -> bool) -> usize {
        let before = self.0.len();
        self.0.retain(|_, location| !is_left(*location));
        before - self.0.len()
    }

    /// Refuses an entry that cannot be the place of such a page.
    pub(crate) fn check(location: Entry) -> Result<(), VolumeError> {
        if location.is_hole() || location.stored_bytes() as usize != PAGE_BYTES {
            let (what, field, value) = ("catalogue", "page", location.address());
            let want = "an entry that names 4096 bytes";
            return Err(FormatError::Field { what, field, value, want }.into());
        }
        Ok(())
    }

    /// Reads a page and adds it.
    fn read<D: SegmentStore>(
        &mut self,
        segments: &Segments<D>,
        location: Entry,
    ) -> Result<Buffer, VolumeError> {
        Roots::check(location)?;
        let page = segments.read_page(location)?;
        self.put(&page, location);
        Ok(page)
    }

    /// Reads `len` bytes below the top page of their tree.
    pub(crate) fn read_tree<D: SegmentStore>(
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
            for location in level {
                let page = self.read(segments, location)?;
                for bytes in page.chunks_exact(ENTRY_BYTES).take(left) {
                    let (what, field, value) = ("catalogue", "entry", location.address());
                    let want = "a place on disk";
                    let entry = Entry::parse(bytes);
                    below.push(entry.ok_or(FormatError::Field { what, field, value, want })?);
                }
                left = left.saturating_sub(FAN);
            }
            level = below;
        }
        let mut bytes = Vec::new();
        for location in level {
            bytes.extend_from_slice(&self.read(segments, location)?);
        }
        bytes.truncate(len);
        Ok(bytes)
    }
}

/// Levels of the tree above `count` pages.
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
    use blockyard_volume_format::entry::Codec;

    use super::*;

    #[test]
    fn a_tree_is_as_high_as_it_has_to_be() {
        let all = [(1, 0), (2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3)];
        all.iter().for_each(|(count, height)| assert_eq!(heights(*count), *height, "{count}"));
    }
    #[test]
    fn pages_are_found_by_their_contents_and_take_no_memory_for_zeros_at_their_end() {
        let entry = |number: u64| Entry::new(number * 4096, 4096, Codec::Raw, number);
        let page = |entries: &[Entry]| of_entries(entries);
        let (short, gap) = (page(&[entry(1)]), page(&[entry(1), Entry::HOLE, entry(2)]));
        let full = page(&(1..=FAN as u64).map(entry).collect::<Vec<_>>());
        let mut roots = Roots::default();
        for (at, page) in [&short, &gap, &full, &empty()].into_iter().enumerate() {
            assert_eq!(roots.find(page), None);
            roots.put(page, entry(100 + at as u64));
            assert_eq!(roots.find(page), Some(entry(100 + at as u64)));
        }
        let bytes: usize = roots.0.keys().map(|contents| contents.len()).sum();
        assert_eq!(bytes, (1 + 3 + FAN) * ENTRY_BYTES);
        assert_eq!(roots.find(&short), Some(entry(100)));
    }
}
