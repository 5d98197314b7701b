//! A block file, used by programs as a file.

use super::{Way, check_report, memory_of, python};
use crate::run::run;

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";

both_ways! {
    fio_verifies_from_four_jobs,
    a_file_is_as_long_as_its_device,
    bytes_anywhere_come_back,
    writers_of_one_block_do_not_undo_each_other,
    holes_free_memory_and_read_as_zeros,
    synced_data_survive_a_power_cut,
    a_zoned_device_is_written_at_its_write_pointers,
    a_devices_error_is_the_files,
    only_what_has_to_wait_takes_a_lane,
    requests_that_complete_at_once_have_a_latency,
    a_slow_device_holds_up_no_other,
}

fn fio_verifies_from_four_jobs(way: &Way) {
    let mounted = way.serve(&[MEM0]);
    for engine in [&["--ioengine=psync"][..], &["--ioengine=libaio", "--iodepth=16"]] {
        let filename = format!("--filename={}", mounted.file("mem0"));
        let mut line = vec!["fio", "--name=verify", &filename, "--direct=1", "--numjobs=4"];
        line.extend(["--size=16M", "--offset_increment=16M", "--randrepeat=0", "--rw=randrw"]);
        line.extend(["--bsrange=512-64k", "--bs_unaligned=0", "--fsync=64"]);
        line.extend(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]);
        line.extend(["--group_reporting", "--output-format=json"]);
        line.extend(engine);
        check_report(&run(&line).ok());
    }
}

fn a_file_is_as_long_as_its_device(way: &Way) {
    let mounted = way.serve(&[MEM0]);
    python(
        &mounted.file("mem0"),
        "
size = 64 << 20
assert os.stat(path).st_size == size
fd = os.open(path, os.O_RDWR)
assert os.lseek(fd, 0, os.SEEK_END) == size
assert os.pwrite(fd, b'x' * 8192, size - 4096) == 4096
fails(errno.ENOSPC, os.pwrite, fd, b'x' * 4096, size)
assert os.pread(fd, 8192, size - 4096) == b'x' * 4096
assert os.pread(fd, 4096, size) == b''
fails(errno.EINVAL, os.ftruncate, fd, size + 4096)
fails(errno.EINVAL, os.ftruncate, fd, 0)
os.ftruncate(fd, size)
fails(errno.EPERM, os.chmod, path, 0o777)
os.utime(path)
# As on a block device, O_TRUNC changes nothing.
os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
assert os.stat(path).st_size == size
assert os.pread(fd, 1, size - 1) == b'x'
",
    );
}

fn bytes_anywhere_come_back(way: &Way) {
    let mounted = way.serve(&["null:///big?size=64M&bs=4k&memory_backed=1&discard=1"]);
    python(
        &mounted.file("big"),
        "
fd = os.open(path, os.O_RDWR)
image = bytearray(64 << 10)
import random
seed = random.randrange(1 << 32)
print('seed', seed, file=sys.stderr)
chance = random.Random(seed)
for _ in range(400):
    offset = chance.randrange(len(image))
    data = chance.randbytes(chance.randrange(1, min(20000, len(image) - offset) + 1))
    if chance.randrange(8) == 0:
        # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        long = ctypes.c_long
        assert libc.fallocate(fd, 3, long(offset), long(len(data))) == 0, ctypes.get_errno()
        data = bytes(len(data))
    else:
        assert os.pwrite(fd, data, offset) == len(data)
    image[offset:offset + len(data)] = data
    at = chance.randrange(len(image))
    assert os.pread(fd, 5000, at)[:len(image) - at] == image[at:at + 5000], (seed, offset, at)
assert os.pread(fd, len(image), 0) == image, seed
",
    );
}

