//! How a server is started, found and ended.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Stdio};

use crate::place::Place;
use crate::run::{Run, bounded, finish, nbdsh, ok, python, run};
use crate::yard::{BLOCKYARD, Yard, blockyard};

const N0: &str = "null:///n0?size=1G";
const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";

/// A client that holds a connection until its standard input ends.
struct Holder {
    child: Child,
    stdin: ChildStdin,
}

impl Holder {
    /// Connects, runs the script and keeps the connection.
    fn connect(uri: &str, script: &str) -> Holder {
        let script = format!("{script}\nprint('held', flush=True)\nimport sys; sys.stdin.read()");
        let line = ["nbdsh", "--uri", uri, "--command", &script];
        let mut command = bounded(&line);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "held\n");
        Holder { child, stdin }
    }

    fn release(mut self) {
        drop(self.stdin);
        self.child.wait().unwrap();
    }
}

#[test]
fn a_signal_ends_it_with_a_client_connected() {
    for signal in ["TERM", "INT"] {
        let mut yard = Yard::serve(&[MEM0]);
        let holder = Holder::connect(&yard.uri("mem0"), "h.pwrite(b'x' * 4096, 0)");
        yard.signal(signal);
        let status = yard.end();
        assert_eq!(status.code(), Some(0), "SIG{signal}: {:?}", status.signal());
        for socket in ["nbd", "control"] {
            assert!(!yard.place.path().join(socket).exists(), "SIG{signal} left {socket}");
        }
        holder.release();
    }
}

#[test]
fn requests_in_flight_are_answered_before_the_end() {
    // Each request takes 200 ms, so all of them are in flight when the signal comes.
    let mut yard = Yard::serve(&["null:///slow?size=1G&irqmode=timer&completion_nsec=200000000"]);
    let script = "
import os
done = []
for i in range(8):
    zeroes = nbd.Buffer.from_bytearray(bytearray(4096))
    h.aio_pwrite(zeroes, i * 4096, lambda error: done.append(error.value) or 1)
h.poll(0)
os.kill(int(PID), 15)
while h.aio_in_flight() > 0:
    h.poll(-1)
assert done == [0] * 8, done
";
    let script = script.replace("PID", &yard.pid().to_string());
    nbdsh(&yard.uri("slow"), &script);
    assert_eq!(yard.end().code(), Some(0));
}

#[test]
fn a_temporary_socket_lives_as_long_as_the_command() {
    let run = blockyard(&["serve", N0, "-U", "-", "--run", "nbdinfo --size \"$uri\""]).ok();
    assert_eq!(run.out.lines().last(), Some("1073741824"), "{run}");
}

#[test]
fn the_command_finds_the_yard_that_runs_it() {
    let command = "blockyard list --json && test \"$exportname\" = n0 && test -S \"$unixsocket\"";
    let command = command.replace("blockyard", BLOCKYARD);
    let run = blockyard(&["serve", N0, "-U", "-", "--run", &command]).ok();
    assert!(run.out.contains("\"n0\""), "{run}");
}

#[test]
fn the_command_decides_the_exit_code() {
    let run = blockyard(&["serve", N0, "-U", "-", "--run", "exit 3"]);
    assert_eq!(run.code, Some(3), "{run}");
}

#[test]
fn standard_input_and_output_are_one_connection() {
    let script = "
import nbd, sys
h = nbd.NBD()
h.set_export_name('mem0')
h.connect_command([sys.argv[1], 'serve', sys.argv[2], '--nbd', 'stdio', '--control', sys.argv[3]])
h.pwrite(b'x' * 4096, 4096)
assert h.pread(4096, 4096) == b'x' * 4096
assert h.get_size() == 64 << 20
h.shutdown()
";
    let place = Place::new();
    python(script, &[BLOCKYARD, MEM0, &place.file("control")]);
}

