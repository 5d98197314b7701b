//! To hand a parcel to the workers of `commit=taskq`, and to take it back, allocates nothing:
//! counted by the allocator itself.
#![allow(clippy::unwrap_used, unsafe_code)] // A test may.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::sync::Arc;

use blockyard_sync::bell::Bell;
use blockyard_volume::buffer::Memory;
use blockyard_volume::store::tasks::Tasks;
use blockyard_volume::store::{Durability, Lane, Parcel, StoreFile};

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

/// A file that takes everything and has nothing.
#[derive(Debug)]
struct Sink;

impl StoreFile for Sink {
    fn len(&self) -> io::Result<u64> {
        Ok(1 << 20)
    }

    fn read_at(&self, _: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }

    fn write_at(&self, _: u64, _: &[&[u8]]) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

const WORKERS: u16 = 4;

/// Parcels that are handed over in each round, by rounds.
const ROUNDS: [usize; 3] = [1, WORKERS as usize, 3];

#[test]
fn workers_are_handed_parcels_without_memory() {
    let mut tasks: Tasks<Sink> = Tasks::start(WORKERS).unwrap();
    let (file, bell, memory) = (Arc::new(Sink), Bell::new(), Memory::new(1 << 20));
    let mut parcels: Vec<Parcel> = Vec::with_capacity(WORKERS.into());
    for _ in 0..WORKERS {
        let mut parcel = Parcel::new(memory.take_beyond(4096));
        parcel.head(4096).fill(1);
        parcels.push(parcel);
    }
    // From the first one on.
    let before = ALLOCATIONS.get();
    for count in ROUNDS.into_iter().cycle().take(100) {
        for at in 0..count as u64 {
            let parcel = parcels.pop().unwrap();
            tasks.begin(&file, at * 4096, parcel, Durability::Itself);
        }
        for _ in 0..count {
            while !tasks.wait(&bell, &|| false) {}
            let (parcel, result) = tasks.end().unwrap();
            assert!(result.is_ok());
            parcels.push(parcel.unwrap());
        }
    }
    assert_eq!(ALLOCATIONS.get() - before, 0, "allocations");
}
