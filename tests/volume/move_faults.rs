//! `volume move` between two pools of a yard while the command is killed, answers are lost, or
//! other clients change the pools. The command reaches the yard through a proxy that sees each
//! request.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::net::sockopt::socket_peercred;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::moves::{names, pools};
use crate::place::Place;
use crate::run::{Run, bounded, finish, nbdsh, ok};
use crate::yard::{BLOCKYARD, Yard};

/// What becomes of a request.
enum Step {
    /// It is answered.
    Pass,
    /// It is not executed, and not answered.
    Close,
    /// It is executed, and not answered.
    Forget,
    /// The command is killed before it is executed.
    KillBefore,
    /// The command is killed when this number of bytes of the stream that it sends has passed.
    KillWithin(usize),
    /// The command is killed when it was executed.
    KillAfter,
    /// The body of the answer is changed.
    Change(fn(Value) -> Value),
    /// It is executed. The answer is that the pool has failed: a sync of the change has failed
    /// after the log was written.
    Latch,
}

/// A request of the control API: its verb or place, `check` for a `destroy` that is a dry run.
fn title(head: &[u8]) -> String {
    let text = String::from_utf8_lossy(head);
    let path = text.split(' ').nth(1).unwrap_or_default();
    let verb = path.split('?').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    match text.contains("\"dry_run\":true") {
        true => "check".to_owned(),
        false => verb.to_owned(),
    }
}

type Decide = Box<dyn FnMut(&str) -> Step + Send>;

/// A control socket that passes requests on to that of a yard.
struct Proxy {
    path: String,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// `decide` gets the title of each request before the request is executed.
    fn start(yard: &Yard, decide: Decide) -> Proxy {
        let (path, control) = (yard.place.file("proxy"), yard.control());
        _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let (ends, decide) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(decide)));
        let has_ended = Arc::clone(&ends);
        let accept = move || {
            let mut connections = Vec::new();
            for client in listener.incoming() {
                if has_ended.load(Ordering::Relaxed) {
                    break;
                }
                let (control, decide) = (control.clone(), Arc::clone(&decide));
                let pass_on = move || pass_on(&client.unwrap(), &control, &decide);
                connections.push(std::thread::spawn(pass_on));
            }
            connections.into_iter().for_each(|it| it.join().unwrap());
        };
        Proxy { path, ends, thread: Some(std::thread::spawn(accept)) }
    }

    /// Runs a command whose requests pass here.
    fn command(&self, args: &[&str]) -> Run {
        let line = [&[BLOCKYARD], args, &["--control", &self.path]].concat();
        finish(&line, &mut bounded(&line))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        UnixStream::connect(&self.path).unwrap();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

/// The header of a request, and its body if the header has the length.
fn read_request(mut client: &UnixStream) -> Vec<u8> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        match client.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            // The command was killed, or the proxy ends.
            _ => return Vec::new(),
        }
    }
    let text = String::from_utf8_lossy(&head).to_lowercase();
    let len = text.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; len.map_or(0, |len| len.parse().unwrap())];
    client.read_exact(&mut body).unwrap();
    [head, body].concat()
}

/// Whether the command was killed: `timeout` ends by the same signal.
fn is_killed(run: &Run) -> bool {
    matches!(run.code, None | Some(137))
}

fn kill(client: &UnixStream) {
    kill_process(socket_peercred(client).unwrap().pid, Signal::KILL).unwrap();
}

fn pass_on(client: &UnixStream, control: &str, decide: &Mutex<Decide>) {
    let head = read_request(client);
    if head.is_empty() {
        return;
    }
    let step = (decide.lock().unwrap())(&title(&head));
    match step {
        Step::Close => return,
        Step::KillBefore => return kill(client),
        _ => {}
    }
    let mut server = UnixStream::connect(control).unwrap();
    server.write_all(&head).unwrap();
    let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let most = if let Step::KillWithin(bytes) = step { Some(bytes) } else { None };
    let sends = std::thread::spawn(move || {
        match most {
            Some(bytes) => {
                _ = io::copy(&mut (&from).take(bytes as u64), &mut &to);
                kill(&from);
            }
            None => _ = io::copy(&mut &from, &mut &to),
        }
        _ = to.shutdown(Shutdown::Write);
    });
    let mut answer = Vec::new();
    match step {
        Step::Pass => _ = io::copy(&mut &server, &mut &*client),
        _ => read_all(&server, &mut answer),
    }
    match step {
        Step::KillAfter => kill(client),
        Step::Change(change) => _ = (&mut &*client).write_all(&changed(&answer, change)),
        Step::Latch => _ = (&mut &*client).write_all(&response("409 Conflict", &latched())),
        _ => {}
    }
    _ = client.shutdown(Shutdown::Both);
    sends.join().unwrap();
}

