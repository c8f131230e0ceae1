// The gate: both arms with their spread, what it decided, why in words, and when it measures next.

import { bar } from "../marks.js";
import { attr, h, list, show, text } from "../dom.js";
import { age, clock, count, number } from "../format.js";
import { isSameArm, lever } from "../state.js";

const LEVER_WORDS = {
  auto: "the gate measures and takes the faster",
  force: "always speculate",
  off: "never speculate",
};

export function createGate({ words }) {
  const fact = (label, unit = "") => {
    const value = h("b", { class: "value", text: "–" });
    return {
      element: h(
        "div",
        { class: "fact" },
        h("dt", { text: label }),
        h("dd", {}, value, unit && h("span", { class: "unit", text: ` ${unit}` })),
      ),
      value,
    };
  };
  const facts = {
    next: fact("Next probe in", "tok"),
    margin: fact("Must win by", "tok/s"),
    losses: fact("Losses in a row"),
    switches: fact("Switches"),
    width: fact("Width bucket", "seq"),
    depth: fact("Context depth", "tok"),
  };
  const verdict = h("p", { class: "verdict" });
  const why = h("p", { class: "why" });
  const mode = h("p", { class: "quiet" });
  const arms = h("tbody");
  const log = h("tbody");
  const empty = h("p", {
    class: "empty",
    text: "The gate was not asked yet: no decode step ran, or no drafter is loaded.",
  });
  const content = h("div");
  const ageLine = h("p", { class: "age" });

  function makeArm() {
    const speed = bar("--series-1");
    const row = h(
      "tr",
      {},
      h("th", { scope: "row" }),
      h("td", { class: "right" }),
      h("td", { class: "right" }),
      h("td", { class: "bar-cell" }, speed),
      h("td", { class: "right" }),
      h("td"),
    );
    row.speed = speed;
    return row;
  }

  function updateArm(row, { arm, fastest, gate }) {
    const isPreferred = isSameArm(arm.name, gate.mode);
    const note = isPreferred ? " ◂ preferred" : isSameArm(arm.name, gate.arm) ? " ◂ ran last" : "";
    text(row.cells[0], `${arm.name}${note}`);
    text(row.cells[1], number(arm.tokens_per_s));
    text(row.cells[2], arm.deviation === null || arm.deviation === undefined ? "–" : `± ${number(arm.deviation)}`);
    row.speed.set(
      fastest ? (arm.tokens_per_s ?? 0) / fastest : 0,
      fastest ? (arm.deviation ?? null) && arm.deviation / fastest : null,
    );
    text(row.cells[4], count(arm.age_tokens ?? 0));
    text(
      row.cells[5],
      arm.tokens_per_s === null || arm.tokens_per_s === undefined ? "not measured" : arm.stale ? "stale" : "fresh",
    );
    attr(row, "data-current", isPreferred ? "" : null);
  }

  function render(state, at) {
    const { gate } = state;
    show(empty, !gate);
    show(content, Boolean(gate));
    if (!gate) return;
    text(verdict, isSameArm(gate.arm, gate.mode) ? `Runs ${gate.arm}` : `Prefers ${gate.mode}, ran ${gate.arm} last`);
    text(why, words.gate[gate.reason] ?? gate.reason);
    const setting = lever(state, "mtp_gate")?.value;
    text(mode, setting ? `The lever mtp_gate is ${setting}: ${LEVER_WORDS[setting] ?? ""}.` : "");
    const fastest = Math.max(...gate.arms.map((arm) => (arm.tokens_per_s ?? 0) + (arm.deviation ?? 0)), 0);
    list(
      arms,
      gate.arms,
      (arm) => arm.name,
      makeArm,
      (row, arm) => updateArm(row, { arm, fastest, gate }),
    );
    text(facts.next.value, count(gate.tokens_until_probe));
    text(facts.margin.value, number(gate.margin));
    text(facts.losses.value, count(gate.losses));
    text(facts.switches.value, count(gate.switches ?? 0));
    text(facts.width.value, count(gate.width_bucket));
    text(facts.depth.value, count(gate.depth));
    text(ageLine, `updated ${age(at - state.gateAt)}`);
    list(
      log,
      state.gateLog.toReversed(),
      (entry) => entry.time,
      () => h("tr", {}, h("th", { scope: "row" }), h("td"), h("td"), h("td")),
      (row, entry) =>
        [clock(entry.time), entry.mode, entry.arm, words.gate[entry.reason] ?? entry.reason].forEach((value, index) =>
          text(row.cells[index], value),
        ),
    );
  }

  const head = (labels) =>
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        labels.map(([label, side]) => h("th", { scope: "col", class: side, text: label })),
      ),
    );
  content.append(
    h(
      "section",
      { class: "card", "aria-label": "Decision" },
      verdict,
      why,
      mode,
      h(
        "dl",
        { class: "facts" },
        Object.values(facts).map(({ element }) => element),
      ),
      ageLine,
    ),
    h(
      "section",
      { class: "card", "aria-labelledby": "arms-title" },
      h("h3", { id: "arms-title", text: "The arms" }),
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Arms" },
        h(
          "table",
          { class: "grid" },
          h("caption", { class: "hidden", text: "Arms" }),
          head([
            ["Arm", "left"],
            ["tok/s", "right"],
            ["deviation, tok/s", "right"],
            ["Speed and spread", "left"],
            ["age, tok", "right"],
            ["Measured", "left"],
          ]),
          arms,
        ),
      ),
    ),
    h(
      "section",
      { class: "card", "aria-labelledby": "gate-log-title" },
      h("h3", { id: "gate-log-title", text: "Decisions that changed something" }),
      h(
        "div",
        { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Gate decisions" },
        h(
          "table",
          { class: "grid" },
          h("caption", { class: "hidden", text: "Gate decisions" }),
          head([
            ["Time", "left"],
            ["Prefers", "left"],
            ["Ran", "left"],
            ["Why", "left"],
          ]),
          log,
        ),
      ),
    ),
  );
  return { element: h("div", { class: "stack" }, empty, content), render, everyMs: 250 };
}
