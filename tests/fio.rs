//! fio writes at random from four jobs and verifies every block that it reads back.

use crate::run::run;
use crate::yard::Yard;

fn verify(device: &str, export: &str, more: &[&str]) {
    let yard = Yard::serve(&[device]);
    let uri = format!("--uri={}", yard.uri(export));
    let mut line = vec!["fio", "--name=verify", "--ioengine=nbd", &uri, "--numjobs=4"];
    line.extend(["--iodepth=16", "--size=16M", "--offset_increment=16M", "--randrepeat=0"]);
    line.extend(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]);
    line.extend(["--group_reporting", "--output-format=json"]);
    line.extend(more);
    let run = run(&line).ok();
    let report = &run.out[run.out.find('{').unwrap_or(0)..];
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0, "{run}");
    assert!(job["write"]["total_ios"].as_u64() > Some(0), "{run}");
    assert!(job["read"]["total_ios"].as_u64() > Some(0), "{run}");
}

#[test]
fn random_mixed_io_verifies() {
    verify(
        "null:///mem0?size=64M&memory_backed=1&discard=1",
        "mem0",
        &["--rw=randrw", "--rwmixread=40", "--bsrange=512-64k", "--bs_unaligned=0"],
    );
}

#[test]
fn random_writes_verify_through_a_cache() {
    verify(
        "null:///mem0?size=64M&memory_backed=1&cache_size=8M",
        "mem0",
        &["--rw=randwrite", "--bs=4k", "--fsync=32"],
    );
}
