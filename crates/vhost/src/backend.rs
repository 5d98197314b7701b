//! What a hypervisor asks for: memory, features, rings. Each message of vhost-user is a method.
//!
//! ```text
//! ring: UNUSED ── number, addresses, base, kick, enable ──▸ RUNNING (a thread)
//!       UNUSED ◂─ get base, disable, new memory or features, end of the connection ──┘
//! disk: PRESENT ── suspend: all rings are UNUSED ──▸ ABSENT ── resume ──▸ PRESENT
//! ```
//!
//! A ring runs while it has all that it needs, which includes the disk. Whatever changes what a
//! running ring uses ends its thread, which completes the requests that it took, and starts another
//! one.
#![allow(clippy::disallowed_types)] // Control plane: the lock is held for one message.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::channel::ChannelGroup;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::backend_channel::BackendChannel;
use crate::config_space::{self, feature};
use crate::device::{DeviceCounts, DeviceShape, QUEUE_ENTRIES_MAX, QUEUES_MAX};
use crate::inflight::InflightMap;
use crate::memory::{GuestMap, MappedRegion, REGIONS_MAX, RegionPlace};
use crate::queue::{QueueSetup, RunningQueue};
use crate::virtqueue::RingPlace;

/// How often `suspend` checks whether the threads that are to end have ended.
pub(crate) const END_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A ring, and the thread that serves it.
#[derive(Default)]
struct RingState {
    place: RingPlace,
    has_addresses: bool,
    /// Whether the ring was served at this place, or found malformed: each place is one fault.
    is_place_tried: bool,
    kick: Option<File>,
    call: Option<File>,
    error: Option<File>,
    is_enabled: bool,
    /// The ring is malformed, or its thread panicked: it is not served until the guest sets it up
    /// again.
    is_malformed: bool,
    running: Option<RunningQueue>,
}

/// The state of one connection.
pub(crate) struct Backend {
    /// `None` while the disk is being replaced.
    disk: Option<Arc<dyn Disk>>,
    shape: Arc<DeviceShape>,
    /// The features that the guest's driver accepted.
    features: u64,
    mapped: Vec<MappedRegion>,
    map: Option<Arc<GuestMap>>,
    /// The record of requests in flight, if the hypervisor keeps one.
    inflight: Option<InflightMap>,
    /// Tells the hypervisor of a change, if it wants to know.
    channel: Option<BackendChannel>,
    poll_percent: u32,
    /// Whether the hypervisor may have missed a change of the capacity. It drops the message while
    /// its device is not started, so the message waits for a ring that is served.
    owes_change: bool,
    /// Whether the connection has ended.
    is_closed: bool,
    rings: Vec<RingState>,
    counts: DeviceCounts,
    /// The channels of all rings.
    channels: Arc<ChannelGroup>,
}

impl Backend {
    /// The state of a new connection. The threads of its rings may spin for `poll_percent` percent
    /// of the time, besides the spins that save time.
    pub(crate) fn new(disk: Arc<dyn Disk>, poll_percent: u32, counts: DeviceCounts) -> Backend {
        let shape = Arc::new(DeviceShape::of(disk.as_ref()));
        let rings = (0..QUEUES_MAX).map(|_| RingState::default()).collect();
        Backend {
            disk: Some(disk),
            shape,
            features: 0,
            mapped: Vec::new(),
            map: None,
            inflight: None,
            channel: None,
            poll_percent,
            // An earlier connection may have missed a change.
            owes_change: true,
            is_closed: false,
            rings,
            counts,
            channels: Arc::default(),
        }
    }

    /// The channels of all rings of the connection.
    pub(crate) fn channels(&self) -> Arc<ChannelGroup> {
        Arc::clone(&self.channels)
    }

    /// Takes over the channel to the hypervisor.
    pub(crate) fn set_channel(&mut self, channel: BackendChannel) {
        self.channel = Some(channel);
        self.tell_change();
    }

    /// Tells the hypervisor that the capacity may have changed, if it is owed and would be heard.
    fn tell_change(&mut self) {
        let Some(channel) = self.channel.as_ref().filter(|_| self.owes_change) else { return };
        if self.running() == 0 {
            return;
        }
        self.owes_change = false;
        if let Err(error) = channel.config_changed() {
            tracing::warn!(%error, "a hypervisor does not learn the capacity of its disk");
        }
    }

