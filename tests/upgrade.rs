//! A daemon is replaced by another process while clients use it.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::place::Place;
use crate::run::{Run, bounded_by, nbdsh, ok, python};
use crate::tls;
use crate::yard::{BLOCKYARD, Yard};

/// The variable for more upgrades than the usual ones.
const ROUNDS: &str = "BLOCKYARD_UPGRADE_ROUNDS";

/// The most looks at the connections until fio has used them.
const LOOKS_MAX: u32 = 2000;

const N0: &str = "null:///n0?size=1G";
const MEM0: &str = "null:///mem0?size=64M&memory_backed=1";
const RAM0: &str = "ram:///ram0?size=64M";

/// A yard, and the processes that took its place. Dropping it kills them.
pub(crate) struct Upgradable {
    pub(crate) yard: Yard,
    pub(crate) successor: Option<u64>,
}

impl Upgradable {
    pub(crate) fn new(place: Place, args: &[&str]) -> Upgradable {
        Upgradable::of(Yard::serve_in(place, args))
    }

    /// A yard that serves.
    pub(crate) fn of(yard: Yard) -> Upgradable {
        Upgradable { yard, successor: None }
    }

    /// Upgrades the yard, and returns the response.
    #[track_caller]
    pub(crate) fn upgrade(&mut self, args: &[&str]) -> Value {
        let view = self.yard.command(&[&["upgrade", "--json"], args].concat()).ok().json();
        let pid = view["pid"].as_u64().unwrap();
        assert_ne!(Some(pid), self.successor);
        self.successor = Some(pid);
        assert_eq!(self.serving_pid(), pid);
        // systemd ignores what the new process has sent before this notice.
        let notice = format!("MAINPID={pid}\nWATCHDOG=1\n");
        let notices = self.yard.read_notices();
        assert!(notices.contains(&notice), "{notices:?}");
        view
    }

    /// The process that answers requests of the control API.
    #[track_caller]
    pub(crate) fn serving_pid(&self) -> u64 {
        let control = self.yard.control();
        let line = ["curl", "--silent", "--unix-socket", &control, "http://yard/v1/version"];
        crate::run::run(&line).ok().json()["pid"].as_u64().unwrap()
    }

    /// The requests of the client of each device.
    fn requests(&self) -> BTreeMap<String, u64> {
        let connections = self.yard.command(&["connections", "--json"]).ok().json();
        let of_one = |it: &Value| Some((it["device"].as_str()?.into(), it["requests"].as_u64()?));
        connections.as_array().unwrap().iter().filter_map(of_one).collect()
    }

    /// An upgrade that fails; the yard serves.
    #[track_caller]
    pub(crate) fn fails(&self, args: &[&str]) -> Run {
        let run = self.yard.command(&[&["upgrade"], args].concat()).fails();
        self.yard.command(&["list"]).ok();
        run
    }

    /// Ends the last process in order.
    pub(crate) fn end(&mut self) {
        let pid = self.successor.take().unwrap().to_string();
        let wait = "kill -TERM $0; while kill -0 $0 2> /dev/null; do :; done";
        ok(&["sh", "-c", wait, &pid]);
    }
}

impl Drop for Upgradable {
    fn drop(&mut self) {
        if let Some(pid) = self.successor {
            // It may have ended already.
            crate::run::run(&["kill", "-KILL", &pid.to_string()]);
        }
    }
}

/// Says that the test is done, also if it fails.
pub(crate) struct Done<'d>(pub(crate) &'d AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// fio, which writes and verifies what it has written, until it is interrupted.
struct Fio(Child);

impl Fio {
    fn start(uri: &str) -> Fio {
        let uri = format!("--uri={uri}");
        let mut line = vec!["fio", "--name=verify", "--ioengine=nbd", &uri, "--rw=randwrite"];
        line.extend(["--bsrange=4k-64k", "--size=32M", "--iodepth=16", "--randrepeat=0"]);
        line.extend(["--verify=crc32c", "--verify_backlog=64", "--verify_fatal=1"]);
        line.extend(["--verify_state_save=0", "--time_based", "--runtime=500"]);
        line.extend(["--output-format=json"]);
        let mut command = bounded_by(600, &line);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Fio(child.unwrap())
    }

