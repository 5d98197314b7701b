//! An initiator in plain style, for tests: it writes and reads PDUs byte by byte and shares no code
//! with the target.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub(crate) const HOST: &str =
    "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

/// A received PDU.
#[derive(Debug)]
pub(crate) struct Pdu {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) header: Vec<u8>,
    pub(crate) data: Vec<u8>,
}

/// A completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) cid: u16,
    /// The status field without the phase bit; 4000h is "do not retry".
    pub(crate) status: u16,
    pub(crate) result: u64,
    pub(crate) sq_head: u16,
    /// Data that came before it.
    pub(crate) data: Vec<u8>,
}

pub(crate) struct Initiator {
    pub(crate) stream: TcpStream,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    pub(crate) next_cid: u16,
}

/// CRC-32C, bit by bit.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

/// A command: opcode, namespace 1, and a range of blocks.
pub(crate) fn command(opcode: u8, slba: u64, blocks: u32) -> [u8; 64] {
    let mut sqe = [0; 64];
    sqe[0] = opcode;
    sqe[4] = 1;
    sqe[40..48].copy_from_slice(&slba.to_le_bytes());
    sqe[48..52].copy_from_slice(&blocks.saturating_sub(1).to_le_bytes());
    sqe
}

/// Sets a dword of a command.
pub(crate) fn with(mut sqe: [u8; 64], dword: usize, value: u32) -> [u8; 64] {
    sqe[4 * dword..4 * dword + 4].copy_from_slice(&value.to_le_bytes());
    sqe
}

/// A command of the admin queue.
pub(crate) fn admin_command(opcode: u8, dword10: u32, dword11: u32) -> [u8; 64] {
    let mut sqe = with(with([0; 64], 10, dword10), 11, dword11);
    sqe[0] = opcode;
    sqe
}

/// A fabrics command.
pub(crate) fn fabrics(kind: u8) -> [u8; 64] {
    let mut sqe = [0; 64];
    sqe[0] = 0x7f;
    sqe[4] = kind;
    sqe
}

impl Initiator {
    /// A connection that has sent nothing.
    pub(crate) fn connect_to(address: SocketAddr) -> Initiator {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Initiator { stream, header_digest: false, data_digest: false, next_cid: 0 }
    }

