//! Zones: fio keeps its own write pointers, so a write at another position is an error.

use super::{VERIFY, done, engine, fio};
use crate::place::Place;

/// The options that all published lines of zone locks share.
const COMMON: &str = "--filename=/dev/nullb0 --name=z --dev=null:///nullb0?size=64G&zoned=1&\
                      zone_size=256M --zonemode=zbd --direct=1 --bs=4k --time_based --runtime=1 \
                      --group_reporting --gtod_reduce=1 --numjobs=96";

#[test]
fn the_published_lines_of_zone_locks_run() {
    let Some(engine) = engine() else { return };
    let common: Vec<&str> = COMMON.split_whitespace().collect();
    let writes = [&common[..], &["--rw=randwrite", "--iodepth=1"]].concat();
    assert!(done(fio(&engine, &writes))[1] > 0);
    let more = ["--rw=randread", "--read_beyond_wp=1", "--iodepth=8"];
    assert!(done(fio(&engine, &[&common[..], &more].concat()))[0] > 0);
    // The baseline of the published "before".
    let before = [&common[..], &["--before=one-lock"], &more].concat();
    assert!(done(fio(&engine, &before))[0] > 0);
}

#[test]
fn zones_verify_within_the_limits_of_the_device() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///z?size=64M&zoned=1&zone_size=4M&zone_capacity=3M&zone_nr_conv=2&\
                  memory_backed=1&zone_max_open=4&zone_max_active=4";
    for depth in ["--iodepth=1", "--iodepth=16"] {
        let mut line = vec![device, "--filename=/dev/z", "--name=z", "--zonemode=zbd"];
        line.extend(["--direct=1", "--rw=randwrite", "--bs=32k", "--io_size=16M", depth]);
        line.extend(["--numjobs=2", "--offset_increment=32M", "--size=32M"]);
        line.extend(VERIFY);
        assert!(done(fio(&engine, &line))[1] > 0);
    }
}

/// Bios become SCSI commands, and fio verifies its data, in memory and in files.
#[test]
fn a_shingled_disk_verifies() {
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let disk = "--dev=smr:///z?size=64M&zone_size=4M&zone_nr_conv=2&zone_max_open=4";
    let backed = format!("{disk}&backing={}", place.file("disk"));
    for (device, depth) in [(disk, "--iodepth=1"), (disk, "--iodepth=16"), (&backed, "--iodepth=4")]
    {
        let mut line = vec![device, "--filename=/dev/z", "--name=z", "--zonemode=zbd"];
        line.extend(["--direct=1", "--rw=randwrite", "--bs=32k", "--io_size=16M", depth]);
        line.extend(["--numjobs=2", "--offset_increment=32M", "--size=32M"]);
        line.extend(VERIFY);
        assert!(done(fio(&engine, &line))[1] > 0);
    }
}

/// One process of fio writes, and another one finds its data and its write pointers.
#[test]
fn zones_in_files_are_found_by_another_process() {
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let device = format!(
        "--dev=null:///z?size=64M&zoned=1&zone_size=4M&zone_capacity=3M&zone_max_open=4&backing={}",
        place.file("zones")
    );
    let job = |rw: &str, more: &[&str]| {
        let mut line = vec![device.as_str(), "--filename=/dev/z", "--name=z", "--zonemode=zbd"];
        line.extend(["--direct=1", rw, "--bs=32k", "--iodepth=4", "--verify=crc32c"]);
        line.extend(["--verify_fatal=1", "--verify_state_save=0"]);
        line.extend(more);
        done(fio(&engine, &line))
    };
    // 768 blocks fill eight zones. The next process goes on at the write pointers that it finds.
    assert_eq!(job("--rw=write", &["--size=32M", "--do_verify=0"])[1], 768);
    assert_eq!(job("--rw=read", &["--size=32M"])[0], 768);
    assert_eq!(job("--rw=write", &["--offset=32M", "--size=32M", "--do_verify=0"])[1], 768);
    assert_eq!(job("--rw=read", &["--size=64M"])[0], 1536);
}

#[test]
fn zones_are_reset_when_they_are_full() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///z?size=16M&zoned=1&zone_size=4M";
    let mut line = vec![device, "--filename=z", "--name=z", "--zonemode=zbd", "--direct=1"];
    line.extend(["--rw=write", "--bs=64k", "--size=16M", "--io_size=64M", "--iodepth=8"]);
    assert_eq!(done(fio(&engine, &line))[1], 1024);
    // Trims are zone resets there.
    let mut line = vec![device, "--filename=z", "--zonemode=zbd", "--direct=1", "--bs=4M"];
    line.extend(["--name=w", "--rw=write", "--name=t", "--stonewall", "--rw=trim"]);
    let trims = done(fio(&engine, &line))[2];
    assert_eq!(trims, 4);
}

#[test]
fn latencies_of_resets_are_those_of_resets() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///z?size=64M&zoned=1&zone_size=1M";
    for depth in ["--iodepth=1", "--iodepth=8"] {
        let mut line = vec![device, "--filename=z", "--zonemode=zbd", "--direct=1", "--bs=1M"];
        line.extend([depth, "--name=w", "--rw=write", "--name=t", "--stonewall", "--rw=trim"]);
        let run = fio(&engine, &line).ok();
        let report = &run.out[run.out.find('{').unwrap()..];
        let report: serde_json::Value = serde_json::from_str(report).unwrap();
        let trim = &report["jobs"][1]["trim"];
        let mean = |kind: &str| trim[kind]["mean"].as_f64().unwrap();
        assert_eq!(trim["total_ios"], 64, "{run}");
        assert!(mean("clat_ns") <= mean("lat_ns"), "{run}");
    }
}

#[test]
fn one_zoned_device_has_one_filename() {
    let Some(engine) = engine() else { return };
    // Without --filename each job has a file of its own, and fio keeps a write pointer for each.
    let device = "--dev=null:///z?size=16M&zoned=1&zone_size=4M";
    let line = [device, "--name=z", "--zonemode=zbd", "--direct=1", "--rw=write", "--numjobs=2"];
    fio(&engine, &line).fails().says(&["filename: zoned device `z`", "--filename=/dev/z"]);
}
