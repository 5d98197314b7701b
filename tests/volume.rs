//! Durable volumes through the whole program: what clients were told is durable outlives the
//! server.

use crate::place::Place;
use crate::run::{nbdsh, ok, run};
use crate::yard::{Yard, blockyard};

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
        "strace -f -qq -e trace=fdatasync -o {trace} -p {pid} & tracer=$!\n\
         until grep -q \"^TracerPid:[[:space:]]*$tracer\" /proc/{pid}/task/*/status; do \
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
    let syncs = seen.lines().filter(|line| line.contains("fdatasync(")).count();
    // One after the other, each FUA and each flush needs one of its own.
    assert!(syncs >= 100, "{syncs} syncs for 100 requests that ask for one: {seen}");
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
         run = subprocess.run(['{}', 'volume', 'rollback', '{path}', 'v0@one'], capture_output=True)\n\
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