    /// Enables the controller of an admin queue: not before the queues of an earlier controller
    /// have ended.
    pub(crate) fn enable(&mut self) {
        assert_eq!(self.property_set(0x14, 0x46_0061).status, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.property_get(0x1c, false).result != 1 {
            assert!(Instant::now() < deadline, "it gets ready");
            self.next_cid &= 0x3fff;
            std::thread::yield_now();
        }
    }

    pub(crate) fn initialize(&mut self, digests: u8) {
        let mut pdu = [0; 128];
        pdu[2] = 128;
        pdu[4] = 128;
        pdu[11] = digests;
        self.stream.write_all(&pdu).unwrap();
        let mut answer = [0; 128];
        self.stream.read_exact(&mut answer).unwrap();
        assert_eq!((answer[0], answer[2], answer[4]), (1, 128, 128));
        assert_eq!(answer[10..12], [0, digests], "CPDA 0, and the digests that were asked for");
        self.header_digest = digests & 1 != 0;
        self.data_digest = digests & 2 != 0;
    }

    /// Sends a PDU with good digests.
    pub(crate) fn send(&mut self, kind: u8, header: &[u8], data: &[u8]) {
        let bytes = self.print(kind, header, data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// The bytes of a PDU; `header` is what follows the common header.
    pub(crate) fn print(&self, kind: u8, header: &[u8], data: &[u8]) -> Vec<u8> {
        let (mut flags, header_len) = (0, 8 + header.len());
        let mut data_at = header_len;
        if self.header_digest {
            flags |= 1;
            data_at += 4;
        }
        let has_data_digest = self.data_digest && !data.is_empty();
        flags |= u8::from(has_data_digest) << 1;
        let len = data_at + data.len() + if has_data_digest { 4 } else { 0 };
        let offset = if data.is_empty() { 0 } else { data_at as u8 };
        let mut bytes = vec![kind, flags, header_len as u8, offset];
        bytes.extend_from_slice(&(len as u32).to_le_bytes());
        bytes.extend_from_slice(header);
        if self.header_digest {
            bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
        }
        bytes.extend_from_slice(data);
        if has_data_digest {
            bytes.extend_from_slice(&crc32c(data).to_le_bytes());
        }
        bytes
    }

    /// The next PDU, whose digests are checked; `None` at the end of the stream.
    pub(crate) fn receive(&mut self) -> Option<Pdu> {
        let mut bytes = vec![0; 8];
        if let Err(error) = self.stream.read_exact(&mut bytes) {
            let gone = [std::io::ErrorKind::UnexpectedEof, std::io::ErrorKind::ConnectionReset];
            assert!(gone.contains(&error.kind()), "{error}");
            return None;
        }
        let (kind, flags, header_len) = (bytes[0], bytes[1], usize::from(bytes[2]));
        let len = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
        bytes.resize(len, 0);
        self.stream.read_exact(&mut bytes[8..]).unwrap();
        let header = bytes[..header_len].to_vec();
        if kind == 3 {
            assert_eq!(flags, 0, "a TermReq has no digest");
            return Some(Pdu { kind, flags, header, data: bytes[header_len..].to_vec() });
        }
        assert_eq!(header_len, 24, "Linux knows no other header");
        assert_eq!(flags & 1 != 0, self.header_digest);
        let mut data_at = header_len;
        if self.header_digest {
            assert_eq!(bytes[24..28], crc32c(&header).to_le_bytes(), "header digest");
            data_at += 4;
        }
        let mut data = bytes[data_at..].to_vec();
        if kind == 7 {
            assert_eq!(usize::from(bytes[3]), data_at, "Linux does not read PDO");
            assert_eq!(flags & 2 != 0, self.data_digest);
            if self.data_digest {
                let digest = data.split_off(data.len() - 4);
                assert_eq!(digest, crc32c(&data).to_le_bytes(), "data digest");
            }
        }
        Some(Pdu { kind, flags, header, data })
    }

    /// The completion of a command, and the data before it.
    pub(crate) fn done(&mut self) -> Done {
        let mut data = Vec::new();
        loop {
            let pdu = self.receive().expect("an answer");
            let word = |at: usize| u16::from_le_bytes([pdu.header[at], pdu.header[at + 1]]);
            match pdu.kind {
                5 => {
                    let result = u64::from_le_bytes(pdu.header[8..16].try_into().unwrap());
                    assert_eq!(word(22) & 1, 0, "the phase bit");
                    let (cid, status, sq_head) = (word(20), word(22) >> 1, word(16));
                    return Done { cid, status, result, sq_head, data };
                }
                7 => {
                    let offset = u32::from_le_bytes(pdu.header[12..16].try_into().unwrap());
                    assert_eq!(offset as usize, data.len());
                    data.extend_from_slice(&pdu.data);
                    if pdu.flags & 8 != 0 {
                        assert_eq!(pdu.flags & 4, 4, "SUCCESS comes with LAST only");
                        return Done { cid: word(8), status: 0, result: 0, sq_head: 0, data };
                    }
                }
                kind => panic!("a PDU of type {kind}: {pdu:?}"),
            }
        }
    }

    /// Sends a command capsule; returns its command id.
    pub(crate) fn capsule(&mut self, mut sqe: [u8; 64], in_capsule: &[u8]) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        self.send(4, &sqe, in_capsule);
        cid
    }

    /// A command without data, or with data in its capsule.
    pub(crate) fn execute(&mut self, sqe: [u8; 64], in_capsule: &[u8]) -> Done {
        let cid = self.capsule(pointed(sqe, 0x01, in_capsule.len()), in_capsule);
        let done = self.done();
        assert_eq!(done.cid, cid);
        done
    }

    /// A command with data to the host.
    pub(crate) fn read(&mut self, sqe: [u8; 64], len: usize) -> Done {
        let cid = self.capsule(pointed(sqe, 0x5a, len), &[]);
        let done = self.done();
        assert_eq!(done.cid, cid);
        assert!(done.status != 0 || done.data.len() == len, "short data");
        done
    }

    /// A command whose data the target asks for.
    pub(crate) fn write(&mut self, sqe: [u8; 64], data: &[u8]) -> Done {
        let cid = self.capsule(pointed(sqe, 0x5a, data.len()), &[]);
        let r2t = self.receive().unwrap();
        assert_eq!((r2t.kind, &r2t.header[8..10]), (9, &cid.to_le_bytes()[..]), "{r2t:?}");
        let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
        assert_eq!(r2t.header[12..16], [0; 4]);
        assert_eq!(r2t.header[16..20], (data.len() as u32).to_le_bytes());
        let mut offset = 0;
        for part in data.chunks(128 << 10) {
            self.h2c_data(cid, tag, offset, part);
            offset += part.len() as u32;
        }
        let done = self.done();
        assert_eq!(done.cid, cid);
        done
    }

    pub(crate) fn h2c_data(&mut self, cid: u16, tag: u16, offset: u32, data: &[u8]) {
        self.send(6, &h2c_header(cid, tag, offset, data.len() as u32), data);
    }

    pub(crate) fn connect(
        &mut self,
        nqn: &str,
        queue: u16,
        controller: u16,
        size: u16,
        flags: u8,
    ) -> Done {
        let (sqe, data) = connect_parts(nqn, queue, controller, size, flags);
        self.execute(sqe, &data)
    }

    pub(crate) fn property_get(&mut self, offset: u32, long: bool) -> Done {
        let mut sqe = with(fabrics(4), 11, offset);
        sqe[40] = u8::from(long);
        self.execute(sqe, &[])
    }

    pub(crate) fn property_set(&mut self, offset: u32, value: u32) -> Done {
        self.execute(with(with(fabrics(0), 11, offset), 12, value), &[])
    }

    /// Reads the beginning of a log page. `retain` is RAE.
    pub(crate) fn log(&mut self, id: u8, bytes: u32, retain: bool) -> Done {
        let dword = u32::from(id) | u32::from(retain) << 15 | (bytes / 4 - 1) << 16;
        self.read(admin_command(2, dword, 0), bytes as usize)
    }

    pub(crate) fn identify(&mut self, cns: u8, nsid: u32, set: u8) -> Done {
        let sqe = with(with([0; 64], 10, cns.into()), 11, u32::from(set) << 24);
        let mut sqe = with(sqe, 1, nsid);
        sqe[0] = 6;
        self.read(sqe, 4096)
    }

    /// The status and information of a TermReq, after which the connection ends.
    pub(crate) fn term(&mut self) -> (u16, u32) {
        let pdu = self.receive().expect("a TermReq");
        assert_eq!(pdu.kind, 3, "{pdu:?}");
        let status = u16::from_le_bytes([pdu.header[8], pdu.header[9]]);
        let info = u32::from_le_bytes(pdu.header[10..14].try_into().unwrap());
        self.ends();
        (status, info)
    }

    pub(crate) fn ends(&mut self) {
        assert!(self.receive().is_none(), "the connection ends");
    }
}

/// A command with a data pointer.
pub(crate) fn pointed(mut sqe: [u8; 64], kind: u8, len: usize) -> [u8; 64] {
    sqe[1] = 0x40;
    sqe[32..36].copy_from_slice(&(len as u32).to_le_bytes());
    sqe[39] = kind;
    sqe
}

pub(crate) fn h2c_header(cid: u16, tag: u16, offset: u32, len: u32) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend_from_slice(&cid.to_le_bytes());
    header.extend_from_slice(&tag.to_le_bytes());
    header.extend_from_slice(&offset.to_le_bytes());
    header.extend_from_slice(&len.to_le_bytes());
    header.extend_from_slice(&[0; 4]);
    header
}

pub(crate) fn connect_parts(
    nqn: &str,
    queue: u16,
    controller: u16,
    size: u16,
    flags: u8,
) -> ([u8; 64], Vec<u8>) {
    let mut sqe = fabrics(1);
    sqe[42..44].copy_from_slice(&queue.to_le_bytes());
    sqe[44..46].copy_from_slice(&size.to_le_bytes());
    sqe[46] = flags;
    let mut data = vec![0; 1024];
    data[..16].fill(7);
    data[16..18].copy_from_slice(&controller.to_le_bytes());
    data[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
    data[512..512 + HOST.len()].copy_from_slice(HOST.as_bytes());
    (sqe, data)
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ at as u8 ^ seed).collect()
}
