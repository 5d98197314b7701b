// Tables that are filled again with each sample. Names of devices and clients come from outside:
// they are set as text, never as markup.

import { bytes, count, duration, mib, percent, ratio } from "./units.js";

// An element with text.
export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A column: heading, what it means, the value of a row, and its text. A name is left-aligned.
const name = (heading, meaning, value) => ({ heading, meaning, value, text: (it) => it ?? "-", isName: true });
const number = (heading, meaning, value, text = count) => ({ heading, meaning, value, text });

export const DEVICES = [
  name("DEVICE", "Name of the device", (it) => it.device),
  number("r/s", "Reads per second", (it) => it.reads_per_second),
  number("w/s", "Writes per second, appends and write-zeroes included", (it) => it.writes_per_second),
  number("rMB/s", "MiB read per second", (it) => it.read_bytes_per_second, mib),
  number("wMB/s", "MiB written per second", (it) => it.written_bytes_per_second, mib),
  number("r_await", "Mean latency of reads", (it) => it.read_await_ns, duration),
  number("w_await", "Mean latency of writes", (it) => it.write_await_ns, duration),
  number("p50", "Median latency of reads and writes", (it) => it.p50_ns, duration),
  number("p99", "99th percentile of the latency", (it) => it.p99_ns, duration),
  number("p99.9", "99.9th percentile of the latency", (it) => it.p999_ns, duration),
  number("aqu-sz", "Mean number of operations in progress", (it) => it.queue_size, ratio),
  number("err/s", "Operations per second that failed", (it) => it.errors_per_second),
];

export const CLIENTS = [
  name("PROTOCOL", "nbd, nvme, vhost or ublk", (it) => it.protocol),
  number("ID", "Number of the connection in its server", (it) => it.id, String),
  name("PEER", "Address of the client", (it) => it.peer),
  name("DEVICE", "Device that the client uses", (it) => it.device),
  name("HOST", "NQN of an NVMe host", (it) => it.host),
  number("CTRL", "Controller of an NVMe host", (it) => it.controller, (it) => it ?? "-"),
  number("QUEUE", "Queue of an NVMe host; 0 is the admin queue", (it) => it.queue, (it) => it ?? "-"),
  number("req/s", "Requests per second", (it) => it.requests_per_second),
  number("rMB/s", "MiB read per second", (it) => it.read_bytes_per_second, mib),
  number("wMB/s", "MiB written per second", (it) => it.written_bytes_per_second, mib),
  number("err/s", "Requests per second that failed", (it) => it.errors_per_second),
];

export const SCHEDULER = [
  name("CLASS", "Class of the requests, as ionice calls it", (it) => it.class),
  name("DIRECTION", "read, or write for all that change the device", (it) => it.direction),
  number("queued", "Requests that wait or are in flight on the device", (it) => it.queued),
  number("ins/s", "Requests inserted per second", (it) => it.inserted_per_second),
  number("disp/s", "Requests dispatched per second", (it) => it.dispatched_per_second),
  number("merged/s", "Requests merged into another one per second", (it) => it.merged_per_second),
  number("expired/s", "Requests dispatched at their deadline or later per second", (it) => it.expired_per_second),
];

const memory = (it) => it.ram.mm_stat;

export const RAM = [
  name("DEVICE", "Name of the device", (it) => it.device),
  number("data", "Stored data, uncompressed", (it) => memory(it).orig_data_size, bytes),
  number("compr", "Stored data, compressed", (it) => memory(it).compr_data_size, bytes),
  number("used", "Memory for stored data", (it) => memory(it).mem_used_total, bytes),
  number("limit", "Limit of that memory", (it) => memory(it).mem_limit, (it) => (it === 0 ? "none" : bytes(it))),
  number("ratio", "Data per memory", (it) => memory(it).orig_data_size / memory(it).mem_used_total, ratio),
  number("same", "Blocks of one repeated word", (it) => memory(it).same_pages),
  number("huge", "Blocks stored uncompressed", (it) => memory(it).huge_pages),
];

