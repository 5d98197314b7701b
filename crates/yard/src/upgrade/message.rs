//! The messages of a hand-over between two processes of the daemon. Parses and prints bytes, and
//! does nothing else.
//!
//! ```text
//! frame    "BLKYHAND" ▸ version, length: u32, little-endian ▸ the message in JSON
//! ```
//!
//! A state is followed by its descriptors, in this order: the sockets of each listener; for each
//! connection its socket and, if bytes were received and not parsed, a file in memory with them;
//! for each device that keeps data in memory a file in memory with them.
//!
//! A frame of another version is refused by its header, before its message is read.

use std::collections::BTreeSet;
use std::time::{Duration, UNIX_EPOCH};

use blockyard_nbd::wire::{NbdError, REQUEST_BYTES_MAX, Style};
use blockyard_nbd::{ConnectionCounts, ConnectionState, SkippedPayload};
use blockyard_nvme::SUBSYSTEMS_MAX;
use serde::{Deserialize, Serialize};

use crate::config::DEVICES_MAX;
use crate::scheduler::SchedulerRequest;
use crate::spec::DeviceSpec;

/// The version of the format. It changes with every change of a message.
pub const VERSION: u32 = 3;

/// The first bytes of every frame.
const MAGIC: [u8; 8] = *b"BLKYHAND";

/// Bytes of a frame before its message.
pub const HEADER_BYTES: usize = 16;

/// The longest message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// The most listeners: each device may have a socket for hypervisors.
const LISTENERS_MAX: usize = DEVICES_MAX + 1024;

/// The most sockets of a listener, and the most connections of a state.
const SOCKETS_MAX: u32 = 64;
const CONNECTIONS_MAX: usize = 65_536;

/// The most bytes of a connection that were received and not parsed: the longest request and what
/// is received with it.
const UNREAD_BYTES_MAX: u64 = REQUEST_BYTES_MAX as u64 + (8 << 20);

/// The reason for which bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The bytes are no frame.
    #[error("the bytes are no message of a hand-over")]
    Magic,
    /// The frame has another version.
    #[error(
        "the hand-over has format {found}: expected {VERSION}, the one of this program; restart \
         the service instead"
    )]
    Version {
        /// The version of the frame.
        found: u32,
    },
    /// The message is too long.
    #[error("a message of {len_bytes} bytes: expected at most {MESSAGE_BYTES_MAX}")]
    Length {
        /// The length that the header gives.
        len_bytes: u32,
    },
    /// The message is no JSON of its form, or a field is out of its range.
    #[error("invalid message: {0}")]
    Content(String),
}

/// A message.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Message {
    /// From the old process: what will be handed over.
    Offer(Offer),
    /// From the new process: its configuration fits the offer.
    Ready,
    /// From the old process: everything, with descriptors.
    State(State),
    /// From the new process: all devices are open, and all connections can be continued.
    Opened,
    /// From the old process: it has given everything up.
    Go,
    /// From the new process: it has got the order, and serves.
    Serving,
    /// From the new process: it ends, and has taken nothing.
    Failed {
        /// The reason.
        message: String,
    },
}

/// What will be handed over, while the old process still serves.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// The version of the old program.
    pub program_version: String,
    /// The number of the old process.
    pub pid: u32,
    /// The listeners.
    pub listeners: Vec<ListenerState>,
    /// The devices, in their order.
    pub devices: Vec<OfferedDevice>,
}

/// A device that will be handed over.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OfferedDevice {
    /// The URI.
    pub uri: String,
    /// What tells its data from other data at the same place; empty if it keeps none there.
    pub identity: String,
}

impl OfferedDevice {
    /// A device.
    pub(crate) fn new(spec: &DeviceSpec, identity: &str) -> OfferedDevice {
        OfferedDevice { uri: spec.to_string(), identity: identity.to_owned() }
    }
}

/// The protocol of a listener.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenerKind {
    /// NBD.
    Nbd,
    /// The control API.
    Control,
    /// Metrics.
    Metrics,
    /// The dashboard.
    Web,
    /// NVMe.
    Nvme,
    /// NVMe discovery alone.
    NvmeDiscovery,
    /// vhost-user-blk, for one device.
    Vhost,
}

