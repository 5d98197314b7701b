//! The table of subsystems: devices by NQN, shared by all servers and changeable while they run.
//!
//! Control plane: the locks here are taken when a host connects, discovers or disconnects, when a
//! device is added or removed, and by an I/O command for a namespace that its queue does not have
//! open; by no other I/O command.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_core::rmw::SharedDisk;
use blockyard_sync::atomics::{AtomicU64, Ordering};

use crate::access::HostAccess;
use crate::all_devices::AllDevices;
use crate::controller::{ControllerTarget, Controllers};
use crate::fabrics::NQN_LEN_MAX;
use crate::host_link::{CUT_GRACE, CommandStats, CommandTotals, HostLink};
use crate::host_log::HostLogs;
use crate::identify::{DiskContents, Identity};
use crate::namespace::{NSID_MAX, NamespaceError, NamespaceShape};

/// The beginning of the NQN of each device; the device's name follows.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.blockyard:";

/// The longest name of a device, in bytes.
const NAME_LEN_MAX: usize = NQN_LEN_MAX - NQN_PREFIX.len();

/// The most subsystems of one table: each device has a number in the subsystem of all devices.
pub const SUBSYSTEMS_MAX: usize = NSID_MAX as usize;

/// A device that hosts can use: the only namespace of its subsystem.
///
/// ```text
///              suspend                       resume
/// PRESENT ───────────────▸ ABSENT ─────────────────────▸ PRESENT
///  │  ▴                     │ │
///  │  └─────────────────────┘ │
///  │ close   queues keep the  │ close
///  ▾         disk for too     ▾
/// CLOSED     long           CLOSED
/// ```
///
/// 1. A queue of a host uses the disk of the state present. It notices by `version` that the state
///    has changed, completes the commands that the disk executes, and returns the disk.
/// 2. `suspend` returns when no queue uses the disk, so that it can be closed. Hosts stay
///    connected; their next commands wait. A host that does not receive its data keeps the disk: it
///    is cut off.
pub(crate) struct Subsystem {
    name: String,
    pub(crate) identity: Identity,
    /// Distinguishes it from all others of the table, also from earlier and later ones.
    pub(crate) id: u64,
    /// The number of the device as a namespace of the subsystem of all devices.
    pub(crate) nsid: u32,
    state: Mutex<SubsystemState>,
    /// The number of changes of the phase.
    version: AtomicU64,
    /// Notified when the phase changes, a queue returns the disk, or a connection is removed.
    changed: Condvar,
}

struct SubsystemState {
    phase: DiskPhase,
    /// The present disk's, or the one's before.
    shape: Arc<NamespaceShape>,
    /// The queues that use the disk, also those of the subsystem of all devices.
    users: Vec<NamespaceUser>,
    /// The connections to the subsystem, each with the number of its queue.
    links: Vec<(u16, Arc<HostLink>)>,
    /// The connections that wait for a disk, each once.
    waiting: Vec<Arc<HostLink>>,
    /// The commands of queues that have returned a disk.
    past: CommandTotals,
}

/// The reason for which a subsystem has no disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoDisk {
    /// It is being replaced.
    Absent,
    /// The device is being removed, or the connection that asks was cut.
    Closed,
}

/// A queue that uses the disk.
struct NamespaceUser {
    link: Arc<HostLink>,
    /// The commands of the queue since it took the disk.
    stats: Arc<CommandStats>,
}

enum DiskPhase {
    Present(SharedDisk),
    Absent,
    Closed,
}

/// The disk of a subsystem, for a queue. Dropping it returns the disk: first the disk is dropped,
/// because its last holder closes it, and then its use is noted as over.
pub(crate) struct Namespace {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) shape: Arc<NamespaceShape>,
    /// The subsystem's version: another one tells the queue to return the disk.
    version: u64,
    /// The commands of the queue for this namespace.
    pub(crate) stats: Arc<CommandStats>,
    _use: NamespaceUse,
}

/// The use of a disk by a queue, which ends when it is dropped.
struct NamespaceUse {
    subsystem: Arc<Subsystem>,
    stats: Arc<CommandStats>,
}

impl Drop for NamespaceUse {
    fn drop(&mut self) {
        self.subsystem.end_use(&self.stats);
    }
}

/// A subsystem as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubsystemInfo {
    /// The device's name.
    pub name: String,
    /// The NQN.
    pub nqn: String,
    /// The number of the device as a namespace of the subsystem of all devices.
    pub nsid: u32,
    /// The hosts' controllers that use it now, also those of the subsystem of all devices; at least
    /// one while an I/O queue has the disk, which may outlive its controller.
    pub controllers: usize,
    /// The I/O queues of these controllers.
    pub queues: usize,
    /// The hosts of these controllers, in the order of their connection.
    pub hosts: Vec<HostInfo>,
    /// The I/O commands for the device since it was added, by its own subsystem and by that of all
    /// devices, also those of hosts that have left.
    pub totals: CommandTotals,
}

