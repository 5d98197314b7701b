//! Rows of our own: a block's path compared with the bare codec, one hot block, and many threads.

use std::sync::Arc;

use blockyard_baselines::locked_ram;
use blockyard_core::{Disk, Status};
use blockyard_ram::codec::{Decoder, Encoder, packed_bytes_max};
use blockyard_ram::{Codec, CodecConfig};
use hdrhistogram::Histogram;

use super::rows::RECORD_BYTES;
use super::{GUARDINGS, PRODUCT, guardings, open};
use crate::corpus::{CORPUS_BYTES, corpus};
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Variant, VariantRole, Workload};
use crate::experiments::cached::Cached;
use crate::limits::pair::together;
use crate::limits::slices::alone;
use crate::load::records::{Does, Order, Part, Passed, Records, Task, Way, pass};
use crate::load::workers::{self, Work};
use crate::load::{UNDISTURBED_IOPS, latencies};
use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Round, Sample};

/// The name of the variant that runs the codec without a device.
pub const BARE: &str = "bare-codec";
/// Workloads of one thread on a processor of its own, and of two such threads.
const ALONE: &str = "alone";
const PAIR: &str = "pair";
/// The reference for many threads: the product with as many threads as the smallest machine has
/// processors.
const TWO: &str = "product-two-threads";

const PATH_WRITE: &str = "path-write";
const PATH_READ: &str = "path-read";
const HOT: &str = "hot-read";
const HOT_BIT: &str = "hot-read-bit-spin";
const CROWD: &str = "crowd";

pub(super) const VARIANTS: [Variant; 4] = [
    Variant {
        name: BARE,
        kind: VariantRole::Limit,
        about: "the codec in a loop from memory to memory, without a device",
    },
    Variant { name: ALONE, kind: VariantRole::Limit, about: "one thread on its own CPU" },
    Variant { name: PAIR, kind: VariantRole::Product, about: "two threads, each on its own CPU" },
    Variant {
        name: TWO,
        kind: VariantRole::Limit,
        about: "the product with two threads, one of which uses only the hot blocks; the number of \
                jobs of the row does not apply",
    },
];

pub(super) const WORKLOADS: [Workload; 5] = [
    Workload {
        name: PATH_WRITE,
        about: "16 KiB sequential writes by one thread; `bare-codec` compresses as many blocks in \
                a loop",
    },
    Workload {
        name: PATH_READ,
        about: "16 KiB sequential reads by one thread; `bare-codec` decompresses as many blocks in \
                a loop",
    },
    Workload {
        name: HOT,
        about: "reads of the same 4 KiB block of the product by one thread and by two",
    },
    Workload {
        name: HOT_BIT,
        about: "as `hot-read`, of the published change (`bit-spin`), where each read takes the \
                lock of the block",
    },
    Workload {
        name: CROWD,
        about: "32 threads read or write 4 KiB blocks at random; half of the threads use only 8 \
                hot blocks",
    },
];

/// The length of a block, of which one is hot.
const BLOCK_BYTES: u64 = 4096;
/// The device of the single-thread rows, as large as the corpus.
const PATH_DEVICE: &str = "ram:///p?size=16M&algo=lz4&compact=0";
/// The device of the hot block and of the many threads, and its size.
const HOT_DEVICE: &str = "ram:///h?size=64M&algo=lz4&compact=0";
const HOT_DEVICE_BYTES: u64 = 64 << 20;
const HOT_BLOCKS: u64 = 8;
/// The number of threads in the crowded rows.
const CROWD_JOBS: u32 = 32;

/// The least speed relative to the bare codec: within 10 % for writes, 25 % for reads.
const AIM_PATH_WRITE: f64 = 1.0 / 1.10;
const AIM_PATH_READ: f64 = 1.0 / 1.25;
const AIM_HOT: f64 = 1.9;
const AIM_CROWD: f64 = 0.8;

/// The cells of all these rows.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let mut cells = paths(settings);
    if settings.processors >= 2 {
        cells.extend(hot());
    }
    cells.extend(crowds(settings));
    cells
}

/// The comparisons and their aims.
pub(super) fn comparisons() -> Vec<Comparison> {
    let path = Comparison::new(BARE, PRODUCT, Metric::CPU_PER_IO);
    let hot = Comparison::new(ALONE, PAIR, UNDISTURBED_IOPS);
    vec![
        path.under(PATH_WRITE).aim(AIM_PATH_WRITE),
        path.under(PATH_READ).aim(AIM_PATH_READ),
        hot.under(HOT).aim(AIM_HOT),
        hot.under(HOT_BIT),
        Comparison::new(TWO, PRODUCT, Metric::IOPS).under(CROWD).aim(AIM_CROWD),
    ]
}

