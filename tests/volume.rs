//! Durable volumes through the whole program: what clients were told is durable outlives the
//! server.

use crate::attach::Loop;
use crate::place::Place;
use crate::run::{nbdsh, ok, run};
use crate::yard::{BLOCKYARD, Yard, blockyard};

fn uri(pool: &Place, name: &str, more: &str) -> String {
    format!("volume:///{name}?path={}{more}", pool.file("pool"))
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    assert!(!yard.end().success());
}

#[test]
fn a_volume_outlives_a_kill() {
    let pool = Place::new();
    let first = uri(&pool, "v0", "&size=256M");
    let yard = Yard::serve(&[&first, &uri(&pool, "v1", "&size=64M&volblocksize=4k&compress=none")]);
    let said = yard.printed();
    assert!(said.contains("v0: volume 256M, in "), "{said}");
    assert_eq!(ok(&["nbdinfo", "--size", &yard.uri("v0")]).trim(), "268435456");
    nbdsh(
        &yard.uri("v0"),
        "import nbd, random\n\
         h.pwrite(random.Random(1).randbytes(1 << 20), 4096)\n\
         h.pwrite(b'text' * 16384, 5 << 20)\n\
         h.trim(4096, 5 << 20)\n\
         h.flush()\n\
         h.pwrite(b'x' * 4096, 200 << 20, nbd.CMD_FLAG_FUA)",
    );
    nbdsh(&yard.uri("v1"), "import nbd\nh.pwrite(b'1' * 8192, 4096, nbd.CMD_FLAG_FUA)");
    let again = blockyard(&["serve", &first, "--nbd", &format!("unix:{}", pool.file("nbd"))]);
    let refused = again.fails();
    assert!(refused.err.contains("is in use by process"), "{refused}");
    kill(yard);
    // The size is in the pool.
    let yard = Yard::serve(&[&uri(&pool, "v0", ""), &uri(&pool, "v1", "")]);
    nbdsh(
        &yard.uri("v0"),
        "import random\n\
         assert h.pread(1 << 20, 4096) == random.Random(1).randbytes(1 << 20)\n\
         assert h.pread(65536, 5 << 20) == bytes(4096) + b'text' * 15360\n\
         assert h.pread(4096, 200 << 20) == b'x' * 4096",
    );
    nbdsh(&yard.uri("v1"), "assert h.pread(12288, 0) == bytes(4096) + b'1' * 8192");
    let map = ok(&["nbdinfo", "--map", &yard.uri("v0")]);
    assert!(map.contains("hole,zero"), "{map}");
}

#[test]
fn an_image_goes_in_and_comes_out() {
    let pool = Place::new();
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=64M")]);
    let image = pool.file("image");
    ok(&["mke2fs", "-q", "-t", "ext4", &image, "64M"]);
    ok(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &image, &yard.uri("v0")]);
    ok(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &image, &yard.uri("v0")]);
    kill(yard);
    // qemu-img flushes at its end.
    let yard = Yard::serve(&[&uri(&pool, "v0", "")]);
    ok(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &image, &yard.uri("v0")]);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let pool = Place::new();
    let socket = format!("unix:{}", pool.file("nbd"));
    let refused = |uri: &str| blockyard(&["serve", uri, "--nbd", &socket]).fails();
    let run = refused(&uri(&pool, "v0", ""));
    assert!(run.err.contains("size: `0` will not do"), "{run}");
    drop(Yard::serve(&[&uri(&pool, "v0", "&size=1G")]));
    let run = refused(&uri(&pool, "v0", "&size=2G"));
    assert!(run.err.contains("size: `2G` will not do: wanted 1073741824"), "{run}");
    // A directory that is somebody else's stays as it is.
    let path = pool.file("theirs");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(format!("{path}/lock"), "hi\n").unwrap();
    let create = ["volume", "create", &path, "v0", "--size", "1G", "--force"];
    for run in [
        refused(&format!("volume:///v0?path={path}&size=1G")),
        refused(&format!("volume:///v0?path={}&path2={path}&size=1G", pool.file("other"))),
        blockyard(&create).fails(),
    ] {
        assert!(run.err.contains(&path) && run.err.contains("it holds `lock`"), "{run}");
        assert_eq!(std::fs::read(format!("{path}/lock")).unwrap(), b"hi\n");
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
    }
    let run = refused("volume:///v0?path=/proc/pool&size=1G");
    assert!(run.err.contains("cannot make `/proc/pool`"), "{run}");
}

