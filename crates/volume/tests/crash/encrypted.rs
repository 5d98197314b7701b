//! Looks for nonces that are used twice: over power cuts, and openings of one image more than once.
//! `suite/encrypted.rs` does so over snapshots, clones, rollbacks, copies and raw streams.
//! And cuts the power while the secret of a key changes.

use std::collections::{HashMap, HashSet};

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_volume::encryption::VolumeKey;
use blockyard_volume::{Compression, Secret};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::catalogue::Change;
use blockyard_volume_format::group::{self, Places};

use crate::fixture::{Fixture, Shape, Step, USE, format, open_pool, secret, store};
use crate::work;

/// The salt and the number of a stored block.
type Nonce = [u8; 24];

/// The encrypted blocks of all groups in a directory: their nonces and their bytes.
fn blocks(directory: &SimulatedDirectory, align: u32) -> Vec<(Nonce, Vec<u8>)> {
    let mut found = Vec::new();
    for name in directory.names().into_iter().filter(|name| name.starts_with("segment-")) {
        let file = directory.open(&name).unwrap();
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).unwrap();
        for start in (0..bytes.len()).step_by(align as usize) {
            let Some((head, _, descriptors)) = group::parse(&bytes[start..], align) else {
                continue;
            };
            let (payload, mut places) = (start + head.head_bytes as usize, Places::default());
            for descriptor in descriptors {
                let (at, len) = places.next(&descriptor, align);
                let (at, len) = (payload + at as usize, len as usize);
                // A power cut may have torn the group after its head.
                if descriptor.kind == group::Kind::Data
                    && let Some(stored) = bytes.get(at..at + len)
                    && crc(stored) == descriptor.crc
                {
                    assert!(descriptor.codec.is_sealed(), "a block is not encrypted");
                    found.push((stored[..24].try_into().unwrap(), stored.to_vec()));
                }
            }
        }
    }
    found
}

/// The shape with blocks and an alignment of 1 KiB: encrypted blocks of 1536 bytes are not aligned.
fn with_gaps(shape: Shape) -> Shape {
    let mut shape = Shape { block_bytes: 1024, ..shape };
    shape.options.align = 1024;
    shape
}

#[test]
fn no_nonce_is_used_for_two_blocks() {
    let mut seen: HashMap<Nonce, Vec<u8>> = HashMap::new();
    let mut openings = 0;
    for stream in 0..20 {
        let mut random = Seed::from_env().rng(stream);
        let mut shape = Shape { encrypted: true, blocks: 8, ..Shape::tiny() };
        if random.bool() {
            shape.compression = Compression::Lz4;
        }
        if random.bool() {
            shape = with_gaps(shape);
        }
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 20);
        drop(fixture);
        let mut note = |directory: &SimulatedDirectory| {
            for (nonce, bytes) in blocks(directory, shape.options.align) {
                let before = seen.entry(nonce).or_insert_with(|| bytes.clone());
                assert!(*before == bytes, "{nonce:02x?} is used twice");
            }
        };
        note(&directory);
        // The same image is opened several times, and each opening writes other data.
        for change in directory.changes() {
            medium.apply(&change);
        }
        for number in 0..3 {
            let image = medium.cut(|_, count| random.usize(..count));
            let mut fixture = Fixture::open(&image, &shape);
            openings += 1;
            for block in 0..shape.blocks {
                let status = fixture.take(Step::Write { first: block, count: 1, fua: number == 1 });
                assert!(status == Status::Ok || status == Status::NoSpc, "{status}");
            }
            drop(fixture);
            note(&image);
        }
    }
    let salts: HashSet<[u8; 16]> = seen.keys().map(|nonce| *nonce.first_chunk().unwrap()).collect();
    assert!(seen.len() > 500, "{} blocks", seen.len());
    assert!(salts.len() > openings, "each opening has a salt of its own: {}", salts.len());
}

/// A change of the secret is there as a whole or not at all, at each power cut, and is there once
/// it was answered.
#[test]
fn a_power_cut_leaves_the_key_to_the_old_or_the_new_secret() {
    let shape = Shape { encrypted: true, ..Shape::tiny() };
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let mut fixture = Fixture::open(&directory, &shape);
    let write = Step::Write { first: 0, count: 1, fua: true };
    assert_eq!(fixture.take(write), Status::Ok);
    let new = Secret::Key(vec![8; 32].into());
    let slot = fixture.pool.volumes().keys.values().next().cloned().unwrap();
    let key = VolumeKey::unwrap(&slot, &secret()).unwrap().unwrap();
    let asked = directory.change_count();
    let mut answer = fixture.pool.submit_change(Change::PutKey(key.wrap(&new).unwrap()));
    fixture.run();
    assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
    let answered = directory.change_count();
    assert_eq!(fixture.take(Step::Write { first: 1, count: 1, fua: true }), Status::Ok);
    drop(fixture);
    let (mut old_opens, mut new_opens) = (0, 0);
    for (moment, change) in (1..).zip(&directory.changes()) {
        medium.apply(change);
        let image = medium.cut(|_, _| 0);
        let opens = |secret: &Secret| {
            let (pool, _committer) =
                open_pool(store(&image, &shape, USE).unwrap(), &shape).unwrap();
            pool.unlock("v", secret).is_ok()
        };
        let (by_old, by_new) = (opens(&secret()), opens(&new));
        assert!(by_old != by_new, "at {moment} of {asked} to {answered}");
        assert!(moment > asked || by_old, "at {moment}, before the change");
        assert!(moment < answered || by_new, "at {moment}, after the answer");
        (old_opens, new_opens) = (old_opens + u32::from(by_old), new_opens + u32::from(by_new));
    }
    assert!(old_opens > 0 && new_opens > 0);
}
