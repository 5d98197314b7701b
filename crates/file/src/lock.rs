//! The lock of a file against a second writer.
//!
//! Every file gets an `flock`, which conflicts with that of a pool, and keeps udev from probing a
//! block device while it changes. A block device is opened exclusively (`O_EXCL`) by its caller. A
//! regular file gets a lock of the whole file that belongs to the open file description
//! (`F_OFD_SETLK`, fcntl(2)). A writer's lock conflicts with the locks of QEMU and of `lockf`. A
//! reader has a read lock, as a QEMU that writes has, so these two do not conflict.
//!
//! Both locks belong to the open file. An io_uring that has the file registered keeps it open until
//! its last operation has ended. So the lock of a killed process lasts until its writes have ended,
//! and no other process writes before.
#![allow(unsafe_code)] // fcntl has no safe wrapper for these commands.

use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// How long to wait for the lock. Its owner may be a killed process whose writes have not ended, or
/// a program that probes the file.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// How often locking is tried.
const RETRY: Duration = Duration::from_millis(10);

/// Locks an open file, exclusively or shared with other readers. Waits for a short time.
///
/// # Errors
/// `WouldBlock` if another open file has the lock.
pub(crate) fn lock(file: &File, is_device: bool, is_shared: bool) -> io::Result<()> {
    let begin = Instant::now();
    loop {
        match try_lock(file, is_device, is_shared) {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && begin.elapsed() < WAIT_MAX => {}
            result => return result,
        }
        std::thread::sleep(RETRY);
    }
}

fn try_lock(file: &File, is_device: bool, is_shared: bool) -> io::Result<()> {
    let locked = if is_shared { file.try_lock_shared() } else { file.try_lock() };
    locked.map_err(|error| match error {
        TryLockError::WouldBlock => io::ErrorKind::WouldBlock.into(),
        TryLockError::Error(error) => error,
    })?;
    if is_device {
        return Ok(());
    }
    let kind = if is_shared { libc::F_RDLCK } else { libc::F_WRLCK };
    set_lock(file, kind as libc::c_short).map_err(|error| match error.raw_os_error() {
        // fcntl(2): either error says that another lock conflicts.
        Some(libc::EACCES | libc::EAGAIN) => io::ErrorKind::WouldBlock.into(),
        _ => error,
    })
}

/// Releases the locks before the file is closed: a closed io_uring may keep the file open for a
/// moment longer.
pub(crate) fn unlock(file: &File, is_device: bool) {
    // On an error, closing the file releases the locks.
    if !is_device {
        _ = set_lock(file, libc::F_UNLCK as libc::c_short);
    }
    _ = file.unlock();
}

fn set_lock(file: &File, kind: libc::c_short) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid `flock`, a plain structure of integers. Zero for start and
    // length means the whole file, and `l_pid` has to be zero.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the call reads `range`, which lives until it returns, and the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A program that has the file open, as far as `/proc` tells: the end of a sentence. The kernel
/// names no process for a lock of an open file description.
pub(crate) fn owner(file: &File) -> String {
    let Some(pid) = file.metadata().ok().and_then(|found| process_with(file, &found)) else {
        return "by another program".to_owned();
    };
    if pid == std::process::id() {
        return "by another device of this process".to_owned();
    }
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("by process {pid} ({})", name.trim()),
        Err(_) => format!("by process {pid}"),
    }
}

/// The first process that has the file open by another descriptor.
fn process_with(file: &File, found: &Metadata) -> Option<u32> {
    let pids = std::fs::read_dir("/proc").ok()?.flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        // Only root may read the descriptors of another user's process.
        let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        descriptors.flatten().any(|entry| {
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let is_own = *pid == std::process::id() && number == Some(file.as_raw_fd());
            let is_same = |it: Metadata| (it.dev(), it.ino()) == (found.dev(), found.ino());
            !is_own && std::fs::metadata(entry.path()).is_ok_and(is_same)
        })
    })
}

#[cfg(test)]
mod tests {
    use blockyard_core::owner_only;
    use blockyard_testing::temp_dir::TempDir;

    use super::*;

    /// Opens a file, whose directory is removed at the end, as often as it is called.
    fn opener(name: &str) -> impl Fn() -> File + use<> {
        let place = TempDir::new(&std::env::temp_dir(), &format!("blockyard-{name}"));
        let path = place.fresh();
        move || {
            let _place = &place;
            owner_only::make_options().open(&path).unwrap()
        }
    }

    #[test]
    fn readers_share_a_lock_and_a_writer_excludes_all() {
        for is_device in [false, true] {
            let open = opener(&format!("shared-{is_device}"));
            let files = [open(), open(), open()];
            try_lock(&files[0], is_device, true).unwrap();
            try_lock(&files[1], is_device, true).unwrap();
            let refused = try_lock(&files[2], is_device, false).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
            unlock(&files[0], is_device);
            unlock(&files[1], is_device);
            try_lock(&files[2], is_device, false).unwrap();
            let refused = try_lock(&files[0], is_device, true).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        }
    }

    /// Programs that know one of the two locks are excluded by either.
    #[test]
    fn both_locks_of_a_regular_file_exclude() {
        let open = opener("both");
        let (ours, theirs) = (open(), open());
        try_lock(&ours, false, false).unwrap();
        assert!(theirs.try_lock().is_err());
        assert!(set_lock(&theirs, libc::F_RDLCK as libc::c_short).is_err());
        unlock(&ours, false);
        theirs.try_lock().unwrap();
        set_lock(&theirs, libc::F_RDLCK as libc::c_short).unwrap();
        assert!(try_lock(&ours, false, false).is_err());
    }

    #[test]
    fn process_with_the_file_open_is_named() {
        let open = opener("owner");
        let file = open();
        assert_eq!(owner(&file), "by another program");
        let _second = open();
        assert_eq!(owner(&file), "by another device of this process");
    }
}
