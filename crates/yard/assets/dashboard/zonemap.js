// The zone map: a cell for each zone, coloured by condition, filled up to its write pointer.

import { colour, onWidth } from "./charts.js";
import { channels, mix } from "./heatmap.js";
import { element } from "./tables.js";
import { bytes } from "./units.js";

const SECTOR_BYTES = 512;
const HEIGHT_PX_MAX = 420;
const CELL_PX_MAX = 18;
// From this size on a cell has a border, and its fill is a height; smaller ones are shaded.
const BORDER_PX_MIN = 5;

// Conditions by their number in a ZBC zone descriptor.
const CONDITIONS = new Map([
  [0, "conventional"], [1, "empty"], [2, "implicit-open"], [3, "explicit-open"], [4, "closed"],
  [13, "read-only"], [14, "full"], [15, "offline"],
]);

export class ZoneMap {
  constructor(canvas, legend, note) {
    this.canvas = canvas;
    this.legend = legend;
    this.note = note;
    this.clear();
    canvas.addEventListener("click", (event) => this.click(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    onWidth(canvas.parentElement, () => this.draw());
  }

  // Forgets the zones of a device.
  clear() {
    Object.assign(this, { device: null, conditions: new Uint8Array(0), fills: new Uint8Array(0), chosen: null });
  }

  // Applies an event of the stream.
  apply(event) {
    if (event.full || event.device !== this.device) {
      if (!event.full) return;
      const isSame = event.device === this.device && event.zone_count === this.conditions.length;
      Object.assign(this, {
        device: event.device,
        zoneSectors: event.zone_sectors,
        conditions: new Uint8Array(event.zone_count),
        fills: new Uint8Array(event.zone_count),
        chosen: isSame ? this.chosen : null,
      });
      if (event.too_many) this.note.textContent = "This device has too many zones for a map.";
    }
    let touchesChosen = false;
    for (const [first, length, condition, fill] of event.runs) {
      this.conditions.fill(condition, first, first + length);
      this.fills.fill(fill, first, first + length);
      touchesChosen ||= this.chosen !== null && this.chosen >= first && this.chosen < first + length;
    }
    this.draw();
    if (touchesChosen) this.ask(this.chosen);
  }

  // The layout of the cells in pixels of the screen.
  layout() {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.floor(this.canvas.parentElement.clientWidth * ratio) - Math.ceil(34 * ratio));
    const zones = Math.max(1, this.conditions.length);
    const fitting = Math.floor(Math.sqrt(width * HEIGHT_PX_MAX * ratio / zones));
    const cell = Math.max(1, Math.min(Math.floor(CELL_PX_MAX * ratio), fitting));
    const columns = Math.max(1, Math.floor(width / cell));
    return { ratio, cell, columns, rows: Math.ceil(zones / columns) };
  }

  draw() {
    const { ratio, cell, columns, rows } = this.layout();
    const [width, height] = [columns * cell, rows * cell];
    this.columns = columns;
    Object.assign(this.canvas, { width, height });
    this.canvas.style.width = `${width / ratio}px`;
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = cellColours();
    this.conditions.forEach((condition, zone) => {
      const at = { left: (zone % columns) * cell, top: Math.floor(zone / columns) * cell };
      paint(pixels, width, cell, at, colours(condition, this.fills[zone]), this.fills[zone]);
    });
    const context = this.canvas.getContext("2d");
    context.putImageData(image, 0, 0);
    this.mark(context, cell, columns);
    this.count();
  }

  mark(context, cell, columns) {
    if (this.chosen === null) return;
    const thick = Math.max(2, Math.round(window.devicePixelRatio));
    context.strokeStyle = colour("--ink");
    context.lineWidth = thick;
    const [left, top] = [(this.chosen % columns) * cell, Math.floor(this.chosen / columns) * cell];
    context.strokeRect(left - thick / 2, top - thick / 2, cell + thick, cell + thick);
  }

  // The number of zones of each condition, with its colour.
  count() {
    const counts = new Uint32Array(256);
    this.conditions.forEach((condition) => { counts[condition] += 1; });
    const entries = [];
    for (const [condition, name] of CONDITIONS) {
      if (counts[condition] === 0) continue;
      const swatch = element("span", "", "swatch");
      swatch.style.background = colour(`--zone-${condition}`);
      const entry = element("span");
      entry.dataset.condition = name;
      entry.dataset.count = String(counts[condition]);
      entry.append(swatch, `${counts[condition]} ${name}`);
      entries.push(entry);
    }
    this.legend.replaceChildren(...entries);
  }

  choose(zone) {
    this.chosen = zone;
    this.draw();
    this.ask(zone);
  }

  click(event) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const { cell, columns } = this.layout();
    const x = Math.floor((event.clientX - left) / width * this.canvas.width / cell);
    const y = Math.floor((event.clientY - top) / height * this.canvas.height / cell);
    const zone = y * columns + x;
    if (zone < this.conditions.length) this.choose(zone);
  }

