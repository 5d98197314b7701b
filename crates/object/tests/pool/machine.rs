//! A machine that has a pool of one volume open, driven step by step, and the model of its
//! contents.

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use blockyard_core::Status;
use blockyard_object::{
    BucketError, BucketSettings, BucketStore, LocalAcknowledgement, ObjectClient, Opening, Retries,
};
use blockyard_volume::committer::{Committer, Turn};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::record::Body;
use blockyard_volume::{Compression, Options, Pool};
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use object_store::memory::InMemory;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::connection::{Connection, pass};

pub(crate) const BLOCK: usize = 512;

/// Blocks of the volume.
pub(crate) const BLOCKS: u64 = 24;

/// For each block the number of the step that wrote it; 0 for zeros.
pub(crate) type Blocks = Vec<u64>;

/// BucketSettings with which a few writes reach every part of the code.
pub(crate) fn settings() -> BucketSettings {
    BucketSettings {
        segment_bytes: 16 << 10,
        batch_bytes: 8 << 10,
        uploads_max: 3,
        keep_bytes: 3 << 10,
        memory_bytes: 64 << 10,
        compact_bytes: 12 << 10,
        compact_batches: 6,
        removal_delay: Duration::ZERO,
        outage_max: Duration::from_secs(600),
        cache_bytes: 1 << 20,
        local: None,
        lease: None,
    }
}

/// Most bytes that the object store lacks of a pool with a local log.
pub(crate) const LAG_BYTES: u64 = 24 << 10;

/// A directory for a local log, in memory if possible: thousands of syncs take minutes on a disk.
pub(crate) fn log_folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// As [`settings`], with acknowledgements by a local log. A pool that is dropped uploads nothing
/// more, as if its process had been killed.
pub(crate) fn local_settings() -> BucketSettings {
    let local = LocalAcknowledgement {
        lag_bytes_max: LAG_BYTES,
        lag_time_max: Duration::from_secs(5),
        upload_delay: Duration::from_millis(100),
        close_time: Duration::ZERO,
    };
    BucketSettings { local: Some(local), ..settings() }
}

pub(crate) fn options() -> Options {
    Options {
        align: 512,
        segment_bytes: 16 << 10,
        segments_max: 40,
        memory_bytes: 128 << 10,
        checkpoint_bytes: 12 << 10,
        sync_bytes: 8 << 10,
        records_max: 128,
        map_cache_bytes: 4096,
        // Short groups are in flight together, too.
        pipeline_bytes: 0,
        ..Options::default()
    }
}

/// A request of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A write of blocks; with or without FUA.
    Write {
        first: u64,
        count: u64,
        fua: bool,
    },
    Discard {
        first: u64,
        count: u64,
    },
    Flush,
}

/// Draws a step.
pub(crate) fn draw(random: &mut fastrand::Rng) -> Step {
    let first = random.u64(0..BLOCKS);
    let count = random.u64(1..=(BLOCKS - first).min(12));
    match random.u8(0..10) {
        0 => Step::Flush,
        1 => Step::Discard { first, count },
        _ => Step::Write { first, count, fua: random.bool() },
    }
}

/// The steps that were taken on a volume since it had the contents `base`.
#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(crate) base: Blocks,
    /// The number of the first step.
    pub(crate) first: u64,
    pub(crate) steps: Vec<Step>,
    /// How many steps must be there after a crash.
    pub(crate) durable: usize,
}

impl History {
    pub(crate) fn new(base: Blocks, first: u64) -> History {
        History { base, first, steps: Vec::new(), durable: 0 }
    }

    /// The contents after this number of steps.
    pub(crate) fn after(&self, count: usize) -> Blocks {
        let mut blocks = self.base.clone();
        for (number, step) in (self.first..).zip(&self.steps[..count]) {
            let (first, count, value) = match *step {
                Step::Write { first, count, .. } => (first, count, number),
                Step::Discard { first, count } => (first, count, 0),
                Step::Flush => continue,
            };
            blocks[first as usize..(first + count) as usize].fill(value);
        }
        blocks
    }

    /// Checks that contents are those after at least `least` steps.
    pub(crate) fn check(&self, least: usize, found: &Blocks) {
        let fits = (least..=self.steps.len()).any(|count| self.after(count) == *found);
        assert!(
            fits,
            "found {found:?}, expected the contents after {least} or more of {:?}: {:?}",
            self.steps,
            self.after(least)
        );
    }
}

/// A machine with an open pool.
pub(crate) struct Machine {
    pub(crate) pool: Arc<Pool<BucketStore>>,
    pub(crate) committer: Committer<BucketStore>,
    handle: VolumeHandle<BucketStore>,
    pub(crate) history: History,
    waiting: Vec<(u32, usize)>,
    runtime: Arc<Runtime>,
}

/// A runtime of one thread, whose clock runs only while nothing else does.
pub(crate) fn runtime() -> Arc<Runtime> {
    Arc::new(Builder::new_current_thread().enable_all().start_paused(true).build().unwrap())
}

/// Opens the store of a machine.
pub(crate) fn open_store(
    connection: &Connection,
    cache: Option<&Path>,
) -> Result<BucketStore, BucketError> {
    open_store_on(connection, (cache, None), &runtime())
}

/// Opens the store of a machine with directories for the cache and for the local log.
pub(crate) fn open_store_on(
    connection: &Connection,
    (cache, log): (Option<&Path>, Option<&Path>),
    runtime: &Arc<Runtime>,
) -> Result<BucketStore, BucketError> {
    let client = ObjectClient::over(Arc::new(connection.clone()), "pool", Retries::default());
    let capacity_bytes = Some(64 << 20);
    let request = Opening { cache, log, capacity_bytes, take_over: true, ..Opening::default() };
    let settings = log.map_or_else(settings, |_| local_settings());
    BucketStore::open(Arc::new(client), settings, request, runtime)
}

