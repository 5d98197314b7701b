//! What devices did: a point each second for an hour, a point each minute for a week.
//!
//! The memory has a bound. The points of a device lie in blocks of [`BLOCK_POINTS`]. If all blocks
//! together exceed the bound, the history of a device that is gone loses its oldest block, or, if
//! every device is still there, the longest history does. So a yard of many devices has a shorter
//! history of each.

use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::LazyLock;

use blockyard_sync::counter::{HISTOGRAM_BUCKETS, bucket_floor};
use serde::Serialize;

use crate::interval::Interval;

/// Rows of a latency heat map: below 2^10 ns (about 1 us), then a row for each power of two; the
/// last one has everything from 2^32 ns (about 4.3 s) on.
pub const HEAT_ROWS: usize = 24;

/// The power of two at which the second row begins.
const FIRST_POWER: u32 = 10;

/// The number of points of a block.
const BLOCK_POINTS: usize = 60;

/// The most bytes of all points together.
pub const HISTORY_BYTES_MAX: usize = 64 << 20;

/// The steps of a doubling in which the count of a row of the heat map is stored, in one byte: 8
/// steps are exact to 5 % and reach 2^31.
const STEPS: f64 = 8.0;

/// The time between two points, and how long points are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// The time between two points, in ms.
    pub step_ms: u64,
    /// The most points of a device.
    pub points_max: usize,
}

/// A point each second, for an hour.
pub const SECONDS: Resolution = Resolution { step_ms: 1_000, points_max: 3_600 };
/// A point each minute, for a week.
pub const MINUTES: Resolution = Resolution { step_ms: 60_000, points_max: 7 * 24 * 60 };

impl Resolution {
    /// The age at which a point is dropped, in ms.
    const fn age_ms_max(self) -> u64 {
        self.step_ms * self.points_max as u64
    }
}

/// What a device did in the time before a point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    reads_per_second: f32,
    writes_per_second: f32,
    read_bytes_per_second: f32,
    written_bytes_per_second: f32,
    errors_per_second: f32,
    queue_size: f32,
    /// Not a number if no read or write completed.
    p50_ns: f32,
    /// Not a number if no read or write completed.
    p99_ns: f32,
    /// The number of reads and writes by their latency, each as [`stored`] returns it.
    heat: [u8; HEAT_ROWS],
}

impl Point {
    /// The point at the end of an interval.
    pub fn new(interval: &Interval) -> Point {
        let rate = |count| interval.rate(count) as f32;
        let percentile =
            |per_mille| interval.percentile_ns(per_mille).map_or(f32::NAN, |ns| ns as f32);
        Point {
            reads_per_second: rate(interval.reads.ops),
            writes_per_second: rate(interval.writes.ops),
            read_bytes_per_second: rate(interval.reads.bytes),
            written_bytes_per_second: rate(interval.writes.bytes),
            errors_per_second: rate(interval.all.errors),
            queue_size: interval.queue_size() as f32,
            p50_ns: percentile(500),
            p99_ns: percentile(990),
            heat: heat_rows(interval).map(stored),
        }
    }
}

/// The number of reads and writes of an interval in each row of the heat map.
pub fn heat_rows(interval: &Interval) -> [u64; HEAT_ROWS] {
    let mut rows = [0; HEAT_ROWS];
    let pairs = interval.read_latency.iter().zip(&interval.write_latency);
    let filled = pairs.map(|(reads, writes)| reads + writes).enumerate();
    for (bucket, count) in filled.take(HISTOGRAM_BUCKETS).filter(|(_, count)| *count > 0) {
        rows[row_of(bucket_floor(bucket))] += count;
    }
    rows
}

/// The row of a latency.
fn row_of(ns: u64) -> usize {
    match ns.checked_ilog2() {
        Some(power) if power >= FIRST_POWER => {
            ((power - FIRST_POWER) as usize + 1).min(HEAT_ROWS - 1)
        }
        _ => 0,
    }
}

