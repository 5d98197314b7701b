//! Crafted pools with correct checksums but invalid contents. They must be refused, or reads must
//! return errors; nothing may panic.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use blockyard_core::{Flags, Sector, Status};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig};
use blockyard_volume_admin::check::check;
use blockyard_volume_format::bytes::{crc, u64_at};
use blockyard_volume_format::catalogue;
use blockyard_volume_format::entry::{Codec, Entry};
use blockyard_volume_format::group::{self, Descriptor, Head, Kind};
use blockyard_volume_format::superblock::{SEGMENT_NONE, SLOT_BYTES, SLOTS, Superblock};

const PAGE: usize = 4096;

fn open(path: &Path, size: u64, volblocksize: u32) -> Arc<Volume> {
    let compress = Compression::None;
    let config = VolumeConfig { size, volblocksize, compress, ..VolumeConfig::new(path, "v0") };
    Volume::open(config).unwrap()
}

fn file(path: &Path, name: &str) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(path.join(name)).unwrap()
}

fn read(file: &std::fs::File, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

/// The valid superblocks, each with its offset in the file.
fn superblocks(path: &Path) -> Vec<(u64, Superblock)> {
    let bytes = read(&file(path, "superblock"), 0, SLOTS as usize * SLOT_BYTES);
    let places = (0..).step_by(SLOT_BYTES);
    let slots = places.zip(bytes.chunks(SLOT_BYTES).map(Superblock::parse));
    slots.filter_map(|(at, slot)| Some((at, slot.ok()?))).collect()
}

/// Regression: a block that is stored raw but shorter than its volume's blocks. A read beyond its
/// end panicked, which ended all connections.
#[test]
fn a_stored_block_that_is_too_short_is_an_error() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "crafted-map");
    let path = place.path().join("pool");
    let volume = open(&path, 16 << 20, 4096);
    handle(&volume).write(Sector(0), &[7; PAGE], Flags::FUA).unwrap();
    drop(volume);
    // Change the catalogue such that the volume's blocks are longer.
    let mut changed = 0;
    for (at, superblock) in superblocks(&path) {
        if superblock.catalogue.is_hole() {
            continue;
        }
        let (address, len) = (superblock.catalogue.address(), superblock.catalogue_bytes as usize);
        let bytes = u64::from(superblock.segment_bytes);
        let segment = file(&path, &format!("segment-{:08x}", address / bytes));
        // The catalogue fits into one page, which is the top of its tree.
        let mut page = read(&segment, address % bytes, PAGE);
        let (whole, mut listed) = catalogue::parse(&page[..len]).unwrap();
        listed.iter_mut().for_each(|it| it.meta.block_bytes = 16 << 10);
        let printed = catalogue::print(&whole, &listed);
        assert_eq!(printed.len(), len);
        page[..len].copy_from_slice(&printed);
        segment.write_all_at(&page, address % bytes).unwrap();
        let catalogue = Entry::new(address, PAGE as u32, Codec::Raw, crc(&page));
        let superblock = Superblock { catalogue, catalogue_crc: crc(&printed), ..superblock };
        let mut slot = vec![0; SLOT_BYTES];
        superblock.print(&mut slot);
        file(&path, "superblock").write_all_at(&slot, at).unwrap();
        changed += 1;
    }
    assert!(changed > 0);
    let report = check(&path, &mut |_| {}).unwrap();
    assert_eq!(report.damaged, 1, "{:?}", report.damage);
    let volume = open(&path, 0, 0);
    let mut found = [0; PAGE];
    for block in [3, 0, 1] {
        let error = handle(&volume).read(Sector(block * 8), &mut found).unwrap_err();
        assert_eq!(error, Status::Protection, "block {block}");
    }
    handle(&volume).read(Sector(32), &mut found).unwrap();
    assert_eq!(found, [0; PAGE]);
}

/// A group of the log with a raw block that is shorter than the volume's blocks.
#[test]
fn a_group_with_a_block_that_is_too_short_is_refused() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "crafted-log");
    let path = place.path().join("pool");
    let volume = open(&path, 16 << 20, 16 << 10);
    handle(&volume).write(Sector(0), &[7; PAGE], Flags::FUA).unwrap();
    drop(volume);
    let all = superblocks(&path);
    let (_, newest) = *all.iter().max_by_key(|(_, it)| it.sequence).unwrap();
    let (log, payload) = (newest.log, [9; PAGE]);
    let id = 1;
    let descriptor = Descriptor {
        kind: Kind::Data,
        codec: Codec::Raw,
        volume: id,
        from: 0,
        to: 0,
        block: 0,
        len: PAGE as u32,
        crc: crc(&payload),
    };
    let head_bytes = group::head_bytes(1, newest.align);
    let head = Head {
        pool: u64_at(&newest.id, 0),
        epoch: newest.epoch,
        number: log.number,
        chain: log.chain,
        durable: log.number - 1,
        next: SEGMENT_NONE,
        count: 1,
        head_bytes,
        payload_bytes: PAGE as u32,
    };
    let mut bytes = vec![0; head_bytes as usize];
    group::print(&head, &[descriptor], &mut bytes);
    bytes.extend(payload);
    let (segment, offset) = match log.segment {
        SEGMENT_NONE => (log.next, 0),
        segment => (segment, log.offset),
    };
    let segment = file(&path, &format!("segment-{segment:08x}"));
    segment.write_all_at(&bytes, offset.into()).unwrap();
    let error = Running::open(&path, Options::default()).unwrap_err().to_string();
    assert!(error.contains("`group of the log` has length of a block = 4096"), "{error}");
}
