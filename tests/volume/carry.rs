//! Transfers between pools: streams and images, complete or interrupted.

use super::{kill, uri};
use crate::attach::{Loop, Unmount};
use crate::place::Place;
use crate::run::{nbdsh, ok, run};
use crate::yard::{BLOCKYARD, Yard, blockyard};

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
    // A yard sends to a file, from which a new pool is made.
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
    // A volume in use is exported as of one moment; no snapshot remains.
    volume(&["export", &path, "v0", &raw, "--force"]).ok();
    same("raw", &raw, &yard.uri("v0"));
    assert!(!volume(&["list", &path]).ok().out.contains("export"));
    // The changes go through a pipe into a pool that another yard has open.
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
    // A truncated or damaged stream is refused and changes nothing.
    let bytes = std::fs::read(&whole).unwrap();
    std::fs::write(&more, &bytes[..bytes.len() / 2]).unwrap();
    let refused = volume(&["receive", &there, "cut", "-i", &more]).fails();
    refused.says(&[&more, &format!("the stream ends at byte {}", bytes.len() / 2)]);
    std::fs::write(&more, "something else".repeat(100)).unwrap();
    let refused = volume(&["receive", &there, "cut", "-i", &more]).fails();
    refused.says(&[&more, "it is not a stream of `blockyard volume send`"]);
    let refused = volume(&["receive", &there, "copy", "-i", &whole]).fails();
    assert!(refused.err.contains("`copy@a` is here already"), "{refused}");
    let listed = volume(&["list", &there]).ok().out;
    assert!(!listed.contains("cut"), "{listed}");
    let refused = volume(&["send", &path, "v0@b", "--from", "v0@x", "-o", &more]).fails();
    assert!(refused.err.contains("there is no snapshot `v0@x` in this pool"), "{refused}");
    assert!(!std::path::Path::new(&more).exists() || std::fs::read(&more).unwrap().len() == 1400);
    // Scrubs all blocks of both pools while they are in use.
    let report = volume(&["scrub", &path, "--json"]).ok().json();
    assert_eq!(report["damaged"], 0, "{report}");
    let text = volume(&["scrub", &there, "--rate", "1G"]).ok().out;
    assert!(text.contains("4 volumes and snapshots") && text.contains(" 0 damaged"), "{text}");
    drop(yard);
    volume(&["scrub", &path]).ok();
}

/// The bug: the temporary snapshot of a killed export stayed in the pool permanently, and kept all
/// data that were overwritten since.
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
    // The reader of its pipe stalls, so the export is killed in the middle.
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
        yard.complained().contains("the client disconnected before the end of the stream")
    });
    assert!(said, "{}", yard.complained());
    kill(yard);
    let volumes = || volume("check", &["--json"]).json()["volumes"].as_u64();
    assert_eq!(volumes(), Some(1));
    // Here the export itself has the pool open.
    killed(&|| ());
    one();
    assert_eq!(volumes(), Some(2), "the temporary snapshot of the export is left");
    // `list` and `check` change nothing; the next opening removes it.
    volume("scrub", &[]);
    assert_eq!(volumes(), Some(1));
    volume("destroy", &["v0"]);
}

