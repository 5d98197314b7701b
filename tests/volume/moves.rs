//! `volume move`: a volume with its snapshots goes to another pool.

use std::fs;

use crate::place::Place;
use crate::run::{nbdsh, ok};
use crate::yard::{Yard, blockyard};

/// A pool with a volume of noise and a snapshot of it. Returns the paths of the pool, of a second
/// one that is not there yet, and of the image.
pub(super) fn pools(place: &Place) -> [String; 3] {
    let paths = ["one", "two", "image"].map(|name| place.file(name));
    let image = &paths[2];
    ok(&["dd", "if=/dev/urandom", &format!("of={image}"), "bs=1M", "count=4", "status=none"]);
    blockyard(&["volume", "import", &paths[0], "v0", image]).ok();
    blockyard(&["volume", "snapshot", &paths[0], "v0@first"]).ok();
    paths
}

pub(super) fn names(pool: &str) -> String {
    blockyard(&["volume", "list", "-Ho", "name", "-t", "all", pool]).ok().out
}

#[test]
fn a_volume_moves_with_its_snapshots_and_properties() {
    let place = Place::new();
    let [one, two, image] = pools(&place);
    blockyard(&["volume", "set", &one, "v0", "compress=zstd:3", "reservation=2M"]).ok();
    blockyard(&["volume", "create", &one, "other", "--size", "1M"]).ok();
    // A name that only looks like those of moves.
    blockyard(&["volume", "snapshot", &one, "v0@blockyard-move"]).ok();
    let moved = blockyard(&["volume", "move", &one, "v0", &two]).ok();
    assert!(moved.out.contains("two: 2 snapshots, 4.0"), "{moved}");
    let all = "v0\nv0@first\nv0@blockyard-move\n";
    assert_eq!((names(&one), names(&two)), ("other\n".into(), all.into()));
    let values = blockyard(&["volume", "get", "-H", &two, "v0", "compress", "reservation"]).ok();
    assert_eq!(values.out, "v0\tcompress\tzstd:3\tpool\nv0\treservation\t2M\tpool\n");
    for name in ["v0", "v0@first"] {
        let out = place.file(&format!("{name}.raw"));
        blockyard(&["volume", "export", &two, name, &out]).ok();
        assert!(fs::read(&out).unwrap() == fs::read(&image).unwrap(), "{name} has other bytes");
    }
}

/// A key file of a test.
fn key(place: &Place, name: &str) -> String {
    let key =
        place.write(name, &format!("a secret of 32 bytes or more, here the {name} of a test"));
    ok(&["chmod", "600", &key]);
    key
}

#[test]
fn an_encrypted_volume_moves_without_its_key() {
    let place = Place::new();
    let [one, two] = ["one", "two"].map(|name| place.file(name));
    let key = key(&place, "key");
    let uri = |pool: &str, name: &str| format!("volume:///{name}?path={pool}&key_file={key}");
    let mut yard = Yard::serve(&[&format!("{}&size=8M&compress=none", uri(&one, "v0"))]);
    nbdsh(&yard.uri("v0"), "h.pwrite(b'first' * 4096, 4096)\nh.flush()");
    yard.command(&["volume", "snapshot", &one, "v0@first"]).ok();
    nbdsh(&yard.uri("v0"), "h.pwrite(b'later' * 4096, 8192)\nh.flush()");
    yard.signal("TERM");
    assert!(yard.end().success());
    let moved = blockyard(&["volume", "move", &one, "v0", &two, "--json"]).ok().json();
    assert_eq!((&moved["name"], &moved["snapshots"]), (&"v0".into(), &1.into()));
    assert_eq!(names(&one), "");
    // The snapshot as a volume of its own.
    blockyard(&["volume", "clone", &two, "v0@first", "v1"]).ok();
    let yard = Yard::serve(&[&uri(&two, "v0"), &uri(&two, "v1")]);
    let first = "first = bytes(4096) + b'first' * 4096 + bytes(8192)\n";
    nbdsh(&yard.uri("v1"), &format!("{first}assert h.pread(len(first), 0) == first"));
    nbdsh(
        &yard.uri("v0"),
        &format!(
            "{first}later = first[:8192] + b'later' * 4096 + first[8192 + 5 * 4096:]\n\
             assert h.pread(len(later), 0) == later"
        ),
    );
}