/// Flush and FUA reach the files: counted from outside.
#[test]
fn syncs_are_seen_from_outside() {
    let pool = Place::new();
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=64M")]);
    let trace = pool.file("trace");
    let script = format!(
        "strace -f -qq -e trace=fdatasync,pwritev2,io_uring_enter -o {trace} -p {pid} & tracer=$!\n\
         traced=\"^TracerPid:[[:space:]]*$tracer\"\n\
         while grep -L \"$traced\" /proc/{pid}/task/*/status | grep -q .; do \
             kill -0 $tracer || exit 1; done\n\
         nbdsh --uri '{uri}' -c 'import nbd' \
             -c 'for i in range(50): h.pwrite(b\"x\" * 4096, i << 16, nbd.CMD_FLAG_FUA)' \
             -c 'for i in range(50): h.pwrite(b\"y\" * 4096, i << 16); h.flush()'\n\
         kill $tracer; wait $tracer",
        pid = yard.pid(),
        uri = yard.uri("v0"),
    );
    run(&["bash", "-c", &script]);
    let seen = std::fs::read_to_string(&trace).unwrap_or_default();
    // A sync, a write that is durable by itself, or a write and its sync handed over by one call.
    let is_sync = |line: &&str| {
        let handed =
            line.split_once("io_uring_enter(").and_then(|(_, rest)| rest.split(", ").nth(1));
        line.contains("fdatasync(")
            || line.contains("pwritev2(") && line.contains("RWF_DSYNC")
            || handed.and_then(|count| count.parse().ok()).is_some_and(|count: u32| count >= 2)
    };
    let syncs = seen.lines().filter(is_sync).count();
    // One after the other, each FUA and each flush needs one of its own.
    assert!(syncs >= 100, "{syncs} syncs for 100 requests that ask for one: {seen}");
}

/// As in many containers: io_uring is refused. Calls that block do the same work, and the log says
/// so; who asks for io_uring by name is told.
#[test]
fn where_io_uring_is_refused_calls_that_block_do() {
    let pool = Place::new();
    let trace = pool.file("trace");
    // The tracer is a grandchild (`-D`): the process is the server's own.
    let refusing = "strace -D -f -qq -e trace=io_uring_setup -e inject=io_uring_setup:error=EPERM";
    let tracer: Vec<&str> = refusing.split(' ').chain(["-o", &trace]).collect();
    let device = uri(&pool, "v0", "&size=64M");
    let yard = Yard::serve_below(Place::new(), &tracer, &[&device]);
    nbdsh(
        &yard.uri("v0"),
        "import nbd, random\n\
         h.pwrite(random.Random(1).randbytes(1 << 20), 4096)\n\
         h.flush()\n\
         h.pwrite(b'x' * 4096, 32 << 20, nbd.CMD_FLAG_FUA)\n\
         assert h.pread(1 << 20, 4096) == random.Random(1).randbytes(1 << 20)\n\
         assert h.pread(4096, 32 << 20) == b'x' * 4096",
    );
    let said = yard.complained();
    assert!(said.contains("io_uring is refused here"), "{said}");
    let traced = std::fs::read_to_string(&trace).unwrap_or_default();
    assert!(traced.contains("(INJECTED)"), "nothing was refused: {traced}");
    kill(yard);
    let asked = format!("{device}&store=uring");
    let socket = format!("unix:{}", pool.file("nbd"));
    let line = [&tracer[..], &[BLOCKYARD, "serve", &asked, "--nbd", &socket]].concat();
    run(&line).fails().says(&["cannot use io_uring for", "`store=threads` does not"]);
    // Who has io_uring finds what the others have written.
    let yard = Yard::serve(&[&device]);
    nbdsh(
        &yard.uri("v0"),
        "import random\n\
         assert h.pread(1 << 20, 4096) == random.Random(1).randbytes(1 << 20)\n\
         assert h.pread(4096, 32 << 20) == b'x' * 4096",
    );
}

