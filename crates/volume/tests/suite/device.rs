//! A volume on real files: data persist across openings, a second process is refused, and the pool
//! is free for others after its devices are closed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::{Bio, BufRef, Device, Due, Flags, Nanos, Op, Region, Sector, Status};
use blockyard_store::StoreKind;
use blockyard_testing::channel::handle;
use blockyard_testing::clock::ManualClock;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, SyncMode, Volume, VolumeConfig};
use blockyard_volume_admin::check::check;
use blockyard_volume_format::bytes;
use blockyard_volume_format::superblock::{BYTES, FILE, SLOT_BYTES};

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn config(path: PathBuf) -> VolumeConfig {
    VolumeConfig {
        path,
        name: "v0".to_owned(),
        size: 64 << 20,
        volblocksize: 0,
        compress: Compression::Lz4,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    }
}

#[test]
fn written_data_are_there_when_the_pool_is_opened_again() {
    let place = place("reopen");
    let mut random = fastrand::Rng::with_seed(3);
    let mut model = vec![0_u8; 64 << 20];
    for round in 0..4 {
        let volume = Volume::open(config(place.path().join("pool"))).unwrap();
        let mut io = handle(&volume);
        let mut found = vec![0; 1 << 20];
        for (at, wanted) in (0..).zip(model.chunks(1 << 20)) {
            io.read(Sector(at * 2048), &mut found).unwrap();
            assert!(found == wanted, "round {round}, MiB {at}");
        }
        for _ in 0..200 {
            let len = 4096 * random.usize(1..=64);
            let at = random.usize(..=(model.len() - len) / 4096) * 4096;
            let data: Vec<u8> = match random.bool() {
                true => std::iter::repeat_with(|| random.u8(..)).take(len).collect(),
                false => vec![random.u8(..); len],
            };
            let flags = if random.u8(..8) == 0 { Flags::FUA } else { Flags::NONE };
            io.write(Sector(at as u64 / 512), &data, flags).unwrap();
            model[at..at + len].copy_from_slice(&data);
        }
    }
}

/// Reads by blocking calls have finished when they are started. A device queue decodes some of them
/// at a time, and says that it is due until it has completed all.
#[test]
fn finished_reads_are_completed_a_few_at_a_time() {
    const READS: u64 = 16;
    let place = place("few-reads");
    let config = VolumeConfig {
        volblocksize: 4096,
        store: Some(StoreKind::Threads),
        ..config(place.path().join("pool"))
    };
    let volume = Volume::open(config.clone()).unwrap();
    // Reads of neighbouring sectors would be merged.
    let sector = |number: u64| Sector(number * 2 * 8);
    for number in 0..READS {
        handle(&volume).write(sector(number), &[number as u8 + 1; 4096], Flags::NONE).unwrap();
    }
    drop(volume);
    let volume = Volume::open(config).unwrap();
    let (queue, stats) = (volume.open_queue().unwrap(), ChannelStats::new());
    let (config, clock) = (ChannelConfig::default(), ManualClock::new());
    let (geometry, limits) = (volume.geometry(), volume.limits());
    let mut channel = Stack::new(config, geometry, limits, queue, clock, stats);
    let region = Region::alloc(READS as usize * 4096);
    let id = channel.register(Arc::clone(&region));
    let read = |number: u64| {
        let buf = BufRef { region: id, offset: number * 4096 };
        Bio::read(sector(number), 8, buf)
    };
    let reads: Vec<Bio> = (0..READS).map(read).collect();
    assert_eq!(channel.push(&reads), reads.len());
    channel.submit();
    let (mut done, mut calls) = (Vec::new(), 0);
    while done.len() < reads.len() {
        assert_eq!(channel.due(), Due::At(Nanos(0)), "after {} reads", done.len());
        assert!(!channel.may_sleep(), "after {} reads", done.len());
        channel.reap(&mut done);
        calls += 1;
        assert!(calls <= reads.len(), "{} of {} have ended", done.len(), reads.len());
    }
    assert!(calls > 1, "all at once");
    assert_eq!(channel.due(), Due::Never);
    assert!(done.iter().all(|end| end.status.is_ok()));
    let mut found = [0; 4096];
    for number in 0..READS {
        region.read(number * 4096, &mut found);
        assert_eq!(found, [number as u8 + 1; 4096], "read {number}");
    }
}

