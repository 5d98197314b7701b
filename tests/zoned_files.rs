//! Zoned devices in files through the whole program: what clients wrote is there after a kill, and
//! limits change from start to start.

use crate::place::Place;
use crate::run::{Run, nbdsh};
use crate::yard::{Yard, blockyard};

/// Sixteen zones of a mebibyte, of which 768 KiB can be written, the first two conventional.
const ZONED: &str = "null:///z0?size=16M&zoned=1&zone_size=1M&zone_capacity=768k&zone_nr_conv=2";
/// Sectors of a zone, and how many of them can be written.
const ZONE: u64 = 2048;
const CAPACITY: u64 = 1536;

/// The device `ZONED` in files, with more parameters.
fn backed(place: &Place, more: &str) -> String {
    format!("{ZONED}&backing={}{more}", place.file("zones"))
}

/// The condition of a zone and its write pointer, counted from its start.
fn zone(yard: &Yard, number: u64) -> (String, u64) {
    let report = yard.command(&["zone", "report", "z0", "--json"]).ok().json();
    let zone = &report.as_array().unwrap()[number as usize];
    assert_eq!(zone["start"], number * ZONE, "{zone}");
    (zone["cond"].as_str().unwrap().to_owned(), zone["wptr"].as_u64().unwrap_or(0))
}

fn command(yard: &Yard, verb: &str, zone: u64) -> Run {
    let offset = (zone * ZONE).to_string();
    yard.command(&["zone", verb, "z0", "--offset", &offset, "--count", "1"])
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    assert!(!yard.end().success());
}

#[test]
fn zones_in_files_outlive_kills_and_changes_of_the_limits() {
    let place = Place::new();
    let yard = Yard::serve(&[&backed(&place, "&zone_max_open=4&zone_max_active=6")]);
    let said = yard.printed();
    let what = format!("z0: null 16M, keeps data in {}, 16 zones of 1M", place.file("zones"));
    assert!(said.contains(&what), "{said}");
    nbdsh(
        &yard.uri("z0"),
        "import random\n\
         h.pwrite(random.Random(1).randbytes(1 << 20), 0)\n\
         h.pwrite(random.Random(2).randbytes(300 << 10), 5 << 20)\n\
         h.pwrite(random.Random(3).randbytes(768 << 10), 6 << 20)\n\
         h.pwrite(random.Random(4).randbytes(8 << 10), 7 << 20)\n\
         h.pwrite(random.Random(5).randbytes(4 << 10), 8 << 20)",
    );
    command(&yard, "finish", 7).ok();
    command(&yard, "reset", 8).ok();
    command(&yard, "open", 9).ok();
    kill(yard);

    let found = |yard: &Yard| [5, 6, 7, 8, 9].map(|number| zone(yard, number));
    let expected = [
        ("closed".to_owned(), 600),
        ("full".to_owned(), CAPACITY),
        ("full".to_owned(), ZONE),
        ("empty".to_owned(), 0),
        ("empty".to_owned(), 0),
    ];
    let read = "import random\n\
         assert h.pread(1 << 20, 0) == random.Random(1).randbytes(1 << 20)\n\
         assert h.pread(300 << 10, 5 << 20) == random.Random(2).randbytes(300 << 10)\n\
         assert h.pread(768 << 10, 6 << 20) == random.Random(3).randbytes(768 << 10)\n\
         assert h.pread(8 << 10, 7 << 20) == random.Random(4).randbytes(8 << 10)\n\
         assert h.pread(4 << 10, (7 << 20) + (8 << 10)) == bytes(4 << 10)\n\
         assert h.pread(4 << 10, 8 << 20) == b'\\xff' * (4 << 10)";
    let yard = Yard::serve(&[&backed(&place, "&zone_max_open=1&zone_max_active=3")]);
    assert_eq!(found(&yard), expected);
    nbdsh(&yard.uri("z0"), read);
    command(&yard, "open", 9).ok();
    command(&yard, "open", 10).fails().says(&["ZONE_OPEN_RESOURCE", "1 zones are open already"]);
    kill(yard);

    let yard = Yard::serve(&[&backed(&place, "")]);
    assert_eq!(found(&yard), expected);
    nbdsh(&yard.uri("z0"), read);
    nbdsh(&yard.uri("z0"), "h.pwrite(bytes(4 << 10), (5 << 20) + (300 << 10))");
    assert_eq!(zone(&yard, 5), ("implicit-open".to_owned(), 608));
    drop(yard);
    assert_eq!(zone(&Yard::serve(&[&backed(&place, "")]), 5), ("closed".to_owned(), 608));
}

