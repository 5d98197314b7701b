//! Compressed RAM disks through the whole program, with real data and clients of other projects.

use crate::copy::{IMAGE_BYTES, ext4_image};
use crate::place::Place;
use crate::run::{nbdsh, ok};
use crate::yard::Yard;

/// A tar of programs, cut to whole blocks: compressible data of the most difficult kind.
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
fn discarded_memory_is_freed() {
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
    let status = yard.command(&["status"]).fails();
    assert_eq!(status.code, Some(2), "{status}");
    assert!(status.out.contains("\ncritical: no_space r0: "), "{status}");
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

/// The list of a yard with the RAM disk of the test below.
fn lists_as_zramctl(yard: &Yard) {
    let listed =
        yard.command(&["ram", "list", "--noheadings", "--bytes", "-o", "name,disksize,zero-pages"]);
    let listed = listed.ok().out;
    assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), ["r0", "67108864", "1"]);
    let listed = yard.command(&["ram", "list", "nothing"]).fails();
    assert!(listed.err.contains("there is no RAM disk `nothing`"), "{listed}");
    let listed = yard.command(&["ram", "list", "-o", "nothing"]).fails();
    assert!(listed.err.contains("invalid -o `nothing`: expected one of NAME, "), "{listed}");
}

/// Settings that change while the device is in use, and errors that name the bad setting.
#[test]
fn limits_and_histograms_of_a_device_that_is_used() {
    let yard = Yard::serve(&["ram:///r0?size=64M&dedup=1"]);
    let uri = yard.uri("r0");
    nbdsh(
        &uri,
        "
import random
block = lambda i: random.Random(i).randbytes(4096)
for i in range(500):
    h.pwrite(block(i % 250), i << 12)
h.pwrite(b'abcd' * 1024, 600 << 12)
for i in range(500):
    assert h.pread(4096, i << 12) == block(i % 250), i
",
    );
    assert_eq!(stat(&yard, "r0", "dedup_stat", "dup_data_size"), 250 * 4096);
    assert_eq!(stat(&yard, "r0", "mm_stat", "compr_data_size"), 250 * 4096);
    let command = |line: &[&str]| yard.command(line).ok().out;
    let said = command(&["ram", "histograms", "r0"]);
    let rows: Vec<Vec<&str>> = said.lines().map(|l| l.split_whitespace().collect()).collect();
    // The largest count has the longest bar.
    let bar = "#".repeat(40);
    let has = |row: [&str; 3]| rows.iter().any(|it| it[..] == row);
    assert!(has(["4096", "250", &bar]) && has(["0", "501", &bar]), "{said}");
    lists_as_zramctl(&yard);
    let json = yard.command(&["ram", "histograms", "r0", "--json"]).ok().json();
    assert_eq!((&json["sizes"][0]["objects"], &json["ages"][0]), (&250.into(), &501.into()));
    command(&["ram", "idle", "r0"]);
    let control = yard.place.file("control");
    let metrics = ok(&["curl", "--silent", "--unix-socket", &control, "http://yard/metrics"]);
    for line in [
        "blockyard_ram_objects{device=\"r0\",bytes=\"4096\"} 250",
        "blockyard_ram_blocks{device=\"r0\",age=\"1\"} 501",
        "blockyard_ram{device=\"r0\",group=\"dedup_stat\",stat=\"dup_data_size\"} 1024000",
    ] {
        assert!(metrics.lines().any(|have| have == line), "{line}: {metrics}");
    }
    let said = command(&["ram", "set", "r0", "mem_limit=1M", "mem_used_max=0", "compact=10"]);
    assert!(said.starts_with("r0: set: compact 10 mem_limit 1048576 mem_used_max "), "{said}");
    nbdsh(
        &uri,
        "
import random
# The pages that are there are filled, and no more are taken.
for i in range(64):
    try:
        h.pwrite(random.Random(7000 + i).randbytes(4096), (700 + i) << 12)
    except nbd.Error as error:
        assert error.errnum == 28, error
        break
else:
    assert False, 'there was room'
# What is there already takes none.
h.pwrite(random.Random(7).randbytes(4096), 900 << 12)
assert h.pread(4096, 900 << 12) == random.Random(7).randbytes(4096)
",
    );
    command(&["ram", "set", "r0", "mem_limit=0"]);
    assert_eq!(stat(&yard, "r0", "mm_stat", "mem_limit"), 0);
    let refused = |line: &[&str], word: &str| yard.command(line).fails().says(&[word]);
    refused(&["ram", "set", "r0", "mem_limit=much"], "invalid mem_limit `much`");
    refused(&["ram", "set", "r0", "mem_limit=4k"], "invalid mem_limit `4k`: expected");
    refused(&["ram", "set", "r0", "mem_used_max=5"], "invalid mem_used_max `5`: expected 0");
    refused(&["ram", "set", "r0", "compact=101"], "invalid compact `101`");
    refused(&["ram", "set", "r0", "algo=zstd"], "`algo` cannot be set while the device is used");
    refused(&["ram", "set", "r0", "compact=1", "compact=2"], "compact is given twice");
}

