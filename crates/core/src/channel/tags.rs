//! Tags: the numbers of a channel's started requests. One thread owns them, so they are a plain
//! stack.

use crate::units::Tag;

/// The free tags of a channel.
#[derive(Debug)]
pub(super) struct Tags {
    free: Vec<u16>,
    count: u16,
}

impl Tags {
    /// Tags from 0 to `count`.
    pub(super) fn new(count: u16) -> Tags {
        Tags { free: (0..count).rev().collect(), count }
    }

    /// Number of free tags.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of taken tags.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// Takes the tag that was freed last: its cache lines are still in the cache.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Tag> {
        self.free.pop().map(Tag)
    }

    /// Frees a tag.
    #[inline]
    pub(super) fn put(&mut self, tag: Tag) {
        debug_assert!(
            tag.0 < self.count && !self.free.contains(&tag.0),
            "{tag:?} given back twice"
        );
        self.free.push(tag.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_is_out_once() {
        let mut tags = Tags::new(3);
        let taken: Vec<Tag> = std::iter::from_fn(|| tags.take()).collect();
        assert_eq!(taken, [Tag(0), Tag(1), Tag(2)]);
        assert_eq!((tags.room(), tags.taken()), (0, 3));
        tags.put(Tag(1));
        assert_eq!(tags.take(), Some(Tag(1)));
        assert_eq!(tags.take(), None);
    }
}
