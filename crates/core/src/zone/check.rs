//! Whether Linux, or a transport's standard, would accept a geometry, with the message of a
//! refusal.
//!
//! Linux's block layer validates every zoned device before it shows it
//! (`blk_revalidate_disk_zones`), and each transport has additional rules. Messages are quoted as
//! Linux prints them, without the device's name in front. The check has no side effects: it reads a
//! geometry, limits and a report, zone by zone.
//!
//! Linux stops at its first message. A [`Check`] continues. It gives each message once, for the
//! first zone that causes it, in the order in which Linux would print them as each fault is fixed.

use std::fmt;

use super::info::{ZoneInfo, ZoneType};
use crate::geometry::{Geometry, ZoneGeometry};
use crate::limits::Limits;
use crate::units::{SECTOR_BYTES, Sector};

/// The host or transport that is to accept a geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The block layer of Linux 6.1, with any transport.
    Linux61,
    /// The block layer of Linux 6.12, with any transport.
    Linux612,
    /// SCSI ZBC, as Linux's sd driver requires it.
    Zbc,
    /// NVMe with zoned namespaces, as Linux's nvme driver requires it.
    Zns,
    /// virtio-blk with zones, as Linux's virtio_blk driver requires it.
    Virtio,
}

impl Target {
    /// Every target.
    pub const ALL: [Target; 5] =
        [Target::Linux61, Target::Linux612, Target::Zbc, Target::Zns, Target::Virtio];

    /// The name on a command line, e.g. `linux-6.12`.
    pub const fn name(self) -> &'static str {
        match self {
            Target::Linux61 => "linux-6.1",
            Target::Linux612 => "linux-6.12",
            Target::Zbc => "zbc",
            Target::Zns => "zns",
            Target::Virtio => "virtio",
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a target refuses a geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The component that refuses it, e.g. `Linux 6.12, block layer`.
    pub by: &'static str,
    /// The error it fails with, e.g. `ENODEV`; empty where only a standard forbids it.
    pub error: &'static str,
    /// The message as Linux prints it; our own sentence where `error` is empty.
    pub message: String,
    /// The part of this geometry that causes it.
    pub about: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The refusals, in the order in which they would occur; empty if the geometry is accepted.
    pub refusals: Vec<Refusal>,
    /// Remarks about an accepted geometry.
    pub notes: Vec<String>,
}

impl Verdict {
    /// Whether the geometry would be accepted.
    pub fn is_accepted(&self) -> bool {
        self.refusals.is_empty()
    }
}

const LINUX_61: &str = "Linux 6.1, block layer";
const LINUX_612: &str = "Linux 6.12, block layer";
const SD: &str = "Linux, sd driver";
const NVME: &str = "Linux, nvme driver";
const VIRTIO_BLK: &str = "Linux, virtio_blk driver";

/// A check in progress: create it, pass it every zone of the report in order, finish it.
#[derive(Debug)]
pub struct Check<'a> {
    target: Target,
    geometry: &'a Geometry,
    zones: &'a ZoneGeometry,
    limits: &'a Limits,
    /// The message templates of the refusals so far.
    found: Vec<&'static str>,
    verdict: Verdict,
    /// Number of zones so far, and of conventional ones among them.
    count: u64,
    conventional: u64,
    /// The sector at which the next zone must start.
    next: Sector,
    /// Capacity of the first sequential zone.
    capacity: Option<u64>,
}