/// A host of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostInfo {
    /// The NQN of the host.
    pub nqn: String,
    /// The NQN of the subsystem: the device's own, or that of all devices.
    pub subsystem: String,
    /// The address of its admin queue.
    pub peer: String,
    /// The controller.
    pub controller: u16,
    /// The numbers of the I/O queues.
    pub queues: Vec<u16>,
}

/// The reason for which the table of subsystems refused a change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubsystemError {
    /// There is a subsystem of this name already.
    #[error("subsystem `{0}` exists already: remove it first or take another name")]
    Taken(String),
    /// The NQN of the device is that of the subsystem of all devices.
    #[error(
        "its NQN would be `{0}`, which is that of --nvme-subsystem: rename the device, or give \
         --nvme-subsystem another NQN"
    )]
    TakenByAll(String),
    /// There is no subsystem of this name.
    #[error("there is no subsystem `{0}`")]
    Unknown(String),
    /// The name is too long for an NQN.
    #[error("invalid subsystem name `{0}`: expected at most {NAME_LEN_MAX} bytes")]
    Name(String),
    /// NVMe cannot describe the device.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// The disk of a subsystem executes commands for too long.
    #[error("a host of subsystem `{0}` has commands that take too long: try again")]
    Busy(String),
    /// The new disk of a subsystem differs from the one before in more than a greater size.
    #[error(
        "subsystem `{0}` cannot have a smaller disk, other blocks or other zones while hosts use \
         it; disconnect them first"
    )]
    Unlike(String),
    /// There are [`SUBSYSTEMS_MAX`] subsystems already.
    #[error("there are {SUBSYSTEMS_MAX} subsystems already: remove one first")]
    Full,
}

impl SubsystemState {
    /// The connections of the queues that use the disk.
    fn users(&self) -> impl Iterator<Item = &Arc<HostLink>> {
        self.users.iter().map(|user| &user.link)
    }

    /// The commands of all queues, also of those that have returned a disk.
    fn totals(&self) -> CommandTotals {
        let mut totals = self.past;
        self.users.iter().for_each(|user| totals.add(&user.stats));
        totals
    }
}

impl Subsystem {
    fn state(&self) -> MutexGuard<'_, SubsystemState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The namespace in the terms of NVMe, as it is now.
    pub(crate) fn shape(&self) -> Arc<NamespaceShape> {
        Arc::clone(&self.state().shape)
    }

    /// The I/O commands for the device since it was added.
    pub(crate) fn totals(&self) -> CommandTotals {
        self.state().totals()
    }

    /// The number of changes so far.
    pub(crate) fn version(&self) -> u64 {
        // Acquire: pairs with the Release in `enter`.
        self.version.load(Ordering::Acquire)
    }

    /// Whether a queue has to return the disk.
    pub(crate) fn is_outdated(&self, namespace: &Namespace) -> bool {
        self.version() != namespace.version
    }

    /// Enters a phase, and wakes all connections and threads that have to know.
    fn enter(&self, state: &mut SubsystemState, phase: DiskPhase) {
        state.phase = phase;
        // Release: pairs with the Acquire in `version`. A thread that sees the new version takes
        // the lock to see the phase.
        self.version.fetch_add(1, Ordering::Release);
        let links = state.links.iter().map(|(_, link)| link).chain(&state.waiting);
        links.chain(state.users()).for_each(|link| link.wake.raise());
        state.waiting.clear();
        self.changed.notify_all();
    }

    /// The disk, for a queue of this connection, which has to return it.
    ///
    /// # Errors
    /// If there is none now, or the connection is cut.
    pub(crate) fn take_namespace(
        self: &Arc<Subsystem>,
        link: &Arc<HostLink>,
    ) -> Result<Namespace, NoDisk> {
        let mut state = self.state();
        match &state.phase {
            _ if link.is_cut() => Err(NoDisk::Closed),
            DiskPhase::Present(disk) => {
                let (disk, shape) = (Arc::clone(&disk.disk), Arc::clone(&state.shape));
                let (link, stats) = (Arc::clone(link), Arc::<CommandStats>::default());
                state.users.push(NamespaceUser { link, stats: Arc::clone(&stats) });
                let subsystem = Arc::clone(self);
                let _use = NamespaceUse { subsystem, stats: Arc::clone(&stats) };
                Ok(Namespace { disk, shape, version: self.version(), stats, _use })
            }
            DiskPhase::Closed => Err(NoDisk::Closed),
            DiskPhase::Absent => Err(NoDisk::Absent),
        }
    }

    /// Notes that a queue has returned the disk.
    fn end_use(&self, stats: &Arc<CommandStats>) {
        let mut state = self.state();
        state.past.add(stats);
        state.users.retain(|user| !Arc::ptr_eq(&user.stats, stats));
        drop(state);
        self.changed.notify_all();
    }

