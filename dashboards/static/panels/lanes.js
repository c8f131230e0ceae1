// Lanes: who made the tokens, how often drafts were accepted at each position, and why faster lanes were not taken.

import { bar, laneChip, laneColour } from "../marks.js";
import { h, list, show, text } from "../dom.js";
import { count, number, percent } from "../format.js";
import { sumLanes } from "../state.js";

const share = (part, whole) => (whole ? part / whole : null);

export function createLanes({ words }) {
  let isLifetime = false;
  const scope = h(
    "fieldset",
    { class: "segments" },
    h("legend", { class: "quiet", text: "Counted over" }),
    [
      ["window", "last 30 s"],
      ["lifetime", "since this page connected"],
    ].map(([value, label]) =>
      h(
        "label",
        {},
        h("input", {
          type: "radio",
          name: "scope",
          value,
          checked: value === "window",
          on: { change: () => (isLifetime = value === "lifetime") },
        }),
        h("span", { text: label }),
      ),
    ),
  );
  const heads = [
    "Lane",
    "Share of tokens",
    "Tokens",
    "Tokens/step",
    "Steps",
    "Time, s",
    "tok/s in lane",
    "Drafted",
    "Accepted, %",
  ];
  const body = h("tbody");
  const positions = h("tbody");
  const refusals = h("ul", { class: "plain refusals" });
  const noLanes = h("p", { class: "empty", text: "No step in this time." });
  const noDrafts = h("p", { class: "empty", text: "Nothing was drafted in this time." });
  const noRefusals = h("p", { class: "empty", text: "No faster lane was refused at the last decode step." });

  function makeLane({ name }) {
    const share_ = bar(laneColour(name));
    const row = h(
      "tr",
      {},
      h("th", { scope: "row" }, laneChip(words, name)),
      h("td", { class: "bar-cell" }, share_, h("span", { class: "n" })),
      heads.slice(2).map(() => h("td", { class: "right" })),
    );
    row.share = share_;
    return row;
  }

  function updateLane(row, { lane, whole }) {
    const part = share(lane.tokens, whole) ?? 0;
    row.share.set(part);
    text(row.cells[1].lastChild, `${percent(part)} %`);
    [
      count(lane.tokens),
      share(lane.tokens, lane.steps)?.toFixed(2) ?? "–",
      count(lane.steps),
      number(lane.seconds),
      number(share(lane.tokens, lane.seconds)),
      count(lane.drafted),
      percent(share(lane.accepted, lane.drafted)),
    ].forEach((value, index) => text(row.cells[index + 2], value));
  }

  function makePosition({ lane }) {
    const accepted = bar(laneColour(lane));
    const row = h(
      "tr",
      {},
      h("th", { scope: "row" }, laneChip(words, lane)),
      h("td", { class: "right" }),
      h("td", { class: "bar-cell" }, accepted, h("span", { class: "n" })),
      h("td", { class: "right" }),
      h("td", { class: "right" }),
    );
    row.accepted = accepted;
    return row;
  }

  function updatePosition(row, entry) {
    const part = share(entry.accepted, entry.drafted) ?? 0;
    row.accepted.set(part);
    text(row.cells[1], entry.position);
    text(row.cells[2].lastChild, `${percent(part)} %`);
    text(row.cells[3], count(entry.accepted));
    text(row.cells[4], count(entry.drafted));
  }

  function render(state) {
    const lanes = isLifetime ? state.totals.lanes : sumLanes(state.recent);
    const names = Object.keys(words.lanes).filter((name) => lanes[name]?.steps);
    const whole = names.reduce((sum, name) => sum + lanes[name].tokens, 0);
    list(
      body,
      names.map((name) => ({ name, lane: lanes[name], whole })),
      ({ name }) => name,
      makeLane,
      updateLane,
    );
    show(noLanes, !names.length);
    const entries = names.flatMap((lane) =>
      lanes[lane].drafted_at
        .map((drafted, index) => ({
          lane,
          position: index + 1,
          drafted,
          accepted: lanes[lane].accepted_at[index] ?? 0,
        }))
        .filter((entry) => entry.drafted),
    );
    list(positions, entries, (entry) => `${entry.lane}${entry.position}`, makePosition, updatePosition);
    show(noDrafts, !entries.length);
    const refused = Object.entries(state.stats?.refusals ?? {});
    list(
      refusals,
      refused,
      ([lane]) => lane,
      ([lane]) => h("li", {}, laneChip(words, lane), h("span")),
      (element, [, reason]) =>
        text(
          element.lastChild,
          words.refusals[reason] ? `not taken: ${words.refusals[reason]}` : `not taken: ${reason}`,
        ),
    );
    show(noRefusals, !refused.length);
  }

  const grid = (caption, labels, rows) =>
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h(
        "table",
        { class: "grid" },
        h("caption", { class: "hidden", text: caption }),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            labels.map((label, index) =>
              h("th", {
                scope: "col",
                class: index && !label.startsWith("Share") && label !== "Accepted" ? "right" : "left",
                text: label,
              }),
            ),
          ),
        ),
        rows,
      ),
    );

  return {
    element: h(
      "div",
      {},
      h("div", { class: "bar-row" }, scope),
      h(
        "section",
        { class: "card", "aria-labelledby": "lanes-title" },
        h("h3", { id: "lanes-title", text: "Work by lane" }),
        grid("Work by lane", heads, body),
        noLanes,
      ),
      h(
        "div",
        { class: "columns" },
        h(
          "section",
          { class: "card", "aria-labelledby": "positions-title" },
          h("h3", { id: "positions-title", text: "Acceptance by draft position" }),
          grid(
            "Acceptance by draft position",
            ["Lane", "Position", "Accepted", "Accepted, n", "Drafted, n"],
            positions,
          ),
          noDrafts,
        ),
        h(
          "section",
          { class: "card", "aria-labelledby": "refusals-title" },
          h("h3", { id: "refusals-title", text: "Why not a faster lane, at the last step" }),
          refusals,
          noRefusals,
        ),
      ),
    ),
    render,
    everyMs: 250,
  };
}
