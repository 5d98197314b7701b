//! Which blocks a selection includes, compared with a listing that was taken before.

use std::collections::BTreeSet;

use blockyard_ram::{BlockState, WrittenBack};

use super::*;

/// Every kind of selection.
fn selections() -> Vec<Selection> {
    let mut all = Vec::new();
    for (which, _) in Which::ALL {
        for age in [1, 2, 3] {
            for threshold in [0, 1000, BLOCK] {
                all.push(Selection { which, age, threshold, ..Selection::default() });
            }
        }
    }
    all
}

/// Contents of all kinds: every eighth block is incompressible noise; others are runs, repeated
/// words or unwritten; the rest is text of few words, which zstd compresses better than LZ4.
fn mixed() -> Vec<u8> {
    let (mut data, mut rng) = (contents(), fastrand::Rng::with_seed(8));
    let words: Vec<[u8; 12]> =
        (0..40).map(|_| std::array::from_fn(|_| rng.u8(b'a'..=b'p'))).collect();
    for (_, block) in data.chunks_mut(BLOCK).enumerate().filter(|(number, _)| number % 8 > 3) {
        let len = rng.usize(BLOCK / 4..BLOCK);
        let text = std::iter::repeat_with(|| words[rng.usize(0..words.len())]).flatten();
        block.fill(0);
        block[..len].iter_mut().zip(text).for_each(|(byte, letter)| *byte = letter);
    }
    data
}

/// A device with blocks of all ages from 0 to 3. Noise is huge; it is also marked incompressible,
/// except every other noise block, which was written again.
fn prepared(scratch: &Scratch, number: usize, data: &[u8]) -> (Arc<Ram>, Io) {
    // One file per device: a process that another test starts may hold a file open a little longer.
    let backing = Some(scratch.file(&format!("backing{number}")));
    let ram = Ram::open(RamConfig { backing, recompress: vec![zstd()], ..plain() }).unwrap();
    let mut io = io(&ram);
    fill(&mut io, data);
    assert_eq!(ram.recompress(&selection(Which::Huge)).unwrap().incompressible, 128);
    let blocks = data.chunks(BLOCK).enumerate();
    for (number, block) in blocks.filter(|(number, _)| number % 16 == 0) {
        io.write(Sector(number as u64 * 8), block, Flags::NONE).unwrap();
    }
    let mut found = vec![0; BLOCK];
    for turn in 1..=3 {
        ram.idle();
        for number in (0..data.len() / BLOCK).filter(|number| number / 16 % 4 == turn) {
            io.read(Sector(number as u64 * 8), &mut found).unwrap();
        }
    }
    (ram, io)
}

fn listed(ram: &Ram) -> Vec<BlockState> {
    ram.states(0, SIZE as usize / BLOCK).states
}

/// Whether a selection includes a block with this state: an implementation independent of the
/// product's.
fn means(selection: &Selection, state: &BlockState) -> bool {
    let has = |flag: u8| state.flags.contains(&flag);
    let in_memory = state.stored_bytes > 0 && !has(b's') && !has(b'w');
    let kind = match selection.which {
        Which::All => true,
        Which::Idle => state.age >= selection.age,
        Which::Huge => has(b'h'),
        Which::HugeIdle => has(b'h') && state.age >= selection.age,
        Which::Incompressible => has(b'n'),
    };
    in_memory && kind && state.stored_bytes as usize >= selection.threshold
}

fn meant(selection: &Selection, before: &[BlockState]) -> BTreeSet<u64> {
    before.iter().filter(|state| means(selection, state)).map(|state| state.block).collect()
}

fn flagged(ram: &Ram, flag: u8) -> BTreeSet<u64> {
    let all = listed(ram).into_iter().filter(|state| state.flags.contains(&flag));
    all.map(|state| state.block).collect()
}

