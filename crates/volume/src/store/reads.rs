//! Reads under way: many at once, by one thread, without waiting for any of them.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::StoreFile;
use crate::buffer::Buffer;

/// A read that has ended: by what it is told, what was read, and how it ended. The buffer is not
/// there where the system may still be writing to it.
#[derive(Debug)]
pub struct Got {
    /// By what it is told.
    pub token: u32,
    /// What was read, if all of it was.
    pub buffer: Option<Buffer>,
    /// How it ended.
    pub result: io::Result<()>,
}

/// See the module.
pub trait Reads<F>: fmt::Debug + Send + 'static {
    /// Begins to read a whole buffer. Place, length and memory are aligned as the file wants it.
    fn begin(&mut self, token: u32, file: &Arc<F>, offset: u64, buffer: Buffer);

    /// Sees to it that what was begun is on its way.
    fn submit(&mut self) {}

    /// Takes a read that has ended, in any order.
    fn take(&mut self) -> Option<Got>;

    /// Whether one has ended.
    fn is_any(&mut self) -> bool;

    /// How many have begun and were not taken.
    fn under_way(&self) -> usize;

    /// Sleeps until one has ended, but not for longer. May return early.
    fn sleep(&mut self, at_most: Duration) {
        let _ = at_most;
    }
}

/// Reads that are done when they have begun.
#[derive(Debug, Default)]
pub struct BlockingReads(VecDeque<Got>);

impl<F: StoreFile> Reads<F> for BlockingReads {
    fn begin(&mut self, token: u32, file: &Arc<F>, offset: u64, mut buffer: Buffer) {
        let result = file.read_at(offset, &mut buffer);
        self.0.push_back(Got { token, buffer: Some(buffer), result });
    }

    fn take(&mut self) -> Option<Got> {
        self.0.pop_front()
    }

    fn is_any(&mut self) -> bool {
        !self.0.is_empty()
    }

    fn under_way(&self) -> usize {
        self.0.len()
    }
}
