//! Creating a file system: resets every sequential zone and writes the superblock.

use blockyard_core::blocking::Io;
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Bio, Disk, Flags, Op, SECTOR_BYTES, Sector, Status};
use uuid::Uuid;

use crate::attributes::FileKind;
use crate::error::{Problem, ZoneFsError};
use crate::layout;
use crate::options::FormatOptions;
use crate::superblock::{LABEL_BYTES, MAGIC, SUPERBLOCK_BYTES, Superblock};

/// Length of the start of a device that is checked for existing data before it is overwritten. File
/// systems, volume managers and partition tables have their signatures there; btrfs's is the last,
/// at 64 KiB.
const LOOKED_AT_BYTES: usize = (64 << 10) + 4096;

/// Parameters of a new file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// Overwrite existing data.
    pub force: bool,
    /// Volume label, at most 64 bytes.
    pub label: String,
    /// UUID of the file system; a random one if `None`.
    pub uuid: Option<Uuid>,
    /// The `-o` options.
    pub options: FormatOptions,
}

/// The result of creating a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Formatted {
    /// The superblock that was written.
    pub superblock: Superblock,
    /// Number of files in `cnv`.
    pub conventional_files: u32,
    /// Number of files in `seq`.
    pub sequential_files: u32,
    /// Whether zone 0, which holds the superblock, is sequential and was finished.
    pub zone_0_finished: bool,
}

/// The label is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid label `{label}`: expected at most {LABEL_BYTES} bytes, none of them zero")]
pub struct LabelError {
    label: String,
}

/// Validates a label.
///
/// # Errors
/// If it does not fit the superblock.
pub fn check_label(label: &str) -> Result<(), LabelError> {
    match label.len() <= LABEL_BYTES && !label.contains('\0') {
        true => Ok(()),
        false => Err(LabelError { label: label.chars().take(80).collect() }),
    }
}

/// Creates a file system on a device. The caller has validated the label.
///
/// # Errors
/// If the device has no zones or too few, is read-only, holds data while `force` is not set, fails,
/// or does not store data.
///
/// # Panics
/// If the label is too long for the superblock.
pub fn format(disk: &dyn Disk, format: &Format) -> Result<Formatted, ZoneFsError> {
    let failed = |problem| ZoneFsError { device: disk.name().to_owned(), problem };
    let zones = layout::report(disk)?;
    let [conventional, sequential] = layout::files(&zones, format.options.aggregate_conventional);
    if conventional.is_empty() && sequential.is_empty() {
        return Err(failed(Problem::NoUsableZone));
    }
    if disk.limits().read_only {
        return Err(failed(Problem::ReadOnly));
    }
    let channel = disk.open().map_err(|error| failed(error.into()))?;
    let mut io = Io::new(channel, LOOKED_AT_BYTES);
    if !format.force {
        look(&zones, &mut io).map_err(failed)?;
    }
    let superblock = superblock(format);
    let zone_0_finished = write(disk, &mut io, &zones, &superblock).map_err(failed)?;
    Ok(Formatted {
        superblock,
        conventional_files: conventional.len() as u32,
        sequential_files: sequential.len() as u32,
        zone_0_finished,
    })
}

fn superblock(format: &Format) -> Superblock {
    let mut superblock = Superblock::new(format.uuid.unwrap_or_else(Uuid::new_v4));
    superblock.label[..format.label.len()].copy_from_slice(format.label.as_bytes());
    let FormatOptions { aggregate_conventional, uid, gid, permissions } = format.options;
    Superblock { aggregate_conventional, uid, gid, permissions, ..superblock }
}

/// Refuses a device that holds data. Sectors above a write pointer hold none.
fn look(zones: &[ZoneInfo], io: &mut Io) -> Result<(), Problem> {
    let what = "looking for what the device holds";
    let end = LOOKED_AT_BYTES as u64 / SECTOR_BYTES;
    for zone in zones.iter().take_while(|zone| zone.start.0 < end) {
        let bytes = match zone.kind {
            ZoneType::Conventional => zone.sectors * SECTOR_BYTES,
            ZoneType::SequentialWriteRequired => {
                layout::written(zone, zone.capacity_sectors * SECTOR_BYTES)
            }
        };
        let mut bytes = vec![0; bytes.min((end - zone.start.0) * SECTOR_BYTES) as usize];
        if bytes.is_empty() {
            continue;
        }
        io.read(zone.start, &mut bytes).map_err(|status| Problem::Io { what, status })?;
        if zone.start == Sector(0) && bytes.starts_with(&MAGIC.to_le_bytes()) {
            return Err(Problem::Holds { what: "a zonefs" });
        } else if bytes.iter().any(|byte| *byte != 0) {
            return Err(Problem::Holds { what: "data, perhaps another file system" });
        }
    }
    Ok(())
}

/// Resets the zones, writes the superblock and reads it back. Returns whether zone 0 was finished.
fn write(
    disk: &dyn Disk,
    io: &mut Io,
    zones: &[ZoneInfo],
    superblock: &Superblock,
) -> Result<bool, Problem> {
    let io_problem = |what| move |status: Status| Problem::Io { what, status };
    reset(io, zones).map_err(io_problem("resetting the zones"))?;
    let first_is_sequential = zones[0].kind == ZoneType::SequentialWriteRequired;
    // A block may be longer than the superblock; the rest is zeros.
    let block = disk.geometry().physical_block_bytes as usize;
    let mut bytes = superblock.encode().to_vec();
    bytes.resize(SUPERBLOCK_BYTES.next_multiple_of(block), 0);
    io.write(Sector(0), &bytes, Flags::NONE).map_err(io_problem("writing the superblock"))?;
    if first_is_sequential {
        let finish = Bio::new(Op::ZoneFinish, zones[0].start, 0);
        io.run(finish).map_err(io_problem("finishing zone 0"))?;
    }
    io.run(Bio::flush()).map_err(io_problem("flushing"))?;
    // Overwrite the buffer, so that the data read back come from the device.
    let mut back = vec![0; bytes.len()];
    io.region().write(0, &back);
    io.read(Sector(0), &mut back).map_err(io_problem("reading the superblock back"))?;
    if back == bytes { Ok(first_is_sequential) } else { Err(Problem::Forgetful) }
}

/// Resets all sequential zones, with one command if the device supports it. Read-only and offline
/// zones do not change.
fn reset(io: &mut Io, zones: &[ZoneInfo]) -> Result<(), Status> {
    match io.run(Bio::new(Op::ZoneResetAll, Sector(0), 0)) {
        Err(Status::NotSupp) => {}
        end => return end.map(drop),
    }
    let can = |zone: &&ZoneInfo| {
        zone.kind == ZoneType::SequentialWriteRequired
            && !matches!(zone.cond, ZoneCond::Empty | ZoneCond::ReadOnly | ZoneCond::Offline)
    };
    zones
        .iter()
        .filter(can)
        .try_for_each(|zone| io.run(Bio::new(Op::ZoneReset, zone.start, 0)).map(drop))
}

impl Formatted {
    /// The number of files of a kind.
    pub fn files(&self, kind: FileKind) -> u32 {
        match kind {
            FileKind::Conventional => self.conventional_files,
            FileKind::Sequential => self.sequential_files,
        }
    }
}
