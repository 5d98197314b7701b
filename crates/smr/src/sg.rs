//! A transport to a real drive through Linux's SG_IO: one `ioctl` per command, with the version 3
//! header of `<scsi/sg.h>` (include/uapi, and Documentation/scsi/scsi-generic.rst).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::raw::{c_int, c_uint, c_ushort, c_void};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blockyard_os::interrupt::uninterrupted;

use crate::sense::{ScsiStatus, Sense};
use crate::transport::{Data, Outcome, ScsiTransport, TransportError};

/// ioctl requests of `<scsi/sg.h>` and `<linux/fs.h>`.
const SG_IO: u32 = 0x2285;
const SG_GET_VERSION_NUM: u32 = 0x2282;
const BLKSECTGET: u32 = 0x1267;
/// The first version of the driver with this header.
const VERSION_MIN: c_int = 30_000;
/// Values of `dxfer_direction` in `sg_io_hdr`.
const DXFER_NONE: c_int = -1;
const DXFER_TO_DEVICE: c_int = -2;
const DXFER_FROM_DEVICE: c_int = -3;
/// Size of the sense data buffer in bytes: the maximum length (SPC-5 4.4.1).
const SENSE_LEN: usize = 252;
/// Bounds on the bytes of one command, whatever the system reports.
const BYTES_MIN: usize = 4096;
const BYTES_MAX: usize = 1 << 20;

/// Timeout of a command in milliseconds: Linux's `SD_TIMEOUT`.
const TIMEOUT_MS: c_uint = 30_000;
/// Timeout of a flush in milliseconds: Linux's `SD_FLUSH_TIMEOUT`.
const FLUSH_TIMEOUT_MS: c_uint = 60_000;
/// Timeout of WRITE SAME in milliseconds: Linux's `SD_WRITE_SAME_TIMEOUT`.
const WRITE_SAME_TIMEOUT_MS: c_uint = 120_000;

/// `struct sg_io_hdr`.
#[repr(C)]
struct SgIoHdr {
    interface_id: c_int,
    dxfer_direction: c_int,
    cmd_len: u8,
    mx_sb_len: u8,
    iovec_count: c_ushort,
    dxfer_len: c_uint,
    dxferp: *mut c_void,
    cmdp: *const u8,
    sbp: *mut u8,
    timeout: c_uint,
    flags: c_uint,
    pack_id: c_int,
    usr_ptr: *mut c_void,
    status: u8,
    masked_status: u8,
    msg_status: u8,
    sb_len_wr: u8,
    host_status: c_ushort,
    driver_status: c_ushort,
    resid: c_int,
    duration: c_uint,
    info: c_uint,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<SgIoHdr>() == 88, "the kernel's size of the header");

/// The rights that the process lacks for a device that the system does not let it open: the end of
/// an error text, empty if it lacks none.
fn missing_right(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "; the user needs the group of the device node, and CAP_SYS_RAWIO for its commands"
        }
        _ => "",
    }
}

/// Why a file cannot be used as a drive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SgError {
    /// The file cannot be opened.
    #[error("`{path}` cannot be opened: {source}{}", missing_right(source))]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a device.
    #[error("`{path}` is no device; expected a SCSI disk such as /dev/sg0 or /dev/sda")]
    NoDevice {
        /// The file.
        path: PathBuf,
    },
    /// The device does not support SG_IO.
    #[error(
        "`{path}` takes no SCSI commands (SG_GET_VERSION_NUM: {source}); expected a SCSI disk such \
         as /dev/sg0 or /dev/sda"
    )]
    NoScsi {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The system's sg driver is too old.
    #[error(
        "`{path}`: version {version} of the sg driver is too old; expected {VERSION_MIN} or later"
    )]
    Old {
        /// The file.
        path: PathBuf,
        /// The driver's version.
        version: i32,
    },
}

/// A drive that SG_IO reaches.
#[derive(Debug)]
pub struct Sg {
    file: File,
    bytes_max: usize,
}

