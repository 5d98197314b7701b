//! Limits that a change of the catalogue must respect, whether a command or a stream requests it.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_volume_format::BLOCK_BYTES_MAX;
use blockyard_volume_format::catalogue::{Change, Hold, LISTED_BYTES_MAX, VolumeMeta};

use super::{HIDDEN_PREFIX, Volumes};
use crate::config::SIZE_MAX;
use crate::record::OpenVolume;

impl Volumes {
    /// Checks that volumes have valid lengths after a change, and that the catalogue stays short
    /// enough to be read. A snapshot gets the length that its volume has at that moment.
    pub(super) fn fits(&self, change: &mut Change) -> Result<(), Status> {
        self.has_lengths(change)?;
        let more = match change {
            Change::Create(meta) | Change::Copy(meta) => meta.listed_bytes(),
            Change::Resize { id, blocks } => {
                let live = self.by_id.get(id).ok_or(Status::Inval)?;
                VolumeMeta { blocks: *blocks, ..live.meta.clone() }.listed_bytes()
            }
            Change::SnapshotAll { .. } => {
                self.only_volumes().map(|it| it.meta.listed_bytes()).sum()
            }
            Change::Hold { .. } => Hold::BYTES_MAX as u64,
            _ => return Ok(()),
        };
        // Never write a catalogue that is too long to be read.
        let listed = self.by_id.values().map(|live| live.meta.listed_bytes());
        let held = self.holds.values().map(|holds| (holds.len() * Hold::BYTES_MAX) as u64);
        let listed = listed.chain(held).sum::<u64>().saturating_add(more);
        if listed <= LISTED_BYTES_MAX { Ok(()) } else { Err(Status::NoSpc) }
    }

    /// Refuses changes that destroy a volume, but not all of its snapshots.
    pub(super) fn keeps_volumes_of_snapshots(&self, changes: &[Change]) -> Result<(), Status> {
        let destroyed = |change: &Change| match change {
            Change::Destroy { id } => Some(*id),
            _ => None,
        };
        let is_destroyed =
            |it: &Arc<OpenVolume>| changes.iter().filter_map(destroyed).any(|id| id == it.meta.id);
        for id in changes.iter().filter_map(destroyed) {
            let name = &self.by_id.get(&id).ok_or(Status::Inval)?.meta.name;
            if !self.snapshots_of(name).all(is_destroyed) {
                return Err(Status::DevResource);
            }
        }
        Ok(())
    }

    fn has_lengths(&self, change: &mut Change) -> Result<(), Status> {
        let (block_bytes, blocks) = match change {
            Change::Create(meta) => (meta.block_bytes, meta.blocks),
            Change::Copy(meta) => {
                let origin = &self.by_id.get(&meta.origin).ok_or(Status::Inval)?.meta;
                if meta.is_snapshot && !origin.name.starts_with(HIDDEN_PREFIX) {
                    meta.blocks = origin.blocks;
                }
                (meta.block_bytes, meta.blocks)
            }
            Change::Resize { id, blocks } => {
                let live = self.by_id.get(id).ok_or(Status::Inval)?;
                (live.meta.block_bytes, *blocks)
            }
            _ => return Ok(()),
        };
        let whole = block_bytes.is_power_of_two() && block_bytes <= BLOCK_BYTES_MAX;
        let short = blocks.checked_mul(block_bytes.into()).is_some_and(|size| size <= SIZE_MAX);
        if whole && short { Ok(()) } else { Err(Status::Inval) }
    }
}
