//! Commands and completions: the submission queue entry, the completion queue entry, and status
//! codes (NVM Express Base Specification 2.0, sections 3.3.3 and 4.1).

use std::fmt;

use blockyard_core::{Op, Status};

use crate::wire::{u16_at, u32_at, u64_at};

/// The bytes of a submission queue entry.
pub const SQE_BYTES: usize = 64;
/// The namespace id that stands for all namespaces.
pub const NSID_ALL: u32 = 0xffff_ffff;

/// Opcodes of the admin queue.
pub mod admin_opcode {
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: u8 = 0x0c;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
}

/// Opcodes of I/O queues: the NVM command set, and the zoned one from 79h on.
pub mod io_opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
    /// Zone Management Send.
    pub const ZONE_SEND: u8 = 0x79;
    /// Zone Management Receive.
    pub const ZONE_RECEIVE: u8 = 0x7a;
    /// Zone Append.
    pub const ZONE_APPEND: u8 = 0x7d;
}

/// The opcode of all fabrics commands, on every queue.
pub const FABRICS_OPCODE: u8 = 0x7f;

/// Types of fabrics commands (FCTYPE).
pub mod fabrics_type {
    /// Property Set.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Connect.
    pub const CONNECT: u8 = 0x01;
    /// Property Get.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Authentication Send.
    pub const AUTH_SEND: u8 = 0x05;
    /// Authentication Receive.
    pub const AUTH_RECEIVE: u8 = 0x06;
}

/// A submission queue entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sqe([u8; SQE_BYTES]);

impl Sqe {
    /// An entry of zeros.
    pub const ZERO: Sqe = Sqe([0; SQE_BYTES]);

    /// The entry in the first [`SQE_BYTES`]; `None` if there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<Sqe> {
        Some(Sqe(*bytes.first_chunk()?))
    }

    /// The opcode.
    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    /// Whether the command is a part of a fused operation.
    pub fn is_fused(&self) -> bool {
        self.0[1] & 3 != 0
    }

    /// The command id.
    pub fn cid(&self) -> u16 {
        u16_at(&self.0, 2)
    }

    /// The type of a fabrics command.
    pub fn fabrics_type(&self) -> u8 {
        self.0[4]
    }

    /// The namespace id.
    pub fn nsid(&self) -> u32 {
        u32_at(&self.0, 4)
    }

    /// A dword of the command, by its number, 10 to 15.
    pub fn dword(&self, number: usize) -> u32 {
        u32_at(&self.0, 4 * number)
    }

    /// Dwords 10 and 11: the first logical block.
    pub fn slba(&self) -> u64 {
        u64_at(&self.0, 40)
    }

    /// The bytes of the entry.
    pub fn bytes(&self) -> &[u8; SQE_BYTES] {
        &self.0
    }

    /// Where the command's data are.
    ///
    /// # Errors
    /// If the descriptor is of a kind that NVMe/TCP does not have.
    pub fn data(&self) -> Result<DataPointer, StatusCode> {
        if self.0[1] >> 6 != 1 {
            return Err(StatusCode::INVALID_FIELD);
        }
        let (address, len) = (u64_at(&self.0, 24), u32_at(&self.0, 32));
        match self.0[39] {
            0x5a => Ok(DataPointer { in_capsule: false, len }),
            0x01 if address == 0 => Ok(DataPointer { in_capsule: true, len }),
            0x01 => Err(StatusCode::SGL_OFFSET_INVALID),
            _ => Err(StatusCode::SGL_TYPE_INVALID),
        }
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sqe(opcode {:02x}h, cid {})", self.opcode(), self.cid())
    }
}

/// The place and length of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPointer {
    /// Whether the data are in the command capsule; else they come by H2CData or C2HData PDUs.
    pub in_capsule: bool,
    /// The bytes.
    pub len: u32,
}

/// The status of a completion: code, type and the do-not-retry bit, as in the completion without
/// the phase bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StatusCode(pub u16);