/// The bug: a read error in the middle ended the stream, and half a stream replaced a complete one.
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
    // The bug: `send -o /etc/passwd` replaced that file.
    send().fails().says(&["the file exists; --force replaces it"]);
    blockyard(&["volume", "export", &pool, "v0@whole", &file]).fails().says(&["--force"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "old");
    blockyard(&["volume", "send", &pool, "v0@whole", "--output", &file, "--force"]).ok();
    let whole = std::fs::read(&file).unwrap();
    assert!(whole.len() > 16 << 20);
    let now = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(now & 0o777, 0o640, "who might read it may");
    // Finds the last of the blocks of 4 KiB.
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
fn a_full_file_system_is_reported_and_nothing_is_lost() {
    let place = Place::new();
    let small = small(&place, "200M");
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
    // A stream or an image that does not fit leaves an existing file of its name unchanged.
    blockyard(&["volume", "snapshot", &path, "v0@full"]).ok();
    for (verb, name) in [("send", "v0@full"), ("export", "v0@full")] {
        let file = format!("{}/file", small.0);
        std::fs::write(&file, "old").unwrap();
        let line = ["volume", verb, &path, name, "--output", &file, "--force"];
        let line = if verb == "send" { line.to_vec() } else { [&line[..4], &line[5..]].concat() };
        let refused = blockyard(&line).fails();
        assert!(refused.err.contains(&format!("`{file}`: No space left")), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "old");
        assert!(!std::path::Path::new(&format!("{file}.blockyard-unfinished")).exists());
        std::fs::remove_file(&file).unwrap();
    }
    blockyard(&["volume", "destroy", &path, "v0@full"]).ok();
    let refused =
        blockyard(&["volume", "create", &format!("{path}2"), "v0", "--size", "1G"]).fails();
    assert!(refused.err.contains(&format!("cannot make a pool in `{path}2`")), "{refused}");
    // A stream that does not fit leaves no part of itself.
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

/// A file system of the given size.
fn small(place: &Place, size: &str) -> Unmount {
    let dir = place.file("small");
    std::fs::create_dir(&dir).unwrap();
    ok(&["mount", "-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", &dir]);
    Unmount(dir)
}

/// The bug: refused commands left a pool of 385 MB, because it was made before they were checked.
#[test]
fn a_refused_command_makes_no_pool() {
    let place = Place::new();
    let pool = place.file("pool");
    let (garbage, device) = (place.file("garbage"), format!("volume:///v0?path={pool}"));
    std::fs::write(&garbage, "something else".repeat(100)).unwrap();
    let volume = |line: &[&str]| blockyard(&[&["volume"][..], line].concat()).fails().err;
    for (said, wanted) in [
        (volume(&["create", &pool, "a b", "--size", "1G"]), "invalid value 'a b'"),
        (volume(&["create", &pool, "a", "--size", "20k"]), "invalid size `20k`"),
        (volume(&["create", &pool, "a", "--size", "1G", "--volblocksize", "6k"]), "volblocksize"),
        (
            volume(&["create", &pool, "a", "--size", "1G", "--reservation", "2G"]),
            "invalid reservation `2G`",
        ),
        (
            volume(&["receive", &pool, "v0", "-i", &garbage]),
            "garbage: it is not a stream of `blockyard volume send`",
        ),
        (volume(&["receive", &pool, "a b", "-i", &garbage]), "invalid value 'a b'"),
        (Yard::try_serve(&[&device]).unwrap_err().1, "size is missing: expected "),
        (Yard::try_serve(&[&format!("{device}&size=20k")]).unwrap_err().1, "invalid size "),
    ] {
        assert!(said.contains(wanted), "{said}");
        assert!(!std::path::Path::new(&pool).exists(), "{said}");
    }
    // A directory with other files keeps them, and gets no new ones.
    std::fs::create_dir(&pool).unwrap();
    std::fs::write(format!("{pool}/notes"), "mine").unwrap();
    for device in [format!("{device}&size=1G"), format!("smr:///s?backing={pool}&size=1G")] {
        Yard::try_serve(&[&device]).unwrap_err();
        assert_eq!(std::fs::read_dir(&pool).unwrap().count(), 1, "{device}");
    }
}

/// The bug: a `serve` whose socket, mount point or pidfile was refused left a pool of 134 MB,
/// because the devices were made first.
#[test]
fn refused_endpoint_makes_no_pool() {
    let place = Place::new();
    let pool = place.file("pool");
    let device = format!("volume:///v0?path={pool}&size=1G");
    for option in [
        ["--nbd", "unix:/nonexistent/socket"],
        ["--control", "/nonexistent/control"],
        ["--metrics", "tcp:999.1.1.1:3"],
        ["--fuse", "/nonexistent/dir"],
        ["--pidfile", "/nonexistent/pid"],
    ] {
        let control = place.file("control");
        let mut line = vec!["serve", &device];
        if option[0] != "--control" {
            line.extend(["--control", &control]);
        }
        if option[0] != "--nbd" {
            line.extend(["--nbd", "none"]);
        }
        line.extend(option);
        let refused = blockyard(&line).fails();
        assert!(refused.err.contains("nonexistent") || refused.err.contains("999.1"), "{refused}");
        assert!(!std::path::Path::new(&pool).exists(), "{option:?}");
        assert!(!std::path::Path::new(&control).exists(), "{option:?}");
    }
}

/// The bug: `serve` makes its devices one after another, so a refused one left the new pools,
/// volumes and SMR disks of those before it; and a trace that could not be made left the data of
/// its own device.
#[test]
fn a_refused_device_leaves_no_new_data() {
    let place = Place::new();
    let (old, new) = (place.file("old"), place.file("state/new"));
    let disk = place.file("disk");
    std::fs::write(&disk, vec![0; 96 << 20]).unwrap();
    blockyard(&["volume", "create", &old, "v0", "--size", "8M"]).ok();
    let listed = || blockyard(&["volume", "list", "-o", "name,size,refer", &old]).ok().out;
    let before = listed();
    let full = place.file("full");
    std::fs::create_dir(&full).unwrap();
    // Files of other programs, with names as those of an SMR disk have.
    let foreign = ["notes", "journal", "data.00", "live.00", "superblock.new"];
    for name in foreign {
        std::fs::write(format!("{full}/{name}"), "mine").unwrap();
    }
    let made = [
        format!("volume:///a?path={new}&size=8M"),
        format!("volume:///b?path={new}&size=8M"),
        format!("volume:///c?path={old}&size=8M"),
        format!("volume:///d?path={disk}&size=8M"),
        format!("volume:///e?path={new}/1&path2={new}/2&size=8M"),
        format!("smr:///s?backing={new}&size=1G"),
    ];
    let refused = [
        "null:///z?trace=/nonexistent/trace".to_owned(),
        format!("volume:///z?path={full}&size=8M"),
        format!("volume:///z?path={old}&size=8M&reservation=8P"),
        format!("volume:///z?path={new}/other&path2={full}&size=8M"),
        format!("smr:///z?backing={full}&size=1G"),
    ];
    let is_as_before = |case: &str| {
        assert!(!std::path::Path::new(&place.file("state")).exists(), "{case}");
        assert_eq!(listed(), before, "{case}");
        assert!(std::fs::read(&disk).unwrap() == vec![0; 96 << 20], "{case}");
        for name in foreign {
            let text = std::fs::read_to_string(format!("{full}/{name}")).unwrap();
            assert_eq!(text, "mine", "{case}: {name}");
        }
        assert_eq!(std::fs::read_dir(&full).unwrap().count(), foreign.len(), "{case}");
    };
    let started = |devices: &[&str]| Yard::try_serve(devices).map(drop).map_err(|failed| failed.1);
    for device in &made {
        for last in &refused {
            started(&[device, last]).unwrap_err();
            is_as_before(&format!("{device} {last}"));
        }
        let case = format!("{device}&trace=/nonexistent/trace");
        assert!(started(&[&case]).unwrap_err().contains("/nonexistent/trace"), "{case}");
        is_as_before(&case);
    }
    // Two volumes of one new pool, of which the second is refused.
    started(&[&made[0], &format!("{}&trace=/nonexistent/trace", made[1])]).unwrap_err();
    is_as_before("two volumes");
    // The same by the control API, and by a command.
    let yard = Yard::serve(&["null:///n?size=1G"]);
    for device in &made {
        let device = format!("{device}&trace=/nonexistent/trace");
        yard.command(&["add", &device]).fails();
        is_as_before(&device);
    }
    drop(yard);
    blockyard(&["volume", "create", &new, "a", "--size", "8P", "--reservation", "8P"]).fails();
    is_as_before("volume create");
    // What is served is kept.
    let yard = Yard::serve(&[&made[0], &made[1], &made[2], &made[3]]);
    nbdsh(&yard.uri("a"), "h.pwrite(b'kept' * 1024, 0)\nh.flush()");
    drop(yard);
    let yard = Yard::serve(&[&made[0], &made[1], &made[2], &made[3]]);
    nbdsh(&yard.uri("a"), "assert h.pread(4096, 0) == b'kept' * 1024");
}

/// The bug: a `serve` that refused its second device kept the changed reservation of its first one,
/// and had truncated the trace of that device.
#[test]
fn a_refused_device_undoes_changes_to_what_exists() {
    let place = Place::new();
    let (pool, trace) = (place.file("pool"), place.file("trace"));
    blockyard(&["volume", "create", &pool, "v0", "--size", "8M"]).ok();
    // An event without data, in the order of this machine's bytes.
    let old = [&0x6561_7407_u32.to_ne_bytes()[..], &[0; 44]].concat();
    std::fs::write(&trace, &old).unwrap();
    let device = format!("volume:///v0?path={pool}&reservation=4M&trace={trace}");
    let is_as = |reserved: u64, is_old: bool| {
        let shown = blockyard(&["volume", "show", &pool, "v0", "--json"]).ok().json();
        assert_eq!(shown["reservation_bytes"], reserved, "{shown}");
        assert_eq!(std::fs::read(&trace).unwrap() == old, is_old);
    };
    for last in ["null:///z?trace=/nonexistent/trace", "volume:///z?path=/proc/pool&size=8M"] {
        Yard::try_serve(&[&device, last]).map(drop).unwrap_err();
        is_as(0, true);
    }
    Yard::try_serve(&[&device]).map(drop).unwrap();
    is_as(4 << 20, false);
}

/// The bug: `serve` of a pool whose superblock is damaged ended with the code of a wrong option.
#[test]
fn serve_of_a_damaged_pool_has_the_exit_code_of_damage() {
    let place = Place::new();
    let device = uri(&place, "v0", "&size=8M");
    drop(Yard::serve(&[&device]));
    let superblock = std::fs::File::options().write(true).open(place.file("pool/superblock"));
    superblock.unwrap().set_len(100).unwrap();
    let refused = blockyard(&["serve", &device, "--nbd", "none"]).fails();
    assert_eq!(refused.code, Some(7), "{refused}");
}

/// The bug: for up to 50 ms after a yard had exited, the kernel kept the files that the yard had
/// registered with io_uring open, and `umount` of their file system failed with EBUSY.
#[test]
fn a_file_system_unmounts_right_after_the_exit_of_its_yard() {
    for _ in 0..10 {
        let place = Place::new();
        let small = small(&place, "256M");
        let mut yard =
            Yard::serve(&[&format!("volume:///v0?path={}/pool&size=64M&store=uring", small.0)]);
        let script = "[h.pwrite(bytes([i]) * 65536, i << 16) for i in range(64)]\nh.flush()\n\
                      [h.pread(65536, i << 16) for i in range(64)]";
        nbdsh(&yard.uri("v0"), script);
        yard.signal("TERM");
        assert!(yard.end().success());
        ok(&["umount", &small.0]);
    }
}

/// The bug: `volume send` had the exit code 0 although its reader left and the stream was cut.
#[test]
fn send_fails_if_its_reader_leaves() {
    let place = Place::new();
    let pool = place.file("pool");
    let yard = Yard::serve(&[&uri(&place, "v0", "&size=8M")]);
    nbdsh(&yard.uri("v0"), "h.pwrite(bytes(range(256)) * 4096, 0)\nh.flush()");
    drop(yard);
    blockyard(&["volume", "snapshot", &pool, "v0@a"]).ok();
    let piped =
        format!("{BLOCKYARD} volume send {pool} v0@a | head -c 10; exit ${{PIPESTATUS[0]}}");
    let ended = run(&["bash", "-c", &piped]).fails();
    assert_eq!(ended.code, Some(1), "{ended}");
    assert!(ended.err.contains("standard output"), "{ended}");
}

/// The bug: each `volume` command waited 90 s for a stopped yard without a message, and ignored
/// `--timeout`.
#[test]
fn volume_commands_end_if_the_yard_is_stopped() {
    let place = Place::new();
    let pool = place.file("pool");
    let yard = Yard::serve(&[&uri(&place, "v0", "&size=8M")]);
    yard.signal("STOP");
    for line in [
        &["list", &pool][..],
        &["show", &pool],
        &["create", &pool, "v1", "--size", "8M"],
        &["snapshot", &pool, "v0@a"],
        &["scrub", &pool],
        &["send", &pool, "v0@a", "-o", &place.file("stream")],
        &["export", &pool, "v0", &place.file("exported")],
    ] {
        let ended = blockyard(&[&["volume"][..], line, &["--timeout", "1"]].concat()).fails();
        assert!(ended.err.contains("has not answered for 1 s"), "{ended}");
    }
    yard.signal("CONT");
    yard.serves("v0");
}

/// The bug: the system refused `export` to a block device, a named pipe or `/dev/null`, because
/// these have no length that can be changed.
#[test]
fn an_image_goes_to_what_is_no_file() {
    let place = Place::new();
    let (pool, raw, pipe) = (place.file("pool"), place.file("raw"), place.file("pipe"));
    let volume = |line: &[&str]| blockyard(&[&["volume"][..], line].concat());
    let yard = Yard::serve(&[&uri(&place, "v0", "&size=8M")]);
    nbdsh(&yard.uri("v0"), "h.pwrite(b'some' * 16384, 3 << 20)\nh.flush()");
    drop(yard);
    volume(&["export", &pool, "v0", &raw]).ok();
    let wanted = std::fs::read(&raw).unwrap();
    assert_eq!(wanted.len(), 8 << 20);
    volume(&["export", &pool, "v0", "/dev/null"]).ok();
    ok(&["mkfifo", &pipe]);
    let read = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).unwrap()
    });
    volume(&["export", &pool, "v0", &pipe]).ok();
    assert!(read.join().unwrap() == wanted);
    let refused = volume(&["export", &pool, "v0", "/dev/null", "--format", "qcow2"]).fails();
    assert!(refused.err.contains("is not written in order"), "{refused}");
    // The former data of a device are overwritten, also where the image has zeros.
    for (len, is_long_enough) in [(8 << 20, true), (4 << 20, false)] {
        let file = place.file(&format!("disk-{len}"));
        std::fs::write(&file, vec![0xff; len]).unwrap();
        let device = Loop::attach(&file);
        let exported = volume(&["export", &pool, "v0", &device.0, "--force"]);
        if is_long_enough {
            exported.ok();
            assert!(std::fs::read(&device.0).unwrap() == wanted);
            volume(&["export", &pool, "v0", &device.0, "--format", "qcow2", "--force"]).ok();
            let compare = ["qemu-img", "compare", "-f", "qcow2", "-F", "raw", &device.0, &raw];
            ok(&compare);
        } else {
            let error = exported.fails().err;
            assert!(error.contains("has 4194304 bytes; the image needs 8388608"), "{error}");
        }
    }
}

