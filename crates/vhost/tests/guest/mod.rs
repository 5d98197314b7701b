//! A hypervisor and its guest, for tests: memory in two files, and rings whose descriptors the test
//! writes as it likes. Messages are those of crate vhost.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::disallowed_types)] // Names of sockets are numbered.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::rmw::SharedDisk;
use blockyard_core::{Composed, Disk};
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_os::socket::{self, Interest, Ready};
use blockyard_vhost::VhostServer;
use blockyard_vhost::config_space::{CONFIG_BYTES, feature};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap,
    MmapRegion,
};
use vmm_event::eventfd::{EFD_NONBLOCK, EventFd};

/// The length of each of the two regions of memory, which are neighbours.
pub(crate) const REGION_BYTES: u64 = 4 << 20;
/// The entries of a ring.
pub(crate) const ENTRIES: u16 = 128;
/// Where the rings lie; each has 64 KiB.
const RING_BYTES: u64 = 64 << 10;
/// Where the rings end, and the data begin.
pub(crate) const DATA: u64 = 1 << 20;
/// How long a test waits for an answer before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// One buffer of a request: an address in the guest, a length, and whether the device writes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) at: u64,
    pub(crate) len: u32,
    pub(crate) is_written: bool,
}

pub(crate) fn out(at: u64, len: u32) -> Buffer {
    Buffer { at, len, is_written: false }
}

pub(crate) fn into(at: u64, len: u32) -> Buffer {
    Buffer { at, len, is_written: true }
}

