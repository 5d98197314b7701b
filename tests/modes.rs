//! Only the owner can access the files, directories and sockets that the program makes; and what an
//! unprivileged user learns of features that need more rights.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::path::{Path, PathBuf};

use crate::place::Place;
use crate::run::{bounded, finish, nbdsh, run};
use crate::user::NOBODY;
use crate::yard::{BLOCKYARD, Yard};

/// The files in the folder that belong to the test harness: its notification socket and the
/// server's output.
const HARNESS: [&str; 3] = ["notices", "out", "err"];

/// The files that must exist.
const MADE: [&str; 16] = [
    "blockyard/nbd.sock",
    "blockyard/control.sock",
    "blockyard/vol0/superblock",
    "metrics.sock",
    "pid",
    "yard.toml",
    "pools/pool/lock",
    "smr/disk/journal",
    "zones/live.00",
    "backing",
    "trace",
    "saved",
    "dictionary",
    "stream",
    "image",
    "image.qcow2",
];

/// The user that the tests run as.
fn own_user() -> u32 {
    fs::metadata("/proc/self").unwrap().uid()
}

/// Collects everything below a folder, without following links.
fn below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.symlink_metadata().unwrap().is_dir() {
            below(&path, found);
        }
        found.push(path);
    }
}

/// Runs the program with a umask of 000, uses each command that makes a file, and checks what
/// exists. `user` is a prefix for each command line.
fn everything_is_its_owners_alone(user: &[&str], owner: u32) {
    let (place, tools) = (Place::new(), Place::new());
    // The folder in which cargo builds may be accessible to root only. Another process copies the
    // program: if this process wrote the copy, a child that another test starts at that moment
    // would inherit the open descriptor, and exec would fail.
    let program = tools.file("blockyard");
    run(&["cp", BLOCKYARD, &program]).ok();
    let folder = place.path().to_owned();
    chown(place.path(), Some(owner), Some(owner)).unwrap();
    let open = ["sh", "-c", "umask 000; exec \"$0\" \"$@\""];
    let prefix = [user, &open].concat();
    let file = |name: &str| folder.join(name).display().to_string();
    let control = file("blockyard/control.sock");
    let command = |args: &[&str]| {
        let line = [&prefix[..], &[&program], args].concat();
        let mut command = bounded(&line);
        command.env("XDG_RUNTIME_DIR", file("")).env("XDG_STATE_HOME", file(""));
        command.env("BLOCKYARD_CONTROL", &control);
        finish(&line, &mut command).ok();
    };
    let (yard_toml, pool, trace) = (file("yard.toml"), file("pools/pool"), file("trace"));
    command(&["init", &yard_toml]);
    let devices = [
        format!("volume:///v?path={pool}&size=64M"),
        format!("smr:///s?size=64M&zone_size=16M&backing={}", file("smr/disk")),
        format!("null:///z?zoned=1&size=64M&zone_size=16M&backing={}", file("zones")),
        format!("ram:///r?size=8M&backing={}", file("backing")),
        format!("null:///t?size=1M&memory_backed=1&trace={trace}"),
    ];
    let (pidfile, metrics) = (file("pid"), format!("unix:{}", file("metrics.sock")));
    let mut line = vec!["serve", "-c", &yard_toml, "--pidfile", &pidfile, "--metrics", &metrics];
    line.extend(devices.iter().map(String::as_str));
    let (snapshot, send) = (file("saved"), file("stream"));
    let (raw, qcow2, dictionary) = (file("image"), file("image.qcow2"), file("dictionary"));
    let yard = Yard::start_below(place, &prefix, &program, &line);
    let uri = format!("nbd+unix:///r?socket={}", file("blockyard/nbd.sock"));
    // A dictionary is trained on blocks that differ.
    let fill = "import os\nfor i in range(256): h.pwrite(os.urandom(64) * 64, i * 4096)";
    nbdsh(&uri, fill);
    command(&["ram", "save", "r", &snapshot]);
    command(&["ram", "train", "r", &dictionary]);
    command(&["ram", "writeback", "r"]);
    command(&["volume", "snapshot", &pool, "v@a"]);
    command(&["volume", "send", &pool, "v@a", "-o", &send]);
    command(&["volume", "export", &pool, "v@a", &raw]);
    command(&["volume", "export", &pool, "v@a", &qcow2]);
    check(&folder, owner);
    drop(yard);
}