impl ListenerKind {
    /// The option of `serve` that has its place.
    pub fn option(self) -> &'static str {
        match self {
            ListenerKind::Nbd => "nbd",
            ListenerKind::Control => "control",
            ListenerKind::Metrics => "metrics",
            ListenerKind::Web => "web",
            ListenerKind::Nvme => "nvme",
            ListenerKind::NvmeDiscovery => "nvme-discovery",
            ListenerKind::Vhost => "vhost",
        }
    }
}

/// A listener.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerState {
    /// The protocol.
    pub kind: ListenerKind,
    /// The place as the configuration has it.
    pub place: String,
    /// The number of sockets.
    pub sockets: u32,
}

/// Everything that is handed over.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The listeners.
    pub listeners: Vec<ListenerState>,
    /// The established NBD connections.
    pub connections: Vec<ConnectionEntry>,
    /// The devices, in their order.
    pub devices: Vec<DeviceState>,
    /// The NSID that was given out last in the NVMe subsystem of all devices; 0 for none.
    pub last_nsid: u32,
}

/// A device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// The device.
    pub device: OfferedDevice,
    /// The scheduler and its tunables, if the device can have one.
    pub scheduler: Option<SchedulerRequest>,
    /// Whether its data are handed over.
    pub memory: bool,
    /// The settings of a RAM disk that change at run time.
    pub ram: Option<RamSettings>,
    /// The NSID of the device in the NVMe subsystem of all devices, if it has one.
    pub nsid: Option<u32>,
}

/// The settings of a RAM disk that change at run time.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RamSettings {
    /// The most memory for its data, in bytes; 0 for no limit.
    pub mem_limit: u64,
    /// The overhead in percent above which it is compacted in the background; 0 for never.
    pub compact: u8,
}

/// An established NBD connection.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectionEntry {
    /// The index of its listener in the state.
    pub listener: u32,
    /// The connection's number in its server.
    pub id: u64,
    /// The client's address.
    pub peer: String,
    /// The time of its acceptance, in ns after 1970.
    pub since_ns: u64,
    /// The export's name.
    pub export: String,
    /// The format of requests and replies.
    pub style: StyleName,
    /// Whether `base:allocation` was selected.
    pub contexts: bool,
    /// The smallest block of requests, in bytes.
    pub min_block_bytes: u32,
    /// The size of the export.
    pub len_bytes: u64,
    /// The logical block of the device, in bytes.
    pub block_bytes: u64,
    /// The transmission flags.
    pub flags: u16,
    /// The number of bytes that were received and not parsed.
    pub unread_bytes: u64,
    /// A payload of which the rest is discarded.
    pub skipped: Option<SkippedEntry>,
    /// Counts: requests, bytes read, bytes written, errors, sends.
    pub counts: [u64; 5],
}

/// [`Style`] by name.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StyleName {
    /// Simple replies.
    Simple,
    /// Structured replies.
    Structured,
    /// Extended headers.
    Extended,
}

/// The payload of a refused request.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SkippedEntry {
    /// The bytes that are still to be discarded.
    pub left: u64,
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset.
    pub offset: u64,
    /// The error of the reply, by NBD's number.
    pub error: u32,
}

/// NBD's error of a number.
fn error_of(number: u32) -> Option<NbdError> {
    use NbdError::{Inval, Io, NoMem, NoSpc, NotSup, Overflow, Perm, Shutdown};
    let all = [Perm, Io, NoMem, Inval, NoSpc, Overflow, NotSup, Shutdown];
    all.into_iter().find(|error| *error as u32 == number)
}

