//! A namespace of an I/O queue: commands become bios, completions become statuses.

use std::collections::VecDeque;
use std::sync::Arc;

use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{
    Bio, BufRef, Channel, Completion, DeviceError, Flags, Op, Region, RegionId, Sector, Status,
};
use blockyard_os::epoll::{Epoll, Watched};

use crate::command::StatusCode;
use crate::host_link::HostLink;
use crate::host_log::HostLog;
use crate::identify::QUEUE_ENTRIES_MAX;
use crate::namespace::{BioPlan, DiscardRange, IoPlan, PIECE_SECTORS, RANGE_BYTES, Transfer};
use crate::slots::{CommandPlan, CommandSlot};
use crate::subsystems::{Namespace, NoDisk, Subsystem};
use crate::zones::{self, QUERY_ZONES, ReportProgress, ZoneAction, ZoneSearch};

/// The bytes that are compared at once.
const COMPARE_BYTES: u32 = 4096;

/// How far a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandProgress {
    /// The device executes an operation of it.
    InFlight,
    /// It has ended, with this result. A read's data lie at the slot's place if it succeeded.
    Ended(StatusCode, u64),
}

impl From<StatusCode> for CommandProgress {
    fn from(status: StatusCode) -> CommandProgress {
        CommandProgress::Ended(status, 0)
    }
}

/// The set of descriptors in which a connection's thread waits for devices.
#[derive(Clone, Debug)]
pub(crate) struct DeviceWatch {
    pub(crate) set: Arc<Epoll>,
    /// The connection, as events of the set name it.
    pub(crate) token: u64,
}

/// The reason for which there is no channel to the device.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// The device is being replaced.
    Absent,
    /// The device is being removed.
    Closed,
    /// The device refuses a channel.
    Refused(DeviceError),
}

impl From<NoDisk> for OpenError {
    fn from(reason: NoDisk) -> OpenError {
        match reason {
            NoDisk::Absent => OpenError::Absent,
            NoDisk::Closed => OpenError::Closed,
        }
    }
}

/// What a round of a connection may still ask of its devices that they may execute within the call.
/// Reads and writes are bounded by the memory for data.
#[derive(Debug)]
pub(crate) struct RoundBudget {
    /// The sectors to zero and to discard.
    sectors: u64,
    /// The commands that look at zones of a device, each by a bounded number of queries.
    scans: u32,
}

impl Default for RoundBudget {
    fn default() -> RoundBudget {
        RoundBudget { sectors: PIECE_SECTORS, scans: 1 }
    }
}

impl RoundBudget {
    /// Takes the sectors of a bio; `false` if they are too many now. A bio that is longer than the
    /// whole budget takes all of it.
    fn take(&mut self, bio: &Bio) -> bool {
        let sectors = match bio.op {
            Op::WriteZeroes | Op::Discard => bio.sectors,
            _ => 0,
        };
        let fits = sectors <= self.sectors || self.sectors == PIECE_SECTORS;
        if fits {
            self.sectors = self.sectors.saturating_sub(sectors);
        }
        fits
    }
}

/// A namespace of an I/O queue, with a channel to the device. Dropping it waits for requests in
/// flight, and returns the disk also if the channel panics: the first fields are dropped in their
/// order.
pub(crate) struct NamespaceQueue {
    /// The device's descriptor, if it has one, in the set of the connection's thread.
    pub(crate) descriptor: Option<Watched>,
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) namespace: Namespace,
    pub(crate) nsid: u32,
    pub(crate) subsystem: Arc<Subsystem>,
    /// The number of the queue's last command for it.
    pub(crate) used: u64,
    region: Arc<Region>,
    region_id: RegionId,
    /// Whether a command of several operations begins no more of them.
    pub(crate) is_ending: bool,
    /// Bios that are not pushed yet.
    bios: Vec<Bio>,
    /// Whether some of them wait for the next round, and not for the channel.
    is_held: bool,
    /// Commands that are to look at zones of the device, also to find the status of an operation
    /// that has failed; in order.
    scanning: VecDeque<u16>,
    /// Zones of a report; memory that is kept, so that a report allocates nothing.
    scratch: Vec<ZoneInfo>,
}

