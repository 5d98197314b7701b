//! The threads that serve the connections of all servers of a target.
//!
//! ```text
//!  server ─ admits ▸ the thread with the fewest connections that are no admin queues:
//!
//!     ┌──▸ wait in epoll for sockets, devices, the wake, the earliest time
//!     │      (with turns left to give: only look)
//!     │    adopt new connections; mark those that are ready, woken or due
//!     └─── give each marked connection one turn; mark it again if it has more to do
//! ```
//!
//! 1. A connection stays on its thread, and its channels are opened and used there.
//! 2. A turn begins no round after 1 ms, and does not wait for its host, for completions of a
//!    device, or for Diffie-Hellman values, which are computed apart from it (`dh_worker.rs`). A
//!    connection whose device has not completed its commands in time is closed by a thread of its
//!    own.
//! 3. A panic in a turn, or in the end of a connection, ends that connection only. If a thread ends
//!    nevertheless, its connections end, and another one takes its place.
//! 4. All threads are in one list, those that close connections too. Their end is awaited until a
//!    deadline: a device that does not return may hold one for ever.
//!
//! A call of a device may take long, and then the other connections of the thread wait for it: the
//! device executes commands within `submit` (a file without io_uring), asks the kernel for zones or
//! changes them there (a zoned block device, also with io_uring), or reads its map (a volume); and
//! each opens a channel, and closes it, within the call. docs/nvme-internals.md has the list. A
//! target that has at least as many threads as connections gives each a thread of its own.
//!
//! Control plane: the locks are taken when a connection begins or ends.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blockyard_os::LogLimit;
use blockyard_os::epoll::{Epoll, Events, Watch};
use blockyard_os::socket::{self, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};

use crate::connection::{AfterTurn, HostConnection, Wait};
use crate::dh_worker::DhWorker;
use crate::fabrics::DISCOVERY_NQN;
use crate::host_link::{CUT_GRACE, HostLink};
use crate::namespace_queue::DeviceWatch;
use crate::server::TargetShared;
use crate::thread_list::ThreadList;

/// The most threads of a target.
pub const THREADS_MAX: usize = 4096;

/// The token of the wake; connections have those below.
const WAKE_TOKEN: u64 = u64::MAX;

/// The threads that serve the connections of all servers of a target. The last owner stops them.
pub struct ConnectionThreads {
    threads_max: usize,
    pub(crate) dh: Arc<DhWorker>,
    threads: Mutex<Vec<Arc<ThreadShared>>>,
    /// Also those that close connections, and those of `dh`.
    list: Arc<ThreadList>,
    /// The bound of lines about threads that cannot be started: each connection may cause one.
    log: LogLimit,
}

/// A thread as others see it.
struct ThreadShared {
    list: Arc<ThreadList>,
    set: Arc<Epoll>,
    wake: Arc<Wake>,
    stopping: AtomicBool,
    state: Mutex<ThreadState>,
}

#[derive(Default)]
struct ThreadState {
    /// Connections that the thread has not adopted yet, with their slots.
    arrivals: Vec<(usize, Served)>,
    /// The slots of connections that have ended.
    free: Vec<usize>,
    /// The number of slots.
    slots: usize,
    /// The connections that are admin queues, which have little to do.
    admins: usize,
    /// Whether the thread has ended, and takes no more connections.
    has_ended: bool,
}

impl ThreadState {
    /// The number of connections without admin queues, and of all: a host's I/O queues share its
    /// threads evenly, wherever its admin queue is.
    fn load(&self) -> (usize, usize) {
        let connections = self.slots - self.free.len();
        (connections - self.admins, connections)
    }

    fn take_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        })
    }
}

/// A connection of a thread.
struct Served {
    connection: HostConnection<TcpStream>,
    /// After the connection, so that its end is noted when it is dropped.
    _end: LinkEnd,
    /// What the set waits for at the socket.
    watch: Option<Watch>,
    /// The time of the next turn at the latest.
    until: Option<Instant>,
    /// Whether the connection is on the list of those that get a turn.
    is_ready: bool,
    /// Whether the connection is counted as an admin queue.
    is_admin: bool,
}

/// Notes at the server that a connection has ended, however it does.
struct LinkEnd {
    owner: Arc<TargetShared>,
    id: u64,
}

impl Drop for LinkEnd {
    fn drop(&mut self) {
        self.owner.end_link(self.id);
    }
}

/// A place for a connection on a thread; dropping it leaves the place to another one.
pub(crate) struct ThreadPlace {
    shared: Arc<ThreadShared>,
    /// `None` once a connection has it.
    slot: Option<usize>,
}

