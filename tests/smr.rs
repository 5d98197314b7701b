//! SMR disks through the whole program: bios become SCSI commands, and clients see the disk's
//! results.

use crate::place::Place;
use crate::run::{nbdsh, run};
use crate::yard::{Yard, blockyard};

/// Sixteen zones of a mebibyte, the first two of them conventional; four open.
const SMR: &str = "smr:///s0?size=16M&zone_size=1M&zone_nr_conv=2&zone_max_open=4";
/// Sectors of a zone.
const ZONE: u64 = 2048;

/// The condition of a zone and its write pointer, counted from its start.
fn zone(yard: &Yard, number: u64) -> (String, u64) {
    let report = yard.command(&["zone", "report", "s0", "--json"]).ok().json();
    let zones = report.as_array().or_else(|| report["zones"].as_array()).cloned().unwrap();
    assert_eq!(zones.len(), 16);
    let zone = &zones[number as usize];
    assert_eq!(zone["start"], number * ZONE, "{zone}");
    (zone["cond"].as_str().unwrap().to_owned(), zone["wptr"].as_u64().unwrap_or(0))
}

fn command(yard: &Yard, verb: &str, zone: u64) -> crate::run::Run {
    let offset = format!("{}", zone * ZONE);
    yard.command(&["zone", verb, "s0", "--offset", &offset, "--count", "1"])
}

fn write(yard: &Yard, zone: u64, sectors_in: u64, sectors: u64) -> crate::run::Run {
    let script = format!("h.pwrite(b'z' * ({sectors} * 512), {} * 512)", zone * ZONE + sectors_in);
    run(&["nbdsh", "--uri", &yard.uri("s0"), "--command", &script])
}

#[test]
fn a_shingled_zone_goes_through_its_conditions() {
    let yard = Yard::serve(&[SMR]);
    let said = yard.printed();
    let what = "s0: smr 16M, keeps data in memory, 16 zones of 1M, 2 conventional, 4 open at most";
    assert!(said.contains(what), "{said}");
    assert_eq!(zone(&yard, 0).0, "not-wp");
    assert_eq!(zone(&yard, 5), ("empty".into(), 0));
    write(&yard, 5, 0, 8).ok();
    assert_eq!(zone(&yard, 5), ("implicit-open".into(), 8));
    command(&yard, "open", 5).ok();
    assert_eq!(zone(&yard, 5), ("explicit-open".into(), 8));
    command(&yard, "close", 5).ok();
    assert_eq!(zone(&yard, 5), ("closed".into(), 8));
    nbdsh(&yard.uri("s0"), "assert h.pread(8192, 5 << 20) == b'z' * 4096 + bytes(4096)");
    command(&yard, "finish", 5).ok();
    assert_eq!(zone(&yard, 5).0, "full");
    command(&yard, "reset", 5).ok();
    assert_eq!(zone(&yard, 5), ("empty".into(), 0));
    nbdsh(&yard.uri("s0"), "assert h.pread(4096, 5 << 20) == bytes(4096)");
}

#[test]
fn a_command_that_the_disk_refuses_fails() {
    let yard = Yard::serve(&[SMR]);
    // Not at the write pointer, and not a whole physical block of 4096 bytes.
    write(&yard, 5, 8, 8).fails();
    write(&yard, 5, 0, 1).fails();
    write(&yard, 5, 0, 8).ok();
    write(&yard, 5, 8, ZONE - 8).ok();
    write(&yard, 5, 0, 8).fails();
    // A conventional zone accepts any block at any offset.
    write(&yard, 1, 65, 1).ok();
    for number in 6..10 {
        command(&yard, "open", number).ok();
    }
    let refused = command(&yard, "open", 10).fails();
    assert!(refused.err.contains("4 zones are open already"), "{refused}");
    yard.command(&["zone", "reset-all", "s0"]).ok();
    command(&yard, "open", 10).ok();
    let refused = command(&yard, "reset", 0).fails();
    assert!(refused.err.contains("zone 0 is conventional"), "{refused}");
}

/// The disk `SMR` in files, as a device of a yard that is killed.
fn backed(disk: &Place, more: &str) -> String {
    format!("{SMR}&backing={}{more}", disk.file("smr"))
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    assert!(!yard.end().success());
}

