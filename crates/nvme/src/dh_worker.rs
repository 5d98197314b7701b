//! The thread that computes Diffie-Hellman values for all connections: a power in a large group
//! takes hundreds of milliseconds, for which the other hosts of a connection's thread must not
//! wait.
//!
//! ```text
//! connection ─ submit ▸ queue ▸ worker computes ─ puts the result, raises the link's wake ▸ turn
//! ```
//!
//! A connection has one piece of work at a time, so the queue is bounded by the connections. Work
//! of a connection that has ended is dropped.
#![allow(clippy::disallowed_types)] // Control plane: locks are taken when a host authenticates.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use zeroize::Zeroizing;

use crate::auth_message::DhGroup;
use crate::dh::DhExchange;
use crate::host_link::HostLink;

/// The most pieces of work that wait.
const QUEUE_MAX: usize = 4096;

/// What is to be computed.
pub(crate) enum DhWork {
    /// A new exchange in a group.
    Exchange(DhGroup),
    /// The secret of an exchange with the host's public value.
    Secret(Box<DhExchange>, Vec<u8>),
}

/// What was computed.
pub(crate) enum DhResult {
    Exchange(Option<Box<DhExchange>>),
    /// `None` if the host's public value is not acceptable.
    Secret(Option<Zeroizing<Vec<u8>>>),
}

impl DhWork {
    pub(crate) fn run(self) -> DhResult {
        match self {
            DhWork::Exchange(group) => DhResult::Exchange(DhExchange::new(group).map(Box::new)),
            DhWork::Secret(exchange, public) => DhResult::Secret(exchange.shared(&public)),
        }
    }
}

/// The place of a result.
#[derive(Default)]
pub(crate) struct DhReply(Mutex<Option<DhResult>>);

impl DhReply {
    /// The result, once it is computed.
    pub(crate) fn take(&self) -> Option<DhResult> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, result: DhResult) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    }
}

struct DhTask {
    work: DhWork,
    /// Held by the connection.
    reply: Weak<DhReply>,
    link: Arc<HostLink>,
}

#[derive(Default)]
struct DhQueue {
    tasks: VecDeque<DhTask>,
    is_stopping: bool,
    /// Started with the first task.
    thread: Option<JoinHandle<()>>,
}

/// The queue and its thread.
#[derive(Default)]
pub(crate) struct DhWorker {
    queue: Mutex<DhQueue>,
    /// Notified when there is a task, or the thread is to stop.
    changed: Condvar,
}

impl DhWorker {
    fn queue(&self) -> MutexGuard<'_, DhQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has something computed for a connection, which gets a turn when it is done.
    ///
    /// # Errors
    /// If the queue is full, or the system refuses the thread.
    pub(crate) fn submit(
        self: &Arc<DhWorker>,
        work: DhWork,
        link: &Arc<HostLink>,
    ) -> io::Result<Arc<DhReply>> {
        let mut queue = self.queue();
        if queue.tasks.len() >= QUEUE_MAX || queue.is_stopping {
            return Err(io::Error::other("too many hosts authenticate at once"));
        }
        if queue.thread.is_none() {
            let worker = Arc::clone(self);
            let run = move || worker.run();
            queue.thread = Some(thread::Builder::new().name("nvme-dh".to_owned()).spawn(run)?);
        }
        let reply = Arc::<DhReply>::default();
        let task = DhTask { work, reply: Arc::downgrade(&reply), link: Arc::clone(link) };
        queue.tasks.push_back(task);
        self.changed.notify_one();
        Ok(reply)
    }

    /// The loop of the thread.
    fn run(&self) {
        loop {
            let is_idle = |queue: &mut DhQueue| queue.tasks.is_empty() && !queue.is_stopping;
            let waited = self.changed.wait_while(self.queue(), is_idle);
            let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
            if queue.is_stopping {
                return;
            }
            let Some(task) = queue.tasks.pop_front() else { continue };
            drop(queue);
            if task.reply.strong_count() == 0 {
                continue;
            }
            let result = task.work.run();
            if let Some(reply) = task.reply.upgrade() {
                reply.put(result);
                task.link.wake.raise();
            }
        }
    }

    /// Stops the thread after its present computation.
    pub(crate) fn stop(&self) {
        let mut queue = self.queue();
        queue.is_stopping = true;
        queue.tasks.clear();
        self.changed.notify_all();
        let thread = queue.thread.take();
        drop(queue);
        if let Some(thread) = thread {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for DhWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DhWorker").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use blockyard_os::socket::Wake;

    use super::*;

    #[test]
    fn results_come_back_and_work_of_ended_connections_is_dropped() {
        let worker = Arc::<DhWorker>::default();
        let link = Arc::new(HostLink::new(1, String::new(), Arc::new(Wake::new().unwrap())));
        let wait = |reply: &DhReply| loop {
            match reply.take() {
                Some(result) => return result,
                None => std::thread::yield_now(),
            }
        };
        for _ in 0..100 {
            drop(worker.submit(DhWork::Exchange(DhGroup::Ffdhe8192), &link).unwrap());
        }
        let reply = worker.submit(DhWork::Exchange(DhGroup::Ffdhe2048), &link).unwrap();
        let DhResult::Exchange(Some(ours)) = wait(&reply) else { panic!("an exchange") };
        assert!(link.wake.take());
        let theirs = DhExchange::new(DhGroup::Ffdhe2048).unwrap();
        let wanted = theirs.shared(ours.public());
        let work = DhWork::Secret(ours, theirs.public().to_vec());
        let reply = worker.submit(work, &link).unwrap();
        let DhResult::Secret(secret) = wait(&reply) else { panic!("a secret") };
        assert_eq!(secret, wanted);
        worker.stop();
        assert!(worker.submit(DhWork::Exchange(DhGroup::Null), &link).is_err());
    }
}
