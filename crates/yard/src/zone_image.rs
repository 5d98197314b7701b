//! Images of zoned devices: the geometry and the zones as a line of JSON, then the data of each
//! zone. [`save`] writes one, [`load`] brings an equal device into that state.
//!
//! ```text
//! {"blockyard_zones":1,"size_bytes":..,"zones":[{"zone":5,"cond":"closed","sectors":600},..]}\n
//! CRC-32 of that line          4 bytes, little-endian
//! for each zone of the list:   sectors * 512 bytes, their CRC-32
//! BLKYZEND                     8 bytes
//! ```
//!
//! A zone that is not in the list is empty or, if it is conventional, zeros. Zones that are partly
//! written come last: one that is written and then finished needs an active zone for a moment.
//! docs/zoned-files.md describes the fields.

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use blockyard_core::blocking::Io;
use blockyard_core::inject::Injection;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Bio, Disk, Flags, Op, SECTOR_BYTES, Sector, Status, ZoneGeometry};
use serde::{Deserialize, Serialize};

/// Version of the format.
const VERSION: u32 = 1;

/// The first bytes of every image.
pub const MAGIC: &[u8] = b"{\"blockyard_zones\":";

/// The last bytes of every image.
const END: [u8; 8] = *b"BLKYZEND";

/// Longest description in bytes: 699,045 zones that hold data.
const LINE_BYTES_MAX: usize = 64 << 20;

/// Most bytes of the description without its zones, and of a zone in it.
const FIXED_BYTES_MAX: usize = 512;
const ZONE_ENTRY_BYTES_MAX: usize = 96;

/// Zones of an image: as many as a description can list.
const ZONES_SAVED_MAX: usize = (LINE_BYTES_MAX - FIXED_BYTES_MAX) / ZONE_ENTRY_BYTES_MAX;

/// Bytes that are read or written at once.
const PART_BYTES: usize = 256 << 10;

/// After this time a request that does not end fails.
const DEADLINE: Duration = Duration::from_secs(30);

/// Zones of one report.
const REPORT_ZONES: usize = 4096;

/// The description of an image. Sizes in bytes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneImage {
    /// Version of the format.
    blockyard_zones: u32,
    /// Capacity of the device.
    pub size_bytes: u64,
    /// Logical block.
    pub block_bytes: u32,
    /// Distance between the starts of zones.
    pub zone_bytes: u64,
    /// Writable bytes of a sequential zone.
    pub zone_capacity_bytes: u64,
    /// Number of conventional zones, at the start.
    pub conventional: u32,
    /// The zones that hold something, by number: first those that are not active, then the others.
    pub zones: Vec<ImageZone>,
}

/// A zone of an image.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ImageZone {
    /// Zone number.
    pub zone: u32,
    /// The condition, by the name that reports give it.
    pub cond: String,
    /// Sectors of data from the start of the zone, as far as they are in the image.
    pub sectors: u64,
}

/// What was saved or loaded.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ZoneImageDone {
    /// Zones that hold something.
    pub zones: u64,
    /// Bytes of data.
    pub bytes: u64,
}

