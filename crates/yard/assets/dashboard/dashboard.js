// The dashboard: takes the stream of samples, and shows the yard and one device of it.
//
// What it did is left in the root element's data: how many samples came, or what went wrong.

import { LineChart } from "./charts.js";
import { HeatMap } from "./heatmap.js";
import { CLIENTS, DEVICES, POOLS, RAM, SCHEDULER, Table, segmentColumns } from "./tables.js";
import { bytes, clock, count, duration } from "./units.js";
import { ZoneMap } from "./zonemap.js";

const MIB = 1024 * 1024;
const MINUTE_MS = 60_000;

// Times that can be shown: how long, and the step of the history that has it.
const RANGES = {
  minutes: { length: 5 * MINUTE_MS, step: 1 },
  hour: { length: 60 * MINUTE_MS, step: 1 },
  week: { length: 7 * 24 * 60 * MINUTE_MS, step: 60 },
};
// The longest of those with a step of a second, for which samples are kept.
const KEPT_MS = RANGES.hour.length;

// How long a notice is shown, in ms.
const NOTICE_MS = 10_000;
// Without a sample for this long, the page says so; after the longer time it connects again, because
// a connection through a host that has slept may be dead and never end.
const SILENT_MS = 5000;
const DEAD_MS = 30_000;
// How long the page does without zones after the daemon has refused a stream with them.
const ZONES_REFUSED_MS = 30_000;

const root = document.documentElement;
const byId = (id) => document.getElementById(id);

const tables = {
  devices: new Table(byId("devices"), DEVICES, (it) => it.device),
  clients: new Table(byId("clients"), CLIENTS, (it) => [it.protocol, it.server, it.id, it.peer, it.device, it.queue].join(" ")),
  scheduler: new Table(byId("scheduler-table"), SCHEDULER, (it) => `${it.class} ${it.direction}`),
  ram: new Table(byId("ram-table"), RAM, (it) => it.device),
  pools: new Table(byId("pools-table"), POOLS, (it) => it.pool),
};

const READ = "--series-0";
const WRITE = "--series-1";
const charts = {
  operations: new LineChart(byId("operations"), [{ label: "r/s", stroke: READ }, { label: "w/s", stroke: WRITE }], count),
  throughput: new LineChart(byId("throughput"), [{ label: "rMB/s", stroke: READ }, { label: "wMB/s", stroke: WRITE }], count),
  latency: new LineChart(byId("latency"), [{ label: "p50", stroke: READ }, { label: "p99", stroke: WRITE }], duration, 1000),
};
const heat = new HeatMap(byId("heat"), byId("heat-axis"), byId("heat-note"));
const zoneMap = new ZoneMap(byId("zone-map"), byId("zones-legend"), byId("zone-note"));

const state = {
  sample: null,
  // The sample before it: the scheduler's counts are those since the device was made.
  before: null,
  device: nameInLocation(),
  range: "minutes",
  isPaused: false,
  // Points of the device: [time in ms, r/s, w/s, rB/s, wB/s, p50, p99, counts by latency].
  points: [],
  floors: [],
  step: 1,
  source: null,
  watched: null,
  // When zones may be asked for again, when the last event came, and when the last sample came that
  // the page did not have, in ms of this computer's clock.
  zonesFromMs: 0,
  heardMs: Date.now(),
  sampledMs: Date.now(),
  // A notice, and until when it is shown.
  notice: null,
  // Whether the points of the device are to be loaded with the next sample.
  needsHistory: true,
  samples: 0,
};

function nameInLocation() {
  try {
    return decodeURIComponent(location.hash.slice(1)) || null;
  } catch {
    return null;
  }
}

const chosen = (sample = state.sample) => sample?.devices.find((it) => it.device === state.device);

// The stream.

