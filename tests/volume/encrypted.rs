//! Encrypted volumes through the whole program: keys by files, by commands and by the control API;
//! plain text in no file of a pool, raw stream, log or core dump.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use data_encoding::BASE64;

use super::{kill, uri};
use crate::place::Place;
use crate::run::{Run, finish, nbdsh};
use crate::yard::{BLOCKYARD, Yard, blockyard};

/// Text that would be found if it were not encrypted.
const MARK: &str = "a line that only its owner reads";

/// A file of mode 0600.
fn private(place: &Place, name: &str, bytes: &[u8]) -> String {
    let path = place.file(name);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// The files below a directory that have these bytes.
fn with_bytes(directory: &Path, bytes: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(with_bytes(&path, bytes));
        } else if path.is_file()
            && blockyard_testing::position(&fs::read(&path).unwrap(), bytes).is_some()
        {
            found.push(path.display().to_string());
        }
    }
    found
}

/// The files below a directory that have the text.
fn with_mark(directory: &Path) -> Vec<String> {
    with_bytes(directory, MARK.as_bytes())
}

fn volume(line: &[&str]) -> Run {
    blockyard(&[&["volume"], line].concat())
}

#[test]
fn a_key_file_opens_it_after_a_kill_and_nothing_is_in_plain() {
    let pool = Place::new();
    let key = private(&pool, "key", &[9; 32]);
    let line = uri(&pool, "v0", &format!("&compress=none&key_file={key}"));
    let yard = Yard::serve(&[&format!("{line}&size=64M")]);
    let write = format!("h.pwrite(b'{MARK}' * 65536, 1 << 20)\nh.flush()");
    nbdsh(&yard.uri("v0"), &write);
    let said = format!("{}{}", yard.printed(), yard.complained());
    kill(yard);
    assert_eq!(with_mark(Path::new(&pool.file("pool"))), [""; 0]);
    assert!(!said.contains(MARK));
    let check = volume(&["check", &pool.file("pool"), "--json"]).ok().json();
    assert_eq!(check["damaged"], 0, "{check}");
    let yard = Yard::serve(&[&line]);
    nbdsh(&yard.uri("v0"), &format!("assert h.pread(2 << 20, 1 << 20) == b'{MARK}' * 65536"));
    let status = fs::read_to_string(format!("/proc/{}/status", yard.pid())).unwrap();
    let locked = status.lines().find(|line| line.starts_with("VmLck:")).unwrap();
    assert!(!locked.contains(" 0 kB"), "keys are in locked memory: {locked}");
    drop(yard);
    for (more, wanted) in [
        ("", "`v0` is encrypted and locked"),
        (
            &*format!("&key_file={}", private(&pool, "other", &[8; 32])),
            "cannot decrypt the key of `v0`",
        ),
        ("&key_file=/dev/null", "key_file: cannot read /dev/null"),
        (
            &*format!("&key_file={key}&passphrase_file={key}"),
            "expected either key_file or passphrase_file",
        ),
    ] {
        let refused = blockyard(&["serve", &uri(&pool, "v0", more), "--nbd", "none"]).fails();
        assert!(refused.err.contains(wanted), "{refused}");
    }
}

#[test]
fn a_server_that_dies_leaves_no_core_dump() {
    let pool = Place::new();
    let key = private(&pool, "key", &[9; 32]);
    let line = uri(&pool, "v0", &format!("&compress=none&key_file={key}&size=64M"));
    let _pattern = CorePattern::relative();
    let below = ["env", "-C", pool.path().to_str().unwrap(), "prlimit", "--core=unlimited"];
    let dies = |line: &str| {
        let mut yard = Yard::serve_below(Place::new(), &below, &[line]);
        nbdsh(&yard.uri("v0"), &format!("h.pwrite(b'{MARK}' * 65536, 1 << 20)\nh.flush()"));
        yard.signal("ABRT");
        assert!(!yard.end().success());
        fs::read_dir(pool.path())
            .unwrap()
            .filter(|entry| {
                entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("core")
            })
            .count()
    };
    assert_eq!(dies(&line), 0);
    // The search itself: a volume without encryption leaves one.
    let plain = format!("volume:///v0?path={}&size=64M&compress=none", pool.file("plain"));
    assert_eq!(dies(&plain), 1);
}

const CORE_PATTERN: &str = "/proc/sys/kernel/core_pattern";

/// The machine's pattern of core dumps, if it was changed: it is restored when this is dropped.
struct CorePattern(Option<String>);

impl CorePattern {
    /// Has core dumps written to the directory of the process that dies.
    fn relative() -> CorePattern {
        let pattern = fs::read_to_string(CORE_PATTERN).unwrap();
        if !pattern.starts_with(['/', '|']) {
            return CorePattern(None);
        }
        fs::write(CORE_PATTERN, "core").unwrap();
        CorePattern(Some(pattern))
    }
}

impl Drop for CorePattern {
    fn drop(&mut self) {
        if let Some(pattern) = &self.0 {
            fs::write(CORE_PATTERN, pattern).unwrap();
        }
    }
}

