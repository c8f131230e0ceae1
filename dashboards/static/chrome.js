// The frame of the page: condition, banner, progress, theme, messages, meanings; right even while figures are paused.

import { attr, h, show, text } from "./dom.js";
import { age, bytes, count, span } from "./format.js";
import { condition } from "./state.js";

const THEME_KEY = "metrale-theme";
const MESSAGE_MS = 8000;
const UNSURE = ["disconnected", "stale", "refused", "failed"];

export const $ = (id) => document.getElementById(id);

/** `connectedAt` is when this page began to wait for the model. */
export function drawChrome(state, at, connectedAt) {
  const word = condition(state, at);
  attr(document.documentElement, "data-condition", word);
  attr(document.body, "data-faded", UNSURE.includes(word) ? "" : null);
  const title = word === "live" ? "Metrale" : `Metrale, ${word}`;
  if (document.title !== title) document.title = title;
  document.querySelector(".lamp").classList.toggle("paused", state.paused);
  text($("condition"), state.paused && word === "live" ? "paused" : word);
  text($("model"), state.facts ? state.facts.model : "");
  text($("device"), state.facts ? `${state.facts.device}, ${state.facts.dtype}` : "");
  attr($("pause"), "aria-pressed", state.paused ? "true" : "false");
  text($("pause-word"), state.paused ? "Resume" : "Pause");
  const banner = bannerWords(state, word, at, connectedAt);
  show($("banner"), Boolean(banner));
  text($("banner-words"), banner?.[0] ?? "");
  text($("banner-detail"), banner?.[1] ?? "");
  show($("retry"), word === "disconnected" || word === "refused");
  drawProgress(state.engine, word === "loading" && state.engine.total > 0);
}

function drawProgress(engine, isLoading) {
  show($("progress"), isLoading);
  if (!isLoading) return;
  $("progress").max = engine.total;
  $("progress").value = engine.done;
}

/** What is wrong, and a detail that changes every second and is therefore not read aloud each time. */
function bannerWords(state, word, at, connectedAt) {
  const { link, engine, statsAt, pausedAt } = state;
  const again = link.status === "waiting" ? `Trying again in ${untilRetry(link, at)}.` : "Connecting …";
  const shownAge = statsAt ? ` What you see is ${span(Math.floor(at - statsAt))} old.` : "";
  const words = {
    connecting: link.status === "waiting" ? ["No connection yet.", again] : ["Connecting …"],
    disconnected: [link.message || "The connection was lost.", `${again}${shownAge}`],
    refused: [link.message],
    failed: [engine.message || "The engine failed; the log of the server says why."],
    loading: loadingWords(engine, at - connectedAt),
    stale: ["No new figures, though the connection stands.", `The last came ${age(at - statsAt)}.`],
  }[word];
  if (words) return words;
  const paused = "Paused; figures are still collected, and levers, chat and SQL go on.";
  if (state.paused) return [paused, `Paused ${age(at - pausedAt)}.`];
  if (word === "replay") return [`Replay of ${state.replay.run}: these figures are of the past.`];
  return state.role === "read" ? ["This access may read, not change anything."] : null;
}

const untilRetry = (link, at) => span(Math.max(0, Math.ceil(link.retryAt - at)));

function loadingWords(engine, waited) {
  const words = engine.stage ? `The model is loading: ${engine.stage}.` : "The model is loading.";
  if (!engine.total) return [words, `This page has waited for ${span(Math.floor(waited))}.`];
  const isBytes = engine.unit === "bytes";
  const [done, total] = [engine.done, engine.total].map(isBytes ? bytes : count);
  return [words, `${done} of ${total}${isBytes ? "" : ` ${engine.unit}`}`];
}

/** Dark to light and back; theme.js applies the choice before the next first paint. */
export function toggleTheme() {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  const theme = isDark ? "light" : "dark";
  attr(document.documentElement, "data-theme", theme);
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
}

let messageTimer = 0;

/** A sentence in the corner, read aloud, gone after a while. */
export function say(words) {
  text($("message"), words);
  show($("message"), true);
  clearTimeout(messageTimer);
  messageTimer = setTimeout(() => show($("message"), false), MESSAGE_MS);
}

export function fillGlossary({ figures, lanes }) {
  const entry = (term, means) => h("div", {}, h("dt", { text: term }), h("dd", { text: means }));
  $("glossary").append(
    ...Object.values(figures).map(({ title, unit, means }) => entry(unit ? `${title}, ${unit}` : title, means)),
    ...Object.entries(lanes).map(([name, { code, means }]) => entry(`${name} (${code})`, means)),
  );
}
