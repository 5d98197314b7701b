//! A file system is copied in, and comes out unchanged.

use crate::place::Place;
use crate::run::{ok, run};
use crate::yard::Yard;

/// The length of the image in bytes; every device here has this size.
pub(crate) const IMAGE_BYTES: u64 = 96 << 20;
/// A memory-backed device that the image fits exactly.
pub(crate) const MEM0: &str = "null:///mem0?size=96M&memory_backed=1&discard=1";

/// An ext4 image of a folder that every machine with a compiler has, checked.
pub(crate) fn ext4_image(place: &Place) -> String {
    let image = place.file("image");
    let size = format!("{}k", IMAGE_BYTES >> 10);
    ok(&["mke2fs", "-q", "-t", "ext4", "-d", "/usr/include/linux", &image, &size]);
    check(&image);
    image
}

/// The file system in the image is consistent and has the folder.
fn check(image: &str) {
    ok(&["e2fsck", "-f", "-n", image]);
    let header = ok(&["debugfs", "-R", "cat /if.h", image]);
    let original = std::fs::read_to_string("/usr/include/linux/if.h").unwrap();
    assert_eq!(header, original);
}

#[test]
fn a_file_system_survives_the_way_there_and_back() {
    let yard = Yard::serve(&[MEM0]);
    let image = ext4_image(&yard.place);
    let back = yard.place.file("back");
    ok(&["nbdcopy", &image, &yard.uri("mem0")]);
    ok(&["nbdcopy", &yard.uri("mem0"), &back]);
    ok(&["cmp", &image, &back]);
    check(&back);
}

#[test]
fn four_connections_write_and_read_one_device() {
    let yard = Yard::serve(&[MEM0]);
    let image = ext4_image(&yard.place);
    let back = yard.place.file("back");
    let nbdcopy = ["nbdcopy", "--connections=4", "--threads=4", "--requests=32", "--flush"];
    for (from, to) in [(&image, &yard.uri("mem0")), (&yard.uri("mem0"), &back)] {
        let mut line = nbdcopy.to_vec();
        line.extend([from.as_str(), to.as_str()]);
        ok(&line);
    }
    ok(&["cmp", &image, &back]);
}

#[test]
fn two_devices_are_copied_into_one_another() {
    let yard = Yard::serve(&[MEM0, "null:///mem1?size=96M&memory_backed=1&discard=1"]);
    let image = ext4_image(&yard.place);
    let back = yard.place.file("back");
    ok(&["nbdcopy", &image, &yard.uri("mem0")]);
    ok(&["nbdcopy", &yard.uri("mem0"), &yard.uri("mem1")]);
    ok(&["nbdcopy", &yard.uri("mem1"), &back]);
    ok(&["cmp", &image, &back]);
    // The first device did not get the data of the second.
    ok(&["nbdcopy", "--", "[", "nbdkit", "null", "96M", "]", &yard.uri("mem1")]);
    run(&["nbdcopy", &yard.uri("mem0"), &back]).ok();
    ok(&["cmp", &image, &back]);
}
