//! The connection under a simulated clock: a model of the host and of its device checks each
//! answer, while a seeded schedule cuts the stream at any byte, completes the device's operations
//! late and in any order, and ends the connection in every way. No socket, thread or real time.
//!
//! Checked in each schedule:
//!
//! - Each command is answered once, by the PDUs and in the order that the specification asks for;
//!   a read has the data that were written last.
//! - A host that is in order has all its answers when the device has completed everything, and then
//!   the connection holds no command, no memory and no operation.
//! - A connection that has to end does so within its time-outs, with and without help of the
//!   device, and has returned the disk then. With it, all commands that it has received are
//!   answered, and if the target ends it, the controller's other queues end too: no I/O queue
//!   before all have answered, and the admin queue last. From the beginning of its end, a command
//!   begins one operation of the device at most, and none if it has begun one. A connection that
//!   has given up its host, or only waits for its end of the stream, sends nothing.
//! - A connection that waits has a reason: no turn is given again and again at one time.
//!
//! Replay: `BLOCKYARD_SEED=N cargo test -p blockyard-nvme --lib model`.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

#[path = "device.rs"]
mod device;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_core::Region;
use blockyard_core::rmw::SharedDisk;
use blockyard_os::epoll::Epoll;
use blockyard_os::socket::{PieceSource, SendPiece, Wake};
use blockyard_testing::seed::Seed;
use fastrand::Rng;

use device::{SimDevice, SimDisk};

use super::*;
use crate::access::HostAccess;
use crate::subsystems::Subsystems;

const BLOCK: usize = 512;
const BLOCKS: u64 = 256;
const NQN: &str = "nqn.2026-11.io.blockyard:sim";
const HOST: &str = "nqn.2026-11.example:host";
/// The id of the connection whose host sends I/O commands.
const IO: u64 = 2;
const SCHEDULES: u64 = 156;
const STEPS: usize = 250;

// The stream.

#[derive(Default)]
struct StreamState {
    to_target: VecDeque<u8>,
    /// The host has ended its direction, or the target reads no more.
    has_ended: bool,
    /// The host has reset the connection.
    is_reset: bool,
    to_host: VecDeque<u8>,
    /// The bytes that the stream accepts for the host now.
    room: usize,
    is_shut: bool,
}

#[derive(Clone, Default)]
struct SimStream(Rc<RefCell<StreamState>>);