    /// Interrupts it; returns the greatest latency of a request, in ns.
    fn end(mut self) -> u64 {
        assert!(self.0.try_wait().unwrap().is_none(), "fio has ended before it was interrupted");
        // Not `timeout` itself, which would end its child at once.
        ok(&["pkill", "-INT", "--parent", &self.0.id().to_string()]);
        let (mut out, mut errors) = (String::new(), String::new());
        self.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        self.0.wait().unwrap();
        let report = &out[out.find('{').unwrap_or(0)..];
        let report: Value =
            serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {out}{errors}"));
        let job = &report["jobs"][0];
        assert_eq!(job["error"], 0, "{out}{errors}");
        for direction in ["read", "write"] {
            assert!(job[direction]["total_ios"].as_u64() > Some(0), "{out}{errors}");
        }
        let of = |direction: &str| job[direction]["clat_ns"]["max"].as_u64().unwrap();
        of("read").max(of("write"))
    }
}

/// Upgrades a yard while fio writes to a volume, a RAM disk and a null device in memory, and
/// verifies. `BLOCKYARD_UPGRADE_ROUNDS` sets the number of upgrades.
#[test]
fn clients_see_a_pause_and_no_error() {
    let rounds = std::env::var(ROUNDS).map_or(3, |rounds| rounds.parse().unwrap());
    let place = Place::new();
    let volume = format!("volume:///v0?size=1G&path={}", place.file("pool"));
    let mut yard = Upgradable::new(place, &[&volume, RAM0, MEM0]);
    let all = ["v0", "ram0", "mem0"].map(|name| Fio::start(&yard.yard.uri(name)));
    let (control, is_done) = (yard.yard.control(), AtomicBool::new(false));
    let mut pauses = Vec::new();
    std::thread::scope(|scope| {
        // Commands wait too, and do not fail.
        let commands = scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let list = ok(&[BLOCKYARD, "list", "--control", &control]);
                assert_eq!(list.lines().count(), 4, "{list}");
            }
        });
        let done = Done(&is_done);
        for _ in 0..rounds {
            // Each fio has used its connection since the last upgrade.
            let before = yard.requests();
            let has_used = || {
                let now = yard.requests();
                now.len() == 3 && now.iter().all(|(name, count)| before.get(name) < Some(count))
            };
            assert!((0..LOOKS_MAX).any(|_| has_used()), "fio does nothing");
            let view = yard.upgrade(&[]);
            assert_eq!((&view["devices"], &view["connections"]), (&3.into(), &3.into()), "{view}");
            pauses.push(view["pause_ns"].as_u64().unwrap() / 1_000_000);
        }
        drop(done);
        commands.join().unwrap();
    });
    let longest = all.map(Fio::end);
    println!("{rounds} upgrades; pauses in ms: {pauses:?}; longest requests in ns: {longest:?}");
    yard.end();
}

#[test]
fn data_in_memory_and_settings_stay() {
    let mut yard = Upgradable::new(Place::new(), &[RAM0, MEM0, N0]);
    let zoned = "null:///z?size=16M&zoned=1&zone_size=1M&memory_backed=1";
    yard.yard.command(&["add", zoned]).ok();
    yard.yard.command(&["remove", "n0"]).ok();
    yard.yard.command(&["sched", "set", "mem0", "scheduler=mq-deadline", "read_expire=77"]).ok();
    yard.yard.command(&["ram", "set", "ram0", "mem_limit=48M"]).ok();
    for name in ["ram0", "mem0", "z"] {
        nbdsh(&yard.yard.uri(name), "h.pwrite(b'blockyard' * 4096 + b'x' * 4096, 1 << 20)");
    }
    let zones = |yard: &Upgradable| {
        let report = yard.yard.command(&["zone", "report", "z", "--json"]).ok().json();
        let zones = report.as_array().unwrap();
        zones.iter().map(|zone| zone["wptr"].clone()).collect::<Vec<_>>()
    };
    let before = zones(&yard);
    assert_eq!(before[1], 80);
    for _ in 0..2 {
        yard.upgrade(&[]);
    }
    let devices = yard.yard.command(&["list", "--json"]).ok().json();
    let names: Vec<_> = devices.as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["ram0", "mem0", "z"]);
    for name in ["ram0", "mem0", "z"] {
        let check = "assert h.pread(40960, 1 << 20) == b'blockyard' * 4096 + b'x' * 4096";
        nbdsh(&yard.yard.uri(name), check);
    }
    assert_eq!(zones(&yard), before);
    let sched = yard.yard.command(&["sched", "show", "mem0", "--json"]).ok().json();
    assert_eq!(
        (&sched["scheduler"], &sched["tunables"]["read_expire"]),
        (&"mq-deadline".into(), &77.into())
    );
    let said = yard.yard.command(&["ram", "set", "ram0", "compact=0"]).ok().out;
    assert!(said.contains("mem_limit 50331648"), "{said}");
    yard.end();
}

