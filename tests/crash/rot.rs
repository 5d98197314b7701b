//! A bit flips in data that were flushed last: the pool must open with the right data, or report
//! the damage. It must never go back to older data without an error.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use fastrand::Rng;

use crate::client::Client;
use crate::history::PAGE;
use crate::place::Place;
use crate::rounds::{Seed, seeds};
use crate::yard::{Yard, blockyard};

/// The rounds of `make test`.
const FEW: u64 = 6;

/// The writes of a round, and the bytes of each.
const WRITES: usize = 64;
const WRITE_BYTES: usize = 128 << 10;

/// The polls of the log of an idle pool: each takes as long as a command.
const LOOKS_MAX: u32 = 1200;

/// Counts of the effects of the flips.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    /// The pool does not open, and reports where the log is damaged.
    refused: u32,
    /// Pages cannot be read, and the server's log names the damaged block.
    pages: u32,
    /// All data are right.
    right: u32,
}

/// A bit of a file.
struct Bit {
    path: String,
    at: u64,
    mask: u8,
}

impl Bit {
    fn flip(&self) {
        let file = OpenOptions::new().read(true).write(true).open(&self.path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, self.at).unwrap();
        file.write_all_at(&[byte[0] ^ self.mask], self.at).unwrap();
    }
}

/// A log batch: the epoch of the opening that wrote it, and the ranges of its header and its blocks
/// (docs/format.md).
struct Group {
    epoch: u64,
    path: String,
    at: u64,
    head_bytes: u64,
    payload_bytes: u64,
}

/// All log batches in a pool's directory, old ones too.
fn groups(pool: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for entry in fs::read_dir(pool).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_str().unwrap().starts_with("segment-") {
            continue;
        }
        let (path, bytes) = (entry.path(), fs::read(entry.path()).unwrap());
        for (index, unit) in (0..).zip(bytes.chunks(PAGE)) {
            if unit.starts_with(b"BLKYGRP\n") {
                let word = |at: usize| u32::from_le_bytes(unit[at..at + 4].try_into().unwrap());
                found.push(Group {
                    epoch: u64::from_le_bytes(unit[24..32].try_into().unwrap()),
                    path: path.to_str().unwrap().to_owned(),
                    at: index * PAGE as u64,
                    head_bytes: word(64).into(),
                    payload_bytes: word(68).into(),
                });
            }
        }
    }
    found
}

/// A bit of the log batches that the last opening has written, or of a superblock slot.
fn written_last(pool: &str, random: &mut Rng) -> Bit {
    let mask = 1 << random.u8(..8);
    if random.u8(..4) == 0 {
        let at = u64::from(random.u8(..2)) * 4096 + random.u64(..512);
        return Bit { path: format!("{pool}/superblock"), at, mask };
    }
    let mut groups = groups(pool);
    let last = groups.iter().map(|group| group.epoch).max();
    groups.retain(|group| Some(group.epoch) == last);
    let Group { path, at, head_bytes, payload_bytes, .. } =
        groups.swap_remove(random.usize(..groups.len()));
    let in_head = payload_bytes == 0 || random.u8(..3) == 0;
    let part = if in_head { 0..head_bytes } else { head_bytes..head_bytes + payload_bytes };
    Bit { path, at: at + random.u64(part), mask }
}

/// Waits until the log has recorded which batches are durable.
fn until_recorded(yard: &Yard, pool: &str) {
    let is_recorded = |_: &u32| {
        let show = yard.command(&["volume", "show", pool, "--json"]).json();
        let number = |field: &str| show[field].as_u64().unwrap();
        number("log_group") > 0 && number("log_recorded") == number("log_group")
    };
    assert!((0..LOOKS_MAX).any(|look| is_recorded(&look)), "nothing is recorded");
}

