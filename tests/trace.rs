//! Traces: what `blockyard trace` records, as blkparse, btt and fio read it, and what
//! `blockyard replay` does with it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

use crate::attach::{FileSystem, Loop, Unmount};
use crate::place::Place;
use crate::run::{Run, bounded, finish, ok, run};
use crate::yard::{BLOCKYARD, Yard, blockyard};

/// A trace that is being recorded.
struct Trace {
    child: Child,
    out: ChildStdout,
    bytes: Vec<u8>,
}

impl Trace {
    /// Starts a trace of a device, and waits until it records.
    fn start(yard: &Yard, device: &str) -> Trace {
        let mut child = Command::new(BLOCKYARD)
            .args(["trace", device, "-o", "-", "--json", "--control", &yard.control()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        // The beginning of a trace is sent when it records.
        let mut bytes = vec![0; 48];
        out.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[..4], [7, b't', b'a', b'e']);
        Trace { child, out, bytes }
    }

    /// Ends the trace as Ctrl-C does; returns what the command says of it.
    fn end(mut self, path: &str) -> Value {
        ok(&["sh", "-c", &format!("kill -INT {}", self.child.id())]);
        self.out.read_to_end(&mut self.bytes).unwrap();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        File::create(path).unwrap().write_all(&self.bytes).unwrap();
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["trace"]["bytes"].as_u64(), Some(self.bytes.len() as u64));
        assert_eq!(said["trace"]["lost"], 0);
        said
    }
}

/// An event as blkparse prints it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    action: String,
    letters: String,
    sector: u64,
    sectors: u64,
}

/// The events of a trace by CPU, as blkparse reads them.
fn blkparse(path: &str) -> BTreeMap<u32, Vec<Event>> {
    let format = "%c %a %d %S %n\n";
    let line = ["blkparse", "-q", "-i", "-", "-f", format];
    let mut command = bounded(&line);
    command.stdin(File::open(path).unwrap());
    let run = finish(&line, &mut command);
    assert_eq!((run.code, run.err.as_str()), (Some(0), ""), "{run}");
    let mut events: BTreeMap<u32, Vec<Event>> = BTreeMap::new();
    for line in run.out.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [cpu, action, letters, sector, sectors] = words[..] else { continue };
        // A message.
        if action == "m" {
            continue;
        }
        let event = Event {
            action: action.to_owned(),
            letters: letters.to_owned(),
            sector: sector.parse().unwrap(),
            sectors: sectors.parse().unwrap(),
        };
        events.entry(cpu.parse().unwrap()).or_default().push(event);
    }
    events
}

fn count(events: &BTreeMap<u32, Vec<Event>>, action: &str) -> u64 {
    events.values().flatten().filter(|event| event.action == action).count() as u64
}

/// What was queued, in the order of each CPU.
fn queued(path: &str) -> Vec<Vec<Event>> {
    let mut all: Vec<Vec<Event>> = blkparse(path)
        .into_values()
        .map(|events| events.into_iter().filter(|event| event.action == "Q").collect())
        .filter(|events: &Vec<Event>| !events.is_empty())
        .collect();
    all.sort();
    all
}

fn report(run: &Run) -> Value {
    serde_json::from_str(&run.out[run.out.find('{').unwrap_or(0)..]).unwrap()
}

