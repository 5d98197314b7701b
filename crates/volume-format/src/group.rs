//! A group, the unit of the log: one header that names every block, followed by the blocks.
//!
//! ```text
//! ┌ head: number, epoch, chain, one descriptor for each block ┬ block ┬ block ┬ ... ┐
//! └ padded to the alignment ──────────────────────────────────┴─────────────────────┘
//! ```
//!
//! Blocks begin at multiples of the pool's alignment, except encrypted ones, which are padded to
//! [`UNIT`] and begin where the one before ends: most encrypted blocks are a few bytes longer than
//! a multiple of the alignment. The end of the group is padded to the alignment. [`Places`] has
//! these rules.
//!
//! A group is valid as a whole or not at all: its header has a checksum, and each descriptor has
//! that of its block. A group follows the group whose header has the checksum that it states as
//! `chain`.

use crate::bytes::{crc, put_u32, put_u64, u32_at, u64_at};
use crate::catalogue::CHANGE_BYTES_MAX;
use crate::entry::{ADDRESS_END, Codec, STORED_MAX};
use crate::superblock::SEGMENT_NONE;
use crate::{NODE_BLOCKS, UNIT};

const MAGIC: [u8; 8] = *b"BLKYGRP\n";

/// Length of a header without descriptors, in bytes.
pub const HEAD_BYTES: usize = 96;

/// Length of a descriptor, in bytes.
pub const DESCRIPTOR_BYTES: usize = 32;

/// Most descriptors of a group, because a header is read in one piece.
pub const DESCRIPTORS_MAX: usize = 8192;

/// The header of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The first bytes of the pool's identity, so that groups left by another pool are not
    /// accepted.
    pub pool: u64,
    /// The epoch (opening of the pool) in which the group was written.
    pub epoch: u64,
    /// The group's number (LSN). Numbers have no gaps.
    pub number: u64,
    /// The checksum of the previous group's header.
    pub chain: u64,
    /// Groups up to this number were durable when the header was written.
    pub durable: u64,
    /// The segment at whose beginning the log continues, if not directly after this group.
    pub next: u32,
    /// Number of descriptors.
    pub count: u32,
    /// Length of the header including padding, in bytes.
    pub head_bytes: u32,
    /// Length of what follows the header, in bytes.
    pub payload_bytes: u32,
}

/// What a descriptor does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Writes a block; its contents follow the header.
    Data = 1,
    /// Makes blocks zeros.
    Zero = 2,
    /// Changes the catalogue; the encoded change follows the header.
    Catalogue = 3,
    /// Moves a block to another address, in every volume and snapshot of its family (cleaning).
    Move = 4,
}

impl Kind {
    fn from_number(number: u8) -> Option<Kind> {
        let kinds = [Kind::Data, Kind::Zero, Kind::Catalogue, Kind::Move];
        kinds.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// A descriptor: one operation of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The operation.
    pub kind: Kind,
    /// How the stored bytes are compressed.
    pub codec: Codec,
    /// The volume; for a move, the family of volumes that may contain the block.
    pub volume: u32,
    /// For a move: the old address.
    pub from: u64,
    /// For a move: the new address.
    pub to: u64,
    /// The block, or the first of a range.
    pub block: u64,
    /// Length in bytes of the stored contents: of an encrypted block with its padding, of others
    /// without. For zeros, the number of blocks.
    pub len: u32,
    /// Checksum of the stored contents including padding.
    pub crc: u64,
}

impl Descriptor {
    /// Whether the contents may begin at any multiple of [`UNIT`].
    fn is_packed(&self) -> bool {
        self.kind == Kind::Data && self.codec.is_sealed()
    }

    fn print(&self, into: &mut [u8]) {
        into[0] = self.kind as u8;
        into[1] = self.codec as u8;
        put_u32(into, 4, self.volume);
        put_u64(into, 8, self.block);
        put_u32(into, 16, self.len);
        put_u64(into, 24, self.crc);
        if self.kind == Kind::Move {
            let (from, to) = (self.from / UNIT, self.to / UNIT);
            (into[2], into[3]) = ((from >> 32) as u8, (to >> 32) as u8);
            into[13] = (u64::from(self.len) / UNIT).saturating_sub(1) as u8;
            put_u32(into, 16, to as u32);
            put_u32(into, 20, from as u32);
        }
    }