impl SimStream {
    fn take(&self, len: usize) -> io::Result<Vec<u8>> {
        let mut stream = self.0.borrow_mut();
        if stream.is_reset {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let len = len.min(stream.to_target.len());
        match len == 0 && !stream.has_ended {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => Ok(stream.to_target.drain(..len).collect()),
        }
    }

    fn is_ready(&self, watch: Watch) -> bool {
        let stream = self.0.borrow();
        match watch {
            Watch::Writable => stream.room > 0 || stream.is_reset || stream.is_shut,
            _ => !stream.to_target.is_empty() || stream.has_ended || stream.is_reset,
        }
    }
}

impl HostStream for SimStream {
    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.take(into.len())?;
        into[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn receive_at(&mut self, region: &Region, offset: u64, len: usize) -> io::Result<usize> {
        let bytes = self.take(len)?;
        region.write(offset, &bytes);
        Ok(bytes.len())
    }

    fn send(&mut self, region: &Region, bytes: &[u8], pieces: &[SendPiece]) -> io::Result<usize> {
        let mut stream = self.0.borrow_mut();
        if stream.is_reset || stream.is_shut {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut sent = 0;
        for piece in pieces {
            let len = piece.len.min(stream.room);
            let mut data = vec![0; len];
            match piece.source {
                PieceSource::Region => region.read(piece.offset, &mut data),
                PieceSource::Bytes => {
                    data.copy_from_slice(&bytes[piece.offset as usize..][..len]);
                }
            }
            stream.room -= len;
            sent += len;
            stream.to_host.extend(data);
        }
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn has_ended(&self) -> bool {
        let stream = self.0.borrow();
        stream.has_ended || stream.is_reset || stream.is_shut
    }

    fn shutdown(&mut self, how: Shutdown) {
        let mut stream = self.0.borrow_mut();
        stream.has_ended |= how != Shutdown::Write;
        stream.is_shut |= how != Shutdown::Read;
    }
}

// The host.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostOp {
    Connect,
    Property,
    Read,
    Write,
    Discard,
    Flush,
    /// A command that the target refuses.
    Invalid,
}

#[derive(Clone, Debug)]
struct HostCommand {
    op: HostOp,
    first: u64,
    blocks: u64,
    /// The data of a write.
    data: Vec<u8>,
    /// Whether an R2T has to come, or has come.
    awaits_r2t: bool,
    /// The data of a read that have come.
    received: Vec<u8>,
}

/// A host with one connection.
struct Host {
    /// Bytes that are not in the stream yet.
    unsent: VecDeque<u8>,
    received: Vec<u8>,
    commands: BTreeMap<u16, HostCommand>,
    next_cid: u16,
    is_initialized: bool,
    /// The end of the connection was announced by a TermReq.
    has_term: bool,
    flow_control: bool,
    /// Whether a command of several operations may be answered by [`StatusCode::ABORTED`].
    is_ending: bool,
    /// The results of commands that have ended.
    results: Vec<u64>,
}

impl Host {
    fn new(flow_control: bool) -> Host {
        let mut request = [0; 128];
        (request[2], request[4]) = (128, 128);
        Host {
            unsent: request.into(),
            received: Vec::new(),
            commands: BTreeMap::new(),
            next_cid: 0,
            is_initialized: false,
            has_term: false,
            flow_control,
            is_ending: false,
            results: Vec::new(),
        }
    }

    fn pdu(&mut self, kind: u8, header: &[u8], data: &[u8]) {
        let (len, at) = (8 + header.len() + data.len(), 8 + header.len());
        let offset = if data.is_empty() { 0 } else { at as u8 };
        self.unsent.extend([kind, 0, at as u8, offset]);
        self.unsent.extend((len as u32).to_le_bytes());
        self.unsent.extend(header);
        self.unsent.extend(data);
    }

    /// Sends a command. `sgl` is the kind of the data pointer, if there are data.
    fn send(&mut self, mut sqe: [u8; 64], sgl: Option<(u8, usize)>, command: HostCommand) {
        while self.commands.contains_key(&self.next_cid) {
            self.next_cid = self.next_cid.wrapping_add(1);
        }
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        sqe[1] = 0x40;
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        if let Some((kind, len)) = sgl {
            sqe[32..36].copy_from_slice(&(len as u32).to_le_bytes());
            sqe[39] = kind;
        }
        let in_capsule = match sgl {
            Some((1, _)) => command.data.clone(),
            _ => Vec::new(),
        };
        self.commands.insert(cid, command);
        self.pdu(4, &sqe, &in_capsule);
    }

    fn plain(op: HostOp) -> HostCommand {
        let (first, blocks, data, received) = (0, 0, Vec::new(), Vec::new());
        HostCommand { op, first, blocks, data, awaits_r2t: false, received }
    }

    fn connect(&mut self, queue: u16, controller: u16, keep_alive_ms: u32) {
        let mut sqe = [0; 64];
        (sqe[0], sqe[4]) = (0x7f, 1);
        sqe[42..44].copy_from_slice(&queue.to_le_bytes());
        sqe[44..46].copy_from_slice(&31_u16.to_le_bytes());
        sqe[46] = if self.flow_control { 0 } else { 4 };
        sqe[48..52].copy_from_slice(&keep_alive_ms.to_le_bytes());
        let mut data = vec![0; 1024];
        data[..16].fill(7);
        data[16..18].copy_from_slice(&controller.to_le_bytes());
        data[256..256 + NQN.len()].copy_from_slice(NQN.as_bytes());
        data[512..512 + HOST.len()].copy_from_slice(HOST.as_bytes());
        let command = HostCommand { data, ..Host::plain(HostOp::Connect) };
        self.send(sqe, Some((1, 1024)), command);
    }

    fn set_config(&mut self, value: u32) {
        let mut sqe = [0; 64];
        sqe[0] = 0x7f;
        sqe[44..48].copy_from_slice(&0x14_u32.to_le_bytes());
        sqe[48..52].copy_from_slice(&value.to_le_bytes());
        self.send(sqe, None, Host::plain(HostOp::Property));
    }

    /// Sends an I/O command that overlaps none in flight.
    fn random_command(&mut self, rng: &mut Rng, expected: &[u8]) {
        let (first, blocks) = (rng.u64(..BLOCKS - 24), rng.u64(1..=24));
        let is_free =
            |it: &HostCommand| first + blocks <= it.first || it.first + it.blocks <= first;
        let op = match rng.u8(..10) {
            0..4 => HostOp::Read,
            4..7 => HostOp::Write,
            7 => HostOp::Discard,
            8 => HostOp::Flush,
            _ => HostOp::Invalid,
        };
        if self.commands.len() >= 31 || !self.commands.values().all(is_free) {
            return;
        }
        let len = blocks as usize * BLOCK;
        let mut sqe = [0; 64];
        sqe[4] = 1;
        sqe[40..48].copy_from_slice(&first.to_le_bytes());
        sqe[48..52].copy_from_slice(&(blocks as u32 - 1).to_le_bytes());
        let mut command = HostCommand { first, blocks, ..Host::plain(op) };
        let sgl = match op {
            HostOp::Read => {
                sqe[0] = 2;
                let from = first as usize * BLOCK;
                command.data = expected[from..from + len].to_vec();
                Some((0x5a, len))
            }
            HostOp::Write => {
                sqe[0] = 1;
                command.data = std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
                command.awaits_r2t = len > 8192 || rng.bool();
                Some((if command.awaits_r2t { 0x5a } else { 1 }, len))
            }
            HostOp::Discard => {
                // Each block is a range of its own, so that the command has several operations.
                sqe[0] = 9;
                sqe[40..44].copy_from_slice(&(blocks as u32 - 1).to_le_bytes());
                sqe[44..48].copy_from_slice(&4_u32.to_le_bytes());
                sqe[48..52].fill(0);
                for block in first..first + blocks {
                    command.data.extend([0, 0, 0, 0, 1, 0, 0, 0]);
                    command.data.extend(block.to_le_bytes());
                }
                Some((1, command.data.len()))
            }
            HostOp::Invalid => {
                sqe[0] = 0x7c;
                (command.first, command.blocks) = (0, 0);
                None
            }
            _ => {
                (command.first, command.blocks) = (0, 0);
                sqe[40..52].fill(0);
                None
            }
        };
        self.send(sqe, sgl, command);
    }

    /// Takes what has arrived; `expected` is what the device has to hold.
    fn take(&mut self, expected: &mut [u8], rng: &mut Rng) {
        loop {
            let Some(len) = self.received.get(4..8) else { return };
            let len = u32::from_le_bytes(len.try_into().unwrap()) as usize;
            if self.received.len() < len {
                return;
            }
            let pdu: Vec<u8> = self.received.drain(..len).collect();
            assert!(!self.has_term, "a PDU after the TermReq: {pdu:?}");
            let word = |at: usize| u16::from_le_bytes([pdu[at], pdu[at + 1]]);
            let long = |at: usize| u32::from_le_bytes(pdu[at..at + 4].try_into().unwrap());
            assert_eq!(self.is_initialized, pdu[0] != 1, "an ICResp first, and once");
            match pdu[0] {
                1 => self.is_initialized = true,
                3 => self.has_term = true,
                5 => {
                    let result = u64::from_le_bytes(pdu[8..16].try_into().unwrap());
                    self.complete(word(20), word(22) >> 1, result, expected);
                }
                7 => {
                    let cid = word(8);
                    let command = self.commands.get_mut(&cid).expect("data of a command");
                    assert_eq!(command.op, HostOp::Read);
                    assert_eq!(long(12) as usize, command.received.len());
                    command.received.extend(&pdu[24..]);
                    if pdu[1] & 8 != 0 {
                        assert!(!self.flow_control && pdu[1] & 4 != 0);
                        self.complete(cid, 0, 0, expected);
                    }
                }
                9 => self.send_data(word(8), word(10), long(16) as usize, rng),
                kind => panic!("a PDU of type {kind}"),
            }
        }
    }

    /// Answers an R2T, by several PDUs.
    fn send_data(&mut self, cid: u16, tag: u16, len: usize, rng: &mut Rng) {
        let command = self.commands.get_mut(&cid).expect("an R2T for a command");
        assert!(std::mem::take(&mut command.awaits_r2t), "one R2T for data that were not sent");
        let data = command.data.clone();
        assert_eq!(len, data.len());
        let mut at = 0;
        while at < len {
            let part = (rng.usize(1..=32) * BLOCK).min(len - at);
            let mut header = Vec::new();
            header.extend(cid.to_le_bytes());
            header.extend(tag.to_le_bytes());
            header.extend((at as u32).to_le_bytes());
            header.extend((part as u32).to_le_bytes());
            header.extend([0; 4]);
            self.pdu(6, &header, &data[at..at + part]);
            at += part;
        }
    }

    fn complete(&mut self, cid: u16, status: u16, result: u64, expected: &mut [u8]) {
        let command = self.commands.remove(&cid).expect("an answer to a command in flight");
        assert!(!command.awaits_r2t, "an answer without data: {:?} {status:#x}", command.op);
        let range =
            command.first as usize * BLOCK..(command.first + command.blocks) as usize * BLOCK;
        match command.op {
            // The device may be removed or replaced in that moment.
            HostOp::Connect | HostOp::Property => self.results.push(match status {
                0 => result,
                _ => u64::MAX,
            }),
            HostOp::Invalid => assert_ne!(status, 0),
            HostOp::Discard if self.is_ending && status & 0x7ff == 7 => {}
            _ if status != 0 => panic!("{:?} fails with {status:#x}", command.op),
            HostOp::Read => assert!(command.received == command.data, "other data"),
            HostOp::Write => expected[range].copy_from_slice(&command.data),
            HostOp::Discard => expected[range].fill(0),
            HostOp::Flush => {}
        }
    }
}

// The simulation.

struct SimConnection {
    host: Host,
    transport: SimStream,
    link: Arc<HostLink>,
    /// `None` once it has ended.
    connection: Option<HostConnection<SimStream>>,
    turn: AfterTurn,
    /// Whether the host reads, and the schedule may let it.
    reads: bool,
    /// The bytes that were sent before the connection was to send nothing more.
    sent_at_end: Option<usize>,
    received: usize,
}

struct Simulation {
    rng: Rng,
    now: Instant,
    shared: Arc<SessionShared>,
    device: Arc<Mutex<SimDevice>>,
    expected: Vec<u8>,
    admin: SimConnection,
    io: SimConnection,
    /// Another I/O queue of the controller in half of the schedules, without commands.
    idle: SimConnection,
    /// The turns since the time last moved.
    turns: usize,
}

impl SimConnection {
    fn new(
        shared: &Arc<SessionShared>,
        flow_control: bool,
        id: u64,
        now: Instant,
    ) -> SimConnection {
        let transport = SimStream::default();
        let link = Arc::new(HostLink::new(id, "sim".to_owned(), Arc::new(Wake::new().unwrap())));
        let watch = DeviceWatch { set: Arc::new(Epoll::new().unwrap()), token: 0 };
        let stream = (transport.clone(), "192.0.2.1:4420".parse().unwrap());
        let made =
            HostConnection::new(Arc::clone(shared), Arc::clone(&link), stream, watch, now).unwrap();
        SimConnection {
            host: Host::new(flow_control),
            transport,
            link,
            connection: Some(made),
            turn: AfterTurn::Again,
            reads: true,
            sent_at_end: None,
            received: 0,
        }
    }

    /// Moves bytes of both directions, at most `most` each.
    fn transfer(&mut self, most: usize) {
        let mut stream = self.transport.0.borrow_mut();
        let len = most.min(self.host.unsent.len());
        let bytes: Vec<_> = self.host.unsent.drain(..len).collect();
        if !stream.has_ended {
            stream.to_target.extend(bytes);
        }
        if self.reads {
            let len = most.min(stream.to_host.len());
            self.received += len;
            self.host.received.extend(stream.to_host.drain(..len));
            stream.room = 200_usize.max(most * 4).saturating_sub(stream.to_host.len());
        }
    }

    /// Gives a turn if the connection waits for what there is.
    fn run(&mut self, now: Instant) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        let is_due = match self.turn {
            AfterTurn::Again => true,
            AfterTurn::Waits(Wait { socket, until }) => {
                socket.is_some_and(|watch| self.transport.is_ready(watch))
                    || until.is_some_and(|until| until <= now)
            }
            AfterTurn::Ended => false,
        };
        if !(self.link.wake.take() || is_due) {
            return false;
        }
        self.turn = connection.turn(now);
        true
    }

    fn sent(&self) -> usize {
        self.transport.0.borrow().to_host.len() + self.received
    }

    /// Notes that the connection begins to end, and that it is to send nothing more.
    fn note_phase(&mut self, device: &Mutex<SimDevice>) {
        let Some(connection) = &self.connection else { return };
        if connection.phase != Phase::Serves && self.link.id == IO && self.is_io() {
            device.lock().unwrap().note_end();
        }
        if !matches!(connection.phase, Phase::Serves | Phase::Drains { .. }) {
            let sent = self.sent();
            assert_eq!(*self.sent_at_end.get_or_insert(sent), sent, "something is sent later");
        }
    }

    /// Whether the connection is an I/O queue.
    fn is_io(&self) -> bool {
        self.connection.as_ref().is_some_and(|it| matches!(it.role, QueueRole::Io(_)))
    }

    /// Whether the host can see that the target has ended the connection.
    fn has_end(&self) -> bool {
        self.connection.is_none() || self.transport.0.borrow().is_shut
    }

    fn until(&self) -> Option<Instant> {
        match self.turn {
            AfterTurn::Waits(Wait { until, .. }) if self.connection.is_some() => until,
            _ => None,
        }
    }
}

impl Simulation {
    fn new(mut rng: Rng) -> Simulation {
        let subsystems = Subsystems::new("sim", HostAccess::default(), None);
        let data = std::iter::repeat_with(|| rng.u8(..)).take(BLOCKS as usize * BLOCK);
        let expected: Vec<u8> = data.collect();
        let device = SimDevice::new(expected.clone());
        let device = Arc::new(Mutex::new(device));
        subsystems.add("sim", SimDisk::of(&device)).unwrap();
        let shared =
            Arc::new(SessionShared { subsystems, discovery_only: false, dh: Arc::default() });
        let (now, flow_control) = (Instant::now(), rng.bool());
        let admin = SimConnection::new(&shared, true, 1, now);
        let io = SimConnection::new(&shared, flow_control, IO, now);
        let idle = SimConnection::new(&shared, flow_control, 3, now);
        Simulation { rng, now, shared, device, expected, admin, io, idle, turns: 0 }
    }