/// Why an image cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZoneImageError {
    /// The device has no zones.
    #[error("`{name}` is not a zoned device")]
    NotZoned {
        /// The device.
        name: String,
    },
    /// The image cannot be read or written.
    #[error("the image cannot be transferred: {0}")]
    Io(std::io::Error),
    /// The bytes are no image, or a damaged one.
    #[error("this is no image of a zoned device, or it is damaged: {0}")]
    Format(String),
    /// The image is of a device with more zones, so that its description is not read to the end.
    #[error(
        "the image describes more zones than the device has: {image}, the device has {device}; \
         expected a device with as many zones or more"
    )]
    MoreZones {
        /// Zones of the image.
        image: u64,
        /// Zones of the device.
        device: u32,
    },
    /// The device has more written zones than a description may list.
    #[error(
        "cannot save the device: more than {zones} of its zones hold something, so the description \
         would have more than {LINE_BYTES_MAX} bytes"
    )]
    TooManyZones {
        /// Number of zones that fit.
        zones: usize,
    },
    /// The image is of a device with another geometry.
    #[error(
        "the image has {field}={image}, the device {field}={device}; expected equal values, but \
         for a device that has more whole zones"
    )]
    Geometry {
        /// The field.
        field: &'static str,
        /// The value of the image.
        image: u64,
        /// The value of the device.
        device: u64,
    },
    /// More zones are partly written than may be active on the device.
    #[error(
        "the image has {active} partly written zones, which would be active: more than \
         zone_max_active={limit}"
    )]
    Active {
        /// Number of partly written zones.
        active: u64,
        /// Maximum number of active zones.
        limit: u32,
    },
    /// The device writes in larger blocks than that with which the image was made.
    #[error(
        "zone {zone} of the image has {sectors} sectors: expected a multiple of {unit}, the \
         device's physical block"
    )]
    Unit {
        /// Zone number.
        zone: u32,
        /// The sectors of the zone.
        sectors: u64,
        /// Sectors of a physical block.
        unit: u64,
    },
    /// The device holds data.
    #[error("zone {zone} of the device holds data; --force (`?force=true`) replaces everything")]
    NotEmpty {
        /// Zone number.
        zone: u32,
    },
    /// A zone was reset or broken while the image was made.
    #[error("zone {zone} changed while it was saved: stop the clients of the device")]
    Changed {
        /// Zone number.
        zone: u32,
    },
    /// A zone refused an operation.
    #[error("zone {zone}: {op} failed with {status} ({})", status.errno_name())]
    Zone {
        /// Zone number.
        zone: u32,
        /// The operation.
        op: &'static str,
        /// The status.
        status: Status,
    },
    /// The device refused an operation.
    #[error(transparent)]
    Device(#[from] blockyard_core::DeviceError),
}

impl From<std::io::Error> for ZoneImageError {
    fn from(error: std::io::Error) -> ZoneImageError {
        match error.kind() {
            ErrorKind::UnexpectedEof => ZoneImageError::Format("it ends early".to_owned()),
            _ => ZoneImageError::Io(error),
        }
    }
}

impl ZoneImage {
    fn of(disk: &dyn Disk, zones: &ZoneGeometry) -> ZoneImage {
        let geometry = disk.geometry();
        ZoneImage {
            blockyard_zones: VERSION,
            size_bytes: geometry.len_bytes(),
            block_bytes: geometry.logical_block_bytes,
            zone_bytes: zones.zone_sectors * SECTOR_BYTES,
            zone_capacity_bytes: zones.zone_capacity_sectors * SECTOR_BYTES,
            conventional: zones.conventional_count,
            zones: Vec::new(),
        }
    }

