//! Compressed RAM disks through the whole program, with real data and clients that others wrote.

use crate::copy::{IMAGE_BYTES, ext4_image};
use crate::place::Place;
use crate::run::{nbdsh, ok};
use crate::yard::Yard;

/// A tar of programs, cut to whole blocks: compressible data of the least friendly kind.
fn programs(place: &Place) -> String {
    let tar = place.file("programs");
    let script = format!(
        "tar --create --file=- --directory=/usr bin 2>/dev/null | head --bytes={} > {tar}",
        IMAGE_BYTES
    );
    ok(&["sh", "-c", &script]);
    ok(&["truncate", "--size=%4096", &tar]);
    tar
}

/// A statistic by zram's name.
fn stat(yard: &Yard, device: &str, group: &str, name: &str) -> u64 {
    let stats = yard.command(&["stats", device, "--json"]).ok().json();
    stats[0]["ram"][group][name].as_u64().unwrap_or_else(|| panic!("{group}.{name}: {stats}"))
}

#[test]
fn a_file_system_and_programs_come_back_as_they_were() {
    let devices = [
        "ram:///lz4?size=96M",
        "ram:///zstd?size=96M&algo=zstd&level=1",
        "ram:///units?size=96M&unit=64k&bs=512",
    ];
    let yard = Yard::serve(&devices);
    let (image, programs) = (ext4_image(&yard.place), programs(&yard.place));
    let back = yard.place.file("back");
    for name in ["lz4", "zstd", "units"] {
        for file in [&image, &programs] {
            ok(&["nbdcopy", "--connections=4", file, &yard.uri(name)]);
            ok(&["nbdcopy", "--connections=4", &yard.uri(name), &back]);
            let bytes = std::fs::metadata(file).unwrap().len();
            ok(&["cmp", &format!("--bytes={bytes}"), file, &back]);
        }
        let stored = stat(&yard, name, "mm_stat", "orig_data_size");
        let compressed = stat(&yard, name, "mm_stat", "compr_data_size");
        let used = stat(&yard, name, "mm_stat", "mem_used_total");
        assert!(compressed > 0 && compressed < stored, "{name}: {compressed} of {stored}");
        assert!(used >= compressed, "{name}: {used} for {compressed}");
        assert!(used < stored, "{name}: {used} for {stored}");
    }
}

#[test]
fn what_is_trimmed_is_given_back() {
    let yard = Yard::serve(&["ram:///r0?size=96M"]);
    let image = ext4_image(&yard.place);
    ok(&["nbdcopy", &image, &yard.uri("r0")]);
    assert!(stat(&yard, "r0", "mm_stat", "orig_data_size") > 0);
    nbdsh(&yard.uri("r0"), "for at in range(0, 96 << 20, 1 << 20): h.trim(1 << 20, at)");
    for name in ["orig_data_size", "compr_data_size", "same_pages", "huge_pages"] {
        assert_eq!(stat(&yard, "r0", "mm_stat", name), 0, "{name}");
    }
    assert!(stat(&yard, "r0", "io_stat", "notify_free") > 0);
}

#[test]
fn a_full_one_says_so_and_keeps_what_it_has() {
    let yard = Yard::serve(&["ram:///r0?size=64M&mem_limit=4M"]);
    nbdsh(
        &yard.uri("r0"),
        "
import random
block = lambda i: random.Random(i).randbytes(65536)
h.pwrite(b'\\x11' * 65536, 0)
stored = []
for i in range(1, 1024):
    try:
        h.pwrite(block(i), i << 16)
        stored.append(i)
    except nbd.Error as error:
        assert error.errnum == 28, error
        break
else:
    assert False, 'the limit was never reached'
assert 32 <= len(stored) <= 64, len(stored)
# What cannot be stored leaves what was there: whole blocks of 4 KiB, old or new.
for i in stored:
    assert h.pread(65536, i << 16) == block(i), i
try:
    h.pwrite(block(5000), 1 << 16)
except nbd.Error as error:
    assert error.errnum == 28, error
old, new, now = block(1), block(5000), h.pread(65536, 1 << 16)
for at in range(0, 65536, 4096):
    part = slice(at, at + 4096)
    assert now[part] in (old[part], new[part]), at
# Same-filled blocks take no memory, and what is trimmed makes room.
h.pwrite(b'\\x22' * 65536, 2000 << 12)
assert h.pread(65536, 2000 << 12) == b'\\x22' * 65536
h.trim(1 << 20, 1 << 16)
h.pwrite(block(7), 512 << 16)
assert h.pread(65536, 512 << 16) == block(7)
",
    );
    assert!(stat(&yard, "r0", "io_stat", "failed_writes") > 0);
    let used = stat(&yard, "r0", "mm_stat", "mem_used_max");
    assert!(used <= 4 << 20, "{used}");
}

#[test]
fn statistics_have_zrams_names() {
    let yard = Yard::serve(&["ram:///r0?size=16M"]);
    nbdsh(&yard.uri("r0"), "h.pwrite(b'abcd' * 1024, 0)");
    assert_eq!(stat(&yard, "r0", "mm_stat", "same_pages"), 1);
    let said = yard.command(&["stats", "r0"]).ok().out;
    for line in ["r0 io_stat: failed_reads 0", "r0 mm_stat: orig_data_size 4096 compr_data_size 0"]
    {
        assert!(said.contains(line), "{line}: {said}");
    }
    let metric = "blockyard_ram{device=\"r0\",group=\"mm_stat\",stat=\"same_pages\"} 1";
    let control = yard.place.file("control");
    let metrics = ok(&["curl", "--silent", "--unix-socket", &control, "http://yard/metrics"]);
    assert!(metrics.contains(metric), "{metrics}");
}
