//! CPU time of one I/O, from push to reap, on one thread.
//!
//! Each row is a device and a pattern; each column is a batch size. A figure is the median over
//! rounds of thread CPU time per 4 KiB I/O in nanoseconds, followed by the minimum and the maximum.
//! Bios go through a boxed channel: plug, tags, scheduler (`none` unless a row says otherwise),
//! queue and back.
//!
//! `cargo bench -p blockyard-null --bench throughput [-- FILTER]`
#![allow(unsafe_code)]

use std::time::Duration;

use blockyard_core::channel::{Channel, ChannelConfig};
use blockyard_core::composed::Composed;
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::{Bio, BufRef, Device, Disk, Op, Region, RegionId, SECTOR_BYTES, Sector};
use blockyard_null::{Null, NullConfig};

const BATCHES: [usize; 4] = [1, 4, 32, 128];
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(60);
/// Sectors of one I/O.
const SECTORS: u64 = 8;
const ZONE_SECTORS: u64 = (256 << 20) / SECTOR_BYTES;
/// Zones that are written in turn, so that the bios of a batch are not adjacent and cannot merge.
const ZONES: u64 = 128;

/// CPU time of this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is that of a local timespec.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(answer, 0, "the thread has a clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The sequence of I/Os of a row.
struct Pattern {
    op: Op,
    sectors: u64,
    random: u64,
    /// For writes and appends: the next zone; `written` is the number of sectors that each zone
    /// has.
    zone: u64,
    written: u64,
    zones: u64,
}

impl Pattern {
    fn new(op: Op, sectors: u64, zones: u64) -> Pattern {
        Pattern { op, sectors, random: 0x9e37_79b9_7f4a_7c15, zone: 0, written: 0, zones }
    }

    fn next(&mut self, region: RegionId, slot: u64) -> Bio {
        let buf = BufRef { region, offset: slot * SECTORS * SECTOR_BYTES };
        let start = Sector(self.zone * ZONE_SECTORS);
        let written = self.written;
        if self.op != Op::Read {
            self.zone += 1;
            if self.zone == self.zones {
                self.zone = 0;
                self.written += SECTORS;
            }
        }
        match self.op {
            Op::Write => Bio::write(start + written, SECTORS, buf),
            Op::ZoneAppend => Bio::append(start, SECTORS, buf),
            _ => {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                let block =
                    ((u128::from(self.random) * u128::from(self.sectors / SECTORS)) >> 64) as u64;
                Bio::read(Sector(block * SECTORS), SECTORS, buf)
            }
        }
    }

    /// Whether the zones are full and must be reset.
    fn is_full(&self) -> bool {
        self.written + SECTORS > ZONE_SECTORS - 4096
    }
}

/// One round: thread time per I/O in nanoseconds.
fn round(channel: &mut dyn Channel, region: RegionId, pattern: &mut Pattern, batch: usize) -> f64 {
    let mut bios = Vec::with_capacity(batch);
    let mut out = Vec::with_capacity(batch);
    let (mut count, mut spent) = (0u64, Duration::ZERO);
    while spent < ROUND {
        if pattern.op != Op::Read && pattern.is_full() {
            drive(channel, &[Bio::new(Op::ZoneResetAll, Sector(0), 0)], &mut out);
            pattern.written = 0;
            pattern.zone = 0;
        }
        let start = thread_time();
        for _ in 0..(2048 / batch).max(1) {
            bios.clear();
            bios.extend((0..batch).map(|slot| pattern.next(region, slot as u64)));
            drive(channel, &bios, &mut out);
            count += batch as u64;
        }
        spent += thread_time() - start;
    }
    spent.as_nanos() as f64 / count as f64
}

/// Pushes, submits and reaps a batch.
fn drive(channel: &mut dyn Channel, bios: &[Bio], out: &mut Vec<blockyard_core::Completion>) {
    out.clear();
    assert_eq!(channel.push(bios), bios.len(), "a batch fits");
    channel.submit();
    while out.len() < bios.len() {
        channel.reap(out);
    }
    debug_assert!(out.iter().all(|completion| completion.status.is_ok()));
}

/// Writes a whole device once, so that reads find data.
fn fill(channel: &mut dyn Channel, region: RegionId, sectors: u64) {
    let mut out = Vec::new();
    for sector in (0..sectors).step_by(1024) {
        let bio = Bio::write(Sector(sector), 1024, BufRef { region, offset: 0 });
        drive(channel, &[bio], &mut out);
    }
}

