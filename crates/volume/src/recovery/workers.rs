//! Worker threads that read in parallel while a pool is opened or scanned. With one read at a time,
//! these reads would take longer than the log.
#![allow(clippy::disallowed_types)] // The workers wait for the disk, which takes far longer.

use std::cell::OnceCell;
use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::{Builder, Scope};

use crate::error::VolumeError;

/// Number of workers, which is the number of reads in flight.
pub(crate) const THREADS: usize = 16;

/// A job for a worker.
type Job<'scope> = Box<dyn FnOnce() + Send + 'scope>;

/// Makes the builder of the worker with this number.
type Spawn = fn(usize) -> Builder;

/// A set of workers, which start with the first job.
pub(crate) struct Workers<'scope, 'env: 'scope> {
    scope: &'scope Scope<'scope, 'env>,
    builder: Spawn,
    /// The queue of jobs; none if no worker could be started.
    jobs: OnceCell<Option<Sender<Job<'scope>>>>,
}

impl<'scope, 'env> Workers<'scope, 'env> {
    /// Workers of this scope.
    pub(crate) fn new(scope: &'scope Scope<'scope, 'env>) -> Workers<'scope, 'env> {
        Workers { scope, builder: |_| Builder::new(), jobs: OnceCell::new() }
    }

    /// Passes a job to a worker. If the system gives no thread, the caller executes it. A job must
    /// not wait for another job.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'scope) {
        let jobs = self.jobs.get_or_init(|| {
            let (jobs, taken) = channel();
            let taken = Arc::new(Mutex::new(taken));
            let mut count = 0;
            for number in 0..THREADS {
                let taken = Arc::clone(&taken);
                let builder = (self.builder)(number);
                let started = builder.spawn_scoped(self.scope, move || work(&taken));
                if let Err(error) = started {
                    // Each reader of a scan would say it again.
                    static SAID: Once = Once::new();
                    SAID.call_once(|| {
                        tracing::warn!(
                            "cannot start {THREADS} threads that read the log: {error}; it is read \
                             with {count}, which is slower"
                        );
                    });
                    break;
                }
                count += 1;
            }
            (count > 0).then_some(jobs)
        });
        match jobs {
            // The workers run until this sender is dropped.
            Some(jobs) => _ = jobs.send(Box::new(job)),
            None => job(),
        }
    }

    /// Executes `what` for each part in parallel, and waits until all parts are done.
    pub(crate) fn each<T: Send + 'scope>(
        &self,
        parts: impl Iterator<Item = T>,
        what: impl Fn(T) -> Result<(), VolumeError> + Clone + Send + 'scope,
    ) -> Result<(), VolumeError> {
        let ended = self.all(parts, what);
        ended.map_err(VolumeError::io("cannot read the log and its maps"))?.into_iter().collect()
    }

    /// Executes `what` for each part by several threads, waits until all are done, and returns the
    /// results in any order.
    ///
    /// # Errors
    /// If one of the threads has panicked.
    pub(crate) fn all<T: Send + 'scope, R: Send + 'scope>(
        &self,
        parts: impl Iterator<Item = T>,
        what: impl Fn(T) -> R + Clone + Send + 'scope,
    ) -> io::Result<Vec<R>> {
        let (end, ended) = channel();
        let mut count = 0;
        for part in parts {
            let (what, end) = (what.clone(), end.clone());
            self.run(move || _ = end.send(what(part)));
            count += 1;
        }
        drop(end);
        // Wait for all of them, even if one has failed.
        let ended: Vec<_> = ended.into_iter().collect();
        match ended.len() == count {
            true => Ok(ended),
            false => Err(io::Error::other("a thread that reads it has panicked")),
        }
    }
}

fn work(jobs: &Mutex<Receiver<Job<'_>>>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        job();
    }
}

impl fmt::Debug for Workers<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::OnceLock;
    use std::thread::current;

    use super::*;

    /// The builder of a thread that cannot start: no system has so much memory for its stack.
    fn refused() -> Builder {
        Builder::new().stack_size(1 << 60)
    }

    /// Regression: a thread that the system refused caused a panic of an opening or a liveness
    /// scan, and nothing more was written to the pool.
    #[test]
    fn jobs_are_executed_by_the_threads_that_could_be_started() {
        assert!(refused().spawn(|| ()).is_err());
        let crews: [(usize, Spawn); 3] = [
            (0, |_| refused()),
            (2, |number| if number < 2 { Builder::new() } else { refused() }),
            (THREADS, |_| Builder::new()),
        ];
        for (count, builder) in crews {
            let parts: Vec<OnceLock<_>> = (0..100).map(|_| OnceLock::new()).collect();
            std::thread::scope(|scope| {
                let workers = Workers { builder, ..Workers::new(scope) };
                let done = workers.each(parts.iter(), |part| {
                    _ = part.set(current().id());
                    Ok(())
                });
                assert!(done.is_ok());
                let failed = workers.each([7].into_iter(), |_| Err(VolumeError::NoSpace));
                assert!(matches!(failed, Err(VolumeError::NoSpace)));
            });
            let by: HashSet<_> = parts.iter().map(|part| *part.get().unwrap()).collect();
            assert!(by.len() <= count.max(1), "{} of {count}", by.len());
            assert_eq!(by.contains(&current().id()), count == 0);
        }
    }
}
