//! The control plane of a `file` device.

use std::path::Path;
use std::sync::Arc;

use blockyard_core::provisional::Provisional;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Device, DeviceError, Extent, Geometry, Limits, SECTOR_SHIFT, Sector};
use blockyard_sync::rcu_cell::RcuCell;

use crate::backing::{self, Backing, Shared};
use crate::blocking::BlockingQueue;
use crate::config::{FileConfig, IoEngine};
use crate::error::FileDeviceError;
use crate::queue::FileQueue;
use crate::ring::{self, DEPTH, RingQueue};
use crate::zoned;

/// Longest read or write in sectors: 1 MiB. The channel splits longer ones, and their pieces run
/// concurrently.
const SECTORS_MAX: u64 = 2048;

/// Longest discard or write-zeroes in sectors: 2 GiB. One call deallocates as much, and other
/// requests run meanwhile.
const ZERO_SECTORS_MAX: u64 = 1 << 22;

/// A regular file or block device as a device.
#[derive(Debug)]
pub struct FileDevice {
    shared: Arc<Shared>,
    geometry: Geometry,
    limits: Limits,
    /// Queues use io_uring.
    is_uring: bool,
}

impl FileDevice {
    /// Opens the file. One that this creates stays.
    ///
    /// # Errors
    /// As [`FileDevice::open_provisional`].
    pub fn open(config: &FileConfig) -> Result<FileDevice, FileDeviceError> {
        let device = FileDevice::open_provisional(config)?;
        device.provisional().keep();
        Ok(device)
    }

    /// Opens the file. One that this creates is removed when the device closes, unless
    /// [`FileDevice::provisional`] is kept.
    ///
    /// # Errors
    /// If a parameter is invalid, the file is in use, or the system refuses an operation. Then no
    /// file was changed, and none that this created is left.
    pub fn open_provisional(config: &FileConfig) -> Result<FileDevice, FileDeviceError> {
        config.check()?;
        let is_uring = config.io != IoEngine::Blocking
            && match (ring::probe(), config.io) {
                (Ok(()), _) => true,
                (Err(error), IoEngine::Uring) => return Err(FileDeviceError::NoUring(error)),
                (Err(error), _) => {
                    let path = config.path.display();
                    tracing::warn!("{path}: the system refuses io_uring ({error}): calls block");
                    false
                }
            };
        let backing = Backing::open(config)?;
        let geometry = Geometry {
            sectors: backing.len >> SECTOR_SHIFT,
            logical_block_bytes: backing.logical_block_bytes,
            physical_block_bytes: backing.physical_block_bytes,
            zones: backing.zones.clone(),
        };
        let chunk_sectors = backing.zones.as_ref().map_or(0, |zones| zones.zone_sectors);
        let is_zoned = backing.zones.is_some();
        let limits = Limits {
            sectors_max: match is_zoned {
                true => SECTORS_MAX.min(backing.whole_sectors_max),
                false => SECTORS_MAX,
            },
            chunk_sectors,
            // The kernel's workers may execute two calls in any order.
            ordered: !is_zoned,
            // A merged request would fail as a whole where one of its bios fails alone, and the
            // kernel merges neighbours that are submitted together.
            segments_max: 1,
            discard_sectors_max: if backing.can_discard { ZERO_SECTORS_MAX } else { 0 },
            // In a sequential zone zeros would have to be written in order.
            write_zeroes_sectors_max: if is_zoned { 0 } else { ZERO_SECTORS_MAX },
            write_cache: true,
            fua: backing.has_fua,
            read_only: backing.read_only,
            ..Limits::unlimited(DEPTH)
        };
        let shared = Arc::new(Shared::new(backing));
        Ok(FileDevice { shared, geometry, limits, is_uring })
    }

    /// Whether the file stays, if the opening created it.
    pub fn provisional(&self) -> &Provisional {
        self.shared.backing.provisional()
    }

    /// What tells the file from one that was made again at the same path: the number of its file
    /// system, its own, and when it was made. A block device has its number.
    pub fn identity(&self) -> String {
        self.shared.backing.identity()
    }

    /// The present length in bytes of the file at a path, and the identity that
    /// [`FileDevice::identity`] would have. The file may be open as a device.
    ///
    /// # Errors
    /// If there is no such file, or the system refuses to examine it.
    pub fn probe(path: &Path) -> Result<(u64, String), FileDeviceError> {
        backing::probe(path)
    }

    /// [`FileDevice::identity`] of a file that exists, which another process may have open. Nothing
    /// is opened.
    ///
    /// # Errors
    /// If there is no file, or this process may not read it, or write to it unless it is read-only.
    pub fn existing(config: &FileConfig) -> Result<String, FileDeviceError> {
        backing::existing(config)
    }

    /// How the file is accessed, and whether the device is latched.
    pub fn status(&self) -> FileStatus {
        FileStatus {
            is_direct: self.shared.backing.is_direct,
            is_uring: self.is_uring,
            is_latched: Arc::clone(&self.shared.is_latched),
        }
    }
}

/// How a device accesses its file, and whether it is latched. Does not keep the file open.
#[derive(Clone, Debug)]
pub struct FileStatus {
    /// Whether I/O bypasses the page cache.
    pub is_direct: bool,
    /// Whether io_uring executes requests, and not blocking calls.
    pub is_uring: bool,
    is_latched: Arc<RcuCell<bool>>,
}

impl FileStatus {
    /// Whether a flush has failed, so that changes and flushes fail until the device is opened
    /// again.
    pub fn is_latched(&self) -> bool {
        *self.is_latched.get()
    }
}

impl Device for FileDevice {
    type Queue = FileQueue;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<FileQueue, DeviceError> {
        let failed = |error: std::io::Error| DeviceError::Os {
            what: "cannot open a queue of the file",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        };
        let shared = Arc::clone(&self.shared);
        Ok(if self.is_uring {
            FileQueue::Ring(Box::new(RingQueue::new(shared).map_err(failed)?))
        } else {
            FileQueue::Blocking(Box::new(BlockingQueue::new(shared).map_err(failed)?))
        })
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let sectors = self.geometry.sectors;
        if from.0 >= sectors {
            return Err(DeviceError::OutOfRange { sector: from, sectors });
        }
        match &self.geometry.zones {
            Some(zones) => {
                zoned::report_zones(self.shared.backing.locked(), zones, from, zones_max, out)
            }
            None => Ok(()),
        }
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let sectors = sectors.min(self.geometry.sectors.saturating_sub(from.0));
        if sectors == 0 {
            return Extent { sectors: 1, allocated: true, zero: false };
        }
        self.shared.backing.extent(from, sectors)
    }
}
