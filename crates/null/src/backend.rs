//! Where a null device keeps its data and zones, and the execution of one request on it.

use std::ptr::NonNull;

use blockyard_core::inject::ZoneFault;
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneOp};
use blockyard_core::{DeviceError, Extent, InlineRequest, Op, Sector, Status, Work, ZoneNo};

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

/// Where a device keeps its data and zones. Functions on data get the faults while bad blocks are
/// armed.
pub(crate) trait Backend: Send + Sized + Sync + 'static {
    /// Whether a read or a write only has to complete.
    fn is_idle(&self) -> bool;

    /// Whether reads are worth a prefetch.
    fn has_data(&self) -> bool;

    /// Executes a read. `soon` is the sector of a later read, for a prefetch.
    fn read(
        shared: &Shared<Self>,
        work: &impl Work,
        faults: Option<&Faults>,
        soon: Option<Sector>,
    ) -> Status;

    /// Executes a write or a write-zeroes.
    fn write(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> Status;

    /// Executes an append.
    fn append(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> TransferOutcome;

    /// Discards a range; the device's limits permit discards.
    fn discard(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> Status;

    /// Makes all completed writes durable, as far as the device can.
    fn flush(&self) -> Status;

    /// Opens, closes, finishes or resets a zone of a zoned device.
    fn manage(&self, zone: ZoneNo, op: ZoneOp) -> Status;

    /// Resets all zones.
    fn reset_all(&self) -> Status;

    /// The zone for a report; `None` on a device without zones.
    fn zone(&self, zone: ZoneNo) -> Option<ZoneInfo>;

    /// Breaks or repairs a sequential zone; no other thread does so meanwhile.
    fn change_zone_fault(
        &self,
        zone: ZoneNo,
        cond: ZoneCond,
        fault: ZoneFault,
    ) -> Result<(), DeviceError>;

    /// The extent at `from`, at most `sectors` long, which lies on the device.
    fn extent(shared: &Shared<Self>, from: Sector, sectors: u64) -> Extent;

    /// Loses the data in the write cache; `false` if the device cannot do that.
    fn power_cut(&self) -> bool;
}

/// How many sectors to transfer before a bad block, and the resulting status.
#[cold]
pub(crate) fn admit(faults: &Faults, at: Sector, sectors: u64, merged: bool) -> (u64, Status) {
    match faults.before_bad(at, sectors, merged) {
        None => (sectors, Status::Ok),
        Some(good) => (good, Status::IoErr),
    }
}

impl<B: Backend> Shared<B> {
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
            Op::Read => TransferOutcome::Done(B::read(self, work, faults, soon)),
            Op::Write => TransferOutcome::Done(B::write(self, work, faults)),
            Op::ZoneAppend => B::append(self, work, faults),
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
    pub(crate) fn zone_of(&self, work: &impl Work) -> Option<ZoneNo> {
        let zones = self.geometry.zones.as_ref()?;
        let zone = zones.zone_of(work.sector());
        let last = zones.zone_of(Sector(work.end().0 - 1));
        (zone == last && zone.0 < zones.zone_count).then_some(zone)
    }

    fn execute_rare(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        let op = match work.op() {
            Op::Flush => return self.backend.flush(),
            Op::Discard if self.limits.discard_sectors_max == 0 => return Status::NotSupp,
            Op::Discard => return B::discard(self, work, faults),
            Op::WriteZeroes => return B::write(self, work, faults),
            Op::ZoneResetAll => return self.backend.reset_all(),
            Op::ZoneReset => ZoneOp::Reset,
            Op::ZoneOpen => ZoneOp::Open,
            Op::ZoneClose => ZoneOp::Close,
            Op::ZoneFinish => ZoneOp::Finish,
            Op::Read | Op::Write | Op::ZoneAppend => unreachable!("handled by `execute`"),
        };
        let Some(geometry) = &self.geometry.zones else { return Status::NotSupp };
        let zone = geometry.zone_of(work.sector());
        match zone.0 < geometry.zone_count {
            true => self.backend.manage(zone, op),
            false => Status::Inval,
        }
    }
}
