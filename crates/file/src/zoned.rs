//! The zones of a zoned block device of the kernel: a host-managed SMR disk, a ZNS namespace, a
//! zoned null_blk.
//!
//! Zones are reported and managed by the `ioctl` calls of `linux/blkzoned.h`, which block the
//! calling thread: io_uring has no operation for them. The kernel has no call that appends to a
//! zone of a block device, so the zone write plug above the device makes writes of appends.
#![allow(unsafe_code)] // The calls get memory by address.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{DeviceError, Op, Sector, Started, Status, ZoneGeometry};

use crate::execution::{is_interrupted, status_of};

/// `BLKGETZONESZ`, `BLKREPORTZONE`, `BLKRESETZONE`, `BLKOPENZONE`, `BLKCLOSEZONE` and
/// `BLKFINISHZONE` of `linux/blkzoned.h`.
const BLKGETZONESZ: libc::Ioctl = 0x8004_1284_u32 as libc::Ioctl;
const BLKREPORTZONE: libc::Ioctl = 0xc010_1282_u32 as libc::Ioctl;
const BLKRESETZONE: libc::Ioctl = 0x4010_1283;
const BLKOPENZONE: libc::Ioctl = 0x4010_1286;
const BLKCLOSEZONE: libc::Ioctl = 0x4010_1287;
const BLKFINISHZONE: libc::Ioctl = 0x4010_1288;

/// Zones in one call that reports many.
const REPORT_ZONES: usize = 4096;

/// The header of a report and a zone of it, in words of 64 bits.
const HEADER_WORDS: usize = 2;
const ZONE_WORDS: usize = 8;

/// `BLK_ZONE_REP_CAPACITY`: the report has the capacities of zones.
const REP_CAPACITY: u32 = 1;

/// How often an interrupted call is repeated before it fails.
const INTERRUPTED_MAX: u8 = 100;

/// The zone size of a block device in sectors; 0 if it has no zones.
pub(crate) fn zone_sectors(device: &File) -> u32 {
    let mut sectors = 0_u32;
    // SAFETY: the call writes one 32-bit number to `sectors`, which lives until it returns, and the
    // descriptor is open.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKGETZONESZ, &raw mut sectors) } {
        0 => sectors,
        // Linux before 4.20 does not know the command, and other devices refuse it.
        _ => 0,
    }
}

/// A zone as the kernel reports it: `struct blk_zone`, lengths and positions in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KernelZone {
    start: u64,
    len: u64,
    wp: u64,
    kind: u8,
    cond: u8,
    capacity: u64,
}

impl KernelZone {
    /// Zone type 1 of `enum blk_zone_type`: conventional; 2: sequential write required.
    const CONVENTIONAL: u8 = 1;
    const SEQUENTIAL: u8 = 2;

    fn read(words: &[u64; ZONE_WORDS], has_capacity: bool) -> KernelZone {
        let [start, len, wp, flags, capacity, ..] = *words;
        let [kind, cond, ..] = flags.to_ne_bytes();
        // Linux before 5.9 reports no capacity: a zone is writable to its end.
        let capacity = if has_capacity { capacity } else { len };
        KernelZone { start, len, wp, kind, cond, capacity }
    }

    /// The zone as other layers see it; `None` if it makes no sense.
    fn info(&self) -> Option<ZoneInfo> {
        let KernelZone { len: sectors, capacity: capacity_sectors, .. } = *self;
        let start = Sector(self.start);
        let end = Sector(self.start.checked_add(sectors)?);
        let kind = match self.kind {
            KernelZone::CONVENTIONAL => ZoneType::Conventional,
            _ => ZoneType::SequentialWriteRequired,
        };
        let cond = ZoneCond::ALL.into_iter().find(|cond| *cond as u8 == self.cond)?;
        // Without a write pointer the field's value is undefined.
        let wp = match cond {
            ZoneCond::NotWp | ZoneCond::Full => end,
            ZoneCond::ReadOnly | ZoneCond::Offline => Sector::NONE,
            _ => Sector(self.wp),
        };
        let is_inside = wp == Sector::NONE || (start..=end).contains(&wp);
        let fits = is_inside && capacity_sectors <= sectors && sectors > 0;
        fits.then_some(ZoneInfo { start, sectors, capacity_sectors, wp, kind, cond })
    }
}