    /// The fields that image and device must have in common, by the names of the parameters.
    fn fields(&self) -> [(&'static str, u64); 5] {
        [
            ("size", self.size_bytes),
            ("bs", self.block_bytes.into()),
            ("zone_size", self.zone_bytes),
            ("zone_capacity", self.zone_capacity_bytes),
            ("zone_nr_conv", self.conventional.into()),
        ]
    }

    /// Reads the description, and checks that it is consistent with itself. The memory is bounded
    /// by what a device with `zone_count` zones needs.
    ///
    /// # Errors
    /// If it is none, is damaged, is longer, or says what no device can be. One that is longer
    /// because it is of a device with more zones is named so.
    pub fn read(input: &mut impl Read, zone_count: u32) -> Result<ZoneImage, ZoneImageError> {
        let zones_bytes = (zone_count as usize).saturating_mul(ZONE_ENTRY_BYTES_MAX);
        let bytes_max = zones_bytes.saturating_add(FIXED_BYTES_MAX).min(LINE_BYTES_MAX);
        let damaged = |what: String| Err(ZoneImageError::Format(what));
        let mut line = vec![0; MAGIC.len()];
        input.read_exact(&mut line)?;
        if line != MAGIC {
            return damaged("it does not begin with the mark of one".to_owned());
        }
        let mut byte = [0];
        while byte[0] != b'\n' {
            if line.len() == bytes_max {
                if let Some(image) = zones_of(&line).filter(|zones| *zones > zone_count.into()) {
                    return Err(ZoneImageError::MoreZones { image, device: zone_count });
                }
                return damaged(format!(
                    "its description has more than {bytes_max} bytes, the most that a device with \
                     {zone_count} zones needs"
                ));
            }
            input.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        let mut crc = [0; 4];
        input.read_exact(&mut crc)?;
        if u32::from_le_bytes(crc) != crc32fast::hash(&line) {
            return damaged("the checksum of the description does not match".to_owned());
        }
        let image: ZoneImage = serde_json::from_slice(&line)
            .map_err(|error| ZoneImageError::Format(format!("its description: {error}")))?;
        image.check().map_or_else(damaged, |()| Ok(image))
    }

    /// Checks the version and every zone.
    fn check(&self) -> Result<(), String> {
        if self.blockyard_zones != VERSION {
            let found = self.blockyard_zones;
            return Err(format!("it has version {found}; this program knows version {VERSION}"));
        }
        let mut last = None;
        for ImageZone { zone, cond, sectors } in &self.zones {
            let place = (self.cond(cond).is_some_and(is_active), *zone);
            if let Some(last) = last.filter(|last| place <= *last) {
                return Err(format!("zone {zone} follows zone {}", last.1));
            }
            last = Some(place);
            let start = u64::from(*zone).checked_mul(self.zone_bytes);
            let left = start.and_then(|start| self.size_bytes.checked_sub(start));
            let Some(left) = left.filter(|left| *left > 0) else {
                return Err(format!("zone {zone} lies beyond the device"));
            };
            let is_conventional = *zone < self.conventional;
            let whole = match is_conventional {
                true => self.zone_bytes,
                false => self.zone_capacity_bytes,
            };
            if *sectors > whole.min(left) / SECTOR_BYTES {
                return Err(format!("zone {zone} has {sectors} sectors, more than it can hold"));
            }
            let capacity = whole.min(left) / SECTOR_BYTES;
            let fits = self.cond(cond).is_some_and(|cond| match cond {
                ZoneCond::NotWp => is_conventional,
                ZoneCond::Empty => false,
                ZoneCond::Offline => !is_conventional && *sectors == 0,
                ZoneCond::Full | ZoneCond::ReadOnly => !is_conventional,
                _ => !is_conventional && (1..capacity).contains(sectors),
            });
            if !fits {
                return Err(format!(
                    "zone {zone} is `{cond}` with {sectors} sectors, which no such zone can be"
                ));
            }
        }
        Ok(())
    }

    fn cond(&self, name: &str) -> Option<ZoneCond> {
        ZoneCond::ALL.into_iter().find(|cond| cond.name() == name)
    }
}

/// The number of zones of the device that the start of a description is of; `None` if its fields
/// do not say it.
fn zones_of(start: &[u8]) -> Option<u64> {
    let fixed = std::str::from_utf8(&start[..start.len().min(FIXED_BYTES_MAX)]).ok()?;
    let field = |name: &str| {
        let (_, value) = fixed.split_once(&format!("\"{name}\":"))?;
        let (digits, _) = value.split_once(',')?;
        digits.parse::<u64>().ok()
    };
    let zone_bytes = field("zone_bytes").filter(|bytes| *bytes > 0)?;
    Some(field("size_bytes")?.div_ceil(zone_bytes))
}

/// Whether a zone in this condition is one of those that a device limits.
fn is_active(cond: ZoneCond) -> bool {
    matches!(cond, ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen | ZoneCond::Closed)
}

/// The zones of a device, and how it is read and written.
struct Zoned<'d> {
    disk: &'d dyn Disk,
    zones: &'d ZoneGeometry,
    io: Io,
    part: Vec<u8>,
}

impl<'d> Zoned<'d> {
    fn open(disk: &'d dyn Disk) -> Result<Zoned<'d>, ZoneImageError> {
        let zones = disk.geometry().zones.as_ref();
        let zones =
            zones.ok_or_else(|| ZoneImageError::NotZoned { name: disk.name().to_owned() })?;
        let io = Io::new(disk.open()?, PART_BYTES).with_timeout(DEADLINE);
        Ok(Zoned { disk, zones, io, part: vec![0; PART_BYTES] })
    }

    /// Calls `each` with every zone, in order.
    fn report<E: From<blockyard_core::DeviceError>>(
        &self,
        mut each: impl FnMut(u32, &ZoneInfo) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut from, mut number) = (Sector(0), 0);
        let mut found = Vec::new();
        while from.0 < self.disk.geometry().sectors {
            found.clear();
            self.disk.report_zones(from, REPORT_ZONES, &mut found)?;
            let Some(last) = found.last() else { break };
            from = last.start + last.sectors;
            for zone in &found {
                each(number, zone)?;
                number += 1;
            }
        }
        Ok(())
    }

