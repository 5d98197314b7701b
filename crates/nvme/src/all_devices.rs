//! The subsystem of all devices: each is a namespace, with a number that it keeps while it exists.
//!
//! - A device takes the next number in turn when it is added. A host learns of devices that come,
//!   go and grow by the event Namespace Attribute Changed, and stays connected.
//! - A host sees the namespaces that it may use. An allow list of a device holds for the device in
//!   every subsystem.
//! - The state of each device is that of its own subsystem (`subsystems.rs`): a queue takes its
//!   disk with the first command for it, and returns it when the device is replaced or removed.
#![allow(clippy::disallowed_types)] // Control plane: I/O to an open namespace takes no lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::controller::Controller;
use crate::host_link::HostLink;
use crate::identify::Identity;
use crate::subsystems::{Subsystem, SubsystemInfo, Subsystems};

/// The subsystem of all devices.
#[derive(Debug)]
pub(crate) struct AllDevices {
    pub(crate) identity: Identity,
    /// The connections to it, each with the number of its queue.
    links: Mutex<Vec<(u16, Arc<HostLink>)>>,
}

impl AllDevices {
    pub(crate) fn new(identity: Identity) -> AllDevices {
        AllDevices { identity, links: Mutex::default() }
    }

    fn links(&self) -> MutexGuard<'_, Vec<(u16, Arc<HostLink>)>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the connection of a queue.
    pub(crate) fn attach(&self, link: &Arc<HostLink>, queue: u16) {
        self.links().push((queue, Arc::clone(link)));
    }

    /// Removes a connection.
    pub(crate) fn detach(&self, link: &Arc<HostLink>) {
        self.links().retain(|(_, other)| !Arc::ptr_eq(other, link));
    }

    /// The devices that are namespaces for a controller's host, in the order of their numbers:
    /// those that it may use, without those that the controller hides.
    pub(crate) fn namespaces(
        subsystems: &Subsystems,
        controller: &Controller,
    ) -> Vec<Arc<Subsystem>> {
        let devices = subsystems.devices();
        let shown = devices.iter().filter(|it| is_namespace(subsystems, it, controller));
        let mut namespaces: Vec<_> = shown.cloned().collect();
        namespaces.sort_by_key(|it| it.nsid);
        namespaces
    }

    /// The device of this number, if it is a namespace for a controller's host.
    pub(crate) fn find(
        subsystems: &Subsystems,
        nsid: u32,
        controller: &Controller,
    ) -> Option<Arc<Subsystem>> {
        let found = subsystems.devices().iter().find(|it| it.nsid == nsid).cloned();
        found.filter(|it| is_namespace(subsystems, it, controller))
    }

    /// Adds the hosts that may use a device to its own, as [`SubsystemInfo::add_hosts`].
    pub(crate) fn add_hosts(
        &self,
        info: &mut SubsystemInfo,
        counts_unknown: bool,
        may_use: impl Fn(&str) -> bool,
    ) {
        info.add_hosts(&self.links(), counts_unknown, may_use);
    }
}

fn is_namespace(subsystems: &Subsystems, device: &Subsystem, controller: &Controller) -> bool {
    subsystems.refusal(device, &controller.host.nqn).is_none() && !controller.hides(device)
}
