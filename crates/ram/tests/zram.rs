//! Compares with the running kernel's zram: the same data by the same algorithm take about the same
//! number of bytes, and less memory in total. The data are programs as files, in a tar, and in an
//! ext4 image with other files. Needs root and a kernel with zram. Without them the test compares
//! nothing and says so on stderr, bypassing output capture.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Disk, Flags, Sector};
use blockyard_ram::{Ram, RamConfig};

const BLOCK: usize = 4096;
/// Minimum size of the programs to compare, in bytes.
const BYTES_MAX: usize = 24 << 20;
/// Maximum size of a single program.
const PROGRAM_BYTES_MAX: usize = 4 << 20;
/// Size of a zram table entry: handle and flags.
const ZRAM_ENTRY_BYTES: u64 = 16;

/// A zram device of this test.
struct Zram {
    number: String,
    /// A device node that the test creates itself, since no udev may be running.
    node: PathBuf,
}

fn control(name: &str) -> PathBuf {
    Path::new("/sys/class/zram-control").join(name)
}

impl Zram {
    fn add(size: usize) -> io::Result<Zram> {
        if !control("hot_add").exists() {
            let _ = Command::new("modprobe").arg("zram").status();
        }
        let number = fs::read_to_string(control("hot_add"))?.trim().to_owned();
        let name = format!("blockyard-zram-{}", std::process::id());
        let zram = Zram { number, node: std::env::temp_dir().join(name) };
        zram.set("comp_algorithm", "lz4")?;
        zram.set("disksize", &size.to_string())?;
        let numbers = fs::read_to_string(zram.attribute("dev"))?;
        let (major, minor) = numbers.trim().split_once(':').unwrap();
        let made = Command::new("mknod").arg(&zram.node).args(["b", major, minor]).status()?;
        assert!(made.success(), "mknod");
        Ok(zram)
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block").join(format!("zram{}", self.number)).join(name)
    }

    fn set(&self, name: &str, value: &str) -> io::Result<()> {
        fs::write(self.attribute(name), value)
    }

    /// `orig_data_size`, `compr_data_size`, `mem_used_total`.
    fn stored(&self) -> [u64; 3] {
        let line = fs::read_to_string(self.attribute("mm_stat")).unwrap();
        let mut numbers = line.split_whitespace().map(|number| number.parse().unwrap());
        std::array::from_fn(|_| numbers.next().unwrap())
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.node);
        let _ = self.set("reset", "1");
        let _ = fs::write(control("hot_remove"), &self.number);
    }
}

/// Prints a message that output capture does not hide.
fn say_loudly(what: &str) {
    let _ = writeln!(io::stderr(), "\nNOT COMPARED WITH ZRAM: {what}\n");
}

/// A temporary directory of this test, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let name = format!("blockyard-compared-with-zram-{}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        fs::create_dir_all(&folder.0).unwrap();
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Common programs, sorted by name, until there are enough bytes; no large ones, which would
/// dominate the data.
fn programs() -> Vec<PathBuf> {
    let entries = fs::read_dir("/usr/bin").unwrap().flatten();
    let len = |path: &Path| fs::metadata(path).map_or(0, |meta| meta.len() as usize);
    let paths = entries.map(|entry| entry.path());
    let is_one = |path: &PathBuf| path.is_file() && len(path) <= PROGRAM_BYTES_MAX;
    let mut paths: Vec<_> = paths.filter(is_one).collect();
    paths.sort();
    let mut bytes = 0;
    let enough = paths.iter().position(|path| {
        bytes += len(path);
        bytes >= BYTES_MAX
    });
    paths.truncate(enough.map_or(paths.len(), |last| last + 1));
    paths
}

/// The programs, concatenated.
fn files() -> Vec<u8> {
    programs().iter().flat_map(|path| fs::read(path).unwrap_or_default()).collect()
}

/// A tar of the programs.
fn tar() -> Vec<u8> {
    let made = Command::new("tar").args(["--create", "--dereference"]).args(programs()).output();
    let made = made.unwrap();
    assert!(made.status.success(), "tar: {}", String::from_utf8_lossy(&made.stderr));
    made.stdout
}

/// An ext4 image with half of the programs, and the headers of a C compiler.
fn image(folder: &Folder) -> Vec<u8> {
    let (tree, image) = (folder.0.join("tree"), folder.0.join("image"));
    fs::create_dir_all(&tree).unwrap();
    let mut bytes = 0;
    for path in programs() {
        bytes += fs::copy(&path, tree.join(path.file_name().unwrap())).unwrap_or(0) as usize;
        if bytes >= BYTES_MAX / 2 {
            break;
        }
    }
    let run = |program: &str, args: &[&std::ffi::OsStr]| {
        let done = Command::new(program).args(args).output().unwrap();
        assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let [tree, image] = [tree.as_os_str(), image.as_os_str()];
    run("cp", &["-r".as_ref(), "/usr/include/linux".as_ref(), tree]);
    let options = ["-q", "-t", "ext4", "-d"].map(AsRef::as_ref);
    run("mke2fs", &[&options[..], &[tree, image, "64M".as_ref()]].concat());
    fs::read(image).unwrap()
}

fn ours(data: &[u8]) -> Arc<Ram> {
    let ram = Ram::open(RamConfig { size: data.len() as u64, ..RamConfig::default() }).unwrap();
    let (name, depth) = ("r".to_owned(), ChannelConfig::default());
    let disk = Composed::new(name, "ram", Arc::clone(&ram), depth);
    let mut io = Io::new(disk.open().unwrap(), 1 << 20);
    for (number, chunk) in data.chunks(64 << 10).enumerate() {
        io.write(Sector(number as u64 * 128), chunk, Flags::NONE).unwrap();
    }
    ram
}

/// Stores the data on both devices: compressed sizes agree within 2 %, and the total memory is less
/// than zram's.
fn compare(name: &str, data: &[u8], zram: &Zram) {
    let mut device = OpenOptions::new().write(true).open(&zram.node).unwrap();
    device.write_all(data).unwrap();
    device.sync_all().unwrap();
    let [orig, compressed, used] = zram.stored();
    let stats = ours(data).stats();
    let mm = stats.mm;
    assert_eq!((mm.orig_data_size, orig), (data.len() as u64, data.len() as u64), "{name}");
    let ratio = mm.compr_data_size as f64 / compressed as f64;
    println!("{name}: compressed {} and {compressed}: {ratio:.4}", mm.compr_data_size);
    assert!((0.98..=1.02).contains(&ratio), "{name}: {mm:?}, zram: {compressed}");
    let table = data.len() as u64 / BLOCK as u64 * ZRAM_ENTRY_BYTES;
    let (all, theirs) = (mm.mem_used_total + stats.table_bytes, used + table);
    println!("{name}: memory {all} and {theirs}: {:.4}", all as f64 / theirs as f64);
    assert!(all < theirs, "{name}: {stats:?}, zram: {used} and a table of {table}");
}

#[test]
fn as_small_as_zram_and_less_memory() {
    let folder = Folder::new();
    let inputs = [("programs", files()), ("tar", tar()), ("ext4 image", image(&folder))];
    for (name, mut data) in inputs {
        data.truncate(data.len() / BLOCK * BLOCK);
        assert!(data.len() > BYTES_MAX / 2, "{name}: {} bytes only", data.len());
        match Zram::add(data.len()) {
            Ok(zram) => compare(name, &data, &zram),
            Err(error) => return say_loudly(&format!("no device of it can be made: {error}")),
        }
    }
}