impl ConnectionEntry {
    /// A connection of a listener.
    pub fn new(listener: u32, state: &ConnectionState) -> ConnectionEntry {
        let since = state.since.duration_since(UNIX_EPOCH).unwrap_or_default();
        let counts = &state.counts;
        ConnectionEntry {
            listener,
            id: state.id,
            peer: state.peer.clone(),
            since_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            export: state.export.clone(),
            style: match state.style {
                Style::Simple => StyleName::Simple,
                Style::Structured => StyleName::Structured,
                Style::Extended => StyleName::Extended,
            },
            contexts: state.contexts,
            min_block_bytes: state.min_block_bytes,
            len_bytes: state.len_bytes,
            block_bytes: state.block_bytes,
            flags: state.flags,
            unread_bytes: state.unread.len() as u64,
            skipped: state.skipped.map(|skipped| SkippedEntry {
                left: skipped.left,
                cookie: skipped.cookie,
                offset: skipped.offset,
                error: skipped.error as u32,
            }),
            counts: [
                counts.requests,
                counts.read_bytes,
                counts.written_bytes,
                counts.errors,
                counts.batches,
            ],
        }
    }

    /// The connection, with the bytes that were received and not parsed. The entry was checked.
    pub fn state(self, unread: Vec<u8>) -> ConnectionState {
        let [requests, read_bytes, written_bytes, errors, batches] = self.counts;
        ConnectionState {
            id: self.id,
            peer: self.peer,
            since: UNIX_EPOCH + Duration::from_nanos(self.since_ns),
            export: self.export,
            style: match self.style {
                StyleName::Simple => Style::Simple,
                StyleName::Structured => Style::Structured,
                StyleName::Extended => Style::Extended,
            },
            contexts: self.contexts,
            min_block_bytes: self.min_block_bytes,
            len_bytes: self.len_bytes,
            block_bytes: self.block_bytes,
            flags: self.flags,
            unread,
            skipped: self.skipped.map(|skipped| SkippedPayload {
                left: skipped.left,
                cookie: skipped.cookie,
                offset: skipped.offset,
                error: error_of(skipped.error).unwrap_or(NbdError::Inval),
            }),
            counts: ConnectionCounts { requests, read_bytes, written_bytes, errors, batches },
        }
    }

    fn check(&self, listeners: &[ListenerState]) -> Result<(), String> {
        let peer = &self.peer;
        let listener = listeners.get(self.listener as usize);
        if listener.is_none_or(|listener| listener.kind != ListenerKind::Nbd) {
            return Err(format!("connection {peer}: listener {} serves no NBD", self.listener));
        }
        let min = self.min_block_bytes;
        if !min.is_power_of_two() {
            return Err(format!("connection {peer}: min_block_bytes {min}: expected a power of 2"));
        }
        if self.unread_bytes > UNREAD_BYTES_MAX {
            let bytes = self.unread_bytes;
            return Err(format!(
                "connection {peer}: unread_bytes {bytes}: expected at most {UNREAD_BYTES_MAX}"
            ));
        }
        let is_invalid =
            |skipped: &SkippedEntry| skipped.left == 0 || error_of(skipped.error).is_none();
        if self.skipped.as_ref().is_some_and(is_invalid) {
            return Err(format!("connection {peer}: skipped has no bytes, or an unknown error"));
        }
        Ok(())
    }
}

impl State {
    /// The number of descriptors that follow the state.
    pub fn descriptors(&self) -> usize {
        let sockets: usize = self.listeners.iter().map(|it| it.sockets as usize).sum();
        let of_connection = |it: &ConnectionEntry| 1 + usize::from(it.unread_bytes > 0);
        let connections: usize = self.connections.iter().map(of_connection).sum();
        sockets + connections + self.devices.iter().filter(|device| device.memory).count()
    }

    fn check(&self) -> Result<(), String> {
        check_listeners(&self.listeners)?;
        check_count("connections", self.connections.len(), CONNECTIONS_MAX)?;
        check_count("devices", self.devices.len(), DEVICES_MAX)?;
        self.check_nsids()?;
        self.connections.iter().try_for_each(|it| it.check(&self.listeners))
    }

