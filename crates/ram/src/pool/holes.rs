//! Places that are free, by size: zsmalloc's size classes in steps of 16 bytes, without its pages.
//!
//! Objects of all sizes lie back to back in a segment; what one leaves behind is a hole of its size
//! class, and goes to the next object of that class. When there is none, the next larger hole is
//! cut. The list stands outside of the memory it describes, so that the memory can be given back
//! under it, and a hole costs 8 bytes. Its addresses are reserved: noting a hole asks no allocator.

use super::table::Table;

/// No node.
const NONE: u32 = u32::MAX;

/// A hole in the list of its class, or a node that is not used.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// Where the hole is, in units from the shard's start.
    at: u32,
    /// The next of the list.
    next: u32,
}

/// The free places of one shard.
#[derive(Debug)]
pub(super) struct Holes {
    nodes: Table<Node>,
    /// The first node of each class, by size in units.
    heads: Box<[u32]>,
    /// The first node that is not used.
    spare: u32,
    /// A bit for each class that has a hole.
    occupied: Box<[u64]>,
    count: usize,
}

impl Holes {
    /// No holes, of sizes up to `units_max`; `count_max` of them can be noted.
    ///
    /// # Errors
    /// The system's error number, if it has no addresses for so many.
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

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Notes one; `false` if there are as many as can be, and nobody will find it.
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

    /// Takes the smallest hole of at least `units`: where it is and how large.
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

    /// The first class from `units` on that has a hole.
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

    /// Forgets all holes but those that `keep` says yes to; it is told where one is and how large.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(u32, u32) -> bool) {
        for class in 0..self.heads.len() {
            // The first that is kept, and the last: the list stays in its order.
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
    fn what_is_not_kept_is_not_found() {
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
