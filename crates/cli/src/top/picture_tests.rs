//! The pictures of `top` and `iostat` in docs/top.md: each page as it is drawn for a yard with
//! fixed data.

use std::time::Duration;

use blockyard_testing::terminal_picture::{TerminalSpan, check, svg};
use blockyard_yard::activity::{Activity, Sample};
use blockyard_yard::interval::Interval;
use blockyard_yard::process::ProcessView;
use blockyard_yard::ram::{MmStatView, RamView};
use blockyard_yard::table::Table;
use blockyard_yard::view::{ConnectionView, LatencyView, OpView, StatsView};
use blockyard_yard::volumes::{CopyView, PoolView};
use blockyard_yard::zone_counts::ZoneCountsView;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use ratatui::style::{Color, Modifier};

use super::screen::Screen;
use crate::iostat;

const SECOND_NS: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Operations of one kind in the last second.
struct FixtureLoad {
    ops: u64,
    bytes: u64,
    merges: u64,
    /// Latencies and their numbers.
    latency: Vec<(u64, u64)>,
}

impl FixtureLoad {
    /// Operations of one size. Of a hundred, 97 take the first latency and 3 the second.
    fn new(ops: u64, bytes_each: u64, usual_ns: u64, slow_ns: u64) -> FixtureLoad {
        let slow = ops * 3 / 100;
        let latency = vec![(usual_ns, ops - slow), (slow_ns, slow)];
        FixtureLoad { ops, bytes: ops * bytes_each, merges: 0, latency }
    }

    /// With this many operations that became part of another request.
    fn merged(self, merges: u64) -> FixtureLoad {
        FixtureLoad { merges, ..self }
    }
}

/// The statistics of a device after an hour, and after the second in which it had a load.
fn device(name: &str, reads: FixtureLoad, writes: FixtureLoad) -> [StatsView; 2] {
    let idle = StatsView {
        device: name.to_owned(),
        age_ns: 3600 * SECOND_NS,
        channels: 2,
        ops: [].into(),
        read_latency: Vec::new(),
        write_latency: Vec::new(),
        flush_latency: Vec::new(),
        discard_latency: Vec::new(),
        zone_latency: Vec::new(),
        ram: None,
        pool: None,
        hosts: Vec::new(),
    };
    let op = |load: &FixtureLoad| OpView {
        ops: load.ops,
        bytes: load.bytes,
        errors: 0,
        merges: load.merges,
    };
    let busy = StatsView {
        age_ns: 3601 * SECOND_NS,
        ops: [("read".to_owned(), op(&reads)), ("write".to_owned(), op(&writes))].into(),
        read_latency: reads.latency,
        write_latency: writes.latency,
        ..idle.clone()
    };
    [idle, busy]
}

/// The pool of the volume after an hour, and after the second in which it was written.
fn pool() -> [PoolView; 2] {
    let copy = |path: &str| CopyView { path: path.to_owned(), good: true, ..CopyView::default() };
    let idle = PoolView {
        path: "/srv/pool".to_owned(),
        volumes: 7,
        segment_bytes: 8 * MIB,
        segments: 25_600,
        used_bytes: 61 * GIB,
        available_bytes: 139 * GIB,
        copies: vec![copy("/srv/pool"), copy("/mnt/pool")],
        ..PoolView::default()
    };
    let busy = PoolView {
        data_bytes: 88 * MIB,
        log_bytes: 91 * MIB,
        page_bytes: 13 * MIB,
        moved_bytes: 11 * MIB,
        syncs: 412,
        segments_cleaned: 3,
        cleaning_waits: 2,
        ..idle.clone()
    };
    [idle, busy]
}

/// The latency of requests, of which one in fifty takes 16 times as long as the others.
fn latency_of(requests: u64) -> LatencyView {
    let floor_ns = 1 << (30 - requests.ilog2());
    vec![(floor_ns, requests - requests / 50), (floor_ns << 4, requests / 50)]
}

fn connection(protocol: &str, device: &str, peer: &str, load: [u64; 3]) -> ConnectionView {
    let [requests, read_bytes, written_bytes] = load;
    ConnectionView {
        protocol: protocol.to_owned(),
        peer: peer.to_owned(),
        device: Some(device.to_owned()),
        requests,
        read_bytes,
        written_bytes,
        read_latency: latency_of(requests),
        ..ConnectionView::default()
    }
}

fn connections() -> Vec<ConnectionView> {
    let host = "nqn.2026-01.org.example:host-7";
    let nvme = |queue, load| ConnectionView {
        id: u64::from(queue),
        queue: Some(queue),
        host: Some(host.to_owned()),
        ..connection("nvme", "zoned0", &format!("192.168.7.21:{}", 53120 + queue), load)
    };
    vec![
        nvme(1, [6_310, 0, 395 * MIB]),
        nvme(2, [6_190, 0, 387 * MIB]),
        connection("nbd", "mem0", "unix:/run/blockyard/nbd.sock", [41_200, 161 * MIB, 0]),
        connection("vhost", "vol0", "process 2817", [5_700, 4 * MIB, 88 * MIB]),
    ]
}

/// The zones of the zoned device.
fn zone_counts() -> ZoneCountsView {
    ZoneCountsView {
        device: "zoned0".to_owned(),
        zones: [
            ("not-wp", 4),
            ("empty", 777),
            ("implicit-open", 14),
            ("closed", 8),
            ("full", 1_095),
            ("read-only", 1),
            ("offline", 1),
        ]
        .map(|(condition, count)| (condition.to_owned(), count))
        .into(),
    }
}

