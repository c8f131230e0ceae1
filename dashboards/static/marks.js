// Small marks beside numbers: bars with a spread, and lanes by colour and name.

import { attr, h, share, show, text } from "./dom.js";

/** A horizontal bar of 0 to 1 with its words, for tables. */
export function bar(colourName = "--accent") {
  const fill = h("i", { class: "fill" });
  fill.style.background = `var(${colourName})`;
  const spread = h("i", { class: "spread", hidden: true });
  const element = h("span", { class: "bar", "aria-hidden": "true" }, fill, spread);
  element.set = (value, deviation = null) => {
    share(fill, "width", value);
    show(spread, deviation !== null);
    share(spread, "left", value - deviation);
    share(spread, "right", 1 - value - deviation);
  };
  return element;
}

export const laneColour = (lane) => `--lane-${lane.replaceAll("_", "-")}`;

/** A lane's name with its colour and two-letter code. */
export function laneChip(words, lane) {
  const element = h(
    "span",
    { class: "lane" },
    h("i", { class: "dot", "aria-hidden": "true" }),
    h("span", { class: "name" }),
  );
  element.set = (name) => {
    if (element.lane === name) return;
    element.lane = name;
    element.firstChild.style.background = name ? `var(${laneColour(name)})` : "transparent";
    text(element.lastChild, name || "–");
    attr(element, "title", words.lanes[name]?.means ?? null);
  };
  element.set(lane);
  return element;
}
