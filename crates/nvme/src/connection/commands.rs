//! The commands of a connection: from the PDUs of the host to their execution, and from their ends
//! to the PDUs for the host. Nothing here waits.

use std::sync::Arc;

use blockyard_core::Op;

use super::{CONNECT_REFUSALS_MAX, HostConnection, QueueRole, ReceivingData};
use crate::admin::AdminAnswer;
use crate::auth_message;
use crate::authentication::{AuthProgress, QueueAuth};
use crate::command::{Cqe, FABRICS_OPCODE, Sqe, StatusCode, fabrics_type};
use crate::controller::ControllerTarget;
use crate::data_pool::digest_of;
use crate::fabrics::{
    AUTH_REQUESTED, CONNECT_BYTES, ConnectRefusal, ConnectRequest, DISCOVERY_NQN, PropertyRequest,
    property,
};
use crate::host_link::LinkRole;
use crate::host_stream::HostStream;
use crate::identify::QUEUE_ENTRIES_MAX;
use crate::io_queue::{IoQueue, Renewal};
use crate::namespace::{IoPlan, Transfer, check_pointer};
use crate::namespace_queue::CommandProgress;
use crate::slots::{CommandPlan, CommandSlot, SlotPhase};
use crate::wire::{
    self, C2hData, CAPSULE_HEADER_BYTES, COMMON_HEADER_BYTES, DIGEST_BYTES, FatalStatus, H2cData,
    IcReq, PduFault, PduLayout, crc32c, u32_at,
};

impl<S: HostStream> HostConnection<S> {
    pub(super) fn initialize(&mut self) -> Result<(), PduFault> {
        let request = IcReq::parse(self.inbox.unread())?;
        let digests = request.digests;
        self.outbox.push(|out| wire::print_ic_resp(out, digests));
        self.digests = digests;
        self.data_align = request.data_align;
        self.role = QueueRole::Idle;
        Ok(())
    }

