// Report: what happened in one run, each section the answer of a named view.

import { h, list, show, text } from "../dom.js";
import { fillTable } from "./sql.js";

const ROWS = 20;
const SECTIONS = [
  ["lanes", "Work by lane"],
  ["latency_percentiles", "Latency"],
  ["acceptance_by_position", "Acceptance by draft position"],
  ["lever_effects", "Lever changes, 30 s before and after"],
  ["gate_reasons", "What the gate did"],
  ["why_not_speculating", "Why not a faster lane"],
  ["slowest_requests", "Slowest requests"],
  ["finish_reasons", "How requests ended"],
  ["overhead", "What recording cost"],
  ["losses_by_kind", "What was lost"],
];

const purpose = (view) => `report ${view}`;

export function createReport(actions) {
  const title = h("h2", { tabindex: "-1" });
  const body = h("div", { class: "stack" });
  const element = h("section", { class: "stack report", "aria-label": "Report", hidden: true }, title, body);
  let isOpen = false;

  function make([view, heading]) {
    const head = h("thead");
    const rows = h("tbody");
    const note = h("p", { class: "empty" });
    const table = h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": heading },
      h("table", { class: "grid" }, h("caption", { class: "hidden", text: heading }), head, rows),
    );
    const section = h(
      "section",
      { class: "card", "data-view": view },
      h("h3", {}, heading, h("span", { class: "unit", text: `  ${view}` })),
      table,
      note,
    );
    return Object.assign(section, { parts: { head, rows, note, table } });
  }

  function update(section, [view], state) {
    const result = state.queries[purpose(view)]?.result;
    if (section.drawn === result) return;
    section.drawn = result;
    const { head, rows, note, table } = section.parts;
    const hasRows = Boolean(result?.rows.length);
    show(table, hasRows);
    show(note, !hasRows);
    text(note, !result ? "Asking \u2026" : result.error || "Nothing of this kind in this run.");
    if (hasRows) fillTable(head, rows, result, ROWS);
  }

  return {
    element,
    /** Ask every view for its rows of one run; `run` is the number that all views carry. */
    open(name, run) {
      isOpen = true;
      text(title, `Report of ${name}`);
      for (const [view] of SECTIONS)
        actions.runQuery(
          `SELECT * EXCLUDE (run) FROM ${view} WHERE run = ${Number(run)} LIMIT ${ROWS}`,
          purpose(view),
          ROWS,
        );
      show(element, true);
      title.focus();
    },
    render(state) {
      if (!isOpen) return;
      list(
        body,
        SECTIONS,
        ([view]) => view,
        make,
        (section, entry) => update(section, entry, state),
      );
    },
  };
}
