// Provenance: tokens coloured and coded by the lane that made them, underlined by draft position, details on focus.

import { laneColour, laneChip } from "../marks.js";
import { attr, h, list, show, text } from "../dom.js";
import { number, percent } from "../format.js";

const turns = new WeakMap();

/** Add the tokens that are not there yet; a reply only ever grows. */
export function renderTokens(parent, turn, words) {
  const have = turns.get(parent)?.count ?? 0;
  const from = have > turn.tokens.length ? 0 : have;
  if (from === 0) parent.replaceChildren();
  for (let index = from; index < turn.tokens.length; index += 1) {
    const token = turn.tokens[index];
    const before = turn.tokens[index - 1];
    if (!before || before.lane !== token.lane)
      parent.append(
        h("span", { class: "code", "aria-hidden": "true", text: words.lanes[token.lane]?.code ?? token.lane }),
      );
    parent.append(span(token, index, before, words));
  }
  turns.set(parent, { count: turn.tokens.length });
  parent.turn = turn;
}

function span(token, index, before, words) {
  const element = h("span", {
    class: before && before.step !== token.step ? "tok step" : "tok",
    role: "option",
    tabindex: index === 0 ? "0" : "-1",
    "aria-selected": "false",
    "data-index": index,
    "data-draft": token.draft || null,
    "data-rejected": token.rejected.length ? "" : null,
    "aria-label": token.text.trim() ? null : spoken(token.text),
    text: token.text.replaceAll("\n", "⏎\n") || "·",
  });
  element.style.backgroundColor = `color-mix(in srgb, var(${laneColour(token.lane)}) 26%, transparent)`;
  return element;
}

const spoken = (raw) => (raw === "" ? "no text yet" : raw.includes("\n") ? "line break" : "space");

const visible = (raw) => (raw ? JSON.stringify(raw) : "held back");

const ordinal = (value) =>
  `${value}${{ 1: "st", 2: "nd", 3: "rd" }[value % 100 > 10 && value % 100 < 14 ? 0 : value % 10] ?? "th"}`;

/** What is known of one token, as label and value pairs. */
function details(token, words, spelled = () => "") {
  const lane = words.lanes[token.lane];
  const named = (id) => `#${id}${spelled(id) ? ` ${visible(spelled(id))}` : ""}`;
  const rows = [
    ["Text", `${visible(token.text)} #${token.id}`],
    ["Lane", `${token.lane}: ${lane?.means ?? ""}`],
    ["Origin", token.draft ? `${ordinal(token.draft)} draft of its step, accepted` : "the model's own token"],
    ["Step", number(token.step)],
    [
      "Probability",
      token.logprob === null
        ? "not asked for"
        : `${percent(Math.exp(token.logprob))} % (log ${token.logprob.toFixed(2)})`,
    ],
  ];
  if (token.top.length)
    rows.push([
      "Alternatives",
      token.top.map(([id, logprob]) => `${named(id)} ${percent(Math.exp(logprob))} %`).join("\n"),
    ]);
  if (token.rejected.length) rows.push(["Refused here", token.rejected.map(named).join(" ")]);
  if (token.gate) rows.push(["Gate then", `${token.gate.arm}: ${words.gate[token.gate.reason] ?? token.gate.reason}`]);
  return rows;
}

export function createInspector(words, getState) {
  const hint = h("p", { class: "empty", text: "Point at a token, or focus one and use the arrow keys." });
  const body = h("dl", { class: "details" });
  let selected = null;

  /** The text of a token id, when the server spelled it or a reply of this page has shown it. */
  function spelled(id) {
    if (getState().spelled[id]) return getState().spelled[id];
    for (const turn of getState().turns) {
      const found = turn.tokens.find((token) => token.id === id && token.text);
      if (found) return found.text;
    }
    return "";
  }

  return {
    element: h(
      "section",
      { class: "card inspector", "aria-label": "Token details", "aria-live": "polite", hidden: true },
      h("h3", { text: "Token" }),
      hint,
      body,
    ),
    show(element) {
      const token = element.parentElement.turn?.tokens[Number(element.dataset.index)];
      if (!token || selected === element) return;
      if (selected) attr(selected, "aria-selected", "false");
      selected = element;
      attr(element, "aria-selected", "true");
      show(hint, false);
      list(
        body,
        details(token, words, spelled).map(([label, value]) => ({ label, value })),
        ({ label }) => label,
        () => h("div", {}, h("dt"), h("dd")),
        (row, { label, value }) => {
          text(row.firstChild, label);
          text(row.lastChild, value);
        },
      );
    },
  };
}

/** The lanes that made the tokens on screen, each with colour, code, share. */
export function createLegend(words) {
  const body = h("ul", { class: "plain" });
  let seen = -1;
  return {
    element: h(
      "section",
      { class: "card token-legend", "aria-label": "Legend", hidden: true },
      h("h3", { text: "Where tokens came from" }),
      body,
      h("p", {
        class: "quiet",
        text: "Underlined: an accepted draft, the deeper the thicker. A bar starts each model step. ˣ: drafts were refused here.",
      }),
    ),
    update(all) {
      const tokens = all.flatMap((turn) => turn.tokens);
      if (tokens.length === seen) return;
      seen = tokens.length;
      const counts = new Map();
      for (const { lane } of tokens) counts.set(lane, (counts.get(lane) ?? 0) + 1);
      const entries = [...counts].sort((left, right) => right[1] - left[1]).map(([lane, count]) => ({ lane, count }));
      list(
        body,
        entries,
        ({ lane }) => lane,
        ({ lane }) =>
          h(
            "li",
            {},
            laneChip(words, lane),
            h("span", { class: "code", text: words.lanes[lane]?.code ?? "" }),
            h("span", { class: "n" }),
          ),
        (row, { count }) => text(row.lastChild, `${percent(count / tokens.length)} %`),
      );
    },
  };
}
