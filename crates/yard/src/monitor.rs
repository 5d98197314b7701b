//! What the yard does, for the dashboard: sampled once a second for all clients, kept as a history,
//! and sent as server-sent events.
//!
//! The yard is sampled while clients have a stream or the history is on, and at no other time. A
//! client costs the sampling nothing: each event is made once, and put into the queue of each
//! client. The queue of a client that does not read is full at some time. Then events are lost for
//! this client; before the next one it gets an event `gap` with their number.
#![allow(clippy::disallowed_types)] // Control plane: no I/O passes here.

pub mod history;
mod zone_watch;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use blockyard_core::Disk;
use blockyard_sync::atomics::{AtomicU64, Ordering};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::MissedTickBehavior;

use crate::activity::{Activity, Sample};
use crate::api::{self, Control};
use crate::entry::DeviceEntry;
use crate::interval::Interval;
use crate::process::ProcessView;
use crate::scheduler::SchedulerView;
use crate::view::{NbdMemoryView, StatsView};
use history::{History, HistoryListView, HistoryView, MINUTES, Peaks, Point, Resolution, SECONDS};
use zone_watch::{ZoneChange, ZoneState, ZoneWatch};

/// The time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// The most streams at once.
pub(crate) const STREAMS_MAX: usize = 64;

/// The most streams of the web listener: the others are left to clients of the control socket.
pub(crate) const WEB_STREAMS_MAX: usize = 48;

/// The number of events that wait for a client; further ones are lost for this client.
const QUEUE_EVENTS: usize = 8;

/// How much less than the time of day the clock of samples may show, in ms.
const CLOCK_DRIFT_MS: u64 = 2000;

/// The most connections in an event: those with the most requests.
const CLIENTS_SHOWN: usize = 100;

/// A part of a response with events.
pub(crate) type EventPart = io::Result<Bytes>;

/// The bytes of an event.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(data).expect("an event is plain data");
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// Why a stream is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are {max} streams already, which is the limit: try again")]
pub(crate) struct TooManyStreams {
    max: usize,
}

/// An event with zones for one client, which is dropped when it is sent.
struct ZonesPart {
    event: Bytes,
    _is_waiting: Arc<()>,
}

impl AsRef<[u8]> for ZonesPart {
    fn as_ref(&self) -> &[u8] {
        &self.event
    }
}

/// A client of the stream.
#[derive(Debug)]
struct StreamClient {
    sender: Sender<EventPart>,
    is_web: bool,
    /// The device whose zones the client watches.
    zones: Option<String>,
    /// Whether the client does not know the zones as they were read last.
    needs_zones: bool,
    /// Alive while zones wait to be sent to the client.
    waiting_zones: Weak<()>,
    /// Events that were lost since the last one in the queue.
    lost: u64,
}

impl StreamClient {
    /// Puts an event into the queue; `false` if it is lost.
    fn send(&mut self, event: &Bytes) -> bool {
        // A gap is sent with an event, so that a slow client gets more than gaps.
        let gap = (self.lost > 0).then(|| self::event("gap", &json!({ "lost": self.lost })));
        let parts = gap.into_iter().chain([event.clone()]);
        let Ok(places) = self.sender.try_reserve_many(parts.size_hint().0) else {
            self.lost += 1;
            return false;
        };
        places.zip(parts).for_each(|(place, part)| place.send(Ok(part)));
        self.lost = 0;
        true
    }

    /// Whether zones wait to be sent to the client.
    fn has_waiting(&self) -> bool {
        self.waiting_zones.strong_count() > 0
    }

    /// Puts zones into the queue; `false` if they are lost. Zones may take 16 MiB: no others are
    /// put there until the connection has taken them.
    fn send_zones(&mut self, event: &Bytes) -> bool {
        if self.has_waiting() {
            self.lost += 1;
            return false;
        }
        let is_waiting = Arc::new(());
        self.waiting_zones = Arc::downgrade(&is_waiting);
        let zones = ZonesPart { event: event.clone(), _is_waiting: is_waiting };
        self.send(&Bytes::from_owner(zones))
    }
}

