// Runs: every recorded run, replayed in the same panels as live with pause, speed and scrubber, or as a report.

import { attr, h, show, text } from "../dom.js";
import { NOTHING, span } from "../format.js";
import { createReport } from "./report.js";

const RUNS = `SELECT run, run_id, started, coalesce(epoch(until), epoch(now())) - epoch(started) AS seconds, state, model, device
FROM run_list LIMIT 200`;
const SPEEDS = [0.5, 1, 2, 5, 10, 30];
const LONGEST_UNKNOWN_S = 3600;

export function createRuns({ actions }) {
  const report = createReport(actions);
  const body = h("tbody");
  const head = h("thead");
  const empty = h("p", { class: "empty" });
  const again = h("button", {
    type: "button",
    class: "link",
    text: "Ask again",
    on: { click: () => actions.runQuery(RUNS, "runs", 200) },
  });
  const play = h("button", { type: "button", class: "primary", text: "Pause", on: { click: toggle } });
  const stop = h("button", {
    type: "button",
    text: "Back to live",
    on: { click: () => actions.controlReplay({ action: "stop", run: "" }) },
  });
  const speed = h(
    "select",
    { id: "replay-speed", on: { change: () => resend() } },
    SPEEDS.map((value) => h("option", { value, text: `${value}×`, selected: value === 1 })),
  );
  const scrubber = h("input", {
    type: "range",
    id: "replay-position",
    min: "0",
    max: "1",
    step: "0.5",
    value: "0",
    "aria-label": "Position in the run, seconds",
    on: { input: () => (isDragging = true), change: seek },
  });
  const position = h("output", { for: "replay-position", text: "0 s" });
  const status = h("p", { class: "quiet", role: "status" });
  const player = h(
    "section",
    { class: "card player", "aria-label": "Replay" },
    h(
      "div",
      { class: "bar-row" },
      play,
      stop,
      h("label", { class: "field", for: "replay-speed" }, h("span", { text: "Speed" }), speed),
      position,
    ),
    scrubber,
    status,
  );
  let isDragging = false;
  let current = null;
  let drawn = null;

  function toggle() {
    const isRunning = current?.status === "running";
    actions.controlReplay({
      action: isRunning ? "pause" : "resume",
      run: current.run,
      speed: Number(speed.value),
      position: current.position,
    });
  }

  const resend = () =>
    current &&
    actions.controlReplay({
      action: current.status === "paused" ? "pause" : "resume",
      run: current.run,
      speed: Number(speed.value),
      position: current.position,
    });

  function seek() {
    isDragging = false;
    actions.controlReplay({
      action: "seek",
      run: current.run,
      speed: Number(speed.value),
      position: Number(scrubber.value),
    });
  }

  function draw(result) {
    drawn = result;
    head.replaceChildren(
      h(
        "tr",
        {},
        COLUMNS.map(([, label]) => h("th", { scope: "col", text: label })),
        h("th", { scope: "col" }, h("span", { class: "hidden", text: "Actions" })),
      ),
    );
    const rows = result.rows.map((row) =>
      Object.fromEntries(result.columns.map((column, index) => [column, row[index]])),
    );
    body.replaceChildren(
      ...rows.map((row) => {
        const run = String(row.run_id);
        const start = h("button", {
          type: "button",
          class: "small",
          text: "Replay",
          "aria-label": `Replay ${run}`,
          on: {
            click: () =>
              actions.controlReplay({
                action: "start",
                run,
                speed: Number(speed.value),
                position: 0,
                duration: Math.ceil(row.seconds ?? 0),
              }),
          },
        });
        const read = h("button", {
          type: "button",
          class: "small",
          text: "Report",
          "aria-label": `Report of ${run}`,
          on: { click: () => report.open(run, row.run) },
        });
        return h(
          "tr",
          { "data-run": run },
          COLUMNS.map(([name, , show_], index) =>
            h(index ? "td" : "th", {
              scope: index ? null : "row",
              text: row[name] === null ? NOTHING : show_(row[name]),
            }),
          ),
          h("td", {}, start, " ", read),
        );
      }),
    );
  }

  function render(state) {
    current = state.replay;
    show(player, Boolean(current));
    if (current) {
      text(play, current.status === "running" ? "Pause replay" : "Resume replay");
      attr(scrubber, "max", current.duration || Math.max(LONGEST_UNKNOWN_S, Math.ceil(current.position)));
      if (!isDragging) scrubber.value = String(current.position);
      attr(scrubber, "aria-valuetext", span(current.position));
      text(
        position,
        current.duration ? `${span(current.position)} of ${span(current.duration)}` : span(current.position),
      );
      text(
        status,
        `All figures are those of ${current.run}${current.status === "paused" ? ", paused" : `, at ${current.speed}× speed`}. Live ones are collected meanwhile by the server, not by this page.`,
      );
    }
    const { runs } = state.queries;
    const result = runs?.result;
    const usable = result && !result.error && result.columns.includes("run_id");
    if (usable && result !== drawn) draw(result);
    show(empty, !usable || !result.rows.length);
    text(
      empty,
      !runs ? "Asked when this opens." : !result ? "Asking for the runs …" : result.error || "No run was recorded yet.",
    );
    show(again, Boolean(result));
    report.render(state);
  }

  return {
    element: h(
      "div",
      { class: "stack" },
      player,
      h(
        "section",
        { class: "card", "aria-labelledby": "runs-title" },
        h("h3", { id: "runs-title", text: "Recorded runs" }),
        h(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" },
          h("table", { class: "grid wide" }, h("caption", { class: "hidden", text: "Runs" }), head, body),
        ),
        empty,
        again,
      ),
      report.element,
    ),
    render,
    opened: (state) =>
      state.link.status === "open" &&
      (!state.queries.runs || state.queries.runs.result?.error) &&
      actions.runQuery(RUNS, "runs", 200),
    isInteractive: true,
  };
}

const COLUMNS = [
  ["run_id", "Run", String],
  ["started", "Started, UTC", (value) => String(value).replace("T", " ").slice(0, 19)],
  ["seconds", "Length", span],
  ["state", "State", String],
  ["model", "Model", String],
  ["device", "Device", String],
];