    fn start(&self, zone: u32) -> Sector {
        Sector(u64::from(zone) * self.zones.zone_sectors)
    }

    fn run(&mut self, zone: u32, op: Op, name: &'static str) -> Result<(), ZoneImageError> {
        let done = self.io.run(Bio::new(op, self.start(zone), 0));
        done.map(drop).map_err(|status| ZoneImageError::Zone { zone, op: name, status })
    }

    fn read(&mut self, zone: u32, from: u64, len: usize) -> Result<(), ZoneImageError> {
        let at = self.start(zone) + from;
        let read = self.io.read(at, &mut self.part[..len]);
        read.map_err(|status| ZoneImageError::Zone { zone, op: "read", status })
    }

    /// The first sectors of a zone, without the blocks at their end that are zeros.
    fn sectors_to_last_byte(&mut self, zone: u32, sectors: u64) -> Result<u64, ZoneImageError> {
        let block = u64::from(self.disk.geometry().physical_block_bytes);
        let parts: Vec<_> = parts(sectors).collect();
        for (from, len) in parts.into_iter().rev() {
            self.read(zone, from, len)?;
            // Equal to itself one byte further on: this compares many bytes at once.
            if self.part[0] == 0 && self.part[..len - 1] == self.part[1..len] {
                continue;
            }
            if let Some(last) = self.part[..len].iter().rposition(|byte| *byte != 0) {
                let bytes = (last as u64 + 1).next_multiple_of(block);
                return Ok((from + bytes / SECTOR_BYTES).min(sectors));
            }
        }
        Ok(0)
    }

    /// Makes the device durable in its present state.
    fn flush(&mut self) -> Result<(), ZoneImageError> {
        let flushed = self.io.run(Bio::flush()).map(drop);
        flushed.map_err(|status| ZoneImageError::Zone { zone: 0, op: "flush", status })
    }

