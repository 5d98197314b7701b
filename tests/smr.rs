//! SMR disks through the whole program: bios become SCSI commands, and clients see what the disk
//! makes of them.

use crate::run::{nbdsh, run};
use crate::yard::Yard;

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
fn what_the_disk_refuses_is_refused() {
    let yard = Yard::serve(&[SMR]);
    // Off the write pointer, and not a whole physical block of 4096 bytes.
    write(&yard, 5, 8, 8).fails();
    write(&yard, 5, 0, 1).fails();
    write(&yard, 5, 0, 8).ok();
    write(&yard, 5, 8, ZONE - 8).ok();
    write(&yard, 5, 0, 8).fails();
    // A conventional zone takes any block anywhere.
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
