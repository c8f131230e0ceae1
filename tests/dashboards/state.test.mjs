// The reducer, the rings, the formats and the connection without a browser: run by `node --test`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { age, leverBounds, leverValue, number, percent, span } from "../../dashboards/static/format.js";
import { History } from "../../dashboards/static/history.js";
import { typedValue } from "../../dashboards/static/control.js";
import { blocks } from "../../dashboards/static/markdown.js";
import { replyLine } from "../../dashboards/static/panels/turn.js";
import { sorted } from "../../dashboards/static/panels/requests.js";
import {
  condition,
  conversation,
  initial,
  isSameArm,
  lever,
  pendingFor,
  rates,
  received,
  reduce,
  sumLanes,
} from "../../dashboards/static/state.js";
import { Wire } from "../../dashboards/static/wire.js";

const NUM_DRAFTS = {
  name: "num_drafts",
  kind: "int",
  value: 3,
  default: 3,
  source: "default",
  minimum: 1,
  maximum: 15,
  unit: "drafts",
};
const WELCOME = {
  type: "welcome",
  version: 1,
  session: "a",
  state: "ready",
  role: "control",
  facts: { model: "m" },
  levers: [NUM_DRAFTS],
};
const QUANTILES = { count: 0 };

const stats = (time, more = {}) => ({
  type: "stats",
  time,
  window_s: 0.1,
  tokens_per_s: 40,
  prefill_tokens_per_s: 0,
  lanes: { plain: { steps: 4, tokens: 4, seconds: 0.1 } },
  ttft: QUANTILES,
  tpot: QUANTILES,
  active: 1,
  waiting: 0,
  kv_used_tokens: 10,
  kv_total_tokens: 100,
  cached_tokens: 5,
  ...more,
});

const run = (messages, state = initial) =>
  messages.reduce((before, message, index) => reduce(before, message, index), state);

test("an unknown message changes nothing", () => {
  assert.equal(reduce(initial, { type: "news_of_a_later_version" }), initial);
});

test("the reducer does not change the state that it is given", () => {
  const before = structuredClone(initial);
  run([WELCOME, stats(1), stats(2), { type: "asked", request_id: "r", content: "hi" }]);
  assert.deepEqual(structuredClone(initial), before);
});

test("a lever keeps its value in force until the event says otherwise", () => {
  let state = run([WELCOME, { type: "lever_asked", change_id: "c", name: "num_drafts", value: 5, kind: "set" }]);
  assert.equal(lever(state, "num_drafts").value, 3);
  assert.equal(pendingFor(state, "num_drafts").value, 5);
  state = reduce(state, {
    type: "lever_event",
    change_id: "c",
    name: "num_drafts",
    old: 3,
    new: 5,
    tick: 9,
    time: 1,
    origin: "web",
  });
  assert.equal(lever(state, "num_drafts").value, 5);
  assert.equal(pendingFor(state, "num_drafts"), undefined);
  assert.equal(state.events.length, 1);
});

test("a refused lever change keeps the sentence and takes the current value", () => {
  const state = run([
    WELCOME,
    { type: "lever_asked", change_id: "c", name: "num_drafts", value: 99, kind: "set" },
    { type: "lever_refused", change_id: "c", name: "num_drafts", message: "It takes 1 to 15.", current: 4 },
  ]);
  assert.equal(state.refusals.num_drafts.message, "It takes 1 to 15.");
  assert.equal(lever(state, "num_drafts").value, 4);
  assert.equal(pendingFor(state, "num_drafts"), undefined);
});

