//! The file system's rules in process, without a mount.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Flags, Op, Sector, Status};
use blockyard_null::NullConfig;
use blockyard_zonefs::format::{Format, format};
use blockyard_zonefs::superblock::SuperblockError;
use blockyard_zonefs::{
    AccessMode, AttributeChange, FileError, FileKind, Superblock, TreeNode, Uuid, ZoneFile, ZoneFs,
};
use common::{CAPACITY, ZONE, break_zone, config, disk, fail, formatted, open, pattern};

const SEQ: FileKind = FileKind::Sequential;
const CNV: FileKind = FileKind::Conventional;
const BLOCK: usize = 4096;

fn seq(fs: &Arc<ZoneFs>, number: u32) -> ZoneFile {
    fs.open_file(SEQ, number, AccessMode::Write).unwrap().unwrap()
}

#[test]
fn the_tree_has_a_file_for_each_zone_but_the_first() {
    let fs = open(&formatted("d", config()), "");
    assert_eq!((fs.file_count(CNV), fs.file_count(SEQ)), (2, 13));
    let root = fs.attributes(TreeNode::Root).unwrap();
    assert_eq!((root.ino, root.size, root.nlink, root.permissions), (16, 4, 4, 0o555));
    let dir = fs.attributes(TreeNode::Directory(SEQ)).unwrap();
    assert_eq!((dir.ino, dir.size, dir.nlink), (18, 13, 2));
    let file = fs.attributes(TreeNode::File(SEQ, 0)).unwrap();
    assert_eq!((file.ino, file.size, file.permissions), (3, 0, 0o640));
    assert_eq!((file.blocks, file.block_bytes), (CAPACITY / 512, 4096));
    let file = fs.attributes(TreeNode::File(CNV, 1)).unwrap();
    assert_eq!((file.ino, file.size), (2, ZONE));
    assert_eq!(fs.lookup(TreeNode::Root, b"seq"), Some(TreeNode::Directory(SEQ)));
    assert_eq!(fs.lookup(TreeNode::Directory(SEQ), b"12"), Some(TreeNode::File(SEQ, 12)));
    for name in ["13", "012", "-1", ""] {
        assert_eq!(fs.lookup(TreeNode::Directory(SEQ), name.as_bytes()), None, "{name}");
    }
    for node in
        [TreeNode::Root, TreeNode::Directory(CNV), TreeNode::File(CNV, 1), TreeNode::File(SEQ, 12)]
    {
        assert_eq!(fs.node(fs.attributes(node).unwrap().ino), Some(node));
    }
    let space = fs.space();
    assert_eq!(space.blocks, (2 * ZONE + 13 * CAPACITY) / 4096);
    assert_eq!((space.free, space.files), (13 * CAPACITY / 4096, 17));
}

#[test]
fn superblock_sets_permissions_and_owners() {
    let device = disk("d", config());
    let mut wanted = Format { label: "logs".to_owned(), ..Format::default() };
    wanted.options = "aggr_cnv,uid=1000,gid=100,perm=600".parse().unwrap();
    let made = format(device.as_ref(), &wanted).unwrap();
    assert_eq!((made.conventional_files, made.sequential_files), (1, 13));
    let fs = open(&device, "");
    assert_eq!(fs.superblock().label_text(), "logs");
    let file = fs.attributes(TreeNode::File(CNV, 0)).unwrap();
    assert_eq!((file.uid, file.gid, file.permissions), (1000, 100, 0o600));
    assert_eq!((file.size, file.ino), (2 * ZONE, 1));
    // One file over two zones.
    let file = fs.open_file(CNV, 0, AccessMode::Write).unwrap().unwrap();
    let (mut io, data) = (fs.io_handle().unwrap(), pattern(1, 2 * ZONE as usize));
    assert_eq!(file.write(&mut io, 0, &data), Ok(data.len()));
    let mut back = vec![0; data.len()];
    assert_eq!(file.read(&mut io, 0, &mut back), Ok(data.len()));
    assert!(back == data);
}

