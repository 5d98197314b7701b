//! Threads of a pool, beside that of its committer: they write checkpoints, clean, and make
//! segments. Whoever simulates the disk may decide who of them goes on when, see
//! [`Directory::beside`].

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use blockyard_sync::published::Published;

use crate::store::Directory;

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
