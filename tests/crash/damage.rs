//! Bytes of a real pool are damaged while no process has it open. Then the pool must open with all
//! its data, or report the damage. It must never return data that were not written, and never go
//! back to an older state without an error.

use std::ffi::OsStr;

use fastrand::Rng;

use crate::client::Client;
use crate::disk::{Disk, Look, ROOT, SECTOR};
use crate::history::{History, PAGE};
use crate::mounted::Mounted;
use crate::rounds::{Seed, seeds};
use crate::workload::{End, Workload};
use crate::yard::{Yard, blockyard};

/// The number of damages in `make test`.
const FEW: u64 = 24;

const VOLUME_BYTES: u64 = 8 << 20;

/// The page of the last write in the log. Damage to that write cannot be distinguished from a write
/// that a power cut interrupted.
const LAST: u64 = 7;

fn device(mounted: &Mounted) -> String {
    format!("volume:///v0?path={}&size={VOLUME_BYTES}&volblocksize=4k", mounted.file("pool"))
}

/// A pool with a checkpoint and a log after it, as a kill has left it, and its volume's contents.
fn pool(mounted: &Mounted) -> Vec<u8> {
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    for answers in [1500, 700] {
        let mut yard = Yard::serve(&[&device(mounted)]);
        let client = Client::connect(&yard.socket(), "v0").unwrap();
        let mut workload = Workload::new(client, &mut history, answers);
        assert!(matches!(workload.run(answers), End::Done));
        assert!(matches!(workload.drain(), End::Done));
        let mut client = Client::connect(&yard.socket(), "v0").unwrap();
        client.flush().unwrap();
        client.write(1, LAST * PAGE as u64, &[1; PAGE], true).unwrap();
        assert_eq!(client.answer().unwrap().error, 0);
        drop(client);
        // The first server ends normally and so makes a checkpoint.
        yard.signal(if answers == 1500 { "TERM" } else { "KILL" });
        yard.end();
    }
    let mut yard = Yard::serve(&[&device(mounted)]);
    let contents = Client::connect(&yard.socket(), "v0").unwrap().contents().unwrap();
    yard.signal("KILL");
    yard.end();
    contents
}

/// The files of the pool, by name.
fn files(disk: &Disk) -> Vec<(String, Look)> {
    let folder = disk.find(ROOT, OsStr::new("pool")).unwrap().node;
    let names = disk.list(folder).unwrap().into_iter();
    names.map(|(name, look)| (name.into_string().unwrap(), look)).collect()
}

/// Damages a file that is not empty, and describes the damage.
fn damage(disk: &mut Disk, random: &mut Rng) -> String {
    let folder = disk.find(ROOT, OsStr::new("pool")).unwrap().node;
    let mut files = files(disk);
    files.retain(|(name, look)| name != "lock" && look.len > 0);
    let (name, look) = match random.u32(..4) {
        0 => files.iter().find(|(name, _)| name == "superblock").unwrap(),
        _ => &files[random.usize(..files.len())],
    };
    let kind = random.u32(..20);
    if kind == 0 {
        disk.remove(folder, OsStr::new(name)).unwrap();
        return format!("{name} is removed");
    }
    if kind == 1 {
        disk.resize(look.node, look.len / 2).unwrap();
        return format!("{name} is cut in two");
    }
    let bytes = disk.read(look.node, 0, look.len as usize).unwrap().to_vec();
    let sectors = bytes.chunks(SECTOR).enumerate();
    let full: Vec<usize> =
        sectors.filter(|(_, it)| it.iter().any(|b| *b != 0)).map(|(at, _)| at).collect();
    if full.is_empty() {
        return format!("{name} is empty, and stays as it is");
    }
    let at = full[random.usize(..full.len())] * SECTOR;
    let len = [SECTOR, 4096, 65536][random.usize(..3)].min(bytes.len() - at);
    let mut new = bytes[at..at + len].to_vec();
    let what = match kind {
        2..10 => {
            new[random.usize(..SECTOR)] ^= 1 << random.u32(..8);
            "has a bit flipped"
        }
        10..14 => {
            new.fill(0);
            "has zeros"
        }
        14..17 => {
            random.fill(&mut new);
            "has noise"
        }
        _ => {
            let from = full[random.usize(..full.len())] * SECTOR;
            let len = len.min(bytes.len() - from);
            new[..len].copy_from_slice(&bytes[from..from + len]);
            "has what belongs elsewhere"
        }
    };
    disk.write(look.node, at as u64, &new, true).unwrap();
    format!("{name} {what}, {len} bytes at {at}")
}