#[test]
fn a_client_starts_it_and_hands_it_a_socket() {
    // libnbd's brackets (`[ ... ]`) start a server by socket activation, as systemd does.
    let place = Place::new();
    let control = place.file("control");
    let serve = [BLOCKYARD, "serve", N0, "--nbd", "stdio", "--control", &control];
    let info = run(&[&["nbdinfo", "--json", "--", "["], &serve[..], &["]"]].concat()).ok().json();
    assert_eq!(info["exports"][0]["export-size"], 1 << 30);
}

#[test]
fn systemd_starts_it_when_a_client_comes() {
    let place = Place::new();
    let socket = place.file("activated");
    let control = place.file("control");
    let start = ["systemd-socket-activate", "--listen", &socket, BLOCKYARD, "serve", N0];
    let line = [&start[..], &["--control", &control]].concat();
    let mut command = bounded(&line);
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines();
    // systemd-socket-activate prints this when the socket exists.
    let listening = errors.any(|line| line.unwrap().contains("Listening on"));
    assert!(listening, "systemd-socket-activate does not listen");
    let uri = format!("nbd+unix:///n0?socket={socket}");
    assert_eq!(ok(&["nbdinfo", "--size", &uri]).trim(), "1073741824");
    // Not through `timeout`, which sends the signal twice: to its child and to its group.
    ok(&["pkill", "-TERM", "--parent", &child.id().to_string()]);
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}: {:?}", errors.collect::<Vec<_>>());
}

#[test]
fn tcp_serves_as_a_socket_does() {
    // The system picks a free port for an instant; another program could take it, so try again.
    for _ in 0..8 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let endpoint = format!("tcp:127.0.0.1:{port}");
        let command = format!("nbdinfo --size nbd://127.0.0.1:{port}/n0");
        let run = blockyard(&["serve", N0, "--nbd", &endpoint, "--run", &command]);
        if run.err.contains("in use") {
            continue;
        }
        assert_eq!(run.ok().out.lines().last(), Some("1073741824"));
        return;
    }
    panic!("no port was free");
}

#[test]
fn the_process_is_named_in_a_file() {
    let place = Place::new();
    let pidfile = place.file("pid");
    let mut yard = Yard::serve_in(place, &[N0, "--pidfile", &pidfile]);
    assert_eq!(fs::read_to_string(&pidfile).unwrap().trim(), yard.pid().to_string());
    yard.signal("TERM");
    assert_eq!(yard.end().code(), Some(0));
    assert!(!fs::exists(&pidfile).unwrap(), "the file outlives the process");
}

#[test]
fn it_goes_with_its_parent() {
    let place = Place::new();
    let serve = format!(
        "{BLOCKYARD} serve {N0} --nbd unix:{} --control {} --exit-with-parent & read line",
        place.file("nbd"),
        place.file("control")
    );
    let mut command = bounded(&["sh", "-c", &serve]);
    let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut printed = BufReader::new(shell.stdout.take().unwrap());
    // The server prints its first line when it serves.
    let mut line = String::new();
    printed.read_line(&mut line).unwrap();
    assert!(!line.is_empty());
    shell.stdin.take().unwrap().write_all(b"\n").unwrap();
    // The pipe ends when neither the shell nor the server holds it.
    printed.read_to_string(&mut line).unwrap();
    shell.wait().unwrap();
}

#[test]
fn a_second_server_does_not_take_the_socket_of_the_first() {
    let yard = Yard::serve(&[MEM0]);
    let endpoint = format!("unix:{}", yard.socket());
    blockyard(&["serve", N0, "--nbd", &endpoint]).fails().says(&[&yard.socket()]);
    yard.serves("mem0");
}

#[test]
fn a_dead_servers_socket_is_no_obstacle() {
    let mut yard = Yard::serve(&[MEM0]);
    yard.signal("KILL");
    yard.end();
    assert!(yard.place.path().join("nbd").exists(), "a killed server cannot tidy up");
    let endpoint = format!("unix:{}", yard.socket());
    let command = "nbdinfo --size \"$uri\"";
    let line = [BLOCKYARD, "serve", N0, "--nbd", &endpoint, "--run", command];
    let run: Run = finish(&line, &mut bounded(&line)).ok();
    assert_eq!(run.out.lines().last(), Some("1073741824"));
}

