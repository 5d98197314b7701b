//! A pool on a block device, and in a file that takes the place of one: the contract, sectors of
//! both lengths, what is refused, what is discarded.
#![allow(clippy::unwrap_used)] // A test may.

mod loop_device;
mod place;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::{ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Monotonic;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Bio, Device, Flags, Op, Sector, Status};
use blockyard_sim::contract;
use blockyard_volume::check::check;
use blockyard_volume::device::is_pool;
use blockyard_volume::record::Body;
use blockyard_volume::store::StoreKind;
use blockyard_volume::{Compression, Options, Running, SyncMode, Volume, VolumeConfig};

use loop_device::{LoopDevice, run};
use place::Place;

const MIB: u64 = 1 << 20;

fn place(name: &str) -> Place {
    Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn config(path: &Path, name: &str, size: u64) -> VolumeConfig {
    VolumeConfig {
        name: name.to_owned(),
        size,
        volblocksize: 4096,
        compress: Compression::Lz4,
        ..VolumeConfig::new(path, name)
    }
}

fn door(volume: &Arc<Volume>) -> Io {
    let config = ChannelConfig::default();
    let (sched, queue) = (NoneScheduler::new(256), volume.open_queue().unwrap());
    let (geometry, limits) = (volume.geometry(), volume.limits());
    let stats = ChannelStats::new();
    let stack = Stack::new(config, geometry, limits, sched, queue, Monotonic, stats);
    Io::new(Box::new(stack), MIB as usize)
}

fn refused(path: &Path, options: Options) -> String {
    Running::open(path, options).unwrap_err().to_string()
}

/// Volumes one after the other in the pool of one device, which all of them share.
fn contract_on(name: &str, sector: u32, align: u32, store: StoreKind) {
    let place = place(&format!("disk{sector}{align}{store}"));
    let device = LoopDevice::new(&place.path().join("image"), 1 << 30, sector);
    let options = Options { align, store, ..Options::default() };
    let running = Running::open(device.path(), options).unwrap();
    assert_eq!(running.pool().align(), align.max(sector));
    assert_eq!(running.pool().segments().bytes(), 8 << 20, "a small disk has shorter segments");
    let path = device.path().to_owned();
    contract::run(&contract::Subject::plain(name, true, move || {
        let name = place.fresh().file_name().unwrap().to_string_lossy().into_owned();
        let sync = SyncMode::Standard;
        Volume::open(VolumeConfig { sync, ..config(&path, &format!("v{name}"), 8 * MIB) }).unwrap()
    }));
    drop(running);
    assert_eq!(check(device.path(), &mut |_| {}).unwrap().damaged, 0);
}

#[test]
fn the_contract_with_sectors_of_512_bytes() {
    contract_on("disk, 512 of 512", 512, 512, StoreKind::Auto);
}

#[test]
fn the_contract_with_sectors_of_4096_bytes() {
    contract_on("disk, 4096 of 4096", 4096, 512, StoreKind::Auto);
}

#[test]
fn the_contract_by_calls_that_block() {
    contract_on("disk, 4096 of 512, threads", 512, 4096, StoreKind::Threads);
}

/// Writes MiB after MiB, each by its number, and answers how many there was room for.
fn fill(volume: &Arc<Volume>, count: u64) -> u64 {
    let mut io = door(volume);
    let mut bytes = vec![0; MIB as usize];
    let refused = (0..count).find(|number| {
        fastrand::Rng::with_seed(*number).fill(&mut bytes);
        io.write(Sector(number * 2048), &bytes, Flags::FUA).is_err()
    });
    refused.unwrap_or(count)
}

fn verify(volume: &Arc<Volume>, count: u64) {
    let mut io = door(volume);
    let (mut bytes, mut found) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    for number in 0..count {
        fastrand::Rng::with_seed(number).fill(&mut bytes);
        io.read(Sector(number * 2048), &mut found).unwrap();
        assert!(bytes == found, "MiB {number}");
    }
}

/// Waits for checkpoints: what nobody needs is free behind the second one.
fn checkpoints(running: &Running, count: usize) {
    for _ in 0..count {
        let pool = running.pool();
        assert_eq!(pool.wait(pool.ask_for(Body::Checkpoint)), Status::Ok);
    }
}

#[test]
fn what_is_written_is_there_again_and_a_longer_disk_is_used() {
    let place = place("longer");
    let image = place.path().join("image");
    let device = LoopDevice::new(&image, 128 * MIB, 512);
    let open = |path: &Path| Volume::open(config(path, "v0", 256 * MIB)).unwrap();
    let volume = open(device.path());
    let had = fill(&volume, 256);
    assert!((40..128).contains(&had), "{had} MiB on a disk of 128");
    verify(&volume, had);
    drop(volume);
    let volume = open(device.path());
    verify(&volume, had);
    drop(volume);
    drop(device);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(400 * MIB).unwrap();
    let device = LoopDevice::on(&image, 512);
    let volume = open(device.path());
    assert_eq!(fill(&volume, 256), 256, "there is room for all of it now");
    drop(volume);
    drop(device);
    // A disk that has become shorter has lost what was there.
    std::fs::File::options().write(true).open(&image).unwrap().set_len(70 * MIB).unwrap();
    let device = LoopDevice::on(&image, 512);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("segment") && error.contains("wanted"), "{error}");
}

