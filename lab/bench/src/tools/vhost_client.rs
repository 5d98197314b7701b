//! A client of vhost-user-blk servers: the driver of crate virtio-driver, in this process, as a
//! guest would have it. One thread for each ring; it sleeps until the server calls when nothing is
//! left to take.
#![allow(unsafe_code)] // The driver wants the addresses of mapped memory.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_os::socket::{self, Interest};
use fastrand::Rng;
use hdrhistogram::Histogram;
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};
use vm_memory::{FileOffset, MmapRegion};

use crate::error::LabError;
use crate::load::latencies;
use crate::load::workers::Work;

/// The entries of a ring. Each request has three descriptors, so that one ring takes 128 requests.
const RING_ENTRIES: u16 = 512;

/// The longest wait for a call, after which the ring is looked at again.
const CALL_WAIT_MAX: Duration = Duration::from_secs(1);

/// Features of virtio-blk: flush and several rings.
const FLUSH: u64 = 1 << 9;
const MQ: u64 = 1 << 12;

/// What a ring has in flight.
#[derive(Clone, Copy, Debug)]
pub struct VhostRequests {
    /// Writes, or reads.
    pub is_write: bool,
    /// The length of each, in bytes.
    pub len: u64,
    /// How many are in flight.
    pub depth: usize,
}

/// A connection to a server.
pub struct VhostClient {
    transport: Box<VirtioBlkTransport>,
    memory: MmapRegion,
    rings: usize,
    requests: VhostRequests,
}

impl VhostClient {
    /// Connects, with memory for the requests of `rings` rings.
    ///
    /// # Errors
    /// If the server does not answer as a virtio-blk device.
    pub fn connect(
        socket: &Path,
        rings: usize,
        requests: VhostRequests,
    ) -> Result<VhostClient, LabError> {
        let failed = |error: String| LabError::failed("vhost-user-blk", error);
        let wanted = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let wanted = wanted.bits() | FLUSH | MQ;
        let path = socket.to_str().ok_or_else(|| failed("the path is no text".to_owned()))?;
        let transport = VhostUser::new(path, wanted).map_err(|error| failed(error.to_string()))?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let bytes = rings * requests.depth * requests.len as usize;
        let file = memory(bytes as u64).map_err(LabError::io("memory for data"))?;
        let place = FileOffset::new(file, 0);
        let memory =
            MmapRegion::from_file(place, bytes).map_err(|error| failed(error.to_string()))?;
        let (base, fd) = (memory.as_ptr() as usize, memory.file_offset());
        let fd = fd.map_or(-1, |place| place.file().as_raw_fd());
        let mapped = transport.map_mem_region(base, bytes, fd, 0);
        mapped.map_err(|error| failed(error.to_string()))?;
        Ok(VhostClient { transport, memory, rings, requests })
    }

    /// The rings, each for one thread.
    ///
    /// # Errors
    /// If the server does not have that many.
    pub fn rings(&mut self, seed: u64) -> Result<Vec<VhostRing<'_>>, LabError> {
        let failed = |error: String| LabError::failed("vhost-user-blk", error);
        let VhostClient { transport, memory, rings, requests } = self;
        let config = transport.get_config().map_err(|error| failed(error.to_string()))?;
        let blocks = config.capacity.to_native() * 512 / requests.len;
        let notifiers: Vec<_>;
        let queues = VirtioBlkQueue::setup_queues(transport.as_mut(), *rings, RING_ENTRIES)
            .map_err(|error| failed(error.to_string()))?;
        let calls: Vec<_> = (0..*rings).map(|at| transport.get_completion_fd(at)).collect();
        notifiers = (0..*rings).map(|at| transport.get_submission_notifier(at)).collect();
        let bytes = requests.depth * requests.len as usize;
        let parts = queues.into_iter().zip(notifiers).zip(calls).enumerate();
        Ok(parts
            .map(|(number, ((mut queue, notifier), call))| {
                queue.set_used_notif_enabled(true);
                VhostRing {
                    queue,
                    notifier,
                    call,
                    // SAFETY: each ring has its own part of the mapping.
                    data: RingData(unsafe { memory.as_ptr().add(number * bytes) }),
                    requests: *requests,
                    blocks,
                    rng: Rng::with_seed(seed ^ (number as u64) << 32),
                    since: vec![Instant::now(); requests.depth],
                    free: (0..requests.depth).collect(),
                    latency: latencies(),
                }
            })
            .collect())
    }
}

