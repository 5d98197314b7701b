//! NBD servers, ours and those of other projects: how each is started on a socket of its own, and
//! its CPU time.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::scratch::folder;
use crate::stop::Stop;
use crate::tools::child::{CommandLine, RunningChild};

/// A server as data.
#[derive(Clone, Copy, Debug)]
pub struct ServerKind {
    /// The name of its variant.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The Debian package that has it; empty for this program.
    pub package: &'static str,
    /// The line that starts it. `PROGRAM` stands for `blockyard`, `SOCKET` for the path of its
    /// socket, `SIZE` for the bytes of its device.
    pub line: &'static str,
    /// The number of processors that it can use, whatever the number of connections; `None` if it
    /// has a thread for each.
    pub threads_max: Option<u32>,
}

/// All servers, ours first; each serves a device that costs nothing to read, as the export `null0`.
pub const KINDS: [ServerKind; 4] = [
    ServerKind {
        name: "blockyard",
        about: "blockyard serve, a null device without memory",
        package: "",
        line: "PROGRAM serve null:///null0?size=SIZE --nbd unix:SOCKET",
        threads_max: None,
    },
    ServerKind {
        name: "qemu-storage-daemon",
        about: "QEMU's storage daemon, driver null-co",
        package: "qemu-system-common",
        line: "qemu-storage-daemon --blockdev driver=null-co,node-name=null0,size=SIZE \
               --nbd-server addr.type=unix,addr.path=SOCKET,max-connections=8 \
               --export type=nbd,id=null0,node-name=null0,name=null0,writable=on",
        // All exports run in its main loop.
        threads_max: Some(1),
    },
    ServerKind {
        name: "qemu-nbd",
        about: "QEMU's NBD server, driver null-co",
        package: "qemu-utils",
        line: "qemu-nbd --persistent --shared=8 --socket=SOCKET --export-name=null0 \
               --image-opts driver=null-co,size=SIZE",
        threads_max: Some(1),
    },
    ServerKind {
        name: "nbdkit",
        about: "nbdkit with its memory plugin and no data written",
        package: "nbdkit",
        line: "nbdkit --foreground --unix SOCKET --exportname null0 memory SIZE",
        threads_max: None,
    },
];

/// A running server. Dropping it kills the server.
#[derive(Debug)]
pub struct Server {
    running: RunningChild,
    folder: PathBuf,
}

impl Server {
    /// Starts a server by a line in which `SOCKET` stands for the path of its socket, and waits
    /// until it accepts.
    ///
    /// # Errors
    /// If its program is missing, it ends, or it does not accept in time.
    pub fn start(line: CommandLine, settings: &Settings, stop: &Stop) -> Result<Server, LabError> {
        let folder = folder(&settings.scratch)?;
        let line = line.with(&[("SOCKET", &socket(&folder).display())]);
        let running = match line.start(Some(&folder)) {
            Ok(running) => running,
            Err(error) => {
                // The directory is empty.
                let _ = fs::remove_dir(&folder);
                return Err(error);
            }
        };
        let mut server = Server { running, folder };
        let socket = socket(&server.folder);
        server.running.until_ready(stop, || {
            UnixStream::connect(&socket)
                .err()
                .map(|refused| format!("it does not accept: {refused}"))
        })?;
        Ok(server)
    }

    /// The process of the server.
    pub fn process(&self) -> &RunningChild {
        &self.running
    }

    /// The path of the server's socket.
    pub fn socket(&self) -> PathBuf {
        socket(&self.folder)
    }
}

impl ServerKind {
    /// Starts the server with a device of `size` bytes, and waits until it accepts.
    ///
    /// # Errors
    /// If its program is missing, it ends, or it does not accept in time.
    pub fn start(
        &self,
        settings: &Settings,
        size_bytes: u64,
        stop: &Stop,
    ) -> Result<Server, LabError> {
        Server::start(self.line(&settings.program, size_bytes), settings, stop)
    }

    fn line(&self, program: &Path, size_bytes: u64) -> CommandLine {
        let line = CommandLine::new(self.package, self.line);
        line.with(&[("PROGRAM", &program.display()), ("SIZE", &size_bytes)])
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("socket")
}

impl Server {
    /// The URI for a client.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///null0?socket={}", socket(&self.folder).display())
    }

    /// The CPU time of all its threads until now, in user space and in the kernel.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn cpu(&self) -> Result<Duration, LabError> {
        self.running.cpu()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The child is killed after this, and cannot create files that matter.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(test: &str) -> Settings {
        let name = format!("by-lab-{test}-{}", std::process::id());
        let scratch = std::env::temp_dir().join(name);
        fs::create_dir_all(&scratch).unwrap();
        Settings {
            quick: true,
            engine: None,
            program: "/bin/false".into(),
            lab: "blockyard-lab".into(),
            scratch,
            processors: 2,
            peers: Default::default(),
        }
    }

    #[test]
    fn every_line_names_its_socket_and_size() {
        for kind in KINDS {
            let text = kind.line(Path::new("by"), 4096).text();
            assert!(text.contains("SOCKET") && text.contains("4096"), "{text}");
            assert!(!text.contains("SIZE"), "{text}");
            assert!(!text.contains("PROGRAM"), "{text}");
        }
    }

    #[test]
    fn a_server_that_ends_says_why() {
        let settings = settings("ends");
        let line = "ls /no/such SOCKET";
        let kind =
            ServerKind { name: "none", about: "", package: "coreutils", line, threads_max: None };
        let error = kind.start(&settings, 1, &Stop::new()).unwrap_err().to_string();
        assert!(error.contains("/no/such") && error.contains("exit status"), "{error}");
        // The server's directory is removed.
        assert_eq!(fs::read_dir(&settings.scratch).unwrap().count(), 0);
        fs::remove_dir(&settings.scratch).unwrap();
    }

    #[test]
    fn a_server_accepts_and_ends_when_it_is_dropped() {
        let settings = settings("server-ends");
        for kind in &KINDS[1..] {
            let server = kind.start(&settings, 1 << 20, &Stop::new()).unwrap();
            let pid = server.running.id();
            assert!(server.cpu().unwrap() > Duration::ZERO, "{}", kind.name);
            drop(server);
            assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{}", kind.name);
        }
        fs::remove_dir(&settings.scratch).unwrap();
    }
}