test("deltas grow a reply by the text of their tokens, and done adds what was held back", () => {
  const state = run([
    WELCOME,
    { type: "asked", request_id: "r", content: "hi" },
    { type: "queued", request_id: "r", prompt_tokens: 5, max_context: 100 },
    {
      type: "delta",
      request_id: "r",
      text: "",
      tokens: [
        [1, "plain", 0, 1, "He", null, [], []],
        [2, "ngram", 1, 2, "llo", -0.5, [], [7]],
      ],
    },
    { type: "done", request_id: "r", reason: "stop", usage: {}, text: "!" },
  ]);
  const reply = state.turns.at(-1);
  assert.equal(reply.text, "Hello!");
  assert.deepEqual([reply.tokens[1].lane, reply.tokens[1].draft, reply.tokens[1].rejected], ["ngram", 1, [7]]);
  assert.deepEqual(
    conversation(state, "be brief").map((turn) => turn.role),
    ["system", "user", "assistant"],
  );
});

test("a delta without texts in its tokens takes the text beside them", () => {
  const state = run([
    WELCOME,
    { type: "asked", request_id: "r", content: "hi" },
    { type: "delta", request_id: "r", text: "abc", tokens: [] },
  ]);
  assert.equal(state.turns.at(-1).text, "abc");
});

test("a new session ends the replies of the old one, the same session does not", () => {
  const asked = run([WELCOME, { type: "asked", request_id: "r", content: "hi" }]);
  assert.deepEqual(received(asked), { r: 0 });
  assert.equal(reduce(asked, WELCOME).turns.at(-1).status, "sent");
  const cut = reduce(asked, { ...WELCOME, session: "b" }).turns.at(-1);
  assert.deepEqual([cut.status, cut.reason], ["done", "lost"]);
});

test("frames are kept for thirty seconds and no longer", () => {
  const frames = Array.from({ length: 2000 }, (_, index) => stats(index / 10));
  const state = run([WELCOME, ...frames]);
  assert.ok(state.recent.length <= 301, `${state.recent.length}`);
  assert.equal(state.totals.frames, 2000);
  assert.equal(state.totals.lanes.plain.tokens, 8000);
});

test("rates are weighted by the time that a frame covers", () => {
  const state = run([
    WELCOME,
    stats(1, { tokens_per_s: 10, window_s: 0.5 }),
    stats(2, { tokens_per_s: 70, window_s: 1 }),
  ]);
  assert.equal(rates(state, 10).tokens, 50);
});

test("lanes add up position by position", () => {
  const frame = {
    lanes: { mtp: { steps: 1, tokens: 3, drafted: 3, accepted: 2, drafted_at: [1, 1, 1], accepted_at: [1, 1] } },
  };
  const { mtp } = sumLanes([frame, frame]);
  assert.deepEqual([mtp.tokens, mtp.drafted_at, mtp.accepted_at], [6, [2, 2, 2], [2, 2]]);
});

test("the condition names what the figures are worth", () => {
  const open = run([WELCOME, stats(1)]);
  assert.equal(condition(initial, 0), "connecting");
  assert.equal(condition(open, 1.5), "live");
  assert.equal(condition(open, 60), "stale");
  assert.equal(condition(reduce(open, { type: "link", status: "waiting" }), 2), "disconnected");
  assert.equal(condition(reduce(open, { type: "link", status: "refused" }), 2), "refused");
  assert.equal(condition(reduce(open, { type: "load", state: "failed" }), 2), "failed");
});

test("a replay shows only figures of the past, and its end only those of the present", () => {
  const start = { type: "replay_asked", action: "start", run: "r", speed: 1, position: 0 };
  let state = run([WELCOME, stats(1000), start]);
  assert.equal(state.stats, null);
  state = reduce(state, stats(1001));
  assert.equal(state.stats, null);
  state = reduce(state, stats(5, { replay_run: "r", replay_position: 4 }));
  assert.deepEqual([state.stats.time, state.replay.position], [5, 4]);
  assert.equal(reduce(state, { type: "requests", time: 1001, rows: [1] }).requests.length, 0);
  state = reduce(state, { type: "replay_asked", action: "stop", run: "" });
  assert.equal(reduce(state, stats(6, { replay_run: "r" })).stats, null);
  assert.equal(reduce(state, stats(1002)).stats.time, 1002);
});