    /// Begins a command whose capsule has arrived.
    pub(super) fn take_capsule(&mut self, layout: &PduLayout) -> Result<(), PduFault> {
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
                let plan = queue.plan(self.slots.get(index));
                self.has_scanned |= queue.take_scanned();
                let plan = plan?;
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
    pub(super) fn lacks_device(&mut self, index: u16) -> bool {
        let QueueRole::Io(queue) = &self.role else { return false };
        queue.absent_device_of(self.slots.get(index)).is_some()
    }

    /// Gives memory to commands that wait for it, in the order of arrival. When the target ends the
    /// connection, those of them that lack data are dropped.
    pub(super) fn grant_memory(&mut self) {
        while let Some(&index) = self.waiting.front() {
            if self.is_ending() && self.slots.get(index).lacks_data() {
                self.waiting.pop_front();
                self.release(index);
                continue;
            }
            // One channel is opened in a round.
            if self.lacks_device(index) || (self.has_scanned && self.lacks_channel(index)) {
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

    /// Drops the commands that cannot be executed when no more is received, without an answer:
    /// those that lack data, and those that wait for memory and have no channel to their device.
    pub(super) fn drop_incomplete(&mut self) {
        self.receiving = None;
        for index in 0..QUEUE_ENTRIES_MAX {
            let slot = self.slots.get(index);
            let is_dropped = match slot.phase {
                SlotPhase::Free | SlotPhase::Executes => false,
                SlotPhase::Receives => true,
                SlotPhase::WaitsForMemory => slot.lacks_data() || self.lacks_channel(index),
            };
            if is_dropped {
                self.waiting.retain(|waiting| *waiting != index);
                self.release(index);
            }
        }
    }

    /// Whether a command would have a channel to its device opened.
    fn lacks_channel(&mut self, index: u16) -> bool {
        let QueueRole::Io(queue) = &self.role else { return false };
        !queue.has_channel(self.slots.get(index).device)
    }

    /// Begins to receive the data of an H2CData.
    pub(super) fn begin_data(&mut self, layout: &PduLayout) -> Result<(), PduFault> {
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
    pub(super) fn take_data(&mut self) -> bool {
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
                self.has_scanned |= queue.take_scanned();
                self.note(index, progress);
            }
            QueueRole::Admin(admin) => {
                self.has_scanned |= admin.scans_devices(&sqe);
                match admin.execute(&sqe) {
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
                }
            }
        }
    }

    fn carry_out_fabrics(&mut self, index: u16, sqe: &Sqe) {
        let controller = match &self.role {
            QueueRole::Admin(admin) => Some(Arc::clone(&admin.controller)),
            QueueRole::New | QueueRole::Idle | QueueRole::Io(_) => None,
        };
        let get_or_set = |get: bool| {
            let controller = controller.as_ref().ok_or(StatusCode::SEQUENCE)?;
            let request = PropertyRequest::parse(sqe)?;
            match get {
                true => controller.property(&request, &self.shared.subsystems.controllers),
                false => controller.set_property(&request).map(|()| 0),
            }
        };
        let answer = match sqe.fabrics_type() {
            fabrics_type::CONNECT => match self.connect(index, sqe) {
                Ok(Some(result)) => Ok(result),
                Ok(None) => return,
                Err(refusal) => {
                    self.complete(index, refusal.status, refusal.result);
                    self.note_refusal();
                    return;
                }
            },
            fabrics_type::PROPERTY_GET => {
                // It looks at all controllers.
                self.has_scanned |= sqe.dword(11) == property::CSTS;
                get_or_set(true)
            }
            fabrics_type::PROPERTY_SET => get_or_set(false),
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
            let progress = auth.send(&message, self.now);
            self.note_authentication(progress);
        }
    }

    /// Continues an authentication whose value of Diffie-Hellman is computed; `false` while it is
    /// not.
    pub(super) fn take_computed(&mut self) -> bool {
        let Some(reply) = &self.computing else { return true };
        let Some(result) = reply.take() else { return false };
        self.computing = None;
        if let Some(auth) = &mut self.auth {
            auth.computed(result);
        }
        true
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
        let Some(auth) = &mut self.auth else { return };
        if let Some(work) = auth.take_work() {
            match self.shared.dh.submit(work, &self.link) {
                Ok(reply) => self.computing = Some(reply),
                Err(error) => {
                    let (peer, host) = (&self.link.peer, &auth.role.host);
                    if self.shared.subsystems.logs.refusals.permits() {
                        tracing::warn!(peer, host, %error, "a host cannot authenticate");
                    }
                    self.stop_parsing();
                }
            }
            return;
        }
        let is_taken = |queue: &IoQueue| !queue.controller.prove_queue(&self.link);
        let progress = match (progress, &self.role) {
            (AuthProgress::Authenticated, QueueRole::Io(queue)) if is_taken(queue) => {
                AuthProgress::Ended("another connection has its queue")
            }
            (progress, _) => progress,
        };
        match progress {
            AuthProgress::Continues | AuthProgress::Computes => {}
            AuthProgress::Authenticated => {
                let role = auth.role.clone();
                // Nothing that the host has sent before counts for its keep-alive time-out.
                self.note_heard();
                let is_first = self.link.role.get().is_none();
                self.note_connected(role);
                if is_first {
                    self.admit_authenticated();
                }
            }
            AuthProgress::Ended(why) => {
                let (peer, LinkRole { subsystem, host, queue, .. }) = (&self.link.peer, &auth.role);
                if self.shared.subsystems.logs.refusals.permits() {
                    let text = format!("a host did not authenticate: {why}");
                    tracing::warn!(peer, subsystem, host, queue, "{text}");
                }
                self.stop_parsing();
            }
        }
    }

    /// Begins what a host may have that has authenticated. To be called after
    /// [`HostConnection::note_connected`]: a file system that is mounted from now on counts the
    /// host as a client.
    fn admit_authenticated(&mut self) {
        let controller = match &self.role {
            QueueRole::Admin(admin) => &admin.controller,
            QueueRole::Io(_) => {
                // The next round opens the channel to the device, before it parses.
                self.has_scanned = true;
                return;
            }
            QueueRole::New | QueueRole::Idle => return,
        };
        match &controller.target {
            ControllerTarget::All(_) => controller.hide_claimed(&self.shared.subsystems.devices()),
            ControllerTarget::Device(subsystem) if subsystem.is_claimed() => {
                let (peer, host) = (&self.link.peer, &controller.host.nqn);
                let subsystem = &subsystem.identity.nqn;
                if self.shared.subsystems.logs.refusals.permits() {
                    tracing::warn!(
                        peer,
                        subsystem,
                        host,
                        "disconnected: a file system of the device is mounted; unmount it first"
                    );
                }
                self.stop_parsing();
            }
            ControllerTarget::Device(_) | ControllerTarget::Discovery => {}
        }
    }

    /// Notes that the host can use the queue.
    fn note_connected(&self, role: LinkRole) {
        let (peer, LinkRole { subsystem, host, controller, queue }) = (&self.link.peer, &role);
        tracing::debug!(peer, subsystem, host, controller, queue, "connected");
        // A connection has one role; its host may authenticate again.
        let _ = self.link.role.set(role);
    }

    /// Executes a Connect; returns its result, or `None` while the device is being replaced.
    fn connect(&mut self, index: u16, sqe: &Sqe) -> Result<Option<u64>, ConnectRefusal> {
        if !matches!(self.role, QueueRole::Idle) {
            return Err(ConnectRefusal::new(StatusCode::SEQUENCE));
        }
        let mut data = [0; CONNECT_BYTES as usize];
        self.pool.region().read(self.slots.get(index).data, &mut data);
        let request = ConnectRequest::parse(sqe, &data)?;
        let controller = match request.queue {
            0 => {
                let (link, address) = (&self.link, self.address);
                let admin = self.shared.connect_admin(link, address, &request, self.now)?;
                let id = admin.controller.id;
                self.role = QueueRole::Admin(admin);
                id
            }
            _ => {
                let (region, watch) = (self.pool.region(), &self.watch);
                let mut queue = self.shared.connect_io(&self.link, region, watch, &request)?;
                let id = queue.controller.id;
                // A host that has to authenticate gets no channel to the device before.
                let has_secrets = self.shared.subsystems.access.authentication.is_some();
                let renewal = if has_secrets { Renewal::Ready } else { queue.renew() };
                self.role = QueueRole::Io(Box::new(queue));
                match renewal {
                    Renewal::Ready => id,
                    Renewal::Gone(refusal) => {
                        self.disconnect();
                        return Err(refusal);
                    }
                    Renewal::InUse | Renewal::Absent => {
                        self.connecting = Some((index, request));
                        return Ok(None);
                    }
                }
            }
        };
        Ok(Some(self.connected(controller, request)))
    }

    /// Counts a Connect that was refused: a connection must not try without end.
    fn note_refusal(&mut self) {
        self.refusals += 1;
        if matches!(self.role, QueueRole::Idle) && self.refusals >= CONNECT_REFUSALS_MAX {
            if self.shared.subsystems.logs.refusals.permits() {
                let peer = &self.link.peer;
                tracing::warn!(peer, "disconnected: too many Connects were refused");
            }
            self.stop_parsing();
        }
    }

    /// Completes the Connect that waits for a device.
    pub(super) fn finish_connect(&mut self, refusal: Option<ConnectRefusal>) {
        let Some((index, request)) = self.connecting.take() else { return };
        match (refusal, &self.role) {
            (Some(refusal), _) => {
                self.disconnect();
                self.complete(index, refusal.status, refusal.result);
                // The device that the host has asked for is being removed.
                self.stop_parsing();
            }
            (None, QueueRole::Io(queue)) => {
                let result = self.connected(queue.controller.id, request);
                self.complete(index, StatusCode::OK, result);
            }
            (None, _) => self.complete(index, StatusCode::INTERNAL, 0),
        }
    }

    /// Ends what a Connect began: the host may send another one.
    fn disconnect(&mut self) {
        self.leave();
        self.role = QueueRole::Idle;
    }

    /// Begins the queue of a successful Connect; returns the command's result.
    fn connected(&mut self, controller: u16, request: ConnectRequest) -> u64 {
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
            return controller.into();
        };
        self.auth = Some(QueueAuth::new(role, rules, self.now));
        u64::from(controller) | AUTH_REQUESTED
    }

    /// Answers a command of an I/O queue that has ended.
    pub(super) fn note(&mut self, index: u16, progress: CommandProgress) {
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
    pub(super) fn complete(&mut self, index: u16, status: StatusCode, result: u64) {
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

    pub(super) fn push_completion(&mut self, cid: u16, status: StatusCode, result: u64) {
        let cqe = Cqe { result, sq_head: self.sq_head, cid, status };
        let digests = self.digests;
        self.outbox.push(|out| wire::print_response(out, &cqe, digests));
    }

    /// Frees the slot of a command; its data may still have to be sent.
    pub(super) fn release(&mut self, index: u16) {
        self.sending.extend(self.slots.give(index));
    }
}