impl ConnectionThreads {
    /// At most this many threads, which are started as connections come.
    pub fn new(threads_max: NonZeroUsize) -> Arc<ConnectionThreads> {
        let threads_max = threads_max.get().min(THREADS_MAX);
        let list = Arc::<ThreadList>::default();
        let dh = DhWorker::new(&list);
        let (threads, log) = (Mutex::default(), LogLimit::default());
        Arc::new(ConnectionThreads { threads_max, dh, threads, list, log })
    }

    /// The number of threads by default.
    pub fn default_threads() -> NonZeroUsize {
        thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Arc<ThreadShared>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops all threads: their connections end. Waits for them at most until `deadline`; a thread
    /// that a device holds then is detached, with a warning. To be called when no server accepts
    /// connections any more.
    pub fn stop(&self, deadline: Instant) {
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // Release: pairs with the Acquire in `is_stopping`.
            thread.stopping.store(true, Ordering::Release);
            thread.wake.raise();
        }
        self.dh.stop();
        self.list.join_until(deadline);
    }

    /// A place on the thread with the fewest connections, those of admin queues last; a new thread,
    /// if each has some and there may be one more. A thread that has ended does not count.
    ///
    /// # Errors
    /// If the system refuses the first thread.
    pub(crate) fn place(&self) -> io::Result<ThreadPlace> {
        let mut threads = self.threads();
        threads.retain(|thread| !thread.state().has_ended);
        let load = |thread: &Arc<ThreadShared>| thread.state().load();
        let is_used = |thread: &Arc<ThreadShared>| load(thread).1 > 0;
        if threads.iter().all(is_used) && threads.len() < self.threads_max {
            match ThreadShared::start(&self.list, threads.len()) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => return Err(error),
                Err(error) => {
                    if let Some(count) = self.log.due(1, Instant::now()) {
                        let text = "cannot start one more thread for NVMe hosts";
                        tracing::warn!(%error, count, "{text}");
                    }
                }
            }
        }
        let chosen = threads.iter().min_by_key(|thread| load(thread));
        let shared = Arc::clone(chosen.expect("there is a thread"));
        let slot = Some(shared.state().take_slot());
        Ok(ThreadPlace { shared, slot })
    }
}

impl Drop for ConnectionThreads {
    fn drop(&mut self) {
        self.stop(Instant::now() + CUT_GRACE);
    }
}

impl fmt::Debug for ConnectionThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads_max = self.threads_max;
        f.debug_struct("ConnectionThreads").field("threads_max", &threads_max).finish()
    }
}

impl ThreadShared {
    fn start(list: &Arc<ThreadList>, number: usize) -> io::Result<Arc<ThreadShared>> {
        let (set, wake) = (Arc::new(Epoll::new()?), Arc::new(Wake::new()?));
        set.add(&*wake, WAKE_TOKEN, Watch::Readable)?;
        let (list, stopping) = (Arc::clone(list), AtomicBool::new(false));
        let shared = Arc::new(ThreadShared { list, set, wake, stopping, state: Mutex::default() });
        let run = {
            let shared = Arc::clone(&shared);
            move || Reactor::new(&shared).run()
        };
        shared.list.spawn(format!("nvme-{number}"), run)?;
        Ok(shared)
    }

    fn state(&self) -> MutexGuard<'_, ThreadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release in `stop`.
        self.stopping.load(Ordering::Acquire)
    }
}

impl ThreadPlace {
    /// The flag that wakes the thread.
    pub(crate) fn wake(&self) -> Arc<Wake> {
        Arc::clone(&self.shared.wake)
    }

    /// Gives the place to a connection.
    ///
    /// # Errors
    /// If the system refuses memory, or the thread has ended.
    pub(crate) fn admit(
        mut self,
        owner: &Arc<TargetShared>,
        link: &Arc<HostLink>,
        (stream, address): (TcpStream, SocketAddr),
    ) -> io::Result<()> {
        let slot = self.slot.expect("the place is free");
        let watch = DeviceWatch { set: Arc::clone(&self.shared.set), token: slot as u64 };
        let session = Arc::clone(&owner.session);
        let (id, link, now) = (link.id, Arc::clone(link), Instant::now());
        let connection = HostConnection::new(session, link, (stream, address), watch, now)?;
        let mut state = self.shared.state();
        if state.has_ended {
            drop(state);
            return Err(io::Error::other("its thread has ended"));
        }
        let (watch, until, is_ready, is_admin) = (None, None, false, false);
        let _end = LinkEnd { owner: Arc::clone(owner), id };
        let served = Served { connection, _end, watch, until, is_ready, is_admin };
        state.arrivals.push((slot, served));
        drop(state);
        self.slot = None;
        self.shared.wake.raise();
        Ok(())
    }
}