impl NamespaceQueue {
    /// Opens a channel to the disk of a subsystem.
    ///
    /// # Errors
    /// If there is no disk now, or it refuses a channel.
    pub(crate) fn open(
        nsid: u32,
        subsystem: &Arc<Subsystem>,
        link: &Arc<HostLink>,
        region: &Arc<Region>,
        (watch, log): (&DeviceWatch, &HostLog),
    ) -> Result<NamespaceQueue, OpenError> {
        let namespace = subsystem.take_namespace(link)?;
        let mut channel = namespace.disk.open().map_err(OpenError::Refused)?;
        link.channels.add(channel.as_ref());
        // Without a place in the set the connection looks for completions by time.
        let watched = |fd| match Watched::new(&watch.set, fd, watch.token) {
            Ok(watched) => Some(watched),
            Err(error) => {
                if log.permits() {
                    let (nqn, text) = (&subsystem.identity.nqn, "cannot wait for the descriptor");
                    tracing::warn!(subsystem = nqn, %error, "{text} of the device");
                }
                None
            }
        };
        let region_id = channel.register(Arc::clone(region));
        Ok(NamespaceQueue {
            nsid,
            subsystem: Arc::clone(subsystem),
            used: 0,
            namespace,
            descriptor: channel.descriptor().and_then(watched),
            channel,
            region: Arc::clone(region),
            region_id,
            is_ending: false,
            bios: Vec::with_capacity(QUEUE_ENTRIES_MAX.into()),
            is_held: false,
            scanning: VecDeque::with_capacity(QUEUE_ENTRIES_MAX.into()),
            scratch: Vec::with_capacity(QUERY_ZONES),
        })
    }

    /// Closes the channel, which waits for requests in flight, and returns the disk.
    pub(crate) fn close(self) -> (u32, Arc<Subsystem>) {
        (self.nsid, Arc::clone(&self.subsystem))
    }

    /// Whether the disk is being replaced or removed.
    pub(crate) fn is_outdated(&self) -> bool {
        self.subsystem.is_outdated(&self.namespace)
    }

    /// Whether the device is removed.
    pub(crate) fn is_removed(&self) -> bool {
        self.is_outdated() && self.subsystem.is_closed()
    }

