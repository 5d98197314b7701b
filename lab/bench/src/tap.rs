//! A tap: middleware that counts the requests that are started on a device, and can record their
//! order.
//!
//! The output of a scheduler shows how well it merges, whatever its own statistics say.
#![allow(clippy::disallowed_types)] // What a tap counts is the lab's own, shared by design.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_core::device::{Device, DeviceError, DeviceQueue, Due, Extent};
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Batch, CompletionBatch, Geometry, Limits, Nanos, Op, SECTOR_BYTES, Sector};

/// The counts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapReading {
    /// The number of requests.
    pub requests: u64,
    /// The sectors of all requests.
    pub sectors: u64,
}

impl TapReading {
    /// The requests since an earlier reading.
    pub fn since(self, before: TapReading) -> TapReading {
        let TapReading { requests, sectors } = before;
        TapReading { requests: self.requests - requests, sectors: self.sectors - sectors }
    }

    /// The average length of a request in bytes, and the share of I/Os of `io_bytes` that were
    /// merged into another request.
    pub fn size_and_merged(self, io_bytes: u64) -> (f64, f64) {
        let (requests, bytes) = (self.requests.max(1) as f64, (self.sectors * SECTOR_BYTES) as f64);
        (bytes / requests, 1.0 - requests / (bytes / io_bytes as f64).max(1.0))
    }
}

/// A started request: operation, first sector, and number of sectors.
pub type Started = (Op, Sector, u64);

/// The counts of all queues of a tapped device.
#[derive(Debug)]
struct TapCounts {
    requests: AtomicU64,
    sectors: AtomicU64,
    /// The requests in order, if they are recorded.
    order: Option<Mutex<Vec<Started>>>,
}

/// A device with a tap.
#[derive(Debug)]
pub struct Tapped<D> {
    inner: D,
    counts: Arc<TapCounts>,
}

impl<D: Device> Tapped<D> {
    /// Counts the requests of `inner`.
    pub fn new(inner: D) -> Tapped<D> {
        Tapped::with(inner, None)
    }

    /// Counts and records the requests of `inner`.
    pub fn in_order(inner: D) -> Tapped<D> {
        Tapped::with(inner, Some(Mutex::default()))
    }

    fn with(inner: D, order: Option<Mutex<Vec<Started>>>) -> Tapped<D> {
        let counts = TapCounts { requests: AtomicU64::new(0), sectors: AtomicU64::new(0), order };
        Tapped { inner, counts: Arc::new(counts) }
    }

    /// The counts so far.
    pub fn reading(&self) -> TapReading {
        // Relaxed: a reading need not be of an exact moment.
        let requests = self.counts.requests.load(Ordering::Relaxed);
        TapReading { requests, sectors: self.counts.sectors.load(Ordering::Relaxed) }
    }

    /// Takes the requests that were recorded since the last call.
    pub fn take_order(&self) -> Vec<Started> {
        let order = self.counts.order.as_ref();
        order.map_or_else(Vec::new, |order| {
            std::mem::take(&mut *order.lock().unwrap_or_else(PoisonError::into_inner))
        })
    }
}

impl<D: Device> Device for Tapped<D> {
    type Queue = TappedQueue<D::Queue>;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let counts = Arc::clone(&self.counts);
        Ok(TappedQueue { inner: self.inner.open_queue()?, counts, offered: Vec::new() })
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.inner.report_zones(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.inner.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }
}

/// A queue of a tapped device.
#[derive(Debug)]
pub struct TappedQueue<Q> {
    inner: Q,
    counts: Arc<TapCounts>,
    /// The requests of the batch that is being offered to the device.
    offered: Vec<Started>,
}

impl<Q: DeviceQueue> DeviceQueue for TappedQueue<Q> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.offered.clear();
        let offered = (0..batch.len()).filter_map(|index| batch.get(index));
        self.offered
            .extend(offered.map(|started| (started.op(), started.sector(), started.sectors())));
        self.inner.start(now, batch, done);
        // The device starts requests in order, and leaves in the batch those that it did not start.
        let started = &self.offered[..self.offered.len().saturating_sub(batch.len())];
        // Relaxed: these are statistics.
        self.counts.requests.fetch_add(started.len() as u64, Ordering::Relaxed);
        let sectors = started.iter().map(|(_, _, sectors)| sectors).sum();
        self.counts.sectors.fetch_add(sectors, Ordering::Relaxed);
        if let Some(order) = &self.counts.order {
            order.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(started);
        }
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        self.inner.poll(now, done);
    }

    fn room(&self) -> usize {
        self.inner.room()
    }

    fn due(&self) -> Due {
        self.inner.due()
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.inner.abort(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_core::channel::ChannelConfig;
    use blockyard_core::{Bio, BufRef, Composed, Disk, Region};
    use blockyard_null::{Null, NullConfig};

    #[test]
    fn a_started_request_is_counted_and_recorded_once() {
        let config = NullConfig { hw_queue_depth: 2, ..NullConfig::default() };
        let tapped = Arc::new(Tapped::in_order(Null::open(config).unwrap()));
        let device = Arc::clone(&tapped);
        let config = ChannelConfig::default();
        let disk = Composed::new("t".to_owned(), "null", device, config);
        let mut channel = disk.open().unwrap();
        let region = channel.register(Region::alloc(4096));
        let buf = BufRef { region, offset: 0 };
        let bios = [80, 88, 0, 40, 16].map(|sector| Bio::read(Sector(sector), 8, buf));
        let (mut pushed, mut done) = (0, Vec::new());
        while done.len() < bios.len() {
            pushed += channel.push(&bios[pushed..]);
            channel.submit();
            channel.reap(&mut done);
        }
        let reading = tapped.reading();
        assert_eq!(reading, TapReading { requests: 4, sectors: 40 });
        let (size, merged) = reading.size_and_merged(4096);
        assert!(size == 5120.0 && (merged - 0.2).abs() < 1e-9, "{size}, {merged}");
        assert_eq!(reading.since(reading), TapReading::default());
        let order: Vec<u64> = tapped.take_order().iter().map(|started| started.1.0).collect();
        assert_eq!(order, [80, 0, 40, 16]);
        assert!(tapped.take_order().is_empty());
    }
}