#[test]
fn a_sequential_file_is_written_at_its_end() {
    let fs = open(&formatted("d", config()), "");
    let (file, mut io) = (seq(&fs, 0), fs.io_handle().unwrap());
    let data = pattern(2, 3 * BLOCK);
    assert_eq!(file.write(&mut io, 0, &data), Ok(data.len()));
    assert_eq!(file.append(&mut io, &data), Ok(data.len() as u64));
    for (offset, len, error) in [
        (0, BLOCK, FileError::NotAtWritePointer),
        (7 * BLOCK as u64, BLOCK, FileError::NotAtWritePointer),
        (6 * BLOCK as u64, 512, FileError::Unaligned),
        (512, BLOCK, FileError::Unaligned),
        (CAPACITY, BLOCK, FileError::NoRoom),
    ] {
        assert_eq!(file.write(&mut io, offset, &data[..len]), Err(error));
    }
    let mut back = vec![0; 8 * BLOCK];
    assert_eq!(file.read(&mut io, 0, &mut back), Ok(6 * BLOCK));
    assert!(back[..3 * BLOCK] == data && back[3 * BLOCK..6 * BLOCK] == data);
    assert_eq!(file.read(&mut io, 100, &mut back[..1000]), Ok(1000));
    assert!(back[..1000] == data[100..1100]);
    assert_eq!(file.read(&mut io, 6 * BLOCK as u64, &mut back), Ok(0));
    // A write that crosses the capacity is shortened; such an append fails.
    let rest = pattern(3, CAPACITY as usize);
    assert_eq!(file.append(&mut io, &rest), Err(FileError::NoRoom));
    let fits = CAPACITY as usize - 6 * BLOCK;
    assert_eq!(file.write(&mut io, 6 * BLOCK as u64, &rest), Ok(fits));
    assert_eq!(file.size(), CAPACITY);
    assert_eq!(file.append(&mut io, &data[..BLOCK]), Err(FileError::NoRoom));
    assert!(!fs.is_read_only());
}

#[test]
fn truncating_resets_and_finishes() {
    let device = formatted("d", config());
    let fs = open(&device, "");
    let (file, mut io) = (seq(&fs, 1), fs.io_handle().unwrap());
    file.append(&mut io, &pattern(4, BLOCK)).unwrap();
    for len in [1, BLOCK as u64, CAPACITY - 1, CAPACITY + 1] {
        assert_eq!(file.truncate(len), Err(FileError::NotTruncatable));
    }
    file.truncate(CAPACITY).unwrap();
    assert_eq!(file.size(), CAPACITY);
    file.truncate(0).unwrap();
    assert_eq!(file.size(), 0);
    file.append(&mut io, &pattern(5, BLOCK)).unwrap();
    let conventional = fs.open_file(CNV, 0, AccessMode::Write).unwrap().unwrap();
    assert_eq!(conventional.truncate(0), Err(FileError::NotTruncatable));
    // The next mount finds the contents that this one left.
    drop((file, conventional, fs));
    let again = open(&device, "");
    assert_eq!(again.attributes(TreeNode::File(SEQ, 1)).unwrap().size, BLOCK as u64);
}