function connect() {
  const mayWatch = chosen()?.zone_count > 0 && Date.now() >= state.zonesFromMs;
  const wanted = mayWatch ? state.device : null;
  if (state.source !== null && wanted === state.watched) return;
  state.source?.close();
  state.watched = wanted;
  zoneMap.clear();
  const url = new URL("/v1/stream", location.origin);
  if (wanted !== null) url.searchParams.set("zones", wanted);
  const source = new EventSource(url);
  state.source = source;
  const on = (name, take) => source.addEventListener(name, (event) => {
    if (source !== state.source) return;
    state.heardMs = Date.now();
    guarded(() => take(JSON.parse(event.data)));
  });
  on("sample", takeSample);
  on("zones", takeZones);
  on("gap", takeGap);
  source.addEventListener("error", () => { if (source === state.source) lose(source); });
}

// The browser connects again by itself, unless the daemon has refused the stream.
function lose(source) {
  say("no connection", "lost");
  state.needsHistory = true;
  if (source.readyState === EventSource.CLOSED) {
    state.source = null;
    // A device that has gone, or has no zones any more, is refused each time.
    if (state.watched !== null) state.zonesFromMs = Date.now() + ZONES_REFUSED_MS;
    setTimeout(connect, 2000);
  }
}

// The history has the samples that were lost.
function takeGap({ lost }) {
  state.notice = { text: `${lost} events lost`, untilMs: Date.now() + NOTICE_MS };
  state.needsHistory = true;
}

function checkSilence() {
  if (state.source === null || state.isPaused || state.sample === null) return;
  const isOpen = state.source.readyState === EventSource.OPEN;
  if (isOpen && !isLive()) say(`no data since ${clock(state.sample.time_ms)}`, "lost");
  if (Date.now() - state.heardMs >= DEAD_MS) {
    state.heardMs = Date.now();
    state.needsHistory = true;
    reconnect();
  }
}

const isLive = () => Date.now() - state.sampledMs < SILENT_MS;

function reconnect() {
  state.source?.close();
  state.source = null;
  connect();
}