/// A server of a disk, and the path of its socket.
pub(crate) struct Served {
    pub(crate) server: VhostServer,
    pub(crate) path: PathBuf,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.stop(PATIENCE);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves a disk at a fresh path.
pub(crate) fn serve(disk: impl Into<SharedDisk>) -> Served {
    serve_polling(disk, 0)
}

/// Serves a disk at a fresh path; threads may poll for this percentage of the time.
pub(crate) fn serve_polling(disk: impl Into<SharedDisk>, poll_percent: u32) -> Served {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("blockyard-vhost-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    Served { server: VhostServer::start(disk.into(), listener, poll_percent, false).unwrap(), path }
}

/// A disk of this configuration.
pub(crate) fn disk(name: &str, config: NullConfig) -> Arc<dyn Disk> {
    let null = Null::open(config).expect("the configuration fits");
    Arc::new(Composed::new(name.to_owned(), "null", null, ChannelConfig { depth: 64 }))
}

/// A plain disk of 16 MiB that keeps its data.
pub(crate) fn plain() -> NullConfig {
    NullConfig { size: 16 << 20, memory_backed: true, discard: true, ..NullConfig::default() }
}

/// A plain disk whose requests take `completion_nsec` nanoseconds each.
pub(crate) fn slow(completion_nsec: u64) -> NullConfig {
    NullConfig { irqmode: IrqMode::Timer, completion_nsec, ..plain() }
}

/// A zoned disk: 8 zones of 1 MiB, 768 KiB of which can be written, blocks of 4 KiB; two zones are
/// conventional.
pub(crate) fn zoned() -> NullConfig {
    NullConfig {
        size: 8 << 20,
        bs: 4096,
        zoned: true,
        zone_size: 1 << 20,
        zone_capacity: 768 << 10,
        zone_nr_conv: 2,
        zone_max_open: 3,
        zone_max_active: 5,
        memory_backed: true,
        ..NullConfig::default()
    }
}

/// A hypervisor with its guest.
pub(crate) struct Guest {
    pub(crate) frontend: Frontend,
    pub(crate) memory: GuestMemoryMmap,
    pub(crate) features: u64,
    pub(crate) rings: Vec<GuestRing>,
}

/// A ring of the guest.
pub(crate) struct GuestRing {
    pub(crate) index: usize,
    base: u64,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    /// Told when the ring is malformed.
    pub(crate) error: EventFd,
    next_descriptor: u16,
    next_available: u16,
    next_used: u16,
    event_idx: bool,
}

/// A file in memory, as a hypervisor has for its guest.
pub(crate) fn memfd(len: u64) -> File {
    let fd: OwnedFd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(len).unwrap();
    file
}

impl Guest {
    /// Connects, negotiates `without` no feature of these, and starts `rings` rings.
    pub(crate) fn connect(served: &Served, rings: usize, without: u64) -> Guest {
        let region = |at: u64| {
            let file = FileOffset::new(memfd(REGION_BYTES), 0);
            let mapping = MmapRegion::from_file(file, REGION_BYTES as usize).unwrap();
            GuestRegionMmap::new(mapping, GuestAddress(at)).unwrap()
        };
        let memory = GuestMemoryMmap::from_regions(vec![region(0), region(REGION_BYTES)]).unwrap();
        let stream = UnixStream::connect(&served.path).unwrap();
        let mut frontend = Frontend::from_stream(stream, 64);
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let features = offered & !without;
        frontend.set_features(features).unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        assert!(protocol.contains(wanted), "{protocol:?}");
        frontend.set_protocol_features(wanted).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert_eq!(frontend.get_queue_num().unwrap(), 64);
        frontend.set_mem_table(&regions(&memory)).unwrap();
        let mut guest = Guest { frontend, memory, features, rings: Vec::new() };
        (0..rings).for_each(|_| guest.add_ring());
        guest
    }

    /// The configuration space.
    pub(crate) fn config(&mut self) -> Vec<u8> {
        let wanted = [0; CONFIG_BYTES];
        let flags = VhostUserConfigFlags::empty();
        self.frontend.get_config(0, CONFIG_BYTES as u32, flags, &wanted).unwrap().1
    }

    /// Sets up one more ring, which the server then serves.
    pub(crate) fn add_ring(&mut self) {
        self.prepare_ring();
        self.start_ring(self.rings.len() - 1);
    }

    /// Adds a ring, which the server does not know yet.
    pub(crate) fn prepare_ring(&mut self) {
        let index = self.rings.len();
        let base = index as u64 * RING_BYTES;
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let event_idx = self.features & feature::EVENT_IDX != 0;
        let (next_descriptor, next_available, next_used) = (0, 0, 0);
        let (kick, call, error) = (event(), event(), event());
        let ring = GuestRing {
            index,
            base,
            kick,
            call,
            error,
            next_descriptor,
            next_available,
            next_used,
            event_idx,
        };
        self.rings.push(ring);
    }

    /// Lets the server serve a ring.
    pub(crate) fn start_ring(&mut self, index: usize) {
        self.set_up_ring(index);
        self.frontend.set_vring_enable(index, true).unwrap();
    }

    /// Tells the server all about a ring, but not to serve it.
    pub(crate) fn set_up_ring(&mut self, index: usize) {
        let ring = &self.rings[index];
        self.frontend.set_vring_num(index, ENTRIES).unwrap();
        self.frontend.set_vring_base(index, 0).unwrap();
        self.frontend.set_vring_addr(index, &self.place(ring)).unwrap();
        self.frontend.set_vring_call(index, &ring.call).unwrap();
        self.frontend.set_vring_err(index, &ring.error).unwrap();
        self.frontend.set_vring_kick(index, &ring.kick).unwrap();
    }

    /// Where a ring lies, in this process.
    pub(crate) fn place(&self, ring: &GuestRing) -> VringConfigData {
        let at = |offset: u64| {
            let address = GuestAddress(ring.base + offset);
            self.memory.get_host_address(address).unwrap() as u64
        };
        VringConfigData {
            queue_max_size: ENTRIES,
            queue_size: ENTRIES,
            flags: 0,
            desc_table_addr: at(0),
            used_ring_addr: at(GuestRing::USED),
            avail_ring_addr: at(GuestRing::AVAILABLE),
            log_addr: None,
        }
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(crate) fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// Makes a chain of buffers available, and returns its head.
    pub(crate) fn offer(&mut self, ring: usize, buffers: &[Buffer]) -> u16 {
        let head = self.rings[ring].chain(&self.memory, buffers);
        self.rings[ring].make_available(&self.memory, head);
        head
    }

    /// Makes a chain of one descriptor available, which refers to a table of the buffers.
    pub(crate) fn offer_indirect(&mut self, ring: usize, table: u64, buffers: &[Buffer]) -> u16 {
        for (index, buffer) in buffers.iter().enumerate() {
            let next = (index + 1 < buffers.len()).then_some(index as u16 + 1);
            descriptor(&self.memory, table + 16 * index as u64, buffer, next, 0);
        }
        let all = out(table, 16 * buffers.len() as u32);
        let head = self.rings[ring].take_descriptors(1);
        let at = self.rings[ring].base + 16 * u64::from(head);
        descriptor(&self.memory, at, &all, None, INDIRECT);
        self.rings[ring].make_available(&self.memory, head);
        head
    }

    pub(crate) fn kick(&self, ring: usize) {
        self.rings[ring].kick.write(1).unwrap();
    }

    /// Waits until the server tells that a ring is malformed.
    pub(crate) fn wait_for_fault(&self, ring: usize, case: &str) {
        let error = &self.rings[ring].error;
        assert!(is_told(error, PATIENCE), "{case}: the ring is malformed");
    }

    /// Waits for the next answer of a ring: the head, and the number of bytes that were written.
    pub(crate) fn answer(&mut self, ring: usize) -> (u16, u32) {
        self.try_answer(ring, PATIENCE).expect("the request is answered")
    }

    /// Waits for the next answer for so long.
    pub(crate) fn try_answer(&mut self, ring: usize, patience: Duration) -> Option<(u16, u32)> {
        let Guest { rings, memory, .. } = self;
        let ring = &mut rings[ring];
        let deadline = std::time::Instant::now() + patience;
        loop {
            if let Some(answer) = ring.take_answer(memory) {
                return Some(answer);
            }
            // VIRTIO 1.3, 2.7.10: the event is requested, then the ring is read again.
            ring.request_call(memory);
            if let Some(answer) = ring.take_answer(memory) {
                return Some(answer);
            }
            let left = socket::left(deadline);
            let call = &ring.call;
            let fd = rustix_fd(call);
            match socket::wait(fd, Interest::Readable, None, Some(left)).unwrap() {
                Ready::Yes => _ = call.read(),
                _ => return None,
            }
        }
    }

    /// Executes one request: header, data to the device, data from the device. Returns the status,
    /// the tail before it, and the data.
    pub(crate) fn request(
        &mut self,
        kind: u32,
        sector: u64,
        data: &[u8],
        read_bytes: usize,
    ) -> (u8, Vec<u8>) {
        let (header, from) = (DATA, DATA + 4096);
        let to = from + (data.len() as u64).next_multiple_of(4096);
        let status = to + (read_bytes as u64).next_multiple_of(4096);
        self.put(header, &print_header(kind, sector));
        self.put(from, data);
        self.put(status, &[0xff]);
        let mut buffers = vec![out(header, 16)];
        if !data.is_empty() {
            buffers.push(out(from, data.len() as u32));
        }
        if read_bytes > 0 {
            buffers.push(into(to, read_bytes as u32));
        }
        buffers.push(into(status, 1));
        let head = self.offer(0, &buffers);
        self.kick(0);
        let (answered, written) = self.answer(0);
        assert_eq!(answered, head);
        let status = self.get(status, 1)[0];
        if status == 0 {
            assert!(written as usize <= read_bytes + 1 && written > 0, "{written}");
        } else {
            assert_eq!(written, 1);
        }
        (status, self.get(to, read_bytes))
    }
}

/// Waits for an event, and takes it; `false` if it does not come in time.
pub(crate) fn is_told(event: &EventFd, patience: Duration) -> bool {
    let woken = socket::wait(rustix_fd(event), Interest::Readable, None, Some(patience));
    matches!(woken.unwrap(), Ready::Yes) && event.read().is_ok()
}

fn rustix_fd(event: &EventFd) -> std::os::fd::BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as the event, which is borrowed.
    #[expect(unsafe_code, reason = "crate vmm-sys-util offers the raw descriptor alone")]
    unsafe {
        std::os::fd::BorrowedFd::borrow_raw(event.as_raw_fd())
    }
}

/// The regions of a memory, as messages describe them.
pub(crate) fn regions(memory: &GuestMemoryMmap) -> Vec<VhostUserMemoryRegionInfo> {
    memory
        .iter()
        .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
        .collect()
}

/// The header of a request.
pub(crate) fn print_header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// A segment of a discard or write-zeroes.
pub(crate) fn print_range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// Writes a descriptor.
pub(crate) fn descriptor(
    memory: &GuestMemoryMmap,
    at: u64,
    buffer: &Buffer,
    next: Option<u16>,
    more: u16,
) {
    let flags =
        more | if next.is_some() { NEXT } else { 0 } | if buffer.is_written { WRITE } else { 0 };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&buffer.at.to_le_bytes());
    bytes[8..12].copy_from_slice(&buffer.len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.unwrap_or(0).to_le_bytes());
    memory.write_slice(&bytes, GuestAddress(at)).unwrap();
}

impl GuestRing {
    const AVAILABLE: u64 = 16 << 10;
    const USED: u64 = 32 << 10;

