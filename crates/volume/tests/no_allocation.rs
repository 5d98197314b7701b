//! Passing a parcel to the workers of `commit=taskq` and back allocates nothing, as counted by the
//! allocator.
#![allow(clippy::unwrap_used)] // Test code.

use std::io;
use std::sync::Arc;

use blockyard_store::buffer::Memory;
use blockyard_store::log_writer::Tasks;
use blockyard_store::{Durability, LogWriter, StoreFile, WriteBatch};
use blockyard_sync::event_count::EventCount;
use blockyard_testing::allocations::Counting;

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
    let (file, event_count, memory) = (Arc::new(Sink), EventCount::new(), Memory::new(1 << 20));
    let mut write_batches: Vec<WriteBatch> = Vec::with_capacity(WORKERS.into());
    for _ in 0..WORKERS {
        let mut write_batch = WriteBatch::new(memory.take_beyond(4096));
        write_batch.head(4096).fill(1);
        write_batches.push(write_batch);
    }
    // Count from the first parcel on.
    let before = Counting::made();
    for count in ROUNDS.into_iter().cycle().take(100) {
        for at in 0..count as u64 {
            let write_batch = write_batches.pop().unwrap();
            tasks.begin(&file, at * 4096, write_batch, Durability::Itself);
        }
        for _ in 0..count {
            while !tasks.wait(&event_count, &|| false) {}
            let (write_batch, result) = tasks.end().unwrap();
            assert!(result.is_ok());
            write_batches.push(write_batch.unwrap());
        }
    }
    assert_eq!(Counting::made() - before, 0, "allocations");
}
