//! A yard for tests of samples, and of what is shown of them.
//!
//! Test code, shared by crates through `#[path]`.

use std::collections::BTreeMap;

use blockyard_yard::activity::Sample;
use blockyard_yard::process::ProcessView;
use blockyard_yard::view::{ConnectionView, OpView, StatsView};
use blockyard_yard::volumes::PoolView;
use blockyard_yard::zone_counts::ZoneCountsView;

/// A device with this many reads of 1 MiB and 1 us, one in ten of which failed.
pub(crate) fn stats(age_s: u64, reads: u64) -> StatsView {
    let op = OpView { ops: reads, bytes: reads << 20, errors: reads / 10, merges: 0 };
    StatsView {
        device: "d".to_owned(),
        age_ns: age_s * 1_000_000_000,
        channels: 1,
        ops: BTreeMap::from([("read".to_owned(), op)]),
        read_latency: vec![(1024, reads)],
        write_latency: Vec::new(),
        flush_latency: Vec::new(),
        discard_latency: Vec::new(),
        zone_latency: Vec::new(),
        ram: None,
        pool: None,
        hosts: Vec::new(),
    }
}

/// A yard after this many seconds: 100 reads a second of device `d`, which cost it half a
/// processor, and a client with half of them.
pub(crate) fn sample(seconds: u64, pid: u32) -> Sample {
    let process = ProcessView {
        pid,
        sampled_ns: seconds * 1_000_000_000,
        cpu_ns: seconds * 500_000_000,
        resident_bytes: 20 << 20,
    };
    let connection = ConnectionView {
        protocol: "nbd".to_owned(),
        id: 3,
        peer: "unix:/run/nbd.sock".to_owned(),
        device: Some("d".to_owned()),
        requests: 50 * seconds,
        read_bytes: (50 * seconds) << 20,
        read_latency: vec![(1024, 50 * seconds)],
        ..ConnectionView::default()
    };
    let pool = PoolView {
        path: "/srv/pool".to_owned(),
        volumes: 2,
        segment_bytes: 1 << 20,
        segments: 100,
        used_bytes: 25 << 20,
        available_bytes: 75 << 20,
        data_bytes: (10 * seconds) << 20,
        log_bytes: (15 * seconds) << 20,
        moved_bytes: (5 * seconds) << 20,
        segments_cleaned: seconds,
        ..PoolView::default()
    };
    let zones = ZoneCountsView {
        device: "d".to_owned(),
        zones: [("empty".to_owned(), 60), ("full".to_owned(), 4)].into(),
    };
    Sample {
        process,
        stats: vec![stats(seconds, 100 * seconds)],
        zones: vec![zones],
        pools: vec![pool],
        connections: vec![connection],
    }
}
