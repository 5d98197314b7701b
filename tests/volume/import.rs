//! `volume import` against images that qemu-img and qemu-io have written.

use std::fs;

use super::uri;
use crate::place::Place;
use crate::run::{Run, ok, run};
use crate::yard::{Yard, blockyard};

/// A raw image with data of several kinds between holes.
fn raw_image(place: &Place) -> String {
    let path = place.file("disk.raw");
    let script = format!(
        "import random\n\
         r = random.Random(5)\n\
         with open('{path}', 'wb') as f:\n\
         \tf.truncate((9 << 20) + 1536)\n\
         \tfor at, len in ((0, 1000), (70000, 200000), (3 << 20, 1 << 20), (9 << 20, 1536)):\n\
         \t\tf.seek(at)\n\
         \t\tf.write(r.randbytes(len // 2) + b'text' * (len // 8))\n"
    );
    ok(&["python3", "-c", &script]);
    path
}

fn import(place: &Place, args: &[&str]) -> Run {
    blockyard(&[&["volume", "import", &place.file("pool")][..], args].concat())
}

/// Imports an image and compares the volume with it.
fn comes_in_whole(place: &Place, name: &str, format: &str, file: &str, more: &[&str]) {
    let said = import(place, &[&[name, file, "--json"][..], more].concat()).ok().json();
    assert_eq!((&said["name"], &said["format"]), (&name.into(), &format.into()), "{said}");
    let out = place.file("out.raw");
    blockyard(&["volume", "export", &place.file("pool"), name, &out, "--force"]).ok();
    ok(&["qemu-img", "compare", "-f", "raw", "-F", format, &out, file]);
    // Zeros take no space: data of less than 2 MiB, rounded to blocks.
    let data = said["data_bytes"].as_u64().unwrap();
    assert!((1 << 20..3 << 20).contains(&data), "{said}");
}

#[test]
fn images_of_every_kind_come_in_whole() {
    let place = Place::new();
    let raw = raw_image(&place);
    comes_in_whole(&place, "raw", "raw", &raw, &["--volblocksize", "4k"]);
    for (name, options) in [
        ("v2", &["-o", "compat=0.10"][..]),
        ("v3", &[]),
        ("small", &["-o", "cluster_size=512"]),
        ("large", &["-o", "cluster_size=2M"]),
        ("zlib", &["-c"]),
        ("zlib-v2", &["-c", "-o", "compat=0.10,cluster_size=4k"]),
        ("zstd", &["-c", "-o", "compression_type=zstd"]),
        ("subclusters", &["-o", "extended_l2=on,cluster_size=128k"]),
        ("packed-subclusters", &["-c", "-o", "extended_l2=on,cluster_size=16k"]),
        ("whole", &["-S", "0", "-o", "preallocation=metadata"]),
    ] {
        let file = place.file(&format!("{name}.qcow2"));
        let convert = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2"];
        ok(&[&convert[..], options, &[&raw, &file]].concat());
        comes_in_whole(&place, name, "qcow2", &file, &[]);
    }
    let pool = place.file("pool");
    let names = blockyard(&["volume", "list", "-Hp", "-o", "name,size", &pool]).ok().out;
    assert_eq!(names.lines().count(), 11, "no snapshot stays: {names}");
    assert!(names.contains("raw\t9441280\n"), "rounded up to blocks of 4 KiB: {names}");
    let refused = import(&place, &["raw", &raw]).fails();
    assert!(refused.err.contains("`raw`"), "{refused}");
}

/// A chain of three files, with clusters of zeros and a disk that is longer than its base.
fn chain(place: &Place) -> String {
    let (base, middle, top) =
        (raw_image(place), place.file("middle.qcow2"), place.file("top.qcow2"));
    let create = ["qemu-img", "create", "-q", "-f", "qcow2"];
    ok(&[&create[..], &["-b", &base, "-F", "raw", &middle, "12M"]].concat());
    let writes = ["-c", "write -P 7 64k 100k", "-c", "write -z 3M 128k", "-c", "write -P 8 10M 4k"];
    ok(&[&["qemu-io", "-f", "qcow2"][..], &writes, &[&middle]].concat());
    let more = ["-o", "extended_l2=on,cluster_size=64k", &top, "16M"];
    ok(&[&create[..], &["-b", "middle.qcow2", "-F", "qcow2"], &more].concat());
    let writes =
        ["-c", "write -P 9 66k 3k", "-c", "write -z 3200k 32k", "-c", "write -P 1 15M 10k"];
    ok(&[&["qemu-io", "-f", "qcow2"][..], &writes, &[&top]].concat());
    top
}

