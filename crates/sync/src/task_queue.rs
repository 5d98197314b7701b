//! Primitive: the task queue.
//!
//! Protects   tasks that wait for a worker, in order.
//! Why        several threads keep a store busy whose calls block; a thread with work hands it over
//!            and continues.
//! States     an entry is free, or it waits in the list with its task. The queue is open or closed.
//! Order      a leaf, taken alone.
//! Common     a lock, a link, and a system call only if a worker sleeps.
//! Cost       about 25 ns to hand a task over if no worker sleeps.
//! Before     the submitter does the work.
//!
//! The caller supplies the list entry with the task, so that handing over allocates nothing and the
//! queue cannot be full. The caller needs an entry for each task in flight: the log of volumes
//! allocates as many as there are workers, once.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::atomics::{Condvar, Mutex, MutexGuard};
use crate::sync_cell::SyncCell;

/// A list entry, which the caller supplies with its task.
pub struct Entry<T>(SyncCell<Inside<T>>);

struct Inside<T> {
    task: Option<T>,
    next: Option<Arc<Entry<T>>>,
}

// SAFETY: a thread accesses the inside only under the lock of the queue, or as the only owner.
unsafe impl<T: Send> Send for Entry<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Send> Sync for Entry<T> {}

impl<T> Default for Entry<T> {
    fn default() -> Entry<T> {
        Entry(SyncCell::new(Inside { task: None, next: None }))
    }
}

impl<T> fmt::Debug for Entry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entry")
    }
}

#[derive(Debug)]
struct TaskList<T> {
    first: Option<Arc<Entry<T>>>,
    last: Option<Arc<Entry<T>>>,
    /// Number of waiting workers.
    idle: usize,
    closed: bool,
}

/// A queue of tasks for worker threads.
#[derive(Debug)]
pub struct TaskQueue<T> {
    list: Mutex<TaskList<T>>,
    more: Condvar,
}

impl<T> Default for TaskQueue<T> {
    fn default() -> TaskQueue<T> {
        let list = TaskList { first: None, last: None, idle: 0, closed: false };
        TaskQueue { list: Mutex::new(list), more: Condvar::new() }
    }
}

impl<T> TaskQueue<T> {
    fn list(&self) -> MutexGuard<'_, TaskList<T>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a task, in a free entry.
    ///
    /// # Panics
    /// If the entry already waits in a queue.
    pub fn dispatch(&self, entry: &Arc<Entry<T>>, task: T) {
        let mut list = self.list();
        // SAFETY: under the lock, as every access to an entry.
        unsafe {
            entry.0.with_mut(|inside| {
                assert!(inside.task.is_none(), "an entry waits once");
                inside.task = Some(task);
            });
        }
        match list.last.replace(Arc::clone(entry)) {
            // SAFETY: under the lock.
            Some(last) => unsafe { last.0.with_mut(|inside| inside.next = Some(entry.clone())) },
            None => list.first = Some(Arc::clone(entry)),
        }
        let sleeps = list.idle > 0;
        drop(list);
        if sleeps {
            self.more.notify_one();
        }
    }

    /// Takes the oldest task; waits for one. `None` when the queue is closed and empty.
    pub fn take(&self) -> Option<T> {
        let mut list = self.list();
        loop {
            if let Some(entry) = list.first.take() {
                // SAFETY: under the lock.
                let (task, next) =
                    unsafe { entry.0.with_mut(|inside| (inside.task.take(), inside.next.take())) };
                if next.is_none() {
                    list.last = None;
                }
                list.first = next;
                return task;
            }
            if list.closed {
                return None;
            }
            list.idle += 1;
            list = self.more.wait(list).unwrap_or_else(PoisonError::into_inner);
            list.idle -= 1;
        }
    }

    /// Closes the queue: workers end when no tasks are left.
    pub fn close(&self) {
        self.list().closed = true;
        self.more.notify_all();
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn tasks_run_in_order_and_entries_are_reused() {
        let queue = TaskQueue::default();
        let entries = [(); 3].map(|()| Arc::new(Entry::default()));
        for round in 0..5 {
            for (index, entry) in entries.iter().enumerate() {
                queue.dispatch(entry, (round, index));
            }
            for index in 0..3 {
                assert_eq!(queue.take(), Some((round, index)));
            }
        }
        queue.dispatch(&entries[0], (9, 9));
        queue.close();
        assert_eq!((queue.take(), queue.take()), (Some((9, 9)), None));
    }

    #[test]
    #[should_panic(expected = "waits once")]
    fn reused_pending_entry_panics() {
        let (queue, entry) = (TaskQueue::default(), Arc::new(Entry::default()));
        queue.dispatch(&entry, 1);
        queue.dispatch(&entry, 2);
    }

    #[test]
    fn four_workers_run_each_task_once() {
        let queue = TaskQueue::default();
        let sum = std::thread::scope(|scope| {
            let work = || std::iter::from_fn(|| queue.take()).sum::<u64>();
            let workers = [(); 4].map(|()| scope.spawn(work));
            for task in 1..=1000 {
                queue.dispatch(&Arc::new(Entry::default()), task);
            }
            queue.close();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum::<u64>()
        });
        assert_eq!(sum, 500_500);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;

    /// Two threads add tasks, two workers take them, and the queue closes. Loom's waits have no
    /// timeout, so that a lost wakeup is a deadlock.
    #[test]
    fn each_task_runs_once_and_workers_stop() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let queue = loom::sync::Arc::new(TaskQueue::default());
            let worker = || {
                let queue = loom::sync::Arc::clone(&queue);
                loom::thread::spawn(move || {
                    let mut sum = 0;
                    while let Some(task) = queue.take() {
                        sum += task;
                    }
                    sum
                })
            };
            let workers = [worker(), worker()];
            let entries = [Arc::new(Entry::default()), Arc::new(Entry::default())];
            queue.dispatch(&entries[0], 1);
            queue.dispatch(&entries[1], 2);
            queue.close();
            let sum: u32 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
            assert_eq!(sum, 3);
        });
    }
}
