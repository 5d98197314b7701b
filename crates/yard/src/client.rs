//! The client side of the control API: HTTP/1.1 over the control socket, one request at a time.
//!
//! It uses blocking calls and no runtime, so that a command starts at once.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ram::{BlocksView, HistogramsView, RamDone, RamRequest};
use crate::scheduler::{SchedulerRequest, SchedulerView};
use crate::uri::encode;
use crate::view::{
    AddRequest, ConnectionView, DeviceView, ErrorBody, ErrorView, FormatRequest, FormatView,
    InjectRequest, MountRequest, MountView, NbdMemoryView, StatsView, VersionView, ZoneDone,
    ZoneRequest, ZonesView,
};
use crate::volumes::{PoolView, ReceivedView, VolumeDone, VolumeRequest, VolumeView};

mod answer;
mod patience;

pub use answer::Answer;
pub use patience::Notice;

use patience::{Line, Patience};

/// The longest response that is read, in bytes.
const ANSWER_MAX: u64 = 64 << 20;

/// How long the daemon may send nothing. Longer than the time that a removed device's clients get
/// to disconnect.
const TIMEOUT: Duration = Duration::from_secs(90);

/// The longest wait for an operation on a whole RAM disk.
const TIMEOUT_LONG: Duration = Duration::from_secs(3600);

/// The reason for which a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No daemon listens on the socket.
    #[error(
        "no yard answers on {}: {source}; start one with `blockyard serve`, or name its socket \
         with --control PATH or BLOCKYARD_CONTROL",
        path.display()
    )]
    Unreachable {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The socket exists and cannot be used.
    #[error(
        "cannot use the control socket {}: {source}; run the command as the user of the yard, or \
         name another socket with --control PATH or BLOCKYARD_CONTROL",
        path.display()
    )]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon sent nothing for longer than the timeout.
    #[error(
        "the yard on {} has not answered for {seconds} s; it is stopped or overloaded, and may \
         still do what was asked",
        path.display()
    )]
    TimedOut {
        /// The path of the socket.
        path: PathBuf,
        /// The timeout, in seconds.
        seconds: u64,
    },
    /// The daemon's response is invalid.
    #[error("the yard on {} gave no answer that makes sense: {what}", path.display())]
    Nonsense {
        /// The path of the socket.
        path: PathBuf,
        /// The reason for which it is invalid.
        what: String,
    },
    /// The daemon refused the request.
    #[error("{}", .0.message)]
    Refused(ErrorView),
}

impl ClientError {
    /// The code of a refusal, for programs.
    pub fn code(&self) -> Option<&str> {
        match self {
            ClientError::Refused(refusal) => Some(&refusal.code),
            _ => None,
        }
    }
}

/// The control API of one yard.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
    timeout: Option<Duration>,
    notice: Option<Notice>,
}

