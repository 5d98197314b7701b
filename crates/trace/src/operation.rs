//! The operations that a trace asks for: one for each event of one kind, in the order of the trace.

use std::io::Read;

use blockyard_core::{Flags, Nanos, Op, SECTOR_BYTES, Sector};

use crate::format::{TraceError, TraceReader, TraceRecord, category, code};
use crate::record::{ZoneMessage, categories};

/// Every sector of a trace, and the end of every range, is below this.
const SECTOR_END: u64 = 1 << 55;

/// The events that are operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Select {
    /// Q: what clients submitted.
    #[default]
    Queue,
    /// D: what was issued to the device, after merging.
    Issue,
}

impl Select {
    fn code(self) -> u16 {
        match self {
            Select::Queue => code::QUEUE,
            Select::Issue => code::ISSUE,
        }
    }
}

/// An operation of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceOperation {
    /// When it happened, on the clock of the trace.
    pub at: Nanos,
    /// The operation.
    pub op: Op,
    /// FUA, PREFLUSH and SYNC.
    pub flags: Flags,
    /// First sector; for operations of a zone, and for appends, the start of the zone.
    pub sector: Sector,
    /// Length in sectors; 0 for operations without a range.
    pub sectors: u64,
    /// The CPU or queue that recorded it.
    pub queue: u32,
}

impl TraceOperation {
    /// The operation as an event of version 7: a bio that was queued.
    pub fn record(&self) -> TraceRecord {
        let TraceOperation { at, op, flags, sector, sectors, queue } = *self;
        let (time_ns, cpu) = (at.0, queue);
        if op.is_zone_mgmt() {
            let zone = ZoneMessage { op, code: code::QUEUE, sector: sector.0, errno: 0 };
            let (code, categories) = (code::NOTE_MESSAGE, category::NOTIFY);
            let pdu = zone.text().into_bytes();
            return TraceRecord { time_ns, code, categories, cpu, pdu, ..TraceRecord::default() };
        }
        let categories = category::QUEUE | categories(op, flags);
        let (code, sector, bytes) = (code::QUEUE, sector.0, (sectors * SECTOR_BYTES) as u32);
        let pdu = if IN_DATA.contains(&op) { op.name().as_bytes().to_vec() } else { Vec::new() };
        TraceRecord { time_ns, code, categories, cpu, sector, bytes, pdu, ..TraceRecord::default() }
    }
}

/// Operations that version 7 has no category for, and that are named in the data of the event.
pub(crate) const IN_DATA: [Op; 2] = [Op::ZoneAppend, Op::WriteZeroes];

/// What the operations of a trace have in common, checked while they are read. A trace of several
/// files has one.
#[derive(Clone, Debug, Default)]
pub struct TraceScope {
    /// The longest time between two operations, in nanoseconds, if it is limited.
    pub span_max_ns: Option<u64>,
    /// The times of the first and the last operation, in the order of time.
    times: Option<(u64, u64)>,
    /// The number of the device.
    device: Option<u32>,
}

impl TraceScope {
    /// A scope with a limit of the time between two operations.
    pub fn new(span_max_ns: Option<u64>) -> TraceScope {
        TraceScope { span_max_ns, ..TraceScope::default() }
    }

    /// From the first to the last operation in the order of time, in nanoseconds.
    pub fn span_ns(&self) -> u64 {
        self.times.map_or(0, |(first, last)| last - first)
    }

    /// Adds the event of an operation.
    fn add(&mut self, offset: u64, record: &TraceRecord) -> Result<(), TraceError> {
        let device = *self.device.get_or_insert(record.device);
        if device != record.device {
            let value = format!("{}:{}", record.device >> 20, record.device & 0xf_ffff);
            let wanted = "the device of the events before; `blkparse -i DEVICE -d` writes a trace \
                          of one device";
            return Err(TraceError::Field { offset, field: "device", value, wanted });
        }
        let at = record.time_ns;
        let (first, last) = self.times.map_or((at, at), |(a, b)| (a.min(at), b.max(at)));
        if self.span_max_ns.is_some_and(|max| last - first > max) {
            let (field, value) = ("time", format!("{at} ns"));
            let wanted = "a replay of all operations within the longest duration, which \
                          --duration-max extends and --speed max does not need";
            return Err(TraceError::Field { offset, field, value, wanted });
        }
        self.times = Some((first, last));
        Ok(())
    }
}

/// The operations of a trace, as an iterator.
#[derive(Debug)]
pub struct Operations<R> {
    reader: TraceReader<R>,
    record: TraceRecord,
    select: Select,
    scope: TraceScope,
    skipped: u64,
}

