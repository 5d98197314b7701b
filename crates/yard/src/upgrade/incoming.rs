//! The new process's side of an upgrade.
#![allow(clippy::disallowed_types)] // What is inherited is taken once, at the start.

use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use blockyard_nbd::{ACTIVATED, PausedConnection};
use blockyard_nvme::NamespaceNumbers;

use super::link::{Link, LinkError};
use super::message::{
    DeviceState, ListenerKind, ListenerState, Message, Offer, OfferedDevice, RamSettings, State,
};
use super::{VARIABLE, memory};
use crate::entry::DeviceEntry;
use crate::error::{StackError, YardError};
use crate::scheduler::{self, SchedulerRequest};
use crate::spec::DeviceSpec;
use crate::stack::identity::{check_existing, compare};
use crate::stack::{self, Made};
use crate::uri;

/// How long the old process may take to send its offer, and to receive a report.
const OFFER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the old process may take to pause its clients, close its devices and send everything.
const STATE_TIMEOUT: Duration = Duration::from_secs(600);

/// How long the old process may take to give everything up.
const GO_TIMEOUT: Duration = Duration::from_secs(60);

/// The reason for which nothing was taken over.
#[derive(Debug, thiserror::Error)]
#[error("upgrade: {0}")]
pub struct TakeOverError(String);

impl TakeOverError {
    /// The old process has a listener at a place that this program does not know.
    pub(crate) fn invalid_place(place: &str) -> TakeOverError {
        TakeOverError(format!("the running yard listens at {place}: unknown to this program"))
    }
}

impl From<LinkError> for TakeOverError {
    fn from(error: LinkError) -> TakeOverError {
        TakeOverError(error.to_string())
    }
}

/// The offer of an old process, which serves still.
#[derive(Debug)]
pub struct ReceivedOffer {
    link: Link,
    offer: Offer,
}

impl ReceivedOffer {
    /// The offer, if an old process started this one.
    ///
    /// # Errors
    /// If standard input is no socket, or no offer comes from it. The old process gets the reason.
    pub fn take() -> Result<Option<ReceivedOffer>, TakeOverError> {
        if std::env::var_os(VARIABLE).is_none() {
            return Ok(None);
        }
        let failed = |error: std::io::Error| {
            TakeOverError(format!("{VARIABLE} is set, and standard input is no socket: {error}"))
        };
        let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
        let socket = UnixStream::from(socket);
        socket.peer_addr().map_err(failed)?;
        // The other end finds the end of this one when this process ends.
        let null = std::fs::File::open("/dev/null").map_err(failed)?;
        rustix::stdio::dup2_stdin(null).map_err(|error| failed(error.into()))?;
        let link = Link::new(socket);
        let error = match link.receive(OFFER_TIMEOUT) {
            Ok(Message::Offer(offer)) => return Ok(Some(ReceivedOffer { link, offer })),
            Ok(other) => LinkError::Order(format!("{other:?}")),
            Err(error) => error,
        };
        refuse(&link, &error);
        Err(error.into())
    }

    /// Whether NBD is served on sockets that another program made, such as systemd.
    pub fn is_activated(&self) -> bool {
        let is_it = |it: &ListenerState| it.kind == ListenerKind::Nbd && it.place == ACTIVATED;
        self.offer.listeners.iter().any(is_it)
    }

    /// Tells the old process that this one ends, and why.
    pub fn refuse(&self, why: &dyn Display) {
        refuse(&self.link, why);
    }

    /// Checks that the options of this process have the places of the offer, and that what its
    /// devices are opened from is there. The old process serves until [`Inherited::receive`].
    ///
    /// # Errors
    /// If a place of the old process is not among the options, or this program knows a device or
    /// parameter no more. The old process gets the reason.
    pub fn accept(
        self,
        has_place: &dyn Fn(ListenerKind, &str) -> bool,
    ) -> Result<Inherited, TakeOverError> {
        let ReceivedOffer { link, offer } = self;
        match check(has_place, &offer) {
            Ok(specs) => Ok(Inherited { link, offer, specs, state: OnceLock::new() }),
            Err(error) => {
                refuse(&link, &error.0);
                Err(error)
            }
        }
    }
}

fn refuse(link: &Link, why: &dyn Display) {
    // The old process may have ended.
    let _ = link.send(&Message::Failed { message: why.to_string() }, &[], OFFER_TIMEOUT);
}

/// The specifications of the devices on offer. What they are opened from is there, is that of the
/// running yard, and may be opened by this process.
fn specs(devices: &[OfferedDevice]) -> Result<Vec<DeviceSpec>, TakeOverError> {
    let parse = |OfferedDevice { uri: text, identity }: &OfferedDevice| {
        let spec = uri::parse(text).map_err(|error| TakeOverError(format!("{text}: {error}")))?;
        stack::check(&spec)
            .and_then(|_| check_existing(&spec, identity))
            .map_err(|error| TakeOverError(format!("device `{}`: {error}", spec.name())))?;
        Ok(spec)
    };
    devices.iter().map(parse).collect()
}

