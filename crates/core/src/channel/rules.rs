//! What a device's geometry and limits make of a bio: its validation, the pieces of a bio above the
//! limits, and the flush sequence of a bio that has to be durable.
//!
//! **Pieces.** A bio above the limits becomes pieces, and completes when its last piece completes.
//! The bio takes a slot (the parent), and each piece takes another. When no slot is free, the rest
//! of the bio waits ([`Unsubmitted`]) until completions free some. Meanwhile the channel accepts no
//! further bio.
//!
//! **Flush sequences.** What PREFLUSH and FUA mean on a device with a volatile cache:
//!
//! | device | bio | becomes |
//! | --- | --- | --- |
//! | no volatile cache | flush | completes at once |
//! | no volatile cache | PREFLUSH, FUA | the plain bio |
//! | cache, FUA | FUA | the bio with FUA |
//! | cache, FUA | PREFLUSH (and FUA) | flush, then the bio (with FUA) |
//! | cache, no FUA | FUA | the bio, then flush |
//! | cache, no FUA | PREFLUSH and FUA | flush, then the bio, then flush |
//!
//! The rules are those of Linux (Documentation/block/writeback_cache_control.rst). The parts of a
//! sequence use the slot of the bio, one after the other, and are never merged. The pieces of a
//! split bio form one part: one flush comes before the first piece, one after the last, and each
//! piece has FUA.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::{Bio, Flags, Op, Status};
use crate::geometry::Geometry;
use crate::limits::Limits;
use crate::middleware::PieceMark;
use crate::request::{Request, SLOT_NONE, Slot, Stage};
use crate::units::{SECTOR_SHIFT, Sector};

/// `Rules::is_plain_range` recognizes a plain bio's operation by one comparison.
const _: () = assert!(Op::Read as u8 == 0 && Op::Write as u8 == 1, "reads and writes come first");

/// The geometry and limits in the form that the checks use.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    sectors: u64,
    block_mask: u64,
    /// Zone size of a zoned device.
    zone_sectors: Option<u64>,
    /// Longest read or write in sectors: whole blocks, and no longer than the device.
    piece_sectors_max: u64,
    /// The last operation, in declaration order, of a plain bio: a write, or a read if the device
    /// is read-only.
    plain_op_last: Op,
    /// The bits of a sector that identify its chunk: all bits from the chunk size up; 0 without
    /// chunks.
    chunk_mask: u64,
    limits: Limits,
}

