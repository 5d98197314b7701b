//! The transport of a connection: a socket, a pair of pipes, or TLS on a socket; and how it saves
//! system calls, by batches of replies and of requests.
//!
//! The transport is one enum, so that the connection's loop exists once. The plain socket is the
//! fast path: one system call receives, one sends a batch.
//!
//! **Replies.** The data of reads are in the connection's region with their headers right before
//! them, one piece each. All other replies are short and are gathered in a byte vector, where
//! neighbours are one piece.
//!
//! **Requests.** If a client keeps many requests in flight and is slower than its server, the
//! server sleeps before every request. Each request then costs two system calls, a wakeup and a
//! context switch on both sides. A pause of some tens of microseconds before a receive lets a batch
//! accumulate ([`AdaptiveBatching`]). The client, still busy with earlier replies, does not notice.
//! Its requests are answered sooner, because neither side spends its time on wakeups.
//!
//! The pause must end before the client runs out of work. So the state machine learns how many
//! requests the client keeps in flight, by a longer probe pause now and then, and aims at batches
//! of half as many. A client with few in flight is never delayed except by the rare probe; the
//! longer it has had few, the rarer the probe.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Region;
use blockyard_os::socket::{
    self, Interest, PieceSource, Ready, SendMode, SendPiece, WaitMode, Wake, left, read_socket,
    timed_out, write_socket,
};

use crate::memory::Lease;
use crate::tls::TlsTransport;

/// The connection to a client.
pub(crate) enum Transport {
    /// A stream socket in clear text.
    Socket(Arc<OwnedFd>),
    /// Two pipes or other descriptors: standard input and output.
    Pipes(Pipes),
    /// TLS on a stream socket.
    Tls(Box<TlsTransport>),
}

/// The bytes that a writable pipe accepts without blocking: a page.
const PIPE_BYTES: usize = 4096;

/// A pair of pipes. Another thread cannot shut a pipe down, so the connection's thread polls two
/// wakes.
pub(crate) struct Pipes {
    pub(crate) input: OwnedFd,
    pub(crate) output: OwnedFd,
    /// Stops reading after the bytes that have arrived.
    pub(crate) drain: Arc<Wake>,
    /// Stops writing.
    pub(crate) cut: Arc<Wake>,
}

impl Pipes {
    /// Waits for input; `Woken` only when there is none.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<Ready> {
        match socket::wait(&self.input, Interest::Readable, Some(&self.drain), timeout)? {
            Ready::Woken => {
                let now = Some(Duration::ZERO);
                match socket::wait(&self.input, Interest::Readable, None, now)? {
                    Ready::Yes => Ok(Ready::Yes),
                    Ready::No | Ready::Woken => Ok(Ready::Woken),
                }
            }
            ready => Ok(ready),
        }
    }

    /// Sleeps until the output accepts a page; calls `full` before it sleeps.
    fn wait_writable(&self, full: &mut dyn FnMut()) -> io::Result<()> {
        let now = Some(Duration::ZERO);
        if socket::wait(&self.output, Interest::Writable, Some(&self.cut), now)? == Ready::No {
            full();
        }
        loop {
            match socket::wait(&self.output, Interest::Writable, Some(&self.cut), None)? {
                Ready::Yes => return Ok(()),
                Ready::Woken => return Err(io::ErrorKind::BrokenPipe.into()),
                Ready::No => {}
            }
        }
    }

    fn send(
        &self,
        region: &Region,
        replies: &mut Replies,
        full: &mut dyn FnMut(),
    ) -> io::Result<()> {
        let (bytes, mut pieces) = replies.parts();
        while let Some(&first) = pieces.first() {
            self.wait_writable(full)?;
            let page = SendPiece { len: first.len.min(PIPE_BYTES), ..first };
            let sent = socket::send(&self.output, SendMode::Pipe, region, bytes, &[page])?;
            let gone = advance(pieces, sent);
            pieces = &mut pieces[gone..];
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.wait_writable(&mut || {})?;
        socket::write_slice(&self.output, &bytes[..bytes.len().min(PIPE_BYTES)])
    }
}