#[test]
fn writeback_takes_only_selected_blocks() {
    let (scratch, data) = (Scratch::new("meant-back"), mixed());
    let mut sizes = BTreeSet::new();
    for (number, selection) in selections().into_iter().enumerate() {
        let (ram, mut io) = prepared(&scratch, number, &data);
        let before = listed(&ram);
        let wanted = meant(&selection, &before);
        let done = ram.write_back(&selection, u64::MAX).unwrap();
        assert_eq!(flagged(&ram, b'w'), wanted, "{selection:?}");
        assert_eq!(done.blocks, wanted.len() as u64, "{selection:?}");
        let bytes = before.iter().filter(|state| wanted.contains(&state.block));
        let bytes: u64 = bytes.map(|state| u64::from(state.stored_bytes)).sum();
        let none = WrittenBack::default();
        assert_eq!(done, WrittenBack { blocks: done.blocks, bytes, ..none }, "{selection:?}");
        sizes.insert(wanted.len());
        compare(&mut io, &data);
    }
    // Otherwise the selections would hardly differ.
    assert!(sizes.len() > 8, "{sizes:?}");
}

#[test]
fn recompression_takes_only_selected_blocks() {
    let (scratch, data) = (Scratch::new("meant-smaller"), mixed());
    for (number, selection) in selections().into_iter().enumerate() {
        let (ram, mut io) = prepared(&scratch, number, &data);
        let before = listed(&ram);
        // Blocks found to be incompressible are not tried again.
        let mut wanted = meant(&selection, &before);
        wanted.retain(|block| !before.iter().any(|b| b.block == *block && b.flags[5] == b'n'));
        let done = ram.recompress(&selection).unwrap();
        assert_eq!(done.tried, wanted.len() as u64, "{selection:?}: {done:?}");
        let smaller = flagged(&ram, b'r');
        assert_eq!(smaller.len() as u64, done.replaced, "{selection:?}");
        assert!(smaller.is_subset(&wanted), "{selection:?}");
        // All text blocks shrink: zstd compresses them better.
        let text = wanted.iter().filter(|block| *block % 8 > 3);
        assert!(text.clone().all(|block| smaller.contains(block)), "{selection:?}");
        let noise = wanted.iter().filter(|block| *block % 8 == 0).count();
        assert_eq!(done.incompressible, noise as u64, "{selection:?}");
        compare(&mut io, &data);
    }
}

/// The limit bounds the bytes written. No block that would still have fitted is left, and each
/// block that did not fit is counted.
#[test]
fn writeback_fills_its_limit() {
    let (scratch, data) = (Scratch::new("limit"), mixed());
    let ram = Ram::open(RamConfig { backing: Some(scratch.file("backing")), ..plain() }).unwrap();
    let mut io = io(&ram);
    fill(&mut io, &data);
    for limit in [0, 100, 50_000, 600_000] {
        let before = listed(&ram);
        let wanted = meant(&Selection::default(), &before);
        let done = ram.write_back(&Selection::default(), limit).unwrap();
        assert!(done.bytes <= limit, "{limit}: {done:?}");
        assert_eq!(done.blocks + done.skipped_limit, wanted.len() as u64, "{limit}: {done:?}");
        let left = meant(&Selection::default(), &listed(&ram));
        let least = before.iter().filter(|state| left.contains(&state.block));
        let least = least.map(|state| u64::from(state.stored_bytes)).min().unwrap();
        assert!(done.bytes + least > limit, "{limit}: {done:?}, and {least} bytes are left");
    }
    assert!(ram.stats().bd.bd_count > 150, "{:?}", ram.stats().bd);
    compare(&mut io, &data);
}

/// `huge_pages_since` counts each uncompressed block that was written, wherever it is now.
/// Background work on it does not count again.
#[test]
fn huge_blocks_are_counted_since_the_device_was_made() {
    let (scratch, data) = (Scratch::new("huge"), mixed());
    let backing = Some(scratch.file("backing"));
    let ram = Ram::open(RamConfig { backing, recompress: vec![zstd()], ..plain() }).unwrap();
    let mut io = io(&ram);
    fill(&mut io, &data);
    let huge = || (ram.stats().mm.huge_pages, ram.stats().mm.huge_pages_since);
    assert_eq!(huge(), (128, 128));
    fill(&mut io, &data);
    assert_eq!(huge(), (128, 256), "each was written twice");
    ram.recompress(&Selection::default()).unwrap();
    ram.compact().unwrap();
    assert_eq!(huge(), (128, 256));
    let few = Selection { blocks_max: 28, ..selection(Which::Huge) };
    ram.write_back(&few, u64::MAX).unwrap();
    assert_eq!(huge(), (100, 256), "what is on the file is not in memory");
    io.run(Bio::new(Op::Discard, Sector(0), SIZE / 512)).unwrap();
    assert_eq!(huge(), (0, 256));
}
