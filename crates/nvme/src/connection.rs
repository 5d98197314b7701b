//! A connection: PDUs become commands, completions become PDUs. It is a state machine without a
//! thread: its owner gives it turns, and no turn waits.
//!
//! ```text
//!  a turn:  up to 8 rounds of   parse all that is there ▸ push, submit, reap ▸ send ▸ receive
//! ```
//!
//! A turn begins no round when 1 ms has passed. What a round asks of devices and tables is
//! bounded: the data of the connection's memory, 8 MiB to zero or discard, 16 queries for 256 zones
//! each, one look at all devices or controllers, and one channel that is opened. So a turn takes
//! 1 ms and what a device takes for one round.
//!
//! The phases, and the functions that move between them:
//!
//! ```text
//!         drain: end of the stream, TermReq, violation, failed authentication, device gone
//! SERVES ───────────────────────────────────────────────────────────────────▸ DRAINS
//!   │                                                                          │  │
//!   │ abandon: cut, time-out, error                     abandon: cut, error,   │  │ finish: all
//!   │ of the socket                                     10 s after the drain   │  │ answers are
//!   ▾                                                                          │  │ sent
//! ABANDONS ◂───────────────────────────────────────────────────────────────────┘  │
//!   │ no command in flight of a device that is there, or 10 s                     ▾
//!   ▾                             closed by the host, 1 s     LINGERS, if the end was not the
//! ENDED ◂─────────────────────────────────────────────────── host's own wish; else ENDED
//! ```
//!
//! When the target ends a connection, because a server stops or a device is removed, all queues of
//! the controller drain. A queue first receives what its socket holds at that time, and no more, so
//! that a host that goes on sending does not put the end off; one whose device is removed receives
//! nothing. All commands that have arrived with their data are executed, also those that wait for
//! memory; no other data are asked for. No queue ends while another one owes answers: a host takes
//! the end of one queue for the end of all, and the end of the admin queue cuts the I/O queues.
//!
//! ```text
//!                      no command in flight,     every I/O queue that
//!                      all answers are sent      drains has answered
//! I/O queue:   DRAINS ─────────────────────▸ ... ────────────────────▸ finish
//!
//! admin queue: DRAINS ───────────────────────────────────────────────▸ finish
//!                      every I/O queue that drains has left its controller
//!
//! after 10 s a queue no longer waits for others
//! ```
//!
//! In SERVES, parsing stops while something is missing (`ParseStop`): bytes, a device that is being
//! replaced, a value of Diffie-Hellman, or room for answers, because the host does not read. Then
//! the turn says what the connection waits for (`Wait`): the socket, a time, or only a wake or the
//! descriptors of devices, for which its owner waits always.
//!
//! ```text
//!           ICReq           Connect of queue 0 ──▸ ADMIN
//! NEW ──────────────▸ IDLE ─┤
//!                           └ Connect of queue N ─▸ I/O
//! ```
//!
//! Where hosts have secrets, a connected queue executes no command but those for authentication
//! until its host has authenticated (`authentication.rs`).
//!
//! A connection belongs to one thread at a time, and that of an I/O queue has one channel for each
//! namespace that it uses. A command for a namespace that the queue has open takes no lock and
//! allocates nothing; the first one for a namespace looks it up and opens the channel. Commands in
//! flight, their memory and the PDUs of a batch are bounded. A connection that is idle for a second
//! returns the memory for bytes and data.

mod commands;

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Completion;
use blockyard_os::epoll::Watch;
use blockyard_os::socket;

use crate::admin::AdminQueue;
use crate::authentication::QueueAuth;
use crate::command::{FABRICS_OPCODE, Sqe, StatusCode};
use crate::controller::Controller;
use crate::data_pool::{DataPool, PageSpan};
use crate::dh_worker::DhReply;
use crate::fabrics::ConnectRequest;
use crate::host_link::HostLink;
use crate::host_stream::HostStream;
use crate::identify::QUEUE_ENTRIES_MAX;
use crate::inbox::Inbox;
use crate::io_queue::{IoQueue, Renewal};
use crate::namespace_queue::{DeviceWatch, NamespaceQueue, RoundBudget};
use crate::outbox::Outbox;
use crate::session::SessionShared;
use crate::slots::CommandSlots;
use crate::subsystems::Subsystem;
use crate::wire::{
    self, CAPSULE_HEADER_BYTES, COMMON_HEADER_BYTES, Digests, FatalStatus, PduFault, PduHeader,
    pdu_type, u16_at,
};