/// To look at a pool nothing has to be written to it.
#[test]
fn a_pool_on_a_read_only_file_system_can_be_looked_at() {
    let pool = Place::new();
    let (path, at) = (pool.file("pool"), pool.file("at"));
    blockyard(&["volume", "create", &path, "v0", "--size", "64M"]).ok();
    std::fs::create_dir(&at).unwrap();
    ok(&["mount", "-o", "bind,ro", &path, &at]);
    let said = ["list", "check"].map(|verb| blockyard(&["volume", verb, &at]));
    let refused = blockyard(&["volume", "snapshot", &at, "v0@one"]);
    ok(&["umount", &at]);
    let [list, check] = said.map(|said| said.ok().out);
    assert!(list.contains("v0") && check.contains("0 damaged"), "{list}{check}");
    let refused = refused.fails();
    assert!(refused.err.contains("Read-only file system"), "{refused}");
}

/// A block device as a pool: two processes never have it, nothing on it is overwritten unasked, and
/// a command finds the yard that has it.
#[test]
fn a_disk_is_a_pool() {
    let place = Place::new();
    let image = place.file("image");
    std::fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
    let device = Loop::attach(&image);
    let disk = device.0.as_str();
    let volume =
        |verb: &str, rest: &[&str]| blockyard(&[&["volume", verb, disk][..], rest].concat());
    ok(&["mke2fs", "-q", "-t", "ext4", disk]);
    let create = ["v0", "--size", "128M"];
    let refused = volume("create", &create).fails();
    assert!(refused.err.contains("an ext2, ext3 or ext4 file system"), "{refused}");
    ok(&["e2fsck", "-fn", disk]);
    volume("create", &[&create[..], &["--force"]].concat()).ok();
    let v0 = format!("volume:///v0?path={disk}");
    let yard = Yard::serve(&[&v0]);
    nbdsh(&yard.uri("v0"), "h.pwrite(b'disk' * 1024, 1 << 20)\nh.flush()");
    let again = blockyard(&["serve", &v0, "--nbd", &format!("unix:{}", place.file("nbd"))]);
    let refused = again.fails();
    assert!(refused.err.contains("is in use by process"), "{refused}");
    // The yard is asked, which says so on the disk itself.
    volume("snapshot", &["v0@one"]).ok();
    assert!(volume("list", &[]).ok().out.contains("v0@one"));
    let mkfs = run(&["mke2fs", "-q", "-F", "-t", "ext4", disk]);
    assert!(mkfs.code != Some(0), "others are told that the disk is in use");
    kill(yard);
    let checked = volume("check", &[]).ok();
    assert!(checked.out.contains("0 damaged"), "{checked}");
    let yard = Yard::serve(&[&v0]);
    nbdsh(&yard.uri("v0"), "assert h.pread(4096, 1 << 20) == b'disk' * 1024");
    kill(yard);
    device.detach();
}

#[test]
fn snapshots_and_clones_by_the_command_line() {
    let pool = Place::new();
    let path = pool.file("pool");
    let volume = |args: &[&str]| {
        let (verb, rest) = args.split_first().unwrap();
        let mut line = vec!["volume", verb, &path];
        line.extend(rest);
        blockyard(&line)
    };
    let refused = volume(&["list"]).fails();
    assert!(refused.err.contains("holds no pool of volumes"), "{refused}");
    volume(&["create", "v0", "--size", "64M"]).ok();
    let write = |byte: &str| {
        let yard = Yard::serve(&[&uri(&pool, "v0", "")]);
        let script = format!("h.pwrite(b'{byte}' * (1 << 20), 1 << 20)\nh.flush()");
        nbdsh(&yard.uri("v0"), &script);
        let busy = volume(&["check"]).fails();
        assert!(busy.err.contains("is in use by process"), "{busy}");
        kill(yard);
    };
    write("a");
    volume(&["snapshot", "v0@one"]).ok();
    write("b");
    volume(&["clone", "v0@one", "twin"]).ok();
    let listed = volume(&["list"]).ok().out;
    let names: Vec<_> = listed.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(names, ["NAME", "v0", "v0@one", "twin"], "{listed}");
    let yard = Yard::serve(&[&uri(&pool, "v0", ""), &uri(&pool, "twin", "")]);
    nbdsh(&yard.uri("v0"), "assert h.pread(1 << 20, 1 << 20) == b'b' * (1 << 20)");
    nbdsh(&yard.uri("twin"), "assert h.pread(1 << 20, 1 << 20) == b'a' * (1 << 20)");
    kill(yard);
    volume(&["rollback", "v0@one"]).ok();
    volume(&["resize", "v0", "--size", "128M"]).ok();
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=128M")]);
    nbdsh(&yard.uri("v0"), "assert h.pread(1 << 20, 1 << 20) == b'a' * (1 << 20)");
    kill(yard);
    let refused = volume(&["destroy", "v0"]).fails();
    assert!(refused.err.contains("destroy that first"), "{refused}");
    let report = volume(&["check", "--json"]).ok().json();
    assert_eq!((&report["volumes"], &report["damaged"]), (&3.into(), &0.into()), "{report}");
    assert!(report["blocks"].as_u64() >= Some(64), "{report}");
}

