//! A disk that completes every bio at once and does nothing: the cost of its caller alone.
//!
//! This is not a baseline of a locking technique but a lower limit. fio's own null engine does
//! nothing either, so fio's engine over this disk shows the cost of the engine. Over the null
//! device it shows the cost of engine and device together.

use std::sync::Arc;
use std::time::Instant;

use blockyard_core::channel::Stats;
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, BufRef, Channel, Completion, DeviceError, Disk, Due, Extent, Geometry, Limits, Nanos, Op,
    Region, RegionId, Sector, Status,
};

/// The baseline's name on a command line.
pub const NAME: &str = "no-device";

/// A disk with the geometry and limits of another disk.
pub(crate) struct NoDevice(pub(crate) Arc<dyn Disk>);

impl Disk for NoDevice {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn limits(&self) -> &Limits {
        self.0.limits()
    }

    fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
        Ok(Box::new(Nothing::default()))
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.0.report_zones(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.0.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.0.inject(injection)
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }
}

/// A channel that does nothing. It registers no memory region, because it transfers no data.
#[derive(Debug, Default)]
struct Nothing {
    regions: u32,
    ended: Vec<Completion>,
}

impl Channel for Nothing {
    fn register(&mut self, _region: Arc<Region>) -> RegionId {
        self.regions += 1;
        RegionId(self.regions - 1)
    }

    fn unregister(&mut self, _region: RegionId) -> bool {
        self.ended.is_empty()
    }

    fn push(&mut self, bios: &[Bio]) -> usize {
        let end = |bio: &Bio| Completion {
            user_data: bio.user_data,
            sector: bio.sector,
            status: Status::Ok,
        };
        self.ended.extend(bios.iter().map(end));
        bios.len()
    }

    fn submit(&mut self) {}

    fn execute_inline(
        &mut self,
        _op: Op,
        _at: Sector,
        _sectors: u64,
        _buf: BufRef,
    ) -> Option<Status> {
        Some(Status::Ok)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        let count = self.ended.len();
        out.append(&mut self.ended);
        count
    }

    fn wait(&mut self, _deadline: Option<Instant>) {}

    fn due(&self) -> Due {
        if self.ended.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }

    fn in_flight(&self) -> usize {
        self.ended.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bio_ends_well_once_on_the_way_down_and_on_the_spot() {
        let mut channel = Nothing::default();
        let region = channel.register(Region::alloc(4096));
        let buf = BufRef { region, offset: 0 };
        assert_eq!(channel.execute_inline(Op::Read, Sector(8), 8, buf), Some(Status::Ok));
        assert_eq!((channel.in_flight(), channel.due()), (0, Due::Never));
        let bios = [7, 9].map(|data| Bio::read(Sector(data), 8, buf).with_user_data(data));
        assert_eq!(channel.push(&bios), 2);
        channel.submit();
        assert!(!channel.unregister(region));
        let mut out = Vec::new();
        assert_eq!((channel.in_flight(), channel.reap(&mut out)), (2, 2));
        let ends: Vec<_> = out.iter().map(|end| (end.user_data, end.sector, end.status)).collect();
        assert_eq!(ends, [7, 9].map(|data| (data, Sector(data), Status::Ok)));
        assert_eq!((channel.in_flight(), channel.reap(&mut out)), (0, 0));
    }
}
