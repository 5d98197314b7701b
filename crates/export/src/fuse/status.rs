//! How the end of an I/O is told to the kernel: the table from statuses to error numbers.
//!
//! The numbers are Linux's own for the status (`blk_status_to_errno`), so that a loop device on the
//! file makes the same status of them again, but for those that mean something else for a file.

use blockyard_core::Status;
use fuser::Errno;

/// The error for a status that is not [`Status::Ok`].
#[cold]
pub(crate) fn errno_of(status: Status) -> Errno {
    Errno::from_i32(number_of(status))
}

fn number_of(status: Status) -> i32 {
    match status {
        // A file that says EAGAIN is asked again at once, for ever.
        Status::Again => libc::EIO,
        // Nobody asks with a status that is no error; if somebody does, it is not good news.
        Status::Ok => libc::EIO,
        Status::NotSupp
        | Status::Timeout
        | Status::NoSpc
        | Status::Transport
        | Status::Target
        | Status::ResvConflict
        | Status::Medium
        | Status::Protection
        | Status::Resource
        | Status::IoErr
        | Status::DevResource
        | Status::ZoneOpenResource
        | Status::ZoneActiveResource
        | Status::Offline
        | Status::DurationLimit
        | Status::Inval => status.errno(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_is_an_error_that_fuse_takes() {
        for &status in Status::ALL {
            let number = number_of(status);
            // The kernel takes 1 to 511, and ENOSYS would switch the operation off for good.
            assert!((1..512).contains(&number) && number != libc::ENOSYS, "{status}: {number}");
            assert_ne!(number, libc::EAGAIN, "{status}");
        }
        assert_eq!(number_of(Status::IoErr), libc::EIO);
        assert_eq!(number_of(Status::Medium), libc::ENODATA);
        assert_eq!(number_of(Status::NotSupp), libc::EOPNOTSUPP);
        assert_eq!(number_of(Status::NoSpc), libc::ENOSPC);
    }
}