const poolState = (it) => {
  if (it.failed_read_only) return "failed";
  return it.copies_bad > 0 ? "degraded" : "good";
};

export const POOLS = [
  name("POOL", "Directory or disk of the pool", (it) => it.pool),
  name("STATE", "good, degraded (a copy is not good) or failed (read-only)", poolState),
  number("used", "Bytes of live blocks and map pages", (it) => it.used_bytes, bytes),
  number("avail", "Bytes that can still be written", (it) => it.available_bytes, bytes),
  number("fill", "Used bytes per used and available bytes", (it) => it, (it) => percent(it.used_bytes, it.used_bytes + it.available_bytes)),
  number("vols", "Volumes and snapshots", (it) => it.volumes),
  number("wMB/s", "MiB per second that the pool was given", (it) => it.data_bytes_per_second, mib),
  number("amp", "Write amplification: bytes written per byte given", (it) => it.write_amplification, ratio),
  number("syncs/s", "Syncs of the log per second", (it) => it.syncs_per_second),
  number("cleaned/s", "Segments that cleaning freed per second", (it) => it.segments_cleaned_per_second),
  number("moved/s", "MiB that cleaning copied per second", (it) => it.moved_bytes_per_second, mib),
  number("waits/s", "Writes per second that waited for space", (it) => it.cleaning_waits_per_second),
];

// A table of rows with a key each.
export class Table {
  constructor(table, columns, key) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    const head = table.createTHead().insertRow();
    for (const column of columns) {
      const cell = element("th", column.heading, column.isName ? "name" : "");
      cell.scope = "col";
      cell.title = column.meaning;
      head.append(cell);
    }
    this.body = table.createTBody();
  }

  // Shows the rows in their order. A row keeps its elements, and with them the focus.
  fill(items) {
    const left = new Set(this.rows.keys());
    items.forEach((item, at) => {
      const key = this.key(item);
      left.delete(key);
      const row = this.rows.get(key) ?? this.insert(key);
      this.columns.forEach((column, index) => show(row.cells[index], column, item));
      if (this.body.rows[at] !== row) this.body.insertBefore(row, this.body.rows[at] ?? null);
    });
    for (const key of left) {
      this.rows.get(key).remove();
      this.rows.delete(key);
    }
  }

  insert(key) {
    const row = this.body.insertRow();
    row.dataset.key = key;
    for (const column of this.columns) row.append(element("td", "", column.isName ? "name" : ""));
    this.rows.set(key, row);
    return row;
  }
}

function show(cell, column, item) {
  const value = column.value(item);
  const text = String(column.text(value));
  if (cell.textContent !== text) cell.textContent = text;
  if (column.isName) cell.title = text;
  else if (typeof value === "number") cell.dataset.value = String(value);
  else delete cell.dataset.value;
  cell.classList.toggle("bad", column.heading === "err/s" && value > 0);
}

// The segments of a pool by live data, a column for each tenth.
export function segmentColumns(pool) {
  const figure = document.createElement("figure");
  const title = `${pool.pool}: ${count(pool.segments)} segments of ${bytes(pool.segment_bytes)}, `
    + `${count(pool.segments_free)} free; segments in use by live data`;
  figure.append(element("figcaption", title));
  const columns = element("div", "", "segments");
  const most = Math.max(1, ...pool.segments_by_live);
  pool.segments_by_live.forEach((segments, tenth) => {
    const column = element("div", "", "column");
    const fill = element("div", "", "fill");
    fill.style.height = `${60 * segments / most}%`;
    column.append(element("span", count(segments)), fill, element("span", `${10 * tenth}%`));
    column.title = `${segments} segments with ${10 * tenth} to ${10 * tenth + 10} % live data`;
    columns.append(column);
  });
  figure.append(columns);
  return figure;
}
