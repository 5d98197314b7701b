//! A volume on a full real file system, and in a nearly full pool: acknowledged writes are there, a
//! discard frees space, and cleaning keeps up.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, BufRef, Flags, Op, Region, Sector, Status};
use blockyard_testing::channel::{channel, handle};
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::activity::Activity;
use blockyard_volume::{Compression, Options, SyncMode, Volume, VolumeConfig};

const BLOCK: usize = 64 << 10;
const BLOCKS: u64 = 2048;

/// Unmounts the directory when dropped.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // An io_uring releases its files a moment after it is closed, so the unmount is lazy.
        _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {text}");
}

fn config(directory: &Path, name: &str, size: u64, volblocksize: u32) -> VolumeConfig {
    VolumeConfig {
        size,
        volblocksize,
        compress: Compression::None,
        sync: SyncMode::Standard,
        ..VolumeConfig::new(directory, name)
    }
}

/// Options of a pool of small segments.
fn options(segments_max: usize) -> Options {
    Options {
        segment_bytes: 1 << 20,
        segments_max,
        checkpoint_bytes: 4 << 20,
        memory_bytes: 8 << 20,
        ..Options::default()
    }
}

fn open(directory: &Path) -> Arc<Volume> {
    let config = config(directory, "v0", BLOCKS * BLOCK as u64, BLOCK as u32);
    Volume::open_with(config, options(1 << 20)).unwrap()
}

fn write(io: &mut Io, block: u64, byte: u8) -> Result<(), Status> {
    let data = [byte; BLOCK];
    io.write(Sector(block * BLOCK as u64 / 512), &data, Flags::NONE)
}

fn flush(io: &mut Io) {
    io.run(Bio::new(Op::Flush, Sector(0), 0)).unwrap();
}

fn look(volume: &Arc<Volume>, model: &[u8]) {
    let (mut io, mut found) = (handle(volume), vec![0; BLOCK]);
    for (block, byte) in (0..).zip(model) {
        io.read(Sector(block * BLOCK as u64 / 512), &mut found).unwrap();
        assert!(found.iter().all(|it| it == byte), "block {block}: expected {byte}");
    }
}

/// Fills the file system, discards half, and writes again; twice, so that reused space fills up
/// too.
fn fill_and_discard(directory: &Path) {
    let mut volume = open(directory);
    let mut model = vec![0_u8; BLOCKS as usize];
    let mut random = fastrand::Rng::with_seed(5);
    for round in 0..2 {
        let mut io = handle(&volume);
        let mut refused = 0;
        while refused < 400 {
            let (block, byte) = (random.u64(..BLOCKS), random.u8(1..));
            match write(&mut io, block, byte) {
                Ok(()) => model[block as usize] = byte,
                Err(status) => {
                    assert_eq!(status, Status::NoSpc);
                    refused += 1;
                }
            }
            if refused % 16 == 1 {
                flush(&mut io);
            }
        }
        flush(&mut io);
        look(&volume, &model);
        // The next opening finds the same contents, and is as full.
        drop((io, volume));
        volume = open(directory);
        look(&volume, &model);
        let mut io = handle(&volume);
        let half = BLOCKS / 2;
        io.run(Bio::new(Op::Discard, Sector(0), half * BLOCK as u64 / 512)).unwrap();
        flush(&mut io);
        model[..half as usize].fill(0);
        for block in 0..64 {
            let status = write(&mut io, block, 7);
            let counts = volume.running().pool().counts();
            assert_eq!(status, Ok(()), "round {round}, block {block}: {counts:?}");
            model[block as usize] = 7;
        }
        flush(&mut io);
        look(&volume, &model);
    }
    drop(volume);
    look(&open(directory), &model);
}

#[test]
fn a_full_file_system_in_memory() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "full-tmpfs");
    let at = place.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=48m", "tmpfs", at.to_str().unwrap()]);
    let _mounted = Mounted(&at);
    fill_and_discard(&at.join("pool"));
}

#[test]
fn a_full_disk() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "full-ext4");
    let (image, at) = (place.path().join("image"), place.path().join("mount"));
    std::fs::create_dir(&at).unwrap();
    std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    run("mkfs.ext4", &["-q", "-m", "0", image.to_str().unwrap()]);
    run("mount", &["-o", "loop", image.to_str().unwrap(), at.to_str().unwrap()]);
    let _mounted = Mounted(&at);
    fill_and_discard(&at.join("pool"));
}

