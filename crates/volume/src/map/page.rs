//! The pages of a map: leaves with an entry for each block, and nodes with one for each leaf.
//!
//! Pages are shared by reference count and copied when they are changed, so that a map at one
//! moment costs a reference for each node. A page knows where it is on disk, as long as it is what
//! is there: its *home*, which a copy does not have.

use std::sync::{Arc, OnceLock};

use crate::format::entry::{ENTRY_BYTES, Entry};
use crate::format::{FAN, PAGE_BYTES};

const _: () = assert!(FAN * ENTRY_BYTES == PAGE_BYTES, "a page is full of entries");

/// A leaf.
#[derive(Debug)]
pub struct Leaf {
    entries: [Entry; FAN],
    home: OnceLock<Entry>,
}

impl Default for Leaf {
    fn default() -> Leaf {
        Leaf { entries: [Entry::HOLE; FAN], home: OnceLock::new() }
    }
}

/// A copy is about to be changed.
impl Clone for Leaf {
    fn clone(&self) -> Leaf {
        Leaf { entries: self.entries, home: OnceLock::new() }
    }
}

impl Leaf {
    /// The entries of its blocks.
    pub fn entries(&self) -> &[Entry; FAN] {
        &self.entries
    }

    /// Changes an entry.
    pub fn set(&mut self, at: usize, entry: Entry) {
        self.entries[at] = entry;
        self.home.take();
    }

    /// Where it is on disk, if it is.
    pub fn home(&self) -> Option<Entry> {
        self.home.get().copied()
    }

    /// It is on disk now.
    pub fn settle(&self, home: Entry) {
        _ = self.home.set(home);
    }

    /// Writes the page.
    pub fn print(&self, page: &mut [u8]) {
        print(&self.entries, page);
    }

    /// Reads the page that lies at `home`; `None` if an entry is impossible.
    pub fn parse(page: &[u8], home: Entry) -> Option<Leaf> {
        Some(Leaf { entries: parse(page)?, home: OnceLock::from(home) })
    }
}

/// A node.
#[derive(Debug)]
pub struct Node {
    leaves: [Option<Arc<Leaf>>; FAN],
    home: OnceLock<Entry>,
}

impl Default for Node {
    fn default() -> Node {
        Node { leaves: [const { None }; FAN], home: OnceLock::new() }
    }
}

/// A copy is about to be changed.
impl Clone for Node {
    fn clone(&self) -> Node {
        Node { leaves: self.leaves.clone(), home: OnceLock::new() }
    }
}

impl Node {
    /// A leaf, if it has any blocks.
    pub fn leaf(&self, at: usize) -> Option<&Arc<Leaf>> {
        self.leaves[at].as_ref()
    }

    /// Its leaves.
    pub fn leaves(&self) -> &[Option<Arc<Leaf>>; FAN] {
        &self.leaves
    }

    /// A leaf to be changed.
    pub fn leaf_mut(&mut self, at: usize) -> &mut Leaf {
        self.home.take();
        Arc::make_mut(self.leaves[at].get_or_insert_default())
    }

    /// Puts a leaf in.
    pub fn put(&mut self, at: usize, leaf: Arc<Leaf>) {
        self.home.take();
        self.leaves[at] = Some(leaf);
    }

    /// Takes a leaf out.
    pub fn remove(&mut self, at: usize) {
        if self.leaves[at].take().is_some() {
            self.home.take();
        }
    }

    /// Where it is on disk, if it is.
    pub fn home(&self) -> Option<Entry> {
        self.home.get().copied()
    }

    /// It is on disk now.
    pub fn settle(&self, home: Entry) {
        _ = self.home.set(home);
    }

    /// Writes the page; `home` says where each leaf is.
    pub fn print(&self, page: &mut [u8], home: impl Fn(&Arc<Leaf>) -> Entry) {
        let entry = |leaf: &Option<Arc<Leaf>>| leaf.as_ref().map_or(Entry::HOLE, &home);
        print(&std::array::from_fn(|at| entry(&self.leaves[at])), page);
    }
}

fn print(entries: &[Entry; FAN], page: &mut [u8]) {
    for (entry, bytes) in entries.iter().zip(page.chunks_exact_mut(ENTRY_BYTES)) {
        entry.print(bytes);
    }
}

/// The entries of a page; `None` if one is impossible.
pub fn parse(page: &[u8]) -> Option<[Entry; FAN]> {
    let mut entries = [Entry::HOLE; FAN];
    for (entry, bytes) in entries.iter_mut().zip(page.chunks_exact(ENTRY_BYTES)) {
        *entry = Entry::parse(bytes)?;
    }
    Some(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::Codec;

    #[test]
    fn a_changed_page_has_no_home_and_its_copy_neither() {
        let home = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut node = Node::default();
        node.leaf_mut(3).set(7, home);
        node.leaf(3).unwrap().settle(home);
        node.settle(home);
        let copy = node.clone();
        assert_eq!((node.home(), copy.home()), (Some(home), None));
        assert_eq!(copy.leaf(3).unwrap().home(), Some(home), "the leaf is shared");
        node.leaf_mut(3).set(8, home);
        assert_eq!((node.home(), node.leaf(3).unwrap().home()), (None, None));
        assert_eq!(copy.leaf(3).unwrap().home(), Some(home));
    }

    #[test]
    fn what_is_printed_is_read_back() {
        let home = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut leaf = Leaf::default();
        leaf.set(255, Entry::new(512, 1024, Codec::Lz4, 2));
        let mut page = [0; PAGE_BYTES];
        leaf.print(&mut page);
        let read = Leaf::parse(&page, home).unwrap();
        assert_eq!((read.entries(), read.home()), (leaf.entries(), Some(home)));
        page[0] = 1;
        assert!(Leaf::parse(&page, home).is_none());
    }
}
