//! S3-compatible stores for tests: MinIO and versitygw, on loopback ports, each with a directory of
//! its own. `make object-stores` builds them into a cache outside the tree.

use std::env;
use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::capability::Capability;

/// The key by which tests use these stores.
pub const KEY_ID: &str = "blockyard-test";
/// The secret of [`KEY_ID`].
pub const SECRET_KEY: &str = "not-a-secret-of-anything";

/// Time within which a store answers after its start.
const START_TIME: Duration = Duration::from_secs(60);

/// A store that tests can start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum S3Program {
    /// MinIO: syncs each object before it answers.
    Minio,
    /// versitygw on files: does not sync.
    Versitygw,
}

impl S3Program {
    /// Both.
    pub const ALL: [S3Program; 2] = [S3Program::Minio, S3Program::Versitygw];

    /// The name of the program.
    pub fn name(self) -> &'static str {
        match self {
            S3Program::Minio => "minio",
            S3Program::Versitygw => "versitygw",
        }
    }

    /// The program's path, if it was built.
    fn path(self) -> Result<PathBuf, String> {
        let cache = match (env::var_os("XDG_CACHE_HOME"), env::var_os("HOME")) {
            (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
            (_, Some(home)) => PathBuf::from(home).join(".cache"),
            _ => return Err("neither XDG_CACHE_HOME nor HOME is set".to_owned()),
        };
        let path = cache.join("blockyard/s3").join(self.name());
        match path.is_file() {
            true => Ok(path),
            false => {
                Err(format!("`{}` is not there: `make object-stores` makes it", path.display()))
            }
        }
    }

    /// Whether the program was built.
    pub fn is_built(self) -> bool {
        self.path().is_ok()
    }

    /// Starts it with an empty directory below `folder`, which must outlive it.
    ///
    /// Returns `None` if `BLOCKYARD_TEST_SKIP` names `object-stores`.
    ///
    /// # Panics
    /// If it was not built, or does not answer in time.
    pub fn start(self, folder: &Path) -> Option<S3Server> {
        if Capability::ObjectStores.is_skipped() {
            return None;
        }
        let program = match self.path() {
            Ok(program) => program,
            Err(why) => {
                Capability::ObjectStores.is_missing(why);
                return None;
            }
        };
        let (kind, data) = (self, folder.join(self.name()));
        fs::create_dir_all(&data).expect("a test can make its directory");
        // The port is free now; another program could take it before the store does. Then the store
        // ends, and the next port is tried.
        for _ in 0..5 {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
            let port = listener.local_addr().expect("it has an address").port();
            drop(listener);
            let (program, data) = (program.clone(), data.clone());
            let mut server = S3Server { kind, program, data, port, child: None };
            if server.run() {
                return Some(server);
            }
        }
        panic!("{} does not start", self.name());
    }
}

/// A running store, which is killed when dropped.
#[derive(Debug)]
pub struct S3Server {
    kind: S3Program,
    program: PathBuf,
    data: PathBuf,
    port: u16,
    child: Option<Child>,
}

impl S3Server {
    /// The URL of the store.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Starts the program, and waits until it accepts connections; `false` if it has ended.
    fn run(&mut self) -> bool {
        let address = self.address();
        let mut command = Command::new(&self.program);
        match self.kind {
            S3Program::Minio => command
                .env("MINIO_ROOT_USER", KEY_ID)
                .env("MINIO_ROOT_PASSWORD", SECRET_KEY)
                .env("MINIO_BROWSER", "off")
                .env("MINIO_CALLHOME_ENABLE", "off")
                .env("MINIO_UPDATE", "off")
                .args(["server", "--quiet", "--address", &address]),
            S3Program::Versitygw => command
                .env("ROOT_ACCESS_KEY", KEY_ID)
                .env("ROOT_SECRET_KEY", SECRET_KEY)
                .args(["--quiet", "--port", &address, "posix"]),
        };
        let log = fs::File::create(self.data.with_extension("log")).expect("a log can be made");
        let child = command
            .arg(&self.data)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log can be shared"))
            .stderr(log)
            .spawn()
            .expect("the program can be executed");
        let child = self.child.insert(child);
        let start = Instant::now();
        while start.elapsed() < START_TIME {
            if child.try_wait().expect("a child can be waited for").is_some() {
                self.child = None;
                return false;
            }
            if is_ready(&address).unwrap_or(false) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{} does not answer within {START_TIME:?}", self.kind.name());
    }

    /// Kills it by SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            _ = child.kill();
            _ = child.wait();
        }
    }

    /// Starts it again after [`S3Server::kill`], on the same port with the same objects.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        assert!(self.run(), "{} does not start again", self.kind.name());
    }

    /// Stops it by SIGSTOP: connections stay open, and no request is answered.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues it after [`S3Server::pause`].
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("the store runs");
        kill_process(Pid::from_child(child), signal).expect("a child can be signalled");
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether the store answers requests. MinIO accepts connections earlier, and then answers 503.
fn is_ready(address: &str) -> io::Result<bool> {
    use std::io::{Read, Write};
    let mut connection = TcpStream::connect(address)?;
    connection.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(connection, "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = [0; 12];
    connection.read_exact(&mut answer)?;
    // Without a signature: 403.
    Ok(answer.ends_with(b" 403"))
}
