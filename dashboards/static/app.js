// The entry: connects wire, state and panels, and draws what changed: figures four times a second, never while hidden.

import { Actions } from "./actions.js";
import { forgetColours } from "./charts.js";
import { $, drawChrome, fillGlossary, say, toggleTheme } from "./chrome.js";
import { attr, roving, show, text } from "./dom.js";
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
import { initial, mayControl, received, reduce } from "./state.js";
import { Wire } from "./wire.js";

const FIGURES_MS = 250;
/** The time that a frame may come after the one before, by message; any other message is drawn at once. */
const PACE_MS = { stats: FIGURES_MS, requests: FIGURES_MS, gate: FIGURES_MS, log: FIGURES_MS, delta: 100 };

const now = () => performance.now() / 1000;
const fragment = () => new URLSearchParams(location.hash.slice(1));

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
    this.drawnAt = 0;
    this.panelDrawnAt = 0;
    this.scheduled = 0;
    this.due = 0;
    this.frame = 0;
    this.frozen = null;
    this.connectedAt = 0;
    this.wire = new Wire({
      url: `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${document.documentElement.dataset.wire}`,
      token: () => fragment().get("token") ?? "",
      onMessage: (message) => this.#take(message),
      onLink: (link) => this.#apply({ type: "link", ...link }),
      received: () => received(this.state),
      clock: now,
    });
    this.actions = new Actions({
      wire: this.wire,
      apply: (message) => this.#apply(message),
      say,
      getState: () => this.state,
      forgetPast: () => this.past.clear(),
    });
    this.strip = createStrip({ words });
    this.panels = this.#createPanels();
  }

  open() {
    this.#connectControls();
    this.#keys();
    this.select(fragment().get("view") ?? "overview");
    this.wire.connect();
    setInterval(() => this.#schedule(), 1000);
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    addEventListener("hashchange", () => this.#hashChanged());
  }

  // ---- messages in

  #take(message) {
    if (message.type === "stats") {
      if (message.replay_run) this.past.add(message);
      else this.live.add(message);
    }
    if (message.type === "lever_event") for (const history of [this.live, this.past]) history.mark(message);
    if (message.type === "problem" || message.type === "lever_refused") say(message.message);
    if (message.type === "welcome" && this.state.engine.state !== "loading") this.connectedAt = now();
    if (message.type === "welcome") queueMicrotask(() => this.panels[this.view].opened?.(this.state));
    this.#apply(message);
  }

  #apply(message) {
    this.state = reduce(this.state, message, now());
    this.#schedule(PACE_MS[message.type] ?? 0);
  }

  // ---- drawing

  /** Draw `pace` milliseconds after the last frame, or now when that is past; a sooner wish replaces a later one. */
  #schedule(pace = FIGURES_MS) {
    if (pace === 0) this.isPanelUrgent = true;
    if (document.hidden || this.frame) return;
    const due = this.drawnAt + pace;
    if (this.scheduled && due >= this.due) return;
    clearTimeout(this.scheduled);
    this.due = due;
    this.scheduled = setTimeout(() => {
      this.scheduled = 0;
      this.frame = requestAnimationFrame(() => this.#draw());
    }, Math.max(0, due - performance.now()));
  }

  #draw(isForced = false) {
    this.frame = 0;
    this.drawnAt = performance.now();
    const at = now();
    const panel = this.panels[this.view];
    drawChrome(this.state, at, this.connectedAt);
    if (this.frozen && !isForced) this.strip.renderAge(at);
    else this.strip.render(this.frozen ?? this.state, at);
    if (this.frozen && !panel.isInteractive && !isForced) return;
    if (!isForced && panel.everyMs && this.drawnAt - this.panelDrawnAt < panel.everyMs - 5 && !this.isPanelUrgent)
      return;
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
      say,
      actions: this.actions,
      getState: () => this.state,
      getHistory: () => (this.state.replay ? this.past : this.live),
      getUntil: () => this.frozen?.stats?.time ?? Infinity,
      onView: () => this.#draw(true),
      apply: (message) => this.#apply(message),
      mayControl: () => mayControl(this.state),
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

  // ---- tabs, buttons and keys

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

  #connectControls() {
    $("strip").append(this.strip.element);
    for (const [view, panel] of Object.entries(this.panels)) $(`panel-${view}`).append(panel.element);
    const tabs = document.querySelector('[role="tablist"]');
    roving(tabs, '[role="tab"]', { onFocus: (tab) => tab.dataset.view !== this.view && this.select(tab.dataset.view) });
    tabs.addEventListener("click", (event) => {
      const tab = event.target.closest('[role="tab"]');
      if (tab) this.select(tab.dataset.view);
    });
    $("pause").addEventListener("click", () => this.togglePause());
    $("theme").addEventListener("click", () => this.#switchTheme());
    $("help").addEventListener("click", () => $("keys").showModal());
    $("retry").addEventListener("click", () => this.wire.retry());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    fillGlossary(this.words);
  }

  togglePause() {
    const on = !this.state.paused;
    this.frozen = on ? this.state : null;
    this.#apply({ type: "pause", on });
    this.#draw(true);
  }

  #switchTheme() {
    toggleTheme();
    this.#recolour();
  }

  #recolour() {
    forgetColours();
    for (const panel of Object.values(this.panels)) panel.repaint?.();
  }

  #keys() {
    const views = Object.keys(this.panels);
    const actions = {
      "?": () => $("keys").showModal(),
      p: () => this.togglePause(),
      t: () => this.#switchTheme(),
      v: () => (this.select("chat"), this.panels.chat.toggleProvenance()),
      u: () => this.actions.undoLast(),
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
}

start().catch((error) => {
  console.error(error);
  text($("banner-words"), "The page could not start: its files did not load. Reload it.");
  show($("banner"), true);
});
