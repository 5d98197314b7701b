//! The report of one zone, which a channel requests on the data path, does not allocate: counted by
//! the allocator itself.
#![allow(clippy::unwrap_used)] // Test code.

use blockyard_core::{Device, Sector};
use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::sd::Sd;
use blockyard_testing::allocations::Counting;
use blockyard_zone_media::MemoryMedium;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_report_of_one_zone_allocates_nothing() {
    let (size, zone_size) = (64 << 20, 1 << 20);
    let config = DiskConfig { size, zone_size, zone_nr_conv: 4, ..DiskConfig::default() };
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    let sd = Sd::open(Disk::open(config, memory).unwrap()).unwrap();
    let mut zones = Vec::with_capacity(1);
    let before = Counting::made();
    for zone in 0..64 {
        zones.clear();
        sd.report_zones(Sector(zone * 2048), 1, &mut zones).unwrap();
        assert_eq!(zones[0].start, Sector(zone * 2048));
    }
    assert_eq!(Counting::made() - before, 0);
}
