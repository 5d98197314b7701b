//! Execution of one request: the direction of its data, and its result.

use std::ptr::NonNull;

use blockyard_core::zone::{Erase, Transfer, ZoneOp, ZoneSet};
use blockyard_core::{Flags, InlineRequest, Op, Sector, Started, Status, Work, ZoneNo};

use crate::data::Data;
use crate::faults::Faults;
use crate::shared::Shared;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferOutcome {
    /// With this status.
    Done(Status),
    /// As an append to this sector.
    Landed(Sector),
    /// Nothing was done: the request must be retried bio by bio, because only some bios fail.
    BreakUp,
}

/// The data of a write, an append or a write-zeroes.
struct Outbound<'a, W> {
    work: &'a W,
    data: Option<&'a Data>,
    /// Set while bad blocks are armed.
    faults: Option<&'a Faults>,
}

impl<W: Work> Transfer for Outbound<'_, W> {
    #[inline]
    fn may_fall_short(&self) -> bool {
        self.faults.is_some()
    }

    #[inline]
    fn admit(&mut self, at: Sector, sectors: u64) -> (u64, Status) {
        match self.faults {
            None => (sectors, Status::Ok),
            Some(faults) => admit(faults, at, sectors, self.work.is_merged()),
        }
    }

    #[inline]
    fn copy(&mut self, at: Sector, sectors: u64) {
        let Some(data) = self.data else { return };
        let flags = self.work.flags();
        if self.work.op() == Op::WriteZeroes {
            data.zero(at, sectors, flags.contains(Flags::NOUNMAP));
            return;
        }
        let through = flags.contains(Flags::FUA);
        let (mut at, mut left) = (at, Sector(sectors).bytes() as usize);
        for segment in self.work.segments() {
            data.write(at, &segment, left, through);
            if left <= segment.len_bytes {
                break;
            }
            left -= segment.len_bytes;
            at += Sector::containing(segment.len_bytes as u64).0;
        }
    }
}

/// How many sectors to transfer before a bad block, and the resulting status.
#[cold]
fn admit(faults: &Faults, at: Sector, sectors: u64, merged: bool) -> (u64, Status) {
    match faults.before_bad(at, sectors, merged) {
        None => (sectors, Status::Ok),
        Some(good) => (good, Status::IoErr),
    }
}

/// Reads the sectors before `end` into the segments of a request.
#[inline]
fn read_segments(
    data: &Data,
    work: &impl Work,
    end: Sector,
    readable_end: Sector,
    mut soon: Option<Sector>,
) {
    let mut at = work.sector();
    for mut segment in work.segments() {
        if at >= end {
            break;
        }
        let segment_sectors = Sector::containing(segment.len_bytes as u64).0;
        segment.len_bytes = segment.len_bytes.min(Sector(end - at).bytes() as usize);
        data.read(at, &segment, readable_end, soon.take());
        at += segment_sectors;
    }
}

/// The sector of a read; `None` for any other request.
#[inline]
pub(crate) fn reads_at(started: Option<&Started>) -> Option<Sector> {
    started.filter(|started| started.op() == Op::Read).map(Started::sector)
}

/// Frees the memory of zones that become empty.
pub(crate) struct Eraser<'a>(pub(crate) Option<&'a Data>);

impl Erase for Eraser<'_> {
    fn erase(&mut self, start: Sector, sectors: u64) {
        if let Some(data) = self.0 {
            data.zero(start, sectors, false);
        }
    }
}

impl<Z: ZoneSet> Shared<Z> {
    /// Whether the device stores data.
    #[inline]
    pub(crate) fn has_data(&self) -> bool {
        self.data.is_some()
    }

    /// Executes a request. `faults` is set while bad blocks are armed. `soon` is the sector of a
    /// later read, for a prefetch.
    #[inline]
    pub(crate) fn execute(
        &self,
        work: &impl Work,
        faults: Option<&Faults>,
        soon: Option<Sector>,
    ) -> TransferOutcome {
        let outcome = match work.op() {
            Op::Read => TransferOutcome::Done(self.read(work, faults, soon)),
            Op::Write => TransferOutcome::Done(self.write(work, faults)),
            Op::ZoneAppend => self.append(work, faults),
            _ => TransferOutcome::Done(self.execute_rare(work, faults)),
        };
        match outcome {
            TransferOutcome::Done(status) if !status.is_ok() && work.is_merged() => {
                TransferOutcome::BreakUp
            }
            outcome => outcome,
        }
    }

    /// Executes a read or a write of one bio while no fault is armed.
    // Not inlined, with its arguments in registers: keeps the caller's fast path, without zones and
    // memory, short.
    #[inline(never)]
    pub(crate) fn execute_inline(
        &self,
        op: Op,
        sector: Sector,
        sectors: u64,
        data: NonNull<u8>,
    ) -> Status {
        let single = InlineRequest::new(op, sector, sectors, data);
        match self.execute(&single, None, None) {
            TransferOutcome::Done(status) => status,
            TransferOutcome::Landed(_) | TransferOutcome::BreakUp => {
                unreachable!("no append, and nothing merged")
            }
        }
    }

