//! A pool on a block device, and in a file used as a disk: the contract suite, sectors of both
//! lengths, refusals, discards, two copies.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::{Bio, Flags, Op, Sector, Status};
use blockyard_store::{PoolPaths, StoreError, StoreKind, is_pool};
use blockyard_testing::channel::handle;
use blockyard_testing::contract;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::record::Body;
use blockyard_volume::{
    Compression, Options, Running, SyncMode, Volume, VolumeConfig, VolumeError,
};
use blockyard_volume_admin::check::check;

use crate::loop_device::{LoopDevice, run};

const MIB: u64 = 1 << 20;

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
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

fn refused(path: &Path, options: Options) -> String {
    Running::open(path, options).unwrap_err().to_string()
}

/// Runs the contract suite on volumes in one pool on a loop device.
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

#[test]
fn the_contract_on_two_disks() {
    let place = place("two");
    let image = |name: &str| LoopDevice::new(&place.path().join(name), 512 * MIB, 512);
    let (first, second) = (image("one"), image("two"));
    let (path, path2) = (first.path().to_owned(), Some(second.path().to_owned()));
    let degraded = false;
    let places = PoolPaths { path2: path2.clone(), degraded, ..PoolPaths::of(&path) };
    let running = Running::open_places(&places, Options::default()).unwrap();
    contract::run(&contract::Subject::plain("two disks", true, move || {
        let name = place.fresh().file_name().unwrap().to_string_lossy().into_owned();
        let config = config(&path, &format!("v{name}"), 8 * MIB);
        Volume::open(VolumeConfig { path2: path2.clone(), ..config }).unwrap()
    }));
    drop(running);
    assert_eq!(check(first.path(), &mut |_| {}).unwrap().damaged, 0);
}

/// Writes each MiB with contents of its own, and returns how many fitted.
fn fill(volume: &Arc<Volume>, count: u64) -> u64 {
    let mut io = handle(volume);
    let mut bytes = vec![0; MIB as usize];
    let refused = (0..count).find(|number| {
        fastrand::Rng::with_seed(*number).fill(&mut bytes);
        io.write(Sector(number * 2048), &bytes, Flags::FUA).is_err()
    });
    refused.unwrap_or(count)
}

fn verify(volume: &Arc<Volume>, count: u64) {
    let mut io = handle(volume);
    let (mut bytes, mut found) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    for number in 0..count {
        fastrand::Rng::with_seed(number).fill(&mut bytes);
        io.read(Sector(number * 2048), &mut found).unwrap();
        assert!(bytes == found, "MiB {number}");
    }
}

/// Makes checkpoints: unreferenced segments are free after the second one.
fn checkpoints(running: &Running, count: usize) {
    for _ in 0..count {
        let pool = running.pool();
        assert_eq!(pool.wait(pool.submit(Body::Checkpoint)), Status::Ok);
    }
}

#[test]
fn written_data_survive_and_a_longer_disk_is_used() {
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
    assert_eq!(fill(&volume, 256), 256, "there is space for all of it now");
    drop(volume);
    drop(device);
    // A disk that became shorter has lost segments.
    std::fs::File::options().write(true).open(&image).unwrap().set_len(70 * MIB).unwrap();
    let device = LoopDevice::on(&image, 512);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("segment") && error.contains("expected"), "{error}");
}

#[test]
fn free_segments_are_discarded() {
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
    handle(&volume).run(Bio::new(Op::Discard, Sector(0), 256 * MIB / 512)).unwrap();
    checkpoints(&running, 4);
    let left = allocated();
    assert!(left < full / 3, "{left} of {full} bytes are still there");
    assert_eq!(fill(&volume, 100), 100);
    verify(&volume, 100);
}

/// Options that allow overwriting data on a disk.
fn consent() -> Options {
    Options { consent: true, ..Options::default() }
}

#[test]
fn a_disk_in_use_is_refused_and_unchanged() {
    let place = place("foreign");
    let device = LoopDevice::new(&place.path().join("image"), 128 * MIB, 512);
    run("mke2fs", &["-q", "-t", "ext4", device.name()]);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("expected an empty disk; it has an ext2, ext3 or ext4"), "{error}");
    assert!(error.contains("--force") && error.contains(device.name()), "{error}");
    assert!(!is_pool(device.path()).unwrap());
    run("e2fsck", &["-fn", device.name()]);

    let at = place.path().join("at");
    std::fs::create_dir(&at).unwrap();
    run("mount", &[device.name(), at.to_str().unwrap()]);
    let error = refused(device.path(), consent());
    run("umount", &[at.to_str().unwrap()]);
    let wanted = format!("a device that is not in use; it is mounted at `{}`", at.display());
    assert!(error.contains(&wanted), "{error}");
    run("e2fsck", &["-fn", device.name()]);

    drop(Running::open(device.path(), consent()).unwrap());
    assert!(is_pool(device.path()).unwrap());
    // Consent never allows overwriting a pool.
    let volume = |options| Volume::open_with(config(device.path(), "v0", MIB), options).unwrap();
    assert_eq!(fill(&volume(Options::default()), 1), 1);
    verify(&volume(consent()), 1);

    // A pool whose beginning was overwritten is not an empty disk either.
    assert_eq!(fill(&volume(Options::default()), 1), 1);
    let file = std::fs::File::options().write(true).open(device.path()).unwrap();
    file.write_all_at(&vec![0; 4 << 20], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("expected an empty disk; it has data, at byte"), "{error}");

    // Data at the very end of a disk count as foreign data too.
    let other = LoopDevice::new(&place.path().join("other"), 128 * MIB + 512, 512);
    let file = std::fs::File::options().write(true).open(other.path()).unwrap();
    file.write_all_at(b"x", 128 * MIB + 511).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let error = refused(other.path(), Options::default());
    assert!(error.contains("it has data near its end, at byte 134218239"), "{error}");
}