impl Drop for ThreadPlace {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.shared.state().free.push(slot);
        }
    }
}

/// The state of a thread.
struct Reactor {
    shared: Arc<ThreadShared>,
    slots: Vec<Option<Served>>,
    /// The connections that get a turn, each once.
    ready: Vec<usize>,
    /// The list of the present turns; memory that is kept.
    turns: Vec<usize>,
    events: Events,
    /// No connection is due before this time.
    earliest: Option<Instant>,
}

impl Reactor {
    fn new(shared: &Arc<ThreadShared>) -> Reactor {
        Reactor {
            shared: Arc::clone(shared),
            slots: Vec::new(),
            ready: Vec::new(),
            turns: Vec::new(),
            events: Events::default(),
            earliest: None,
        }
    }

    /// The loop of the thread. Dropping the state ends the connections, also after a panic.
    fn run(mut self) {
        blockyard_os::sharpen_timers();
        while !self.shared.is_stopping() {
            if let Err(error) = self.wait() {
                tracing::error!(%error, "cannot wait for NVMe hosts");
                break;
            }
            self.mark_due();
            std::mem::swap(&mut self.ready, &mut self.turns);
            for at in 0..self.turns.len() {
                self.give_turn(self.turns[at]);
            }
            self.turns.clear();
        }
    }

    /// Waits for events, and marks the connections that have some.
    fn wait(&mut self) -> io::Result<()> {
        let timeout = match self.ready.is_empty() {
            true => self.earliest.map(socket::left),
            false => Some(Duration::ZERO),
        };
        self.shared.set.wait(&mut self.events, timeout)?;
        let mut is_woken = false;
        let Reactor { slots, ready, events, .. } = self;
        for token in events.tokens() {
            match token {
                WAKE_TOKEN => is_woken = true,
                slot => mark(slots, ready, slot as usize),
            }
        }
        if is_woken {
            self.shared.wake.lower();
            self.adopt();
            for slot in 0..self.slots.len() {
                let link = self.slots[slot].as_ref().map(|served| served.connection.link());
                if link.is_some_and(|link| link.wake.take()) {
                    mark(&mut self.slots, &mut self.ready, slot);
                }
            }
        }
        Ok(())
    }

    /// Takes the connections that were admitted.
    fn adopt(&mut self) {
        let mut state = self.shared.state();
        let count = state.slots;
        for (slot, served) in state.arrivals.drain(..) {
            if self.slots.len() < count {
                self.slots.resize_with(count, || None);
                self.ready.reserve(count);
                self.turns.reserve(count);
            }
            self.slots[slot] = Some(served);
            mark(&mut self.slots, &mut self.ready, slot);
        }
    }

    /// Marks the connections whose time has come.
    fn mark_due(&mut self) {
        let Some(earliest) = self.earliest else { return };
        let now = Instant::now();
        if now < earliest {
            return;
        }
        self.earliest = None;
        for slot in 0..self.slots.len() {
            let Some(served) = &mut self.slots[slot] else { continue };
            match served.until {
                Some(until) if until <= now => mark(&mut self.slots, &mut self.ready, slot),
                Some(until) => note_earliest(&mut self.earliest, until),
                None => {}
            }
        }
    }

    fn give_turn(&mut self, slot: usize) {
        let Some(served) = &mut self.slots[slot] else { return };
        served.is_ready = false;
        served.until = None;
        let turn = catch_unwind(AssertUnwindSafe(|| served.connection.turn(Instant::now())));
        match turn {
            Ok(AfterTurn::Again) => mark(&mut self.slots, &mut self.ready, slot),
            Ok(AfterTurn::Waits(Wait { socket, until })) => {
                served.until = until;
                if served.is_admin != served.connection.is_admin() {
                    served.note_admin(&self.shared);
                }
                if let Some(until) = until {
                    note_earliest(&mut self.earliest, until);
                }
                if served.watch != socket
                    && served.set_watch(&self.shared.set, slot, socket).is_err()
                {
                    served.connection.link().cut();
                    mark(&mut self.slots, &mut self.ready, slot);
                }
            }
            Ok(AfterTurn::Ended) => self.end(slot),
            Err(_) => {
                // The panic was reported when it happened.
                let link = served.connection.link();
                tracing::error!(
                    id = link.id,
                    peer = link.peer,
                    "disconnected by a panic, reported above"
                );
                link.cut();
                self.end(slot);
            }
        }
    }

