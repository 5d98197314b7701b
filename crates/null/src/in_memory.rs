//! Data and zones in memory: null_blk's.

use blockyard_core::inject::ZoneFault;
use blockyard_core::zone::{AtomicZoneSet, Erase, Transfer, ZoneCond, ZoneInfo, ZoneOp, ZoneSet};
use blockyard_core::{DeviceError, Extent, Flags, Op, Sector, Status, Work, ZoneNo};

use crate::backend::{Backend, TransferOutcome, admit};
use crate::data::Data;
use crate::faults::Faults;
use crate::shared::Shared;

/// Data and zones in memory. `Z` guards the zones.
#[derive(Debug)]
pub struct InMemory<Z = AtomicZoneSet> {
    /// `None` on a device without zones.
    pub(crate) zones: Option<Z>,
    /// `None` on a device that drops what is written.
    pub(crate) data: Option<Data>,
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

/// Frees the memory of zones that become empty.
pub(crate) struct Eraser<'a>(pub(crate) Option<&'a Data>);

impl Erase for Eraser<'_> {
    fn erase(&mut self, start: Sector, sectors: u64) {
        if let Some(data) = self.0 {
            data.zero(start, sectors, false);
        }
    }
}

impl<Z: ZoneSet> Backend for InMemory<Z> {
    #[inline]
    fn is_idle(&self) -> bool {
        self.zones.is_none() && self.data.is_none()
    }

    #[inline]
    fn has_data(&self) -> bool {
        self.data.is_some()
    }

    #[inline]
    fn read(
        shared: &Shared<Self>,
        work: &impl Work,
        faults: Option<&Faults>,
        mut soon: Option<Sector>,
    ) -> Status {
        let InMemory { zones, data } = &shared.backend;
        let mut readable_end = Sector::NONE;
        let mut erasures = 0;
        let zone = shared.zone_of(work);
        if let Some(zones) = zones {
            let Some(zone) = zone else { return Status::IoErr };
            if data.is_some() {
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
        let Some(data) = data else { return status };
        let end = work.sector() + sectors;
        loop {
            read_segments(data, work, end, readable_end, soon.take());
            let (Some(zones), Some(zone)) = (zones, zone) else { return status };
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
    fn write(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> Status {
        let InMemory { zones, data } = &shared.backend;
        let mut transfer = Outbound { work, data: data.as_ref(), faults };
        let (at, sectors) = (work.sector(), work.sectors());
        let Some(zones) = zones else {
            let (sectors, status) = transfer.admit(at, sectors);
            transfer.copy(at, sectors);
            return status;
        };
        let Some(zone) = shared.zone_of(work) else { return Status::IoErr };
        zones.write(zone, at, sectors, &mut transfer).map_or_else(|status| status, |()| Status::Ok)
    }

    #[inline]
    fn append(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> TransferOutcome {
        let InMemory { zones, data } = &shared.backend;
        let mut transfer = Outbound { work, data: data.as_ref(), faults };
        let zone = shared.zone_of(work);
        let (Some(zones), Some(zone)) = (zones, zone) else {
            return TransferOutcome::Done(Status::NotSupp);
        };
        match zones.append(zone, work.sectors(), &mut transfer) {
            Ok(at) => TransferOutcome::Landed(at),
            Err(status) => TransferOutcome::Done(status),
        }
    }

    fn discard(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> Status {
        let (at, sectors) = (work.sector(), work.sectors());
        let (sectors, status) = match faults {
            None => (sectors, Status::Ok),
            Some(faults) => admit(faults, at, sectors, work.is_merged()),
        };
        if let Some(data) = &shared.backend.data {
            data.zero(at, sectors, false);
        }
        status
    }

    fn flush(&self) -> Status {
        if let Some(data) = &self.data {
            data.flush();
        }
        Status::Ok
    }

    fn manage(&self, zone: ZoneNo, op: ZoneOp) -> Status {
        let Some(zones) = &self.zones else { return Status::NotSupp };
        let done = zones.manage(zone, op, &mut Eraser(self.data.as_ref()));
        done.map_or_else(|status| status, |()| Status::Ok)
    }

    fn reset_all(&self) -> Status {
        let Some(zones) = &self.zones else { return Status::NotSupp };
        zones.reset_all(&mut Eraser(self.data.as_ref()));
        Status::Ok
    }

    fn zone(&self, zone: ZoneNo) -> Option<ZoneInfo> {
        self.zones.as_ref().map(|zones| zones.info(zone))
    }

    fn change_zone_fault(
        &self,
        zone: ZoneNo,
        cond: ZoneCond,
        fault: ZoneFault,
    ) -> Result<(), DeviceError> {
        let Some(zones) = &self.zones else { return Ok(()) };
        // `ZoneSet::break_zone` toggles, as null_blk does. Only faults enter or leave these
        // conditions, so a zone in the requested condition stays in it.
        if (zones.info(zone).cond == cond) == (fault == ZoneFault::Repair) {
            zones.break_zone(zone, cond, &mut Eraser(self.data.as_ref()));
        }
        Ok(())
    }

    fn extent(shared: &Shared<Self>, from: Sector, sectors: u64) -> Extent {
        let InMemory { zones, data } = &shared.backend;
        let nothing = |sectors| Extent { sectors, allocated: false, zero: false };
        let Some(data) = data else { return nothing(sectors) };
        let (Some(zones), Some(geometry)) = (zones, &shared.geometry.zones) else {
            return data.extent(from, sectors);
        };
        let zone = geometry.zone_of(from);
        let zone_end = geometry.start_of(zone) + geometry.zone_sectors;
        let sectors = sectors.min(zone_end - from);
        match zones.readable_end(zone) {
            // Above the write pointer a zone reads as 0xFF and has nothing allocated.
            Ok(end) if end > from => data.extent(from, sectors.min(end - from)),
            _ => nothing(sectors),
        }
    }

    fn power_cut(&self) -> bool {
        if let Some(data) = &self.data {
            data.power_cut();
        }
        true
    }
}
