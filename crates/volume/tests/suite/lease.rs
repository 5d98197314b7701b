//! The lease of a pool in remote storage: requests wait while it was not renewed in time, and get
//! an error when the pool is lost.

use std::sync::Arc;
use std::time::Duration;

use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Clock as _;
use blockyard_core::{Bio, BufRef, Device, Due, Flags, Nanos, Op, Region, Sector, Status};
use blockyard_store::LeaseTerm;
use blockyard_store::lease::boot_ns;
use blockyard_testing::clock::ManualClock;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::simulated_store::{FaultPlan, Operation, SimulatedStore, When};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig};

const BLOCK: u64 = 4096;

const SECOND_NS: u64 = 1_000_000_000;

/// The number of checks for completions, and the time between two of them: two minutes together.
const LOOKS_MAX: usize = 120_000;
const PAUSE: Duration = Duration::from_millis(1);

/// A volume of a pool with a lease, and a channel to it whose clock the test advances.
struct Fixture {
    store: SimulatedStore,
    term: Arc<LeaseTerm>,
    running: Arc<Running<SimulatedStore>>,
    clock: ManualClock,
    channel: Box<dyn Channel>,
    bios: [Bio; 4],
}

impl Fixture {
    fn open(directory: &SimulatedDirectory) -> Fixture {
        let term = Arc::new(LeaseTerm::held());
        let store = SimulatedStore::new(directory).with_lease(&term);
        let options = Options { segment_bytes: 1 << 20, segments_max: 16, ..Options::default() };
        let running = Running::start(store.clone(), options).unwrap();
        let config = VolumeConfig { size: 1 << 20, ..VolumeConfig::new("pool", "v") };
        let volume = Volume::open_in(Arc::clone(&running), config).unwrap();
        let (clock, stats) = (ManualClock::new(), ChannelStats::new());
        let queue = volume.open_queue().unwrap();
        let (geometry, limits) = (volume.geometry(), volume.limits());
        let config = ChannelConfig::default();
        let mut channel: Box<dyn Channel> =
            Box::new(Stack::new(config, geometry, limits, queue, clock.clone(), stats));
        let region = channel.register(Region::alloc(BLOCK as usize));
        let buf = BufRef { region, offset: 0 };
        // The blocks are not adjacent: their requests are not merged.
        let bio = |op, block: u64| Bio::new(op, Sector(block * 8), BLOCK / 512).with_buf(buf);
        let bios = [
            bio(Op::Read, 2),
            bio(Op::Write, 4),
            bio(Op::Write, 6).with_flags(Flags::FUA),
            Bio::flush(),
        ];
        Fixture { store, term, running, clock, channel, bios }
    }

    fn renew(&self) {
        self.term.renew(boot_ns() + 3600 * SECOND_NS);
    }

    fn submit(&mut self, bios: &[Bio]) {
        assert_eq!(self.channel.push(bios), bios.len());
        self.channel.submit();
    }

    /// What has completed so far. The queue checks the lease again.
    fn completed(&mut self) -> Vec<Status> {
        self.clock.advance(SECOND_NS);
        let mut done = Vec::new();
        self.channel.reap(&mut done);
        done.iter().map(|end| end.status).collect()
    }

    /// Waits until this number of requests have completed with a status.
    fn complete(&mut self, count: usize, expected: Status) {
        let mut done = Vec::new();
        for _ in 0..LOOKS_MAX {
            done.extend(self.completed());
            if done.len() >= count {
                break;
            }
            std::thread::park_timeout(PAUSE);
        }
        assert_eq!(done, vec![expected; count]);
    }

    /// Writes a block durably without the queue. The committer takes records in order: it has
    /// answered each record that the queue sent before.
    fn pass_a_record(&self) {
        let live = self.running.pool().find("v").unwrap();
        let mut handle =
            VolumeHandle::open(self.running.pool(), live, Compression::None, 4).unwrap();
        let taken = handle.write(0, BLOCK as usize, &|_, bytes| bytes.fill(1), 1, true);
        assert_eq!(taken, Outcome::Taken);
        while handle.take().is_none() {
            let count = handle.completion_queue().event_count();
            count.sleep(Duration::from_secs(1), || handle.is_any());
        }
    }

