//! Devices that keep their data in memory: written to files in memory (memfd) by the old process,
//! while their clients wait, and read from them by the new one.
//!
//! - A RAM disk is written as a snapshot: the objects as they are compressed.
//! - A zoned device is written as an image: the conditions of its zones, and their data.
//! - Any other device is written as a sparse file of its size; what reads as zeros is a hole.
//!
//! While a device is handed over, its data are there three times: in both processes and in the
//! file. The files of all devices together are bounded ([`CopyBounds`]).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use blockyard_core::blocking::Io;
use blockyard_core::{Disk, Flags, SECTOR_BYTES, Sector};
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create};

use super::message::RamSettings;
use crate::entry::DeviceEntry;
use crate::memory::free_bytes;
use crate::size::Bytes;
use crate::spec::DeviceSpec;
use crate::zone_image;

/// The files may have this part of the memory that is free. The new process needs as much again for
/// the devices, and memory for their tables, and other programs go on.
const FREE_PART: (u64, u64) = (2, 5);

/// How long a request of the device may take.
const IO_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that are read or written at once.
const PART_BYTES: usize = 256 << 10;

/// Sectors of one question for extents.
const EXTENT_SECTORS: u64 = 1 << 30;

/// A new file in memory. A program that this process starts does not get it.
///
/// # Errors
/// If the system refuses.
pub(crate) fn file() -> io::Result<File> {
    Ok(File::from(memfd_create("blockyard-upgrade", MemfdFlags::CLOEXEC)?))
}

/// A file in memory with these bytes.
///
/// # Errors
/// If the system refuses, for example because there is no memory.
pub(crate) fn file_of(bytes: &[u8]) -> io::Result<File> {
    let mut file = file()?;
    file.write_all(bytes)?;
    Ok(file)
}

/// The bytes of a file, which must be as many.
///
/// # Errors
/// If the file cannot be read, or has fewer bytes.
pub(crate) fn bytes_of(file: OwnedFd, len_bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = File::from(file);
    file.rewind()?;
    let mut bytes = vec![0; usize::try_from(len_bytes).map_err(io::Error::other)?];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Whether a device keeps data, or the conditions of zones, in the memory of the process alone.
pub(crate) fn is_in_memory(spec: &DeviceSpec) -> bool {
    // Not every kind has the parameter.
    let has_backing = || spec.text("backing").is_some();
    match spec.kind().name {
        "ram" => true,
        "null" => !has_backing() && (spec.switch("memory_backed") || spec.switch("zoned")),
        "smr" => !has_backing() && spec.text("device").is_none(),
        _ => false,
    }
}

/// The reason for which a device in memory cannot be handed over.
pub(crate) fn obstacle(spec: &DeviceSpec) -> Option<String> {
    if spec.kind().name != "ram" {
        return None;
    }
    let backing = spec.text("backing")?;
    let name = spec.name();
    Some(format!("`{name}` keeps a part of its data in {backing}, which one process has open"))
}

/// The bounds of the files of all devices together.
#[derive(Debug)]
pub(crate) struct CopyBounds {
    left: u64,
    max: u64,
    deadline: Instant,
}

impl CopyBounds {
    /// A part of the memory that is free now, until a deadline.
    pub(crate) fn new(deadline: Instant) -> CopyBounds {
        let (part, of) = FREE_PART;
        let max = (free_bytes() / of).saturating_mul(part);
        CopyBounds { left: max, max, deadline }
    }

    /// Takes bytes.
    fn take(&mut self, bytes: usize) -> io::Result<()> {
        if Instant::now() > self.deadline {
            return Err(io::Error::other("copying its data takes too long, while clients wait"));
        }
        let left = self.left.checked_sub(bytes as u64);
        self.left = left.ok_or_else(|| {
            let max = Bytes(self.max >> 20 << 20);
            let what = format!("too little memory is free: all devices may need {max}");
            io::Error::new(io::ErrorKind::OutOfMemory, what)
        })?;
        Ok(())
    }
}

/// A file within bounds.
struct Bounded<'b> {
    file: File,
    bounds: &'b mut CopyBounds,
}

impl Bounded<'_> {
    fn new(bounds: &mut CopyBounds) -> io::Result<Bounded<'_>> {
        Ok(Bounded { file: file()?, bounds })
    }
}

impl Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bounds.take(bytes.len())?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The data of a device, of which no client is left. A device that is read-only has no other data
/// than when it was opened: `None`.
///
/// # Errors
/// If the device fails a read, there is too little memory, or it takes too long.
pub(crate) fn save(entry: &DeviceEntry, bounds: &mut CopyBounds) -> io::Result<Option<File>> {
    let disk = entry.disk.as_ref();
    if let Some(ram) = &entry.ram {
        let mut out = BufWriter::with_capacity(PART_BYTES, Bounded::new(bounds)?);
        ram.save_to(&mut out).map_err(io::Error::other)?;
        return Ok(Some(out.into_inner().map_err(io::IntoInnerError::into_error)?.file));
    }
    if disk.limits().read_only {
        return Ok(None);
    }
    let mut out = Bounded::new(bounds)?;
    if disk.geometry().zones.is_some() {
        let mut out = BufWriter::with_capacity(PART_BYTES, out);
        zone_image::save(disk, &mut out).map_err(io::Error::other)?;
        return Ok(Some(out.into_inner().map_err(io::IntoInnerError::into_error)?.file));
    }
    save_plain(disk, &mut out)?;
    Ok(Some(out.file))
}

