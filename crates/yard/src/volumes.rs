//! Operations on volumes of the pools that this yard has open, for the control API and the
//! commands.
//!
//! If no process has a pool open, a command opens it and executes the operation itself, so both use
//! the views here.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use blockyard_sync::counter::bucket_floor;
use blockyard_volume::{PoolStatus, Running, Secret, VolumeError};
use blockyard_volume_admin::prune::Retention;
use blockyard_volume_admin::receive;
use blockyard_volume_admin::space::{self, Listed};
use blockyard_volume_format::catalogue::{Hold, VolumeMeta};
use data_encoding::HEXLOWER;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use crate::devices::Devices;
use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::param::shown;
use crate::scrubs::{ScrubCounts, ScrubStateView};
use crate::size::Bytes;
use crate::stack::pool_identity;
use crate::volume_properties::{PropertyView, set, set_in, views};
use crate::volume_secret::{self, SecretText};

mod copies;
mod destroy;
mod scrubbed;
mod streams;
mod upload;

pub use copies::{CopyView, ResyncView};

pub use destroy::KeptView;
pub use scrubbed::{DamageView, LastScrubView, ScrubLine, ScrubView};
pub(crate) use streams::ReceiveQuery;
pub use streams::{PartialReceiveView, ReceivedView};
pub use upload::{RequestsView, UploadView};

/// A hold of a snapshot.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct HoldView {
    /// The name of the hold.
    pub tag: String,
    /// When the snapshot was held, in seconds since 1970 (UTC).
    pub created: u64,
}

/// A volume or a snapshot.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct VolumeView {
    /// The name; that of a snapshot has an `@`.
    pub name: String,
    /// Whether it is read-only, as snapshots are.
    pub snapshot: bool,
    /// The capacity.
    pub size_bytes: u64,
    /// The unit of checksums and compression.
    pub volblocksize_bytes: u32,
    /// The space that is reserved for it, before compression.
    #[serde(default)]
    pub reservation_bytes: u64,
    /// Whether its blocks are encrypted.
    #[serde(default)]
    pub encrypted: bool,
    /// Whether it is encrypted and its key is not in memory.
    #[serde(default)]
    pub locked: bool,
    /// Whether it is open as a device.
    #[serde(default)]
    pub in_use: bool,
    /// When it was created, in seconds since 1970 (UTC); absent if a program that did not record it
    /// created it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
    /// The identity of a snapshot, in hexadecimal: the same in each pool that has received it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guid: Option<String>,
    /// The snapshot that a volume was cloned from, if that exists. This and the following fields
    /// are absent unless they are asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The holds of a snapshot, which cannot be destroyed while it has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<HoldView>,
    /// The properties of a volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub properties: Vec<PropertyView>,
    /// The SHA-256 of the encrypted key of an encrypted volume, in hexadecimal: another one after
    /// `change-key`. Only with details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_slot: Option<String>,
    /// The stored length of the data that it refers to, including data shared with others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// The length of the data that it refers to, before compression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub referenced_bytes: Option<u64>,
    /// What destroying it frees, of a volume together with its snapshots and its reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The part of `used_bytes` that only snapshots of the volume have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_bytes: Option<u64>,
    /// The part of `used_bytes` that the volume has reserved and not written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_reservation_bytes: Option<u64>,
    /// What can be written to the volume, its reservation included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
}

impl VolumeView {
    fn new(running: &Running, meta: &VolumeMeta) -> VolumeView {
        VolumeView::idle(meta).running(running, meta)
    }

    /// Adds what an open pool says of it.
    fn running(self, running: &Running, meta: &VolumeMeta) -> VolumeView {
        let locked = self.encrypted && !running.pool().keys().is_unlocked(meta);
        let stored = running.pool().volumes().properties_of(meta.id);
        let properties = match self.properties.is_empty() {
            true => Vec::new(),
            false => views(meta, &stored, running.device_config(meta.id).as_ref()),
        };
        VolumeView { in_use: running.is_taken(meta.id), locked, properties, ..self }
    }

    /// A volume of a pool without devices.
    pub fn idle(meta: &VolumeMeta) -> VolumeView {
        VolumeView {
            name: meta.name.clone(),
            snapshot: meta.is_snapshot,
            size_bytes: meta.size_bytes(),
            volblocksize_bytes: meta.block_bytes,
            reservation_bytes: meta.reserved_bytes,
            encrypted: meta.key != 0,
            locked: meta.key != 0,
            in_use: false,
            created: Some(meta.created).filter(|created| *created > 0),
            guid: meta.is_snapshot.then(|| guid_text(meta.guid)),
            origin: None,
            holds: Vec::new(),
            properties: Vec::new(),
            key_slot: None,
            stored_bytes: None,
            referenced_bytes: None,
            used_bytes: None,
            snapshots_bytes: None,
            unused_reservation_bytes: None,
            available_bytes: None,
        }
    }

    /// All volumes and snapshots of a pool.
    pub fn list(running: &Running) -> Vec<VolumeView> {
        running.pool().list().iter().map(|meta| VolumeView::new(running, meta)).collect()
    }

