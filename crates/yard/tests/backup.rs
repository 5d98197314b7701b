//! Backup policies that a daemon runs, on a clock of the test: targets that work, fail and hang.
#![allow(clippy::unwrap_used)] // Test code.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockyard_volume::{Options, Running};
use blockyard_volume_admin::incoming::verify;
use blockyard_volume_admin::prune::Period;
use blockyard_volume_admin::receive::{ReceiveTarget, receive};
use blockyard_volume_format::stream::{Head, Kind, RECORD_BYTES, Record};
use blockyard_yard::backup::{BackupView, Backups};
use blockyard_yard::config::BackupSettings;
use blockyard_yard::devices::Devices;
use blockyard_yard::paths::TempDir;
use blockyard_yard::uri;

/// 2033-05-18 03:33:20 UTC.
const NOW: u64 = 2_000_000_000;

/// The end of that hour.
const NEXT_HOUR: u64 = 2_000_001_600;

struct Fixture {
    temp: TempDir,
    devices: Arc<Devices>,
    backups: Arc<Backups>,
}

impl Fixture {
    /// A pool with a volume `v0` of 256 KiB of data, which is a device.
    fn new() -> Fixture {
        let temp = TempDir::new().unwrap();
        let pool = temp.path().join("pool");
        {
            let running = Running::open(&pool, Options::default()).unwrap();
            let target = ReceiveTarget { name: Some("v0"), is_resumable: false };
            receive(&running, &target, &mut &stream()[..], &mut |_| {}).unwrap();
        }
        let devices = Devices::new();
        let uri = format!("volume:///v0?path={}", pool.display());
        devices.add(uri::parse(&uri).unwrap()).unwrap();
        Fixture { temp, devices, backups: Arc::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    /// Sets a policy whose target is a script of the shell; `$0` is a file for the stream.
    fn set(&self, script: &str, timeout_s: u64, keep: Option<&str>) {
        let file = self.path("{volume}.stream").display().to_string();
        let target = ["sh", "-c", script, &file].map(str::to_owned).to_vec();
        self.backups.set(&[BackupSettings {
            name: "off".to_owned(),
            pool: self.path("pool"),
            volumes: Vec::new(),
            snapshots: Period::Hour,
            keep: keep.map(|keep| keep.parse().unwrap()),
            target,
            timeout: Duration::from_secs(timeout_s),
        }]);
    }

    fn run(&self, now: u64) -> BackupView {
        self.backups.run_due(&self.devices, now);
        self.backups.views().remove(0)
    }

    /// Receives the last stream in another pool.
    fn receive(&self) -> String {
        let there = Running::open(&self.path("there"), Options::default()).unwrap();
        let stream = std::fs::read(self.path("v0.stream")).unwrap();
        let target = ReceiveTarget::default();
        receive(&there, &target, &mut &stream[..], &mut |_| {}).unwrap().snapshots.remove(0)
    }

    /// The snapshots of the policy with the tags of their holds.
    fn snapshots(&self) -> Vec<(String, Vec<String>)> {
        let running = self.devices.pools().remove(0);
        let volumes = running.pool().volumes();
        let snapshots = volumes.snapshots_of("v0").filter(|it| it.meta.name.contains("@off-"));
        let tags = |id| volumes.holds_of(id).iter().map(|hold| hold.tag.clone()).collect();
        snapshots.map(|it| (it.meta.name.clone(), tags(it.meta.id))).collect()
    }
}

/// A stream of `v0@first`.
fn stream() -> Vec<u8> {
    let name = "v0@first".to_owned();
    let head = Head { block_bytes: 4096, blocks: 64, guid: 7, name, ..Head::default() };
    let bytes = head.print();
    let mut out = bytes.to_vec();
    let mut payload = vec![0; 64 * 4096];
    for (at, byte) in payload.iter_mut().enumerate() {
        *byte = (at * at / 255) as u8;
    }
    let mut chain = Head::chain(&bytes);
    let data = Record { kind: Kind::Data, len: 64 * 4096, first: 0, count: 64, number: 0 };
    let end = Record { kind: Kind::End, len: 0, first: 64, count: 0, number: 1 };
    for (record, payload) in [(data, &payload[..]), (end, &[])] {
        let mut bytes = [0; RECORD_BYTES];
        chain = record.print(chain, payload, &mut bytes);
        out.extend(bytes);
        out.extend(payload);
    }
    out
}

#[test]
fn each_period_has_one_snapshot_which_is_sent_on_the_last_one() {
    let fixture = Fixture::new();
    fixture.set("cat > \"$0\"", 60, Some("1h"));
    let view = fixture.run(NOW);
    assert_eq!((view.error, view.runs, view.failures), (None, 1, 0));
    assert_eq!((view.last_success, view.next_run), (Some(NOW), Some(NEXT_HOUR)));
    let len = |path: &Path| std::fs::metadata(path).unwrap().len();
    assert_eq!(view.sent_bytes, len(&fixture.path("v0.stream")));
    let off = |names: &[&str]| {
        let held = names.iter().enumerate().map(|(at, name)| {
            let tags = if at + 1 == names.len() { vec!["off".to_owned()] } else { Vec::new() };
            (format!("v0@off-{name}"), tags)
        });
        held.collect::<Vec<_>>()
    };
    assert_eq!(fixture.snapshots(), off(&["2033-05-18T03"]));
    assert_eq!(fixture.receive(), "v0@off-2033-05-18T03");
    // Nothing is due in the same hour.
    assert_eq!(fixture.run(NEXT_HOUR - 1).runs, 1);
    let view = fixture.run(NEXT_HOUR);
    assert_eq!((view.error, view.runs, view.next_run), (None, 2, Some(NEXT_HOUR + 3600)));
    assert_eq!(fixture.receive(), "v0@off-2033-05-18T04");
    assert!(len(&fixture.path("v0.stream")) < 1000, "only what has changed");
    // All were made in one hour of the real clock, of which the newest is kept.
    assert_eq!(fixture.snapshots(), off(&["2033-05-18T04"]));
    let names: Vec<_> = fixture.devices.pools()[0].pool().list();
    assert!(names.iter().any(|meta| meta.name == "v0@first"), "others' snapshots stay");
    // A new daemon goes on from what is in the pool.
    let (new, old) = (Arc::<Backups>::default(), &fixture.backups);
    assert_eq!(old.views().len(), 1);
    let fixture = Fixture { backups: new, ..fixture };
    fixture.set("cat > \"$0\"", 60, None);
    let view = fixture.run(NEXT_HOUR + 10);
    assert_eq!((view.error, view.sent_bytes), (None, 0), "it was sent already");
    assert_eq!(fixture.run(NEXT_HOUR + 3600).error, None);
    assert_eq!(fixture.snapshots(), off(&["2033-05-18T04", "2033-05-18T05"]));
    assert_eq!(fixture.receive(), "v0@off-2033-05-18T05");
}

#[test]
fn a_target_that_fails_is_tried_again() {
    let fixture = Fixture::new();
    for (script, wanted) in [
        ("cat > /dev/null; echo no space there >&2; exit 3", "exit status: 3: no space there"),
        ("exit 4", "exit status: 4"),
        ("head -c 1000 > /dev/null; kill -9 $$", "signal: 9"),
    ] {
        fixture.set(script, 60, None);
        let view = fixture.run(NOW);
        let error = view.error.unwrap();
        assert!(error.starts_with("`v0`: the target `sh` failed with"), "{error}");
        assert!(error.contains(wanted), "{error}");
        assert_eq!((view.failures, view.last_success), (1, None));
        assert_eq!(view.next_run, Some(NOW + 600));
        // The snapshot is made once, and is not marked as sent.
        assert_eq!(fixture.snapshots(), [("v0@off-2033-05-18T03".to_owned(), Vec::new())]);
    }
    fixture.set("cat > \"$0\"", 60, None);
    assert_eq!(fixture.run(NOW + 600).error, None);
    assert_eq!(fixture.receive(), "v0@off-2033-05-18T03");
    let mut settings = BackupSettings {
        name: "x".to_owned(),
        pool: fixture.path("pool"),
        volumes: vec!["none".to_owned(), "v0".to_owned()],
        snapshots: Period::Day,
        keep: None,
        target: vec!["/nowhere/program".to_owned()],
        timeout: Duration::from_secs(1),
    };
    fixture.backups.set(&[settings.clone()]);
    let error = fixture.run(NOW).error.unwrap();
    assert!(error.contains("`none@x-2033-05-18`: there is no volume `none`"), "{error}");
    assert!(error.contains("`v0`: cannot start the target `/nowhere/program`"), "{error}");
    settings.pool = fixture.path("other");
    fixture.backups.set(&[settings]);
    let error = fixture.run(NOW).error.unwrap();
    assert!(error.contains("none that this yard has open"), "{error}");
}

#[test]
fn a_target_that_hangs_is_killed() {
    let fixture = Fixture::new();
    // The second one leaves a process in another group, which keeps the pipe open.
    for script in ["echo waiting >&2; sleep 600", "exec 3<&0; setsid sleep 8 & sleep 600"] {
        fixture.set(script, 1, None);
        let error = fixture.run(NOW).error.unwrap();
        assert!(error.contains("took longer than 1 s and was killed"), "{error}");
        assert_eq!(error.ends_with(": waiting"), script.starts_with("echo"), "{error}");
    }
}

#[test]
fn the_end_of_the_daemon_ends_a_target() {
    let fixture = Fixture::new();
    fixture.set("touch \"$0\"; sleep 600", 600, None);
    let thread = fixture.backups.start(&fixture.devices).unwrap();
    while !fixture.path("v0.stream").exists() {
        std::thread::yield_now();
    }
    assert!(fixture.backups.views()[0].running);
    drop(thread);
    let view = fixture.backups.views().remove(0);
    assert_eq!(view.error.unwrap(), "`v0`: the daemon ends");
    assert!(verify(&mut &stream()[..], &mut |_| {}).is_ok());
}

/// Regression: after a clock that was a year ahead, an hourly policy did not run for a year.
#[test]
fn a_clock_that_is_set_back_does_not_stop_backups() {
    let fixture = Fixture::new();
    fixture.set("cat > $0", 60, None);
    let ahead = NOW + 365 * 86_400;
    assert_eq!(fixture.run(ahead).runs, 1);
    let view = fixture.run(NOW);
    assert_eq!((view.runs, view.error, view.next_run), (2, None, Some(NEXT_HOUR)));
    assert_eq!(fixture.run(NOW + 1).runs, 2);
    assert!(fixture.snapshots().iter().any(|(name, _)| name == "v0@off-2033-05-18T03"));
}
