//! `volume move`: a volume with its snapshots goes to another pool.

use std::fs;

use crate::place::Place;
use crate::run::{nbdsh, ok};
use crate::yard::{Yard, blockyard};

/// A pool with a volume of noise and a snapshot of it. Returns the paths of the pool, of a second
/// one that is not there yet, and of the image.
fn pools(place: &Place) -> [String; 3] {
    let paths = ["one", "two", "image"].map(|name| place.file(name));
    let image = &paths[2];
    ok(&["dd", "if=/dev/urandom", &format!("of={image}"), "bs=1M", "count=4", "status=none"]);
    blockyard(&["volume", "import", &paths[0], "v0", image]).ok();
    blockyard(&["volume", "snapshot", &paths[0], "v0@first"]).ok();
    paths
}

fn names(pool: &str) -> String {
    blockyard(&["volume", "list", "-Ho", "name", "-t", "all", pool]).ok().out
}

#[test]
fn a_volume_moves_with_its_snapshots_and_properties() {
    let place = Place::new();
    let [one, two, image] = pools(&place);
    blockyard(&["volume", "set", &one, "v0", "compress=zstd:3", "reservation=2M"]).ok();
    blockyard(&["volume", "create", &one, "other", "--size", "1M"]).ok();
    let moved = blockyard(&["volume", "move", &one, "v0", &two]).ok();
    assert!(moved.out.contains("two: 1 snapshot, 4.0"), "{moved}");
    assert_eq!((names(&one), names(&two)), ("other\n".into(), "v0\nv0@first\n".into()));
    let values = blockyard(&["volume", "get", "-H", &two, "v0", "compress", "reservation"]).ok();
    assert_eq!(values.out, "v0\tcompress\tzstd:3\tpool\nv0\treservation\t2M\tpool\n");
    for name in ["v0", "v0@first"] {
        let out = place.file(&format!("{name}.raw"));
        blockyard(&["volume", "export", &two, name, &out]).ok();
        assert!(fs::read(&out).unwrap() == fs::read(&image).unwrap(), "{name} has other bytes");
    }
}

#[test]
fn an_encrypted_volume_moves_without_its_key() {
    let place = Place::new();
    let [one, two] = ["one", "two"].map(|name| place.file(name));
    let key = place.write("key", "a secret of 32 bytes or more, here of a test");
    ok(&["chmod", "600", &key]);
    let create = ["volume", "create", &one, "v0", "--size", "1M", "--encrypt", "--key-file", &key];
    blockyard(&create).ok();
    let moved = blockyard(&["volume", "move", &one, "v0", &two, "--json"]).ok().json();
    assert_eq!((&moved["name"], &moved["snapshots"]), (&"v0".into(), &0.into()));
    let uri = format!("volume:///v0?path={two}&key_file={key}");
    let yard = Yard::serve(&[&uri]);
    nbdsh(&yard.uri("v0"), "assert h.pread(4096, 0) == bytes(4096)");
}

#[test]
fn a_move_that_fails_changes_nothing() {
    let place = Place::new();
    let [one, two, _] = pools(&place);
    let both = "v0\nv0@first\n";
    let move_to = |to: &str| ["volume", "move", &one, "v0", to].map(str::to_owned);
    let run = |to: &str| {
        let line = move_to(to);
        blockyard(&line.iter().map(String::as_str).collect::<Vec<_>>()).fails()
    };
    run(&one).says(&["invalid TO", "expected another pool"]);
    blockyard(&["volume", "move", &one, "v0@first", &two]).fails().says(&["expected a volume"]);
    blockyard(&["volume", "move", &one, "none", &two]).fails().says(&["no such volume"]);
    blockyard(&["volume", "hold", &one, "keep", "v0@first"]).ok();
    run(&two).says(&["`v0@first` cannot be moved: it has a hold"]);
    blockyard(&["volume", "release", &one, "keep", "v0@first"]).ok();
    blockyard(&["volume", "clone", &one, "v0@first", "v1"]).ok();
    run(&two).says(&["`v0` cannot be moved: `v1` is a clone of it"]);
    blockyard(&["volume", "destroy", &one, "v1"]).ok();
    assert!(!fs::exists(&two).unwrap(), "a refused move made a pool");

    blockyard(&["volume", "create", &two, "v0", "--size", "1M"]).ok();
    run(&two).says(&["has a volume of this name"]);
    blockyard(&["volume", "destroy", &two, "v0"]).ok();
    // The reservation does not fit, which is found when all has been copied.
    let small = place.file("small");
    ok(&["truncate", "-s", "80M", &small]);
    blockyard(&["volume", "create", &small, "v1", "--size", "1M", "--force"]).ok();
    blockyard(&["volume", "resize", &one, "v0", "--size", "200M"]).ok();
    blockyard(&["volume", "set", &one, "v0", "reservation=200M"]).ok();
    run(&small).says(&["reservation"]);
    assert_eq!((names(&one), names(&small)), (both.into(), "v1\n".into()));
}

/// Both pools are those of a yard.
#[test]
fn a_volume_of_a_yard_moves_when_it_is_no_device() {
    let place = Place::new();
    let [one, two, _] = pools(&place);
    let uri = |name: &str, pool: &str| format!("volume:///{name}?path={pool}");
    let first = [uri("v0", &one), format!("{}&size=1M", uri("a", &one))];
    let yard = Yard::serve(&[&first[0], &first[1], &format!("{}&size=1M", uri("b", &two))]);
    let moving = ["volume", "move", &one, "v0", &two];
    yard.command(&moving).fails().says(&["`v0` cannot be moved: it is a device"]);
    nbdsh(&yard.uri("v0"), "import nbd\nh.pwrite(b'x' * 4096, 0, nbd.CMD_FLAG_FUA)");
    yard.command(&["remove", "v0"]).ok();
    yard.command(&moving).ok();
    yard.command(&["add", &uri("v0", &two)]).ok();
    nbdsh(&yard.uri("v0"), "assert h.pread(4096, 0) == b'x' * 4096");
    assert_eq!((names(&one), names(&two)), ("a\n".into(), "b\nv0\nv0@first\n".into()));
}