#[test]
fn a_pool_that_a_yard_has_open_is_worked_on_through_it() {
    let pool = Place::new();
    let path = pool.file("pool");
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=64M")]);
    // The lock of the pool says whom to ask.
    let volume = |verb: &str, rest: &[&str]| {
        let mut line = vec!["volume", verb, &path];
        line.extend(rest);
        blockyard(&line)
    };
    let write = |byte: &str| {
        nbdsh(&yard.uri("v0"), &format!("h.pwrite(b'{byte}' * (1 << 20), 1 << 20)\nh.flush()"));
    };
    let holds = |name: &str, byte: &str| {
        let script = format!("assert h.pread(1 << 20, 1 << 20) == b'{byte}' * (1 << 20)");
        nbdsh(&yard.uri(name), &script);
    };
    write("a");
    volume("snapshot", &["v0@one"]).ok();
    write("b");
    volume("clone", &["v0@one", "twin"]).ok();
    volume("create", &["other", "--size", "32M"]).ok();
    let talk = ["--control", &yard.control()];
    let add = uri(&pool, "twin", "");
    blockyard(&[&["add", &add][..], &talk].concat()).ok();
    holds("twin", "a");
    let listed = volume("list", &["--json"]).ok().json();
    let row = |at: usize| {
        let row = &listed[at];
        (row["name"].clone(), row["snapshot"].clone(), row["in_use"].clone())
    };
    assert_eq!(row(0), ("v0".into(), false.into(), true.into()), "{listed}");
    assert_eq!(row(1), ("v0@one".into(), true.into(), false.into()), "{listed}");
    let shown = volume("show", &["v0@one", "--json"]).ok().json();
    assert_eq!(shown["referenced_bytes"], 1 << 20, "{shown}");
    // What changes under a client's feet has to wait for the client.
    let held = format!(
        "import subprocess\n\
         line = ['{}', 'volume', 'rollback', '{path}', 'v0@one']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 6 and b'`v0` has 1 client' in run.stderr, run",
        crate::yard::BLOCKYARD
    );
    nbdsh(&yard.uri("v0"), &held);
    volume("rollback", &["v0@one"]).ok();
    holds("v0", "a");
    volume("resize", &["v0", "--size", "128M"]).ok();
    assert_eq!(ok(&["nbdinfo", "--size", &yard.uri("v0")]).trim(), "134217728");
    holds("v0", "a");
    let refused = volume("destroy", &["twin"]).fails();
    assert!(refused.err.contains("`twin` is a device"), "{refused}");
    blockyard(&[&["remove", "twin"][..], &talk].concat()).ok();
    volume("destroy", &["twin"]).ok();
    volume("destroy", &["v0@one"]).ok();
    let refused = volume("show", &["v0@one"]).fails();
    assert!(refused.err.contains("`v0@one` is no volume of this pool"), "{refused}");
    kill(yard);
    let listed = volume("list", &[]).ok().out;
    let names: Vec<_> = listed.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(names, ["NAME", "v0", "other"], "{listed}");
}