test("the history keeps its size and its means", () => {
  const history = new History(["plain"], { binSeconds: 0.5, bins: 100 });
  for (let index = 0; index < 5000; index += 1) history.add(stats(index / 10));
  assert.equal(history.length, 100);
  const window = history.window(["tokens", "lane.plain"], 60, { points: 10 });
  assert.ok(window.time.length <= 10);
  assert.ok(window.tokens.every((value) => Math.abs(value - 40) < 1e-3));
});

test("the history leaves a gap where no frame came, and ends where it is told", () => {
  const history = new History(["plain"]);
  for (const time of [1, 2, 60, 61]) history.add(stats(time));
  assert.deepEqual(
    history.window(["tokens"], 100).tokens.map((value) => value && Math.round(value)),
    [40, 40, null, 40, 40],
  );
  assert.deepEqual(history.window(["tokens"], 100, { until: 10 }).time, [1, 2]);
});

test("frames far apart that cover the time between them leave no gap", () => {
  const history = new History(["plain"]);
  for (const time of [10, 20, 30]) history.add(stats(time, { window_s: 10 }));
  assert.deepEqual(history.window(["tokens"], 100).time, [10, 20, 30]);
});

test("a step back in time starts the history afresh", () => {
  const history = new History(["plain"]);
  for (const time of [100, 101, 5, 6]) history.add(stats(time));
  assert.deepEqual(history.window(["tokens"], 1000).time, [5, 6]);
});

test("the effect of a change is the ratio of means with its interval, and none without traffic", () => {
  const history = new History(["plain"]);
  for (let time = 0; time < 20; time += 0.5)
    history.add(stats(time, { tokens_per_s: (time < 10 ? 40 : 60) + (time % 1) }));
  const effect = history.effect(10);
  assert.ok(Math.abs(effect.change - 0.5) < 0.03 && effect.spread < 0.05, JSON.stringify(effect));
  assert.equal(history.effect(0), null);
});

test("numbers keep three digits and say when there is none", () => {
  assert.deepEqual(
    [number(48.123), number(0.5), number(1234.6), number(3), number(null), number(9.9999)],
    ["48.1", "0.50", "1,235", "3", "–", "10.0"],
  );
  assert.deepEqual([percent(0.0042), percent(0.5), percent(undefined)], ["0.42", "50", "–"]);
  assert.deepEqual(
    [span(4), span(4.25), span(75), span(3700), age(0.2), age(5.7)],
    ["4 s", "4.3 s", "1 min 15 s", "1 h 1 min", "just now", "5 s ago"],
  );
});

test("lever words and typed values agree", () => {
  const budget = { name: "think_budget", kind: "int", none_word: "none", minimum: 0, maximum: 1000000, unit: "tokens" };
  assert.equal(leverValue(budget, -1), "none");
  assert.equal(typedValue(budget, "None"), -1);
  assert.equal(typedValue(budget, "12"), 12);
  assert.equal(typedValue(budget, "twelve"), "twelve");
  assert.equal(leverBounds(budget), "0 to 1,000,000 tokens or none");
  assert.equal(leverBounds({ kind: "bool" }), "");
});

test("an arm with its number of drafts is the same arm", () => {
  assert.ok(isSameArm("mtp:2", "mtp") && !isSameArm("mtp:2", "self:2"));
});

test("requests sort by any column, ties by id", () => {
  const rows = [
    { request_id: "b", age_s: 1 },
    { request_id: "a", age_s: 1 },
    { request_id: "c", age_s: 0 },
  ];
  assert.deepEqual(
    sorted(rows, "age_s", true).map((row) => row.request_id),
    ["a", "b", "c"],
  );
});

test("a speed-up below one is shown as it is", () => {
  const turn = {
    status: "done",
    reason: "stop",
    usage: { output_tokens: 11, decode_us: 1e6, drafted: 4, accepted: 1 },
    speedup: 0.94,
    tokens: [],
  };
  const line = replyLine(turn, { finishes: { stop: "finished" } }, 0);
  assert.match(line, /10 tok\/s/);
  assert.match(line, /1 of 4 drafts accepted \(25 %\)/);
  assert.match(line, /0\.94× plain decoding/);
});