impl Sg {
    /// Opens a drive for exclusive use: its generic node or its disk node.
    ///
    /// # Errors
    /// If the file cannot be opened, is in use, or is not a SCSI device.
    pub fn open(path: &Path) -> Result<Sg, SgError> {
        let open_error = |source| SgError::Open { path: path.to_owned(), source };
        // Check the type first: opening a FIFO or a terminal could block or have side effects.
        let kind = path.metadata().map_err(open_error)?.file_type();
        if !kind.is_block_device() && !kind.is_char_device() {
            return Err(SgError::NoDevice { path: path.to_owned() });
        }
        let flags = libc::O_EXCL | libc::O_NONBLOCK;
        let mut options = File::options();
        let opened = options.read(true).write(true).custom_flags(flags).open(path);
        let file = opened.map_err(open_error)?;
        let version = number(&file, SG_GET_VERSION_NUM)
            .map_err(|source| SgError::NoScsi { path: path.to_owned(), source })?;
        if version < VERSION_MIN {
            return Err(SgError::Old { path: path.to_owned(), version });
        }
        let bytes_max = number(&file, BLKSECTGET).map_or(BYTES_MIN, |max| {
            // A disk node reports sectors, in 16 bits, and a generic node bytes.
            let max = if kind.is_block_device() { (max & 0xffff) << 9 } else { max };
            usize::try_from(max).unwrap_or(BYTES_MIN).clamp(BYTES_MIN, BYTES_MAX)
        });
        Ok(Sg { file, bytes_max })
    }
}

/// Reads a number that the system reports for a device.
fn number(file: &File, request: u32) -> io::Result<c_int> {
    let mut number: c_int = 0;
    // SAFETY: all these requests write at most an `int` through the pointer, which is valid; the
    // file is open.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw mut number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(number) }
}

/// Timeout of a command, by its operation code.
fn timeout_ms(cdb: &[u8]) -> c_uint {
    match cdb.first() {
        Some(0x35 | 0x91) => FLUSH_TIMEOUT_MS,
        Some(0x41 | 0x93) => WRITE_SAME_TIMEOUT_MS,
        _ => TIMEOUT_MS,
    }
}

/// The header for a command. Its pointers point to the arguments.
fn header(cdb: &[u8], data: &mut Data<'_>, sense: &mut [u8; SENSE_LEN]) -> SgIoHdr {
    let (direction, pointer, len) = match data {
        Data::None => (DXFER_NONE, std::ptr::null_mut(), 0),
        Data::In(bytes) => (DXFER_FROM_DEVICE, bytes.as_mut_ptr(), bytes.len()),
        Data::Out(bytes) => (DXFER_TO_DEVICE, bytes.as_ptr().cast_mut(), bytes.len()),
    };
    SgIoHdr {
        interface_id: c_int::from(b'S'),
        dxfer_direction: direction,
        cmd_len: cdb.len() as u8,
        mx_sb_len: SENSE_LEN as u8,
        iovec_count: 0,
        dxfer_len: len as c_uint,
        dxferp: pointer.cast(),
        cmdp: cdb.as_ptr(),
        sbp: sense.as_mut_ptr(),
        timeout: timeout_ms(cdb),
        flags: 0,
        pack_id: 0,
        usr_ptr: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        msg_status: 0,
        sb_len_wr: 0,
        host_status: 0,
        driver_status: 0,
        resid: 0,
        duration: 0,
        info: 0,
    }
}

