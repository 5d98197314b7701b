//! Zones, through the control API and with a client's writes.

use serde_json::Value;

use crate::run::{nbdsh, run};
use crate::yard::Yard;

/// Sixteen zones of a mebibyte, the first two of them conventional; four open, six active.
const ZONED: &str = "null:///z0?size=16M&zoned=1&zone_size=1M&zone_nr_conv=2&zone_max_open=4\
                     &zone_max_active=6&memory_backed=1";
/// Sectors of a zone.
const ZONE: u64 = 2048;

struct Zones(Yard);

impl Zones {
    fn serve() -> Zones {
        Zones(Yard::serve(&[ZONED]))
    }

    /// The condition of a zone and its write pointer, counted from its start.
    fn zone(&self, number: u64) -> (String, u64) {
        let report = self.0.command(&["zone", "report", "z0", "--json"]).ok().json();
        let zones = report.as_array().or_else(|| report["zones"].as_array()).cloned().unwrap();
        assert_eq!(zones.len(), 16);
        let zone: &Value = &zones[number as usize];
        assert_eq!(zone["start"], number * ZONE, "{zone}");
        let pointer = zone["wptr"].as_u64().unwrap_or(0);
        (zone["cond"].as_str().unwrap().to_string(), pointer)
    }

    fn command(&self, command: &str, zone: u64) -> crate::run::Run {
        self.0.command(&[
            "zone",
            command,
            "z0",
            "--offset",
            &format!("{}", zone * ZONE),
            "--count",
            "1",
        ])
    }

    fn write(&self, zone: u64, sectors_in: u64, sectors: u64) -> crate::run::Run {
        let script =
            format!("h.pwrite(b'z' * ({sectors} * 512), {} * 512)", zone * ZONE + sectors_in);
        run(&["nbdsh", "--uri", &self.0.uri("z0"), "--command", &script])
    }
}

#[test]
fn a_zone_goes_through_its_conditions() {
    let zones = Zones::serve();
    assert_eq!(zones.zone(0).0, "not-wp");
    assert_eq!(zones.zone(5), ("empty".into(), 0));
    zones.write(5, 0, 8).ok();
    assert_eq!(zones.zone(5), ("implicit-open".into(), 8));
    zones.command("open", 5).ok();
    assert_eq!(zones.zone(5), ("explicit-open".into(), 8));
    zones.command("close", 5).ok();
    assert_eq!(zones.zone(5), ("closed".into(), 8));
    zones.command("finish", 5).ok();
    assert_eq!(zones.zone(5).0, "full");
    zones.command("reset", 5).ok();
    assert_eq!(zones.zone(5), ("empty".into(), 0));
    // Data beyond the write pointer read as in null_blk.
    nbdsh(&zones.0.uri("z0"), "assert h.pread(4096, 5 << 20) == b'\\xff' * 4096");
}

#[test]
fn a_write_off_the_pointer_is_refused() {
    let zones = Zones::serve();
    zones.write(5, 8, 8).fails();
    zones.write(5, 0, 8).ok();
    zones.write(5, 0, 8).fails();
    zones.write(5, 8, ZONE - 8).ok();
    assert_eq!(zones.zone(5).0, "full");
    zones.write(5, 0, 8).fails();
    // A conventional zone accepts any write.
    zones.write(1, 64, 8).ok();
    zones.write(1, 0, 8).ok();
}

#[test]
fn the_limits_hold() {
    let zones = Zones::serve();
    for zone in 2..6 {
        zones.command("open", zone).ok();
    }
    // No write opened a zone, so none may be closed to make room.
    zones.command("open", 6).fails().says(&["ZONE_OPEN_RESOURCE"]);
    zones.write(6, 0, 8).fails();
    assert_eq!(zones.zone(6).0, "empty");
    // Two more zones may become active if two are closed after a write.
    zones.write(2, 0, 8).ok();
    zones.write(3, 0, 8).ok();
    zones.command("close", 2).ok();
    zones.command("close", 3).ok();
    zones.command("open", 6).ok();
    zones.command("open", 7).ok();
    zones.command("open", 8).fails().says(&["ZONE_ACTIVE_RESOURCE"]);
    zones.command("reset", 2).ok();
    zones.command("close", 4).ok();
    zones.command("open", 8).ok();
}

#[test]
fn a_zone_opened_by_a_write_makes_room() {
    let zones = Zones::serve();
    for zone in 2..7 {
        zones.write(zone, 0, 8).ok();
    }
    // The oldest zone was closed for the fifth.
    assert_eq!(zones.zone(2), ("closed".into(), 8));
    assert_eq!(zones.zone(6), ("implicit-open".into(), 8));
    zones.0.command(&["zone", "reset-all", "z0"]).ok();
    for zone in 2..16 {
        assert_eq!(zones.zone(zone), ("empty".into(), 0));
    }
}

#[test]
fn commands_on_what_is_no_such_zone_are_refused() {
    let zones = Zones::serve();
    zones.command("open", 0).fails();
    zones.command("reset", 16).fails();
    zones.0.command(&["zone", "report", "nothing"]).fails().says(&["nothing"]);
    zones.0.command(&["add", "null:///plain?size=1M"]).ok();
    zones.0.command(&["zone", "report", "plain"]).fails().says(&["plain"]);
}

#[test]
fn the_report_has_the_columns_of_blkzone() {
    let zones = Zones::serve();
    zones.write(5, 0, 8).ok();
    let report = zones.0.command(&["zone", "report", "z0"]).ok().out;
    let line = report.lines().nth(5).unwrap();
    for part in ["start: 0x000002800", "len 0x000800", "wptr 0x000008", "zcond: 2(oi)", "type: 2"] {
        assert!(line.contains(part), "{part}: {report}");
    }
}