/// The bit by which a completion tells the host not to retry.
const DO_NOT_RETRY: u16 = 1 << 14;

impl StatusCode {
    /// Success.
    pub const OK: StatusCode = StatusCode(0);
    /// Invalid Command Opcode.
    pub const INVALID_OPCODE: StatusCode = StatusCode(0x001 | DO_NOT_RETRY);
    /// Invalid Field in Command.
    pub const INVALID_FIELD: StatusCode = StatusCode(0x002 | DO_NOT_RETRY);
    /// Internal Error.
    pub const INTERNAL: StatusCode = StatusCode(0x006 | DO_NOT_RETRY);
    /// Command Abort Requested.
    pub const ABORTED: StatusCode = StatusCode(0x007);
    /// Invalid Namespace or Format.
    pub const INVALID_NAMESPACE: StatusCode = StatusCode(0x00b | DO_NOT_RETRY);
    /// Command Sequence Error.
    pub const SEQUENCE: StatusCode = StatusCode(0x00c | DO_NOT_RETRY);
    /// Data SGL Length Invalid.
    pub const SGL_LENGTH_INVALID: StatusCode = StatusCode(0x00f | DO_NOT_RETRY);
    /// SGL Descriptor Type Invalid.
    pub const SGL_TYPE_INVALID: StatusCode = StatusCode(0x011 | DO_NOT_RETRY);
    /// SGL Offset Invalid.
    pub const SGL_OFFSET_INVALID: StatusCode = StatusCode(0x016 | DO_NOT_RETRY);
    /// Command Interrupted: the host may retry.
    pub const INTERRUPTED: StatusCode = StatusCode(0x021);
    /// Transient Transport Error: the host may retry.
    pub const TRANSIENT: StatusCode = StatusCode(0x022);
    /// LBA Out of Range.
    pub const LBA_RANGE: StatusCode = StatusCode(0x080 | DO_NOT_RETRY);
    /// Capacity Exceeded.
    pub const CAPACITY: StatusCode = StatusCode(0x081 | DO_NOT_RETRY);
    /// Namespace Not Ready.
    pub const NOT_READY: StatusCode = StatusCode(0x082 | DO_NOT_RETRY);
    /// Reservation Conflict.
    pub const RESERVATION: StatusCode = StatusCode(0x083 | DO_NOT_RETRY);
    /// Asynchronous Event Request Limit Exceeded.
    pub const EVENT_LIMIT: StatusCode = StatusCode(0x105 | DO_NOT_RETRY);
    /// Invalid Log Page.
    pub const INVALID_LOG: StatusCode = StatusCode(0x109 | DO_NOT_RETRY);
    /// Feature Identifier Not Saveable.
    pub const NOT_SAVEABLE: StatusCode = StatusCode(0x10d | DO_NOT_RETRY);
    /// Feature Not Changeable.
    pub const NOT_CHANGEABLE: StatusCode = StatusCode(0x10e | DO_NOT_RETRY);
    /// Connect: Incompatible Format.
    pub const CONNECT_FORMAT: StatusCode = StatusCode(0x180 | DO_NOT_RETRY);
    /// Connect: Controller Busy; the host may retry.
    pub const CONNECT_BUSY: StatusCode = StatusCode(0x181);
    /// Connect: Invalid Parameters.
    pub const CONNECT_INVALID: StatusCode = StatusCode(0x182 | DO_NOT_RETRY);
    /// Connect: Invalid Host.
    pub const CONNECT_INVALID_HOST: StatusCode = StatusCode(0x184 | DO_NOT_RETRY);
    /// Attempted Write to Read Only Range.
    pub const READ_ONLY: StatusCode = StatusCode(0x182 | DO_NOT_RETRY);
    /// Authentication Required.
    pub const AUTH_REQUIRED: StatusCode = StatusCode(0x191 | DO_NOT_RETRY);
    /// Zone Boundary Error.
    pub const ZONE_BOUNDARY: StatusCode = StatusCode(0x1b8 | DO_NOT_RETRY);
    /// Zone Is Full.
    pub const ZONE_FULL: StatusCode = StatusCode(0x1b9 | DO_NOT_RETRY);
    /// Zone Is Read Only.
    pub const ZONE_READ_ONLY: StatusCode = StatusCode(0x1ba | DO_NOT_RETRY);
    /// Zone Is Offline.
    pub const ZONE_OFFLINE: StatusCode = StatusCode(0x1bb | DO_NOT_RETRY);
    /// Zone Invalid Write.
    pub const ZONE_INVALID_WRITE: StatusCode = StatusCode(0x1bc | DO_NOT_RETRY);
    /// Too Many Active Zones.
    pub const ZONE_TOO_MANY_ACTIVE: StatusCode = StatusCode(0x1bd | DO_NOT_RETRY);
    /// Too Many Open Zones.
    pub const ZONE_TOO_MANY_OPEN: StatusCode = StatusCode(0x1be | DO_NOT_RETRY);
    /// Invalid Zone State Transition.
    pub const ZONE_TRANSITION: StatusCode = StatusCode(0x1bf | DO_NOT_RETRY);
    /// Write Fault.
    pub const WRITE_FAULT: StatusCode = StatusCode(0x280 | DO_NOT_RETRY);
    /// Unrecovered Read Error.
    pub const READ_ERROR: StatusCode = StatusCode(0x281 | DO_NOT_RETRY);
    /// End-to-end Guard Check Error.
    pub const GUARD: StatusCode = StatusCode(0x282 | DO_NOT_RETRY);
    /// Compare Failure.
    pub const COMPARE_FAILURE: StatusCode = StatusCode(0x285 | DO_NOT_RETRY);

