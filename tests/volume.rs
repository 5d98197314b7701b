//! Durable volumes through the whole program: durable data survive the server.

use serde_json::json;

use crate::attach::{Loop, Unmount};
use crate::place::Place;
use crate::run::{nbdsh, ok, run};
use crate::yard::{BLOCKYARD, Yard, blockyard};

mod carry;
mod copies;
mod encrypted;
mod import;
mod move_faults;
mod moves;
mod properties;
mod warnings;

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
    // The pool stores the size.
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
    // qemu-img ends with a flush.
    let yard = Yard::serve(&[&uri(&pool, "v0", "")]);
    ok(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &image, &yard.uri("v0")]);
}

#[test]
fn a_parameter_that_does_not_fit_is_refused_by_name() {
    let pool = Place::new();
    let socket = format!("unix:{}", pool.file("nbd"));
    let refused = |uri: &str| blockyard(&["serve", uri, "--nbd", &socket]).fails();
    let run = refused(&uri(&pool, "v0", ""));
    assert!(run.err.contains("size is missing: expected the size of `v0`"), "{run}");
    drop(Yard::serve(&[&uri(&pool, "v0", "&size=1G")]));
    let run = refused(&uri(&pool, "v0", "&size=2G"));
    assert!(run.err.contains("invalid size `2G`: expected 1G, which `v0` has"), "{run}");
    // A directory with other files stays unchanged.
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

/// Flush and FUA reach the files: counted by strace.
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
    // A sync, a synchronous write, or a write and its sync submitted by one call.
    let is_sync = |line: &&str| {
        let handed =
            line.split_once("io_uring_enter(").and_then(|(_, rest)| rest.split(", ").nth(1));
        line.contains("fdatasync(")
            || line.contains("pwritev2(") && line.contains("RWF_DSYNC")
            || handed.and_then(|count| count.parse().ok()).is_some_and(|count: u32| count >= 2)
    };
    let syncs = seen.lines().filter(is_sync).count();
    // Sequential requests: each FUA and each flush needs a sync of its own.
    assert!(syncs >= 100, "{syncs} syncs for 100 requests that ask for one: {seen}");
}

/// io_uring is refused, as in many containers. Blocking calls do the work instead, and the log says
/// so; an explicit request for io_uring fails.
#[test]
fn where_io_uring_is_refused_calls_that_block_do() {
    let pool = Place::new();
    let trace = pool.file("trace");
    // The tracer is a grandchild (`-D`), so the child process is the server itself.
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
    // A server with io_uring reads the data of the others.
    let yard = Yard::serve(&[&device]);
    nbdsh(
        &yard.uri("v0"),
        "import random\n\
         assert h.pread(1 << 20, 4096) == random.Random(1).randbytes(1 << 20)\n\
         assert h.pread(4096, 32 << 20) == b'x' * 4096",
    );
}

/// Looking at a pool writes nothing to it.
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

/// A block device as a pool: two processes never open it at once, no data on it is overwritten
/// without consent, and a command finds the yard that has it open.
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
    // The command asks the yard, whose address is stored on the disk.
    volume("snapshot", &["v0@one"]).ok();
    assert!(volume("list", &[]).ok().out.contains("v0@one"));
    let mkfs = run(&["mke2fs", "-q", "-F", "-t", "ext4", disk]);
    assert!(mkfs.code != Some(0), "other programs cannot open the disk exclusively");
    kill(yard);
    let checked = volume("check", &[]).ok();
    assert!(checked.out.contains("0 damaged"), "{checked}");
    let yard = Yard::serve(&[&v0]);
    nbdsh(&yard.uri("v0"), "assert h.pread(4096, 1 << 20) == b'disk' * 1024");
    kill(yard);
    device.detach();
}