fn task(does: Does, order: Order, record_bytes: u64) -> Task {
    Task { does, order, way: Way::Push, record_bytes }
}

/// Opens a disk and writes its first bytes.
fn filled(
    before: Option<&str>,
    uri: &str,
    len_bytes: u64,
    round: &Round<'_>,
) -> Result<Arc<dyn Disk>, LabError> {
    let disk = open(before, uri)?;
    let part = Part { from: 0, len_bytes };
    let fill = task(Does::Write, Order::Forward, RECORD_BYTES);
    pass(vec![Records::open(&*disk, fill, part, 0)?], round)?;
    Ok(disk)
}

/// The cells of one thread on a device, compared with the codec in a loop.
fn paths(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (workload, does) in [(PATH_WRITE, Does::Write), (PATH_READ, Does::Read)] {
        cells.push(Cell::new(BARE, workload, 1, move |round| {
            sample(workers::run(vec![Bare::new(does)?], round, || ())?)
        }));
        for guarding in guardings(settings) {
            let kept = Cached::new();
            cells.push(Cell::new(guarding.variant.name, workload, 1, move |round| {
                let len_bytes = CORPUS_BYTES as u64;
                let make = || filled(guarding.before, PATH_DEVICE, len_bytes, round);
                let disk = kept.get(make)?;
                let part = Part { from: 0, len_bytes };
                let task = task(does, Order::Forward, RECORD_BYTES);
                sample(workers::run(vec![Records::open(&*disk, task, part, 0)?], round, || ())?)
            }));
        }
    }
    cells
}

fn sample<W>(outcome: workers::WorkersResult<W, ()>) -> Result<Sample, LabError> {
    if outcome.ios == 0 {
        return Err(LabError::failed("one thread", "no I/O ended in the measured window"));
    }
    let passed = Passed { records: outcome.ios, wall: outcome.wall, cpu: outcome.cpu };
    Ok(passed.sample(RECORD_BYTES))
}

/// The codec in a loop over the corpus, one record after the other, block by block.
struct Bare {
    codec: Codec,
    encoder: Encoder,
    decoder: Decoder,
    does: Does,
    plain: Vec<u8>,
    /// The corpus, compressed without gaps, and the end of each compressed block.
    packed: Vec<u8>,
    ends: Vec<usize>,
    into: Vec<u8>,
    /// The index of the next block.
    next: usize,
}

const BLOCK: usize = BLOCK_BYTES as usize;
/// The greatest length that is stored compressed; larger blocks are stored raw, so the codec stops
/// there.
const WORTH_MAX: usize = BLOCK - BLOCK / 16;

impl Bare {
    fn new(does: Does) -> Result<Bare, LabError> {
        let failed = |error: blockyard_ram::RamError| LabError::failed("lz4", error);
        let codec = Codec::new(&CodecConfig::default(), "algo").map_err(failed)?;
        let mut encoder = codec.encoder(BLOCK).map_err(failed)?;
        let mut plain = vec![0; CORPUS_BYTES];
        corpus()?.read(0, &mut plain);
        let mut into = vec![0; packed_bytes_max(BLOCK)];
        let (mut packed, mut ends) = (Vec::new(), Vec::new());
        for block in plain.chunks_exact(BLOCK) {
            let len = codec.compress(&mut encoder, block, &mut into, usize::MAX);
            packed.extend_from_slice(&into[..len.expect("there is room for anything")]);
            ends.push(packed.len());
        }
        let decoder = Decoder::new(BLOCK, false).map_err(failed)?;
        Ok(Bare { codec, encoder, decoder, does, plain, packed, ends, into, next: 0 })
    }

    fn compress(&mut self) {
        let block = &self.plain[self.next * BLOCK..][..BLOCK];
        let len = self.codec.compress(&mut self.encoder, block, &mut self.into, WORTH_MAX);
        std::hint::black_box(len);
    }

    fn decompress(&mut self) -> Result<(), LabError> {
        let from = self.next.checked_sub(1).map_or(0, |before| self.ends[before]);
        let packed = &self.packed[from..self.ends[self.next]];
        let into = &mut self.into[..BLOCK];
        let done = self.codec.decompress_here(&mut self.decoder, packed, into);
        done.map_err(|_| LabError::failed("lz4", "what it made is no block"))
    }
}

impl Work for Bare {
    fn turn(&mut self) -> Result<u64, LabError> {
        for _ in 0..RECORD_BYTES / BLOCK_BYTES {
            match self.does {
                Does::Read => self.decompress()?,
                _ => self.compress(),
            }
            self.next = (self.next + 1) % self.ends.len();
        }
        Ok(1)
    }
}