impl<R: Read> Operations<R> {
    /// The operations of the trace that `input` has from here on.
    pub fn new(input: R, select: Select) -> Operations<R> {
        let (reader, record) = (TraceReader::new(input), TraceRecord::default());
        Operations { reader, record, select, scope: TraceScope::default(), skipped: 0 }
    }

    /// Checks the operations against `scope` too, which may have those of other files.
    #[must_use]
    pub fn within(mut self, scope: TraceScope) -> Operations<R> {
        self.scope = scope;
        self
    }

    /// What the operations up to now have in common.
    pub fn scope(&self) -> &TraceScope {
        &self.scope
    }

    /// Events of the selected kind, up to now, that are no operation of a block device: commands of
    /// SCSI, data of drivers, reads and writes of no length.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    fn next_operation(&mut self) -> Result<Option<TraceOperation>, TraceError> {
        loop {
            let offset = self.reader.offset();
            if !self.reader.read(&mut self.record)? {
                return Ok(None);
            }
            let wanted = self.select.code();
            if self.record.is_note() {
                let zone = self.record.message().and_then(ZoneMessage::parse);
                if let Some(zone) = zone.filter(|zone| zone.code == wanted) {
                    check_range(offset, zone.sector, 0)?;
                    let (op, sector) = (zone.op, zone.sector);
                    self.scope.add(offset, &self.record)?;
                    return Ok(Some(self.operation(op, sector, 0)));
                }
            } else if self.record.code & !code::CGROUP == wanted {
                match self.of_record(offset)? {
                    Some(operation) => {
                        self.scope.add(offset, &self.record)?;
                        return Ok(Some(operation));
                    }
                    None => self.skipped += 1,
                }
            }
        }
    }

    fn operation(&self, op: Op, sector: u64, sectors: u64) -> TraceOperation {
        let mut flags = Flags::NONE;
        for (category, flag) in [
            (category::FUA, Flags::FUA),
            (category::SYNC, Flags::SYNC),
            (category::FLUSH, Flags::PREFLUSH),
        ] {
            if self.record.categories & category != 0 && (op != Op::Flush || flag == Flags::SYNC) {
                flags = flags | flag;
            }
        }
        let (at, queue) = (Nanos(self.record.time_ns), self.record.cpu);
        TraceOperation { at, op, flags, sector: Sector(sector), sectors, queue }
    }

    fn of_record(&self, offset: u64) -> Result<Option<TraceOperation>, TraceError> {
        let Some(op) = op_of(&self.record) else { return Ok(None) };
        if op == Op::Flush {
            return Ok(Some(self.operation(op, 0, 0)));
        }
        let bytes = u64::from(self.record.bytes);
        if !op.has_range() {
            check_range(offset, self.record.sector, 0)?;
            return Ok(Some(self.operation(op, self.record.sector, 0)));
        }
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            let (field, value) = ("bytes", bytes.to_string());
            return Err(TraceError::Field { offset, field, value, wanted: "a multiple of 512" });
        }
        if bytes == 0 {
            return Ok(None);
        }
        check_range(offset, self.record.sector, bytes / SECTOR_BYTES)?;
        Ok(Some(self.operation(op, self.record.sector, bytes / SECTOR_BYTES)))
    }
}

impl<R: Read> Iterator for Operations<R> {
    type Item = Result<TraceOperation, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_operation().transpose()
    }
}

fn check_range(offset: u64, sector: u64, sectors: u64) -> Result<(), TraceError> {
    if sector.checked_add(sectors).is_some_and(|end| end < SECTOR_END) {
        return Ok(());
    }
    let (field, value) = ("sector", sector.to_string());
    Err(TraceError::Field { offset, field, value, wanted: "a range that ends below sector 2^55" })
}

