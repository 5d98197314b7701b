//! The soak test of the scheduler: submitters start and stop at random, some of them with I/O in
//! flight, while the scheduler is switched and tuned.
//!
//! Each request must complete exactly once, and each sector must hold the last data of its only
//! writer. On a zoned device each writer has a zone, to which it sends writes and appends without
//! waiting, and each must land at its expected position. A run takes a few seconds; `make soak`, or
//! `BLOCKYARD_SOAK_SECONDS=300`, runs longer. A seed repeats the random choices, not the order of
//! threads.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use blockyard_core::{
    Bio, BufRef, Channel, Completion, Disk, Flags, Op, Prio, Region, RegionId, SECTOR_BYTES,
    Sector, Status,
};
use blockyard_testing::seed::Seed;
use blockyard_yard::param::DeviceKind;
use blockyard_yard::scheduler::{self, Given, SchedulerRequest, SchedulerView};
use blockyard_yard::{stack, uri};
use fastrand::Rng;

/// The sectors that one submitter writes and reads; no other submitter uses them meanwhile.
const STRIPE_SECTORS: usize = 512;
const STRIPES: usize = 192;

/// The most submitters at once: far more than processors, and more than the scheduler's 128 submit
/// rings, so that some share a ring.
const ALIVE_MAX: usize = 160;

/// The most bios that a submitter has in flight, and the longest of them.
const DEPTH_MAX: usize = 32;
const BIO_SECTORS_MAX: usize = 32;

/// How long a submitter waits for a completion before it reports it as lost.
const LOST: Duration = Duration::from_secs(60);

/// The stamp of a sector that an abandoned write may or may not have reached.
const UNKNOWN: u32 = u32::MAX;

const SECTOR: usize = SECTOR_BYTES as usize;

/// The duration of a soak.
fn length() -> Duration {
    let seconds = std::env::var("BLOCKYARD_SOAK_SECONDS").ok();
    let seconds = seconds.map_or(2, |text| {
        text.parse().unwrap_or_else(|_| panic!("BLOCKYARD_SOAK_SECONDS is `{text}`: no number"))
    });
    Duration::from_secs(seconds)
}

/// A part of the device, and the stamps of the last writes to its sectors; 0 for zeros.
struct Stripe {
    start: u64,
    stamps: Vec<u32>,
    /// The last stamp that was used.
    last: u32,
    /// Whether it is a sequential zone.
    is_zone: bool,
    /// The position of the next write, once all writes in flight have completed.
    wp: usize,
    /// Whether the position of the write pointer is unknown.
    is_lost: bool,
}

impl Stripe {
    /// The words of a sector.
    fn word(&self, at: usize, stamp: u32) -> [u8; 8] {
        match stamp {
            0 => [0; 8],
            _ => ((self.start + at as u64) << 32 | u64::from(stamp)).to_le_bytes(),
        }
    }

    /// Checks the whole stripe; a zone reads as ones above its write pointer.
    #[track_caller]
    fn check_all(&self, data: &[u8]) {
        if self.is_lost {
            return;
        }
        let (written, above) =
            data.split_at(if self.is_zone { self.wp } else { STRIPE_SECTORS } * SECTOR);
        self.check(0, written);
        assert!(above.iter().all(|byte| *byte == 0xff), "zone at {} above {}", self.start, self.wp);
    }

    /// Checks that the sectors of a read hold the data that were written.
    #[track_caller]
    fn check(&self, from: usize, data: &[u8]) {
        for (at, sector) in data.chunks(SECTOR).enumerate() {
            let stamp = self.stamps[from + at];
            let word = self.word(from + at, stamp);
            if stamp != UNKNOWN && sector.chunks(8).any(|have| have != word) {
                let sector: [u8; 8] = sector[..8].try_into().unwrap();
                panic!(
                    "sector {}: want stamp {stamp}, have {:#x}",
                    self.start + (from + at) as u64,
                    u64::from_le_bytes(sector)
                );
            }
        }
    }
}

/// A bio in flight.
#[derive(Clone, Copy)]
struct Flight {
    op: Op,
    from: usize,
    len: usize,
    stamp: u32,
}

