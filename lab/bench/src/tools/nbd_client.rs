//! An NBD client that keeps a number of requests in flight on one connection. Its writes may have
//! `NBD_CMD_FLAG_FUA`, which fio's NBD engine does not offer.
//!
//! It supports simple replies only, and sends as much as it may at once, so that its own cost is
//! small compared with a server's.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use blockyard_nbd::wire::{self, command, command_flag, export_flag, info, option, option_reply};
use fastrand::Rng;
use hdrhistogram::Histogram;

use crate::error::LabError;
use crate::load::latencies;
use crate::load::workers::Work;

/// A server that sends no byte for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// The most bytes that are read of a server's reply to an option.
const OPTION_BYTES_MAX: u32 = 64 << 10;
/// The length of a simple reply without data.
const REPLY_BYTES: usize = 16;
/// The most bytes of replies that one system call receives.
const RECEIVE_BYTES: usize = 256 << 10;

/// The place of a server.
#[derive(Clone, Debug)]
pub enum Place {
    /// A unix socket.
    Unix(PathBuf),
    /// A port.
    Tcp(SocketAddr),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Unix(path) => write!(f, "{}", path.display()),
            Place::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl Place {
    /// A connected socket. A `File`, because both kinds are read and written in the same way.
    fn connect(&self) -> io::Result<File> {
        let socket: OwnedFd = match self {
            Place::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                stream.into()
            }
            Place::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                stream.into()
            }
        };
        Ok(socket.into())
    }
}

/// What the requests of a connection do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdOp {
    /// They read.
    Read,
    /// They write.
    Write,
    /// They write, and are durable when they complete.
    DurableWrite,
}

/// The requests of a connection.
#[derive(Clone, Copy, Debug)]
pub struct NbdRequests {
    /// What each request does.
    pub op: NbdOp,
    /// The length of a request in bytes.
    pub len: u64,
    /// The number of requests in flight.
    pub depth: usize,
}

impl NbdRequests {
    /// The length of a reply with its data.
    fn reply_bytes(&self) -> usize {
        REPLY_BYTES + if self.op == NbdOp::Read { self.len as usize } else { 0 }
    }
}

/// One connection.
pub struct NbdClient {
    stream: File,
    requests: NbdRequests,
    blocks: u64,
    rng: Rng,
    data: Vec<u8>,
    /// The headers of requests, by their slots.
    heads: Vec<[u8; wire::REQUEST_BYTES]>,
    since: Vec<Instant>,
    free: Vec<usize>,
    /// Received bytes of replies, and their number.
    replies: Vec<u8>,
    have: usize,
    latency: Histogram<u64>,
}

impl fmt::Debug for NbdClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdClient").field("requests", &self.requests).finish_non_exhaustive()
    }
}

impl NbdClient {
    /// Connects to an export of a server.
    ///
    /// # Errors
    /// If the server does not answer or has no such export, or if the export is too short or lacks
    /// FUA.
    pub fn connect(
        place: &Place,
        export: &str,
        requests: NbdRequests,
        seed: u64,
    ) -> Result<NbdClient, LabError> {
        let what = format!("NBD export `{export}` at {place}");
        let mut stream = place.connect().map_err(LabError::io(what.clone()))?;
        let (bytes, flags) = negotiate(&mut stream, export).map_err(LabError::io(what.clone()))?;
        if requests.op == NbdOp::DurableWrite && flags & export_flag::SEND_FUA == 0 {
            return Err(LabError::failed(what, "the server takes no FUA"));
        }
        let blocks = bytes / requests.len;
        if blocks == 0 {
            return Err(LabError::failed(what, format!("it has {bytes} bytes only")));
        }
        let (mut rng, depth) = (Rng::with_seed(seed), requests.depth);
        let data = std::iter::repeat_with(|| rng.u8(..)).take(requests.len as usize).collect();
        let reply_bytes = requests.reply_bytes();
        let received = (reply_bytes * depth).min(RECEIVE_BYTES).max(2 * reply_bytes);
        Ok(NbdClient {
            stream,
            requests,
            blocks,
            rng,
            data,
            heads: vec![[0; wire::REQUEST_BYTES]; depth],
            since: vec![Instant::now(); depth],
            free: (0..depth).collect(),
            replies: vec![0; received],
            have: 0,
            latency: latencies(),
        })
    }

