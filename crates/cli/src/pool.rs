//! `pool`: the state and the activity of pools, with the columns of `zpool list`, `zpool status`
//! and `zpool iostat`.

pub(crate) mod copies;
pub(crate) mod cost;
mod preflight;

use std::io::Write;
use std::path::PathBuf;

use blockyard_core::channel::percentile_ns;
use blockyard_yard::activity::PoolActivity;
use blockyard_yard::client::Client;
use blockyard_yard::error::counted;
use blockyard_yard::interval::{Interval, mean_ns};
use blockyard_yard::scrubs::ScrubStateView;
use blockyard_yard::table::duration;
use blockyard_yard::view::{StatsView, sparse};
use blockyard_yard::volumes::{LastScrubView, PoolView, ResyncView, UploadView};
use serde_json::{Value, json};

use cost::{cost, forecast};

use crate::args::{
    PoolCommand, PoolIostatArgs, PoolListArgs, PoolStatusArgs, PoolsArgs, VolumePoolArgs,
};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::{Columns, bar, date, percent, rounded, terminal_width};
use crate::iostat::{ReportPlan, pause};
use crate::top::short;
use crate::volume::pool::ReadOnlyAccess;
use crate::volume::{activity, shown};

/// The columns of `pool list` that a terminal that is too narrow does not show, the first first.
const LIST_OPTIONAL: [&str; 3] = ["VOLUMES", "WAMP", "FRAG"];

pub(crate) fn run(command: &PoolCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        PoolCommand::List(args) => list(args, out),
        PoolCommand::Status(args) => status(args, out),
        PoolCommand::Iostat(args) => iostat(args, out),
        PoolCommand::Attach(args) => copies::attach(args, out),
        PoolCommand::Detach(args) => copies::detach(args, out),
        PoolCommand::Replace(args) => copies::replace(args, out),
        PoolCommand::Resync(args) => copies::resync(args, out),
        PoolCommand::Preflight(args) => preflight::run(args, out),
    }
}

/// A pool, and whether a yard has it open.
struct ShownPool {
    view: PoolView,
    is_open: bool,
}

impl ShownPool {
    /// The state in a word, as zpool has it.
    fn health(&self) -> &'static str {
        if self.view.failed_read_only {
            "READONLY"
        } else if self.view.copies.iter().any(|copy| !copy.good) {
            "DEGRADED"
        } else if self.is_open {
            "ONLINE"
        } else {
            "OFFLINE"
        }
    }

    /// Bytes that are written per byte that a client has written; `None` without any.
    fn write_amplification(&self) -> Option<f64> {
        let given = self.view.data_bytes;
        (given > 0).then(|| self.view.written_bytes() as f64 / given as f64)
    }

    fn capacity(&self) -> u64 {
        self.view.used_bytes.saturating_add(self.view.available_bytes)
    }

    /// The share of the segments in use that is garbage, in percent.
    fn fragmentation(&self) -> u64 {
        percent(self.view.garbage_bytes(), self.view.in_use_bytes())
    }

    fn json(&self) -> Value {
        let mut json = serde_json::to_value(&self.view).unwrap_or_default();
        json["health"] = self.health().to_lowercase().into();
        json["fragmentation_percent"] = self.fragmentation().into();
        json["write_amplification"] = self.write_amplification().into();
        json
    }
}

/// The pools that are named, or all that the yard has open.
fn find(args: &PoolsArgs) -> Result<Vec<ShownPool>, Failure> {
    let PoolsArgs { pools, degraded, talk } = args;
    if pools.is_empty() {
        let open = client(talk).pools()?.into_iter();
        return Ok(open.map(|view| ShownPool { view, is_open: true }).collect());
    }
    let named = |pool: &PathBuf| {
        let (pool, degraded, talk) = (pool.clone(), *degraded, talk.clone());
        let args = VolumePoolArgs { pool, degraded, take_over: false, talk };
        let access = ReadOnlyAccess::find(&args)?;
        let is_open = matches!(access, ReadOnlyAccess::There(..));
        Ok(ShownPool { view: access.view()?, is_open })
    };
    pools.iter().map(named).collect()
}

