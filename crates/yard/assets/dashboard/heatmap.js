// A latency heat map: a column for a time, a row for a power of two of the latency, in a stronger
// colour for more operations.

import { colour } from "./charts.js";
import { clock, count, duration } from "./units.js";

const COLUMNS_MAX = 600;

// [red, green, blue] of a colour #rrggbb.
export function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

export const mix = (from, to, part) => from.map((it, at) => it + (to[at] - it) * part);

// The colours of counts, by the logarithm of their share of the greatest one.
function palette() {
  const [low, middle, high] = ["--heat-0", "--heat-1", "--heat-2"].map((it) => channels(colour(it)));
  return (part) => (part < 0.5 ? mix(low, middle, part * 2) : mix(middle, high, part * 2 - 1));
}

export class HeatMap {
  constructor(canvas, axis, note) {
    this.canvas = canvas;
    this.axis = axis;
    this.note = note;
    this.columns = [];
    canvas.addEventListener("pointermove", (event) => this.point(event));
  }

  // Shows the points [time in ms, counts by row] between two times; `floors` is the least latency
  // of each row in ns, `step` the time between two points.
  show(points, floors, least, greatest, step) {
    const width = Math.max(1, Math.min(COLUMNS_MAX, Math.round((greatest - least) / step)));
    const columns = Array.from({ length: width }, () => new Float64Array(floors.length));
    for (const [time, counts] of points) {
      // The middle of the time that the point stands for.
      const middle = time - step / 2 - least;
      const at = Math.min(width - 1, Math.floor(middle / (greatest - least) * width));
      if (at < 0) continue;
      counts.forEach((it, row) => { columns[at][row] += it; });
    }
    Object.assign(this, { columns, floors, least, greatest });
    this.draw();
  }

  draw() {
    const [width, height] = [this.columns.length, this.floors?.length ?? 0];
    if (width === 0 || height === 0) return;
    const most = Math.max(1, ...this.columns.map((column) => Math.max(...column)));
    const colourOf = palette();
    const image = new ImageData(width, height);
    this.columns.forEach((column, x) => column.forEach((it, row) => {
      const part = it === 0 ? 0 : 0.15 + 0.85 * Math.log1p(it) / Math.log1p(most);
      // The least latency is at the bottom.
      const at = ((height - 1 - row) * width + x) * 4;
      image.data.set([...colourOf(part), 255], at);
    }));
    Object.assign(this.canvas, { width, height });
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    this.label(height);
  }

  // Marks 1 us, 1 ms and 1 s, and says the slowest row in words.
  label(height) {
    if (this.axis.childElementCount === 0) {
      for (const row of [1, 6, 11, 16, 21]) {
        const mark = document.createElement("span");
        mark.textContent = duration(this.floors[row]);
        mark.style.top = `${100 * (height - row) / height}%`;
        this.axis.append(mark);
      }
    }
    const slowest = this.floors.findLastIndex((_, row) => this.columns.some((column) => column[row] > 0));
    this.canvas.setAttribute("aria-label", slowest < 0
      ? "Latency heat map: no reads or writes"
      : `Latency heat map: the slowest reads and writes took ${duration(this.floors[slowest])} or more`);
  }

  point(event) {
    if (this.columns.length === 0) return;
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const x = Math.min(this.columns.length - 1, Math.floor((event.clientX - left) / width * this.columns.length));
    const rows = this.floors.length;
    const row = Math.max(0, rows - 1 - Math.floor((event.clientY - top) / height * rows));
    const time = this.least + (x + 0.5) / this.columns.length * (this.greatest - this.least);
    const upTo = row + 1 < rows ? ` to ${duration(this.floors[row + 1])}` : " and more";
    this.note.textContent = `${clock(time)}: ${count(this.columns[x][row])} of ${duration(this.floors[row])}${upTo}`;
  }
}