/// How long a host may take from connecting to its Connect.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// After this many Connects that were refused, a connection ends.
const CONNECT_REFUSALS_MAX: u32 = 16;
/// How long a connection is idle before it returns memory.
const IDLE_BEFORE_SHRINK: Duration = Duration::from_secs(1);
/// How long an ending connection waits for its commands in flight and for its host to read.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which a host that accepts no byte is disconnected.
pub(crate) const STALL_MAX: Duration = Duration::from_secs(30);
/// How long a connection waits for the host to close it after a TermReq or a failed authentication.
/// Closing the socket at once would reset the connection if the host has sent more, and the host
/// might not get the last answers. The same holds after a drain for which the target asked.
pub(crate) const LINGER: Duration = Duration::from_secs(1);
/// How often a connection looks for the device of a command that waits for memory.
const DEVICE_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The rounds of a turn: a busy host has no more before the others of its thread have had a turn.
const ROUNDS_MAX: u32 = 8;
/// The time after which a turn has no further round.
const TURN_MAX: Duration = Duration::from_millis(1);

/// What a connection is.
enum QueueRole {
    /// Before the ICReq.
    New,
    /// Before the Connect.
    Idle,
    /// The admin queue of a controller.
    Admin(AdminQueue),
    /// An I/O queue of a controller.
    Io(Box<IoQueue>),
}

impl QueueRole {
    fn controller(&self) -> Option<&Arc<Controller>> {
        match self {
            QueueRole::New | QueueRole::Idle => None,
            QueueRole::Admin(admin) => Some(&admin.controller),
            QueueRole::Io(queue) => Some(&queue.controller),
        }
    }

    /// An open namespace of an I/O queue; `None` after the last one.
    fn namespace(&mut self, at: usize) -> Option<&mut NamespaceQueue> {
        match self {
            QueueRole::Io(queue) => queue.namespace(at),
            QueueRole::New | QueueRole::Idle | QueueRole::Admin(_) => None,
        }
    }
}

/// The phase of a connection; the module's head has the diagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serves,
    /// Completes the commands in flight and sends their answers.
    Drains {
        until: Instant,
    },
    /// Completes the commands in flight of a host that can no longer be answered.
    Abandons {
        until: Instant,
    },
    /// Waits for the host to close the connection.
    Lingers {
        until: Instant,
    },
    Ended,
}

/// Why parsing has stopped.
enum ParseStop {
    /// The next PDU needs more bytes.
    NeedsBytes,
    /// The PDUs that wait are to be sent first, or the connection ends.
    Batch,
    /// The next PDU is for a device that is being replaced.
    Absent(Arc<Subsystem>),
    /// Commands in flight use the device, which is being replaced or removed: a wake or a
    /// completion continues.
    Renews,
    /// A value of Diffie-Hellman is being computed.
    Computes,
}

/// What follows a round.
enum AfterRound {
    /// Another round.
    Again,
    /// Nothing, until the socket is ready for this, or something else happens.
    Waits(Option<Watch>),
}

/// What a connection waits for, in addition to its wake and the descriptors of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The event of the socket; `None` for none, not even its end.
    pub(crate) socket: Option<Watch>,
    /// The time of the next turn at the latest.
    pub(crate) until: Option<Instant>,
}

/// What follows a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterTurn {
    /// Another turn, after those of other connections.
    Again,
    /// A turn when one of these comes.
    Waits(Wait),
    /// No other turn: [`HostConnection::leave`] ends the connection.
    Ended,
}

/// Data of a PDU that is being received.
#[derive(Clone, Copy, Debug)]
struct ReceivingData {
    slot: u16,
    /// The place of this PDU's data in the region.
    start: u64,
    len: u32,
    received: u32,
}

