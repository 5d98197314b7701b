//! The table of subsystems: devices by NQN, shared by all servers and changeable while they run.
//!
//! Control plane: the locks here are taken when a host connects, discovers or disconnects, and when
//! a device is added or removed; never for an I/O.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::rmw::SharedDisk;

use crate::access::HostAccess;
use crate::fabrics::NQN_LEN_MAX;
use crate::host_link::{CUT_GRACE, HostLink};
use crate::identify::Identity;
use crate::namespace::{NamespaceError, NamespaceShape};

/// The beginning of the NQN of each device; the device's name follows.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.blockyard:";

/// The longest name of a device, in bytes.
const NAME_LEN_MAX: usize = NQN_LEN_MAX - NQN_PREFIX.len();

/// The most subsystems of one table.
pub const SUBSYSTEMS_MAX: usize = 4096;

/// A device that hosts can use.
pub(crate) struct Subsystem {
    name: String,
    disk: SharedDisk,
    pub(crate) identity: Identity,
    pub(crate) shape: NamespaceShape,
    attached: Mutex<AttachedLinks>,
    detached: Condvar,
}

/// The connections to a subsystem.
#[derive(Default)]
struct AttachedLinks {
    closed: bool,
    links: Vec<Arc<HostLink>>,
}

/// A subsystem as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubsystemInfo {
    /// The device's name.
    pub name: String,
    /// The NQN.
    pub nqn: String,
    /// The hosts' controllers that use it now.
    pub controllers: usize,
}

/// The reason for which the table of subsystems refused a change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubsystemError {
    /// There is a subsystem of this name already.
    #[error("subsystem `{0}` exists already: remove it first or take another name")]
    Taken(String),
    /// There is no subsystem of this name.
    #[error("there is no subsystem `{0}`")]
    Unknown(String),
    /// The name is too long for an NQN.
    #[error("invalid subsystem name `{0}`: expected at most {NAME_LEN_MAX} bytes")]
    Name(String),
    /// NVMe cannot describe the device.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// There are [`SUBSYSTEMS_MAX`] subsystems already.
    #[error("there are {SUBSYSTEMS_MAX} subsystems already: remove one first")]
    Full,
}

impl Subsystem {
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk.disk
    }

    fn attached(&self) -> MutexGuard<'_, AttachedLinks> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection; `false` if the subsystem is being removed.
    pub(crate) fn attach(&self, link: &Arc<HostLink>) -> bool {
        let mut attached = self.attached();
        if attached.closed {
            return false;
        }
        attached.links.push(Arc::clone(link));
        true
    }

    /// Whether a mounted file system has claimed the disk. To be asked after [`Subsystem::attach`].
    pub(crate) fn is_claimed(&self) -> bool {
        self.disk.claim.is_claimed()
    }

    /// Removes a connection.
    pub(crate) fn detach(&self, link: &Arc<HostLink>) {
        self.attached().links.retain(|other| !Arc::ptr_eq(other, link));
        self.detached.notify_all();
    }

    /// Admits no new connection, asks the present ones to drain, and at `drain` cuts off those that
    /// have not ended. Returns when all have, or soon after the cut.
    fn close(&self, drain: Duration) {
        let deadline = Instant::now() + drain;
        let mut attached = self.attached();
        attached.closed = true;
        attached.links.iter().for_each(|link| link.drain());
        while !attached.links.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.detached.wait_timeout(attached, left);
            attached = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        attached.links.iter().for_each(|link| link.cut());
        // They end at their next check; only a system call that does not return can delay one.
        let gone = |attached: &mut AttachedLinks| !attached.links.is_empty();
        let waited = self.detached.wait_timeout_while(attached, CUT_GRACE, gone);
        for link in &waited.unwrap_or_else(PoisonError::into_inner).0.links {
            let (id, peer) = (link.id, &link.peer);
            tracing::warn!(id, peer, device = self.name, "a host that was cut has not left");
        }
    }

    fn info(&self) -> SubsystemInfo {
        let attached = self.attached();
        let is_admin = |link: &&Arc<HostLink>| link.role.get().is_some_and(|role| role.queue == 0);
        SubsystemInfo {
            name: self.name.clone(),
            nqn: self.identity.nqn.clone(),
            controllers: attached.links.iter().filter(is_admin).count(),
        }
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
    table: Mutex<SubsystemTable>,
}

#[derive(Debug, Default)]
struct SubsystemTable {
    /// In the order in which they were added.
    subsystems: Vec<Arc<Subsystem>>,
    /// The number of changes, for discovery.
    generation: u64,
}

impl Subsystems {
    /// An empty table. `host` is the identity of this machine, from which those of its namespaces
    /// are derived; `access` says which hosts may use each device.
    pub fn new(host: &str, access: HostAccess) -> Arc<Subsystems> {
        Arc::new(Subsystems { host: host.to_owned(), access, table: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, SubsystemTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a disk the namespace of a subsystem of its own.
    ///
    /// # Errors
    /// If the name is taken or too long, NVMe cannot describe the disk, or the table is full.
    pub fn add(&self, name: &str, disk: impl Into<SharedDisk>) -> Result<(), SubsystemError> {
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
        if table.subsystems.len() >= SUBSYSTEMS_MAX {
            return Err(SubsystemError::Full);
        }
        table.subsystems.push(Arc::new(Subsystem {
            name: name.to_owned(),
            disk,
            identity: Identity::of(nqn, &self.host),
            shape,
            attached: Mutex::default(),
            detached: Condvar::new(),
        }));
        table.generation += 1;
        Ok(())
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
            table.generation += 1;
            table.subsystems.remove(index)
        };
        subsystem.close(drain);
        Ok(())
    }

    /// The subsystem of this NQN.
    pub(crate) fn find(&self, nqn: &str) -> Option<Arc<Subsystem>> {
        self.table().subsystems.iter().find(|subsystem| subsystem.identity.nqn == nqn).cloned()
    }

    /// The reason for which the host of this NQN may not use a subsystem.
    pub(crate) fn refusal(&self, subsystem: &Subsystem, host: &str) -> Option<&'static str> {
        self.access.refusal(&subsystem.name, host)
    }

    /// The number of changes so far, and the NQNs of the subsystems that a host may use.
    pub(crate) fn discover(&self, host: &str) -> (u64, Vec<String>) {
        let table = self.table();
        let is_usable = |it: &&Arc<Subsystem>| self.refusal(it, host).is_none();
        let usable = table.subsystems.iter().filter(is_usable);
        let nqns = usable.map(|subsystem| subsystem.identity.nqn.clone());
        (table.generation, nqns.collect())
    }

    /// The subsystem of a device; `None` if it has none.
    pub fn find_info(&self, name: &str) -> Option<SubsystemInfo> {
        let found = self.table().subsystems.iter().find(|it| it.name == name).cloned();
        found.map(|subsystem| subsystem.info())
    }

    /// All subsystems, in the order in which they were added.
    pub fn list(&self) -> Vec<SubsystemInfo> {
        let subsystems = self.table().subsystems.clone();
        subsystems.iter().map(|subsystem| subsystem.info()).collect()
    }
}