    /// Ends all threads, at the end of the connection. None is started again.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.stop();
    }

    /// Asks the rings to stop, before [`Backend::suspend`].
    pub(crate) fn begin_suspend(&self) {
        self.rings.iter().flat_map(|ring| &ring.running).for_each(RunningQueue::begin_stop);
    }

    /// Releases the disk, when the requests that were taken are answered; later ones wait in their
    /// rings. `false` if that takes until the deadline: then the rings go on.
    pub(crate) fn suspend(&mut self, deadline: Instant) -> bool {
        self.begin_suspend();
        let has_ended =
            |ring: &RingState| ring.running.as_ref().is_none_or(RunningQueue::has_ended);
        while !self.rings.iter().all(has_ended) {
            if Instant::now() >= deadline {
                self.cancel_stop();
                return false;
            }
            thread::sleep(END_POLL_INTERVAL);
        }
        self.stop();
        self.disk = None;
        true
    }

    /// Serves the rings with another disk, and tells the hypervisor if its capacity is larger.
    /// `false` if a driver that knows the disk before it could not go on, or a ring cannot be
    /// served.
    pub(crate) fn resume(&mut self, disk: Arc<dyn Disk>) -> bool {
        let shape = DeviceShape::of(disk.as_ref());
        if !shape.succeeds(&self.shape) {
            return false;
        }
        self.owes_change |= shape != *self.shape;
        self.shape = Arc::new(shape);
        self.disk = Some(disk);
        let is_served = (0..self.rings.len()).all(|index| self.start_again(index));
        self.tell_change();
        is_served
    }

    /// The number of rings that are being served.
    pub(crate) fn running(&self) -> usize {
        self.rings.iter().filter(|ring| ring.running.is_some()).count()
    }

    /// The length of the guest's memory, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.mapped.iter().map(|region| region.place.len).sum()
    }

    /// Ends all threads.
    pub(crate) fn stop(&mut self) {
        self.rings.iter().flat_map(|ring| &ring.running).for_each(RunningQueue::begin_stop);
        (0..self.rings.len()).for_each(|index| self.stop_ring(index));
    }

    /// Lets all threads that were asked to end go on, and starts those again that have ended.
    pub(crate) fn cancel_stop(&mut self) {
        for index in 0..self.rings.len() {
            let running = self.rings[index].running.as_ref();
            if running.is_some_and(|running| !running.cancel_stop()) {
                // It ends without waiting for the disk.
                self.stop_ring(index);
                self.start_again(index);
            }
        }
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingState> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Ends the thread of a ring; a later start continues after the last chain that it took.
    fn stop_ring(&mut self, index: usize) {
        let ring = &mut self.rings[index];
        let Some(running) = ring.running.take() else { return };
        match running.stop() {
            Some(end) => {
                ring.place.next_available = end.next_available;
                ring.is_malformed = end.is_malformed;
            }
            None => {
                // What it took is not known: another thread might take a chain a second time.
                ring.is_malformed = true;
                tracing::error!(
                    device = self.disk.as_ref().map(|disk| disk.name()),
                    ring = index,
                    "the thread of a ring panicked; the guest has to set the ring up again"
                );
            }
        }
    }

    /// Starts the thread of a ring, if it has all that it needs.
    fn start_ring(&mut self, index: usize) -> Result<()> {
        if self.is_closed {
            return Ok(());
        }
        let Backend { disk, shape, map, inflight, rings, counts, features, .. } = self;
        let ring = &mut rings[index];
        let (Some(disk), Some(map), Some(kick)) = (disk, map, &ring.kick) else { return Ok(()) };
        // Without protocol features there is no message that enables a ring.
        let is_enabled = ring.is_enabled || *features & feature::PROTOCOL_FEATURES == 0;
        if !is_enabled || !ring.has_addresses || ring.is_malformed || ring.running.is_some() {
            return Ok(());
        }
        let copy = |file: &File| file.try_clone().map_err(Error::ReqHandlerError);
        let setup = QueueSetup {
            name: format!("{}-{index}", disk.name()),
            disk: Arc::clone(disk),
            shape: Arc::clone(shape),
            map: Arc::clone(map),
            place: ring.place,
            record: inflight.as_ref().and_then(|map| map.ring(index, ring.place.entries)),
            event_idx: *features & feature::EVENT_IDX != 0,
            // VIRTIO 1.3, 5.2.6.2: without FLUSH the driver cannot make writes durable.
            write_through: *features & feature::FLUSH == 0,
            kick: copy(kick)?,
            call: ring.call.as_ref().map(copy).transpose()?,
            error: ring.error.as_ref().map(copy).transpose()?,
            counts: counts.ring(index),
            log_limits: counts.log_limits(),
            channels: Arc::clone(&self.channels),
            poll_percent: self.poll_percent,
        };
        match RunningQueue::start(setup) {
            Ok(running) => {
                (ring.running, ring.is_place_tried) = (Some(running), true);
                self.tell_change();
                Ok(())
            }
            Err(error) => {
                let is_malformed = error.kind() == ErrorKind::InvalidData;
                if is_malformed && !std::mem::replace(&mut ring.is_place_tried, true) {
                    // No thread counts for the ring now.
                    counts.ring(index).faults.add(1);
                }
                let text = format!("cannot serve ring {index}: {error}");
                Err(Error::ReqHandlerError(io::Error::new(error.kind(), text)))
            }
        }
    }

    /// As [`Backend::start_ring`], for a ring that no message asks for: an error is logged. A later
    /// message may bring what the ring lacks, as the memory in which it lies. Returns whether there
    /// was none.
    fn start_again(&mut self, index: usize) -> bool {
        let Err(error) = self.start_ring(index) else { return true };
        let name = self.disk.as_ref().map_or("", |disk| disk.name());
        self.counts.log_error(name, "a ring waits", &error);
        false
    }

    /// Changes a ring, which is not served meanwhile.
    fn change_ring(&mut self, index: u32, change: impl FnOnce(&mut RingState)) -> Result<()> {
        self.ring(index)?;
        let index = index as usize;
        self.stop_ring(index);
        let ring = &mut self.rings[index];
        let before = ring.place;
        change(ring);
        ring.is_place_tried &= ring.place == before;
        self.start_ring(index)
    }

    /// Changes what all rings use; none is served meanwhile.
    fn change_all(&mut self, change: impl FnOnce(&mut Backend)) {
        self.stop();
        change(self);
        for index in 0..self.rings.len() {
            self.start_again(index);
        }
    }

    /// Replaces the guest's memory.
    fn set_memory(&mut self, mapped: Vec<MappedRegion>) -> Result<()> {
        let map = match mapped.is_empty() {
            true => None,
            false => Some(Arc::new(GuestMap::new(&mapped).map_err(Error::ReqHandlerError)?)),
        };
        self.change_all(|backend| (backend.map, backend.mapped) = (map, mapped));
        Ok(())
    }
}

