//! The kernel's own file systems on a loop device on a block file: made, filled, checked.

use super::{FileSystem, Loop, Way, memory_of};
use crate::run::{ok, run};

/// Memory-backed, with discard: like mem0 of the default yard, but smaller.
const MEM0: &str = "null:///mem0?size=512M&memory_backed=1&discard=1";

/// The data that are copied: this crate's own source.
const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

both_ways! {
    ext4_is_clean,
    xfs_is_clean,
    btrfs_is_clean,
    ext4_on_blocks_of_4k_is_clean,
    trimming_a_file_system_frees_memory,
}

/// Makes a file system, fills it, mounts it again, reads it back, and runs its checker.
fn fill_and_check(way: &Way, kind: &str, make: &[&str], check: &[&str]) {
    let mounted = way.serve(&[MEM0]);
    let device = Loop::attach(&mounted.file("mem0"));
    let direct = ok(&["losetup", "--noheadings", "--list", "--output", "DIO", &device.0]);
    assert_eq!(direct.trim(), "1", "the loop device does not use direct I/O");
    run(&[make, &[&device.0]].concat()).ok();
    let dir = mounted.yard.place.file("mnt");
    let copy = format!("{dir}/copy");
    let files = FileSystem::mount(kind, &device.0, &dir);
    run(&["cp", "--recursive", TREE, &copy]).ok();
    run(&["sync", "--file-system", &dir]).ok();
    files.unmount();
    let files = FileSystem::mount(kind, &device.0, &dir);
    run(&["diff", "--recursive", TREE, &copy]).ok();
    files.unmount();
    run(&[check, &[&device.0]].concat()).ok();
    device.detach();
}

fn ext4_is_clean(way: &Way) {
    fill_and_check(way, "ext4", &["mkfs.ext4", "-q", "-F"], &["e2fsck", "-f", "-n"]);
}

fn xfs_is_clean(way: &Way) {
    fill_and_check(way, "xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"]);
}

fn btrfs_is_clean(way: &Way) {
    let check = ["btrfs", "check", "--readonly", "--check-data-csum"];
    fill_and_check(way, "btrfs", &["mkfs.btrfs", "-q", "-f"], &check);
}

fn ext4_on_blocks_of_4k_is_clean(way: &Way) {
    // The loop device has sectors of 512 bytes by default, so this tests lengths below a block.
    let mounted = way.serve(&["null:///big?size=256M&bs=4k&memory_backed=1&discard=1"]);
    let device = Loop::attach(&mounted.file("big"));
    run(&["mkfs.ext4", "-q", "-F", "-b", "1024", &device.0]).ok();
    let dir = mounted.yard.place.file("mnt");
    let files = FileSystem::mount("ext4", &device.0, &dir);
    run(&["cp", "--recursive", concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &dir]).ok();
    files.unmount();
    run(&["e2fsck", "-f", "-n", &device.0]).ok();
    device.detach();
}

fn trimming_a_file_system_frees_memory(way: &Way) {
    let mounted = way.serve(&[MEM0]);
    let device = Loop::attach(&mounted.file("mem0"));
    run(&["mkfs.ext4", "-q", "-F", &device.0]).ok();
    let dir = mounted.yard.place.file("mnt");
    let files = FileSystem::mount("ext4", &device.0, &dir);
    let big = format!("{dir}/big");
    let of = format!("of={big}");
    ok(&["dd", "if=/dev/urandom", &of, "bs=1M", "count=128", "conv=fsync", "status=none"]);
    let full = memory_of(&mounted.yard);
    std::fs::remove_file(&big).unwrap();
    run(&["sync", "--file-system", &dir]).ok();
    run(&["fstrim", &dir]).ok();
    let trimmed = memory_of(&mounted.yard);
    assert!(trimmed + (100 << 20) < full, "{full} bytes became {trimmed}");
    files.unmount();
    device.detach();
}
