//! What a job holds: a door per file.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use blockyard_core::{Due, Status};

use crate::door::Door;

/// A job's doors. fio's files point at them, so they stay where they are.
///
/// Invariant: every pointer came out of a box, and no reference to a door outlives a call.
#[derive(Default)]
pub(crate) struct Job {
    doors: Vec<NonNull<Door>>,
}

impl Job {
    /// Takes a door, and says where it stands until the job ends.
    pub(crate) fn add(&mut self, door: Door) -> NonNull<Door> {
        let door = NonNull::from(Box::leak(Box::new(door)));
        self.doors.push(door);
        door
    }

    /// The doors.
    fn doors(&mut self) -> impl Iterator<Item = &mut Door> {
        // SAFETY: by the invariant; the job is borrowed, and each pointer is in the list once.
        self.doors.iter_mut().map(|door| unsafe { door.as_mut() })
    }

    /// Opens every door that is not open.
    pub(crate) fn open(&mut self, depth: usize, durable: bool) -> Result<(), String> {
        self.doors().try_for_each(|door| {
            let opened = door.open(depth, durable);
            opened.map_err(|error| format!("dev: `{}`: {error}", door.disk().name()))
        })
    }

    /// Closes every door.
    pub(crate) fn close(&mut self) {
        self.doors().for_each(Door::close);
    }

    /// Starts what was pushed.
    #[inline]
    pub(crate) fn submit(&mut self) {
        self.doors().for_each(Door::submit);
    }

    /// Hands out what has ended: at least `min`, at most `max`, as fio asks for.
    #[inline]
    pub(crate) fn reap(
        &mut self,
        min: usize,
        max: usize,
        mut out: impl FnMut(usize, u64, Status),
    ) -> usize {
        let mut count = 0;
        loop {
            for door in self.doors() {
                let from = count;
                count += door.reap(max - from, |at, data, status| out(from + at, data, status));
            }
            if count >= min {
                return count;
            }
            self.wait();
        }
    }

    /// Sleeps until one of the doors has something.
    #[cold]
    fn wait(&mut self) {
        let first = self.doors().min_by_key(|door| match door.due() {
            Due::At(at) => at.0,
            Due::Never => u64::MAX,
        });
        if let Some(door) = first {
            door.wait();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for door in self.doors.drain(..) {
            // SAFETY: by the invariant, and the job gives it up.
            drop(unsafe { Box::from_raw(door.as_ptr()) });
        }
    }
}
