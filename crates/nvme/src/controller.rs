//! A controller: the association of one host with a subsystem, from the Connect of its admin queue
//! to the end of that connection.
//!
//! ```text
//!            enable (CC.EN = 1)              shut down (CC.SHN)
//! DISABLED ─────────────────────▸ ENABLED ──────────────────────▸ SHUT DOWN
//!   ▴   │ enable with settings       │  ▴                            │
//!   │   │ that are not supported     │  └── disable, then enable ────┤
//!   │   ▾                            │ disable (CC.EN = 0)           │
//!   │  FAILED                        ▾                               ▾
//!   └──────────────────────────── DISABLED ◂─────────────────────────┘
//!
//! every state ── close: the admin connection ended, or the host fell silent ──▸ CLOSED
//! ```
//!
//! 1. I/O queues connect in the state enabled only. Leaving it cuts their connections.
//! 2. A queue number belongs to the connection that has authenticated for it. Until then any number
//!    of connections that claim to be the host's may ask for it.
//! 3. A host's next controller is not ready, and admits no I/O queue, while I/O queues of a closed
//!    one have not ended, nor while connections of an earlier one have not received what the host
//!    had sent when it connected again, which may be commands and the end of the connection. A
//!    queue whose last commands are for removed devices has ended in this sense.
//! 4. When the target ends the connection of a queue, all queues of the controller drain. No I/O
//!    queue ends before all of them have given their answers to their sockets, and the admin queue
//!    ends last.
//! 5. CSTS.RDY returns to 0, and CSTS.SHST becomes complete, when the last connection of an I/O
//!    queue has ended and so has the last command of the host, except for removed devices.
#![allow(clippy::disallowed_types)] // Control plane: no lock is taken for an I/O.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_sync::atomics::{AtomicU64, Ordering};

use crate::all_devices::AllDevices;
use crate::command::StatusCode;
use crate::fabrics::{
    self, Configuration, ConnectRefusal, ConnectRequest, HOST_OFFSET, HostIdentity,
    PropertyRequest, keep_alive_rounded, property,
};
use crate::host_link::HostLink;
use crate::identify::Identity;
use crate::namespace::{NSID_MAX, NamespaceShape};
use crate::subsystems::Subsystem;

/// The most I/O queues of a controller.
pub const QUEUES_MAX: u16 = 32;

/// The time for which a host may be silent after its keep-alive time-out.
const KEEP_ALIVE_GRACE: Duration = Duration::from_secs(1);

/// How long a controller may be silent that has no keep-alive time-out and is not enabled, or is a
/// discovery controller.
const IDLE_MAX: Duration = Duration::from_secs(120);

/// CSTS.RDY.
const STATUS_READY: u32 = 1;

/// What a controller gives access to.
#[derive(Clone, Debug)]
pub(crate) enum ControllerTarget {
    /// The discovery log.
    Discovery,
    /// A device.
    Device(Arc<Subsystem>),
    /// All devices.
    All(Arc<AllDevices>),
}