    /// Whether the device is removed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state().phase, DiskPhase::Closed)
    }

    /// Whether the disk is being replaced.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self.state().phase, DiskPhase::Absent)
    }

    /// Gives a connection a turn when the disk is no longer being replaced.
    pub(crate) fn wake_with_disk(&self, link: &Arc<HostLink>) {
        let mut state = self.state();
        if !matches!(state.phase, DiskPhase::Absent) {
            link.wake.raise();
            return;
        }
        // Without those of connections that have ended.
        state.waiting.retain(|other| !Arc::ptr_eq(other, link) && Arc::strong_count(other) > 1);
        state.waiting.push(Arc::clone(link));
    }

    /// Whether a queue has the disk.
    pub(crate) fn is_used(&self) -> bool {
        !self.state().users.is_empty()
    }

    /// Adds the connection of a queue; `false` if the subsystem is being removed.
    pub(crate) fn attach(&self, link: &Arc<HostLink>, queue: u16) -> bool {
        let mut state = self.state();
        if matches!(state.phase, DiskPhase::Closed) {
            return false;
        }
        state.links.push((queue, Arc::clone(link)));
        true
    }

    /// Whether a mounted file system has claimed the disk. To be asked after [`Subsystem::attach`].
    pub(crate) fn is_claimed(&self) -> bool {
        matches!(&self.state().phase, DiskPhase::Present(disk) if disk.claim.is_claimed())
    }

    /// Removes a connection.
    pub(crate) fn detach(&self, link: &Arc<HostLink>) {
        self.state().links.retain(|(_, other)| !Arc::ptr_eq(other, link));
        self.changed.notify_all();
    }

    /// Tells the queues to return the disk; `None` if there is none.
    pub(crate) fn begin_suspend(&self) -> Option<SharedDisk> {
        let mut state = self.state();
        let DiskPhase::Present(disk) = &state.phase else { return None };
        let disk = disk.clone();
        self.enter(&mut state, DiskPhase::Absent);
        Some(disk)
    }

    /// Takes the disk away, when its queues have completed their commands. Hosts that have not
    /// received their data within `drain` are cut off. `false` if the disk executes commands for
    /// longer; then it stays.
    fn suspend(&self, drain: Duration) -> bool {
        let Some(disk) = self.begin_suspend() else { return false };
        let mut state = self.state();
        let in_use = |state: &mut SubsystemState| !state.users.is_empty();
        let waited = self.changed.wait_timeout_while(state, drain, in_use);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let stalled: Vec<_> = state.users().filter(|link| link.is_stalled()).cloned().collect();
        if !stalled.is_empty() {
            drop(state);
            for link in stalled {
                link.cut();
                let (id, peer, device) = (link.id, &link.peer, &self.name);
                tracing::warn!(id, peer, device, "cut off: it does not receive its data");
            }
            state = self.state();
            let waited = self.changed.wait_timeout_while(state, CUT_GRACE, in_use);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let is_absent = matches!(state.phase, DiskPhase::Absent);
        if is_absent && !state.users.is_empty() {
            self.enter(&mut state, DiskPhase::Present(disk));
            return false;
        }
        is_absent
    }

    /// Gives a subsystem without a disk another one.
    pub(crate) fn resume(&self, disk: SharedDisk) -> Result<(), SubsystemError> {
        let shape = NamespaceShape::of(disk.disk.geometry(), disk.disk.limits())?;
        let mut state = self.state();
        let is_like = state.shape.block_shift == shape.block_shift
            && state.shape.zones == shape.zones
            && state.shape.blocks <= shape.blocks;
        if !is_like || !matches!(state.phase, DiskPhase::Absent) {
            return Err(SubsystemError::Unlike(self.name.clone()));
        }
        if *state.shape != shape {
            state.shape = Arc::new(shape);
        }
        self.enter(&mut state, DiskPhase::Present(disk));
        Ok(())
    }

    /// Admits no new connection, tells the queues that the disk is gone, and asks the connections
    /// to the subsystem to drain. The caller holds the lock of the table, and takes the subsystem
    /// out of it afterwards: a queue that uses the disk must not send it commands for the next
    /// device with the number.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.links.iter().for_each(|(_, link)| link.request_end());
        self.enter(&mut state, DiskPhase::Closed);
    }

    /// Waits for the connections of a closed subsystem, and at `drain` cuts off those that have not
    /// ended. The queues of the subsystem of all devices have [`CUT_GRACE`] more to return the
    /// disk; then those are cut off whose hosts do not receive their data. The others serve other
    /// devices, and return the disk when it has completed their commands. Returns when all have, or
    /// soon after the cut.
    fn disconnect(&self, drain: Duration) {
        let mut state = self.state();
        let here = |state: &mut SubsystemState| !state.links.is_empty() || !state.users.is_empty();
        let waited = self.changed.wait_timeout_while(state, drain, here);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.links.iter().for_each(|(_, link)| link.cut());
        // They stop answering their hosts at their next turn, and end when the device has completed
        // their commands.
        let waited = self.changed.wait_timeout_while(state, CUT_GRACE, here);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let is_stalled = |link: &&Arc<HostLink>| link.is_stalled();
        if state.users().any(|link| is_stalled(&link)) {
            state.users().filter(is_stalled).for_each(|link| link.cut());
            let waited = self.changed.wait_timeout_while(state, CUT_GRACE, here);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let links = state.links.iter().map(|(_, link)| link);
        let remaining: Vec<_> = links.chain(state.users()).cloned().collect();
        drop(state);
        for link in remaining {
            let (id, peer, device) = (link.id, &link.peer, &self.name);
            match link.is_cut() {
                true => tracing::warn!(id, peer, device, "a host that was cut has not left"),
                false => tracing::warn!(
                    id,
                    peer,
                    device,
                    "the device was removed, and has not completed the commands of a host: it \
                     stays open until it has"
                ),
            }
        }
    }

    /// The device as listings show it. `counts_unknown` as for [`SubsystemInfo::add_hosts`].
    fn info(&self, counts_unknown: bool) -> SubsystemInfo {
        let state = self.state();
        let mut info = SubsystemInfo {
            name: self.name.clone(),
            nqn: self.identity.nqn.clone(),
            nsid: self.nsid,
            controllers: 0,
            queues: 0,
            hosts: Vec::new(),
            totals: state.totals(),
        };
        info.add_hosts(&state.links, counts_unknown, |_| true);
        info
    }
}