#[test]
fn sockets_and_the_process_id_belong_to_the_new_process() {
    let place = Place::new();
    let pidfile = place.file("pid");
    let mut yard = Upgradable::new(place, &[N0, "--pidfile", &pidfile]);
    let pid = yard.upgrade(&[])["pid"].to_string();
    assert_eq!(yard.yard.end().code(), Some(0));
    assert_eq!(std::fs::read_to_string(&pidfile).unwrap().trim(), pid);
    yard.yard.serves("n0");
    yard.end();
    for name in ["nbd", "control", "pid"] {
        assert!(!yard.yard.place.path().join(name).exists(), "{name} outlives the process");
    }
}

/// The bug: the new process ended at a place that it could not serve, after the old one had ended.
#[test]
fn a_new_place_that_cannot_be_served_is_left_out() {
    let place = Place::new();
    let (file, folder) = (place.file("yard.toml"), place.path().display().to_string());
    let config = format!(
        "[serve]\ncontrol = \"{folder}/control\"\nnbd = [\"unix:{folder}/nbd\"]\nNVME\
         [[device]]\nkind = \"ram\"\nname = \"ram0\"\nsize = \"64M\"\n"
    );
    std::fs::write(&file, config.replace("NVME", "")).unwrap();
    let yard = Yard::start(place, &["serve", "--config", &file]);
    let mut yard = Upgradable { yard, successor: None };
    nbdsh(&yard.yard.uri("ram0"), "h.pwrite(b'x' * 4096, 0)");
    // One more than a yard has.
    let places: Vec<_> = (1..=65).map(|host| format!("\"tcp:127.0.0.{host}:0\"")).collect();
    let nvme = format!("nvme = [{}]\n", places.join(", "));
    std::fs::write(&file, config.replace("NVME", &nvme)).unwrap();
    yard.upgrade(&[]);
    nbdsh(&yard.yard.uri("ram0"), "assert h.pread(4096, 0) == b'x' * 4096");
    yard.end();
}

/// The bug: the old process ended, and the new one served on.
#[test]
fn a_signal_during_an_upgrade_ends_the_new_process() {
    let place = Place::new();
    let [program, begun, goes] = ["program", "begun", "goes"].map(|name| place.file(name));
    let wait = format!("touch '{begun}'\nwhile [ ! -e '{goes}' ]; do :; done\n");
    executable(&program, &format!("#!/bin/sh\n{wait}exec {BLOCKYARD} \"$@\"\n"));
    let mut yard = Upgradable::new(place, &[N0]);
    let (old, control) = (yard.yard.pid().to_string(), yard.yard.control());
    let line = [BLOCKYARD, "upgrade", "--program", &program, "--control", &control, "--json"];
    let mut command = bounded_by(60, &line);
    let upgrade = command.stdout(Stdio::piped()).spawn().unwrap();
    ok(&["sh", "-c", "while [ ! -e $0 ]; do :; done", &begun]);
    ok(&["kill", "-TERM", &old]);
    std::fs::write(&goes, "").unwrap();
    let said = upgrade.wait_with_output().unwrap();
    let view: Value = serde_json::from_slice(&said.stdout).unwrap();
    yard.successor = view["pid"].as_u64();
    let new = yard.successor.unwrap().to_string();
    ok(&["sh", "-c", "while kill -0 $0 2> /dev/null; do :; done", &new]);
    assert!(!std::path::Path::new(&control).exists(), "the new process has not ended in order");
}

