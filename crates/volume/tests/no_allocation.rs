//! Passing a parcel to the workers of `commit=taskq` and back allocates nothing, as counted by the
//! allocator.
#![allow(clippy::unwrap_used)] // Test code.

use std::io;
use std::sync::Arc;

use blockyard_sim::allocations::Counting;
use blockyard_sync::bell::Bell;
use blockyard_volume::buffer::Memory;
use blockyard_volume::store::tasks::Tasks;
use blockyard_volume::store::{Durability, Lane, Parcel, StoreFile};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A file that discards writes and reads as zeros.
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

/// Number of parcels passed in each round.
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
    // Count from the first parcel on.
    let before = Counting::made();
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
    assert_eq!(Counting::made() - before, 0, "allocations");
}