/// Clients of NVMe are kernels: `tests/guest/nvme` has them. Here is what the program says of it.
#[test]
fn nvme_is_served_where_asked_and_says_what_it_cannot_describe() {
    let zoned = "null:///z?size=64M&bs=4k&zoned=1&zone_size=4M";
    let smr = "null:///smr?size=64M&zoned=1&zone_size=4M&zone_nr_conv=2";
    let yard =
        Yard::serve_in(Place::new(), &[MEM0, zoned, smr, "--nvme", "tcp:127.0.0.1:0", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&yard.printed()).unwrap();
    let place = said["nvme"][0].as_str().unwrap();
    let port = place.strip_prefix("tcp:127.0.0.1:").unwrap().to_owned();
    assert!(
        yard.complained().contains("require secrets (--nvme-secrets)"),
        "{}",
        yard.complained()
    );
    let nqn = |device: &str| {
        let shown = yard.command(&["show", device]).ok().out;
        shown.lines().find_map(|line| line.strip_prefix("nvme").map(str::trim).map(str::to_owned))
    };
    assert_eq!(nqn("z").as_deref(), Some("nqn.2026-11.io.blockyard:z"));
    assert_eq!(nqn("smr").as_deref(), Some("not served"));
    let note = "not served over NVMe: it has 2 conventional zones, which ZNS does not have";
    let shown = yard.command(&["show", "smr"]).ok().out;
    assert!(shown.contains(note), "{shown}");
    // A device that is added later is served too, and one that is removed is not.
    yard.command(&["add", "null:///n0?size=1G"]).ok();
    assert_eq!(nqn("n0").as_deref(), Some("nqn.2026-11.io.blockyard:n0"));
    yard.command(&["remove", "n0"]).ok();
    yard.command(&["add", "null:///n0?size=1G"]).ok();
    // The port is in use.
    let taken = format!("tcp:127.0.0.1:{port}");
    let (status, text) =
        Yard::try_serve(&[N0, "--nvme", &taken]).map(drop).expect_err("the port is taken");
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("nvme: {taken}: cannot listen: ")), "{text}");
    let wrong = blockyard(&["serve", N0, "--nvme", "unix:/run/x"]);
    assert!(wrong.err.contains("expected tcp:HOST:PORT"), "{wrong}");
}

#[test]
fn discovery_of_nvme_has_ports_of_its_own() {
    let places = ["--nvme", "tcp:127.0.0.1:0", "--nvme-discovery", "tcp:127.0.0.1:0"];
    let yard = Yard::serve_in(Place::new(), &[&[N0], &places[..], &["--json"]].concat());
    let said: serde_json::Value = serde_json::from_str(&yard.printed()).unwrap();
    let place = said["nvme_discovery"][0].as_str().unwrap();
    assert!(place.starts_with("tcp:127.0.0.1:") && said["nvme"][0] != place, "{said}");
    let (status, text) = Yard::try_serve(&[N0, places[0], places[1], places[2], place])
        .map(drop)
        .expect_err("the port is taken");
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("nvme-discovery: {place}: cannot listen: ")), "{text}");
    assert!(text.contains("--nvme-discovery names another place"), "{text}");
    let alone = blockyard(&["serve", N0, "--nvme-discovery", "tcp:127.0.0.1:0"]);
    assert_eq!(alone.code, Some(2), "{alone}");
    assert!(alone.err.contains("NVMe is not served; add --nvme tcp:HOST:PORT"), "{alone}");
}

