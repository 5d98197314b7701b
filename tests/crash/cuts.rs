//! Power cuts at any change or sync, also during recovery, for every kind of pool: on a directory
//! or a disk, with one copy or two, with each block size, with free space or full.
//!
//! After each cut `volume check` must find no damage, before the pool is opened and after it. The
//! volume must hold what `history.rs` allows, and both copies must be equal. Pools have short
//! segments, so they make checkpoints, clean and reuse segments all the time.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::ops::AddAssign;
use std::panic::catch_unwind;

use blockyard_store::PoolPaths;
use blockyard_volume::{Options, Running, VolumeError};
use fastrand::Rng;

use crate::client::Client;
use crate::disk::{Fault, ROOT};
use crate::fio::Fio;
use crate::history::{History, PAGE};
use crate::mounted::Mounted;
use crate::rounds::{Seed, seeds};
use crate::secret::{is_encrypted, key_if_all, key_parameter};
use crate::workload::{End, Workload};
use crate::yard::{Yard, blockyard};

/// The pools of `make test`, and the cuts of each.
const FEW: u64 = 4;
const CUTS: u64 = 5;

/// The cuts of a disk on which fio writes, and the most writes and syncs before each.
const FIO_CUTS: u64 = 5;
const FIO_OPERATIONS: u64 = 300;

/// The size of the volume in a pool with free space, and in one that is smaller than its volume.
const VOLUME_BYTES: u64 = 8 << 20;
const FULL_VOLUME_BYTES: u64 = 32 << 20;

/// A segment has space for four of the longest writes.
const SEGMENT_BYTES: u32 = 1280 << 10;

/// The longest write, in pages: the server splits a longer one, and a split write is not atomic.
const LONGEST: u64 = SEGMENT_BYTES as u64 / 4 / PAGE as u64;

/// The power is cut before the pool has made this many changes and syncs. By then most small pools
/// have reused their first segment.
const OPERATIONS: u64 = 1000;

/// About the number of changes and syncs that make a pool, and that open one.
const MAKING: u64 = 60;
const OPENING: u64 = 130;

/// The size of a pool on a disk with twenty segments, and with too few for the volume.
const POOL_BYTES: u64 = (1 << 20) + 20 * SEGMENT_BYTES as u64;
const FULL_POOL_BYTES: u64 = (1 << 20) + 17 * SEGMENT_BYTES as u64;

/// The shortest disk for a pool of two copies.
const DISK_OF_TWO_BYTES: u64 = 65 << 20;

const ENOSPC: u32 = 28;

/// Counts of the servers' work before they were killed.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    pools: u64,
    cuts: u64,
    answers: u64,
    refused: u64,
    log_bytes: u64,
    checkpoints: u64,
    page_bytes: u64,
    moved_bytes: u64,
}

impl AddAssign for Done {
    fn add_assign(&mut self, other: Done) {
        self.pools += other.pools;
        self.cuts += other.cuts;
        self.answers += other.answers;
        self.refused += other.refused;
        self.log_bytes += other.log_bytes;
        self.checkpoints += other.checkpoints;
        self.page_bytes += other.page_bytes;
        self.moved_bytes += other.moved_bytes;
    }
}

/// The location of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    SegmentStore,
    Disk,
}

/// A kind of pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    kind: Kind,
    copies: u64,
    is_full: bool,
    block: &'static str,
    compress: &'static str,
    /// Further parameters of the volume.
    more: &'static str,
    /// Whether the server makes the pool, instead of the test, which makes short segments.
    is_the_servers: bool,
    /// Whether the volume is encrypted.
    is_encrypted: bool,
}

impl Cell {
    /// A pool in a directory as a server makes it.
    const DIRECTORY: Cell = Cell {
        kind: Kind::SegmentStore,
        copies: 1,
        is_full: false,
        block: "16k",
        compress: "lz4",
        more: "",
        is_encrypted: false,
        is_the_servers: true,
    };