    fn take_descriptors(&mut self, count: u16) -> u16 {
        // Tests have few chains in flight: descriptors are used in turns.
        if self.next_descriptor + count > ENTRIES {
            self.next_descriptor = 0;
        }
        self.next_descriptor += count;
        self.next_descriptor - count
    }

    /// Writes the descriptors of a chain, and returns its head.
    pub(crate) fn chain(&mut self, memory: &GuestMemoryMmap, buffers: &[Buffer]) -> u16 {
        let head = self.take_descriptors(buffers.len() as u16);
        for (index, buffer) in buffers.iter().enumerate() {
            let number = head + index as u16;
            let next = (index + 1 < buffers.len()).then_some(number + 1);
            descriptor(memory, self.base + 16 * u64::from(number), buffer, next, 0);
        }
        head
    }

    /// Writes a descriptor of the table.
    pub(crate) fn put_descriptor(
        &self,
        memory: &GuestMemoryMmap,
        number: u16,
        buffer: &Buffer,
        next: Option<u16>,
        more: u16,
    ) {
        descriptor(memory, self.base + 16 * u64::from(number), buffer, next, more);
    }

    /// Makes a chain available.
    pub(crate) fn make_available(&mut self, memory: &GuestMemoryMmap, head: u16) {
        self.make_all_available(memory, &[head]);
    }

