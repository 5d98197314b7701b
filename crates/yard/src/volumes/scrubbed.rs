//! What scrubs and checks of a pool have found.

use blockyard_volume::verify::{Damage, Report};
use blockyard_volume_format::catalogue::ScrubRecord;
use serde::{Deserialize, Serialize};

use super::CopyView;

/// The last scrub of a pool.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct LastScrubView {
    /// When it ended, in seconds since 1970 (UTC).
    pub ended: u64,
    /// How long it took.
    pub duration_ms: u64,
    /// The stored length of the blocks that it verified.
    pub verified_bytes: u64,
    /// The damaged blocks and map pages that it found and could not repair.
    pub damaged: u64,
    /// Those that it repaired from the other copy.
    pub repaired: u64,
}

impl From<ScrubRecord> for LastScrubView {
    fn from(record: ScrubRecord) -> LastScrubView {
        let ScrubRecord { ended, duration_ms, verified_bytes, damaged, repaired } = record;
        LastScrubView { ended, duration_ms, verified_bytes, damaged, repaired }
    }
}

/// A line of the response to `scrub`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ScrubLine {
    /// The bytes verified so far.
    pub verified_bytes: u64,
    /// The most bytes that are to be verified.
    pub total_bytes: u64,
    /// The result, in the last line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<ScrubView>,
}

/// The result of a scrub or a check.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ScrubView {
    /// The number of volumes and snapshots.
    pub volumes: u64,
    /// The blocks that were read; a shared block counts once.
    pub blocks: u64,
    /// The stored length of these blocks.
    pub stored_bytes: u64,
    /// The log batches that a check has read.
    pub groups: u64,
    /// The damaged blocks and map pages.
    pub damaged: u64,
    /// The blocks that a scrub has repaired from the other copy.
    #[serde(default)]
    pub mended: u64,
    /// The blocks of the last writes that a check found in only one of two copies: the next opening
    /// writes them to the other copy.
    #[serde(default)]
    pub in_one_copy: u64,
    /// The intact groups after the end of the log that a check found: the next opening does not use
    /// them.
    #[serde(default)]
    pub unused_groups: u64,
    /// The copies that a check has read, if there are two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<CopyView>,
    /// The first damages.
    pub damage: Vec<DamageView>,
}

/// A damage.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct DamageView {
    /// One of the volumes or snapshots that have it.
    pub volume: String,
    /// The number of the block in the volume.
    pub block: u64,
    /// The address in the pool, in bytes.
    pub address: u64,
    /// The kind of damage.
    pub what: String,
}

impl From<Report> for ScrubView {
    fn from(report: Report) -> ScrubView {
        let Report {
            volumes,
            blocks,
            stored_bytes,
            groups,
            damaged,
            repaired: mended,
            in_one_copy,
            unused_groups,
            copies,
            damage,
        } = report;
        let damage = damage.into_iter().map(|Damage { volume, block, address, what }| DamageView {
            volume,
            block,
            address,
            what,
        });
        let copies = copies.into_iter().map(CopyView::from).collect();
        let damage = damage.collect();
        ScrubView {
            volumes,
            blocks,
            stored_bytes,
            groups,
            damaged,
            mended,
            in_one_copy,
            unused_groups,
            copies,
            damage,
        }
    }
}
