//! Data and zones on a medium, which keeps them: the zones' rules are null_blk's, the medium is
//! that of the SMR disks ([`blockyard_zone_media`]).
//!
//! The data of a write are on the medium before the zone's record counts them as written, and the
//! write completes after both. A request waits for the system calls of its thread, and for no other
//! thread but those that write before it to the same zone.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;

use blockyard_core::inject::ZoneFault;
use blockyard_core::zone::{Zone, ZoneCond, ZoneInfo, ZoneLayout, ZoneOp};
use blockyard_core::{
    DeviceError, Extent, Flags, Op, SECTOR_SHIFT, Sector, Segment, Status, Work, ZoneNo,
};
use blockyard_sync::zone_resources::ZoneLimits;
use blockyard_zone_media::{Media, PermittedWrite, RecordError, RecordedZones};

use crate::backend::{Backend, TransferOutcome, admit};
use crate::data::ABOVE_WP;
use crate::error::NullError;
use crate::faults::Faults;
use crate::shape::Shape;
use crate::shared::Shared;

/// Bytes that are copied between a request and the medium at once: few system calls for a long
/// request, on a stack of any thread.
const BOUNCE_BYTES: usize = 64 << 10;

/// Data and zones on a medium.
#[derive(Debug)]
pub struct OnMedia<M> {
    zones: RecordedZones<ZoneLayout>,
    media: M,
}

impl<M: Media> OnMedia<M> {
    /// The zones of a checked configuration, as the medium records them.
    pub(crate) fn open(shape: &Shape, media: M) -> Result<OnMedia<M>, NullError> {
        let zones = shape.geometry.zones.clone().expect("a device on a medium is zoned");
        let limits = ZoneLimits { open_max: zones.open_max, active_max: zones.active_max };
        let sectors = shape.geometry.sectors;
        let layout = ZoneLayout { zones, sectors, full: false, data: true };
        let unit = shape.geometry.block_sectors();
        match RecordedZones::new(layout, limits, &media.zones(), unit) {
            Ok(zones) => Ok(OnMedia { zones, media }),
            Err(RecordError::Active { active, limit }) => Err(NullError::invalid(
                "zone_max_active",
                limit,
                format!("0, or at least {active}, the partly written zones in the backing"),
            )),
            Err(error) => Err(NullError::Zones(error)),
        }
    }

    fn is_conventional(&self, zone: ZoneNo) -> bool {
        self.zones.layout().zones.is_conventional(zone)
    }

    /// End of the readable data of a zone; `None` if the zone is offline.
    fn readable_end(&self, zone: ZoneNo) -> Option<Sector> {
        match self.is_conventional(zone) {
            true => Some(self.zones.layout().range(zone).1),
            false => self.zones.readable_end(zone.0),
        }
    }

    fn erasures(&self, zone: ZoneNo) -> u64 {
        if self.is_conventional(zone) { 0 } else { self.zones.erasures(zone.0) }
    }

    /// Moves the first `sectors` of a request to `at` on the medium.
    fn copy(&self, work: &impl Work, at: Sector, sectors: u64) -> io::Result<()> {
        if work.op() == Op::WriteZeroes {
            // The medium may free the range, also with NOUNMAP.
            return self.media.zero(at.bytes(), sectors << SECTOR_SHIFT);
        }
        let mut bounce = Bounce::new();
        let (mut at, mut left) = (at.bytes(), (sectors << SECTOR_SHIFT) as usize);
        for part in parts(work) {
            let part = Segment { len_bytes: part.len_bytes.min(left), ..part };
            if part.len_bytes == 0 {
                break;
            }
            self.media.write(at, bounce.filled_from(&part))?;
            at += part.len_bytes as u64;
            left -= part.len_bytes;
        }
        Ok(())
    }

    /// Reads the sectors before `end` into a request; from `readable_end` on they read as 0xFF.
    fn read_parts(&self, work: &impl Work, end: Sector, readable_end: Sector) -> io::Result<()> {
        let mut bounce = Bounce::new();
        let mut at = work.sector().bytes();
        for part in parts(work) {
            let len = part.len_bytes.min(end.bytes().saturating_sub(at) as usize);
            let readable = len.min(readable_end.bytes().saturating_sub(at) as usize);
            if readable > 0 {
                let bytes = bounce.zeros(readable);
                self.media.read(at, bytes)?;
                // SAFETY: a segment is writable for its length until its request completes, which
                // is later; `readable` is at most that, and `bytes` is in no region.
                unsafe { part.data.copy_from_nonoverlapping(first_of(bytes), readable) };
            }
            // SAFETY: as above, for the rest of the first `len` bytes.
            unsafe { part.data.add(readable).write_bytes(ABOVE_WP, len - readable) };
            at += part.len_bytes as u64;
        }
        Ok(())
    }

