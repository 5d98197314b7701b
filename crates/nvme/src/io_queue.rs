//! An I/O queue: a channel to the device of each namespace that its host uses.
//!
//! A queue of a device's own subsystem has its namespace from the Connect on, or from the
//! authentication on if its host has to authenticate. A queue of the
//! subsystem of all devices opens a namespace with the first command for it, and loses it when the
//! device is removed. No function waits for a device that is being replaced, or for commands.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::clock::Monotonic;
use blockyard_core::{Due, Region};

use crate::all_devices::AllDevices;
use crate::command::{NSID_ALL, StatusCode, io_opcode};
use crate::controller::{Controller, ControllerTarget};
use crate::fabrics::{ConnectRefusal, SUBSYSTEM_OFFSET};
use crate::host_link::HostLink;
use crate::identify::QUEUE_ENTRIES_MAX;
use crate::namespace::IoPlan;
use crate::namespace_queue::{CommandProgress, DeviceWatch, NamespaceQueue, OpenError};
use crate::slots::CommandSlot;
use crate::subsystems::{Subsystem, Subsystems};

/// The poll interval of a channel that does not report when completions are due.
const COMPLETION_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How often a connection looks for completions that the descriptor of a device should announce.
const COMPLETION_LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The most namespaces that a queue has open: with as many as commands, there is always one for
/// which the device executes no command, and which is closed for another.
const NAMESPACES_OPEN_MAX: usize = QUEUE_ENTRIES_MAX as usize;

/// An I/O queue of a controller.
pub(crate) struct IoQueue {
    pub(crate) controller: Arc<Controller>,
    subsystems: Arc<Subsystems>,
    link: Arc<HostLink>,
    region: Arc<Region>,
    watch: DeviceWatch,
    /// The namespaces that the host uses, in no order.
    namespaces: Vec<NamespaceQueue>,
    /// The device of a queue of the device's own subsystem, while it has no channel to it.
    missing: Option<Arc<Subsystem>>,
    /// The number of commands so far.
    commands: u64,
    /// Whether all devices were scanned for a namespace, which may have been opened.
    has_scanned: bool,
}

/// Whether a queue has the disks that it needs.
pub(crate) enum Renewal {
    /// It has.
    Ready,
    /// Commands in flight use the disk of the device's own subsystem, which is being replaced or
    /// removed.
    InUse,
    /// The device is being replaced.
    Absent,
    /// The device is gone, or refuses a channel.
    Gone(ConnectRefusal),
}

impl IoQueue {
    /// Opens a queue, without a channel to a device: [`IoQueue::renew`] opens it if the subsystem
    /// is that of one.
    ///
    /// # Errors
    /// If the subsystem is that of discovery.
    pub(crate) fn open(
        controller: &Arc<Controller>,
        subsystems: &Arc<Subsystems>,
        link: &Arc<HostLink>,
        region: &Arc<Region>,
        watch: &DeviceWatch,
    ) -> Result<IoQueue, ConnectRefusal> {
        let missing = match &controller.target {
            ControllerTarget::Discovery => return Err(ConnectRefusal::in_data(SUBSYSTEM_OFFSET)),
            // A host that cannot use the only namespace has none.
            ControllerTarget::Device(subsystem) => {
                controller.shows(&subsystem.shape()).then(|| Arc::clone(subsystem))
            }
            ControllerTarget::All(_) => None,
        };
        Ok(IoQueue {
            controller: Arc::clone(controller),
            subsystems: Arc::clone(subsystems),
            link: Arc::clone(link),
            region: Arc::clone(region),
            watch: watch.clone(),
            namespaces: Vec::new(),
            missing,
            commands: 0,
            has_scanned: false,
        })
    }