#[test]
fn threads_append_to_one_file_and_lose_nothing() {
    let fs = open(&formatted("d", config()), "");
    let file = seq(&fs, 0);
    let blocks = CAPACITY as usize / BLOCK;
    let taken: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let work = |thread: u64| {
            let (fs, file) = (&fs, &file);
            move || {
                let mut io = fs.io_handle().unwrap();
                let mut mine = Vec::new();
                // More than fits: the last appends are refused, and nothing else changes.
                for round in 0..blocks as u64 / 4 + 2 {
                    let seed = thread << 32 | round;
                    match file.append(&mut io, &pattern(seed, BLOCK)) {
                        Ok(offset) => mine.push((offset, seed)),
                        Err(error) => assert_eq!(error, FileError::NoRoom),
                    }
                }
                mine
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(work(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(taken.len(), blocks);
    assert_eq!(file.size(), CAPACITY);
    assert!(!fs.is_read_only());
    let mut io = fs.io_handle().unwrap();
    for (offset, seed) in taken {
        let mut back = vec![0; BLOCK];
        file.read(&mut io, offset, &mut back).unwrap();
        assert!(back == pattern(seed, BLOCK), "offset {offset}");
    }
}

/// Writes at the end, appends and truncations of one file, each in a thread.
fn write_append_and_truncate(config: NullConfig) {
    let fs = open(&formatted("d", config), "");
    let file = seq(&fs, 0);
    let rounds = 600;
    std::thread::scope(|scope| {
        let (fs, file) = (&fs, &file);
        scope.spawn(move || {
            let mut io = fs.io_handle().unwrap();
            for round in 0..rounds {
                let data = pattern(round, 3 * BLOCK);
                match file.write(&mut io, file.size(), &data) {
                    // At the end of the file a write is shortened.
                    Ok(len) => assert!(len > 0 && len.is_multiple_of(BLOCK)),
                    Err(FileError::NotAtWritePointer | FileError::NoRoom) => {}
                    Err(error) => panic!("round {round}: {error}"),
                }
            }
        });
        for _ in 0..2 {
            scope.spawn(move || {
                let mut io = fs.io_handle().unwrap();
                for round in 0..rounds {
                    match file.append(&mut io, &pattern(round, 2 * BLOCK)) {
                        Ok(offset) => assert!(offset.is_multiple_of(BLOCK as u64)),
                        Err(error) => assert_eq!(error, FileError::NoRoom, "round {round}"),
                    }
                }
            });
        }
        scope.spawn(move || {
            for round in 0..rounds {
                let len = if round % 16 == 0 { CAPACITY } else { 0 };
                file.truncate(len).unwrap();
            }
        });
    });
    assert!(!fs.is_read_only());
    let (mut io, data) = (fs.io_handle().unwrap(), pattern(7, 4 * BLOCK));
    file.truncate(0).unwrap();
    assert_eq!(file.write(&mut io, 0, &data), Ok(data.len()));
    let mut back = vec![0; data.len()];
    assert_eq!(file.read(&mut io, 0, &mut back), Ok(data.len()));
    assert!(back == data);
}

#[test]
fn concurrent_writes_appends_and_truncations_report_no_device_error() {
    write_append_and_truncate(config());
    write_append_and_truncate(NullConfig { zone_append_max_sectors: 0, ..config() });
}

/// A read returns a consistent state of the file: no bytes above the write pointer of a zone that
/// is reset meanwhile, and no mixture of blocks from before and after.
#[test]
fn read_concurrent_with_truncation_is_consistent() {
    const BLOCKS: usize = 6;
    let fs = open(&formatted("d", config()), "");
    let file = seq(&fs, 0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (fs, file, over) = (&fs, &file, &over);
        scope.spawn(move || {
            let mut io = fs.io_handle().unwrap();
            for round in 0..1000 {
                file.truncate(0).unwrap();
                for _ in 0..BLOCKS / 2 {
                    file.append(&mut io, &[1 + (round % 200) as u8; 2 * BLOCK]).unwrap();
                }
            }
            // Relaxed: the flag publishes no other data.
            over.store(true, Ordering::Relaxed);
        });
        scope.spawn(move || {
            let (mut io, mut back) = (fs.io_handle().unwrap(), vec![0; BLOCKS * BLOCK]);
            while !over.load(Ordering::Relaxed) {
                let len = file.read(&mut io, 0, &mut back).unwrap();
                assert!(len.is_multiple_of(2 * BLOCK));
                let seen = &back[..len];
                let first = seen.first().copied().unwrap_or(1);
                assert!((1..=200).contains(&first), "{first} was never written");
                assert!(seen.iter().all(|byte| *byte == first), "of two times");
            }
        });
    });
}

#[test]
fn appends_are_serialised_on_a_device_without_zone_append() {
    let device = formatted("d", NullConfig { zone_append_max_sectors: 0, ..config() });
    let fs = open(&device, "");
    assert!(!fs.appends_natively());
    let file = seq(&fs, 0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut io = fs.io_handle().unwrap();
                (0..20).for_each(|_| assert!(file.append(&mut io, &[1; BLOCK]).is_ok()));
            });
        }
    });
    assert_eq!(file.size(), 40 * BLOCK as u64);
}

