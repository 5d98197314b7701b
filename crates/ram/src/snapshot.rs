//! The format of a snapshot: the contents of a device, as compressed. Converts bytes to records and
//! back, and does nothing else.
//!
//! ```text
//! header   "BLKYDRAM", version, length ▸ size, unit, codecs ▸ CRC-32
//! record   block, kind, codec, length ▸ the stored bytes ▸ CRC-32 of all of it
//! end      kind 0, the number of records in place of a block ▸ CRC-32
//! ```
//!
//! Numbers are little-endian. Records are in ascending order of their blocks, so no block occurs
//! twice. A reader refuses a file that ends before its end record, continues after it, or has a
//! changed byte: a checksum covers every byte. It checks a length before it allocates memory for
//! it.

use std::io::{self, Read, Write};
use std::sync::Arc;

use crc32fast::Hasher;

use crate::codec::{Algo, CodecConfig, DICTIONARY_BYTES_MAX};
pub use crate::error::SnapshotError;

/// The first bytes of a snapshot.
pub const MAGIC: [u8; 8] = *b"BLKYDRAM";
const VERSION: u32 = 1;
/// Bytes of magic, version and length.
const FRONT_BYTES: usize = 16;
/// Bytes of block, kind, codec, two zeros and length.
const RECORD_BYTES: usize = 16;
/// Maximum number of codecs of a device.
pub(crate) const CODECS_MAX: usize = 4;
/// Maximum size of a header: four codecs with dictionaries.
const HEADER_BYTES_MAX: usize = 64 + CODECS_MAX * (16 + DICTIONARY_BYTES_MAX);
/// Largest block size, and so the maximum length of stored bytes.
const UNIT_BYTES_MAX: u32 = 65_536;

/// Bytes of the end record.
pub const END_BYTES: usize = RECORD_BYTES + 4;

/// The number of blocks in a snapshot, from its last bytes. Does not verify them.
pub fn blocks_of(end: &[u8; END_BYTES]) -> u64 {
    let (number, _) = end.split_first_chunk().expect("an end record is longer than its number");
    u64::from_le_bytes(*number)
}

/// Describes the device of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Capacity of the device in bytes.
    pub size: u64,
    /// Bytes of a block.
    pub unit: u32,
    /// The codecs; records refer to them by index.
    pub codecs: Vec<CodecConfig>,
}

/// How a block's contents are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Eight bytes that the block repeats.
    Same,
    /// Uncompressed.
    Raw,
    /// Compressed by the codec with this index.
    Packed(u8),
}

/// The record of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRecord<'a> {
    /// Block number.
    pub block: u64,
    /// How the bytes encode the block.
    pub stored: Stored,
    /// The stored bytes.
    pub bytes: &'a [u8],
}

/// Writes a snapshot.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    records: u64,
}

impl<W: Write> Writer<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn new(mut out: W, header: &Header) -> io::Result<Writer<W>> {
        let mut body = Vec::new();
        body.extend(header.size.to_le_bytes());
        body.extend(header.unit.to_le_bytes());
        body.extend((header.codecs.len() as u32).to_le_bytes());
        for codec in &header.codecs {
            let dictionary = codec.dictionary.as_deref().unwrap_or_default();
            body.extend((codec.algo as u32).to_le_bytes());
            body.extend(codec.level.unwrap_or(codec.algo.default_level()).to_le_bytes());
            body.extend((dictionary.len() as u32).to_le_bytes());
            body.extend(dictionary);
        }
        let mut front = Vec::with_capacity(FRONT_BYTES + body.len() + 4);
        front.extend(MAGIC);
        front.extend(VERSION.to_le_bytes());
        front.extend((body.len() as u32).to_le_bytes());
        front.extend(body);
        front.extend(crc32fast::hash(&front).to_le_bytes());
        out.write_all(&front)?;
        Ok(Writer { out, records: 0 })
    }

    /// Writes a block, whose number must be higher than those of all earlier blocks.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn record(&mut self, record: BlockRecord<'_>) -> io::Result<()> {
        let (kind, codec) = match record.stored {
            Stored::Same => (1, 0),
            Stored::Raw => (2, 0),
            Stored::Packed(codec) => (3, codec),
        };
        self.records += 1;
        self.put(record.block, [kind, codec], record.bytes)
    }

    /// Writes the end record. The caller flushes `out`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn finish(mut self) -> io::Result<W> {
        self.put(self.records, [0, 0], &[])?;
        Ok(self.out)
    }

    fn put(&mut self, number: u64, kind: [u8; 2], bytes: &[u8]) -> io::Result<()> {
        let mut front = [0; RECORD_BYTES];
        front[..8].copy_from_slice(&number.to_le_bytes());
        front[8..10].copy_from_slice(&kind);
        front[12..].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        let mut hasher = Hasher::new();
        hasher.update(&front);
        hasher.update(bytes);
        self.out.write_all(&front)?;
        self.out.write_all(bytes)?;
        self.out.write_all(&hasher.finalize().to_le_bytes())
    }
}

