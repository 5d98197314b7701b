//! Existing files through the whole program: an image is served, changed by clients, and checked.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use crate::attach::{FileSystem, Loop};
use crate::copy::{IMAGE_BYTES, ext4_image};
use crate::place::Place;
use crate::run::{nbdsh, ok, run};
use crate::yard::{Yard, blockyard};

fn uri(path: &str, more: &str) -> String {
    format!("file:///d0?path={path}{more}")
}

fn end(mut yard: Yard) {
    yard.signal("TERM");
    assert!(yard.end().success());
}

/// A loop device on the block file of an image changes the file system in the image, and the image
/// has the change afterwards.
#[test]
fn image_is_mounted_over_fuse_changed_and_clean() {
    for more in ["", "&direct=off", "&io=blocking"] {
        let place = Place::new();
        let image = ext4_image(&place);
        let blocks = place.file("blocks");
        std::fs::create_dir(&blocks).unwrap();
        let served = Place::new();
        let uri = uri(&image, more);
        let yard = Yard::serve_in(served, &["--fuse", &blocks, &uri]);
        let device = Loop::attach(&format!("{blocks}/d0"));
        let dir = place.file("mnt");
        let files = FileSystem::mount("ext4", &device.0, &dir);
        ok(&["diff", "-r", "/usr/include/linux", &dir, "--exclude=lost+found"]);
        ok(&["cp", "-r", "/usr/include/asm-generic", &format!("{dir}/more")]);
        std::fs::remove_file(format!("{dir}/if.h")).unwrap();
        files.unmount();
        device.detach();
        end(yard);
        ok(&["e2fsck", "-f", "-n", &image]);
        let header = ok(&["debugfs", "-R", "cat /more/types.h", &image]);
        let original = std::fs::read_to_string("/usr/include/asm-generic/types.h").unwrap();
        assert_eq!(header, original, "{more}");
    }
}

/// A client copies an image in and out. Ranges without data are holes at both ends.
#[test]
fn image_is_copied_over_nbd_with_its_holes() {
    let place = Place::new();
    let (image, back) = (ext4_image(&place), place.file("back"));
    let path = place.file("served");
    let yard = Yard::serve(&[&uri(&path, &format!("&size={IMAGE_BYTES}"))]);
    let said = yard.printed();
    assert!(said.contains(&format!("d0: file 96M, {path}")), "{said}");
    ok(&["nbdcopy", "--destination-is-zero", &image, &yard.uri("d0")]);
    ok(&["nbdcopy", &yard.uri("d0"), &back]);
    ok(&["cmp", &image, &back]);
    ok(&["cmp", &image, &path]);
    let allocated = |path: &str| File::open(path).unwrap().metadata().unwrap().blocks() * 512;
    let (of_image, of_path) = (allocated(&image), allocated(&path));
    assert!(of_path < of_image + (4 << 20), "{of_image} bytes became {of_path}");
    assert!(allocated(&back) < of_image + (4 << 20));
    let map = run(&["nbdinfo", "--map", "--json", &yard.uri("d0")]).ok().json();
    let of_type = |wanted: &str| {
        let entries = map.as_array().unwrap().iter().filter(|it| it["description"] == wanted);
        entries.map(|it| it["length"].as_u64().unwrap()).sum::<u64>()
    };
    assert!(of_type("hole,zero") > IMAGE_BYTES / 2, "{map}");
    assert!(of_type("data") > 0 && of_type("data") < IMAGE_BYTES / 2, "{map}");
    // A trim makes a hole in the file.
    let before = allocated(&path);
    nbdsh(&yard.uri("d0"), &format!("h.trim({IMAGE_BYTES}, 0)\nh.flush()"));
    assert!(allocated(&path) < before / 2, "{before} bytes stayed");
}

