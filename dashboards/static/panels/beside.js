// Beside the chat: throughput and the levers worth flipping while a reply streams.

import { Chart } from "../charts.js";
import { createControl, leverNote } from "../control.js";
import { attr, h, list, text } from "../dom.js";
import { lever as find, mayControl, pendingFor } from "../state.js";

const QUICK = ["drafter", "num_drafts", "mtp_gate", "pipelined_decode", "always_mixed"];
const CHART_EVERY_S = 0.5;
const CHART_SHOWS_S = 60;

export function createBeside({ actions, getHistory, getUntil, now }) {
  const chart = new Chart({
    id: "c-chat",
    title: "Throughput",
    unit: "tok/s",
    height: 120,
    series: [
      { name: "tokens", label: "delivered", colour: "--series-1" },
      { name: "plain", label: "plain, measured", colour: "--series-2", dash: "dashed" },
    ],
  });
  const body = h("ul", { class: "plain quick" });
  let drawn = 0;

  function make(lever) {
    const control = createControl(lever.name, { change: (name, value) => actions.askLever(name, value, {}) });
    const note = h("p", { class: "lever-note", role: "status" });
    const head = h("div", { class: "lever-head" }, h("code", { text: lever.name }), control.element);
    return Object.assign(h("li", { "data-quick": lever.name, title: lever.help }, head, note), { control, note });
  }

  function update(element, lever, state) {
    element.control.update(lever, pendingFor(state, lever.name), !mayControl(state));
    const note = leverNote(state, lever.name, now());
    text(element.note, note?.words ?? "");
    attr(element.note, "data-kind", note?.kind);
  }

  function render(state) {
    const levers = QUICK.map((name) => find(state, name)).filter(Boolean);
    list(
      body,
      levers,
      ({ name }) => name,
      make,
      (element, lever) => update(element, lever, state),
    );
    if (now() - drawn < CHART_EVERY_S) return;
    drawn = now();
    chart.render(getHistory(), CHART_SHOWS_S, getUntil());
  }

  const levers = h("section", { class: "card", "aria-label": "Quick levers" }, h("h3", { text: "Levers" }), body);
  return { element: h("div", { class: "stack" }, chart.element, levers), render, repaint: () => chart.repaint() };
}