/// Reads a snapshot.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    header: Header,
    bytes: Vec<u8>,
    records: u64,
    /// The lowest valid number for the next block.
    next: u64,
}

fn number<const N: usize>(bytes: &[u8], at: &mut usize) -> Option<[u8; N]> {
    let number = bytes.get(*at..)?.first_chunk::<N>().copied();
    *at += N;
    number
}

/// Parses the body of the header; its checksum was verified.
fn header(body: &[u8]) -> Option<Header> {
    let mut at = 0;
    let size = u64::from_le_bytes(number(body, &mut at)?);
    let unit = u32::from_le_bytes(number(body, &mut at)?);
    let count = u32::from_le_bytes(number(body, &mut at)?) as usize;
    let fits = unit.is_power_of_two() && (4096..=UNIT_BYTES_MAX).contains(&unit);
    if !fits || !(1..=CODECS_MAX).contains(&count) || !size.is_multiple_of(unit.into()) {
        return None;
    }
    let mut codecs = Vec::with_capacity(count);
    for _ in 0..count {
        let algo = u32::from_le_bytes(number(body, &mut at)?);
        let algo = Algo::ALL.into_iter().find(|known| *known as u32 == algo)?;
        let level = i32::from_le_bytes(number(body, &mut at)?);
        let len = u32::from_le_bytes(number(body, &mut at)?) as usize;
        let dictionary = body.get(at..at.checked_add(len)?)?;
        at += len;
        let dictionary: Option<Arc<[u8]>> = (len > 0).then(|| dictionary.into());
        codecs.push(CodecConfig { algo, level: Some(level), dictionary });
    }
    (at == body.len()).then_some(Header { size, unit, codecs })
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// If the file has no valid header, or cannot be read.
    pub fn new(mut from: R) -> Result<Reader<R>, SnapshotError> {
        let damaged = |what| SnapshotError::Damaged { what, records: 0 };
        let mut bytes = vec![0; FRONT_BYTES];
        match from.read_exact(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(SnapshotError::Other);
            }
            read => read?,
        }
        if bytes[..8] != MAGIC {
            return Err(SnapshotError::Other);
        }
        let mut at = 8;
        let front = |at: &mut usize| number(&bytes, at).map_or(0, u32::from_le_bytes);
        let (version, len) = (front(&mut at), front(&mut at) as usize);
        if version != VERSION {
            return Err(SnapshotError::Version { found: version, reads: VERSION });
        }
        if len > HEADER_BYTES_MAX {
            return Err(damaged("the header's length makes no sense"));
        }
        bytes.resize(FRONT_BYTES + len, 0);
        read_all(&mut from, &mut bytes[FRONT_BYTES..], 0)?;
        let mut crc = [0; 4];
        read_all(&mut from, &mut crc, 0)?;
        if crc32fast::hash(&bytes) != u32::from_le_bytes(crc) {
            return Err(damaged("the header's checksum is wrong"));
        }
        let header = header(&bytes[FRONT_BYTES..]).ok_or(damaged("the header makes no sense"))?;
        Ok(Reader { from, header, bytes, records: 0, next: 0 })
    }

    /// Describes the device of the snapshot.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Reads the next block; `None` at the end of a complete snapshot.
    ///
    /// # Errors
    /// If the file is damaged or cut off, or cannot be read.
    pub fn next_record(&mut self) -> Result<Option<BlockRecord<'_>>, SnapshotError> {
        let records = self.records;
        let damaged = |what| SnapshotError::Damaged { what, records };
        let mut front = [0; RECORD_BYTES];
        read_all(&mut self.from, &mut front, records)?;
        let mut at = 0;
        let block = number(&front, &mut at).map_or(0, u64::from_le_bytes);
        let [kind, codec, zeros @ ..] = number::<4>(&front, &mut at).unwrap_or_default();
        let len = number(&front, &mut at).map_or(0, u32::from_le_bytes);
        if len > self.header.unit {
            return Err(damaged("a length makes no sense"));
        }
        self.bytes.resize(len as usize, 0);
        read_all(&mut self.from, &mut self.bytes, records)?;
        let mut crc = [0; 4];
        read_all(&mut self.from, &mut crc, records)?;
        let mut hasher = Hasher::new();
        hasher.update(&front);
        hasher.update(&self.bytes);
        if hasher.finalize() != u32::from_le_bytes(crc) {
            return Err(damaged("a checksum is wrong"));
        }
        let stored = match (kind, len, zeros) {
            (0, 0, [0, 0]) => return self.end(block).map(|()| None),
            (1, 8, [0, 0]) => Stored::Same,
            (2, len, [0, 0]) if len == self.header.unit => Stored::Raw,
            (3, 1.., [0, 0]) if usize::from(codec) < self.header.codecs.len() => {
                Stored::Packed(codec)
            }
            _ => return Err(damaged("a block makes no sense")),
        };
        if block < self.next || block >= self.header.size / u64::from(self.header.unit) {
            return Err(damaged("a block is not where it belongs"));
        }
        self.next = block + 1;
        self.records += 1;
        Ok(Some(BlockRecord { block, stored, bytes: &self.bytes }))
    }

    /// Checks that the end record has the right count and that nothing follows it.
    fn end(&mut self, count: u64) -> Result<(), SnapshotError> {
        let records = self.records;
        if count != records {
            return Err(SnapshotError::Damaged { what: "blocks are missing", records });
        }
        if self.from.read(&mut [0])? != 0 {
            return Err(SnapshotError::Damaged { what: "data follow its end", records });
        }
        Ok(())
    }
}