fn list(args: &PoolListArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pools = find(&args.pools)?;
    if args.pools.talk.json {
        return print_json(&pools.iter().map(ShownPool::json).collect::<Vec<_>>(), out);
    }
    let size = |bytes: u64| if args.script.parsable { bytes.to_string() } else { rounded(bytes) };
    let share =
        |share: u64| if args.script.parsable { share.to_string() } else { format!("{share}%") };
    let row = |it: &ShownPool| {
        vec![
            it.view.path.clone(),
            size(it.capacity()),
            size(it.view.used_bytes),
            size(it.view.available_bytes),
            share(it.fragmentation()),
            share(percent(it.view.used_bytes, it.capacity())),
            it.write_amplification().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            it.view.volumes.to_string(),
            it.health().to_owned(),
        ]
    };
    let headings =
        vec!["NAME", "SIZE", "ALLOC", "FREE", "FRAG", "CAP", "WAMP", "VOLUMES", "HEALTH"];
    let rows = pools.iter().map(row).collect();
    let table = Columns { headings, texts: &["HEALTH"], rows };
    match args.script.scripted {
        true => Ok(table.print_bare(out)?),
        false => Ok(table.print(&LIST_OPTIONAL, terminal_width(), out)?),
    }
}

fn status(args: &PoolStatusArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pools = find(&args.pools)?;
    if args.pools.talk.json {
        return print_json(&pools.iter().map(ShownPool::json).collect::<Vec<_>>(), out);
    }
    for (at, pool) in pools.iter().enumerate() {
        if at > 0 {
            writeln!(out)?;
        }
        print_status(pool, args.verbose, out)?;
    }
    Ok(())
}

fn print_status(pool: &ShownPool, verbose: bool, out: &mut impl Write) -> Result<(), Failure> {
    let view = &pool.view;
    writeln!(out, "  pool: {}", view.path)?;
    writeln!(out, " state: {}", pool.health())?;
    if let Some((status, action)) = trouble(pool) {
        writeln!(out, "status: {status}")?;
        writeln!(out, "action: {action}")?;
    }
    if let Some(scrub) = &view.scrub {
        writeln!(out, "  scan: {}", unfinished(scrub))?;
    }
    if let Some(resync) = &view.resync {
        writeln!(out, "  scan: {}", resyncing(resync))?;
    }
    writeln!(out, "  scan: {}", view.last_scrub.as_ref().map_or("none".to_owned(), scan))?;
    let (used, capacity) = (view.used_bytes, pool.capacity());
    let (fill, garbage) = (percent(used, capacity), view.garbage_bytes());
    writeln!(out, "  fill: {fill}%, {} of {}", rounded(used), rounded(capacity))?;
    let (share, segments) = (pool.fragmentation(), rounded(view.in_use_bytes()));
    writeln!(out, "  frag: {share}%, {} of garbage in {segments} of segments", rounded(garbage))?;
    if let Some(ratio) = pool.write_amplification() {
        let (written, given) = (rounded(view.written_bytes()), rounded(view.data_bytes));
        writeln!(out, "  wamp: {ratio:.2}, {written} written for {given} since it was opened")?;
    }
    writeln!(out, "repair: {} blocks and pages in total", view.repaired)?;
    if let Some(upload) = &view.upload {
        writeln!(out, "upload: {}", uploading(upload))?;
        writeln!(out, "  cost: {}", cost(&upload.requests, view.used_bytes))?;
        if let Some(line) = forecast(view) {
            writeln!(out, "  forecast: {line}")?;
        }
        if upload.lost_files > 0 {
            writeln!(
                out,
                "  lost: {} with {} of writes that this machine acknowledged by its local log, and \
                 did not upload before another one took the pool over",
                counted(upload.lost_files, "file"),
                rounded(upload.lost_bytes)
            )?;
        }
        if let Some(since) = upload.missing_since {
            writeln!(
                out,
                "  lost: writes after {} UTC may be missing: the machine that had the pool \
                 acknowledged them by its local log",
                date(since)
            )?;
        }
    }
    writeln!(out, "copies: {}", view.copies.len().max(1))?;
    for copy in &view.copies {
        writeln!(out, "        {}", shown(copy))?;
    }
    if !verbose {
        return Ok(());
    }
    writeln!(out, "\nsegments by the share of live blocks:")?;
    let most = view.segments_by_live.iter().copied().max().unwrap_or(0);
    for (tenth, count) in view.segments_by_live.iter().enumerate() {
        let line = format!("  {:>3}%  {count:>8}  {}", tenth * 10, bar(*count, most));
        writeln!(out, "{}", line.trim_end())?;
    }
    if pool.is_open {
        writeln!(out, "\nsince it was opened:")?;
        for (name, value) in activity(view) {
            writeln!(out, "  {name:<12} {value}")?;
        }
    }
    Ok(())
}

