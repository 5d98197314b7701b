//! The catalogue: the volumes and snapshots of a pool, each with its map. Part of every checkpoint;
//! changes between two checkpoints are in the log, in one order with the writes.
//!
//! It is one string of bytes, in pages below a tree of pages: see [`crate::roots`]. What changes at
//! each checkpoint stands behind what does not, so that most of its pages stay where they are.

use std::collections::HashSet;

use super::entry::{ENTRY_BYTES, Entry};
use super::{BLOCK_BYTES_MAX, FAN, NODE_BLOCKS, UNIT};
use crate::bytes::Reader;
use crate::error::FormatError;

const WHAT: &str = "catalogue";
const MAGIC: [u8; 8] = *b"BLKYCAT\n";

/// Longest name, in bytes.
pub const NAME_MAX: usize = 200;

/// Longest name of a volume that is made, in bytes: a device's name is no longer.
pub const VOLUME_NAME_MAX: usize = 64;

/// Most volumes and snapshots.
pub const VOLUMES_MAX: usize = 1 << 20;

/// What a catalogue has of a volume beside its name and its roots, in bytes.
const LISTED_FIXED_BYTES: usize = 54;

/// Most blocks of a volume.
pub const BLOCKS_MAX: u64 = 1 << 40;

/// Longest catalogue that is read, in bytes.
pub const CATALOGUE_BYTES_MAX: u64 = 1 << 30;

/// What all volumes and snapshots may take of it: the rest is for what it says of segments.
pub const LISTED_BYTES_MAX: u64 = CATALOGUE_BYTES_MAX / 2;

/// What is known of a volume or snapshot beside its map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traits {
    /// Its number, never used again.
    pub id: u32,
    /// Its name; a snapshot's has a `@`.
    pub name: String,
    /// Whether it never changes.
    pub is_snapshot: bool,
    /// What it was made from; 0: from nothing.
    pub origin: u32,
    /// Length of a block in bytes.
    pub block_bytes: u32,
    /// How many blocks it has.
    pub blocks: u64,
    /// The identity of a snapshot, which it keeps where it is received; 0: none.
    pub guid: u64,
    /// Bytes that it is promised, before compression.
    pub reserved_bytes: u64,
}

impl Traits {
    /// How many nodes its map has at most.
    pub fn node_count(&self) -> usize {
        self.blocks.div_ceil(NODE_BLOCKS) as usize
    }

    /// How many roots, which name nodes, its map has at most.
    pub fn root_count(&self) -> usize {
        self.node_count().div_ceil(FAN)
    }

    /// How many bytes a catalogue has of it at most.
    pub fn listed_bytes(&self) -> u64 {
        (LISTED_FIXED_BYTES + NAME_MAX + self.root_count() * ENTRY_BYTES) as u64
    }

    /// Its capacity in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// Appends it.
    pub fn print(&self, out: &mut Vec<u8>) {
        out.extend(self.id.to_le_bytes());
        out.extend(self.origin.to_le_bytes());
        out.extend(self.block_bytes.to_le_bytes());
        out.extend(self.blocks.to_le_bytes());
        out.extend(self.guid.to_le_bytes());
        out.extend(self.reserved_bytes.to_le_bytes());
        out.push(u8::from(self.is_snapshot));
        out.push(self.name.len() as u8);
        out.extend(self.name.as_bytes());
    }

    /// Reads it.
    ///
    /// # Errors
    /// If it is cut short, or impossible.
    pub fn parse(reader: &mut Reader<'_>) -> Result<Traits, FormatError> {
        let traits = Traits::take(reader).ok_or(FormatError::Short { what: WHAT, len: 0 })?;
        let impossible = |field, value, want| FormatError::Field { what: WHAT, field, value, want };
        let Traits { block_bytes, blocks, .. } = traits;
        if !block_bytes.is_power_of_two() || !(512..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(impossible("block_bytes", block_bytes.into(), "512 to 64k"));
        }
        if !(1..=BLOCKS_MAX).contains(&blocks) {
            return Err(impossible("blocks", blocks, "1 to 2^40"));
        }
        if traits.id == 0 {
            return Err(impossible("id", 0, "at least 1"));
        }
        if traits.reserved_bytes > traits.size_bytes() {
            return Err(impossible("reserved_bytes", traits.reserved_bytes, "its size at most"));
        }
        Ok(traits)
    }

