//! Snapshots: what is saved to a file and loaded from it.

use super::*;

#[test]
fn a_snapshot_is_loaded_as_it_was_saved() {
    let scratch = Scratch::new("snapshot");
    let file = scratch.file("snapshot");
    let data = contents();
    let saved = {
        let config = RamConfig { backing: Some(scratch.file("backing")), ..plain() };
        let ram = Ram::open(config).unwrap();
        let mut io = io(&ram);
        fill(&mut io, &data);
        ram.write_back(&Selection { blocks_max: 100, ..Selection::default() }, u64::MAX).unwrap();
        ram.save(&file, blockyard_ram::Replace::Own).unwrap()
    };
    assert_eq!(saved.blocks, 896);
    assert_eq!(saved.bytes, std::fs::metadata(&file).unwrap().len());
    let load = Some(file.clone());
    let mut configs = vec![
        RamConfig { load: load.clone(), ..plain() },
        RamConfig { load: load.clone(), checksum: true, ..plain() },
    ];
    if cfg!(feature = "c-codecs") {
        configs.push(RamConfig { load: load.clone(), codec: zstd(), ..plain() });
        configs.push(RamConfig { load: load.clone(), recompress: vec![zstd()], ..plain() });
    }
    for config in configs {
        let ram = Ram::open(config).unwrap();
        assert_eq!(ram.stats().mm.orig_data_size, 896 * 4096);
        compare(&mut io(&ram), &data);
        // A second save over the old file gives the same contents.
        let again = ram.save(&scratch.file("again"), blockyard_ram::Replace::Own).unwrap();
        assert_eq!(again.blocks, 896);
    }
    let names: Vec<_> =
        std::fs::read_dir(&scratch.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn invalid_snapshot_is_refused_with_its_path() {
    let scratch = Scratch::new("refused");
    let file = scratch.file("snapshot");
    let ram = Ram::open(plain()).unwrap();
    fill(&mut io(&ram), &contents());
    ram.save(&file, blockyard_ram::Replace::Own).unwrap();
    let whole = std::fs::read(&file).unwrap();
    let load =
        |config: RamConfig| Ram::open(RamConfig { load: Some(file.clone()), ..config }).map(drop);
    let refused = |config| -> RamError { load(config).unwrap_err() };
    for (config, want) in [
        (RamConfig { size: SIZE / 2, ..plain() }, "size=4194304&unit=4096, which is what it was"),
        (RamConfig { unit: 8192, ..plain() }, "size=4194304&unit=4096"),
        (RamConfig { mem_limit: 64 << 10, ..plain() }, "invalid mem_limit `65536`"),
    ] {
        let text = refused(config).to_string();
        assert!(text.contains(want), "{text}");
    }
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 4;
    for (bytes, want) in [
        (&damaged[..], "it is damaged: a checksum is wrong, after"),
        (&whole[..whole.len() / 2], "it is cut off after"),
        (b"not a snapshot at all", "it is no snapshot of a RAM disk"),
        (b"", "it is no snapshot of a RAM disk"),
    ] {
        std::fs::write(&file, bytes).unwrap();
        let text = refused(plain()).to_string();
        assert!(text.starts_with("load: `") && text.contains(want), "{text}");
        assert!(text.contains("snapshot`: it is"), "{text}");
    }
    // All checksums are right, but one block does not decompress.
    let header = Header { size: SIZE, unit: BLOCK as u32, codecs: vec![CodecConfig::default()] };
    let mut writer = Writer::new(Vec::new(), &header).unwrap();
    let bytes = &[0x11; 900];
    writer.record(BlockRecord { block: 77, stored: Stored::Packed(0), bytes }).unwrap();
    std::fs::write(&file, writer.finish().unwrap()).unwrap();
    for dedup in [false, true] {
        let text = refused(RamConfig { dedup, ..plain() }).to_string();
        assert!(text.ends_with("it is damaged: block 77 does not decompress"), "{text}");
    }
    // An invalid codec parameter in a snapshot is not reported as a parameter of the device.
    for (level, dictionary) in [(Some(99), None), (None, Some([7; 4]))] {
        let dictionary = dictionary.map(|bytes| Arc::from(&bytes[..]));
        let codecs = vec![CodecConfig { level, dictionary, ..zstd() }];
        let writer = Writer::new(Vec::new(), &Header { codecs, ..header.clone() }).unwrap();
        std::fs::write(&file, writer.finish().unwrap()).unwrap();
        assert_eq!(refused(plain()).field(), "load");
    }
    std::fs::remove_file(&file).unwrap();
    assert_eq!(refused(plain()).field(), "load");
    // A file that cannot be written is an error and leaves the old file unchanged.
    let error = ram
        .save(&scratch.file("no/such/folder"), blockyard_ram::Replace::Own)
        .unwrap_err()
        .to_string();
    assert!(error.contains("cannot be written"), "{error}");
}

/// Compressed blocks of 64 KiB that are only a few bytes shorter than the block: this product does
/// not make them, but a file may contain them.
#[test]
fn packed_blocks_that_are_hardly_shorter_are_loaded() {
    const UNIT: usize = 64 << 10;
    let scratch = Scratch::new("hardly");
    let file = scratch.file("snapshot");
    let mut noise = vec![0; UNIT];
    fastrand::Rng::with_seed(3).fill(&mut noise);
    for repeated in 262..=265 {
        let (first, last) = (UNIT - repeated - 12, 12);
        let mut block = noise[..first].to_vec();
        block.resize(first + repeated, noise[first - 1]);
        block.extend_from_slice(&noise[..last]);
        // LZ4: literals, a match that repeats the last of them, and literals.
        let mut packed = vec![0xff];
        packed.resize(1 + (first - 15) / 255, 0xff);
        packed.push(((first - 15) % 255) as u8);
        packed.extend_from_slice(&noise[..first]);
        packed.extend([1, 0, (repeated - 4 - 15) as u8, (last << 4) as u8]);
        packed.extend_from_slice(&noise[..last]);
        assert!((UNIT - 4..UNIT).contains(&packed.len()), "{}", packed.len());
        let header = Header { size: SIZE, unit: UNIT as u32, codecs: vec![CodecConfig::default()] };
        let mut writer = Writer::new(Vec::new(), &header).unwrap();
        writer.record(BlockRecord { block: 5, stored: Stored::Packed(0), bytes: &packed }).unwrap();
        std::fs::write(&file, writer.finish().unwrap()).unwrap();
        for checksum in [false, true] {
            let load = Some(file.clone());
            let config = RamConfig { unit: UNIT as u32, checksum, load, ..plain() };
            let ram = Ram::open(config).unwrap();
            let mut back = vec![0; UNIT];
            io(&ram).read(Sector(5 * UNIT as u64 / 512), &mut back).unwrap();
            assert!(back == block, "{repeated}, checksum {checksum}");
        }
    }
}

/// The largest values: the longest stored block, whose length a word cannot express, uncompressed
/// and with a checksum, in memory, in a backing file and in a snapshot.
#[test]
fn the_longest_blocks_go_everywhere() {
    const UNIT: usize = 65_536;
    let scratch = Scratch::new("longest");
    let config = |backing: &str| RamConfig {
        unit: UNIT as u32,
        checksum: true,
        backing: Some(scratch.file(backing)),
        ..plain()
    };
    let ram = Ram::open(config("backing")).unwrap();
    let mut rng = fastrand::Rng::with_seed(4);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(8 * UNIT).collect();
    let (mut io_one, mut found) = (io(&ram), vec![0; 8 * UNIT]);
    io_one.write(Sector(0), &noise, Flags::NONE).unwrap();
    assert_eq!(ram.stats().mm.huge_pages, 8);
    let flip = Injection::Device { name: "flip".to_owned(), value: "128".to_owned() };
    ram.inject(&flip).unwrap();
    assert_eq!(io_one.read(Sector(128), &mut found[..UNIT]), Err(Status::Protection));
    io_one.write(Sector(128), &noise[UNIT..2 * UNIT], Flags::NONE).unwrap();
    assert_eq!(ram.write_back(&selection(Which::Huge), u64::MAX).unwrap().blocks, 8);
    // Their places do not overlap, even if another block is written between them later.
    io_one.write(Sector(0), &noise[..UNIT], Flags::NONE).unwrap();
    assert_eq!(ram.write_back(&selection(Which::All), u64::MAX).unwrap().blocks, 1);
    io_one.read(Sector(0), &mut found).unwrap();
    assert!(found == noise);
    ram.save(&scratch.file("snapshot"), blockyard_ram::Replace::Own).unwrap();
    let load = Some(scratch.file("snapshot"));
    let other = Ram::open(RamConfig { load, ..config("other") }).unwrap();
    io(&other).read(Sector(0), &mut found).unwrap();
    assert!(found == noise);
    other.compact().unwrap();
    io(&other).read(Sector(0), &mut found).unwrap();
    assert!(found == noise);
}

/// Without checksums, a codec at least notices bytes that do not decompress. Regression: such a
/// block was saved, and no device could read it from the snapshot.
#[test]
fn a_block_that_is_none_is_not_saved() {
    let scratch = Scratch::new("none");
    let ram = Ram::open(plain()).unwrap();
    // Few words that recur often: most stored bytes are then lengths and offsets of matches.
    let mut rng = fastrand::Rng::with_seed(4);
    let words: Vec<[u8; 12]> = (0..40).map(|_| std::array::from_fn(|_| rng.u8(..))).collect();
    let (mut io, mut found, mut refused) = (io(&ram), vec![0; BLOCK], 0);
    for block in 0..40 {
        let text = std::iter::repeat_with(|| words[rng.usize(0..words.len())]).flatten();
        let data: Vec<u8> = text.take(BLOCK).collect();
        let sector = Sector(block * 8);
        io.write(sector, &data, Flags::NONE).unwrap();
        let value = sector.0.to_string();
        ram.inject(&Injection::Device { name: "flip".to_owned(), value }).unwrap();
        let read = io.read(sector, &mut found);
        let saved = ram.save(&scratch.file("snapshot"), blockyard_ram::Replace::Own);
        assert_eq!(read.is_ok(), saved.is_ok(), "block {block}: {read:?}, {saved:?}");
        if let Err(error) = saved {
            let want = format!("block {block} is damaged, and what it was is lost (MEDIUM)");
            assert_eq!((read, error.to_string()), (Err(Status::Medium), want));
            refused += 1;
        }
        io.write(sector, &data, Flags::NONE).unwrap();
    }
    assert!(refused > 0, "no changed bit was noticed");
}
