// Levers: edit in place, pending until the engine reports the change, then the history with undo and effect.

import { attr, h, list, show, text } from "./dom.js";
import { clock, leverBounds, leverValue, number, percent, span } from "./format.js";
import { lever as find, pendingFor } from "./state.js";

const GIVE_UP_S = 10;

/** What a typed value stands for on the wire: a number or word; the engine alone judges whether it is allowed. */
export function typedValue(lever, raw) {
  const words = raw.trim();
  if (lever.kind === "bool") return words === "on" || words === "true";
  if (lever.none_word && words.toLowerCase() === lever.none_word) return -1;
  if (lever.kind === "int" || lever.kind === "float") return words !== "" && Number.isFinite(Number(words)) ? Number(words) : words;
  return words;
}

/** One editable lever; used in the full table and beside the chat. */
export function createControl(name, { change }) {
  let current = null;
  let input = null;
  let isDirty = false;
  const holder = h("span", { class: "control" });

  function build(lever) {
    const label = `${lever.name}, ${lever.bounds}`;
    if (lever.kind === "bool") {
      input = h("button", { type: "button", role: "switch", class: "switch", "aria-label": lever.name, on: { click: () => change(name, !current.value) } });
    } else if (lever.kind === "choice") {
      const options = lever.choices.map((choice) => h("option", { value: choice, text: choice }));
      input = h("select", { "aria-label": label, on: { change: () => change(name, input.value) } }, options);
    } else {
      input = h("input", { type: "text", "aria-label": label, autocomplete: "off", spellcheck: "false", inputmode: lever.kind === "text" ? null : "decimal", on: { keydown: key, change: commit, input: () => (isDirty = true) } });
    }
    holder.replaceChildren(input);
  }

  function key(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      commit();
    }
    if (event.key === "Escape") {
      event.stopPropagation();
      isDirty = false;
      input.value = leverValue(current, current.value);
      input.blur();
    }
    if ((event.key === "ArrowUp" || event.key === "ArrowDown") && current.kind === "int") {
      event.preventDefault();
      const next = Number(input.value) + (event.key === "ArrowUp" ? 1 : -1);
      if (Number.isFinite(next) && next >= current.minimum && next <= current.maximum) {
        input.value = String(next);
        isDirty = true;
      }
    }
  }

  /** Once per edit: leaving the field after Enter must not ask again. */
  function commit() {
    if (!isDirty) return;
    isDirty = false;
    const value = typedValue(current, input.value);
    if (value !== current.value) change(name, value);
  }

  return {
    element: holder,
    /** `pending` is the change on its way, if any: shown as asked for, never as in force. */
    update(lever, pending, disabled) {
      if (!input || current?.kind !== lever.kind) build(lever);
      current = lever;
      const value = pending?.kind === "set" ? pending.value : lever.value;
      const words = typeof value === "string" ? value : leverValue(lever, value);
      if (lever.kind === "bool") {
        attr(input, "aria-checked", words === "on" ? "true" : "false");
        text(input, words);
      } else if (!isDirty && input.value !== words) input.value = words;
      attr(holder, "data-pending", pending ? "" : null);
      attr(input, "aria-busy", pending ? "true" : null);
      input.disabled = disabled;
    },
  };
}

/** The note under a lever: pending, refused, or nothing. */
export function leverNote(state, name, at) {
  const pending = pendingFor(state, name);
  if (pending && at - pending.at > GIVE_UP_S) return { kind: "error", words: "No answer yet; the value shown as in force still holds." };
  if (pending) return { kind: "pending", words: pending.kind === "undo" ? "undo asked for" : "pending" };
  const refusal = state.refusals[name];
  return refusal ? { kind: "error", words: refusal.message } : null;
}