    /// All volumes and snapshots of a pool, with origins, holds, properties and key slots, and
    /// without their space: nothing is read.
    pub fn list_detailed(running: &Running) -> Vec<VolumeView> {
        let list = space::list_without_space(running.pool());
        let view = |it: &Listed| VolumeView {
            key_slot: key_slot_text(running, &it.meta),
            ..VolumeView::of_listed(it).running(running, &it.meta)
        };
        list.iter().map(view).collect()
    }

    /// All volumes and snapshots of a pool, or the one of this name, with their space.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn with_space(
        running: &Running,
        name: Option<&str>,
    ) -> Result<Vec<VolumeView>, VolumeError> {
        let list = space::list(running.pool(), name)?;
        let view = |it: &Listed| VolumeView::of_listed(it).running(running, &it.meta);
        Ok(list.iter().map(view).collect())
    }

    /// One volume or snapshot of a pool without devices, with its space if that was counted.
    pub fn of_listed(listed: &Listed) -> VolumeView {
        let Listed { meta, origin, space, available_bytes, holds, properties } = listed;
        let hold = |hold: &Hold| HoldView { tag: hold.tag.clone(), created: hold.created };
        VolumeView {
            origin: origin.clone(),
            holds: holds.iter().map(hold).collect(),
            properties: views(meta, properties, None),
            stored_bytes: space.map(|it| it.refer_bytes),
            referenced_bytes: space.map(|it| it.blocks * u64::from(meta.block_bytes)),
            used_bytes: space.map(|it| it.used_bytes()),
            snapshots_bytes: space.filter(|_| !meta.is_snapshot).map(|it| it.snapshots_bytes),
            unused_reservation_bytes: space
                .filter(|_| !meta.is_snapshot)
                .map(|it| it.unused_reserved_bytes),
            available_bytes: *available_bytes,
            ..VolumeView::idle(meta)
        }
    }
}

/// The identity of a snapshot, as views and requests have it.
fn guid_text(guid: u64) -> String {
    format!("{guid:016x}")
}

/// The encrypted key of a volume, as views and requests have it; `None` if it is not encrypted.
fn key_slot_text(running: &Running, meta: &VolumeMeta) -> Option<String> {
    let mut bytes = Vec::new();
    running.pool().key_slot(meta).ok()?.print(&mut bytes);
    Some(HEXLOWER.encode(digest(&SHA256, &bytes).as_ref()))
}

/// Segments that are being written at once: by the log, which is in one and goes on in another, by
/// checkpoints and by cleaning.
const OPEN_SEGMENTS: u64 = 4;

/// A pool.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct PoolView {
    /// The pool's directory.
    pub path: String,
    /// The identity of an open pool, in hexadecimal: the same for all of its paths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The number of volumes and snapshots.
    pub volumes: u64,
    /// The length of a segment.
    pub segment_bytes: u64,
    /// The number of segments, including free ones.
    pub segments: u64,
    /// The segments that are free, or will be after the next checkpoint.
    pub segments_free: u64,
    /// The number of segments in use by the share of their bytes that is live blocks: from 0 % to
    /// less than 10 %, and so on to 100 %.
    #[serde(default)]
    pub segments_by_live: Vec<u64>,
    /// The segments that are reserved for checkpoints and cleaning.
    pub segments_reserved: u64,
    /// The free space of the pool's location, into which the pool can grow.
    pub outside_free_bytes: u64,
    /// The bytes of live blocks, and twice those of map pages.
    pub used_bytes: u64,
    /// The bytes that can be written in addition to `used_bytes`, without the reserve.
    pub available_bytes: u64,
    /// Whether the pool accepts no more writes, because a write or a sync has failed.
    pub failed_read_only: bool,
    /// The position of the last log batch.
    pub log_group: u64,
    /// The last log batch at the time when the log recorded that all batches are durable.
    pub log_recorded: u64,
    /// Log batches since the pool was opened.
    pub groups: u64,
    /// The lengths of log batches: pairs of a bucket's least length in bytes and its count.
    pub group_bytes: Vec<(u64, u64)>,
    /// The bytes of log batches, including headers.
    pub log_bytes: u64,
    /// The bytes of blocks that were written, before compression.
    pub data_bytes: u64,
    /// The bytes of blocks that were written, after compression.
    pub stored_bytes: u64,
    /// The bytes that cleaning has copied.
    pub moved_bytes: u64,
    /// Syncs of the log, including those that were part of a write.
    pub syncs: u64,
    /// The number of checkpoints.
    pub checkpoints: u64,
    /// The bytes of map pages that checkpoints have written.
    pub page_bytes: u64,
    /// The number of segments that cleaning has freed.
    pub segments_cleaned: u64,
    /// How often writes waited for space from cleaning.
    pub cleaning_waits: u64,
    /// How often space was searched because an allocation had failed.
    pub space_searches: u64,
    /// Writes that failed for lack of space (ENOSPC) since the pool was opened.
    #[serde(default)]
    pub writes_refused: u64,
    /// The bytes that are reserved for volumes and that these have not written.
    #[serde(default)]
    pub unused_reserved_bytes: u64,
    /// The scrub that has begun and not ended, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubStateView>,
    /// The scrubs that this yard has completed.
    #[serde(default)]
    pub scrubs: u64,
    /// The damaged blocks and map pages that these scrubs could not repair from another copy.
    #[serde(default)]
    pub scrub_damaged: u64,
    /// The bytes of live blocks and of map pages: the rest of the segments in use is garbage.
    #[serde(default)]
    pub live_bytes: u64,
    /// The last scrub that was completed, kept when the pool is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_scrub: Option<LastScrubView>,
    /// The blocks and map pages that were repaired from the other copy since the pool was made.
    #[serde(default)]
    pub repaired: u64,
    /// The pool's copies, if it has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<CopyView>,
    /// How a pool in an object store acknowledges syncs, and what the object store lacks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<UploadView>,
    /// The paths of copies that were detached or replaced. Commands still find the pool by them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former_paths: Vec<String>,
    /// The resync of a copy that has joined or come back, if one is to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resync: Option<ResyncView>,
}

