// The curves: points as they come, bounded, drawn by uPlot.

import { find, setText } from "./dom.js";
import { count, loss, percent } from "./words.js";

const MAX_POINTS = 600;
const SMOOTH_S = 5;
const WORDS = { examples: count, steps: count, loss, staleness: count, ahead: count, exposed: (value) => percent(value / 100) };
const RATES = new Set(["examples", "steps"]);

const number = (value) => (typeof value === "number" ? value : null);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Curves {
  constructor() {
    this.columns = [];
    this.points = [];
    this.plots = new Map();
    new ResizeObserver(() => this.resize()).observe(find("#curves"));
  }

  // The chief's past; what this page saw before that stays (the chief may be another one, that knows less).
  setPast(columns, points) {
    const first = points.length ? points[0][0] : Infinity;
    this.columns = columns;
    this.points = [...this.points.filter((point) => point[0] < first), ...points];
    this.shorten();
  }

  add(point) {
    if (this.points.length && point[0] <= this.points.at(-1)[0]) return;
    this.points.push(point);
    this.shorten();
  }

  shorten() {
    while (this.points.length > MAX_POINTS) this.points = this.points.filter((_, index) => index % 2 === 0);
  }

  values(name) {
    const column = this.columns.indexOf(name);
    const scale = name === "exposed" ? 100 : 1;
    if (!RATES.has(name)) return this.points.map((point) => (number(point[column]) === null ? null : scale * point[column]));
    let from = 0;
    return this.points.map((point, index) => {
      while (from < index - 1 && point[0] - this.points[from + 1][0] >= SMOOTH_S) from += 1;
      if (!index) return null;
      const grown = point[column] - this.points[from][column];
      return grown < 0 ? null : grown / (point[0] - this.points[from][0]);
    });
  }

  draw() {
    const times = this.points.map((point) => point[0]);
    for (const figure of document.querySelectorAll("#curves figure")) {
      const name = figure.dataset.curve;
      const values = this.values(name);
      const last = values.findLast((value) => value !== null);
      figure.hidden = last === undefined;
      if (figure.hidden) continue;
      const raw = RATES.has(name) ? last : this.points.at(-1)[this.columns.indexOf(name)];
      setText(figure.querySelector("b"), WORDS[name](typeof raw === "string" ? raw : last));
      this.plot(name, figure.querySelector(".plot")).setData([times, values]);
    }
  }

  plot(name, place) {
    let plot = this.plots.get(name);
    if (!plot) {
      const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
      const drawn = { width: place.clientWidth || 300, height: place.clientHeight || 130, legend: { show: false }, cursor: { points: { size: 6 }, drag: { setScale: false } },
        scales: { y: { range: (_, low, high) => [name === "loss" ? Math.min(low, high * 0.98) : 0, high > 0 ? high * 1.08 : 1] } },
        series: [{}, { stroke: () => colour("--accent"), width: 1.6, spanGaps: false, points: { show: false } }],
        axes: [{ ...axis, size: 26, space: 70, values: [[3600, "{HH}:{mm}", null, null, null, null, null, null, 1], [60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] }, { ...axis, size: 46, space: 32, values: (_, ticks) => ticks.map((tick) => count(Number(tick.toPrecision(6)))) }] };
      plot = new uPlot(drawn, [[], []], place);
      this.plots.set(name, plot);
    }
    return plot;
  }

  resize() {
    for (const plot of this.plots.values()) {
      const place = plot.root.parentElement;
      if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    }
  }

  redraw() {
    for (const plot of this.plots.values()) plot.redraw();
  }
}
