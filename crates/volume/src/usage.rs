//! How much of a pool a volume or snapshot refers to.

use std::sync::Arc;

use crate::error::VolumeError;
use crate::format::catalogue::Traits;
use crate::format::entry::Entry;
use crate::map::{Leaf, Map, Page};
use crate::running::Running;
use crate::segments::Segments;
use crate::store::Directory;

/// The data that a volume or snapshot refers to, including shared data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The volume.
    pub traits: Traits,
    /// Blocks that are not holes.
    pub blocks: u64,
    /// Bytes of these blocks as stored.
    pub stored_bytes: u64,
}

impl Running {
    /// Counts the data that a volume or snapshot refers to, by walking its map.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn usage(&self, name: &str) -> Result<Usage, VolumeError> {
        let live = self.pool().find(name)?;
        self.pool().settle();
        let mut usage = Usage { traits: live.listed(), blocks: 0, stored_bytes: 0 };
        for (number, node) in live.map.freeze().iter().enumerate() {
            for (at, leaf) in node.iter().flat_map(|node| node.leaves()) {
                let page = page_now(self.pool().segments(), &live.map, (number, at), leaf)?;
                let is_there = |entry: &&Entry| !entry.is_hole() && !entry.is_lost();
                for entry in page.entries().iter().filter(is_there) {
                    usage.blocks += 1;
                    usage.stored_bytes += u64::from(entry.stored_bytes());
                }
            }
        }
        Ok(usage)
    }
}

/// The contents of a leaf, or of its current version. If the volume is written meanwhile, the page
/// of an older version may have been replaced by other data.
fn page_now<D: Directory>(
    segments: &Segments<D>,
    map: &Map,
    (number, at): (usize, usize),
    leaf: &Arc<Leaf>,
) -> Result<Arc<Page>, VolumeError> {
    let mut leaf = Arc::clone(leaf);
    loop {
        let error = match segments.page(&leaf) {
            Ok(page) => return Ok(page),
            Err(error) => error,
        };
        match map.with(number, |span| span.node().and_then(|node| node.leaf(at).cloned())) {
            Some(now) if Arc::ptr_eq(&now, &leaf) => return Err(error),
            Some(now) => leaf = now,
            None => return Ok(Arc::default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hand::Hand;
    use crate::store::StoreFile;

    /// Regression: a leaf that was replaced during the count was reported as damaged, because its
    /// place had other data by then.
    #[test]
    fn a_page_that_has_gone_meanwhile_is_looked_for_where_it_is() {
        let mut hand = Hand::new("usage");
        hand.write(0, 4);
        hand.checkpoint();
        let live = hand.pool.find("v").unwrap();
        let leaf = || live.map.with(0, |span| span.node().unwrap().leaf(0).cloned().unwrap());
        let old = leaf();
        let segments = hand.pool.segments();
        let (file, offset) = segments.place(old.home().unwrap().address()).unwrap();
        let count = |leaf: &Arc<Leaf>| {
            let page = page_now(segments, &live.map, (0, 0), leaf);
            page.map(|page| page.entries().iter().filter(|entry| !entry.is_hole()).count())
        };
        let mut bytes = hand.pool.memory().take_beyond(4096);
        bytes.fill(9);
        while old.is_here() {
            old.evict();
        }
        file.write_at(offset, &[&bytes]).unwrap();
        assert!(count(&old).is_err(), "it is damaged");
        let (now, mut page) = (Page::default(), Page::default());
        page.set(3, crate::format::entry::Entry::new(4096, 4096, Default::default(), 1), false);
        for (contents, blocks) in [(now, 0), (page, 1)] {
            let now = Arc::new(Leaf::new(Arc::new(contents), 1));
            let mut node = crate::map::Node::default();
            node.put(0, now);
            live.map.replace(0, Arc::new(node));
            assert_eq!(count(&old).unwrap(), blocks);
        }
    }
}