/// Reads until the yard closes the connection.
fn read_all(mut server: &UnixStream, into: &mut Vec<u8>) {
    match server.read_to_end(into) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
        _ => {}
    }
}

/// An answer whose body is changed.
fn changed(answer: &[u8], change: fn(Value) -> Value) -> Vec<u8> {
    let at = blockyard_testing::position(answer, b"\r\n\r\n").unwrap() + 4;
    response("200 OK", &change(serde_json::from_slice(&answer[at..]).unwrap()))
}

fn response(status: &str, body: &Value) -> Vec<u8> {
    let (body, kind) = (body.to_string(), "content-type: application/json");
    let head = format!("HTTP/1.1 {status}\r\n{kind}\r\nconnection: close\r\n");
    format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// The answer of a yard whose pool has failed.
fn latched() -> Value {
    let message = "the pool is read-only since a write or a sync failed; open it again";
    json!({ "error": { "code": "latched", "message": message } })
}

/// A yard with a device `a` in the first pool and `b` in the second one. The first pool has the
/// volume `v0`, which is no device, with a snapshot.
struct Pools {
    yard: Arc<Yard>,
    one: String,
    two: String,
    /// Contents of the volume and the snapshot.
    image: Vec<u8>,
    place: Place,
}

const VOLUME: &str = "v0\nv0@first\n";

impl Pools {
    fn new() -> Pools {
        let place = Place::new();
        let [one, two, image] = pools(&place);
        let device = |name: &str, pool: &str| format!("volume:///{name}?path={pool}&size=1M");
        let yard = Arc::new(Yard::serve(&[&device("a", &one), &device("b", &two)]));
        Pools { yard, one, two, image: fs::read(image).unwrap(), place }
    }

    /// Moves the volume. `decide` gets the title of each request, and this.
    fn moved(&self, decide: impl FnMut(&str) -> Step + Send + 'static) -> Run {
        let proxy = Proxy::start(&self.yard, Box::new(decide));
        proxy.command(&["volume", "move", &self.one, "v0", &self.two])
    }

    /// Moves the volume. `act` is called before the first request of this title.
    fn moved_with(&self, at: &'static str, act: impl FnOnce() + Send + 'static) -> Run {
        let mut act = Some(act);
        self.moved(move |title| {
            if title == at
                && let Some(act) = act.take()
            {
                act();
            }
            Step::Pass
        })
    }

    /// As a client that writes to the volume while it is a device.
    fn write(&self) -> impl FnOnce() + Send + 'static {
        let (yard, one) = (Arc::clone(&self.yard), self.one.clone());
        move || {
            yard.command(&["add", &format!("volume:///v0?path={one}")]).ok();
            nbdsh(&yard.uri("v0"), "import nbd\nh.pwrite(b'x' * 4096, 0, nbd.CMD_FLAG_FUA)");
            yard.command(&["remove", "v0"]).ok();
        }
    }

    /// Runs a command about volumes at once.
    fn volume(&self, args: &[&str]) -> Run {
        self.yard.command(&[&["volume"], args].concat())
    }

    /// As a client that runs a command.
    fn command(&self, args: &[&str]) -> impl FnOnce() + Send + 'static + use<> {
        let (yard, args) = (Arc::clone(&self.yard), args.iter().map(|it| (*it).to_owned()));
        let args: Vec<String> = args.collect();
        move || _ = yard.command(&args.iter().map(String::as_str).collect::<Vec<_>>()).ok()
    }

    /// The names in both pools, without those of the devices.
    fn names(&self) -> (String, String) {
        let without = |pool: &str, device: &str| names(pool).replacen(device, "", 1);
        (without(&self.one, "a\n"), without(&self.two, "b\n"))
    }

    fn contents(&self, pool: &str, name: &str) -> Vec<u8> {
        let out = self.place.file("out");
        _ = fs::remove_file(&out);
        self.volume(&["export", pool, name, &out]).ok();
        fs::read(&out).unwrap()
    }

    /// Asserts that the volume was moved, with its contents.
    fn assert_moved(&self) {
        assert_eq!(self.names(), (String::new(), VOLUME.to_owned()));
        for name in ["v0", "v0@first"] {
            assert!(self.contents(&self.two, name) == self.image, "{name} has other bytes");
        }
    }
}