/// The connection of a host.
pub(crate) struct HostConnection<S> {
    shared: Arc<SessionShared>,
    link: Arc<HostLink>,
    transport: S,
    address: SocketAddr,
    watch: DeviceWatch,
    role: QueueRole,
    phase: Phase,
    opened: Instant,
    /// The time of the present turn.
    now: Instant,
    /// The clock by which a turn ends.
    clock: fn() -> Instant,
    /// The authentication of the host; `None` before the Connect, and where none is required.
    auth: Option<QueueAuth>,
    /// The place of the value that is being computed for the authentication.
    computing: Option<Arc<DhReply>>,
    /// The Connect that waits for a device that is being replaced.
    connecting: Option<(u16, ConnectRequest)>,
    /// The number of Connects that were refused.
    refusals: u32,
    inbox: Inbox,
    outbox: Outbox,
    /// The time until which the host has to read, while it does not.
    stalled_until: Option<Instant>,
    pool: DataPool,
    slots: CommandSlots,
    /// Commands that wait for memory, in the order of arrival.
    waiting: VecDeque<u16>,
    receiving: Option<ReceivingData>,
    /// Pages of data that are being sent.
    sending: Vec<PageSpan>,
    done: Vec<Completion>,
    /// The number of rounds that have executed commands.
    executions: usize,
    /// Whether the present round has scanned all devices or controllers, or opened a channel.
    has_scanned: bool,
    digests: Digests,
    data_align: usize,
    /// The entries of the submission queue; 1 before the Connect.
    entries: u16,
    sq_head: u16,
    flow_control: bool,
    /// Once the target ends the connection, the bytes that it still receives: they had arrived
    /// before.
    last_bytes: Option<usize>,
    /// The beginning of the present rest.
    idle_since: Option<Instant>,
    fault: Option<PduFault>,
    /// Whether the TermReq for the fault is printed.
    has_term: bool,
    /// Why the connection was abandoned.
    failure: Option<io::Error>,
}

impl<S: HostStream> HostConnection<S> {
    /// A connection of a host that is connected at `address`.
    ///
    /// # Errors
    /// If the system refuses memory.
    pub(crate) fn new(
        shared: Arc<SessionShared>,
        link: Arc<HostLink>,
        (transport, address): (S, SocketAddr),
        watch: DeviceWatch,
        now: Instant,
    ) -> io::Result<HostConnection<S>> {
        Ok(HostConnection {
            shared,
            link,
            transport,
            address,
            watch,
            role: QueueRole::New,
            phase: Phase::Serves,
            opened: now,
            now,
            clock: Instant::now,
            auth: None,
            computing: None,
            connecting: None,
            refusals: 0,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            stalled_until: None,
            pool: DataPool::new()?,
            slots: CommandSlots::new(),
            waiting: VecDeque::with_capacity(QUEUE_ENTRIES_MAX.into()),
            receiving: None,
            sending: Vec::with_capacity(QUEUE_ENTRIES_MAX.into()),
            done: Vec::with_capacity(QUEUE_ENTRIES_MAX.into()),
            executions: 0,
            has_scanned: false,
            digests: Digests::default(),
            data_align: 4,
            entries: 1,
            sq_head: 0,
            flow_control: true,
            last_bytes: None,
            idle_since: None,
            fault: None,
            has_term: false,
            failure: None,
        })
    }

    pub(crate) fn link(&self) -> &Arc<HostLink> {
        &self.link
    }

    pub(crate) fn transport(&self) -> &S {
        &self.transport
    }

    /// Why the connection has ended: an error, a violation of the protocol, or `None` if the host
    /// has disconnected or was asked to leave.
    pub(crate) fn outcome(&self) -> Result<Option<&PduFault>, &io::Error> {
        match &self.failure {
            Some(error) => Err(error),
            None => Ok(self.fault.as_ref()),
        }
    }

    /// Whether the connection is an admin queue.
    pub(crate) fn is_admin(&self) -> bool {
        matches!(self.role, QueueRole::Admin(_))
    }

    /// Whether [`HostConnection::leave`] would wait for a device.
    pub(crate) fn has_in_flight(&self) -> bool {
        matches!(&self.role, QueueRole::Io(queue) if queue.is_busy())
    }

    /// Waits for no descriptor of a device any more.
    pub(crate) fn unwatch(&mut self) {
        let mut at = 0;
        while let Some(namespace) = self.role.namespace(at) {
            namespace.descriptor = None;
            at += 1;
        }
    }

    /// Serves the host for a bounded time.
    pub(crate) fn turn(&mut self, now: Instant) -> AfterTurn {
        self.now = now;
        let until = (self.clock)() + TURN_MAX;
        for _ in 0..ROUNDS_MAX {
            let round = match self.phase {
                Phase::Serves => self.serve(),
                Phase::Drains { until } => self.go_on_draining(until),
                Phase::Abandons { until } => self.go_on_abandoning(until),
                Phase::Lingers { until } => self.linger(until),
                Phase::Ended => return AfterTurn::Ended,
            };
            let wait = round.and_then(|round| match round {
                AfterRound::Again => Ok(None),
                AfterRound::Waits(socket) => self.wait(socket),
            });
            match wait {
                Ok(None) => {}
                Ok(Some(wait)) => return AfterTurn::Waits(wait),
                Err(error) => self.abandon(error),
            }
            if (self.clock)() >= until {
                break;
            }
        }
        match self.phase {
            Phase::Ended => AfterTurn::Ended,
            _ => AfterTurn::Again,
        }
    }