/// A client that sees whether its connection goes on.
const GOES_ON: &str = "
import subprocess, sys
h.pwrite(b'x' * 4096, 0)
args = ['BLOCKYARD', 'upgrade', '--control', 'CONTROL'] + PROGRAM
done = subprocess.run(args, stderr=subprocess.PIPE, text=True)
assert done.returncode == 6, done
assert all(it in done.stderr for it in WANTED), done
assert h.pread(4096, 0) == b'x' * 4096
h.pwrite(b'y' * 4096, 4096)
h.flush()
";

/// Serves a volume, has `program` fail in its place, and checks that a client goes on.
fn goes_on(place: Place, program: &str, wanted: &str) {
    let volume = format!("volume:///v0?size=1G&path={}", place.file("pool"));
    let yard = Upgradable::new(place, &[&volume, MEM0]);
    for name in ["v0", "mem0"] {
        client_goes_on(&yard, name, &["--program", program], &[wanted, "serves on"]);
    }
}

/// Checks that the clients of a device go on after an upgrade that fails.
fn client_goes_on(yard: &Upgradable, name: &str, args: &[&str], wanted: &[&str]) {
    let script = GOES_ON
        .replace("BLOCKYARD", BLOCKYARD)
        .replace("CONTROL", &yard.yard.control())
        .replace("PROGRAM", &format!("{args:?}"))
        .replace("WANTED", &format!("{wanted:?}"));
    nbdsh(&yard.yard.uri(name), &script);
    assert_eq!(yard.serving_pid(), u64::from(yard.yard.pid()));
}

/// The bug: the new process made a pool or opened a file that was put there, and connected clients
/// read its data.
#[test]
fn other_data_at_the_place_of_a_device_leave_the_old_process_serving() {
    let place = Place::new();
    let [pool, file, keys] = ["pool", "file", "keyed"].map(|name| place.file(name));
    let [key, other] = ["key", "other"].map(|name| place.file(name));
    std::fs::write(&key, [1; 32]).unwrap();
    std::fs::write(&other, [2; 32]).unwrap();
    ok(&["chmod", "600", &key, &other]);
    let volume = format!("volume:///v0?size=64M&path={pool}");
    let plain = format!("file:///f0?size=1M&path={file}");
    let keyed = format!("volume:///k0?size=64M&path={keys}&key_file={key}");
    let yard = Upgradable::new(place, &[&volume, &plain, &keyed]);
    let moved = |path: &str| ok(&["mv", path, &format!("{path}.moved")]);
    let back = |path: &str| ok(&["mv", "-T", &format!("{path}.moved"), path]);
    moved(&pool);
    client_goes_on(&yard, "v0", &[], &["holds no pool of volumes: it does not exist", "serves on"]);
    assert!(!std::path::Path::new(&pool).exists(), "the new process has made a pool");
    back(&pool);
    moved(&file);
    ok(&["truncate", "-s", "1M", &file]);
    client_goes_on(&yard, "f0", &[], &["expected the file that clients have used", "serves on"]);
    std::fs::remove_file(&file).unwrap();
    back(&file);
    let change = ["volume", "change-key", &keys, "k0", "--key-file", &key];
    yard.yard.command(&[&change[..], &["--new-key-file", &other]].concat()).ok();
    client_goes_on(&yard, "k0", &[], &["`k0` cannot be unlocked by what its line names"]);
    std::fs::copy(&other, &key).unwrap();
    let mut yard = yard;
    for name in ["v0", "f0", "k0"] {
        nbdsh(&yard.yard.uri(name), "assert h.pread(4096, 4096) == b'y' * 4096");
    }
    yard.upgrade(&[]);
    for name in ["v0", "f0", "k0"] {
        nbdsh(&yard.yard.uri(name), "assert h.pread(4096, 4096) == b'y' * 4096");
    }
    yard.end();
}

#[test]
fn a_program_that_cannot_start_leaves_the_old_one_serving() {
    goes_on(Place::new(), "/no/such/program", "cannot start /no/such/program: No such file");
    goes_on(
        Place::new(),
        "/bin/false",
        "the new process ended before it was ready: exit status: 1",
    );
}