fn writers_of_one_block_do_not_undo_each_other(way: &Way) {
    let mounted = way.serve(&["null:///big?size=1M&bs=4k&memory_backed=1"]);
    python(
        &mounted.file("big"),
        "
def write(number):
    fd = os.open(path, os.O_RDWR)
    for turn in range(64):
        os.pwrite(fd, bytes([number + 1]) * 64, turn * 1024 + number * 64)
threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
fd = os.open(path, os.O_RDONLY)
line = b''.join(bytes([number + 1]) * 64 for number in range(16))
assert os.pread(fd, 65536, 0) == line * 64
",
    );
}

fn holes_free_memory_and_read_as_zeros(way: &Way) {
    let mounted = way.serve(&[MEM0]);
    let file = mounted.file("mem0");
    let of = format!("of={file}");
    run(&["dd", "if=/dev/urandom", &of, "bs=1M", "count=64", "conv=notrunc", "status=none"]).ok();
    let full = memory_of(&mounted.yard);
    run(&["fallocate", "--punch-hole", "--offset", "0", "--length", "48M", &file]).ok();
    let punched = memory_of(&mounted.yard);
    assert!(punched + (40 << 20) < full, "{full} bytes became {punched}");
    python(
        &file,
        "
fd = os.open(path, os.O_RDWR)
assert os.pread(fd, 1 << 20, 0) == bytes(1 << 20)
assert os.lseek(fd, 0, os.SEEK_DATA) == 48 << 20
assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
assert os.lseek(fd, 50 << 20, os.SEEK_HOLE) == 64 << 20
fails(errno.ENXIO, os.lseek, fd, 64 << 20, os.SEEK_DATA)
",
    );
    run(&["fallocate", "--zero-range", "--offset", "48M", "--length", "1M", &file]).ok();
    run(&["cmp", "--bytes=51380224", &file, "/dev/zero"]).ok();
    // The device cannot reserve space in advance.
    run(&["fallocate", "--length", "1M", &file]).fails().says(&["not supported"]);
}

fn synced_data_survive_a_power_cut(way: &Way) {
    let device = "null:///cached?size=16M&memory_backed=1&cache_size=8M";
    let mounted = way.serve(&[device]);
    let file = mounted.file("cached");
    let write = |offset: u32, how: &str| {
        let script = format!(
            "fd = os.open(path, os.O_RDWR{how})\n\
             assert os.pwrite(fd, b'x' * 4096, {offset}) == 4096"
        );
        python(&file, &script);
    };
    write(0, "");
    python(&file, "os.fsync(os.open(path, os.O_RDWR))");
    write(4096, "");
    write(8192, " | os.O_DSYNC");
    mounted.yard.command(&["inject", "cached", "power_cut=1"]).ok();
    python(
        &file,
        "
fd = os.open(path, os.O_RDONLY)
read = lambda offset: os.pread(fd, 4096, offset)
assert read(0) == b'x' * 4096, 'synced'
assert read(4096) == bytes(4096), 'in the cache only'
assert read(8192) == b'x' * 4096, 'written with O_DSYNC'
",
    );
}

fn a_zoned_device_is_written_at_its_write_pointers(way: &Way) {
    let device = "null:///z?size=64M&bs=4k&zoned=1&zone_size=4M&memory_backed=1";
    let mounted = way.serve(&[device]);
    python(
        &mounted.file("z"),
        "
fd = os.open(path, os.O_RDWR)
assert os.pwrite(fd, b'a' * 4096, 4 << 20) == 4096
assert os.pwrite(fd, b'b' * 4096, (4 << 20) + 4096) == 4096
fails(errno.EIO, os.pwrite, fd, b'c' * 4096, (4 << 20) + 65536)
fails(errno.EINVAL, os.pwrite, fd, b'c' * 100, (4 << 20) + 8192)
assert os.pread(fd, 200, (4 << 20) + 4000) == b'a' * 96 + b'b' * 104
",
    );
    let z = mounted.file("z");
    run(&["fallocate", "--punch-hole", "--offset", "4M", "--length", "4096", &z])
        .fails()
        .says(&["unsupported"]);
}