/// What is wrong with a pool, and what to do.
fn trouble(pool: &ShownPool) -> Option<(&'static str, &'static str)> {
    let scrub = pool.view.last_scrub.as_ref();
    match pool.health() {
        "READONLY" => Some((
            "A write or a sync has failed; nothing is written until the pool is opened again.",
            "Look for the cause in the log of the yard, then restart the yard.",
        )),
        "DEGRADED" => Some((
            "A copy is not good; the pool goes on with the other one.",
            "Wait for a resync, restart the yard to resync a copy that is back, or replace a copy \
             by `pool replace`.",
        )),
        _ if scrub.is_some_and(|scrub| scrub.damaged > 0) => Some((
            "The last scrub has found damage that it could not repair.",
            "Run `volume scrub`, which names the blocks, and restore these from a backup.",
        )),
        _ => None,
    }
}

/// A scrub that has begun and not ended, in a line.
fn unfinished(scrub: &ScrubStateView) -> String {
    let ScrubStateView { running, paused, verified_bytes, total_bytes } = *scrub;
    let verified = rounded(verified_bytes);
    match (running, paused) {
        (true, _) => {
            let (share, total) = (percent(verified_bytes, total_bytes), rounded(total_bytes));
            format!("scrub in progress, {verified} of {total} verified, {share}% done")
        }
        (false, true) => format!("scrub paused, {verified} verified"),
        (false, false) => format!("scrub stopped, {verified} verified"),
    }
}

/// A resync that is to be done, in a line.
fn resyncing(resync: &ResyncView) -> String {
    let ResyncView { path, done_bytes, total_bytes, rate_bytes, paused, left_s, .. } = resync;
    let (done, total) = (rounded(*done_bytes), rounded(*total_bytes));
    let mut share = percent(*done_bytes, *total_bytes);
    let mut verified = String::new();
    if let (Some(bytes), Some(all)) = (resync.verified_bytes, resync.to_verify_bytes) {
        share = percent(bytes, all);
        verified = format!(", {} of {} verified", rounded(bytes), rounded(all));
    }
    let how = match (&resync.error, paused, left_s) {
        (Some(error), ..) => format!("tried again each minute: {error}"),
        (None, true, _) => "paused".to_owned(),
        (None, false, None) => "no estimate of the end".to_owned(),
        (None, false, Some(seconds)) => {
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            let left = format!("{hours:02}:{minutes:02}:{:02}", seconds % 60);
            format!("{}/s, {left} to go", rounded(*rate_bytes))
        }
    };
    format!("resync of {path}: {done} of {total} equal{verified}, {share}% done, {how}")
}

/// How syncs are acknowledged, and what the object store lacks, in a line.
fn uploading(upload: &UploadView) -> String {
    let held = if upload.held { "; all requests wait for a renewal of the lease" } else { "" };
    if upload.ack != "local" {
        return format!("ack=object{held}");
    }
    let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
    let waiting = if upload.waiting { "; writes wait" } else { "" };
    let log = match upload.log_failed {
        true => "; the local log cannot be written, and each sync waits for the object store",
        false => "",
    };
    format!(
        "ack=local, the object store lacks {} of at most {}, the oldest for {} of at most {}{}{}{}",
        rounded(upload.lag_bytes),
        rounded(upload.max_lag_bytes),
        seconds(upload.lag_ms),
        seconds(upload.max_lag_ms),
        waiting,
        held,
        log
    )
}