#[derive(Debug, Default)]
struct MonitorState {
    clients: Vec<StreamClient>,
    /// The last sample, as an event.
    latest: Option<Bytes>,
    history: History,
    keeps_history: bool,
    /// The devices whose zones clients watch.
    watches: BTreeMap<String, ZoneWatch>,
}

impl MonitorState {
    /// Sends the sample to all clients.
    fn publish(&mut self, sample: Bytes) {
        self.clients.retain(|client| !client.sender.is_closed());
        for client in &mut self.clients {
            client.send(&sample);
        }
        self.latest = Some(sample);
    }

    /// The clients that watch the zones of a device.
    fn watchers<'m>(&'m mut self, device: &'m str) -> impl Iterator<Item = &'m mut StreamClient> {
        self.clients.iter_mut().filter(move |client| client.zones.as_deref() == Some(device))
    }

    /// Sends what has changed in the zones of a device to the clients that know them as they were.
    fn publish_change(&mut self, device: &str, change: &ZoneChange) {
        for client in self.watchers(device) {
            match change {
                ZoneChange::Some(event) if !client.needs_zones => {
                    client.needs_zones = !client.send_zones(event);
                }
                ZoneChange::Nothing | ZoneChange::Some(_) => {}
                ZoneChange::All => client.needs_zones = true,
            }
        }
    }

    /// Sends all zones of a device to the clients that do not know what they were before.
    fn publish_all(&mut self, device: &str, event: &Bytes) {
        for client in self.watchers(device).filter(|client| client.needs_zones) {
            client.needs_zones = !client.send_zones(event);
        }
    }

    /// Sends all zones of a device to the clients that need them, or returns the zones of which the
    /// event for that has to be made first, for [`MonitorState::end_all`].
    fn begin_all(&mut self, device: &str) -> Option<Arc<ZoneState>> {
        // A client to which zones wait to be sent takes no others.
        let takes_all = |client: &mut StreamClient| client.needs_zones && !client.has_waiting();
        if !self.watchers(device).any(takes_all) {
            return None;
        }
        let watch = self.watches.get_mut(device)?;
        match watch.all() {
            None => watch.begin_all(),
            Some(event) => {
                self.publish_all(device, &event);
                None
            }
        }
    }

    /// Sends all zones of a device, unless they have changed while the event was made.
    fn end_all(&mut self, device: &str, zones: &Arc<ZoneState>, event: &Bytes) {
        let watch = self.watches.get_mut(device);
        if watch.is_some_and(|watch| watch.end_all(zones, event)) {
            self.publish_all(device, event);
        }
    }

    /// The devices whose zones are to be read now. Forgets those that no client watches.
    fn begin_reports(&mut self, now: Instant) -> Vec<String> {
        let is_watched = |device: &String| {
            self.clients.iter().any(|client| client.zones.as_ref() == Some(device))
        };
        self.watches.retain(|device, watch| is_watched(device) || !watch.may_be_forgotten(now));
        let wanted = self.watches.iter_mut().filter_map(|(device, watch)| {
            (is_watched(device) && watch.begin(now)).then(|| device.clone())
        });
        wanted.collect()
    }
}

/// The clock of samples. It never goes back. It counts by the steady clock of the system, and jumps
/// ahead to the time of day after a suspend, or when the time of day was set.
#[derive(Debug)]
struct SampleClock {
    start: Instant,
    /// What is added to the time since the start.
    offset_ms: AtomicU64,
}

impl Default for SampleClock {
    fn default() -> SampleClock {
        SampleClock { start: Instant::now(), offset_ms: AtomicU64::new(0) }
    }
}

impl SampleClock {
    /// Milliseconds since 1970 UTC.
    fn now_ms(&self) -> u64 {
        let of_day = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.at(self.start.elapsed().as_millis() as u64, of_day.as_millis() as u64)
    }