    /// Whether the command has succeeded.
    pub fn is_ok(self) -> bool {
        self == StatusCode::OK
    }

    /// The completion status of a bio. Linux makes a `blk_status_t` of it again: the same one,
    /// except that `INVAL` becomes `NOTSUPP`; `RESOURCE`, `AGAIN` and `DEV_RESOURCE` become
    /// `TARGET` when the host has retried often enough; and those for which NVMe has no code become
    /// `IOERR`.
    pub fn of(status: Status, op: Op) -> StatusCode {
        match status {
            Status::Ok => StatusCode::OK,
            Status::NotSupp => StatusCode::INVALID_OPCODE,
            Status::NoSpc => StatusCode::CAPACITY,
            Status::Target => StatusCode::NOT_READY,
            Status::ResvConflict => StatusCode::RESERVATION,
            Status::Medium if op.is_write() => StatusCode::WRITE_FAULT,
            Status::Medium => StatusCode::READ_ERROR,
            Status::Protection => StatusCode::GUARD,
            Status::Resource | Status::Again | Status::DevResource => StatusCode::INTERRUPTED,
            Status::ZoneOpenResource => StatusCode::ZONE_TOO_MANY_OPEN,
            Status::ZoneActiveResource => StatusCode::ZONE_TOO_MANY_ACTIVE,
            Status::Inval => StatusCode::INVALID_FIELD,
            Status::Timeout
            | Status::Transport
            | Status::IoErr
            | Status::Offline
            | Status::DurationLimit => StatusCode::INTERNAL,
        }
    }
}

impl fmt::Debug for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let retry = if self.0 & DO_NOT_RETRY != 0 { "" } else { ", may be retried" };
        write!(f, "StatusCode({:03x}h{retry})", self.0 & !DO_NOT_RETRY)
    }
}

/// A completion queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// Dwords 0 and 1: the command's result.
    pub result: u64,
    /// The head of the submission queue.
    pub sq_head: u16,
    /// The command id.
    pub cid: u16,
    /// The status.
    pub status: StatusCode,
}

