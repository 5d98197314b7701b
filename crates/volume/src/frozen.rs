//! What a checkpoint and cleaning work on: the maps of a pool at one moment, and the bytes of each
//! segment that they refer to.

use std::collections::{BTreeMap, HashSet};
use std::ptr;
use std::sync::Arc;

use blockyard_volume_format::catalogue::{CatalogueImage, Hold, VolumeMeta};
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::properties::Properties;
use blockyard_volume_format::superblock::LogPlace;

use crate::map::{self, Leaf, Node};
use crate::thread::yield_if_due;

/// What the catalogue records about the blocks that a map shares with others.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// The number of the volume from which all maps of the family come.
    pub family: u32,
    /// The number of copies of maps that had been made when this map was last copied.
    pub last: u32,
    /// A lower bound of the blocks that only this map has.
    pub owned: u64,
}

/// The maps of a pool at one moment, and the end of the log then.
#[derive(Debug)]
pub struct Frozen {
    /// Segments that were taken in this round or later are not examined.
    pub round: u64,
    /// The end of the log.
    pub log: LogPlace,
    /// The state of the pool as a whole, for the catalogue.
    pub whole: CatalogueImage,
    /// The volumes and snapshots with their maps.
    pub volumes: Vec<(VolumeMeta, Copied, Arc<map::Frozen>)>,
    /// The holds of snapshots, by their numbers.
    pub holds: BTreeMap<u32, Vec<Hold>>,
    /// The properties of volumes, by their numbers.
    pub properties: BTreeMap<u32, Properties>,
}

impl Frozen {
    /// Drops the maps, and yields the CPU between nodes, because pages without another owner are
    /// freed here.
    pub(crate) fn drop_yielding(self) {
        let maps = self.volumes.into_iter().filter_map(|(.., map)| Arc::into_inner(map));
        for node in maps.flatten() {
            yield_if_due();
            drop(node);
        }
    }
}

/// The bytes of each segment that are referenced.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    bytes: Vec<u64>,
    segment_bytes: u64,
}

impl Marks {
    /// No references yet, in segments of this length.
    pub fn new(segment_bytes: u32) -> Marks {
        Marks { bytes: Vec::new(), segment_bytes: segment_bytes.into() }
    }

    /// Adds the page or block that an entry names.
    pub fn entry(&mut self, entry: &Entry) {
        if !entry.is_hole() {
            self.segment((entry.address() / self.segment_bytes) as u32, entry.stored_bytes());
        }
    }

    /// Adds a block, unless it was lost.
    pub fn block(&mut self, entry: &Entry) {
        if !entry.is_lost() {
            self.entry(entry);
        }
    }

    /// Adds bytes of a segment.
    pub fn segment(&mut self, number: u32, bytes: u32) {
        let number = number as usize;
        if number >= self.bytes.len() {
            self.bytes.resize(number + 1, 0);
        }
        self.bytes[number] += u64::from(bytes);
    }

    /// Referenced bytes of a segment.
    pub fn live_bytes(&self, number: u32) -> u64 {
        self.bytes.get(number as usize).copied().unwrap_or(0)
    }

    /// Referenced bytes of all segments, by segment number.
    pub fn into_bytes(self) -> Vec<u64> {
        self.bytes
    }

    /// Whether any byte of a segment is referenced.
    pub fn is_needed(&self, number: u32) -> bool {
        self.live_bytes(number) > 0
    }

    /// The last segment of which any byte is referenced.
    pub fn last_needed(&self) -> Option<usize> {
        self.bytes.iter().rposition(|bytes| *bytes > 0)
    }

    /// Adds the live bytes of blocks, given for each segment.
    pub fn blocks(&mut self, live: &[u64]) {
        for (number, bytes) in live.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
            if number >= self.bytes.len() {
                self.bytes.resize(number + 1, 0);
            }
            self.bytes[number] += bytes;
        }
    }

    /// Adds the pages of maps and returns their number. A shared page is counted once.
    pub fn pages<'a>(&mut self, maps: impl Iterator<Item = &'a map::Frozen>) -> u64 {
        let (mut nodes, mut leaves) = (HashSet::new(), HashSet::new());
        for node in maps.flatten().flatten() {
            if !nodes.insert(ptr::from_ref::<Node>(node)) {
                continue;
            }
            yield_if_due();
            node.location().iter().for_each(|location| self.entry(location));
            for (_, leaf) in node.leaves() {
                if leaves.insert(ptr::from_ref::<Leaf>(leaf)) {
                    leaf.location().iter().for_each(|location| self.entry(location));
                }
            }
        }
        (nodes.len() + leaves.len()) as u64
    }
}
