//! The bytes of a trace: `struct blk_io_trace` of Linux (include/uapi/linux/blktrace_api.h), one
//! after the other, each with its data (pdu).
//!
//! | version | action | pid, device, cpu | error, pdu_len | size |
//! | --- | --- | --- | --- | --- |
//! | 7 | 28, 32 bits | 32, 36, 40 | 44, 46 | 48 |
//! | 8 | 32, 64 bits | 28, 40, 44 | 48, 50 | 64 |
//!
//! These are offsets in bytes. Magic, sequence, time, sector and bytes are at 0, 4, 8, 16 and 24.
//!
//! The low 16 bits of the action are what happened, the others the categories of the request. The
//! byte order is that of the machine that has recorded the trace, and the magic tells it. Version 8
//! has categories for the operations of zones. Many tools read version 7 alone, which is therefore
//! the one that is printed.

use std::io::{self, Read};

/// The magic, whose low byte is the version.
pub const MAGIC: u32 = 0x6561_7400;
/// The version that is printed.
pub const VERSION: u32 = 7;
/// The version of `struct blk_io_trace2`.
const VERSION_2: u32 = 8;

/// The first bytes of a printed trace.
pub const START: [u8; 4] = (MAGIC | VERSION).to_le_bytes();

/// Length of an event of version 7 without its data, in bytes.
pub const HEAD_BYTES: usize = 48;
/// Length of an event of version 8 without its data, in bytes.
const HEAD_2_BYTES: usize = 64;

/// Bits of the action that say what has happened.
const CODE_BITS: u32 = 16;

/// What has happened (`__BLK_TA_*`), without the bit for cgroups.
pub mod code {
    /// Q: queued.
    pub const QUEUE: u16 = 1;
    /// M: merged at the end of a request.
    pub const BACK_MERGE: u16 = 2;
    /// F: merged at the start of a request.
    pub const FRONT_MERGE: u16 = 3;
    /// G: became a request.
    pub const GET_REQUEST: u16 = 4;
    /// R: issued, and not started.
    pub const REQUEUE: u16 = 6;
    /// D: issued to the device.
    pub const ISSUE: u16 = 7;
    /// C: completed.
    pub const COMPLETE: u16 = 8;
    /// I: inserted into the scheduler.
    pub const INSERT: u16 = 12;
    /// X: cut.
    pub const SPLIT: u16 = 13;
    /// A: remapped from another device.
    pub const REMAP: u16 = 15;
    /// With [`super::category::NOTIFY`]: the name of a process.
    pub const NOTE_PROCESS: u16 = 0;
    /// With [`super::category::NOTIFY`]: the time of day.
    pub const NOTE_TIMESTAMP: u16 = 1;
    /// With [`super::category::NOTIFY`]: a text.
    pub const NOTE_MESSAGE: u16 = 2;
    /// The event has the number of a cgroup before its data.
    pub const CGROUP: u16 = 1 << 8;
}

