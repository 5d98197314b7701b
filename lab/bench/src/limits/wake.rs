//! The time the system takes to wake a thread, to switch to another, and to read the clock.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "a futex is a word that two threads share")]

use std::fs::File;
use std::hint::{black_box, spin_loop};
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use crate::error::LabError;
use crate::limits::pair::{PairPlacement, in_turns};
use crate::limits::slices::{LimitReading, alone};
use crate::sample::Round;

/// The values of the word: the answering thread is to act; it has acted; it is to end.
const ASKED: u32 = 1;
const ANSWERED: u32 = 0;
const GONE: u32 = 2;

/// Sleeps while the word has this value.
fn futex_wait(word: &AtomicU32, value: u32) {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let forever = ptr::null::<libc::timespec>();
    // SAFETY: the word outlives the call, and the kernel only reads it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, forever) };
}

/// Wakes one sleeper.
fn futex_wake(word: &AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word outlives the call, and the kernel only looks at its address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, 1) };
}

/// One thread wakes another that sleeps on a futex. Half a round trip.
///
/// # Errors
/// As [`in_turns`].
pub fn futex(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let word = AtomicU32::new(ANSWERED);
    let set = |value| {
        // Release: pairs with the Acquire of the thread that waits for the value.
        word.store(value, Ordering::Release);
        futex_wake(&word);
    };
    in_turns(
        round,
        PairPlacement::Other,
        || {
            set(ASKED);
            while word.load(Ordering::Acquire) == ASKED {
                futex_wait(&word, ASKED);
            }
            Ok(())
        },
        || loop {
            match word.load(Ordering::Acquire) {
                ANSWERED => futex_wait(&word, ANSWERED),
                GONE => return false,
                _ => {
                    set(ANSWERED);
                    return true;
                }
            }
        },
        || set(GONE),
    )
}

/// A wake without a sleeper: the cost of the waker's system call.
///
/// # Errors
/// As [`alone`].
pub fn futex_call(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let word = AtomicU32::new(0);
    alone(round, |ops| (0..ops).for_each(|_| futex_wake(&word)))
}

/// A new eventfd.
fn event() -> Result<File, LabError> {
    // SAFETY: there are no pointers; the result is a new descriptor or -1.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(LabError::io("eventfd")(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is new and has no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// One thread wakes another that reads an eventfd. Half a round trip.
///
/// # Errors
/// As [`in_turns`].
pub fn eventfd(round: &Round<'_>) -> Result<LimitReading, LabError> {
    events(round, PairPlacement::Other)
}

/// A switch from one thread to another on one processor, caused through an eventfd.
///
/// # Errors
/// As [`in_turns`].
pub fn context_switch(round: &Round<'_>) -> Result<LimitReading, LabError> {
    events(round, PairPlacement::Same)
}

/// A round trip through two eventfds.
fn events(round: &Round<'_>, place: PairPlacement) -> Result<LimitReading, LabError> {
    let (to, fro) = (event()?, event()?);
    let last = 1_u64 << 32;
    let ring = |mut file: &File, count: u64| file.write_all(&count.to_ne_bytes());
    let hear = |mut file: &File| {
        let mut count = [0; 8];
        file.read_exact(&mut count).map(|()| u64::from_ne_bytes(count))
    };
    in_turns(
        round,
        place,
        || {
            ring(&to, 1).map_err(LabError::io("writing an eventfd"))?;
            hear(&fro).map(drop).map_err(LabError::io("reading an eventfd"))
        },
        || matches!(hear(&to), Ok(count) if count < last) && ring(&fro, 1).is_ok(),
        || drop(ring(&to, last)),
    )
}

/// A yield with no other thread to run: the system call and a look at the run queue.
///
/// # Errors
/// As [`alone`].
pub fn yield_alone(round: &Round<'_>) -> Result<LimitReading, LabError> {
    alone(round, |ops| (0..ops).for_each(|_| thread::yield_now()))
}

/// One reading of the monotonic clock.
///
/// # Errors
/// As [`alone`].
pub fn clock(round: &Round<'_>) -> Result<LimitReading, LabError> {
    alone(round, |ops| {
        for _ in 0..ops {
            black_box(Instant::now());
        }
    })
}

/// The pause between two loads of a held lock.
///
/// # Errors
/// As [`alone`].
pub fn pause(round: &Round<'_>) -> Result<LimitReading, LabError> {
    alone(round, |ops| (0..ops).for_each(|_| spin_loop()))
}
