//! Reads the streams of [`crate::send`] record by record, and verifies them without a pool.

use std::collections::BTreeMap;
use std::io::Read;

use blockyard_volume::VolumeError;
use blockyard_volume::names::snapshot_name;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::key_slot::KeySlot;
use blockyard_volume_format::sealed::SealedBlocks;
use blockyard_volume_format::stream::{HEAD_BYTES, Head, Kind, MAGIC, RECORD_BYTES, Record};

/// The stream of one snapshot that is read record by record.
pub struct Incoming<'a> {
    input: &'a mut dyn Read,
    /// The head of the stream.
    pub head: Head,
    /// The key slot of a raw stream.
    pub slot: Option<KeySlot>,
    chain: u64,
    number: u64,
    /// The next record must begin at this block or a later one.
    from: u64,
    /// Bytes of the input that were read, with those of the streams before this one.
    bytes: u64,
    payload: Vec<u8>,
    /// The decompressed payload.
    plain: Vec<u8>,
    #[cfg(feature = "c-codecs")]
    zstd: Option<zstd_safe::DCtx<'static>>,
}

/// The next part of a stream.
#[derive(Debug)]
pub enum Part<'a> {
    /// Blocks with contents.
    Data {
        /// The first block.
        first: u64,
        /// Contents of all blocks.
        bytes: &'a [u8],
    },
    /// Encrypted blocks of a raw stream.
    Sealed {
        /// The first block.
        first: u64,
        /// Number of blocks.
        count: u64,
        /// That many blocks.
        blocks: SealedBlocks<'a>,
    },
    /// Blocks that are zeros.
    Zeros {
        /// The first block.
        first: u64,
        /// Number of blocks.
        count: u64,
    },
    /// The end of the stream.
    End,
}

impl<'a> Incoming<'a> {
    /// Reads the head, and the key slot of a raw stream.
    ///
    /// # Errors
    /// If one of them cannot be read, or has a format that this program does not know.
    pub fn begin(input: &'a mut dyn Read) -> Result<Incoming<'a>, VolumeError> {
        Incoming::begin_at(input, 0)
    }

    /// Begins a stream at this offset of the input.
    fn begin_at(input: &'a mut dyn Read, offset: u64) -> Result<Incoming<'a>, VolumeError> {
        let mut bytes = [0; HEAD_BYTES];
        fill(input, &mut bytes, offset)?;
        let head = parse_head(&bytes, offset)?;
        let mut incoming = Incoming {
            input,
            chain: Head::chain(&bytes),
            number: 0,
            from: head.start,
            bytes: offset + HEAD_BYTES as u64,
            head,
            slot: None,
            payload: Vec::new(),
            plain: Vec::new(),
            #[cfg(feature = "c-codecs")]
            zstd: None,
        };
        if incoming.head.is_raw() {
            let offset = incoming.bytes;
            // The parser refuses another first record.
            incoming.record()?;
            let slot = Record::key_slot(&incoming.payload, &incoming.head);
            let slot = slot.map_err(|source| VolumeError::Stream { offset, source })?;
            incoming.slot = Some(slot);
        }
        Ok(incoming)
    }

    /// Reads the next record.
    ///
    /// # Errors
    /// If the record cannot be read or is damaged, or the input ends before the end record.
    pub fn part(&mut self) -> Result<Part<'_>, VolumeError> {
        let offset = self.bytes;
        let record = self.record()?;
        let Record { kind, first, count, .. } = record;
        Ok(match kind {
            Kind::Data => Part::Data { first, bytes: &self.payload },
            Kind::Compressed => Part::Data { first, bytes: &self.plain },
            Kind::Sealed => {
                let blocks = record.sealed(&self.payload, &self.head);
                let blocks = blocks.map_err(|source| VolumeError::Stream { offset, source })?;
                Part::Sealed { first, count, blocks }
            }
            Kind::Zeros => Part::Zeros { first, count },
            // The key slot was read with the head, and the parser refuses another one.
            Kind::End | Kind::Key => Part::End,
        })
    }

    /// Reads the next record and its payload, and verifies their checksum.
    fn record(&mut self) -> Result<Record, VolumeError> {
        let mut bytes = [0; RECORD_BYTES];
        let offset = self.bytes;
        fill(self.input, &mut bytes, self.bytes)?;
        self.bytes += bytes.len() as u64;
        let invalid = |source| VolumeError::Stream { offset, source };
        let record = Record::parse(&bytes, &self.head, self.number, self.from);
        let record = record.map_err(invalid)?;
        self.payload.resize(record.len as usize, 0);
        fill(self.input, &mut self.payload, self.bytes)?;
        self.bytes += u64::from(record.len);
        self.chain = Record::verify(&bytes, self.chain, &self.payload).map_err(invalid)?;
        let Record { kind, first, count, len, .. } = record;
        if kind == Kind::Compressed {
            // The record was parsed: this is at most 1 MiB.
            self.plain.resize(count as usize * self.head.block_bytes as usize, 0);
            if !self.decompress() {
                let (what, field, value) = ("stream", "compressed bytes", len.into());
                let want = "one frame of Zstandard, as long as its blocks";
                return Err(invalid(FormatError::Field { what, field, value, want }));
            }
        }
        if kind == Kind::Sealed {
            // Before the position moves: a receive that is continued gets this record again.
            record.sealed(&self.payload, &self.head).map_err(invalid)?;
        }
        self.number += 1;
        self.from = first + count;
        Ok(record)
    }

    /// Decompresses the payload. Returns whether it has exactly the expected length.
    #[cfg(feature = "c-codecs")]
    fn decompress(&mut self) -> bool {
        let zstd = self.zstd.get_or_insert_with(zstd_safe::DCtx::create);
        zstd.decompress(&mut self.plain[..], &self.payload).ok() == Some(self.plain.len())
    }

    #[cfg(not(feature = "c-codecs"))]
    fn decompress(&mut self) -> bool {
        tracing::error!("the stream is compressed by zstd, which this build does not have");
        false
    }

    /// How many bytes of the input were read.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first block that the records read so far do not contain.
    pub fn next_block(&self) -> u64 {
        self.from
    }

    /// Begins the stream that follows this one, which was read to its end record. Returns `None` if
    /// none follows it.
    ///
    /// # Errors
    /// If the head cannot be read, or has a format that this program does not know.
    pub fn following(self) -> Result<Option<Incoming<'a>>, VolumeError> {
        match self.head.is_followed {
            true => Incoming::begin_at(self.input, self.bytes).map(Some),
            false => Ok(None),
        }
    }
}

