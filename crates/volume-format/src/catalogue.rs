//! The catalogue: the volumes and snapshots of a pool, each with the roots of its map. Every
//! checkpoint contains it. Changes between two checkpoints are in the log, ordered with the writes.
//!
//! The catalogue is one string of bytes, stored in pages below a tree of pages. The part that
//! changes at each checkpoint is at the end, so that most pages need not be rewritten.

use std::collections::HashSet;

use crate::bytes::Reader;
use crate::entry::{ENTRY_BYTES, Entry};
use crate::error::FormatError;
use crate::key_slot::{KEY_SLOT_BYTES, KeySlot};
use crate::properties::Properties;
use crate::{BLOCK_BYTES_MAX, FAN, NODE_BLOCKS, PAGE_BYTES, UNIT};

const WHAT: &str = "catalogue";
const MAGIC: [u8; 8] = *b"BLKYCA4\n";

/// The magic number of a catalogue of format version 3, which has no creation times, no holds and
/// no scrub.
const MAGIC_V3: [u8; 8] = *b"BLKYCAT\n";

/// The layout of a catalogue, or of a change of it in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CatalogueLayout {
    /// Of format version 3.
    V3,
    /// The one that is written.
    V4,
}

/// Longest name, in bytes.
pub const NAME_MAX: usize = 200;

/// Longest name of a new volume, in bytes, equal to that of a device.
pub const VOLUME_NAME_MAX: usize = 64;

/// Most volumes and snapshots.
pub const VOLUMES_MAX: usize = 1 << 20;

/// Most bytes that the catalogue has of a volume, without its name, its holds and its roots.
const LISTED_FIXED_BYTES: usize = 71 + Properties::BYTES_MAX;

/// Longest tag of a hold, in bytes.
pub const TAG_MAX: usize = 64;

/// Most holds of a snapshot.
pub const HOLDS_MAX: usize = 32;

/// Most blocks of a volume.
pub const BLOCKS_MAX: u64 = 1 << 40;

/// Longest catalogue that is read, in bytes.
pub const CATALOGUE_BYTES_MAX: u64 = 1 << 30;

/// Most bytes of the catalogue for all volumes and snapshots; the rest is for the segments.
pub const LISTED_BYTES_MAX: u64 = CATALOGUE_BYTES_MAX / 2;

/// Properties of a volume or snapshot, without its map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeMeta {
    /// The number of the volume or snapshot, never reused.
    pub id: u32,
    /// The name; that of a snapshot contains `@`.
    pub name: String,
    /// Whether this is a snapshot, which never changes.
    pub is_snapshot: bool,
    /// The number of the volume or snapshot that it was copied from; 0: none.
    pub origin: u32,
    /// Length of a block in bytes.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// The identity of a snapshot, which `receive` preserves. For a volume, how often its contents
    /// were replaced, by a rollback, a received increment, or a shrink.
    pub guid: u64,
    /// The reservation in bytes, before compression.
    pub reserved_bytes: u64,
    /// When it was created, in seconds since 1970 (UTC); 0: unknown, a program of format version 3
    /// created it.
    pub created: u64,
    /// The identity of the key by which its blocks are encrypted; 0: they are not.
    pub key: u64,
}

impl VolumeMeta {
    /// The most nodes that the map has.
    pub fn node_count(&self) -> usize {
        self.blocks.div_ceil(NODE_BLOCKS) as usize
    }

    /// The most roots, which name nodes, that the map has.
    pub fn root_count(&self) -> usize {
        self.node_count().div_ceil(FAN)
    }

    /// The most bytes that the catalogue has of the volume, without its holds.
    pub fn listed_bytes(&self) -> u64 {
        let key = if self.key == 0 { 0 } else { KEY_SLOT_BYTES };
        (LISTED_FIXED_BYTES + key + NAME_MAX + self.root_count() * ENTRY_BYTES) as u64
    }

