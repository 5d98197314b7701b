//! A device of the kernel's zram, for comparison with our RAM disk.
//!
//! The device is requested from `/sys/class/zram-control`, so that one in use is not touched. It is
//! reset and removed on drop, after an error and after Ctrl-C too. If this process is ended at once
//! (a second Ctrl-C, a kill), the device remains with its memory; `zramctl` shows it and `zramctl
//! --reset` frees it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::error::LabError;

/// The directory in which devices are added and removed.
const CONTROL: &str = "/sys/class/zram-control";
/// udev opens a device that has just appeared, which is busy meanwhile.
const TRIES: u32 = 100;
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// The length of an entry of zram's table; there is one per page (zram.rst counts them with the
/// size of the disk, not in `mem_used_total`).
pub const ENTRY_BYTES: u64 = 16;
/// The length of a page, for each of which the table has an entry.
pub const PAGE_BYTES: u64 = 4096;

/// A zram device. Dropping it removes the device.
#[derive(Debug)]
pub struct ZramDevice {
    number: u32,
    path: PathBuf,
    bytes: u64,
}

/// The compared values of `mm_stat`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmStat {
    /// The uncompressed length of the stored data.
    pub orig_data_size: u64,
    /// The compressed length of the stored data.
    pub compr_data_size: u64,
    /// The memory for them.
    pub mem_used_total: u64,
    /// The number of same-filled pages.
    pub same_pages: u64,
    /// The number of pages that are stored uncompressed.
    pub huge_pages: u64,
}

impl ZramDevice {
    /// A device of `bytes` bytes, compressed by an algorithm of the kernel's, that reads as zeros.
    ///
    /// # Errors
    /// If the kernel has no zram or no such algorithm, or this process lacks the privilege; the
    /// error says how to provide it.
    pub fn new(bytes: u64, algorithm: &str) -> Result<ZramDevice, LabError> {
        if !Path::new(CONTROL).exists() {
            let how = "load the module (modprobe zram), in a kernel that has it";
            return Err(LabError::missing("the kernel's zram", how));
        }
        let add = format!("{CONTROL}/hot_add");
        let number = fs::read_to_string(&add).map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied => {
                LabError::missing("the right to make a zram device", "run this as root")
            }
            _ => LabError::io(add.as_str())(error),
        })?;
        let number = number.trim();
        let number = number.parse().map_err(|_| LabError::failed(add, format!("`{number}`")))?;
        // From here on a drop removes the device.
        let device = ZramDevice { number, path: format!("/dev/zram{number}").into(), bytes };
        device.set("comp_algorithm", algorithm)?;
        device.set("disksize", &bytes.to_string())?;
        if !device.path.exists() {
            let what = device.path.display().to_string();
            return Err(LabError::missing(what, "mount devtmpfs on /dev"));
        }
        Ok(device)
    }

    /// The device's path: `/dev/zram1`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The memory of its table, in bytes.
    pub fn table_bytes(&self) -> u64 {
        self.bytes / PAGE_BYTES * ENTRY_BYTES
    }

    /// Opens the device for direct I/O. Buffers must be aligned to 4096 bytes.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self) -> Result<File, LabError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(&self.path).map_err(LabError::io(self.path.display().to_string()))
    }

    /// The device's statistics.
    ///
    /// # Errors
    /// If the kernel does not report them.
    pub fn mm_stat(&self) -> Result<MmStat, LabError> {
        let path = self.attribute("mm_stat");
        let what = path.display().to_string();
        let line = fs::read_to_string(&path).map_err(LabError::io(what.as_str()))?;
        MmStat::parse(&line).ok_or_else(|| LabError::failed(what, line.trim()))
    }

    fn attribute(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{name}", self.number))
    }

    fn set(&self, name: &str, value: &str) -> Result<(), LabError> {
        let path = self.attribute(name);
        let what = format!("{value} into {}", path.display());
        fs::write(&path, value).map_err(LabError::io(what))
    }
}

impl Drop for ZramDevice {
    fn drop(&mut self) {
        let number = self.number.to_string();
        let remove = Path::new(CONTROL).join("hot_remove");
        for path in [self.attribute("reset"), remove] {
            let value = if path.ends_with("reset") { "1" } else { &number };
            // A device that cannot be removed is visible in zramctl; a drop cannot report it.
            let _ = persistently(|| fs::write(&path, value));
        }
    }
}

/// Retries while another process has the device open.
fn persistently(mut what: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for _ in 1..TRIES {
        match what() {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => thread::sleep(TRY_AGAIN),
            done => return done,
        }
    }
    what()
}

impl MmStat {
    /// Parses the line that zram.rst describes.
    fn parse(line: &str) -> Option<MmStat> {
        let numbers: Vec<u64> =
            line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [orig_data_size, compr_data_size, mem_used_total, _, _, same_pages, _, huge_pages] =
            *numbers.first_chunk()?;
        Some(MmStat { orig_data_size, compr_data_size, mem_used_total, same_pages, huge_pages })
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::Region;

    use super::*;

    #[test]
    fn the_line_is_that_of_the_kernel() {
        let line =
            "16777216 10310000 12001280        0 12001280       92        0      193    193\n";
        let stat = MmStat::parse(line).unwrap();
        assert_eq!((stat.compr_data_size, stat.mem_used_total), (10_310_000, 12_001_280));
        assert_eq!((stat.same_pages, stat.huge_pages), (92, 193));
        assert_eq!(MmStat::parse("1 2 3"), None);
    }

    /// Needs the privilege to make a zram device, as other tests of the project do.
    #[test]
    fn it_compresses_and_goes_when_dropped() {
        let device = ZramDevice::new(8 << 20, "lz4").unwrap();
        let system = device.attribute("disksize");
        assert_eq!(fs::read_to_string(&system).unwrap().trim(), (8 << 20).to_string());
        assert_eq!(device.table_bytes(), 2048 * 16);
        let region = Region::alloc(4096);
        region.write(0, &[7; 2048]);
        let file = device.open().unwrap();
        super::super::direct::write(&file, &region, 0, 4096, 4096).unwrap();
        let stat = device.mm_stat().unwrap();
        assert_eq!((stat.orig_data_size, stat.same_pages), (4096, 0));
        assert!(stat.compr_data_size > 0 && stat.compr_data_size < 1024, "{stat:?}");
        drop(file);
        drop(device);
        assert!(!system.exists());
        let error = ZramDevice::new(8 << 20, "no-such").unwrap_err().to_string();
        assert!(error.starts_with("no-such into /sys/block/zram"), "{error}");
    }
}
