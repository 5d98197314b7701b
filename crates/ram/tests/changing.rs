//! A client changes its buffer during a write. The stored block has one of the values of each byte
//! that the client changed, and every other byte as it was. A compressor that worked in the
//! client's buffer would rely on seeing the same bytes again, and would produce a wrong or
//! undecodable block.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only test functions.
#![allow(clippy::disallowed_types)] // The client's threads are not part of the data path.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Bio, BufRef, Channel, Composed, Disk, Op, Region, RegionId, Sector, Status};
use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig};

/// Length of a string that occurs twice in a block and has no repetition in itself.
const LIKE: usize = 48;

/// Stops the other thread, even if this one panics.
struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn carry_out(channel: &mut dyn Channel, bio: Bio, region: RegionId) -> Status {
    assert_eq!(channel.push(&[bio.with_buf(BufRef { region, offset: 0 })]), 1);
    channel.submit();
    let mut done = Vec::new();
    while done.is_empty() {
        channel.reap(&mut done);
    }
    done[0].status
}

/// Repeatedly writes a block, of which another thread changes one byte, and reads it back.
fn writes(config: RamConfig, rounds: usize, seed: u64) {
    let unit = config.unit as usize;
    let ram = Ram::open(config).unwrap();
    let depth = ChannelConfig::default();
    let disk = Composed::new("r".to_owned(), "ram", ram, depth);
    let mut channel = disk.open().unwrap();
    let (buffer, found) = (Region::alloc(unit), Region::alloc(unit));
    let (from, into) =
        (channel.register(Arc::clone(&buffer)), channel.register(Arc::clone(&found)));
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..rounds / 500 {
        // Noise, and a string that occurs twice. A match search that advances in steps finds it in
        // the middle and extends the match backwards, over the byte that changes.
        let mut block: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(unit).collect();
        let second = random.usize(1100..unit - 1000);
        block.copy_within(200..200 + LIKE, second);
        // The block must be compressible, since uncompressed blocks do not reach the compressor's
        // output.
        block[unit - 900..].fill(0x20);
        let at = second + random.usize(0..8);
        buffer.write(0, &block);
        let values = [block[at], !block[at]];
        let (stop, start) = (AtomicBool::new(false), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                while !stop.load(Ordering::Relaxed) {
                    buffer.write(at as u64, &values[1..]);
                    buffer.write(at as u64, &values[..1]);
                }
            });
            let _stop = Stop(&stop);
            start.wait();
            let mut back = vec![0; unit];
            for round in 0..500 {
                let bio = |op| Bio::new(op, Sector(0), unit as u64 / 512);
                let what = format!("seed {seed}, unit {unit}, byte {at}, round {round}");
                assert_eq!(carry_out(&mut *channel, bio(Op::Write), from), Status::Ok, "{what}");
                assert_eq!(carry_out(&mut *channel, bio(Op::Read), into), Status::Ok, "{what}");
                found.read(0, &mut back);
                assert!(values.contains(&back[at]), "{what}: {}", back[at]);
                back[at] = block[at];
                let other = (0..unit).find(|other| back[*other] != block[*other]);
                assert_eq!(other, None, "{what}: no request has changed this byte");
            }
        });
    }
}

fn config(unit: u32, algo: Algo) -> RamConfig {
    let codec = CodecConfig { algo, level: None, dictionary: None };
    RamConfig { size: 1 << 20, unit, codec, compact: 0, ..RamConfig::default() }
}

#[test]
fn lz4_keeps_bytes_that_the_client_does_not_change() {
    writes(config(4096, Algo::Lz4), 20_000, 1);
    writes(config(65_536, Algo::Lz4), 2000, 2);
    writes(RamConfig { dedup: true, ..config(4096, Algo::Lz4) }, 2000, 3);
    writes(RamConfig { checksum: true, ..config(4096, Algo::Lz4) }, 2000, 4);
}

#[cfg(feature = "c-codecs")]
#[test]
fn zstd_keeps_bytes_that_the_client_does_not_change() {
    writes(config(4096, Algo::Zstd), 2000, 5);
}