    /// Makes a write durable before it completes, if the request asks for that.
    fn settle(&self, work: &impl Work, at: Sector, sectors: u64) -> Result<(), Status> {
        if !work.flags().contains(Flags::FUA) || sectors == 0 {
            return Ok(());
        }
        self.media.flush_range(at.bytes(), sectors << SECTOR_SHIFT).map_err(|error| failed(&error))
    }

    /// Writes to a sequential zone at the sector that `step` returns, if `step` permits the write.
    fn put(
        &self,
        zone: ZoneNo,
        work: &impl Work,
        faults: Option<&Faults>,
        step: impl Fn(&Zone) -> Result<(Sector, ZoneCond), Status>,
    ) -> Result<Sector, Status> {
        if faults.is_some() {
            // The zone is opened first, as in null_blk: a write that a limit refuses hits no bad
            // block, and a write that fails at a bad block leaves the zone open.
            self.zones.enter(zone.0, |zone| step(zone).map(|(_, to)| to))?;
        }
        let mut admission = Admission { faults, last: None };
        let mut admitted = Status::Ok;
        let permit = |zone: &Zone| {
            let (at, to) = step(zone)?;
            let (sectors, status) = admission.at(work, at);
            admitted = status;
            Ok::<_, Status>(PermittedWrite { at, sectors, to })
        };
        let copy = |write: PermittedWrite| (write, self.copy(work, write.at, write.sectors));
        let ((PermittedWrite { at, sectors, .. }, copied), state) =
            self.zones.write(zone.0, permit, copy)?;
        // The write pointer has moved even if the copy failed, and other threads may already have
        // written after it. So the medium records the new state in any case.
        let recorded = self.media.zone_changed(zone.0, state);
        copied.and(recorded).map_err(|error| failed(&error))?;
        self.settle(work, at, sectors)?;
        if admitted.is_ok() { Ok(at) } else { Err(admitted) }
    }

    fn write_conventional(&self, work: &impl Work, faults: Option<&Faults>) -> Result<(), Status> {
        let at = work.sector();
        let (sectors, status) = Admission { faults, last: None }.at(work, at);
        self.copy(work, at, sectors).map_err(|error| failed(&error))?;
        self.settle(work, at, sectors)?;
        if status.is_ok() { Ok(()) } else { Err(status) }
    }
}

/// Asks once for each position how much of a write may be transferred, and keeps the first refusal:
/// a bad block that repairs itself when it is hit must not be hit again only because another thread
/// was faster.
struct Admission<'a> {
    faults: Option<&'a Faults>,
    last: Option<(Sector, u64, Status)>,
}

impl Admission<'_> {
    fn at(&mut self, work: &impl Work, at: Sector) -> (u64, Status) {
        let Some(faults) = self.faults else { return (work.sectors(), Status::Ok) };
        let (sectors, status) = match self.last {
            Some((asked, sectors, status)) if asked == at => (sectors, status),
            Some((_, _, status)) if !status.is_ok() => (0, status),
            _ => admit(faults, at, work.sectors(), work.is_merged()),
        };
        self.last = Some((at, sectors, status));
        (sectors, status)
    }
}

