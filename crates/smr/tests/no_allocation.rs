//! The report of one zone, which a channel asks for on its way, allocates nothing: counted by the
//! allocator itself.
#![allow(clippy::unwrap_used, unsafe_code)] // A test may, and an allocator is unsafe.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use blockyard_core::{Device, Sector};
use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::media::Memory;
use blockyard_smr::sd::Sd;

/// The system's allocator, which counts what each thread asks for.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `System` with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_report_of_one_zone_allocates_nothing() {
    let (size, zone_size) = (64 << 20, 1 << 20);
    let config = DiskConfig { size, zone_size, zone_nr_conv: 4, ..DiskConfig::default() };
    let memory = Memory::new(config.size, config.zone_size).unwrap();
    let sd = Sd::open(Disk::open(config, memory).unwrap()).unwrap();
    let mut zones = Vec::with_capacity(1);
    let before = ALLOCATIONS.get();
    for zone in 0..64 {
        zones.clear();
        sd.report_zones(Sector(zone * 2048), 1, &mut zones).unwrap();
        assert_eq!(zones[0].start, Sector(zone * 2048));
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