#[test]
fn an_unsuitable_disk_is_refused_by_name() {
    let place = place("unfit");
    let fresh = |bytes, sector| LoopDevice::new(&place.fresh(), bytes, sector);
    let small = fresh(20 * MIB, 512);
    let error = refused(small.path(), consent());
    let name = small.name();
    let wanted = format!(
        "invalid path `{name}`: expected a disk of at least 68157440 bytes; it has 20971520"
    );
    assert_eq!(error, wanted);

    let image = place.fresh();
    let device = LoopDevice::new(&image, 128 * MIB, 512);
    drop(Running::open(device.path(), Options { align: 512, ..Options::default() }).unwrap());
    drop(device);
    let device = LoopDevice::on(&image, 4096);
    let error = refused(device.path(), Options::default());
    assert!(error.contains("whose sectors have 4096 bytes"), "{error}");
    assert!(error.contains("expected a disk with sectors of 512 bytes"), "{error}");

    let missing = Path::new("/dev/blockyard-is-not-there");
    let error = refused(missing, Options::default());
    assert!(error.ends_with("expected a block device that is there"), "{error}");
    assert!(!missing.exists());
    let error = refused(Path::new("/dev/null"), Options::default());
    assert!(error.ends_with("expected a directory, a block device or a file"), "{error}");
}

/// An existing file can serve as a disk; the pool does not make one.
#[test]
fn a_file_does_as_a_disk() {
    let place = place("file");
    let path: PathBuf = place.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(96 * MIB + 100).unwrap();
    let volume = Volume::open(config(&path, "v0", 64 * MIB)).unwrap();
    let meta = std::fs::metadata(&path).unwrap();
    assert!(meta.blocks() * 512 >= 96 * MIB, "its bytes are there before they are needed");
    assert_eq!(fill(&volume, 20), 20);
    // This descriptor stands for another process.
    let other = std::fs::File::open(&path).unwrap();
    assert!(other.try_lock().is_err());
    drop(volume);
    // If another thread is just starting a program, the child also holds every lock until its exec.
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

/// Regression: a power cut while a pool is made leaves only magic numbers. Such a disk could
/// neither be opened nor overwritten.
#[test]
fn a_pool_of_which_no_superblock_can_be_read_is_overwritten_with_consent() {
    let place = place("torn");
    let path = place.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(96 * MIB).unwrap();
    drop(Running::open(&path, Options::default()).unwrap());
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0xee; 64], 100).unwrap();
    // One valid slot is enough.
    drop(Running::open(&path, consent()).unwrap());
    for slot in 0..2 {
        file.write_all_at(&[0xee; 64], slot * 4096 + 100).unwrap();
    }
    let error = refused(&path, Options::default());
    assert!(error.contains("`superblock` is damaged"), "{error}");
    let volume = Volume::open_with(config(&path, "v0", 16 * MIB), consent()).unwrap();
    assert_eq!(fill(&volume, 4), 4);
    drop(volume);
    verify(&Volume::open(config(&path, "v0", 0)).unwrap(), 4);
}

/// A volume on two disks.
fn pair(first: &Path, second: &Path) -> VolumeConfig {
    let path2 = Some(second.to_owned());
    VolumeConfig { path2, copies: 2, ..config(first, "v0", 64 * MIB) }
}

fn good(volume: &Volume) -> usize {
    volume.running().status().unwrap().copies.iter().filter(|copy| copy.state.is_good()).count()
}

fn why(config: VolumeConfig) -> String {
    Volume::open(config).map(drop).unwrap_err().to_string()
}