#[test]
fn neither_secrets_nor_plain_text_are_in_logs_state_pool_and_raw_streams() {
    const PASSPHRASE: &str = "battery staple horse";
    const PLAIN: &str = "a line that is not secret";
    let pool = Place::new();
    let path = pool.file("pool");
    let streams = pool.file("streams");
    fs::create_dir(&streams).unwrap();
    let key: Vec<u8> = (0x90..0xb0).collect();
    let key_file = private(&pool, "key", &key);
    let passphrase_file = private(&pool, "passphrase", PASSPHRASE.as_bytes());
    let plain = uri(&pool, "plain", "&size=16M&compress=none");
    let mut yard = Yard::serve(&["--log", "trace", &plain]);
    nbdsh(&yard.uri("plain"), &format!("h.pwrite((b'{PLAIN}' * 512)[:8192], 0)\nh.flush()"));
    let passphrase = ["--passphrase-file", &passphrase_file];
    let secrets = [
        ("v0", passphrase, "key", &key_file),
        ("v1", ["--key-file", &key_file], "passphrase", &passphrase_file),
    ];
    for (name, secret, new, new_file) in secrets {
        let with = |line: &[&str]| volume(&[line, &secret].concat()).ok();
        with(&["create", &path, name, "--size", "16M"]);
        with(&["unlock", &path, name]);
        yard.command(&["add", &uri(&pool, name, "&compress=none")]).ok();
        nbdsh(&yard.uri(name), &format!("h.pwrite(b'{MARK}' * 1024, 0)\nh.flush()"));
        let snapshot = format!("{name}@a");
        volume(&["snapshot", &path, &snapshot]).ok();
        yard.command(&["remove", name]).ok();
        volume(&["lock", &path, name]).ok();
        let stream = format!("{streams}/{name}");
        volume(&["send", "--raw", &path, &snapshot, "-o", &stream]).ok();
        with(&["change-key", &path, name, &format!("--new-{new}-file"), new_file]);
        // A request that is refused has the secret, too.
        volume(&[&["unlock", &path, name][..], &secret].concat()).fails();
    }
    let log = yard.complained();
    assert!(log.contains("change-key"), "the log has the requests: {log}");
    yard.signal("KILL");
    yard.end();
    // The folder of the yard has its logs and the state directory.
    let places = [&path, &streams, &yard.place.path().display().to_string()].map(|it| it.clone());
    let search = |bytes: &[u8]| -> Vec<String> {
        places.iter().flat_map(|place| with_bytes(Path::new(place), bytes)).collect()
    };
    // The search itself.
    assert_eq!(search(PLAIN.as_bytes()).len(), 1);
    // Bytes as `Debug` prints them.
    let listed = |bytes: &[u8]| format!("{:?}", &bytes[..16]).trim_matches(['[', ']']).to_owned();
    for (what, bytes) in [
        ("the data", MARK.as_bytes()),
        ("the passphrase", PASSPHRASE.as_bytes()),
        ("the passphrase in base64", BASE64.encode(PASSPHRASE.as_bytes()).as_bytes()),
        ("the passphrase as a list", listed(PASSPHRASE.as_bytes()).as_bytes()),
        ("the key", &key[..]),
        ("the key in base64", BASE64.encode(&key).as_bytes()),
        ("the key as a list", listed(&key).as_bytes()),
    ] {
        assert_eq!(search(bytes), [""; 0], "{what}");
    }
}