/// An adapter for requests of a device.
fn io_of(disk: &dyn Disk) -> io::Result<Io> {
    let channel = disk.open().map_err(io::Error::other)?;
    Ok(Io::new(channel, PART_BYTES).with_timeout(IO_TIMEOUT))
}

fn save_plain(disk: &dyn Disk, out: &mut Bounded<'_>) -> io::Result<()> {
    let len_bytes = disk.geometry().len_bytes();
    out.file.set_len(len_bytes)?;
    let (mut io, mut bytes) = (io_of(disk)?, vec![0; PART_BYTES]);
    let sectors = len_bytes / SECTOR_BYTES;
    let mut at = 0;
    while at < sectors {
        let extent = disk.extent(Sector(at), (sectors - at).min(EXTENT_SECTORS));
        // An empty extent means that the device does not know.
        let (end, is_zero) = match extent.sectors {
            0 => (sectors, false),
            len => (sectors.min(at + len), extent.zero),
        };
        while at < end && !is_zero {
            let part = ((end - at) * SECTOR_BYTES).min(PART_BYTES as u64) as usize;
            let failed = |status| io::Error::other(format!("sector {at}: a read failed: {status}"));
            io.read(Sector(at), &mut bytes[..part]).map_err(failed)?;
            out.bounds.take(part)?;
            out.file.write_all_at(&bytes[..part], at * SECTOR_BYTES)?;
            at += part as u64 / SECTOR_BYTES;
        }
        at = end;
    }
    Ok(())
}

/// The specification by which a device is opened that has the data of `file`, if it is one that
/// reads them when it is opened.
pub(crate) fn opened_as(spec: &DeviceSpec, file: &OwnedFd, ram: Option<RamSettings>) -> DeviceSpec {
    let mut opened = spec.clone();
    if spec.kind().name != "ram" {
        return opened;
    }
    let mut values = vec![("load", format!("/proc/self/fd/{}", file.as_raw_fd()))];
    values.extend(ram.iter().map(|ram| ("mem_limit", ram.mem_limit.to_string())));
    values.extend(ram.iter().map(|ram| ("compact", ram.compact.to_string())));
    for (key, value) in values {
        // A value that the device refuses is refused when it is opened.
        if let Err(error) = opened.set_text(key, &value) {
            tracing::warn!(device = spec.name(), %error, "a setting is not taken over");
        }
    }
    opened
}