#[test]
fn only_devices_with_a_good_superblock_are_opened() {
    let device = disk("d", config());
    let refused = |device: &Arc<_>| {
        ZoneFs::open(Arc::clone(device), Default::default()).unwrap_err().to_string()
    };
    assert!(refused(&device).starts_with("zonefs (d) ERROR: the device holds no zonefs"));
    let mut bytes = Superblock::new(Uuid::from_bytes([1; 16])).encode();
    bytes[100] = 1;
    let mut io = Io::new(device.open().unwrap(), bytes.len());
    io.write(Sector(0), &bytes, Flags::NONE).unwrap();
    assert!(refused(&device).starts_with("zonefs (d) ERROR: Invalid checksum (Expected 0x"));
    let plain = disk("p", NullConfig { zoned: false, ..config() });
    assert_eq!(refused(&plain), "zonefs (p) ERROR: Not a zoned block device");
    assert_eq!(SuperblockError::Reserved.to_string(), "Reserved area is being used");
}

#[test]
fn format_refuses_a_device_that_holds_data() {
    let device = formatted("d", config());
    let again = |force| format(device.as_ref(), &Format { force, ..Format::default() });
    let error = again(false).unwrap_err().to_string();
    assert_eq!(error, "zonefs (d) ERROR: the device holds a zonefs; -f overwrites it");
    let fs = open(&device, "");
    let (file, mut io) = (seq(&fs, 2), fs.io_handle().unwrap());
    file.append(&mut io, &[1; BLOCK]).unwrap();
    drop((file, fs));
    again(true).unwrap();
    assert_eq!(open(&device, "").attributes(TreeNode::File(SEQ, 2)).unwrap().size, 0);
    let plain = disk("p", NullConfig { zoned: false, ..config() });
    let error = format(plain.as_ref(), &Format::default()).unwrap_err().to_string();
    assert_eq!(error, "zonefs (p) ERROR: Not a zoned block device");
    let forgetful = disk("f", NullConfig { memory_backed: false, ..config() });
    let error = format(forgetful.as_ref(), &Format::default()).unwrap_err().to_string();
    assert!(error.starts_with("zonefs (f) ERROR: cannot read the superblock back"), "{error}");
    // A sequential first zone is full afterwards: nothing can be appended to the superblock.
    let sequential = disk("s", NullConfig { zone_nr_conv: 0, ..config() });
    assert!(format(sequential.as_ref(), &Format::default()).unwrap().zone_0_finished);
    let fs = open(&sequential, "");
    assert_eq!((fs.file_count(CNV), fs.file_count(SEQ)), (0, 15));
    assert_eq!(fs.attributes(TreeNode::Root).unwrap().nlink, 3);
}

#[test]
fn explicit_open_holds_zones_and_counts_them() {
    let device = formatted("d", NullConfig { zone_max_open: 2, zone_max_active: 3, ..config() });
    let fs = open(&device, "explicit-open");
    let cond = |number: u64| {
        let mut zones = Vec::new();
        device.report_zones(Sector((3 + number) * ZONE / 512), 1, &mut zones).unwrap();
        zones[0].cond.short()
    };
    let (first, second) = (seq(&fs, 0), seq(&fs, 1));
    assert_eq!((cond(0), cond(1)), ("oe", "oe"));
    assert_eq!(
        fs.open_file(SEQ, 2, AccessMode::Write).unwrap().unwrap_err(),
        FileError::TooManyOpen
    );
    assert_eq!(fs.resources().write_open, 2);
    // A second writer of the same file, and readers, use no further resource.
    let (again, reader) = (seq(&fs, 0), fs.open_file(SEQ, 2, AccessMode::Read).unwrap().unwrap());
    drop((again, reader));
    assert_eq!(cond(0), "oe");
    let mut io = fs.io_handle().unwrap();
    second.append(&mut io, &[1; BLOCK]).unwrap();
    second.truncate(0).unwrap();
    assert_eq!(cond(1), "oe");
    second.append(&mut io, &[1; BLOCK]).unwrap();
    drop((first, second));
    // Closing an empty zone frees its resources.
    assert_eq!((cond(0), cond(1)), ("em", "cl"));
    let third = seq(&fs, 2);
    third.truncate(CAPACITY).unwrap();
    drop(third);
    assert_eq!(cond(2), "fu");
    assert_eq!((fs.resources().write_open, fs.resources().active), (0, 1));
    // A device without limits needs no explicit open.
    let free = formatted("f", config());
    assert!(!open(&free, "explicit-open").options().explicit_open);
}

