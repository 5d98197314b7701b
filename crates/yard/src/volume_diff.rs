//! The ranges in which a volume differs from a snapshot, for the control API and the commands.

use blockyard_store::SegmentStore;
use blockyard_volume::VolumeError;
use blockyard_volume_admin::diff::{Diff, DiffRange};
use serde::{Deserialize, Serialize};

/// What has happened to a range since the snapshot.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RangeChange {
    /// It was written.
    Written,
    /// It was discarded, or has become zeros in another way.
    Discarded,
}

impl RangeChange {
    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            RangeChange::Written => "written",
            RangeChange::Discarded => "discarded",
        }
    }
}

/// A range that differs.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct DiffRangeView {
    /// Where it begins, in bytes from the start of the volume.
    pub offset_bytes: u64,
    /// The length.
    pub length_bytes: u64,
    /// What has happened to it.
    pub change: RangeChange,
}

impl From<DiffRange> for DiffRangeView {
    fn from(range: DiffRange) -> DiffRangeView {
        let DiffRange { offset_bytes, len_bytes: length_bytes, is_discarded } = range;
        let change = if is_discarded { RangeChange::Discarded } else { RangeChange::Written };
        DiffRangeView { offset_bytes, length_bytes, change }
    }
}

/// The sums of all ranges.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct DiffTotals {
    /// The number of ranges.
    pub ranges: u64,
    /// The bytes of ranges that were written.
    pub written_bytes: u64,
    /// The bytes of ranges that were discarded.
    pub discarded_bytes: u64,
    /// The capacity of the snapshot that was compared with.
    pub from_size_bytes: u64,
    /// The capacity of what was compared. Ranges end there.
    pub to_size_bytes: u64,
}

/// A line of the answer to `diff`: a range, or in the last line the totals.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum DiffLine {
    /// A range.
    Range(DiffRangeView),
    /// The sums of all ranges before.
    Totals(DiffTotals),
}

/// Gives each range to `line`, and the totals last.
///
/// # Errors
/// If a page of a map cannot be read, or that of `line`.
pub fn each_line<D: SegmentStore, E: From<VolumeError>>(
    diff: Diff<'_, D>,
    line: &mut dyn FnMut(&DiffLine) -> Result<(), E>,
) -> Result<(), E> {
    let (from_size_bytes, to_size_bytes) = (diff.from_size_bytes, diff.to_size_bytes);
    let mut totals = DiffTotals { from_size_bytes, to_size_bytes, ..DiffTotals::default() };
    for range in diff {
        let range = DiffRangeView::from(range?);
        totals.ranges += 1;
        match range.change {
            RangeChange::Written => totals.written_bytes += range.length_bytes,
            RangeChange::Discarded => totals.discarded_bytes += range.length_bytes,
        }
        line(&DiffLine::Range(range))?;
    }
    line(&DiffLine::Totals(totals))
}
