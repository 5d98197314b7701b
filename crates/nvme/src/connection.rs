//! A connection: PDUs become commands, completions become PDUs.
//!
//! ```text
//! receive ▸ parse all that is there ▸ push, submit, reap ▸ send all PDUs ▸ receive ..
//! ```
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
//! A connection has one thread, and that of an I/O queue one channel for each namespace that it
//! uses. A command for a namespace that the queue has open takes no lock and allocates nothing; the
//! first one for a namespace looks it up and opens the channel. Commands in flight, their memory
//! and the PDUs of a batch are bounded.

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::{Completion, Op};
use blockyard_os::socket::{self, Ready, WaitMode};

use crate::admin::{AdminAnswer, AdminQueue};
use crate::auth_message;
use crate::authentication::{AuthProgress, QueueAuth};
use crate::command::{Cqe, FABRICS_OPCODE, Sqe, StatusCode, fabrics_type};
use crate::data_pool::{DataPool, PageSpan, digest_of};
use crate::fabrics::{
    AUTH_REQUESTED, CONNECT_BYTES, ConnectRefusal, ConnectRequest, DISCOVERY_NQN, PropertyRequest,
};
use crate::host_link::{HostLink, LinkRole};
use crate::identify::QUEUE_ENTRIES_MAX;
use crate::inbox::Inbox;
use crate::io_queue::IoQueue;
use crate::namespace::{IoPlan, Transfer, check_pointer};
use crate::namespace_queue::{CommandProgress, NamespaceQueue};
use crate::outbox::{self, Outbox};
use crate::session::SessionShared;
use crate::slots::{CommandPlan, CommandSlot, CommandSlots, SlotPhase};
use crate::subsystems::{CUT_CHECK_INTERVAL, Subsystem};
use crate::wire::{
    self, C2hData, CAPSULE_HEADER_BYTES, COMMON_HEADER_BYTES, DIGEST_BYTES, Digests, FatalStatus,
    H2cData, IcReq, PduFault, PduHeader, PduLayout, crc32c, pdu_type, u16_at, u32_at,
};

/// How long a host may take from connecting to its Connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection is idle before it returns memory.
const IDLE_BEFORE_SHRINK: Duration = Duration::from_secs(1);
/// How long an ending connection waits for its commands in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

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
    /// An open namespace of an I/O queue; `None` after the last one.
    fn namespace(&mut self, at: usize) -> Option<&mut NamespaceQueue> {
        match self {
            QueueRole::Io(queue) => queue.namespace(at),
            QueueRole::New | QueueRole::Idle | QueueRole::Admin(_) => None,
        }
    }
}

/// Why parsing has stopped.
enum ParseStop {
    /// The next PDU needs more bytes.
    NeedsBytes,
    /// The PDUs that wait are to be sent first, or the connection ends.
    Batch,
    /// The next PDU is for a device that is being replaced.
    Absent(Arc<Subsystem>),
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
pub(crate) struct HostConnection {
    shared: Arc<SessionShared>,
    link: Arc<HostLink>,
    address: SocketAddr,
    role: QueueRole,
    opened: Instant,
    /// The authentication of the host; `None` before the Connect, and where none is required.
    auth: Option<QueueAuth>,
    inbox: Inbox,
    outbox: Outbox,
    pool: DataPool,
    slots: CommandSlots,
    /// Commands that wait for memory, in the order of arrival.
    waiting: std::collections::VecDeque<u16>,
    receiving: Option<ReceivingData>,
    /// Pages of data that are being sent.
    sending: Vec<PageSpan>,
    done: Vec<Completion>,
    digests: Digests,
    data_align: usize,
    /// The entries of the submission queue; 1 before the Connect.
    entries: u16,
    sq_head: u16,
    flow_control: bool,
    /// Whether parsing has stopped: only commands in flight complete.
    ending: bool,
    overdue_at: Option<Instant>,
    fault: Option<PduFault>,
}

impl HostConnection {
    pub(crate) fn new(
        shared: Arc<SessionShared>,
        link: Arc<HostLink>,
    ) -> io::Result<HostConnection> {
        link.socket.set_nonblocking(true)?;
        Ok(HostConnection {
            address: link.socket.local_addr()?,
            shared,
            link,
            role: QueueRole::New,
            opened: Instant::now(),
            auth: None,
            inbox: Inbox::new(),
            outbox: Outbox::new(),
            pool: DataPool::new()?,
            slots: CommandSlots::new(),
            waiting: std::collections::VecDeque::with_capacity(QUEUE_ENTRIES_MAX.into()),
            receiving: None,
            sending: Vec::with_capacity(QUEUE_ENTRIES_MAX.into()),
            done: Vec::with_capacity(QUEUE_ENTRIES_MAX.into()),
            digests: Digests::default(),
            data_align: 4,
            entries: 1,
            sq_head: 0,
            flow_control: true,
            ending: false,
            overdue_at: None,
            fault: None,
        })
    }