impl Flight {
    fn overlaps(&self, from: usize, len: usize) -> bool {
        self.op != Op::Flush && from < self.from + self.len && self.from < from + len
    }
}

/// A thread's channel to the device, and its knowledge of the contents.
struct Submitter {
    channel: Box<dyn Channel>,
    region: Arc<Region>,
    region_id: RegionId,
    stripe: Stripe,
    rng: Rng,
    prio: Prio,
    /// Whether it writes consecutive sectors, which merge.
    streams: bool,
    cursor: usize,
    flights: [Option<Flight>; DEPTH_MAX],
    /// How often each number was used: the upper bits of a bio's user data.
    turns: [u64; DEPTH_MAX],
    completed: u64,
}

/// The results of a submitter.
struct Gone {
    stripe: Stripe,
    completed: u64,
}

impl Submitter {
    fn new(disk: &dyn Disk, stripe: Stripe, mut rng: Rng) -> Submitter {
        let mut channel = disk.open().unwrap();
        let region = Region::alloc(DEPTH_MAX * BIO_SECTORS_MAX * SECTOR);
        let region_id = channel.register(Arc::clone(&region));
        let prio = [Prio::BestEffort, Prio::RealTime, Prio::Idle][rng.usize(..3)];
        Submitter {
            channel,
            region,
            region_id,
            stripe,
            prio,
            streams: rng.bool(),
            rng,
            cursor: 0,
            flights: [None; DEPTH_MAX],
            turns: [0; DEPTH_MAX],
            completed: 0,
        }
    }

    /// Executes `bios` bios, or fewer if the time is up, and stops, sometimes with bios in flight.
    fn run(mut self, bios: u32, until: Instant) -> Gone {
        let depth = self.rng.usize(1..=DEPTH_MAX);
        let (mut left, mut done) = (bios, Vec::new());
        let abandons = self.rng.u8(..4) == 0;
        loop {
            if Instant::now() >= until {
                left = 0;
            }
            left = self.start(depth, left);
            if left == 0 && (abandons || self.in_flight() == 0) {
                break;
            }
            self.reap(&mut done);
        }
        self.leave()
    }

    fn in_flight(&self) -> usize {
        self.flights.iter().flatten().count()
    }

    /// Pushes a batch of bios, up to the depth; returns the number left to push.
    fn start(&mut self, depth: usize, mut left: u32) -> u32 {
        let batch = self.rng.usize(1..=8);
        for _ in 0..batch {
            if left == 0 || self.in_flight() >= depth {
                break;
            }
            left -= 1;
            if let Some(bio) = self.next() {
                assert_eq!(self.channel.push(&[bio]), 1, "a channel has room for {DEPTH_MAX}");
            }
        }
        self.channel.submit();
        left
    }

    /// The next bio, with a number of its own, unless it would conflict with one in flight.
    fn next(&mut self) -> Option<Bio> {
        let slot = self.flights.iter().position(Option::is_none)?;
        let (op, from, len) =
            if self.stripe.is_zone { self.choose_in_zone()? } else { self.choose() };
        let mut in_flight = self.flights.iter().flatten();
        let blocked = in_flight
            .any(|flight| flight.overlaps(from, len) && (op != Op::Read || flight.op != Op::Read));
        if blocked && op != Op::Flush {
            return None;
        }
        match op {
            Op::ZoneReset => (self.stripe.wp, self.stripe.is_lost) = (0, false),
            Op::Write | Op::WriteZeroes | Op::ZoneAppend => self.stripe.wp = from + len,
            _ => {}
        }
        let offset = slot * BIO_SECTORS_MAX * SECTOR;
        let has_stamp = matches!(op, Op::Write | Op::ZoneAppend);
        let stamp = if has_stamp { self.stripe.last + 1 } else { 0 };
        if has_stamp {
            self.stripe.last = stamp;
            for at in 0..len {
                let sector = self.stripe.word(from + at, stamp).repeat(SECTOR / 8);
                self.region.write((offset + at * SECTOR) as u64, &sector);
            }
        }
        self.flights[slot] = Some(Flight { op, from, len, stamp });
        self.turns[slot] += 1;
        let sectors = if op == Op::Flush { 0 } else { len as u64 };
        let flags = match self.rng.u8(..16) {
            0 if op == Op::Write => Flags::FUA,
            1 if op == Op::Write => Flags::PREFLUSH,
            2 => Flags::NOMERGE,
            _ => Flags::NONE,
        };
        let at = if op == Op::ZoneAppend { 0 } else { from as u64 };
        let bio = Bio::new(op, Sector(self.stripe.start + at), sectors)
            .with_buf(BufRef { region: self.region_id, offset: offset as u64 })
            .with_flags(flags)
            .with_prio(self.prio)
            .with_user_data(self.turns[slot] << 8 | slot as u64);
        Some(bio)
    }

