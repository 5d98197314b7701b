//! The device contract on RAM disks of every kind, plain and wrapped.

use std::sync::Arc;

#[cfg(feature = "c-codecs")]
use blockyard_ram::{Algo, CodecConfig};
use blockyard_ram::{Ram, RamConfig};
use blockyard_testing::contract;

/// 8 MiB of 4 KiB blocks.
fn plain() -> RamConfig {
    RamConfig { size: 8 << 20, ..RamConfig::default() }
}

fn open(config: &RamConfig) -> Arc<Ram> {
    Ram::open(config.clone()).expect("the configuration fits")
}

/// Runs the contract with everything that can wrap a device.
fn suite(name: &str, config: RamConfig) {
    contract::run_wrapped(name, true, move || open(&config));
}

/// Runs the contract on the bare device: the wrappers do not depend on this configuration.
fn alone(name: &str, config: RamConfig) {
    contract::run(&contract::Subject::plain(name, true, move || open(&config)));
}

#[test]
fn blocks_of_4_kib() {
    suite("ram", plain());
}

/// Sub-block writes: eight logical blocks are compressed as one.
#[test]
fn sectors_of_512_bytes() {
    suite("ram, 512", RamConfig { bs: 512, ..plain() });
}

/// Sub-block writes of both kinds: by sectors, and by logical blocks of 4 KiB.
#[test]
fn large_units() {
    alone("ram, 64k", RamConfig { unit: 65_536, ..plain() });
    alone("ram, 16k of 512", RamConfig { unit: 16_384, bs: 512, ..plain() });
}

#[cfg(feature = "c-codecs")]
#[test]
fn other_codecs() {
    let by = |algo, level| CodecConfig { algo, level, dictionary: None };
    alone("ram, zstd", RamConfig { codec: by(Algo::Zstd, Some(1)), ..plain() });
    let codec = by(Algo::Lz4hc, Some(3));
    alone("ram, lz4hc", RamConfig { codec, bs: 512, unit: 8192, ..plain() });
    let dictionary = Some((0..2048u32).flat_map(u32::to_le_bytes).collect());
    let codec = CodecConfig { dictionary, ..by(Algo::Zstd, None) };
    alone("ram, zstd with a dictionary", RamConfig { codec, bs: 1024, ..plain() });
}
