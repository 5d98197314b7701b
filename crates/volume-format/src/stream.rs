//! The stream of `send` and `receive`: a header, records with blocks in order, and an end record.
//! The checksum of each record includes that of the record before. So a stream that is truncated,
//! damaged, or joined from two is detected at that record.
//!
//! The streams of several snapshots can follow one another; the header of each says whether another
//! one follows it. A stream can begin at a later block than the first one: it continues a receive
//! that was interrupted, which a [`ResumeToken`] describes.
//!
//! A raw stream has the blocks of an encrypted volume as they are stored. Its header names the key,
//! and its first record has the key slot.

use std::fmt;
use std::str::FromStr;

use crate::BLOCK_BYTES_MAX;
use crate::bytes::{BlockHeader, Reader, crc, put_u32, put_u64, u32_at, u64_at};
use crate::catalogue::{BLOCKS_MAX, NAME_MAX, is_name};
use crate::error::FormatError;
use crate::key_slot::{KEY_SLOT_BYTES, KeySlot};
use crate::sealed::SealedBlocks;

/// The version of the stream that this program writes.
pub const VERSION: u32 = 3;

/// The oldest version that this program reads. Its header has no flags, no start and no creation
/// time; that of version 2 has no key.
const VERSION_OLDEST: u32 = 1;

/// Length of the header, in bytes.
pub const HEAD_BYTES: usize = 512;

/// Length of a record's header, which precedes its blocks, in bytes.
pub const RECORD_BYTES: usize = 40;

/// Longest payload of a record, in bytes.
pub const PAYLOAD_MAX: usize = 1 << 20;

const WHAT: &str = "stream";
/// The magic number of a stream.
pub const MAGIC: [u8; 8] = *b"BLKYSND\n";
const SEAL: BlockHeader =
    BlockHeader { what: WHAT, magic: MAGIC, version: VERSION, oldest: VERSION_OLDEST };
const FLAGS: usize = 52;
const START: usize = 56;
const NAME: usize = 64;
const BASE: usize = NAME + NAME_MAX;
const CREATED: usize = BASE + NAME_MAX;
const KEY: usize = CREATED + 8;
/// Offset of the end of the last field; the bytes after it are zero.
const END: usize = KEY + 8;

/// Flag: the stream of another snapshot follows the end record.
const IS_FOLLOWED: u32 = 1;

/// Flag: the stream builds on a snapshot of another volume, of which its volume is a clone.
const IS_CLONE: u32 = 2;

/// The header of a stream, which describes the snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Length of a block in bytes.
    pub block_bytes: u32,
    /// Number of blocks of the snapshot.
    pub blocks: u64,
    /// The identity of the snapshot, which `receive` preserves.
    pub guid: u64,
    /// The name of the snapshot at the sender: VOLUME@SNAPSHOT.
    pub name: String,
    /// The snapshot on which an incremental stream builds: its identity, and its name at the
    /// sender.
    pub base: Option<(u64, String)>,
    /// When the snapshot was created, in seconds since 1970 (UTC); 0: unknown.
    pub created: u64,
    /// The first block that the stream contains: it continues a stream that was received up to
    /// there.
    pub start: u64,
    /// Whether the stream of another snapshot follows the end record.
    pub is_followed: bool,
    /// Whether the base is a snapshot of another volume, of which this one is a clone.
    pub is_clone: bool,
    /// In a raw stream, the identity of the key by which the blocks are encrypted; 0: the stream
    /// has the contents of the blocks.
    pub key: u64,
}

fn impossible(field: &'static str, value: u64, want: &'static str) -> FormatError {
    FormatError::Field { what: WHAT, field, value, want }
}

impl Head {
    /// Encodes the header.
    ///
    /// # Panics
    /// If a name is too long; names come from the catalogue, which bounds them.
    pub fn print(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        put_u32(&mut bytes, 20, self.block_bytes);
        put_u64(&mut bytes, 24, self.blocks);
        put_u64(&mut bytes, 32, self.guid);
        let (base, base_name) = self.base.as_ref().map_or((0, ""), |(guid, name)| (*guid, name));
        put_u64(&mut bytes, 40, base);
        for (length, at, name) in [(48, NAME, self.name.as_str()), (49, BASE, base_name)] {
            assert!(name.len() <= NAME_MAX);
            bytes[length] = name.len() as u8;
            bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
        }
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags = flag(self.is_followed, IS_FOLLOWED) | flag(self.is_clone, IS_CLONE);
        put_u32(&mut bytes, FLAGS, flags);
        put_u64(&mut bytes, START, self.start);
        put_u64(&mut bytes, CREATED, self.created);
        put_u64(&mut bytes, KEY, self.key);
        SEAL.put(&mut bytes);
        bytes
    }