impl Transport {
    /// Receives into a region. 0 is the end of the stream.
    #[inline]
    pub(crate) fn recv(
        &mut self,
        region: &Region,
        offset: u64,
        len: usize,
        mode: WaitMode,
    ) -> io::Result<usize> {
        match self {
            Transport::Socket(socket) => socket::recv(socket.as_ref(), region, offset, len, mode),
            Transport::Pipes(pipes) => {
                let timeout = (mode == WaitMode::NonBlocking).then_some(Duration::ZERO);
                match pipes.wait(timeout)? {
                    Ready::Yes => socket::read(&pipes.input, region, offset, len),
                    Ready::Woken => Ok(0),
                    Ready::No => Err(io::ErrorKind::WouldBlock.into()),
                }
            }
            Transport::Tls(tls) => tls.recv(region, offset, len, mode),
        }
    }

    /// Sleeps until there are bytes to receive, at most for `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<Ready> {
        match self {
            Transport::Socket(socket) => {
                socket::wait(socket.as_ref(), Interest::Readable, None, Some(timeout))
            }
            Transport::Pipes(pipes) => pipes.wait(Some(timeout)),
            Transport::Tls(tls) => tls.wait(timeout),
        }
    }

    /// Sleeps until there are bytes to receive, or another descriptor is readable, at most for
    /// `timeout`.
    pub(crate) fn wait_either(
        &mut self,
        other: Option<RawFd>,
        timeout: Duration,
    ) -> io::Result<Ready> {
        match self {
            Transport::Socket(socket) => socket::wait_either(socket.as_ref(), other, None, timeout),
            Transport::Pipes(pipes) => {
                socket::wait_either(&pipes.input, other, Some(&pipes.drain), timeout)
            }
            Transport::Tls(tls) => tls.wait_either(other, timeout),
        }
    }

    /// Sends all replies and clears them. Calls `full` before it sleeps because the client reads
    /// slowly. A client that does not read is disconnected when another one waits for the memory
    /// that `lease` holds; then the send fails.
    pub(crate) fn send(
        &mut self,
        region: &Region,
        replies: &mut Replies,
        full: &mut dyn FnMut(),
        lease: &Lease,
    ) -> io::Result<()> {
        let result = match self {
            Transport::Socket(socket) => send_all(socket, region, replies, full, lease),
            Transport::Pipes(pipes) => pipes.send(region, replies, full),
            Transport::Tls(tls) => tls.send(region, replies, full, lease),
        };
        replies.clear();
        result
    }

    /// Receives into ordinary memory, for the handshake. 0 is the end of the stream.
    pub(crate) fn read(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
        match self {
            Transport::Socket(socket) => read_socket(socket, into, Some(deadline)),
            Transport::Pipes(pipes) => match pipes.wait(Some(left(deadline)))? {
                Ready::Yes => socket::read_slice(&pipes.input, into),
                Ready::Woken => Ok(0),
                Ready::No => Err(timed_out("the client said nothing for too long")),
            },
            Transport::Tls(tls) => tls.read(into, deadline),
        }
    }

    /// Sends from ordinary memory, for the handshake.
    pub(crate) fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = match self {
                Transport::Socket(socket) => {
                    write_socket(socket, bytes, Some(deadline), &mut || {})?
                }
                Transport::Pipes(pipes) => pipes.write(bytes)?,
                Transport::Tls(tls) => tls.write(bytes, deadline)?,
            };
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Ends the transport's protocol: TLS sends a close alert.
    pub(crate) fn close(&mut self) {
        if let Transport::Tls(tls) = self {
            tls.close();
        }
    }
}