fn place_of(guest: u64, user: u64, len: u64, file_offset: u64) -> RegionPlace {
    RegionPlace { guest, user, len, file_offset }
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop();
        self.rings.iter_mut().for_each(|ring| *ring = RingState::default());
        (self.features, self.inflight) = (0, None);
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config_space::features(&self.shape))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !config_space::features(&self.shape) != 0 {
            return Err(Error::InvalidParam);
        }
        if features == self.features {
            return Ok(());
        }
        self.change_all(|backend| backend.features = features);
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let map = |(it, file): (&VhostUserMemoryRegion, File)| {
            let (guest, user, len) = (it.guest_phys_addr, it.user_addr, it.memory_size);
            MappedRegion::map(place_of(guest, user, len, it.mmap_offset), file)
        };
        let mapped = regions.iter().zip(files).map(map).collect::<std::io::Result<_>>();
        self.set_memory(mapped.map_err(Error::ReqHandlerError)?)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if num == 0 || num > u32::from(QUEUE_ENTRIES_MAX) || !num.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        // At most QUEUE_ENTRIES_MAX.
        self.change_ring(index, |ring| ring.place.entries = num as u16)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.change_ring(index, |ring| {
            ring.place = RingPlace { descriptors, used, available, ..ring.place };
            (ring.has_addresses, ring.is_malformed) = (true, false);
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        // A split ring has an index of 16 bits.
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.change_ring(index, |ring| ring.place.next_available = base)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        // An error ends the connection: the message has no other answer than an index.
        self.ring(index).map_err(|_| Error::BackendInternalError)?;
        self.stop_ring(index as usize);
        let ring = self.ring(index)?;
        // The message stops the ring: "Vhost-user Protocol", "Starting and stopping rings".
        (ring.kick, ring.is_malformed) = (None, false);
        Ok(VhostUserVringState::new(index, ring.place.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        if file.is_none() {
            tracing::warn!("a hypervisor asks for a ring without kicks, which is not supported");
            return Err(Error::InvalidOperation("rings without kicks are not supported"));
        }
        self.change_ring(index.into(), |ring| ring.kick = file)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.change_ring(index.into(), |ring| ring.call = file)
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.change_ring(index.into(), |ring| ring.error = file)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(QUEUES_MAX as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.change_ring(index, |ring| ring.is_enabled = enable)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let all = config_space::print(&self.shape, QUEUES_MAX as u16);
        let end = offset.checked_add(size).ok_or(Error::InvalidParam)? as usize;
        all.get(offset as usize..end).map(<[u8]>::to_vec).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("no field of the configuration space can be written"))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("the device is no GPU"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("the device has no shared objects"))
    }

    fn get_inflight_fd(&mut self, it: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let made = InflightMap::create(it.num_queues, it.queue_size);
        // An error ends the connection: the message has no other answer than a file.
        let (file, bytes) = made.map_err(|_| Error::BackendInternalError)?;
        Ok((VhostUserInflight::new(bytes, 0, it.num_queues, it.queue_size), file))
    }

    fn set_inflight_fd(&mut self, it: &VhostUserInflight, file: File) -> Result<()> {
        let (offset, bytes) = (it.mmap_offset, it.mmap_size);
        let map = InflightMap::map(file, offset, bytes, it.num_queues, it.queue_size);
        let map = map.map_err(Error::ReqHandlerError)?;
        self.change_all(|backend| backend.inflight = Some(map));
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        it: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let (guest, user, len) = (it.guest_phys_addr, it.user_addr, it.memory_size);
        let place = place_of(guest, user, len, it.mmap_offset);
        let mut mapped = self.mapped.clone();
        mapped.push(MappedRegion::map(place, file).map_err(Error::ReqHandlerError)?);
        self.set_memory(mapped)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, it: &VhostUserSingleMemoryRegion) -> Result<()> {
        let mut mapped = self.mapped.clone();
        let (guest, user, len) = (it.guest_phys_addr, it.user_addr, it.memory_size);
        let is_it = |region: &MappedRegion| {
            let place = &region.place;
            (place.guest, place.user, place.len) == (guest, user, len)
        };
        let Some(at) = mapped.iter().position(is_it) else { return Err(Error::InvalidParam) };
        mapped.remove(at);
        self.set_memory(mapped)
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("the device has no state to transfer"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("the device has no state to transfer"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("the device has no shared memory"))
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(Error::InvalidOperation("migration is not supported"))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::Composed;
    use blockyard_core::channel::ChannelConfig;
    use blockyard_null::{Null, NullConfig};

    use super::*;

    #[test]
    fn the_ring_of_a_thread_that_panicked_waits_for_a_new_set_up() {
        let null = Null::open(NullConfig::default()).expect("the configuration is valid");
        let config = ChannelConfig { depth: 64 };
        let disk = Arc::new(Composed::new("d".to_owned(), "null", null, config));
        let mut backend = Backend::new(disk, 0, DeviceCounts::new());
        backend.rings[0].running = Some(RunningQueue::panicked());
        backend.stop_ring(0);
        assert!(backend.rings[0].is_malformed && backend.rings[0].running.is_none());
        backend.set_vring_addr(0, VhostUserVringAddrFlags::empty(), 0, 0, 0, 0).unwrap();
        assert!(!backend.rings[0].is_malformed);
    }
}
