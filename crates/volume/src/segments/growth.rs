//! Growth of a pool in a directory: it makes files before they are needed, as long as the file
//! system has space.
//!
//! Other programs use that file system too, so its free space is measured after each new segment,
//! and periodically by the committer. The last measurement limits the number of segments, and
//! writes are refused accordingly, as on a disk of that size. In case other programs take the space
//! in between, segments are made ahead: enough that the live data leave enough garbage in the
//! existing segments for cleaning.

use std::sync::{Arc, PoisonError, TryLockError};

use blockyard_store::SegmentStore;
use blockyard_volume_format::segment_name;

use super::table::State;
use super::{AllocationClass, Segments};
use crate::thread;

impl<D: SegmentStore> Segments<D> {
    /// Measures how many more segments can be made.
    pub fn measure_outside_space(&self) {
        let count = self.directory.growth_bytes() / u64::from(self.bytes);
        self.table().outside = usize::try_from(count).unwrap_or(usize::MAX);
    }

    /// How many segments are available: those that are free, or could be made.
    pub fn available(&self) -> usize {
        let table = self.table();
        table.free + table.more()
    }

    /// How many bytes may be written in addition to the live data, if other programs take no more
    /// of the file system than at the last measurement.
    pub fn left_bytes(&self) -> u64 {
        let table = self.table();
        table.left_bytes(table.existing_segments() + table.more())
    }

    /// Bytes in use, with pages counted twice, and [`Segments::left_bytes`].
    pub fn used_and_left_bytes(&self) -> (u64, u64) {
        let table = self.table();
        (table.used_bytes(), table.left_bytes(table.existing_segments() + table.more()))
    }

    /// Whether this allocation class may change `pages` pages and take `segments` segments of
    /// existing files. Makes segments if there are too few.
    pub fn may(&self, want: AllocationClass, pages: u64, segments: usize) -> bool {
        loop {
            let before = {
                let table = self.table();
                if table.free >= table.left_by(want, pages) + segments {
                    return true;
                }
                table.existing_segments()
            };
            if !self.grow_from(before) {
                return false;
            }
        }
    }

    /// How many segments must be free so that this class may change `pages` pages and take
    /// `segments`.
    pub(crate) fn needed(&self, want: AllocationClass, pages: u64, segments: usize) -> usize {
        self.table().left_by(want, pages) + segments
    }

    /// Whether more segments can be made, as of the last measurement.
    pub(crate) fn grows(&self) -> bool {
        self.table().more() > 0
    }

    /// Whether the changed pages need most of the space that is left for them.
    pub fn is_dirty_limit_near(&self) -> bool {
        let table = self.table();
        table.more() == 0 && table.is_dirty_limit_near()
    }

    /// Takes a free segment; makes one if none is free.
    pub fn take(&self, want: AllocationClass) -> Option<u32> {
        loop {
            let before = {
                let mut table = self.table();
                match table.take(want) {
                    Some(number) => {
                        drop(table);
                        return self.pinned(number);
                    }
                    None => table.existing_segments(),
                }
            };
            if !self.grow_from(before) {
                return None;
            }
        }
    }

    /// Pins a taken segment open. Returns none if there is no descriptor for it, which is treated
    /// as missing space.
    fn pinned(&self, number: u32) -> Option<u32> {
        match self.pin(number) {
            Ok(()) => Some(number),
            Err(error) => {
                let title = self.directory.title();
                tracing::warn!("{title}: segment {number} cannot be opened: {error}");
                self.put_back(number);
                None
            }
        }
    }

    /// Makes segments until `free` are free and the existing ones have space for `bytes` more
    /// bytes. Stops when there is no space, and makes at most `free`.
    pub fn prepare(&self, free: usize, bytes: u64) {
        for _ in 0..free {
            if !self.wants_more(free, bytes) || !self.grow() {
                return;
            }
        }
    }

    /// Whether fewer than `free` segments are free, or the existing ones have space for fewer than
    /// `bytes` bytes, and more can be made.
    pub fn wants_more(&self, free: usize, bytes: u64) -> bool {
        let table = self.table();
        let is_short = table.free < free || table.left_bytes(table.existing_segments()) < bytes;
        is_short && table.more() > 0
    }

    /// Makes one segment if there is space. Returns whether there is one more.
    pub fn grow(&self) -> bool {
        let before = self.table().existing_segments();
        self.grow_from(before)
    }

    /// Makes one segment, or refills one that has given its space back, unless another thread has
    /// done so since there were `before` segments.
    fn grow_from(&self, before: usize) -> bool {
        let is_held = || matches!(self.making.try_lock(), Err(TryLockError::WouldBlock));
        thread::wait_until(&|| !is_held());
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, is_hollow) = {
            let table = self.table();
            if table.existing_segments() > before {
                return true;
            }
            let hollow = table.states.iter().position(|state| *state == State::Hollow);
            let number = hollow.unwrap_or(table.states.len());
            if table.full || number >= table.count_max {
                return false;
            }
            (number, hollow.is_some())
        };
        if is_hollow {
            return self.fill(number);
        }
        match blockyard_store::make(&self.directory, &segment_name(number), u64::from(self.bytes)) {
            Ok(file) => {
                let file = Arc::new(file);
                self.files
                    .update(|files| files.iter().cloned().chain([Arc::clone(&file)]).collect());
                {
                    let mut table = self.table();
                    table.states.push(State::Free);
                    table.free += 1;
                    table.outside = table.outside.saturating_sub(1);
                }
                self.measure_outside_space();
                true
            }
            Err(error) => {
                tracing::warn!("{}: no more segments: {error}", self.directory.title());
                self.table().full = true;
                false
            }
        }
    }

    /// Refills a segment that has given its space back. Returns whether it is free now.
    fn fill(&self, number: usize) -> bool {
        let Some(file) = self.files.get().get(number).cloned() else { return false };
        let filled = self.directory.allocate(&file, u64::from(self.bytes));
        if let Err(error) = filled {
            tracing::warn!("{}: no more segments: {error}", self.directory.title());
            self.table().full = true;
            return false;
        }
        self.put_back(number as u32);
        self.measure_outside_space();
        true
    }

    /// How many bytes may be written, in addition to the live data, to the segments that occupy
    /// space.
    pub(crate) fn left_there(&self) -> u64 {
        let table = self.table();
        table.left_bytes(table.existing_segments())
    }

    /// Returns the space of `count` free segments to the file system: each file becomes a hole. The
    /// holes are filled before new segments are made.
    pub fn punch_holes(&self, count: usize) {
        for _ in 0..count {
            let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(number) = self.table().hollow_out() else { return };
            let Some(file) = self.files.get().get(number as usize).cloned() else { return };
            if let Err(error) = self.directory.deallocate(&file) {
                // A file system without holes in files does not support it.
                if error.kind() != std::io::ErrorKind::Unsupported {
                    let title = self.directory.title();
                    tracing::info!("{title}: cannot return free space to the file system: {error}");
                }
                self.put_back(number);
                return;
            }
        }
        self.measure_outside_space();
    }

    /// Whether a segment could not be made earlier, and there may be space now.
    pub fn may_try_again(&self) -> bool {
        self.measure_outside_space();
        let table = self.table();
        table.full && table.outside > 0 && table.existing_segments() < table.count_max
    }

    /// Tries again to make a segment after that has failed, if there may be space now. The space
    /// counts as available only when the segment exists.
    pub fn try_again(&self) {
        self.measure_outside_space();
        let tries = {
            let mut table = self.table();
            let tries = table.full && table.outside > 0;
            table.full &= !tries;
            tries
        };
        if tries {
            self.grow();
        }
    }
}