/// The cells of one hot block, read by one thread and by two.
fn hot() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (workload, before) in [(HOT, None), (HOT_BIT, Some(locked_ram::BIT_SPIN))] {
        for (variant, threads) in [(ALONE, 1), (PAIR, 2)] {
            cells.push(Cell::new(variant, workload, 2, move |round| {
                let disk = filled(before, HOT_DEVICE, RECORD_BYTES, round)?;
                hot_reads(&*disk, threads, round)
            }));
        }
    }
    cells
}

fn hot_reads(disk: &dyn Disk, threads: usize, round: &Round<'_>) -> Result<Sample, LabError> {
    let part = Part { from: 0, len_bytes: BLOCK_BYTES };
    let task = task(Does::Read, Order::Forward, BLOCK_BYTES);
    let thread = || Records::open(disk, task, part, 0);
    let mut failed = [None, None];
    let [first, second] = &mut failed;
    let reading = if threads == 1 {
        let mut run = reads(thread()?, first);
        alone(round, |ops| {
            run(ops);
        })
    } else {
        together(round, false, [reads(thread()?, first), reads(thread()?, second)])
    };
    if let Some(status) = failed.into_iter().flatten().next() {
        return Err(LabError::failed("a hot block", status));
    }
    Ok(Sample::of(UNDISTURBED_IOPS, 1e9 / reading?.ns_per_op))
}

/// Executes the requested number of reads, until one fails.
fn reads(mut records: Records, failed: &mut Option<Status>) -> impl FnMut(u32) -> u64 {
    move |ops| {
        for _ in 0..ops {
            if failed.is_none()
                && let Err(status) = records.one()
            {
                *failed = Some(status);
            }
        }
        0
    }
}

/// The cells of many threads, half of which use few blocks; and of two threads, one of which uses
/// those few.
fn crowds(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    let crowd = |variant, before: Option<&'static str>, threads: u32| {
        let kept = Cached::new();
        Cell::new(variant, CROWD, CROWD_JOBS, move |round| {
            let make = || filled(before, HOT_DEVICE, HOT_DEVICE_BYTES, round);
            many(&*kept.get(make)?, threads, round)
        })
    };
    for guarding in &GUARDINGS {
        if [locked_ram::TABLE_LOCK, locked_ram::BIT_SPIN, PRODUCT].contains(&guarding.variant.name)
        {
            cells.push(crowd(guarding.variant.name, guarding.before, CROWD_JOBS));
        }
    }
    if settings.processors >= 2 {
        cells.push(crowd(TWO, None, 2));
    }
    cells
}

fn many(disk: &dyn Disk, threads: u32, round: &Round<'_>) -> Result<Sample, LabError> {
    let task = task(Does::Either, Order::Random, BLOCK_BYTES);
    let thread = |number: u64| {
        let len_bytes =
            if number.is_multiple_of(2) { HOT_BLOCKS * BLOCK_BYTES } else { HOT_DEVICE_BYTES };
        let part = Part { from: 0, len_bytes };
        Ok(Records::open(disk, task, part, round.seed.wrapping_add(number))?.timed())
    };
    let works = (0..u64::from(threads)).map(thread).collect::<Result<Vec<_>, LabError>>()?;
    let outcome = workers::run(works, round, || ())?;
    let mut latency: Histogram<u64> = latencies();
    for times in outcome.workers.iter().filter_map(Records::latency) {
        latency.add(times).expect("both have the same range");
    }
    let sample =
        outcome.sample(CROWD)?.with(Metric::P999, latency.value_at_percentile(99.9) as f64);
    Ok(Sample { latency: LatencyPercentiles::of(&latency), ..sample })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    #[test]
    fn every_cell_is_measured() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::from_millis(1), Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        let none = std::path::PathBuf::new();
        let settings = Settings {
            quick: true,
            engine: None,
            program: none.clone(),
            lab: "blockyard-lab".into(),
            scratch: none,
            processors: 2,
            peers: Default::default(),
        };
        for cell in cells(&settings) {
            // A cell that needs two exclusive processors may not get them here.
            match (cell.body)(&round) {
                Ok(sample) => assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("the machine is too busy"), "{cell:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn the_bare_codec_does_both_over_all_of_the_corpus() {
        for does in [Does::Read, Does::Write] {
            let mut bare = Bare::new(does).unwrap();
            for _ in 0..CORPUS_BYTES as u64 / RECORD_BYTES {
                assert_eq!(bare.turn().unwrap(), 1);
            }
            assert_eq!(bare.next, 0, "it begins again");
            if does == Does::Read {
                assert!(bare.into[..BLOCK] == bare.plain[CORPUS_BYTES - BLOCK..]);
            }
        }
    }
}