    /// Whether the device has nothing more to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.bios.is_empty() && self.scanning.is_empty() && self.channel.in_flight() == 0
    }

    /// Whether there is something for another round of the same turn, after one that has `reaped`
    /// completions, which may have made room in the channel.
    pub(crate) fn has_more(&self, reaped: usize) -> bool {
        self.is_held || !self.scanning.is_empty() || (reaped > 0 && !self.bios.is_empty())
    }

    /// Starts a command whose data, if it has any from the host, are complete.
    pub(crate) fn start(&mut self, index: u16, slot: &mut CommandSlot) -> CommandProgress {
        let progress = self.begin(index, slot);
        self.count(slot, progress)
    }

    fn begin(&mut self, index: u16, slot: &mut CommandSlot) -> CommandProgress {
        let CommandPlan::Io(plan) = slot.plan else { return StatusCode::INTERNAL.into() };
        match plan {
            // A zone is written in order, so that no other write may come between two pieces.
            IoPlan::Bio(bio)
                if bio.op == Op::WriteZeroes && self.namespace.shape.zones.is_none() =>
            {
                slot.rest = Some(bio);
                self.advance(index, slot)
            }
            // No device has FUA for reads: a flush follows (`go_on`).
            IoPlan::Bio(bio) | IoPlan::Compare(bio) | IoPlan::Verify(bio)
                if bio.is_durable_read() =>
            {
                self.push(index, slot, BioPlan { flags: Flags::NONE, ..bio })
            }
            IoPlan::Bio(bio) | IoPlan::Compare(bio) | IoPlan::Verify(bio) => {
                self.push(index, slot, bio)
            }
            IoPlan::ManageAll(ZoneAction { op: Some(Op::ZoneReset), .. }) => {
                let op = Op::ZoneResetAll;
                let (sector, sectors) = (Sector(0), 0);
                self.push(index, slot, BioPlan { op, sector, sectors, flags: Default::default() })
            }
            IoPlan::Discards { .. } => self.advance(index, slot),
            IoPlan::Report(request) => {
                let zones = self.namespace.shape.zones.as_ref();
                let next = zones.map_or(0, |zones| request.first_zone(zones));
                slot.report = ReportProgress { next, found: 0 };
                self.scan_later(index)
            }
            IoPlan::ManageAll(_) | IoPlan::Offline { .. } => self.scan_later(index),
            IoPlan::Hints { .. } => StatusCode::OK.into(),
        }
    }

    fn scan_later(&mut self, index: u16) -> CommandProgress {
        self.scanning.push_back(index);
        CommandProgress::InFlight
    }

    /// The next command that is to look at the zones of the device, if the round may do that.
    pub(crate) fn next_scan(&mut self, budget: &mut RoundBudget) -> Option<u16> {
        budget.scans.checked_sub(1).and_then(|left| {
            let index = self.scanning.pop_front()?;
            budget.scans = left;
            Some(index)
        })
    }

    /// Goes on with a command of [`NamespaceQueue::next_scan`].
    pub(crate) fn scan(&mut self, index: u16, slot: &mut CommandSlot) -> CommandProgress {
        if let Some((bio, status)) = slot.bio.take().zip(slot.refused.take()) {
            return self.refusal(&bio, status).into();
        }
        let progress = match slot.plan {
            CommandPlan::Io(IoPlan::ManageAll(_)) if self.is_ending => StatusCode::ABORTED.into(),
            CommandPlan::Io(IoPlan::ManageAll(action)) => self.manage_next(index, slot, action),
            CommandPlan::Io(IoPlan::Offline { sector }) => match self.zone(sector) {
                Some(zone) if zone.cond == ZoneCond::Offline => StatusCode::OK.into(),
                _ => StatusCode::ZONE_TRANSITION.into(),
            },
            CommandPlan::Io(IoPlan::Report(request)) => {
                let NamespaceQueue { namespace, region, scratch, .. } = self;
                let data = slot.data;
                let put = |at: u32, bytes: &[u8]| region.write(data + u64::from(at), bytes);
                let device = (&*namespace.disk, &*namespace.shape);
                match request.print_part(device, &mut slot.report, scratch, put) {
                    Ok(true) => StatusCode::OK.into(),
                    Ok(false) => self.scan_later(index),
                    Err(status) => status.into(),
                }
            }
            _ => StatusCode::INTERNAL.into(),
        };
        self.count(slot, progress)
    }

    /// Goes on with a command after a completion of the device.
    pub(crate) fn completed(
        &mut self,
        index: u16,
        slot: &mut CommandSlot,
        completion: &Completion,
    ) -> CommandProgress {
        let progress = self.go_on(index, slot, completion);
        self.count(slot, progress)
    }

    /// Counts the data of a command that has ended.
    fn count(&self, slot: &CommandSlot, progress: CommandProgress) -> CommandProgress {
        let CommandProgress::Ended(StatusCode::OK, _) = progress else { return progress };
        let CommandPlan::Io(plan) = slot.plan else { return progress };
        let stats = &self.namespace.stats;
        match plan {
            IoPlan::Bio(bio) | IoPlan::Compare(bio) | IoPlan::Verify(bio) if bio.op == Op::Read => {
                // A Verify returns no data: SMART counts its sectors, and not the command.
                stats.reads.add(u64::from(!matches!(plan, IoPlan::Verify(_))));
                stats.read_sectors.add(bio.sectors);
            }
            IoPlan::Bio(bio) if bio.op.has_data() => stats.writes.add(1),
            _ => {}
        }
        match (plan, plan.transfer()) {
            (_, Transfer::ToHost(len)) => stats.read_bytes.add(len.into()),
            (IoPlan::Bio(_), Transfer::FromHost(len)) => stats.written_bytes.add(len.into()),
            _ => {}
        }
        progress
    }

    fn go_on(
        &mut self,
        index: u16,
        slot: &mut CommandSlot,
        completion: &Completion,
    ) -> CommandProgress {
        let Some(bio) = slot.bio.take() else { return StatusCode::INTERNAL.into() };
        if !completion.status.is_ok() {
            let is_zoned = self.namespace.shape.zones.is_some() && bio.op != Op::Flush;
            if is_zoned && completion.status == Status::IoErr {
                (slot.bio, slot.refused) = (Some(bio), Some(completion.status));
                return self.scan_later(index);
            }
            return StatusCode::of(completion.status, bio.op).into();
        }
        match slot.plan {
            // After the read: what it has found may have been written to the cache just before.
            CommandPlan::Io(IoPlan::Bio(plan) | IoPlan::Compare(plan) | IoPlan::Verify(plan))
                if bio.op == Op::Read
                    && plan.is_durable_read()
                    && self.namespace.shape.write_cache =>
            {
                match self.is_ending {
                    true => StatusCode::ABORTED.into(),
                    false => self.push(index, slot, BioPlan::FLUSH),
                }
            }
            CommandPlan::Io(IoPlan::ManageAll(_)) if bio.op != Op::ZoneResetAll => {
                self.scan_later(index)
            }
            CommandPlan::Io(IoPlan::Discards { .. }) => self.advance(index, slot),
            CommandPlan::Io(IoPlan::Bio(_)) if slot.rest.is_some() => self.advance(index, slot),
            CommandPlan::Io(IoPlan::Compare(_)) => match self.is_equal(slot) {
                true => StatusCode::OK.into(),
                false => StatusCode::COMPARE_FAILURE.into(),
            },
            _ if bio.op == Op::ZoneAppend => {
                let block = self.namespace.shape.block(completion.sector);
                CommandProgress::Ended(StatusCode::OK, block)
            }
            _ => StatusCode::OK.into(),
        }
    }

    fn push(&mut self, index: u16, slot: &mut CommandSlot, bio: BioPlan) -> CommandProgress {
        slot.bio = Some(bio);
        let offset = match slot.plan {
            CommandPlan::Io(IoPlan::Compare(_) | IoPlan::Verify(_)) => slot.scratch,
            _ => slot.data,
        };
        let buf = BufRef { region: self.region_id, offset };
        let pushed = Bio::new(bio.op, bio.sector, bio.sectors).with_flags(bio.flags).with_buf(buf);
        self.bios.push(pushed.with_user_data(index.into()));
        CommandProgress::InFlight
    }

    /// Whether the data of the host are those that the device has read.
    fn is_equal(&self, slot: &CommandSlot) -> bool {
        let (mut host, mut device) = ([0; COMPARE_BYTES as usize], [0; COMPARE_BYTES as usize]);
        (0..slot.len).step_by(COMPARE_BYTES as usize).all(|at| {
            let len = (slot.len - at).min(COMPARE_BYTES) as usize;
            self.region.read(slot.data + u64::from(at), &mut host[..len]);
            self.region.read(slot.scratch + u64::from(at), &mut device[..len]);
            host[..len] == device[..len]
        })
    }

    /// The next operation of a command that consists of several.
    fn advance(&mut self, index: u16, slot: &mut CommandSlot) -> CommandProgress {
        let next = match (slot.rest.take(), slot.plan) {
            (Some(rest), _) => Ok(Some(rest)),
            (None, CommandPlan::Io(IoPlan::Discards { count, .. })) => {
                self.next_discard(slot, count)
            }
            _ => return StatusCode::INTERNAL.into(),
        };
        match next {
            // The host's next association must not find it executed later.
            Ok(Some(_)) if self.is_ending => StatusCode::ABORTED.into(),
            Ok(Some(bio)) => {
                let (piece, rest) = bio.split();
                slot.rest = rest;
                self.push(index, slot, piece)
            }
            Ok(None) => StatusCode::OK.into(),
            Err(status) => status.into(),
        }
    }

    fn next_discard(
        &mut self,
        slot: &mut CommandSlot,
        count: u32,
    ) -> Result<Option<BioPlan>, StatusCode> {
        while slot.next < count {
            let mut bytes = [0; RANGE_BYTES as usize];
            self.region.read(slot.data + u64::from(slot.next * RANGE_BYTES), &mut bytes);
            slot.next += 1;
            let bio = self.namespace.shape.plan_discard(&DiscardRange::parse(&bytes))?;
            if bio.is_some() {
                return Ok(bio);
            }
        }
        Ok(None)
    }

    /// Begins the operation of Select All on the next zone to which it applies, once one is found.
    fn manage_next(
        &mut self,
        index: u16,
        slot: &mut CommandSlot,
        action: ZoneAction,
    ) -> CommandProgress {
        let shape = &self.namespace.shape;
        let Some(zones) = &shape.zones else { return StatusCode::INVALID_OPCODE.into() };
        let device = (self.namespace.disk.as_ref(), &**shape);
        match zones::next_selected(device, zones, action, slot.next, &mut self.scratch) {
            Ok(ZoneSearch::Found(number)) => {
                // No device has an operation that takes a read-only zone offline.
                let Some(op) = action.op else { return StatusCode::ZONE_TRANSITION.into() };
                slot.next = number + 1;
                let sector = shape.sector(u64::from(number) * zones.zone_blocks);
                let flags = Flags::NONE;
                self.push(index, slot, BioPlan { op, sector, sectors: 0, flags })
            }
            Ok(ZoneSearch::Pauses(number)) => {
                slot.next = number;
                self.scan_later(index)
            }
            Ok(ZoneSearch::Ends) => StatusCode::OK.into(),
            Err(status) => status.into(),
        }
    }

    /// The status of an operation that failed with `status`, by its zones as they are now. A read
    /// may cross zones, and fails if one of them is offline.
    fn refusal(&mut self, bio: &BioPlan, status: Status) -> StatusCode {
        let count = match (&self.namespace.shape.zones, bio.op) {
            (Some(zones), Op::Read) => {
                let zone_sectors = self.namespace.shape.sector(zones.zone_blocks).0;
                let last = bio.sector.0 + bio.sectors.saturating_sub(1);
                (last / zone_sectors - bio.sector.0 / zone_sectors + 1) as usize
            }
            _ => 1,
        };
        self.scratch.clear();
        let reported = self.namespace.disk.report_zones(bio.sector, count, &mut self.scratch);
        let offline = self.scratch.iter().find(|zone| zone.cond == ZoneCond::Offline);
        match (reported, offline.or(self.scratch.first())) {
            (Ok(()), Some(zone)) => zones::refusal(bio, status, zone),
            _ => StatusCode::of(status, bio.op),
        }
    }

    /// The zone that contains a sector, as it is now.
    fn zone(&mut self, sector: Sector) -> Option<ZoneInfo> {
        self.scratch.clear();
        let reported = self.namespace.disk.report_zones(sector, 1, &mut self.scratch);
        reported.ok().and_then(|()| self.scratch.first().copied())
    }

    /// Pushes and submits bios, as many as the channel and the budget of the round have room for,
    /// and appends the completions to `done`.
    pub(crate) fn execute(&mut self, done: &mut Vec<Completion>, budget: &mut RoundBudget) {
        self.is_held = false;
        if !self.bios.is_empty() {
            let fitting = self.bios.iter().take_while(|bio| budget.take(bio)).count();
            let taken = self.channel.push(&self.bios[..fitting]);
            self.is_held = taken == fitting && fitting < self.bios.len();
            self.bios.drain(..taken);
            self.channel.submit();
        }
        if self.channel.in_flight() > 0 {
            self.channel.reap(done);
        }
    }
}