impl<M: Media + 'static> Backend for OnMedia<M> {
    fn is_idle(&self) -> bool {
        false
    }

    /// A prefetch cannot reach a medium.
    fn has_data(&self) -> bool {
        false
    }

    fn read(
        shared: &Shared<Self>,
        work: &impl Work,
        faults: Option<&Faults>,
        _soon: Option<Sector>,
    ) -> Status {
        let device = &shared.backend;
        let Some(zone) = shared.zone_of(work) else { return Status::IoErr };
        let erasures = device.erasures(zone);
        let Some(readable_end) = device.readable_end(zone) else { return Status::IoErr };
        let (sectors, status) = match faults {
            None => (work.sectors(), Status::Ok),
            Some(faults) => admit(faults, work.sector(), work.sectors(), work.is_merged()),
        };
        let end = work.sector() + sectors;
        let mut read = device.read_parts(work, end, readable_end);
        if device.erasures(zone) != erasures {
            // The zone was reset during the read; answer as of the moment when it was empty.
            read = device.read_parts(work, end, Sector(0));
        }
        match (read, device.readable_end(zone)) {
            (Err(error), _) => failed(&error),
            (Ok(()), None) => Status::IoErr,
            (Ok(()), Some(_)) => status,
        }
    }

    fn write(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> Status {
        let device = &shared.backend;
        let Some(zone) = shared.zone_of(work) else { return Status::IoErr };
        let (at, sectors) = (work.sector(), work.sectors());
        let done = match device.is_conventional(zone) {
            true => device.write_conventional(work, faults),
            false => {
                let step = |zone: &Zone| zone.step_write(at, sectors).map(|to| (at, to));
                device.put(zone, work, faults, step).map(drop)
            }
        };
        done.map_or_else(|status| status, |()| Status::Ok)
    }

    fn append(shared: &Shared<Self>, work: &impl Work, faults: Option<&Faults>) -> TransferOutcome {
        let device = &shared.backend;
        let zone = shared.zone_of(work).filter(|zone| !device.is_conventional(*zone));
        let Some(zone) = zone else { return TransferOutcome::Done(Status::IoErr) };
        let step = |zone: &Zone| zone.step_append(work.sectors()).map(|to| (zone.wp(), to));
        match device.put(zone, work, faults, step) {
            Ok(at) => TransferOutcome::Landed(at),
            Err(status) => TransferOutcome::Done(status),
        }
    }

    /// Zoned devices take no discards.
    fn discard(_shared: &Shared<Self>, _work: &impl Work, _faults: Option<&Faults>) -> Status {
        Status::NotSupp
    }

    fn flush(&self) -> Status {
        self.media.flush().map_or_else(|error| failed(&error), |()| Status::Ok)
    }

    fn manage(&self, zone: ZoneNo, op: ZoneOp) -> Status {
        let done = match self.is_conventional(zone) {
            true => self.zones.layout().zone(zone).step(op).map(|_| Ok(())),
            false => self.zones.manage(zone.0, op, |zone| zone.step(op), &self.media),
        };
        match done {
            Ok(Ok(())) => Status::Ok,
            Ok(Err(error)) => failed(&error),
            Err(status) => status,
        }
    }

    fn reset_all(&self) -> Status {
        let zones = &self.zones.layout().zones;
        let numbers = zones.conventional_count..zones.zone_count;
        // No zone refuses a reset of all zones; the medium may.
        numbers
            .map(|zone| self.manage(ZoneNo(zone), ZoneOp::ResetAll))
            .fold(Status::Ok, |first, status| if first.is_ok() { status } else { first })
    }

    fn zone(&self, zone: ZoneNo) -> Option<ZoneInfo> {
        Some(self.zones.info(zone.0))
    }

    fn change_zone_fault(
        &self,
        zone: ZoneNo,
        cond: ZoneCond,
        fault: ZoneFault,
    ) -> Result<(), DeviceError> {
        let changed = self.zones.change_fault(zone.0, cond, fault, &self.media);
        changed.map_err(|error| DeviceError::Os {
            what: "recording the condition of the zone",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })
    }

    fn extent(shared: &Shared<Self>, from: Sector, sectors: u64) -> Extent {
        let device = &shared.backend;
        let layout = device.zones.layout();
        let zone = layout.zones.zone_of(from);
        let sectors = sectors.min(layout.range(zone).1 - from);
        match device.readable_end(zone) {
            // What is a hole in the files is not asked for.
            Some(end) if end > from => {
                Extent { sectors: sectors.min(end - from), allocated: true, zero: false }
            }
            // Above the write pointer a zone reads as 0xFF and has nothing allocated.
            _ => Extent { sectors, allocated: false, zero: false },
        }
    }

    fn power_cut(&self) -> bool {
        false
    }
}

/// The status of a request that the medium has failed.
#[cold]
fn failed(error: &io::Error) -> Status {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Status::NoSpc,
        _ => Status::IoErr,
    }
}

/// The data of a request in pieces of at most [`BOUNCE_BYTES`].
fn parts(work: &impl Work) -> impl Iterator<Item = Segment> {
    work.segments().flat_map(|segment| {
        (0..segment.len_bytes).step_by(BOUNCE_BYTES).map(move |offset| {
            let len_bytes = BOUNCE_BYTES.min(segment.len_bytes - offset);
            // SAFETY: `offset` is below the length of the segment.
            Segment { data: unsafe { segment.data.add(offset) }, len_bytes }
        })
    })
}

fn first_of(bytes: &[u8]) -> std::ptr::NonNull<u8> {
    std::ptr::NonNull::from(bytes).cast()
}

/// Memory on the stack between the segments of a request and the medium. Segments may be a guest's
/// memory, which can change at any time: they are copied through raw pointers, and no reference to
/// them exists.
struct Bounce([MaybeUninit<u8>; BOUNCE_BYTES]);

impl Bounce {
    fn new() -> Bounce {
        Bounce([const { MaybeUninit::uninit() }; BOUNCE_BYTES])
    }

    /// The first `len_bytes`, zeroed.
    fn zeros(&mut self, len_bytes: usize) -> &mut [u8] {
        let memory = &mut self.0[..len_bytes];
        memory.fill(MaybeUninit::new(0));
        // SAFETY: all of it was just initialised.
        unsafe { &mut *(std::ptr::from_mut(memory) as *mut [u8]) }
    }

    /// The bytes of a segment of at most [`BOUNCE_BYTES`].
    fn filled_from(&mut self, segment: &Segment) -> &[u8] {
        let memory = &mut self.0[..segment.len_bytes];
        let from = segment.data.as_ptr().cast_const().cast();
        // SAFETY: a segment is readable for its length until its request completes, which is later;
        // `memory` has that length and is in no region. All of it is initialised by the copy.
        unsafe {
            memory.as_mut_ptr().copy_from_nonoverlapping(from, segment.len_bytes);
            &*(std::ptr::from_ref(memory) as *const [u8])
        }
    }
}