/// Regression: the move destroyed the volume that another client had created.
#[test]
fn a_move_that_fails_destroys_nothing_that_another_client_has_made() {
    let pools = Pools::new();
    let create = pools.command(&["volume", "create", &pools.two, "v0", "--size", "1M"]);
    pools.moved_with("rename", create).fails().says(&["`v0` exists"]);
    assert_eq!(pools.names(), (VOLUME.to_owned(), "v0\n".to_owned()));
}

/// Regression: both moves removed what the other one had copied.
#[test]
fn of_two_moves_of_a_volume_at_once_one_fails() {
    let pools = Pools::new();
    let (yard, one, two) = (Arc::clone(&pools.yard), pools.one.clone(), pools.two.clone());
    let (sender, second) = channel();
    let moves = move || sender.send(yard.command(&["volume", "move", &one, "v0", &two])).unwrap();
    // The first one has the stream of its copy.
    let first = pools.moved_with("receive", moves);
    let second = second.recv().unwrap();
    assert!((first.code == Some(0)) != (second.code == Some(0)), "{first}\n{second}");
    pools.assert_moved();
}

#[test]
fn a_volume_that_is_written_while_it_is_copied_stays() {
    let pools = Pools::new();
    let refused = pools.moved_with("check", pools.write()).fails();
    refused.says(&["`v0` is no longer as it was copied"]);
    assert_eq!(pools.names(), (VOLUME.to_owned(), String::new()));
    assert!(pools.contents(&pools.one, "v0").starts_with(&[b'x'; 4096]));
}

#[test]
fn a_snapshot_that_is_made_while_the_volume_is_copied_stays() {
    let pools = Pools::new();
    let snapshot = pools.command(&["volume", "snapshot", &pools.one, "v0@late"]);
    let refused = pools.moved_with("receive", snapshot).fails();
    refused.says(&["`v0@late` is a snapshot that was not copied"]);
    assert_eq!(pools.names(), (format!("{VOLUME}v0@late\n"), String::new()));
}

/// Regression: the yard destroyed what was written after the last look.
#[test]
fn a_volume_that_is_written_after_it_was_copied_is_moved_with_the_changes() {
    let pools = Pools::new();
    let refused = pools.moved_with("destroy", pools.write()).fails();
    refused.says(&["`v0` was copied to", "and is still in", "is no longer as it was copied"]);
    let (one, two) = pools.names();
    assert_eq!(one, two, "both pools have the volume and the mark");
    let mark = one.lines().find_map(|it| it.strip_prefix("v0@blockyard-move-")).unwrap();
    let again = ["move", &pools.one, "v0", &pools.two];
    pools.volume(&again).fails().says(&["is no longer as it was copied"]);
    // As the error says.
    let stream = pools.place.file("stream");
    pools.volume(&["snapshot", &pools.one, "v0@rest"]).ok();
    let base = format!("@blockyard-move-{mark}");
    pools.volume(&["send", &pools.one, "v0@rest", "-I", &base, "-o", &stream]).ok();
    pools.volume(&["receive", &pools.two, "v0", "--input", &stream]).ok();
    pools.volume(&again).ok();
    assert_eq!(pools.names(), (String::new(), format!("{VOLUME}v0@rest\n")));
    assert!(pools.contents(&pools.two, "v0").starts_with(&[b'x'; 4096]));
    assert!(pools.contents(&pools.two, "v0@first") == pools.image);
}