    /// Parses the header.
    ///
    /// # Errors
    /// If the bytes are not a header that this program knows.
    pub fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Head, FormatError> {
        SEAL.check(bytes)?;
        let (block_bytes, blocks) = (u32_at(bytes, 20), u64_at(bytes, 24));
        if !block_bytes.is_power_of_two() || !(512..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(impossible("block_bytes", block_bytes.into(), "512 to 64k"));
        }
        if !(1..=BLOCKS_MAX).contains(&blocks) {
            return Err(impossible("blocks", blocks, "1 to 2^40"));
        }
        let (guid, base) = (u64_at(bytes, 32), u64_at(bytes, 40));
        if guid == 0 {
            return Err(impossible("guid", guid, "an identity"));
        }
        let text = |length: usize, at: usize, field| {
            let len = usize::from(bytes[length]);
            let name = bytes[at..at + NAME_MAX].split_at_checked(len);
            let name = name.filter(|(_, rest)| rest.iter().all(|byte| *byte == 0));
            let name = name.and_then(|(name, _)| std::str::from_utf8(name).ok());
            name.map(str::to_owned).ok_or_else(|| impossible(field, len as u64, "a name"))
        };
        let (name, base_name) = (text(48, NAME, "name")?, text(49, BASE, "base")?);
        // Programs print the names, so a stream must not bring control characters in them.
        for (name, field) in [(&name, "name"), (&base_name, "base")] {
            let is_absent = field == "base" && name.is_empty();
            let is_snapshot = is_name(name) && name.contains('@');
            if !is_absent && !is_snapshot {
                return Err(impossible(field, name.len() as u64, "the name of a snapshot"));
            }
        }
        let reserved = match u32_at(bytes, 16) {
            VERSION_OLDEST => (50..NAME, CREATED),
            2 => (50..FLAGS, KEY),
            _ => (50..FLAGS, END),
        };
        if bytes[reserved.0].iter().chain(&bytes[reserved.1..]).any(|byte| *byte != 0) {
            return Err(impossible("a reserved byte", 1, "0"));
        }
        let base = (base != 0).then_some((base, base_name));
        let (flags, start) = (u32_at(bytes, FLAGS), u64_at(bytes, START));
        let (is_followed, is_clone) = (flags & IS_FOLLOWED != 0, flags & IS_CLONE != 0);
        if flags & !(IS_FOLLOWED | IS_CLONE) != 0 {
            return Err(impossible("flags", flags.into(), "flags that this program knows: 1, 2"));
        }
        if is_clone && base.is_none() {
            return Err(impossible("flags", flags.into(), "a base, as the stream is of a clone"));
        }
        if start > blocks {
            return Err(impossible("start", start, "the number of blocks at most"));
        }
        let (created, key) = (u64_at(bytes, CREATED), u64_at(bytes, KEY));
        Ok(Head {
            block_bytes,
            blocks,
            guid,
            name,
            base,
            created,
            start,
            is_followed,
            is_clone,
            key,
        })
    }

    /// Whether the stream has encrypted blocks as they are stored.
    pub fn is_raw(&self) -> bool {
        self.key != 0
    }

    /// The token by which a sender continues this stream at its start.
    pub fn token(&self) -> ResumeToken {
        let base = self.base.as_ref().map(|(guid, _)| *guid);
        ResumeToken { guid: self.guid, base, start: self.start, is_raw: self.is_raw() }
    }

    /// The checksum of the header, on which the first record's checksum builds.
    pub fn chain(bytes: &[u8; HEAD_BYTES]) -> u64 {
        crc(bytes)
    }
}

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Blocks, whose contents follow.
    Data = 1,
    /// Blocks of zeros.
    Zeros = 2,
    /// The end of the stream.
    End = 3,
    /// Blocks, whose contents follow as one frame of Zstandard.
    Compressed = 4,
    /// The key slot of a raw stream, which follows.
    Key = 5,
    /// Encrypted blocks of a raw stream, which follow as they are stored.
    Sealed = 6,
}

