// The changes of levers: who, when, why, the effect observed, and a way back.

import { h, list, show, text } from "./dom.js";
import { clock, leverValue, number, percent } from "./format.js";
import { lever as find, mayControl } from "./state.js";

const HEADS = ["Time", "Lever", "From", "To", "Tick", "By", "Reason", "Effect"];
const EFFECT_S = 15;
const TOO_SOON_S = 5;
const CAPTION = `Effect: throughput of the ${EFFECT_S} s after against the ${EFFECT_S} s before, busy half-seconds only,
 with a 95 % interval. Observed, not an experiment.`;

export function createChanges({ actions, getHistory }) {
  const body = h("tbody");
  const none = h("p", { class: "empty", text: "No lever was changed since this page connected." });
  const undoHead = h("th", { scope: "col" }, h("span", { class: "hidden", text: "Undo" }));
  const heads = HEADS.map((label) => h("th", { scope: "col", text: label }));
  const table = h(
    "table",
    { class: "grid" },
    h("caption", { text: CAPTION }),
    h("thead", {}, h("tr", {}, heads, undoHead)),
    body,
  );

  function make(event) {
    const undo = h("button", {
      type: "button",
      class: "small",
      "aria-label": `Undo ${event.name} of ${clock(event.time)}`,
      text: "Undo",
      on: { click: () => actions.undoLever(event.change_id, event.name) },
    });
    const cells = HEADS.slice(1).map(() => h("td"));
    return h("tr", {}, h("th", { scope: "row" }), cells, h("td", {}, undo));
  }

  function update(row, event, state) {
    const lever = find(state, event.name);
    const shown = (value) => (lever ? leverValue(lever, value) : String(value));
    const values = [
      clock(event.time),
      event.name,
      shown(event.old),
      shown(event.new),
      number(event.tick),
      origin(event),
      event.reason ?? "",
      effect(event, state, getHistory()),
    ];
    values.forEach((value, index) => text(row.cells[index], value));
    row.lastChild.firstChild.disabled = !mayControl(state);
  }

  return {
    element: h(
      "section",
      { "aria-labelledby": "changes-title" },
      h("h2", { id: "changes-title", text: "Changes" }),
      none,
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Lever changes" }, table),
    ),
    render(state) {
      show(none, !state.events.length);
      const newestFirst = state.events.toReversed();
      list(
        body,
        newestFirst,
        (event) => event.change_id,
        make,
        (row, event) => update(row, event, state),
      );
    },
  };
}

/** Who, and from where when the name of the actor does not already say so. */
const origin = ({ origin: from, actor }) => (!actor ? from : actor.startsWith(from) ? actor : `${from}, ${actor}`);

function effect(event, state, history) {
  const next = state.events.find((other) => other.time > event.time && other.change_id !== event.change_id);
  if (next && next.time - event.time < TOO_SOON_S) return "changed again too soon";
  const found = history.effect(event.time, EFFECT_S, next?.time);
  if (!found) return "too little traffic";
  const sign = found.change >= 0 ? "+" : "−";
  const sure = Math.abs(found.change) > found.spread ? "" : ", within noise";
  return `${sign}${percent(Math.abs(found.change))} % ± ${percent(found.spread)}${sure}`;
}