    /// Each number is that of one device.
    fn check_nsids(&self) -> Result<(), String> {
        let all: Vec<u32> = self.devices.iter().filter_map(|it| it.nsid).collect();
        let mut used = BTreeSet::new();
        let is_wrong =
            |nsid: &u32| !(1..=SUBSYSTEMS_MAX as u32).contains(nsid) || !used.insert(*nsid);
        match all.iter().copied().find(is_wrong) {
            Some(nsid) => Err(format!(
                "nsid {nsid}: expected numbers from 1 to {SUBSYSTEMS_MAX}, each of one device"
            )),
            None if self.last_nsid as usize > SUBSYSTEMS_MAX => {
                let last = self.last_nsid;
                Err(format!("last_nsid {last}: expected at most {SUBSYSTEMS_MAX}"))
            }
            None => Ok(()),
        }
    }
}

fn check_count(what: &str, count: usize, max: usize) -> Result<(), String> {
    if count > max { Err(format!("{count} {what}: expected at most {max}")) } else { Ok(()) }
}

fn check_listeners(listeners: &[ListenerState]) -> Result<(), String> {
    check_count("listeners", listeners.len(), LISTENERS_MAX)?;
    let wrong = listeners.iter().find(|it| !(1..=SOCKETS_MAX).contains(&it.sockets));
    wrong.map_or(Ok(()), |it| {
        Err(format!("{} sockets of {}: expected 1 to {SOCKETS_MAX}", it.sockets, it.place))
    })
}

impl Message {
    /// The frame of the message.
    ///
    /// # Errors
    /// If it is too long.
    pub fn print(&self) -> Result<Vec<u8>, MessageError> {
        let body = serde_json::to_vec(self).expect("messages are plain data");
        let len_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        if body.len() > MESSAGE_BYTES_MAX {
            return Err(MessageError::Length { len_bytes });
        }
        let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
        frame.extend(MAGIC);
        frame.extend(VERSION.to_le_bytes());
        frame.extend(len_bytes.to_le_bytes());
        frame.extend(body);
        Ok(frame)
    }

    /// The length of the message that follows a header.
    ///
    /// # Errors
    /// If it is no header, or that of another version.
    pub fn parse_header(header: &[u8; HEADER_BYTES]) -> Result<usize, MessageError> {
        let (magic, rest) = header.split_first_chunk().expect("a header is longer than its magic");
        if *magic != MAGIC {
            return Err(MessageError::Magic);
        }
        let (version, len) = rest.split_at(4);
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
        let found = number(version);
        if found != VERSION {
            return Err(MessageError::Version { found });
        }
        let len_bytes = number(len);
        match len_bytes as usize {
            len if len <= MESSAGE_BYTES_MAX => Ok(len),
            _ => Err(MessageError::Length { len_bytes }),
        }
    }