    /// A round of a connection that receives and executes commands.
    fn serve(&mut self) -> io::Result<AfterRound> {
        self.check_cut()?;
        self.has_scanned = false;
        if self.link.is_end_requested() {
            self.begin_end()?;
        }
        if self.stalled_until.is_some() {
            self.send()?;
        }
        let stop = match self.stalled_until {
            Some(_) => ParseStop::Batch,
            None => self.parse(),
        };
        if self.phase != Phase::Serves {
            return Ok(AfterRound::Again);
        }
        let (reaped, has_started) = self.execute_and_send()?;
        // Completions may have made room for more bios, and sent data for more commands.
        if has_started || self.has_more(reaped) {
            return Ok(AfterRound::Again);
        }
        if self.stalled_until.is_some() {
            self.probe_stalled();
            return Ok(AfterRound::Waits(Some(Watch::Writable)));
        }
        match stop {
            ParseStop::NeedsBytes => self.receive(),
            ParseStop::Batch => Ok(AfterRound::Again),
            ParseStop::Absent(_) | ParseStop::Renews if reaped > 0 => Ok(AfterRound::Again),
            ParseStop::Absent(device) => {
                device.wake_with_disk(&self.link);
                Ok(AfterRound::Waits(None))
            }
            ParseStop::Renews | ParseStop::Computes => Ok(AfterRound::Waits(None)),
        }
    }

    /// Begins the end of the connection, for which the target asks: what the host has sent by now
    /// is executed, and no more. The other queues of the controller follow.
    ///
    /// # Errors
    /// If the connection has failed.
    fn begin_end(&mut self) -> io::Result<()> {
        if self.is_ending() {
            return Ok(());
        }
        self.last_bytes = Some(self.transport.unread_bytes()?);
        if let Some(controller) = self.role.controller() {
            controller.drain();
        }
        Ok(())
    }

    /// Whether the target ends the connection.
    fn is_ending(&self) -> bool {
        self.last_bytes.is_some()
    }

    /// Stops parsing: from now on, commands complete that need nothing more from the host.
    fn stop_parsing(&mut self) {
        if self.phase == Phase::Serves {
            self.phase = Phase::Drains { until: self.now + DRAIN_TIMEOUT };
            self.drop_incomplete();
        }
    }

    /// A round of a connection that ends.
    fn go_on_draining(&mut self, until: Instant) -> io::Result<AfterRound> {
        self.check_cut()?;
        self.has_scanned = false;
        if self.stalled_until.is_some() {
            self.send()?;
        }
        let has_idle = self.end_namespaces();
        let (reaped, has_started) = self.execute_and_send()?;
        let has_commands = self.slots.executing() > 0 || !self.waiting.is_empty();
        if !has_commands && self.stalled_until.is_none() && !has_idle {
            return match self.now < until && self.waits_for_queues() {
                true => Ok(AfterRound::Waits(None)),
                false => self.finish(),
            };
        }
        if self.now >= until {
            return Err(socket::timed_out("its last commands took too long"));
        }
        if has_idle || has_started || self.has_more(reaped) {
            return Ok(AfterRound::Again);
        }
        Ok(AfterRound::Waits(self.stalled_until.map(|_| Watch::Writable)))
    }

    /// Whether another queue of the controller has to answer commands before this one ends, which
    /// has answered its own.
    fn waits_for_queues(&self) -> bool {
        match &self.role {
            _ if !self.is_ending() || self.has_failed() => false,
            QueueRole::New | QueueRole::Idle => false,
            QueueRole::Admin(admin) => admin.controller.has_draining_queues(),
            QueueRole::Io(queue) => !queue.controller.note_answered(&self.link),
        }
    }

    /// Whether the connection ends by a fault of its host.
    fn has_failed(&self) -> bool {
        self.fault.is_some() || self.auth.as_ref().is_some_and(QueueAuth::has_ended)
    }

    /// Ends a connection that has answered all commands.
    fn finish(&mut self) -> io::Result<AfterRound> {
        if let Some(fault) = &self.fault
            && !self.has_term
        {
            self.has_term = true;
            let rejected = self.inbox.unread();
            self.outbox.push(|out| wire::print_term(out, fault, rejected));
            return Ok(AfterRound::Again);
        }
        self.leave();
        self.phase = Phase::Ended;
        if self.has_failed() || self.is_ending() {
            self.transport.shutdown(Shutdown::Write);
            self.phase = Phase::Lingers { until: self.now + LINGER };
        }
        Ok(AfterRound::Again)
    }