impl PoolView {
    /// The present state of a pool.
    ///
    /// # Errors
    /// If the system does not report the free space.
    pub fn new(running: &Running) -> Result<PoolView, VolumeError> {
        let view = PoolView::of_status(&running.path(), running.status()?).with_copies_of(running);
        Ok(PoolView { identity: Some(pool_identity(running.mark())), ..view })
    }

    /// A pool at a path, open or not, in this state.
    pub fn of_status(path: &Path, status: PoolStatus) -> PoolView {
        let activity = status.activity;
        let sizes = (0..).zip(&activity.group_sizes).filter(|(_, count)| **count > 0);
        PoolView {
            path: path.display().to_string(),
            identity: None,
            volumes: status.volumes,
            segment_bytes: status.segment_bytes,
            segments: status.segments,
            segments_free: status.segments_free,
            segments_by_live: status.segments_by_live.to_vec(),
            segments_reserved: status.segments_reserved,
            outside_free_bytes: status.outside_free_bytes,
            used_bytes: status.used_bytes,
            available_bytes: status.available_bytes,
            failed_read_only: status.latched || status.upload.is_some_and(|it| it.has_failed),
            log_group: activity.number,
            log_recorded: activity.recorded,
            groups: activity.groups,
            group_bytes: sizes.map(|(at, count)| (bucket_floor(at), *count)).collect(),
            log_bytes: activity.log_bytes,
            data_bytes: activity.data_bytes,
            stored_bytes: activity.stored_bytes,
            moved_bytes: activity.moved_bytes,
            syncs: activity.syncs,
            checkpoints: activity.checkpoints,
            page_bytes: activity.page_bytes,
            segments_cleaned: activity.cleaned,
            cleaning_waits: activity.waits,
            space_searches: activity.searches,
            writes_refused: activity.refused,
            unused_reserved_bytes: status.unused_reserved_bytes,
            scrub: None,
            scrubs: 0,
            scrub_damaged: 0,
            live_bytes: status.live_bytes,
            last_scrub: status.scrub.map(LastScrubView::from),
            repaired: status.repaired,
            copies: status.copies.into_iter().map(CopyView::from).collect(),
            upload: status.upload.map(UploadView::from),
            former_paths: Vec::new(),
            resync: None,
        }
    }

    /// The bytes of the segments in use that are neither live blocks nor map pages, without the
    /// segments that are being written, whose ends are unused.
    pub fn garbage_bytes(&self) -> u64 {
        let written = OPEN_SEGMENTS * self.segment_bytes;
        self.in_use_bytes().saturating_sub(written).saturating_sub(self.live_bytes)
    }

    /// The bytes of the segments in use.
    pub fn in_use_bytes(&self) -> u64 {
        self.segments.saturating_sub(self.segments_free).saturating_mul(self.segment_bytes)
    }

    /// The bytes that the pool has written since it was opened: log, pages, moved blocks.
    pub fn written_bytes(&self) -> u64 {
        self.log_bytes + self.page_bytes + self.moved_bytes
    }

    /// The counters by name, for metrics.
    pub(crate) fn counters(&self) -> [(&'static str, &'static str, u64); 15] {
        let mended = self.copies.iter().map(|copy| copy.mended).sum();
        [
            ("pool_groups", "Groups in the log", self.groups),
            ("pool_log_bytes", "Bytes of groups, with their heads", self.log_bytes),
            ("pool_data_bytes", "Bytes of blocks written, before compression", self.data_bytes),
            ("pool_stored_bytes", "Bytes of blocks written, as stored", self.stored_bytes),
            ("pool_moved_bytes", "Bytes that cleaning has written again", self.moved_bytes),
            ("pool_syncs", "Syncs of the log", self.syncs),
            ("pool_checkpoints", "Checkpoints", self.checkpoints),
            ("pool_page_bytes", "Bytes of pages of maps that were written", self.page_bytes),
            ("pool_segments_cleaned", "Segments that were emptied", self.segments_cleaned),
            ("pool_cleaning_waits", "Waits of writes for cleaning", self.cleaning_waits),
            ("pool_space_searches", "Times that space was looked for", self.space_searches),
            ("pool_writes_refused", "Writes that failed without space", self.writes_refused),
            ("pool_mended", "Repairs of a copy from the other one", mended),
            ("pool_scrubs", "Scrubs that were completed", self.scrubs),
            (
                "pool_scrub_damaged",
                "Damaged blocks and map pages that scrubs could not repair",
                self.scrub_damaged,
            ),
        ]
    }