    /// Makes chains available at once.
    pub(crate) fn make_all_available(&mut self, memory: &GuestMemoryMmap, heads: &[u16]) {
        let available = self.base + Self::AVAILABLE;
        for head in heads {
            let slot = available + 4 + 2 * u64::from(self.next_available % ENTRIES);
            memory.write_obj(*head, GuestAddress(slot)).unwrap();
            self.next_available = self.next_available.wrapping_add(1);
        }
        self.set_available(memory, self.next_available);
    }

    /// Sets the index of available chains.
    pub(crate) fn set_available(&self, memory: &GuestMemoryMmap, index: u16) {
        let at = GuestAddress(self.base + Self::AVAILABLE + 2);
        memory.store(index, at, Ordering::Release).unwrap();
    }

    /// Waits until the server has taken all chains that are available, and sleeps.
    pub(crate) fn wait_until_taken(&self, memory: &GuestMemoryMmap) {
        assert!(self.event_idx, "the server tells it by the event index");
        let at = GuestAddress(self.base + Self::USED + 4 + 8 * u64::from(ENTRIES));
        let deadline = std::time::Instant::now() + PATIENCE;
        while memory.load::<u16>(at, Ordering::Acquire).unwrap() != self.next_available {
            assert!(std::time::Instant::now() < deadline, "the chains are taken");
            std::thread::yield_now();
        }
    }

    /// Takes an answer, if there is one.
    fn take_answer(&mut self, memory: &GuestMemoryMmap) -> Option<(u16, u32)> {
        let used = self.base + Self::USED;
        let index: u16 = memory.load(GuestAddress(used + 2), Ordering::Acquire).unwrap();
        if index == self.next_used {
            return None;
        }
        let at = used + 4 + 8 * u64::from(self.next_used % ENTRIES);
        let head: u32 = memory.read_obj(GuestAddress(at)).unwrap();
        let written: u32 = memory.read_obj(GuestAddress(at + 4)).unwrap();
        self.next_used = self.next_used.wrapping_add(1);
        Some((head as u16, written))
    }

    /// Requests a call for the next answer.
    fn request_call(&self, memory: &GuestMemoryMmap) {
        if self.event_idx {
            let at = self.base + Self::AVAILABLE + 4 + 2 * u64::from(ENTRIES);
            memory.write_obj(self.next_used, GuestAddress(at)).unwrap();
        }
        fence(Ordering::SeqCst);
    }
}