impl Client {
    /// The yard whose control socket is at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Client {
        Client { path: path.into(), timeout: None, notice: None }
    }

    /// Sets the timeout after which a yard that sends nothing is given up.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Option<Duration>) -> Client {
        self.timeout = timeout;
        self
    }

    /// Sets a function that is called once if a request is not answered within [`Notice::AFTER`].
    #[must_use]
    pub fn with_notice(mut self, notice: Notice) -> Client {
        self.notice = Some(notice);
        self
    }

    /// The path of the control socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The program that answers, and its version.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn version(&self) -> Result<VersionView, ClientError> {
        self.get("/v1/version")
    }

    /// All devices.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn devices(&self) -> Result<Vec<DeviceView>, ClientError> {
        self.get("/v1/devices")
    }

    /// One device.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn device(&self, name: &str) -> Result<DeviceView, ClientError> {
        self.get(&device_path(name, ""))
    }

    /// Adds a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn add(&self, uri: &str) -> Result<DeviceView, ClientError> {
        self.json("POST", "/v1/devices", &AddRequest { uri: uri.to_owned() })
    }

    /// Removes a device; with `force` even if clients use it.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn remove(&self, name: &str, force: bool) -> Result<DeviceView, ClientError> {
        let query = if force { "?force=true" } else { "" };
        self.parse(self.exchange("DELETE", &device_path(name, query), b"")?)
    }

    /// A page of a device's zones.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn zones(&self, name: &str, from: u64, count: usize) -> Result<ZonesView, ClientError> {
        self.get(&device_path(name, &format!("/zones?from={from}&count={count}")))
    }

    /// Executes a zone operation.
    ///
    /// # Errors
    /// If the yard cannot be reached, or it or a zone refuses.
    pub fn manage(
        &self,
        name: &str,
        verb: &str,
        request: &ZoneRequest,
    ) -> Result<ZoneDone, ClientError> {
        self.json("POST", &device_path(name, &format!("/zones/{verb}")), request)
    }

    /// Statistics of all devices.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn stats(&self) -> Result<Vec<StatsView>, ClientError> {
        self.get("/v1/stats")
    }

    /// Statistics of one device.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn stats_of(&self, name: &str) -> Result<StatsView, ClientError> {
        self.get(&device_path(name, "/stats"))
    }

    /// The scheduler of a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn scheduler(&self, name: &str) -> Result<SchedulerView, ClientError> {
        self.get(&device_path(name, "/scheduler"))
    }

    /// Changes the scheduler of a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn set_scheduler(
        &self,
        name: &str,
        request: &SchedulerRequest,
    ) -> Result<SchedulerView, ClientError> {
        self.json("POST", &device_path(name, "/scheduler"), request)
    }

    /// The memory for the buffers of all NBD connections.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn nbd_memory(&self) -> Result<NbdMemoryView, ClientError> {
        self.get("/v1/nbd-memory")
    }

    /// NBD connections.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn connections(&self) -> Result<Vec<ConnectionView>, ClientError> {
        self.get("/v1/connections")
    }

    /// Executes an operation on a RAM disk.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn ram(
        &self,
        name: &str,
        verb: &str,
        request: &RamRequest,
    ) -> Result<RamDone, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        let path = device_path(name, &format!("/ram/{verb}"));
        self.parse(self.exchange_within(TIMEOUT_LONG, "POST", &path, &body)?)
    }

    /// A page of a RAM disk's blocks.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn blocks(&self, name: &str, from: u64, count: usize) -> Result<BlocksView, ClientError> {
        self.get(&device_path(name, &format!("/blocks?from={from}&count={count}")))
    }

    /// The sizes of a RAM disk's objects, and the ages of its blocks.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn histograms(&self, name: &str) -> Result<HistogramsView, ClientError> {
        self.get(&device_path(name, "/histograms"))
    }

    /// The pools that the yard has open.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn pools(&self) -> Result<Vec<PoolView>, ClientError> {
        self.get("/v1/pools")
    }

    /// The volumes and snapshots of a pool that the yard has open, or one of them with its space
    /// usage.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such pool or volume.
    pub fn volumes(
        &self,
        pool: Option<&Path>,
        name: Option<&str>,
    ) -> Result<Vec<VolumeView>, ClientError> {
        let mut path = "/v1/volumes".to_owned();
        let pool = pool.map(|pool| pool.display().to_string());
        let asked = [("pool", pool.as_deref()), ("name", name)];
        let asked = asked.into_iter().filter_map(|(key, value)| Some((key, value?)));
        for (index, (key, value)) in asked.enumerate() {
            let mark = if index == 0 { '?' } else { '&' };
            // In a query string a plus means a space.
            path += &format!("{mark}{key}={}", encode(value).replace('+', "%2B"));
        }
        self.parse(self.exchange_within(TIMEOUT_LONG, "GET", &path, b"")?)
    }

    /// Executes an operation on a volume of a pool that the yard has open.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn volume(&self, verb: &str, request: &VolumeRequest) -> Result<VolumeDone, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        let path = format!("/v1/volumes/{}", encode(verb).replace('/', "%2F"));
        self.parse(self.exchange("POST", &path, &body)?)
    }

    /// The stream of a snapshot.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn send(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/send", request)
    }

    /// The stream of a volume in its present state, or of a snapshot.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn export(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/export", request)
    }

    /// The contents of a RAM disk, `snapshot`, or a `dictionary` trained on it.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn ram_content(&self, name: &str, what: &str) -> Result<Answer, ClientError> {
        self.stream_of("GET", &device_path(name, &format!("/ram/{what}")), b"")
    }

    /// Scrubs a pool: lines of JSON, each a [`crate::volumes::ScrubLine`].
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn scrub(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/scrub", request)
    }

    /// Sends the stream of a snapshot to a pool. `progress` receives the number of bytes sent.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses, or the stream cannot be read.
    pub fn receive(
        &self,
        pool: &str,
        name: &str,
        input: &mut dyn Read,
        progress: &mut dyn FnMut(u64),
    ) -> Result<ReceivedView, ClientError> {
        let part = |text: &str| encode(text).replace('+', "%2B");
        let path = format!("/v1/volumes/receive?pool={}&name={}", part(pool), part(name));
        let mut stream = self.connect(TIMEOUT_LONG)?;
        let head = self.head("POST", &path, "Transfer-Encoding: chunked");
        let sent = stream.write_all(head.as_bytes());
        let sent = sent.and_then(|()| answer::pass_on(input, &mut stream, progress));
        if sent.is_err() {
            // The yard waits for no more bytes. An error means that it has disconnected.
            let _ = stream.end();
        }
        let answer = match (Answer::read(stream), sent) {
            // An early refusal is the result, even if the yard did not read the whole stream.
            (Ok(answer), _) => answer,
            (Err(_), Err(error)) => return Err(self.nonsense(error.to_string())),
            (Err(source), Ok(())) => return Err(self.broken(source)),
        };
        self.parse(self.whole(answer)?)
    }

    /// Injects a fault.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn inject(&self, name: &str, fault: &str) -> Result<(), ClientError> {
        let body = serde_json::to_vec(&InjectRequest { fault: fault.to_owned() })
            .expect("a text is always JSON");
        self.exchange("POST", &device_path(name, "/inject"), &body).map(drop)
    }

    /// Makes a zonefs on a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn format_zonefs(
        &self,
        name: &str,
        request: &FormatRequest,
    ) -> Result<FormatView, ClientError> {
        self.json("POST", &device_path(name, "/mkzonefs"), request)
    }

    /// Mounts a device's zonefs, in the daemon, at a directory that the daemon sees.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn mount_zonefs(
        &self,
        name: &str,
        request: &MountRequest,
    ) -> Result<MountView, ClientError> {
        self.json("POST", &device_path(name, "/zonefs"), request)
    }

    /// Unmounts a device's zonefs.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn unmount_zonefs(&self, name: &str) -> Result<MountView, ClientError> {
        self.parse(self.exchange("DELETE", &device_path(name, "/zonefs"), b"")?)
    }

    /// Every zonefs that is mounted.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn zonefs_mounts(&self) -> Result<Vec<MountView>, ClientError> {
        self.get("/v1/zonefs")
    }

    /// The metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let body = self.exchange("GET", "/metrics", b"")?;
        String::from_utf8(body).map_err(|error| self.nonsense(error.to_string()))
    }

    /// Connects; the timeout is `longest`, unless the caller has set one.
    fn connect(&self, longest: Duration) -> Result<Line, ClientError> {
        let patience = Patience {
            path: self.path.clone(),
            silence_max: self.timeout.unwrap_or(longest),
            notice: self.notice,
        };
        Line::connect(patience).map_err(|source| self.unanswered(source))
    }

    /// The error for a missing response.
    fn unanswered(&self, source: io::Error) -> ClientError {
        match self.timeout {
            Some(timeout) if patience::is_timeout(&source) => {
                ClientError::TimedOut { path: self.path.clone(), seconds: timeout.as_secs() }
            }
            _ => self.unreachable(source),
        }
    }

    fn head(&self, method: &str, path: &str, body: &str) -> String {
        format!(
            "{method} {path} HTTP/1.1\r\nHost: blockyard\r\nConnection: close\r\n\
             Content-Type: application/json\r\n{body}\r\n\r\n"
        )
    }

    /// Sends a request whose response is read while it arrives.
    fn stream(&self, path: &str, request: &impl Serialize) -> Result<Answer, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        self.stream_of("POST", path, &body)
    }

    fn stream_of(&self, method: &str, path: &str, body: &[u8]) -> Result<Answer, ClientError> {
        let mut stream = self.connect(TIMEOUT_LONG)?;
        let head = self.head(method, path, &format!("Content-Length: {}", body.len()));
        let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        sent.map_err(|source| self.unanswered(source))?;
        let answer = Answer::read(stream).map_err(|source| self.broken(source))?;
        if answer.is_success() {
            return Ok(answer);
        }
        self.whole(answer).map(|_| unreachable!("an answer that is no success is an error"))
    }

    /// Reads the whole body of a successful response.
    fn whole(&self, mut answer: Answer) -> Result<Vec<u8>, ClientError> {
        let mut body = Vec::new();
        let read = answer.by_ref().take(ANSWER_MAX).read_to_end(&mut body);
        read.map_err(|source| self.broken(source))?;
        if answer.is_success() {
            return Ok(body);
        }
        match serde_json::from_slice(&body) {
            Ok(ErrorBody { error }) => Err(ClientError::Refused(error)),
            Err(_) => {
                let status = answer.status();
                Err(self.nonsense(format!("status {status} without an explanation")))
            }
        }
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.parse(self.exchange("GET", path, b"")?)
    }

    fn json<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        self.parse(self.exchange(method, path, &body)?)
    }

    fn parse<T: DeserializeOwned>(&self, body: Vec<u8>) -> Result<T, ClientError> {
        serde_json::from_slice(&body).map_err(|error| self.nonsense(error.to_string()))
    }

    /// The error for a failed connection.
    fn unreachable(&self, source: io::Error) -> ClientError {
        let path = self.path.clone();
        let is_silence = matches!(
            source.kind(),
            io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::WouldBlock
                | io::ErrorKind::TimedOut
        );
        match is_silence {
            true => ClientError::Unreachable { path, source },
            false => ClientError::Socket { path, source },
        }
    }

    /// The error for a response that ended early.
    fn broken(&self, source: io::Error) -> ClientError {
        match patience::is_timeout(&source) {
            true => self.unanswered(source),
            false => self.nonsense(source.to_string()),
        }
    }

    fn nonsense(&self, what: impl Into<String>) -> ClientError {
        ClientError::Nonsense { path: self.path.clone(), what: what.into() }
    }

    /// Sends one request; returns the body of a successful response.
    fn exchange(&self, method: &str, path: &str, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.exchange_within(TIMEOUT, method, path, body)
    }

    /// Sends one request, with another default timeout.
    fn exchange_within(
        &self,
        timeout: Duration,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        let mut stream = self.connect(timeout)?;
        // The connection carries one request, and its end is the end of the response.
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: blockyard\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let mut answer = Vec::new();
        let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        // An early refusal may arrive before the request is sent; then the response is the result.
        let read = stream.take(ANSWER_MAX).read_to_end(&mut answer);
        if answer.is_empty() {
            sent.and(read.map(drop)).map_err(|source| self.unanswered(source))?;
        }
        let (status, body) = self.split(&answer)?;
        if (200..300).contains(&status) {
            return Ok(body.to_vec());
        }
        match serde_json::from_slice(body) {
            Ok(ErrorBody { error }) => Err(ClientError::Refused(error)),
            Err(_) => Err(self.nonsense(format!("status {status} without an explanation"))),
        }
    }

    /// The status and body of a response.
    fn split<'a>(&self, answer: &'a [u8]) -> Result<(u16, &'a [u8]), ClientError> {
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut head = httparse::Response::new(&mut headers);
        let end = match head.parse(answer) {
            Ok(httparse::Status::Complete(end)) => end,
            Ok(httparse::Status::Partial) => return Err(self.nonsense("it ends too early")),
            Err(error) => return Err(self.nonsense(error.to_string())),
        };
        let status = head.code.unwrap_or(0);
        let body = &answer[end..];
        let length = head
            .headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case("content-length"))
            .and_then(|header| std::str::from_utf8(header.value).ok()?.parse::<usize>().ok());
        match length {
            Some(length) if length != body.len() => Err(self.nonsense("it ends too early")),
            None if !body.is_empty() => Err(self.nonsense("its length is not given")),
            _ => Ok((status, body)),
        }
    }
}

fn device_path(name: &str, rest: &str) -> String {
    // `encode` leaves slashes as they are, but a name with a slash must not become a path.
    format!("/v1/devices/{}{rest}", encode(name).replace('/', "%2F"))
}
