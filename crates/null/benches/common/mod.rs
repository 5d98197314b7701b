//! What the benches of instruction counts share: the counter, and a channel with bios.

mod callgrind;

use std::hint::black_box;
use std::sync::Arc;

use blockyard_core::channel::{Channel, ChannelConfig};
use blockyard_core::composed::Composed;
use blockyard_core::disk::Disk;
use blockyard_core::region::Region;
use blockyard_core::{Bio, BufRef, Completion, RegionId, Sector};
use blockyard_null::{Null, NullConfig};

pub(crate) use callgrind::{bench, run};

/// Bios that are pushed, submitted and reaped together.
pub(crate) const BATCH: u64 = 32;
/// Batches of one bench: enough to average out the cost of the first.
pub(crate) const BATCHES: u64 = 64;
/// The function during which callgrind collects.
const COLLECTED: &str = "*callgrind*collected*";
/// Sectors of a bio: 4 KiB.
pub(crate) const SECTORS: u64 = 8;
/// A channel and the bios to push through it.
pub(crate) struct Load {
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) bios: Vec<Bio>,
    done: Vec<Completion>,
    /// Bios that are pushed, submitted and reaped together.
    batch: usize,
}

/// The set-up before the measured part: opens the disk and runs a first batch.
pub(crate) fn load(config: NullConfig, bio: impl Fn(u64, BufRef) -> Bio) -> Load {
    let null = Null::open(config).expect("the configuration fits");
    let depth = ChannelConfig::default();
    let disk = Composed::new("n".to_owned(), "null", null, depth);
    load_on(&disk, bio)
}

/// Opens a channel and runs a first batch.
pub(crate) fn load_on(disk: &dyn Disk, bio: impl Fn(u64, BufRef) -> Bio) -> Load {
    let mut channel = disk.open().expect("a fresh disk can be opened");
    let region = Region::alloc((BATCH * SECTORS * 512) as usize);
    let region_id: RegionId = channel.register(Arc::clone(&region));
    let bio = |index: u64| {
        let buf = BufRef { region: region_id, offset: index % BATCH * SECTORS * 512 };
        bio(index, buf).with_user_data(index)
    };
    let bios = (0..(BATCHES + 1) * BATCH).map(bio).collect();
    let (done, batch) = (Vec::with_capacity(BATCH as usize), BATCH as usize);
    let mut load = Load { channel, bios, done, batch };
    let measured = load.bios.split_off(BATCH as usize);
    drive(&mut load);
    load.bios = measured;
    load
}

/// Runs all bios.
pub(crate) fn drive(load: &mut Load) {
    for batch in load.bios.chunks(load.batch) {
        load.done.clear();
        assert_eq!(load.channel.push(batch), batch.len());
        load.channel.submit();
        assert_eq!(load.channel.reap(&mut load.done), batch.len());
        black_box(&load.done);
    }
    assert!(load.done.iter().all(|completion| completion.status.is_ok()));
}

/// A null device without zones.
pub(crate) fn flat(memory_backed: bool) -> NullConfig {
    NullConfig { size: 64 << 20, bs: 4096, memory_backed, ..NullConfig::default() }
}

/// Sectors of blocks that are not adjacent, so that nothing merges.
pub(crate) fn apart(index: u64) -> Sector {
    Sector(index * 2 * SECTORS)
}

/// Reads that do not merge.
pub(crate) fn reads() -> Load {
    load(flat(false), |index, buf| Bio::read(apart(index), SECTORS, buf))
}

/// The load one bio at a time, where each bio pays for what a batch shares.
#[allow(dead_code)] // One of the benches has no such load.
pub(crate) fn singly(load: Load) -> Load {
    Load { batch: 1, ..load }
}