    /// Serves the host until it disconnects, is asked to leave, or violates the protocol; the
    /// violation is returned.
    ///
    /// # Errors
    /// If the connection fails, or is cut.
    pub(crate) fn serve(&mut self) -> io::Result<Option<PduFault>> {
        blockyard_os::sharpen_timers();
        let served = self.serve_commands();
        if served.is_err() {
            self.finish();
        }
        self.leave();
        served
    }

    fn serve_commands(&mut self) -> io::Result<Option<PduFault>> {
        loop {
            self.renew_namespaces()?;
            // Before a command that was held begins.
            if self.link.is_cut() {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it was cut off"));
            }
            let stop = self.parse();
            self.end_namespaces();
            let reaped = self.execute();
            self.send_events();
            let has_started = self.send()?;
            if self.ending && self.slots.executing() == 0 {
                if let Some(fault) = &self.fault {
                    // The last PDU: the completions of commands in flight are sent.
                    let rejected = self.inbox.unread();
                    self.outbox.push(|out| wire::print_term(out, fault, rejected));
                    self.send()?;
                }
                if self.fault.is_some() || self.auth.as_ref().is_some_and(QueueAuth::has_ended) {
                    outbox::linger(&self.link.socket);
                }
                return Ok(self.fault);
            }
            if self.ending && self.is_overdue() {
                return Err(socket::timed_out("its last commands took too long"));
            }
            // Completions may have made room for more bios, and sent data for more commands.
            if has_started || (reaped > 0 && self.has_bios()) {
                continue;
            }
            match stop {
                ParseStop::Absent(device) if reaped == 0 => self.wait_for(&device),
                ParseStop::NeedsBytes => self.receive()?,
                ParseStop::Batch if self.ending => self.receive()?,
                ParseStop::Absent(_) | ParseStop::Batch => {}
            }
        }
    }

    /// Waits for a short time for commands in flight, or else for a device that is being replaced.
    fn wait_for(&mut self, device: &Subsystem) {
        match &mut self.role {
            QueueRole::Io(queue) if !queue.is_idle() => {
                queue.wait(Instant::now() + CUT_CHECK_INTERVAL);
            }
            _ => device.wait_for_disk(),
        }
    }

    fn has_bios(&self) -> bool {
        matches!(&self.role, QueueRole::Io(queue) if queue.has_bios())
    }

    /// Waits for commands in flight of a host that can no longer be answered.
    fn finish(&mut self) {
        self.ending = true;
        while self.slots.executing() > 0 && !self.is_overdue() {
            self.end_namespaces();
            let reaped = self.execute();
            if let QueueRole::Io(queue) = &mut self.role
                && reaped == 0
            {
                queue.wait(Instant::now() + CUT_CHECK_INTERVAL);
            }
        }
    }

    /// On an ending connection, begins no more operations of commands, and returns the disks that
    /// have no command.
    fn end_namespaces(&mut self) {
        if let QueueRole::Io(queue) = &mut self.role
            && self.ending
        {
            queue.end();
        }
    }