#[test]
fn a_snapshot_goes_to_another_pool_and_into_images() {
    let pool = Place::new();
    let (path, there) = (pool.file("pool"), pool.file("there"));
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=256M")]);
    let image = pool.file("image");
    ok(&["mke2fs", "-q", "-t", "ext4", &image, "256M"]);
    ok(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &image, &yard.uri("v0")]);
    let same = |format: &str, file: &str, other: &str| {
        ok(&["qemu-img", "compare", "-f", format, "-F", "raw", file, other]);
    };
    let volume = |line: &[&str]| blockyard(&[&["volume"][..], line].concat());
    volume(&["snapshot", &path, "v0@a"]).ok();
    nbdsh(&yard.uri("v0"), "h.pwrite(b'new' * 32768, 200 << 20)\nh.flush()");
    // By a yard into a file, and from that into a pool that is made for it.
    let (whole, more) = (pool.file("whole"), pool.file("more"));
    let sent = volume(&["send", &path, "v0@a", "-o", &whole, "--json"]).ok().json();
    let bytes = std::fs::metadata(&whole).unwrap().len();
    assert_eq!(sent["stream_bytes"], bytes, "{sent}");
    let received = volume(&["receive", &there, "copy", "-i", &whole, "--json"]).ok().json();
    assert_eq!(received["name"], "copy@a", "{received}");
    let (raw, qcow2) = (pool.file("raw"), pool.file("a.qcow2"));
    volume(&["export", &there, "copy@a", &raw]).ok();
    same("raw", &raw, &image);
    volume(&["export", &path, "v0@a", &qcow2]).ok();
    ok(&["qemu-img", "check", "-f", "qcow2", &qcow2]);
    same("qcow2", &qcow2, &image);
    // A volume in use, as it is at one moment; nothing stays of that moment.
    volume(&["export", &path, "v0", &raw]).ok();
    same("raw", &raw, &yard.uri("v0"));
    assert!(!volume(&["list", &path]).ok().out.contains("export"));
    // What has changed, through a pipe into a pool that another yard has open.
    volume(&["snapshot", &path, "v0@b"]).ok();
    let other = Yard::serve(&[&format!("volume:///other?path={there}&size=16M")]);
    let said = pool.file("said");
    let script = format!(
        "set -e -o pipefail; '{bin}' volume send '{path}' v0@b --from v0@a --json 2>'{said}' | \
         tee '{more}' | '{bin}' volume receive '{there}' copy",
        bin = crate::yard::BLOCKYARD
    );
    ok(&["bash", "-c", &script]);
    let size = std::fs::metadata(&more).unwrap().len();
    assert!(size < 200_000, "{size} bytes for 96 KiB");
    let said = std::fs::read_to_string(&said).unwrap();
    assert!(said.contains(&format!("\"stream_bytes\": {size}")), "{said}");
    let add = format!("volume:///copy?path={there}");
    blockyard(&["add", &add, "--control", &other.control()]).ok();
    same("raw", &raw, &other.uri("copy"));
    // What was cut or damaged on the way is refused, and nothing has changed.
    let bytes = std::fs::read(&whole).unwrap();
    std::fs::write(&more, &bytes[..bytes.len() / 2]).unwrap();
    let refused = volume(&["receive", &there, "cut", "-i", &more]).fails();
    assert!(refused.err.contains("`stream` ends after"), "{refused}");
    std::fs::write(&more, "something else".repeat(100)).unwrap();
    let refused = volume(&["receive", &there, "cut", "-i", &more]).fails();
    assert!(refused.err.contains("`stream` does not begin with the mark of one"), "{refused}");
    let refused = volume(&["receive", &there, "copy", "-i", &whole]).fails();
    assert!(refused.err.contains("`copy@a` exists already"), "{refused}");
    let listed = volume(&["list", &there]).ok().out;
    assert!(!listed.contains("cut"), "{listed}");
    let refused = volume(&["send", &path, "v0@b", "--from", "v0@x", "-o", &more]).fails();
    assert!(refused.err.contains("`v0@x` is no volume of this pool"), "{refused}");
    assert!(!std::path::Path::new(&more).exists() || std::fs::read(&more).unwrap().len() == 1400);
    // Every block once more, of both, while they are used.
    let report = volume(&["scrub", &path, "--json"]).ok().json();
    assert_eq!(report["damaged"], 0, "{report}");
    let text = volume(&["scrub", &there, "--rate", "1G"]).ok().out;
    assert!(text.contains("4 volumes and snapshots") && text.contains(" 0 damaged"), "{text}");
    drop(yard);
    volume(&["scrub", &path]).ok();
}