/// Categories (`BLK_TC_*`).
pub mod category {
    /// A read.
    pub const READ: u64 = 1 << 0;
    /// A write, or what else changes the device.
    pub const WRITE: u64 = 1 << 1;
    /// A flush, or a write after a flush.
    pub const FLUSH: u64 = 1 << 2;
    /// A thread waits.
    pub const SYNC: u64 = 1 << 3;
    /// Events before the scheduler.
    pub const QUEUE: u64 = 1 << 4;
    /// Requeued.
    pub const REQUEUE: u64 = 1 << 5;
    /// Issued.
    pub const ISSUE: u64 = 1 << 6;
    /// Completed.
    pub const COMPLETE: u64 = 1 << 7;
    /// A request of blocks.
    pub const FS: u64 = 1 << 8;
    /// A command of another kind.
    pub const PC: u64 = 1 << 9;
    /// No request: a note.
    pub const NOTIFY: u64 = 1 << 10;
    /// A discard.
    pub const DISCARD: u64 = 1 << 13;
    /// Data of a driver.
    pub const DRIVER_DATA: u64 = 1 << 14;
    /// Durable when it completes.
    pub const FUA: u64 = 1 << 15;
    /// Version 8: a zone append.
    pub const ZONE_APPEND: u64 = 1 << 16;
    /// Version 8: a reset of a zone.
    pub const ZONE_RESET: u64 = 1 << 17;
    /// Version 8: a reset of all zones.
    pub const ZONE_RESET_ALL: u64 = 1 << 18;
    /// Version 8: a zone is finished.
    pub const ZONE_FINISH: u64 = 1 << 19;
    /// Version 8: a zone is opened.
    pub const ZONE_OPEN: u64 = 1 << 20;
    /// Version 8: a zone is closed.
    pub const ZONE_CLOSE: u64 = 1 << 21;
    /// Version 8: a range is zeroed.
    pub const WRITE_ZEROES: u64 = 1 << 22;
}

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceRecord {
    /// The number of the event among those of its CPU.
    pub sequence: u32,
    /// When it happened, in nanoseconds.
    pub time_ns: u64,
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// What has happened, one of [`code`].
    pub code: u16,
    /// Categories, of [`category`]; version 7 has the low 16 bits.
    pub categories: u64,
    /// The thread.
    pub pid: u32,
    /// The device: the major number from bit 20 on, and the minor number.
    pub device: u32,
    /// The CPU; in our traces the queue.
    pub cpu: u32,
    /// The error with which a request has completed, 0 for none.
    pub error: u16,
    /// The data of the event.
    pub pdu: Vec<u8>,
}

impl TraceRecord {
    /// Whether it is a note, and no event of a request.
    pub fn is_note(&self) -> bool {
        self.categories & category::NOTIFY != 0
    }

    /// The text of a message.
    pub fn message(&self) -> Option<&str> {
        let is_message = self.is_note() && self.code & !code::CGROUP == code::NOTE_MESSAGE;
        let skipped = if self.code & code::CGROUP != 0 { size_of::<u64>() } else { 0 };
        let text = self.pdu.get(skipped..).filter(|_| is_message)?;
        std::str::from_utf8(text).ok().map(|text| text.trim_end_matches(['\0', '\n']))
    }

    /// Appends the bytes of the event in version 7, little-endian.
    ///
    /// # Panics
    /// If a category does not fit into version 7, or there are more than 65,535 bytes of data.
    pub fn print(&self, out: &mut Vec<u8>) {
        let categories = u16::try_from(self.categories).expect("version 7 has 16 categories");
        let pdu_len = u16::try_from(self.pdu.len()).expect("the data of an event are short");
        let action = u32::from(categories) << CODE_BITS | u32::from(self.code);
        out.extend_from_slice(&START);
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.time_ns.to_le_bytes());
        out.extend_from_slice(&self.sector.to_le_bytes());
        for word in [self.bytes, action, self.pid, self.device, self.cpu] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.error.to_le_bytes());
        out.extend_from_slice(&pdu_len.to_le_bytes());
        out.extend_from_slice(&self.pdu);
    }
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The bytes are no event.
    #[error(
        "invalid magic `{found:#010x}` at offset {offset}: expected {wanted}; it is no trace of \
         blktrace, or damaged"
    )]
    Magic {
        /// Where the event begins, in bytes.
        offset: u64,
        /// What is there, little-endian.
        found: u32,
        /// What was expected.
        wanted: &'static str,
    },
    /// The event has a version that is not known.
    #[error("unsupported version `{found}` of the event at offset {offset}: expected 7 or 8")]
    Version {
        /// Where the event begins, in bytes.
        offset: u64,
        /// The version.
        found: u32,
    },
    /// The trace ends within an event.
    #[error("the trace ends at offset {end}, within the {part} of the event at offset {offset}")]
    Cut {
        /// Where the event begins, in bytes.
        offset: u64,
        /// Where the trace ends, in bytes.
        end: u64,
        /// Header or data.
        part: &'static str,
    },
    /// A field has an invalid value.
    #[error("invalid {field} `{value}` of the event at offset {offset}: expected {wanted}")]
    Field {
        /// Where the event begins, in bytes.
        offset: u64,
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// What was expected.
        wanted: &'static str,
    },
    /// The trace cannot be read.
    #[error("cannot read the trace: {0}")]
    Io(#[from] io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByteOrder {
    Little,
    Big,
}

