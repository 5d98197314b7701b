//! Beside the running kernel's zram: the same data by the same algorithm take as many bytes, and
//! less memory in all. Needs root and a kernel that has zram; where there is none the test says so
//! on the terminal, whatever captures its output, and compares nothing.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Composed, Disk, Flags, Sector};
use blockyard_ram::{Ram, RamConfig};

const BLOCK: usize = 4096;
/// Most bytes that are compared.
const BYTES_MAX: usize = 24 << 20;
/// What zram's table takes for a page: handle and flags.
const ZRAM_ENTRY_BYTES: u64 = 16;

/// A zram device of the test's own.
struct Zram {
    number: String,
    /// A node of the test's own too: nobody may make one.
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

/// Says something that no capturing of output hides.
fn say_loudly(what: &str) {
    let _ = writeln!(io::stderr(), "\nNOT COMPARED WITH ZRAM: {what}\n");
}

/// Whole files of a folder one after the other, in the order of their names.
fn files(root: &str) -> Vec<u8> {
    let mut paths: Vec<_> = fs::read_dir(root).unwrap().flatten().map(|e| e.path()).collect();
    paths.sort();
    let mut data = Vec::new();
    for path in paths.iter().filter(|path| path.is_file()) {
        data.extend(fs::read(path).unwrap_or_default());
        if data.len() >= BYTES_MAX {
            break;
        }
    }
    data.truncate(data.len().min(BYTES_MAX) / BLOCK * BLOCK);
    data
}

fn ours(data: &[u8]) -> Arc<Ram> {
    let ram = Ram::open(RamConfig { size: data.len() as u64, ..RamConfig::default() }).unwrap();
    let (name, depth) = ("r".to_owned(), ChannelConfig::default());
    let disk = Composed::new(name, "ram", Arc::clone(&ram), depth, NoneScheduler::new);
    let mut io = Io::new(disk.open().unwrap(), 1 << 20);
    for (number, chunk) in data.chunks(64 << 10).enumerate() {
        io.write(Sector(number as u64 * 128), chunk, Flags::NONE).unwrap();
    }
    ram
}

#[test]
fn as_small_as_zram_and_less_memory() {
    let data = files("/usr/bin");
    assert!(data.len() > BYTES_MAX / 2, "/usr/bin holds {} bytes only", data.len());
    let zram = match Zram::add(data.len()) {
        Ok(zram) => zram,
        Err(error) => return say_loudly(&format!("no device of it can be made: {error}")),
    };
    let mut device = OpenOptions::new().write(true).open(&zram.node).unwrap();
    device.write_all(&data).unwrap();
    device.sync_all().unwrap();
    let [orig, compressed, used] = zram.stored();
    let stats = ours(&data).stats();
    let mm = stats.mm;
    assert_eq!((mm.orig_data_size, orig), (data.len() as u64, data.len() as u64));
    let ratio = mm.compr_data_size as f64 / compressed as f64;
    println!("compressed {} and {compressed}: {ratio:.4}", mm.compr_data_size);
    assert!((0.98..=1.02).contains(&ratio), "{mm:?}, zram: {compressed}");
    let table = data.len() as u64 / BLOCK as u64 * ZRAM_ENTRY_BYTES;
    let (all, theirs) = (mm.mem_used_total + stats.table_bytes, used + table);
    println!("memory {all} and {theirs}: {:.4}", all as f64 / theirs as f64);
    assert!(all < theirs, "{stats:?}, zram: {used} and a table of {table}");
}
