// The entry: connects wire, state and panels, and draws what changed, at most ten times a second and never while hidden.

import { forgetColours } from "./charts.js";
import { attr, h, roving, show, text } from "./dom.js";
import { age, bytes, count, span } from "./format.js";
import { History } from "./history.js";
import { createLevers } from "./levers.js";
import { createChat } from "./panels/chat.js";
import { createGate } from "./panels/gate.js";
import { createHealth } from "./panels/health.js";
import { createLanes } from "./panels/lanes.js";
import { createOverview } from "./panels/overview.js";
import { createRequests } from "./panels/requests.js";
import { createRuns } from "./panels/runs.js";
import { createSql } from "./panels/sql.js";
import { createStrip } from "./panels/strip.js";
import { condition, initial, received, reduce } from "./state.js";
import { Wire } from "./wire.js";

const FRAME_MS = 100;
const THEME_KEY = "metrale-theme";

const now = () => performance.now() / 1000;
const fragment = () => new URLSearchParams(location.hash.slice(1));
const $ = (id) => document.getElementById(id);

async function start() {
  const answer = await fetch("/static/words.json");
  const words = await answer.json();
  new Page(words).open();
}

class Page {
  constructor(words) {
    this.words = words;
    this.state = initial;
    this.live = new History(Object.keys(words.lanes));
    this.past = new History(Object.keys(words.lanes));
    this.nextId = 0;
    this.prefix = crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
    this.drawnAt = 0;
    this.panelDrawnAt = 0;
    this.scheduled = 0;
    this.frame = 0;
    this.frozen = null;
    this.connectedAt = 0;
    this.strip = createStrip({ words });
    this.panels = this.#createPanels();
    this.wire = new Wire({
      url: `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${document.documentElement.dataset.wire}`,
      token: () => fragment().get("token") ?? "",
      onMessage: (message) => this.#take(message),
      onLink: (link) => this.#apply({ type: "link", ...link }, true),
      received: () => received(this.state),
      clock: now,
    });
  }

  open() {
    this.#chrome();
    this.#keys();
    this.select(fragment().get("view") ?? "overview");
    this.wire.connect();
    setInterval(() => this.#schedule(), 1000);
    document.addEventListener("visibilitychange", () => this.#schedule(true));
    addEventListener("hashchange", () => this.#hashChanged());
  }

  // ---- messages in, requests out

  #take(message) {
    if (message.type === "stats") {
      if (message.replay_run) this.past.add(message);
      else this.live.add(message);
    }
    if (message.type === "lever_event") for (const history of [this.live, this.past]) history.mark(message);
    // Levers get their real values when the engine is ready, and only welcome tells them.
    if (message.type === "load" && message.state === "ready" && this.state.engine.state !== "ready") this.wire.renew();
    if (message.type === "problem") this.say(message.message);
    if (message.type === "lever_refused") this.say(message.message);
    if (message.type === "welcome" && this.state.engine.state !== "loading") this.connectedAt = now();
    if (message.type === "welcome") queueMicrotask(() => this.panels[this.view].opened?.(this.state));
    this.#apply(message, message.type !== "stats" && message.type !== "requests" && message.type !== "gate" && message.type !== "delta");
  }

  #apply(message, isUrgent = false) {
    this.state = reduce(this.state, message, now());
    this.#schedule(isUrgent);
  }

  #id(word) {
    this.nextId += 1;
    return `web-${word}-${this.prefix}-${this.nextId}`;
  }