    /// The most bytes that a stored block takes. An encrypted block that does not compress takes a
    /// unit of alignment more than its length, at most a page.
    pub fn stored_block_max(&self) -> u64 {
        let more = if self.key == 0 { 0 } else { PAGE_BYTES as u64 };
        u64::from(self.block_bytes) + more
    }

    /// The most bytes that blocks of `bytes` bytes take when they are stored.
    pub fn stored_max(&self, bytes: u64) -> u64 {
        let more = self.stored_block_max() - u64::from(self.block_bytes);
        bytes.saturating_add((bytes / u64::from(self.block_bytes)).saturating_mul(more))
    }

    /// The capacity in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// Appends the encoded properties.
    pub fn print(&self, out: &mut Vec<u8>) {
        out.extend(self.id.to_le_bytes());
        out.extend(self.origin.to_le_bytes());
        out.extend(self.block_bytes.to_le_bytes());
        out.extend(self.blocks.to_le_bytes());
        out.extend(self.guid.to_le_bytes());
        out.extend(self.reserved_bytes.to_le_bytes());
        out.extend(self.created.to_le_bytes());
        out.extend(self.key.to_le_bytes());
        out.push(u8::from(self.is_snapshot));
        out.push(self.name.len() as u8);
        out.extend(self.name.as_bytes());
    }

    /// Parses the properties.
    ///
    /// # Errors
    /// If the bytes end too early, or a field has an invalid value.
    pub fn parse(reader: &mut Reader<'_>) -> Result<VolumeMeta, FormatError> {
        VolumeMeta::parse_as(reader, CatalogueLayout::V4)
    }

    fn parse_as(
        reader: &mut Reader<'_>,
        layout: CatalogueLayout,
    ) -> Result<VolumeMeta, FormatError> {
        let meta =
            VolumeMeta::take(reader, layout).ok_or(FormatError::Short { what: WHAT, len: 0 })?;
        let impossible = |field, value, want| FormatError::Field { what: WHAT, field, value, want };
        let VolumeMeta { block_bytes, blocks, .. } = meta;
        if !block_bytes.is_power_of_two() || !(512..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(impossible("block_bytes", block_bytes.into(), "512 to 64k"));
        }
        if !(1..=BLOCKS_MAX).contains(&blocks) {
            return Err(impossible("blocks", blocks, "1 to 2^40"));
        }
        if meta.id == 0 {
            return Err(impossible("id", 0, "at least 1"));
        }
        if meta.reserved_bytes > meta.size_bytes() {
            return Err(impossible("reserved_bytes", meta.reserved_bytes, "its size at most"));
        }
        Ok(meta)
    }

    fn take(reader: &mut Reader<'_>, layout: CatalogueLayout) -> Option<VolumeMeta> {
        let (id, origin, block_bytes) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (blocks, guid, reserved_bytes) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let created = if layout == CatalogueLayout::V3 { 0 } else { reader.u64()? };
        let key = if layout == CatalogueLayout::V3 { 0 } else { reader.u64()? };
        let is_snapshot = reader.u8()? == 1;
        let len = reader.u8()? as usize;
        let name = String::from_utf8(reader.take(len)?.to_vec()).ok()?;
        Some(VolumeMeta {
            id,
            name,
            is_snapshot,
            origin,
            block_bytes,
            blocks,
            guid,
            reserved_bytes,
            created,
            key,
        })
    }
}

/// A hold: a snapshot that has one cannot be destroyed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The name of the hold.
    pub tag: String,
    /// When the snapshot was held, in seconds since 1970 (UTC).
    pub created: u64,
}

impl Hold {
    /// The most bytes that the catalogue has of a hold.
    pub const BYTES_MAX: usize = 9 + TAG_MAX;

    fn print(&self, out: &mut Vec<u8>) {
        out.extend(self.created.to_le_bytes());
        print_text(&self.tag, out);
    }

    fn take(reader: &mut Reader<'_>) -> Option<Hold> {
        let (created, tag) = (reader.u64()?, take_text(reader)?);
        is_tag(&tag).then_some(Hold { tag, created })
    }
}

