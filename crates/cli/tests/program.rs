//! The program as users start it.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn blockyard(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    // Nothing of the environment may lead to another yard.
    command.env("XDG_RUNTIME_DIR", dir).env("XDG_STATE_HOME", dir);
    for name in ["BLOCKYARD_CONTROL", "BLOCKYARD_LOG", "LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET"]
    {
        command.env_remove(name);
    }
    command
}

fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

/// A directory of a test's own, removed in the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("by-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server of a test's own, and what it said when it was ready.
struct Served {
    child: Child,
    said: Value,
    dir: Dir,
}

impl Served {
    fn start(name: &str, args: &[&str]) -> Served {
        let dir = Dir::new(name);
        let mut child = blockyard(&dir.0)
            .args(["serve", "--json", "--nbd"])
            .arg(format!("unix:{}/nbd.sock", dir.0.display()))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Served { child, said: serde_json::from_str(&line).expect(&line), dir }
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        run(blockyard(&self.dir.0).args(args))
    }

    /// What a command prints that must succeed.
    fn says(&self, args: &[&str]) -> String {
        let (code, out, error) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {error}");
        out
    }

    fn signal(&self, name: &str) {
        signal(&self.child, name);
    }
}

fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    let sent = Command::new("/bin/sh").args(["-c", &kill]).status();
    assert!(sent.unwrap().success());
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_default_yard_is_served_and_ends_cleanly() {
    for signal in ["INT", "TERM", "HUP"] {
        let mut served = Served::start(&format!("default-{signal}"), &[]);
        let names: Vec<_> =
            served.said["devices"].as_array().unwrap().iter().map(|d| &d["name"]).collect();
        assert_eq!(names, ["zoned0", "null0", "mem0", "smr0", "ram0", "vol0"]);
        let list = served.says(&["list"]);
        assert!(list.starts_with("NAME "), "{list}");
        assert_eq!(list.lines().count(), 7);
        served.signal(signal);
        assert_eq!(served.child.wait().unwrap().code(), Some(0));
        // Its sockets are gone, and the volume stays: state is in the same place here.
        let left = std::fs::read_dir(served.dir.0.join("blockyard")).unwrap();
        let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["vol0"]);
        assert!(!served.dir.0.join("nbd.sock").exists());
    }
}

#[test]
fn zones_are_reported_and_managed_as_with_blkzone() {
    let served =
        Served::start("zones", &["null:///z?size=1G&zoned=1&zone_size=64M&zone_nr_conv=1"]);
    let report = served.says(&["zone", "report", "z", "-c", "2"]);
    assert_eq!(
        report,
        "  start: 0x000000000, len 0x020000, cap 0x020000, wptr 0x000000 reset:0 non-seq:0, \
         zcond: 0(nw) [type: 1(CONVENTIONAL)]\n  \
         start: 0x000020000, len 0x020000, cap 0x020000, wptr 0x000000 reset:0 non-seq:0, \
         zcond: 1(em) [type: 2(SEQ_WRITE_REQUIRED)]\n"
    );
    assert_eq!(served.says(&["zone", "report", "z"]).lines().count(), 16);
    let one = served.says(&["zone", "report", "z", "-o", "0x20000", "-l", "0x20000"]);
    assert_eq!(one.lines().count(), 1);
    assert_eq!(
        served.says(&["zone", "open", "z", "-o", "0x20000", "-c", "2"]),
        "z: open: 2 zones\n"
    );
    assert_eq!(
        served.says(&["zone", "close", "z", "-o", "131072", "-c", "1"]),
        "z: close: 1 zone\n"
    );
    assert_eq!(
        served.says(&["zone", "finish", "z", "-o", "0x20000", "-l", "0x20000"]),
        "z: finish: 1 zone\n"
    );
    let report: Value =
        serde_json::from_str(&served.says(&["zone", "report", "z", "--json"])).unwrap();
    assert_eq!(report[1]["cond"], "full");
    assert_eq!(report[2]["cond"], "explicit-open");
    // A size, and zones, as for sectors; blkzone's sectors stay bare numbers.
    let second = "  start: 0x000020000";
    for offset in ["64M", "1z", "131072s"] {
        let one = served.says(&["zone", "report", "z", "-o", offset, "-l", "1z"]);
        assert!(one.starts_with(second) && one.lines().count() == 1, "{offset}: {one}");
    }
    assert_eq!(
        served.says(&["zone", "reset", "z", "-o", "2z", "-l", "128M"]),
        "z: reset: 2 zones\n"
    );
    let (code, _, error) = served.run(&["zone", "reset", "z", "-o", "1.5z"]);
    assert!(code == 2 && error.contains("e.g. 2G, or zones, e.g. 5z"), "{error}");
    let (code, _, error) = served.run(&["zone", "reset", "z", "-o", "999999999999999999z"]);
    assert!(code == 2 && error.contains("invalid --offset `999999999999999999z`"), "{error}");
    assert_eq!(served.says(&["zone", "reset", "z"]), "z: reset: 16 zones\n");
    assert_eq!(served.says(&["zone", "reset-all", "z"]), "z: reset-all: 16 zones\n");
    let (code, _, error) = served.run(&["zone", "open", "z", "-o", "0", "-c", "1"]);
    assert_eq!(code, 6);
    let want = "zone 0 at sector 0: open failed with IOERR (EIO): zone 0 is conventional; name a \
                range of sequential zones; 0 zones done";
    assert!(error.contains(want), "{error}");
    for (args, want) in [
        (&["zone", "open", "z", "-o", "8"][..], "invalid --offset `8`"),
        (&["zone", "open", "z", "-c", "0"], "invalid --count `0`"),
    ] {
        let (code, _, error) = served.run(args);
        assert!(code == 2 && error.contains(want), "{error}");
    }
}