    /// Closes all channels, which waits for the requests that devices have started, and ends what
    /// the queue is to its controller. Only a connection that has waited too long has any requests.
    pub(crate) fn close(self) {
        let IoQueue { controller, link, namespaces, .. } = self;
        let (removed, others): (Vec<_>, Vec<_>) =
            namespaces.into_iter().partition(NamespaceQueue::is_removed);
        // It also ends delays, and drops what the device was not given yet.
        others.into_iter().for_each(close_channel);
        // The host's next association reaches no removed device, and does not wait for one that
        // does not complete its commands.
        controller.close_queue(&link);
        controller.target.detach(&link);
        removed.into_iter().for_each(close_channel);
    }

    /// From now on a command of several operations begins no more of them. Returns one disk without
    /// a command, because closing a channel may take long; `true` if there is another one. Devices
    /// for which commands wait, by the ids of their subsystems, keep their channels.
    pub(crate) fn end(&mut self, mut has_waiting: impl FnMut(u64) -> bool) -> bool {
        self.namespaces.iter_mut().for_each(|it| it.is_ending = true);
        let mut is_done = |it: &NamespaceQueue| it.is_idle() && !has_waiting(it.subsystem.id);
        if let Some(at) = self.namespaces.iter().position(&mut is_done) {
            self.namespaces.swap_remove(at).close();
        }
        self.namespaces.iter().any(is_done)
    }

    /// Whether there is a channel to a device, by the id of its subsystem.
    pub(crate) fn has_channel(&self, device: u64) -> bool {
        self.namespaces.iter().any(|it| it.subsystem.id == device)
    }

    /// What a command asks for; also notes its device.
    ///
    /// # Errors
    /// The status of a command that is refused without asking the device.
    pub(crate) fn plan(&mut self, slot: &mut CommandSlot) -> Result<IoPlan, StatusCode> {
        let sqe = &slot.sqe;
        let nsid = match (sqe.nsid(), &self.controller.target) {
            (NSID_ALL, ControllerTarget::Device(subsystem)) if sqe.opcode() == io_opcode::FLUSH => {
                subsystem.identity.nsid
            }
            (nsid, _) => nsid,
        };
        let at = self.find_open(nsid).map_or_else(|| self.open_namespace(nsid), Ok)?;
        self.commands += 1;
        let NamespaceQueue { namespace, subsystem, used, .. } = &mut self.namespaces[at];
        *used = self.commands;
        slot.device = subsystem.id;
        namespace.stats.commands.add(1);
        namespace.shape.plan(sqe)
    }

    /// Counts an error of a command for a device, by the id of its subsystem.
    pub(crate) fn count_error(&self, device: u64) {
        if let Some(found) = self.namespaces.iter().find(|it| it.subsystem.id == device) {
            found.namespace.stats.errors.add(1);
        }
    }

    /// Whether its controller has all devices.
    pub(crate) fn has_all_devices(&self) -> bool {
        matches!(self.controller.target, ControllerTarget::All(_))
    }

    /// The open namespace of this number. In the subsystem of all devices, one whose device is
    /// removed, and completes its last commands, takes no other command.
    fn find_open(&self, nsid: u32) -> Option<usize> {
        let is_removed = |it: &NamespaceQueue| self.has_all_devices() && it.is_removed();
        self.namespaces.iter().position(|it| it.nsid == nsid && !is_removed(it))
    }

    /// Whether commands of the subsystem of all devices still execute on a disk of this namespace
    /// that is being replaced. Later ones wait for their end.
    pub(crate) fn is_returning(&self, nsid: u32) -> bool {
        self.find_open(nsid).is_some_and(|at| self.namespaces[at].is_outdated())
    }

    /// Whether all devices that have something to do are removed.
    pub(crate) fn is_busy_with_removed(&self) -> bool {
        let mut busy = self.namespaces.iter().filter(|it| !it.is_idle()).peekable();
        busy.peek().is_some() && busy.all(NamespaceQueue::is_removed)
    }

