//! Background compaction: once a second a thread of the device checks what share of the pool is
//! lost to free space, and compacts if the share exceeds a threshold.
//!
//! Then the thread asks the system for huge pages in place of small ones that are full of objects.
//!
//! The data path is not involved. A check costs a few instructions. A round moves at most
//! [`TURN_BYTES`], and any write that races with a move wins. After a round that gained little, the
//! thread does not try again before the pool has changed.
#![allow(clippy::disallowed_types)] // Starting, triggering and stopping a thread is control plane.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::pool::Load;
use crate::store::Access;

/// Time between checks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum bytes of objects that a round moves: 64 MiB take about 20 ms.
const TURN_BYTES: u64 = 64 << 20;
/// Maximum number of huge pages that a round asks for: 64 MiB, which also take about 20 ms.
const TURN_HUGE_PAGES: u64 = 32;
/// A round gained little if it freed less than 1/8 of the lost bytes.
const WON_PART: u64 = 8;
/// After such a round, wait until this share of the stored bytes was written again, in percent.
const CHANGED_PERCENT: u64 = 5;

/// The compaction thread and its control block.
#[derive(Debug)]
pub(crate) struct Compactor {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// State that the thread and the device share.
#[derive(Debug)]
struct Desk {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Debug)]
struct Orders {
    /// Threshold: lost bytes in percent of the stored bytes.
    percent: u8,
    /// Number of rounds that have begun; the next field counts those that have ended.
    begun: u64,
    over: u64,
    /// Rounds up to this one start at once and do not wait for the interval.
    wanted: u64,
    /// The device is closing: ends a round early.
    stopped: bool,
}

impl Compactor {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub(crate) fn start(access: Access, percent: u8) -> io::Result<Compactor> {
        let orders = Orders { percent, begun: 0, over: 0, wanted: 0, stopped: false };
        let desk = Arc::new(Desk { orders: Mutex::new(orders), changed: Condvar::new() });
        let theirs = Arc::clone(&desk);
        let thread = std::thread::Builder::new().name("ram-compactor".to_owned());
        let thread = thread.spawn(move || run(&theirs, access))?;
        Ok(Compactor { desk, thread: Some(thread) })
    }

    /// The threshold, in percent of the stored bytes.
    pub(crate) fn percent(&self) -> u8 {
        self.desk.orders().percent
    }

    /// Sets the threshold.
    pub(crate) fn set_percent(&self, percent: u8) {
        self.desk.orders().percent = percent;
    }

    /// Runs a round at once and waits until it has ended.
    pub(crate) fn turn(&self) {
        let mut orders = self.desk.orders();
        let turn = orders.begun + 1;
        orders.wanted = orders.wanted.max(turn);
        self.desk.changed.notify_all();
        while orders.over < turn && !orders.stopped {
            orders = self.desk.changed.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Compactor {
    fn drop(&mut self) {
        self.desk.stop();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was already printed and has left the pool consistent.
            let _ = thread.join();
        }
    }
}

impl Desk {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the thread to end, and releases every thread that waits for a round.
    fn stop(&self) {
        let mut orders = self.orders();
        orders.stopped = true;
        self.changed.notify_all();
    }

    /// Waits for the next round and returns its threshold; `None` after a stop.
    fn next_turn(&self) -> Option<u8> {
        let waiting = |orders: &mut Orders| orders.wanted <= orders.begun && !orders.stopped;
        let waited = self.changed.wait_timeout_while(self.orders(), INTERVAL, waiting);
        let (mut orders, _) = waited.unwrap_or_else(PoisonError::into_inner);
        orders.begun += 1;
        (!orders.stopped).then_some(orders.percent)
    }

    fn end_turn(&self) {
        let mut orders = self.orders();
        orders.over = orders.begun;
        self.changed.notify_all();
    }
}

fn run(desk: &Desk, mut access: Access) {
    /// Releases the waiting threads, even if the compaction thread panics.
    struct End<'d>(&'d Desk);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let _end = End(desk);
    let mut turns = Turns::default();
    while let Some(percent) = desk.next_turn() {
        let stopped = || desk.orders().stopped;
        turns.turn(&mut access, percent, stopped);
        access.store().pool().gather(TURN_HUGE_PAGES, stopped);
        desk.end_turn();
    }
}

/// State that is kept between rounds.
#[derive(Debug, Default)]
struct Turns {
    /// The pool's load after a round that gained little.
    in_vain: Option<Load>,
}

impl Turns {
    /// Compacts if more than `percent` of the stored bytes are lost.
    fn turn(&mut self, access: &mut Access, percent: u8, stop: impl FnMut() -> bool) {
        let before = access.store().pool().load();
        let is_little = before.lost_bytes() * 100 <= before.stored_bytes * u64::from(percent);
        if is_little || self.is_vain(before) {
            return;
        }
        access.compact_some(TURN_BYTES, stop);
        access.reclaim();
        let after = access.store().pool().load();
        let (lost, left) = (before.lost_bytes(), after.lost_bytes());
        self.in_vain = (left + lost / WON_PART > lost).then_some(after);
    }

    /// Whether too little was stored since a round that gained little.
    fn is_vain(&self, now: Load) -> bool {
        self.in_vain.is_some_and(|then| {
            (now.placed_bytes - then.placed_bytes) * 100 <= then.stored_bytes * CHANGED_PERCENT
        })
    }
}