    /// The next operation, at a random or at the next position of the stripe.
    fn choose(&mut self) -> (Op, usize, usize) {
        let op = match self.rng.u8(..32) {
            0 => Op::Flush,
            1 => Op::Discard,
            2 => Op::WriteZeroes,
            3..16 => Op::Read,
            _ => Op::Write,
        };
        let (from, len) = match self.streams {
            true => (self.cursor, self.rng.usize(1..=4)),
            false => (self.rng.usize(..STRIPE_SECTORS), self.rng.usize(1..=BIO_SECTORS_MAX)),
        };
        let len = len.min(STRIPE_SECTORS - from);
        self.cursor = (from + len) % STRIPE_SECTORS;
        (op, from, len)
    }

    /// The next operation in a zone: a write at the expected write pointer, a read of written data,
    /// or a reset; none while a bio in flight conflicts.
    fn choose_in_zone(&mut self) -> Option<(Op, usize, usize)> {
        let Stripe { wp, is_lost, .. } = self.stripe;
        let is_full = wp == STRIPE_SECTORS;
        if is_lost || (is_full && self.rng.u8(..4) == 0) || self.rng.u8(..128) == 0 {
            return Some((Op::ZoneReset, 0, STRIPE_SECTORS));
        }
        let op = match self.rng.u8(..32) {
            0 => Op::Flush,
            1 => Op::WriteZeroes,
            2..14 => Op::Read,
            14..20 => Op::ZoneAppend,
            _ => Op::Write,
        };
        let len = self.rng.usize(1..=if self.streams { 4 } else { BIO_SECTORS_MAX });
        match op {
            Op::Flush => Some((op, 0, 0)),
            Op::Read if wp == 0 => None,
            Op::Read => {
                let from = self.rng.usize(..wp);
                Some((op, from, len.min(wp - from)))
            }
            _ if is_full => None,
            _ => Some((op, wp, len.min(STRIPE_SECTORS - wp))),
        }
    }

    /// Reaps completions, and waits for one if there is none.
    fn reap(&mut self, done: &mut Vec<Completion>) {
        done.clear();
        let lost = Instant::now() + LOST;
        while self.in_flight() > 0 && self.channel.reap(done) == 0 {
            let waiting = self.in_flight();
            let (now, found) = (Instant::now(), self.channel.in_flight());
            assert!(now < lost, "{waiting} bios are lost; the channel knows of {found}");
            self.channel.wait(Some(now + Duration::from_secs(1)));
        }
        for completion in done {
            self.ended(completion);
        }
    }

    fn ended(&mut self, completion: &Completion) {
        let slot = (completion.user_data & 0xff) as usize;
        let turn = completion.user_data >> 8;
        let flight = self.flights.get_mut(slot).and_then(Option::take);
        let Some(Flight { op, from, len, stamp }) = flight else {
            panic!("bio {slot} of turn {turn} came home twice, or never left");
        };
        assert_eq!(turn, self.turns[slot], "an older bio of slot {slot} came home");
        assert_eq!(completion.status, Status::Ok, "{op} at {from} of {len}");
        self.completed += 1;
        if op == Op::ZoneAppend {
            assert_eq!(completion.sector.0, self.stripe.start + from as u64, "an append's place");
        }
        match op {
            Op::Read => {
                let mut data = [0; BIO_SECTORS_MAX * SECTOR];
                let data = &mut data[..len * SECTOR];
                self.region.read((slot * BIO_SECTORS_MAX * SECTOR) as u64, data);
                self.stripe.check(from, data);
            }
            Op::Flush => {}
            _ => self.stripe.stamps[from..from + len].fill(stamp),
        }
    }