impl SubsystemInfo {
    /// Adds the hosts of connections, each with the number of its queue, that may use the device.
    /// `counts_unknown` says whether a connection counts that has no role yet: without secrets it
    /// gets one in a moment, with secrets only by an authentication.
    pub(crate) fn add_hosts(
        &mut self,
        links: &[(u16, Arc<HostLink>)],
        counts_unknown: bool,
        may_use: impl Fn(&str) -> bool,
    ) {
        let may_use = &may_use;
        let roles = || {
            let roles = links.iter().filter_map(|(_, link)| Some((link, link.role.get()?)));
            roles.filter(move |(_, role)| may_use(&role.host))
        };
        let queues = || roles().filter(|(_, role)| role.queue > 0);
        let queues_of = |controller: u16| {
            let own = queues().filter(|(_, role)| role.controller == controller);
            let mut numbers: Vec<u16> = own.map(|(_, role)| role.queue).collect();
            numbers.sort_unstable();
            numbers
        };
        let hosts = roles().filter(|(_, role)| role.queue == 0).map(|(link, role)| HostInfo {
            nqn: role.host.clone(),
            subsystem: role.subsystem.clone(),
            peer: link.peer.clone(),
            controller: role.controller,
            queues: queues_of(role.controller),
        });
        let may_be_host = |link: &HostLink| match link.role.get() {
            Some(role) => may_use(&role.host),
            None => counts_unknown,
        };
        self.controllers +=
            links.iter().filter(|(queue, link)| *queue == 0 && may_be_host(link)).count();
        self.queues += queues().count();
        self.hosts.extend(hosts);
    }
}

impl fmt::Debug for Subsystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subsystem").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The table of subsystems.
#[derive(Debug, Default)]
pub struct Subsystems {
    /// Distinguishes the devices of this machine from those of the same names on others.
    host: String,
    /// The hosts that may use each device.
    pub(crate) access: HostAccess,
    /// The subsystem of all devices, if there is one.
    pub(crate) all: Option<Arc<AllDevices>>,
    /// The controllers of all servers.
    pub(crate) controllers: Controllers,
    /// The bounds of log lines that hosts cause.
    pub(crate) logs: HostLogs,
    table: Mutex<SubsystemTable>,
}

#[derive(Debug, Default)]
struct SubsystemTable {
    /// In the order in which they were added. A reader keeps the list as it was, without the lock.
    subsystems: Arc<Vec<Arc<Subsystem>>>,
    /// The number of subsystems that were ever added.
    added: u64,
    /// The namespace number that was given out last.
    last_nsid: u32,
    /// The numbers of devices that will be added again, by their names. No other device gets one.
    kept: BTreeMap<String, u32>,
    /// The number of changes, for discovery.
    generation: u64,
    /// The number of changes of namespaces, and of all that discovery shows.
    version: u64,
    /// The addresses at which hosts connect to the subsystems.
    ports: Vec<SocketAddr>,
    /// The connections of controllers that tell their hosts of changes.
    watching: Vec<Arc<HostLink>>,
}

impl SubsystemTable {
    /// Counts a change, and wakes the threads that tell their hosts.
    fn note_change(&mut self) {
        self.generation += 1;
        self.note_namespace();
    }

    /// Counts a change of a namespace, and wakes the threads that tell their hosts.
    fn note_namespace(&mut self) {
        self.version += 1;
        self.watching.iter().for_each(|link| link.wake.raise());
    }

    /// The next number that is no namespace's. Numbers are given out in turn: a host that has not
    /// learned yet that a device was removed must not reach the next one by its number.
    fn take_nsid(&mut self) -> u32 {
        loop {
            self.last_nsid = self.last_nsid % NSID_MAX + 1;
            let next = self.last_nsid;
            let mut used =
                self.subsystems.iter().map(|it| it.nsid).chain(self.kept.values().copied());
            if used.all(|number| number != next) {
                return next;
            }
        }
    }
}

/// The numbers of the devices as namespaces of the subsystem of all devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceNumbers {
    /// By the names of the devices.
    pub of: BTreeMap<String, u32>,
    /// The number that was given out last.
    pub last: u32,
}

