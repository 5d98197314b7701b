//! A volume that is opened with limits keeps them. The time is a clock by hand, which goes on when
//! nothing else can: what it shows in the end is what the limits cost, whatever the machine does.
#![allow(clippy::unwrap_used)] // A test may.

mod place;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Clock;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Bio, BufRef, Device, Due, Op, Region, Sector};
use blockyard_sim::clock::ManualClock;
use blockyard_volume::{Options, Volume, VolumeConfig};

use place::Place;

/// Bytes of a request.
const LEN: u64 = 64 << 10;

/// From one request to the next on the volume, in bytes: no two are neighbours, which become one.
const STRIDE: u64 = 4 * LEN;

const SECOND_NS: u64 = 1_000_000_000;

/// How often is looked whether the committer is done with something, and what is between two
/// looks: together two minutes. A busy machine is no fault.
const LOOKS_MAX: usize = 120_000;
const PAUSE: Duration = Duration::from_millis(1);

fn open(place: &Place, iops: u64, bandwidth: u64) -> Arc<Volume> {
    let path = place.path().join("pool");
    let config = VolumeConfig { size: 256 << 20, iops, bandwidth, ..VolumeConfig::new(path, "v0") };
    // Short segments are soon made.
    let options = Options { segment_bytes: 4 << 20, ..Options::default() };
    Volume::open_with(config, options).unwrap()
}

/// What so many requests by each of two channels take, in nanoseconds of a clock by hand.
fn time_ns(volume: &Arc<Volume>, op: Op, each: u64) -> u64 {
    let clock = ManualClock::new();
    let mut channels = [0, 1].map(|side| {
        let config = ChannelConfig::default();
        let sched = NoneScheduler::new(usize::from(config.depth));
        let (queue, stats) = (volume.open_queue().unwrap(), ChannelStats::new());
        let (geometry, limits) = (volume.geometry(), volume.limits());
        let mut channel = Stack::new(config, geometry, limits, sched, queue, clock.clone(), stats);
        let region = channel.register(Region::alloc(LEN as usize));
        // So that only time is what it knows of when it is to be looked at next.
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
    let place = Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "limits");
    for op in [Op::Read, Op::Write] {
        // 300 of 100 in a second, by two channels together.
        let found = time_ns(&open(&place, 100, 0), op, 150);
        assert!((29 * SECOND_NS / 10..=3 * SECOND_NS).contains(&found), "{op:?}: {found} ns");
        // 4 MiB of 1 MiB in a second; the last request is paid for by whoever comes next.
        let found = time_ns(&open(&place, 0, 1 << 20), op, 32);
        assert!((39 * SECOND_NS / 10..=4 * SECOND_NS).contains(&found), "{op:?}: {found} ns");
        assert_eq!(time_ns(&open(&place, 0, 0), op, 32), 0, "{op:?}: nothing is to be waited for");
    }
}