#[test]
fn nvme_is_served_at_run_time_by_commands() {
    let yard = Yard::serve(&[MEM0]);
    let listen = |place: &str| yard.command(&["nvme", "listen", place]);
    let said = listen("tcp:127.0.0.1:0").ok().out;
    let place = said.lines().find_map(|line| line.strip_prefix("NVMe at ")).unwrap();
    assert!(said.contains("  warning: any NVMe host that reaches this address"), "{said}");
    assert!(
        yard.complained().contains("require secrets (--nvme-secrets)"),
        "{}",
        yard.complained()
    );
    let run = listen(place).fails().says(&[&format!("cannot listen at `{place}`: ")]);
    assert_eq!(run.code, Some(6), "{run}");
    let run = listen("unix:/run/x").fails().says(&["expected tcp:HOST:PORT"]);
    assert_eq!(run.code, Some(2), "{run}");
    let finder = yard.command(&["nvme", "listen", "tcp:127.0.0.1:0", "--discovery"]).ok().out;
    assert!(finder.starts_with("NVMe discovery at tcp:127.0.0.1:"), "{finder}");
    let listed = yard.command(&["nvme", "list"]).ok().out;
    let rows: Vec<Vec<_>> = listed.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["tcp:127.0.0.1:0", place, "devices", "0"], "{listed}");
    assert_eq!(rows[2][2..], ["discovery", "0"], "{listed}");
    let stopped = yard.command(&["nvme", "unlisten", place]).ok().out;
    assert_eq!(stopped, format!("NVMe no longer at {place}\n"));
    yard.command(&["nvme", "unlisten", place]).fails().says(&["there is no NVMe listener at"]);
}

#[test]
fn all_devices_are_namespaces_of_one_subsystem_where_asked() {
    let nqn = "nqn.2026-11.io.blockyard:all";
    let args = ["--nvme", "tcp:127.0.0.1:0", "--nvme-subsystem", nqn];
    let yard = Yard::serve_in(Place::new(), &[&[MEM0, N0], &args[..]].concat());
    let said = yard.printed();
    let line = said.lines().find(|line| line.starts_with("  all devices: nvme connect -t tcp"));
    assert!(line.unwrap().ends_with(&format!("-n {nqn}")), "{said}");
    for (name, nsid) in [("mem0", 1), ("n0", 2)] {
        let shown = yard.command(&["show", name]).ok().out;
        let wanted = format!("nqn.2026-11.io.blockyard:{name}, namespace {nsid} of all devices");
        assert!(shown.contains(&wanted), "{shown}");
    }
    // A program that starts a yard reads it from the line of JSON.
    let yard = Yard::serve_in(Place::new(), &[&[N0], &args[..], &["--json"]].concat());
    let said: serde_json::Value = serde_json::from_str(&yard.printed()).unwrap();
    assert_eq!(said["nvme_subsystem"], nqn, "{said}");
    let yard = Yard::serve_in(Place::new(), &[&[N0], &args[..2], &["--json"]].concat());
    let said: serde_json::Value = serde_json::from_str(&yard.printed()).unwrap();
    assert!(said["nvme_subsystem"].is_null(), "{said}");
    let wrong = blockyard(&["serve", N0, "--nvme", "tcp:127.0.0.1:0", "--nvme-subsystem", "all"]);
    assert_eq!(wrong.code, Some(2), "{wrong}");
    assert!(wrong.err.contains("expected an NQN, which begins with `nqn.`"), "{wrong}");
}

#[test]
fn the_line_for_a_host_is_printed() {
    let args = ["--nvme", "tcp:127.0.0.1:0", "--log", "error"];
    let yard = Yard::serve_in(Place::new(), &[&[MEM0], &args[..]].concat());
    let said = yard.printed();
    let at = |line: &&str| line.starts_with("NVMe at tcp:127.0.0.1:");
    let port = said.lines().find(at).and_then(|line| line.rsplit(':').next()).unwrap();
    let line =
        format!("  nvme connect -t tcp -a 127.0.0.1 -s {port} -n nqn.2026-11.io.blockyard:mem0");
    assert!(said.lines().any(|said| said == line), "{said}");
    assert_eq!(yard.complained(), "");
}

