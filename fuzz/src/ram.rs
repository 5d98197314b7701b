//! RAM disks: untrusted snapshots, and untrusted compressed data. They must be refused with a
//! reason, or describe blocks of the device.

use std::sync::OnceLock;

use blockyard_ram::codec::{Codec, CodecConfig, Decoder};
use blockyard_ram::snapshot::{BlockRecord, Header, Reader, SnapshotError, Stored, Writer};
use blockyard_ram::{Algo, Ram, RamConfig};

use crate::input::Input;

/// The length of a block in the codecs' target.
const UNIT: usize = 4096;

/// The greatest device that is made.
const SIZE_MAX: u64 = 1 << 20;

/// Interprets the bytes as a snapshot, and makes a device of it. The snapshot is the raw bytes, is
/// built of pieces, or is a valid one with some bytes changed. The last two get valid checksums,
/// because random inputs would hardly pass the checksums otherwise.
///
/// # Panics
/// If an accepted record is invalid for the header, an error is empty, or a device accepts data
/// that the reader refuses.
pub fn snapshot(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let file = match input.below(4) {
        0 => input.take(usize::MAX).to_vec(),
        1 => mended(&mut input),
        _ => changed(&mut input),
    };
    let read = read(&file);
    if let Err(error) = &read {
        assert!(!error.to_string().is_empty());
    }
    match open(&file) {
        Some(Ok(())) => assert!(read.is_ok(), "a device of what is no snapshot: {read:?}"),
        Some(Err(error)) => assert!(!error.is_empty()),
        None => {}
    }
}

/// Makes a device of a snapshot; `None` if its header is invalid, or describes a large device.
fn open(file: &[u8]) -> Option<Result<(), String>> {
    let header = Reader::new(file).ok()?.header().clone();
    if header.size > SIZE_MAX {
        return None;
    }
    let name = format!("blockyard-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, file).expect("there is room for a small file");
    let Header { size, unit, codecs } = header;
    // The codec in the file, so that blocks are loaded without recompression, or another one.
    let codec = if codecs.len() > 1 { codecs[1].clone() } else { RamConfig::default().codec };
    let load = Some(path.clone());
    let opened =
        Ram::open(RamConfig { size, unit, codec, load, compact: 0, ..RamConfig::default() });
    std::fs::remove_file(&path).expect("it was written just now");
    Some(opened.map(drop).map_err(|error| error.to_string()))
}

/// A complete snapshot with blocks of every kind.
fn sample() -> &'static [u8] {
    static SAMPLE: OnceLock<Vec<u8>> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let config = RamConfig::default().codec;
        let codec = Codec::new(&config, "algo").expect("the default is built in");
        let mut encoder = codec.encoder(UNIT).expect("there is memory for a block");
        let header = Header { size: SIZE_MAX, unit: UNIT as u32, codecs: vec![config] };
        let mut writer = Writer::new(Vec::new(), &header).expect("memory takes all");
        let mut packed = vec![0; 2 * UNIT];
        for block in 0..6u64 {
            let plain: Vec<u8> = (0..UNIT as u64).map(|at| (at * block / 9) as u8).collect();
            let (stored, bytes) = match block {
                0 => (Stored::Same, &plain[..8]),
                5 => (Stored::Raw, &plain[..]),
                _ => {
                    let len = codec.compress(&mut encoder, &plain, &mut packed, UNIT);
                    (Stored::Packed(0), &packed[..len.expect("a slope compresses")])
                }
            };
            let record = BlockRecord { block: 3 * block, stored, bytes };
            writer.record(record).expect("memory takes all");
        }
        writer.finish().expect("memory takes all")
    })
}

/// The sample with some bytes changed, and with valid checksums where its lengths say that they
/// are.
fn changed(input: &mut Input<'_>) -> Vec<u8> {
    let mut file = sample().to_vec();
    // Few changes, to keep the structure; half of them in the header.
    for _ in 0..=input.below(4) {
        let at = input.word() as usize % if input.below(2) == 0 { 64 } else { file.len() };
        file[at] ^= input.byte();
    }
    let mut from = 0;
    // The header's length is at the same offset as a record's.
    while let Some(len) = file.get(from + 12..from + 16) {
        let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
        let Some(end) = from.checked_add(16 + len).filter(|end| end + 4 <= file.len()) else {
            break;
        };
        let right = checksum(&file[from..end]).to_le_bytes();
        file[end..end + 4].copy_from_slice(&right);
        from = end + 4;
    }
    file
}

