//! The mapping from byte ranges of a file to operations of the device, and from statuses of the
//! device to errors: pure rules, without I/O.
//!
//! | request | whole blocks | other bytes | other bytes, sequential zone |
//! | --- | --- | --- | --- |
//! | read | read | the blocks around it are read | the blocks around it are read |
//! | write | write | the blocks at its ends are read first | `EINVAL` |
//! | punch hole | discard, or write-zeroes | its ends are written with zeros | `EOPNOTSUPP` |
//! | zero range | write-zeroes, allocated | its ends are written with zeros | `EOPNOTSUPP` |
//!
//! A zoned disk supports neither holes nor zeroing in any zone.

use blockyard_core::rmw::{self, Span};
use blockyard_core::{Disk, Flags, Op, Status};
use fuser::Errno;

/// The properties of a disk that the rules need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileRules {
    /// The file's size.
    pub(crate) len_bytes: u64,
    /// The logical block, a power of two.
    pub(crate) block_bytes: u64,
    pub(crate) zoned: bool,
    /// The offset at which sequential zones begin, where no part of a block can be written.
    pub(crate) sequential_from: u64,
    pub(crate) read_only: bool,
    pub(crate) discards: bool,
    pub(crate) write_zeroes: bool,
}

/// A range that is to read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zeroing {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The operation for whole blocks.
    pub(crate) op: Op,
    pub(crate) flags: Flags,
}

impl FileRules {
    pub(crate) fn of(disk: &dyn Disk) -> FileRules {
        let (geometry, limits) = (disk.geometry(), disk.limits());
        FileRules {
            len_bytes: geometry.len_bytes(),
            block_bytes: u64::from(geometry.logical_block_bytes),
            zoned: geometry.zones.is_some(),
            sequential_from: rmw::sequential_from(geometry),
            read_only: limits.read_only,
            discards: limits.discard_sectors_max > 0,
            write_zeroes: limits.write_zeroes_sectors_max > 0,
        }
    }

    /// The part of `len` bytes from `offset` on that lies in the file.
    #[inline]
    pub(crate) fn clip(&self, offset: u64, len: u64) -> u64 {
        self.len_bytes.saturating_sub(offset).min(len)
    }

    /// The blocks that hold a range, which must lie in the file and not be empty. The file ends
    /// with a block, so the blocks lie in it too.
    #[inline]
    pub(crate) fn span(&self, offset: u64, want: u64) -> Span {
        Span::of(self.block_bytes, offset, want)
    }

    /// The operation of `fallocate` with this mode; `None` if no byte of the range is in the file.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for modes that the device cannot support, `ENOSPC` where the file would have to
    /// grow.
    pub(crate) fn zeroing(
        &self,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Result<Option<Zeroing>, Errno> {
        if self.read_only {
            return Err(Errno::EROFS);
        }
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let (op, flags) = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE if keeps_size && self.discards => (Op::Discard, Flags::NONE),
            libc::FALLOC_FL_PUNCH_HOLE if keeps_size => (Op::WriteZeroes, Flags::NONE),
            libc::FALLOC_FL_ZERO_RANGE => (Op::WriteZeroes, Flags::NOUNMAP),
            // Preallocation, which no device can promise, and modes that move data.
            _ => return Err(Errno::EOPNOTSUPP),
        };
        if self.zoned || (op == Op::WriteZeroes && !self.write_zeroes) {
            return Err(Errno::EOPNOTSUPP);
        }
        let clipped = self.clip(offset, len);
        if clipped < len && !keeps_size {
            return Err(Errno::ENOSPC);
        }
        Ok((clipped > 0).then_some(Zeroing { offset, len: clipped, op, flags }))
    }
}

/// The error for a status that is not [`Status::Ok`].
///
/// The numbers are Linux's own for the status (`blk_status_to_errno`), so that a loop device on the
/// file maps them to the original status. Numbers with another meaning for a file are exceptions.
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
    use blockyard_core::Sector;
    use proptest::prelude::*;

    use super::*;

    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;

    fn rules() -> FileRules {
        FileRules {
            len_bytes: 1 << 20,
            block_bytes: 4096,
            zoned: false,
            sequential_from: 1 << 20,
            read_only: false,
            discards: true,
            write_zeroes: true,
        }
    }

    #[test]
    fn span_of_whole_blocks_is_the_range_itself() {
        let span = rules().span(8192, 4096);
        assert_eq!(span, Span { start: 8192, len: 4096, skip: 0, want: 4096 });
        assert!(span.is_whole());
        assert_eq!((span.sector(), span.sectors()), (Sector(16), 8));
        let span = rules().span(4095, 2);
        assert_eq!(span, Span { start: 0, len: 8192, skip: 4095, want: 2 });
        assert!(!span.is_whole());
    }

    #[test]
    fn ranges_are_clipped_at_the_end_of_the_file() {
        assert_eq!(rules().clip((1 << 20) - 1, 100), 1);
        assert_eq!(rules().clip(1 << 20, 100), 0);
        assert_eq!(rules().clip(u64::MAX, u64::MAX), 0);
        assert_eq!(rules().clip(0, u64::MAX), 1 << 20);
    }

    #[test]
    fn punch_hole_uses_discard_or_write_zeroes() {
        let op = |rules: FileRules, mode| rules.zeroing(0, 4096, mode).map(|z| z.map(|z| z.op));
        assert_eq!(op(rules(), PUNCH), Ok(Some(Op::Discard)));
        let no_discard = FileRules { discards: false, ..rules() };
        assert_eq!(op(no_discard, PUNCH), Ok(Some(Op::WriteZeroes)));
        assert_eq!(op(rules(), ZERO), Ok(Some(Op::WriteZeroes)));
        let neither = FileRules { write_zeroes: false, ..no_discard };
        let zoned = FileRules { zoned: true, ..rules() };
        for mode in [PUNCH, ZERO] {
            assert_eq!(op(neither, mode), Err(Errno::EOPNOTSUPP));
            assert_eq!(op(zoned, mode), Err(Errno::EOPNOTSUPP));
            assert_eq!(op(FileRules { read_only: true, ..rules() }, mode), Err(Errno::EROFS));
        }
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let others = [0, keep, libc::FALLOC_FL_COLLAPSE_RANGE, libc::FALLOC_FL_INSERT_RANGE, -1];
        for mode in others {
            assert_eq!(op(rules(), mode), Err(Errno::EOPNOTSUPP), "{mode:#x}");
        }
    }

    #[test]
    fn fallocate_past_the_end_fails_with_enospc() {
        let end = rules().len_bytes;
        assert_eq!(rules().zeroing(end - 1, 2, ZERO), Err(Errno::ENOSPC));
        let kept = rules().zeroing(end - 1, 2, ZERO | libc::FALLOC_FL_KEEP_SIZE).unwrap();
        assert_eq!(kept.map(|zeroing| zeroing.len), Some(1));
        assert_eq!(rules().zeroing(end, 4096, PUNCH), Ok(None));
    }

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

    proptest! {
        #[test]
        fn a_span_holds_its_range(offset in 0..1_u64 << 20, len in 1..1_u64 << 21) {
            let rules = rules();
            let want = rules.clip(offset, len);
            let span = rules.span(offset, want);
            prop_assert_eq!(span.start + span.skip, offset);
            prop_assert!(span.skip + span.want <= span.len);
            prop_assert!(span.start + span.len <= rules.len_bytes);
            prop_assert!(span.start.is_multiple_of(4096) && span.len.is_multiple_of(4096));
            prop_assert!(span.len < want + 2 * 4096);
        }
    }
}