/// The bug: a copy that was restored from an older backup while the pool was closed counted as
/// good. When the other copy was lost, the pool did not open, or its newest blocks were gone.
#[test]
fn a_copy_from_an_older_backup_is_resynced() {
    for restored in ["1", "2"] {
        let place = Place::new();
        let copy = |number: &str| place.file(&format!("copy{number}"));
        let device = format!("volume:///v0?path={}&path2={}&size=8M", copy("1"), copy("2"));
        let write = |byte: u8| {
            let mut yard = Yard::serve(&[&device]);
            nbdsh(&yard.uri("v0"), &format!("h.pwrite(b'{byte}' * 1048576, 0)\nh.flush()"));
            yard.signal("TERM");
            assert!(yard.end().success());
        };
        write(1);
        let backup = place.file("backup");
        ok(&["cp", "-a", &copy(restored), &backup]);
        write(2);
        write(3);
        std::fs::remove_dir_all(copy(restored)).unwrap();
        ok(&["cp", "-a", &backup, &copy(restored)]);
        let mut yard = Yard::serve(&[&device]);
        assert!(yard.complained().contains("this copy is stale; resyncing it"), "{restored}");
        blockyard(&["pool", "resync", &copy("1")]).ok();
        yard.signal("TERM");
        assert!(yard.end().success());
        // The restored copy alone has everything.
        let lost = if restored == "1" { "2" } else { "1" };
        std::fs::remove_dir_all(copy(lost)).unwrap();
        let alone = Yard::serve(&[&format!("{device}&degraded=yes")]);
        nbdsh(&alone.uri("v0"), "assert h.pread(1048576, 0) == b'3' * 1048576");
    }
}

