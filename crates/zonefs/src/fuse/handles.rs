//! Open files by number.
// A table that only opens and closes change; an I/O only looks a handle up.
#![allow(clippy::disallowed_types)]

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use crate::file::ZoneFile;

/// Open files by the handle number that the kernel uses.
#[derive(Default)]
pub(super) struct Handles {
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    open: HashMap<u64, Arc<ZoneFile>>,
}

impl Handles {
    /// Adds a file and returns a number that was never used before.
    pub(super) fn insert(&self, file: ZoneFile) -> u64 {
        let mut table = self.change();
        table.next += 1;
        let number = table.next;
        table.open.insert(number, Arc::new(file));
        number
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<ZoneFile>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.open.get(&number).cloned()
    }

    /// Removes and returns a file. Dropping the last reference closes it, with the table unlocked.
    pub(super) fn remove(&self, number: u64) -> Option<Arc<ZoneFile>> {
        self.change().open.remove(&number)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Table> {
        // Every change is one call, so a panic cannot leave the table inconsistent.
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}