#[test]
fn two_disks_have_two_copies() {
    let place = place("pair");
    let (one, two) = (place.path().join("one"), place.path().join("two"));
    // The disks have different lengths and sector sizes.
    let first = LoopDevice::new(&one, 128 * MIB, 512);
    let second = LoopDevice::new(&two, 300 * MIB, 4096);
    let volume = Volume::open(pair(first.path(), second.path())).unwrap();
    let pool = volume.running().pool();
    assert_eq!((pool.align(), pool.segments().bytes()), (4096, 4 << 20));
    assert_eq!(fill(&volume, 20), 20);
    assert_eq!(good(&volume), 2);
    drop(volume);
    assert!(is_pool(first.path()).unwrap() && is_pool(second.path()).unwrap());
    // Either path is sufficient.
    let alone = Volume::open(config(second.path(), "v0", 0)).unwrap();
    assert_eq!(good(&alone), 2);
    verify(&alone, 20);
    drop(alone);
    // Data that rotted on one disk are read from the other.
    let file = std::fs::File::options().write(true).open(first.path()).unwrap();
    file.write_all_at(&vec![0x77; 12 << 20], 5 << 20).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let volume = Volume::open(pair(first.path(), second.path())).unwrap();
    verify(&volume, 20);
    assert!(volume.running().status().unwrap().copies.iter().any(|copy| copy.repaired > 0));
    assert_eq!(good(&volume), 2);
    drop(volume);
    // One disk is lost, and comes back after more was written.
    drop(first);
    let gone = place.path().join("gone");
    let error = why(pair(&gone, second.path()));
    assert!(error.contains("does not exist") && error.contains("gone"), "{error}");
    let degraded = VolumeConfig { degraded: true, ..pair(&gone, second.path()) };
    let volume = Volume::open(degraded).unwrap();
    assert_eq!((fill(&volume, 30), good(&volume)), (30, 1));
    drop(volume);
    let first = LoopDevice::on(&one, 512);
    let volume = Volume::open(pair(first.path(), second.path())).unwrap();
    volume.running().wait_for_resync();
    assert_eq!(good(&volume), 2);
    verify(&volume, 30);
    drop(volume);
    drop(second);
    let degraded = VolumeConfig { degraded: true, ..pair(first.path(), &gone) };
    let volume = Volume::open(degraded).unwrap();
    verify(&volume, 30);
    drop(volume);
    let second = LoopDevice::on(&two, 4096);
    let volume = Volume::open(pair(first.path(), second.path())).unwrap();
    volume.running().wait_for_resync();
    assert_eq!(good(&volume), 2);
    drop(volume);
    let report = check(first.path(), &mut |_| {}).unwrap();
    assert_eq!((report.damaged, report.copies.len()), (0, 2));
}

#[test]
fn a_second_disk_is_attached() {
    let place = place("attach-disk");
    let image = |name: &str, bytes: u64| {
        let path = place.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    };
    let first = image("first", 128 * MIB);
    let volume = Volume::open(config(&first, "v0", 64 * MIB)).unwrap();
    assert_eq!(fill(&volume, 10), 10);
    drop(volume);
    let attach = |pool: &Path, new: &Path, consent| {
        let running = Running::open(pool, Options::default())?;
        running.attach(new, None, consent).inspect(|()| running.wait_for_resync())
    };
    let no = |new: &Path, consent| attach(&first, new, consent).unwrap_err().to_string();
    let directory = place.path().join("directory");
    std::fs::create_dir(&directory).unwrap();
    assert!(
        no(&directory, true).ends_with(&format!("expected a disk, as `{}` is", first.display()))
    );
    let short = image("short", 100 * MIB);
    let error = no(&short, true);
    assert!(
        error.starts_with("invalid new ") && error.contains("space for 24 segments"),
        "{error}"
    );
    // Foreign data there are not overwritten without consent.
    let second = image("second", 128 * MIB);
    run("mke2fs", &["-q", "-F", "-t", "ext4", second.to_str().unwrap()]);
    let error = no(&second, false);
    assert!(error.contains("it has an ext2, ext3 or ext4"), "{error}");
    run("e2fsck", &["-fn", second.to_str().unwrap()]);
    let pool = image("pool", 128 * MIB);
    let used = Running::open(&pool, Options::default()).unwrap();
    for consent in [false, true] {
        let error = attach(&first, &pool, consent).unwrap_err();
        assert!(matches!(error, VolumeError::Store(StoreError::InUse { .. })), "{error}");
    }
    drop(used);
    for consent in [false, true] {
        assert!(no(&pool, consent).contains("it holds a pool"));
    }
    attach(&first, &second, true).unwrap();
    assert!(no(&pool, true).contains("has two good copies"));
    let volume = Volume::open(config(&second, "v0", 0)).unwrap();
    assert_eq!(good(&volume), 2);
    verify(&volume, 10);
    assert_eq!(fill(&volume, 20), 20);
    drop(volume);
    std::fs::remove_file(&first).unwrap();
    let alone = PoolPaths { degraded: true, ..PoolPaths::of(&second) };
    let running = Running::open_places(&alone, Options::default()).unwrap();
    verify(&Volume::open_in(Arc::clone(&running), VolumeConfig::new(&second, "v0")).unwrap(), 20);
    drop(running);
    // A third disk replaces the lost one.
    let third = image("third", 200 * MIB);
    attach(&second, &third, false).unwrap();
    let volume = Volume::open(pair(&second, &third)).unwrap();
    assert_eq!(good(&volume), 2);
    verify(&volume, 20);
}