    /// The kind of pool of a seed: forty seeds cover each combination of location, number of
    /// copies, fill and block size once.
    fn of(seed: u64) -> Cell {
        let bit = |number: u64| seed >> number & 1;
        let is_full = (bit(0) + bit(1) + bit(2)) % 2 == 1;
        Cell {
            kind: [Kind::SegmentStore, Kind::Disk][bit(0) as usize],
            copies: 1 + bit(1),
            is_full,
            block: ["4k", "8k", "16k", "32k", "64k"][seed as usize % 5],
            // Compressed data would not fill the pool.
            compress: if is_full { "none" } else { ["lz4", "none"][seed as usize / 40 % 2] },
            more: "",
            is_encrypted: !is_full && is_encrypted(seed.is_multiple_of(3)),
            is_the_servers: false,
        }
    }

    fn volume_bytes(&self) -> u64 {
        match self.is_full {
            false => VOLUME_BYTES,
            true => FULL_VOLUME_BYTES.max(self.pool_bytes() + (8 << 20)),
        }
    }

    fn pool_bytes(&self) -> u64 {
        let bytes = match (self.is_full, self.is_encrypted) {
            (true, _) => FULL_POOL_BYTES,
            (false, false) => POOL_BYTES,
            // An encrypted block of 4 KiB that does not compress takes 8 KiB.
            (false, true) => 2 * POOL_BYTES,
        };
        let is_of_two = self.kind == Kind::Disk && self.copies == 2;
        bytes.max(if is_of_two { DISK_OF_TWO_BYTES } else { 0 })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { kind, copies, is_full, block, is_encrypted, .. } = self;
        let encrypted = if *is_encrypted { ", encrypted" } else { "" };
        let full = if *is_full { "full" } else { "with space" };
        write!(f, "{kind:?}, copies {copies}, {full}, volblocksize {block}{encrypted}")
    }
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    yard.end();
}

/// Makes a file that serves as a disk.
fn make_image(path: &str, len: u64) {
    // The file may exist: the power was cut while it was made.
    let file = File::options().create(true).truncate(false).write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

/// Makes a pool with short segments, or opens it. With `consents` it overwrites the disk's data.
fn open(places: &PoolPaths, consents: bool) -> Result<(), VolumeError> {
    let options = Options { segment_bytes: SEGMENT_BYTES, consent: consents, ..Options::default() };
    Running::open_places(places, options).map(drop)
}

/// A pool whose power is cut.
struct CutPool<'s> {
    seed: &'s Seed,
    cell: Cell,
    mounted: Mounted,
    history: History,
    random: Rng,
    done: Done,
}