function say(text, className) {
  const pill = byId("state");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${className}`;
}

function guarded(work) {
  try {
    work();
  } catch (error) {
    root.dataset.error = String(error);
    throw error;
  }
}

function takeSample(sample) {
  state.samples += 1;
  root.dataset.samples = String(state.samples);
  // The last sample comes again with a new stream, also from a daemon that takes no more of them.
  if (sample.time_ms !== state.sample?.time_ms) {
    state.before = state.sample;
    state.sampledMs = Date.now();
  }
  state.sample = sample;
  if (chosen() === undefined) choose(sample.devices[0]?.device ?? null);
  if (state.needsHistory) loadHistory();
  append(sample);
  connect();
  if (!state.isPaused) show();
}

function takeZones(event) {
  if (event.device === state.device && !state.isPaused) zoneMap.apply(event);
}

// The history of the device.

async function loadHistory() {
  const [device, range] = [state.device, state.range];
  state.needsHistory = false;
  if (device === null) return;
  const { step } = RANGES[range];
  const url = new URL("/v1/history", location.origin);
  url.searchParams.set("device", device);
  url.searchParams.set("step", step);
  const answer = await fetch(url).catch(() => null);
  if (device !== state.device || range !== state.range) return;
  if (!answer?.ok) {
    state.needsHistory = true;
    return;
  }
  // The body may break off.
  const history = await answer.json().catch(() => null);
  if (device !== state.device || range !== state.range) return;
  if (history === null) {
    state.needsHistory = true;
    return;
  }
  const points = pointsOf(history);
  const last = points.at(-1)?.[0] ?? 0;
  // Samples that came in the meantime.
  const newer = step === 1 && state.step === 1 ? state.points.filter(([time]) => time > last) : [];
  Object.assign(state, { step, floors: history.latency_floors_ns, points: [...points, ...newer] });
  state.loadedMs = state.sample?.time_ms ?? 0;
  showPoints();
}

function pointsOf(history) {
  return history.times_ms.map((time, at) => [
    time, history.reads_per_second[at], history.writes_per_second[at], history.read_bytes_per_second[at],
    history.written_bytes_per_second[at], history.p50_ns[at], history.p99_ns[at], history.latency[at],
  ]);
}

function append(sample) {
  const device = chosen(sample);
  if (device === undefined) return;
  if (RANGES[state.range].step !== 1) {
    if (sample.time_ms - (state.loadedMs ?? 0) >= MINUTE_MS) loadHistory();
    return;
  }
  // The last sample comes again with a new stream.
  if (sample.time_ms <= (state.points.at(-1)?.[0] ?? 0)) return;
  state.points.push([
    sample.time_ms, device.reads_per_second, device.writes_per_second, device.read_bytes_per_second,
    device.written_bytes_per_second, device.p50_ns, device.p99_ns, device.latency,
  ]);
  const oldest = sample.time_ms - KEPT_MS;
  const first = state.points.findIndex(([time]) => time > oldest);
  if (first > 0) state.points.splice(0, first);
}

// Points with an empty one in each gap, so that no line is drawn through it.
function withGaps(points) {
  const step = state.step * 1000;
  return points.flatMap((point, at) => {
    const before = points[at - 1];
    if (before === undefined || point[0] - before[0] < 2.5 * step) return [point];
    return [[before[0] + step, null, null, null, null, null, null, []], point];
  });
}

// The page.

function show() {
  const { sample } = state;
  const iops = sample.devices.reduce((sum, it) => sum + operations(it), 0);
  byId("summary").textContent = `pid ${sample.process.pid}   ${count(iops)} IOPS   `
    + `CPU ${(100 * sample.process.cpus).toFixed(0)}%   memory ${bytes(sample.process.resident_bytes)}`;
  if (state.notice !== null && Date.now() < state.notice.untilMs) say(state.notice.text, "lost");
  else if (isLive()) say(`live, ${clock(sample.time_ms)}`, "live");
  tables.devices.fill(sample.devices);
  markRows();
  showSection("ram", sample.devices.filter((it) => it.ram), (it) => tables.ram.fill(it));
  showSection("pools", sample.pools, showPools);
  tables.clients.fill(sample.clients);
  const hidden = sample.clients_count - sample.clients.length;
  byId("clients-note").textContent = hidden > 0
    ? `and ${hidden} connections with fewer requests`
    : sample.clients_count === 0 ? "none" : "";
  showDevice();
  root.dataset.time = String(sample.time_ms);
}

const operations = (it) => it.reads_per_second + it.writes_per_second + it.discards_per_second + it.flushes_per_second;

function showSection(id, items, fill) {
  byId(id).hidden = items.length === 0;
  if (items.length > 0) fill(items);
}

function showPools(pools) {
  tables.pools.fill(pools);
  byId("pools-segments").replaceChildren(...pools.map(segmentColumns));
}

function showDevice() {
  const device = chosen();
  byId("device").hidden = device === undefined;
  byId("zones").hidden = !(device?.zone_count > 0);
  byId("scheduler").hidden = !device || device.scheduler === "none";
  if (device === undefined) return;
  byId("device-title").textContent = device.device;
  byId("device-facts").textContent = facts(device);
  const url = new URL("/v1/history", location.origin);
  url.searchParams.set("device", device.device);
  url.searchParams.set("step", RANGES[state.range].step);
  Object.assign(byId("export"), { href: url.href, download: `${device.device}.json` });
  if (device.scheduler !== "none") {
    byId("scheduler-title").textContent = `Scheduler ${device.scheduler}`;
    tables.scheduler.fill(schedulerRows(device));
  }
  showPoints();
}

function facts(device) {
  const parts = [`${device.kind} device of ${bytes(device.size_bytes)}`, `scheduler ${device.scheduler}`];
  if (device.read_only) parts.push("read-only");
  if (device.zone_count > 0) parts.push(`${device.zone_count} zones`);
  if (device.open_max > 0) parts.push(`at most ${device.open_max} open`);
  if (device.active_max > 0) parts.push(`at most ${device.active_max} active`);
  return parts.join(", ");
}

// The scheduler's counts since the sample before, per second. Samples in between may be lost.
function schedulerRows(device) {
  const old = chosen(state.before)?.scheduler_counts ?? [];
  const seconds = (state.sample.time_ms - (state.before?.time_ms ?? 0)) / 1000;
  return device.scheduler_counts.map((now, at) => {
    const rate = (name) => Math.max(0, (now[name] - (old[at]?.[name] ?? now[name])) / seconds);
    return {
      ...now,
      inserted_per_second: rate("inserted"),
      dispatched_per_second: rate("dispatched"),
      merged_per_second: rate("merged"),
      expired_per_second: rate("expired"),
    };
  });
}

function showPoints() {
  if (state.sample === null || state.isPaused) return;
  const greatest = Math.max(state.sample.time_ms, state.points.at(-1)?.[0] ?? 0);
  const least = greatest - RANGES[state.range].length;
  const inside = state.points.filter(([time]) => time > least);
  const points = withGaps(inside);
  const column = (at, divisor = 1) => points.map((point) => (point[at] === null ? null : point[at] / divisor));
  const times = column(0, 1000);
  const draw = (chart, ...values) => chart.show([times, ...values], least / 1000, greatest / 1000);
  draw(charts.operations, column(1), column(2));
  draw(charts.throughput, column(3, MIB), column(4, MIB));
  draw(charts.latency, column(5), column(6));
  const counted = inside.map((point) => [point[0], point[7]]);
  heat.show(counted, state.floors, least, greatest, state.step * 1000);
  root.dataset.points = String(inside.length);
}

// What the reader chooses.

function choose(device) {
  if (device === state.device) return;
  Object.assign(state, { device, points: [] });
  if (device !== null) history.replaceState(null, "", `#${encodeURIComponent(device)}`);
  loadHistory();
}