    /// The gauges by name, for metrics.
    pub(crate) fn gauges(&self) -> [(&'static str, &'static str, u64); 12] {
        let bad = self.copies.iter().filter(|copy| !copy.good).count() as u64;
        let bytes = |segments: u64| segments * self.segment_bytes;
        let resync = self.resync.as_ref().map_or((0, 0), |it| (it.done_bytes, it.total_bytes));
        [
            ("pool_size_bytes", "Bytes of segments", bytes(self.segments)),
            ("pool_free_bytes", "Bytes of free segments", bytes(self.segments_free)),
            ("pool_reserved_bytes", "Bytes kept for cleaning", bytes(self.segments_reserved)),
            ("pool_outside_free_bytes", "Bytes by which it can grow", self.outside_free_bytes),
            ("pool_used_bytes", "Bytes that count", self.used_bytes),
            ("pool_available_bytes", "Bytes that can still be written", self.available_bytes),
            (
                "pool_unused_reserved_bytes",
                "Bytes reserved for volumes and not written",
                self.unused_reserved_bytes,
            ),
            ("pool_volumes", "Volumes and snapshots", self.volumes),
            (
                "pool_failed_read_only",
                "1 if an error made the pool read-only",
                self.failed_read_only.into(),
            ),
            ("pool_copies_bad", "Copies that are stale, resyncing or failed", bad),
            ("pool_resync_done_bytes", "Bytes equal in a copy that is resyncing", resync.0),
            ("pool_resync_total_bytes", "Bytes of the pool if a copy is resyncing", resync.1),
        ]
    }
}

/// `POST /v1/volumes/{verb}`. A field that the verb does not use is refused.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct VolumeRequest {
    /// The pool's directory; needed if the yard has several pools open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The volume, or the snapshot VOLUME@SNAPSHOT.
    pub name: String,
    /// `clone`, `rename`: the new name. `attach`, `replace`: the empty directory or disk that
    /// becomes a copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new: Option<String>,
    /// `create`, `resize`: the capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// `create`: the unit of checksums and compression; 16 KiB by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volblocksize_bytes: Option<u32>,
    /// `create`, `resize`: the space that is reserved for the volume, before compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reservation_bytes: Option<u64>,
    /// `resize`: whether the volume may become shorter, which discards data. `attach`, `replace`:
    /// whether other data on a disk are overwritten.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// `create`: encrypt the volume by a new key that this passphrase decrypts. `unlock`: the
    /// present passphrase. `change-key`: the present one; not needed if the volume is unlocked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SecretText>,
    /// The key of 32 to 4096 bytes, in base64, in place of a passphrase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<SecretText>,
    /// `change-key`: the new passphrase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_passphrase: Option<SecretText>,
    /// `change-key`: the new key, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_key: Option<SecretText>,
    /// `send`, `estimate`: the older snapshot on which the stream builds, `VOLUME@SNAPSHOT` or
    /// `@SNAPSHOT`; without it the stream is complete.
    /// `diff`: the snapshot to compare with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// `send`, `estimate`: whether the snapshots after `from` are sent too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub intermediate: bool,
    /// `send`, `estimate`: whether all snapshots up to this one are sent; with `@SNAPSHOT` those of
    /// all volumes that have a snapshot of this name.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replicate: bool,
    /// `send`, `estimate`: whether blocks are compressed by Zstandard.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub compressed: bool,
    /// `send`, `estimate`: whether encrypted volumes are sent as they are stored, without their
    /// keys.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub raw: bool,
    /// `send`, `estimate`: in place of a name, the token of a receive that is continued.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// `snapshot`: make one of each volume, at one moment; `name` is `@SNAPSHOT`. `destroy`: the
    /// snapshots of a volume too, or with `@SNAPSHOT` those of this name of all volumes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub recursive: bool,
    /// `destroy`, `prune`: say what would be destroyed, and destroy nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// `destroy`, `prune`: count the bytes that it frees, which reads the maps.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub count_freed: bool,
    /// `destroy` with `recursive` of a volume: the `guid`s of snapshots that another pool has. It
    /// is refused if the volume has another snapshot, or has changed since its newest one, or if
    /// the copy lacks a property or the key slot. `properties` and `key_slot` are the copy's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub copied: Vec<String>,
    /// `destroy` with `copied`: the `key_slot` of the copy, if it is encrypted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_slot: Option<String>,
    /// `hold`, `release`: the name of the hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// `prune`: how many snapshots of which periods are kept, such as `24h,7d,4w,12m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<String>,
    /// `prune`: how the names of the snapshots that are considered begin, after the `@`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// `set`: the properties and their values, as texts. `destroy` with `copied`: those that the
    /// copy has.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub properties: BTreeMap<String, String>,
    /// `scrub`: the most bytes that are read per second; no limit by default. `attach`, `replace`,
    /// `resync`: the most bytes that the resync compares per second, 0 for any number; unchanged by
    /// default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_bytes: Option<u64>,
    /// `detach`, `replace`: the path of the copy that leaves the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
}