impl Kind {
    fn of_number(number: u32) -> Option<Kind> {
        match number {
            1 => Some(Kind::Data),
            2 => Some(Kind::Zeros),
            3 => Some(Kind::End),
            4 => Some(Kind::Compressed),
            5 => Some(Kind::Key),
            6 => Some(Kind::Sealed),
            _ => None,
        }
    }

    /// Whether record `number` of a stream can have this kind: the first one of a raw stream has
    /// the key slot, and the others have no contents of blocks.
    fn is_in(self, head: &Head, number: u64) -> bool {
        match (head.is_raw(), number) {
            (false, _) => !matches!(self, Kind::Key | Kind::Sealed),
            (true, 0) => self == Kind::Key,
            (true, _) => matches!(self, Kind::Sealed | Kind::Zeros | Kind::End),
        }
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The kind of the record.
    pub kind: Kind,
    /// Length of the payload that follows, in bytes.
    pub len: u32,
    /// The first block; in the end record, the length of the snapshot in blocks.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
    /// Number of the record, from 0.
    pub number: u64,
}

impl Record {
    /// Encodes the record header for `payload`. `chain` is the checksum of the stream header or
    /// record before. Returns the record's checksum.
    pub fn print(&self, chain: u64, payload: &[u8], bytes: &mut [u8; RECORD_BYTES]) -> u64 {
        put_u32(bytes, 0, self.kind as u32);
        put_u32(bytes, 4, self.len);
        put_u64(bytes, 8, self.first);
        put_u64(bytes, 16, self.count);
        put_u64(bytes, 24, self.number);
        let sum = Record::sum(chain, bytes, payload);
        put_u64(bytes, 32, sum);
        sum
    }

    /// The checksum of a record that follows one with the checksum `chain`.
    fn sum(chain: u64, bytes: &[u8; RECORD_BYTES], payload: &[u8]) -> u64 {
        let mut all = [0; 48];
        all[..32].copy_from_slice(&bytes[..32]);
        put_u64(&mut all, 32, chain);
        put_u64(&mut all, 40, crc(payload));
        crc(&all)
    }

    /// Parses the header of record `number`, whose blocks must not precede `from`. The payload is
    /// not checked; see [`Record::verify`].
    ///
    /// # Errors
    /// If a field is invalid at this position.
    pub fn parse(
        bytes: &[u8; RECORD_BYTES],
        head: &Head,
        number: u64,
        from: u64,
    ) -> Result<Record, FormatError> {
        let kind = Kind::of_number(u32_at(bytes, 0)).filter(|kind| kind.is_in(head, number));
        let Some(kind) = kind else {
            let wanted = match (head.is_raw(), number) {
                (false, _) => "1, 2, 3 or 4",
                (true, 0) => "5, as the stream is raw",
                (true, _) => "2, 3 or 6, as the stream is raw",
            };
            return Err(impossible("kind", u32_at(bytes, 0).into(), wanted));
        };
        let (len, first, count) = (u32_at(bytes, 4), u64_at(bytes, 8), u64_at(bytes, 16));
        let record = Record { kind, len, first, count, number: u64_at(bytes, 24) };
        if record.number != number {
            return Err(impossible("number", record.number, "one more than the record before"));
        }
        let end = first.checked_add(count).filter(|end| *end <= head.blocks && first >= from);
        let data_len = count.saturating_mul(head.block_bytes.into());
        let (wanted_len, is_len) = match kind {
            Kind::Data => (data_len, u64::from(len) == data_len),
            Kind::Compressed => (data_len, (1..data_len).contains(&len.into())),
            Kind::Zeros | Kind::End => (0, len == 0),
            Kind::Key => (0, len as usize == KEY_SLOT_BYTES),
            Kind::Sealed => (data_len.max(len.into()), len > 0),
        };
        match kind {
            Kind::End if (first, count) != (head.blocks, 0) => {
                Err(impossible("first", first, "the end of the snapshot"))
            }
            Kind::Key if (first, count) != (head.start, 0) => {
                Err(impossible("first", first, "the start of the stream"))
            }
            _ if end.is_none() => {
                Err(impossible("first", first, "blocks after those of the record before"))
            }
            Kind::Data | Kind::Zeros | Kind::Compressed | Kind::Sealed if count == 0 => {
                Err(impossible("count", 0, "blocks"))
            }
            _ if !is_len || wanted_len > PAYLOAD_MAX as u64 => {
                Err(impossible("len", len.into(), "the length of its blocks, 1M at most"))
            }
            _ => Ok(record),
        }
    }