/// Both inputs read unchanged after each kind of maintenance, and from a snapshot in another
/// device.
#[test]
fn work_on_a_device_changes_nothing_that_is_read() {
    let place = Place::new();
    let image = ext4_image(&place);
    work_changes_nothing(&image, "recomp_algo=zstd&checksum=1", "4M");
    let programs = programs(&place);
    work_changes_nothing(&programs, "recomp_algo=lz4hc&recomp_algo2=zstd&dedup=1&unit=16k", "16M");
}

fn work_changes_nothing(image: &str, parameters: &str, limit: &str) {
    let files = Place::new();
    let (backing, snapshot) = (files.file("backing"), files.file("snapshot"));
    let uri = format!("ram:///r0?size=96M&{parameters}&backing={backing}");
    let yard = Yard::serve(&[&uri]);
    let back = yard.place.file("back");
    let bytes = format!("--bytes={}", std::fs::metadata(image).unwrap().len());
    ok(&["nbdcopy", image, &yard.uri("r0")]);
    let command = |line: &[&str]| yard.command(line).ok().out;
    let check = |what: &str| {
        ok(&["nbdcopy", "--connections=4", &yard.uri("r0"), &back]);
        let same = crate::run::run(&["cmp", &bytes, image, &back]);
        assert_eq!(same.code, Some(0), "after {what}: {same}");
    };
    check("the copy");
    let compacted = command(&["ram", "compact", "r0"]);
    assert!(compacted.starts_with("r0: compact: blocks_moved "), "{compacted}");
    check("compact");
    let before = stat(&yard, "r0", "mm_stat", "compr_data_size");
    let said = command(&["ram", "recompress", "r0", "--type", "all"]);
    assert!(said.starts_with("r0: recompress: incompressible "), "{said}");
    let after = stat(&yard, "r0", "mm_stat", "compr_data_size");
    assert!(after < before * 95 / 100, "{after} of {before}");
    check("recompress");
    assert_eq!(command(&["ram", "idle", "r0"]), "r0: idle: done\n");
    let json = yard.command(&["ram", "writeback", "r0", "--limit", "0", "--json"]).ok().json();
    let done = &json["done"];
    assert_eq!((&done["blocks"], &done["skipped_written"]), (&0.into(), &0.into()), "{json}");
    assert!(done["skipped_limit"].as_u64().unwrap() > 100, "{json}");
    let said = command(&["ram", "writeback", "r0", "--type", "idle", "--limit", limit]);
    for word in [" bytes ", " skipped_limit ", " skipped_no_place 0 ", " skipped_used 0 "] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let backed = stat(&yard, "r0", "bd_stat", "bd_count");
    assert!(backed > 100, "{backed}");
    check("writeback");
    command(&["ram", "compact", "r0"]);
    check("compact after writeback");
    let list = command(&["ram", "blocks", "r0", "--count", "10000"]);
    assert!(list.lines().any(|line| line.split_whitespace().nth(3) == Some(".w..r.")), "{list}");
    command(&["ram", "save", "r0", &snapshot]);
    check("save");
    let (unit, blocks) =
        if parameters.contains("unit=16k") { ("16k", 6144) } else { ("4k", 24_576) };
    let like = format!("ram:///r1?size=96M&unit={unit}&algo=zstd&load={snapshot}");
    let loaded = Yard::serve(&[&like]);
    ok(&["nbdcopy", &loaded.uri("r1"), &back]);
    ok(&["cmp", &bytes, image, &back]);
    // An invalid request is refused with the name of the field.
    let refused = |line: &[&str], word: &str| yard.command(line).fails().says(&[word]);
    refused(&["ram", "recompress", "r0", "--type", "old"], "invalid type `old`");
    refused(&["ram", "writeback", "r0", "--age", "9"], "invalid age `9`");
    refused(
        &["ram", "save", "r0", "/no/such/folder/file"],
        "cannot write `/no/such/folder/file`: No such file",
    );
    let wanted = format!("invalid from `99999`: expected a block below {blocks},");
    refused(&["ram", "blocks", "r0", "--from", "99999"], &wanted);
    refused(&["inject", "r0", "nospc=often"], "invalid nospc `often`: expected a number");
    let plain = Yard::serve(&["ram:///r2?size=16M", "null:///n0?size=1G"]);
    let refused = |line: &[&str], word: &str| plain.command(line).fails().says(&[word]);
    refused(&["ram", "recompress", "r2"], "recomp_algo");
    refused(&["ram", "writeback", "r2"], "backing");
    refused(&["ram", "compact", "n0"], "`n0` is not a RAM disk");
}

