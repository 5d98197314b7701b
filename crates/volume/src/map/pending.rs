//! Pending writes: ranges of blocks that are not in the log yet, each with the number of its write.
//! Ranges do not overlap: a later write replaces what it covers of earlier ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockyard_store::log_writer::Payload;

/// The new contents of a range.
#[derive(Clone, Debug)]
pub enum What {
    /// Data of a write, from its block `index` on.
    Data {
        /// The contents of the write.
        payload: Arc<Payload>,
        /// The block of the write at which the range begins.
        index: u32,
    },
    /// Zeros.
    Zero,
}

impl What {
    /// The contents of the rest of the range, `blocks` further on.
    pub(crate) fn from(&self, blocks: u32) -> What {
        match self {
            What::Data { payload, index } => {
                What::Data { payload: Arc::clone(payload), index: index + blocks }
            }
            What::Zero => What::Zero,
        }
    }
}

#[derive(Clone, Debug)]
struct Range {
    end: u32,
    serial: u64,
    what: What,
    may_fail: bool,
}

/// The pending contents of a block or range.
#[derive(Clone, Debug)]
pub struct Coming {
    /// The number of the write.
    pub serial: u64,
    /// The new contents.
    pub what: What,
    /// The write is not answered yet, and may still be refused for lack of space.
    pub may_fail: bool,
}

/// The pending ranges, by their first block.
#[derive(Clone, Debug, Default)]
pub struct Pending(BTreeMap<u32, Range>);

impl Pending {
    /// Whether no write is pending.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The pending contents of a block, if there are any.
    pub fn at(&self, block: u32) -> Option<Coming> {
        let (first, range) = self.0.range(..=block).next_back()?;
        let Range { end, serial, may_fail, .. } = *range;
        (block < end).then(|| Coming { serial, what: range.what.from(block - first), may_fail })
    }

    /// Adds a range.
    pub fn insert(&mut self, first: u32, end: u32, coming: Coming) {
        self.remove(first, end);
        let Coming { serial, what, may_fail } = coming;
        self.0.insert(first, Range { end, serial, what, may_fail });
    }

    /// Removes everything in a range.
    fn remove(&mut self, first: u32, end: u32) {
        // The range that begins before `first` may reach into this one, or beyond it.
        if let Some((&at, range)) = self.0.range_mut(..first).next_back()
            && range.end > first
        {
            let behind = (range.end > end).then(|| Range {
                end: range.end,
                serial: range.serial,
                what: range.what.from(end - at),
                may_fail: range.may_fail,
            });
            range.end = first;
            if let Some(behind) = behind {
                self.0.insert(end, behind);
            }
        }
        while let Some((&at, _)) = self.0.range(first..end).next() {
            let range = self.0.remove(&at).expect("it has just been found");
            if range.end > end {
                let what = range.what.from(end - at);
                self.0.insert(end, Range { what, ..range });
            }
        }
    }

    /// Makes blocks of a write visible again, after a write that had replaced them was refused.
    /// Blocks of later writes stay.
    pub fn restore(&mut self, first: u32, end: u32, coming: &Coming) {
        for block in first..end {
            if self.at(block).is_none_or(|it| it.serial < coming.serial) {
                let what = coming.what.from(block - first);
                self.insert(block, block + 1, Coming { what, ..*coming });
            }
        }
    }

    /// Removes what is left of a write.
    pub fn retire(&mut self, first: u32, end: u32, serial: u64) {
        let mut from = first;
        // All pieces of a write are inside its range.
        while from < end
            && let Some((&at, range)) = self.0.range(from..end).next()
        {
            from = range.end;
            if range.serial == serial {
                self.0.remove(&at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the ranges with a table that has a cell for each block.
    #[test]
    fn ranges_are_what_a_table_says() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let mut pending = Pending::default();
            let mut table = [0u64; 40];
            let mut writes = Vec::new();
            for serial in 1..60 {
                let first = random.u32(0..40);
                let end = random.u32(first + 1..=40);
                if random.u8(..) < 100 && !writes.is_empty() {
                    let (first, end, serial) = writes.swap_remove(random.usize(..writes.len()));
                    pending.retire(first, end, serial);
                    table.iter_mut().filter(|it| **it == serial).for_each(|it| *it = 0);
                } else {
                    let coming = Coming { serial, what: What::Zero, may_fail: false };
                    pending.insert(first, end, coming);
                    table[first as usize..end as usize].fill(serial);
                    writes.push((first, end, serial));
                }
                for block in 0..40 {
                    let found = pending.at(block).map_or(0, |coming| coming.serial);
                    assert_eq!(found, table[block as usize], "block {block}");
                }
            }
            for (first, end, serial) in writes {
                pending.retire(first, end, serial);
            }
            assert!(pending.is_empty());
        }
    }
}