    /// Gives up the host: it is answered no more.
    fn abandon(&mut self, error: io::Error) {
        self.phase = match self.phase {
            Phase::Serves => Phase::Abandons { until: self.now + DRAIN_TIMEOUT },
            Phase::Drains { until } => Phase::Abandons { until },
            Phase::Abandons { .. } | Phase::Lingers { .. } | Phase::Ended => Phase::Ended,
        };
        self.failure.get_or_insert(error);
        self.transport.shutdown(Shutdown::Both);
        self.note_stalled(None);
        self.computing = None;
        self.waiting.clear();
        if let Some((index, _)) = self.connecting.take() {
            self.release(index);
        }
    }

    /// A round of a connection whose host can no longer be answered.
    fn go_on_abandoning(&mut self, until: Instant) -> io::Result<AfterRound> {
        let has_idle = self.end_namespaces();
        let reaped = self.execute();
        self.outbox.clear();
        self.give_sent_pages();
        if has_idle && self.now < until {
            return Ok(AfterRound::Again);
        }
        if self.slots.executing() == 0 {
            self.leave();
            self.phase = Phase::Ended;
        } else if self.now >= until || self.is_busy_with_removed() {
            self.phase = Phase::Ended;
        } else if !self.has_more(reaped) {
            return Ok(AfterRound::Waits(None));
        }
        Ok(AfterRound::Again)
    }

    /// Whether all devices are removed that have not completed their commands.
    fn is_busy_with_removed(&self) -> bool {
        matches!(&self.role, QueueRole::Io(queue) if queue.is_busy_with_removed())
    }