/// Secrets were never made for this test: they are the example of the NVM Express Base
/// Specification.
#[test]
fn access_of_nvme_hosts_is_checked_before_anything_is_made() {
    const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    let place = Place::new();
    let write = |name: &str, mode: u32, text: &str| {
        let file = place.write(name, text);
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        file
    };
    let good = write("good", 0o600, &format!("# hosts\nnqn.a {SECRET}\n"));
    let open = write("open", 0o644, &format!("nqn.a {SECRET}\n"));
    let wrong = write("wrong", 0o600, &format!("nqn.a {SECRET}\nnqn.b {}\n", &SECRET[..40]));
    let missing = place.file("missing");
    let volume = format!("volume:///v?size=64M&path={}", place.file("pool"));
    let at = "tcp:127.0.0.1:0";
    let cases: [(&[&str], i32, String); 9] = [
        (&["--nvme-allow", "nqn.a"], 2, "expected DEVICE=NQN".to_owned()),
        (&["--nvme-allow", "v=alice"], 2, "expected the NQN of a host".to_owned()),
        (&["--nvme-hashes", "sha1"], 2, "sha256, sha384, sha512".to_owned()),
        (&["--nvme-hashes", "sha256"], 2, "add --nvme-secrets FILE".to_owned()),
        (&["--nvme-dh-groups", "null"], 2, "add --nvme-secrets FILE".to_owned()),
        (&["--nvme-secrets", &missing], 3, format!("nvme: secrets: cannot read {missing}: ")),
        (
            &["--nvme-secrets", &open],
            3,
            format!("nvme: secrets: invalid mode 0644 of {open}: expected 0600"),
        ),
        (
            &["--nvme-secrets", &wrong],
            3,
            format!("nvme: secrets: {wrong}, line 2: invalid secret: expected DHHC-1"),
        ),
        (
            &["--nvme-secrets", &good, "--nvme-allow", "v=nqn.b"],
            3,
            format!("nvme: allow: nqn.b may use `v`, but has no secret in {good}"),
        ),
    ];
    for (args, code, wanted) in cases {
        let run = blockyard(&[&["serve", &volume, "--nvme", at], args].concat()).fails();
        assert_eq!(run.code, Some(code), "{run}");
        assert!(run.err.contains(&wanted), "{run}");
        assert!(!run.err.contains(&SECRET[10..20]), "no secret is shown: {run}");
    }
    let alone = ["serve", &volume, "--nvme-secrets", &good, "--control", "none"];
    let run = blockyard(&alone).fails();
    assert!(run.err.contains("nvme: no server would use its options"), "{run}");
    assert!(!fs::exists(place.file("pool")).unwrap(), "a pool was made");
    // A port where hosts authenticate is no reason for a warning, whenever it is opened.
    let args = [MEM0, "--nvme-secrets", &good, "--nvme-allow", "mem0=nqn.a", "--log", "warn"];
    let yard = Yard::serve_in(Place::new(), &args);
    let said = yard.command(&["nvme", "listen", at]).ok().out;
    assert!(said.starts_with("NVMe at tcp:127.0.0.1:") && said.lines().count() == 1, "{said}");
    assert_eq!(yard.complained(), "");
    let args = [MEM0, "--nvme", at, "--nvme-secrets", &good, "--nvme-allow", "mem0=nqn.a"];
    let yard = Yard::serve_in(Place::new(), &[&args[..], &["--log", "warn"]].concat());
    assert_eq!(yard.complained(), "");
}

/// Such a device was added without a word, and then refused every host.
#[test]
fn a_device_that_no_nvme_host_may_use_has_a_note() {
    let note = "no NVMe host may use it: neither the device nor `*` has an allow list";
    let args = ["--nvme", "tcp:127.0.0.1:0", "--nvme-allow", "mem0=nqn.a", "--log", "warn"];
    let yard = Yard::serve_in(Place::new(), &[&[MEM0], &args[..]].concat());
    assert!(!yard.printed().contains(note), "{}", yard.printed());
    let added = yard.command(&["add", "null:///later?size=1G"]).ok().out;
    assert!(added.contains(&format!("  note: {note}")), "{added}");
    let logged = yard.complained();
    assert!(logged.lines().any(|line| line.contains(note) && line.contains("later")), "{logged}");
    let every = [&args[..], &["--nvme-allow", "*=nqn.b"]].concat();
    let yard = Yard::serve_in(Place::new(), &[&[MEM0], &every[..]].concat());
    let added = yard.command(&["add", "null:///later?size=1G"]).ok().out;
    assert!(!added.contains("note"), "{added}");
    assert_eq!(yard.complained(), "");
}