fn a_devices_error_is_the_files(way: &Way) {
    // Without a cache a flush would not reach the device.
    let mounted = way.serve(&["null:///mem0?size=64M&memory_backed=1&cache_size=1M"]);
    let inject = |rule: &str| {
        mounted.yard.command(&["inject", "mem0", rule]).ok();
    };
    inject("add,op=READ,start=8,nr_sectors=8,status=MEDIUM");
    inject("add,op=WRITE,start=16,nr_sectors=8,status=NOSPC");
    inject("add,op=FLUSH,status=IOERR");
    python(
        &mounted.file("mem0"),
        "
fd = os.open(path, os.O_RDWR)
fails(errno.ENODATA, os.pread, fd, 4096, 4096)
assert len(os.pread(fd, 4096, 0)) == 4096
fails(errno.ENOSPC, os.pwrite, fd, b'x' * 4096, 8192)
fails(errno.EIO, os.fsync, fd)
",
    );
    inject("removeall");
    python(&mounted.file("mem0"), "os.fsync(os.open(path, os.O_RDWR))");
}

fn only_what_has_to_wait_takes_a_lane(way: &Way) {
    // Before the first request of a channel, no request was executed inline, and every read went to
    // a worker.
    let mounted = way.serve(&[MEM0]);
    let has_lane = || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", mounted.yard.pid())).unwrap();
        // A thread that has just ended has no name any more.
        let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
        threads.flatten().flat_map(name).any(|name| name.trim() == "fuse-mem0")
    };
    let script = "
fd = os.open(path, os.O_RDWR)
for turn in range(100):
    assert os.pwrite(fd, b'x' * 4096, turn * 4096) == 4096
    assert os.pread(fd, 5000, turn * 4096)[:4096] == b'x' * 4096
";
    python(&mounted.file("mem0"), script);
    assert!(!has_lane());
    python(&mounted.file("mem0"), "os.fsync(os.open(path, os.O_RDWR))");
    assert!(has_lane());
}

fn requests_that_complete_at_once_have_a_latency(way: &Way) {
    // The bug: the statistics of a device that completes a request while it is submitted counted
    // the requests to its block file, but not their latency.
    let mounted = way.serve(&[MEM0]);
    let script = "
fd = os.open(path, os.O_RDWR)
for turn in range(100):
    assert os.pwrite(fd, b'x' * 4096, turn * 4096) == 4096
    assert os.pread(fd, 4096, turn * 4096) == b'x' * 4096
";
    python(&mounted.file("mem0"), script);
    let stats = &mounted.yard.command(&["stats", "mem0", "--json"]).ok().json()[0];
    for (op, latency) in [("read", "read_latency"), ("write", "write_latency")] {
        let buckets = stats[latency].as_array().unwrap();
        let timed: u64 = buckets.iter().map(|bucket| bucket[1].as_u64().unwrap()).sum();
        assert!(timed >= 100, "{latency}: {stats}");
        assert_eq!(stats["ops"][op]["ops"], timed, "{stats}");
    }
}

fn a_slow_device_holds_up_no_other(way: &Way) {
    // Each request takes a minute on one of the devices, and there are more of them than the
    // serving threads and workers keep in flight.
    let slow = "null:///slow?size=1G&irqmode=timer&completion_nsec=60000000000";
    let mounted = way.serve(&[slow, MEM0]);
    python(
        &mounted.file(""),
        "
# A process of its own: it cannot end before its reads do, which is when the server ends.
begun, begin = os.pipe()
if os.fork() == 0:
    null = os.open('/dev/null', os.O_RDWR)
    for number in range(3): os.dup2(null, number)
    slow = os.open(path + 'slow', os.O_RDONLY)
    read = lambda number: os.pread(slow, 4096, number * 4096)
    for number in range(150): threading.Thread(target=read, args=(number,)).start()
    os.write(begin, b'x')
    os.close(begin)
    read(150)
    os._exit(0)
os.read(begun, 1)
fd = os.open(path + 'mem0', os.O_RDWR)
for turn in range(100):
    assert os.pwrite(fd, b'x' * 4096, turn * 4096) == 4096
    os.fsync(fd)
",
    );
}
