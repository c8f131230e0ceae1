// Charts of uPlot inside figures: lever marks, a legend with values, and a data table behind every chart.

import { attr, h, list, show, text } from "./dom.js";
import { clock, number } from "./format.js";

const colours = new Map();

/** A colour of the theme in force, as a canvas takes it. */
function colour(name) {
  if (!colours.has(name)) {
    const probe = document.body.appendChild(h("i", { hidden: true }));
    probe.style.color = `var(${name})`;
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

export const forgetColours = () => colours.clear();

const TABLE_ROWS = 30;
const TABLE_MS = 1000;
const EDGE = "-30px 0px"; // of a chart with less than this in the window only its title or its time axis shows
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200];
const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 3] };

/**
 * A live chart; `height` is pixels or a function that gives them. `series` entries are `{name, label, colour, dash, digits}` where `name` is a column of the history;
 * `stacked` piles them up and fills them.
 */
export class Chart {
  constructor({
    id,
    title,
    unit,
    series,
    height = 200,
    scale = 1,
    stacked = false,
    note = "",
    top = null,
    isCount = false,
  }) {
    Object.assign(this, { id, title, unit, series, height, scale, stacked, top, isCount });
    this.drawn = { history: null, version: -1, seconds: 0 };
    this.tableAt = 0;
    this.tableTimer = null;
    this.marks = [];
    this.hover = null;
    this.element = this.#build(note);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.plotBox);
    this.wanted = null;
    this.isInSight = false;
    this.sight = new IntersectionObserver((entries) => this.#seen(entries.at(-1).isIntersecting), { rootMargin: EDGE });
    this.sight.observe(this.element);
  }

  #build(note) {
    this.plotBox = h("div", { class: "plot", "aria-hidden": "true" });
    this.legend = h("ul", { class: "legend" });
    this.empty = h("p", { class: "empty", text: "Nothing measured yet." });
    this.body = h("tbody");
    const heads = ["Time", ...this.series.map((entry) => `${entry.label} (${this.unit})`), "Lever change"];
    const table = h(
      "table",
      { class: "grid" },
      h("caption", { text: `${this.title}, the last ${TABLE_ROWS} points` }),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((label) => h("th", { scope: "col", text: label })),
        ),
      ),
      this.body,
    );
    this.details = h(
      "details",
      { class: "data", id: `${this.id}-data`, on: { toggle: () => this.#table(true) } },
      h("summary", { "aria-label": `${this.title}: data table`, text: "table" }),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.title}, data` }, table),
    );
    const heading = h(
      "h3",
      { id: `${this.id}-title` },
      this.title,
      h("span", { class: "unit", text: ` ${this.unit}` }),
    );
    return h(
      "figure",
      { class: "card chart", role: "figure", "aria-labelledby": `${this.id}-title`, "aria-details": `${this.id}-data` },
      h("figcaption", {}, heading, note && h("span", { class: "note", text: note })),
      this.legend,
      h("div", { class: "stage" }, this.plotBox, this.empty),
      this.details,
    );
  }

  /**
   * Draw what `history` holds of the `seconds` up to `until`; does nothing when that is already on screen, and waits
   * for the chart to come into view.
   */
  render(history, seconds, until = Infinity) {
    const { drawn } = this;
    this.wanted = [history, seconds, until];
    if (!this.isInSight) return;
    if (history === drawn.history && history.version === drawn.version && seconds === drawn.seconds) return;
    this.drawn = { ...drawn, history, version: history.version, seconds };
    const names = this.series.map((entry) => entry.name);
    const window = history.window(names, seconds, { until });
    this.marks = history.marks;
    this.rows = window;
    const columns = names.map((name) => window[name].map((value) => (value === null ? null : value * this.scale)));
    this.values = columns;
    const isEmpty = !columns.some((column) => column.some((value) => value !== null));
    show(this.empty, isEmpty);
    attr(this.empty.parentElement, "data-empty", isEmpty ? "" : null);
    const end = window.time.at(-1) ?? Date.now() / 1000;
    this.range = [end - seconds, end];
    if (!this.plot) this.#create();
    this.plot.setData([window.time, ...(this.stacked ? piled(columns) : columns)]);
    this.#legend();
    this.#table(false);
  }

  /** The colours changed: draw again. */
  repaint() {
    this.plot?.redraw(false, true);
  }

  destroy() {
    this.observer.disconnect();
    this.sight.disconnect();
    this.plot?.destroy();
  }

  #seen(isInSight) {
    this.isInSight = isInSight;
    if (isInSight && this.wanted) this.render(...this.wanted);
  }

  #create() {
    const grid = this.stacked ? "--grid-over" : "--grid";
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour(grid), width: 1 },
      ticks: { show: false },
    };
    const font = '11px ui-monospace, "SF Mono", Menlo, Consolas, monospace';
    const options = {
      width: Math.max(120, this.plotBox.clientWidth),
      height: this.#tall(),
      legend: { show: false },
      padding: [8, 26, 0, 0],
      drawOrder: this.stacked ? ["series", "axes"] : ["axes", "series"],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { show: !this.stacked, size: 6 },
        sync: { key: "metrale" },
      },
      scales: {
        x: { time: true, range: () => this.range },
        y: { range: (_, low, high) => [0, this.top ?? (high > 0 ? high * 1.08 : 1)] },
      },
      axes: [
        { ...axis, font, size: 22, gap: 4, space: 84, values: (_, splits) => splits.map(clock) },
        {
          ...axis,
          font,
          size: 46,
          gap: 6,
          space: 34,
          ...(this.isCount ? { incrs: WHOLE } : {}),
          values: (_, splits) => splits.map(number),
        },
      ],
      series: [{}, ...this.#lines()],
      hooks: { draw: [(plot) => this.#drawMarks(plot)], setCursor: [(plot) => this.#moved(plot.cursor.idx)] },
    };
    this.plot = new globalThis.uPlot(options, [[], ...this.series.map(() => [])], this.plotBox);
  }

  #lines() {
    const order = this.stacked ? [...this.series].reverse() : this.series;
    return order.map((entry) => ({
      label: entry.label,
      stroke: () => colour(entry.colour),
      width: this.stacked ? 0 : 1.5,
      dash: this.stacked ? undefined : DASHES[entry.dash ?? "solid"],
      fill: this.stacked ? () => colour(entry.colour) : undefined,
      points: { show: () => this.rows.time.length < 3, size: 5 },
      spanGaps: false,
    }));
  }

  #moved(index) {
    this.hover = index ?? null;
    this.#legend();
  }

  #legend() {
    if (!this.values) return;
    const at = this.hover ?? this.rows.time.length - 1;
    const entries = this.series
      .map((entry, index) => ({
        ...entry,
        value: this.values[index][at],
        used: this.values[index].some((value) => value),
      }))
      .filter((entry) => !this.stacked || entry.used);
    list(
      this.legend,
      entries,
      (entry) => entry.name,
      makeEntry,
      (element, entry) => {
        text(element.lastChild, number(entry.value));
      },
    );
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    const marks = this.marks.filter((mark) => mark.time >= this.range[0] && mark.time <= this.range[1]);
    if (!marks.length) return;
    let free = -Infinity;
    ctx.save();
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.fillStyle = colour("--text");
    for (const mark of marks) {
      const x = Math.round(plot.valToPos(mark.time, "x", true));
      ctx.strokeStyle = colour("--text");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.strokeStyle = colour("--card");
      ctx.lineWidth = 3 * devicePixelRatio;
      ctx.setLineDash([]);
      const width = ctx.measureText(mark.name).width + 6 * devicePixelRatio;
      const left = x + width > bbox.left + bbox.width ? x - width : x;
      if (left > free) {
        const at = [mark.name, left + 3 * devicePixelRatio, bbox.top + 9 * devicePixelRatio];
        ctx.strokeText(...at);
        ctx.fillText(...at);
        free = left + width;
      }
    }
    ctx.restore();
  }

  /** Filled only while it is open, and at most once a second, so that it stays readable. */
  #table(isForced) {
    if (!this.details.open || !this.rows) return;
    const wait = this.tableAt + TABLE_MS - performance.now();
    if (!isForced && wait > 0) {
      this.tableTimer ??= setTimeout(() => this.#table(true), wait);
      return;
    }
    clearTimeout(this.tableTimer);
    this.tableTimer = null;
    this.tableAt = performance.now();
    const total = this.rows.time.length;
    const indices = Array.from({ length: Math.min(total, TABLE_ROWS) }, (_, index) => total - 1 - index);
    const rows = indices.map((index) => [
      clock(this.rows.time[index]),
      ...this.values.map((column) => number(column[index])),
      this.#marksBetween(this.rows.time[index], this.rows.time[index + 1] ?? Infinity),
    ]);
    list(
      this.body,
      rows.map((row, index) => ({ row, index })),
      ({ index }) => index,
      ({ row }) =>
        h(
          "tr",
          {},
          row.map((_, column) => h(column ? "td" : "th", column ? {} : { scope: "row" })),
        ),
      (element, { row }) => row.forEach((value, column) => text(element.cells[column], value)),
    );
  }

  #marksBetween(from, to) {
    return this.marks
      .filter((mark) => mark.time >= from && mark.time < to)
      .map((mark) => mark.name)
      .join(", ");
  }

  /** Fit the box that the page leaves; also called when only the height of the window changed. */
  resize() {
    const width = this.plotBox.clientWidth;
    const height = this.#tall();
    if (!this.plot || !width || (this.plot.width === width && this.plot.height === height)) return;
    this.plot.setSize({ width, height });
  }

  #tall() {
    return typeof this.height === "function" ? this.height() : this.height;
  }
}

function makeEntry(entry) {
  const swatch = h("i", { class: `swatch ${entry.dash ?? "solid"}`, "aria-hidden": "true" });
  swatch.style.color = `var(${entry.colour})`;
  return h("li", {}, swatch, h("span", { text: entry.label }), h("b", { class: "value" }));
}

/** Running sums, highest first, so that the areas painted later cover the lower part of those before. */
function piled(columns) {
  if (!columns.length) return [];
  const sums = [columns[0]];
  for (const column of columns.slice(1)) {
    const below = sums[sums.length - 1];
    sums.push(column.map((value, index) => (value === null ? below[index] : value + (below[index] ?? 0))));
  }
  return sums.reverse();
}
