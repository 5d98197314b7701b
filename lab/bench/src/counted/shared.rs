//! Counting for locks that readers may share.
//!
//! A reader that arrives while others read does not wait, and is not counted as contended, although
//! the lock's cache line had to move to it.

use blockyard_baselines::shared_lock::SharedLock;

use super::{Counted, Section, timed};
use crate::ticks;

impl<T, L: SharedLock<T>, const ROOM: usize> SharedLock<T> for Counted<L, ROOM> {
    fn new(value: T) -> Self {
        Counted(L::new(value))
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        match self.0.try_read(timed_look(f)) {
            Ok(section) => section.count(ROOM, None),
            Err(look) => {
                let since = ticks::now();
                self.0.read(look).count(ROOM, Some(since))
            }
        }
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        match self.0.try_write(timed(f)) {
            Ok(section) => section.count(ROOM, None),
            Err(change) => {
                let since = ticks::now();
                self.0.write(change).count(ROOM, Some(since))
            }
        }
    }

    #[inline]
    fn try_read<R, F: FnOnce(&T) -> R>(&self, f: F) -> Result<R, F> {
        // As in `try_with` of the exclusive lock: `f` must be returned on failure.
        let mut f = Some(f);
        let section = self.0.try_read(timed_look(|value: &T| {
            let f = f.take().expect("a section runs once");
            f(value)
        }));
        match section.map_err(drop) {
            Ok(section) => Ok(section.count(ROOM, None)),
            Err(()) => Err(f.expect("it has not run")),
        }
    }

    #[inline]
    fn try_write<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let mut f = Some(f);
        let section = self.0.try_write(timed(|value: &mut T| {
            let f = f.take().expect("a section runs once");
            f(value)
        }));
        match section.map_err(drop) {
            Ok(section) => Ok(section.count(ROOM, None)),
            Err(()) => Err(f.expect("it has not run")),
        }
    }
}

fn timed_look<T, R>(f: impl FnOnce(&T) -> R) -> impl FnOnce(&T) -> Section<R> {
    |value| {
        let from = ticks::now();
        let answer = f(value);
        Section { answer, from, to: ticks::now() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{TABLE, begin, end};
    use super::*;
    use blockyard_baselines::shared_lock::SpinRwLock;

    #[test]
    fn readers_that_share_a_lock_do_not_contend_and_others_do() {
        let lock = Counted::<SpinRwLock<u64>, TABLE>::new(3);
        begin();
        let both = lock.read(|outer| lock.read(|inner| outer + inner));
        lock.write(|value| *value = both);
        lock.read(|_| assert!(lock.try_write(|_| ()).is_err()));
        assert_eq!(lock.try_read(|value| *value).ok(), Some(6));
        let rooms = end().rooms();
        assert_eq!((rooms.len(), rooms[0].room.as_str()), (1, "table"));
        assert_eq!((rooms[0].acquisitions, rooms[0].contended), (5, 0));
    }
}
