//! What all connections of a server share, and the Connect by which a host becomes a part of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use blockyard_core::Region;

use crate::admin::AdminQueue;
use crate::command::StatusCode;
use crate::controller::ControllerTarget;
use crate::dh_worker::DhWorker;
use crate::fabrics::{
    CONTROLLER_OFFSET, ConnectRefusal, ConnectRequest, DISCOVERY_NQN, NEW_CONTROLLER,
    SUBSYSTEM_OFFSET,
};
use crate::host_link::HostLink;
use crate::io_queue::IoQueue;
use crate::namespace_queue::DeviceWatch;
use crate::subsystems::Subsystems;

/// The state that all connections of a server share.
#[derive(Debug)]
pub(crate) struct SessionShared {
    pub(crate) subsystems: Arc<Subsystems>,
    /// Whether hosts find only the discovery subsystem here.
    pub(crate) discovery_only: bool,
    /// Computes for hosts that authenticate.
    pub(crate) dh: Arc<DhWorker>,
}

impl SessionShared {
    /// Admits the admin queue of a host: makes a controller.
    ///
    /// # Errors
    /// If there is no such subsystem, or the host may not use it.
    pub(crate) fn connect_admin(
        &self,
        link: &Arc<HostLink>,
        address: SocketAddr,
        request: &ConnectRequest,
        now: Instant,
    ) -> Result<AdminQueue, ConnectRefusal> {
        if request.controller != NEW_CONTROLLER {
            return Err(ConnectRefusal::in_data(CONTROLLER_OFFSET));
        }
        let target = if request.subsystem == DISCOVERY_NQN {
            self.subsystems.watch(link);
            ControllerTarget::Discovery
        } else {
            let unknown = ConnectRefusal::in_data(SUBSYSTEM_OFFSET);
            if self.discovery_only {
                return Err(unknown);
            }
            let (subsystems, host) = (&self.subsystems, &request.host.nqn);
            let target = subsystems.find(&request.subsystem).ok_or(unknown)?;
            let refusal = match &target {
                ControllerTarget::Device(subsystem) => subsystems.refusal(subsystem, host),
                _ => subsystems.access.refusal_of_all(host),
            };
            if let Some(why) = refusal {
                let (peer, subsystem) = (&link.peer, &request.subsystem);
                if subsystems.logs.refusals.permits() {
                    tracing::warn!(peer, subsystem, host, "a host was refused: {why}");
                }
                return Err(ConnectRefusal::new(StatusCode::CONNECT_INVALID_HOST));
            }
            if !target.attach(link, 0) {
                return Err(unknown);
            }
            if matches!(&target, ControllerTarget::Device(subsystem) if subsystem.is_claimed()) {
                target.detach(link);
                if subsystems.logs.refusals.permits() {
                    tracing::warn!(
                        subsystem = request.subsystem,
                        host,
                        "a host was refused: a file system of the device is mounted; unmount it \
                         first"
                    );
                }
                return Err(ConnectRefusal::new(StatusCode::CONNECT_BUSY));
            }
            if let ControllerTarget::All(_) = target {
                subsystems.watch(link);
            }
            target
        };
        let controllers = &self.subsystems.controllers;
        let Some(controller) = controllers.add(target.clone(), link, request, now) else {
            self.subsystems.unwatch(link);
            target.detach(link);
            return Err(ConnectRefusal::new(StatusCode::CONNECT_BUSY));
        };
        let subsystems = Arc::clone(&self.subsystems);
        if let ControllerTarget::All(_) = controller.target {
            controller.hide_claimed(&subsystems.devices());
        }
        Ok(AdminQueue::new(controller, subsystems, address))
    }

    /// Admits an I/O queue of a controller; it has no channel to a device yet.
    ///
    /// # Errors
    /// If there is no such controller, or it refuses the queue.
    pub(crate) fn connect_io(
        &self,
        link: &Arc<HostLink>,
        region: &Arc<Region>,
        watch: &DeviceWatch,
        request: &ConnectRequest,
    ) -> Result<IoQueue, ConnectRefusal> {
        let other = ConnectRefusal::in_data(SUBSYSTEM_OFFSET);
        if self.discovery_only {
            return Err(other);
        }
        let unknown = ConnectRefusal::in_data(CONTROLLER_OFFSET);
        let controllers = &self.subsystems.controllers;
        let controller = controllers.find(request.controller).ok_or(unknown)?;
        if controller.target.identity().is_none_or(|it| it.nqn != request.subsystem) {
            return Err(other);
        }
        if controllers.has_predecessor(&controller) {
            return Err(ConnectRefusal::new(StatusCode::CONNECT_BUSY));
        }
        let is_proved = self.subsystems.access.authentication.is_none();
        controller.open_queue(request, link, is_proved)?;
        if !controller.target.attach(link, request.queue) {
            controller.close_queue(link);
            return Err(other);
        }
        IoQueue::open(&controller, &self.subsystems, link, region, watch).inspect_err(|_| {
            controller.close_queue(link);
            controller.target.detach(link);
        })
    }
}