/// The fields that `send` and `estimate` use in addition to `pool` and `name`.
const SEND_FIELDS: &[&str] = &["from", "intermediate", "replicate", "compressed", "raw", "token"];

/// The fields that `destroy` uses in addition to `pool` and `name`.
const DESTROY_FIELDS: &[&str] =
    &["recursive", "dry_run", "count_freed", "copied", "key_slot", "properties"];

/// The verbs, and the fields that each uses in addition to `pool` and `name`.
const VERBS: [(&str, &[&str]); 30] = [
    ("create", &["size_bytes", "volblocksize_bytes", "reservation_bytes", "passphrase", "key"]),
    ("snapshot", &["recursive"]),
    ("rename", &["new"]),
    ("promote", &[]),
    ("hold", &["tag"]),
    ("release", &["tag"]),
    ("clone", &["new"]),
    ("rollback", &[]),
    ("resize", &["size_bytes", "reservation_bytes", "force"]),
    ("destroy", DESTROY_FIELDS),
    ("prune", &["keep", "prefix", "dry_run", "count_freed"]),
    ("unlock", &["passphrase", "key"]),
    ("lock", &[]),
    ("set", &["properties"]),
    ("change-key", &["passphrase", "key", "new_passphrase", "new_key"]),
    ("send", SEND_FIELDS),
    ("diff", &["from"]),
    ("estimate", SEND_FIELDS),
    ("receives", &[]),
    ("abort-receive", &[]),
    ("export", &[]),
    ("scrub", &["rate_bytes"]),
    (PAUSE_SCRUB, &[]),
    (RESUME_SCRUB, &[]),
    ("attach", &["new", "force", "rate_bytes"]),
    ("detach", &["copy"]),
    ("replace", &["copy", "new", "force", "rate_bytes"]),
    ("resync", &["rate_bytes"]),
    ("pause-resync", &[]),
    ("resume-resync", &[]),
];

/// The verb that stops the scrub of a pool.
pub(crate) const PAUSE_SCRUB: &str = "pause-scrub";

/// The verb after which the yard looks for scrubs at once.
pub(crate) const RESUME_SCRUB: &str = "resume-scrub";

/// The query for a list of volumes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct VolumesQuery {
    /// The pool; needed if the yard has several pools open.
    pool: Option<String>,
    /// One of its volumes, with its space; all by default.
    name: Option<String>,
    /// Whether the space of all is counted.
    space: bool,
    /// Whether origins, holds and properties are added, without the space.
    details: bool,
}

pub(crate) fn argument(
    field: &'static str,
    value: impl ToString,
    wanted: impl Into<String>,
) -> YardError {
    YardError::Argument { field, value: value.to_string(), wanted: wanted.into() }
}

impl VolumeRequest {
    /// Refuses a field that the verb does not use.
    pub(crate) fn check(&self, verb: &str) -> Result<(), YardError> {
        let Some((_, takes)) = VERBS.iter().find(|(known, _)| *known == verb) else {
            let verbs = VERBS.map(|(known, _)| known).join(", ");
            return Err(argument("verb", shown(verb), format!("one of {verbs}")));
        };
        let given = [
            ("new", self.new.is_some()),
            ("size_bytes", self.size_bytes.is_some()),
            ("volblocksize_bytes", self.volblocksize_bytes.is_some()),
            ("reservation_bytes", self.reservation_bytes.is_some()),
            ("force", self.force),
            ("recursive", self.recursive),
            ("dry_run", self.dry_run),
            ("count_freed", self.count_freed),
            ("copied", !self.copied.is_empty()),
            ("key_slot", self.key_slot.is_some()),
            ("tag", self.tag.is_some()),
            ("keep", self.keep.is_some()),
            ("prefix", self.prefix.is_some()),
            ("passphrase", self.passphrase.is_some()),
            ("key", self.key.is_some()),
            ("new_passphrase", self.new_passphrase.is_some()),
            ("new_key", self.new_key.is_some()),
            ("from", self.from.is_some()),
            ("intermediate", self.intermediate),
            ("replicate", self.replicate),
            ("compressed", self.compressed),
            ("raw", self.raw),
            ("token", self.token.is_some()),
            ("rate_bytes", self.rate_bytes.is_some()),
            ("properties", !self.properties.is_empty()),
            ("copy", self.copy.is_some()),
        ];
        let unused = given.iter().find(|(field, given)| *given && !takes.contains(field));
        unused.map_or(Ok(()), |(field, _)| {
            Err(argument("field", field, format!("none of this name with `{verb}`")))
        })
    }