/// One copy may be older than the other, and is not shown as complete.
#[test]
fn a_second_copy_by_the_command_line() {
    let pool = Place::new();
    let (first, second) = (pool.file("pool"), pool.file("second"));
    let volume = |args: &[&str]| blockyard(&[&["volume"], args].concat());
    volume(&["create", &first, "v0", "--size", "64M"]).ok();
    std::fs::create_dir(&second).unwrap();
    let attached = volume(&["attach", &first, &second, "--json"]).ok().json();
    assert!(attached["pool"] == first && attached["copy"] == second, "{attached}");
    for path in [&first, &second] {
        let list = volume(&["list", path]).ok();
        assert!(list.out.contains("v0") && list.err.is_empty(), "{list}");
    }
    // Without the other copy, either may be the newer one.
    let away = pool.file("away");
    std::fs::rename(&second, &away).unwrap();
    let why = "failed: missing, and may be newer than the copy that is present";
    let list = volume(&["list", &first, "--json"]).ok();
    assert!(list.json()[0]["name"] == "v0" && list.err.contains(why), "{list}");
    let check = volume(&["check", &first]).fails();
    assert!(check.out.contains(&format!("{second}: {why}\n")), "{check}");
    volume(&["snapshot", &first, "v0@a"]).fails().says(&[&second, "may have been written to"]);
    // The bug: `show --degraded` recorded that the missing copy is lost.
    let before = contents(&first);
    let show = volume(&["show", &first, "--degraded"]).ok();
    assert!(show.out.contains(&format!("{second}: {why}\n")), "{show}");
    volume(&["show", &first, "v0"]).ok();
    assert!(contents(&first) == before, "`show` has changed the pool");
    // A copy that is used alone records that it is the newer one.
    volume(&["snapshot", &first, "v0@a", "--degraded"]).ok();
    let list = volume(&["list", &first]).ok();
    assert!(list.err.contains(&format!("{second}: failed: missing\n")), "{list}");
    std::fs::rename(&away, &second).unwrap();
    let list = volume(&["list", &second]).ok();
    assert!(list.out.contains("v0@a") && list.err.contains(": stale: "), "{list}");
    volume(&["scrub", &first]).ok();
    // A copy that is lost while the pool is closed is replaced.
    std::fs::remove_dir_all(&second).unwrap();
    std::fs::create_dir(&away).unwrap();
    let refused = volume(&["attach", &first, &away]).fails();
    refused.says(&[&second, "`degraded=yes` (`--degraded`) opens the pool"]);
    volume(&["attach", &first, &away, "--degraded"]).ok();
    let show = volume(&["show", &away]).ok();
    assert!(show.out.contains(&format!("{away}: good")), "{show}");
    let refused = volume(&["attach", &first, &second]).fails();
    refused.says(&[&away, "has two good copies"]);
    // The bug: a closed pool refused a copy that had been detached, which an open one erased.
    blockyard(&["pool", "detach", &first, &away]).ok();
    volume(&["attach", &first, &away]).fails().says(&[&away, "was detached", "--force"]);
    volume(&["attach", &first, &away, "--force"]).ok();
    let show = volume(&["show", &away]).ok();
    assert!(show.out.contains(&format!("{away}: good")), "{show}");
}

/// The bug: a `path2` that is no copy of a healthy pair was answered with the advice to open the
/// pool with `degraded=yes`, after which the healthy second copy would have been stale.
#[test]
fn a_path2_that_is_no_copy_is_refused_with_the_place_of_the_copy() {
    let pool = Place::new();
    let (first, second) = (pool.file("pool"), pool.file("second"));
    let volume = |args: &[&str]| blockyard(&[&["volume"], args].concat());
    volume(&["create", &first, "v0", "--size", "64M"]).ok();
    std::fs::create_dir(&second).unwrap();
    volume(&["attach", &first, &second]).ok();
    let [empty, single, mirror, other] =
        ["empty", "single", "mirror", "other"].map(|it| pool.file(it));
    std::fs::create_dir(&empty).unwrap();
    volume(&["create", &single, "v0", "--size", "64M"]).ok();
    volume(&["create", &mirror, "v0", "--size", "64M"]).ok();
    std::fs::create_dir(&other).unwrap();
    volume(&["attach", &mirror, &other]).ok();
    let before = (contents(&first), contents(&second), contents(&single), contents(&other));
    let socket = format!("unix:{}", pool.file("nbd"));
    for (path2, what) in [
        (&empty, "holds no copy of a pool"),
        (&single, "holds a pool that is no copy of this one"),
        (&other, "are copies of different pools"),
    ] {
        let device = uri(&pool, "v0", &format!("&path2={path2}"));
        let refused = blockyard(&["serve", &device, "--nbd", &socket]).fails();
        let last = format!("was last at `{second}`");
        assert_eq!(refused.code, Some(6), "{refused}");
        let refused = refused.says(&[path2, what, &last]);
        assert!(!refused.err.contains("degraded"), "{refused}");
    }
    let after = (contents(&first), contents(&second), contents(&single), contents(&other));
    assert!(before == after, "a refused opening has changed a pool");
}

