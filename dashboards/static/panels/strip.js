// The headline figures above every panel, each with unit and meaning, and one age for all of them.

import { attr, h, text } from "../dom.js";
import { age, count, number, percent } from "../format.js";
import { laneChip } from "../marks.js";
import { isSameArm, rates } from "../state.js";

const WINDOW_S = 2;

export function createStrip({ words }) {
  const figure = (name) => {
    const { title, unit, means } = words.figures[name];
    const value = h("b", { class: "value", text: "–" });
    const note = h("span", { class: "sub" });
    const unitWord = h("span", { class: "unit", text: unit });
    const element = h(
      "div",
      { class: "figure", title: means, "data-figure": name },
      h("dt", { text: title }),
      h("dd", {}, h("span", { class: "main" }, value, " ", unitWord), note),
    );
    return { element, value, note, unitWord };
  };
  const names = ["throughput", "ttft", "tpot", "batch", "kv", "lane"];
  const figures = Object.fromEntries(names.map((name) => [name, figure(name)]));
  const chip = laneChip(words, "");
  figures.lane.value.replaceChildren(chip);
  const ageLine = h("p", { class: "age" });
  const element = h(
    "section",
    { class: "strip", "aria-label": "Now" },
    h(
      "dl",
      {},
      names.map((name) => figures[name].element),
    ),
    ageLine,
  );

  const put = (name, value, note) => {
    text(figures[name].value, value);
    text(figures[name].note, note);
  };

  let shownAt = 0;

  /** The age alone, which runs on while the figures are paused. */
  function renderAge(at) {
    text(ageLine, shownAt ? `updated ${age(at - shownAt)}` : "no figures yet");
  }

  function render(state, at) {
    const { stats, gate } = state;
    shownAt = stats ? state.statsAt : 0;
    attr(element, "data-empty", stats ? null : "");
    if (stats) {
      const rate = rates(state, WINDOW_S);
      put("throughput", number(rate.tokens), beside(rate, stats));
      put("ttft", number(stats.ttft.p50), quantileNote(stats.ttft));
      put("tpot", number(stats.tpot.p50), quantileNote(stats.tpot));
      put("batch", count(stats.active), batchNote(stats));
      put(
        "kv",
        percent(stats.kv_total_tokens ? stats.kv_used_tokens / stats.kv_total_tokens : null),
        `${count(stats.kv_used_tokens)} of ${count(stats.kv_total_tokens)} tok`,
      );
      chip.set(stats.lane);
      text(
        figures.lane.note,
        gate ? `gate: ${gate.mode}${isSameArm(gate.arm, gate.mode) ? "" : `, ran ${gate.arm}`}` : "gate not asked yet",
      );
    } else {
      for (const name of names) text(figures[name].note, "");
      for (const name of names.slice(0, -1)) text(figures[name].value, "–");
      chip.set("");
    }
    renderAge(at);
  }

  return { element, render, renderAge };
}

function beside(rate, stats) {
  if (!stats.plain_tokens_per_s) return rate.prefill ? `prefill ${number(rate.prefill)} tok/s` : "plain not measured";
  return `plain ${number(stats.plain_tokens_per_s)} tok/s`;
}

const quantileNote = (quantiles) =>
  quantiles.p50 === null || quantiles.p50 === undefined
    ? "no sample in 60 s"
    : `p95 ${number(quantiles.p95)}, p99 ${number(quantiles.p99)}`;

function batchNote(stats) {
  const parts = [
    [stats.waiting, "waiting"],
    [stats.prefilling, "prefilling"],
    [stats.swapped, "swapped"],
    [stats.preempted, "preempted"],
  ];
  const busy = parts.filter(([value]) => value).map(([value, word]) => `${value} ${word}`);
  return busy.length ? busy.slice(0, 2).join(", ") : "none waiting";
}