/// Interprets the fields of a header that the kernel fills in.
fn ended(header: &SgIoHdr, sense: &[u8; SENSE_LEN]) -> Result<Outcome, TransportError> {
    /// The driver status for available sense data, in the low four bits.
    const DRIVER_SENSE: c_ushort = 0x08;
    const DRIVER_TIMEOUT: c_ushort = 0x06;
    let (host, driver) = (header.host_status, header.driver_status & 0x0f);
    let len = header.dxfer_len as usize;
    let transferred = len.saturating_sub(usize::try_from(header.resid).unwrap_or(0));
    let written = usize::from(header.sb_len_wr).min(SENSE_LEN);
    let sense = Sense::parse(&sense[..written]);
    // Sense data are more specific than the host adapter's status.
    if sense.is_some()
        && (header.status == ScsiStatus::CheckCondition as u8 || driver == DRIVER_SENSE)
    {
        return Ok(Outcome { status: ScsiStatus::CheckCondition, sense, transferred });
    }
    let link = TransportError::Link { host, driver: header.driver_status };
    match host {
        _ if driver == DRIVER_TIMEOUT => Err(TransportError::Timeout),
        // DID_OK.
        0x00 if driver == 0 => match ScsiStatus::from_byte(header.status) {
            Some(status) => Ok(Outcome { status, sense: None, transferred }),
            None => Err(link),
        },
        // DID_NO_CONNECT, DID_BAD_TARGET.
        0x01 | 0x04 => Err(TransportError::Gone),
        // DID_BUS_BUSY, DID_IMM_RETRY, DID_REQUEUE: the command was not started.
        0x02 | 0x0c | 0x0d => Ok(Outcome { status: ScsiStatus::Busy, sense: None, transferred: 0 }),
        // DID_TIME_OUT.
        0x03 => Err(TransportError::Timeout),
        _ => Err(link),
    }
}

impl ScsiTransport for Sg {
    fn execute(&self, cdb: &[u8], mut data: Data<'_>) -> Result<Outcome, TransportError> {
        if ![6, 10, 12, 16].contains(&cdb.len()) {
            return Err(TransportError::CdbLength(cdb.len()));
        }
        if u32::try_from(data.len()).is_err() {
            let given = data.len() as u64;
            return Err(TransportError::Buffer { wanted: u32::MAX.into(), given });
        }
        let mut sense = [0; SENSE_LEN];
        let mut header = header(cdb, &mut data, &mut sense);
        // SAFETY: the header is valid. Each pointer in it points to a buffer of at least the length
        // in the header, writable where the kernel writes: sense data, and data from the device.
        // This function borrows the buffers until the call returns.
        let execute =
            || match unsafe { libc::ioctl(self.file.as_raw_fd(), SG_IO as _, &raw mut header) } {
                0.. => Ok(()),
                _ => Err(io::Error::last_os_error()),
            };
        // The drive executes a command whose call was interrupted, and its result is lost.
        if let Err(error) = uninterrupted(execute) {
            return Err(match error.raw_os_error() {
                Some(libc::ENODEV | libc::ENXIO) => TransportError::Gone,
                _ => TransportError::Io(error),
            });
        }
        ended(&header, &sense)
    }

    fn is_immediate(&self) -> bool {
        false
    }