impl ByteOrder {
    fn word<const N: usize>(self, head: &[u8], at: usize) -> u64 {
        let mut bytes: [u8; N] = head[at..at + N].try_into().expect("the length is N");
        if self == ByteOrder::Little {
            bytes.reverse();
        }
        bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    fn u16(self, head: &[u8], at: usize) -> u16 {
        self.word::<2>(head, at) as u16
    }

    fn u32(self, head: &[u8], at: usize) -> u32 {
        self.word::<4>(head, at) as u32
    }

    fn u64(self, head: &[u8], at: usize) -> u64 {
        self.word::<8>(head, at)
    }
}

/// Reads the events of a trace.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: R,
    offset: u64,
    order: Option<ByteOrder>,
}

impl<R: Read> TraceReader<R> {
    /// A reader from the start of a trace.
    pub fn new(input: R) -> TraceReader<R> {
        TraceReader { input, offset: 0, order: None }
    }

    /// Where the next event begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// What it reads from.
    pub fn into_inner(self) -> R {
        self.input
    }

    /// Reads the next event; `false` at the end of the trace.
    ///
    /// # Errors
    /// If the trace is damaged or cannot be read.
    pub fn read(&mut self, record: &mut TraceRecord) -> Result<bool, TraceError> {
        let offset = self.offset;
        let mut head = [0; HEAD_2_BYTES];
        match self.fill(&mut head[..4])? {
            0 => return Ok(false),
            4 => {}
            len => return Err(self.cut(offset, len, "header")),
        }
        let (order, version) = self.magic(offset, head[..4].try_into().expect("four bytes"))?;
        let len = if version == VERSION { HEAD_BYTES } else { HEAD_2_BYTES };
        match self.fill(&mut head[4..len])? {
            got if got == len - 4 => {}
            got => return Err(self.cut(offset, 4 + got, "header")),
        }
        let (action, rest) = match version {
            VERSION => (u64::from(order.u32(&head, 28)), [32, 36, 40, 44, 46]),
            _ => (order.u64(&head, 32), [28, 40, 44, 48, 50]),
        };
        record.sequence = order.u32(&head, 4);
        record.time_ns = order.u64(&head, 8);
        record.sector = order.u64(&head, 16);
        record.bytes = order.u32(&head, 24);
        record.code = action as u16;
        record.categories = action >> CODE_BITS;
        record.pid = order.u32(&head, rest[0]);
        record.device = order.u32(&head, rest[1]);
        record.cpu = order.u32(&head, rest[2]);
        record.error = order.u16(&head, rest[3]);
        record.pdu.resize(usize::from(order.u16(&head, rest[4])), 0);
        let got = self.fill(&mut record.pdu)?;
        if got < record.pdu.len() {
            return Err(self.cut(offset, len + got, "data"));
        }
        self.offset += (len + record.pdu.len()) as u64;
        Ok(true)
    }

    /// Reads the byte order and the version from the magic.
    fn magic(&mut self, offset: u64, bytes: [u8; 4]) -> Result<(ByteOrder, u32), TraceError> {
        let little = u32::from_le_bytes(bytes);
        let is_magic = |word: u32| word & !0xff == MAGIC;
        let (order, word) = match (is_magic(little), is_magic(little.swap_bytes())) {
            (true, _) => (ByteOrder::Little, little),
            (_, true) => (ByteOrder::Big, little.swap_bytes()),
            _ => {
                let wanted = "0x65617407, or the same in the other byte order";
                return Err(TraceError::Magic { offset, found: little, wanted });
            }
        };
        if *self.order.get_or_insert(order) != order {
            let wanted = "the byte order of the first event";
            return Err(TraceError::Magic { offset, found: little, wanted });
        }
        match word & 0xff {
            version @ (VERSION | VERSION_2) => Ok((order, version)),
            found => Err(TraceError::Version { offset, found }),
        }
    }