#[test]
fn blkparse_btt_and_fio_read_a_trace() {
    let yard = Yard::serve(&["null:///mem0?size=64M&memory_backed=1&discard=1"]);
    let trace = Trace::start(&yard, "mem0");
    let uri = format!("--uri={}", yard.uri("mem0"));
    let line = ["fio", "--name=t", "--ioengine=nbd", &uri, "--numjobs=2", "--iodepth=8"];
    let more = ["--rw=randrw", "--bsrange=4k-64k", "--size=16M", "--io_size=2M"];
    let last = ["--offset_increment=16M", "--group_reporting", "--output-format=json"];
    let fio = run(&[&line[..], &more, &last].concat()).ok();
    let job = report(&fio)["jobs"][0].clone();
    let ios = ["read", "write"].map(|kind| job[kind]["total_ios"].as_u64().unwrap());
    let path = yard.place.file("mem0.bin");
    let said = trace.end(&path);

    let events = blkparse(&path);
    for (action, key) in [("Q", "queued"), ("D", "issued"), ("C", "completed"), ("M", "merged")] {
        assert_eq!(Some(count(&events, action)), said["trace"][key].as_u64(), "{action}");
    }
    // fio's own operations, and none but those.
    for (letters, ios) in ["R", "W"].into_iter().zip(ios) {
        let of_kind = events.values().flatten().filter(|event| event.letters == letters);
        assert_eq!(of_kind.filter(|event| event.action == "Q").count() as u64, ios);
    }
    // btt writes files into its working directory.
    let line = ["btt", "-i", &path];
    let btt = finish(&line, bounded(&line).current_dir(yard.place.path())).ok().out;
    // The number of requests is the last word of its line: `D2C min avg max N`.
    let requests = btt.lines().find(|line| line.starts_with("D2C "));
    let requests = requests.and_then(|line| line.split_whitespace().last()?.parse::<u64>().ok());
    assert_eq!(requests, said["trace"]["completed"].as_u64(), "{btt}");

    let picture = yard.place.file("mem0.svg");
    let line = ["iowatcher", "-t", &path, "-o", &picture];
    finish(&line, bounded(&line).current_dir(yard.place.path())).ok();
    assert!(fs::read_to_string(&picture).unwrap().contains("</svg>"));

    let file = yard.place.file("image");
    File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let replay = format!("--replay_redirect={file}");
    let log = format!("--read_iolog={path}");
    let line = ["fio", "--name=r", "--ioengine=psync", &log, &replay, "--replay_no_stall=1"];
    let fio = run(&[&line[..], &["--output-format=json"]].concat()).ok();
    let job = report(&fio)["jobs"][0].clone();
    for (kind, ios) in ["read", "write"].into_iter().zip(ios) {
        assert_eq!(job[kind]["total_ios"].as_u64(), Some(ios), "{kind} {fio}");
    }
}

/// Needs root.
#[test]
fn trace_of_ext4_is_replayed_on_a_null_device() {
    let place = Place::new();
    let dir = place.file("files");
    fs::create_dir(&dir).unwrap();
    let mount = Unmount(dir.clone());
    let uri = "?size=64M&memory_backed=1&cache_size=8M&discard=1";
    let devices = ["first", "second", "third"].map(|name| format!("null:///{name}{uri}"));
    let [first, second, third] = &devices;
    let yard = Yard::serve_in(place, &[first, second, third, "--fuse", &dir]);
    let attached = Loop::attach(&format!("{dir}/first"));
    let trace = Trace::start(&yard, "first");
    run(&["mkfs.ext4", "-q", "-F", &attached.0]).ok();
    let mounted = yard.place.file("mnt");
    let files = FileSystem::mount("ext4", &attached.0, &mounted);
    run(&["cp", "--recursive", concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &mounted]).ok();
    run(&["sync", "--file-system", &mounted]).ok();
    files.unmount();
    attached.detach();
    let path = yard.place.file("first.bin");
    let said = trace.end(&path);
    let wanted = queued(&path);
    let letters: Vec<&str> = wanted.iter().flatten().map(|event| event.letters.as_str()).collect();
    for kind in ["R", "W", "D"] {
        assert!(letters.iter().any(|letters| letters.starts_with(kind)), "{kind} {letters:?}");
    }
    let total = said["trace"]["queued"].as_u64().unwrap();
    assert!(total > 100, "{said}");

    // Once as fast as possible, and once at the times of the trace, a hundred times faster.
    for (device, speed) in [("second", "max"), ("third", "100")] {
        let trace = Trace::start(&yard, device);
        let line = ["replay", &path, device, "--write", "--speed", speed, "--json"];
        let view: Value = serde_json::from_str(&yard.command(&line).ok().out).unwrap();
        let operations = view["replay"]["operations"].as_object().unwrap();
        let replayed: u64 = operations.values().filter_map(|it| it["operations"].as_u64()).sum();
        assert_eq!((replayed, view["skipped"].as_u64()), (total, Some(0)));
        assert_eq!(view["replay"]["errors"], serde_json::json!({}));
        let again = yard.place.file("again.bin");
        trace.end(&again);
        assert_eq!(queued(&again), wanted, "{device}");
    }
    drop(mount);

    // fio replays the same trace.
    let file = yard.place.file("image");
    File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let attached = Loop::attach(&file);
    let replay = format!("--replay_redirect={}", attached.0);
    let log = format!("--read_iolog={path}");
    let line = ["fio", "--name=r", "--ioengine=psync", &log, &replay, "--replay_no_stall=1"];
    let fio = run(&[&line[..], &["--output-format=json"]].concat()).ok();
    let job = report(&fio)["jobs"][0].clone();
    for kind in ["read", "write", "trim", "sync"] {
        // `F` before the other letters is a flush before the data, or one without data.
        let of_kind = |event: &&Event| match event.letters.trim_start_matches('F').chars().next() {
            _ if event.sectors == 0 => kind == "sync",
            Some('R') => kind == "read",
            Some('D') => kind == "trim",
            _ => kind == "write",
        };
        let traced = wanted.iter().flatten().filter(of_kind).count() as u64;
        assert!(traced > 0, "{kind} {letters:?}");
        assert_eq!(job[kind]["total_ios"].as_u64(), Some(traced), "{kind} {fio}");
    }
}