impl ControllerTarget {
    /// The identity of the subsystem; `None` for discovery.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        match self {
            ControllerTarget::Discovery => None,
            ControllerTarget::Device(subsystem) => Some(&subsystem.identity),
            ControllerTarget::All(all) => Some(&all.identity),
        }
    }

    /// Adds the connection of a queue; `false` if the subsystem is being removed.
    pub(crate) fn attach(&self, link: &Arc<HostLink>, queue: u16) -> bool {
        match self {
            ControllerTarget::Discovery => {}
            ControllerTarget::Device(subsystem) => return subsystem.attach(link, queue),
            ControllerTarget::All(all) => all.attach(link, queue),
        }
        true
    }

    /// Removes a connection.
    pub(crate) fn detach(&self, link: &Arc<HostLink>) {
        match self {
            ControllerTarget::Discovery => {}
            ControllerTarget::Device(subsystem) => subsystem.detach(link),
            ControllerTarget::All(all) => all.detach(link),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ControllerPhase {
    Disabled,
    Enabled,
    ShutDown,
    Failed,
    Closed,
}

/// The connection of an I/O queue.
#[derive(Debug)]
struct QueueLink {
    number: u16,
    link: Arc<HostLink>,
    /// Whether its host has authenticated, or does not have to.
    is_proved: bool,
    /// Whether it drains, and has answered all its commands.
    has_answered: bool,
}

impl QueueLink {
    /// Whether it drains, and its host may get answers.
    fn is_draining(&self) -> bool {
        self.is_proved && self.link.is_end_requested()
    }
}

#[derive(Debug)]
struct ControllerState {
    phase: ControllerPhase,
    config: Configuration,
    /// The connections of I/O queues.
    queues: Vec<QueueLink>,
    keep_alive_ms: u32,
    /// The devices, by the ids of their subsystems, of which a file system was mounted when the
    /// host connected, and has been since.
    hidden: Vec<u64>,
}

/// A controller, shared by its connections, which may belong to several threads.
#[derive(Debug)]
pub(crate) struct Controller {
    pub(crate) id: u16,
    pub(crate) target: ControllerTarget,
    pub(crate) host: HostIdentity,
    /// The number of controllers that were added before this one, and 1.
    serial: u64,
    /// The connection of the admin queue.
    link: Arc<HostLink>,
    state: Mutex<ControllerState>,
    opened: Instant,
    /// The time at which the host last sent anything on any queue, in milliseconds after `opened`.
    heard_ms: AtomicU64,
}

impl Controller {
    fn new(
        (id, serial): (u16, u64),
        target: ControllerTarget,
        link: &Arc<HostLink>,
        request: &ConnectRequest,
        now: Instant,
    ) -> Controller {
        let state = ControllerState {
            phase: ControllerPhase::Disabled,
            config: Configuration::default(),
            queues: Vec::new(),
            keep_alive_ms: keep_alive_rounded(request.keep_alive_ms),
            hidden: Vec::new(),
        };
        Controller {
            id,
            target,
            host: request.host.clone(),
            serial,
            link: Arc::clone(link),
            state: Mutex::new(state),
            opened: now,
            heard_ms: AtomicU64::new(0),
        }
    }

    fn state(&self) -> MutexGuard<'_, ControllerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_discovery(&self) -> bool {
        matches!(self.target, ControllerTarget::Discovery)
    }

    /// Notes that the host has sent something.
    pub(crate) fn note_heard(&self, now: Instant) {
        let since = now.saturating_duration_since(self.opened);
        // Relaxed: a time stamp that publishes no other data. Another queue, on another thread, may
        // have stored a later one.
        self.heard_ms.fetch_max(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// The time until which the host has to send something.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = self.state();
        let heard = self.opened + Duration::from_millis(self.heard_ms.load(Ordering::Relaxed));
        if state.keep_alive_ms > 0 {
            let silent_max = Duration::from_millis(state.keep_alive_ms.into()) + KEEP_ALIVE_GRACE;
            return Some(heard + silent_max);
        }
        let may_idle = state.phase == ControllerPhase::Enabled && !self.is_discovery();
        (!may_idle).then(|| heard + IDLE_MAX)
    }

    /// Whether the host can use a namespace: a zoned one only if it enabled all command sets.
    pub(crate) fn shows(&self, shape: &NamespaceShape) -> bool {
        shape.zones.is_none() || self.state().config.has_all_sets()
    }

    /// Whether there can be a namespace of this number (NN).
    pub(crate) fn is_valid(&self, nsid: u32) -> bool {
        let most = match &self.target {
            ControllerTarget::Discovery => 0,
            ControllerTarget::Device(subsystem) => subsystem.identity.nsid,
            ControllerTarget::All(_) => NSID_MAX,
        };
        (1..=most).contains(&nsid)
    }

    /// Hides those devices from the host whose file system is mounted. To be called after
    /// [`ControllerTarget::attach`], and again after an authentication: a mount that comes later
    /// counts the host as a client.
    pub(crate) fn hide_claimed(&self, devices: &[Arc<Subsystem>]) {
        let claimed = devices.iter().filter(|device| device.is_claimed()).map(|device| device.id);
        self.state().hidden = claimed.collect();
    }

    /// Whether a device is hidden from the host; no longer once its file system is not mounted.
    pub(crate) fn hides(&self, device: &Subsystem) -> bool {
        let mut state = self.state();
        let Some(at) = state.hidden.iter().position(|id| *id == device.id) else { return false };
        let is_hidden = device.is_claimed();
        if !is_hidden {
            state.hidden.swap_remove(at);
        }
        is_hidden
    }

    /// Whether the controller executes commands other than those for fabrics.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state();
        match state.phase {
            ControllerPhase::Enabled => true,
            ControllerPhase::ShutDown => state.config.is_enabled(),
            ControllerPhase::Disabled | ControllerPhase::Failed | ControllerPhase::Closed => false,
        }
    }

    /// Whether the controller sends events.
    pub(crate) fn is_enabled(&self) -> bool {
        self.state().phase == ControllerPhase::Enabled
    }

    /// The keep-alive time-out, in milliseconds.
    pub(crate) fn keep_alive_ms(&self) -> u32 {
        self.state().keep_alive_ms
    }

    pub(crate) fn set_keep_alive_ms(&self, ms: u32) {
        self.state().keep_alive_ms = keep_alive_rounded(ms);
    }

    /// Answers a Property Get.
    ///
    /// # Errors
    /// If there is no such property, or it has another size.
    pub(crate) fn property(
        &self,
        request: &PropertyRequest,
        controllers: &Controllers,
    ) -> Result<u64, StatusCode> {
        let value = match request.offset {
            property::CAP => fabrics::capabilities(),
            property::VS => fabrics::version(),
            property::CC => self.state().config.0.into(),
            property::CSTS if controllers.has_predecessor(self) => {
                (self.status() & !STATUS_READY).into()
            }
            property::CSTS => self.status().into(),
            property::NSSR | property::CRTO => 0,
            _ => return Err(StatusCode::INVALID_FIELD),
        };
        if request.is_long == (request.offset == property::CAP) {
            Ok(value)
        } else {
            Err(StatusCode::INVALID_FIELD)
        }
    }

    /// The controller status property.
    fn status(&self) -> u32 {
        const FAILED: u32 = 2;
        let state = self.state();
        let has_queues = !state.queues.is_empty();
        match state.phase {
            ControllerPhase::Disabled => u32::from(has_queues),
            ControllerPhase::Enabled => STATUS_READY,
            ControllerPhase::ShutDown => {
                let is_ready = state.config.is_enabled() || has_queues;
                u32::from(is_ready) | if has_queues { 1 << 2 } else { 2 << 2 }
            }
            ControllerPhase::Failed | ControllerPhase::Closed => FAILED,
        }
    }

    /// Executes a Property Set.
    ///
    /// # Errors
    /// If the property cannot be set.
    pub(crate) fn set_property(&self, request: &PropertyRequest) -> Result<(), StatusCode> {
        if request.offset != property::CC || request.is_long {
            return Err(StatusCode::INVALID_FIELD);
        }
        let config = Configuration(request.value as u32);
        let mut state = self.state();
        let is_supported = config.is_supported(self.is_discovery());
        let phase = match state.phase {
            ControllerPhase::Failed if config.is_enabled() => ControllerPhase::Failed,
            ControllerPhase::Closed => ControllerPhase::Closed,
            _ if config.asks_shutdown() => ControllerPhase::ShutDown,
            _ if !config.is_enabled() => ControllerPhase::Disabled,
            // Until it is disabled (NVM Express Base Specification 2.0, 3.6.1).
            ControllerPhase::ShutDown => ControllerPhase::ShutDown,
            ControllerPhase::Disabled if !is_supported => ControllerPhase::Failed,
            _ => ControllerPhase::Enabled,
        };
        state.config = config;
        state.enter(phase);
        Ok(())
    }

    /// Admits the connection of an I/O queue, whose host `is_proved` or has to authenticate.
    ///
    /// # Errors
    /// If the controller is not enabled, the host is another one, or there can be no such queue.
    pub(crate) fn open_queue(
        &self,
        request: &ConnectRequest,
        link: &Arc<HostLink>,
        is_proved: bool,
    ) -> Result<(), ConnectRefusal> {
        // A host identifier of zeros in the Connect of an I/O queue says nothing (NVM Express Base
        // Specification 2.1, Figure 546).
        let HostIdentity { id, nqn } = &request.host;
        if *nqn != self.host.nqn || (*id != self.host.id && *id != [0; 16]) {
            return Err(ConnectRefusal::in_data(HOST_OFFSET));
        }
        if self.is_discovery() || request.queue > QUEUES_MAX {
            return Err(ConnectRefusal::in_command(42));
        }
        let mut state = self.state();
        if state.phase != ControllerPhase::Enabled {
            return Err(ConnectRefusal::new(StatusCode::CONNECT_BUSY));
        }
        let number = request.queue;
        if state.queues.iter().any(|queue| queue.is_proved && queue.number == number) {
            return Err(ConnectRefusal::new(StatusCode::SEQUENCE));
        }
        let (link, has_answered) = (Arc::clone(link), false);
        state.queues.push(QueueLink { number, link, is_proved, has_answered });
        Ok(())
    }

    /// Notes that the host of an I/O queue has authenticated on this connection; `false` if another
    /// connection has the number of the queue.
    pub(crate) fn prove_queue(&self, link: &Arc<HostLink>) -> bool {
        let mut state = self.state();
        let is_this = |queue: &QueueLink| Arc::ptr_eq(&queue.link, link);
        let Some(at) = state.queues.iter().position(is_this) else { return false };
        let number = state.queues[at].number;
        let is_other = |queue: &QueueLink| queue.number == number && !is_this(queue);
        if state.queues.iter().any(|queue| queue.is_proved && is_other(queue)) {
            return false;
        }
        state.queues[at].is_proved = true;
        true
    }

    /// Whether the connection of an I/O queue has not ended.
    fn has_queues(&self) -> bool {
        !self.state().queues.is_empty()
    }

    /// Whether the host has an I/O queue.
    pub(crate) fn has_proved_queues(&self) -> bool {
        self.state().queues.iter().any(|queue| queue.is_proved)
    }

    /// The NQN of the subsystem; `None` for discovery.
    fn nqn(&self) -> Option<&str> {
        self.target.identity().map(|identity| &*identity.nqn)
    }

    /// Whether it associates the same host with the same subsystem.
    fn is_of_host(&self, other: &Controller) -> bool {
        self.host == other.host && self.nqn() == other.nqn()
    }

    /// Notes that the connection of an I/O queue has ended, and wakes those that wait for that.
    pub(crate) fn close_queue(&self, link: &Arc<HostLink>) {
        let mut state = self.state();
        state.queues.retain(|queue| !Arc::ptr_eq(&queue.link, link));
        state.links(&self.link).filter(|it| it.is_end_requested()).for_each(|it| it.wake.raise());
    }

    /// Asks the connections of all queues to drain. One that drains without the others would end
    /// the association for the host.
    pub(crate) fn drain(&self) {
        let state = self.state();
        state.links(&self.link).filter(|it| !it.is_end_requested()).for_each(|it| it.request_end());
    }

    /// Whether an I/O queue drains that has not ended.
    pub(crate) fn has_draining_queues(&self) -> bool {
        self.state().queues.iter().any(QueueLink::is_draining)
    }

    /// Notes that an I/O queue that drains has answered all its commands. `true` if all that drain
    /// have; then those that wait for this one are woken.
    pub(crate) fn note_answered(&self, link: &Arc<HostLink>) -> bool {
        let mut state = self.state();
        let own = state.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.link, link));
        let is_new = own.is_some_and(|own| !std::mem::replace(&mut own.has_answered, true));
        if state.queues.iter().any(|queue| queue.is_draining() && !queue.has_answered) {
            return false;
        }
        if is_new {
            let answered = state.queues.iter().filter(|queue| queue.has_answered);
            answered.for_each(|queue| queue.link.wake.raise());
        }
        true
    }

    /// Asks the connections that have the host's trust to probe their sockets before the
    /// association of a serial number begins. One that has not proved its host can execute nothing,
    /// and must not delay it.
    fn ask_to_probe(&self, serial: u64) {
        let state = self.state();
        let links = state.links(&self.link).filter(|link| link.role.get().is_some());
        links.for_each(|link| link.ask_to_probe(serial));
    }

    /// Whether a connection owes a probe of its socket before the association of a serial number.
    fn owes_probe(&self, serial: u64) -> bool {
        self.state().links(&self.link).any(|link| link.owes_probe(serial))
    }

    /// Ends the controller and cuts the connections of its I/O queues.
    fn close(&self) {
        self.state().enter(ControllerPhase::Closed);
    }
}

