// What the charts draw: half-second bins of one hour in fixed rings, so that a page left open does not grow.

const GAUGES = [
  "ttft_p50",
  "ttft_p95",
  "tpot_p50",
  "tpot_p95",
  "tpot_p99",
  "active",
  "waiting",
  "kv",
  "cached",
  "plain",
];

export class History {
  constructor(lanes, { binSeconds = 0.5, bins = 7200, marks = 200 } = {}) {
    this.lanes = lanes;
    this.binSeconds = binSeconds;
    this.capacity = bins;
    this.keepMarks = marks;
    this.names = [
      "tokens",
      "prefill",
      "seconds",
      "drafted",
      "accepted",
      ...lanes.map((lane) => `lane.${lane}`),
      ...GAUGES,
    ];
    this.time = new Float64Array(bins);
    this.columns = Object.fromEntries(this.names.map((name) => [name, new Float32Array(bins)]));
    this.clear();
  }

  clear() {
    this.#forget();
    this.marks = [];
    this.version = 0;
  }

  #forget() {
    this.head = -1;
    this.length = 0;
    this.latest = -Infinity;
  }

  /** Take a `stats` message in; one that is older than the last (a seek backwards) starts afresh. */
  add(stats) {
    if (stats.time < this.latest - this.binSeconds) this.#forget();
    this.latest = stats.time;
    const start = Math.floor(stats.time / this.binSeconds) * this.binSeconds;
    if (!this.length || this.time[this.head] !== start) this.#open(start);
    const at = this.head;
    const { columns } = this;
    columns.tokens[at] += stats.tokens_per_s * stats.window_s;
    columns.prefill[at] += stats.prefill_tokens_per_s * stats.window_s;
    columns.seconds[at] += stats.window_s;
    for (const [name, lane] of Object.entries(stats.lanes)) {
      columns.drafted[at] += lane.drafted ?? 0;
      columns.accepted[at] += lane.accepted ?? 0;
      const column = columns[`lane.${name}`];
      if (column) column[at] += lane.tokens ?? 0;
    }
    columns.ttft_p50[at] = stats.ttft.p50 ?? NaN;
    columns.ttft_p95[at] = stats.ttft.p95 ?? NaN;
    columns.tpot_p50[at] = stats.tpot.p50 ?? NaN;
    columns.tpot_p95[at] = stats.tpot.p95 ?? NaN;
    columns.tpot_p99[at] = stats.tpot.p99 ?? NaN;
    columns.active[at] = stats.active;
    columns.waiting[at] = stats.waiting;
    columns.kv[at] = stats.kv_total_tokens ? stats.kv_used_tokens / stats.kv_total_tokens : NaN;
    columns.cached[at] = stats.kv_total_tokens ? stats.cached_tokens / stats.kv_total_tokens : NaN;
    columns.plain[at] = stats.plain_tokens_per_s ?? NaN;
    this.version += 1;
  }

  mark(event) {
    this.marks = [...this.marks.filter((mark) => mark.change_id !== event.change_id), event].slice(-this.keepMarks);
    this.version += 1;
  }

  #open(start) {
    this.head = (this.head + 1) % this.capacity;
    this.length = Math.min(this.length + 1, this.capacity);
    this.time[this.head] = start;
    for (const name of this.names) this.columns[name][this.head] = 0;
  }

  /**
   * Rows of the `seconds` up to `until` as `{time, <name>: [...]}`, at most `points` of them, means where bins are
   * merged.
   */
  window(names, seconds, { points = 600, until = Infinity } = {}) {
    let end = this.length;
    while (end > 0 && this.time[this.#at(end - 1)] > until) end -= 1;
    let first = Math.max(0, end - Math.ceil(seconds / this.binSeconds));
    if (end > 0) while (this.time[this.#at(first)] < this.time[this.#at(end - 1)] - seconds) first += 1;
    const available = end - first;
    const stride = Math.max(1, Math.ceil(available / points));
    const out = { time: [] };
    for (const name of names) out[name] = [];
    for (let row = first; row < end; row += stride) {
      this.#gap(out, names, row);
      out.time.push(this.time[this.#at(row)]);
      for (const name of names) out[name].push(this.#mean(name, row, Math.min(row + stride, end)));
    }
    return out;
  }

  /** An empty row where no frame covers the time, so that a line does not bridge what was never measured. */
  #gap(out, names, row) {
    const before = out.time[out.time.length - 1];
    const now = this.time[this.#at(row)];
    if (before === undefined) return;
    const covered = this.columns.seconds[this.#at(row)];
    if (this.time[this.#at(row - 1)] > now - covered - 6 * this.binSeconds) return;
    out.time.push((before + now) / 2);
    for (const name of names) out[name].push(null);
  }

  #at(row) {
    return (this.head - this.length + 1 + row + this.capacity) % this.capacity;
  }

  #mean(name, row, end) {
    const over =
      DENOMINATORS[name] ?? (name.startsWith("lane.") || name === "tokens" || name === "prefill" ? "seconds" : "");
    let sum = 0;
    let weight = 0;
    for (let index = row; index < end; index += 1) {
      const at = this.#at(index);
      const value = name === "acceptance" ? this.columns.accepted[at] : this.columns[name][at];
      if (Number.isNaN(value)) continue;
      sum += value;
      weight += over ? this.columns[over][at] : 1;
    }
    return weight > 0 ? sum / weight : null;
  }

  /** Throughput before and after `time`: means of busy bins and the difference with its 95 % interval, or null. */
  effect(time, seconds = 15, until = Infinity) {
    const before = this.#busy(time - seconds, time - this.binSeconds);
    const after = this.#busy(time + this.binSeconds, Math.min(time + seconds, until));
    if (before.length < 6 || after.length < 6) return null;
    const [left, right] = [moments(before), moments(after)];
    const error = Math.sqrt(left.variance / before.length + right.variance / after.length);
    return {
      before: left.mean,
      after: right.mean,
      change: right.mean / left.mean - 1,
      spread: (1.96 * error) / left.mean,
    };
  }

  #busy(from, to) {
    const found = [];
    for (let row = this.length - 1; row >= 0; row -= 1) {
      const at = this.#at(row);
      if (this.time[at] < from) break;
      if (this.time[at] > to || !this.columns.active[at] || !this.columns.seconds[at]) continue;
      found.push(this.columns.tokens[at] / this.columns.seconds[at]);
    }
    return found;
  }
}

const DENOMINATORS = { acceptance: "drafted" };

function moments(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1);
  return { mean, variance };
}