impl<'a> Check<'a> {
    /// Starts a check of a zoned device; `None` for a device without zones.
    pub fn new(target: Target, geometry: &'a Geometry, limits: &'a Limits) -> Option<Check<'a>> {
        let mut check = Check {
            target,
            geometry,
            zones: geometry.zones.as_ref()?,
            limits,
            found: Vec::new(),
            verdict: Verdict::default(),
            count: 0,
            conventional: 0,
            next: Sector(0),
            capacity: None,
        };
        match target {
            Target::Zbc => check.zbc(),
            Target::Zns => check.zns(),
            Target::Virtio => check.virtio(),
            Target::Linux61 | Target::Linux612 => {}
        }
        check.zone_size();
        Some(check)
    }

    /// Checks the next zone of the report.
    pub fn zone(&mut self, zone: &ZoneInfo) {
        match self.target {
            Target::Zbc => self.zbc_zone(zone),
            Target::Zns if zone.kind == ZoneType::Conventional => {
                let about = format!("{}: NVMe has no conventional zones", self.name(zone));
                self.refuse(NVME, "EINVAL", "invalid zone type 0x1", &[], about);
            }
            _ => {}
        }
        match self.target {
            Target::Linux61 => self.zone_of_61(zone),
            _ => self.zone_of_612(zone),
        }
        self.count += 1;
        self.conventional += u64::from(zone.kind == ZoneType::Conventional);
        self.next = zone.start + zone.sectors;
    }

    /// Completes the check after all zones.
    pub fn finish(mut self) -> Verdict {
        let block = self.block_layer();
        if self.count == 0 {
            let about = "the report is empty".to_owned();
            self.refuse(block, "ENODEV", "No zones reported", &[], about);
        } else if self.next.0 != self.geometry.sectors {
            let about = format!("the device has {} sectors", self.geometry.sectors);
            self.refuse(block, "ENODEV", "Missing zones from sector {}", &[self.next.0], about);
        }
        if self.target != Target::Linux61 && self.count > 0 && self.conventional == self.count {
            let about = "no zone is sequential".to_owned();
            let values = [self.conventional, self.count];
            let message = "Invalid number of conventional zones {} / {}";
            self.refuse(block, "ENODEV", message, &values, about);
        }
        self.note();
        self.verdict
    }

    /// The name of the block layer whose messages the check uses.
    fn block_layer(&self) -> &'static str {
        if self.target == Target::Linux61 { LINUX_61 } else { LINUX_612 }
    }

    /// Adds a refusal, unless its template occurred before; each `{}` is replaced by a value.
    fn refuse(
        &mut self,
        by: &'static str,
        error: &'static str,
        template: &'static str,
        values: &[u64],
        about: String,
    ) {
        if self.found.contains(&template) {
            return;
        }
        self.found.push(template);
        let mut message = String::new();
        let mut values = values.iter();
        for (at, part) in template.split("{}").enumerate() {
            if at > 0 {
                let value = values.next().expect("a value for each place");
                message.push_str(&value.to_string());
            }
            message.push_str(part);
        }
        self.verdict.refusals.push(Refusal { by, error, message, about });
    }

    /// Checks the block layer's rules for the zone size.
    fn zone_size(&mut self) {
        let sectors = self.zones.zone_sectors;
        if sectors.is_power_of_two() {
            return;
        }
        let about = format!("the zone size is {sectors} sectors");
        let message = match self.target {
            Target::Linux61 => "Invalid zoned device with non power of two zone size ({})",
            _ => "Invalid non power of two zone size ({})",
        };
        self.refuse(self.block_layer(), "ENODEV", message, &[sectors], about);
    }

    fn name(&self, zone: &ZoneInfo) -> String {
        format!("zone {} at sector {}", self.count, zone.start.0)
    }

    /// Checks a zone as `blk_revalidate_zone_cb` of Linux 6.1.
    fn zone_of_61(&mut self, zone: &ZoneInfo) {
        let size = self.zones.zone_sectors;
        let about = format!("{}: {} sectors long", self.name(zone), zone.sectors);
        if zone.start.0.saturating_add(size) < self.geometry.sectors {
            if zone.sectors != size {
                let message = "Invalid zoned device with non constant zone size";
                self.refuse(LINUX_61, "ENODEV", message, &[], about);
            }
        } else if zone.sectors > size {
            let message = "Invalid zoned device with larger last zone size";
            self.refuse(LINUX_61, "ENODEV", message, &[], about);
        }
        self.gap(zone);
        self.kind(zone, &[1, 2, 3]);
    }

    /// Checks a zone as `blk_revalidate_zone_cb` of Linux 6.12, which also checks capacities.
    fn zone_of_612(&mut self, zone: &ZoneInfo) {
        let size = self.zones.zone_sectors;
        let end = zone.start.0.saturating_add(zone.sectors);
        let is_last = end >= self.geometry.sectors;
        self.gap(zone);
        if zone.start.0 >= self.geometry.sectors || zone.sectors == 0 {
            let about = format!("the device has {} sectors", self.geometry.sectors);
            let message = "Invalid zone start {}, length {}";
            self.refuse(LINUX_612, "ENODEV", message, &[zone.start.0, zone.sectors], about);
        }
        let about = format!("{}: {} sectors long", self.name(zone), zone.sectors);
        if !is_last && zone.sectors != size {
            let message = "Invalid zoned device with non constant zone size";
            self.refuse(LINUX_612, "ENODEV", message, &[], about);
        } else if is_last && zone.sectors > size {
            let message = "Invalid zoned device with larger last zone size";
            self.refuse(LINUX_612, "ENODEV", message, &[], about);
        }
        let capacity = zone.capacity_sectors;
        let of = format!("{}: capacity {capacity} of {} sectors", self.name(zone), zone.sectors);
        if capacity == 0 || capacity > zone.sectors {
            self.refuse(LINUX_612, "ENODEV", "Invalid zone capacity", &[], of.clone());
        }
        if zone.kind == ZoneType::Conventional && capacity != zone.sectors {
            let message = "Invalid conventional zone capacity";
            self.refuse(LINUX_612, "ENODEV", message, &[], of.clone());
        }
        self.kind(zone, &[1, 2]);
        if zone.kind == ZoneType::SequentialWriteRequired {
            let first = *self.capacity.get_or_insert(capacity);
            if !is_last && capacity != first {
                let about = format!("{of}, others {first}");
                self.refuse(LINUX_612, "ENODEV", "Invalid variable zone capacity", &[], about);
            }
        }
    }

    fn gap(&mut self, zone: &ZoneInfo) {
        if zone.start != self.next {
            let about = format!("{} should start at {}", self.name(zone), self.next.0);
            let values = [self.next.0, zone.start.0];
            let message = "Zone gap at sectors {}..{}";
            self.refuse(self.block_layer(), "ENODEV", message, &values, about);
        }
    }

    fn kind(&mut self, zone: &ZoneInfo, known: &[u8]) {
        let kind = zone.kind as u8;
        if !known.contains(&kind) {
            let about = self.name(zone);
            let message = "Invalid zone type 0x{} at sectors {}";
            let values = [u64::from(kind), zone.start.0];
            self.refuse(self.block_layer(), "ENODEV", message, &values, about);
        }
    }

    fn block_sectors(&self) -> u64 {
        self.geometry.block_sectors().max(1)
    }

    /// Checks the rules of the SCSI disk driver, and the limits that ZBC cannot express.
    fn zbc(&mut self) {
        let sectors = self.zones.zone_sectors;
        let about = format!("the zone size is {sectors} sectors");
        if sectors > u64::from(u32::MAX) {
            self.refuse(SD, "EFBIG", "Zone size too large", &[], about.clone());
        }
        if !sectors.is_power_of_two() {
            let blocks = [sectors / self.block_sectors()];
            self.refuse(SD, "EINVAL", "Zone size {} is not a power of two.", &blocks, about);
        }
        if self.zones.active_max != 0 {
            let about = format!("at most {} zones may be active", self.zones.active_max);
            let message = "ZBC has no limit of active zones, so no host can know of one";
            self.refuse("ZBC-2", "", message, &[], about);
        }
    }

    fn zbc_zone(&mut self, zone: &ZoneInfo) {
        if zone.start != self.next {
            let block = self.block_sectors();
            let [lba, start, length] =
                [self.next.0, zone.start.0, zone.sectors].map(|sectors| sectors / block);
            let about = self.name(zone);
            let message = "Zone {} at LBA {} is invalid: {} + {}";
            self.refuse(SD, "EINVAL", message, &[self.count, lba, start, length], about);
        }
    }

    /// Checks the rules of the NVMe driver, and the geometries that a namespace cannot have.
    fn zns(&mut self) {
        let sectors = self.zones.zone_sectors;
        if self.limits.zone_append_sectors_max == 0 {
            let about = "the device has no zone append".to_owned();
            let message =
                "Zone Append not supported for zoned namespace:1. Forcing to read-only mode";
            self.refuse(NVME, "read-only", message, &[], about);
        }
        if !sectors.is_power_of_two() {
            let about = format!("the zone size is {sectors} sectors");
            let blocks = [sectors / self.block_sectors()];
            let message = "invalid zone size: {} for namespace: 1";
            self.refuse(NVME, "ENODEV", message, &blocks, about);
        }
        if sectors > 0 && !self.geometry.sectors.is_multiple_of(sectors) {
            let about = format!("{} sectors in zones of {sectors}", self.geometry.sectors);
            let message = "a namespace is a whole number of zones: the shorter last one is lost";
            self.refuse("NVMe ZNS", "", message, &[], about);
        }
    }

    /// Checks the rules of the virtio-blk driver.
    fn virtio(&mut self) {
        let sectors = self.zones.zone_sectors;
        let about = format!("the zone size is {sectors} sectors");
        if sectors > u64::from(u32::MAX) {
            let message = "zone_sectors has 32 bits";
            self.refuse("VIRTIO 1.4", "", message, &[], about.clone());
        }
        if !sectors.is_power_of_two() {
            let message = "zoned device with non power of two zone size {}";
            self.refuse(VIRTIO_BLK, "ENODEV", message, &[sectors], about);
        }
        let granularity = u64::from(self.geometry.physical_block_bytes);
        let append = self.limits.zone_append_sectors_max;
        let about = format!("the longest append is {append} sectors");
        if granularity == 0 {
            let about = "the physical block has 0 bytes".to_owned();
            let message = "zero write granularity reported";
            self.refuse(VIRTIO_BLK, "ENODEV", message, &[], about);
        }
        if append == 0 {
            let message = "zero max_append_sectors reported";
            self.refuse(VIRTIO_BLK, "ENODEV", message, &[], about);
        } else if append.saturating_mul(SECTOR_BYTES) < granularity {
            let message = "write granularity {} exceeds max_append_sectors {} limit";
            self.refuse(VIRTIO_BLK, "ENODEV", message, &[granularity, append], about);
        }
    }

    /// Adds remarks that are useful although the geometry is accepted.
    fn note(&mut self) {
        let ZoneGeometry { zone_sectors, zone_capacity_sectors, open_max, active_max, .. } =
            *self.zones;
        let sequential = self.count - self.conventional;
        let mut note = |text: String| self.verdict.notes.push(text);
        for (name, max) in [("open", open_max), ("active", active_max)] {
            if max != 0 && u64::from(max) >= sequential && self.target != Target::Zbc {
                note(format!(
                    "the limit of {max} {name} zones is shown as 0 (none): there are {sequential} \
                     sequential zones"
                ));
            }
        }
        match self.target {
            Target::Linux61 | Target::Linux612 if self.limits.zone_append_sectors_max == 0 => {
                note("the host emulates zone append: the device has none".to_owned());
            }
            Target::Zbc if zone_capacity_sectors < zone_sectors => {
                note(format!(
                    "ZBC has no zone capacity: each zone is {zone_capacity_sectors} sectors long, \
                     and a gap zone follows it (zone alignment method 8, granularity \
                     {zone_sectors})"
                ));
            }
            Target::Virtio => {
                note("zones over virtio-blk need Linux 6.4 or later".to_owned());
                if self.limits.discard_sectors_max > 0 {
                    note("ignoring negotiated F_DISCARD for zoned device".to_owned());
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