impl ControllerState {
    /// The connections of all queues; `admin` is that of the admin queue.
    fn links<'a>(&'a self, admin: &'a Arc<HostLink>) -> impl Iterator<Item = &'a Arc<HostLink>> {
        self.queues.iter().map(|queue| &queue.link).chain([admin])
    }

    fn enter(&mut self, phase: ControllerPhase) {
        self.phase = phase;
        if phase != ControllerPhase::Enabled {
            self.queues.iter().for_each(|queue| queue.link.cut());
        }
    }
}

/// The controllers of all servers, by their ids: the servers have the same subsystems, and a
/// controller's id is unique in its subsystem.
#[derive(Debug, Default)]
pub(crate) struct Controllers {
    table: Mutex<ControllerTable>,
}

#[derive(Debug, Default)]
struct ControllerTable {
    /// In the order in which they were added.
    controllers: Vec<Arc<Controller>>,
    /// Closed ones whose I/O queues have not ended.
    ending: Vec<Arc<Controller>>,
    last_id: u16,
    last_serial: u64,
}

impl Controllers {
    /// The ids above this one are reserved.
    const ID_MAX: u16 = 0xffef;

    fn table(&self) -> MutexGuard<'_, ControllerTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new controller with an id that no other one has; `None` if all ids are taken. Asks the
    /// connections of the host's other controllers to receive what the host has sent on them.
    pub(crate) fn add(
        &self,
        target: ControllerTarget,
        link: &Arc<HostLink>,
        request: &ConnectRequest,
        now: Instant,
    ) -> Option<Arc<Controller>> {
        let mut table = self.table();
        if table.controllers.len() + table.ending.len() >= Controllers::ID_MAX.into() {
            return None;
        }
        loop {
            table.last_id = table.last_id % Controllers::ID_MAX + 1;
            let id = table.last_id;
            let mut others = table.controllers.iter().chain(&table.ending);
            if others.all(|other| other.id != id) {
                table.last_serial += 1;
                let numbers = (id, table.last_serial);
                let controller = Arc::new(Controller::new(numbers, target, link, request, now));
                if !controller.is_discovery() {
                    let of_host = table.controllers.iter().filter(|it| it.is_of_host(&controller));
                    of_host.for_each(|it| it.ask_to_probe(controller.serial));
                }
                table.controllers.push(Arc::clone(&controller));
                return Some(controller);
            }
        }
    }