    /// A round of a connection that waits for its host to close it.
    fn linger(&mut self, until: Instant) -> io::Result<AfterRound> {
        if self.link.is_cut() || self.now >= until {
            self.phase = Phase::Ended;
            return Ok(AfterRound::Again);
        }
        match self.transport.receive(&mut [0; 4096]) {
            Ok(0) => self.phase = Phase::Ended,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(AfterRound::Waits(Some(Watch::Readable)));
            }
            Err(_) => self.phase = Phase::Ended,
        }
        Ok(AfterRound::Again)
    }

    /// # Errors
    /// If the connection was cut.
    fn check_cut(&self) -> io::Result<()> {
        match self.link.is_cut() {
            true => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it was cut off")),
            false => Ok(()),
        }
    }

    /// Whether commands go on in another round, after one that has `reaped` completions.
    fn has_more(&self, reaped: usize) -> bool {
        matches!(&self.role, QueueRole::Io(queue) if queue.has_more(reaped))
    }

    /// On an ending connection, a command of several operations begins no more of them. Returns a
    /// disk that has no command; `true` if there is another such disk.
    fn end_namespaces(&mut self) -> bool {
        let (waiting, slots) = (&self.waiting, &mut self.slots);
        match &mut self.role {
            QueueRole::Io(queue) => {
                queue.end(|device| waiting.iter().any(|index| slots.get(*index).device == device))
            }
            QueueRole::New | QueueRole::Idle | QueueRole::Admin(_) => false,
        }
    }

    /// Ends what the connection is to its controller and subsystem. Waits for requests that a
    /// device executes, if there are any.
    pub(crate) fn leave(&mut self) {
        match std::mem::replace(&mut self.role, QueueRole::New) {
            QueueRole::New | QueueRole::Idle => {}
            QueueRole::Admin(admin) => {
                self.shared.subsystems.controllers.remove(&admin.controller);
                self.shared.subsystems.unwatch(&self.link);
                admin.controller.target.detach(&self.link);
            }
            QueueRole::Io(queue) => queue.close(),
        }
    }

    /// Parses the received PDUs. One for a device that is being replaced waits, and so do those
    /// after it: meanwhile the queue answers the commands that it has begun.
    fn parse(&mut self) -> ParseStop {
        if let Some(stop) = self.renew_namespaces() {
            return stop;
        }
        if !self.take_computed() {
            return ParseStop::Computes;
        }
        while self.phase == Phase::Serves && !self.outbox.is_full() && !self.has_scanned {
            if let Some(stop) = self.stop_for_device() {
                return stop;
            }
            match self.parse_one() {
                Ok(true) if self.computing.is_some() => return ParseStop::Computes,
                Ok(true) if self.connecting.is_some() => return ParseStop::Renews,
                Ok(true) => {}
                Ok(false) => return ParseStop::NeedsBytes,
                Err(fault) => {
                    self.fault = Some(fault);
                    self.stop_parsing();
                }
            }
        }
        ParseStop::Batch
    }

    /// Returns the disks of an I/O queue that are being replaced or removed, when their commands
    /// are completed, and continues with the new ones. Meanwhile commands wait in the socket. If
    /// the device is gone, the connection ends. A queue that has to authenticate has no disk.
    fn renew_namespaces(&mut self) -> Option<ParseStop> {
        if self.auth.as_ref().is_some_and(|auth| !auth.is_authenticated()) {
            return None;
        }
        let QueueRole::Io(queue) = &mut self.role else { return None };
        if !self.waiting.is_empty() && queue.has_lost_device() && self.link.is_end_requested() {
            // The device is removed. Commands that wait for memory go on by the channel that the
            // queue still has, with the memory of those whose data do not come any more.
            return Some(self.end_by_target());
        }
        let refusal = match queue.renew() {
            Renewal::Ready if self.connecting.is_none() => return None,
            Renewal::Ready => None,
            Renewal::InUse | Renewal::Absent => return Some(ParseStop::Renews),
            Renewal::Gone(_) if self.connecting.is_none() => {
                self.link.request_end();
                return Some(self.end_by_target());
            }
            Renewal::Gone(refusal) => Some(refusal),
        };
        self.finish_connect(refusal);
        None
    }

    /// Ends the connection of a queue whose device is gone, without what the host sends from now
    /// on.
    fn end_by_target(&mut self) -> ParseStop {
        match self.begin_end() {
            Ok(()) => self.stop_parsing(),
            Err(error) => self.abandon(error),
        }
        ParseStop::Batch
    }

    /// What the next PDU waits for, if it is of a command for a device that is being replaced or
    /// removed.
    fn stop_for_device(&mut self) -> Option<ParseStop> {
        let QueueRole::Io(queue) = &self.role else { return None };
        if !queue.has_all_devices() {
            return None;
        }
        let nsid = self.next_namespace()?;
        let QueueRole::Io(queue) = &self.role else { return None };
        match queue.is_returning(nsid) {
            true => Some(ParseStop::Renews),
            false => queue.absent_device(nsid).map(ParseStop::Absent),
        }
    }

    /// The namespace of the command of which the next PDU is.
    fn next_namespace(&mut self) -> Option<u32> {
        let unread = self.inbox.unread();
        let index = match (&self.receiving, unread.first()) {
            (Some(data), _) => data.slot,
            (None, Some(&pdu_type::CAPSULE_CMD)) => {
                let sqe = Sqe::parse(unread.get(COMMON_HEADER_BYTES..CAPSULE_HEADER_BYTES)?)?;
                return (sqe.opcode() != FABRICS_OPCODE).then(|| sqe.nsid());
            }
            (None, Some(&pdu_type::H2C_DATA)) => {
                let ids = unread.get(COMMON_HEADER_BYTES..COMMON_HEADER_BYTES + 4)?;
                self.slots.find_receiving(u16_at(ids, 2), u16_at(ids, 0))?
            }
            _ => return None,
        };
        let slot = self.slots.get(index);
        // A command for authentication has no device.
        (slot.device != 0).then(|| slot.sqe.nsid())
    }

    /// Parses one PDU, or data of one; `false` if more bytes are needed.
    fn parse_one(&mut self) -> Result<bool, PduFault> {
        if self.receiving.is_some() {
            return Ok(self.take_data());
        }
        let unread = self.inbox.unread();
        let Some(header) = PduHeader::parse(unread) else { return Ok(false) };
        let layout = header.check(self.digests)?;
        let is_new = matches!(self.role, QueueRole::New);
        if is_new != (header.kind == pdu_type::IC_REQ) && header.kind != pdu_type::H2C_TERM_REQ {
            let text = "a PDU before the ICReq, or a second ICReq";
            return Err(PduFault::new(FatalStatus::Sequence, 0, text));
        }
        let needed = if header.kind == pdu_type::H2C_DATA { layout.data_at } else { layout.len };
        let Some(pdu) = unread.get(..needed) else { return Ok(false) };
        let has_digest = self.digests.header && header.kind != pdu_type::H2C_TERM_REQ;
        if has_digest && !is_new {
            wire::check_header_digest(pdu, layout.header_bytes)?;
        }
        match header.kind {
            pdu_type::IC_REQ => self.initialize()?,
            pdu_type::CAPSULE_CMD => self.take_capsule(&layout)?,
            pdu_type::H2C_DATA => self.begin_data(&layout)?,
            _ => {
                tracing::debug!(peer = self.link.peer, "the host ended the connection");
                self.stop_parsing();
            }
        }
        self.inbox.skip(needed);
        Ok(true)
    }

    /// Executes commands; returns the number of completions.
    fn execute(&mut self) -> usize {
        let QueueRole::Io(queue) = &self.role else { return 0 };
        let (count, mut budget) = (queue.namespaces_open(), RoundBudget::default());
        // Each round begins with another namespace: none takes the budget of all rounds.
        self.executions = self.executions.wrapping_add(1);
        let first = self.executions;
        (0..count).map(|at| self.execute_for(first.wrapping_add(at) % count, &mut budget)).sum()
    }

    /// Executes commands for a namespace; returns the number of operations that have ended.
    fn execute_for(&mut self, at: usize, budget: &mut RoundBudget) -> usize {
        self.done.clear();
        let Some(namespace) = self.role.namespace(at) else { return 0 };
        namespace.execute(&mut self.done, budget);
        let scanning = namespace.next_scan(budget);
        for done in 0..self.done.len() {
            let completion = self.done[done];
            let index = completion.user_data as u16;
            if let Some(namespace) = self.role.namespace(at) {
                let progress = namespace.completed(index, self.slots.get(index), &completion);
                self.note(index, progress);
            }
        }
        if let (Some(index), Some(namespace)) = (scanning, self.role.namespace(at)) {
            let progress = namespace.scan(index, self.slots.get(index));
            self.note(index, progress);
        }
        self.done.len() + usize::from(scanning.is_some())
    }

    /// Executes commands and sends their answers, unless the host does not read. Returns the number
    /// of completions, and whether sent data gave memory to commands.
    fn execute_and_send(&mut self) -> io::Result<(usize, bool)> {
        let reaped = self.execute();
        self.send_events();
        let has_started = self.stalled_until.is_none() && self.send()?;
        Ok((reaped, has_started))
    }

    /// Completes requests for events of which one is due.
    fn send_events(&mut self) {
        let QueueRole::Admin(admin) = &mut self.role else { return };
        if let Some((cid, result)) = admin.take_event() {
            self.push_completion(cid, StatusCode::OK, result);
        }
    }

    /// Sends as many PDUs as the host accepts. Once all are sent, gives their memory to commands
    /// that wait for it; `true` if some did.
    ///
    /// # Errors
    /// If the connection fails, or the host accepts nothing for too long.
    fn send(&mut self) -> io::Result<bool> {
        if !self.outbox.is_empty() {
            let is_any = self.outbox.send(&mut self.transport, self.pool.region())?;
            if !self.outbox.is_empty() {
                match self.stalled_until {
                    Some(until) if !is_any && self.now >= until => {
                        return Err(socket::timed_out("the host did not read for 30 s"));
                    }
                    Some(_) if !is_any => {}
                    _ => self.note_stalled(Some(self.now + STALL_MAX)),
                }
                return Ok(false);
            }
            self.note_stalled(None);
        }
        self.give_sent_pages();
        if self.waiting.is_empty() {
            return Ok(false);
        }
        let waiting = self.waiting.len();
        self.grant_memory();
        Ok(self.waiting.len() < waiting)
    }

    /// Looks whether a host that does not read has closed the connection, if a later association
    /// waits for that. A host that closes it with unread answers resets it (RFC 9293, 3.6.1), and
    /// then the connection ends before it parses anything.
    fn probe_stalled(&self) {
        let serial = self.link.begin_probe();
        if self.link.owes_probe(serial) && !self.transport.has_ended() {
            self.link.note_probed(serial);
        }
    }

    fn note_stalled(&mut self, until: Option<Instant>) {
        if self.stalled_until.is_some() != until.is_some() {
            self.link.note_stalled(until.is_some());
        }
        self.stalled_until = until;
    }

    /// Returns the pages of data that are sent.
    fn give_sent_pages(&mut self) {
        for span in self.sending.drain(..) {
            self.pool.give(span);
        }
    }

    /// Receives what there is.
    fn receive(&mut self) -> io::Result<AfterRound> {
        // A host that sends without end has no more time than a silent one.
        if self.setup_deadline().is_some_and(|deadline| self.now >= deadline) {
            return Err(socket::timed_out("the host did not connect or authenticate in time"));
        }
        let most = self.last_bytes.unwrap_or(usize::MAX);
        if most == 0 {
            self.stop_parsing();
            return Ok(AfterRound::Again);
        }
        let serial = self.link.begin_probe();
        let transport = &mut self.transport;
        let received = match &mut self.receiving {
            Some(data) if data.received < data.len && self.inbox.unread().is_empty() => {
                let (at, len) = (data.start + u64::from(data.received), data.len - data.received);
                let got = transport.receive_at(self.pool.region(), at, most.min(len as usize));
                data.received += *got.as_ref().unwrap_or(&0) as u32;
                got
            }
            _ => self.inbox.receive(|into| {
                let len = most.min(into.len());
                transport.receive(&mut into[..len])
            }),
        };
        match received {
            Ok(0) => self.stop_parsing(),
            Ok(len) => {
                self.last_bytes = self.last_bytes.map(|left| left - len);
                self.note_heard();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.link.note_probed(serial);
                if !self.is_ending() {
                    return Ok(AfterRound::Waits(Some(Watch::Readable)));
                }
                self.stop_parsing();
            }
            Err(error) => return Err(error),
        }
        Ok(AfterRound::Again)
    }

    /// Notes that the host is alive, if it has proved that it is the controller's.
    fn note_heard(&mut self) {
        self.idle_since = None;
        if let Some(controller) = self.role.controller()
            && self.is_proved()
        {
            controller.note_heard(self.now);
        }
    }

    /// Whether the host has authenticated, or does not have to.
    fn is_proved(&self) -> bool {
        self.auth.as_ref().is_none_or(QueueAuth::is_authenticated)
    }

    /// The time at which the host has to have connected, or authenticated.
    fn setup_deadline(&self) -> Option<Instant> {
        match &self.role {
            QueueRole::New | QueueRole::Idle => Some(self.opened + CONNECT_TIMEOUT),
            QueueRole::Admin(_) | QueueRole::Io(_) => self.auth.as_ref()?.deadline(),
        }
    }

    /// The time until which the host has to send something on this connection, if the connection
    /// would receive it. A host that computes its first response may be silent for longer than its
    /// keep-alive time-out.
    fn deadline(&self, receives: bool) -> Option<Instant> {
        let silent = match &self.role {
            QueueRole::Admin(admin) if receives && self.is_proved() => admin.controller.deadline(),
            _ => None,
        };
        self.setup_deadline().into_iter().chain(silent).min()
    }

    /// What the connection waits for if the socket is to be ready for `socket`; `None` if there is
    /// something to do at once.
    ///
    /// # Errors
    /// If a time is up.
    fn wait(&mut self, socket: Option<Watch>) -> io::Result<Option<Wait>> {
        let now = self.now;
        let deadline = match self.phase {
            Phase::Serves => self.deadline(socket == Some(Watch::Readable)),
            Phase::Drains { until } | Phase::Abandons { until } | Phase::Lingers { until } => {
                return Ok(self.wait_for_devices(socket, Some(until)));
            }
            Phase::Ended => None,
        };
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Err(socket::timed_out("the host was silent for too long"));
        }
        let mut until = deadline.into_iter().chain(self.stalled_until).min();
        let mut earlier = |at: Instant| until = Some(until.unwrap_or(at).min(at));
        if self.waiting.front().copied().is_some_and(|index| self.lacks_device(index)) {
            earlier(now + DEVICE_CHECK_INTERVAL);
        }
        let is_grown = self.pool.is_touched() || self.inbox.can_shrink();
        if self.slots.in_use() == 0 && is_grown && socket == Some(Watch::Readable) {
            let since = *self.idle_since.get_or_insert(now);
            match now < since + IDLE_BEFORE_SHRINK {
                true => earlier(since + IDLE_BEFORE_SHRINK),
                false => self.shrink(),
            }
        }
        Ok(self.wait_for_devices(socket, until))
    }

    /// What the connection waits for, with the completions of devices; `None` if there are some.
    fn wait_for_devices(
        &mut self,
        socket: Option<Watch>,
        mut until: Option<Instant>,
    ) -> Option<Wait> {
        if let QueueRole::Io(queue) = &mut self.role
            && let Some(due) = queue.prepare_sleep(self.now)
        {
            if due <= self.now {
                return None;
            }
            until = Some(until.unwrap_or(due).min(due));
        }
        Some(Wait { socket, until })
    }

    /// Returns the memory of an idle connection, except for received bytes.
    fn shrink(&mut self) {
        self.pool.shrink();
        self.inbox.shrink();
        self.outbox.shrink();
        self.idle_since = None;
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
#[path = "../tests/model/connection.rs"]
mod model;