    fn at(&self, elapsed_ms: u64, of_day_ms: u64) -> u64 {
        // Relaxed: the offset publishes nothing else.
        let offset_ms = self.offset_ms.load(Ordering::Relaxed);
        let now_ms = elapsed_ms + offset_ms;
        if of_day_ms.saturating_sub(now_ms) <= CLOCK_DRIFT_MS {
            return now_ms;
        }
        let offset_ms = of_day_ms - elapsed_ms;
        self.offset_ms.fetch_max(offset_ms, Ordering::Relaxed).max(offset_ms) + elapsed_ms
    }
}

/// The clients of the stream, and the history.
#[derive(Debug, Default)]
pub struct Monitor {
    state: Mutex<MonitorState>,
    clock: SampleClock,
    /// Wakes the sampling when there is a client, or the history is on.
    wake: Notify,
}

impl Monitor {
    fn state(&self) -> MutexGuard<'_, MonitorState> {
        // Every change is complete before it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Samples the yard from now on even without clients, and keeps the history of devices.
    pub(crate) fn keep_history(&self) {
        self.state().keeps_history = true;
        self.wake.notify_one();
    }

    /// Adds a client. `zones` is the device whose zones it watches: it gets those that are known by
    /// [`Monitor::send_all_zones`], and the others with the next report.
    ///
    /// # Errors
    /// If there are too many.
    pub(crate) fn subscribe(
        &self,
        zones: Option<String>,
        is_web: bool,
    ) -> Result<Receiver<EventPart>, TooManyStreams> {
        let mut state = self.state();
        state.clients.retain(|client| !client.sender.is_closed());
        let web_clients = state.clients.iter().filter(|client| client.is_web).count();
        if state.clients.len() >= STREAMS_MAX {
            return Err(TooManyStreams { max: STREAMS_MAX });
        }
        if is_web && web_clients >= WEB_STREAMS_MAX {
            return Err(TooManyStreams { max: WEB_STREAMS_MAX });
        }
        let (sender, receiver) = channel(QUEUE_EVENTS);
        let waiting_zones = Weak::new();
        let mut client =
            StreamClient { sender, is_web, zones, needs_zones: true, waiting_zones, lost: 0 };
        // The client need not wait for the next sample.
        if let Some(latest) = &state.latest {
            client.send(latest);
        }
        if let Some(device) = client.zones.clone() {
            state.watches.entry(device).or_default();
        }
        state.clients.push(client);
        drop(state);
        self.wake.notify_one();
        Ok(receiver)
    }

    /// Sends all zones of a device, as they were read last, to the clients that need them. This
    /// takes long for a device with many zones; other threads use the monitor meanwhile.
    pub(crate) fn send_all_zones(&self, device: &str) {
        // Again if a report, of which there is one a second, came while the event was made.
        loop {
            let zones = self.state().begin_all(device);
            let Some(zones) = zones else { return };
            let event = zone_watch::all_zones(device, &zones);
            self.state().end_all(device, &zones, &event);
        }
    }

    /// Ends a report of zones that took this long, `None` if the device gave none: sends what has
    /// changed to clients.
    fn end_report(&self, device: &str, read: Option<ZoneState>, took: Duration) {
        let before = self.state().watches.get(device).and_then(ZoneWatch::state);
        let change = read.as_ref().map_or(ZoneChange::Nothing, |read| {
            zone_watch::compare(device, before.as_deref(), read)
        });
        let changed = read.filter(|_| change != ZoneChange::Nothing);
        let mut state = self.state();
        let Some(watch) = state.watches.get_mut(device) else { return };
        watch.end(changed, took, Instant::now());
        state.publish_change(device, &change);
        drop(state);
        self.send_all_zones(device);
    }

    /// The devices that have a history.
    pub fn history_overview(&self) -> HistoryListView {
        self.state().history.overview()
    }

    /// The history of a device.
    pub fn history(&self, device: &str, resolution: Resolution) -> HistoryView {
        self.state().history.of(device, resolution)
    }

    /// The peaks of the last minute, by device: empty unless the history is on.
    pub(crate) fn peaks(&self) -> BTreeMap<String, Peaks> {
        let now_ms = self.clock.now_ms();
        self.state().history.peaks(now_ms)
    }

