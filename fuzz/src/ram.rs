//! RAM disks: snapshots that somebody has written, and compressed bytes that nobody has compressed.
//! Whatever they are, they are refused with a reason, or mean blocks of the device.

use blockyard_ram::codec::{Codec, CodecConfig, Decoder};
use blockyard_ram::snapshot::{Reader, SnapshotError, Stored};
use blockyard_ram::{Algo, RamConfig};

use crate::input::Input;

/// Bytes of a block in the codecs' target.
const UNIT: usize = 4096;

/// Reads the bytes as a snapshot: as they are, or in pieces with the checksums made good, because
/// what is behind those would hardly be reached otherwise.
///
/// # Panics
/// If a record that was taken makes no sense for the header, or an error says nothing.
pub fn snapshot(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let file = match input.below(4) {
        0 => input.take(usize::MAX).to_vec(),
        _ => mended(&mut input),
    };
    if let Err(error) = read(&file) {
        assert!(!error.to_string().is_empty());
    }
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

/// A file of this form with the input in it.
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
/// If what was compressed does not come back.
pub fn codecs(bytes: &[u8]) {
    for algo in Algo::ALL.into_iter().filter(|algo| algo.is_built_in()) {
        let config = CodecConfig { algo, ..RamConfig::default().codec };
        let codec = Codec::new(&config, "algo").expect("it is built in, at its own level");
        let mut decoder = Decoder::new(UNIT, true).expect("there is memory for a block");
        let mut block = vec![0; UNIT];
        // Damaged or not: the block is as long as before, and so is the memory behind it.
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
