//! A stream of a snapshot: as the product prints it with any fields, or any bytes. An accepted
//! stream is within bounds and in order, and its end comes only after all records.

use blockyard_volume_admin::incoming::{Incoming, Part};
use blockyard_volume_admin::prune::Retention;
use blockyard_volume_format::entry::Codec;
use blockyard_volume_format::key_slot::{Derivation, KeySlot};
use blockyard_volume_format::sealed::{LEN, OVERHEAD, SealedBlock};
use blockyard_volume_format::stream::{
    HEAD_BYTES, Head, Kind, PAYLOAD_MAX, RECORD_BYTES, Record, ResumeToken,
};

use crate::input::Input;

/// Interprets the bytes as a stream, and as the fields of streams.
///
/// # Panics
/// If an inconsistent stream is accepted.
pub fn stream(bytes: &[u8]) {
    read(bytes);
    texts(bytes);
    let mut input = Input::new(bytes);
    let whole = printed(&mut input);
    read(&whole);
    // A flipped bit is detected, and so is a truncation.
    let is_whole = ends(&whole);
    let at = (input.word() % (whole.len() as u64 * 8)) as usize;
    let mut flipped = whole.clone();
    flipped[at / 8] ^= 1 << (at % 8);
    assert!(!is_whole || !ends(&flipped), "bit {at} is flipped");
    assert!(!ends(&whole[..at / 8]), "it is cut at {}", at / 8);
}

/// Interprets the bytes as a token and as a retention. An accepted one prints to the same text, or
/// in the order of the periods.
fn texts(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(token) = text.parse::<ResumeToken>() {
        assert_eq!(token.to_string().parse(), Ok(token));
    }
    if let Ok(retention) = text.parse::<Retention>() {
        assert_eq!(retention.to_string().parse(), Ok(retention));
    }
}

fn ends(bytes: &[u8]) -> bool {
    let mut bytes = bytes;
    let Ok(mut incoming) = Incoming::begin(&mut bytes) else { return false };
    loop {
        match incoming.part() {
            Ok(Part::End) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

fn read(bytes: &[u8]) {
    let mut bytes = bytes;
    let Ok(mut incoming) = Incoming::begin(&mut bytes) else { return };
    let (blocks, size) = (incoming.head.blocks, incoming.head.block_bytes as usize);
    let incoming_is_raw = incoming.head.is_raw();
    assert_eq!(incoming.slot.as_ref().map_or(0, |slot| slot.id), incoming.head.key);
    let mut from = incoming.head.start;
    loop {
        let (first, count) = match incoming.part() {
            Ok(Part::Data { first, bytes }) => {
                assert!(bytes.len() <= PAYLOAD_MAX && bytes.len().is_multiple_of(size));
                (first, (bytes.len() / size) as u64)
            }
            Ok(Part::Sealed { first, count, blocks }) => {
                assert!(incoming_is_raw && blocks.clone().count() as u64 == count);
                for block in blocks {
                    let len = block.bytes().len() - OVERHEAD;
                    assert!(block.codec().is_sealed() && len <= size);
                    let stored = SealedBlock::of_stored(block.codec(), block.bytes(), size as u32);
                    assert_eq!(stored, Some(block));
                }
                (first, count)
            }
            Ok(Part::Zeros { first, count }) => (first, count),
            Ok(Part::End) | Err(_) => return,
        };
        assert!(count > 0 && first >= from && first + count <= blocks);
        from = first + count;
    }
}

/// A stream with valid checksums and any fields.
fn printed(input: &mut Input<'_>) -> Vec<u8> {
    let head = Head {
        block_bytes: input.choose(&[4096, 512, 65_536, 0, 513]),
        blocks: input.choose(&[1, 40, 1 << 40, 0, u64::MAX]),
        guid: input.below(3),
        name: input.choose(&["v0@a", "v0@a", "v0@a", "\u{1b}"]).to_owned(),
        base: (input.below(2) == 1).then(|| (input.below(3), "v0@b".to_owned())),
        created: input.choose(&[0, 1, u64::MAX]),
        start: input.choose(&[0, 0, 3, u64::MAX]),
        is_followed: input.below(4) == 1,
        is_clone: input.below(4) == 1,
        key: input.choose(&[0, 0, 5, 6]),
    };
    let bytes: [u8; HEAD_BYTES] = head.print();
    let mut chain = Head::chain(&bytes);
    let mut out = bytes.to_vec();
    for number in 0..=input.below(5) {
        let kind = match (head.is_raw(), number) {
            (true, 0) if input.below(8) > 0 => Kind::Key,
            (true, _) => {
                input.choose(&[Kind::Sealed, Kind::Sealed, Kind::Zeros, Kind::End, Kind::Key])
            }
            (false, _) => {
                input.choose(&[Kind::Data, Kind::Zeros, Kind::Compressed, Kind::End, Kind::Sealed])
            }
        };
        let count = input.choose(&[1, 2, 0, u64::MAX, 1 << 39]);
        let first = input.choose(&[0, number * 4, head.blocks, u64::MAX]);
        let wanted = match kind {
            Kind::Data => count.wrapping_mul(head.block_bytes.into()),
            Kind::Compressed => 99,
            Kind::Zeros | Kind::End | Kind::Key | Kind::Sealed => 0,
        };
        let payload = match kind {
            Kind::Key => key_slot(input),
            Kind::Sealed => sealed(input, count, head.block_bytes),
            _ => vec![7; wanted.min(1 << 18) as usize],
        };
        let (first, count) = match kind {
            Kind::Key if input.below(8) > 0 => (head.start, 0),
            _ => (first, count),
        };
        let len = if input.below(8) == 0 { input.word() as u32 } else { payload.len() as u32 };
        let number = if input.below(16) == 0 { input.word() } else { number };
        let mut bytes = [0; RECORD_BYTES];
        chain = Record { kind, len, first, count, number }.print(chain, &payload, &mut bytes);
        out.extend(bytes);
        out.extend(payload);
        if kind == Kind::End {
            break;
        }
    }
    out
}

/// The key slot of a raw stream, in most cases of the key that its head names.
fn key_slot(input: &mut Input<'_>) -> Vec<u8> {
    let memory_kib = input.choose(&[65_536, 7, u32::MAX]);
    let derivation =
        input.choose(&[Derivation::Hkdf, Derivation::Argon2id { memory_kib, passes: 3, lanes: 1 }]);
    let mut slot = Vec::new();
    let id = input.choose(&[5, 5, 6, 0]);
    KeySlot { id, derivation, salt: [1; 16], wrapped: [2; 48] }.print(&mut slot);
    slot
}

/// Encrypted blocks of any codec and length.
fn sealed(input: &mut Input<'_>, count: u64, block_bytes: u32) -> Vec<u8> {
    let mut payload = Vec::new();
    for _ in 0..count.min(3) {
        let codec =
            input.choose(&[Codec::SealedRaw, Codec::SealedLz4, Codec::SealedZstd, Codec::Raw]);
        let len = input.choose(&[block_bytes, 100, 0, block_bytes - block_bytes.min(1), u32::MAX]);
        let mut stored = vec![3; OVERHEAD + len.min(1 << 16) as usize];
        stored[LEN..LEN + 4].copy_from_slice(&len.to_le_bytes());
        payload.push(codec as u8);
        payload.extend(stored);
    }
    payload
}