/// Reports zones from a sector on into `words`, whose length is that of a header and whole zones.
/// Returns the number of zones.
fn report(device: &File, from: Sector, words: &mut [u64]) -> io::Result<usize> {
    let room = (words.len() - HEADER_WORDS) / ZONE_WORDS;
    let mut interrupted = 0;
    loop {
        let [a, b, c, d] = u32::try_from(room).unwrap_or(u32::MAX).to_ne_bytes();
        // struct blk_zone_report: sector, nr_zones, flags.
        (words[0], words[1]) = (from.0, u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]));
        // SAFETY: the call writes the header and at most `room` zones, for which `words` has space
        // until it returns, and the descriptor is open.
        match unsafe { libc::ioctl(device.as_raw_fd(), BLKREPORTZONE, words.as_mut_ptr()) } {
            0 => return Ok((header(words).0 as usize).min(room)),
            _ => {
                let error = io::Error::last_os_error();
                let is_again = error.kind() == io::ErrorKind::Interrupted;
                if !is_again || interrupted == INTERRUPTED_MAX {
                    return Err(error);
                }
                interrupted += 1;
            }
        }
    }
}

/// The number of zones and the flags of a report.
fn header(words: &[u64]) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = words[1].to_ne_bytes();
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

/// The zones of a report.
fn zones(words: &[u64], count: usize) -> impl Iterator<Item = KernelZone> {
    let has_capacity = header(words).1 & REP_CAPACITY != 0;
    let (zones, _) = words[HEADER_WORDS..].as_chunks::<ZONE_WORDS>();
    zones[..count].iter().map(move |zone| KernelZone::read(zone, has_capacity))
}

/// Appends up to `zones_max` zones, from the zone that contains `from` on.
pub(crate) fn report_zones(
    device: &File,
    geometry: &ZoneGeometry,
    from: Sector,
    zones_max: usize,
    out: &mut Vec<ZoneInfo>,
) -> Result<(), DeviceError> {
    let refused = |error: io::Error| DeviceError::Os {
        what: "BLKREPORTZONE",
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    };
    let bad = || DeviceError::Os { what: "the zone report is inconsistent", errno: libc::EIO };
    let first = geometry.zone_of(from);
    let end = (first.0 as usize).saturating_add(zones_max).min(geometry.zone_count as usize);
    let (mut number, mut next) = (first.0 as usize, geometry.start_of(first));
    // A report of one zone, which channels request on the data path, does not allocate.
    let (mut short, mut long) = ([0; HEADER_WORDS + ZONE_WORDS], Vec::new());
    while number < end {
        let wanted = (end - number).min(REPORT_ZONES);
        let words = if wanted == 1 {
            &mut short[..]
        } else {
            long.resize(HEADER_WORDS + wanted * ZONE_WORDS, 0);
            &mut long[..]
        };
        let count = report(device, next, words).map_err(refused)?.min(wanted);
        for zone in zones(words, count) {
            let info = zone.info().filter(|info| info.start == next).ok_or_else(bad)?;
            next = info.start + info.sectors;
            out.push(info);
        }
        if count == 0 {
            return Err(bad());
        }
        number += count;
    }
    Ok(())
}

/// Examines all zones of a device of `sectors`, whose zones have `zone_sectors`.
///
/// # Errors
/// The first zone that this device cannot have, or the error of the system.
pub(crate) fn examine(
    device: &File,
    (sectors, zone_sectors): (u64, u32),
    (open_max, active_max): (u32, u32),
) -> io::Result<ZoneGeometry> {
    let mut scan = ZoneScan::new(sectors, zone_sectors.into());
    let mut words = vec![0; HEADER_WORDS + REPORT_ZONES * ZONE_WORDS];
    while scan.next < sectors {
        let count = report(device, Sector(scan.next), &mut words)?;
        if count == 0 {
            return Err(io::Error::other(format!("no zone is reported at sector {}", scan.next)));
        }
        zones(&words, count).try_for_each(|zone| scan.step(&zone)).map_err(io::Error::other)?;
    }
    scan.geometry(open_max, active_max).map_err(io::Error::other)
}

