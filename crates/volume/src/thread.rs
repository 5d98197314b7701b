//! Threads of a pool, beside that of its committer: they write checkpoints, clean, and make
//! segments. Whoever simulates the disk may decide who of them goes on when, see
//! [`Directory::beside`].

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_sync::published::Published;

use crate::store::Directory;

/// How long such a thread works at once while others may wait for its processor.
const AT_ONCE: Duration = Duration::from_micros(200);

thread_local! {
    /// Since when this thread has been working, if it is one of those.
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Lets others have the processor where this is one of the threads beside the committer, and it has
/// been at work for long: a system may let the committer wait for a time slice, 3 or 4 ms, and all
/// writes with it. Says whether it has. To be called in whatever loop is as long as a map is, with
/// no lock held that somebody else wants.
pub(crate) fn give_way() -> bool {
    SINCE.with(|since| {
        let is_long = since.get().is_some_and(|since| since.elapsed() >= AT_ONCE);
        if is_long {
            thread::yield_now();
            since.set(Some(Instant::now()));
        }
        is_long
    })
}

/// A thread.
#[derive(Debug)]
pub(crate) struct Thread {
    thread: JoinHandle<()>,
    is_ended: Arc<Published<bool>>,
}

/// Notes that a thread has ended, also by a panic.
struct End(Arc<Published<bool>>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.update(|_| true);
    }
}

impl Thread {
    /// Starts one.
    ///
    /// # Errors
    /// If the system refuses it.
    pub(crate) fn start<D: Directory>(
        directory: &D,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<Thread> {
        let is_ended = Arc::new(Published::new(false));
        let end = End(Arc::clone(&is_ended));
        let work = directory.beside(Box::new(move || {
            let _end = end;
            SINCE.set(Some(Instant::now()));
            work();
        }));
        let thread = Builder::new().name(name.to_owned()).spawn(work)?;
        Ok(Thread { thread, is_ended })
    }

    /// Whether it has nothing to do any more.
    pub(crate) fn is_ended(&self) -> bool {
        *self.is_ended.get()
    }

    /// Waits for its end; says whether it has come to that without a panic.
    pub(crate) fn join<D: Directory>(self, directory: &D) -> bool {
        directory.until(&|| self.is_ended());
        self.thread.join().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::RealDirectory;

    /// Long loops of a checkpoint and of a count kept the log from its processor for a time slice.
    #[test]
    fn who_works_beside_the_log_gives_way_and_nobody_else() {
        let hour = Duration::from_secs(3600);
        assert!(!give_way(), "not one of those threads");
        let work = move || {
            SINCE.set(SINCE.get().map(|since| since + hour));
            assert!(!give_way(), "not for long");
            SINCE.set(SINCE.get().and_then(|since| since.checked_sub(hour + AT_ONCE)));
            assert!(give_way());
            assert!(SINCE.get().is_some(), "and again");
        };
        let path = std::env::temp_dir().join(format!("blockyard-beside-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let directory = RealDirectory::take(&path).unwrap();
        let thread = Thread::start(&directory, "volume-test", work).unwrap();
        assert!(thread.join(&directory), "see above");
        drop(directory);
        std::fs::remove_dir_all(&path).unwrap();
    }
}
