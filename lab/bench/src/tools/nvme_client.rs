//! An NVMe/TCP host that keeps a number of commands in flight on each of its queues.
//!
//! Like the NBD client, it sends as much as it may at once and receives as much as there is, so
//! that its own cost is small compared with a target's. It asks for no digests and no flow control
//! of queues, so that a read is answered by its data alone.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use blockyard_nvme::command::{FABRICS_OPCODE, SQE_BYTES, admin_opcode, fabrics_type, io_opcode};
use blockyard_nvme::fabrics::{CONNECT_BYTES, NEW_CONTROLLER, property};
use blockyard_nvme::identify::{PAGE_BYTES, cns};
use blockyard_nvme::wire::{
    CAPSULE_HEADER_BYTES, COMMON_HEADER_BYTES, IC_BYTES, PduHeader, SHORT_HEADER_BYTES, pdu_flag,
    pdu_type,
};
use fastrand::Rng;
use hdrhistogram::Histogram;

use crate::error::LabError;
use crate::load::latencies;
use crate::load::workers::Work;

/// A target that sends no byte for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// The most bytes of PDUs that one system call receives.
const RECEIVE_BYTES: usize = 256 << 10;
/// The entries of an I/O queue. A queue is full with one command less.
const ENTRIES: u16 = 128;
/// The greatest number of commands in flight on a queue.
pub const DEPTH_MAX: usize = ENTRIES as usize - 1;
/// The entries of an admin queue, the least that the specification allows.
const ADMIN_ENTRIES: u16 = 32;
/// The NQN of this host.
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:6f1c58f4-3a5e-4a0e-8a4e-2b0c9d5e7f31";
/// CC: enabled, all I/O command sets, entries of 64 and 16 bytes.
const ENABLE: u32 = 1 | 6 << 4 | 6 << 16 | 4 << 20;
/// The flag of Connect by which a host does without flow control of the submission queue.
const NO_FLOW_CONTROL: u8 = 4;
/// The action of Zone Management Send that resets a zone.
const ZONE_RESET: u32 = 4;

/// What the commands of a queue do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmeOp {
    /// They read, anywhere.
    Read,
    /// They write, anywhere.
    Write,
    /// They append to the first zone.
    Append,
}

/// The commands of a queue.
#[derive(Clone, Copy, Debug)]
pub struct NvmeCommands {
    /// What each command does.
    pub op: NvmeOp,
    /// The length of the data of a command in bytes.
    pub len: u64,
    /// The number of commands in flight.
    pub depth: usize,
}

/// An enabled controller, which lasts as long as its admin queue is connected.
#[derive(Debug)]
pub struct NvmeController {
    address: SocketAddr,
    nqn: String,
    _admin: TcpStream,
    id: u16,
    /// The longest data in a command capsule.
    capsule_bytes_max: u64,
    block_bytes: u64,
    blocks: u64,
}

/// A queue.
pub struct NvmeQueue {
    stream: TcpStream,
    commands: NvmeCommands,
    /// The blocks of a command, and the number of places for one.
    command_blocks: u64,
    places: u64,
    /// The longest data in one PDU to the target.
    h2c_bytes_max: usize,
    rng: Rng,
    data: Vec<u8>,
    /// The length of the data that a capsule has, from the beginning of `data`.
    capsule_bytes: usize,
    /// The capsules without data, by their slots.
    heads: Vec<[u8; CAPSULE_HEADER_BYTES]>,
    since: Vec<Instant>,
    free: Vec<usize>,
    /// The data that the target has asked for: the header of the PDU, and the range of `data`.
    transfers: Vec<([u8; SHORT_HEADER_BYTES], std::ops::Range<usize>)>,
    /// Received bytes of PDUs, and their number.
    pdus: Vec<u8>,
    have: usize,
    latency: Histogram<u64>,
}

impl fmt::Debug for NvmeQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeQueue").field("commands", &self.commands).finish_non_exhaustive()
    }
}

impl NvmeController {
    /// Connects to a subsystem with one namespace, number 1.
    ///
    /// # Errors
    /// If the target does not answer, or with an error.
    pub fn connect(address: SocketAddr, nqn: &str) -> Result<NvmeController, LabError> {
        let failed = LabError::io(format!("NVMe subsystem {nqn} at {address}"));
        NvmeController::enable(address, nqn).map_err(failed)
    }

