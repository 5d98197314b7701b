//! Maintenance threads of a pool, which run concurrently with its committer: they write
//! checkpoints, clean, and make segments. A test may decide which of them runs when; see
//! [`set_schedule`].

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_sync::rcu_cell::RcuCell;
use rustix::time::{ClockId, clock_gettime};

/// How long such a thread works before it yields the CPU, while other threads may wait for it.
const AT_ONCE: Duration = Duration::from_micros(200);
const AT_ONCE_MAX: Duration = Duration::from_micros(500);

/// Between `AT_ONCE` and `AT_ONCE_MAX`, the thread works for this part (1/4) of the time for which
/// its last yield kept it off the CPU. A busy system takes a whole time slice from a thread that
/// yields.
const AWAY_PART: u32 = 4;

/// The work of a thread since it last yielded.
struct Turn<W> {
    since: Instant,
    /// The thread's CPU time at `since`.
    worked: Duration,
    /// How long the thread works before it yields.
    len: Duration,
    /// Whether another thread waits for this one's work.
    is_waited_for: W,
}

/// Tells whether another thread waits for the work of this one.
type Waits = Box<dyn Fn() -> bool>;

thread_local! {
    static TURN: RefCell<Option<Turn<Waits>>> = const { RefCell::new(None) };
}

/// The CPU time of this thread.
fn worked() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("time that has passed")
}

impl<W: Fn() -> bool> Turn<W> {
    fn new(is_waited_for: W) -> Turn<W> {
        Turn { since: Instant::now(), worked: worked(), len: AT_ONCE, is_waited_for }
    }

    /// Yields the CPU if the thread has worked for long. Returns whether it has yielded.
    fn end(&mut self) -> bool {
        let now = Instant::now();
        if now.saturating_duration_since(self.since) < self.len {
            return false;
        }
        self.since = now;
        // Sleeping does not count as work. And if another thread waits for this one, yielding would
        // delay that thread.
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

/// The work of a thread.
pub type Work = Box<dyn FnOnce() + Send>;

/// Runs the threads of a pool one at a time, in an order of its choice.
pub trait Schedule: Send + Sync {
    /// Wraps the work of a new thread, before the thread exists.
    fn wrap(&self, work: Work) -> Work;

    /// Called by a thread before it waits for a condition: the thread sleeps, or blocks, when this
    /// returns.
    fn wait_until(&self, is_true: &dyn Fn() -> bool);
}

thread_local! {
    /// The schedule of this thread. Only tests set one.
    static SCHEDULE: RefCell<Option<Arc<dyn Schedule>>> = const { RefCell::new(None) };
}

/// Gives this thread, and the maintenance threads that it starts, a schedule.
pub fn set_schedule(schedule: Arc<dyn Schedule>) {
    SCHEDULE.set(Some(schedule));
}

/// Tells the schedule, if there is one, that this thread is about to wait for a condition.
pub(crate) fn wait_until(is_true: &dyn Fn() -> bool) {
    if let Some(schedule) = SCHEDULE.with_borrow(Option::clone) {
        schedule.wait_until(is_true);
    }
}

/// Makes this thread yield the CPU from now on, unless another thread waits for it.
pub(crate) fn set_yielding(is_waited_for: impl Fn() -> bool + 'static) {
    TURN.set(Some(Turn::new(Box::new(is_waited_for))));
}

/// Yields the CPU if this thread was made to do so and has worked for long. Otherwise the system
/// may let the committer, and all writes with it, wait for a time slice of 3 or 4 ms. Each loop
/// over a map calls it, while it holds no lock that another thread needs.
pub(crate) fn yield_if_due() {
    TURN.with_borrow_mut(|turn| _ = turn.as_mut().map(Turn::end));
}

/// A maintenance thread.
#[derive(Debug)]
pub(crate) struct Thread {
    thread: JoinHandle<()>,
    is_ended: Arc<RcuCell<bool>>,
}

/// Marks a thread as ended, also after a panic.
struct End(Arc<RcuCell<bool>>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.update(|_| true);
    }
}

impl Thread {
    /// Starts a thread.
    ///
    /// # Errors
    /// If the system refuses it.
    pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
        let is_ended = Arc::new(RcuCell::new(false));
        let end = End(Arc::clone(&is_ended));
        let mut work: Work = Box::new(move || {
            let _end = end;
            work();
        });
        if let Some(schedule) = SCHEDULE.with_borrow(Option::clone) {
            let wrapped = schedule.wrap(work);
            work = Box::new(move || {
                set_schedule(schedule);
                wrapped();
            });
        }
        let thread = Builder::new().name(name.to_owned()).spawn(work)?;
        Ok(Thread { thread, is_ended })
    }

    /// Whether the thread has done its work.
    pub(crate) fn is_ended(&self) -> bool {
        *self.is_ended.get()
    }

    /// Waits for the end of the thread. Returns whether it ended without a panic.
    pub(crate) fn join(self) -> bool {
        wait_until(&|| self.is_ended());
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

    /// Regression: long loops of a checkpoint and of a liveness scan kept the committer off its CPU
    /// for a time slice.
    #[test]
    fn a_thread_that_has_worked_a_full_slice_yields() {
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
    fn a_thread_that_slept_or_is_waited_for_does_not_yield() {
        let waits = Cell::new(false);
        let mut turn = Turn::new(|| waits.get());
        // Time has passed, but the thread had only a small part of it.
        turn.since = turn.since.checked_sub(Duration::from_secs(1)).unwrap();
        turn.worked += Duration::from_secs(3600);
        assert!(!turn.end(), "it has slept");
        turn.worked = Duration::ZERO;
        work(AT_ONCE);
        waits.set(true);
        assert!(!turn.end(), "another thread waits");
        waits.set(false);
        work(AT_ONCE);
        assert!(turn.end());
    }
}
