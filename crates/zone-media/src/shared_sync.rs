//! Syncs of one file that threads share, so that each of them learns of a failed one.
//!
//! The kernel reports a failed write-back once for an open file: of two threads that sync it at the
//! same time, one gets the error and the other success, although the data of both may be lost. So:
//!
//! 1. One thread at a time syncs a file.
//! 2. That thread latches an error before it lets the next one sync; the next one looks at the
//!    latch first.
//! 3. A thread needs no sync of its own if a sync that began after its write has succeeded.
//!
//! ```text
//! IDLE ─ run: begun += 1 ▸ SYNCING ─ success: synced = begun, or failure ▸ IDLE
//! ```
#![allow(clippy::disallowed_types)] // A thread waits here for a sync of a file.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct State {
    /// Number of syncs that have begun.
    begun: u64,
    /// The last one that succeeded, counted from 1.
    synced: u64,
    is_syncing: bool,
    /// The threads that wait for the sync under way.
    #[cfg(test)]
    waiting: usize,
}

/// The syncs of a file.
#[derive(Debug, Default)]
pub(crate) struct SharedSync {
    state: Mutex<State>,
    ended: Condvar,
}

/// A sync under way, which ends when this is dropped, also by a panic.
struct Running<'a>(&'a SharedSync);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state().is_syncing = false;
        self.0.ended.notify_all();
    }
}

impl SharedSync {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes everything durable that the caller has written: by `sync`, or by that of another
    /// thread which begins after this call. `sync` fails if an earlier one has failed, and latches
    /// its own error.
    ///
    /// # Errors
    /// That of `sync`.
    pub(crate) fn run(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state();
        let needed = state.begun + 1;
        while state.is_syncing {
            #[cfg(test)]
            {
                state.waiting += 1;
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
            #[cfg(test)]
            {
                state.waiting -= 1;
            }
            if state.synced >= needed {
                return Ok(());
            }
        }
        state.begun += 1;
        let number = state.begun;
        state.is_syncing = true;
        drop(state);
        let running = Running(self);
        sync()?;
        self.state().synced = number;
        drop(running);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    use super::*;

    #[test]
    fn a_sync_that_has_ended_serves_no_later_caller() {
        let (shared, mut count) = (SharedSync::default(), 0);
        let mut sync = || {
            let counted = || {
                count += 1;
                Ok(())
            };
            shared.run(counted).unwrap();
        };
        (0..3).for_each(|_| sync());
        shared.run(|| Err(io::ErrorKind::Other.into())).unwrap_err();
        sync();
        let State { begun, synced, is_syncing, .. } = *shared.state();
        assert_eq!((count, begun, synced, is_syncing), (4, 5, 5, false));
    }

    /// A sync that is under way may have passed the data of a thread that comes then: that thread
    /// waits for the next one, which serves all that wait.
    #[test]
    fn a_sync_serves_only_the_threads_that_came_before_it_began() {
        let shared = SharedSync::default();
        let (events, next) = channel();
        let (release, released) = channel();
        let released = Mutex::new(released);
        let run = |events: Sender<(&str, char)>, name: char| {
            let sync = || {
                events.send(("begun", name)).unwrap();
                // It fails if the test has.
                released.lock().unwrap().recv().map_err(io::Error::other)
            };
            shared.run(sync).unwrap();
            events.send(("done", name)).unwrap();
        };
        let begin_wait = |threads| {
            while shared.state().waiting < threads {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            // The sync of a thread fails when this ends, so that the others end too.
            let release: Sender<()> = release;
            let begin = |name| {
                let (events, run) = (events.clone(), &run);
                scope.spawn(move || run(events, name))
            };
            let next_two = || {
                let mut two = [next.recv().unwrap(), next.recv().unwrap()];
                two.sort_unstable();
                two
            };
            begin('a');
            assert_eq!(next.recv().unwrap(), ("begun", 'a'));
            begin('b');
            begin_wait(1);
            release.send(()).unwrap();
            assert_eq!(next_two(), [("begun", 'b'), ("done", 'a')]);
            begin('c');
            begin('d');
            begin_wait(2);
            release.send(()).unwrap();
            let [(begun, last), done] = next_two();
            assert!(begun == "begun" && "cd".contains(last), "{begun} {last}");
            assert_eq!(done, ("done", 'b'));
            release.send(()).unwrap();
            assert_eq!(next_two(), [("done", 'c'), ("done", 'd')]);
        });
        let State { begun, synced, is_syncing, .. } = *shared.state();
        assert_eq!((begun, synced, is_syncing), (3, 3, false));
    }

    #[test]
    fn a_panic_leaves_no_sync_under_way() {
        let shared = SharedSync::default();
        let run = || shared.run(|| panic!("the sync of a test"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
        shared.run(|| Ok(())).unwrap();
    }
}