    /// Verifies the checksum of a record and its payload; `chain` is the checksum of the stream
    /// header or record before. Returns the record's checksum.
    ///
    /// # Errors
    /// If the checksum is wrong.
    pub fn verify(
        bytes: &[u8; RECORD_BYTES],
        chain: u64,
        payload: &[u8],
    ) -> Result<u64, FormatError> {
        let (found, want) = (Record::sum(chain, bytes, payload), u64_at(bytes, 32));
        match found == want {
            true => Ok(found),
            false => Err(FormatError::Checksum { what: WHAT, found, want }),
        }
    }

    /// Parses the payload of a [`Kind::Key`] record.
    ///
    /// # Errors
    /// If it is no key slot, or one of another key than the header names.
    pub fn key_slot(payload: &[u8], head: &Head) -> Result<KeySlot, FormatError> {
        let mut reader = Reader::new(payload);
        let slot = KeySlot::parse(&mut reader)?;
        if reader.left() > 0 {
            return Err(impossible("key slot", payload.len() as u64, "no bytes after it"));
        }
        match slot.id == head.key {
            true => Ok(slot),
            false => Err(impossible("key slot", slot.id, "the key that the header names")),
        }
    }

    /// The blocks of a [`Kind::Sealed`] record.
    ///
    /// # Errors
    /// If the payload is not exactly the record's number of well-formed blocks. Whether they are
    /// authentic only the key can tell.
    pub fn sealed<'a>(
        &self,
        payload: &'a [u8],
        head: &Head,
    ) -> Result<SealedBlocks<'a>, FormatError> {
        let blocks = SealedBlocks::new(payload, head.block_bytes);
        match blocks.clone().check() {
            Some(count) if count == self.count => Ok(blocks),
            _ => Err(impossible("encrypted blocks", self.count, "that many, as they are stored")),
        }
    }
}

/// Where a receive that was interrupted continues: a text for people to copy, with a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumeToken {
    /// The identity of the snapshot.
    pub guid: u64,
    /// The identity of the snapshot on which it builds, if the stream is incremental.
    pub base: Option<u64>,
    /// The first block that is missing.
    pub start: u64,
    /// Whether the stream is raw.
    pub is_raw: bool,
}

/// The first part of a token: its version.
const TOKEN_VERSION: &str = "1";

/// The version of the token of a raw stream, which has the same fields.
const TOKEN_VERSION_RAW: &str = "2";

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ResumeToken { guid, base, start, is_raw } = self;
        let version = if *is_raw { TOKEN_VERSION_RAW } else { TOKEN_VERSION };
        let text = format!("{version}-{guid:x}-{:x}-{start:x}", base.unwrap_or(0));
        write!(f, "{text}-{:016x}", crc(text.as_bytes()))
    }
}

impl FromStr for ResumeToken {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ResumeToken, &'static str> {
        let wrong = "expected a token that `volume receive --token` has printed";
        let (rest, sum) = text.rsplit_once('-').ok_or(wrong)?;
        if sum != format!("{:016x}", crc(rest.as_bytes())) {
            return Err("expected a whole token: the checksum of this one is wrong");
        }
        let parts: Vec<&str> = rest.split('-').collect();
        let [version, fields @ ..] = &parts[..] else { return Err(wrong) };
        let is_raw = *version == TOKEN_VERSION_RAW;
        if !is_raw && *version != TOKEN_VERSION {
            return Err("expected a token of version 1 or 2; a newer program has printed this one");
        }
        let number = |text: &str| u64::from_str_radix(text, 16).map_err(|_| wrong);
        let [guid, base, start] = fields else { return Err(wrong) };
        let (guid, base, start) = (number(guid)?, number(base)?, number(start)?);
        Ok(ResumeToken { guid, base: (base != 0).then_some(base), start, is_raw })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_slot::Derivation;

    fn head() -> Head {
        Head {
            block_bytes: 16_384,
            blocks: 100,
            guid: 9,
            name: "v0@tuesday".to_owned(),
            base: Some((7, "v0@monday".to_owned())),
            created: 1_700_000_000,
            start: 60,
            is_followed: true,
            is_clone: true,
            key: 0,
        }
    }

