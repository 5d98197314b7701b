//! Free lists of places by size: zsmalloc's size classes in steps of 16 bytes, without separate
//! pages.
//!
//! Objects of all sizes lie back to back in a segment. A freed object leaves a hole of its size
//! class, which goes to the next object of that class. If a class has no hole, the next larger hole
//! is split. The lists lie outside the memory they describe, so that its pages can be returned to
//! the system; a hole costs 8 bytes. Their addresses are reserved, so adding a hole never
//! allocates.

use super::table::Table;

/// End of a list.
const NONE: u32 = u32::MAX;

/// A hole in the list of its class, or an unused node.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// Offset of the hole, in units from the start of the shard.
    at: u32,
    /// The next node of the list.
    next: u32,
}

/// The free places of one shard.
#[derive(Debug)]
pub(super) struct Holes {
    nodes: Table<Node>,
    /// The first node of each class; the index is the size in units.
    heads: Box<[u32]>,
    /// The first unused node.
    spare: u32,
    /// A bitmap of the classes that have a hole.
    occupied: Box<[u64]>,
    count: usize,
}

impl Holes {
    /// Creates empty lists for holes of up to `units_max` units; they hold at most `count_max`
    /// holes.
    ///
    /// # Errors
    /// The system's error number, if it does not reserve the addresses.
    pub(super) fn new(units_max: u32, count_max: usize) -> Result<Holes, i32> {
        let classes = units_max as usize + 1;
        Ok(Holes {
            nodes: Table::reserve(count_max.min(NONE as usize))?,
            heads: vec![NONE; classes].into_boxed_slice(),
            spare: NONE,
            occupied: vec![0; classes.div_ceil(64)].into_boxed_slice(),
            count: 0,
        })
    }

    /// Number of holes.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Adds a hole. Returns `false` if the lists are full; the hole is then not reused.
    #[inline]
    pub(super) fn push(&mut self, at: u32, units: u32) -> bool {
        let node = Node { at, next: self.heads[units as usize] };
        let index = if self.spare == NONE {
            if !self.nodes.push(node) {
                return false;
            }
            self.nodes.len() as u32 - 1
        } else {
            let index = self.spare;
            self.spare = self.nodes[index as usize].next;
            self.nodes[index as usize] = node;
            index
        };
        self.heads[units as usize] = index;
        self.occupied[units as usize / 64] |= 1 << (units % 64);
        self.count += 1;
        true
    }

    /// Removes the smallest hole of at least `units`. Returns its offset and size.
    #[inline]
    pub(super) fn pop(&mut self, units: u32) -> Option<(u32, u32)> {
        let class = self.first_from(units)?;
        let index = self.heads[class as usize];
        let Node { at, next } = self.nodes[index as usize];
        self.nodes[index as usize].next = self.spare;
        self.spare = index;
        self.set_head(class as usize, next);
        self.count -= 1;
        Some((at, class))
    }

    /// The smallest class of at least `units` that has a hole.
    pub(super) fn first_from(&self, units: u32) -> Option<u32> {
        let mut index = units as usize / 64;
        let mut word = self.occupied.get(index)? & u64::MAX << (units % 64);
        while word == 0 {
            index += 1;
            word = *self.occupied.get(index)?;
        }
        Some(index as u32 * 64 + word.trailing_zeros())
    }

    fn set_head(&mut self, class: usize, head: u32) {
        self.heads[class] = head;
        if head == NONE {
            self.occupied[class / 64] &= !(1 << (class % 64));
        }
    }

    /// Keeps only the holes for which `keep`, given offset and size, returns true.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(u32, u32) -> bool) {
        for class in 0..self.heads.len() {
            // The first and the last node that is kept: the list keeps its order.
            let (mut first, mut last) = (NONE, NONE);
            let mut index = self.heads[class];
            while index != NONE {
                let Node { at, next } = self.nodes[index as usize];
                if keep(at, class as u32) {
                    match last {
                        NONE => first = index,
                        last => self.nodes[last as usize].next = index,
                    }
                    last = index;
                } else {
                    self.nodes[index as usize].next = self.spare;
                    self.spare = index;
                    self.count -= 1;
                }
                index = next;
            }
            if last != NONE {
                self.nodes[last as usize].next = NONE;
            }
            self.set_head(class, first);
        }
        if self.count == 0 {
            self.nodes.clear();
            self.spare = NONE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_fits_is_taken() {
        let mut holes = Holes::new(257, 4).unwrap();
        assert_eq!(holes.pop(1), None);
        for (at, units) in [(10, 3), (20, 257), (30, 64), (40, 3)] {
            assert!(holes.push(at, units));
        }
        assert!(!holes.push(50, 9), "there are as many as can be");
        assert_eq!(
            (holes.pop(3), holes.pop(2), holes.pop(3)),
            (Some((40, 3)), Some((10, 3)), Some((30, 64)))
        );
        assert_eq!((holes.pop(257), holes.pop(1), holes.count()), (Some((20, 257)), None, 0));
        assert!(holes.push(60, 5) && holes.push(61, 5) && holes.push(62, 6) && holes.push(63, 7));
        assert_eq!((holes.pop(5), holes.count()), (Some((61, 5)), 3));
    }

    #[test]
    fn a_hole_that_is_not_kept_is_not_found() {
        let mut holes = Holes::new(100, 1000).unwrap();
        for at in 0..100 {
            assert!(holes.push(at, 1 + at % 100) && holes.push(at + 100, 1 + at % 100));
        }
        holes.retain(|at, units| {
            assert_eq!(units, at % 100 + 1);
            at % 2 == 1
        });
        assert_eq!(holes.count(), 100);
        let mut found = Vec::new();
        while let Some((at, units)) = holes.pop(1) {
            assert_eq!((at % 2, units), (1, at % 100 + 1));
            found.push(at);
        }
        assert_eq!(found.len(), 100);
        assert!(found.is_sorted_by_key(|at| (at % 100, std::cmp::Reverse(*at))), "{found:?}");
        assert!(holes.push(1, 1));
        holes.retain(|_, _| false);
        assert_eq!((holes.count(), holes.pop(1), holes.push(9, 9)), (0, None, true));
        assert_eq!(holes.pop(9), Some((9, 9)));
    }
}
