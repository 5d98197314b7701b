//! The admin queue: what each of its commands answers. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use crate::all_devices::AllDevices;
use crate::command::{NSID_ALL, Sqe, StatusCode, admin_opcode};
use crate::controller::{Controller, ControllerTarget, QUEUES_MAX};
use crate::events::{EventQueue, NoticeKind};
use crate::fabrics::DISCOVERY_NQN;
use crate::identify::{self, ControllerFeatures, ControllerShape, Identity, cns};
use crate::log_page::{self, LogRequest, log_id};
use crate::namespace::{DATA_EXPONENT, NSID, NSID_MAX, NamespaceShape};
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

/// Number of Queues before a host asks for less: submission and completion queues, each 0's based.
const QUEUES_OFFERED: u32 = (QUEUES_MAX as u32 - 1) << 16 | (QUEUES_MAX as u32 - 1);

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

/// A namespace as it was noted: the device, by the id of its subsystem, and its shape.
type NotedNamespace = (u64, Arc<NamespaceShape>);

/// The state of an admin queue.
#[derive(Debug)]
pub(crate) struct AdminQueue {
    pub(crate) controller: Arc<Controller>,
    subsystems: Arc<Subsystems>,
    /// The address at which the host is connected.
    address: SocketAddr,
    events: EventQueue,
    /// The version of what the controller gives access to that the queue has noted.
    noted: u64,
    /// The namespaces that the queue has noted, by their numbers.
    namespaces: BTreeMap<u32, NotedNamespace>,
    /// The namespaces that have changed since the host read of them.
    changed: BTreeSet<u32>,
    /// The I/O queues that the host was granted, 0's based, twice.
    queues: u32,
}

impl AdminQueue {
    pub(crate) fn new(
        controller: Arc<Controller>,
        subsystems: Arc<Subsystems>,
        address: SocketAddr,
    ) -> AdminQueue {
        let kind = match controller.is_discovery() {
            true => NoticeKind::Discovery,
            false => NoticeKind::Namespace,
        };
        let mut admin = AdminQueue {
            controller,
            subsystems,
            address,
            events: EventQueue::new(kind),
            noted: 0,
            namespaces: BTreeMap::new(),
            changed: BTreeSet::new(),
            queues: QUEUES_OFFERED,
        };
        admin.noted = admin.version();
        admin.namespaces = admin.note_namespaces();
        admin
    }

    /// The version of what the controller gives access to.
    fn version(&self) -> u64 {
        match &self.controller.target {
            ControllerTarget::Discovery => self.subsystems.generation(),
            ControllerTarget::Device(subsystem) => subsystem.version(),
            ControllerTarget::All(_) => self.subsystems.version(),
        }
    }

    /// The devices and their numbers, in order, also those that the host cannot use because it
    /// did not enable all command sets.
    fn devices(&self) -> Vec<(u32, Arc<Subsystem>)> {
        match &self.controller.target {
            ControllerTarget::Discovery => Vec::new(),
            ControllerTarget::Device(subsystem) => {
                vec![(subsystem.identity.nsid, Arc::clone(subsystem))]
            }
            ControllerTarget::All(_) => {
                let found = AllDevices::namespaces(&self.subsystems, &self.controller);
                found.into_iter().map(|subsystem| (subsystem.nsid, subsystem)).collect()
            }
        }
    }

    /// The device of a namespace that the host can use.
    fn device(&self, nsid: u32) -> Option<Arc<Subsystem>> {
        let found = match &self.controller.target {
            ControllerTarget::Discovery => None,
            ControllerTarget::Device(subsystem) => {
                (nsid == subsystem.identity.nsid).then(|| Arc::clone(subsystem))
            }
            ControllerTarget::All(_) => AllDevices::find(&self.subsystems, nsid, &self.controller),
        };
        found.filter(|subsystem| self.controller.shows(&subsystem.shape()))
    }

    fn note_namespaces(&self) -> BTreeMap<u32, NotedNamespace> {
        let devices = self.devices().into_iter();
        devices.map(|(nsid, subsystem)| (nsid, (subsystem.id, subsystem.shape()))).collect()
    }

    /// Takes a request for events that is to be completed: its command id and result.
    pub(crate) fn take_event(&mut self) -> Option<(u16, u64)> {
        self.note_changes();
        self.events.take_due()
    }

