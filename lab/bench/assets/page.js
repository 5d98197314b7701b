// Draws the plots of a report from the results that the page carries. Tables and bars are there
// without it. What it did is left in the root element's data: how many plots, or what went wrong.
(() => {
  "use strict";
  const root = document.documentElement;
  const runs = JSON.parse(document.getElementById("results").textContent).runs;
  const HEIGHT = 280;

  const SCALES = {
    "ns": [[1e9, " s"], [1e6, " ms"], [1e3, " us"], [1, " ns"]],
    "1/s": [[1e9, " G/s"], [1e6, " M/s"], [1e3, " k/s"], [1, " /s"]],
    "B/s": [[1e9, " GB/s"], [1e6, " MB/s"], [1e3, " kB/s"], [1, " B/s"]],
    "": [[1e9, " G"], [1e6, " M"], [1e3, " k"], [1, ""]],
  };

  // A value to three digits with its unit, without zeros at the end.
  function quantity(value, unit) {
    if (value === null || value === undefined) return "";
    const rounded = Number(value.toPrecision(3));
    if (rounded === 0) return "0";
    const scales = SCALES[unit] || [[1, unit ? " " + unit : ""]];
    const [scale, name] = scales.find(([scale]) => Math.abs(rounded) >= scale) || scales[scales.length - 1];
    return Number((rounded / scale).toPrecision(3)) + name;
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function colourOf(info, variant) {
    const at = info.variants.findIndex((other) => other.name === variant);
    return colour(`--series-${Math.max(at, 0) % 8}`);
  }

  const heading = (metric) => metric.replaceAll("_", " ");

  // Lines over one axis: [{name, colour, marks, points: [[x, y, least, greatest]]}].
  function aligned(lines) {
    const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
    const column = (line, at) => {
      const values = new Map(line.points.map((point) => [point[0], point[at]]));
      return xs.map((x) => values.get(x) ?? null);
    };
    return { xs, ys: lines.map((line) => column(line, 1)) };
  }

  // A small line from the least to the greatest of the rounds, through each point. The scale has
  // room for both; nothing is drawn outside of the plot whatever the values are.
  function spreads(lines) {
    return (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.lineWidth = devicePixelRatio;
      lines.forEach((line, at) => {
        if (!plot.series[at + 1].show) return;
        ctx.strokeStyle = line.colour;
        for (const [x, , least, greatest] of line.points) {
          if (least === undefined) continue;
          const [from, to] = plot.scales.y.distr === 3 ? [Math.max(least, plot.scales.y.min), greatest] : [least, greatest];
          const left = plot.valToPos(x, "x", true);
          ctx.beginPath();
          ctx.moveTo(left, plot.valToPos(from, "y", true));
          ctx.lineTo(left, plot.valToPos(to, "y", true));
          ctx.stroke();
        }
      });
      ctx.restore();
    };
  }

  // Powers of ten of a logarithmic axis; of a short one their doubles and halves too.
  function decades([least, greatest]) {
    const steps = Math.log10(greatest / least) > 2 ? [1] : [1, 2, 5];
    const splits = [];
    for (let power = Math.floor(Math.log10(least)); power <= Math.log10(greatest); power += 1) {
      splits.push(...steps.map((step) => step * 10 ** power).filter((value) => value >= least && value <= greatest));
    }
    return splits;
  }

  function plot(figure, lines, x, y) {
    const { xs, ys } = aligned(lines);
    // Least and greatest of the rounds too: no spread ends outside of the plot.
    const values = lines.flatMap((line) => line.points.flatMap(([, ...seen]) => seen)).filter((value) => value > 0);
    const [least, greatest] = [Math.min(...values), Math.max(...values)];
    const isWide = y.log || greatest / least > 30;
    // uPlot looks at the medians alone for a range.
    const range = isWide ? [least / 1.2, greatest * 1.2] : [0, greatest * 1.05];
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const font = { labelFont: "600 12px system-ui, sans-serif", font: "12px system-ui, sans-serif" };
    const box = figure.querySelector(".canvas");
    box.watcher?.disconnect();
    box.textContent = "";
    const size = () => ({ width: Math.max(box.clientWidth, 240), height: HEIGHT });
    const drawn = new uPlot({
      ...size(),
      padding: [12, 16, 0, 0],
      scales: {
        x: { time: false, ...x.scale },
        y: isWide ? { distr: 3, log: 10, range } : { range },
      },
      axes: [
        { ...axis, ...font, label: x.label, labelSize: 22, splits: () => x.splits(xs), filter: (_, splits) => splits, values: (_, splits) => splits.map(x.tick) },
        { ...axis, ...font, label: y.label, labelSize: 22, size: 72, ...(isWide ? { splits: () => decades(range), filter: (_, splits) => splits } : {}), values: (_, splits) => splits.map((value) => quantity(value, y.unit)) },
      ],
      series: [
        { label: x.name, value: (_, value) => (value === null ? "" : x.tick(value)) },
        ...lines.map((line) => ({
          label: line.name,
          stroke: line.colour,
          width: line.marks ? 0 : 2,
          spanGaps: true,
          points: { show: true, size: line.marks ? 9 : 6, fill: line.marks ? colour("--card") : line.colour, width: 1.5 },
          value: (_, value) => quantity(value, y.unit),
        })),
      ],
      cursor: { drag: { x: false, y: false } },
      hooks: { draw: [spreads(lines)] },
    }, [xs, ...ys], box);
    box.drawn = drawn;
    box.watcher = new ResizeObserver(() => {
      if (box.clientWidth > 0 && box.clientWidth !== drawn.width) drawn.setSize(size());
    });
    box.watcher.observe(box);
  }

  // Jobs and cores: each number at its place on a logarithmic axis.
  const counted = (name) => ({
    name, label: name, tick: (value) => String(value), splits: (xs) => xs,
    scale: {
      distr: 3, log: 2,
      range: (_, least, greatest) => (least === null ? [1, 2] : [least / 1.15, greatest * 1.15]),
    },
  });

  function byJobs(figure, run, info, of) {
    const isHere = (row) => row.experiment === info.name && row.workload === of.workload && row.metric === of.metric;
    const rows = run.rows.filter(isHere);
    const published = run.published.filter(isHere);
    const lines = info.variants.flatMap(({ name }) => {
      const points = rows.filter((row) => row.variant === name).map((row) => [row.jobs, row.median, row.min, row.max]);
      const theirs = published.filter((row) => row.variant === name).map((row) => [row.jobs, row.value]);
      const stroke = colourOf(info, name);
      return [
        { name, colour: stroke, points },
        { name: `${name}, published`, colour: stroke, points: theirs, marks: true },
      ];
    });
    const { unit } = rows[0] || published[0];
    plot(figure, lines.filter((line) => line.points.length), counted("jobs"), { label: `${heading(of.metric)} (${unit || "number"})`, unit });
  }

  // 90 % is at 1, 99 % at 2, 99.9 % at 3: as many digits as there are nines.
  const nines = (percentile) => -Math.log10(1 - percentile / 100);
  const PERCENTILES = [50, 90, 99, 99.9, 99.99, 99.999];

  function latency(figure, run, info, of) {
    const jobs = Number(of.jobs);
    const entries = run.latency.filter((entry) => entry.experiment === info.name && entry.workload === of.workload && entry.jobs === jobs);
    const lines = entries.map((entry) => ({
      name: entry.variant,
      colour: colourOf(info, entry.variant),
      points: entry.points.filter(([percentile, ns]) => percentile < 100 && ns > 0).map(([percentile, ns]) => [nines(percentile), ns]),
    }));
    const x = {
      name: "percentile", label: "percentile", scale: {},
      tick: (value) => `${Number((100 * (1 - 10 ** -value)).toPrecision(5))} %`,
      splits: (xs) => PERCENTILES.map(nines).filter((value) => value <= xs[xs.length - 1] + 1e-9),
    };
    plot(figure, lines, x, { label: "latency (ns, us, ms)", unit: "ns", log: true });
  }

  const KINDS = { jobs: byJobs, latency };

  function draw() {
    let count = 0;
    for (const figure of document.querySelectorAll("figure[data-plot]")) {
      const run = runs[Number(figure.dataset.run)];
      const info = run.experiments.find(({ name }) => name === figure.dataset.experiment);
      KINDS[figure.dataset.plot](figure, run, info, figure.dataset);
      count += 1;
    }
    root.dataset.plots = String(count);
  }

  try {
    draw();
    // Colours are in the canvases: draw them again when the colour scheme changes.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  } catch (error) {
    root.dataset.error = String(error);
    throw error;
  }
})();