    /// The passphrase or key that the request has.
    pub(crate) fn present_secret(&self) -> Result<Option<Secret>, YardError> {
        volume_secret::secret(("passphrase", self.passphrase.as_ref()), ("key", self.key.as_ref()))
    }

    /// The new passphrase or key.
    pub(crate) fn new_secret(&self) -> Result<Option<Secret>, YardError> {
        let passphrase = ("new_passphrase", self.new_passphrase.as_ref());
        volume_secret::secret(passphrase, ("new_key", self.new_key.as_ref()))
    }

    fn size(&self) -> Result<u64, YardError> {
        let wanted = "the capacity in bytes".to_owned();
        self.size_bytes.ok_or(YardError::Missing { field: "size_bytes", wanted })
    }

    fn new_name(&self) -> Result<&str, YardError> {
        let wanted = "the new name".to_owned();
        self.new.as_deref().ok_or(YardError::Missing { field: "new", wanted })
    }

    fn retention(&self) -> Result<Retention, YardError> {
        let wanted = "counts of periods, such as 24h,7d".to_owned();
        let keep = self.keep.as_deref().ok_or(YardError::Missing { field: "keep", wanted })?;
        keep.parse().map_err(|error: String| {
            argument("keep", shown(keep), error.trim_start_matches("expected "))
        })
    }

    fn tag(&self) -> Result<&str, YardError> {
        let wanted = "the name of the hold".to_owned();
        self.tag.as_deref().ok_or(YardError::Missing { field: "tag", wanted })
    }
}

/// Executes a verb on a pool, open in a yard or in a command.
///
/// # Errors
/// If there is no such verb, it does not use a given field, or the pool refuses.
pub fn work(
    running: &Running,
    verb: &str,
    request: &VolumeRequest,
) -> Result<VolumeDone, YardError> {
    request.check(verb)?;
    let name = request.name.as_str();
    let done = |names: Vec<String>, done: String| {
        let name = name.to_owned();
        Ok(VolumeDone { name, done, names, ..VolumeDone::default() })
    };
    match verb {
        "snapshot" if request.recursive => {
            let Some(snapshot) = name.strip_prefix('@') else {
                return Err(argument("name", shown(name), "`@SNAPSHOT` with `recursive`"));
            };
            let names = running.snapshot_all(snapshot)?;
            let count = names.len();
            done(names, format!("created snapshot {name} of {}", counted(count, "volume")))
        }
        "destroy" => destroy::destroy(running, request),
        "prune" => destroy::prune(running, request),
        "estimate" => streams::estimate(running, request),
        "receives" => streams::receives(running, name),
        "abort-receive" => {
            receive::abort(running, name)?;
            done(Vec::new(), format!("dropped what was received of {name}"))
        }
        "set" => done(Vec::new(), set(running, request)?),
        "attach" | "detach" | "replace" | "resync" | "pause-resync" | "resume-resync" => {
            copies::work(running, verb, request)
        }
        "promote" => {
            let names = running.promote(name)?;
            let count = names.len();
            done(names, format!("promoted {name}, which gets {}", counted(count, "snapshot")))
        }
        verb => done(Vec::new(), change(running, verb, request)?),
    }
}

/// A number of things, in words.
fn counted(count: usize, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

/// Executes a verb that changes one volume or snapshot. Returns a sentence about the result.
fn change(running: &Running, verb: &str, request: &VolumeRequest) -> Result<String, YardError> {
    let name = request.name.as_str();
    match verb {
        "create" => {
            let block_bytes = request.volblocksize_bytes.unwrap_or(0);
            let reserved = request.reservation_bytes.unwrap_or(0);
            let (secret, size) = (request.present_secret()?, request.size()?);
            running.create_reserved(name, size, block_bytes, reserved, secret.as_ref())?;
            Ok(format!("created {name}"))
        }
        "snapshot" => {
            running.snapshot(name)?;
            Ok(format!("created snapshot {name}"))
        }
        "clone" => {
            let new = request.new_name()?;
            running.clone_of(name, new)?;
            Ok(format!("cloned {name} to {new}"))
        }
        "rename" => {
            let new = request.new_name()?;
            running.rename(name, new)?;
            Ok(format!("renamed {name} to {new}"))
        }
        "hold" => {
            let tag = request.tag()?;
            running.hold_snapshot(name, tag)?;
            Ok(format!("held {name} by {tag}"))
        }
        "release" => {
            let tag = request.tag()?;
            running.release(name, tag)?;
            Ok(format!("released {name} from {tag}"))
        }
        "rollback" => {
            running.rollback(name)?;
            Ok(format!("rolled back to {name}"))
        }
        "resize" => {
            let mut done = Vec::new();
            if request.size_bytes.is_some() || request.reservation_bytes.is_none() {
                let size = request.size()?;
                running.resize(name, size, request.force)?;
                done.push(format!("resized {name} to {}", Bytes(size)));
            }
            if let Some(bytes) = request.reservation_bytes {
                running.reserve(name, bytes)?;
                done.push(format!("reserved {} for {name}", Bytes(bytes)));
            }
            Ok(done.join(", "))
        }
        _ => volume_secret::change_key(running, verb, request),
    }
}

/// The result of an operation.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct VolumeDone {
    /// The volume or snapshot.
    pub name: String,
    /// A sentence about the result, for people.
    pub done: String,
    /// The volumes and snapshots that `snapshot` with `recursive` and `promote` have made or
    /// renamed, and those that `destroy` and `prune` have destroyed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// `destroy` and `prune` with `count_freed`: the bytes of blocks that are freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
    /// `estimate`: the length of the stream; an upper bound if it is compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_bytes: Option<u64>,
    /// `receives`: the receives that were interrupted and can be continued.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub receives: Vec<PartialReceiveView>,
    /// The snapshots that `prune` keeps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<KeptView>,
}