    /// Stops with bios in flight: whether they were executed is unknown then, but they are not
    /// executed later.
    fn leave(self) -> Gone {
        let Submitter { channel, mut stripe, flights, completed, .. } = self;
        drop(channel);
        for flight in flights.iter().flatten() {
            if !matches!(flight.op, Op::Read | Op::Flush) {
                stripe.is_lost = stripe.is_zone;
                stripe.stamps[flight.from..flight.from + flight.len].fill(UNKNOWN);
            }
        }
        Gone { stripe, completed }
    }
}

/// Starts and stops submitters, and changes the scheduler meanwhile.
struct Conductor {
    disk: Arc<dyn Disk>,
    kind: &'static DeviceKind,
    until: Instant,
    rng: Rng,
    free: Vec<Stripe>,
    alive: usize,
    completed: u64,
    came: u64,
    switched: u64,
}

impl Conductor {
    fn run(&mut self) {
        let (gone, left) = channel();
        thread::scope(|scope| {
            let mut wanted = 1;
            while Instant::now() < self.until {
                if self.rng.u8(..8) == 0 {
                    wanted = self.rng.usize(1..=ALIVE_MAX);
                }
                while self.alive < wanted {
                    self.let_in(scope, &gone);
                }
                self.change();
                let pause = Duration::from_millis(self.rng.u64(0..8));
                self.take_back(left.recv_timeout(pause), &left);
            }
            // A submitter that panicked sends no result; all others do.
            drop(gone);
            while let Ok(gone) = left.recv() {
                self.keep(gone);
            }
        });
    }

    fn let_in<'s>(&mut self, scope: &'s Scope<'s, '_>, gone: &Sender<Gone>) {
        let Some(stripe) = self.free.pop() else { return };
        let (rng, bios) = (self.rng.fork(), self.rng.u32(1..3000));
        let (disk, until, gone) = (Arc::clone(&self.disk), self.until, gone.clone());
        self.alive += 1;
        self.came += 1;
        scope.spawn(move || {
            let left = Submitter::new(&*disk, stripe, rng).run(bios, until);
            gone.send(left).expect("the conductor waits for all");
        });
    }

    fn take_back(&mut self, first: Result<Gone, RecvTimeoutError>, left: &Receiver<Gone>) {
        let rest = std::iter::from_fn(|| left.try_recv().ok());
        for gone in first.into_iter().chain(rest) {
            self.keep(gone);
        }
    }

    fn keep(&mut self, gone: Gone) {
        self.alive -= 1;
        self.completed += gone.completed;
        self.free.push(gone.stripe);
    }

    /// Switches or tunes the scheduler.
    fn change(&mut self) {
        let rng = &mut self.rng;
        let (key, value) = match rng.u8(..10) {
            0..4 => ("scheduler", ["none", "mq-deadline"][rng.usize(..2)].to_owned()),
            4 => ("read_expire", rng.choice([0, 1, 10, 500]).unwrap().to_string()),
            5 => ("write_expire", rng.choice([0, 1, 50, 5000]).unwrap().to_string()),
            6 => ("writes_starved", rng.i32(-1..5).to_string()),
            7 => ("front_merges", rng.u8(..2).to_string()),
            8 => ("async_depth", rng.choice([0, 1, 2, 16, 1000]).unwrap().to_string()),
            _ => ("fifo_batch", rng.u32(..40).to_string()),
        };
        let before = scheduler::active(&*self.disk);
        self.set(&[(key, &value)]);
        self.switched += u64::from(scheduler::active(&*self.disk) != before);
    }

    fn set(&self, pairs: &[(&str, &str)]) {
        let text = |text: &str| Given::Text(text.to_owned());
        let request: SchedulerRequest =
            pairs.iter().map(|(key, value)| ((*key).to_owned(), text(value))).collect();
        scheduler::change(&*self.disk, self.kind, &request).unwrap();
    }

    /// No request is left in the scheduler, and the device holds the written data.
    fn finish(&mut self) {
        assert_eq!((self.alive, self.free.len()), (0, STRIPES));
        let view = SchedulerView::new(&*self.disk);
        for counts in &view.counts {
            let inserted = counts.inserted;
            assert_eq!(inserted, counts.merged + counts.completed, "{counts:?}");
            assert_eq!(counts.dispatched, counts.completed + counts.requeued, "{counts:?}");
            assert_eq!(counts.queued, 0, "{counts:?}");
        }
        let mut channel = self.disk.open().unwrap();
        let region = Region::alloc(STRIPE_SECTORS * SECTOR);
        let buf = BufRef { region: channel.register(Arc::clone(&region)), offset: 0 };
        let mut data = vec![0; STRIPE_SECTORS * SECTOR];
        let mut done = Vec::new();
        for stripe in &self.free {
            let bio = Bio::read(Sector(stripe.start), STRIPE_SECTORS as u64, buf);
            assert_eq!(channel.push(&[bio]), 1);
            channel.submit();
            while channel.reap(&mut done) == 0 {
                channel.wait(Some(Instant::now() + LOST));
            }
            assert_eq!(done.pop().unwrap().status, Status::Ok);
            region.read(0, &mut data);
            stripe.check_all(&data);
        }
    }
}

