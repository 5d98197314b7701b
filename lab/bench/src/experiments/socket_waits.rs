//! `socket-waits`: a thread that serves TCP connections with epoll, or with io_uring.
//!
//! The messages are those of NVMe/TCP: a command of 72 bytes, and 4 KiB of data after a header of
//! 24 bytes. Neither server knows the protocol: what differs is how the thread waits, receives and
//! sends.
#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use blockyard_os::epoll::{Epoll, Events, Watch};
use hdrhistogram::Histogram;
use io_uring::{IoUring, cqueue, opcode, types};

use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Settings, Variant, VariantRole, Workload};
use crate::limits::slices::clock_ns;
use crate::load::workers::{self, Work};
use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "socket-waits";

const COMMAND_BYTES: usize = 72;
const HEADER_BYTES: usize = 24;
const DATA_BYTES: usize = 4096;
const REPLY_BYTES: usize = HEADER_BYTES + DATA_BYTES;

/// The most commands of a connection that one send answers.
const BATCH_MAX: usize = 32;

/// The greatest latency of the histogram: a minute, which a run does not last.
const LATENCY_MAX_NS: u64 = 60_000_000_000;

const EPOLL: &str = "epoll";
const IO_URING: &str = "io-uring";

/// The bytes that every reply has.
static REPLY: [u8; REPLY_BYTES] = [0x5a; REPLY_BYTES];

type Serve = fn(Vec<TcpStream>) -> io::Result<()>;

const VARIANTS: [(Variant, Serve); 2] = [
    (
        Variant {
            name: EPOLL,
            kind: VariantRole::Limit,
            about: "epoll_wait, then a recv and a sendmsg for each connection that is ready",
        },
        serve_with_epoll,
    ),
    (
        Variant {
            name: IO_URING,
            kind: VariantRole::Limit,
            about: "a recv and a sendmsg of each connection in one ring; one system call submits \
                    what is new and waits",
        },
        serve_with_io_uring,
    ),
];

const WORKLOADS: [(Workload, usize); 2] = [
    (Workload { name: "depth-1", about: "1 command of each connection in flight" }, 1),
    (Workload { name: "depth-32", about: "32 commands of each connection in flight" }, 32),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let connections: &[u32] = if settings.quick { &[4] } else { &[1, 4, 64] };
    let mut cells = Vec::new();
    for (workload, depth) in WORKLOADS {
        for &jobs in connections {
            for (variant, serve) in VARIANTS {
                let body = move |round: &Round<'_>| measure(serve, jobs, depth, round);
                cells.push(Cell::new(variant.name, workload.name, jobs, body));
            }
        }
    }
    let compare = |metric| Comparison::new(EPOLL, IO_URING, metric);
    Experiment {
        name: NAME,
        title: "epoll and io_uring for TCP connections",
        about: "One thread serves all connections (jobs), and one client thread sends the commands \
                of all connections, then receives the replies of all. CPU time (`cpu_per_io`, ns) \
                is that of the server's thread; what a kernel thread does for io_uring is not in \
                it.",
        published: Vec::new(),
        variants: VARIANTS.map(|(variant, _)| variant).into(),
        workloads: WORKLOADS.map(|(workload, _)| workload).into(),
        comparisons: [Metric::IOPS, Metric::CPU_PER_IO, Metric::P99].map(compare).into(),
        plots: vec![Metric::IOPS, Metric::CPU_PER_IO, Metric::P99],
        cells,
    }
}

fn measure(
    serve: Serve,
    connections: u32,
    depth: usize,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let (client, served) = pairs(connections).map_err(LabError::io("TCP connections"))?;
    let server = SocketServer::start(serve, served)?;
    let commands = vec![0; depth * COMMAND_BYTES];
    let replies = vec![0; depth * REPLY_BYTES];
    let latency = Histogram::new_with_max(LATENCY_MAX_NS, 3).expect("the bounds are valid");
    let client = LoadClient { streams: client, commands, replies, latency };
    let outcome = workers::run(vec![client], round, || clock_ns(server.clock))?;
    let mut sample = outcome.sample(NAME)?;
    let cpu_ns = outcome.gauge.1 - outcome.gauge.0;
    let (ios, wall_ns) = (outcome.ios as f64, outcome.wall.as_nanos() as f64);
    // The CPU time of the workers is that of the client.
    sample.values.retain(|(metric, _)| *metric != Metric::CPU_PER_IO);
    let latency = &outcome.workers[0].latency;
    let sample = sample
        .with(Metric::CPU_PER_IO, cpu_ns / ios)
        .with(Metric::CPUS, cpu_ns / wall_ns)
        .with(Metric::CLIENT_CPUS, outcome.cpu.as_nanos() as f64 / wall_ns)
        .with(Metric::P99, latency.value_at_quantile(0.99) as f64);
    let latency = LatencyPercentiles::of(latency);
    // The connections end, and with them the server.
    drop(outcome);
    server.join()?;
    Ok(Sample { latency, ..sample })
}