/// Writes, flushes, waits until the log is idle, kills the server, flips a bit, and opens the pool.
fn rot(folders: &[&str]) -> Shown {
    let place = Place::new();
    let pools: Vec<String> = folders.iter().map(|folder| place.file(folder)).collect();
    let second = match pools.get(1) {
        Some(path) => format!("&path2={path}&copies=2"),
        None => String::new(),
    };
    let device = format!("volume:///v0?path={}&size=16M&volblocksize=4k{second}", pools[0]);
    let mut shown = Shown::default();
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let mut random = Rng::with_seed(seed.0);
        let mut written = vec![0; WRITES * WRITE_BYTES];
        random.fill(&mut written);
        let mut yard = Yard::serve(&[&device]);
        let mut client = Client::connect(&yard.socket(), "v0").unwrap();
        for (at, bytes) in (0..).zip(written.chunks(WRITE_BYTES)) {
            client.write(at, at * WRITE_BYTES as u64, bytes, false).unwrap();
        }
        (0..WRITES).for_each(|_| assert_eq!(client.answer().unwrap().error, 0));
        assert_eq!(client.flush().unwrap().error, 0);
        until_recorded(&yard, &pools[0]);
        yard.signal("KILL");
        yard.end();
        let bit = written_last(&pools[random.usize(..pools.len())], &mut random);
        bit.flip();
        let what = format!("bit {:#x} at {} of {}", bit.mask, bit.at, bit.path);
        let refused = shown.refused;
        judge(&seed, &what, &device, &pools, &written, &mut shown);
        // A refused opening must change nothing. Lost blocks are written again next.
        if shown.refused > refused {
            bit.flip();
        }
    }
    println!("{} copies: {shown:?}", folders.len());
    shown
}

/// Opens the pool after a flip, reads it, and counts the effect.
fn judge(
    seed: &Seed,
    what: &str,
    device: &str,
    pools: &[String],
    written: &[u8],
    shown: &mut Shown,
) {
    let has_two = pools.len() > 1;
    let check = blockyard(&["volume", "check", &pools[0], "--json"]);
    let is_told = check.code != Some(0) || check.json()["damaged"].as_u64() > Some(0);
    let mut yard = match Yard::try_serve(&[device]) {
        Err((status, text)) => {
            let is_named = text.contains("cannot read the log: group") && text.contains("offset");
            assert!(is_named && !has_two, "{seed}: {what}: {status}: {text}");
            assert!(is_told, "{seed}: {what}: {text}, but: {check}");
            shown.refused += 1;
            return;
        }
        Ok(yard) => yard,
    };
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    let (mut found, mut bad) = ([0; PAGE], 0);
    for (at, wanted) in (0..).zip(written.chunks(PAGE)) {
        match client.read(at * PAGE as u64, &mut found) {
            Ok(()) => assert!(found == *wanted, "{seed}: {what}: page {at} is another one"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{seed}: {what}: page {at}");
                bad += 1;
            }
        }
    }
    if bad > 0 {
        let said = yard.complained();
        assert!(said.contains("is damaged") && !has_two, "{seed}: {what}: {bad} pages: {said}");
        assert!(is_told, "{seed}: {what}: {bad} pages, but: {check}");
        shown.pages += 1;
    } else {
        shown.right += 1;
    }
    yard.signal("KILL");
    yard.end();
}

/// The bug: 64 writes of 128 KiB were answered and flushed, the pool was idle for 20 s and its
/// server was killed; then one bit flipped in a block of the last write. 20 of 20 openings went
/// back to the state before the damaged log batch without an error, and 160 to 1888 of the 2048
/// flushed blocks of 4 KiB were old ones.
#[test]
fn one_rotten_bit_does_not_roll_flushed_data_back() {
    let shown = rot(&["pool"]);
    assert!(shown.refused + shown.pages > 0, "the flips were felt: {shown:?}");
}

#[test]
fn one_rotten_bit_in_one_of_two_copies_is_not_noticed() {
    let shown = rot(&["a", "b"]);
    assert_eq!(shown.refused + shown.pages, 0);
}