    /// Gives all turns that are due.
    fn settle(&mut self) {
        loop {
            let mut is_any = false;
            for it in [&mut self.admin, &mut self.io, &mut self.idle] {
                self.device.lock().unwrap().is_in_turn = true;
                is_any |= it.run(self.now);
                self.device.lock().unwrap().is_in_turn = false;
                it.note_phase(&self.device);
                if it.turn == AfterTurn::Ended
                    && let Some(mut connection) = it.connection.take()
                {
                    // Only a connection with commands in flight may wait for the device.
                    let has_in_flight = connection.has_in_flight();
                    self.device.lock().unwrap().is_in_turn = !has_in_flight;
                    connection.leave();
                    self.device.lock().unwrap().is_in_turn = false;
                }
            }
            self.turns += usize::from(is_any);
            let phases = [&self.admin, &self.io, &self.idle]
                .map(|it| (it.connection.as_ref().map(|it| it.phase), it.turn));
            assert!(self.turns < 5000, "turns without end at one time: {phases:?}");
            if !is_any {
                return;
            }
        }
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
        self.turns = 0;
        self.settle();
    }

    /// Moves the time to the next one that a connection waits for.
    fn advance_to_next(&mut self, most: Duration) {
        let untils = [&self.admin, &self.io, &self.idle].map(SimConnection::until);
        let due = untils.into_iter().flatten().min();
        let time = due.map_or(most, |due| due.saturating_duration_since(self.now).min(most));
        self.advance(time.max(Duration::from_micros(1)));
    }