/// Gives a device that was opened just now the data of `file`, if it has not read them yet.
///
/// # Errors
/// If the file cannot be read, or the device fails a write.
pub(crate) fn load(entry: &DeviceEntry, file: OwnedFd) -> io::Result<()> {
    if entry.ram.is_some() {
        return Ok(());
    }
    let (disk, mut file) = (entry.disk.as_ref(), File::from(file));
    file.rewind()?;
    if disk.geometry().zones.is_some() {
        let mut input = BufReader::with_capacity(PART_BYTES, file);
        return zone_image::load(disk, &mut input, true).map(drop).map_err(io::Error::other);
    }
    let len_bytes = disk.geometry().len_bytes();
    if file.metadata()?.len() != len_bytes {
        let len = file.metadata()?.len();
        let what = format!("{len} bytes of a device of {len_bytes}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    load_plain(disk, &file)
}

fn load_plain(disk: &dyn Disk, file: &File) -> io::Result<()> {
    let (mut io, mut bytes) = (io_of(disk)?, vec![0; PART_BYTES]);
    let len_bytes = disk.geometry().len_bytes();
    let mut at = 0;
    // Without data after `at` the system reports ENXIO.
    while let Some(data) = next(file, SeekFrom::Data(at))? {
        let hole = next(file, SeekFrom::Hole(data))?.unwrap_or(len_bytes);
        // A hole begins at a page, which may be less than a block of the device.
        let block = u64::from(disk.geometry().logical_block_bytes);
        at = data / block * block;
        let end = hole.next_multiple_of(block).min(len_bytes);
        while at < end {
            let part = (end - at).min(PART_BYTES as u64) as usize;
            file.read_exact_at(&mut bytes[..part], at)?;
            let failed = |status| {
                io::Error::other(format!("sector {}: a write failed: {status}", at / SECTOR_BYTES))
            };
            io.write(Sector(at / SECTOR_BYTES), &bytes[..part], Flags::NONE).map_err(failed)?;
            at += part as u64;
        }
    }
    Ok(())
}

/// The next data or hole of a file; `None` after the last one.
fn next(file: &File, from: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, from) {
        Ok(found) => Ok(Some(found)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{stack, uri};

    /// Opens a device.
    fn open(uri: &str) -> DeviceEntry {
        let spec = uri::parse(uri).unwrap();
        let made = stack::open(&spec).unwrap();
        DeviceEntry::new(spec, made)
    }

    /// A second device with the data of the first.
    fn copy(entry: &DeviceEntry) -> DeviceEntry {
        let mut bounds = CopyBounds::new(Instant::now() + Duration::from_secs(60));
        let file = OwnedFd::from(save(entry, &mut bounds).unwrap().unwrap());
        let made = stack::open(&opened_as(&entry.spec, &file, None)).unwrap();
        let copy = DeviceEntry::new(entry.spec.clone(), made);
        load(&copy, file).unwrap();
        copy
    }

    fn read(entry: &DeviceEntry, sector: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xaa; len];
        io_of(entry.disk.as_ref()).unwrap().read(Sector(sector), &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn data_in_memory_are_the_same_in_the_other_device() {
        for uri in [
            "null:///m?size=64M&memory_backed=1",
            "null:///m?size=64M&memory_backed=1&cache_size=1M&bs=4k",
            "ram:///r?size=64M&algo=lz4",
        ] {
            let entry = open(uri);
            let mut io = io_of(entry.disk.as_ref()).unwrap();
            let noise: Vec<u8> = (0..PART_BYTES).map(|at| ((at * at) >> 7) as u8).collect();
            for sector in [0, 8, 4096, 131_072 - 512] {
                io.write(Sector(sector), &noise, Flags::NONE).unwrap();
            }
            drop(io);
            let copy = copy(&entry);
            for sector in (0..131_072).step_by(512) {
                let [wanted, found] = [&entry, &copy].map(|it| read(it, sector, PART_BYTES));
                assert!(wanted == found, "{uri}: sector {sector}");
            }
        }
    }

    #[test]
    fn zones_keep_their_conditions_and_data() {
        for uri in [
            "null:///z?size=16M&zoned=1&zone_size=1M&memory_backed=1&zone_nr_conv=1",
            "null:///z?size=16M&zoned=1&zone_size=1M&zone_nr_conv=1",
            "smr:///s?size=64M&zone_size=1M&zone_nr_conv=1",
        ] {
            let entry = open(uri);
            let start = 2 * 2048;
            let mut io = io_of(entry.disk.as_ref()).unwrap();
            io.write(Sector(start), &[7; 8192], Flags::NONE).unwrap();
            drop(io);
            let copy = copy(&entry);
            let zones = |entry: &DeviceEntry| {
                let mut zones = Vec::new();
                entry.disk.report_zones(Sector(0), 16, &mut zones).unwrap();
                zones.iter().map(|zone| (zone.start, zone.wp)).collect::<Vec<_>>()
            };
            assert_eq!(zones(&entry), zones(&copy), "{uri}");
            assert_eq!(read(&entry, start, 8192), read(&copy, start, 8192), "{uri}");
        }
    }

    #[test]
    fn files_have_bounds_together() {
        let mut bounds = CopyBounds::new(Instant::now() + Duration::from_secs(60));
        assert!(bounds.max < free_bytes() / 2 + (64 << 20), "{bounds:?}");
        bounds.left = 4;
        Bounded::new(&mut bounds).unwrap().write_all(b"abc").unwrap();
        let error = Bounded::new(&mut bounds).unwrap().write_all(b"de").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        bounds.deadline = Instant::now() - Duration::from_secs(1);
        let error = Bounded::new(&mut bounds).unwrap().write_all(b"d").unwrap_err();
        assert!(error.to_string().contains("takes too long"), "{error}");
        let ram = uri::parse("ram:///r?backing=/x").unwrap();
        assert!(obstacle(&ram).unwrap().starts_with("`r` keeps a part of its data in /x"));
        assert_eq!(obstacle(&uri::parse("ram:///r").unwrap()), None);
    }

    #[test]
    fn bytes_come_back_from_a_file_in_memory() {
        let file = file_of(b"abc").unwrap();
        assert_eq!(bytes_of(file.into(), 3).unwrap(), b"abc");
        let file = file_of(b"abc").unwrap();
        assert!(bytes_of(file.into(), 4).is_err());
    }

    #[test]
    fn devices_in_memory_are_known() {
        for (uri, wanted) in [
            ("null:///n?size=1G", false),
            ("null:///n?size=1G&memory_backed=1", true),
            ("null:///n?size=1G&zoned=1&zone_size=1M", true),
            ("null:///n?size=1G&zoned=1&zone_size=1M&backing=/x", false),
            ("ram:///r", true),
            ("smr:///s", true),
            ("smr:///s?backing=/x", false),
            ("smr:///s?device=/dev/sg0", false),
            ("volume:///v?size=1G", false),
            ("file:///f?path=/x", false),
        ] {
            assert_eq!(is_in_memory(&uri::parse(uri).unwrap()), wanted, "{uri}");
        }
    }
}
