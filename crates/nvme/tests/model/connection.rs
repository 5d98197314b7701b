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
//!   answered, also those that waited for memory, and also if the host sends others without a
//!   pause; and if the target ends it, the controller's other queues end too: no I/O queue
//!   before all have answered, and the admin queue last. From the beginning of its end, a command
//!   begins one operation of the device at most, and none if it has begun one. A connection that
//!   has given up its host, or only waits for its end of the stream, sends nothing.
//! - A connection that waits has a reason: no turn is given again and again at one time.
//!
//! Replay: `BLOCKYARD_SEED=N cargo test -p blockyard-nvme --lib model`.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

#[path = "device.rs"]
mod device;
#[path = "host.rs"]
mod host;

use std::cell::RefCell;
use std::collections::VecDeque;
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
use host::{ENDLESS, Host, HostOp};

use super::*;
use crate::access::HostAccess;
use crate::subsystems::Subsystems;

const BLOCK: usize = 512;
const BLOCKS: u64 = 256;
const NQN: &str = "nqn.2026-11.io.blockyard:sim";
const HOST: &str = "nqn.2026-11.example:host";
/// The id of the connection whose host sends I/O commands.
const IO: u64 = 2;
/// The pages of the connection's memory in half of the schedules: those of two long commands.
const FEW_PAGES: usize = 6;
const SCHEDULES: u64 = 156;
const STEPS: usize = 250;

// The stream.

#[derive(Default)]
struct StreamState {
    to_target: VecDeque<u8>,
    /// The host has ended its direction, or the target reads no more.
    has_ended: bool,
    /// A command that comes again whenever the target receives.
    endless: Vec<u8>,
    /// The host has reset the connection.
    is_reset: bool,
    to_host: VecDeque<u8>,
    /// The bytes that the stream accepts for the host now.
    room: usize,
    is_shut: bool,
}

impl StreamState {
    /// A host that sends without a pause has always sent more than the target has received.
    fn send_on(&mut self) {
        while !self.endless.is_empty() && self.to_target.len() < 1000 {
            self.to_target.extend(&self.endless);
        }
    }
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
        if len == 0 && !stream.has_ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let taken = stream.to_target.drain(..len).collect();
        stream.send_on();
        Ok(taken)
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

    fn unread_bytes(&self) -> io::Result<usize> {
        Ok(self.0.borrow().to_target.len())
    }

    fn has_ended(&self) -> bool {
        let stream = self.0.borrow();
        stream.has_ended || stream.is_reset || stream.is_shut
    }

    fn shutdown(&mut self, how: Shutdown) {
        let mut stream = self.0.borrow_mut();
        stream.has_ended |= how != Shutdown::Write;
        stream.is_shut |= how != Shutdown::Read;
        // The host sends to a target that ends its direction no more.
        stream.endless.clear();
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
    /// Another I/O queue of the controller in half of the schedules, with commands without data.
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
            device.lock().unwrap().note_end(connection.pool.region());
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
            let is_done = |host: &Host| host.commands.is_empty() && host.unsent.is_empty();
            if is_done(&self.io.host) && is_done(&self.idle.host) {
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

    /// The hosts have sent what they want to, and the target has received it. Commands may wait for
    /// memory that have no data or all.
    fn deliver(&mut self) {
        for _ in 0..20_000 {
            self.transfer(4096);
            let is_delivered = |of: &SimConnection| {
                of.host.unsent.is_empty()
                    && of.transport.0.borrow().to_target.is_empty()
                    && of.host.commands.values().all(|it| !it.awaits_r2t)
                    && of
                        .connection
                        .as_ref()
                        .is_none_or(|it| it.receiving.is_none() && it.inbox.unread().is_empty())
            };
            let has_connected = !self.io.host.results.is_empty();
            if has_connected && is_delivered(&self.io) && is_delivered(&self.idle) {
                for host in [&mut self.io.host, &mut self.idle.host] {
                    host.owed = host.commands.keys().copied().collect();
                }
                return;
            }
            self.complete_one();
        }
        panic!("commands that do not begin: {:?}", self.io.host.commands);
    }

    /// From now on the host sends commands, which the target refuses, faster than it executes them.
    fn send_without_pause(&mut self) {
        let mut host = Host::new(false);
        (host.next_cid, host.unsent) = (ENDLESS, VecDeque::new());
        host.send_plain(HostOp::Invalid);
        let mut stream = self.io.transport.0.borrow_mut();
        stream.endless = host.unsent.into();
        stream.send_on();
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
        let Host { owed, commands, .. } = &self.io.host;
        let ops: Vec<_> = owed.iter().map(|cid| commands[cid].op).collect();
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
        let is_draining =
            |of: &SimConnection| of.connection.as_ref().is_some_and(|it| it.is_ending());
        if !is_draining(&self.io) {
            return;
        }
        let was_connected = self.idle.host.results.first().is_some_and(|it| *it != u64::MAX);
        if was_connected {
            for (one, other) in [(&self.io, &self.idle), (&self.idle, &self.io)] {
                let is_busy = is_draining(one) && !one.host.owed.is_empty();
                assert!(!(is_busy && other.has_end()), "a queue ends before another has answered");
            }
        }
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
                    let idle = &mut self.idle.host;
                    if idle.results.first().is_some_and(|it| *it != u64::MAX) && rng.u8(..8) == 0 {
                        let op = if rng.bool() { HostOp::Flush } else { HostOp::Invalid };
                        idle.send_plain(op);
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
    // A host that does not read its R2Ts leaves the memory to them, and nothing to send.
    if let Some(connection) = &mut sim.io.connection
        && ending != Ending::StopsReading
        && sim.rng.bool()
    {
        connection.pool.keep(FEW_PAGES);
    }
    let vanishes = matches!(ending, Ending::Vanishes);
    sim.connect(if vanishes { KEEP_ALIVE_MS } else { 0 });
    let steps = sim.rng.usize(..STEPS);
    sim.steps(steps);
    let helps = sim.rng.bool();
    if helps && ANSWERING.contains(&ending) {
        sim.deliver();
        sim.io.host.is_ending = true;
        if ending == Ending::Drained && sim.rng.bool() {
            sim.send_without_pause();
        }
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
                0 => order.iter().for_each(|link| link.request_end()),
                one if helps => order[usize::from(one) - 1].request_end(),
                _ => sim.io.link.request_end(),
            }
            sim.check_end_with(helps, STALL_MAX + DRAIN_TIMEOUT + LINGER + SLACK);
            if helps {
                sim.check_ends(LINGER + SLACK);
                assert!(sim.idle.host.owed.is_empty(), "commands of the other queue");
            }
        }
        Ending::Cut => {
            sim.io.link.cut();
            if let Some(it) = &sim.io.connection
                && !sim.io.host.results.is_empty()
            {
                sim.device.lock().unwrap().note_end(it.pool.region());
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
            assert!(!helps || sim.idle.host.owed.is_empty(), "commands of the other queue");
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