/// A dictionary that is trained on one device compresses another's blocks better. It is saved in a
/// snapshot, which a device with it and one without it can load.
#[test]
fn a_dictionary_goes_from_device_to_device() {
    let files = Place::new();
    let (dictionary, snapshot) = (files.file("dictionary"), files.file("snapshot"));
    let image = ext4_image(&files);
    let first = Yard::serve(&["ram:///r0?size=96M"]);
    ok(&["nbdcopy", &image, &first.uri("r0")]);
    let said = first.command(&["ram", "train", "r0", &dictionary]).ok().out;
    assert!(said.starts_with("r0: train: bytes ") && said.contains(" samples "), "{said}");
    let with = format!("ram:///with?size=96M&algo=zstd&dict={dictionary}");
    let later = format!("ram:///later?size=96M&recomp_algo=zstd&recomp_dict={dictionary}");
    let yard = Yard::serve(&[&with, &later, "ram:///without?size=96M&algo=zstd"]);
    for name in ["with", "later", "without"] {
        ok(&["nbdcopy", &image, &yard.uri(name)]);
    }
    yard.command(&["ram", "recompress", "later"]).ok();
    let size = |name| stat(&yard, name, "mm_stat", "compr_data_size");
    let without = size("without");
    for name in ["with", "later"] {
        assert!(size(name) < without * 95 / 100, "{name}: {} and {without}", size(name));
        let back = yard.place.file("back");
        ok(&["nbdcopy", &yard.uri(name), &back]);
        ok(&["cmp", &image, &back]);
    }
    yard.command(&["ram", "save", "with", &snapshot]).ok();
    let parameters =
        [format!("algo=zstd&dict={dictionary}"), "algo=zstd".into(), "algo=lz4".into()];
    for parameters in parameters {
        let yard = Yard::serve(&[&format!("ram:///r1?size=96M&{parameters}&load={snapshot}")]);
        let back = yard.place.file("back");
        ok(&["nbdcopy", &yard.uri("r1"), &back]);
        ok(&["cmp", &image, &back]);
    }
}