/// Whether this is a valid tag of a hold.
pub fn is_tag(tag: &str) -> bool {
    tag.len() <= TAG_MAX && !tag.contains('@') && is_name(tag)
}

/// The last scrub of a pool that was completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubRecord {
    /// When it ended, in seconds since 1970 (UTC).
    pub ended: u64,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
    /// Bytes of blocks that it verified, as stored.
    pub verified_bytes: u64,
    /// Blocks and map pages that are damaged.
    pub damaged: u64,
    /// Blocks and map pages that it repaired from the other copy.
    pub repaired: u64,
}

impl ScrubRecord {
    fn print(&self, out: &mut Vec<u8>) {
        let ScrubRecord { ended, duration_ms, verified_bytes, damaged, repaired } = *self;
        for field in [ended, duration_ms, verified_bytes, damaged, repaired] {
            out.extend(field.to_le_bytes());
        }
    }

    fn take(reader: &mut Reader<'_>) -> Option<ScrubRecord> {
        Some(ScrubRecord {
            ended: reader.u64()?,
            duration_ms: reader.u64()?,
            verified_bytes: reader.u64()?,
            damaged: reader.u64()?,
            repaired: reader.u64()?,
        })
    }
}

/// Whether this is a valid name of a volume or snapshot in a pool: letters, digits, `-`, `_`, `.`,
/// `:`, `+` and, for a snapshot, one `@`.
///
/// The name of a new volume must be valid for a device too: [`is_volume_name`].
pub fn is_name(name: &str) -> bool {
    let fits = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:+".contains(&byte))
    };
    name.len() <= NAME_MAX && name.splitn(2, '@').all(fits)
}

/// Whether this is a valid name of a new volume, which is also the name of its device.
pub fn is_volume_name(name: &str) -> bool {
    name.len() <= VOLUME_NAME_MAX
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// A change of the catalogue, as it is recorded in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Makes a volume of zeros.
    Create(VolumeMeta),
    /// Makes a volume or snapshot with the current contents of its origin.
    Copy(VolumeMeta),
    /// Destroys a volume or snapshot.
    Destroy {
        /// The number of the volume or snapshot.
        id: u32,
    },
    /// Restores a volume to the contents of a snapshot.
    Rollback {
        /// The number of the volume.
        id: u32,
        /// The number of the snapshot.
        to: u32,
    },
    /// Changes the length of a volume.
    Resize {
        /// The number of the volume.
        id: u32,
        /// The new length in blocks.
        blocks: u64,
    },
    /// Changes the reservation of a volume.
    Reserve {
        /// The number of the volume.
        id: u32,
        /// The new reservation in bytes, before compression.
        bytes: u64,
    },
    /// Records a scrub that was completed.
    Scrubbed(ScrubRecord),
    /// Renames a volume with its snapshots, or a snapshot.
    Rename {
        /// The number of the volume or snapshot.
        id: u32,
        /// The new name.
        name: String,
    },
    /// Makes a snapshot of each volume at one moment.
    SnapshotAll {
        /// The number of the first snapshot; those of the other volumes follow, in order of the
        /// volumes' numbers.
        first_id: u32,
        /// The part of the names after the `@`.
        snapshot: String,
        /// When they were created, in seconds since 1970 (UTC).
        created: u64,
        /// The identities of the snapshots follow from this random number.
        seed: u64,
    },
    /// Exchanges a clone and the volume whose snapshot it was cloned from: the clone gets that
    /// snapshot and the older ones, and the volume becomes a clone of it.
    Promote {
        /// The number of the clone.
        id: u32,
    },
    /// Holds a snapshot.
    Hold {
        /// The number of the snapshot.
        id: u32,
        /// The hold.
        hold: Hold,
    },
    /// Releases a hold of a snapshot.
    Release {
        /// The number of the snapshot.
        id: u32,
        /// The tag of the hold.
        tag: String,
    },
    /// Adds the slot of a key, or replaces it by one for another secret.
    PutKey(KeySlot),
    /// Sets properties of a volume; the others stay.
    Set {
        /// The number of the volume.
        id: u32,
        /// The properties that are set.
        properties: Properties,
    },
    /// Several changes in order, all or none. They cannot be nested.
    Several(Vec<Change>),
}

