//! A disk image: any bytes as a raw or a qcow2 image, and qcow2 images with a valid header and any
//! tables. An image that is accepted becomes a valid stream of the right length.

use std::path::Path;

use blockyard_testing::temp_dir::TempDir;
use blockyard_volume_admin::import::{BackingPolicy, DiskFormat, DiskImage};
use blockyard_volume_admin::incoming::{Incoming, Part};

use crate::input::Input;

/// Length of a cluster of the images with a valid header, in bytes.
const CLUSTER: usize = 512;

/// Largest disk that is read to its end, in bytes.
const SIZE_MAX: u64 = 1 << 20;

/// Interprets the bytes as an image, and as the tables of one.
///
/// # Panics
/// If an accepted image becomes an invalid stream.
pub fn disk_image(bytes: &[u8]) {
    let place = TempDir::new(&std::env::temp_dir(), "fuzz-disk-image");
    let path = place.path().join("image");
    std::fs::write(&path, bytes).expect("the file can be written");
    for format in [Some(DiskFormat::Qcow2), None] {
        read(&path, format);
    }
    std::fs::write(&path, image(&mut Input::new(bytes))).expect("the file can be written");
    read(&path, None);
}

fn read(path: &Path, format: Option<DiskFormat>) {
    let opened = DiskImage::open(path, format, BackingPolicy::SameDirectory);
    let Ok(image) = opened else { return };
    let size = image.volume_bytes(4096);
    if size > SIZE_MAX {
        return;
    }
    let mut stream = Vec::new();
    let Ok(imported) = image.send("v", 4096, &mut stream, &mut |_, _| {}) else { return };
    assert_eq!(imported.size_bytes, size);
    let (mut input, mut data) = (&stream[..], 0);
    let mut incoming = Incoming::begin(&mut input).expect("the stream has a head");
    assert_eq!(incoming.head.blocks * 4096, size);
    loop {
        match incoming.part().expect("the stream is valid") {
            Part::Data { bytes, .. } => data += bytes.len() as u64,
            Part::Zeros { .. } => panic!("a full stream has no zeros"),
            Part::Sealed { .. } => panic!("an image has no encrypted blocks"),
            Part::End => break,
        }
    }
    assert_eq!(data, imported.data_bytes);
}

/// A qcow2 image of eight clusters of 512 bytes: a header, a level-1 table, two level-2 tables, and
/// data.
fn image(input: &mut Input<'_>) -> Vec<u8> {
    let version = 2 + u32::from(!input.word().is_multiple_of(4));
    let size = 512 + input.word() % (96 * CLUSTER as u64);
    let mut out = Vec::new();
    out.extend(b"QFI\xfb");
    out.extend(version.to_be_bytes());
    // A name at the end of the header's cluster, or none.
    let has_backing = input.word().is_multiple_of(4);
    let (at, len) = if has_backing { (500_u64, 5_u32) } else { (0, 0) };
    out.extend(at.to_be_bytes());
    out.extend(len.to_be_bytes());
    out.extend(9_u32.to_be_bytes());
    out.extend(size.to_be_bytes());
    out.extend(0_u32.to_be_bytes());
    out.extend(2_u32.to_be_bytes());
    out.extend((CLUSTER as u64).to_be_bytes());
    out.extend([0; 24]);
    let zstd = u64::from(input.word().is_multiple_of(2));
    out.extend(((zstd << 3) | (input.word() % 2)).to_be_bytes());
    out.extend([0; 16]);
    out.extend(4_u32.to_be_bytes());
    out.extend(112_u32.to_be_bytes());
    out.extend([zstd as u8, 0, 0, 0, 0, 0, 0, 0]);
    out.resize(500, 0);
    out.extend(b"image");
    out.resize(CLUSTER, 0);
    for table in [2_u64, 3] {
        out.extend(((table * CLUSTER as u64) | ((input.word() % 2) << 63)).to_be_bytes());
    }
    out.resize(2 * CLUSTER, 0);
    for _ in 0..2 * CLUSTER / 8 {
        let host = input.word() % 9 * CLUSTER as u64;
        let entry = match input.word() % 8 {
            0 => 0,
            1 => 1,
            2 => host | 1,
            3 => (1 << 62) | host | (input.word() % CLUSTER as u64),
            4 => input.word(),
            _ => host,
        };
        out.extend(entry.to_be_bytes());
    }
    while out.len() < 8 * CLUSTER {
        out.extend(input.word().to_le_bytes());
    }
    out.truncate(8 * CLUSTER - (input.word() % 8 * 100) as usize);
    out
}
