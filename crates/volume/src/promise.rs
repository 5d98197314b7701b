//! Reservations: space that a volume is promised before it is written, which others do not get.
//!
//! A volume with a reservation is promised as many bytes as it has not written yet since it was
//! copied last: what a snapshot or a clone shares with it cannot be written again in its place. So
//! a snapshot needs as much more space as it keeps from being given back, and is refused where that
//! is not there. Bytes are counted before compression, so a promise is kept whatever is written.

use std::collections::BTreeMap;

use crate::format::catalogue::Change;
use crate::pool::{Pool, Volumes};
use crate::record::{Body, Live, Record};
use crate::store::Directory;

impl Live {
    /// Bytes that it is promised and has not written.
    pub fn promised_bytes(&self) -> u64 {
        self.promise(self.reserved_bytes())
    }

    /// What is left of a reservation of so many bytes.
    fn promise(&self, reserved: u64) -> u64 {
        let owned = self.owned().saturating_mul(self.traits.block_bytes.into());
        reserved.saturating_sub(owned)
    }
}

impl Volumes {
    /// Bytes that volumes are promised and have not written.
    pub fn promised_bytes(&self) -> u64 {
        let live = self.reserving().map(Live::promised_bytes);
        live.fold(0, u64::saturating_add)
    }

    /// Bytes that a change of the catalogue promises beyond that.
    fn promises(&self, change: &Change) -> u64 {
        let live = |id: &u32| self.by_id.get(id);
        match change {
            Change::Create(traits) => traits.reserved_bytes,
            // What it owns it has to be able to write again.
            Change::Copy(traits) => live(&traits.origin)
                .map_or(0, |live| live.reserved_bytes().saturating_sub(live.promised_bytes())),
            Change::Reserve { id, bytes } => live(id)
                .map_or(0, |live| live.promise(*bytes).saturating_sub(live.promised_bytes())),
            Change::Several(changes) => changes.iter().map(|it| self.promises(it)).sum(),
            Change::Destroy { .. } | Change::Rollback { .. } | Change::Resize { .. } => 0,
        }
    }
}

impl<D: Directory> Pool<D> {
    /// Bytes that nobody has, and nobody is promised.
    pub fn unpromised_bytes(&self) -> u64 {
        let promised = self.volumes().promised_bytes();
        self.segments().left_bytes().saturating_sub(promised)
    }

    /// Whether there is what a change of the catalogue promises.
    pub(crate) fn affords(&self, change: &Change) -> bool {
        let more = self.volumes().promises(change);
        more == 0 || more <= self.unpromised_bytes()
    }

    /// Whether there may be, once it is known what of the bytes that are counted does not count.
    pub(crate) fn may_afford(&self, change: &Change) -> bool {
        let (more, promised) = {
            let volumes = self.volumes();
            (volumes.promises(change), volumes.promised_bytes())
        };
        let segments = self.segments();
        let (left, unknown) = (segments.left_bytes(), segments.unknown_bytes());
        unknown > 0 && more <= left.saturating_add(unknown).saturating_sub(promised)
    }

    /// Whether volumes without a promise have less than so many bytes left.
    pub(crate) fn promises_all_but(&self, bytes: u64) -> bool {
        self.volumes().reserving().next().is_some() && self.unpromised_bytes() < bytes
    }

    /// Whether there is room for these records, of so many bytes, so that volumes still have what
    /// they are promised: what a volume is promised it may write, and write again; all else is of
    /// what nobody is.
    pub(crate) fn affords_writes(&self, records: &[Record], bytes: u64) -> bool {
        // Those that have written more than they were promised are as others are.
        let within = |live: &&Live| live.promise(live.reserved_bytes() + 1) > 0;
        let (promised, any): (BTreeMap<u32, u64>, bool) = {
            let volumes = self.volumes();
            let any = volumes.reserving().next().is_some();
            let within = volumes.reserving().filter(within);
            (within.map(|live| (live.traits.id, live.promised_bytes())).collect(), any)
        };
        if !any {
            return bytes <= self.segments().left_bytes();
        }
        let all = promised.values().fold(0_u64, |all, bytes| all.saturating_add(*bytes));
        let others =
            records.iter().filter_map(|Record { body, volume, .. }| match (body, volume) {
                (Body::Write(payload), Some(live)) if !promised.contains_key(&live.traits.id) => {
                    Some(payload.bytes().len() as u64)
                }
                // A volume or snapshot that is made has pages only.
                (Body::Catalogue(_), _) => Some(1),
                _ => None,
            });
        let taken: u64 = others.sum();
        taken == 0 || taken.saturating_add(all) <= self.segments().left_bytes()
    }
}