    fn take(reader: &mut Reader<'_>) -> Option<Traits> {
        let (id, origin, block_bytes) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (blocks, guid, reserved_bytes) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let is_snapshot = reader.u8()? == 1;
        let len = reader.u8()? as usize;
        let name = String::from_utf8(reader.take(len)?.to_vec()).ok()?;
        Some(Traits { id, name, is_snapshot, origin, block_bytes, blocks, guid, reserved_bytes })
    }
}

/// Whether a volume or a snapshot may have this name in a pool: letters, digits, `-`, `_`, `.`,
/// `:`, `+` and, for a snapshot, one `@`.
///
/// A volume that is made must have a name that a device can have too: [`is_volume_name`].
pub fn is_name(name: &str) -> bool {
    let fits = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:+".contains(&byte))
    };
    name.len() <= NAME_MAX && name.splitn(2, '@').all(fits)
}

/// Whether a volume may be made with this name: it is the name of the device too.
pub fn is_volume_name(name: &str) -> bool {
    name.len() <= VOLUME_NAME_MAX
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// A change of the catalogue, as the log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A volume of zeros.
    Create(Traits),
    /// A volume or snapshot with the contents that its origin has at this moment.
    Copy(Traits),
    /// A volume or snapshot is no more.
    Destroy {
        /// Which.
        id: u32,
    },
    /// A volume has the contents of a snapshot again.
    Rollback {
        /// The volume.
        id: u32,
        /// The snapshot.
        to: u32,
    },
    /// A volume has another length.
    Resize {
        /// Which.
        id: u32,
        /// Its length in blocks.
        blocks: u64,
    },
    /// A volume is promised so much space.
    Reserve {
        /// Which.
        id: u32,
        /// Bytes, before compression.
        bytes: u64,
    },
    /// Several changes one after the other, all of them or none. None of them is such a list.
    Several(Vec<Change>),
}

/// Most changes of [`Change::Several`].
const SEVERAL_MAX: usize = 8;

/// Longest change, in bytes.
pub const CHANGE_BYTES_MAX: usize = 2048;

impl Change {
    /// Its bytes.
    pub fn print(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Change::Create(traits) => {
                out.push(1);
                traits.print(&mut out);
            }
            Change::Copy(traits) => {
                out.push(2);
                traits.print(&mut out);
            }
            Change::Destroy { id } => {
                out.push(3);
                out.extend(id.to_le_bytes());
            }
            Change::Rollback { id, to } => {
                out.push(4);
                out.extend(id.to_le_bytes());
                out.extend(to.to_le_bytes());
            }
            Change::Resize { id, blocks } => {
                out.push(5);
                out.extend(id.to_le_bytes());
                out.extend(blocks.to_le_bytes());
            }
            Change::Reserve { id, bytes } => {
                out.push(7);
                out.extend(id.to_le_bytes());
                out.extend(bytes.to_le_bytes());
            }
            Change::Several(changes) => {
                out.extend([6, changes.len() as u8]);
                for change in changes {
                    let bytes = change.print();
                    out.extend((bytes.len() as u16).to_le_bytes());
                    out.extend(bytes);
                }
            }
        }
        out
    }

    /// Reads it.
    ///
    /// # Errors
    /// If it is cut short, or impossible.
    pub fn parse(bytes: &[u8]) -> Result<Change, FormatError> {
        let mut reader = Reader::new(bytes);
        let short =
            || FormatError::Short { what: "change of the catalogue", len: bytes.len() as u64 };
        match reader.u8().ok_or_else(short)? {
            1 => Ok(Change::Create(Traits::parse(&mut reader)?)),
            2 => Ok(Change::Copy(Traits::parse(&mut reader)?)),
            3 => Ok(Change::Destroy { id: reader.u32().ok_or_else(short)? }),
            4 => {
                let (id, to) = (reader.u32(), reader.u32());
                Ok(Change::Rollback { id: id.ok_or_else(short)?, to: to.ok_or_else(short)? })
            }
            5 => {
                let (id, blocks) = (reader.u32(), reader.u64());
                let blocks = blocks.ok_or_else(short)?;
                if !(1..=BLOCKS_MAX).contains(&blocks) {
                    let (what, field, want) = ("change of the catalogue", "blocks", "1 to 2^40");
                    return Err(FormatError::Field { what, field, value: blocks, want });
                }
                Ok(Change::Resize { id: id.ok_or_else(short)?, blocks })
            }
            6 => {
                let count = usize::from(reader.u8().ok_or_else(short)?);
                let impossible = |value| {
                    let (what, field) = ("change of the catalogue", "several");
                    FormatError::Field { what, field, value, want: "1 to 8 changes" }
                };
                if !(1..=SEVERAL_MAX).contains(&count) {
                    return Err(impossible(count as u64));
                }
                let mut changes = Vec::with_capacity(count);
                for _ in 0..count {
                    let len = usize::from(reader.u16().ok_or_else(short)?);
                    let bytes = reader.take(len).ok_or_else(short)?;
                    if bytes.first() == Some(&6) {
                        return Err(impossible(6));
                    }
                    changes.push(Change::parse(bytes)?);
                }
                Ok(Change::Several(changes))
            }
            7 => {
                let (id, bytes) = (reader.u32(), reader.u64());
                let (id, bytes) = (id.ok_or_else(short)?, bytes.ok_or_else(short)?);
                Ok(Change::Reserve { id, bytes })
            }
            other => Err(FormatError::Field {
                what: "change of the catalogue",
                field: "kind",
                value: other.into(),
                want: "1 to 7",
            }),
        }
    }
}