impl Devices {
    /// The pools of this yard's devices, each once.
    pub fn pools(&self) -> Vec<Arc<Running>> {
        let mut pools: Vec<Arc<Running>> = Vec::new();
        for pool in self.list().into_iter().filter_map(|entry| entry.pool) {
            if !pools.iter().any(|known| Arc::ptr_eq(known, &pool)) {
                pools.push(pool);
            }
        }
        pools
    }

    /// The pool in a directory; the only one, if none is named.
    ///
    /// # Errors
    /// If the yard has no such pool open.
    pub fn pool(&self, path: Option<&str>) -> Result<Arc<Running>, YardError> {
        let mut pools = self.pools();
        let known: Vec<String> =
            pools.iter().map(|pool| pool.path().display().to_string()).collect();
        let refused = |path: &str| YardError::NoSuchPool {
            path: shown(path),
            known: if known.is_empty() { "none".to_owned() } else { known.join(", ") },
        };
        let Some(path) = path else {
            return match pools.len() {
                1 => Ok(pools.remove(0)),
                _ => Err(refused("")),
            };
        };
        let place = Path::new(path).canonicalize().unwrap_or_else(|_| path.into());
        let found = pools.into_iter().find(|pool| pool.is_at(&place));
        found.ok_or_else(|| refused(path))
    }

    /// The device of a pool's volume, if it is open as one.
    pub(crate) fn device_of(&self, pool: &Arc<Running>, volume: &str) -> Option<DeviceEntry> {
        let is_it = |entry: &DeviceEntry| {
            entry.spec.name() == volume
                && entry.pool.as_ref().is_some_and(|other| Arc::ptr_eq(other, pool))
        };
        self.list().into_iter().find(is_it)
    }

    /// Executes a verb on a volume of an open pool. A verb that would change a device while it is
    /// in use requires that the device has no users: the device is removed for a moment and opened
    /// again. NVMe hosts and hypervisors may use a device that grows.
    ///
    /// # Errors
    /// If the pool or the volume does not exist, clients use it, or it refuses.
    pub fn work_on_volume(
        &self,
        verb: &str,
        request: &VolumeRequest,
    ) -> Result<VolumeDone, YardError> {
        request.check(verb)?;
        let pool = self.pool(request.pool.as_deref())?;
        if let PAUSE_SCRUB | RESUME_SCRUB = verb {
            return self.scrub_verb(&pool, verb);
        }
        if verb == "set" {
            return set_in(self, &pool, request);
        }
        let volume = request.name.split('@').next().unwrap_or_default();
        let device = match verb {
            "rollback" => self.device_of(&pool, volume),
            // A change of the reservation alone does not affect clients.
            "resize" if request.size_bytes.is_some() => self.device_of(&pool, volume),
            "destroy" | "rename" if !request.name.contains('@') && !request.dry_run => {
                if let Some(entry) = self.device_of(&pool, volume) {
                    let name = entry.spec.name().to_owned();
                    let why = "a device; `blockyard remove` it first".to_owned();
                    return Err(VolumeError::Busy { name, why }.into());
                }
                None
            }
            _ => None,
        };
        match device {
            None => work(&pool, verb, request),
            Some(entry) => {
                let mut spec = entry.spec.clone();
                let has = entry.disk.geometry().len_bytes();
                drop(entry);
                // The same size again tells it to a block device that did not take it over.
                let grows = verb == "resize"
                    && request.size_bytes.is_some_and(|size| {
                        size > has || (size == has && self.ublk().is_outdated(volume))
                    });
                if let Some(size) = request.size_bytes
                    && spec.is_set("size")
                {
                    spec.set_text("size", &size.to_string()).map_err(crate::uri::UriError::from)?;
                }
                self.rework(spec, grows, || work(&pool, verb, request))
            }
        }
    }

    /// The state of every pool, as far as the system reports it.
    pub fn pool_views(&self) -> Vec<PoolView> {
        let views = self.pools().into_iter().map(|pool| {
            let scrubbed = self.scrubbed(&pool);
            let ScrubCounts { scrubs, damaged } = self.scrubs().counts(&scrubbed);
            let (scrub, view) = (self.scrubs().state(&scrubbed), PoolView::new(&pool)?);
            Ok::<_, VolumeError>(PoolView { scrubs, scrub_damaged: damaged, scrub, ..view })
        });
        views.filter_map(|view| view.inspect_err(|error| tracing::warn!("{error}")).ok()).collect()
    }

