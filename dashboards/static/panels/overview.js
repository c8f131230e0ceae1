// Six charts over one time axis: throughput, lanes, latency, batch, KV and acceptance.

import { Chart } from "../charts.js";
import { h } from "../dom.js";
import { laneColour } from "../marks.js";

const WINDOWS = [
  [60, "1 min"],
  [300, "5 min"],
  [900, "15 min"],
  [3600, "1 h"],
];

/** Two rows fill the window where four charts stand in a row; narrower screens scroll. */
function chartHeight() {
  return innerWidth > 1320 ? Math.round(Math.max(170, Math.min(340, (innerHeight - 440) / 2))) : 180;
}

export function createOverview({ words, getHistory, getUntil, onView }) {
  let seconds = 60;
  const charts = [
    new Chart({
      height: chartHeight,
      id: "c-throughput",
      title: "Throughput",
      unit: "tok/s",
      series: [
        { name: "tokens", label: "delivered", colour: "--series-1" },
        { name: "plain", label: "plain, measured", colour: "--series-2", dash: "dashed" },
      ],
    }),
    new Chart({
      height: chartHeight,
      id: "c-lanes",
      title: "Tokens by lane",
      unit: "tok/s",
      stacked: true,
      series: Object.keys(words.lanes).map((lane) => ({ name: `lane.${lane}`, label: lane, colour: laneColour(lane) })),
    }),
    new Chart({
      height: chartHeight,
      id: "c-acceptance",
      title: "Drafts accepted",
      unit: "%",
      scale: 100,
      top: 100,
      series: [{ name: "acceptance", label: "accepted of drafted", colour: "--series-3" }],
    }),
    new Chart({
      height: chartHeight,
      id: "c-tpot",
      title: "Time per token",
      unit: "ms, last 60 s",
      series: [
        { name: "tpot_p50", label: "p50", colour: "--series-1" },
        { name: "tpot_p95", label: "p95", colour: "--series-2", dash: "dashed" },
        { name: "tpot_p99", label: "p99", colour: "--series-4", dash: "dotted" },
      ],
    }),
    new Chart({
      height: chartHeight,
      id: "c-ttft",
      title: "Time to first token",
      unit: "ms, last 60 s",
      series: [
        { name: "ttft_p50", label: "p50", colour: "--series-1" },
        { name: "ttft_p95", label: "p95", colour: "--series-2", dash: "dashed" },
      ],
    }),
    new Chart({
      height: chartHeight,
      id: "c-batch",
      title: "Batch",
      unit: "seq",
      isCount: true,
      series: [
        { name: "active", label: "decoding", colour: "--series-1" },
        { name: "waiting", label: "waiting", colour: "--series-2", dash: "dashed" },
      ],
    }),
    new Chart({
      height: chartHeight,
      id: "c-kv",
      title: "KV pool",
      unit: "%",
      scale: 100,
      top: 100,
      series: [
        { name: "kv", label: "in use", colour: "--series-1" },
        { name: "cached", label: "prefix cache", colour: "--series-2", dash: "dashed" },
      ],
    }),
    new Chart({
      height: chartHeight,
      id: "c-prefill",
      title: "Prompt tokens read",
      unit: "tok/s",
      series: [{ name: "prefill", label: "prefill", colour: "--series-1" }],
    }),
  ];

  const choice = h(
    "fieldset",
    { class: "segments" },
    h("legend", { class: "quiet", text: "Time shown" }),
    WINDOWS.map(([value, label]) =>
      h(
        "label",
        {},
        h("input", {
          type: "radio",
          name: "window",
          value,
          checked: value === seconds,
          on: { change: () => pick(value) },
        }),
        h("span", { text: label }),
      ),
    ),
  );

  function pick(value) {
    seconds = value;
    onView();
  }

  addEventListener("resize", () => charts.forEach((chart) => chart.resize()));

  return {
    element: h(
      "div",
      {},
      h("div", { class: "bar-row" }, choice, h("p", { class: "quiet", text: "Vertical lines are lever changes." })),
      h(
        "div",
        { class: "charts" },
        charts.map((chart) => chart.element),
      ),
    ),
    render: () => charts.forEach((chart) => chart.render(getHistory(), seconds, getUntil())),
    repaint: () => charts.forEach((chart) => chart.repaint()),
    everyMs: 500,
  };
}