/// Parses a head that begins at this offset of the input.
///
/// # Errors
/// If it has a format that this program does not know.
fn parse_head(bytes: &[u8; HEAD_BYTES], offset: u64) -> Result<Head, VolumeError> {
    Head::parse(bytes).map_err(|source| match source {
        FormatError::Magic { .. } if offset == 0 => VolumeError::NotAStream,
        source => VolumeError::Stream { offset, source },
    })
}

/// Fills `bytes` from the input, of which `before` bytes were read earlier.
///
/// # Errors
/// If the input cannot be read, or ends.
fn fill(input: &mut dyn Read, bytes: &mut [u8], before: u64) -> Result<(), VolumeError> {
    let mut at = 0;
    while at < bytes.len() {
        match input.read(&mut bytes[at..]) {
            Ok(0) => {
                let is_other = bytes[..at].iter().zip(&MAGIC).any(|(byte, magic)| byte != magic);
                return Err(match before == 0 && is_other {
                    true => VolumeError::NotAStream,
                    false => VolumeError::StreamEnds { offset: before + at as u64 },
                });
            }
            Ok(len) => at += len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(VolumeError::Pipe(error)),
        }
    }
    Ok(())
}

/// A snapshot whose stream was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedSnapshot {
    /// The head of its stream.
    pub head: Head,
    /// Blocks whose contents are in the stream.
    pub blocks: u64,
}

/// The result of verifying streams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The snapshots, in the order of the streams.
    pub snapshots: Vec<VerifiedSnapshot>,
    /// Length of all streams in bytes.
    pub bytes: u64,
}

/// Reads streams to their end, and verifies all checksums, the order of the blocks, and that each
/// stream of a volume builds on the one before, and has its key if both are raw. Whether the blocks
/// of raw streams are authentic only the key can tell. `progress` is called with the number of
/// bytes read.
///
/// # Errors
/// If the input is damaged or truncated, or has bytes after its end.
pub fn verify(
    input: &mut dyn Read,
    progress: &mut dyn FnMut(u64),
) -> Result<Verified, VolumeError> {
    let mut verified = Verified::default();
    // The identities of the last snapshots and their keys, by volume.
    let mut last: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut incoming = Incoming::begin(input)?;
    loop {
        let (head, offset) = (incoming.head.clone(), incoming.bytes() - HEAD_BYTES as u64);
        let volume = snapshot_name(&head.name)?.0.to_owned();
        let base = head.base.as_ref().map(|(guid, _)| *guid);
        if let Some((before, key)) = last.insert(volume, (head.guid, head.key)) {
            let what = "stream";
            let wrong = |field, value, want| {
                let source = FormatError::Field { what, field, value, want };
                Err(VolumeError::Stream { offset, source })
            };
            if base != Some(before) {
                return wrong("base", base.unwrap_or(0), "the snapshot of the stream before it");
            }
            if key != head.key {
                return wrong("key", head.key, "the key of the stream before it");
            }
        }
        let size = u64::from(head.block_bytes);
        let mut blocks = 0;
        loop {
            match incoming.part()? {
                Part::Data { bytes, .. } => blocks += bytes.len() as u64 / size,
                Part::Sealed { count, .. } => blocks += count,
                Part::Zeros { .. } => {}
                Part::End => break,
            }
            progress(incoming.bytes());
        }
        verified.snapshots.push(VerifiedSnapshot { head, blocks });
        verified.bytes = incoming.bytes();
        if !incoming.head.is_followed {
            return at_end(incoming).map(|()| verified);
        }
        let Some(next) = incoming.following()? else { return Ok(verified) };
        incoming = next;
    }
}

/// Refuses bytes after the end of the last stream.
fn at_end(incoming: Incoming<'_>) -> Result<(), VolumeError> {
    let Incoming { input, bytes: offset, .. } = incoming;
    let mut byte = [0];
    match fill(input, &mut byte, offset) {
        Err(VolumeError::StreamEnds { .. }) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => {
            let (what, field, value) = ("stream", "a byte after its end", byte[0].into());
            let want = "the end of the input";
            let source = FormatError::Field { what, field, value, want };
            Err(VolumeError::Stream { offset, source })
        }
    }
}