/// A program that is killed while it opens the devices, when the old process has closed its own.
#[test]
fn a_process_that_ends_after_the_state_came_leaves_the_old_one_serving() {
    let place = Place::new();
    let program = place.file("program");
    executable(&program, &ends_after_state(""));
    goes_on(place, &program, "signal: 9 (SIGKILL); process");
}

/// The old process closes its devices, and can open one of them no more.
#[test]
fn a_device_that_cannot_be_opened_again_is_named() {
    let place = Place::new();
    let [program, file] = ["program", "file"].map(|name| place.file(name));
    executable(&program, &ends_after_state(&format!("os.rename('{file}', '{file}.moved')\n")));
    let plain = format!("file:///f0?size=1M&path={file}");
    let yard = Upgradable::new(place, &[&plain, N0]);
    let lost = "serves on WITHOUT these devices, which it cannot open again: `f0` (";
    yard.fails(&["--program", &program]).says(&[lost]);
    yard.yard.serves("n0");
    assert!(!std::path::Path::new(&file).exists(), "the old process has made a file");
}

/// A program that speaks the new side's language up to the state, executes some statements, and
/// ends.
pub(crate) fn ends_after_state(statements: &str) -> String {
    "#!/usr/bin/python3\n\
         import os, socket, struct\n\
         s = socket.socket(fileno=os.dup(0))\n\
         def message():\n\
         \x20   head = s.recv(16, socket.MSG_WAITALL)\n\
         \x20   return s.recv(struct.unpack('<8sII', head)[2], socket.MSG_WAITALL)\n\
         def say(body):\n\
         \x20   s.sendall(struct.pack('<8sII', b'BLKYHAND', 3, len(body)) + body)\n\
         assert b'offer' in message()\n\
         say(b'\"ready\"')\n\
         assert b'state' in message()\n"
        .to_owned()
        + statements
        + "os.kill(os.getpid(), 9)\n"
}

/// A program that has too few descriptors to open the devices.
#[test]
fn a_process_that_cannot_open_the_devices_leaves_the_old_one_serving() {
    let place = Place::new();
    let program = place.file("program");
    executable(&program, &format!("#!/bin/sh\nulimit -n 24\nexec {BLOCKYARD} \"$@\"\n"));
    goes_on(place, &program, "the new process");
}

#[test]
fn another_version_of_the_format_is_refused_by_both_sides() {
    let place = Place::new();
    let program = place.file("program");
    let script = "#!/usr/bin/python3\n\
         import os, socket, struct\n\
         s = socket.socket(fileno=os.dup(0))\n\
         s.recv(16, socket.MSG_WAITALL)\n\
         s.sendall(struct.pack('<8sII', b'BLKYHAND', 99, 7) + b'\"ready\"')\n";
    executable(&program, script);
    goes_on(place, &program, "the hand-over has format 99: expected 3");
    let place = Place::new();
    let script = "
import os, socket, struct, subprocess, sys
here, there = socket.socketpair()
here.sendall(struct.pack('<8sII', b'BLKYHAND', 99, 2) + b'{}')
args = [sys.argv[1], 'serve', 'null:///n?size=1M', '--control', sys.argv[2], '--nbd', 'none']
env = dict(os.environ, BLOCKYARD_HANDOVER='99')
done = subprocess.run(args, stdin=there, env=env, stderr=subprocess.PIPE, text=True)
there.close()
assert done.returncode == 1, done
assert 'the hand-over has format 99: expected 3' in done.stderr, done
head = here.recv(16, socket.MSG_WAITALL)
assert b'format 99' in here.recv(struct.unpack('<8sII', head)[2], socket.MSG_WAITALL)
";
    python(script, &[BLOCKYARD, &place.file("control")]);
}

/// Runs a script of a client. The script upgrades the yard by `upgrade(ARGUMENT, ..)`, while the
/// handle `h` is connected to `uri`.
#[track_caller]
fn upgrading_client(yard: &mut Upgradable, uri: &str, script: &str) {
    let control = yard.yard.control();
    // A URI may name files of certificates only where a script allows it.
    let define = format!(
        "import subprocess\n\
         def upgrade(*args):\n\
         \x20   line = ['{BLOCKYARD}', 'upgrade', '--control', '{control}', *args]\n\
         \x20   return subprocess.run(line, stderr=subprocess.PIPE, text=True)\n\
         h.set_uri_allow_local_file(True)\n\
         h.connect_uri('{uri}')\n"
    );
    let run = crate::run::run(&["nbdsh", "--command", &(define + script)]);
    yard.successor = Some(yard.serving_pid());
    yard.yard.read_notices();
    run.ok();
}

