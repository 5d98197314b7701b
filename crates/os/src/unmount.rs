//! Unmounting, with and without root.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

/// The setuid program that mounts and unmounts for users (Debian: fuse3).
pub const MOUNTER: &str = "fusermount3";

/// Detaches a mount from the tree at once; it ends when its last open file is closed.
///
/// # Errors
/// If nothing is mounted there, or the system refuses.
pub fn detach(dir: &Path) -> io::Result<()> {
    take_away(dir, UnmountFlags::DETACH, &["-u", "-z"])
}

/// Unmounts.
///
/// # Errors
/// `EBUSY` while a file is open.
pub fn unmount_unused(dir: &Path) -> io::Result<()> {
    take_away(dir, UnmountFlags::empty(), &["-u"])
}

/// Ends a mount even if files are open in it: pending requests fail.
///
/// # Errors
/// If the caller is not root, or the system refuses.
pub fn abort_mounted(dir: &Path) -> io::Result<()> {
    let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    Ok(unmount(dir, flags)?)
}

/// Ends a FUSE mount that is no longer in the tree, by the minor number of its device.
///
/// # Errors
/// If the control file system of FUSE is not mounted.
pub fn abort_connection(minor: u32) -> io::Result<()> {
    std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1")
}

fn take_away(dir: &Path, flags: UnmountFlags, options: &[&str]) -> io::Result<()> {
    match unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::PERM) => by_mounter(dir, options),
        Err(error) => Err(error.into()),
    }
}

fn by_mounter(dir: &Path, options: &[&str]) -> io::Result<()> {
    let mut command = Command::new(MOUNTER);
    command.args(options).arg("--").arg(dir).stdin(Stdio::null());
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    Err(match said.contains("busy") {
        true => io::Error::new(io::ErrorKind::ResourceBusy, said.to_owned()),
        false => io::Error::other(said.to_owned()),
    })
}
