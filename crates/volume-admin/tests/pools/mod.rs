//! Pools whose volumes are sent and received in tests: random changes with a model, and streams in
//! memory.
#![allow(dead_code)] // Each test has a copy of this, and not all use everything.

use std::path::Path;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Device, Flags, Op, Sector};
use blockyard_testing::channel;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, Volume, VolumeConfig, VolumeError};
use blockyard_volume_admin::receive::{ReceiveTarget, Received, receive};
use blockyard_volume_admin::send::{SendOptions, Sending};

/// Bytes of a volume.
pub(crate) const SIZE: usize = 1 << 20;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;

pub(crate) fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

pub(crate) fn pool(place: &TempDir, name: &str, options: Options) -> Arc<Running> {
    Running::open(&place.path().join(name), options).unwrap()
}

pub(crate) fn handle(running: &Running, name: &str, compress: Compression) -> (Arc<Volume>, Io) {
    let config = VolumeConfig { compress, ..VolumeConfig::new(running.path(), name) };
    let volume = Volume::open(config).unwrap();
    let io = channel::handle(&volume);
    (volume, io)
}

pub(crate) fn contents(running: &Running, name: &str) -> Vec<u8> {
    let (volume, mut io) = handle(running, name, Compression::default());
    let mut all = vec![0; volume.geometry().len_bytes() as usize];
    io.read(Sector(0), &mut all).unwrap();
    all
}

/// Changes random blocks of a volume and of its model: some become zeros, some noise, and the
/// others what `fill` makes of them.
pub(crate) fn change(
    (running, name, compress): (&Running, &str, Compression),
    random: &mut fastrand::Rng,
    model: &mut [u8],
    fill: &dyn Fn(&mut [u8], &mut fastrand::Rng),
) {
    let (_volume, mut io) = handle(running, name, compress);
    for _ in 0..60 {
        let at = random.usize(..model.len() / BLOCK) * BLOCK;
        let block = &mut model[at..at + BLOCK];
        let sector = Sector(at as u64 / 512);
        match random.u8(..5) {
            0 => {
                block.fill(0);
                io.run(Bio::new(Op::WriteZeroes, sector, BLOCK as u64 / 512)).unwrap();
                continue;
            }
            1 => random.fill(block),
            _ => fill(block, random),
        }
        io.write(sector, block, Flags::NONE).unwrap();
    }
}

/// The streams, which are as long as it was estimated, or shorter if their blocks are compressed or
/// encrypted.
pub(crate) fn sent(running: &Running, options: &SendOptions<'_>) -> Vec<u8> {
    let sending = Sending::begin(running, options).unwrap();
    let estimate = sending.stream_bytes().unwrap();
    let mut out = Vec::new();
    let sent = sending.run(&mut out, &mut |_| {}).unwrap();
    assert_eq!(sent.bytes, out.len() as u64);
    match options.is_compressed || options.is_raw {
        true => assert!(sent.bytes <= estimate, "{} of {estimate}", sent.bytes),
        false => assert_eq!(sent.bytes, estimate),
    }
    out
}

pub(crate) fn received(
    running: &Running,
    target: ReceiveTarget<'_>,
    mut stream: &[u8],
) -> Result<Received, VolumeError> {
    receive(running, &target, &mut stream, &mut |_| {})
}
