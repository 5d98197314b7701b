//! A test fixture: a disk's channel with a buffer, and a model to compare with.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use blockyard_core::Completion;
use blockyard_core::bio::{Bio, BufRef, Op, RegionId};
use blockyard_core::channel::Channel;
use blockyard_core::device::Due;
use blockyard_core::disk::Disk;
use blockyard_core::region::Region;
use blockyard_core::units::{SECTOR_BYTES, Sector};
use blockyard_core::zone::ZoneInfo;

use crate::model::{ExpectedResult, Model};

/// Length of the fixture's buffer, in bytes.
pub(super) const BUFFER_BYTES: usize = 4 << 20;

/// A loop whose waits find nothing this number of times is stuck.
const IDLE_WAITS_MAX: u32 = 100_000;

/// A channel that is not closed when a test panics.
///
/// Dropping a channel waits for its bios in flight. If a test has failed because a bio never
/// completes, this wait would turn the failure into a hang.
pub struct TestChannel(Option<Box<dyn Channel>>);

impl TestChannel {
    /// Opens a new channel of the disk.
    ///
    /// # Panics
    /// If the disk cannot be opened.
    pub fn open(disk: &dyn Disk) -> TestChannel {
        TestChannel(Some(disk.open().expect("a fresh disk can be opened")))
    }
}

impl Deref for TestChannel {
    type Target = dyn Channel;

    fn deref(&self) -> &Self::Target {
        self.0.as_deref().expect("it is taken out by drop only")
    }
}

impl DerefMut for TestChannel {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.0.as_deref_mut().expect("it is taken out by drop only")
    }
}

impl Drop for TestChannel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

/// A channel of a disk, a registered buffer, and the model.
pub struct Fixture {
    /// The disk under test.
    pub disk: Arc<dyn Disk>,
    /// A channel of the disk.
    pub channel: TestChannel,
    /// Registered memory for data.
    pub region: Arc<Region>,
    /// The identifier of the memory on the channel.
    pub region_id: RegionId,
    /// The expected state of the disk.
    pub model: Model,
}

impl Fixture {
    /// A fixture on a fresh disk.
    ///
    /// # Panics
    /// If the disk cannot be opened.
    pub fn new(disk: Arc<dyn Disk>, keeps_data: bool) -> Fixture {
        let model = Model::new(disk.geometry(), disk.limits(), keeps_data);
        Fixture::with_model(disk, model)
    }

    /// A fixture on a disk in the state of the model.
    ///
    /// # Panics
    /// If the disk cannot be opened.
    pub fn with_model(disk: Arc<dyn Disk>, model: Model) -> Fixture {
        Fixture::with_buffer(disk, model, BUFFER_BYTES)
    }

    /// A fixture with a buffer of another length, for clauses that need many rigs. Making a region
    /// touches its memory, which can take longer than the test itself.
    ///
    /// # Panics
    /// If the disk cannot be opened.
    pub fn with_buffer(disk: Arc<dyn Disk>, model: Model, len_bytes: usize) -> Fixture {
        let mut channel = TestChannel::open(&*disk);
        let region = Region::alloc(len_bytes);
        let region_id = channel.register(Arc::clone(&region));
        Fixture { disk, channel, region, region_id, model }
    }

    /// A reference to an offset in the buffer.
    pub fn buf(&self, offset: u64) -> BufRef {
        BufRef { region: self.region_id, offset }
    }

    /// Pushes a bio; waits for completions if there is no room.
    ///
    /// # Panics
    /// If waiting makes no room.
    pub fn push(&mut self, bio: Bio, done: &mut Vec<Completion>) {
        let mut idle = 0;
        while self.channel.push(&[bio]) == 0 {
            self.channel.submit();
            if self.channel.reap(done) == 0 {
                self.channel.wait(None);
                idle += 1;
                assert!(idle < IDLE_WAITS_MAX, "waiting makes no room");
            }
        }
    }