/// Counts of the effects of damages.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    /// The pool does not open.
    refused: u32,
    /// The pool opens, and some pages cannot be read.
    pages: u32,
    /// No data in use was hit.
    nowhere: u32,
}

#[test]
fn damage_is_said_and_never_given_out() {
    let mounted = Mounted::new(1);
    let contents = pool(&mounted);
    let whole = mounted.disk().clone();
    let mut shown = Shown::default();
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let what = {
            let mut disk = mounted.disk();
            *disk = whole.clone();
            damage(&mut disk, &mut Rng::with_seed(seed.0))
        };
        let check = blockyard(&["volume", "check", &mounted.file("pool"), "--json"]);
        assert!(check.code.is_some_and(|code| code != 101), "{seed}: {what}: {check}");
        let is_told = check.code != Some(0) || check.json()["damaged"].as_u64() > Some(0);
        let mut yard = match Yard::try_serve(&[&device(&mounted)]) {
            Err((status, text)) => {
                let says = text.contains("blockyard: device `")
                    && status.code().is_some_and(|it| it != 101);
                assert!(says, "{seed}: {what}: {status}: {text}");
                assert!(is_told, "{seed}: {what}: {text}, but: {check}");
                shown.refused += 1;
                continue;
            }
            Ok(yard) => yard,
        };
        let mut client = Client::connect(&yard.socket(), "v0").unwrap();
        let mut found = [0; PAGE];
        let mut bad = 0;
        for (at, wanted) in (0..).zip(contents.chunks(PAGE)) {
            match client.read(at * PAGE as u64, &mut found) {
                Ok(()) => assert!(
                    found == *wanted || at == LAST,
                    "{seed}: {what}: page {at} is another one"
                ),
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(5), "{seed}: {what}: page {at}");
                    bad += 1;
                }
            }
        }
        assert!(bad == 0 || is_told, "{seed}: {what}: {bad} pages, but: {check}");
        if bad > 0 {
            shown.pages += 1
        } else {
            shown.nowhere += 1
        }
        // All other pages can be written as before.
        client.write(9, 0, &[9; PAGE], true).unwrap();
        assert_eq!(client.answer().unwrap().error, 0, "{seed}: {what}");
        yard.signal("KILL");
        yard.end();
    }
    println!("{shown:?}");
}

/// CRC-64/NVMe, as in the superblock (docs/format.md).
fn crc(bytes: &[u8]) -> u64 {
    let fold = |crc: u64, byte: &u8| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x9a6c_9329_ac4b_c9b5 } else { 0 }
        })
    };
    !bytes.iter().fold(!0, fold)
}

#[test]
fn a_pool_of_a_newer_version_is_refused_by_name() {
    let mounted = Mounted::new(1);
    pool(&mounted);
    let mut disk = mounted.disk();
    let superblock = files(&disk).into_iter().find(|(name, _)| name == "superblock").unwrap().1;
    let bytes = disk.read(superblock.node, 0, 512).unwrap().to_vec();
    let number = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    assert_eq!(number, crc(&bytes[16..]), "where the checksum is");
    let mut newer = bytes;
    let version = u32::from_le_bytes(newer[16..20].try_into().unwrap());
    newer[16..20].copy_from_slice(&(version + 1).to_le_bytes());
    let number = crc(&newer[16..]);
    newer[8..16].copy_from_slice(&number.to_le_bytes());
    disk.write(superblock.node, 0, &newer, true).unwrap();
    let before = disk.clone();
    drop(disk);
    let (status, text) = Yard::try_serve(&[&device(&mounted)]).err().unwrap();
    let wanted = format!("version {}; this program knows version {version}", version + 1);
    assert!(text.contains(&wanted), "{status}: {text}");
    let check = blockyard(&["volume", "check", &mounted.file("pool")]).fails();
    assert!(check.err.contains(&wanted), "{check}");
    let is_untouched = mounted.disk().is_like(&before, "lock");
    assert!(is_untouched, "a program that does not know it writes nothing");
}