#[test]
fn zone_operations_are_recorded_and_replayed() {
    let zoned = |name: &str| format!("null:///{name}?size=16M&zoned=1&zone_size=1M");
    let yard = Yard::serve(&[&zoned("a"), &zoned("b")]);
    let trace = Trace::start(&yard, "a");
    for line in [&["open", "a", "-o", "1z", "-c", "1"], &["finish", "a", "-o", "2z", "-c", "2"]] {
        yard.command(&[&["zone"], &line[..]].concat()).ok();
    }
    yard.command(&["zone", "reset", "a", "-o", "3z", "-c", "1"]).ok();
    let path = yard.place.file("zones.bin");
    trace.end(&path);
    let zones = |device: &str| yard.command(&["zone", "report", device, "--json"]).ok().out;
    assert_ne!(zones("b"), zones("a"));
    let replayed = yard.command(&["replay", &path, "b", "--write"]).ok();
    assert!(replayed.out.contains("zone_finish"), "{replayed}");
    assert_eq!(zones("b"), zones("a"));
    let file = File::open(&path).unwrap();
    let line = ["blkparse", "-i", "-"];
    let text = finish(&line, bounded(&line).stdin(file)).ok().out;
    assert!(text.contains("m   N zone_finish Q 4096"), "{text}");
}

/// Appends of a program to a file of a zonefs. Needs root.
#[test]
fn blkparse_reads_zone_appends_as_writes_where_they_landed() {
    const ZONE_SECTORS: u64 = 2048;
    let zoned =
        |name: &str| format!("null:///{name}?size=16M&bs=4k&zoned=1&zone_size=1M&memory_backed=1");
    let yard = Yard::serve(&[&zoned("a"), &zoned("b")]);
    let dir = yard.place.file("m");
    fs::create_dir(&dir).unwrap();
    let mount = Unmount(dir.clone());
    yard.command(&["mkzonefs", "a"]).ok();
    yard.command(&["zonefs", "mount", "a", &dir]).ok();
    let trace = Trace::start(&yard, "a");
    // Zone 0 has the superblock, so this file is zone 1.
    let to = format!("of={dir}/seq/0");
    let line = ["dd", "if=/dev/zero", &to, "bs=64k", "count=2", "oflag=append,direct"];
    ok(&[&line[..], &["conv=notrunc", "status=none"]].concat());
    let path = yard.place.file("appends.bin");
    trace.end(&path);
    yard.command(&["zonefs", "unmount", "a"]).ok();
    drop(mount);

    let mut events: Vec<Event> = blkparse(&path).into_values().flatten().collect();
    events.retain(|event| ["Q", "D", "C"].contains(&event.action.as_str()));
    events.sort();
    let event = |action: &str, sector| Event {
        action: action.to_owned(),
        letters: "W".to_owned(),
        sector,
        sectors: 128,
    };
    // An append is queued and issued at the start of the zone, and completes where it landed.
    let [start, second] = [ZONE_SECTORS, ZONE_SECTORS + 128];
    let wanted = [
        event("C", start),
        event("C", second),
        event("D", start),
        event("D", start),
        event("Q", start),
        event("Q", start),
    ];
    assert_eq!(events, wanted);
    let line = ["blkparse", "-q", "-i", "-"];
    let text = finish(&line, bounded(&line).stdin(File::open(&path).unwrap())).ok().out;
    let landed = |line: &str| line.contains(" C   W 2176 + 128 [0]");
    assert_eq!(text.lines().filter(|line| landed(line)).count(), 1, "{text}");

    // The data of the events tell `replay` that they are appends.
    let replayed = yard.command(&["replay", &path, "b", "--write", "--json"]).ok().json();
    let operations = &replayed["replay"]["operations"];
    assert_eq!(operations["zone_append"]["operations"], 2, "{replayed}");
    assert_eq!(operations.as_object().unwrap().len(), 1, "{replayed}");
    let zones = yard.command(&["zone", "report", "b", "--json"]).ok().json();
    assert_eq!(zones[1]["wptr"], 256, "{zones}");
}