/// A client that an upgrade does not disconnect.
const STAYS: &str = "
h.pwrite(b'y' * 4096, 4096)
done = upgrade()
assert done.returncode == 0, done
assert h.pread(4096, 4096) == b'y' * 4096
h.pwrite(b'z' * 4096, 8192)
";

/// A client that only `--force` disconnects, after its requests are answered.
const IS_FORCED: &str = "
h.pwrite(b'x' * 4096, 0)
done = upgrade()
assert done.returncode == 6 and 'uses TLS; --force disconnects it' in done.stderr, done
assert h.pread(4096, 0) == b'x' * 4096
h.pwrite(b'x' * 4096, 12288)
done = upgrade('--force')
assert done.returncode == 0, done
try:
    h.pread(4096, 0)
except nbd.Error:
    pass
else:
    raise AssertionError('the client is still connected')
";

#[test]
fn listeners_with_tls_serve_on_with_the_certificates_of_the_configuration() {
    let place = Place::new();
    let [folder, other] = ["tls", "other"].map(|name| tls::certificates(&place, name));
    let args = [MEM0, "--tls", "on", "--tls-certificates", &folder];
    let mut yard = Upgradable::new(place, &args);
    let (with_tls, clear) = (tls::uri(&yard.yard, &folder), yard.yard.uri("mem0"));
    upgrading_client(&mut yard, &with_tls, IS_FORCED);
    tls::qemu_info(&yard.yard, &folder).ok();
    // A certificate of another authority at the same path.
    let old = yard.yard.place.file("old");
    ok(&["mv", &folder, &old]);
    ok(&["mv", &other, &folder]);
    upgrading_client(&mut yard, &clear, STAYS);
    tls::qemu_info(&yard.yard, &folder).ok();
    tls::qemu_info(&yard.yard, &old).fails();
    nbdsh(&clear, "assert h.pread(4096, 12288) == b'x' * 4096");
    yard.end();
}

/// Makes a socket, and executes a program that inherits it, as systemd does.
const ACTIVATE: &str = "
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
";

#[test]
fn sockets_that_systemd_made_are_handed_over_and_left() {
    let place = Place::new();
    let (socket, control) = (place.file("nbd"), place.file("control"));
    let activate = ["python3", "-c", ACTIVATE, &socket];
    let args = ["serve", MEM0, "--control", &control];
    let yard = Yard::start_below(place, &activate, BLOCKYARD, &args);
    let mut yard = Upgradable { yard, successor: None };
    let uri = yard.yard.uri("mem0");
    for _ in 0..2 {
        upgrading_client(&mut yard, &uri, STAYS);
        nbdsh(&uri, "assert h.pread(4096, 8192) == b'z' * 4096");
    }
    yard.end();
    assert!(!std::path::Path::new(&control).exists(), "the control socket outlives the process");
    assert!(std::path::Path::new(&socket).exists(), "the process has removed systemd's socket");
}

/// A client that fills a zone, and writes a part of another one before and after the upgrade. It
/// does not flush.
const WRITES_ZONES: &str = "
import random
full, part = random.Random(1).randbytes(1 << 20), random.Random(2).randbytes(300 << 10)
h.pwrite(part, 0)
h.pwrite(full, 6 << 20)
h.pwrite(part, 5 << 20)
done = upgrade()
assert done.returncode == 0, done
assert h.pread(len(part), 0) == part
assert h.pread(len(full), 6 << 20) == full
h.pwrite(part, (5 << 20) + len(part))
assert h.pread(2 * len(part), 5 << 20) == part + part
";

