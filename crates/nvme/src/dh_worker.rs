//! The threads that compute Diffie-Hellman values for all connections: a power in a large group
//! takes hundreds of milliseconds, for which the other hosts of a connection's thread must not
//! wait.
//!
//! ```text
//! connection ─ submit ▸ the peer's queue ▸ thread computes ─ puts the result, raises wake ▸ turn
//! ```
//!
//! 1. Each peer, an IP address, has a queue, and the threads serve the peers round robin: a peer
//!    with many connections delays another one by one computation, not by all of its own.
//! 2. Secrets are computed before new exchanges: a host that is half authenticated ends first. A
//!    secret follows an exchange, so they cannot crowd the exchanges out.
//! 3. A connection has one piece of work at a time. Work of a connection that has ended is dropped,
//!    at the latest before other work is refused.
//! 4. Work that panics has no result, as if the host's value were not acceptable; the thread goes
//!    on.
#![allow(clippy::disallowed_types)] // Control plane: locks are taken when a host authenticates.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Instant;

use blockyard_os::LogLimit;
use zeroize::Zeroizing;

use crate::auth_message::DhGroup;
use crate::dh::DhExchange;
use crate::host_link::HostLink;
use crate::thread_list::ThreadList;

/// The most pieces of work that wait.
const QUEUE_MAX: usize = 4096;
/// The most threads.
const THREADS_MAX: usize = 4;