#[test]
fn patterns_are_read_as_qemu_wrote_them() {
    let place = Place::new();
    for (number, more) in
        ["", "&direct=off", "&io=blocking", "&scheduler=mq-deadline"].iter().enumerate()
    {
        let path = place.file(&format!("image{number}"));
        let yard = Yard::serve(&[&uri(&path, &format!("&size=64M{more}"))]);
        let uri = yard.uri("d0");
        let mut line = vec!["qemu-io", "-f", "raw"];
        for command in [
            "write -P 0xa5 64k 256k",
            "write -P 0x5a -f 128k 64k",
            "writev -P 0x77 1M 4k 8k 512",
            "flush",
            "read -P 0xa5 64k 64k",
            "read -P 0x5a 128k 64k",
            "read -P 0x77 1M 12800",
            "write -z 64k 64k",
            "write -z -u 128k 32k",
            "discard 160k 32k",
            "read -P 0 64k 128k",
            "read -P 0xa5 192k 128k",
            "write -P 0x11 8M 16M",
            "read -P 0x11 8M 16M",
        ] {
            line.extend(["-c", command]);
        }
        line.push(&uri);
        let said = run(&line).ok();
        assert!(!said.out.contains("verification failed"), "{more}: {said}");
        end(yard);
        let map = run(&["qemu-img", "map", "-f", "raw", "--output=json", &path]).ok().json();
        assert!(map.as_array().unwrap().len() >= 4, "{map}");
    }
}

/// QEMU locks an image that it opens for writing, and so does this program.
#[test]
fn second_writer_is_refused() {
    let place = Place::new();
    let path = place.file("image");
    let yard = Yard::serve(&[&uri(&path, "&size=16M")]);
    let socket = format!("unix:{}", place.file("nbd"));
    let second = blockyard(&["serve", &uri(&path, ""), "--nbd", &socket]).fails();
    second.says(&["it is in use by process", "end that program first"]);
    let qemu = run(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &path]).fails();
    assert!(qemu.err.contains("lock"), "{qemu}");
    end(yard);
    ok(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &path]);
    let readers = [(); 2].map(|()| Yard::serve(&[&uri(&path, "&read_only=1")]));
    blockyard(&["serve", &uri(&path, ""), "--nbd", &socket]).fails().says(&["it is in use"]);
    let size = ok(&["nbdinfo", "--is", "readonly", &readers[0].uri("d0")]);
    assert!(size.is_empty(), "{size}");
}

/// A block device of the kernel: a loop device, whose sectors and size the device has.
#[test]
fn block_device_is_served_with_its_sectors() {
    let place = Place::new();
    let image = place.file("image");
    File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let device = Loop::attach(&image);
    let yard = Yard::serve(&[&uri(&device.0, "")]);
    let io = yard.uri("d0");
    ok(&[
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write -P 7 1M 1M",
        "-c",
        "discard 1M 64k",
        "-c",
        "flush",
        &io,
    ]);
    ok(&["qemu-io", "-f", "raw", "-c", "read -P 0 1M 64k", "-c", "read -P 7 1088k 960k", &io]);
    // The kernel gives the device to no other exclusive user.
    let socket = format!("unix:{}", place.file("nbd"));
    let second = blockyard(&["serve", &uri(&device.0, ""), "--nbd", &socket]).fails();
    second.says(&["another program has it exclusively"]);
    end(yard);
    ok(&["qemu-io", "-f", "raw", "-c", "read -P 0 1M 64k", "-c", "read -P 7 1088k 960k", &image]);
    device.detach();
}

/// A file that another program has made longer has its new length after a rescan.
#[test]
fn rescan_serves_a_file_that_has_become_longer() {
    let place = Place::new();
    let path = place.file("grows");
    let file = File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let yard = Yard::serve(&[&uri(&path, "")]);
    file.set_len(3 << 20).unwrap();
    let said = yard.command(&["rescan", "d0"]).ok().out;
    assert_eq!(said, format!("d0: file 3M, {path}\n"));
    assert_eq!(ok(&["nbdinfo", "--size", &yard.uri("d0")]), "3145728\n");
    let refused = yard.command(&["rescan", "d1"]);
    assert!(refused.code == Some(5) && refused.err.contains("no device `d1`"), "{refused}");
    end(yard);
}