/// Other programs fill the rest of a pool's file system. Writes are refused while the existing
/// segments still contain enough garbage, so that the data in them can be overwritten indefinitely.
#[test]
fn a_pool_whose_file_system_others_fill_is_not_too_full_to_be_cleaned() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "full-others");
    let at = place.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=96m", "tmpfs", at.to_str().unwrap()]);
    let _mounted = Mounted(&at);
    let volume = open(&at.join("pool"));
    let mut io = handle(&volume);
    let mut random = fastrand::Rng::with_seed(6);
    let mut order: Vec<u64> = (0..BLOCKS).collect();
    random.shuffle(&mut order);
    let mut order = order.into_iter();
    let mut written: Vec<u64> = order.by_ref().take(20 << 4).collect();
    for block in &written {
        assert_eq!(write(&mut io, *block, 1), Ok(()));
    }
    // Wait until no more segments are made ahead.
    let mut counts = [0; 100];
    while counts.iter().any(|count| *count != counts[0]) || counts[0] == 0 {
        assert_eq!(write(&mut io, written[0], 1), Ok(()));
        flush(&mut io);
        counts.rotate_left(1);
        counts[99] = volume.running().pool().counts().all;
    }
    let others = std::fs::File::create(at.join("others")).unwrap();
    let zeros = vec![0; 64 << 10];
    while std::io::Write::write_all(&mut &others, &zeros).is_ok() {}
    for block in order {
        match write(&mut io, block, 2) {
            Ok(()) => written.push(block),
            Err(status) => {
                assert_eq!(status, Status::NoSpc);
                break;
            }
        }
    }
    assert!(written.len() < BLOCKS as usize, "it is not full");
    for block in written.drain(..4) {
        let (at, len) = (Sector(block * BLOCK as u64 / 512), BLOCK as u64 / 512);
        io.run(Bio::new(Op::Discard, at, len)).unwrap();
    }
    for round in 0..2000 {
        let block = written[random.usize(..written.len())];
        let status = write(&mut io, block, 3);
        let (counts, len) = (volume.running().pool().counts(), written.len());
        assert_eq!(status, Ok(()), "{round}, {len} blocks: {counts:?}");
    }
    flush(&mut io);
}

/// Writes one block at each place, 32 in flight; each write of a place has another byte.
fn scatter(volume: &Arc<Volume>, places: impl Iterator<Item = u64>, model: &mut [u8]) {
    const DEPTH: usize = 32;
    let mut channel = channel(volume);
    let buffers = (0..=255).map(|byte| {
        let region = Region::alloc(4096);
        region.write(0, &[byte; 4096]);
        channel.register(region)
    });
    let buffers: Vec<_> = buffers.collect();
    let (mut places, mut out, mut under_way) = (places.peekable(), Vec::new(), HashSet::new());
    while places.peek().is_some() || !under_way.is_empty() {
        let mut bios = Vec::new();
        // The order of two concurrent writes to one place would be unknown.
        while under_way.len() < DEPTH
            && let Some(place) = places.next_if(|place| !under_way.contains(place))
        {
            let byte = model[place as usize].wrapping_add(1);
            let buffer = BufRef { region: buffers[usize::from(byte)], offset: 0 };
            let bio = Bio::write(Sector(place * 8), 8, buffer).with_flags(Flags::FUA);
            bios.push(bio.with_user_data(place));
            model[place as usize] = byte;
            under_way.insert(place);
        }
        assert_eq!(channel.push(&bios), bios.len());
        channel.submit();
        out.clear();
        if channel.reap(&mut out) == 0 {
            channel.wait(None);
        }
        for completion in &out {
            assert_eq!(completion.status, Status::Ok, "{:?}", volume.running().pool().counts());
            under_way.remove(&completion.user_data);
        }
    }
}

/// Four fifths of a pool are blocks of 4 KiB that are overwritten at random. Cleaning keeps up
/// concurrently with the writes, none of which is refused. It moves little more than any cleaner
/// that empties the emptiest segments must (docs/measurements/volume.md). Reserves and moves in
/// flight are a tenth of a pool as small as this one, so the write amplification is 4.4 to 4.8.
/// Regression: it was 12.6 in a smaller pool, with a checkpoint for every few segments.
#[test]
fn a_pool_that_is_four_fifths_full_is_cleaned_during_writes() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "four-fifths");
    let path = place.path().join("pool");
    let segments = 320;
    let blocks = segments * 256 / 5 * 4;
    let config = config(&path, "v0", blocks * 4096, 4096);
    let options = Options { checkpoint_bytes: 64 << 20, ..options(segments as usize) };
    let volume = Volume::open_with(config, options).unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut model = vec![0_u8; blocks as usize];
    let activity = || volume.running().pool().activity();
    scatter(&volume, 0..blocks, &mut model);
    // Reach the steady state first, beyond the phase in which whole segments are garbage.
    scatter(&volume, (0..blocks).map(|_| random.u64(..blocks)), &mut model);
    let before = activity();
    scatter(&volume, (0..blocks / 4).map(|_| random.u64(..blocks)), &mut model);
    let after = activity();
    let device = |it: &Activity| it.log_bytes + it.cold_bytes + it.page_bytes;
    let data = after.data_bytes - before.data_bytes;
    let hundredths = (device(&after) - device(&before)) * 100 / data;
    let checkpoints = after.checkpoints - before.checkpoints;
    let cleaned = after.cleaned - before.cleaned;
    let found = format!("{hundredths} hundredths, {cleaned} cleaned, {checkpoints} checkpoints");
    assert!(hundredths < 525, "{found}");
    // Emptied segments became free without a checkpoint for every few of them.
    assert!(cleaned > 8 * checkpoints, "{found}");
    let (mut io, mut found) = (handle(&volume), vec![0; 4096]);
    for (block, byte) in (0..).zip(&model) {
        io.read(Sector(block * 8), &mut found).unwrap();
        assert!(found.iter().all(|it| it == byte), "block {block}");
    }
    // The pool's status counts pages in addition to blocks, and excludes reserves from the
    // available space.
    let status = volume.running().status().unwrap();
    let (used, space) = (status.used_bytes, status.available_bytes);
    let (written, eighth) = (blocks * 4096, segments << 17);
    assert!(used > written && used < written + written / 50, "{used} of {written}");
    assert!(space > 0 && used + space < 7 * eighth && used + space > 6 * eighth, "{used}, {space}");
}

