//! USED, REFER and AVAIL against a count that shares no code with them: a mark of every block that
//! a volume or snapshot refers to, over random histories; and what destroying each one frees.
#![allow(clippy::unwrap_used)] // Test code.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::Mirror;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::SimulatedStore;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::map::{Map, NotResident};
use blockyard_volume::{Compression, Options, Running};
use blockyard_volume_admin::space::{self, Listed, Space};
use blockyard_volume_format::PAGE_BYTES;
use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::superblock::{self, SLOT_BYTES, Superblock};

type Store = Mirror<SimulatedStore>;
type Pool = Arc<Running<Store>>;

/// Random histories.
const HISTORIES: u64 = 200;

/// Operations of a history.
const STEPS: usize = 60;

const BLOCK: u32 = 4096;

/// Blocks of a volume: several leaves, the last one in part.
const BLOCKS: u64 = 1100;

/// Between two looks whether a scan has ended.
const LOOK: Duration = Duration::from_millis(1);

fn open(directory: &SimulatedDirectory) -> Pool {
    let options = Options {
        segment_bytes: 256 << 10,
        segments_max: 200,
        memory_bytes: 1 << 20,
        checkpoint_bytes: 512 << 10,
        // A few leaves, so that others are read.
        map_cache_bytes: 16 << 10,
        ..Options::default()
    };
    Running::start(Mirror::single(SimulatedStore::new(directory), "pool"), options).unwrap()
}

/// A volume that is open for writing.
struct Writer(VolumeHandle<Store>);

impl Writer {
    fn open(pool: &Pool, name: &str) -> Writer {
        let live = pool.pool().find(name).unwrap();
        Writer(VolumeHandle::open(pool.pool(), live, Compression::Lz4, 8).unwrap())
    }

    fn end(&mut self) {
        while self.0.out() > 0 {
            match self.0.take() {
                Some(reply) => assert_eq!(reply.status, Status::Ok),
                None => {
                    let handle = &self.0;
                    handle.completion_queue().event_count().sleep(LOOK, || handle.is_any());
                }
            }
        }
    }

    fn until_taken(&mut self, mut begin: impl FnMut(&mut VolumeHandle<Store>) -> Outcome) {
        loop {
            match begin(&mut self.0) {
                Outcome::Taken => return self.end(),
                Outcome::Ended(status) => return assert_eq!(status, Status::Ok),
                Outcome::Full => self.end(),
            }
        }
    }

    /// Writes blocks that compress to different lengths.
    fn write(&mut self, first: u64, count: u64, random: &mut fastrand::Rng) {
        let mut bytes = vec![0; (count * u64::from(BLOCK)) as usize];
        for block in bytes.chunks_mut(BLOCK as usize) {
            let noise = random.usize(1..=block.len());
            random.fill(&mut block[..noise]);
        }
        let fill =
            |from: usize, into: &mut [u8]| into.copy_from_slice(&bytes[from..from + into.len()]);
        let at = first * u64::from(BLOCK);
        self.until_taken(|handle| handle.write(at, bytes.len(), &fill, 0, false));
    }

    fn zero(&mut self, first: u64, count: u64) {
        let (at, len) = (first * u64::from(BLOCK), count * u64::from(BLOCK));
        self.until_taken(|handle| handle.zero(at, len, 0, false));
    }
}

/// Every stored block of a pool: its length, and the numbers of the volumes and snapshots that
/// refer to it.
fn mark(pool: &Pool) -> BTreeMap<u64, (u64, BTreeSet<u32>)> {
    pool.pool().settle();
    let mut marks: BTreeMap<u64, (u64, BTreeSet<u32>)> = BTreeMap::new();
    for VolumeMeta { name, id, blocks, .. } in pool.pool().list() {
        let live = pool.pool().find(&name).unwrap();
        for block in 0..blocks {
            let entry = entry(pool, &live.map, block);
            if !entry.is_hole() {
                let mark = marks.entry(entry.address()).or_default();
                mark.0 = entry.stored_bytes().into();
                mark.1.insert(id);
            }
        }
    }
    marks
}

fn entry(pool: &Pool, map: &Map, block: u64) -> Entry {
    let (span, at) = Map::place(block);
    loop {
        match map.with(span, |span| span.entry(at)) {
            Ok(entry) => return entry,
            Err(NotResident(leaf)) => drop(pool.pool().segments().load(&leaf).unwrap()),
        }
    }
}

