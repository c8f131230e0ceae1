// The lever panel: all levers by group, the options of the next change, and the changes made.

import { createChanges } from "./changes.js";
import { createControl, leverNote, tags } from "./control.js";
import { attr, field, h, show, text } from "./dom.js";
import { leverBounds, span } from "./format.js";
import { mayControl, pendingFor } from "./state.js";

export function createLevers(shared) {
  const { actions, now } = shared;
  const rows = new Map();
  const options = createOptions();
  const changes = createChanges(shared);
  const search = h("input", {
    type: "search",
    id: "lever-search",
    placeholder: "name or word",
    autocomplete: "off",
    on: { input: () => filterBy(search.value.trim().toLowerCase()) },
  });
  const groups = h("div", { class: "lever-groups" });
  const change = (name, value) => actions.askLever(name, value, options.take());

  function filterBy(words) {
    for (const { element, lever } of rows.values()) {
      show(element, `${lever.name} ${lever.help} ${lever.group}`.toLowerCase().includes(words));
    }
    for (const group of groups.children) {
      const items = [...group.querySelectorAll("li")];
      show(
        group,
        items.some((item) => !item.hidden),
      );
    }
  }

  function layout(levers) {
    groups.replaceChildren();
    rows.clear();
    for (const group of new Set(levers.map((lever) => lever.group))) {
      const own = levers.filter((lever) => lever.group === group);
      for (const lever of own) rows.set(lever.name, createRow(lever, change));
      const items = own.map((lever) => rows.get(lever.name).element);
      const body = h("ul", { class: "plain" }, items);
      groups.append(h("section", { class: "card", "aria-label": `${group} levers` }, h("h3", { text: group }), body));
    }
  }

  function render(state) {
    if (rows.size !== state.levers.length || state.levers.some((lever) => !rows.has(lever.name))) layout(state.levers);
    for (const lever of state.levers) updateRow(rows.get(lever.name), lever, state, now());
    changes.render(state);
  }

  const bar = h("div", { class: "bar-row" }, options.element, field(search, "Find"));
  return { element: h("div", {}, bar, groups, changes.element), render, everyMs: 250, isInteractive: true };
}

/** What goes with the next change and is then forgotten, so that it does not stick to the one after. */
function createOptions() {
  const amount = (id, placeholder) =>
    h("input", { type: "number", min: "0", step: "1", id, placeholder, class: "short" });
  const seconds = amount("lever-for", "for good");
  const guard = amount("lever-guard", "none");
  const reason = h("input", {
    type: "text",
    id: "lever-reason",
    placeholder: "why (kept in the record)",
    maxlength: "200",
    autocomplete: "off",
  });
  return {
    element: h(
      "fieldset",
      { class: "options" },
      h("legend", { text: "The next change" }),
      field(seconds, "reverts after", "s"),
      field(guard, "or when worse by", "%"),
      field(reason, "because"),
    ),
    take() {
      const taken = {
        for_seconds: Number(seconds.value) || 0,
        guard: (Number(guard.value) || 0) / 100,
        reason: reason.value.trim(),
      };
      for (const input of [seconds, guard, reason]) input.value = "";
      return taken;
    },
  };
}

function createRow(lever, change) {
  const control = createControl(lever.name, { change });
  const note = h("p", { class: "lever-note", role: "status" });
  const source = h("span", { class: "source" });
  const reset = h("button", { type: "button", class: "link", text: "back to default" });
  reset.addEventListener("click", () => change(lever.name, lever.default));
  const unit = h("span", { class: "unit", text: lever.unit ?? "" });
  const help = h("span", { text: `${lever.help} ${leverBounds(lever)}` });
  const element = h(
    "li",
    { class: "lever", "data-lever": lever.name },
    h("div", { class: "lever-head" }, h("code", { text: lever.name }), tags(lever), unit, control.element),
    h("p", { class: "help" }, help, " · ", source, " ", reset),
    note,
  );
  return { element, control, note, source, reset, lever };
}

function updateRow(row, lever, state, at) {
  const isFixed = lever.applies === "restart" || !mayControl(state);
  row.control.update(lever, pendingFor(state, lever.name), isFixed);
  const note = leverNote(state, lever.name, at);
  text(row.note, note?.words ?? "");
  attr(row.note, "data-kind", note?.kind);
  text(row.source, sourceWords(lever, state));
  show(row.reset, lever.value !== lever.default && !isFixed);
  attr(row.element, "data-changed", lever.value !== lever.default ? "" : null);
}

function sourceWords(lever, state) {
  const words = lever.source === "default" ? "default" : `set by ${lever.source}`;
  const expires = state.events.findLast((event) => event.name === lever.name)?.expires ?? 0;
  const left = expires - Date.now() / 1000;
  return left > 0 ? `${words}, reverts in ${span(Math.round(left))}` : words;
}
