//! What one atomic costs: alone, by two threads at once, and as a message from one to the other.
#![allow(clippy::disallowed_types, reason = "atomics are what is measured here")]

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_sync::pad::Padded;

use crate::error::LabError;
use crate::limits::pair::{Place, in_turns, together};
use crate::limits::slices::{Reading, alone};
use crate::sample::Round;

/// In the cell of a ping-pong: the answerer may go.
const GONE: u64 = u64::MAX;

/// Which read-modify-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// `fetch_add`: always one access.
    Add,
    /// A load and a `compare_exchange`, again until it succeeds.
    Exchange,
}

/// One update; answers the value before.
#[inline]
fn update(cell: &AtomicU64, kind: Update) -> u64 {
    // Relaxed and AcqRel cost the same on x86; AcqRel is what a room needs.
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

/// Updates of a cell that nobody else wants.
///
/// # Errors
/// As [`alone`].
pub fn uncontended(round: &Round<'_>, kind: Update) -> Result<Reading, LabError> {
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
pub fn contended(round: &Round<'_>, kind: Update) -> Result<Reading, LabError> {
    let cell = Padded(AtomicU64::new(0));
    let run = |ops| {
        let mut turns = 0;
        let mut expected = u64::MAX;
        for _ in 0..ops {
            let before = update(&cell, kind);
            // The first of a batch counts as no turn: who came before it is not known.
            turns += u64::from(before != expected && expected != u64::MAX);
            expected = before + 1;
        }
        turns
    };
    together(round, false, [run; 2])
}

/// A message through a cache line: one thread stores, the other sees it. Half a round trip.
///
/// # Errors
/// As [`in_turns`].
pub fn line_transfer(round: &Round<'_>) -> Result<Reading, LabError> {
    let line = Padded(AtomicU64::new(0));
    let mut asked = 0;
    in_turns(
        round,
        Place::Beside,
        || {
            asked += 1;
            // Release: pairs with the Acquire of the answerer, and the other way round.
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