    /// The device of a namespace that is not open, if it is being replaced. A queue of a device's
    /// own subsystem waits for the device in [`IoQueue::renew`].
    pub(crate) fn absent_device(&self, nsid: u32) -> Option<Arc<Subsystem>> {
        if !self.has_all_devices() || self.find_open(nsid).is_some() {
            return None;
        }
        let found = AllDevices::find(&self.subsystems, nsid, &self.controller);
        found.filter(|subsystem| subsystem.is_absent())
    }

    /// The device of a command that has begun, if it is being replaced.
    pub(crate) fn absent_device_of(&self, slot: &CommandSlot) -> Option<Arc<Subsystem>> {
        // A command for authentication has no device.
        if slot.device == 0 { None } else { self.absent_device(slot.sqe.nsid()) }
    }

    /// Whether a command has scanned all devices, or opened a channel, since the last call.
    pub(crate) fn take_scanned(&mut self) -> bool {
        std::mem::take(&mut self.has_scanned)
    }

    /// Opens a namespace of the subsystem of all devices; returns its index.
    fn open_namespace(&mut self, nsid: u32) -> Result<usize, StatusCode> {
        if !self.controller.is_valid(nsid) {
            return Err(StatusCode::INVALID_NAMESPACE);
        }
        if !self.has_all_devices() {
            return Err(StatusCode::INVALID_FIELD);
        }
        self.has_scanned = true;
        let found = AllDevices::find(&self.subsystems, nsid, &self.controller);
        let found = found.filter(|subsystem| self.controller.shows(&subsystem.shape()));
        let subsystem = found.ok_or(StatusCode::INVALID_FIELD)?;
        self.close_longest_idle()?;
        let opened = self.open_channel(nsid, &subsystem);
        self.namespaces.push(opened.map_err(|error| match error {
            // Just now; the host may repeat the command.
            OpenError::Absent | OpenError::Refused(_) => StatusCode::INTERRUPTED,
            OpenError::Closed => StatusCode::INVALID_FIELD,
        })?);
        Ok(self.namespaces.len() - 1)
    }

    fn open_channel(
        &self,
        nsid: u32,
        subsystem: &Arc<Subsystem>,
    ) -> Result<NamespaceQueue, OpenError> {
        let (log, nqn) = (&self.subsystems.logs.channels, &subsystem.identity.nqn);
        let channel = (&self.watch, log);
        let opened = NamespaceQueue::open(nsid, subsystem, &self.link, &self.region, channel);
        // A host may repeat a command for the device without end.
        opened.inspect_err(|error| {
            if let OpenError::Refused(error) = error
                && log.permits()
            {
                tracing::warn!(subsystem = nqn, %error, "cannot open the device for an I/O queue");
            }
        })
    }

    /// Makes room for another namespace.
    fn close_longest_idle(&mut self) -> Result<(), StatusCode> {
        if self.namespaces.len() < NAMESPACES_OPEN_MAX {
            return Ok(());
        }
        let idle = self.namespaces.iter().enumerate().filter(|(_, it)| it.is_idle());
        let longest = idle.min_by_key(|(_, it)| it.used).map(|(at, _)| at);
        self.namespaces.swap_remove(longest.ok_or(StatusCode::INTERRUPTED)?).close();
        Ok(())
    }

    /// Starts a command whose data, if it has any from the host, are complete.
    pub(crate) fn start(&mut self, index: u16, slot: &mut CommandSlot) -> CommandProgress {
        let device = slot.device;
        let find = |it: &NamespaceQueue| it.subsystem.id == device;
        let at = match self.namespaces.iter().position(find) {
            Some(at) => at,
            // The namespace was closed, or the device removed, while the data came.
            None => match self.open_namespace(slot.sqe.nsid()) {
                Ok(at) if find(&self.namespaces[at]) => at,
                Ok(_) => return StatusCode::INVALID_FIELD.into(),
                Err(status) => return status.into(),
            },
        };
        self.namespaces[at].start(index, slot)
    }

    /// An open namespace; `None` after the last one.
    pub(crate) fn namespace(&mut self, at: usize) -> Option<&mut NamespaceQueue> {
        self.namespaces.get_mut(at)
    }