/// The operation of an event; `None` if it is none of a block device.
fn op_of(record: &TraceRecord) -> Option<Op> {
    let has = |category: u64| record.categories & category != 0;
    if has(category::PC | category::DRIVER_DATA) {
        return None;
    }
    let named = [
        (category::ZONE_APPEND, Op::ZoneAppend),
        (category::ZONE_RESET, Op::ZoneReset),
        (category::ZONE_RESET_ALL, Op::ZoneResetAll),
        (category::ZONE_FINISH, Op::ZoneFinish),
        (category::ZONE_OPEN, Op::ZoneOpen),
        (category::ZONE_CLOSE, Op::ZoneClose),
        (category::WRITE_ZEROES, Op::WriteZeroes),
        (category::DISCARD, Op::Discard),
    ];
    if let Some((_, op)) = named.into_iter().find(|(category, _)| has(*category)) {
        return Some(op);
    }
    if let Some(op) = IN_DATA.into_iter().find(|op| record.pdu == op.name().as_bytes()) {
        return Some(op);
    }
    match () {
        () if has(category::FLUSH) && record.bytes == 0 => Some(Op::Flush),
        () if has(category::WRITE) => Some(Op::Write),
        () if has(category::READ) => Some(Op::Read),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operations(records: &[TraceRecord]) -> Vec<Result<TraceOperation, String>> {
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.print(&mut bytes));
        let all = Operations::new(&bytes[..], Select::Queue);
        all.map(|operation| operation.map_err(|error| error.to_string())).collect()
    }

    fn queued(categories: u64, sector: u64, bytes: u32) -> TraceRecord {
        let categories = categories | category::QUEUE;
        TraceRecord {
            code: code::QUEUE,
            categories,
            sector,
            bytes,
            time_ns: 5,
            ..TraceRecord::default()
        }
    }

    #[test]
    fn categories_and_data_name_the_operation() {
        let sync = category::SYNC | category::WRITE;
        let cases = [
            (queued(category::READ, 8, 4096), Op::Read, Flags::NONE, 8),
            (queued(sync | category::FUA, 8, 512), Op::Write, Flags::FUA | Flags::SYNC, 1),
            (queued(sync | category::FLUSH, 0, 0), Op::Flush, Flags::SYNC, 0),
            (queued(sync | category::FLUSH, 0, 512), Op::Write, Flags::PREFLUSH | Flags::SYNC, 1),
            (queued(category::WRITE | category::DISCARD, 0, 4096), Op::Discard, Flags::NONE, 8),
        ];
        for (record, op, flags, sectors) in cases {
            let all = operations(&[record]);
            let found = all[0].as_ref().unwrap();
            assert_eq!((found.op, found.flags, found.sectors), (op, flags, sectors));
        }
        let append =
            TraceRecord { pdu: b"zone_append".to_vec(), ..queued(category::WRITE, 0, 512) };
        assert_eq!(operations(&[append])[0].as_ref().unwrap().op, Op::ZoneAppend);
        for op in Op::ALL {
            let sectors = if op.has_range() { 8 } else { 0 };
            let (sector, flags) = (Sector(if op == Op::Flush { 0 } else { 64 }), Flags::SYNC);
            let flags = if op.is_zone_mgmt() { Flags::NONE } else { flags };
            let one = TraceOperation { at: Nanos(7), op, flags, sector, sectors, queue: 3 };
            assert_eq!(operations(&[one.record()]), [Ok(one)]);
        }
        // Nothing to do: no direction, no length, a command of SCSI.
        let none = [
            queued(0, 8, 512),
            queued(category::READ, 8, 0),
            queued(category::READ | category::PC, 8, 36),
        ];
        assert!(operations(&none).is_empty());
    }

    #[test]
    fn a_time_far_away_and_a_second_device_are_refused() {
        let mut bytes = Vec::new();
        let hour = 3600 * 1_000_000_000;
        let one = TraceRecord { device: 8 << 20, ..queued(category::READ, 8, 512) };
        let times = [hour, 0, 2 * hour, 2 * hour + 1, u64::MAX];
        for time_ns in times {
            TraceRecord { time_ns, ..one.clone() }.print(&mut bytes);
        }
        let scope = TraceScope::new(Some(2 * hour));
        let mut all = Operations::new(&bytes[..], Select::Queue).within(scope);
        assert!((0..3).all(|_| all.next().unwrap().is_ok()));
        assert_eq!(all.scope().span_ns(), 2 * hour);
        let error = all.next().unwrap().unwrap_err().to_string();
        let wanted = "invalid time `7200000000001 ns` of the event at offset 144: expected";
        assert!(error.starts_with(wanted), "{error}");
        assert!(Operations::new(&bytes[..], Select::Queue).all(|one| one.is_ok()));

        let other = TraceRecord { device: 8 << 20 | 16, ..one.clone() };
        let all = operations(&[one, other]);
        let error = all[1].as_ref().unwrap_err();
        let wanted = "invalid device `8:16` of the event at offset 48: expected the device of";
        assert!(error.starts_with(wanted), "{error}");
    }

    #[test]
    fn invalid_ranges_name_offset_and_field() {
        let one = queued(category::READ, 8, 4096);
        let all = operations(&[one.clone(), queued(category::READ, 8, 100)]);
        let error = "invalid bytes `100` of the event at offset 48: expected a multiple of 512";
        assert_eq!(all[1], Err(error.to_owned()));
        let all = operations(&[queued(category::READ, u64::MAX, 512)]);
        assert!(all[0].as_ref().unwrap_err().starts_with("invalid sector `18446744073709551615`"));
    }
}