/// A file system of its own, which goes with it.
struct Mounted(String);

impl Mounted {
    fn new(place: &Place, size: &str) -> Mounted {
        let dir = place.file("small");
        std::fs::create_dir(&dir).unwrap();
        ok(&["mount", "-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", &dir]);
        Mounted(dir)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").args(["-l", &self.0]).status();
    }
}

/// What a killed export had as its moment stayed in the pool for good, and held all that was
/// overwritten since.
#[test]
fn an_export_that_is_killed_leaves_nothing_in_the_pool() {
    use std::io::Read;
    use std::process::{Command, Stdio};
    let pool = Place::new();
    let path = pool.file("pool");
    let fill = "import random\nh.pwrite(random.Random(1).randbytes(8 << 20), 0)\nh.flush()";
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=64M")]);
    nbdsh(&yard.uri("v0"), fill);
    let volume =
        |verb: &str, rest: &[&str]| blockyard(&[&["volume", verb, &path][..], rest].concat()).ok();
    // The reader of its pipe stalls, so it is in the middle of it.
    let killed = |during: &dyn Fn()| {
        let mut child = Command::new(crate::yard::BLOCKYARD)
            .args(["volume", "export", &path, "v0", "-"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0; 4096]).unwrap();
        during();
        child.kill().unwrap();
        child.wait().unwrap();
    };
    let one = || {
        let listed = volume("list", &["--json"]).json();
        assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    };
    killed(&one);
    one();
    let said = (0..2000).any(|_| {
        std::thread::park_timeout(std::time::Duration::from_millis(10));
        yard.complained().contains("sending ends")
    });
    assert!(said, "{}", yard.complained());
    kill(yard);
    let volumes = || volume("check", &["--json"]).json()["volumes"].as_u64();
    assert_eq!(volumes(), Some(1));
    // It has the pool itself.
    killed(&|| ());
    one();
    assert_eq!(volumes(), Some(2), "nobody has seen what is left");
    volume("show", &[]);
    assert_eq!(volumes(), Some(1));
    volume("destroy", &["v0"]);
}

/// What could not be read in the middle ended the stream, and half of one replaced a whole one.
#[test]
fn a_stream_that_ends_early_replaces_nothing() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let (pool, file) = (place.file("pool"), place.file("backup"));
    let yard = Yard::serve(&[&format!("volume:///v0?path={pool}&size=64M&compress=none")]);
    nbdsh(
        &yard.uri("v0"),
        "import nbd\n\
         for i in range(16): h.pwrite(bytes([i + 1]) * (1 << 20), i << 20, nbd.CMD_FLAG_FUA)",
    );
    drop(yard);
    blockyard(&["volume", "snapshot", &pool, "v0@whole"]).ok();
    let send = || blockyard(&["volume", "send", &pool, "v0@whole", "--output", &file]);
    std::fs::write(&file, "old").unwrap();
    let mode = |mode| std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o640);
    send().ok();
    let whole = std::fs::read(&file).unwrap();
    assert!(whole.len() > 16 << 20);
    let now = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(now & 0o777, 0o640, "who might read it may");
    // The last of the blocks of 4 KiB.
    let is_it = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 16);
    let mut damaged = 0;
    for entry in std::fs::read_dir(&pool).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        if let Some(at) = (0..bytes.len() / 4096).rfind(|at| is_it(&bytes[at * 4096..][..4096])) {
            bytes[at * 4096] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            damaged += 1;
        }
    }
    assert_eq!(damaged, 1);
    send().fails();
    assert!(std::fs::read(&file).unwrap() == whole, "it was replaced");
    assert!(!std::path::Path::new(&format!("{file}.blockyard-unfinished")).exists());
    let fifo = place.file("fifo");
    run(&["mkfifo", &fifo]).ok();
    let reader = std::thread::spawn({
        let fifo = fifo.clone();
        move || std::fs::read(fifo).unwrap().len()
    });
    blockyard(&["volume", "snapshot", &pool, "v0@again"]).ok();
    let line = ["volume", "send", &pool, "v0@again", "--from", "v0@whole", "--output", &fifo];
    blockyard(&line).ok();
    assert!(reader.join().unwrap() > 0, "a pipe has no sync");
}