#[test]
fn a_volume_that_cannot_be_destroyed_is_kept_and_moved_by_the_next_command() {
    let pools = Pools::new();
    let hold = pools.command(&["volume", "hold", &pools.one, "keep", "v0@first"]);
    let refused = pools.moved_with("destroy", hold).fails();
    let kept = ["`v0` was copied to", "and is still in", "do not destroy the copy"];
    let refused = refused.says(&kept).says(&["held by `keep`", "the same command"]);
    assert!(!refused.err.contains("send -I"), "{refused}");
    let moving = ["move", &pools.one, "v0", &pools.two];
    pools.volume(&moving).fails().says(&["it has a hold"]);
    pools.volume(&["release", &pools.one, "keep", "v0@first"]).ok();
    pools.volume(&moving).ok();
    pools.assert_moved();
}

/// Regression: the property was lost.
#[test]
fn a_property_that_is_set_during_a_move_is_moved() {
    let pools = Pools::new();
    let compress = |pool: &str| {
        pools.volume(&["get", "-H", pool, "v0", "compress"]).ok().out.trim_end().to_owned()
    };
    let set = |value| pools.command(&["volume", "set", &pools.one, "v0", value]);
    let lost = "`v0` is no longer as it was copied: `compress` was set to `zstd:3`";
    pools.moved_with("check", set("compress=zstd:3")).fails().says(&[lost]);
    assert_eq!(pools.names(), (VOLUME.to_owned(), String::new()));
    let lost = "`v0` is no longer as it was copied: `compress` was set to `zstd:5`";
    pools.moved_with("destroy", set("compress=zstd:5")).fails().says(&[lost, "the same command"]);
    assert_eq!(compress(&pools.one), "v0\tcompress\tzstd:5\tpool");
    assert_eq!(compress(&pools.two), "v0\tcompress\tzstd:3\tpool");
    pools.volume(&["move", &pools.one, "v0", &pools.two]).ok();
    assert_eq!(compress(&pools.two), "v0\tcompress\tzstd:5\tpool");
    pools.assert_moved();
}

/// Regression: the copy kept the reservation.
#[test]
fn a_reservation_that_is_removed_during_a_move_is_removed_from_the_copy() {
    let pools = Pools::new();
    pools.volume(&["set", &pools.one, "v0", "reservation=1M"]).ok();
    let remove = pools.command(&["volume", "set", &pools.one, "v0", "reservation=0"]);
    let removed = "`v0` is no longer as it was copied: `reservation` was set to `0`";
    pools.moved_with("rename", remove).fails().says(&[removed, "the same command"]);
    let reservation = |pool: &str| {
        pools.volume(&["get", "-H", pool, "v0", "reservation"]).ok().out.trim_end().to_owned()
    };
    assert_eq!(reservation(&pools.two), "v0\treservation\t1M\tpool");
    pools.volume(&["move", &pools.one, "v0", &pools.two]).ok();
    assert_eq!(reservation(&pools.two), "v0\treservation\t0\tdefault");
    pools.assert_moved();
}

/// Regression: the volume opened only by its earlier key.
#[test]
fn a_volume_whose_key_is_changed_during_a_move_stays() {
    let pools = Pools::new();
    let [first, second, third] = ["first", "second", "third"].map(|name| {
        let path = pools.place.write(name, &format!("the {name} secret of at least 32 bytes"));
        ok(&["chmod", "600", &path]);
        path
    });
    pools.volume(&["destroy", "-r", &pools.one, "v0"]).ok();
    let create = ["create", &pools.one, "v0", "--size", "1M", "--encrypt", "--key-file", &first];
    pools.volume(&create).ok();
    pools.volume(&["snapshot", &pools.one, "v0@first"]).ok();
    let change = |old: &str, new: &str| {
        let line = ["change-key", &pools.one, "v0", "--key-file", old, "--new-key-file", new];
        pools.command(&[&["volume"], &line[..]].concat())
    };
    let changed = &["its key was changed, and the copy opens by the earlier passphrase or key"];
    pools.moved_with("check", change(&first, &second)).fails().says(changed);
    assert_eq!(pools.names(), (VOLUME.to_owned(), String::new()));
    let refused = pools.moved_with("destroy", change(&second, &third)).fails();
    refused.says(changed).says(&[
        "and is still in",
        "do not destroy the copy",
        "`volume change-key` it there",
    ]);
    let (one, two) = pools.names();
    assert_eq!(one, two, "both pools have the volume and the mark");
    pools.volume(&["move", &pools.one, "v0", &pools.two]).fails().says(changed);
    pools.volume(&["unlock", &pools.one, "v0", "--key-file", &third]).ok();
    // As the error says.
    let keys = ["--key-file", &second, "--new-key-file", &third];
    pools.volume(&[&["change-key", &pools.two, "v0"], &keys[..]].concat()).ok();
    pools.volume(&["destroy", "-r", &pools.one, "v0"]).ok();
    pools.volume(&["lock", &pools.two, "v0"]);
    pools.volume(&["unlock", &pools.two, "v0", "--key-file", &third]).ok();
}