/// The copy alone, without a device: copies random blocks of 4 KiB out of `len_bytes` of memory.
/// The difference to a memory-backed read is the cost of the stack.
fn measure_copy(name: &str, len_bytes: usize) {
    if is_filtered_out(name) {
        return;
    }
    let source = Region::alloc(len_bytes);
    // SAFETY: the range is the region's own, and no other code uses it.
    unsafe {
        libc::madvise(source.base().cast(), len_bytes, libc::MADV_HUGEPAGE);
        source.base().write_bytes(1, len_bytes);
    }
    print!("{name:<34}");
    for batch in BATCHES {
        let buffer = Region::alloc(batch * 4096);
        let mut pattern = Pattern::new(Op::Read, len_bytes as u64 / SECTOR_BYTES, 0);
        let mut rounds: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                let (start, count) = (thread_time(), 100_000 / batch);
                for _ in 0..count {
                    for slot in 0..batch {
                        let bio = pattern.next(RegionId(0), slot as u64);
                        // SAFETY: the pattern stays inside the source, the slot inside the buffer.
                        unsafe {
                            let from = source.base().add(bio.sector.bytes() as usize);
                            from.copy_to_nonoverlapping(buffer.base().add(slot * 4096), 4096);
                        }
                    }
                }
                (thread_time() - start).as_nanos() as f64 / (count * batch) as f64
            })
            .collect();
        print_median(&mut rounds);
    }
    println!();
}

fn is_filtered_out(name: &str) -> bool {
    std::env::args().skip(1).any(|arg| !arg.starts_with('-') && !name.contains(&arg))
}

fn print_median(rounds: &mut [f64]) {
    rounds.sort_by(f64::total_cmp);
    let text = format!("{:.1} ({:.1}-{:.1})", rounds[ROUNDS / 2], rounds[0], rounds[ROUNDS - 1]);
    print!("{text:>23}");
}

/// A disk on which channels share no scheduler.
fn plain_disk(config: NullConfig) -> Box<dyn Disk> {
    disk(Null::open(config).expect("the configuration is ours"))
}

/// A disk whose channels share a scheduler, which is active or bypassed.
fn scheduled_disk(config: NullConfig, active: bool) -> Box<dyn Disk> {
    let device = Null::open(config).expect("the configuration is ours");
    disk(Scheduled::new(device, active).expect("a new device has queues"))
}

fn disk<D: Device>(device: D) -> Box<dyn Disk> {
    let (name, config) = ("bench".to_owned(), ChannelConfig::default());
    Box::new(Composed::new(name, "null", device, config))
}

fn measure(name: &str, config: NullConfig, op: Op, zones: u64) {
    measure_on(name, config, op, zones, plain_disk);
}

fn measure_on(
    name: &str,
    config: NullConfig,
    op: Op,
    zones: u64,
    make: impl Fn(NullConfig) -> Box<dyn Disk>,
) {
    if is_filtered_out(name) {
        return;
    }
    let (sectors, memory_backed) = (config.size / SECTOR_BYTES, config.memory_backed);
    let disk = make(config);
    let mut channel = disk.open().expect("a new device has queues");
    let region = channel.register(Region::alloc(1 << 20));
    if memory_backed {
        fill(&mut *channel, region, sectors);
    }
    print!("{name:<34}");
    for batch in BATCHES {
        let mut pattern = Pattern::new(op, sectors, zones);
        if op != Op::Read {
            drive(&mut *channel, &[Bio::new(Op::ZoneResetAll, Sector(0), 0)], &mut Vec::new());
        }
        round(&mut *channel, region, &mut pattern, batch);
        let mut rounds: Vec<f64> =
            (0..ROUNDS).map(|_| round(&mut *channel, region, &mut pattern, batch)).collect();
        print_median(&mut rounds);
    }
    println!();
}

fn main() {
    let plain = || NullConfig { bs: 4096, hw_queue_depth: 128, ..NullConfig::default() };
    let zoned = || NullConfig { zoned: true, size: ZONES * (256 << 20), ..plain() };
    let limits = || NullConfig { zone_max_open: 14, zone_max_active: 28, ..zoned() };
    let memory = |size| NullConfig { memory_backed: true, size, ..plain() };
    println!("ns of thread CPU time per 4 KiB I/O: median (min-max) of {ROUNDS} rounds");
    println!("{:<34}{:>23}{:>23}{:>23}{:>23}", "batch of", 1, 4, 32, 128);
    measure("null read", plain(), Op::Read, 0);
    let (past, through) =
        (|config| scheduled_disk(config, false), |config| scheduled_disk(config, true));
    measure_on("null read, past mq-deadline", plain(), Op::Read, 0, past);
    measure_on("null read, mq-deadline", plain(), Op::Read, 0, through);
    measure("zoned read", zoned(), Op::Read, 0);
    measure("zoned write, 128 zones in turn", zoned(), Op::Write, ZONES);
    measure("zoned write, one zone, merging", zoned(), Op::Write, 1);
    measure("zoned append, 128 zones in turn", zoned(), Op::ZoneAppend, ZONES);
    measure("zoned append, one zone", zoned(), Op::ZoneAppend, 1);
    measure("zoned append, one zone, limits", limits(), Op::ZoneAppend, 1);
    measure_copy("copy alone, 16 MiB", 16 << 20);
    measure("memory read, 16 MiB", memory(16 << 20), Op::Read, 0);
    measure_on("memory read, mq-deadline", memory(16 << 20), Op::Read, 0, through);
    measure_copy("copy alone, 1 GiB", 1 << 30);
    measure("memory read, 1 GiB", memory(1 << 30), Op::Read, 0);
}