    fn parse(bytes: &[u8]) -> Option<Descriptor> {
        let kind = Kind::from_number(bytes[0])?;
        let codec = Codec::from_number(bytes[1])?;
        let (volume, crc) = (u32_at(bytes, 4), u64_at(bytes, 24));
        if kind == Kind::Move {
            let address =
                |low, high: u8| (u64::from(high) << 32 | u64::from(u32_at(bytes, low))) * UNIT;
            let (from, to) = (address(20, bytes[2]), address(16, bytes[3]));
            let block = u64_at(bytes, 8) & ((1 << MOVED_BLOCK_BITS) - 1);
            let len = (u32::from(bytes[13]) + 1) * UNIT as u32;
            let known = bytes[14..16] == [0; 2] && from < ADDRESS_END && to < ADDRESS_END;
            return known.then_some(Descriptor { kind, codec, volume, from, to, block, len, crc });
        }
        let (block, len) = (u64_at(bytes, 8), u32_at(bytes, 16));
        let longest = match kind {
            Kind::Data => STORED_MAX,
            Kind::Catalogue => CHANGE_BYTES_MAX as u32,
            _ => NODE_BLOCKS as u32,
        };
        let known = bytes[2..4] == [0; 2] && bytes[20..24] == [0; 4];
        let (from, to) = (0, 0);
        (known && (1..=longest).contains(&len)).then_some(Descriptor {
            kind,
            codec,
            volume,
            from,
            to,
            block,
            len,
            crc,
        })
    }
}

/// Finds where the contents of each descriptor are in the payload of a group, from the first
/// descriptor to the last. `align` is the pool's alignment in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Places {
    /// Offset of the end of the contents so far, in bytes.
    end: u64,
}

impl Places {
    /// The place of the next descriptor's contents, with their padding: offset in the payload and
    /// length, in bytes. The length is 0 for a descriptor without contents.
    #[inline]
    pub fn next(&mut self, descriptor: &Descriptor, align: u32) -> (u64, u32) {
        match descriptor.kind {
            Kind::Zero | Kind::Move => (self.end, 0),
            Kind::Data | Kind::Catalogue => {
                let is_packed = descriptor.is_packed();
                let unit = if is_packed { UNIT as u32 } else { align };
                let len = descriptor.len.next_multiple_of(unit);
                (self.add(is_packed, len, align), len)
            }
        }
    }

    /// Adds contents of `bytes` bytes with their padding, and returns their offset in the payload.
    /// `is_packed`: they are encrypted blocks.
    #[inline]
    pub fn add(&mut self, is_packed: bool, bytes: u32, align: u32) -> u64 {
        let at = if is_packed { self.end } else { self.end.next_multiple_of(align.into()) };
        self.end = at + u64::from(bytes);
        at
    }

    /// Offset of the end of the contents so far, in bytes.
    #[inline]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Length of a payload of the contents so far, in bytes, with the padding at its end.
    #[inline]
    pub fn payload_bytes(&self, align: u32) -> u64 {
        self.end.next_multiple_of(align.into())
    }
}

/// Number of bits of a moved block's number.
const MOVED_BLOCK_BITS: u32 = 40;

/// Length of a header with this number of descriptors, in bytes.
#[inline]
pub fn head_bytes(count: usize, align: u32) -> u32 {
    ((HEAD_BYTES + count * DESCRIPTOR_BYTES) as u32).next_multiple_of(align)
}

/// Writes a header, whose length and count must match the descriptors. Returns its checksum.
///
/// # Panics
/// If `bytes` is too short.
pub fn print(head: &Head, descriptors: &[Descriptor], bytes: &mut [u8]) -> u64 {
    let len = head.head_bytes as usize;
    let bytes = &mut bytes[..len];
    bytes.fill(0);
    bytes[..8].copy_from_slice(&MAGIC);
    put_u64(bytes, 16, head.pool);
    put_u64(bytes, 24, head.epoch);
    put_u64(bytes, 32, head.number);
    put_u64(bytes, 40, head.chain);
    put_u64(bytes, 48, head.durable);
    put_u32(bytes, 56, head.next);
    put_u32(bytes, 60, head.count);
    put_u32(bytes, 64, head.head_bytes);
    put_u32(bytes, 68, head.payload_bytes);
    for (index, descriptor) in descriptors.iter().enumerate() {
        descriptor.print(&mut bytes[HEAD_BYTES + index * DESCRIPTOR_BYTES..][..DESCRIPTOR_BYTES]);
    }
    let crc = crc(&bytes[16..]);
    put_u64(bytes, 8, crc);
    crc
}

/// The length that a header states, if these bytes begin with a header; used to read all of it.
#[inline]
pub fn head_len(bytes: &[u8], align: u32) -> Option<usize> {
    if bytes.len() < HEAD_BYTES || bytes[..8] != MAGIC {
        return None;
    }
    let count = u32_at(bytes, 60) as usize;
    let len = u32_at(bytes, 64);
    (count <= DESCRIPTORS_MAX && len == head_bytes(count, align)).then_some(len as usize)
}

/// The number that a header states; the header may be damaged.
#[inline]
pub fn number(bytes: &[u8]) -> u64 {
    u64_at(bytes, 32)
}