    /// Notes what has changed.
    fn note_changes(&mut self) {
        let now = self.version();
        if now == self.noted {
            return;
        }
        self.noted = now;
        if !self.controller.is_discovery() {
            let namespaces = self.note_namespaces();
            if namespaces == self.namespaces {
                return;
            }
            let before = std::mem::replace(&mut self.namespaces, namespaces);
            let all = before.keys().chain(self.namespaces.keys());
            let changed = all.filter(|nsid| before.get(nsid) != self.namespaces.get(nsid));
            if self.controller.is_enabled() {
                self.changed.extend(changed);
            }
        }
        self.events.note_change();
    }

    /// Drops events when the controller is no longer enabled.
    pub(crate) fn note_phase(&mut self) {
        if !self.controller.is_enabled() {
            self.events.reset();
            self.changed.clear();
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

    /// Whether a command looks at all devices of the table.
    pub(crate) fn scans_devices(&self, sqe: &Sqe) -> bool {
        let scans = match sqe.opcode() {
            admin_opcode::IDENTIFY | admin_opcode::GET_LOG_PAGE => true,
            admin_opcode::GET_FEATURES | admin_opcode::SET_FEATURES => {
                sqe.dword(10) as u8 == feature::WRITE_CACHE
            }
            _ => false,
        };
        scans && !matches!(self.controller.target, ControllerTarget::Device(_))
    }

    /// Requests for events are the only commands of this queue that wait. Those of an I/O queue
    /// belong to another connection, and are not aborted.
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
        let features = self.features();
        if structure == cns::CONTROLLER {
            return Ok(self.identify_controller(features));
        }
        let features = features.ok_or(StatusCode::INVALID_FIELD)?;
        let (set, nsid) = ((sqe.dword(11) >> 24) as u8, sqe.nsid());
        let device = || self.device(nsid).ok_or(StatusCode::INVALID_NAMESPACE);
        let is_of_one = matches!(
            structure,
            cns::NAMESPACE | cns::NAMESPACE_OF_SET | cns::NAMESPACE_INDEPENDENT
        );
        if is_of_one && self.device(nsid).is_none() && self.controller.is_valid(nsid) {
            return Ok(identify::inactive_namespace());
        }
        match structure {
            cns::ACTIVE_NAMESPACES => self.list_namespaces(nsid, None),
            cns::ACTIVE_OF_SET if !identify::is_command_set(set) => Err(StatusCode::INVALID_FIELD),
            cns::ACTIVE_OF_SET => self.list_namespaces(nsid, Some(set)),
            cns::CONTROLLER_OF_SET => identify::controller_of_set(&features, set),
            cns::COMMAND_SETS => Ok(identify::command_sets(&features)),
            cns::NAMESPACE => {
                let device = device()?;
                Ok(identify::namespace(&device.shape(), &device.identity.uuid))
            }
            cns::DESCRIPTORS => {
                let device = device()?;
                Ok(identify::descriptors(&device.shape(), &device.identity.uuid))
            }
            cns::NAMESPACE_OF_SET => identify::namespace_of_set(&device()?.shape(), set),
            cns::NAMESPACE_INDEPENDENT => Ok(identify::namespace_independent(&device()?.shape())),
            _ => Err(StatusCode::INVALID_FIELD),
        }
    }

    /// The features of the controller; `None` for discovery.
    fn features(&self) -> Option<ControllerFeatures> {
        match &self.controller.target {
            ControllerTarget::Discovery => None,
            ControllerTarget::Device(subsystem) => {
                Some(ControllerFeatures::of(&subsystem.shape(), subsystem.identity.nsid))
            }
            ControllerTarget::All(_) => {
                let shapes = self.devices().into_iter().map(|(_, subsystem)| subsystem.shape());
                let appends = shapes.filter_map(|it| Some(it.zones.as_ref()?.append_exponent));
                let shortest = appends.min().unwrap_or(DATA_EXPONENT);
                Some(ControllerFeatures::of_many(NSID_MAX, shortest))
            }
        }
    }

    fn identify_controller(&self, features: Option<ControllerFeatures>) -> Vec<u8> {
        let (nqn, serial) = (DISCOVERY_NQN.to_owned(), "discovery".to_owned());
        let discovery = Identity { nqn, serial, uuid: [0; 16], nsid: NSID };
        let identity = self.controller.target.identity().unwrap_or(&discovery);
        identify::controller(&ControllerShape { id: self.controller.id, identity, features })
    }

    /// The namespaces above `after` that the host can use, those of a command set if one is given.
    fn list_namespaces(&self, after: u32, set: Option<u8>) -> Result<Vec<u8>, StatusCode> {
        if matches!(after, 0xffff_fffe | NSID_ALL) {
            return Err(StatusCode::INVALID_NAMESPACE);
        }
        let listed = self.devices().into_iter().filter_map(|(nsid, subsystem)| {
            let shape = subsystem.shape();
            let is_of_set = set.is_none_or(|set| set == identify::command_set(&shape));
            (is_of_set && self.controller.shows(&shape)).then_some(nsid)
        });
        Ok(identify::namespace_list(listed, after))
    }

    fn log_page(&mut self, sqe: &Sqe) -> Result<Vec<u8>, StatusCode> {
        let request = LogRequest::parse(sqe)?;
        // Before the page is made: a read of the log must not leave an event for what it had.
        self.note_changes();
        let part = match self.features() {
            Some(_) if request.id == log_id::HEALTH => {
                let devices = self.devices();
                let totals: Vec<_> = devices.iter().map(|(_, device)| device.totals()).collect();
                request.part(&log_page::health(&totals))?
            }
            Some(features) => request.part(&log_page::page(&request, &features, &self.changed)?)?,
            None if request.id == log_id::DISCOVERY => {
                let host = &self.controller.host.nqn;
                let (generation, found, devices) = self.subsystems.discover(host, self.address);
                // A host that used a device by two subsystems would see it twice.
                let nqns = match self.subsystems.all_nqn() {
                    Some(all) => found.iter().take(1).map(|_| all).collect(),
                    None => found.iter().map(|it| &*it.identity.nqn).collect::<Vec<_>>(),
                };
                log_page::discovery(&request, generation, &nqns, (devices, self.address))?
            }
            None => return Err(StatusCode::INVALID_LOG),
        };
        if !request.retain {
            self.note_log_read(request.id);
        }
        Ok(part)
    }

    fn note_log_read(&mut self, id: u8) {
        match id {
            log_id::CHANGED_NAMESPACES => self.changed.clear(),
            log_id::DISCOVERY => {}
            _ => return,
        }
        self.events.note_log_read();
    }

    fn has_write_cache(&self) -> bool {
        self.features().is_some_and(|features| features.write_cache)
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
            feature::QUEUES if self.controller.has_proved_queues() => {
                return Err(StatusCode::SEQUENCE);
            }
            feature::QUEUES => {
                let (submission, completion) = (value & 0xffff, value >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return Err(StatusCode::INVALID_FIELD);
                }
                let most = u32::from(QUEUES_MAX - 1);
                self.queues = submission.min(most) | completion.min(most) << 16;
                return Ok(self.queues.into());
            }
            // NVM Express Base Specification 2.2, 5.1.25.1.4: the feature is for controllers with a
            // cache.
            feature::WRITE_CACHE if !self.has_write_cache() => {
                return Err(StatusCode::INVALID_FIELD);
            }
            // The cache cannot be switched off.
            feature::WRITE_CACHE if value & 1 == 1 => {}
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
        let (current, default) = match id {
            feature::KEEP_ALIVE => (self.controller.keep_alive_ms(), 0),
            feature::ASYNC_EVENTS => (self.events.config(), 0),
            _ if self.controller.is_discovery() => return Err(StatusCode::INVALID_FIELD),
            feature::QUEUES => (self.queues, QUEUES_OFFERED),
            // As in `set_feature`.
            feature::WRITE_CACHE if !self.has_write_cache() => {
                return Err(StatusCode::INVALID_FIELD);
            }
            feature::WRITE_CACHE => (1, 1),
            feature::ARBITRATION
            | feature::POWER_MANAGEMENT
            | feature::TEMPERATURE
            | feature::ERROR_RECOVERY
            | feature::COMMAND_SETS => (0, 0),
            _ => return Err(StatusCode::INVALID_FIELD),
        };
        match select {
            // Current.
            0 => Ok(current.into()),
            // Default; and saved, which for a feature that cannot be saved is the default (NVM
            // Express Base Specification 2.1, Figure 192).
            1 | 2 => Ok(default.into()),
            // Capabilities: changeable, for the whole controller, and not saveable.
            3 => Ok(u64::from(is_settable) << 2),
            _ => Err(StatusCode::INVALID_FIELD),
        }
    }
}
