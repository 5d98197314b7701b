//! A pool in an object store through the whole program: it outlives its machine, and the machine
//! that had it acknowledges nothing after another one has taken it over.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use blockyard_testing::s3_server::{KEY_ID, S3Program, S3Server, SECRET_KEY};
use blockyard_testing::s3_witness::S3Witness;

use crate::place::Place;
use crate::run::{Run, bounded, nbdsh, run};
use crate::upgrade::Upgradable;
use crate::yard::{BLOCKYARD, Yard};

pub(crate) const POOL: &str = "s3://vol/pool";

/// The command that gives a program the store and its credentials.
fn env_of(store: &S3Server) -> Vec<String> {
    env_to(&store.endpoint())
}

/// As [`env_of`], by the URL of the store, or of a proxy to it.
fn env_to(endpoint: &str) -> Vec<String> {
    vec![
        "env".to_owned(),
        format!("AWS_ENDPOINT_URL={endpoint}"),
        format!("AWS_ACCESS_KEY_ID={KEY_ID}"),
        format!("AWS_SECRET_ACCESS_KEY={SECRET_KEY}"),
    ]
}

/// A machine of its own, which serves the pool.
pub(crate) fn serve(store: &S3Server, more: &str) -> Yard {
    serve_to(&store.endpoint(), more)
}

/// As [`serve`], by the URL of the store, or of a proxy to it.
pub(crate) fn serve_to(endpoint: &str, more: &str) -> Yard {
    let env = env_to(endpoint);
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    Yard::serve_below(Place::new(), &env, &[&format!("volume:///v0?path={POOL}{more}")])
}

/// Runs a command on another machine.
pub(crate) fn command(store: &S3Server, args: &[&str]) -> Run {
    command_at(Place::new().path(), store, args)
}