    fn transfer(&mut self, most: usize) {
        for it in [&mut self.admin, &mut self.io, &mut self.idle] {
            it.transfer(most);
            it.host.take(&mut self.expected, &mut self.rng);
        }
        self.turns = 0;
        self.settle();
    }

    fn complete_one(&mut self) {
        let mut device = self.device.lock().unwrap();
        if !device.started.is_empty() {
            let at = self.rng.usize(..device.started.len());
            device.complete(at);
        }
        drop(device);
        // The device has no descriptor: the connections look by the time.
        self.advance(Duration::from_millis(1));
    }

    /// Connects and enables the admin queue, and connects the I/O queues.
    fn connect(&mut self, keep_alive_ms: u32) {
        self.admin.host.connect(0, 0xffff, keep_alive_ms);
        self.admin.host.set_config(0x46_0061);
        while self.admin.host.results.len() < 2 {
            self.transfer(1 << 16);
        }
        let controller = self.admin.host.results[0] as u16;
        self.io.host.connect(1, controller, 0);
        if self.rng.bool() {
            self.idle.host.connect(2, controller, 0);
        }
    }

    /// Lets the host of an I/O queue that is in order get all its answers.
    fn finish_commands(&mut self) {
        for _ in 0..20_000 {
            self.transfer(4096);
            self.complete_one();
            if self.io.host.commands.is_empty() && self.io.host.unsent.is_empty() {
                return;
            }
        }
        panic!("commands without an answer: {:?}", self.io.host.commands);
    }