/// Regression: the command said that the volume was still there, and a user who then destroyed the
/// copy lost it.
#[test]
fn a_pool_that_fails_while_it_destroys_the_volume_leaves_the_result_unknown() {
    let pools = Pools::new();
    let failed = pools.moved(|title| if title == "destroy" { Step::Latch } else { Step::Pass });
    let failed = failed.fails();
    failed.says(&["it is not known whether it is still in", "do not destroy the copy"]);
    let (one, two) = pools.names();
    assert_eq!(one, "");
    let mark = two.lines().find(|it| it.starts_with("v0@blockyard-move-")).unwrap();
    let again = pools.volume(&["move", &pools.one, "v0", &pools.two]).fails();
    again.says(&["no such volume", mark]);
    pools.volume(&["destroy", &pools.two, mark]).ok();
    pools.assert_moved();
}

/// Regression: the command said that the volume was still there.
#[test]
fn a_volume_whose_destruction_was_not_answered_is_moved() {
    let pools = Pools::new();
    let mut is_first = true;
    let moved = pools.moved(move |title| match title {
        "destroy" if std::mem::take(&mut is_first) => Step::Forget,
        _ => Step::Pass,
    });
    moved.ok();
    pools.assert_moved();
}

#[test]
fn an_unknown_result_of_the_destruction_is_said() {
    let pools = Pools::new();
    let mut is_gone = false;
    let failed = pools.moved(move |title| {
        is_gone |= title == "destroy";
        if is_gone { Step::Close } else { Step::Pass }
    });
    failed.fails().says(&["it is not known whether it is still in", "do not destroy the copy"]);
    pools.volume(&["move", &pools.one, "v0", &pools.two]).ok();
    pools.assert_moved();
}

/// The answer of a yard whose pools acknowledge by a local log that is not uploaded.
fn lagging(pools: Value, lag_batches: u64) -> Value {
    let mut pools = pools;
    for pool in pools.as_array_mut().unwrap() {
        pool["upload"] = json!({
            "ack": "local", "lag_bytes": 4096, "lag_batches": lag_batches, "lag_ms": 3_600_000,
            "max_lag_bytes": 1 << 30, "max_lag_ms": 3_600_000, "waits": 0, "waiting": false,
        });
    }
    pools
}

/// Regression: the volume was destroyed while only a local log had its copy.
#[test]
fn a_volume_is_destroyed_when_the_object_store_has_the_copy() {
    let pools = Pools::new();
    let looks = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&looks);
    let moved = pools.moved(move |title| {
        let mut seen = seen.lock().unwrap();
        seen.push(title.to_owned());
        let is_renamed = seen.iter().any(|it| it == "rename");
        match (title, seen.iter().filter(|it| *it == "pools").count()) {
            ("pools", 0..=5) => Step::Change(|pools| lagging(pools, 1)),
            ("pools", _) => Step::Change(|pools| lagging(pools, 0)),
            ("destroy", looks) => {
                assert!(is_renamed && looks > 5, "{seen:?}");
                Step::Pass
            }
            _ => Step::Pass,
        }
    });
    moved.ok();
    assert!(looks.lock().unwrap().iter().any(|it| it == "destroy"));
    pools.assert_moved();
}

/// A volume with as many snapshots as are destroyed by several changes of the catalogue.
struct Chain {
    pools: Pools,
    all: Vec<String>,
}

