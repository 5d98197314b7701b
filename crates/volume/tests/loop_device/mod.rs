//! A loop device for tests, on a sparse file. It needs root.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Test code.

use std::path::{Path, PathBuf};
use std::process::Command;

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
