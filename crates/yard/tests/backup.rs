//! Backup policies that a daemon runs, on a clock of the test: targets that work, fail and hang.
#![allow(clippy::unwrap_used)] // Test code.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockyard_volume::{Options, Running, Secret, VolumeError};
use blockyard_volume_admin::incoming::verify;
use blockyard_volume_admin::prune::Period;
use blockyard_volume_admin::receive::{ReceiveTarget, receive};
use blockyard_volume_format::stream::{Head, Kind, RECORD_BYTES, Record, ResumeToken};
use blockyard_yard::backup::{BackupView, Backups};
use blockyard_yard::config::BackupSettings;
use blockyard_yard::devices::Devices;
use blockyard_yard::paths::TempDir;
use blockyard_yard::uri;
use zeroize::Zeroizing;

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
    /// A pool with a volume `v0` of 252 KiB of data, which is a device.
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
            raw: true,
        }]);
    }

    /// Sets a policy whose target writes each stream to the next of the numbered files. It refuses
    /// one stream, if the file `said` is there, with the text of that file.
    fn set_refusing(&self) {
        let said = self.path("said").display().to_string();
        let script = format!(
            "n=1; while test -e \"$0.$n\"; do n=$((n+1)); done; cat > \"$0.$n\"; \
             test ! -e {said} || {{ cat {said} >&2; rm {said}; exit 1; }}"
        );
        self.set(&script, 60, None);
    }

    fn numbered(&self, number: u32) -> PathBuf {
        self.path(&format!("v0.stream.{number}"))
    }

    /// The pool that receives.
    fn there(&self) -> Arc<Running> {
        Running::open(&self.path("there"), Options::default()).unwrap()
    }

    /// Receives a numbered file as `volume receive -s` does. Returns the new snapshots.
    fn take(&self, there: &Running, number: u32) -> Result<Vec<String>, VolumeError> {
        let stream = std::fs::read(self.numbered(number)).unwrap();
        let target = ReceiveTarget { name: None, is_resumable: true };
        receive(there, &target, &mut &stream[..], &mut |_| {}).map(|received| received.snapshots)
    }

    fn run(&self, now: u64) -> BackupView {
        self.backups.run_due(&self.devices, now);
        self.backups.views().remove(0)
    }

    /// Receives the last stream in another pool.
    fn receive(&self) -> String {
        let there = self.there();
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
    // The 33rd block is zeros, so that a stream of the volume has two records with contents.
    let data = Record { kind: Kind::Data, len: 32 * 4096, first: 0, count: 32, number: 0 };
    let more = Record { len: 31 * 4096, first: 33, count: 31, number: 1, ..data };
    let end = Record { kind: Kind::End, len: 0, first: 64, count: 0, number: 2 };
    let (first, last) = (&payload[..32 * 4096], &payload[33 * 4096..]);
    for (record, payload) in [(data, first), (more, last), (end, &[])] {
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
        raw: true,
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

/// The target of the test writes each stream to a file. It refuses one stream with what
/// `volume receive -s`, called by the test, says of the stream before.
#[test]
fn a_stream_that_broke_off_is_continued_and_all_that_is_missing_is_sent() {
    let fixture = Fixture::new();
    let there = fixture.there();
    let (said, file) = (fixture.path("said"), |number| fixture.numbered(number));
    let len = |number| std::fs::metadata(file(number)).unwrap().len();
    let take = |number| fixture.take(&there, number);
    // The connection breaks: the target has a part, of which the policy does not know.
    fixture.set("head -c 150000 > \"$0.1\"; exit 1", 60, None);
    assert!(fixture.run(NOW).error.is_some());
    assert!(take(1).unwrap_err().to_string().contains("--resume 1-"));
    // What the target says of the stream from its beginning.
    let refusal = take(1).unwrap_err().to_string();
    assert!(refusal.contains("is partly received: it has `v0@off-"), "{refusal}");
    std::fs::write(&said, refusal).unwrap();
    // In the next hour the first snapshot is begun again, refused and continued, and the second one
    // follows it.
    fixture.set_refusing();
    let view = fixture.run(NEXT_HOUR);
    assert_eq!((view.error, view.sent_bytes), (None, len(3) + len(4)));
    assert!(len(3) < len(2) && !file(5).exists(), "{} of {}", len(3), len(2));
    assert_eq!(take(3).unwrap(), ["v0@off-2033-05-18T03"]);
    assert_eq!(take(4).unwrap(), ["v0@off-2033-05-18T04"]);
    let tags: Vec<_> = fixture.snapshots().into_iter().map(|(_, tags)| tags).collect();
    assert_eq!(tags, [vec![], vec!["off".to_owned()]]);
    // The token of another stream is not used.
    let running = fixture.devices.pools().remove(0);
    let guid = running.pool().find("v0@first").unwrap().meta.guid;
    let token = ResumeToken { guid, base: None, start: 1, is_raw: false };
    std::fs::write(&said, format!("it has another one: `volume send --resume {token}`")).unwrap();
    let error = fixture.run(NEXT_HOUR + 3600).error.unwrap();
    assert!(error.contains("it has another one"), "{error}");
    assert!(file(5).exists() && !file(6).exists());
}

/// Regression: a daemon that was killed after a stream had arrived, and before its hold, sent the
/// snapshot again in each run, and the target refused it.
#[test]
fn a_snapshot_that_arrived_and_is_not_held_does_not_stop_the_backup() {
    let fixture = Fixture::new();
    let there = fixture.there();
    let take = |number| fixture.take(&there, number);
    fixture.set("cat > \"$0.1\"; exit 1", 60, None);
    assert!(fixture.run(NOW).error.is_some());
    assert_eq!(take(1).unwrap(), ["v0@off-2033-05-18T03"]);
    std::fs::write(fixture.path("said"), take(1).unwrap_err().to_string()).unwrap();
    fixture.set_refusing();
    let view = fixture.run(NEXT_HOUR);
    assert_eq!(view.error, None);
    assert!(view.sent_bytes < 2000, "the end of the first one, and an empty second one");
    assert_eq!(take(3).unwrap(), ["v0@off-2033-05-18T03"]);
    assert_eq!(take(4).unwrap(), ["v0@off-2033-05-18T04"]);
    let tags: Vec<_> = fixture.snapshots().into_iter().map(|(_, tags)| tags).collect();
    assert_eq!(tags, [vec![], vec!["off".to_owned()]]);
}

/// A target that succeeds can have said something that an operator has to know, such as that the
/// key of the volume has another passphrase there.
#[test]
fn what_a_target_says_is_kept_though_it_succeeds() {
    let fixture = Fixture::new();
    fixture.set("cat > \"$0\"; echo note: v0 opens by another passphrase >&2", 60, None);
    let view = fixture.run(NOW);
    assert_eq!(view.error, None);
    let note = "`v0@off-2033-05-18T03`: note: v0 opens by another passphrase";
    assert_eq!(view.note.as_deref(), Some(note));
}

/// Regression: while the target was away no snapshot was pruned, also of those that it has.
#[test]
fn snapshots_that_were_sent_are_pruned_while_the_target_fails() {
    let fixture = Fixture::new();
    fixture.set("cat > \"$0\"", 60, None);
    for now in [NOW, NEXT_HOUR] {
        assert_eq!(fixture.run(now).error, None);
    }
    // A new daemon knows when the last one was made that was sent.
    let fixture = Fixture { backups: Arc::default(), ..fixture };
    fixture.set("exit 1", 60, Some("1h"));
    for now in [NEXT_HOUR + 3600, NEXT_HOUR + 7200] {
        let view = fixture.run(now);
        assert!(view.error.is_some());
        let running = fixture.devices.pools().remove(0);
        let sent = running.pool().find("v0@off-2033-05-18T04").unwrap().listed().created;
        assert_eq!(view.last_success, Some(sent));
    }
    let names: Vec<_> = fixture.snapshots().into_iter().map(|(name, _)| name).collect();
    let wanted = ["04", "05", "06"].map(|hour| format!("v0@off-2033-05-18T{hour}"));
    assert_eq!(names, wanted, "those that the target does not have stay");
}

/// A policy needs no key of an encrypted volume, and its streams have nothing in plain.
#[test]
fn an_encrypted_volume_is_sent_while_it_is_locked() {
    let fixture = Fixture::new();
    let running = fixture.devices.pools().remove(0);
    let secret = Secret::Key(Zeroizing::new(vec![7; 32]));
    running.create_reserved("secret", 1 << 20, 0, 0, Some(&secret)).unwrap();
    fixture.set("cat > \"$0\"", 60, None);
    assert_eq!(fixture.run(NOW).error, None);
    let is_raw = |name: &str| {
        let stream = std::fs::read(fixture.path(name)).unwrap();
        verify(&mut &stream[..], &mut |_| {}).unwrap().snapshots[0].head.is_raw()
    };
    assert!(is_raw("secret.stream") && !is_raw("v0.stream"));
    // Without `raw` the volume has to be unlocked.
    let set = |raw: bool| {
        let file = fixture.path("{volume}.stream").display().to_string();
        let target = ["sh", "-c", "cat > \"$0\"", &file].map(str::to_owned).to_vec();
        let volumes = vec!["secret".to_owned()];
        let (pool, snapshots) = (fixture.path("pool"), Period::Day);
        let (keep, timeout) = (None, Duration::from_secs(60));
        let name = "plain".to_owned();
        fixture.backups.set(&[BackupSettings {
            name,
            pool,
            volumes,
            snapshots,
            keep,
            target,
            timeout,
            raw,
        }]);
    };
    set(false);
    let error = fixture.run(NOW).error.unwrap();
    assert!(error.contains("`secret@plain-2033-05-18` is encrypted and locked"), "{error}");
    running.unlock("secret", &secret).unwrap();
    set(false);
    assert_eq!(fixture.run(NOW).error, None);
    assert!(!is_raw("secret.stream"));
}

/// Regression: the token that the target printed decided whether the stream was raw, so a target
/// could have an encrypted volume sent in plain.
#[test]
fn a_target_cannot_ask_for_an_encrypted_volume_in_plain() {
    let fixture = Fixture::new();
    let running = fixture.devices.pools().remove(0);
    let secret = Secret::Key(Zeroizing::new(vec![7; 32]));
    running.create_reserved("v1", 1 << 20, 0, 0, Some(&secret)).unwrap();
    running.unlock("v1", &secret).unwrap();
    fixture.set("exit 1", 60, None);
    assert!(fixture.run(NOW).error.is_some());
    let guid = running.pool().find("v1@off-2033-05-18T03").unwrap().meta.guid;
    let token = |is_raw| ResumeToken { guid, base: None, start: 0, is_raw };
    for (is_raw, streams) in [(false, 1), (true, 2)] {
        let (count, said) = (fixture.path("count"), token(is_raw));
        let script = format!(
            "case \"$0\" in *v1.stream) cat > \"$0\"; echo >> {}; echo \"--resume {said}\" >&2; \
             exit 1;; *) cat > /dev/null;; esac",
            count.display()
        );
        fixture.set(&script, 60, None);
        assert!(fixture.run(NOW).error.unwrap().contains("--resume"));
        assert_eq!(std::fs::read(&count).unwrap().len(), streams);
        std::fs::remove_file(count).unwrap();
        let stream = std::fs::read(fixture.path("v1.stream")).unwrap();
        assert!(verify(&mut &stream[..], &mut |_| {}).unwrap().snapshots[0].head.is_raw());
    }
}

#[test]
fn a_target_that_hangs_is_killed() {
    let fixture = Fixture::new();
    // A process that leaves the group outlives the command, and keeps its input and its error
    // output open.
    let left = "exec 3<&0; setsid sleep 600 & echo $! > \"$0.left\"; ";
    for script in [
        "echo waiting >&2; sleep 600",
        "trap '' TERM HUP INT QUIT; while :; do sleep 1; done",
        &format!("{left}sleep 600"),
        &format!("{left}exit 0"),
        &format!("{left}while :; do echo again >&2; done"),
    ] {
        fixture.set(script, 1, None);
        let error = fixture.run(NOW).error.unwrap();
        assert!(error.contains("took longer than 1 s and was killed"), "{script}: {error}");
        assert_eq!(error.ends_with(": waiting"), script.starts_with("echo"), "{error}");
        if script.starts_with(left) {
            let process = std::fs::read_to_string(fixture.path("v0.stream.left")).unwrap();
            let killed = std::process::Command::new("kill").args(["-9", process.trim()]).status();
            assert!(killed.unwrap().success(), "the process did not outlive the command");
        }
    }
}

/// The target hangs at one volume: its time passes once in a run, and the next run begins with the
/// other volumes.
#[test]
fn a_target_that_hangs_costs_its_time_once_in_a_run() {
    let fixture = Fixture::new();
    let running = fixture.devices.pools().remove(0);
    running.create("v1", 1 << 20, 0).unwrap();
    let script = "case \"$0\" in *v0.stream) sleep 600;; *) cat > \"$0\";; esac";
    fixture.set(script, 1, None);
    let error = fixture.run(NOW).error.unwrap();
    assert!(
        error.contains("`v0`: the target `sh` took longer") && !error.contains("v1"),
        "{error}"
    );
    assert!(!fixture.path("v1.stream").exists());
    let error = fixture.run(NOW + 700).error.unwrap();
    assert!(error.contains("`v0`: the target `sh` took longer"), "{error}");
    assert!(fixture.path("v1.stream").exists());
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