    /// The I/O queue is at rest: it holds nothing.
    fn check_rest(&self) {
        let connection = self.io.connection.as_ref().expect("it has not ended");
        assert_eq!(connection.slots.in_use(), 0);
        assert!(connection.waiting.is_empty() && connection.sending.is_empty());
        assert!(connection.outbox.is_empty() && connection.pool.is_free());
        let device = self.device.lock().unwrap();
        assert!(device.started.is_empty() && device.data == self.expected, "the device's data");
    }

    /// The host has sent what it wants to, and the target has begun its commands.
    fn deliver(&mut self) {
        for _ in 0..20_000 {
            self.transfer(4096);
            let (io, host) = (&self.io, &self.io.host);
            let is_delivered = host.unsent.is_empty()
                && io.transport.0.borrow().to_target.is_empty()
                && host.commands.values().all(|it| !it.awaits_r2t)
                && !host.results.is_empty()
                && io.connection.as_ref().is_none_or(|it| {
                    it.waiting.is_empty() && it.receiving.is_none() && it.inbox.unread().is_empty()
                });
            if is_delivered {
                return;
            }
            self.complete_one();
        }
        panic!("commands that do not begin: {:?}", self.io.host.commands);
    }

    /// The target receives what the host has sent last. The host reads; without help its device
    /// completes nothing meanwhile.
    fn receive_end(&mut self, helps: bool) {
        let transfers = if helps { 1 } else { 200 };
        (0..transfers).for_each(|_| self.transfer(1 << 16));
    }