/// Runs a command on the machine that has its files in a folder.
fn command_at(folder: &Path, store: &S3Server, args: &[&str]) -> Run {
    let mut line = env_of(store);
    let folder = folder.display();
    line.extend([format!("XDG_STATE_HOME={folder}"), format!("XDG_RUNTIME_DIR={folder}")]);
    line.push(BLOCKYARD.to_owned());
    line.extend(args.iter().map(|arg| (*arg).to_owned()));
    run(&line.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A machine whose pool another one has taken over.
fn acknowledges_no_fua_write(yard: &Yard) {
    nbdsh(
        &yard.uri("v0"),
        "import errno, nbd\n\
         try:\n\
         \x20   h.pwrite(b'y' * 4096, 0, nbd.CMD_FLAG_FUA)\n\
         except nbd.Error as error:\n\
         \x20   assert error.errnum == errno.EIO, error\n\
         else:\n\
         \x20   raise AssertionError('the write was acknowledged')",
    );
    let complained = yard.complained();
    assert!(complained.contains("another opener has taken over the pool"), "{complained}");
}

/// Such a machine returns no data either, which may be old.
fn returns_no_data(yard: &Yard) {
    nbdsh(
        &yard.uri("v0"),
        "import errno, nbd\n\
         for at in [0, 32 << 20]:\n\
         \x20   try:\n\
         \x20       h.pread(4096, at)\n\
         \x20   except nbd.Error as error:\n\
         \x20       assert error.errnum == errno.EIO, error\n\
         \x20   else:\n\
         \x20       raise AssertionError(f'data at {at}')",
    );
}

/// A trace of blktrace with a read of 4 KiB: it was queued, issued and completed.
fn traced_read() -> Vec<u8> {
    let record = |(sequence, action): (u32, u32)| {
        let mut record = vec![0; 48];
        record[0..4].copy_from_slice(&0x6561_7407_u32.to_le_bytes());
        record[4..8].copy_from_slice(&sequence.to_le_bytes());
        record[8..16].copy_from_slice(&(u64::from(sequence) * 1000).to_le_bytes());
        record[24..28].copy_from_slice(&4096_u32.to_le_bytes());
        record[28..32].copy_from_slice(&action.to_le_bytes());
        record
    };
    // The kinds of blktrace_api.h, above them the categories, of which 1 is a read.
    let actions = [1 | 0x11 << 16, 7 | 0x41 << 16, 8 | 0x81 << 16];
    (1..).zip(actions).flat_map(record).collect()
}

/// Commands that would end the daemon of another machine, or overwrite a disk, are refused.
fn commands_change_nothing(store: &S3Server, yard: &Yard) {
    let may_be_open = &["or --take-over: another machine may have"];
    let uri = format!("volume:///v0?path={POOL}");
    command(store, &["zone", "check", &uri, "--for", "zbc"]).fails().says(may_be_open);
    let place = Place::new();
    let trace = place.path().join("trace");
    std::fs::write(&trace, traced_read()).unwrap();
    command(store, &["replay", trace.to_str().unwrap(), &uri]).fails().says(may_be_open);

    let disk = place.path().join("disk");
    let bytes = vec![0x5a; 8 << 20];
    std::fs::write(&disk, &bytes).unwrap();
    let path = disk.to_str().unwrap();
    let one_copy = &["invalid pool `s3://vol/pool`", "has one copy"];
    yard.command(&["pool", "attach", POOL, path, "--force"]).fails().says(one_copy);
    yard.command(&["pool", "replace", POOL, POOL, path, "--force"]).fails();
    assert!(std::fs::read(&disk).unwrap() == bytes, "the disk was overwritten");
    nbdsh(&yard.uri("v0"), "import nbd\nh.pwrite(b'x' * 4096, 8 << 20, nbd.CMD_FLAG_FUA)");
}

/// A volume goes from a directory into an object store, and back into another directory.
fn a_volume_moves_there_and_back(program: S3Program) {
    let folder = Place::new();
    let Some(store) = program.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let [here, back, image] = ["here", "back", "image"].map(|name| folder.file(name));
    let bytes = || {
        let mut random = fastrand::Rng::with_seed(1);
        let mut bytes = vec![0; 8 << 20];
        random.fill(&mut bytes[..3 << 20]);
        bytes
    };
    std::fs::write(&image, bytes()).unwrap();
    let there = |args: &[&str]| command_at(folder.path(), &store, args);
    there(&["volume", "import", &here, "v0", &image]).ok();
    there(&["volume", "snapshot", &here, "v0@first"]).ok();
    let no_size = there(&["volume", "move", &here, "v0", POOL]).fails();
    no_size.says(&["invalid --pool-size `0`: expected the most bytes"]);
    let listed = there(&["volume", "list", "-Ho", "name", "-t", "all", &here]).ok();
    assert_eq!(listed.out, "v0\nv0@first\n");

    let moved = there(&["volume", "move", &here, "v0", POOL, "--pool-size", "2G"]).ok();
    assert!(moved.out.starts_with("moved v0 to s3://vol/pool: 1 snapshot, 3.0"), "{moved}");
    assert_eq!(there(&["volume", "list", "-H", &here]).ok().out, "");
    let mut yard = serve(&store, "");
    let write = "import nbd\nh.pwrite(b'w' * 4096, 4 << 20, nbd.CMD_FLAG_FUA)";
    nbdsh(&yard.uri("v0"), write);
    yard.signal("TERM");
    assert!(yard.end().success());
    there(&["volume", "move", POOL, "v0", &back, "--take-over"]).ok();
    let has_all = |pool: &str| {
        for name in ["v0@first", "v0"] {
            let out = folder.file(&format!("{name}.raw"));
            _ = std::fs::remove_file(&out);
            command(&store, &["volume", "export", pool, name, &out, "--take-over"]).ok();
            let mut wanted = bytes();
            if name == "v0" {
                wanted[4 << 20..][..4096].fill(b'w');
            }
            assert!(std::fs::read(&out).unwrap() == wanted, "{name} has other bytes");
        }
    };
    has_all(&back);
    is_uploaded_before_the_first_pool_loses_it(&store, &back);
    has_all(POOL);
}

/// Moves a volume into a pool that a daemon serves with `ack=local`. The machine of the daemon is
/// lost right afterwards, with its log.
fn is_uploaded_before_the_first_pool_loses_it(store: &S3Server, from: &str) {
    let moving = ["volume", "move", from, "v0", POOL];
    let refused = command(store, &[&moving[..], &["--take-over"]].concat()).fails();
    refused.says(&["`s3://vol/pool`", "or --take-over-to: another machine may have"]);
    let env = env_of(store);
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    let device = format!("volume:///b?path={POOL}&size=1M&ack=local");
    let mut yard = Yard::serve_below(Place::new(), &env, &[&device]);
    yard.command(&moving).ok();
    yard.signal("KILL");
    assert!(!yard.end().success());
    let listed = command(store, &["volume", "list", "-H", from]).ok();
    assert_eq!(listed.out, "");
}

#[test]
fn a_volume_moves_into_minio_and_back() {
    a_volume_moves_there_and_back(S3Program::Minio);
}

fn a_pool_outlives_its_machine(program: S3Program) {
    let folder = Place::new();
    let Some(store) = program.start(folder.path()) else { return };
    let Some(mut witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let create = ["volume", "create", POOL, "v0", "--size", "64M"];
    let machine = Place::new();
    let refused = command_at(machine.path(), &store, &create).fails();
    refused.says(&["invalid --pool-size `0`: expected the most bytes"]);
    assert!(witness.list("").is_empty(), "a refused command leaves objects");
    let left = run(&["find", machine.path().to_str().unwrap(), "-path", "*/object/*"]).ok();
    assert_eq!(left.out, "", "a refused command leaves files");

    let mut first = serve(&store, "&pool_size=2G&size=64M");
    nbdsh(
        &first.uri("v0"),
        "import random\n\
         h.pwrite(random.Random(1).randbytes(1 << 20), 4096)\n\
         h.flush()",
    );
    first.command(&["volume", "snapshot", POOL, "v0@first"]).ok();
    nbdsh(&first.uri("v0"), "import nbd\nh.pwrite(b'x' * 4096, 8 << 20, nbd.CMD_FLAG_FUA)");
    first.command(&["add", &format!("volume:///v1?path={POOL}&size=16M")]).ok();
    let other = "volume:///v2?path=s3://vol/other&pool_size=2G&size=16M";
    first.command(&["add", other]).fails().says(&["expected a pool that the yard has open"]);
    first.signal("KILL");
    assert!(!first.end().success());

    let listed = command(&store, &["volume", "list", "-t", "all", POOL]).ok();
    assert!(listed.out.contains("v0@first"), "{listed}");
    let snapshot = ["volume", "snapshot", POOL, "v0@other"];
    let may_be_open = &["or --take-over: another machine may have"];
    command(&store, &snapshot).fails().says(may_be_open);
    command(&store, &[&snapshot[..], &["--take-over"]].concat()).ok();

    let mut second = serve(&store, "");
    let same = "import random\n\
                assert h.pread(1 << 20, 4096) == random.Random(1).randbytes(1 << 20)\n\
                assert h.pread(4096, 8 << 20) == b'x' * 4096";
    nbdsh(&second.uri("v0"), same);
    commands_change_nothing(&store, &second);
    let mut third = Upgradable::of(serve(&store, ""));
    nbdsh(&third.yard.uri("v0"), same);
    acknowledges_no_fua_write(&second);
    nbdsh(
        &third.yard.uri("v0"),
        "import nbd\n\
         assert h.pread(4096, 0) == bytes(4096)\n\
         h.pwrite(b'z' * 4096, 0, nbd.CMD_FLAG_FUA)",
    );
    // The new program opens the pool after the old one has closed it.
    third.upgrade(&[]);
    nbdsh(
        &third.yard.uri("v0"),
        "import nbd\n\
         assert h.pread(4096, 0) == b'z' * 4096\n\
         h.pwrite(b'z' * 4096, 4096, nbd.CMD_FLAG_FUA)",
    );
    third.end();
    second.signal("TERM");
    second.end();
    for yard in [&second, &third.yard] {
        let said = yard.printed() + &yard.complained();
        assert!(!said.contains(SECRET_KEY), "{said}");
    }
    command(&store, &["volume", "check", POOL]).ok();
    let strange = |name: &String| !name.starts_with("pool/");
    assert!(!witness.list("").iter().any(strange), "objects outside of the prefix");
}

/// A daemon of the machine that has its state in a folder.
fn serve_on(store: &S3Server, state: &Place, more: &str) -> Yard {
    let mut env = env_of(store);
    env.push(format!("XDG_STATE_HOME={}", state.path().display()));
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    Yard::serve_below(Place::new(), &env, &[&format!("volume:///v0?path={POOL}{more}")])
}

/// Kills a daemon while the object store does not run, and starts the store again.
fn kill(mut yard: Yard, store: &mut S3Server) {
    yard.signal("KILL");
    assert!(!yard.end().success());
    store.restart();
}

/// The lag of the pool of a daemon: bytes and batches.
fn lag(yard: &Yard) -> (u64, u64) {
    let status = yard.command(&["pool", "status", POOL, "--json"]).ok().json();
    let upload = &status[0]["upload"];
    assert_eq!(upload["ack"], "local", "{status}");
    (upload["lag_bytes"].as_u64().unwrap(), upload["lag_batches"].as_u64().unwrap())
}

/// With `ack=local` writes with FUA are acknowledged while the object store does not run. The
/// machine has them after a kill. Another machine has what was uploaded.
fn a_local_log_outlives_a_kill(program: S3Program) {
    let (folder, machines) = (Place::new(), [Place::new(), Place::new()]);
    let Some(mut store) = program.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let write = |yard: &Yard, letter: char, at: u64| {
        let write = format!("h.pwrite(b'{letter}' * 4096, {at}, nbd.CMD_FLAG_FUA)");
        nbdsh(&yard.uri("v0"), &format!("import nbd\n{write}"));
    };
    let check = |yard: &Yard, letters: &str| {
        let has = letters.chars().zip((0..).step_by(4096)).map(|(letter, at)| match letter {
            '-' => format!("assert h.pread(4096, {at}) == bytes(4096)"),
            _ => format!("assert h.pread(4096, {at}) == b'{letter}' * 4096"),
        });
        nbdsh(&yard.uri("v0"), &has.collect::<Vec<_>>().join("\n"));
    };
    let yard = serve_on(&store, &machines[0], "&pool_size=2G&size=64M&ack=local&max_lag=32M");
    let add = format!("volume:///v1?path={POOL}&size=16M&ack=object");
    yard.command(&["add", &add]).fails().says(&["invalid ack `object`: expected `local`, as `s3:"]);
    store.kill();
    write(&yard, 'a', 0);
    write(&yard, 'b', 4096);
    let (bytes, batches) = lag(&yard);
    assert!(bytes > 8192 && batches > 0, "{bytes} bytes in {batches} batches");
    let status = yard.command(&["pool", "status", POOL]).ok();
    assert!(status.out.contains("upload: ack=local, the object store lacks"), "{status}");
    let status = yard.command(&["pool", "status", POOL, "--json"]).ok().json();
    let puts = status[0]["upload"]["requests"]["puts"].as_u64();
    // Neither the preflight nor the opening is a part of what a month costs.
    assert!(puts.is_some_and(|puts| (1..100).contains(&puts)), "{status}");
    kill(yard, &mut store);

    let listed = command_at(machines[0].path(), &store, &["volume", "list", POOL]).ok();
    assert!(listed.out.contains("v0"), "{listed}");
    let elsewhere = command(&store, &["volume", "list", POOL]).ok();
    assert!(!elsewhere.out.contains("v0"), "{elsewhere}");
    command_at(machines[0].path(), &store, &["volume", "check", POOL]).ok();
    // The log is used, also if the pool is not opened with ack=local.
    let mut yard = serve_on(&store, &machines[0], "");
    check(&yard, "ab--");
    write(&yard, 'c', 8192);
    yard.signal("TERM");
    yard.end();

    let yard = serve_on(&store, &machines[0], "&ack=local");
    store.kill();
    write(&yard, 'd', 12288);
    kill(yard, &mut store);
    let mut other = serve_on(&store, &machines[1], "&ack=local");
    check(&other, "abc-");
    let status = other.command(&["pool", "status", POOL]).ok();
    assert!(status.out.contains(" UTC may be missing: the machine that had"), "{status}");
    let status = other.command(&["status", "--json"]);
    assert_eq!(status.json()["warnings"][0]["kind"], "writes_missing", "{status}");
    write(&other, 'e', 12288);
    other.signal("TERM");
    other.end();
    let yard = serve_on(&store, &machines[0], "&ack=local");
    check(&yard, "abce");
    let complained = yard.complained();
    assert!(complained.contains("another machine has taken over the pool: "), "{complained}");
    let machine = machines[0].path().display().to_string();
    let lost = run(&["find", &machine, "-name", "lost-*"]).ok();
    assert!(!lost.out.is_empty(), "{lost}");
}

/// Rounds of the test of a standby, one for each `ack`; `BLOCKYARD_STANDBY_ROUNDS` sets another
/// number.
fn standby_rounds() -> usize {
    std::env::var("BLOCKYARD_STANDBY_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap())
}

/// A machine of its own, which is a standby of the pool.
pub(crate) fn stand_by(store: &S3Server, more: &str) -> Yard {
    let env = env_of(store);
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    let uri = format!("volume:///v0?path={POOL}{more}");
    let yard = Yard::serve_below(Place::new(), &env, &[&uri, "--standby"]);
    assert!(!Path::new(&yard.socket()).exists(), "a standby listens for clients");
    let status = yard.command(&["status"]).ok();
    assert!(status.out.starts_with("OK: standby, 0 devices, 0 pools"), "{status}");
    yard
}

/// The machine that has the pool is stopped, and a standby takes the pool over when the lease has
/// run out. The stopped machine continues, and acknowledges nothing any more. A standby that is
/// promoted takes the pool over from a machine that lives.
fn a_standby_takes_over(program: S3Program) {
    const LEASE: &str = "&lease=3000";
    let folder = Place::new();
    let Some(store) = program.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let write = |yard: &Yard, letter: char| {
        let write = format!("h.pwrite(b'{letter}' * 4096, 0, nbd.CMD_FLAG_FUA)");
        nbdsh(&yard.uri("v0"), &format!("import nbd\n{write}"));
    };
    let check = |yard: &Yard, letter: char| {
        nbdsh(&yard.uri("v0"), &format!("assert h.pread(4096, 0) == b'{letter}' * 4096"));
    };
    for ack in ["object", "local"].into_iter().cycle().take(standby_rounds()) {
        // It is no standby: it stays when it has lost the pool.
        let mut active = serve(&store, &format!("&pool_size=2G&size=64M{LEASE}&ack={ack}"));
        active.command(&["promote"]).fails().says(&["this yard is no standby"]);
        let mut standby = stand_by(&store, LEASE);
        standby.command(&["upgrade"]).fails().says(&["this yard is a standby"]);
        write(&active, 'a');
        while ack == "local" && lag(&active).1 > 0 {
            std::thread::yield_now();
        }
        active.signal("STOP");
        standby.until_it_serves();
        check(&standby, 'a');
        write(&standby, 'b');
        active.signal("CONT");
        returns_no_data(&active);
        acknowledges_no_fua_write(&active);
        active.signal("KILL");
        active.end();

        let mut next = stand_by(&store, LEASE);
        let promoted = next.command(&["promote"]).ok();
        assert_eq!(promoted.out, "promoted: the yard serves\n");
        check(&next, 'b');
        // It was a standby: it ends, so that its service manager makes it one again.
        assert_eq!(standby.end().code(), Some(1), "{}", standby.complained());
        let complained = standby.complained();
        assert!(complained.contains("another opener has taken over the pool"), "{complained}");
        next.signal("TERM");
        assert!(next.end().success());
    }
    let mut standby = stand_by(&store, "");
    standby.signal("TERM");
    assert!(standby.end().success(), "{}", standby.complained());
    let refused = |query: &str| {
        let first = format!("volume:///v0?path={POOL}{query}");
        let second = format!("volume:///v1?path={POOL}&lease=4000");
        let env = env_of(&store);
        let env: Vec<&str> = env.iter().map(String::as_str).collect();
        let args = [first.as_str(), &second, "--standby"];
        Yard::try_serve_below(Place::new(), &env, &args).unwrap_err().1
    };
    let text = refused("&lease=3000");
    assert!(text.contains("device `v1`: invalid lease `4000`: expected `3000`, as `v0`"), "{text}");
    let text = refused("&lease=4000&max_lag=1G");
    assert!(text.contains("invalid max_lag `1G`: expected none without"), "{text}");
}

/// A client of QEMU. When its connection is lost, it connects to the same address again, for two
/// minutes.
struct QemuClient {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl QemuClient {
    fn start(socket: &str) -> QemuClient {
        let server = format!("server.type=unix,server.path={socket}");
        let options = format!("driver=nbd,{server},export=v0,reconnect-delay=120");
        let mut command = bounded(&["qemu-io", "--image-opts", &options]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        QemuClient { child, output }
    }

    /// Begins a command. The client reads no command before the one before has ended.
    fn begin(&mut self, command: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{command}").unwrap();
    }

    /// Waits until the command has printed this.
    fn ends(&mut self, expected: &str) {
        let mut line = String::new();
        while !line.contains(expected) {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the client has ended");
            assert!(!line.contains("failed") && !line.contains("rror"), "{line}");
        }
    }
}

/// The machine that has the pool is killed. Requests of its client wait, and are served by the
/// standby, which gets the address of the service.
#[test]
fn a_client_goes_on_with_the_machine_that_took_over() {
    const LEASE: &str = "&lease=3000";
    let folder = Place::new();
    let Some(store) = S3Program::Versitygw.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let mut active = serve(&store, &format!("&pool_size=2G&size=64M{LEASE}"));
    let mut standby = stand_by(&store, LEASE);
    let address = folder.file("address");
    std::os::unix::fs::symlink(active.socket(), &address).unwrap();
    let mut client = QemuClient::start(&address);
    client.begin("write -f -P 0x61 0 64k");
    client.ends("wrote 65536/65536");
    active.signal("KILL");
    assert!(!active.end().success());
    client.begin("write -f -P 0x62 64k 64k");
    standby.until_it_serves();
    let next = folder.file("next");
    std::os::unix::fs::symlink(standby.socket(), &next).unwrap();
    std::fs::rename(&next, &address).unwrap();
    client.ends("wrote 65536/65536");
    client.begin("read -P 0x61 0 64k");
    client.ends("read 65536/65536");
    drop(client.child.stdin.take());
    assert!(client.child.wait().unwrap().success());
    let same = "assert h.pread(65536, 0) == b'a' * 65536\n\
                assert h.pread(65536, 65536) == b'b' * 65536";
    nbdsh(&standby.uri("v0"), same);
    standby.signal("TERM");
    assert!(standby.end().success());
}

/// A clone is served by another machine than the one that made it. Snapshots go from the pool to
/// one in a directory and back, as a whole and as an increment.
#[test]
fn a_clone_is_served_elsewhere_and_snapshots_are_sent_there_and_back() {
    let folder = Place::new();
    let Some(store) = S3Program::Versitygw.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let end = |mut yard: Yard| {
        yard.signal("TERM");
        assert!(yard.end().success());
    };
    let first = serve(&store, "&pool_size=2G&size=16M");
    let write = "import nbd\nh.pwrite(b'a' * (1 << 20), 0, nbd.CMD_FLAG_FUA)";
    nbdsh(&first.uri("v0"), write);
    first.command(&["volume", "snapshot", POOL, "v0@first"]).ok();
    first.command(&["volume", "clone", POOL, "v0@first", "twin"]).ok();
    nbdsh(&first.uri("v0"), "import nbd\nh.pwrite(b'b' * 4096, 0, nbd.CMD_FLAG_FUA)");
    end(first);

    let env = env_of(&store);
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    let twin = format!("volume:///twin?path={POOL}");
    let second = Yard::serve_below(Place::new(), &env, &[&twin]);
    let write = "import nbd\n\
                 assert h.pread(1 << 20, 0) == b'a' * (1 << 20)\n\
                 h.pwrite(b'c' * 4096, 4096, nbd.CMD_FLAG_FUA)";
    nbdsh(&second.uri("twin"), write);
    second.command(&["volume", "snapshot", POOL, "twin@changed"]).ok();
    end(second);

    let volume = |args: &[&str]| command_at(folder.path(), &store, &[&["volume"], args].concat());
    let [here, whole, more, image] =
        ["here", "whole", "more", "image"].map(|name| folder.file(name));
    volume(&["send", POOL, "v0@first", "-o", &whole, "--take-over"]).ok();
    volume(&["receive", &here, "copy", "-i", &whole]).ok();
    volume(&["snapshot", POOL, "v0@second", "--take-over"]).ok();
    volume(&["send", POOL, "v0@second", "--from", "v0@first", "-o", &more, "--take-over"]).ok();
    volume(&["receive", &here, "copy", "-i", &more]).ok();
    let back = ["receive", POOL, "back", "--take-over", "-i"];
    volume(&["send", &here, "copy@first", "-o", &whole, "--force"]).ok();
    volume(&[&back[..], &[&whole]].concat()).ok();
    let increment = ["send", &here, "copy@second", "--from", "copy@first", "-o", &more];
    volume(&[&increment[..], &["--force"]].concat()).ok();
    volume(&[&back[..], &[&more]].concat()).ok();
    let bytes = |pool: &str, name: &str| {
        volume(&["export", pool, name, &image, "--force", "--take-over"]).ok();
        let bytes = std::fs::read(&image).unwrap();
        [0, 4096, 8192].map(|at| char::from(bytes[at]))
    };
    for (pool, name) in [(here.as_str(), "copy"), (POOL, "back"), (POOL, "v0")] {
        assert_eq!(bytes(pool, &format!("{name}@first")), ['a', 'a', 'a'], "{name}");
        assert_eq!(bytes(pool, &format!("{name}@second")), ['b', 'a', 'a'], "{name}");
    }
    assert_eq!(bytes(POOL, "twin@changed"), ['a', 'c', 'a']);
    volume(&["check", POOL]).ok();
}

/// A standby that may not read the store does not say that it is ready.
#[test]
fn a_standby_that_may_not_read_its_pool_is_refused() {
    let folder = Place::new();
    let Some(store) = S3Program::Versitygw.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    for (secret, uri, expected) in [
        ("wrong", format!("volume:///v0?path={POOL}&lease=3000"), "the store answered 403"),
        (SECRET_KEY, "volume:///v0?path=s3://none/pool".to_owned(), "the store answered 404"),
    ] {
        let mut env = env_of(&store);
        env.push(format!("AWS_SECRET_ACCESS_KEY={secret}"));
        let env: Vec<&str> = env.iter().map(String::as_str).collect();
        let args = [uri.as_str(), "--standby"];
        let (_, text) = Yard::try_serve_below(Place::new(), &env, &args).unwrap_err();
        assert!(
            text.contains("standby: cannot open the pool") && text.contains(expected),
            "{text}"
        );
    }
}

/// The machine that had the pool last has writes that only its log has. It is started again as a
/// standby, and takes the pool at once. After another machine has taken it over, it waits.
fn a_machine_takes_its_own_pool_at_once(program: S3Program) {
    let (folder, machine) = (Place::new(), Place::new());
    let Some(mut store) = program.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let query = "&pool_size=2G&size=64M&ack=local&lease=3000";
    let yard = serve_on(&store, &machine, query);
    store.kill();
    let write = "import nbd\nh.pwrite(b'a' * 4096, 0, nbd.CMD_FLAG_FUA)";
    nbdsh(&yard.uri("v0"), write);
    kill(yard, &mut store);
    let start = |machine: &Place| {
        let mut env = env_of(&store);
        env.push(format!("XDG_STATE_HOME={}", machine.path().display()));
        let env: Vec<&str> = env.iter().map(String::as_str).collect();
        let uri = format!("volume:///v0?path={POOL}{query}");
        Yard::serve_below(Place::new(), &env, &[&uri, "--standby"])
    };
    let mut yard = start(&machine);
    yard.until_it_serves();
    nbdsh(&yard.uri("v0"), "assert h.pread(4096, 0) == b'a' * 4096");
    let other = serve_on(&store, &Place::new(), query);
    assert_eq!(yard.end().code(), Some(1), "{}", yard.complained());
    let yard = start(&machine);
    let status = yard.command(&["status"]).ok();
    assert!(status.out.starts_with("OK: standby"), "{status}");
    nbdsh(&other.uri("v0"), "assert h.pread(4096, 0) == b'a' * 4096");
}

#[test]
fn a_machine_takes_its_own_pool_at_once_with_versitygw() {
    a_machine_takes_its_own_pool_at_once(S3Program::Versitygw);
}

#[test]
fn a_standby_takes_over_with_minio() {
    a_standby_takes_over(S3Program::Minio);
}

#[test]
fn a_standby_takes_over_with_versitygw() {
    a_standby_takes_over(S3Program::Versitygw);
}

#[test]
fn a_standby_without_a_pool_in_an_object_store_is_refused() {
    let (status, text) = Yard::try_serve(&["null:///n0?size=1M", "--standby"]).unwrap_err();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("standby: no device is a volume of a pool in an object store"), "{text}");
}

#[test]
fn a_local_log_outlives_a_kill_with_minio() {
    a_local_log_outlives_a_kill(S3Program::Minio);
}

#[test]
fn a_local_log_outlives_a_kill_with_versitygw() {
    a_local_log_outlives_a_kill(S3Program::Versitygw);
}

/// The bug: a command found the daemon by the URI of the pool alone, and changed the pool of the
/// same URI in another object store.
#[test]
fn a_command_changes_the_pool_of_its_own_store() {
    let folders = [Place::new(), Place::new()];
    let [Some(one), Some(two)] = folders.each_ref().map(|it| S3Program::Versitygw.start(it.path()))
    else {
        return;
    };
    let start = |store: &S3Server| S3Witness::start(&store.endpoint(), "vol");
    let (Some(_first), Some(_second)) = (start(&one), start(&two)) else { return };
    let mut yard = serve(&one, "&pool_size=2G&size=64M");
    let machine = Path::new(&yard.control()).parent().unwrap().to_owned();
    let create = ["volume", "create", POOL, "v0", "--size", "64M", "--pool-size", "2G"];
    command_at(&machine, &two, &create).ok();
    let snapshot = |name: &str, store| {
        let snapshot = ["volume", "snapshot", POOL, name];
        command_at(&machine, store, &snapshot)
    };
    snapshot("v0@one", &one).ok();
    snapshot("v0@two", &two).fails().says(&["or --take-over: another machine may have"]);
    command_at(&machine, &two, &["volume", "snapshot", POOL, "v0@two", "--take-over"]).ok();
    for (store, its_own, other) in [(&one, "v0@one", "v0@two"), (&two, "v0@two", "v0@one")] {
        let listed = command_at(&machine, store, &["volume", "list", "-t", "all", POOL]).ok();
        assert!(listed.out.contains(its_own) && !listed.out.contains(other), "{listed}");
    }
    nbdsh(&yard.uri("v0"), "import nbd\nh.pwrite(b'x' * 4096, 0, nbd.CMD_FLAG_FUA)");
    yard.signal("TERM");
    yard.end();
}

#[test]
fn a_pool_on_minio_outlives_its_machine() {
    a_pool_outlives_its_machine(S3Program::Minio);
}

#[test]
fn a_pool_on_versitygw_outlives_its_machine() {
    a_pool_outlives_its_machine(S3Program::Versitygw);
}
