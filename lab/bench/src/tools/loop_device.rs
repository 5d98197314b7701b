//! A loop device over memory, for measurements of the running kernel's own schedulers.
//!
//! The backing file is a memfd, which lies in a tmpfs without a name, and the device detaches
//! itself when its last user closes it. However this process ends, neither remains. Pages that were
//! never written take no memory, so the device may be as large as the published one.
#![allow(unsafe_code)] // The two calls of <linux/loop.h> have no safe wrapper.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::{io, mem};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::error::LabError;

/// The device file from which free loop devices are requested.
const CONTROL: &str = "/dev/loop-control";
/// The number of attempts: another process may take the device between the two calls.
const TRIES: usize = 16;

// <linux/loop.h>
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// `struct loop_config` of <linux/loop.h>.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// `struct loop_info64` of <linux/loop.h>.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

const _: () = assert!(size_of::<LoopConfig>() == 304, "as the kernel has it");

/// A loop device. Dropping it detaches the device.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    /// Keeps the device attached.
    _device: File,
}

impl LoopDevice {
    /// A device of `bytes` bytes, in blocks of `block_bytes`, that reads as zeros.
    ///
    /// # Errors
    /// If this process lacks the privilege, or there is no `/dev/loop-control`, which the error
    /// names.
    pub fn new(bytes: u64, block_bytes: u32) -> Result<LoopDevice, LabError> {
        let memory = memfd_create("loop", MemfdFlags::CLOEXEC).map(File::from);
        let memory = memory.map_err(|error| LabError::io("memfd_create")(error.into()))?;
        memory.set_len(bytes).map_err(LabError::io(format!("{bytes} bytes in a memfd")))?;
        let control = File::options().read(true).write(true).open(CONTROL);
        let control = control.map_err(LabError::io(CONTROL))?;
        let mut last = None;
        for _ in 0..TRIES {
            // SAFETY: the call takes no argument, and the descriptor is open.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(LabError::io(CONTROL)(io::Error::last_os_error()));
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            match configure(&path, &memory, block_bytes) {
                Ok(device) => return Ok(LoopDevice { path, _device: device }),
                Err(error) => last = Some((path, error)),
            }
        }
        let (path, error) = last.expect("it was tried at least once");
        Err(LabError::io(path.display().to_string())(error))
    }

    /// The device's path: `/dev/loop0`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the kernel's scheduler for the device.
    ///
    /// # Errors
    /// If this process lacks the privilege, or the kernel has no such scheduler.
    pub fn set_scheduler(&self, name: &str) -> Result<(), LabError> {
        let path = self.scheduler_file();
        let what = format!("{name} into {}", path.display());
        fs::write(&path, name).map_err(LabError::io(what))
    }

    /// The device's scheduler.
    ///
    /// # Errors
    /// If the kernel does not report it.
    pub fn scheduler(&self) -> Result<String, LabError> {
        let path = self.scheduler_file();
        let what = path.display().to_string();
        let line = fs::read_to_string(&path).map_err(LabError::io(what.as_str()))?;
        let chosen = line.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let chosen = chosen.ok_or_else(|| LabError::failed(what, line.trim()))?;
        Ok(chosen.0.to_owned())
    }

    fn scheduler_file(&self) -> PathBuf {
        let name = self.path.file_name().expect("it was made of /dev and a name");
        Path::new("/sys/block").join(name).join("queue/scheduler")
    }
}

fn configure(path: &Path, memory: &File, block_bytes: u32) -> io::Result<File> {
    let device = File::options().read(true).write(true).open(path)?;
    // SAFETY: the structure consists of integers, for which zero is valid.
    let mut config: LoopConfig = unsafe { mem::zeroed() };
    config.fd = memory.as_raw_fd().cast_unsigned();
    config.block_size = block_bytes;
    config.info.flags = LO_FLAGS_AUTOCLEAR;
    // SAFETY: the kernel reads the structure, which lives until the call returns, and takes a
    // reference of its own to the memory.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(device) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Needs the privilege to make a loop device, as other tests of the project do.
    #[test]
    fn it_reads_as_zeros_under_the_scheduler_that_was_asked_for_and_goes_when_dropped() {
        let device = LoopDevice::new(1 << 30, 4096).unwrap();
        let size = Path::new("/sys/block").join(device.path().file_name().unwrap()).join("size");
        assert_eq!(fs::read_to_string(&size).unwrap().trim(), (1 << 21).to_string());
        for name in ["mq-deadline", "none"] {
            device.set_scheduler(name).unwrap();
            assert_eq!(device.scheduler().unwrap(), name);
        }
        let error = device.set_scheduler("no-such-scheduler").unwrap_err().to_string();
        assert!(error.starts_with("no-such-scheduler into /sys/block/loop"), "{error}");
        let mut block = [1; 4096];
        File::open(device.path()).unwrap().read_exact_at(&mut block, 1 << 29).unwrap();
        assert!(block.iter().all(|byte| *byte == 0));
    }
}