fn soak(text: &str, stream: u64) {
    let seed = Seed::from_env();
    let _watch = seed.watch(text);
    let spec = uri::parse(text).unwrap();
    let disk = stack::open(&spec).unwrap().disk;
    let is_zone = disk.geometry().zones.is_some();
    let stripe = |number: usize| Stripe {
        start: (number * STRIPE_SECTORS) as u64,
        stamps: vec![0; STRIPE_SECTORS],
        last: 0,
        is_zone,
        wp: 0,
        is_lost: false,
    };
    let mut conductor = Conductor {
        disk,
        kind: spec.kind(),
        until: Instant::now() + length(),
        rng: seed.rng(stream),
        free: (0..STRIPES).map(stripe).collect(),
        alive: 0,
        completed: 0,
        came: 0,
        switched: 0,
    };
    // The lowest class would otherwise wait for ten seconds, and its submitter with it.
    conductor.set(&[("scheduler", "mq-deadline"), ("prio_aging_expire", "20")]);
    conductor.run();
    conductor.finish();
    let Conductor { came, completed, switched, .. } = conductor;
    println!("{text}: {came} submitters, {completed} bios, {switched} switches");
    assert!(completed > 0, "nothing was done");
    assert!(switched > 0, "the scheduler was never switched");
    assert!(came > 1, "submitters did not come and go");
}

#[test]
fn a_device_that_completes_at_once() {
    soak("null:///at-once?size=48M&memory_backed=1&discard=1", 1);
}

#[test]
fn a_device_that_takes_its_time() {
    soak(
        "null:///timer?size=48M&memory_backed=1&discard=1&irqmode=timer&completion_nsec=50000\
         &hw_queue_depth=16",
        2,
    );
}

#[test]
fn a_device_with_a_cache_that_sends_requests_back() {
    soak(
        "null:///back?size=48M&memory_backed=1&discard=1&cache_size=1M&irqmode=softirq\
         &requeue=1,5,0,-1",
        3,
    );
}

#[test]
fn a_zoned_device_that_answers_immediately() {
    soak("null:///zoned?size=48M&memory_backed=1&zoned=1&zone_size=256K&scheduler=mq-deadline", 4);
}

#[test]
fn a_zoned_device_with_a_delay() {
    soak(
        "null:///zoned-timer?size=48M&memory_backed=1&zoned=1&zone_size=256K&irqmode=timer\
         &completion_nsec=50000&hw_queue_depth=16&scheduler=mq-deadline",
        5,
    );
}