impl Machine {
    /// Opens the pool, and makes it and its volume if there is none.
    pub(crate) fn open(connection: &Connection, cache: Option<&Path>) -> Result<Machine, String> {
        Machine::open_with(connection, cache, None)
    }

    /// As [`Machine::open`], with acknowledgements by a local log in a directory.
    pub(crate) fn open_with(
        connection: &Connection,
        cache: Option<&Path>,
        log: Option<&Path>,
    ) -> Result<Machine, String> {
        let runtime = runtime();
        let store = open_store_on(connection, (cache, log), &runtime);
        let store = store.map_err(|error| error.to_string())?;
        let (pool, mut committer) =
            Pool::open(store, options()).map_err(|error| error.to_string())?;
        if pool.find("v").is_err() {
            let meta = VolumeMeta {
                id: 0,
                name: "v".to_owned(),
                is_snapshot: false,
                guid: 0,
                reserved_bytes: 0,
                created: 0,
                key: 0,
                origin: 0,
                block_bytes: BLOCK as u32,
                blocks: BLOCKS,
            };
            let mut answer = pool.submit_change(Change::Create(meta));
            while committer.turn() == Turn::Worked {}
            match answer.take().map(|reply| reply.status) {
                Some(Status::Ok) => {}
                other => return Err(format!("no volume: {other:?}")),
            }
        }
        let live = pool.find("v").unwrap();
        let handle = VolumeHandle::open(&pool, live, Compression::None, 64).unwrap();
        let history = History::new(vec![0; BLOCKS as usize], 1);
        let waiting = Vec::new();
        let mut machine = Machine { pool, committer, handle, history, waiting, runtime };
        machine.history.base = machine.contents().map_err(|status| status.to_string())?;
        Ok(machine)
    }

    /// Lets time pass, in which uploads go on.
    pub(crate) fn pass(&self, time: Duration) {
        self.runtime.block_on(pass(time));
    }

    /// The store of the pool.
    pub(crate) fn store(&self) -> &BucketStore {
        self.pool.segments().directory()
    }

    /// The epoch of this opener.
    pub(crate) fn epoch(&self) -> u64 {
        self.pool.segments().directory().epoch()
    }

    /// Begins a step. Returns whether the pool took it.
    pub(crate) fn begin(&mut self, step: Step) -> bool {
        let number = self.history.first + self.history.steps.len() as u64;
        let token = self.history.steps.len() as u32;
        let at = |first: u64| first * BLOCK as u64;
        let outcome = match step {
            Step::Write { first, count, fua } => {
                let fill = |_: usize, into: &mut [u8]| {
                    into.chunks_mut(8).for_each(|part| part.copy_from_slice(&number.to_le_bytes()));
                };
                self.handle.write(at(first), count as usize * BLOCK, &fill, token, fua)
            }
            Step::Discard { first, count } => self.handle.zero(at(first), at(count), token, false),
            Step::Flush => self.handle.flush(token),
        };
        if outcome == Outcome::Taken {
            self.waiting.push((token, self.history.steps.len()));
            self.history.steps.push(step);
        }
        outcome == Outcome::Taken
    }

    /// Runs until there is no work. Returns whether all steps were answered without an error.
    pub(crate) fn run(&mut self) -> bool {
        let mut is_ok = true;
        loop {
            let goes_on = self.committer.turn() == Turn::Worked;
            while let Some(reply) = self.handle.take() {
                let at = self.waiting.iter().position(|(token, _)| *token == reply.token);
                let (_, index) = self.waiting.swap_remove(at.unwrap());
                is_ok &= reply.status.is_ok();
                let step = self.history.steps[index];
                let asked = matches!(step, Step::Flush | Step::Write { fua: true, .. });
                if reply.status.is_ok() && asked {
                    self.history.durable = self.history.durable.max(index + 1);
                }
            }
            if !goes_on {
                return is_ok;
            }
        }
    }

    /// Takes a step. Returns whether it succeeded.
    pub(crate) fn take(&mut self, step: Step) -> bool {
        self.begin(step) && self.run()
    }

    /// Closes the pool in order.
    pub(crate) fn close(mut self) {
        assert!(self.run());
        self.committer.finish_idle_log();
        let _answer = self.pool.submit(Body::Stop);
        while self.committer.turn() != Turn::Stopped {}
    }

    /// The contents of the volume.
    pub(crate) fn contents(&mut self) -> Result<Blocks, Status> {
        let mut bytes = Vec::new();
        let len = BLOCKS as usize * BLOCK;
        match self.handle.read(0, len, |part| bytes.extend_from_slice(part)) {
            Status::Ok => {}
            status => return Err(status),
        }
        let number = |block: &[u8]| {
            let first = u64::from_le_bytes(block[..8].try_into().unwrap());
            assert!(block.chunks(8).all(|part| part == first.to_le_bytes()), "a torn block");
            first
        };
        Ok(bytes.chunks(BLOCK).map(number).collect())
    }
}

/// A store in memory that has a pool with an empty volume.
pub(crate) fn formatted() -> Arc<InMemory> {
    // The preflight of a new pool takes longer than a test with it.
    static FORMATTED: LazyLock<Arc<InMemory>> = LazyLock::new(|| {
        let store = Arc::new(InMemory::new());
        Machine::open(&Connection::new(&store), None).unwrap().close();
        store
    });
    Arc::new(FORMATTED.fork())
}