#[test]
fn a_passphrase_unlocks_a_volume_of_a_running_yard() {
    let pool = Place::new();
    let path = pool.file("pool");
    let first = private(&pool, "first", b"correct horse\n");
    let second = private(&pool, "second", b"battery staple\n");
    volume(&["create", &path, "v0", "--size", "64M", "--passphrase-file", &first]).ok();
    let shown = volume(&["show", &path, "v0"]).ok();
    assert!(shown.out.contains("aes-256-gcm, locked"), "{shown}");
    let refused = volume(&["unlock", &path, "v0", "--passphrase-file", &first]).fails();
    assert!(refused.err.contains("no yard has this pool open"), "{refused}");
    let refused = volume(&["create", &path, "v1", "--size", "64M", "--encrypt"]).fails();
    assert!(refused.err.contains("no passphrase or key"), "{refused}");
    // Another volume opens the pool.
    let yard = Yard::serve(&[&uri(&pool, "plain", "&size=16M")]);
    let add = uri(&pool, "v0", "");
    let refused = yard.command(&["add", &add]).fails();
    assert!(refused.err.contains("`v0` is encrypted and locked"), "{refused}");
    let refused = volume(&["unlock", &path, "v0", "--passphrase-file", &second]).fails();
    assert!(refused.err.contains("cannot decrypt the key of `v0`"), "{refused}");
    let mut unlock = std::process::Command::new(BLOCKYARD);
    unlock.args(["volume", "unlock", &path, "v0", "--passphrase-file", "-"]);
    unlock.stdin(fs::File::open(&first).unwrap());
    finish(&["volume", "unlock"], &mut unlock).ok();
    yard.command(&["add", &add]).ok();
    nbdsh(&yard.uri("v0"), &format!("h.pwrite(b'{MARK}' * 1024, 0)\nh.flush()"));
    let shown = volume(&["show", &path, "v0", "--json"]).ok().json();
    assert_eq!((&shown["encrypted"], &shown["locked"]), (&true.into(), &false.into()), "{shown}");
    let refused = volume(&["lock", &path, "v0"]).fails();
    assert!(refused.err.contains("`v0` is in use"), "{refused}");
    volume(&["snapshot", &path, "v0@a"]).ok();
    yard.command(&["remove", "v0"]).ok();
    // The key of an unlocked volume is changed without the old passphrase; here by a command.
    let command = "printf '%032d' 5";
    volume(&["change-key", &path, "v0", "--new-key-command", command]).ok();
    volume(&["lock", &path, "v0"]).ok();
    let refused = volume(&["send", &path, "v0@a", "-o", &pool.file("stream")]).fails();
    assert!(refused.err.contains("`v0@a` is encrypted and locked"), "{refused}");
    raw_stream_of_a_locked_volume(&pool, &path, command);
    let refused = volume(&["unlock", &path, "v0", "--passphrase-file", &first]).fails();
    assert!(refused.err.contains("cannot decrypt the key"), "{refused}");
    volume(&["unlock", &path, "v0", "--key-command", command]).ok();
    let refused = volume(&["unlock", &path, "v0", "--key-command", "exit 3"]).fails();
    assert!(refused.err.contains("`exit 3`: exit status: 3"), "{refused}");
    drop(yard);
    // Without a yard, the command that reads gets the key.
    let raw = pool.file("raw");
    let refused = volume(&["export", &path, "v0@a", &raw]).fails();
    assert!(refused.err.contains("`v0@a` is encrypted and locked"), "{refused}");
    volume(&["export", &path, "v0@a", &raw, "--key-command", command]).ok();
    assert!(fs::read(&raw).unwrap().starts_with(MARK.as_bytes()));
    volume(&[
        "change-key",
        &path,
        "v0",
        "--key-command",
        command,
        "--new-passphrase-file",
        &second,
    ])
    .ok();
    assert_eq!(with_mark(Path::new(&path)), [""; 0]);
    let yard = Yard::serve(&[&uri(&pool, "v0", &format!("&passphrase_file={second}"))]);
    nbdsh(&yard.uri("v0"), &format!("assert h.pread(4096, 4096) == b'{MARK}' * 128"));
}

/// Sends `v0@a` of a yard that does not have its key to another pool, where the key opens it.
fn raw_stream_of_a_locked_volume(pool: &Place, path: &str, key_command: &str) {
    let (stream, there, copy) = (pool.file("raw.stream"), pool.file("there"), pool.file("copy"));
    let estimate = volume(&["send", "-n", "-w", path, "v0@a"]).ok();
    assert!(estimate.out.starts_with("at most "), "{estimate}");
    volume(&["send", "--raw", path, "v0@a", "-o", &stream]).ok();
    let verified = volume(&["verify-stream", &stream]).ok();
    assert!(verified.out.contains("v0@a: complete, raw, 2 blocks"), "{verified}");
    assert!(verified.out.contains("authentic only their key can tell"), "{verified}");
    volume(&["receive", &there, "--input", &stream]).ok();
    let refused = volume(&["export", &there, "v0@a", &copy]).fails();
    assert!(refused.err.contains("`v0@a` is encrypted and locked"), "{refused}");
    let refused = volume(&["send", "--raw", "--key-command", key_command, &there, "v0@a"]).fails();
    assert!(refused.err.contains("cannot be used with"), "{refused}");
    volume(&["export", &there, "v0@a", &copy, "--key-command", key_command]).ok();
    assert!(fs::read(&copy).unwrap().starts_with(MARK.as_bytes()));
    let bytes = fs::read(&stream).unwrap();
    assert!(blockyard_testing::position(&bytes, MARK.as_bytes()).is_none());
    assert_eq!(with_mark(Path::new(&there)), [""; 0]);
    // The yard receives it, too, which sends the key slot through the control API. A second time it
    // takes the end of the stream only.
    volume(&["receive", path, "copy", "--input", &stream]).ok();
    let refused = volume(&["receive", path, "copy", "--input", &stream]).fails();
    assert!(refused.err.contains("`copy@a` is here already"), "{refused}");
    let (_, token) = refused.err.rsplit_once("--resume ").unwrap();
    let token = token.split('`').next().unwrap();
    volume(&["send", "--raw", "--resume", token, path, "-o", &stream, "--force"]).ok();
    assert!(fs::metadata(&stream).unwrap().len() < 1000);
    volume(&["receive", path, "copy", "--input", &stream]).ok();
    let locked = volume(&["export", path, "copy@a", &copy, "--force"]).fails();
    assert!(locked.err.contains("`copy@a` is encrypted and locked"), "{locked}");
}
