//! Scheduled scrubs and the warnings of `blockyard status` through the whole program.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use serde_json::Value;

use super::{kill, uri};
use crate::backup_ssh::wait_until;
use crate::place::Place;
use crate::run::nbdsh;
use crate::yard::{Yard, blockyard};

/// The bytes that [`fill`] writes.
const FILLED: u64 = 24 << 20;

/// What the log says when the yard begins a scrub by itself.
const BEGINS: &str = "scrub begins or continues";

fn pool_status(yard: &Yard) -> Value {
    yard.command(&["pool", "status", "--json"]).ok().json()[0].take()
}

/// Writes 24 MiB of random bytes to `v0`.
fn fill(yard: &Yard) {
    nbdsh(
        &yard.uri("v0"),
        "import random\n\
         for i in range(24): h.pwrite(random.Random(i).randbytes(1 << 20), i << 20)\n\
         h.flush()",
    );
}

#[test]
fn a_scheduled_scrub_that_is_paused_stays_paused_over_a_kill() {
    let pool = Place::new();
    let path = pool.file("pool");
    fill(&Yard::serve(&[&uri(&pool, "v0", "&size=64M&compress=none")]));
    let device = |rate: &str| uri(&pool, "v0", &format!("&scrub=monthly&scrub_rate={rate}"));
    // At this rate the scrub takes 24 s.
    // The position of a scrub is in the state directory.
    let state = pool.file("state");
    let serve = |rate: &str| Yard::serve(&["--state", &state, &device(rate)]);
    let yard = serve("1M");
    let has_begun = || pool_status(&yard)["scrub"]["verified_bytes"].as_u64() > Some(0);
    wait_until("the yard scrubs a pool without a scrub at once", has_begun);
    blockyard(&["volume", "scrub", &path, "--pause"]).ok();
    let is_paused = || pool_status(&yard)["scrub"]["paused"] == true;
    wait_until("the scrub is paused", is_paused);
    let before = pool_status(&yard);
    let verified = before["scrub"]["verified_bytes"].as_u64().unwrap();
    assert!((1..FILLED).contains(&verified) && before["last_scrub"].is_null(), "{before}");
    assert_eq!(yard.complained().matches(BEGINS).count(), 1, "{}", yard.complained());
    kill(yard);

    let yard = serve("0");
    let after = pool_status(&yard);
    assert_eq!(after["scrub"]["running"], false, "{after}");
    assert_eq!(after["scrub"]["paused"], true, "{after}");
    assert_eq!(after["scrub"]["verified_bytes"], verified, "{after}");
    let shown = yard.command(&["pool", "status"]).ok();
    assert!(shown.out.contains("paused"), "{shown}");
    blockyard(&["volume", "scrub", &path, "--resume"]).ok();
    let has_ended = || !pool_status(&yard)["last_scrub"].is_null();
    wait_until("the scrub is complete", has_ended);
    let ended = pool_status(&yard);
    assert!(ended["scrub"].is_null(), "{ended}");
    let (last, scrubs) = (&ended["last_scrub"], &ended["scrubs"]);
    assert_eq!((&last["damaged"], scrubs), (&0.into(), &1.into()), "{ended}");
    assert!(last["verified_bytes"].as_u64() >= Some(FILLED), "both parts are counted: {ended}");
    // The yard did not continue it before the command.
    assert_eq!(yard.complained().matches(BEGINS).count(), 1, "{}", yard.complained());
    let status = yard.command(&["status"]).ok();
    assert_eq!(status.out, "OK: 1 device, 1 pool, no warnings\n");
}

#[test]
fn a_pool_above_its_mark_is_a_warning_that_is_logged_once() {
    let place = Place::new();
    // A pool of its own size, so that its fill does not depend on the file system.
    let disk = place.file("pool");
    File::create(&disk).unwrap().set_len(128 << 20).unwrap();
    let yard = Yard::serve(&[&uri(&place, "v0", "&size=64M&compress=none&warn_fill=1")]);
    yard.command(&["status"]).ok();
    fill(&yard);
    for _ in 0..5 {
        let status = yard.command(&["status"]).fails();
        assert_eq!(status.code, Some(1), "{status}");
        let first = format!("WARNING: 1 device, 1 pool, 1 warning\nwarning: pool_fill {disk}: ");
        assert!(status.out.starts_with(&first), "{status}");
    }
    let log = yard.complained();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("pool_fill")).collect();
    assert!(
        matches!(lines[..], [line] if line.contains("WARN") && line.contains("% full")),
        "{log}"
    );
}

#[test]
fn damage_that_a_scheduled_scrub_finds_is_critical() {
    let pool = Place::new();
    let path = pool.file("pool");
    let text = "a block that rots on the disk ..";
    let mut yard = Yard::serve(&[&uri(&pool, "v0", "&size=64M&compress=none")]);
    nbdsh(&yard.uri("v0"), &format!("h.pwrite(b'{text}' * 512, 1 << 20)\nh.flush()"));
    yard.signal("TERM");
    assert!(yard.end().success());
    let mut changed = 0;
    for entry in fs::read_dir(&path).unwrap() {
        let file = entry.unwrap().path();
        let at = blockyard_testing::position(&fs::read(&file).unwrap(), text.as_bytes());
        if let Some(at) = at {
            let file = File::options().write(true).open(file).unwrap();
            file.write_all_at(b"b", at as u64).unwrap();
            changed += 1;
        }
    }
    assert_eq!(changed, 1);
    let yard = Yard::serve(&[&uri(&pool, "v0", "&scrub=monthly")]);
    wait_until("the scrub is complete", || !pool_status(&yard)["last_scrub"].is_null());
    let status = yard.command(&["status"]).fails();
    assert_eq!(status.code, Some(2), "{status}");
    let first = format!(
        "CRITICAL: 1 device, 1 pool, 1 critical, 0 warnings\ncritical: scrub_damage {path}: "
    );
    assert!(status.out.starts_with(&first), "{status}");
    let json = yard.command(&["status", "--json"]).fails().json();
    assert_eq!((&json["state"], &json["backups"]), (&"critical".into(), &Value::Array(vec![])));
}
