//! Commands about the copies of a pool that no yard has open: an interrupted one is repeated, and
//! one whose resync fails says why.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::place::Place;
use crate::run::{bounded, ok};
use crate::yard::{BLOCKYARD, blockyard};

/// Makes a pool with data in a volume, and empty directories. Returns their paths.
fn pool<const COUNT: usize>(place: &Place, names: [&str; COUNT]) -> [String; COUNT] {
    let paths = names.map(|name| place.file(name));
    let image = place.file("image");
    ok(&["dd", "if=/dev/urandom", &format!("of={image}"), "bs=1M", "count=16", "status=none"]);
    blockyard(&["volume", "import", &paths[0], "v0", &image]).ok();
    paths[1..].iter().for_each(|path| fs::create_dir(path).unwrap());
    paths
}

/// A command that runs.
struct Running(Child);

impl Running {
    /// Starts a command that resyncs the copy at `new`, and waits until the copy has data.
    fn begin(place: &Place, mut command: Command, args: &[&str], new: &str) -> Running {
        command.args(args).env("XDG_RUNTIME_DIR", place.path()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let first = Path::new(new).join("segment-00000000");
        while !first.exists() {
            assert_eq!(child.try_wait().unwrap(), None, "{args:?} has ended");
            std::thread::yield_now();
        }
        Running(child)
    }

    /// Kills the command.
    fn kill(mut self) {
        self.0.kill().unwrap();
        assert_eq!(self.0.wait().unwrap().signal(), Some(9), "it has ended before");
    }

    /// Waits for the end of the command, which fails. Returns what it wrote to standard error.
    fn fails(self) -> String {
        let output = self.0.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        error
    }
}

fn copies(pool: &str) -> Vec<(String, String)> {
    let status = blockyard(&["pool", "status", pool, "--json"]).ok().json();
    let text = |copy: &serde_json::Value, field: &str| copy[field].as_str().unwrap().to_owned();
    let copies = status[0]["copies"].as_array().unwrap().iter();
    copies.map(|copy| (text(copy, "path"), text(copy, "state"))).collect()
}

fn good(path: &str) -> (String, String) {
    (path.to_owned(), "good".to_owned())
}

/// Regression: the command waited for ever.
#[test]
fn a_command_fails_if_the_good_copy_dies_during_the_resync() {
    let place = Place::new();
    let [a, b] = pool(&place, ["a", "b"]);
    // The files that are open can still be read: another segment cannot be opened.
    let attach = ["pool", "attach", &a, &b, "--rate", "16M"];
    let attaching = Running::begin(&place, bounded(&[BLOCKYARD]), &attach, &b);
    fs::remove_dir_all(&a).unwrap();
    let error = attaching.fails();
    let said = ["cannot resync", &b, "the next opening of the pool tries again"];
    said.iter().for_each(|it| assert!(error.contains(it), "no `{it}`: {error}"));
}

/// Regression: `pool replace` waited for the resync of a copy that had been attached, and reported
/// success, but replaced nothing.
#[test]
fn an_interrupted_command_continues_only_with_what_it_has_begun() {
    let place = Place::new();
    let [a, b, c] = pool(&place, ["a", "b", "c"]);
    let slowly = |args: &[&str], new: &str| {
        let args = [args, &["--rate", "1K"]].concat();
        Running::begin(&place, Command::new(BLOCKYARD), &args, new).kill();
    };
    slowly(&["pool", "attach", &a, &b], &b);
    let refused = blockyard(&["pool", "replace", &a, &a, &b]).fails();
    refused.says(&[&b, "is resyncing; wait for it, or detach it"]);
    blockyard(&["pool", "attach", &a, &b]).ok();
    assert_eq!(copies(&a), [good(&a), good(&b)]);
    slowly(&["pool", "replace", &a, &b, &c], &c);
    for args in [&["attach", &a, &c][..], &["replace", &a, &a, &c]] {
        blockyard(&[&["pool"], args].concat()).fails().says(&[&c, "is resyncing"]);
    }
    blockyard(&["pool", "replace", &a, &b, &c, "--rate", "1G"]).ok();
    assert_eq!(copies(&a), [good(&a), good(&c)]);
}

/// Regression: `pool resync` succeeded although the resync had failed.
#[test]
fn pool_resync_fails_if_a_copy_is_not_good() {
    let place = Place::new();
    let [a, b] = pool(&place, ["a", "b"]);
    blockyard(&["pool", "attach", &a, &b]).ok();
    let away = place.file("away");
    fs::rename(&b, &away).unwrap();
    blockyard(&["volume", "snapshot", &a, "v0@one", "--degraded"]).ok();
    let failed = blockyard(&["pool", "resync", &a]).fails();
    assert_eq!(failed.code, Some(1), "{failed}");
    failed.says(&[&format!("the copy at {b} is failed: missing")]);
    // It is back, and a segment of it cannot be made.
    fs::rename(&away, &b).unwrap();
    let segment = Path::new(&b).join("segment-00000000");
    fs::remove_file(&segment).unwrap();
    fs::create_dir(&segment).unwrap();
    let failed = blockyard(&["pool", "resync", &a]).fails();
    failed.says(&[&format!("the copy at {b} is failed: "), "segment-00000000"]);
    fs::remove_dir(&segment).unwrap();
    blockyard(&["pool", "resync", &a]).ok();
    assert_eq!(copies(&a), [good(&a), good(&b)]);
}