/// What a catalogue says of the whole pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whole {
    /// The next number to give away.
    pub next_id: u32,
    /// How many copies of maps have been made.
    pub copies: u32,
    /// Of each segment how many bytes of blocks count at most.
    pub live: Vec<u64>,
    /// Bytes of them that may not count any more.
    pub unknown_bytes: u64,
}

/// Most segments: as many as addresses can name.
const SEGMENTS_MAX: u32 = 1 << 26;

impl Whole {
    fn print(&self, out: &mut Vec<u8>) {
        out.extend(self.next_id.to_le_bytes());
        out.extend(self.copies.to_le_bytes());
        out.extend(self.unknown_bytes.to_le_bytes());
        out.extend((self.live.len() as u32).to_le_bytes());
        for bytes in &self.live {
            out.extend(((bytes / UNIT) as u32).to_le_bytes());
        }
    }

    fn parse(reader: &mut Reader<'_>) -> Option<Whole> {
        let (next_id, copies) = (reader.u32()?, reader.u32()?);
        let (unknown_bytes, count) = (reader.u64()?, reader.u32()?);
        if count > SEGMENTS_MAX || reader.left() / 4 < count as usize {
            return None;
        }
        let bytes = |_| Some(u64::from(reader.u32()?) * UNIT);
        let live = (0..count).map(bytes).collect::<Option<_>>()?;
        Some(Whole { next_id, copies, live, unknown_bytes })
    }
}

/// A volume or snapshot and where the roots of its map are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// What it is.
    pub traits: Traits,
    /// The number of the volume that it and all that share blocks with it come from.
    pub family: u32,
    /// How many copies of maps had been made when its map was copied last.
    pub copied: u32,
    /// Blocks that are its alone, at least.
    pub owned: u64,
    /// Its roots; as many as it can have.
    pub roots: Vec<Entry>,
}

/// Writes a catalogue.
pub fn print(whole: &Whole, volumes: &[Listed]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend((volumes.len() as u32).to_le_bytes());
    for Listed { traits, family, copied, owned, roots } in volumes {
        traits.print(&mut out);
        out.extend(family.to_le_bytes());
        out.extend(copied.to_le_bytes());
        out.extend(owned.to_le_bytes());
        for root in roots {
            let mut bytes = [0; ENTRY_BYTES];
            root.print(&mut bytes);
            out.extend(bytes);
        }
    }
    whole.print(&mut out);
    out
}

