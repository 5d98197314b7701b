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
//! 3. A panic in a turn ends that connection only.
//!
//! A call of a device may take long, and then the other connections of the thread wait for it: the
//! device executes commands within `submit` (a file without io_uring), asks the kernel for zones or
//! changes them there (a zoned block device, also with io_uring), or reads its map (a volume); and
//! each opens a channel, and closes it, within the call. docs/nvme.md has the list. A target that
//! has at least as many threads as connections gives each a thread of its own.
//!
//! Control plane: the locks are taken when a connection begins or ends.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_os::epoll::{Epoll, Events, Watch};
use blockyard_os::socket::{self, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};

use crate::connection::{AfterTurn, HostConnection, Wait};
use crate::dh_worker::DhWorker;
use crate::host_link::HostLink;
use crate::namespace_queue::DeviceWatch;
use crate::server::TargetShared;

/// The most threads of a target.
pub const THREADS_MAX: usize = 4096;

/// The token of the wake; connections have those below.
const WAKE_TOKEN: u64 = u64::MAX;

/// The threads that serve the connections of all servers of a target. The last owner stops them.
pub struct ConnectionThreads {
    threads_max: usize,
    pub(crate) dh: Arc<DhWorker>,
    threads: Mutex<Vec<ConnectionThread>>,
}

/// A thread as others see it.
struct ConnectionThread {
    shared: Arc<ThreadShared>,
    joined: JoinHandle<()>,
}

struct ThreadShared {
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
    owner: Arc<TargetShared>,
    /// What the set waits for at the socket.
    watch: Option<Watch>,
    /// The time of the next turn at the latest.
    until: Option<Instant>,
    /// Whether the connection is on the list of those that get a turn.
    is_ready: bool,
    /// Whether the connection is counted as an admin queue.
    is_admin: bool,
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
        Arc::new(ConnectionThreads { threads_max, dh: Arc::default(), threads: Mutex::default() })
    }

    /// The number of threads by default.
    pub fn default_threads() -> NonZeroUsize {
        thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<ConnectionThread>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place on the thread with the fewest connections, those of admin queues last; a new thread,
    /// if each has some and there may be one more.
    ///
    /// # Errors
    /// If the system refuses the first thread.
    pub(crate) fn place(&self) -> io::Result<ThreadPlace> {
        let mut threads = self.threads();
        let load = |thread: &ConnectionThread| thread.shared.state().load();
        let is_used = |thread: &ConnectionThread| load(thread).1 > 0;
        if threads.iter().all(is_used) && threads.len() < self.threads_max {
            match ConnectionThread::start(threads.len()) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => return Err(error),
                Err(error) => tracing::warn!(%error, "cannot start one more thread for NVMe hosts"),
            }
        }
        let chosen = threads.iter().min_by_key(|thread| load(thread));
        let shared = Arc::clone(&chosen.expect("there is a thread").shared);
        let slot = Some(shared.state().take_slot());
        Ok(ThreadPlace { shared, slot })
    }
}

impl Drop for ConnectionThreads {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut *self.threads());
        for ConnectionThread { shared, .. } in &threads {
            // Release: pairs with the Acquire in `is_stopping`.
            shared.stopping.store(true, Ordering::Release);
            shared.wake.raise();
        }
        for ConnectionThread { joined, .. } in threads {
            // A panic of the thread was reported when it happened.
            let _ = joined.join();
        }
        self.dh.stop();
    }
}

impl fmt::Debug for ConnectionThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads_max = self.threads_max;
        f.debug_struct("ConnectionThreads").field("threads_max", &threads_max).finish()
    }
}

impl ConnectionThread {
    fn start(number: usize) -> io::Result<ConnectionThread> {
        let (set, wake) = (Arc::new(Epoll::new()?), Arc::new(Wake::new()?));
        set.add(&*wake, WAKE_TOKEN, Watch::Readable)?;
        let stopping = AtomicBool::new(false);
        let shared = Arc::new(ThreadShared { set, wake, stopping, state: Mutex::default() });
        let run = {
            let shared = Arc::clone(&shared);
            move || Reactor::new(&shared).run()
        };
        let builder = thread::Builder::new().name(format!("nvme-{number}"));
        Ok(ConnectionThread { shared, joined: builder.spawn(run)? })
    }
}

impl ThreadShared {
    fn state(&self) -> MutexGuard<'_, ThreadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release in `drop`.
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
    /// If the system refuses memory.
    pub(crate) fn admit(
        mut self,
        owner: &Arc<TargetShared>,
        link: &Arc<HostLink>,
        (stream, address): (TcpStream, SocketAddr),
    ) -> io::Result<()> {
        let slot = self.slot.expect("the place is free");
        let watch = DeviceWatch { set: Arc::clone(&self.shared.set), token: slot as u64 };
        let session = Arc::clone(&owner.session);
        let (link, now) = (Arc::clone(link), Instant::now());
        let connection = HostConnection::new(session, link, (stream, address), watch, now)?;
        let owner = Arc::clone(owner);
        let (is_ready, is_admin) = (false, false);
        let served = Served { connection, owner, watch: None, until: None, is_ready, is_admin };
        self.shared.state().arrivals.push((slot, served));
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

    /// The loop of the thread.
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
        for slot in 0..self.slots.len() {
            if let Some(served) = &self.slots[slot] {
                served.connection.link().cut();
                self.end(slot);
            }
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
                tracing::error!(id = link.id, peer = link.peer, "a connection is ended by a fault");
                link.cut();
                self.end(slot);
            }
        }
    }

    /// Ends a connection. One whose device still executes commands is closed by a thread of its
    /// own, because that waits for the device.
    fn end(&mut self, slot: usize) {
        let Some(mut served) = self.slots[slot].take() else { return };
        if served.is_admin {
            served.note_admin(&self.shared);
        }
        // A failure means that it is not in the set.
        let _ = served.set_watch(&self.shared.set, slot, None);
        let name = format!("nvme-close-{}", served.connection.link().id);
        if served.connection.has_in_flight() {
            served.connection.unwatch();
            let served = Arc::new(Mutex::new(Some(served)));
            let close = {
                let served = Arc::clone(&served);
                move || close_taken(&served)
            };
            if let Err(error) = thread::Builder::new().name(name).spawn(close) {
                tracing::warn!(%error, "other NVMe hosts wait for a device");
                close_taken(&served);
            }
        } else {
            served.close();
        }
        self.shared.state().free.push(slot);
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

    /// Ends what the connection is to its controller and subsystem, and then the connection.
    fn close(self) {
        let Served { mut connection, owner, .. } = self;
        let left = catch_unwind(AssertUnwindSafe(|| connection.leave()));
        let link = Arc::clone(connection.link());
        if left.is_err() {
            tracing::error!(id = link.id, peer = link.peer, "a connection has not ended cleanly");
        }
        match connection.outcome() {
            Ok(None) => tracing::debug!(id = link.id, peer = link.peer, "left"),
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
        drop(connection);
        owner.end_link(link.id);
    }
}