/// Lists everything below a folder, and fails if a file is missing or another user has access to
/// one.
fn check(folder: &Path, owner: u32) {
    let mut found = Vec::new();
    below(folder, &mut found);
    found.sort();
    let mut seen = String::new();
    let mut wrong = Vec::new();
    for path in &found {
        let name = path.strip_prefix(folder).unwrap().display().to_string();
        if HARNESS.contains(&name.as_str()) {
            continue;
        }
        let metadata = path.symlink_metadata().unwrap();
        let kind = metadata.file_type();
        let most = if kind.is_dir() { 0o700 } else { 0o600 };
        let letter = match () {
            () if kind.is_dir() => 'd',
            () if kind.is_socket() => 's',
            () => '-',
        };
        let mode = metadata.mode() & 0o7777;
        seen += &format!("{letter} {mode:04o} {} {name}\n", metadata.uid());
        if mode != most || metadata.uid() != owner {
            wrong.push(name);
        }
    }
    println!("{seen}");
    assert!(wrong.is_empty(), "{wrong:?} are not their owner's alone:\n{seen}");
    for name in MADE {
        assert!(folder.join(name).symlink_metadata().is_ok(), "no {name}:\n{seen}");
    }
}

/// The bug: with a umask of 000, pools had mode 0644 in directories of 0755, the files of `smr
/// backing=` and traces 0666 and the NBD socket 0777. Any local user could read and write every
/// volume.
#[test]
fn files_made_by_root_with_umask_000_are_private() {
    everything_is_its_owners_alone(&[], own_user());
}

/// The test above as a user without privileges.
#[test]
fn files_made_by_a_user_with_umask_000_are_private() {
    if own_user() != 0 {
        // The test above has already run as this user.
        return;
    }
    let id = NOBODY.to_string();
    let user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"];
    everything_is_its_owners_alone(&user, NOBODY);
}

/// A user without privileges learns which right a refused feature needs.
#[test]
fn refusals_name_the_right_that_a_user_lacks() {
    if own_user() != 0 {
        // Only root can become another user, and make nodes of devices.
        return;
    }
    let (place, tools) = (Place::new(), Place::new());
    let program = tools.file("blockyard");
    run(&["cp", BLOCKYARD, &program]).ok();
    chown(place.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    // A loop device and a SCSI disk, which are root's alone.
    let (disk, drive) = (tools.file("disk"), tools.file("drive"));
    run(&["mknod", "--mode=600", &disk, "b", "7", "0"]).ok();
    run(&["mknod", "--mode=600", &drive, "c", "21", "0"]).ok();
    let id = NOBODY.to_string();
    let user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"];
    let (file, smr) = (format!("file:///f?path={disk}"), format!("smr:///s?device={drive}"));
    let refused: [(&[&str], &str); 4] = [
        (&["null:///n?size=1M", "--nbd", "tcp:127.0.0.1:1"], "CAP_NET_BIND_SERVICE"),
        (&["null:///n?size=1M", "--nvme", "tcp:127.0.0.1:1"], "CAP_NET_BIND_SERVICE"),
        (&[&file], "group"),
        (&[&smr], "CAP_SYS_RAWIO"),
    ];
    for (args, right) in refused {
        let line = [&user[..], &[&program, "serve"], args].concat();
        let mut command = bounded(&line);
        command.env("XDG_RUNTIME_DIR", place.path()).env("XDG_STATE_HOME", place.path());
        finish(&line, &mut command).fails().says(&["Permission denied", right]);
    }
}
