//! zonefs in use: made and mounted by the program, filled and read by ordinary programs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};

use crate::attach::unmount_lazily;
use crate::place::Place;
use crate::run::{Run, nbdsh, ok, run, within};
use crate::user::{NOBODY, Opened};
use crate::yard::{BLOCKYARD, Yard, blockyard};

/// Sixteen zones of sixteen mebibytes, two of them conventional.
const Z: &str = "null:///z?size=256M&bs=4k&zoned=1&zone_size=16M&zone_nr_conv=2&zone_max_open=3\
                 &memory_backed=1";

/// A yard with a file system of the device `z`, mounted at `m` in its place.
struct Mounted(Yard);

impl Mounted {
    fn new(device: &str, format: &[&str], options: &str) -> Mounted {
        let yard = Yard::serve(&[device]);
        fs::create_dir(yard.place.file("m")).unwrap();
        let mut line = vec!["mkzonefs", "z"];
        line.extend(format);
        yard.command(&line).ok();
        let mounted = Mounted(yard);
        mounted.mount(options).ok();
        mounted
    }

    fn mount(&self, options: &str) -> Run {
        self.0.command(&["zonefs", "mount", "z", &self.0.place.file("m"), "-o", options])
    }

    fn file(&self, name: &str) -> String {
        self.0.place.file(&format!("m/{name}"))
    }

    fn is_mounted(&self) -> bool {
        is_mounted(&self.0.place.file("m"))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A killed yard cannot unmount; a file system that a test has unmounted need not be.
        let _ = self.0.command(&["zonefs", "unmount", "z"]);
        unmount_lazily(&self.0.place.file("m"));
    }
}

fn is_mounted(dir: &str) -> bool {
    fs::read_to_string("/proc/mounts").unwrap().contains(&format!(" {dir} fuse"))
}

#[test]
fn it_is_made_mounted_listed_and_unmounted() {
    let yard = Yard::serve(&[Z, "null:///plain?size=1M", "null:///gone?size=1G&zoned=1"]);
    let dir = yard.place.file("m");
    fs::create_dir(&dir).unwrap();
    let refused = |args: &[&str], code: i32, says: &str| {
        let run = yard.command(args).fails().says(&[says]);
        assert_eq!(run.code, Some(code), "{run}");
    };
    refused(&["zonefs", "mount", "z", &dir], 6, "zonefs (z) ERROR: the device holds no zonefs");
    refused(&["mkzonefs", "plain"], 6, "zonefs (plain) ERROR: Not a zoned block device");
    refused(&["mkzonefs", "gone"], 6, "memory_backed=1");
    refused(&["mkzonefs", "never"], 5, "never");
    refused(&["mkzonefs", "z", "-o", "perm=9"], 2, "`perm=9`: expected");
    refused(&["mkzonefs", "z", "-U", "1234"], 2, "invalid uuid `1234`");
    refused(&["mkzonefs", "z", "-L", &"x".repeat(65)], 2, "at most 64 bytes");
    yard.command(&["mkzonefs", "z", "-L", "logs"]).ok();
    refused(&["mkzonefs", "z"], 6, "the device holds a zonefs; -f overwrites it");
    refused(&["zonefs", "mount", "z", &dir, "-o", "errors=panic"], 2, "`errors=panic`: expected");
    refused(
        &["zonefs", "mount", "z", &yard.place.file("no/such/place")],
        6,
        "expected a directory",
    );
    refused(&["zonefs", "mount", "z", "/etc"], 2, "--api-directory DIR");
    refused(&["zonefs", "unmount", "z"], 6, "`z` is not mounted");
    yard.command(&["zonefs", "mount", "z", &dir, "-o", "errors=repair,explicit-open"]).ok();
    assert!(is_mounted(&dir));
    refused(&["zonefs", "mount", "z", &dir], 6, "`z` is mounted at");
    refused(&["mkzonefs", "-f", "z"], 6, "`z` is mounted at");
    refused(&["remove", "z"], 6, "`z` is mounted at");
    // An event Q of a write of 4 KiB: a mounted file system is not forced.
    let trace = yard.place.file("trace");
    let words = [0x6561_7407_u32, 0, 0, 0, 0, 0, 4096, 0x0012_0001, 0, 0, 0, 0];
    fs::write(&trace, words.map(u32::to_le_bytes).concat()).unwrap();
    refused(&["replay", &trace, "z", "--write", "--force"], 6, "`z` is mounted at");
    let list = yard.command(&["zonefs", "list", "--json"]).ok().json();
    assert_eq!(list[0]["options"], "rw,errors=repair,explicit-open", "{list}");
    assert_eq!((&list[0]["label"], &list[0]["sequential_files"]), (&"logs".into(), &14.into()));
    yard.command(&["zonefs", "unmount", "z"]).ok();
    assert!(!is_mounted(&dir));
    // A file system unmounted by another program is forgotten; one of a removed device is
    // unmounted.
    yard.command(&["zonefs", "mount", "z", &dir]).ok();
    ok(&["umount", &dir]);
    yard.command(&["zonefs", "mount", "z", &dir]).ok();
    yard.command(&["remove", "z", "--force"]).ok();
    assert!(!is_mounted(&dir));
}