/// A hypervisor's first message, GET_FEATURES; returns the features.
fn vhost_features(path: &std::path::Path) -> (UnixStream, u64) {
    let mut stream = UnixStream::connect(path).unwrap();
    let features = get_features(&mut stream);
    (stream, features)
}

fn get_features(stream: &mut UnixStream) -> u64 {
    stream.write_all([1_u32, 1, 0].map(u32::to_le_bytes).as_flattened()).unwrap();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    u64::from_le_bytes(reply[12..].try_into().unwrap())
}

#[test]
fn a_device_is_served_to_a_hypervisor_at_its_socket() {
    const FLUSH: u64 = 1 << 9;
    const ZONED: u64 = 1 << 17;
    let place = Place::new();
    let path = place.path().join("vm");
    let at = format!("mem0=unix:{}", path.display());
    let mut yard = Yard::serve_in(place, &[MEM0, N0, "--vhost", &at]);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let printed = yard.printed();
    assert!(printed.contains("-device vhost-user-blk-pci,chardev=mem0"), "{printed}");
    let (stream, features) = vhost_features(&path);
    assert_eq!(features & (FLUSH | ZONED), FLUSH);
    let shown = yard.command(&["show", "mem0", "--json"]).ok().out;
    assert!(shown.contains(&format!("\"vhost\": \"unix:{}\"", path.display())), "{shown}");
    assert!(shown.contains("\"clients\": 1"), "{shown}");
    let connections = yard.command(&["connections"]).ok().out;
    let of_us = format!("process {}", std::process::id());
    assert!(connections.contains("vhost") && connections.contains(&of_us), "{connections}");
    drop(stream);
    while yard.command(&["connections"]).ok().out.contains("vhost") {
        std::thread::yield_now();
    }
    yard.command(&["remove", "mem0"]).ok();
    assert!(!path.exists(), "the device was removed");
    yard.signal("TERM");
    assert_eq!(yard.end().code(), Some(0));
}

#[test]
fn a_socket_for_a_hypervisor_comes_and_goes_in_a_running_yard() {
    let place = Place::new();
    let path = place.path().join("vm");
    let at = format!("unix:{}", path.display());
    let directory = place.path().display().to_string();
    let options = ["--api-directory", &directory, "--vhost-poll", "50"];
    let yard = Yard::serve_in(place, &[&[MEM0, N0][..], &options].concat());
    for (args, wanted) in [
        (["listen", "mem1", &at], "did you mean `mem0`"),
        (["listen", "mem0", "tcp:127.0.0.1:1"], "expected unix:PATH"),
        (["listen", "mem0", "unix:/run/vm"], "invalid place `/run/vm`"),
    ] {
        let run = yard.command(&[&["vhost"][..], &args].concat());
        assert!(run.code != Some(0) && run.err.contains(wanted), "{args:?}: {run}");
        assert!(!path.exists(), "{args:?}");
    }
    let said = yard.command(&["vhost", "listen", "mem0", &at]).ok().out;
    assert_eq!(said, format!("mem0 at {at}\n"));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let again = yard.command(&["vhost", "listen", "mem0", &format!("{at}2")]);
    assert!(again.err.contains("a device has one vhost-user socket"), "{again}");
    assert!(!path.with_extension("2").exists());
    let (stream, _) = vhost_features(&path);
    let of_us = format!("process {}", std::process::id());
    let listed = yard.command(&["vhost", "list"]).ok().out;
    assert!(listed.contains(&at) && listed.contains(&of_us), "{listed}");
    let rings = yard.command(&["vhost", "list", "--rings"]).ok().out;
    assert!(rings.starts_with("DEVICE  RING  REQUESTS"), "{rings}");
    for command in [&["vhost", "unlisten", "mem0"][..], &["remove", "mem0"]] {
        let refused = yard.command(command);
        assert!(refused.code != Some(0) && refused.err.contains("--force"), "{refused}");
    }
    let refused = yard.command(&["remove", "mem0"]);
    assert!(refused.err.contains(&of_us), "{refused}");
    let said = yard.command(&["vhost", "unlisten", "mem0", "--force"]).ok().out;
    assert_eq!(said, format!("mem0 no longer at {at}\n"));
    assert!(!path.exists());
    let gone = yard.command(&["vhost", "unlisten", "mem0"]);
    assert!(gone.err.contains("`mem0` has no vhost-user socket"), "{gone}");
    drop(stream);
    yard.command(&["vhost", "listen", "mem0", &at, "--json"]).ok();
    vhost_features(&path);
}

