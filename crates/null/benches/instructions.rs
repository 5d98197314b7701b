//! Instructions per I/O on the path from push to reap, and in the scheduler's queue, counted by
//! valgrind.
//!
//! Counts do not depend on the machine's load, so they are a gate: a bench that takes 5 % more than
//! `instructions.txt` records fails. A commit that changes the hot path on purpose updates the
//! count in that file.
//!
//! ```text
//! cargo bench -p blockyard-null --bench instructions    # needs valgrind
//! ```

mod common;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{Deadline, DeadlineConfig, Item, Kind, Tunables};
use blockyard_core::zone::gate::ZoneWritePlugs;
use blockyard_core::{Bio, BufRef, Flags, Limits, Nanos, Op, Prio, Sector};
use blockyard_null::{Null, NullConfig};
use common::{BATCH, BATCHES, Load, SECTORS, apart, bench, drive, flat, load, load_on, reads, run};

/// The set-up with a zone write plug in the path.
fn gated(config: NullConfig, bio: impl Fn(u64, BufRef) -> Bio) -> Load {
    let null = Null::open(config).expect("the configuration fits");
    let gates = ZoneWritePlugs::new(Arc::clone(&null)).expect("there is memory for few zones");
    let depth = ChannelConfig::default();
    let disk = Composed::new("n".to_owned(), "null", null, depth);
    load_on(&disk.with_gates(gates.expect("the device is zoned")), bio)
}

fn zoned() -> NullConfig {
    NullConfig { zoned: true, zone_size: 1 << 20, zone_max_open: 0, ..flat(false) }
}

fn backed_reads() -> Load {
    let mut writes = load(flat(true), |index, buf| Bio::write(apart(index), SECTORS, buf));
    drive(&mut writes);
    for bio in &mut writes.bios {
        *bio = Bio::read(bio.sector, SECTORS, bio.buf);
    }
    writes
}

fn merged_writes() -> Load {
    load(flat(false), |index, buf| Bio::write(Sector(index * SECTORS), SECTORS, buf))
}

/// A write; the writes of a batch go to different zones.
fn zone_write(index: u64, buf: BufRef) -> Bio {
    let (zone, row) = (index % BATCH, index / BATCH);
    Bio::write(Sector(zone * 2048 + row * SECTORS), SECTORS, buf).with_flags(Flags::NONE)
}

fn zone_writes() -> Load {
    load(zoned(), zone_write)
}

fn gated_writes() -> Load {
    gated(zoned(), zone_write)
}

/// Reads of data that were written to zones.
fn zone_reads() -> Load {
    let mut writes = zone_writes();
    drive(&mut writes);
    for bio in &mut writes.bios {
        *bio = Bio::read(bio.sector, SECTORS, bio.buf);
    }
    writes
}

/// Sixteen appends to each of two zones.
fn append(index: u64, buf: BufRef) -> Bio {
    let zone = index / BATCH / 8 * 2 + index % 2;
    Bio::append(Sector(zone * 2048), SECTORS, buf)
}

fn appends() -> Load {
    load(zoned(), append)
}

/// Appends that the zone write plug makes of writes.
fn made_appends() -> Load {
    gated(NullConfig { zone_append_max_sectors: 0, ..zoned() }, append)
}

fn push_to_reap(mut load: Load) -> Load {
    drive(&mut load);
    load
}

/// Requests that wait in the scheduler's queue while others come and go.
const WAITING: u64 = 256;

/// A minimal request for the queue.
#[derive(Clone, Copy)]
struct Plain {
    op: Op,
    sector: u64,
    sectors: u64,
}

impl Item for Plain {
    fn kind(&self) -> Kind {
        Kind::of(self.op, Prio::BestEffort)
    }

    fn sector(&self) -> Sector {
        Sector(self.sector)
    }

    fn sectors(&self) -> u64 {
        self.sectors
    }

    fn joins(&self, next: &Plain, rules: MergeRules) -> bool {
        let range = Sector(self.sector)..Sector(next.sector + next.sectors);
        self.op == next.op && rules.fits(self.op, range, 2)
    }

    fn merge_back(&mut self, next: Plain) {
        self.sectors += next.sectors;
    }
}

/// A queue in which some requests already wait, and the requests to insert next.
struct Queue {
    order: Deadline<Plain>,
    requests: Vec<Plain>,
    taken: Vec<Plain>,
    refused: Vec<Plain>,
}

fn queue(request: impl Fn(u64) -> Plain) -> Queue {
    let mut order = Deadline::new(DeadlineConfig {
        capacity: 1024,
        in_flight_max: 64,
        rules: MergeRules::new(&Limits { sectors_max: 64 * SECTORS, ..Limits::unlimited(64) }),
        zones: None,
        tunables: Tunables::new(1024),
    });
    for index in 0..WAITING {
        // The waiting requests are far from the new ones, so that nothing merges with them.
        let waits = request(index);
        let waits = Plain { sector: waits.sector + (1 << 40), ..waits };
        assert!(order.insert(waits, Nanos(0)).is_ok());
    }
    let requests = (0..BATCHES * BATCH).map(request).collect();
    let (taken, refused) = (Vec::with_capacity(BATCH as usize), Vec::with_capacity(1));
    Queue { order, requests, taken, refused }
}

/// Reads and writes, at sectors that a multiplicative hash scatters over the device.
fn strewn() -> Queue {
    queue(|index| {
        let sector = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 30 << 4;
        let op = if index % 3 == 0 { Op::Write } else { Op::Read };
        Plain { op, sector, sectors: SECTORS }
    })
}

/// Writes of four sequential streams, in turn.
fn streams() -> Queue {
    queue(|index| {
        let sector = ((index % 4) << 30) + index / 4 * SECTORS;
        Plain { op: Op::Write, sector, sectors: SECTORS }
    })
}

/// One request in the queue of the scheduler `deadline`, from insertion to completion.
fn insert_to_complete(mut queue: Queue) -> Queue {
    let Queue { order, requests, taken, refused } = &mut queue;
    for (at, batch) in requests.chunks(BATCH as usize).enumerate() {
        let now = Nanos(at as u64 * 1000);
        order.insert_batch(batch.iter().copied(), now, refused);
        let room = order.waiting() - WAITING as usize;
        order.next_batch(room, now, |plain| taken.push(plain));
        for plain in taken.drain(..) {
            order.completed(plain.kind());
        }
    }
    black_box(&refused);
    queue
}

fn main() -> ExitCode {
    run(&[
        bench("null_read", reads, push_to_reap),
        bench("memory_read", backed_reads, push_to_reap),
        bench("merged_write", merged_writes, push_to_reap),
        bench("zone_read", zone_reads, push_to_reap),
        bench("zone_write", zone_writes, push_to_reap),
        bench("zone_append", appends, push_to_reap),
        bench("gated_write", gated_writes, push_to_reap),
        bench("made_append", made_appends, push_to_reap),
        bench("deadline_strewn", strewn, insert_to_complete),
        bench("deadline_streams", streams, insert_to_complete),
    ])
}