    fn enable(address: SocketAddr, nqn: &str) -> io::Result<NvmeController> {
        let (mut admin, _) = initialize(address)?;
        let id = connect(&mut admin, nqn, [0, ADMIN_ENTRIES - 1, NEW_CONTROLLER])?;
        let mut set = fabrics(fabrics_type::PROPERTY_SET);
        put_u32(&mut set, 44, property::CC);
        put_u32(&mut set, 48, ENABLE);
        execute(&mut admin, set, &[], 0)?;
        let mut get = fabrics(fabrics_type::PROPERTY_GET);
        put_u32(&mut get, 44, property::CSTS);
        let began = Instant::now();
        while execute(&mut admin, get, &[], 0)?.0 & 1 == 0 {
            if began.elapsed() > SILENCE_MAX {
                return Err(io::Error::other("the controller does not become ready"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        let controller = identify(&mut admin, cns::CONTROLLER, 0)?;
        let namespace = identify(&mut admin, cns::NAMESPACE, 1)?;
        // IOCCSZ counts units of 16 bytes and includes the command.
        let capsule_bytes_max = u64::from(u32_at(&controller, 1792)) * 16;
        let format = usize::from(namespace[26] & 15);
        Ok(NvmeController {
            address,
            nqn: nqn.to_owned(),
            _admin: admin,
            id: id as u16,
            capsule_bytes_max: capsule_bytes_max.saturating_sub(SQE_BYTES as u64),
            block_bytes: 1 << (namespace[128 + 4 * format + 2] & 31),
            blocks: u64_at(&namespace, 0),
        })
    }

    /// Connects an I/O queue; its number is above 0.
    ///
    /// # Errors
    /// If the target does not answer, or with an error, or if the namespace is too small.
    pub fn queue(
        &self,
        number: u16,
        commands: NvmeCommands,
        seed: u64,
    ) -> Result<NvmeQueue, LabError> {
        let NvmeController { address, nqn, block_bytes, .. } = self;
        let what = format!("NVMe subsystem {nqn} at {address}");
        let command_blocks = commands.len / block_bytes;
        let places = self.blocks.checked_div(command_blocks).unwrap_or(0);
        if places == 0 {
            return Err(LabError::failed(what, format!("it has {} blocks only", self.blocks)));
        }
        let open = || {
            let (mut stream, h2c_bytes_max) = initialize(*address)?;
            connect(&mut stream, nqn, [number, ENTRIES - 1, self.id])?;
            Ok((stream, h2c_bytes_max))
        };
        let (stream, h2c_bytes_max) = open().map_err(LabError::io(what))?;
        let mut rng = Rng::with_seed(seed);
        let has_data = commands.op != NvmeOp::Read;
        let in_capsule = has_data && commands.len <= self.capsule_bytes_max;
        let data = std::iter::repeat_with(|| rng.u8(..)).take(commands.len as usize).collect();
        let capsule_bytes = if in_capsule { commands.len as usize } else { 0 };
        let sqe = command(commands, command_blocks, in_capsule);
        let head = |slot| {
            let mut head = header(pdu_type::CAPSULE_CMD, CAPSULE_HEADER_BYTES, capsule_bytes);
            head[COMMON_HEADER_BYTES..].copy_from_slice(&sqe);
            put_u16(&mut head, COMMON_HEADER_BYTES + 2, slot as u16);
            head
        };
        let pdu_bytes = SHORT_HEADER_BYTES + if has_data { 0 } else { commands.len as usize };
        let received = (pdu_bytes * commands.depth).min(RECEIVE_BYTES).max(2 * pdu_bytes);
        Ok(NvmeQueue {
            stream,
            commands,
            command_blocks,
            places,
            h2c_bytes_max,
            rng,
            data,
            capsule_bytes,
            heads: (0..commands.depth).map(head).collect(),
            since: vec![Instant::now(); commands.depth],
            free: (0..commands.depth).collect(),
            transfers: Vec::new(),
            pdus: vec![0; received],
            have: 0,
            latency: latencies(),
        })
    }
}

impl NvmeQueue {
    /// Empties the first zone. Only while no command is in flight.
    ///
    /// # Errors
    /// If the target does not answer, or with an error.
    pub fn reset_zone(&mut self) -> Result<(), LabError> {
        let mut sqe = sqe(io_opcode::ZONE_SEND);
        put_u32(&mut sqe, 52, ZONE_RESET);
        let reset = execute(&mut self.stream, sqe, &[], 0);
        reset.map(drop).map_err(LabError::io("an NVMe zone reset"))
    }

    /// Latencies of commands that ended in the window, in nanoseconds.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Sends the data that the target has asked for, and commands up to the queue depth.
    fn fill(&mut self) -> io::Result<()> {
        let now = Instant::now();
        for &slot in &self.free {
            if self.commands.op != NvmeOp::Append {
                let block = self.rng.u64(..self.places) * self.command_blocks;
                let at = COMMON_HEADER_BYTES + 40;
                self.heads[slot][at..at + 8].copy_from_slice(&block.to_le_bytes());
            }
            self.since[slot] = now;
        }
        let mut slices = Vec::with_capacity(2 * (self.transfers.len() + self.free.len()));
        for (head, range) in &self.transfers {
            slices.push(IoSlice::new(head));
            slices.push(IoSlice::new(&self.data[range.clone()]));
        }
        for slot in self.free.drain(..) {
            slices.push(IoSlice::new(&self.heads[slot]));
            slices.push(IoSlice::new(&self.data[..self.capsule_bytes]));
        }
        let mut left = &mut slices[..];
        while !left.is_empty() {
            let sent = self.stream.write_vectored(left)?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut left, sent);
        }
        self.transfers.clear();
        Ok(())
    }

    /// Waits for PDUs, and returns the number of commands that ended.
    fn take(&mut self) -> io::Result<u64> {
        let read = self.stream.read(&mut self.pdus[self.have..])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.have += read;
        let (now, mut at, mut ended) = (Instant::now(), 0, 0);
        while let Some(pdu) = whole_pdu(&self.pdus[at..self.have]) {
            at += pdu.len();
            match parse(pdu)? {
                TargetPdu::Data => {}
                TargetPdu::Ended(cid) => {
                    let slot = usize::from(cid);
                    let since = self.since.get(slot).ok_or_else(|| unexpected(pdu))?;
                    self.latency.saturating_record((now - *since).as_nanos() as u64);
                    self.free.push(slot);
                    ended += 1;
                }
                TargetPdu::Wanted(wanted) => {
                    let h2c_bytes_max = self.h2c_bytes_max;
                    let range = wanted.range();
                    if range.end > self.data.len() {
                        return Err(unexpected(pdu));
                    }
                    for start in range.clone().step_by(h2c_bytes_max) {
                        let part = start..range.end.min(start + h2c_bytes_max);
                        self.transfers.push((wanted.header(&part), part));
                    }
                }
            }
        }
        self.pdus.copy_within(at..self.have, 0);
        self.have -= at;
        Ok(ended)
    }
}

impl Work for NvmeQueue {
    fn turn(&mut self) -> Result<u64, LabError> {
        self.fill().and_then(|()| self.take()).map_err(LabError::io("an NVMe command"))
    }

    fn begin(&mut self) {
        self.latency.reset();
    }
}

/// The data that an R2T asks for.
#[derive(Clone, Copy, Debug)]
struct WantedData {
    cid: u16,
    tag: u16,
    offset: u32,
    len: u32,
}

impl WantedData {
    fn range(&self) -> std::ops::Range<usize> {
        self.offset as usize..self.offset as usize + self.len as usize
    }

    /// The header of an H2CData with a part of the data.
    fn header(&self, part: &std::ops::Range<usize>) -> [u8; SHORT_HEADER_BYTES] {
        let mut head = header(pdu_type::H2C_DATA, SHORT_HEADER_BYTES, part.len());
        if part.end == self.range().end {
            head[1] = pdu_flag::LAST;
        }
        put_u16(&mut head, 8, self.cid);
        put_u16(&mut head, 10, self.tag);
        put_u32(&mut head, 12, part.start as u32);
        put_u32(&mut head, 16, part.len() as u32);
        head
    }
}

/// What a PDU of the target says.
enum TargetPdu {
    /// Data of a command that goes on.
    Data,
    /// The command has succeeded.
    Ended(u16),
    /// The target asks for data.
    Wanted(WantedData),
}

/// The first PDU, if all of it is there.
fn whole_pdu(bytes: &[u8]) -> Option<&[u8]> {
    let len = PduHeader::parse(bytes)?.len as usize;
    bytes.get(..len.max(COMMON_HEADER_BYTES))
}

fn parse(pdu: &[u8]) -> io::Result<TargetPdu> {
    if pdu.len() < SHORT_HEADER_BYTES {
        return Err(unexpected(pdu));
    }
    match pdu[0] {
        pdu_type::C2H_DATA if pdu[1] & pdu_flag::SUCCESS != 0 => {
            Ok(TargetPdu::Ended(u16_at(pdu, 8)))
        }
        pdu_type::C2H_DATA => Ok(TargetPdu::Data),
        pdu_type::CAPSULE_RESP => match u16_at(pdu, 22) >> 1 {
            0 => Ok(TargetPdu::Ended(u16_at(pdu, 20))),
            status => Err(io::Error::other(format!("the target answered with {status:03x}h"))),
        },
        pdu_type::R2T => Ok(TargetPdu::Wanted(WantedData {
            cid: u16_at(pdu, 8),
            tag: u16_at(pdu, 10),
            offset: u32_at(pdu, 12),
            len: u32_at(pdu, 16),
        })),
        _ => Err(unexpected(pdu)),
    }
}

fn unexpected(pdu: &[u8]) -> io::Error {
    let head = &pdu[..pdu.len().min(SHORT_HEADER_BYTES)];
    io::Error::other(format!("an unexpected PDU: {head:02x?}"))
}

/// Connects, and exchanges the parameters of the connection. Returns the longest data in an H2CData
/// too.
fn initialize(address: SocketAddr) -> io::Result<(TcpStream, usize)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    stream.write_all(&header::<IC_BYTES>(pdu_type::IC_REQ, IC_BYTES, 0))?;
    let mut answer = [0; IC_BYTES];
    stream.read_exact(&mut answer)?;
    // No digests, and no alignment of data.
    if answer[0] != pdu_type::IC_RESP || answer[10..12] != [0; 2] {
        return Err(unexpected(&answer));
    }
    Ok((stream, (u32_at(&answer, 12) as usize).max(PAGE_BYTES)))
}

/// Connects a queue, given by its number, its entries less one, and its controller. Returns the
/// controller.
fn connect(stream: &mut TcpStream, nqn: &str, queue: [u16; 3]) -> io::Result<u64> {
    let [number, entries, controller] = queue;
    let mut sqe = fabrics(fabrics_type::CONNECT);
    put_u16(&mut sqe, 42, number);
    put_u16(&mut sqe, 44, entries);
    sqe[46] = NO_FLOW_CONTROL;
    let mut data = [0; CONNECT_BYTES as usize];
    data[..16].fill(7);
    put_u16(&mut data, 16, controller);
    for (at, name) in [(256, nqn), (512, HOST_NQN)] {
        let field = data[at..at + 255].get_mut(..name.len());
        field.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(name.as_bytes());
    }
    Ok(execute(stream, sqe, &data, 0)?.0)
}

fn identify(stream: &mut TcpStream, cns: u8, namespace: u32) -> io::Result<Vec<u8>> {
    let mut sqe = sqe(admin_opcode::IDENTIFY);
    put_u32(&mut sqe, 4, namespace);
    sqe[40] = cns;
    Ok(execute(stream, sqe, &[], PAGE_BYTES)?.1)
}

/// Executes one command with data in its capsule, or with data of `len` bytes from the target.
/// Returns its result and these data.
fn execute(
    stream: &mut TcpStream,
    mut sqe: [u8; SQE_BYTES],
    in_capsule: &[u8],
    len: usize,
) -> io::Result<(u64, Vec<u8>)> {
    put_pointer(&mut sqe, in_capsule.len().max(len) as u32, len == 0);
    let mut head: [u8; CAPSULE_HEADER_BYTES] =
        header(pdu_type::CAPSULE_CMD, CAPSULE_HEADER_BYTES, in_capsule.len());
    head[COMMON_HEADER_BYTES..].copy_from_slice(&sqe);
    stream.write_all(&[&head, in_capsule].concat())?;
    let mut data = Vec::new();
    loop {
        let mut pdu = vec![0; COMMON_HEADER_BYTES];
        stream.read_exact(&mut pdu)?;
        let len = PduHeader::parse(&pdu).map_or(0, |header| header.len as usize);
        if !(SHORT_HEADER_BYTES..=RECEIVE_BYTES).contains(&len) {
            return Err(unexpected(&pdu));
        }
        pdu.resize(len, 0);
        stream.read_exact(&mut pdu[COMMON_HEADER_BYTES..])?;
        if pdu[0] == pdu_type::C2H_DATA {
            data.extend_from_slice(pdu.get(usize::from(pdu[3])..).unwrap_or_default());
        }
        if let TargetPdu::Ended(_) = parse(&pdu)? {
            let result = if pdu[0] == pdu_type::CAPSULE_RESP { u64_at(&pdu, 8) } else { 0 };
            return Ok((result, data));
        }
    }
}

/// A command of a queue, to block 0.
fn command(commands: NvmeCommands, blocks: u64, in_capsule: bool) -> [u8; SQE_BYTES] {
    let mut sqe = sqe(match commands.op {
        NvmeOp::Read => io_opcode::READ,
        NvmeOp::Write => io_opcode::WRITE,
        NvmeOp::Append => io_opcode::ZONE_APPEND,
    });
    put_pointer(&mut sqe, commands.len as u32, in_capsule);
    put_u32(&mut sqe, 48, (blocks - 1) as u32);
    sqe
}

/// A command to namespace 1.
fn sqe(opcode: u8) -> [u8; SQE_BYTES] {
    let mut sqe = [0; SQE_BYTES];
    (sqe[0], sqe[4]) = (opcode, 1);
    sqe
}

fn fabrics(kind: u8) -> [u8; SQE_BYTES] {
    let mut sqe = sqe(FABRICS_OPCODE);
    sqe[4] = kind;
    sqe
}

/// Sets the descriptor of the data: in the capsule, or in PDUs of their own.
fn put_pointer(sqe: &mut [u8; SQE_BYTES], len: u32, in_capsule: bool) {
    sqe[1] = 0x40;
    put_u32(sqe, 32, len);
    sqe[39] = if in_capsule { 0x01 } else { 0x5a };
}

/// A PDU up to its data, with the common header filled in.
fn header<const BYTES: usize>(kind: u8, header_bytes: usize, data_bytes: usize) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    (bytes[0], bytes[2]) = (kind, header_bytes as u8);
    if data_bytes > 0 {
        bytes[3] = header_bytes as u8;
    }
    put_u32(&mut bytes, 4, (header_bytes + data_bytes) as u32);
    bytes
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;

    use blockyard_core::{Disk, Op};
    use blockyard_nvme::{HostAccess, NQN_PREFIX, Subsystems, TargetOptions, TargetServer};
    use blockyard_yard::{stack, uri};

    use super::*;
    use crate::load::workers;
    use crate::sample::Round;
    use crate::stop::Stop;

    fn served(uri_text: &str) -> (Arc<dyn Disk>, TargetServer) {
        let disk = stack::open(&uri::parse(uri_text).unwrap()).unwrap().disk;
        let subsystems = Subsystems::new("test", HostAccess::default(), None);
        subsystems.add("d", Arc::clone(&disk)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = TargetServer::start(subsystems, vec![listener], TargetOptions::default());
        (disk, server.unwrap())
    }

    #[test]
    fn commands_are_kept_in_flight_and_counted() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        let nqn = format!("{NQN_PREFIX}d");
        for (uri, op, done, len) in [
            ("ram:///d?size=4M", NvmeOp::Read, Op::Read, 4096),
            ("ram:///d?size=4M", NvmeOp::Write, Op::Write, 4096),
            ("ram:///d?size=4M", NvmeOp::Write, Op::Write, 256 << 10),
            ("null:///d?size=1T&zoned=1&zone_size=1T", NvmeOp::Append, Op::ZoneAppend, 64 << 10),
        ] {
            let (disk, server) = served(uri);
            let controller = NvmeController::connect(server.local_addrs()[0], &nqn).unwrap();
            let commands = NvmeCommands { op, len, depth: 5 };
            let open = |number| controller.queue(number, commands, number.into()).unwrap();
            let mut queues = vec![open(1), open(2)];
            if op == NvmeOp::Append {
                queues[0].reset_zone().unwrap();
            }
            let outcome = workers::run(queues, &round, || ()).unwrap();
            assert!(outcome.ios > 0 && disk.stats().op(done).ops >= outcome.ios, "{op:?} {len}");
            assert!(outcome.workers.iter().all(|queue| !queue.latency().is_empty()));
        }
    }

    #[test]
    fn a_refusal_is_an_error() {
        let (_disk, server) = served("ram:///d?size=4M");
        let address = server.local_addrs()[0];
        let error = NvmeController::connect(address, "nqn.none").unwrap_err().to_string();
        assert!(error.contains("nqn.none") && error.contains("answered with"), "{error}");
        let nqn = format!("{NQN_PREFIX}d");
        let controller = NvmeController::connect(address, &nqn).unwrap();
        let commands = NvmeCommands { op: NvmeOp::Append, len: 4096, depth: 1 };
        let mut queue = controller.queue(1, commands, 1).unwrap();
        let error = queue.turn().unwrap_err().to_string();
        assert!(error.contains("answered with 4001h"), "{error}");
    }
}