    fn raw_head() -> Head {
        Head { key: 5, ..head() }
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        let complete = Head { base: None, start: 0, is_clone: false, ..head() };
        for head in
            [head(), raw_head(), complete, Head { start: 100, is_followed: false, ..head() }]
        {
            assert_eq!(Head::parse(&head.print()), Ok(head));
        }
        let mut bytes = [0; RECORD_BYTES];
        let payload = [5; 32_768];
        let record = Record { kind: Kind::Data, len: 32_768, first: 3, count: 2, number: 4 };
        let chain = record.print(1, &payload, &mut bytes);
        assert_eq!(Record::parse(&bytes, &head(), 4, 3), Ok(record));
        assert_eq!(Record::verify(&bytes, 1, &payload), Ok(chain));
        assert!(Record::verify(&bytes, 2, &payload).is_err(), "of another stream");
        assert!(Record::verify(&bytes, 1, &payload[1..]).is_err());
        assert!(Record::parse(&bytes, &head(), 5, 3).is_err(), "one is left out");
        assert!(
            Record::parse(&bytes, &head(), 4, 4).is_err(),
            "the first block is below the expected one"
        );
    }

    /// A header of an older version has zeros where later versions have fields.
    #[test]
    fn a_header_of_an_older_version_is_read() {
        let old = Head { created: 0, start: 0, is_followed: false, is_clone: false, ..head() };
        let as_version = |head: &Head, version: u32| {
            let mut bytes = head.print();
            put_u32(&mut bytes, 16, version);
            let crc = crc(&bytes[16..]);
            put_u64(&mut bytes, 8, crc);
            bytes
        };
        assert_eq!(Head::parse(&as_version(&old, 1)), Ok(old.clone()));
        for new in [
            Head { created: 1, ..old.clone() },
            Head { start: 1, ..old.clone() },
            Head { is_followed: true, ..old.clone() },
        ] {
            assert!(Head::parse(&as_version(&new, 1)).is_err(), "{new:?}");
        }
        assert_eq!(Head::parse(&as_version(&head(), 2)), Ok(head()));
        assert!(Head::parse(&as_version(&raw_head(), 2)).is_err());
        let newer = FormatError::Version { what: WHAT, found: 4, known: 3 };
        assert_eq!(Head::parse(&as_version(&old, 4)), Err(newer));
    }

    #[test]
    fn what_no_header_has_is_refused() {
        let with = |change: &dyn Fn(&mut [u8; HEAD_BYTES])| {
            let mut bytes = head().print();
            change(&mut bytes);
            SEAL.put(&mut bytes);
            Head::parse(&bytes).unwrap_err().to_string()
        };
        let said = with(&|bytes| put_u32(bytes, FLAGS, 7));
        assert!(said.contains("flags = 7; expected flags that this program knows"), "{said}");
        let said = with(&|bytes| put_u64(bytes, 40, 0));
        assert!(said.contains("expected a base"), "{said}");
        let said = with(&|bytes| put_u64(bytes, START, 101));
        assert!(said.contains("start = 101"), "{said}");
        for (at, field) in [(NAME, "name"), (NAME + 2, "name"), (BASE + 4, "base")] {
            let said = with(&|bytes| bytes[at] = 0x1b);
            let wanted = format!("{field} = ");
            assert!(said.contains(&wanted) && said.contains("the name of a snapshot"), "{said}");
        }
        for at in [50, 51, END, HEAD_BYTES - 1] {
            let said = with(&|bytes| bytes[at] = 1);
            assert!(said.contains("a reserved byte"), "{at}: {said}");
        }
    }

    #[test]
    fn tokens_are_checked() {
        let whole = ResumeToken { guid: u64::MAX, base: None, start: 1 << 40, is_raw: false };
        let token = head().token();
        assert_eq!(token, ResumeToken { guid: 9, base: Some(7), start: 60, is_raw: false });
        let raw = raw_head().token();
        assert_eq!(raw, ResumeToken { is_raw: true, ..token });
        for token in [whole, token, raw] {
            let text = token.to_string();
            assert_eq!(text.parse(), Ok(token));
            for at in 0..text.len() {
                assert!(text[..at].parse::<ResumeToken>().is_err(), "cut at {at}");
                let mut damaged = text.clone().into_bytes();
                damaged[at] ^= 1;
                let damaged = String::from_utf8(damaged).unwrap();
                assert!(damaged.parse::<ResumeToken>().is_err(), "{damaged}");
            }
        }
        let sealed = |text: &str| format!("{text}-{:016x}", crc(text.as_bytes()));
        let said = |text: &str| sealed(text).parse::<ResumeToken>().unwrap_err();
        assert!(said("3-9-7-3c").contains("version 1 or 2"));
        for text in ["1-9-7", "1-9-7-3c-1", "1-g-7-3c", "1-9-7-11112222333344445", ""] {
            assert!(said(text).contains("expected a token"), "{text}");
        }
    }