/// Examines zones in their order, to find their common geometry or the first one that does not fit.
#[derive(Debug)]
struct ZoneScan {
    sectors: u64,
    zone_sectors: u64,
    /// Writable length of a sequential zone; 0 before the first.
    capacity: u64,
    count: u32,
    conventional: u32,
    next: u64,
}

impl ZoneScan {
    fn new(sectors: u64, zone_sectors: u64) -> ZoneScan {
        ZoneScan { sectors, zone_sectors, capacity: 0, count: 0, conventional: 0, next: 0 }
    }

    fn step(&mut self, zone: &KernelZone) -> Result<(), String> {
        let KernelZone { start, len, kind, capacity, .. } = *zone;
        let number = self.count;
        let end = start.checked_add(len).filter(|end| *end <= self.sectors);
        let is_last = end == Some(self.sectors);
        let is_whole = len == self.zone_sectors || (is_last && len < self.zone_sectors && len > 0);
        let Some(end) = end.filter(|_| start == self.next && is_whole) else {
            return Err(format!(
                "zone {number} has {len} sectors at sector {start}; expected {} at sector {}",
                self.zone_sectors, self.next
            ));
        };
        match kind {
            KernelZone::CONVENTIONAL if self.conventional == number => self.conventional += 1,
            KernelZone::CONVENTIONAL => {
                return Err(format!(
                    "zone {number} is conventional, and sequential ones come before it; expected \
                     all conventional zones at the start"
                ));
            }
            KernelZone::SEQUENTIAL => {
                if self.capacity == 0 {
                    let is_short = len < self.zone_sectors;
                    self.capacity = if is_short { self.zone_sectors } else { capacity };
                }
                let fits = capacity == self.capacity
                    || (is_last && len < self.zone_sectors && capacity <= self.capacity);
                if !fits || capacity == 0 {
                    return Err(format!(
                        "zone {number} has a capacity of {capacity} sectors; expected {}, as of \
                         the zones before it",
                        self.capacity
                    ));
                }
            }
            other => {
                return Err(format!(
                    "zone {number} is of type {other}; expected conventional (1) or sequential \
                     write required (2)"
                ));
            }
        }
        self.count = number.checked_add(1).ok_or("too many zones")?;
        self.next = end;
        Ok(())
    }

    fn geometry(self, open_max: u32, active_max: u32) -> Result<ZoneGeometry, String> {
        if !self.zone_sectors.is_power_of_two() {
            return Err(format!(
                "its zones have {} sectors; expected a power of two",
                self.zone_sectors
            ));
        }
        Ok(ZoneGeometry {
            zone_sectors: self.zone_sectors,
            zone_capacity_sectors: if self.capacity == 0 {
                self.zone_sectors
            } else {
                self.capacity
            },
            zone_count: self.count,
            conventional_count: self.conventional,
            open_max,
            active_max,
        })
    }
}