impl Subsystems {
    /// The access of hosts.
    pub fn access(&self) -> &HostAccess {
        &self.access
    }

    /// Whether there is an address at which hosts connect to the subsystems.
    pub fn is_served(&self) -> bool {
        !self.table().ports.is_empty()
    }

    /// An empty table. `host` is the identity of this machine, from which those of its namespaces
    /// are derived; `access` says which hosts may use each device; `all` is the NQN of a subsystem
    /// of all devices, if there is to be one.
    pub fn new(host: &str, access: HostAccess, all: Option<String>) -> Arc<Subsystems> {
        let all = all.map(|nqn| Arc::new(AllDevices::new(Identity::of(nqn, host, None))));
        Arc::new(Subsystems { host: host.to_owned(), access, all, ..Subsystems::default() })
    }

    /// The NQN of the subsystem of all devices, if there is one.
    pub fn all_nqn(&self) -> Option<&str> {
        self.all.as_ref().map(|all| &*all.identity.nqn)
    }

    fn table(&self) -> MutexGuard<'_, SubsystemTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a disk the namespace of a subsystem of its own. The name alone identifies it.
    ///
    /// # Errors
    /// As [`Subsystems::add_contents`].
    pub fn add(&self, name: &str, disk: impl Into<SharedDisk>) -> Result<(), SubsystemError> {
        self.add_contents(name, None, disk)
    }

    /// Makes a disk the namespace of a subsystem of its own. `contents` tells the data of the disk
    /// from others that had the name before: the namespace gets another UUID and number with
    /// others.
    ///
    /// # Errors
    /// If the name is taken or too long, NVMe cannot describe the disk, or the table is full.
    pub fn add_contents(
        &self,
        name: &str,
        contents: Option<&DiskContents>,
        disk: impl Into<SharedDisk>,
    ) -> Result<(), SubsystemError> {
        let disk = disk.into();
        let nqn = format!("{NQN_PREFIX}{name}");
        if name.len() > NAME_LEN_MAX {
            return Err(SubsystemError::Name(name.to_owned()));
        }
        let shape = NamespaceShape::of(disk.disk.geometry(), disk.disk.limits())?;
        let mut table = self.table();
        if table.subsystems.iter().any(|other| other.name == name) {
            return Err(SubsystemError::Taken(name.to_owned()));
        }
        if self.all_nqn() == Some(&*nqn) {
            return Err(SubsystemError::TakenByAll(nqn));
        }
        let others = table.kept.keys().filter(|kept| *kept != name).count();
        if table.subsystems.len() + others >= SUBSYSTEMS_MAX {
            return Err(SubsystemError::Full);
        }
        table.added += 1;
        let kept = table.kept.remove(name);
        let (id, nsid) = (table.added, kept.unwrap_or_else(|| table.take_nsid()));
        Arc::make_mut(&mut table.subsystems).push(Arc::new(Subsystem {
            name: name.to_owned(),
            identity: Identity::of(nqn, &self.host, contents),
            id,
            nsid,
            state: Mutex::new(SubsystemState {
                phase: DiskPhase::Present(disk),
                shape: Arc::new(shape),
                users: Vec::new(),
                links: Vec::new(),
                waiting: Vec::new(),
                past: CommandTotals::default(),
            }),
            version: AtomicU64::new(0),
            changed: Condvar::new(),
        }));
        table.note_change();
        Ok(())
    }

    /// The numbers of all devices, also of those that will be added again.
    pub fn numbers(&self) -> NamespaceNumbers {
        let table = self.table();
        let present = table.subsystems.iter().map(|it| (it.name.clone(), it.nsid));
        let kept = table.kept.iter().map(|(name, nsid)| (name.clone(), *nsid));
        NamespaceNumbers { of: kept.chain(present).collect(), last: table.last_nsid }
    }

    /// Keeps numbers for devices that will be added again: a host that connects again finds each
    /// device as the namespace that it was.
    pub fn keep_numbers(&self, numbers: NamespaceNumbers) {
        let mut table = self.table();
        (table.kept, table.last_nsid) = (numbers.of, numbers.last);
    }

    /// Removes a subsystem without hosts, and keeps its number: the device will be added again.
    ///
    /// # Errors
    /// If there is no such subsystem.
    pub fn remove_for_now(&self, name: &str) -> Result<(), SubsystemError> {
        let mut table = self.table();
        let found = table.subsystems.iter().find(|it| it.name == name).map(|it| it.nsid);
        if let Some(nsid) = found {
            table.kept.insert(name.to_owned(), nsid);
        }
        drop(table);
        self.remove(name, Duration::ZERO)
    }

    /// Keeps no numbers any more for devices that were not added again.
    pub fn release_numbers(&self) {
        self.table().kept.clear();
    }

