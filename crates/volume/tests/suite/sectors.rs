//! Encrypted blocks on disks with sectors of 512 and of 4096 bytes. The disk that a pool moves to
//! may have longer sectors than the one that it was made on.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::{Bio, Flags, Sector};
use blockyard_store::StoreKind;
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Options, Running, SecretFile, Volume, VolumeConfig};
use blockyard_volume_admin::check::check;
use blockyard_volume_admin::scrub::scrub;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::group::{self, Descriptor, Places};

use crate::loop_device::LoopDevice;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 16 << 10;
/// Length of an encrypted block with salt, number, length and tag, in bytes.
const SEALED: usize = BLOCK + 44;

struct Place {
    directory: TempDir,
    image: PathBuf,
}

impl Place {
    fn new(name: &str) -> Place {
        let directory = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name);
        let key = directory.path().join("key");
        std::fs::write(&key, [b'k'; 40]).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        Place { image: directory.path().join("image"), directory }
    }

    fn config(&self, disk: &Path, name: &str, size: u64) -> VolumeConfig {
        let key = name.starts_with("sealed").then(|| self.directory.path().join("key"));
        let secret = key.map(SecretFile::Key);
        let volblocksize = BLOCK as u32;
        VolumeConfig { size, secret, volblocksize, ..VolumeConfig::new(disk, name) }
    }

    fn open(&self, disk: &Path, name: &str, size: u64) -> Arc<Volume> {
        Volume::open(self.config(disk, name, size)).unwrap()
    }

    /// The encrypted blocks in the log of the image: offset in the image and length in bytes.
    fn sealed(&self) -> Vec<(usize, usize)> {
        let (bytes, align) = (std::fs::read(&self.image).unwrap(), 4096);
        let mut found = Vec::new();
        for start in (0..bytes.len()).step_by(align as usize) {
            let Some((head, _, descriptors)) = group::parse(&bytes[start..], align) else {
                continue;
            };
            let (payload, mut places) = (start + head.head_bytes as usize, Places::default());
            let mut place = |it: &Descriptor| (it.codec.is_sealed(), places.next(it, align));
            let blocks = descriptors.iter().map(&mut place).filter(|(is_sealed, _)| *is_sealed);
            found.extend(blocks.map(|(_, (at, len))| (payload + at as usize, len as usize)));
        }
        found
    }
}

/// Data that do not compress, different for each block and version.
fn data(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    fastrand::Rng::with_seed(block << 8 | version).fill(&mut bytes);
    bytes
}

fn sector(block: u64) -> Sector {
    Sector(block * BLOCK as u64 / 512)
}

/// Writes blocks, three by each write, which one log group has then.
fn write(volume: &Arc<Volume>, blocks: std::ops::Range<u64>, version: u64) {
    let mut io = handle(volume);
    for first in blocks.clone().step_by(3) {
        let bytes: Vec<u8> =
            (first..blocks.end.min(first + 3)).flat_map(|block| data(block, version)).collect();
        io.write(sector(first), &bytes, Flags::NONE).unwrap();
    }
    io.run(Bio::flush()).unwrap();
}

fn verify(volume: &Arc<Volume>, blocks: std::ops::Range<u64>, version: u64) {
    let (mut io, mut found) = (handle(volume), vec![0; BLOCK]);
    for block in blocks {
        io.read(sector(block), &mut found).unwrap();
        assert!(found == data(block, version), "block {block}");
    }
}

fn damaged(disk: &Path) -> u64 {
    check(disk, &mut |_| {}).unwrap().damaged
}

#[test]
fn encrypted_blocks_are_padded_to_the_sectors_of_the_disk() {
    let place = Place::new("sectors-padding");
    for sector_bytes in [512, 4096] {
        let device = LoopDevice::new(&place.image, 128 * MIB, sector_bytes);
        let sealed = place.open(device.path(), "sealed", 32 * MIB);
        let plain = Volume::open_in(
            Arc::clone(sealed.running()),
            place.config(device.path(), "plain", 16 * MIB),
        );
        let plain = plain.unwrap();
        // Writes that wait at the same time go into one group.
        let volumes = [sealed, plain];
        std::thread::scope(|scope| {
            for (volume, first) in [0, 0, 50, 50, 100, 100, 150, 150].into_iter().enumerate() {
                let volume = &volumes[volume % 2];
                scope.spawn(move || write(volume, first..first + 50, 1));
            }
        });
        drop(volumes);
        let found = place.sealed();
        assert!(found.len() >= 200, "{} blocks", found.len());
        let wanted = SEALED.next_multiple_of(sector_bytes as usize);
        assert!(found.iter().all(|(_, len)| *len == wanted), "{found:?}");
        let is_packed = found.iter().any(|(at, _)| at % 4096 != 0);
        assert_eq!(is_packed, sector_bytes == 512, "{found:?}");
        for name in ["sealed", "plain"] {
            verify(&place.open(device.path(), name, 0), 0..200, 1);
        }
        assert_eq!(damaged(device.path()), 0);
        drop(device);
        std::fs::remove_file(&place.image).unwrap();
    }
}