/// Most changes of [`Change::Several`].
pub const SEVERAL_MAX: usize = 8;

/// Longest change, in bytes.
pub const CHANGE_BYTES_MAX: usize = 2048;

impl Change {
    /// The encoded change.
    pub fn print(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Change::Create(meta) => {
                out.push(8);
                meta.print(&mut out);
            }
            Change::Copy(meta) => {
                out.push(9);
                meta.print(&mut out);
            }
            Change::Destroy { id } => print_id(3, *id, &mut out),
            Change::Rollback { id, to } => {
                print_id(4, *id, &mut out);
                out.extend(to.to_le_bytes());
            }
            Change::Resize { id, blocks } => {
                print_id(5, *id, &mut out);
                out.extend(blocks.to_le_bytes());
            }
            Change::Reserve { id, bytes } => {
                print_id(7, *id, &mut out);
                out.extend(bytes.to_le_bytes());
            }
            Change::Scrubbed(scrub) => {
                out.push(10);
                scrub.print(&mut out);
            }
            Change::Rename { id, name } => {
                print_id(11, *id, &mut out);
                print_text(name, &mut out);
            }
            Change::SnapshotAll { first_id, snapshot, created, seed } => {
                print_id(12, *first_id, &mut out);
                out.extend(created.to_le_bytes());
                out.extend(seed.to_le_bytes());
                print_text(snapshot, &mut out);
            }
            Change::Promote { id } => print_id(13, *id, &mut out),
            Change::Hold { id, hold } => {
                print_id(14, *id, &mut out);
                hold.print(&mut out);
            }
            Change::Release { id, tag } => {
                print_id(15, *id, &mut out);
                print_text(tag, &mut out);
            }
            Change::PutKey(slot) => {
                out.push(16);
                slot.print(&mut out);
            }
            Change::Set { id, properties } => {
                print_id(17, *id, &mut out);
                properties.print(&mut out);
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

    /// Parses a change.
    ///
    /// # Errors
    /// If the bytes end too early, or a field has an invalid value.
    pub fn parse(bytes: &[u8]) -> Result<Change, FormatError> {
        let mut reader = Reader::new(bytes);
        let short =
            || FormatError::Short { what: "change of the catalogue", len: bytes.len() as u64 };
        match reader.u8().ok_or_else(short)? {
            1 => Ok(Change::Create(VolumeMeta::parse_as(&mut reader, CatalogueLayout::V3)?)),
            2 => Ok(Change::Copy(VolumeMeta::parse_as(&mut reader, CatalogueLayout::V3)?)),
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
            8 => Ok(Change::Create(VolumeMeta::parse(&mut reader)?)),
            9 => Ok(Change::Copy(VolumeMeta::parse(&mut reader)?)),
            10 => Ok(Change::Scrubbed(ScrubRecord::take(&mut reader).ok_or_else(short)?)),
            kind @ 11..=15 => Change::parse_named(kind, &mut reader).ok_or_else(short),
            16 => Ok(Change::PutKey(KeySlot::parse(&mut reader)?)),
            17 => Change::parse_named(17, &mut reader).ok_or_else(short),
            other => Err(FormatError::Field {
                what: "change of the catalogue",
                field: "kind",
                value: other.into(),
                want: "1 to 17",
            }),
        }
    }

    /// Parses a change of names, holds or properties; `None` if the bytes end too early, or one of
    /// them is invalid.
    fn parse_named(kind: u8, reader: &mut Reader<'_>) -> Option<Change> {
        let id = reader.u32()?;
        match kind {
            11 => {
                let name = take_text(reader).filter(|name| is_name(name))?;
                Some(Change::Rename { id, name })
            }
            12 => {
                let (created, seed) = (reader.u64()?, reader.u64()?);
                let is_part = |text: &String| is_name(text) && !text.contains('@');
                let snapshot = take_text(reader).filter(is_part)?;
                Some(Change::SnapshotAll { first_id: id, snapshot, created, seed })
            }
            13 => Some(Change::Promote { id }),
            14 => Some(Change::Hold { id, hold: Hold::take(reader)? }),
            17 => Some(Change::Set { id, properties: Properties::take(reader)? }),
            _ => {
                let tag = take_text(reader).filter(|tag| is_tag(tag))?;
                Some(Change::Release { id, tag })
            }
        }
    }
}

/// Appends the kind of a change and the number of a volume or snapshot.
fn print_id(kind: u8, id: u32, out: &mut Vec<u8>) {
    out.push(kind);
    out.extend(id.to_le_bytes());
}

/// Appends a text of at most 255 bytes.
fn print_text(text: &str, out: &mut Vec<u8>) {
    out.push(text.len() as u8);
    out.extend(text.as_bytes());
}

fn take_text(reader: &mut Reader<'_>) -> Option<String> {
    let len = reader.u8()? as usize;
    String::from_utf8(reader.take(len)?.to_vec()).ok()
}

/// What the catalogue says of the pool as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CatalogueImage {
    /// The number of the next volume.
    pub next_id: u32,
    /// Number of copies of maps made so far.
    pub copies: u32,
    /// Upper bound of the live bytes of blocks in each segment.
    pub live: Vec<u64>,
    /// Bytes included in `live` that may not be live any more.
    pub unknown_bytes: u64,
    /// The last scrub; all fields are 0 if there was none.
    pub scrub: ScrubRecord,
    /// Blocks and map pages that were repaired from the other copy since the pool was made.
    pub repaired: u64,
    /// The keys of encrypted volumes.
    pub keys: Vec<KeySlot>,
}

/// Most segments that addresses can refer to.
const SEGMENTS_MAX: u32 = 1 << 26;

impl CatalogueImage {
    fn print(&self, out: &mut Vec<u8>) {
        out.extend((self.keys.len() as u32).to_le_bytes());
        self.keys.iter().for_each(|slot| slot.print(out));
        self.scrub.print(out);
        out.extend(self.repaired.to_le_bytes());
        out.extend(self.next_id.to_le_bytes());
        out.extend(self.copies.to_le_bytes());
        out.extend(self.unknown_bytes.to_le_bytes());
        out.extend((self.live.len() as u32).to_le_bytes());
        for bytes in &self.live {
            out.extend(((bytes / UNIT) as u32).to_le_bytes());
        }
    }