#[test]
fn a_pool_belongs_to_one_process_and_a_volume_to_one_device() {
    let place = place("locked");
    let path = place.path().join("pool");
    let volume = Volume::open(config(path.clone())).unwrap();
    let again = Volume::open(config(path.clone())).unwrap_err();
    assert_eq!(again.to_string(), "`v0` is a device of this process already");
    let other = VolumeConfig { name: "v1".to_owned(), size: 1 << 20, ..config(path.clone()) };
    let other = Volume::open(other).unwrap();
    // Lock the file as another process would.
    drop((volume, other));
    let lock = std::fs::File::open(path.join("lock")).unwrap();
    lock.try_lock().expect("the pool is closed");
    let error = Volume::open(config(path.clone())).unwrap_err().to_string();
    assert!(error.contains("is in use by another process"), "{error}");
    drop(lock);
    let error = Volume::open(VolumeConfig { size: 1 << 30, ..config(path.clone()) }).unwrap_err();
    assert!(error.to_string().starts_with("invalid size `1G`: expected 64M"));
    let error = Volume::open(VolumeConfig { volblocksize: 4096, ..config(path.clone()) });
    assert!(error.unwrap_err().to_string().starts_with("invalid volblocksize `4k`"));
    // The volume has blocks of 4 KiB, which need not be stated again; the default for a new volume
    // is longer.
    let odd = VolumeConfig { name: "odd".to_owned(), size: 20 << 10, ..config(path.clone()) };
    let error = Volume::open(odd.clone()).unwrap_err().to_string();
    assert!(error.starts_with("invalid size `20k`: expected a multiple of"), "{error}");
    drop(Volume::open(VolumeConfig { volblocksize: 4096, ..odd.clone() }).unwrap());
    drop(Volume::open(odd).unwrap());
    let missing = VolumeConfig { name: "v2".to_owned(), size: 0, ..config(path) };
    let error = Volume::open(missing).unwrap_err().to_string();
    assert!(error.starts_with("size is missing: expected the size of `v2`"), "{error}");
}

#[test]
fn concurrent_openings_share_one_pool() {
    let place = place("at-once");
    let path = place.path().join("pool");
    for _ in 0..3 {
        let all: Vec<_> = std::thread::scope(|scope| {
            let open = || Running::open(&path, Options::default()).unwrap();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|it| Arc::ptr_eq(it, &all[0])));
    }
}

#[test]
fn a_pool_that_is_not_ours_is_refused_and_left_alone() {
    let place = place("refused");
    let path = place.path().join("pool");
    drop(Volume::open(config(path.clone())).unwrap());
    let file = path.join(FILE);
    let good = std::fs::read(&file).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        let error = Volume::open(config(path.clone())).unwrap_err().to_string();
        assert_eq!(std::fs::read(&file).unwrap(), bytes, "left alone");
        error
    };
    let mut newer = good.clone();
    for slot in newer.chunks_mut(SLOT_BYTES) {
        slot[16] = 9;
        let crc = bytes::crc(&slot[16..BYTES]);
        slot[8..16].copy_from_slice(&crc.to_le_bytes());
    }
    assert_eq!(refused(&newer), "`superblock` is of version 9; this program knows version 5");
    let mut damaged = good.clone();
    damaged[30] ^= 1;
    damaged[SLOT_BYTES + 30] ^= 1;
    assert!(refused(&damaged).starts_with("`superblock` is damaged: its checksum is 0x"));
    assert!(refused(&good[..100]).contains("`superblock` ends after 100 bytes"));
    std::fs::write(&file, &good).unwrap();
    drop(Volume::open(config(path.clone())).unwrap());
    std::fs::remove_file(&file).unwrap();
    let error = Volume::open(config(path.clone())).unwrap_err().to_string();
    assert!(error.contains("has segments of a pool, but no superblock"), "{error}");
    let error = Volume::open(VolumeConfig { size: 0, ..config(path) }).unwrap_err().to_string();
    assert!(error.contains("has segments of a pool, but no superblock"), "{error}");
}

