//! `volume set` and `volume get`, of a device in use, and after a kill.

use serde_json::json;

use super::{kill, uri};
use crate::place::Place;
use crate::run::{Run, nbdsh, ok};
use crate::yard::{BLOCKYARD, Yard, blockyard};

/// A pool whose volume `v0` is changed and looked at.
struct Pool {
    place: Place,
    path: String,
}

impl Pool {
    fn new() -> Pool {
        let place = Place::new();
        let path = place.file("pool");
        Pool { place, path }
    }

    fn volume(&self, verb: &str, rest: &[&str]) -> Run {
        blockyard(&[&["volume", verb, &self.path, "v0"][..], rest].concat())
    }

    /// The value of a property, and its source.
    fn get(&self, name: &str) -> (String, serde_json::Value) {
        let said = self.volume("get", &[name, "--json"]).ok().json();
        (said[0]["value"].as_str().unwrap().to_owned(), said[0]["source"].clone())
    }

    /// The stored length of the blocks of the volume.
    fn refer(&self) -> u64 {
        let list = ["volume", "list", &self.path, "-Hp", "-o", "refer", "-t", "volume"];
        blockyard(&list).ok().out.trim().parse().unwrap()
    }
}

fn is(value: &str, source: &str) -> (String, serde_json::Value) {
    (value.to_owned(), json!(source))
}

#[test]
fn properties_of_a_device_in_use_apply_at_once_and_survive_a_kill() {
    let pool = Pool::new();
    let (path, get) = (&pool.path, |name: &str| pool.get(name));
    let volume = |verb: &str, rest: &[&str]| pool.volume(verb, rest);
    let yard = Yard::serve(&[&uri(&pool.place, "v0", "&size=64M&bandwidth=1G")]);
    assert_eq!((get("compress"), get("bandwidth")), (is("lz4", "default"), is("1G", "device")));
    // A client that stays connected: its later blocks are stored as they are.
    let script = format!(
        "import subprocess\n\
         h.pwrite(b'a' * (1 << 20), 0)\nh.flush()\n\
         line = ['{BLOCKYARD}', 'volume', 'set', '{path}', 'v0', 'compress=none', 'iops=50000', \
                 'sync=disabled', 'reservation=16M', 'bandwidth=2G']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 0, run\n\
         assert b'of v0; at the next start the device has bandwidth of its' in run.stdout, run\n\
         h.pwrite(b'a' * (1 << 20), 1 << 20)\nh.flush()\n\
         line = line[:5] + ['read_only=1', 'compress=lz4']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 6 and b'it has 1 client' in run.stderr, run\n\
         h.pwrite(b'a' * 4096, 4 << 20)"
    );
    nbdsh(&yard.uri("v0"), &script);
    assert_eq!(pool.refer(), (256 << 10) + (1 << 20) + (16 << 10));
    assert_eq!((get("compress"), get("read_only")), (is("none", "pool"), is("0", "default")));
    assert_eq!((get("iops"), get("bandwidth")), (is("50000", "pool"), is("2G", "pool")));
    // All or nothing.
    let refused = volume("set", &["compress=zstd", "reservation=128M"]).fails();
    assert!(refused.err.contains("invalid reservation `128M`"), "{refused}");
    for (pair, text) in [
        ("copies=2", "invalid property `copies`: expected one of compress, sync, iops,"),
        ("iops=x", "invalid iops `x`: expected a number"),
        ("iops", "invalid KEY=VALUE `iops`: expected KEY=VALUE"),
    ] {
        let refused = volume("set", &["compress=zstd", pair]).fails();
        assert!(refused.err.contains(text), "{refused}");
    }
    assert_eq!(get("compress"), is("none", "pool"));
    // Without a client the device is opened again.
    volume("set", &["read_only=1"]).ok();
    assert!(ok(&["nbdinfo", &yard.uri("v0")]).contains("is_read_only: true"));
    let script = "try:\n\th.pwrite(b'b' * 4096, 0)\n\tassert False\n\
                  except nbd.Error as error:\n\tassert error.errno == 'EPERM', error";
    nbdsh(&yard.uri("v0"), &format!("import nbd\nh.set_strict_mode(0)\n{script}"));
    kill(yard);
    // The log has the changes, and after the next opening the catalogue.
    for _ in 0..2 {
        assert_eq!((get("compress"), get("sync")), (is("none", "pool"), is("disabled", "pool")));
        assert_eq!((get("iops"), get("bandwidth")), (is("50000", "pool"), is("2G", "pool")));
        assert_eq!((get("reservation"), get("read_only")), (is("16M", "pool"), is("1", "pool")));
        let yard = Yard::serve(&[&uri(&pool.place, "v0", "")]);
        assert!(ok(&["nbdinfo", &yard.uri("v0")]).contains("is_read_only: true"));
        drop(yard);
    }
    let shown = volume("set", &["read_only=0", "compress=lz4"]).ok().out;
    assert_eq!(shown, "set compress=lz4 read_only=0 of v0\n");
}

#[test]
fn a_parameter_of_the_device_takes_effect_in_place_of_the_property() {
    let pool = Pool::new();
    let (path, get) = (&pool.path, |name: &str| pool.get(name));
    let volume = |verb: &str, rest: &[&str]| pool.volume(verb, rest);
    volume("create", &["--size", "64M"]).ok();
    volume("set", &["compress=zstd", "sync=disabled"]).ok();
    let yard = Yard::serve(&[&uri(&pool.place, "v0", "&compress=none&sync=always")]);
    assert_eq!((get("compress"), get("sync")), (is("none", "device"), is("always", "device")));
    nbdsh(&yard.uri("v0"), "h.pwrite(b'c' * (1 << 20), 8 << 20)");
    assert_eq!(pool.refer(), 1 << 20);
    let held = format!(
        "import subprocess\n\
         line = ['{BLOCKYARD}', 'volume', 'set', '{path}', 'v0', 'sync=standard']\n\
         run = subprocess.run(line, capture_output=True)\n\
         assert run.returncode == 6 and b'it has 1 client' in run.stderr, run"
    );
    nbdsh(&yard.uri("v0"), &held);
    volume("set", &["sync=standard"]).ok();
    assert_eq!(get("sync"), is("standard", "pool"));
    let snapshot = blockyard(&["volume", "set", path, "v0@a", "iops=1"]).fails();
    assert!(snapshot.err.contains("v0@a"), "{snapshot}");
}