impl Cqe {
    /// The 16 bytes of the entry. The phase bit is 0, as fabrics have it.
    pub fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.result.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.sq_head.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.cid.to_le_bytes());
        bytes[14..].copy_from_slice(&(self.status.0 << 1).to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sqe(flags: u8, address: u64, len: u32, kind: u8) -> Sqe {
        let mut bytes = [0; SQE_BYTES];
        bytes[1] = flags;
        bytes[24..32].copy_from_slice(&address.to_le_bytes());
        bytes[32..36].copy_from_slice(&len.to_le_bytes());
        bytes[39] = kind;
        Sqe(bytes)
    }

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let bytes: Vec<u8> = (0..64).collect();
        let sqe = Sqe::parse(&bytes).unwrap();
        assert_eq!((sqe.opcode(), sqe.cid(), sqe.nsid()), (0, 0x0302, 0x0706_0504));
        assert_eq!((sqe.slba(), sqe.dword(12)), (0x2f2e_2d2c_2b2a_2928, 0x3332_3130));
        assert!(Sqe::parse(&bytes[1..]).is_none());
    }

    #[test]
    fn data_are_in_the_capsule_at_offset_0_or_come_by_the_transport() {
        let in_capsule = DataPointer { in_capsule: true, len: 512 };
        assert_eq!(sqe(0x40, 0, 512, 0x01).data(), Ok(in_capsule));
        let apart = DataPointer { in_capsule: false, len: 4096 };
        assert_eq!(sqe(0x40, 77, 4096, 0x5a).data(), Ok(apart));
        assert_eq!(sqe(0x40, 8, 512, 0x01).data(), Err(StatusCode::SGL_OFFSET_INVALID));
        assert_eq!(sqe(0x40, 0, 512, 0x20).data(), Err(StatusCode::SGL_TYPE_INVALID));
        assert_eq!(sqe(0x00, 0, 512, 0x5a).data(), Err(StatusCode::INVALID_FIELD), "PRP");
    }

    /// Each status of a device, and what a read and a write that fail with it are answered.
    const ANSWERS: [(Status, u16, u16); 18] = [
        (Status::Ok, 0, 0),
        (Status::NotSupp, 0x4001, 0x4001),
        (Status::Timeout, 0x4006, 0x4006),
        (Status::NoSpc, 0x4081, 0x4081),
        (Status::Transport, 0x4006, 0x4006),
        (Status::Target, 0x4082, 0x4082),
        (Status::ResvConflict, 0x4083, 0x4083),
        (Status::Medium, 0x4281, 0x4280),
        (Status::Protection, 0x4282, 0x4282),
        (Status::Resource, 0x0021, 0x0021),
        (Status::IoErr, 0x4006, 0x4006),
        (Status::Again, 0x0021, 0x0021),
        (Status::DevResource, 0x0021, 0x0021),
        (Status::ZoneOpenResource, 0x41be, 0x41be),
        (Status::ZoneActiveResource, 0x41bd, 0x41bd),
        (Status::Offline, 0x4006, 0x4006),
        (Status::DurationLimit, 0x4006, 0x4006),
        (Status::Inval, 0x4002, 0x4002),
    ];

    #[test]
    fn each_status_of_a_device_has_a_code() {
        for status in Status::ALL {
            let (_, read, write) = *ANSWERS.iter().find(|(of, ..)| of == status).unwrap();
            for (op, wanted) in [(Op::Read, read), (Op::Write, write), (Op::ZoneAppend, write)] {
                assert_eq!(StatusCode::of(*status, op), StatusCode(wanted), "{status:?} {op:?}");
            }
        }
    }

    #[test]
    fn completion_has_its_status_above_the_phase_bit() {
        let cqe = Cqe { result: 1, sq_head: 2, cid: 3, status: StatusCode::ZONE_FULL };
        let wanted = [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0x72, 0x83];
        assert_eq!(cqe.bytes(), wanted);
    }
}