#[test]
fn a_yard_that_ends_unmounts() {
    let mut mounted = Mounted::new(Z, &[], "");
    assert!(mounted.is_mounted());
    mounted.0.signal("TERM");
    assert!(mounted.0.end().success());
    assert!(!mounted.is_mounted());
}

#[test]
fn blkid_knows_the_superblock() {
    let yard = Yard::serve(&[Z]);
    let uuid = "00112233-4455-6677-8899-aabbccddeeff";
    yard.command(&["mkzonefs", "z", "-v", "-L", "logs", "-U", uuid]).ok();
    let image = yard.place.file("image");
    nbdsh(&yard.uri("z"), &format!("open('{image}', 'wb').write(h.pread(65536, 0))"));
    let found = ok(&["blkid", "--probe", "--output", "export", &image]);
    assert!(found.contains("TYPE=zonefs\n") && found.contains("LABEL=logs\n"), "{found}");
}

/// The bug: while a zonefs was mounted, an NBD client could discard the device and `dd` could write
/// to its block file, and the next mount found no superblock; a device with an NBD client could be
/// mounted.
#[test]
fn a_mounted_file_system_has_its_device_to_itself() {
    let files = Place::new();
    let dir = files.file("files");
    fs::create_dir(&dir).unwrap();
    let yard = Yard::serve(&["--fuse", &dir, Z]);
    let mount = yard.place.file("m");
    fs::create_dir(&mount).unwrap();
    yard.command(&["mkzonefs", "z"]).ok();
    let uri = yard.uri("z");
    let file = format!("{dir}/z");
    // Clients that are there first keep the device from being mounted.
    let refused = |says: &str| {
        yard.command(&["zonefs", "mount", "z", &mount]).fails().says(&["cannot mount `z`", says]);
    };
    let open = fs::File::options().write(true).open(&file).unwrap();
    refused("its block file is open");
    drop(open);
    let line = ["zonefs", "mount", "z", &mount].map(|word| format!("'{word}'")).join(", ");
    let script = format!(
        "import subprocess; run = subprocess.run(['{BLOCKYARD}', {line}, '--control', '{}'], \
         capture_output=True); print(run.returncode, run.stderr.decode())",
        yard.control()
    );
    let said = nbdsh(&uri, &script);
    assert!(said.starts_with('6') && said.contains("1 client"), "{said}");
    // Once it is mounted, nothing else can write.
    yard.command(&["zonefs", "mount", "z", &mount]).ok();
    for change in ["discard 0 256M", "write 0 4k"] {
        run(&["qemu-io", "-f", "raw", "-c", change, &uri])
            .fails()
            .says(&["a file system of the device is mounted"]);
    }
    let dd = ["dd", "if=/dev/zero", &format!("of={file}"), "bs=4k", "count=1", "conv=notrunc"];
    run(&dd).fails().says(&["busy"]);
    fs::File::open(&file).unwrap();
    yard.command(&["zonefs", "unmount", "z"]).ok();
    yard.command(&["zonefs", "mount", "z", &mount]).ok();
    yard.command(&["zonefs", "unmount", "z"]).ok();
    // With force a device in use is mounted.
    let open = fs::File::options().write(true).open(&file).unwrap();
    yard.command(&["zonefs", "mount", "z", &mount, "--force"]).ok();
    yard.command(&["zonefs", "unmount", "z"]).ok();
    drop(open);
    nbdsh(&uri, "h.pwrite(b'x' * 4096, 4096)");
    unmount_lazily(&mount);
}

#[test]
fn dd_writes_reads_and_appends() {
    let mounted = Mounted::new(Z, &[], "");
    let (file, data) = (mounted.file("seq/0"), mounted.0.place.file("data"));
    ok(&["dd", "if=/dev/urandom", &format!("of={data}"), "bs=64k", "count=40", "status=none"]);
    let (from, to) = (format!("if={data}"), format!("of={file}"));
    let direct =
        |more: &[&str]| run(&[&["dd", &from, &to, "conv=notrunc", "status=none"], more].concat());
    direct(&["bs=512k", "oflag=direct"]).ok();
    ok(&["cmp", &data, &file]);
    direct(&["bs=64k", "oflag=direct"]).fails().says(&["Invalid argument"]);
    direct(&["bs=64k"]).fails().says(&["Input/output error"]);
    direct(&["bs=64k", "oflag=append,direct", "count=8"]).ok();
    assert_eq!(fs::metadata(&file).unwrap().size(), (40 + 8) * 65536);
    ok(&["truncate", "--size=0", &file]);
    assert_eq!(fs::metadata(&file).unwrap().size(), 0);
    run(&["truncate", "--size=1", &file]).fails().says(&["Operation not permitted"]);
    // A conventional file accepts any write.
    let (file, to) = (mounted.file("cnv/0"), format!("of={}", mounted.file("cnv/0")));
    ok(&["dd", &from, &to, "bs=777", "seek=3", "conv=notrunc", "status=none"]);
    ok(&["cmp", &format!("--ignore-initial=0:{}", 3 * 777), "--bytes=2621440", &data, &file]);
}