    /// The sectors of a conventional zone up to its last one that may be other than zero.
    fn used_sectors(&self, zone: &ZoneInfo) -> u64 {
        let (mut at, end) = (zone.start, zone.start + zone.sectors);
        let mut used = zone.start;
        while at < end {
            let extent = self.disk.extent(at, end - at);
            at += extent.sectors.clamp(1, end - at);
            if !extent.zero {
                used = at;
            }
        }
        used - zone.start
    }
}

/// The parts of `sectors`, as sectors from the start and lengths in bytes.
fn parts(sectors: u64) -> impl Iterator<Item = (u64, usize)> {
    let step = PART_BYTES as u64 / SECTOR_BYTES;
    (0..sectors.div_ceil(step)).map(move |part| {
        let from = part * step;
        (from, ((sectors - from).min(step) * SECTOR_BYTES) as usize)
    })
}

/// What of a zone is to be in an image; `None` if it holds nothing.
fn saved(zoned: &Zoned<'_>, number: u32, info: &ZoneInfo) -> Option<ImageZone> {
    let sectors = match info.cond {
        ZoneCond::Empty | ZoneCond::Offline => 0,
        ZoneCond::NotWp => zoned.used_sectors(info),
        // A finished or read-only zone is readable to its end; only its capacity can be written.
        ZoneCond::Full | ZoneCond::ReadOnly => info.capacity_sectors,
        _ => info.wp - info.start,
    };
    let is_broken = matches!(info.cond, ZoneCond::ReadOnly | ZoneCond::Offline);
    let cond = match info.cond {
        // It holds nothing but the resources of an open zone.
        ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen if sectors == 0 => return None,
        cond => cond.name().to_owned(),
    };
    let is_full = info.cond == ZoneCond::Full;
    (sectors > 0 || is_broken || is_full).then_some(ImageZone { zone: number, cond, sectors })
}

/// Writes an image of a device. The zones that clients write meanwhile are saved as they are when
/// the saving begins.
///
/// # Errors
/// If the device has no zones, cannot be read, or a zone is reset meanwhile, or `out` fails.
pub fn save(disk: &dyn Disk, out: &mut impl Write) -> Result<ZoneImageDone, ZoneImageError> {
    let mut zoned = Zoned::open(disk)?;
    let mut image = ZoneImage::of(disk, zoned.zones);
    let (mut trimmed, mut active) = (Vec::new(), Vec::new());
    zoned.report(|number, info| {
        let Some(zone) = saved(&zoned, number, info) else { return Ok(()) };
        let is_finished = info.cond == ZoneCond::Full && info.wp == info.start + info.sectors;
        if is_finished || info.cond == ZoneCond::NotWp {
            trimmed.push(image.zones.len());
        }
        // Before memory for more of them is used.
        if image.zones.len() + active.len() == ZONES_SAVED_MAX {
            return Err(ZoneImageError::TooManyZones { zones: ZONES_SAVED_MAX });
        }
        let zones = if is_active(info.cond) { &mut active } else { &mut image.zones };
        zones.push(zone);
        Ok(())
    })?;
    for at in trimmed {
        // The zeros at the end of a finished zone are those of the finish. In a conventional zone
        // they need no place: a device that does not know its extents reports all of it as data.
        let ImageZone { zone, sectors, .. } = image.zones[at];
        image.zones[at].sectors = zoned.sectors_to_last_byte(zone, sectors)?;
    }
    image.zones.retain(|zone| zone.sectors > 0 || zone.cond != ZoneCond::NotWp.name());
    image.zones.append(&mut active);
    let mut done = ZoneImageDone { zones: image.zones.len() as u64, bytes: 0 };
    let mut line = serde_json::to_vec(&image).expect("a description is plain data");
    line.push(b'\n');
    let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(ZoneImageError::Io);
    write(&line)?;
    write(&crc32fast::hash(&line).to_le_bytes())?;
    for ImageZone { zone, sectors, .. } in &image.zones {
        let mut crc = crc32fast::Hasher::new();
        for (from, len) in parts(*sectors) {
            zoned.read(*zone, from, len)?;
            crc.update(&zoned.part[..len]);
            write(&zoned.part[..len])?;
            done.bytes += len as u64;
        }
        write(&crc.finalize().to_le_bytes())?;
        check_unchanged(&zoned, *zone, *sectors)?;
    }
    write(&END)?;
    out.flush().map_err(ZoneImageError::Io)?;
    Ok(done)
}

/// Checks that a zone still holds what was saved of it.
fn check_unchanged(zoned: &Zoned<'_>, zone: u32, sectors: u64) -> Result<(), ZoneImageError> {
    let mut found = Vec::new();
    zoned.disk.report_zones(zoned.start(zone), 1, &mut found)?;
    let holds = match found.first() {
        None => false,
        Some(info) => match info.cond {
            ZoneCond::NotWp | ZoneCond::Full | ZoneCond::ReadOnly => true,
            ZoneCond::Offline => sectors == 0,
            _ => info.wp - info.start >= sectors,
        },
    };
    if holds { Ok(()) } else { Err(ZoneImageError::Changed { zone }) }
}

/// Brings a device into the state of an image. A device may have more zones than the image; they
/// are empty then. Zones that were open are closed. Without `force` the
/// device must hold nothing. If it fails after it has begun, the device holds nothing.
///
/// # Errors
/// If the device has no zones or another geometry, holds data, or refuses, or the image is damaged.
pub fn load(
    disk: &dyn Disk,
    input: &mut impl Read,
    force: bool,
) -> Result<ZoneImageDone, ZoneImageError> {
    let mut zoned = Zoned::open(disk)?;
    let image = ZoneImage::read(input, zoned.zones.zone_count)?;
    check_fits(&zoned, &image)?;
    if !force {
        check_empty(&mut zoned)?;
    }
    let loaded = zoned.clear().and_then(|()| fill(&mut zoned, &image, input));
    if loaded.is_err() {
        // What is there is a part of the image, or damaged. The first error is what matters.
        let _ = zoned.clear().and_then(|()| zoned.flush());
    }
    loaded
}

/// Checks that an image is one of an equal device, and that the device can be in its state.
fn check_fits(zoned: &Zoned<'_>, image: &ZoneImage) -> Result<(), ZoneImageError> {
    let device = ZoneImage::of(zoned.disk, zoned.zones);
    // Zones beyond those of the image stay empty: that is how a device gets more of them.
    let grows = device.size_bytes > image.size_bytes
        && image.size_bytes.is_multiple_of(image.zone_bytes.max(1));
    for ((field, image), (_, device)) in image.fields().into_iter().zip(device.fields()) {
        if image != device && !(grows && field == "size") {
            return Err(ZoneImageError::Geometry { field, image, device });
        }
    }
    let is_partial =
        |zone: &&ImageZone| image.cond(&zone.cond).is_some_and(is_active) && zone.sectors > 0;
    let active = image.zones.iter().filter(is_partial).count() as u64;
    let limit = zoned.zones.active_max;
    if limit != 0 && active > u64::from(limit) {
        return Err(ZoneImageError::Active { active, limit });
    }
    let unit = u64::from(zoned.disk.geometry().physical_block_bytes) / SECTOR_BYTES;
    let is_cut = |zone: &&ImageZone| !zone.sectors.is_multiple_of(unit);
    match image.zones.iter().filter(|zone| zone.zone >= image.conventional).find(is_cut) {
        Some(&ImageZone { zone, sectors, .. }) => Err(ZoneImageError::Unit { zone, sectors, unit }),
        None => Ok(()),
    }
}

/// Checks that the zones of a device hold nothing.
fn check_empty(zoned: &mut Zoned<'_>) -> Result<(), ZoneImageError> {
    let mut conventional = Vec::new();
    zoned.report(|zone, info| match info.cond {
        ZoneCond::Empty => Ok(()),
        ZoneCond::NotWp => {
            conventional.push((zone, zoned.used_sectors(info)));
            Ok(())
        }
        _ => Err(ZoneImageError::NotEmpty { zone }),
    })?;
    for (zone, sectors) in conventional {
        for (from, len) in parts(sectors) {
            zoned.read(zone, from, len)?;
            if zoned.part[..len].iter().any(|byte| *byte != 0) {
                return Err(ZoneImageError::NotEmpty { zone });
            }
        }
    }
    Ok(())
}

impl Zoned<'_> {
    /// Empties all zones. Broken ones are repaired first.
    fn clear(&mut self) -> Result<(), ZoneImageError> {
        let (mut broken, mut conventional) = (Vec::new(), Vec::new());
        self.report(|_, info| {
            match info.cond {
                ZoneCond::ReadOnly | ZoneCond::Offline => broken.push((info.start, info.cond)),
                ZoneCond::NotWp => conventional.push((info.start, info.sectors)),
                _ => {}
            }
            Ok::<_, ZoneImageError>(())
        })?;
        for (start, cond) in broken {
            self.disk.inject(&fault(cond, &format!("-{}", start.0)))?;
        }
        self.run(0, Op::ZoneResetAll, "reset-all")?;
        let step = self.disk.limits().write_zeroes_sectors_max.max(1);
        for (start, sectors) in conventional {
            for from in (0..sectors).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
                let bio = Bio::new(Op::WriteZeroes, start + from, step.min(sectors - from));
                let zone = self.zones.zone_of(start).0;
                let zeroed = self.io.run(bio);
                zeroed.map_err(|status| ZoneImageError::Zone {
                    zone,
                    op: "write-zeroes",
                    status,
                })?;
            }
        }
        Ok(())
    }

    /// Writes a part of a zone.
    fn write(&mut self, zone: u32, from: u64, len: usize) -> Result<(), ZoneImageError> {
        let at = self.start(zone) + from;
        let written = self.io.write(at, &self.part[..len], Flags::NONE);
        written.map_err(|status| ZoneImageError::Zone { zone, op: "write", status })
    }
}