    /// Writes the whole export once, one block after the other, so that reads find data.
    ///
    /// # Errors
    /// If the server does not answer, or with an error.
    pub fn write_all(&mut self) -> Result<(), LabError> {
        let all = |this: &mut NbdClient| -> io::Result<()> {
            for block in 0..this.blocks {
                let at = block * this.requests.len;
                this.stream.write_all(&request(
                    0,
                    command::WRITE,
                    0,
                    at,
                    this.data.len() as u32,
                ))?;
                this.stream.write_all(&this.data)?;
                let mut reply = [0; REPLY_BYTES];
                this.stream.read_exact(&mut reply)?;
                slot_of(&reply, 1)?;
            }
            Ok(())
        };
        all(self).map_err(LabError::io("an NBD write"))
    }

    /// Latencies of requests that ended in the window, in nanoseconds.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Sends requests up to the queue depth.
    fn fill(&mut self) -> io::Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let (flags, command, data) = match self.requests.op {
            NbdOp::Read => (0, command::READ, &[][..]),
            NbdOp::Write => (0, command::WRITE, &self.data[..]),
            NbdOp::DurableWrite => (command_flag::FUA, command::WRITE, &self.data[..]),
        };
        for &slot in &self.free {
            let offset = self.rng.u64(..self.blocks) * self.requests.len;
            self.heads[slot] =
                request(flags, command, slot as u64, offset, self.requests.len as u32);
            self.since[slot] = now;
        }
        let mut slices = Vec::with_capacity(2 * self.free.len());
        for slot in self.free.drain(..) {
            slices.push(IoSlice::new(&self.heads[slot]));
            slices.push(IoSlice::new(data));
        }
        let mut left = &mut slices[..];
        while !left.is_empty() {
            let sent = self.stream.write_vectored(left)?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut left, sent);
        }
        Ok(())
    }

    /// Waits for replies, and returns the number received.
    fn take(&mut self) -> io::Result<u64> {
        let read = self.stream.read(&mut self.replies[self.have..])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.have += read;
        let (reply_bytes, now) = (self.requests.reply_bytes(), Instant::now());
        let whole = self.have / reply_bytes;
        for reply in self.replies[..whole * reply_bytes].chunks_exact(reply_bytes) {
            let slot = slot_of(reply, self.requests.depth)?;
            self.latency.saturating_record((now - self.since[slot]).as_nanos() as u64);
            self.free.push(slot);
        }
        self.replies.copy_within(whole * reply_bytes..self.have, 0);
        self.have -= whole * reply_bytes;
        Ok(whole as u64)
    }

    /// Waits for all requests in flight, and sends a flush.
    ///
    /// # Errors
    /// If the server does not answer, or with an error.
    pub fn flush(&mut self) -> Result<(), LabError> {
        let all = |this: &mut NbdClient| -> io::Result<()> {
            while this.free.len() < this.requests.depth {
                this.take()?;
            }
            this.stream.write_all(&request(0, command::FLUSH, 0, 0, 0))?;
            let mut reply = [0; REPLY_BYTES];
            this.stream.read_exact(&mut reply)?;
            slot_of(&reply, 1).map(drop)
        };
        all(self).map_err(LabError::io("an NBD flush"))
    }
}

impl Work for NbdClient {
    fn turn(&mut self) -> Result<u64, LabError> {
        self.fill().and_then(|()| self.take()).map_err(LabError::io("an NBD request"))
    }

    fn begin(&mut self) {
        self.latency.reset();
    }
}

fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; wire::REQUEST_BYTES];
    bytes[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The slot of the request that a successful reply answers.
fn slot_of(reply: &[u8], depth: usize) -> io::Result<usize> {
    let [magic, error] = [0, 4].map(|at| u32::from_be_bytes([0, 1, 2, 3].map(|i| reply[at + i])));
    let cookie = u64::from_be_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| reply[8 + i]));
    match (magic, error, usize::try_from(cookie)) {
        (wire::SIMPLE_REPLY_MAGIC, 0, Ok(slot)) if slot < depth => Ok(slot),
        (wire::SIMPLE_REPLY_MAGIC, error, Ok(slot)) if slot < depth => {
            Err(io::Error::other(format!("the server answered with error {error}")))
        }
        _ => Err(io::Error::other(format!("no simple reply of ours: {reply:02x?}"))),
    }
}