#[test]
fn a_disk_in_files_outlives_a_kill() {
    let disk = Place::new();
    let uri = backed(&disk, "");
    let yard = Yard::serve(&[&uri]);
    nbdsh(
        &yard.uri("s0"),
        "import random\n\
         h.pwrite(random.Random(1).randbytes(1 << 20), 0)\n\
         h.pwrite(random.Random(2).randbytes(300 << 10), 5 << 20)\n\
         h.pwrite(random.Random(3).randbytes(1 << 20), 6 << 20)\n\
         h.pwrite(random.Random(4).randbytes(8 << 10), 7 << 20)\n\
         h.pwrite(random.Random(5).randbytes(4 << 10), 8 << 20)",
    );
    command(&yard, "finish", 7).ok();
    command(&yard, "reset", 8).ok();
    let second = blockyard(&["serve", &uri, "--nbd", &format!("unix:{}", disk.file("nbd"))]);
    let refused = second.fails();
    assert!(refused.err.contains("is in use by another process"), "{refused}");
    kill(yard);
    let yard = Yard::serve(&[&uri]);
    // After power-on no zone is open; nothing else has changed.
    assert_eq!(zone(&yard, 5), ("closed".into(), 600));
    assert_eq!(zone(&yard, 6), ("full".into(), ZONE));
    assert_eq!(zone(&yard, 7), ("full".into(), ZONE));
    assert_eq!(zone(&yard, 8), ("empty".into(), 0));
    nbdsh(
        &yard.uri("s0"),
        "import random\n\
         assert h.pread(1 << 20, 0) == random.Random(1).randbytes(1 << 20)\n\
         assert h.pread(300 << 10, 5 << 20) == random.Random(2).randbytes(300 << 10)\n\
         assert h.pread(1 << 20, 6 << 20) == random.Random(3).randbytes(1 << 20)\n\
         assert h.pread(8 << 10, 7 << 20) == random.Random(4).randbytes(8 << 10)\n\
         assert h.pread(4 << 10, 8 << 20) == bytes(4 << 10)\n\
         h.pwrite(bytes(4 << 10), (5 << 20) + (300 << 10))",
    );
    assert_eq!(zone(&yard, 5), ("implicit-open".into(), 608));
}

#[test]
fn a_volatile_cache_loses_what_was_not_flushed_and_only_that() {
    let disk = Place::new();
    let uri = backed(&disk, "&cache=volatile");
    let yard = Yard::serve(&[&uri]);
    nbdsh(
        &yard.uri("s0"),
        "import nbd\n\
         h.pwrite(b'a' * 8192, 5 << 20)\n\
         h.pwrite(b'a' * 8192, 0)\n\
         h.flush()\n\
         h.pwrite(b'b' * 4096, (5 << 20) + 8192)\n\
         h.pwrite(b'b' * 4096, 8192)\n\
         h.pwrite(b'c' * 4096, 12288, nbd.CMD_FLAG_FUA)",
    );
    assert_eq!(zone(&yard, 5).1, 24);
    kill(yard);
    let yard = Yard::serve(&[&uri]);
    assert_eq!(zone(&yard, 5), ("closed".into(), 16));
    nbdsh(
        &yard.uri("s0"),
        "assert h.pread(12288, 5 << 20) == b'a' * 8192 + bytes(4096)\n\
         assert h.pread(8192, 0) == b'a' * 8192\n\
         assert h.pread(4096, 12288) == b'c' * 4096\n\
         assert h.pread(4096, 8192) in (bytes(4096), b'b' * 4096)",
    );
}

#[test]
fn a_volatile_cache_is_emptied_before_the_yard_ends() {
    let disk = Place::new();
    let uri = backed(&disk, "&cache=volatile");
    for (round, end) in ["TERM", "remove"].into_iter().enumerate() {
        let mut yard = Yard::serve(&[&uri]);
        assert_eq!(zone(&yard, 5).1, 8 * round as u64);
        write(&yard, 5, 8 * round as u64, 8).ok();
        if end == "remove" {
            yard.command(&["remove", "s0"]).ok();
            kill(yard);
        } else {
            yard.signal(end);
            assert!(yard.end().success());
        }
    }
    assert_eq!(zone(&Yard::serve(&[&uri]), 5), ("closed".into(), 16));
}

#[test]
fn another_shape_or_another_thing_in_the_folder_is_refused() {
    let disk = Place::new();
    drop(Yard::serve(&[&backed(&disk, "")]));
    let socket = format!("unix:{}", disk.file("nbd"));
    let other = backed(&disk, "").replace("zone_size=1M", "zone_size=2M");
    let refused = blockyard(&["serve", &other, "--nbd", &socket]).fails();
    assert!(refused.err.contains("zone_size"), "{refused}");
    // A directory of its own, because the test holds a lock on its place.
    let directory = disk.file("stranger");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(format!("{directory}/notes"), "mine").unwrap();
    let stranger = format!("smr:///s0?size=16M&zone_size=1M&backing={directory}");
    let refused = blockyard(&["serve", &stranger, "--nbd", &socket]).fails();
    assert!(refused.err.contains("no zoned disk"), "{refused}");
}

