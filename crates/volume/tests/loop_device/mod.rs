//! A loop device for tests, on a sparse file. It needs root.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Test code.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::ioctl::Setter;

/// The ioctl that sets the parameters of a loop device (linux/loop.h).
const LOOP_SET_STATUS64: rustix::ioctl::Opcode = 0x4c04;

/// Length of `struct loop_info64` in bytes.
const LOOP_INFO64_BYTES: usize = 232;

/// Offset of the field `lo_sizelimit` in it.
const LO_SIZELIMIT: usize = 32;

/// A loop device, which is detached when dropped.
pub struct LoopDevice {
    path: PathBuf,
}

/// Runs a program, which must succeed, and returns its output.
pub fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl LoopDevice {
    /// Attaches a device of this size in bytes and with this sector size to a new file.
    pub fn new(image: &Path, bytes: u64, sector: u32) -> LoopDevice {
        std::fs::File::create(image).unwrap().set_len(bytes).unwrap();
        LoopDevice::on(image, sector)
    }

    /// Attaches a device with this sector size to an existing file.
    pub fn on(image: &Path, sector: u32) -> LoopDevice {
        let sector = sector.to_string();
        let line = ["--find", "--show", "--sector-size", &sector, image.to_str().unwrap()];
        // Another test or program may take the free device first; then try again.
        let attached = (0..16).find_map(|_| {
            let output = Command::new("losetup").args(line).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() || said.contains("busy"), "losetup: {said}");
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        });
        LoopDevice { path: attached.expect("a loop device is free").trim().into() }
    }

    /// Sets the size of the device in bytes, at most that of its file; 0 for that. The contents of
    /// the file stay. Reads and writes beyond the end fail.
    #[allow(unsafe_code)]
    pub fn limit(&self, bytes: u64) {
        let device = std::fs::File::open(&self.path).unwrap();
        let mut info = [0_u8; LOOP_INFO64_BYTES];
        info[LO_SIZELIMIT..][..8].copy_from_slice(&bytes.to_ne_bytes());
        // SAFETY: LOOP_SET_STATUS64 reads a `struct loop_info64`, which has this length.
        unsafe {
            let set = Setter::<LOOP_SET_STATUS64, [u8; LOOP_INFO64_BYTES]>::new(info);
            rustix::ioctl::ioctl(&device, set).unwrap();
        }
    }

    /// The path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the device as text.
    pub fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        _ = Command::new("losetup").arg("--detach").arg(&self.path).output();
    }
}
