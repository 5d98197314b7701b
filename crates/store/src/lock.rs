//! The lock of a pool's storage, by `flock`.
//!
//! The lock belongs to the open file, not to the process. An io_uring that has the file registered
//! holds it until all its operations have ended. So a killed process keeps the lock until its last
//! write has reached the disk, and no other process writes before.

use std::fs::{File, TryLockError};
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::lock_owner::LockOwner;

/// How long to wait for the writes of a dead process before the opening is refused.
const LAND_MAX: Duration = Duration::from_secs(10);

/// How long to wait for an owner that does not identify itself. It may have taken the lock just
/// now, be about to release it, or probe a device as udev does. Or it is dead, and a power cut has
/// erased its entry.
const NAMELESS_MAX: Duration = Duration::from_secs(2);

/// A wait that is longer than this is logged.
const QUIET_MAX: Duration = Duration::from_millis(200);

/// How often locking is tried.
const LOOK: Duration = Duration::from_millis(10);

/// An open file or directory that this process has locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Lock(Arc<File>);

impl Lock {
    /// Locks a file.
    ///
    /// # Errors
    /// If another process has locked it, or the system refuses.
    pub(crate) fn take(file: File) -> Result<Lock, TryLockError> {
        file.try_lock()?;
        Ok(Lock(Arc::new(file)))
    }

    /// Locks a file or directory; `None` if its file system cannot lock it, as NFS cannot lock a
    /// directory.
    ///
    /// # Errors
    /// `WouldBlock` if another process has locked it, and no other error.
    pub(crate) fn take_if_able(file: File) -> Result<Option<Lock>, TryLockError> {
        match Lock::take(file) {
            Ok(lock) => Ok(Some(lock)),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Error(error)) => {
                tracing::debug!("a lock is not to be had: {error}");
                Ok(None)
            }
        }
    }

    /// The open file.
    pub(crate) fn file(&self) -> &Arc<File> {
        &self.0
    }
}

impl Deref for Lock {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

/// Unlocks explicitly, because a closed io_uring may hold the file for a moment longer.
impl Drop for Lock {
    fn drop(&mut self) {
        // On an error, closing the file unlocks it.
        _ = self.0.unlock();
    }
}

/// Takes a lock, and waits if its owner is dead, or may release it soon.
///
/// # Errors
/// As `take`, or if that takes too long.
pub(crate) fn wait_for<T>(take: impl FnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
    wait_at_most(LAND_MAX, take)
}

fn wait_at_most<T>(
    most: Duration,
    mut take: impl FnMut() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let (begin, mut told) = (Instant::now(), false);
    loop {
        match take() {
            Err(StoreError::InUse { path, lock_owner: LockOwner { pid: Some(pid), .. } })
                if LockOwner::is_gone(pid) =>
            {
                if begin.elapsed() >= most {
                    return Err(StoreError::Unfinished { path, pid });
                }
                if begin.elapsed() >= QUIET_MAX && !std::mem::replace(&mut told, true) {
                    let path = path.display();
                    tracing::warn!("{path}: waiting for writes of process {pid}, which has ended");
                }
            }
            Err(StoreError::InUse { lock_owner: LockOwner { pid: None, .. }, .. })
                if begin.elapsed() < most.min(NAMELESS_MAX) => {}
            taken => return taken,
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_use(pid: u32) -> Result<(), StoreError> {
        let lock_owner = LockOwner { pid: Some(pid), ..LockOwner::default() };
        Err(StoreError::InUse { path: "/pool".into(), lock_owner })
    }

    #[test]
    fn only_who_is_gone_is_waited_for() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = child.id();
        child.wait().unwrap();
        let mut tries = 0;
        let taken = wait_for(|| {
            tries += 1;
            if tries < 4 { in_use(gone) } else { Ok(()) }
        });
        assert!(taken.is_ok() && tries == 4, "{taken:?} {tries}");
        let refused = wait_at_most(Duration::ZERO, || in_use(gone)).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {gone}")), "{refused}");
        assert!(refused.contains("does not run here"), "{refused}");
        // An unidentified owner is waited for only briefly: it may have just come.
        let nameless =
            || Err(StoreError::InUse { path: "/pool".into(), lock_owner: LockOwner::default() });
        let mut tries = 0;
        let taken = wait_for(|| {
            tries += 1;
            if tries < 4 { nameless() } else { Ok(()) }
        });
        assert!(taken.is_ok() && tries == 4, "{taken:?} {tries}");
        let refused = wait_at_most(Duration::ZERO, nameless).unwrap_err().to_string();
        assert!(refused.contains("in use by another process"), "{refused}");
        // The new owner is alive.
        let mut holders = [gone, gone, std::process::id()].into_iter();
        let taken = wait_for(|| in_use(holders.next().unwrap()));
        assert!(matches!(taken, Err(StoreError::InUse { .. })), "{taken:?}");
    }

    /// The file is unlocked when this is dropped, even if other descriptors of it are open.
    #[test]
    fn it_is_unlocked_when_it_is_dropped() {
        let name = format!("blockyard-lock-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let open = || File::create(&path).unwrap();
        let lock = Lock::take(open()).unwrap();
        let known = lock.try_clone().unwrap();
        assert!(matches!(Lock::take(open()), Err(TryLockError::WouldBlock)));
        drop(lock);
        drop(Lock::take(open()).unwrap());
        drop(known);
        std::fs::remove_file(&path).unwrap();
    }
}