/// A configuration may name a copy whose disk was replaced and is gone.
#[test]
fn a_path2_that_does_not_exist_opens_the_present_copies_with_a_warning() {
    let pool = Place::new();
    let (first, second, none) = (pool.file("pool"), pool.file("second"), pool.file("none"));
    blockyard(&["volume", "create", &first, "v0", "--size", "64M"]).ok();
    std::fs::create_dir(&second).unwrap();
    blockyard(&["volume", "attach", &first, &second]).ok();
    let device = uri(&pool, "v0", &format!("&path2={none}"));
    let socket = format!("unix:{}", pool.file("nbd"));
    let served = blockyard(&["serve", &device, "--nbd", &socket, "--run", "true"]).ok();
    let opened =
        format!("path2 `{none}` is not, or no longer, a copy of this pool; opening `{second}`");
    served.says(&[&opened]);
    assert!(!std::path::Path::new(&none).exists(), "nothing was made at the path");
    let show = blockyard(&["volume", "show", &first]).ok();
    for copy in [&first, &second] {
        assert!(show.out.contains(&format!("{copy}: good")), "{show}");
    }
}

/// The files of a directory, by name.
fn contents(path: &str) -> Vec<(std::ffi::OsString, Vec<u8>)> {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> =
        entries.map(|it| (it.file_name(), std::fs::read(it.path()).unwrap())).collect();
    files.sort();
    files
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
    let wanted = "          OFFSET            LENGTH  CHANGE\n              \
                  1M                1M  written\n1 range: 1M written, 0 discarded\n";
    assert_eq!(volume(&["diff", "v0@one"]).ok().out, wanted);
    assert_eq!(volume(&["diff", "v0@one", "twin", "-H"]).ok().out, "");
    let listed = volume(&["list"]).ok().out;
    let names: Vec<_> = listed.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(names, ["NAME", "twin", "v0", "v0@one"], "{listed}");
    let created = volume(&["list", "-Hp", "-o", "created,refer"]).ok().out;
    for line in created.lines() {
        let (created, refer) = line.split_once('\t').unwrap();
        assert!(created.parse::<u64>().unwrap() > 1_700_000_000 && refer == "262144", "{line}");
    }
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

/// Compares the volumes of the pool of the test below.
fn compares_what_a_yard_has(volume: &dyn Fn(&str, &[&str]) -> crate::run::Run) {
    let diff = |args: &[&str]| volume("diff", args);
    assert_eq!(diff(&["v0@one", "-Hp"]).ok().out, "1048576\t1048576\twritten\n");
    let same = diff(&["v0@one", "twin"]).ok().out;
    assert_eq!(same, "0 ranges: 0 written, 0 discarded\n");
    let range = json!({ "offset_bytes": 1 << 20, "length_bytes": 1 << 20, "change": "written" });
    let totals = json!({
        "ranges": 1,
        "written_bytes": 1 << 20,
        "discarded_bytes": 0,
        "from_size_bytes": 64 << 20,
        "to_size_bytes": 64 << 20,
    });
    let wanted = json!({ "ranges": [range], "from": "v0@one", "to": "v0", "totals": totals });
    assert_eq!(diff(&["v0@one", "--json"]).ok().json(), wanted);
    let wanted = json!({ "ranges": [], "from": "v0@one", "to": "v0@one", "totals": {
        "ranges": 0,
        "written_bytes": 0,
        "discarded_bytes": 0,
        "from_size_bytes": 64 << 20,
        "to_size_bytes": 64 << 20,
    }});
    assert_eq!(diff(&["v0@one", "@one", "--json"]).ok().json(), wanted);
    let refused = diff(&["v0@one", "other"]).fails();
    assert!(refused.err.contains("invalid from `v0@one`: expected a snapshot of"), "{refused}");
    let refused = diff(&["v0@two"]).fails();
    assert!(refused.err.contains("there is no snapshot `v0@two`"), "{refused}");
}

/// The list of the pool of the test below: a volume, its snapshot, a clone of that, and a volume
/// without data.
fn lists_what_a_yard_has(path: &str, talk: &[&str]) {
    let volume =
        |verb: &str, rest: &[&str]| blockyard(&[&["volume", verb, path][..], rest].concat());
    let listed = volume("list", &["--json"]).ok().json();
    let row = |name: &str| {
        let row = listed.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
        json!([row["snapshot"], row["in_use"], row["stored_bytes"], row["used_bytes"]])
    };
    // 64 equal blocks, each stored as one unit of 4 KiB.
    let one = 256 << 10;
    assert_eq!(row("v0"), json!([false, true, one, one]), "{listed}");
    assert_eq!(row("v0@one"), json!([true, false, one, 0]), "{listed}");
    assert_eq!(row("other"), json!([false, false, 0, 0]), "{listed}");
    // The clone shares its blocks with the snapshot. With no pool named, the yard is asked.
    let columns = ["-Hp", "-o", "name,refer,used,origin", "-t", "volume", "-S", "refer"];
    let listed = blockyard(&[&["volume", "list"][..], &columns, talk].concat()).ok().out;
    let lines = [
        format!("twin\t{one}\t0\tv0@one\n"),
        format!("v0\t{one}\t{one}\t-\n"),
        "other\t0\t0\t-\n".to_owned(),
    ];
    assert_eq!(listed, lines.concat());
    let tree = volume("list", &["-r", "-o", "name,type"]).ok().out;
    let wanted = "NAME TYPE other volume v0 volume v0@one snapshot twin volume";
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(&tree), words(wanted), "{tree}");
    assert!(tree.contains("\n    twin "), "{tree}");
    let refused = volume("list", &["-o", "name,nothing"]).fails();
    assert!(refused.err.contains("invalid -o `nothing`: expected one of name, pool,"), "{refused}");
}