function chooseAndShow(device) {
  // The samples of a page that is paused are those of the device chosen before.
  if (state.isPaused) pause();
  choose(device);
  connect();
  markRows();
  showDevice();
}

function markRows() {
  for (const [device, row] of tables.devices.rows) {
    const isChosen = device === state.device;
    row.setAttribute("aria-selected", String(isChosen));
    row.tabIndex = isChosen ? 0 : -1;
  }
}

function chooseRange(range) {
  state.range = range;
  for (const button of byId("ranges").children) {
    button.setAttribute("aria-pressed", String(button.dataset.range === range));
  }
  loadHistory();
}

function pause() {
  state.isPaused = !state.isPaused;
  byId("pause").setAttribute("aria-pressed", String(state.isPaused));
  if (state.isPaused) {
    say("paused", "");
    return;
  }
  // Changes of zones were not applied in the meantime.
  reconnect();
  if (state.sample !== null) show();
}

byId("devices").addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-key]");
  if (row !== null) chooseAndShow(row.dataset.key);
});

byId("devices").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const rows = [...tables.devices.body.rows];
  const at = rows.findIndex((row) => row.dataset.key === state.device);
  const next = rows[Math.max(0, Math.min(rows.length - 1, at + step))];
  chooseAndShow(next.dataset.key);
  next.focus();
});

byId("ranges").addEventListener("click", (event) => {
  if (event.target.dataset.range) chooseRange(event.target.dataset.range);
});
byId("pause").addEventListener("click", pause);

const KEYS = {
  1: () => chooseRange("minutes"),
  2: () => chooseRange("hour"),
  3: () => chooseRange("week"),
  p: pause,
  d: () => tables.devices.rows.get(state.device)?.focus(),
  z: () => byId("zone-map").focus(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  KEYS[event.key.toLowerCase()]?.();
});

// Colours are in the canvases: draw them again when the colour scheme changes.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of Object.values(charts)) chart.redraw();
  heat.draw();
  zoneMap.draw();
});
addEventListener("error", (event) => { root.dataset.error = String(event.message); });
addEventListener("unhandledrejection", (event) => { root.dataset.error = String(event.reason); });

setInterval(checkSilence, 1000);

connect();