#[test]
fn contradictions_to_the_files_are_refused_with_their_values() {
    let place = Place::new();
    let control = place.file("other-control");
    let serve = |uri: &str| blockyard(&["serve", uri, "--nbd", "none", "--control", &control]);
    let yard = Yard::serve(&[&backed(&place, "")]);
    nbdsh(&yard.uri("z0"), "h.pwrite(b'a' * 4096, 5 << 20)\nh.pwrite(b'b' * 4096, 6 << 20)");
    let refused = serve(&backed(&place, "")).fails();
    assert_eq!(refused.code, Some(6), "{refused}");
    assert!(refused.err.contains("is in use by another process"), "{refused}");
    drop(yard);
    for (from, to, says) in [
        ("size=16M", "size=32M", "size=16777216, not size=33554432"),
        ("zone_size=1M", "zone_size=2M", "zone_size=1048576, not zone_size=2097152"),
        ("=768k", "=1M", "zone_capacity=786432, not zone_capacity=1048576"),
        ("zone_nr_conv=2", "zone_nr_conv=1", "zone_nr_conv=2, not zone_nr_conv=1"),
        ("zoned=1", "zoned=1&bs=4k", "bs=512, not bs=4096"),
        ("zoned=1", "zoned=0", "invalid zoned `0`: expected 1 with backing"),
        ("zoned=1", "zoned=1&memory_backed=1", "invalid memory_backed `1`: expected 0 with"),
        (
            "zoned=1",
            "zoned=1&zone_max_active=1",
            "invalid zone_max_active `1`: expected 0, or at least 2, the partly written zones",
        ),
    ] {
        let refused = serve(&backed(&place, "").replacen(from, to, 1)).fails();
        assert!(refused.err.contains(says), "{to}: {refused}");
    }
    // None of them has changed anything.
    assert_eq!(zone(&Yard::serve(&[&backed(&place, "")]), 5), ("closed".to_owned(), 8));
}

/// The format is one: a directory serves a zoned null device and an SMR disk of its geometry.
#[test]
fn an_smr_disk_serves_the_files_of_a_zoned_device() {
    let place = Place::new();
    let zoned = backed(&place, "");
    let smr = zoned.replace("null:///", "smr:///").replace("zoned=1&", "");
    let yard = Yard::serve(&[&zoned]);
    nbdsh(&yard.uri("z0"), "h.pwrite(b'a' * 8192, 5 << 20)\nh.pwrite(b'b' * 4096, 6 << 20)");
    command(&yard, "finish", 6).ok();
    drop(yard);
    let yard = Yard::serve(&[&smr]);
    assert_eq!(zone(&yard, 5), ("closed".to_owned(), 16));
    assert_eq!(zone(&yard, 6).0, "full");
    nbdsh(
        &yard.uri("z0"),
        "assert h.pread(8192, 5 << 20) == b'a' * 8192\nh.pwrite(b'c' * 4096, (5 << 20) + 8192)",
    );
    drop(yard);
    let yard = Yard::serve(&[&zoned]);
    assert_eq!(zone(&yard, 5), ("closed".to_owned(), 24));
    nbdsh(&yard.uri("z0"), "assert h.pread(12288, 5 << 20) == b'a' * 8192 + b'c' * 4096");
}

/// An image moves the zones of a device in files to one in memory, and back.
#[test]
fn an_image_of_zones_is_saved_and_loaded() {
    let place = Place::new();
    let memory = ZONED.replace("z0", "z1") + "&memory_backed=1";
    let yard = Yard::serve(&[&backed(&place, ""), &memory]);
    let file = place.file("image");
    let zone = |device: &str, verb: &str, more: &[&str]| {
        yard.command(&[&["zone", verb, device][..], more].concat())
    };
    let report = |device: &str| zone(device, "report", &["--json"]).ok().json();
    nbdsh(
        &yard.uri("z0"),
        "import random\n\
         h.pwrite(random.Random(1).randbytes(8 << 10), 0)\n\
         h.pwrite(random.Random(2).randbytes(300 << 10), 5 << 20)\n\
         h.pwrite(random.Random(3).randbytes(768 << 10), 6 << 20)\n\
         h.pwrite(random.Random(4).randbytes(8 << 10), 7 << 20)",
    );
    command(&yard, "finish", 7).ok();
    command(&yard, "close", 5).ok();
    let said = zone("z0", "save", &[&file]).ok().out;
    assert!(said.starts_with("z0: saved ") && said.contains(&file), "{said}");
    let line = std::fs::read(&file).unwrap();
    let line = line.split(|byte| *byte == b'\n').next().unwrap();
    let description: serde_json::Value = serde_json::from_slice(line).unwrap();
    assert_eq!(description["zone_capacity_bytes"], 768 << 10, "{description}");
    assert_eq!(description["zones"].as_array().unwrap().len(), 4, "{description}");
    zone("z1", "load", &[&file]).ok();
    assert_eq!(report("z1"), report("z0"));
    let same = "import random\n\
         assert h.pread(8 << 10, 0) == random.Random(1).randbytes(8 << 10)\n\
         assert h.pread(300 << 10, 5 << 20) == random.Random(2).randbytes(300 << 10)\n\
         assert h.pread(768 << 10, 6 << 20) == random.Random(3).randbytes(768 << 10)\n\
         assert h.pread(8 << 10, 7 << 20) == random.Random(4).randbytes(8 << 10)";
    nbdsh(&yard.uri("z1"), same);
    // What a device holds, and a file that is no image, are replaced by request only.
    zone("z1", "load", &[&file]).fails().says(&["of the device holds data; --force"]);
    let other = place.file("notes");
    std::fs::write(&other, "mine").unwrap();
    zone("z0", "save", &[&other]).fails().says(&["cannot replace", "--force"]);
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "mine");
    zone("z1", "load", &[&other, "--force"]).fails().says(&["no image of a zoned device"]);
    nbdsh(&yard.uri("z1"), same);
    yard.command(&["zone", "reset-all", "z0"]).ok();
    zone("z0", "load", &[&file, "--force"]).ok();
    assert_eq!(report("z1"), report("z0"));
    nbdsh(&yard.uri("z0"), same);
    yard.command(&["add", "null:///small?zoned=1&memory_backed=1&size=8M&zone_size=1M"]).ok();
    let refused = zone("small", "load", &[&file]).fails();
    assert!(refused.err.contains("the image has size=16777216, the device size=8388608"));
}