#[test]
fn a_pool_that_a_yard_has_open_is_worked_on_through_it() {
    let pool = Place::new();
    let path = pool.file("pool");
    let yard = Yard::serve(&[&uri(&pool, "v0", "&size=64M")]);
    // The pool's lock file names the yard to ask.
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
    compares_what_a_yard_has(&volume);
    let talk = ["--control", &yard.control()];
    let add = uri(&pool, "twin", "");
    blockyard(&[&["add", &add][..], &talk].concat()).ok();
    holds("twin", "a");
    lists_what_a_yard_has(&path, &talk);
    let shown = volume("show", &["v0@one", "--json"]).ok().json();
    assert_eq!(shown["referenced_bytes"], 1 << 20, "{shown}");
    // A change that affects a client must wait for that client.
    let held = format!(
        "import subprocess\n\
         line = ['{}', 'volume', 'rollback', '{path}', 'v0@one']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 6 and b'cannot change `v0`: it has 1 client' in run.stderr, \
         run",
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
    assert!(refused.err.contains("there is no snapshot `v0@one` in this pool"), "{refused}");
    kill(yard);
    let listed = volume("list", &[]).ok().out;
    let names: Vec<_> = listed.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(names, ["NAME", "other", "v0"], "{listed}");
}

/// The bug: a moved directory got no more segments, and was reported as full.
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

/// A device's length never changes under its clients: a volume grows while it has none. The next
/// client sees the new length, by NBD and by the block file.
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
    // A process with the file open prevents the change.
    let held = std::fs::File::open(&file).unwrap();
    let refused = resize("128M").fails();
    assert!(refused.err.contains("disconnect and close first"), "{refused}");
    assert_eq!(held.metadata().unwrap().len(), 64 << 20);
    drop(held);
    let held = format!(
        "import subprocess\n\
         line = ['{}', 'volume', 'resize', '{path}', 'v0', '--size', '128M']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 6 and b'cannot change `v0`: it has 1 client' in run.stderr, \
         run\n\
         assert h.get_size() == 64 << 20",
        crate::yard::BLOCKYARD
    );
    nbdsh(&nbd, &held);
    // The kernel reports a closed file a moment later.
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
    // A file system on the block file can grow with it.
    let device = Loop::attach(&file);
    ok(&["mke2fs", "-q", "-t", "ext4", &device.0, "64M"]);
    ok(&["resize2fs", &device.0]);
    ok(&["e2fsck", "-fn", &device.0]);
    let sectors = ok(&["blockdev", "--getsize64", &device.0]);
    assert_eq!(sectors.trim(), "134217728");
    device.detach();
    // Shrinking discards the data beyond the new end, and so needs --force.
    resize("64M").fails().says(&["cannot shrink `v0` from 128M to 64M"]);
    let shrink = || blockyard(&["volume", "resize", &path, "v0", "--size", "64M", "--force"]);
    assert!((0..1000).any(|_| shrink().code == Some(0)), "{}", shrink());
    assert!((0..1000).any(|_| resize("96M").code == Some(0)), "{}", resize("96M"));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 96 << 20);
    let said = io(&["read -P 0 64M 32M"]);
    assert!(!said.contains("failed"), "{said}");
    kill(yard);
}