    /// Submits, and reaps until nothing is in flight.
    ///
    /// # Panics
    /// If a bio is in flight that is never due, or waiting does not end.
    pub fn finish(&mut self) -> Vec<Completion> {
        self.channel.submit();
        let mut done = Vec::new();
        let mut idle = 0;
        while self.channel.in_flight() > 0 {
            if self.channel.reap(&mut done) == 0 {
                assert_ne!(self.channel.due(), Due::Never, "in flight, yet never due");
                self.channel.wait(None);
                idle += 1;
                assert!(idle < IDLE_WAITS_MAX, "waiting finds nothing");
            }
        }
        done
    }

    /// Executes one bio with its data at the start of the buffer, without the model.
    ///
    /// # Panics
    /// If the bio does not get exactly one completion, with its user data.
    pub fn run(&mut self, bio: Bio) -> Completion {
        let user_data = bio.user_data;
        assert_eq!(self.channel.push(&[bio]), 1, "an idle channel takes a bio");
        let done = self.finish();
        assert_eq!(done.len(), 1, "one completion for {bio:?}");
        assert_eq!(done[0].user_data, user_data);
        done[0]
    }

    /// Executes one bio on the disk and on the model, and compares status, sector and data. The
    /// data that the bio writes are at the start of the buffer already.
    ///
    /// # Panics
    /// If the two disagree.
    pub fn both(&mut self, bio: Bio) -> ExpectedResult {
        let bio = bio.with_buf(self.buf(0));
        let mut data = vec![0; data_bytes(&bio)];
        self.region.read(0, &mut data);
        let done = self.run(bio);
        let wanted = self.model.apply(&bio, &mut data);
        assert_eq!(done.status, wanted.status, "status of {bio:?}");
        assert_eq!(done.sector, wanted.sector, "sector of {bio:?}");
        if bio.op == Op::Read && done.status.is_ok() && self.model.keeps_data() {
            let mut found = vec![0; data.len()];
            self.region.read(0, &mut found);
            same_bytes(&found, &data, bio.sector);
        }
        wanted
    }

    /// Compares the zone report with the model's.
    ///
    /// # Panics
    /// If the two disagree.
    pub fn same_report(&self) {
        let found = self.report();
        for (found, wanted) in found.iter().zip(self.model.report()) {
            assert_eq!(*found, wanted, "zone at sector {}", wanted.start);
        }
        assert_eq!(found.len(), self.model.report().len(), "number of zones");
    }

    /// The disk's zone report.
    ///
    /// # Panics
    /// If there is none.
    pub fn report(&self) -> Vec<ZoneInfo> {
        let mut zones = Vec::new();
        self.disk.report_zones(Sector(0), usize::MAX, &mut zones).expect("sector 0 exists");
        zones
    }

    /// Reads the whole disk and compares it with the model.
    ///
    /// # Panics
    /// If the two disagree.
    pub fn same_contents(&mut self) {
        if !self.model.keeps_data() {
            return;
        }
        let sectors = self.disk.geometry().sectors;
        let step = BUFFER_BYTES as u64 / SECTOR_BYTES / 4;
        let mut at = 0;
        while at < sectors {
            let bio = Bio::new(Op::Read, Sector(at), step.min(sectors - at));
            let status = self.both(bio).status;
            // An offline zone fails the whole read; that status was compared with the model's.
            debug_assert!(status.is_ok() || status == self.model.rules().refused());
            at += step;
        }
    }
}

/// How many bytes of data a bio of the suite has; 0 for an invalid length.
pub(super) fn data_bytes(bio: &Bio) -> usize {
    let bytes = bio.sectors.saturating_mul(SECTOR_BYTES);
    if bio.op.has_data() && bytes <= BUFFER_BYTES as u64 { bytes as usize } else { 0 }
}

/// Compares data, and names the first sector that differs.
///
/// # Panics
/// If the two differ.
pub(super) fn same_bytes(found: &[u8], wanted: &[u8], from: Sector) {
    if found == wanted {
        return;
    }
    let size = SECTOR_BYTES as usize;
    for (index, (found, wanted)) in found.chunks(size).zip(wanted.chunks(size)).enumerate() {
        if found != wanted {
            let at = from + index as u64;
            panic!(
                "sector {at}: found {:02x?}.., expected {:02x?}.. (read from {from} on)",
                &found[..8],
                &wanted[..8]
            );
        }
    }
    panic!("lengths differ: {} and {}", found.len(), wanted.len());
}
