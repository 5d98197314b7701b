//! Mounts: made, changed while in use, and unmounted.

use std::fs;

use blockyard_testing::fuse_parameter::FuseParameter;

use super::{Loop, Mounted, Way, python, unmount_lazily};
use crate::place::Place;
use crate::run::{bounded, finish, run};
use crate::user::{NOBODY, Opened};
use crate::yard::{BLOCKYARD, blockyard};

const N0: &str = "null:///n0?size=1G";
const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";

both_ways! {
    a_user_mounts_through_fusermount3,
    the_transport_in_use_is_shown,
    devices_are_files_while_they_are_there,
    a_device_whose_file_is_open_is_removed_by_force_only,
    a_device_that_hangs_can_be_removed,
    a_device_that_hangs_in_part_of_a_block_can_be_removed,
    a_signal_unmounts,
    a_signal_ends_a_mount_that_is_in_use,
    a_second_signal_leaves_nothing_mounted,
    the_mount_of_a_killed_server_is_removed,
}

fn names(mounted: &Mounted) -> Vec<String> {
    let entries = fs::read_dir(&mounted.dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Whether something is mounted at a directory.
fn is_mounted(dir: &str) -> bool {
    run(&["mountpoint", "--quiet", dir]).code == Some(0)
}

fn devices_are_files_while_they_are_there(way: &Way) {
    let mounted = way.serve(&[N0, MEM0]);
    assert_eq!(names(&mounted), ["mem0", "n0"]);
    mounted.yard.command(&["add", "null:///n1?size=2G"]).ok();
    assert_eq!(names(&mounted), ["mem0", "n0", "n1"]);
    assert_eq!(fs::metadata(mounted.file("n1")).unwrap().len(), 2 << 30);
    mounted.yard.command(&["remove", "n1"]).ok();
    assert_eq!(names(&mounted), ["mem0", "n0"]);
    assert!(fs::metadata(mounted.file("n1")).is_err());
    // Another device of that name is another file.
    mounted.yard.command(&["add", "null:///n1?size=4G"]).ok();
    assert_eq!(fs::metadata(mounted.file("n1")).unwrap().len(), 4 << 30);
    let list = mounted.yard.command(&["list"]).ok();
    assert!(list.out.contains(&mounted.file("mem0")), "{list}");
    let shown = mounted.yard.command(&["show", "mem0", "--json"]).ok().json();
    assert_eq!(shown["file"], mounted.file("mem0"));
}

fn a_device_whose_file_is_open_is_removed_by_force_only(way: &Way) {
    use std::os::unix::fs::FileExt;
    let mounted = way.serve(&[MEM0]);
    let file = fs::File::options().read(true).write(true).open(mounted.file("mem0")).unwrap();
    file.write_all_at(b"before", 0).unwrap();
    let refused = mounted.yard.command(&["remove", "mem0"]).fails();
    assert!(refused.err.contains("its block file is open"), "{refused}");
    mounted.yard.command(&["remove", "--force", "mem0"]).ok();
    let error = file.read_at(&mut [0; 6], 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(19), "{error}: expected ENODEV");
    mounted.yard.command(&["add", MEM0]).ok();
    // The open file still belongs to the old device.
    assert!(file.read_at(&mut [0; 6], 0).is_err());
    assert_eq!(fs::read(mounted.file("mem0")).unwrap()[..6], [0; 6]);
}

fn a_device_that_hangs_can_be_removed(way: &Way) {
    // Reads take a minute each. Programs that wait for them get an error, and the file is gone.
    let mounted = way.serve(&["null:///slow?size=1G&irqmode=timer&completion_nsec=60000000000"]);
    let socket = mounted.yard.place.file("control");
    let remove = "http://yard/v1/devices/slow?force=true&drain_ms=100";
    let script = format!(
        "
import subprocess
fd = os.open(path, os.O_RDWR)
ends = []
def read():
    fails(errno.ENODEV, os.pread, fd, 4096, 0)
    ends.append('read')
def write():
    fails(errno.ENODEV, os.pwrite, fd, b'x' * 4096, 0)
    ends.append('write')
def part():
    fails(errno.ENODEV, os.pwrite, fd, b'x', 8192)
    ends.append('part')
threads = [threading.Thread(target=call) for call in (read, write, part) * 40]
for thread in threads: thread.start()
command = ['curl', '-sSf', '-X', 'DELETE', '--unix-socket', '{socket}', '{remove}']
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
for thread in threads: thread.join()
assert len(ends) == 120, ends
assert not os.path.exists(path)
"
    );
    python(&mounted.file("slow"), &script);
}

fn a_device_that_hangs_in_part_of_a_block_can_be_removed(way: &Way) {
    // Only writes of single bytes: each worker executes one, or waits for its turn.
    let mounted = way.serve(&["null:///slow?size=1G&irqmode=timer&completion_nsec=60000000000"]);
    let socket = mounted.yard.place.file("control");
    let remove = "http://yard/v1/devices/slow?force=true&drain_ms=100";
    let script = format!(
        "
import subprocess
fd = os.open(path, os.O_RDWR)
ends = []
def part():
    fails(errno.ENODEV, os.pwrite, fd, b'x', 1)
    ends.append('part')
threads = [threading.Thread(target=part) for _ in range(16)]
for thread in threads: thread.start()
command = ['curl', '-sSf', '-X', 'DELETE', '--unix-socket', '{socket}', '{remove}']
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
for thread in threads: thread.join()
assert len(ends) == 16, ends
"
    );
    python(&mounted.file("slow"), &script);
}

fn the_transport_in_use_is_shown(way: &Way) {
    let mounted = way.serve(&[MEM0]);
    let shown = mounted.yard.command(&["show", "mem0", "--json"]).ok().json();
    assert_eq!(shown["file_transport"], way.name);
    let shown = mounted.yard.command(&["show", "mem0"]).ok();
    assert!(shown.out.contains(way.name), "{shown}");
    let log = mounted.yard.complained();
    assert!(log.contains(&format!("transport=\"{}\"", way.name)), "{log}");
}

#[test]
fn a_later_mount_of_another_program_stays() {
    let mut mounted = Mounted::serve(&[MEM0]);
    run(&["umount", &mounted.dir]).ok();
    run(&["mount", "-t", "tmpfs", "none", &mounted.dir]).ok();
    mounted.yard.signal("TERM");
    assert_eq!(mounted.yard.end().code(), Some(0));
    assert!(is_mounted(&mounted.dir), "the server removed the mount of another program");
}

fn a_signal_unmounts(way: &Way) {
    for signal in ["TERM", "INT"] {
        let mut mounted = way.serve(&[MEM0]);
        assert!(is_mounted(&mounted.dir));
        mounted.yard.signal(signal);
        assert_eq!(mounted.yard.end().code(), Some(0), "SIG{signal}");
        assert!(!is_mounted(&mounted.dir), "SIG{signal} left it mounted");
    }
}

fn a_signal_ends_a_mount_that_is_in_use(way: &Way) {
    let mut mounted = way.serve(&[MEM0]);
    let device = Loop::attach(&mounted.file("mem0"));
    mounted.yard.signal("TERM");
    assert_eq!(mounted.yard.end().code(), Some(0));
    assert!(!is_mounted(&mounted.dir));
    run(&["dd", &format!("if={}", device.0), "of=/dev/null", "count=1", "iflag=direct"]).fails();
}

fn a_second_signal_leaves_nothing_mounted(way: &Way) {
    let mut mounted = way.serve(&[MEM0]);
    let device = Loop::attach(&mounted.file("mem0"));
    mounted.yard.signal("TERM");
    mounted.yard.signal("TERM");
    mounted.yard.end();
    assert!(!is_mounted(&mounted.dir));
    drop(device);
}

fn the_mount_of_a_killed_server_is_removed(way: &Way) {
    let mut mounted = way.serve(&[MEM0]);
    mounted.yard.signal("KILL");
    mounted.yard.end();
    // The first request may arrive before the kernel has closed the descriptors of the server, and
    // ends with ECONNABORTED then.
    let error = fs::read_dir(&mounted.dir).unwrap_err();
    let first = error.raw_os_error();
    assert!([Some(103), Some(107)].contains(&first), "{error}: expected ECONNABORTED or ENOTCONN");
    let error = fs::read_dir(&mounted.dir).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(107), "{error}: expected ENOTCONN");
    let next = Mounted::serve_in(Place::new(), mounted.dir.clone(), &[N0]);
    assert_eq!(names(&next), ["n0"]);
    assert!(next.yard.complained().contains("took away the mount"), "{}", next.yard.complained());
    drop(next);
    unmount_lazily(&mounted.dir);
}

#[test]
fn a_directory_that_will_not_do_is_named() {
    let place = Place::new();
    let (none, file, full) = (place.file("none"), place.write("file", ""), place.file("full"));
    fs::create_dir(&full).unwrap();
    fs::write(format!("{full}/x"), "").unwrap();
    let serve = |dir: &str| blockyard(&["serve", N0, "-U", "-", "--fuse", dir]).fails();
    serve(&none).says(&[&none, "No such file", "expected an empty directory"]);
    serve(&file).says(&[&file, "no directory"]);
    serve(&full).says(&[&full, "not empty"]);
    blockyard(&["serve", N0, "-U", "-", "--fuse-allow-other"]).fails().says(&["--fuse DIR"]);
}

#[test]
fn a_second_server_does_not_mount_over_the_first() {
    let mounted = Mounted::serve(&[MEM0]);
    let run = blockyard(&["serve", N0, "-U", "-", "--fuse", &mounted.dir]);
    run.fails().says(&[&mounted.dir, "another yard is mounted there"]);
    assert_eq!(names(&mounted), ["mem0"]);
}

fn a_user_mounts_through_fusermount3(way: &Way) {
    let place = Place::new();
    let (program, dir) = (place.file("program"), place.file("files"));
    // A user may have no access to the directory in which the program was built. Another process
    // copies it: if this process wrote the copy, a child that another test starts at that moment
    // would inherit the open descriptor, and exec would fail.
    run(&["cp", BLOCKYARD, &program]).ok();
    fs::create_dir(&dir).unwrap();
    let _opened = Opened::new();
    std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
    let command = format!(
        "printf hello | dd of={dir}/mem0 conv=notrunc status=none && head -c 5 {dir}/mem0 && \
         stat --format=%u:%a {dir}/mem0 && grep {dir} /proc/self/mounts"
    );
    let user = [
        "setpriv",
        &format!("--reuid={NOBODY}"),
        &format!("--regid={NOBODY}"),
        "--clear-groups",
        "--",
    ];
    let serve = [program.as_str(), "serve", MEM0, "-U", "-", "--fuse", &dir, "--run", &command];
    let line = [&user[..], &serve].concat();
    let mut bounded = bounded(&line);
    let parameter = FuseParameter::set(way.io_uring).unwrap();
    bounded.env_remove("XDG_RUNTIME_DIR").env("BLOCKYARD_LOG", "info");
    let run = finish(&line, &mut bounded).ok();
    drop(parameter);
    assert!(run.err.contains(&format!("transport=\"{}\"", way.name)), "{run}");
    assert!(run.out.starts_with(&format!("hello{NOBODY}:600\n")), "{run}");
    assert!(run.out.contains("fuse.blockyard"), "{run}");
    assert!(!is_mounted(&dir), "{run}");
}

#[test]
fn a_configuration_can_mount() {
    let place = Place::new();
    let dir = place.file("files");
    fs::create_dir(&dir).unwrap();
    let text = format!(
        "[serve]\nfuse = \"{dir}\"\n[[device]]\nname = \"n0\"\nkind = \"null\"\nsize = \"1G\"\n"
    );
    let config = place.write("yard.toml", &text);
    let mounted = Mounted::by(place, dir, &["--config", &config]);
    assert_eq!(names(&mounted), ["n0"]);
    assert!(mounted.yard.printed().contains(&format!("files in {}", mounted.dir)));
}