    /// Sends a text as a sample.
    #[cfg(test)]
    pub(crate) fn publish_for_test(&self, text: &str) {
        self.state().publish(event("sample", &text));
    }

    fn is_wanted(&self) -> bool {
        let mut state = self.state();
        state.clients.retain(|client| !client.sender.is_closed());
        state.keeps_history || !state.clients.is_empty()
    }

    /// Waits until the yard is to be sampled.
    async fn wanted(&self) {
        while !self.is_wanted() {
            // A sample of long ago is no state that a new client could use.
            self.state().latest = None;
            self.wake.notified().await;
        }
    }

    /// Adds what devices did until now to the history.
    fn record(&self, resolution: Resolution, now_ms: u64, devices: &[Interval]) {
        let points: Vec<_> =
            devices.iter().map(|it| (it.device.as_str(), Point::new(it))).collect();
        self.state().history.record(resolution, now_ms, points.into_iter());
    }
}

/// Samples the yard while it is to be sampled; never ends.
pub(crate) async fn run(control: Arc<Control>) {
    loop {
        control.monitor.wanted().await;
        let mut sampler = Sampler::default();
        let mut tick = tokio::time::interval(SAMPLE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        while control.monitor.is_wanted() {
            tick.tick().await;
            let sampled = Arc::clone(&control);
            // This waits for threads that dispatch, as metrics do.
            let work = tokio::task::spawn_blocking(move || {
                sampler.sample(&sampled);
                sampler
            });
            // After a panic, which was reported, the next sample is a first one.
            sampler = work.await.unwrap_or_default();
            report_zones(&control);
        }
    }
}

/// Reads the zones that are watched, each device on a thread of its own.
fn report_zones(control: &Arc<Control>) {
    let wanted = control.monitor.state().begin_reports(Instant::now());
    for device in wanted {
        let control = Arc::clone(control);
        tokio::task::spawn_blocking(move || {
            let start = Instant::now();
            // The device alone: a device that a request has cannot be replaced.
            let disk = control.devices.find(&device).ok().map(|entry| entry.disk);
            let read = disk.and_then(|disk: Arc<dyn Disk>| {
                let read = zone_watch::read(disk.as_ref());
                let failed = |error| tracing::debug!(device, "cannot report zones: {error}");
                read.map_err(failed).ok()
            });
            control.monitor.end_report(&device, read, start.elapsed());
        });
    }
}

/// The facts of a device that are not in its statistics.
#[derive(Debug)]
struct DeviceFacts {
    kind: String,
    size_bytes: u64,
    read_only: bool,
    zone_count: u32,
    open_max: u32,
    active_max: u32,
    scheduler: SchedulerView,
}

impl DeviceFacts {
    fn new(entry: &DeviceEntry) -> DeviceFacts {
        let disk = entry.disk.as_ref();
        let geometry = disk.geometry();
        let zones = geometry.zones.as_ref();
        DeviceFacts {
            kind: disk.kind().to_owned(),
            size_bytes: geometry.len_bytes(),
            read_only: disk.limits().read_only,
            zone_count: zones.map_or(0, |zones| zones.zone_count),
            open_max: zones.map_or(0, |zones| zones.open_max),
            active_max: zones.map_or(0, |zones| zones.active_max),
            scheduler: SchedulerView::new(disk),
        }
    }

    /// Adds the facts to the JSON of what the device did.
    fn add_to(&self, json: &mut Value, interval: &Interval) {
        json["kind"] = json!(self.kind);
        json["size_bytes"] = json!(self.size_bytes);
        json["read_only"] = json!(self.read_only);
        json["zone_count"] = json!(self.zone_count);
        json["open_max"] = json!(self.open_max);
        json["active_max"] = json!(self.active_max);
        json["scheduler"] = json!(self.scheduler.scheduler);
        json["scheduler_counts"] = json!(self.scheduler.counts);
        json["latency"] = json!(history::heat_rows(interval));
    }
}

/// The samples with which the next one is compared.
#[derive(Debug, Default)]
struct Sampler {
    second: Option<Sample>,
    minute: Option<(u64, Vec<StatsView>)>,
}

impl Sampler {
    /// Samples the yard. The first sample is only what the next one is compared with.
    fn sample(&mut self, control: &Control) {
        let (monitor, devices) = (&control.monitor, control.devices.list());
        let stats = devices.iter().map(StatsView::new).collect();
        let facts: Vec<DeviceFacts> = devices.iter().map(DeviceFacts::new).collect();
        // Before anything that takes long: a device that a request has cannot be replaced.
        drop(devices);
        let now_ms = monitor.clock.now_ms();
        let sample = Sample {
            process: ProcessView::new(),
            stats,
            zones: Vec::new(),
            pools: control.devices.pool_views(),
            connections: api::connections_with_latency(control),
        };
        if let Some(before) = &self.second {
            let activity = Activity::new(before, &sample);
            monitor.record(SECONDS, now_ms, &activity.devices);
            let json = sample_json(now_ms, activity, &facts, api::memory_use(control).into());
            let event = event("sample", &json);
            monitor.state().publish(event);
        }
        match &self.minute {
            Some((then_ms, before)) if now_ms.saturating_sub(*then_ms) >= MINUTES.step_ms => {
                let devices = Interval::of_all(before, &sample.stats);
                monitor.record(MINUTES, now_ms, &devices);
                self.minute = Some((now_ms, sample.stats.clone()));
            }
            Some(_) => {}
            None => self.minute = Some((now_ms, sample.stats.clone())),
        }
        self.second = Some(sample);
    }
}

/// A sample in JSON: what `top --json` prints, without the zones, and more of each device.
fn sample_json(
    now_ms: u64,
    mut activity: Activity,
    facts: &[DeviceFacts],
    memory: NbdMemoryView,
) -> Value {
    let clients_count = activity.connections.len();
    activity.connections.sort_by_key(|it| {
        let before = it.before.as_ref().map_or(0, |before| before.requests);
        std::cmp::Reverse(it.now.requests.saturating_sub(before))
    });
    activity.connections.truncate(CLIENTS_SHOWN);
    let mut json = activity.to_json();
    let rows = json["devices"].as_array_mut().into_iter().flatten();
    for ((row, interval), facts) in rows.zip(&activity.devices).zip(facts) {
        facts.add_to(row, interval);
    }
    let pools = json["pools"].as_array_mut().into_iter().flatten();
    for (row, pool) in pools.zip(&activity.pools) {
        row["segment_bytes"] = json!(pool.now.segment_bytes);
        row["segments"] = json!(pool.now.segments);
        row["segments_free"] = json!(pool.now.segments_free);
        row["segments_by_live"] = json!(pool.now.segments_by_live);
    }
    json["time_ms"] = json!(now_ms);
    json["clients_count"] = json!(clients_count);
    json["nbd_memory"] = json!(memory);
    if let Some(object) = json.as_object_mut() {
        // Zones have an event of their own.
        object.remove("zones");
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(receiver: &mut Receiver<EventPart>) -> Vec<String> {
        let next = || receiver.try_recv().ok();
        let parts: Vec<Bytes> = std::iter::from_fn(next).map(Result::unwrap).collect();
        let text = String::from_utf8(parts.concat()).unwrap();
        text.split_inclusive("\n\n").map(str::to_owned).collect()
    }

    fn data(event: &str) -> Value {
        serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap()
    }

    fn publish(monitor: &Monitor, number: u64) {
        monitor.state().publish(event("sample", &number));
    }

    #[test]
    fn the_clock_of_samples_jumps_ahead_but_never_back() {
        let clock = SampleClock::default();
        assert_eq!(clock.at(0, 1_000_000), 1_000_000);
        assert_eq!(clock.at(1000, 1_001_500), 1_001_000, "two clocks may differ a little");
        assert_eq!(clock.at(2000, 5_000_000), 5_000_000, "after a suspend");
        assert_eq!(clock.at(3000, 4_000_000), 5_001_000, "after the time of day was set back");
    }

    #[test]
    fn a_client_that_does_not_read_loses_events_and_delays_no_other() {
        let monitor = Monitor::default();
        let mut reads = monitor.subscribe(None, false).unwrap();
        let mut stalls = monitor.subscribe(None, true).unwrap();
        for number in 0..20 {
            publish(&monitor, number);
            assert_eq!(received(&mut reads), [format!("event: sample\ndata: {number}\n\n")]);
        }
        let kept = received(&mut stalls);
        assert_eq!(kept.len(), QUEUE_EVENTS);
        assert!(kept[7].ends_with("data: 7\n\n"), "{kept:?}");
        publish(&monitor, 20);
        let next = received(&mut stalls);
        assert_eq!(next, ["event: gap\ndata: {\"lost\":12}\n\n", "event: sample\ndata: 20\n\n"]);
    }

    #[test]
    fn streams_are_bounded_and_the_control_socket_has_some_left() {
        let monitor = Monitor::default();
        let mut clients = Vec::new();
        for _ in 0..WEB_STREAMS_MAX {
            clients.push(monitor.subscribe(None, true).unwrap());
        }
        let refused = monitor.subscribe(None, true).unwrap_err();
        assert_eq!(refused, TooManyStreams { max: WEB_STREAMS_MAX });
        for _ in WEB_STREAMS_MAX..STREAMS_MAX {
            clients.push(monitor.subscribe(None, false).unwrap());
        }
        let refused = monitor.subscribe(None, false).unwrap_err();
        assert_eq!(refused, TooManyStreams { max: STREAMS_MAX });
        // A client that has gone leaves its place.
        clients.remove(0);
        assert!(monitor.subscribe(None, true).is_ok());
    }

    #[test]
    fn the_yard_is_sampled_for_clients_or_for_the_history_only() {
        let monitor = Monitor::default();
        assert!(!monitor.is_wanted());
        let client = monitor.subscribe(None, false).unwrap();
        assert!(monitor.is_wanted());
        drop(client);
        assert!(!monitor.is_wanted());
        monitor.keep_history();
        assert!(monitor.is_wanted());
    }

    fn control() -> Control {
        let control = Control::default();
        for uri in ["null:///a?size=1M&scheduler=mq-deadline", "ram:///r?size=1M"] {
            control.devices.add(crate::uri::parse(uri).unwrap()).unwrap();
        }
        control
    }

    #[test]
    fn a_sample_has_what_happened_since_the_one_before() {
        let (control, mut sampler) = (control(), Sampler::default());
        let mut client = control.monitor.subscribe(None, false).unwrap();
        sampler.sample(&control);
        assert!(received(&mut client).is_empty());
        let disk = control.devices.find("a").unwrap().disk;
        let mut io = blockyard_core::blocking::Io::new(disk.open().unwrap(), 4096);
        for _ in 0..5 {
            io.read(blockyard_core::Sector(0), &mut [0; 4096]).unwrap();
        }
        sampler.sample(&control);
        let events = received(&mut client);
        let sample = data(&events[0]);
        let (a, r) = (&sample["devices"][0], &sample["devices"][1]);
        let seconds = a["reads_per_second"].as_f64().unwrap();
        assert!(seconds > 0.0);
        let latency: u64 = a["latency"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
        assert_eq!(latency, 5);
        assert_eq!((&a["device"], &a["kind"]), (&json!("a"), &json!("null")));
        assert_eq!(a["scheduler"], "mq-deadline");
        assert_eq!(a["scheduler_counts"][0]["class"], "rt");
        assert_eq!(r["ram"]["mm_stat"]["orig_data_size"], 0);
        assert!(sample["time_ms"].as_u64().unwrap() > 1_600_000_000_000);
        assert!(sample.get("zones").is_none());
        let view = control.monitor.history("a", SECONDS);
        assert_eq!(view.times_ms.len(), 1);
        assert!((f64::from(view.reads_per_second[0]) / seconds - 1.0).abs() < 1e-6);
        assert_eq!(view.latency[0].iter().sum::<u64>(), 5);
        // A client that comes later has the sample at once.
        let mut late = control.monitor.subscribe(None, false).unwrap();
        assert_eq!(received(&mut late), events);
    }

    #[test]
    fn a_client_that_lost_events_gets_all_zones_again() {
        let control = control();
        let uri = "null:///z?size=64M&zoned=1&zone_size=4M";
        let disk = control.devices.add(crate::uri::parse(uri).unwrap()).unwrap().disk;
        let monitor = &control.monitor;
        let mut client = monitor.subscribe(Some("z".to_owned()), true).unwrap();
        let report = || {
            let read = zone_watch::read(disk.as_ref()).unwrap();
            monitor.end_report("z", Some(read), Duration::ZERO);
        };
        let mut io = blockyard_core::blocking::Io::new(disk.open().unwrap(), 4096);
        let mut write = |zone: u64| {
            let sector = blockyard_core::Sector(zone * 8192);
            io.write(sector, &[1; 4096], blockyard_core::Flags::NONE).unwrap();
        };
        report();
        assert_eq!(data(&received(&mut client)[0])["full"], true);
        write(3);
        report();
        let changed = data(&received(&mut client)[0]);
        assert_eq!((&changed["full"], &changed["runs"]), (&json!(false), &json!([[3, 1, 2, 1]])));
        (0..10).for_each(|number| publish(monitor, number));
        write(4);
        report();
        received(&mut client);
        report();
        // The event before was lost, and nothing has changed since.
        let again = received(&mut client);
        assert!(again[0].starts_with("event: gap\n"), "{again:?}");
        assert_eq!(data(&again[1])["full"], true, "{again:?}");
        // A client that comes later has them at once.
        let mut late = monitor.subscribe(Some("z".to_owned()), true).unwrap();
        monitor.send_all_zones("z");
        assert_eq!(data(&received(&mut late)[1])["full"], true);
        assert!(received(&mut client).is_empty(), "the first client has them already");
        // One that comes while a thread makes the event with all zones gets those that have changed
        // since, once.
        write(5);
        report();
        received(&mut client);
        let mut first = monitor.subscribe(Some("z".to_owned()), true).unwrap();
        let zones = monitor.state().begin_all("z").unwrap();
        let mut second = monitor.subscribe(Some("z".to_owned()), true).unwrap();
        monitor.send_all_zones("z");
        write(6);
        report();
        let event = zone_watch::all_zones("z", &zones);
        monitor.state().end_all("z", &zones, &event);
        monitor.send_all_zones("z");
        for late in [&mut first, &mut second] {
            let events = received(late);
            assert_eq!(events.len(), 2, "{events:?}");
            assert!(events[1].contains("[[0,3,1,0],[3,4,2,1],"), "{events:?}");
        }
        // While zones wait, no others do: each event may take 16 MiB.
        received(&mut client);
        for zone in 7..10 {
            write(zone);
            report();
        }
        let events = received(&mut client);
        let zones = events.iter().filter(|event| event.starts_with("event: zones\n")).count();
        assert_eq!(zones, 1, "{events:?}");
        report();
        let again = received(&mut client);
        assert_eq!(data(again.last().unwrap())["full"], true, "{again:?}");
    }

    #[test]
    fn zones_are_read_only_while_a_client_watches_them() {
        let monitor = Monitor::default();
        let now = Instant::now();
        let client = monitor.subscribe(Some("z".to_owned()), true).unwrap();
        assert_eq!(monitor.state().begin_reports(now), ["z"]);
        assert!(monitor.state().begin_reports(now).is_empty());
        monitor.state().watches.get_mut("z").unwrap().end(None, Duration::ZERO, now);
        drop(client);
        assert!(!monitor.is_wanted());
        // A client that comes and goes makes no more reports than one that stays.
        let client = monitor.subscribe(Some("z".to_owned()), true).unwrap();
        assert!(monitor.state().begin_reports(now).is_empty());
        drop(client);
        let later = now + Duration::from_secs(2);
        assert!(!monitor.is_wanted());
        assert!(monitor.state().begin_reports(later).is_empty());
        assert!(monitor.state().watches.is_empty());
    }
}
