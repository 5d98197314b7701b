//! Places that are free, by size: zsmalloc's size classes in steps of 16 bytes, without its pages.
//!
//! Objects of all sizes lie back to back in a segment; what one leaves behind is a hole of its size
//! class, and goes to the next object of that class. When there is none, the next larger hole is
//! cut. The list stands outside of the memory it describes, so that the memory can be given back
//! under it, and a hole costs 4 bytes.

/// The free places of one shard, each as an offset in units from the shard's start.
#[derive(Debug)]
pub(super) struct Holes {
    /// By size in units.
    classes: Box<[Vec<u32>]>,
    /// A bit for each class that has a hole.
    occupied: Box<[u64]>,
    count: usize,
}

impl Holes {
    /// No holes, of sizes up to `units_max`.
    pub(super) fn new(units_max: u32) -> Holes {
        let classes = units_max as usize + 1;
        Holes {
            classes: vec![Vec::new(); classes].into_boxed_slice(),
            occupied: vec![0; classes.div_ceil(64)].into_boxed_slice(),
            count: 0,
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Notes one; `false` if there is no memory to note it, and nobody will find it.
    pub(super) fn push(&mut self, at: u32, units: u32) -> bool {
        let class = &mut self.classes[units as usize];
        if class.len() == class.capacity() && class.try_reserve(class.len().max(4)).is_err() {
            return false;
        }
        class.push(at);
        self.occupied[units as usize / 64] |= 1 << (units % 64);
        self.count += 1;
        true
    }

    /// Takes the smallest hole of at least `units`: where it is and how large.
    pub(super) fn pop(&mut self, units: u32) -> Option<(u32, u32)> {
        let class = self.first_from(units)?;
        let list = &mut self.classes[class as usize];
        let at = list.pop().expect("the class's bit is set, so it has a hole");
        if list.is_empty() {
            self.occupied[class as usize / 64] &= !(1 << (class % 64));
        }
        self.count -= 1;
        Some((at, class))
    }

    /// The first class from `units` on that has a hole.
    fn first_from(&self, units: u32) -> Option<u32> {
        let mut index = units as usize / 64;
        let mut word = self.occupied.get(index)? & u64::MAX << (units % 64);
        while word == 0 {
            index += 1;
            word = *self.occupied.get(index)?;
        }
        Some(index as u32 * 64 + word.trailing_zeros())
    }

    /// Forgets all holes but those that `keep` says yes to.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        self.count = 0;
        for (class, list) in self.classes.iter_mut().enumerate() {
            if list.is_empty() {
                continue;
            }
            list.retain(|&at| keep(at));
            if list.capacity() > 64 && list.capacity() / 4 > list.len() {
                list.shrink_to(list.len() * 2);
            }
            self.count += list.len();
            if list.is_empty() {
                self.occupied[class / 64] &= !(1 << (class % 64));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_fits_is_taken() {
        let mut holes = Holes::new(257);
        assert_eq!(holes.pop(1), None);
        for (at, units) in [(10, 3), (20, 257), (30, 64), (40, 3)] {
            assert!(holes.push(at, units));
        }
        assert_eq!(
            (holes.pop(3), holes.pop(2), holes.pop(3)),
            (Some((40, 3)), Some((10, 3)), Some((30, 64)))
        );
        assert_eq!((holes.pop(257), holes.pop(1), holes.count()), (Some((20, 257)), None, 0));
    }

    #[test]
    fn what_is_not_kept_is_not_found() {
        let mut holes = Holes::new(100);
        for at in 0..100 {
            assert!(holes.push(at, 1 + at % 100));
        }
        holes.retain(|at| at % 2 == 1);
        assert_eq!(holes.count(), 50);
        let mut found = Vec::new();
        while let Some((at, units)) = holes.pop(1) {
            assert_eq!((at % 2, units), (1, at + 1));
            found.push(at);
        }
        assert_eq!(found.len(), 50);
    }
}