    fn bytes_max(&self) -> usize {
        self.bytes_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sense::{SenseFormat, SenseKey};

    /// Fills in a header as the kernel would, and returns its interpretation.
    fn end(
        fill: impl FnOnce(&mut SgIoHdr, &mut [u8; SENSE_LEN]),
    ) -> Result<Outcome, TransportError> {
        let (mut bytes, mut sense) = ([0; 512], [0; SENSE_LEN]);
        let mut other = [0; SENSE_LEN];
        let mut header = header(&[0x88; 16], &mut Data::In(&mut bytes), &mut other);
        fill(&mut header, &mut sense);
        ended(&header, &sense)
    }

    #[test]
    fn a_header_has_the_buffers_of_its_command() {
        let cdb = [0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0];
        let (bytes, mut sense) = ([7; 512], [0; SENSE_LEN]);
        let header = header(&cdb, &mut Data::Out(&bytes), &mut sense);
        assert_eq!((header.interface_id, header.dxfer_direction), (0x53, DXFER_TO_DEVICE));
        assert_eq!((header.cmd_len, header.dxfer_len, header.mx_sb_len), (16, 512, 252));
        assert_eq!(header.cmdp, cdb.as_ptr());
        assert_eq!(header.dxferp.cast_const(), bytes.as_ptr().cast());
        assert_eq!(header.sbp.cast_const(), sense.as_ptr());
        assert_eq!((header.iovec_count, header.flags), (0, 0));
    }

    #[test]
    fn flushes_have_longer() {
        assert_eq!(timeout_ms(&[0x88]), 30_000);
        assert_eq!(timeout_ms(&[0x91]), 60_000);
        assert_eq!(timeout_ms(&[0x93]), 120_000);
    }

    #[test]
    fn untransferred_bytes_are_not_counted() {
        assert_eq!(end(|_, _| {}).unwrap(), Outcome::good(512));
        assert_eq!(end(|header, _| header.resid = 12).unwrap(), Outcome::good(500));
        assert_eq!(end(|header, _| header.resid = -5).unwrap(), Outcome::good(512));
        assert_eq!(end(|header, _| header.resid = 9999).unwrap(), Outcome::good(0));
    }

    #[test]
    fn sense_data_are_read() {
        for format in [SenseFormat::Fixed, SenseFormat::Descriptor] {
            let outcome = end(|header, sense| {
                let bytes = Sense::UNALIGNED_WRITE.print(format);
                sense[..bytes.len()].copy_from_slice(&bytes);
                (header.status, header.sb_len_wr) = (2, bytes.len() as u8);
                // Kernels before 5.14 report it in the driver status.
                (header.driver_status, header.host_status) = (8, 0x10);
                header.resid = 512;
            });
            let outcome = outcome.unwrap();
            assert_eq!((outcome.status, outcome.transferred), (ScsiStatus::CheckCondition, 0));
            assert_eq!(outcome.sense.unwrap().code(), (SenseKey::IllegalRequest, 0x21, 0x04));
        }
        // CHECK CONDITION without sense data is a failure without a reason.
        let outcome = end(|header, _| header.status = 2).unwrap();
        assert_eq!((outcome.status, outcome.sense), (ScsiStatus::CheckCondition, None));
    }

    #[test]
    fn the_link_fails_in_its_own_ways() {
        let host = |code| end(|header, _| header.host_status = code);
        assert!(matches!(host(0x01), Err(TransportError::Gone)));
        assert!(matches!(host(0x03), Err(TransportError::Timeout)));
        assert_eq!(host(0x0d).unwrap().status, ScsiStatus::Busy);
        assert!(matches!(host(0x07), Err(TransportError::Link { host: 7, driver: 0 })));
        let driver = end(|header, _| header.driver_status = 0x06);
        assert!(matches!(driver, Err(TransportError::Timeout)));
        let driver = end(|header, _| header.driver_status = 0x04);
        assert!(matches!(driver, Err(TransportError::Link { host: 0, driver: 4 })));
        let status = end(|header, _| header.status = 0x77);
        assert!(matches!(status, Err(TransportError::Link { .. })));
        assert_eq!(end(|header, _| header.status = 8).unwrap().status, ScsiStatus::Busy);
    }

    #[test]
    fn path_that_is_no_drive_is_refused_by_name() {
        let error = |path: &str| Sg::open(Path::new(path)).unwrap_err().to_string();
        assert!(error("/no/such/drive").contains("cannot be opened"));
        assert!(error("/proc/self/status").contains("is no device"));
        let null = error("/dev/null");
        assert!(null.contains("takes no SCSI commands") && null.contains("/dev/sg0"), "{null}");
    }

    #[test]
    fn a_node_that_knows_no_sg_io_refuses_each_command() {
        let file = File::options().read(true).write(true).open("/dev/null").unwrap();
        let sg = Sg { file, bytes_max: BYTES_MIN };
        let ended = sg.execute(&[0; 6], Data::None);
        assert!(matches!(ended, Err(TransportError::Io(error))
            if error.raw_os_error() == Some(libc::ENOTTY)));
        let ended = sg.execute(&[0; 7], Data::None);
        assert!(matches!(ended, Err(TransportError::CdbLength(7))));
    }
}