#[test]
fn a_full_file_system_is_told_and_loses_nothing() {
    let place = Place::new();
    let small = Mounted::new(&place, "200M");
    let path = format!("{}/pool", small.0);
    let yard = Yard::serve(&[&format!("volume:///v0?path={path}&size=1G&compress=none")]);
    nbdsh(
        &yard.uri("v0"),
        "import nbd, errno\n\
         full = 0\n\
         for i in range(64):\n    \
             try: h.pwrite(bytes([i + 1]) * (4 << 20), i << 22, nbd.CMD_FLAG_FUA)\n    \
             except nbd.Error as error:\n        \
                 assert error.errnum == errno.ENOSPC, error\n        \
                 full += 1\n    \
             else: assert h.pread(4096, i << 22) == bytes([i + 1]) * 4096\n\
         assert full > 0",
    );
    // A stream or an image that does not fit leaves a file of its name as it was.
    blockyard(&["volume", "snapshot", &path, "v0@full"]).ok();
    for (verb, name) in [("send", "v0@full"), ("export", "v0@full")] {
        let file = format!("{}/file", small.0);
        std::fs::write(&file, "old").unwrap();
        let line = ["volume", verb, &path, name, "--output", &file];
        let line = if verb == "send" { line.to_vec() } else { [&line[..4], &line[5..]].concat() };
        let refused = blockyard(&line).fails();
        assert!(refused.err.contains(&format!("{file}: No space left")), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "old");
        assert!(!std::path::Path::new(&format!("{file}.blockyard-unfinished")).exists());
        std::fs::remove_file(&file).unwrap();
    }
    blockyard(&["volume", "destroy", &path, "v0@full"]).ok();
    let refused =
        blockyard(&["volume", "create", &format!("{path}2"), "v0", "--size", "1G"]).fails();
    assert!(refused.err.contains(&format!("cannot make a pool in `{path}2`")), "{refused}");
    // A stream that does not fit leaves nothing of itself.
    let other = place.file("other");
    let volume = |line: &[&str]| blockyard(&[&["volume"][..], line].concat());
    volume(&["create", &other, "big", "--size", "256M"]).ok();
    let random = Yard::serve(&[&format!("volume:///big?path={other}")]);
    nbdsh(
        &random.uri("big"),
        "import random\n\
         for i in range(64): h.pwrite(random.Random(i).randbytes(4 << 20), i << 22)\n\
         h.flush()",
    );
    volume(&["snapshot", &other, "big@a"]).ok();
    let stream = place.file("stream");
    volume(&["send", &other, "big@a", "-o", &stream]).ok();
    let refused = volume(&["receive", &path, "big", "-i", &stream]).fails();
    assert!(refused.err.contains("the pool has no space left"), "{refused}");
    assert!(!volume(&["list", &path]).ok().out.contains("big"));
    nbdsh(&yard.uri("v0"), "assert h.pread(4096, 0) == b'\\1' * 4096");
    kill(yard);
    volume(&["check", &path]).ok();
}

/// A directory that was moved took no more segments, and was said to be full.
#[test]
fn a_pool_whose_directory_is_moved_goes_on_where_it_is() {
    let pool = Place::new();
    let path = pool.file("pool");
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=1G&compress=none")]);
    nbdsh(&yard.uri("v0"), "h.pwrite(b'a' * 65536, 0)\nh.flush()");
    std::fs::rename(&path, pool.file("elsewhere")).unwrap();
    nbdsh(
        &yard.uri("v0"),
        "import nbd\n\
         assert h.pread(65536, 0) == b'a' * 65536\n\
         h.pwrite(b'b' * 65536, 65536, nbd.CMD_FLAG_FUA)\n\
         for i in range(1, 64): h.pwrite(b'c' * (4 << 20), i << 22, nbd.CMD_FLAG_FUA)\n\
         assert h.pread(65536, 65536) == b'b' * 65536",
    );
    kill(yard);
    std::fs::rename(pool.file("elsewhere"), &path).unwrap();
    let yard = Yard::serve(&[&uri(&pool, "v0", "")]);
    nbdsh(
        &yard.uri("v0"),
        "assert h.pread(131072, 0) == b'a' * 65536 + b'b' * 65536\n\
         for i in range(1, 64): assert h.pread(4 << 20, i << 22) == b'c' * (4 << 20)",
    );
}

