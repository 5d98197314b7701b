//! The admin queue: what each of its commands answers. No I/O.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::command::{NSID_ALL, Sqe, StatusCode, admin_opcode};
use crate::controller::{Controller, ControllerTarget, QUEUES_MAX};
use crate::events::{EventQueue, NoticeKind};
use crate::fabrics::DISCOVERY_NQN;
use crate::identify::{self, ControllerShape, Identity, cns};
use crate::log_page::{self, LogRequest, log_id};
use crate::namespace::{NSID, NamespaceShape};
use crate::subsystems::{Subsystem, Subsystems};

/// Features by their number (FID).
mod feature {
    pub(super) const ARBITRATION: u8 = 0x01;
    pub(super) const POWER_MANAGEMENT: u8 = 0x02;
    pub(super) const TEMPERATURE: u8 = 0x04;
    pub(super) const ERROR_RECOVERY: u8 = 0x05;
    pub(super) const WRITE_CACHE: u8 = 0x06;
    pub(super) const QUEUES: u8 = 0x07;
    pub(super) const ASYNC_EVENTS: u8 = 0x0b;
    pub(super) const KEEP_ALIVE: u8 = 0x0f;
    pub(super) const COMMAND_SETS: u8 = 0x19;
}

/// The answer to an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AdminAnswer {
    /// A completion with this result.
    Result(u64),
    /// Data, and then a completion.
    Data(Vec<u8>),
    /// No completion: the command waits for an event.
    Waits,
    /// A completion of the command of this id, which is aborted, and then one of this command.
    Aborted(u16),
}

/// The state of an admin queue.
#[derive(Debug)]
pub(crate) struct AdminQueue {
    pub(crate) controller: Arc<Controller>,
    subsystems: Arc<Subsystems>,
    /// The address at which the host is connected.
    address: SocketAddr,
    events: EventQueue,
    /// The version of the subsystem, or the generation of the table for discovery, that the queue
    /// has noted.
    noted: u64,
    /// The namespace that the queue has noted.
    shape: Option<Arc<NamespaceShape>>,
    /// Whether the namespace has changed since the host read of it.
    is_changed: bool,
    /// The I/O queues that the host was granted, 0's based, twice.
    queues: u32,
}

impl AdminQueue {
    pub(crate) fn new(
        controller: Arc<Controller>,
        subsystems: Arc<Subsystems>,
        address: SocketAddr,
    ) -> AdminQueue {
        let most = u32::from(QUEUES_MAX - 1);
        let queues = most | most << 16;
        let (kind, noted, shape) = match &controller.target {
            ControllerTarget::Discovery => (NoticeKind::Discovery, subsystems.generation(), None),
            ControllerTarget::Device(subsystem) => {
                (NoticeKind::Namespace, subsystem.version(), Some(subsystem.shape()))
            }
        };
        let events = EventQueue::new(kind);
        let is_changed = false;
        AdminQueue { controller, subsystems, address, events, noted, shape, is_changed, queues }
    }

    /// Takes a request for events that is to be completed: its command id and result.
    pub(crate) fn take_event(&mut self) -> Option<(u16, u64)> {
        self.note_changes();
        self.events.take_due()
    }

    /// Notes what has changed.
    fn note_changes(&mut self) {
        let now = match &self.controller.target {
            ControllerTarget::Discovery => self.subsystems.generation(),
            ControllerTarget::Device(subsystem) => subsystem.version(),
        };
        if now == self.noted {
            return;
        }
        self.noted = now;
        if let ControllerTarget::Device(subsystem) = &self.controller.target {
            let shape = Some(subsystem.shape());
            if shape == self.shape {
                return;
            }
            self.shape = shape;
            self.is_changed = self.controller.is_enabled();
        }
        self.events.note_change();
    }

    /// Drops events when the controller is no longer enabled.
    pub(crate) fn note_phase(&mut self) {
        if !self.controller.is_enabled() {
            self.events.reset();
            self.is_changed = false;
        }
    }