/// Parses a whole header. Returns it with its checksum and its descriptors, or `None` if there is
/// no valid header; the end of a log looks like that.
pub fn parse(bytes: &[u8], align: u32) -> Option<(Head, u64, Vec<Descriptor>)> {
    let len = head_len(bytes, align)?;
    let bytes = bytes.get(..len)?;
    let want = u64_at(bytes, 8);
    if crc(&bytes[16..]) != want {
        return None;
    }
    let head = Head {
        pool: u64_at(bytes, 16),
        epoch: u64_at(bytes, 24),
        number: u64_at(bytes, 32),
        chain: u64_at(bytes, 40),
        durable: u64_at(bytes, 48),
        next: u32_at(bytes, 56),
        count: u32_at(bytes, 60),
        head_bytes: u32_at(bytes, 64),
        payload_bytes: u32_at(bytes, 68),
    };
    let parts = bytes[HEAD_BYTES..].chunks_exact(DESCRIPTOR_BYTES).take(head.count as usize);
    let descriptors: Vec<Descriptor> = parts.map(Descriptor::parse).collect::<Option<_>>()?;
    let mut places = Places::default();
    descriptors.iter().for_each(|it| _ = places.next(it, align));
    (places.payload_bytes(align) == u64::from(head.payload_bytes)).then_some((
        head,
        want,
        descriptors,
    ))
}

/// Whether `next` names a segment.
#[inline]
pub fn names_segment(next: u32) -> bool {
    next != SEGMENT_NONE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(block: u64) -> Descriptor {
        let (kind, codec) = (Kind::Data, Codec::Lz4);
        let (volume, from, to) = (3, 0, 0);
        Descriptor { kind, codec, volume, from, to, block, len: 700, crc: block * 7 }
    }

    fn printed(count: u64) -> (Head, Vec<Descriptor>, Vec<u8>) {
        let descriptors: Vec<_> = (0..count).map(descriptor).collect();
        let head = Head {
            pool: 1,
            epoch: 2,
            number: 3,
            chain: 4,
            durable: 2,
            next: SEGMENT_NONE,
            count: count as u32,
            head_bytes: head_bytes(count as usize, 512),
            payload_bytes: count as u32 * 1024,
        };
        let mut bytes = vec![0xff; 1024];
        print(&head, &descriptors, &mut bytes);
        (head, descriptors, bytes)
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        for count in [0, 1, 13, 14, 20] {
            let (head, descriptors, bytes) = printed(count);
            let (read, _, parts) = parse(&bytes, 512).unwrap();
            assert_eq!((read, parts), (head, descriptors), "{count}");
        }
    }

    #[test]
    fn a_move_says_from_where() {
        let (from, to, len) = (ADDRESS_END - 512, ADDRESS_END - 1024, STORED_MAX);
        let moved = Descriptor { kind: Kind::Move, from, to, len, ..descriptor((1 << 40) - 1) };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        moved.print(&mut bytes);
        assert_eq!(Descriptor::parse(&bytes), Some(moved));
        bytes[14] = 1;
        assert_eq!(Descriptor::parse(&bytes), None, "a bit that means nothing");
    }

    #[test]
    fn encrypted_blocks_follow_each_other_in_units() {
        let (align, block) = (4096, descriptor(1));
        let sealed = Descriptor { codec: Codec::SealedRaw, len: 16_896, ..block };
        let small = Descriptor { codec: Codec::SealedLz4, len: 512, ..block };
        let zero = Descriptor { kind: Kind::Zero, ..sealed };
        let change = Descriptor { kind: Kind::Catalogue, len: 4097, ..sealed };
        let mut places = Places::default();
        let found: Vec<_> = [sealed, sealed, block, small, zero, small, change, sealed]
            .iter()
            .map(|it| places.next(it, align))
            .collect();
        let wanted = [
            (0, 16_896),
            (16_896, 16_896),
            (36_864, 4096),
            (40_960, 512),
            (41_472, 0),
            (41_472, 512),
            (45_056, 8192),
            (53_248, 16_896),
        ];
        assert_eq!(found, wanted);
        assert_eq!((places.end(), places.payload_bytes(align)), (70_144, 73_728));
        // Encrypted blocks of version 4 were padded to the alignment.
        let older = Descriptor { len: 20_480, ..sealed };
        let mut places = Places::default();
        let found: Vec<_> = [older, block, older].iter().map(|it| places.next(it, align)).collect();
        assert_eq!(found, [(0, 20_480), (20_480, 4096), (24_576, 20_480)]);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let (head, _, bytes) = printed(2);
        for bit in 0..head.head_bytes as usize * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&flipped, 512).is_none(), "bit {bit}");
        }
        assert!(parse(&bytes[..100], 512).is_none(), "cut short");
        assert!(parse(&[], 512).is_none());
    }
}