/// Regression: a discard of whole blocks and parts of two others needs memory for both parts. With
/// memory for only one it failed half done.
#[test]
fn zeros_with_two_edges_need_no_memory_for_both() {
    let place = place("edges");
    let path = place.path().join("pool");
    let config = VolumeConfig { volblocksize: 64 << 10, ..config(path) };
    let options = Options { memory_bytes: 192 << 10, ..Options::default() };
    let volume = Volume::open_with(config, options).unwrap();
    let mut io = handle(&volume);
    let (block, mut found) = (64_usize << 10, vec![0; 64 << 10]);
    for op in [Op::Discard, Op::WriteZeroes] {
        (0..4).for_each(|at| io.write(Sector(at * 128), &vec![7; block], Flags::NONE).unwrap());
        let bio = Bio::new(op, Sector(64), 3 * 128);
        io.run(bio).unwrap();
        for at in 0..4 {
            io.read(Sector(at * 128), &mut found).unwrap();
            let zeros = match at {
                0 => block / 2..block,
                3 => 0..block / 2,
                _ => 0..block,
            };
            let is_right = |(at, byte)| byte == if zeros.contains(&at) { 0 } else { 7 };
            assert!(found.iter().copied().enumerate().all(is_right), "block {at}");
        }
    }
}

/// Several threads write many times the size of a volume in a small pool: cleaning runs
/// concurrently, a snapshot stays unchanged, and nothing is damaged.
#[test]
fn a_small_pool_takes_any_amount_of_writes() {
    let place = place("clean");
    let path = place.path().join("pool");
    let (size, threads) = (8_u64 << 20, 4_u64);
    let config = VolumeConfig { size, compress: Compression::None, ..config(path.clone()) };
    let options = Options {
        segment_bytes: 1 << 20,
        segments_max: 48,
        checkpoint_bytes: 2 << 20,
        memory_bytes: 4 << 20,
        ..Options::default()
    };
    let volume = Volume::open_with(config.clone(), options).unwrap();
    let write = |io: &mut Io, at: u64, byte: u8, flags| {
        io.write(Sector(at / 512), &[byte; 16 << 10], flags).unwrap();
    };
    let mut io = handle(&volume);
    (0..size / 16_384).for_each(|block| write(&mut io, block * 16_384, 255, Flags::NONE));
    drop(io);
    volume.running().snapshot("v0@full").unwrap();
    let work = |thread: u64| {
        let (mut io, mut random) = (handle(&volume), fastrand::Rng::with_seed(thread));
        let mut model = vec![255; (size / 16_384 / threads) as usize];
        for round in 0..2000_u32 {
            let block = random.usize(..model.len());
            let flags = if round % 16 == 0 { Flags::FUA } else { Flags::NONE };
            let at = (block as u64 * threads + thread) * 16_384;
            model[block] = (round % 251) as u8;
            write(&mut io, at, model[block], flags);
        }
        model
    };
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = (0..threads).map(|it| scope.spawn(move || work(it))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let look = |volume: &Arc<Volume>| {
        let (mut io, mut found) = (handle(volume), vec![0; 16 << 10]);
        for block in 0..size / 16_384 {
            io.read(Sector(block * 32), &mut found).unwrap();
            let byte = models[(block % threads) as usize][(block / threads) as usize];
            assert!(found.iter().all(|it| *it == byte), "block {block}");
        }
    };
    look(&volume);
    assert!(volume.running().pool().counts().all <= 48);
    volume.running().clone_of("v0@full", "twin").unwrap();
    drop(volume);
    let report = check(&path, &mut |_| {}).unwrap();
    assert_eq!((report.volumes, report.damaged), (3, 0));
    look(&Volume::open_with(config.clone(), options).unwrap());
    let twin = VolumeConfig { name: "twin".to_owned(), ..config };
    let twin = Volume::open_with(twin, options).unwrap();
    let (mut io, mut found) = (handle(&twin), vec![0; 16 << 10]);
    for block in 0..size / 16_384 {
        io.read(Sector(block * 32), &mut found).unwrap();
        assert!(found.iter().all(|it| *it == 255), "block {block} of the snapshot");
    }
}

/// Data written with one compression setting can be read with every other.
#[test]
fn zstd_and_lz4_live_side_by_side() {
    let place = place("zstd");
    let path = place.path().join("pool");
    let ways = [Compression::Zstd(3), Compression::Lz4, Compression::Zstd(9), Compression::None];
    let block = |round: usize, at: usize| -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed((round * 100 + at) as u64);
        // Every third block is incompressible.
        match at % 3 {
            0 => std::iter::repeat_with(|| random.u8(..)).take(16 << 10).collect(),
            _ => std::iter::repeat_with(|| random.u8(..4)).take(16 << 10).collect(),
        }
    };
    for (round, compress) in ways.into_iter().enumerate() {
        let volume = Volume::open(VolumeConfig { compress, ..config(path.clone()) }).unwrap();
        let mut io = handle(&volume);
        for at in 0..30 {
            io.write(Sector((round * 30 + at) as u64 * 32), &block(round, at), Flags::NONE)
                .unwrap();
        }
    }
    let volume = Volume::open(config(path.clone())).unwrap();
    let (mut io, mut found) = (handle(&volume), vec![0; 16 << 10]);
    for round in 0..ways.len() {
        for at in 0..30 {
            io.read(Sector((round * 30 + at) as u64 * 32), &mut found).unwrap();
            assert!(found == block(round, at), "round {round}, block {at}");
        }
    }
    drop((io, volume));
    let report = check(&path, &mut |_| {}).unwrap();
    assert_eq!((report.blocks, report.damaged), (120, 0));
}