/// The least latency of each row, in ns.
pub fn row_floors_ns() -> [u64; HEAT_ROWS] {
    std::array::from_fn(|row| match row {
        0 => 0,
        row => 1 << (FIRST_POWER as usize + row - 1),
    })
}

/// A count in one byte, with an error of 5 % at most.
fn stored(count: u64) -> u8 {
    ((count as f64 + 1.0).log2() * STEPS).round() as u8 // `as` saturates.
}

/// The count of each byte.
static RESTORED: LazyLock<[u64; 256]> = LazyLock::new(|| {
    std::array::from_fn(|byte| ((byte as f64 / STEPS).exp2() - 1.0).round() as u64)
});

/// The count of a byte.
fn restored(byte: u8) -> u64 {
    RESTORED[usize::from(byte)]
}

/// Points of one device, one for each tick from `first` on.
#[derive(Debug)]
struct Block {
    first: u64,
    points: Vec<Point>,
}

impl Block {
    /// The tick after the last point.
    fn end(&self) -> u64 {
        self.first + self.points.len() as u64
    }
}

/// The bytes of a block.
const BLOCK_BYTES: usize = size_of::<Block>() + BLOCK_POINTS * size_of::<Point>();

/// The histories of all devices at one resolution. A tick is the number of a time.
#[derive(Debug)]
struct Tier {
    resolution: Resolution,
    /// The times of the last ticks, in ms.
    times_ms: VecDeque<u64>,
    /// The tick of the first of these times.
    first: u64,
    /// The blocks of each device, the oldest first; none is empty.
    devices: BTreeMap<String, VecDeque<Block>>,
    /// The number of blocks of all devices.
    blocks: usize,
}

/// The rank of a history, by which it loses its oldest block: devices that are gone first, then the
/// longest, in blocks; then the device, and whether it is the history of seconds.
type Rank<'a> = (bool, usize, &'a str, bool);

impl Tier {
    fn new(resolution: Resolution) -> Tier {
        let (times_ms, devices) = (VecDeque::new(), BTreeMap::new());
        Tier { resolution, times_ms, first: 0, devices, blocks: 0 }
    }

    /// The tick after the last one.
    fn end(&self) -> u64 {
        self.first + self.times_ms.len() as u64
    }

    fn record<'p>(&mut self, now_ms: u64, points: impl Iterator<Item = (&'p str, Point)>) {
        let tick = self.end();
        self.times_ms.push_back(now_ms);
        for (device, point) in points {
            let is_new_block = match self.devices.get_mut(device) {
                Some(blocks) => append(blocks, tick, point),
                None => append(self.devices.entry(device.to_owned()).or_default(), tick, point),
            };
            self.blocks += usize::from(is_new_block);
        }
        self.expire(now_ms);
    }

    /// Drops the points that are too old.
    fn expire(&mut self, now_ms: u64) {
        let Resolution { points_max, .. } = self.resolution;
        let oldest_ms = now_ms.saturating_sub(self.resolution.age_ms_max());
        while self.times_ms.len() > points_max
            || self.times_ms.front().is_some_and(|time_ms| *time_ms < oldest_ms)
        {
            self.times_ms.pop_front();
            self.first += 1;
        }
        let (first, count) = (self.first, &mut self.blocks);
        self.devices.retain(|_, blocks| {
            while blocks.front().is_some_and(|block| block.end() <= first) {
                blocks.pop_front();
                *count -= 1;
            }
            !blocks.is_empty()
        });
    }

    /// The rank of each history.
    fn ranks(&self) -> impl Iterator<Item = Rank<'_>> {
        let (end, is_seconds) = (self.end(), self.resolution == SECONDS);
        self.devices.iter().map(move |(device, blocks)| {
            let is_gone = blocks.back().is_none_or(|block| block.end() < end);
            (is_gone, blocks.len(), device.as_str(), is_seconds)
        })
    }

    /// Drops the oldest blocks of a device.
    fn shorten(&mut self, device: &str, count: usize) {
        let Some(blocks) = self.devices.get_mut(device) else { return };
        self.blocks -= blocks.drain(..count).count();
        if blocks.is_empty() {
            self.devices.remove(device);
        }
    }

    /// The number of points of a device that are not too old.
    fn points_count(&self, device: &str) -> usize {
        let blocks = self.devices.get(device).into_iter().flatten();
        blocks.map(|block| block.end() - block.first.max(self.first)).sum::<u64>() as usize
    }

    /// The points of a device that are not older than this time.
    fn points_since(&self, device: &str, oldest_ms: u64) -> impl Iterator<Item = &Point> {
        let blocks = self.devices.get(device).into_iter().flatten().rev();
        let numbered = blocks.flat_map(|block| {
            let points = block.points.iter().enumerate().rev();
            points.map(|(index, point)| (block.first + index as u64, point))
        });
        numbered.map_while(move |(tick, point)| {
            let index = tick.checked_sub(self.first)?;
            (*self.times_ms.get(index as usize)? >= oldest_ms).then_some(point)
        })
    }

    /// The points of a device with their times.
    fn points(&self, device: &str) -> impl Iterator<Item = (u64, &Point)> {
        let blocks = self.devices.get(device).into_iter().flatten();
        let numbered = blocks.flat_map(|block| (block.first..).zip(&block.points));
        numbered.filter_map(|(tick, point)| {
            // The first block may begin with points that are too old.
            let index = tick.checked_sub(self.first)?;
            Some((*self.times_ms.get(index as usize)?, point))
        })
    }
}