    /// Executes a command that is no fabrics command.
    ///
    /// # Errors
    /// The status of a command that fails.
    pub(crate) fn execute(&mut self, sqe: &Sqe) -> Result<AdminAnswer, StatusCode> {
        if !self.controller.is_ready() {
            return Err(StatusCode::SEQUENCE);
        }
        if sqe.is_fused() {
            return Err(StatusCode::INVALID_FIELD);
        }
        let is_discovery = self.controller.is_discovery();
        match sqe.opcode() {
            admin_opcode::IDENTIFY => self.identify(sqe).map(AdminAnswer::Data),
            admin_opcode::GET_LOG_PAGE => self.log_page(sqe).map(AdminAnswer::Data),
            admin_opcode::SET_FEATURES => self.set_feature(sqe).map(AdminAnswer::Result),
            admin_opcode::GET_FEATURES => self.feature(sqe).map(AdminAnswer::Result),
            admin_opcode::KEEP_ALIVE => Ok(AdminAnswer::Result(0)),
            admin_opcode::ABORT if !is_discovery => Ok(self.abort(sqe)),
            admin_opcode::ASYNC_EVENT => {
                self.events.request(sqe.cid()).map(|()| AdminAnswer::Waits)
            }
            _ => Err(StatusCode::INVALID_OPCODE),
        }
    }