/// The last scrub in a line, as zpool has it.
fn scan(scrub: &LastScrubView) -> String {
    let LastScrubView { ended, duration_ms, verified_bytes, damaged, repaired } = *scrub;
    let (bytes, date) = (rounded(verified_bytes), date(ended));
    let seconds = duration_ms.div_ceil(1000);
    let took = format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("scrub of {bytes} in {took}, {repaired} repaired, {damaged} damaged, on {date} UTC")
}

/// A sample of what the pools do.
struct PoolSample {
    stats: Vec<StatsView>,
    pools: Vec<PoolView>,
}

fn sample(client: &Client, pools: &[String]) -> Result<PoolSample, Failure> {
    let mut views = client.pools()?;
    for pool in pools {
        let path = std::fs::canonicalize(pool).unwrap_or_else(|_| pool.into());
        if !views.iter().any(|view| is_at(view, pool, &path)) {
            let known: Vec<&str> = views.iter().map(|view| view.path.as_str()).collect();
            let known = known.join(", ");
            let text =
                format!("invalid POOL `{pool}`: expected one that the yard has open: {known}");
            return Err(Failure::new(Code::NoSuchDevice, text));
        }
    }
    views.retain(|view| {
        let is_named = |pool: &String| {
            let path = std::fs::canonicalize(pool).unwrap_or_else(|_| pool.into());
            is_at(view, pool, &path)
        };
        pools.is_empty() || pools.iter().any(is_named)
    });
    Ok(PoolSample { stats: client.stats()?, pools: views })
}

fn is_at(view: &PoolView, name: &str, path: &std::path::Path) -> bool {
    view.path == name || view.is_at(path)
}

/// What a pool did in an interval, through all of its volumes that are devices.
struct PoolRow {
    activity: PoolActivity,
    intervals: Vec<Interval>,
    seconds: f64,
}

impl PoolRow {
    fn rate(&self, of: impl Fn(&Interval) -> u64) -> f64 {
        self.intervals.iter().map(|it| it.rate(of(it))).sum()
    }

