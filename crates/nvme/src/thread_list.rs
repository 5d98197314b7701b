//! Threads with one owner, which waits for their ends, but not longer than until a deadline: a
//! thread that a device or the system holds is detached.
//!
//! Control plane: the lock is taken when a thread begins or ends.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use blockyard_os::socket;

/// The threads that are neither joined nor detached.
#[derive(Debug, Default)]
pub(crate) struct ThreadList {
    threads: Mutex<ListedThreads>,
    /// Notified when a thread ends.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct ListedThreads {
    next: u64,
    listed: Vec<ListedThread>,
}

#[derive(Debug)]
struct ListedThread {
    number: u64,
    name: String,
    has_ended: bool,
    joined: JoinHandle<()>,
}

/// Notes the end of a thread, also if it panics.
struct EndNote {
    list: Arc<ThreadList>,
    number: u64,
}

impl Drop for EndNote {
    fn drop(&mut self) {
        let mut threads = self.list.threads();
        let find = |thread: &&mut ListedThread| thread.number == self.number;
        if let Some(thread) = threads.listed.iter_mut().find(find) {
            thread.has_ended = true;
        }
        drop(threads);
        self.list.ended.notify_all();
    }
}

impl ListedThreads {
    fn take_ended(&mut self) -> Vec<ListedThread> {
        self.listed.extract_if(.., |thread| thread.has_ended).collect()
    }
}

impl ThreadList {
    fn threads(&self) -> MutexGuard<'_, ListedThreads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread, and joins those that have ended.
    ///
    /// # Errors
    /// If the system refuses the thread.
    pub(crate) fn spawn(
        self: &Arc<ThreadList>,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let mut threads = self.threads();
        let number = threads.next;
        threads.next += 1;
        let list = Arc::clone(self);
        let noted = move || {
            let _note = EndNote { list, number };
            run();
        };
        // The lock is held: the thread cannot note its end before it is listed.
        let joined = thread::Builder::new().name(name.clone()).spawn(noted)?;
        threads.listed.push(ListedThread { number, name, has_ended: false, joined });
        let ended = threads.take_ended();
        drop(threads);
        join(ended);
        Ok(())
    }

    /// Joins the threads that end before the deadline, and detaches the others with a warning.
    pub(crate) fn join_until(&self, deadline: Instant) {
        let threads = self.threads();
        let is_any = |threads: &mut ListedThreads| threads.listed.iter().any(|it| !it.has_ended);
        let waited = self.ended.wait_timeout_while(threads, socket::left(deadline), is_any);
        let mut threads = waited.unwrap_or_else(PoisonError::into_inner).0;
        let ended = threads.take_ended();
        let running = std::mem::take(&mut threads.listed);
        drop(threads);
        join(ended);
        for ListedThread { name, .. } in running {
            tracing::warn!(name, "a thread has not ended in time; it is left to itself");
        }
    }
}

/// Joins threads that have noted their ends.
fn join(ended: Vec<ListedThread>) {
    for thread in ended {
        // A panic of the thread was reported when it happened.
        let _ = thread.joined.join();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn threads_that_end_are_joined_and_others_are_detached_at_the_deadline() {
        let list = Arc::<ThreadList>::default();
        let (hold, held) = mpsc::channel::<()>();
        let (left, leaves) = mpsc::channel();
        list.spawn("panics".to_owned(), || panic!("a thread that panics ends too")).unwrap();
        list.join_until(Instant::now() + std::time::Duration::from_secs(60));
        assert!(list.threads().listed.is_empty());
        let run = move || {
            let _ = held.recv();
            left.send(()).unwrap();
        };
        list.spawn("held".to_owned(), run).unwrap();
        list.join_until(Instant::now());
        assert!(leaves.try_recv().is_err(), "the thread is held still");
        assert!(list.threads().listed.is_empty());
        drop(hold);
        leaves.recv().unwrap();
    }
}