impl CutPool<'_> {
    fn new(seed: &Seed, cell: Cell) -> CutPool<'_> {
        let mounted = Mounted::new(seed.0);
        let history = History::new(cell.volume_bytes() / PAGE as u64);
        let done = Done { pools: 1, ..Done::default() };
        CutPool { seed, cell, mounted, history, random: Rng::with_seed(seed.0), done }
    }

    /// The names of the pool's copies.
    fn copies(&self) -> Vec<&'static str> {
        ["a", "b"].into_iter().take(self.cell.copies as usize).collect()
    }

    /// The device of the volume for a server's command line; `copies` are the pool's locations.
    fn device(&self, copies: &str) -> String {
        let Cell { block, compress, more, is_encrypted, .. } = self.cell;
        let size = self.cell.volume_bytes();
        let key = if is_encrypted { key_parameter() } else { String::new() };
        format!(
            "volume:///v0?{copies}&size={size}&volblocksize={block}&compress={compress}{more}{key}"
        )
    }

    fn all(&self) -> String {
        let path = |name: &str| self.mounted.file(name);
        match self.cell.copies {
            1 => self.device(&format!("path={}", path("a"))),
            _ => self.device(&format!("path={}&path2={}&copies=2", path("a"), path("b"))),
        }
    }

    /// Makes the pool, in half of the cases in a second attempt after a power cut in the first.
    fn make(&mut self) {
        let places = PoolPaths {
            path2: self.copies().get(1).map(|name| self.mounted.file(name).into()),
            ..PoolPaths::of(self.mounted.file("a"))
        };
        let images = match self.cell.kind {
            Kind::SegmentStore => Vec::new(),
            Kind::Disk => self.copies(),
        };
        let images: Vec<String> = images.iter().map(|name| self.mounted.file(name)).collect();
        let make_images = |bytes| images.iter().for_each(|path| make_image(path, bytes));
        make_images(self.cell.pool_bytes());
        if self.random.bool() {
            self.mounted.disk().fail(Some(Fault::Cut(self.random.u64(..MAKING))));
            _ = open(&places, false);
            self.switch_on();
            make_images(self.cell.pool_bytes());
        }
        self.mounted.disk().fail(None);
        // The remains of an interrupted attempt on a disk may look like other data.
        let made = open(&places, self.cell.kind == Kind::Disk);
        made.unwrap_or_else(|error| panic!("{}: {}: {error}", self.seed, self.cell));
    }

    /// Cuts the power if it is on, and switches it on again.
    fn switch_on(&mut self) {
        let mut disk = self.mounted.disk();
        if !disk.is_off() {
            disk.cut();
        }
        self.done.cuts += 1;
        disk.switch_on();
    }

    /// Asserts that the power is off, which excuses an error of the server.
    fn is_off(&self, what: impl fmt::Display) {
        let is_off = self.mounted.disk().is_off();
        assert!(is_off, "{}: {}: {what}", self.seed, self.cell);
    }

    /// `volume check` must find no damage while no process has the pool open.
    fn check(&self, when: &str) {
        let run = blockyard(&["volume", "check", &self.mounted.file("a"), "--json"]);
        let is_clean = run.code == Some(0) && run.json()["damaged"] == 0;
        assert!(is_clean, "{}: {}: {when}: {run}", self.seed, self.cell);
    }

    /// Reads the whole volume. `None` if the power was cut meanwhile.
    fn contents(&self, yard: &Yard) -> Option<(Client, Vec<u8>)> {
        let mut client = Client::connect(&yard.socket(), "v0").unwrap();
        match client.contents() {
            Ok(contents) => Some((client, contents)),
            Err(error) => {
                self.is_off(error);
                None
            }
        }
    }

    /// Opens each copy alone: all must have these contents. Changes are discarded afterwards.
    fn are_alike(&self, contents: &[u8]) {
        let copies = self.copies();
        for gone in copies.iter().filter(|_| copies.len() > 1) {
            let whole = self.mounted.disk().clone();
            self.mounted.disk().rename((ROOT, gone.as_ref()), (ROOT, "gone".as_ref())).unwrap();
            let kept = copies.iter().find(|name| name != &gone).unwrap();
            let copy = format!("path={}&degraded=yes", self.mounted.file(kept));
            let yard = Yard::serve(&[&self.device(&copy)]);
            let (_, found) = self.contents(&yard).unwrap();
            assert!(found == contents, "{}: {}: copy {kept} differs", self.seed, self.cell);
            kill(yard);
            *self.mounted.disk() = whole;
        }
    }

    /// Adds the server's counts of its pool's work.
    fn count(&mut self, yard: &Yard) {
        let shown =
            yard.command(&["volume", "show", &self.mounted.file("a"), "--json"]).ok().json();
        let count = |name: &str| shown[name].as_u64().unwrap_or_else(|| panic!("{name}: {shown}"));
        let [log_bytes, checkpoints, page_bytes, moved_bytes] =
            ["log_bytes", "checkpoints", "page_bytes", "moved_bytes"].map(count);
        self.done += Done { log_bytes, checkpoints, page_bytes, moved_bytes, ..Done::default() };
    }

    /// Opens the pool and checks the contents; with `looks_twice` again after another opening.
    /// `None` if the power was cut meanwhile.
    fn open(&mut self, looks_twice: bool) -> Option<(Yard, Client)> {
        let yard = match Yard::try_serve(&[&self.all()]) {
            Ok(yard) => yard,
            Err((status, text)) => {
                self.is_off(format!("ended with {status}: {text}"));
                return None;
            }
        };
        let Some((client, contents)) = self.contents(&yard) else {
            kill(yard);
            return None;
        };
        // Data found without a power cut need not survive the next cut.
        self.history.check(&contents, false);
        if !looks_twice {
            return Some((yard, client));
        }
        kill(yard);
        self.check("after it was opened");
        self.are_alike(&contents);
        self.open(false)
    }

    /// Opens the volume and works on it until the power is cut or the server is killed.
    fn live(&mut self) {
        // Some cuts come while the server starts, most while it works, and some rounds have none.
        let kind = self.random.u32(..10);
        if kind < 3 {
            self.mounted.disk().fail(Some(Fault::Cut(self.random.u64(..OPENING))));
        }
        let Some((yard, client)) = self.open(kind == 3) else { return };
        if kind >= 3 {
            self.mounted.disk().fail(Some(Fault::Cut(self.random.u64(..OPERATIONS))));
        }
        let seed = self.random.u64(..);
        let mut workload = Workload::new(client, &mut self.history, seed).longest(LONGEST);
        if self.cell.is_full {
            workload = workload.bears(ENOSPC);
        }
        let answers = if kind == 9 { self.random.u64(1..500) } else { u64::MAX };
        let end = workload.run(answers);
        let is_done = matches!(end, End::Done);
        if !is_done {
            workload.drain();
        }
        self.done.answers += workload.answers;
        self.done.refused += workload.refused;
        if !is_done {
            self.is_off(format!("{end:?}"));
        }
        self.count(&yard);
        kill(yard);
    }

    /// Writes until the pool is full.
    fn fill(&mut self) {
        let (yard, client) = self.open(false).expect("the power is on");
        let mut workload = Workload::new(client, &mut self.history, self.seed.0).longest(LONGEST);
        let is_full = workload.fill(ENOSPC);
        assert!(is_full, "{}: {}: all of the volume fits", self.seed, self.cell);
        kill(yard);
    }

    /// Makes the pool and cuts its power a few times.
    fn cut_often(&mut self) {
        if self.cell.is_full && self.cell.kind == Kind::SegmentStore {
            self.mounted.disk().bound(self.cell.copies * self.cell.pool_bytes());
        }
        if !self.cell.is_the_servers {
            self.make();
        }
        if self.cell.is_full {
            self.fill();
        }
        for _ in 0..CUTS {
            self.live();
            if self.mounted.disk().is_off() {
                self.switch_on();
            }
            self.mounted.disk().fail(None);
            // After a cut nothing may be left of a pool that a server has just begun to make.
            if !self.cell.is_the_servers {
                self.check("before it was opened");
            }
        }
        let (mut yard, client) = self.open(true).expect("the power is on");
        // The workload continues.
        let mut workload = Workload::new(client, &mut self.history, self.seed.0).longest(LONGEST);
        if self.cell.is_full {
            workload = workload.bears(ENOSPC);
        }
        let end = workload.run(200);
        assert!(matches!(end, End::Done), "{}: {}: {end:?}", self.seed, self.cell);
        workload.drain();
        yard.signal("TERM");
        assert!(yard.end().success(), "{}: {}", self.seed, self.cell);
        self.check("at the end");
    }
}