  #askLever(name, value, more) {
    const change_id = this.#id("lever");
    const expected = this.state.levers.find((lever) => lever.name === name)?.value ?? null;
    this.#apply({ type: "lever_asked", change_id, name, value, kind: "set" }, true);
    if (!this.wire.send({ type: "set_lever", change_id, name, value, expected, ...more })) this.#leverNotSent(change_id, name);
  }

  #undoLever(of, name) {
    const change_id = this.#id("undo");
    this.#apply({ type: "lever_asked", change_id, name, value: null, kind: "undo" }, true);
    if (!this.wire.send({ type: "undo_lever", change_id, of })) this.#leverNotSent(change_id, name);
  }

  #leverNotSent(change_id, name) {
    this.#apply({ type: "lever_refused", change_id, name, message: "Not sent: there is no connection. Nothing was changed." }, true);
  }

  #startReply(content, before, options) {
    const request_id = this.#id("chat");
    const messages = [...before, { role: "user", content }];
    const isSent = this.wire.send({ type: "chat", request_id, messages, conversation_id: `web-${this.prefix}`, ...options });
    if (!isSent) {
      this.say("Not sent: there is no connection.");
      return false;
    }
    this.#apply({ type: "asked", request_id, content }, true);
    return true;
  }

  #stopRequest(request_id) {
    if (this.wire.send({ type: "stop", request_id })) this.#apply({ type: "stop_asked", request_id }, true);
    else this.say("Not stopped: there is no connection.");
  }

  #runQuery(sql, purpose, max_rows) {
    const query_id = this.#id("query");
    this.#apply({ type: "query_asked", query_id, sql, purpose }, true);
    if (!this.wire.send({ type: "query", query_id, sql, max_rows })) {
      this.#apply({ type: "query_result", query_id, error: "Not sent: there is no connection." }, true);
    }
  }

  #controlReplay({ duration = 0, speed = 1, position = 0, ...message }) {
    if (!this.wire.send({ type: "replay", speed, position, ...message })) return this.say("Not sent: there is no connection.");
    if (message.action === "start") this.past.clear();
    return this.#apply({ type: "replay_asked", duration, speed, position, ...message }, true);
  }

  // ---- drawing

  #schedule(isUrgent = false) {
    if (isUrgent) this.isPanelUrgent = true;
    if (document.hidden || this.frame) return;
    const wait = isUrgent ? 0 : Math.max(0, this.drawnAt + FRAME_MS - performance.now());
    if (this.scheduled && !isUrgent) return;
    clearTimeout(this.scheduled);
    this.scheduled = setTimeout(() => {
      this.scheduled = 0;
      this.frame = requestAnimationFrame(() => this.#draw());
    }, wait);
  }

  #draw(isForced = false) {
    this.frame = 0;
    this.drawnAt = performance.now();
    const at = now();
    const panel = this.panels[this.view];
    this.#drawChrome(at);
    if (this.frozen && !isForced) this.strip.renderAge(at);
    else this.strip.render(this.frozen ?? this.state, at);
    if (this.frozen && !panel.isInteractive && !isForced) return;
    if (!isForced && panel.everyMs && this.drawnAt - this.panelDrawnAt < panel.everyMs - 5 && !this.isPanelUrgent) return;
    this.panelDrawnAt = this.drawnAt;
    this.isPanelUrgent = false;
    panel.render(this.#shown(panel), at);
  }

  /** While paused, panels of figures see the state of that moment; what a person works in sees the present. */
  #shown(panel) {
    const { frozen, state } = this;
    return frozen && !panel.isInteractive ? { ...frozen, link: state.link, role: state.role } : state;
  }

  #createPanels() {
    const shared = {
      words: this.words,
      now,
      say: (words) => this.say(words),
      getState: () => this.state,
      getHistory: () => (this.state.replay ? this.past : this.live),
      getUntil: () => this.frozen?.stats?.time ?? Infinity,
      onView: () => this.#draw(true),
      askLever: (name, value, more) => this.#askLever(name, value, more),
      undoLever: (of, name) => this.#undoLever(of, name),
      startReply: (...given) => this.#startReply(...given),
      stopRequest: (id) => this.#stopRequest(id),
      dropTurns: (from) => this.#apply({ type: "turns_dropped", from }, true),
      clearChat: () => this.#apply({ type: "chat_cleared" }, true),
      runQuery: (...given) => this.#runQuery(...given),
      control: (message) => this.#controlReplay(message),
      mayControl: () => this.state.role !== "read" && this.state.link.status === "open" && !this.state.replay,
    };
    return {
      overview: createOverview(shared),
      chat: createChat(shared),
      levers: createLevers(shared),
      requests: createRequests(shared),
      lanes: createLanes(shared),
      gate: createGate(shared),
      sql: createSql(shared),
      runs: createRuns(shared),
      telemetry: createHealth(shared),
    };
  }

  /** What must be right even while the figures are paused: connection, loading, banner, theme. */
  #drawChrome(at) {
    const { state } = this;
    const word = condition(state, at);
    attr(document.documentElement, "data-condition", word);
    document.querySelector(".lamp").classList.toggle("paused", state.paused);
    text($("condition"), state.paused && word === "live" ? "paused" : word);
    document.title = word === "live" ? "Metrale" : `Metrale, ${word}`;
    text($("model"), state.facts ? state.facts.model : "");
    text($("device"), state.facts ? `${state.facts.device}, ${state.facts.dtype}` : "");
    const banner = this.#banner(word, at);
    show($("banner"), Boolean(banner));
    text($("banner-words"), banner?.[0] ?? "");
    text($("banner-detail"), banner?.[1] ?? "");
    show($("retry"), word === "disconnected" || word === "refused");
    const isLoading = word === "loading" && state.engine.total > 0;
    show($("progress"), isLoading);
    if (isLoading) {
      $("progress").max = state.engine.total;
      $("progress").value = state.engine.done;
    }
    attr($("pause"), "aria-pressed", state.paused ? "true" : "false");
    text($("pause-word"), state.paused ? "Resume" : "Pause");
    attr(document.body, "data-faded", ["disconnected", "stale", "refused", "failed"].includes(word) ? "" : null);
  }

  /** What is wrong, and a detail that changes every second and is therefore not read aloud each time. */
  #banner(word, at) {
    const { link, engine, statsAt, pausedAt, replay, role } = this.state;
    const again = link.status === "waiting" ? `Trying again in ${wait(link, at)}.` : "Connecting …";
    const shownAge = statsAt ? ` What you see is ${span(Math.floor(at - statsAt))} old.` : "";
    if (word === "connecting") return link.status === "waiting" ? ["No connection yet.", again] : ["Connecting …"];
    if (word === "disconnected") return [link.message || "The connection was lost.", `${again}${shownAge}`];
    if (word === "refused") return [link.message];
    if (word === "failed") return [engine.message || "The engine failed; the log of the server says why."];
    if (word === "loading") return loadingWords(engine, at - this.connectedAt);
    if (word === "stale") return ["No new figures, though the connection stands.", `The last came ${age(at - statsAt)}.`];
    if (this.frozen) return ["Paused; figures are still collected, and levers, chat and SQL go on.", `Paused ${age(at - pausedAt)}.`];
    if (word === "replay") return [`Replay of ${replay.run}: these figures are of the past.`];
    if (role === "read") return ["This access may read, not change anything."];
    return null;
  }

  // ---- chrome: tabs, keys, theme, messages

  select(view) {
    if (!this.panels[view]) view = "overview";
    this.view = view;
    for (const tab of document.querySelectorAll('[role="tab"]')) {
      const isCurrent = tab.dataset.view === view;
      attr(tab, "aria-selected", isCurrent ? "true" : "false");
      tab.tabIndex = isCurrent ? 0 : -1;
      show($(`panel-${tab.dataset.view}`), isCurrent);
      if (isCurrent) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    const given = fragment();
    given.set("view", view);
    history.replaceState(null, "", `#${given}`);
    this.panels[view].opened?.(this.state);
    this.#draw(true);
  }

  #hashChanged() {
    const view = fragment().get("view");
    if (view && view !== this.view) this.select(view);
    if (this.state.link.status === "refused") this.wire.retry();
  }

  #chrome() {
    $("strip").append(this.strip.element);
    for (const [view, panel] of Object.entries(this.panels)) $(`panel-${view}`).append(panel.element);
    const tabs = document.querySelector('[role="tablist"]');
    roving(tabs, '[role="tab"]', { onFocus: (tab) => tab.dataset.view !== this.view && this.select(tab.dataset.view) });
    tabs.addEventListener("click", (event) => {
      const tab = event.target.closest('[role="tab"]');
      if (tab) this.select(tab.dataset.view);
    });
    $("pause").addEventListener("click", () => this.togglePause());
    $("theme").addEventListener("click", () => this.toggleTheme());
    $("help").addEventListener("click", () => $("keys").showModal());
    $("retry").addEventListener("click", () => this.wire.retry());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    const terms = Object.values(this.words.figures).map(({ title, unit, means }) => h("div", {}, h("dt", { text: unit ? `${title}, ${unit}` : title }), h("dd", { text: means })));
    const lanes = Object.entries(this.words.lanes).map(([name, { code, means }]) => h("div", {}, h("dt", { text: `${name} (${code})` }), h("dd", { text: means })));
    $("glossary").append(...terms, ...lanes);
  }

  togglePause() {
    const on = !this.state.paused;
    this.frozen = on ? this.state : null;
    this.#apply({ type: "pause", on }, true);
    if (!on) this.#draw(true);
  }

  toggleTheme() {
    const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
    const theme = isDark ? "light" : "dark";
    attr(document.documentElement, "data-theme", theme);
    try {
      localStorage.setItem(THEME_KEY, theme);
    } catch {
      // Storage may be forbidden; the choice then lasts as long as the page.
    }
    this.#recolour();
  }

  #recolour() {
    forgetColours();
    for (const panel of Object.values(this.panels)) panel.repaint?.();
  }

  say(words) {
    text($("message"), words);
    show($("message"), true);
    clearTimeout(this.messageTimer);
    this.messageTimer = setTimeout(() => show($("message"), false), 8000);
  }

  #keys() {
    const views = Object.keys(this.panels);
    const actions = {
      "?": () => $("keys").showModal(),
      p: () => this.togglePause(),
      t: () => this.toggleTheme(),
      v: () => (this.select("chat"), this.panels.chat.toggleProvenance()),
      u: () => this.#undoLast(),
      "/": () => (this.select("chat"), this.panels.chat.focus()),
      ...Object.fromEntries(views.map((view, index) => [String(index + 1), () => this.select(view)])),
    };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || $("keys").open) return;
      if (event.key === "Escape") {
        if (this.view === "chat") this.panels.chat.stop();
        return;
      }
      if (event.target.closest("input:not([type=radio]):not([type=checkbox]), textarea, select")) return;
      const action = actions[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    });
  }

  #undoLast() {
    const event = this.state.events.at(-1);
    if (!event) return this.say("No lever was changed since this page connected.");
    if (this.state.role === "read") return this.say("This access may read, not change anything.");
    return this.#undoLever(event.change_id, event.name);
  }
}

const wait = (link, at) => span(Math.max(0, Math.ceil(link.retryAt - at)));

function loadingWords(engine, waited) {
  const words = engine.stage ? `The model is loading: ${engine.stage}.` : "The model is loading.";
  if (!engine.total) return [words, `This page has waited for ${span(Math.floor(waited))}.`];
  const isBytes = engine.unit === "bytes";
  const [done, total] = [engine.done, engine.total].map(isBytes ? bytes : count);
  return [words, `${done} of ${total}${isBytes ? "" : ` ${engine.unit}`}`];
}

start().catch((error) => {
  console.error(error);
  text($("banner-words"), "The page could not start: its files did not load. Reload it.");
  show($("banner"), true);
});