#[test]
fn trace_and_replay_refuse_with_a_reason() {
    let yard = Yard::serve(&["null:///mem0?size=1M&memory_backed=1"]);
    let path = yard.place.file("trace");
    let says = |line: &[&str], code: i32, text: &str| {
        let run = yard.command(line);
        assert_eq!(run.code, Some(code), "{run}");
        assert!(run.err.contains(text), "{run}");
    };
    says(&["trace", "mem1", "-o", &path], 5, "mem1");
    let trace = Trace::start(&yard, "mem0");
    says(&["trace", "mem0", "-o", &path], 6, "`mem0` is traced already");
    assert!(!fs::exists(&path).unwrap());
    run(&["nbdsh", "--uri", &yard.uri("mem0"), "--command", "h.pwrite(b'x' * 4096, 8192)"]).ok();
    trace.end(&path);
    says(&["replay", &path, "mem0"], 2, "1 operation of the trace would change mem0");
    says(&["replay", &yard.place.file("no"), "mem0"], 1, "cannot read");
    let bytes = fs::read(&path).unwrap();
    let cut = yard.place.file("cut");
    fs::write(&cut, &bytes[..bytes.len() - 1]).unwrap();
    says(&["replay", &cut, "mem0", "--write"], 1, "within the data of the event at offset");
    fs::write(&cut, "no trace").unwrap();
    says(&["replay", &cut, "mem0", "--write"], 1, "invalid magic `0x74206f6e` at offset 0");
    fs::write(&cut, "").unwrap();
    says(&["replay", &cut, "mem0"], 1, "the trace has no queued bios");
    says(&["trace", "mem0", "-o", "x", "--size-max", "1k"], 2, "expected 64k at least");
    // A trace of CPUs, as blktrace names its files; the device is this command's own.
    fs::rename(&path, yard.place.file("sda.blktrace.3")).unwrap();
    let line = ["replay", &yard.place.file("sda"), "null:///n?size=1M", "--write", "--json"];
    let view: Value = serde_json::from_str(&blockyard(&line).ok().out).unwrap();
    assert_eq!(view["replay"]["operations"]["write"]["bytes"], 4096);
}

/// Ctrl-C ends a replay that waits for an operation in an hour, with what was done until then.
#[test]
fn replay_ends_at_a_signal() {
    let yard = Yard::serve(&["null:///mem0?size=1M&memory_backed=1"]);
    let trace = Trace::start(&yard, "mem0");
    run(&["nbdsh", "--uri", &yard.uri("mem0"), "--command", "h.pread(4096, 0)"]).ok();
    let path = yard.place.file("trace");
    trace.end(&path);
    let bytes = fs::read(&path).unwrap();
    // The event Q of the read: code 1 in the lower half of the action.
    let mut at = 0;
    while bytes[at + 28..at + 30] != [1, 0] || bytes[at + 24..at + 28] != 4096_u32.to_le_bytes() {
        at += 48 + usize::from(u16::from_le_bytes([bytes[at + 46], bytes[at + 47]]));
    }
    let mut later = bytes[at..at + 48].to_vec();
    later[46..].fill(0);
    let time_ns = u64::from_le_bytes(later[8..16].try_into().unwrap()) + 3600 * 1_000_000_000;
    later[8..16].copy_from_slice(&time_ns.to_le_bytes());
    fs::write(&path, [&bytes[..], &later].concat()).unwrap();
    for device in ["mem0", "null:///n?size=1M"] {
        let mut child = Command::new(BLOCKYARD)
            .args(["replay", &path, device, "--json", "--control", &yard.control()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Open until the command has ended, which writes to it.
        let mut err = child.stderr.take().unwrap();
        let mut said = [0; 21];
        err.read_exact(&mut said).unwrap();
        assert_eq!(said, *b"blockyard: replaying ");
        ok(&["sh", "-c", &format!("kill -INT {}", child.id())]);
        let mut out = String::new();
        child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{out}");
        let view: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(view["replay"]["is_stopped"], true);
    }
    yard.command(&["remove", "mem0"]).ok();
}

/// A pipe whose reader stops would hold up the end of the device.
#[test]
fn trace_into_a_pipe_is_refused() {
    let yard = Yard::serve(&[]);
    let pipe = yard.place.file("pipe");
    run(&["mkfifo", &pipe]).ok();
    let added = yard.command(&["add", &format!("null:///p?size=1M&trace={pipe}")]);
    assert!(added.err.contains("is neither a file nor /dev/null"), "{added}");
}

/// A trace of a device that is removed ends; what was recorded is kept.
#[test]
fn trace_ends_with_its_device() {
    let yard = Yard::serve(&["null:///mem0?size=1M&memory_backed=1"]);
    let mut trace = Trace::start(&yard, "mem0");
    yard.command(&["remove", "mem0"]).ok();
    trace.out.read_to_end(&mut trace.bytes).unwrap();
    assert!(trace.child.wait().unwrap().success());
    let end = b"the trace has ended: the device was closed";
    assert!(trace.bytes.windows(end.len()).any(|window| window == end));
}
