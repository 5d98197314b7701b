//! Faults of a pool's location: its file system is full, it is unmounted, it is removed.

use std::fs;
use std::io::ErrorKind;

use fastrand::Rng;

use crate::attach::{FileSystem, Loop, Unmount};
use crate::client::Client;
use crate::place::Place;
use crate::run::ok;
use crate::yard::Yard;

const ENOSPC: u32 = 28;
const EIO: u32 = 5;
const MIB: usize = 1 << 20;

/// A mebibyte of bytes that do not compress, derived from `number`.
fn bytes(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; MIB];
    Rng::with_seed(number).fill(&mut bytes);
    bytes
}

fn serve(dir: &str) -> Yard {
    Yard::serve(&[&format!("volume:///v0?path={dir}/pool&size=512M&compress=none")])
}

fn connect(yard: &Yard) -> Client {
    Client::connect(&yard.socket(), "v0").unwrap()
}

fn put(client: &mut Client, number: u64) -> u32 {
    client.write(number, number << 20, &bytes(number), true).unwrap();
    client.answer().unwrap().error
}

fn check(client: &mut Client, numbers: impl Iterator<Item = u64>) {
    let mut found = vec![0; MIB];
    for number in numbers {
        client.read(number << 20, &mut found).unwrap();
        assert!(found == bytes(number), "at {number} MiB");
    }
}

#[test]
fn a_full_file_system_in_memory_refuses_writes_and_loses_nothing() {
    let place = Place::new();
    let dir = place.file("small");
    fs::create_dir(&dir).unwrap();
    ok(&["mount", "-t", "tmpfs", "-o", "size=256M", "small", &dir]);
    let mount = Unmount(dir);
    refuses_writes_and_loses_nothing(&mount.0);
}

/// With direct I/O, on a file system that refuses the space for a segment before it is written.
#[test]
fn a_full_file_system_on_a_disk_refuses_writes_and_loses_nothing() {
    let place = Place::new();
    let image = place.file("image");
    fs::File::create(&image).unwrap().set_len(280 << 20).unwrap();
    let device = Loop::attach(&image);
    ok(&["mke2fs", "-q", "-t", "ext4", "-m", "0", &device.0]);
    let at = place.file("at");
    let mounted = FileSystem::mount("ext4", &device.0, &at);
    refuses_writes_and_loses_nothing(&at);
    mounted.unmount();
    ok(&["e2fsck", "-fn", &device.0]);
    device.detach();
}

fn refuses_writes_and_loses_nothing(dir: &str) {
    let ballast = format!("{dir}/ballast");
    fs::write(&ballast, vec![1; 64 * MIB]).unwrap();
    let mut yard = serve(dir);
    let mut client = connect(&yard);
    let full = (0..512).find(|number| match put(&mut client, *number) {
        0 => false,
        error => {
            assert_eq!(error, ENOSPC, "at {number} MiB");
            true
        }
    });
    let full = full.expect("the place is smaller than the volume");
    assert!(full >= 32, "only {full} MiB of 192");
    check(&mut client, 0..full);
    // The pool can be opened without free space.
    yard.signal("KILL");
    yard.end();
    drop(yard);
    let mut yard = serve(dir);
    let mut client = connect(&yard);
    check(&mut client, 0..full);
    // With free space the pool accepts writes again, without a restart.
    fs::remove_file(&ballast).unwrap();
    assert!((0..64).any(|_| put(&mut client, full) == 0), "there is space again");
    check(&mut client, 0..=full);
    yard.signal("TERM");
    yard.end();
}

#[test]
fn a_file_system_that_is_unmounted_below_us_keeps_what_was_durable() {
    let place = Place::new();
    let image = place.file("image");
    fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
    let device = Loop::attach(&image);
    ok(&["mke2fs", "-q", "-t", "ext4", &device.0]);
    let at = place.file("at");
    let mounted = FileSystem::mount("ext4", &device.0, &at);
    let mut yard = serve(&at);
    let mut client = connect(&yard);
    (0..10).for_each(|number| assert_eq!(put(&mut client, number), 0));
    // The file system remains for processes with open files, but its path is gone.
    ok(&["umount", "--lazy", &at]);
    assert!(fs::read_dir(&at).unwrap().next().is_none());
    // More data than the pool has segments for.
    let said = (10..150).map(|number| put(&mut client, number)).collect::<Vec<_>>();
    let durable = |number: u64| number < 10 || said[number as usize - 10] == 0;
    check(&mut client, (0..150).filter(|number| durable(*number)));
    assert!(fs::read_dir(&at).unwrap().next().is_none(), "files of the pool are elsewhere");
    yard.signal("TERM");
    yard.end();
    drop(yard);
    drop(mounted);
    let mounted = FileSystem::mount("ext4", &device.0, &at);
    let mut yard = serve(&at);
    check(&mut connect(&yard), (0..150).filter(|number| durable(*number)));
    yard.signal("TERM");
    yard.end();
    mounted.unmount();
    device.detach();
}

/// Only a process with the files open can still read them. The pool must notice that and tell
/// clients long before it needs another file: here the same few blocks are overwritten all the
/// time.
#[test]
fn the_removal_of_an_open_pool_is_reported() {
    let place = Place::new();
    let yard = serve(&place.file(""));
    let mut client = connect(&yard);
    (0..4).for_each(|number| assert_eq!(put(&mut client, number), 0));
    // A segment may be made while the others are removed.
    while let Err(error) = fs::remove_dir_all(place.file("pool")) {
        match error.kind() {
            ErrorKind::NotFound => break,
            ErrorKind::DirectoryNotEmpty => (),
            _ => panic!("{error}"),
        }
    }
    let mut again = |number: u64| {
        client.write(number, 8 << 20, &[3; 4096], true).unwrap();
        client.answer().unwrap().error
    };
    let refused = (0..10_000_000).map(&mut again).find(|error| *error != 0);
    assert_eq!(refused, Some(EIO), "a pool that is not there says that things are durable");
    assert_eq!(again(0), EIO);
    check(&mut client, 0..4);
    let said = yard.complained();
    assert!(said.contains("/pool: it was removed or replaced while it was open"), "{said}");
}

/// A moved pool stays usable: new segments are made at its present path.
#[test]
fn a_pool_that_is_moved_below_us_goes_on() {
    let place = Place::new();
    let mut yard = serve(&place.file(""));
    let mut client = connect(&yard);
    assert_eq!(put(&mut client, 0), 0);
    fs::create_dir(place.file("there")).unwrap();
    fs::rename(place.file("pool"), place.file("there/pool")).unwrap();
    // More data than the pool has segments for.
    (1..150).for_each(|number| assert_eq!(put(&mut client, number), 0, "at {number} MiB"));
    check(&mut client, 0..150);
    assert!(!fs::exists(place.file("pool")).unwrap());
    yard.signal("KILL");
    yard.end();
    drop(yard);
    let yard = serve(&place.file("there"));
    check(&mut connect(&yard), 0..150);
}
