//! `iops` and `bandwidth` limits of a volume. A manual clock advances only when nothing else can
//! happen, so the final time is the cost of the limits alone, on any machine.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Clock;
use blockyard_core::{Bio, BufRef, Device, Due, Op, Region, Sector};
use blockyard_testing::clock::ManualClock;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Options, Volume, VolumeConfig};

/// Length of a request, in bytes.
const LEN: u64 = 64 << 10;

/// Distance between requests, in bytes: they must not be adjacent, or they would be merged.
const STRIDE: u64 = 4 * LEN;

const SECOND_NS: u64 = 1_000_000_000;

/// Number of checks for completions, and the time between two of them: two minutes together, so
/// that a busy machine does not fail the test.
const LOOKS_MAX: usize = 120_000;
const PAUSE: Duration = Duration::from_millis(1);

fn open(place: &TempDir, iops: u64, bandwidth: u64) -> Arc<Volume> {
    let path = place.path().join("pool");
    let config = VolumeConfig { size: 256 << 20, iops, bandwidth, ..VolumeConfig::new(path, "v0") };
    // Short segments are made quickly.
    let options = Options { segment_bytes: 4 << 20, ..Options::default() };
    Volume::open_with(config, options).unwrap()
}

/// The time that `each` requests on each of two channels take, in nanoseconds of the manual clock.
fn time_ns(volume: &Arc<Volume>, op: Op, each: u64) -> u64 {
    let clock = ManualClock::new();
    let mut channels = [0, 1].map(|side| {
        let config = ChannelConfig::default();
        let (queue, stats) = (volume.open_queue().unwrap(), ChannelStats::new());
        let (geometry, limits) = (volume.geometry(), volume.limits());
        let mut channel = Stack::new(config, geometry, limits, queue, clock.clone(), stats);
        let region = channel.register(Region::alloc(LEN as usize));
        // With the descriptor, the channel needs no polling: its due time depends on the limits
        // alone.
        assert!(channel.descriptor().is_some());
        let bio = move |at: u64| {
            let sector = Sector((2 * at + side) * STRIDE / 512);
            Bio::new(op, sector, LEN / 512).with_buf(BufRef { region, offset: 0 })
        };
        (channel, (0..each).map(bio).collect::<Vec<_>>())
    });
    let mut done = Vec::new();
    for _ in 0..LOOKS_MAX {
        let before = done.len();
        for (channel, bios) in &mut channels {
            let taken = channel.push(bios);
            bios.drain(..taken);
            channel.submit();
            channel.reap(&mut done);
        }
        assert!(done.iter().all(|end| end.status.is_ok()));
        if done.len() as u64 == 2 * each {
            return clock.now().0;
        }
        let due = channels.iter().map(|(channel, _)| channel.due());
        match due.fold(Due::Never, Due::earlier) {
            _ if done.len() > before => {}
            Due::At(at) if at > clock.now() => clock.advance_to(at),
            _ => std::thread::park_timeout(PAUSE),
        }
    }
    panic!("{} of {} have ended", done.len(), 2 * each);
}

#[test]
fn a_volume_keeps_its_limits() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "limits");
    for op in [Op::Read, Op::Write] {
        // 300 requests at 100 per second, on two channels together.
        let found = time_ns(&open(&place, 100, 0), op, 150);
        assert!((29 * SECOND_NS / 10..=3 * SECOND_NS).contains(&found), "{op:?}: {found} ns");
        // 4 MiB at 1 MiB per second; the next request would pay for the last one.
        let found = time_ns(&open(&place, 0, 1 << 20), op, 32);
        assert!((39 * SECOND_NS / 10..=4 * SECOND_NS).contains(&found), "{op:?}: {found} ns");
        assert_eq!(time_ns(&open(&place, 0, 0), op, 32), 0, "{op:?}: nothing is to be waited for");
    }
}
