//! A disk at a unix socket, and programs that see it as a device.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::{env, fs, process, thread};

use blockyard_smr::cdb::Command::Inquiry;
use blockyard_smr::sense::SenseFormat;
use blockyard_smr::transport::{Data, ScsiTransport};
use blockyard_smr::{Disk, DiskConfig};
use blockyard_zone_media::MemoryMedium;

/// A character device for programs to stat; the shim replaces their open by the socket.
const NODE: &str = "/dev/null";
/// Maximum data length of one command.
const DATA_BYTES_MAX: usize = 1 << 20;

/// A disk that programs can open.
pub(crate) struct Node {
    folder: PathBuf,
    pub(crate) disk: Arc<Disk<MemoryMedium>>,
}

impl Node {
    /// Three conventional and nine sequential zones of 64 KiB; the last zone is shorter.
    pub(crate) fn new(change: impl FnOnce(&mut DiskConfig)) -> Node {
        let mut config = DiskConfig {
            size: 11 * (64 << 10) + (16 << 10),
            zone_size: 64 << 10,
            zone_nr_conv: 3,
            zone_max_open: 4,
            ..DiskConfig::default()
        };
        change(&mut config);
        let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
        let disk = Arc::new(Disk::open(config, memory).unwrap());
        // Tests run in parallel in one process, each with a disk at a different address.
        let name = format!("blockyard-sg3-{}-{:p}", process::id(), Arc::as_ptr(&disk));
        let folder = env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("disk")).unwrap();
        let served = Arc::clone(&disk);
        // The thread ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let served = Arc::clone(&served);
                thread::spawn(move || serve(&served, stream.unwrap()));
            }
        });
        let shim = folder.join("shim.so");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&shim)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sg3/shim.c"))
            .arg("-ldl")
            .status();
        assert!(compiled.unwrap().success(), "cc compiles the shim");
        Node { folder, disk }
    }

    /// Gives a page of vital product data as hexadecimal text to a program to decode.
    pub(crate) fn decode(&self, program: &str, page: u8) -> String {
        let mut bytes = vec![0; 1024];
        let command = Inquiry { page: Some(page), allocation: 1024 }.print();
        let outcome = self.disk.execute(&command, Data::In(&mut bytes)).unwrap();
        bytes.truncate(outcome.transferred);
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let file = self.folder.join("page");
        fs::write(&file, hex.join(" ")).unwrap();
        let output = Command::new(program)
            .arg(format!("--page={page}"))
            .arg(format!("--inhex={}", file.display()))
            .output()
            .unwrap_or_else(|error| panic!("{program} (package sg3-utils): {error}"));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a program on the disk and returns its output, including errors.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = Command::new(program)
            .args(arguments)
            .arg(NODE)
            .env("LC_ALL", "C")
            .env("LD_PRELOAD", self.folder.join("shim.so"))
            .env("SMR_NODE", NODE)
            .env("SMR_SOCKET", self.folder.join("disk"))
            .output()
            .unwrap_or_else(|error| panic!("{program} (package sg3-utils): {error}"));
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        text
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Executes the commands of a connection until it is closed.
fn serve(disk: &Disk<MemoryMedium>, mut stream: UnixStream) {
    let mut head = [0; 12];
    while stream.read_exact(&mut head).is_ok() {
        let field = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap()) as usize;
        let (cdb_len, direction, data_len) = (field(0), field(4), field(8));
        assert!(cdb_len <= 260 && data_len <= DATA_BYTES_MAX);
        let mut cdb = vec![0; cdb_len];
        stream.read_exact(&mut cdb).unwrap();
        let mut data = vec![0; data_len];
        let outcome = match direction {
            1 => {
                stream.read_exact(&mut data).unwrap();
                disk.execute(&cdb, Data::Out(&data)).unwrap()
            }
            2 => disk.execute(&cdb, Data::In(&mut data)).unwrap(),
            _ => disk.execute(&cdb, Data::None).unwrap(),
        };
        let sense = outcome.sense.map_or(Vec::new(), |sense| sense.print(SenseFormat::Descriptor));
        let mut answer = Vec::new();
        for field in [outcome.status as usize, sense.len(), outcome.transferred] {
            answer.extend((field as u32).to_ne_bytes());
        }
        answer.extend(sense);
        if direction == 2 {
            answer.extend(&data[..outcome.transferred]);
        }
        stream.write_all(&answer).unwrap();
    }
}