/// `zone reset -l 5` reset a whole zone. blkzone refuses a range that is not made of whole zones.
#[test]
fn a_part_of_a_zone_is_refused_and_nothing_is_changed() {
    let served = Served::start("zone-parts", &["null:///z?size=1G&zoned=1&zone_size=64M"]);
    served.says(&["zone", "finish", "z"]);
    for verb in ["open", "close", "finish", "reset"] {
        for (range, want) in [
            (&["-l", "5"][..], "invalid --length `5`: expected whole zones, a multiple of 131072"),
            (&["-l", "65M"], "invalid --length `65M`: expected whole zones"),
            (&["-l", "0"], "invalid --length `0`: expected whole zones"),
            (&["-o", "1z", "-l", "1000M"], "invalid --length `1000M`"),
            (&["-o", "4k"], "invalid --offset `4k`: expected a zone's first sector, a multiple of"),
            (&["-o", "0x8", "-l", "1z"], "invalid --offset `0x8`: expected a zone's first sector"),
            (&["-o", "16z"], "invalid --offset `16z`: expected a sector below 2097152"),
            (&["-o", "15z", "-l", "2z"], "invalid --length `2z`: expected 1 to 1 zones from there"),
        ] {
            let (code, _, error) = served.run(&[&["zone", verb, "z"], range].concat());
            assert!(code == 2 && error.contains(want), "{verb} {range:?}: {code}: {error}");
        }
    }
    let report = served.says(&["zone", "report", "z"]);
    assert!(report.lines().count() == 16 && report.lines().all(|it| it.contains("14(fu)")));
    // A report of a part shows the zone that it is of.
    let one = served.says(&["zone", "report", "z", "-o", "0x20008", "-l", "5"]);
    assert!(one.contains("start: 0x000020000") && one.lines().count() == 1, "{one}");
}

#[test]
fn a_geometry_is_checked_made_or_served() {
    const URI: &str = "null:///z?size=1G&zoned=1&zone_size=64M&zone_nr_conv=1&zone_max_active=8";
    let dir = Dir::new("zone-check");
    let served = Served::start("zone-check-served", &[URI, "null:///n?size=1M"]);
    let accepted = "z: linux-6.1: accepted\nz: linux-6.12: accepted\n";
    let refused = "z: zns: refused\n  \
         Linux, nvme driver (EINVAL): invalid zone type 0x1\n    \
         zone 0 at sector 0: NVMe has no conventional zones\n";
    for subject in [URI, "z"] {
        let check = |rest: &[&str]| {
            let args = [&["zone", "check", subject], rest].concat();
            if subject == URI { run(blockyard(&dir.0).args(args)) } else { served.run(&args) }
        };
        let linux = check(&["--for", "linux-6.1", "--for", "linux-6.12"]);
        assert_eq!(linux, (0, accepted.to_owned(), String::new()));
        assert_eq!(check(&["--for", "zns"]), (6, refused.to_owned(), String::new()));
        let (code, out, _) = check(&["--for", "zbc", "--json"]);
        let verdicts: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((code, &verdicts[0]["accepted"]), (6, &false.into()), "{out}");
        assert_eq!(verdicts[0]["refusals"][0]["by"], "ZBC-2", "{out}");
        assert_eq!(verdicts[0]["refusals"][0]["error"], Value::Null, "{out}");
    }
    let plain = served.run(&["zone", "check", "n", "--for", "zns"]);
    assert!(plain.0 == 6 && plain.2.contains("`n` is not a zoned device"), "{plain:?}");
    let unknown = served.run(&["zone", "check", "x", "--for", "zns"]);
    assert!(unknown.0 == 5 && unknown.2.contains("there is no device `x`"), "{unknown:?}");
}

#[test]
fn devices_and_faults_come_and_go_at_run_time() {
    let served = Served::start("add", &["null:///a?size=1G"]);
    assert_eq!(served.says(&["add", "null:///b?size=2G"]), "b: null 2G, keeps nothing\n");
    let show = served.says(&["show", "b"]);
    assert!(show.contains("uri              null:///b?size=2G"), "{show}");
    assert_eq!(served.says(&["inject", "b", "add,status=IOERR"]), "b: rule 1: add,status=IOERR\n");
    assert_eq!(served.says(&["inject", "b", "add,latency=5ms"]), "b: rule 2: add,latency=5ms\n");
    let show = served.says(&["show", "b"]);
    assert!(
        show.contains("fault rule       2: add,latency=5ms (0 matched, 0 applied)\n"),
        "{show}"
    );
    let list = "DEVICE  ID  MATCHED  APPLIED  RULE\n\
                b        2        0        0  add,latency=5ms\n\
                b        1        0        0  add,status=IOERR\n";
    assert_eq!(served.says(&["inject", "list"]), list);
    assert_eq!(served.says(&["inject", "list", "a"]), "DEVICE  ID  MATCHED  APPLIED  RULE\n");
    assert_eq!(served.says(&["inject", "remove", "b", "1"]), "b: removed 1 rule\n");
    assert_eq!(served.says(&["inject", "b", "removeall"]), "b: removeall\n");
    assert_eq!(served.says(&["inject", "remove", "b", "all"]), "b: removed 0 rules\n");
    let stats: Value = serde_json::from_str(&served.says(&["stats", "--json"])).unwrap();
    assert_eq!(stats.as_array().unwrap().len(), 2);
    assert!(served.says(&["stats", "a"]).starts_with("device "));
    assert!(served.says(&["connections"]).starts_with("PEER "));
    assert_eq!(served.says(&["remove", "b"]), "b: removed\n");
    for (args, code, want) in [
        (&["show", "b"][..], 5, "there is no device `b`"),
        (&["remove", "b"], 5, "there is no device `b`"),
        (&["stats", "b"], 5, "there is no device `b`"),
        (&["add", "null:///a"], 6, "`a` is taken already"),
        (&["add", "null:///c?zoned=1&zone_size=3M"], 2, "invalid zone_size `3M`"),
        (&["zone", "report", "a"], 6, "`a` is not a zoned device"),
        (&["zone", "open", "a", "-l", "8"], 6, "`a` is not a zoned device"),
        (&["inject", "a", "zone_offline=0"], 2, "zone_offline"),
        (&["inject", "a", "powercut=1"], 6, "power_cut; did you mean `power_cut`?"),
        (&["inject", "a", "add,zones=1,status=IOERR"], 2, "the device has no zones; give start"),
        (&["inject", "remove", "a", "1"], 5, "`a` has no fault rule 1; `blockyard inject list a`"),
        (&["inject", "remove", "a", "x"], 2, "expected the number of a rule, or all"),
        (&["inject", "run", "/nonexistent"], 3, "cannot read `/nonexistent`"),
        (&["inject", "run", "/dev/null"], 3, "/dev/null: line 1: a scenario without steps"),
    ] {
        let (have, _, error) = served.run(args);
        assert_eq!(have, code, "{args:?}: {error}");
        assert!(error.contains(want), "{args:?}: {error}");
    }
}