/// Regression: the volume was moved, and opened only by the older secret of another volume there.
#[test]
fn an_encrypted_volume_does_not_move_to_its_key_with_another_secret() {
    let place = Place::new();
    let [one, two] = ["one", "two"].map(|name| place.file(name));
    let (key, other) = (key(&place, "key"), key(&place, "other"));
    let create = ["volume", "create", &one, "v0", "--size", "1M", "--encrypt", "--key-file", &key];
    blockyard(&create).ok();
    blockyard(&["volume", "snapshot", &one, "v0@sent"]).ok();
    let stream = place.file("stream");
    blockyard(&["volume", "send", "-w", &one, "v0@sent", "-o", &stream]).ok();
    blockyard(&["volume", "receive", &two, "copy", "--input", &stream]).ok();
    let change = ["volume", "change-key", &one, "v0", "--key-file", &key, "--new-key-file", &other];
    blockyard(&change).ok();
    let refused = blockyard(&["volume", "move", &one, "v0", &two]).fails();
    refused.says(&["`v0` cannot be moved", "has its key already", "another passphrase or key"]);
    assert_eq!((names(&one), names(&two)), ("v0\nv0@sent\n".into(), "copy\ncopy@sent\n".into()));
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
    let inside = format!("{}/pool", place.write("file--take-over.txt", "no directory"));
    run(&inside).says(&["file--take-over.txt/pool"]);
    blockyard(&["volume", "move", &one, "v0@first", &two]).fails().says(&["expected a volume"]);
    blockyard(&["volume", "move", &one, "none", &two]).fails().says(&["no such volume"]);
    blockyard(&["volume", "move", &one, "none", &two]).fails().says(&["note:", "has no volume"]);
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
    // The reservation does not fit, which is found before anything is copied.
    let small = place.file("small");
    ok(&["truncate", "-s", "80M", &small]);
    blockyard(&["volume", "create", &small, "v1", "--size", "1M", "--force"]).ok();
    blockyard(&["volume", "resize", &one, "v0", "--size", "200M"]).ok();
    blockyard(&["volume", "set", &one, "v0", "reservation=200M"]).ok();
    run(&small).says(&["reservation"]);
    assert_eq!((names(&one), names(&small)), (both.into(), "v1\n".into()));
}

/// Regression: the error advised to destroy the volume, which was the only one.
#[test]
fn the_two_directories_of_a_pool_are_one_pool() {
    let place = Place::new();
    let [one, two, _] = pools(&place);
    fs::create_dir(&two).unwrap();
    blockyard(&["pool", "attach", &one, &two]).ok();
    let refused = blockyard(&["volume", "move", &one, "v0", &two]).fails();
    assert_eq!(refused.code, Some(2), "{refused}");
    refused.says(&["invalid TO", "expected another pool"]);
    let served = format!("volume:///a?path={one}&size=1M");
    let yard = Yard::serve(&[&served]);
    let refused = yard.command(&["volume", "move", &one, "v0", &two]).fails();
    refused.says(&["invalid TO", "expected another pool"]);
    drop(yard);
    assert_eq!(names(&one), "a\nv0\nv0@first\n");
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

/// A yard has one of the pools open, and no process the other one.
#[test]
fn a_volume_moves_out_of_a_yard_and_into_it() {
    let place = Place::new();
    let [one, two, image] = pools(&place);
    let yard = Yard::serve(&[&format!("volume:///a?path={one}&size=1M")]);
    yard.command(&["volume", "move", &one, "v0", &two]).ok();
    assert_eq!((names(&one), names(&two)), ("a\n".into(), "v0\nv0@first\n".into()));
    yard.command(&["volume", "move", &two, "v0", &one]).ok();
    assert_eq!((names(&one), names(&two)), ("a\nv0\nv0@first\n".into(), String::new()));
    let out = place.file("out");
    yard.command(&["volume", "export", &one, "v0", &out]).ok();
    assert!(fs::read(&out).unwrap() == fs::read(&image).unwrap());
}