fn send_all(
    socket: &OwnedFd,
    region: &Region,
    replies: &mut Replies,
    full: &mut dyn FnMut(),
    lease: &Lease,
) -> io::Result<()> {
    let (bytes, mut pieces) = replies.parts();
    let mut has_slept = false;
    while !pieces.is_empty() {
        match socket::send(socket, SendMode::SocketNow, region, bytes, pieces) {
            Ok(sent) => {
                lease.note_moved();
                let gone = advance(pieces, sent);
                pieces = &mut pieces[gone..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !has_slept {
                    full();
                    has_slept = true;
                }
                lease.note_blocked();
                // Without a timeout: a cut shuts the socket down, which ends the wait.
                socket::wait(socket, Interest::Writable, None, None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Above this many bytes of short replies, the batch is sent before more are made.
const BYTES_FULL: usize = 64 << 10;
/// Above this many pieces, the batch is sent before more are made.
const PIECES_FULL: usize = 256;

/// Replies that wait to be sent, in order.
#[derive(Debug)]
pub(crate) struct Replies {
    bytes: Vec<u8>,
    pieces: Vec<SendPiece>,
}

impl Replies {
    pub(crate) fn new() -> Replies {
        Replies {
            bytes: Vec::with_capacity(2 * BYTES_FULL),
            pieces: Vec::with_capacity(2 * PIECES_FULL),
        }
    }

    /// Appends a reply whose header and data are contiguous in the region: writes the header before
    /// the data, which begin at `data`.
    #[inline]
    pub(crate) fn push_data(&mut self, region: &Region, head: &[u8], data: u64, len: usize) {
        let offset = data - head.len() as u64;
        region.write(offset, head);
        self.pieces.push(SendPiece { source: PieceSource::Region, offset, len: head.len() + len });
    }

    /// Appends the bytes that `print` prints.
    #[inline]
    pub(crate) fn push(&mut self, print: impl FnOnce(&mut Vec<u8>)) {
        let offset = self.bytes.len();
        print(&mut self.bytes);
        let len = self.bytes.len() - offset;
        if let Some(last) = self.pieces.last_mut()
            && last.source == PieceSource::Bytes
        {
            last.len += len;
            return;
        }
        self.pieces.push(SendPiece { source: PieceSource::Bytes, offset: offset as u64, len });
    }

    /// Whether it is time to send.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= BYTES_FULL || self.pieces.len() >= PIECES_FULL
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The pieces, in order, which the sender shortens.
    pub(crate) fn parts(&mut self) -> (&[u8], &mut [SendPiece]) {
        (&self.bytes, &mut self.pieces)
    }

    /// Clears all replies, sent or not.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
    }
}

/// Removes the first `sent` bytes from the pieces, and returns the number of pieces sent
/// completely.
pub(crate) fn advance(pieces: &mut [SendPiece], mut sent: usize) -> usize {
    for (index, piece) in pieces.iter_mut().enumerate() {
        if sent < piece.len {
            piece.offset += sent as u64;
            piece.len -= sent;
            return index;
        }
        sent -= piece.len;
    }
    pieces.len()
}

/// The probe pause that measures the client's depth, in microseconds.
const PROBE_US: u32 = 200;
/// The longest and the shortest pause in use, in microseconds.
const PAUSE_MAX_US: u32 = 120;
const PAUSE_MIN_US: u32 = 10;
/// The first pause after a probe, in microseconds.
const PAUSE_FIRST_US: u32 = PROBE_US / 4;
/// Below this depth pauses do not pay off.
const DEPTH_MIN: u64 = 8;
/// The requests before the first probe, and the most requests between probes.
const PROBE_INTERVAL_MIN: u64 = 512;
const PROBE_INTERVAL_MAX: u64 = 1 << 16;
/// The pauses after which the depth is probed again.
const PAUSES_MAX: u32 = 256;
/// After this many consecutive pauses with hardly any gain, pausing stops.
const USELESS_PAUSES_MAX: u32 = 2;

/// The state of the next receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// No pauses for this many requests.
    Immediate { left: u64 },
    /// The last pause was a probe.
    Probing,
    /// Pauses are in use; their number since the last probe.
    Pausing { pauses: u32 },
}

/// The batching state of one connection: a state machine over counts, without a clock.
#[derive(Clone, Debug)]
pub(crate) struct AdaptiveBatching {
    mode: Mode,
    /// The number of requests that the client keeps in flight, as observed.
    depth: u64,
    pause_us: u32,
    useless_pauses: u32,
    /// The number of requests without a pause before the probe after the next one.
    probe_interval: u64,
}

impl AdaptiveBatching {
    pub(crate) fn new() -> AdaptiveBatching {
        AdaptiveBatching {
            mode: Mode::Immediate { left: PROBE_INTERVAL_MIN },
            depth: 0,
            pause_us: PAUSE_FIRST_US,
            useless_pauses: 0,
            probe_interval: PROBE_INTERVAL_MIN,
        }
    }

    /// The pause before the next receive; only called with nothing in flight that would be delayed.
    #[inline]
    pub(crate) fn pause(&mut self) -> Option<Duration> {
        let pause_us = match self.mode {
            Mode::Immediate { left: 1.. } => return None,
            Mode::Immediate { left: 0 } => {
                self.mode = Mode::Probing;
                PROBE_US
            }
            Mode::Probing => PROBE_US,
            Mode::Pausing { pauses } if pauses >= PAUSES_MAX => {
                self.mode = Mode::Probing;
                (2 * self.pause_us).min(PROBE_US)
            }
            Mode::Pausing { .. } => self.pause_us,
        };
        Some(Duration::from_micros(pause_us.into()))
    }

    /// Reports how many requests the last receive brought.
    #[inline]
    pub(crate) fn note_batch(&mut self, requests: u64) {
        match self.mode {
            Mode::Immediate { left } => {
                self.mode = Mode::Immediate { left: left.saturating_sub(requests) };
            }
            Mode::Probing => self.end_probe(requests),
            Mode::Pausing { pauses } => {
                self.mode = Mode::Pausing { pauses: pauses + 1 };
                self.adjust_pause(requests);
            }
        }
    }

    /// Evaluates a probe of the client's requests in flight.
    fn end_probe(&mut self, requests: u64) {
        if requests < DEPTH_MIN {
            self.stop_pausing();
            return;
        }
        self.depth = requests;
        self.useless_pauses = 0;
        self.probe_interval = PROBE_INTERVAL_MIN;
        self.mode = Mode::Pausing { pauses: 0 };
    }

    /// Adjusts the pause for batches of half the depth.
    fn adjust_pause(&mut self, requests: u64) {
        self.depth = self.depth.max(requests);
        if requests <= 1 {
            self.useless_pauses += 1;
            if self.useless_pauses >= USELESS_PAUSES_MAX {
                self.stop_pausing();
            }
            return;
        }
        self.useless_pauses = 0;
        if 2 * requests > self.depth {
            self.pause_us = (self.pause_us - self.pause_us.div_ceil(8)).max(PAUSE_MIN_US);
        } else if 8 * requests < 3 * self.depth {
            self.pause_us = (self.pause_us + self.pause_us.div_ceil(8)).min(PAUSE_MAX_US);
        }
    }

    /// Stops pausing for a while, which is longer each time.
    fn stop_pausing(&mut self) {
        self.mode = Mode::Immediate { left: self.probe_interval };
        self.probe_interval = (2 * self.probe_interval).min(PROBE_INTERVAL_MAX);
        self.useless_pauses = 0;
        self.pause_us = PAUSE_FIRST_US;
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::client::tests::client_with;

    fn pipes() -> (Pipes, io::PipeWriter, io::PipeReader) {
        let (input, to) = io::pipe().unwrap();
        let (from, output) = io::pipe().unwrap();
        let wake = || Arc::new(Wake::new().unwrap());
        let pipes =
            Pipes { input: input.into(), output: output.into(), drain: wake(), cut: wake() };
        (pipes, to, from)
    }

    #[test]
    fn drained_pipe_returns_its_bytes_and_then_end_of_stream() {
        let (pipes, mut to, _from) = pipes();
        pipes.drain.raise();
        io::Write::write_all(&mut to, b"rest").unwrap();
        let mut transport = Transport::Pipes(pipes);
        let region = Region::alloc(4096);
        assert_eq!(transport.recv(&region, 0, 4096, WaitMode::AnyBytes).unwrap(), 4);
        assert_eq!(transport.recv(&region, 0, 4096, WaitMode::AnyBytes).unwrap(), 0);
    }

    #[test]
    fn send_to_a_full_pipe_ends_when_cut() {
        let (pipes, _to, from) = pipes();
        let cut = Arc::clone(&pipes.cut);
        let mut transport = Transport::Pipes(pipes);
        let sending = thread::spawn(move || {
            let region = Region::alloc(1 << 20);
            let mut replies = Replies::new();
            replies.push_data(&region, &[0; 16], 64, (1 << 20) - 64);
            transport.send(&region, &mut replies, &mut || {}, &client_with(0).lease)
        });
        cut.raise();
        let error = sending.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        drop(from);
    }

    #[test]
    fn short_replies_share_a_piece() {
        let region = Region::alloc(4096);
        let mut replies = Replies::new();
        replies.push(|out| out.extend_from_slice(b"one"));
        replies.push(|out| out.extend_from_slice(b"two"));
        replies.push_data(&region, b"head", 64, 512);
        replies.push(|out| out.extend_from_slice(b"three"));
        let (bytes, pieces) = replies.parts();
        assert_eq!(bytes, b"onetwothree");
        let lens: Vec<_> = pieces.iter().map(|piece| (piece.source, piece.len)).collect();
        let wanted = [(PieceSource::Bytes, 6), (PieceSource::Region, 516), (PieceSource::Bytes, 5)];
        assert_eq!(lens, wanted);
        let mut head = [0; 4];
        region.read(60, &mut head);
        assert_eq!(&head, b"head");
    }

    #[test]
    fn advancing_cuts_in_the_middle_of_a_piece() {
        let piece = |len| SendPiece { source: PieceSource::Bytes, offset: 0, len };
        let mut pieces = [piece(10), piece(20), piece(30)];
        assert_eq!(advance(&mut pieces, 15), 1);
        assert_eq!((pieces[1].offset, pieces[1].len), (5, 15));
        assert_eq!(advance(&mut pieces[1..], 15), 1);
        assert_eq!(advance(&mut pieces[2..], 30), 1);
    }

    /// Simulates a client that keeps `depth` requests in flight and spends `cost_us` on each, and a
    /// server that needs a microsecond for each. Returns the sum of the pauses in microseconds, the
    /// requests, the receives, and the microseconds in which the client was idle.
    fn simulate(
        batching: &mut AdaptiveBatching,
        depth: u64,
        cost_us: u64,
        rounds: u64,
    ) -> (u64, u64, u64, u64) {
        let (mut pauses_us, mut requests, mut idle_us) = (0, 0, 0);
        let mut with_client = depth;
        for _ in 0..rounds {
            let pause_us = batching.pause().map_or(0, |pause| pause.as_micros() as u64);
            pauses_us += pause_us;
            // Without a pause the server receives as soon as there is a request.
            let sent = (pause_us / cost_us).clamp(1, with_client);
            if sent == with_client {
                idle_us += pause_us.saturating_sub(sent * cost_us);
            }
            requests += sent;
            batching.note_batch(sent);
            // While the server works, the client sends further requests.
            with_client = depth - (sent / cost_us).min(with_client - sent);
        }
        (pauses_us, requests, rounds, idle_us)
    }

    #[test]
    fn deep_client_is_batched_and_never_idle() {
        for (depth, cost_us) in [(32, 4), (128, 4), (64, 8), (16, 5)] {
            let mut batching = AdaptiveBatching::new();
            simulate(&mut batching, depth, cost_us, 2000);
            let (pauses_us, requests, receives, idle_us) =
                simulate(&mut batching, depth, cost_us, 20_000);
            assert!(requests / receives >= depth.min(32) / 4, "{depth}: {requests}");
            assert!(idle_us * 20 < pauses_us, "{depth}: idle for {idle_us} of {pauses_us}");
        }
    }

    #[test]
    fn client_with_few_in_flight_is_not_delayed() {
        for depth in [1, 2, 4, 7] {
            let mut batching = AdaptiveBatching::new();
            let (pauses_us, requests, ..) = simulate(&mut batching, depth, 5, 1 << 20);
            assert!(pauses_us < requests / 100, "{depth}: {pauses_us} for {requests}");
        }
    }

    #[test]
    fn client_that_becomes_shallow_is_soon_not_delayed() {
        let mut batching = AdaptiveBatching::new();
        simulate(&mut batching, 64, 4, 4000);
        assert!(matches!(batching.mode, Mode::Pausing { .. }));
        for depth in [1, 3] {
            let mut batching = batching.clone();
            simulate(&mut batching, depth, 4, 2 * u64::from(PAUSES_MAX));
            assert!(matches!(batching.mode, Mode::Immediate { .. }), "{depth}");
        }
    }
}