/// A scenario of no length: its rules come, are counted, and go.
#[test]
fn a_scenario_prints_its_steps_and_removes_its_rules() {
    let served = Served::start("scenario", &["null:///a?size=1G"]);
    let file = served.dir.0.join("scenario.toml");
    let step = |at, length| {
        format!("[[step]]\nat = \"{at}\"\nfor = \"{length}\"\nop = \"READ\"\nlatency = \"5ms\"\n")
    };
    std::fs::write(&file, format!("seed = 1\n{}{}", step("0s", "1ms"), step("1ms", "0s"))).unwrap();
    let path = file.to_str().unwrap();
    let said = served.says(&["inject", "run", path, "a"]);
    let lines: Vec<_> = said.lines().map(|line| line.split("s  ").nth(1).unwrap_or(line)).collect();
    assert_eq!(lines.len(), 5, "{said}");
    assert!(lines[0].starts_with("step 1 begins: a add,op=READ,latency=5ms,seed="), "{said}");
    assert_eq!(lines[1], "step 1 ends: a: 0 requests matched, 0 failed or delayed");
    assert_eq!(lines[4], "the scenario has ended");
    // Ctrl-C ends one that would last a day, and its rules are gone when the command ends.
    std::fs::write(&file, step("0s", "24h")).unwrap();
    let mut command = blockyard(&served.dir.0);
    command.args(["inject", "run", path, "a"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    assert!(line.contains("step 1 begins"), "{line}");
    assert!(served.says(&["inject", "list", "a"]).contains("latency=5ms"));
    signal(&child, "INT");
    said.read_to_string(&mut line).unwrap();
    assert!(line.contains("step 1 ends: a: 0 requests matched"), "{line}");
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(served.says(&["inject", "list", "a"]), "DEVICE  ID  MATCHED  APPLIED  RULE\n");
    let (code, _, error) = served.run(&["inject", "run", path, "nope"]);
    assert!(code == 5 && error.contains("there is no device `nope`"), "{error}");
}

/// `show ''` printed the control API's answer to a path that it does not have: "there is nothing
/// here; docs/control-api.md lists the paths".
#[test]
fn a_name_that_nothing_can_have_is_refused_before_a_yard_is_asked() {
    let dir = Dir::new("names");
    for name in ["", " ", "a b", "a/b", "..", "-x", "\u{e9}", "a:b", &"x".repeat(65)] {
        for args in [
            &["show", "--", name][..],
            &["remove", "--", name],
            &["stats", "--", name],
            &["sched", "show", "--", name],
            &["zone", "reset", "--", name],
            &["ram", "idle", "--", name],
        ] {
            let (code, _, error) = run(blockyard(&dir.0).args(args));
            let wanted = "1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or a digit";
            assert!(code == 2 && error.contains(wanted), "{args:?}: {error}");
        }
    }
    for name in ["", "a b", "v@", "@s", "v@a@b", &"x".repeat(201)] {
        for verb in ["show", "snapshot", "destroy"] {
            let (code, _, error) = run(blockyard(&dir.0).args(["volume", verb, "p", "--", name]));
            let wanted = "expected VOLUME or VOLUME@SNAPSHOT of at most 200 characters";
            assert!(code == 2 && error.contains(wanted), "{verb} {name}: {error}");
        }
    }
    for name in ["v@a b%c", "v@a%b%c", "@a%b", "v%a", "@a@b"] {
        let (code, _, error) = run(blockyard(&dir.0).args(["volume", "destroy", "-r", "p", name]));
        assert!(code == 2 && error.contains(&format!("invalid NAME `{name}`")), "{name}: {error}");
    }
    // Names that are valid are refused for lack of the pool only.
    for name in ["@s", "v@a%b", "v@%b", "v@a%", "v@%"] {
        let (code, _, error) = run(blockyard(&dir.0).args(["volume", "destroy", "-r", "p", name]));
        assert!(code != 2 && error.contains("`p` holds no pool"), "{name}: {error}");
    }
}

/// The bug: the refusal promised to remove the device when its clients have left, and no code did.
#[test]
fn a_refused_remove_says_who_uses_the_device_and_how_to_go_on() {
    let served = Served::start("busy", &["null:///a?size=1M"]);
    let mut client = UnixStream::connect(served.dir.0.join("nbd.sock")).unwrap();
    let mut hello = [0; 18];
    client.read_exact(&mut hello).unwrap();
    // NBD_OPT_EXPORT_NAME: the device `a`.
    client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01a").unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    let (code, _, error) = served.run(&["remove", "a"]);
    assert_eq!(code, 6, "{error}");
    assert!(error.contains("cannot remove `a`: it has 1 client ("), "{error}");
    let rest = "disconnect and close first, or use --force (`?force=true`), which disconnects them";
    assert!(error.contains(rest), "{error}");
    assert_eq!(served.says(&["remove", "--force", "a"]), "a: removed\n");
}

/// EACCES was told as "no yard answers". A link that leads to itself fails for root too.
#[test]
fn a_control_socket_that_cannot_be_used_says_why() {
    let dir = Dir::new("socket-why");
    let link = dir.0.join("link");
    std::os::unix::fs::symlink("link", &link).unwrap();
    let control = |path: &Path| run(blockyard(&dir.0).arg("list").arg("--control").arg(path));
    let (code, _, error) = control(&link);
    assert!(code == 4 && error.contains("cannot use the control socket"), "{error}");
    assert!(error.contains("(os error 40)"), "{error}");
    let (code, _, error) = control(&dir.0.join("none"));
    assert!(code == 4 && error.contains("no yard answers"), "{error}");
}

/// Exit codes of pools: damage had the code of a wrong option, or of any failure.
#[test]
fn a_pool_that_is_not_there_and_one_that_is_damaged_have_codes_of_their_own() {
    let dir = Dir::new("pool-codes");
    let pool = dir.0.join("pool");
    let at = pool.to_str().unwrap().to_owned();
    let volume = |args: &[&str]| {
        let (verb, rest) = args.split_first().unwrap();
        run(blockyard(&dir.0).args(["volume", verb, &at]).args(rest))
    };
    for verb in ["list", "show", "check", "scrub"] {
        let (code, _, error) = volume(&[verb]);
        assert!(code == 5 && error.contains("holds no pool of volumes"), "{verb}: {error}");
    }
    // One message stood for four causes.
    let (empty, other, file) = (dir.0.join("empty"), dir.0.join("other"), dir.0.join("file"));
    [&empty, &other].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    std::fs::write(other.join("notes"), "").unwrap();
    std::fs::write(&file, "notes").unwrap();
    for (path, why) in [
        (&pool, "it does not exist"),
        (&empty, "the directory is empty"),
        (&other, "the directory has other files, such as `notes`"),
        (&file, "it is a file without a superblock"),
        (&PathBuf::from("/dev/null"), "it is neither a directory nor a disk"),
    ] {
        let (code, _, error) = run(blockyard(&dir.0).args(["volume", "list"]).arg(path));
        assert!(code == 5 && error.contains(why), "{error}");
    }
    assert_eq!(volume(&["create", "v0", "--size", "1M"]).0, 0);
    assert_eq!(volume(&["check"]).0, 0);
    let (code, _, error) = volume(&["create", &"x".repeat(65), "--size", "1M"]);
    assert!(code == 2 && error.contains("1 to 64 letters"), "{error}");
    let date = "v0@2026-11-23T10:00:00+01:00";
    assert_eq!(volume(&["snapshot", date]).0, 0);
    let (_, list, _) = volume(&["list"]);
    assert!(list.contains(date), "{list}");
    // A reader that has enough ends an export as it ends other programs' output.
    let script = "\"$0\" volume export \"$1\" v0 - --json | head -c 1; echo ${PIPESTATUS[0]}";
    let shell = Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_blockyard"), &at])
        .output()
        .unwrap();
    assert_eq!(shell.stdout, b"\x000\n", "{}", String::from_utf8_lossy(&shell.stderr));
    assert_eq!(String::from_utf8_lossy(&shell.stderr), "");
    let (code, _, error) = volume(&["export", "v0", &format!("{at}.vmdk")]);
    assert!(code == 2 && error.contains("--format raw"), "{error}");
    let superblock = pool.join("superblock");
    let mut bytes = std::fs::read(&superblock).unwrap();
    bytes.iter_mut().for_each(|byte| *byte ^= 0xff);
    std::fs::write(&superblock, &bytes).unwrap();
    let device = format!("volume:///v0?path={at}");
    let is_damaged = |what: &str| {
        for verb in ["list", "show", "check", "scrub"] {
            let (code, _, error) = volume(&[verb]);
            assert!(code == 7 && error.contains(&at) && error.contains(what), "{verb}: {error}");
        }
        for device in [device.clone(), format!("{device}&size=1M")] {
            let serve = ["serve", &device, "--nbd", "none", "--run", "true"];
            let (code, _, error) = run(blockyard(&dir.0).args(serve));
            assert!(code == 7 && error.contains(what), "{error}");
        }
    };
    is_damaged("`superblock`");
    // A lost superblock had the code 1 or 2 from `serve`, a lost segment the code 1.
    std::fs::remove_file(&superblock).unwrap();
    is_damaged("no superblock that can be read");
    bytes.iter_mut().for_each(|byte| *byte ^= 0xff);
    std::fs::write(&superblock, &bytes).unwrap();
    std::fs::rename(pool.join("segment-00000000"), dir.0.join("segment")).unwrap();
    is_damaged("segment-00000000");
}

/// A file that cannot be received was named neither, nor the place of the error in it.
#[test]
fn a_stream_that_cannot_be_received_is_named_with_the_place() {
    let dir = Dir::new("streams");
    let path = |name: &str| dir.0.join(name).to_str().unwrap().to_owned();
    let (pool, whole, changes, bad) = (path("pool"), path("whole"), path("changes"), path("bad"));
    let volume = |args: &[&str]| run(blockyard(&dir.0).arg("volume").args(args));
    let ok = |args: &[&str]| {
        let (code, _, error) = volume(args);
        assert_eq!(code, 0, "{args:?}: {error}");
    };
    ok(&["create", &pool, "v0", "--size", "1M"]);
    ok(&["snapshot", &pool, "v0@a"]);
    ok(&["snapshot", &pool, "v0@b"]);
    ok(&["send", &pool, "v0@a", "-o", &whole]);
    ok(&["send", &pool, "v0@b", "--from", "v0@a", "-o", &changes]);
    let bytes = std::fs::read(&whole).unwrap();
    let mut damaged = bytes.clone();
    damaged[530] ^= 1;
    for there in [&pool, &path("new")] {
        for (bytes, what) in [
            (&bytes[..520], "the stream ends at byte 520, before its end record"),
            (&bytes[..20], "the stream ends at byte 20, before its end record"),
            (&[], "the stream ends at byte 0, before its end record"),
            (b"notes", "it is not a stream of `blockyard volume send`"),
            (&damaged, "invalid stream at byte 512: `stream` "),
        ] {
            std::fs::write(&bad, bytes).unwrap();
            let (code, _, error) = volume(&["receive", there, "v1", "-i", &bad]);
            assert!(code == 1 && error.contains(&format!("{bad}: {what}")), "{code}: {error}");
        }
        let (code, _, error) = volume(&["receive", there, "v1", "-i", &changes]);
        let what = "cannot receive the incremental stream `v0@b` as `v1`: this pool has no volume \
                    `v1` with its base `v0@a`; receive a complete stream of that snapshot first";
        assert!(code == 5 && error.contains(what), "{code}: {error}");
    }
    for verb in ["show", "destroy", "rollback", "send"] {
        let (code, _, error) = volume(&[verb, &pool, "v0@c"]);
        let what = "there is no snapshot `v0@c` in this pool";
        assert!(code == 5 && error.contains(what), "{verb}: {error}");
    }
    // A resize to a smaller size discarded data without being asked to.
    let (code, _, error) = volume(&["resize", &pool, "v0", "--size", "512k"]);
    let what =
        "cannot shrink `v0` from 1M to 512k: this discards its data beyond 512k; use --force";
    assert!(code == 6 && error.contains(what), "{code}: {error}");
    ok(&["resize", &pool, "v0", "--size", "512k", "--force"]);
    // A command that only reads changes nothing.
    let files = || {
        let names = std::fs::read_dir(&pool).unwrap().map(|it| it.unwrap().path());
        let mut files: Vec<_> =
            names.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
        files.sort();
        files
    };
    let before = files();
    for args in [&["list", &pool][..], &["show", &pool], &["show", &pool, "v0"], &["check", &pool]]
    {
        ok(args);
        assert!(files() == before, "{args:?} has changed the pool");
    }
}

#[test]
fn help_and_version_are_commands_too() {
    let dir = Dir::new("help");
    let says = |args: &[&str]| {
        let (code, out, error) = run(blockyard(&dir.0).args(args));
        assert_eq!(code, 0, "{args:?}: {error}");
        out
    };
    assert_eq!(says(&["help", "zone", "report"]), says(&["zone", "report", "--help"]));
    assert_eq!(says(&["help"]), says(&["--help"]));
    let version = format!("blockyard {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(says(&["version"]), version);
    assert_eq!(says(&["--version"]), version);
    let json: Value = serde_json::from_str(&says(&["version", "--json"])).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_wrong_command_line_says_what_would_do() {
    let dir = Dir::new("usage");
    for (args, want) in [
        (&["serve", "null:///x?siz=1G"][..], "did you mean `size`?"),
        (&["serve", "x"], "there is no `://`"),
        (&["serve", "--nbd", "udp:1"], "expected unix:PATH, tcp:HOST:PORT or stdio"),
        (&["serve", "null:///x", "null:///x"], "`x` is given twice"),
        (&["serve", "--tls", "on"], "--tls-certificates"),
        (&["serve", "--tls-certificates", "/c"], "TLS is off; add --tls require (or on)"),
        (&["serve", "--tls-verify-peer"], "TLS is off; add --tls require (or on)"),
        (
            &["serve", "--nbd", "none", "--tls", "require", "--tls-certificates", "/c"],
            "tls: no NBD server would use it; serve NBD",
        ),
        (
            &["serve", "--tls", "on", "--tls-certificates", "/c", "--tls-verify-peer"],
            "use --tls require",
        ),
        (&["serve", "--nbd", "stdio", "--run", "true"], "the command's output would get into"),
        (&["serve", "--nbd", "stdio", "--nbd", "stdio"], "stdio can be served once"),
        (&["serve", "null:///x?zoned=1&zone_size=3M", "--nbd", "stdio"], "zone_size"),
        (&["serve", "--log", "a=b=c"], "invalid log filter `a=b=c`"),
        (&["serve", "--control", ""], "control"),
        (&["add", "null:///x?bs=1k&bs=1k"], "bs is given twice"),
        (&["inject", "x", "nonsense"], "expected add,op=OP"),
        (&["zone", "report", "x", "-o", "1x"], "hexadecimal after 0x"),
        (&["zone", "report", "x", "-c", "1", "-l", "1"], "cannot be used with"),
        (
            &["zone", "check", "null:///x?zoned=1&zone_size=3M", "--for", "zns"],
            "invalid zone_size `3M`",
        ),
        (&["zone", "check", "null:///x?zone_sise=3M", "--for", "zns"], "zone_sise"),
        (&["zone", "check", "x", "--for", "linux-5.4"], "linux-6.12"),
        (&["zone", "check", "x"], "--for <TARGET>"),
        (&["frobnicate"], "unrecognized subcommand"),
    ] {
        let (code, _, error) = run(blockyard(&dir.0).args(args));
        assert_eq!(code, 2, "{args:?}: {error}");
        assert!(error.contains(want), "{args:?}: {error}");
    }
    let (code, _, error) = run(blockyard(&dir.0).arg("list"));
    assert_eq!(code, 4);
    assert!(error.contains("start one with `blockyard serve`"), "{error}");
    // For monitoring 2 would be CRITICAL, and the help is no error.
    let (code, _, error) = run(blockyard(&dir.0).args(["status", "--no-such-option"]));
    assert!(code == 3 && error.contains("unexpected argument"), "{code}: {error}");
    assert_eq!(run(blockyard(&dir.0).args(["status", "--help"])).0, 0);
}

#[test]
fn a_configuration_is_written_checked_and_served() {
    let dir = Dir::new("config");
    let file = dir.0.join("yard.toml");
    let path = file.to_str().unwrap();
    let (code, out, _) = run(blockyard(&dir.0).args(["init", path]));
    assert_eq!(code, 0);
    assert!(out.contains("blockyard serve -c"), "{out}");
    let (code, _, error) = run(blockyard(&dir.0).args(["init", path]));
    assert_eq!(code, 1);
    assert!(error.contains("--force overwrites it"), "{error}");
    let (code, out, _) = run(blockyard(&dir.0).args(["check", path]));
    assert_eq!((code, out), (0, format!("{path}: good: 6 devices\n")));
    let (code, out, _) =
        run(blockyard(&dir.0).args(["serve", "-c", path, "--run", "echo $exportname"]));
    assert_eq!((code, out.as_str()), (0, "zoned0\n"));
    std::fs::write(
        &file,
        "[serve]\nndb = 1\n[[device]]\nname = \"a\"\nkind = \"null\"\nzoned = true\n\
         zone_sise = \"1M\"\n",
    )
    .unwrap();
    for args in [&["check", path][..], &["serve", "-c", path]] {
        let (code, _, error) = run(blockyard(&dir.0).args(args));
        assert_eq!(code, 3);
        assert_eq!(
            error,
            format!(
                "{path}:2:1: [serve] has no key `ndb`; did you mean `nbd`?\n\
                 {path}:7:1: `null` devices have no parameter `zone_sise`; did you mean \
                 `zone_size`?\n"
            )
        );
    }
    let tls = ["serve", "--tls", "on", "--tls-certificates", "/no/such/place", "--run", "true"];
    let (code, _, error) = run(blockyard(&dir.0).args(tls));
    assert_eq!(code, 3, "{error}");
    let plain = "[serve]\ncontrol = \"none\"\n[[device]]\nname = \"a\"\nkind = \"null\"\n";
    std::fs::write(&file, plain).unwrap();
    let ask = "echo \"control $BLOCKYARD_CONTROL\"";
    let (code, out, _) = run(blockyard(&dir.0).args(["serve", "-c", path, "--run", ask]));
    assert_eq!((code, out.as_str()), (0, "control \n"));
    // A conflict between valid parameters has its line as well.
    let zones = "[[device]]\nname = \"a\"\nkind = \"null\"\nzoned = true\nzone_size = \"3M\"\n";
    std::fs::write(&file, zones).unwrap();
    let (code, out, _) = run(blockyard(&dir.0).args(["check", "--json", path]));
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &found["ok"], &found["errors"][0]["line"]), (3, &false.into(), &5.into()));
    let (code, _, error) = run(blockyard(&dir.0).args(["check", "/no/such/file"]));
    assert_eq!(code, 3, "{error}");
    std::fs::write(&file, b"a = 1\n\xff\xfe").unwrap();
    let (code, _, error) = run(blockyard(&dir.0).args(["check", path]));
    assert_eq!(code, 3);
    assert!(error.contains("line 2: the file must be UTF-8"), "{error}");
}

#[test]
fn tls_is_checked_as_file_and_command_line_give_it_together() {
    // A file with certificates and a command line with the mode were refused: the file was checked
    // by itself.
    let dir = Dir::new("tls");
    let file = dir.0.join("yard.toml");
    let path = file.to_str().unwrap();
    for (text, args, code, want) in [
        ("certificates = \"/no/such\"", &["--tls", "require"][..], 3, "/no/such"),
        ("mode = \"require\"", &["--tls-certificates", "/no/such"], 3, "/no/such"),
        ("certificates = \"/c\"", &["--tls", "off", "--run", "true"], 0, ""),
        ("certificates = \"/c\"", &["--tls-verify-peer"], 2, "add --tls require (or on)"),
        ("certificates = \"/c\"\nverify_peer = true", &["--tls", "on"], 2, "use --tls require"),
        ("certificates = \"/c\"", &[], 3, "yard.toml:2:16: tls: certificates are given but"),
        ("mode = \"require\"", &[], 3, "yard.toml:2:8: certificates: missing"),
    ] {
        std::fs::write(&file, format!("[tls]\n{text}\n")).unwrap();
        let (found, _, error) = run(blockyard(&dir.0).args(["serve", "-c", path]).args(args));
        assert_eq!(found, code, "{text} {args:?}: {error}");
        assert!(error.contains(want), "{text} {args:?}: {error}");
        let bare = run(blockyard(&dir.0).args(["check", path]));
        assert_eq!(bare.0, 3, "{text}: {}", bare.2);
    }
}

#[test]
fn a_command_runs_while_the_yard_is_served() {
    let dir = Dir::new("run");
    let device = "null:///d?size=1M";
    let ask = format!(
        "echo \"$uri|$exportname|$nbd|$port\"; test -S \"$unixsocket\" && {} list; exit 7",
        env!("CARGO_BIN_EXE_blockyard")
    );
    let (code, out, error) = run(blockyard(&dir.0).args(["serve", device, "--run", &ask]));
    assert_eq!(code, 7, "{error}");
    let mut lines = out.lines();
    let said: Vec<_> = lines.next().unwrap().split('|').collect();
    let socket = said[0].strip_prefix("nbd+unix:///d?socket=").unwrap();
    assert_eq!(said[1..], ["d", &format!("nbd:unix:{socket}:exportname=d"), ""]);
    assert_eq!(out.lines().count(), 3, "{out}");
    assert!(!Path::new(socket).parent().unwrap().exists(), "{socket} is left");
    let (code, _, _) = run(blockyard(&dir.0).args(["serve", device, "--run", "kill -TERM $$"]));
    assert_eq!(code, 143);
    let nbd = ["serve", device, "--nbd", "tcp:127.0.0.1:0", "--run", "echo $port"];
    let (code, out, _) = run(blockyard(&dir.0).args(nbd));
    assert!(code == 0 && out.trim().parse::<u16>().is_ok_and(|port| port > 0), "{out}");
}

#[test]
fn a_command_has_the_limit_of_files_that_the_server_was_started_with() {
    // The server raises its own limit to the greatest, and the command inherited that.
    let dir = Dir::new("limit");
    let script = "ulimit -S -n 200 && exec \"$0\" serve 'null:///d?size=1M' \
                  --run 'ulimit -S -n; ulimit -H -n'";
    let hard = run(Command::new("/bin/sh").args(["-c", "ulimit -H -n"])).1;
    let mut limited = Command::new("/bin/sh");
    limited.env("XDG_RUNTIME_DIR", &dir.0).args(["-c", script, env!("CARGO_BIN_EXE_blockyard")]);
    let (code, out, error) = run(&mut limited);
    assert_eq!((code, out), (0, format!("200\n{hard}")), "{error}");
}

#[test]
fn stdio_carries_nbd_and_nothing_else() {
    let dir = Dir::new("stdio");
    let mut child = blockyard(&dir.0)
        .args(["serve", "null:///d?size=1M", "--nbd", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut greeting = [0; 18];
    output.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    let mut input = child.stdin.take().unwrap();
    // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME for the default export.
    input.write_all(&3_u32.to_be_bytes()).unwrap();
    input.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    let mut export = [0; 10];
    output.read_exact(&mut export).unwrap();
    assert_eq!(u64::from_be_bytes(export[..8].try_into().unwrap()), 1 << 20);
    // The client leaves, and the server ends.
    drop(input);
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_silent_client_on_stdio_holds_up_no_end() {
    let dir = Dir::new("stdio-silent");
    for entered in [false, true] {
        let mut child = blockyard(&dir.0)
            .args(["serve", "null:///d?size=1M", "--nbd", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut input = child.stdin.take().unwrap();
        output.read_exact(&mut [0; 18]).unwrap();
        if entered {
            input.write_all(&3_u32.to_be_bytes()).unwrap();
            input.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
            output.read_exact(&mut [0; 10]).unwrap();
        }
        let kill = format!("kill -TERM {}", child.id());
        assert!(Command::new("/bin/sh").args(["-c", &kill]).status().unwrap().success());
        // Its input stays open all the while.
        let mut rest = Vec::new();
        output.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{entered}");
        drop(input);
    }
}

#[test]
fn sockets_of_systemd_are_served_and_systemd_is_notified() {
    let dir = Dir::new("systemd");
    let notify = dir.0.join("notify");
    let told = UnixDatagram::bind(&notify).unwrap();
    let place = dir.0.join("passed.sock");
    let listener = UnixListener::bind(&place).unwrap();
    // Standard input is the socket, and becomes descriptor 3 of the process that LISTEN_PID names.
    let script =
        "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" serve 'null:///d?size=1M' 3<&0 0</dev/null";
    let mut command = Command::new("/bin/sh");
    command.env("XDG_RUNTIME_DIR", &dir.0).env("NOTIFY_SOCKET", &notify);
    command.args(["-c", script, env!("CARGO_BIN_EXE_blockyard")]);
    command.stdin(Stdio::from(OwnedFd::from(listener))).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let mut message = [0; 1024];
    let mut next = || {
        let length = told.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let ready = next();
    assert!(ready.contains("READY=1") && ready.contains("STATUS=serving 1 device "), "{ready}");
    let mut greeting = [0; 18];
    UnixStream::connect(&place).unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    let pid = child.id();
    assert!(
        Command::new("/bin/sh").args(["-c", &format!("kill {pid}")]).status().unwrap().success()
    );
    assert!(next().contains("STOPPING=1"));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn descriptors_that_systemd_cannot_have_passed_are_refused() {
    let serve = "exec \"$0\" serve 'null:///d?size=1M' 3</dev/null";
    for (count, why) in [
        ("1", "LISTEN_FDS: descriptor 3 is no listening socket"),
        ("300", "LISTEN_FDS: Bad file descriptor"),
        ("x", "LISTEN_FDS: invalid LISTEN_FDS"),
    ] {
        let script = format!("LISTEN_PID=$$ LISTEN_FDS={count} {serve}");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_blockyard")]).stdin(Stdio::null());
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(why), "{count}: {error}");
        assert_eq!(output.status.code(), Some(1), "{count}: {error}");
    }
}

#[test]
fn the_pidfile_is_there_while_the_yard_is_served() {
    let dir = Dir::new("pidfile");
    let pidfile = dir.0.join("pid");
    let path = pidfile.to_str().unwrap().to_owned();
    let mut served = Served::start("pid", &["null:///d?size=1M", "--pidfile", &path]);
    let pid = std::fs::read_to_string(&pidfile).unwrap();
    assert_eq!(pid, format!("{}\n", served.child.id()));
    served.signal("TERM");
    served.child.wait().unwrap();
    assert!(!pidfile.exists());
}

#[test]
fn a_second_signal_leaves_no_files() {
    let dir = Dir::new("second");
    let file = |name: &str| dir.0.join(name).to_str().unwrap().to_owned();
    let (socket, control, pidfile) = (file("nbd"), file("control"), file("pid"));
    let mut child = blockyard(&dir.0)
        .args(["serve", "null:///d?size=1M", "-U", &socket, "--control", &control])
        .args(["--pidfile", &pidfile, "--log", "info", "--run"])
        .arg("trap '' TERM; echo ready >&2; read line")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut wait = |what: &str| log.any(|line| line.unwrap().contains(what));
    let kill = format!("kill -TERM {}", child.id());
    assert!(wait("ready"));
    assert!([&socket, &control, &pidfile].iter().all(|path| Path::new(path).exists()));
    assert!(Command::new("/bin/sh").args(["-c", &kill]).status().unwrap().success());
    assert!(wait("ending"));
    assert!(Command::new("/bin/sh").args(["-c", &kill]).status().unwrap().success());
    // The command goes on as long as it can read: only the signal can have ended the program.
    let reads = child.stdin.take();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    drop(reads);
    assert!(![&socket, &control, &pidfile].iter().any(|path| Path::new(path).exists()));
}

#[test]
fn the_server_ends_with_its_parent() {
    let dir = Dir::new("parent");
    // The shell starts the server, waits for its first line and ends; with it the server.
    let script = "mkfifo \"$1/out\" && \
                  { \"$0\" serve 'null:///d?size=1M' --json --exit-with-parent \
                  --nbd \"unix:$1/nbd.sock\" > \"$1/out\" & } && \
                  read line < \"$1/out\" && echo started";
    let mut shell = Command::new("/bin/sh");
    shell.env("XDG_RUNTIME_DIR", &dir.0).args(["-c", script]);
    shell.arg(env!("CARGO_BIN_EXE_blockyard")).arg(&dir.0);
    // The server holds the pipe of standard error open; its end is the server's.
    let mut child = shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "started\n");
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    child.wait().unwrap();
    assert!(log.contains("ending"), "{log}");
    assert!(!dir.0.join("nbd.sock").exists());
}

#[test]
fn help_man_pages_completions_and_schema_are_made() {
    let dir = Dir::new("manual");
    let (code, help, _) = run(blockyard(&dir.0).arg("--help"));
    assert_eq!(code, 0);
    assert!(help.contains("Exit codes:") && help.contains("blockyard serve"), "{help}");
    let (code, out, _) = run(blockyard(&dir.0).args(["help-device", "null"]));
    assert_eq!(code, 0);
    assert!(out.contains("zone_max_active=N"), "{out}");
    let page = include_str!("../../../docs/cli.md");
    assert!(page.contains(&format!("```text\n{out}```")), "docs/cli.md must show this:\n{out}");
    for kind in ["smr", "ram", "volume", "file"] {
        let (_, out, _) = run(blockyard(&dir.0).args(["help-device", kind]));
        let mut own = out.split("Parameters:").skip(1);
        let own = own.next().and_then(|rest| rest.split("\nEvery kind").next());
        assert!(own.is_some_and(|own| page.contains(own)), "docs/cli.md must show this:\n{out}");
    }
    let man = |args: &[&str]| {
        run(blockyard(&dir.0).args([&["man", dir.0.to_str().unwrap()], args].concat()))
    };
    assert_eq!(man(&[]).0, 0);
    // Pages of an earlier version are replaced; a file of another program is not.
    let page = dir.0.join("blockyard-list.1");
    let written = std::fs::read_to_string(&page).unwrap();
    std::fs::write(&page, &written[..written.len() / 2]).unwrap();
    assert_eq!(man(&[]).0, 0);
    assert_eq!(std::fs::read_to_string(&page).unwrap(), written);
    std::fs::write(&page, "notes").unwrap();
    let (code, _, error) = man(&[]);
    assert!(code == 1 && error.contains("the file exists; --force replaces it"), "{error}");
    assert_eq!(std::fs::read_to_string(&page).unwrap(), "notes");
    assert_eq!(man(&["--force"]).0, 0);
    assert_eq!(std::fs::read_to_string(&page).unwrap(), written);
    let page = std::fs::read_to_string(dir.0.join("blockyard-serve.1")).unwrap();
    assert!(page.contains(".TH"), "{page}");
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = run(blockyard(&dir.0).args(["completions", shell]));
        assert!(code == 0 && out.contains("blockyard"), "{shell}");
    }
    let (code, out, _) = run(blockyard(&dir.0).arg("schema"));
    assert_eq!(code, 0);
    let schema: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(schema["type"], "object");
    // A reader that leaves early is no error.
    let command = format!("{} schema | head -n 1", env!("CARGO_BIN_EXE_blockyard"));
    let (code, out, error) = run(Command::new("/bin/sh").args(["-c", &command]));
    assert_eq!((code, out.as_str(), error.as_str()), (0, "{\n", ""));
}

/// A start with 24 or 25 file descriptors panicked, and one under `ulimit -v` panicked or aborted:
/// a start under any limit either works or says what it lacks.
#[test]
fn a_start_under_a_limit_works_or_says_what_it_lacks() {
    let dir = Dir::new("limits");
    let pool = dir.0.join("pool");
    let volume = format!("volume:///v0?path={}&size=16M", pool.display());
    let descriptors = (8..48).map(|count| format!("ulimit -n {count}"));
    let space = (1..=8).map(|step| format!("ulimit -v {}", step * 400_000));
    let mut worked = 0;
    for limit in descriptors.chain(space) {
        let mut command = Command::new("sh");
        command.env("XDG_RUNTIME_DIR", &dir.0).env("XDG_STATE_HOME", &dir.0);
        command.env_remove("BLOCKYARD_LOG").env_remove("BLOCKYARD_CONTROL");
        let line = format!("{limit}; exec \"$0\" \"$@\"");
        let serve = [env!("CARGO_BIN_EXE_blockyard"), "serve", &volume, "--run", "true"];
        let (code, _, said) = run(command.args(["-c", &line]).args(serve));
        let is_clean = !said.contains("panicked") && !said.contains("memory allocation");
        assert!(is_clean && (0..=2).contains(&code), "{limit}: {code}: {said}");
        assert!(code == 0 || said.contains("blockyard: "), "{limit}: {said}");
        worked += usize::from(code == 0);
    }
    assert!((2..48).contains(&worked), "{worked} of 48 starts worked");
}
