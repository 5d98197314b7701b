//! Splitting: a bio above the limits becomes pieces, and completes when its last piece completes.
//!
//! The bio takes a slot (the parent), and each piece takes another. When no slot is free, the rest
//! of the bio waits here until completions free some. Meanwhile the channel accepts no further bio.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::Bio;
use crate::request::{SLOT_NONE, Slot};
use crate::status::Status;
use crate::units::Sector;

/// The rest of a bio that is being split.
#[derive(Debug)]
pub(super) struct Unsubmitted {
    /// The part that is not cut into pieces yet.
    pub(super) bio: Bio,
    /// Address of that part's data.
    pub(super) data: NonNull<u8>,
    /// The slot of the whole bio.
    pub(super) parent: u16,
    /// The flush before the pieces is in flight, in the slot of the parent: no piece may start yet.
    pub(super) waits: bool,
}

// SAFETY: `data` points into a region that the channel keeps, and is not dereferenced here.
unsafe impl Send for Unsubmitted {}

impl Unsubmitted {
    /// Cuts the first `sectors` off; returns the bio of the piece and the address of its data.
    pub(super) fn cut(&mut self, sectors: u64) -> (Bio, NonNull<u8>) {
        debug_assert!(sectors > 0 && sectors <= self.bio.sectors);
        let piece = (Bio { sectors, ..self.bio }, self.data);
        self.bio.sector += sectors;
        self.bio.sectors -= sectors;
        if self.bio.op.has_data() {
            let len_bytes = (sectors << crate::units::SECTOR_SHIFT) as usize;
            self.bio.buf.offset += len_bytes as u64;
            // SAFETY: the data was checked to hold the whole bio, and the piece is a part of the
            // bio. So the result is inside the region or one past its last byte.
            self.data = unsafe { self.data.add(len_bytes) };
        }
        piece
    }

    /// Whether the whole bio has been cut into pieces.
    pub(super) fn is_empty(&self) -> bool {
        self.bio.sectors == 0
    }
}

/// Makes a slot the parent of pieces. The cutting itself is counted as a piece until it ends, so
/// that the parent cannot complete while its bio is being cut.
pub(super) fn begin(parent: &mut Slot) {
    parent.pieces = 1;
    parent.status = Status::Ok;
    debug_assert_eq!(parent.parent, SLOT_NONE, "pieces have no pieces");
}

/// Records the end of the piece that begins at `sector`, or of the cutting; returns whether the
/// whole bio is complete. Pieces complete in any order; of several errors the parent keeps that of
/// the lowest sector.
pub(super) fn piece_done(parent: &mut Slot, status: Status, sector: Sector) -> bool {
    if !status.is_ok() && (parent.status.is_ok() || sector < parent.failed_at()) {
        parent.status = status;
        parent.set_failed_at(sector);
    }
    parent.pieces -= 1;
    parent.pieces == 0
}
