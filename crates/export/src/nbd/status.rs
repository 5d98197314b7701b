//! `base:allocation`: the extents of a range, as the disk knows them.

use blockyard_core::{Disk, Sector};

use crate::nbd::wire::{STATE_HOLE, STATE_ZERO, StatusExtent};

/// Most extents in one reply. A client asks again for the rest.
const EXTENTS_MAX: usize = 1024;
/// Most questions to the disk for one reply.
const QUESTIONS_MAX: usize = 4096;

/// Gathers extents; kept by a connection so that a reply allocates nothing.
#[derive(Debug)]
pub(crate) struct Statuses(Vec<StatusExtent>);

impl Statuses {
    pub(crate) fn new() -> Statuses {
        Statuses(Vec::with_capacity(EXTENTS_MAX))
    }

    /// The extents from `offset` on: at least one, at most `len` bytes, neighbours of one state
    /// joined. The range must be aligned, not empty, and on the disk.
    pub(crate) fn of(
        &mut self,
        disk: &dyn Disk,
        offset: u64,
        len: u64,
        one: bool,
    ) -> &[StatusExtent] {
        let extents = &mut self.0;
        extents.clear();
        let extents_max = if one { 1 } else { EXTENTS_MAX };
        let mut from = Sector::containing(offset);
        let end = Sector::containing(offset + len);
        for _ in 0..QUESTIONS_MAX {
            if from >= end {
                break;
            }
            let extent = disk.extent(from, end - from);
            // A disk that answers with nothing is taken not to know.
            let sectors = match extent.sectors {
                0 => end - from,
                sectors => sectors.min(end - from),
            };
            let hole = if extent.allocated { 0 } else { STATE_HOLE };
            let state = hole | if extent.zero { STATE_ZERO } else { 0 };
            let bytes = Sector(sectors).bytes();
            match extents.last_mut() {
                Some(last) if last.state == state => last.len += bytes,
                _ => {
                    if extents.len() == extents_max {
                        break;
                    }
                    extents.push(StatusExtent { len: bytes, state });
                }
            }
            from += sectors;
        }
        extents
    }
}