    /// Ends a connection.
    fn end(&mut self, slot: usize) {
        let Some(served) = self.slots[slot].take() else { return };
        let link = Arc::clone(served.connection.link());
        link.wake.end();
        let shared = &self.shared;
        if catch_unwind(AssertUnwindSafe(|| served.end(shared, slot))).is_err() {
            tracing::error!(id = link.id, peer = link.peer, "a connection has not ended cleanly");
        }
        self.shared.state().free.push(slot);
    }
}

impl Drop for Reactor {
    /// Ends the connections, those that have just been admitted too.
    fn drop(&mut self) {
        self.shared.state().has_ended = true;
        self.adopt();
        for slot in 0..self.slots.len() {
            if let Some(served) = &self.slots[slot] {
                served.connection.link().cut();
                self.end(slot);
            }
        }
    }
}

fn close_taken(served: &Mutex<Option<Served>>) {
    let taken = served.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(served) = taken {
        served.close();
    }
}

/// Puts a connection on the list of those that get a turn.
fn mark(slots: &mut [Option<Served>], ready: &mut Vec<usize>, slot: usize) {
    if let Some(Some(served)) = slots.get_mut(slot)
        && !served.is_ready
    {
        served.is_ready = true;
        ready.push(slot);
    }
}

fn note_earliest(earliest: &mut Option<Instant>, until: Instant) {
    *earliest = Some(earliest.map_or(until, |earliest| earliest.min(until)));
}

impl Served {
    /// Counts the connection as an admin queue, or no longer.
    #[cold]
    fn note_admin(&mut self, shared: &ThreadShared) {
        self.is_admin = !self.is_admin;
        let mut state = shared.state();
        match self.is_admin {
            true => state.admins += 1,
            false => state.admins -= 1,
        }
    }

    /// Changes what the set waits for at the socket.
    fn set_watch(&mut self, set: &Epoll, slot: usize, watch: Option<Watch>) -> io::Result<()> {
        let (stream, token) = (self.connection.transport(), slot as u64);
        match (self.watch, watch) {
            (None, Some(watch)) => set.add(stream, token, watch)?,
            (Some(_), Some(watch)) => set.change(stream, token, watch)?,
            (Some(_), None) => set.remove(stream)?,
            (None, None) => {}
        }
        self.watch = watch;
        Ok(())
    }

    /// Ends the connection. One whose device still executes commands, or does not say whether it
    /// does, is closed by a thread of its own, because that waits for the device.
    fn end(mut self, shared: &ThreadShared, slot: usize) {
        if self.is_admin {
            self.note_admin(shared);
        }
        // A failure means that it is not in the set.
        let _ = self.set_watch(&shared.set, slot, None);
        let connection = &mut self.connection;
        let waits = catch_unwind(AssertUnwindSafe(|| {
            let has_in_flight = connection.has_in_flight();
            if has_in_flight {
                connection.unwatch();
            }
            has_in_flight
        }));
        if !waits.unwrap_or(true) {
            return self.close();
        }
        let (id, owner) = (self.connection.link().id, Arc::clone(&self._end.owner));
        let name = format!("nvme-close-{id}");
        let served = Arc::new(Mutex::new(Some(self)));
        let close = {
            let served = Arc::clone(&served);
            move || close_taken(&served)
        };
        if let Err(error) = shared.list.spawn(name, close) {
            if owner.logs().hosts.permits() {
                tracing::warn!(
                    id,
                    %error,
                    "cannot start a thread to close a connection; its thread waits for the \
                     device, and other hosts with it"
                );
            }
            close_taken(&served);
        }
    }

    /// Ends what the connection is to its controller and subsystem, and then the connection.
    fn close(mut self) {
        let left = catch_unwind(AssertUnwindSafe(|| self.connection.leave()));
        let link = self.connection.link();
        if left.is_err() {
            tracing::error!(id = link.id, peer = link.peer, "a connection has not ended cleanly");
        }
        let logs = self._end.owner.logs();
        // Discovery needs no secret.
        let is_host = link.role.get().is_some_and(|role| role.subsystem != DISCOVERY_NQN);
        let log = if is_host { &logs.hosts } else { &logs.strangers };
        match self.connection.outcome() {
            Ok(None) => tracing::debug!(id = link.id, peer = link.peer, "left"),
            Ok(Some(_)) | Err(_) if !log.permits() => {}
            Ok(Some(fault)) => {
                tracing::warn!(
                    id = link.id,
                    peer = link.peer,
                    "disconnected: it sent {}",
                    fault.text
                );
            }
            Err(error) => {
                tracing::info!(id = link.id, peer = link.peer, %error, "disconnected");
            }
        }
    }
}