/// Adds the point of a tick. Returns whether it begins a block.
fn append(blocks: &mut VecDeque<Block>, tick: u64, point: Point) -> bool {
    let fits = |block: &&mut Block| block.end() == tick && block.points.len() < BLOCK_POINTS;
    if let Some(block) = blocks.back_mut().filter(fits) {
        block.points.push(point);
        return false;
    }
    let mut points = Vec::with_capacity(BLOCK_POINTS);
    points.push(point);
    blocks.push_back(Block { first: tick, points });
    true
}

/// The histories of all devices.
#[derive(Debug)]
pub struct History {
    seconds: Tier,
    minutes: Tier,
    blocks_max: usize,
}

impl Default for History {
    fn default() -> History {
        History::with_bytes_max(HISTORY_BYTES_MAX)
    }
}

impl History {
    /// A history whose points take at most this many bytes.
    pub fn with_bytes_max(bytes_max: usize) -> History {
        let (seconds, minutes) = (Tier::new(SECONDS), Tier::new(MINUTES));
        History { seconds, minutes, blocks_max: bytes_max / BLOCK_BYTES }
    }

    /// Adds the points of all devices at a time, which must not be before the last one.
    pub fn record<'p>(
        &mut self,
        resolution: Resolution,
        now_ms: u64,
        points: impl Iterator<Item = (&'p str, Point)>,
    ) {
        self.tier_mut(resolution).record(now_ms, points);
        for (device, resolution, count) in self.excess() {
            self.tier_mut(resolution).shorten(&device, count);
        }
    }

    fn tier(&self, resolution: Resolution) -> &Tier {
        if resolution == MINUTES { &self.minutes } else { &self.seconds }
    }

    fn tier_mut(&mut self, resolution: Resolution) -> &mut Tier {
        if resolution == MINUTES { &mut self.minutes } else { &mut self.seconds }
    }

    fn blocks(&self) -> usize {
        self.seconds.blocks + self.minutes.blocks
    }