    /// Takes the disk of a subsystem away, to replace it by another one while its hosts stay
    /// connected: their commands in flight are completed, and later ones wait. A host that does not
    /// receive its data within `drain` is cut off.
    ///
    /// # Errors
    /// If there is no such subsystem, or the disk executes commands for longer than `drain`.
    pub fn suspend(
        self: &Arc<Subsystems>,
        name: &str,
        drain: Duration,
    ) -> Result<SuspendedSubsystem, SubsystemError> {
        let found = self.table().subsystems.iter().find(|it| it.name == name).cloned();
        let subsystem = found.ok_or_else(|| SubsystemError::Unknown(name.to_owned()))?;
        if !subsystem.suspend(drain) {
            return Err(SubsystemError::Busy(name.to_owned()));
        }
        Ok(SuspendedSubsystem { subsystems: Arc::clone(self), subsystem: Some(subsystem) })
    }

    /// Removes a subsystem that has lost its disk, and cuts its hosts off.
    fn remove_suspended(&self, subsystem: &Arc<Subsystem>) {
        let mut table = self.table();
        let before = table.subsystems.len();
        subsystem.close();
        Arc::make_mut(&mut table.subsystems).retain(|other| !Arc::ptr_eq(other, subsystem));
        if table.subsystems.len() < before {
            table.note_change();
        }
        drop(table);
        subsystem.disconnect(Duration::ZERO);
    }

    /// Removes a subsystem. The commands that its device executes are completed, then its hosts are
    /// disconnected; those that take longer than `drain` are cut off. Returns when the last one has
    /// ended.
    ///
    /// # Errors
    /// If there is no such subsystem.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<(), SubsystemError> {
        let subsystem = {
            let mut table = self.table();
            let index = table.subsystems.iter().position(|subsystem| subsystem.name == name);
            let index = index.ok_or_else(|| SubsystemError::Unknown(name.to_owned()))?;
            table.subsystems[index].close();
            table.note_change();
            Arc::make_mut(&mut table.subsystems).remove(index)
        };
        subsystem.disconnect(drain);
        Ok(())
    }

    /// The subsystem of this NQN, for a controller.
    pub(crate) fn find(&self, nqn: &str) -> Option<ControllerTarget> {
        if let Some(all) = self.all.as_ref().filter(|all| all.identity.nqn == nqn) {
            return Some(ControllerTarget::All(Arc::clone(all)));
        }
        let table = self.table();
        let found = table.subsystems.iter().find(|subsystem| subsystem.identity.nqn == nqn);
        found.map(|subsystem| ControllerTarget::Device(Arc::clone(subsystem)))
    }

    /// The reason for which the host of this NQN may not use a device.
    pub(crate) fn refusal(&self, subsystem: &Subsystem, host: &str) -> Option<&'static str> {
        self.access.refusal(&subsystem.name, host)
    }

    /// All devices that have a subsystem, in the order in which they were added.
    pub(crate) fn devices(&self) -> Arc<Vec<Arc<Subsystem>>> {
        Arc::clone(&self.table().subsystems)
    }

    /// The number of changes so far, the subsystems that a host may use, and the address at which
    /// it reaches them if it is connected at the address `here`.
    pub(crate) fn discover(
        &self,
        host: &str,
        here: SocketAddr,
    ) -> (u64, Vec<Arc<Subsystem>>, Option<SocketAddr>) {
        let table = self.table();
        let (generation, address) = (table.generation, nearest_port(&table.ports, here));
        let subsystems = Arc::clone(&table.subsystems);
        // Without the lock: there may be thousands of subsystems, and allowed hosts.
        drop(table);
        let is_usable = |it: &&Arc<Subsystem>| self.refusal(it, host).is_none();
        (generation, subsystems.iter().filter(is_usable).cloned().collect(), address)
    }

    /// Adds addresses at which hosts connect to the subsystems.
    pub(crate) fn add_ports(&self, ports: &[SocketAddr]) {
        let mut table = self.table();
        table.ports.extend(ports);
        table.note_change();
    }

    /// Removes addresses, each once: the next server may have added it already.
    pub(crate) fn remove_ports(&self, ports: &[SocketAddr]) {
        let mut table = self.table();
        for port in ports {
            if let Some(at) = table.ports.iter().position(|other| other == port) {
                table.ports.remove(at);
            }
        }
        table.note_change();
    }

    /// The number of changes so far.
    pub(crate) fn generation(&self) -> u64 {
        self.table().generation
    }

    /// The number of changes of namespaces so far.
    pub(crate) fn version(&self) -> u64 {
        self.table().version
    }

    /// Wakes the thread of a controller's connection at each change.
    pub(crate) fn watch(&self, link: &Arc<HostLink>) {
        self.table().watching.push(Arc::clone(link));
    }

    /// Wakes the thread of a connection no more.
    pub(crate) fn unwatch(&self, link: &Arc<HostLink>) {
        self.table().watching.retain(|other| !Arc::ptr_eq(other, link));
    }

    fn info(&self, subsystem: &Subsystem) -> SubsystemInfo {
        // A connection that has to authenticate checks for a mount when it has.
        let counts_unknown = self.access.authentication.is_none();
        let mut info = subsystem.info(counts_unknown);
        if let Some(all) = &self.all {
            all.add_hosts(&mut info, counts_unknown, |host| {
                self.refusal(subsystem, host).is_none()
            });
        }
        // After the connections were counted: a queue whose admin queue has left since is cut, and
        // takes no disk any more.
        info.controllers = info.controllers.max(subsystem.is_used().into());
        info
    }

    /// The subsystem of a device; `None` if it has none.
    pub fn find_info(&self, name: &str) -> Option<SubsystemInfo> {
        let found = self.table().subsystems.iter().find(|it| it.name == name).cloned();
        found.map(|subsystem| self.info(&subsystem))
    }

    /// All subsystems, in the order in which they were added.
    pub fn list(&self) -> Vec<SubsystemInfo> {
        self.devices().iter().map(|subsystem| self.info(subsystem)).collect()
    }
}

