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
    /// is found before anything is in the log.
    pub(super) fn prefetch(&self, first: u64, end: u64) -> Result<(), Status> {
        let (number, from) = Map::place(first);
        let to = from + (end - first) as u32;
        loop {
            let away = || self.volume.map.with(number, |span| span.away(from, to));
            let Some(Away(leaf)) = away() else { return Ok(()) };
            if let Err(status) = self.fetch(&leaf)
                && away().is_some_and(|Away(now)| Arc::ptr_eq(&now, &leaf))
            {
                return Err(status);
            }
        }
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