/// The fault that gives a zone this condition.
fn fault(cond: ZoneCond, value: &str) -> Injection {
    let name = match cond {
        ZoneCond::ReadOnly => "zone_readonly",
        _ => "zone_offline",
    };
    Injection::Device { name: name.to_owned(), value: value.to_owned() }
}

/// Writes the zones of an image to an empty device.
fn fill(
    zoned: &mut Zoned<'_>,
    image: &ZoneImage,
    input: &mut impl Read,
) -> Result<ZoneImageDone, ZoneImageError> {
    let mut done = ZoneImageDone { zones: image.zones.len() as u64, bytes: 0 };
    for entry in &image.zones {
        let cond = image.cond(&entry.cond).expect("a description that was read is checked");
        fill_zone(zoned, entry, input)?;
        done.bytes += entry.sectors * SECTOR_BYTES;
        match cond {
            ZoneCond::Full => zoned.run(entry.zone, Op::ZoneFinish, "finish")?,
            ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen | ZoneCond::Closed => {
                zoned.run(entry.zone, Op::ZoneClose, "close")?;
            }
            ZoneCond::ReadOnly | ZoneCond::Offline => {
                let start = zoned.start(entry.zone).0.to_string();
                zoned.disk.inject(&fault(cond, &start))?;
            }
            ZoneCond::NotWp | ZoneCond::Empty => {}
        }
    }
    let mut end = END;
    input.read_exact(&mut end)?;
    if end != END {
        return Err(ZoneImageError::Format("it does not end with the mark of one".to_owned()));
    }
    zoned.flush()?;
    Ok(done)
}