    /// How many of its oldest blocks each history is to lose, so that all fit in the memory. The
    /// devices of a yard begin most of their blocks in the same second, so one pass over the
    /// histories finds all of these blocks.
    fn excess(&self) -> Vec<(String, Resolution, usize)> {
        let mut excess = self.blocks().saturating_sub(self.blocks_max);
        if excess == 0 {
            return Vec::new();
        }
        let mut ranks: BinaryHeap<Rank<'_>> =
            self.seconds.ranks().chain(self.minutes.ranks()).collect();
        let mut counts: BTreeMap<(&str, bool), usize> = BTreeMap::new();
        while excess > 0
            && let Some(mut longest) = ranks.peek_mut()
        {
            let (_, blocks, device, is_seconds) = &mut *longest;
            *counts.entry((*device, *is_seconds)).or_default() += 1;
            *blocks -= 1;
            if *blocks == 0 {
                PeekMut::pop(longest);
            }
            excess -= 1;
        }
        let resolution = |is_seconds| if is_seconds { SECONDS } else { MINUTES };
        let counts = counts.into_iter();
        counts
            .map(|((device, is_seconds), count)| (device.to_owned(), resolution(is_seconds), count))
            .collect()
    }

    /// The bytes of all points now.
    pub fn bytes(&self) -> usize {
        self.blocks() * BLOCK_BYTES
    }

    /// The devices that have a history, and the memory of all.
    pub fn overview(&self) -> HistoryListView {
        let names: std::collections::BTreeSet<&String> =
            self.seconds.devices.keys().chain(self.minutes.devices.keys()).collect();
        let devices = names.into_iter().map(|device| HistorySizeView {
            device: device.clone(),
            seconds: self.seconds.points_count(device),
            minutes: self.minutes.points_count(device),
        });
        HistoryListView {
            bytes: self.bytes(),
            bytes_max: self.blocks_max * BLOCK_BYTES,
            devices: devices.collect(),
        }
    }

    /// The peaks of the devices that were sampled in the minute before this time, by device.
    pub fn peaks(&self, now_ms: u64) -> BTreeMap<String, Peaks> {
        let oldest_ms = now_ms.saturating_sub(PEAK_AGE_MS);
        let peaks = self.seconds.devices.keys().filter_map(|device| {
            let points = self.seconds.points_since(device, oldest_ms);
            let add = |peaks: Option<Peaks>, point| Some(peaks.unwrap_or_default().with(point));
            Some((device.clone(), points.fold(None, add)?))
        });
        peaks.collect()
    }

    /// The history of a device; without points if there is none.
    pub fn of(&self, device: &str, resolution: Resolution) -> HistoryView {
        let mut view = HistoryView {
            device: device.to_owned(),
            step_ms: resolution.step_ms,
            latency_floors_ns: row_floors_ns(),
            ..HistoryView::default()
        };
        for (time_ms, point) in self.tier(resolution).points(device) {
            view.push(time_ms, point);
        }
        view
    }
}

/// How long ago a second may end that is counted in [`Peaks`], in ms.
const PEAK_AGE_MS: u64 = 60_000;

/// The greatest values of a device in a second of the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peaks {
    /// Reads.
    pub reads_per_second: f32,
    /// Writes, appends and write-zeroes.
    pub writes_per_second: f32,
    /// Bytes of successful reads.
    pub read_bytes_per_second: f32,
    /// Bytes of successful writes, appends and write-zeroes.
    pub written_bytes_per_second: f32,
    /// The mean number of operations in progress.
    pub queue_size: f32,
}

impl Peaks {
    /// The peaks with one more second.
    fn with(self, point: &Point) -> Peaks {
        Peaks {
            reads_per_second: self.reads_per_second.max(point.reads_per_second),
            writes_per_second: self.writes_per_second.max(point.writes_per_second),
            read_bytes_per_second: self.read_bytes_per_second.max(point.read_bytes_per_second),
            written_bytes_per_second: self
                .written_bytes_per_second
                .max(point.written_bytes_per_second),
            queue_size: self.queue_size.max(point.queue_size),
        }
    }
}

/// `GET /v1/history`: the devices that have a history.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HistoryListView {
    /// The bytes of all points now.
    pub bytes: usize,
    /// The most bytes of all points.
    pub bytes_max: usize,
    /// The devices, in the order of their names.
    pub devices: Vec<HistorySizeView>,
}

/// A device that has a history.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HistorySizeView {
    /// The device.
    pub device: String,
    /// The number of points of one second.
    pub seconds: usize,
    /// The number of points of one minute.
    pub minutes: usize,
}

