//! The host of the model: it sends commands, checks the PDUs and the data of their answers, and
//! knows which of them have to come.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;

use super::{BLOCK, BLOCKS, HOST, NQN};

/// The id of the commands of a host that sends without a pause.
pub(super) const ENDLESS: u16 = u16::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostOp {
    Connect,
    Property,
    Read,
    Write,
    Discard,
    Flush,
    /// A command that the target refuses.
    Invalid,
}

/// Whether a read has FUA, so that a flush follows.
fn is_durable(first: u64) -> bool {
    first.is_multiple_of(4)
}

#[derive(Clone, Debug)]
pub(super) struct HostCommand {
    pub(super) op: HostOp,
    pub(super) first: u64,
    pub(super) blocks: u64,
    /// The data of a write.
    pub(super) data: Vec<u8>,
    /// Whether an R2T has to come, or has come.
    pub(super) awaits_r2t: bool,
    /// The data of a read that have come.
    pub(super) received: Vec<u8>,
}

/// A host with one connection.
pub(super) struct Host {
    /// Bytes that are not in the stream yet.
    pub(super) unsent: VecDeque<u8>,
    pub(super) received: Vec<u8>,
    pub(super) commands: BTreeMap<u16, HostCommand>,
    /// Those of them that the target has received before an end, and has to answer.
    pub(super) owed: BTreeSet<u16>,
    pub(super) next_cid: u16,
    pub(super) is_initialized: bool,
    /// The end of the connection was announced by a TermReq.
    pub(super) has_term: bool,
    pub(super) flow_control: bool,
    /// Whether a command of several operations may be answered by "aborted" (007h).
    pub(super) is_ending: bool,
    /// The results of commands that have ended.
    pub(super) results: Vec<u64>,
}

impl Host {
    pub(super) fn new(flow_control: bool) -> Host {
        let mut request = [0; 128];
        (request[2], request[4]) = (128, 128);
        Host {
            unsent: request.into(),
            received: Vec::new(),
            commands: BTreeMap::new(),
            owed: BTreeSet::new(),
            next_cid: 0,
            is_initialized: false,
            has_term: false,
            flow_control,
            is_ending: false,
            results: Vec::new(),
        }
    }

    pub(super) fn pdu(&mut self, kind: u8, header: &[u8], data: &[u8]) {
        let (len, at) = (8 + header.len() + data.len(), 8 + header.len());
        let offset = if data.is_empty() { 0 } else { at as u8 };
        self.unsent.extend([kind, 0, at as u8, offset]);
        self.unsent.extend((len as u32).to_le_bytes());
        self.unsent.extend(header);
        self.unsent.extend(data);
    }

    /// Sends a command. `sgl` is the kind of the data pointer, if there are data.
    pub(super) fn send(
        &mut self,
        mut sqe: [u8; 64],
        sgl: Option<(u8, usize)>,
        command: HostCommand,
    ) {
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

    pub(super) fn plain(op: HostOp) -> HostCommand {
        let (first, blocks, data, received) = (0, 0, Vec::new(), Vec::new());
        HostCommand { op, first, blocks, data, awaits_r2t: false, received }
    }

    pub(super) fn connect(&mut self, queue: u16, controller: u16, keep_alive_ms: u32) {
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

    pub(super) fn set_config(&mut self, value: u32) {
        let mut sqe = [0; 64];
        sqe[0] = 0x7f;
        sqe[44..48].copy_from_slice(&0x14_u32.to_le_bytes());
        sqe[48..52].copy_from_slice(&value.to_le_bytes());
        self.send(sqe, None, Host::plain(HostOp::Property));
    }

    /// Sends a command without data.
    pub(super) fn send_plain(&mut self, op: HostOp) {
        let mut sqe = [0; 64];
        (sqe[0], sqe[4]) = (if op == HostOp::Invalid { 0x7c } else { 0 }, 1);
        if self.commands.len() < 31 {
            self.send(sqe, None, Host::plain(op));
        }
    }

    /// Sends an I/O command that overlaps none in flight.
    pub(super) fn random_command(&mut self, rng: &mut Rng, expected: &[u8]) {
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
                sqe[51] = if is_durable(first) { 0x40 } else { 0 };
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
    pub(super) fn take(&mut self, expected: &mut [u8], rng: &mut Rng) {
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
    pub(super) fn send_data(&mut self, cid: u16, tag: u16, len: usize, rng: &mut Rng) {
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

    pub(super) fn complete(&mut self, cid: u16, status: u16, result: u64, expected: &mut [u8]) {
        if cid == ENDLESS {
            return assert_ne!(status, 0);
        }
        self.owed.remove(&cid);
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
            HostOp::Read if is_durable(command.first) && self.is_ending && status & 0x7ff == 7 => {}
            _ if status != 0 => panic!("{:?} fails with {status:#x}", command.op),
            HostOp::Read => assert!(command.received == command.data, "other data"),
            HostOp::Write => expected[range].copy_from_slice(&command.data),
            HostOp::Discard => expected[range].fill(0),
            HostOp::Flush => {}
        }
    }
}