    fn cut(&self, offset: u64, len: usize, part: &'static str) -> TraceError {
        TraceError::Cut { offset, end: offset + len as u64, part }
    }

    /// Reads until the buffer is full or the trace ends; returns the number of bytes.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.input.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(len) => filled += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> TraceRecord {
        TraceRecord {
            sequence: 3,
            time_ns: 0x0102_0304_0506_0708,
            sector: 0x1112_1314,
            bytes: 4096,
            code: code::QUEUE,
            categories: category::WRITE | category::QUEUE | category::FUA,
            pid: 77,
            device: 240 << 20,
            cpu: 5,
            error: 0,
            pdu: b"abc".to_vec(),
        }
    }

    fn read_all(bytes: &[u8]) -> Result<Vec<TraceRecord>, TraceError> {
        let (mut reader, mut record) = (TraceReader::new(bytes), TraceRecord::default());
        let mut all = Vec::new();
        while reader.read(&mut record)? {
            all.push(record.clone());
        }
        Ok(all)
    }

    /// The event in the layout of `struct blk_io_trace2`, big-endian.
    fn version_8(record: &TraceRecord) -> Vec<u8> {
        let mut bytes = (MAGIC | VERSION_2).to_be_bytes().to_vec();
        bytes.extend(record.sequence.to_be_bytes());
        bytes.extend(record.time_ns.to_be_bytes());
        bytes.extend(record.sector.to_be_bytes());
        bytes.extend(record.bytes.to_be_bytes());
        bytes.extend(record.pid.to_be_bytes());
        bytes.extend((record.categories << 16 | u64::from(record.code)).to_be_bytes());
        bytes.extend(record.device.to_be_bytes());
        bytes.extend(record.cpu.to_be_bytes());
        bytes.extend(record.error.to_be_bytes());
        bytes.extend((record.pdu.len() as u16).to_be_bytes());
        bytes.extend([0; 12]);
        bytes.extend(&record.pdu);
        bytes
    }

    #[test]
    fn printed_events_are_read_in_either_version_and_byte_order() {
        let (one, mut bytes) = (record(), Vec::new());
        let two = TraceRecord { code: code::ISSUE, pdu: Vec::new(), ..record() };
        one.print(&mut bytes);
        two.print(&mut bytes);
        assert_eq!(bytes.len(), 2 * HEAD_BYTES + 3);
        assert_eq!(bytes[28..32], [1, 0, 0x12, 0x80], "action");
        assert_eq!(read_all(&bytes).unwrap(), [one.clone(), two]);
        let zoned = TraceRecord { categories: category::ZONE_RESET, ..one };
        assert_eq!(version_8(&zoned).len(), 64 + 3);
        assert_eq!(read_all(&version_8(&zoned)).unwrap(), [zoned]);
        assert!(read_all(&[]).unwrap().is_empty());
    }

    #[test]
    fn errors_name_offset_and_field() {
        let mut bytes = Vec::new();
        record().print(&mut bytes);
        let whole = bytes.len();
        record().print(&mut bytes);
        let error = |bytes: &[u8]| read_all(bytes).unwrap_err().to_string();
        assert_eq!(
            error(&bytes[..whole + 20]),
            "the trace ends at offset 71, within the header of the event at offset 51"
        );
        assert_eq!(
            error(&bytes[..2 * whole - 1]),
            "the trace ends at offset 101, within the data of the event at offset 51"
        );
        assert!(error(b"{\"a\": 1}").starts_with("invalid magic `0x2261227b` at offset 0"));
        bytes[whole] = 9;
        assert_eq!(
            error(&bytes),
            "unsupported version `9` of the event at offset 51: expected 7 or 8"
        );
        bytes.truncate(whole);
        bytes.extend(version_8(&record()));
        assert!(error(&bytes).contains("expected the byte order of the first event"));
    }
}
