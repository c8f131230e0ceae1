// One editable lever: shown as asked for while a change is on its way, as in force once the engine says so.

import { attr, h, text } from "./dom.js";
import { leverValue } from "./format.js";
import { pendingFor } from "./state.js";

const GIVE_UP_S = 10;

/** What a typed value stands for on the wire: a number or word; the engine alone judges whether it is allowed. */
export function typedValue(lever, raw) {
  const words = raw.trim();
  if (lever.kind === "bool") return words === "on" || words === "true";
  if (lever.none_word && words.toLowerCase() === lever.none_word) return -1;
  if (lever.kind === "int" || lever.kind === "float")
    return words !== "" && Number.isFinite(Number(words)) ? Number(words) : words;
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
      input = h("button", {
        type: "button",
        role: "switch",
        class: "switch",
        "aria-label": lever.name,
        on: { click: () => change(name, !current.value) },
      });
    } else if (lever.kind === "choice") {
      const options = lever.choices.map((choice) => h("option", { value: choice, text: choice }));
      input = h("select", { "aria-label": label, on: { change: () => change(name, input.value) } }, options);
    } else {
      input = h("input", {
        type: "text",
        "aria-label": label,
        autocomplete: "off",
        spellcheck: "false",
        inputmode: lever.kind === "text" ? null : "decimal",
        on: { keydown: key, change: commit, input: () => (isDirty = true) },
      });
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
  if (pending && at - pending.at > GIVE_UP_S)
    return { kind: "error", words: "No answer yet; the value shown as in force still holds." };
  if (pending) return { kind: "pending", words: pending.kind === "undo" ? "undo asked for" : "pending" };
  const refusal = state.refusals[name];
  return refusal ? { kind: "error", words: refusal.message } : null;
}

/** `lossy` and when it applies, as words. */
export function tags(lever) {
  const words = [];
  if (!lever.lossless)
    words.push(h("span", { class: "tag lossy", title: "May change what the model says", text: "lossy" }));
  if (lever.applies !== "tick")
    words.push(
      h("span", {
        class: "tag",
        title: lever.applies === "request" ? "For requests admitted from now on" : "Only at the start of the engine",
        text: lever.applies === "request" ? "new requests" : "restart",
      }),
    );
  return words;
}