    /// The I/O queue ends within the time, and, if `helps`, answers all its commands before,
    /// because its host reads and its device completes them.
    fn check_end_with(&mut self, helps: bool, within: Duration) {
        if !helps {
            return self.check_end(within);
        }
        let deadline = self.now + within;
        while self.io.connection.is_some() {
            assert!(self.now <= deadline, "the connection has not ended in time");
            self.transfer(1 << 16);
            self.check_order();
            let is_busy = !self.device.lock().unwrap().started.is_empty();
            match is_busy {
                true => self.complete_one(),
                false => self.advance_to_next(Duration::from_millis(100)),
            }
        }
        self.transfer(1 << 20);
        let ops: Vec<_> = self.io.host.commands.values().map(|it| it.op).collect();
        assert!(ops.is_empty(), "commands without an answer: {ops:?}");
        self.check_left();
    }

    /// The I/O queue ends within the time, without any help of its host or its device.
    fn check_end(&mut self, mut within: Duration) {
        if self.io.host.results.is_empty() {
            // It may be refused, and then has the time for another Connect.
            within = within.max(CONNECT_TIMEOUT + DRAIN_TIMEOUT + Duration::from_secs(1));
        }
        let deadline = self.now + within;
        while self.io.connection.is_some() {
            let it = self.io.connection.as_ref().unwrap();
            assert!(
                self.now <= deadline,
                "the connection has not ended in time: {:?}, {:?}, stalled {}, {:?}",
                it.phase,
                self.io.turn,
                it.stalled_until.is_some(),
                self.io.transport.0.borrow().room,
            );
            self.advance_to_next(Duration::from_secs(1));
        }
        self.transfer(1 << 20);
        self.check_left();
    }

    /// No queue that the target ends does so before the others have answered.
    fn check_order(&self) {
        let Some(io) = self.io.connection.as_ref().filter(|it| it.is_draining) else { return };
        let is_busy = io.slots.executing() > 0 || !io.outbox.is_empty();
        let was_connected = self.idle.host.results.first().is_some_and(|it| *it != u64::MAX);
        assert!(!(is_busy && was_connected && self.idle.has_end()), "an idle queue ends first");
        let is_any = self.io.is_io() || was_connected && self.idle.is_io();
        assert!(!(is_any && self.admin.has_end()), "the admin queue ends first");
    }

    /// All queues end within the time, which the target has asked for.
    fn check_ends(&mut self, within: Duration) {
        let deadline = self.now + within;
        while self.admin.connection.is_some() || self.idle.is_io() {
            assert!(self.now <= deadline, "the other queues have not ended in time");
            self.advance_to_next(Duration::from_secs(1));
        }
    }

