//! Kills a process that wrote much since the last checkpoint, and opens its pool: all data are
//! there, and only a small part of the log was read.
//!
//! The test is a program of its own, because it counts the bytes that the process reads.
#![allow(clippy::unwrap_used)] // Test code.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use blockyard_core::{Bio, Flags, Op, Sector};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig};

/// The environment variable with the victim's directory.
const DIRECTORY: &str = "BLOCKYARD_VOLUME_LONG_LOG_DIRECTORY";

const SIZE: usize = 24 << 20;
const WRITTEN: usize = 64 << 20;
const LEN_MAX: usize = 1 << 20;

fn open(directory: &Path) -> Arc<Running> {
    // Enough segments that an opening searches several of them for headers concurrently, and no
    // checkpoint.
    let options = Options {
        segment_bytes: 2 << 20,
        checkpoint_bytes: 1 << 30,
        sync_bytes: 4 << 20,
        ..Options::default()
    };
    Running::open(directory, options).unwrap()
}

fn volume(pool: &Arc<Running>, name: &str) -> Arc<Volume> {
    let compress = Compression::None;
    let config = VolumeConfig { compress, ..VolumeConfig::new("pool", name) };
    Volume::open_in(Arc::clone(pool), config).unwrap()
}

/// One operation of the workload: a write, durable or not, a discard, or a snapshot.
enum Step {
    Write { at: usize, len: usize, byte: u8, durable: bool },
    Discard { at: usize, len: usize },
    Snapshot,
}

fn steps() -> Vec<Step> {
    let mut random = fastrand::Rng::with_seed(17);
    let (mut steps, mut written) = (Vec::new(), 0);
    while written < WRITTEN {
        let len = 4096 * random.usize(1..=LEN_MAX / 4096);
        let at = 4096 * random.usize(..=(SIZE - len) / 4096);
        let number = steps.len();
        steps.push(match number % 8 {
            3 => Step::Discard { at, len },
            // One early snapshot, and later ones among groups that may not be durable.
            5 if number < 8 || number % 16 == 5 && written > WRITTEN / 2 => Step::Snapshot,
            _ => {
                written += len;
                let durable = number % 8 == 0 && written < WRITTEN - (8 << 20);
                Step::Write { at, len, byte: random.u8(1..), durable }
            }
        });
    }
    steps
}

/// The victim: prints a line when it has written everything.
fn victim(directory: &Path) {
    let pool = open(directory);
    pool.create("v0", SIZE as u64, 4096).unwrap();
    let mut io = handle(&volume(&pool, "v0"));
    for (number, step) in steps().into_iter().enumerate() {
        match step {
            Step::Write { at, len, byte, durable } => {
                let flags = if durable { Flags::FUA } else { Flags::NONE };
                io.write(Sector(at as u64 / 512), &vec![byte; len], flags).unwrap();
            }
            Step::Discard { at, len } => {
                let sector = Sector(at as u64 / 512);
                io.run(Bio::new(Op::Discard, sector, len as u64 / 512)).unwrap();
            }
            Step::Snapshot => pool.snapshot(&format!("v0@s{number}")).unwrap(),
        }
    }
    io.run(Bio::flush()).unwrap();
    println!("done");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Bytes that this process has read so far, from the kernel's counter.
fn read_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn a_long_log_is_there_after_a_kill_and_little_of_it_is_read() {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        return victim(Path::new(&directory));
    }
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "long-log");
    let path = place.path().join("pool");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("--nocapture")
        .env(DIRECTORY, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("done")), "the victim has failed");
    child.kill().unwrap();
    child.wait().unwrap();

    let mut model = vec![0; SIZE];
    let mut snapshots = Vec::new();
    for (number, step) in steps().into_iter().enumerate() {
        match step {
            Step::Write { at, len, byte, .. } => model[at..at + len].fill(byte),
            Step::Discard { at, len } => model[at..at + len].fill(0),
            Step::Snapshot => snapshots.push((format!("v0@s{number}"), model.clone())),
        }
    }
    assert!(snapshots.len() > 2, "{}", snapshots.len());
    let before = read_bytes();
    let pool = open(&path);
    let read = read_bytes() - before;
    let log = pool.pool().activity().recovered_bytes;
    assert!(log > WRITTEN as u64, "{log} bytes of log");
    assert!(read < log / 2, "{read} bytes were read of {log}");
    for (name, wanted) in [("v0".to_owned(), model)].iter().chain(&snapshots) {
        let clone = name.replace('@', "-");
        if clone != *name {
            pool.clone_of(name, &clone).unwrap();
        }
        let mut io = handle(&volume(&pool, &clone));
        let mut found = vec![0; 1 << 20];
        for (at, wanted) in (0..).zip(wanted.chunks(1 << 20)) {
            io.read(Sector(at * 2048), &mut found).unwrap();
            assert!(found == *wanted, "{name}, MiB {at}");
        }
    }
}