impl Rules {
    pub(super) fn new(geometry: &Geometry, limits: &Limits) -> Rules {
        let block_mask = geometry.block_sectors() - 1;
        Rules {
            sectors: geometry.sectors,
            block_mask,
            piece_sectors_max: limits.sectors_max.min(geometry.sectors) & !block_mask,
            plain_op_last: if limits.read_only { Op::Read } else { Op::Write },
            chunk_mask: limits.chunk_mask(),
            zone_sectors: geometry.zones.as_ref().map(|zones| zones.zone_sectors),
            limits: limits.clone(),
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether the bio is a plain read or write: valid, within the limits, and without FUA or
    /// PREFLUSH. Most bios are plain and need no other check.
    #[inline]
    pub(super) fn is_plain(&self, bio: &Bio) -> bool {
        self.is_plain_range(bio.op, bio.sector, bio.sectors)
            && !bio.flags.intersects(Flags::FUA | Flags::PREFLUSH)
    }

    /// Whether a read or write of this range, without flags, is plain.
    #[inline]
    pub(super) fn is_plain_range(&self, op: Op, Sector(sector): Sector, sectors: u64) -> bool {
        op as u8 <= self.plain_op_last as u8
            && (sector | sectors) & self.block_mask == 0
            && sectors.wrapping_sub(1) < self.piece_sectors_max
            // No piece is longer than the device.
            && sector <= self.sectors - sectors
            && (sector ^ (sector + sectors - 1)) & self.chunk_mask == 0
    }

    /// Checks whether the device supports the bio.
    ///
    /// | fault | status |
    /// | --- | --- |
    /// | no sectors, or not whole blocks | `INVAL` |
    /// | ends beyond the device | `IOERR` |
    /// | the device is read-only | `IOERR` |
    /// | the device has no such operation | `NOTSUPP` |
    /// | append: not at a zone's start, or longer than the append limit | `IOERR` |
    /// | zone operation: not at a zone's start, or beyond the device | `INVAL` |
    #[inline]
    pub(super) fn check(&self, bio: &Bio) -> Result<(), Status> {
        if bio.op.is_write() && self.limits.read_only {
            return Err(Status::IoErr);
        }
        if bio.op.has_range() {
            if bio.sectors == 0 || (bio.sector.0 | bio.sectors) & self.block_mask != 0 {
                return Err(Status::Inval);
            }
            let end = bio.sector.0.checked_add(bio.sectors).ok_or(Status::IoErr)?;
            if end > self.sectors {
                return Err(Status::IoErr);
            }
        }
        match bio.op {
            Op::Read | Op::Write | Op::Flush => Ok(()),
            _ => self.check_rare(bio),
        }
    }

    fn check_rare(&self, bio: &Bio) -> Result<(), Status> {
        let supported = |sectors_max: u64| match sectors_max {
            0 => Err(Status::NotSupp),
            _ => Ok(()),
        };
        match bio.op {
            Op::Discard => supported(self.limits.discard_sectors_max),
            Op::WriteZeroes => supported(self.limits.write_zeroes_sectors_max),
            Op::ZoneAppend => {
                let zone_sectors = self.zone_sectors.ok_or(Status::NotSupp)?;
                supported(self.limits.zone_append_sectors_max)?;
                let fits = bio.sectors <= self.limits.zone_append_sectors_max
                    && bio.sector.0.is_multiple_of(zone_sectors);
                if fits { Ok(()) } else { Err(Status::IoErr) }
            }
            Op::ZoneResetAll => self.zone_sectors.map(drop).ok_or(Status::NotSupp),
            Op::ZoneReset | Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => {
                let zone_sectors = self.zone_sectors.ok_or(Status::NotSupp)?;
                let fits = bio.sector.0 < self.sectors && bio.sector.0.is_multiple_of(zone_sectors);
                if fits { Ok(()) } else { Err(Status::Inval) }
            }
            Op::Read | Op::Write | Op::Flush => Ok(()),
        }
    }

    /// The number of sectors, from the start of the bio, that one request may hold. It is the whole
    /// bio unless the bio exceeds a limit or crosses a chunk boundary. An append is never split.
    #[inline]
    pub(super) fn piece_sectors(&self, bio: &Bio) -> u64 {
        let sectors_max = match bio.op {
            Op::Read | Op::Write => self.limits.sectors_max,
            Op::Discard => self.limits.discard_sectors_max,
            Op::WriteZeroes => self.limits.write_zeroes_sectors_max,
            _ => return bio.sectors,
        };
        let piece = bio.sectors.min(sectors_max & !self.block_mask);
        match self.limits.chunk_sectors {
            0 => piece,
            chunk => piece.min(chunk - (bio.sector.0 & (chunk - 1))),
        }
    }
}

/// The bio without the fields that its operation ignores, so that no later layer uses them.
pub(super) fn normal(bio: &Bio) -> Bio {
    let mut bio = *bio;
    if !bio.op.has_range() {
        bio.sectors = 0;
    }
    if matches!(bio.op, Op::Flush | Op::ZoneResetAll) {
        bio.sector = Sector(0);
    }
    bio
}

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
    /// For a trace, until a request of the bio has begun: the length of the whole bio in sectors.
    /// Then 0.
    pub(super) whole_sectors: u64,
}

// SAFETY: `data` points into a region that the channel keeps, and is not dereferenced here.
unsafe impl Send for Unsubmitted {}

impl Unsubmitted {
    /// Cuts the first `sectors` off; returns the bio of the piece and the address of its data.
    pub(super) fn cut(&mut self, sectors: u64) -> (Bio, NonNull<u8>) {
        debug_assert!(sectors > 0 && sectors <= self.bio.sectors);
        let is_followed = sectors < self.bio.sectors;
        let mark = PieceMark { whole_sectors: self.whole_sectors, is_followed };
        let piece = (Bio { sectors, user_data: mark.user_data(), ..self.bio }, self.data);
        self.whole_sectors = 0;
        self.bio.sector += sectors;
        self.bio.sectors -= sectors;
        if self.bio.op.has_data() {
            let len_bytes = (sectors << SECTOR_SHIFT) as usize;
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
pub(super) fn begin_split(parent: &mut Slot) {
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

/// The requests that a bio becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// One request with these flags.
    Plain(Flags),
    /// No request: the bio is complete.
    Nothing,
    /// A sequence of requests that starts with this part.
    Sequence(Stage),
}

/// Chooses the requests that a bio becomes.
#[inline]
pub(super) fn route(bio: &Bio, limits: &Limits) -> Route {
    let durable = bio.flags.intersects(Flags::FUA | Flags::PREFLUSH);
    if !durable && bio.op != Op::Flush {
        return Route::Plain(bio.flags);
    }
    route_durable(bio, limits)
}

#[cold]
fn route_durable(bio: &Bio, limits: &Limits) -> Route {
    let plain = bio.flags.without(Flags::FUA | Flags::PREFLUSH);
    if bio.op == Op::Flush {
        return if limits.write_cache { Route::Plain(plain) } else { Route::Nothing };
    }
    let writes_data = matches!(bio.op, Op::Write | Op::WriteZeroes | Op::ZoneAppend);
    if !limits.write_cache || !writes_data {
        return Route::Plain(plain);
    }
    if bio.flags.contains(Flags::PREFLUSH) {
        return Route::Sequence(Stage::PreFlush);
    }
    if limits.fua { Route::Plain(bio.flags) } else { Route::Sequence(Stage::Data) }
}

/// The flags of a piece of a split bio. The sequence of the whole bio does the work of the removed
/// flags.
pub(super) fn piece_flags(bio: &Bio, limits: &Limits) -> Flags {
    let flags = bio.flags.without(Flags::PREFLUSH);
    if limits.fua { flags } else { flags.without(Flags::FUA) }
}

/// The request for the part `stage` of a sequence.
///
/// # Safety
/// As for [`Request::of`].
pub(super) unsafe fn flush_part(mut slot: NonNull<Slot>, stage: Stage, limits: &Limits) -> Request {
    // SAFETY: valid by this function's own contract; no request refers to the slot yet.
    let bio = unsafe {
        slot.as_mut().stage = stage;
        slot.as_ref().bio
    };
    // SAFETY: by this function's own contract.
    let request = unsafe { Request::of(slot) };
    let mut flags = bio.flags.without(Flags::PREFLUSH) | Flags::NOMERGE;
    match stage {
        Stage::PreFlush | Stage::PostFlush => request.recast(Op::Flush, Flags::NOMERGE),
        Stage::Plain | Stage::Data | Stage::Returned => {
            if !limits.fua {
                flags = flags.without(Flags::FUA);
            }
            request.recast(bio.op, flags)
        }
    }
}

/// The part that follows a completed part, or `None` when the bio is complete. The slot keeps the
/// sector at which an append landed, because a flush may follow it.
pub(super) fn next_part(
    slot: &mut Slot,
    status: Status,
    sector: Sector,
    limits: &Limits,
) -> Option<Stage> {
    if !status.is_ok() {
        return None;
    }
    match slot.stage {
        Stage::PreFlush => Some(Stage::Data),
        Stage::Data => {
            if slot.bio.op == Op::ZoneAppend {
                slot.bio.sector = sector;
            }
            let post = slot.bio.flags.contains(Flags::FUA) && !limits.fua;
            post.then_some(Stage::PostFlush)
        }
        Stage::Plain | Stage::PostFlush | Stage::Returned => None,
    }
}