#[test]
fn smr_disks_keep_zones_and_data() {
    let place = Place::new();
    let disk = |name: &str, more: &str| {
        format!("smr:///{name}?size=16M&zone_size=1M&zone_nr_conv=2&zone_max_open=4{more}")
    };
    let [files, cached] = ["files", "cached"].map(|name| format!("&backing={}", place.file(name)));
    let (memory, files) = (disk("memory", ""), disk("files", &files));
    let cached = disk("cached", &(cached + "&cache=volatile"));
    let mut yard = Upgradable::new(place, &[&memory, &files, &cached]);
    for name in ["memory", "files", "cached"] {
        let uri = yard.yard.uri(name);
        upgrading_client(&mut yard, &uri, WRITES_ZONES);
        let report = yard.yard.command(&["zone", "report", name, "--json"]).ok().json();
        let zone = |number: usize| (report[number]["cond"].clone(), report[number]["wptr"].clone());
        assert_eq!(zone(0).0, "not-wp", "{name}");
        assert_eq!(zone(5), ("implicit-open".into(), 1200.into()), "{name}");
        assert_eq!(zone(6), ("full".into(), 2048.into()), "{name}");
        assert_eq!(zone(7), ("empty".into(), 0.into()), "{name}");
    }
    yard.end();
}

/// The bug: a stream kept the pool locked, so that neither process could open it again.
#[test]
fn what_streams_use_is_not_handed_over() {
    let place = Place::new();
    let pool = place.file("pool");
    let volume = format!("volume:///v0?size=64M&path={pool}");
    let mut yard = Upgradable::new(place, &[&volume, MEM0]);
    nbdsh(&yard.yard.uri("v0"), "import os; h.pwrite(os.urandom(24 << 20), 0); h.flush()");
    yard.yard.command(&["volume", "snapshot", &pool, "v0@a"]).ok();
    let control = yard.yard.control();
    let begin = |line: &[&str]| {
        let mut command = bounded_by(60, line);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        // The first byte: the stream is being produced. Its rest waits in the pipe.
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    };
    let send = [BLOCKYARD, "volume", "send", &pool, "v0@a", "--control", &control];
    let scrub = ["curl", "--silent", "--no-buffer", "--unix-socket", &control, "--data"];
    let scrub =
        [&scrub[..], &["{\"rate_bytes\": 2097152}", "http://yard/v1/volumes/scrub"]].concat();
    let trace = [BLOCKYARD, "trace", "mem0", "-o", "-", "--control", &control];
    for (line, wanted) in [
        (&send[..], "`v0@a` is being sent"),
        (&scrub[..], "is being scrubbed"),
        (&trace[..], "`mem0` is traced, by `blockyard trace`"),
    ] {
        let mut child = begin(line);
        client_goes_on(&yard, "v0", &[], &[wanted]);
        // Not `timeout` alone.
        ok(&["pkill", "-KILL", "--parent", &child.id().to_string()]);
        child.wait().unwrap();
    }
    // The yard notices the end of a client when it writes to it.
    let upgraded = || yard.yard.command(&["upgrade", "--json"]).code == Some(0);
    assert!((0..LOOKS_MAX).any(|_| upgraded()), "a stream has not ended");
    yard.successor = Some(yard.serving_pid());
    yard.end();
}

/// Makes a program.
pub(crate) fn executable(path: &str, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn what_cannot_be_handed_over_is_named() {
    let place = Place::new();
    let trace = place.file("trace");
    let traced = format!("null:///t?size=1M&trace={trace}");
    let yard = Upgradable::new(place, &[N0, &traced]);
    yard.fails(&[]).says(&["`t` records the trace"]);
    drop(yard);
    let config = "[serve]\ncontrol = \"PLACE/control\"\nnbd = [\"unix:PLACE/nbd\"]\n\
                  [[device]]\nkind = \"null\"\nname = \"n0\"\nsize = \"1G\"\n";
    let place = Place::new();
    let (file, folder) = (place.file("yard.toml"), place.path().display().to_string());
    std::fs::write(&file, config.replace("PLACE", &folder)).unwrap();
    let yard = Yard::start(place, &["serve", "--config", &file]);
    let yard = Upgradable { yard, successor: None };
    std::fs::write(&file, config.replace("PLACE", &folder).replace("/nbd\"", "/other\"")).unwrap();
    yard.fails(&[]).says(&["nbd: the running yard listens at unix:", "serves on"]);
    std::fs::write(&file, "[serve").unwrap();
    yard.fails(&[]).says(&["the new process refuses: ", "serves on"]);
    yard.yard.serves("n0");
}