/// A receiver that is killed loses at most what it has read since it last recorded its position.
#[test]
fn a_receive_that_is_killed_goes_on_where_it_was() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let place = Place::new();
    let (pool, there, file) = (place.file("pool"), place.file("there"), place.file("stream"));
    let yard = Yard::serve(&[&format!("volume:///v0?path={pool}&size=32M&compress=none")]);
    nbdsh(
        &yard.uri("v0"),
        "import random\n\
         for i in range(24): h.pwrite(random.Random(i).randbytes(1 << 20), i << 20)\n\
         h.flush()",
    );
    let volume = |line: &[&str]| blockyard(&[&["volume"][..], line].concat());
    volume(&["snapshot", &pool, "v0@a"]).ok();
    let estimate = volume(&["send", "-n", "--json", &pool, "v0@a"]).ok().json();
    volume(&["send", &pool, "v0@a", "-o", &file]).ok();
    let stream = std::fs::read(&file).unwrap();
    assert_eq!(estimate["stream_bytes"], stream.len(), "{estimate}");
    let verified = volume(&["verify-stream", &file]).ok().out;
    assert!(verified.contains("v0@a: complete, 1536 blocks"), "{verified}");
    let mut child = Command::new(BLOCKYARD)
        .args(["volume", "receive", "-s", &there, "v0"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    // The receiver has read all but what the pipe holds, so it has recorded a position.
    child.stdin.as_mut().unwrap().write_all(&stream[..20 << 20]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let listed = volume(&["receive", "--token", &there]).ok().out;
    assert!(listed.starts_with("v0: v0@a, 1") && listed.contains("M of 32M, token 1-"), "{listed}");
    let token = volume(&["receive", "--token", &there, "v0"]).ok().out;
    let token = token.trim();
    let rest = place.file("rest");
    volume(&["send", "--resume", token, &pool, "-c", "-o", &rest]).ok();
    let len = std::fs::metadata(&rest).unwrap().len();
    assert!(len < 9 << 20, "{len} bytes of the rest");
    // Another yard has the pool open, and receives the rest.
    let other = Yard::serve(&[&format!("volume:///other?path={there}&size=16M")]);
    let refused = volume(&["receive", "-s", &there, "v0@b", "-i", &file]).fails();
    assert!(refused.err.contains(&format!("--resume {token}`")), "the whole stream: {refused}");
    let received = volume(&["receive", "-s", &there, "v0@b", "-i", &rest]).ok();
    assert!(received.out.contains("received v0@b"), "{received}");
    let add = format!("volume:///v0?path={there}");
    blockyard(&["add", &add, "--control", &other.control()]).ok();
    ok(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &yard.uri("v0"), &other.uri("v0")]);
    let refused = volume(&["receive", "--abort", &there, "v0"]).fails();
    assert!(refused.err.contains("expected a volume that was partly received"), "{refused}");
    let refused =
        volume(&["send", "--resume", &token[..token.len() - 1], &pool, "-o", &rest]).fails();
    assert!(refused.err.contains("the checksum of this one is wrong"), "{refused}");
    let mut damaged = stream;
    damaged[1 << 20] ^= 1;
    std::fs::write(&file, &damaged).unwrap();
    let refused = volume(&["verify-stream", &file]).fails();
    assert!(refused.err.contains("invalid stream at byte"), "{refused}");
}