/// Checks the places of the offer; returns the devices.
fn check(
    has_place: &dyn Fn(ListenerKind, &str) -> bool,
    offer: &Offer,
) -> Result<Vec<DeviceSpec>, TakeOverError> {
    for listener in &offer.listeners {
        let place = &listener.place;
        let is_activated = listener.kind == ListenerKind::Nbd && place == ACTIVATED;
        if !is_activated && !has_place(listener.kind, place) {
            let option = listener.kind.option();
            return Err(TakeOverError(format!(
                "{option}: the running yard listens at {place}, and the configuration has another \
                 place now: restart the service to change it"
            )));
        }
    }
    specs(&offer.devices)
}

/// Listeners with their index in the state, and their sockets.
type Listeners = Vec<(u32, ListenerState, Vec<OwnedFd>)>;

/// Connections with the index of their listener.
type Connections = Vec<(u32, PausedConnection)>;

/// Everything that an old process hands over.
#[derive(Debug, Default)]
struct ReceivedState {
    listeners: Mutex<Listeners>,
    connections: Mutex<Connections>,
    devices: Vec<InheritedDevice>,
    numbers: NamespaceNumbers,
}

/// Receives everything.
fn receive(
    link: &Link,
    offered: &[OfferedDevice],
    specs: &[DeviceSpec],
) -> Result<ReceivedState, TakeOverError> {
    let state = match link.receive(STATE_TIMEOUT)? {
        Message::State(state) => state,
        other => return Err(LinkError::Order(format!("{other:?}")).into()),
    };
    let descriptors = link.receive_descriptors(state.descriptors(), OFFER_TIMEOUT)?;
    let mut descriptors = descriptors.into_iter();
    let State { listeners, connections, devices, last_nsid } = state;
    let mut next = || descriptors.next().ok_or_else(|| TakeOverError("too few sockets".to_owned()));
    let mut all_listeners = Vec::new();
    for (index, listener) in (0..).zip(listeners) {
        let sockets = (0..listener.sockets).map(|_| next()).collect::<Result<_, _>>()?;
        all_listeners.push((index, listener, sockets));
    }
    let mut all_connections = Vec::new();
    for entry in connections {
        let (listener, socket) = (entry.listener, Arc::new(next()?));
        let unread = match entry.unread_bytes {
            0 => Vec::new(),
            len => memory::bytes_of(next()?, len)
                .map_err(|error| TakeOverError(format!("the bytes of a request: {error}")))?,
        };
        let state = entry.state(unread);
        all_connections.push((listener, PausedConnection { socket, state }));
    }
    if !devices.iter().map(|it| &it.device).eq(offered) {
        return Err(TakeOverError("other devices come than were offered".to_owned()));
    }
    let mut all_devices = Vec::new();
    let mut numbers = NamespaceNumbers { last: last_nsid, ..NamespaceNumbers::default() };
    for (spec, state) in specs.iter().cloned().zip(devices) {
        let DeviceState { device, scheduler, memory, ram, nsid } = state;
        numbers.of.extend(nsid.map(|nsid| (spec.name().to_owned(), nsid)));
        let memory = Mutex::new(memory.then(&mut next).transpose()?);
        let identity = device.identity;
        all_devices.push(InheritedDevice { spec, identity, scheduler, memory, ram });
    }
    Ok(ReceivedState {
        listeners: Mutex::new(all_listeners),
        connections: Mutex::new(all_connections),
        devices: all_devices,
        numbers,
    })
}

/// A device of the old process.
#[derive(Debug)]
pub struct InheritedDevice {
    /// The specification.
    pub spec: DeviceSpec,
    /// What tells its data from other data at the same place.
    identity: String,
    /// The scheduler that it had.
    pub scheduler: Option<SchedulerRequest>,
    /// The data of the device, until they are taken.
    memory: Mutex<Option<OwnedFd>>,
    /// The settings that it had, if it is a RAM disk.
    ram: Option<RamSettings>,
}

impl InheritedDevice {
    /// The specification by which it is opened.
    pub(crate) fn opened_as(&self) -> DeviceSpec {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let (spec, file) = (&self.spec, memory.as_ref());
        file.map_or_else(|| spec.clone(), |file| memory::opened_as(spec, file, self.ram))
    }

    /// Checks that what it is opened from is there, and is that of the old process.
    pub(crate) fn check_existing(&self) -> Result<(), YardError> {
        Ok(check_existing(&self.spec, &self.identity)?)
    }