#[test]
fn a_mount_closes_the_zones_that_it_finds_open() {
    let device = formatted("d", config());
    let mut io = Io::new(device.open().unwrap(), BLOCK);
    io.run(Bio::new(Op::ZoneOpen, Sector(4 * ZONE / 512), 0)).unwrap();
    io.write(Sector(5 * ZONE / 512), &[1; BLOCK], Flags::NONE).unwrap();
    let fs = open(&device, "");
    let mut zones = Vec::new();
    device.report_zones(Sector(4 * ZONE / 512), 2, &mut zones).unwrap();
    assert_eq!((zones[0].cond.short(), zones[1].cond.short()), ("em", "cl"));
    assert_eq!(fs.resources().active, 1);
}

#[test]
fn permissions_and_owners_are_not_persistent() {
    let device = formatted("d", config());
    let fs = open(&device, "");
    let change =
        |permissions, uid| AttributeChange { permissions, uid, ..AttributeChange::default() };
    fs.change(TreeNode::File(SEQ, 0), change(Some(0o600), Some(7))).unwrap();
    let file = fs.attributes(TreeNode::File(SEQ, 0)).unwrap();
    assert_eq!((file.permissions, file.uid), (0o600, 7));
    let writable = fs.change(TreeNode::Directory(SEQ), change(Some(0o755), None));
    assert_eq!(writable.unwrap_err().errno(), 1);
    fs.change(TreeNode::Directory(SEQ), change(Some(0o500), None)).unwrap();
    assert_eq!(fs.attributes(TreeNode::Directory(SEQ)).unwrap().permissions, 0o500);
    drop(fs);
    assert_eq!(open(&device, "").attributes(TreeNode::File(SEQ, 0)).unwrap().permissions, 0o640);
}

/// The state of a file after an error.
#[derive(Debug, PartialEq, Eq)]
struct After {
    size: u64,
    permissions: u16,
    /// Whether the file can be read, whether it can be written, and whether other files can be
    /// written.
    reads: bool,
    writes: bool,
    others: bool,
}

/// Writes three blocks, then applies `fault` and lets a write fail.
fn after(options: &str, fault: Option<&str>) -> After {
    let device = formatted("d", config());
    let fs = open(&device, options);
    let (file, other, mut io) = (seq(&fs, 0), seq(&fs, 1), fs.io_handle().unwrap());
    file.append(&mut io, &pattern(1, 3 * BLOCK)).unwrap();
    match fault {
        Some(fault) => break_zone(device.as_ref(), fault, 3),
        None => {
            // Another channel writes to the zone: the file's write pointer is wrong from then on.
            let mut io = Io::new(device.open().unwrap(), BLOCK);
            let wp = Sector(3 * ZONE / 512 + 3 * BLOCK as u64 / 512);
            io.write(wp, &[9; BLOCK], Flags::NONE).unwrap();
        }
    }
    assert!(file.write(&mut io, 3 * BLOCK as u64, &[1; BLOCK]).is_err());
    let attributes = fs.attributes(TreeNode::File(SEQ, 0)).unwrap();
    After {
        size: attributes.size / BLOCK as u64,
        permissions: attributes.permissions,
        reads: file.read(&mut io, 0, &mut [0; BLOCK]).is_ok(),
        writes: file.write(&mut io, attributes.size, &[1; BLOCK]).is_ok(),
        others: other.append(&mut io, &[1; BLOCK]).is_ok(),
    }
}

