// Telemetry: what was lost, by kind, what recording costs, how the database is, and the log.

import { attr, h, list, show, text } from "../dom.js";
import { clock, count, percent, span } from "../format.js";

const LEVELS = ["info", "warning", "error"];

export function createHealth({ now }) {
  let least = "info";
  const fact = (label, unit) => {
    const value = h("b", { class: "value", text: "–" });
    const note = h("span", { class: "sub" });
    return {
      element: h(
        "div",
        { class: "fact" },
        h("dt", { text: label }),
        h("dd", {}, value, unit && h("span", { class: "unit", text: ` ${unit}` }), note),
      ),
      value,
      note,
    };
  };
  const facts = {
    cost: fact("Cost of recording", "% of tick time"),
    database: fact("Database", ""),
    skipped: fact("Frames skipped for this page", ""),
    frames: fact("Frames received", ""),
    tokens: fact("Tokens delivered", "in this run"),
    requests: fact("Requests", "in this run"),
  };
  const losses = h("tbody");
  const noLosses = h("p", { class: "empty", text: "Nothing was dropped since the run began." });
  const lossTable = h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "grid" },
      h("caption", { class: "hidden", text: "Losses" }),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col", text: "Kind" }),
          h("th", { scope: "col", class: "right", text: "Dropped, n" }),
        ),
      ),
      losses,
    ),
  );
  const about = h("dl", { class: "details" });
  const log = h("ol", { class: "plain log", tabindex: "0", role: "log", "aria-label": "Log" });
  const noLog = h("p", { class: "empty", text: "No message at this level." });
  const level = h(
    "select",
    { id: "log-level", on: { change: () => (least = level.value) } },
    LEVELS.map((name) =>
      h("option", {
        value: name,
        text: name === "info" ? "all" : name === "warning" ? "warnings and errors" : "errors",
      }),
    ),
  );

  function render(state) {
    const { stats, totals, facts: engine } = state;
    const lost = Object.entries(stats?.lost ?? {}).filter(([, value]) => value);
    text(facts.cost.value, percent(stats?.telemetry_cost));
    text(facts.database.value, !stats ? "–" : stats.database === "ok" ? "ok" : "problem");
    text(facts.database.note, stats && stats.database !== "ok" ? stats.database : "");
    attr(facts.database.element, "data-bad", stats && stats.database !== "ok" ? "" : null);
    text(facts.skipped.value, count(totals.skipped));
    text(facts.frames.value, count(totals.frames));
    text(facts.frames.note, totals.since ? `in ${span(now() - totals.since)}` : "");
    text(facts.tokens.value, count(stats?.total_tokens));
    text(facts.requests.value, count(stats?.total_requests));
    show(noLosses, Boolean(stats) && !lost.length);
    show(lossTable, lost.length > 0);
    list(
      losses,
      lost,
      ([kind]) => kind,
      () => h("tr", {}, h("th", { scope: "row" }), h("td", { class: "right" })),
      (row, [kind, value]) => {
        text(row.cells[0], kind);
        text(row.cells[1], count(value));
      },
    );
    renderAbout(engine);
    const entries = state.log.filter((entry) => LEVELS.indexOf(entry.level) >= LEVELS.indexOf(least));
    show(noLog, !entries.length);
    list(log, entries.toReversed(), keyOf, (entry) =>
      h(
        "li",
        { "data-level": entry.level },
        h("time", { text: clock(entry.time) }),
        h("b", { text: entry.level }),
        h("span", { text: entry.message }),
      ),
    );
  }

  function renderAbout(engine) {
    const rows = !engine
      ? []
      : [
          ["Run", engine.run_id],
          ["Model", engine.model],
          ["Device", `${engine.device}, ${engine.dtype}`],
          ["Context", `${count(engine.max_context)} tok`],
          ["KV pool", `${count(engine.kv_tokens)} tok in blocks of ${engine.block_size}`],
          ["Batch", `${engine.max_batch_size} seq at most`],
          ["Drafters", engine.drafters.join(", ") || "none"],
          [
            "Versions",
            Object.entries(engine.versions ?? {})
              .map(([name, version]) => `${name} ${version}`)
              .join(", ") || "–",
          ],
        ];
    list(
      about,
      rows,
      ([label]) => label,
      ([label]) => h("div", {}, h("dt", { text: label }), h("dd")),
      (row, [, value]) => text(row.lastChild, value),
    );
  }

  return {
    element: h(
      "div",
      { class: "stack" },
      h(
        "section",
        { class: "card", "aria-label": "Health" },
        h(
          "dl",
          { class: "facts" },
          Object.values(facts).map(({ element }) => element),
        ),
      ),
      h(
        "div",
        { class: "columns" },
        h(
          "section",
          { class: "card", "aria-labelledby": "loss-title" },
          h("h3", { id: "loss-title", text: "Losses by kind, since the run began" }),
          lossTable,
          noLosses,
        ),
        h(
          "section",
          { class: "card", "aria-labelledby": "about-title" },
          h("h3", { id: "about-title", text: "This engine" }),
          about,
        ),
      ),
      h(
        "section",
        { class: "card", "aria-labelledby": "log-title" },
        h(
          "div",
          { class: "bar-row" },
          h("h3", { id: "log-title", text: "Log" }),
          h("label", { class: "field", for: "log-level" }, h("span", { text: "Show" }), level),
        ),
        log,
        noLog,
      ),
    ),
    render,
    everyMs: 250,
  };
}

const keys = new WeakMap();
let nextKey = 0;

/** An entry has no identity on the wire; two equal lines are still two lines. */
function keyOf(entry) {
  if (!keys.has(entry)) keys.set(entry, (nextKey += 1));
  return keys.get(entry);
}
