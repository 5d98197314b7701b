//! Flush sequences: what PREFLUSH and FUA mean on a device with a volatile cache.
//!
//! | device | bio | becomes |
//! | --- | --- | --- |
//! | no volatile cache | flush | done at once |
//! | no volatile cache | PREFLUSH, FUA | the plain bio |
//! | cache, FUA | FUA | the bio with FUA |
//! | cache, FUA | PREFLUSH (and FUA) | flush, then the bio (with FUA) |
//! | cache, no FUA | FUA | the bio, then flush |
//! | cache, no FUA | PREFLUSH and FUA | flush, then the bio, then flush |
//!
//! As in Linux (Documentation/block/writeback_cache_control.rst). The parts of a sequence use the
//! bio's own slot, one after the other, and are never merged. Of a bio that is split the pieces are
//! one part: one flush comes before the first of them, one after the last, and FUA is for each.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::{Bio, Flags, Op};
use crate::limits::Limits;
use crate::request::{Request, Slot, Stage};
use crate::status::Status;
use crate::units::Sector;

/// How a bio has to go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// As it is, with these flags.
    Plain(Flags),
    /// It is done already.
    Nothing,
    /// In parts, this one first.
    Sequence(Stage),
}

/// Decides how a bio has to go down.
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

/// The flags of a piece of a bio that is split. What they leave out the whole bio's sequence does.
pub(super) fn piece_flags(bio: &Bio, limits: &Limits) -> Flags {
    let flags = bio.flags.without(Flags::PREFLUSH);
    if limits.fua { flags } else { flags.without(Flags::FUA) }
}

/// The request for the part of a sequence that `stage` names.
///
/// # Safety
/// As for [`Request::of`].
pub(super) unsafe fn part(mut slot: NonNull<Slot>, stage: Stage, limits: &Limits) -> Request {
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

/// What follows when a part has ended: the next part, or `None` when the bio is complete. Where an
/// append landed is kept in the slot, because a flush may still come.
pub(super) fn after(
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
