//! A job's state: a device handle per file.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use blockyard_core::{Due, Status};

use crate::file_handle::FileHandle;
use crate::scheduler;

/// A job's device handles. fio's files hold pointers to them, so they do not move.
///
/// Invariant: every pointer came from a box, and no reference to a handle outlives a call.
#[derive(Default)]
pub(crate) struct Job {
    handles: Vec<NonNull<FileHandle>>,
    /// Whether a panic occurred: every handle is closed permanently.
    broken: bool,
}

/// The job is broken: its I/Os in flight end with an error, which only the caller can report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl Job {
    /// Takes a handle, and returns its address, which is valid until the job ends.
    pub(crate) fn add(&mut self, handle: FileHandle) -> NonNull<FileHandle> {
        let handle = NonNull::from(Box::leak(Box::new(handle)));
        self.handles.push(handle);
        handle
    }

    /// The job's handles.
    fn handles(&mut self) -> impl Iterator<Item = &mut FileHandle> {
        // SAFETY: by the invariant; the job is borrowed, and each pointer is in the list once.
        self.handles.iter_mut().map(|handle| unsafe { handle.as_mut() })
    }

    /// Opens every handle that is not open, and sets the devices' scheduler.
    pub(crate) fn open(
        &mut self,
        depth: usize,
        durable: bool,
        scheduler: Option<&'static str>,
    ) -> Result<(), String> {
        self.handles().try_for_each(|handle| {
            if let Some(name) = scheduler {
                let applied = scheduler::apply(name, handle.disk());
                applied
                    .map_err(|error| format!("ioscheduler: `{}`: {error}", handle.disk().name()))?;
            }
            let opened = handle.open(depth, durable);
            opened.map_err(|error| format!("dev: `{}`: {error}", handle.disk().name()))
        })
    }

    /// Closes every handle.
    pub(crate) fn close(&mut self) {
        self.handles().for_each(FileHandle::close);
    }

    /// Submits the pushed I/Os.
    #[inline]
    pub(crate) fn submit(&mut self) {
        self.handles().for_each(FileHandle::submit);
    }

    /// Closes every handle permanently, after a panic.
    #[cold]
    pub(crate) fn give_up(&mut self) {
        self.broken = true;
        for handle in self.handles() {
            // A channel in which a panic occurred may panic again on drop.
            let _ = catch_unwind(AssertUnwindSafe(|| handle.give_up()));
        }
    }

    /// Passes on at least `min` and at most `max` completions, as fio requests. An I/O must be in
    /// flight.
    ///
    /// # Errors
    /// If a panic occurred, or no handle has an I/O in flight.
    #[inline]
    pub(crate) fn reap(
        &mut self,
        min: usize,
        max: usize,
        mut out: impl FnMut(usize, u64, Status),
    ) -> Result<usize, Broken> {
        let mut count = 0;
        loop {
            let before = count;
            for handle in self.handles() {
                let from = count;
                count += handle.reap(max - from, |at, data, status| out(from + at, data, status));
            }
            if count > 0 && count >= min {
                return Ok(count);
            }
            self.check(count > before)?;
            if count >= min {
                return Ok(count);
            }
            self.wait();
        }
    }

    /// Fails if waiting is useless. Completions of the present call would be lost with the rest, so
    /// they end with the same error.
    #[cold]
    fn check(&mut self, found: bool) -> Result<(), Broken> {
        let stuck = !found && self.handles().all(|handle| handle.due() == Due::Never);
        if self.broken || stuck || self.handles().any(|handle| handle.is_broken()) {
            self.give_up();
            return Err(Broken);
        }
        Ok(())
    }

    /// Sleeps until a handle has a completion.
    #[cold]
    fn wait(&mut self) {
        let first = self.handles().min_by_key(|handle| match handle.due() {
            Due::At(at) => at.0,
            Due::Never => u64::MAX,
        });
        if let Some(handle) = first {
            handle.wait();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for handle in self.handles.drain(..) {
            // SAFETY: by the invariant; the job does not use the pointer after this.
            drop(unsafe { Box::from_raw(handle.as_ptr()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use blockyard_core::channel::Stats;
    use blockyard_core::inject::Injection;
    use blockyard_core::zone::ZoneInfo;
    use blockyard_core::{
        Bio, Channel, Completion, DeviceError, Disk, Extent, Geometry, Limits, Nanos, Prio, Region,
        RegionId, Sector,
    };

    use super::*;
    use crate::devices::{Devices, Wanted};
    use crate::file_handle::IoRequest;

    /// A channel that accepts every bio, and panics in `reap` or never completes any.
    struct Bad {
        panics: bool,
    }

    impl Channel for Bad {
        fn register(&mut self, _: Arc<Region>) -> RegionId {
            RegionId(0)
        }

        fn unregister(&mut self, _: RegionId) -> bool {
            false
        }

        fn push(&mut self, bios: &[Bio]) -> usize {
            bios.len()
        }

        fn submit(&mut self) {}

        fn reap(&mut self, _: &mut Vec<Completion>) -> usize {
            assert!(!self.panics, "as the test wants it");
            0
        }

        fn wait(&mut self, _: Option<Instant>) {}

        fn due(&self) -> Due {
            if self.panics { Due::At(Nanos(0)) } else { Due::Never }
        }

        fn in_flight(&self) -> usize {
            1
        }
    }

    /// A device with bad channels; all else is that of a good device.
    struct BadDisk {
        good: Arc<dyn Disk>,
        panics: bool,
    }

    impl Disk for BadDisk {
        fn name(&self) -> &str {
            self.good.name()
        }

        fn kind(&self) -> &'static str {
            self.good.kind()
        }

        fn geometry(&self) -> &Geometry {
            self.good.geometry()
        }

        fn limits(&self) -> &Limits {
            self.good.limits()
        }

        fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
            Ok(Box::new(Bad { panics: self.panics }))
        }

        fn report_zones(
            &self,
            from: Sector,
            zones_max: usize,
            out: &mut Vec<ZoneInfo>,
        ) -> Result<(), DeviceError> {
            self.good.report_zones(from, zones_max, out)
        }

        fn extent(&self, from: Sector, sectors: u64) -> Extent {
            self.good.extent(from, sectors)
        }

        fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
            self.good.inject(injection)
        }

        fn stats(&self) -> Stats {
            self.good.stats()
        }
    }

    /// A job with an open handle to such a device, and a flush in flight.
    fn job(panics: bool) -> Job {
        let wanted = Wanted { dev: Some("null:///n?size=1M"), ..Wanted::default() };
        let good = Devices::default().enter(&wanted, &mut |_| {}).unwrap();
        let mut job = Job::default();
        job.add(FileHandle::new(Arc::new(BadDisk { good, panics })));
        job.open(4, false, None).unwrap();
        for handle in job.handles() {
            handle.push(&FLUSH, 1).unwrap();
        }
        job.submit();
        job
    }

    /// A flush, by fio's number of a sync.
    const FLUSH: IoRequest =
        IoRequest { ddir: 3, prio: Prio::BestEffort, offset: 0, buf: 0, len: 0 };

    #[test]
    fn after_a_panic_a_job_ends_what_it_has_and_takes_nothing_more() {
        let mut job = job(true);
        let panicked = catch_unwind(AssertUnwindSafe(|| job.reap(1, 4, |_, _, _| {})));
        assert!(panicked.is_err());
        job.give_up();
        for min in [0, 1] {
            assert_eq!(job.reap(min, 4, |_, _, _| {}), Err(Broken));
        }
        assert_eq!(job.handles().next().unwrap().push(&FLUSH, 2), Err(Status::IoErr));
    }

    #[test]
    fn a_door_that_broke_breaks_its_job() {
        let mut job = job(true);
        job.handles().next().unwrap().give_up();
        assert_eq!(job.reap(0, 4, |_, _, _| {}), Err(Broken));
    }

    #[test]
    fn an_endless_job_is_not_awaited() {
        let mut stuck = job(false);
        assert_eq!(stuck.reap(1, 4, |_, _, _| {}), Err(Broken));
        let mut stuck = job(false);
        assert_eq!(stuck.handles().next().unwrap().await_one(), Status::Timeout);
    }
}