/// `GET /v1/history?device=NAME`: a list for each value, with an element for each point.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HistoryView {
    /// The device.
    pub device: String,
    /// The time between two points.
    pub step_ms: u64,
    /// The end of the time that each point stands for, in ms since 1970 UTC.
    pub times_ms: Vec<u64>,
    /// Reads.
    pub reads_per_second: Vec<f32>,
    /// Writes, appends and write-zeroes.
    pub writes_per_second: Vec<f32>,
    /// Bytes of successful reads.
    pub read_bytes_per_second: Vec<f32>,
    /// Bytes of successful writes, appends and write-zeroes.
    pub written_bytes_per_second: Vec<f32>,
    /// Operations that failed.
    pub errors_per_second: Vec<f32>,
    /// The mean number of operations in progress.
    pub queue_size: Vec<f32>,
    /// Median latency of reads and writes; `null` without any.
    pub p50_ns: Vec<f32>,
    /// 99th percentile of it.
    pub p99_ns: Vec<f32>,
    /// The least latency of each row of `latency`.
    pub latency_floors_ns: [u64; HEAT_ROWS],
    /// The number of reads and writes by latency, exact to 5 %: a list for each point.
    pub latency: Vec<[u64; HEAT_ROWS]>,
}

impl HistoryView {
    fn push(&mut self, time_ms: u64, point: &Point) {
        self.times_ms.push(time_ms);
        self.reads_per_second.push(point.reads_per_second);
        self.writes_per_second.push(point.writes_per_second);
        self.read_bytes_per_second.push(point.read_bytes_per_second);
        self.written_bytes_per_second.push(point.written_bytes_per_second);
        self.errors_per_second.push(point.errors_per_second);
        self.queue_size.push(point.queue_size);
        self.p50_ns.push(point.p50_ns);
        self.p99_ns.push(point.p99_ns);
        self.latency.push(point.heat.map(restored));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(value: f32) -> Point {
        Point {
            reads_per_second: value,
            writes_per_second: 0.0,
            read_bytes_per_second: 0.0,
            written_bytes_per_second: 0.0,
            errors_per_second: 0.0,
            queue_size: 0.0,
            p50_ns: f32::NAN,
            p99_ns: f32::NAN,
            heat: [0; HEAT_ROWS],
        }
    }

    /// The yard's clock of a simulation, in ms, which begins in the year 2026.
    const START_MS: u64 = 1_795_000_000_000;

    fn record(history: &mut History, resolution: Resolution, step: u64, devices: &[&str]) {
        let now_ms = START_MS + step * resolution.step_ms;
        let points = devices.iter().map(|device| (*device, point(step as f32)));
        history.record(resolution, now_ms, points);
    }

    #[test]
    fn eight_hours_of_seconds_keep_the_last_hour() {
        let mut history = History::default();
        for second in 0..8 * 3600 {
            record(&mut history, SECONDS, second, &["a"]);
            assert!(history.bytes() <= 61 * BLOCK_BYTES, "{second}");
        }
        let view = history.of("a", SECONDS);
        assert_eq!(view.times_ms.len(), 3600);
        assert_eq!(view.times_ms[0], START_MS + 7 * 3_600_000);
        assert_eq!(view.reads_per_second[0], 25_200.0);
        assert_eq!(*view.reads_per_second.last().unwrap(), 28_799.0);
        assert!(view.times_ms.is_sorted_by(|a, b| b - a == 1000));
    }

    #[test]
    fn two_weeks_of_minutes_keep_the_last_week() {
        let mut history = History::default();
        for minute in 0..14 * 24 * 60 {
            record(&mut history, MINUTES, minute, &["a", "b"]);
        }
        let view = history.of("b", MINUTES);
        assert_eq!((view.times_ms.len(), view.step_ms), (10_080, 60_000));
        assert_eq!(view.times_ms[0], START_MS + 7 * 86_400_000);
        // Two devices, and a block of each that is partly too old.
        assert_eq!(history.bytes(), 2 * 168 * BLOCK_BYTES);
    }

    /// What docs/dashboard.md says.
    #[test]
    fn a_device_takes_less_than_800_kib() {
        let points = SECONDS.points_max + MINUTES.points_max;
        let blocks = points / BLOCK_POINTS + 2;
        assert_eq!(size_of::<Point>(), 56);
        assert_eq!(blocks * BLOCK_BYTES / 1024, 761);
        assert_eq!(HISTORY_BYTES_MAX / (blocks * BLOCK_BYTES), 86);
    }

    #[test]
    fn many_devices_share_the_memory_evenly() {
        let mut history = History::with_bytes_max(100 * BLOCK_BYTES);
        let names: Vec<String> = (0..30).map(|number| format!("d{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for second in 0..3600 {
            // One device was there long before the others.
            let devices = if second < 1800 { &names[..1] } else { &names[..] };
            record(&mut history, SECONDS, second, devices);
            assert!(history.bytes() <= 100 * BLOCK_BYTES);
        }
        let sizes: Vec<usize> = history.overview().devices.iter().map(|it| it.seconds).collect();
        assert_eq!(sizes.len(), 30);
        assert!(sizes.iter().all(|size| (120..=240).contains(size)), "{sizes:?}");
    }

    /// The bug: each block that was dropped took a pass over all histories, and the devices of a
    /// yard all begin a block in the same second: minutes of work at this number of devices.
    #[test]
    fn thousands_of_devices_that_begin_blocks_in_one_second_lose_one_each() {
        const DEVICES: usize = 4096;
        let mut history = History::with_bytes_max(DEVICES * BLOCK_BYTES);
        let names: Vec<String> = (0..DEVICES).map(|number| format!("device{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for second in 0..=2 * BLOCK_POINTS as u64 {
            record(&mut history, SECONDS, second, &names);
        }
        let sizes = history.overview().devices;
        assert_eq!(sizes.len(), DEVICES);
        assert!(sizes.iter().all(|size| size.seconds == 1), "{:?}", sizes[0]);
    }

    /// The histories that lose a block, one after another, as docs/dashboard.md says it.
    fn shortened_one_by_one(history: &History) -> BTreeMap<(String, bool), usize> {
        let ranks = history.seconds.ranks().chain(history.minutes.ranks());
        let mut left: Vec<_> = ranks.collect();
        let mut counts = BTreeMap::new();
        for _ in history.blocks_max..history.blocks() {
            let longest = left.iter_mut().max().unwrap();
            longest.1 -= 1;
            *counts.entry((longest.2.to_owned(), longest.3)).or_default() += 1;
            left.retain(|rank| rank.1 > 0);
        }
        counts
    }

    #[test]
    fn devices_that_are_gone_lose_their_history_first_and_then_the_longest_do() {
        let mut random = fastrand::Rng::with_seed(7);
        let names: Vec<String> = (0..12).map(|number| format!("d{number}")).collect();
        let (mut history, mut dropped) = (History::with_bytes_max(usize::MAX), 0);
        for tick in 0..2_000 {
            let there = names.iter().filter(|_| random.u8(..8) > 0).map(String::as_str);
            let there: Vec<&str> = there.collect();
            record(&mut history, SECONDS, tick, &there);
            if tick % 4 == 0 {
                record(&mut history, MINUTES, tick, &there);
            }
            if random.u8(..40) == 0 {
                history.blocks_max = history.blocks() - history.blocks() / 3;
                let found = history.excess().into_iter();
                let found = found.map(|(device, of, count)| ((device, of == SECONDS), count));
                let found: BTreeMap<_, usize> = found.collect();
                dropped += found.values().sum::<usize>();
                assert_eq!(found, shortened_one_by_one(&history), "{tick}");
                record(&mut history, SECONDS, tick, &there);
                assert!(history.blocks() <= history.blocks_max);
                history.blocks_max = usize::MAX / BLOCK_BYTES;
            }
            let all = history.seconds.devices.values().chain(history.minutes.devices.values());
            assert_eq!(history.blocks(), all.map(VecDeque::len).sum::<usize>());
        }
        assert!(dropped > 100, "{dropped}");
    }

    #[test]
    fn a_device_that_is_gone_is_dropped_by_age() {
        let mut history = History::default();
        for second in 0..3700 {
            let devices = if second < 90 { &["a", "gone"][..] } else { &["a"] };
            record(&mut history, SECONDS, second, devices);
            let left = history.of("gone", SECONDS).times_ms.len() as u64;
            let wanted = (second + 1).min(90).saturating_sub((second + 1).saturating_sub(3600));
            assert_eq!(left, wanted, "{second}");
        }
        let names: Vec<String> =
            history.overview().devices.into_iter().map(|it| it.device).collect();
        assert_eq!(names, ["a"]);
    }

    #[test]
    fn names_that_come_and_go_cost_no_device_its_history() {
        let mut history = History::with_bytes_max(80 * BLOCK_BYTES);
        for second in 0..1000 {
            let passing = format!("passing{second}");
            record(&mut history, SECONDS, second, &["a", &passing]);
            assert!(history.bytes() <= 80 * BLOCK_BYTES);
        }
        assert_eq!(history.of("a", SECONDS).times_ms.len(), 1000);
    }

    #[test]
    fn points_after_a_pause_are_dropped_by_time() {
        let mut history = History::default();
        record(&mut history, SECONDS, 0, &["a"]);
        record(&mut history, SECONDS, 1, &["a"]);
        record(&mut history, SECONDS, 3601, &["a"]);
        let times_ms = history.of("a", SECONDS).times_ms;
        assert_eq!(times_ms, [START_MS + 1_000, START_MS + 3_601_000]);
    }

    #[test]
    fn peaks_are_those_of_the_last_minute() {
        let mut history = History::default();
        let mut add = |second: u64, value: f32| {
            let point = Point { queue_size: 100.0 - value, ..point(value) };
            history.record(SECONDS, START_MS + second * 1_000, [("a", point)].into_iter());
        };
        // More seconds than a block has points.
        (0..=70).for_each(|second| add(second, second as f32));
        (71..=140).for_each(|second| add(second, 10.0));
        let peaks = |second: u64| history.peaks(START_MS + second * 1_000).remove("a");
        let at_130 = peaks(130).unwrap();
        assert_eq!((at_130.reads_per_second, at_130.queue_size), (70.0, 90.0));
        assert_eq!(peaks(131).unwrap().reads_per_second, 10.0, "second 70 is too long ago");
        assert_eq!(peaks(201), None, "the device was not sampled in the last minute");
    }

    #[test]
    fn rows_are_powers_of_two_and_counts_are_kept_within_five_percent() {
        let floors = row_floors_ns();
        assert_eq!((floors[0], floors[1], floors[23]), (0, 1024, 1 << 32));
        for (row, floor) in floors.into_iter().enumerate() {
            assert_eq!(row_of(floor), row);
            assert_eq!(row_of(floor.saturating_sub(1)), row.saturating_sub(1));
        }
        assert_eq!(row_of(u64::MAX), 23);
        for count in (0..40).chain((6..31).map(|power| (1 << power) + 17)) {
            let back = restored(stored(count));
            assert!(back.abs_diff(count) as f64 <= 0.05 * count as f64 + 0.5, "{count}: {back}");
        }
        assert_eq!(stored(u64::MAX), 255);
    }

    #[test]
    fn a_point_without_io_has_no_latency_in_json() {
        let mut history = History::default();
        record(&mut history, SECONDS, 0, &["a"]);
        let json = serde_json::to_value(history.of("a", SECONDS)).unwrap();
        assert_eq!(json["p50_ns"][0], serde_json::Value::Null);
        assert_eq!(json["latency"][0].as_array().unwrap().len(), HEAT_ROWS);
    }
}