    /// Requests for events are the only commands of this queue that wait. Those of an I/O queue
    /// belong to another thread, and are not aborted.
    fn abort(&mut self, sqe: &Sqe) -> AdminAnswer {
        let (queue, cid) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) as u16);
        match queue == 0 && self.events.abort(cid) {
            true => AdminAnswer::Aborted(cid),
            // 1: the command was not aborted.
            false => AdminAnswer::Result(1),
        }
    }

    fn identify(&self, sqe: &Sqe) -> Result<Vec<u8>, StatusCode> {
        let structure = sqe.dword(10) as u8;
        let subsystem = match &self.controller.target {
            ControllerTarget::Device(subsystem) => subsystem,
            ControllerTarget::Discovery if structure == cns::CONTROLLER => {
                let nqn = DISCOVERY_NQN.to_owned();
                let identity = Identity { nqn, serial: "discovery".to_owned(), uuid: [0; 16] };
                let id = self.controller.id;
                let shape = ControllerShape { id, identity: &identity, namespace: None };
                return Ok(identify::controller(&shape));
            }
            ControllerTarget::Discovery => return Err(StatusCode::INVALID_FIELD),
        };
        self.identify_device(subsystem, structure, sqe)
    }

    fn identify_device(
        &self,
        subsystem: &Subsystem,
        structure: u8,
        sqe: &Sqe,
    ) -> Result<Vec<u8>, StatusCode> {
        let (shape, uuid) = (&*subsystem.shape(), &subsystem.identity.uuid);
        let (set, nsid) = ((sqe.dword(11) >> 24) as u8, sqe.nsid());
        let is_shown = self.controller.shows_namespace();
        let list = |is_active| match nsid {
            0xffff_fffe | NSID_ALL => Err(StatusCode::INVALID_NAMESPACE),
            _ => Ok(identify::active_namespaces(is_active, nsid)),
        };
        match structure {
            cns::CONTROLLER => Ok(identify::controller(&ControllerShape {
                id: self.controller.id,
                identity: &subsystem.identity,
                namespace: Some(shape),
            })),
            cns::ACTIVE_NAMESPACES => list(is_shown),
            cns::ACTIVE_OF_SET => list(is_shown && set == identify::command_set(shape)),
            cns::CONTROLLER_OF_SET => identify::controller_of_set(shape, set),
            cns::COMMAND_SETS => Ok(identify::command_sets(shape)),
            cns::NAMESPACE
            | cns::DESCRIPTORS
            | cns::NAMESPACE_OF_SET
            | cns::NAMESPACE_INDEPENDENT
                if nsid != NSID || !is_shown =>
            {
                Err(StatusCode::INVALID_NAMESPACE)
            }
            cns::NAMESPACE => Ok(identify::namespace(shape, uuid)),
            cns::DESCRIPTORS => Ok(identify::descriptors(shape, uuid)),
            cns::NAMESPACE_OF_SET => identify::namespace_of_set(shape, set),
            cns::NAMESPACE_INDEPENDENT => Ok(identify::namespace_independent(shape)),
            _ => Err(StatusCode::INVALID_FIELD),
        }
    }

    fn log_page(&mut self, sqe: &Sqe) -> Result<Vec<u8>, StatusCode> {
        let request = LogRequest::parse(sqe)?;
        // Before the page is made: a read of the log must not leave an event for what it had.
        self.note_changes();
        let part = match &self.controller.target {
            ControllerTarget::Device(subsystem) => {
                request.part(&log_page::page(&request, &subsystem.shape(), self.is_changed)?)?
            }
            ControllerTarget::Discovery if request.id == log_id::DISCOVERY => {
                let host = &self.controller.host.nqn;
                let (generation, found, devices) = self.subsystems.discover(host, self.address);
                let nqns: Vec<_> = found.iter().map(|it| &*it.identity.nqn).collect();
                log_page::discovery(&request, generation, &nqns, (devices, self.address))?
            }
            ControllerTarget::Discovery => return Err(StatusCode::INVALID_LOG),
        };
        if !request.retain {
            self.note_log_read(request.id);
        }
        Ok(part)
    }

    fn note_log_read(&mut self, id: u8) {
        match id {
            log_id::CHANGED_NAMESPACES => self.is_changed = false,
            log_id::DISCOVERY => {}
            _ => return,
        }
        self.events.note_log_read();
    }

    fn has_write_cache(&self) -> bool {
        match &self.controller.target {
            ControllerTarget::Device(subsystem) => subsystem.shape().write_cache,
            ControllerTarget::Discovery => false,
        }
    }

    fn set_feature(&mut self, sqe: &Sqe) -> Result<u64, StatusCode> {
        let (id, value) = (sqe.dword(10) as u8, sqe.dword(11));
        if sqe.dword(10) >> 31 != 0 {
            return Err(StatusCode::NOT_SAVEABLE);
        }
        match id {
            feature::KEEP_ALIVE => self.controller.set_keep_alive_ms(value),
            feature::ASYNC_EVENTS => self.events.set_config(value)?,
            _ if self.controller.is_discovery() => return Err(StatusCode::INVALID_FIELD),
            feature::QUEUES => {
                let (submission, completion) = (value & 0xffff, value >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return Err(StatusCode::INVALID_FIELD);
                }
                let most = u32::from(QUEUES_MAX - 1);
                self.queues = submission.min(most) | completion.min(most) << 16;
                return Ok(self.queues.into());
            }
            // The cache cannot be switched off.
            feature::WRITE_CACHE if value & 1 == u32::from(self.has_write_cache()) => {}
            feature::WRITE_CACHE => return Err(StatusCode::NOT_CHANGEABLE),
            feature::COMMAND_SETS if value & 0x1ff == 0 => {}
            _ => return Err(StatusCode::INVALID_FIELD),
        }
        Ok(0)
    }

    fn feature(&self, sqe: &Sqe) -> Result<u64, StatusCode> {
        let (id, select) = (sqe.dword(10) as u8, sqe.dword(10) >> 8 & 7);
        let is_settable = matches!(id, feature::KEEP_ALIVE | feature::ASYNC_EVENTS)
            || (id == feature::QUEUES && !self.controller.is_discovery());
        let value = match id {
            feature::KEEP_ALIVE => self.controller.keep_alive_ms().into(),
            feature::ASYNC_EVENTS => self.events.config().into(),
            _ if self.controller.is_discovery() => return Err(StatusCode::INVALID_FIELD),
            feature::QUEUES => self.queues.into(),
            feature::WRITE_CACHE => u64::from(self.has_write_cache()),
            feature::ARBITRATION
            | feature::POWER_MANAGEMENT
            | feature::TEMPERATURE
            | feature::ERROR_RECOVERY
            | feature::COMMAND_SETS => 0,
            _ => return Err(StatusCode::INVALID_FIELD),
        };
        match select {
            // Current.
            0 => Ok(value),
            // Default.
            1 => Ok(0),
            // Capabilities: changeable.
            3 => Ok(u64::from(is_settable) << 2),
            _ => Err(StatusCode::INVALID_FIELD),
        }
    }
}