    /// All volumes of a pool, or one of them.
    pub(crate) fn volumes(&self, asked: &VolumesQuery) -> Result<Vec<VolumeView>, YardError> {
        let pool = self.pool(asked.pool.as_deref())?;
        Ok(match asked.name.as_deref() {
            None if !asked.space && asked.details => VolumeView::list_detailed(&pool),
            None if !asked.space => VolumeView::list(&pool),
            name => VolumeView::with_space(&pool, name)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::paths::TempDir;
    use crate::uri;

    /// `raw` was accepted and ignored by verbs that do not use it.
    #[test]
    fn each_field_is_refused_by_a_verb_that_does_not_use_it() {
        let text = || Some("text".to_owned());
        let secret = || serde_json::from_str::<SecretText>("\"text\"").ok();
        let (count, is_set) = (Some(1), true);
        // No `..`: a new field must be named here.
        let whole = VolumeRequest {
            pool: text(),
            name: "v0".to_owned(),
            new: text(),
            size_bytes: count,
            volblocksize_bytes: Some(4096),
            reservation_bytes: count,
            force: is_set,
            passphrase: secret(),
            key: secret(),
            new_passphrase: secret(),
            new_key: secret(),
            from: text(),
            intermediate: is_set,
            replicate: is_set,
            compressed: is_set,
            raw: is_set,
            token: text(),
            recursive: is_set,
            dry_run: is_set,
            count_freed: is_set,
            copied: vec!["text".to_owned()],
            key_slot: text(),
            tag: text(),
            keep: text(),
            prefix: text(),
            properties: BTreeMap::from([("sync".to_owned(), "always".to_owned())]),
            rate_bytes: count,
            copy: text(),
        };
        let serde_json::Value::Object(fields) = serde_json::to_value(&whole).unwrap() else {
            panic!("a request is an object");
        };
        assert_eq!(fields.len(), 28, "each field is given");
        for (field, value) in fields.iter().filter(|(field, _)| *field != "pool") {
            let fields = serde_json::Map::from_iter([(field.clone(), value.clone())]);
            let request: VolumeRequest = serde_json::from_value(fields.into()).unwrap();
            let uses = |verb: &&(&str, &[&str])| request.check(verb.0).is_ok();
            let used = VERBS.iter().filter(uses).count();
            match field.as_str() {
                "name" => assert_eq!(used, VERBS.len()),
                field => assert!((1..VERBS.len()).contains(&used), "{field}: {used} verbs"),
            }
        }
    }

    /// A host that was disconnected took its cached pages for those of a volume that was rolled
    /// back meanwhile, because the volume had the same UUID over NVMe.
    #[test]
    fn a_volume_has_other_contents_after_a_rollback() {
        let place = TempDir::new().unwrap();
        let devices = Devices::new();
        let of = |pool: &str| {
            let path = place.path().join(pool).display().to_string();
            uri::parse(&format!("volume:///v?size=16M&path={path}")).unwrap()
        };
        let contents = || devices.find("v").unwrap().contents();
        let ask = |verb: &str, name: &str, size_bytes: Option<u64>| {
            let (name, force) = (name.to_owned(), size_bytes.is_some());
            let request = VolumeRequest { name, size_bytes, force, ..VolumeRequest::default() };
            devices.work_on_volume(verb, &request).unwrap();
        };
        let work = |verb: &str| ask(verb, "v@a", None);
        devices.add(of("pool")).unwrap();
        let first = contents();
        work("snapshot");
        assert_eq!(contents(), first);
        work("rollback");
        let second = contents();
        work("rollback");
        let third = contents();
        let seen = [&first, &second, &third].map(|it| it.as_ref().unwrap());
        assert!(first != second && second != third && first != third, "{seen:?}");
        devices.remove("v", Duration::ZERO).unwrap();
        devices.add(of("pool")).unwrap();
        assert_eq!(contents(), third, "the same after a restart");
        devices.remove("v", Duration::ZERO).unwrap();
        let mut seen = vec![first, second, third];
        let mut is_new = |contents| {
            let is_new = !seen.contains(&contents);
            seen.push(contents);
            is_new
        };
        devices.add(of("other")).unwrap();
        assert!(is_new(contents()), "another volume of the name");
        ask("resize", "v", Some(32 << 20));
        assert!(!is_new(contents()), "it grows");
        ask("resize", "v", Some(8 << 20));
        assert!(is_new(contents()), "it was made smaller");
        // The pool stays open.
        let path = place.path().join("other").display().to_string();
        devices.add(uri::parse(&format!("volume:///w?size=16M&path={path}")).unwrap()).unwrap();
        devices.remove("v", Duration::ZERO).unwrap();
        ask("destroy", "v", None);
        devices.add(of("other")).unwrap();
        assert!(is_new(contents()), "another volume of the name in the same pool");
        let null = devices.add(uri::parse("null:///n?size=1M").unwrap()).unwrap();
        assert_eq!(null.contents(), None, "the name alone");
    }
}