/// A damaged map page makes only its own blocks unreadable, and `check` names it.
#[test]
fn a_damaged_page_of_the_map_is_named_and_the_rest_is_there() {
    let place = place("page");
    let path = place.path().join("pool");
    let config = VolumeConfig { volblocksize: 4096, compress: Compression::None, ..config(path) };
    let options = Options { segment_bytes: 1 << 20, ..Options::default() };
    let (near, far) = (Sector(5 * 8), Sector((10 * 256 + 7) * 8));
    let volume = Volume::open_with(config.clone(), options).unwrap();
    let mut io = handle(&volume);
    io.write(near, &[1; 4096], Flags::NONE).unwrap();
    io.write(far, &[2; 4096], Flags::NONE).unwrap();
    drop((io, volume));
    // Damage the leaf that contains only block 7 of its range.
    let mut damaged = 0;
    for entry in std::fs::read_dir(&config.path).unwrap() {
        let file = entry.unwrap().path();
        let mut bytes = std::fs::read(&file).unwrap();
        let is_leaf = |bytes: &[u8]| {
            let set = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
            let set: Vec<usize> = set.map(|(at, _)| at / 16).collect();
            !set.is_empty() && set.iter().all(|at| *at == 7)
        };
        let Some(at) = bytes.chunks(4096).position(|page| page.len() == 4096 && is_leaf(page))
        else {
            continue;
        };
        bytes[at * 4096 + 7 * 16 + 9] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        damaged += 1;
    }
    assert_eq!(damaged, 1);
    let volume = Volume::open_with(config.clone(), options).unwrap();
    let (mut io, mut found) = (handle(&volume), vec![0; 4096]);
    io.read(near, &mut found).unwrap();
    assert_eq!(found, [1; 4096]);
    assert_eq!(io.read(far, &mut found), Err(Status::Protection));
    assert_eq!(io.write(far, &[3; 4096], Flags::FUA), Err(Status::Protection));
    io.write(near, &[4; 4096], Flags::FUA).unwrap();
    drop((io, volume));
    let report = check(&config.path, &mut |_| {}).unwrap();
    assert_eq!((report.blocks, report.damaged), (1, 1));
    assert!(report.damage[0].what.contains("page of the map"), "{report:?}");
    assert_eq!(report.damage[0].block, 10 * 256);
}