/// The effect of `errors=` by condition of the zone: the table in docs/zonefs.md.
#[test]
fn device_errors_are_handled_as_the_errors_option_says() {
    let want = |size, permissions, reads, writes, others| After {
        size,
        permissions,
        reads,
        writes,
        others,
    };
    let (ro, off) = (Some("zone_readonly"), Some("zone_offline"));
    for (options, fault, wanted) in [
        // The append lands after the foreign block: remount-ro exposes neither, repair both.
        ("errors=remount-ro", None, want(3, 0o640, true, false, false)),
        ("errors=remount-ro", ro, want(3, 0o440, true, false, false)),
        ("errors=remount-ro", off, want(0, 0, false, false, false)),
        ("errors=zone-ro", None, want(3, 0o440, true, false, true)),
        ("errors=zone-ro", ro, want(3, 0o440, true, false, true)),
        ("errors=zone-ro", off, want(0, 0, false, false, true)),
        ("errors=zone-offline", None, want(0, 0, false, false, true)),
        ("errors=zone-offline", ro, want(0, 0, false, false, true)),
        ("errors=zone-offline", off, want(0, 0, false, false, true)),
        ("errors=repair", None, want(5, 0o640, true, true, true)),
        ("errors=repair", ro, want(3, 0o440, true, false, true)),
        ("errors=repair", off, want(0, 0, false, false, true)),
    ] {
        assert_eq!(after(options, fault), wanted, "{options} {fault:?}");
    }
}

#[test]
fn error_without_effect_is_reported_and_recovered() {
    let device = formatted("d", config());
    let fs = open(&device, "errors=repair");
    let (file, mut io) = (seq(&fs, 0), fs.io_handle().unwrap());
    file.append(&mut io, &[1; BLOCK]).unwrap();
    fail(device.as_ref(), Op::ZoneAppend, 1);
    let failed = file.append(&mut io, &[2; BLOCK]);
    assert_eq!(failed, Err(FileError::Device(Status::IoErr)));
    assert_eq!(file.append(&mut io, &[2; BLOCK]), Ok(BLOCK as u64));
    // A failed read of a good zone has no further effect.
    fail(device.as_ref(), Op::Read, 1);
    assert!(file.read(&mut io, 0, &mut [0; BLOCK]).is_err());
    assert!(file.read(&mut io, 0, &mut [0; BLOCK]).is_ok());
    // A failed flush is treated as a failed write.
    let strict = open(&device, "");
    fail(device.as_ref(), Op::Flush, 1);
    let file = seq(&strict, 0);
    assert!(file.sync(&mut io).is_err() || !device.limits().write_cache);
}

#[test]
fn zones_that_are_bad_at_mount_are_empty_and_closed_to_all() {
    let device = formatted("d", config());
    break_zone(device.as_ref(), "zone_readonly", 3);
    break_zone(device.as_ref(), "zone_offline", 4);
    let fs = open(&device, "");
    for number in [0, 1] {
        let file = fs.attributes(TreeNode::File(SEQ, number)).unwrap();
        assert_eq!((file.size, file.permissions), (0, 0));
        let opened = fs.open_file(SEQ, number, AccessMode::Write).unwrap();
        assert_eq!(opened.unwrap_err(), FileError::Immutable);
        let reader = fs.open_file(SEQ, number, AccessMode::Read).unwrap().unwrap();
        let read = reader.read(&mut fs.io_handle().unwrap(), 0, &mut [0; BLOCK]);
        assert_eq!(read.unwrap_err().errno(), 1);
        let kept = fs.change(
            TreeNode::File(SEQ, number),
            AttributeChange { uid: Some(1), ..AttributeChange::default() },
        );
        assert_eq!(kept, Err(FileError::Immutable));
    }
    let read_only = open(&device, "ro");
    assert_eq!(
        read_only.open_file(SEQ, 5, AccessMode::Write).unwrap().unwrap_err(),
        FileError::ReadOnly
    );
    assert_eq!(read_only.truncate(SEQ, 5, 0), Some(Err(FileError::ReadOnly)));
}
