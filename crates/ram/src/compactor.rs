//! Compaction in the background: a thread of the device's looks once a second how much of the pool
//! is lost, and moves some objects together when it is more than a threshold.
//!
//! Then it asks the system for huge pages in place of the small ones that objects have filled.
//!
//! The data path has no part in it. A look costs a few instructions; a turn moves [`TURN_BYTES`] at
//! most and loses to every writer, as any compaction does. What could not be won is not tried again
//! until the pool has changed.
#![allow(clippy::disallowed_types)] // Starting, asking and stopping a thread is control plane.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::pool::Load;
use crate::store::Access;

/// Time between looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Objects of so many bytes are moved in a turn, which takes some 20 ms.
const TURN_BYTES: u64 = 64 << 20;
/// So many huge pages are asked for in a turn: 64 MiB, which takes some 20 ms as well.
const TURN_HUGE_PAGES: u64 = 32;
/// A turn has won little if it was less than one part in so many of what was lost.
const WON_PART: u64 = 8;
/// After such a turn there is none until so many percent of what is stored were stored anew.
const CHANGED_PERCENT: u64 = 5;

/// The thread, and what it is told.
#[derive(Debug)]
pub(crate) struct Compactor {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// What thread and device tell each other.
#[derive(Debug)]
struct Desk {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Debug)]
struct Orders {
    /// Percent of the stored bytes that may be lost.
    percent: u8,
    /// Turns that have begun, and that are over.
    begun: u64,
    over: u64,
    /// Turns up to this one do not wait for their time.
    wanted: u64,
    /// Nobody wants any more; ends a turn in its middle.
    stopped: bool,
}

impl Compactor {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system has no thread.
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

    /// Sets another threshold.
    pub(crate) fn set_percent(&self, percent: u8) {
        self.desk.orders().percent = percent;
    }

    /// Has a turn made at once, and returns when it is over.
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
            // A panic in it was printed, and has left the pool as it was.
            let _ = thread.join();
        }
    }
}

impl Desk {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread end, and nobody wait for it.
    fn stop(&self) {
        let mut orders = self.orders();
        orders.stopped = true;
        self.changed.notify_all();
    }

    /// Waits for the next turn, and says at which threshold; `None` if there is to be no more.
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
    /// However the thread ends, nobody waits for it.
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

/// What is remembered from one turn to the next.
#[derive(Debug, Default)]
struct Turns {
    /// How the pool was after a turn that has won little.
    in_vain: Option<Load>,
}

impl Turns {
    /// Moves objects together if more than `percent` of the stored bytes are lost.
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

    /// Whether too little was stored since a turn that has won little.
    fn is_vain(&self, now: Load) -> bool {
        self.in_vain.is_some_and(|then| {
            (now.placed_bytes - then.placed_bytes) * 100 <= then.stored_bytes * CHANGED_PERCENT
        })
    }
}