/// Maintenance does what is requested by name, number and priority.
#[test]
fn work_is_chosen_by_kind_count_and_priority() {
    let files = Place::new();
    let uri = format!(
        "ram:///r0?size=16M&recomp_algo=lz4hc&recomp_algo2=zstd&backing={}",
        files.file("backing")
    );
    let yard = Yard::serve(&[&uri]);
    nbdsh(
        &yard.uri("r0"),
        "
import random
for i in range(100):
    h.pwrite(random.Random(i).randbytes(4096), i << 12)
for i in range(100, 150):
    h.pwrite(b''.join(b'%d %d ' % (i, n * n) for n in range(1000))[:4096], i << 12)
",
    );
    let done = |line: &[&str]| yard.command(line).ok().json()["done"].clone();
    let line = ["ram", "recompress", "r0", "--type", "huge", "--max", "10", "--json"];
    let found = done(&line);
    assert_eq!((&found["replaced"], &found["incompressible"]), (&0.into(), &100.into()), "{found}");
    let found = done(&["ram", "recompress", "r0", "--priority", "2", "--max", "30", "--json"]);
    assert_eq!(found["replaced"], 30, "{found}");
    let list = yard.command(&["ram", "blocks", "r0"]).ok().out;
    let flags = |flags: &str| {
        list.lines().filter(|line| line.split_whitespace().nth(3) == Some(flags)).count()
    };
    assert_eq!((flags("..h..n"), flags("....r.")), (100, 30), "{list}");
    let line = ["ram", "writeback", "r0", "--type", "incompressible", "--max", "40", "--json"];
    let found = done(&line);
    assert_eq!((&found["blocks"], &found["bytes"]), (&40.into(), &(40 * 4096).into()), "{found}");
    let found = done(&["ram", "writeback", "r0", "--type", "huge_idle", "--json"]);
    assert_eq!(found["blocks"], 0, "none is idle: {found}");
    yard.command(&["ram", "idle", "r0"]).ok();
    let found = done(&["ram", "writeback", "r0", "--type", "huge_idle", "--age", "2", "--json"]);
    assert_eq!(found["blocks"], 0, "none so long: {found}");
    let found = done(&["ram", "writeback", "r0", "--type", "huge_idle", "--json"]);
    assert_eq!(found["blocks"], 60, "{found}");
}

#[test]
fn a_snapshot_that_is_killed_leaves_the_old_one() {
    let files = Place::new();
    let snapshot = files.file("snapshot");
    let unfinished = format!("{snapshot}.blockyard-unfinished");
    let yard = Yard::serve(&["ram:///r0?size=96M"]);
    nbdsh(&yard.uri("r0"), "h.pwrite(b'first' * 819 + b'!', 0)");
    yard.command(&["ram", "save", "r0", &snapshot]).ok();
    drop(yard);
    let programs = programs(&files);
    // The kill comes during the save, once the temporary file has data. A save that finishes before
    // the kill shows nothing.
    let is_hit = (0..20).any(|_| {
        let mut yard = Yard::serve(&["ram:///r0?size=96M"]);
        ok(&["nbdcopy", &programs, &yard.uri("r0")]);
        let control = yard.place.file("control");
        let line = [
            "sh",
            "-c",
            "\"$0\" ram save r0 \"$1\" --control \"$2\" &
            look=0
            while [ $look -lt 1000000 ] && [ ! -s \"$1.blockyard-unfinished\" ]; do
                look=$((look + 1))
            done
            kill -KILL $! \"$3\"; wait; true",
            crate::yard::BLOCKYARD,
            &snapshot,
            &control,
            &yard.pid().to_string(),
        ];
        ok(&line);
        assert!(!yard.end().success());
        std::fs::metadata(&unfinished).is_ok_and(|it| it.len() > 0)
    });
    assert!(is_hit, "no kill has hit a save");
    let yard = Yard::serve(&[&format!("ram:///r0?size=96M&load={snapshot}")]);
    let back = yard.place.file("back");
    ok(&["nbdcopy", &yard.uri("r0"), &back]);
    let found = std::fs::read(&back).unwrap();
    let whole = std::fs::read(&programs).unwrap();
    let first = [&b"first".repeat(819)[..], b"!"].concat();
    assert!(found[..4096] == first[..] || found[..whole.len()] == whole[..]);
    // The next save takes over the temporary file of the killed one, and removes it.
    yard.command(&["ram", "save", "r0", &snapshot]).ok();
    assert!(!std::path::Path::new(&unfinished).exists());
    // A damaged snapshot is refused, with its name.
    drop(yard);
    let mut bytes = std::fs::read(&snapshot).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&snapshot, bytes).unwrap();
    let uri = format!("ram:///r0?size=96M&load={snapshot}");
    let endpoint = format!("unix:{}", files.file("nbd"));
    let refused = crate::yard::blockyard(&["serve", &uri, "--nbd", &endpoint]).fails();
    refused.says(&["load: `", "snapshot`: it is damaged"]);
}