export function createLevers({ askLever, undoLever, getHistory, now }) {
  const rows = new Map();
  let filter = "";
  const seconds = h("input", { type: "number", min: "0", step: "1", id: "lever-for", placeholder: "for good", class: "short" });
  const guard = h("input", { type: "number", min: "0", max: "100", step: "1", id: "lever-guard", placeholder: "none", class: "short" });
  const reason = h("input", { type: "text", id: "lever-reason", placeholder: "why (kept in the record)", maxlength: "200", autocomplete: "off" });
  const search = h("input", { type: "search", id: "lever-search", placeholder: "name or word", autocomplete: "off", on: { input: () => filterBy(search.value) } });
  const field = (input, label, unit) => h("label", { class: "field", for: input.id }, h("span", { text: label }), input, unit && h("span", { class: "unit", text: unit }));
  const options = h(
    "fieldset",
    { class: "options" },
    h("legend", { text: "The next change" }),
    field(seconds, "reverts after", "s"),
    field(guard, "or when worse by", "%"),
    field(reason, "because", ""),
  );
  const groups = h("div", { class: "lever-groups" });
  const body = h("tbody");
  const none = h("p", { class: "empty", text: "No lever was changed since this page connected." });
  const history = h(
    "section",
    { "aria-labelledby": "changes-title" },
    h("h2", { id: "changes-title", text: "Changes" }),
    none,
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Lever changes" },
      h(
        "table",
        { class: "grid" },
        h("caption", { text: "Effect: throughput of the 15 s after against the 15 s before, busy half-seconds only, with a 95 % interval. Observed, not an experiment." }),
        h("thead", {}, h("tr", {}, ["Time", "Lever", "From", "To", "Tick", "By", "Reason", "Effect", ""].map((label) => h("th", { scope: "col" }, label || h("span", { class: "hidden", text: "Undo" }))))),
        body,
      ),
    ),
  );

  function filterBy(words) {
    filter = words.trim().toLowerCase();
    for (const { element, lever } of rows.values()) {
      show(element, !filter || `${lever.name} ${lever.help} ${lever.group}`.toLowerCase().includes(filter));
    }
    for (const group of groups.children) show(group, [...group.querySelectorAll("li")].some((item) => !item.hidden));
  }

  function change(name, value) {
    const more = { for_seconds: Number(seconds.value) || 0, guard: (Number(guard.value) || 0) / 100, reason: reason.value.trim() };
    for (const input of [seconds, guard, reason]) input.value = "";
    askLever(name, value, more);
  }

  function make(lever) {
    const control = createControl(lever.name, { change });
    const note = h("p", { class: "lever-note", role: "status" });
    const source = h("span", { class: "source" });
    const reset = h("button", { type: "button", class: "link", text: "back to default", on: { click: () => change(lever.name, rows.get(lever.name).lever.default) } });
    const element = h(
      "li",
      { class: "lever", "data-lever": lever.name },
      h("div", { class: "lever-head" }, h("code", { text: lever.name }), tags(lever), h("span", { class: "unit", text: lever.unit ?? "" }), control.element),
      h("p", { class: "help" }, h("span", { text: `${lever.help} ${leverBounds(lever)}` }), " · ", source, " ", reset),
      note,
    );
    return { element, control, note, source, reset, lever };
  }

  function layout(levers) {
    groups.replaceChildren();
    rows.clear();
    const names = [...new Set(levers.map((lever) => lever.group))];
    for (const group of names) {
      const items = levers.filter((lever) => lever.group === group).map((lever) => {
        const row = make(lever);
        rows.set(lever.name, row);
        return row.element;
      });
      groups.append(h("section", { class: "card", "aria-label": `${group} levers` }, h("h3", { text: group }), h("ul", { class: "plain" }, items)));
    }
  }

  function render(state) {
    const at = now();
    if (rows.size !== state.levers.length || state.levers.some((lever) => !rows.has(lever.name))) layout(state.levers);
    for (const lever of state.levers) updateRow(rows.get(lever.name), lever, state, at);
    show(none, !state.events.length);
    list(body, state.events.toReversed(), (event) => event.change_id, makeEvent, (row, event) => updateEvent(row, event, state, at));
  }

  function updateRow(row, lever, state, at) {
    row.lever = lever;
    const frozen = lever.applies === "restart" || state.role === "read" || state.link.status !== "open" || Boolean(state.replay);
    row.control.update(lever, pendingFor(state, lever.name), frozen);
    const note = leverNote(state, lever.name, at);
    text(row.note, note?.words ?? "");
    attr(row.note, "data-kind", note?.kind);
    const expires = state.events.findLast((event) => event.name === lever.name)?.expires ?? 0;
    const left = expires ? expires - Date.now() / 1000 : 0;
    text(row.source, `${lever.source === "default" ? "default" : `set by ${lever.source}`}${left > 0 ? `, reverts in ${span(Math.round(left))}` : ""}`);
    show(row.reset, lever.value !== lever.default && !frozen);
    attr(row.element, "data-changed", lever.value !== lever.default ? "" : null);
  }

  function makeEvent(event) {
    const undo = h("button", { type: "button", class: "small", "aria-label": `Undo ${event.name} of ${clock(event.time)}`, text: "Undo", on: { click: () => undoLever(event.change_id, event.name) } });
    return h("tr", {}, h("th", { scope: "row" }), Array.from({ length: 7 }, () => h("td")), h("td", {}, undo));
  }

  function updateEvent(row, event, state) {
    const lever = find(state, event.name);
    const show_ = (value) => (lever ? leverValue(lever, value) : String(value));
    const values = [clock(event.time), event.name, show_(event.old), show_(event.new), number(event.tick), origin(event), event.reason ?? "", effect(event, state, getHistory())];
    values.forEach((value, index) => text(row.cells[index], value));
    row.lastChild.firstChild.disabled = state.role === "read" || state.link.status !== "open" || Boolean(state.replay);
  }

  return {
    element: h(
      "div",
      {},
      h("div", { class: "bar-row" }, options, field(search, "Find", "")),
      groups,
      history,
    ),
    render,
    everyMs: 250,
    isInteractive: true,
  };
}

/** `lossy` and when it applies, as words. */
export function tags(lever) {
  const words = [];
  if (!lever.lossless) words.push(h("span", { class: "tag lossy", title: "May change what the model says", text: "lossy" }));
  if (lever.applies !== "tick") words.push(h("span", { class: "tag", title: lever.applies === "request" ? "For requests admitted from now on" : "Only at the start of the engine", text: lever.applies === "request" ? "new requests" : "restart" }));
  return words;
}

/** Who, and from where when the name of the actor does not already say so. */
const origin = ({ origin: from, actor }) => (!actor ? from : actor.startsWith(from) ? actor : `${from}, ${actor}`);

function effect(event, state, history) {
  const next = state.events.find((other) => other.time > event.time && other.change_id !== event.change_id);
  if (next && next.time - event.time < 5) return "changed again too soon";
  const found = history.effect(event.time, 15, next?.time);
  if (!found) return "too little traffic";
  const sign = found.change >= 0 ? "+" : "−";
  const sure = Math.abs(found.change) > found.spread ? "" : ", within noise";
  return `${sign}${percent(Math.abs(found.change))} % ± ${percent(found.spread)}${sure}`;
}