/// A file in memory, as a hypervisor has for its guest.
fn memory(bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create("blockyard-lab", MemfdFlags::CLOEXEC)?);
    file.set_len(bytes)?;
    Ok(file)
}

/// The memory of a ring's requests: a buffer for each.
#[derive(Clone, Copy, Debug)]
struct RingData(*mut u8);

// SAFETY: the memory belongs to one ring, which one thread at a time uses, and the client keeps it.
unsafe impl Send for RingData {}

/// A ring, used by one thread.
pub struct VhostRing<'c> {
    queue: VirtioBlkQueue<'c, usize>,
    notifier: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    data: RingData,
    requests: VhostRequests,
    blocks: u64,
    rng: Rng,
    /// When each request began, by its buffer.
    since: Vec<Instant>,
    /// Buffers that no request uses.
    free: Vec<usize>,
    latency: Histogram<u64>,
}

impl VhostRing<'_> {
    /// Latencies of requests that ended in the window, in nanoseconds.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Makes requests up to the depth, and kicks the server if it wants to know.
    fn fill(&mut self) -> io::Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        let VhostRequests { is_write, len, .. } = self.requests;
        let now = Instant::now();
        while let Some(slot) = self.free.pop() {
            let at = self.rng.u64(..self.blocks) * len;
            self.since[slot] = now;
            // SAFETY: a buffer of the ring's memory, which this request alone uses.
            let made = unsafe {
                let data = self.data.0.add(slot * len as usize);
                match is_write {
                    true => self.queue.write_raw(at, data, len as usize, slot),
                    false => self.queue.read_raw(at, data, len as usize, slot),
                }
            };
            made.map_err(io::Error::other)?;
        }
        if self.queue.avail_notif_needed() {
            self.notifier.notify().map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Sleeps until the server calls. QEMU's makes the descriptor one whose reads do not wait.
    fn wait_for_call(&self) -> io::Result<()> {
        match self.call.read() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let call = self.call.as_ref();
                socket::wait(call, Interest::Readable, None, Some(CALL_WAIT_MAX)).map(drop)
            }
            read => read.map(drop),
        }
    }

    /// Takes the answers that are there; waits for a call if there is none. Returns their number.
    fn take(&mut self) -> io::Result<u64> {
        let mut taken = 0;
        loop {
            let VhostRing { queue, free, since, latency, .. } = self;
            let now = Instant::now();
            for completion in queue.completions() {
                if completion.ret != 0 {
                    let code = completion.ret;
                    return Err(io::Error::other(format!("the server answered with error {code}")));
                }
                let time = now.saturating_duration_since(since[completion.context]);
                latency.saturating_record(time.as_nanos() as u64);
                free.push(completion.context);
                taken += 1;
            }
            if taken > 0 {
                return Ok(taken);
            }
            self.wait_for_call()?;
        }
    }
}

impl Work for VhostRing<'_> {
    fn turn(&mut self) -> Result<u64, LabError> {
        let done = self.fill().and_then(|()| self.take());
        done.map_err(LabError::io("a vhost-user-blk request"))
    }

    fn begin(&mut self) {
        self.latency.reset();
    }

    /// Waits for what is in flight, because the client unmaps the memory.
    fn end(&mut self) {
        while self.free.len() < self.requests.depth {
            if self.take().is_err() {
                return;
            }
        }
    }
}