    fn parse(reader: &mut Reader<'_>, layout: CatalogueLayout) -> Option<CatalogueImage> {
        let (scrub, repaired) = match layout {
            CatalogueLayout::V3 => (ScrubRecord::default(), 0),
            CatalogueLayout::V4 => (ScrubRecord::take(reader)?, reader.u64()?),
        };
        let (next_id, copies) = (reader.u32()?, reader.u32()?);
        let (unknown_bytes, count) = (reader.u64()?, reader.u32()?);
        if count > SEGMENTS_MAX || reader.left() / 4 < count as usize {
            return None;
        }
        let bytes = |_| Some(u64::from(reader.u32()?) * UNIT);
        let live = (0..count).map(bytes).collect::<Option<_>>()?;
        let keys = Vec::new();
        Some(CatalogueImage { next_id, copies, live, unknown_bytes, scrub, repaired, keys })
    }
}

/// A volume or snapshot with the roots of its map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The properties of the volume or snapshot.
    pub meta: VolumeMeta,
    /// The number of the volume from which it and all that share blocks with it come.
    pub family: u32,
    /// The number of copies of maps that had been made when its map was last copied.
    pub copied: u32,
    /// A lower bound of the blocks that only it has.
    pub owned: u64,
    /// The holds of a snapshot.
    pub holds: Vec<Hold>,
    /// The properties of a volume.
    pub properties: Properties,
    /// The roots, as many as its length allows.
    pub roots: Vec<Entry>,
}