fn read(file: &[u8]) -> Result<(), SnapshotError> {
    let mut reader = Reader::new(file)?;
    let header = reader.header().clone();
    let (blocks, mut next) = (header.size / u64::from(header.unit), 0);
    while let Some(record) = reader.next_record()? {
        assert!((next..blocks).contains(&record.block), "block {} of {blocks}", record.block);
        next = record.block + 1;
        match record.stored {
            Stored::Same => assert_eq!(record.bytes.len(), 8),
            Stored::Raw => assert_eq!(record.bytes.len(), header.unit as usize),
            Stored::Packed(codec) => {
                assert!(usize::from(codec) < header.codecs.len());
                assert!((1..=header.unit as usize).contains(&record.bytes.len()));
            }
        }
    }
    Ok(())
}

/// A file of valid structure with the input as its contents.
fn mended(input: &mut Input<'_>) -> Vec<u8> {
    let mut file = b"BLKYDRAM".to_vec();
    file.extend(input.choose(&[1u32, 1, 1, 2]).to_le_bytes());
    let mut body = Vec::new();
    body.extend(input.choose(&[1u64 << 20, 1 << 20, 4096, 1000, u64::MAX]).to_le_bytes());
    body.extend(input.choose(&[4096u32, 4096, 65_536, 512, 0]).to_le_bytes());
    let codecs = input.choose(&[1u32, 1, 2, 0, 5]);
    body.extend(codecs.to_le_bytes());
    for _ in 0..codecs {
        let algo = input.choose(&[Algo::Lz4, Algo::Zstd, Algo::Lz4hc]) as u32;
        body.extend((algo + input.choose(&[0, 0, 0, 7])).to_le_bytes());
        body.extend(input.choose(&[1i32, 3, -5]).to_le_bytes());
        let len = input.choose(&[0, 0, 8, 100]);
        let dictionary = input.take(len);
        body.extend((dictionary.len() as u32 + input.choose(&[0, 0, 0, 9])).to_le_bytes());
        body.extend(dictionary);
    }
    let len = body.len() as u32 + input.choose(&[0, 0, 0, 1 << 30]);
    file.extend(len.to_le_bytes());
    file.extend(body);
    file.extend(checksum(&file).to_le_bytes());
    let mut block = 0;
    while !input.is_empty() {
        block += u64::from(input.byte() % 4);
        let kind = input.choose(&[3u8, 3, 1, 2, 0, 9]);
        let wanted = match kind {
            1 => 8,
            2 => 4096,
            0 => 0,
            _ => usize::from(input.byte()) * 8,
        };
        let mut bytes = input.take(wanted).to_vec();
        if kind == 1 || kind == 2 {
            bytes.resize(wanted, 0);
        }
        let mut record = block.to_le_bytes().to_vec();
        record.extend([kind, input.choose(&[0, 0, 1, 200]), 0, input.choose(&[0, 0, 0, 1])]);
        record.extend((bytes.len() as u32).to_le_bytes());
        record.extend(bytes);
        file.extend(&record);
        file.extend(checksum(&record).to_le_bytes());
    }
    file
}

/// CRC-32, bit by bit.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 }
        })
    })
}

/// Decompresses the bytes by every codec, and compresses them.
///
/// # Panics
/// If compressed data do not decompress to the original.
pub fn codecs(bytes: &[u8]) {
    for algo in Algo::ALL.into_iter().filter(|algo| algo.is_built_in()) {
        let config = CodecConfig { algo, ..RamConfig::default().codec };
        let codec = Codec::new(&config, "algo").expect("it is built in, at its own level");
        let mut decoder = Decoder::new(UNIT, true).expect("there is memory for a block");
        let mut block = vec![0; UNIT];
        // Damaged or not, the block keeps its length, and the memory after it is unchanged.
        let _ = codec.decompress_here(&mut decoder, bytes, &mut block);
        let mut encoder = codec.encoder(UNIT).expect("there is memory for a block");
        let mut plain: Vec<u8> = bytes.iter().copied().cycle().take(UNIT).collect();
        plain.resize(UNIT, 0);
        let mut packed = vec![0; 2 * UNIT];
        let len = codec.compress(&mut encoder, &plain, &mut packed, 2 * UNIT);
        let len = len.expect("there is room for anything");
        assert_eq!(codec.decompress_here(&mut decoder, &packed[..len], &mut block), Ok(()));
        assert!(block == plain, "{algo} changes a block");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the target would not test the code after the checksums.
    #[test]
    fn a_mutation_passes_the_checksums() {
        assert!(read(sample()).is_ok() && open(sample()) == Some(Ok(())));
        let errors = |count: u64| {
            let files = (0..count).map(|seed| {
                let byte = |at: u64| checksum(&(seed << 8 | at).to_le_bytes()) as u8;
                changed(&mut Input::new(&(0..64).map(byte).collect::<Vec<u8>>()))
            });
            files.filter_map(|file| open(&file)?.err()).collect::<Vec<_>>()
        };
        let all = errors(300);
        let says = |what: &str| all.iter().any(|error| error.contains(what));
        assert!(says("does not decompress") && says("makes no sense"), "{all:?}");
        assert!(!all.is_empty() && !all.iter().all(|error| error.contains("checksum")));
    }
}
