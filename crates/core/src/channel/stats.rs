//! Statistics of a channel: its thread writes them, and any thread may read them.
use std::sync::Arc;

use blockyard_sync::counter::{Counter, CountersEnd, HISTOGRAM_BUCKETS, Histogram, bucket_floor};

use crate::bio::Op;

/// Live counters of one channel, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ChannelStats {
    ops: [Counter; Op::COUNT],
    sectors: [Counter; Op::COUNT],
    errors: [Counter; Op::COUNT],
    merges: [Counter; Op::COUNT],
    latency: [Histogram; LATENCY_CLASSES],
    /// Is reached when the channel is dropped.
    pub(super) end: CountersEnd,
}

/// Latency histograms: reads; writes with appends and write-zeroes; flushes; discards; operations
/// on zones.
const LATENCY_CLASSES: usize = 5;

#[inline]
fn latency_class(op: Op) -> usize {
    match op {
        Op::Read => 0,
        Op::Write | Op::ZoneAppend | Op::WriteZeroes => 1,
        Op::Flush => 2,
        Op::Discard => 3,
        Op::ZoneReset | Op::ZoneResetAll | Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => 4,
    }
}

impl ChannelStats {
    /// New counters, shared with the registry that sums them up.
    pub fn new() -> Arc<ChannelStats> {
        Arc::new(ChannelStats::default())
    }

    /// Adds the completions of a tally.
    #[inline]
    fn completed(&self, tally: &Tally) {
        let index = tally.op as usize;
        self.ops[index].add(tally.ops);
        self.sectors[index].add(tally.sectors);
        if !tally.ok {
            self.errors[index].add(tally.ops);
        }
        if tally.latency_ns != NEVER_STARTED {
            self.latency[latency_class(tally.op)].add(tally.latency_ns, tally.ops);
        }
    }

    /// Counts one bio that was executed inline.
    #[inline]
    pub(crate) fn executed_inline(&self, op: Op, ok: bool, sectors: u64) {
        let index = op as usize;
        self.ops[index].add(1);
        if ok {
            self.sectors[index].add(sectors);
        } else {
            self.errors[index].add(1);
        }
    }

    /// Counts the latency of bios that were executed inline.
    #[inline]
    pub(crate) fn latency(&self, op: Op, latency_ns: u64, bios: u64) {
        self.latency[latency_class(op)].add(latency_ns, bios);
    }

    /// Counts one bio that was merged into a request.
    #[inline]
    pub(crate) fn merged(&self, op: Op) {
        self.merges[op as usize].add(1);
    }
}

/// The latency of a bio that never reached the device. A separate flag would cost instructions in
/// every completion.
pub(crate) const NEVER_STARTED: u64 = u64::MAX;

/// Consecutive completions with equal operation, result and latency, which are counted together.
#[derive(Debug)]
pub(crate) struct Tally {
    op: Op,
    ok: bool,
    ops: u64,
    sectors: u64,
    /// [`NEVER_STARTED`] for bios that never reached the device.
    latency_ns: u64,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally { op: Op::Read, ok: true, ops: 0, sectors: 0, latency_ns: NEVER_STARTED }
    }
}

impl Tally {
    /// Counts one completed bio, now or together with the equal ones that follow.
    #[inline]
    pub(crate) fn add(
        &mut self,
        stats: &ChannelStats,
        op: Op,
        ok: bool,
        sectors: u64,
        latency_ns: u64,
    ) {
        if op != self.op || ok != self.ok || latency_ns != self.latency_ns {
            self.settle(stats);
            (self.op, self.ok, self.latency_ns) = (op, ok, latency_ns);
        }
        self.ops += 1;
        // The length of a refused bio may be any number.
        self.sectors += if ok { sectors } else { 0 };
    }

    /// Adds the collected completions to the counters.
    #[inline]
    pub(crate) fn settle(&mut self, stats: &ChannelStats) {
        if self.ops > 0 {
            stats.completed(self);
            (self.ops, self.sectors) = (0, 0);
        }
    }
}

/// The counters of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// Bios completed, failed ones included.
    pub ops: u64,
    /// Sectors of the bios that succeeded.
    pub sectors: u64,
    /// Bios that failed.
    pub errors: u64,
    /// Bios that were merged into the request of another bio.
    pub merges: u64,
}

/// A sum of counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// A row per operation, by `Op as usize`.
    pub ops: [OpStats; Op::COUNT],
    /// Counts per bucket of the latency of reads.
    pub read_latency: Vec<u64>,
    /// Counts per bucket of the latency of writes, appends and write-zeroes.
    pub write_latency: Vec<u64>,
    /// Counts per bucket of the latency of flushes.
    pub flush_latency: Vec<u64>,
    /// Counts per bucket of the latency of discards.
    pub discard_latency: Vec<u64>,
    /// Counts per bucket of the latency of operations that manage zones.
    pub zone_latency: Vec<u64>,
    /// Channels open now.
    pub channels: u64,
}

impl Default for Stats {
    fn default() -> Stats {
        let buckets = vec![0; HISTOGRAM_BUCKETS];
        Stats {
            ops: [OpStats::default(); Op::COUNT],
            read_latency: buckets.clone(),
            write_latency: buckets.clone(),
            flush_latency: buckets.clone(),
            discard_latency: buckets.clone(),
            zone_latency: buckets,
            channels: 0,
        }
    }
}

impl Stats {
    /// The counters of `op`.
    pub fn op(&self, op: Op) -> &OpStats {
        &self.ops[op as usize]
    }

    /// Adds a channel's counters.
    pub fn add(&mut self, channel: &ChannelStats) {
        for (index, sum) in self.ops.iter_mut().enumerate() {
            sum.ops += channel.ops[index].get();
            sum.sectors += channel.sectors[index].get();
            sum.errors += channel.errors[index].get();
            sum.merges += channel.merges[index].get();
        }
        let sums = [
            &mut self.read_latency,
            &mut self.write_latency,
            &mut self.flush_latency,
            &mut self.discard_latency,
            &mut self.zone_latency,
        ];
        for (sum, histogram) in sums.into_iter().zip(&channel.latency) {
            for (sum, count) in sum.iter_mut().zip(histogram.counts()) {
                *sum += count;
            }
        }
    }
}

/// The smallest latency, in nanoseconds, that at least `per_mille` of 1000 values do not exceed;
/// `None` without values. Exact to 1/16.
pub fn percentile_ns(latency: &[u64], per_mille: u64) -> Option<u64> {
    let total: u64 = latency.iter().sum();
    if total == 0 {
        return None;
    }
    let wanted = (u128::from(total) * u128::from(per_mille)).div_ceil(1000).max(1) as u64;
    let mut seen = 0;
    for (bucket, count) in latency.iter().enumerate() {
        seen += count;
        if seen >= wanted {
            return Some(bucket_floor(bucket));
        }
    }
    None
}