    /// A connection that has ended has returned what it had, when the other queue has ended too.
    fn check_left(&mut self) {
        self.idle.transport.0.borrow_mut().has_ended = true;
        while self.idle.connection.is_some() {
            self.transfer(1 << 16);
            self.advance_to_next(Duration::from_secs(1));
        }
        let subsystems = self.shared.subsystems.devices();
        assert!(subsystems.iter().all(|it| !it.is_used()), "the disk is returned");
        assert_eq!(self.device.lock().unwrap().open, 0, "the channel is closed");
    }

    /// Steps of a schedule: bytes, completions, commands and time, in any order.
    fn steps(&mut self, count: usize) {
        for _ in 0..count {
            match self.rng.u8(..12) {
                0..4 => {
                    let Simulation { io, rng, expected, .. } = self;
                    if io.host.results.len() == 1 {
                        io.host.random_command(rng, expected);
                    }
                }
                4..9 => {
                    let most = match self.rng.u8(..3) {
                        0 => self.rng.usize(1..16),
                        1 => self.rng.usize(1..1500),
                        _ => self.rng.usize(1..40_000),
                    };
                    self.transfer(most);
                }
                9..11 => self.complete_one(),
                _ => self.advance_to_next(Duration::from_millis(2)),
            }
        }
    }
}

/// What ends a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Finishes,
    Closes,
    Resets,
    StopsReading,
    Vanishes,
    NeverConnects,
    Violates,
    TermReq,
    Reset,
    Drained,
    Cut,
    Replaced,
    Removed,
}

const ENDINGS: [Ending; 13] = [
    Ending::Finishes,
    Ending::Closes,
    Ending::Resets,
    Ending::StopsReading,
    Ending::Vanishes,
    Ending::NeverConnects,
    Ending::Violates,
    Ending::TermReq,
    Ending::Reset,
    Ending::Drained,
    Ending::Cut,
    Ending::Replaced,
    Ending::Removed,
];

/// The ends for which a connection answers what it has received.
const ANSWERING: [Ending; 5] =
    [Ending::Closes, Ending::Violates, Ending::TermReq, Ending::Drained, Ending::Removed];

const KEEP_ALIVE_MS: u32 = 5000;

/// The time that a check allows beyond the time-outs.
const SLACK: Duration = Duration::from_secs(1);

fn run(ending: Ending, rng: Rng) {
    let mut sim = Simulation::new(rng);
    if let Ending::NeverConnects = ending {
        let len = sim.rng.usize(..128);
        sim.io.host.unsent.truncate(len);
        sim.steps(20);
        return sim.check_end(CONNECT_TIMEOUT + SLACK);
    }
    let vanishes = matches!(ending, Ending::Vanishes);
    sim.connect(if vanishes { KEEP_ALIVE_MS } else { 0 });
    let steps = sim.rng.usize(..STEPS);
    sim.steps(steps);
    let helps = sim.rng.bool();
    if helps && ANSWERING.contains(&ending) {
        sim.deliver();
        sim.io.host.is_ending = true;
    }
    host_ends(&mut sim, ending, helps);
    host_violates(&mut sim, ending, helps);
    target_ends(&mut sim, ending, helps);
}

/// The host has all its answers, or ends or forgets the connection.
fn host_ends(sim: &mut Simulation, ending: Ending, helps: bool) {
    match ending {
        Ending::Finishes => {
            sim.finish_commands();
            sim.check_rest();
            // An idle connection returns its memory, and goes on.
            sim.advance_to_next(Duration::from_secs(2));
            sim.advance(Duration::from_secs(2));
            sim.steps(STEPS);
            sim.finish_commands();
            sim.check_rest();
        }
        Ending::Closes => {
            sim.io.transport.0.borrow_mut().has_ended = true;
            // The host may not read, and then its end of the stream is received later.
            sim.check_end_with(helps, STALL_MAX + DRAIN_TIMEOUT + SLACK);
        }
        Ending::Resets => {
            sim.io.transport.0.borrow_mut().is_reset = true;
            sim.check_end(DRAIN_TIMEOUT + SLACK);
        }
        Ending::StopsReading => {
            // Answers that it has not read yet could be all there are.
            sim.transfer(1 << 20);
            sim.io.reads = false;
            // Less than any answer.
            sim.io.transport.0.borrow_mut().room = sim.rng.usize(..24);
            let mut answers = 0;
            let is_stalled = |sim: &Simulation| {
                let stream = sim.io.transport.0.borrow();
                sim.io.connection.as_ref().is_none_or(|it| it.stalled_until.is_some())
                    && stream.room == 0
            };
            while !is_stalled(sim) {
                sim.steps(20);
                answers += 1;
                // Nothing to answer: its commands are all in flight to the device.
                while !sim.device.lock().unwrap().started.is_empty() {
                    sim.complete_one();
                }
                assert!(answers < 1000, "the host gets no answers");
            }
            sim.check_end(STALL_MAX + DRAIN_TIMEOUT + SLACK);
        }
        Ending::Vanishes => {
            // Both connections are silent.
            sim.admin.host.unsent.clear();
            sim.io.host.unsent.clear();
            let keep_alive = Duration::from_millis(KEEP_ALIVE_MS.into());
            sim.check_end(keep_alive + Duration::from_secs(1) + DRAIN_TIMEOUT + SLACK);
        }
        _ => {}
    }
}

/// The host ends the connection by what it sends.
fn host_violates(sim: &mut Simulation, ending: Ending, helps: bool) {
    match ending {
        Ending::Violates => {
            sim.io.host.unsent.extend([0xff; 16]);
            sim.receive_end(helps);
            sim.check_end_with(helps, DRAIN_TIMEOUT + LINGER + SLACK);
            assert!(sim.io.host.has_term || !helps, "a violation is answered by a TermReq");
        }
        Ending::TermReq => {
            sim.io.host.pdu(2, &[0; 16], &[]);
            sim.receive_end(helps);
            sim.check_end_with(helps, DRAIN_TIMEOUT + SLACK);
        }
        Ending::Reset => {
            sim.admin.host.set_config(0x46_0060);
            sim.transfer(1 << 16);
            sim.check_end(DRAIN_TIMEOUT + SLACK);
            assert_eq!(sim.admin.host.commands.len(), 0);
        }
        _ => {}
    }
}

/// The target ends the connection, or changes the device.
fn target_ends(sim: &mut Simulation, ending: Ending, helps: bool) {
    match ending {
        Ending::Drained => {
            // One queue, or all, as by a server that stops.
            let order = [&sim.admin, &sim.io, &sim.idle].map(|it| Arc::clone(&it.link));
            match sim.rng.u8(..3) {
                0 => order.iter().for_each(|link| link.drain()),
                one if helps => order[usize::from(one) - 1].drain(),
                _ => sim.io.link.drain(),
            }
            sim.check_end_with(helps, STALL_MAX + DRAIN_TIMEOUT + LINGER + SLACK);
            if helps {
                sim.check_ends(LINGER + SLACK);
            }
        }
        Ending::Cut => {
            sim.io.link.cut();
            if !sim.io.host.results.is_empty() {
                sim.device.lock().unwrap().note_end();
            }
            // The device may go on.
            while helps && !sim.device.lock().unwrap().started.is_empty() {
                sim.complete_one();
            }
            sim.check_end(DRAIN_TIMEOUT + SLACK);
        }
        Ending::Replaced => {
            for _ in 0..3 {
                let subsystem = Arc::clone(&sim.shared.subsystems.devices()[0]);
                subsystem.begin_suspend().unwrap();
                for round in 0.. {
                    assert!(round < 20_000, "the disk is not returned");
                    sim.transfer(2000);
                    if !subsystem.is_used() {
                        break;
                    }
                    sim.complete_one();
                }
                sim.steps(20);
                assert!(!subsystem.is_used(), "a disk that was returned is used");
                let disk = SharedDisk::from(SimDisk::of(&sim.device));
                subsystem.resume(disk).unwrap();
                sim.steps(50);
            }
            sim.finish_commands();
            sim.check_rest();
        }
        Ending::Removed => {
            let subsystem = Arc::clone(&sim.shared.subsystems.devices()[0]);
            subsystem.close();
            sim.check_end_with(helps, STALL_MAX + DRAIN_TIMEOUT + LINGER + SLACK);
            sim.check_ends(if helps { LINGER } else { DRAIN_TIMEOUT + LINGER } + SLACK);
        }
        _ => {}
    }
}

#[test]
fn every_schedule_keeps_the_order_the_data_and_the_times() {
    let seed = Seed::from_env();
    for number in 0..SCHEDULES {
        let ending = ENDINGS[(number % ENDINGS.len() as u64) as usize];
        let _watch = seed.watch(&format!("schedule {number}, {ending:?}"));
        run(ending, seed.rng(number));
    }
}