fn moves_to_longer_sectors(store: StoreKind) {
    const BLOCKS: u64 = 4000;
    let place = Place::new(&format!("sectors-longer-{store}"));
    let device = LoopDevice::new(&place.image, 128 * MIB, 512);
    let volume = place.open(device.path(), "sealed", 80 * MIB);
    write(&volume, 0..BLOCKS, 1);
    drop((volume, device));
    assert!(place.sealed().iter().any(|(at, _)| at % 4096 != 0));

    let device = LoopDevice::on(&place.image, 4096);
    let options = Options { store, ..Options::default() };
    let open = |size| Volume::open_with(place.config(device.path(), "sealed", size), options);
    let volume = open(0).unwrap();
    verify(&volume, 0..BLOCKS, 1);
    // A part of an old block.
    handle(&volume).write(Sector(8), &[7; 4096], Flags::FUA).unwrap();
    // Single blocks between old ones, until segments that have both were cleaned.
    let cleaned = || volume.running().pool().activity().cleaned;
    let mut versions = vec![1; BLOCKS as usize];
    for version in 2.. {
        assert!(version < 100, "nothing is cleaned");
        for block in (200 + version % 5..BLOCKS).step_by(5) {
            write(&volume, block..block + 1, version);
            versions[block as usize] = version;
        }
        if cleaned() > 0 {
            break;
        }
    }
    drop(volume);
    let volume = open(0).unwrap();
    let (mut found, mut wanted) = (vec![0; BLOCK], data(0, 1));
    wanted[4096..8192].fill(7);
    handle(&volume).read(Sector(0), &mut found).unwrap();
    assert!(found == wanted, "a part of an older block was written");
    for block in 1..BLOCKS {
        verify(&volume, block..block + 1, versions[block as usize]);
    }
    drop(volume);
    assert_eq!(damaged(device.path()), 0);
}

#[test]
fn blocks_of_short_sectors_are_read_on_a_disk_with_longer_ones() {
    moves_to_longer_sectors(StoreKind::Auto);
}

#[test]
fn blocks_of_short_sectors_are_read_by_calls_that_block() {
    moves_to_longer_sectors(StoreKind::Threads);
}

/// The copy joins while writes run whose blocks are padded to the shorter sectors of the first one.
#[test]
fn a_copy_with_longer_sectors_joins_and_is_repaired() {
    let place = Place::new("sectors-copy");
    let other = place.directory.path().join("other");
    let (first, second) =
        (LoopDevice::new(&place.image, 128 * MIB, 512), LoopDevice::new(&other, 128 * MIB, 4096));
    let volume = place.open(first.path(), "sealed", 32 * MIB);
    write(&volume, 0..300, 1);
    let running = Arc::clone(volume.running());
    std::thread::scope(|scope| {
        scope.spawn(|| write(&volume, 300..800, 1));
        running.attach(second.path(), None, true).unwrap();
    });
    running.wait_for_resync();
    write(&volume, 0..300, 2);
    drop((volume, running));
    assert_eq!(damaged(first.path()), 0);

    // Damage in one of the blocks between others, on the disk with longer sectors.
    let sealed = place.sealed();
    let (at, len) = *sealed[sealed.len() / 2..].iter().find(|(at, _)| at % 4096 != 0).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&other).unwrap();
    let mut before = vec![0; 3 * len];
    file.read_exact_at(&mut before, (at - len) as u64).unwrap();
    file.write_all_at(&[0x55; 100], at as u64 + 900).unwrap();
    file.sync_all().unwrap();
    let running = Running::open(second.path(), Options::default()).unwrap();
    assert_eq!(scrub(&running, 0, &mut |_, _| true).unwrap().repaired, 1);
    drop(running);
    let mut after = vec![0; 3 * len];
    file.read_exact_at(&mut after, (at - len) as u64).unwrap();
    assert!(before == after, "the block and its neighbours are as they were");

    drop(first);
    let degraded = VolumeConfig { degraded: true, ..place.config(second.path(), "sealed", 0) };
    let volume = Volume::open(degraded).unwrap();
    verify(&volume, 0..300, 2);
    verify(&volume, 300..800, 1);
}

/// Sets the format version of both superblock slots of an image, which then is of an older program.
fn set_version(image: &Path, version: u32) {
    let file = std::fs::File::options().read(true).write(true).open(image).unwrap();
    for at in [0, 4096] {
        let mut slot = [0; 512];
        file.read_exact_at(&mut slot, at).unwrap();
        slot[16..20].copy_from_slice(&version.to_le_bytes());
        let crc = crc(&slot[16..]);
        slot[8..16].copy_from_slice(&crc.to_le_bytes());
        file.write_all_at(&slot, at).unwrap();
    }
}

/// Version 4 of the format padded encrypted blocks to 4 KiB on all disks.
#[test]
fn a_pool_of_version_4_opens_and_gets_shorter_blocks() {
    let place = Place::new("sectors-version-4");
    let device = LoopDevice::new(&place.image, 128 * MIB, 4096);
    let volume = place.open(device.path(), "sealed", 32 * MIB);
    write(&volume, 0..600, 1);
    drop((volume, device));
    set_version(&place.image, 4);
    let older = place.sealed();
    assert!(older.iter().all(|(at, len)| at % 4096 == 0 && *len == 20_480));

    let device = LoopDevice::on(&place.image, 512);
    let volume = place.open(device.path(), "sealed", 0);
    verify(&volume, 0..600, 1);
    write(&volume, 100..200, 2);
    drop(volume);
    let newer = place.sealed();
    assert_eq!(newer.iter().filter(|(_, len)| *len == 16_896).count(), 100);
    let volume = place.open(device.path(), "sealed", 0);
    verify(&volume, 0..100, 1);
    verify(&volume, 100..200, 2);
    verify(&volume, 200..600, 1);
    drop(volume);
    assert_eq!(damaged(device.path()), 0);
}