/// Connections over 127.0.0.1: the ends of the client, and those of the server.
fn pairs(count: u32) -> io::Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut pairs = (Vec::new(), Vec::new());
    for _ in 0..count {
        let near = TcpStream::connect(listener.local_addr()?)?;
        let (far, _) = listener.accept()?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        pairs.0.push(near);
        pairs.1.push(far);
    }
    Ok(pairs)
}

/// The client of all connections.
struct LoadClient {
    streams: Vec<TcpStream>,
    commands: Vec<u8>,
    replies: Vec<u8>,
    latency: Histogram<u64>,
}

impl Work for LoadClient {
    fn turn(&mut self) -> Result<u64, LabError> {
        let failed = LabError::io("a command over TCP");
        let start = Instant::now();
        let mut went = Ok(());
        for stream in &mut self.streams {
            went = went.and_then(|()| stream.write_all(&self.commands));
        }
        for stream in &mut self.streams {
            went = went.and_then(|()| stream.read_exact(&mut self.replies));
            self.latency.saturating_record(start.elapsed().as_nanos() as u64);
        }
        went.map_err(failed)?;
        Ok((self.streams.len() * self.commands.len() / COMMAND_BYTES) as u64)
    }

    fn begin(&mut self) {
        self.latency.reset();
    }
}

/// The thread of a server. It ends when its connections have ended.
struct SocketServer {
    thread: JoinHandle<io::Result<()>>,
    /// The CPU clock of the thread.
    clock: libc::clockid_t,
}

impl SocketServer {
    fn start(serve: Serve, streams: Vec<TcpStream>) -> Result<SocketServer, LabError> {
        let (tell, told): (Sender<libc::clockid_t>, Receiver<_>) = channel();
        let work = move || {
            let mut clock = 0;
            // SAFETY: the thread is the calling one, and `clock` is a valid pointer.
            unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
            let _ = tell.send(clock);
            serve(streams)
        };
        let thread = thread::Builder::new().name("socket-server".into()).spawn(work);
        let thread = thread.map_err(LabError::io("starting a server thread"))?;
        match told.recv() {
            Ok(clock) => Ok(SocketServer { thread, clock }),
            Err(_) => Err(LabError::failed(NAME, "the server's thread panicked")),
        }
    }

    fn join(self) -> Result<(), LabError> {
        let ended = self.thread.join();
        let ended = ended.map_err(|_| LabError::failed(NAME, "the server's thread panicked"))?;
        ended.map_err(LabError::io("serving TCP connections"))
    }
}

/// A connection of a server.
struct ServedStream {
    stream: TcpStream,
    received: Vec<u8>,
    /// Bytes of a command whose rest has not arrived.
    partial: usize,
    /// Bytes of replies that are still to be sent.
    owed: usize,
    /// Whether a send is in the ring.
    is_sending: bool,
}

impl fmt::Debug for ServedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedStream").field("owed", &self.owed).finish_non_exhaustive()
    }
}

impl ServedStream {
    fn new(stream: TcpStream) -> ServedStream {
        let received = vec![0; BATCH_MAX * COMMAND_BYTES];
        ServedStream { stream, received, partial: 0, owed: 0, is_sending: false }
    }

    /// Takes note of received bytes.
    fn take(&mut self, count: usize) {
        let bytes = self.partial + count;
        self.partial = bytes % COMMAND_BYTES;
        self.owed += bytes / COMMAND_BYTES * REPLY_BYTES;
    }

    /// The next replies: a header and data for each.
    fn parts(&self) -> impl Iterator<Item = &'static [u8]> {
        let sent = (REPLY_BYTES - self.owed % REPLY_BYTES) % REPLY_BYTES;
        let first = REPLY[sent..].split_at(HEADER_BYTES.saturating_sub(sent));
        let rest = REPLY.split_at(HEADER_BYTES);
        let replies = self.owed.div_ceil(REPLY_BYTES).min(BATCH_MAX);
        let rest = std::iter::repeat_n([rest.0, rest.1], replies.saturating_sub(1));
        let first = std::iter::once([first.0, first.1]).take(replies);
        first.chain(rest).flatten().filter(|part| !part.is_empty())
    }
}

