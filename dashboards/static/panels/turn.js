// One turn of a conversation: text or tokens, what went wrong, and the line that says what it cost.

import { attr, h, show, text } from "../dom.js";
import { count, number, percent } from "../format.js";
import { renderMarkdown } from "../markdown.js";
import { renderTokens } from "./provenance.js";

const SETTLES_S = 0.3;

/** The element of a turn; `onCopy` and `onAgain` get its id. */
export function createTurn(turn, { onCopy, onAgain }) {
  const body = h("div", { class: "words" });
  if (turn.role === "user") return h("article", { class: "turn user", "aria-label": "You" }, body);
  const tokens = h("div", {
    class: "tokens",
    role: "listbox",
    "aria-label": "Tokens of this reply; arrow keys move",
    "aria-orientation": "horizontal",
  });
  const line = h("p", { class: "reply-line" });
  const error = h("p", { class: "error", role: "alert" });
  const button = (words, act, name) =>
    h("button", { type: "button", class: "link", text: words, "aria-label": name, on: { click: () => act(turn.id) } });
  const copy = button("Copy", onCopy, "Copy reply");
  const actions = h("span", { class: "actions" }, copy, button("Regenerate", onAgain));
  const foot = h("div", { class: "foot" }, line, actions);
  const element = h("article", { class: "turn reply", "aria-label": "Reply" }, body, tokens, error, foot);
  return Object.assign(element, { parts: { body, tokens, line, error, actions } });
}

/** Bring the element up to date; a reply that has ended is left alone. */
export function updateTurn(element, turn, { words, at, isProvenance }) {
  if (turn.role === "user") return text(element.firstChild, turn.text);
  if (element.turn === turn && element.isProvenance === isProvenance && turn.status === "done") return undefined;
  Object.assign(element, { turn, isProvenance });
  const { body, tokens, line, error, actions } = element.parts;
  const asTokens = isProvenance && turn.tokens.length > 0;
  show(body, !asTokens);
  show(tokens, asTokens);
  if (asTokens) renderTokens(tokens, turn, words);
  else renderMarkdown(body, turn.text);
  attr(element, "data-status", turn.status);
  text(line, replyLine(turn, words, at));
  text(error, turn.error ?? "");
  show(error, Boolean(turn.error));
  return show(actions, turn.status === "done" || turn.status === "refused");
}

/** One line under a reply: speed, time to first token, tokens, drafts, speed-up against measured plain decoding. */
export function replyLine(turn, words, at) {
  if (turn.status === "sent") return "sent";
  if (turn.status === "queued") return `queued, ${count(turn.promptTokens)} prompt tok of ${count(turn.maxContext)}`;
  if (turn.status === "streaming" || turn.status === "stopping") return streamingLine(turn, at);
  if (turn.status === "refused" || !turn.usage) return "";
  const { output_tokens: output = 0, decode_us: decode, ttft_us: ttft, seed } = turn.usage;
  return [
    words.finishes[turn.reason] ?? turn.reason,
    decode && output > 1 && `${number(((output - 1) * 1e6) / decode)} tok/s`,
    ttft && `TTFT ${number(ttft / 1000)} ms`,
    `${count(output)} tok${contextWords(turn, output)}`,
    draftWords(turn.usage),
    turn.speedup === null ? "speed-up not measured" : `${turn.speedup.toFixed(2)}× plain decoding`,
    seed && `seed ${seed}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function streamingLine(turn, at) {
  const seconds = at - turn.firstAt;
  const speed = seconds > SETTLES_S ? `${number((turn.tokens.length - 1) / seconds)} tok/s` : "measuring";
  return `${turn.status === "stopping" ? "stopping, " : ""}${count(turn.tokens.length)} tok, ${speed}`;
}

const contextWords = ({ maxContext, usage }, output) =>
  maxContext ? `, context ${percent(((usage.prompt_tokens ?? 0) + output) / maxContext)} %` : "";

const draftWords = ({ drafted = 0, accepted = 0 }) =>
  drafted ? `${count(accepted)} of ${count(drafted)} drafts accepted (${percent(accepted / drafted)} %)` : "no drafts";