/// The numbers of a volume and its snapshots, or of a snapshot alone.
fn with_snapshots(all: &[VolumeMeta], name: &str) -> BTreeSet<u32> {
    let prefix = format!("{name}@");
    let goes = |it: &&VolumeMeta| it.name == name || it.name.starts_with(&prefix);
    all.iter().filter(goes).map(|it| it.id).collect()
}

/// Compares the list with the marks.
fn compare(pool: &Pool) {
    let marks = mark(pool);
    let all = pool.pool().list();
    let list = space::list(pool.pool(), None).unwrap();
    assert_eq!(list.iter().map(|it| &it.meta.name).collect::<Vec<_>>(), names(&all));
    for it in list {
        let VolumeMeta { name, id, .. } = &it.meta;
        let sum = |is_in: &dyn Fn(&BTreeSet<u32>) -> bool| -> (u64, u64) {
            let marked = marks.values().filter(|(_, ids)| is_in(ids));
            marked.fold((0, 0), |(count, bytes), (len, _)| (count + 1, bytes + len))
        };
        let goes = with_snapshots(&all, name);
        let (blocks, refer_bytes) = sum(&|ids| ids.contains(id));
        let (_, freed_bytes) = sum(&|ids| ids.is_subset(&goes));
        let (_, snapshots_bytes) =
            sum(&|ids| !it.meta.is_snapshot && ids.is_subset(&goes) && !ids.contains(id));
        let unused_reserved_bytes = match it.meta.is_snapshot {
            true => 0,
            false => pool.pool().find(name).unwrap().unused_reserved_bytes(),
        };
        let wanted =
            Space { blocks, refer_bytes, freed_bytes, snapshots_bytes, unused_reserved_bytes };
        assert_eq!(it.space, Some(wanted), "{name}");
        let ids: HashSet<u32> = goes.into_iter().collect();
        assert_eq!(space::freed_bytes(pool.pool(), &ids).unwrap(), freed_bytes, "{name}");
        assert!(it.meta.created > 1_700_000_000, "{name}");
    }
}

fn names(all: &[VolumeMeta]) -> Vec<&String> {
    all.iter().map(|it| &it.name).collect()
}

fn total(pool: &Pool) -> u64 {
    mark(pool).values().map(|(bytes, _)| bytes).sum()
}

/// Destroys everything, one by one in random order, and compares what each frees with its USED.
fn destroy_all(pool: &Pool, random: &mut fastrand::Rng) {
    let mut before = total(pool);
    loop {
        let all = pool.pool().list();
        let may_go = |it: &&VolumeMeta| with_snapshots(&all, &it.name).len() == 1;
        let may_go: Vec<&VolumeMeta> = all.iter().filter(may_go).collect();
        if may_go.is_empty() {
            break;
        }
        let name = &may_go[random.usize(..may_go.len())].name;
        let space = space::list(pool.pool(), Some(name)).unwrap()[0].space.unwrap();
        pool.destroy(name).unwrap();
        let after = total(pool);
        assert_eq!(before - after, space.freed_bytes, "{name}");
        before = after;
    }
    assert_eq!(before, 0);
}

/// Compares AVAIL, after a scan has corrected the usage table and a checkpoint has written all
/// pages, with the capacity less the marked blocks and twice the pages that the checkpoint has.
fn compare_available(pool: &Pool, directory: &SimulatedDirectory, capacity: u64) {
    let segments = pool.pool().segments();
    pool.pool().request_scan();
    while pool.pool().requested_scan().is_some() {
        std::thread::yield_now();
    }
    assert!(pool.pool().checkpoint().is_ok());
    let live: u64 = segments.live().0.iter().sum();
    assert_eq!(live, total(pool), "the usage table after a scan");
    let used = live + 2 * PAGE_BYTES as u64 * pages(pool, directory);
    let list = space::list(pool.pool(), None).unwrap();
    let unused = |it: &Listed| it.space.unwrap().unused_reserved_bytes;
    let all_unused: u64 = list.iter().map(unused).sum();
    for it in &list {
        let available = capacity - used - all_unused + unused(it);
        let wanted = (!it.meta.is_snapshot).then_some(available);
        assert_eq!(it.available_bytes, wanted, "{}", it.meta.name);
    }
}

