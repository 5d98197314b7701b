//! How a pool in a directory grows: by files that are made before they are needed, as long as its
//! file system has room.
//!
//! Others may have a part of that room, so it is looked at again whenever a segment was made, and
//! now and then by the committer. What it was then says how many segments there can be; writes are
//! refused by that, as on a disk of as many. Should somebody take the room in between, there are
//! segments ahead: so many that what counts leaves enough garbage among those that are there.

use std::sync::{Arc, PoisonError, TryLockError};

use super::table::State;
use super::{Segments, Want, name};
use crate::store::{self, Directory};

impl<D: Directory> Segments<D> {
    /// Looks how many more can be made.
    pub fn look_outside(&self) {
        let count = self.directory.outside_bytes() / u64::from(self.bytes);
        self.table().outside = usize::try_from(count).unwrap_or(usize::MAX);
    }

    /// How many could be had: those that are free, or could be made.
    pub fn available(&self) -> usize {
        let table = self.table();
        table.free + table.more()
    }

    /// How many bytes may be written beside those that count, if others take no more of the file
    /// system than they had at the last look.
    pub fn left_bytes(&self) -> u64 {
        let table = self.table();
        table.left_bytes(table.there() + table.more())
    }

    /// Bytes that count, with pages twice, and [`Segments::left_bytes`].
    pub fn used_and_left_bytes(&self) -> (u64, u64) {
        let table = self.table();
        (table.used_bytes(), table.left_bytes(table.there() + table.more()))
    }

    /// Whether this use may change so many pages and take so many segments, of files that exist.
    /// Makes some if there are too few.
    pub fn may(&self, want: Want, pages: u64, segments: usize) -> bool {
        loop {
            let before = {
                let table = self.table();
                if table.free >= table.left_by(want, pages) + segments {
                    return true;
                }
                table.there()
            };
            if !self.grow_from(before) {
                return false;
            }
        }
    }

    /// How many have to be free so that this use may change so many pages and take so many.
    pub(crate) fn needed(&self, want: Want, pages: u64, segments: usize) -> usize {
        self.table().left_by(want, pages) + segments
    }

    /// Whether more can be made, as far as is known.
    pub(crate) fn grows(&self) -> bool {
        self.table().more() > 0
    }

    /// Whether the pages that have changed need most of what there is for them.
    pub fn is_soiled(&self) -> bool {
        let table = self.table();
        table.more() == 0 && table.is_soiled()
    }

    /// Takes a free segment; makes one if there is none.
    pub fn take(&self, want: Want) -> Option<u32> {
        loop {
            let before = {
                let mut table = self.table();
                match table.take(want) {
                    Some(number) => {
                        drop(table);
                        return self.pinned(number);
                    }
                    None => table.there(),
                }
            };
            if !self.grow_from(before) {
                return None;
            }
        }
    }

    /// A segment that was taken, kept open; none if there is no descriptor for it, which is treated
    /// as no space.
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

    /// Makes segments until so many are free, and those that are there have room for so many bytes
    /// beside those that count; as many as there is room for, but no more than are to be free.
    pub fn prepare(&self, free: usize, bytes: u64) {
        for _ in 0..free {
            if !self.wants_more(free, bytes) || !self.grow() {
                return;
            }
        }
    }

    /// Whether fewer than so many are free, or those that are there have room for less than so many
    /// bytes, and more can be made.
    pub fn wants_more(&self, free: usize, bytes: u64) -> bool {
        let table = self.table();
        let is_short = table.free < free || table.left_bytes(table.there()) < bytes;
        is_short && table.more() > 0
    }

    /// Makes one more segment, if there is room for it; says whether there is one more.
    pub fn grow(&self) -> bool {
        let before = self.table().there();
        self.grow_from(before)
    }

    /// Makes one more segment, or fills one that has given its space back, unless another thread
    /// has since there were this many.
    fn grow_from(&self, before: usize) -> bool {
        let is_held = || matches!(self.making.try_lock(), Err(TryLockError::WouldBlock));
        self.directory.until(&|| !is_held());
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, is_hollow) = {
            let table = self.table();
            if table.there() > before {
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
        match store::make(&self.directory, &name(number), u64::from(self.bytes)) {
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
                self.look_outside();
                true
            }
            Err(error) => {
                tracing::warn!("{}: no more segments: {error}", self.directory.title());
                self.table().full = true;
                false
            }
        }
    }

    /// Fills a segment that has given its space back; says whether it is free now.
    fn fill(&self, number: usize) -> bool {
        let Some(file) = self.files.get().get(number).cloned() else { return false };
        let filled = self.directory.fill(&file, u64::from(self.bytes));
        if let Err(error) = filled {
            tracing::warn!("{}: no more segments: {error}", self.directory.title());
            self.table().full = true;
            return false;
        }
        self.put_back(number as u32);
        self.look_outside();
        true
    }

    /// How many bytes may be written beside those that count to the segments that take space.
    pub(crate) fn left_there(&self) -> u64 {
        let table = self.table();
        table.left_bytes(table.there())
    }

    /// Gives the space of so many free segments back to the file system. They are filled again
    /// before more segments are made.
    pub fn give_back(&self, count: usize) {
        for _ in 0..count {
            let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(number) = self.table().hollow_out() else { return };
            let Some(file) = self.files.get().get(number as usize).cloned() else { return };
            if let Err(error) = self.directory.give_back(&file) {
                tracing::info!("{}: no space is given back: {error}", self.directory.title());
                self.put_back(number);
                return;
            }
        }
        self.look_outside();
    }

    /// Whether one could not be made, and there may be room now.
    pub fn may_try_again(&self) -> bool {
        self.look_outside();
        let table = self.table();
        table.full && table.outside > 0 && table.there() < table.count_max
    }

    /// Tries again to make one where one could not be made, if there may be room now. Nobody counts
    /// on others before one is there.
    pub fn try_again(&self) {
        self.look_outside();
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