/// Takes the mount away, however the test ends.
struct Unmount(String);

impl Drop for Unmount {
    fn drop(&mut self) {
        crate::attach::unmount_lazily(&self.0);
    }
}

/// A device's length never changes under its clients: a volume grows while there are none, and who
/// comes next sees it, by NBD and by the block file.
#[test]
fn a_device_grows_between_its_clients() {
    let pool = Place::new();
    let path = pool.file("pool");
    let dir = Unmount(pool.file("files"));
    std::fs::create_dir(&dir.0).unwrap();
    let yard = Yard::serve_in(Place::new(), &[&uri(&pool, "v0", "&size=64M"), "--fuse", &dir.0]);
    let (nbd, file) = (yard.uri("v0"), format!("{}/v0", dir.0));
    let resize = |size: &str| blockyard(&["volume", "resize", &path, "v0", "--size", size]);
    let io = |commands: &[&str]| {
        let mut line = vec!["qemu-io", "-f", "raw"];
        commands.iter().for_each(|command| line.extend(["-c", command]));
        line.push(&nbd);
        let said = run(&line);
        format!("{}{}", said.out, said.err)
    };
    let said = io(&["write -P 1 63M 1M", "flush", "read 64M 4k"]);
    assert!(said.contains("wrote 1048576/1048576 bytes at offset 66060288"), "{said}");
    assert!(said.contains("Input/output error") || said.contains("outside"), "{said}");
    // Whoever has it open keeps it as it is.
    let held = std::fs::File::open(&file).unwrap();
    let refused = resize("128M").fails();
    assert!(refused.err.contains("disconnect and close first"), "{refused}");
    assert_eq!(held.metadata().unwrap().len(), 64 << 20);
    drop(held);
    let held = format!(
        "import subprocess\n\
         line = ['{}', 'volume', 'resize', '{path}', 'v0', '--size', '128M']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 6 and b'`v0` has 1 client' in run.stderr, run\n\
         assert h.get_size() == 64 << 20",
        crate::yard::BLOCKYARD
    );
    nbdsh(&nbd, &held);
    // The kernel tells of a file that was closed a moment later.
    assert!((0..1000).any(|_| resize("128M").code == Some(0)), "{}", resize("128M"));
    assert_eq!(ok(&["nbdinfo", "--size", &nbd]).trim(), "134217728");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 128 << 20);
    let said = io(&["read -P 1 63M 1M", "read -P 0 64M 64M", "write -P 2 127M 1M", "flush"]);
    assert!(!said.contains("failed") && said.contains("at offset 133169152"), "{said}");
    crate::run::python(
        "import os, sys\n\
         fd = os.open(sys.argv[1], os.O_RDWR)\n\
         assert os.lseek(fd, 0, os.SEEK_END) == 128 << 20\n\
         assert os.pread(fd, 1 << 20, 63 << 20) == b'\\1' * (1 << 20)\n\
         assert os.pread(fd, 2 << 20, 127 << 20) == b'\\2' * (1 << 20)\n\
         assert os.pwrite(fd, b'3' * 4096, 100 << 20) == 4096\n\
         os.fsync(fd)",
        &[&file],
    );
    let said = io(&["read -P 51 100M 4k"]);
    assert!(!said.contains("failed"), "{said}");
    // A file system on the block file grows with it.
    let device = Loop::attach(&file);
    ok(&["mke2fs", "-q", "-t", "ext4", &device.0, "64M"]);
    ok(&["resize2fs", &device.0]);
    ok(&["e2fsck", "-fn", &device.0]);
    let sectors = ok(&["blockdev", "--getsize64", &device.0]);
    assert_eq!(sectors.trim(), "134217728");
    device.detach();
    // Shorter, too: what lies behind is gone.
    assert!((0..1000).any(|_| resize("64M").code == Some(0)), "{}", resize("64M"));
    assert!((0..1000).any(|_| resize("96M").code == Some(0)), "{}", resize("96M"));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 96 << 20);
    let said = io(&["read -P 0 64M 32M"]);
    assert!(!said.contains("failed"), "{said}");
    kill(yard);
}