impl Chain {
    fn new() -> Chain {
        let pools = Pools::new();
        for number in 1..=8 {
            pools.volume(&["snapshot", &pools.one, &format!("v0@{number}")]).ok();
        }
        pools.write()();
        pools.volume(&["snapshot", &pools.one, "v0@9"]).ok();
        let all = pools.names().0.lines().map(str::to_owned).collect();
        Chain { pools, all }
    }

    /// Asserts that a pool has everything and the other one nothing.
    fn assert_moved(&self, from: &str, to: &str) {
        let list = |pool| -> Vec<String> {
            let names = names(pool);
            names.lines().filter(|it| !["a", "b"].contains(it)).map(str::to_owned).collect()
        };
        assert_eq!((list(from), list(to)), (Vec::new(), self.all.clone()));
        for name in ["v0@first", "v0@8", "v0@9", "v0"] {
            let mut wanted = self.pools.image.clone();
            if matches!(name, "v0" | "v0@9") {
                wanted[..4096].fill(b'x');
            }
            assert!(self.pools.contents(to, name) == wanted, "{name} has other bytes");
        }
    }

    /// Moves the volume by a command that is killed, and then by one that is not. `step` gets the
    /// number and the title of each request. Returns false if the first command was not killed.
    fn is_killed(
        &self,
        from: &str,
        to: &str,
        step: impl Fn(usize, &str) -> Step + Send + 'static,
    ) -> bool {
        let mut number = 0;
        let decide = move |title: &str| {
            number += 1;
            step(number, title)
        };
        let moving = ["volume", "move", from, "v0", to];
        let run = Proxy::start(&self.pools.yard, Box::new(decide)).command(&moving);
        if !is_killed(&run) {
            run.ok();
            self.assert_moved(from, to);
            return false;
        }
        let (here, there) = (names(from), names(to));
        for name in &self.all {
            let is_in = |list: &str| list.lines().any(|it| it == name);
            assert!(is_in(&here) || is_in(&there), "{name} is lost: {here}; {there}");
        }
        if here.lines().any(|it| it == "v0") {
            self.pools.yard.command(&moving).ok();
        } else {
            // The move has ended, but for the mark.
            let mark = there.lines().find(|it| it.starts_with("v0@blockyard-move-"));
            if let Some(mark) = mark {
                let command = format!("`blockyard volume destroy {to} {mark}` ends that move");
                self.pools.yard.command(&moving).fails().says(&["no such volume", &command]);
                self.pools.volume(&["destroy", to, mark]).ok();
            }
        }
        self.assert_moved(from, to);
        true
    }
}

/// Regression: the snapshots that a killed move had destroyed were lost if the user did as the
/// manual said.
#[test]
fn a_move_that_is_killed_at_any_request_loses_nothing() {
    let chain = Chain::new();
    let (mut from, mut to) = (chain.pools.one.clone(), chain.pools.two.clone());
    // In the stream of the first snapshot, and after it.
    for bytes in [2 << 20, (4 << 20) + (8 << 10)] {
        let within = move |_, title: &str| match title {
            "receive" => Step::KillWithin(bytes),
            _ => Step::Pass,
        };
        assert!(chain.is_killed(&from, &to, within));
        std::mem::swap(&mut from, &mut to);
    }
    let mut requests = 0;
    loop {
        let wanted = requests + 1;
        let after = move |number, _: &str| match number == wanted {
            true => Step::KillAfter,
            false => Step::Pass,
        };
        if !chain.is_killed(&from, &to, after) {
            break;
        }
        std::mem::swap(&mut from, &mut to);
        requests += 1;
    }
    assert!(requests > 10, "{requests} requests");
}

#[test]
fn a_volume_that_is_partly_destroyed_is_moved_by_the_next_command() {
    let chain = Chain::new();
    let Pools { one, two, .. } = &chain.pools;
    let killed = chain.pools.moved(|title| match title {
        "destroy" => Step::KillBefore,
        _ => Step::Pass,
    });
    assert!(is_killed(&killed), "{killed}");
    // As the yard does in the first change.
    chain.pools.volume(&["destroy", one, "v0@first%2"]).ok();
    chain.pools.volume(&["move", one, "v0", two]).ok();
    chain.assert_moved(one, two);
}