/// Other volumes cannot use a volume's reservation, and reservations cannot exceed the free space.
#[test]
fn a_reservation_is_kept_for_its_volume() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "reserve");
    let path = place.path().join("pool");
    let size = 64 << 20;
    let own = VolumeConfig { reservation: 24 << 20, ..config(&path, "own", size, BLOCK as u32) };
    let own = Volume::open_with(own, options(64)).unwrap();
    let running = Arc::clone(own.running());
    let other = config(&path, "other", size, BLOCK as u32);
    let other = Volume::open_with(other, options(64)).unwrap();
    let error = running.create_reserved("more", size, 0, 60 << 20, None).unwrap_err().to_string();
    assert!(error.starts_with("invalid reservation `60M`"), "{error}");
    let error = running.reserve("own", 65 << 20).unwrap_err().to_string();
    assert!(error.contains("the size at most"), "{error}");
    let mut io = handle(&other);
    let taken = (0..1024).take_while(|block| write(&mut io, *block, 1).is_ok()).count() as u64;
    flush(&mut io);
    assert!((100..(62 - 24) << 4).contains(&taken), "{taken} blocks");
    // All of the reservation can be written, and overwritten.
    drop(io);
    let mut io = handle(&own);
    for block in (0..24 << 4).chain(0..16) {
        let status = write(&mut io, block, 2);
        assert_eq!(status, Ok(()), "block {block}: {:?}", running.pool().counts());
    }
    flush(&mut io);
    // A snapshot would need the reserved space a second time.
    let error = running.snapshot("own@full").unwrap_err().to_string();
    assert!(error.contains("space"), "{error}");
    running.reserve("own", 0).unwrap();
    drop(io);
    let mut io = handle(&other);
    io.run(Bio::new(Op::Discard, Sector(0), (16 << 20) / 512)).unwrap();
    flush(&mut io);
    running.snapshot("own@full").unwrap();
    let list = running.pool().list();
    assert!(list.iter().all(|meta| meta.reserved_bytes == 0), "{list:?}");
    running.destroy("own@full").unwrap();
    drop(io);
    let mut io = handle(&other);
    io.run(Bio::new(Op::Discard, Sector(0), size / 512)).unwrap();
    let mut found = vec![0; BLOCK];
    io.read(Sector(0), &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
    running.reserve("own", 8 << 20).unwrap();
    drop((io, own));
    drop((other, running));
    // The reservation is durable.
    let own = Volume::open_with(config(&path, "own", 0, 0), options(64)).unwrap();
    assert_eq!(own.running().pool().find("own").unwrap().reserved_bytes(), 8 << 20);
}

/// Regression: space that only a destroyed snapshot had kept stayed counted as live as long as only
/// a reservation needed it. The next snapshot was then refused permanently.
#[test]
fn space_that_a_destroyed_snapshot_held_can_be_reserved_again() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "reserve-again");
    let path = place.path().join("pool");
    let own = config(&path, "own", 64 << 20, BLOCK as u32);
    let own = Volume::open_with(own, options(64)).unwrap();
    let running = Arc::clone(own.running());
    // One snapshot of the whole volume fits, and hardly more.
    let bytes = running.pool().unreserved_bytes() / 2 - (1 << 20);
    let blocks = bytes / BLOCK as u64;
    running.reserve("own", blocks * BLOCK as u64).unwrap();
    let mut io = handle(&own);
    for block in 0..blocks {
        assert_eq!(write(&mut io, block, 1), Ok(()));
    }
    running.snapshot("own@a").unwrap();
    for round in 1..4 {
        for block in 0..4 << 4 {
            assert_eq!(write(&mut io, block, round), Ok(()));
        }
        flush(&mut io);
        let (old, new) = if round % 2 == 1 { ("own@a", "own@b") } else { ("own@b", "own@a") };
        running.destroy(old).unwrap();
        let made = running.snapshot(new);
        assert!(made.is_ok(), "{round}: {made:?}, {:?}", running.pool());
    }
    // A larger reservation is refused.
    let error = running.reserve("own", 63 << 20).unwrap_err().to_string();
    assert!(error.starts_with("invalid reservation "), "{error}");
}