    /// Checks that the device that was opened just now is that of the old process.
    pub(crate) fn check_opened(&self, made: &Made) -> Result<(), YardError> {
        Ok(compare(&self.spec, &made.identity, &self.identity)?)
    }

    /// Gives the device, which was opened just now, its data and its scheduler.
    pub(crate) fn restore(&self, entry: &DeviceEntry) -> Result<(), YardError> {
        let file = self.memory.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(file) = file {
            memory::load(entry, file).map_err(|error| StackError::Refused {
                field: "data",
                message: format!("its data: {error}"),
            })?;
        }
        if let Some(request) = &self.scheduler {
            scheduler::change(entry.disk.as_ref(), entry.spec.kind(), request)?;
        }
        Ok(())
    }
}

/// What an old process hands over: an offer, and everything once it is received. The old process
/// serves again unless this process says that it serves.
#[derive(Debug)]
pub struct Inherited {
    link: Link,
    offer: Offer,
    specs: Vec<DeviceSpec>,
    state: OnceLock<ReceivedState>,
}

impl Inherited {
    /// The specifications of the devices, in their order.
    pub fn specs(&self) -> &[DeviceSpec] {
        &self.specs
    }

    /// Whether the old process has a listener of a kind at a place.
    pub(crate) fn offers(&self, kind: ListenerKind, place: &str) -> bool {
        self.offer.listeners.iter().any(|it| it.kind == kind && it.place == place)
    }

    /// The places of the listeners of a kind that the old process has.
    pub(crate) fn offered(&self, kind: ListenerKind) -> impl Iterator<Item = &str> {
        let listeners = self.offer.listeners.iter();
        listeners.filter(move |it| it.kind == kind).map(|it| it.place.as_str())
    }

    /// Says that this process is ready, and waits for everything. The old process pauses its
    /// clients and disconnects NVMe hosts now, so no other error of the configuration may follow.
    ///
    /// # Errors
    /// If the old process keeps everything.
    pub(crate) fn receive(&self) -> Result<(), TakeOverError> {
        self.link.send(&Message::Ready, &[], OFFER_TIMEOUT)?;
        let state = receive(&self.link, &self.offer.devices, &self.specs)?;
        // It is still empty: the daemon receives once.
        let _ = self.state.set(state);
        Ok(())
    }

    fn state(&self) -> &ReceivedState {
        self.state.get_or_init(ReceivedState::default)
    }

    /// The devices, in their order, once they are received.
    pub(crate) fn devices(&self) -> &[InheritedDevice] {
        &self.state().devices
    }

    /// The number of the old process, and the version of its program.
    pub fn old(&self) -> (u32, &str) {
        (self.offer.pid, &self.offer.program_version)
    }

    /// The sockets of a listener, and its index; `None` if the old process had no such listener.
    pub(crate) fn take_sockets(
        &self,
        kind: ListenerKind,
        place: &str,
    ) -> Option<(u32, Vec<OwnedFd>)> {
        let listeners = &self.state().listeners;
        let mut listeners = listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(_, it, _): &(u32, ListenerState, _)| it.kind == kind && it.place == place;
        let found = listeners.iter().position(is_it)?;
        let (index, _, sockets) = listeners.remove(found);
        Some((index, sockets))
    }

    /// The numbers of the devices as namespaces of the NVMe subsystem of all devices.
    pub(crate) fn numbers(&self) -> &NamespaceNumbers {
        &self.state().numbers
    }

    /// The connections of the listener with this index.
    pub(crate) fn take_connections(&self, listener: u32) -> Vec<PausedConnection> {
        let connections = &self.state().connections;
        let mut connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
        let all = std::mem::take(&mut *connections);
        let (taken, left): (Vec<_>, Vec<_>) = all.into_iter().partition(|(it, _)| *it == listener);
        *connections = left;
        taken.into_iter().map(|(_, connection)| connection).collect()
    }

    /// Says that everything is open, and waits until the old process has given everything up.
    ///
    /// # Errors
    /// If the old process has ended, or keeps everything.
    pub(crate) fn wait_for_go(&self) -> Result<(), TakeOverError> {
        self.link.send(&Message::Opened, &[], OFFER_TIMEOUT)?;
        match self.link.receive(GO_TIMEOUT)? {
            Message::Go => {}
            other => return Err(LinkError::Order(format!("{other:?}")).into()),
        }
        if let Err(error) = self.link.send(&Message::Serving, &[], OFFER_TIMEOUT) {
            // It has given everything up.
            tracing::warn!(%error, "the old process does not learn that this one serves");
        }
        Ok(())
    }

    /// Tells the old process that this one ends, and why.
    pub fn refuse(&self, why: &dyn Display) {
        refuse(&self.link, why);
    }
}