    #[test]
    fn every_flipped_bit_of_a_head_is_noticed() {
        let bytes = head().print();
        for bit in 0..HEAD_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_is_impossible_is_refused() {
        let parse = |record: Record| {
            let mut bytes = [0; RECORD_BYTES];
            record.print(0, &[], &mut bytes);
            Record::parse(&bytes, &head(), 0, 10)
        };
        let zeros = Record { kind: Kind::Zeros, len: 0, first: 10, count: 90, number: 0 };
        let end = Record { kind: Kind::End, first: 100, count: 0, ..zeros };
        assert!(parse(zeros).is_ok() && parse(end).is_ok());
        for wrong in [
            Record { count: 91, ..zeros },
            Record { count: u64::MAX, ..zeros },
            Record { count: 0, ..zeros },
            Record { first: 9, ..zeros },
            Record { len: 1, ..zeros },
            Record { first: 99, ..end },
            Record { kind: Kind::Data, len: 16_384, count: 2, ..zeros },
            Record { kind: Kind::Data, len: 65 * 16_384, count: 65, ..zeros },
            Record { kind: Kind::Compressed, len: 2 * 16_384, count: 2, ..zeros },
            Record { kind: Kind::Compressed, len: 0, count: 2, ..zeros },
            Record { kind: Kind::Compressed, len: 100, count: 65, ..zeros },
            Record { kind: Kind::Compressed, len: 100, count: 0, ..zeros },
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        let compressed = Record { kind: Kind::Compressed, len: 100, count: 64, ..zeros };
        assert!(parse(compressed).is_ok());
    }

    #[test]
    fn a_raw_stream_begins_with_its_key_and_has_no_contents() {
        let parse = |head: &Head, record: Record| {
            let mut bytes = [0; RECORD_BYTES];
            record.print(0, &[], &mut bytes);
            Record::parse(&bytes, head, record.number, 60)
        };
        let len = KEY_SLOT_BYTES as u32;
        let key = Record { kind: Kind::Key, len, first: 60, count: 0, number: 0 };
        let sealed = Record { kind: Kind::Sealed, len: 100, first: 60, count: 2, number: 1 };
        let zeros = Record { kind: Kind::Zeros, len: 0, ..sealed };
        let end = Record { first: 100, count: 0, kind: Kind::End, ..zeros };
        for record in [key, sealed, zeros, end] {
            assert_eq!(parse(&raw_head(), record), Ok(record));
        }
        for record in [key, sealed] {
            assert!(parse(&head(), record).is_err(), "not in a stream that is not raw: {record:?}");
        }
        for wrong in [
            Record { number: 1, ..key },
            Record { len: len - 1, ..key },
            Record { first: 61, ..key },
            Record { count: 1, ..key },
            Record { number: 0, ..sealed },
            Record { number: 0, ..zeros },
            Record { number: 0, ..end },
            Record { len: 0, ..sealed },
            Record { count: 0, ..sealed },
            Record { len: (1 << 20) + 1, ..sealed },
            Record { count: 65, ..sealed },
            Record { kind: Kind::Data, len: 32_768, ..sealed },
            Record { kind: Kind::Compressed, ..sealed },
        ] {
            assert!(parse(&raw_head(), wrong).is_err(), "{wrong:?}");
        }
        let mut slot = Vec::new();
        let (derivation, salt, wrapped) = (Derivation::Hkdf, [1; 16], [2; 48]);
        KeySlot { id: 5, derivation, salt, wrapped }.print(&mut slot);
        assert_eq!(Record::key_slot(&slot, &raw_head()).unwrap().id, 5);
        let other = Head { key: 6, ..raw_head() };
        let error = Record::key_slot(&slot, &other).unwrap_err().to_string();
        assert!(error.contains("the key that the header names"), "{error}");
        slot.push(0);
        assert!(Record::key_slot(&slot, &raw_head()).is_err());
    }
}
