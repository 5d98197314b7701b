//! The cost of one atomic: alone, by two threads at once, and as a message between two threads.
#![allow(clippy::disallowed_types, reason = "atomics are what is measured here")]

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_sync::pad::Padded;

use crate::error::LabError;
use crate::limits::pair::{PairPlacement, in_turns, together};
use crate::limits::slices::{LimitReading, alone};
use crate::sample::Round;

/// The value of the cell that ends the answering thread of a ping-pong.
const GONE: u64 = u64::MAX;

/// The kind of read-modify-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// `fetch_add`: always one access.
    Add,
    /// A load and a `compare_exchange`, repeated until it succeeds.
    Exchange,
}

/// One update. Returns the value before.
#[inline]
fn update(cell: &AtomicU64, kind: Update) -> u64 {
    // Relaxed and AcqRel cost the same on x86; the product's primitives need AcqRel.
    match kind {
        Update::Add => cell.fetch_add(1, Ordering::AcqRel),
        Update::Exchange => {
            let mut now = cell.load(Ordering::Relaxed);
            while let Err(seen) =
                cell.compare_exchange(now, now + 1, Ordering::AcqRel, Ordering::Relaxed)
            {
                now = seen;
            }
            now
        }
    }
}

/// Updates of a cell that no other thread uses.
///
/// # Errors
/// As [`alone`].
pub fn uncontended(round: &Round<'_>, kind: Update) -> Result<LimitReading, LabError> {
    let cell = Padded(AtomicU64::new(0));
    alone(round, |ops| {
        for _ in 0..ops {
            black_box(update(&cell, kind));
        }
    })
}

/// Updates of one cell by two threads at once.
///
/// # Errors
/// As [`together`].
pub fn contended(round: &Round<'_>, kind: Update) -> Result<LimitReading, LabError> {
    let cell = Padded(AtomicU64::new(0));
    let run = |ops| {
        let mut turns = 0;
        let mut expected = u64::MAX;
        for _ in 0..ops {
            let before = update(&cell, kind);
            // The first of a batch counts as no turn, because the thread before it is not known.
            turns += u64::from(before != expected && expected != u64::MAX);
            expected = before + 1;
        }
        turns
    };
    together(round, false, [run; 2])
}

/// A message through a cache line: one thread stores, another sees it. Measures half a round trip.
///
/// # Errors
/// As [`in_turns`].
pub fn line_transfer(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let line = Padded(AtomicU64::new(0));
    let mut asked = 0;
    in_turns(
        round,
        PairPlacement::Other,
        || {
            asked += 1;
            // Release: pairs with the Acquire of the answering thread, in both directions.
            line.store(2 * asked - 1, Ordering::Release);
            while line.load(Ordering::Acquire) != 2 * asked {
                spin_loop();
            }
            Ok(())
        },
        || loop {
            match line.load(Ordering::Acquire) {
                GONE => return false,
                odd if odd % 2 == 1 => {
                    line.store(odd + 1, Ordering::Release);
                    return true;
                }
                _ => spin_loop(),
            }
        },
        || line.store(GONE, Ordering::Release),
    )
}