/// The one address of the subsystems for a host that is connected at `here`: this one, or else one
/// with the same host part. A subsystem has one controller for a host, so that a second address
/// would be refused. `None` if the host reaches no address: a loopback address is for this machine.
fn nearest_port(ports: &[SocketAddr], here: SocketAddr) -> Option<SocketAddr> {
    let ip = here.ip().to_canonical();
    let reached = ports.iter().filter_map(|port| match port.ip().to_canonical() {
        own if own == ip => Some((port.port() != here.port(), *port)),
        any if any.is_unspecified() && (any.is_ipv6() || ip.is_ipv4()) => {
            Some((port.port() != here.port(), SocketAddr::new(ip, port.port())))
        }
        other => {
            let is_reached = !other.is_unspecified() && (!other.is_loopback() || ip.is_loopback());
            is_reached.then_some((true, *port))
        }
    });
    let is_same_host = |address: &SocketAddr| address.ip().to_canonical() == ip;
    reached.min_by_key(|(elsewhere, address)| (*elsewhere, !is_same_host(address))).map(|it| it.1)
}

/// A subsystem without a disk, whose hosts wait for one. Dropping it removes the subsystem.
#[derive(Debug)]
pub struct SuspendedSubsystem {
    subsystems: Arc<Subsystems>,
    /// `None` once it has a disk.
    subsystem: Option<Arc<Subsystem>>,
}

impl SuspendedSubsystem {
    /// Gives the subsystem a disk. Hosts learn a new size by an event.
    ///
    /// # Errors
    /// If the disk is smaller than the one before, or has other blocks or zones. Then the subsystem
    /// is removed.
    pub fn resume(mut self, disk: impl Into<SharedDisk>) -> Result<(), SubsystemError> {
        if let Some(subsystem) = &self.subsystem {
            subsystem.resume(disk.into())?;
            self.subsystems.table().note_namespace();
        }
        self.subsystem = None;
        Ok(())
    }
}