fn serve_with_epoll(streams: Vec<TcpStream>) -> io::Result<()> {
    let set = Arc::new(Epoll::new()?);
    let mut served: Vec<_> = streams.into_iter().map(ServedStream::new).collect();
    for (token, served) in served.iter().enumerate() {
        served.stream.set_nonblocking(true)?;
        set.add(&served.stream, token as u64, Watch::Readable)?;
    }
    let (mut events, mut open) = (Events::default(), served.len());
    while open > 0 {
        set.wait(&mut events, None)?;
        for token in events.tokens() {
            let served = &mut served[token as usize];
            let was_owing = served.owed > 0;
            if !was_owing {
                match served.stream.read(&mut served.received) {
                    Ok(0) => {
                        set.remove(&served.stream)?;
                        open -= 1;
                        continue;
                    }
                    Ok(count) => served.take(count),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            while served.owed > 0 {
                let mut slices = [IoSlice::new(&[]); 2 * BATCH_MAX];
                let mut count = 0;
                for (slice, part) in slices.iter_mut().zip(served.parts()) {
                    *slice = IoSlice::new(part);
                    count += 1;
                }
                match served.stream.write_vectored(&slices[..count]) {
                    Ok(sent) => served.owed -= sent,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
            // Receives again when all is sent, as the client does not send before.
            match (was_owing, served.owed > 0) {
                (false, true) => set.change(&served.stream, token, Watch::Writable)?,
                (true, false) => set.change(&served.stream, token, Watch::Readable)?,
                _ => {}
            }
        }
    }
    Ok(())
}

/// What a send in the ring refers to, for each connection.
struct SendPlace {
    slices: [libc::iovec; 2 * BATCH_MAX],
    header: libc::msghdr,
}

/// Marks an entry of the ring as a send; the other bits are the connection.
const SEND: u64 = 1 << 32;

fn serve_with_io_uring(streams: Vec<TcpStream>) -> io::Result<()> {
    let mut served: Vec<_> = streams.into_iter().map(ServedStream::new).collect();
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(2 * served.len().next_power_of_two() as u32)?;
    let files: Vec<_> = served.iter().map(|served| served.stream.as_raw_fd()).collect();
    ring.submitter().register_files(&files)?;
    // SAFETY: an all-zero message refers to no memory.
    let empty = || -> SendPlace { unsafe { std::mem::zeroed() } };
    let mut places: Vec<SendPlace> = served.iter().map(|_| empty()).collect();
    let receive = |number: usize, served: &mut ServedStream| {
        let (into, len) = (served.received.as_mut_ptr(), served.received.len() as u32);
        opcode::Recv::new(types::Fixed(number as u32), into, len).build().user_data(number as u64)
    };
    let mut entries: Vec<_> = (0..).zip(&mut served).map(|(at, it)| receive(at, it)).collect();
    let (mut open, mut done) = (served.len(), Vec::new());
    while open > 0 {
        for entry in entries.drain(..) {
            // SAFETY: the buffers and messages belong to `served` and `places`, which do not move,
            // and of a connection there is at most one receive and one send in the ring. The ring
            // has room for both of every connection.
            let pushed = unsafe { ring.submission().push(&entry) };
            pushed.map_err(io::Error::other)?;
        }
        ring.submit_and_wait(1)?;
        done.extend(
            ring.completion().map(|entry: cqueue::Entry| (entry.user_data(), entry.result())),
        );
        for (data, result) in done.drain(..) {
            let number = (data & !SEND) as usize;
            let served = &mut served[number];
            let count = match usize::try_from(result) {
                Ok(count) => count,
                Err(_) => return Err(io::Error::from_raw_os_error(-result)),
            };
            if data & SEND != 0 {
                served.is_sending = false;
                served.owed -= count;
            } else if count == 0 {
                open -= 1;
                continue;
            } else {
                served.take(count);
                entries.push(receive(number, served));
            }
            if served.owed > 0 && !served.is_sending {
                let place = &mut places[number];
                let mut count = 0;
                for (slice, part) in place.slices.iter_mut().zip(served.parts()) {
                    slice.iov_base = part.as_ptr().cast_mut().cast();
                    slice.iov_len = part.len();
                    count += 1;
                }
                place.header.msg_iov = place.slices.as_mut_ptr();
                place.header.msg_iovlen = count;
                served.is_sending = true;
                // The kernel sends the rest itself when the socket has room again.
                let flags = libc::MSG_WAITALL as u32;
                let send =
                    opcode::SendMsg::new(types::Fixed(number as u32), &raw const place.header)
                        .flags(flags);
                entries.push(send.build().user_data(number as u64 | SEND));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    #[test]
    fn parts_go_on_where_a_send_has_stopped() {
        let (_near, mut far) = pairs(1).unwrap();
        let mut served = ServedStream::new(far.remove(0));
        served.take(2 * COMMAND_BYTES + 8);
        assert_eq!((served.owed, served.partial), (2 * REPLY_BYTES, 8));
        for sent in [0, 10, 14, 4000, 96] {
            served.owed -= sent;
            assert_eq!(served.parts().map(<[u8]>::len).sum::<usize>(), served.owed);
        }
        assert_eq!(served.owed, REPLY_BYTES);
        served.owed = 0;
        assert_eq!(served.parts().count(), 0);
    }

    #[test]
    fn both_servers_answer_every_command() {
        let stop = Stop::default();
        let duration = Duration::from_millis(30);
        let round = Round { warm_up: Duration::ZERO, duration, number: 0, seed: 1, stop: &stop };
        for (_, serve) in VARIANTS {
            for depth in [1, BATCH_MAX] {
                // The client checks that as many bytes come as it waits for.
                let sample = measure(serve, 3, depth, &round).unwrap();
                let value = |wanted| {
                    let found = sample.values.iter().find(|(metric, _)| *metric == wanted);
                    found.map(|(_, value)| *value)
                };
                assert!(value(Metric::CPU_PER_IO).unwrap() > 0.0);
                // No message over TCP is answered within 100 ns.
                assert!(value(Metric::P99).unwrap() > 100.0);
            }
        }
    }
}