    /// Returns the disks of an I/O queue that are being replaced or removed, when their commands
    /// are completed, and continues with the new ones. Meanwhile commands wait in the socket.
    fn renew_namespaces(&mut self) -> io::Result<()> {
        let gone = |text| Err(io::Error::new(io::ErrorKind::ConnectionAborted, text));
        loop {
            match &mut self.role {
                QueueRole::Io(queue) if queue.is_outdated() && !self.ending => {
                    if queue.may_renew() {
                        break;
                    }
                }
                _ => return Ok(()),
            }
            let reaped = self.execute();
            self.send()?;
            if self.link.is_cut() {
                return gone("it was cut off");
            }
            if let QueueRole::Io(queue) = &mut self.role
                && reaped == 0
            {
                queue.wait(Instant::now() + CUT_CHECK_INTERVAL);
            }
        }
        // Answers of commands that ended without the device.
        self.send()?;
        let is_renewed = match &mut self.role {
            QueueRole::Io(queue) => queue.renew(),
            _ => true,
        };
        if is_renewed { Ok(()) } else { gone("its device is gone") }
    }

    /// Whether an ending connection has waited long enough for its device.
    fn is_overdue(&mut self) -> bool {
        let now = Instant::now();
        now >= *self.overdue_at.get_or_insert(now + DRAIN_TIMEOUT)
    }

    /// Ends what the connection is to its controller and subsystem.
    fn leave(&mut self) {
        let controller = match std::mem::replace(&mut self.role, QueueRole::New) {
            QueueRole::New | QueueRole::Idle => return,
            QueueRole::Admin(admin) => {
                admin.controller.close();
                self.shared.subsystems.controllers.remove(&admin.controller);
                self.shared.subsystems.unwatch(&self.link);
                admin.controller
            }
            QueueRole::Io(queue) => {
                // Before the controller stops counting the queue.
                let controller = queue.close();
                controller.close_queue(&self.link);
                controller
            }
        };
        controller.target.detach(&self.link);
    }

    /// Parses the received PDUs. One for a device that is being replaced waits, and so do those
    /// after it: meanwhile the queue answers the commands that it has begun.
    fn parse(&mut self) -> ParseStop {
        while !self.ending && !self.outbox.is_full() {
            if let Some(device) = self.absent_device() {
                return ParseStop::Absent(device);
            }
            match self.parse_one() {
                Ok(true) => {}
                Ok(false) => return ParseStop::NeedsBytes,
                Err(fault) => {
                    self.fault = Some(fault);
                    self.ending = true;
                }
            }
        }
        ParseStop::Batch
    }