#[test]
fn fio_verifies_a_file_for_each_job() {
    let mounted = Mounted::new(Z, &[], "errors=repair");
    let dir = mounted.file("seq");
    let mut line = vec!["fio", "--ioengine=psync", "--direct=1", "--bs=64k", "--size=4M"];
    // The files exist and are appended to; fio creates and removes none.
    line.extend(["--rw=write", "--file_append=1", "--allow_file_create=0", "--create_on_open=1"]);
    line.extend([
        "--fallocate=none",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
    ]);
    let jobs: Vec<String> = (0..4).map(|n| format!("--name=j{n}\n--filename={dir}/{n}")).collect();
    line.extend(jobs.iter().flat_map(|job| job.split('\n')));
    run(&line).ok();
    for number in 0..4 {
        let size = fs::metadata(mounted.file(&format!("seq/{number}"))).unwrap().size();
        assert_eq!(size, 4 << 20);
    }
    // One conventional file, written by several jobs at random offsets.
    let file = format!("--filename={}", mounted.file("cnv/0"));
    let mut line = vec!["fio", "--name=random", &file, "--ioengine=psync", "--direct=1"];
    line.extend(["--rw=randwrite", "--bs=4k", "--numjobs=4", "--size=4M", "--thread"]);
    line.extend(["--offset_increment=4M", "--allow_file_create=0", "--fallocate=none"]);
    line.extend([
        "--verify=crc32c",
        "--verify_fatal=1",
        "--create_on_open=1",
        "--verify_state_save=0",
    ]);
    run(&line).ok();
}