#[test]
fn nothing_durable_is_lost_when_the_power_is_cut() {
    let mut cells: BTreeMap<Cell, Done> = BTreeMap::new();
    let seeds: Vec<u64> = seeds(FEW).collect();
    let is_all = seeds.len() as u64 >= FEW;
    for seed in seeds {
        let seed = Seed(seed);
        let cell = Cell::of(seed.0);
        let mut pool = CutPool::new(&seed, cell);
        pool.cut_often();
        *cells.entry(Cell { compress: "", ..cell }).or_default() += pool.done;
    }
    let mut all = Done::default();
    for (cell, done) in &cells {
        let Done { pools, cuts, answers, refused, moved_bytes, .. } = done;
        println!(
            "{cell}: {pools} pools, {cuts} cuts, {answers} answers, {refused} ENOSPC, \
             {moved_bytes} bytes cleaned"
        );
        all += *done;
    }
    println!("power cuts: {all:?}");
    // A single pool may be cut before it has done all of this.
    if is_all {
        let Done { answers, refused, log_bytes, checkpoints, page_bytes, moved_bytes, .. } = all;
        assert!(answers > 0, "the client was answered something");
        assert!(refused > 0, "a full pool was cut too");
        assert!(checkpoints > 0 && page_bytes > 0, "so were checkpoints");
        assert!(moved_bytes > 0, "so was cleaning");
        assert!(log_bytes > POOL_BYTES, "so were segments that are used again");
    }
}

