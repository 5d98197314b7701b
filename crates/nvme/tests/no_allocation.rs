//! After its Connect, the thread of an I/O queue allocates nothing for reads and writes: counted by
//! the allocator itself, over a real socket.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use std::io::{Read, Write};

use blockyard_testing::allocations::Counting;
use initiator::{HOST, Initiator, PLAIN, command, crc32c, h2c_header, pattern, pointed, target};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const DEPTH: u16 = 32;
const ROUNDS: u64 = 320;
const SHORT_BYTES: usize = 4096;
const LONG_BYTES: usize = 16384;

/// What a host sends, printed before anything is counted.
struct Printed {
    /// The capsules of a round: reads of both lengths, writes in capsules and by R2T.
    capsules: Vec<u8>,
    /// The data of a write by R2T, whose tag and command id are still to be filled in.
    data: Vec<u8>,
    /// The blocks of a long read or write.
    long: Vec<u8>,
}

fn print(io: &Initiator) -> Printed {
    let (long, mut capsules) = (pattern(LONG_BYTES, 7), Vec::new());
    for cid in 0..DEPTH {
        // Each command has blocks of its own, those of the reads being written in advance.
        let slba = u64::from(cid) * 32;
        let (opcode, kind, len) = match cid % 4 {
            0 => (READ, 0x5a, LONG_BYTES),
            1 => (READ, 0x5a, SHORT_BYTES),
            2 => (WRITE, 0x5a, LONG_BYTES),
            _ => (WRITE, 0x01, SHORT_BYTES),
        };
        let mut sqe = pointed(command(opcode, slba, len as u32 / 512), kind, len);
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        let in_capsule = if kind == 0x01 { &long[..len] } else { &[] };
        capsules.extend_from_slice(&io.print(4, &sqe, in_capsule));
    }
    let data = io.print(6, &h2c_header(0, 0, 0, LONG_BYTES as u32), &long);
    Printed { capsules, data, long }
}

/// Executes the commands of a round, without an allocation.
fn execute(io: &mut Initiator, printed: &mut Printed, buffer: &mut [u8]) {
    let digest_bytes = if io.header_digest { 4 } else { 0 };
    io.stream.write_all(&printed.capsules).unwrap();
    let mut left = DEPTH;
    while left > 0 {
        io.stream.read_exact(&mut buffer[..8]).unwrap();
        let len = u32::from_le_bytes(buffer[4..8].try_into().unwrap()) as usize;
        io.stream.read_exact(&mut buffer[8..len]).unwrap();
        match buffer[0] {
            5 => {
                assert_eq!(buffer[22..24], [0, 0], "the status");
                left -= 1;
            }
            7 => {
                let at = 24 + digest_bytes;
                let len = u32::from_le_bytes(buffer[16..20].try_into().unwrap()) as usize;
                assert!(buffer[at..at + len] == printed.long[..len], "other data");
                // SUCCESS: without a completion.
                left -= u16::from(buffer[1] >> 3 & 1);
            }
            9 => {
                // The command id and the tag.
                printed.data[8..12].copy_from_slice(&buffer[8..12]);
                if io.header_digest {
                    let digest = crc32c(&printed.data[..24]);
                    printed.data[24..28].copy_from_slice(&digest.to_le_bytes());
                }
                io.stream.write_all(&printed.data).unwrap();
            }
            kind => panic!("a PDU of type {kind}"),
        }
    }
}

#[test]
fn reads_and_writes_after_the_connect_allocate_nothing() {
    let mut buffer = vec![0; 2 * LONG_BYTES];
    // Without digests and with them, and with and without flow control.
    for (digests, flags) in [(0, 0), (3, 0), (0, 4)] {
        let target = target();
        let (_admin, controller) = target.admin(PLAIN, digests);
        let mut io = target.io(PLAIN, controller, digests, flags);
        for cid in 0..u64::from(DEPTH) {
            let sqe = command(WRITE, cid * 32, LONG_BYTES as u32 / 512);
            assert_eq!(io.write(sqe, &pattern(LONG_BYTES, 7)).status, 0);
        }
        let mut printed = print(&io);
        execute(&mut io, &mut printed, &mut buffer);
        let before = Counting::made_by_all();
        for _ in 0..ROUNDS {
            execute(&mut io, &mut printed, &mut buffer);
        }
        let made = Counting::made_by_all() - before;
        assert_eq!(made, 0, "digests {digests}, flags {flags}");
        let links = target.server.connections();
        let queue = links.iter().find(|link| link.queue == Some(1)).unwrap();
        assert!(queue.commands > ROUNDS * u64::from(DEPTH), "{queue:?}");
        assert_eq!((queue.host.as_deref(), queue.errors), (Some(HOST), 0));
    }
}
