// Line charts over time, drawn by uPlot.

import { clock, mark } from "./units.js";

const HEIGHT_PX = 190;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Calls `work` when the width of an element has changed: in the next frame, because what it changes
// may change sizes again.
export function onWidth(element, work) {
  let width = element.clientWidth;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    work();
  })).observe(element);
}

// A chart of lines: [{label, name of the colour}], with values as `text` prints them. Without values
// the axis ends at `top`.
export class LineChart {
  constructor(box, lines, text, top = 1) {
    this.box = box;
    this.lines = lines;
    this.text = text;
    this.top = top;
    this.plot = null;
    onWidth(box, () => this.resize());
  }

  // Shows values at times in seconds: [times, values of the first line, ..], from `least` to
  // `greatest` on the time axis.
  show(data, least, greatest) {
    this.range = [least, greatest];
    if (this.plot === null) this.draw(data);
    else this.plot.setData(data);
  }

  // Draws the chart again, for colours that have changed.
  redraw() {
    if (this.plot === null) return;
    const { data } = this.plot;
    this.plot.destroy();
    this.draw(data);
  }

  size() {
    return { width: Math.max(this.box.clientWidth, 200), height: HEIGHT_PX };
  }

  resize() {
    if (this.plot !== null && this.box.clientWidth !== this.plot.width) this.plot.setSize(this.size());
  }

  // The marks of the time axis.
  times(splits) {
    const [least, greatest] = this.range;
    return splits.map((time) => mark(time * 1000, (greatest - least) * 1000));
  }

  draw(data) {
    const line = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--soft"), grid: line, ticks: line, font: "12px system-ui, sans-serif" };
    this.plot = new uPlot({
      ...this.size(),
      padding: [8, 22, 0, 0],
      scales: { x: { range: () => this.range }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.05 : this.top] } },
      axes: [{ ...axis, size: 30, values: (_, splits) => this.times(splits) }, { ...axis, size: 64, values: (_, splits) => splits.map((it) => this.text(it)) }],
      series: [{ label: "time", value: (_, time) => (time === null ? "-" : clock(time * 1000)) }, ...this.lines.map(({ label, stroke }) => ({
        label, stroke: colour(stroke), width: 1.5, spanGaps: false, points: { show: false },
        value: (_, value) => (value === null ? "-" : this.text(value)),
      }))],
      cursor: { drag: { x: false, y: false } },
    }, data, this.box);
  }
}