/// A yard with four devices, idle for an hour, and a second later.
fn samples() -> [Sample; 2] {
    let none = || FixtureLoad { ops: 0, bytes: 0, merges: 0, latency: Vec::new() };
    let mut ram = device(
        "ram0",
        FixtureLoad::new(8_200, 4096, 2_560, 10_240),
        FixtureLoad::new(2_100, 4096, 5_632, 40_960),
    );
    let memory = MmStatView {
        orig_data_size: 3 * GIB,
        compr_data_size: 1004 * MIB,
        mem_used_total: 1044 * MIB,
        mem_limit: 2 * GIB,
        same_pages: 18_112,
        huge_pages: 941,
        ..MmStatView::default()
    };
    ram[1].ram = Some(RamView { mm_stat: memory, ..RamView::default() });
    let [mem0, ram0, mut vol0, mut zoned0] = [
        device("mem0", FixtureLoad::new(41_200, 4096, 1_536, 6_144), none()),
        ram,
        device(
            "vol0",
            FixtureLoad::new(1_100, 4096, 94_208, 524_288),
            FixtureLoad::new(4_600, 20_480, 229_376, 2_097_152).merged(310),
        ),
        device(
            "zoned0",
            none(),
            FixtureLoad::new(12_500, 65_536, 131_072, 1_048_576).merged(2_140),
        ),
    ];
    let op = |ops, bytes, merges| OpView { ops, bytes, errors: 0, merges };
    vol0[1].ops.insert("flush".to_owned(), op(412, 0, 0));
    vol0[1].flush_latency = vec![(1_048_576, 412)];
    vol0[1].ops.insert("discard".to_owned(), op(96, 6 * MIB, 24));
    vol0[1].discard_latency = vec![(73_728, 96)];
    zoned0[1].ops.insert("zone_reset".to_owned(), op(3, 0, 0));
    zoned0[1].zone_latency = vec![(2_097_152, 3)];
    let [pool_before, pool_now] = pool();
    let before = Sample {
        process: ProcessView { pid: 4711, ..ProcessView::default() },
        stats: [&mem0, &ram0, &vol0, &zoned0].map(|it| it[0].clone()).into(),
        zones: Vec::new(),
        pools: vec![pool_before],
        connections: Vec::new(),
    };
    let now = Sample {
        process: ProcessView {
            pid: 4711,
            sampled_ns: SECOND_NS,
            cpu_ns: SECOND_NS * 137 / 100,
            resident_bytes: 214 * MIB,
        },
        stats: [mem0, ram0, vol0, zoned0].map(|[_, now]| now).into(),
        zones: vec![zone_counts()],
        pools: vec![pool_now],
        connections: connections(),
    };
    [before, now]
}

/// The lines of a buffer.
fn spans(buffer: &Buffer) -> Vec<Vec<TerminalSpan>> {
    let line = |y| {
        let mut spans: Vec<TerminalSpan> = Vec::new();
        for x in 0..buffer.area.width {
            let cell = &buffer[(x, y)];
            let next = TerminalSpan {
                text: cell.symbol().to_owned(),
                is_bold: cell.modifier.contains(Modifier::BOLD),
                is_reversed: cell.modifier.contains(Modifier::REVERSED),
                is_red: cell.fg == Color::Red,
            };
            match spans.last_mut() {
                Some(last)
                    if (TerminalSpan { text: next.text.clone(), ..last.clone() }) == next =>
                {
                    last.text += &next.text;
                }
                _ => spans.push(next),
            }
        }
        spans
    };
    (0..buffer.area.height).map(line).collect()
}

#[test]
fn pictures_of_top_are_what_it_draws() {
    let [before, now] = samples();
    let mut screen = Screen::new(Activity::new(&before, &now), Duration::from_secs(1));
    let pages = ["devices", "zones", "ram", "pools", "clients"];
    for (key, page) in ('1'..).zip(pages) {
        assert!(screen.press(KeyEvent::from(KeyCode::Char(key))));
        if page == "devices" {
            // Sorted by reads.
            (0..2).for_each(|_| assert!(screen.press(KeyEvent::from(KeyCode::Char('>')))));
        }
        let mut terminal = Terminal::new(TestBackend::new(124, 10)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let lines = spans(terminal.backend().buffer());
        check(&format!("top-{page}.svg"), &svg(&format!("blockyard top: {page}"), &lines));
    }
}

#[test]
fn pictures_of_iostat_are_what_it_prints() {
    let [before, now] = samples();
    let devices = Interval::of_all(&before.stats, &now.stats);
    let printed = |table: Table| {
        let mut out = Vec::new();
        table.print(&[], &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    for (name, command, has_latency) in
        [("iostat", "iostat -y 1 1", false), ("iostat-latency", "iostat -l -y 1 1", true)]
    {
        let text = printed(iostat::table(has_latency, &devices));
        let prompt = [format!("$ blockyard {command}")];
        let lines = prompt.iter().map(String::as_str).chain(text.lines());
        let lines: Vec<_> = lines.map(|line| vec![TerminalSpan::plain(line)]).collect();
        check(&format!("{name}.svg"), &svg(&format!("blockyard {command}"), &lines));
    }
}
