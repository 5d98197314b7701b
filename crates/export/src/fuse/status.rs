//! The mapping from statuses to error numbers for the kernel.
//!
//! The numbers are Linux's own for the status (`blk_status_to_errno`), so that a loop device on the
//! file maps them to the original status. Numbers with another meaning for a file are exceptions.

use blockyard_core::Status;
use fuser::Errno;

/// The error for a status that is not [`Status::Ok`].
#[cold]
pub(crate) fn errno_of(status: Status) -> Errno {
    Errno::from_i32(number_of(status))
}

fn number_of(status: Status) -> i32 {
    match status {
        // After EAGAIN the kernel would repeat the request at once, for ever.
        Status::Again => libc::EIO,
        // Callers pass no success; if one does, it is reported as an error.
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
            // The kernel accepts 1 to 511, and ENOSYS would disable the operation permanently.
            assert!((1..512).contains(&number) && number != libc::ENOSYS, "{status}: {number}");
            assert_ne!(number, libc::EAGAIN, "{status}");
        }
        assert_eq!(number_of(Status::IoErr), libc::EIO);
        assert_eq!(number_of(Status::Medium), libc::ENODATA);
        assert_eq!(number_of(Status::NotSupp), libc::EOPNOTSUPP);
        assert_eq!(number_of(Status::NoSpc), libc::ENOSPC);
    }
}
