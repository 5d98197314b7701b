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
use blockyard_volume_format::VERSION;
use blockyard_volume_format::bytes::{crc, u32_at, u64_at};
use blockyard_volume_format::catalogue;
use blockyard_volume_format::entry::{Codec, Entry};
use blockyard_volume_format::group::{self, Descriptor, Head, Kind};
use blockyard_volume_format::superblock::{BYTES, SEGMENT_NONE, SLOT_BYTES, SLOTS, Superblock};

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

/// A catalogue as format version 3 has it: without creation times, holds, scrub and repairs.
fn print_version_3(bytes: &[u8]) -> Vec<u8> {
    let (whole, listed) = catalogue::parse(bytes).unwrap();
    let mut old = b"BLKYCAT\n".to_vec();
    old.extend((listed.len() as u32).to_le_bytes());
    for it in &listed {
        let meta = &it.meta;
        for number in [meta.id, meta.origin, meta.block_bytes] {
            old.extend(number.to_le_bytes());
        }
        for number in [meta.blocks, meta.guid, meta.reserved_bytes] {
            old.extend(number.to_le_bytes());
        }
        old.extend([u8::from(meta.is_snapshot), meta.name.len() as u8]);
        old.extend(meta.name.as_bytes());
        old.extend(it.family.to_le_bytes());
        old.extend(it.copied.to_le_bytes());
        old.extend(it.owned.to_le_bytes());
        for root in &it.roots {
            let mut bytes = [0; 16];
            root.print(&mut bytes);
            old.extend(bytes);
        }
    }
    old.extend(whole.next_id.to_le_bytes());
    old.extend(whole.copies.to_le_bytes());
    old.extend(whole.unknown_bytes.to_le_bytes());
    old.extend((whole.live.len() as u32).to_le_bytes());
    whole.live.iter().for_each(|bytes| old.extend(((bytes / 512) as u32).to_le_bytes()));
    old
}

/// Replaces the catalogue of each superblock slot, which fits into one page, and sets the version
/// of the superblock.
pub(crate) fn replace_catalogue(path: &Path, version: u32, change: impl Fn(&[u8]) -> Vec<u8>) {
    let mut changed = 0;
    for (at, superblock) in superblocks(path) {
        let mut next = superblock;
        if !superblock.catalogue.is_hole() {
            let address = superblock.catalogue.address();
            let bytes = u64::from(superblock.segment_bytes);
            let segment = file(path, &format!("segment-{:08x}", address / bytes));
            let old = read(&segment, address % bytes, PAGE);
            let printed = change(&old[..superblock.catalogue_bytes as usize]);
            let mut page = vec![0; PAGE];
            page[..printed.len()].copy_from_slice(&printed);
            segment.write_all_at(&page, address % bytes).unwrap();
            next.catalogue = Entry::new(address, PAGE as u32, Codec::Raw, crc(&page));
            (next.catalogue_bytes, next.catalogue_crc) = (printed.len() as u64, crc(&printed));
            changed += 1;
        }
        let mut slot = vec![0; SLOT_BYTES];
        next.print(&mut slot);
        slot[16..20].copy_from_slice(&version.to_le_bytes());
        let crc = crc(&slot[16..BYTES]);
        slot[8..16].copy_from_slice(&crc.to_le_bytes());
        file(path, "superblock").write_all_at(&slot, at).unwrap();
    }
    assert!(changed > 0);
}

/// Appends a group with one block to the log of a pool that was closed.
pub(crate) fn append_group(path: &Path, descriptor: Descriptor, payload: &[u8]) {
    let all = superblocks(path);
    let (_, newest) = *all.iter().max_by_key(|(_, it)| it.sequence).unwrap();
    let (log, align) = (newest.log, newest.align as usize);
    let mut payload = payload.to_vec();
    payload.resize(payload.len().next_multiple_of(align), 0);
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
        payload_bytes: payload.len() as u32,
    };
    let mut bytes = vec![0; head_bytes as usize];
    group::print(&head, &[descriptor], &mut bytes);
    bytes.extend(payload);
    let (segment, offset) = match log.segment {
        SEGMENT_NONE => (log.next, 0),
        segment => (segment, log.offset),
    };
    let segment = file(path, &format!("segment-{segment:08x}"));
    segment.write_all_at(&bytes, offset.into()).unwrap();
}

/// The format versions of the superblock slots.
fn versions(path: &Path) -> Vec<u32> {
    let bytes = read(&file(path, "superblock"), 0, SLOTS as usize * SLOT_BYTES);
    bytes.chunks(SLOT_BYTES).map(|slot| u32_at(slot, 16)).collect()
}

#[test]
fn a_pool_of_format_version_3_opens_and_becomes_one_of_version_5() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "crafted-version-3");
    let path = place.path().join("pool");
    let volume = open(&path, 16 << 20, 4096);
    handle(&volume).write(Sector(0), &[7; PAGE], Flags::FUA).unwrap();
    volume.running().snapshot("v0@one").unwrap();
    handle(&volume).write(Sector(0), &[8; PAGE], Flags::FUA).unwrap();
    drop(volume);
    replace_catalogue(&path, 3, print_version_3);
    assert_eq!(versions(&path), [3, 3]);
    assert_eq!(check(&path, &mut |_| {}).unwrap().damaged, 0);
    assert_eq!(versions(&path), [3, 3], "a check changes nothing");
    let running = Running::open(&path, Options::default()).unwrap();
    assert_eq!(versions(&path), [5, 5]);
    let list = |running: &Running| -> Vec<(String, bool)> {
        let list = running.pool().list().into_iter();
        list.map(|meta| (meta.name, meta.created > 0)).collect()
    };
    let old = [("v0", false), ("v0@one", false)].map(|(name, is)| (name.to_owned(), is));
    assert_eq!(list(&running), old);
    running.clone_of("v0@one", "clone").unwrap();
    drop(running);
    let running = Running::open(&path, Options::default()).unwrap();
    let new = [("v0", false), ("v0@one", false), ("clone", true)];
    assert_eq!(list(&running), new.map(|(name, is)| (name.to_owned(), is)));
    let mut found = [0; PAGE];
    let volume = open(&path, 0, 0);
    handle(&volume).read(Sector(0), &mut found).unwrap();
    assert_eq!(found, [8; PAGE]);
    let config = VolumeConfig { compress: Compression::None, ..VolumeConfig::new(&path, "clone") };
    handle(&Volume::open(config).unwrap()).read(Sector(0), &mut found).unwrap();
    assert_eq!(found, [7; PAGE]);
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
    replace_catalogue(&path, VERSION, |bytes| {
        let (whole, mut listed) = catalogue::parse(bytes).unwrap();
        listed.iter_mut().for_each(|it| it.meta.block_bytes = 16 << 10);
        catalogue::print(&whole, &listed)
    });
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
    let payload = [9; PAGE];
    let descriptor = Descriptor {
        kind: Kind::Data,
        codec: Codec::Raw,
        volume: 1,
        from: 0,
        to: 0,
        block: 0,
        len: PAGE as u32,
        crc: crc(&payload),
    };
    append_group(&path, descriptor, &payload);
    let error = Running::open(&path, Options::default()).unwrap_err().to_string();
    assert!(error.contains("`group of the log` has length of a block = 4096"), "{error}");
}