/// Negotiates: returns the export's length and flags.
fn negotiate(stream: &mut File, export: &str) -> io::Result<(u64, u16)> {
    let odd = |what: &str| Err(io::Error::other(format!("the server's handshake: {what}")));
    let mut greeting = [0; wire::GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    let magic = [wire::INIT_MAGIC, wire::OPTION_MAGIC].map(u64::to_be_bytes).concat();
    if greeting[..16] != magic[..] || greeting[17] & 1 == 0 {
        return odd("no fixed newstyle");
    }
    let zeroes = u32::from(greeting[17]) & wire::CLIENT_NO_ZEROES;
    stream.write_all(&(wire::CLIENT_FIXED_NEWSTYLE | zeroes).to_be_bytes())?;
    let mut data = wire::server_data(export, "");
    // Requests no information beyond the mandatory one.
    data.extend_from_slice(&[0, 0]);
    let mut head = wire::OPTION_MAGIC.to_be_bytes().to_vec();
    head.extend_from_slice(&option::GO.to_be_bytes());
    head.extend_from_slice(&(data.len() as u32).to_be_bytes());
    stream.write_all(&[head, data].concat())?;
    let mut found = None;
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        let word = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|i| head[at + i]));
        let (kind, len) = (word(12), word(16));
        if head[..8] != wire::OPTION_REPLY_MAGIC.to_be_bytes() || len > OPTION_BYTES_MAX {
            return odd("no reply to an option");
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        match kind {
            option_reply::ACK => return found.ok_or(()).or_else(|()| odd("no length")),
            option_reply::INFO if data.len() == 12 && data[..2] == info::EXPORT.to_be_bytes() => {
                let bytes = u64::from_be_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| data[2 + i]));
                found = Some((bytes, u16::from_be_bytes([data[10], data[11]])));
            }
            option_reply::INFO => {}
            _ => return odd(&format!("it refuses: {}", String::from_utf8_lossy(&data))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockyard_core::Op;
    use blockyard_nbd::{Endpoint, ExportOptions, Exports, Server, ServerOptions};
    use blockyard_yard::{stack, uri};

    use super::*;
    use crate::load::workers;
    use crate::sample::Round;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    #[test]
    fn requests_are_kept_in_flight_and_counted() {
        let scratch = Scratch::new().unwrap();
        let disk = stack::open(&uri::parse("ram:///d?size=4M").unwrap()).unwrap().disk;
        let exports = Exports::new();
        exports.add("d", Arc::clone(&disk), ExportOptions::default()).unwrap();
        let socket = scratch.path().join("s");
        let unix = Endpoint::Unix(socket.clone().into());
        let tcp: Endpoint = "tcp:127.0.0.1:0".parse().unwrap();
        let start = |endpoint| {
            Server::start(Arc::clone(&exports), endpoint, ServerOptions::default()).unwrap()
        };
        let (_unix, tcp) = (start(unix), start(tcp));
        let address = tcp.local_addr().trim_start_matches("tcp:").parse().unwrap();
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        let run = |place: &Place, op| {
            let requests = NbdRequests { op, len: 8192, depth: 5 };
            let open = |seed| NbdClient::connect(place, "d", requests, seed).unwrap();
            workers::run(vec![open(1), open(2)], &round, || ()).unwrap()
        };
        let unix = Place::Unix(socket);
        let mut outcome = run(&unix, NbdOp::Write);
        assert!(outcome.ios > 0);
        for client in &mut outcome.workers {
            assert!(!client.latency().is_empty());
            client.flush().unwrap();
        }
        assert!(disk.stats().op(Op::Write).ops >= outcome.ios);
        let before = disk.stats().op(Op::Write).ops;
        outcome.workers[0].write_all().unwrap();
        assert_eq!(disk.stats().op(Op::Write).ops - before, (4 << 20) / 8192);
        let outcome = run(&Place::Tcp(address), NbdOp::Read);
        assert!(outcome.ios > 0 && disk.stats().op(Op::Read).ops >= outcome.ios);
        let requests = NbdRequests { op: NbdOp::Read, len: 8192, depth: 1 };
        let error = NbdClient::connect(&unix, "no", requests, 1).unwrap_err().to_string();
        assert!(error.contains("`no`") && error.contains("it refuses"), "{error}");
    }

    #[test]
    fn a_bad_reply_is_an_error() {
        let reply = |magic: u32, error: u32, cookie: u64| {
            [&magic.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
        };
        let good = wire::SIMPLE_REPLY_MAGIC;
        assert_eq!(slot_of(&reply(good, 0, 3), 4).unwrap(), 3);
        let error = slot_of(&reply(good, 5, 3), 4).unwrap_err().to_string();
        assert_eq!(error, "the server answered with error 5");
        assert!(slot_of(&reply(good, 0, 4), 4).is_err());
        assert!(slot_of(&reply(1, 0, 0), 4).is_err());
    }
}
