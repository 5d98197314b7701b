//! A slow disk below a pool: a directory whose files delay every write, any number of them at once,
//! as nbdkit's delay filter does. Reads and syncs are not delayed.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_store::log_writer::Ended;
use blockyard_store::{
    BlockingReads, Durability, EventFd, Layout, LogWriter, SegmentFiles, SegmentStore, StoreError,
    StoreFile, StoreLocation, WriteBatch,
};
use blockyard_sync::event_count::{EventCount, Waker};

/// A directory with slow files.
#[derive(Debug)]
pub struct Slow<D> {
    inner: D,
    delay: Duration,
}

impl<D: SegmentStore> Slow<D> {
    /// Delays each write to a file of the directory by `delay`. Creating a file is not delayed.
    pub fn new(inner: D, delay: Duration) -> Slow<D> {
        Slow { inner, delay }
    }

    fn slow(&self, inner: D::File) -> SlowFile<D::File> {
        SlowFile { inner: Arc::new(inner), delay: self.delay }
    }
}

impl<D: SegmentStore> SegmentFiles for Slow<D> {
    type File = SlowFile<D::File>;

    fn open(&self, name: &str) -> io::Result<Option<Self::File>> {
        Ok(self.inner.open(name)?.map(|file| self.slow(file)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Self::File> {
        Ok(self.slow(self.inner.create(name, len)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.inner.names()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.inner.sync_names()
    }

    fn discards(&self) -> bool {
        self.inner.discards()
    }

    fn discard(&self, file: &Self::File) {
        self.inner.discard(&file.inner);
    }
}

impl<D: SegmentStore> StoreLocation for Slow<D> {
    fn title(&self) -> String {
        self.inner.title()
    }

    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        self.inner.set_layout(wanted, is_new)
    }

    fn segments_max(&self) -> usize {
        self.inner.segments_max()
    }

    fn check_location(&self) -> io::Result<()> {
        self.inner.check_location()
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        self.inner.fresh_id()
    }
}

impl<D: SegmentStore> SegmentStore for Slow<D> {
    type LogWriter = SlowLogWriter<D>;
    type Reads = BlockingReads;

    fn reports_sync_error_to_all(&self) -> bool {
        self.inner.reports_sync_error_to_all()
    }

    fn io_align(&self) -> u32 {
        self.inner.io_align()
    }

    fn log_writer(&self, scratch: Option<&Arc<Self::File>>) -> SlowLogWriter<D> {
        let inner = self.inner.log_writer(scratch.map(|file| &file.inner));
        let (delay, held, alarm) = (self.delay, VecDeque::new(), Alarm::start());
        SlowLogWriter { inner, delay, held, begun: 0, alarm }
    }

    fn reads(&self, _: Option<&EventFd>) -> BlockingReads {
        BlockingReads::default()
    }
}

/// A slow file.
#[derive(Debug)]
pub struct SlowFile<F> {
    inner: Arc<F>,
    delay: Duration,
}

impl<F: StoreFile> StoreFile for SlowFile<F> {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, into)
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        thread::sleep(self.delay);
        self.inner.write_at(offset, parts)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}

/// A write batch that is not yet written.
struct DelayedBatch<F> {
    due: Instant,
    file: Arc<F>,
    offset: u64,
    write_batch: WriteBatch,
    durability: Durability,
}

/// Wakes the writer when the delay of a batch has passed while the writer sleeps for other batches.
#[derive(Debug)]
struct Alarm {
    event_count: Arc<EventCount>,
    /// The times at which to wake, each later than the one before; `None` once dropped.
    times: Option<Sender<Instant>>,
    thread: Option<JoinHandle<()>>,
}

impl Alarm {
    fn start() -> Alarm {
        let event_count = Arc::new(EventCount::new());
        let own = Arc::clone(&event_count);
        let (times, due) = channel::<Instant>();
        let thread = thread::spawn(move || {
            for due in due {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                own.notify();
            }
        });
        Alarm { event_count, times: Some(times), thread: Some(thread) }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.times = None;
        // The thread cannot panic.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A slow log writer: it holds each batch for the delay, and then passes it on to the writer below.
pub struct SlowLogWriter<D: SegmentStore> {
    inner: D::LogWriter,
    delay: Duration,
    held: VecDeque<DelayedBatch<D::File>>,
    /// The number of batches at the writer below.
    begun: usize,
    alarm: Alarm,
}

impl<D: SegmentStore> SlowLogWriter<D> {
    /// Passes on the batches whose delay has passed.
    fn begin_due(&mut self) {
        let now = Instant::now();
        while let Some(DelayedBatch { file, offset, write_batch, durability, .. }) =
            self.held.pop_front_if(|held| held.due <= now)
        {
            self.inner.begin(&file, offset, write_batch, durability);
            self.begun += 1;
        }
    }

    /// Sleeps until the oldest batch below has ended, until the delay of another has passed, or
    /// until `is_there`. Returns whether the oldest has ended.
    fn wait_below(&mut self, is_there: &dyn Fn() -> bool) -> bool {
        let next = self.held.front().map(|held| held.due);
        let is_due = || next.is_some_and(|due| due <= Instant::now());
        self.inner.wait(&self.alarm.event_count, &|| is_there() || is_due())
    }
}

impl<D: SegmentStore> LogWriter<SlowFile<D::File>> for SlowLogWriter<D> {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn waits_for_clients(&self) -> bool {
        self.inner.waits_for_clients()
    }

    fn waker(&self) -> Option<Waker> {
        if let Some(below) = self.inner.waker() {
            self.alarm.event_count.set_waker(below);
        }
        let own = Arc::clone(&self.alarm.event_count);
        Some(Waker::new(move || _ = own.notify()))
    }

    fn begin(
        &mut self,
        file: &Arc<SlowFile<D::File>>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let (due, file) = (Instant::now() + self.delay, Arc::clone(&file.inner));
        self.held.push_back(DelayedBatch { due, file, offset, write_batch, durability });
        // The thread exists as long as the writer does.
        _ = self.alarm.times.as_ref().map(|times| times.send(due));
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        self.begin_due();
        if self.begun > 0 {
            let mut ended = false;
            if event_count.doze(is_there) {
                ended = self.wait_below(is_there);
                event_count.rise();
            }
            return ended;
        }
        let Some(held) = self.held.front() else { return true };
        event_count.sleep(held.due.saturating_duration_since(Instant::now()), is_there);
        false
    }

    fn end(&mut self) -> Option<Ended> {
        if self.begun == 0 {
            let held = self.held.front()?;
            thread::sleep(held.due.saturating_duration_since(Instant::now()));
        }
        self.begin_due();
        // Meanwhile the other batches are passed on.
        while !self.held.is_empty() && !self.wait_below(&|| false) {
            self.begin_due();
        }
        let ended = self.inner.end()?;
        self.begun -= 1;
        Some(ended)
    }
}

impl<D: SegmentStore> fmt::Debug for SlowLogWriter<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlowLogWriter").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use blockyard_store::PoolStore;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn written_data_arrive() {
        let scratch = Scratch::new().unwrap();
        let delay = Duration::from_micros(300);
        let slow = Slow::new(PoolStore::take(scratch.path()).unwrap(), delay);
        let file = slow.create("file", 1 << 20).unwrap();
        let mut block = blockyard_store::buffer::Memory::new(8192).take_beyond(4096);
        block.fill(7);
        file.write_at(4096, &[&block]).unwrap();
        block.fill(0);
        slow.open("file").unwrap().unwrap().read_at(4096, &mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == 7));
        assert!(slow.names().unwrap().contains(&"file".to_owned()));
    }
}