/// The bug: `ram save` and its request replaced any file, for example with `{"file":
/// "/etc/passwd"}`.
#[test]
fn a_save_replaces_nothing_but_a_save() {
    let files = Place::new();
    let (precious, inside) = (files.file("precious"), files.file("inside"));
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(&precious, "root:x:0:0\n").unwrap();
    let kept = || assert_eq!(std::fs::read_to_string(&precious).unwrap(), "root:x:0:0\n");
    let (nbd, control) = (format!("unix:{}", files.file("nbd")), files.file("control"));
    let yard = Yard::serve_in(Place::new(), &["ram:///r0?size=8M"]);
    for verb in ["save", "train"] {
        let run = yard.command(&["ram", verb, "r0", &precious]).fails();
        run.says(&["the file exists; --force replaces it"]);
        kept();
    }
    // A request can only name paths in the directories of the configuration.
    let post = |control: &str, path: &str, body: &str| {
        let url = format!("http://yard/v1/{path}");
        ok(&["curl", "--silent", "--unix-socket", control, "--data", body, &url])
    };
    let save = |file: &str, rest: &str| format!("{{\"file\": \"{file}\"{rest}}}");
    for body in [save(&precious, ""), save(&precious, ", \"force\": true"), save("/etc/passwd", "")]
    {
        let answer = post(&yard.control(), "devices/r0/ram/save", &body);
        assert!(answer.contains("--api-directory DIR"), "{answer}");
    }
    kept();
    let trace = format!("{{\"uri\": \"null:///t?size=1M&trace={precious}\"}}");
    let answer = post(&yard.control(), "devices", &trace);
    assert!(answer.contains("--api-directory DIR"), "{answer}");
    kept();
    drop(yard);
    let line = ["serve", "ram:///r0?size=8M", "--nbd", &nbd, "--control", &control];
    let folder = ["--api-directory", &inside];
    let yard = Yard::start(Place::new(), &[&line[..], &folder].concat());
    let own = format!("{inside}/save");
    let answer = post(&control, "devices/r0/ram/save", &save(&own, ""));
    assert!(answer.contains("\"bytes\""), "{answer}");
    let answer = post(&control, "devices/r0/ram/save", &save(&own, ""));
    assert!(answer.contains("\"bytes\""), "a save replaces a save: {answer}");
    std::fs::write(&own, "root:x:0:0\n").unwrap();
    let answer = post(&control, "devices/r0/ram/save", &save(&own, ""));
    assert!(answer.contains("force replaces it"), "{answer}");
    for escape in [format!("{inside}/../precious"), precious.clone()] {
        let answer = post(&control, "devices/r0/ram/save", &save(&escape, ", \"force\": true"));
        assert!(answer.contains("invalid"), "{answer}");
    }
    kept();
    drop(yard);
}
