//! Threads of a pool, beside that of its committer: they write checkpoints, clean, and make
//! segments. Whoever simulates the disk may decide who of them goes on when, see
//! [`Directory::beside`].

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_sync::published::Published;
use rustix::time::{ClockId, clock_gettime};

use crate::store::Directory;

/// How long such a thread works at once while others may wait for its processor.
const AT_ONCE: Duration = Duration::from_micros(200);
const AT_ONCE_MAX: Duration = Duration::from_micros(500);

/// It works for such a part of what it was kept away the last time, within these bounds: a system
/// takes a whole slice from who gives his processor away where others keep it busy.
const AWAY_PART: u32 = 4;

/// What a thread has done since it gave way.
struct Turn<W> {
    since: Instant,
    /// The processor's time that it had had then.
    worked: Duration,
    /// How long it works at once.
    len: Duration,
    /// Whether somebody waits for what it does.
    is_waited_for: W,
}

/// Says whether somebody waits for what a thread does.
type Waits = Box<dyn Fn() -> bool>;

thread_local! {
    static TURN: RefCell<Option<Turn<Waits>>> = const { RefCell::new(None) };
}

/// The time that this thread has had a processor.
fn worked() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("time that has passed")
}

impl<W: Fn() -> bool> Turn<W> {
    fn new(is_waited_for: W) -> Turn<W> {
        Turn { since: Instant::now(), worked: worked(), len: AT_ONCE, is_waited_for }
    }

    /// Lets others have the processor if it has worked for long; says whether it has.
    fn end(&mut self) -> bool {
        let now = Instant::now();
        if now.saturating_duration_since(self.since) < self.len {
            return false;
        }
        self.since = now;
        // Sleeping is no work, and who waits for this thread gains nothing by what others do.
        if worked().saturating_sub(self.worked) < self.len || (self.is_waited_for)() {
            return false;
        }
        thread::yield_now();
        self.since = Instant::now();
        self.worked = worked();
        self.len = ((self.since - now) / AWAY_PART).clamp(AT_ONCE, AT_ONCE_MAX);
        true
    }
}

/// This thread gives way to others from now on, unless somebody waits for it.
pub(crate) fn be_patient(is_waited_for: impl Fn() -> bool + 'static) {
    TURN.set(Some(Turn::new(Box::new(is_waited_for))));
}

/// Lets others have the processor where this is a thread that gives way and it has worked for long:
/// a system may let the committer wait for a time slice, 3 or 4 ms, and all writes with it. To be
/// called in whatever loop is as long as a map is, with no lock held that somebody else wants.
pub(crate) fn give_way() {
    TURN.with_borrow_mut(|turn| _ = turn.as_mut().map(Turn::end));
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
    use std::cell::Cell;
    use std::hint::spin_loop;

    fn work(time: Duration) {
        let end = worked() + time;
        while worked() < end {
            spin_loop();
        }
    }

    /// Long loops of a checkpoint and of a count kept the log from its processor for a time slice.
    #[test]
    fn who_has_worked_for_long_gives_way() {
        let mut turn = Turn::new(|| false);
        for _ in 0..3 {
            turn.len = Duration::from_secs(3600);
            assert!(!turn.end(), "not for long");
            turn.len = AT_ONCE;
            work(AT_ONCE);
            assert!(turn.end());
            assert!((AT_ONCE..=AT_ONCE_MAX).contains(&turn.len));
        }
    }

    #[test]
    fn who_has_slept_or_is_waited_for_does_not() {
        let waits = Cell::new(false);
        let mut turn = Turn::new(|| waits.get());
        // Time has passed, of which it has had the least part.
        turn.since = turn.since.checked_sub(Duration::from_secs(1)).unwrap();
        turn.worked += Duration::from_secs(3600);
        assert!(!turn.end(), "it has slept");
        turn.worked = Duration::ZERO;
        work(AT_ONCE);
        waits.set(true);
        assert!(!turn.end(), "somebody waits");
        waits.set(false);
        work(AT_ONCE);
        assert!(turn.end());
    }
}