/// What is to be computed.
pub(crate) enum DhWork {
    /// A new exchange in a group.
    Exchange(DhGroup),
    /// The secret of an exchange with the host's public value.
    Secret(Box<DhExchange>, Vec<u8>),
    /// A fault of the computation.
    #[cfg(test)]
    Panics,
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
            #[cfg(test)]
            DhWork::Panics => panic!("a computation panics"),
        }
    }

    /// The result of work that has none.
    fn failed(&self) -> DhResult {
        match self {
            DhWork::Secret(..) => DhResult::Secret(None),
            _ => DhResult::Exchange(None),
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

impl DhTask {
    /// Whether the connection waits for the result.
    fn is_live(&self) -> bool {
        self.reply.strong_count() > 0
    }
}

/// The address of a connection's peer.
fn address_of(link: &HostLink) -> Option<IpAddr> {
    let address: SocketAddr = link.peer.strip_prefix("tcp:")?.parse().ok()?;
    Some(address.ip().to_canonical())
}

/// Tasks by peers. The first peer has the next turn; each has a task at least.
#[derive(Default)]
struct PeerQueues(VecDeque<(Option<IpAddr>, VecDeque<DhTask>)>);

impl PeerQueues {
    fn len(&self) -> usize {
        self.0.iter().map(|(_, tasks)| tasks.len()).sum()
    }

    fn push(&mut self, task: DhTask) {
        let address = address_of(&task.link);
        match self.0.iter_mut().find(|(other, _)| *other == address) {
            Some((_, tasks)) => tasks.push_back(task),
            None => self.0.push_back((address, VecDeque::from([task]))),
        }
    }

    fn pop(&mut self) -> Option<DhTask> {
        let (address, mut tasks) = self.0.pop_front()?;
        let task = tasks.pop_front();
        if !tasks.is_empty() {
            self.0.push_back((address, tasks));
        }
        task
    }

    /// Drops the tasks of connections that have ended.
    fn retain_live(&mut self) {
        self.0.iter_mut().for_each(|(_, tasks)| tasks.retain(DhTask::is_live));
        self.0.retain(|(_, tasks)| !tasks.is_empty());
    }
}

#[derive(Default)]
struct DhQueue {
    secrets: PeerQueues,
    exchanges: PeerQueues,
    is_stopping: bool,
    /// The threads, which are started as tasks come, and those of them that wait for a task.
    threads: usize,
    idle: usize,
}

impl DhQueue {
    fn len(&self) -> usize {
        self.secrets.len() + self.exchanges.len()
    }

    /// Whether there is room for one more task.
    fn make_room(&mut self) -> bool {
        if self.len() >= QUEUE_MAX {
            self.secrets.retain_live();
            self.exchanges.retain_live();
        }
        self.len() < QUEUE_MAX
    }

    fn push(&mut self, task: DhTask) {
        match task.work {
            DhWork::Secret(..) => self.secrets.push(task),
            _ => self.exchanges.push(task),
        }
    }

    fn pop(&mut self) -> Option<DhTask> {
        self.secrets.pop().or_else(|| self.exchanges.pop())
    }
}

/// The most threads on a machine with this many processors: at least one processor stays for the
/// connections, if there are two.
fn threads_max(processors: usize) -> usize {
    processors.saturating_sub(1).clamp(1, THREADS_MAX)
}

/// The queues and their threads.
#[derive(Default)]
pub(crate) struct DhWorker {
    queue: Mutex<DhQueue>,
    /// Notified when there is a task, or the threads are to stop.
    changed: Condvar,
    list: Arc<ThreadList>,
    /// The bound of lines about threads that cannot be started: each host may cause one.
    log: LogLimit,
}

impl DhWorker {
    /// A worker whose threads are in the list.
    pub(crate) fn new(list: &Arc<ThreadList>) -> Arc<DhWorker> {
        Arc::new(DhWorker { list: Arc::clone(list), ..DhWorker::default() })
    }

    fn queue(&self) -> MutexGuard<'_, DhQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has something computed for a connection, which gets a turn when it is done.
    ///
    /// # Errors
    /// If the queue is full, or the system refuses the first thread.
    pub(crate) fn submit(
        self: &Arc<DhWorker>,
        work: DhWork,
        link: &Arc<HostLink>,
    ) -> io::Result<Arc<DhReply>> {
        let mut queue = self.queue();
        if queue.is_stopping || !queue.make_room() {
            return Err(io::Error::other("too many hosts authenticate at once"));
        }
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let mut refused = None;
        if queue.idle <= queue.len() && queue.threads < threads_max(processors) {
            let worker = Arc::clone(self);
            let run = move || worker.run();
            match self.list.spawn(format!("nvme-dh-{}", queue.threads), run) {
                Ok(()) => queue.threads += 1,
                Err(error) if queue.threads == 0 => return Err(error),
                Err(error) => refused = Some(error),
            }
        }
        let reply = Arc::<DhReply>::default();
        queue.push(DhTask { work, reply: Arc::downgrade(&reply), link: Arc::clone(link) });
        drop(queue);
        self.changed.notify_one();
        if let Some(error) = refused
            && let Some(count) = self.log.due(1, Instant::now())
        {
            let text = "cannot start one more thread for hosts that authenticate";
            tracing::warn!(%error, count, "{text}");
        }
        Ok(reply)
    }

    /// The loop of a thread.
    fn run(&self) {
        loop {
            let mut queue = self.queue();
            queue.idle += 1;
            let is_idle = |queue: &mut DhQueue| queue.len() == 0 && !queue.is_stopping;
            let waited = self.changed.wait_while(queue, is_idle);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
            if queue.is_stopping {
                return;
            }
            let task = queue.pop();
            drop(queue);
            let Some(DhTask { work, reply, link }) = task.filter(DhTask::is_live) else { continue };
            let failed = work.failed();
            // A panic was reported when it happened.
            let result = catch_unwind(AssertUnwindSafe(|| work.run())).unwrap_or(failed);
            if let Some(reply) = reply.upgrade() {
                reply.put(result);
                link.wake.raise();
            }
        }
    }

    /// Stops the threads after their present computations; their list joins them.
    pub(crate) fn stop(&self) {
        let mut queue = self.queue();
        queue.is_stopping = true;
        let tasks = (std::mem::take(&mut queue.secrets), std::mem::take(&mut queue.exchanges));
        drop(queue);
        self.changed.notify_all();
        drop(tasks);
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

    fn link(peer: &str) -> Arc<HostLink> {
        Arc::new(HostLink::new(1, peer.to_owned(), Arc::new(Wake::new().unwrap())))
    }

    fn wait(reply: &DhReply) -> DhResult {
        loop {
            match reply.take() {
                Some(result) => return result,
                None => std::thread::yield_now(),
            }
        }
    }

    #[test]
    fn results_come_back_and_work_of_ended_connections_is_dropped() {
        let worker = Arc::<DhWorker>::default();
        let link = link("");
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
        worker.list.join_until(std::time::Instant::now() + std::time::Duration::from_secs(60));
    }

    #[test]
    fn a_peer_with_many_connections_delays_another_one_by_few_computations() {
        let worker = Arc::<DhWorker>::default();
        let (many, one) = (link("tcp:192.0.2.1:1000"), link("tcp:192.0.2.2:1000"));
        let large = || worker.submit(DhWork::Exchange(DhGroup::Ffdhe8192), &many).unwrap();
        let replies: Vec<_> = (0..64).map(|_| large()).collect();
        let reply = worker.submit(DhWork::Exchange(DhGroup::Ffdhe2048), &one).unwrap();
        assert!(matches!(wait(&reply), DhResult::Exchange(Some(_))));
        let computed = replies.iter().filter(|reply| reply.take().is_some()).count();
        assert!(computed < replies.len(), "the other peer waits for all");
        worker.stop();
    }

    /// Hosts that had proved nothing kept all processors of a small machine busy.
    #[test]
    fn a_processor_stays_for_the_connections() {
        let most = [1, 2, 3, 5, 64].map(threads_max);
        assert_eq!(most, [1, 1, 2, 4, 4]);
    }

    #[test]
    fn peers_have_turns_and_secrets_go_first() {
        let mut queue = DhQueue::default();
        let mut replies = Vec::new();
        let mut push = |queue: &mut DhQueue, peer: &str, secret: bool| {
            let reply = Arc::<DhReply>::default();
            let work = match secret {
                true => {
                    let exchange = DhExchange::new(DhGroup::Ffdhe2048).unwrap();
                    DhWork::Secret(Box::new(exchange), Vec::new())
                }
                false => DhWork::Exchange(DhGroup::Ffdhe8192),
            };
            queue.push(DhTask { work, reply: Arc::downgrade(&reply), link: link(peer) });
            replies.push(reply);
        };
        for (peer, secret) in [
            ("tcp:192.0.2.1:1", false),
            ("tcp:192.0.2.1:2", false),
            ("tcp:192.0.2.1:3", false),
            ("tcp:[::ffff:192.0.2.1]:4", false),
            ("tcp:[2001:db8::1]:5", false),
            ("tcp:192.0.2.1:6", true),
        ] {
            push(&mut queue, peer, secret);
        }
        let mut order = Vec::new();
        while let Some(task) = queue.pop() {
            order.push(task.link.peer.rsplit_once(':').unwrap().1.to_owned());
        }
        assert_eq!(order, ["6", "1", "5", "2", "3", "4"]);
    }

    #[test]
    fn a_full_queue_drops_the_work_of_ended_connections_before_it_refuses_some() {
        let (mut queue, link) = (DhQueue::default(), link("tcp:192.0.2.1:1"));
        let reply = Arc::<DhReply>::default();
        let mut fill = |reply: Weak<DhReply>| {
            while queue.len() < QUEUE_MAX {
                let (work, reply) = (DhWork::Exchange(DhGroup::Null), reply.clone());
                queue.push(DhTask { work, reply, link: Arc::clone(&link) });
            }
            queue.make_room()
        };
        assert!(fill(Weak::new()), "all have ended");
        assert!(!fill(Arc::downgrade(&reply)), "none has ended");
    }

    #[test]
    fn work_that_panics_has_no_result_and_the_next_one_is_computed() {
        let (worker, link) = (Arc::<DhWorker>::default(), link("tcp:192.0.2.1:1"));
        for _ in 0..2 * THREADS_MAX {
            let reply = worker.submit(DhWork::Panics, &link).unwrap();
            assert!(matches!(wait(&reply), DhResult::Exchange(None)));
        }
        let reply = worker.submit(DhWork::Exchange(DhGroup::Ffdhe2048), &link).unwrap();
        assert!(matches!(wait(&reply), DhResult::Exchange(Some(_))));
        worker.stop();
    }
}