    /// The message of these bytes, which follow a header.
    ///
    /// # Errors
    /// If they are no message, or a field is out of its range.
    pub fn parse(body: &[u8]) -> Result<Message, MessageError> {
        let message: Message = serde_json::from_slice(body)
            .map_err(|error| MessageError::Content(error.to_string()))?;
        let checked = match &message {
            Message::State(state) => state.check(),
            Message::Offer(offer) => check_listeners(&offer.listeners)
                .and_then(|()| check_count("devices", offer.devices.len(), DEVICES_MAX)),
            Message::Ready
            | Message::Opened
            | Message::Go
            | Message::Serving
            | Message::Failed { .. } => Ok(()),
        };
        checked.map_err(MessageError::Content)?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn connection() -> ConnectionState {
        ConnectionState {
            id: 7,
            peer: "unix:pid=1".to_owned(),
            since: SystemTime::UNIX_EPOCH + Duration::from_nanos(12_345),
            export: "v0".to_owned(),
            style: Style::Structured,
            contexts: true,
            min_block_bytes: 512,
            len_bytes: 1 << 30,
            block_bytes: 4096,
            flags: 0x5ed,
            unread: b"half a request".to_vec(),
            skipped: Some(SkippedPayload { left: 3, cookie: 4, offset: 5, error: NbdError::NoSpc }),
            counts: ConnectionCounts {
                requests: 1,
                read_bytes: 2,
                written_bytes: 3,
                errors: 4,
                batches: 5,
            },
        }
    }

    fn state() -> State {
        let listener = |kind, sockets| ListenerState { kind, place: "p".to_owned(), sockets };
        State {
            listeners: vec![listener(ListenerKind::Control, 1), listener(ListenerKind::Nbd, 2)],
            connections: vec![ConnectionEntry::new(1, &connection())],
            devices: vec![DeviceState {
                device: OfferedDevice { uri: "null:///n".to_owned(), identity: String::new() },
                scheduler: None,
                memory: true,
                ram: Some(RamSettings { mem_limit: 1 << 20, compact: 5 }),
                nsid: Some(3),
            }],
            last_nsid: 7,
        }
    }

    fn read(frame: &[u8]) -> Result<Message, MessageError> {
        let (header, body) = frame.split_first_chunk().unwrap();
        assert_eq!(Message::parse_header(header)?, body.len());
        Message::parse(body)
    }

    #[test]
    fn each_device_may_have_a_socket_for_hypervisors() {
        let listeners = |count: usize| {
            (0..count).map(|at| ListenerState::new(ListenerKind::Vhost, &at.to_string(), 1))
        };
        let most = Offer { listeners: listeners(LISTENERS_MAX).collect(), ..Offer::default() };
        assert!(most.listeners.len() > DEVICES_MAX);
        let message = Message::Offer(most);
        assert_eq!(read(&message.print().unwrap()).unwrap(), message);
        assert!(check_listeners(&listeners(LISTENERS_MAX + 1).collect::<Vec<_>>()).is_err());
    }

    #[test]
    fn messages_are_printed_and_read() {
        let failed = Message::Failed { message: "x".to_owned() };
        let offer = Message::Offer(Offer::default());
        for message in [offer, Message::Ready, Message::State(state()), Message::Go, failed] {
            assert_eq!(read(&message.print().unwrap()).unwrap(), message);
        }
        let state = state();
        assert_eq!(state.descriptors(), 3 + 2 + 1);
        let entry = state.connections.into_iter().next().unwrap();
        assert_eq!(entry.state(b"half a request".to_vec()), connection());
    }

    #[test]
    fn another_version_is_named() {
        let mut frame = Message::Ready.print().unwrap();
        frame[8] += 1;
        let error = read(&frame).unwrap_err();
        assert_eq!(error, MessageError::Version { found: VERSION + 1 });
        assert!(error.to_string().starts_with("the hand-over has format 4: expected 3,"));
        frame[0] = b'X';
        assert_eq!(read(&frame).unwrap_err(), MessageError::Magic);
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8] = VERSION as u8;
        header[12..].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = Message::parse_header(&header).unwrap_err();
        assert_eq!(error, MessageError::Length { len_bytes: u32::MAX });
    }

    #[test]
    fn a_field_out_of_its_range_is_named() {
        let refused = |change: &dyn Fn(&mut State)| {
            let mut state = state();
            change(&mut state);
            read(&Message::State(state).print().unwrap()).unwrap_err().to_string()
        };
        type Edit<'e> = &'e dyn Fn(&mut State);
        let cases: [(Edit<'_>, &str); 8] = [
            (&|it| it.listeners[0].sockets = 0, "0 sockets of p: expected 1 to 64"),
            (&|it| it.connections[0].listener = 0, "listener 0 serves no NBD"),
            (&|it| it.connections[0].min_block_bytes = 3, "min_block_bytes 3"),
            (&|it| it.devices[0].nsid = Some(4097), "nsid 4097: expected numbers from 1 to 4096"),
            (&|it| it.devices.push(it.devices[0].clone()), "nsid 3: expected numbers"),
            (&|it| it.last_nsid = 4097, "last_nsid 4097: expected at most 4096"),
            (&|it| it.connections[0].unread_bytes = 1 << 40, "unread_bytes 1099511627776"),
            (
                &|it| it.connections[0].skipped.as_mut().unwrap().error = 2,
                "skipped has no bytes, or an unknown error",
            ),
        ];
        for (change, wanted) in cases {
            let error = refused(change);
            assert!(error.contains(wanted), "{error}");
        }
        let error = Message::parse(br#"{"failed":{"message":"x","more":1}}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `more`"), "{error}");
    }
}