/// Encodes a catalogue.
pub fn print(whole: &CatalogueImage, volumes: &[Listed]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend((volumes.len() as u32).to_le_bytes());
    for Listed { meta, family, copied, owned, holds, properties, roots } in volumes {
        meta.print(&mut out);
        out.extend(family.to_le_bytes());
        out.extend(copied.to_le_bytes());
        out.extend(owned.to_le_bytes());
        out.push(holds.len() as u8);
        holds.iter().for_each(|hold| hold.print(&mut out));
        properties.print(&mut out);
        for root in roots {
            let mut bytes = [0; ENTRY_BYTES];
            root.print(&mut bytes);
            out.extend(bytes);
        }
    }
    whole.print(&mut out);
    out
}

/// Parses a catalogue. Returns what it says of the pool, and its volumes and snapshots.
///
/// # Errors
/// If the bytes end too early, or a field has an invalid value.
pub fn parse(bytes: &[u8]) -> Result<(CatalogueImage, Vec<Listed>), FormatError> {
    let short = || FormatError::Short { what: WHAT, len: bytes.len() as u64 };
    let mut reader = Reader::new(bytes);
    let layout = match reader.take(8).ok_or_else(short)? {
        magic if magic == MAGIC => CatalogueLayout::V4,
        magic if magic == MAGIC_V3 => CatalogueLayout::V3,
        _ => return Err(FormatError::Magic { what: WHAT }),
    };
    let count = reader.u32().ok_or_else(short)?;
    if count as usize > VOLUMES_MAX {
        let value = u64::from(count);
        return Err(FormatError::Field { what: WHAT, field: "count", value, want: "2^20 at most" });
    }
    let mut volumes: Vec<Listed> = Vec::new();
    for _ in 0..count {
        let meta = VolumeMeta::parse_as(&mut reader, layout)?;
        let family = reader.u32().ok_or_else(short)?;
        let copied = reader.u32().ok_or_else(short)?;
        let owned = reader.u64().ok_or_else(short)?;
        let holds = holds(&mut reader, layout, &meta)?;
        let properties = match layout {
            CatalogueLayout::V3 => Properties::default(),
            CatalogueLayout::V4 => Properties::take(&mut reader).ok_or_else(short)?,
        };
        let count = meta.root_count();
        // Bound the allocation by the bytes that exist.
        if reader.left() / ENTRY_BYTES < count {
            return Err(short());
        }
        let mut roots = Vec::with_capacity(count);
        for _ in 0..count {
            let entry = Entry::parse(reader.take(ENTRY_BYTES).ok_or_else(short)?);
            roots.push(entry.ok_or(FormatError::Field {
                what: WHAT,
                field: "root",
                value: meta.id.into(),
                want: "a place on disk",
            })?);
        }
        volumes.push(Listed { meta, family, copied, owned, holds, properties, roots });
    }
    let keys = match layout {
        CatalogueLayout::V3 => Vec::new(),
        CatalogueLayout::V4 => keys(&mut reader, &volumes)?,
    };
    let whole = CatalogueImage::parse(&mut reader, layout).ok_or_else(short)?;
    let whole = CatalogueImage { keys, ..whole };
    let mut ids = HashSet::new();
    for Listed { meta: VolumeMeta { id, .. }, .. } in &volumes {
        // Otherwise the next new volume would get the number of an existing one.
        if *id >= whole.next_id || !ids.insert(*id) {
            let (field, value) = ("id", u64::from(*id));
            let want = "one of its own, below the next one";
            return Err(FormatError::Field { what: WHAT, field, value, want });
        }
    }
    Ok((whole, volumes))
}

/// Parses the holds of a volume or snapshot.
fn holds(
    reader: &mut Reader<'_>,
    layout: CatalogueLayout,
    meta: &VolumeMeta,
) -> Result<Vec<Hold>, FormatError> {
    if layout == CatalogueLayout::V3 {
        return Ok(Vec::new());
    }
    let short = || FormatError::Short { what: WHAT, len: 0 };
    let count = usize::from(reader.u8().ok_or_else(short)?);
    if count > if meta.is_snapshot { HOLDS_MAX } else { 0 } {
        let (field, value) = ("holds", count as u64);
        let want = "32 at most, of a snapshot";
        return Err(FormatError::Field { what: WHAT, field, value, want });
    }
    (0..count).map(|_| Hold::take(reader).ok_or_else(short)).collect()
}