/// fio verifies the writes that were answered as durable, on a disk whose power is cut while fio
/// writes and while the pool recovers.
#[test]
fn fio_verifies_what_was_answered_when_the_power_is_cut() {
    let mut verified = 0;
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let (mut random, mounted) = (Rng::with_seed(seed.0), Mounted::new(seed.0));
        let (pool, key) = (mounted.file("pool"), key_if_all());
        let volume = format!("volume:///v0?path={pool}&size=64M&sync=always{key}");
        for _ in 0..FIO_CUTS {
            let (fio, yard) = (Fio::new(&seed), Yard::serve(&[&volume]));
            // The rate limit keeps fio writing until the cut.
            let mut writing = fio.write(&yard, "v0", &["--rate_iops=1000"]);
            while !writing.has_written(&yard, "v0") {}
            mounted.disk().fail(Some(Fault::Cut(random.u64(..FIO_OPERATIONS))));
            writing.end();
            assert!(mounted.disk().is_off(), "{seed}: fio has ended before");
            kill(yard);
            mounted.disk().switch_on();
            // The power is cut during some of the openings too.
            mounted.disk().fail(Some(Fault::Cut(random.u64(..40))));
            match Yard::try_serve(&[&volume]) {
                Ok(yard) => kill(yard),
                Err((status, text)) => {
                    assert!(mounted.disk().is_off(), "{seed}: ended with {status}: {text}");
                }
            }
            if mounted.disk().is_off() {
                mounted.disk().switch_on();
            }
            mounted.disk().fail(None);
            let yard = Yard::serve(&[&volume]);
            verified += fio.verify(&yard, "v0").1;
            kill(yard);
        }
    }
    assert!(verified > 0, "something was durable");
}

/// The program that made the file has synced neither its directory nor its length; a pool depends
/// on both.
#[test]
fn a_file_that_is_a_pool_is_there_after_a_power_cut() {
    for seed in 1..=8 {
        let mounted = Mounted::new(seed);
        make_image(&mounted.file("pool"), POOL_BYTES);
        open(&PoolPaths::of(mounted.file("pool")), false).unwrap();
        mounted.disk().cut();
        mounted.disk().switch_on();
        let found = std::fs::metadata(mounted.file("pool")).map(|it| it.len());
        assert_eq!(found.ok(), Some(POOL_BYTES), "disk {seed}");
    }
}

/// A file system that ignores O_DSYNC and honours syncs only. The server makes the pool, with its
/// default segments.
#[test]
fn nothing_durable_is_lost_where_only_syncs_count() {
    for seed in 1..=4 {
        let seed = Seed(seed);
        let mut pool = CutPool::new(&seed, Cell::DIRECTORY);
        pool.mounted.disk().deafen();
        pool.cut_often();
    }
}

/// A volume that answers flush and FUA without a sync loses data; these tests must detect it.
#[test]
fn a_volume_without_syncs_is_found_out() {
    let mut seeds = 1..=5;
    let found_out = seeds.any(|seed| {
        let cell = Cell { more: "&sync=disabled", ..Cell::DIRECTORY };
        catch_unwind(|| CutPool::new(&Seed(seed), cell).cut_often()).is_err()
    });
    assert!(found_out, "none of five disks has lost anything");
}