#[test]
fn what_nobody_needs_is_discarded() {
    let place = place("discard");
    let image = place.path().join("image");
    let device = LoopDevice::new(&image, 512 * MIB, 4096);
    let running = Running::open(device.path(), Options::default()).unwrap();
    let volume = Volume::open(config(device.path(), "v0", 256 * MIB)).unwrap();
    assert_eq!(fill(&volume, 160), 160);
    checkpoints(&running, 1);
    let allocated = || std::fs::metadata(&image).unwrap().blocks() * 512;
    let full = allocated();
    assert!(full >= 160 * MIB, "{full} bytes");
    door(&volume).run(Bio::new(Op::Discard, Sector(0), 256 * MIB / 512)).unwrap();
    checkpoints(&running, 4);
    let left = allocated();
    assert!(left < full / 3, "{left} of {full} bytes are still there");
    assert_eq!(fill(&volume, 100), 100);
    verify(&volume, 100);
}

/// Options under which what is there does not count.
fn consent() -> Options {
    Options { consent: true, ..Options::default() }
}

#[test]
fn what_somebody_else_has_is_refused_and_left_alone() {
    let place = place("foreign");
    let device = LoopDevice::new(&place.path().join("image"), 128 * MIB, 512);
    run("mke2fs", &["-q", "-t", "ext4", device.name()]);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("wanted an empty disk; it has an ext2, ext3 or ext4"), "{error}");
    assert!(error.contains("--force") && error.contains(device.name()), "{error}");
    assert!(!is_pool(device.path()));
    run("e2fsck", &["-fn", device.name()]);

    let at = place.path().join("at");
    std::fs::create_dir(&at).unwrap();
    run("mount", &[device.name(), at.to_str().unwrap()]);
    let error = refused(device.path(), consent());
    run("umount", &[at.to_str().unwrap()]);
    let wanted = format!("a device that nothing uses; it is mounted at `{}`", at.display());
    assert!(error.contains(&wanted), "{error}");
    run("e2fsck", &["-fn", device.name()]);

    drop(Running::open(device.path(), consent()).unwrap());
    assert!(is_pool(device.path()));
    // Consent is never one to lose a pool.
    let volume = |options| Volume::open_with(config(device.path(), "v0", MIB), options).unwrap();
    assert_eq!(fill(&volume(Options::default()), 1), 1);
    verify(&volume(consent()), 1);

    // Nor is a pool of which the beginning was overwritten an empty disk.
    assert_eq!(fill(&volume(Options::default()), 1), 1);
    let file = std::fs::File::options().write(true).open(device.path()).unwrap();
    file.write_all_at(&vec![0; 4 << 20], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("wanted an empty disk; it has data, at byte"), "{error}");

    // Data at the very end belong to somebody too.
    let other = LoopDevice::new(&place.path().join("other"), 128 * MIB + 512, 512);
    let file = std::fs::File::options().write(true).open(other.path()).unwrap();
    file.write_all_at(b"x", 128 * MIB + 511).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let error = refused(other.path(), Options::default());
    assert!(error.contains("it has data near its end, at byte 134218239"), "{error}");
}

#[test]
fn a_disk_that_will_not_do_is_refused_by_name() {
    let place = place("unfit");
    let fresh = |bytes, sector| LoopDevice::new(&place.fresh(), bytes, sector);
    let small = fresh(20 * MIB, 512);
    let error = refused(small.path(), consent());
    let name = small.name();
    let wanted = format!(
        "path: `{name}, which has 20971520 bytes` will not do: wanted a disk of 68157440 bytes at \
         least"
    );
    assert_eq!(error, wanted);

    let image = place.fresh();
    let device = LoopDevice::new(&image, 128 * MIB, 512);
    drop(Running::open(device.path(), Options { align: 512, ..Options::default() }).unwrap());
    drop(device);
    let device = LoopDevice::on(&image, 4096);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("whose sectors have 4096 bytes"), "{error}");
    assert!(error.contains("wanted a disk with sectors of 512 bytes"), "{error}");

    let missing = Path::new("/dev/blockyard-is-not-there");
    let error = refused(missing, Options::default());
    assert!(error.ends_with("wanted a block device that is there"), "{error}");
    assert!(!missing.exists());
    let error = refused(Path::new("/dev/null"), Options::default());
    assert!(error.ends_with("wanted a directory, a block device or a file"), "{error}");
}

/// A file that is there takes the place of a disk; nobody makes one.
#[test]
fn a_file_does_as_a_disk() {
    let place = place("file");
    let path: PathBuf = place.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(96 * MIB + 100).unwrap();
    let volume = Volume::open(config(&path, "v0", 64 * MIB)).unwrap();
    let meta = std::fs::metadata(&path).unwrap();
    assert!(meta.blocks() * 512 >= 96 * MIB, "its bytes are there before they are needed");
    assert_eq!(fill(&volume, 20), 20);
    // Another process has its own descriptor, as this one.
    let other = std::fs::File::open(&path).unwrap();
    assert!(other.try_lock().is_err());
    drop(volume);
    // A program that another thread starts just now has every lock too until it is executed.
    assert!((0..10_000_000).any(|_| other.try_lock().is_ok()), "the pool is closed");
    let error = refused(&path, Options::default());
    assert!(error.contains("is in use by"), "{error}");
    drop(other);
    verify(&Volume::open(config(&path, "v0", 0)).unwrap(), 20);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 96 * MIB + 100);
    assert_eq!(check(&path, &mut |_| {}).unwrap().damaged, 0);

    let text = place.path().join("text");
    std::fs::write(&text, vec![b'x'; 80 << 20]).unwrap();
    let error = refused(&text, Options::default());
    assert!(error.contains("it has data, at byte 0"), "{error}");
}