/// Executes a request that manages zones; `None` for other requests. The calling thread waits for
/// the device.
pub(crate) fn manage(
    device: &File,
    (sectors, zone_sectors): (u64, u64),
    started: &Started,
) -> Option<Status> {
    let call = match started.op() {
        Op::ZoneReset | Op::ZoneResetAll => BLKRESETZONE,
        Op::ZoneOpen => BLKOPENZONE,
        Op::ZoneClose => BLKCLOSEZONE,
        Op::ZoneFinish => BLKFINISHZONE,
        _ => return None,
    };
    // struct blk_zone_range: sector, nr_sectors. The channel has checked that a zone begins there.
    let start = started.sector().0;
    let range = match started.op() {
        Op::ZoneResetAll => [0, sectors],
        _ => [start, zone_sectors.min(sectors.saturating_sub(start))],
    };
    for _ in 0..=INTERRUPTED_MAX {
        // SAFETY: the call reads two numbers, which live until it returns, and the descriptor is
        // open.
        if unsafe { libc::ioctl(device.as_raw_fd(), call, &raw const range) } == 0 {
            return Some(Status::Ok);
        }
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        if !is_interrupted(-errno, false) {
            return Some(status_of(errno));
        }
    }
    Some(Status::IoErr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(start: u64, len: u64, kind: u8, capacity: u64) -> KernelZone {
        KernelZone { start, len, wp: start, kind, cond: ZoneCond::Empty as u8, capacity }
    }

    fn scan(sectors: u64, zones: &[KernelZone]) -> Result<ZoneGeometry, String> {
        let mut scan = ZoneScan::new(sectors, 64);
        zones.iter().try_for_each(|zone| scan.step(zone))?;
        scan.geometry(3, 5)
    }

    #[test]
    fn geometry_is_that_of_all_zones() {
        let zones = [zone(0, 64, 1, 64), zone(64, 64, 2, 48), zone(128, 64, 2, 48)];
        let wanted = ZoneGeometry {
            zone_sectors: 64,
            zone_capacity_sectors: 48,
            zone_count: 3,
            conventional_count: 1,
            open_max: 3,
            active_max: 5,
        };
        assert_eq!(scan(192, &zones).unwrap(), wanted);
        // The only sequential zone is the last one.
        let zones = [zone(0, 64, 1, 64), zone(64, 64, 2, 48)];
        assert_eq!(scan(128, &zones).unwrap().zone_capacity_sectors, 48);
        // A last zone may be shorter.
        let zones = [zone(0, 64, 2, 64), zone(64, 64, 2, 64), zone(128, 8, 2, 8)];
        assert_eq!(scan(136, &zones).unwrap().zone_capacity_sectors, 64);
        assert_eq!(scan(136, &zones).unwrap().conventional_count, 0);
    }

    #[test]
    fn zones_that_do_not_fit_are_refused_by_number() {
        for (last, wanted) in [
            (zone(64, 32, 2, 32), "zone 1 has 32 sectors at sector 64; expected 64 at sector 64"),
            (zone(128, 64, 2, 64), "zone 1 has 64 sectors at sector 128; expected 64 at sector 64"),
            (zone(64, u64::MAX, 2, 64), "zone 1 has 18446744073709551615 sectors"),
            (zone(64, 64, 1, 64), "zone 1 is conventional"),
            (zone(64, 64, 2, 32), "zone 1 has a capacity of 32 sectors; expected 64"),
            (zone(64, 64, 3, 64), "zone 1 is of type 3"),
            (zone(64, 64, 0, 64), "zone 1 is of type 0"),
        ] {
            let error = scan(512, &[zone(0, 64, 2, 64), last]).unwrap_err();
            assert!(error.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn report_is_read_as_the_kernel_lays_it_out() {
        let [cond_full, kind] = [ZoneCond::Full as u8, KernelZone::SEQUENTIAL];
        let flags = u64::from_ne_bytes([kind, cond_full, 0, 0, 0, 0, 0, 0]);
        let mut words = vec![0, 0];
        words.extend([64, 64, 128, flags, 48, 0, 0, 0]);
        let info = zones(&words, 1).next().unwrap();
        assert_eq!(info.capacity, 64, "without the flag there is no capacity");
        words[1] = u64::from_ne_bytes([1, 0, 0, 0, REP_CAPACITY as u8, 0, 0, 0]);
        let info = zones(&words, 1).next().unwrap().info().unwrap();
        assert_eq!((info.start, info.sectors, info.capacity_sectors), (Sector(64), 64, 48));
        assert_eq!((info.wp, info.cond), (Sector(128), ZoneCond::Full));
    }

    #[test]
    fn zone_that_makes_no_sense_is_no_zone() {
        let good = zone(64, 64, 2, 48);
        assert!(good.info().is_some());
        for bad in [
            KernelZone { cond: 9, ..good },
            KernelZone { wp: 63, ..good },
            KernelZone { wp: 129, ..good },
            KernelZone { capacity: 65, ..good },
            KernelZone { start: u64::MAX, ..good },
            KernelZone { len: 0, ..good },
        ] {
            assert_eq!(bad.info(), None, "{bad:?}");
        }
        let offline = KernelZone { cond: ZoneCond::Offline as u8, wp: 0, ..good };
        assert_eq!(offline.info().unwrap().wp, Sector::NONE);
    }
}