    pub(crate) fn find(&self, id: u16) -> Option<Arc<Controller>> {
        self.table().controllers.iter().find(|controller| controller.id == id).cloned()
    }

    /// Closes a controller and removes it.
    pub(crate) fn remove(&self, controller: &Arc<Controller>) {
        let mut table = self.table();
        // Under the lock: a closed controller with I/O queues is always among those that end.
        controller.close();
        table.controllers.retain(|other| !Arc::ptr_eq(other, controller));
        table.ending.retain(|other| other.has_queues());
        if controller.has_queues() {
            table.ending.push(Arc::clone(controller));
        }
    }

    /// Whether an earlier association of the controller's host with its subsystem has I/O queues
    /// that have not ended, or may have commands and the end of the host in a socket: they could
    /// change data after the controller's first ones.
    pub(crate) fn has_predecessor(&self, controller: &Controller) -> bool {
        let mut table = self.table();
        table.ending.retain(|other| other.has_queues());
        let mut earlier =
            table.controllers.iter().take_while(|it| !std::ptr::eq(&***it, controller));
        table.ending.iter().any(|other| other.is_of_host(controller))
            || earlier.any(|it| it.is_of_host(controller) && it.owes_probe(controller.serial))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabrics::NEW_CONTROLLER;

    fn request(queue: u16) -> ConnectRequest {
        ConnectRequest {
            queue,
            entries: 32,
            no_flow_control: false,
            keep_alive_ms: 0,
            controller: NEW_CONTROLLER,
            subsystem: String::new(),
            host: HostIdentity { id: [1; 16], nqn: "nqn.h".to_owned() },
        }
    }

    fn link() -> Arc<HostLink> {
        let wake = Arc::new(blockyard_os::socket::Wake::new().unwrap());
        Arc::new(HostLink::new(1, String::new(), wake))
    }

    fn discovery() -> Controller {
        let target = ControllerTarget::Discovery;
        Controller::new((1, 1), target, &link(), &request(0), Instant::now())
    }

    fn set(controller: &Controller, config: u64) -> u32 {
        let offset = property::CC;
        let wanted = PropertyRequest { offset, is_long: false, value: config };
        controller.set_property(&wanted).unwrap();
        controller.status()
    }

    #[test]
    fn a_discovery_controller_is_enabled_and_shut_down() {
        let controller = discovery();
        assert_eq!((controller.status(), controller.is_ready()), (0, false));
        assert_eq!(set(&controller, 0x46_0001), 1);
        assert!(controller.is_ready());
        assert_eq!(set(&controller, 0x46_4001), 1 | 2 << 2, "shut down, no queue is left");
        assert_eq!(set(&controller, 0x46_0001), 1 | 2 << 2, "it has to be disabled first");
        assert!(controller.is_ready());
        assert_eq!(set(&controller, 0x46_0000), 0);
        assert_eq!(set(&controller, 0x46_4000), 2 << 2, "shut down while it is disabled");
        assert!(!controller.is_ready());
        assert_eq!(set(&controller, 0x46_0000), 0);
        assert_eq!(set(&controller, 0x46_0001), 1);
    }

    #[test]
    fn settings_that_are_not_supported_fail_the_controller_until_it_is_disabled() {
        let controller = discovery();
        assert_eq!(set(&controller, 0x46_0011), 2);
        assert_eq!(set(&controller, 0x46_0001), 2);
        assert_eq!(set(&controller, 0), 0);
        assert_eq!(set(&controller, 0x46_0001), 1);
        controller.close();
        assert_eq!(set(&controller, 0x46_0001), 2, "a closed controller stays closed");
    }

    /// A reset and a shutdown at once: RDY was 0 while I/O queues still executed commands.
    #[test]
    fn a_controller_is_ready_until_its_queues_have_ended() {
        let subsystem = crate::subsystems::Subsystems::new("t", Default::default(), None);
        let config = blockyard_null::NullConfig { size: 1 << 20, ..Default::default() };
        let null = blockyard_null::Null::open(config).unwrap();
        let depth = blockyard_core::channel::ChannelConfig { depth: 1 };
        let disk = blockyard_core::composed::Composed::new("t".to_owned(), "null", null, depth);
        let disk: Arc<dyn blockyard_core::Disk> = Arc::new(disk);
        subsystem.add("t", disk).unwrap();
        let target = ControllerTarget::Device(Arc::clone(&subsystem.devices()[0]));
        for (config, phase) in [(0x46_0000, 0), (0x46_4000, 2 << 2), (0x46_4001, 1 | 2 << 2)] {
            let (target, queue) = (target.clone(), link());
            let controller = Controller::new((1, 1), target, &link(), &request(0), Instant::now());
            assert_eq!(set(&controller, 0x46_0001), 1);
            controller.open_queue(&request(1), &queue, true).unwrap();
            let shuts_down = u32::from(phase & 2 << 2 != 0) << 2;
            assert_eq!(set(&controller, config), 1 | shuts_down, "{config:#x}");
            assert!(queue.is_cut());
            controller.close_queue(&queue);
            assert_eq!(controller.status(), phase, "{config:#x}");
        }
    }

    #[test]
    fn properties_have_one_size() {
        let controller = discovery();
        let get = |offset, is_long| {
            let request = PropertyRequest { offset, is_long, value: 0 };
            controller.property(&request, &Controllers::default())
        };
        assert_eq!(get(property::VS, false), Ok(0x0002_0000));
        assert!(get(property::CAP, true).is_ok());
        for (offset, is_long) in [(property::CAP, false), (property::VS, true), (4, false)] {
            assert_eq!(get(offset, is_long), Err(StatusCode::INVALID_FIELD));
        }
    }

    #[test]
    fn ids_are_those_of_no_other_controller() {
        let controllers = Controllers::default();
        let add = || {
            let target = ControllerTarget::Discovery;
            controllers.add(target, &link(), &request(0), Instant::now())
        };
        let first = add().unwrap();
        controllers.table().last_id = Controllers::ID_MAX;
        let second = add().unwrap();
        assert_eq!((first.id, second.id), (1, 2));
        controllers.remove(&first);
        assert!(controllers.find(1).is_none() && controllers.find(2).is_some());
    }
}
