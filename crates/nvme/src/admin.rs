//! The admin queue: what each of its commands answers. No I/O.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::command::{NSID_ALL, Sqe, StatusCode, admin_opcode};
use crate::controller::{Controller, ControllerTarget, QUEUES_MAX};
use crate::fabrics::DISCOVERY_NQN;
use crate::identify::{self, ControllerShape, EVENTS_MAX, Identity, cns};
use crate::log_page::{self, LogRequest, log_id};
use crate::namespace::NSID;
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
}

/// The state of an admin queue.
#[derive(Debug)]
pub(crate) struct AdminQueue {
    pub(crate) controller: Arc<Controller>,
    subsystems: Arc<Subsystems>,
    /// The address at which the host is connected.
    address: SocketAddr,
    /// Asynchronous event requests that wait.
    events: usize,
    /// The value of the feature Asynchronous Event Configuration.
    event_config: u32,
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
        AdminQueue { controller, subsystems, address, events: 0, event_config: 0, queues }
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
            // 1: the command was not aborted.
            admin_opcode::ABORT if !is_discovery => Ok(AdminAnswer::Result(1)),
            admin_opcode::ASYNC_EVENT if self.events < EVENTS_MAX => {
                self.events += 1;
                Ok(AdminAnswer::Waits)
            }
            admin_opcode::ASYNC_EVENT => Err(StatusCode::EVENT_LIMIT),
            _ => Err(StatusCode::INVALID_OPCODE),
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
        let (shape, uuid) = (&subsystem.shape, &subsystem.identity.uuid);
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

    fn log_page(&self, sqe: &Sqe) -> Result<Vec<u8>, StatusCode> {
        let request = LogRequest::parse(sqe)?;
        let page = match &self.controller.target {
            ControllerTarget::Device(subsystem) => log_page::page(&request, &subsystem.shape)?,
            ControllerTarget::Discovery if request.id == log_id::DISCOVERY => {
                let (generation, nqns) = self.subsystems.discover(&self.controller.host.nqn);
                log_page::discovery(generation, &nqns, self.address)
            }
            ControllerTarget::Discovery => return Err(StatusCode::INVALID_LOG),
        };
        request.part(&page)
    }

    fn has_write_cache(&self) -> bool {
        match &self.controller.target {
            ControllerTarget::Device(subsystem) => subsystem.shape.write_cache,
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
            feature::ASYNC_EVENTS => self.event_config = value,
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
            feature::ASYNC_EVENTS => self.event_config.into(),
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