/// Packs two gibibytes of system files, or all that exist, as a tar over as many zone files as it
/// needs. Prints the bytes of the files and those available, and keeps the tar's checksum: the
/// files themselves may change meanwhile, which tar reports by status 1.
const PACK: &str = r#"
set -o errexit -o pipefail
place=$1 mount=$2 max=$3
find /usr -ignore_readdir_race -xdev -type f -size -64M -printf '%s %p\n' >"$place/all"
LC_ALL=C sort -k2 "$place/all" | awk -v max="$max" -v list="$place/list" '{
    all += $1
    if (sum >= max) next
    sum += $1
    sub(/^[^ ]* /, "")
    print >list
} END { printf "%.0f %.0f\n", sum, all }'
mkfifo "$place/tar"
# The shell in which `split` runs its filter.
export SHELL=$BASH
b2sum <"$place/tar" >"$place/sum" &
{ tar --create --absolute-names --hard-dereference --blocking-factor=2048 \
    --files-from="$place/list" || [ $? = 1 ]; } |
    tee "$place/tar" |
    split --numeric-suffixes --suffix-length=3 --bytes=256M --filter="
        dd of=$mount/seq/\$((10#\${FILE#x})) bs=1M iflag=fullblock oflag=direct conv=notrunc \
            status=none"
wait $!
"#;

/// Prints the checksum of the unpacked tar.
const COMPARE: &str = r#"
set -o errexit -o pipefail
for number in $(seq 0 14); do
    file=$1/seq/$number
    [ ! -s "$file" ] || cat "$file"
done | b2sum
"#;

/// The bytes that are packed, if there are as many.
const TREE_BYTES: u64 = 2 << 30;

/// The least that is packed: every system that builds this has more.
const TREE_BYTES_MIN: u64 = 256 << 20;

/// The time limit, far above what reading or writing takes, even from a slow disk during other
/// tests.
const TREE_SECONDS_MAX: u32 = 900;

#[test]
fn a_tree_of_system_files_comes_back_equal() {
    let place = Place::new();
    let disk = "smr:///z?size=4G&zone_size=256M&zone_nr_conv=1";
    let backing = place.file("disk");
    let device = format!("{disk}&backing={backing}");
    let mounted = Mounted::new(&device, &["-L", "tree"], "");
    let list = mounted.0.place.file("");
    let dir = mounted.0.place.file("m");
    let line = ["bash", "-c", PACK, "pack", &list, &dir, &TREE_BYTES.to_string()];
    let said = within(TREE_SECONDS_MAX, &line).ok().out;
    let (packed, all) = said.trim().split_once(' ').unwrap();
    let (packed, all): (u64, u64) = (packed.parse().unwrap(), all.parse().unwrap());
    assert!(packed >= TREE_BYTES.min(all) && packed >= TREE_BYTES_MIN, "{packed} of {all}");
    let sizes = (0..15).map(|n| fs::metadata(mounted.file(&format!("seq/{n}"))).unwrap().size());
    let written: u64 = sizes.sum();
    assert!(written >= packed / 100 * 99, "{written} of {packed}");
    let sum = fs::read_to_string(mounted.0.place.file("sum")).unwrap();
    let sum_of =
        |dir: &str| within(TREE_SECONDS_MAX, &["bash", "-c", COMPARE, "compare", dir]).ok().out;
    assert_eq!(sum_of(&dir).trim(), sum.trim());
    // Another process mounts what the first has left.
    drop(mounted);
    let yard = Yard::serve(&[&device]);
    fs::create_dir(yard.place.file("m")).unwrap();
    let again = Mounted(yard);
    again.mount("ro").ok();
    assert_eq!(sum_of(&again.0.place.file("m")).trim(), sum.trim());
}

/// A mount of the command's own, and its directory. Dropping it kills the command and unmounts,
/// which the killed command cannot do.
struct Own(Child, String);

impl Own {
    /// Mounts in the background, as another user if `line` says so, and returns when it is mounted.
    fn mount(line: &mut Command, dir: &str) -> Own {
        let child = line.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut own = Own(child, dir.to_owned());
        let mut said = String::new();
        let out = own.0.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut said).unwrap();
        assert!(said.contains(dir), "{said}");
        own
    }

    fn end(mut self, signal: &str) {
        ok(&["kill", &format!("-{signal}"), &self.0.id().to_string()]);
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        unmount_lazily(&self.1);
    }
}

#[test]
fn without_root_and_without_a_yard_it_is_mounted_too() {
    let place = Place::new();
    let (dir, program) = (place.file("m"), place.file("blockyard"));
    fs::create_dir(&dir).unwrap();
    let uri = format!("smr:///s?size=64M&zone_size=4M&zone_nr_conv=1&backing={}", place.file("d"));
    let is_root = rustix::process::geteuid().is_root();
    let mut opened = None;
    let mut line: Vec<&str> = Vec::new();
    let user = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")];
    if is_root {
        // The folder in which cargo builds may be accessible to root only.
        opened = Some(Opened::new());
        // Another process copies the program: if this process wrote the copy, a child that another
        // test starts at that moment would inherit the open descriptor, and exec would fail.
        ok(&["cp", BLOCKYARD, &program]);
        for path in [place.path().to_str().unwrap(), &dir] {
            std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        line.extend(["setpriv", &user[0], &user[1], "--clear-groups", &program]);
    } else {
        line.push(BLOCKYARD);
    }
    let with = |args: &[&str]| -> Vec<String> {
        line.iter().chain(args).map(|word| (*word).to_owned()).collect()
    };
    let format = with(&["mkzonefs", &uri]);
    ok(&format.iter().map(String::as_str).collect::<Vec<_>>());
    let mount = || {
        let words = with(&["zonefs", "mount", &uri, &dir]);
        Own::mount(Command::new(&words[0]).args(&words[1..]), &dir)
    };
    let user = |line: &[&str]| -> Run {
        let user = ["setpriv", &user[0], &user[1], "--clear-groups"];
        run(&if is_root { [&user, line].concat() } else { line.to_vec() })
    };
    let own = mount();
    let file = format!("{dir}/seq/0");
    // By default the files belong to the user of the mount, and root has no access to a user's
    // mount.
    let to = format!("of={file}");
    user(&["dd", "if=/dev/zero", &to, "bs=64k", "count=3", "oflag=direct", "conv=notrunc"]).ok();
    own.end("TERM");
    assert!(!is_mounted(&dir));
    let own = mount();
    let size = user(&["stat", "--format=%s %a %u", &file]).ok().out;
    assert_eq!(size.split(' ').next(), Some("196608"), "{size}");
    if is_root {
        assert_eq!(size.trim(), format!("196608 640 {NOBODY}"));
    }
    own.end("INT");
    // Unmounted by another program, the command ends by itself.
    let mut own = mount();
    user(&["fusermount3", "-u", &dir]).ok();
    assert!(own.0.wait().unwrap().success());
    drop(opened);
    let wrong = blockyard(&["zonefs", "mount", "smr:///s?sise=1G", &dir]).fails();
    assert_eq!(wrong.code, Some(2), "{wrong}");
}