    /// The device for whose command the next PDU is, if it is being replaced.
    fn absent_device(&mut self) -> Option<Arc<Subsystem>> {
        let QueueRole::Io(queue) = &self.role else { return None };
        if !queue.has_all_devices() {
            return None;
        }
        let unread = self.inbox.unread();
        let index = match (&self.receiving, unread.first()) {
            (Some(data), _) => data.slot,
            (None, Some(&pdu_type::CAPSULE_CMD)) => {
                let sqe = Sqe::parse(unread.get(COMMON_HEADER_BYTES..CAPSULE_HEADER_BYTES)?)?;
                let nsid = (sqe.opcode() != FABRICS_OPCODE).then(|| sqe.nsid())?;
                return queue.absent_device(nsid);
            }
            (None, Some(&pdu_type::H2C_DATA)) => {
                let ids = unread.get(COMMON_HEADER_BYTES..COMMON_HEADER_BYTES + 4)?;
                self.slots.find_receiving(u16_at(ids, 2), u16_at(ids, 0))?
            }
            _ => return None,
        };
        queue.absent_device_of(self.slots.get(index))
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
                self.ending = true;
            }
        }
        self.inbox.skip(needed);
        Ok(true)
    }

    fn initialize(&mut self) -> Result<(), PduFault> {
        let request = IcReq::parse(self.inbox.unread())?;
        let digests = request.digests;
        self.outbox.push(|out| wire::print_ic_resp(out, digests));
        self.digests = digests;
        self.data_align = request.data_align;
        self.role = QueueRole::Idle;
        Ok(())
    }

    /// Begins a command whose capsule has arrived.
    fn take_capsule(&mut self, layout: &PduLayout) -> Result<(), PduFault> {
        let overflow =
            PduFault::new(FatalStatus::Limit, 0, "more commands than the queue has entries");
        if self.slots.in_use() >= self.entries {
            return Err(overflow);
        }
        let pdu = &self.inbox.unread()[..layout.len];
        let sqe = Sqe::parse(&pdu[COMMON_HEADER_BYTES..CAPSULE_HEADER_BYTES]);
        let index = sqe.and_then(|sqe| self.slots.take(sqe)).ok_or(overflow)?;
        let mut is_damaged = false;
        if layout.data_len > 0 {
            let (data, rest) = pdu[layout.data_at..].split_at(layout.data_len);
            is_damaged = self.digests.data && u32_at(rest, 0) != crc32c(data);
            let place = self.pool.capsule(index);
            self.pool.region().write(place, data);
            self.slots.get(index).data = place;
        }
        self.link.stats.commands.add(1);
        if self.flow_control && self.entries > 1 {
            self.sq_head = (self.sq_head + 1) % self.entries;
        }
        match self.begin(index, layout.data_len) {
            Err(status) => self.complete(index, status, 0),
            Ok(()) if is_damaged => self.complete(index, StatusCode::TRANSIENT, 0),
            Ok(()) => self.start(index),
        }
        Ok(())
    }

    /// Decides what a command is, and where its data are.
    fn begin(&mut self, index: u16, in_capsule_len: usize) -> Result<(), StatusCode> {
        let sqe = self.slots.get(index).sqe;
        let fabrics_type = (sqe.opcode() == FABRICS_OPCODE).then(|| sqe.fabrics_type());
        let (plan, transfer) = match (fabrics_type, &self.auth, &mut self.role) {
            (Some(fabrics_type::CONNECT), ..) => {
                (CommandPlan::Connect, Transfer::FromHost(CONNECT_BYTES))
            }
            (Some(fabrics_type::AUTH_SEND), Some(_), _) => {
                let len = auth_message::transfer_len(&sqe, auth_message::SEND_BYTES_MAX)?;
                (CommandPlan::AuthSend, Transfer::FromHost(len))
            }
            (Some(fabrics_type::AUTH_RECEIVE), Some(_), _) => return Ok(()),
            (_, Some(auth), _) if !auth.is_authenticated() => {
                return Err(StatusCode::AUTH_REQUIRED);
            }
            (None, _, QueueRole::Io(queue)) => {
                let plan = queue.plan(self.slots.get(index))?;
                (CommandPlan::Io(plan), plan.transfer())
            }
            // No other command of the admin queue has data from the host.
            _ => return Ok(()),
        };
        check_pointer(&sqe, transfer, in_capsule_len)?;
        let slot = self.slots.get(index);
        slot.plan = plan;
        if let Transfer::FromHost(len) | Transfer::ToHost(len) = transfer {
            slot.len = len;
            slot.received = in_capsule_len as u32;
        }
        if slot.pages_bytes() > 0 {
            slot.phase = SlotPhase::WaitsForMemory;
        }
        Ok(())
    }

    /// Starts a command, or lets it wait for memory.
    fn start(&mut self, index: u16) {
        if self.slots.get(index).phase == SlotPhase::WaitsForMemory {
            self.waiting.push_back(index);
            self.grant_memory();
        } else {
            self.carry_out(index);
        }
    }

    /// Whether the device of a command is being replaced.
    fn lacks_device(&mut self, index: u16) -> bool {
        let QueueRole::Io(queue) = &self.role else { return false };
        queue.absent_device_of(self.slots.get(index)).is_some()
    }

    /// Gives memory to commands that wait for it, in the order of arrival.
    fn grant_memory(&mut self) {
        while let Some(&index) = self.waiting.front() {
            if self.lacks_device(index) {
                return;
            }
            let slot = self.slots.get(index);
            let Some(span) = self.pool.take(slot.pages_bytes()) else { return };
            self.waiting.pop_front();
            slot.take_pages(span);
            if !slot.lacks_data() {
                slot.phase = SlotPhase::Executes;
                self.carry_out(index);
                continue;
            }
            slot.phase = SlotPhase::Receives;
            let (cid, len) = (slot.sqe.cid(), slot.len);
            let tag = self.slots.new_tag(index);
            let digests = self.digests;
            self.outbox.push(|out| wire::print_r2t(out, cid, tag, len, digests));
        }
    }

    /// Begins to receive the data of an H2CData.
    fn begin_data(&mut self, layout: &PduLayout) -> Result<(), PduFault> {
        let data = H2cData::parse(self.inbox.unread(), layout)?;
        let Some(index) = self.slots.find_receiving(data.tag, data.cid) else {
            let text = "data that no R2T asked for";
            return Err(PduFault::new(FatalStatus::HeaderField, 10, text));
        };
        let slot = self.slots.get(index);
        if data.offset != slot.received || data.len > slot.len - slot.received {
            let text = "data out of order, or outside the requested range";
            return Err(PduFault::new(FatalStatus::DataRange, 12, text));
        }
        let start = slot.data + u64::from(data.offset);
        self.receiving = Some(ReceivingData { slot: index, start, len: data.len, received: 0 });
        Ok(())
    }

    /// Takes received data of an H2CData; `false` if more are needed.
    fn take_data(&mut self) -> bool {
        let Some(mut data) = self.receiving else { return true };
        let unread = self.inbox.unread();
        let part = unread.len().min((data.len - data.received) as usize);
        self.pool.region().write(data.start + u64::from(data.received), &unread[..part]);
        self.inbox.skip(part);
        data.received += part as u32;
        self.receiving = Some(data);
        if data.received < data.len {
            return false;
        }
        let slot = self.slots.get(data.slot);
        if self.digests.data {
            let unread = self.inbox.unread();
            let Some(digest) = unread.get(..DIGEST_BYTES) else { return false };
            let digest = u32_at(digest, 0);
            slot.is_damaged |= digest != digest_of(self.pool.region(), data.start, data.len);
            self.inbox.skip(DIGEST_BYTES);
        }
        self.receiving = None;
        slot.received += data.len;
        if slot.received == slot.len {
            slot.phase = SlotPhase::Executes;
            match slot.is_damaged {
                true => self.complete(data.slot, StatusCode::TRANSIENT, 0),
                false => self.carry_out(data.slot),
            }
        }
        true
    }

    /// Executes a command whose data, if it has any from the host, are complete.
    fn carry_out(&mut self, index: u16) {
        let slot = self.slots.get(index);
        let sqe = slot.sqe;
        if sqe.opcode() == FABRICS_OPCODE {
            self.carry_out_fabrics(index, &sqe);
            return;
        }
        match &mut self.role {
            QueueRole::New | QueueRole::Idle => self.complete(index, StatusCode::SEQUENCE, 0),
            QueueRole::Io(queue) => {
                let progress = queue.start(index, slot);
                self.note(index, progress);
            }
            QueueRole::Admin(admin) => match admin.execute(&sqe) {
                Err(status) => self.complete(index, status, 0),
                Ok(AdminAnswer::Result(result)) => self.complete(index, StatusCode::OK, result),
                Ok(AdminAnswer::Waits) => {
                    self.slots.give(index);
                }
                Ok(AdminAnswer::Aborted(cid)) => {
                    self.push_completion(cid, StatusCode::ABORTED, 0);
                    self.complete(index, StatusCode::OK, 0);
                }
                Ok(AdminAnswer::Data(page)) => self.send_page(index, &sqe, &page),
            },
        }
    }

    fn carry_out_fabrics(&mut self, index: u16, sqe: &Sqe) {
        let controller = match &self.role {
            QueueRole::Admin(admin) => Some(Arc::clone(&admin.controller)),
            QueueRole::New | QueueRole::Idle | QueueRole::Io(_) => None,
        };
        let property = |get: bool| {
            let controller = controller.as_ref().ok_or(StatusCode::SEQUENCE)?;
            let request = PropertyRequest::parse(sqe)?;
            match get {
                true => controller.property(&request, &self.shared.subsystems.controllers),
                false => controller.set_property(&request).map(|()| 0),
            }
        };
        let answer = match sqe.fabrics_type() {
            fabrics_type::CONNECT => match self.connect(index, sqe) {
                Ok(result) => Ok(result),
                Err(refusal) => {
                    self.complete(index, refusal.status, refusal.result);
                    return;
                }
            },
            fabrics_type::PROPERTY_GET => property(true),
            fabrics_type::PROPERTY_SET => property(false),
            fabrics_type::AUTH_SEND if self.auth.is_some() => {
                self.take_message(index);
                return;
            }
            fabrics_type::AUTH_RECEIVE if self.auth.is_some() => {
                self.send_message(index, sqe);
                return;
            }
            _ => Err(StatusCode::INVALID_OPCODE),
        };
        match answer {
            Ok(result) => self.complete(index, StatusCode::OK, result),
            Err(status) => self.complete(index, status, 0),
        }
        if let QueueRole::Admin(admin) = &mut self.role {
            admin.note_phase();
        }
    }

    /// Executes an Authentication Send.
    fn take_message(&mut self, index: u16) {
        let slot = self.slots.get(index);
        let mut message = vec![0; slot.len as usize];
        self.pool.region().read(slot.data, &mut message);
        self.complete(index, StatusCode::OK, 0);
        if let Some(auth) = &mut self.auth {
            let progress = auth.send(&message, Instant::now());
            self.note_authentication(progress);
        }
    }

    /// Executes an Authentication Receive.
    fn send_message(&mut self, index: u16, sqe: &Sqe) {
        let Some(auth) = &mut self.auth else { return };
        let message = auth_message::transfer_len(sqe, auth_message::RECEIVE_BYTES_MAX)
            .and_then(|len| check_pointer(sqe, Transfer::ToHost(len), 0).map(|()| len))
            .and_then(|len| auth.receive(len));
        match message {
            Ok((message, progress)) => {
                self.send_page(index, sqe, &message);
                self.note_authentication(progress);
            }
            Err(status) => self.complete(index, status, 0),
        }
    }

    fn note_authentication(&mut self, progress: AuthProgress) {
        let Some(auth) = &self.auth else { return };
        let is_taken = |queue: &IoQueue| !queue.controller.prove_queue(&self.link);
        let progress = match (progress, &self.role) {
            (AuthProgress::Authenticated, QueueRole::Io(queue)) if is_taken(queue) => {
                AuthProgress::Ended("another connection has its queue")
            }
            (progress, _) => progress,
        };
        match progress {
            AuthProgress::Continues => {}
            AuthProgress::Authenticated => self.note_connected(auth.role.clone()),
            AuthProgress::Ended(why) => {
                let (peer, LinkRole { subsystem, host, queue, .. }) = (&self.link.peer, &auth.role);
                tracing::warn!(peer, subsystem, host, queue, "a host did not authenticate: {why}");
                self.ending = true;
            }
        }
    }

    /// Notes that the host can use the queue.
    fn note_connected(&self, role: LinkRole) {
        let (peer, LinkRole { subsystem, host, controller, queue }) = (&self.link.peer, &role);
        tracing::debug!(peer, subsystem, host, controller, queue, "connected");
        // A connection has one role; its host may authenticate again.
        let _ = self.link.role.set(role);
    }

    /// Executes a Connect; returns its result.
    fn connect(&mut self, index: u16, sqe: &Sqe) -> Result<u64, ConnectRefusal> {
        if !matches!(self.role, QueueRole::Idle) {
            return Err(ConnectRefusal::new(StatusCode::SEQUENCE));
        }
        let mut data = [0; CONNECT_BYTES as usize];
        self.pool.region().read(self.slots.get(index).data, &mut data);
        let request = ConnectRequest::parse(sqe, &data)?;
        let controller = match request.queue {
            0 => {
                let admin = self.shared.connect_admin(&self.link, self.address, &request)?;
                let id = admin.controller.id;
                self.role = QueueRole::Admin(admin);
                id
            }
            _ => {
                let queue = self.shared.connect_io(&self.link, self.pool.region(), &request)?;
                let id = queue.controller.id;
                self.role = QueueRole::Io(Box::new(queue));
                id
            }
        };
        self.entries = request.entries;
        self.flow_control = !request.no_flow_control;
        self.sq_head = if self.flow_control { 1 } else { 0xffff };
        let role = LinkRole {
            subsystem: request.subsystem,
            host: request.host.nqn,
            controller,
            queue: request.queue,
        };
        let rules = match role.subsystem == DISCOVERY_NQN {
            true => None,
            false => self.shared.subsystems.access.authentication.clone(),
        };
        let Some(rules) = rules else {
            self.note_connected(role);
            return Ok(controller.into());
        };
        self.auth = Some(QueueAuth::new(role, rules, Instant::now()));
        Ok(u64::from(controller) | AUTH_REQUESTED)
    }

    /// Answers a command of an I/O queue that has ended.
    fn note(&mut self, index: u16, progress: CommandProgress) {
        let CommandProgress::Ended(status, result) = progress else { return };
        let slot = self.slots.get(index);
        let CommandPlan::Io(plan) = slot.plan else {
            self.complete(index, status, result);
            return;
        };
        if !status.is_ok() {
            self.complete(index, status, 0);
            return;
        }
        match (plan, plan.transfer()) {
            (_, Transfer::ToHost(len)) => {
                let (cid, data) = (slot.sqe.cid(), slot.data);
                let success = !self.flow_control;
                self.push_data_header(C2hData { cid, len, success });
                self.outbox.push_region(data, len as usize);
                if self.digests.data {
                    let digest = digest_of(self.pool.region(), data, len);
                    self.outbox.push(|out| out.extend_from_slice(&digest.to_le_bytes()));
                }
                self.link.stats.read_bytes.add(len.into());
                match success {
                    true => self.release(index),
                    false => self.complete(index, status, 0),
                }
            }
            (IoPlan::Bio(bio), Transfer::FromHost(len)) => {
                debug_assert!(matches!(bio.op, Op::Write | Op::ZoneAppend), "{bio:?} has data");
                self.link.stats.written_bytes.add(len.into());
                self.complete(index, status, result);
            }
            _ => self.complete(index, status, result),
        }
    }

    /// Answers a command of the admin queue with data.
    fn send_page(&mut self, index: u16, sqe: &Sqe, page: &[u8]) {
        if let Err(status) = check_pointer(sqe, Transfer::ToHost(page.len() as u32), 0) {
            self.complete(index, status, 0);
            return;
        }
        let success = !self.flow_control;
        let (cid, len) = (sqe.cid(), page.len() as u32);
        self.push_data_header(C2hData { cid, len, success });
        let digests = self.digests;
        self.outbox.push(|out| {
            out.extend_from_slice(page);
            if digests.data {
                out.extend_from_slice(&crc32c(page).to_le_bytes());
            }
        });
        match success {
            true => self.release(index),
            false => self.complete(index, StatusCode::OK, 0),
        }
    }

    fn push_data_header(&mut self, data: C2hData) {
        let (digests, align) = (self.digests, self.data_align);
        self.outbox.push(|out| wire::print_data_header(out, &data, digests, align));
    }

    /// Sends the completion of a command, and frees its slot.
    fn complete(&mut self, index: u16, status: StatusCode, result: u64) {
        let &mut CommandSlot { sqe, device, .. } = self.slots.get(index);
        if !status.is_ok() {
            self.link.stats.errors.add(1);
            if let QueueRole::Io(queue) = &self.role {
                queue.count_error(device);
            }
        }
        let cid = sqe.cid();
        self.push_completion(cid, status, result);
        self.release(index);
    }

    fn push_completion(&mut self, cid: u16, status: StatusCode, result: u64) {
        let cqe = Cqe { result, sq_head: self.sq_head, cid, status };
        let digests = self.digests;
        self.outbox.push(|out| wire::print_response(out, &cqe, digests));
    }

    /// Completes requests for events of which one is due.
    fn send_events(&mut self) {
        let QueueRole::Admin(admin) = &mut self.role else { return };
        if let Some((cid, result)) = admin.take_event() {
            self.push_completion(cid, StatusCode::OK, result);
        }
    }

    /// Frees the slot of a command; its data may still have to be sent.
    fn release(&mut self, index: u16) {
        self.sending.extend(self.slots.give(index));
    }

    /// Executes commands; returns the number of completions.
    fn execute(&mut self) -> usize {
        let (mut reaped, mut at) = (0, 0);
        loop {
            self.done.clear();
            let Some(namespace) = self.role.namespace(at) else { return reaped };
            namespace.execute(&mut self.done);
            for done in 0..self.done.len() {
                let completion = self.done[done];
                let index = completion.user_data as u16;
                if let Some(namespace) = self.role.namespace(at) {
                    let progress = namespace.completed(index, self.slots.get(index), &completion);
                    self.note(index, progress);
                }
            }
            reaped += self.done.len();
            at += 1;
        }
    }

    /// Sends all PDUs, and gives their memory to commands that wait for it; `true` if some did.
    fn send(&mut self) -> io::Result<bool> {
        if !self.outbox.is_empty() {
            self.link.note_sending(true);
            let sent = self.outbox.send(&self.link.socket, self.pool.region());
            self.link.note_sending(false);
            sent?;
        }
        for span in self.sending.drain(..) {
            self.pool.give(span);
        }
        let waiting = self.waiting.len();
        if !self.ending {
            self.grant_memory();
        }
        Ok(self.waiting.len() < waiting)
    }

    /// Receives more, or waits for commands in flight.
    fn receive(&mut self) -> io::Result<()> {
        if self.ending {
            return self.wait();
        }
        // A host that sends without end has no more time than a silent one.
        if self.setup_deadline().is_some_and(|deadline| socket::left(deadline).is_zero()) {
            return Err(socket::timed_out("the host did not connect or authenticate in time"));
        }
        let received = match self.receiving {
            Some(data) if data.received < data.len && self.inbox.unread().is_empty() => {
                let (at, len) = (data.start + u64::from(data.received), data.len - data.received);
                let region = Arc::clone(self.pool.region());
                let mode = WaitMode::NonBlocking;
                let got = socket::recv(&self.link.socket, &region, at, len as usize, mode);
                if let (Ok(got), Some(data)) = (&got, &mut self.receiving) {
                    data.received += *got as u32;
                }
                got
            }
            _ => self.inbox.receive(&self.link.socket),
        };
        match received {
            Ok(0) => self.ending = true,
            Ok(_) => self.note_heard(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.wait(),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Notes that the host is alive, if it has proved that it is the controller's.
    fn note_heard(&self) {
        match &self.role {
            QueueRole::Admin(admin) if self.is_proved() => admin.controller.note_heard(),
            QueueRole::Io(queue) if self.is_proved() => queue.controller.note_heard(),
            _ => {}
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

    /// The time until which the host has to send something on this connection. A host that computes
    /// its first response may be silent for longer than its keep-alive time-out.
    fn deadline(&self) -> Option<Instant> {
        let silent = match &self.role {
            QueueRole::Admin(admin) if self.is_proved() => admin.controller.deadline(),
            QueueRole::New | QueueRole::Idle | QueueRole::Admin(_) | QueueRole::Io(_) => None,
        };
        self.setup_deadline().into_iter().chain(silent).min()
    }

    /// Sleeps until bytes arrive or a completion is due.
    fn wait(&mut self) -> io::Result<()> {
        let is_idle = self.slots.in_use() == 0;
        let mut timeout = CONNECT_TIMEOUT;
        if let Some(deadline) = self.deadline() {
            if socket::left(deadline).is_zero() {
                return Err(socket::timed_out("the host was silent for too long"));
            }
            timeout = timeout.min(socket::left(deadline));
        }
        if is_idle && self.pool.is_touched() {
            timeout = timeout.min(IDLE_BEFORE_SHRINK);
        }
        if self.waiting.front().copied().is_some_and(|index| self.lacks_device(index)) {
            timeout = timeout.min(CUT_CHECK_INTERVAL);
        }
        if self.ending {
            // The socket is at its end, and would not let the thread sleep.
            if let QueueRole::Io(queue) = &mut self.role {
                queue.wait(Instant::now() + timeout.min(CUT_CHECK_INTERVAL));
            }
            return Ok(());
        }
        let mut descriptors: &[RawFd] = &[];
        if let QueueRole::Io(queue) = &mut self.role
            && let Some((longest, found)) = queue.prepare_sleep()
        {
            descriptors = found;
            timeout = timeout.min(longest);
            if timeout.is_zero() {
                return Ok(());
            }
        }
        let wake = Some(&self.link.wake);
        let ready = socket::wait_any(&self.link.socket, descriptors, wake, timeout)?;
        if ready == Ready::Woken {
            self.link.wake.lower();
        }
        if is_idle && ready == Ready::No && self.pool.is_touched() {
            self.pool.shrink();
        }
        Ok(())
    }
}