#[test]
fn a_volume_grows_while_a_hypervisor_has_it() {
    let place = Place::new();
    let path = place.path().join("vm");
    let at = format!("vm=unix:{}", path.display());
    let pool = place.path().join("pool").display().to_string();
    let volume = format!("volume:///vm?size=64M&path={pool}");
    let yard = Yard::serve_in(place, &[&volume, "--vhost", &at]);
    let (mut stream, features) = vhost_features(&path);
    let resize = ["volume", "resize", &pool, "vm", "--size"];
    yard.command(&[&resize[..], &["128M"]].concat()).ok();
    assert_eq!(get_features(&mut stream), features, "the hypervisor stays connected");
    let refused = yard.command(&[&resize[..], &["64M", "--force"]].concat());
    assert!(refused.err.contains("1 client"), "{refused}");
    let shown = yard.command(&["show", "vm", "--json"]).ok().out;
    assert!(shown.contains(&format!("unix:{}", path.display())), "{shown}");
    drop(stream);
    assert_eq!(vhost_features(&path).1, features);
}

#[test]
fn a_socket_for_hypervisors_that_cannot_be_served_makes_nothing() {
    let place = Place::new();
    let path = place.path().join("vm");
    let at = format!("unix:{}", path.display());
    let serve =
        |vhost: &str| blockyard(&["serve", MEM0, "-U", "-", "--vhost", vhost, "--run", "true"]);
    for (vhost, code, wanted) in [
        ("mem0".to_owned(), 2, "expected DEVICE=unix:PATH"),
        ("mem0=tcp:127.0.0.1:1".to_owned(), 2, "expected unix:PATH"),
        (format!("mem1={at}"), 1, "did you mean `mem0`"),
        ("mem0=unix:/dev/null".to_owned(), 1, "no socket"),
    ] {
        let run = serve(&vhost);
        assert_eq!(run.code, Some(code), "{vhost}: {run}");
        assert!(run.err.contains(wanted), "{vhost}: {run}");
        assert!(!path.exists(), "{vhost}");
    }
    let run = serve(&format!("mem0={at}"));
    assert_eq!(run.code, Some(0), "{run}");
    assert!(!path.exists(), "the socket is removed at the end");
}