impl Drop for SuspendedSubsystem {
    fn drop(&mut self) {
        if let Some(subsystem) = &self.subsystem {
            self.subsystems.remove_suspended(subsystem);
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::channel::ChannelConfig;
    use blockyard_core::composed::Composed;
    use blockyard_null::{Null, NullConfig};

    use super::*;

    #[test]
    fn numbers_of_namespaces_are_given_out_in_turn() {
        let mut table = SubsystemTable::default();
        let mut add = |numbers: &[u32]| {
            let subsystem = |nsid: &u32| Arc::new(subsystem_of(*nsid));
            table.subsystems = Arc::new(numbers.iter().map(subsystem).collect());
            table.take_nsid()
        };
        assert_eq!((add(&[]), add(&[1]), add(&[2])), (1, 2, 3), "1 is free, and not its turn");
        for wanted in 4..=SUBSYSTEMS_MAX as u32 {
            assert_eq!(add(&[2, 3]), wanted);
        }
        assert_eq!((add(&[2, 3]), add(&[2, 3])), (1, 4));
    }

    /// A host that connected again after an upgrade would find other data at a number.
    #[test]
    fn a_device_that_is_added_again_gets_the_number_that_was_kept() {
        let subsystems = Subsystems::new("", HostAccess::default(), None);
        let add = |name: &str| subsystems.add(name, null()).unwrap();
        let remove = |name: &str| subsystems.remove(name, Duration::ZERO).unwrap();
        ["a", "b", "c"].into_iter().for_each(add);
        remove("a");
        let numbers = subsystems.numbers();
        assert_eq!((numbers.of["b"], numbers.of["c"], numbers.last), (2, 3, 3));
        subsystems.keep_numbers(numbers.clone());
        ["b", "c"].into_iter().for_each(remove);
        assert_eq!(subsystems.numbers(), numbers);
        ["c", "other", "b"].into_iter().for_each(add);
        let numbers = subsystems.numbers();
        assert_eq!((numbers.of["b"], numbers.of["c"], numbers.of["other"]), (2, 3, 4));
        // A number is kept once.
        remove("b");
        add("b");
        assert_eq!(subsystems.numbers().of["b"], 5);
    }

    /// A mount of a zonefs that counts no client reads the write pointers. An I/O queue that had
    /// outlived its admin queue was not counted, and moved them.
    #[test]
    fn a_queue_that_has_the_disk_is_a_client_without_its_admin_queue() {
        let subsystems = Subsystems::new("", HostAccess::default(), None);
        subsystems.add("a", null()).unwrap();
        let subsystem = Arc::clone(&subsystems.devices()[0]);
        let clients = || subsystems.find_info("a").unwrap().controllers;
        let wake = Arc::new(blockyard_os::socket::Wake::new().unwrap());
        let link = Arc::new(HostLink::new(1, String::new(), wake));
        let namespace = subsystem.take_namespace(&link).unwrap();
        assert_eq!(clients(), 1);
        // As the end of the admin queue does.
        link.cut();
        assert_eq!(clients(), 1);
        drop(namespace);
        assert_eq!(clients(), 0);
        assert!(subsystem.take_namespace(&link).is_err(), "a mount would not count this queue");
    }

    fn null() -> Arc<dyn Disk> {
        let null = Null::open(NullConfig::default()).unwrap();
        Arc::new(Composed::new("a".to_owned(), "null", null, ChannelConfig { depth: 1 }))
    }

    /// The next device may take the number as soon as the table does not have the device. A queue
    /// that could not see by then that its disk was gone wrote to it what was meant for the next.
    #[test]
    fn a_device_that_is_removed_is_closed_before_its_number_is_free() {
        for _ in 0..16 {
            let subsystems = Subsystems::new("", HostAccess::default(), None);
            subsystems.add("a", null()).unwrap();
            let subsystem = Arc::clone(&subsystems.devices()[0]);
            std::thread::scope(|scope| {
                // The remover stops at this lock.
                let state = subsystem.state();
                scope.spawn(|| subsystems.remove("a", Duration::ZERO).unwrap());
                let is_still = || match subsystems.table.try_lock() {
                    Ok(table) => !table.subsystems.is_empty(),
                    Err(_) => false,
                };
                while is_still() {
                    std::thread::yield_now();
                }
                drop(state);
                while !subsystems.devices().is_empty() {
                    std::thread::yield_now();
                }
                assert_eq!(subsystem.version(), 1);
            });
        }
    }

    fn subsystem_of(nsid: u32) -> Subsystem {
        let shape = NamespaceShape {
            block_shift: 9,
            blocks: 8,
            preferred_blocks: 1,
            discards: false,
            write_zeroes: false,
            write_cache: false,
            read_only: false,
            zones: None,
        };
        Subsystem {
            name: String::new(),
            identity: Identity::of(String::new(), "", None),
            id: nsid.into(),
            nsid,
            state: Mutex::new(SubsystemState {
                phase: DiskPhase::Absent,
                shape: Arc::new(shape),
                users: Vec::new(),
                links: Vec::new(),
                waiting: Vec::new(),
                past: CommandTotals::default(),
            }),
            version: AtomicU64::new(0),
            changed: Condvar::new(),
        }
    }

    /// The bug: a server bound the port of one that had ended, and added its address. Then the
    /// ended one removed that address, and discovery listed no device.
    #[test]
    fn a_server_that_stops_leaves_the_address_to_the_next_one() {
        let subsystems = Subsystems::new("", HostAccess::default(), None);
        subsystems.add("a", null()).unwrap();
        let port: SocketAddr = "127.0.0.1:4420".parse().unwrap();
        let found = || subsystems.discover("nqn.h", port).2;
        subsystems.add_ports(&[port]);
        subsystems.add_ports(&[port]);
        subsystems.remove_ports(&[port]);
        assert_eq!(found(), Some(port));
        subsystems.remove_ports(&[port]);
        assert_eq!(found(), None);
    }

    #[test]
    fn a_host_gets_the_nearest_address_that_it_reaches() {
        let nearest = |ports: &[&str], here: &str| {
            let ports: Vec<_> = ports.iter().map(|port| port.parse().unwrap()).collect();
            nearest_port(&ports, here.parse().unwrap()).map(|address| address.to_string())
        };
        let found = |text: &str| Some(text.to_owned());
        let ports = ["127.0.0.1:4420", "192.0.2.1:4420", "127.0.0.1:4421"];
        assert_eq!(nearest(&ports, "127.0.0.1:4421"), found("127.0.0.1:4421"));
        assert_eq!(nearest(&ports, "127.0.0.1:8009"), found("127.0.0.1:4420"));
        assert_eq!(nearest(&ports, "192.0.2.1:8009"), found("192.0.2.1:4420"));
        assert_eq!(nearest(&ports, "192.0.2.2:8009"), found("192.0.2.1:4420"));
        assert_eq!(nearest(&ports[..1], "192.0.2.2:8009"), None, "loopback is for this machine");
        assert_eq!(nearest(&["0.0.0.0:4420"], "192.0.2.2:8009"), found("192.0.2.2:4420"));
        assert_eq!(nearest(&["0.0.0.0:4420"], "[::1]:8009"), None);
        assert_eq!(nearest(&["[::]:4420"], "[::ffff:192.0.2.2]:8009"), found("192.0.2.2:4420"));
        assert_eq!(nearest(&[], "192.0.2.2:8009"), None);
    }
}