    fn latency(&self, of: impl Fn(&Interval) -> &Vec<u64>) -> Vec<u64> {
        let mut sum: Vec<u64> = Vec::new();
        for counts in self.intervals.iter().map(of) {
            sum.resize(sum.len().max(counts.len()), 0);
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// Reads and writes together.
    fn both(&self) -> Vec<u64> {
        let (reads, writes) =
            (self.latency(|it| &it.read_latency), self.latency(|it| &it.write_latency));
        let len = reads.len().max(writes.len());
        let at = |counts: &[u64], bucket: usize| counts.get(bucket).copied().unwrap_or(0);
        (0..len).map(|bucket| at(&reads, bucket) + at(&writes, bucket)).collect()
    }

    fn in_flight(&self) -> f64 {
        self.intervals.iter().map(Interval::queue_size).sum()
    }

    fn json(&self) -> Value {
        let (reads, writes) =
            (self.latency(|it| &it.read_latency), self.latency(|it| &it.write_latency));
        json!({
            "pool": self.activity.now.path,
            "used_bytes": self.activity.now.used_bytes,
            "available_bytes": self.activity.now.available_bytes,
            "reads_per_second": self.rate(|it| it.reads.ops),
            "writes_per_second": self.rate(|it| it.writes.ops),
            "read_bytes_per_second": self.rate(|it| it.reads.bytes),
            "written_bytes_per_second": self.rate(|it| it.writes.bytes),
            "disk_written_bytes_per_second":
                self.activity.rate(self.seconds, PoolView::written_bytes),
            "write_amplification": self.activity.write_amplification(),
            "read_mean_ns": mean_ns(&reads),
            "write_mean_ns": mean_ns(&writes),
            "p50_ns": percentile_ns(&self.both(), 500),
            "p99_ns": percentile_ns(&self.both(), 990),
            "in_flight": self.in_flight(),
            "syncs_per_second": self.activity.rate(self.seconds, |it| it.syncs),
            "cleaning_waits_per_second": self.activity.rate(self.seconds, |it| it.cleaning_waits),
            "read_latency": sparse(&reads),
            "write_latency": sparse(&writes),
        })
    }
}

/// Compares two samples; without one before, everything since the devices and pools were opened.
fn rows(before: Option<&PoolSample>, now: PoolSample) -> (Vec<PoolRow>, PoolSample) {
    let none = Vec::new();
    let intervals = Interval::of_all(before.map_or(&none, |it| &it.stats), &now.stats);
    let row = |view: &PoolView| {
        let is_of = |(_, stats): &(&Interval, &StatsView)| {
            stats.pool.as_deref() == Some(view.path.as_str())
        };
        let of = intervals.iter().zip(&now.stats).filter(is_of).map(|(it, _)| it.clone());
        let of: Vec<Interval> = of.collect();
        let seconds = of.iter().map(|it| it.seconds).fold(0.0, f64::max).max(1e-9);
        let old = before.and_then(|it| it.pools.iter().find(|old| old.path == view.path));
        // Without a sample before, the counters themselves are since the opening.
        let zero = || PoolView { path: view.path.clone(), ..PoolView::default() };
        let old = old.cloned().or_else(|| before.is_none().then(zero));
        let activity = PoolActivity { now: view.clone(), before: old };
        PoolRow { activity, intervals: of, seconds }
    };
    (now.pools.iter().map(row).collect(), now)
}

fn iostat(args: &PoolIostatArgs, out: &mut impl Write) -> Result<(), Failure> {
    let plan = ReportPlan::new(&args.words)?;
    if args.no_first && plan.interval.is_none() {
        let message = "-y leaves out the only report: give an INTERVAL";
        return Err(Failure::new(Code::Usage, message));
    }
    let client = client(&args.talk);
    let (mut before, mut left) = (None, plan.count);
    if args.no_first {
        before = Some(sample(&client, &plan.devices)?);
        pause(&plan);
    }
    loop {
        let (rows, now) = rows(before.as_ref(), sample(&client, &plan.devices)?);
        print_rows(args, &rows, out)?;
        out.flush()?;
        left = left.map(|left| left - 1);
        if left == Some(0) {
            return Ok(());
        }
        before = Some(now);
        pause(&plan);
        if !args.talk.json && !args.script.scripted {
            writeln!(out)?;
        }
    }
}

fn print_rows(
    args: &PoolIostatArgs,
    rows: &[PoolRow],
    out: &mut impl Write,
) -> Result<(), Failure> {
    if args.talk.json {
        // A line each time, so that a reader knows where one ends.
        let line: Value = rows.iter().map(PoolRow::json).collect();
        return Ok(writeln!(out, "{line}")?);
    }
    let mut headings =
        vec!["pool", "alloc", "free", "read/s", "write/s", "read_bw", "write_bw", "disk_bw"];
    if args.latency {
        headings.extend(["read_wait", "write_wait", "p50", "p99"]);
    }
    if args.queues {
        headings.extend(["in_flight", "syncs/s", "clean_waits/s"]);
    }
    let is_exact = args.script.parsable;
    let time = |ns: Option<u64>| match ns {
        None => "-".to_owned(),
        Some(ns) if is_exact => ns.to_string(),
        Some(ns) => duration(ns),
    };
    let size = |bytes: u64| if is_exact { bytes.to_string() } else { rounded(bytes) };
    let rate = |rate: f64| if is_exact { format!("{rate:.3}") } else { short(rate) };
    let row = |it: &PoolRow| {
        let now = &it.activity.now;
        let bytes = |rate: f64| size(rate as u64);
        let mut cells = vec![
            now.path.clone(),
            size(now.used_bytes),
            size(now.available_bytes),
            rate(it.rate(|it| it.reads.ops)),
            rate(it.rate(|it| it.writes.ops)),
            bytes(it.rate(|it| it.reads.bytes)),
            bytes(it.rate(|it| it.writes.bytes)),
            bytes(it.activity.rate(it.seconds, PoolView::written_bytes)),
        ];
        if args.latency {
            cells.extend([
                time(mean_ns(&it.latency(|it| &it.read_latency))),
                time(mean_ns(&it.latency(|it| &it.write_latency))),
                time(percentile_ns(&it.both(), 500)),
                time(percentile_ns(&it.both(), 990)),
            ]);
        }
        if args.queues {
            cells.extend([
                format!("{:.2}", it.in_flight()),
                rate(it.activity.rate(it.seconds, |it| it.syncs)),
                rate(it.activity.rate(it.seconds, |it| it.cleaning_waits)),
            ]);
        }
        cells
    };
    let table = Columns { headings, texts: &[], rows: rows.iter().map(row).collect() };
    match args.script.scripted {
        true => table.print_bare(out)?,
        false => table.print_wrapped(out)?,
    }
    if args.histograms {
        rows.iter().try_for_each(|row| print_histogram(row, out))?;
    }
    Ok(())
}

/// Prints the latency of reads and of writes in powers of two.
fn print_histogram(row: &PoolRow, out: &mut impl Write) -> Result<(), Failure> {
    let of = |counts: Vec<u64>| {
        let mut powers = [0; u64::BITS as usize];
        for (floor_ns, count) in sparse(&counts) {
            powers[floor_ns.checked_ilog2().unwrap_or(0) as usize] += count;
        }
        powers
    };
    let reads = of(row.latency(|it| &it.read_latency));
    let writes = of(row.latency(|it| &it.write_latency));
    let sums: Vec<u64> = reads.iter().zip(&writes).map(|(read, write)| read + write).collect();
    writeln!(out, "\n{}:", row.activity.now.path)?;
    let (Some(first), Some(last)) =
        (sums.iter().position(|sum| *sum > 0), sums.iter().rposition(|sum| *sum > 0))
    else {
        return Ok(writeln!(out, "  no reads or writes")?);
    };
    let most = sums.iter().copied().max().unwrap_or(0);
    writeln!(out, "{:>10} {:>10} {:>10}", "latency", "reads", "writes")?;
    for power in first..=last {
        let (label, bar) = (duration(1 << power), bar(sums[power], most));
        let (read, write) = (reads[power], writes[power]);
        writeln!(out, "{label:>10} {read:>10} {write:>10}  {bar}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::human::WIDTH;
    use crate::top::fixture::stats;
    use blockyard_yard::volumes::CopyView;
    use clap::Parser as _;

    fn pool() -> ShownPool {
        let view = PoolView {
            path: "/srv/pool".to_owned(),
            segment_bytes: 16 << 20,
            segments: 16,
            segments_free: 8,
            used_bytes: 30 << 20,
            available_bytes: 70 << 20,
            live_bytes: 16 << 20,
            data_bytes: 10 << 20,
            log_bytes: 14 << 20,
            page_bytes: 1 << 20,
            volumes: 3,
            ..PoolView::default()
        };
        ShownPool { view, is_open: true }
    }

    #[test]
    fn a_pool_has_fill_garbage_and_write_amplification() {
        let mut pool = pool();
        // Of eight segments in use four may be being written, and one is full of live data.
        assert_eq!((pool.health(), pool.fragmentation()), ("ONLINE", 37));
        let empty = PoolView { segments: 2, segments_free: 1, ..pool.view.clone() };
        assert_eq!(empty.garbage_bytes(), 0);
        assert_eq!(pool.write_amplification(), Some(1.5));
        pool.is_open = false;
        assert_eq!(pool.health(), "OFFLINE");
        pool.view.copies = vec![CopyView { good: false, ..CopyView::default() }];
        assert_eq!(pool.health(), "DEGRADED");
        assert!(trouble(&pool).unwrap().0.contains("A copy is not good"));
        pool.view.failed_read_only = true;
        assert_eq!(pool.health(), "READONLY");
    }

    #[test]
    fn a_lag_is_a_line() {
        let object = UploadView { ack: "object".to_owned(), ..UploadView::default() };
        assert_eq!(uploading(&object), "ack=object");
        let local = UploadView {
            ack: "local".to_owned(),
            lag_bytes: 3 << 20,
            lag_ms: 1250,
            max_lag_bytes: 64 << 20,
            max_lag_ms: 30_000,
            waiting: true,
            ..UploadView::default()
        };
        let line = "ack=local, the object store lacks 3M of at most 64M, the oldest for 1.2 s of \
                    at most 30.0 s; writes wait";
        assert_eq!(uploading(&local), line);
        let failed = UploadView { waiting: false, log_failed: true, ..local };
        let line = uploading(&failed);
        assert!(
            line.ends_with(
                "of at most 30.0 s; the local log cannot be written, and each sync \
                                waits for the object store"
            ),
            "{line}"
        );
    }

    #[test]
    fn a_scrub_is_a_line() {
        let state = |running, paused| ScrubStateView {
            running,
            paused,
            verified_bytes: 3 << 30,
            total_bytes: 4 << 30,
        };
        for (state, line) in [
            (state(true, false), "scrub in progress, 3G of 4G verified, 75% done"),
            (state(false, true), "scrub paused, 3G verified"),
            (state(false, false), "scrub stopped, 3G verified"),
        ] {
            assert_eq!(unfinished(&state), line);
        }
        let scrub = LastScrubView {
            ended: 1_796_055_600,
            duration_ms: 3_723_001,
            verified_bytes: 66 << 30 | 700 << 20,
            damaged: 2,
            repaired: 1,
        };
        let line = "scrub of 66.7G in 01:02:04, 1 repaired, 2 damaged, on 2026-11-30 16:20 UTC";
        assert_eq!(scan(&scrub), line);
        let pool =
            ShownPool { view: PoolView { last_scrub: Some(scrub), ..pool().view }, ..pool() };
        assert!(trouble(&pool).unwrap().0.contains("has found damage"));
    }

    #[test]
    fn rates_of_a_pool_are_those_of_its_devices() {
        let volume = |name: &str, reads| StatsView {
            device: name.to_owned(),
            pool: Some("/srv/pool".to_owned()),
            ..stats(10, reads)
        };
        let stats = vec![volume("a", 100), volume("b", 50), stats(10, 7)];
        let sample = PoolSample { stats, pools: vec![pool().view] };
        let (rows, _) = rows(None, sample);
        let [row] = &rows[..] else { panic!("{} rows", rows.len()) };
        assert_eq!(row.intervals.len(), 2);
        let each = row.intervals.iter().map(|it| it.rate(it.reads.ops)).sum::<f64>();
        assert_eq!(row.rate(|it| it.reads.ops), each);
        assert_eq!(row.activity.grown(|it| it.data_bytes), 10 << 20);
        let printed = |options: &str| {
            let line = ["blockyard", "pool", "iostat", options];
            let parsed = Cli::try_parse_from(line).map(|cli| cli.command);
            let Ok(Command::Pool(PoolCommand::Iostat(args))) = parsed else {
                panic!("{options} is not understood")
            };
            let mut out = Vec::new();
            print_rows(&args, &rows, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = printed("-lqw");
        assert!(text.contains("reads") && text.contains('#'), "{text}");
        assert!(text.contains("disk_bw") && text.contains("clean_waits/s"), "{text}");
        let width = terminal_width().unwrap_or(WIDTH);
        assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
        let scripted = printed("-Hplq");
        assert_eq!(scripted.lines().count(), 1, "{scripted}");
        assert_eq!(scripted.split('\t').nth(1), Some("31457280"), "{scripted}");
        let histograms = Cli::try_parse_from(["blockyard", "pool", "iostat", "-Hw"]);
        assert!(histograms.is_err(), "a line has no histogram");
    }
}
