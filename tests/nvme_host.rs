//! A host of NVMe/TCP that connects again when it is disconnected, as Linux does.

#[allow(dead_code)] // Tests of another crate use the rest.
#[path = "../crates/nvme/tests/initiator/host.rs"]
mod host;
#[allow(dead_code)] // As above.
#[path = "../crates/nvme/tests/initiator/secret.rs"]
mod secret;

use std::io::Write;
use std::net::SocketAddr;

use host::{Initiator, command, connect_parts, pattern, pointed, with};
use secret::{Knowledge, LONG, SECRET, authenticate, connect_as};

pub(crate) use host::HOST;

/// The length of a block of all devices.
const BLOCK_BYTES: usize = 4096;
const WRITE: u8 = 1;
const READ: u8 = 2;
/// The status of a Connect while queues of the host's controller before are ending.
const BUSY: u16 = 0x181;

/// The text of a file with the secrets of [`HOST`] and of its controllers.
pub(crate) fn secrets() -> String {
    format!("{HOST} {SECRET} {LONG}\n")
}

/// What a host remembers of a subsystem. Linux refuses namespaces that have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remembered {
    /// The serial number and the NQN of the subsystem.
    controller: (Vec<u8>, Vec<u8>),
    /// The numbers of the namespaces, each with its identifiers.
    pub(crate) namespaces: Vec<(u32, Vec<u8>)>,
}

/// A host with an admin queue and an I/O queue.
pub(crate) struct NvmeHost {
    address: SocketAddr,
    nqn: &'static str,
    authenticates: bool,
    admin: Initiator,
    io: Initiator,
    pub(crate) remembered: Remembered,
    pub(crate) reconnects: u64,
}

impl NvmeHost {
    /// Connects to a subsystem at an address, and finds its namespaces.
    pub(crate) fn connect(address: SocketAddr, nqn: &'static str, authenticates: bool) -> NvmeHost {
        let (mut admin, controller) = queue(address, nqn, authenticates, (0, 0xffff));
        admin.enable();
        let (io, _) = queue(address, nqn, authenticates, (1, controller));
        let remembered = remembered(&mut admin);
        NvmeHost { address, nqn, authenticates, admin, io, remembered, reconnects: 0 }
    }

    /// Connects again. The subsystem and its namespaces are what they were.
    pub(crate) fn reconnect(&mut self) {
        let NvmeHost { address, nqn, authenticates, reconnects, .. } = *self;
        // First: the server would wait for the host to close them.
        for queue in [&self.io, &self.admin] {
            // It may be closed already.
            let _ = queue.stream.shutdown(std::net::Shutdown::Both);
        }
        let host = NvmeHost::connect(address, nqn, authenticates);
        assert_eq!(host.remembered, self.remembered);
        *self = NvmeHost { reconnects: reconnects + 1, ..host };
    }

    /// Finds the namespaces again.
    pub(crate) fn scan(&mut self) {
        self.remembered = remembered(&mut self.admin);
    }

    /// Writes a block; connects again, and writes again, if it is disconnected.
    pub(crate) fn write(&mut self, nsid: u32, block: u64, seed: u8) {
        let data = pattern(BLOCK_BYTES, seed);
        let sqe = pointed(with(command(WRITE, block, 1), 1, nsid), 0x01, BLOCK_BYTES);
        while self.try_execute(sqe, &data).is_none() {
            self.reconnect();
        }
    }

    /// Reads a block and compares it; connects again, and reads again, if it is disconnected.
    pub(crate) fn verify(&mut self, nsid: u32, block: u64, seed: u8) {
        let sqe = pointed(with(command(READ, block, 1), 1, nsid), 0x5a, BLOCK_BYTES);
        let data = loop {
            match self.try_execute(sqe, &[]) {
                Some(data) => break data,
                None => self.reconnect(),
            }
        };
        assert!(data == pattern(BLOCK_BYTES, seed), "other data in block {block} of {nsid}");
    }

    /// Executes a command that succeeds; returns the data, or `None` if it is disconnected.
    fn try_execute(&mut self, mut sqe: [u8; 64], in_capsule: &[u8]) -> Option<Vec<u8>> {
        let cid = self.io.next_cid & 0x3fff;
        self.io.next_cid = cid + 1;
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        let bytes = self.io.print(4, &sqe, in_capsule);
        self.io.stream.write_all(&bytes).ok()?;
        let mut data = Vec::new();
        loop {
            let pdu = self.io.receive()?;
            let word = |at: usize| u16::from_le_bytes([pdu.header[at], pdu.header[at + 1]]);
            match pdu.kind {
                5 => {
                    assert_eq!((word(20), word(22) >> 1), (cid, 0), "{pdu:?}");
                    return Some(data);
                }
                7 => {
                    data.extend_from_slice(&pdu.data);
                    if pdu.flags & 8 != 0 {
                        return Some(data);
                    }
                }
                kind => panic!("a PDU of type {kind}: {pdu:?}"),
            }
        }
    }
}

/// A connected queue, and its controller.
fn queue(
    address: SocketAddr,
    nqn: &'static str,
    authenticates: bool,
    (number, controller): (u16, u16),
) -> (Initiator, u16) {
    let mut queue = Initiator::connect_to(address);
    queue.initialize(0);
    let connect = |queue: &mut Initiator| {
        connect_as(queue, connect_parts(nqn, number, controller, 31, 0), HOST)
    };
    let mut done = connect(&mut queue);
    while done.status == BUSY {
        std::thread::yield_now();
        done = connect(&mut queue);
    }
    let asks = if authenticates { 2 } else { 0 };
    assert_eq!((done.status, done.result >> 16), (0, asks), "{done:?}");
    if authenticates {
        let known =
            Knowledge { subsystem: nqn, host: HOST, secret: SECRET, controller: Some(LONG) };
        assert_eq!(authenticate(&mut queue, known), Ok(()));
    }
    (queue, done.result as u16)
}

fn remembered(admin: &mut Initiator) -> Remembered {
    let controller = admin.identify(1, 0, 0).data;
    let active = admin.identify(2, 0, 0).data;
    let numbers = active.chunks(4).map(|nsid| u32::from_le_bytes(nsid.try_into().unwrap()));
    let numbers: Vec<_> = numbers.take_while(|nsid| *nsid > 0).collect();
    let namespaces = numbers.iter().map(|nsid| (*nsid, admin.identify(3, *nsid, 0).data)).collect();
    Remembered {
        controller: (controller[4..24].to_vec(), controller[768..1024].to_vec()),
        namespaces,
    }
}
