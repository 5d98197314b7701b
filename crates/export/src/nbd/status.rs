//! `base:allocation`: the extents of a range, as the disk reports them.

use blockyard_core::Disk;

use crate::nbd::wire::{STATE_HOLE, STATE_ZERO, StatusExtent};
use crate::rmw::Span;

/// The most extents in one reply. A client asks again for the rest.
const EXTENTS_MAX: usize = 1024;
/// The most queries to the disk for one reply.
const QUESTIONS_MAX: usize = 4096;

/// A buffer for extents, kept by a connection so that a reply allocates nothing.
#[derive(Debug)]
pub(crate) struct Statuses(Vec<StatusExtent>);

impl Statuses {
    pub(crate) fn new() -> Statuses {
        Statuses(Vec::with_capacity(EXTENTS_MAX))
    }

    /// The extents of a range from its first byte on: at least one; neighbours of one state are
    /// joined. The range must not be empty, and must lie on the disk.
    pub(crate) fn of(&mut self, disk: &dyn Disk, span: &Span, one: bool) -> &[StatusExtent] {
        let extents = &mut self.0;
        extents.clear();
        let extents_max = if one { 1 } else { EXTENTS_MAX };
        let mut from = span.sector();
        let end = from + span.sectors();
        let range = span.range();
        for _ in 0..QUESTIONS_MAX {
            if from >= end {
                break;
            }
            let extent = disk.extent(from, end - from);
            // An empty extent means that the disk does not know.
            let sectors = match extent.sectors {
                0 => end - from,
                sectors => sectors.min(end - from),
            };
            let hole = if extent.allocated { 0 } else { STATE_HOLE };
            let state = hole | if extent.zero { STATE_ZERO } else { 0 };
            let covered = from.bytes().max(range.start)..(from + sectors).bytes().min(range.end);
            let bytes = covered.end.saturating_sub(covered.start);
            from += sectors;
            if bytes == 0 {
                continue;
            }
            match extents.last_mut() {
                Some(last) if last.state == state => last.len += bytes,
                _ => {
                    if extents.len() == extents_max {
                        break;
                    }
                    extents.push(StatusExtent { len: bytes, state });
                }
            }
        }
        extents
    }
}
