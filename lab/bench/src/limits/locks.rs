//! The cost of a lock: alone, by two threads at once, and handed over in turns.
#![allow(clippy::disallowed_types, reason = "the standard lock is measured for comparison")]

use std::hint::{black_box, spin_loop};
use std::sync::{Mutex, PoisonError};

use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::spin_lock::SpinLock;

use crate::error::LabError;
use crate::limits::pair::{PairPlacement, in_turns, together};
use crate::limits::slices::{LimitReading, alone};
use crate::sample::Round;

/// The rank of a lock that is taken alone.
const RANK: u8 = 1;
/// The value of the turn that ends the answering thread.
const GONE: u64 = u64::MAX;

/// The product's spinning lock.
pub type Spin = SpinLock<u64, RANK>;
/// The product's sleeping lock.
pub type Sleep = SleepLock<u64, RANK>;

/// The standard library's lock, for comparison.
#[derive(Debug)]
pub struct Standard(Mutex<u64>);

impl Lock<u64> for Standard {
    fn new(value: u64) -> Standard {
        Standard(Mutex::new(value))
    }

    fn with<R>(&self, f: impl FnOnce(&mut u64) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn try_with<R, F: FnOnce(&mut u64) -> R>(&self, f: F) -> Result<R, F> {
        match self.0.try_lock() {
            Ok(mut value) => Ok(f(&mut value)),
            Err(_) => Err(f),
        }
    }
}

/// Takes and releases a lock that no other thread uses, around one addition.
///
/// # Errors
/// As [`alone`].
pub fn uncontended<L: Lock<u64>>(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let lock = Padded(L::new(0));
    alone(round, |ops| {
        for _ in 0..ops {
            black_box(lock.with(|count| {
                *count += 1;
                *count
            }));
        }
    })
}

/// Two threads take one lock at once, around one store.
///
/// # Errors
/// As [`together`].
pub fn contended<L: Lock<u64>>(round: &Round<'_>, sleeps: bool) -> Result<LimitReading, LabError> {
    let lock = Padded(L::new(0));
    let lock = &lock;
    let run = |who: u64| {
        move |ops| {
            let mut turns = 0;
            for _ in 0..ops {
                turns += lock.with(|last| {
                    let turn = u64::from(*last != who);
                    *last = who;
                    turn
                });
            }
            turns
        }
    };
    together(round, sleeps, [0, 1].map(run))
}

/// Two threads take a lock strictly in turns: the time from the end of one's section to the end of
/// the other's.
///
/// # Errors
/// As [`in_turns`].
pub fn hand_over<L: Lock<u64>>(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let lock = Padded(L::new(0));
    // A thread whose turn it is not lets the other in and looks again.
    let pass = |mine: u64, next: u64| {
        let turn = lock.with(|turn| {
            let before = *turn;
            if before == mine {
                *turn = next;
            }
            before
        });
        if turn != mine {
            spin_loop();
        }
        turn
    };
    in_turns(
        round,
        PairPlacement::Other,
        || {
            while pass(0, 1) != 0 {}
            Ok(())
        },
        || loop {
            match pass(1, 0) {
                1 => return true,
                GONE => return false,
                _ => {}
            }
        },
        || lock.with(|turn| *turn = GONE),
    )
}