    /// Nothing completes, and nothing of the requests has reached the committer.
    fn holds(&mut self) {
        for _ in 0..3 {
            self.pass_a_record();
            assert_eq!(self.completed(), []);
        }
        // An owner that sleeps checks the lease again soon, and does not poll meanwhile.
        let now = self.clock.now();
        let soon = Nanos(now.0 + 1)..=Nanos(now.0 + SECOND_NS);
        assert!(matches!(self.channel.due(), Due::At(at) if soon.contains(&at)));
    }
}

#[test]
fn requests_wait_for_the_lease_and_fail_when_the_pool_is_lost() {
    let mut it = Fixture::open(&SimulatedDirectory::default());
    let (bios, count) = (it.bios, it.bios.len());
    // Before the first renewal.
    it.submit(&bios);
    it.holds();
    it.renew();
    it.complete(count, Status::Ok);
    it.submit(&bios);
    it.complete(count, Status::Ok);

    it.term.hold();
    it.submit(&bios);
    it.holds();
    it.renew();
    it.complete(count, Status::Ok);

    // A term that ends by itself.
    it.term.renew(boot_ns());
    it.submit(&bios);
    it.holds();
    it.term.refuse();
    assert_eq!(it.completed(), [Status::IoErr; 4]);
    it.submit(&bios);
    assert_eq!(it.completed(), [Status::IoErr; 4]);
    it.renew();
    it.submit(&bios);
    it.complete(count, Status::Ok);

    it.term.hold();
    it.submit(&bios);
    it.holds();
    it.term.end();
    assert_eq!(it.completed(), [Status::IoErr; 4]);
    it.renew();
    it.submit(&bios);
    assert_eq!(it.completed(), [Status::IoErr; 4]);
}

/// The bug: the lease was checked once for all requests that are started together. If one of them
/// waited for the storage until the lease had ended, those after it were still executed.
#[test]
fn a_request_is_checked_after_an_earlier_one_has_waited_for_the_storage() {
    let directory = SimulatedDirectory::default();
    {
        let mut it = Fixture::open(&directory);
        it.renew();
        let bios = [2, 4].map(|block: u64| Bio { sector: Sector(block * 8), ..it.bios[2] });
        it.submit(&bios);
        it.complete(2, Status::Ok);
    }
    for (op, loses) in [Op::Read, Op::Write, Op::Flush].map(|op| [(op, false), (op, true)]).concat()
    {
        let mut it = Fixture::open(&directory);
        it.renew();
        let [read, write, _, flush] = it.bios;
        let second = match op {
            // A block that was never written: its zeros need no read.
            Op::Read => Bio { sector: Sector(8 * 8), ..read },
            Op::Write => write,
            _ => flush,
        };
        let (term, has_read) = (Arc::clone(&it.term), it.store.reads());
        it.store.on_next(Operation::Read, move || if loses { term.end() } else { term.hold() });
        it.submit(&[read, second]);
        assert!(it.store.reads() > has_read, "the first request reads nothing from the storage");
        let mut done = it.completed();
        if loses {
            // The data of the read were requested before the pool was lost.
            assert_eq!(done, [Status::IoErr, Status::Ok], "{op:?}");
            continue;
        }
        it.pass_a_record();
        done.extend(it.completed());
        assert_eq!(done, [Status::Ok], "{op:?}");
        it.renew();
        it.complete(1, Status::Ok);
    }
}

/// Regression: the thread of the queue, which may serve other devices, repeated a read that the
/// storage had not answered, and waited as long again for each block.
#[test]
fn a_read_that_storage_does_not_answer_is_not_repeated() {
    let mut fixture = Fixture::open(&SimulatedDirectory::default());
    fixture.renew();
    let [read, write, ..] = fixture.bios;
    let read = Bio { sector: write.sector, ..read };
    fixture.submit(&[write.with_flags(Flags::FUA)]);
    fixture.complete(1, Status::Ok);
    fixture.pass_a_record();
    let mut count = |plan: FaultPlan, expected: Status| {
        fixture.store.set_faults(plan);
        let before = fixture.store.reads();
        fixture.submit(&[read]);
        fixture.complete(1, expected);
        fixture.store.reads() - before
    };
    assert_eq!(count(FaultPlan::default(), Status::Ok), 1);
    let unanswered = FaultPlan { unanswered_reads: When::After(0), ..FaultPlan::default() };
    assert_eq!(count(unanswered, Status::Medium), 1);
    // Another error may be that of a block that has moved.
    let failed = FaultPlan { failed_reads: When::After(0), ..FaultPlan::default() };
    assert_eq!(count(failed, Status::Medium), 2);
    assert_eq!(count(FaultPlan::default(), Status::Ok), 1);
}