fn read_all(from: &mut impl Read, into: &mut [u8], records: u64) -> Result<(), SnapshotError> {
    from.read_exact(into).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => SnapshotError::Short { records },
        _ => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codec(algo: Algo, dictionary: Option<Arc<[u8]>>) -> CodecConfig {
        CodecConfig { algo, level: Some(3), dictionary }
    }

    fn sample() -> (Header, Vec<u8>) {
        let dictionary: Arc<[u8]> = (0..100).collect();
        let codecs = vec![codec(Algo::Lz4, None), codec(Algo::Zstd, Some(dictionary))];
        let header = Header { size: 1 << 20, unit: 4096, codecs };
        let mut writer = Writer::new(Vec::new(), &header).unwrap();
        let raw: Vec<u8> = (0..4096).map(|at| ((at * at) >> 3) as u8).collect();
        for (block, stored, bytes) in [
            (0, Stored::Same, &[7; 8][..]),
            (1, Stored::Raw, &raw),
            (9, Stored::Packed(0), &raw[..100]),
            (255, Stored::Packed(1), &raw[..1]),
        ] {
            writer.record(BlockRecord { block, stored, bytes }).unwrap();
        }
        (header, writer.finish().unwrap())
    }

    fn read(file: &[u8]) -> Result<(Header, u64), SnapshotError> {
        let mut reader = Reader::new(file)?;
        let mut records = 0;
        while reader.next_record()?.is_some() {
            records += 1;
        }
        Ok((reader.header, records))
    }

    #[test]
    fn what_is_written_is_read_back() {
        let (header, file) = sample();
        assert_eq!(read(&file).unwrap(), (header, 4));
        let mut reader = Reader::new(&file[..]).unwrap();
        assert_eq!(reader.next_record().unwrap().unwrap().stored, Stored::Same);
        let record = reader.next_record().unwrap().unwrap();
        assert_eq!((record.block, record.stored, record.bytes.len()), (1, Stored::Raw, 4096));
    }

    #[test]
    fn every_cut_and_every_changed_bit_is_refused() {
        let (_, file) = sample();
        for len in 0..file.len() {
            assert!(read(&file[..len]).is_err(), "cut at {len}");
        }
        for bit in 0..file.len() * 8 {
            let mut changed = file.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&changed).is_err(), "bit {bit}");
        }
        let longer = [&file[..], &[0]].concat();
        let error = read(&longer).unwrap_err().to_string();
        assert!(error.contains("data follow its end, after 4 blocks"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_snapshot_is_described() {
        assert_eq!(
            read(b"#!/bin/sh\n").unwrap_err().to_string(),
            "it is no snapshot of a RAM disk"
        );
        let (_, mut file) = sample();
        file[8] = 2;
        let error = read(&file).unwrap_err().to_string();
        assert_eq!(error, "it is a snapshot of version 2; this program reads version 1");
    }
}