  key(event) {
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      Home: -Infinity, End: Infinity, Enter: 0,
    };
    const step = steps[event.key];
    if (step === undefined || this.conditions.length === 0) return;
    event.preventDefault();
    const next = (this.chosen ?? 0) + (this.chosen === null ? 0 : step);
    this.choose(Math.max(0, Math.min(this.conditions.length - 1, next)));
  }

  // Asks for the numbers of a zone.
  async ask(zone) {
    const from = zone * this.zoneSectors;
    const path = `/v1/devices/${encodeURIComponent(this.device)}/zones?from=${from}`;
    const answer = await fetch(new URL(path, location.origin)).catch(() => null);
    if (this.chosen !== zone) return;
    const found = answer?.ok ? (await answer.json()).zones[0] : undefined;
    this.note.textContent = found ? describe(zone, found) : `zone ${zone}: no answer; try again`;
    this.note.dataset.zone = String(zone);
  }
}

function describe(number, zone) {
  const size = (sectors) => bytes(sectors * SECTOR_BYTES);
  const pointer = zone.wptr === null ? "no write pointer" : `write pointer ${size(zone.wptr)} of ${size(zone.cap)}`;
  return `zone ${number} (${zone.type}): ${zone.cond}, ${pointer}; start 0x${zone.start.toString(16)}, `
    + `length 0x${zone.len.toString(16)}, capacity 0x${zone.cap.toString(16)} sectors`;
}

// The colours of cells in the order of an image's bytes: that of the part up to the write pointer,
// and that of the rest.
function cellColours() {
  const word = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  const empty = channels(colour("--zone-1"));
  const known = new Map();
  return (condition, fill) => {
    const key = condition * 256 + fill;
    if (!known.has(key)) {
      const full = channels(colour(CONDITIONS.has(condition) ? `--zone-${condition}` : "--zone-15"));
      // Zones without a write pointer have their colour as a whole; an open zone is never as pale as
      // an empty one.
      const hasPointer = [1, 2, 3, 4].includes(condition);
      const shade = hasPointer ? mix(empty, full, condition === 1 ? 0 : 0.35 + 0.65 * fill / 255) : full;
      const rest = hasPointer ? mix(empty, full, condition === 1 ? 0 : 0.3) : full;
      known.set(key, { shade: word(shade), full: word(full), rest: word(rest) });
    }
    return known.get(key);
  };
}

// Paints a cell whose upper left corner is `at`.
function paint(pixels, width, cell, at, colours, fill) {
  const size = cell >= BORDER_PX_MIN ? cell - 1 : cell;
  const filled = Math.round(fill / 255 * size);
  for (let y = 0; y < size; y += 1) {
    const row = (at.top + y) * width + at.left;
    const isFull = y >= size - filled;
    const whole = isFull ? colours.full : colours.rest;
    pixels.fill(cell >= BORDER_PX_MIN ? whole : colours.shade, row, row + size);
  }
}
