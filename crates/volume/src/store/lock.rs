//! The lock of a pool's place, by `flock`.
//!
//! The system has it for an open file, not for a process: a ring that knows the file has it until
//! everything has ended that the ring was given. So a process that is killed keeps it until its
//! last write has landed, and nobody else writes there before.

use std::fs::{File, TryLockError};
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::VolumeError;
use crate::holder::Holder;

/// How long what a dead process has begun may take to land before somebody else is refused.
const LAND_MAX: Duration = Duration::from_secs(10);

/// How long somebody who does not say who it is may have it: it has only just taken it, is about to
/// leave, looks at a device as udev does, or is gone and a power cut has taken its name away.
const NAMELESS_MAX: Duration = Duration::from_secs(2);

/// It is told when it takes longer than this.
const QUIET_MAX: Duration = Duration::from_millis(200);

/// How often it is tried.
const LOOK: Duration = Duration::from_millis(10);

/// An open file or directory that this process has locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Lock(Arc<File>);

impl Lock {
    /// Locks a file.
    ///
    /// # Errors
    /// If somebody else has, or the system refuses it.
    pub(crate) fn take(file: File) -> Result<Lock, TryLockError> {
        file.try_lock()?;
        Ok(Lock(Arc::new(file)))
    }

    /// Locks a file or directory; `None` where its file system cannot lock such a thing, as NFS
    /// cannot lock a directory.
    ///
    /// # Errors
    /// `WouldBlock` if another process has it locked, and no other error.
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

/// A ring that is closed may have the file for a moment longer.
impl Drop for Lock {
    fn drop(&mut self) {
        // What is not unlocked is closed now.
        _ = self.0.unlock();
    }
}

/// Takes something that is locked, and waits where who has it is not there any more, or may not be
/// for long.
///
/// # Errors
/// As `take`, or if that takes too long.
pub(crate) fn wait_for<T>(take: impl FnMut() -> Result<T, VolumeError>) -> Result<T, VolumeError> {
    wait_at_most(LAND_MAX, take)
}

fn wait_at_most<T>(
    most: Duration,
    mut take: impl FnMut() -> Result<T, VolumeError>,
) -> Result<T, VolumeError> {
    let (begin, mut told) = (Instant::now(), false);
    loop {
        match take() {
            Err(VolumeError::InUse { path, holder: Holder { pid: Some(pid), .. } })
                if Holder::is_gone(pid) =>
            {
                if begin.elapsed() >= most {
                    return Err(VolumeError::Unfinished { path, pid });
                }
                if begin.elapsed() >= QUIET_MAX && !std::mem::replace(&mut told, true) {
                    let path = path.display();
                    tracing::warn!("{path}: waiting for writes of process {pid}, which has ended");
                }
            }
            Err(VolumeError::InUse { holder: Holder { pid: None, .. }, .. })
                if begin.elapsed() < most.min(NAMELESS_MAX) => {}
            taken => return taken,
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_use(pid: u32) -> Result<(), VolumeError> {
        let holder = Holder { pid: Some(pid), control: None };
        Err(VolumeError::InUse { path: "/pool".into(), holder })
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
        assert!(refused.contains("had begun"), "{refused}");
        // Nobody has said who it is: not for long, where it is somebody who has only just come.
        let nameless =
            || Err(VolumeError::InUse { path: "/pool".into(), holder: Holder::default() });
        let mut tries = 0;
        let taken = wait_for(|| {
            tries += 1;
            if tries < 4 { nameless() } else { Ok(()) }
        });
        assert!(taken.is_ok() && tries == 4, "{taken:?} {tries}");
        let refused = wait_at_most(Duration::ZERO, nameless).unwrap_err().to_string();
        assert!(refused.contains("in use by another process"), "{refused}");
        // Who has taken it meanwhile is there.
        let mut holders = [gone, gone, std::process::id()].into_iter();
        let taken = wait_for(|| in_use(holders.next().unwrap()));
        assert!(matches!(taken, Err(VolumeError::InUse { .. })), "{taken:?}");
    }

    /// Whoever else knows the file, it is free when this is gone.
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
