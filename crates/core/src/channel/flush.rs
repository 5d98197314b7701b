//! Flush sequences: what PREFLUSH and FUA mean on a device with a volatile cache.
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

use crate::bio::{Bio, Flags, Op};
use crate::limits::Limits;
use crate::request::{Request, Slot, Stage};
use crate::status::Status;
use crate::units::Sector;

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

/// The part that follows a completed part, or `None` when the bio is complete. The slot keeps the
/// sector at which an append landed, because a flush may follow it.
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