/// What is wrong on the command line is found before the kernel is asked, which the tests of guests
/// do (`tests/guest/ublk`).
#[test]
fn a_block_device_of_the_kernel_that_cannot_be_served_makes_nothing() {
    let serve = |ublk: &[&str]| {
        let options = ublk.iter().flat_map(|place| ["--ublk", place]);
        let args: Vec<_> = ["serve", MEM0, N0, "-U", "-", "--run", "true"].to_vec();
        blockyard(&args.into_iter().chain(options).collect::<Vec<_>>())
    };
    for (ublk, code, wanted) in [
        (&["mem0=x"][..], 2, "invalid id `x`: expected the N of /dev/ublkbN, 0 to 1048575, or any"),
        (&["=0"], 2, "letters, digits"),
        (&["mem1=0"], 1, "did you mean `mem0`"),
        (
            &["mem0=0", "mem0=1"],
            1,
            "invalid ublk `mem0=1`: expected each device and each number once",
        ),
        (&["mem0=7", "n0=7"], 1, "invalid ublk `n0=7`: expected each device and each number once"),
    ] {
        let run = serve(ublk);
        assert_eq!(run.code, Some(code), "{ublk:?}: {run}");
        assert!(run.err.contains(wanted), "{ublk:?}: {run}");
    }
    let list = blockyard(&["ublk", "list"]);
    let remove = blockyard(&["ublk", "remove", "1048575"]);
    match ublk_refusal() {
        Some(wanted) => {
            for run in [serve(&["mem0"]), list, remove] {
                assert_eq!(run.code, Some(1), "{run}");
                assert!(run.err.contains(wanted), "{run}");
            }
        }
        None => {
            assert_eq!(
                (serve(&["mem0"]).code, list.code, remove.code),
                (Some(0), Some(0), Some(1))
            );
            assert!(remove.err.contains("there is no ublk device 1048575"), "{remove}");
        }
    }
}

/// Why this machine makes no block devices by ublk, as an error says it; `None` if it makes some.
fn ublk_refusal() -> Option<&'static str> {
    match std::path::Path::new("/dev/ublk-control").exists() {
        false => Some("load the driver by `modprobe ublk_drv` (Linux 6.5 or later"),
        true if !rustix::process::geteuid().is_root() => Some("ublk needs root"),
        true => None,
    }
}

/// A start that ublk refuses, for its kernel or for the shape of a device, leaves no pool.
#[test]
fn a_refused_block_device_of_the_kernel_leaves_no_files() {
    let place = Place::new();
    let (pool, zones) = (place.file("pool"), place.file("zones"));
    let volume = format!("volume:///v0?path={pool}&size=64M");
    let short = format!("null:///z0?size=1026M&zoned=1&zone_size=4M&backing={zones}");
    let (pid, socket) = (place.file("pid"), place.file("nbd"));
    let unix = format!("unix:{socket}");
    let line = ["serve", &volume, &short, "--ublk", "v0", "--ublk", "z0", "--nbd", &unix];
    let run = blockyard(&[&line[..], &["--control", "none", "--pidfile", &pid]].concat());
    assert!(run.code != Some(0) && run.err.contains("ublk"), "{run}");
    for path in [&pool, &zones, &pid, &socket] {
        assert!(!std::path::Path::new(path).exists(), "{path}: {run}");
    }
}

/// What is wrong is found before the kernel is asked, which the tests of guests do.
#[test]
fn block_devices_of_the_kernel_are_changed_in_a_running_yard() {
    let yard = Yard::serve(&[MEM0, N0]);
    for (args, wanted) in [
        (["add", "mem1"], "did you mean `mem0`"),
        (["add", "mem0=x"], "invalid id `x`: expected the N of /dev/ublkbN, 0 to 1048575, or any"),
        (["remove", "mem1"], "did you mean `mem0`"),
        (["remove", "mem0"], "`mem0` is no block device of the kernel"),
        (["remove", "1048576"], "expected the N of /dev/ublkbN, 0 to 1048575"),
    ] {
        let run = yard.command(&[&["ublk"][..], &args].concat());
        assert!(run.code != Some(0) && run.err.contains(wanted), "{args:?}: {run}");
    }
    let added = yard.command(&["ublk", "add", "mem0"]);
    match ublk_refusal() {
        Some(wanted) => assert!(added.code != Some(0) && added.err.contains(wanted), "{added}"),
        None => {
            assert_eq!(added.code, Some(0), "{added}");
            let removed = yard.command(&["ublk", "remove", "mem0"]);
            assert_eq!(removed.code, Some(0), "{removed}");
        }
    }
}
