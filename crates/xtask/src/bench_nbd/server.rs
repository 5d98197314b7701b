//! The servers: how each is started on a socket of its own, and what CPU time it used.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{fs, thread};

/// The unit of the times in /proc/PID/stat: 100 a second on every Linux (USER_HZ).
pub(super) const TICK_SECONDS: f64 = 0.01;
/// A server that is not there after so many looks does not come.
const LOOKS_MAX: u32 = 500;
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// A server and the line that starts it; `SOCKET` stands for the path of its socket.
#[derive(Debug)]
pub(super) struct Contender {
    pub(super) name: &'static str,
    line: &'static str,
}

/// Ours first; each serves 10 GiB that cost nothing to read, by the export name `null0`.
pub(super) const CONTENDERS: [Contender; 4] = [
    Contender {
        name: "blockyard",
        line: "target/release/blockyard serve null:///null0?size=10G --nbd unix:SOCKET",
    },
    Contender {
        name: "qemu-storage-daemon null-co",
        line: "qemu-storage-daemon --blockdev driver=null-co,node-name=null0,size=10737418240 \
               --nbd-server addr.type=unix,addr.path=SOCKET,max-connections=8 \
               --export type=nbd,id=null0,node-name=null0,name=null0,writable=on",
    },
    Contender {
        name: "qemu-nbd null-co",
        line: "qemu-nbd --persistent --shared=8 --socket=SOCKET --export-name=null0 \
               --image-opts driver=null-co,size=10G",
    },
    Contender {
        name: "nbdkit memory",
        line: "nbdkit --foreground --unix SOCKET --exportname null0 memory 10G",
    },
];

/// A server that runs until this is dropped.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    folder: PathBuf,
}

/// Starts a server and waits until its socket is there.
pub(super) fn start(root: &Path, contender: &Contender) -> Result<Server, Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("blockyard-bench-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let socket = socket(&folder);
    let line = contender.line.replace("SOCKET", &socket.to_string_lossy());
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or_default();
    let errors = fs::File::create(folder.join("errors"))?;
    let child = Command::new(program)
        .args(words)
        .current_dir(root)
        .env("XDG_RUNTIME_DIR", &folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        .spawn()
        .map_err(|error| format!("{program}: {error}; `make deps build` brings it"))?;
    let mut server = Server { child, folder };
    for _ in 0..LOOKS_MAX {
        if socket.exists() {
            return Ok(server);
        }
        if let Some(status) = server.child.try_wait()? {
            let errors = fs::read_to_string(server.folder.join("errors"))?;
            return Err(format!("{line}: {status}\n{errors}").into());
        }
        thread::sleep(LOOK_PAUSE);
    }
    Err(format!("{line}: there is no socket after {:?}", LOOK_PAUSE * LOOKS_MAX).into())
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("socket")
}

impl Server {
    /// What a client connects to.
    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///null0?socket={}", socket(&self.folder).display())
    }

    /// CPU time of all its threads until now, in user space and in the kernel.
    pub(super) fn cpu_seconds(&self) -> Result<f64, Box<dyn Error>> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        Ok(ticks(&stat).ok_or(format!("/proc/PID/stat is odd: {stat}"))? as f64 * TICK_SECONDS)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already; either way nothing is left to do about it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// utime and stime, the 14th and 15th field; the 2nd is the name in brackets and may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_behind_odd_names() {
        let stat = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 170 25 0 0 20 0 1";
        assert_eq!(ticks(stat), Some(195));
        assert_eq!(ticks("12 (a) S 1"), None);
    }

    #[test]
    fn a_server_that_ends_says_why() {
        let contender = Contender { name: "none", line: "ls /no/such SOCKET" };
        let error = start(Path::new("/"), &contender).unwrap_err().to_string();
        assert!(error.contains("/no/such") && error.contains("exit status"), "{error}");
    }
}