    /// The number of open namespaces.
    pub(crate) fn namespaces_open(&self) -> usize {
        self.namespaces.len()
    }

    /// Whether there is something for another round, after one that has `reaped` completions: an
    /// outdated disk may be without commands now.
    pub(crate) fn has_more(&self, reaped: usize) -> bool {
        self.namespaces.iter().any(|it| it.has_more(reaped) || (reaped > 0 && it.is_outdated()))
    }

    /// Whether any device has something to do.
    pub(crate) fn is_busy(&self) -> bool {
        !self.namespaces.iter().all(NamespaceQueue::is_idle)
    }

    /// Whether the device of a queue of the device's own subsystem is being replaced or removed,
    /// and the queue still has a channel to it.
    pub(crate) fn has_lost_device(&self) -> bool {
        !self.has_all_devices() && self.namespaces.iter().any(NamespaceQueue::is_outdated)
    }

    /// Returns the disks that are being replaced or removed, each once its commands are completed.
    /// A queue of a device's own subsystem opens a channel to the successor. In the subsystem of
    /// all devices, the next command for a namespace opens it; commands for others, and for a
    /// removed device, do not wait ([`IoQueue::is_returning`]).
    pub(crate) fn renew(&mut self) -> Renewal {
        if self.missing.is_none() && !self.namespaces.iter().any(NamespaceQueue::is_outdated) {
            return Renewal::Ready;
        }
        self.renew_outdated()
    }

    #[cold]
    fn renew_outdated(&mut self) -> Renewal {
        let is_returned = |it: &NamespaceQueue| it.is_outdated() && it.is_idle();
        while let Some(at) = self.namespaces.iter().position(is_returned) {
            let (_, subsystem) = self.namespaces.swap_remove(at).close();
            if !self.has_all_devices() {
                self.missing = Some(subsystem);
            }
        }
        if self.has_lost_device() {
            return Renewal::InUse;
        }
        let Some(subsystem) = self.missing.take() else { return Renewal::Ready };
        match self.open_channel(subsystem.identity.nsid, &subsystem) {
            Ok(renewed) => self.namespaces.push(renewed),
            Err(OpenError::Absent) => {
                self.missing = Some(subsystem);
                return Renewal::Absent;
            }
            Err(OpenError::Closed) => {
                return Renewal::Gone(ConnectRefusal::in_data(SUBSYSTEM_OFFSET));
            }
            Err(OpenError::Refused(_)) => {
                return Renewal::Gone(ConnectRefusal::new(StatusCode::INTERNAL));
            }
        }
        Renewal::Ready
    }

    /// The time at which to look for completions, unless a descriptor of a device tells earlier; at
    /// once if there are any. `None` if no device is to complete anything.
    pub(crate) fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        let mut until = None;
        for namespace in self.namespaces.iter_mut().filter(|it| it.channel.in_flight() > 0) {
            let wait = match namespace.channel.due() {
                Due::At(at) => Duration::from_nanos(at.since(Monotonic::nanos_of(now))),
                Due::Never if namespace.descriptor.is_some() => COMPLETION_LOOK_INTERVAL,
                Due::Never => COMPLETION_POLL_INTERVAL,
            };
            let is_awake = wait.is_zero()
                || (namespace.descriptor.is_some() && !namespace.channel.may_sleep());
            let due = if is_awake { now } else { now + wait };
            until = Some(until.unwrap_or(due).min(due));
        }
        until
    }
}

/// Closes the channel of a namespace. One that panics keeps no disk, and no other channel open.
fn close_channel(namespace: NamespaceQueue) {
    let nqn = namespace.subsystem.identity.nqn.clone();
    if catch_unwind(AssertUnwindSafe(|| drop(namespace))).is_err() {
        // The panic was reported when it happened.
        tracing::error!(subsystem = nqn, "a channel has not been closed cleanly");
    }
}