/// The bug: `serve` of an SMR disk that another process has open had the exit code of a wrong
/// option, and `serve` of such a volume that of a refusal.
#[test]
fn a_disk_in_use_has_the_exit_code_of_a_volume_in_use() {
    let disk = Place::new();
    let (smr, volume) = (backed(&disk, ""), format!("volume:///v0?path={}", disk.file("pool")));
    let _yard = Yard::serve(&[&smr, &format!("{volume}&size=8M")]);
    let control = disk.file("second-control");
    for device in [smr, volume] {
        let line = ["serve", &device, "--nbd", "none", "--control", &control];
        let refused = blockyard(&line).fails();
        assert_eq!(refused.code, Some(6), "{refused}");
        assert!(refused.err.contains("in use by"), "{refused}");
    }
}

/// The bug: a disk in files whose superblock was lost was replaced by a new one. And the first mend
/// of what a refused opening leaves removed files that only have the names of a disk's files.
#[test]
fn files_without_a_superblock_are_kept() {
    let disk = Place::new();
    let device = backed(&disk, "");
    let yard = Yard::serve(&[&device]);
    let script = "h.pwrite(b'kept' * 1024, 0)\nh.flush()";
    nbdsh(&yard.uri("s0"), script);
    drop(yard);
    let file = |name: &str| disk.file(&format!("smr/{name}"));
    std::fs::rename(file("superblock"), disk.file("superblock")).unwrap();
    let control = disk.file("other-control");
    let serve =
        |device: &str| blockyard(&["serve", device, "--nbd", "none", "--control", &control]);
    let refused = serve(&device).fails();
    assert!(refused.err.contains("without `superblock`: restore that file"), "{refused}");
    std::fs::rename(disk.file("superblock"), file("superblock")).unwrap();
    nbdsh(&Yard::serve(&[&device]).uri("s0"), "assert h.pread(4096, 0) == b'kept' * 1024");
    // Parts that `split` has made of a file.
    let parts = disk.file("parts");
    std::fs::create_dir(&parts).unwrap();
    for part in ["data.00", "data.01"] {
        std::fs::write(format!("{parts}/{part}"), part).unwrap();
    }
    let refused = serve(&format!("smr:///s0?size=16M&zone_size=1M&backing={parts}")).fails();
    assert!(
        refused.err.contains("holds `data.0") && refused.err.contains("no zoned disk"),
        "{refused}"
    );
    for part in ["data.00", "data.01"] {
        assert_eq!(std::fs::read_to_string(format!("{parts}/{part}")).unwrap(), part);
    }
    assert_eq!(std::fs::read_dir(&parts).unwrap().count(), 2);
}

/// The bug: conventional zones leave no record in the journal, and a clean close removes the live
/// files, so a disk that had only those written was replaced by a new one when its superblock was
/// lost.
#[test]
fn a_disk_without_a_superblock_is_kept_whatever_it_has() {
    for more in ["", "&cache=volatile"] {
        for end in ["TERM", "KILL"] {
            let disk = Place::new();
            let device = backed(&disk, more);
            let mut yard = Yard::serve(&[&device]);
            nbdsh(&yard.uri("s0"), "h.pwrite(b'kept' * 1024, 0)\nh.flush()");
            yard.signal(end);
            _ = yard.end();
            let file = disk.file("smr/superblock");
            std::fs::rename(&file, disk.file("superblock")).unwrap();
            let control = disk.file("other-control");
            let line = ["serve", &device, "--nbd", "none", "--control", &control];
            let refused = blockyard(&line).fails();
            assert!(refused.err.contains("without `superblock`: restore"), "{more}: {refused}");
            std::fs::rename(disk.file("superblock"), &file).unwrap();
            let read = "assert h.pread(4096, 0) == b'kept' * 1024";
            nbdsh(&Yard::serve(&[&device]).uri("s0"), read);
        }
    }
}

/// The bug: next to an empty `lock`, files of another program with names of a disk's files were
/// overwritten.
#[test]
fn files_of_another_program_next_to_a_lock_are_kept() {
    for name in ["data.00", "tables", "superblock.new", "journal", "live.00"] {
        let disk = Place::new();
        let directory = disk.file("other");
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(format!("{directory}/lock"), "").unwrap();
        std::fs::write(format!("{directory}/{name}"), "mine\n").unwrap();
        let device = format!("smr:///s0?size=16M&zone_size=1M&backing={directory}");
        let control = disk.file("other-control");
        blockyard(&["serve", &device, "--nbd", "none", "--control", &control]).fails();
        assert_eq!(std::fs::read_to_string(format!("{directory}/{name}")).unwrap(), "mine\n");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2, "{name}");
    }
}
