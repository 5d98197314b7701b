//! Splitting: a bio above the limits becomes pieces, and completes when the last of them does.
//!
//! The bio itself takes a slot (the parent), each piece another. When slots run out the rest of the
//! bio waits here, and nothing is pushed past it, until completions have freed some.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::Bio;
use crate::request::{SLOT_NONE, Slot};
use crate::status::Status;
use crate::units::Sector;

/// What is left of a bio that is being split.
#[derive(Debug)]
pub(super) struct Rest {
    /// The part that has no piece yet.
    pub(super) bio: Bio,
    /// Address of that part's data.
    pub(super) data: NonNull<u8>,
    /// The slot of the whole bio.
    pub(super) parent: u16,
    /// No piece may start yet: the flush before them is under way, in the parent's slot.
    pub(super) waits: bool,
}

// SAFETY: `data` points into a region that the channel keeps, and is not dereferenced here.
unsafe impl Send for Rest {}

impl Rest {
    /// Cuts the first `sectors` off: the bio of the piece and the address of its data.
    pub(super) fn cut(&mut self, sectors: u64) -> (Bio, NonNull<u8>) {
        debug_assert!(sectors > 0 && sectors <= self.bio.sectors);
        let piece = (Bio { sectors, ..self.bio }, self.data);
        self.bio.sector += sectors;
        self.bio.sectors -= sectors;
        if self.bio.op.has_data() {
            let len_bytes = (sectors << crate::units::SECTOR_SHIFT) as usize;
            self.bio.buf.offset += len_bytes as u64;
            // SAFETY: the data were checked to hold the whole bio, of which the piece is a part, so
            // the result is inside the region or just behind its last byte.
            self.data = unsafe { self.data.add(len_bytes) };
        }
        piece
    }

    /// Whether every sector has its piece.
    pub(super) fn is_empty(&self) -> bool {
        self.bio.sectors == 0
    }
}

/// Makes a slot the parent of pieces to come. The cutting counts as a piece until it ends, so
/// that it cannot complete while the bio is still being cut.
pub(super) fn begin(parent: &mut Slot) {
    parent.pieces = 1;
    parent.status = Status::Ok;
    debug_assert_eq!(parent.parent, SLOT_NONE, "pieces have no pieces");
}

/// Notes the end of the piece that begins at `sector`, or of the cutting; says whether the whole
/// bio is complete. Of several errors that of the first sector stays: pieces end in any order.
pub(super) fn piece_done(parent: &mut Slot, status: Status, sector: Sector) -> bool {
    if !status.is_ok() && (parent.status.is_ok() || sector < parent.failed_at()) {
        parent.status = status;
        parent.set_failed_at(sector);
    }
    parent.pieces -= 1;
    parent.pieces == 0
}