/// Parses the slots of keys, which all encrypted volumes have to have.
fn keys(reader: &mut Reader<'_>, volumes: &[Listed]) -> Result<Vec<KeySlot>, FormatError> {
    let count = reader.u32().ok_or(FormatError::Short { what: WHAT, len: 0 })?;
    let mut keys = Vec::new();
    let mut ids = HashSet::new();
    for _ in 0..count {
        let slot = KeySlot::parse(reader)?;
        if !ids.insert(slot.id) {
            let (field, want) = ("key", "each key once");
            return Err(FormatError::Field { what: WHAT, field, value: slot.id, want });
        }
        keys.push(slot);
    }
    let named = volumes.iter().map(|listed| listed.meta.key);
    if let Some(value) = named.filter(|key| *key != 0).find(|key| !ids.contains(key)) {
        let (field, want) = ("key", "a key that has a slot");
        return Err(FormatError::Field { what: WHAT, field, value, want });
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Codec;
    use crate::key_slot::Derivation;

    fn meta(id: u32, name: &str) -> VolumeMeta {
        VolumeMeta {
            id,
            name: name.to_owned(),
            is_snapshot: name.contains('@'),
            origin: 0,
            block_bytes: 4096,
            blocks: 70_000 << 8,
            guid: 5,
            reserved_bytes: 1 << 20,
            created: 1_700_000_000,
            key: 0,
        }
    }

    fn scrub() -> ScrubRecord {
        ScrubRecord { ended: 1, duration_ms: 2, verified_bytes: 3, damaged: 4, repaired: 5 }
    }

    /// The bytes that a program of format version 3 has written of a volume.
    fn print_v3(meta: &VolumeMeta) -> Vec<u8> {
        let mut bytes = Vec::new();
        meta.print(&mut bytes);
        // The creation time and the key are between the reservation and the kind.
        bytes.drain(36..52);
        bytes
    }

    #[test]
    fn what_version_3_wrote_is_read() {
        let old = VolumeMeta { created: 0, ..meta(4, "v0") };
        let mut create = vec![1];
        create.extend(print_v3(&old));
        assert_eq!(Change::parse(&create), Ok(Change::Create(old.clone())));
        create[0] = 2;
        assert_eq!(Change::parse(&create), Ok(Change::Copy(old.clone())));
        let mut bytes = MAGIC_V3.to_vec();
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(print_v3(&old));
        bytes.extend([2, 0, 0, 0, 3, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(vec![0; old.root_count() * ENTRY_BYTES]);
        // Next number 9, 7 copies, 5 bytes unknown, one segment with 4096 live bytes.
        for (field, len) in [(9_u64, 4), (7, 4), (5, 8), (1, 4), (8, 4)] {
            bytes.extend(&field.to_le_bytes()[..len]);
        }
        let roots = vec![Entry::HOLE; old.root_count()];
        let (holds, properties) = (Vec::new(), Properties::default());
        let listed =
            Listed { meta: old, family: 2, copied: 3, owned: 77, holds, properties, roots };
        let (next_id, copies, live, unknown_bytes) = (9, 7, vec![4096], 5);
        let whole =
            CatalogueImage { next_id, copies, live, unknown_bytes, ..CatalogueImage::default() };
        assert_eq!(parse(&bytes), Ok((whole, vec![listed])));
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        let roots = vec![Entry::new(4096, 4096, Codec::Raw, 3), Entry::HOLE];
        let volumes = [(4, "v0"), (8, "v0@monday")].map(|(id, name)| Listed {
            meta: meta(id, name),
            family: 2,
            copied: 3,
            owned: 77,
            holds: match name.contains('@') {
                true => vec![Hold { tag: "keep".to_owned(), created: 8 }; 2],
                false => Vec::new(),
            },
            properties: match name.contains('@') {
                true => Properties::default(),
                false => Properties { iops: Some(500), ..Properties::default() },
            },
            roots: roots.clone(),
        });
        let live = vec![0, 4096, 1 << 30];
        let (next_id, copies, unknown_bytes, repaired) = (9, 7, 5, 6);
        let whole = CatalogueImage {
            next_id,
            copies,
            live,
            unknown_bytes,
            scrub: scrub(),
            repaired,
            keys: Vec::new(),
        };
        let bytes = print(&whole, &volumes);
        assert_eq!(parse(&bytes), Ok((whole, volumes.to_vec())));
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len}");
        }
        for (next_id, second) in [(9, 4), (8, 8)] {
            let (mut whole, mut volumes) = (CatalogueImage::default(), volumes.clone());
            (whole.next_id, volumes[1].meta.id) = (next_id, second);
            let wrong = parse(&print(&whole, &volumes)).unwrap_err();
            assert!(matches!(wrong, FormatError::Field { field: "id", .. }), "{wrong}");
        }
        let held =
            Listed { holds: vec![Hold { tag: "a".to_owned(), created: 0 }], ..volumes[0].clone() };
        let error = parse(&print(&CatalogueImage::default(), &[held])).unwrap_err();
        assert!(matches!(error, FormatError::Field { field: "holds", .. }), "{error}");
    }

    #[test]
    fn changes_are_parsed_as_they_are_printed() {
        for change in [
            Change::Create(meta(1, "a")),
            Change::Copy(meta(2, "a@b")),
            Change::Destroy { id: 3 },
            Change::Rollback { id: 1, to: 2 },
            Change::Resize { id: 1, blocks: 5 },
            Change::Reserve { id: 1, bytes: 1 << 40 },
            Change::Scrubbed(scrub()),
            Change::Rename { id: 4, name: "v1@b".to_owned() },
            Change::SnapshotAll {
                first_id: 7,
                snapshot: "monday".to_owned(),
                created: 5,
                seed: u64::MAX,
            },
            Change::Promote { id: 6 },
            Change::Hold { id: 8, hold: Hold { tag: "keep".to_owned(), created: 9 } },
            Change::Release { id: 8, tag: "keep".to_owned() },
            Change::Set {
                id: 4,
                properties: Properties { read_only: Some(true), ..Properties::default() },
            },
            Change::Several(vec![Change::Create(meta(1, "a")), Change::Destroy { id: 3 }]),
        ] {
            assert_eq!(Change::parse(&change.print()), Ok(change));
        }
        assert!(Change::parse(&[]).is_err() && Change::parse(&[99]).is_err());
        let nested = Change::Several(vec![Change::Several(vec![Change::Destroy { id: 3 }])]);
        for wrong in [nested, Change::Several(vec![])] {
            assert!(Change::parse(&wrong.print()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn each_encrypted_volume_has_one_slot_of_its_key() {
        let meta = VolumeMeta { blocks: 1, reserved_bytes: 0, key: 77, ..meta(4, "v0") };
        let (holds, properties) = (Vec::new(), Properties::default());
        let roots = vec![Entry::HOLE];
        let volumes = [Listed { meta, family: 2, copied: 3, owned: 77, holds, properties, roots }];
        let derivation = Derivation::Hkdf;
        let slot = KeySlot { id: 77, derivation, salt: [1; 16], wrapped: [2; 48] };
        let of = |keys| CatalogueImage { next_id: 9, keys, ..CatalogueImage::default() };
        let whole = of(vec![slot.clone()]);
        assert_eq!(parse(&print(&whole, &volumes)), Ok((whole, volumes.to_vec())));
        let change = Change::PutKey(slot.clone());
        assert_eq!(Change::parse(&change.print()), Ok(change));
        for keys in [Vec::new(), vec![slot.clone(), slot]] {
            let wrong = parse(&print(&of(keys), &volumes)).unwrap_err();
            assert!(matches!(wrong, FormatError::Field { field: "key", .. }), "{wrong}");
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