/// Reads a catalogue: what it says of the pool, and what there is.
///
/// # Errors
/// If it is cut short, or impossible.
pub fn parse(bytes: &[u8]) -> Result<(Whole, Vec<Listed>), FormatError> {
    let short = || FormatError::Short { what: WHAT, len: bytes.len() as u64 };
    let mut reader = Reader::new(bytes);
    if reader.take(8).ok_or_else(short)? != MAGIC {
        return Err(FormatError::Magic { what: WHAT });
    }
    let count = reader.u32().ok_or_else(short)?;
    if count as usize > VOLUMES_MAX {
        let value = u64::from(count);
        return Err(FormatError::Field { what: WHAT, field: "count", value, want: "2^20 at most" });
    }
    let mut volumes: Vec<Listed> = Vec::new();
    for _ in 0..count {
        let traits = Traits::parse(&mut reader)?;
        let family = reader.u32().ok_or_else(short)?;
        let copied = reader.u32().ok_or_else(short)?;
        let owned = reader.u64().ok_or_else(short)?;
        let count = traits.root_count();
        // What is there bounds what is asked for.
        if reader.left() / ENTRY_BYTES < count {
            return Err(short());
        }
        let mut roots = Vec::with_capacity(count);
        for _ in 0..count {
            let entry = Entry::parse(reader.take(ENTRY_BYTES).ok_or_else(short)?);
            roots.push(entry.ok_or(FormatError::Field {
                what: WHAT,
                field: "root",
                value: traits.id.into(),
                want: "a place on disk",
            })?);
        }
        volumes.push(Listed { traits, family, copied, owned, roots });
    }
    let whole = Whole::parse(&mut reader).ok_or_else(short)?;
    let mut ids = HashSet::new();
    for Listed { traits: Traits { id, .. }, .. } in &volumes {
        // The next volume would take the place of one that is there.
        if *id >= whole.next_id || !ids.insert(*id) {
            let (field, value) = ("id", u64::from(*id));
            let want = "one of its own, below the next one";
            return Err(FormatError::Field { what: WHAT, field, value, want });
        }
    }
    Ok((whole, volumes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::Codec;

    fn traits(id: u32, name: &str) -> Traits {
        Traits {
            id,
            name: name.to_owned(),
            is_snapshot: name.contains('@'),
            origin: 0,
            block_bytes: 4096,
            blocks: 70_000 << 8,
            guid: 5,
            reserved_bytes: 1 << 20,
        }
    }

    #[test]
    fn what_is_printed_is_read_back() {
        let roots = vec![Entry::new(4096, 4096, Codec::Raw, 3), Entry::HOLE];
        let volumes = [(4, "v0"), (8, "v0@monday")].map(|(id, name)| Listed {
            traits: traits(id, name),
            family: 2,
            copied: 3,
            owned: 77,
            roots: roots.clone(),
        });
        let live = vec![0, 4096, 1 << 30];
        let whole = Whole { next_id: 9, copies: 7, live, unknown_bytes: 5 };
        let bytes = print(&whole, &volumes);
        assert_eq!(parse(&bytes), Ok((whole, volumes.to_vec())));
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len}");
        }
        for (next_id, second) in [(9, 4), (8, 8)] {
            let (mut whole, mut volumes) = (Whole::default(), volumes.clone());
            (whole.next_id, volumes[1].traits.id) = (next_id, second);
            let wrong = parse(&print(&whole, &volumes)).unwrap_err();
            assert!(matches!(wrong, FormatError::Field { field: "id", .. }), "{wrong}");
        }
        for change in [
            Change::Create(traits(1, "a")),
            Change::Copy(traits(2, "a@b")),
            Change::Destroy { id: 3 },
            Change::Rollback { id: 1, to: 2 },
            Change::Resize { id: 1, blocks: 5 },
            Change::Reserve { id: 1, bytes: 1 << 40 },
            Change::Several(vec![Change::Create(traits(1, "a")), Change::Destroy { id: 3 }]),
        ] {
            assert_eq!(Change::parse(&change.print()), Ok(change));
        }
        assert!(Change::parse(&[]).is_err() && Change::parse(&[9]).is_err());
        let nested = Change::Several(vec![Change::Several(vec![Change::Destroy { id: 3 }])]);
        for wrong in [nested, Change::Several(vec![])] {
            assert!(Change::parse(&wrong.print()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn names_are_short_and_plain() {
        for name in ["v0", "a-b_c.d", "v0@2026-11-21", "x:y", "v0@2026-11-23T10:00:00+01:00"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["v0", "0", "a-b_c.d", &"x".repeat(VOLUME_NAME_MAX)] {
            assert!(is_volume_name(name) && is_name(name), "{name}");
        }
        for name in ["", ".a", "-a", "_a", "a:b", "a+b", "a@b", "\u{e9}", &"x".repeat(65)] {
            assert!(!is_volume_name(name), "{name}");
        }
        for name in ["", "@", "v0@", "@x", "a/b", ".hidden", "a b", "a@b@c", &"x".repeat(201)] {
            assert!(!is_name(name), "{name}");
        }
    }
}