/// Writes the data of a zone.
fn fill_zone(
    zoned: &mut Zoned<'_>,
    entry: &ImageZone,
    input: &mut impl Read,
) -> Result<(), ZoneImageError> {
    let ImageZone { zone, sectors, .. } = *entry;
    let mut crc = crc32fast::Hasher::new();
    for (from, len) in parts(sectors) {
        input.read_exact(&mut zoned.part[..len])?;
        crc.update(&zoned.part[..len]);
        zoned.write(zone, from, len)?;
    }
    let mut stored = [0; 4];
    input.read_exact(&mut stored)?;
    if u32::from_le_bytes(stored) != crc.finalize() {
        let what = format!("the checksum of the data of zone {zone} does not match");
        return Err(ZoneImageError::Format(what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds of memory hold for every description that `save` writes.
    #[test]
    fn the_longest_description_has_the_length_that_is_reserved() {
        let longest = ZoneCond::ALL.into_iter().map(ZoneCond::name).max_by_key(|name| name.len());
        let cond = longest.unwrap().to_owned();
        let entry = ImageZone { zone: u32::MAX, cond, sectors: u64::MAX };
        let image = ZoneImage {
            blockyard_zones: u32::MAX,
            size_bytes: u64::MAX,
            block_bytes: u32::MAX,
            zone_bytes: u64::MAX,
            zone_capacity_bytes: u64::MAX,
            conventional: u32::MAX,
            zones: Vec::new(),
        };
        let printed = |image: &ZoneImage| serde_json::to_vec(image).unwrap().len();
        let fixed = printed(&image);
        // The line feed.
        assert!(fixed < FIXED_BYTES_MAX, "{fixed}");
        let zones = vec![entry; 3];
        let with_zones = printed(&ZoneImage { zones, ..image });
        assert!(with_zones - fixed <= 3 * ZONE_ENTRY_BYTES_MAX, "{with_zones}");
    }
}