test("markdown is cut into blocks, an open fence being one of them", () => {
  const kinds = blocks("# Title\n\ntext\nmore\n- a\n- b\n\n1. x\n\n```py\nif a:\n\n    b\n").map((block) => block.kind);
  assert.deepEqual(kinds, ["heading", "paragraph", "bullets", "numbers", "code"]);
});

// ---- the connection, on a socket and a clock of the test

function rig(token = "") {
  const sockets = [];
  const timers = [];
  const seen = { links: [], messages: [] };
  let time = 0;
  class Socket {
    constructor(url) {
      Object.assign(this, { url, sent: [], readyState: 1 });
      sockets.push(this);
    }
    send(text) {
      this.sent.push(JSON.parse(text));
    }
    close() {
      this.readyState = 3;
    }
  }
  const wire = new Wire({
    url: "ws://test/wire",
    token: () => token,
    onMessage: (message) => seen.messages.push(message),
    onLink: (link) => seen.links.push(link),
    received: () => ({ r: 3 }),
    clock: () => time,
    Socket,
    later: (act, ms) => timers.push({ act, at: time + ms / 1000 }),
    cancel: (id) => id && (timers[id - 1].act = null),
  });
  const pass = (seconds) => {
    const end = time + seconds;
    for (;;) {
      const next = timers.filter((timer) => timer.act && timer.at <= end).sort((left, right) => left.at - right.at)[0];
      if (!next) break;
      time = next.at;
      const { act } = next;
      next.act = null;
      act();
    }
    time = end;
  };
  const greet = (message = WELCOME) => {
    sockets.at(-1).onopen();
    sockets.at(-1).onmessage({ data: JSON.stringify(message) });
  };
  return { wire, sockets, seen, pass, greet };
}

test("hello carries version and token; welcome is answered by a subscription", () => {
  const { wire, sockets, greet } = rig("secret");
  wire.connect();
  greet();
  assert.deepEqual(
    sockets[0].sent.map((message) => message.type),
    ["hello", "subscribe"],
  );
  assert.equal(sockets[0].sent[0].token, "secret");
  assert.ok(!sockets[0].url.includes("secret"));
});

test("a lost connection comes back with growing pauses and resumes", () => {
  const { wire, sockets, seen, pass, greet } = rig();
  wire.connect();
  greet();
  sockets[0].onclose();
  assert.equal(seen.links.at(-1).status, "waiting");
  assert.equal(wire.send({ type: "stop", request_id: "r" }), false);
  pass(1);
  assert.equal(sockets.length, 2);
  sockets[1].onclose();
  sockets.at(-1).onclose?.();
  pass(0.5);
  assert.equal(sockets.length, 2);
  pass(2);
  assert.equal(sockets.length, 3);
  greet();
  const [hello] = sockets[2].sent;
  assert.deepEqual([hello.resume, hello.received], ["a", { r: 3 }]);
});

test("a refusal and another version end it, with a sentence and without trying again", () => {
  for (const answer of [
    { type: "refused", message: "The token is wrong." },
    { ...WELCOME, version: 2 },
  ]) {
    const { wire, sockets, seen, pass, greet } = rig();
    wire.connect();
    greet(answer);
    pass(100);
    assert.equal(sockets.length, 1);
    assert.match(seen.links.at(-1).message, /token is wrong|wire version 1, the server 2/);
    assert.equal(seen.messages.length, 0);
  }
});

test("a server that falls silent is pinged, then given up", () => {
  const { wire, sockets, seen, pass, greet } = rig();
  wire.connect();
  greet();
  pass(7);
  assert.equal(sockets[0].sent.at(-1).type, "ping");
  pass(5);
  assert.match(seen.links.find((link) => link.status === "waiting").message, /not answered/);
});

test("a frame that is not JSON is ignored", () => {
  const { wire, sockets, seen, greet } = rig();
  wire.connect();
  greet();
  sockets[0].onmessage({ data: "{" });
  assert.equal(seen.messages.length, 1);
});