#[test]
fn a_chain_of_three_comes_in_whole_and_backing_files_only_as_permitted() {
    let place = Place::new();
    let top = chain(&place);
    comes_in_whole(&place, "top", "qcow2", &top, &[]);
    let refused = import(&place, &["none", &top, "--backing", "none"]).fails();
    let text = "it has the backing file `middle.qcow2`, and --backing none permits none";
    assert!(refused.err.contains(text), "{refused}");
    // An image of unknown origin names a file of this machine.
    fs::create_dir(place.file("in")).unwrap();
    let taken = place.file("in/taken.qcow2");
    let create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw"];
    ok(&[&create[..], &["-b", &place.file("disk.raw"), &taken]].concat());
    let refused = import(&place, &["taken", &taken]).fails();
    assert!(refused.err.contains("disk.raw`: a backing file outside of"), "{refused}");
    assert!(refused.err.contains("--backing any permits that"), "{refused}");
    std::os::unix::fs::symlink(place.file("disk.raw"), place.file("in/link")).unwrap();
    ok(&["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "link", &taken]);
    let refused = import(&place, &["taken", &taken]).fails();
    assert!(refused.err.contains("link`: a backing file outside of"), "{refused}");
    comes_in_whole(&place, "taken", "qcow2", &taken, &["--backing", "any"]);
    ok(&["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "taken.qcow2", &taken]);
    let refused = import(&place, &["again", &taken]).fails();
    assert!(refused.err.contains("the file is its own backing file"), "{refused}");
    for (name, text) in
        [("nbd://localhost/x", "`nbd://localhost/x` is not a path"), ("none.qcow2", "No such file")]
    {
        ok(&["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", name, &taken]);
        let refused = import(&place, &["again", &taken]).fails();
        assert!(refused.err.contains(text), "{refused}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let place = Place::new();
    let create = ["qemu-img", "create", "-q", "-f", "qcow2"];
    let luks = place.file("luks.qcow2");
    // QEMU makes no encrypted image on a busy machine: it measures its CPU first.
    ok(&[&create[..], &[&luks, "1M"]].concat());
    let mut bytes = fs::read(&luks).unwrap();
    bytes[35] = 2;
    fs::write(&luks, bytes).unwrap();
    let outside = place.file("outside.qcow2");
    let options = format!("data_file={}", place.file("data"));
    ok(&[&create[..], &["-o", &options, &outside, "1M"]].concat());
    for (file, text) in [
        (&luks, "it is encrypted by LUKS"),
        (&outside, "its data are in another file (data_file)"),
        (&place.file("none"), "No such file"),
    ] {
        let refused = import(&place, &["v0", file]).fails();
        assert!(refused.err.contains(text) && refused.err.contains(file.as_str()), "{refused}");
    }
    let sparse = place.file("sparse.raw");
    ok(&["truncate", "--size", "1T", &sparse]);
    let refused = import(&place, &["v0@a", &sparse]).fails();
    assert!(refused.err.contains("v0@a"), "{refused}");
    // No refusal has left a pool.
    assert!(!fs::exists(place.file("pool")).unwrap());
    import(&place, &["v0", &sparse]).ok();
    let listed = run(&["ls", &place.file("pool")]).ok().out;
    assert!(listed.contains("superblock"), "{listed}");
}

/// Truncated images, and images with false tables: an error that names the file, and no volume.
#[test]
fn a_damaged_image_leaves_nothing() {
    let place = Place::new();
    let raw = raw_image(&place);
    let yard = Yard::serve(&[&uri(&place, "v0", "&size=64M")]);
    let good = place.file("good.qcow2");
    ok(&["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", &raw, &good]);
    // The yard has the pool open.
    comes_in_whole(&place, "good", "qcow2", &good, &[]);
    let bytes = fs::read(&good).unwrap();
    let bad = place.file("bad.qcow2");
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let l2 = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    let mut damaged: Vec<Vec<u8>> =
        [71, 300, 70_000, l2 + 8, bytes.len() - 2000].map(|len| bytes[..len].to_vec()).to_vec();
    for (at, byte) in [
        (4, 9),           // the version
        (23, 40),         // the length of clusters
        (24, 1),          // the size
        (77, 8),          // an incompatible feature
        (word(40), 0x41), // an entry of the level-1 table
        (l2 + 1, 0x10),   // entries of the level-2 table
        (l2 + 9, 0xff),
    ] {
        let mut bytes = bytes.clone();
        bytes[at] ^= byte;
        damaged.push(bytes);
    }
    // The compressed data of the first cluster.
    let mut wrong = bytes.clone();
    let host = word(l2) & ((1 << 54) - 1);
    wrong[host..host + 40].fill(0xff);
    damaged.push(wrong);
    for (number, bytes) in damaged.iter().enumerate() {
        fs::write(&bad, bytes).unwrap();
        let refused = import(&place, &["bad", &bad, "--format", "qcow2"]).fails();
        assert!(refused.err.contains("bad.qcow2`"), "{number}: {refused}");
        assert!(refused.err.contains("cannot import"), "{number}: {refused}");
    }
    let pool = place.file("pool");
    let names = blockyard(&["volume", "list", "-H", "-o", "name", &pool]).ok().out;
    assert_eq!(names, "good\nv0\n");
    drop(yard);
}
