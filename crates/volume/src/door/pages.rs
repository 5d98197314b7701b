//! Pages of the map that a door reads: whoever puts blocks into the map, or takes them out, has no
//! time for that.

use std::sync::Arc;

use blockyard_core::Status;

use super::Door;
use crate::error::VolumeError;
use crate::format::FAN;
use crate::map::{Away, Leaf, Map};
use crate::store::Directory;

impl<D: Directory> Door<D> {
    /// Brings a page of the map into memory.
    pub(super) fn fetch(&self, leaf: &Arc<Leaf>) -> Result<(), Status> {
        match self.pool.segments().load(leaf) {
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::error!("{}: {error}", self.volume.traits.name);
                Err(match error {
                    VolumeError::Io { .. } => Status::Medium,
                    _ => Status::Protection,
                })
            }
        }
    }

    /// Brings the pages for some blocks into memory, which are in one span. A page that is damaged
    /// is found before anything is in the log. Each is brought once: where the cache has room for
    /// few, the next drives it out again, and whoever needs it brings it himself.
    pub(super) fn prefetch(&self, first: u64, end: u64) -> Result<(), Status> {
        let (number, from) = Map::place(first);
        let to = from + (end - first) as u32;
        let mut block = from;
        while block < to {
            let next = to.min((block / FAN as u32 + 1) * FAN as u32);
            let away = || self.volume.map.with(number, |span| span.away(block, next));
            while let Some(Away(leaf)) = away() {
                match self.fetch(&leaf) {
                    Ok(()) => break,
                    Err(status) if away().is_some_and(|Away(now)| Arc::ptr_eq(&now, &leaf)) => {
                        return Err(status);
                    }
                    // It has moved.
                    Err(_) => {}
                }
            }
            block = next;
        }
        Ok(())
    }

    /// The same for blocks that become zeros: leaves that go as a whole are not read, but counted
    /// where what they have is promised again.
    pub(super) fn prefetch_edges(&self, first: u64, end: u64) -> Result<(), Status> {
        let fan = FAN as u64;
        let edges = [(first, first % fan), (end - 1, end % fan)];
        for (edge, _) in edges.into_iter().filter(|(_, part)| *part > 0) {
            self.prefetch(edge, edge + 1)?;
        }
        if self.volume.reserved_bytes() > 0 {
            self.pool.segments().count_owned(&self.volume.map, first, end - first);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::Options;
    use crate::hand::Hand;

    /// A write of blocks in two leaves read one, and drove the other out by that, for ever.
    #[test]
    fn a_cache_of_least_length_is_enough_for_a_write_of_two_leaves() {
        let options = Options { map_cache_bytes: 4096, ..Options::default() };
        let mut hand = Hand::by("one-leaf", 60, options);
        hand.take("w", 40 * 256);
        for number in 1..40 {
            hand.write(number * 256 - 4, 8);
        }
        for number in 1..40 {
            hand.checkpoint();
            hand.write(number * 256 - 4, 8);
        }
        // Parts of two blocks, of which the rest is read.
        for number in 1..40 {
            hand.checkpoint();
            let at = number * 256 * 4096 - 512;
            hand.ask(|door| door.write(at, 1024, &|_, bytes| bytes.fill(7), 1, true));
        }
        let live = hand.pool.find("w").unwrap();
        assert!(live.map.with(0, |span| span.away(0, 40 * 256)).is_some(), "there is room for two");
    }
}
