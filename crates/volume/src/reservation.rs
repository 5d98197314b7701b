//! Reservations: space that only one volume may use, before it is written.
//!
//! The *unused* part of a reservation is what the volume has not written since it was last copied;
//! the pool keeps that much space free for it. Blocks that a snapshot or a clone shares need
//! additional space when they are overwritten. So a snapshot needs that much more space, and is
//! refused if the space is missing. Bytes are counted before compression, so a reservation suffices
//! for incompressible data too.

use std::collections::BTreeMap;

use blockyard_store::SegmentStore;
use blockyard_volume_format::catalogue::Change;

use crate::pool::{Pool, Volumes};
use crate::record::{Body, OpenVolume, Record};

impl OpenVolume {
    /// Bytes of its reservation that the volume has not written yet.
    pub fn unused_reserved_bytes(&self) -> u64 {
        self.unused_of(self.reserved_bytes())
    }

    /// The unused part of a reservation of `reserved` bytes.
    fn unused_of(&self, reserved: u64) -> u64 {
        let owned = self.owned().saturating_mul(self.meta.block_bytes.into());
        reserved.saturating_sub(owned)
    }
}

impl Volumes {
    /// Bytes that volumes have reserved and not written, in total.
    pub fn unused_reserved_bytes(&self) -> u64 {
        let live = self.reserving().map(OpenVolume::unused_reserved_bytes);
        live.fold(0, u64::saturating_add)
    }

    /// Bytes that a change of the catalogue reserves in addition.
    fn newly_reserved(&self, change: &Change) -> u64 {
        let live = |id: &u32| self.by_id.get(id);
        match change {
            Change::Create(meta) => meta.reserved_bytes,
            // After the copy, the volume must be able to write its own blocks again.
            Change::Copy(meta) => live(&meta.origin).map_or(0, |live| {
                live.reserved_bytes().saturating_sub(live.unused_reserved_bytes())
            }),
            Change::Reserve { id, bytes } => live(id).map_or(0, |live| {
                live.unused_of(*bytes).saturating_sub(live.unused_reserved_bytes())
            }),
            Change::Several(changes) => changes.iter().map(|it| self.newly_reserved(it)).sum(),
            Change::Destroy { .. } | Change::Rollback { .. } | Change::Resize { .. } => 0,
        }
    }
}

impl<D: SegmentStore> Pool<D> {
    /// Free bytes that are not reserved for any volume.
    pub fn unreserved_bytes(&self) -> u64 {
        let unused = self.volumes().unused_reserved_bytes();
        self.segments().left_bytes().saturating_sub(unused)
    }

    /// Whether the pool has the space that a change of the catalogue reserves.
    pub(crate) fn affords(&self, change: &Change) -> bool {
        let more = self.volumes().newly_reserved(change);
        more == 0 || more <= self.unreserved_bytes()
    }

    /// Whether a liveness scan could find the space that a change of the catalogue reserves.
    pub(crate) fn may_afford(&self, change: &Change) -> bool {
        let (more, unused) = {
            let volumes = self.volumes();
            (volumes.newly_reserved(change), volumes.unused_reserved_bytes())
        };
        let segments = self.segments();
        let (left, unknown) = (segments.left_bytes(), segments.unknown_bytes());
        unknown > 0 && more <= left.saturating_add(unknown).saturating_sub(unused)
    }

    /// Whether volumes without a reservation have less than `bytes` bytes left.
    pub(crate) fn reserves_all_but(&self, bytes: u64) -> bool {
        self.volumes().reserving().next().is_some() && self.unreserved_bytes() < bytes
    }

    /// Whether these records, of `bytes` bytes in all, fit without taking reserved space. A volume
    /// may write, and overwrite, its own reservation. All other records use only space that is not
    /// reserved.
    pub(crate) fn affords_writes(&self, records: &[Record], bytes: u64) -> bool {
        // A volume that has written its whole reservation counts as one without a reservation.
        let within = |live: &&OpenVolume| live.unused_of(live.reserved_bytes() + 1) > 0;
        let (unused, any): (BTreeMap<u32, u64>, bool) = {
            let volumes = self.volumes();
            let any = volumes.reserving().next().is_some();
            let within = volumes.reserving().filter(within);
            (within.map(|live| (live.meta.id, live.unused_reserved_bytes())).collect(), any)
        };
        if !any {
            return bytes <= self.segments().left_bytes();
        }
        let all = unused.values().fold(0_u64, |all, bytes| all.saturating_add(*bytes));
        let others =
            records.iter().filter_map(|Record { body, volume, .. }| match (body, volume) {
                (Body::Write(payload), Some(live)) if !unused.contains_key(&live.meta.id) => {
                    Some(payload.bytes().len() as u64)
                }
                // Making a volume or snapshot takes pages only.
                (Body::Catalogue(_), _) => Some(1),
                _ => None,
            });
        let taken: u64 = others.sum();
        taken == 0 || taken.saturating_add(all) <= self.segments().left_bytes()
    }
}
