// Chat: streamed replies as text or as tokens with their provenance, and the live figures and levers beside it.

import { Chart } from "../charts.js";
import { attr, h, list, roving, show, text } from "../dom.js";
import { count, number, percent } from "../format.js";
import { createControl, leverNote } from "../levers.js";
import { renderMarkdown } from "../markdown.js";
import { conversation, lever as find, pendingFor, running } from "../state.js";
import { createInspector, createLegend, renderTokens } from "./provenance.js";

const QUICK = ["drafter", "num_drafts", "mtp_gate", "pipelined_decode", "always_mixed"];

export function createChat({ words, now, getState, getHistory, startReply, stopRequest, dropTurns, clearChat, askLever, onView, say }) {
  let isProvenance = false;
  let isFollowing = true;
  const inspector = createInspector(words, getState);
  const legend = createLegend(words);

  const log = h("div", { class: "turns", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
  const announcer = h("p", { class: "hidden", role: "status" });
  const empty = h("p", { class: "empty", text: "Ask something. While the reply streams, flip a lever on the right and watch the speed." });
  const input = h("textarea", { id: "chat-input", rows: "2", placeholder: "Message", "aria-label": "Message", "aria-describedby": "chat-keys", on: { keydown: onKey, input: grow } });
  const send = h("button", { type: "submit", class: "primary", text: "Send" });
  const stop = h("button", { type: "button", text: "Stop", hidden: true, on: { click: stopAll } });
  const toggle = h("button", { type: "button", "aria-pressed": "false", "aria-keyshortcuts": "v", text: "Provenance", on: { click: () => toggleProvenance() } });
  const fresh = h("button", { type: "button", text: "New chat", on: { click: () => (clearChat(), input.focus()) } });
  const setting = (id, label, attributes, unit) => {
    const field = h("input", { id, type: "number", autocomplete: "off", class: "short", ...attributes });
    return { field, element: h("label", { class: "field", for: id }, h("span", { text: label }), field, unit && h("span", { class: "unit", text: unit })) };
  };
  const temperature = setting("chat-temperature", "Temperature", { min: "0", max: "2", step: "0.1", value: "0.7" });
  const limit = setting("chat-limit", "At most", { min: "0", step: "1", placeholder: "all" }, "tok");
  const seed = setting("chat-seed", "Seed", { step: "1", placeholder: "random" });
  const alternatives = h("select", { id: "chat-alternatives" }, [["-1", "nothing"], ["0", "its own"], ["5", "and 5 others"]].map(([value, label]) => h("option", { value, text: label, selected: value === "5" })));
  const speculate = h("input", { id: "chat-speculate", type: "checkbox", checked: true });
  const system = h("textarea", { id: "chat-system", rows: "2", "aria-label": "System prompt", placeholder: "System prompt (optional)" });
  const settings = h(
    "details",
    { class: "settings" },
    h("summary", { text: "Settings" }),
    h("div", { class: "bar-row" }, temperature.element, limit.element, seed.element, h("label", { class: "field", for: "chat-alternatives" }, h("span", { text: "Probability of a token" }), alternatives), h("label", { class: "field", for: "chat-speculate" }, speculate, h("span", { text: "may speculate" }))),
    system,
  );
  const form = h(
    "form",
    { class: "composer", on: { submit: (event) => (event.preventDefault(), submit()) } },
    input,
    h("div", { class: "buttons" }, send, stop, toggle, fresh, h("p", { id: "chat-keys", class: "quiet", text: "Enter sends, Shift+Enter a new line, Esc stops" })),
    settings,
  );
  const side = createSide({ askLever, getHistory, now });

  log.addEventListener("scroll", () => (isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < 40));
  roving(log, ".tok", { onFocus: (element) => inspector.show(element) });
  log.addEventListener("pointerover", (event) => {
    const element = event.target.closest?.(".tok");
    if (element) inspector.show(element);
  });

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  }

  function grow() {
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight + 2, 220)}px`;
  }

  function stopAll() {
    for (const turn of running(getState())) stopRequest(turn.id);
  }

  function options() {
    const seedWords = seed.field.value.trim();
    return {
      sampling: { temperature: Number(temperature.field.value) || 0, logprobs: Number(alternatives.value), ...(seedWords ? { seed: Number(seedWords) } : {}) },
      limits: { max_tokens: Math.max(0, Number(limit.field.value) || 0) },
      speculate: speculate.checked,
    };
  }

  function submit() {
    const content = input.value.trim();
    if (!content) return;
    if (running(getState()).length) return say("A reply is still running: stop it first (Esc).");
    if (startReply(content, conversation(getState(), system.value.trim()), options())) {
      input.value = "";
      grow();
      isFollowing = true;
    }
    return undefined;
  }

  function regenerate(turn) {
    const { turns } = getState();
    const question = turns[turns.findIndex((entry) => entry.id === turn.id) - 1];
    if (!question) return;
    dropTurns(question.id);
    startReply(question.text, conversation(getState(), system.value.trim()), options());
  }

  function toggleProvenance() {
    isProvenance = !isProvenance;
    attr(toggle, "aria-pressed", isProvenance ? "true" : "false");
    onView();
  }

  function make(turn) {
    const body = h("div", { class: "words" });
    if (turn.role === "user") return h("article", { class: "turn user", "aria-label": "You" }, body);
    const tokens = h("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of this reply; arrow keys move", "aria-orientation": "horizontal" });
    const line = h("p", { class: "reply-line" });
    const error = h("p", { class: "error", role: "alert" });
    const copy = h("button", { type: "button", class: "link", text: "Copy", "aria-label": "Copy reply", on: { click: () => copyText(turn.id) } });
    const again = h("button", { type: "button", class: "link", text: "Regenerate", on: { click: () => regenerate(turn) } });
    const element = h("article", { class: "turn reply", "aria-label": "Reply" }, body, tokens, error, h("div", { class: "foot" }, line, h("span", { class: "actions" }, copy, again)));
    return Object.assign(element, { parts: { body, tokens, line, error, actions: element.querySelector(".actions") } });
  }

  function copyText(id) {
    const turn = getState().turns.find((entry) => entry.id === id);
    const copied = navigator.clipboard?.writeText(turn.text);
    if (copied) copied.then(() => say("Copied."), () => say("The browser did not allow copying."));
    else say("Copying needs a secure address (https or localhost).");
  }

  function update(element, turn) {
    if (turn.role === "user") return text(element.firstChild, turn.text);
    if (element.turn === turn && element.mode === isProvenance && turn.status === "done") return undefined;
    Object.assign(element, { turn, mode: isProvenance });
    const { body, tokens, line, error, actions } = element.parts;
    const asTokens = isProvenance && turn.tokens.length > 0;
    show(body, !asTokens);
    show(tokens, asTokens);
    if (asTokens) renderTokens(tokens, turn, words);
    else renderMarkdown(body, turn.text);
    attr(element, "data-status", turn.status);
    text(line, replyLine(turn, words, now()));
    text(error, turn.error ?? "");
    show(error, Boolean(turn.error));
    show(actions, turn.status === "done" || turn.status === "refused");
    return undefined;
  }

  let lastStatus = "";
  function announce(state) {
    const turn = state.turns.at(-1);
    const status = turn ? `${turn.id}${turn.status}` : "";
    if (status === lastStatus) return;
    lastStatus = status;
    if (turn?.status === "done" && turn.role === "assistant") text(announcer, `Reply ${words.finishes[turn.reason] ?? turn.reason}: ${turn.text.slice(0, 400)}`);
    else if (turn?.status === "streaming") text(announcer, "The reply has begun.");
  }

  function render(state, at) {
    const isRunning = running(state).length > 0;
    show(empty, !state.turns.length);
    list(log, state.turns, (turn) => turn.id, make, update);
    const mayAsk = state.link.status === "open" && state.engine.state === "ready" && state.role !== "read" && !state.replay;
    send.disabled = !mayAsk;
    show(stop, isRunning);
    show(send, !isRunning);
    fresh.disabled = isRunning || !state.turns.length;
    input.placeholder = mayAsk ? "Message" : whyNot(state);
    show(legend.element, isProvenance);
    show(inspector.element, isProvenance);
    if (isProvenance) legend.update(state.turns);
    announce(state);
    side.render(state, at);
    if (isFollowing) log.scrollTop = log.scrollHeight;
  }

  return {
    element: h("div", { class: "chat" }, h("div", { class: "chat-main" }, empty, log, announcer, form), h("aside", { class: "chat-side", "aria-label": "Beside the chat" }, legend.element, inspector.element, side.element)),
    render,
    repaint: side.repaint,
    stop: stopAll,
    toggleProvenance,
    focus: () => input.focus(),
    isInteractive: true,
  };
}

function whyNot(state) {
  if (state.link.status !== "open") return "Not connected: what you type is kept";
  if (state.role === "read") return "This access may read, not ask";
  if (state.replay) return "A replay is showing: leave it to chat";
  return "The model is loading";
}

/** One line under a reply: speed, time to first token, tokens, drafts, speed-up against measured plain decoding. */
export function replyLine(turn, words, at) {
  if (turn.status === "sent") return "sent";
  if (turn.status === "queued") return `queued, ${count(turn.promptTokens)} prompt tok of ${count(turn.maxContext)}`;
  if (turn.status === "streaming" || turn.status === "stopping") {
    const seconds = at - turn.firstAt;
    const speed = seconds > 0.3 ? `${number((turn.tokens.length - 1) / seconds)} tok/s` : "measuring";
    return `${turn.status === "stopping" ? "stopping, " : ""}${count(turn.tokens.length)} tok, ${speed}`;
  }
  if (turn.status === "refused" || !turn.usage) return "";
  const usage = turn.usage;
  const output = usage.output_tokens ?? 0;
  const parts = [words.finishes[turn.reason] ?? turn.reason];
  if (usage.decode_us && output > 1) parts.push(`${number(((output - 1) * 1e6) / usage.decode_us)} tok/s`);
  if (usage.ttft_us) parts.push(`TTFT ${number(usage.ttft_us / 1000)} ms`);
  const context = turn.maxContext ? `, context ${percent(((usage.prompt_tokens ?? 0) + output) / turn.maxContext)} %` : "";
  parts.push(`${count(output)} tok${context}`);
  parts.push(usage.drafted ? `${count(usage.accepted ?? 0)} of ${count(usage.drafted)} drafts accepted (${percent((usage.accepted ?? 0) / usage.drafted)} %)` : "no drafts");
  parts.push(turn.speedup === null || turn.speedup === undefined ? "speed-up not measured" : `${turn.speedup.toFixed(2)}× plain decoding`);
  if (usage.seed) parts.push(`seed ${usage.seed}`);
  return parts.join(" · ");
}

function createSide({ askLever, getHistory, now }) {
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
  const make = (lever) => {
    const control = createControl(lever.name, { change: (name, value) => askLever(name, value, {}) });
    const note = h("p", { class: "lever-note", role: "status" });
    const element = h("li", { "data-quick": lever.name, title: lever.help }, h("div", { class: "lever-head" }, h("code", { text: lever.name }), control.element), note);
    return Object.assign(element, { control, note });
  };
  const update = (element, { lever, state }) => {
    element.control.update(lever, pendingFor(state, lever.name), state.role === "read" || state.link.status !== "open" || Boolean(state.replay));
    const note = leverNote(state, lever.name, now());
    text(element.note, note?.words ?? "");
    attr(element.note, "data-kind", note?.kind);
  };
  let drawn = 0;
  function render(state) {
    const levers = QUICK.map((name) => find(state, name)).filter(Boolean);
    list(body, levers.map((lever) => ({ lever, state, name: lever.name })), ({ name }) => name, ({ lever }) => make(lever), update);
    if (state.paused || now() - drawn < 0.5) return;
    drawn = now();
    chart.render(getHistory(), 60);
  }
  return { element: h("div", { class: "stack" }, chart.element, h("section", { class: "card", "aria-label": "Quick levers" }, h("h3", { text: "Levers" }), body)), render, repaint: () => chart.repaint() };
}
