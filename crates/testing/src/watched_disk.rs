//! A disk whose calls a test watches, and in which it can hold the threads that make them.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use blockyard_core::channel::Stats;
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, Channel, Completion, DeviceError, Disk, Due, Extent, Geometry, Limits, Region, RegionId,
    Sector,
};

/// What a test does in the calls of a disk. Each method but `reap` runs before the disk's own.
pub trait DiskWatch: Send + Sync + 'static {
    /// A thread opens a channel.
    ///
    /// # Errors
    /// The error that the thread gets instead of a channel.
    fn open(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// A thread asks for a report of zones from this sector on.
    ///
    /// # Errors
    /// The error that the thread gets instead of the report.
    fn report_zones(&self, from: Sector) -> Result<(), DeviceError> {
        let _ = from;
        Ok(())
    }

    /// A channel starts these bios.
    fn submit(&self, bios: &[Bio]) {
        let _ = bios;
    }

    /// Whether channels keep their completions.
    fn holds_completions(&self) -> bool {
        false
    }

    /// A channel returns these completions, which were added just now.
    fn reap(&self, completions: &mut [Completion]) {
        let _ = completions;
    }

    /// The disk is closed.
    fn close(&self) {}
}

/// A disk whose calls a test watches.
pub struct WatchedDisk<W: DiskWatch> {
    inner: Arc<dyn Disk>,
    watch: Arc<W>,
}

impl<W: DiskWatch> WatchedDisk<W> {
    /// A disk that passes all calls on to `inner`.
    pub fn over(inner: Arc<dyn Disk>, watch: Arc<W>) -> Arc<dyn Disk> {
        Arc::new(WatchedDisk { inner, watch })
    }
}

impl<W: DiskWatch> Drop for WatchedDisk<W> {
    fn drop(&mut self) {
        self.watch.close();
    }
}

impl<W: DiskWatch> fmt::Debug for WatchedDisk<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedDisk").field("name", &self.inner.name()).finish_non_exhaustive()
    }
}

impl<W: DiskWatch> Disk for WatchedDisk<W> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
        self.watch.open()?;
        let (inner, watch) = (self.inner.open()?, Arc::clone(&self.watch));
        Ok(Box::new(WatchedChannel { inner, watch, pushed: Vec::new() }))
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.watch.report_zones(from)?;
        self.inner.report_zones(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.inner.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

struct WatchedChannel<W> {
    inner: Box<dyn Channel>,
    watch: Arc<W>,
    /// The bios since the last `submit`.
    pushed: Vec<Bio>,
}

impl<W: DiskWatch> Channel for WatchedChannel<W> {
    fn register(&mut self, region: Arc<Region>) -> RegionId {
        self.inner.register(region)
    }

    fn unregister(&mut self, region: RegionId) -> bool {
        self.inner.unregister(region)
    }

    fn push(&mut self, bios: &[Bio]) -> usize {
        let taken = self.inner.push(bios);
        self.pushed.extend_from_slice(&bios[..taken]);
        taken
    }

    fn submit(&mut self) {
        self.watch.submit(&self.pushed);
        self.pushed.clear();
        self.inner.submit();
    }

    fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        if self.watch.holds_completions() {
            return 0;
        }
        let reaped = self.inner.reap(out);
        let first = out.len() - reaped;
        self.watch.reap(&mut out[first..]);
        reaped
    }

    fn wait(&mut self, deadline: Option<Instant>) {
        if self.watch.holds_completions() {
            std::thread::yield_now();
        } else {
            self.inner.wait(deadline);
        }
    }

    fn due(&self) -> Due {
        self.inner.due()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}
