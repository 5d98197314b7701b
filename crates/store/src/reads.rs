//! Asynchronous reads: one thread has many in flight, without waiting for each.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::StoreFile;
use crate::buffer::Buffer;

/// A finished read. The buffer is missing if the system may still be writing to it.
#[derive(Debug)]
pub struct FinishedRead {
    /// The token that the read was started with.
    pub token: u32,
    /// The data, if all were read.
    pub buffer: Option<Buffer>,
    /// The result.
    pub result: io::Result<()>,
}

/// A reader of files with many reads in flight.
pub trait Reads<F>: fmt::Debug + Send + 'static {
    /// Starts to read a whole buffer. Offset and length are as for [`StoreFile::read_at`].
    fn begin(&mut self, token: u32, file: &Arc<F>, offset: u64, buffer: Buffer);

    /// Submits the reads that were started.
    fn submit(&mut self) {}

    /// Takes a finished read, in any order.
    fn take(&mut self) -> Option<FinishedRead>;

    /// Whether a read has finished.
    fn is_any(&mut self) -> bool;

    /// How many reads were started and not taken.
    fn in_flight(&self) -> usize;

    /// Sleeps until a read has finished, or `at_most` has passed. May return early.
    fn sleep(&mut self, at_most: Duration) {
        let _ = at_most;
    }
}

/// Reads that are executed synchronously when they are started.
#[derive(Debug, Default)]
pub struct BlockingReads(VecDeque<FinishedRead>);

impl<F: StoreFile> Reads<F> for BlockingReads {
    fn begin(&mut self, token: u32, file: &Arc<F>, offset: u64, mut buffer: Buffer) {
        let result = file.read_at(offset, &mut buffer);
        self.0.push_back(FinishedRead { token, buffer: Some(buffer), result });
    }

    fn take(&mut self) -> Option<FinishedRead> {
        self.0.pop_front()
    }

    fn is_any(&mut self) -> bool {
        !self.0.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.0.len()
    }
}