    /// The zone that contains a request; `None` if the request crosses a zone boundary.
    #[inline]
    fn zone_of(&self, work: &impl Work) -> Option<ZoneNo> {
        let zones = self.geometry.zones.as_ref()?;
        let zone = zones.zone_of(work.sector());
        let last = zones.zone_of(Sector(work.end().0 - 1));
        (zone == last && zone.0 < zones.zone_count).then_some(zone)
    }

    #[inline]
    fn read(&self, work: &impl Work, faults: Option<&Faults>, mut soon: Option<Sector>) -> Status {
        let mut readable_end = Sector::NONE;
        let mut erasures = 0;
        let zone = self.zone_of(work);
        if let Some(zones) = &self.zones {
            let Some(zone) = zone else { return Status::IoErr };
            if self.has_data() {
                erasures = zones.erasures(zone);
            }
            match zones.readable_end(zone) {
                Ok(end) => readable_end = end,
                Err(status) => return status,
            }
        }
        let (sectors, status) = match faults {
            None => (work.sectors(), Status::Ok),
            Some(faults) => admit(faults, work.sector(), work.sectors(), work.is_merged()),
        };
        let Some(data) = &self.data else { return status };
        let end = work.sector() + sectors;
        loop {
            read_segments(data, work, end, readable_end, soon.take());
            let (Some(zones), Some(zone)) = (&self.zones, zone) else { return status };
            // Data are copied without a lock. A concurrent reset may have replaced them by zeros,
            // which later read as 0xFF, or they may have been written again. A reset lowers the
            // readable end and increments `erasures` before it erases, so a change is visible here.
            // The read then answers as of the moment when the zone was empty. The loop ends because
            // the readable end only falls.
            if erasures != zones.erasures(zone) && readable_end > Sector(0) {
                readable_end = Sector(0);
                continue;
            }
            match zones.readable_end(zone) {
                Ok(now) if now < readable_end.min(end) => readable_end = now,
                Ok(_) => return status,
                Err(status) => return status,
            }
        }
    }

    #[inline]
    fn write(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        let mut transfer = Outbound { work, data: self.data.as_ref(), faults };
        let (at, sectors) = (work.sector(), work.sectors());
        let Some(zones) = &self.zones else {
            let (sectors, status) = transfer.admit(at, sectors);
            transfer.copy(at, sectors);
            return status;
        };
        let Some(zone) = self.zone_of(work) else { return Status::IoErr };
        zones.write(zone, at, sectors, &mut transfer).map_or_else(|status| status, |()| Status::Ok)
    }

    #[inline]
    fn append(&self, work: &impl Work, faults: Option<&Faults>) -> TransferOutcome {
        let mut transfer = Outbound { work, data: self.data.as_ref(), faults };
        let zone = self.zone_of(work);
        let (Some(zones), Some(zone)) = (&self.zones, zone) else {
            return TransferOutcome::Done(Status::NotSupp);
        };
        match zones.append(zone, work.sectors(), &mut transfer) {
            Ok(at) => TransferOutcome::Landed(at),
            Err(status) => TransferOutcome::Done(status),
        }
    }

    fn execute_rare(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        let op = match work.op() {
            Op::Flush => {
                if let Some(data) = &self.data {
                    data.flush();
                }
                return Status::Ok;
            }
            Op::Discard => return self.discard(work, faults),
            Op::WriteZeroes => return self.write(work, faults),
            Op::ZoneResetAll => {
                let Some(zones) = &self.zones else { return Status::NotSupp };
                zones.reset_all(&mut Eraser(self.data.as_ref()));
                return Status::Ok;
            }
            Op::ZoneReset => ZoneOp::Reset,
            Op::ZoneOpen => ZoneOp::Open,
            Op::ZoneClose => ZoneOp::Close,
            Op::ZoneFinish => ZoneOp::Finish,
            Op::Read | Op::Write | Op::ZoneAppend => unreachable!("handled by `execute`"),
        };
        let (Some(zones), Some(geometry)) = (&self.zones, &self.geometry.zones) else {
            return Status::NotSupp;
        };
        let zone = geometry.zone_of(work.sector());
        if zone.0 >= geometry.zone_count {
            return Status::Inval;
        }
        let done = zones.manage(zone, op, &mut Eraser(self.data.as_ref()));
        done.map_or_else(|status| status, |()| Status::Ok)
    }

    fn discard(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        if self.limits.discard_sectors_max == 0 {
            return Status::NotSupp;
        }
        let (at, sectors) = (work.sector(), work.sectors());
        let (sectors, status) = match faults {
            None => (sectors, Status::Ok),
            Some(faults) => admit(faults, at, sectors, work.is_merged()),
        };
        if let Some(data) = &self.data {
            data.zero(at, sectors, false);
        }
        status
    }
}
