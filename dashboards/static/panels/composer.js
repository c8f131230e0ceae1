// The composer: message, buttons, and the settings that go with every question.

import { attr, field, h, show } from "../dom.js";
import { mayControl } from "../state.js";

const TALLEST_PX = 220;
const PROBABILITIES = [
  ["-1", "nothing"],
  ["0", "its own"],
  ["5", "and 5 others"],
];

/** `onSend(content)` answers whether the question left; only then the field is emptied. */
export function createComposer({ onSend, onStop, onProvenance, onNew }) {
  const input = h("textarea", {
    id: "chat-input",
    rows: "2",
    "aria-label": "Message",
    "aria-describedby": "chat-keys",
    on: { keydown: onKey, input: grow },
  });
  const send = h("button", { type: "submit", class: "primary", text: "Send" });
  const stop = h("button", { type: "button", text: "Stop", hidden: true, on: { click: onStop } });
  const toggle = h("button", {
    type: "button",
    "aria-pressed": "false",
    "aria-keyshortcuts": "v",
    text: "Provenance",
    on: { click: onProvenance },
  });
  const fresh = h("button", { type: "button", text: "New chat", on: { click: () => (onNew(), input.focus()) } });
  const keys = h("p", { id: "chat-keys", class: "quiet", text: "Enter sends, Shift+Enter a new line, Esc stops" });
  const settings = createSettings();
  const element = h(
    "form",
    { class: "composer", on: { submit: (event) => (event.preventDefault(), submit()) } },
    input,
    h("div", { class: "buttons" }, send, stop, toggle, fresh, keys),
    settings.element,
  );

  function onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  }

  function grow() {
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight + 2, TALLEST_PX)}px`;
  }

  function submit() {
    const content = input.value.trim();
    if (!content || !onSend(content)) return;
    input.value = "";
    grow();
  }

  return {
    element,
    settings,
    focus: () => input.focus(),
    update(state, { isRunning, isProvenance }) {
      const mayAsk = mayControl(state) && state.engine.state === "ready";
      send.disabled = !mayAsk;
      show(stop, isRunning);
      show(send, !isRunning);
      fresh.disabled = isRunning || !state.turns.length;
      input.placeholder = mayAsk ? "Message" : whyNot(state);
      attr(toggle, "aria-pressed", isProvenance ? "true" : "false");
    },
  };
}

function whyNot(state) {
  if (state.link.status !== "open") return "Not connected: what you type is kept";
  if (state.role === "read") return "This access may read, not ask";
  if (state.replay) return "A replay is showing: leave it to chat";
  return "The model is loading";
}

function createSettings() {
  const amount = (id, more) => h("input", { id, type: "number", autocomplete: "off", class: "short", ...more });
  const temperature = amount("chat-temperature", { min: "0", max: "2", step: "0.1", value: "0.7" });
  const topP = amount("chat-top-p", { min: "0", max: "1", step: "0.05", value: "0.95" });
  const limit = amount("chat-limit", { min: "0", step: "1", placeholder: "all" });
  const seed = amount("chat-seed", { step: "1", placeholder: "random" });
  const options = PROBABILITIES.map(([value, text]) => h("option", { value, text, selected: value === "5" }));
  const probabilities = h("select", { id: "chat-probabilities" }, options);
  const speculate = h("input", { id: "chat-speculate", type: "checkbox", checked: true });
  const system = h("textarea", {
    id: "chat-system",
    rows: "2",
    "aria-label": "System prompt",
    placeholder: "System prompt (optional)",
  });
  const row = h(
    "div",
    { class: "bar-row" },
    field(temperature, "Temperature"),
    field(topP, "Top p"),
    field(limit, "At most", "tok"),
    field(seed, "Seed"),
    field(probabilities, "Probability of a token"),
    h("label", { class: "field", for: "chat-speculate" }, speculate, h("span", { text: "may speculate" })),
  );
  return {
    element: h("details", { class: "settings" }, h("summary", { text: "Settings" }), row, system),
    system: () => system.value.trim(),
    /** The parts of a `chat` message. */
    options() {
      const fixed = seed.value.trim() ? { seed: Number(seed.value) } : {};
      const drawn = { temperature: Number(temperature.value) || 0, top_p: Number(topP.value) || 1 };
      const sampling = { ...drawn, logprobs: Number(probabilities.value), ...fixed };
      const limits = { max_tokens: Math.max(0, Number(limit.value) || 0) };
      return { sampling, limits, speculate: speculate.checked };
    },
  };
}