/// The pages of a checkpoint: leaves, nodes, roots, and those of the catalogue.
fn pages(pool: &Pool, directory: &SimulatedDirectory) -> u64 {
    let (mut leaves, mut nodes) = (HashSet::new(), HashSet::new());
    for VolumeMeta { name, .. } in pool.pool().list() {
        let map = pool.pool().find(&name).unwrap().map.freeze();
        for node in map.iter().flatten() {
            nodes.insert(node.location().unwrap());
            leaves.extend(node.leaves().map(|(_, leaf)| leaf.location().unwrap()));
        }
    }
    // A map has one node, so equal roots name equal nodes.
    let roots = nodes.len();
    let mut slots = vec![0; 2 * SLOT_BYTES];
    directory.open(superblock::FILE).unwrap().read_at(0, &mut slots).unwrap();
    let bytes = Superblock::newest(&slots).unwrap().catalogue_bytes as usize;
    let catalogue = bytes.div_ceil(PAGE_BYTES);
    let top = usize::from(catalogue > 1);
    (leaves.len() + nodes.len() + roots + catalogue + top) as u64
}

#[test]
fn used_refer_and_avail_are_what_a_mark_of_all_blocks_finds() {
    let seed = Seed::from_env();
    for history in 0..HISTORIES {
        let _watch = seed.watch(&format!("history {history}"));
        let mut random = seed.rng(history);
        run(&mut random);
    }
}

fn run(random: &mut fastrand::Rng) {
    let directory = SimulatedDirectory::default();
    let mut pool = open(&directory);
    let (used, left) = pool.pool().segments().used_and_left_bytes();
    let capacity = used + left;
    let size = BLOCKS * u64::from(BLOCK);
    pool.create("v0", size, BLOCK).unwrap();
    pool.create_reserved("other", size, BLOCK, size / 4, None).unwrap();
    let mut number = 0;
    for step in 0..STEPS {
        let all = pool.pool().list();
        let volumes: Vec<&VolumeMeta> = all.iter().filter(|it| !it.is_snapshot).collect();
        let snapshots: Vec<&VolumeMeta> = all.iter().filter(|it| it.is_snapshot).collect();
        let Some(volume) = random.choice(&volumes).map(|it| it.name.clone()) else {
            pool.create(&format!("again-{step}"), size, BLOCK).unwrap();
            continue;
        };
        let snapshot = random.choice(&snapshots).map(|it| it.name.clone());
        number += 1;
        match (random.u32(..100), snapshot) {
            (0..45, _) => {
                let first = random.u64(..BLOCKS);
                let count = random.u64(1..=60).min(BLOCKS - first);
                Writer::open(&pool, &volume).write(first, count, random);
            }
            (45..55, _) => {
                let first = random.u64(..BLOCKS);
                let count = random.u64(1..=700).min(BLOCKS - first);
                Writer::open(&pool, &volume).zero(first, count);
            }
            (55..70, _) if snapshots.len() < 12 => {
                pool.snapshot(&format!("{volume}@{number}")).unwrap();
            }
            (70..77, Some(snapshot)) if volumes.len() < 6 => {
                pool.clone_of(&snapshot, &format!("clone-{number}")).unwrap();
            }
            (77..82, Some(snapshot)) => pool.rollback(&snapshot).unwrap(),
            (82..90, Some(snapshot)) => pool.destroy(&snapshot).unwrap(),
            (90..92, _) if with_snapshots(&all, &volume).len() == 1 => {
                pool.destroy(&volume).unwrap();
            }
            (92..93, _) => assert!(pool.pool().checkpoint().is_ok()),
            (93..94, _) if snapshots.len() < 12 => {
                pool.snapshot_all(&number.to_string()).unwrap();
            }
            // Shared pages are found again by their places on disk.
            (94..96, _) => {
                drop(pool);
                pool = open(&directory);
            }
            (96..98, _) => _ = pool.promote(&volume),
            (98..99, _) => pool.rename(&volume, &format!("renamed-{number}")).unwrap(),
            _ => compare(&pool),
        }
    }
    compare(&pool);
    compare_available(&pool, &directory, capacity);
    drop(pool);
    let pool = open(&directory);
    compare(&pool);
    destroy_all(&pool, random);
}
